"""Find out, by running it, how an inner optimizer may be sharded.

    parameters -> [layout] -> ...

An element-wise optimizer (AdamW, SGD, Lion) gives the same bits on a matrix and on its elements in a row; a
shape-aware one (Muon, Shampoo, Adafactor) does not, and needs whole parameters; a coupled one (Prodigy) lets one
parameter decide about another, and cannot be sharded at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.inner import InnerOptimizers
from fusedopt.scratch import copy_over, unnoticed

_SHAPE = (8, 12)
_NUM_STEPS = 3


def check_shardable(inner: InnerOptimizers, wanted: str) -> None:
    """Raise what `shard_by` raises, for any group."""
    for index in range(inner.num_groups):
        shard_by(inner, wanted, index)


def shard_by(inner: InnerOptimizers, wanted: str, index: int) -> str:
    """Return ``"element"`` or ``"parameter"`` for the parameters of group ``index``.

    Runs copies of the inner optimizer, with the settings of that group, on small tensors and compares bits; the
    optimizer itself is not touched.

    Args:
        inner: the wrapped optimizers.
        wanted: the setting ``shard_by``: ``"auto"``, ``"element"`` or ``"parameter"``.
        index: of the group.

    Raises:
        ValueError: if one parameter's update depends on other parameters, or ``"element"`` is wanted and would
            change results.
    """
    optimizer, group = inner.optimizer_of(index), inner.group(index)
    name = type(optimizer).__name__
    one = _values((nn.Parameter(_draw(0)),), optimizer, group)
    if one is None:  # it does not run on such tensors at all: whole parameters are what it was made for
        return "parameter"
    two = _values((nn.Parameter(_draw(0)), nn.Parameter(_draw(1, scale=30.0))), optimizer, group)
    if two is not None and not torch.equal(one[0], two[0]):
        raise ValueError(
            f"{name} cannot be sharded: what it does to one parameter depends on the others, and a rank would see "
            'only its own. Use shard="none"'
        )
    flat = _values((nn.Parameter(_draw(0).flatten()),), optimizer, group)
    is_elementwise = flat is not None and torch.equal(one[0].flatten(), flat[0])
    if wanted == "element" and not is_elementwise:
        raise ValueError(
            f'shard_by="element" cuts through parameters, and {name} gives other results on the elements of a matrix '
            'than on the matrix. Use shard_by="parameter", or "auto"'
        )
    return "element" if is_elementwise and wanted != "parameter" else "parameter"


def _draw(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def _values(params: Sequence[nn.Parameter], optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor] | None:
    """Return the parameters after a few steps of a copy of ``optimizer``; None where it raises or gives no numbers."""
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    moved = [nn.Parameter(param.detach().to(device)) for param in params]
    with unnoticed(device):
        try:
            copied = copy_over(optimizer, group, moved)
            for step in range(_NUM_STEPS):
                for number, param in enumerate(moved):
                    gradient = _draw(10 * (step + 1) + number, scale=1.0 + 99.0 * number)
                    param.grad = gradient.to(device).view_as(param)
                with torch.no_grad():
                    copied.step()
        except Exception:  # a third party's class on tensors it was not written for
            return None
    values = [param.detach() for param in moved]
    return values if all(bool(torch.isfinite(value).all()) for value in values) else None
