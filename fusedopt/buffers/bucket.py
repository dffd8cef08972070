"""One bucket's flat tensors, and per parameter what in them is its own.

    parameters -> layout -> [buckets] -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

Per trainable parameter there is one `Entry` (main_param, and the parts that this rank updates) and in it one `Slot`
(main_grad, and what the parameter must still look like). A parameter's hook holds the slot and nothing more.

The life of a bucket, on one rank of several. `Bucket.place` is where the gradients of a round are:

    HERE --launched--> IN_FLIGHT --back before ranks met--> BACK --ranks met--> HERE
                           +--------ranks met------------------------------------^

Gradients that arrive after it was launched add to main_grad, which was zeroed then (``has_unsent``); what comes back is
added to them. `Bucket.holds` is what this rank's part is, where that is memory of its own (``"gradients"``):

    NOTHING --reduced--> SUM --kept over a step--> MEAN --reduced--> SUM        any of them --cleared--> NOTHING

Elsewhere it always is SUM: main_grad itself, in which local gradients and reduced ones add up.

Knows nothing of collectives, hooks or optimizers. Sizes are in elements, except
where a name says ``nbytes``.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from fusedopt._torch_private import local_tensor
from fusedopt.backends import torch_ops
from fusedopt.buffers import encodings
from fusedopt.buffers.main_grad import (
    MAIN_DTYPES,
    OUR_ATTRIBUTES,
    hand_over,
    register,
    serve_transformer_engine,
    set_grad,
    unregister,
)
from fusedopt.sharding import dtensor, layout
from fusedopt.sharding.layout import Span, intersect
from fusedopt.sharding.local_state import Cut


class Holds(enum.Enum):
    """What this rank's part of the gradients is; see the top of this file."""

    NOTHING = "old bytes, which the next reduction overwrites"
    SUM = "a sum over ranks"
    MEAN = "a mean over ranks, which was kept over a step"


class Place(enum.Enum):
    """Where the gradients of a round are; see the top of this file."""

    HERE = "in main_grad"
    IN_FLIGHT = "between ranks"
    BACK = "in main_grad, reduced, before ranks met"


_FOLLOW: dict[Holds | Place, tuple[Holds | Place, ...]] = {
    Holds.NOTHING: (Holds.NOTHING, Holds.SUM),
    Holds.SUM: (Holds.NOTHING, Holds.SUM, Holds.MEAN),
    Holds.MEAN: (Holds.NOTHING, Holds.SUM, Holds.MEAN),
    Place.HERE: (Place.HERE, Place.IN_FLIGHT),
    Place.IN_FLIGHT: (Place.BACK, Place.HERE),
    Place.BACK: (Place.HERE,),
}
"""What may come next."""


_LOW_DTYPES = {"split": torch.int16, "split24": torch.int8}


@dataclass(frozen=True)
class Sharding:
    """How buckets are split over ranks.

    Args:
        shard: ``"none"``, ``"optimizer"`` or ``"gradients"``.
        rank: of this process among ``num_shards``.
        num_shards: equal parts of a bucket.
    """

    shard: str = "none"
    rank: int = 0
    num_shards: int = 1

    @staticmethod
    def of(shard: str, rank: int, num_shards: int) -> Sharding:
        """Return the sharding of one of ``num_shards`` ranks; with one there is nothing to split."""
        return Sharding(shard, rank, num_shards) if shard != "none" and num_shards > 1 else Sharding()

    @property
    def is_sharded(self) -> bool:
        """Whether each rank updates only a part of every bucket."""
        return self.shard != "none"

    @property
    def is_lending(self) -> bool:
        """Whether whole main_grads exist only while gradients arrive."""
        return self.shard == "gradients"


class Bucket:
    """The flat memory of one bucket, and the entries whose views it holds.

    Args:
        index: position among all buckets.
        group: the parameter group it belongs to.
        plan: from `plan_buckets`.
        like: a parameter of the bucket; gives dtype and device.
        sharding: which part of it this rank updates.
        backend: a `Backend`; does the work on its tensors.
        main_param: as in `MainGradConfig`.
        is_released: whether it steps inside backward, after which its gradients are gone (``release="backward"``).

    Attributes:
        is_lending: whether whole main_grads exist only while gradients arrive (``shard="gradients"``, or released).
        grad: main_grad of the whole bucket, fp32 (fp64 for fp64), ``[numel]``; under ``"gradients"`` only while lent.
        grad_part: what this rank updates with; a view of ``grad``, except under ``"gradients"``, where it is a tensor
            of its own.
        is_rounded: whether the model holds fewer digits than main_params.
        main: main_params of this rank's part, where the model is rounded and they are held whole.
        low: what rounding took from them, int16 or int8, where they are held as the model and this; see `encodings`.
        model: model parameters of the whole bucket, under a shard.
        domain: over which ranks its elements lie, beside data-parallel ones (DTensor parameters); else None.
        has_unsent: whether a gradient arrived that was not sent to other ranks yet.
        holds, place: see the top of this file; set by `now_holds` and `now_at`.
    """

    def __init__(
        self,
        index: int,
        group: int,
        plan: layout.BucketPlan,
        like: Tensor,
        sharding: Sharding,
        backend: Any,
        main_param: str = "float32",
        *,
        is_released: bool = False,
    ) -> None:
        self.index = index
        self.group = group
        self.plan = plan
        self.entries: list[Entry] = []
        self.backend = backend
        self.domain = dtensor.domain_of(like)
        self.dtype = MAIN_DTYPES[like.dtype]
        self.device = like.device
        self.span = plan.shard_span(sharding.rank) if sharding.is_sharded else Span(0, plan.numel)
        self.is_released = is_released
        self.is_lending = sharding.is_lending or is_released
        self.grad: Tensor | None = None
        if self.is_released:
            self.grad_part = self.zeros(0)
        elif self.is_lending:
            self.grad_part = self.zeros(self.span.numel)
        else:
            self.grad = self.zeros(plan.numel)
            self.grad_part = self.grad[self.span.start : self.span.end]
        self.is_rounded = self.dtype is not like.dtype
        low_dtype = _LOW_DTYPES.get(main_param) if self.is_rounded else None
        self.main = self.zeros(self.span.numel) if self.is_rounded and low_dtype is None else None
        has_low = low_dtype is not None
        self.low = torch.zeros(self.span.numel, dtype=low_dtype, device=like.device) if has_low else None
        self.model = torch.zeros(plan.numel, dtype=like.dtype, device=like.device) if sharding.is_sharded else None
        self.has_unsent = False
        self.holds = Holds.NOTHING if self.is_lending else Holds.SUM
        self.place = Place.HERE
        self._seen_version = 0

    def now_holds(self, holds: Holds) -> None:
        """Note what this rank's part is from now on; the one place where that changes."""
        self._check_follows(self.holds, holds)
        self.holds = holds

    def now_at(self, place: Place) -> None:
        """Note where the gradients of the round are from now on; the one place where that changes."""
        self._check_follows(self.place, place)
        self.place = place

    def _check_follows(self, before: Holds | Place, after: Holds | Place) -> None:
        if after not in _FOLLOW[before]:
            raise RuntimeError(f"bucket {self.index} went from {before} to {after}: a fault of fusedopt, please report")

    def zeros(self, numel: int) -> Tensor:
        """Return ``numel`` zeros of main_grad's dtype, on the bucket's device."""
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def note_version(self) -> None:
        """Note that main_grads were last written by a backward, or by fusedopt; see `was_written`."""
        self._seen_version = self.grad._version if self.grad is not None else 0

    def was_written(self) -> bool:
        """Return whether a main_grad was written in place since `note_version`; views share one version."""
        return self.grad is not None and self.grad._version != self._seen_version

    def owns(self, start: int) -> bool:
        """Return whether an empty parameter that lies at ``start`` is this rank's; the last rank has the end."""
        return self.span.start <= start < self.span.end or start == self.span.end == self.plan.numel

    def lend(self) -> Tensor:
        """Return the whole gradient buffer, making one of zeros where there is none."""
        if self.grad is None:
            self.grad = self.zeros(self.plan.numel)
            if self.is_released:
                self.grad_part = self.grad
                for entry in self.entries:
                    entry.note_grad_part()
        return self.grad

    def take_back(self) -> Tensor | None:
        """Take the lent gradient buffer, if there is one: ``.grad`` and ``main_grad`` of its parameters become None."""
        grad, self.grad = self.grad, None
        if grad is not None:
            for entry in self.entries:
                entry.slot.forget(entry.param)
                if self.is_released:
                    entry.grad_part = None
        if self.is_released:
            self.grad_part = self.zeros(0)
        return grad

    def release(self) -> None:
        """Let go of all memory at once, whoever still holds the bucket; it and its entries hold each other."""
        self.entries.clear()
        self.grad = self.main = self.model = self.low = None
        self.grad_part = self.zeros(0)

    def nbytes(self) -> dict[str, int]:
        """Return bytes by kind, as allocated."""
        grad = self.grad_part.nbytes if self.is_lending and not self.is_released else 0
        return {
            "main_grad": grad + (self.grad.nbytes if self.grad is not None else 0),
            "main_param": sum(held.nbytes for held in (self.main, self.low) if held is not None),
        }


class Slot:
    """Where the gradient of one parameter lives, and what the parameter must still look like.

    Holds no reference to the parameter: the parameter's hook holds the slot, and torch cannot
    collect a cycle that goes through a hook.

    Args:
        name: of the parameter, for messages.
        param: read here, not kept.
        bucket: holds its main_grad: fp32 (fp64 for fp64), the parameter's shape, strides where dense.
        start: where in the bucket.
        is_fsdp: whether FSDP2 reduces its gradients, and sets them in the parameter's dtype.

    Attributes:
        shape, strides, numel: of the part of the parameter that this rank holds; of a plain one, of all of it.
        main_grad: as the parameter has it, placed as that is; ``local_grad``: its local part, the same for a plain
            parameter.
        is_dtensor: whether the parameter is one.
        is_share: of a DTensor parameter: main_grad holds a share, to be summed over its replicas before the step.
        is_reduced: under ``shard="gradients"``: whether it received a gradient, on any rank, since the last clear.
        num_fires, expected_fires: of the parameter's hook, in this backward and in the last one that reduced.
    """

    __slots__ = (
        "_bucket",
        "_whole_shape",
        "address",
        "device",
        "dtype",
        "expected_fires",
        "index",
        "is_dtensor",
        "is_fsdp",
        "is_reduced",
        "is_share",
        "local_grad",
        "main_grad",
        "name",
        "num_fires",
        "numel",
        "shape",
        "start",
        "strides",
    )

    def __init__(self, name: str, param: Tensor, bucket: Bucket, start: int, *, is_fsdp: bool = False) -> None:
        self.name = name
        self.is_fsdp = is_fsdp
        self.is_dtensor = dtensor.is_dtensor(param)
        self.shape = dtensor.local_of(param).shape
        self.strides = dtensor.strides_of(param)
        self.numel = self.shape.numel()
        self._whole_shape = param.shape
        self.dtype = param.dtype
        self.device = param.device
        self.start = start
        self.index = bucket.index
        self.is_reduced = self.is_share = False
        self.num_fires, self.expected_fires = 0, 1
        self._bucket = weakref.ref(bucket)
        self.main_grad: Tensor | None = None
        self.local_grad: Tensor | None = None
        self.address = 0

    def lend(self, param: Tensor) -> Tensor:
        """Return main_grad, a view of the bucket; made and attached to ``param`` where there is none."""
        if self.main_grad is None:
            bucket = self._bucket()
            if bucket is None:
                raise RuntimeError(f"parameter {self.name} was unwrapped while a gradient arrived for it")
            self.local_grad = bucket.lend().as_strided(self.shape, self.strides, self.start)
            self.address = self.local_grad.data_ptr()
            self.main_grad = self.local_grad
            if self.is_dtensor:
                placements = dtensor.share_placements(param) if self.is_share else None
                self.main_grad = dtensor.like(param, self.local_grad, placements)
            register(param, self.main_grad, bucket.backend, self.name)
        return self.main_grad

    def refuse_unseen_write(self, grad: Tensor | None) -> None:
        """Raise if main_grad, which no gradient reached yet, holds one: a layer wrote into it by itself.

        Looks at the bytes, since kernels count no version. Where a clear left old ones and nothing arrives, they are
        zeroed for the next time. Synchronises, but only at first arrivals, and those without a gradient.

        Args:
            grad: what arrives; None where a Function returned None.
        """
        main_grad, local = self.main_grad, self.local_grad
        # On several ranks, an arrival that was not expected may find what the others sent, which is not `.grad` yet.
        is_expected = self.num_fires == 0 and self.expected_fires == 1
        if main_grad is None or local is None or not is_expected or _is_capturing(local):
            return
        if main_grad.is_zero and _holds_gradient(local, grad):  # type: ignore[attr-defined]
            local.zero_()
            raise RuntimeError(
                f"something other than autograd added to the main_grad of parameter {self.name}: a layer in the style "
                "of Megatron-LM (`weight.main_grad.add_(...)`), for one. fusedopt cannot know whether it added to a "
                "sum or to old bytes, and would lose it or count it twice; what was there is dropped. Let the layer's "
                "backward return fusedopt.MainGradFunction.add_to_main_grad(ctx, weight, grad), or its gradient, and "
                "not write into main_grad"
            )
        if grad is None:
            local.zero_()
            main_grad.is_zero = True  # type: ignore[attr-defined]

    def expect_share(self, param: Tensor) -> None:
        """Place main_grad as gradients of which each replica of ``param`` holds a share; not while it is ``.grad``."""
        self._place(param, dtensor.share_placements(param))
        self.is_share = True

    def end_share(self, param: Tensor) -> None:
        """Place main_grad as ``param`` again: its shares were summed, or cleared; `.grad` follows."""
        is_grad = param.grad is not None and param.grad is self.main_grad
        self._place(param, None)
        self.is_share = False
        if is_grad:
            param.grad = self.main_grad

    def _place(self, param: Tensor, placements: Any) -> None:
        if self.main_grad is not None and self.local_grad is not None:
            before, self.main_grad = self.main_grad, dtensor.like(param, self.local_grad, placements)
            hand_over(before, self.main_grad, param)

    def takes_share(self) -> bool:
        """Return whether what is there is nothing, or shares, too."""
        bucket = self._bucket()
        return bucket is None or not bucket.is_lending or bucket.holds is Holds.NOTHING or self.is_share

    def release(self) -> None:
        """Let go of main_grad, which the parameter was rid of."""
        if self.main_grad is not None:
            unregister(self.main_grad)
        self.main_grad = self.local_grad = None

    def forget(self, param: Tensor) -> None:
        """Give a lent main_grad back: ``.grad`` and ``main_grad`` become None."""
        if self.main_grad is not None:
            unregister(self.main_grad)
            if param.grad is self.main_grad:
                param.grad = None
            param.main_grad = self.main_grad = self.local_grad = None  # type: ignore[attr-defined]

    @property
    def num_first_touches(self) -> int:
        """How often main_grad was claimed: by a gradient that arrived where ``.grad`` was not main_grad."""
        return 0 if self.main_grad is None else self.main_grad.num_first_touches  # type: ignore[attr-defined]

    def local_of(self, tensor: Any) -> Tensor:
        """Return this rank's part of the parameter, or of its main_grad."""
        return local_tensor(tensor) if self.is_dtensor else tensor

    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` and its main_grad still are what they were when wrapped."""
        return (
            getattr(param, "main_grad", None) is self.main_grad
            and (self.main_grad is None or self.local_of(self.main_grad).data_ptr() == self.address)
            and param.dtype is self.dtype
            and param.shape == self._whole_shape
            and param.device == self.device
        )

    def check(self, param: Tensor) -> None:
        """Raise if ``param`` or its main_grad were replaced, moved, cast or resized.

        Raises:
            RuntimeError: naming the parameter, what was found, and the remedy.
        """
        if self.holds(param):
            return
        if param.shape != self._whole_shape:
            raise RuntimeError(
                f"parameter {self.name} has shape {tuple(param.shape)} but had {tuple(self._whole_shape)} when it was "
                "wrapped; its buffers do not fit. Call unwrap(), resize (resize_token_embeddings, for one), make a "
                "new inner optimizer from the resized model, and wrap that"
            )
        if param.dtype is not self.dtype or param.device != self.device:
            raise RuntimeError(
                f"parameter {self.name} is {param.dtype} on {param.device} but was {self.dtype} on {self.device} "
                "when it was wrapped: model.half(), .bfloat16(), .float() or .to() ran after wrapping. "
                "Call unwrap(); cast and move the model first, make and wrap the optimizer after"
            )
        if self.main_grad is not None and self.local_of(self.main_grad).data_ptr() != self.address:
            raise RuntimeError(
                f"the main_grad of parameter {self.name} has left its bucket (it is {self.main_grad.dtype} on "
                f"{self.main_grad.device} now): model.half(), .bfloat16() or .to() carried it away after wrapping. "
                "Call unwrap(); cast and move the model first, make and wrap the optimizer after"
            )
        found = "missing" if getattr(param, "main_grad", None) is None else "another tensor"
        raise RuntimeError(
            f"the main_grad of parameter {self.name} is {found}: something rebound or deleted `param.main_grad`. "
            "Write into it in place (`param.main_grad.copy_(...)`), or assign `param.grad`, which is taken over"
        )


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
            part, and a plain tensor. Where it is split, it has values between `widen` and `narrow` only, and a nan,
            which cannot be written, for all of them elsewhere; `main_value` tells what they are.
        grad_part, model_part: gradient and model value of the same elements, in the shape of main_param.
    """

    __slots__ = (
        "_grad_dtype_before",
        "bucket",
        "grad_part",
        "is_loaded",
        "loaded_ties",
        "low_part",
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
        self.low_part: Tensor | None = None
        self.loaded_ties: tuple[Tensor, Tensor] | None = None  # places, and the lower of the two weights
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
        self.note_grad_part()
        if model is not None:
            self.model_part = self._part_of(model, 0)
        if bucket.main is not None:
            self.main_param = _main_param(self._part_of(bucket.main, bucket.span.start), self.model_part, self.param)
        elif bucket.low is not None:
            self.low_part = self._part_of(bucket.low, bucket.span.start)
            self.main_param = _main_param(_nans_like(self.low_part, bucket.dtype), None, self.param)
        elif model is not None or dtensor.is_dtensor(self.param):
            self.main_param = _main_param(self.model_part, None, self.param)
        else:
            self.main_param = self.param

    def note_grad_part(self) -> None:
        """Find the gradient of the elements that this rank updates, where there is memory for it."""
        bucket = self.bucket
        if self.part is not None and not (bucket.is_released and bucket.grad is None):
            self.grad_part = self._part_of(bucket.grad_part, bucket.span.start)

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
        flat = from_dlpack(model.as_strided(self.slot.shape, self.slot.strides, self.slot.start))
        flat.copy_(dtensor.local_of(self.param))
        dtensor.rebind(self.param, flat)

    def _attach(self) -> None:
        param, slot, grad = self.param, self.slot, self.param.grad
        param.grad = None
        # FSDP2 sets gradients itself, and in the parameter's dtype.
        param.grad_dtype = None if self.slot.is_fsdp else self.bucket.dtype
        # torch pickles a Parameter's attributes with it: without this, saving a module would write main_grad.
        vars(param)["__getstate__"] = functools.partial(_state_without_ours, weakref.ref(param))
        serve_transformer_engine(param)
        if self.bucket.is_lending:
            vars(param)["main_grad"] = None
            vars(param)["lend_main_grad"] = functools.partial(_lend, slot, weakref.ref(param))
            if grad is None:
                return
        main_grad = slot.lend(param)
        if self.grad_part is not None and not self.bucket.is_lending:
            if self.grad_part.shape == slot.shape and slot.local_grad is not None:
                self.grad_part = slot.local_grad
            if self.main_param is not None and self.main_param is not param:
                vars(self.main_param)["main_grad"] = self.grad_part
        if grad is not None:
            with torch.no_grad():
                dtensor.copy_local_(main_grad, grad)
            set_grad(param, main_grad)
            self.bucket.has_unsent = True  # each rank had its own
            self.bucket.note_version()

    @property
    def is_rounded(self) -> bool:
        """Whether main_param holds more digits than the model's value (the parameter is bf16 or fp16)."""
        return self.main_param is not None and self.bucket.is_rounded

    @property
    def is_split(self) -> bool:
        """Whether main_param is held as the model's value and what rounding took from it, or some of that."""
        return self.low_part is not None

    @property
    def is_lossy(self) -> bool:
        """Whether main_param loses digits between steps, by rounding that needs noise."""
        return self.low_part is not None and self.low_part.dtype is torch.int8

    def widen(self, scratch: Tensor) -> None:
        """Give a split main_param its values, in ``scratch``: fp32, ``[numel]`` of this rank's part. For one step."""
        low = self.low_part
        if low is None or self.main_param is None:
            return
        self.main_param.data = scratch.as_strided(low.shape, low.stride())
        self._join(scratch)

    def _join(self, wide: Tensor) -> None:
        if self.low_part is None:
            return
        model, low = self._flat_model(), _flat(self.low_part)
        if answers_late(wide.device):  # nobody waits for a device in a step
            encodings.clear_impossible_(model, low)
        encodings.put_together_(model, low, wide)
        # Edited to 0 through `.data`, for one: what is left would make it nan.
        if not answers_late(wide.device) and not _is_finite(wide):
            encodings.repair_(model, low)
            encodings.put_together_(model, low, wide)

    def narrow(self, noise: encodings.Noise | None = None, first: int = 0) -> None:
        """Round a main_param that was widened into the model, and keep what that takes from it, or 8 bits of that.

        Args:
            noise: for these 8 bits.
            first: number of the part's first element, as the noise counts.
        """
        if self.low_part is None or self.main_param is None:
            return
        self._split(self._in_order(self.main_param.detach()), noise, first)
        self.main_param.data = _nans_like(self.low_part, self.bucket.dtype)

    def repair(self) -> None:
        """Bring what rounding took up to date with weights that were edited or loaded.

        With it, weights that are 0, inf or nan now would be nan. And torch rounds ties to even: of a main_param that
        was loaded, and lies just between two weights, the model may hold the lower one. Then it loses one digit.
        """
        if self.low_part is None:
            return
        model, low = self._flat_model(), _flat(self.low_part)
        encodings.repair_(model, low)
        if self.loaded_ties is not None:
            places, lower = self.loaded_ties
            largest = torch.iinfo(low.dtype).max
            low[places] = torch.where(model[places].view(torch.int16) == lower, largest, low[places])
            self.loaded_ties = None

    def _split(self, wide: Tensor, noise: encodings.Noise | None, first: int) -> None:
        if self.low_part is None:
            return
        model = self._flat_model()
        encodings.cut_(wide, model, _flat(self.low_part), noise=noise, first=first)
        if model.data_ptr() != self.model_part.data_ptr():
            self.model_part.copy_(_shaped(model, self.low_part))

    def _flat_model(self) -> Tensor:
        """Return the model's values in memory order of main_param: its memory, or a copy where it has gaps."""
        return self._in_order(self.model_part.detach())

    def _in_order(self, tensor: Tensor) -> Tensor:
        """Return values of this rank's part, 1-D, in memory order of main_param; a copy where they have another."""
        low = self.low_part
        if low is not None and tensor.stride() != low.stride():
            tensor = torch.empty_strided(low.shape, low.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
                tensor
            )
        return _flat(tensor)

    @property
    def cut(self) -> Cut:
        """Which elements of the parameter are this rank's."""
        return Cut(tuple(self.slot.shape), self.slot.strides, self.part, dtensor.region_of(self.param))

    @property
    def has_grad(self) -> bool:
        """Whether it received a gradient since the last clear."""
        return self.param.grad is not None or self.slot.is_reduced

    @torch.no_grad()
    def up_to_date_main_param(self) -> Tensor | None:
        """Return main_param; where the model parameter was edited since, a copy with what `Buffers.take_over` will do.

        So whoever saves sees the weights as they are, and weights that were swapped in for a while cost no digits.
        """
        if self.main_param is None or not self.is_rounded:
            return self.main_param
        if self.bucket.model is not None and self.was_moved():
            self.move_into(self.bucket.model)
        if self.low_part is not None:
            return self.main_value()
        if not self.was_edited_outside():
            return self.main_param
        value = self.main_param.detach().clone(memory_format=torch.preserve_format)
        torch_ops.take_over_(value, self.model_part, may_be_split=self.is_loaded)
        return value

    def main_value(self) -> Tensor | None:
        """Return the values of main_param: itself, or a copy where it is split; None where another rank has it."""
        if self.low_part is None or self.main_param is None:
            return self.main_param.detach() if self.main_param is not None else None
        low = self.low_part
        value = torch.empty_strided(low.shape, low.stride(), dtype=self.bucket.dtype, device=low.device)
        self._join(_flat(value))
        if self.loaded_ties is not None:
            places, lower = self.loaded_ties
            flat, is_lower = _flat(value).view(torch.int32), self._flat_model()[places].view(torch.int16) == lower
            largest = torch.iinfo(low.dtype).max << (16 - torch.iinfo(low.dtype).bits)
            flat[places] = torch.where(is_lower, (lower.to(torch.int32) << 16) + largest, flat[places])
        return value

    @torch.no_grad()
    def load_main_param(self, value: Tensor) -> None:
        """Fill main_param; where the model parameter differs, the next `Buffers.take_over` sees it."""
        if self.low_part is not None:
            low = self.low_part
            wide = torch.empty_strided(low.shape, low.stride(), dtype=self.bucket.dtype, device=low.device).copy_(value)
            flat, flat_low = _flat(wide), _flat(low)
            model = torch.empty_like(flat, dtype=self.param.dtype)
            encodings.cut_(flat, model, flat_low)
            ties = (flat_low == torch.iinfo(low.dtype).min).nonzero().view(-1)
            self.loaded_ties = (ties, model[ties].view(torch.int16) - 1) if ties.numel() else None
        elif self.main_param is not None:
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
        local = self.slot.local_of(self.param)
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
        self.main_param = self.grad_part = self.low_part = None
        self.model_part = dtensor.local_of(param)

    @property
    def was_stepped(self) -> bool:
        """Whether main_param was written since the last `mark_synced`."""
        return self.main_param is not None and self.main_param._version != self.main_version

    def was_moved(self) -> bool:
        """Return whether ``p.data`` was rebound since the last `mark_synced`."""
        local = self.slot.local_of(self.param)
        return local.data_ptr() != self.seen_address or local.untyped_storage() is not self.seen_storage()

    def was_edited_outside(self) -> bool:
        """Return whether the model parameter was written or rebound since the last `mark_synced`."""
        return self.param._version != self.seen_version or self.was_moved()


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of ``tensor``, which has no gaps, in its order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat.as_strided(like.shape, like.stride())


def _is_finite(flat: Tensor) -> bool:
    """Return whether no element is inf or nan; in one pass, where `torch.isfinite` and `all` take five."""
    return not flat.numel() or all(map(math.isfinite, (float(bound) for bound in torch.aminmax(flat))))


def answers_late(device: torch.device) -> bool:
    """Return whether asking ``device`` for a result would make the host wait."""
    return device.type != "cpu"


def _nans_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the shape of ``tensor`` that takes no memory: whoever reads it sees, whoever writes fails."""
    return torch.full((), math.nan, dtype=dtype, device=tensor.device).expand(tensor.shape)


def _holds_gradient(held: Tensor, grad: Tensor | None) -> bool:
    """Return whether a layer wrote into ``held``, which were zero; ``grad`` is what autograd delivers beside it.

    Beside a gradient, one constant or nan counts for nothing unless it is that gradient: it is what people fill buffers
    with, to see that old bytes do not matter.
    """
    if not held.numel():
        return False
    low, high = held.aminmax()
    if grad is None:
        return bool((low != 0) | (high != 0))
    delivered = dtensor.local_of(grad)
    if delivered.data_ptr() == held.data_ptr():  # an alias that was assigned to `.grad`
        return False
    if bool(low < high):
        return bool(low.isfinite() & high.isfinite())
    return bool(low != 0) and torch.equal(held, delivered)


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


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
