"""The reference and default of every operation on flat buffers, in plain torch.

Knows tensors only: no parameters, buckets or optimizers. Every function runs on
the tensors' own device and never reads a value back to the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fusedopt.layout import ROW_NUMEL

TILE_ROWS = 256
"""Rows of a weight whose rounded product exists at once in the inexact wgrad."""


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


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by ``factor``, a 0-d tensor, in place: one rounding in the tensor's dtype."""
    for device_tensors in _by_device(tensors):
        torch._foreach_mul_(device_tensors, factor.to(device_tensors[0]))


def divide_(tensors: Sequence[Tensor], divisor: int) -> None:
    """Divide each tensor by ``divisor``, in place: one rounding in the tensor's dtype."""
    if tensors:
        torch._foreach_div_(list(tensors), float(divisor))


def zero_(tensors: Sequence[Tensor]) -> None:
    """Fill each tensor with zeros."""
    if tensors:
        torch._foreach_zero_(list(tensors))


def cast_copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Round each source to its target's dtype (nearest even) and write it there."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def take_over_(main_param: Tensor, param: Tensor) -> None:
    """Let edits of ``param`` reach ``main_param``, element by element.

    An element of ``param`` that still has the bits of the rounded ``main_param`` was not edited, and
    its ``main_param`` keeps every bit; the others are set to the value of ``param``.

    Args:
        main_param: float32, ``[*shape]``. Written.
        param: bfloat16 or float16, ``[*shape]``. Read.
    """
    unchanged = main_param.to(param.dtype).view(torch.int16) == param.view(torch.int16)
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

    Numerics: with ``exact`` no low-precision product is formed. On a CPU the operands are cast whole
    (activations' size, not the weight's), on CUDA the GEMM widens in its epilogue.
    """
    beta = 1.0 if accumulate else 0.0
    if grad_output.dtype is main_grad.dtype:
        main_grad.addmm_(grad_output.t(), input, beta=beta)
    elif main_grad.is_cuda:
        torch.addmm(main_grad, grad_output.t(), input, beta=beta, out_dtype=main_grad.dtype, out=main_grad)
    elif exact or grad_output.dtype is not torch.bfloat16 or not multiplies_bfloat16():
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


@functools.cache
def multiplies_bfloat16() -> bool:
    """Return whether this CPU has bfloat16 instructions; without them torch takes ten times longer than for fp32."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # private to torch 2.13; absent means no
    return any(getattr(torch.cpu, probe, bool)() for probe in probes)


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
