"""Find out, by running it, how an inner optimizer may be sharded.

    parameters -> [layout] -> ...

An element-wise optimizer (AdamW, SGD, Lion) gives the same bits on a tensor and on its pieces; one that works on whole
tensors (Muon, Adafactor; Lamb, by its norms) does not, and needs whole parameters; a coupled one (Prodigy) lets one
parameter decide about another, and cannot be sharded at all. So copies of the optimizer step a tensor, its pieces as
a shard cuts them, and the tensor beside another one; what they make of values and of each parameter's state is
compared. Gradients differ in size from piece to piece, which a norm or a mean of the whole would carry across.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.inner.copies import copy_over, unnoticed
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.nested import is_alike, map_leaves
from fusedopt.sharding.dtensor import is_cut

_SHAPES = ((16, 24), (384,), (4, 4, 3, 8))
_CUTS = (0, 64, 128, 320, 384)
"""Multiples of what a vectorised loop takes at once: its rest may round in another way (AdamW with fused=True)."""

_ODD_CUTS = (0, 1, 100, 163, 384)
"""Such a rest, and an element alone; compared but for rounding."""

_LARGE_SHAPE = (136, 144)
_LARGE_CUTS = (0, 8192, 12992, 136 * 144)
"""Beyond the sizes from which classes factor (128) or quantise (4096) their state."""

_ROUNDING = 2.0**-18
"""Of a value and of its way from the start, relative: 12 to 64 steps, each of some 2**-24."""

_SCALES = (1.0, 300.0, 0.003, 20.0)
_MIN_STEPS, _MAX_STEPS = 12, 64
_NEAR = 3
_MIN_LR = 1e-3


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
        self.decided: list[str] = []
        """By group, once `check` has looked at a shard; ranks have to agree."""

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
                self.decided.append(self(index))
            if cut and shard_by(self._inner, "auto", index) == "parameter":
                raise ValueError(
                    f"{type(self._inner.optimizer_of(index)).__name__} works on whole matrices, and of parameter "
                    f"{cut[0]} this rank has a part (DTensor). Give such parameters an element-wise optimizer (AdamW), "
                    "or place them Replicate()"
                )


@dataclass(frozen=True)
class Found:
    """What was found out about the optimizer of one group.

    Args:
        is_elementwise: a tensor may be cut anywhere.
        is_coupled: what becomes of one parameter depends on another one.
        doubt: why neither may be believed; None: nothing.
    """

    is_elementwise: bool = False
    is_coupled: bool = False
    doubt: str | None = None


def shard_by(inner: InnerOptimizers, wanted: str, index: int) -> str:
    """Return ``"element"`` or ``"parameter"`` for the parameters of group ``index``.

    Runs copies of the inner optimizer, with the settings of that group, on small tensors and compares bits; the
    optimizer itself, and what it holds, is not touched. Where that tells nothing, parameters stay whole, and a warning
    says so.

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
    found = find_out(optimizer, group)
    if found.is_coupled:
        raise ValueError(
            f"{name} cannot be sharded: what it does to one parameter depends on the others, and a rank would see "
            'only its own. Use shard="none"'
        )
    if wanted == "element" and not found.is_elementwise:
        raise ValueError(
            f'shard_by="element" cuts through parameters, and {name} gives other results on the elements of a matrix '
            'than on the matrix. Use shard_by="parameter", or "auto"'
        )
    if found.doubt is not None:
        warnings.warn(
            f"whether {name} may be sharded was not found out: {found.doubt}. Its parameters stay whole, each on one "
            'rank; if what it does to one depends on others, use shard="none"',
            UserWarning,
            stacklevel=2,
        )
    return "element" if found.is_elementwise and wanted != "parameter" else "parameter"


def find_out(optimizer: Optimizer, group: dict[str, Any]) -> Found:
    """Step copies of ``optimizer`` with the settings of ``group``; see the top of this file."""
    trial = _Trial(optimizer, group)
    with unnoticed(trial.device), torch.no_grad():
        return _found(trial)


def _found(trial: _Trial) -> Found:
    part = _draw_part(_CUTS, trial.num_steps)
    other = _Part(part.start.flip(0), [100.0 * gradient.flip(0) for gradient in part.gradients])
    try:
        whole = trial.run_first(part.view(_SHAPES[0]))
        beside = trial.run([other.view(_SHAPES[0])])
    except Exception as error:  # a third party's class on tensors it was not written for
        return Found(doubt=f"a copy raised {type(error).__name__}: {error}")
    if trial.has_drawn:
        return Found(doubt="it draws random numbers, which differ between ranks and layouts")
    try:
        together = trial.run([part.view(_SHAPES[0]), other.view(_SHAPES[0])])
    except Exception as error:
        return Found(doubt=f"a copy with two parameters raised {type(error).__name__}: {error}")
    if not all(_agree(*pair) for pair in zip(together, [*whole, *beside], strict=True)):
        return Found(is_coupled=True)
    is_elementwise = (
        trial.is_cut_alike(part, _SHAPES, _CUTS)
        and trial.is_cut_alike(part, _SHAPES[:1], _ODD_CUTS, is_exact=False)
        and trial.is_cut_alike(_draw_part(_LARGE_CUTS, _MIN_STEPS), [_LARGE_SHAPE], _LARGE_CUTS)
    )
    if is_elementwise and trial.far:
        near = trial.brought_near()
        with contextlib.suppress(Exception):  # such settings may make no sense together
            near.run([part.view(_SHAPES[0])])
            is_elementwise = near.is_cut_alike(part, _SHAPES[:1], _CUTS)
    return Found(is_elementwise=is_elementwise)


@dataclass(frozen=True)
class _Part:
    """A parameter to be, or a piece of one."""

    start: Tensor
    gradients: list[Tensor]

    def view(self, shape: tuple[int, ...]) -> _Part:
        return _Part(self.start.view(shape), [gradient.view(shape) for gradient in self.gradients])

    def piece(self, start: int, end: int) -> _Part:
        return _Part(self.start[start:end], [gradient[start:end] for gradient in self.gradients])


def _draw_part(cuts: Sequence[int], num_steps: int) -> _Part:
    """Return a flat part whose values and gradients differ in size from piece to piece, and step to step.

    Gradients keep to a direction, by which optimizers that estimate a learning rate raise it.
    """
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(cuts[-1], generator=generator)

    def draw(turn: int) -> Tensor:
        flat = direction + torch.randn(cuts[-1], generator=generator)
        for number, (start, end) in enumerate(itertools.pairwise(cuts)):
            is_silent = turn % 5 == 3 and (turn // 5) % (len(cuts) - 1) == number
            flat[start:end] *= 0.0 if is_silent else _SCALES[(number + turn) % len(_SCALES)]
        return flat

    return _Part(draw(1), [draw(step) for step in range(num_steps)])


class _Trial:
    """Runs copies of one optimizer.

    Args:
        optimizer: an inner one. Not touched.
        group: whose settings count.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self.device = group["params"][0].device if group["params"] else torch.device("cpu")
        self.has_drawn = False
        # Past warm-ups and intervals, as far as whole numbers among the settings name some.
        numbers = {key: value for key, value in (vars(optimizer) | group).items() if type(value) is int}
        self.far = {key for key, value in numbers.items() if value + 2 > _MAX_STEPS}
        self.num_steps = max([_MIN_STEPS, *(value + 2 for key, value in numbers.items() if key not in self.far)])
        self._near: set[str] = set()
        self._takes_closure = False

    def brought_near(self) -> _Trial:
        """Return a trial in which what would begin after more steps than are run begins at once."""
        trial = _Trial(self._optimizer, self._group)
        trial._near, trial.num_steps, trial._takes_closure = self.far, self.num_steps, self._takes_closure
        return trial

    def run_first(self, part: _Part) -> list[tuple[Tensor, Any]]:
        """Return `run` of one part, with a closure where the class does not step without; watch for random numbers."""
        try:
            return self.run([part], watch=True)
        except Exception as error:
            try:
                self._takes_closure = True
                return self.run([part], watch=True)
            except Exception:
                raise error from None

    def run(self, parts: Sequence[_Part], *, watch: bool = False) -> list[tuple[Tensor, Any]]:
        """Return values and per-parameter state after stepping ``parts`` together.

        Args:
            parts: in the shape of the parameters that are stepped.
            watch: note in ``has_drawn`` whether random numbers were drawn.

        Raises:
            Exception: what the class raised.
            FloatingPointError: if there are no numbers in the end.
        """
        params = [nn.Parameter(part.start.clone().to(self.device)) for part in parts]
        copied = copy_over(self._optimizer, self._group, params)
        self._wake(copied.param_groups[0])
        for settings in (vars(copied), copied.param_groups[0]):
            settings.update(dict.fromkeys(self._near & settings.keys(), _NEAR))
        before = self._random_state() if watch else None
        for gradients in zip(*(part.gradients for part in parts), strict=True):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient.clone().to(self.device)
            copied.step(_no_closure) if self._takes_closure else copied.step()
        self.has_drawn = self.has_drawn or (watch and self._random_state() != before)
        if not all(bool(torch.isfinite(param).all()) for param in params):
            raise FloatingPointError("values that are not finite")
        states = [dict(copied.state.get(param, {})) for param in params]
        plain = (map_leaves(lambda _, leaf: _plain(leaf), state) for state in states)
        return [(param.detach().cpu(), state) for param, state in zip(params, plain, strict=True)]

    @staticmethod
    def _wake(group: dict[str, Any]) -> None:
        """Raise a learning rate at which values would hardly move, as before a warm-up."""
        lr = group.get("lr")
        if isinstance(lr, (int, float, Tensor)) and 0 <= float(lr) < _MIN_LR:
            group["lr"] = lr.fill_(_MIN_LR) if isinstance(lr, Tensor) else _MIN_LR

    def _random_state(self) -> Any:
        cuda = torch.cuda.get_rng_state(self.device).numpy().tobytes() if self.device.type == "cuda" else b""
        numpys: Any = numpy.random.get_state()
        return torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), numpys[1].tobytes(), numpys[2:]

    def is_cut_alike(
        self, part: _Part, shapes: Sequence[tuple[int, ...]], cuts: Sequence[int], *, is_exact: bool = True
    ) -> bool:
        """Return whether ``part``, in each of ``shapes``, ends as its pieces do, each stepped by a copy of its own."""
        same = _same if is_exact else _Near(part.start)
        try:
            pieces = [self.run([part.piece(start, end)])[0] for start, end in itertools.pairwise(cuts)]
            return all(_is_made_of(self.run([part.view(shape)])[0], pieces, cuts[-1], same) for shape in shapes)
        except Exception:  # it takes matrices only, or large ones
            return False


@dataclass(frozen=True)
class _Near:
    """Compares as `_same` does, but for rounding."""

    start: Tensor

    def __call__(self, one: Any, other: Any) -> bool:
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.is_floating_point()):
            return _same(one, other)
        if one.shape != other.shape:
            return False
        a, b = one.double(), other.double()
        size = torch.maximum(a.abs(), b.abs())
        if one.numel() == self.start.numel():
            size = torch.maximum(size, self.start.double().abs().view_as(a))
        return bool(((a - b).abs() <= _ROUNDING * size).all())


def _no_closure() -> Any:
    return torch.ones(())


def _plain(value: Any) -> Any:
    """Return a leaf of state as it is compared: a tensor copied, a number, anything else by its type."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def _same(one: Any, other: Any) -> bool:
    """Return whether two leaves are the same."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        is_both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype is other.dtype
        return is_both and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _agree(one: tuple[Tensor, Any], other: tuple[Tensor, Any]) -> bool:
    """Return whether values and what both have of state are the same; a class may keep a count with its first one.

    So not all of `nested.is_alike`: of dicts, only what is in both.
    """

    def common(a: Any, b: Any) -> bool:
        if isinstance(a, dict) and isinstance(b, dict):
            return all(common(a[key], b[key]) for key in a if key in b)
        return is_alike(_same, a, b)

    return _same(one[0], other[0]) and common(one[1], other[1])


def _is_made_of(whole: Any, pieces: Sequence[Any], numel: int, same: Callable[[Any, Any], bool]) -> bool:
    """Return whether ``whole`` is ``pieces`` in a row where it has ``numel`` elements, else like each of them."""

    def is_made_of(whole: Any, *pieces: Any) -> bool:
        if not (isinstance(whole, Tensor) and whole.numel() == numel):
            return all(same(whole, piece) for piece in pieces)
        if not all(isinstance(piece, Tensor) and piece.dtype is whole.dtype for piece in pieces):
            return False
        return same(whole.flatten(), torch.cat([piece.flatten() for piece in pieces]))

    return is_alike(is_made_of, whole, *pieces)
