"""What ranks say to each other, and when a backward ends, without any ranks."""

import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedopt
from fusedopt.reduction.backward_watch import BackwardWatch
from fusedopt.reduction.votes import Ballot, Meeting, Problem
from fusedopt.sharding import channel
from fusedopt.sharding.channel import COPY, NUMBERED, Kind

# -- who came for what


def test_numbers_that_differ_clash_in_the_union_of_their_bits_and_equal_ones_do_not():
    rng = random.Random(0)
    for _ in range(500):
        several = [rng.randbytes(4) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.5:  # some differ in one bit
            several = [several[0]] * 3 + [bytes([several[0][0] ^ 1 << rng.randrange(8), *several[0][1:]])]
        said = union(*(channel.twice(int.from_bytes(each, "little")) for each in several))
        assert channel.clashes(said) == (len(set(several)) > 1)


def union(*messages):
    assert len({len(message) for message in messages}) == 1
    return bytes(bits[0] if len(bits) == 1 else _or(bits) for bits in zip(*messages, strict=True))


def _or(bits):
    total = 0
    for each in bits:
        total |= each
    return total


A, B = (NUMBERED, 0), (NUMBERED, 1)
BOTH = {A: False, B: False}


def presence(errand, stays_for, *addresses, live=BOTH):
    return channel._Presence(errand, stays_for, addresses, live, None, b"")


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (presence("step", A, A), presence("step", B, B), "different places"),
        (presence("step", A, A), presence("load", "load_state_dict()"), "different places"),
        (presence("backward", None, A, B), presence("backward", None, B), None),
        (presence("backward", None, A), presence("backward", None, B), None),
        (presence("step", A, A), presence("backward", None, B), None),
        (presence("backward", None, A), presence("load", "load_state_dict()"), None),
        (
            presence("step", A, A),
            presence("step", B, B, live={B: False}),
            "dropped or unwrapped on rank 7",
        ),
        (
            presence("backward", None, A),
            presence("step", B, B, live={A: True, B: False}),
            "on rank 7 a backward",
        ),
        (presence("step", A, A, live={A: True, B: False}), presence("backward", None, B), None),  # its own
        (presence("backward", None, (COPY, 0)), presence("backward", None, B), "copy of an optimizer is used"),
        (presence("backward", None, (COPY, 0), B), presence("backward", None, (COPY, 0)), None),
    ],
)
def test_ranks_that_came_for_different_things_are_served_or_refused(first, second, says):
    found = channel._refusal({3: first, 7: second})
    assert found is None if says is None else says in found


# -- what is said about one wrapper


class Rank:
    """One rank's side: a model of three parameters, wrapped, whose first has a gradient."""

    def __init__(self, num_params=3):
        self.params = [nn.Parameter(torch.zeros(5)) for _ in range(num_params)]
        self.wrapper = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(self.params, lr=0.1))
        self.entries = self.wrapper._buffers.entries
        self.ballot = Ballot(self.wrapper._buffers)
        self.params[0].sum().backward()

    def say(self, kind=Kind.STEP, has_launched=False, **more):
        return self.ballot.vote(Meeting(kind, **more), has_launched=has_launched, waiting=()).encode()


def test_a_rank_reads_what_others_have():
    one, two = Rank(), Rank()
    two.params[1].sum().backward()
    said = one.ballot.read(union(one.say(), two.say(Kind.BACKWARD, note=True)))
    assert [said.has_grad(entry) for entry in one.entries] == [True, True, False]
    assert not said.all_are(Kind.STEP)
    assert said.note
    assert not said.has_launched
    assert said.problem is Problem.NONE
    assert said.mismatch() is None
    assert one.ballot.read(union(one.say(), one.say())).all_are(Kind.STEP)


def test_a_gradient_that_was_sent_and_cleared_on_one_rank_only_is_named():
    one, two = Rank(), Rank()
    for rank in (one, two):
        rank.ballot.send(rank.entries[:1])
    assert one.ballot.read(union(one.say(), two.say())).mismatch() is None
    two.params[0].grad = None
    said = one.ballot.read(union(one.say(), two.say()))
    assert "param_groups[0]['params'][0] was cleared or replaced on some ranks only" in said.mismatch()
    one.params[0].grad = None
    said = one.ballot.read(union(one.say(), two.say()))
    assert said.mismatch() is None
    assert said.was_dropped(one.entries[0])
    assert not said.has_grad(one.entries[0])


def test_clips_beside_steps_other_counts_and_lost_windows_are_seen():
    one, two = Rank(), Rank()
    read = one.ballot.read
    assert "where others call optimizer.step()" in read(union(one.say(Kind.CLIP), two.say())).mismatch()
    assert "different micro-batches" in read(union(one.say(count=1), two.say(count=2))).mismatch()
    assert read(union(one.say(count=1), two.say(Kind.BACKWARD, count=0))).mismatch() is None
    mended, lost = Problem.CAN_BE_MENDED, Problem.LOSES_WINDOW
    assert not read(union(one.say(weight=mended), two.say())).problem & lost
    assert read(union(one.say(weight=mended), two.say(weight=lost))).problem & lost


def test_ranks_with_other_parameters_are_told_apart_though_only_a_part_was_exchanged():
    one, other = Rank(3), Rank(4)
    said, longer = one.say(), other.say()
    said = one.ballot.read(union(said, longer[: len(said)]))
    assert "different numbers of trainable parameters" in said.mismatch()


def test_about_4000_parameters_are_told_of_in_one_block():
    assert len(Rank(3990).say()) + 30 < channel.BLOCK_NBYTES


# -- the end of a backward


class Watched:
    def __init__(self, name, log, param):
        self.name, self.log = name, log
        self.watch = BackwardWatch(self, log.append)
        param.register_post_accumulate_grad_hook(lambda _: self.watch.arrive(torch._C._current_graph_task_id()))

    def backward_began(self):
        self.log.append(f"{self.name} began")

    def backward_ended(self):
        self.log.append(f"{self.name} ended")
        return True


def test_wrappers_whose_gradients_arrive_in_one_backward_end_it_together():
    log = []
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    first, second, _ = watched = [Watched(name, log, p) for name, p in zip("abc", (a, b, c), strict=True)]
    for _ in range(3):
        (a.sum() + b.sum()).backward()
        assert sorted(log[:2]) == ["a began", "b began"]
        assert sorted(log[2:4]) == ["a ended", "b ended"]
        assert sorted(w.name for w in log[4]) == ["a", "b"]
        assert len(log) == 5  # all at once, and nothing of the third
        log.clear()
    c.sum().backward()
    assert log == ["c began", "c ended", [watched[2]]]
    assert not any(w.watch.is_running or w.watch.has_failed for w in (first, second))


@pytest.mark.parametrize("is_nested", [(True, False), (False, True), (True, True)])
def test_they_do_where_some_arrive_inside_a_reentrant_checkpoint(is_nested):
    log = []
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    watched = [Watched(name, log, p) for name, p in zip("ab", (a, b), strict=True)]
    for _ in range(2):
        x = torch.ones(2, requires_grad=True)
        for param, nested in zip((a, b), is_nested, strict=True):
            x = checkpoint(torch.mul, x, param, use_reentrant=True) if nested else x * param
        x.sum().backward()
        assert sorted(log[-3:-1]) == ["a ended", "b ended"]
        assert sorted(w.name for w in log[-1]) == ["a", "b"]
        assert [item for item in log[:-3] if not item.endswith("began")] == []
        log.clear()
    assert not any(w.watch.is_running or w.watch.has_failed for w in watched)


def test_a_backward_that_fails_ends_for_none_and_the_next_is_a_new_one():
    log = []
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    watched = [Watched(name, log, p) for name, p in zip("ab", (a, b), strict=True)]
    x = b * 1.0
    x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (x.sum() + a.sum()).backward()
    assert log == ["a began"]
    assert watched[0].watch.has_failed
    assert not watched[0].watch.is_running
    log.clear()
    (a.sum() + b.sum()).backward()
    assert sorted(log[2:4]) == ["a ended", "b ended"]
    assert len(log) == 5


def test_a_wrapper_that_is_dropped_while_a_backward_runs_is_not_told_and_not_kept():
    log = []
    a, b = (nn.Parameter(torch.ones(2)) for _ in range(2))
    watched = [Watched("a", log, a)]
    watch = watched[0].watch
    other = Watched("b", log, b)
    a._post_accumulate_grad_hooks.clear()
    a.register_post_accumulate_grad_hook(lambda _: watch.arrive(torch._C._current_graph_task_id()))
    b.register_post_accumulate_grad_hook(lambda _: watched.clear())
    (b.sum() + a.sum()).backward()
    assert log == ["a began", "b began", "b ended", [other]]
