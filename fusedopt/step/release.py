"""Step buckets inside backward, and give the memory of their gradients back.

    arrival -> [clip by the last norm -> widen -> inner step -> narrow -> write-back] -> ...; step: [what is left]

A bucket steps when a gradient has arrived for each of its parameters: autograd is done with a parameter when its
gradient arrives, so that its weights may be written while those of earlier layers are still used. What a backward
left incomplete (parameters that it did not reach) steps in `step()`. So there is one backward for each step: a gradient
that arrives when its bucket has stepped would need the weights from before, and is refused by name. So is an edit, of
hyper-parameters, weights or groups, between backward and `step()`, which comes too late for what has stepped.

The norm of all gradients is known when the last of them has arrived; what is clipped is clipped by the norm of the step
before. A bucket that holds inf or nan is left out by itself.

Knows nothing of ranks.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fusedopt.buffers.bucket import Bucket, Entry, Slot, answers_late
from fusedopt.buffers.flat import Buffers
from fusedopt.config import MainGradConfig
from fusedopt.gradients.clip import clip_coefficient
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.sharding.dtensor import is_dtensor
from fusedopt.step.bucket_step import BucketStep


def refuse_release(named: Iterable[tuple[str, Tensor]], *, is_alone: bool) -> None:
    """Refuse what cannot be released.

    Args:
        named: all parameters.
        is_alone: whether no other rank has gradients, or norms, that count here.

    Raises:
        ValueError: saying what was found, and what to do.
    """
    if not is_alone:
        raise ValueError(
            'release="backward" with several ranks (data-parallel ranks, FSDP2, or a norm_group): a bucket would step '
            'before their gradients are reduced. Use release="none" there; shard="gradients" keeps 4/W bytes of them'
        )
    for name, param in named:
        if is_dtensor(param):
            raise ValueError(
                f'release="backward" with DTensor parameter {name}: other ranks have parts of its gradient'
            )
        if param.dtype is torch.float16 and param.requires_grad:
            raise ValueError(
                f'release="backward" with float16 parameter {name}: its gradients need a GradScaler, which unscales '
                'them after backward, when buckets have stepped. Make the model bfloat16, or use release="none"'
            )


class Release:
    """What steps inside backward, of one wrapper.

    Args:
        buffers: gradients, main_params and models.
        inner: the wrapped optimizers.
        config: the settings.
        prepare: brings hyper-parameters and main_params up to date, before the first bucket of a round steps; a bound
            method, of the wrapper, which is held weakly.

    Attributes:
        last_norm: of the gradients of the last round that was finite, float64, 0-d; None, or 0, before the first.
    """

    def __init__(
        self, buffers: Buffers, inner: InnerOptimizers, config: MainGradConfig, prepare: Callable[[], None]
    ) -> None:
        self._buffers = buffers
        self._inner = inner
        self._max_norm = config.max_grad_norm
        self._is_checked = config.nonfinite == "skip"
        self._prepare = weakref.WeakMethod(prepare)
        self.last_norm: Tensor | None = None
        self._missing: dict[int, set[int]] = {}  # by number of the bucket: `id` of slots without a gradient
        self._round: _Round | None = None

    def arrived(self, slot: Slot) -> None:
        """Note that a gradient arrived; step its bucket if that is complete.

        Raises:
            RuntimeError: naming the parameter, if its bucket has stepped.
        """
        bucket = self._buffers.buckets[slot.index]
        if self._round is not None and bucket in self._round.stepped:
            bucket.take_back()
            raise RuntimeError(
                f"a gradient arrived for parameter {slot.name} after it was stepped inside backward "
                '(release="backward"); it is dropped. Make one backward for each optimizer.step(): add the losses up '
                "and call backward once; do not use a weight both inside and outside a recomputed layer; or use "
                'release="none"'
            )
        if slot.index not in self._missing:
            self._missing[slot.index] = {id(entry.slot) for entry in bucket.entries if entry.param.requires_grad}
        self._missing[slot.index].discard(id(slot))
        if not self._missing[slot.index]:
            with torch.no_grad():
                self._step(bucket)

    def cleared(self) -> None:
        """Note that gradients were cleared; buckets that stepped have stepped."""
        for bucket in self._buffers.buckets:
            if bucket.is_released:
                bucket.take_back()
        self._missing.clear()

    def finish(self) -> tuple[Tensor | None, bool]:
        """Step what is left, and end the round.

        Returns:
            The norm of all gradients, where that was measured, and whether a bucket was left out.

        Raises:
            RuntimeError: naming what was edited since a bucket stepped; once, and nothing is done.
        """
        late = self._round.late_edit() if self._round is not None else None
        if late is not None:
            raise RuntimeError(
                f'{late} between backward and step(): with release="backward" buckets have stepped without that. Do it '
                "before backward, or after step(). step(), called once more, steps the rest and goes on as all stands"
            )
        for bucket in self._buffers.buckets:
            if any(entry.has_grad for entry in bucket.entries):
                self._step(bucket)
        ended = self._began()
        for group in () if ended.was_skipped else ended.step.untouched():  # it may count steps
            ended.step.step(group, [])
        ended.step.finish()
        self._buffers.is_stepping = False
        self._round = None
        self._missing.clear()
        norm = _norm_of(ended.norms)
        if norm is None:
            return None, False
        before = torch.zeros_like(norm) if self.last_norm is None else self.last_norm.to(norm)
        self.last_norm = torch.where(norm.isfinite(), norm, before)  # of 0 nothing is clipped
        is_double = any(bucket.dtype is torch.float64 for bucket in self._buffers.buckets)
        return norm if is_double else norm.float(), ended.was_skipped

    def _began(self) -> _Round:
        if self._round is None:
            prepare = self._prepare()
            if prepare is not None:
                prepare()
            self._round = _Round(self._inner, self._buffers)
        return self._round

    def _step(self, bucket: Bucket) -> None:
        """Step one bucket, and give its gradients' memory back."""
        current = self._began()
        entries = [entry for entry in bucket.entries if entry.has_grad]
        if entries and self._measure_and_clip(current, bucket):
            for group, members in current.by_group(entries):
                written = current.step.step(group, members)
                self._buffers.write_back(members, done=written)
                self._buffers.is_stepping = True
                current.note(members)
        current.stepped.add(bucket)
        bucket.take_back()

    def _measure_and_clip(self, current: _Round, bucket: Bucket) -> bool:
        """Return whether the bucket may step; its gradients are clipped by the last norm."""
        if self._is_checked or self._max_norm is not None:
            norm = bucket.backend.norm([bucket.grad_part], 2.0).double()
            if self._is_checked and not math.isfinite(norm.item()):  # else nobody waits for the device, as in `Clip`
                if bool(bucket.backend.found_inf([bucket.grad_part])):
                    current.norms.append(norm)
                    current.was_skipped = True
                    return False
                norm = bucket.backend.norm([bucket.grad_part], 2.0, dtype=torch.float64)  # only its square overflows
            current.norms.append(norm)
        if self._max_norm is not None and self._max_norm != math.inf and self.last_norm is not None:
            bucket.grad_part.mul_(clip_coefficient(self.last_norm, self._max_norm).to(bucket.grad_part))
        return True


class _Round:
    """What lives from the first bucket of a backward to the end of `step()`."""

    def __init__(self, inner: InnerOptimizers, buffers: Buffers) -> None:
        self.step = BucketStep(inner, buffers)
        self._inner = inner
        self._places: dict[int, tuple[int, int]] = {}  # by `id` of the parameter: its group, and where that lists it
        self.stepped: set[Bucket] = set()
        self.norms: list[Tensor] = []
        self.was_skipped = False
        self._settings = [(listed, {k: _mark(v) for k, v in listed.agreed.items()}) for listed in inner.listed]
        self._written: set[tuple[int, str]] = set()  # hyper-parameters that inner steps write: counts, for one
        self._versions: list[tuple[Entry, int]] = []

    def note(self, entries: Sequence[Entry]) -> None:
        """Note that ``entries`` were stepped, and how they stand."""
        for index, (listed, marks) in enumerate(self._settings):
            self._written |= {(index, key) for key, mark in marks.items() if _mark(listed.group.get(key)) != mark}
        self._versions += [(entry, entry.param._version) for entry in entries]

    def late_edit(self) -> str | None:
        """Return what was edited since a bucket was stepped, in words; told once."""
        settings, versions, self._settings, self._versions = self._settings, self._versions, [], []
        for index, (listed, marks) in enumerate(settings if versions else []):
            for key, mark in marks.items():  # what changed on the inner side shows on the outer one, too
                if (index, key) not in self._written and _mark(listed.outer.get(key)) != mark:
                    return f"param_groups[{index}][{key!r}] was changed, to {listed.outer.get(key)!r},"
        trained = {id(param) for listed in self._inner.listed for param in listed.params}
        for entry, version in versions:
            if id(entry.param) not in trained:
                return f"parameter {entry.slot.name} was taken out of param_groups"
            if entry.param._version != version:
                return f"parameter {entry.slot.name} was edited"
        return None

    def by_group(self, entries: Sequence[Entry]) -> Iterable[tuple[int, list[Entry]]]:
        """Return entries by outer group, in the order in which that lists them; without those that it lists no more."""
        if any(id(entry.param) not in self._places for entry in entries):  # asked first, or groups were edited since
            listings = [(index, listed.params) for index, listed in enumerate(self._inner.listed)]
            self._places = {id(p): (index, place) for index, params in listings for place, p in enumerate(params)}
        listed = [entry for entry in entries if id(entry.param) in self._places]
        found: dict[int, list[Entry]] = {}
        for entry in sorted(listed, key=lambda entry: self._places[id(entry.param)]):
            found.setdefault(self._places[id(entry.param)][0], []).append(entry)
        return found.items()


def _mark(value: Any) -> Any:
    """Return what differs when ``value``, a hyper-parameter, is another one; its `id` where one would have to wait."""
    if isinstance(value, Tensor):
        return id(value) if answers_late(value.device) else value.tolist()
    return copy.copy(value)


def _norm_of(norms: Sequence[Tensor]) -> Tensor | None:
    """Return the norm of all from those of buckets, float64, 0-d."""
    if not norms:
        return None
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total
