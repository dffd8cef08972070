"""bf16 linear layers at fp32 speed on CPUs without bf16 instructions.

There, torch multiplies bf16 matrices in a plain loop, ten times slower than fp32. Widening the
operands, multiplying in fp32 and rounding the product once to bf16 is what bf16 matrix units do, in
the forward and (through autograd, which rounds each gradient to bf16) in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

SLOW_BF16 = ("DEFAULT", "NO AVX", "AVX2")  # torch.backends.cpu.get_cpu_capability()


def _through_fp32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(first: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if first.dtype is not torch.bfloat16:
            return product(first, *others, **named)
        wide = [tensor if tensor is None else tensor.float() for tensor in (first, *others, *named.values())]
        return product(*wide).bfloat16()

    return run


@contextmanager
def fast_bf16_linears(device: torch.device) -> Iterator[None]:
    """Return a context in which bf16 linear layers on ``device`` are not needlessly slow.

    Replaces two functions of torch: what nn.Linear calls, and what FusedLinear calls for its input's gradient.
    """
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() not in SLOW_BF16:
        yield
        return
    linear, matmul = _through_fp32(functional.linear), _through_fp32(torch.Tensor.matmul)
    with mock.patch.object(functional, "linear", linear), mock.patch.object(torch.Tensor, "matmul", matmul):
        yield
