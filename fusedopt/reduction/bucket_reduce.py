"""Move the content of one bucket through a reduction.

    parameters -> layout -> buffers -> arrival -> reduction: [transport] -> clip -> step -> write-back -> gather

A launched bucket's content is moved out, see `reduction`; a bucket that is waited for at once is reduced in place.
Under ``"none"`` all ranks get the mean, under a shard each the undivided sum of its part.

Knows nothing of rounds, votes or hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusedopt.buffers.bucket import Bucket, Entry
from fusedopt.buffers.flat import Buffers
from fusedopt.sharding.comm import DataParallelGroup, Pending


@dataclass
class Parcel:
    """The content of a bucket on its way."""

    bucket: Bucket
    pending: Pending
    sent: list[Entry] = field(default_factory=list)
    was_moved: bool = False  # main_grad is zero but for what arrived since

    @property
    def is_whole(self) -> bool:
        """Whether this rank sent a gradient of every parameter in it."""
        return len(self.sent) == len(self.bucket.entries)


class Transport:
    """Launches buckets and brings them back.

    Args:
        comm: the ranks.
        buffers: whose buckets travel.
    """

    def __init__(self, comm: DataParallelGroup, buffers: Buffers) -> None:
        self._comm = comm
        self._buffers = buffers
        self._is_whole = not buffers.sharding.is_sharded  # every rank gets all of the sum

    def launch(self, bucket: Bucket) -> Parcel:
        """Move the bucket's content out and start its reduction."""
        sent = [entry for entry in bucket.entries if entry.param.grad is not None]
        parcel = Parcel(bucket, self._start(self._take(bucket)), sent, was_moved=True)
        bucket.note_version()
        return parcel

    def join(self, bucket: Bucket) -> Parcel:
        """Start the reduction of zeros in the bucket's place; what it holds stays, and what comes back is added."""
        return Parcel(bucket, self._start(bucket.zeros(bucket.plan.numel)))

    def _take(self, bucket: Bucket) -> Tensor:
        if bucket.is_lending:
            taken = bucket.take_back()
            return taken if taken is not None else bucket.zeros(bucket.plan.numel)
        self._buffers.zero_absent_in(bucket)
        grad = bucket.lend()
        copy = grad.clone()
        grad.zero_()
        return copy

    def _start(self, content: Tensor) -> Pending:
        if self._is_whole:
            return self._comm.start_all_reduce(content)
        return self._comm.start_reduce(content, is_awaited=False)

    def settle(self, parcel: Parcel, dropped: Sequence[Entry] = (), *, is_final: bool = True) -> None:
        """Add a reduced bucket to what arrived meanwhile; waits for it.

        Args:
            parcel: launched before.
            dropped: entries that all ranks cleared since.
            is_final: False where the bucket is about to be reduced once more. Then sums stay undivided, on one rank.
        """
        bucket, result = parcel.bucket, parcel.pending.wait()
        self._buffers.zero_absent_in(bucket)
        for entry in dropped:
            _span_of(entry, result, whole=self._is_whole).zero_()
        is_zero = parcel.was_moved and not bucket.is_dirty and not bucket.was_written()
        if not self._is_whole:
            self._add_part(bucket, result, is_zero=is_zero)
        elif is_final and is_zero:
            torch.div(result, self._comm.world_size, out=bucket.lend())
        elif is_final:
            bucket.lend().add_(result.div_(self._comm.world_size))
        elif self._comm.rank == 0:
            bucket.lend().add_(result)

    def _add_part(self, bucket: Bucket, part: Tensor, *, is_zero: bool = False) -> None:
        if bucket.is_fresh or (is_zero and not bucket.is_lending):  # fresh: as every lent bucket after a clear
            bucket.grad_part.copy_(part)
        else:
            self.undivide(bucket)
            bucket.grad_part.add_(part)
        bucket.is_fresh = bucket.is_divided = False

    def undivide(self, bucket: Bucket) -> None:
        """Make the sum over ranks again of a mean that was kept over a step."""
        if bucket.is_divided:
            bucket.grad_part.mul_(self._comm.world_size)
            bucket.is_divided = False

    def start_in_place(self, bucket: Bucket) -> Parcel:
        """Start the reduction of all that the bucket holds, for `finish_in_place`; nothing may arrive between."""
        if bucket.is_lending:
            content = self._take(bucket)
        else:
            self._buffers.zero_absent_in(bucket)
            content = bucket.lend()
        if self._is_whole:
            return Parcel(bucket, self._comm.start_all_reduce(content))
        return Parcel(bucket, self._comm.start_reduce(content, is_awaited=True))

    def finish_in_place(self, parcel: Parcel) -> None:
        """Wait for a bucket started with `start_in_place`."""
        bucket, result = parcel.bucket, parcel.pending.wait()
        if self._is_whole:
            result.div_(self._comm.world_size)
        elif bucket.is_lending:
            self._add_part(bucket, result)
        else:
            grad = bucket.lend()
            grad[: bucket.span.start].zero_()
            grad[bucket.span.end :].zero_()
            bucket.grad_part.copy_(result)


def _span_of(entry: Entry, result: Tensor, *, whole: bool) -> Tensor:
    """Return the elements of ``entry`` in a reduced bucket, or in this rank's part of one."""
    own = entry.bucket.span
    start, end = entry.slot.start, entry.slot.start + entry.slot.numel
    if not whole:
        start, end = (min(max(edge, own.start), own.end) - own.start for edge in (start, end))
    return result[start:end]
