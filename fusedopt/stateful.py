"""The half of the wrapper that outlives a step: state dicts, copies, and the way back to the bare optimizer.

    ... -> step -> write-back -> gather -> [checkpoint]

Knows nothing of the step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from fusedopt.adoption import Adoption
from fusedopt.arrival import Arrival
from fusedopt.buffers import Buffers
from fusedopt.clip import Clip
from fusedopt.comm import DataParallelGroup
from fusedopt.config import MainGradConfig
from fusedopt.gather import Gather
from fusedopt.inner import InnerOptimizers, from_portable
from fusedopt.state import StateDicts, copy_for_hooks

GONE_WHEN_UNWRAPPED = ("_inner", "_buffers", "_arrival", "_adoption", "_update", "_gather", "_reduction")


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
    _finalizer: weakref.finalize[Any, Any]

    def _wire(self, inner: InnerOptimizers, config: MainGradConfig, comm: DataParallelGroup) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return parameters' main_param and inner state in full precision, and the groups; never communicates.

        Tensors are the live ones, as with torch. Read it back with ``torch.load(weights_only=True)``.

        Raises:
            TypeError: naming inner state that is neither a tensor nor a builtin.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._gather.finish()
        self._arrival.adopt()
        self._inner.agree(self.param_groups)
        state_dict = self._state_dicts().pack()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or a bare torch optimizer's state dict, into existing storage.

        The model's weights are not touched: at the next step an element whose model value still is the rounded
        main_param keeps the loaded main_param, so that model and optimizer load in either order.

        Raises:
            ValueError: naming what does not fit (groups, names, shapes, dtypes); nothing was changed.
        """
        state_dict = copy_for_hooks(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state_dicts = self._state_dicts()
        state_dicts.check(state_dict)
        state_dicts.unpack(state_dict)
        self._buffers.forget_agreement()
        self._inner.forget_steps()
        self._inner.agree(self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _state_dicts(self) -> StateDicts:
        return StateDicts(self._inner, self.param_groups, self._adoption.entries)

    def unwrap(self) -> Optimizer | list[Optimizer]:
        """Give back the inner optimizer (the list, if several) over the model's own parameters.

        Every hook and attribute is removed; state is cast to the parameters' dtype, as torch keeps it; the
        fp32 digits of main_params are gone. The wrapper cannot be used any more.
        """
        self._gather.finish()
        self._inner.agree(self.param_groups)
        optimizers = list(self._inner.optimizers)
        self._finalizer()
        for name in GONE_WHEN_UNWRAPPED:
            del vars(self)[name]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of; gradients and a pending window are left out, as in torch."""
        self._inner.agree(self.param_groups)
        return {
            "config": self.config,
            "comm": self._comm,
            "inner": self._inner.portable(),
            "main_params": [main if main is None else main.clone() for main in self._state_dicts().main_params()],
            "skipped_steps": self._clip.skips.total(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wrap the copied inner optimizers anew, on buffers of their own."""
        optimizers = from_portable(state["inner"])
        self._wire(InnerOptimizers(optimizers), state["config"], state["comm"])
        self._inner.take_state(state["inner"])
        self._state_dicts().set_main_params(state["main_params"])
        self._buffers.forget_agreement()
        self._clip.skips.restore(state["skipped_steps"])
