"""The small models that tests train, their losses, and the loops that train them.

A model that one test file needs for a reason of its own stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fusedopt import FusedLinear, MainGradFunction
from tests.reference import Reference


class OwnLinear(MainGradFunction):
    """A user's own layer, ``x @ weight.T``, which adds its weight gradient to main_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output @ weight, MainGradFunction.addmm_to_main_grad(ctx, weight, grad_output, x)


class Mlp(nn.Sequential):
    """Two linear layers, ``first`` and ``second``, with a norm and a tanh between them.

    Takes inputs of any dtype and returns float32. Weights are drawn in float32, then rounded: models of one seed start
    alike, whatever their dtype.

    Args:
        dtype: of all parameters.
        seed: of the weights.
        sizes: features that go in, between the layers, and out.
        has_norm: else ``first``, the tanh and ``second`` are all there is.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        *,
        sizes: tuple[int, int, int] = (5, 6, 3),
        has_norm: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(sizes[0], sizes[1])
        if has_norm:
            self.norm = nn.LayerNorm(sizes[1])
        self.tanh = nn.Tanh()
        self.second = nn.Linear(sizes[1], sizes[2])
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.first.weight.dtype)).float()


def loss_of(net: Mlp, number: int) -> Tensor:
    """Return the mean squared error of `Mlp` on batch ``number``, of seven rows."""
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(7, net.first.in_features, generator=generator)
    y = torch.randn(7, net.second.out_features, generator=generator)
    device = net.first.weight.device
    return (net(x.to(device)) - y.to(device)).square().mean()


def backward(
    net: nn.Module, number: int = 0, factor: float = 1.0, loss_of: Callable[[nn.Module, int], Tensor] = loss_of
) -> Tensor:
    """Return ``factor`` times the loss on batch ``number``, after its backward."""
    loss = loss_of(net, number) * factor
    loss.backward()
    return loss


class TokenNet(nn.Module):
    """Predicts tokens by an embedding, a norm, a layer, and layers that are not used in every micro-batch.

    ``sometimes`` is used in even micro-batches only. Weights are drawn in float32, then rounded.

    Args:
        dtype: of all parameters.
        head: a "linear" layer; the "tied" weight of the embedding; or a parameter that starts as its "copy".
        late: the micro-batch from which on the layer ``late`` is used; without, there is none.
        has_unused: whether there is a layer ``never``, which nothing uses.
    """

    NUM_TOKENS = 11

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        *,
        head: str = "tied",
        late: int | None = None,
        has_unused: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(self.NUM_TOKENS, 8)
        self.norm = nn.LayerNorm(8)
        self.hidden = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8, bias=False)
        self.first_use_of_late = late
        if late is not None:
            self.late = nn.Linear(8, 8)
        if has_unused:
            self.never = nn.Linear(3, 2)
        copy = nn.Parameter(self.embed.weight.detach().clone())
        self.head = {"linear": nn.Linear(8, self.NUM_TOKENS), "tied": None, "copy": copy}[head]
        self.to(dtype)

    def forward(self, tokens: Tensor, number: int) -> Tensor:
        x = torch.tanh(self.hidden(self.norm(self.embed(tokens))))
        if number % 2 == 0:
            x = x + self.sometimes(x)
        if self.first_use_of_late is not None and number >= self.first_use_of_late:
            x = x + self.late(x)
        if isinstance(self.head, nn.Linear):
            return self.head(x)
        return nn.functional.linear(x, self.embed.weight if self.head is None else self.head)


def token_loss_of(net: TokenNet, number: int) -> Tensor:
    """Return the cross entropy of `TokenNet` in micro-batch ``number``: it is to repeat each of ten tokens."""
    tokens = torch.randint(0, net.NUM_TOKENS, (2, 5), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(net(tokens, number).float().flatten(0, 1), tokens.flatten())


class OneOfEachKind(nn.Module):
    """A linear, a fused linear, an embedding, a norm and a bias, whose gradients are the factor of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.fused = FusedLinear(1, 1)
        self.embedding = nn.Embedding(1, 1)
        self.norm = nn.RMSNorm(1)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, factor: float) -> Tensor:
        one = torch.ones(1, 1, dtype=self.bias.dtype, device=self.bias.device)
        token = torch.zeros(1, dtype=torch.long, device=self.bias.device)
        # x / |x| is 1 for a norm over one element, so that its weight's gradient is the factor too.
        terms = self.linear(one), self.fused(one), self.embedding(token), self.norm(one), self.bias
        return sum((term * factor).sum() for term in terms)


def tiny_llama(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changed: object) -> nn.Module:
    """Return transformers' LLaMA with two layers of 32 features; ``changed`` are settings of its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changed})).to(dtype)


def integers(
    *shape: int, limit: int = 3, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu"
) -> Tensor:
    """Return random integers from ``-limit`` to ``limit``: sums of their products are exact, in any order."""
    return torch.randint(-limit, limit + 1, shape, device=device).to(dtype)


# -- optimizers and loops


def adamw(net: nn.Module, **settings: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(net.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **settings})


def muon_and_adamw(net: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon over the matrices of ``net`` and AdamW over the rest."""
    matrices = [param for param in net.parameters() if param.ndim == 2]
    others = [param for param in net.parameters() if param.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


INNERS = {
    "loop": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "fused sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}
"""AdamW in each of its forms, and a fused SGD: the forms take roads of their own through a step."""


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    numbers: Iterable[int],
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    loss_of: Callable[[nn.Module, int], Tensor] = loss_of,
) -> None:
    """Train a step on each of the batches ``numbers``, and leave no gradients."""
    for number in numbers:
        loss_of(net, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def train_reference(
    reference: Reference, numbers: Iterable[int], loss_of: Callable[[nn.Module, int], Tensor] = loss_of
) -> None:
    """Do what `train` does with the twin."""
    for number in numbers:
        reference.backward(loss_of(reference.model, number))
        reference.step()
