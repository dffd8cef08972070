"""A cast and an optimizer step of one pass each, as Triton kernels.

    main_grad, main_param, exp_avg, exp_avg_sq -> [fused_step_] -> main_param, exp_avg, exp_avg_sq, model parameter

Knows tensors only. Nothing is read back to the host: factors, scales, flags and
steps stay where they are, and the kernels read them there.

Bytes per parameter, each operand read or written once:

    fused_step_ of a bf16 or fp16 model   30 = 4 x 4 read (grad, main, exp_avg, exp_avg_sq) + 3 x 4 + 2 written
    fused_step_ of an fp32 model          28 = the same without the model parameter
    with a grad_scale that is not 1       +4 for the gradient, written back divided
    scale_cast_ to bf16 or fp16            6 = 4 read + 2 written
    scale_cast_ to fp32                    8 = 4 read + 4 written

Numerics: every operation is float32, rounded once, to nearest even. The step does the operations of
``torch.optim.Adam(foreach=False)`` on a CPU with FMA instructions, in their order and with their contractions, as
measured on torch 2.13.0 (AVX2, AVX512) element by element; Triton's own contraction is off, so that no others join:

    grad'       fma(weight_decay, main, grad) under Adam with weight decay, else grad
    main'       main * (1 - lr * weight_decay) under AdamW, else main
    exp_avg     fma(w, grad' - exp_avg, exp_avg) if w = 1 - beta1 < 0.5, else fma(w - 1, grad' - exp_avg, grad')
    exp_avg_sq  fma((1 - beta2) * grad', grad', exp_avg_sq * beta2)
    denom       sqrt(exp_avg_sq) / sqrt(1 - beta2**step) + eps
    main        main' + (-lr / (1 - beta1**step) * exp_avg) / denom

The scalars, too, are those of torch: computed in float64, then rounded to float32. So one step from equal state gives
exp_avg and exp_avg_sq every bit of torch's, and main wherever torch's square root is rounded correctly: on a CPU it is
MKL's, one unit in the last place off for 624 of 100,003 random values; ours is IEEE's. torch's CUDA kernels are
compiled otherwise; how their bits compare was not measured.

bfloat16 is rounded by integer arithmetic, because Triton's interpreter (3.9.0, TRITON_INTERPRET=1) truncates;
float16 by a cast, which the interpreter rounds as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fusedopt.backends.offers import FUNCTIONS, LOW_PRECISION, Absent, Adam, Offer, Sgd, StepTensors, load

BLOCK = 1024
"""Elements that one program handles: 8 per thread at Triton's default of 4 warps, two 16-byte loads of fp32
where numel is a multiple of 16, else 8 loads of 4 bytes."""

STEPS = (Adam,)
"""The rules that `fused_step_` takes."""

TAKES_FOUND_INF = True
"""`fused_step_` knows ``grad_scale`` and ``found_inf``."""

NEEDED = ("fma", "div_rn", "sqrt_rn")
"""What the kernels use of triton.language and old versions lack."""

KINDS = ("main", "grad", "exp_avg", "exp_avg_sq", "model")
"""What the step touches per parameter, in the order in which `_check_operands` returns it."""

OFFERS = ("scale_cast_", "fused_step_")
"""Functions of the table that an installation with everything in it brings."""

MISSING = {
    "wgrad_accumulate_": "no Triton kernel; torch's is used",
    "norm": "no Triton kernel; torch's is used, which reads each element once as well",
    "found_inf": "no Triton kernel; torch's is used, which reads each element once as well",
}

_jit: Callable[[Callable[..., Any]], Any] = triton.jit  # named, so that mypy keeps the kernels' annotations


def offer() -> Offer:
    """Return what Triton brings here; importing this file raises where it is not installed."""
    try:
        load("triton.language", *NEEDED)
    except Absent as reason:
        return Offer(triton.__version__, {}, dict.fromkeys(FUNCTIONS, str(reason)))
    return Offer(triton.__version__, {"scale_cast_": scale_cast_, "fused_step_": fused_step_}, MISSING)


def takes(rule: Adam | Sgd) -> bool:
    """Return whether `fused_step_` knows ``rule``."""
    return isinstance(rule, STEPS)


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on ``device``: a GPU, or a CPU where TRITON_INTERPRET=1 was set before import."""
    is_interpreted = not isinstance(_scale_cast_kernel, triton.runtime.JITFunction)
    return device.type == "cuda" or (device.type == "cpu" and is_interpreted)


def grid(numel: int) -> tuple[int]:
    """Return the launch grid that covers ``numel`` elements."""
    return (-(-numel // BLOCK),)


def scale_cast_(targets: Sequence[Tensor], sources: Sequence[Tensor], factor: Tensor | None = None) -> None:
    """Write each source times ``factor`` into its target, rounded once more to the target's dtype.

    Args:
        targets: float32, bfloat16 or float16; dense, of any stride order. Written; each may be its source itself.
        sources: float32, shapes and strides as ``targets``. Read.
        factor: 0-d, float32. Read on the device; copied there if it is elsewhere or of another dtype. None for 1.

    Raises:
        TypeError: for targets or sources of any other dtype.
        ValueError: if they differ in shape, strides, device or number.
        RuntimeError: where no kernel runs, see `runs_on`.
    """
    pairs = list(zip(targets, sources, strict=True))
    for target, source in pairs:
        _check_pair(target, source)
    for target, source in pairs:
        if target.numel():
            _launch(_scale_cast_kernel, target, source, _scalar("factor", factor, target.device))
    _written(targets)


def fused_step_(
    rule: Adam | Sgd, operands: StepTensors, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> None:
    """Update main_params, their states and the model parameters in one pass; see the top of this file.

    Args:
        rule: one of `STEPS`.
        operands: see `StepTensors`.
        grad_scale: 0-d, as ``factor`` of `scale_cast_`. Gradients are divided by it, in place.
        found_inf: likewise. Where it is not zero, nothing is written.

    Raises:
        TypeError: for another rule or dtype.
        ValueError: for operands that are not 1-D, contiguous, of equal lengths and on one device.
        RuntimeError: where no kernel runs, see `runs_on`.
    """
    if not isinstance(rule, Adam):
        raise TypeError(f"rule is {type(rule).__name__}; the Triton step takes Adam, use torch's for others")
    columns = _check_operands(operands)
    if not columns:
        return
    device = columns[0][0].device
    scale, flag = _scalar("grad_scale", grad_scale, device), _scalar("found_inf", found_inf, device)
    corrections = _bias_corrections(rule, operands.steps, device)
    is_coupled = not rule.is_decoupled and rule.weight_decay != 0
    kept = 1 - rule.lr * rule.weight_decay if rule.is_decoupled else 1.0
    # float() each: Triton would compile an int into the kernel as such
    scalars = (kept, rule.weight_decay, 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps)
    for correction, (main, grad, exp_avg, exp_avg_sq, *model) in zip(corrections, columns, strict=True):
        if main.numel():
            tensors = (grad, exp_avg, exp_avg_sq, model[0] if model else None, correction, scale, flag)
            _launch(_adam_kernel, main, *tensors, *map(float, scalars), IS_COUPLED=is_coupled)
    for written in (
        operands.mains,
        *operands.states,
        operands.models or (),
        () if grad_scale is None else operands.grads,
    ):
        _written(written)


def _launch(kernel: Any, first: Tensor, *rest: Any, **constants: Any) -> None:
    if not runs_on(first.device):
        raise RuntimeError(
            f"Triton kernels do not run on {first.device}; move the tensors to a GPU, use another backend, or set "
            "TRITON_INTERPRET=1 before Python starts, to test them"
        )
    numel = first.numel()
    with torch.cuda.device(first.get_device()):  # where Triton launches; -1, for a CPU tensor, has no effect
        kernel[grid(numel)](first, *rest, numel, BLOCK=BLOCK, enable_fp_fusion=False, **constants)


def _written(tensors: Iterable[Tensor]) -> None:
    """Let autograd see the writes, as it sees those of torch's in-place operations."""
    torch.autograd.graph.increment_version(tensors)


def _bias_corrections(rule: Adam, steps: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return, per parameter, -lr / (1 - beta1**step) and sqrt(1 - beta2**step): float32, ``[2]``, on ``device``."""
    if len({step.device for step in steps}) > 1:
        steps = [_to(device, step) for step in steps]
    step = torch.stack(list(steps)).double()
    step_size = -rule.lr / (1 - rule.beta1**step)
    second = (1 - rule.beta2**step).sqrt()
    return list(_to(device, torch.stack([step_size, second], dim=1)).unbind())


def _check_pair(target: Tensor, source: Tensor) -> None:
    if source.dtype is not torch.float32:
        raise TypeError(f"source is {source.dtype}; scale_cast_ reads torch.float32")
    if target.dtype not in (torch.float32, *LOW_PRECISION):
        raise TypeError(f"target is {target.dtype}; scale_cast_ writes torch.float32, torch.bfloat16, torch.float16")
    if (target.shape, target.stride(), target.device) != (source.shape, source.stride(), source.device):
        raise ValueError(
            f"target is {_describe(target)} and source {_describe(source)}; scale_cast_ needs equal shapes, strides "
            "and devices"
        )
    if not _is_dense(source):
        raise ValueError(f"tensors are {_describe(source)}; scale_cast_ needs them dense, without gaps or overlaps")


def _check_operands(operands: StepTensors) -> list[tuple[Tensor, ...]]:
    """Return per parameter: main, grad, the states, the model parameter where there are any."""
    kinds = [operands.mains, operands.grads, *operands.states, *([] if operands.models is None else [operands.models])]
    if len(operands.states) != 2 or len({len(kind) for kind in (*kinds, operands.steps)}) > 1:
        raise ValueError(
            f"operands hold {[len(kind) for kind in kinds]} tensors and {len(operands.steps)} steps; Adam needs "
            "as many mains as grads, exp_avgs, exp_avg_sqs, steps, and models unless these are None"
        )
    columns: list[tuple[Tensor, ...]] = list(zip(*kinds, strict=True))
    for index, (main, *others) in enumerate(columns):
        for kind, tensor in zip(KINDS, (main, *others), strict=False):  # without models, one kind less
            allowed = LOW_PRECISION if kind == "model" else (torch.float32,)
            if tensor.dtype not in allowed:
                raise TypeError(f"{kind} of parameter {index} is {tensor.dtype}; the step needs {allowed}")
            if tensor.shape != (main.numel(),) or not tensor.is_contiguous() or tensor.device != columns[0][0].device:
                raise ValueError(
                    f"{kind} of parameter {index} is {_describe(tensor)} beside a main of {_describe(main)}; "
                    "the step needs them 1-D, contiguous, of equal lengths and all on one device"
                )
    return columns


def _scalar(name: str, scalar: Tensor | None, device: torch.device) -> Tensor | None:
    if scalar is not None and scalar.numel() != 1:
        raise ValueError(f"{name} is {_describe(scalar)}; the kernel reads one element")
    return None if scalar is None else _to(device, scalar)


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return ``tensor`` as float32 on ``device``; the host waits for no copy to a GPU."""
    return tensor.to(device, torch.float32, non_blocking=device.type == "cuda")


def _is_dense(tensor: Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"


@_jit
def _offsets(program: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    return program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # int32 would overflow at 2**31 elements


@_jit
def _round(value: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Round float32 ``value`` to ``dtype``: to nearest even, beyond the largest to inf, NaN to a quiet NaN."""
    if dtype == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        # Half a unit less one, plus the last bit that stays: ties go to even, and a carry reaches the exponent
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nearest = tl.where(value != value, 0x7FC0, nearest)  # the addition could carry a NaN over to zero
        return nearest.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return value.to(dtype)


@_jit
def _scale_cast_kernel(
    target: tl.tensor, source: tl.tensor, factor: tl.tensor, numel: tl.tensor, BLOCK: tl.constexpr
) -> None:
    offsets = _offsets(tl.program_id(0), BLOCK)
    mask = offsets < numel
    value = tl.load(source + offsets, mask=mask)
    if factor is not None:
        value = value * tl.load(factor)
    tl.store(target + offsets, _round(value, target.dtype.element_ty), mask=mask)


@_jit
def _adam_kernel(
    main: tl.tensor,
    grad: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    model: tl.tensor,
    correction: tl.tensor,
    grad_scale: tl.tensor,
    found_inf: tl.tensor,
    kept: tl.tensor,
    weight_decay: tl.tensor,
    weight1: tl.tensor,
    beta2: tl.tensor,
    weight2: tl.tensor,
    eps: tl.tensor,
    numel: tl.tensor,
    BLOCK: tl.constexpr,
    IS_COUPLED: tl.constexpr,
) -> None:
    if found_inf is not None and tl.load(found_inf) != 0:  # NaN counts as found
        return
    offsets = _offsets(tl.program_id(0), BLOCK)
    mask = offsets < numel
    p = tl.load(main + offsets, mask=mask)
    g = tl.load(grad + offsets, mask=mask)
    m = tl.load(exp_avg + offsets, mask=mask)
    v = tl.load(exp_avg_sq + offsets, mask=mask)
    if grad_scale is not None:
        scale = tl.load(grad_scale)
        g = tl.div_rn(g, scale)
        if scale != 1:  # after a step that clipped, `.grad` is the clipped gradient
            tl.store(grad + offsets, g, mask=mask)
    if IS_COUPLED:
        g = tl.fma(p, weight_decay, g)
    p = p * kept
    is_small = weight1 < 0.5  # torch.lerp starts from the nearer end
    m = tl.fma(tl.where(is_small, weight1, weight1 - 1), g - m, tl.where(is_small, m, g))
    v = tl.fma(weight2 * g, g, v * beta2)
    denom = tl.div_rn(tl.sqrt_rn(v), tl.load(correction + 1)) + eps
    p = p + tl.div_rn(tl.load(correction) * m, denom)
    tl.store(main + offsets, p, mask=mask)
    tl.store(exp_avg + offsets, m, mask=mask)
    tl.store(exp_avg_sq + offsets, v, mask=mask)
    if model is not None:
        tl.store(model + offsets, _round(p, model.dtype.element_ty), mask=mask)
