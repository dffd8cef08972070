"""Learning rates and other hyper-parameters: torch's schedulers, edits by hand, and what the inner optimizer writes."""

import inspect
import re
from copy import deepcopy

import pytest
import torch
from torch.optim import swa_utils

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_equal_parameters, values
from tests.models import Mlp, backward, train
from tests.protocol_cases import adamw, adamw_and_muon, bare_and_wrapped, hyper_parameters, sgd, two_groups

# -- schedulers, discovered

ARGUMENTS = {
    "lr_lambda": lambda epoch: 0.9 ** (epoch + 1),
    "step_size": 2,
    "milestones": [2, 5],
    "gamma": 0.8,
    "total_iters": 6,
    "T_max": 6,
    "T_0": 3,
    "base_lr": 0.001,
    "max_lr": 0.02,
    "step_size_up": 3,
    "total_steps": 12,
    "patience": 0,
    "swa_lr": 0.05,
    "anneal_epochs": 4,
}


def scheduler_classes():
    base = torch.optim.lr_scheduler.LRScheduler
    members = [value for module in (torch.optim.lr_scheduler, swa_utils) for value in vars(module).values()]
    found = {value for value in members if inspect.isclass(value) and issubclass(value, base)}
    abstract = {cls for cls in found if cls.get_lr is base.get_lr and cls.step is base.step}
    return sorted(found - abstract, key=lambda cls: cls.__name__)


def make_scheduler(cls, optimizer):
    """Build a scheduler from its signature; a required argument that is not in ARGUMENTS is an error here."""
    parts = [torch.optim.lr_scheduler.LinearLR, torch.optim.lr_scheduler.ExponentialLR]
    arguments = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "optimizer":
            arguments[name] = optimizer
        elif name == "schedulers":
            arguments[name] = [make_scheduler(part, optimizer) for part in parts]
        elif name == "milestones" and "schedulers" in arguments:
            arguments[name] = [3]
        elif name in ARGUMENTS:
            arguments[name] = ARGUMENTS[name]
        else:
            assert parameter.default is not inspect.Parameter.empty, f"{cls.__name__} needs {name}: add it to ARGUMENTS"
    return cls(**arguments)


def step_scheduler(scheduler):
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def test_schedulers_were_discovered():
    names = {cls.__name__ for cls in scheduler_classes()}
    assert len(names) >= 16
    assert names >= {"LambdaLR", "OneCycleLR", "CyclicLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}


@pytest.mark.parametrize("make", [adamw, sgd], ids=lambda make: make.__name__)
@pytest.mark.parametrize("cls", scheduler_classes(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("where", ["on the wrapper", "on the inner, before wrapping"])
def test_scheduler_drives_the_wrapper_as_it_drives_a_bare_optimizer(cls, make, where):
    bare_model, model = Mlp(torch.float32, has_norm=False), Mlp(torch.float32, has_norm=False)
    bare, inner = make(bare_model), make(model)
    bare_scheduler = make_scheduler(cls, bare)
    if where == "on the wrapper":
        optimizer = FusedMainGradOptimizer(inner)
        scheduler = make_scheduler(cls, optimizer)
    else:
        scheduler = make_scheduler(cls, inner)
        optimizer = FusedMainGradOptimizer(inner)
    driven = []
    for number in range(10):
        for one_model, opt, sched in ((bare_model, bare, bare_scheduler), (model, optimizer, scheduler)):
            backward(one_model, number)
            opt.step()
            opt.zero_grad()
            step_scheduler(sched)
        assert hyper_parameters(inner if where != "on the wrapper" else optimizer) == hyper_parameters(bare)
        assert_equal_parameters(model, bare_model)
        driven.append(bare.param_groups[0]["lr"])
    assert len(set(driven)) > 1
    train(model, optimizer, [99])  # one more, so that the last values have reached both sides
    assert hyper_parameters(optimizer) == hyper_parameters(inner) == hyper_parameters(bare)


def test_a_scheduler_that_cycles_momentum_was_followed():
    (_, _), (model, optimizer) = bare_and_wrapped(sgd)
    inner = optimizer.unwrap()
    optimizer = FusedMainGradOptimizer(inner)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=12)
    seen = set()
    for number in range(6):
        train(model, optimizer, [number])
        seen.add(inner.param_groups[0]["momentum"])
        scheduler.step()
    assert len(seen) == 6


def test_one_scheduler_on_several_inner_optimizers_drives_each_as_one_of_its_own():
    bare_model, model = Mlp(torch.float32, has_norm=False), Mlp(torch.float32, has_norm=False)
    bares, optimizer = adamw_and_muon(bare_model), FusedMainGradOptimizer(adamw_and_muon(model))
    bare_schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(bare, T_max=5) for bare in bares]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    for number in range(5):
        backward(bare_model, number)
        for bare, bare_scheduler in zip(bares, bare_schedulers, strict=True):
            bare.step()
            bare_scheduler.step()
        bare_model.zero_grad()
        train(model, optimizer, [number])
        scheduler.step()
        assert_equal_parameters(model, bare_model)
        assert hyper_parameters(optimizer) == [group for bare in bares for group in hyper_parameters(bare)]
    assert optimizer.param_groups[0]["lr"] < 0.001


# -- hyper-parameters


def test_a_value_set_on_the_wrapper_reaches_the_inner_optimizer_and_back():
    model = Mlp(torch.float32, has_norm=False)
    inner = adamw(model)
    optimizer = FusedMainGradOptimizer(inner)
    train(model, optimizer, [0])
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, [1])
    assert inner.param_groups[0]["lr"] == 0.5
    inner.param_groups[1]["weight_decay"] = 0.25
    train(model, optimizer, [2])
    assert optimizer.param_groups[1]["weight_decay"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.125
    train(model, optimizer, [3])
    assert optimizer.unwrap().param_groups[0]["lr"] == 0.125


class SelfTuning(torch.optim.SGD):
    """Writes its own lr and a new key into its groups, as schedule-free and Prodigy do."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
            group["k"] = group.get("k", 0) + 1
        return loss


def test_what_the_inner_optimizer_writes_into_its_groups_shows_on_the_wrapper():
    (bare_model, bare), (model, optimizer) = bare_and_wrapped(lambda model: SelfTuning(two_groups(model), lr=1.0))
    for number in range(3):
        train(bare_model, bare, [number])
        train(model, optimizer, [number])
        assert [group["k"] for group in optimizer.param_groups] == [number + 1] * 2
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in bare.param_groups]
        assert_equal_parameters(model, bare_model)
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    train(bare_model, bare, [3])
    train(model, optimizer, [3])
    assert [group["k"] for group in optimizer.param_groups] == [4, 4]
    assert_equal_parameters(model, bare_model)


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas"])
def test_a_value_changed_on_both_sides_raises_naming_group_and_key(key):
    both = {"lr": (0.3, 0.4), "weight_decay": (0.0, 0.5), "betas": ((0.5, 0.5), (0.6, 0.6))}[key]
    model = Mlp(torch.bfloat16, has_norm=False)
    inner = adamw(model)
    optimizer = FusedMainGradOptimizer(inner)
    train(model, optimizer, range(2))
    before = values(model)
    optimizer.param_groups[1][key], inner.param_groups[1][key] = both
    optimizer.param_groups[0]["lr"] = 0.75
    backward(model, 2)
    with pytest.raises(RuntimeError, match=re.escape(f"param_groups[1]['{key}'] was changed on both sides")) as caught:
        optimizer.step()
    assert all(repr(value) in str(caught.value) for value in both)
    assert "one side only" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    assert inner.param_groups[0]["lr"] == 0.01  # nothing was carried
    inner.param_groups[1][key] = both[0]  # both sides say the same now
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    assert inner.param_groups[0]["lr"] == 0.75


def test_the_same_value_set_on_both_sides_is_no_conflict():
    model = Mlp(torch.float32, has_norm=False)
    inner = adamw(model)
    optimizer = FusedMainGradOptimizer(inner)
    optimizer.param_groups[0]["lr"] = inner.param_groups[0]["lr"] = 0.3
    train(model, optimizer, range(3))
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.3


def tensor_lr(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def test_a_tensor_lr_is_filled_in_place_by_schedulers_by_hand_and_after_loading():
    bare_model, model = Mlp(torch.float32, has_norm=False), Mlp(torch.float32, has_norm=False)
    bare, inner = tensor_lr(bare_model), tensor_lr(model)
    lr = inner.param_groups[0]["lr"]
    optimizer = FusedMainGradOptimizer(inner)
    bare_scheduler = torch.optim.lr_scheduler.ExponentialLR(bare, gamma=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def assert_same_tensor(value):
        assert optimizer.param_groups[0]["lr"] is lr
        assert inner.param_groups[0]["lr"] is lr
        assert lr.item() == pytest.approx(value, rel=2**-23)

    for number in range(4):
        train(bare_model, bare, [number])
        train(model, optimizer, [number])
        assert_same_tensor(0.01 * 0.5**number)
        bare_scheduler.step()
        scheduler.step()
        assert_equal_parameters(model, bare_model)
    saved = deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25  # rebound by hand to a float: the tensor is filled at the next step
    train(model, optimizer, [4])
    assert_same_tensor(0.25)
    optimizer.load_state_dict(saved)
    assert_same_tensor(0.01 * 0.5**4)
    for number in range(5, 8):
        scheduler.step()
        train(model, optimizer, [number])
        assert_same_tensor(0.01 * 0.5**number)
