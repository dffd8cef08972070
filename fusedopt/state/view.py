"""``optimizer.state`` of the wrapper: the inner optimizers' state, keyed by model parameter.

Knows nothing of ranks or files.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from typing import Any

from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.sharding.dcp_pieces import checkpoint_wants


class StateView(MutableMapping[Any, Any]):
    """``optimizer.state`` by model parameter: a live view of the inner optimizers' state by main_param."""

    def __init__(self, inner: InnerOptimizers) -> None:
        self._inner = inner

    def _home(self, key: Hashable) -> Any:
        main_param = self._inner.main_of(key)
        return {None: {}} if main_param is None else self._inner.home_of(main_param).state  # None: on another rank

    def __bool__(self) -> bool:
        # torch.distributed.checkpoint makes a step where there is no state yet; ours is listed without one.
        return len(self) > 0 or checkpoint_wants() is not None

    def __getitem__(self, key: Any) -> Any:
        if checkpoint_wants() is not None:  # it takes from here the names of what it loads
            return self._inner.for_checkpoint(key)
        return self._home(key)[self._inner.main_of(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._home(key)[self._inner.main_of(key)] = value

    def __delitem__(self, key: Any) -> None:
        del self._home(key)[self._inner.main_of(key)]

    def __iter__(self) -> Iterator[Any]:
        return (self._inner.param_of(key) for opt in self._inner.optimizers for key in list(opt.state))

    def __len__(self) -> int:
        return sum(len(opt.state) for opt in self._inner.optimizers)

    def __contains__(self, key: object) -> bool:
        return any(self._inner.main_of(key) in opt.state for opt in self._inner.optimizers)
