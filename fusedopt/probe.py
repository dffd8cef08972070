"""Find out, by running it, how an inner optimizer may be sharded.

    parameters -> [layout] -> ...

An element-wise optimizer (AdamW, SGD, Lion) gives the same bits on a matrix and on its elements in a row; a
shape-aware one (Muon, Shampoo, Adafactor) does not, and needs whole parameters; a coupled one (Prodigy) lets one
parameter decide about another, and cannot be sharded at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.dtensor import is_cut
from fusedopt.inner import InnerOptimizers
from fusedopt.scratch import copy_over, unnoticed

_SHAPE = (8, 12)
_NUM_STEPS = 3


class ShardBy:
    """Decides of each parameter group whether its parameters may be cut.

    Args:
        inner: the wrapped optimizers.
        wanted: the setting ``shard_by``: ``"auto"``, ``"element"`` or ``"parameter"``.
    """

    def __init__(self, inner: InnerOptimizers, wanted: str) -> None:
        self._inner = inner
        self._wanted = wanted
        self._known: dict[tuple[type, str], str] = {}

    def __call__(self, index: int) -> str:
        """Return `shard_by` of group ``index``; groups with equal settings are tried once."""
        group = self._inner.group(index)
        settings = {key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        key = (type(self._inner.optimizer_of(index)), repr(settings))
        if key not in self._known:
            self._known[key] = shard_by(self._inner, self._wanted, index)
        return self._known[key]

    def check(self, *, is_sharded: bool) -> None:
        """Raise what `shard_by` raises, for any group that is sharded; and for DTensors cut by torch's engines.

        Raises:
            ValueError: also if an inner optimizer that needs whole matrices would get a rank's rows of one.
        """
        for index in range(self._inner.num_groups):
            params = self._inner.group(index)["params"]
            names = self._inner.group(index).get("param_names") or [
                f"number {i} of its group" for i in range(len(params))
            ]
            cut = [name for name, param in zip(names, params, strict=True) if is_cut(param)]
            if is_sharded:
                self(index)
            if cut and shard_by(self._inner, "auto", index) == "parameter":
                raise ValueError(
                    f"{type(self._inner.optimizer_of(index)).__name__} works on whole matrices, and of parameter "
                    f"{cut[0]} this rank has a part (DTensor). Give such parameters an element-wise optimizer (AdamW), "
                    "or place them Replicate()"
                )


def shard_by(inner: InnerOptimizers, wanted: str, index: int) -> str:
    """Return ``"element"`` or ``"parameter"`` for the parameters of group ``index``.

    Runs copies of the inner optimizer, with the settings of that group, on small tensors and compares bits; the
    optimizer itself is not touched.

    Args:
        inner: the wrapped optimizers.
        wanted: the setting ``shard_by``: ``"auto"``, ``"element"`` or ``"parameter"``.
        index: of the group.

    Raises:
        ValueError: if one parameter's update depends on other parameters, or ``"element"`` is wanted and would
            change results.
    """
    optimizer, group = inner.optimizer_of(index), inner.group(index)
    name = type(optimizer).__name__
    one = _trace((_SHAPE,), optimizer, group)
    if one is None:  # it does not run on such tensors at all: whole parameters are what it was made for
        return "parameter"
    two = _trace((_SHAPE, _SHAPE), optimizer, group)
    if two is not None and not _same(one, two):
        raise ValueError(
            f"{name} cannot be sharded: what it does to one parameter depends on the others, and a rank would see "
            'only its own. Use shard="none"'
        )
    flat = _trace(((math.prod(_SHAPE),),), optimizer, group)
    is_elementwise = flat is not None and torch.equal(one[0].flatten(), flat[0])
    if wanted == "element" and not is_elementwise:
        raise ValueError(
            f'shard_by="element" cuts through parameters, and {name} gives other results on the elements of a matrix '
            'than on the matrix. Use shard_by="parameter", or "auto"'
        )
    return "element" if is_elementwise and wanted != "parameter" else "parameter"


def _draw(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(_SHAPE, generator=torch.Generator().manual_seed(seed)) * scale


def _trace(shapes: Sequence[tuple[int, ...]], optimizer: Optimizer, group: dict[str, Any]) -> list[Tensor] | None:
    """Step a copy of ``optimizer`` over parameters of ``shapes``, and return what it made of the first of them.

    That is its value, its state, and what the optimizer wrote into the group: a coupled one may show only there at
    first. None where it raises or gives no numbers.
    """
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    params = [nn.Parameter(_draw(number).view(shape).to(device)) for number, shape in enumerate(shapes)]
    with unnoticed(device), torch.no_grad():
        try:
            copied = copy_over(optimizer, group, params)
            for step in range(_NUM_STEPS):
                for number, param in enumerate(params):  # the second is a hundred times as steep
                    param.grad = _draw(10 * (step + 1) + number, 1.0 + 99.0 * number).to(device).view_as(param)
                for generator in generators:  # an optimizer that draws noise draws the first parameter's first
                    generator.manual_seed(step)
                copied.step()
        except Exception:  # a third party's class on tensors it was not written for
            return None
    written = {key: value for key, value in copied.param_groups[0].items() if key != "params"}
    trace = [params[0].detach(), *_tensors(dict(copied.state.get(params[0], {}))), *_tensors(written)]
    return trace if bool(torch.isfinite(trace[0]).all()) else None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach().clone()]
    if type(value) in (int, float):
        return [torch.tensor(value, dtype=torch.float64)]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in _tensors(item)]


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
