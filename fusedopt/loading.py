"""Load state into an inner optimizer through its own method, and keep every tensor where it was.

    ... -> step -> write-back -> gather -> [checkpoint]

Knows nothing of parameters' names, ranks or files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def has_own_format(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class has a ``state_dict`` or ``load_state_dict`` of its own."""
    cls = type(optimizer)
    return cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict


def load_in_place(optimizer: Optimizer, state_dict: dict[str, Any], *, is_ours: bool) -> None:
    """Load through the optimizer's own method, then keep the tensors it had where the new values fit them.

    torch's ``load_state_dict`` makes the caller's tensors the state; here they are copied.
    """
    before = dict(optimizer.state)
    groups_before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    saved = {} if has_own_format(optimizer) else _by_param(optimizer, state_dict)
    with torch.no_grad():
        for key, loaded in list(optimizer.state.items()):
            value = _undo_casts(saved.get(key, loaded), loaded, is_ours=is_ours)
            optimizer.state[key] = settle(before.get(key), value)
        for group, old in zip(optimizer.param_groups, groups_before, strict=True):
            for name, value in old.items():
                if isinstance(value, Tensor) and name in group:
                    group[name] = value.copy_(torch.as_tensor(group[name]))


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
    if type(saved) is not type(loaded):  # the class's own __setstate__ changed it
        return loaded
    if isinstance(loaded, dict):
        return {key: _undo_casts(saved.get(key), value, is_ours=is_ours) for key, value in loaded.items()}
    if type(loaded) in (list, tuple):
        return type(loaded)(_undo_casts(s, v, is_ours=is_ours) for s, v in zip(saved, loaded, strict=True))
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
    if isinstance(new, dict):
        olds = old if isinstance(old, dict) else {}
        return type(new)((key, settle(olds.get(key), value, other)) for key, value in new.items())
    if type(new) in (list, tuple):
        in_order = old if isinstance(old, (list, tuple)) else ()
        return type(new)(settle(o, n, other) for o, n in zip_longest(in_order[: len(new)], new))
    return set(new) if type(new) is set else other(new)
