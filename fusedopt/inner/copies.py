"""Copies of optimizers that nobody notices: made for small experiments, stepped, dropped.

Knows nothing of buckets, ranks or files.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
import types
import warnings
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.buffers.main_grad import OUR_ATTRIBUTES
from fusedopt.inner.hooks import global_step_hooks_muted
from fusedopt.nested import map_leaves


def from_portable(parts: Sequence[tuple[type[Optimizer], dict[str, Any]]]) -> list[Optimizer]:
    """Rebuild plain optimizers from `InnerOptimizers.portable`, the way torch unpickles them, without state."""
    optimizers = []
    for cls, state in parts:
        opt = cls.__new__(cls)
        opt.__setstate__({**state, "state": defaultdict(dict)})
        optimizers.append(opt)
    return optimizers


class NotCopied(Exception):
    """An optimizer cannot be copied without sharing something that its step could write into."""


def copy_over(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> Optimizer:
    """Return a copy of ``optimizer``, without state, with the settings of ``group`` over ``params`` alone.

    Nothing that a step could write into is shared: what the class keeps beside its groups is copied deeply, with
    ``params`` in the place of the optimizer's own and without the state of an optimizer that it holds.

    Raises:
        NotCopied: if it holds a module, or a tensor beyond its parameters that is too large to try with.
    """
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    copied_group = {**settings, "params": list(params)}
    memo = _memo_of(optimizer, group, copied_group)
    state: dict[str, Any] = {**optimizer.__getstate__(), "param_groups": [copied_group]}
    state["defaults"] = dict(state.get("defaults", {}))  # torch adds to them where it unpickles
    (copied,) = from_portable([(type(optimizer), state)])
    others = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    memo |= {id(optimizer): copied, id(optimizer.param_groups): copied.param_groups, id(optimizer.state): copied.state}
    for key, value in vars(optimizer).items():  # what a class keeps beside what torch pickles
        if key not in vars(copied) and not _is_method(optimizer, key):
            try:
                setattr(copied, key, copy.deepcopy(value, memo))
            except TypeError:  # a lock or a file: holds no tensors, see `_memo_of`
                setattr(copied, key, value)
    copied.state.update(copy.deepcopy(others, memo))
    return copied


def _memo_of(optimizer: Optimizer, group: dict[str, Any], copied_group: dict[str, Any]) -> dict[int, Any]:
    """Return what stands in a deep copy for the live objects that ``optimizer`` refers to."""
    params = copied_group["params"]
    live = {id(p) for g in optimizer.param_groups for p in g["params"]}
    memo: dict[int, Any] = {}
    for known in optimizer.param_groups:
        here = known is group
        memo[id(known)] = copied_group if here else {**known, "params": []}
        memo[id(known["params"])] = params if here else []
        for number, param in enumerate(known["params"]):
            memo[id(param)] = params[number % len(params)] if params else nn.Parameter(torch.zeros(0))
    kept = {key: value for key, value in vars(optimizer).items() if key not in _TORCHS}
    kept |= {f"state {key}": value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    for value in _reachable([value for key, value in kept.items() if not _is_method(optimizer, key)]):
        if inspect.isfunction(value) and any(isinstance(v, _LIVE) for v in _reachable(_closed_over(value))):
            raise NotCopied(f"its function {value.__qualname__} reaches what a step could write into")
        if isinstance(value, nn.Module):
            raise NotCopied(f"it holds a {type(value).__name__}, whose weights a step could move")
        if isinstance(value, Optimizer):
            memo.setdefault(id(value.state), defaultdict(dict))
        elif isinstance(value, Tensor) and id(value) not in live and value.numel() > _MAX_HELD_NUMEL:
            raise NotCopied(f"it holds a tensor of {value.numel()} elements beside its parameters and their state")
        elif type(value) is list and value and all(id(item) in live for item in value):
            memo.setdefault(id(value), list(params))
    return memo


_TORCHS = ("state", "param_groups", "defaults")
_MAX_HELD_NUMEL = 2**20


def _reachable(values: Sequence[Any]) -> Iterator[Any]:
    """Yield all objects below ``values`` through containers, attributes, bound methods and closures, each once.

    Not a walk over state as `nested` has them: whatever refers to a tensor counts, keys and sets, too, and may do so in
    circles.
    """
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, str, bytes, int, float)):
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif isinstance(value, functools.partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif inspect.ismethod(value):
            waiting.append(value.__self__)
        elif inspect.isfunction(value):
            waiting += _closed_over(value)
        elif isinstance(value, Optimizer):
            waiting += [item for key, item in vars(value).items() if key != "state" and not _is_method(value, key)]
        elif not isinstance(value, (Tensor, nn.Module)) and hasattr(value, "__dict__"):
            waiting += vars(value).values()


def _is_method(optimizer: Optimizer, key: str) -> bool:
    """Return whether an attribute stands in the place of a method, as a scheduler's `step` does."""
    return callable(vars(optimizer).get(key)) and hasattr(type(optimizer), key)


def _closed_over(function: types.FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY_CELL]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


_EMPTY_CELL = types.CellType()
_LIVE = (Tensor, Optimizer, nn.Module, weakref.ReferenceType)


@contextlib.contextmanager
def unnoticed(device: torch.device) -> Iterator[None]:
    """Keep warnings, random numbers and global step hooks out of what a copy does."""
    devices = [device] if device.type == "cuda" else []
    pythons, numpys = random.getstate(), numpy.random.get_state()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), global_step_hooks_muted():
        warnings.simplefilter("ignore")
        reseed(device)
        try:
            yield
        finally:
            random.setstate(pythons)
            numpy.random.set_state(numpys)


def reseed(device: torch.device) -> None:
    """Seed the generators that a step on ``device`` may use, and no others: `unnoticed` puts back these alone.

    `torch.manual_seed` would seed those of all devices, also of GPUs that the user trains something else on.
    """
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)


def generators(device: torch.device) -> tuple[Any, ...]:
    """Return where the generators that `reseed` seeds are now; equal after as many draws."""
    on_device = torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else None
    return random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist(), on_device


def state_to_come(optimizer: Optimizer, group: dict[str, Any], main_param: Tensor, name: str) -> dict[Any, Any]:
    """Return state as ``optimizer`` will have for ``main_param`` after its first step, with zeros in all tensors.

    A copy takes that step, with a zero gradient; nothing of the optimizer or the parameter moves.

    Raises:
        RuntimeError: naming the parameter, if that step raised.
    """
    param = nn.Parameter(main_param.detach().clone())
    vars(param).update({key: value for key, value in vars(main_param).items() if key not in OUR_ATTRIBUTES})
    param.grad = torch.zeros_like(param)
    try:
        with unnoticed(param.device), torch.no_grad():
            copied = copy_over(optimizer, group, [param])
            copied.step()
    except Exception as error:
        raise RuntimeError(
            f"what state {type(optimizer).__name__} will have for parameter {name} is not known before its first step: "
            f"a copy that made one raised {error!r}. Save or load with torch.distributed.checkpoint after a step, or "
            "use optimizer.state_dict() and load_state_dict()"
        ) from error
    state: dict[Any, Any] = map_leaves(
        lambda _, leaf: torch.zeros_like(leaf) if isinstance(leaf, Tensor) else leaf, dict(copied.state.get(param, {}))
    )
    return state
