"""Outer and inner groups side by side, and hyper-parameters carried both ways.

*Outer* groups are those of the wrapper, with the model's parameters; *inner* groups those of the wrapped optimizers,
with main_params. Knows nothing of gradients, ranks or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_MISSING = object()
_NOT_HYPER_PARAMETERS = ("params", "param_names")

Group = dict[str, Any]
MainsOf = Callable[[Sequence[nn.Parameter]], list[nn.Parameter]]


@dataclass
class Listed:
    """One outer group, as it was when it was last looked at, and its inner group.

    Args:
        optimizer: the inner optimizer.
        position: of the inner group among the optimizer's. Not the dict: loading rebinds those.
        params: model parameters, in order.
        agreed: hyper-parameters when both sides last agreed.
        is_shared: its parameters are cut, or dealt out, over ranks.
    """

    optimizer: Optimizer
    position: int
    params: list[nn.Parameter]
    agreed: Group = field(default_factory=dict)
    is_shared: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the inner optimizer has that many groups; somebody may have taken some away."""
        return self.position < len(self.optimizer.param_groups)

    @property
    def group(self) -> Group:
        """The inner group."""
        return self.optimizer.param_groups[self.position]


def relist(optimizers: Sequence[Optimizer], listings: Sequence[Listed | Group], mains_of: MainsOf) -> list[Listed]:
    """Let ``optimizers`` hold just these groups, in this order; parameters may come, go and change groups.

    Args:
        optimizers: the inner ones.
        listings: one per outer group: how it is listed from now on; or an outer group that is new, with the number
            of its inner optimizer under ``"inner"``, which fills in its defaults.
        mains_of: gives the main_params of model parameters, without those that another rank updates.

    Returns:
        One per outer group.

    Raises:
        Exception: what an inner optimizer raises for a new group. Nothing was changed.
    """
    before = [(opt, list(opt.param_groups), [list(g["params"]) for g in opt.param_groups]) for opt in optimizers]
    kept = [item for item in listings if isinstance(item, Listed)]
    groups = {id(item): item.group for item in kept}
    try:
        for item in kept:
            item.group["params"][:] = mains_of(item.params)
        for opt, listed_groups, _ in before:
            own = [groups[id(item)] for item in kept if item.optimizer is opt]
            for group in listed_groups:
                if all(group is not other for other in own):
                    group["params"][:] = []  # its parameters may go into a new group
            opt.param_groups[:] = own
        made = [item if isinstance(item, Listed) else _made_of(optimizers, item, mains_of) for item in listings]
    except BaseException:
        for opt, listed_groups, params in before:
            opt.param_groups[:] = listed_groups
            for group, members in zip(listed_groups, params, strict=True):
                group["params"][:] = members
        raise
    for opt in optimizers:  # new groups were appended
        own_groups = [groups.get(id(item)) or item.group for item in made if item.optimizer is opt]
        opt.param_groups[:] = own_groups
    positions = dict.fromkeys(map(id, optimizers), 0)
    for item in made:
        item.position = positions[id(item.optimizer)]
        positions[id(item.optimizer)] += 1
    return made


def _made_of(optimizers: Sequence[Optimizer], outer: Group, mains_of: MainsOf) -> Listed:
    params = list(outer["params"])
    optimizer = optimizers[outer["inner"]]
    settings = {key: value for key, value in outer.items() if key != "inner"}
    optimizer.add_param_group({**settings, "params": mains_of(params)})
    return Listed(optimizer, len(optimizer.param_groups) - 1, params, dict(optimizer.param_groups[-1]))


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
            if value is _MISSING:
                del outer[key]
            else:
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
        changes[key] = ours if is_ours_new else theirs  # missing there: the inner optimizer took it away
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
