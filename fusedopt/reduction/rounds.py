"""Reduce gradient buckets over ranks, early or on demand, each gradient counted once.

    parameters -> layout -> buffers -> arrival -> [reduction] -> clip -> step -> write-back -> gather

main_grad never belongs to a collective. To launch a bucket is to *move* its content out: into a copy, with
main_grad zeroed (or, under ``"gradients"``, by taking the lent buffer back). So whatever arrives late, twice, or
from a fused layer simply adds, and at every moment the gradient is

    mean = (sum over ranks of main_grad + what was launched) / world_size

Launching early is a hint; nothing waits in a hook. A *round* is every bucket once, in order. A *sync* is where ranks
meet: one control message (all bits that some rank sets), then

    1  who has not launched all of the round joins with zeros; what it holds stays in its main_grad
    2  what was launched is settled: added back, without the parameters that all ranks cleared since
    3  ``.grad`` is hung on every parameter that has a gradient on some rank
    4  buckets that are dirty on some rank are reduced

Ranks that disagree about a clear raise together. A rank that came for another wrapper, see `channel`, takes part with
what it has. docs/zero.md tells it with a picture.

Knows nothing of the mathematics of the step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch

from fusedopt.buffers.bucket import Bucket, Entry, Slot
from fusedopt.buffers.flat import Buffers
from fusedopt.buffers.main_grad import hang
from fusedopt.gradients.arrival import WindowLost
from fusedopt.reduction.backward_watch import BackwardWatch
from fusedopt.reduction.bucket_reduce import Parcel, Transport
from fusedopt.reduction.pipeline_stages import StageEdits
from fusedopt.reduction.votes import Ballot, Meeting, Problem, Says
from fusedopt.sharding import dtensor
from fusedopt.sharding.channel import Address, Kind, meet_all, name_of
from fusedopt.sharding.comm import DataParallelGroup, in_words
from fusedopt.sharding.process_groups import Tally

MAX_IN_FLIGHT = 2
"""Buckets launched from hooks at once: what overlap may cost in memory."""

_serials = itertools.count()


class Reduction:
    """The reduction of one wrapper's gradients; what its channel knows it as.

    Nothing holds it but the wrapper, so that the buffers go with that.

    Args:
        comm: the ranks.
        buffers: whose buckets are reduced.
        overlap: launch buckets inside the backward that reduces.
        is_merging: gradient merge counts the micro-batches of a window.
        is_last: whether the running backward is the window's last, where that is counted.
        on_lost: called when a window is lost, on all ranks.
        lacking_state: gives the entries for which this rank's step would make inner state, if they have a gradient.

    Attributes:
        makes_state: whether the step that ranks met for makes inner state, on any of them.
    """

    def __init__(
        self,
        comm: DataParallelGroup,
        buffers: Buffers,
        *,
        overlap: bool,
        is_merging: bool,
        is_last: Callable[[], bool],
        on_lost: Callable[[], None],
        lacking_state: Callable[[], Sequence[Entry]],
    ) -> None:
        self._comm = comm
        self._buffers = buffers
        self._overlap = overlap
        self._is_merging = is_merging
        self._is_last = is_last
        self._on_lost = on_lost
        self._shard = buffers.sharding.shard
        self._lacking_state = lacking_state
        self.makes_state = False
        self._ballot = Ballot(buffers)
        self._transport = Transport(comm, buffers)
        self._watch = BackwardWatch(self, _meet)
        self._stage_edits = StageEdits(buffers, self._settle_launched)
        self.serial = next(_serials)
        if comm.is_open and comm.channel is not None:
            comm.channel.enter(self)
        weakref.finalize(self, comm.close).atexit = False
        self._follow_stages()
        self._parcels: deque[Parcel] = deque()
        self._num_launched = 0  # in this round
        self._order: list[int] = []  # of the buckets in a round
        self._is_order_learned = False
        self._num_arrivals = 0
        self._may_launch = False
        self._is_paused = False
        self._was_paused = False  # since the last step: then the backward outside no_sync() is the last
        self._edited: list[Bucket] = []  # before they were reduced for other ranks
        self._meeting = Meeting(Kind.BACKWARD)

    # -- what the loop says

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep gradients local in the backwards inside; see `FusedMainGradOptimizer.no_sync`."""
        before, self._is_paused = self._is_paused, True
        self._was_paused = True
        try:
            yield
        finally:
            self._is_paused = before

    def cleared(self) -> None:
        """Note that all gradients are cleared through the optimizer."""
        self._ballot.clear()
        self._edited = []
        for bucket in self._buffers.buckets:
            bucket.is_dirty = False
            if bucket.is_lending:
                bucket.take_back()
                bucket.is_fresh = True
        for entry in self._buffers.entries:
            entry.slot.is_reduced = False

    def zeroed(self) -> None:
        """Note that all gradients were filled with zeros through the optimizer, and still count as gradients."""
        entries = self._buffers.with_grad()
        self.cleared()
        for entry in entries:
            if entry.bucket.is_lending:
                entry.slot.is_reduced = True
            elif entry.slot.main_grad is not None:
                entry.slot.main_grad.num_first_touches += 1  # type: ignore[attr-defined]  # another gradient now
        for bucket in self._buffers.buckets:
            if bucket.is_lending:
                bucket.grad_part.zero_()
                bucket.is_fresh = False
        self.note_versions()

    def window_ended(self) -> None:
        """Return to sums: gradients that are kept over the step go on as part of the mean over ranks."""
        self._was_paused = False
        if self._comm.world_size == 1:
            return
        for bucket in self._buffers.buckets:
            if self._shard == "optimizer":
                bucket.grad_part.mul_(self._comm.world_size)
            bucket.is_divided = self._shard == "gradients"
        self.note_versions()

    # -- arrivals

    def arrived(self, slot: Slot) -> None:
        """Note that a backward (or a hand) is done with the gradient of one parameter."""
        bucket = self._buffers.buckets[slot.index]
        bucket.is_dirty = True
        task = torch._C._current_graph_task_id()
        if task < 0:  # set by hand, and taken over outside of any backward
            self._follow_stages()
            bucket.note_version()
            return
        self._watch.arrive(task)
        self._num_arrivals += 1
        bucket.last_arrival = self._num_arrivals
        if self._may_launch:
            # Buckets completed by earlier arrivals: by now users' own hooks have run, too.
            self._launch_complete()
        slot.num_fires += 1
        if slot.num_fires == slot.expected_fires:
            bucket.num_awaited -= 1

    def _mind_failure(self) -> None:
        """Look for what fused layers wrote in a backward that failed before their hooks ran."""
        if self._watch.has_failed:
            self._watch.forget()
            for bucket in self._buffers.buckets:
                bucket.is_dirty = bucket.is_dirty or bucket.was_written()

    def backward_began(self) -> None:
        """Note the first arrival of a backward."""
        if self._comm.channel is not None:
            self._comm.channel.refuse_second_thread()
        self._mind_failure()
        self._follow_stages()
        self._num_arrivals = 0
        for bucket in self._buffers.buckets:
            bucket.num_awaited = bucket.last_arrival = 0
            for entry in bucket.entries:
                entry.slot.num_fires = 0
                bucket.num_awaited += entry.slot.expected_fires > 0
        # A round that an earlier backward opened is completed with zeros, in the sync: what arrives now is new.
        may_start = self._num_launched == 0 and self._comm.is_open
        self._may_launch = self._overlap and self._reduces() and may_start

    def _reduces(self) -> bool:
        """Return whether the running backward is one whose gradients travel."""
        if self._shard == "gradients":
            return True
        if self._is_paused:
            return False
        if self._is_merging:
            return self._is_last()
        return self._shard == "none" or self._was_paused

    def backward_ended(self) -> bool:
        """Note that everything has arrived in a backward, and return whether ranks meet now."""
        if self._may_launch:
            for bucket in self._not_launched():
                self._launch(bucket)
            for entry in self._buffers.entries:
                entry.slot.expected_fires = entry.slot.num_fires
        self.note_versions()
        return self._shard == "gradients" or (self._shard == "none" and not self._is_merging and not self._is_paused)

    # -- launching

    def _launch_order(self) -> list[int]:
        """Return the buckets' indices in the order of a round: the same on all ranks."""
        buckets = self._buffers.buckets
        if len(self._order) != len(buckets):  # the first time, or some were unfrozen
            self._order = sorted(range(len(buckets)), key=lambda index: (-buckets[index].group, index))
            self._is_order_learned = False
        return self._order

    def _not_launched(self) -> list[Bucket]:
        """Return the buckets still to come in this round, in its order."""
        return [self._buffers.buckets[index] for index in self._launch_order()[self._num_launched :]]

    def _learn_order(self, said: Says) -> None:
        """After the first round, go on in the order in which buckets were complete: on the first rank that knows."""
        if not said.has_started or self._is_order_learned:
            return
        arrivals = [bucket.last_arrival for bucket in self._buffers.buckets]
        ours = sorted(range(len(arrivals)), key=lambda i: arrivals[i] or math.inf) if any(arrivals) else None
        found = next((order for order in self._comm.objects(ours) if order is not None), None)
        if found is not None:
            self._order, self._is_order_learned = found, True

    def _launch_complete(self) -> None:
        order = self._launch_order()
        while self._num_launched < len(order):
            bucket = self._buffers.buckets[order[self._num_launched]]
            if bucket.num_awaited > 0:
                return
            self._settle_finished()
            if len(self._parcels) >= MAX_IN_FLIGHT:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        """Move the bucket's content out and start its reduction."""
        self._ballot.send([entry for entry in bucket.entries if entry.param.grad is not None])
        self._parcels.append(self._transport.launch(bucket))
        self._num_launched += 1
        bucket.is_dirty = False

    def _settle_finished(self) -> None:
        """Settle what arrived, in order, where no vote can change it any more than a clear changes main_grad."""
        while self._parcels:
            parcel = self._parcels[0]
            if not (parcel.is_whole and parcel.pending.is_done() and self._ballot.all_kept(parcel.sent)):
                return
            self._transport.settle(self._parcels.popleft())
            self._ballot.give(parcel.sent)
            parcel.bucket.is_settled = True

    # -- meeting

    def meet(self, kind: Kind, count: int, prepare: Callable[[], object]) -> bool:
        """Call ``prepare``, then meet all ranks, which reduces what is to be reduced; see `sync`.

        Args:
            kind: where this rank is.
            count: of micro-batches; ranks that clip or step have to agree on it.
            prepare: what it raises on one rank, all raise, and nothing is reduced.

        Returns:
            Whether ``prepare`` returned something true, on any rank.
        """
        meeting = Meeting(kind, count)
        try:
            meeting.note = bool(prepare())
        except Exception as error:
            meeting.problem = in_words(error)
            meeting.weight = Problem.LOSES_WINDOW if isinstance(error, WindowLost) else Problem.CAN_BE_MENDED
            self.sync(meeting)
            raise
        self.sync(meeting)
        shares = self._buffers.shares()
        if shares:
            self._comm.sum_shares_([(e.grad_part, dtensor.share_groups(e.param)) for e in shares])
            for entry in shares:
                entry.slot.end_share(entry.param)
            self.note_versions()
        return meeting.note

    def sync(self, meeting: Meeting) -> None:
        """Meet all ranks; see the top of this file. Does nothing for one rank.

        Raises:
            RuntimeError: if another rank has a problem; on all ranks, if gradients were cleared on some ranks only, or
                ranks call different methods. In these two cases the window is lost, and gradients are cleared.
        """
        if self._comm.channel is not None:
            self._meeting = meeting
            self._comm.channel.meet([self], meeting.kind, meeting.problem)
        elif meeting.kind is Kind.STEP and meeting.problem is None:
            self.makes_state = any(entry.has_grad for entry in self._lacking_state())

    @property
    def address(self) -> Address:
        """What ranks know it by."""
        return self._comm.address

    @property
    def title(self) -> str:
        """For messages: its number, and parameters."""
        entries = self._buffers.entries
        more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
        return f"{name_of(self.address)} ({entries[0].slot.name if entries else 'no parameters'}{more})"

    @property
    def tally(self) -> Tally:
        """Counts its messages."""
        return self._comm.tally

    @property
    def is_running(self) -> bool:
        """Whether a backward runs in which its gradients arrive."""
        return self._watch.is_running

    def open(self) -> None:
        """Get groups for data, as a copy does at its first meeting."""
        if not self._comm.is_open and self._comm.channel is not None:
            self._comm.open()
            self._comm.channel.enter(self)

    def say(self, kind: Kind) -> bytes:
        """Return what this rank says in a meeting where ``kind`` is."""
        if kind is Kind.BACKWARD:  # maybe for another rank; a clip or step has looked
            self._edited = self.edited_outside()
        self._mind_failure()
        meeting = self._meeting if self._meeting.kind is kind else Meeting(kind)
        waiting = {bucket.index for bucket in self._not_launched()}
        lacking = self._lacking_state() if kind is Kind.STEP else ()
        return self._ballot.fill(meeting, has_started=self._num_launched > 0, waiting=waiting, lacking=lacking)

    def refuse(self, heard: bytes, *, is_from_all: bool) -> None:
        """Lose the window, if a rank's problem costs that; its gradients, too, where it is known what is under way."""
        said = self._ballot.read(heard)
        if not said.problem & Problem.LOSES_WINDOW:
            return
        if not is_from_all:
            self._on_lost()
            return
        if said.agrees_on_numbers:
            self._join(said)
        else:
            self._parcels.clear()
        self._drop_window()

    def serve(self, kind: Kind, heard: bytes) -> bool:
        """Reduce what all ranks together say; return whether all are where this one is."""
        said = self._ballot.read(heard)
        if not said.agrees_on_numbers:
            self._parcels.clear()
        else:
            self._join(said)
        mismatch = said.mismatch()
        if mismatch is not None:
            self._lose(mismatch)
        settled = self._settle_all(said)
        self._hang(said, settled)
        self._reduce_dirty(said)
        self._learn_order(said)
        self.note_versions()
        are_all = said.all_are(kind)
        if are_all and kind is not Kind.BACKWARD:
            self._meeting.note = said.note
            self.makes_state = said.makes_state()
        return are_all

    def _join(self, said: Says) -> None:
        if said.has_started:
            for bucket in self._not_launched():
                self._parcels.append(self._transport.join(bucket))
        self._num_launched = 0

    def _settle_all(self, said: Says) -> set[int]:
        """Return the indices of the buckets that were settled."""
        settled = set()
        while self._parcels:
            parcel = self._parcels.popleft()
            dropped = [entry for entry in parcel.bucket.entries if said.was_dropped(entry)]
            is_final = not said.is_dirty(parcel.bucket) or said.was_settled(parcel.bucket)
            self._transport.settle(parcel, dropped, is_final=is_final)
            settled.add(parcel.bucket.index)
        return settled

    def _reduce_dirty(self, said: Says) -> None:
        """Reduce buckets that hold on some rank what was not launched: in place, each while the next one starts."""
        started: deque[Parcel] = deque()
        for bucket in self._buffers.buckets:
            if said.is_dirty(bucket):
                started.append(self._transport.start_in_place(bucket))
                bucket.is_dirty = False
            if len(started) >= MAX_IN_FLIGHT:
                self._transport.finish_in_place(started.popleft())
        while started:
            self._transport.finish_in_place(started.popleft())

    def _hang(self, said: Says, settled: set[int]) -> None:
        """Give every parameter that has a gradient on some rank its ``.grad``, on all.

        Before dirty buckets are reduced, which takes spans without ``.grad`` for old bytes.
        """
        given = []
        for entry in self._buffers.entries:
            if not said.has(entry):
                continue
            given.append(entry)
            if said.is_share(entry) and not entry.slot.is_share:
                entry.slot.expect_share(entry.param)
            if entry.bucket.is_lending:
                entry.slot.is_reduced = True
            elif entry.param.grad is None and entry.slot.main_grad is not None and entry.slot.local_grad is not None:
                if entry.bucket.index not in settled:
                    entry.slot.local_grad.zero_()
                hang(entry.param, entry.slot.main_grad)
        for bucket in self._buffers.buckets:
            self._transport.undivide(bucket)
            bucket.is_settled = False
        self._ballot.give_all(given)

    def _drop_window(self) -> None:
        while self._parcels:
            self._parcels.popleft().pending.wait()
        for entry in self._buffers.entries:
            entry.param.grad = None
            if entry.slot.main_grad is not None:  # what came from other ranks may lie there, and was never hung up
                entry.slot.main_grad.is_zero = False  # type: ignore[attr-defined]
        self.cleared()
        self._ballot.give_all([])
        self.note_versions()
        self._on_lost()

    def _lose(self, reason: str) -> NoReturn:
        self._drop_window()
        raise RuntimeError(
            f"{reason}. All ranks raise this: the gradients of this window are lost, and were cleared. Call "
            "optimizer.zero_grad() on all ranks and go on with the next window"
        )

    # -- edits from outside

    def _follow_stages(self) -> None:
        if self._comm.world_size > 1:
            self._stage_edits.listen()

    def _settle_launched(self) -> None:
        if self._num_launched:
            self.sync(Meeting(Kind.BACKWARD))

    def note_versions(self) -> None:
        """Note that gradients were last written by a backward, or by fusedopt."""
        for bucket in self._buffers.buckets:
            bucket.note_version()

    def edited_outside(self) -> list[Bucket]:
        """Return the buckets that something other than a backward or fusedopt wrote into, and should not have.

        Under a shard what it found there was a share, and all zero where the content is under way; which it is at times
        without one, too. Zeros in a share are harmless: ``model.zero_grad(set_to_none=False)``.
        """
        if self._watch.has_failed or self._comm.world_size == 1:
            return []
        away = set(self._launch_order()[: self._num_launched])
        written = [bucket for bucket in self._buffers.buckets if bucket.was_written()]
        if not self._buffers.sharding.is_sharded:
            return [*self._edited, *(bucket for bucket in written if bucket.index in away)]
        shares = [b for b in written if b.index in away or (b.grad is not None and bool(b.grad.any()))]
        return [*self._edited, *shares]


def _meet(reductions: Sequence[Reduction]) -> None:
    meet_all([(r._comm.channel, r) for r in reductions if r._comm.channel is not None])
