"""What a backend may offer, and the words in which the wrapper asks for it.

    adapter.offer() -> [Offer] -> resolve() -> Backend

Knows no library.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = ("wgrad_accumulate_", "norm", "scale_cast_", "found_inf", "fused_step_")
"""The functions of the table, in the order in which `report` shows them; `torch_ops` says what each promises."""

LOW_PRECISION = (torch.bfloat16, torch.float16)
"""What a model is trained in whose main_grad and main_param are wider."""


@dataclass(frozen=True)
class Offer:
    """What one library brings.

    Args:
        version: of the library, or None where it is not there.
        functions: by names of `FUNCTIONS`.
        missing: the others of them, and why each is not offered.
    """

    version: str | None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Adam:
    """The rule of torch.optim.Adam and AdamW, without amsgrad and maximize.

    Args:
        is_decoupled: weight decay multiplies the weights (AdamW) and does not enter the gradient (Adam).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool


@dataclass(frozen=True)
class Sgd:
    """The rule of torch.optim.SGD, without maximize, once its momentum buffers exist."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    is_nesterov: bool


Rule = Adam | Sgd


@dataclass(frozen=True)
class StepTensors:
    """What a fused step reads and writes: lists of equal length, one item per parameter, on one device.

    Args:
        grads: 1-D, contiguous, float32. Read; divided in place by ``grad_scale``, where that is given.
        mains: main_params, as ``grads``. Written.
        states: one list per kind of state, as ``mains``: exp_avg and exp_avg_sq for `Adam`, the momentum buffer
            for `Sgd`, none where its momentum is 0. Written.
        models: model parameters, 1-D, contiguous, all bfloat16 or all float16. Written: main_params rounded to nearest
            even. None for an fp32 model.
        steps: 0-d, float32: the number of this step, from 1; on the CPU or on the device. Read.
    """

    grads: Sequence[Tensor]
    mains: Sequence[Tensor]
    states: Sequence[Sequence[Tensor]]
    models: Sequence[Tensor] | None
    steps: Sequence[Tensor]


class Absent(Exception):
    """Tells why a library, or a function of it, is not there."""


@contextlib.contextmanager
def asking(doing: str) -> Iterator[None]:
    """Run what a foreign library does while it is asked what it offers: whatever it raises means that it is absent.

    Broken installations raise anything, SystemExit included. KeyboardInterrupt is the user's.

    Args:
        doing: what the body does: ``"importing amp_C"``.

    Raises:
        Absent: why, in one line.
    """
    try:
        yield
    except (Absent, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        raise Absent(f"no module named {error.name}") from error
    except BaseException as error:
        raise Absent(f"{doing} raised {describe(error)}") from error


def load(module: str, *symbols: str) -> list[Any]:
    """Import ``module`` and return its ``symbols``.

    Raises:
        Absent: whatever went wrong, in one line.
    """
    with asking(f"importing {module}"):
        loaded = importlib.import_module(module)
        missing = [symbol for symbol in symbols if not hasattr(loaded, symbol)]  # a lazy module imports here
        if missing:
            raise Absent(f"{module} has no {', '.join(missing)}")
        return [getattr(loaded, symbol) for symbol in symbols]


def version_of(distribution: str) -> str | None:
    """Return the installed version of ``distribution``, or None."""
    try:
        with asking("reading its version"):
            return metadata.version(distribution)
    except Absent:
        return None


def describe(error: BaseException) -> str:
    """Return kind and first line of ``error``."""
    try:
        lines = str(error).splitlines()
    except Exception:  # an exception of a broken library's own
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
