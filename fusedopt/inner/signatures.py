"""What the ``step`` of an optimizer class does with a closure, as far as its signature says.

Knows nothing of parameters, groups or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_KEYWORDS = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD)


def requires_closure(cls: type[Optimizer]) -> bool:
    """Return whether its ``step`` cannot do without a closure (LBFGS)."""
    closure = inspect.signature(cls.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def takes_closure(cls: type[Optimizer]) -> bool:
    """Return whether its ``step`` may do more with a closure than to evaluate it once, before all else.

    LBFGS apart, torch's own do just that.
    """
    if cls.step.__module__.startswith("torch.optim.") and not issubclass(cls, torch.optim.LBFGS):
        return False
    takes = list(inspect.signature(cls.step).parameters.values())[1:]
    return any(param.name == "closure" or param.kind not in _KEYWORDS for param in takes)


def step_with(optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    """Return what ``optimizer.step`` returns, called with a closure as its signature wants it."""
    is_named = "closure" in inspect.signature(type(optimizer).step).parameters
    return optimizer.step(closure=closure) if is_named else optimizer.step(closure)
