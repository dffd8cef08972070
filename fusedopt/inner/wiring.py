"""Main_params in the place of model parameters: into wrapped optimizers, out again, from group to group.

The inner optimizers' own parameter lists are edited in place (LBFGS, for one, keeps a reference to its list), their
state moves with the parameters. Knows nothing of ranks, files or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.buffers.bucket import Entry
from fusedopt.inner.hooks import StepGuard
from fusedopt.inner.narrow_state import widened
from fusedopt.inner.optimizers import Group, InnerOptimizers, Listed
from fusedopt.inner.plain import refuse_objects
from fusedopt.nested import Path, map_leaves
from fusedopt.sharding.local_state import take

MainsOf = Callable[[Sequence[nn.Parameter]], list[nn.Parameter]]


class Wiring:
    """Puts main_params into wrapped optimizers, and model parameters back.

    Args:
        inner: the wrapped optimizers.
    """

    def __init__(self, inner: InnerOptimizers) -> None:
        self._inner = inner
        # Lists of parameters that an optimizer has which one of them holds, and nobody else.
        ours = {id(inner.group(index)["params"]) for index in range(inner.num_groups)}
        lists = [group["params"] for held in inner.held for opt in held for group in opt.param_groups]
        self._lists_apart = [(params, list(params)) for params in lists if id(params) not in ours]

    def add_group(self, group: Group) -> None:
        """Add ``group`` (with model parameters) to its inner optimizer, which fills in its defaults.

        With several inner optimizers the key ``"inner"`` says which one.

        Raises:
            ValueError: if that key is missing or out of range, or a parameter is in a group of any of them.
        """
        inner = self._inner
        group = dict(group)
        chosen = group.pop("inner", 0 if len(inner.optimizers) == 1 else None)
        if chosen not in range(len(inner.optimizers)):
            names = ", ".join(f"{i}: {type(opt).__name__}" for i, opt in enumerate(inner.optimizers))
            raise ValueError(f'add_param_group: group["inner"] is {chosen!r}; needed is the number of one of ({names})')
        held = {id(param) for index in range(inner.num_groups) for param in inner.group(index)["params"]}
        for position, item in enumerate(group["params"]):  # of all inner optimizers: torch looks at one
            name, param = item if isinstance(item, tuple) else (f"number {position} of the group", item)
            if id(param) in held:
                raise ValueError(
                    f"add_param_group: parameter {name} is in a group already; give each parameter to one group of one "
                    "inner optimizer, once"
                )
        optimizer = inner.optimizers[chosen]
        optimizer.add_param_group(group)
        added = optimizer.param_groups[-1]
        inner.listed.append(Listed(optimizer, len(optimizer.param_groups) - 1, list(added["params"])))

    def drop_groups(self, index: int) -> None:
        """Take back group ``index``, if it was added; all ranks added it, and one refuses."""
        inner = self._inner
        for listed in inner.listed[index:]:
            listed.optimizer.param_groups.pop()
        del inner.listed[index:]

    def install(self, index: int, entries: Sequence[Entry]) -> None:
        """Put main_params in the place of model parameters in group ``index``, state included."""
        inner = self._inner
        if inner.guard is None:
            inner.guard = StepGuard(inner.optimizers)
        optimizer = inner.optimizer_of(index)
        for entry in entries:
            inner.main_by_param[id(entry.param)] = main_param = entry.main_param
            inner.entry_by_param[id(entry.param)] = entry
            if main_param is not None:
                inner.param_by_main[id(main_param)] = entry.param
                inner.optimizer_by_main[id(main_param)] = optimizer
            if id(entry.param) in inner.set_aside:
                entry.load_main_param(take(inner.set_aside.pop(id(entry.param)), entry.cut))
            for holder in self._holders(optimizer):
                if main_param is not entry.param and entry.param in holder.state:
                    state = holder.state.pop(entry.param)
                    if main_param is not None:
                        if entry.cut.is_partial:
                            refuse_objects(state, f"the state of parameter {entry.slot.name}", "a shard cannot cut it")
                        part = take(state, entry.cut)
                        holder.state[main_param] = _cast_state(part, entry.param.dtype, main_param.dtype)
            if entry.bucket.model is not None:
                inner.listed[index].is_shared = True
        inner.narrow_state_of(index, entries)
        inner.consolidated = None
        self._list_main_params(index)

    def release(self) -> None:
        """Put the model parameters back, with state in each parameter's dtype, as torch keeps it.

        State of a parameter that a shard cuts through, or that another rank updates, is lost.
        """
        inner = self._inner
        self.forget(list(inner.entry_by_param.values()))
        for listed in inner.listed:
            if listed.is_there:
                listed.group["params"][:] = listed.params
        for held, params in self._lists_apart:
            held[:] = params
        if inner.guard is not None:
            inner.guard.remove(inner.optimizers)
        inner.set_aside.clear()
        inner.consolidated = None

    def forget(self, entries: Sequence[Entry]) -> None:
        """Take main_params from the state of parameters that are ours no longer; see `release`."""
        inner = self._inner
        for entry in entries:
            param, main_param = entry.param, inner.main_by_param.pop(id(entry.param))
            del inner.entry_by_param[id(param)]
            if main_param is None:
                continue
            del inner.param_by_main[id(main_param)]
            for holder in self._holders(inner.optimizer_by_main.pop(id(main_param))):
                if main_param is param and inner.narrowing and param in holder.state:
                    holder.state[param] = widened(holder.state[param])
                if main_param is not param and main_param in holder.state:
                    whole = widened(holder.state.pop(main_param))
                    if main_param.shape == param.shape:
                        holder.state[param] = _cast_state(whole, main_param.dtype, param.dtype)

    def _list_main_params(self, index: int) -> None:
        inner = self._inner
        listed = inner.listed[index]
        listed.group["params"][:] = self._mains_of(listed.params)
        for held, _ in self._lists_apart:
            held[:] = [main for main in map(inner.main_of, held) if main is not None]

    def _holders(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return ``optimizer``, an inner one, and those that it holds."""
        inner = self._inner
        number = next(number for number, opt in enumerate(inner.optimizers) if opt is optimizer)
        return [optimizer, *inner.held[number]]

    def _mains_of(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        inner = self._inner
        mains = (inner.main_by_param.get(id(param), param) for param in params)
        return [main for main in mains if main is not None]

    def relist(self, listings: Sequence[Listed | Group]) -> None:
        """Hold just these groups, in this order; see `_relisted`."""
        inner = self._inner
        inner.listed = _relisted(inner.optimizers, listings, self._mains_of)
        inner.consolidated = None

    def move(self, param: nn.Parameter, optimizer: Optimizer) -> None:
        """Let ``optimizer`` update ``param`` from now on; state that another one has of it is dropped."""
        inner = self._inner
        main_param = inner.main_by_param.get(id(param))
        if main_param is not None and inner.optimizer_by_main[id(main_param)] is not optimizer:
            inner.optimizer_by_main[id(main_param)].state.pop(main_param, None)
            inner.optimizer_by_main[id(main_param)] = optimizer

    def portable(self) -> list[tuple[type[Optimizer], dict[str, Any]]]:
        """Return what copies and pickles need: each optimizer's class and state, over model parameters."""
        inner = self._inner
        parts = []
        for opt in inner.optimizers:
            state = dict(opt.__getstate__())  # what torch itself would pickle of it
            state["state"] = {inner.param_of(key): value for key, value in opt.state.items()}
            own = (listed for listed in inner.listed if listed.optimizer is opt)
            state["param_groups"] = [{**listed.group, "params": list(listed.params)} for listed in own]
            parts.append((type(opt), state))
        return parts

    def take_state(self, parts: Sequence[tuple[type[Optimizer], dict[str, Any]]]) -> None:
        """Fill inner state from `portable`, each tensor in its own dtype."""
        inner = self._inner
        for opt, (_, state) in zip(inner.optimizers, parts, strict=True):
            opt.state.update({inner.main_of(key): value for key, value in state["state"].items()})


def _relisted(optimizers: Sequence[Optimizer], listings: Sequence[Listed | Group], mains_of: MainsOf) -> list[Listed]:
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
    return Listed(optimizer, len(optimizer.param_groups) - 1, params)


def _cast_state(state: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Cast state that had the dtype of its parameter to the new one of that, however deep; step counts stay."""

    def cast(path: Path, leaf: Any) -> Any:
        has_dtype = isinstance(leaf, Tensor) and leaf.dtype is old and "step" not in path
        return leaf.to(new) if has_dtype else leaf

    return map_leaves(cast, state)
