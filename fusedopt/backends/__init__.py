"""Which library does the work on flat buffers: the only place that decides.

    parameters -> layout -> buffers -> arrival -> reduction -> [clip -> step -> write-back] -> gather

A `Backend` is a frozen table of functions with the signatures of
`fusedopt.backends.torch_ops`, which is the reference. Knows nothing of who calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fusedopt.backends import torch_ops


@dataclass(frozen=True)
class Backend:
    """The operations of one backend; see `fusedopt.backends.torch_ops` for what each promises."""

    name: str
    norm: Callable[..., Tensor]
    scale_: Callable[..., None]
    divide_: Callable[..., None]
    zero_: Callable[..., None]
    cast_copy_: Callable[..., None]
    take_over_: Callable[..., None]
    wgrad_accumulate_: Callable[..., None]


TORCH = Backend(
    name="torch",
    norm=torch_ops.norm,
    scale_=torch_ops.scale_,
    divide_=torch_ops.divide_,
    zero_=torch_ops.zero_,
    cast_copy_=torch_ops.cast_copy_,
    take_over_=torch_ops.take_over_,
    wgrad_accumulate_=torch_ops.wgrad_accumulate_,
)


def resolve(name: str) -> Backend:
    """Return the backend for ``name``, a value of `MainGradConfig.backend`.

    Raises:
        RuntimeError: if ``name`` asks for a backend that is not there.
    """
    if name in ("auto", "torch"):
        return TORCH
    raise RuntimeError(
        f'backend="{name}" was asked for, and this version of fusedopt has no adapter for it; '
        'use backend="torch", or "auto" to take the best one present'
    )
