"""Fold what autograd delivers into main_grad and keep ``param.grad is param.main_grad``.

    parameters -> layout -> buffers -> [arrival] -> reduction -> clip -> step -> write-back -> gather

One mechanism: ``param.grad_dtype`` is main_grad's dtype, so the engine casts every
contribution before it sums; a post-accumulate hook, the first of the parameter's,
copies the first gradient after a clear into main_grad and makes that ``.grad``;
from then on autograd adds into main_grad in place and the hook only looks.

Dynamo refuses an fp32 ``.grad`` on a bf16 parameter: around each trace the gradients of all live wrappers are taken off
and put back, the same objects; see `watch_compiler`.

A `Window` counts micro-batches (gradient merge): one `step()` call is one of them, and every k-th acts.

Knows nothing of what happens to a complete bucket.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fusedopt._torch_private import compiler_callbacks, current_graph_task_id, post_accumulate_grad_hooks
from fusedopt.buffers.bucket import Entry, Slot
from fusedopt.buffers.flat import Buffers
from fusedopt.buffers.main_grad import (
    backward_lock,
    claim,
    follow_writer,
    is_only_backward,
    note_arrival,
    refuse_gradient,
    was_only_backward,
    watch_backwards,
)
from fusedopt.checks import refuse_ddp
from fusedopt.sharding import dtensor

Listener = Callable[[Slot], None]


class HookContext:
    """What the hooks of one wrapper share.

    Args:
        listener: a bound method that is told of every arrival; held weakly, since torch cannot collect a cycle
            that goes through a hook.
    """

    def __init__(self, listener: Listener | None) -> None:
        self._listener = weakref.WeakMethod(listener) if listener is not None else None
        self._has_searched = False
        self.num_arrivals = 0

    @property
    def may_wait(self) -> bool:
        """Whether nobody asks for gradients before the step, which takes over those that are not in main_grad yet."""
        return self._listener is None

    def refuse_ddp(self, param: Tensor) -> None:
        """Raise if a live DDP module, made after wrapping, holds ``param``; looks once, at the first arrival."""
        if not self._has_searched:
            refuse_ddp([param])
            self._has_searched = True

    def tell(self, slot: Slot) -> None:
        """Tell the listener that a backward is done with the parameter of ``slot``."""
        self.num_arrivals += 1
        listener = self._listener() if self._listener is not None else None
        if listener is not None:
            listener(slot)


def arrive(context: HookContext, slot: Slot, param: Tensor) -> None:
    """Fold what autograd left on ``param.grad``, then tell the listener."""
    fold(context, slot, param)
    context.tell(slot)


def arrive_on_cpu(context: HookContext, slot: Slot, param: Tensor) -> None:
    """Do the same where each backward runs in its caller's thread, so that several may run at once."""
    note_arrival(context)
    arrive(context, slot, param)


def fold(context: HookContext, slot: Slot, param: Tensor) -> None:
    """Take ``param.grad`` over into main_grad, so that ``param.grad is param.main_grad``.

    Args:
        context: shared by the parameters of one wrapper.
        slot: of the parameter.
        param: its ``.grad`` may be main_grad itself, a new gradient of main_grad's dtype, one that the
            user set by hand, or None.

    Raises:
        RuntimeError: if the parameter or main_grad is not what it was when wrapped, or the gradient
            is part of a graph (``create_graph=True``), or a layer added to main_grad itself. The sum of earlier
            micro-batches is kept.
        TypeError: for a sparse or complex gradient.
    """
    grad, main_grad = param.grad, slot.main_grad
    if grad is None:  # a Function returned None
        if main_grad is not None:
            _refuse_unseen_write(slot, None)
        return
    if main_grad is not None:
        follow_writer(main_grad, will_write=False)
    if grad is main_grad:  # autograd added in place
        vars(main_grad)["is_zero"] = False  # set by hand, perhaps
        if grad.data_ptr() != slot.address or getattr(param, "main_grad", None) is not main_grad:
            slot.check(param)
        return
    context.refuse_ddp(param)
    slot.check(param)
    refuse_gradient(param, grad, name=slot.name, is_fsdp=slot.is_fsdp)
    if main_grad is not None and main_grad.is_zero:  # type: ignore[attr-defined]
        _refuse_unseen_write(slot, grad)
    if slot.is_dtensor:
        _place(slot, param, grad)
    if grad.is_cuda or not context.may_wait or current_graph_task_id() < 0:
        claim(param)
    else:
        with backward_lock:
            if not is_only_backward():
                return  # it stays with torch, which adds to it under a lock, until a later arrival or the step
            claim(param)
    follow_writer(param.main_grad, will_write=False)  # type: ignore[attr-defined]


def _refuse_unseen_write(slot: Slot, grad: Tensor | None) -> None:
    with backward_lock:  # no other backward begins meanwhile; one that ran already may have written
        if was_only_backward():
            slot.refuse_unseen_write(grad)


def _place(slot: Slot, param: Tensor, grad: Tensor) -> None:
    slot.lend(param)
    if dtensor.is_share(grad, param) and slot.takes_share():
        if not slot.is_share:
            slot.expect_share(param)
    elif slot.is_share:
        slot.end_share(param)


class Arrival:
    """The hooks of one wrapper.

    Args:
        buffers: whose entries are watched.
        listener: told of every arrival, see `HookContext`.
    """

    def __init__(self, buffers: Buffers, listener: Listener | None = None) -> None:
        self._buffers = buffers
        self._context = HookContext(listener)
        self._handles: dict[int, RemovableHandle] = {}

    @property
    def num_arrivals(self) -> int:
        """How many gradients arrived so far, over all parameters and backwards."""
        return self._context.num_arrivals

    def watch(self, entries: Sequence[Entry]) -> None:
        """Fold every gradient that arrives for ``entries`` from now on."""
        watch_backwards()
        for entry in entries:
            hook = arrive_on_cpu if entry.slot.device.type == "cpu" else arrive
            self._hook_first(entry.param, functools.partial(hook, self._context, entry.slot))

    def watch_frozen(self, name: str, param: nn.Parameter) -> None:
        """Raise, by name, if a gradient arrives for a parameter that had no buffers because it was frozen."""
        if not param.dtype.is_floating_point:
            return  # can never require a gradient
        param.requires_grad_(True)  # torch hooks only such tensors, and keeps the hook afterwards
        self._hook_first(param, functools.partial(_refuse_unfrozen, name))
        param.requires_grad_(False)

    def unwatch(self, param: nn.Parameter) -> None:
        """Remove the hook of ``param``."""
        self._handles.pop(id(param)).remove()

    def fold_assigned(self) -> list[Entry]:
        """Take over gradients that were set by hand since the last arrival; each is an arrival of its own.

        Returns:
            Those that have no gradient.
        """
        absent = []
        for entry in self._buffers.entries:
            grad = entry.param.grad
            if grad is None:
                if not entry.slot.is_reduced:
                    absent.append(entry)
            elif grad is not entry.slot.main_grad:
                with torch.no_grad():
                    arrive(self._context, entry.slot, entry.param)
            else:
                vars(grad)["is_zero"] = False  # set by hand, perhaps
        return absent

    def release(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _hook_first(self, param: nn.Parameter, hook: functools.partial[None]) -> None:
        # Users' hooks, also those registered before wrapping, see `.grad is main_grad`: ours runs first.
        # torch walks the plain dict order, which OrderedDict.move_to_end() does not change.
        handle: RemovableHandle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        hooks = post_accumulate_grad_hooks(param)
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)
        self._handles[id(param)] = handle


def _refuse_unfrozen(name: str, param: Tensor) -> None:
    param.grad = None
    raise RuntimeError(
        f"a gradient arrived for parameter {name}, which was frozen when the optimizer was wrapped and has no "
        "main_grad yet. Call optimizer.zero_grad() after requires_grad_(True) and before the next backward"
    )


class WindowLost(RuntimeError):
    """The gradients of a window cannot be used any more: it begins anew, on all ranks."""


class Window:
    """The micro-batches since the last step that acted.

    Args:
        num_micro_batches: k; with 1 the caller owns accumulation, and every `step()` call acts.

    Attributes:
        num_pending: micro-batches whose `step()` call did not end the window.
        is_averaged: whether gradients are the mean already: a clip in the last micro-batch divided them.
        clips: (max_norm, norm_type) of the clips since the last `step()` call that are still to be applied. A part of a
            window cannot be clipped, so they wait for what comes next: a call that ends the window applies them.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.num_pending = 0
        self.is_averaged = False
        self.clips: list[tuple[float, float]] = []
        self._kept: list[tuple[Entry, int]] = []
        self._seen_arrivals = 0  # at the last `step()` call
        self._averaged_arrivals = 0

    @property
    def is_merging(self) -> bool:
        """Whether fusedopt counts micro-batches at all (k > 1)."""
        return self.num_micro_batches > 1

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch whose `step()` call is still to come ends the window."""
        return self.num_pending + 1 >= self.num_micro_batches

    def has_begun(self, num_arrivals: int) -> bool:
        """Return whether a gradient arrived since the last `step()` call; ``num_arrivals`` is how many did ever."""
        return num_arrivals != self._seen_arrivals

    def averaged(self, num_arrivals: int) -> None:
        """Note that gradients were divided: what arrives from now on would not be."""
        self.is_averaged = True
        self._averaged_arrivals = num_arrivals

    def check_averaged(self, num_arrivals: int) -> None:
        """Raise if a gradient arrived after the window was averaged; the window is dropped.

        Raises:
            RuntimeError: saying what to do.
        """
        if self.is_averaged and num_arrivals != self._averaged_arrivals:
            self.restart()
            raise WindowLost(
                "a backward ran after optimizer.clip_grad_norm_() had averaged and clipped the window of "
                f"{self.num_micro_batches} micro-batches, so its gradients would count {self.num_micro_batches} times. "
                "Call clip_grad_norm_() after the last backward, right before step(). This window is lost: call "
                "optimizer.zero_grad() now and start over"
            )

    def check_flush(self, num_arrivals: int) -> None:
        """Raise if gradients arrived that no `step()` call counted: the mean would leave their micro-batch out.

        Raises:
            RuntimeError: saying what to do; nothing was changed.
        """
        if self.has_begun(num_arrivals):
            raise RuntimeError(
                f"flush() was called with {self.num_pending} micro-batch(es) pending and gradients of one more, for "
                "which step() was not called: the mean would be over one too few. Call step() after every backward, "
                "the last one too, and flush() after it"
            )

    def check_kept(self) -> None:
        """Raise if a gradient of this window was cleared or replaced since the last `step()` call.

        The window is dropped, so that the caller can go on with a fresh one.

        Raises:
            RuntimeError: naming the parameter.
        """
        for entry, num_first_touches in self._kept:
            if entry.param.grad is None or entry.slot.num_first_touches != num_first_touches:
                pending = self.num_pending
                self.restart()
                raise WindowLost(
                    f"the gradient of parameter {entry.slot.name} was cleared or replaced (by model.zero_grad(), or "
                    f"by assigning param.grad) while {pending} micro-batch(es) of a window of "
                    f"{self.num_micro_batches} were pending. Clear with optimizer.zero_grad(), which waits for the end "
                    "of the window. This window is lost: call optimizer.zero_grad() now and start over"
                )

    def add(self, entries: Sequence[Entry], num_arrivals: int) -> None:
        """Count one micro-batch that does not end the window; ``entries`` are those with a gradient."""
        self.num_pending += 1
        self.clips = []
        self._seen_arrivals = num_arrivals
        self._kept = [(entry, entry.slot.num_first_touches) for entry in entries]

    def end(self, num_arrivals: int) -> None:
        """Note that a step acted."""
        self.restart()
        self._seen_arrivals = num_arrivals

    def restart(self) -> None:
        """Begin a new window."""
        self.num_pending = 0
        self.is_averaged = False
        self.clips = []
        self._kept = []


_live: weakref.WeakSet[Buffers] = weakref.WeakSet()
_num_traces = 0
_taken_off: list[tuple[nn.Parameter, Tensor]] = []


def watch_compiler(buffers: Buffers) -> None:
    """Take the gradients of ``buffers`` off around every trace, as long as it lives.

    Call it again now and then: ``torch._dynamo.reset()`` clears the callbacks.
    """
    handler = compiler_callbacks()
    _live.add(buffers)
    if _take_off not in handler.start_callbacks:
        handler.register_start_callback(_take_off)
    if _put_back not in handler.end_callbacks:
        handler.register_end_callback(_put_back)


def has_compiled() -> bool:
    """Return whether anything was compiled while a wrapper lived: compiled code checks the class of parameters."""
    return _num_traces > 0


def _take_off(args: Any) -> None:
    global _num_traces
    # The other triggers (a lazily compiled backward, autotuning) run inside a backward, whose sums must stay.
    if args.callback_trigger.name != "DYNAMO":
        return
    _num_traces += 1
    for buffers in _live:
        for entry in buffers.entries:
            entry.param.data_ptr()  # whoever looks at a pending parameter makes it a plain one; see `gather`
            grad = entry.param.grad
            if grad is not None and grad.dtype is not entry.param.dtype:
                _taken_off.append((entry.param, grad))
                entry.param.grad = None


def _put_back(args: Any) -> None:
    while _taken_off:
        param, grad = _taken_off.pop()
        # A wrapper that was freed during the trace gave its parameters their own gradient dtype back.
        param.grad = grad if param.grad_dtype in (None, grad.dtype) else grad.to(param.grad_dtype)
