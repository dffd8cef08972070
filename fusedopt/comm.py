"""The ranks that train one model together, and every collective fusedopt runs.

    parameters -> layout -> buffers -> arrival -> [reduction] -> [clip] -> step -> write-back -> [gather]

The only place that calls torch.distributed for communication. Chooses per backend: on CPU (gloo) shards
travel directly from rank to rank and are summed locally, on devices through the backend's own collectives.
Data has groups of its own, and control messages a gloo group of theirs, so that they never meet each other, nor
what the training loop communicates.

Knows nothing of parameters, buckets or optimizers. At one rank there is nothing to do.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_own_groups: dict[tuple[tuple[int, ...], str | None], tuple[Any, Any]] = {}
"""By global ranks and backend: (the default group when it was made, the group)."""


class Pending:
    """A reduction or gather on its way.

    Args:
        works: what torch.distributed returned; all have to finish.
        then: called once they did; returns the next `Pending`, or the result.
    """

    def __init__(self, works: Sequence[Any], then: Callable[[], Any]) -> None:
        self._works = list(works)
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
        counts: collectives started, by kind: reduce, gather, scalar, broadcast, control.
        nbytes: bytes this rank sends in them, by kind: an all-reduce of n bytes sends 2 (W-1)/W n, a
            reduce-scatter or gather (W-1)/W n.

    Raises:
        ValueError: if both a group and a mesh are given, a mesh has more than two dimensions, or this process is in
            none of them.
        RuntimeError: if a group is given and torch.distributed is not initialised.
    """

    _all: Any
    _shard: Any
    _replicate: Any
    _control: Any

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
        else:
            group = process_group if process_group is not None else dist.group.WORLD
            if dist.get_rank(group) < 0:
                raise ValueError(
                    f"rank {dist.get_rank()} is not in the process group it was given; give each rank the group it is "
                    "in"
                )
            self._all = self._shard = _own_group(dist.get_process_group_ranks(group))
        self._place()

    @staticmethod
    def alone(norm_group: Any = None) -> DataParallelGroup:
        """Return this process by itself: somebody else reduces its gradients."""
        group = DataParallelGroup.__new__(DataParallelGroup)
        group._begin(norm_group)
        return group

    def _begin(self, norm_group: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()
        self.norm_group = norm_group
        self.rank, self.world_size, self.shard_rank, self.num_shards = 0, 1, 0, 1
        self._all = self._shard = self._replicate = self._control = None

    def _take_mesh(self, mesh: Any) -> None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"device_mesh has {mesh.ndim} dimensions; needed are 1 or 2, (replicate, shard). Give the sub-mesh of "
                "the data-parallel dimensions: mesh['replicate', 'shard']"
            )
        if mesh.ndim == 1 or mesh.size(0) == 1:
            self._all = self._shard = _own_group(dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)))
            return
        ranks = [int(rank) for rank in mesh.mesh.flatten()]
        self._all = _own_group(ranks)
        self._shard, self._replicate = (_own_group(dist.get_process_group_ranks(mesh.get_group(i))) for i in (1, 0))

    def _place(self) -> None:
        self.rank, self.world_size = dist.get_rank(self._all), dist.get_world_size(self._all)
        self.shard_rank, self.num_shards = dist.get_rank(self._shard), dist.get_world_size(self._shard)
        if self.world_size > 1:
            self._control = _own_group(dist.get_process_group_ranks(self._all), "gloo")

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallelGroup:
        return self  # groups of processes are what they are

    def __reduce__(self) -> Any:
        if self.world_size > 1:
            raise TypeError(
                "an optimizer that several ranks share cannot be pickled: process groups exist in their processes "
                "only. Save optimizer.state_dict(), and load it into an optimizer made there"
            )
        return DataParallelGroup, ()

    # -- buckets

    def start_all_reduce(self, flat: Tensor) -> Pending:
        """Sum ``flat`` over all ranks, in place; the result is ``flat``."""
        self._count("reduce", 2 * _others(flat.nbytes, self.world_size))
        work = dist.all_reduce(flat, group=self._all, async_op=True)
        return Pending([work], lambda: flat)

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
            return Pending(works, lambda: self._replicated(part))
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
        return Pending(works, lambda: self._replicated(_sum(received)))

    def _replicated(self, part: Tensor) -> Pending | Tensor:
        if self._replicate is None:
            return part
        self._count("reduce", 2 * _others(part.nbytes, self.world_size // self.num_shards))
        work = dist.all_reduce(part, group=self._replicate, async_op=True)
        return Pending([work], lambda: part)

    def start_gather(self, flat: Tensor) -> Pending:
        """Fill ``flat``, ``[num_shards * n]``, in place from the rank that owns each part; the result is ``flat``."""
        self._count("gather", _others(flat.nbytes, self.num_shards))
        rows = flat.view(self.num_shards, -1)
        if not flat.is_cpu:
            works = [dist.all_gather_into_tensor(flat, rows[self.shard_rank], group=self._shard, async_op=True)]
        else:  # less than half the time of gloo's all_gather
            works = [self._send(rows[self.shard_rank], peer) for peer in self._peers()]
            works += [self._receive(rows[peer], peer) for peer in self._peers()]
        return Pending(works, lambda: flat)

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
        for work in works:
            work.wait()

    # -- control

    def exchange(self, message: Tensor) -> Tensor:
        """Return the element-wise maximum of ``message``, uint8 on CPU and of one size, over all ranks."""
        self._count("control", 2 * _others(message.nbytes, self.world_size))
        dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._control)
        return message

    def objects(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` (picklable), by rank."""
        if self.world_size == 1:
            return [value]
        self.counts["control"] += 1
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._control)
        return values

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all ranks what the body raises on one; all ranks run it, and nobody leaves before all did."""
        try:
            yield
        except Exception as error:  # named nowhere else: a frame of its own traceback that holds it is a cycle
            self._agree(in_words(error))
            raise
        self._agree(None)

    def _agree(self, problem: str | None) -> None:
        if self.world_size > 1 and int(self.exchange(torch.tensor([problem is not None], dtype=torch.uint8))):
            self.raise_others(problem)

    def raise_others(self, problem: str | None) -> None:
        """Raise a RuntimeError that quotes ``problem`` on the ranks that have none; those that have raise their own.

        All ranks call this, if one has a problem.
        """
        found = self.objects(problem)
        if problem is None:
            rank, text = next((rank, text) for rank, text in enumerate(found) if text is not None)
            raise RuntimeError(f"rank {rank} refused, so all ranks do: {text}")

    def send_bytes(self, tensor: Tensor, to: int) -> None:
        """Send a contiguous CPU tensor to rank ``to``, on the control group."""
        self._count("control", tensor.nbytes)
        dist.send(tensor, group=self._control, group_dst=to)

    def receive_bytes(self, tensor: Tensor, source: int) -> None:
        """Fill a contiguous CPU tensor with what rank ``source`` sends, on the control group."""
        self.counts["control"] += 1
        dist.recv(tensor, group=self._control, group_src=source)

    def _count(self, kind: str, nbytes: int) -> None:
        self.counts[kind] += 1
        self.nbytes[kind] += nbytes


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


def _own_group(ranks: Sequence[int], backend: str | None = None) -> Any:
    """Return a group of ``ranks`` for fusedopt alone: one for each set and backend, as long as the default lives.

    What the loop itself communicates, between a backward and a step, may come in another order on a rank that had
    no gradient; on a group of its own it never meets ours.
    """
    key = (tuple(ranks), backend)
    default, group = _own_groups.get(key, (None, None))
    if default is not dist.group.WORLD:
        with _named(ranks, f"fusedopt_{backend}_{'_'.join(map(str, ranks))}"):
            group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
        _own_groups[key] = (dist.group.WORLD, group)
    return group


@contextlib.contextmanager
def _named(ranks: Sequence[int], name: str) -> Iterator[None]:
    """Let the group that ``ranks`` alone make in the body be called ``name``, by which they find each other.

    torch puts into it how many groups a rank is in. Where those differ (a mesh over some ranks, a group of the first
    rank of each node), ranks would wait for each other forever.
    """
    c10d: Any = dist.distributed_c10d
    torchs = getattr(c10d, "_hash_ranks_to_str", None)  # private to torch 2.13; another release may have none
    if torchs is None:
        yield
        return
    c10d._hash_ranks_to_str = lambda others: name if list(others) == list(ranks) else torchs(others)
    try:
        yield
    finally:
        c10d._hash_ranks_to_str = torchs
