"""Which elements of tensors are the same memory.

Knows nothing of parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_overlap(tensor: Tensor) -> bool:
    """Return whether elements of ``tensor`` share memory with each other."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() < 2:
        return False
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    reach = 0  # the largest offset that smaller strides reach
    for stride, size in dims:
        if stride <= reach or stride == 0:
            return stride == 0 or not _are_distinct(tensor)
        reach += stride * (size - 1)
    return False


def extent(tensor: Tensor) -> int:
    """Return how many bytes ``tensor`` spans, from its first element."""
    numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return numel * tensor.element_size()


def _bytes_of(tensor: Tensor, start: int, end: int) -> Tensor:
    """Return, on the CPU, which bytes in ``[start, end)`` belong to ``tensor``."""
    width = tensor.element_size()
    mask = torch.zeros(end - start, dtype=torch.bool)
    strides = [*(stride * width for stride in tensor.stride()), 1]
    mask.as_strided((*tensor.shape, width), strides, tensor.data_ptr() - start).fill_(True)
    return mask


def have_common_elements(one: Tensor, other: Tensor) -> bool:
    """Return whether two strided tensors, whose spans of memory overlap, share an element."""
    if one.is_contiguous() and other.is_contiguous():  # their spans overlap, and have no gaps
        return True
    start = min(one.data_ptr(), other.data_ptr())
    end = max(t.data_ptr() + extent(t) for t in (one, other))
    return bool((_bytes_of(one, start, end) & _bytes_of(other, start, end)).any())


def _are_distinct(tensor: Tensor) -> bool:
    start = tensor.data_ptr()
    return int(_bytes_of(tensor, start, start + extent(tensor)).sum()) == tensor.numel() * tensor.element_size()
