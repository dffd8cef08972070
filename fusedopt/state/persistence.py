"""What outlives a step: state dicts, whole ones on one rank, and what copies are made of.

    ... -> step -> write-back -> gather -> [checkpoint]

Knows nothing of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fusedopt.buffers.flat import Buffers
from fusedopt.inner.narrow_state import is_narrow, widen
from fusedopt.inner.optimizers import Group, InnerOptimizers
from fusedopt.inner.plain import copy_for_hooks
from fusedopt.nested import Path, map_leaves
from fusedopt.registration import Registration
from fusedopt.sharding.checkpoint_parts import checkpoint_wants, loaded_empty_group
from fusedopt.sharding.comm import DataParallelGroup
from fusedopt.state.consolidation import check_alike, consolidate
from fusedopt.state.state_dicts import StateDicts


class Persistence:
    """State dicts and copies of one wrapper, whose hyper-parameters, main_params and groups are up to date.

    Args:
        inner: the wrapped optimizers.
        buffers: main_params.
        registration: which parameters are the wrapper's.
        comm: the ranks.
    """

    def __init__(
        self, inner: InnerOptimizers, buffers: Buffers, registration: Registration, comm: DataParallelGroup
    ) -> None:
        self._inner = inner
        self._buffers = buffers
        self._registration = registration
        self._comm = comm
        self._consolidated_at = -1

    def state_dict(self, groups: Sequence[Group]) -> dict[str, Any]:
        """Return the state dict of the wrapper with the outer ``groups``."""
        if self._consolidated_at != self._main_versions():  # weights from outside were taken over since
            self._inner.consolidated = None
        wants = checkpoint_wants()
        if wants is None:
            return self._state_dicts(groups).pack()
        if wants == "whole" and self._buffers.sharding.is_sharded:
            raise RuntimeError(
                "StateDictOptions(full_state_dict=True) asks every rank for whole state, and each has its part. To "
                "save a whole, call optimizer.consolidate_state_dict() on all ranks and then optimizer.state_dict(); "
                "to load one, add broadcast_from_rank0=True, or call optimizer.load_state_dict(). Without "
                "full_state_dict, torch.distributed.checkpoint saves and redistributes parts"
            )
        return self._state_dicts(groups).pack_for_checkpoint(is_template=wants == "template")

    def load(
        self, groups: Sequence[Group], state_dict: dict[str, Any], prepare: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        """Load a state dict into existing storage, on all ranks or on none.

        Args:
            groups: the outer ones.
            state_dict: as it was given. Read.
            prepare: what is done with a copy of it before; may raise.
        """
        with self._comm.together("load_state_dict()"):
            state_dict = prepare(copy_for_hooks(state_dict))
            self._registration.follow(groups)
            is_empty = _lost_by_checkpoint(groups, state_dict)
        if any(is_empty):
            state_dict = self._with_empty_group(state_dict, is_empty)
        with self._comm.together("load_state_dict()"):
            state_dicts = self._state_dicts(groups)
            checked = state_dicts.check(state_dict)
        with self._comm.together("load_state_dict()"):
            state_dicts.unpack(checked)
        self._buffers.forget_agreement()
        self._inner.consolidated = None
        self._inner.agree(groups)

    def _with_empty_group(self, state_dict: dict[str, Any], is_empty: list[bool]) -> dict[str, Any]:
        """Return a state dict from torch.distributed.checkpoint with what that lost; see `loaded_empty_group`."""
        found: Group = next((values for values in self._comm.objects(loaded_empty_group()) if values is not None), {})
        pairs = zip(state_dict["param_groups"], is_empty, strict=True)
        return {**state_dict, "param_groups": [{**group, **found} if empty else group for group, empty in pairs]}

    def consolidate(self, groups: Sequence[Group], to: int) -> None:
        """Bring all state together on rank ``to``; see `FusedMainGradOptimizer.consolidate_state_dict`."""
        with self._comm.together("consolidate_state_dict()"):
            if to not in range(self._comm.world_size):
                raise ValueError(f"consolidate_state_dict(to={to}): there are {self._comm.world_size} ranks, from 0 on")
            self._inner.consolidated = None
            self._registration.follow(groups)
            state_dicts, state = self._state_dicts(groups), {}
            if self._buffers.sharding.is_sharded:
                state_dicts.refuse_own_format("parts of it cannot be put together")
                state_dicts.refuse_objects("parts of it cannot be put together")
                state = state_dicts.pack_state()
        if self._inner.has_narrow_state and not self._buffers.sharding.is_sharded:
            whole = _on_cpu(state_dicts.pack_state()) if to == self._comm.rank else None
            self._inner.consolidated, self._consolidated_at = whole, self._main_versions()
        if self._buffers.sharding.is_sharded:
            check_alike(self._comm, state_dicts.others())
            self._inner.consolidated = consolidate(self._comm, state, state_dicts.cut, to)
            self._consolidated_at = self._main_versions()

    def copied_main_params(self, groups: Sequence[Group]) -> list[Tensor | None]:
        """Return a copy of each main_param, None where another rank has it."""
        return [main if main is None else main.clone() for main in self._state_dicts(groups).main_params()]

    def restore_main_params(self, groups: Sequence[Group], main_params: Sequence[Tensor | None]) -> None:
        """Fill main_params with what `copied_main_params` returned."""
        self._state_dicts(groups).set_main_params(main_params)
        self._buffers.forget_agreement()

    def _main_versions(self) -> int:
        return sum(e.main_param._version for e in self._buffers.entries if e.main_param is not None)

    def _state_dicts(self, groups: Sequence[Group]) -> StateDicts:
        sharding = self._buffers.sharding
        part = f"{sharding.rank} of {sharding.num_shards}" if sharding.is_sharded else None
        return StateDicts(self._inner, groups, self._registration.entries, part)


def _on_cpu(state: Any) -> Any:
    """Return a copy of state on the CPU, with float32 tensors in the place of narrow ones."""

    def copy(_: Path, leaf: Any) -> Any:
        leaf = widen(leaf) if is_narrow(leaf) else leaf
        return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf

    return map_leaves(copy, state, is_leaf=is_narrow)


def _lost_by_checkpoint(groups: Sequence[Group], state_dict: dict[str, Any]) -> list[bool]:
    """Return which of ``groups`` torch.distributed.checkpoint lost, if it called: one that is empty, or none."""
    is_empty = [not group["params"] for group in groups]
    if sum(is_empty) != 1 or checkpoint_wants() is None or len(state_dict.get("param_groups", ())) != len(is_empty):
        return []
    return is_empty
