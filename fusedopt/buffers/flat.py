"""Own the flat memory: main_grad and main_param are views of it.

    parameters -> layout -> [buffers] -> arrival -> reduction -> clip -> step -> write-back -> gather

Without a shard the model
parameters are not moved: each keeps a storage of its own, so that saving one
writes its bytes and no others. Under a shard they lie in flat memory, where the
gather needs them, each still with a storage object of its own.

Knows nothing of collectives, hooks or optimizers. Sizes are in elements, except
where a name says ``nbytes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fusedopt.backends import Backend, resolve, torch_ops
from fusedopt.buffers.bucket import Bucket, Entry, Sharding, Slot, answers_late
from fusedopt.sharding import dtensor
from fusedopt.sharding.layout import ParamSpec, plan_buckets


class Buffers:
    """All buckets of one wrapper, and the entries whose views they hold.

    Args:
        backend: a value of `MainGradConfig.backend`: who does the work on the tensors.
        bucket_numel: elements; see `plan_buckets`.
        sharding: how buckets are split over ranks.
        main_param: as in `MainGradConfig`.
        is_released: whether buckets step inside backward; see `Bucket`.
    """

    def __init__(
        self,
        backend: str,
        bucket_numel: int,
        sharding: Sharding | None = None,
        main_param: str = "float32",
        *,
        is_released: bool = False,
    ) -> None:
        self._backend = backend
        self._main_param = main_param
        self._bucket_numel = bucket_numel
        self.is_released = is_released
        self.sharding = sharding or Sharding()
        self.buckets: list[Bucket] = []
        self.entries: list[Entry] = []
        self.listing = 0
        """What all ranks must have in common once groups were edited: which entry stands where. 4 bytes."""
        self.is_stepping = False  # main_params may be ahead of their model parameters
        self.has_fused_step = False  # whether the backend of some bucket can make whole steps
        self._sample: tuple[Sample, list[Entry]] | None = None

    def add(
        self, group: int, named_params: Sequence[tuple[str, nn.Parameter]], shard_by: str = "element"
    ) -> list[Entry]:
        """Make buckets for parameters of one group, one bucket at a time, and attach ``main_grad``.

        A gradient that a parameter already has is kept, in fp32.

        Args:
            group: number of the parameter group; groups do not share buckets.
            named_params: already checked by `check_parameters`.
            shard_by: ``"element"`` or ``"parameter"``, see `plan_buckets`.

        Returns:
            One entry per parameter, in the given order.
        """
        specs = [
            ParamSpec(name, dtensor.numel_of(p), (group, p.dtype, p.device, dtensor.domain_of(p)))
            for name, p in named_params
        ]
        fsdp = dtensor.held_by_fsdp(param for _, param in named_params)
        backends = {(p.dtype, p.device): resolve(self._backend, p.device, p.dtype) for _, p in named_params}
        entries: dict[int, Entry] = {}
        for plan in plan_buckets(specs, self._bucket_numel, self.sharding.num_shards, shard_by):
            like = named_params[plan.placements[0].index][1]
            backend = backends[like.dtype, like.device]
            number, released = len(self.buckets), self.is_released
            bucket = Bucket(number, group, plan, like, self.sharding, backend, self._main_param, is_released=released)
            self.buckets.append(bucket)
            self.has_fused_step = self.has_fused_step or backend.fused_step_ is not None
            for placement in plan.placements:
                name, param = named_params[placement.index]
                slot = Slot(name, param, bucket, placement.span.start, is_fsdp=id(param) in fsdp)
                entry = Entry(param, slot, bucket)
                bucket.entries.append(entry)
                entries[placement.index] = entry
        added = [entries[i] for i in range(len(named_params))]
        for number, entry in enumerate(added, len(self.entries)):
            entry.number = number
        self.entries.extend(added)
        self._sample = None
        return added

    def drop(self, entries: Sequence[Entry]) -> None:
        """Give these parameters back, see `release`; in a bucket that others are in, their elements stay, as zeros.

        Entries and buckets are numbered anew, so nothing may be under way.
        """
        for entry in entries:
            grads = [grad for grad in (entry.grad_part, entry.slot.local_grad) if grad is not None]
            entry.detach()
            entry.bucket.entries.remove(entry)
            torch_ops.zero_(grads)
        self.buckets[:] = [bucket for bucket in self.buckets if bucket.entries]
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
            bucket.note_version()
        kept = [entry for bucket in self.buckets for entry in bucket.entries]
        self.entries[:] = sorted(kept, key=lambda entry: entry.number)
        for number, entry in enumerate(self.entries):
            entry.number, entry.slot.index = number, entry.bucket.index
        self._sample = None

    def release(self) -> None:
        """Give every parameter back as torch made it, with its gradient in its own dtype."""
        for bucket in self.buckets:
            for entry in bucket.entries:  # also of one that was being filled when memory ran out
                entry.detach()
            bucket.release()
        self.entries.clear()
        self.buckets.clear()
        self._sample = None

    def check_views(self) -> None:
        """Raise by name if a parameter or its main_grad is not what it was when wrapped."""
        for entry in self.entries:
            if not entry.slot.holds(entry.param):
                entry.slot.check(entry.param)

    def with_grad(self) -> list[Entry]:
        """Return the entries that received a gradient since they were last cleared."""
        return [entry for entry in self.entries if entry.has_grad]

    def grad_parts(self) -> list[Tensor]:
        """Return what this rank updates with: the gradients of `with_grad`, each its part."""
        return [e.grad_part for e in self.entries if e.grad_part is not None and e.has_grad]

    def scale_grads_(self, factor: Tensor) -> None:
        """Multiply `grad_parts` by ``factor``, 0-d."""
        updated = [e for e in self.entries if e.grad_part is not None and e.has_grad]
        for backend, entries in _by_backend((e.bucket.backend, e) for e in updated):
            parts = [e.grad_part for e in entries]
            backend.scale_cast_(parts, parts, factor)

    def shares(self) -> list[Entry]:
        """Return the entries whose gradients are shares still, see `Slot.is_share`."""
        return [e for e in self.entries if e.slot.is_share and e.has_grad]

    def buckets_by_backend(self) -> list[tuple[Backend, list[Bucket]]]:
        """Return all buckets, those that the same functions work on together."""
        return _by_backend((bucket.backend, bucket) for bucket in self.buckets)

    def zero_absent(self) -> None:
        """Zero this rank's parts of the gradients of parameters that received none.

        A clear runs no code of ours, so such a span may hold bytes from before it, and whole-bucket
        operations must see zero there.
        """
        torch_ops.zero_([e.grad_part for e in self.entries if e.grad_part is not None and not e.has_grad])

    def zero_absent_in(self, bucket: Bucket) -> None:
        """Zero, in the whole of ``bucket``, main_grads of parameters whose ``.grad`` is None."""
        torch_ops.zero_(
            [e.slot.local_grad for e in bucket.entries if e.param.grad is None and e.slot.local_grad is not None]
        )

    @torch.no_grad()
    def take_over(self, *, everything: bool = False) -> bool:
        """Let edits of model parameters from outside reach their main_params.

        Args:
            everything: compare all elements of all parameters, also where torch saw no edit.

        Returns:
            Whether one was found that torch had not seen, by a sample of elements; then everything was compared.

        Raises:
            RuntimeError: naming a parameter, if such a one was found too late: a device told of it after the step that
                undid it.
        """
        if everything:
            self._take_over(self.entries)
            return False
        self._refuse_late()
        self._take_over([e for e in self.entries if e.was_edited_outside() or e.is_loaded])
        shows_edit = self._shows_unseen_edit()
        if shows_edit:
            self.take_over_unseen()
        return shows_edit

    @torch.no_grad()
    def take_over_unseen(self) -> None:
        """Compare all elements of all parameters, but for those whose main_param is ahead, or waits for its weights."""
        self._take_over([entry for entry in self.entries if not (entry.was_stepped or entry.is_loaded)])

    def _take_over(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.was_moved():
                self._sample = None
                if entry.bucket.model is not None:
                    entry.move_into(entry.bucket.model)
            if entry.low_part is not None:  # the model's value is the upper half: nothing to compare
                entry.repair()
            elif entry.is_rounded and entry.main_param is not None:
                torch_ops.take_over_(entry.main_param, entry.model_part, may_be_split=entry.is_loaded)
            if entry.bucket.is_rounded or entry.bucket.model is not None:
                entry.mark_synced()

    def _refuse_late(self) -> None:
        late = [self._sample[1][number] for number in self._sample[0].late()] if self._sample is not None else []
        if late:
            raise RuntimeError(
                f"parameter {late[0].slot.name} was written through .data (or by what torch does not count) before an "
                "earlier step, which has undone that. Write under torch.no_grad() into the parameter itself, which is "
                "seen, or call optimizer.sync_main_params() after such a write and before the next step"
            )

    def _shows_unseen_edit(self) -> bool:
        """Return whether model parameters were edited in a way that torch does not count, see `Sample`."""
        if self.is_stepping:  # a step that failed left main_params ahead
            return False
        sample, entries = self._sample or self._draw()
        if sample.answers_late:
            if any(entry.was_stepped for entry in entries):
                return False
            if sample.is_stale():
                sample, entries = self._draw()
        found = sample.look()
        if found and sample.is_stale():  # an inner optimizer rebound a main_param
            sample, entries = self._draw()
            found = sample.look()
        return any(not (entries[number].was_stepped or entries[number].is_loaded) for number in found)

    def _draw(self) -> tuple[Sample, list[Entry]]:
        whole = (e for e in self.entries if e.is_rounded and not e.is_split)
        rounded = [(e, e.main_param) for e in whole if e.main_param is not None]
        models = [dtensor.local_of(e.model_part) for e, _ in rounded]
        self._sample = Sample(models, [main for _, main in rounded]), [e for e, _ in rounded]
        return self._sample

    @torch.no_grad()
    def write_back(
        self, entries: Iterable[Entry] | None = None, *, everything: bool = False, done: Iterable[Entry] = ()
    ) -> None:
        """Round main_params into their model parameters, bumping the version of each one written.

        Under a shard this rank's parts are written, and the rest is the gather's.

        Args:
            entries: of these; default: of all.
            everything: also those that have no gradient and were not seen to change.
            done: entries whose step wrote the model parameter, too.
        """
        among = self.entries if entries is None else entries
        written = [e for e in among if everything or e.has_grad or e.was_stepped]
        is_done = {e.number for e in done}
        rounded = [e for e in written if e.is_rounded and e.number not in is_done]
        for backend, entries in _by_backend((e.bucket.backend, e) for e in rounded):
            backend.scale_cast_([e.model_part for e in entries], [e.main_param for e in entries])
        # Inner optimizers that write through `.data` leave no trace, and flat memory and kernels none on parameters;
        # torch's check for a step between forward and backward needs one. (Write-back above may leave a second.)
        torch.autograd.graph.increment_version([e.param for e in written])
        for entry in written:
            entry.mark_synced()
        self.is_stepping = False

    def forget_agreement(self) -> None:
        """Compare every parameter with its main_param at the next `take_over`: main_params were loaded."""
        for entry in self.entries:
            if entry.is_rounded:
                entry.forget_agreement()

    def nbytes(self) -> dict[str, int]:
        """Return bytes by kind, as allocated: ``model`` (trainable parameters), ``main_grad``, ``main_param``."""
        total = {"model": sum(dtensor.local_of(e.param).nbytes for e in self.entries), "main_grad": 0, "main_param": 0}
        for bucket in self.buckets:
            for kind, nbytes in bucket.nbytes().items():
                total[kind] += nbytes
        return total


def _by_backend(items: Iterable[tuple[Backend, Any]]) -> list[tuple[Backend, list[Any]]]:
    groups: dict[Backend, list[Any]] = {}
    for backend, item in items:
        groups.setdefault(backend, []).append(item)
    return list(groups.items())


RUN = 8
"""Neighbouring elements that are looked at together: in memory they cost as much as one."""

NUM_RUNS = 16
"""At least, over all parameters; of each one at least."""


class Sample:
    """A few elements of every rounded parameter, compared with the same elements of its main_param before each step.

    After a write-back a model parameter is its main_param, rounded. What torch counts since then is seen by its
    version, a rebound ``p.data`` by its address; a write through ``p.data`` (weight averaging, clamping) leaves no
    trace, and the next write-back would undo it. Comparing all elements would cost about a fifth of the step; a few of
    each parameter cost next to nothing, and whoever averages, copies, decays or prunes weights changes many.

    On a CPU the answer is there at once. On a device nobody waits for it: it is copied to the host in the background,
    and read in a later step.

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
