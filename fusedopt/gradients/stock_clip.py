"""torch's own clipping, refused for gradients of which this rank holds a share.

    backward -> arrival -> reduction -> [torch.nn.utils.clip_grad_norm_] -> step

Under a shard it would measure that share, or zeros where the content is under way, or nothing where ``.grad`` is None,
and clip by that without a word. So its functions are watched while a sharded wrapper lives. Whoever wrote ``from
torch.nn.utils import clip_grad_norm_`` has the function itself, so it is watched from inside: torch keeps the body of
each in a closure, whose content is exchanged, and put back with the last such wrapper. Other gradients are clipped as
ever.

Knows nothing of ranks, or of what the right norm would be.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import CellType, GeneratorType
from typing import Any

import torch
from torch import Tensor

from fusedopt._torch_private import CLIP_FUNCTIONS, GET_TOTAL_NORM, clip_body
from fusedopt.buffers.flat import Buffers

_live: weakref.WeakSet[Buffers] = weakref.WeakSet()
_watched: list[tuple[CellType, Any, Any]] = []
"""The closure that holds a body, torch's body, and what stands in its place."""

_inside = threading.local()


def watch(buffers: Buffers) -> None:
    """Refuse torch's clip functions for the gradients of ``buffers`` from now on."""
    _live.add(buffers)
    weakref.finalize(buffers, _give_back).atexit = False
    if _watched:
        return
    for name in CLIP_FUNCTIONS:
        cell = clip_body(name)
        if cell is None:
            warnings.warn(
                f"torch {torch.__version__} has no torch.nn.utils.clip_grad.{name} that can be watched: under a shard "
                "its result is wrong. Clip with optimizer.clip_grad_norm_(...) or max_grad_norm",
                RuntimeWarning,
                stacklevel=2,
            )
            continue
        original = cell.cell_contents
        cell.cell_contents = watched = _watching(name, original)
        _watched.append((cell, original, watched))


def unwatch(buffers: Buffers) -> None:
    """Leave the gradients of ``buffers`` to torch's functions again."""
    _live.discard(buffers)
    _give_back()


def _give_back() -> None:
    if list(_live):  # its len() may count the one that is going
        return
    for cell, original, watched in _watched:
        if cell.cell_contents is watched:  # else somebody exchanged it once more: ours stays below, and does nothing
            cell.cell_contents = original
    _watched.clear()


def _watching(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    first = original.__code__.co_varnames[0]

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get(first)
        if given is None or not _live or getattr(_inside, "is_running", False):  # one of them calls others
            return original(*args, **kwargs)
        tensors = [given] if isinstance(given, Tensor) else list(given)
        _refuse(name, tensors)
        if tensors or not isinstance(given, GeneratorType):  # torch warns of an empty generator
            given = tensors
        args, kwargs = ((given, *args[1:]), kwargs) if args else (args, {**kwargs, first: given})
        _inside.is_running = True
        try:
            return original(*args, **kwargs)
        finally:
            _inside.is_running = False

    return watched


def _refuse(name: str, tensors: Sequence[Any]) -> None:
    ids = {id(tensor) for tensor in tensors}
    for buffers in list(_live):
        found = [e for e in buffers.entries if id(e.param) in ids or id(e.slot.main_grad) in ids]
        if not ids and name == GET_TOTAL_NORM:
            # The gradients that are not None are none: they are ours, between a backward that took them and the step.
            has_released = buffers.is_released and buffers.is_stepping
            found = [e for e in buffers.entries if e.slot.is_reduced or has_released]
        if not found:
            continue
        if buffers.is_released:
            raise RuntimeError(
                f"torch.nn.utils.{name.lstrip('_')} was given parameter {found[0].slot.name} of an optimizer with "
                'release="backward": its bucket steps inside backward, so there is nothing left to clip. Set '
                'max_grad_norm and clip_by="previous", or use release="none"'
            )
        others = f" and {len(found) - 1} other(s)" if len(found) > 1 else ""
        raise RuntimeError(
            f"torch.nn.utils.{name.lstrip('_')} was given parameter {found[0].slot.name}{others} of an optimizer with "
            f'shard="{buffers.sharding.shard}": this rank holds a share of such gradients, and .grad shows that, or '
            "zeros, or None. Clip with optimizer.clip_grad_norm_(max_norm) or max_grad_norm, which measure over all "
            'ranks; by value only shard="none" can'
        )
