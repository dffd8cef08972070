"""A round of buckets without ranks: whatever each rank launched, and whenever, each gradient counts once on all."""

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fusedopt.buffers.bucket import Holds, Place, Sharding
from fusedopt.buffers.flat import Buffers
from fusedopt.buffers.main_grad import AddingTo, set_grad
from fusedopt.reduction.transport import Round, Transport

NUMELS = (5, 1030, 3, 700)


class Wires:
    """What ranks in one process have started, matched by how many each started before, as process groups do."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.started = defaultdict(dict)  # by number: by rank

    def start(self, rank, content):
        number = sum(rank in started for started in self.started.values())
        self.started[number][rank] = content
        sizes = {content.numel() for content in self.started[number].values()}
        assert len(sizes) == 1, f"collective {number} was started with other buckets on some ranks"
        return number

    def total(self, number):
        assert len(self.started[number]) == self.world_size, "somebody waits for a rank that does not come"
        return sum(self.started[number][rank] for rank in range(self.world_size))


class Pending:
    """Stands for `comm.Pending`: done once all ranks have started."""

    def __init__(self, wires, number, finish):
        self.wires, self.number, self.finish = wires, number, finish

    def is_done(self):
        return len(self.wires.started[self.number]) == self.wires.world_size

    def wait(self):
        return self.finish(self.wires.total(self.number))


class Comm:
    """One rank's end of `Wires`, with what `DataParallelGroup` promises; what it sends are copies."""

    def __init__(self, wires, rank):
        self.wires, self.rank, self.world_size = wires, rank, wires.world_size

    def start_all_reduce(self, flat):
        number = self.wires.start(self.rank, flat.clone())
        return Pending(self.wires, number, flat.copy_)

    def start_reduce(self, flat, *, is_awaited):
        number = self.wires.start(self.rank, flat.clone())
        return Pending(self.wires, number, lambda total: total.view(self.world_size, -1)[self.rank].clone())


class Rank:
    """The buffers of one rank, three buckets of them, and its round."""

    def __init__(self, wires, rank, shard):
        self.params = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
        sharding = Sharding.of(shard, rank, wires.world_size)
        self.buffers = Buffers("torch", 1024, sharding)
        self.entries = self.buffers.add(0, [(str(i), param) for i, param in enumerate(self.params)])
        self.transport = Transport(Comm(wires, rank), self.buffers)
        self.order = list(range(len(self.buffers.buckets)))[::-1]
        self.begin()

    def begin(self):
        self.round = Round(self.transport, self.buffers.buckets, self.order)

    def arrive(self, index, value):
        with AddingTo(self.params[index]) as (main_grad, has_sum):
            main_grad.add_(value) if has_sum else main_grad.fill_(value)
        bucket = self.entries[index].bucket
        bucket.has_unsent = True
        bucket.note_version()  # as the end of a backward does: it was no edit from outside

    def launch(self):
        if self.round.next is not None:
            self.round.launch(self.round.next)


def meet(ranks):
    """Do what ranks do when they meet, in this order: join, add back, set `.grad`, reduce the rest in place."""
    has_launched = any(rank.round.has_begun for rank in ranks)
    num_buckets = len(ranks[0].buffers.buckets)
    moves = set()
    for index in range(num_buckets):
        is_whole = ranks[0].buffers.buckets[index].model is None
        for rank in ranks:
            bucket = rank.buffers.buckets[index]
            has_grad = any(entry.param.grad is not None for entry in bucket.entries)
            stays = has_launched and is_whole and bucket in rank.round.remaining()
            if has_grad and (bucket.has_unsent or stays):
                moves.add(index)
    is_back = {b.index for rank in ranks for b in rank.buffers.buckets if b.place is Place.BACK}
    has_grad = {
        entry.number for rank in ranks for entry in rank.entries if entry.has_grad or entry.bucket.is_lending
    } | {entry.number for rank in ranks for flying in rank.round.in_flight for entry in flying.sent}
    if has_launched:
        for rank in ranks:
            rank.round.join()
    for rank in ranks:
        added = rank.round.add_back_all(lambda entry: False, lambda b: b.index not in moves or b.index in is_back)
        rank.begin()
        for entry in rank.entries:
            if entry.number in has_grad and not entry.bucket.is_lending and entry.param.grad is None:
                if entry.bucket.index not in added:
                    entry.slot.local_grad.zero_()
                set_grad(entry.param, entry.slot.main_grad)
        for bucket in rank.buffers.buckets:
            rank.transport.undivide(bucket)
    together(ranks, sorted(moves))


def together(ranks, indices):
    """Reduce in place on all ranks: each starts before one waits."""
    for index in indices:
        started = [rank.transport._start_in_place(rank.buffers.buckets[index]) for rank in ranks]
        for rank, flying in zip(ranks, started, strict=True):
            flying.bucket.has_unsent = False
            rank.transport._finish_in_place(flying)


actions = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, len(NUMELS) - 1), st.integers(-8, 8)),
    st.tuples(st.just("launch")),
    st.tuples(st.just("add back")),
)


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_whatever_ranks_launch_and_whenever_each_gradient_counts_once(shard, data):
    world_size = data.draw(st.sampled_from([2, 4]), label="ranks")
    wires = Wires(world_size)
    ranks = [Rank(wires, rank, shard) for rank in range(world_size)]
    totals = [0] * len(NUMELS)
    for _ in range(data.draw(st.integers(1, 3), label="rounds")):
        if shard == "gradients" and data.draw(st.booleans(), label="gradients are kept over a step"):
            for bucket in (bucket for rank in ranks for bucket in rank.buffers.buckets if bucket.holds is Holds.SUM):
                bucket.grad_part.div_(world_size)  # as a step averages them
                bucket.now_holds(Holds.MEAN)
        program = data.draw(st.lists(st.tuples(st.integers(0, world_size - 1), actions), max_size=14))
        for number, (name, *rest) in program:
            rank = ranks[number]
            if name == "arrive":
                rank.arrive(*rest)
                # Without a shard every rank holds the mean of before, and adds to that: a sum counts for all ranks.
                totals[rest[0]] += rest[1]
            elif name == "launch":
                rank.launch()
            else:
                rank.round.add_back_finished(lambda sent: True)
        meet(ranks)
        for rank in ranks:
            assert not rank.round.in_flight
            assert all(bucket.place is Place.HERE for bucket in rank.buffers.buckets)
            for entry, total in zip(rank.entries, totals, strict=True):
                if shard == "none":
                    got, expected = entry.slot.local_grad, total / world_size
                elif entry.grad_part is None:
                    continue
                else:
                    got, expected = entry.grad_part, total
                if entry.param.grad is None and not entry.bucket.is_lending:
                    assert total == 0  # nothing arrived anywhere
                elif entry.bucket.holds is Holds.NOTHING:
                    assert total == 0
                else:
                    assert torch.isfinite(got).all()
                    assert torch.equal(got, torch.full_like(got, expected))


def test_the_states_of_a_bucket_follow_each_other_as_the_note_has_it_and_not_otherwise():
    bucket = Rank(Wires(2), 0, "gradients").buffers.buckets[0]
    bucket.now_at(Place.IN_FLIGHT)
    with pytest.raises(RuntimeError, match=r"bucket 0 went from Place.IN_FLIGHT to Place.IN_FLIGHT"):
        bucket.now_at(Place.IN_FLIGHT)
    bucket.now_at(Place.BACK)
    with pytest.raises(RuntimeError, match=r"Place.BACK to Place.IN_FLIGHT"):
        bucket.now_at(Place.IN_FLIGHT)
    bucket.now_at(Place.HERE)
    with pytest.raises(RuntimeError, match=r"Holds.NOTHING to Holds.MEAN"):
        bucket.now_holds(Holds.MEAN)
    assert (bucket.holds, bucket.place) == (Holds.NOTHING, Place.HERE)


def test_buckets_that_are_added_while_a_round_is_under_way_come_last_in_it():
    rank = Rank(Wires(2), 0, "none")
    assert [bucket.index for bucket in rank.round.remaining()] == rank.order
    rank.launch()
    more = rank.buffers.add(0, [("late", nn.Parameter(torch.zeros(9)))])
    rank.order.append(more[0].bucket.index)
    assert [bucket.index for bucket in rank.round.remaining()] == [*rank.order[1:-1], more[0].bucket.index]
    assert rank.round.launched == rank.order[:1]
