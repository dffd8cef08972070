"""Backwards that run at once, in several threads: whoever must have main_grad to itself asks here.

    loss.backward() -> [arrival] -> main_grad

On a CPU each backward runs in its caller's thread. torch adds to ``.grad`` under a lock that is not ours, and lets go
of it before any hook runs. So what hangs on ``.grad`` must not be exchanged, nor main_grad be added to by a layer,
while another thread may be adding: both happen under `lock`, without which no backward begins, and only if this one
`is_alone`. Else arrival leaves the gradient with torch for now, and a layer returns its own to torch. Where neither can
be done (compiled code), two backwards of one wrapper that overlap raise.

A device has one thread for all backwards, which needs none of this. Knows nothing of parameters, buckets or ranks.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

lock = threading.RLock()
"""Held where a backward begins or ends: while somebody else holds it, none does."""

_running: list[_Call] = []
_own = threading.local()
_torchs_run_backward: Any = None


class _Call:
    """One call of autograd's engine, nested ones included."""

    def __init__(self) -> None:
        self.thread = threading.current_thread().name
        self.others: list[_Call] = []
        self.wrappers: set[object] = set()
        self.is_unguarded = False

    def check(self) -> None:
        """Raise if code that needs main_grad to itself, and could not see to it, ran beside this call or in it."""
        for other in self.others:
            if self.wrappers & other.wrappers and (self.is_unguarded or other.is_unguarded):
                raise RuntimeError(
                    f"two backwards of one model ran at once, in the threads {self.thread} and {other.thread}, and "
                    "compiled code added to main_grad in one of them: gradients may have been lost. Those of this "
                    "window are not to be trusted: call zero_grad(). Run backwards one after the other (hold a "
                    "threading.Lock around backward()), or leave fused layers out of what is compiled "
                    "(fusedopt.restore_linears)"
                )


def watch() -> None:
    """Take note of every call of autograd's engine from now on, in this process."""
    global _torchs_run_backward
    if _torchs_run_backward is None:
        # torch tells nobody that a backward begins; each of its entries calls this one function, by this name.
        autograd: Any = torch.autograd
        _torchs_run_backward = autograd._engine_run_backward
        autograd._engine_run_backward = _run_backward


def is_alone() -> bool:
    """Return whether the running backward is the only one; it stays so as long as `lock` is held."""
    return len(_running) <= 1


def has_been_alone() -> bool:
    """Return whether no other backward ran beside the running one so far."""
    call = getattr(_own, "call", None)
    return call is None or not call.others


def arrived(wrapper: object) -> None:
    """Note that the running backward delivers a gradient to ``wrapper``."""
    call = getattr(_own, "call", None)
    if call is not None:
        call.wrappers.add(wrapper)


def note_unguarded() -> None:
    """Note that the running backward adds to main_grad, and cannot leave that to torch if others run."""
    call = getattr(_own, "call", None)
    if call is not None:
        call.is_unguarded = True


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    if torch._C._current_graph_task_id() >= 0:  # nested in one that is noted, perhaps of another thread
        return _torchs_run_backward(*args, **kwargs)
    call = _own.call = _Call()
    with lock:
        call.others += _running
        for other in _running:
            other.others.append(call)
        _running.append(call)
    try:
        result = _torchs_run_backward(*args, **kwargs)
    except BaseException:
        _end(call)
        call.others.clear()
        raise
    _end(call)
    try:
        call.check()
    finally:
        call.others.clear()
    return result


def _end(call: _Call) -> None:
    _own.call = None
    with lock:
        _running.remove(call)
