"""W ranks with k micro-batches each are one process with W * k, bit for bit; and what that costs in collectives."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedopt
from tests.deep import IS_DEEP, in_turn, paired
from tests.distributed.launcher import at, run
from tests.distributed.programs import (
    ALL,
    NUM_BLOCKS,
    Backward,
    Clear,
    Settings,
    Step,
    Window,
    assert_exact,
    groups_of,
    make_net,
    plain_window,
    play,
    play_on_ranks,
    same,
)

NUM_WINDOWS = 3
SHARDS = ("none", "optimizer", "gradients")


def settings_for(shard, world_size=2, **fixed):
    """Return how gradients are cut, reduced and gathered: each two of these meet, on 3 ranks each occurs.

    The other combinations are left to `make test-deep`.
    """
    cuts = (["element"], [None]) if shard == "none" else (("element", "parameter"), (False, True))
    found = paired(*cuts, (False, True))
    if shard != "none" and world_size == 3 and not IS_DEEP:
        found = [("element", False, True), ("parameter", True, False)]
    return [
        Settings(shard, by, overlap_grad_reduce=reduce, overlap_param_gather=gather, **fixed)
        for by, gather, reduce in found
    ]


def by_settings(results):
    """Check what came of the programs and return what rank 0 has of each."""
    assert_exact(results)
    return results[0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shard", SHARDS)
def test_ranks_and_micro_batches_are_one_process_and_collectives_do_not_grow_with_them(shard, world_size):
    cases = []
    for k in (1, 4):
        program = tuple(plain_window(world_size, k, merging=True) for _ in range(NUM_WINDOWS))
        cases += [("", s, program) for s in settings_for(shard, world_size, gradient_accumulation_steps=k)]
    played = by_settings(play_on_ranks(world_size, cases))
    assert len(played) == len(cases)
    for (_, settings, _), result in zip(cases, played, strict=True):
        k, num_buckets = settings.gradient_accumulation_steps, result.num_buckets
        assert num_buckets == NUM_BLOCKS, result.label
        assert len(result.counts) == NUM_WINDOWS
        for counts in result.counts:
            assert counts["reduce"] == num_buckets * (k if shard == "gradients" else 1), (result.label, counts)
            assert counts["gather"] == (0 if shard == "none" else num_buckets), (result.label, counts)
            assert counts["broadcast"] == 0, (result.label, counts)
        assert all(counts == result.counts[1] for counts in result.counts[1:]), (result.label, result.counts)
        first = result.counts[0] - result.counts[1]
        assert first in ({}, {"control": 1}), (result.label, first)  # ranks agree once on the order of buckets


@pytest.mark.parametrize("shard", SHARDS)
def test_all_collectives_of_a_window_are_counted_and_only_backwards_of_gradients_cost_more(shard):
    world_size = 2
    cases = []
    for k in (2, 4):
        program = tuple(plain_window(world_size, k, merging=True) for _ in range(2))
        cases += [("", s, program) for s in settings_for(shard, gradient_accumulation_steps=k, max_grad_norm=100.0)]
    played = by_settings(play_on_ranks(world_size, cases))
    half = len(played) // 2
    for two, four in zip(played[:half], played[half:], strict=True):
        if shard == "gradients":
            per_backward = {
                "reduce": NUM_BLOCKS,
                "control": (four.counts[1]["control"] - two.counts[1]["control"]) // 2,
            }
            assert 1 <= per_backward["control"] <= 2, two.label
            assert four.counts[1] - two.counts[1] == {kind: 2 * n for kind, n in per_backward.items()}, two.label
        else:
            assert four.counts == two.counts, two.label
        assert two.counts[1]["scalar"] == (0 if shard == "none" else 1), two.label
        assert two.counts[1]["control"] <= (4 if shard == "gradients" else 2), two.label


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_window_by_no_sync_reduces_once_and_is_one_process(shard, world_size):
    last = plain_window(world_size, 1).rows
    rows = tuple(same(world_size, Backward(sync=False)) for _ in range(3)) + last
    cases = [("", s, (Window(rows),) * NUM_WINDOWS) for s in settings_for(shard, world_size)]
    for result in by_settings(play_on_ranks(world_size, cases)):
        for counts in result.counts:
            assert counts["reduce"] == NUM_BLOCKS * (4 if shard == "gradients" else 1), (result.label, counts)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_after_backwards_under_no_sync_alone_still_reduces(shard):
    rows = (*(same(2, Backward(sync=False)) for _ in range(2)), same(2, Step(), Clear()))
    cases = [("", s, (Window(rows),) * NUM_WINDOWS) for s in settings_for(shard)]
    for result in by_settings(play_on_ranks(2, cases)):
        assert all(counts["reduce"] >= NUM_BLOCKS for counts in result.counts), (result.label, result.counts)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_window_that_the_caller_counts_is_one_process(shard, world_size):
    program = (plain_window(world_size, 3),) * NUM_WINDOWS
    cases = [("", s, program) for s in settings_for(shard, world_size)]
    for result in by_settings(play_on_ranks(world_size, cases)):
        backwards = 1 if shard == "optimizer" else 3  # it cannot know which is the last
        assert all(counts["reduce"] == NUM_BLOCKS * backwards for counts in result.counts), (
            result.label,
            result.counts,
        )


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_optimizers_clipping_and_fused_layers_are_one_process(dtype, shard):
    """Also several buckets in one group, and fused layers, which write into main_grad themselves."""
    world_size = 3
    base = Settings(shard, dtype=dtype)
    variants = [
        *(dataclasses.replace(base, optimizer=name) for name in ("AdamW", "SGD", "plain SGD")),
        dataclasses.replace(base, max_grad_norm=100.0),
        dataclasses.replace(base, optimizer="SGD", max_grad_norm=1e6),  # a coefficient of 1 changes no bit
        dataclasses.replace(base, is_fused=True, gradient_accumulation_steps=2),
        dataclasses.replace(base, num_groups=2),
        dataclasses.replace(base, num_groups=1, width=300),
        dataclasses.replace(base, num_groups=1, width=300, is_fused=True),
    ]
    if shard != "none":  # each variant under one of two cuts, the other one with the other dtype or shard; or deep
        turn = (dtype is torch.float32) + (shard == "gradients")
        both = [[s, dataclasses.replace(s, shard_by="parameter")] for s in variants]
        variants = [s for number, of in enumerate(both) for s in in_turn(of, number + turn)]
    cases = []
    for settings in variants:
        k = settings.gradient_accumulation_steps
        cases.append(("", settings, tuple(plain_window(world_size, k, merging=True) for _ in range(NUM_WINDOWS))))
    for (_, settings, _), result in zip(cases, by_settings(play_on_ranks(world_size, cases)), strict=True):
        if settings.num_groups == 1:
            assert result.num_buckets >= 2, result.label
        if settings.max_grad_norm is not None:
            assert len(result.norms) == NUM_WINDOWS
            assert all((norm > settings.max_grad_norm) == (settings.max_grad_norm < 1e6) for norm in result.norms)


@pytest.mark.parametrize("shard", SHARDS)
def test_one_rank_is_one_process_and_communicates_nothing(shard):
    cases = [
        ("", s, tuple(plain_window(1, 2, merging=True) for _ in range(NUM_WINDOWS)))
        for s in settings_for(shard, gradient_accumulation_steps=2)
    ]
    for result in by_settings(play_on_ranks(1, cases)):
        assert not any(sum(counts.values()) for counts in result.counts), (result.label, result.counts)


def play_in_two_groups(rank, settings):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group, world_size = (groups[1], 1) if rank == 1 else (groups[0], 2)
    program = tuple(plain_window(world_size) for _ in range(NUM_WINDOWS))
    return [play(dist.get_rank(group), world_size, s, program, f"rank {rank}", process_group=group) for s in settings]


@pytest.mark.parametrize("shard", SHARDS)
def test_a_process_group_of_some_ranks_is_a_world_of_its_own(shard):
    results = run(play_in_two_groups, 3, settings_for(shard))
    assert_exact([results[0], results[2]])
    assert_exact([results[1]])
    assert all(counts["reduce"] == NUM_BLOCKS for result in results[0] for counts in result.counts)


def play_on_a_mesh(rank, settings):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    program = tuple(plain_window(4) for _ in range(NUM_WINDOWS))
    return [play(rank, 4, s, program, device_mesh=mesh) for s in settings]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_a_two_dimensional_mesh_shards_inside_and_replicates_across(shard):
    for result in by_settings(run(play_on_a_mesh, 4, settings_for(shard))):
        for counts in result.counts:
            assert counts["reduce"] == 2 * NUM_BLOCKS, (result.label, counts)  # inside, then across
            assert counts["gather"] == NUM_BLOCKS, (result.label, counts)


# -- optimizers that need whole matrices


def train_with_muon(rank, shard, shard_by, world_size):
    """Return the distance between ranks trained together and one process, the same in plain torch."""
    net, twin = make_net(torch.float32), make_net(torch.float32)
    muon = [[p for name, p in m.named_parameters() if p.ndim == 2 and "blocks.2" not in name] for m in (net, twin)]
    rest = [[p for name, p in m.named_parameters() if p.ndim != 2 or "blocks.2" in name] for m in (net, twin)]
    inner = [torch.optim.Muon(muon[0], lr=0.125), torch.optim.AdamW(rest[0], lr=0.125)]
    optimizer = fusedopt.FusedMainGradOptimizer(inner, shard=shard, shard_by=shard_by, bucket_mib=1)
    plain = [torch.optim.Muon(muon[1], lr=0.125), torch.optim.AdamW(rest[1], lr=0.125)]
    for window in range(NUM_WINDOWS):
        net(Backward(), (window, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sum(twin(Backward(), (window, r)) for r in range(world_size)).backward()
        for p in twin.parameters():
            p.grad /= world_size
        for opt in plain:
            opt.step()
            opt.zero_grad()
    at("comparing")
    assert all(torch.isfinite(p).all() for p in net.parameters())
    return [
        name for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True) if not torch.equal(p, q)
    ]


@pytest.mark.parametrize("shard_by", ["parameter", "auto"])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_muon_with_adamw_gets_whole_matrices_and_is_one_process(shard, shard_by):
    assert run(train_with_muon, 2, shard, shard_by, 2, reuses=True) == [[], []]


class Trusted(torch.optim.Optimizer):
    """Steps by the norm of each whole tensor, as LAMB: the same on a matrix and on its elements in one row."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.125})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(group["lr"] * param.grad * (param.norm() / param.grad.norm()))


def train_by_norms(rank, shard, world_size):
    net, twin = make_net(torch.float32), make_net(torch.float32)
    optimizer = fusedopt.FusedMainGradOptimizer(Trusted(net.parameters()), shard=shard, bucket_mib=1)
    plain = Trusted(twin.parameters())
    for window in range(NUM_WINDOWS):
        net(Backward(), (window, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        sum(twin(Backward(), (window, r)) for r in range(world_size)).backward()
        for p in twin.parameters():
            p.grad /= world_size
        plain.step()
        plain.zero_grad()
    assert all(torch.isfinite(p).all() for p in net.parameters())
    return [
        name for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True) if not torch.equal(p, q)
    ]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_an_optimizer_that_goes_by_norms_is_one_process_without_being_told(shard):
    assert run(train_by_norms, 2, shard, 2, reuses=True) == [[], []]


# -- when reductions start


def count_reductions_seen_in_backward(rank, settings, k):
    """Return how many reductions had started when the last gradients of a window arrived, over three windows."""
    net = make_net(torch.float32, settings.width)
    optimizer = settings.make(net)
    seen = []
    handle = net.blocks[0].layer.weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(optimizer._comm.counts["reduce"])
    )
    started = []
    for window in range(3):
        before = optimizer._comm.counts["reduce"]
        for i in range(k):
            net(Backward(), (window, i, rank)).backward()
            if i == k - 1:
                started.append(seen[-1] - before)
            optimizer.step()
            optimizer.zero_grad()
    handle.remove()  # it knows the optimizer, and Python's collector does not see through it
    return started, len(optimizer._buffers.buckets)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("shard", "k"), [("none", 1), ("none", 2), ("optimizer", 2), ("gradients", 1)])
def test_reductions_start_inside_the_last_backward_where_overlap_is_asked_for(shard, k, overlap):
    # One group of several buckets: within a group the last layers lie in the first buckets.
    settings = Settings(shard, overlap_grad_reduce=overlap, gradient_accumulation_steps=k, num_groups=1, width=600)
    for started, num_buckets in run(count_reductions_seen_in_backward, 2, settings, k):
        assert num_buckets >= 4
        if overlap:
            assert all(0 < n < num_buckets for n in started), started
        elif shard != "gradients":  # which may have to wait for each bucket instead, to keep one buffer
            assert started == [0, 0, 0]


# -- who has which parameters at the start


def construct(rank, shard, broadcast):
    net = make_net(torch.bfloat16, seed=rank)
    net.register_buffer("statistics", torch.full((3,), float(rank)))
    net.blocks[0].layer.weight.requires_grad_(False)
    before = [p.detach().clone() for p in net.parameters()]
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(trained), shard=shard, broadcast_params=broadcast)
    first = [p.detach() for p in make_net(torch.bfloat16, seed=0).parameters()]
    got = [p.detach() for p in net.parameters()]
    is_first = [torch.equal(p, q) for p, q in zip(got, first, strict=True)]
    is_own = [torch.equal(p, q) for p, q in zip(got, before, strict=True)]
    num_broadcasts = optimizer._comm.counts["broadcast"]
    fusedopt.broadcast_module(net, dist.group.WORLD)
    everything = [torch.equal(p, q) for p, q in zip(net.parameters(), first, strict=True)]
    return is_first, is_own, num_broadcasts, everything, net.statistics.tolist()


@pytest.mark.parametrize("broadcast", [True, False])
@pytest.mark.parametrize("shard", SHARDS)
def test_construction_broadcasts_the_trained_parameters_and_broadcast_module_everything(shard, broadcast):
    for rank, result in enumerate(run(construct, 2, shard, broadcast, reuses=True)):
        is_first, is_own, num_broadcasts, everything, statistics = result
        assert len(is_first) == 7
        if rank == 1:
            assert is_own == [True] + [not broadcast] * 6
            assert is_first == [False] + [broadcast] * 6
        assert (num_broadcasts > 0) == broadcast
        assert all(everything)
        assert statistics == [0.0] * 3


# -- loops that hold references


def train_interleaved(rank, shard):
    """Two forwards, then their backwards, and a scheduler; return what differs from one process."""
    nets = [make_net(torch.float32) for _ in range(2)]
    optimizer = Settings(shard).make(nets[0])
    twin = torch.optim.AdamW(groups_of(nets[1], NUM_BLOCKS), lr=0.125, weight_decay=0.25)
    schedulers = [torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5) for opt in (optimizer, twin)]
    for window in range(NUM_WINDOWS):
        losses = [nets[0](Backward(ALL[i:]), (window, i, rank)) for i in range(2)]
        for loss in reversed(losses):
            loss.backward()
        sum(nets[1](Backward(ALL[i:]), (window, i, r)) for i in range(2) for r in range(2)).backward()
        for p in nets[1].parameters():
            p.grad /= 2
        for opt, scheduler in zip((optimizer, twin), schedulers, strict=True):
            opt.step()
            opt.zero_grad()
            scheduler.step()
    pairs = zip(nets[0].named_parameters(), nets[1].parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.isfinite(p).all() or not torch.equal(p, q)]


@pytest.mark.parametrize("shard", SHARDS)
def test_interleaved_forwards_and_backwards_and_a_scheduler_are_one_process(shard):
    assert run(train_interleaved, 2, shard, reuses=True) == [[], []]


def wrap_empty_and_odd_shapes(rank, shard, shard_by):
    """Return parameters of awkward shapes after three windows."""
    torch.manual_seed(rank)
    shapes = [(), (0,), (1,), (3, 0), (5, 7), (1025,), (2, 3, 5, 7)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(names, lr=1.0), shard=shard, shard_by=shard_by)
    for window in range(3):
        sum((p * (window + 6.0 * rank)).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in params]


@pytest.mark.parametrize("shard_by", ["element", "parameter"])
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_empty_scalar_and_odd_parameters_are_reduced_and_gathered(shard, shard_by):
    for params in run(wrap_empty_and_odd_shapes, 3, shard, shard_by, reuses=True):
        expected = 1.0 - sum(window + 6.0 for window in range(3))  # the mean of 0, 6 and 12 over ranks is 6
        assert [p.shape for p in params] == [(), (0,), (1,), (3, 0), (5, 7), (1025,), (2, 3, 5, 7)]
        assert all(torch.equal(p, torch.full_like(p, expected)) for p in params)
