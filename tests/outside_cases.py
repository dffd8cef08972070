"""What the tests of weights changed from outside share: a wrapped model with digits that only main_param has."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedopt import FusedMainGradOptimizer
from tests.models import Mlp, train

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def loss_of(net: Mlp, number: int) -> Tensor:
    """Return the mean square of outputs: it moves many weights, so that clamping them is no edit of a few elements."""
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(100 + number))
    return net(x).square().mean()


class Wrapped:
    """A model with SGD, trained a few steps, so that main_params have digits that the model has not."""

    def __init__(self, dtype=torch.bfloat16, make=None, num_steps=3):
        self.net = Mlp(dtype, has_norm=False)
        self.inner = (make or (lambda params: torch.optim.SGD(params, lr=0.01)))(self.net.parameters())
        self.optimizer = FusedMainGradOptimizer(self.inner)
        train(self.net, self.optimizer, range(num_steps), loss_of=loss_of)
        self.weight = self.net.first.weight

    @property
    def main_params(self):
        return [p for group in self.inner.param_groups for p in group["params"]]

    @property
    def main(self):
        """main_param of ``net.first.weight``."""
        return self.main_params[0]

    def loss(self, number):
        return loss_of(self.net, number)

    def train(self, number):
        train(self.net, self.optimizer, [number], loss_of=loss_of)

    def step_without_gradients(self):
        """A step that moves nothing by itself: what it changes came from outside."""
        assert all(p.grad is None for p in self.net.parameters())
        self.optimizer.step()


class ThroughData(torch.optim.SGD):
    """Writes through ``.data`` alone, which bumps no version."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
