"""Find out, by trying, whether an inner optimizer may be stepped bucket by bucket, on memory that comes and goes.

    [constructor] -> ...; step: -> clip -> [inner step, one bucket after the other] -> ...

An optimizer may let one parameter decide about another, count what each call does, or keep views of its parameters' or
its state's memory: then a step in pieces would go wrong in silence. So two copies of it step two small tensors, one in
the usual way, one in pieces whose memory is new in each step, and bits are compared, and how many random numbers were
drawn. A third begins with other weights, and tells which state follows these. State that is to be narrowed is narrowed
in a fourth, which must end near the first: some make weights of their state, and 1 % of that is no small error.

Knows nothing of buckets or ranks.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.inner.copies import NotCopied, copy_over, generators, reseed, unnoticed
from fusedopt.inner.narrow_state import SMALLEST, Narrowing, may_be_narrow, noise_for, replace, widen
from fusedopt.inner.rollback import Counters
from fusedopt.nested import Path, leaves

_SHAPES = ((24, 16), (9,))
_MATRICES = ((24, 16), (9, 12))
"""In the place of `_SHAPES` where a group has no vectors: some optimizers take matrices only."""

_NUM_STEPS = 5
_ABSENT = (2, 1)
"""The step in which a parameter has no gradient, and its number."""

_SHIFT = 3.0
"""Added to the weights of the third copy."""


@dataclass(frozen=True)
class Tried:
    """What trying a group's settings showed.

    Args:
        why_not: why all parameters must be stepped at once; None where they need not.
        following: paths, in a parameter's state, of tensors that follow the parameter itself.
        nonnegative: paths of tensors of the parameter's shape that were positive somewhere, and negative nowhere.
        negative: paths of those that were negative somewhere.
    """

    why_not: str | None
    following: frozenset[Path] = frozenset()
    nonnegative: frozenset[Path] = frozenset()
    negative: frozenset[Path] = frozenset()


MOST_LOST = 0.25
"""Of the movement of parameters, by rounding of state in `_NUM_STEPS` steps. Of 8 bits, AdamW loses 2 %, Lion and its
kin, which take signs, 6 %, and none of 87 classes more than 11 % (docs/optimizers.md)."""


def try_by_bucket(optimizer: Optimizer, group: dict[str, Any], state_dtype: str = "float32") -> Tried:
    """Try ``optimizer`` with the settings of ``group``. Neither the optimizer nor its parameters move.

    Args:
        optimizer: an inner one.
        group: one of its.
        state_dtype: what state is held as between steps; `MainGradConfig.state_dtype`.
    """
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    moves_state = state_dtype != "float32"
    try:
        with unnoticed(device), torch.no_grad():
            whole = _Run(optimizer, group, device)
            pieces = _Run(optimizer, group, device, in_pieces=True, moves_state=moves_state)
            shifted = _Run(optimizer, group, device, shift=_SHIFT) if moves_state else whole
            tried = _compare(whole, pieces, shifted)
            if tried.why_not is None and moves_state:
                narrowing = Narrowing(state_dtype, tried.following, tried.nonnegative)
                lost = _Run(optimizer, group, device, narrowing=narrowing).distance(whole)
                if not lost <= MOST_LOST:
                    return Tried(f"whose parameters end {lost:.0%} of their way elsewhere when its state is rounded")
            return tried
    except NotCopied as error:
        return Tried(f"of which no copy could be tried: {error}")
    except Exception as error:
        return Tried(f"a copy of which raised {error!r} when it was tried")


def _compare(whole: _Run, pieces: _Run, shifted: _Run) -> Tried:
    if not all(map(torch.equal, map(_bits, whole.values), map(_bits, pieces.values))):
        return Tried(
            "which ends elsewhere when it is stepped bucket by bucket: one parameter decides about another, or it keeps"
            " their memory"
        )
    if whole.generators != pieces.generators:
        return Tried("which draws random numbers for a step, and not for a parameter")
    following = [
        path
        for (number, path), one in whole.state.items()
        if (number, path) in shifted.state and bool((shifted.state[number, path] - one).abs().mean() > abs(_SHIFT) / 2)
    ]
    negative = frozenset(path for _, path in whole.negative | shifted.negative)
    positive = frozenset(path for _, path in whole.positive | shifted.positive)
    return Tried(None, frozenset(following), positive - negative, negative)


class _Run:
    """A few steps of a copy on two parameters.

    Attributes:
        values: where it brings them.
        state: tensors of a parameter's shape after the first step, by number of the parameter and path.
        negative, positive: which of those, after any step, had such elements.
        generators: where random numbers are in the end.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        device: torch.device,
        *,
        in_pieces: bool = False,
        moves_state: bool = False,
        shift: float = 0.0,
        narrowing: Narrowing | None = None,
    ) -> None:
        reseed(device)
        has_vectors = not group["params"] or any(param.ndim < 2 for param in group["params"])
        shapes = _SHAPES if has_vectors else _MATRICES
        self.values = [torch.linspace(-1.0, 1.0, math.prod(s), device=device).view(s) + shift for s in shapes]
        self._starts = [value.clone() for value in self.values]
        self._params = [nn.Parameter(value.clone()) for value in self.values]
        self._copied = copy_over(optimizer, group, self._params)
        self.state: dict[tuple[int, Path], Tensor] = {}
        self.negative: set[tuple[int, Path]] = set()
        self.positive: set[tuple[int, Path]] = set()
        for step in range(_NUM_STEPS):
            grads = [
                torch.cos(torch.arange(v.numel(), device=device) * (0.3 + step)).view(v.shape) for v in self.values
            ]
            grads = [grad * 3.0**number for number, grad in enumerate(grads)]
            given = [None if (step, number) == _ABSENT else grad for number, grad in enumerate(grads)]
            if in_pieces:
                self._step_in_pieces(given, moves_state=moves_state)
            else:
                for param, grad in zip(self._params, given, strict=True):
                    param.grad = grad
                self._copied.step()
                self.values = [param.detach() for param in self._params]
            if narrowing is not None:
                self._narrow(narrowing, step)
            self._look(is_first=step == 0)
        self.generators = generators(device)

    def distance(self, other: _Run) -> float:
        """Return how far from ``other`` this ended, as a part of how far that went; 0 where that did not move."""
        apart, gone = (
            torch.cat([(a - b).flatten() for a, b in zip(ends, other.values, strict=True)]).norm()
            for ends in (self.values, other._starts)
        )
        return float(apart / gone) if gone > 0 else float(apart > 0)

    def _narrow(self, narrowing: Narrowing, step: int) -> None:
        """Round state, of parameters of any size."""
        for param in self._params:

            def hold(path: Path, leaf: Any, shape: torch.Size = param.shape) -> Any:
                if path in narrowing.wide or not may_be_narrow(leaf, path, shape, SMALLEST):
                    return leaf
                strides = torch.empty(shape).stride()
                return widen(
                    narrowing.narrow(leaf, path, strides, noise_for(path, step, 0, leaf.numel(), leaf.device), 0)
                )

            state = self._copied.state.get(param)
            if isinstance(state, MutableMapping):
                replace(state, hold)

    def _step_in_pieces(self, grads: Sequence[Tensor | None], *, moves_state: bool) -> None:
        (copied_group,) = self._copied.param_groups
        counters = Counters(self._copied)
        for number, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            if grad is None:
                continue
            counters.rewind()
            memory = self.values[number].clone()
            param.data, param.grad = memory, grad
            if moves_state:
                self._move_state(param)
            copied_group["params"][:] = [param]
            self._copied.step()
            self.values[number] = param.detach().clone()
            param.grad = None
            param.data = torch.full((), math.nan, device=memory.device).expand(memory.shape)
            memory.fill_(math.nan)
        counters.finish()
        copied_group["params"][:] = self._params

    def _move_state(self, param: Tensor) -> None:
        """Put the state of ``param`` into other memory, as narrowing does."""

        def move(path: Path, leaf: Any) -> Any:
            if not may_be_narrow(leaf, path, param.shape, SMALLEST):
                return leaf
            moved = leaf.clone()
            leaf.fill_(math.nan)
            return moved

        state = self._copied.state.get(param)
        if isinstance(state, MutableMapping):
            replace(state, move)

    def _look(self, *, is_first: bool) -> None:
        for number, param in enumerate(self._params):
            for path, leaf in leaves(self._copied.state.get(param, {})):
                if may_be_narrow(leaf, path, param.shape, SMALLEST):
                    if is_first:
                        self.state[number, path] = leaf.clone()
                    self.negative |= {(number, path)} if bool((leaf < 0).any()) else set()
                    self.positive |= {(number, path)} if bool((leaf > 0).any()) else set()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)
