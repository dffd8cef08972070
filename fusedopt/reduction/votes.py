"""What ranks say to each other about one wrapper when they meet: bits, of which all read the union.

    arrival -> reduction: [ballot] -> clip

A gradient that left a rank (*sent* in this round) or came back to it (*given* by the last sync) may be cleared
there, which runs no code of ours. Each rank says what it sees now: the same gradient still hangs, or does not.
Ranks that see different things have cleared on some ranks only.

Knows nothing of collectives.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusedopt.buffers.bucket import Bucket, Entry
from fusedopt.buffers.flat import Buffers
from fusedopt.sharding.channel import Kind

_NUMBER_BYTES = 4  # of each number, followed by its inverse: all agree where the two have no bit in common
_NUMBERS_AT = 3  # bytes
_HEAD_BYTES = _NUMBERS_AT + 4 * 2 * _NUMBER_BYTES


class Problem(enum.IntFlag):
    """Whether a rank cannot go on."""

    NONE = 0
    CAN_BE_MENDED = 1
    LOSES_WINDOW = 2


_HAS_STARTED, _NOTE = (1 << bit for bit in range(2))

_HAS, _SENT_KEPT, _SENT_CLEARED, _GIVEN_KEPT, _GIVEN_CLEARED, _IS_SHARE, _LACKS_STATE = (1 << bit for bit in range(7))
"""One byte per parameter."""

_IS_DIRTY, _STAYS, _IS_SETTLED = (1 << bit for bit in range(3))
"""One byte per bucket. Stays: it was not launched, and has a gradient."""


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


class Ballot:
    """Fills and reads the messages of one wrapper.

    Args:
        buffers: whose parameters and buckets they are about.
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
        hangs = self._is_lending or (entry.param.grad is not None and entry.param.grad is entry.slot.main_grad)
        return hangs and self._mark(entry) == mark

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

    def fill(
        self, meeting: Meeting, *, has_started: bool, waiting: Collection[int], lacking: Sequence[Entry] = ()
    ) -> bytes:
        """Return what this rank says.

        Args:
            meeting: where it is, and what it brings.
            has_started: whether it launched a bucket in this round.
            waiting: indices of those that it did not.
            lacking: entries of which it has no inner state yet.
        """
        flags = (_HAS_STARTED if has_started else 0) | (_NOTE if meeting.note else 0)
        head = [1 << meeting.kind, flags, meeting.weight]
        for number in (len(self._buffers.entries), len(self._buffers.buckets), meeting.count, self._buffers.listing):
            low = number.to_bytes(_NUMBER_BYTES, "little")
            head += [*low, *(255 - byte for byte in low)]
        body = [self._bits(entry) for entry in self._buffers.entries]
        for entry in lacking:
            body[entry.number] |= _LACKS_STATE
        body += [_bucket_bits(bucket, is_waiting=bucket.index in waiting) for bucket in self._buffers.buckets]
        return bytes(head + body)

    def _bits(self, entry: Entry) -> int:
        bits = (_HAS if entry.has_grad else 0) | (_IS_SHARE if entry.slot.is_share else 0)
        if entry in self._sent:
            is_kept = self._is_kept(entry, self._sent[entry])
            bits |= _SENT_KEPT if is_kept else _SENT_CLEARED
            if is_kept:
                bits |= _HAS
        if entry in self._votes_on_given:
            bits |= _GIVEN_KEPT if self._votes_on_given[entry] else _GIVEN_CLEARED
        elif entry in self._given:
            bits |= _GIVEN_KEPT if self._is_kept(entry, self._given[entry]) else _GIVEN_CLEARED
        return bits

    def read(self, said: bytes) -> Says:
        """Return what all ranks together say."""
        ends = range(_NUMBERS_AT, _HEAD_BYTES, 2 * _NUMBER_BYTES)
        params, buckets, count, listing = (_is_one(said[start : start + 2 * _NUMBER_BYTES]) for start in ends)
        num = len(self._buffers.entries)
        has_started, note = bool(said[1] & _HAS_STARTED), bool(said[1] & _NOTE)
        # The mean of before hangs on every rank. Where some sent it with the round, it has to move on all.
        dirty = _IS_DIRTY | (_STAYS if has_started and self._buffers.sharding.shard == "none" else 0)
        return Says(
            said[0],
            has_started,
            note,
            Problem(said[2]),
            params and buckets,
            count,
            listing,
            said[_HEAD_BYTES : _HEAD_BYTES + num],
            said[_HEAD_BYTES + num :],
            dirty,
            self._buffers,
        )


def _is_one(number: bytes) -> bool:
    """Return whether all ranks said the same number."""
    return not any(number[i] & number[i + _NUMBER_BYTES] for i in range(_NUMBER_BYTES))


def _bucket_bits(bucket: Bucket, *, is_waiting: bool) -> int:
    bits = _IS_SETTLED if bucket.is_settled else 0
    if (bucket.is_dirty or is_waiting) and any(entry.param.grad is not None for entry in bucket.entries):
        bits |= (_IS_DIRTY if bucket.is_dirty else 0) | (_STAYS if is_waiting else 0)
    return bits


@dataclass(frozen=True)
class Says:
    """What all ranks together said."""

    kinds: int
    has_started: bool
    note: bool
    problem: Problem
    agrees_on_numbers: bool
    agrees_on_count: bool
    agrees_on_listing: bool
    params: bytes
    buckets: bytes
    dirty: int
    buffers: Buffers

    def all_are(self, kind: Kind) -> bool:
        """Return whether no rank is anywhere else."""
        return self.kinds == 1 << kind

    def has(self, entry: Entry) -> bool:
        """Return whether ``entry`` has a gradient on some rank, and was not cleared on all since it was sent."""
        return bool(self.params[entry.number] & _HAS)

    def is_share(self, entry: Entry) -> bool:
        """Return whether the gradient of ``entry`` is a share on some rank, see `Slot.is_share`: then on all."""
        return bool(self.params[entry.number] & _IS_SHARE)

    def makes_state(self) -> bool:
        """Return whether a step makes inner state, on some rank."""
        return any(bits & _HAS and bits & _LACKS_STATE for bits in self.params)

    def was_dropped(self, entry: Entry) -> bool:
        """Return whether what was sent of ``entry`` was cleared since."""
        return bool(self.params[entry.number] & _SENT_CLEARED)

    def is_dirty(self, bucket: Bucket) -> bool:
        """Return whether some rank holds what was not launched."""
        return bool(self.buckets[bucket.index] & self.dirty)

    def was_settled(self, bucket: Bucket) -> bool:
        """Return whether some rank added the mean of what was launched already: then all do, and no sum."""
        return bool(self.buckets[bucket.index] & _IS_SETTLED)

    def mismatch(self) -> str | None:
        """Return why the gradients cannot be reduced, or None."""
        if not self.agrees_on_numbers:
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
        for contradiction in (_SENT_KEPT | _SENT_CLEARED, _GIVEN_KEPT | _GIVEN_CLEARED):
            names = [e.slot.name for e in self.buffers.entries if contradiction & ~self.params[e.number] == 0]
            if names:
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                return f"the gradient of parameter {shown} was cleared or replaced on some ranks only"
        return None
