"""What an inner optimizer's step may have changed, kept until it is sure that the step stays.

    ... -> clip -> [inner step] -> write-back -> ...

Knows nothing of closures, buckets or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt.inner.loading import load_into
from fusedopt.nested import is_alike

_SCALARS = (bool, int, float, str, type(None))
_COMPARED = (*_SCALARS, complex, bytes, set, frozenset, torch.Size)


class Snapshot:
    """Parameters, state, hyper-parameters and counters of one inner optimizer, as they are now.

    Args:
        optimizer: an inner one.
        params: the main_params that it updates here.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._values = [(param, param.detach().clone()) for param in params]
        self._state = {key: load_into(None, value, other=_same) for key, value in optimizer.state.items()}
        self._groups = [
            {key: load_into(None, value, other=_same) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._versions = [param._version for param in params]
        self._counters = _counters(optimizer)

    def has_moved(self) -> bool:
        """Return whether a parameter was written, or has other bits than it had; one host read for each."""
        if [param._version for param, _ in self._values] != self._versions:
            return True
        return not all(_is_same(param, value) for param, value in self._values)

    def is_untouched(self) -> bool:
        """Return whether parameters, state, hyper-parameters and counters all are what they were."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        now = (dict(self._optimizer.state), groups, _counters(self._optimizer))
        return not self.has_moved() and is_alike(_is_same, now, (self._state, self._groups, self._counters))

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, into the same tensors where they still are there."""
        optimizer = self._optimizer
        for param, value in self._values:
            param.copy_(value)
        for made in [key for key in optimizer.state if key not in self._state]:
            del optimizer.state[made]
        for key, value in self._state.items():
            optimizer.state[key] = load_into(optimizer.state.get(key), value, other=_same)
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: load_into(group.get(name), value, other=_same) for name, value in values.items()})
        for counter in _counters(optimizer).keys() - self._counters.keys():
            del vars(optimizer)[counter]
        vars(optimizer).update(self._counters)


class Counters:
    """What an inner optimizer counts in its groups and in itself, where one step is made of several calls.

    Args:
        optimizer: an inner one; as it is before the step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = list(optimizer.param_groups)
        self._before = [_hyper_parameters(group) for group in self._groups], _counters(optimizer)
        self._after = self._before

    def rewind(self) -> None:
        """Put back what was before the step, and note what calls since then made of it."""
        self._note()
        self._set(*self._before)

    def finish(self) -> None:
        """Put in place what the step made of it."""
        self._note()
        self._set(*self._after)

    def _note(self) -> None:
        before, counters = self._before
        groups = [_hyper_parameters(group) for group in self._groups]
        kept, kept_counters = self._after
        now = _counters(self._optimizer)
        self._after = (
            [
                known if is_alike(_is_same, new, old) else new
                for new, old, known in zip(groups, before, kept, strict=True)
            ],
            kept_counters if is_alike(_is_same, now, counters) else now,
        )

    def _set(self, groups: Sequence[dict[str, Any]], counters: dict[str, Any]) -> None:
        for group, values in zip(self._groups, groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: load_into(group.get(name), value, other=_same) for name, value in values.items()})
        for name in _counters(self._optimizer).keys() - counters.keys():
            del vars(self._optimizer)[name]
        vars(self._optimizer).update(counters)


def _hyper_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: load_into(None, value, other=_same) for key, value in group.items() if key != "params"}


def _counters(optimizer: Optimizer) -> dict[str, Any]:
    return {key: value for key, value in vars(optimizer).items() if type(value) in _SCALARS}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype is other.dtype and torch.equal(_bits(one), _bits(other))
    return one is other or (type(one) in _COMPARED and type(one) is type(other) and bool(one == other))


def _bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers: a nan equals itself there."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(kinds[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _same(value: Any) -> Any:
    return value
