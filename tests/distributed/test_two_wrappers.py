"""Several wrappers over the same ranks: exact whatever each rank reaches in whatever order, or all ranks raise."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedopt
from tests.deep import in_turn
from tests.distributed.launcher import run, settle
from tests.distributed.several import CASES, RANKS, SHARDS, SIZES, B, Clear, Several, Step, assert_exact

# -- what was reported


def one_backward_over_two(rank, shard, overlap, sizes):
    """Rank 0 reaches b and a, rank 1 only b."""
    several = Several(rank, 2, shard, overlap, sizes)
    for paths in (((1, 0), (1,)), ((0, 1), (0,)), ((0,), (1,)), ((1,), (0,)), ((0, 1, 0), (1, 0))):
        several.play([B(path) for path in paths])
        several.end_window()
        several.play([B(path) for path in paths])
        several.play([B(path) for path in reversed(paths)])
        several.end_window()
    several.plain_windows()
    return several.problems


@pytest.mark.parametrize(("shard", "overlap", "sizes"), CASES)
def test_a_backward_over_two_wrappers_may_reach_one_of_them_on_some_ranks_only(shard, overlap, sizes):
    assert_exact(run(one_backward_over_two, 2, shard, overlap, sizes, reuses=True))


def the_reported_numbers(rank, shard):
    a, b = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    wrappers = [fusedopt.FusedMainGradOptimizer(torch.optim.SGD([p], lr=1.0), shard=shard) for p in (a, b)]
    loss = b.mul(20).sum() + a.mul(2).sum() if rank == 0 else (b * 200).sum()
    loss.backward()
    grads = [p.grad.tolist() for p in (a, b)] if shard == "none" else None
    for wrapper in wrappers:
        wrapper.step()
    return grads, a.tolist(), b.tolist()


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_of_two_wrappers_are_not_exchanged(shard):
    expected = ([[1.0] * 4, [110.0] * 4] if shard == "none" else None, [-1.0] * 4, [-110.0] * 4)
    assert run(the_reported_numbers, 2, shard, reuses=True) == [expected] * 2


def two_critics(rank, world_size, shard, overlap, sizes):
    """One backward through both, whose forwards run in another order on each rank, or a backward each."""
    several = Several(rank, world_size, shard, overlap, sizes)
    orders = [(0, 1) if r % 2 else (1, 0) for r in range(world_size)]
    for _ in range(3):
        several.play([B(order) for order in orders])
        several.end_window()
        for i in range(2):
            several.play([B((order[i],)) for order in orders])
        several.end_window((1, 0))
    return several.problems


@pytest.mark.parametrize(("shard", "overlap", "sizes"), CASES)
@pytest.mark.parametrize("world_size", RANKS)
def test_two_critics_in_another_order_on_each_rank(world_size, shard, overlap, sizes):
    assert_exact(run(two_critics, world_size, world_size, shard, overlap, sizes, reuses=True))


def gan(rank, world_size, shard, overlap):
    """The generator's loss goes through the discriminator, on some ranks only; each steps in its turn."""
    several = Several(rank, world_size, shard, overlap)
    everybody = [None] * world_size
    for iteration in range(4):
        several.play([Clear((0,))] * world_size)
        several.play([B((0, 0)) for _ in everybody])
        several.play([Step((0,))] * world_size)
        several.play([Clear((1,))] * world_size)
        several.play([B((1, 0)) if (r + iteration) % 2 else B((1,)) for r in range(world_size)])
        several.play([Step((1,))] * world_size)
    return several.problems


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_gan_trains_as_one_process(shard, overlap):
    assert_exact(run(gan, 3, 3, shard, overlap, reuses=True))


def a_third_while_two_train(rank, shard):
    """Ranks make a third wrapper where one has had a backward more: what it came for is served first."""
    several = Several(rank, 2, shard)
    several.play([B((0, 1)), B((1,))])
    several.add(17, shard=shard)
    several.play([B((2,)), B((1, 0))])
    several.end_window((2, 0, 1))
    several.plain_windows()
    return several.problems


@pytest.mark.parametrize("shard", SHARDS)
def test_a_third_wrapper_joins_at_any_time(shard):
    assert_exact(run(a_third_while_two_train, 2, shard, reuses=True))


def another_group_of_ranks(rank, shard):
    """One wrapper over all ranks, one over the first two: a backward through both on these."""
    group = dist.new_group([0, 1])
    several = Several(rank, 3, shard, num=1)
    pair = nn.Parameter(torch.zeros(6))
    inner = torch.optim.SGD([pair], lr=1.0)
    wrapper = fusedopt.FusedMainGradOptimizer(inner, shard=shard, process_group=group) if rank < 2 else None
    for _ in range(3):
        total = sum((p * 3.0).sum() for p in several.params[0].values())
        (total + (pair * (rank + 1)).sum() if rank < 2 else total).backward()
        if wrapper is not None:
            wrapper.step()
            wrapper.zero_grad()
        several.wrappers[0].step()
        several.wrappers[0].zero_grad()
    return pair.tolist(), several.params[0]["p0.first"].tolist()


@pytest.mark.parametrize("shard", SHARDS)
def test_wrappers_over_other_ranks_meet_one_group_of_ranks_after_the_other(shard):
    *both, last = run(another_group_of_ranks, 3, shard)
    assert [pair for pair, _ in both] == [[-4.5] * 6] * 2
    assert last[0] == [0.0] * 6
    assert all(found == last[1] and found[0] < 0.0 for _, found in both)


# -- programs


def random_path(rng, num):
    path = rng.choices(range(num), k=rng.randint(1, num + 1))
    rng.shuffle(path)
    return tuple(path)


def random_program(rng, world_size, num, shard):
    """Return rows: backwards through any wrappers on each rank, steps and clears in any order, the same on all.

    Under ``"optimizer"`` ranks meet in steps only. What one rank sent early and all then clear is raised, not mended,
    where others send something else before; so a step comes before each clear.
    """
    rows = []
    for _ in range(10):
        kind = rng.random()
        if kind < 0.6:
            paused = tuple(range(num)) if rng.random() < 0.25 else ()
            rows.append([B(random_path(rng, num), paused) for _ in range(world_size)])
        else:
            some = tuple(rng.sample(range(num), rng.randint(1, num)))
            if kind < 0.8 or shard == "optimizer":
                rows.append([Step(some)] * world_size)
            if kind >= 0.8:
                rows.append([Clear(some)] * world_size)
    return rows


def with_shards(seeds, world_size):
    """Return each seed with every shard; all but one of these are left to `make test-deep`."""
    return [(seed, shard) for seed in seeds for shard in in_turn(SHARDS, seed + world_size)]


def random_programs(rank, world_size, seeds):
    problems = []
    for seed, shard in with_shards(seeds, world_size):
        problems += [f"seed {seed}, {shard}: {text}" for text in play_random(rank, world_size, seed, shard)]
        settle()
    return problems


def play_random(rank, world_size, seed, shard):
    rng = random.Random(f"{seed} {shard}")
    num = rng.choice((2, 2, 3))
    several = Several(rank, world_size, shard, rng.random() < 0.7, rng.choice(list(SIZES)), num)
    for row in random_program(rng, world_size, num, shard):
        several.play(row)
    several.end_window()
    several.plain_windows()
    return several.problems


@pytest.mark.parametrize("seeds", [range(0, 12), range(12, 24)], ids=str)
@pytest.mark.parametrize("world_size", RANKS)
def test_random_programs_over_several_wrappers_are_one_process(world_size, seeds):
    assert_exact(run(random_programs, world_size, world_size, seeds, reuses=True))


def wild_programs(rank, world_size, seeds):
    """Ranks differ in the number of their backwards, in clears and in the order of steps."""
    problems, raised = [], []
    for seed, shard in with_shards(seeds, world_size):
        found, raises = play_wild(rank, world_size, seed, shard)
        problems += [f"seed {seed}, {shard}: {text}" for text in found]
        raised += [(seed, shard, *where) for where in raises]
        settle()
    return problems, raised


def play_wild(rank, world_size, seed, shard):
    raised = []
    rng = random.Random(f"wild {seed} {shard}")
    several = Several(rank, world_size, shard, rng.random() < 0.7, rng.choice(list(SIZES)), 2)
    for window in range(4):
        rows = [[B(random_path(rng, 2) if rng.random() < 0.8 else ()) for _ in range(world_size)] for _ in range(3)]
        order = random_order(rng, world_size)
        try:
            for row in rows:
                several.act(row[rank])
                for r, event in enumerate(row):
                    several.count(r, event)
                several.num_backwards += 1
            several.act(order[rank])
        except RuntimeError as error:
            raised.append((window, str(error)))
            several.lose()
            break  # parameters of a wrapper that had stepped are ahead
        for number in order[0].order:
            several.step_one(number)
        several.compare(order)
        several.play([Clear((0, 1))] * world_size)
    return several.problems, raised


def random_order(rng, world_size):
    order = [Step((0, 1)) if rng.random() < 0.5 else Step((1, 0))] * world_size
    if rng.random() < 0.1:
        order[0] = Step(tuple(reversed(order[0].order)))
    return order


@pytest.mark.parametrize("world_size", RANKS)
def test_wild_programs_are_exact_or_raise_on_all_ranks(world_size):
    results = run(wild_programs, world_size, world_size, range(10), reuses=True)
    assert_exact([problems for problems, _ in results])
    raised = [[where[:3] for where in found] for _, found in results]
    assert all(found == raised[0] for found in raised)
    assert 0 < len(raised[0]) < len(with_shards(range(10), world_size))
    assert any("same order" in where[3] for where in results[0][1])
