"""Outer and inner groups side by side, and hyper-parameters carried both ways.

*Outer* groups are those of the wrapper, with the model's parameters; *inner* groups those of the wrapped optimizers,
with main_params. Knows nothing of gradients, ranks or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_MISSING = object()
_NOT_HYPER_PARAMETERS = ("params", "param_names")

Group = dict[str, Any]


@dataclass
class Listed:
    """One outer group, as it was when it was last looked at, and its inner group.

    Args:
        optimizer: the inner optimizer.
        position: of the inner group among the optimizer's. Not the dict: loading rebinds those.
        params: model parameters, in order.
        agreed: hyper-parameters when both sides last agreed.
    """

    optimizer: Optimizer
    position: int
    params: list[nn.Parameter]
    agreed: Group = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        """Whether the inner optimizer has that many groups; somebody may have taken some away."""
        return self.position < len(self.optimizer.param_groups)

    @property
    def group(self) -> Group:
        """The inner group."""
        return self.optimizer.param_groups[self.position]


def agree(listed: Sequence[Listed], outer_groups: Sequence[Group]) -> None:
    """Carry every hyper-parameter to the side where it did not change since the last call.

    Raises:
        RuntimeError: naming a value that changed on both sides, to different values. Nothing was carried.
    """
    pairs = list(zip(listed, outer_groups, strict=True))
    changes = [_changes(index, item, outer) for index, (item, outer) in enumerate(pairs)]
    for (item, outer), changed in zip(pairs, changes, strict=True):
        inner = item.group
        for key, value in changed.items():
            inner[key] = outer[key] = _fill(inner.get(key), value)
        item.agreed = {key: value for key, value in inner.items() if key not in _NOT_HYPER_PARAMETERS}


def show(listed: Sequence[Listed], outer_groups: Sequence[Group]) -> None:
    """Carry what changed on the inner side alone to the outer one."""
    for item, outer in zip(listed, outer_groups, strict=False):  # a group is being added
        if not item.is_there:  # the next step says so
            continue
        for key, value in item.group.items():
            before = item.agreed.get(key, _MISSING)
            if value is before or key in _NOT_HYPER_PARAMETERS or _is_same(value, before):
                continue
            if _is_same(outer.get(key, _MISSING), before):
                outer[key] = item.agreed[key] = value


def _changes(index: int, listed: Listed, outer: Group) -> Group:
    inner, agreed = listed.group, listed.agreed
    changes: Group = {}
    for key in {**inner, **outer}:
        ours, theirs = outer.get(key, _MISSING), inner.get(key, _MISSING)
        if key in _NOT_HYPER_PARAMETERS or _is_same(ours, theirs):
            continue
        before = agreed.get(key, _MISSING)
        is_ours_new = ours is not _MISSING and not _is_same(ours, before)
        if is_ours_new and theirs is not _MISSING and not _is_same(theirs, before):
            raise RuntimeError(
                f"param_groups[{index}][{key!r}] was changed on both sides since the last step: to {ours!r} on the "
                f"wrapper and to {theirs!r} on the inner {type(listed.optimizer).__name__}. Change it on one side "
                "only: drive one scheduler, made on either of them"
            )
        changes[key] = ours if is_ours_new or theirs is _MISSING else theirs
    return changes


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor) or a is _MISSING or b is _MISSING:
        return False
    try:
        return bool(a == b)
    except (ValueError, RuntimeError, TypeError):  # arrays, tuples of tensors
        return False


def _fill(current: Any, value: Any) -> Any:
    """Return ``value``, or ``current`` filled with it where that is a tensor: compiled steps and graphs hold it."""
    if not isinstance(current, Tensor) or current is value:
        return value
    with torch.no_grad():
        return current.copy_(torch.as_tensor(value))
