"""Find out, by running it, how an inner optimizer may be sharded.

    parameters -> [layout] -> ...

An element-wise optimizer (AdamW, SGD, Lion) gives the same numbers on a matrix and on pieces of its elements; one that
looks at shapes, norms or means (Muon, Adafactor, LAMB) does not, and needs whole parameters; a coupled one (Prodigy)
lets one parameter decide about another, and cannot be sharded at all. Copies are tried on small tensors: on one
parameter alone and among others, and on whole parameters against their pieces.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.dtensor import is_cut
from fusedopt.inner import InnerOptimizers
from fusedopt.scratch import CannotCopy, copy_over, state_from_the_start, unnoticed

_MATRIX = (8, 12)
_SMALL: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    _MATRIX: ((64,), (1,), (33, 34)),
    (4, 3, 4, 2): ((50,),),
    (96,): ((31, 80),),
}
_LARGE: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {(136, 160): ((13000,), (21759,))}
"""Whole shapes, and where their elements are cut. Some look only at matrices of at least 128 rows and columns."""

_NUM_STEPS = 13
_MAX_INTERVAL = 5
_INTERVAL = re.compile("step.|.step|interval|gap|freq|warm|period|every|epoch|iter")
"""Settings that count steps: larger ones become `_MAX_INTERVAL` in a copy, so that it comes past them."""
_MIN_LR = 1e-3
"""In a copy: a schedule's warm-up begins at zero, and steps that vanish in rounding would show nothing."""

_HIDDEN = "it draws random numbers, and what it does to one parameter differs where there are others"

_ROUNDING = 1e-9
"""What float64 runs may differ by, of how far a parameter moved: kernels round the ends of tensors in other ways."""


@dataclass(frozen=True)
class Verdict:
    """What a trial saw.

    Args:
        kind: ``"element"``, ``"parameter"`` or ``"coupled"``; ``"random"`` if draws hide it, ``"unknown"`` if it cannot
            be tried.
        reason: for the last one.
    """

    kind: str
    reason: str = ""


class ShardBy:
    """Decides of each parameter group whether its parameters may be cut.

    Args:
        inner: the wrapped optimizers.
        wanted: the setting ``shard_by``: ``"auto"``, ``"element"`` or ``"parameter"``.
    """

    def __init__(self, inner: InnerOptimizers, wanted: str) -> None:
        self._inner = inner
        self._wanted = wanted
        self._seen: dict[tuple[int, str], Verdict] = {}
        self._decided: dict[tuple[int, str], str] = {}

    def __call__(self, index: int) -> str:
        """Return `shard_by` of group ``index``; groups with equal settings are tried once.

        Raises:
            ValueError: as `decide`.
        """
        key = self._key(index)
        if key not in self._decided:
            self._decided[key] = decide(self._try_out(index), self._wanted, type(self._inner.optimizer_of(index)))
        return self._decided[key]

    @property
    def decided(self) -> list[str]:
        """What was decided so far, in order: the same on all ranks, or their layouts differ."""
        return list(self._decided.values())

    def check(self, *, is_sharded: bool) -> None:
        """Raise what `decide` raises, for any group that is sharded; and for DTensors cut by torch's engines.

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
            if cut:
                _check_cut(self._try_out(index), cut[0], type(self._inner.optimizer_of(index)).__name__)

    def _try_out(self, index: int) -> Verdict:
        key = self._key(index)
        if key not in self._seen:
            self._seen[key] = try_out(self._inner.optimizer_of(index), self._inner.group(index))
        return self._seen[key]

    def _key(self, index: int) -> tuple[int, str]:
        group = self._inner.group(index)
        settings = {key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")}
        return id(self._inner.optimizer_of(index)), f"{_device_of(group)} {settings!r}"


def decide(seen: Verdict, wanted: str, cls: type[Optimizer]) -> str:
    """Return ``"element"`` or ``"parameter"``.

    Args:
        seen: what trying showed.
        wanted: the setting ``shard_by``. ``"parameter"`` is the user's word where nothing was seen.
        cls: of the optimizer, for messages.

    Raises:
        ValueError: if one parameter's update depends on other parameters, or may and ``"parameter"`` was not asked
            for; if ``"element"`` is wanted and would change results, or may.
    """
    name = cls.__name__
    if seen.kind == "coupled":
        raise ValueError(
            f"{name} cannot be sharded: what it does to one parameter depends on the others, and a rank would see "
            'only its own. Use shard="none"'
        )
    if wanted == "element" and seen.kind != "element":
        found = {
            "parameter": "gives other results on the elements of a matrix than on the matrix",
            "random": "draws random numbers, other ones for a part of a matrix than for the matrix",
        }.get(seen.kind, f"could not be tried ({seen.reason})")
        raise ValueError(
            f'shard_by="element" cuts through parameters, and {name} {found}. Use shard_by="parameter", or "auto"'
        )
    if seen.kind == "unknown" and wanted == "auto":
        raise ValueError(
            f"whether {name} can be sharded is not known: a copy of it could not be tried ({seen.reason}). If what it "
            "does to one parameter depends on no other (no global norm, no common step size), say "
            'shard_by="parameter"; else use shard="none"'
        )
    if seen.kind == "unknown":
        warnings.warn(
            f'shard_by="parameter" is taken at its word: a copy of {name} could not be tried ({seen.reason}). It is '
            "right if what it does to one parameter depends on no other parameter",
            stacklevel=2,
        )
    if seen.kind == "random":
        warnings.warn(
            f"{name} draws random numbers: parameters are kept whole, and every rank draws its own for those that it "
            'updates, so results differ from one process\' as two seeds do. shard="none" draws as one process, if all '
            "ranks are seeded alike",
            stacklevel=2,
        )
    return "element" if seen.kind == "element" and wanted != "parameter" else "parameter"


def _check_cut(seen: Verdict, param: str, name: str) -> None:
    remedy = "Give such parameters an element-wise optimizer (AdamW), or place them Replicate()"
    if seen.kind == "parameter":
        raise ValueError(
            f"{name} works on whole matrices, and of parameter {param} this rank has a part (DTensor). {remedy}"
        )
    if seen.kind in ("coupled", "unknown"):
        found = f"could not be tried ({seen.reason})" if seen.reason else "lets parameters decide about each other"
        raise ValueError(f"of parameter {param} this rank has a part (DTensor), and {name} {found}. {remedy}")
    if seen.kind == "random":
        warnings.warn(
            f"{name} draws random numbers, and of parameter {param} this rank has a part (DTensor): whether it is "
            "right on parts cannot be seen, and every rank draws its own",
            stacklevel=2,
        )


def try_out(optimizer: Optimizer, group: dict[str, Any]) -> Verdict:
    """Run copies of ``optimizer``, with the settings of ``group``, on small tensors; nothing of it is touched."""
    trial = _Trial(optimizer, group)
    try:
        is_separable = _is_separable(trial)
    except _Untried as error:
        return Verdict("unknown", str(error))
    if not is_separable:
        return Verdict("unknown", _HIDDEN) if trial.drew else Verdict("coupled")
    kind = "element" if _is_right_on_pieces(trial) else "parameter"
    return Verdict("random" if trial.drew else kind)


def _is_separable(trial: _Trial) -> bool:
    """Return whether a parameter ends alike alone, and between others that are far steeper and far flatter."""
    is_alike = True
    for is_steady in (True, False):
        main, steep, flat = (_Part(number, _MATRIX, is_steady, (1.0, 100.0, 0.01)[number]) for number in range(3))
        is_alike = trial.is_same([main], [steep, main, flat]) and is_alike
    return is_alike


def _is_right_on_pieces(trial: _Trial) -> bool:
    for cuts, is_steady in ((_SMALL, True), (_SMALL, False), (_LARGE, False)):
        wholes = [_Part(number, shape, is_steady) for number, shape in enumerate(cuts)]
        pieces = [piece for whole in wholes for at in cuts[whole.shape] for piece in whole.cut(at)]
        try:
            if not trial.is_same(wholes, pieces):
                return False
        except _Untried:
            return False
    return True


class _Untried(Exception):
    """Why a copy could not be tried."""


@dataclass(frozen=True)
class _Part:
    """What one parameter of a trial is: a tensor, or elements of one in a row.

    Args:
        number: equal numbers and shapes: the same tensor.
        shape: of the whole.
        is_steady: whether its gradients hardly change from step to step.
        steepness: of its gradients.
        start, end: which elements, as a shard gives them: 1-D. None: the whole, in its shape.
    """

    number: int
    shape: tuple[int, ...]
    is_steady: bool
    steepness: float = 1.0
    start: int = 0
    end: int | None = None

    def cut(self, at: Sequence[int]) -> Iterator[_Part]:
        """Return the pieces."""
        for start, end in zip((0, *at), (*at, math.prod(self.shape)), strict=True):
            yield replace(self, start=start, end=end)

    def of(self, whole: Tensor) -> Tensor:
        """Return its elements of a whole in a row, in its shape."""
        return whole.view(self.shape) if self.end is None else whole[self.start : self.end]


@dataclass(frozen=True)
class _Outcome:
    """What became of one parameter: its value, the numbers in its state by their place in that, how far it moved."""

    value: Tensor
    state: dict[tuple[Any, ...], Tensor]
    distance: float


class _Trial:
    """Steps copies of one optimizer; knows what they drew."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        self._optimizer = optimizer
        self._group = group
        self._device = _device_of(group)
        self.drew = False

    def is_same(self, ones: Sequence[_Part], others: Sequence[_Part]) -> bool:
        """Return whether ``others`` end with the same elements as those of ``ones`` that have the same number.

        Raises:
            _Untried: if that cannot be told.
        """
        if self._agree(ones, others, torch.float32):
            return True
        try:
            return self._agree(ones, others, torch.float64)
        except _Untried:
            return False

    def _agree(self, ones: Sequence[_Part], others: Sequence[_Part], dtype: torch.dtype) -> bool:
        outcomes = {part.number: outcome for part, outcome in zip(ones, self._run(ones, dtype), strict=True)}
        rounding = _ROUNDING if dtype is torch.float64 else 0.0
        return all(
            _is_part(outcome, outcomes[part.number], part, rounding)
            for part, outcome in zip(others, self._run(others, dtype), strict=True)
            if part.number in outcomes
        )

    def _run(self, parts: Sequence[_Part], dtype: torch.dtype) -> list[_Outcome]:
        drawn = {part.number: _draw(part) for part in parts}
        with unnoticed(self._device) as fence, torch.no_grad():
            starts = [part.of(drawn[part.number][0]).to(self._device, dtype) for part in parts]
            params = [nn.Parameter(start.clone()) for start in starts]
            try:
                copied = copy_over(self._optimizer, self._group, params, fence)
                with fence:
                    for param in params:
                        state = state_from_the_start(self._optimizer, self._group, param)
                        copied.state.update({param: state} if state else {})
                    _hasten(copied)
                    for step in range(_NUM_STEPS):
                        for part, param in zip(parts, params, strict=True):
                            param.grad = part.of(drawn[part.number][1][step]).to(self._device, dtype, copy=True)
                        fence.seed(step)
                        copied.step()
            except CannotCopy as error:
                raise _Untried(f"it {error}") from error
            except Exception as error:  # a third party's class on tensors it was not written for
                raise _Untried(f"it raised {error!r}") from error
            self.drew = self.drew or fence.drew
            if fence.refused is not None:
                raise _Untried(f"it writes into tensors that are not its parameters or state, {fence.refused}")
            outcomes = [_outcome(copied, param, start) for param, start in zip(params, starts, strict=True)]
        if any(outcome.distance == 0.0 for part, outcome in zip(parts, outcomes, strict=True) if part.end is None):
            raise _Untried("it did not move a parameter")
        return outcomes


def _draw(part: _Part) -> tuple[Tensor, Tensor]:
    """Return the value of the whole tensor of ``part``, and its gradients, one row a step.

    Thirds of it are of very different size. Steady gradients show what estimates a distance from where it began
    (D-Adaptation, Prodigy), and finds none otherwise; the others show what keeps norms, signs and means: steps are of
    very different size, too, and some elements get no gradient in some steps, or never.
    """
    numel = math.prod(part.shape)
    generator = torch.Generator().manual_seed(1000 + part.number)
    value = torch.randn(numel, generator=generator, dtype=torch.float64)
    slope = torch.randn(numel, generator=generator, dtype=torch.float64)
    noise = torch.randn(_NUM_STEPS, numel, generator=generator, dtype=torch.float64)
    grads = (slope + (0.05 if part.is_steady else 1.0) * noise) * part.steepness
    first, second = numel // 3, 2 * numel // 3
    value[first:second] *= 0.05
    value[second:] *= 3.0
    grads[:, first:second] *= 30.0
    grads[:, second:] *= 0.003
    if not part.is_steady:
        grads *= 10.0 ** torch.sin(torch.arange(_NUM_STEPS, dtype=torch.float64) + part.number).unsqueeze(1)
        grads[1::4, : numel // 2] = 0.0
        grads[:, numel - numel // 12 :] = 0.0
    return value, grads


def _hasten(copied: Optimizer) -> None:
    """Bring a copy sooner to what it does later: past warm-ups, and at intervals."""
    for holder in (vars(copied), copied.defaults, *copied.param_groups):
        for key, value in holder.items():
            if type(value) is int and value > _MAX_INTERVAL and _INTERVAL.search(str(key)):
                holder[key] = _MAX_INTERVAL
    for group in copied.param_groups:
        lr = group.get("lr")
        if isinstance(lr, Tensor):
            lr.clamp_(min=_MIN_LR)
        elif isinstance(lr, (int, float)) and lr < _MIN_LR:
            group["lr"] = _MIN_LR
    with contextlib.suppress(Exception):  # schedule-free has it; its step will say where this was needed and failed
        copied.train()  # type: ignore[attr-defined]


def _outcome(copied: Optimizer, param: Tensor, start: Tensor) -> _Outcome:
    distance = (param.detach() - start).abs().max().item()
    if not math.isfinite(distance):
        raise _Untried("it gives inf or nan")
    return _Outcome(param.detach(), dict(_numbers(copied.state.get(param, {}))), distance)


def _numbers(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield place, value.detach()
    elif isinstance(value, (bool, int, float)):
        yield place, torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, (dict, list, tuple, deque)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(item, (*place, key))


def _is_part(outcome: _Outcome, whole: _Outcome, part: _Part, rounding: float) -> bool:
    # Some keep what is a group's, a count of steps, in the state of its first parameter: what only one has is no sign.
    pairs = [(outcome.value, whole.value, whole.distance)]
    pairs += [(number, whole.state[place], 0.0) for place, number in outcome.state.items() if place in whole.state]
    return all(_is_close(mine, all_of_it, part, rounding, scale) for mine, all_of_it, scale in pairs)


def _is_close(mine: Tensor, all_of_it: Tensor, part: _Part, rounding: float, scale: float) -> bool:
    if all_of_it.shape == part.shape:
        all_of_it = part.of(all_of_it.reshape(-1))
    if mine.shape != all_of_it.shape or mine.dtype != all_of_it.dtype:
        return False
    if rounding == 0.0 or not mine.is_floating_point() or mine.numel() == 0:
        return torch.equal(mine, all_of_it)
    scale = scale or all_of_it.abs().max().item()
    return bool((mine - all_of_it).abs().max().item() <= rounding * scale)


def _device_of(group: dict[str, Any]) -> torch.device:
    return group["params"][0].device if group["params"] else torch.device("cpu")
