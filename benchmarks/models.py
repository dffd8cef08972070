"""The model that is measured: LLaMA-shaped, about 30 M parameters, random weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

SLOW_BF16 = ("DEFAULT", "NO AVX", "AVX2")
"""Values of ``torch.backends.cpu.get_cpu_capability()`` where torch multiplies bf16 matrices in a plain loop."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA, and of the micro-batches that are run through it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    batch_size: int
    num_tokens: int  # of each sequence


FULL = Shape(4096, 512, 1408, 8, 8, batch_size=4, num_tokens=256)  # 29.9 M parameters in 75 tensors
TINY = Shape(256, 64, 160, 2, 2, batch_size=2, num_tokens=16)  # 0.13 M parameters in 21 tensors


def make_llama(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a ``LlamaForCausalLM`` with the same random weights at every call."""
    sizes = asdict(shape)
    config = LlamaConfig(
        **{key: sizes[key] for key in sizes if key not in ("batch_size", "num_tokens")},
        num_key_value_heads=shape.num_attention_heads,
        max_position_embeddings=shape.num_tokens,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(dtype)


def numel(model: nn.Module) -> int:
    """Return the number of parameters of ``model``, a tied one once."""
    return sum(param.numel() for param in model.parameters())


class _LinearThroughFp32(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.linear and args[0].dtype is torch.bfloat16:
            wide = (a if a is None else a.float() for a in args)
            return func(*wide, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def is_bf16_slow() -> bool:
    """Return whether this CPU has no bf16 instructions that torch uses: its bf16 linears then take the fp32 road."""
    return torch.backends.cpu.get_cpu_capability() in SLOW_BF16


def linears_as_fast_as_fp32() -> AbstractContextManager[object]:
    """Return a context in which bf16 linear layers multiply in fp32 where bf16 products would be ten times slower.

    Slow products would hide whatever a wrapper adds to a backward.
    """
    return _LinearThroughFp32() if is_bf16_slow() else nullcontext()
