"""Give any torch optimizer its main_params, and carry hyper-parameters both ways.

    parameters -> layout -> buffers -> arrival -> reduction -> clip -> [step] -> write-back -> gather

The inner optimizers' own parameter lists are edited in place (LBFGS, for one, keeps a
reference to its list), their state moves with the parameters. *Outer* groups are those of
the wrapper, with the model's parameters; *inner* groups those of the wrapped optimizers,
with main_params. Knows nothing of ranks or files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fusedopt.buffers.flat import Entry
from fusedopt.checks import hidden_optimizers
from fusedopt.inner.copies import global_step_hooks_muted, state_to_come
from fusedopt.inner.guard import StepGuard
from fusedopt.inner.listing import Group, Listed, agree, relist
from fusedopt.inner.plain import refuse_objects
from fusedopt.inner.signatures import requires_closure, step_with, takes_closure
from fusedopt.inner.stand_ins import StandIns
from fusedopt.nested import Path, leaves, map_leaves
from fusedopt.sharding.dtensor import is_dtensor, region_of
from fusedopt.sharding.local_state import Cut, piece, take, wrap

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
        self._take_closure = [takes_closure(type(opt)) for opt in self.optimizers]
        # Optimizers that one of them holds (Lookahead, SAM), by number, and lists of parameters that are only theirs.
        self._held = [list(hidden_optimizers(opt).values()) for opt in self.optimizers]
        self._lists_apart = self._find_lists_apart()
        self._main_of: dict[int, nn.Parameter | None] = {}  # None: another rank updates it
        self._param_of: dict[int, nn.Parameter] = {}
        self._home_of: dict[int, Optimizer] = {}
        self._entry_of: dict[int, Entry] = {}
        self.consolidated: dict[Any, Any] | None = None
        """State of all parameters whole, where this rank has it; gone as soon as any of it may have changed."""
        self.set_aside: dict[int, Tensor] = {}
        """main_params that were loaded for parameters still frozen, by ``id``; `adopt` takes them up."""
        self._guard: StepGuard | None = None
        self.warned_of: set[type] = set()
        """Classes of which it was said that they are saved as they are."""
        self._stand_ins = StandIns()

    @property
    def order(self) -> list[int]:
        """The number of the optimizer of each outer group."""
        return [self.number_of(index) for index in range(self.num_groups)]

    @property
    def num_groups(self) -> int:
        """Parameter groups of all inner optimizers."""
        return len(self.listed)

    @property
    def requires_closure(self) -> bool:
        """Whether an inner optimizer cannot step without a closure (LBFGS)."""
        return any(requires_closure(type(opt)) for opt in self.optimizers)

    @property
    def evaluates(self) -> bool:
        """Whether an inner optimizer is to evaluate the closure itself, where there is one."""
        return any(self._take_closure)

    def takes_closure(self, number: int) -> bool:
        """Return whether inner optimizer ``number`` may do more with a closure than to evaluate it before all else."""
        return self._take_closure[number]

    def mains_of(self, number: int) -> list[nn.Parameter]:
        """Return the main_params that inner optimizer ``number`` updates here."""
        mains = [entry.main_param for entry in self._entry_of.values()]
        return [m for m in mains if m is not None and self._home_of[id(m)] is self.optimizers[number]]

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

    def number_of(self, index: int) -> int:
        """Return the number of the inner optimizer of outer group ``index``."""
        optimizer = self.optimizer_of(index)
        return next(number for number, opt in enumerate(self.optimizers) if opt is optimizer)

    def held_by(self, number: int) -> list[Optimizer]:
        """Return the optimizers that inner optimizer ``number`` holds, as Lookahead does."""
        return self._held[number]

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
            for holder in self._holders(optimizer):
                if main_param is not entry.param and entry.param in holder.state:
                    state = holder.state.pop(entry.param)
                    if main_param is not None:
                        if cut_of(entry).is_partial:
                            refuse_objects(state, f"the state of parameter {entry.slot.name}", "a shard cannot cut it")
                        part = take(state, cut_of(entry))
                        holder.state[main_param] = _cast_state(part, entry.param.dtype, main_param.dtype)
            if entry.bucket.model is not None:
                self.listed[index].is_shared = True
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
        for held, params in self._lists_apart:
            held[:] = params
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
            del self._param_of[id(main_param)]
            for holder in self._holders(self._home_of.pop(id(main_param))):
                if main_param is not param and main_param in holder.state:
                    whole = holder.state.pop(main_param)
                    if main_param.shape == param.shape:
                        holder.state[param] = _cast_state(whole, main_param.dtype, param.dtype)

    def _list_main_params(self, index: int) -> None:
        listed = self.listed[index]
        listed.group["params"][:] = self._mains_of(listed.params)
        for held, _ in self._lists_apart:
            held[:] = [main for main in map(self.main_of, held) if main is not None]

    def _holders(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return ``optimizer``, an inner one, and those that it holds."""
        number = next(number for number, opt in enumerate(self.optimizers) if opt is optimizer)
        return [optimizer, *self._held[number]]

    def _find_lists_apart(self) -> list[tuple[list[Any], list[Any]]]:
        ours = {id(self.group(index)["params"]) for index in range(self.num_groups)}
        lists = [group["params"] for held in self._held for opt in held for group in opt.param_groups]
        return [(params, list(params)) for params in lists if id(params) not in ours]

    def _mains_of(self, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        mains = (self._main_of.get(id(param), param) for param in params)
        return [main for main in mains if main is not None]

    def relist(self, listings: Sequence[Listed | Group]) -> None:
        """Hold just these groups, in this order; see `listing.relist`."""
        self.listed = relist(self.optimizers, listings, self._mains_of)
        self.consolidated = None

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

    def lacking_state(self) -> list[Entry]:
        """Return the entries for which a step with a gradient would make inner state here.

        None where the device does not decide whether a step is left out. Judged by the settings and the state that is
        there, so that a resumed run decides as the uninterrupted one did.
        """
        lacking: list[Entry] = []
        for listed in self.listed if self.takes_found_inf else ():  # the others are never left to the device
            optimizer, group = listed.optimizer, listed.group
            # Of torch's fused optimizers SGD alone may do without: it makes its state when it first needs a momentum.
            is_sgd = isinstance(optimizer, SGD)
            if is_sgd and not group["momentum"]:
                continue
            for main in group["params"]:
                state = optimizer.state.get(main)
                if not state or (is_sgd and state.get("momentum_buffer") is None):
                    entry = self._entry_of.get(id(self.param_of(main)))
                    lacking += [entry] if entry is not None else []
        return lacking

    def step(
        self,
        entries: Sequence[Entry],
        closure_for: Callable[[int], Callable[[], Any] | None] | None = None,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
        instead: Callable[[Optimizer, Tensor | None, Tensor | None], bool] | None = None,
    ) -> Any:
        """Step every inner optimizer on its main_params.

        Args:
            entries: all trainable parameters.
            closure_for: gives the closure of inner optimizer number ..., None for none; see `Closures`.
            grad_scale: float32, 0-d; what gradients are divided by on the device. Needs `takes_found_inf`.
            found_inf: float32, 0-d; nonzero leaves parameters and state as they are. Needs `takes_found_inf`.
            instead: makes the step of one inner optimizer, or returns False, with nothing changed.

        Returns:
            What the inner optimizer's ``step`` returned; of several, the first that is not None.
        """
        self.consolidated = None
        results = []
        hang_gradients(entries)
        try:
            with global_step_hooks_muted(), self._opened():
                for number, opt in enumerate(self.optimizers):
                    if instead is not None and instead(opt, grad_scale, found_inf):
                        continue
                    closure = closure_for(number) if closure_for is not None else None
                    with _attributes(opt, grad_scale=grad_scale, found_inf=found_inf), self._standing_in(number):
                        results.append(opt.step() if closure is None else step_with(opt, closure))
            collect_gradients(entries)
        finally:
            for entry in entries:
                if entry.main_param is not None and entry.main_param is not entry.param:
                    entry.main_param.grad = None
        return next((result for result in results if result is not None), None)

    def _standing_in(self, number: int) -> AbstractContextManager[None]:
        """See `StandIns`; a copy of an optimizer that holds others would step these."""
        optimizer = self.optimizers[number]
        shared = [item for item in self.listed if item.is_shared and item.optimizer is optimizer and item.params]
        if not shared or self._held[number]:
            return contextlib.nullcontext()
        groups = [(item.group, item.params[0]) for item in shared]
        return self._stand_ins.during(optimizer, groups, takes_closure=self.takes_closure(number))

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
            current = main if is_template else entry.up_to_date_main_param()
            state["main_param"] = (main if current is None else current).detach()
        state = wrap(state, param, cut)
        return state if is_template else {**state, HAS_STATE: torch.tensor(has_state)}

    def state_nbytes(self) -> int:
        """Return the bytes of all tensors in inner state."""
        found = (leaf for opt in self.optimizers for _, leaf in leaves(dict(opt.state)))
        return sum(leaf.nbytes for leaf in found if isinstance(leaf, Tensor))

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


def collect_gradients(entries: Sequence[Entry]) -> None:
    """Do to model parameters' gradients what inner optimizers did to main_params': cleared, or replaced them.

    Not where several ranks share a parameter: the others would not know.
    """
    for entry in entries:
        main = entry.main_param
        if main is None or main is entry.param or main.grad is entry.grad_part or entry.bucket.model is not None:
            continue
        if main.grad is None:
            entry.param.grad = None
        elif entry.grad_part is not None:
            entry.grad_part.copy_(main.grad)
            entry.param.grad = entry.slot.main_grad


def cut_of(entry: Entry) -> Cut:
    """Return which elements of the parameter of ``entry`` are this rank's."""
    return Cut(tuple(entry.slot.shape), entry.slot.strides, entry.part, region_of(entry.param))


def _cast_state(state: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """Cast state that had the dtype of its parameter to the new one of that, however deep; step counts stay."""

    def cast(path: Path, leaf: Any) -> Any:
        has_dtype = isinstance(leaf, Tensor) and leaf.dtype is old and "step" not in path
        return leaf.to(new) if has_dtype else leaf

    return map_leaves(cast, state)


@contextlib.contextmanager
def _attributes(target: Optimizer, **values: Tensor | None) -> Iterator[None]:
    given = {name: value for name, value in values.items() if value is not None}
    vars(target).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(target)[name]
