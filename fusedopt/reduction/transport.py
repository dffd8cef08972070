"""Move buckets between ranks: gradients out, over the ranks and back in a round, parameters in a gather.

    parameters -> layout -> buffers -> arrival -> [reduction] -> clip -> step -> write-back -> [gather]

A launched bucket's content is moved out, see `reducer`; a bucket that is waited for at once is reduced in place.
Under ``"none"`` all ranks get the mean, under a shard each the undivided sum of its part. The note on the life of a
bucket, in `buffers.bucket`, has the states that this file takes one through.

A parameter whose values are still on their way in a gather changes its class to `PendingParameter`, which waits for
them at the first use by any torch function, and changes back. So nobody, a forward, a state dict, an evaluation, sees a
half.

Knows nothing of votes or hooks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fusedopt._torch_private import DisableTorchFunctionSubclass, TensorBase
from fusedopt.buffers.bucket import Bucket, Entry, Holds, Place
from fusedopt.buffers.flat import Buffers
from fusedopt.sharding.comm import DataParallelGroup, Pending

MAX_IN_FLIGHT = 2
"""Buckets launched from hooks at once: what overlap may cost in memory."""


@dataclass
class InFlight:
    """A bucket under way between ranks.

    Args:
        bucket: whose content it is.
        pending: its reduction.
        sent: entries of which this rank sent a gradient.
        was_moved: main_grad is zero but for what arrived since.
    """

    bucket: Bucket
    pending: Pending
    sent: list[Entry] = field(default_factory=list)
    was_moved: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether this rank sent a gradient of every parameter in it."""
        return len(self.sent) == len(self.bucket.entries)


class Transport:
    """Takes single buckets over the ranks and back.

    Args:
        comm: the ranks.
        buffers: whose buckets travel.
    """

    def __init__(self, comm: DataParallelGroup, buffers: Buffers) -> None:
        self._comm = comm
        self._buffers = buffers
        self._is_whole = not buffers.sharding.is_sharded  # every rank gets all of the sum

    def launch(self, bucket: Bucket) -> InFlight:
        """Move the bucket's content out and start its reduction."""
        sent = [entry for entry in bucket.entries if entry.param.grad is not None]
        launched = InFlight(bucket, self._start(self._take(bucket)), sent, was_moved=True)
        bucket.note_version()
        return launched

    def join(self, bucket: Bucket) -> InFlight:
        """Start the reduction of zeros in the bucket's place; what it holds stays, and what comes back is added."""
        return InFlight(bucket, self._start(bucket.zeros(bucket.plan.numel)))

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

    def add_back(self, arrived: InFlight, dropped: Sequence[Entry] = (), *, is_final: bool = True) -> None:
        """Add a reduced bucket to what arrived meanwhile; waits for it.

        Args:
            arrived: launched before.
            dropped: entries that all ranks cleared since.
            is_final: False where the bucket is about to be reduced once more. Then sums stay undivided, on one rank.
        """
        bucket, result = arrived.bucket, arrived.pending.wait()
        self._buffers.zero_absent_in(bucket)
        for entry in dropped:
            _span_of(entry, result, whole=self._is_whole).zero_()
        is_zero = arrived.was_moved and not bucket.has_unsent and not bucket.was_written()
        if not self._is_whole:
            self._add_part(bucket, result, is_zero=is_zero)
        elif is_final and is_zero:
            torch.div(result, self._comm.world_size, out=bucket.lend())
        elif is_final:
            bucket.lend().add_(result.div_(self._comm.world_size))
        elif self._comm.rank == 0:
            bucket.lend().add_(result)

    def _add_part(self, bucket: Bucket, part: Tensor, *, is_zero: bool = False) -> None:
        if bucket.holds is Holds.NOTHING or (is_zero and not bucket.is_lending):
            bucket.grad_part.copy_(part)
        else:
            self.undivide(bucket)
            bucket.grad_part.add_(part)
        bucket.now_holds(Holds.SUM)

    def undivide(self, bucket: Bucket) -> None:
        """Make the sum over ranks again of a mean that was kept over a step."""
        if bucket.holds is Holds.MEAN:
            bucket.grad_part.mul_(self._comm.world_size)
            bucket.now_holds(Holds.SUM)

    def reduce_in_place(self, buckets: Sequence[Bucket]) -> None:
        """Reduce all that ``buckets`` hold, each while the next one starts; nothing may arrive meanwhile."""
        started: deque[InFlight] = deque()
        for bucket in buckets:
            started.append(self._start_in_place(bucket))
            bucket.has_unsent = False
            if len(started) >= MAX_IN_FLIGHT:
                self._finish_in_place(started.popleft())
        while started:
            self._finish_in_place(started.popleft())

    def _start_in_place(self, bucket: Bucket) -> InFlight:
        if bucket.is_lending:
            content = self._take(bucket)
        else:
            self._buffers.zero_absent_in(bucket)
            content = bucket.lend()
        if self._is_whole:
            return InFlight(bucket, self._comm.start_all_reduce(content))
        return InFlight(bucket, self._comm.start_reduce(content, is_awaited=True))

    def _finish_in_place(self, started: InFlight) -> None:
        bucket, result = started.bucket, started.pending.wait()
        if self._is_whole:
            result.div_(self._comm.world_size)
        elif bucket.is_lending:
            self._add_part(bucket, result)
        else:
            grad = bucket.lend()
            grad[: bucket.span.start].zero_()
            grad[bucket.span.end :].zero_()
            bucket.grad_part.copy_(result)


class Round:
    """Every bucket once, in an order that all ranks keep: those that this rank launched, and what came back of them.

    Args:
        transport: takes single buckets.
        buckets: of the wrapper, live.
        order: their indices, live: some may be added at its end while a round is under way.
    """

    def __init__(self, transport: Transport, buckets: Sequence[Bucket], order: Sequence[int]) -> None:
        self._transport = transport
        self._buckets = buckets
        self._order = order
        self._num_launched = 0
        self.in_flight: deque[InFlight] = deque()
        for bucket in buckets:
            bucket.now_at(Place.HERE)

    @property
    def has_begun(self) -> bool:
        """Whether this rank launched anything in it."""
        return self._num_launched > 0

    @property
    def launched(self) -> Sequence[int]:
        """Indices of the buckets that this rank launched."""
        return self._order[: self._num_launched]

    @property
    def next(self) -> Bucket | None:
        """The bucket to launch next; None where all are."""
        return self._buckets[self._order[self._num_launched]] if self._num_launched < len(self._order) else None

    def remaining(self) -> list[Bucket]:
        """Return the buckets that are still to come, in order."""
        return [self._buckets[index] for index in self._order[self._num_launched :]]

    def launch(self, bucket: Bucket) -> None:
        """Move the bucket's content out and start its reduction."""
        self.in_flight.append(self._transport.launch(bucket))
        self._num_launched += 1
        bucket.now_at(Place.IN_FLIGHT)
        bucket.has_unsent = False

    def join(self) -> None:
        """Take part in what other ranks launched, and this one did not, with zeros."""
        for bucket in self.remaining():
            self.in_flight.append(self._transport.join(bucket))

    def add_back_finished(self, is_kept: Callable[[Sequence[Entry]], bool]) -> list[InFlight]:
        """Add back what has come, in order, where no vote can change it any more than a clear changes main_grad.

        Args:
            is_kept: tells whether gradients that were sent were not cleared since.

        Returns:
            What was added.
        """
        added = []
        while self.in_flight:
            first = self.in_flight[0]
            if not (first.is_whole and first.pending.is_done() and is_kept(first.sent)):
                break
            self._transport.add_back(self.in_flight.popleft())
            first.bucket.now_at(Place.BACK)
            added.append(first)
        return added

    def add_back_all(self, was_dropped: Callable[[Entry], bool], is_final: Callable[[Bucket], bool]) -> set[int]:
        """Add back all that is under way; waits for it.

        Args:
            was_dropped: tells of an entry whether all ranks cleared it since it was sent.
            is_final: tells of a bucket whether it is not about to be reduced once more.

        Returns:
            The indices of the buckets.
        """
        added = set()
        while self.in_flight:
            arrived = self.in_flight.popleft()
            dropped = [entry for entry in arrived.bucket.entries if was_dropped(entry)]
            self._transport.add_back(arrived, dropped, is_final=is_final(arrived.bucket))
            added.add(arrived.bucket.index)
        return added

    def drop(self) -> None:
        """Wait for what is under way, and keep nothing of it."""
        while self.in_flight:
            self.in_flight.popleft().pending.wait()


def _span_of(entry: Entry, result: Tensor, *, whole: bool) -> Tensor:
    """Return the elements of ``entry`` in a reduced bucket, or in this rank's part of one."""
    own = entry.bucket.span
    start, end = entry.slot.start, entry.slot.start + entry.slot.numel
    if not whole:
        start, end = (min(max(edge, own.start), own.end) - own.start for edge in (start, end))
    return result[start:end]


_PENDING_KEY = "pending_gather"

_BLIND = {
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout")),
    *(getattr(torch.Tensor, name).__get__ for name in ("grad_dtype", "grad_fn", "is_leaf", "ndim", "_version")),
    *(vars(TensorBase)["grad"].__set__, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.dim),
}
"""What does not look at values; `zero_grad`, which stands between step and forward, is made of it."""


class BucketGather:
    """One bucket's parameters on their way."""

    def __init__(self, bucket: Bucket, pending: Pending) -> None:
        self._pending = pending
        self._params = [entry.param for entry in bucket.entries]

    def lend_out(self) -> None:
        """Let the parameters be used: the first use of one finishes the gather of all."""
        for param in self._params:
            if type(param) is nn.Parameter:  # a class of the user's own has a torch function of its own
                vars(param)[_PENDING_KEY] = self
                param.__class__ = PendingParameter
        if not all(type(param) is PendingParameter for param in self._params):
            self.finish()

    def finish(self) -> None:
        """Wait until the values are there."""
        self._pending.wait()
        for param in self._params:
            if vars(param).pop(_PENDING_KEY, None) is not None:
                param.__class__ = nn.Parameter
        self._params = []


class PendingParameter(nn.Parameter):
    """A Parameter whose values are still arriving; a plain one again as soon as anything uses it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Finish the gathers of all pending arguments, then run ``func`` on what are plain Parameters now."""
        kwargs = kwargs or {}
        if func in _BLIND:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in _pending_in((args, kwargs)):
            vars(param)[_PENDING_KEY].finish()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        vars(self)[_PENDING_KEY].finish()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        vars(self)[_PENDING_KEY].finish()
        return self.__reduce_ex__(proto)


def _pending_in(value: Any) -> Iterator[PendingParameter]:
    # Not by `nested`: runs in every torch function on such parameters, and looks at arguments as torch passes them.
    if type(value) is PendingParameter:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pending_in(item)
    elif isinstance(value, dict):
        yield from _pending_in(list(value.values()))


class Gather:
    """The gathers of one wrapper.

    Args:
        comm: the ranks.
        buffers: whose buckets are gathered.
        overlap: leave gathers unfinished until a parameter is used.

    Attributes:
        started: those that are unfinished.
    """

    def __init__(self, comm: DataParallelGroup, buffers: Buffers, *, overlap: bool) -> None:
        self._comm = comm
        self._buffers = buffers
        self._overlap = overlap
        self.started: list[BucketGather] = []

    def start(self, *, may_overlap: bool) -> None:
        """Gather all buckets, in the order in which a forward uses them: the reverse of their own.

        Args:
            may_overlap: False waits for them, whatever the setting.
        """
        for bucket in reversed(self._buffers.buckets):
            if bucket.model is not None:
                self.started.append(BucketGather(bucket, self._comm.start_gather(bucket.model)))
        if self._overlap and may_overlap:
            for gather in self.started:
                gather.lend_out()
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for all that are unfinished: model parameters are whole."""
        while self.started:
            self.started.pop().finish()
