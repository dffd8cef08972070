"""One update: complete gradients in, new model parameters out.

    parameters -> layout -> buffers -> arrival -> reduction -> [clip -> inner step -> write-back] -> gather

Knows nothing of windows, state dicts or where gradients come from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fusedopt.buffers.flat import Buffers
from fusedopt.gradients.clip import Clip
from fusedopt.inner.listing import Group
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.reduction.parameter_gather import Gather
from fusedopt.step.closures import Closures
from fusedopt.step.fused_step import FusedSteps

Scaling = tuple[Tensor | None, Tensor | None]
"""What the inner optimizers' kernels divide gradients by, and whether they leave parameters as they are (nonzero)."""

_NOTHING_LEFT: Scaling = (None, None)


def profiled(name: str) -> AbstractContextManager[Any]:
    """Let a profile show the body as ``name``; where there is none, torch's own function would cost 10 us."""
    is_on = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)  # private to torch; another may have none
    return torch.profiler.record_function(name) if is_on else contextlib.nullcontext()


class Update:
    """Clip, step the inner optimizers on main_params, round these into the model.

    Args:
        inner: the wrapped optimizers.
        buffers: gradients and main_params.
        clip: decides whether a step is taken, and scales.
        gather: brings what other ranks updated.
        closures: steps with a closure that inner optimizers evaluate themselves.
    """

    def __init__(
        self, inner: InnerOptimizers, buffers: Buffers, clip: Clip, gather: Gather, closures: Closures
    ) -> None:
        self._inner = inner
        self._buffers = buffers
        self._clip = clip
        self._gather = gather
        self._closures = closures
        self._fused_steps = FusedSteps(buffers)

    def begin(self, groups: Sequence[Group]) -> bool:
        """Bring hyper-parameters and main_params up to date with what was changed from outside.

        Returns:
            Whether weights had been changed in a way that torch does not see, see `Buffers.take_over`.

        Raises:
            RuntimeError: naming a hyper-parameter that was changed on both sides.
        """
        self._gather.finish()
        self._inner.agree(groups)
        return self._buffers.take_over()

    def clip(self, num_addends: int, *, makes_state: bool) -> Scaling | None:
        """Bring gradients, which are sums of ``num_addends``, to their clipped mean, or leave that to the step.

        Args:
            num_addends: see above.
            makes_state: whether the step makes inner state, on any rank. Then the host decides on all: a device that
                leaves such a step out keeps an uninitialised momentum (SGD), and ranks have to measure alike.

        Returns:
            What the step is to do on its way; None where it must be left out.
        """
        with profiled("fusedopt.clip"):
            may_be_on_device = self._clip.nonfinite == "skip" and self._inner.takes_found_inf
            if may_be_on_device and not makes_state:
                return self._clip.on_device(num_addends)
            self._clip.average(num_addends)
            goes_on = self._clip.on_host(self._clip.nonfinite, is_exact=not may_be_on_device)
            return _NOTHING_LEFT if goes_on else None

    def step(self, scaling: Scaling) -> None:
        """Step the inner optimizers on main_params."""
        grad_scale, found_inf = scaling
        with profiled("fusedopt.step"):
            self._buffers.is_stepping = True
            self._inner.step(
                self._buffers.entries, grad_scale=grad_scale, found_inf=found_inf, instead=self._fused_steps.step
            )

    def write_back(self) -> None:
        """Round main_params into the model, where the step did not do so itself."""
        with profiled("fusedopt.write_back"):
            self._buffers.write_back(done=self._fused_steps.take_written())

    def gather(self, groups: Sequence[Group], *, may_overlap: bool) -> None:
        """Bring what other ranks updated, and let ``groups`` show what inner optimizers wrote into theirs.

        Args:
            groups: the outer ones.
            may_overlap: gathers may finish later, see `Gather`.
        """
        with profiled("fusedopt.gather"):
            self._gather.start(may_overlap=may_overlap)
        self._inner.agree(groups)

    def apply_by_closure(
        self,
        groups: Sequence[Group],
        evaluate: Callable[[], Any],
        num_addends: Callable[[], int],
        *,
        is_merging: bool,
        may_overlap: bool = True,
    ) -> Any:
        """Update with inner optimizers that evaluate a closure themselves; see `Closures.step`."""
        with profiled("fusedopt.step"):
            result = self._closures.step(evaluate, num_addends, is_merging=is_merging)
        self.gather(groups, may_overlap=may_overlap)
        return result

    def switch(self, groups: Sequence[Group], method: str) -> None:
        """Call ``train`` or ``eval`` on the inner optimizers that have it, and refresh the model."""
        has_it = self._inner.has(method)
        if method == "train" and not has_it:  # a Trainer calls it before every micro-batch; gathers are to overlap
            return
        self.begin(groups)
        if has_it:
            self._inner.call(method)
            self._buffers.write_back(everything=True)
            self.gather(groups, may_overlap=False)
