"""What ranks tell each other about one wrapper when they meet: a `Vote` each, of which all read the union of bits.

    arrival -> reduction: [votes] -> clip

A gradient that left a rank (*sent* in this round) or came back to it (*given* by the last meeting) may be cleared
there, which runs no code of ours. Each rank votes on what it sees now: the gradient was kept, or cleared. Ranks that
see different things have cleared on some ranks only.

Knows nothing of collectives.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusedopt.buffers.bucket import Bucket, Entry, Place
from fusedopt.buffers.flat import Buffers
from fusedopt.sharding.channel import NUMBER_NBYTES, Kind, clashes, twice


class Problem(enum.IntFlag):
    """Whether a rank cannot go on."""

    NONE = 0
    CAN_BE_MENDED = 1
    LOSES_WINDOW = 2


class ParamBits:
    """What a rank tells of one parameter, in a byte: plain integers, since there are thousands in every step."""

    HAS_GRAD = 1
    SENT_AND_KEPT = 2
    SENT_AND_CLEARED = 4
    GIVEN_AND_KEPT = 8
    GIVEN_AND_CLEARED = 16
    IS_SHARE = 32
    LACKS_STATE = 64


class BucketBits:
    """What a rank tells of one bucket, in a byte."""

    HAS_UNSENT = 1
    WAS_NOT_LAUNCHED = 2  # and has a gradient
    IS_BACK = 4


@dataclass
class Meeting:
    """One meeting of all ranks in a clip or step.

    Args:
        kind: where this rank is; in a clip or step it goes on until all ranks are there.
        count: of micro-batches; ranks that clip or step have to agree on it.
        problem: why this rank cannot go on; then the others raise, the caller does, and no gradient is changed.
        weight: what the problem costs.
        note: whether this rank has something to tell; after the meeting: whether any rank had.
    """

    kind: Kind
    count: int = 0
    problem: str | None = None
    weight: Problem = Problem.NONE
    note: bool = False


_NUMBERS_AT = 3
_PARAMS_AT = _NUMBERS_AT + 4 * 2 * NUMBER_NBYTES


@dataclass(frozen=True)
class Vote:
    """What one rank tells.

    Args:
        kind: where it is.
        problem: whether it cannot go on.
        has_launched: whether it launched a bucket in this round.
        note: see `Meeting`.
        numbers: how many parameters and buckets it has, the count of micro-batches, and which parameter stands where
            in the groups. Ranks have to agree on each.
        params: `ParamBits` of each parameter.
        buckets: `BucketBits` of each bucket.
    """

    kind: Kind
    problem: Problem
    has_launched: bool
    note: bool
    numbers: tuple[int, int, int, int]
    params: bytes
    buckets: bytes

    def encode(self) -> bytes:
        """Return it as bits of which ranks can form the union; each number is followed by its inverse."""
        numbers = b"".join(map(twice, self.numbers))
        return (
            bytes([1 << self.kind, self.problem, self.has_launched | self.note << 1])
            + numbers
            + (self.params + self.buckets)
        )


@dataclass(frozen=True)
class Votes:
    """What all ranks together tell; fields as of `Vote`, each true where it is on some rank.

    Args:
        kinds: bits of where ranks are.
        agrees_on_params: whether all have as many parameters and buckets; else the bits of these mean nothing.
        agrees_on_count: of micro-batches.
        agrees_on_listing: of the groups.
        entries: of this rank, for names.
    """

    kinds: int
    problem: Problem
    has_launched: bool
    note: bool
    agrees_on_params: bool
    agrees_on_count: bool
    agrees_on_listing: bool
    params: bytes
    buckets: bytes
    entries: Sequence[Entry]

    @staticmethod
    def decode(union: bytes, entries: Sequence[Entry]) -> Votes:
        """Return what is in the ``union`` of encoded votes, for a rank that has these ``entries``."""
        starts = range(_NUMBERS_AT, _PARAMS_AT, 2 * NUMBER_NBYTES)
        params, buckets, count, listing = [not clashes(union[at : at + 2 * NUMBER_NBYTES]) for at in starts]
        buckets_at = _PARAMS_AT + len(entries)
        return Votes(
            kinds=union[0],
            problem=Problem(union[1]),
            has_launched=bool(union[2] & 1),
            note=bool(union[2] & 2),
            agrees_on_params=params and buckets,
            agrees_on_count=count,
            agrees_on_listing=listing,
            params=union[_PARAMS_AT:buckets_at],
            buckets=union[buckets_at:],
            entries=entries,
        )

    def all_are(self, kind: Kind) -> bool:
        """Return whether no rank is anywhere else."""
        return self.kinds == 1 << kind

    def has_grad(self, entry: Entry) -> bool:
        """Return whether ``entry`` has a gradient on some rank, and was not cleared on all since it was sent."""
        return bool(self.params[entry.number] & ParamBits.HAS_GRAD)

    def is_share(self, entry: Entry) -> bool:
        """Return whether the gradient of ``entry`` is a share on some rank, see `Slot.is_share`: then on all."""
        return bool(self.params[entry.number] & ParamBits.IS_SHARE)

    def makes_state(self) -> bool:
        """Return whether a step makes inner state, on some rank."""
        return any(bits & ParamBits.HAS_GRAD and bits & ParamBits.LACKS_STATE for bits in self.params)

    def was_dropped(self, entry: Entry) -> bool:
        """Return whether what was sent of ``entry`` was cleared since."""
        return bool(self.params[entry.number] & ParamBits.SENT_AND_CLEARED)

    def has_unsent(self, bucket: Bucket) -> bool:
        """Return whether some rank holds what it did not launch, and other ranks miss.

        Without a shard a mean of before is on every rank: where some sent it with the round, it has to move on all.
        """
        moves = BucketBits.HAS_UNSENT
        if self.has_launched and bucket.model is None:
            moves |= BucketBits.WAS_NOT_LAUNCHED
        return bool(self.buckets[bucket.index] & moves)

    def is_back(self, bucket: Bucket) -> bool:
        """Return whether some rank added the mean of what was launched already: then all do, and no sum."""
        return bool(self.buckets[bucket.index] & BucketBits.IS_BACK)

    def mismatch(self) -> str | None:
        """Return why the gradients cannot be reduced, or None."""
        if not self.agrees_on_params:
            return "ranks have different numbers of trainable parameters: freeze and unfreeze on all of them alike"
        if not self.agrees_on_listing:
            return "param_groups were edited in different ways: reorder, remove and move on all ranks alike"
        if self.kinds & 1 << Kind.CLIP and self.kinds & 1 << Kind.STEP:
            return "some ranks call optimizer.clip_grad_norm_() where others call optimizer.step()"
        if not self.agrees_on_count and (self.all_are(Kind.CLIP) or self.all_are(Kind.STEP)):
            return (
                "ranks are at different micro-batches of a window, by a flush() with more pending on some, or by a "
                "step() left out: all have to call step() equally often before they clip, step or flush together"
            )
        names = [entry.slot.name for entry in self.entries if _contradicts(self.params[entry.number])]
        if names:
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            return f"the gradient of parameter {shown} was cleared or replaced on some ranks only"
        return None


_CONTRADICTIONS = (
    ParamBits.SENT_AND_KEPT | ParamBits.SENT_AND_CLEARED,
    ParamBits.GIVEN_AND_KEPT | ParamBits.GIVEN_AND_CLEARED,
)
"""A gradient that was kept on some ranks and cleared on others."""


def _contradicts(bits: int) -> bool:
    return any(bits & both == both for both in _CONTRADICTIONS)


class Ballot:
    """Remembers which gradients of one wrapper were sent and given, and votes on what became of them.

    Args:
        buffers: whose parameters and buckets the votes are about.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._is_lending = buffers.sharding.is_lending
        self._num_clears = 0
        self._sent: dict[Entry, int] = {}  # its mark when it was sent; numbers change when others are dropped
        self._given: dict[Entry, int] = {}
        self._votes_on_given: dict[Entry, bool] = {}  # of those sent again since: was it kept until then

    def _mark(self, entry: Entry) -> int:
        """Return what changes when the gradient of ``entry`` is cleared; lent ones are cleared all at once."""
        return self._num_clears if self._is_lending else entry.slot.num_first_touches

    def _is_kept(self, entry: Entry, mark: int) -> bool:
        is_there = self._is_lending or (entry.param.grad is not None and entry.param.grad is entry.slot.main_grad)
        return is_there and self._mark(entry) == mark

    def clear(self) -> None:
        """Note that all gradients were cleared through the optimizer."""
        self._num_clears += 1

    def send(self, entries: Sequence[Entry]) -> None:
        """Note that the gradients of ``entries`` leave this rank."""
        for entry in entries:
            if entry in self._given:
                self._votes_on_given[entry] = self._is_kept(entry, self._given[entry])
            self._sent[entry] = self._mark(entry)

    def all_kept(self, entries: Sequence[Entry]) -> bool:
        """Return whether none of ``entries``, which were sent, was cleared since."""
        return all(self._is_kept(entry, self._sent[entry]) for entry in entries)

    def give(self, entries: Sequence[Entry]) -> None:
        """Note that the gradients of ``entries``, which were sent and kept, came back before ranks met."""
        for entry in entries:
            if self._votes_on_given.get(entry, True):
                self._votes_on_given.pop(entry, None)
                self._given[entry] = self._sent[entry]

    def give_all(self, entries: Sequence[Entry]) -> None:
        """Note that ranks met, and ``entries`` have a gradient now."""
        self._sent.clear()
        self._votes_on_given.clear()
        self._given = {entry: self._mark(entry) for entry in entries}

    def vote(
        self, meeting: Meeting, *, has_launched: bool, waiting: Collection[int], lacking: Sequence[Entry] = ()
    ) -> Vote:
        """Return what this rank tells.

        Args:
            meeting: where it is, and what it brings.
            has_launched: whether it launched a bucket in this round.
            waiting: indices of those that it did not.
            lacking: entries of which it has no inner state yet.
        """
        buffers = self._buffers
        params = bytearray(self._bits(entry) for entry in buffers.entries)
        for entry in lacking:
            params[entry.number] |= ParamBits.LACKS_STATE
        return Vote(
            kind=meeting.kind,
            problem=meeting.weight,
            has_launched=has_launched,
            note=meeting.note,
            numbers=(len(buffers.entries), len(buffers.buckets), meeting.count, buffers.listing),
            params=bytes(params),
            buckets=bytes(_bucket_bits(bucket, is_waiting=bucket.index in waiting) for bucket in buffers.buckets),
        )

    def _bits(self, entry: Entry) -> int:
        bits = (ParamBits.HAS_GRAD if entry.has_grad else 0) | (ParamBits.IS_SHARE if entry.slot.is_share else 0)
        if entry in self._sent:
            is_kept = self._is_kept(entry, self._sent[entry])
            bits |= ParamBits.SENT_AND_KEPT | ParamBits.HAS_GRAD if is_kept else ParamBits.SENT_AND_CLEARED
        if entry in self._votes_on_given:
            bits |= ParamBits.GIVEN_AND_KEPT if self._votes_on_given[entry] else ParamBits.GIVEN_AND_CLEARED
        elif entry in self._given:
            is_kept = self._is_kept(entry, self._given[entry])
            bits |= ParamBits.GIVEN_AND_KEPT if is_kept else ParamBits.GIVEN_AND_CLEARED
        return bits

    def read(self, union: bytes) -> Votes:
        """Return what all ranks together tell."""
        return Votes.decode(union, self._buffers.entries)


def _bucket_bits(bucket: Bucket, *, is_waiting: bool) -> int:
    bits = BucketBits.IS_BACK if bucket.place is Place.BACK else 0
    if (bucket.has_unsent or is_waiting) and any(entry.param.grad is not None for entry in bucket.entries):
        bits |= BucketBits.HAS_UNSENT if bucket.has_unsent else 0
        bits |= BucketBits.WAS_NOT_LAUNCHED if is_waiting else 0
    return bits
