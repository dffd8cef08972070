"""The wrapped optimizers: their groups beside the wrapper's, hyper-parameters carried both ways, and their step.

    parameters -> layout -> buffers -> arrival -> reduction -> clip -> [step] -> write-back -> gather

*Outer* groups are those of the wrapper, with the model's parameters; *inner* groups those of the wrapped optimizers,
with main_params, which `wiring` puts there. Knows nothing of ranks or files.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fusedopt._torch_private import STEP_SUPPORTS_AMP_SCALING
from fusedopt.buffers.bucket import Entry
from fusedopt.checks import hidden_optimizers
from fusedopt.inner.hooks import StepGuard, global_step_hooks_muted
from fusedopt.inner.narrow_state import COUNT, Narrowing, numbering
from fusedopt.inner.signatures import requires_closure, step_with, takes_closure
from fusedopt.inner.stand_ins import StandIns
from fusedopt.nested import leaves

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
        is_shared: its parameters are cut, or dealt out, over ranks.
        outer: the outer group.
    """

    optimizer: Optimizer
    position: int
    params: list[nn.Parameter]
    agreed: Group = field(init=False)
    is_shared: bool = False
    outer: Group = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.agree()

    def agree(self) -> None:
        """Note hyper-parameters as they stand on the inner side."""
        self.agreed = {key: value for key, value in self.group.items() if key not in _NOT_HYPER_PARAMETERS}

    @property
    def is_there(self) -> bool:
        """Whether the inner optimizer has that many groups; somebody may have taken some away."""
        return self.position < len(self.optimizer.param_groups)

    @property
    def group(self) -> Group:
        """The inner group."""
        return self.optimizer.param_groups[self.position]


class InnerOptimizers:
    """The wrapped optimizers, seen as one.

    Args:
        optimizers: over disjoint parameters; at least one.
        order: the number of the optimizer of each outer group; default: all groups of the first, then the next.

    Attributes:
        listed: the groups, in the order of the outer ones.
        requires_closure: whether one of them cannot step without a closure (LBFGS).
        evaluates: whether one of them is to evaluate the closure itself, where there is one.
        held: optimizers that one of them holds (Lookahead, SAM), by number.
        main_by_param, entry_by_param: by ``id`` of the model parameter; its main_param is None where another rank
            updates it.
        param_by_main, optimizer_by_main: by ``id`` of the main_param: the model parameter, and who updates it.
    """

    def __init__(self, optimizers: Sequence[Optimizer], order: Sequence[int] | None = None) -> None:
        self.optimizers = tuple(optimizers)
        self.listed = [
            Listed(opt, position, list(group["params"]))
            for opt in self.optimizers
            for position, group in enumerate(opt.param_groups)
        ]
        if order is not None:
            of_each = [iter([item for item in self.listed if item.optimizer is opt]) for opt in self.optimizers]
            self.listed = [next(of_each[number]) for number in order]
        self._take_closure = [takes_closure(type(opt)) for opt in self.optimizers]
        self.evaluates = any(self._take_closure)
        self.requires_closure = any(requires_closure(type(opt)) for opt in self.optimizers)
        self.held = [list(hidden_optimizers(opt).values()) for opt in self.optimizers]
        self.main_by_param: dict[int, nn.Parameter | None] = {}
        self.entry_by_param: dict[int, Entry] = {}
        self.param_by_main: dict[int, nn.Parameter] = {}
        self.optimizer_by_main: dict[int, Optimizer] = {}
        self.consolidated: dict[Any, Any] | None = None
        """State of all parameters whole, where this rank has it; gone as soon as any of it may have changed."""
        self.set_aside: dict[int, Tensor] = {}
        """main_params that were loaded for parameters still frozen, by ``id``; `Wiring.install` takes them up."""
        self.narrowing: dict[int, Narrowing] = {}
        """How the state of each inner optimizer is held between steps, by its number; none: whole steps."""
        self.guard: StepGuard | None = None
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

    def takes_closure(self, number: int) -> bool:
        """Return whether inner optimizer ``number`` may do more with a closure than to evaluate it before all else."""
        return self._take_closure[number]

    def mains_of(self, number: int) -> list[nn.Parameter]:
        """Return the main_params that inner optimizer ``number`` updates here."""
        mains = [entry.main_param for entry in self.entry_by_param.values()]
        return [m for m in mains if m is not None and self.optimizer_by_main[id(m)] is self.optimizers[number]]

    @property
    def takes_found_inf(self) -> bool:
        """Whether every inner optimizer unscales and skips on the device (torch's ``fused=True``)."""
        return all(
            getattr(opt, STEP_SUPPORTS_AMP_SCALING, False) and all(g.get("fused") for g in opt.param_groups)
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

    def optimizer_of(self, index: int) -> Optimizer:
        """Return the inner optimizer of outer group ``index``."""
        return self.listed[index].optimizer

    def are_listed(self, outer_groups: Sequence[Group]) -> bool:
        """Return whether ``outer_groups`` hold what they held when they were last noted; looks at identities only.

        Raises:
            RuntimeError: if the lists of an inner optimizer were edited.
        """
        if sum(len(opt.param_groups) for opt in self.optimizers) != len(self.listed):
            raise RuntimeError(
                f"the param_groups of the inner {type(self.optimizers[0]).__name__} were edited; it belongs to the "
                "FusedMainGradOptimizer around it. Edit the wrapper's param_groups, or call its add_param_group()"
            )
        return len(outer_groups) == len(self.listed) and all(
            group is listed.outer and _is_same_list(group["params"], listed.params)
            for group, listed in zip(outer_groups, self.listed, strict=True)
        )

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
                    entry = self.entry_by_param.get(id(self.param_of(main)))
                    lacking += [entry] if entry is not None else []
        return lacking

    @property
    def has_narrow_state(self) -> bool:
        """Whether state is in fewer bytes between steps."""
        return any(narrowing.dtype != "float32" for narrowing in self.narrowing.values())

    def numbers(self) -> dict[int, int]:
        """Return the number of the first element of each parameter's part, by ``id``; see `numbering`."""
        return numbering([listed.params for listed in self.listed], self.entry_by_param)

    def narrow_loaded(self, number: int, counts: Mapping[Tensor, int]) -> None:
        """Narrow what inner optimizer ``number`` loaded by itself, as float32; ``counts`` as it was saved with it."""
        if number not in self.narrowing:
            return
        state: dict[Any, Any] = self.optimizers[number].state
        for param, count in counts.items():
            if count and isinstance(state.get(param), dict):
                state[param][COUNT] = count
        for index in range(self.num_groups):
            if self.number_of(index) == number:
                entries = (self.entry_by_param.get(id(param)) for param in self.listed[index].params)
                self.narrow_state_of(index, [entry for entry in entries if entry is not None])

    def narrow_state_of(self, index: int, entries: Sequence[Entry]) -> None:
        """Narrow what state there is already of ``entries``, of outer group ``index``, where it is held so."""
        narrowing = self.narrowing.get(self.number_of(index))
        state: dict[Any, Any] = self.optimizer_of(index).state
        found = [entry for entry in entries if narrowing is not None and state.get(entry.main_param)]
        numbers = self.numbers() if found else {}
        for entry in found:
            if narrowing is not None and isinstance(state[entry.main_param], dict):
                state[entry.main_param] = narrowing.narrowed(state[entry.main_param], entry, numbers[id(entry.param)])

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
        attach_gradients(entries)
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

    def step_some(
        self, index: int, entries: Sequence[Entry], *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
    ) -> None:
        """Step the inner optimizer of outer group ``index`` on main_params of that group, as if it had no others.

        Args:
            index: of the group.
            entries: of it; may be none.
            grad_scale: as in `step`.
            found_inf: as in `step`.
        """
        listed = self.listed[index]
        optimizer, group = listed.optimizer, listed.group
        groups, members = list(optimizer.param_groups), list(group["params"])
        optimizer.param_groups[:] = [group]
        stand_in: AbstractContextManager[None] = contextlib.nullcontext()
        if entries:
            group["params"][:] = [entry.main_param for entry in entries]
        elif listed.is_shared and listed.params and not self.held[self.number_of(index)]:
            stand_in = self._stand_ins.during(optimizer, [(group, listed.params[0])], takes_closure=False)
        try:
            attach_gradients(entries)
            with (
                stand_in,
                global_step_hooks_muted(),
                self._opened(),
                _attributes(optimizer, grad_scale=grad_scale, found_inf=found_inf),
            ):
                optimizer.step()
            collect_gradients(entries)
        finally:
            optimizer.param_groups[:] = groups
            group["params"][:] = members
            for entry in entries:
                if entry.main_param is not None and entry.main_param is not entry.param:
                    entry.main_param.grad = None

    def _standing_in(self, number: int) -> AbstractContextManager[None]:
        """See `StandIns`; a copy of an optimizer that holds others would step these."""
        optimizer = self.optimizers[number]
        shared = [item for item in self.listed if item.is_shared and item.optimizer is optimizer and item.params]
        if not shared or self.held[number]:
            return contextlib.nullcontext()
        groups = [(item.group, item.params[0]) for item in shared]
        if not any(all(param.grad is None for param in group["params"]) for group, _ in groups):
            return contextlib.nullcontext()
        return self._stand_ins.during(optimizer, groups, takes_closure=self.takes_closure(number))

    def _opened(self) -> contextlib.AbstractContextManager[None]:
        return self.guard.opened() if self.guard is not None else contextlib.nullcontext()

    def agree(self, outer_groups: Sequence[Group]) -> None:
        """Carry every hyper-parameter to the side where it did not change since the last call.

        Raises:
            RuntimeError: naming a value that changed on both sides, to different values. Nothing was carried.
        """
        pairs = list(zip(self.listed, outer_groups, strict=True))
        changes = [_changes(index, item, outer) for index, (item, outer) in enumerate(pairs)]
        for (item, outer), changed in zip(pairs, changes, strict=True):
            inner = item.group
            for key, value in changed.items():
                if value is _MISSING:
                    del outer[key]
                else:
                    inner[key] = outer[key] = _fill(inner.get(key), value)
            item.agree()

    def show(self) -> None:
        """Carry what changed on the inner side alone to the outer one, without waiting for `agree`."""
        for item in self.listed:
            outer = item.outer
            if not (outer and item.is_there):  # it is being added; somebody took it away, and the next step says so
                continue
            for key, value in item.group.items():
                before = item.agreed.get(key, _MISSING)
                if value is before or key in _NOT_HYPER_PARAMETERS or _is_same(value, before):
                    continue
                if _is_same(outer.get(key, _MISSING), before):
                    outer[key] = item.agreed[key] = value

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
        return self.main_by_param.get(id(key), key)

    def param_of(self, key: Any) -> Any:
        """Return the model parameter of main_param ``key``; anything else unchanged."""
        return self.param_by_main.get(id(key), key)

    def updater_of(self, main_param: Any) -> Optimizer:
        """Return the inner optimizer that updates ``main_param``; for any other key, the one that has state for it."""
        updater = self.optimizer_by_main.get(id(main_param))
        holders = (opt for opt in self.optimizers if main_param in opt.state)
        return updater or next(holders, self.optimizers[0])

    def state_nbytes(self) -> int:
        """Return the bytes of all tensors in inner state."""
        found = (leaf for opt in self.optimizers for _, leaf in leaves(dict(opt.state)))
        return sum(leaf.nbytes for leaf in found if isinstance(leaf, Tensor))


def attach_gradients(entries: Sequence[Entry]) -> None:
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


@contextlib.contextmanager
def _attributes(target: Optimizer, **values: Tensor | None) -> Iterator[None]:
    given = {name: value for name, value in values.items() if value is not None}
    vars(target).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(target)[name]


def _is_same_list(params: Any, listed: Sequence[Tensor]) -> bool:
    return type(params) is list and len(params) == len(listed) and all(map(operator.is_, params, listed))


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
