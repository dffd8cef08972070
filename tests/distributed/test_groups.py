"""Which ranks, what they start from, what they hold, what they send."""

import functools
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedopt
from fusedopt.planner import cost
from fusedopt.sharding.layout import ParamSpec
from tests.distributed.launcher import run

WIDTHS = (300, 41, 513, 7)


def make(seed=0, dtype=torch.bfloat16, bias=True, **settings):
    torch.manual_seed(seed)
    model = nn.Sequential(*[nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(WIDTHS)]).to(dtype)
    inner = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in model], lr=1e-2)
    return model, fusedopt.FusedMainGradOptimizer(inner, **settings)


def step(model, optimizer, seed, k=1):
    for micro_batch in range(k):
        generator = torch.Generator().manual_seed(1000 * seed + micro_batch)
        batch = torch.randint(-1, 2, (2, WIDTHS[0]), generator=generator).to(model[0].weight.dtype)
        model(batch).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


# -- what it costs


def bytes_as_planned(rank, world_size, shard, shard_by, dtype, k):
    model, optimizer = make(
        dtype=dtype, shard=shard, gradient_accumulation_steps=k, **({"shard_by": shard_by} if shard != "none" else {})
    )
    counts, nbytes = optimizer._comm.counts, optimizer._comm.nbytes
    step(model, optimizer, rank, k)
    counts.clear(), nbytes.clear()
    step(model, optimizer, rank + 10, k)
    specs = [
        ParamSpec("", param.numel(), number)
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    ]
    plan = cost(
        specs, bucket_numel=2**25, model_nbytes=dtype.itemsize, shard=shard, shard_by=shard_by, world_size=world_size,
        rank=rank, num_micro_batches=k,
    )  # fmt: skip
    report = optimizer.memory_report()
    scalars = 4 * sum(1 for state in optimizer.state.values() for key in state if key == "step")
    found = {
        "model": report["model"], "main_grad": report["main_grad"], "main_param": report["main_param"],
        "state": report["state"] - scalars, "num_reduces": counts["reduce"], "num_gathers": counts["gather"],
        "reduce_nbytes": nbytes["reduce"], "gather_nbytes": nbytes["gather"],
    }  # fmt: skip
    return {key: (value, getattr(plan, key)) for key, value in found.items() if value != getattr(plan, key)}


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_wire_and_collectives_are_what_the_planner_says(world_size):
    ways = [("none", "element"), *itertools.product(("optimizer", "gradients"), ("element", "parameter"))]
    for shard, shard_by in ways:
        for dtype, k in ((torch.bfloat16, 3), (torch.float32, 1)):
            found = run(bytes_as_planned, world_size, world_size, shard, shard_by, dtype, k)
            assert found == [{}] * world_size, (shard, shard_by, dtype, k)


def test_the_plan_is_the_table_of_the_contract():
    # 2 + 4 + 4 + 8, 2 + 4 + 12/W, 2 + 16/W bytes a parameter; fp32 4 + 4 + 8; sizes that need no padding
    specs = [ParamSpec(str(i), 2**20, 0) for i in range(8)]
    numel = 8 * 2**20
    per_param = {
        (shard, world_size): cost(specs, bucket_numel=2**22, shard=shard, world_size=world_size).total / numel
        for shard in ("none", "optimizer", "gradients")
        for world_size in (1, 8)
    }
    assert per_param == {
        ("none", 1): 18.0, ("none", 8): 18.0, ("optimizer", 1): 18.0, ("optimizer", 8): 7.5,
        ("gradients", 1): 18.0, ("gradients", 8): 4.0,
    }  # fmt: skip
    assert cost(specs, bucket_numel=2**22, model_nbytes=4).total / numel == 16.0
    wire = cost(specs, bucket_numel=2**22, shard="optimizer", world_size=8)
    assert (wire.reduce_nbytes, wire.gather_nbytes) == (numel * 4 * 7 // 8, numel * 2 * 7 // 8)


# -- two dimensions


def two_dimensions(rank, shard):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = make(shard=shard, device_mesh=mesh, max_grad_norm=1e9)
    flat, other = make(shard=shard, max_grad_norm=1e9)
    for window in range(3):
        step(model, optimizer, 7 * window + rank)
        step(flat, other, 7 * window + rank)
    assert torch.equal(optimizer.grad_norm, other.grad_norm)
    owned = sum(bucket.span.numel for bucket in optimizer._buffers.buckets)
    whole = sum(bucket.plan.numel for bucket in optimizer._buffers.buckets)
    assert optimizer._comm.world_size == 4
    return [param.detach() for param in model.parameters()], [p.detach() for p in flat.parameters()], owned / whole


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_a_mesh_of_replicas_and_shards_trains_as_all_ranks_and_shards_inside(shard):
    for found, expected, share in run(two_dimensions, 4, shard):
        assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert share == (1.0 if shard == "none" else 0.5)


def a_subset_of_ranks(rank):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[rank % 2]
    model, optimizer = make(seed=rank, shard="optimizer", process_group=group)
    step(model, optimizer, rank)
    with pytest.raises(ValueError, match="is not in the process group it was given"):
        fusedopt.broadcast_module(model, groups[1 - rank % 2])
    return optimizer._comm.world_size, model[0].weight.detach()


def test_a_group_may_be_a_part_of_all_ranks():
    (size, first), (lone, middle), (_, last) = run(a_subset_of_ranks, 3)
    assert (size, lone) == (2, 1)
    assert torch.equal(first, last)
    assert not torch.equal(first, middle)


def bad_groups(rank):
    with pytest.raises(ValueError, match=r"process_group and device_mesh were both given"):
        make(process_group=dist.group.WORLD, device_mesh=dist.init_device_mesh("cpu", (2,)))
    mesh = dist.init_device_mesh("cpu", (2, 1, 1))
    with pytest.raises(ValueError, match=r"3 dimensions; needed are 1 or 2, \(replicate, shard\)"):
        make(device_mesh=mesh)


def test_groups_that_cannot_be_are_refused():
    run(bad_groups, 2)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        make(process_group=object())


# -- what they start from


def start(rank, broadcast):
    model, optimizer = make(seed=rank, shard="optimizer", broadcast_params=broadcast)
    before = model[0].weight.detach().clone()
    frozen = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for tensor in frozen.state_dict().values():
            tensor.fill_(rank + 5)
    frozen[0].weight.requires_grad_(False)
    fusedopt.broadcast_module(frozen)
    return before, optimizer._comm.counts["broadcast"], [tensor.clone() for tensor in frozen.state_dict().values()]


def test_ranks_start_from_the_first_ones_parameters_unless_told_otherwise():
    (first, count, frozen), (second, _, other) = run(start, 2, True)
    assert torch.equal(first, second)
    assert count == 2 * (len(WIDTHS) - 1)
    assert all(torch.equal(a, b) and bool((a == 5).all()) for a, b in zip(frozen, other, strict=True))
    (first, count, _), (second, _, _) = run(start, 2, False)
    assert not torch.equal(first, second)
    assert count == 0


def differing(rank, what):
    settings = {"shard": "optimizer"}
    if what == "settings":
        settings["bucket_mib"] = 1 + rank
    if what == "inner optimizers":
        model = nn.Linear(3, 3)
        inner = torch.optim.Adafactor(model.parameters()) if rank else torch.optim.AdamW(model.parameters())
        build = functools.partial(fusedopt.FusedMainGradOptimizer, inner)
    elif what == "a lazy parameter" and rank == 1:
        model = nn.Sequential(nn.LazyLinear(3))
        build = functools.partial(fusedopt.FusedMainGradOptimizer, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        build = functools.partial(make, dtype=torch.float32 if what == "dtype" and rank else torch.bfloat16,
                                  bias=not (what == "fewer" and rank == 1))  # fmt: skip
    with pytest.raises((RuntimeError, ValueError)) as caught:
        build(**settings)
    model, optimizer = make(**{"shard": "optimizer"})
    step(model, optimizer, rank)  # and nothing hangs after it
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("settings", "rank 1 has the settings.*'bucket_mib': 2.*rank 0 has.*'bucket_mib': 1"),
        ("inner optimizers", r"rank 1 has the settings.*'shard_by': \['parameter'\].*rank 0 has.*\['element'\]"),
        ("dtype", r"rank 1 has .*params.*torch.float32.*where rank 0 has .*torch.bfloat16"),
        ("fewer", "rank 1 has 3 tensors, rank 0 has 6"),
        ("a lazy parameter", "uninitialised"),
    ],
)
def test_ranks_that_differ_are_refused_on_all_of_them(what, says):
    found = run(differing, 2, what)
    assert all(re.search(says, text) for text in found), found


# -- what the loop itself communicates


def the_loop_communicates(rank):
    """Rank 1 has no gradient in some windows, and so joins in step() what rank 0 sent inside its backward."""
    model, optimizer = make(shard="optimizer", gradient_accumulation_steps=2)
    found = []
    for window in range(4):
        for _ in range(2):
            if rank == 0 or window % 2:
                batch = torch.ones(2, WIDTHS[0], dtype=torch.bfloat16)
                model(batch).float().sum().backward()
            loss = torch.tensor([1.0 + rank])
            dist.all_reduce(loss)  # logging, on the default group, between backward and step
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return found, [param.detach() for param in model.parameters()]


def test_collectives_of_the_loop_never_meet_ours():
    (found, first), (_, second) = run(the_loop_communicates, 2)
    assert found == [3.0] * 8
    assert all(torch.isfinite(a).all() and torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- gradients set by hand


def set_by_hand(rank):
    """A gradient set by hand, which a state_dict() takes over first, in three windows; return the first weight."""
    model, optimizer = make(shard="optimizer", dtype=torch.float32)
    for window in range(3):
        step_of = torch.full_like(model[0].weight, float(2 * (window + 1) * (rank + 1)))
        model[0].weight.grad = step_of
        optimizer.state_dict()
        assert model[0].weight.grad is model[0].weight.main_grad
        optimizer.step()
        optimizer.zero_grad()
    return model[0].weight.detach()


def test_a_gradient_set_by_hand_is_no_edit_when_a_state_dict_took_it_over():
    model, optimizer = make(dtype=torch.float32)
    for window in range(3):
        model[0].weight.grad = torch.full_like(model[0].weight, 3.0 * (window + 1))  # the mean of the ranks'
        optimizer.step()
        optimizer.zero_grad()
    for found in run(set_by_hand, 2):
        assert torch.isfinite(found).all()
        assert torch.equal(found, model[0].weight.detach())
