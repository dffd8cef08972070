"""What ranks say to each other when they meet: one message, of which all read the maximum.

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

import torch
from torch import Tensor

from fusedopt.buckets import Bucket
from fusedopt.buffers import Buffers, Entry

_BLOCK = 1024
"""Bytes; messages are padded to whole blocks, so that ranks with different parameters can still be told apart."""

_NUMBER_BYTES = 4  # of each number, followed by its complement: all agree where maximum and complement match


class Kind(enum.IntEnum):
    """Where a rank is when it meets the others."""

    BACKWARD = 0
    CLIP = 1
    STEP = 2


class Problem(enum.IntEnum):
    """Whether a rank cannot go on."""

    NONE = 0
    CAN_BE_MENDED = 1
    LOSES_WINDOW = 2


_HAS, _SENT_KEPT, _SENT_CLEARED, _GIVEN_KEPT, _GIVEN_CLEARED, _IS_SHARE = (1 << bit for bit in range(6))
_PER_PARAM = (_HAS, _SENT_KEPT, _SENT_CLEARED, _GIVEN_KEPT, _GIVEN_CLEARED, _IS_SHARE)


class Ballot:
    """Fills and reads the messages of one wrapper.

    Args:
        buffers: whose parameters and buckets they are about.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._is_lending = buffers.sharding.is_lending
        self._num_clears = 0
        self._sent: dict[int, int] = {}  # by entry number: its mark when it was sent
        self._given: dict[int, int] = {}
        self._votes_on_given: dict[int, bool] = {}  # of those sent again since: was it kept until then

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
            if entry.number in self._given:
                self._votes_on_given[entry.number] = self._is_kept(entry, self._given[entry.number])
            self._sent[entry.number] = self._mark(entry)

    def all_kept(self, entries: Sequence[Entry]) -> bool:
        """Return whether none of ``entries``, which were sent, was cleared since."""
        return all(self._is_kept(entry, self._sent[entry.number]) for entry in entries)

    def give(self, entries: Sequence[Entry]) -> None:
        """Note that the gradients of ``entries``, which were sent and kept, came back before ranks met."""
        for entry in entries:
            if self._votes_on_given.get(entry.number, True):
                self._votes_on_given.pop(entry.number, None)
                self._given[entry.number] = self._sent[entry.number]

    def give_all(self, entries: Sequence[Entry]) -> None:
        """Note that ranks met, and ``entries`` have a gradient now."""
        self._sent.clear()
        self._votes_on_given.clear()
        self._given = {entry.number: self._mark(entry) for entry in entries}

    def fill(
        self, kind: Kind, count: int, *, has_started: bool, waiting: Collection[int], problem: Problem, note: bool
    ) -> Tensor:
        """Return what this rank says, uint8 on CPU.

        Args:
            kind: where it is.
            count: of micro-batches; ranks that clip or step have to agree on it.
            has_started: whether it launched a bucket in this round.
            waiting: indices of those that it did not.
            problem: whether it cannot go on.
            note: what a clip or step tells the other ranks, see `reduction.Meeting`.
        """
        buffers = self._buffers
        head = [int(kind is k) for k in Kind] + [int(has_started), int(note), int(problem)]
        for number in (len(buffers.entries), len(buffers.buckets), count):
            low = number.to_bytes(_NUMBER_BYTES, "little")
            head += [*low, *(255 - byte for byte in low)]
        body = bytearray(head)
        bits = [self._bits(entry) for entry in buffers.entries]
        for bit in _PER_PARAM:
            body += bytes(1 if value & bit else 0 for value in bits)
        hangs = [any(entry.param.grad is not None for entry in bucket.entries) for bucket in buffers.buckets]
        body += bytes(h and bucket.is_dirty for h, bucket in zip(hangs, buffers.buckets, strict=True))
        body += bytes(h and bucket.index in waiting for h, bucket in zip(hangs, buffers.buckets, strict=True))
        body += bytes(bucket.is_settled for bucket in buffers.buckets)
        body += bytes(-len(body) % _BLOCK)
        return torch.frombuffer(body, dtype=torch.uint8)

    def _bits(self, entry: Entry) -> int:
        number = entry.number
        bits = (_HAS if entry.has_grad else 0) | (_IS_SHARE if entry.slot.is_share else 0)
        if number in self._sent:
            is_kept = self._is_kept(entry, self._sent[number])
            bits |= _SENT_KEPT if is_kept else _SENT_CLEARED
            if is_kept:
                bits |= _HAS
        if number in self._votes_on_given:
            bits |= _GIVEN_KEPT if self._votes_on_given[number] else _GIVEN_CLEARED
        elif number in self._given:
            bits |= _GIVEN_KEPT if self._is_kept(entry, self._given[number]) else _GIVEN_CLEARED
        return bits

    def read(self, message: Tensor) -> Says:
        """Return what all ranks together say."""
        said = message.numpy().tobytes()
        kinds = [bool(said[k]) for k in Kind]
        has_started, note, problem = bool(said[len(kinds)]), bool(said[len(kinds) + 1]), Problem(said[len(kinds) + 2])
        start = len(kinds) + 3
        agrees = []
        for _ in range(3):
            low, high = said[start : start + _NUMBER_BYTES], said[start + _NUMBER_BYTES : start + 2 * _NUMBER_BYTES]
            agrees.append(all(a + b == 255 for a, b in zip(low, high, strict=True)))
            start += 2 * _NUMBER_BYTES
        num = len(self._buffers.entries)
        rows = [said[start + i * num : start + (i + 1) * num] for i in range(len(_PER_PARAM))]
        start, num = start + len(_PER_PARAM) * num, len(self._buffers.buckets)
        dirty, stays, settled = (said[start + i * num : start + (i + 1) * num] for i in range(3))
        if has_started and self._buffers.sharding.shard == "none":
            # The mean of before hangs on every rank. Some sent it with the round, so it has to move on all.
            dirty = bytes(map(max, dirty, stays))
        return Says(kinds, has_started, note, problem, all(agrees[:2]), agrees[2], rows, dirty, settled, self._buffers)


@dataclass(frozen=True)
class Says:
    """What all ranks together said."""

    kinds: Sequence[bool]
    has_started: bool
    note: bool
    problem: Problem
    agrees_on_numbers: bool
    agrees_on_count: bool
    rows: Sequence[bytes]
    dirty: bytes
    settled: bytes
    buffers: Buffers

    def all_are(self, kind: Kind) -> bool:
        """Return whether no rank is anywhere else."""
        return not any(self.kinds[k] for k in Kind if k is not kind)

    def has(self, entry: Entry) -> bool:
        """Return whether ``entry`` has a gradient on some rank, and was not cleared on all since it was sent."""
        return bool(self.rows[0][entry.number])

    def is_share(self, entry: Entry) -> bool:
        """Return whether the gradient of ``entry`` is a share on some rank, see `Slot.is_share`: then on all."""
        return bool(self.rows[5][entry.number])

    def was_dropped(self, entry: Entry) -> bool:
        """Return whether what was sent of ``entry`` was cleared since."""
        return bool(self.rows[2][entry.number])

    def is_dirty(self, bucket: Bucket) -> bool:
        """Return whether some rank holds what was not launched."""
        return bool(self.dirty[bucket.index])

    def was_settled(self, bucket: Bucket) -> bool:
        """Return whether some rank added the mean of what was launched already: then all do, and no sum."""
        return bool(self.settled[bucket.index])

    def mismatch(self) -> str | None:
        """Return why the gradients cannot be reduced, or None."""
        if not self.agrees_on_numbers:
            return "ranks have different numbers of trainable parameters: freeze and unfreeze on all of them alike"
        if self.kinds[Kind.CLIP] and self.kinds[Kind.STEP]:
            return "some ranks call optimizer.clip_grad_norm_() where others call optimizer.step()"
        if not self.agrees_on_count and (self.all_are(Kind.CLIP) or self.all_are(Kind.STEP)):
            return (
                "ranks are at different micro-batches of a window, by a flush() with more pending on some, or by a "
                "step() left out: all have to call step() equally often before they clip, step or flush together"
            )
        for kept, cleared in ((self.rows[1], self.rows[2]), (self.rows[3], self.rows[4])):
            names = [e.slot.name for e in self.buffers.entries if kept[e.number] and cleared[e.number]]
            if names:
                shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                return f"the gradient of parameter {shown} was cleared or replaced on some ranks only"
        return None
