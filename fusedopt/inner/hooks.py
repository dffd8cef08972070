"""Hooks around the steps of wrapped optimizers: one of ours, and torch's global ones.

A call that goes to a wrapped optimizer instead of its wrapper would do nothing, or half of it, in silence: `StepGuard`
refuses it. torch's global step hooks are for the wrapper's step: inside of it they are muted.

Knows nothing of buckets, ranks or the step.
"""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from fusedopt._torch_private import GLOBAL_STEP_HOOKS, has_step_hooks


class StepGuard:
    """A step hook of inner optimizers, which lets only the wrapper's own steps pass.

    Args:
        optimizers: the inner ones.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_open = False
        self._handles = [opt.register_step_pre_hook(self) for opt in optimizers if has_step_hooks(opt)]
        for opt in optimizers:
            vars(opt).setdefault("zero_grad", types.MethodType(self._zero_grad, opt))

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise in a step that nobody opened."""
        if not self._is_open:
            _refuse(optimizer, "step")

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let steps in the body pass."""
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def remove(self, optimizers: Sequence[Optimizer]) -> None:
        """Leave ``optimizers`` as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for opt in optimizers:
            method = vars(opt).get("zero_grad")
            if getattr(method, "__func__", None) == self._zero_grad:
                del vars(opt)["zero_grad"]

    def _zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        if not self._is_open:
            _refuse(optimizer, "zero_grad")
        type(optimizer).zero_grad(optimizer, set_to_none)  # a step of theirs may clear gradients (SAM)


def _refuse(optimizer: Optimizer, method: str) -> NoReturn:
    name = type(optimizer).__name__
    raise RuntimeError(
        f"{name}.{method}() was called on an optimizer that a FusedMainGradOptimizer wraps: it has main_params in "
        f"place of the model's parameters, and gradients only inside of the wrapper's step. Call {method}() of the "
        f"wrapper; unwrap() gives {name} back"
    )


class _Quiet(MutableMapping[Any, Any]):
    """Stands in the place of one of torch's global registries while a thread mutes them: shows that thread no hook.

    All else reaches the registry. A hook that is registered meanwhile fires from the next step on; its handle refers to
    this object, which therefore stays.
    """

    def __init__(self, registry: dict[Any, Any]) -> None:
        self.registry = registry

    def values(self) -> Any:
        """Return what a step in this thread is to call."""
        if torch.compiler.is_compiling():  # an inner step, traced where this stands: Dynamo cannot ask for threads
            return ()
        return () if threading.get_ident() in _muting else self.registry.values()

    def __getitem__(self, key: Any) -> Any:
        return self.registry[key]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.registry[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self.registry[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)


_QUIET = {name: _Quiet(getattr(torch_optimizer, name)) for name in GLOBAL_STEP_HOOKS}
"""By the name in torch's module, under which each step looks them up."""

_lock = threading.Lock()
_muting: list[int] = []
"""Threads that mute, one item for each `global_step_hooks_muted` that they are in."""


@contextlib.contextmanager
def global_step_hooks_muted() -> Iterator[None]:
    """Keep torch's global step hooks to the wrapper's own step, which fires them: once a step, not twice.

    Inside, hooks may be registered and removed, and other threads may step.
    """
    thread = threading.get_ident()
    with _lock:
        _muting.append(thread)
        vars(torch_optimizer).update(_QUIET)
    try:
        yield
    finally:
        with _lock:
            _muting.remove(thread)
            if not _muting:
                vars(torch_optimizer).update({name: quiet.registry for name, quiet in _QUIET.items()})
