"""Own the flat memory: main_grad and main_param are views of it.

    parameters -> layout -> [buffers] -> arrival -> reduction -> clip -> step -> write-back -> gather

Per trainable parameter there is one `Entry`, and in it one `Slot`: what the
parameter must still look like and where its gradient lives; per bucket there is
one `Bucket`, whose flat tensors they are views of. Without a shard the model
parameters are not moved: each keeps a storage of its own, so that saving one
writes its bytes and no others. Under a shard they lie in flat memory, where the
gather needs them, each still with a storage object of its own.

Knows nothing of collectives, hooks or optimizers. Sizes are in elements, except
where a name says ``nbytes``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from fusedopt.backends import Backend, resolve, torch_ops
from fusedopt.buffers.bucket import Bucket, Sharding, Slot
from fusedopt.buffers.main_grad import OUR_ATTRIBUTES, hang, serve_transformer_engine
from fusedopt.buffers.sample import Sample
from fusedopt.sharding import dtensor
from fusedopt.sharding.layout import ParamSpec, Span, intersect, plan_buckets


class Entry:
    """One trainable parameter with its slot and, where this rank updates some of it, its main_param.

    Args:
        param: the model parameter.
        slot: where its gradient lives.
        bucket: the bucket it is in.

    Attributes:
        number: position among all entries.
        part: elements of the parameter, in memory order, that this rank updates; None where another rank does.
        main_param: fp32 (fp64 for fp64): the parameter itself, where that is not rounded and whole; else of its own:
            the parameter's shape, or 1-D where a shard cuts through; None where ``part`` is. Of a DTensor: of its local
            part, and a plain tensor.
        grad_part, model_part: gradient and model value of the same elements, in the shape of main_param.
    """

    __slots__ = (
        "_grad_dtype_before",
        "bucket",
        "grad_part",
        "is_loaded",
        "main_param",
        "main_version",
        "model_part",
        "number",
        "param",
        "part",
        "seen_address",
        "seen_storage",
        "seen_version",
        "slot",
    )

    def __init__(self, param: nn.Parameter, slot: Slot, bucket: Bucket) -> None:
        self.param = param
        self.slot = slot
        self.bucket = bucket
        self.number = -1
        span = Span(slot.start, slot.start + slot.numel)
        owned = intersect(span, bucket.span)
        if span.numel == 0 and bucket.owns(span.start):
            owned = span
        self.part = Span(owned.start - span.start, owned.end - span.start) if owned is not None else None
        self._grad_dtype_before = param.grad_dtype
        self.seen_version = -1
        self.is_loaded = False
        self.main_param: nn.Parameter | None = None
        self.grad_part: Tensor | None = None
        self.model_part = dtensor.local_of(param)
        self._make_parts()
        self.mark_synced()
        self._attach()

    def _make_parts(self) -> None:
        """Move the parameter into the bucket's flat memory, where there is one, and make main_param."""
        bucket, model = self.bucket, self.bucket.model
        if model is not None:
            self.move_into(model)
        if self.part is None:
            return
        self.grad_part = self._part_of(bucket.grad_part, bucket.span.start)
        if model is not None:
            self.model_part = self._part_of(model, 0)
        if bucket.main is not None:
            self.main_param = _main_param(self._part_of(bucket.main, bucket.span.start), self.model_part, self.param)
        elif model is not None or dtensor.is_dtensor(self.param):
            self.main_param = _main_param(self.model_part, None, self.param)
        else:
            self.main_param = self.param

    def _part_of(self, flat: Tensor, origin: int) -> Tensor:
        """Return the part's elements in ``flat``, whose first element is element ``origin`` of the bucket."""
        slot, part = self.slot, self.part
        if part is None:
            raise RuntimeError(f"parameter {slot.name} has no part on this rank")
        if part.numel == slot.numel:
            return flat.as_strided(slot.shape, slot.strides, slot.start - origin)
        return flat[slot.start + part.start - origin : slot.start + part.end - origin]

    @torch.no_grad()
    def move_into(self, model: Tensor) -> None:
        """Copy the parameter into flat memory and alias it there, with a storage object of its own."""
        home = from_dlpack(model.as_strided(self.slot.shape, self.slot.strides, self.slot.start))
        home.copy_(dtensor.local_of(self.param))
        dtensor.rebind(self.param, home)

    def _attach(self) -> None:
        param, slot, grad = self.param, self.slot, self.param.grad
        param.grad = None
        # FSDP2 hangs up gradients itself, and in the parameter's dtype.
        param.grad_dtype = None if self.slot.is_fsdp else self.bucket.dtype
        # torch pickles a Parameter's attributes with it: without this, saving a module would write main_grad.
        vars(param)["__getstate__"] = functools.partial(_state_without_ours, weakref.ref(param))
        serve_transformer_engine(param)
        if self.bucket.is_lending:
            param.main_grad = None  # type: ignore[attr-defined]
            vars(param)["lend_main_grad"] = functools.partial(_lend, slot, weakref.ref(param))
            if grad is None:
                return
        main_grad = slot.lend(param)
        if self.grad_part is not None and not self.bucket.is_lending:
            if self.grad_part.shape == slot.shape and slot.local_grad is not None:
                self.grad_part = slot.local_grad
            if self.main_param is not None and self.main_param is not param:
                self.main_param.main_grad = self.grad_part  # type: ignore[attr-defined]
        if grad is not None:
            with torch.no_grad():
                dtensor.copy_local_(main_grad, grad)
            hang(param, main_grad)
            self.bucket.is_dirty = True  # each rank had its own
            self.bucket.note_version()

    @property
    def is_rounded(self) -> bool:
        """Whether main_param holds more digits than the model's value (the parameter is bf16 or fp16)."""
        return self.main_param is not None and self.bucket.main is not None

    @property
    def has_grad(self) -> bool:
        """Whether it received a gradient since the last clear."""
        return self.param.grad is not None or self.slot.is_reduced

    @torch.no_grad()
    def up_to_date_main_param(self) -> Tensor | None:
        """Return main_param; where the model parameter was edited since, a copy with what `Buffers.take_over` will do.

        So whoever saves sees the weights as they are, and weights that were swapped in for a while cost no digits.
        """
        if self.main_param is None or not self.is_rounded or not self.was_edited_outside():
            return self.main_param
        if self.bucket.model is not None and self.was_moved():
            self.move_into(self.bucket.model)
        value = self.main_param.detach().clone(memory_format=torch.preserve_format)
        torch_ops.take_over_(value, self.model_part)
        return value

    @torch.no_grad()
    def load_main_param(self, value: Tensor) -> None:
        """Fill main_param; where the model parameter differs, the next `Buffers.take_over` sees it."""
        if self.main_param is not None:
            self.main_param.copy_(value)
        self.forget_agreement()

    def forget_agreement(self) -> None:
        """Note that main_param was loaded: the next `Buffers.take_over` compares it with the model parameter."""
        self.seen_version = self.param._version
        self.is_loaded = True

    def mark_synced(self) -> None:
        """Note that model parameter and main_param agree as they stand."""
        self.is_loaded = False
        self.seen_version = self.param._version
        local = dtensor.local_of(self.param)
        self.seen_address = local.data_ptr()
        # Also weakly by its storage: after two `p.data = tensor` the second may lie where the first one lay.
        self.seen_storage = weakref.ref(local.untyped_storage())
        self.main_version = self.main_param._version if self.main_param is not None else 0

    def detach(self) -> None:
        """Remove what wrapping attached; a gradient is kept, rounded to the parameter's own gradient dtype.

        Nothing holds flat memory afterwards, so that it is freed whoever still holds the entry (a traceback, for one).
        """
        param, grad = self.param, self.param.grad
        param.grad = None
        for attribute in OUR_ATTRIBUTES:
            vars(param).pop(attribute, None)
        param.grad_dtype = param.dtype if self._grad_dtype_before is self.slot.dtype else self._grad_dtype_before
        if grad is not None and grad.shape == param.shape and self.bucket.model is None:  # under a shard it is a share
            param.grad = grad.detach().to(param.grad_dtype or param.dtype, copy=True)
        if self.bucket.model is not None:  # its flat memory would live as long as any parameter of the bucket
            dtensor.rebind(param, dtensor.local_of(param.data).clone(memory_format=torch.preserve_format))
        self.slot.release()
        self.main_param = self.grad_part = None
        self.model_part = dtensor.local_of(param)

    def was_moved(self) -> bool:
        """Return whether ``p.data`` was rebound since the last `mark_synced`."""
        local = dtensor.local_of(self.param)
        return local.data_ptr() != self.seen_address or local.untyped_storage() is not self.seen_storage()

    def was_edited_outside(self) -> bool:
        """Return whether the model parameter was written or rebound since the last `mark_synced`."""
        return self.param._version != self.seen_version or self.was_moved()


class Buffers:
    """All buckets of one wrapper, and the entries whose views they hold.

    Args:
        backend: a value of `MainGradConfig.backend`: who does the work on the tensors.
        bucket_numel: elements; see `plan_buckets`.
        sharding: how buckets are split over ranks.
    """

    def __init__(self, backend: str, bucket_numel: int, sharding: Sharding | None = None) -> None:
        self._backend = backend
        self._bucket_numel = bucket_numel
        self.sharding = sharding or Sharding()
        self.buckets: list[Bucket] = []
        self.entries: list[Entry] = []
        self.listing = 0
        """What all ranks must have in common once groups were edited: which entry stands where. 4 bytes."""
        self.is_stepping = False  # main_params may be ahead of their model parameters
        self._sample: tuple[Sample, list[Entry]] | None = None

    def add(
        self, group: int, named_params: Sequence[tuple[str, nn.Parameter]], shard_by: str = "element"
    ) -> list[Entry]:
        """Make buckets for parameters of one group, one bucket at a time, and attach ``main_grad``.

        A gradient that already hangs on a parameter is kept, in fp32.

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
            bucket = Bucket(len(self.buckets), group, plan, like, self.sharding, backend)
            self.buckets.append(bucket)
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
        self._take_over([entry for entry in self.entries if not (_was_written(entry) or entry.is_loaded)])

    def _take_over(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.was_moved():
                self._sample = None
                if entry.bucket.model is not None:
                    entry.move_into(entry.bucket.model)
            if entry.is_rounded and entry.main_param is not None:
                torch_ops.take_over_(entry.main_param, entry.model_part)
            if entry.bucket.main is not None or entry.bucket.model is not None:
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
        """Return whether model parameters were edited in a way that torch does not count, see `sample`."""
        if self.is_stepping:  # a step that failed left main_params ahead
            return False
        sample, entries = self._sample or self._draw()
        if sample.answers_late:
            if any(_was_written(entry) for entry in entries):
                return False
            if sample.is_stale():
                sample, entries = self._draw()
        found = sample.look()
        if found and sample.is_stale():  # an inner optimizer rebound a main_param
            sample, entries = self._draw()
            found = sample.look()
        return any(not (_was_written(entries[number]) or entries[number].is_loaded) for number in found)

    def _draw(self) -> tuple[Sample, list[Entry]]:
        rounded = [(e, e.main_param) for e in self.entries if e.is_rounded and e.main_param is not None]
        models = [dtensor.local_of(e.model_part) for e, _ in rounded]
        self._sample = Sample(models, [main for _, main in rounded]), [e for e, _ in rounded]
        return self._sample

    @torch.no_grad()
    def write_back(self, *, everything: bool = False, done: Iterable[Entry] = ()) -> None:
        """Round main_params into their model parameters, bumping the version of each one written.

        Under a shard this rank's parts are written, and the rest is the gather's.

        Args:
            everything: also those that have no gradient and were not seen to change.
            done: entries whose step wrote the model parameter, too.
        """
        written = [e for e in self.entries if everything or e.has_grad or _was_written(e)]
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


def _was_written(entry: Entry) -> bool:
    return entry.main_param is not None and entry.main_param._version != entry.main_version


def _lend(slot: Slot, param: weakref.ref[nn.Parameter]) -> Tensor | None:
    alive = param()
    return slot.lend(alive) if alive is not None else None


def _state_without_ours(param: weakref.ref[nn.Parameter]) -> dict[str, object] | None:
    state = vars(param()) if param() is not None else {}
    return {key: value for key, value in state.items() if key not in OUR_ATTRIBUTES} or None


def _main_param(view: Tensor, value: Tensor | None, param: nn.Parameter) -> nn.Parameter:
    # `.data` gives the main_param a version counter of its own; views share their base's.
    main_param = nn.Parameter(view.data, requires_grad=True)
    if value is not None:
        with torch.no_grad():
            main_param.copy_(value)
    main_param.__dict__.update({key: value for key, value in vars(param).items() if key not in OUR_ATTRIBUTES})
    return main_param
