"""The plain-torch twin: what fusedopt must compute, without buffers, hooks or views.

fp32 copies of the parameters, fp32 sums of the gradients, the bare optimizer on the copies. Slow and
obvious; used as the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Reference:
    """Train ``model`` (any dtype) with fp32 main parameters and fp32 gradient sums.

    Args:
        model: its parameters are rounded from the main ones after each step.
        make_optimizer: given the groups (lists of fp32 parameters, one per model parameter), an optimizer.
        groups: the model's parameters, by group.
        max_grad_norm: clip the global norm, None not at all.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer],
        groups: Iterable[Iterable[nn.Parameter]] | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.model = model
        self.groups = [list(group) for group in (groups or [model.parameters()])]
        self.params = [param for group in self.groups for param in group]
        self.mains = {p: nn.Parameter(p.detach().clone().to(_main_dtype(p))) for p in self.params}
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.optimizer = make_optimizer([[self.mains[p] for p in group] for group in self.groups])
        self.max_grad_norm = max_grad_norm

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients, each rounded once by autograd, to the fp32 sums."""
        grads = torch.autograd.grad(loss, self.params, allow_unused=True)
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                grad = grad.to(_main_dtype(param))
                self.sums[param] = self.sums[param] + grad if param in self.sums else grad.clone()

    @torch.no_grad()
    def step(self, divide_by: int = 1) -> None:
        """Average, clip, step the bare optimizer, round into the model, clear."""
        for param, main in self.mains.items():
            main.grad = self.sums[param] / divide_by if param in self.sums else None
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.mains.values(), self.max_grad_norm)
        self.optimizer.step()
        for param, main in self.mains.items():
            if param in self.sums:
                param.copy_(main)
        self.sums.clear()


def _main_dtype(param: Tensor) -> torch.dtype:
    return torch.float64 if param.dtype is torch.float64 else torch.float32
