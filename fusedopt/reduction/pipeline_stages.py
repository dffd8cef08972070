"""What the stages of `torch.distributed.pipelining` do to gradients outside of any backward.

    stage.scale_grads, stage.backward_weight_one_chunk -> [pipelines] -> reduction

A schedule ends by dividing every ``.grad`` of a stage by the number of micro-batches, and zero-bubble schedules add
weight gradients to ``.grad`` themselves. No hook of autograd sees either. Stages tell nobody, and may be made at any
time; so the two methods are wrapped on torch's class, once ranks share a wrapper and the module is loaded, and given
back with the last such wrapper.

Knows nothing of schedules or collectives.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from fusedopt._torch_private import stage_base
from fusedopt.backends import torch_ops
from fusedopt.buffers.bucket import Entry
from fusedopt.buffers.flat import Buffers

STAGE_MODULE = "torch.distributed.pipelining.stage"

_listeners: weakref.WeakSet[StageEdits] = weakref.WeakSet()
_wrapped: dict[str, tuple[Any, Any]] = {}
"""By name: torch's method, and what stands in its place."""


class StageEdits:
    """Follows what pipeline stages write into the gradients of one wrapper's parameters.

    Args:
        buffers: its gradients.
        bring_back: a method, held weakly; brings back what was launched of them; a division must not miss it.
        module: torch's, whose stages are followed from now on.
    """

    def __init__(self, buffers: Buffers, bring_back: Callable[[], None], module: Any) -> None:
        self._buffers = buffers
        self._bring_back = weakref.WeakMethod(bring_back)
        if not _wrapped:
            _wrap(stage_base(module), "scale_grads", StageEdits.dividing)
            _wrap(stage_base(module), "backward_weight_one_chunk", StageEdits.adding)
        _listeners.add(self)
        weakref.finalize(self, _give_back, stage_base(module)).atexit = False

    @contextlib.contextmanager
    def dividing(self, stage: Any, grad_scale_factor: int) -> Iterator[None]:
        """Run the body, in which ``stage`` divides each ``.grad`` of its parameters, if the divisor is not 1.

        Under ``"gradients"`` there is none by then: what was summed of it in this rank's part is divided here.
        """
        entries = self._of(stage) if grad_scale_factor != 1 else []
        if not entries:
            yield
            return
        bring_back = self._bring_back()
        if bring_back is not None:
            bring_back()
        with self._follow(entries, is_new=False):
            yield
        parts = [e.grad_part for e in entries if e.slot.is_reduced and e.bucket.is_lending and e.grad_part is not None]
        torch_ops.divide_(parts, grad_scale_factor)

    @contextlib.contextmanager
    def adding(self, stage: Any, *_: Any, **__: Any) -> Iterator[None]:
        """Run the body, in which ``stage`` adds the weight gradients of one micro-batch, as zero-bubble schedules do.

        Raises:
            RuntimeError: under ``"gradients"``, before anything is added.
        """
        entries = self._of(stage)
        if entries and self._buffers.sharding.is_lending:
            raise RuntimeError(
                f"a zero-bubble schedule sets the gradient of parameter {entries[0].slot.name} itself, outside of any "
                'backward that could reduce it, so that whole gradients would stay: shard="gradients" does without '
                'them. Use shard="optimizer", or a schedule with whole backwards (GPipe, 1F1B, Interleaved1F1B)'
            )
        with self._follow(entries, is_new=True):
            yield

    def _of(self, stage: Any) -> list[Entry]:
        ids = {id(param) for param in stage.submod.parameters()}
        return [entry for entry in self._buffers.entries if id(entry.param) in ids]

    @contextlib.contextmanager
    def _follow(self, entries: list[Entry], *, is_new: bool) -> Iterator[None]:
        """Note what the body writes; what something else wrote before stays an edit from outside."""
        clean = [b for b in dict.fromkeys(entry.bucket for entry in entries) if not b.was_written()]
        yield
        for bucket in clean:
            bucket.has_unsent = bucket.has_unsent or (is_new and bucket.was_written())
            bucket.note_version()


def _wrap(cls: Any, name: str, follow: Callable[..., Any]) -> None:
    original = getattr(cls, name)

    @functools.wraps(original)
    def method(stage: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for listener in list(_listeners):
                stack.enter_context(follow(listener, stage, *args, **kwargs))
            return original(stage, *args, **kwargs)

    setattr(cls, name, method)
    _wrapped[name] = original, method


def _give_back(cls: Any) -> None:
    if list(_listeners):  # its len() may count the one that is going
        return
    for name, (original, method) in _wrapped.items():
        if getattr(cls, name) is not method:  # somebody wrapped it once more: ours stays below, and does nothing
            return
        setattr(cls, name, original)
    _wrapped.clear()
