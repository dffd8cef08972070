"""The half of the wrapper that outlives a step: state dicts, copies, and the way back to the bare optimizer.

    ... -> step -> write-back -> gather -> [checkpoint]

Knows nothing of the step.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt import live_wrappers
from fusedopt.buffers.flat import Buffers
from fusedopt.config import MainGradConfig
from fusedopt.gradients.arrival import Arrival, Window
from fusedopt.gradients.clip import Clip
from fusedopt.inner.copies import from_portable
from fusedopt.inner.listing import Group
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.inner.plain import copy_for_hooks
from fusedopt.reduction.parameter_gather import Gather
from fusedopt.registration import Adoption
from fusedopt.sharding.comm import DataParallelGroup
from fusedopt.sharding.dcp_pieces import checkpoint_wants, loaded_empty_group
from fusedopt.state.consolidation import check_alike, consolidate
from fusedopt.state.state_dicts import StateDicts
from fusedopt.state.view import StateView

GONE_WHEN_UNWRAPPED = ("_inner", "_buffers", "_arrival", "_adoption", "_update", "_gather", "_reduction", "_state")


class StatefulOptimizer(Optimizer):
    """State dicts, copies and `unwrap` of `fusedopt.FusedMainGradOptimizer`, which makes the attributes."""

    config: MainGradConfig
    _comm: DataParallelGroup
    _inner: InnerOptimizers
    _buffers: Buffers
    _arrival: Arrival
    _adoption: Adoption
    _gather: Gather
    _clip: Clip
    _window: Window
    _why_gone: str
    _finalizer: weakref.finalize[Any, Any]
    _consolidated_at: int = -1
    _param_groups: list[Group]
    _state: StateView

    def _wire(self, inner: InnerOptimizers, config: MainGradConfig, comm: DataParallelGroup) -> None:
        raise NotImplementedError

    @property
    def param_groups(self) -> list[Group]:
        """The groups with the model's parameters: what the lists hold, in their order, is what is trained.

        An edit is followed, by identity of the parameters, in the next `step`, `zero_grad` or `state_dict`.
        Hyper-parameters that a scheduler on the inner optimizer changed are seen here.
        """
        adoption: Adoption | None = vars(self).get("_adoption")
        if adoption is not None:
            adoption.show_hyper_parameters()
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        """Take other lists; see above."""
        self._param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizers' state by model parameter, live; assigning to it replaces all of that."""
        return self._state

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        """Replace all inner state."""
        if "_state" in vars(self):  # not in torch's constructor, which starts without any
            entries = dict(state)
            self._state.clear()
            self._state.update(entries)

    def state_dict(self) -> dict[str, Any]:
        """Return parameters' main_param and inner state in full precision, and the groups; never communicates.

        Tensors are the live ones, as with torch. Read it back with ``torch.load(weights_only=True)``. Under a shard it
        is this rank's part, unless `consolidate_state_dict` brought the whole here.

        Inner state that is neither a tensor nor a builtin goes in as it is, with a warning: it takes
        ``weights_only=False`` to read it.

        Raises:
            ValueError, RuntimeError: if ``torch.distributed.checkpoint`` asks for what it cannot have.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._gather.finish()
        self._agree()
        self._arrival.adopt()
        if self._consolidated_at != self._main_versions():  # weights from outside were taken over since
            self._inner.consolidated = None
        wants = checkpoint_wants()
        state_dict = self._state_dicts().pack() if wants is None else self._for_checkpoint(wants)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or a bare torch optimizer's state dict, into existing storage.

        All ranks call it. Each takes its own part out of a whole state dict, whatever saved that; a part that one rank
        saved loads on that rank, in the same layout. The model's weights are not touched: at the next step an element
        whose model value still is the rounded main_param keeps the loaded main_param, so that model and optimizer load
        in either order.

        Raises:
            ValueError: naming what does not fit (groups, names, shapes, dtypes, layout); nothing was changed, on any
                rank: the others raise a RuntimeError that quotes it.
        """
        with self._comm.together("load_state_dict()"):
            state_dict = copy_for_hooks(state_dict)
            for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                replaced = pre_hook(self, state_dict)
                state_dict = state_dict if replaced is None else replaced
            self._adoption.follow(self.param_groups)
            is_empty = self._lost_by_checkpoint(state_dict)
        if any(is_empty):
            state_dict = self._with_empty_group(state_dict, is_empty)
        with self._comm.together("load_state_dict()"):
            state_dicts = self._state_dicts()
            checked = state_dicts.check(state_dict)
        with self._comm.together("load_state_dict()"):
            state_dicts.unpack(checked)
        self._buffers.forget_agreement()
        self._inner.consolidated = None
        self._inner.agree(self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _lost_by_checkpoint(self, state_dict: dict[str, Any]) -> list[bool]:
        """Return which groups torch.distributed.checkpoint lost, if it called: one that is empty, or none."""
        is_empty = [not group["params"] for group in self.param_groups]
        if sum(is_empty) != 1 or checkpoint_wants() is None or len(state_dict.get("param_groups", ())) != len(is_empty):
            return []
        return is_empty

    def _with_empty_group(self, state_dict: dict[str, Any], is_empty: list[bool]) -> dict[str, Any]:
        """Return a state dict from torch.distributed.checkpoint with what that lost; see `loaded_empty_group`."""
        found: Group = next((values for values in self._comm.objects(loaded_empty_group()) if values is not None), {})
        pairs = zip(state_dict["param_groups"], is_empty, strict=True)
        return {**state_dict, "param_groups": [{**group, **found} if empty else group for group, empty in pairs]}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all state together on rank ``to``: until the next step or load, `state_dict` returns the whole there.

        All ranks call it; the other ranks' `state_dict` stays their part. The whole is on the CPU, in the form of one
        process, and loads into any layout. Takes there as much memory as that, and one tensor more. Without a shard
        every rank has the whole anyway, and nothing is done.

        Args:
            to: rank among the data-parallel ranks.

        Raises:
            ValueError: if there is no such rank, or an inner optimizer's state is in a format of its own.
            RuntimeError: if state differs between ranks.
            All ranks raise it.
        """
        self._gather.finish()
        with self._comm.together("consolidate_state_dict()"):
            if to not in range(self._comm.world_size):
                raise ValueError(f"consolidate_state_dict(to={to}): there are {self._comm.world_size} ranks, from 0 on")
            self._inner.consolidated = None
            self._adoption.follow(self.param_groups)
            state_dicts, state = self._state_dicts(), {}
            if self._buffers.sharding.is_sharded:
                state_dicts.refuse_own_format("parts of it cannot be put together")
                state_dicts.refuse_objects("parts of it cannot be put together")
                state = state_dicts.pack_state()
        if self._buffers.sharding.is_sharded:
            check_alike(self._comm, state_dicts.others())
            self._inner.consolidated = consolidate(self._comm, state, state_dicts.cut, to)
            self._consolidated_at = self._main_versions()

    def _agree(self) -> None:
        """Bring the inner optimizers' groups and hyper-parameters up to date with the wrapper's."""
        self._adoption.follow(self.param_groups)
        self._inner.agree(self.param_groups)

    def _main_versions(self) -> int:
        return sum(e.main_param._version for e in self._buffers.entries if e.main_param is not None)

    def _for_checkpoint(self, wants: str) -> dict[str, Any]:
        if wants == "whole" and self._buffers.sharding.is_sharded:
            raise RuntimeError(
                "StateDictOptions(full_state_dict=True) asks every rank for whole state, and each has its part. To "
                "save a whole, call optimizer.consolidate_state_dict() on all ranks and then optimizer.state_dict(); "
                "to load one, add broadcast_from_rank0=True, or call optimizer.load_state_dict(). Without "
                "full_state_dict, torch.distributed.checkpoint saves and redistributes parts"
            )
        return self._state_dicts().pack_for_checkpoint(is_template=wants == "template")

    def _state_dicts(self) -> StateDicts:
        sharding = self._buffers.sharding
        part = f"{sharding.rank} of {sharding.num_shards}" if sharding.is_sharded else None
        return StateDicts(self._inner, self.param_groups, self._adoption.entries, part)

    def unwrap(self) -> Optimizer | list[Optimizer]:
        """Give back the inner optimizer (the list, if several) over the model's own parameters.

        Every hook and attribute is removed, and memory is freed at once; state is cast to the parameters' dtype, as
        torch keeps it; the fp32 digits of main_params are gone. A gradient is kept, rounded to the parameter's dtype;
        under a shard, where a rank has its share of it, it is cleared. The wrapper cannot be used any more.
        """
        self._gather.finish()
        self._agree()
        optimizers = list(self._inner.optimizers)
        self._retire("was unwrapped; step the inner optimizer, or wrap it anew")
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _retire(self, why: str) -> None:
        live_wrappers.remove(self)
        self._finalizer()
        self._why_gone = why
        for name in GONE_WHEN_UNWRAPPED:
            vars(self).pop(name, None)

    def _give_up(self, trainable: Collection[int]) -> list[tuple[nn.Parameter, Tensor]]:
        """Unwrap in favour of a new wrapper, which goes on with the gradients of its parameters as they stand.

        Args:
            trainable: `id` of the new wrapper's trainable parameters.

        Returns:
            The parameters among them that have a gradient, with that. Of a window that is pending, or under a shard,
            where a rank has a share, gradients are cleared, with a warning.
        """
        self._gather.finish()
        entries = [entry for entry in self._buffers.with_grad() if id(entry.param) in trainable]
        num_pending, is_sharded = self._window.num_pending, self._buffers.sharding.is_sharded
        is_whole = not (num_pending or is_sharded)
        if entries and not is_whole:
            found = f"{num_pending} micro-batch(es) of a window are pending" if num_pending else "a rank has its share"
            warnings.warn(
                f"rewrap=True cleared the gradients of {len(entries)} parameter(s), {entries[0].slot.name} the first: "
                f"the wrapper that held them cannot hand them over ({found}). To lose none, end a window with flush(), "
                "and step and clear before wrapping anew",
                RuntimeWarning,
                stacklevel=3,
            )
        kept = [(entry.param, entry.param.grad) for entry in entries if is_whole and entry.param.grad is not None]
        for entry in entries:
            entry.param.grad = None
        self._retire(f"was unwrapped: a later {type(self).__name__}(rewrap=True) took its parameters over; use that")
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of; gradients and a pending window are left out, as in torch."""
        self._agree()
        if self._adoption.was_relaid and self._buffers.sharding.is_sharded:
            raise RuntimeError(
                "an optimizer whose param_groups were edited under a shard cannot be copied: a copy would be laid out "
                "in another way. Build an equal one, and load what consolidate_state_dict() and state_dict() give"
            )
        return {
            "config": self.config,
            "comm": self._comm,
            "inner": self._inner.portable(),
            "order": self._inner.order,
            "adopted": [entry.param for entry in self._buffers.entries],
            "unfrozen": list(self._adoption.unfrozen),
            "main_params": [main if main is None else main.clone() for main in self._state_dicts().main_params()],
            "skipped_steps": self._clip.skips.total(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wrap the copied inner optimizers anew, on buffers of their own."""
        optimizers = from_portable(state["inner"])
        adopted, unfrozen = state["adopted"], state["unfrozen"]
        requires_grad = [param.requires_grad for param in adopted]
        for param in adopted:  # all in the order of the original, since a shard's layout has to be the same
            param.requires_grad_(all(param is not late for late in unfrozen))
        self._wire(InnerOptimizers(optimizers, state["order"]), state["config"], state["comm"])
        for param in unfrozen:
            param.requires_grad_(True)
            self._adoption.follow(self.param_groups)
        for param, flag in zip(adopted, requires_grad, strict=True):
            param.requires_grad_(flag)
        self._inner.take_state(state["inner"])
        self._state_dicts().set_main_params(state["main_params"])
        self._buffers.forget_agreement()
        self._clip.skips.restore(state["skipped_steps"])
