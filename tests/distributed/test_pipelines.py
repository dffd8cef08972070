"""`torch.distributed.pipelining`, alone and times data parallel, against gradient merge on one process."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import fusedopt
from tests.distributed.launcher import at, run

DOUBLE_BOUND, SINGLE_BOUND = 1e-13, 1e-5
"""Norms of 80 elements, summed in other groups: 80 * 2**-53 = 9e-15 and 80 * 2**-24 = 5e-6, relative."""

K = 4  # micro-batches of one schedule step
SIZE = 4
NUM_BLOCKS = 4
SHARDS = ("none", "optimizer", "gradients")
WHOLE_BACKWARDS = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B)
ZERO_BUBBLE = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble)


class Abs(nn.Module):
    """No unit is ever dead, and no bit is added."""

    def forward(self, x):
        return x.abs()


def blocks(dtype=torch.float64):
    """Integer weights and biases: with integer data, divisors and rates that are powers of two all sums are exact."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(NUM_BLOCKS):
        linear = nn.Linear(SIZE, SIZE)
        with torch.no_grad():
            for param in linear.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator))
        made.append(nn.Sequential(linear, Abs()).to(dtype))
    return made


def data(step, replica, dtype=torch.float64):
    """The inputs and targets of one schedule step of one data-parallel replica: ``K`` micro-batches of two rows."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randint(-3, 4, (2 * K, SIZE), generator=generator).to(dtype) for _ in range(2)]


def loss_fn(output, target):
    return (output.double() * target.double()).sum()


def make_schedule(kind, group, whole, **settings):
    """Return the schedule and this rank's blocks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if kind in (ScheduleGPipe, Schedule1F1B):
        per = len(whole) // size
        module = nn.Sequential(*whole[rank * per : (rank + 1) * per])
        stage = PipelineStage(module, rank, size, torch.device("cpu"), group=group)
        return kind(stage, K, loss_fn=loss_fn, **settings), whole[rank * per : (rank + 1) * per]
    indices = list(range(rank, len(whole), size))
    if kind is ScheduleZBVZeroBubble:
        indices = [rank, len(whole) - 1 - rank]
    stages = [PipelineStage(whole[i], i, len(whole), torch.device("cpu"), group=group) for i in indices]
    return kind(stages, K, loss_fn=loss_fn, **settings), [whole[i] for i in indices]


def feed(schedule, x, target):
    """Run one step of the schedule, each rank with what its stages need."""
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    args = (x,) if any(stage.is_first for stage in stages) else ()
    schedule.step(*args, target=target if any(stage.is_last for stage in stages) else None)


def names(own, whole):
    return {f"{i}.{name}": p for i, block in enumerate(whole) if block in own for name, p in block.named_parameters()}


def trains(rank, mesh, kind, shard, way, dtype=torch.float64):
    """Two windows; by name the parameters at the end, gradients before each step, and what was communicated."""
    group, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    whole = blocks(dtype)
    schedule, own = make_schedule(kind, group, whole)
    params = names(own, whole)
    num_steps = 2 if way == "merge" else 1
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(list(params.items()), lr=0.5, momentum=0.5),
        device_mesh=mesh["dp"],
        norm_group=group,
        shard=shard,
        gradient_accumulation_steps=num_steps,
    )
    norms, sums = [], []
    for window in range(2):
        for part in range(num_steps):
            with optimizer.no_sync() if way == "no_sync" else contextlib.nullcontext():
                feed(schedule, *data(2 * window + part, replica, dtype))
            if shard == "none" and way == "plain" and kind not in ZERO_BUBBLE:
                sums.append({name: p.grad.clone() for name, p in params.items()})
                assert all(p.grad is p.main_grad for p in params.values())
            optimizer.step()
        norms.append(optimizer.grad_norm.item())
        optimizer.zero_grad()
    counts = optimizer._comm.counts["reduce"] / len(optimizer._buffers.buckets)
    return {name: p.detach().clone() for name, p in params.items()}, norms, sums, counts


def trains_all(rank, kind, dtypes, cases):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))
    results = {}
    for dtype in dtypes:
        for shard, way in cases:
            at(f"{kind.__name__} {shard} {way} {dtype}")
            results[dtype, shard, way] = trains(rank, mesh, kind, shard, way, dtype)
    return results


def one_process(num_replicas, num_steps=1, dtype=torch.float64):
    """The same by gradient merge on one process: parameters, norms, mean gradients."""
    model = nn.Sequential(*blocks(dtype))
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(list(model.named_parameters()), lr=0.5, momentum=0.5),
        gradient_accumulation_steps=num_replicas * K * num_steps,
    )
    norms, means = [], []
    for window in range(2):
        for part in range(num_steps):
            for replica in range(num_replicas):
                for x, target in zip(*(t.chunk(K) for t in data(2 * window + part, replica, dtype)), strict=True):
                    # A schedule divides all that it finds in .grad, also what an earlier step of it left there.
                    (loss_fn(model(x), target) / K ** (num_steps - 1 - part)).backward()
                    total = {name: p.grad.clone() for name, p in model.named_parameters()}
                    optimizer.step()
        means.append({name: grad / (num_replicas * K) for name, grad in total.items()})
        norms.append(optimizer.grad_norm.item())
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms, means


def check(results, num_replicas, way, dtype=torch.float64):
    num_steps = 2 if way == "merge" else 1
    params, norms, means = one_process(num_replicas, num_steps, dtype)
    start = {f"{i}.{name}": p for i, block in enumerate(blocks(dtype)) for name, p in block.named_parameters()}
    assert not any(torch.equal(params[name], start[name]) for name in start)
    seen = set()
    for found, found_norms, sums, _ in results:
        for name, param in found.items():
            assert param.isfinite().all()
            assert torch.equal(param, params[name]), name
        bound = DOUBLE_BOUND if dtype is torch.float64 else SINGLE_BOUND
        assert found_norms == pytest.approx(norms, rel=bound)
        for window, grads in enumerate(sums):
            assert all(torch.equal(grad, means[window][name]) for name, grad in grads.items())
        seen |= set(found)
    assert seen == set(params)


DTYPES = (torch.float64, torch.bfloat16)


@functools.cache
def alone(kind):
    return run(trains_all, 2, kind, DTYPES, [("none", "plain"), ("none", "merge")])


@functools.cache
def times_two(kind):
    shards = ("none", "optimizer") if kind in ZERO_BUBBLE else SHARDS
    cases = [(shard, way) for shard in shards for way in ("plain", "no_sync", "merge")]
    return run(trains_all, 4, kind, DTYPES[:1], cases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["plain", "merge"])
@pytest.mark.parametrize("kind", [*WHOLE_BACKWARDS, *ZERO_BUBBLE])
def test_two_stages_alone_are_gradient_merge_on_one_process(kind, way, dtype):
    check([on_rank[dtype, "none", way] for on_rank in alone(kind)], 1, way, dtype)


@pytest.mark.parametrize("way", ["plain", "no_sync", "merge"])
@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("kind", WHOLE_BACKWARDS)
def test_two_stages_times_two_replicas_are_gradient_merge_on_one_process(kind, shard, way):
    results = [on_rank[torch.float64, shard, way] for on_rank in times_two(kind)]
    check(results, 2, way)
    backwards = 2 * K * (2 if kind is ScheduleInterleaved1F1B else 1)  # a window has as many
    expected = {
        ("none", "plain"): 2 * backwards / 2,
        ("none", "no_sync"): 2,
        ("optimizer", "plain"): 2,
        ("optimizer", "no_sync"): 2,
        ("gradients", "plain"): backwards,
        ("gradients", "no_sync"): backwards,
    }
    if way != "merge":
        assert {counts for _, _, _, counts in results} == {expected[shard, way]}


@pytest.mark.parametrize("way", ["plain", "no_sync", "merge"])
@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("kind", ZERO_BUBBLE)
def test_zero_bubble_times_two_replicas_is_gradient_merge_on_one_process(kind, shard, way):
    check([on_rank[torch.float64, shard, way] for on_rank in times_two(kind)], 2, way)
