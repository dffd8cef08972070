"""Count the micro-batches of a window (gradient merge).

    loss.backward() -> arrival -> [window: k times] -> reduction -> clip -> step -> write-back

One `step()` call is one micro-batch; every k-th acts. Knows nothing of the
mathematics of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedopt.buffers.flat import Entry


class WindowLost(RuntimeError):
    """The gradients of a window cannot be used any more: it begins anew, on all ranks."""


class Window:
    """The micro-batches since the last step that acted.

    Args:
        num_micro_batches: k; with 1 the caller owns accumulation, and every `step()` call acts.

    Attributes:
        num_pending: micro-batches whose `step()` call did not end the window.
        is_averaged: whether gradients are the mean already: a clip in the last micro-batch divided them.
        clips: (max_norm, norm_type) of the clips since the last `step()` call that are still to be applied. A part of a
            window cannot be clipped, so they wait for what comes next: a call that ends the window applies them.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.num_pending = 0
        self.is_averaged = False
        self.clips: list[tuple[float, float]] = []
        self._kept: list[tuple[Entry, int]] = []
        self._seen_arrivals = 0  # at the last `step()` call
        self._averaged_arrivals = 0

    @property
    def is_merging(self) -> bool:
        """Whether fusedopt counts micro-batches at all (k > 1)."""
        return self.num_micro_batches > 1

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch whose `step()` call is still to come ends the window."""
        return self.num_pending + 1 >= self.num_micro_batches

    def has_begun(self, num_arrivals: int) -> bool:
        """Return whether a gradient arrived since the last `step()` call; ``num_arrivals`` is how many did ever."""
        return num_arrivals != self._seen_arrivals

    def averaged(self, num_arrivals: int) -> None:
        """Note that gradients were divided: what arrives from now on would not be."""
        self.is_averaged = True
        self._averaged_arrivals = num_arrivals

    def check_averaged(self, num_arrivals: int) -> None:
        """Raise if a gradient arrived after the window was averaged; the window is dropped.

        Raises:
            RuntimeError: saying what to do.
        """
        if self.is_averaged and num_arrivals != self._averaged_arrivals:
            self.restart()
            raise WindowLost(
                "a backward ran after optimizer.clip_grad_norm_() had averaged and clipped the window of "
                f"{self.num_micro_batches} micro-batches, so its gradients would count {self.num_micro_batches} times. "
                "Call clip_grad_norm_() after the last backward, right before step(). This window is lost: call "
                "optimizer.zero_grad() now and start over"
            )

    def check_flush(self, num_arrivals: int) -> None:
        """Raise if gradients arrived that no `step()` call counted: the mean would leave their micro-batch out.

        Raises:
            RuntimeError: saying what to do; nothing was changed.
        """
        if self.has_begun(num_arrivals):
            raise RuntimeError(
                f"flush() was called with {self.num_pending} micro-batch(es) pending and gradients of one more, for "
                "which step() was not called: the mean would be over one too few. Call step() after every backward, "
                "the last one too, and flush() after it"
            )

    def check_kept(self) -> None:
        """Raise if a gradient of this window was cleared or replaced since the last `step()` call.

        The window is dropped, so that the caller can go on with a fresh one.

        Raises:
            RuntimeError: naming the parameter.
        """
        for entry, num_first_touches in self._kept:
            if entry.param.grad is None or entry.slot.num_first_touches != num_first_touches:
                pending = self.num_pending
                self.restart()
                raise WindowLost(
                    f"the gradient of parameter {entry.slot.name} was cleared or replaced (by model.zero_grad(), or "
                    f"by assigning param.grad) while {pending} micro-batch(es) of a window of "
                    f"{self.num_micro_batches} were pending. Clear with optimizer.zero_grad(), which waits for the end "
                    "of the window. This window is lost: call optimizer.zero_grad() now and start over"
                )

    def add(self, entries: Sequence[Entry], num_arrivals: int) -> None:
        """Count one micro-batch that does not end the window; ``entries`` are those with a gradient."""
        self.num_pending += 1
        self.clips = []
        self._seen_arrivals = num_arrivals
        self._kept = [(entry, entry.slot.num_first_touches) for entry in entries]

    def end(self, num_arrivals: int) -> None:
        """Note that a step acted."""
        self.restart()
        self._seen_arrivals = num_arrivals

    def restart(self) -> None:
        """Begin a new window."""
        self.num_pending = 0
        self.is_averaged = False
        self.clips = []
        self._kept = []
