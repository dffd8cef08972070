"""Copies of optimizers that nobody notices: made for small experiments, stepped, dropped.

Knows nothing of buckets, ranks or files.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from fusedopt.main_grad import OUR_ATTRIBUTES


def from_portable(parts: Sequence[tuple[type[Optimizer], dict[str, Any]]]) -> list[Optimizer]:
    """Rebuild plain optimizers from `InnerOptimizers.portable`, the way torch unpickles them, without state."""
    optimizers = []
    for cls, state in parts:
        opt = cls.__new__(cls)
        opt.__setstate__({**state, "state": defaultdict(dict)})
        optimizers.append(opt)
    return optimizers


def copy_over(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> Optimizer:
    """Return a copy of ``optimizer``, without state, with the settings of ``group`` over ``params`` alone."""
    settings = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
    state: dict[str, Any] = {**optimizer.__getstate__(), "param_groups": [{**settings, "params": list(params)}]}
    state["defaults"] = dict(state.get("defaults", {}))  # torch adds to them where it unpickles
    (copied,) = from_portable([(type(optimizer), state)])
    for key, value in vars(optimizer).items():  # what a class keeps beside what torch pickles
        is_bound = inspect.ismethod(value) and value.__self__ is optimizer  # a scheduler's `step`, for one
        if key not in vars(copied) and not is_bound:
            setattr(copied, key, copy.copy(value) if isinstance(value, (dict, list, set)) else value)
    return copied


@contextlib.contextmanager
def unnoticed(device: torch.device) -> Iterator[None]:
    """Keep warnings, random numbers and global step hooks out of what a copy does."""
    devices = [device] if device.type == "cuda" else []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=devices), global_step_hooks_muted():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def state_to_come(optimizer: Optimizer, group: dict[str, Any], main_param: Tensor, name: str) -> dict[Any, Any]:
    """Return state as ``optimizer`` will have for ``main_param`` after its first step, with zeros in all tensors.

    A copy takes that step, with a zero gradient; nothing of the optimizer or the parameter moves.

    Raises:
        RuntimeError: naming the parameter, if that step raised.
    """
    param = nn.Parameter(main_param.detach().clone())
    vars(param).update({key: value for key, value in vars(main_param).items() if key not in OUR_ATTRIBUTES})
    param.grad = torch.zeros_like(param)
    try:
        with unnoticed(param.device), torch.no_grad():
            copied = copy_over(optimizer, group, [param])
            copied.step()
    except Exception as error:
        raise RuntimeError(
            f"what state {type(optimizer).__name__} will have for parameter {name} is not known before its first step: "
            f"a copy that made one raised {error!r}. Save or load with torch.distributed.checkpoint after a step, or "
            "use optimizer.state_dict() and load_state_dict()"
        ) from error
    state: dict[Any, Any] = _zeroed(dict(copied.state.get(param, {})))
    return state


def _zeroed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: _zeroed(item) for key, item in value.items()}
    return type(value)(_zeroed(item) for item in value) if type(value) in (list, tuple) else value


class _Quiet(MutableMapping[Any, Any]):
    """Stands in the place of one of torch's global registries while a thread mutes them: shows that thread no hook.

    All else reaches the registry. A hook that is registered meanwhile fires from the next step on; its handle refers to
    this object, which therefore stays.
    """

    def __init__(self, registry: dict[Any, Any]) -> None:
        self.registry = registry

    def values(self) -> Any:
        """Return what a step in this thread is to call."""
        if torch.compiler.is_compiling():  # an inner step, traced where this stands: Dynamo cannot ask for threads
            return ()
        return () if threading.get_ident() in _muting else self.registry.values()

    def __getitem__(self, key: Any) -> Any:
        return self.registry[key]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.registry[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self.registry[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.registry)

    def __len__(self) -> int:
        return len(self.registry)


_QUIET = {
    name: _Quiet(getattr(torch_optimizer, name))
    for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
}
"""By the name in torch's module, under which each step looks them up."""

_lock = threading.Lock()
_muting: list[int] = []
"""Threads that mute, one item for each `global_step_hooks_muted` that they are in."""


@contextlib.contextmanager
def global_step_hooks_muted() -> Iterator[None]:
    """Keep torch's global step hooks to the wrapper's own step, which fires them: once a step, not twice.

    Inside, hooks may be registered and removed, and other threads may step.
    """
    thread = threading.get_ident()
    with _lock:
        _muting.append(thread)
        vars(torch_optimizer).update(_QUIET)
    try:
        yield
    finally:
        with _lock:
            _muting.remove(thread)
            if not _muting:
                vars(torch_optimizer).update({name: quiet.registry for name, quiet in _QUIET.items()})
