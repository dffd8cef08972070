"""When a backward begins and ends, nested and failed ones included.

    loss.backward() -> arrival -> [...] -> end of backward -> reduction

A backward is a graph task of autograd's engine. Reentrant checkpoints run tasks inside of tasks; what counts here
is the outermost one. A task that failed never runs its callbacks, but lets go of them at once.

Knows nothing of parameters, buckets or ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable


class _End:
    """The callback of one graph task, which is its sole owner: it dies with it, also when that fails."""

    def __init__(self, watch: BackwardWatch) -> None:
        self._watch = watch

    def __call__(self) -> None:
        self._watch._task_ended()


class BackwardWatch:
    """Calls ``on_end`` when the backward that is running now ends.

    Args:
        on_begin: a method, held weakly; called at the first arrival of a backward; `has_failed` still tells of the one
            before.
        on_end: a method, held weakly; called in the backward's own thread once everything has arrived; what it raises
            reaches the caller of ``backward()``. Not called for a backward that failed.
    """

    def __init__(self, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._on_begin, self._on_end = weakref.WeakMethod(on_begin), weakref.WeakMethod(on_end)
        self._end: weakref.ref[_End] | None = None
        self._hops: list[Any] = []
        self._has_ended = True
        self._tasks = _Tasks()

    @property
    def has_failed(self) -> bool:
        """Whether the last backward never ended; asked where none is running."""
        return not self._has_ended

    def forget(self) -> None:
        """Stop minding a backward that failed."""
        self._has_ended = True
        self._remove_hops()

    def arrive(self, task: int) -> None:
        """Note an arrival in the running backward, in graph task number ``task``.

        Raises:
            RuntimeError: if backwards run in two threads at once, or under compiled autograd.
        """
        is_armed = self._end is not None and self._end() is not None
        if not is_armed and not self._hops:
            self._tasks = _Tasks()
        self._tasks.enter(task)
        if is_armed:
            return
        self._arm()
        if not self._hops:
            _call(self._on_begin)
            self._has_ended = False

    def _arm(self) -> None:
        dynamo = sys.modules.get("torch._dynamo.compiled_autograd")
        if dynamo is not None and dynamo.compiled_autograd_enabled:
            raise RuntimeError(
                "compiled autograd drops the callback at the end of backward, by which gradients are reduced over "
                "ranks; leave torch._dynamo.config.compiled_autograd off (torch.compile itself works)"
            )
        end = _End(self)
        self._end = weakref.ref(end)
        Variable._execution_engine.queue_callback(end)

    def _task_ended(self) -> None:
        node = torch._C._current_autograd_node()
        outwards = [fn for fn, _ in node.next_functions if fn is not None] if node is not None else []
        if not outwards:
            self._remove_hops()
            self._has_ended = True
            _call(self._on_end)
            return
        # A reentrant checkpoint's own task. The first of the checkpoint's neighbours to run is in the task around it.
        self._end = None
        self._hops += [fn.register_prehook(self._hop) for fn in outwards]

    def _hop(self, *_: Any) -> None:
        if self._hops:
            self._remove_hops()
            if self._end is None or self._end() is None:
                self._arm()

    def _remove_hops(self) -> None:
        for handle in self._hops:
            handle.remove()
        self._hops.clear()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    alive = method()
    if alive is not None:  # else its wrapper was dropped while a backward ran
        alive()


class _Tasks:
    """The graph tasks of one backward: nested ones come and go, in order.

    A task that comes back after it was left belongs to another thread.
    """

    def __init__(self) -> None:
        self._open: list[int] = []
        self._seen: set[int] = set()

    def enter(self, task: int) -> None:
        if self._open and self._open[-1] == task:
            return
        if task in self._open:
            while self._open[-1] != task:
                self._open.pop()
            return
        if task in self._seen:
            raise RuntimeError(
                "two backwards of one model run at once, in two threads; main_grad cannot tell whose gradient "
                "arrives. Run them one after the other"
            )
        while self._open and self._open[-1] > task:  # a task around those seen so far: they are over
            self._open.pop()
        self._open.append(task)
        self._seen.add(task)
