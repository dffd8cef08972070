"""Measure gradients (global norm, finiteness), then apply (average, clip, or leave the step out).

    parameters -> layout -> buffers -> arrival -> reduction -> [clip] -> step -> write-back -> gather

Knows nothing of parameter groups or hyper-parameters.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedopt.backends import Backend, torch_ops
from fusedopt.buffers.flat import Buffers
from fusedopt.sharding.comm import DataParallelGroup, groups_over

Scaling = tuple[Tensor | None, Tensor | None]
"""What the inner optimizers' kernels divide gradients by, and whether they leave parameters as they are (nonzero)."""

EPSILON = 1e-6
"""Added to the norm before dividing by it, as torch.nn.utils.clip_grad_norm_ does."""


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return ``min(1, max_norm / (norm + 1e-6))``, 0-d: what torch multiplies gradients by."""
    return torch.clamp(max_norm / (norm + EPSILON), max=1.0)


def checked_norm(max_norm: Any, norm_type: Any) -> tuple[float, float]:
    """Return what a clip was asked for, as numbers.

    Raises:
        TypeError: for what is no number.
        ValueError: unless both are positive (``inf`` included); torch's ``"inf"`` is a norm type, too.
    """
    limit, order = _number("max_norm", max_norm), math.inf if norm_type == "inf" else _number("norm_type", norm_type)
    if not limit > 0:
        raise ValueError(
            f"clip_grad_norm_: max_norm={max_norm} would turn, erase or spoil gradients; give a positive number, "
            "math.inf to measure only, or do not call it where nothing is to be clipped"
        )
    if not order > 0:
        raise ValueError(f"clip_grad_norm_: norm_type={norm_type} is not a norm; use a positive number or math.inf")
    return limit, order


def _number(name: str, value: Any) -> float:
    is_scalar = isinstance(value, Tensor) and value.numel() == 1 and value.dtype is not torch.bool
    if isinstance(value, bool) or not (is_scalar or isinstance(value, numbers.Real)):
        raise TypeError(f"clip_grad_norm_: {name}={value!r} is a {type(value).__name__}; needed is a number")
    return float(value)


def _norm_of(norms: list[Tensor], norm_type: float) -> Tensor:
    if not norms:  # all parameters were taken out of the groups
        return torch.zeros((), dtype=torch.float64)
    together: Tensor = torch.stack([norm.to(norms[0].device) for norm in norms])
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(together, norm_type)


class Clip:
    """What happens to complete gradients before the inner step.

    Args:
        buffers: whose gradients these are.
        comm: the ranks that norms are taken over.
        max_norm: largest global 2-norm that passes unscaled; None does not clip.
        nonfinite: ``"skip"``, ``"raise"`` or ``"ignore"``, see `MainGradConfig`.
    """

    def __init__(self, buffers: Buffers, comm: DataParallelGroup, max_norm: float | None, nonfinite: str) -> None:
        self._buffers = buffers
        self._comm = comm
        self._max_norm = max_norm
        self.nonfinite = nonfinite
        self.skips = Skips()
        self.norm: Tensor | None = None

    def average(self, divisor: int) -> None:
        """Divide every gradient by ``divisor``, the number of addends: once a window, one rounding."""
        if divisor != 1:
            torch_ops.divide_(self._buffers.grad_parts(), divisor)

    def measure(self, norm_type: float = 2.0) -> Tensor:
        """Return the global norm over all ranks, every element once; see `torch_ops.norm` for its numerics.

        Returns:
            0-d, float32; float64 if there are float64 parameters.

        """
        self._buffers.zero_absent()
        return self._norm(norm_type)

    def _norm(self, norm_type: float, dtype: torch.dtype | None = None) -> Tensor:
        local = self._local(norm_type, lambda backend, flats: backend.norm(flats, norm_type, dtype=dtype))
        total = self._over_ranks(local, norm_type)
        is_double = dtype is torch.float64 or any(b.dtype is torch.float64 for b in self._buffers.buckets)
        return total if is_double else total.float()

    def found_inf(self) -> bool:
        """Return whether any gradient on any rank is inf or nan; exact, and one host synchronisation."""
        self._buffers.zero_absent()
        largest = self._local(math.inf, lambda backend, flats: backend.found_inf(flats))
        return bool(self._over_ranks(largest, math.inf))

    def _over_ranks(self, norm: Tensor, norm_type: float) -> Tensor:
        if self._comm.world_size == 1 and self._comm.norm_group is None:
            return norm
        return self._comm.total_norm(norm, norm_type, is_sharded=self._buffers.sharding.is_sharded)

    def _local(self, norm_type: float, measure: Callable[[Backend, list[Tensor]], Tensor]) -> Tensor:
        """Return the norm of what this data-parallel rank holds, and of its DTensors everywhere, each element once.

        One sum over all meshes' ranks: what is not split over some of them is the same there, and each counts its
        share of it. So these ranks have one norm, and go on or leave the step out together, come what may.
        """
        meshes = [
            domain.mesh for domain in dict.fromkeys(b.domain for b in self._buffers.buckets) if domain is not None
        ]
        groups = groups_over(meshes) if meshes else []
        num_terms = math.prod(group.size() for group in groups)
        norms = []
        for backend, buckets in self._buffers.buckets_by_backend():
            for domain in dict.fromkeys(bucket.domain for bucket in buckets):
                norm = measure(backend, [b.grad_part for b in buckets if b.domain == domain]).double()
                if groups and math.isfinite(norm_type):
                    num_shards = domain.num_shards if domain is not None else 1
                    norm = norm * (num_shards / num_terms) ** (1.0 / norm_type)
                norms.append(norm)
        norm = _norm_of(norms, norm_type)
        return self._comm.norm_over(norm, norm_type, groups) if groups else norm

    def scale(self, norm: Tensor, max_norm: float) -> None:
        """Scale all gradients so that a global norm of ``norm`` becomes at most ``max_norm``."""
        if max_norm == math.inf:  # inf / inf is no coefficient
            return
        self._buffers.scale_grads_(clip_coefficient(norm, max_norm))

    def for_step(self, num_addends: int, *, may_be_on_device: bool, makes_state: bool) -> Scaling | None:
        """Bring gradients, which are sums of ``num_addends``, to their clipped mean, or leave that to the step.

        Args:
            num_addends: see above.
            may_be_on_device: whether the step can unscale, and leave itself out, on the device.
            makes_state: whether the step makes inner state, on any rank. Then the host decides on all: a device that
                leaves such a step out keeps an uninitialised momentum (SGD), and ranks have to measure alike.

        Returns:
            What the step is to do on its way; None where it must be left out.
        """
        may_be_on_device = may_be_on_device and self.nonfinite == "skip"
        if may_be_on_device and not makes_state:
            return self.on_device(num_addends)
        self.average(num_addends)
        return (None, None) if self.on_host(self.nonfinite, is_exact=not may_be_on_device) else None

    def on_host(self, nonfinite: str, *, is_exact: bool = True) -> bool:
        """Measure and clip; one host synchronisation, none under ``"ignore"``.

        Args:
            nonfinite: as in `Clip`.
            is_exact: whether a norm that overflows is measured anew. Not where `on_device`, which cannot, may decide on
                other ranks of a ``norm_group``: all have to run the same collectives, and decide alike.

        Returns:
            False where the step must be left out: a gradient was not finite and ``nonfinite`` is ``"skip"``.

        Raises:
            FloatingPointError: naming the parameters, if ``nonfinite`` is ``"raise"``.
        """
        if nonfinite == "ignore":
            if self._max_norm is not None:
                self.norm = self.measure()
                self.scale(self.norm, self._max_norm)
            return True
        self.norm = self.measure()
        value = self.norm.item()
        if is_exact and not math.isfinite(value) and not self.found_inf():
            # A finite gradient above 1.8e19 overflows the fp32 sum of its squares; float64 takes 20 times longer.
            self.norm = self._norm(2.0, dtype=torch.float64)
            value = self.norm.item()
        is_finite = math.isfinite(value)
        if not is_finite and nonfinite == "raise":
            raise FloatingPointError(self._describe_nonfinite())
        self.skips.note(not is_finite)
        if is_finite and self._max_norm is not None and value + EPSILON > self._max_norm:
            self.scale(self.norm, self._max_norm)
        return is_finite

    def on_device(self, num_addends: int = 1) -> tuple[Tensor | None, Tensor]:
        """Measure, and leave clipping and skipping to the inner optimizer's kernel: no host synchronisation.

        A finite norm above 1.8e19 counts as not finite here.

        Args:
            num_addends: of each gradient, which is a sum; the kernel divides by it on its way.

        Returns:
            What gradients are to be divided by (None for 1) and whether to leave the step out (nonzero); both
            float32, 0-d.
        """
        norm = self.measure()
        self.norm = norm if num_addends == 1 else norm / num_addends
        found_inf = torch.isfinite(norm.float()).logical_not().float()
        self.skips.note(found_inf)
        if self._max_norm is not None:
            return num_addends / clip_coefficient(self.norm.float(), self._max_norm), found_inf
        return (None if num_addends == 1 else torch.full_like(found_inf, num_addends)), found_inf

    def note(self, norm: Tensor | None, *, was_skipped: bool) -> None:
        """Note the norm of a step that was made elsewhere, and whether some of it was left out."""
        self.norm = norm
        self.skips.note(was_skipped)

    def _describe_nonfinite(self) -> str:
        parts = [(entry.slot.name, entry.grad_part) for entry in self._buffers.with_grad()]
        found = [name for name, part in parts if part is not None and not bool(torch.isfinite(part).all())]
        names = list(dict.fromkeys(name for on_rank in self._comm.objects(found) for name in on_rank))
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        where = f"{len(names)} parameter(s): {shown}" if names else "parts that other ranks hold, which name them"
        return (
            f"gradients hold inf or nan in {where}. Parameters and state were not changed. "
            "Lower the learning rate or look at the batch; nonfinite='skip' leaves such steps out"
        )


class Skips:
    """Count steps left out because a gradient was not finite.

    Steps decided on the device are summed there; reading the count brings it to the host. The warning
    comes with a decision on the host or a read, at 1, 2, 4, 8, ... steps.
    """

    def __init__(self) -> None:
        self._num_on_host = 0
        self._num_on_device: Tensor | None = None
        self._last: bool | Tensor = False
        self._next_warning = 1

    def note(self, was_skipped: bool | Tensor) -> None:
        """Record one step. A tensor (0-d, nonzero where skipped) is not read."""
        self._last = was_skipped
        if isinstance(was_skipped, Tensor):
            if self._num_on_device is None:
                self._num_on_device = torch.zeros((), dtype=torch.int64, device=was_skipped.device)
            self._num_on_device += (was_skipped != 0).to(self._num_on_device)
        elif was_skipped:
            self._num_on_host += 1
            if self._num_on_device is None:
                self._warn(self._num_on_host)

    def last_was_skipped(self) -> bool:
        """Return whether the last step was left out. Synchronises where the device decided it."""
        return bool(self._last)

    def total(self) -> int:
        """Return how many steps were left out. Synchronises where the device decided them."""
        on_device = 0 if self._num_on_device is None else int(self._num_on_device)
        self._warn(self._num_on_host + on_device)
        return self._num_on_host + on_device

    def restore(self, total: int) -> None:
        """Go on from ``total`` skipped steps."""
        self._num_on_host, self._num_on_device = total, None
        while self._next_warning <= total:
            self._next_warning *= 2

    def _warn(self, total: int) -> None:
        if total < self._next_warning:
            return
        while self._next_warning <= total:
            self._next_warning *= 2
        warnings.warn(
            f"{total} optimizer step(s) so far were skipped because a gradient held inf or nan; parameters, state and "
            f"step counts did not move. nonfinite='raise' names the parameters. Next said at {self._next_warning}.",
            RuntimeWarning,
            stacklevel=2,
        )
