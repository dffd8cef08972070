"""The model that is measured: LLaMA-shaped, about 30 M parameters, random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    from transformers import LlamaConfig, LlamaForCausalLM  # absent where gpu_check runs, which brings its own model

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


def _through_fp32(product: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(first: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if first.dtype is not torch.bfloat16:
            return product(first, *others, **named)
        wide = [tensor if tensor is None else tensor.float() for tensor in (first, *others, *named.values())]
        return product(*wide).bfloat16()

    return run


def is_bf16_slow() -> bool:
    """Return whether this CPU has no bf16 instructions that torch uses: its bf16 linears then take the fp32 road."""
    return torch.backends.cpu.get_cpu_capability() in SLOW_BF16


@contextmanager
def linears_as_fast_as_fp32() -> Iterator[None]:
    """Return a context in which bf16 linear layers multiply in fp32 where bf16 products would be ten times slower.

    Slow products would hide whatever a wrapper adds to a backward. ``matmul`` is the input gradient of fused layers.
    """
    if not is_bf16_slow():
        yield
        return
    linear, matmul = _through_fp32(functional.linear), _through_fp32(torch.Tensor.matmul)
    with mock.patch.object(functional, "linear", linear), mock.patch.object(torch.Tensor, "matmul", matmul):
        yield


class _LinearThroughFloat32(torch.autograd.Function):
    """A bf16 linear layer whose three products run in fp32; it keeps, as torch's own does, only bf16 operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().T).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_output = grad_output.float()
        grad_input = grad_weight = None
        with torch.autocast("cpu", enabled=False):
            if ctx.needs_input_grad[0]:
                grad_input = (grad_output @ weight.float()).bfloat16()
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_output.flatten(0, -2).T @ x.flatten(0, -2).float()).bfloat16()
        return grad_input, grad_weight


def _linear_under_autocast(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        x, weight = x.bfloat16(), weight.bfloat16()  # as autocast does, seen by autograd; nothing without it
    if bias is not None or x.dtype is not torch.bfloat16 or weight.dtype is not torch.bfloat16:
        raise TypeError(f"found {x.dtype} and {weight.dtype}, needed bf16 operands and no bias; run the layer in bf16")
    with torch.autocast("cpu", enabled=False):
        product: Tensor = _LinearThroughFloat32.apply(x, weight)  # type: ignore[no-untyped-call]
    return product


@contextmanager
def all_linears_as_fast_as_fp32() -> Iterator[None]:
    """Return a context like `linears_as_fast_as_fp32` in which autocast, too, multiplies through fp32.

    The layers of bf16 models and of fp32 models under ``torch.autocast(dtype=bfloat16)`` then run the same
    products, and hold between forward and backward what they hold where bf16 is fast: bf16 operands, no fp32 copies.
    """
    if not is_bf16_slow():
        yield
        return
    with mock.patch.object(functional, "linear", _linear_under_autocast):
        yield
