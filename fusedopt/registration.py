"""Which parameters have buffers, hooks and a main_param: those that the groups hold, as long as they hold them.

    [parameters] -> layout -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

Holds no reference to the wrapper, so that a wrapper that is dropped can be finalised through it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fusedopt._torch_private import disable_current_modes
from fusedopt.buffers.bucket import Entry
from fusedopt.buffers.flat import Buffers
from fusedopt.checks import (
    check_parameters,
    check_trainable,
    named_params,
    refuse_replaced,
    refuse_shared_memory,
)
from fusedopt.gradients import stock_clip
from fusedopt.gradients.arrival import Arrival
from fusedopt.inner.membership import Edit, Membership
from fusedopt.inner.optimizers import Group, InnerOptimizers
from fusedopt.inner.wiring import Wiring
from fusedopt.reduction.transport import Gather


class Registration:
    """The parameters of one wrapper.

    Args:
        inner: whose groups get main_params.
        buffers: make and hold the memory.
        arrival: hooks the parameters.
        gather: finished before parameters are given back.
        shard_by: tells of each outer group whether its parameters may be cut, see `plan_buckets`; None: not sharded.
        is_alone: whether parameters may join without being compared with, and filled from, other ranks'.

    Attributes:
        entries: all trainable parameters that the groups hold, by ``id`` of the model parameter.
        unfrozen: those that began to require a gradient after wrapping, in that order: their memory lies apart.
        was_relaid: whether an edit of the groups left another layout than wrapping them anew would make.
    """

    def __init__(
        self,
        inner: InnerOptimizers,
        buffers: Buffers,
        arrival: Arrival,
        gather: Gather,
        shard_by: Callable[[int], str] | None,
        *,
        is_alone: bool,
    ) -> None:
        self._inner = inner
        self._buffers = buffers
        self._arrival = arrival
        self._gather = gather
        self._shard_by = shard_by
        self._is_alone = is_alone
        self.wiring = Wiring(inner)
        self._membership = Membership(inner)
        self._frozen: dict[int, tuple[str, nn.Parameter]] = {}
        self._leaving: dict[int, Entry] = {}
        self.entries: dict[int, Entry] = {}
        self.unfrozen: list[nn.Parameter] = []
        self._num_looks = self._next_look = 0
        self._looked_for: set[int] = set()  # ids of parameters
        self.was_relaid = False

    def holds(self, thing: object) -> bool:
        """Return whether ``thing`` is an inner optimizer, or one of its parameters, frozen ones included."""
        if isinstance(thing, Optimizer):
            return any(thing is opt for opt in self._inner.optimizers)
        held: tuple[dict[int, Any], ...] = (self.entries, self._frozen, self._leaving)
        return any(id(thing) in params for params in held) or self._inner.param_of(thing) is not thing

    def register_group(self, index: int, groups: Sequence[Group]) -> None:
        """Give buffers, hooks and main_params to the trainable parameters of outer group ``index``, the last one."""
        self._membership.note(groups[: index + 1])
        self._register(index, named_params(groups[index], index))

    def _register(self, index: int, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._register_trainable(index, [(name, param) for name, param in named if param.requires_grad])
        for name, param in named:
            if not param.requires_grad:
                self._arrival.watch_frozen(name, param)
                self._frozen[id(param)] = name, param

    def follow(self, groups: Sequence[Group]) -> None:
        """Take over what was edited in ``groups`` since the last call, and parameters that require a gradient now.

        New parameters get buffers, in one process; what was removed is not updated any more, and `let_go` gives it
        back. Looks at identities only where nothing was edited.

        Raises:
            TypeError, ValueError, RuntimeError: by name, if an edit cannot be followed; nothing was changed.
        """
        if not self._inner.are_listed(groups):
            self._apply(self._membership.edit(groups), groups)
        self._register_unfrozen()

    def _apply(self, edit: Edit, groups: Sequence[Group]) -> None:
        self._check(edit)
        self.wiring.relist(edit.listings)
        for group in groups:
            group["params"] = list(group["params"]) if type(group["params"]) is tuple else group["params"]
            group.pop("inner", None)
        for _, param, _, index, _ in edit.moved:
            self.wiring.move(param, self._inner.optimizer_of(index))
        for param in edit.removed:
            self._remove(param)
        added: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for index, name, param in edit.added:
            if id(param) in self._leaving:
                self.entries[id(param)] = self._leaving.pop(id(param))
                self.wiring.move(param, self._inner.optimizer_of(index))
            else:
                added.setdefault(index, []).append((name, param))
        for index, named in added.items():
            self._register(index, named)
        self._membership.name_again(groups)
        self._membership.note(groups)
        self.was_relaid = True
        self._note_listing()

    def _check(self, edit: Edit) -> None:
        new = [(name, param) for _, name, param in edit.added if id(param) not in self._leaving]
        check_parameters(new)
        if new:
            self._refuse_shared_memory(new)
        if new and not self._is_alone:
            raise RuntimeError(
                f"parameter {new[0][0]} was put into param_groups by hand, and several ranks train it: they have to "
                "compare it and start from the same values. Take it out and call optimizer.add_param_group() on all "
                "ranks"
            )
        shard_by = self._shard_by
        for name, _, origin, index, partner in edit.moved:
            if shard_by is not None and (partner is None or shard_by(partner) != shard_by(origin)):
                raise ValueError(
                    f"parameter {name} was moved to param_groups[{index}], which under a shard may lay it out in "
                    "another way: its memory cannot follow. Put it back, or unwrap(), regroup and wrap anew"
                )

    def _refuse_shared_memory(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        held = [(entry.slot.name, entry.param) for entry in self._buffers.entries]
        refuse_shared_memory([*held, *named], is_sharded=self._buffers.sharding.is_sharded)

    def _remove(self, param: nn.Parameter) -> None:
        if id(param) in self._frozen:
            del self._frozen[id(param)]
            self._arrival.unwatch(param)
        if id(param) in self.entries:
            self._leaving[id(param)] = self.entries.pop(id(param))

    def let_go(self) -> None:
        """Give parameters that were removed from the groups back as torch made them; nothing is under way of them."""
        if not self._leaving:
            return
        self._gather.finish()
        entries, self._leaving = list(self._leaving.values()), {}
        self.wiring.forget(entries)
        for entry in entries:
            self._arrival.unwatch(entry.param)
        self.unfrozen = [param for param in self.unfrozen if id(param) in self.entries]
        self._buffers.drop(entries)
        self._note_listing()

    def _note_listing(self) -> None:
        held = (listed.params for listed in self._inner.listed)
        numbers = [[self.entries[id(param)].number for param in params if id(param) in self.entries] for params in held]
        self._buffers.listing = zlib.crc32(repr(numbers).encode())

    def _register_unfrozen(self) -> None:
        unfrozen = [(name, param) for name, param in self._frozen.values() if param.requires_grad]
        for name, param in unfrozen:
            check_trainable(name, param)
        if unfrozen:
            self._refuse_shared_memory(unfrozen)
        for name, param in unfrozen:
            index = next(i for i, listed in enumerate(self._inner.listed) if any(p is param for p in listed.params))
            del self._frozen[id(param)]
            self._arrival.unwatch(param)
            self.unfrozen.append(param)
            self._register_trainable(index, [(name, param)])

    def look_for(self, absent: Sequence[Entry]) -> None:
        """See whether parameters without a gradient, at a step, were replaced in their modules.

        At once where all are absent; else ever more rarely, since in some models others are absent at each step.

        Raises:
            RuntimeError: as `refuse_replaced`.
        """
        self._num_looks += 1
        is_due = self._num_looks >= self._next_look or len(absent) == len(self.entries)
        if is_due and any(id(entry.param) not in self._looked_for for entry in absent):
            refuse_replaced([(entry.slot.name, entry.param) for entry in absent])
            self._looked_for.update(id(entry.param) for entry in absent)
            self._next_look = 2 * self._num_looks

    def _register_trainable(self, index: int, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        shard_by = self._shard_by(index) if self._shard_by is not None else "element"
        entries = self._buffers.add(index, named, shard_by)
        self._arrival.watch(entries)
        self.wiring.install(index, entries)
        self.entries.update((id(entry.param), entry) for entry in entries)

    def release(self) -> None:
        """Give every parameter back as torch made it, and the inner optimizers their model parameters.

        The garbage collector calls this wherever it runs: while torch.compile traces over fake tensors, in inference
        mode. What those change about tensors is not meant for ours.
        """
        with disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            self._gather.finish()
            self.wiring.release()
            self._arrival.release()
            stock_clip.unwatch(self._buffers)
            self._buffers.release()
            self.entries.clear()
            self._leaving.clear()
            self._frozen.clear()
            self.unfrozen.clear()
