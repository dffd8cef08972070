"""Own the flat memory: main_grad and main_param are views of it.

    parameters -> layout -> [buffers] -> arrival -> reduction -> clip -> step -> write-back -> gather

Per trainable parameter there is one `Entry`, and in it one `Slot`: what the
parameter must still look like and where its gradient lives. Model parameters
themselves are not moved: each keeps a storage of its own, so that saving one
writes its bytes and no others.

Knows nothing of collectives, hooks or optimizers. Sizes are in elements, except
where a name says ``nbytes``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fusedopt.backends import Backend
from fusedopt.checks import MAIN_DTYPES
from fusedopt.layout import ParamSpec, plan_buckets
from fusedopt.main_grad import register

_OUR_ATTRIBUTES = ("main_grad", "__getstate__")


class Slot:
    """Where the gradient of one parameter lives, and what the parameter must still look like.

    Holds no reference to the parameter: the parameter's hook holds the slot, and torch cannot
    collect a cycle that goes through a hook.

    Args:
        name: of the parameter, for messages.
        param: read here, not kept.
        main_grad: fp32 (fp64 for fp64), the parameter's shape; a view of a bucket.
    """

    __slots__ = ("address", "device", "dtype", "main_grad", "name", "shape")

    def __init__(self, name: str, param: Tensor, main_grad: Tensor) -> None:
        self.name = name
        self.shape = param.shape
        self.dtype = param.dtype
        self.device = param.device
        self.main_grad = main_grad
        self.address = main_grad.data_ptr()

    @property
    def num_first_touches(self) -> int:
        """How often main_grad was claimed: by a gradient that arrived where ``.grad`` was not main_grad."""
        return self.main_grad.num_first_touches  # type: ignore[attr-defined, no-any-return]

    def holds(self, param: Tensor) -> bool:
        """Return whether ``param`` and its main_grad still are what they were when wrapped."""
        return (
            getattr(param, "main_grad", None) is self.main_grad
            and self.main_grad.data_ptr() == self.address
            and param.dtype is self.dtype
            and param.shape == self.shape
            and param.device == self.device
        )

    def check(self, param: Tensor) -> None:
        """Raise if ``param`` or its main_grad were replaced, moved, cast or resized.

        Raises:
            RuntimeError: naming the parameter, what was found, and the remedy.
        """
        if self.holds(param):
            return
        if param.shape != self.shape:
            raise RuntimeError(
                f"parameter {self.name} has shape {tuple(param.shape)} but had {tuple(self.shape)} when it was "
                "wrapped; its buffers do not fit. Resize first (resize_token_embeddings, for one), then make a "
                "new inner optimizer and wrap that"
            )
        if param.dtype is not self.dtype or param.device != self.device:
            raise RuntimeError(
                f"parameter {self.name} is {param.dtype} on {param.device} but was {self.dtype} on {self.device} "
                "when it was wrapped: model.half(), .bfloat16(), .float() or .to() ran after wrapping. "
                "Cast and move the model first, wrap the optimizer after"
            )
        if self.main_grad.data_ptr() != self.address:
            raise RuntimeError(
                f"the main_grad of parameter {self.name} has left its bucket (it is {self.main_grad.dtype} on "
                f"{self.main_grad.device} now): model.half(), .bfloat16() or .to() carried it away after wrapping. "
                "Cast and move the model first, wrap the optimizer after"
            )
        found = "missing" if getattr(param, "main_grad", None) is None else "another tensor"
        raise RuntimeError(
            f"the main_grad of parameter {self.name} is {found}: something rebound or deleted `param.main_grad`. "
            "Write into it in place (`param.main_grad.copy_(...)`), or assign `param.grad`, which is taken over"
        )


class Entry:
    """One trainable parameter with its slot and main_param.

    Args:
        param: the model parameter.
        slot: where its gradient lives.
        main_param: fp32, the parameter's shape; the parameter itself where that is fp32 or fp64.
    """

    __slots__ = (
        "_grad_dtype_before",
        "main_param",
        "main_version",
        "param",
        "seen_address",
        "seen_storage",
        "seen_version",
        "slot",
    )

    def __init__(self, param: nn.Parameter, slot: Slot, main_param: nn.Parameter) -> None:
        self.param = param
        self.slot = slot
        self.main_param = main_param
        self._grad_dtype_before = param.grad_dtype
        self.seen_version: int | None = None
        self.mark_synced()
        _attach(param, slot.main_grad)

    @property
    def has_own_main_param(self) -> bool:
        """Whether main_param is a tensor of its own (the parameter is bf16 or fp16)."""
        return self.main_param is not self.param

    @torch.no_grad()
    def load_main_param(self, value: Tensor) -> None:
        """Fill main_param; where the model parameter differs, the next `Buffers.take_over` sees it."""
        self.main_param.copy_(value)
        self.forget_agreement()

    def forget_agreement(self) -> None:
        """Compare with the model parameter at the next `Buffers.take_over`."""
        self.seen_version = None

    def mark_synced(self) -> None:
        """Note that model parameter and main_param agree as they stand."""
        self.seen_version = self.param._version
        self.seen_address = self.param.data_ptr()
        # Also weakly by its storage: after two `p.data = tensor` the second may lie where the first one lay.
        self.seen_storage = weakref.ref(self.param.untyped_storage())
        self.main_version = self.main_param._version

    def detach(self) -> None:
        """Remove what wrapping attached; a gradient is kept, rounded to the parameter's own gradient dtype."""
        param, grad = self.param, self.param.grad
        param.grad = None
        for attribute in _OUR_ATTRIBUTES:
            vars(param).pop(attribute, None)
        param.grad_dtype = param.dtype if self._grad_dtype_before is self.slot.dtype else self._grad_dtype_before
        if grad is not None and grad.shape == param.shape:
            param.grad = grad.detach().to(param.grad_dtype or param.dtype, copy=True)

    def was_edited_outside(self) -> bool:
        """Return whether the model parameter was written or rebound since the last `mark_synced`."""
        return (
            self.param._version != self.seen_version
            or self.param.data_ptr() != self.seen_address
            or self.param.untyped_storage() is not self.seen_storage()
        )


class Buffers:
    """All buckets of one wrapper, and the entries whose views they hold.

    Args:
        backend: does the work on the tensors.
        bucket_numel: elements; see `plan_buckets`.
    """

    def __init__(self, backend: Backend, bucket_numel: int) -> None:
        self._backend = backend
        self._bucket_numel = bucket_numel
        self.grad_flats: list[Tensor] = []
        self.main_flats: list[Tensor] = []
        self.entries: list[Entry] = []

    def add(self, group: int, named_params: Sequence[tuple[str, nn.Parameter]]) -> list[Entry]:
        """Make buckets for parameters of one group, one bucket at a time, and attach ``main_grad``.

        A gradient that already hangs on a parameter is kept, in fp32.

        Args:
            group: number of the parameter group; groups do not share buckets.
            named_params: already checked by `check_parameters`.

        Returns:
            One entry per parameter, in the given order.
        """
        specs = [ParamSpec(name, p.numel(), (group, p.dtype, p.device)) for name, p in named_params]
        entries: dict[int, Entry] = {}
        for bucket in plan_buckets(specs, self._bucket_numel):
            first = named_params[bucket.placements[0].index][1]
            dtype = MAIN_DTYPES[first.dtype]
            grads = torch.zeros(bucket.numel, dtype=dtype, device=first.device)
            mains = torch.zeros_like(grads) if dtype is not first.dtype else None
            self.grad_flats.append(grads)
            if mains is not None:
                self.main_flats.append(mains)
            for placement in bucket.placements:
                name, param = named_params[placement.index]
                main_grad = _view_like(grads, placement.span.start, param)
                main_param = param
                if mains is not None:
                    main_param = _main_param(_view_like(mains, placement.span.start, param), param)
                    main_param.main_grad = main_grad  # type: ignore[attr-defined]
                entries[placement.index] = Entry(param, Slot(name, param, main_grad), main_param)
        added = [entries[i] for i in range(len(named_params))]
        self.entries.extend(added)
        return added

    def release(self) -> None:
        """Give every parameter back as torch made it, with its gradient in its own dtype."""
        for entry in self.entries:
            entry.detach()
        self.entries.clear()
        self.grad_flats.clear()
        self.main_flats.clear()

    def check_views(self) -> None:
        """Raise by name if a parameter or its main_grad is not what it was when wrapped."""
        for entry in self.entries:
            if not entry.slot.holds(entry.param):
                entry.slot.check(entry.param)

    def with_grad(self) -> list[Entry]:
        """Return the entries that received a gradient since they were last cleared."""
        return [entry for entry in self.entries if entry.param.grad is not None]

    def zero_absent(self) -> None:
        """Zero the spans of parameters whose ``.grad`` is None.

        A clear runs no code of ours, so such a span may hold bytes from before it, and whole-bucket
        operations must see zero there.
        """
        self._backend.zero_([e.slot.main_grad for e in self.entries if e.param.grad is None])

    @torch.no_grad()
    def take_over(self, *, everything: bool = False) -> None:
        """Let edits of model parameters from outside reach their main_params.

        Args:
            everything: compare all elements of all parameters, also where torch saw no edit.
        """
        for entry in self.entries:
            if entry.has_own_main_param and (everything or entry.was_edited_outside()):
                self._backend.take_over_(entry.main_param, entry.param)
                entry.mark_synced()

    @torch.no_grad()
    def write_back(self, *, everything: bool = False) -> None:
        """Round main_params into their model parameters, bumping the version of each one written.

        Args:
            everything: also those that have no gradient and were not seen to change.
        """
        written = [
            e for e in self.entries if everything or e.param.grad is not None or e.main_param._version != e.main_version
        ]
        rounded = [e for e in written if e.has_own_main_param]
        self._backend.cast_copy_([e.param for e in rounded], [e.main_param for e in rounded])
        # Inner optimizers that write through `.data` leave no trace; torch's check for a step between
        # forward and backward needs one. (`copy_` above leaves its own.)
        torch.autograd.graph.increment_version([e.param for e in written if not e.has_own_main_param])
        for entry in written:
            entry.mark_synced()

    def forget_agreement(self) -> None:
        """Compare every parameter with its main_param at the next `take_over`: main_params were loaded."""
        for entry in self.entries:
            if entry.has_own_main_param:
                entry.forget_agreement()

    def nbytes(self) -> dict[str, int]:
        """Return bytes by kind, as allocated: ``model`` (trainable parameters), ``main_grad``, ``main_param``."""
        return {
            "model": sum(e.param.nbytes for e in self.entries),
            "main_grad": sum(flat.nbytes for flat in self.grad_flats),
            "main_param": sum(flat.nbytes for flat in self.main_flats),
        }


def _attach(param: nn.Parameter, main_grad: Tensor) -> None:
    grad = param.grad
    param.grad = None
    param.grad_dtype = main_grad.dtype
    register(param, main_grad)
    # torch pickles a Parameter's attributes with it: without this, saving a module would write main_grad.
    vars(param)["__getstate__"] = functools.partial(_state_without_ours, weakref.ref(param))
    if grad is not None:
        with torch.no_grad():
            main_grad.copy_(grad)
        param.grad = main_grad


def _state_without_ours(param: weakref.ref[nn.Parameter]) -> dict[str, object] | None:
    state = vars(param()) if param() is not None else {}
    return {key: value for key, value in state.items() if key not in _OUR_ATTRIBUTES} or None


def _view_like(flat: Tensor, start: int, param: Tensor) -> Tensor:
    """Return a view of ``flat`` from ``start`` with the shape of ``param`` and, where dense, its strides."""
    strides = torch.empty_like(param, device="meta", memory_format=torch.preserve_format).stride()
    return flat.as_strided(param.shape, strides, start)


def _main_param(view: Tensor, param: nn.Parameter) -> nn.Parameter:
    # `.data` gives the main_param a version counter of its own; views share their base's.
    main_param = nn.Parameter(view.data, requires_grad=True)
    with torch.no_grad():
        main_param.copy_(param)
    main_param.__dict__.update(param.__dict__)
    return main_param
