"""Load state into an inner optimizer through its own method, and keep every tensor where it was.

    ... -> step -> write-back -> gather -> [checkpoint]

Knows nothing of parameters' names, ranks or files.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt.inner.narrow_state import is_narrow, without_narrow
from fusedopt.nested import Path, items_of, leaves, map_leaves


def has_own_format(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class has a ``state_dict`` or ``load_state_dict`` of its own."""
    cls = type(optimizer)
    return cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict


class _Held:
    """Carries an object through torch's ``load_state_dict``, which would take an iterable one apart."""

    def __init__(self, value: Any) -> None:
        self.value = value


def load_in_place(
    optimizer: Optimizer, state_dict: dict[str, Any], *, is_ours: bool, held: Sequence[Optimizer] = ()
) -> None:
    """Load through the optimizer's own method, then keep the tensors it had where the new values fit them.

    torch's ``load_state_dict`` makes the caller's tensors and objects the state; here they are copied.

    Args:
        optimizer: an inner one.
        state_dict: in its format.
        is_ours: whether a wrapper saved it.
        held: optimizers that it holds, and loads itself where its format is its own.
    """
    loads = (optimizer, *held) if has_own_format(optimizer) else (optimizer,)
    before = [dict(opt.state) for opt in loads]
    groups_before = [dict(group) for group in optimizer.param_groups]
    saved: dict[Any, Any] = {}
    if has_own_format(optimizer):  # knows nothing of narrow tensors, and may cast what it finds
        optimizer.load_state_dict(without_narrow(state_dict))
    else:
        saved = _by_param(optimizer, state_dict)
        numbers = set(_numbers(state_dict))
        state = {key: _hold(value) if key in numbers else value for key, value in state_dict["state"].items()}
        optimizer.load_state_dict({**state_dict, "state": state})
    memo: dict[int, Any] = {}  # what two parameters shared, they share again
    with torch.no_grad():
        for opt, old_state in zip(loads, before, strict=True):
            for key, loaded in list(opt.state.items()):
                if key in saved and isinstance(loaded, dict):
                    pairs = ((name, saved[key].get(name), item) for name, item in loaded.items())
                    loaded = {name: _undo_casts(was, item, key.device, is_ours=is_ours) for name, was, item in pairs}
                opt.state[key] = load_into(old_state.get(key), loaded, lambda item: copy.deepcopy(item, memo))
        for group, old in zip(optimizer.param_groups, groups_before, strict=True):
            for name, value in old.items():
                if isinstance(value, Tensor) and name in group:
                    group[name] = value.copy_(torch.as_tensor(group[name]))


def _numbers(state_dict: dict[str, Any]) -> list[Any]:
    return [number for group in state_dict["param_groups"] for number in group["params"]]


def _hold(value: Any) -> Any:
    """Return state of one parameter as torch's ``load_state_dict`` takes it, with the same paths.

    Lists stand for what it fails to make anew, named tuples for one.
    """

    def hold(_: Path, leaf: Any) -> Any:
        items = items_of(leaf)
        if items is not None and not is_narrow(leaf):
            return [_hold(item) for _, item in items]
        is_simple = isinstance(leaf, Tensor) or type(leaf) is set or not isinstance(leaf, Iterable)
        return leaf if is_simple else _Held(leaf)

    def is_strange(value: Any) -> bool:
        if is_narrow(value):  # its codes would be cast, and all of them exist in fp32 at once
            return True
        return not isinstance(value, dict) and type(value) not in (list, tuple, deque)

    return map_leaves(hold, value, is_leaf=is_strange)


def _by_param(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    pairs = zip(_numbers(state_dict), params, strict=True)
    return {p: state_dict["state"][n] for n, p in pairs if n in state_dict["state"]}


def _undo_casts(saved: Any, loaded: Any, device: torch.device, *, is_ours: bool) -> Any:
    """Return what torch made of ``saved``, ``loaded``, without what its policy on load spoils.

    It casts every tensor to its parameter's dtype, counts, masks and codes included, which is wanted only for
    floats that a bare bf16 or fp16 optimizer saved; it makes a dict of every mapping; and it rebuilds every iterable
    from a generator, which makes a str that generator's repr.
    """
    before, after = dict(leaves(saved, is_leaf=is_narrow)), dict(leaves(loaded))

    def undo(path: Path, _: Any) -> Any:
        was, now = before.get(path), after[path]
        if isinstance(now, Tensor):
            if isinstance(was, Tensor) and (is_ours or not was.is_floating_point()):
                return was.to(now.device)
            return now
        if isinstance(now, _Held):
            return {key: t.to(device) for key, t in now.value.items()} if is_narrow(now.value) else now.value
        return was if type(was) is type(now) else now

    # Other paths: the class's own __setstate__ changed it.
    return map_leaves(undo, saved if before.keys() == after.keys() else loaded, is_leaf=is_narrow)


def load_into(old: Any, new: Any, other: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """Return ``old`` holding the value of tensor ``new`` if it fits, else a copy that the caller does not share.

    Args:
        old: what was there.
        new: nested containers with tensors anywhere.
        other: makes what is kept of anything else.
    """
    olds = dict(leaves(old, is_leaf=lambda value: isinstance(value, deque)))  # whose tensors change places

    def place(path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return set(leaf) if type(leaf) is set else other(leaf)
        there = olds.get(path)
        if isinstance(there, Tensor) and (there.shape, there.dtype, there.device) == (
            leaf.shape,
            leaf.dtype,
            leaf.device,
        ):
            return there.copy_(leaf)
        return leaf.clone()

    return map_leaves(place, new)
