"""Refuse calls that go to a wrapped optimizer instead of its wrapper: they would do nothing, or half of it, in silence.

Knows nothing of buckets, ranks or the step.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer


class StepGuard:
    """A step hook of inner optimizers, which lets only the wrapper's own steps pass.

    Args:
        optimizers: the inner ones.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._is_open = False
        self._handles = [
            # Some classes never call torch's constructor, and have no hooks.
            opt.register_step_pre_hook(self)
            for opt in optimizers
            if hasattr(opt, "_optimizer_step_pre_hooks")
        ]
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
