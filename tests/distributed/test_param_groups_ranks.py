"""Edits of `param_groups` on several ranks: as on one process, in every shard; or all ranks raise."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedopt import FusedMainGradOptimizer
from tests.distributed.launcher import run

SHARDS = ["none", "optimizer", "gradients"]
SHAPES = [(3, 5), (7,), (4, 4), (1,), (11,), (2, 3)]


def make(shard, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    params = nn.ParameterList([torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES])
    groups = [{"params": [p], "lr": 0.5**i} for i, p in enumerate(params[:3])] + [
        {"params": list(params[3:]), "lr": 0.25}
    ]
    settings = {"shard": shard, "shard_by": "element"} if shard not in (None, "none") else {}
    return params, FusedMainGradOptimizer(torch.optim.SGD(groups, lr=1.0, momentum=0.5), max_grad_norm=40.0, **settings)


def step(params, optimizer, number, factor):
    """Step with gradients that are powers of two times small integers: exact sums and means."""
    generator = torch.Generator().manual_seed(number)
    loss = sum((p * torch.randint(-4, 5, p.shape, generator=generator).to(p.dtype)).sum() for p in params)
    (loss * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
    for param in params:
        if not hasattr(param, "main_grad"):  # it was taken out
            param.grad = None


def factor_of(rank):
    return 1 + 2 * rank  # on two ranks the mean is 2


def edited_run(rank, shard, factor=None):
    params, optimizer = make(shard)
    groups = optimizer.param_groups
    trace = []

    def go(number):
        step(params, optimizer, number, factor or factor_of(rank))
        trace.append([param.detach().clone() for param in params])

    go(0)
    groups.reverse()
    go(1)
    groups.pop(1)
    go(2)
    groups[0]["params"].pop(1)
    go(3)
    groups[1]["lr"] = 0.125
    groups[0]["params"].reverse()
    go(4)
    optimizer.consolidate_state_dict()
    return trace, optimizer.state_dict()


@pytest.mark.parametrize("shard", SHARDS)
def test_edits_on_all_ranks_end_as_in_one_process(shard):
    expected, state = edited_run(0, None, factor=2)
    for rank, (trace, found) in enumerate(run(edited_run, 2, shard, reuses=True)):
        for ours, theirs in zip(trace, expected, strict=True):
            assert all(bool(torch.isfinite(value).all()) for value in theirs)
            assert all(map(torch.equal, ours, theirs))
        if rank == 0:
            for number, values in state["state"].items():
                for key, value in values.items():
                    assert torch.equal(found["state"][number][key], value)


def edit_on_one_rank(rank, shard, edit):
    params, optimizer = make(shard)
    step(params, optimizer, 0, factor_of(rank))
    if rank == 1:
        edit_of(edit)(optimizer, params)
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError) as caught:
        step(params, optimizer, 1, factor_of(rank))
    assert all(map(torch.equal, before, params))
    return str(caught.value)


def edit_of(name):
    return {
        "remove": lambda o, p: o.param_groups.pop(),
        "reverse": lambda o, p: o.param_groups.reverse(),
        "add": lambda o, p: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(3))),
    }[name]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("edit", ["remove", "reverse"])
def test_an_edit_on_one_rank_only_raises_on_all(edit, shard):
    for text in run(edit_on_one_rank, 2, shard, edit, reuses=True):
        assert "on all" in text


def add_by_hand(rank, shard):
    params, optimizer = make(shard)
    step(params, optimizer, 0, factor_of(rank))
    optimizer.param_groups[0]["params"].append(added := nn.Parameter(torch.full((3,), float(rank))))
    before = [param.detach().clone() for param in params]
    with pytest.raises(RuntimeError, match=r"call optimizer.add_param_group\(\) on all ranks"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [added], "lr": 1.0})
    added.sum().backward()
    optimizer.step()
    return added.tolist()


@pytest.mark.parametrize("shard", SHARDS)
def test_a_parameter_that_is_added_by_hand_is_refused_and_add_param_group_gives_all_ranks_its_values(shard):
    assert run(add_by_hand, 2, shard, reuses=True) == [[-1.0] * 3] * 2


class WithEmptyGroup(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)

    def optimizer(self, shard, lr):
        groups = [{"params": list(self.first.parameters())}, {"params": [], "lr": lr}]
        inner = torch.optim.AdamW([*groups, {"params": list(self.last.parameters())}], lr=0.1)
        return FusedMainGradOptimizer(inner, **({"shard": shard} if shard not in (None, "none") else {}))


def empty_group(rank, shard, broadcast):
    saved_model, model = WithEmptyGroup(), WithEmptyGroup()
    saved, optimizer = saved_model.optimizer(shard, 0.5), model.optimizer(shard, 0.55)
    saved_model.last(saved_model.first(torch.ones(1, 3))).sum().backward()
    saved.step()
    saved.param_groups[0]["lr"], saved.param_groups[1]["lr"] = 0.2, 0.7
    if not broadcast:
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(saved_model, saved))
    else:
        saved.consolidate_state_dict()
        names = [name for name, _ in model.named_parameters()]
        whole = saved.state_dict() if rank == 0 else {}
        if whole:
            whole["state"] = {names[index]: values for index, values in whole["state"].items()}
            for group in whole["param_groups"]:
                group["params"] = [names[index] for index in group["params"]]
            whole.pop("fusedopt")
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(model, optimizer, whole, options=options)
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
def test_torchs_checkpoints_load_the_hyper_parameters_of_a_group_without_parameters(shard, broadcast):
    assert run(empty_group, 2, shard, broadcast, reuses=True) == [[0.2, 0.7, 0.1]] * 2


def test_so_they_do_in_one_process():
    assert empty_group(0, None, False) == [0.2, 0.7, 0.1]
