"""The step of inner optimizers that evaluate the closure themselves: when they want, as often as they want.

    parameters -> ... -> reduction -> [clip -> inner step -> write-back] -> gather

torch's own optimizers, LBFGS apart, do nothing with a closure but evaluate it before all else, and need none: the
wrapper does that for them. Any other class gets a closure of ours. It shows the model the weights that the inner
optimizer has set, evaluates, reduces and clips, and gives the main_params their gradients.

One evaluation serves several inner optimizers, as long as one has not moved its weights before it asks.
Knows nothing of windows or of how gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedopt.buffers.flat import Buffers
from fusedopt.gradients.clip import Clip
from fusedopt.inner.optimizers import InnerOptimizers, attach_gradients, collect_gradients
from fusedopt.inner.rollback import Snapshot
from fusedopt.sharding.comm import DataParallelGroup


class LeftOut(BaseException):
    """Ends an inner step whose first gradients are not finite; no inner optimizer catches it by ``except Exception``.

    Args:
        loss: of that evaluation.
    """

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


@dataclass(frozen=True)
class Habit:
    """What an inner optimizer does before it evaluates the closure first.

    Args:
        moves: it sets other weights.
        num_touched: of the steps that were watched, those in which it changed anything: weights, state, a counter.
            The first one may be for making state only, so the second is watched, too. 0: it evaluates before all else.
    """

    moves: bool
    num_touched: int


class Closures:
    """Makes such steps, and learns of each inner optimizer whether it evaluates before it moves anything.

    Args:
        inner: the wrapped optimizers.
        buffers: gradients and main_params.
        clip: decides whether a step is taken, and scales.
        comm: the ranks; losses that inner optimizers decide by are means over them.
    """

    def __init__(self, inner: InnerOptimizers, buffers: Buffers, clip: Clip, comm: DataParallelGroup) -> None:
        self.inner = inner
        self.buffers = buffers
        self.clip = clip
        self.comm = comm
        self.habits: dict[int, Habit] = {}
        """By number of the inner optimizer; absent: not known, it made no such step yet."""

    def step(self, evaluate: Callable[[], Any], num_addends: Callable[[], int], *, is_merging: bool) -> Any:
        """Let the inner optimizers step, and round main_params into the model; the gather is the caller's.

        Args:
            evaluate: computes the loss, and complete gradients; brings hyper-parameters and main_params up to date.
            num_addends: of each gradient then.
            is_merging: earlier micro-batches of this window are in the gradients, and were computed at the weights as
                they are now.

        Returns:
            What the inner optimizer's ``step`` returned (of several: the first that is something); the loss where the
            step was left out.

        Raises:
            RuntimeError: if an inner optimizer asks for what ranks that share state, or a window, cannot give it, or
                if it never asked at all. Parameters and state are as they were before.
            FloatingPointError: for gradients that are not finite, as `Clip.on_host`; or where the step of an
                optimizer cannot be left out any more.
        """
        run = _Run(self, evaluate, num_addends, is_merging=is_merging)
        try:
            return run.step()
        except BaseException as error:
            run.undo()
            if isinstance(error, LeftOut):
                return error.loss
            raise


class _Run:
    """One step; see `Closures.step`."""

    def __init__(
        self, owner: Closures, evaluate: Callable[[], Any], num_addends: Callable[[], int], *, is_merging: bool
    ) -> None:
        self._owner = owner
        self._inner, self._buffers, self._clip = owner.inner, owner.buffers, owner.clip
        self._evaluate = evaluate
        self._num_addends = num_addends
        self._is_merging = is_merging
        self._is_sharded = owner.buffers.sharding.is_sharded
        self._mains = [self._inner.mains_of(number) for number in range(len(self._inner.optimizers))]
        self._versions: list[int] = []
        self._snapshots: dict[int, Snapshot] = {}
        self._has_moved: dict[int, bool] = {}  # of those that asked: before they did so first
        self._habits: dict[int, Habit] = {}
        self._num_evaluations = 0
        self._loss: Any = None

    def step(self) -> Any:
        inner, numbers = self._inner, range(len(self._inner.optimizers))
        if self._is_sharded:  # all ranks evaluate, whatever their part of the inner optimizers does
            self._evaluate_at(has_moved=False)
        self._buffers.is_stepping = True
        self._versions = [_versions(mains) for mains in self._mains]
        self._snapshots = {
            number: Snapshot(inner.optimizers[number], self._mains[number])
            for number in numbers
            if inner.takes_closure(number) and self._may_have_to_undo(number)
        }
        if not self._is_sharded:
            result = self._step_inner()
            is_simple = self._num_evaluations == 1 and not any(self._has_moved.values())
            self._buffers.write_back(everything=not is_simple)
        else:
            with self._owner.comm.together("step(closure)"):
                result = self._step_inner()
            self._buffers.write_back()
        self._owner.habits.update(self._habits)
        return result

    def _may_have_to_undo(self, number: int) -> bool:
        habit = self._owner.habits.get(number)
        return _is_watched(habit) or (habit is not None and habit.num_touched > 0 and self._clip.nonfinite != "ignore")

    def _step_inner(self) -> Any:
        def closure_for(number: int) -> Callable[[], Any] | None:
            if self._inner.takes_closure(number):
                return lambda: self._ask(number)
            self._ask(number)
            return None

        result = self._inner.step(self._buffers.entries, closure_for)
        for number, opt in enumerate(self._inner.optimizers):
            if number not in self._has_moved:
                raise RuntimeError(
                    f"step(closure) was called, and {type(opt).__name__}.step() took the closure and never evaluated "
                    "it: no loss was computed. Compute gradients before, and call optimizer.step() without a closure"
                )
        return result

    def _ask(self, number: int) -> Any:
        """Answer an inner optimizer that evaluates its closure."""
        if number not in self._has_moved:
            self._has_moved[number] = has_moved = self._find_moved(number)
            if self._num_evaluations and not has_moved:
                return self._loss
        self._refuse(number)
        return self._evaluate_at(has_moved=self._num_evaluations > 0 or self._has_moved[number])

    def _find_moved(self, number: int) -> bool:
        habit, snapshot = self._owner.habits.get(number), self._snapshots.get(number)
        if snapshot is not None and _is_watched(habit):
            has_moved = snapshot.has_moved()
            num_touched = 0 if snapshot.is_untouched() else 1 + (habit.num_touched if habit is not None else 0)
            self._habits[number] = Habit(has_moved, num_touched)
            return has_moved
        has_moved = _versions(self._mains[number]) != self._versions[number] or (habit is not None and habit.moves)
        if has_moved:
            self._habits[number] = Habit(moves=True, num_touched=2)
        return has_moved

    def _refuse(self, number: int) -> None:
        if not (self._num_evaluations or self._has_moved[number]):
            return
        name = type(self._inner.optimizers[number]).__name__
        what = "moves weights before it evaluates its closure, or evaluates it again"
        if self._is_sharded:
            raise RuntimeError(
                f"{name} {what}; under a shard a rank has a part of the weights only, and ranks may ask differently "
                'often. Use shard="none"'
            )
        if self._is_merging:
            raise RuntimeError(
                f"{name} {what}, and a closure computes the last micro-batch of the window only. Use "
                "gradient_accumulation_steps=1, and accumulate inside the closure"
            )

    def _evaluate_at(self, *, has_moved: bool) -> Any:
        """Evaluate at the weights as the inner optimizers have set them, and give these their gradients."""
        entries, is_first = self._buffers.entries, self._num_evaluations == 0
        if not self._is_sharded:
            collect_gradients(entries)
        if has_moved:
            self._buffers.write_back(everything=True)
        loss = self._evaluate()
        self._num_evaluations += 1
        if is_first:
            self._clip.average(self._num_addends())
            if not self._clip.on_host(self._clip.nonfinite):
                self._leave_out(loss)
            if not self._is_merging:
                self._snapshots = {n: kept for n, kept in self._snapshots.items() if n not in self._has_moved}
        else:  # a line search may step into inf and back out: that is torch's business, unless asked to raise
            self._clip.on_host("raise" if self._clip.nonfinite == "raise" else "ignore")
        attach_gradients(entries)
        self._loss = self._mean(loss)
        return self._loss

    def _leave_out(self, loss: Any) -> None:
        for number, has_moved in self._has_moved.items():
            if has_moved and number not in self._snapshots:
                self._owner.habits[number] = Habit(moves=True, num_touched=2)
                raise FloatingPointError(
                    f"gradients hold inf or nan, and {type(self._inner.optimizers[number]).__name__}, which evaluated "
                    "its closure before all else until now, had moved weights already: this step cannot be left out. "
                    "Load a checkpoint; from now on weights are kept until gradients are known"
                )
        raise LeftOut(loss)

    def undo(self) -> None:
        """Put back what is still kept."""
        for snapshot in self._snapshots.values():
            snapshot.restore()
        if self._snapshots and any(self._has_moved.values()):
            self._buffers.write_back(everything=True)

    def _mean(self, loss: Any) -> Any:
        """Return the mean of ``loss`` over ranks, so that all decide by the same; what is no number stays."""
        comm = self._owner.comm
        if comm.world_size == 1:
            return loss
        is_number = type(loss) is float or (isinstance(loss, Tensor) and loss.numel() == 1)
        value = loss.detach() if isinstance(loss, Tensor) else loss
        losses = comm.objects(float(value) if is_number else None)
        if None in losses:
            return loss
        mean = sum(losses) / len(losses)
        return torch.full_like(value, mean) if isinstance(loss, Tensor) else mean


def _is_watched(habit: Habit | None) -> bool:
    return habit is None or habit.num_touched == 1


def _versions(params: Sequence[Tensor]) -> int:
    return sum(param._version for param in params)
