"""The one seam between layers and optimizer: a parameter's ``main_grad``, and what a clear means for it.

    layer -> [param.main_grad] <- optimizer

``param.grad is None`` says that main_grad's bytes are old. Whoever adds first after a
clear *claims* main_grad: makes it ``.grad`` and overwrites; everybody after adds.
Claim and write are one: a claim whose write failed is undone, or the bytes from before the
clear would count as a sum.

On a CPU each backward runs in its caller's thread, and several may run at once. torch adds to ``.grad`` under a lock
that is not ours, and lets go of it before any hook runs. So ``.grad`` must not be exchanged, nor main_grad be added to
by a layer, while another thread may be adding: both happen under `backward_lock`, without which no backward begins, and
only where `is_only_backward`. Else arrival leaves the gradient with torch for now, and a layer returns its own to
torch. Where neither can be done (compiled code), two backwards of one wrapper that overlap raise. A device has one
thread for all backwards, which needs none of this.

Knows nothing of buckets, layers or optimizers.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fusedopt._torch_private import ENGINE_RUN_BACKWARD, current_graph_task_id, queue_callback
from fusedopt.sharding import dtensor

MAIN_DTYPES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""dtype of main_grad and main_param, by the dtype of the model parameter."""

OUR_ATTRIBUTES = ("main_grad", "lend_main_grad", "get_main_grad", "__fsdp_param__", "__getstate__")
"""What wrapping may attach to a parameter."""

_numbers = itertools.count()
_params: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def register(param: Tensor, main_grad: Tensor, backend: Any = None, name: str = "") -> None:
    """Make ``main_grad``, which holds zeros, the main_grad of ``param``.

    It carries ``num_first_touches``, how often it was claimed, and ``token``, a 0-d int64 CPU tensor by
    which compiled code, where `param_of_token` runs, names the parameter: such code sees clones of main_grad; and
    ``backend``, the `Backend` that adds to it, None where that is left to "auto"; ``writer``, see `follow_writer`;
    ``is_zero``, whether nobody who may has written into it yet; and ``param_name``, for messages.
    """
    number = next(_numbers)
    _params[number] = param
    main_grad.num_first_touches = 0  # type: ignore[attr-defined]
    main_grad.token = torch.tensor(number)  # type: ignore[attr-defined]
    main_grad.backend = backend  # type: ignore[attr-defined]
    main_grad.writer = None  # type: ignore[attr-defined]
    main_grad.is_zero = True  # type: ignore[attr-defined]
    main_grad.param_name = name  # type: ignore[attr-defined]
    param.main_grad = main_grad  # type: ignore[attr-defined]


def unregister(main_grad: Tensor) -> None:
    """Forget the parameter of ``main_grad``, which lost it."""
    _params.pop(int(main_grad.token), None)  # type: ignore[attr-defined]


def hand_over(main_grad: Tensor, successor: Tensor, param: Tensor) -> None:
    """Put ``successor``, another view of the same memory, in the place of ``main_grad``."""
    vars(successor).update(vars(main_grad))
    param.main_grad = successor  # type: ignore[attr-defined]


def param_of_token(token: Tensor) -> Tensor:
    """Return the parameter that ``token`` names.

    Raises:
        RuntimeError: if it was unwrapped or freed since.
    """
    param = _params.get(int(token))
    if param is None or getattr(param, "main_grad", None) is None:
        raise RuntimeError("compiled code adds to the main_grad of a parameter that was unwrapped since; recompile it")
    return param


def has_main_grad(param: Tensor) -> bool:
    """Return whether layers may add to the main_grad of ``param``: it has one, or can borrow one (``"gradients"``).

    An attribute of this name that another library attached is none: nobody here would train with it. A DTensor's
    gradient is left to autograd, whose products know the placements.
    """
    if dtensor.is_dtensor(param):
        return False
    return hasattr(getattr(param, "main_grad", None), "token") or hasattr(param, "lend_main_grad")


def describe(param: Tensor) -> str:
    """Return what messages call ``param``."""
    name = getattr(getattr(param, "main_grad", None), "param_name", "")
    return f"parameter {name}" if name else f"the {'weight' if param.dim() > 1 else 'parameter'} that was passed"


def follow_writer(main_grad: Any, *, will_write: bool) -> None:
    """Let the current stream wait for the one that last added to ``main_grad`` in this backward.

    A fused layer adds on the stream of its forward and returns None, so autograd orders nothing after it: neither
    another use of the weight on another stream nor whoever reads main_grad after backward.

    Args:
        main_grad: of a parameter; carries ``writer``, the stream, from the first addition of a backward to its arrival.
        will_write: whether the current stream is about to add; else this is the arrival.
    """
    writer = getattr(main_grad, "writer", None)
    if writer is None and not will_write:  # every arrival of a plain layer comes by here
        return
    stream = current_stream(main_grad)
    if writer is not None and writer != stream:
        stream.wait_stream(writer)
    main_grad.writer = stream if will_write else None


def current_stream(tensor: Tensor) -> Any:
    """Return the stream that work on ``tensor`` is queued on now; None on a CPU, which has none."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


def serve_transformer_engine(param: Tensor) -> None:
    """Let TransformerEngine's modules with ``fuse_wgrad_accumulation=True`` reach the main_grad of ``param``.

    They call ``get_main_grad()`` in backward, once for each use, if the parameter has an attribute ``__fsdp_param__``
    (which they read for nothing else), and add to what it returns. Without ``grad_added_to_main_grad``, which nothing
    here sets, they return None to autograd, and no dummy gradient exists.
    """
    vars(param)["get_main_grad"] = functools.partial(_claimed, weakref.ref(param))
    vars(param)["__fsdp_param__"] = True


def _claimed(param: weakref.ref[Tensor]) -> Tensor | None:
    alive = param()
    if alive is None:
        return None
    if not claim_until_end(alive):
        alive.main_grad.zero_()  # type: ignore[attr-defined]
    return alive.main_grad  # type: ignore[attr-defined,no-any-return]


def claim(param: Tensor) -> bool:
    """Make main_grad ``param.grad``, taking over a gradient that was set by hand.

    Where main_grads are lent, ``param.main_grad`` exists from here on. Whoever writes next does so through
    `AddingTo` or after `claim_until_end`, which undo this where the write fails.

    Returns:
        True if main_grad holds a sum to add to, False if its bytes are old and have to be overwritten.
    """
    main_grad, grad = param.main_grad, param.grad  # type: ignore[attr-defined]
    if main_grad is None:
        main_grad = param.lend_main_grad()  # type: ignore[attr-defined]
    follow_writer(main_grad, will_write=True)
    if grad is main_grad:
        return True
    if grad is not None:
        main_grad.copy_(grad) if type(main_grad) is Tensor else dtensor.copy_local_(main_grad, grad)
    set_grad(param, main_grad)
    main_grad.num_first_touches += 1
    return grad is not None


def set_grad(param: Tensor, main_grad: Tensor) -> None:
    """Let ``param.grad`` be ``main_grad``: from here on it holds a sum."""
    main_grad.is_zero = False  # type: ignore[attr-defined]
    param.grad = main_grad


class AddingTo:
    """Claim the main_grad of ``param`` around one write: both happen, or neither.

        with AddingTo(param) as (main_grad, has_sum):
            ...  # add where has_sum, else overwrite

    Where the body raises, ``.grad`` is what it was before. A sum that was there is as the body left it: each write of
    ours checks and allocates before it touches main_grad, so that it is whole, unless a product is added tile by tile
    (see `torch_ops.wgrad_accumulate_`) and a tile fails.
    """

    __slots__ = ("_before", "_number", "_param")

    def __init__(self, param: Tensor) -> None:
        self._param: Any = param
        self._number = -1

    def __enter__(self) -> tuple[Tensor, bool]:
        param = self._param
        self._before = param.grad
        if self._before is not None and self._before is not param.main_grad:
            refuse_gradient(param, self._before)
        has_sum = claim(param)
        main_grad: Tensor = param.main_grad
        if self._before is not main_grad:
            self._number = main_grad.num_first_touches  # type: ignore[attr-defined]
        return main_grad, has_sum

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.undo()

    def undo(self) -> None:
        """Make ``.grad`` what it was before the claim, if the claim still stands."""
        param = self._param
        main_grad = param.main_grad
        if main_grad is not None and param.grad is main_grad and main_grad.num_first_touches == self._number:
            param.grad = self._before
            main_grad.num_first_touches -= 1


class _UntilEnd:
    """The claim of a graph task, which is its sole owner: called when the task ends, dropped when it fails."""

    def __init__(self, adding: AddingTo) -> None:
        self._adding: AddingTo | None = adding

    def __call__(self) -> None:
        self._adding = None

    def __del__(self) -> None:
        if self._adding is not None:
            self._adding.undo()


def claim_until_end(param: Tensor) -> bool:
    """Claim the main_grad of ``param`` for a write that nobody here sees: undone if the running backward fails.

    TransformerEngine's modules write after they were given main_grad, and compiled code may write into a clone that it
    copies back at its end.

    Returns:
        As `claim`.
    """
    note_unguarded_write()
    before = param.grad
    adding = AddingTo(param)
    main_grad, has_sum = adding.__enter__()
    if before is not main_grad and current_graph_task_id() >= 0:
        queue_callback(_UntilEnd(adding))
    return has_sum


def refuse_gradient(param: Tensor, grad: Tensor, *, name: str = "", is_fsdp: bool = False) -> None:
    """Raise if ``grad``, the ``.grad`` of ``param`` and not its main_grad, cannot be taken over into that.

    Args:
        param: an earlier sum in its main_grad stays; a gradient of a kind that has no place there is taken off.
        grad: what autograd left on ``.grad``, or a hand.
        name: of ``param``, for messages; default: the one in its main_grad.
        is_fsdp: whether FSDP2 sets gradients, in the parameter's dtype.

    Raises:
        RuntimeError: part of a graph; another dtype or shape.
        TypeError: sparse.
    """
    main_grad = param.main_grad  # type: ignore[attr-defined]
    needed = main_grad.dtype if main_grad is not None else torch.promote_types(param.dtype, torch.float32)
    is_of_dtype = grad.dtype is needed or (is_fsdp and grad.dtype is param.dtype)
    if is_of_dtype and not grad.requires_grad and grad.layout is torch.strided and grad.shape == param.shape:
        return
    who = f"parameter {name}" if name else describe(param)
    if grad.requires_grad:
        # Under create_graph autograd adds out of place: then main_grad still holds the earlier sum.
        is_sum = grad.grad_fn is not None and grad.grad_fn.name() == "AddBackward0"
        param.grad = main_grad if is_sum else None
        raise RuntimeError(
            f"the gradient of {who} is part of a graph: backward(create_graph=True) would keep that graph in "
            "main_grad, or lose it. Use torch.autograd.grad(loss, parameters, create_graph=True), which leaves "
            "main_grad untouched"
        )
    if grad.layout is not torch.strided:
        param.grad = None
        raise TypeError(
            f"the gradient of {who} is {grad.layout}; main_grad is dense. Use dense gradients "
            "(nn.Embedding(sparse=False)), or leave this parameter to an optimizer of its own"
        )
    raise RuntimeError(
        f"the gradient of {who} is {grad.dtype} with shape {tuple(grad.shape)}; needed is {needed} with shape "
        f"{tuple(param.shape)}. Assign such a tensor, or None to clear"
    )


backward_lock = threading.RLock()
"""Held where a backward begins or ends: while somebody else holds it, none does."""

_running: list[_Backward] = []
_own = threading.local()
_torchs_run_backward: Any = None


class _Backward:
    """One call of autograd's engine, nested ones included."""

    def __init__(self) -> None:
        self.thread = threading.current_thread().name
        self.others: list[_Backward] = []
        self.wrappers: set[object] = set()
        self.is_unguarded = False

    def check(self) -> None:
        """Raise if code that needs main_grad to itself, and could not see to it, ran beside this call or in it."""
        for other in self.others:
            if self.wrappers & other.wrappers and (self.is_unguarded or other.is_unguarded):
                raise RuntimeError(
                    f"two backwards of one model ran at once, in the threads {self.thread} and {other.thread}, and "
                    "compiled code added to main_grad in one of them: gradients may have been lost. Those of this "
                    "window are not to be trusted: call zero_grad(). Run backwards one after the other (hold a "
                    "threading.Lock around backward()), or leave fused layers out of what is compiled "
                    "(fusedopt.restore_linears)"
                )


def watch_backwards() -> None:
    """Take note of every call of autograd's engine from now on, in this process."""
    global _torchs_run_backward
    if _torchs_run_backward is None:
        # torch tells nobody that a backward begins; each of its entries calls this one function, by this name.
        _torchs_run_backward = getattr(torch.autograd, ENGINE_RUN_BACKWARD)
        setattr(torch.autograd, ENGINE_RUN_BACKWARD, _run_backward)


def is_only_backward() -> bool:
    """Return whether the running backward is the only one; it stays so as long as `backward_lock` is held."""
    return len(_running) <= 1


def was_only_backward() -> bool:
    """Return whether no other backward ran beside the running one so far."""
    call = getattr(_own, "call", None)
    return call is None or not call.others


def note_arrival(wrapper: object) -> None:
    """Note that the running backward delivers a gradient to ``wrapper``."""
    call = getattr(_own, "call", None)
    if call is not None:
        call.wrappers.add(wrapper)


def note_unguarded_write() -> None:
    """Note that the running backward adds to main_grad, and cannot leave that to torch if others run."""
    call = getattr(_own, "call", None)
    if call is not None:
        call.is_unguarded = True


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    if current_graph_task_id() >= 0:  # nested in one that is noted, perhaps of another thread
        return _torchs_run_backward(*args, **kwargs)
    call = _own.call = _Backward()
    with backward_lock:
        call.others += _running
        for other in _running:
            other.others.append(call)
        _running.append(call)
    try:
        result = _torchs_run_backward(*args, **kwargs)
    except BaseException:
        _end(call)
        call.others.clear()
        raise
    _end(call)
    try:
        call.check()
    finally:
        call.others.clear()
    return result


def _end(call: _Backward) -> None:
    _own.call = None
    with backward_lock:
        _running.remove(call)
