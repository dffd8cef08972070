"""Votes without ranks: over all histories of sending, clearing and giving back, they tell what happened and no more."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fusedopt
from fusedopt.buffers.main_grad import set_grad
from fusedopt.reduction.votes import Ballot, Meeting, Problem, Vote, Votes
from fusedopt.sharding.channel import Kind

NUM_PARAMS = 2


def union(votes):
    total = bytearray(len(votes[0]))
    for vote in votes:
        assert len(vote) == len(total)
        for i, byte in enumerate(vote):
            total[i] |= byte
    return bytes(total)


class History:
    """What happened to one parameter's gradient on one rank, in words; the oracle."""

    def __init__(self):
        self.has_grad = False
        self.sent = None  # "kept" or "cleared", since it was sent in this round
        self.given = None  # the same, since ranks met or it came back
        self.told = None  # what `given` was when it was sent again

    def clear(self):
        self.has_grad = False
        self.sent = self.sent and "cleared"
        if self.told is None:
            self.given = self.given and "cleared"

    def send(self):
        if self.given is not None:
            self.told = self.given
        self.sent = "kept"

    def come_back(self):
        if self.told != "cleared":
            self.told, self.given = None, self.sent

    def meet(self, has_grad):
        self.sent = self.told = None
        self.has_grad, self.given = has_grad, "kept" if has_grad else None

    @property
    def given_vote(self):
        return self.told or self.given


class Rank:
    """A wrapper, its ballot, and the history of each of its parameters."""

    def __init__(self):
        self.params = [nn.Parameter(torch.zeros(3)) for _ in range(NUM_PARAMS)]
        self.wrapper = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(self.params, lr=0.1))
        self.entries = self.wrapper._buffers.entries
        self.start_anew()

    def start_anew(self):
        self.wrapper.zero_grad()
        self.ballot = Ballot(self.wrapper._buffers)
        self.histories = [History() for _ in self.params]

    def act(self, name, index):
        entry, history = self.entries[index], self.histories[index]
        if name == "backward":
            self.params[index].sum().backward()
            history.has_grad = True
        elif name == "clear":
            self.params[index].grad = None
            history.clear()
        elif name == "clear all":
            self.wrapper.zero_grad()
            self.ballot.clear()
            for each in self.histories:
                each.clear()
        elif name == "send" and history.has_grad and history.sent is None:
            self.ballot.send([entry])
            history.send()
        elif name == "anew":  # cleared, and a new one sent that comes back before ranks meet
            for each in ("clear", "backward", "send", "come back"):
                self.act(each, index)
        elif name == "come back" and history.sent == "kept" and self.ballot.all_kept([entry]):
            self.ballot.give([entry])
            history.come_back()

    def vote(self):
        return self.ballot.vote(Meeting(Kind.STEP), has_launched=False, waiting=()).encode()


RANKS = [Rank() for _ in range(3)]  # an example needs a ballot and a clear, not a wrapper, of its own

names = st.sampled_from(["backward", "clear", "clear all", "send", "come back", "anew"])


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_ranks_that_cleared_alike_go_on_and_those_that_did_not_name_the_parameter(data):
    ranks = RANKS[: data.draw(st.sampled_from([2, 3]), label="ranks")]
    for rank in ranks:
        rank.start_anew()
    for _ in range(data.draw(st.integers(1, 4), label="meetings")):
        steps = st.tuples(st.integers(0, len(ranks) - 1), names, st.integers(0, NUM_PARAMS - 1))
        for number, name, index in data.draw(st.lists(steps, max_size=12)):
            ranks[number].act(name, index)
        told = union([rank.vote() for rank in ranks])
        of_each = [[rank.histories[index] for rank in ranks] for index in range(NUM_PARAMS)]
        contradicted = [
            any({"kept", "cleared"} <= {getattr(h, field) for h in histories} for field in ("sent", "given_vote"))
            for histories in of_each
        ]
        has_grad = [any(h.has_grad or h.sent == "kept" for h in histories) for histories in of_each]
        for rank in ranks:
            votes = rank.ballot.read(told)
            mismatch = votes.mismatch()
            assert (mismatch is not None) == any(contradicted)
            for index, entry in enumerate(rank.entries):
                assert votes.has_grad(entry) == has_grad[index]
                assert votes.was_dropped(entry) == any(h.sent == "cleared" for h in of_each[index])
                assert mismatch is None or (entry.slot.name in mismatch) == contradicted[index]
        if any(contradicted):
            return
        for rank in ranks:
            for index, (entry, history) in enumerate(zip(rank.entries, rank.histories, strict=True)):
                if has_grad[index] and entry.param.grad is None:
                    set_grad(entry.param, entry.slot.main_grad)
                if not has_grad[index]:
                    assert entry.param.grad is None
                history.meet(has_grad[index])
            rank.ballot.give_all([e for e, has in zip(rank.entries, has_grad, strict=True) if has])


numbers = st.tuples(*[st.integers(0, 2**32 - 1)] * 4)


@given(
    kinds=st.lists(st.sampled_from(list(Kind)), min_size=1, max_size=4),
    told=st.data(),
)
def test_what_is_encoded_is_decoded_and_numbers_agree_exactly_where_they_are_equal(kinds, told):
    entries = RANKS[0].entries
    few = told.draw(st.lists(numbers, min_size=1, max_size=2))
    bits = st.binary(min_size=NUM_PARAMS, max_size=NUM_PARAMS)
    votes = [
        Vote(
            kind,
            told.draw(st.sampled_from(list(Problem))),
            told.draw(st.booleans()),
            told.draw(st.booleans()),
            told.draw(st.sampled_from(few)),
            told.draw(bits),
            told.draw(st.binary(min_size=1, max_size=1)),
        )
        for kind in kinds
    ]
    found = Votes.decode(union([vote.encode() for vote in votes]), entries)
    assert all(found.all_are(kind) == (set(kinds) == {kind}) for kind in Kind)
    assert found.problem == union_of(vote.problem for vote in votes)
    assert found.has_launched == any(vote.has_launched for vote in votes)
    assert found.note == any(vote.note for vote in votes)
    params, buckets, count, listing = (len(set(each)) == 1 for each in zip(*[v.numbers for v in votes], strict=True))
    assert (found.agrees_on_params, found.agrees_on_count, found.agrees_on_listing) == (
        params and buckets,
        count,
        listing,
    )
    assert found.params == union([vote.params for vote in votes])
    assert found.buckets == union([vote.buckets for vote in votes])


def union_of(problems):
    total = Problem.NONE
    for problem in problems:
        total |= problem
    return total


@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_vote_has_one_byte_for_each_parameter(number):
    params = [nn.Parameter(torch.zeros(3)) for _ in range(number + 1)]
    wrapper = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.1))
    vote = Ballot(wrapper._buffers).vote(Meeting(Kind.STEP), has_launched=False, waiting=())
    assert (len(vote.params), len(vote.buckets)) == (number + 1, 1)
