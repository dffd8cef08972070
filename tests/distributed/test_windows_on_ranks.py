"""Clips and flushes in the middle of a window: what ranks must decide alike, also where some had no gradient."""

import random

import pytest
import torch
from torch import nn

import fusedopt
from tests.deep import in_turn
from tests.distributed.launcher import run, settle
from tests.window_twin import WindowTwin

SHARDS = ("none", "optimizer", "gradients")


class Ranks:
    """The wrapper on this rank, and one plain process with the mean of what all ranks do."""

    def __init__(self, rank, world_size, shard, k):
        self.rank, self.world_size, self.shard = rank, world_size, shard
        self.params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
        inner = torch.optim.SGD([("a", self.params[0]), ("b", self.params[1])], lr=1.0)
        by = {} if shard == "none" else {"shard_by": "element"}
        self.optimizer = fusedopt.FusedMainGradOptimizer(inner, gradient_accumulation_steps=k, shard=shard, **by)
        self.twin = WindowTwin(k, keeps_sums=shard != "none")
        self.raised = []

    def backward(self, values_by_rank):
        """Each rank's gradients of both parameters; all None is a micro-batch without any."""
        grads = []
        for param, values in zip(self.twin.params, zip(*values_by_rank, strict=True), strict=True):
            given = [torch.full_like(param, v) for v in values if v is not None]
            grads.append(sum(given) / self.world_size if given else None)
        if any(grad is not None for grad in grads):
            self.twin.backward(grads)
        terms = [(p * v).sum() for p, v in zip(self.params, values_by_rank[self.rank], strict=True) if v is not None]
        if self.shard == "gradients":  # every backward reduces: all ranks make one
            terms.append(self.params[0].sum() * 0.0)
        if terms:
            sum(terms).backward()

    def play(self, number, op, *args):
        """Do ``op`` on both; return what differs."""
        if op == "backward":
            self.backward(*args)
            return []
        do = {"clip": self.optimizer.clip_grad_norm_}.get(op) or getattr(self.optimizer, op)
        try:
            wanted = getattr(self.twin, op)(*args)
        except RuntimeError:
            try:
                do(*args)
            except RuntimeError:
                self.raised.append(number)
                if self.twin.num_pending == 0:  # a window that is lost is cleared on all ranks
                    self.twin.sums = [None, None]
                return []
            return [f"{number} {op}: nothing raised"]
        got = do(*args)
        problems = []
        if op == "clip" and got.item() != pytest.approx(wanted, rel=1e-5, abs=1e-12):
            problems.append(f"{number} {op}{args}: {got.item()} instead of {wanted}")
        for param, want in zip(self.params, self.twin.params, strict=True):
            if not torch.allclose(param.detach(), want, rtol=1e-5, atol=1e-6):
                problems.append(f"{number} {op}: {param.tolist()} instead of {want.tolist()}")
        if self.optimizer.window_ends != (self.twin.num_pending == 0):
            problems.append(f"{number} {op}: the window is elsewhere")
        return problems


def random_program(seed, world_size, shard):
    rng = random.Random(seed)
    program = []
    for _ in range(40):
        kind = rng.random()
        if kind < 0.45:
            values = [tuple(rng.choice([None, -4.0, 2.0, 8.0]) for _ in range(2)) for _ in range(world_size)]
            if shard == "gradients":  # see `Ranks.backward`
                values = [(a or 0.0, b) for a, b in values]
            program.append(("backward", values))
        elif kind < 0.75:
            program.append(("step",))
        elif kind < 0.9:
            program.append(("clip", rng.choice([0.25, 2.0, float("inf")]), rng.choice([1.0, 2.0, float("inf")])))
        else:
            program.append((rng.choice(["flush", "zero_grad"]),))
    return program


def play(rank, world_size, shard, seeds):
    problems, raised = [], []
    for seed in seeds:
        found, raises = play_one(rank, world_size, shard, seed)
        problems += [f"seed {seed}, {text}" for text in found]
        raised += [(seed, number) for number in raises]
        settle()
    return problems[:8], raised


def play_one(rank, world_size, shard, seed):
    ranks = Ranks(rank, world_size, shard, k=2 + seed % 2)
    program = random_program(seed, world_size, shard)
    program += [("step",)] * 3  # what is under way at the end meets everybody
    problems = [text for number, op in enumerate(program) for text in ranks.play(number, *op)]
    return problems, ranks.raised


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_order_of_backward_step_clip_flush_and_clear_is_right_or_raises_on_all_ranks(shard, world_size):
    # A third of the programs with each shard, all with one; in a deep run all with each.
    seeds = [seed for seed in range(30) if shard in in_turn(SHARDS, seed // 2 + world_size)]  # k goes by seed % 2
    results = run(play, world_size, world_size, shard, seeds, reuses=True)
    assert [problems for problems, _ in results] == [[]] * world_size
    assert all(raised == results[0][1] for _, raised in results)
    assert results[0][1]


def clip_where_one_rank_had_no_gradient(rank, shard):
    """The last micro-batch reaches nothing on rank 1: both ranks must divide and clip alike."""
    ranks = Ranks(rank, 2, shard, k=2)
    problems = ranks.play(0, "backward", [(4.0, 4.0), (4.0, 4.0)]) + ranks.play(1, "step")
    problems += ranks.play(2, "backward", [(8.0, 2.0), (0.0 if shard == "gradients" else None, None)])
    problems += ranks.play(3, "clip", 1.0) + ranks.play(4, "step")
    return problems, torch.cat([p.detach() for p in ranks.params]).norm().item()


@pytest.mark.parametrize("shard", SHARDS)
def test_a_clip_is_the_same_on_a_rank_whose_last_micro_batch_had_no_gradient(shard):
    for problems, norm in run(clip_where_one_rank_had_no_gradient, 2, shard, reuses=True):
        assert problems == []
        assert norm == pytest.approx(1.0, rel=1e-5)


def flush_unevenly(rank, shard, does_step):
    """Rank 1 has one micro-batch less when it flushes, or when the others step; then a plain window."""
    ranks = Ranks(rank, 2, shard, k=3)
    optimizer, (a, _) = ranks.optimizer, ranks.params
    texts = []
    num_micro_batches = 3 if does_step else 2
    for i in range(num_micro_batches):
        if shard == "gradients" or rank == 0 or i > 0:
            (a * 6.0).sum().backward()
        if rank == 0 or i > 0:
            try:
                optimizer.step()
            except RuntimeError as error:
                texts.append(str(error))
    if rank == 1 or not does_step:
        try:
            optimizer.flush()
        except RuntimeError as error:
            texts.append(str(error))
    moved = a.any().item()
    optimizer.zero_grad()
    is_cleared = a.grad is None
    for _ in range(3):
        (a * 6.0).sum().backward()
        optimizer.step()
    return texts, moved, is_cleared, a.tolist()


@pytest.mark.parametrize("does_step", [False, True], ids=["flush and flush", "step and flush"])
@pytest.mark.parametrize("shard", SHARDS)
def test_ranks_that_end_a_window_with_different_numbers_of_micro_batches_all_raise(shard, does_step):
    for texts, moved, is_cleared, after in run(flush_unevenly, 2, shard, does_step, reuses=True):
        assert len(texts) == 1
        assert "different micro-batches of a window" in texts[0]
        assert not moved
        assert is_cleared
        assert after == [-6.0] * 3


def clear_on_one_rank(rank, shard):
    """A gradient of a pending window goes away on rank 1 alone: all raise, and all begin a window anew."""
    ranks = Ranks(rank, 2, shard, k=2)
    optimizer, (a, _) = ranks.optimizer, ranks.params
    (a * 6.0).sum().backward()
    optimizer.step()
    (a * 6.0).sum().backward()
    if rank == 1:
        a.grad = None
    texts = []
    try:
        optimizer.step()
    except RuntimeError as error:
        texts.append(str(error))
    ends = optimizer.window_ends
    optimizer.zero_grad()
    for _ in range(2):
        (a * 6.0).sum().backward()
        optimizer.step()
    return texts, ends, a.tolist(), optimizer.window_ends


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_a_window_that_one_rank_loses_is_lost_on_all(shard):
    for texts, ends, after, ends_again in run(clear_on_one_rank, 2, shard, reuses=True):
        assert len(texts) == 1
        assert "was cleared or replaced" in texts[0]
        assert ends
        assert after == [-6.0] * 3
        assert ends_again


def clip_with_a_bad_limit(rank, shard, bad):
    ranks = Ranks(rank, 2, shard, k=1)
    optimizer, (a, _) = ranks.optimizer, ranks.params
    (a * 6.0).sum().backward()
    try:
        optimizer.clip_grad_norm_(bad if rank == 1 else 1.0)
        text = "nothing raised"
    except (ValueError, TypeError, RuntimeError) as error:
        text = str(error)
    optimizer.step()
    return text, a.tolist()


@pytest.mark.parametrize("bad", [-1.0, "1"])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_limit_that_one_rank_got_wrong_is_refused_by_all_before_anything_changes(shard, bad):
    for text, after in run(clip_with_a_bad_limit, 2, shard, bad, reuses=True):
        assert "clip_grad_norm_: max_norm=" in text
        assert after == [-6.0] * 3
