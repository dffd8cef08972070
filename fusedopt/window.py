"""Count the micro-batches of a window (gradient merge).

    loss.backward() -> arrival -> [window: k times] -> reduction -> clip -> step -> write-back

One `step()` call is one micro-batch; every k-th acts. Knows nothing of the
mathematics of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusedopt.buffers import Entry


class Window:
    """The micro-batches since the last step that acted.

    Args:
        num_micro_batches: k; with 1 the caller owns accumulation, and every `step()` call acts.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self.num_micro_batches = num_micro_batches
        self.num_pending = 0
        self.is_averaged = False
        self._kept: list[tuple[Entry, int]] = []

    @property
    def is_merging(self) -> bool:
        """Whether fusedopt counts micro-batches at all (k > 1)."""
        return self.num_micro_batches > 1

    @property
    def is_last(self) -> bool:
        """Whether the micro-batch whose `step()` call is still to come ends the window."""
        return self.num_pending + 1 >= self.num_micro_batches

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
                raise RuntimeError(
                    f"the gradient of parameter {entry.slot.name} was cleared or replaced (by model.zero_grad(), or "
                    f"by assigning param.grad) while {pending} micro-batch(es) of a window of "
                    f"{self.num_micro_batches} were pending. Clear with optimizer.zero_grad(), which waits for the end "
                    "of the window. This window is lost: call optimizer.zero_grad() now and start over"
                )

    def add(self, entries: Sequence[Entry]) -> None:
        """Count one micro-batch that does not end the window; ``entries`` are those with a gradient."""
        self.num_pending += 1
        self._kept = [(entry, entry.slot.num_first_touches) for entry in entries]

    def restart(self) -> None:
        """Begin a new window."""
        self.num_pending = 0
        self.is_averaged = False
        self._kept = []
