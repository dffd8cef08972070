"""A few elements of every rounded parameter, compared with its main_param before each step.

    [parameters] -> layout -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

After a write-back a model parameter is its main_param, rounded. What torch counts since then is seen by its version, a
rebound ``p.data`` by its address; a write through ``p.data`` (weight averaging, clamping) leaves no trace, and the next
write-back would undo it. Comparing all elements would cost about a fifth of the step; a few of each parameter cost next
to nothing, and whoever averages, copies, decays or prunes weights changes many.

On a CPU the answer is there at once. On a device nobody waits for it: it is copied to the host in the background, and
read in a later step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

RUN = 8
"""Neighbouring elements that are looked at together: in memory they cost as much as one."""

NUM_RUNS = 16
"""At least, over all parameters; of each one at least."""


class Sample:
    """Elements of parameters, and the same elements of their main_params.

    Args:
        models: local model values, bfloat16 or float16.
        mains: as many main_params, float32, of the same shapes; on the same devices.
    """

    def __init__(self, models: Sequence[Tensor], mains: Sequence[Tensor]) -> None:
        self._models, self._mains = list(models), list(mains)
        self._addresses = self._now_at()
        groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
        num_runs = max(1, NUM_RUNS // max(1, len(self._models)))
        for number, (model, main) in enumerate(zip(models, mains, strict=True)):
            key = model.dtype, model.device
            if key not in groups:
                groups[key] = _Group(*key)
            groups[key].add(number, _runs_of(model.detach(), main.detach(), num_runs))
        self._groups = [group for group in groups.values() if group.owners]

    def _now_at(self) -> list[int]:
        return [tensor.data_ptr() for tensor in (*self._models, *self._mains)]

    def is_stale(self) -> bool:
        """Return whether a tensor was rebound: its elements are elsewhere now."""
        return self._now_at() != self._addresses

    @property
    def answers_late(self) -> bool:
        """Whether some answers come by `late`."""
        return any(answers_late(group.device) for group in self._groups)

    def look(self) -> list[int]:
        """Compare, and return the numbers of the parameters that differ, as far as the host knows without waiting."""
        return [number for group in self._groups for number in group.look()]

    def late(self) -> list[int]:
        """Return the numbers of parameters that an earlier `look` found to differ on a device."""
        return [number for group in self._groups for number in group.late()]


def answers_late(device: torch.device) -> bool:
    """Return whether asking ``device`` for a result would make the host wait."""
    return device.type != "cpu"


def _host_cell() -> Tensor:
    return torch.zeros((), dtype=torch.int64, pin_memory=True)


class _Group:
    """The sample of one dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self.device = device
        self.owners: list[int] = []  # by element
        self._models: list[Tensor] = []
        self._mains: list[Tensor] = []
        self._answer: _Answer | None = None

    def add(self, number: int, runs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take ``runs`` of parameter ``number``."""
        for model_view, main_view in runs:
            self._models.append(model_view)
            self._mains.append(main_view)
            self.owners += [number] * model_view.numel()

    def look(self) -> list[int]:
        """Compare; see `Sample.look`."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return []
        model = torch.cat(self._models).view(torch.int16)
        main = torch.cat(self._mains).to(self._dtype).view(torch.int16)
        if answers_late(self.device):
            self._answer = self._answer or _Answer(len(self.owners), self.device)
            self._answer.send(model != main)
            return []
        differs = model.numpy() != main.numpy()  # in memory of the host: asks no device
        return list(dict.fromkeys(self.owners[place] for place in differs.nonzero()[0])) if differs.any() else []

    def late(self) -> list[int]:
        """Return what a device found; see `Sample.late`."""
        place = self._answer.take() if self._answer is not None else None
        return [] if place is None else [self.owners[place]]


class _Answer:
    """Brings the place of an element that differed from a device to the host, without waiting for it."""

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self._places = torch.arange(1, num_elements + 1, device=device)
        self._found = torch.zeros((), dtype=torch.int64, device=device)  # a place, from 1
        self._on_host = _host_cell()

    def send(self, differs: Tensor) -> None:
        torch.maximum(self._found, torch.where(differs, self._places, 0).max(), out=self._found)
        self._on_host.copy_(self._found, non_blocking=True)

    def take(self) -> int | None:
        if not int(self._on_host):  # memory of the host: nobody waits
            return None
        place = int(self._found) - 1  # waits, also for copies that are under way
        self._found.zero_()
        self._on_host.zero_()
        return place


def _runs_of(model: Tensor, main: Tensor, num_runs: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of 1-D views of the same elements."""
    stretch = model.numel() // num_runs
    if stretch <= RUN:
        num_runs, stretch = min(num_runs, 1), model.numel()
    # Anywhere in its stretch, so that runs are not all in one column of a matrix, or all at the start of a row.
    starts = [i * stretch + (i + 1) * 7919 * RUN % max(1, stretch - RUN + 1) for i in range(num_runs)]
    runs = [range(start, min(start + RUN, model.numel())) for start in starts if start < model.numel()]
    if model.stride() == main.stride() and _is_dense(model):
        return [(_run_of(model, run), _run_of(main, run)) for run in runs]
    indices = [tuple(map(int, torch.unravel_index(torch.tensor(i), model.shape))) for run in runs for i in run]
    return [(model[index].view(1), main[index].view(1)) for index in indices]


def _run_of(tensor: Tensor, run: range) -> Tensor:
    return tensor.as_strided((len(run),), (1,), tensor.storage_offset() + run.start)


def _is_dense(tensor: Tensor) -> bool:
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()
