"""The ranks that train one model together, and every collective that moves their data.

    parameters -> layout -> buffers -> arrival -> [reduction] -> [clip] -> step -> write-back -> [gather]

Chooses per backend: on CPU (gloo) shards travel directly from rank to rank and are summed locally, on devices through
the backend's own collectives. Every wrapper has groups of its own for data, since hooks launch buckets in an order of
their own on each rank; what ranks agree on goes through their `Channel`.

Knows nothing of parameters, buckets or optimizers. At one rank there is nothing to do.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedopt.sharding.channel import COPY, NUMBERED, Address, Channel, Tally, channel_of, name_of, waiting
from fusedopt.sharding.process_groups import DataGroups, Ranks, timeout_of


class Pending:
    """A reduction or gather on its way.

    Args:
        works: what torch.distributed returned; all have to finish.
        then: called once they did; returns the next `Pending`, or the result.
        waiting: run around the wait.
    """

    def __init__(
        self, works: Sequence[Any], then: Callable[[], Any], waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._works = list(works)
        self._waiting = waiting
        self._then: Callable[[], Any] | None = then
        self._result: Any = None

    def is_done(self) -> bool:
        """Return whether `wait` would return at once. Never waits."""
        if self._then is None:
            return not isinstance(self._result, Pending) or self._result.is_done()
        if not all(work.is_completed() for work in self._works):
            return False
        self._advance()
        return self.is_done()

    def wait(self) -> Any:
        """Wait until it is finished and return the result."""
        if self._then is not None:
            self._advance()
        return self._result.wait() if isinstance(self._result, Pending) else self._result

    def _advance(self) -> None:
        with self._waiting():
            for work in self._works:
                work.wait()
        then, self._then = self._then, None
        self._works = []
        self._result = then() if then is not None else None


class DataParallelGroup:
    """The data-parallel ranks of this process, and what is communicated between them.

    Args:
        process_group: the ranks; default all.
        device_mesh: 1-D, or 2-D as (replicate, shard): buckets are cut over its last dimension, and each part is
            reduced over the first as well. In place of ``process_group``.
        norm_group: ranks that hold other parts of the model; global norms are taken over them, too.

    Attributes:
        rank, world_size: of this process among all data-parallel ranks; a mean divides by ``world_size``.
        shard_rank, num_shards: of this process among those that share a bucket.
        channel: where all of them meet; None for one rank.
        tally: collectives started, by kind: reduce, gather, scalar, broadcast, control; and bytes this rank sends in
            them: an all-reduce of n bytes sends 2 (W-1)/W n, a reduce-scatter or gather (W-1)/W n.

    Raises:
        ValueError: if both a group and a mesh are given, a mesh has more than two dimensions, or this process is in
            none of them.
        RuntimeError: if a group is given and torch.distributed is not initialised.
    """

    def __init__(self, process_group: Any = None, device_mesh: Any = None, norm_group: Any = None) -> None:
        self._begin(norm_group)
        given = process_group if process_group is not None else device_mesh
        if not (dist.is_available() and dist.is_initialized()):
            if given is not None or norm_group is not None:
                raise RuntimeError(
                    "a process group was given, but torch.distributed is not initialised; call "
                    "torch.distributed.init_process_group() first, under torchrun"
                )
            return
        if process_group is not None and device_mesh is not None:
            raise ValueError("process_group and device_mesh were both given; give one of them")
        if device_mesh is not None:
            self._take_mesh(device_mesh)
            return
        group = process_group if process_group is not None else dist.group.WORLD
        if dist.get_rank(group) < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group it was given; give each rank the group it is in"
            )
        ranks = _ranks_of(group)
        self._place(ranks, ranks, None, timeout_of(group))

    @staticmethod
    def alone(norm_group: Any = None) -> DataParallelGroup:
        """Return this process by itself: somebody else reduces its gradients."""
        group = DataParallelGroup.__new__(DataParallelGroup)
        group._begin(norm_group)
        return group

    def _begin(self, norm_group: Any) -> None:
        self.tally = Tally()
        self.norm_group = norm_group
        self.rank, self.world_size, self.shard_rank, self.num_shards = 0, 1, 0, 1
        self.channel: Channel | None = None
        self.address: Address = (COPY, -1)
        self._rank_sets: tuple[Ranks, Ranks, Ranks | None] = ((), (), None)
        self._timeout: datetime.timedelta | None = None
        self._groups: DataGroups | None = None
        self._lease: weakref.finalize[Any, Any] | None = None

    def _take_mesh(self, mesh: Any) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"device_mesh has {mesh.ndim} dimensions; needed are 1 or 2, (replicate, shard). Give the sub-mesh of "
                "the data-parallel dimensions: mesh['replicate', 'shard']"
            )
        # torch gives the groups of a mesh its own default, whatever the loop asked of the default group.
        timeout = timeout_of(dist.group.WORLD, *mesh.get_all_groups())
        shard = _ranks_of(mesh.get_group(mesh.ndim - 1))
        if mesh.ndim == 1 or mesh.size(0) == 1:
            self._place(shard, shard, None, timeout)
            return
        everybody = tuple(sorted(int(rank) for rank in mesh.mesh.flatten()))
        self._place(everybody, shard, _ranks_of(mesh.get_group(0)), timeout)

    def _place(
        self, everybody: Ranks, shard: Ranks, replicate: Ranks | None, timeout: datetime.timedelta | None
    ) -> None:
        me = dist.get_rank()
        self.rank, self.world_size = everybody.index(me), len(everybody)
        self.shard_rank, self.num_shards = shard.index(me), len(shard)
        if self.world_size > 1:
            self.channel = channel_of(everybody, timeout)
            self._rank_sets, self._timeout = (everybody, shard, replicate), timeout

    # -- groups of its own

    @property
    def counts(self) -> Counter[str]:
        """Collectives started, by kind."""
        return self.tally.counts

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes this rank sends in them, by kind."""
        return self.tally.nbytes

    @property
    def is_open(self) -> bool:
        """Whether data can travel: there are groups for it."""
        return self._groups is not None

    def open(self) -> None:
        """Get a number and groups, if there are several ranks and none yet; all ranks call this."""
        if self.channel is None or self._groups is not None:
            return
        self.tally.add("control")
        number, groups = self.channel.lease([ranks for ranks in self._rank_sets if ranks], self._timeout)
        self.address, self._groups = (NUMBERED, number), groups
        self._lease = weakref.finalize(self, self.channel.give_back, groups)
        self._lease.atexit = False

    def close(self) -> None:
        """Let other wrappers have the groups: nothing is sent any more."""
        if self._lease is not None:
            self._lease()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelGroup:
        """Return the same ranks, for another wrapper; it communicates when that first does, on all ranks."""
        copied = DataParallelGroup.alone(self.norm_group)
        copied.channel, copied._rank_sets, copied._timeout = self.channel, self._rank_sets, self._timeout
        copied.rank, copied.world_size = self.rank, self.world_size
        copied.shard_rank, copied.num_shards = self.shard_rank, self.num_shards
        copied.address = (COPY, self.address[1])
        return copied

    def __reduce__(self) -> Any:
        if self.world_size > 1:
            raise TypeError(
                "an optimizer that several ranks share cannot be pickled: process groups exist in their processes "
                "only. Save optimizer.state_dict(), and load it into an optimizer made there"
            )
        return DataParallelGroup, ()

    @property
    def _all(self) -> Any:
        return self._group_of(0)

    @property
    def _shard(self) -> Any:
        return self._group_of(1)

    @property
    def _replicate(self) -> Any:
        return self._group_of(2)

    @property
    def _control(self) -> Any:
        return self.channel.group if self.channel is not None else None

    def _group_of(self, index: int) -> Any:
        ranks = self._rank_sets[index]
        if ranks is None or self._groups is None:
            return None
        return self._groups.by_ranks.get(ranks)

    # -- buckets

    def start_all_reduce(self, flat: Tensor) -> Pending:
        """Sum ``flat`` over all ranks, in place; the result is ``flat``."""
        self._count("reduce", 2 * _others(flat.nbytes, self.world_size))
        work = dist.all_reduce(flat, group=self._all, async_op=True)
        return Pending([work], lambda: flat, self._reducing)

    def start_reduce(self, flat: Tensor, *, is_awaited: bool) -> Pending:
        """Sum ``flat``, ``[num_shards * n]``, over all ranks; the result, ``[n]``, is this rank's part of the sum.

        ``flat`` is read until then. Sums go in the order of ranks, the same on every path.

        Args:
            flat: on all ranks of the same size.
            is_awaited: the caller waits at once, and never asks `Pending.is_done`.
        """
        self._count("reduce", _others(flat.nbytes, self.num_shards))
        if not flat.is_cpu:
            part = torch.empty_like(flat[: flat.numel() // self.num_shards])
            works = [dist.reduce_scatter_tensor(part, flat, group=self._shard, async_op=True)]
            return Pending(works, lambda: self._replicated(part), self._reducing)
        rows = flat.view(self.num_shards, -1)
        if is_awaited:  # on gloo two thirds of all_to_all's time, and no row for itself, but it cannot be polled
            received = list(torch.empty_like(rows[1:]).unbind())
            works = [self._send(rows[peer], peer) for peer in self._peers()]
            works += [self._receive(row, peer) for row, peer in zip(received, self._peers(), strict=True)]
            received.insert(self.shard_rank, rows[self.shard_rank])
        else:
            everything = torch.empty_like(flat)
            works = [dist.all_to_all_single(everything, flat, group=self._shard, async_op=True)]
            received = list(everything.view_as(rows).unbind())
        return Pending(works, lambda: self._replicated(_sum(received)), self._reducing)

    def _replicated(self, part: Tensor) -> Pending | Tensor:
        if self._replicate is None:
            return part
        self._count("reduce", 2 * _others(part.nbytes, self.world_size // self.num_shards))
        work = dist.all_reduce(part, group=self._replicate, async_op=True)
        return Pending([work], lambda: part, self._reducing)

    def start_gather(self, flat: Tensor) -> Pending:
        """Fill ``flat``, ``[num_shards * n]``, in place from the rank that owns each part; the result is ``flat``."""
        self._count("gather", _others(flat.nbytes, self.num_shards))
        rows = flat.view(self.num_shards, -1)
        if not flat.is_cpu:
            works = [dist.all_gather_into_tensor(flat, rows[self.shard_rank], group=self._shard, async_op=True)]
        else:  # less than half the time of gloo's all_gather
            works = [self._send(rows[self.shard_rank], peer) for peer in self._peers()]
            works += [self._receive(rows[peer], peer) for peer in self._peers()]
        return Pending(works, lambda: flat, self._gathering)

    def _reducing(self) -> AbstractContextManager[None]:
        return self._waiting("the reduction of gradients")

    def _gathering(self) -> AbstractContextManager[None]:
        return self._waiting("the gather of parameters")

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return waiting(f"{what} of {name_of(self.address)}", self._rank_sets[0], self._timeout)

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.num_shards) if peer != self.shard_rank]

    def _send(self, tensor: Tensor, peer: int) -> Any:
        return dist.isend(tensor, group=self._shard, group_dst=peer)

    def _receive(self, tensor: Tensor, peer: int) -> Any:
        return dist.irecv(tensor, group=self._shard, group_src=peer)

    def sum_shares_(self, parts: Sequence[tuple[Tensor | None, Sequence[Any]]]) -> None:
        """Sum each part over its groups (of another mesh than this one), in place, those of equal groups together.

        Args:
            parts: with their groups; a part that is None is another rank's.
        """
        together: dict[tuple[Any, ...], list[Tensor]] = {}
        for part, groups in parts:
            if part is not None:
                together.setdefault((part.dtype, part.device, *groups), []).append(part)
        for (_, _, *groups), tensors in together.items():
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            for group in groups:
                self._count("share", 2 * _others(flat.nbytes, dist.get_world_size(group)))
                dist.all_reduce(flat, group=group)
            for tensor, total in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))

    # -- values

    def total_norm(self, norm: Tensor, norm_type: float, *, is_sharded: bool) -> Tensor:
        """Return the norm over all ranks from the norm of what this rank holds.

        Args:
            norm: 0-d, float64.
            norm_type: positive, or ``inf``.
            is_sharded: every rank of a bucket holds another part; else all hold the same.
        """
        groups = [self._shard] if is_sharded and self.num_shards > 1 else []
        groups += [self.norm_group] if self.norm_group is not None else []
        return self.norm_over(norm, norm_type, groups)

    def norm_over(self, norm: Tensor, norm_type: float, groups: Iterable[Any]) -> Tensor:
        """Return the norm over one process group after the other; see `total_norm`."""
        for group in groups:
            norm = self._norm_over(norm, norm_type, group)
        return norm

    def _norm_over(self, norm: Tensor, norm_type: float, group: Any) -> Tensor:
        self._count("scalar", 2 * _others(8, dist.get_world_size(group)))
        if math.isfinite(norm_type):
            total = norm.pow(norm_type)
            dist.all_reduce(total, group=group)
            return total.pow(1.0 / norm_type)
        is_nan = torch.isnan(norm)  # a MAX may lose it
        largest = torch.stack([torch.where(is_nan, torch.full_like(norm, math.inf), norm), is_nan.to(norm.dtype)])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        return torch.where(largest[1] > 0, torch.full_like(norm, math.nan), largest[0])

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Fill each tensor, dense in memory, with the values of the first rank."""
        if self.world_size == 1:
            return
        source = dist.get_process_group_ranks(self._all)[0]
        works = []
        for tensor in tensors:
            if tensor.numel():
                flat = tensor.detach().as_strided((tensor.numel(),), (1,))
                self._count("broadcast", flat.nbytes if self.rank == 0 else 0)
                works.append(dist.broadcast(flat, source, group=self._all, async_op=True))
        with self._waiting("the broadcast of parameters"):
            for work in works:
                work.wait()

    # -- control

    def objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (picklable), by rank; all are in one `together`, or meeting."""
        if self.channel is None:
            return [value]
        self.tally.add("control")
        return self.channel.objects(value)

    def agree(self, topic: str, problem: str | None) -> None:
        """Raise a RuntimeError that quotes it if another rank has a problem; one that has raises its own after this.

        Args:
            topic: what all ranks are in, the same on all.
            problem: of this one, in words.
        """
        if self.channel is not None:
            is_known = self.address[1] >= 0
            self.channel.agree(f"{topic} of {name_of(self.address)}" if is_known else topic, problem, self.tally)

    @contextlib.contextmanager
    def together(self, topic: str) -> Iterator[None]:
        """Raise on all ranks what the body raises on one; all ranks run it, and nobody leaves before all did.

        Args:
            topic: the method that all ranks call, for ranks that are elsewhere.
        """
        try:
            yield
        except Exception as error:  # named nowhere else: a frame of its own traceback that holds it is a cycle
            self.agree(topic, in_words(error))
            raise
        self.agree(topic, None)

    def send_bytes(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous CPU tensor to rank ``to``, on the control group."""
        self._count("control", tensor.nbytes)
        dist.send(tensor, group=self._control, group_dst=to)

    def receive_bytes(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous CPU tensor with what rank ``source`` sends, on the control group."""
        self.tally.add("control")
        dist.recv(tensor, group=self._control, group_src=source)

    def _count(self, kind: str, nbytes: int) -> None:
        self.tally.add(kind, nbytes)
        if self._groups is not None and kind != "control":
            self._groups.num_started += 1


def in_words(error: Exception) -> str:
    """Return ``error`` as other ranks are told of it."""
    return f"{type(error).__name__}: {error}"


def groups_over(meshes: Iterable[Any]) -> list[Any]:
    """Return process groups that connect all ranks of ``meshes``: of each dimension, equal ones once."""
    groups: dict[tuple[int, ...], Any] = {}
    for mesh in meshes:
        for dim in range(mesh.ndim):
            if mesh.size(dim) > 1:
                group = mesh.get_group(dim)
                groups.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return list(groups.values())


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order given. Only the first is written, unless it is the caller's own memory."""
    total = parts[0] + parts[1] if len(parts) > 1 else parts[0].clone()
    for part in parts[2:]:
        total += part
    return total


def _others(nbytes: int, num_ranks: int) -> int:
    return nbytes * (num_ranks - 1) // num_ranks


def _ranks_of(group: Any) -> Ranks:
    return tuple(sorted(dist.get_process_group_ranks(group)))
