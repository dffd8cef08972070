"""Where the ranks of a set meet: who came for which wrapper, and whom they serve then.

    parameters -> layout -> buffers -> arrival -> reduction: [channel] -> clip -> step -> write-back -> gather

All wrappers over the same ranks share one gloo group for control messages. Whatever a rank comes for, it says so in
one *block* of a fixed size, of which all read the union of bits: so any two messages meet in one collective. What it
came for stands in it twice, once inverted: bits that are in both show that ranks came for different things.

If all came for the same, that was all, and the block also held what they say about it. Else each tells the others
what it came for, and every wrapper that one of them wants is served, in the order of their numbers, by all of them:
who came for another one takes part with what it has. Then a rank at the end of a backward goes on, and one in a step
(or a clip, or anything else that all ranks call) comes again, until all are there.

Knows nothing of gradients: a `Member` does.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fusedopt.sharding.process_groups import DataGroups, Ranks, make_group

BLOCK_NBYTES = 4096
"""Up to 16 KiB gloo's time is latency. One block has room for what is said about 4000 parameters."""

NUMBER_NBYTES = 4
"""Of a number on which ranks have to agree."""

_KEY_NBYTES = 8
_LENGTH_AT = 2 * _KEY_NBYTES
_PROBLEM_AT = _LENGTH_AT + 2 * NUMBER_NBYTES
_BODY_AT = _PROBLEM_AT + 1

Address = tuple[str, int]
"""What ranks know a wrapper by: ``(NUMBERED, number)``; a copy of one, before its first meeting, ``(COPY, number)``."""

NUMBERED, COPY = "optimizer", "a copy of optimizer"


class Kind(enum.IntEnum):
    """Where a rank is when it meets the others."""

    BACKWARD = 0
    CLIP = 1
    STEP = 2


_PLACES = {
    Kind.BACKWARD: "the end of a backward through",
    Kind.CLIP: "clip_grad_norm_() of",
    Kind.STEP: "step() of",
}


class Tally:
    """Collectives that one wrapper started, by kind, and the bytes that this rank sends in them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def add(self, kind: str, nbytes: int = 0) -> None:
        """Count one collective."""
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes


class Member(Protocol):
    """One wrapper's side of a meeting."""

    @property
    def address(self) -> Address:
        """What ranks know it by."""

    @property
    def serial(self) -> int:
        """Ascends in the order in which this process made them."""

    @property
    def title(self) -> str:
        """For messages."""

    @property
    def tally(self) -> Tally:
        """Counts its messages."""

    @property
    def is_running(self) -> bool:
        """Whether a backward that reaches it runs now: then it cannot be served to others."""

    def open(self) -> None:
        """Become a numbered member with groups of its own; all ranks call it."""

    def vote(self, kind: Kind) -> bytes:
        """Return what this rank tells about it, as long as on all ranks that have the same parameters."""

    def refuse(self, said: bytes, *, is_from_all: bool) -> None:
        """Note what was said where some rank cannot go on: nothing is reduced.

        Args:
            said: by all ranks, or by the one that cannot.
            is_from_all: which of the two.
        """

    def serve(self, kind: Kind, said: bytes) -> bool:
        """Do what all ranks together said; return whether all of them are where this one is."""


@dataclass(frozen=True)
class _Errand:
    """What a rank came for."""

    text: str
    comers: Sequence[Member]  # none in `Channel.agree`
    kind: Kind
    problem: str | None
    tally: Tally

    @property
    def key(self) -> Hashable:
        """The same on ranks that came for the same."""
        return tuple(member.address for member in self.comers) or self.text

    @property
    def stays_for(self) -> Hashable:
        """What this rank does not leave before all are there; None at the end of a backward."""
        return None if self.comers and self.kind is Kind.BACKWARD else self.key


@dataclass(frozen=True)
class _Presence:
    """What a rank tells the others where not all came for the same."""

    errand: str
    stays_for: Hashable
    addresses: tuple[Address, ...]
    live: dict[Address, bool]  # all that it could serve, and whether their backward is running
    problem: str | None
    said: bytes  # about its wrapper, if it has a problem


@dataclass(frozen=True)
class _Heard:
    """What all ranks said, who came for the same."""

    has_problem: bool
    body: bytes


class Channel:
    """The control group of ``ranks``, and the wrappers that share it.

    Args:
        ranks: global ones, in ascending order; two at least.
        timeout: how long a rank waits for the others.

    Attributes:
        group: gloo; for nothing but control messages.
    """

    def __init__(self, ranks: Ranks, timeout: datetime.timedelta | None) -> None:
        self.ranks = ranks
        self._timeout = timeout
        self._errand = "making its first optimizer"
        with self._waiting():
            self.group = make_group(f"control of {ranks}", ranks, timeout, "gloo")
        self._members: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._thread: int | None = None
        self._next_number = 0
        self._next_slot = 0
        self._free: dict[int, DataGroups] = {}

    # -- members

    def enter(self, member: Member) -> None:
        """Take on a wrapper that has its number; held weakly."""
        self._members[member.address[1]] = member

    def leave(self, member: Member) -> None:
        """Let go of a wrapper."""
        self._members.pop(member.address[1], None)

    def lease(self, rank_sets: Sequence[Ranks], timeout: datetime.timedelta | None) -> tuple[int, DataGroups]:
        """Return a number, and data groups, that no other wrapper has; all ranks call this.

        Wrappers go at other times on each rank, as garbage is collected: groups are used again once they are free on
        all ranks, and all have started as many collectives on them.

        Args:
            rank_sets: of the groups: those among which data is reduced, and cut, and replicated.
            timeout: of their collectives.
        """
        layout, sizes = (tuple(rank_sets), timeout), tuple(map(len, rank_sets))
        free = {slot: g.num_started for slot, g in self._free.copy().items() if g.layout == layout}
        told = self.objects((sizes, self._next_number, self._next_slot, free))
        for rank, (others, *_) in zip(self.ranks, told, strict=True):
            if others != told[0][0]:
                raise RuntimeError(
                    f"on rank {rank} gradients would be reduced, cut and replicated over {others} ranks, on rank "
                    f"{self.ranks[0]} over {told[0][0]}; give all ranks the same process_group or device_mesh"
                )
        _, numbers, slots, frees = zip(*told, strict=True)
        common = [slot for slot, num_started in free.items() if all(f.get(slot) == num_started for f in frees)]
        slot = min(common, default=max(slots))
        self._next_number, self._next_slot = max(numbers) + 1, max(*slots, slot + 1)
        groups = self._free.pop(slot, None)
        return max(numbers), self._make(slot, layout) if groups is None else groups

    def _make(self, slot: int, layout: tuple[tuple[Ranks, ...], datetime.timedelta | None]) -> DataGroups:
        rank_sets, timeout = layout
        with self._waiting():
            made = {
                ranks: make_group(f"data {slot} of {self.ranks}", ranks, timeout)
                for ranks in dict.fromkeys(rank_sets)
                if len(ranks) > 1
            }
        return DataGroups(slot, layout, made)

    def give_back(self, groups: DataGroups) -> None:
        """Let ``groups`` be leased again."""
        self._free[groups.slot] = groups

    # -- meetings

    def refuse_second_thread(self) -> None:
        """Raise if another thread is in a meeting."""
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"a backward begins while another thread is in {self._errand}: optimizers that the same ranks share "
                "take part in each other's reductions. Train them from one thread"
            )

    def meet(self, comers: Sequence[Member], kind: Kind, problem: str | None = None) -> None:
        """Meet all ranks; see the top of this file.

        Args:
            comers: whom this rank came for: several at the end of a backward, else one.
            kind: where it is.
            problem: why it cannot go on, in words; then nobody is served, the others raise, and the caller does.

        Raises:
            RuntimeError: if another rank has a problem; on all ranks: if they call methods of different optimizers that
                wait for all ranks (step); if one rank wants an optimizer that another one does not have.
        """
        comers = sorted(comers, key=lambda member: (member.address, member.serial))
        titles = " and ".join(member.title for member in comers)
        self._run(_Errand(f"{_PLACES[kind]} {titles}", comers, kind, problem, comers[0].tally))

    def agree(self, topic: str, problem: str | None, tally: Tally) -> None:
        """Meet all ranks in ``topic``, the same on all; raise if another one has a problem: its caller raises that."""
        self._run(_Errand(topic, [], Kind.BACKWARD, problem, tally))

    def _run(self, errand: _Errand) -> None:
        with self._lock:
            self._thread, self._errand = threading.get_ident(), errand.text
            try:
                while not self._is_done(errand):
                    pass
            finally:
                self._thread = None

    def _is_done(self, errand: _Errand) -> bool:
        comers = errand.comers
        body = comers[0].vote(errand.kind) if comers else b""
        heard = self._exchange(errand.key, body, errand.tally, has_problem=errand.problem is not None)
        if heard is None:
            for member in self._arrange(errand, body):
                self._serve(member, errand)
            return errand.stays_for is None or errand.problem is not None
        if heard.has_problem:
            for member in comers:
                member.refuse(heard.body, is_from_all=True)
            errand.tally.add("control")
            self._raise_others(errand, self.objects(errand.problem))
            return True
        if not comers:
            return True
        _open(comers)
        are_all = comers[0].serve(errand.kind, heard.body)
        for member in comers[1:]:
            self._serve(member, errand)
        return errand.stays_for is None or are_all

    def _serve(self, member: Member, errand: _Errand) -> None:
        kind = errand.kind if member in errand.comers else Kind.BACKWARD
        heard = self._exchange((member.address,), member.vote(kind), member.tally)
        if heard is None:
            raise RuntimeError(f"ranks {self.ranks} lost each other in {errand.text}, at {member.title}; start anew")
        member.serve(kind, heard.body)

    def _arrange(self, errand: _Errand, said: bytes) -> list[Member]:
        """Return whom all ranks serve now, in order, as they did not come for the same; if they cannot, all raise."""
        members = {member.address: member for member in self._members.values()}  # none of them goes meanwhile
        live = {address: member.is_running for address, member in members.items()}
        wanted = tuple(member.address for member in errand.comers)
        errand.tally.add("control")
        said = said if errand.problem is not None else b""
        found = self.objects(_Presence(errand.text, errand.stays_for, wanted, live, errand.problem, said))
        if any(presence.problem is not None for presence in found):
            for presence in found:
                for address in presence.addresses if presence.problem is not None else ():
                    if address in members:
                        members[address].refuse(presence.said, is_from_all=False)
            self._raise_others(errand, [presence.problem for presence in found])
            return []
        by_rank = dict(zip(self.ranks, found, strict=True))
        refusal = _refusal(by_rank)
        if refusal is not None:
            places = ", ".join(f"rank {rank} is in {presence.errand}" for rank, presence in by_rank.items())
            raise RuntimeError(f"{refusal}. All ranks raise this, and no gradient was changed: {places}")
        _open(errand.comers)
        members.update((member.address, member) for member in errand.comers)
        numbered = {address for presence in found for address in presence.addresses if address[0] == NUMBERED}
        return [members[address] for address in sorted(numbered | {member.address for member in errand.comers})]

    def _raise_others(self, errand: _Errand, problems: Sequence[str | None]) -> None:
        if errand.problem is None:
            found = ((rank, text) for rank, text in zip(self.ranks, problems, strict=True) if text is not None)
            raise RuntimeError("rank {} refused, so all ranks do: {}".format(*next(found)))

    # -- messages

    def _exchange(self, key: Hashable, body: bytes, tally: Tally, *, has_problem: bool = False) -> _Heard | None:
        """Return what all ranks together say about ``key``, or None if it is not the same on all of them."""
        digest = hashlib.blake2b(repr(key).encode(), digest_size=_KEY_NBYTES).digest()
        head = twice(int.from_bytes(digest, "little"), _KEY_NBYTES) + twice(len(body)) + bytes([has_problem])
        message = head + body
        message += bytes(max(0, BLOCK_NBYTES - len(message)))
        union = self.exchange(message[:BLOCK_NBYTES], tally)
        if clashes(union[:_LENGTH_AT]):
            return None
        if len(message) > BLOCK_NBYTES and not clashes(union[_LENGTH_AT:_PROBLEM_AT]):
            union += self.exchange(message[BLOCK_NBYTES:], tally)
        return _Heard(bool(union[_PROBLEM_AT]), union[_BODY_AT : _BODY_AT + len(body)])

    def exchange(self, message: bytes, tally: Tally) -> bytes:
        """Return the union of the bits that all ranks set, in messages of one size."""
        union = bytearray(message)
        tally.add("control", 2 * len(union) * (len(self.ranks) - 1) // len(self.ranks))
        with self._waiting():
            dist.all_reduce(torch.frombuffer(union, dtype=torch.uint8), op=dist.ReduceOp.BOR, group=self.group)
        return bytes(union)

    def objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (picklable), by rank; where all ranks are known to be."""
        values: list[Any] = [None] * len(self.ranks)
        with self._waiting():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        return waiting(self._errand, self.ranks, self._timeout)


_channels: dict[Ranks, tuple[Any, Channel]] = {}
"""By ranks: (the default group when it was made, the channel)."""


def channel_of(ranks: Ranks, timeout: datetime.timedelta | None) -> Channel:
    """Return the channel of ``ranks``: one, as long as the default group lives."""
    default, channel = _channels.get(ranks, (None, None))
    if channel is None or default is not dist.group.WORLD:
        channel = Channel(ranks, timeout)
        _channels[ranks] = dist.group.WORLD, channel
    return channel


def meet_all(comers: Sequence[tuple[Channel, Member]]) -> None:
    """Meet at the end of a backward, channel after channel, in an order that all ranks keep."""
    by_channel: dict[Channel, list[Member]] = {}
    for channel, member in comers:
        by_channel.setdefault(channel, []).append(member)
    _meet_each(sorted(by_channel.items(), key=lambda item: (len(item[0].ranks), item[0].ranks)))


def _meet_each(turns: Sequence[tuple[Channel, Sequence[Member]]]) -> None:
    for channel, comers in turns[:1]:
        try:
            channel.meet(comers, Kind.BACKWARD)
        finally:  # ranks of the others must not wait for this one, whatever it raised
            _meet_each(turns[1:])


def name_of(address: Address) -> str:
    """Return what messages call a wrapper."""
    return f"{address[0]} {address[1]}"


def _open(comers: Sequence[Member]) -> None:
    """Give copies of wrappers, which come for the first time on all ranks, numbers and groups."""
    for member in comers:
        member.open()


def _refusal(found: Mapping[int, _Presence]) -> str | None:
    """Return why ranks that came for different things cannot go on, or None; by global rank."""
    if len({tuple(a for a in presence.addresses if a[0] == COPY) for presence in found.values()}) > 1:
        return (
            "the copy of an optimizer is used for the first time, on some ranks only: copy it on all ranks and use it "
            "on all of them, or on none"
        )
    numbered = sorted({a for presence in found.values() for a in presence.addresses if a[0] == NUMBERED})
    gone = [(address, rank) for address in numbered for rank in found if address not in found[rank].live]
    if gone:
        return (
            f"{name_of(gone[0][0])} was dropped or unwrapped on rank {gone[0][1]}, and others go on with it: drop "
            "optimizers on all ranks alike"
        )
    if len({presence.stays_for for presence in found.values() if presence.stays_for is not None}) > 1:
        return (
            "ranks wait for each other in different places: call the methods of optimizers that the same ranks share "
            "in the same order on all of them"
        )
    running = [(a, rank) for a in numbered for rank, p in found.items() if p.live[a] and a not in p.addresses]
    if running:
        return (
            f"others reduce the gradients of {name_of(running[0][0])}, and on rank {running[0][1]} a backward through "
            "it is running, in another thread or around a hook: train from one thread"
        )
    return None


@contextlib.contextmanager
def waiting(what: str, ranks: Ranks, timeout: datetime.timedelta | None) -> Iterator[None]:
    """Say what this rank was in, and for whom it waited there, if the others do not come in the body."""
    try:
        yield
    except RuntimeError as error:
        most = f", {timeout.total_seconds():g} s at most" if timeout is not None else ""
        raise RuntimeError(
            f"rank {dist.get_rank()} is in {what} and waited for the others of ranks {list(ranks)}{most}: one of them "
            f"ended, raised, or waits elsewhere. {error}"
        ) from error


def twice(number: int, nbytes: int = NUMBER_NBYTES) -> bytes:
    """Return ``number`` and its inverse, which have no bit in common."""
    inverse = number ^ ((1 << 8 * nbytes) - 1)
    return number.to_bytes(nbytes, "little") + inverse.to_bytes(nbytes, "little")


def clashes(union: bytes) -> bool:
    """Return whether different numbers went into a union of what `twice` gives."""
    half = len(union) // 2
    return bool(int.from_bytes(union[:half], "little") & int.from_bytes(union[half:], "little"))
