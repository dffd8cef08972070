"""One rank's part of a parameter-shaped tensor: cut out, put back, and shown to torch's checkpoints.

    ... -> step -> write-back -> gather -> [checkpoint]

Under a shard a rank owns a *span* of a parameter's elements in memory order. The
*part* is what it keeps of a tensor shaped like the parameter: 1-D, ``span.numel``
elements. In a checkpoint the same elements are a few N-D *rectangles* of the full
shape, so that any other number of ranks, and a stock optimizer, can read them.

Everywhere ``shape`` and ``strides`` are the parameter's, dense: they say what memory
order is (channels_last and contiguous differ); a full tensor may have strides of its
own. Of a DTensor they are the local part's, and its *region* says where that lies: the
whole shape, and where in it the part begins.

Pure functions on tensors: no process group, and nothing of ``torch.distributed`` is
imported before its checkpointing asks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fusedopt._torch_private import (
    aten_to_copy,
    checkpoint_content,
    checkpoint_info,
    is_loading_checkpoint,
    make_wrapper_subclass,
)
from fusedopt.sharding.layout import Span

_CHECKPOINT = "torch.distributed.checkpoint"
_Ints = Sequence[int]
Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of a whole, and where in it a part begins."""


@dataclass(frozen=True)
class Rectangle:
    """A block of a parameter-shaped tensor whose elements are consecutive in a part.

    Args:
        offsets: of its first element, one per dimension of the parameter.
        sizes: one per dimension of the parameter.
        span: its elements, counted from the start of the part.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    span: Span


def _numel(shape: _Ints) -> int:
    return math.prod(shape)


def memory_order(shape: _Ints, strides: _Ints) -> tuple[int, ...]:
    """Return the dimensions from the slowest to the fastest: ``permute`` by it makes the parameter contiguous.

    Raises:
        ValueError: if a tensor of this shape and strides is not dense (overlaps itself, or has gaps).
    """
    if len(shape) != len(strides):
        raise ValueError(f"{len(shape)} sizes ({tuple(shape)}) but {len(strides)} strides; give one stride for each")
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim])))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected and _numel(shape):
            raise ValueError(
                f"shape {tuple(shape)} with strides {tuple(strides)} is not dense: elements overlap or have gaps "
                "between them. Make the parameter dense (`.clone()`) before it is wrapped"
            )
        expected *= shape[dim]
    return order


def rectangles(shape: _Ints, strides: _Ints, span: Span) -> tuple[Rectangle, ...]:
    """Return the blocks that elements ``span`` of a parameter cover, in memory order.

    They are disjoint and cover the span: one for a whole parameter, none for an empty span, never more than
    ``2 * dims - 1``.

    Raises:
        ValueError: if the parameter is not dense or the span is not inside it.
    """
    order = memory_order(shape, strides)
    if not 0 <= span.start <= span.end <= _numel(shape):
        raise ValueError(
            f"span [{span.start}, {span.end}) is not inside the {_numel(shape)} elements of shape {tuple(shape)}; "
            "give elements of this one parameter"
        )
    place = _inverse(order)
    found, start = [], 0
    for offsets, sizes in _boxes([shape[dim] for dim in order], span.start, span.end):
        end = start + _numel(sizes)
        by_dim = (tuple(offsets[p] for p in place), tuple(sizes[p] for p in place))
        found.append(Rectangle(*by_dim, Span(start, end)))
        start = end
    return tuple(found)


def _inverse(order: _Ints) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _boxes(shape: _Ints, start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements ``[start, end)`` of a row-major array into a partial row, whole rows, and a partial row."""
    if start == end:
        return
    if not shape:
        yield (), ()
        return
    inner = shape[1:]
    row = _numel(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(end, row)
    if head:
        stop = tail if first == last else row
        yield from (((first, *offsets), (1, *sizes)) for offsets, sizes in _boxes(inner, head, stop))
        if first == last:
            return
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from (((last, *offsets), (1, *sizes)) for offsets, sizes in _boxes(inner, 0, tail))


def views(part: Tensor, shape: _Ints, strides: _Ints, span: Span) -> list[Tensor]:
    """Return views of ``part`` (``[span.numel]``, contiguous), one per rectangle and of its sizes.

    Raises:
        ValueError: if part, span and parameter do not fit each other.
    """
    if part.shape != (span.numel,) or not part.is_contiguous():
        raise ValueError(
            f"a part with shape {tuple(part.shape)} and strides {part.stride()} cannot hold span "
            f"[{span.start}, {span.end}); give a contiguous 1-D tensor of {span.numel} elements"
        )
    order = memory_order(shape, strides)
    return [
        part[block.span.start : block.span.end].view([block.sizes[dim] for dim in order]).permute(_inverse(order))
        for block in rectangles(shape, strides, span)
    ]


def _pairs(full: Tensor, part: Tensor, strides: _Ints, span: Span) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield views of the same elements of ``full`` and of ``part``, block by block."""
    in_part = views(part, full.shape, strides, span)
    for block, view in zip(rectangles(full.shape, strides, span), in_part, strict=True):
        yield region_in(full, block.offsets, block.sizes), view


def region_in(full: Tensor, begin: _Ints, shape: _Ints) -> Tensor:
    """Return the view of ``full`` that begins at ``begin`` and has ``shape``."""
    return full[tuple(slice(start, start + size) for start, size in zip(begin, shape, strict=True))]


@torch.no_grad()
def extract(full: Tensor, strides: _Ints, span: Span) -> Tensor:
    """Copy the part ``span`` out of a full tensor (the parameter's shape, any strides).

    Returns:
        ``[span.numel]``, the dtype and device of ``full``, memory of its own.

    Raises:
        ValueError: if the parameter is not dense or the span is not inside it.
    """
    part = full.new_empty(span.numel)
    for in_full, in_part in _pairs(full, part, strides, span):
        in_part.copy_(in_full)
    return part


@torch.no_grad()
def assemble_(full: Tensor, part: Tensor, strides: _Ints, span: Span) -> None:
    """Write a part into its place in a full tensor; the other elements stay.

    Args:
        full: the parameter's shape, any strides. Written.
        part: ``[span.numel]``, contiguous; another dtype or device is converted. Read.
        strides: of the parameter.
        span: elements in memory order.

    Raises:
        ValueError: if part, span and parameter do not fit each other.
    """
    for in_full, in_part in _pairs(full, part, strides, span):
        in_full.copy_(in_part)


class CheckpointPart(Tensor):
    """A part that ``torch.distributed.checkpoint`` saves and loads as this rank's of the full tensor.

    Has the full tensor's shape, holds this rank's elements only, and shares memory with the part: loading
    fills that in place. Survives copies between devices; arithmetic raises. Made by `to_checkpoint`.
    """

    # Ordinary attributes, in builtins: torch's staging for async_save rebuilds a subclass from its __dict__.
    _part: Tensor
    _local: tuple[int, ...]
    _strides: tuple[int, ...]
    _range: tuple[int, int]
    _begin: tuple[int, ...]

    @staticmethod
    def __new__(
        cls: type[CheckpointPart], part: Tensor, shape: _Ints, strides: _Ints, span: Span, region: Region
    ) -> CheckpointPart:
        """Make the outer shell; `to_checkpoint` has checked the arguments."""
        shell: CheckpointPart = make_wrapper_subclass(cls, region[0], dtype=part.dtype, device=part.device)
        return shell

    def __init__(self, part: Tensor, shape: _Ints, strides: _Ints, span: Span, region: Region) -> None:
        super().__init__()
        self._part, self._local, self._begin = part, tuple(shape), region[1]
        self._strides, self._range = tuple(strides), (span.start, span.end)

    def _arguments(self, part: Tensor) -> tuple[Any, ...]:
        return part, self._local, self._strides, Span(*self._range), (tuple(self.shape), self._begin)

    def _with(self, part: Tensor) -> CheckpointPart:
        return CheckpointPart(*self._arguments(part))

    def _blocks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return offsets in the full tensor and a view of the part, for every block."""
        if self.numel() and not self._part.numel():
            return []
        if self._part.shape == self._local:
            return [(self._begin, self._part)]
        span = Span(*self._range)
        blocks = views(self._part, self._local, self._strides, span)
        found = rectangles(self._local, self._strides, span)
        begins = (tuple(map(sum, zip(block.offsets, self._begin, strict=True))) for block in found)
        return list(zip(begins, blocks, strict=True))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> CheckpointPart:
        """Do to the part what checkpointing does to tensors; refuse everything else.

        Raises:
            RuntimeError: for any other operation, naming what to call instead.
        """
        act = _SUPPORTED.get(func)
        if act is None or not isinstance(args[0], cls):
            raise RuntimeError(
                f"{func} got one rank's part of a sharded optimizer's state in the form that {_CHECKPOINT} saves, and "
                "that form has no values of its own. Use optimizer.state_dict() for this rank's tensors, and "
                "optimizer.consolidate_state_dict() before it for whole ones"
            )
        return args[0]._with(act(args[0]._part, *args[1:], **(kwargs or {})))

    # torch looks these three up by name: torch/distributed/_checkpointable.py.

    def __create_write_items__(self, fqn: str, _object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._part)
        items = []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), block.size()) for offsets, block in self._blocks()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        for offsets, block in self._blocks():
            if index.offset is not None and tuple(index.offset) == offsets:
                return block
        raise ValueError(f"{index.fqn} has no block at offset {index.offset} on this rank: {self!r}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return CheckpointPart, self._arguments(self._part)

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointPart:
        return self._with(self._part.clone())

    def __repr__(self) -> str:  # type: ignore[override]
        start, end = self._range
        return f"CheckpointPart(elements [{start}, {end}) of {tuple(self.shape)}, {self.dtype} on {self.device})"


def _to(part: Tensor, **kwargs: Any) -> Tensor:
    return part.to(copy=True, **{key: kwargs[key] for key in ("dtype", "device", "non_blocking") if kwargs.get(key)})


def _new_empty(part: Tensor, _size: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(part, dtype=kwargs.get("dtype"), device=kwargs.get("device"))


_SUPPORTED: dict[Any, Callable[..., Tensor]] = {
    torch.ops.aten.detach.default: Tensor.detach,
    torch.ops.aten.clone.default: lambda part, **_: part.clone(),
    aten_to_copy: _to,
    torch.ops.aten.new_empty.default: _new_empty,
}


def to_checkpoint(
    part: Tensor, shape: _Ints, strides: _Ints, span: Span | None, region: Region | None = None
) -> CheckpointPart:
    """Wrap a part so that ``torch.distributed.checkpoint`` saves and loads it as part of the full tensor.

    Communicates nothing. Every rank of the group wraps its own; together the spans must cover the parameter
    (replicas may repeat them: torch writes equal blocks once).

    Args:
        part: ``[span.numel]``, contiguous; or, of a parameter owned whole, the parameter's shape; or, where
            this rank owns nothing, any tensor without elements, for its dtype and device. Shared, not copied.
        shape: of the parameter.
        strides: of the parameter.
        span: this rank's elements in memory order; None where it owns nothing.
        region: of a DTensor.

    Raises:
        ValueError: if part, span and parameter do not fit each other.
    """
    held = span or Span(0, 0)
    if not _numel(shape) and not part.numel():  # every rank writes it: without a writer its key is missing on load
        part = part.view(tuple(shape))
    elif part.shape != tuple(shape) or held != Span(0, _numel(shape)):
        part = part if held.numel else part.reshape(-1)
        views(part, shape, strides, held)
    memory_order(shape, strides)
    return CheckpointPart(part, shape, strides, held, region or (tuple(shape), (0,) * len(shape)))


def from_checkpoint(
    value: Tensor, shape: _Ints, strides: _Ints, span: Span | None, region: Region | None = None
) -> Tensor:
    """Return the part ``span`` of what a checkpoint, a state dict or a stock optimizer held.

    Args:
        value: what `to_checkpoint` made for this same span; or the full tensor, the parameter's shape, any strides.
        shape: of the parameter.
        strides: of the parameter.
        span: this rank's elements in memory order; None where it owns nothing.
        region: of a DTensor.

    Returns:
        The wrapped part itself (for a parameter owned whole in the shape it was wrapped with), or a new
        ``[span.numel]`` tensor cut out of a full one; no elements where the span is None.

    Raises:
        ValueError: if ``value`` is another part or another shape.
    """
    needed = span or Span(0, 0)
    whole, begin = region or (tuple(shape), (0,) * len(shape))
    if tuple(value.shape) != whole:
        raise ValueError(
            f"a tensor of shape {tuple(value.shape)} was loaded for a parameter of shape {whole}; load the "
            "checkpoint into the model and optimizer it was saved from"
        )
    if not isinstance(value, CheckpointPart):
        return extract(region_in(value, begin, shape), strides, needed)
    is_same = (Span(*value._range), value._begin, value._local) == (needed, begin, tuple(shape))
    is_same = is_same and memory_order(shape, value._strides) == memory_order(shape, strides)
    if not is_same and _numel(shape):
        raise ValueError(
            f"this rank needs elements [{needed.start}, {needed.end}) but was given {value!r}, in memory order "
            f"{value._strides} against {tuple(strides)}; load with {_CHECKPOINT} into what this optimizer's own "
            "get_optimizer_state_dict returned: it redistributes"
        )
    return value._part


def checkpoint_wants() -> str | None:
    """Return what ``torch.distributed.checkpoint`` wants of the ``state_dict()`` that calls this.

    It calls an optimizer's ``state_dict()`` like anybody else and passes nothing that says so; the callers'
    frames do, however many a user's own ``state_dict()`` puts in between.

    Returns:
        None where it is not among the callers; ``"parts"`` where it is and takes `CheckpointPart`; ``"template"``
        where it takes that and itself puts whole tensors in the place of all it knows of
        (``StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)``); ``"whole"`` where it was called with
        ``StateDictOptions(full_state_dict=True)`` and does not broadcast: it would hand parts on as if they were
        whole, or fail on keys that only some ranks have.
    """
    wants = None
    frame: FrameType | None = sys._getframe(1) if _CHECKPOINT in sys.modules else None
    while frame is not None:
        if f"{frame.f_globals.get('__name__')}.".startswith(f"{_CHECKPOINT}."):
            info = checkpoint_info(frame)
            is_whole = getattr(info, "full_state_dict", False)
            # Loading whole tensors asks for a template first, with that option switched off for the time.
            is_template = is_loading_checkpoint(frame)
            if is_whole or (is_template and not getattr(info, "broadcast_from_rank0", True)):
                return "whole"
            wants = "template" if is_template or wants == "template" else "parts"
        frame = frame.f_back
    return wants


def loaded_empty_group() -> dict[str, Any] | None:
    """Return the hyper-parameters of the group without parameters in what ``torch.distributed.checkpoint`` loads.

    torch 2.13 looks such a group up under the wrong name where it is not the last one (`_split_optim_state_dict`), and
    hands on its keys without values, or none.

    Returns:
        None where it is not among the callers of the ``load_state_dict()`` that calls this, has no such group or
        several, or was given nothing, as the ranks that a first one broadcasts to.
    """
    frame: FrameType | None = sys._getframe(1) if _CHECKPOINT in sys.modules else None
    while frame is not None:
        if is_loading_checkpoint(frame):
            groups = checkpoint_content(frame).get("param_groups", ())
            empty = [group for group in groups if not group["params"]]
            return {k: v for k, v in empty[0].items() if k != "params"} if len(empty) == 1 else None
        frame = frame.f_back
    return None
