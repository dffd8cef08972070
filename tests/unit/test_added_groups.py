"""`add_param_group` on the wrapper takes and refuses what it does on a bare optimizer."""

import re

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_equal_parameters, values
from tests.models import Mlp, backward, train
from tests.protocol_cases import bare_and_wrapped, hyper_parameters


def test_a_group_added_between_steps_trains_as_on_a_bare_optimizer_with_a_scheduler_made_before():
    (bare_model, model), runs = (Mlp(torch.float32, has_norm=False), Mlp(torch.float32, has_norm=False)), []
    for one_model in (bare_model, model):
        opt = torch.optim.AdamW(one_model.first.parameters(), lr=0.01)
        opt = opt if one_model is bare_model else FusedMainGradOptimizer(opt)
        runs.append((one_model, opt, torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)))
    for number in range(9):
        for one_model, opt, scheduler in runs:
            if number == 3:
                opt.zero_grad()
                opt.add_param_group({"params": list(one_model.second.parameters()), "weight_decay": 0.5, "lr": 0.04})
            train(one_model, opt, [number])
            one_model.zero_grad()
            scheduler.step()
        assert hyper_parameters(runs[0][1]) == hyper_parameters(runs[1][1])
        assert_equal_parameters(model, bare_model)
    optimizer = runs[1][1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert optimizer.param_groups[1]["weight_decay"] == 0.5
    assert optimizer.param_groups[1]["lr"] < 0.04
    assert all(param.main_grad is not None for param in model.parameters())
    assert not torch.equal(model.second.weight, Mlp(torch.float32, has_norm=False).second.weight)


@pytest.mark.parametrize("form", ["tensor", "list", "generator", "named", "empty"])
def test_add_param_group_takes_what_torch_takes(form):
    model = Mlp(torch.bfloat16, has_norm=False)
    is_named = form == "named"
    first = model.first.named_parameters() if is_named else model.first.parameters()
    optimizer = FusedMainGradOptimizer(torch.optim.AdamW(first, lr=0.01))
    bare = torch.optim.AdamW(
        Mlp(torch.float32, has_norm=False).first.named_parameters() if is_named else [nn.Parameter(torch.ones(1))],
        lr=0.01,
    )
    params = {
        "tensor": lambda: model.second.weight,
        "list": lambda: [model.second.weight],
        "generator": lambda: (param for param in [model.second.weight]),
        "named": lambda: [("head.weight", model.second.weight)],
        "empty": lambda: [],
    }[form]
    before = model.second.weight.clone()
    bare.add_param_group({"params": params(), "lr": 0.02})
    optimizer.add_param_group({"params": params(), "lr": 0.02})
    added, expected = optimizer.param_groups[1], bare.param_groups[1]
    assert {key: value for key, value in added.items() if key != "params"} == {
        key: value for key, value in expected.items() if key != "params"
    }
    assert [id(param) for param in added["params"]] == [id(param) for param in expected["params"]]
    for number in range(3):
        backward(model, number)
        optimizer.step()
        model.zero_grad()
    assert torch.equal(model.second.weight, before) == (form == "empty")
    if is_named:
        assert added["param_names"] == ["head.weight"]
        del model.second.weight.main_grad
        with pytest.raises(RuntimeError, match=re.escape("parameter head.weight")):
            optimizer.step()


def refused_groups(model):
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    return {
        "again": ({"params": [model.first.weight]}, RuntimeError, "already has a main_grad"),
        "twice": ({"params": [model.second.weight, model.second.weight]}, ValueError, "is given twice"),
        "frozen twice": ({"params": [frozen, frozen]}, ValueError, "is given twice"),
        "complex": ({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]}, TypeError, "complex64"),
        "names": ({"params": [("a", model.second.weight)]}, ValueError, "with/without names"),
        "set": ({"params": {model.second.weight}}, TypeError, "ordered collections"),
    }


@pytest.mark.parametrize("case", ["again", "twice", "frozen twice", "complex", "names", "set"])
def test_a_group_that_cannot_be_added_changes_nothing(case):
    (bare_model, bare), (model, optimizer) = bare_and_wrapped(lambda model: torch.optim.AdamW(model.first.parameters()))
    train(bare_model, bare, [0])
    train(model, optimizer, [0])
    group, error, message = refused_groups(model)[case]
    with pytest.raises(error, match=re.escape(message)):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert not hasattr(model.second.weight, "main_grad")
    for number in range(3):
        train(bare_model, bare, [number])
        train(model, optimizer, [number])
    assert_equal_parameters(model, bare_model)
    assert len(optimizer.unwrap().param_groups) == 1


def test_with_several_inner_optimizers_a_group_says_which_one_it_joins():
    model = Mlp(torch.float32, has_norm=False)
    inners = [torch.optim.Muon([model.first.weight], lr=0.01), torch.optim.AdamW([model.first.bias], lr=0.02)]
    optimizer = FusedMainGradOptimizer(inners)
    for inner in ({}, {"inner": 2}, {"inner": "AdamW"}):
        with pytest.raises(ValueError, match=r"needed is the number of one of \(0: Muon, 1: AdamW\)"):
            optimizer.add_param_group({"params": [model.second.bias], **inner})
    optimizer.add_param_group({"params": [model.second.weight], "inner": 0, "lr": 0.5})
    optimizer.add_param_group({"params": [model.second.bias], "inner": 1})
    assert [len(inner.param_groups) for inner in inners] == [2, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.5, 0.02]
    before = values(model)
    train(model, optimizer, range(3))
    assert not any(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))
    optimizer.param_groups[2]["lr"] = 0.25
    train(model, optimizer, [3])
    assert inners[0].param_groups[1]["lr"] == 0.25


def test_a_frozen_parameter_cannot_join_a_second_inner_optimizer():
    model, frozen = Mlp(torch.float32, has_norm=False), nn.Parameter(torch.ones(2), requires_grad=False)
    inners = [torch.optim.SGD([model.first.weight, frozen], lr=0.1), torch.optim.AdamW([model.second.weight])]
    optimizer = FusedMainGradOptimizer(inners)
    with pytest.raises(ValueError, match="number 1 of the group is in a group already"):
        optimizer.add_param_group({"params": [model.second.bias, frozen], "inner": 1})
    assert len(inners[1].param_groups) == 1
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": [model.second.bias], "inner": 1})
    assert [len(inner.param_groups) for inner in inners] == [1, 2]
