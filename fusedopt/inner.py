"""Give any torch optimizer its main_params, and carry hyper-parameters both ways.

    parameters -> layout -> buffers -> arrival -> reduction -> clip -> [step] -> write-back -> gather

The inner optimizers' own parameter lists are edited in place (LBFGS, for one, keeps a
reference to its list), their state moves with the parameters. *Outer* groups are those of
the wrapper, with the model's parameters; *inner* groups those of the wrapped optimizers,
with main_params. Knows nothing of ranks or files.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fusedopt.buffers import Entry
from fusedopt.dtensor import is_dtensor, region_of
from fusedopt.guard import StepGuard
from fusedopt.listing import Group, Listed, agree
from fusedopt.parts import Cut, piece, take, wrap
from fusedopt.scratch import global_step_hooks_muted, state_to_come

HAS_STATE = "has_state"
"""Beside a parameter's state in torch's checkpoints: whether it had any."""


class InnerOptimizers:
    """The wrapped optimizers, seen as one.

    Args:
        optimizers: over disjoint parameters; at least one.
        order: the number of the optimizer of each outer group; default: all groups of the first, then the next.
    """

    def __init__(self, optimizers: Sequence[Optimizer], order: Sequence[int] | None = None) -> None:
        self.optimizers = tuple(optimizers)
        self.listed = [
            Listed(opt, position, list(group["params"]), dict(group))
            for opt in self.optimizers
            for position, group in enumerate(opt.param_groups)
        ]
        """In the order of the outer groups."""
        if order is not None:
            of_each = [iter([item for item in self.listed if item.optimizer is opt]) for opt in self.optimizers]
            self.listed = [next(of_each[number]) for number in order]
        self._main_of: dict[int, nn.Parameter | None] = {}  # None: another rank updates it
        self._param_of: dict[int, nn.Parameter] = {}
        self._home_of: dict[int, Optimizer] = {}
        self._entry_of: dict[int, Entry] = {}
        self.consolidated: dict[Any, Any] | None = None
        """State of all parameters whole, where this rank has it; gone as soon as any of it may have changed."""
        self.set_aside: dict[int, Tensor] = {}
        """main_params that were loaded for parameters still frozen, by ``id``; `adopt` takes them up."""
        self._guard: StepGuard | None = None

    @property
    def order(self) -> list[int]:
        """The number of the optimizer of each outer group."""
        numbers = {id(opt): number for number, opt in enumerate(self.optimizers)}
        return [numbers[id(item.optimizer)] for item in self.listed]

    @property
    def num_groups(self) -> int:
        """Parameter groups of all inner optimizers."""
        return len(self.listed)

    @property
    def requires_closure(self) -> bool:
        """Whether an inner optimizer cannot step without a closure (LBFGS)."""
        return any(_requires_closure(opt) for opt in self.optimizers)

    @property
    def takes_found_inf(self) -> bool:
        """Whether every inner optimizer unscales and skips on the device (torch's ``fused=True``)."""
        return all(
            getattr(opt, "_step_supports_amp_scaling", False) and all(g.get("fused") for g in opt.param_groups)
            for opt in self.optimizers
        )

    def common_defaults(self) -> dict[str, Any]:
        """Return the defaults that all inner optimizers have, with the values of the first."""
        first = self.optimizers[0].defaults
        if len(self.optimizers) == 1:
            return first
        return {key: value for key, value in first.items() if all(key in opt.defaults for opt in self.optimizers)}

    def group(self, index: int) -> Group:
        """Return the inner group of outer group ``index``."""
        return self.listed[index].group

    def optimizer_of(self, index: int) -> Optimizer:
        """Return the inner optimizer of outer group ``index``."""
        return self.listed[index].optimizer

    def add_group(self, group: Group) -> None:
        """Add ``group`` (with model parameters) to its inner optimizer, which fills in its defaults.

        With several inner optimizers the key ``"inner"`` says which one.

        Raises:
            ValueError: if that key is missing or out of range, or a parameter is in a group of any of them.
        """
        group = dict(group)
        chosen = group.pop("inner", 0 if len(self.optimizers) == 1 else None)
        if chosen not in range(len(self.optimizers)):
            names = ", ".join(f"{i}: {type(opt).__name__}" for i, opt in enumerate(self.optimizers))
            raise ValueError(f'add_param_group: group["inner"] is {chosen!r}; needed is the number of one of ({names})')
        held = {id(param) for index in range(self.num_groups) for param in self.group(index)["params"]}
        for position, item in enumerate(group["params"]):  # of all inner optimizers: torch looks at one
            name, param = item if isinstance(item, tuple) else (f"number {position} of the group", item)
            if id(param) in held:
                raise ValueError(
                    f"add_param_group: parameter {name} is in a group already; give each parameter to one group of one "
                    "inner optimizer, once"
                )
        optimizer = self.optimizers[chosen]
        optimizer.add_param_group(group)
        added = optimizer.param_groups[-1]
        self.listed.append(Listed(optimizer, len(optimizer.param_groups) - 1, list(added["params"]), dict(added)))

    def drop_groups(self, index: int) -> None:
        """Take back group ``index``, if it was added; all ranks added it, and one refuses."""
        for listed in self.listed[index:]:
            listed.optimizer.param_groups.pop()
        del self.listed[index:]

    def adopt(self, index: int, entries: Sequence[Entry]) -> None:
        """Put main_params in the place of model parameters in group ``index``, state included."""
        if self._guard is None:
            self._guard = StepGuard(self.optimizers)
        optimizer = self.optimizer_of(index)
        for entry in entries:
            self._main_of[id(entry.param)] = main_param = entry.main_param
            self._entry_of[id(entry.param)] = entry
            if main_param is not None:
                self._param_of[id(main_param)] = entry.param
                self._home_of[id(main_param)] = optimizer
            if id(entry.param) in self.set_aside:
                entry.load_main_param(take(self.set_aside.pop(id(entry.param)), cut_of(entry)))
            if main_param is not entry.param and entry.param in optimizer.state:
                state = optimizer.state.pop(entry.param)
                if main_param is not None:
                    part = take(state, cut_of(entry))
                    optimizer.state[main_param] = _cast_state(part, entry.param.dtype, main_param.dtype)
        self.consolidated = None
        self._list_main_params(index)

    def release(self) -> None:
        """Put the model parameters back, with state in each parameter's dtype, as torch keeps it.

        State of a parameter that a shard cuts through, or that another rank updates, is lost.
        """
        self.forget(list(self._entry_of.values()))
        for listed in self.listed:
            if listed.is_there:
                listed.group["params"][:] = listed.params
        if self._guard is not None:
            self._guard.remove(self.optimizers)
        self.set_aside.clear()
        self.consolidated = None

    def forget(self, entries: Sequence[Entry]) -> None:
        """Take main_params from the state of parameters that are ours no longer; see `release`."""
        for entry in entries:
            param, main_param = entry.param, self._main_of.pop(id(entry.param))
            del self._entry_of[id(param)]
            if main_param is None:
                continue
            home = self._home_of.pop(id(main_param))
            del self._param_of[id(main_param)]
            if main_param is not param and main_param in home.state:
                whole = home.state.pop(main_param)
                if main_param.shape == param.shape:
                    home.state[param] = _cast_state(whole, main_param.dtype, param.dtype)

    def _list_main_params(self, index: int) -> None:
        listed = self.listed[index]
        listed.group["params"][:] = self._mains_of(listed.params)

    def _mains_of(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        mains = (self._main_of.get(id(param), param) for param in params)
        return [main for main in mains if main is not None]

    def relist(self, listings: Sequence[Listed | Group]) -> None:
        """Hold just these groups, in this order; parameters may come, go and change groups.

        Args:
            listings: one per outer group: how it is listed from now on; or an outer group that is new, with the number
                of its inner optimizer under ``"inner"``, which fills in its defaults.

        Raises:
            Exception: what an inner optimizer raises for a new group. Nothing was changed.
        """
        before = [
            (opt, list(opt.param_groups), [list(g["params"]) for g in opt.param_groups]) for opt in self.optimizers
        ]
        kept = [item for item in listings if isinstance(item, Listed)]
        groups = {id(item): item.group for item in kept}
        try:
            for item in kept:
                item.group["params"][:] = self._mains_of(item.params)
            for opt, listed_groups, _ in before:
                own = [groups[id(item)] for item in kept if item.optimizer is opt]
                for group in listed_groups:
                    if all(group is not other for other in own):
                        group["params"][:] = []  # its parameters may go into a new group
                opt.param_groups[:] = own
            made = [item if isinstance(item, Listed) else self._made_of(item) for item in listings]
        except BaseException:
            for opt, listed_groups, params in before:
                opt.param_groups[:] = listed_groups
                for group, members in zip(listed_groups, params, strict=True):
                    group["params"][:] = members
            raise
        for opt in self.optimizers:  # new groups were appended
            own_groups = [groups.get(id(item)) or item.group for item in made if item.optimizer is opt]
            opt.param_groups[:] = own_groups
        positions = dict.fromkeys(map(id, self.optimizers), 0)
        for item in made:
            item.position = positions[id(item.optimizer)]
            positions[id(item.optimizer)] += 1
        self.listed = made
        self.consolidated = None

    def _made_of(self, outer: Group) -> Listed:
        params = list(outer["params"])
        optimizer = self.optimizers[outer["inner"]]
        settings = {key: value for key, value in outer.items() if key != "inner"}
        optimizer.add_param_group({**settings, "params": self._mains_of(params)})
        return Listed(optimizer, len(optimizer.param_groups) - 1, params, dict(optimizer.param_groups[-1]))

    def move(self, param: nn.Parameter, optimizer: Optimizer) -> None:
        """Let ``optimizer`` update ``param`` from now on; state that another one has of it is dropped."""
        main_param = self._main_of.get(id(param))
        if main_param is not None and self._home_of[id(main_param)] is not optimizer:
            self._home_of[id(main_param)].state.pop(main_param, None)
            self._home_of[id(main_param)] = optimizer

    def agree(self, outer_groups: Sequence[Group]) -> None:
        """Carry every hyper-parameter to the side where it did not change since the last call; see `listing`.

        Raises:
            RuntimeError: naming a value that changed on both sides, to different values. Nothing was carried.
        """
        agree(self.listed, outer_groups)

    def would_create_state(self) -> bool:
        """Return whether a step with the gradients as they stand would make inner state.

        Judged by the settings and the state that is there, so that a resumed run decides as the uninterrupted one did.
        """
        for listed in self.listed:
            optimizer, group = listed.optimizer, listed.group
            # Of torch's fused optimizers SGD alone may do without: it makes its state when it first needs a momentum.
            is_sgd = isinstance(optimizer, SGD)
            if is_sgd and not group["momentum"]:
                continue
            for main in group["params"]:
                entry = self._entry_of.get(id(self.param_of(main)))
                if entry is None or not entry.has_grad:
                    continue
                state = optimizer.state.get(main)
                if not state or (is_sgd and state.get("momentum_buffer") is None):
                    return True
        return False

    def step(
        self,
        entries: Sequence[Entry],
        closure: Callable[[], Any] | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        instead: Callable[[Optimizer, Tensor | None, Tensor | None], bool] | None = None,
    ) -> Any:
        """Step every inner optimizer on its main_params.

        Args:
            entries: all trainable parameters.
            closure: for inner optimizers that require one; it has to call `hang_gradients` itself.
            grad_scale: float32, 0-d; what gradients are divided by on the device. Needs `takes_found_inf`.
            found_inf: float32, 0-d; nonzero leaves parameters and state as they are. Needs `takes_found_inf`.
            instead: makes the step of one inner optimizer, or returns False, with nothing changed.

        Returns:
            What the inner optimizer's ``step`` returned.
        """
        result = self.consolidated = None
        hang_gradients(entries)
        try:
            with global_step_hooks_muted(), self._opened():
                for opt in self.optimizers:
                    if instead is not None and instead(opt, grad_scale, found_inf):
                        continue
                    with _attributes(opt, grad_scale=grad_scale, found_inf=found_inf):
                        result = opt.step(closure) if closure is not None else opt.step()
        finally:
            for entry in entries:
                if entry.main_param is not None and entry.main_param is not entry.param:
                    entry.main_param.grad = None
        return result

    def _opened(self) -> contextlib.AbstractContextManager[None]:
        return self._guard.opened() if self._guard is not None else contextlib.nullcontext()

    def has(self, method: str) -> bool:
        """Return whether an inner optimizer has ``method`` (train, eval)."""
        return any(callable(getattr(opt, method, None)) for opt in self.optimizers)

    def call(self, method: str) -> None:
        """Call ``method`` on the inner optimizers that have it."""
        self.consolidated = None
        for opt in self.optimizers:
            if callable(getattr(opt, method, None)):
                getattr(opt, method)()

    def main_of(self, key: Any) -> Any:
        """Return the main_param of model parameter ``key``, None where another rank has it; anything else unchanged."""
        return self._main_of.get(id(key), key)

    def param_of(self, key: Any) -> Any:
        """Return the model parameter of main_param ``key``; anything else unchanged."""
        return self._param_of.get(id(key), key)

    def home_of(self, main_param: Any) -> Optimizer:
        """Return the inner optimizer that updates ``main_param``; for any other key, the one that has state for it."""
        home = self._home_of.get(id(main_param))
        holders = (opt for opt in self.optimizers if main_param in opt.state)
        return home or next(holders, self.optimizers[0])

    def for_checkpoint(self, param: Any, *, is_template: bool = False) -> dict[Any, Any]:
        """Return what torch.distributed.checkpoint saves and loads of the state of model parameter ``param``.

        It loads what is listed and nothing else, so state that is still to come is listed, too, and ``has_state`` says
        that there was none; a template, into which torch itself copies whole state, goes without that.

        Raises:
            RuntimeError: naming the parameter, if its state is not known before its first step.
            ValueError: naming a DTensor parameter of which a rank's part is no block, and a shard splits that.
        """
        entry, main = self._entry_of.get(id(param)), self.main_of(param)
        home = self.home_of(main)
        state = dict(home.state.get(main, {}))
        if entry is None:
            return state
        name, cut, has_state = entry.slot.name, cut_of(entry), bool(state)
        if is_dtensor(param) and cut.region is None and entry.bucket.model is not None:
            raise ValueError(
                f"torch.distributed.checkpoint cannot put the state of DTensor parameter {name} together, which is "
                f"placed {param.placements} and split once more by a shard of data-parallel ranks; use "
                'shard="none", or save optimizer.state_dict() on each rank'
            )
        if main is None:  # known by name on every rank: torch looks for the device of what it loads
            is_known = is_template or entry.bucket.main is not None
            return {"main_param": piece(entry.bucket.grad_part[:0], cut)} if is_known else {}
        if not has_state:
            group = next(g for g in home.param_groups if any(p is main for p in g["params"]))
            state = state_to_come(home, group, main, name)
        if entry.is_rounded:
            state["main_param"] = main.detach()
        state = wrap(state, param, cut)
        return state if is_template else {**state, HAS_STATE: torch.tensor(has_state)}

    def state_nbytes(self) -> int:
        """Return the bytes of all tensors in inner state."""
        return sum(_nbytes(dict(opt.state)) for opt in self.optimizers)

    def portable(self) -> list[tuple[type[Optimizer], dict[str, Any]]]:
        """Return what copies and pickles need: each optimizer's class and state, over model parameters."""
        parts = []
        for opt in self.optimizers:
            state = dict(opt.__getstate__())  # what torch itself would pickle of it
            state["state"] = {self.param_of(key): value for key, value in opt.state.items()}
            own = (listed for listed in self.listed if listed.optimizer is opt)
            state["param_groups"] = [{**listed.group, "params": list(listed.params)} for listed in own]
            parts.append((type(opt), state))
        return parts

    def take_state(self, parts: Sequence[tuple[type[Optimizer], dict[str, Any]]]) -> None:
        """Fill inner state from `portable`, each tensor in its own dtype."""
        for opt, (_, state) in zip(self.optimizers, parts, strict=True):
            opt.state.update({self.main_of(key): value for key, value in state["state"].items()})


def hang_gradients(entries: Sequence[Entry]) -> None:
    """Give main_params the gradients of their model parameters, None included."""
    for entry in entries:
        if entry.main_param is not None and entry.main_param is not entry.param:
            entry.main_param.grad = entry.grad_part if entry.has_grad else None


def cut_of(entry: Entry) -> Cut:
    """Return which elements of the parameter of ``entry`` are this rank's."""
    return Cut(tuple(entry.slot.shape), entry.slot.strides, entry.part, region_of(entry.param))


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return _nbytes(list(value.values()))
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _requires_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _cast_state(state: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Cast state that had the dtype of its parameter to the new one of that, however deep; step counts stay."""
    if isinstance(state, Tensor):
        return state.to(new) if state.dtype is old else state
    if isinstance(state, dict):
        return {key: value if key == "step" else _cast_state(value, old, new) for key, value in state.items()}
    return type(state)(_cast_state(v, old, new) for v in state) if type(state) in (list, tuple) else state


@contextlib.contextmanager
def _attributes(target: Optimizer, **values: Tensor | None) -> Iterator[None]:
    given = {name: value for name, value in values.items() if value is not None}
    vars(target).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(target)[name]
