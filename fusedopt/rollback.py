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

from fusedopt.loading import settle

_SCALARS = (bool, int, float, str, type(None))


class Snapshot:
    """Parameters, state, hyper-parameters and counters of one inner optimizer, as they are now.

    Args:
        optimizer: an inner one.
        params: the main_params that it updates here.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._values = [(param, param.detach().clone()) for param in params]
        self._state = {key: settle(None, value, other=_same) for key, value in optimizer.state.items()}
        self._groups = [
            {key: settle(None, value, other=_same) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._counters = {key: value for key, value in vars(optimizer).items() if type(value) in _SCALARS}

    def has_moved(self) -> bool:
        """Return whether a parameter has other bits than it had; one host read for each."""
        return not all(torch.equal(_bits(param), _bits(value)) for param, value in self._values)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, into the same tensors where they still are there."""
        optimizer = self._optimizer
        for param, value in self._values:
            param.copy_(value)
        for made in [key for key in optimizer.state if key not in self._state]:
            del optimizer.state[made]
        for key, value in self._state.items():
            optimizer.state[key] = settle(optimizer.state.get(key), value, other=_same)
        for group, values in zip(optimizer.param_groups, self._groups, strict=True):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            group.update({name: settle(group.get(name), value, other=_same) for name, value in values.items()})
        vars(optimizer).update(self._counters)


def _bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers: a nan equals itself there."""
    return tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _same(value: Any) -> Any:
    return value
