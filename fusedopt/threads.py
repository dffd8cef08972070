"""Backwards that run at once, in several threads: exact for plain layers, refused where a fused layer takes part.

    loss.backward() -> [arrival] -> main_grad

On a CPU each backward runs in its caller's thread. torch adds to ``.grad`` under a lock, and lets go of it before any
hook runs: what hangs on ``.grad`` must not be exchanged while another thread may add to it, so arrival waits for
`is_alone`. A fused layer adds to main_grad without that lock, and returns its gradient to autograd unless `is_alone`;
where another backward begins after that, `Overlaps` notices it, at the end of the first of both at the latest, and
raises. (A device has one thread for all backwards, which needs neither.)

Knows nothing of parameters, buckets or ranks.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import _engine_run_backward


def is_alone() -> bool:
    """Return whether no other thread is inside of a backward, of whatever model."""
    return threading.active_count() == 1 or not _calls_elsewhere()


class Overlaps:
    """The backwards that deliver gradients to one wrapper."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._latest = -1
        self._running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
        self._met: list[tuple[FrameType, _Overlap]] = []

    def enter(self, *, is_fused: bool) -> None:
        """Note an arrival in the running backward.

        Args:
            is_fused: whether a fused layer added to the gradient that arrives.

        Raises:
            RuntimeError: if another backward ran at the same time, and one of both has fused layers.
        """
        task = torch._C._current_graph_task_id()
        if task != self._latest or is_fused:
            self._enter(task, is_fused)

    def _enter(self, task: int, is_fused: bool) -> None:
        with self._lock:
            self._latest = task
            backward = self._running.get(task)
            if backward is None:
                calls = list(_calls_of_backward(sys._getframe()))
                if task < 0 or not calls:  # set by hand; or in a thread of the engine's own
                    return
                backward = _Backward(self)
                Variable._execution_engine.queue_callback(backward)
                for other in self._running.values():
                    if other.thread is not backward.thread:
                        overlap = _Overlap(other.is_fused)
                        other.overlaps.append(overlap)
                        backward.overlaps.append(overlap)
                backward.overlaps += [overlap for call, overlap in self._met if call in calls]
                self._running[task] = backward
            if is_fused:
                backward.note_fused()
        backward.check()

    def left(self, is_fused: bool) -> None:
        """Note that a backward ended, or failed: which others are running, that did not arrive here yet?"""
        calls = [] if threading.active_count() == 1 else _calls_elsewhere()
        with self._lock:
            still = [(call, overlap) for call, overlap in self._met if call in calls]
            self._met = still + [(call, _Overlap(is_fused)) for call in calls]


class _Overlap:
    """What two backwards that overlap know of each other; no reference, which would keep one alive that failed."""

    def __init__(self, is_fused: bool) -> None:
        self.is_fused = is_fused


class _Backward:
    """One graph task, which is its sole owner: called when the task ends, dropped when it fails."""

    def __init__(self, watch: Overlaps) -> None:
        self._watch: Overlaps | None = watch
        self.thread = threading.current_thread()
        self.overlaps: list[_Overlap] = []
        self.is_fused = False

    def __call__(self) -> None:
        self._leave()
        self.check()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.left(self.is_fused)

    def note_fused(self) -> None:
        """Note that a fused layer added to main_grad in this backward."""
        self.is_fused = True
        for overlap in self.overlaps:
            overlap.is_fused = True

    def check(self) -> None:
        """Raise if this backward and another one overlap, and one of both has fused layers."""
        if any(overlap.is_fused for overlap in self.overlaps):
            raise RuntimeError(
                f"two backwards of one model ran at once, in two threads (one is {self.thread.name}), and a fused "
                "layer added to main_grad in one of them, without the lock by which torch keeps them apart: gradients "
                "may have been lost. Those of this window are not to be trusted: call zero_grad(). Run backwards one "
                "after the other (hold a threading.Lock around backward()), or use plain layers "
                "(fusedopt.restore_linears(model)), which may run at once"
            )


def _calls_elsewhere() -> list[FrameType]:
    """Return the calls of autograd's engine that other threads are in."""
    stacks = sys._current_frames()
    stacks.pop(threading.get_ident(), None)
    return [call for frame in stacks.values() for call in _calls_of_backward(frame)]


def _calls_of_backward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the calls of autograd's engine that the stack of ``frame`` is in, innermost first."""
    code: Any = _engine_run_backward.__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
