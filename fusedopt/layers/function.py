"""`MainGradFunction`: a base for layers that add their weight's gradient straight into main_grad.

    backward(ctx, grad_output) -> [accumulate into param.main_grad] -> arrival

torch rebuilds saved tensors under activation recomputation and saved-tensor hooks: a weight
comes back as a plain Tensor without attributes. Here ``ctx.saved_tensors`` hands back the
Parameters that were saved, whatever happened in between, and everything else as torch does.

Knows nothing of layers, buffers or ranks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedopt._torch_private import (
    FunctionMeta,
    backward_hooks,
    disable_dynamo,
    mix_into_contexts,
    will_engine_execute_node,
)
from fusedopt.backends import for_weight
from fusedopt.backends.offers import LOW_PRECISION
from fusedopt.buffers.main_grad import AddingTo, backward_lock, describe, has_main_grad, is_only_backward


class Destination(enum.Enum):
    """Where a weight's gradient goes in the running backward."""

    ACCUMULATE = "into main_grad"
    RETURN = "back to autograd, which asked for it or carries it on"
    DROP = "nowhere: autograd does not ask for it"


class _RegisteredParameters:
    """Mixed into the context of each `MainGradFunction`."""

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        # All tensors are saved as always: torch's check for in-place edits and its memory saving need that.
        self._parameters = tuple(t if isinstance(t, nn.Parameter) else None for t in tensors)
        super().save_for_backward(*tensors)  # type: ignore[misc]

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        saved = super().saved_tensors  # type: ignore[misc]
        return tuple(tensor if param is None else param for tensor, param in zip(saved, self._parameters, strict=True))


class _Meta(FunctionMeta):
    def __init__(cls, name: str, bases: tuple[type, ...], attributes: dict[str, Any]) -> None:
        super().__init__(name, bases, attributes)  # type: ignore[no-untyped-call]
        mix_into_contexts(cls, _RegisteredParameters)


class MainGradFunction(torch.autograd.Function, metaclass=_Meta):
    """Base class for an autograd Function whose weight gradient goes straight into ``weight.main_grad``.

    ``ctx.save_for_backward(x, weight, bias_or_None)`` and ``x, weight, bias = ctx.saved_tensors`` work as
    always, and give back the registered Parameter with its live main_grad: without and under every kind of
    activation checkpoint, saved-tensor hooks and offload, with a weight used twice, and with forwards and
    backwards interleaved. In ``backward``, return for a weight what `addmm_to_main_grad` or
    `add_to_main_grad` returned. Inside ``torch.compile`` the Function breaks the graph and runs eagerly.
    """

    @classmethod
    @disable_dynamo  # Dynamo fails on a context class of one's own; a graph break is always right
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run ``forward`` and record ``backward``, as `torch.autograd.Function.apply`."""
        return super().apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    @staticmethod
    def add_to_main_grad(ctx: Any, weight: Tensor, grad: Tensor) -> Tensor | None:
        """Add a ready gradient to the weight's main_grad.

        Args:
            ctx: of this backward.
            weight: from ``ctx.saved_tensors``; an input of ``forward``.
            grad: the weight's shape, any floating dtype. Read.

        Returns:
            What ``backward`` must return for the weight: None; or ``grad`` where autograd asked for it
            (`torch.autograd.grad`, ``create_graph``), the weight has hooks that are to see it, arrived detached
            from its Parameter (reentrant checkpoint, as an argument), or has no main_grad.

        Raises:
            TypeError, ValueError: saying which argument is not what is needed; main_grad was not touched.
        """
        where = _destination(ctx, weight)
        if where is Destination.DROP:
            return None
        _check_gradient(weight, grad)

        def write(main_grad: Tensor, has_sum: bool) -> None:
            if has_sum:
                main_grad.add_(grad)
            else:
                main_grad.copy_(grad)

        is_added = where is Destination.ACCUMULATE and _add(weight, write)
        return None if is_added else _returned(weight, grad)

    @staticmethod
    def addmm_to_main_grad(
        ctx: Any, weight: Tensor, grad_output: Tensor, input: Tensor, *, exact: bool = True
    ) -> Tensor | None:
        """Add the gradient of a linear layer's weight, ``grad_output.T @ input``, to its main_grad.

        Args:
            ctx: of this backward.
            weight: ``[out, in]``, from ``ctx.saved_tensors``; an input of ``forward``.
            grad_output: ``[*, out]``. Read.
            input: ``[*, in]``, dtype of ``grad_output``. Read.
            exact: sum over tokens in fp32; False allows to round the product first, see `torch_ops`.

        Returns:
            As `add_to_main_grad`. No product is formed where autograd does not ask for the weight's gradient.

        Raises:
            TypeError, ValueError: as `add_to_main_grad`.
        """
        where = _destination(ctx, weight)
        if where is Destination.DROP:
            return None
        grad_output, input = _checked_operands(weight, grad_output, input)

        def write(main_grad: Tensor, has_sum: bool) -> None:
            for_weight(weight).wgrad_accumulate_(main_grad, grad_output, input, accumulate=has_sum, exact=exact)

        is_added = where is Destination.ACCUMULATE and _add(weight, write)
        return None if is_added else _returned_product(weight, grad_output, input, exact)


def _add(weight: Tensor, write: Callable[[Tensor, bool], None]) -> bool:
    """Let ``write`` add to the main_grad of ``weight``; return False where that is better left to autograd.

    Autograd has the lock that keeps apart what other threads add.
    """
    if weight.is_cuda:
        with AddingTo(weight) as (main_grad, has_sum):
            write(main_grad, has_sum)
        return True
    with backward_lock:
        if not is_only_backward():
            return False
        with AddingTo(weight) as (main_grad, has_sum):
            write(main_grad, has_sum)
    return True


def _check_gradient(weight: Tensor, grad: Tensor) -> None:
    if grad.shape != weight.shape or grad.device != weight.device:
        raise ValueError(
            f"the gradient for {describe(weight)} is {_form(grad)}, and the parameter {_form(weight)}; needed is the "
            "parameter's shape on its device (a sum over tokens for a bias: grad_output.sum(0))"
        )
    if not grad.dtype.is_floating_point or grad.layout is not torch.strided:
        raise TypeError(
            f"the gradient for {describe(weight)} is {grad.dtype}, {grad.layout}; needed is a dense one of a floating "
            "dtype"
        )


def _checked_operands(weight: Tensor, grad_output: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands as ``[tokens, channels]``, checked against ``weight`` and each other."""
    if grad_output.dtype is not input.dtype or not input.dtype.is_floating_point:
        raise TypeError(
            f"for {describe(weight)}, grad_output is {grad_output.dtype} and input {input.dtype}; needed is one "
            "floating dtype for both: under autocast the saved input is wider, so cast it, input.to(grad_output.dtype)"
        )
    if grad_output.dim() and input.dim() and weight.dim() == 2:
        rows, columns = (t if t.dim() == 2 else t.reshape(-1, t.shape[-1]) for t in (grad_output, input))
        num_tokens, num_out = rows.shape
        if columns.shape == (num_tokens, weight.shape[1]) and num_out == weight.shape[0]:
            return rows, columns
    what = "a Parameter" if isinstance(weight, nn.Parameter) else "no Parameter: is it an activation?"
    raise ValueError(
        f"for {describe(weight)}, the weight is {_form(weight)} ({what}), grad_output {_form(grad_output)} and input "
        f"{_form(input)}; needed are [out, in], [*, out] and [*, in] with as many tokens, in the order "
        "addmm_to_main_grad(ctx, weight, grad_output, input)"
    )


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} on {tensor.device}"


def _destination(ctx: Any, weight: Tensor) -> Destination:
    if isinstance(weight, nn.Parameter) and not weight.requires_grad:
        return Destination.DROP
    leaf = next((fn for fn, _ in ctx.next_functions if getattr(fn, "variable", None) is weight), None)
    if leaf is None:  # computed from a Parameter, or cast by custom_fwd: autograd carries it on
        return Destination.RETURN
    destination = destination_of(leaf, weight)
    if destination is Destination.ACCUMULATE and backward_hooks(weight):  # a user's hook is to see the gradient
        return Destination.RETURN
    return destination


def destination_of(leaf: Any, weight: Tensor) -> Destination:
    """Ask the running backward what it wants of ``weight``.

    Args:
        leaf: the AccumulateGrad node of ``weight``.
        weight: a leaf.
    """
    if torch.is_grad_enabled():  # create_graph: the gradient's own graph counts, and arrival raises under backward()
        return Destination.RETURN
    try:
        will_accumulate = will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad(loss, [weight]), or a pipeline's backward in parts
        return Destination.RETURN
    if not will_accumulate:  # torch.autograd.grad(loss, [x]), or backward(inputs=[x])
        return Destination.DROP
    return Destination.ACCUMULATE if has_main_grad(weight) else Destination.RETURN


def _is_detached(weight: Tensor) -> bool:
    """Whether ``weight`` is the leaf that a reentrant checkpoint put in its Parameter's place."""
    return weight.is_leaf and weight.requires_grad and not isinstance(weight, nn.Parameter)


def _returned(weight: Tensor, grad: Tensor) -> Tensor:
    if _is_detached(weight) and weight.grad is None and weight.dtype in LOW_PRECISION:
        # The checkpoint passes this leaf's gradient on to the Parameter: keep its fp32 digits on the way.
        weight.grad_dtype = torch.float32
    return grad


def _returned_product(weight: Tensor, grad_output: Tensor, input: Tensor, exact: bool) -> Tensor:
    goes_to_main_grad = _is_detached(weight) or has_main_grad(weight)
    if torch.is_grad_enabled() or not goes_to_main_grad:
        return grad_output.t().mm(input)
    fresh = torch.empty(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    for_weight(weight).wgrad_accumulate_(fresh, grad_output, input, accumulate=False, exact=exact)
    return _returned(weight, fresh)
