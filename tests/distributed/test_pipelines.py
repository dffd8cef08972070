"""`torch.distributed.pipelining`, alone and times data parallel, against gradient merge on one process."""

import contextlib
import functools
import gc
import sys

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
from torch.distributed.pipelining.stage import _PipelineStageBase

import fusedopt
from tests.deep import paired
from tests.distributed.launcher import at, recorded_warnings, run

DOUBLE_BOUND, SINGLE_BOUND = 1e-13, 1e-5
"""Norms of 80 elements, summed in other groups: 80 * 2**-53 = 9e-15 and 80 * 2**-24 = 5e-6, relative."""

ADAM_BOUND = 1e-11
"""A clipping coefficient off by ten ulps, through two steps of AdamW, which divides by a root: 1e-14; a thousand times
that. A norm of one stage alone, or a gradient lost, is off by far more."""

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


def trains_all(rank, cases):
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "pp"))
    results = {}
    for case in cases:
        at(f"training {case}")
        results[case] = trains(rank, mesh, *case)
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
WAYS = ("plain", "no_sync", "merge")
ALONE = paired([*WHOLE_BACKWARDS, *ZERO_BUBBLE], ("plain", "merge"), DTYPES)  # about half, but for `make test-deep`
TIMES_TWO = paired(WHOLE_BACKWARDS, SHARDS, WAYS)  # a third of all, likewise
ZERO_BUBBLE_TIMES_TWO = paired(ZERO_BUBBLE, SHARDS[:2], WAYS)  # half, likewise


@functools.cache  # a launch for all cases: most of its time goes into starting ranks
def alone():
    return run(trains_all, 2, [(kind, "none", way, dtype) for kind, way, dtype in ALONE])


@functools.cache
def times_two():
    return run(trains_all, 4, TIMES_TWO + ZERO_BUBBLE_TIMES_TWO)


@pytest.mark.parametrize(("kind", "way", "dtype"), ALONE)
def test_two_stages_alone_are_gradient_merge_on_one_process(kind, way, dtype):
    check([on_rank[kind, "none", way, dtype] for on_rank in alone()], 1, way, dtype)


@pytest.mark.parametrize(("kind", "shard", "way"), TIMES_TWO)
def test_two_stages_times_two_replicas_are_gradient_merge_on_one_process(kind, shard, way):
    results = [on_rank[kind, shard, way] for on_rank in times_two()]
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


@pytest.mark.parametrize(("kind", "shard", "way"), ZERO_BUBBLE_TIMES_TWO)
def test_zero_bubble_times_two_replicas_is_gradient_merge_on_one_process(kind, shard, way):
    check([on_rank[kind, shard, way] for on_rank in times_two()], 2, way)


@functools.cache
def one_stage_each():
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "pp"))


def single(**settings):
    """One stage on each rank, every rank a replica: schedule, parameters by name, optimizer."""
    mesh = one_stage_each()
    whole = blocks()
    kind = settings.pop("kind", Schedule1F1B)
    scale_grads = settings.pop("scale_grads", True)
    schedule, own = make_schedule(kind, mesh["pp"].get_group(), whole, scale_grads=scale_grads)
    params = names(own[settings.pop("first", 0) :], whole)
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(list(params.items()), lr=0.5), device_mesh=mesh["dp"], **settings
    )
    return schedule, params, optimizer


def edits(rank):
    """An edit by somebody else raises, wherever it falls; see the test."""
    said = []
    schedule, params, optimizer = single(shard="optimizer")

    def clip():  # a loop's own; torch's raises where it is called
        torch._foreach_mul_([param.grad for param in params.values()], 1e-3)

    def clip_and_divide():
        clip()
        schedule._stage.scale_grads(K)

    def divide_by_hand():
        for param in params.values():
            param.grad.div_(K)

    for edit in (clip, clip_and_divide, divide_by_hand):
        feed(schedule, *data(0, rank))
        edit()
        with pytest.raises(RuntimeError) as caught:
            optimizer.step()
        said.append(str(caught.value))
        optimizer.zero_grad()
    feed(schedule, *data(0, rank))
    optimizer.step()
    return said, dict(params)


def kept(rank, kind, shard):
    """A gradient that is kept over a step is where a zero-bubble schedule adds the next one, in place.

    Without the first stage, whose backward is a whole one there, nothing else says that gradients arrived.
    """
    schedule, params, optimizer = single(kind=kind, shard=shard, first=1)
    for window in range(2):
        feed(schedule, *data(window, rank))
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("shard", ["none", "optimizer"])
@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleavedZeroBubble])
def test_gradients_kept_over_a_step_are_added_to(kind, shard):
    model = nn.Sequential(*blocks())
    reference = torch.optim.SGD(model[1:].parameters(), lr=0.5)
    for window in range(2):
        for replica in range(2):
            x, target = data(window, replica)
            (loss_fn(model(x), target) / 2).backward()
        for param in model[1:].parameters():
            param.grad.div_(K)
        reference.step()
    expected = dict(model.named_parameters())
    for params in [on_rank["kept"][kind, shard] for on_rank in run_edges()]:
        assert all(torch.equal(param, expected[name]) for name, param in params.items())


def edges(rank):
    kinds = (Schedule1F1B, ScheduleInterleavedZeroBubble)
    results = {"kept": {(kind, shard): kept(rank, kind, shard) for kind in kinds for shard in SHARDS[:2]}}
    results["late"] = {shard: late(rank, shard) for shard in SHARDS[1:]}
    results["unscaled"] = {shard: unscaled(rank, shard) for shard in SHARDS[1:]}
    return {**results, "zero bubble": zero_bubble_under_gradients(), "edits": edits(rank)}


@functools.cache
def run_edges():
    return run(edges, 2)


def test_a_clip_beside_the_division_of_the_schedule_still_raises():
    expected = after_one_step()
    for said, params in [on_rank["edits"] for on_rank in run_edges()]:
        assert len(said) == 3
        assert all("edited between backward and step" in text for text in said)
        assert all(torch.equal(param, expected[name]) for name, param in params.items())


def after_one_step(scale=1.0):
    model = nn.Sequential(*blocks())
    for replica in range(2):
        x, target = data(0, replica)
        (loss_fn(model(x), target) * scale / (2 * K)).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return {name: p.detach() for name, p in model.named_parameters()}


def unscaled(rank, shard):
    schedule, params, optimizer = single(shard=shard, scale_grads=False)
    feed(schedule, *data(0, rank))
    optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_scale_grads_false_leaves_the_sum(shard):
    expected = after_one_step(scale=K)
    for params in [on_rank["unscaled"][shard] for on_rank in run_edges()]:
        assert all(torch.equal(param, expected[name]) for name, param in params.items())


def late(rank, shard):
    """The module comes after the wrapper, the stage after a backward; then both go, and torch has its methods back."""
    gc.collect()  # wrappers of earlier cases
    before = _PipelineStageBase.scale_grads, _PipelineStageBase.backward_weight_one_chunk
    mesh = one_stage_each()
    whole = blocks()
    params = names(whole, whole)
    inner = torch.optim.SGD(list(params.items()), lr=0.5)
    module = sys.modules.pop("torch.distributed.pipelining.stage")
    optimizer = fusedopt.FusedMainGradOptimizer(inner, device_mesh=mesh["dp"], shard=shard)
    loss_fn(nn.Sequential(*whole)(data(9, rank)[0]), data(9, rank)[1]).backward()
    is_untouched = before == (_PipelineStageBase.scale_grads, _PipelineStageBase.backward_weight_one_chunk)
    optimizer.zero_grad()
    sys.modules["torch.distributed.pipelining.stage"] = module
    schedule, _ = make_schedule(Schedule1F1B, mesh["pp"].get_group(), whole)
    feed(schedule, *data(0, rank))
    was_followed = before[0] is not _PipelineStageBase.scale_grads
    optimizer.step()
    result = {name: p.detach().clone() for name, p in params.items()}
    optimizer.unwrap()
    del optimizer
    gc.collect()
    is_back = before == (_PipelineStageBase.scale_grads, _PipelineStageBase.backward_weight_one_chunk)
    return result, (is_untouched, was_followed, is_back)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_stages_made_late_are_followed_and_torch_gets_its_methods_back(shard):
    expected = after_one_step()
    for params, seen in [on_rank["late"][shard] for on_rank in run_edges()]:
        assert seen == (True, True, True)
        assert all(torch.equal(param, expected[name]) for name, param in params.items())


def zero_bubble_under_gradients():
    schedule, _, optimizer = single(kind=ScheduleInterleavedZeroBubble, shard="gradients")
    with pytest.raises(RuntimeError) as caught:
        feed(schedule, *data(0, 0))
    return str(caught.value), optimizer.config.shard


def test_zero_bubble_under_gradients_says_why_not():
    for said, shard in [on_rank["zero bubble"] for on_rank in run_edges()]:
        assert shard == "gradients"
        assert "zero-bubble schedule sets the gradient of parameter 3.0.weight itself" in said
        assert 'Use shard="optimizer"' in said


def clips(mesh, shard):
    """AdamW with clipping, three windows, and a nan on one stage of one replica in the second."""
    group, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    whole = blocks()
    schedule, own = make_schedule(Schedule1F1B, group, whole)
    params = names(own, whole)
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.AdamW(list(params.items()), lr=1e-2),
        device_mesh=mesh["dp"],
        norm_group=group,
        shard=shard,
        max_grad_norm=1.0,
    )
    norms = []
    for window in range(3):
        x, target = data(window, replica)
        if window == 1 and replica == 1:
            target[0, 0] = torch.nan
        feed(schedule, x, target)
        with recorded_warnings():
            optimizer.step()
            skipped = optimizer.skipped_steps
        norms.append((optimizer.grad_norm.item(), skipped))
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in params.items()}, norms


def clips_and_ties(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    results = {"clips": {shard: clips(mesh, shard) for shard in SHARDS}}
    return {**results, "tied": {shard: tied(mesh, shard) for shard in SHARDS}, "not tied": tied(mesh, "none", False)}


@functools.cache
def run_clips_and_ties():
    return run(clips_and_ties, 4)


@pytest.mark.parametrize("shard", SHARDS)
def test_norms_are_over_all_stages_and_a_nan_skips_the_step_on_all(shard):
    model = nn.Sequential(*blocks())
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for window in (0, 2):
        for replica in range(2):
            x, target = data(window, replica)
            (loss_fn(model(x), target) / (2 * K)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        reference.step()
        reference.zero_grad()
    expected = dict(model.named_parameters())
    for params, found in [on_rank["clips"][shard] for on_rank in run_clips_and_ties()]:
        assert [skipped for _, skipped in found] == [0, 1, 1]
        assert [norm for norm, _ in found[::2]] == pytest.approx(norms, rel=ADAM_BOUND)
        for name, param in params.items():
            assert param.isfinite().all()
            assert torch.allclose(param, expected[name], rtol=ADAM_BOUND, atol=ADAM_BOUND)


def sum_tied(weight, group):
    """Add up the gradients of a weight that the first and the last stage hold; the ranks of both call it."""
    dist.all_reduce(weight.main_grad, group=group)


VOCABULARY = 8


class First(nn.Module):
    def __init__(self, embedding, block):
        super().__init__()
        self.embedding, self.block = embedding, block

    def forward(self, tokens):
        return self.block(self.embedding(tokens))


class Last(nn.Module):
    def __init__(self, block, embedding):
        super().__init__()
        self.block, self.head = block, nn.Linear(SIZE, VOCABULARY, bias=False, dtype=torch.float64)
        self.head.weight = embedding.weight

    def forward(self, x):
        return self.head(self.block(x))


def tied_halves():
    generator = torch.Generator().manual_seed(5)
    embedding = nn.Embedding(VOCABULARY, SIZE, dtype=torch.float64)
    with torch.no_grad():
        embedding.weight.copy_(torch.randint(-2, 3, embedding.weight.shape, generator=generator))
    made = blocks()
    return First(embedding, made[0]), Last(made[1], embedding), embedding.weight


def tokens_of(window, replica):
    generator = torch.Generator().manual_seed(10 * window + replica)
    tokens = torch.randint(0, VOCABULARY, (2 * K,), generator=generator)
    return tokens, torch.randint(-3, 4, (2 * K, VOCABULARY), generator=generator).double()


def tied(mesh, shard, uses_recipe=True):
    """The recipe: the tied weight in an optimizer of its own, without a shard; the rest sharded as it likes."""
    group, replica = mesh["pp"].get_group(), mesh["dp"].get_local_rank()
    *halves, weight = tied_halves()
    own = halves[dist.get_rank(group)]
    stage = PipelineStage(own, dist.get_rank(group), 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, K, loss_fn=loss_fn)

    def wrap(named, shard):
        return fusedopt.FusedMainGradOptimizer(
            torch.optim.SGD(named, lr=0.5, momentum=0.5), device_mesh=mesh["dp"], norm_group=group, shard=shard
        )

    others = [(name, p) for name, p in own.named_parameters() if p is not weight]
    if shard == "none":
        optimizers = [wrap([("tied", weight), *others], "none")]
    else:
        optimizers = [wrap([("tied", weight)], "none"), wrap(others, shard)]
    for window in range(2):
        feed(schedule, *tokens_of(window, replica))
        if uses_recipe:
            sum_tied(weight, group)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weight.detach(), {name: p.detach() for name, p in others}


@pytest.mark.parametrize("shard", SHARDS)
def test_tied_weights_of_first_and_last_stage_stay_one_by_the_recipe(shard):
    first, last, weight = tied_halves()
    model = nn.Sequential(first, last)
    reference = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for window in range(2):
        for replica in range(2):
            tokens, target = tokens_of(window, replica)
            (loss_fn(model(tokens), target) / (2 * K)).backward()
        reference.step()
        reference.zero_grad()
    halves = [dict(first.named_parameters()), dict(last.named_parameters())]
    for rank, (found, others) in enumerate(on_rank["tied"][shard] for on_rank in run_clips_and_ties()):
        assert found.isfinite().all()
        assert torch.equal(found, weight)
        assert all(torch.equal(param, halves[rank % 2][name]) for name, param in others.items())
    assert not any(torch.equal(on_rank["not tied"][0], weight) for on_rank in run_clips_and_ties())


def events(kind):
    """FW, BW and OPT as they happen in the second window, with and without a pipeline of one stage."""
    lists, ends = [], []
    for is_pipeline in (False, True):
        schedule, params, optimizer = single(gradient_accumulation_steps=1 if is_pipeline else K, kind=kind)
        seen = []
        module = schedule._stage.submod
        module.register_forward_pre_hook(lambda *_, seen=seen: seen.append("FW"))
        module[0][0].weight.register_post_accumulate_grad_hook(lambda _, seen=seen: seen.append("BW"))
        optimizer._inner.optimizers[0].register_step_pre_hook(lambda *_, seen=seen: seen.append("OPT"))
        for window in range(2):
            seen.clear()
            if is_pipeline:
                feed(schedule, *data(window, 0))
                optimizer.step()
                optimizer.zero_grad()
            else:
                for x, target in zip(*(t.chunk(K) for t in data(window, 0)), strict=True):
                    loss_fn(module(x), target).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        lists.append(seen)
        ends.append({name: p.detach() for name, p in params.items()})
    return lists, ends


def all_events(rank):
    return {kind: events(kind) for kind in (Schedule1F1B, ScheduleGPipe)}


@functools.cache
def run_events():
    return run(all_events, 1)


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleGPipe])
def test_gradient_merge_is_a_pipeline_of_one_stage_event_for_event(kind):
    (merge, pipeline), ends = run_events()[0][kind]
    assert merge == ["FW", "BW"] * K + ["OPT"]
    assert pipeline == (merge if kind is Schedule1F1B else ["FW"] * K + ["BW"] * K + ["OPT"])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
