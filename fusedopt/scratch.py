"""Copies of optimizers that nobody notices: made for small experiments, stepped, dropped.

Knows nothing of buckets, ranks or files.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import logging
import pickle
import random
import sys
import types
import warnings
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusedopt.main_grad import OUR_ATTRIBUTES

_MAX_OBJECTS = 100_000
_MAX_NUMEL = 2**20
"""What a copy may hold beside state. More is somebody's model or data."""

_MAX_DRAWS = 10_000
"""Random operators in one step."""

_SHARED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, weakref.ref),
    *(logging.Logger, str, bytes, int, float, complex, type(None), torch.dtype, torch.device),
)
"""What `copy.deepcopy` hands on as it is."""


def from_portable(parts: Sequence[tuple[type[Optimizer], dict[str, Any]]]) -> list[Optimizer]:
    """Rebuild plain optimizers from `InnerOptimizers.portable`, the way torch unpickles them, without state."""
    optimizers = []
    for cls, state in parts:
        opt = cls.__new__(cls)
        opt.__setstate__({**state, "state": defaultdict(dict)})
        optimizers.append(opt)
    return optimizers


class CannotCopy(RuntimeError):
    """An optimizer holds what a small experiment must not touch, or cannot have a copy of."""


def copy_over(optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor], fence: Fence) -> Optimizer:
    """Return a copy of ``optimizer``, without state, with the settings of ``group`` over ``params`` alone.

    It shares no tensor and no Python object with the original; optimizers inside it are copied likewise. Left out are
    state, other groups, and what callers hang on an optimizer: step hooks, and methods replaced on the instance, as
    schedulers do with ``step``. Functions are shared, and may know tensors: let it step only inside ``fence``.

    Raises:
        CannotCopy: if it holds parameters beside its groups, or large tensors beside its state.
    """
    made = _Copy(optimizer, group, params)
    fence.own([*params, *made.clones])
    fence.watch(made.generators)
    return made.optimizer


def state_from_the_start(optimizer: Optimizer, group: dict[str, Any], param: Tensor) -> dict[Any, Any]:
    """Return state for ``param`` as a constructor made it for the parameters of ``group``; empty if that is not known.

    A constructor can hardly make more than the parameter's own value, constants, and counts.
    """
    models = [each for each in group["params"] if each in optimizer.state and each.numel() > 1]
    if not models:
        return {}
    model = min(models, key=Tensor.numel)
    try:
        state: dict[Any, Any] = _imitated(dict(optimizer.state[model]), model, param)
    except LookupError:
        return {}
    return state


def _imitated(value: Any, model: Tensor, param: Tensor) -> Any:
    if isinstance(value, Tensor):
        dtype = param.dtype if value.dtype is model.dtype else value.dtype
        if value.numel() == 1:
            return value.detach().to(dtype, copy=True)
        if value.shape != model.shape:
            raise LookupError
        if torch.equal(value, model):
            return param.detach().to(dtype, copy=True)
        if bool((value == value.reshape(-1)[0]).all()):
            return torch.full_like(param, value.reshape(-1)[0].item(), dtype=dtype, requires_grad=False)
        raise LookupError
    if isinstance(value, dict):
        return {key: _imitated(item, model, param) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_imitated(item, model, param) for item in value)
    return copy.deepcopy(value)


class _Copy:
    """A copy under construction: looks at all that `copy.deepcopy` would copy, and says first what stands for what."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        self._params = list(params)
        self._replaced = {id(param) for param in group["params"]}
        self._live = {id(param) for each in optimizer.param_groups for param in each["params"]}
        self._memo: dict[int, Any] = {id(group["params"]): self._params}
        self._fill: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._wanted = group
        self._numel = 0
        self._generators: list[Any] = []
        self.clones: list[Tensor] = []
        try:
            self._walk(optimizer)
            for empty, content in self._fill:
                empty.update(copy.deepcopy(content, self._memo))
        except CannotCopy:
            raise
        except Exception as error:  # whatever a third party's object does about being copied
            raise CannotCopy(f"holds what cannot be copied ({error!r})") from error
        self.optimizer: Optimizer = self._memo[id(optimizer)]
        self.generators = [self._memo.get(id(generator), generator) for generator in self._generators]

    def _walk(self, root: Any) -> None:
        waiting, seen = [root], {id(self._memo)}
        while waiting:
            value = waiting.pop()
            if isinstance(value, types.FunctionType):
                self._check_function(value)
            if id(value) in seen or id(value) in self._memo or isinstance(value, _SHARED):
                continue
            seen.add(id(value))
            if len(seen) > _MAX_OBJECTS:
                raise CannotCopy(f"holds more than {_MAX_OBJECTS} objects beside its state")
            if isinstance(value, (random.Random, np.random.RandomState, np.random.Generator)):
                self._generators.append(value)
            if isinstance(value, Tensor):
                self._add_tensor(value)
            elif isinstance(value, Optimizer):
                waiting += self._add_optimizer(value)
            else:
                waiting += gc.get_referents(value)

    def _check_function(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                if isinstance(cell.cell_contents, Optimizer) or id(cell.cell_contents) in self._live:
                    raise CannotCopy(f"holds a function ({function.__qualname__}) that knows it or its parameters")

    def _add_tensor(self, tensor: Tensor) -> None:
        if id(tensor) in self._live:
            raise CannotCopy("holds parameters beside its param_groups, or a model")
        self._numel += tensor.numel()
        if self._numel > _MAX_NUMEL:
            raise CannotCopy(f"holds tensors of more than {_MAX_NUMEL} elements beside its state")
        clone = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        self.clones.append(clone)
        self._memo[id(tensor)] = clone

    def _add_optimizer(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """Make the objects that stand for ``optimizer`` and its parts; return what these have to be filled with."""
        first = len(self._fill)
        cls, attributes = type(optimizer), dict(vars(optimizer))
        made = self._memo[id(optimizer)] = cls.__new__(cls)
        state = attributes.get("state")
        if isinstance(state, dict):
            kept: defaultdict[Any, Any] = defaultdict(dict)
            self._memo[id(state)] = kept
            self._fill.append((kept, {key: value for key, value in state.items() if not isinstance(key, Tensor)}))
        if id(optimizer.param_groups) not in self._memo:  # an optimizer around another one may show that one's
            self._memo[id(optimizer.param_groups)] = [self._stand_in(g) for g in optimizer.param_groups if self._has(g)]
        for key, value in list(attributes.items()):
            if key.startswith("_optimizer_") and key.endswith("_hooks"):
                attributes[key] = OrderedDict()
            elif callable(value) and hasattr(cls, key):
                del attributes[key]
        self._fill.append((vars(made), attributes))
        return [content for _, content in self._fill[first:]]

    def _has(self, group: dict[str, Any]) -> bool:
        params = {id(param) for param in group["params"]}
        if group is not self._wanted and params != self._replaced and params & self._replaced:
            raise CannotCopy("holds another optimizer, whose groups are cut in another way")
        return group is self._wanted or params == self._replaced

    def _stand_in(self, group: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        self._memo[id(group)] = made
        self._memo[id(group["params"])] = self._params
        self._fill.append((made, {key: value for key, value in group.items() if key != "param_names"}))
        return made


class _PlainCopies(TorchFunctionMode):
    """Lets `copy.deepcopy` of a tensor go by way of an operator, which a `Fence` sees: torch's copies the storage."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


class Fence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operators write only into tensors that were made inside it, and notices random numbers.

    Operators that draw begin anew each time: what one parameter gets does not depend on how many there are.
    However a copy comes by a tensor of the original (a function's closure, a module's global), it cannot change it.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: str | None = None
        """The operator that would have written into a tensor from outside; its callers may have caught the error."""
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._ours: set[int] = set()
        self._drew = False
        self.watch(())
        self.seed(0)

    def own(self, tensors: Sequence[Tensor]) -> None:
        """Let ``tensors`` be written, too."""
        self._ours.update(map(_storage_of, tensors))

    def seed(self, number: int) -> None:
        """Seed all generators."""
        self._drew = self.drew
        self._number, self._num_draws = number, 0
        for generator in self._generators:
            generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        self.watch(self._watched)

    def watch(self, generators: Sequence[Any]) -> None:
        """Notice what is drawn from ``generators`` of Python and numpy, beside those that their modules have."""
        self._watched = generators
        self._before = _states_of(generators)

    @property
    def drew(self) -> bool:
        """Whether random numbers were drawn inside."""
        return self._drew or self._before != _states_of(self._watched)

    def _begin_anew(self, given: torch.Generator | None) -> None:
        self._drew = True
        self._num_draws += 1
        if self._num_draws > _MAX_DRAWS:
            raise RuntimeError("it draws until it likes what it gets, and here it gets the same each time")
        for generator in self._generators if given is None else [given]:
            generator.manual_seed(self._number)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func``, unless it would write into a tensor from outside."""
        kwargs = kwargs or {}
        written, is_fresh, is_random = _effects(func)
        if is_random:
            self._begin_anew(kwargs.get("generator"))
        for position, name in written:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors_in(value):
                if _storage_of(tensor) not in self._ours:
                    self.refused = str(func)
                    raise RuntimeError(f"{func} would write into a tensor that is not the copy's own")
        result = func(*args, **kwargs)
        if is_fresh:  # by its schema; some (unsafe_split) give views all the same
            given = {_storage_of(tensor) for value in args for tensor in _tensors_in(value)}
            made = {_storage_of(tensor) for tensor in _tensors_in(result)}
            self._ours |= made if func is torch.ops.aten.lift_fresh.default else made - given
        return result


@functools.cache
def _effects(func: Any) -> tuple[list[tuple[int, str]], bool, bool]:
    """Return which arguments of an operator are written, and whether it makes new tensors and draws random numbers."""
    schema = func._schema
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    is_fresh = func is torch.ops.aten.lift_fresh.default or all(item.alias_info is None for item in schema.returns)
    return written, is_fresh, torch.Tag.nondeterministic_seeded in func.tags


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (list, tuple)) else []


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _states_of(generators: Sequence[Any]) -> list[bytes]:
    return [pickle.dumps(item) for item in (random.getstate(), np.random.get_state(), *generators)]


@contextlib.contextmanager
def unnoticed(device: torch.device) -> Iterator[Fence]:
    """Keep warnings, prints, random numbers and global step hooks out of what a copy does, and compilers away from it.

    Writes are kept out by the fence that this gives, once it is entered.
    """
    devices = [device] if device.type == "cuda" else []
    drawn = random.getstate(), np.random.get_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(global_step_hooks_muted())
        stack.enter_context(_PlainCopies())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        warnings.simplefilter("ignore")
        try:
            yield Fence(device)
        finally:
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])


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
        with unnoticed(param.device) as fence, torch.no_grad():
            copied = copy_over(optimizer, group, [param], fence)
            fence.own([param.grad])
            with fence:
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
