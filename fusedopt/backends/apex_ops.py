"""The operations through NVIDIA apex: its extension modules amp_C and fused_weight_gradient_mlp_cuda.

    resolve -> [offer]

Each extension is there or not by itself, whatever the Python package says, and takes positional
arguments only. Compiled with --use_fast_math: fp32 subnormals count as zero, and division and
square root are off by a few roundings. Signatures: csrc/amp_C_frontend.cpp and csrc/megatron/
fused_weight_gradient_dense.cpp of github.com/NVIDIA/apex at 6424da3b4f.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusedopt._torch_private import foreach_copy_
from fusedopt.backends import lists
from fusedopt.backends.lists import Launch
from fusedopt.backends.offers import FUNCTIONS, Absent, Adam, Offer, Sgd, StepTensors, asking, load, version_of

CHUNK_NUMEL = 65536
"""Elements per thread block; apex.multi_tensor_apply's own choice."""

OFFERS = ("wgrad_accumulate_", "norm", "scale_cast_", "fused_step_")
"""Functions of the table that an installation with everything in it brings."""

WGRAD_DTYPES = lists.WGRAD_DTYPES
takes = lists.takes
TAKES_FOUND_INF = False
"""Plain multi_tensor_adam does not look at its flag, so whether to step is decided on the host."""

BUILD = "built from github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
NO_FOUND_INF = "amp_C's flag also rises for finite values whose sum overflows float32"


def offer() -> Offer:
    """Return what the apex that is installed here offers, symbol by symbol."""
    wanted: dict[str, tuple[str, tuple[str, ...], Callable[..., Any]]] = {
        "wgrad_accumulate_": ("fused_weight_gradient_mlp_cuda", ("wgrad_gemm_accum_fp32",), _wgrad_accumulate_),
        "norm": ("amp_C", ("multi_tensor_l2norm",), _norm),
        "scale_cast_": ("amp_C", ("multi_tensor_scale",), _scale_cast_),
        "fused_step_": ("amp_C", ("multi_tensor_adam", "multi_tensor_sgd"), _fused_step_),
    }
    is_nvidias = _is_nvidias()
    functions: dict[str, Callable[..., Any]] = {}
    missing: dict[str, str] = {}
    for name in FUNCTIONS:
        if name not in wanted:
            missing[name] = NO_FOUND_INF
            continue
        module, symbols, adapt = wanted[name]
        try:
            functions[name] = functools.partial(adapt, *load(module, *symbols))
        except Absent as absent:
            missing[name] = _reason(str(absent), is_nvidias)
    version = version_of("apex") if is_nvidias else None
    return Offer(version or ("unknown" if functions or is_nvidias else None), functions, missing)


def _is_nvidias() -> bool | None:
    """Return whose the package apex is; None without one. Does not import it: another project's may raise anything."""
    if "apex.multi_tensor_apply" in sys.modules:
        return True
    try:
        with asking("looking for apex"):  # ValueError: something in sys.modules that was not imported
            spec = importlib.util.find_spec("apex")
    except Absent:
        return False
    if spec is None:
        return None
    return any((Path(place) / "multi_tensor_apply").is_dir() for place in spec.submodule_search_locations or ())


def _reason(absent: str, is_nvidias: bool | None) -> str:
    if not absent.startswith("no module named"):
        return absent
    if is_nvidias is False:
        return f"{absent}; the \"apex\" installed is another project of that name (PyPI's), NVIDIA's is {BUILD}"
    return f"{absent}; NVIDIA's apex is {BUILD}{', and the one installed was not' if is_nvidias else ''}"


def _wgrad_accumulate_(
    extension: Callable[..., None],
    main_grad: Tensor,
    grad_output: Tensor,
    input: Tensor,
    *,
    accumulate: bool,
    exact: bool = True,
) -> None:
    """Add a linear layer's weight gradient into ``main_grad``; see `lists.wgrad_accumulate_`."""

    def gemm(main_grad: Tensor, grad_output: Tensor, input: Tensor, accumulate: bool) -> None:
        if not accumulate:
            main_grad.zero_()  # the extension always adds
        extension(input, grad_output, main_grad)

    lists.wgrad_accumulate_(gemm, main_grad, grad_output, input, accumulate=accumulate, exact=exact)


def _norm(
    l2norm: Callable[..., Any], flats: Sequence[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the norm of all elements of ``flats``; see `lists.norm`. Squares below 2**-126 count as zero."""

    def kernel(launch: Launch) -> Tensor:
        with lists.device_of(launch.lists[0][0]):
            total: Tensor = l2norm(CHUNK_NUMEL, lists.flag_for(launch), launch.lists, False)[0]
        return total

    return lists.norm(kernel, flats, norm_type, dtype)


def _scale_cast_(
    scale: Callable[..., None], targets: Sequence[Tensor], sources: Sequence[Tensor], factor: Tensor | None = None
) -> None:
    """Write ``source * factor`` into each target; see `lists.scale_cast_`.

    Subnormal products, below 2**-126, are written as zero. A factor on the device goes through torch: the kernel takes
    a number, and to read one off the device would wait for it.
    """

    def kernel(launch: Launch, factor: Tensor | None) -> None:
        number = 1.0 if factor is None else float(factor)
        with lists.device_of(launch.lists[0][0]):
            scale(CHUNK_NUMEL, lists.flag_for(launch), launch.lists, number)

    is_on_host = factor is None or factor.device.type == "cpu"
    lists.scale_cast_(kernel if is_on_host else None, targets, sources, factor)


def _fused_step_(
    adam: Callable[..., None],
    sgd: Callable[..., None],
    rule: Adam | Sgd,
    operands: StepTensors,
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make one step of ``rule``: main_params and state in one pass, then the model parameters, rounded by torch.

    The kernel takes parameters in the gradients' dtype, so it steps the fp32 main_params. Betas reach it as fp32
    numbers: with beta2 = 0.999 its ``1 - beta2`` is 1.3e-5 smaller than torch's, relatively.

    Raises:
        TypeError: for a rule that `takes` denies, a decision on the device, or dtypes that the kernel would misread.
    """
    if not takes(rule) or grad_scale is not None or found_inf is not None:
        raise TypeError(f"apex steps without grad_scale and found_inf, and takes Adam or SGD with momentum; got {rule}")
    columns = [operands.grads, operands.mains, *operands.states]
    lists.check_operands(columns, operands.models)
    if len(operands.states) != (2 if isinstance(rule, Adam) else 1):
        raise ValueError(f"{len(operands.states)} lists of state for {rule}; needed are 2 for Adam and 1 for SGD")
    numbers = lists.numbers_of(operands.steps) if isinstance(rule, Adam) else None
    writes = lists.launches([operands.models, operands.mains]) if operands.models else []
    for launch in lists.launches(columns, numbers):
        flag = lists.flag_for(launch)
        with lists.device_of(launch.lists[0][0]):
            if isinstance(rule, Adam):
                mode, bias_correction = int(rule.is_decoupled), 1
                hyper = (rule.lr, rule.beta1, rule.beta2, rule.eps, launch.key, mode, bias_correction)
                adam(CHUNK_NUMEL, flag, launch.lists, *hyper, rule.weight_decay)
            else:  # buffers exist, weight decay enters the gradient, gradients are not scaled
                rates = (rule.weight_decay, rule.momentum, rule.dampening, rule.lr)
                sgd(CHUNK_NUMEL, flag, launch.lists, *rates, rule.is_nesterov, False, False, 1.0)
    for launch in writes:
        models, mains = launch.lists
        foreach_copy_(models, mains)
