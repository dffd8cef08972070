"""Others' optimizers on several ranks: closures, empty groups, optimizers inside optimizers, objects in state."""

import collections
import copy
import io

import pytest
import torch
from lion_pytorch.foreach import Lion
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.distributed.launcher import run

SHARDS = ("none", "optimizer", "gradients")


class AliG(torch.optim.SGD):
    """The pattern of pytorch-optimizer's AliG: steps by the loss that its closure returns."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = float(closure())
        for group in self.param_groups:
            group["step_size"] = loss * group["lr"]
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["step_size"])
        return loss


class Climbs(torch.optim.SGD):
    """The pattern of SAM: moves weights, then evaluates."""

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        for p in params:
            p.add_(0.125)
        with torch.enable_grad():
            loss = closure()
        for p in params:
            p.sub_(0.125)
        super().step()
        return loss


class Searches(torch.optim.SGD):
    """Evaluates until the loss is small, or five times: ranks that went by losses of their own would part."""

    def step(self, closure=None):
        for _ in range(5):
            with torch.enable_grad():
                loss = closure()
            if loss < 0.5:
                break
            super().step()
        return loss


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 260, dtype=dtype), nn.Tanh(), nn.Linear(260, 2, dtype=dtype))


def loss_of(model, number, rank):
    generator = torch.Generator().manual_seed(10 * number + rank)
    inputs, targets = torch.randn(4, 4, generator=generator), torch.randn(4, 2, generator=generator)
    return (model(inputs.to(model[0].weight.dtype)).float() - targets).square().mean()


def closures_on_a_rank(rank, cls, shard, world_size, dtype):
    model = make_model(dtype)
    optimizer = FusedMainGradOptimizer(cls(model.parameters(), lr=0.25), shard=shard)
    losses = []
    for number in range(4):

        def closure(number=number):
            optimizer.zero_grad()
            with torch.enable_grad():
                loss = loss_of(model, number, rank)
                loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return losses, [param.detach().clone() for param in model.parameters()]


def closures_alone(cls, world_size):
    model = make_model()
    optimizer = cls(model.parameters(), lr=0.25)
    losses = []
    for number in range(4):

        def closure(number=number):
            optimizer.zero_grad()
            with torch.enable_grad():
                parts = [loss_of(model, number, rank) for rank in range(world_size)]
                for part in parts:
                    part.backward()
                for param in model.parameters():
                    param.grad.div_(world_size)
            return torch.tensor(sum(part.item() for part in parts) / world_size)

        losses.append(float(optimizer.step(closure)))
    return losses, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("cls", [AliG, Climbs, Searches])
def test_ranks_evaluate_alike_and_decide_by_the_mean_of_their_losses_as_one_process(cls):
    results = run(closures_on_a_rank, 2, cls, "none", 2, torch.float32, reuses=True)
    assert results[0][0] == results[1][0]
    expected_losses, expected = closures_alone(cls, 2)
    assert results[0][0] == pytest.approx(expected_losses, rel=1e-6)
    for one, other, alone in zip(results[0][1], results[1][1], expected, strict=True):
        assert bool(torch.isfinite(alone).all())
        assert torch.equal(one, other)
        torch.testing.assert_close(one, alone)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_under_a_shard_an_optimizer_that_evaluates_once_and_first_trains_as_without(shard):
    expected = run(closures_on_a_rank, 2, AliG, "none", 2, torch.float32, reuses=True)
    results = run(closures_on_a_rank, 2, AliG, shard, 2, torch.float32, reuses=True)
    for (losses, params), (want_losses, want) in zip(results, expected, strict=True):
        assert losses == want_losses
        assert all(torch.equal(a, b) for a, b in zip(params, want, strict=True))


def refused_on_a_rank(rank, cls, shard):
    model = make_model()
    optimizer = FusedMainGradOptimizer(cls(model.parameters(), lr=0.25), shard=shard)
    before = [param.detach().clone() for param in model.parameters()]

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = loss_of(model, 0, rank) + 10
            loss.backward()
        return loss

    with pytest.raises(RuntimeError, match=r'moves weights before.*Use shard="none"'):
        optimizer.step(closure)
    optimizer.zero_grad()
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize("cls", [Climbs, Searches])
def test_under_a_shard_an_optimizer_that_moves_first_or_asks_again_is_refused_on_all_ranks(cls, shard):
    assert all(run(refused_on_a_rank, 2, cls, shard, reuses=True))


# -- groups of which a rank has nothing


class Counts(Lion):
    """Fails on an empty group, as lion-pytorch's and adam-atan2-pytorch's foreach forms; counts in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def empty_groups_on_a_rank(rank, cls, shard, dtype, freezes):
    torch.manual_seed(0)
    tensors = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in ((3,), (8, 4), (5, 4), (1,))]
    inner = cls([{"params": [t], "lr": 0.1 * (i + 1)} for i, t in enumerate(tensors[:3])], lr=0.1)
    inner.param_groups[2]["params"].append(tensors[3])
    optimizer = FusedMainGradOptimizer(inner, shard=shard, shard_by="auto" if shard == "none" else "parameter")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    lists = [group["params"] for group in inner.param_groups]
    groups = list(inner.param_groups)
    mine = [list(params) for params in lists]
    for number in range(4):
        optimizer.zero_grad()
        loss = sum((t.float() * (number + rank + 1)).sin().sum() for t in tensors[: 3 if freezes else 4])
        loss.backward()
        optimizer.step()
        scheduler.step()
        assert all(a is b for a, b in zip(inner.param_groups, groups, strict=True))
        assert all(a["params"] is b for a, b in zip(inner.param_groups, lists, strict=True))
        for params, own in zip(lists, mine, strict=True):
            assert len(params) == len(own)
            assert all(a is b for a, b in zip(params, own, strict=True))
        assert all(any(key is main for own in mine for main in own) for key in inner.state)
    state = optimizer.state_dict()
    return (
        [t.detach().clone() for t in tensors],
        [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
        sum(not own for own in mine),
    )


@pytest.mark.parametrize(("dtype", "freezes"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("cls", [Lion, Counts, torch.optim.AdamW])
def test_a_group_of_which_a_rank_has_nothing_is_stepped_by_the_others_and_counted_by_all(cls, dtype, freezes):
    results = {shard: run(empty_groups_on_a_rank, 2, cls, shard, dtype, freezes, reuses=True) for shard in SHARDS}
    assert any(result[2] for result in results["optimizer"])  # one rank does have an empty group
    for shard in SHARDS[1:]:
        for (params, groups, _), (want, want_groups, _) in zip(results[shard], results["none"], strict=True):
            assert all(bool(torch.isfinite(param).all()) for param in want)
            assert all(torch.equal(a, b) for a, b in zip(params, want, strict=True))
            assert groups == want_groups


# -- optimizers inside optimizers


class Splits(torch.optim.Optimizer):
    """The pattern of heavyball's SplitOpt: holds optimizers with lists of their own over its parameters."""

    def __init__(self, params):
        params = list(params)
        self.optimizers = {"matrices": [torch.optim.SGD([p for p in params if p.ndim == 2], lr=0.1, momentum=0.9)]}
        self.rest = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=0.01)
        super().__init__(params, {})

    def step(self, closure=None):
        self.optimizers["matrices"][0].step()
        self.rest.step()


def held_on_a_rank(rank, world_size):
    model = make_model()
    optimizer = FusedMainGradOptimizer(Splits(model.parameters()))
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number, rank).backward()
        optimizer.step()
    return [param.detach().clone() for param in model.parameters()]


def test_parameters_of_a_held_optimizer_train_alike_on_all_ranks():
    results = run(held_on_a_rank, 2, 2, reuses=True)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], make_model()[0].weight)


# -- objects in state


class Window(torch.optim.SGD):
    """The pattern of pytorch-optimizer's AdaShift: keeps its last gradients in a deque; element-wise."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    queue = self.state[p].setdefault("queue", collections.deque(maxlen=2))
                    queue.append(p.grad.clone())
                    p.add_(queue[0], alpha=-group["lr"])


def train(model, optimizer, rank, numbers):
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, number, rank).backward()
        optimizer.step()


def saved_by_a_rank(rank, shard_by):
    model = make_model(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(Window(model.parameters(), lr=0.1), shard="optimizer", shard_by=shard_by)
    train(model, optimizer, rank, range(3))
    with pytest.warns(UserWarning, match=r"collections\.deque.*weights_only=False"):
        state = optimizer.state_dict()
    file = io.BytesIO()
    torch.save([model.state_dict(), state], file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    other = make_model(torch.bfloat16)
    resumed = FusedMainGradOptimizer(Window(other.parameters(), lr=0.1), shard="optimizer", shard_by=shard_by)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(model, optimizer, rank, range(3, 6))
    train(other, resumed, rank, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    whole = copy.deepcopy(saved[1])
    if shard_by == "element":
        with pytest.raises(ValueError, match=r"parameter .* holds a collections\.deque.*put together"):
            optimizer.consolidate_state_dict()
        return None
    optimizer.consolidate_state_dict()
    whole = optimizer.state_dict() if rank == 0 else None
    return copy.deepcopy([model.state_dict(), whole]) if rank == 0 else None


def test_parts_with_deques_resume_bit_exact_and_are_put_together_where_parameters_are_whole():
    model_state, whole = run(saved_by_a_rank, 2, "parameter", reuses=True)[0]
    assert {type(state["queue"]) for state in whole["state"].values()} == {collections.deque}
    model = make_model(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(Window(model.parameters(), lr=0.1))
    model.load_state_dict(model_state)
    optimizer.load_state_dict(whole)
    for index, entry in enumerate(optimizer._buffers.entries):
        queue = optimizer._inner.optimizers[0].state[entry.main_param]["queue"]
        assert queue.maxlen == 2
        assert all(torch.equal(a, b) for a, b in zip(queue, whole["state"][index]["queue"], strict=True))
    with pytest.warns(UserWarning, match="deque"):
        reloaded = optimizer.state_dict()
    assert all(torch.equal(reloaded["state"][i]["main_param"], s["main_param"]) for i, s in whole["state"].items())


def test_parts_of_parameters_with_deques_are_not_put_together():
    run(saved_by_a_rank, 2, "element", reuses=True)


def whole_into_a_part(rank):
    model = make_model()
    alone = Window(model.parameters(), lr=0.1)
    loss_of(model, 0, 0).backward()
    alone.step()
    optimizer = FusedMainGradOptimizer(Window(make_model().parameters(), lr=0.1), shard="optimizer", shard_by="element")
    with pytest.raises(Exception, match=r"holds a collections\.deque, and a rank cannot take its part"):
        optimizer.load_state_dict(alone.state_dict())


def test_a_whole_with_deques_is_not_cut():
    run(whole_into_a_part, 2, reuses=True)


class Numbers(torch.optim.SGD):
    """The pattern of DoWG: state under numbers, and under a name, beside its parameters'."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.state["norm"] = torch.tensor(len(self.state) + 0.5)
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[number]["start"] = p.clone()


def numbers_on_a_rank(rank):
    model = make_model()
    optimizer = FusedMainGradOptimizer(
        Numbers(model.parameters(), lr=0.1, momentum=0.9), shard="optimizer", shard_by="parameter"
    )
    train(model, optimizer, rank, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"state under \['0'.*differs between ranks"):
        optimizer.consolidate_state_dict()


def test_state_under_numbers_is_not_put_together_where_it_differs_between_ranks():
    run(numbers_on_a_rank, 2, reuses=True)
