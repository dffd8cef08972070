"""The operations through NVIDIA Transformer Engine: general_gemm and its multi-tensor kernels.

    resolve -> [offer]

general_gemm changed over releases, so its signature is read, not assumed. The multi-tensor
kernels take positional arguments only. Signatures: transformer_engine/pytorch/cpp_extensions/
gemm.py and pytorch/csrc/extensions/multi_tensor of TransformerEngine at d0067d0da6.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedopt._torch_private import foreach_copy_
from fusedopt.backends import lists
from fusedopt.backends.lists import Launch
from fusedopt.backends.offers import FUNCTIONS, Absent, Adam, Offer, Sgd, StepTensors, asking, load, version_of

PACKAGE = "transformer_engine.pytorch"
GEMM_KEYWORDS = ("layout", "grad", "out", "out_dtype", "accumulate")

OFFERS = ("wgrad_accumulate_", "norm", "scale_cast_", "fused_step_")
"""Functions of the table that an installation with everything in it brings."""

WGRAD_DTYPES = lists.WGRAD_DTYPES
"""fp32 operands TE would multiply in TF32."""

takes = lists.takes
TAKES_FOUND_INF = False
"""Plain multi_tensor_adam does not look at its flag, so whether to step is decided on the host."""

NO_FOUND_INF = "the kernels' flag also rises for finite values whose sum overflows float32"


def offer() -> Offer:
    """Return what the Transformer Engine that is installed here offers, symbol by symbol."""
    version = version_of("transformer_engine")
    try:
        load(PACKAGE)
    except Absent as absent:
        return Offer(version, {}, dict.fromkeys(FUNCTIONS, str(absent)))
    wanted: dict[str, Callable[[], Callable[..., Any]]] = {
        "wgrad_accumulate_": lambda: functools.partial(lists.wgrad_accumulate_, _gemm()),
        "norm": lambda: functools.partial(_norm, *_kernels("l2norm")),
        "scale_cast_": _find_scale_cast,
        "fused_step_": lambda: functools.partial(_fused_step_, *_kernels("adam", "sgd")),
    }
    functions: dict[str, Callable[..., Any]] = {}
    missing: dict[str, str] = {}
    for name in FUNCTIONS:
        try:
            if name not in wanted:
                raise Absent(NO_FOUND_INF)
            functions[name] = wanted[name]()
        except Absent as absent:
            missing[name] = str(absent)
    return Offer(version or "unknown", functions, missing)


def _kernels(*names: str) -> list[Any]:
    """Return ``run(launch, *arguments)`` for each of the multi-tensor kernels of these names."""
    apply, *kernels = load(f"{PACKAGE}.optimizers", "multi_tensor_applier", *(f"multi_tensor_{n}" for n in names))

    def run(kernel: Callable[..., Any], launch: Launch, *arguments: Any) -> Any:
        with lists.device_of(launch.lists[0][0]):
            # The applier rebinds entries of the list of lists that it is given.
            return apply(kernel, lists.flag_for(launch), list(launch.lists), *arguments)

    return [functools.partial(run, kernel) for kernel in kernels]


def _gemm() -> Callable[[Tensor, Tensor, Tensor, bool], None]:
    """Return the weight gradient's GEMM.

    Raises:
        Absent: if this release's general_gemm lacks a parameter, or wants one that is not known here.
    """
    (general_gemm,) = load(f"{PACKAGE}.cpp_extensions", "general_gemm")
    with asking("reading the signature of general_gemm"):
        parameters = inspect.signature(general_gemm).parameters
    lacking = [name for name in GEMM_KEYWORDS if name not in parameters]
    if lacking:
        raise Absent(f"general_gemm of this release has no parameter {', '.join(lacking)}")
    after_operands = list(parameters.values())[2:]
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    wanted = [p.name for p in after_operands if p.default is p.empty and p.kind not in rest]
    unknown = [name for name in wanted if name not in (*GEMM_KEYWORDS, "workspace")]
    if unknown:
        raise Absent(f"general_gemm of this release wants {', '.join(unknown)}, which this adapter does not know")
    get_workspace = _workspace(is_needed="workspace" in wanted) if "workspace" in parameters else None

    def gemm(main_grad: Tensor, grad_output: Tensor, input: Tensor, accumulate: bool) -> None:
        more = {"workspace": get_workspace()} if get_workspace else {}
        given = {"layout": "NT", "grad": True, "out": main_grad, "out_dtype": main_grad.dtype, "accumulate": accumulate}
        general_gemm(input, grad_output, **given, **more)

    return gemm


def _workspace(*, is_needed: bool) -> Callable[[], Tensor] | None:
    """Return what gives older releases' general_gemm its workspace; per device, kept by Transformer Engine."""
    try:
        (get_workspace,) = load(f"{PACKAGE}.module.base", "get_workspace")
        with asking("reading the signature of get_workspace"):
            wanted = [p.name for p in inspect.signature(get_workspace).parameters.values() if p.default is p.empty]
        if wanted:
            raise Absent(f"get_workspace of this release wants {', '.join(wanted)}")
    except Absent as absent:
        if is_needed:
            raise Absent(f"general_gemm of this release wants a workspace, and {absent}") from absent
        return None
    found: Callable[[], Tensor] = get_workspace
    return found


def _find_scale_cast() -> Callable[..., None]:
    (by_number,) = _kernels("scale")
    try:
        (by_tensor,) = _kernels("scale_tensor")
    except Absent:  # older releases
        by_tensor = None
    return functools.partial(_scale_cast_, by_number, by_tensor)


def _norm(
    l2norm: Callable[..., Any], flats: Sequence[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the norm of all elements of ``flats``; see `lists.norm`."""

    def kernel(launch: Launch) -> Tensor:
        total: Tensor = l2norm(launch, False)[0]
        return total

    return lists.norm(kernel, flats, norm_type, dtype)


def _scale_cast_(
    by_number: Callable[..., None],
    by_tensor: Callable[..., None] | None,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    factor: Tensor | None = None,
) -> None:
    """Write ``source * factor`` into each target; see `lists.scale_cast_`. A factor on the device is not read back."""

    def kernel(launch: Launch, factor: Tensor | None) -> None:
        device = launch.lists[0][0].device
        if factor is None:
            by_number(launch, 1.0)
        elif by_tensor is None or (factor.device.type == "cpu" and device.type != "cpu"):
            by_number(launch, float(factor))
        else:
            by_tensor(launch, factor.to(device, torch.float32).view(1))

    is_known = by_tensor is not None or factor is None or factor.device.type == "cpu"
    lists.scale_cast_(kernel if is_known else None, targets, sources, factor)


def _fused_step_(
    adam: Callable[..., None],
    sgd: Callable[..., None],
    rule: Adam | Sgd,
    operands: StepTensors,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make one step of ``rule``: main_params, state and model parameters in one pass.

    SGD's kernel writes float16 model parameters itself; bfloat16 ones follow in a second pass. Betas reach the kernel
    as fp32 numbers: with beta2 = 0.999 its ``1 - beta2`` is 1.3e-5 smaller than torch's, relatively.

    Raises:
        TypeError: for a rule that `takes` denies, a decision on the device, or dtypes that the kernel would misread.
    """
    if not takes(rule) or grad_scale is not None or found_inf is not None:
        raise TypeError(f"TE steps without grad_scale and found_inf, and takes Adam or SGD with momentum; got {rule}")
    lists.check_operands([operands.grads, operands.mains, *operands.states], operands.models)
    if len(operands.states) != (2 if isinstance(rule, Adam) else 1):
        raise ValueError(f"{len(operands.states)} lists of state for {rule}; needed are 2 for Adam and 1 for SGD")
    writes: list[Launch] = []
    if isinstance(rule, Adam):
        read = [operands.grads, operands.mains, *operands.states]
        columns = [operands.grads, operands.models, *operands.states, operands.mains] if operands.models else read
        for launch in lists.launches(columns, lists.numbers_of(operands.steps)):
            mode, bias_correction = int(rule.is_decoupled), 1
            betas = (rule.beta1, rule.beta2)
            adam(launch, rule.lr, *betas, rule.eps, launch.key, mode, bias_correction, rule.weight_decay)
        return
    columns = [operands.grads, operands.mains, *operands.states]
    if operands.models and operands.models[0].dtype is torch.float16:
        columns.append(operands.models)
    elif operands.models:
        writes = lists.launches([operands.models, operands.mains])
    for launch in lists.launches(columns):  # buffers exist, weight decay enters the gradient, gradients are not scaled
        numbers = (rule.weight_decay, rule.momentum, rule.dampening, rule.lr)
        sgd(launch, *numbers, rule.is_nesterov, False, False, 1.0)
    for launch in writes:
        models, mains = launch.lists
        foreach_copy_(models, mains)
