"""bf16 linear layers at fp32 speed on CPUs without bf16 instructions.

There, torch multiplies bf16 matrices in a plain loop, ten times slower than fp32. Widening the
operands, multiplying in fp32 and rounding the product once to bf16 is what bf16 matrix units do, in
the forward and (through autograd, which rounds each gradient to bf16) in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SLOW_BF16 = ("DEFAULT", "NO AVX", "AVX2")  # torch.backends.cpu.get_cpu_capability()


class _LinearThroughFp32(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # matmul is FusedLinear's input gradient, which runs in Python
        if func in (functional.linear, torch.Tensor.matmul) and args[0].dtype is torch.bfloat16:
            wide = (a if a is None else a.float() for a in args)
            return func(*wide, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def fast_bf16_linears(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which bf16 linear layers on ``device`` are not needlessly slow."""
    slow = device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in SLOW_BF16
    return _LinearThroughFp32() if slow else nullcontext()
