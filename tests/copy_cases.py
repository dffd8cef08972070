"""What the tests of copies and of unwrapping share: optimizers of several kinds, and all bits of a wrapped model."""

from __future__ import annotations

import functools

import torch

from tests.compare import frozen
from tests.models import adamw, muon_and_adamw


class Mixed(torch.optim.Optimizer):
    """SGD with state in fp64 and bf16, whatever the dtype of the parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[param]
            if not state:
                state["sum"] = torch.zeros(param.shape, dtype=torch.float64)
                state["low"] = torch.zeros(param.shape, dtype=torch.bfloat16)
            state["sum"] += param.grad.double() / 3
            state["low"] += param.grad.to(torch.bfloat16)
            param.add_((state["sum"] + state["low"]).to(param.dtype), alpha=-self.param_groups[0]["lr"])


OPTIMIZERS = {
    "AdamW": functools.partial(adamw, foreach=False),
    "AdamW fused": functools.partial(adamw, fused=True),
    "AdamW amsgrad, tensor lr": lambda net: adamw(net, amsgrad=True, lr=torch.tensor(0.01)),
    "SGD momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "Muon + AdamW": muon_and_adamw,
    "fp64 and bf16 state": lambda net: Mixed(net.parameters()),
}


def everything(net, optimizer):
    state_dict = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group.pop("differentiable", None)  # torch adds it to the defaults of any optimizer that it unpickles
    return frozen([dict(net.named_parameters()), state_dict])
