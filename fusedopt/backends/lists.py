"""What the adapters of compiled libraries share: tensors in the form that their kernels read blindly.

    flat buffers -> [lists] -> adapter -> library

The kernels look at one dtype per list and at addresses, index with int32, and stumble over empty
tensors; most of it they do not check. Here nothing else reaches them: what a kernel cannot do
right is done in plain torch, or refused by name. Knows no library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedopt.backends.offers import LOW_PRECISION, Adam, Sgd
from fusedopt.sharding.layout import ROW_NUMEL

DEVICE_TYPES = ("cuda",)
"""Where the libraries run; they take a CPU tensor's address for one on the device. Doubles add theirs."""

KERNEL_DTYPES = (torch.float32, *LOW_PRECISION)
"""What the norm and scale kernels know."""

WGRAD_DTYPES = LOW_PRECISION
"""Of the operands whose product the libraries add into fp32 without rounding it first."""

MAX_NUMEL = 2**30
"""Elements of a tensor in one launch: below int32, and a multiple of 16 bytes in every dtype, so that pieces of an
aligned tensor are aligned."""

INT32_END = 2**31


@dataclass(frozen=True)
class Launch:
    """One call of a kernel: lists of equal length, each of one dtype; one device; dense, 1-D, none empty or too long.

    Args:
        lists: as `launches` was given them.
        key: what the positions of this launch have in common beside device and dtypes.
    """

    lists: list[list[Tensor]]
    key: Any


def launches(lists: Sequence[Sequence[Tensor]], keys: Sequence[Hashable] | None = None) -> list[Launch]:
    """Regroup ``lists``, whose positions belong together, into calls that a kernel can take.

    Args:
        lists: of equal length; the tensors of one position have one device and numel, and are contiguous.
        keys: one per position; those of one launch are equal.

    Raises:
        ValueError: naming list and position, if they do not fit together.
    """
    lengths = [len(tensors) for tensors in lists] + ([] if keys is None else [len(keys)])
    if len(set(lengths)) > 1:
        raise ValueError(f"lists have {lengths} items; needed is one of each per position")
    groups: dict[Hashable, Launch] = {}
    for position, row in enumerate(zip(*lists, strict=True)):
        _check_row(row, position)
        if not row[0].numel():
            continue
        key = None if keys is None else keys[position]
        launch = groups.setdefault((row[0].device, *(t.dtype for t in row), key), Launch([[] for _ in row], key))
        for column, tensor in zip(launch.lists, row, strict=True):
            column += tensor.view(-1).split(MAX_NUMEL)
    return list(groups.values())


def takes(rule: Adam | Sgd) -> bool:
    """Return whether the libraries' fused steps know ``rule``; SGD's kernels want momentum buffers."""
    return isinstance(rule, Adam) or rule.momentum != 0


def flag_for(launch: Launch) -> Tensor:
    """Return a fresh int32 zero on the device of ``launch``; some kernels do nothing where it is set, others set it."""
    return torch.zeros(1, dtype=torch.int32, device=launch.lists[0][0].device)


def device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Make the device of ``tensor`` current; kernels start on the current device's stream. Nothing on a CPU."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard


def norm(
    kernel: Callable[[Launch], Tensor],
    flats: Sequence[Tensor],
    norm_type: float = 2.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm of all elements of ``flats``: 0-d, float64, on the first tensor's device.

    The library sums squares in fp32, per launch; launches are put together in float64. Other norms than the 2-norm,
    other dtypes to sum in, and tensors that its kernel does not know are torch's. Inf and nan stay what they are.

    Args:
        kernel: the 2-norm of one list; one element.
        flats: contiguous. Read.
        norm_type: ``p > 0`` or ``inf``.
        dtype: to sum in; default each tensor's own.
    """
    is_known = norm_type == 2.0 and dtype is None
    theirs = [flat for flat in flats if is_known and _suits(flat)]
    ours = [flat for flat in flats if flat.numel() and not (is_known and _suits(flat))]
    totals = [kernel(launch).view(()) for launch in launches([theirs])]
    totals += [_plain_norm(flat, norm_type, dtype) for flat in ours]
    device = flats[0].device
    totals = [total.to(device, torch.float64) for total in totals]
    if not totals:
        return torch.zeros((), dtype=torch.float64, device=device)
    total: Tensor = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals), norm_type)
    return total


def scale_cast_(
    kernel: Callable[[Launch, Tensor | None], None] | None,
    targets: Sequence[Tensor],
    sources: Sequence[Tensor],
    factor: Tensor | None = None,
) -> None:
    """Write ``source * factor``, rounded to the source's dtype and then to the target's, into each target.

    Args:
        kernel: does so for a launch of sources and targets; None where the library cannot take such a factor.
        targets: one per source, of its shape and on its device; may be the sources. Written.
        sources: read.
        factor: 0-d; None for 1.

    Numerics: the libraries multiply in fp32 and round once more, into the target. That is the same for fp32 sources
    and for bare casts; the rest is torch's.
    """
    theirs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for position, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if target.shape != source.shape or target.device != source.device:
            raise ValueError(
                f"target {position} is {list(target.shape)} on {target.device} and its source {list(source.shape)} on "
                f"{source.device}; needed is one shape and device"
            )
        is_theirs = kernel is not None and _suits(source) and _suits(target)
        if is_theirs and (factor is None or source.dtype is torch.float32):
            theirs[0].append(source)
            theirs[1].append(target)
        elif factor is None:
            target.copy_(source)
        else:
            torch.mul(source, factor.to(source.device, source.dtype), out=target)
    if kernel is not None:
        for launch in launches(theirs):
            kernel(launch, factor)


def wgrad_accumulate_(
    gemm: Callable[[Tensor, Tensor, Tensor, bool], None],
    main_grad: Tensor,
    grad_output: Tensor,
    input: Tensor,
    *,
    accumulate: bool,
    exact: bool = True,
) -> None:
    """Add ``grad_output.T @ input`` into ``main_grad``, in place, through a library's GEMM.

    Args:
        gemm: ``gemm(main_grad, grad_output, input, accumulate)`` for contiguous operands and at least one token.
        main_grad: ``[out, in]``, float32. Written.
        grad_output: ``[tokens, out]``, one of `WGRAD_DTYPES`. Read.
        input: ``[tokens, in]``, dtype of ``grad_output``. Read.
        accumulate: False overwrites, and does not read what was there.
        exact: nothing to choose here: the product is never rounded before it is added.

    Raises:
        TypeError: naming dtypes and device, if the library would not compute this right.
        ValueError: naming shapes or devices, if they do not fit together.
    """
    check_wgrad(main_grad, grad_output, input)
    if not main_grad.numel():
        return
    if not grad_output.shape[0]:
        if not accumulate:
            main_grad.zero_()
        return
    with device_of(main_grad):
        if main_grad.is_contiguous():
            gemm(main_grad, grad_output.contiguous(), input.contiguous(), accumulate)
            return
        product = torch.empty_like(main_grad, memory_format=torch.contiguous_format)
        gemm(product, grad_output.contiguous(), input.contiguous(), False)
        if accumulate:
            main_grad.add_(product)
        else:
            main_grad.copy_(product)


def check_wgrad(main_grad: Tensor, grad_output: Tensor, input: Tensor) -> None:
    """Raise unless a library's GEMM computes this right; see `wgrad_accumulate_`. They check next to nothing."""
    operands = (main_grad, grad_output, input)
    devices = [str(tensor.device) for tensor in operands]
    if len(set(devices)) > 1:
        raise ValueError(f"main_grad, grad_output and input are on {', '.join(devices)}; needed is one device")
    is_float32 = main_grad.dtype is torch.float32 and grad_output.dtype is input.dtype
    if not is_float32 or input.dtype not in WGRAD_DTYPES or main_grad.device.type not in DEVICE_TYPES:
        raise TypeError(
            f"main_grad is {main_grad.dtype}, grad_output {grad_output.dtype} and input {input.dtype} on {devices[0]}; "
            f"this library adds products of two bfloat16 or two float16 operands into float32, on {DEVICE_TYPES[0]}. "
            "The others are torch_ops.wgrad_accumulate_'s"
        )
    shapes = [list(tensor.shape) for tensor in operands]
    fits = all(len(shape) == 2 for shape in shapes)
    if not fits or shapes != [[shapes[1][1], shapes[2][1]], [shapes[1][0], shapes[0][0]], [shapes[1][0], shapes[0][1]]]:
        raise ValueError(
            f"main_grad is {shapes[0]}, grad_output {shapes[1]} and input {shapes[2]}; needed are [out, in], "
            "[tokens, out] and [tokens, in]"
        )
    if max(max(shape) for shape in shapes) >= INT32_END:
        raise ValueError(f"dimensions {shapes} do not fit the library's int32; split the tokens")


def check_operands(lists: Sequence[Sequence[Tensor]], models: Sequence[Tensor] | None) -> None:
    """Raise TypeError unless ``lists`` are fp32 and ``models`` of one low precision, where the libraries run."""
    dtypes = sorted({str(tensor.dtype) for tensors in lists for tensor in tensors})
    if dtypes not in ([], ["torch.float32"]):
        raise TypeError(f"gradients, main_params and state are {', '.join(dtypes)}; a fused step takes float32")
    low = {tensor.dtype for tensor in models or ()}
    if len(low) > 1 or not low.issubset(WGRAD_DTYPES):
        names = ", ".join(sorted(map(str, low)))
        raise TypeError(f"model parameters are {names}; a fused step takes all bfloat16 or all float16")
    devices = {tensor.device for tensors in lists for tensor in tensors}
    elsewhere = {str(device) for device in devices if device.type not in DEVICE_TYPES}
    if elsewhere:
        raise TypeError(f"tensors on {', '.join(sorted(elsewhere))}; this library steps on {DEVICE_TYPES[0]}")


def numbers_of(steps: Sequence[Tensor]) -> list[int]:
    """Return step numbers, from 1, for the host; one copy, which waits for the device if they are there.

    Raises:
        ValueError: for a number below 1, by which bias correction would divide.
    """
    numbers = [int(number) for number in torch.stack(list(steps)).tolist()] if steps else []
    if numbers and min(numbers) < 1:
        raise ValueError(f"step number {min(numbers)}; steps are counted from 1")
    return numbers


def _check_row(row: Sequence[Tensor], position: int) -> None:
    first = row[0]
    for index, tensor in enumerate(row):
        if tensor.device != first.device or tensor.numel() != first.numel():
            raise ValueError(
                f"position {position}: list {index} has {tensor.numel()} elements on {tensor.device}, list 0 "
                f"{first.numel()} on {first.device}; needed are equal ones"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"position {position}: list {index} has shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}, which is not contiguous; make it so"
            )


def _suits(tensor: Tensor) -> bool:
    return tensor.dtype in KERNEL_DTYPES and tensor.device.type in DEVICE_TYPES and tensor.is_contiguous()


def _plain_norm(flat: Tensor, norm_type: float, dtype: torch.dtype | None) -> Tensor:
    rows = flat.reshape(-1, ROW_NUMEL if flat.numel() % ROW_NUMEL == 0 else flat.numel())
    partial = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype)
    total: Tensor = torch.linalg.vector_norm(partial, norm_type, dtype=torch.float64)
    return total
