"""Random programs from fixed seeds: equal to one process bit for bit, or a RuntimeError on all ranks."""

import dataclasses
import random

import pytest

from tests.deep import in_turn
from tests.distributed.programs import (
    NUM_BLOCKS,
    Backward,
    Clear,
    Settings,
    Step,
    Window,
    assert_exact,
    plain_window,
    play_on_ranks,
)

NUM_WINDOWS = 5
MOST_ROWS = 4


def random_path(rng):
    """Return blocks in any order, some twice, some not at all."""
    return tuple(rng.choices(range(NUM_BLOCKS), k=rng.randint(1, 2 * NUM_BLOCKS - 3)))


def random_backward(rng, is_wild, sync):
    """Return a backward; a wild one may fail or be empty."""
    path = random_path(rng)
    if is_wild and rng.random() < 0.15:
        return Backward((), sync=sync)
    fails_at = rng.randint(0, len(path)) if is_wild and rng.random() < 0.2 else None
    recompute = rng.choice([None, None, "reentrant", "non-reentrant"])
    times = 2 if fails_at is None and recompute is None and rng.random() < 0.1 else 1
    return Backward(path, fails_at, sync, recompute, times)


def random_clear(rng, shard):
    """Return a clear that can be seen under this kind of shard."""
    kind = rng.random()
    if shard == "gradients" or kind < 0.4:
        return Clear()
    return Clear("model") if kind < 0.6 else Clear("param", tuple(rng.sample(range(NUM_BLOCKS), rng.randint(1, 3))))


def random_row(rng, world_size, shard, is_wild, may_repeat):
    """Return what each rank does next: mostly a backward, the same number on all ranks unless wild."""
    kind = rng.random()
    if kind < 0.2:
        if is_wild and rng.random() < 0.3:
            return tuple((random_clear(rng, shard),) if rng.random() < 0.5 else () for _ in range(world_size))
        return ((random_clear(rng, shard),),) * world_size
    if kind < 0.35:  # under no_sync ranks may differ in number, where it keeps gradients local
        fixed = rng.randint(0, 2) if shard == "gradients" else None
        numbers = [rng.randint(0, 2) if fixed is None else fixed for _ in range(world_size)]
        rows = [[random_backward(rng, is_wild, sync=False) for _ in range(n)] for n in numbers]
        if fixed is not None:  # there these reduce, too: each a single backward call
            rows = [[dataclasses.replace(backward, times=1) for backward in row] for row in rows]
        return tuple(tuple(row) for row in rows)
    if is_wild and may_repeat and rng.random() < 0.1:
        return tuple(
            tuple(random_backward(rng, True, sync=True) for _ in range(rng.randint(0, 2))) for _ in range(world_size)
        )
    row = [random_backward(rng, is_wild, sync=True) for _ in range(world_size)]
    times = row[0].times if not is_wild else None
    return tuple(
        (b if times is None else Backward(b.path, None, True, b.recompute if times == 1 else None, times),) for b in row
    )


def random_program(seed, world_size, shard, is_wild):
    """Return windows that end in a step, with or without a clear after it; then two plain ones."""
    rng = random.Random(f"{seed} {world_size} {is_wild} {shard == 'gradients'}")
    windows = []
    for _ in range(NUM_WINDOWS):
        rows = [random_row(rng, world_size, shard, is_wild, True) for _ in range(rng.randint(1, MOST_ROWS))]
        end = (Step(),) if rng.random() < 0.3 else (Step(), random_clear(rng, shard))
        rows.append((end,) * world_size)
        windows.append(Window(tuple(rows), may_raise=is_wild))
    clear = Window((((Clear(),),) * world_size, *plain_window(world_size).rows))
    return (*windows, clear, plain_window(world_size))


def cases_for(seeds, world_size, is_wild, **fixed):
    """Return the programs of some seeds under every kind of shard; every third without overlap, in other groups.

    Left to `make test-deep`: on each number of ranks, each seed under the two other kinds.
    """
    shards = list(enumerate((("none", "element"), ("optimizer", "element"), ("gradients", "parameter"))))
    return [
        (
            f"seed {seed}",
            Settings(shard, by, overlap_grad_reduce=(seed + i) % 3 != 0, num_groups=NUM_BLOCKS - (seed % 4), **fixed),
            random_program(seed, world_size, shard, is_wild),
        )
        for seed in seeds
        for i, (shard, by) in in_turn(shards, seed + seed // 3 + world_size)  # each also without overlap
    ]


@pytest.mark.parametrize("seeds", [range(i, i + 8) for i in range(0, 16, 8)], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_without_exceptions_and_uneven_clears_every_program_is_exact(world_size, seeds):
    cases = cases_for(seeds, world_size, is_wild=False)
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    assert len(results[0]) == len(cases) >= len(seeds)
    assert not any(played.raised for played in results[0])


@pytest.mark.parametrize("seeds", [range(100 + i, 100 + i + 8) for i in range(0, 24, 8)], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_with_exceptions_and_uneven_clears_every_program_is_exact_or_raises_on_all_ranks(world_size, seeds):
    cases = cases_for(seeds, world_size, is_wild=True)
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    raised = sum(len(played.raised) for played in results[0])
    assert raised < NUM_WINDOWS * len(cases) / 2  # most windows are mended
    assert all(set(played.raised) <= set(range(NUM_WINDOWS)) for played in results[0])


def test_fused_layers_are_exact_in_programs_without_exceptions():
    results = play_on_ranks(2, cases_for(range(200, 206), 2, is_wild=False, is_fused=True))
    assert_exact(results)
    assert not any(played.raised for played in results[0])


def test_programs_are_what_they_say():
    quiet = [w for seed in range(16) for w in random_program(seed, 3, "none", False)]
    wild = [w for seed in range(16) for w in random_program(seed, 3, "none", True)]
    for windows, is_wild in ((quiet, False), (wild, True)):
        rows = [row for w in windows for row in w.rows]
        backwards = [e for row in rows for events in row for e in events if isinstance(e, Backward)]
        uneven = [row for row in rows if len({tuple(e for e in events if isinstance(e, Clear)) for events in row}) > 1]
        assert any(b.fails_at is not None for b in backwards) == is_wild
        assert any(not b.path for b in backwards) == is_wild
        assert bool(uneven) == is_wild
        assert any(len(set(b.path)) < len(b.path) for b in backwards)
        assert {b.recompute for b in backwards} == {None, "reentrant", "non-reentrant"}
        assert any(not b.sync for b in backwards)
        assert any(b.times == 2 for b in backwards)
        assert any(row[0] == (Step(),) for row in rows)
