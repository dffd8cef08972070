"""Reduce gradient buckets over ranks, early or on demand, each gradient counted once.

    parameters -> layout -> buffers -> arrival -> [reduction] -> clip -> step -> write-back -> gather

main_grad never belongs to a collective. To launch a bucket is to *move* its content out: into a copy, with
main_grad zeroed (or, under ``"gradients"``, by taking the lent buffer back). So whatever arrives late, twice, or
from a fused layer simply adds, and at every moment the gradient is

    mean = (sum over ranks of main_grad + what was launched) / world_size

Launching early is a hint; nothing waits in a hook. A *round* is every bucket once, in order. A *sync* is where ranks
meet: one control message (all bits that some rank sets), then

    1  who has not launched all of the round joins with zeros; what it holds stays in its main_grad
    2  what was launched is added back, without the parameters that all ranks cleared since
    3  ``.grad`` becomes main_grad for every parameter that has a gradient on some rank
    4  buckets of which some rank holds what it did not send are reduced in place

Ranks that disagree about a clear raise together. A rank that came for another wrapper, see `channel`, takes part with
what it has. `transport` moves buckets, the note in `buffers.bucket` is their life; docs/zero.md has a picture.

Knows nothing of the mathematics of the step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from fusedopt._torch_private import current_graph_task_id
from fusedopt.buffers.bucket import Bucket, Entry, Holds, Slot
from fusedopt.buffers.flat import Buffers
from fusedopt.buffers.main_grad import set_grad
from fusedopt.gradients.arrival import WindowLost
from fusedopt.reduction.backward_watch import BackwardWatch
from fusedopt.reduction.pipeline_stages import STAGE_MODULE, StageEdits
from fusedopt.reduction.transport import MAX_IN_FLIGHT, Round, Transport
from fusedopt.reduction.votes import Ballot, Meeting, Problem, Votes
from fusedopt.sharding import dtensor
from fusedopt.sharding.channel import Address, Kind, Tally, meet_all, name_of
from fusedopt.sharding.comm import DataParallelGroup, in_words

_serials = itertools.count()


@dataclass
class Progress:
    """How far one backward is.

    Args:
        may_launch: whether buckets are launched inside it.
        num_awaited: by bucket: parameters whose gradient is still to come, by experience.
        last_arrival: by bucket: the number of its last arrival; 0 for none.
        num_arrivals: so far.
    """

    may_launch: bool = False
    num_awaited: list[int] = field(default_factory=list)
    last_arrival: list[int] = field(default_factory=list)
    num_arrivals: int = 0


class Reducer:
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
        self._stage_edits: StageEdits | None = None  # as long as torch's module is not loaded, there are no stages
        self.serial = next(_serials)
        if comm.is_open and comm.channel is not None:
            comm.channel.enter(self)
        weakref.finalize(self, comm.close).atexit = False
        self._follow_stages()
        self._order: list[int] = []  # of the buckets in a round
        self._is_order_learned = False
        self._round = Round(self._transport, buffers.buckets, self._order)
        self._progress = Progress()
        self._is_paused = False
        self._was_paused = False  # since the last step: then the backward outside no_sync() is the last
        self._edited: list[Bucket] = []  # before they were reduced for other ranks
        self._meeting = Meeting(Kind.BACKWARD)

    # -- what the loop does

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
        if self._comm.world_size == 1:
            return
        self._ballot.clear()
        self._edited = []
        for bucket in self._buffers.buckets:
            bucket.has_unsent = False
            if bucket.is_lending:
                bucket.take_back()
                bucket.now_holds(Holds.NOTHING)
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
                bucket.now_holds(Holds.SUM)
        self.note_versions()

    def window_ended(self) -> None:
        """Return to sums: gradients that are kept over the step go on as part of the mean over ranks."""
        self._was_paused = False
        if self._comm.world_size == 1:
            return
        for bucket in self._buffers.buckets:
            if self._shard == "optimizer":
                bucket.grad_part.mul_(self._comm.world_size)
            elif self._shard == "gradients" and bucket.holds is Holds.SUM:
                bucket.now_holds(Holds.MEAN)
        self.note_versions()

    # -- arrivals

    def arrived(self, slot: Slot) -> None:
        """Note that a backward (or a hand) is done with the gradient of one parameter."""
        bucket = self._buffers.buckets[slot.index]
        bucket.has_unsent = True
        task = current_graph_task_id()
        if task < 0:  # set by hand, and taken over outside of any backward
            self._follow_stages()
            bucket.note_version()
            return
        self._watch.arrive(task)
        progress = self._progress
        progress.num_arrivals += 1
        progress.last_arrival[slot.index] = progress.num_arrivals
        if progress.may_launch:
            # Buckets completed by earlier arrivals: by now users' own hooks have run, too.
            self._launch_complete()
        slot.num_fires += 1
        if slot.num_fires == slot.expected_fires:
            progress.num_awaited[slot.index] -= 1

    def _mind_failure(self) -> None:
        """Look for what fused layers wrote in a backward that failed before their hooks ran."""
        if self._watch.has_failed:
            self._watch.forget()
            for bucket in self._buffers.buckets:
                bucket.has_unsent = bucket.has_unsent or bucket.was_written()

    def backward_began(self) -> None:
        """Note the first arrival of a backward."""
        if self._comm.channel is not None:
            self._comm.channel.refuse_second_thread()
        self._mind_failure()
        self._follow_stages()
        self._follow_buckets()
        # A round that an earlier backward opened is completed with zeros, when ranks meet: what arrives now is new.
        may_start = not self._round.has_begun and self._comm.is_open
        may_launch = self._overlap and self._reduces() and may_start
        buckets = self._buffers.buckets
        self._progress = Progress(may_launch, [0] * len(buckets), [0] * len(buckets))
        for entry in self._buffers.entries:
            entry.slot.num_fires = 0
            self._progress.num_awaited[entry.slot.index] += entry.slot.expected_fires > 0

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
        if self._progress.may_launch:
            for bucket in self._round.remaining():
                self._launch(bucket)
            for entry in self._buffers.entries:
                entry.slot.expected_fires = entry.slot.num_fires
        self.note_versions()
        return self._shard == "gradients" or (self._shard == "none" and not self._is_merging and not self._is_paused)

    # -- launching

    def _follow_buckets(self) -> None:
        """Bring the order of rounds up to date: the same on all ranks.

        Parameters may be unfrozen while some ranks have launched a round: new buckets come after the others.
        """
        order, buckets = self._order, self._buffers.buckets
        if len(order) > len(buckets):  # some were dropped, and nothing is under way
            order.clear()
        if len(order) < len(buckets):
            new = buckets[len(order) :]
            order += [bucket.index for bucket in sorted(new, key=lambda bucket: (-bucket.group, bucket.index))]
            self._is_order_learned = False

    def _learn_order(self, votes: Votes) -> None:
        """After the first round, go on in the order in which buckets were complete: on the first rank that knows."""
        if not votes.has_launched or self._is_order_learned:
            return
        last = self._progress.last_arrival
        ours = sorted(range(len(last)), key=lambda index: last[index] or math.inf) if any(last) else None
        found = next((order for order in self._comm.objects(ours) if order is not None), None)
        if found is not None:
            self._order[:], self._is_order_learned = found, True

    def _launch_complete(self) -> None:
        while (bucket := self._round.next) is not None and self._progress.num_awaited[bucket.index] == 0:
            for added in self._round.add_back_finished(self._ballot.all_kept):
                self._ballot.give(added.sent)
            if len(self._round.in_flight) >= MAX_IN_FLIGHT:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._ballot.send([entry for entry in bucket.entries if entry.param.grad is not None])
        self._round.launch(bucket)

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
        if self._comm.channel is None:
            note = bool(prepare())
            self.makes_state = kind is Kind.STEP and any(entry.has_grad for entry in self._lacking_state())
        else:
            note = self._meet(Meeting(kind, count), prepare)
        shares = self._buffers.shares()
        if shares:
            self._comm.sum_shares_([(e.grad_part, dtensor.share_groups(e.param)) for e in shares])
            for entry in shares:
                entry.slot.end_share(entry.param)
            self.note_versions()
        return note

    def _meet(self, meeting: Meeting, prepare: Callable[[], object]) -> bool:
        try:
            meeting.note = bool(prepare())
        except Exception as error:
            meeting.problem = in_words(error)
            meeting.weight = Problem.LOSES_WINDOW if isinstance(error, WindowLost) else Problem.CAN_BE_MENDED
            self.sync(meeting)
            raise
        self.sync(meeting)
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

    def vote(self, kind: Kind) -> bytes:
        """Return what this rank tells in a meeting where ``kind`` is."""
        if kind is Kind.BACKWARD:  # maybe for another rank; a clip or step has looked
            self._edited = self.edited_outside()
        self._mind_failure()
        self._follow_buckets()
        meeting = self._meeting if self._meeting.kind is kind else Meeting(kind)
        waiting = {bucket.index for bucket in self._round.remaining()}
        lacking = self._lacking_state() if kind is Kind.STEP else ()
        vote = self._ballot.vote(meeting, has_launched=self._round.has_begun, waiting=waiting, lacking=lacking)
        return vote.encode()

    def refuse(self, union: bytes, *, is_from_all: bool) -> None:
        """Lose the window, if a rank's problem costs that; its gradients, too, where it is known what is under way."""
        votes = self._ballot.read(union)
        if not votes.problem & Problem.LOSES_WINDOW:
            return
        if not is_from_all:
            self._on_lost()
            return
        self._join(votes)
        self._drop_window()

    def serve(self, kind: Kind, union: bytes) -> bool:
        """Reduce what all ranks together tell; return whether all are where this one is."""
        votes = self._ballot.read(union)
        self._join(votes)
        mismatch = votes.mismatch()
        if mismatch is not None:
            self._lose(mismatch)
        added = self._round.add_back_all(
            votes.was_dropped, lambda bucket: not votes.has_unsent(bucket) or votes.is_back(bucket)
        )
        self._round = Round(self._transport, self._buffers.buckets, self._order)
        self._set_grads(votes, added)
        self._transport.reduce_in_place([bucket for bucket in self._buffers.buckets if votes.has_unsent(bucket)])
        self._learn_order(votes)
        self.note_versions()
        are_all = votes.all_are(kind)
        if are_all and kind is not Kind.BACKWARD:
            self._meeting.note = votes.note
            self.makes_state = votes.makes_state()
        return are_all

    def _join(self, votes: Votes) -> None:
        """Complete the round that some rank began; nothing of it is known where ranks have different buckets."""
        if not votes.agrees_on_params:
            self._round.in_flight.clear()
        elif votes.has_launched:
            self._round.join()

    def _set_grads(self, votes: Votes, added: set[int]) -> None:
        """Give every parameter that has a gradient on some rank its ``.grad``, on all.

        Before buckets are reduced in place, which takes spans without ``.grad`` for old bytes.
        """
        given = []
        for entry in self._buffers.entries:
            if not votes.has_grad(entry):
                continue
            given.append(entry)
            if votes.is_share(entry) and not entry.slot.is_share:
                entry.slot.expect_share(entry.param)
            if entry.bucket.is_lending:
                entry.slot.is_reduced = True
            elif entry.param.grad is None and entry.slot.main_grad is not None and entry.slot.local_grad is not None:
                if entry.bucket.index not in added:
                    entry.slot.local_grad.zero_()
                set_grad(entry.param, entry.slot.main_grad)
        for bucket in self._buffers.buckets:
            self._transport.undivide(bucket)
        self._ballot.give_all(given)

    def _drop_window(self) -> None:
        self._round.drop()
        self._round = Round(self._transport, self._buffers.buckets, self._order)
        for entry in self._buffers.entries:
            entry.param.grad = None
            if entry.slot.main_grad is not None:  # what came from other ranks may lie there, where no `.grad` shows it
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
        if self._stage_edits is None and self._comm.world_size > 1 and STAGE_MODULE in sys.modules:
            self._stage_edits = StageEdits(self._buffers, self._bring_back, sys.modules[STAGE_MODULE])

    def _bring_back(self) -> None:
        if self._round.has_begun:
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
        if self._comm.world_size == 1 or self._watch.has_failed:
            return []
        away = self._round.launched
        written = [bucket for bucket in self._buffers.buckets if bucket.was_written()]
        if not self._buffers.sharding.is_sharded:
            return [*self._edited, *(bucket for bucket in written if bucket.index in away)]
        shares = [b for b in written if b.index in away or (b.grad is not None and bool(b.grad.any()))]
        return [*self._edited, *shares]


def _meet(reducers: Sequence[Reducer]) -> None:
    meet_all([(r._comm.channel, r) for r in reducers if r._comm.channel is not None])
