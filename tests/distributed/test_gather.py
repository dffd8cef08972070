"""Gathers under the next forward: whatever touches a parameter first sees all of it, and it is a Parameter as ever.

Rank 1 is slow between its inner step and its gather, so that on rank 0 the parameters are still on their way when
they are used: an access that does not wait would see the values from before the step.
"""

import copy
import io
import pickle
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedopt
from tests.deep import in_turn
from tests.distributed.launcher import run
from tests.distributed.programs import Backward, Settings, make_net

DELAY_SECONDS = 0.1
NAME = "blocks.1.layer.weight"


class Double(torch.autograd.Function):
    """A user's function, which torch hands the parameter without asking its class."""

    @staticmethod
    def forward(ctx, weight):
        return weight * 2.0

    @staticmethod
    def backward(ctx, grad):
        return grad * 2.0


def save_and_load(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def optimizer_state(net, weight, optimizer):
    state = optimizer.state_dict()
    return net.state_dict()[NAME] if state else None


def forward(net, weight, optimizer):
    with torch.no_grad():
        return net(Backward(), (0,))


def parameter_of_a_copy(net, weight, optimizer):
    return copy.deepcopy(net).get_parameter(NAME)


ACCESSES = {
    "forward": forward,
    "F.linear": lambda net, weight, _: F.linear(torch.ones(2, weight.shape[1]), weight),
    "detach": lambda net, weight, _: weight.detach(),
    "data": lambda net, weight, _: weight.data,
    "index": lambda net, weight, _: weight[-1],
    "tolist": lambda net, weight, _: torch.tensor(weight.tolist()),
    "numpy": lambda net, weight, _: torch.from_numpy(weight.detach().numpy()),
    "to another dtype": lambda net, weight, _: weight.to(torch.float64),
    "comparison": lambda net, weight, _: (weight > 0.0).float(),
    "list argument": lambda net, weight, _: torch.cat([weight.flatten(), weight.flatten()]),
    "foreach": lambda net, weight, _: torch._foreach_mul([weight], 2.0)[0],
    "parameters_to_vector": lambda net, weight, _: nn.utils.parameters_to_vector([weight]),
    "torch.ops": lambda net, weight, _: torch.ops.aten.mul.Tensor(weight, 2.0),
    "function of the user": lambda net, weight, _: Double.apply(weight),
    "functional_call": lambda net, weight, _: torch.func.functional_call(
        net.blocks[1].layer, {"weight": weight}, (torch.ones(2, weight.shape[1]),)
    ),
    "repr": lambda net, weight, _: torch.tensor([float(ord(c)) for c in repr(weight)]),
    "deepcopy": lambda net, weight, _: copy.deepcopy(weight),
    "deepcopy of the model": parameter_of_a_copy,
    "pickle": lambda net, weight, _: pickle.loads(pickle.dumps(weight)),
    "torch.save": lambda net, weight, _: save_and_load(weight),
    "torch.save of the model": lambda net, weight, _: save_and_load(net).get_parameter(NAME),
    "state_dict": lambda net, weight, _: net.state_dict()[NAME],
    "optimizer.state_dict": optimizer_state,
    "norm": lambda net, weight, _: weight.norm(),
    "swap of grad mode": lambda net, weight, _: weight.requires_grad_(True).detach(),
}


def touch(rank, shard, shard_by, names):
    """Return, per access, whether parameters were on their way before, and what went wrong."""
    torch.set_printoptions(threshold=10**6, precision=8)
    problems, num_pending = [], 0
    settings = Settings(shard, shard_by, overlap_param_gather=True, dtype=torch.float32)
    net = make_net(torch.float32)
    optimizer = settings.make(net)
    if rank == 1:
        optimizer._inner.optimizers[0].register_step_post_hook(lambda *_: time.sleep(DELAY_SECONDS))
    weight = net.get_parameter(NAME)
    for number, name in enumerate(names):
        access = ACCESSES[name]
        net(Backward(), (number, rank)).backward()
        before = weight.detach().clone()
        optimizer.step()
        num_pending += type(weight) is not nn.Parameter
        if not isinstance(weight, nn.Parameter):
            problems.append(f"{name}: it is no Parameter meanwhile")
        got = access(net, weight, optimizer).detach().clone()
        for param in net.parameters():
            param.detach()
        if type(weight) is not nn.Parameter or list(vars(weight)) != list(vars(next(net.parameters()))):
            problems.append(f"{name}: it is a {type(weight)} afterwards, with {list(vars(weight))}")
        if torch.equal(weight, before) or not torch.isfinite(weight).all():
            problems.append(f"{name}: the step changed nothing")
        if not torch.equal(got, access(net, weight, optimizer).detach()):
            problems.append(f"{name}: saw a parameter that was not whole")
        optimizer.zero_grad()
    return problems, num_pending


@pytest.mark.parametrize("shard_by", ["element", "parameter"])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_every_access_waits_for_parameters_that_are_on_their_way(shard, shard_by):
    # Each access with either shard and either cut; with each pair of them in a deep run.
    turn = (shard == "gradients") + (shard_by == "parameter")
    names = [name for half in in_turn([list(ACCESSES)[::2], list(ACCESSES)[1::2]], turn) for name in half]
    results = run(touch, 2, shard, shard_by, names)
    assert [problems for problems, _ in results] == [[], []]
    assert results[0][1] == len(names)


def look_between_step_and_forward(rank):
    """Return, after what a loop does between step and forward, whether parameters still are on their way."""
    net = make_net(torch.float32)
    optimizer = Settings("optimizer", overlap_param_gather=True).make(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen = []
    for number in range(3):
        net(Backward(), (number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        net.train()
        sizes = [(p.shape, p.dtype, p.device, p.numel(), p.requires_grad, p.is_leaf) for p in net.parameters()]
        seen.append(len(sizes) > 0 and all(type(param) is not nn.Parameter for param in net.parameters()))
        net(Backward(), (number, rank))
        seen.append(all(type(param) is nn.Parameter for param in net.parameters()))
    return seen


def test_what_a_loop_does_between_step_and_forward_does_not_wait():
    assert run(look_between_step_and_forward, 2) == [[True] * 6] * 2


def touch_without_overlap(rank):
    net = make_net(torch.float32)
    optimizer = Settings("optimizer").make(net)
    net(Backward(), (rank,)).backward()
    optimizer.step()
    return {type(param).__name__ for param in net.parameters()}


def test_without_overlap_nothing_is_left_on_its_way():
    assert run(touch_without_overlap, 2) == [{"Parameter"}] * 2


class Special(nn.Parameter):
    """A user's own kind of parameter."""


def train_own_class(rank):
    torch.manual_seed(rank)
    params = [Special(torch.ones(3000)), nn.Parameter(torch.ones(5))]
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(params, lr=1.0), shard="optimizer", shard_by="element", overlap_param_gather=True
    )
    if rank == 1:
        optimizer._inner.optimizers[0].register_step_post_hook(lambda *_: time.sleep(DELAY_SECONDS))
    for _ in range(3):
        sum((param * (2.0 * rank)).sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [type(param).__name__ for param in params], [param.detach().unique().tolist() for param in params]


def test_parameters_of_a_class_of_the_users_own_are_whole_as_well():
    for classes, values in run(train_own_class, 2):
        assert classes[0] == "Special"
        assert values == [[-2.0], [-2.0]]


def leave_without_use(rank, end):
    """Three steps whose parameters nobody reads in between, then an end; return the parameters."""
    net = make_net(torch.float32)
    optimizer = Settings("optimizer", overlap_param_gather=True).make(net)
    for number in range(3):
        net(Backward(), (number, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        net(Backward((0,)), (number, rank)).backward()  # uses one bucket only
        optimizer.step()
        optimizer.zero_grad()
    if end == "unwrap":
        optimizer.unwrap()
    elif end == "eval":
        optimizer.eval()
    else:
        optimizer.sync_main_params()
    return {type(param).__name__ for param in net.parameters()}, [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("end", ["unwrap", "eval", "sync_main_params"])
def test_steps_and_ends_finish_what_nobody_used(end):
    results = run(leave_without_use, 2, end, reuses=True)
    assert [names for names, _ in results] == [{"Parameter"}] * 2
    for got, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, other)
