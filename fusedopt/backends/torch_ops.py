"""The reference and default of every operation on flat buffers, in plain torch.

Knows tensors only: no parameters, buckets or optimizers. Every function runs on
the tensors' own device and never reads a value back to the host.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedopt._torch_private import (
    BFLOAT16_PROBES,
    foreach_copy_,
    foreach_div_,
    foreach_mul,
    foreach_mul_,
    foreach_zero_,
)
from fusedopt.sharding.layout import ROW_NUMEL

TILE_ROWS = 256
"""Rows of a weight whose rounded product exists at once in the inexact wgrad on a CPU."""

TILE_NBYTES = 64 * 2**20
"""Of the fp32 product that exists at once in the wgrad of a CUDA device that cannot accumulate in the epilogue."""


def norm(flats: Sequence[Tensor], norm_type: float = 2.0, dtype: torch.dtype | None = None) -> Tensor:
    """Return the norm of all elements of ``flats``, padding included (it is zero).

    Args:
        flats: 1-D, float32 or float64, numel a multiple of ``ROW_NUMEL``; on any devices. Read.
        norm_type: ``p > 0`` or ``inf``.
        dtype: to sum in; default each tensor's own.

    Returns:
        0-d, on the first tensor's device, float64.

    Numerics: rows of 1024 elements are summed in the tensor's dtype and the rows' norms in float64.
    With fp32 rows a 2-norm carries a relative error below ``1024 * 2**-24 / 2`` by the standard bound
    (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1), far less in practice.
    ``torch.linalg.vector_norm`` of one flat CPU tensor was measured at 2e-3 for 30 M elements.
    """
    device = flats[0].device
    rows = [torch.linalg.vector_norm(f.view(-1, ROW_NUMEL), norm_type, dim=1, dtype=dtype) for f in flats]
    totals = [torch.linalg.vector_norm(r, norm_type, dtype=torch.float64).to(device) for r in rows]
    total: Tensor = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), norm_type)
    return total


def found_inf(flats: Sequence[Tensor]) -> Tensor:
    """Return 1.0 if any element of ``flats`` is inf or nan, else 0.0; exact, where `norm` may overflow.

    Args:
        flats: 1-D, float32 or float64; on any devices. Read.

    Returns:
        0-d, on the first tensor's device, float32.
    """
    device = flats[0].device
    largest = [torch.linalg.vector_norm(f, math.inf).to(device, torch.float64) for f in flats if f.numel()]
    if not largest:
        return torch.zeros((), device=device)
    return torch.stack(largest).isfinite().all().logical_not().float()


def scale_cast_(targets: Sequence[Tensor], sources: Sequence[Tensor], factor: Tensor | None = None) -> None:
    """Write ``source * factor``, rounded to nearest even, into each target: unscale, clip, write-back.

    Args:
        targets: any floating dtype; written. May be the sources: then they are scaled in place.
        sources: one per target, of its shape and on its device. Read.
        factor: 0-d; None for 1. The product is rounded to the source's dtype, then to the target's.
    """
    if factor is not None:
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault((source.device, source.dtype), []).append(index)
        for (device, dtype), indices in groups.items():
            written, read = ([tensors[i] for i in indices] for tensors in (targets, sources))
            scale = factor.to(device, dtype)
            if all(target is source for target, source in zip(written, read, strict=True)):
                foreach_mul_(written, scale)
            else:
                foreach_copy_(written, foreach_mul(read, scale))
    elif targets:
        foreach_copy_(list(targets), list(sources))


def divide_(tensors: Sequence[Tensor], divisor: int) -> None:
    """Divide each tensor by ``divisor``, in place: one rounding in the tensor's dtype."""
    if tensors:
        foreach_div_(list(tensors), float(divisor))


def zero_(tensors: Sequence[Tensor]) -> None:
    """Fill each tensor with zeros."""
    if tensors:
        foreach_zero_(list(tensors))


def take_over_(main_param: Tensor, param: Tensor, *, may_be_split: bool = False) -> None:
    """Let edits of ``param`` reach ``main_param``, element by element.

    An element of ``param`` that still has the bits of the rounded ``main_param`` was not edited, and
    its ``main_param`` keeps every bit; the others are set to the value of ``param``.

    Args:
        main_param: float32, ``[*shape]``. Written.
        param: bfloat16 or float16, ``[*shape]``. Read.
        may_be_split: a main_param that lies just between two values of bfloat16 may have been rounded away from zero,
            too, as where it was held in halves.
    """
    unchanged = main_param.to(param.dtype).view(torch.int16) == param.view(torch.int16)
    if may_be_split and param.dtype is torch.bfloat16:
        bits = main_param.view(torch.int32)
        away = (bits + 0x8000) >> 16
        unchanged |= ((bits & 0xFFFF) == 0x8000) & (away.to(torch.int16) == param.view(torch.int16))
    main_param.copy_(torch.where(unchanged, main_param, param.to(main_param.dtype)))


def wgrad_accumulate_(
    main_grad: Tensor, grad_output: Tensor, input: Tensor, *, accumulate: bool, exact: bool = True
) -> None:
    """Add a linear layer's weight gradient, ``grad_output.T @ input``, into ``main_grad``, in place.

    Args:
        main_grad: ``[out, in]``, float32 or float64. Written.
        grad_output: ``[tokens, out]``, any floating dtype. Read.
        input: ``[tokens, in]``, dtype of ``grad_output``. Read.
        accumulate: False overwrites, and does not read what was there.
        exact: sum over tokens in main_grad's dtype. False allows to round the product to bfloat16 first, as
            torch's own backward does, a tile of ``TILE_ROWS`` rows at a time: done where that is faster, on CPUs
            with bfloat16 instructions.

    Numerics: with ``exact``, and on CUDA always, no low-precision product is formed. On a CPU the operands are cast
    whole (activations' size, not the weight's), on CUDA the GEMM widens in its epilogue; see `cuda_road`.
    """
    beta = 1.0 if accumulate else 0.0
    if grad_output.dtype is main_grad.dtype:
        main_grad.addmm_(grad_output.t(), input, beta=beta)
    elif main_grad.is_cuda and (road := cuda_road(main_grad.device, grad_output.dtype)) is not Road.WIDEN:
        if road is Road.EPILOGUE:
            torch.addmm(main_grad, grad_output.t(), input, beta=beta, out_dtype=main_grad.dtype, out=main_grad)
        else:
            _add_tiles(main_grad, grad_output, input, accumulate=accumulate)
    elif main_grad.is_cuda or exact or grad_output.dtype is not torch.bfloat16 or not multiplies_bfloat16():
        main_grad.addmm_(grad_output.to(main_grad.dtype).t(), input.to(main_grad.dtype), beta=beta)
    else:
        for rows, columns in zip(
            torch.split(main_grad, TILE_ROWS), torch.split(grad_output, TILE_ROWS, dim=1), strict=True
        ):
            product = columns.t().mm(input)
            if accumulate:
                rows.add_(product)
            else:
                rows.copy_(product)


class Road(enum.Enum):
    """How a CUDA device adds a low-precision product into an fp32 main_grad, the best first."""

    EPILOGUE = "addmm accumulates into fp32 in its epilogue"
    TILES = "mm with fp32 output, a tile at a time, then add"
    WIDEN = "operands cast to fp32"


@functools.cache
def cuda_road(device: torch.device, dtype: torch.dtype) -> Road:
    """Return the best way that ``device`` and this torch have for operands of ``dtype``; tried out, once.

    Early torch releases want the addend of ``addmm(out_dtype=)`` in the operands' dtype, and some devices lack the
    product altogether: both raise. Synchronises; not to be called for the first time while a CUDA graph is captured.
    """
    operand = torch.ones(16, 16, dtype=dtype, device=device)
    addend = torch.full((16, 16), 1 + 2.0**-12, device=device)  # no number of ``dtype``, nor is the sum
    try:
        torch.addmm(addend, operand.t(), operand, out_dtype=addend.dtype, out=addend)
        if bool((addend == 17 + 2.0**-12).all()):
            return Road.EPILOGUE
    except (RuntimeError, TypeError):
        pass
    try:
        product = torch.mm(operand.t(), operand, out_dtype=addend.dtype)
        return Road.TILES if product.dtype is addend.dtype and bool((product == 16).all()) else Road.WIDEN
    except (RuntimeError, TypeError):
        return Road.WIDEN


def _add_tiles(main_grad: Tensor, grad_output: Tensor, input: Tensor, *, accumulate: bool) -> None:
    num_rows = max(1, TILE_NBYTES // max(1, main_grad.shape[1] * main_grad.element_size()))
    for rows, columns in zip(torch.split(main_grad, num_rows), torch.split(grad_output, num_rows, dim=1), strict=True):
        product = torch.mm(columns.t(), input, out_dtype=main_grad.dtype)
        if accumulate:
            rows.add_(product)
        else:
            rows.copy_(product)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions; without them torch takes ten times longer than for fp32."""
    return any(getattr(torch.cpu, probe, bool)() for probe in BFLOAT16_PROBES)
