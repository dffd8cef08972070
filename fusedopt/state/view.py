"""``optimizer.state`` of the wrapper: the inner optimizers' state, keyed by model parameter.

Knows nothing of ranks or files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any

import torch

from fusedopt.inner.copies import state_to_come
from fusedopt.inner.narrow_state import COUNT, widened
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.sharding.checkpoint_parts import checkpoint_wants
from fusedopt.sharding.dtensor import is_dtensor
from fusedopt.sharding.local_state import checkpoint_part, wrap

HAS_STATE = "has_state"
"""Beside a parameter's state in torch's checkpoints: how often it was narrowed; plus 1, or negative if it had none."""


class StateView(MutableMapping[Any, Any]):
    """``optimizer.state`` by model parameter: a live view of the inner optimizers' state by main_param."""

    def __init__(self, inner: InnerOptimizers) -> None:
        self._inner = inner

    def _state_of(self, key: Hashable) -> Any:
        main_param = self._inner.main_of(key)
        return {None: {}} if main_param is None else self._inner.updater_of(main_param).state  # None: on another rank

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint makes a step where there is no state yet; ours is listed without one.
        return len(self) > 0 or checkpoint_wants() is not None

    def __getitem__(self, key: Any) -> Any:
        if checkpoint_wants() is not None:  # it takes from here the names of what it loads
            return checkpoint_state(self._inner, key)
        return self._state_of(key)[self._inner.main_of(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state_of(key)[self._inner.main_of(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._state_of(key)[self._inner.main_of(key)]

    def __iter__(self) -> Iterator[Any]:
        return (self._inner.param_of(key) for opt in self._inner.optimizers for key in list(opt.state))

    def __len__(self) -> int:
        return sum(len(opt.state) for opt in self._inner.optimizers)

    def __contains__(self, key: object) -> bool:
        return any(self._inner.main_of(key) in opt.state for opt in self._inner.optimizers)


def checkpoint_state(inner: InnerOptimizers, param: Any, *, is_template: bool = False) -> dict[Any, Any]:
    """Return what torch.distributed.checkpoint saves and loads of the state of model parameter ``param``.

    It loads what is listed and nothing else, so state that is still to come is listed, too, and ``has_state`` says
    that there was none; a template, into which torch itself copies whole state, goes without that.

    Raises:
        RuntimeError: naming the parameter, if its state is not known before its first step.
        ValueError: naming a DTensor parameter of which a rank's part is no block, and a shard splits that.
    """
    entry, main = inner.entry_by_param.get(id(param)), inner.main_of(param)
    updater = inner.updater_of(main)
    held = updater.state.get(main, {})
    state = dict(widened(held))
    if entry is None:
        return state
    name, cut, has_state = entry.slot.name, entry.cut, bool(state)
    if is_dtensor(param) and cut.region is None and entry.bucket.model is not None:
        raise ValueError(
            f"torch.distributed.checkpoint cannot put the state of DTensor parameter {name} together, which is "
            f"placed {param.placements} and split once more by a shard of data-parallel ranks; use "
            'shard="none", or save optimizer.state_dict() on each rank'
        )
    if main is None:  # known by name on every rank: torch looks for the device of what it loads
        is_known = is_template or entry.bucket.is_rounded
        return {"main_param": checkpoint_part(entry.bucket.grad_part[:0], cut)} if is_known else {}
    if not has_state:
        group = next(g for g in updater.param_groups if any(p is main for p in g["params"]))
        state = state_to_come(updater, group, main, name)
    if entry.is_rounded:
        current = main if is_template and not entry.is_split else entry.up_to_date_main_param()
        state["main_param"] = (main if current is None else current).detach()
    state = dict(wrap(state, param, cut))
    if is_template:
        return state
    count = held.get(COUNT, 0)
    return {**state, HAS_STATE: torch.tensor(1 + count if has_state else -count)}
