"""The one seam between layers and optimizer: a parameter's ``main_grad``, and what a clear means for it.

    layer -> [param.main_grad] <- optimizer

``param.grad is None`` says that main_grad's bytes are old. Whoever adds first after a
clear *claims* main_grad: hangs it on ``.grad`` and overwrites; everybody after adds.
Knows nothing of buckets, layers or optimizers.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from fusedopt import dtensor

OUR_ATTRIBUTES = ("main_grad", "lend_main_grad", "get_main_grad", "__fsdp_param__", "__getstate__")
"""What wrapping may attach to a parameter."""

_numbers = itertools.count()
_params: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def register(param: Tensor, main_grad: Tensor, backend: Any = None) -> None:
    """Make ``main_grad`` the main_grad of ``param``.

    It carries ``num_first_touches``, how often it was claimed, and ``token``, a 0-d int64 CPU tensor by
    which compiled code, where `resolve` runs, names the parameter: such code sees clones of main_grad; and
    ``backend``, the `Backend` that adds to it, None where that is left to "auto"; and ``writer``, see `follow_writer`.
    """
    number = next(_numbers)
    _params[number] = param
    main_grad.num_first_touches = 0  # type: ignore[attr-defined]
    main_grad.token = torch.tensor(number)  # type: ignore[attr-defined]
    main_grad.backend = backend  # type: ignore[attr-defined]
    main_grad.writer = None  # type: ignore[attr-defined]
    param.main_grad = main_grad  # type: ignore[attr-defined]


def hand_over(main_grad: Tensor, successor: Tensor, param: Tensor) -> None:
    """Put ``successor``, another view of the same memory, in the place of ``main_grad``."""
    vars(successor).update(vars(main_grad))
    param.main_grad = successor  # type: ignore[attr-defined]


def resolve(token: Tensor) -> Tensor:
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

    A DTensor's gradient is left to autograd, whose products know the placements.
    """
    if dtensor.is_dtensor(param):
        return False
    return getattr(param, "main_grad", None) is not None or hasattr(param, "lend_main_grad")


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
    if not claim(alive):
        alive.main_grad.zero_()  # type: ignore[attr-defined]
    return alive.main_grad  # type: ignore[attr-defined,no-any-return]


def claim(param: Tensor) -> bool:
    """Hang main_grad on ``param.grad``, taking over a gradient that was set by hand.

    Where main_grads are lent, ``param.main_grad`` exists from here on.

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
        dtensor.copy_local_(main_grad, grad)
    param.grad = main_grad
    main_grad.num_first_touches += 1
    return grad is not None
