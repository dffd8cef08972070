"""Put the parts of a sharded state together on one rank.

    ... -> step -> write-back -> gather -> [checkpoint]

First all ranks learn what each of them has, tensors left out; from that every rank knows the same list of transfers.
Then tensors travel one by one, as bytes, and land in their place: beside the result there is never more than one.

Knows nothing of optimizers or of the form of a state dict beyond `parts.label`.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedopt.inner.narrow_state import CODES, is_narrow, unlabelled, widen
from fusedopt.inner.plain import CONTAINERS_READ, find_objects
from fusedopt.nested import Path, items_of, leaves, map_leaves
from fusedopt.sharding.checkpoint_parts import assemble_
from fusedopt.sharding.comm import DataParallelGroup
from fusedopt.sharding.layout import Span
from fusedopt.sharding.local_state import Cut, labelled


@dataclass(frozen=True)
class _TensorInfo:
    """One tensor of one rank: a slice of what is whole nowhere, or whole where ``span`` is None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    span: Span | None = None


@dataclass(frozen=True)
class _Sealed:
    """An object with all that is in it; its tensors arrive on the CPU."""

    raw: bytes

    @staticmethod
    def of(value: Any) -> _Sealed:
        file = io.BytesIO()
        torch.save(value, file)
        return _Sealed(file.getvalue())

    def open(self) -> Any:
        return torch.load(io.BytesIO(self.raw), map_location="cpu", weights_only=False)  # from a rank of this job


@dataclass(frozen=True)
class _Offer:
    """What one rank tells of its state: the same nested containers, with a `_TensorInfo` for each tensor."""

    rank: int
    shard_rank: int
    to: int
    state: dict[Any, Any]


def consolidate(
    comm: DataParallelGroup, state: Mapping[Any, Any], cut: Callable[[int], Cut], to: int
) -> dict[Any, Any] | None:
    """Return whole state on rank ``to``, on the CPU; None on the others. All ranks call it.

    Args:
        comm: the ranks.
        state: this rank's, by position of the parameter, labelled; other keys are taken from one rank.
        cut: gives shape and strides of a parameter.
        to: the rank that gets it, the same everywhere.

    Raises:
        RuntimeError: if ranks have different state for one parameter, or named different ranks; on all of them.
    """
    with comm.together("consolidate_state_dict()"):  # an object may be one that cannot be sent
        described = {key: _describe(value) for key, value in state.items()}
    offers = comm.objects(_Offer(comm.rank, comm.shard_rank, to, described))
    if {offer.to for offer in offers} != {to}:
        raise RuntimeError(
            f"consolidate_state_dict: ranks named different ones, {[offer.to for offer in offers]}; name the same `to`"
        )
    senders: dict[int, _Offer] = {}  # of the replicas of a part, the rank that wants it, or else the first
    for offer in [offers[to], *offers]:
        senders.setdefault(offer.shard_rank, offer)
    keys = {key: None for offer in offers for key in offer.state}
    plans = {key: _Plan(key, [o for o in senders.values() if key in o.state], cut) for key in sorted(keys, key=_order)}
    transfer = _Transfer(comm, state, to)
    whole = {key: plan.carry_out(transfer) for key, plan in plans.items()}
    return whole if comm.rank == to else None


def check_alike(comm: DataParallelGroup, others: Mapping[int, Mapping[Any, Any]]) -> None:
    """Raise if state under keys that are no parameters differs between ranks: which one is right, nobody knows.

    Args:
        comm: the ranks, which all call it.
        others: by number of the inner optimizer.

    Raises:
        RuntimeError: naming the keys, on all ranks.
    """
    keys = [key for values in others.values() for key in values]
    if len(set(comm.objects(_digest(others)))) > 1:
        raise RuntimeError(
            f"consolidate_state_dict: an inner optimizer keeps state under {sorted(map(str, keys))}, which are no "
            "parameters, and it differs between ranks. Save every rank's own optimizer.state_dict() and load it on the "
            "same rank"
        )


def _digest(value: Any) -> str:
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype}{tuple(value.shape)}{hashlib.sha256(raw).hexdigest()}"
    items = items_of(value)
    return repr(value) if items is None else repr([(repr(key), _digest(item)) for key, item in items])


def _order(key: Any) -> tuple[bool, Any]:
    return (False, key) if isinstance(key, int) else (True, str(key))


def _describe(value: Any) -> Any:
    """Return state with a `_TensorInfo` for each tensor, sealed where it takes more than builtins to describe it."""

    def describe(_: Path, leaf: Any) -> Any:
        if is_narrow(leaf):  # travels as it is without narrowing
            found = labelled(leaf[CODES])
            span, codes = found if found is not None else (None, leaf[CODES])
            return _TensorInfo(tuple(codes.shape), torch.float32, span)
        found = labelled(leaf)
        if found is not None:
            return _TensorInfo(tuple(found[1].shape), found[1].dtype, found[0])
        if isinstance(leaf, Tensor):
            return _TensorInfo(tuple(leaf.shape), leaf.dtype)
        return _Sealed.of(leaf) if any(find_objects(leaf, "")) else leaf

    def is_leaf(value: Any) -> bool:
        return labelled(value) is not None or is_narrow(value) or type(value) not in CONTAINERS_READ

    return map_leaves(describe, value, is_leaf=is_leaf)


def _infos_in(value: Any) -> dict[Path, _TensorInfo]:
    return {path: leaf for path, leaf in leaves(value) if isinstance(leaf, _TensorInfo)}


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


class _Plan:
    """How the state under one key is put together; the same on all ranks.

    Args:
        key: position of the parameter, or another key.
        offers: of the ranks that have some of it; at least one.
        cut: see `consolidate`.
    """

    def __init__(self, key: Any, offers: list[_Offer], cut: Callable[[int], Cut]) -> None:
        self._key = key
        self._cut = cut
        self._infos = {offer.rank: _infos_in(offer.state[key]) for offer in offers}
        # The rank with most elements decides what is a slice: in a part of one element everything looks like one.
        sizes = {offer.rank: sum(t.span.numel for t in self._infos[offer.rank].values() if t.span) for offer in offers}
        self._leader = max(offers, key=lambda offer: sizes[offer.rank])
        for path, info in self._infos[self._leader.rank].items():
            if info.span is not None:
                self._check(path, info)

    def _check(self, path: Path, info: _TensorInfo) -> None:
        found = {rank: infos.get(path) for rank, infos in self._infos.items()}
        spans = sorted((t.span.start, t.span.end) for t in found.values() if t is not None and t.span is not None)
        ends = [0, *(end for _, end in spans)]
        numel = math.prod(self._cut(self._key).shape)
        covers = [start for start, _ in spans] == ends[:-1] and ends[-1] == numel
        if not covers or any(t is None or t.dtype is not info.dtype for t in found.values()):
            raise RuntimeError(
                f"consolidate_state_dict: {path} of parameter number {self._key} is {found} on ranks {list(found)}; "
                "needed are parts of one tensor. Make the same steps on all ranks, and load state on all of them"
            )

    def carry_out(self, transfer: _Transfer) -> Any:
        def fill(path: Path, leaf: Any) -> Any:
            if isinstance(leaf, _TensorInfo):
                return self._fetch(leaf, path, transfer)
            return leaf.open() if isinstance(leaf, _Sealed) else leaf

        return map_leaves(fill, self._leader.state[self._key])

    def _fetch(self, info: _TensorInfo, path: Path, transfer: _Transfer) -> Tensor | None:
        where = (self._key, *path)
        if info.span is None:
            return transfer.fetch(where, self._leader.rank, info)
        cut = self._cut(self._key)
        # Contiguous, whatever the parameter is: torch's broadcast_from_rank0 mixes up elements of other strides.
        whole = torch.empty(cut.shape, dtype=info.dtype) if transfer.is_target else None
        for rank, infos in self._infos.items():
            part = transfer.fetch(where, rank, infos[path])
            if whole is not None and part is not None:
                span = infos[path].span or Span(0, 0)
                assemble_(whole, part, cut.strides, span)
        return whole


class _Transfer:
    """Carries tensors to one rank.

    Args:
        comm: the ranks.
        state: this rank's own.
        to: the rank they are for.
    """

    def __init__(self, comm: DataParallelGroup, state: Mapping[Any, Any], to: int) -> None:
        self._comm = comm
        self._state = state
        self._to = to
        self.is_target = comm.rank == to

    def fetch(self, where: Path, rank: int, info: _TensorInfo) -> Tensor | None:
        """Return, on the rank they are for, the tensor that ``rank`` has there; None on the others."""
        if self._comm.rank not in (rank, self._to):
            return None
        if self._comm.rank != rank:
            tensor = torch.empty(info.shape, dtype=info.dtype)
            if tensor.numel():
                self._comm.receive_bytes(tensor.view(-1).view(torch.uint8), rank)
            return tensor
        value = _at(self._state, where)
        if is_narrow(value):
            value = widen(unlabelled(value))
        found = labelled(value)
        tensor = (found[1] if found is not None else value).detach()
        if rank == self._to:
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        if tensor.numel():
            self._comm.send_bytes(tensor.cpu().contiguous().view(-1).view(torch.uint8), self._to)
        return None
