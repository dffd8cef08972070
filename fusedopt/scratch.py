"""Copies of optimizers that nobody notices: made for small experiments, stepped, dropped.

Knows nothing of buckets, ranks or files.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
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


@contextlib.contextmanager
def global_step_hooks_muted() -> Iterator[None]:
    """Keep torch's global step hooks to the wrapper's own step, which fires them: once a step, not twice."""
    registries: list[dict[Any, Any]] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]
    saved = [dict(registry) for registry in registries]
    for registry in registries:
        registry.clear()
    try:
        yield
    finally:
        for registry, hooks in zip(registries, saved, strict=True):
            registry.update(hooks)
