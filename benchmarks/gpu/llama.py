"""A LLaMA-shaped model in plain torch, for machines without transformers: RMSNorm, rotary attention, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a LLaMA, and of the micro-batches that are run through it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    batch_size: int
    num_tokens: int  # of each sequence


BILLION = Shape(32000, 2048, 5632, 20, 32, 4, batch_size=4, num_tokens=2048)  # 1.01 B parameters in 183 tensors
TINY = Shape(128, 64, 160, 2, 4, 2, batch_size=2, num_tokens=16)


class Attention(nn.Module):
    """Causal attention with rotary positions, several query heads to a key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.hidden_size // shape.num_heads
        self.num_repeats = shape.num_heads // shape.num_kv_heads
        kv_size = shape.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[batch, tokens, hidden]``."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (heads.repeat_interleave(self.num_repeats, dim=1) for heads in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_norm = nn.RMSNorm(shape.hidden_size)
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[batch, tokens, hidden]``."""
        x = x + self.self_attn(self.input_norm(x), cos, sin)
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """Embedding, layers, norm and head; forward returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden_size)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        head_dim = shape.hidden_size // shape.num_heads
        frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angles = torch.outer(torch.arange(shape.num_tokens, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of predicting each of ``tokens``, ``[batch, tokens]``, from those before it."""
        x = self.embed(tokens)
        cos, sin = (table[: tokens.shape[1]].to(x.dtype) for table in (self.cos, self.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_llama(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Llama:
    """Return a model with the same random weights at every call, made on ``device``."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                model = Llama(shape)
        finally:
            torch.set_default_dtype(before)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.normal_(std=0.02, generator=torch.Generator(device).manual_seed(param.numel()))
    return model


def make_tokens(shape: Shape, device: torch.device, number: int = 0) -> Tensor:
    """Return micro-batch ``number``, ``[batch, tokens]``."""
    generator = torch.Generator(device).manual_seed(number)
    return torch.randint(shape.vocab_size, (shape.batch_size, shape.num_tokens), generator=generator, device=device)


def numel(model: nn.Module) -> int:
    """Return the number of parameters of ``model``, a tied one once."""
    return sum(param.numel() for param in model.parameters())


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
