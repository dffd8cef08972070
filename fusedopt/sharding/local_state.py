"""What of one parameter's state belongs to a rank: cut out of whole tensors, labelled in its own state dict.

    ... -> step -> write-back -> gather -> [checkpoint]

State is nested containers with tensors anywhere. Under a shard that cuts through a parameter, this
rank's tensors for it are 1-D slices in memory order. A slice says in a state dict which elements it is,
``{"1024:2048": tensor}``, so that the parts of several ranks neither look whole nor take each other's place.

Knows nothing of ranks or optimizers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils.dlpack import from_dlpack

from fusedopt.nested import map_leaves
from fusedopt.sharding.checkpoint_parts import (
    CheckpointPart,
    Region,
    extract,
    from_checkpoint,
    region_in,
    to_checkpoint,
)
from fusedopt.sharding.dtensor import is_dtensor, like, local_of
from fusedopt.sharding.layout import Span

_LABEL = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True)
class Cut:
    """Which elements of a parameter are this rank's.

    Args:
        shape: of the parameter; of a DTensor, of its local part, as the rest.
        strides: of the parameter in flat memory, dense.
        span: elements in memory order; None where another rank has the parameter.
        region: of a DTensor, where its local part lies in the whole, if that is a block.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: Span | None
    region: Region | None = None

    @staticmethod
    def whole(shape: Sequence[int], strides: Sequence[int]) -> Cut:
        """Return the cut that leaves everything here."""
        return Cut(tuple(shape), tuple(strides), Span(0, math.prod(shape)))

    @property
    def is_partial(self) -> bool:
        """Whether some elements are here and some are not."""
        return self.span is not None and self.span.numel != math.prod(self.shape)

    def is_slice(self, tensor: Tensor) -> bool:
        """Return whether a tensor in this rank's state is a slice of one of the parameter's shape."""
        return self.is_partial and self.span is not None and tensor.shape == (self.span.numel,)


def _each(value: Any, act: Callable[[Tensor], Any]) -> Any:
    return map_leaves(lambda _, leaf: act(leaf) if isinstance(leaf, Tensor) else leaf, value)


def label(value: Any, cut: Cut) -> Any:
    """Return state with ``{"start:end": slice}`` in the place of every slice; what is whole stays as it is."""
    span = cut.span
    if span is None or not cut.is_partial:
        return value
    return _each(value, lambda tensor: {f"{span.start}:{span.end}": tensor} if cut.is_slice(tensor) else tensor)


def labelled(value: Any) -> tuple[Span, Tensor] | None:
    """Return the elements and the slice, if ``value`` is what `label` makes of one."""
    if type(value) is not dict or len(value) != 1:
        return None
    ((key, tensor),) = value.items()
    found = _LABEL.fullmatch(key) if isinstance(key, str) and isinstance(tensor, Tensor) else None
    return (Span(int(found[1]), int(found[2])), tensor) if found is not None else None


def wrap(value: Any, param: Tensor, cut: Cut) -> Any:
    """Return state as ``torch.distributed.checkpoint`` takes it; shares memory with ``value``.

    Every slice becomes a `CheckpointPart`, and what has the shape of a DTensor's local part a DTensor.
    """

    def act(tensor: Tensor) -> Tensor:
        if cut.is_slice(tensor):
            return checkpoint_part(tensor, cut)
        if not is_placed or tuple(tensor.shape) != cut.shape:
            return tensor
        # A storage object of its own: torch 2.13 cannot deepcopy two DTensors that share one, as main_params do.
        return like(param, from_dlpack(tensor.detach()))

    is_placed = is_dtensor(param)
    return _each(value, act) if is_placed or cut.is_partial else value


def checkpoint_part(tensor: Tensor, cut: Cut) -> CheckpointPart:
    """Return a slice, or what stands for one on a rank that has none, as ``torch.distributed.checkpoint`` takes it."""
    return to_checkpoint(tensor, cut.shape, cut.strides, cut.span, cut.region)


def take(value: Any, cut: Cut) -> Any:
    """Return what is this rank's of saved state: a whole parameter's, this rank's own labelled part, or wrapped.

    Only tensors of the parameter's shape are cut, into memory of their own; everything else is as it was.

    Raises:
        ValueError: if it is the part of another layout.
    """
    return map_leaves(lambda _, leaf: _take(leaf, cut), value, is_leaf=lambda value: labelled(value) is not None)


def _take(value: Any, cut: Cut) -> Any:
    if is_dtensor(value):  # of torch.distributed.checkpoint, or a stock optimizer: placed as the parameter is
        return _take(local_of(value), replace(cut, region=None))
    found = labelled(value)
    if found is not None:
        if found[0] != cut.span:
            here = f"elements {cut.span.start}:{cut.span.end}" if cut.span is not None else "none of it"
            raise ValueError(
                f"a part of it was saved, elements {found[0].start}:{found[0].end}, and this rank has {here}. {REMEDY}"
            )
        return found[1]
    if isinstance(value, CheckpointPart):
        return from_checkpoint(value, cut.shape, cut.strides, cut.span, cut.region)
    if not isinstance(value, Tensor):
        return value
    if cut.region is not None and value.shape == cut.region[0]:
        value = region_in(value, cut.region[1], cut.shape)
    is_cut = cut.is_partial and cut.span is not None and value.shape == cut.shape
    return extract(value, cut.strides, cut.span) if is_cut and cut.span is not None else value


REMEDY = (
    "Parts fit the layout they were saved with. For any other, save the whole: call "
    "optimizer.consolidate_state_dict() on all ranks before state_dict(); or save and load with "
    "torch.distributed.checkpoint, which redistributes"
)
