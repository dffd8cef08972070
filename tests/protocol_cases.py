"""What the tests of torch's own optimizer protocol share: equal models with equal optimizers, one of them wrapped."""

from __future__ import annotations

import torch

from fusedopt import FusedMainGradOptimizer
from tests.models import Mlp


def two_groups(model):
    return [{"params": list(model.first.parameters())}, {"params": list(model.second.parameters()), "lr": 0.02}]


def adamw(model):
    return torch.optim.AdamW(two_groups(model), lr=0.01, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(two_groups(model), lr=0.01, momentum=0.9)


def adamw_and_muon(model):
    others = [param for param in model.parameters() if param is not model.first.weight]
    return [torch.optim.Muon([model.first.weight], lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def bare_and_wrapped(make=adamw, dtype=torch.float32):
    """Return two equal models with equal optimizers, the second wrapped: ``(model, optimizer), (model, optimizer)``."""
    bare_model, wrapped_model = Mlp(dtype, has_norm=False), Mlp(dtype, has_norm=False)
    return (bare_model, make(bare_model)), (wrapped_model, FusedMainGradOptimizer(make(wrapped_model)))


def hyper_parameters(optimizer):
    keys = ("lr", "momentum", "betas", "initial_lr")
    return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]
