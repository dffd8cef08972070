"""main_params held in halves on several ranks: every bit as where each rank holds its part whole."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedopt
from tests.distributed.launcher import run

SETTINGS = [
    ("none", "auto"),
    ("optimizer", "element"),
    ("optimizer", "parameter"),
    ("gradients", "element"),
    ("gradients", "parameter"),
]
SHAPES = ((37, 50), (700,), (300, 41), (5,))


def make(main_param, shard, shard_by, seed=0):
    torch.manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES] + [nn.Parameter(torch.randn(1100))]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.1}]
    inner = torch.optim.AdamW(groups, lr=1e-2)
    settings = {"shard": shard, "shard_by": shard_by, "max_grad_norm": 1.0, "bucket_mib": 1}
    return params, fusedopt.FusedMainGradOptimizer(inner, main_param=main_param, **settings)


def train(rank, params, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        factors = [torch.randn(param.shape, generator=generator) for param in params]
        used = [i for i in range(len(params)) if (i + step + rank) % 4]  # some ranks have no gradient of some
        sum((params[i].float() * factors[i]).sum() for i in used).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole_state(optimizer):
    optimizer.consolidate_state_dict(0)
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return {(i, key): value for i, values in state.items() for key, value in values.items() if torch.is_tensor(value)}


def both(rank, shard, shard_by):
    found = {}
    for main_param in ("float32", "split"):
        params, optimizer = make(main_param, shard, shard_by)
        train(rank, params, optimizer, range(3))
        with torch.no_grad():
            params[0][3] = 0.0  # all ranks edit alike
        train(rank, params, optimizer, range(3, 6))
        report = optimizer.memory_report()
        found[main_param] = whole_state(optimizer), [param.detach().clone() for param in params], report["main_param"]
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("shard", "shard_by"), SETTINGS)
def test_every_part_has_the_bits_that_it_has_whole(shard, shard_by, world_size):
    ranks = run(both, world_size, shard, shard_by)
    (expected, models, nbytes), (got, split_models, split_nbytes) = ranks[0]["float32"], ranks[0]["split"]
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        # The edit is 0 where main_params are whole; in halves it is so, too: nothing is left of what was there.
        assert torch.equal(value, got[key]), key
    for number, (one, other) in enumerate(zip(models, split_models, strict=True)):
        main = expected.get((number, "main_param"))
        is_tie = (main.view(torch.int32) & 0xFFFF) == 0x8000 if main is not None else torch.zeros_like(one).bool()
        assert ((one == other) | is_tie).all()
    for rank in ranks[1:]:
        assert all(map(torch.equal, rank["split"][1], split_models))
    assert split_nbytes * 2 == nbytes


def resume(rank, saved_as, loaded_as, folder):
    source, source_by, source_main = saved_as
    params, optimizer = make(source_main, source, source_by)
    train(rank, params, optimizer, range(2))
    optimizer.consolidate_state_dict(0)
    state = [optimizer.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(state, src=0)
    target, target_by, target_main = loaded_as
    resumed, again = make(target_main, target, target_by, seed=1)
    with torch.no_grad():
        for param, value in zip(resumed, params, strict=True):
            param.copy_(value)
    again.load_state_dict(state[0])
    train(rank, params, optimizer, range(2, 4))
    train(rank, resumed, again, range(2, 4))
    return whole_state(optimizer), whole_state(again)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as"),
    [
        (("gradients", "element", "split"), ("none", "auto", "split")),
        (("none", "auto", "split"), ("optimizer", "element", "split")),
        (("optimizer", "parameter", "split"), ("gradients", "element", "float32")),
    ],
)
def test_a_whole_resumes_in_any_layout(saved_as, loaded_as, tmp_path):
    expected, got = run(resume, 2, saved_as, loaded_as, tmp_path)[0]
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, got[key]), key


def through_torchs_checkpoint(rank, shard, shard_by, folder):
    """Return whole state before and after it was saved and loaded by `torch.distributed.checkpoint`, and trained on."""
    found = []
    for seed in (0, 1):
        params, optimizer = make("split", shard, shard_by, seed)
        net = nn.ParameterList(params)
        if seed == 0:
            train(rank, params, optimizer, range(2))
            saved = get_state_dict(net, optimizer)
            dcp.save(dict(zip(("model", "optim"), saved, strict=True)), checkpoint_id=folder)
        else:
            loaded = dict(zip(("model", "optim"), get_state_dict(net, optimizer), strict=True))
            dcp.load(loaded, checkpoint_id=folder)
            set_state_dict(net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"])
        train(rank, params, optimizer, range(2, 4))
        found.append(whole_state(optimizer))
    return found


@pytest.mark.parametrize(("shard", "shard_by"), SETTINGS)
def test_torchs_checkpoints_carry_them(shard, shard_by, tmp_path):
    expected, got = run(through_torchs_checkpoint, 2, shard, shard_by, tmp_path)[0]
    assert any(key == "main_param" for _, key in expected)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, got[key]), key


def broadcast_from_the_first(rank, shard, shard_by):
    """Return whole state before and after it was broadcast from the first rank by torch's functions."""
    params, optimizer = make("split", shard, shard_by)
    train(rank, params, optimizer, range(2))
    optimizer.consolidate_state_dict(0)
    names = [str(number) for number in range(len(params))]
    saved = optimizer.state_dict() if rank == 0 else {}
    groups = saved.get("param_groups", [])
    whole = {
        "state": {names[number]: values for number, values in saved.get("state", {}).items()},
        "param_groups": [{**group, "params": [names[number] for number in group["params"]]} for group in groups],
    }
    again, target = make("split", shard, shard_by, seed=1)
    net = nn.ParameterList(again)
    with torch.no_grad():
        for param, value in zip(again, params, strict=True):
            param.copy_(value)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(net, target, whole if rank == 0 else {}, options=options)
    return whole_state(optimizer), whole_state(target)


@pytest.mark.parametrize(("shard", "shard_by"), SETTINGS)
def test_torchs_broadcast_of_a_whole_carries_them(shard, shard_by):
    expected, got = run(broadcast_from_the_first, 2, shard, shard_by)[0]
    assert any(key == "main_param" for _, key in expected)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert torch.isfinite(value).all()
        assert torch.equal(value, got[key]), key


def under_an_engine(rank, engine):
    """Return main_params of this rank, by how they are held."""
    found = {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "parts"))
    for main_param in ("float32", "split"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8)).bfloat16()
        if engine == "FSDP2":
            fully_shard(net[0], mesh=mesh["parts"])
            fully_shard(net, mesh=mesh["parts"])
        else:
            parallelize_module(net, mesh["parts"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        inner = torch.optim.AdamW(net.parameters(), lr=1e-2)
        more = {} if engine == "FSDP2" else {"device_mesh": mesh["replicas"]}
        optimizer = fusedopt.FusedMainGradOptimizer(inner, main_param=main_param, max_grad_norm=1.0, **more)
        for step in range(4):
            inputs = torch.randn(6, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
            net(inputs).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]
        found[main_param] = {number: local_parts(values["main_param"]) for number, values in state.items()}
    return found


def local_parts(value):
    tensors = [value] if torch.is_tensor(value) else list(value.values())
    return [(tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone() for tensor in tensors]


@pytest.mark.parametrize("engine", ["FSDP2", "tensor parallel"])
def test_under_torchs_engines_they_have_these_bits_too(engine):
    for found in run(under_an_engine, 2, engine):
        assert found["float32"].keys() == found["split"].keys()
        for number, values in found["float32"].items():
            for one, other in zip(values, found["split"][number], strict=True):
                assert torch.isfinite(one).all()
                # Steps go by the model's weights, which differ where main_params are just between two: none here is.
                assert torch.equal(one, other), number
