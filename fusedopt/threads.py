"""Refuse backwards of one wrapper that run at once, in several threads.

    loss.backward() -> [arrival] -> main_grad

On a CPU each backward runs in its caller's thread. torch adds to ``.grad`` under a lock and lets go of it before any
hook runs, so that nothing here can keep another thread from adding to a gradient that is being moved into main_grad,
or to main_grad while a fused layer does. So two backwards that overlap are noticed, by the one that ends first at the
latest, and both raise. (A device has one thread for all backwards, which needs no such thing.)

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


class OneThread:
    """The backwards that deliver gradients to one wrapper."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._latest = -1
        self._running: weakref.WeakValueDictionary[int, _Backward] = weakref.WeakValueDictionary()
        self._met: list[FrameType] = []

    def enter(self) -> None:
        """Note an arrival in the running backward.

        Raises:
            RuntimeError: if another one runs, or ran when one ended that arrived before.
        """
        task = torch._C._current_graph_task_id()
        if task != self._latest:
            self._enter(task)

    def _enter(self, task: int) -> None:
        with self._lock:
            self._latest = task
            calls = list(_calls_of_backward(sys._getframe()))
            if task < 0 or task in self._running or not calls:  # set by hand; or in a thread of the engine's own
                return
            backward = _Backward(self)
            Variable._execution_engine.queue_callback(backward)
            rivals = [other for other in self._running.values() if other.thread is not backward.thread]
            rivals += [backward] if any(call in self._met for call in calls) else []
            self._running[task] = backward
        for rival in rivals:
            rival.has_rival = backward.has_rival = True
        backward.check()

    def left(self) -> None:
        """Note that a backward ended, or failed: which others are running that did not arrive here yet?"""
        with self._lock:
            self._met = []
            if threading.active_count() > 1:
                stacks = sys._current_frames()
                stacks.pop(threading.get_ident(), None)
                self._met = [call for frame in stacks.values() for call in _calls_of_backward(frame)]


class _Backward:
    """One graph task, which is its sole owner: called when the task ends, dropped when it fails."""

    def __init__(self, watch: OneThread) -> None:
        self._watch: OneThread | None = watch
        self.thread = threading.current_thread()
        self.has_rival = False

    def __call__(self) -> None:
        self._leave()
        self.check()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.left()

    def check(self) -> None:
        """Raise if another backward ran at the same time."""
        if self.has_rival:
            raise RuntimeError(
                f"two backwards of one model ran at once, in two threads (one is {self.thread.name}): where both "
                "deliver a gradient for one parameter at the same moment, main_grad may lose some of it. The gradients "
                "of this window are not to be trusted: call zero_grad(). Run backwards one after the other (hold a "
                "threading.Lock around backward()), or give each thread a model and an optimizer of its own"
            )


def _calls_of_backward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the calls of autograd's engine that the stack of ``frame`` is in, innermost first."""
    code: Any = _engine_run_backward.__code__
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back
