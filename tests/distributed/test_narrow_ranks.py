"""State in bfloat16 or 8 bits on several ranks: the bits of one process, in every layout and by every way to resume."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedopt
from fusedopt.inner.narrow_state import CODES, COUNT, SCALES, is_narrow
from fusedopt.nested import leaves
from tests.deep import IS_DEEP, paired
from tests.distributed.launcher import run

SETTINGS = [
    ("none", "auto"),
    ("optimizer", "element"),
    ("optimizer", "parameter"),
    ("gradients", "element"),
    ("gradients", "parameter"),
]
HELD = (("bfloat16", "split"), ("int8", "split24"), ("float32", "split24"))
SHAPES = ((37, 50), (700,), (300, 41), (5,), (257,))


def make(held, shard, shard_by, seed=0, **more):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES] + [nn.Parameter(torch.randn(1100))]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    inner = torch.optim.AdamW(groups, lr=1e-2)
    settings = {"shard": shard, "shard_by": shard_by, "bucket_mib": 1, **more}
    return params, fusedopt.FusedMainGradOptimizer(inner, state_dtype=held[0], main_param=held[1], **settings)


def train(params, optimizer, steps, rank=0, world_size=1, num_ranks=1):
    """Make steps with a gradient that one rank has: sums over ranks are exact, and so is their mean over 2 or 4."""
    for step in steps:
        for number, param in enumerate(params):
            if (number + step) % 4 == 0:
                continue
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
            is_mine = (number + step) % world_size == rank
            factor = 4.0 * is_mine if world_size > 1 else 4.0 / num_ranks
            (param.float() * (grad * factor)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(optimizer):
    optimizer.consolidate_state_dict(0)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    assert not any(is_narrow(leaf) for _, leaf in leaves(state, is_leaf=is_narrow)) or torch.distributed.get_rank()
    return {(number, key): value for number, values in state.items() for key, value in values.items()}


def assert_same(expected, got):
    assert expected.keys() == got.keys()
    assert any(key == COUNT for _, key in expected)
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert torch.isfinite(value).all()
            assert torch.equal(value, got[key]), key
        else:
            assert value == got[key], key


def on_ranks(rank, held, shard, shard_by, world_size):
    params, optimizer = make(held, shard, shard_by)
    train(params, optimizer, range(5), rank, world_size)
    narrow = [leaf for _, leaf in leaves(dict(optimizer.state), is_leaf=is_narrow) if is_narrow(leaf)]
    return whole_state(optimizer), [param.detach().clone() for param in params], len(narrow)


def alone(rank, held, num_ranks):
    group = [torch.distributed.new_group([other]) for other in range(torch.distributed.get_world_size())][rank]
    params, optimizer = make(held, "none", "auto", process_group=group)
    train(params, optimizer, range(5), num_ranks=num_ranks)
    return whole_state(optimizer), [param.detach().clone() for param in params]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("held", HELD if IS_DEEP else HELD[:2])
def test_every_layout_has_the_bits_of_one_process(held, world_size):
    expected, models = run(alone, 2, held, world_size, reuses=True)[0]
    for shard, shard_by in SETTINGS if world_size == 2 else SETTINGS[1:4:2]:
        ranks = run(on_ranks, world_size, held, shard, shard_by, world_size, reuses=world_size == 2)
        assert_same(expected, ranks[0][0])
        for _, weights, num_held in ranks:
            assert all(map(torch.equal, weights, models))
            assert bool(num_held) is (held[0] != "float32")


def on_three(rank, held):
    found = []
    for shard, shard_by in SETTINGS:
        params, optimizer = make(held, shard, shard_by)
        train(params, optimizer, range(5), rank, 3)
        found.append((whole_state(optimizer), [param.detach().clone() for param in params]))
    return found


@pytest.mark.parametrize("held", HELD)
def test_every_layout_of_three_ranks_has_the_same_bits(held):
    ranks = run(on_three, 3, held)
    for state, weights in ranks[0][1:]:
        assert_same(ranks[0][0][0], state)
        assert all(map(torch.equal, weights, ranks[0][0][1]))


def resume(rank, saved_as, loaded_as, route, folder):
    """Return whole state of a run that went on, and of one that loaded what it had saved."""
    held, *source = saved_as
    params, optimizer = make(held, *source)
    train(params, optimizer, range(2), rank, 2)
    again, target = make(*loaded_as, seed=1)
    if route == "torch":
        net = nn.ParameterList(params)
        dcp.save(dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True)), checkpoint_id=folder)
        net = nn.ParameterList(again)
        loaded = dict(zip(("model", "optim"), get_state_dict(net, target), strict=True))
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(net, target, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
    else:
        with torch.no_grad():
            for param, value in zip(again, params, strict=True):
                param.copy_(value)
        if route == "whole":
            optimizer.consolidate_state_dict(0)
        state = [copy.deepcopy(optimizer.state_dict()) if route == "part" or rank == 0 else None]
        if route != "part":
            torch.distributed.broadcast_object_list(state, src=0)
        target.load_state_dict(state[0])
    train(params, optimizer, range(2, 4), rank, 2)
    train(again, target, range(2, 4), rank, 2)
    return whole_state(optimizer), whole_state(target)


CASES = [
    (("none", "auto"), ("gradients", "element"), "whole"),
    (("none", "auto"), ("optimizer", "element"), "as it is"),  # codes of a whole, of which each rank takes a part
    (("gradients", "element"), ("none", "auto"), "whole"),
    (("optimizer", "parameter"), ("optimizer", "parameter"), "part"),
    (("gradients", "element"), ("gradients", "element"), "part"),
    (("optimizer", "element"), ("gradients", "parameter"), "torch"),
    (("none", "auto"), ("optimizer", "element"), "torch"),
]


@pytest.mark.parametrize(("case", "held"), paired(CASES, HELD))
def test_a_run_resumes_in_any_layout_in_the_same_bits(case, held, tmp_path):
    source, target, route = case
    saved_as, loaded_as = (held, *source), (held, *target)
    expected, got = run(resume, 2, saved_as, loaded_as, route, tmp_path, reuses=True)[0]
    assert_same(expected, got)


def refuse_another_layout(rank):
    params, optimizer = make(("int8", "split"), "optimizer", "element")
    train(params, optimizer, range(2), rank, 2)
    _, target = make(("int8", "split"), "optimizer", "parameter")
    before = copy.deepcopy(target.state_dict()["state"])
    with pytest.raises((ValueError, RuntimeError), match=r"is part . of 2 of a sharded optimizer's state"):
        target.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert before.keys() == target.state_dict()["state"].keys()


def test_the_part_of_another_layout_is_refused():
    run(refuse_another_layout, 2)


def under_an_engine(rank, engine, held, folder):
    """Return local state of a run that went on, and of one that loaded what it saved by torch's checkpoints."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "parts"))
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 32)).bfloat16()
        if engine == "FSDP2":
            fully_shard(net[0], mesh=mesh["parts"])
            fully_shard(net, mesh=mesh["parts"])
        else:
            parallelize_module(net, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
        more = {} if engine == "FSDP2" else {"device_mesh": mesh["replicas"]}
        optimizer = fusedopt.FusedMainGradOptimizer(inner, main_param=held[1], state_dtype=held[0], **more)

        def steps(numbers, net=net, optimizer=optimizer):
            for number in numbers:
                inputs = torch.randn(6, 24, generator=torch.Generator().manual_seed(number)).bfloat16()
                net(inputs).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        if seed == 0:
            steps(range(3))
            saved = get_state_dict(net, optimizer)
            dcp.save(dict(zip(("model", "optim"), saved, strict=True)), checkpoint_id=folder)
        else:
            loaded = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True))
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        steps(range(3, 5))
        state = {number: dict(leaves(values)) for number, values in optimizer.state_dict()["state"].items()}
        found.append({(n, p): local_of(v) for n, values in state.items() for p, v in values.items()})
    return found


def local_of(value):
    if not torch.is_tensor(value):
        return value
    return (value.to_local() if hasattr(value, "to_local") else value).clone()


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("engine", ["FSDP2", "tensor parallel"])
def test_under_torchs_engines_it_is_narrow_and_resumes_in_the_same_bits(engine, held, tmp_path):
    for rank, (expected, got) in enumerate(run(under_an_engine, 2, engine, held, tmp_path)):
        names = {path[-1] for _, path in expected}
        assert COUNT in names
        assert (CODES in names) is (held[0] != "float32")
        assert (SCALES in names) is (held[0] == "int8")
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            if torch.is_tensor(value):
                assert torch.isfinite(value.float()).all()
                assert torch.equal(value, got[key]), (rank, key)
            else:
                assert value == got[key], (rank, key)


def refuse_release(rank):
    torch.manual_seed(0)
    net = nn.Linear(8, 8).bfloat16()
    with pytest.raises(ValueError, match='release="backward" with several ranks'):
        fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(net.parameters()), release="backward")
    assert not any(hasattr(param, "main_grad") for param in net.parameters())


def test_release_on_several_ranks_is_refused_before_anything_changed():
    run(refuse_release, 2)
