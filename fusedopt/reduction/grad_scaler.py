"""Gradients that something else wrote into, and torch's loss scalers under a shard.

    ... -> reduction -> [unscale] -> clip -> step

Under a shard a rank sees part of the gradients, so stock `clip_grad_norm_` and `GradScaler` would let ranks diverge
in silence. `ShardedGradScaler`, which makes its one decision on all ranks, is right, and recognised.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler

from fusedopt._torch_private import OptState, scale_of, states_by_optimizer
from fusedopt.buffers.bucket import Bucket
from fusedopt.buffers.flat import Buffers
from fusedopt.gradients.arrival import WindowLost

_SHARDED_MODULE = "torch.distributed.fsdp.sharded_grad_scaler"
_MARK = "unscaled by fusedopt"

_REMEDY = (
    "clip with optimizer.clip_grad_norm_(...) or max_grad_norm, and scale fp16 losses with "
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler"
)


class Scalers:
    """Finds the loss scaler that drives an optimizer.

    Args:
        optimizer: as scalers know it, by its ``id``.
        buffers: its gradients.
    """

    def __init__(self, optimizer: Any, buffers: Buffers) -> None:
        self._key = id(optimizer)
        self._buffers = buffers
        self._found: weakref.ref[GradScaler] | None = None

    def _find(self) -> GradScaler | None:
        scaler = self._found() if self._found is not None else None
        if scaler is not None and self._key in states_by_optimizer(scaler):
            return scaler
        # A scaler tells an optimizer nothing of itself before step(); there is one in a program, and it stays.
        for candidate in gc.get_objects():
            if issubclass(type(candidate), GradScaler) and self._key in states_by_optimizer(candidate):
                self._found = weakref.ref(candidate)
                return candidate  # type: ignore[no-any-return]
        return None

    def explain(self, edited: list[Bucket]) -> NoReturn:
        """Raise, since something wrote into the main_grads of ``edited`` after the last backward.

        What a `ShardedGradScaler` did to them was undone by then, see `unscaling`.

        Raises:
            RuntimeError: naming a parameter, and what to use instead.
        """
        scaler = self._find() if self._buffers.sharding.is_sharded else None
        if scaler is not None:
            self.refuse_stock(scaler)
        name = edited[0].entries[0].slot.name
        raise WindowLost(
            f"the gradients in the bucket of parameter {name} were edited between backward and step. They are this "
            "rank's share, or under way between ranks, and an edit such as torch.nn.utils.clip_grad_norm_ is wrong in "
            f"silence: {_REMEDY}. This window is spoilt: call optimizer.zero_grad() and go on with the next"
        )

    def refuse_stock(self, scaler: GradScaler) -> None:
        """Raise if ``scaler`` decides on each rank by itself.

        Raises:
            RuntimeError: naming what to use instead.
        """
        if not hasattr(scaler, "process_group"):
            raise RuntimeError(
                "torch.amp.GradScaler decides on each rank by itself whether to step, and under a shard ranks see "
                f"different gradients; {_REMEDY}"
            )

    def check_step(self, scaler: GradScaler) -> bool:
        """Return whether gradients are to be unscaled, where ``scaler`` is about to step; see `refuse_stock`."""
        self._found = weakref.ref(scaler)
        self.refuse_stock(scaler)
        return _MARK not in states_by_optimizer(scaler)[self._key]

    @contextlib.contextmanager
    def unscaling(self, found_inf: Callable[[], bool], *, is_step: bool = False) -> Iterator[None]:
        """Run the body, in which ranks meet, and then do what ``scaler.unscale_`` cannot under a shard.

        It unscales the ``.grad`` it sees, and tells whether one is infinite. Under ``"gradients"`` there is none, under
        ``"optimizer"`` they may be under way between ranks. So its unscaling is taken back, and done anew where ranks
        have met.

        Args:
            found_inf: tells of all gradients on all ranks.
            is_step: the scaler is about to step; else only if the user called ``scaler.unscale_`` before.
        """
        scaler = self._unscaler(is_step=is_step)
        scale: Tensor | None = scale_of(scaler) if scaler is not None else None
        if scaler is None or scale is None:
            yield
            return
        inverse = scale.double().reciprocal().float()
        state = states_by_optimizer(scaler)[self._key]
        was_unscaled = state["stage"] is OptState.UNSCALED
        if was_unscaled:
            self._scale_grads_(scale)
        try:
            yield
        except BaseException:
            if was_unscaled:
                self._scale_grads_(inverse)
            raise
        state[_MARK] = True  # until scaler.update(), which makes a new one
        has_inf = found_inf()
        self._buffers.scale_grads_(inverse)
        for bucket in self._buffers.buckets:
            bucket.note_version()
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {scale.device: torch.full_like(scale, float(has_inf))}

    def _scale_grads_(self, factor: Tensor) -> None:
        untouched = [bucket for bucket in self._buffers.buckets if not bucket.was_written()]
        for entry in self._buffers.entries:
            if entry.param.grad is not None:
                entry.param.grad.mul_(factor)  # exact where the scale is a power of two, as by default
        for bucket in untouched:  # whatever else wrote into one stays an edit from outside
            bucket.note_version()

    def _unscaler(self, *, is_step: bool) -> GradScaler | None:
        """Return the scaler whose work is to be done, if there is one: the same on all ranks."""
        # Where nobody can have made one, clipping need not look for it every time.
        if not self._buffers.sharding.is_sharded or _SHARDED_MODULE not in sys.modules:
            return None
        scaler = self._find()
        if scaler is None:
            return None
        state = states_by_optimizer(scaler)[self._key]
        is_due = _MARK not in state and (is_step or state["stage"] is OptState.UNSCALED)
        return scaler if is_due else None
