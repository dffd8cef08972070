"""When a backward begins and ends, nested and failed ones included.

    loss.backward() -> arrival -> [...] -> end of backward -> reduction

A backward is a graph task of autograd's engine. Reentrant checkpoints run tasks inside of tasks; what counts here
is the outermost one. A task that failed never runs its callbacks, but lets go of them at once. All wrappers whose
gradients arrive in one backward end it together: first each by itself, then all at once.

Knows nothing of parameters, buckets or ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fusedopt._torch_private import COMPILED_AUTOGRAD, current_autograd_node, current_graph_task_id, queue_callback


class Watched(Protocol):
    """Whose gradients arrive."""

    def backward_began(self) -> None:
        """Note the first arrival of a backward; `BackwardWatch.has_failed` still tells of the one before."""

    def backward_ended(self) -> bool:
        """Note that everything has arrived; return whether ``then`` has something to do. Not after a failure."""


Then = Callable[[Sequence[Any]], None]


class _End:
    """The callback of one graph task, which is its sole owner: it dies with it, also when that fails."""

    def __init__(self) -> None:
        self.watches: list[BackwardWatch] = []

    def __call__(self) -> None:
        node = current_autograd_node()
        outwards = [fn for fn, _ in node.next_functions if fn is not None] if node is not None else []
        if outwards:  # a reentrant checkpoint's own task
            for watch in self.watches:
                watch.hop_by(outwards)
            return
        left: dict[Then, list[Watched]] = {}
        for watch in self.watches:
            watched = watch.end()
            if watched is not None:
                left.setdefault(watch.then, []).append(watched)
        for then, all_watched in left.items():
            then(all_watched)


_ends: weakref.WeakValueDictionary[int, _End] = weakref.WeakValueDictionary()
"""By graph task."""


class BackwardWatch:
    """Tells when the backward that is running now begins and ends.

    Both run in the backward's own thread, and what they raise reaches the caller of ``backward()``.

    Args:
        watched: is told; held weakly.
        then: called once at the end, after all that were watched have been told, with those that said so.
    """

    def __init__(self, watched: Watched, then: Then) -> None:
        self._watched = weakref.ref(watched)
        self.then = then
        self._end: weakref.ref[_End] | None = None
        self._hops: list[Any] = []
        self._has_ended = True
        self._tasks = _Tasks()

    @property
    def has_failed(self) -> bool:
        """Whether the last backward never ended; asked where none is running."""
        return not self._has_ended

    @property
    def is_running(self) -> bool:
        """Whether a backward is running now."""
        return self._end is not None and self._end() is not None

    def forget(self) -> None:
        """Stop minding a backward that failed."""
        self._has_ended = True
        self._remove_hops()

    def arrive(self, task: int) -> None:
        """Note an arrival in the running backward, in graph task number ``task``.

        Raises:
            RuntimeError: if backwards run in two threads at once, or under compiled autograd.
        """
        is_armed = self.is_running
        if not is_armed and not self._hops:
            self._tasks = _Tasks()
        self._tasks.enter(task)
        if is_armed:
            return
        self._arm(task)
        if not self._hops:
            watched = self._watched()
            if watched is not None:
                watched.backward_began()
            self._has_ended = False

    def _arm(self, task: int) -> None:
        dynamo = sys.modules.get(COMPILED_AUTOGRAD)
        if dynamo is not None and dynamo.compiled_autograd_enabled:
            raise RuntimeError(
                "compiled autograd drops the callback at the end of backward, by which gradients are reduced over "
                "ranks; leave torch._dynamo.config.compiled_autograd off (torch.compile itself works)"
            )
        end = _ends.get(task)
        if end is None:
            end = _ends[task] = _End()
            queue_callback(end)
        end.watches.append(self)
        self._end = weakref.ref(end)

    def end(self) -> Watched | None:
        """End the backward; return whom ``then`` is about, if anyone."""
        self._remove_hops()
        self._has_ended = True
        self._end = None
        watched = self._watched()
        return watched if watched is not None and watched.backward_ended() else None

    def hop_by(self, outwards: Sequence[Any]) -> None:
        """Go on in the task around this one: the first of a reentrant checkpoint's neighbours to run is in it."""
        self._end = None
        self._hops += [fn.register_prehook(self._hop) for fn in outwards]

    def _hop(self, *_: Any) -> None:
        if self._hops:
            self._remove_hops()
            if not self.is_running:
                self._arm(current_graph_task_id())

    def _remove_hops(self) -> None:
        for handle in self._hops:
            handle.remove()
        self._hops.clear()


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
