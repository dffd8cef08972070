"""How an inner optimizer may be sharded is found out by running it."""

import prodigyopt
import pytest
import schedulefree
import torch
from lion_pytorch import Lion
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fusedopt
from fusedopt.inner import InnerOptimizers
from fusedopt.probe import shard_by

MATRIX = (6, 4)


def inner(cls, **settings):
    return InnerOptimizers([cls([nn.Parameter(torch.ones(MATRIX))], **settings)])


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.RMSprop, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (Lion, {"lr": 1e-3}),
        (schedulefree.AdamWScheduleFree, {"lr": 1e-2}),
    ],
)
def test_an_element_wise_optimizer_is_cut_anywhere(cls, settings):
    optimizers = inner(cls, **settings)
    if hasattr(optimizers.optimizers[0], "train"):
        optimizers.optimizers[0].train()
    assert shard_by(optimizers, "auto", 0) == "element"
    assert shard_by(optimizers, "parameter", 0) == "parameter"


@pytest.mark.parametrize(("cls", "settings"), [(torch.optim.Muon, {"lr": 1e-2}), (torch.optim.Adafactor, {"lr": 1e-2})])
def test_a_shape_aware_optimizer_gets_whole_parameters(cls, settings):
    optimizers = inner(cls, **settings)
    assert shard_by(optimizers, "auto", 0) == "parameter"
    with pytest.raises(ValueError, match=rf'shard_by="element" cuts through.*{cls.__name__}.*shard_by="parameter"'):
        shard_by(optimizers, "element", 0)


def test_an_optimizer_that_couples_parameters_is_refused():
    with pytest.raises(ValueError, match=r'Prodigy cannot be sharded.*depends on the others.*shard="none"'):
        shard_by(inner(prodigyopt.Prodigy, lr=1.0), "auto", 0)


def test_probing_leaves_the_optimizer_and_the_random_numbers_alone():
    param = nn.Parameter(torch.randn(MATRIX))
    optimizer = torch.optim.AdamW([param], lr=torch.tensor(0.5))
    calls = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(args))
    state, value = torch.random.get_rng_state(), param.detach().clone()
    assert shard_by(InnerOptimizers([optimizer]), "auto", 0) == "element"
    handle.remove()
    assert calls == []
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(param.detach(), value)
    assert optimizer.state == {}
    assert optimizer.param_groups[0]["lr"].item() == 0.5


class Noisy(torch.optim.Optimizer):
    """Element-wise, but draws random numbers."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad + torch.randn(param.numel()).view_as(param))


class Broken(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        raise RuntimeError("not today")


def test_noise_is_drawn_alike_and_what_cannot_be_run_is_kept_whole():
    assert shard_by(inner(Noisy), "auto", 0) == "element"
    assert shard_by(inner(Broken), "auto", 0) == "parameter"


def test_one_process_needs_no_shard_and_probes_nothing():
    param = nn.Parameter(torch.ones(MATRIX))
    optimizer = fusedopt.FusedMainGradOptimizer(Broken([param]), shard="optimizer")
    param.sum().backward()
    assert param.grad is param.main_grad
    with pytest.raises(RuntimeError, match="not today"):
        optimizer.step()
