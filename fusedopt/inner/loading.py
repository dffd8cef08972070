"""Load state into an inner optimizer through its own method, and keep every tensor where it was.

    ... -> step -> write-back -> gather -> [checkpoint]

Knows nothing of parameters' names, ranks or files.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_MAPPINGS = (dict, OrderedDict)


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
    if has_own_format(optimizer):
        optimizer.load_state_dict(state_dict)
    else:
        optimizer.load_state_dict({**state_dict, "state": _hold(state_dict["state"])})
        saved = _by_param(optimizer, state_dict)
    memo: dict[int, Any] = {}  # what two parameters shared, they share again
    with torch.no_grad():
        for opt, old_state in zip(loads, before, strict=True):
            for key, loaded in list(opt.state.items()):
                value = _undo_casts(saved.get(key, loaded), loaded, is_ours=is_ours)
                opt.state[key] = settle(old_state.get(key), value, lambda item: copy.deepcopy(item, memo))
        for group, old in zip(optimizer.param_groups, groups_before, strict=True):
            for name, value in old.items():
                if isinstance(value, Tensor) and name in group:
                    group[name] = value.copy_(torch.as_tensor(group[name]))


def _hold(value: Any) -> Any:
    if type(value) in _MAPPINGS:
        return {key: _hold(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_hold, value))
    if type(value) is deque:
        return deque(map(_hold, value), value.maxlen)
    is_simple = isinstance(value, Tensor) or type(value) in (set, str) or not isinstance(value, Iterable)
    return value if is_simple else _Held(value)


def _by_param(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {p: state_dict["state"][n] for n, p in zip(numbers, params, strict=True) if n in state_dict["state"]}


def _undo_casts(saved: Any, loaded: Any, *, is_ours: bool) -> Any:
    """Return what torch made of ``saved``, ``loaded``, without what its policy on load spoils.

    It casts every tensor to its parameter's dtype, counts, masks and codes included, which is wanted only for
    floats that a bare bf16 or fp16 optimizer saved; and it rebuilds every iterable from a generator, which
    makes a str that generator's repr.
    """
    if isinstance(loaded, Tensor):
        is_cast = isinstance(saved, Tensor) and (is_ours or not saved.is_floating_point())
        return saved.to(loaded.device) if is_cast else loaded
    if isinstance(loaded, _Held):
        return loaded.value
    if type(saved) is not type(loaded):  # the class's own __setstate__ changed it
        return loaded
    if isinstance(loaded, dict):
        return {key: _undo_casts(saved.get(key), value, is_ours=is_ours) for key, value in loaded.items()}
    if type(loaded) in (list, tuple):
        return type(loaded)(_undo_casts(s, v, is_ours=is_ours) for s, v in zip(saved, loaded, strict=True))
    if type(loaded) is deque:
        items = (_undo_casts(s, v, is_ours=is_ours) for s, v in zip(saved, loaded, strict=True))
        return deque(items, saved.maxlen)
    return saved


def settle(old: Any, new: Any, other: Callable[[Any], Any] = copy.deepcopy) -> Any:
    """Return ``old`` holding the value of tensor ``new`` if it fits, else a copy that the caller does not share.

    Args:
        old: what was there.
        new: nested dicts, lists and tuples with tensors anywhere.
        other: makes what is kept of anything else.
    """
    if isinstance(new, Tensor):
        fits = isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (
            new.shape,
            new.dtype,
            new.device,
        )
        return old.copy_(new) if fits else new.clone()
    if type(new) in _MAPPINGS:
        olds = old if isinstance(old, dict) else {}
        return type(new)((key, settle(olds.get(key), value, other)) for key, value in new.items())
    if type(new) in (list, tuple):
        in_order = old if isinstance(old, (list, tuple)) else ()
        return type(new)(settle(o, n, other) for o, n in zip_longest(in_order[: len(new)], new))
    if type(new) is deque:
        return deque((settle(None, item, other) for item in new), new.maxlen)
    return set(new) if type(new) is set else other(new)
