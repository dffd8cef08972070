"""`FusedLinear`: a linear layer whose weight gradient accumulates straight into main_grad.

    input -> F.linear -> output;    grad_output, input -> [wgrad GEMM += main_grad]

Same parameters, same state dict keys, same forward bits as ``nn.Linear``; without
main_grad it is exactly that. Knows nothing of buckets, optimizers or ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from fusedopt._torch_private import NO_DISPATCH_KEYS, ForceDispatchKeyGuard, are_functorch_transforms_active
from fusedopt.backends import for_weight
from fusedopt.buffers.main_grad import claim_until_end, has_main_grad, param_of_token
from fusedopt.layers.function import Destination, MainGradFunction, destination_of


class FusedLinear(nn.Linear):
    """``nn.Linear`` whose backward runs ``main_grad += grad_output.T @ input`` with fp32 sums.

    Args:
        exact: class-wide default True; see `fused_linear`.
    """

    exact: bool = True

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``; ``[*, in] -> [*, out]``."""
        return fused_linear(input, self.weight, self.bias, exact=self.exact)


def fused_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, exact: bool = True) -> Tensor:
    """Return ``F.linear(input, weight, bias)``; in backward the weight's gradient goes straight into main_grad.

    Args:
        input: ``[*, in]``, any floating dtype.
        weight: ``[out, in]``. Without a main_grad, frozen, or under ``torch.func`` and forward-mode AD this is
            ``F.linear`` itself.
        bias: ``[out]``, or None.
        exact: sum over tokens in fp32. False allows to round each tile of the product to bf16 before it is added, as
            ``nn.Linear`` rounds the whole: done where it is faster, on CPUs with bf16 instructions.
    """
    if not _fuses(weight):
        return F.linear(input, weight, bias)
    if torch.compiler.is_compiling():
        main_grad: Any = weight.main_grad  # type: ignore[attr-defined]
        is_bias_fused = bias is not None and bias.requires_grad and has_main_grad(bias)
        bias_grad: Any = bias.main_grad if is_bias_fused else None  # type: ignore[union-attr]
        output = _CompiledLinear.apply(  # type: ignore[no-untyped-call]
            input, weight, bias, main_grad, main_grad.token, bias_grad, getattr(bias_grad, "token", None), exact
        )
        return output  # type: ignore[no-any-return]
    return _FusedLinear.apply(input, weight, bias, exact)  # type: ignore[no-any-return]


def _fuses(weight: Tensor) -> bool:
    if not (torch.is_grad_enabled() and weight.requires_grad and has_main_grad(weight)):
        return False
    if torch.compiler.is_compiling():
        return weight.main_grad is not None  # type: ignore[attr-defined]
    # A Function without setup_context fails under these; both are F.linear's business.
    return not are_functorch_transforms_active() and forward_ad._current_level < 0


class _FusedLinear(MainGradFunction):
    """Eager: asks the running backward what it wants."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
        ctx.exact = exact
        ctx.save_for_backward(input, weight, bias)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias = ctx.saved_tensors
        with torch.autocast(grad_output.device.type, enabled=False):
            # Under autocast the product ran in grad_output's dtype; parameters and input may be wider.
            input = input.to(grad_output.dtype)
            grad_input = grad_output.matmul(weight.to(grad_output.dtype)) if ctx.needs_input_grad[0] else None
            grad_weight = MainGradFunction.addmm_to_main_grad(ctx, weight, grad_output, input, exact=ctx.exact)
            grad_bias = None
            if ctx.needs_input_grad[2]:
                grad_bias = MainGradFunction.add_to_main_grad(ctx, bias, _sum_tokens(grad_output, bias))
        return grad_input, grad_weight, grad_bias, None


class _CompiledLinear(torch.autograd.Function):
    """Traced by torch.compile: custom operators, which run as Python, ask the running backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        main_grad: Tensor,
        token: Tensor,
        bias_main_grad: Tensor | None,
        bias_token: Tensor | None,
        exact: bool,
    ) -> Tensor:
        # main_grad is no saved tensor: it changes between forward and backward whenever a weight is used twice.
        ctx.main_grad, ctx.token, ctx.bias_main_grad, ctx.bias_token = main_grad, token, bias_main_grad, bias_token
        ctx.exact = exact
        ctx.save_for_backward(input, weight, bias)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias = ctx.saved_tensors
        dtype = grad_output.dtype
        tokens = grad_output.reshape(-1, grad_output.shape[-1])
        wgrad_accumulate(ctx.main_grad, ctx.token, tokens, input.to(dtype).reshape(-1, input.shape[-1]), ctx.exact)
        grad_input = grad_output.matmul(weight.to(dtype)) if ctx.needs_input_grad[0] else None
        grad_bias = None
        if ctx.bias_main_grad is not None:
            accumulate(ctx.bias_main_grad, ctx.bias_token, _sum_tokens(grad_output, bias))
        elif bias is not None and ctx.needs_input_grad[2]:
            grad_bias = _sum_tokens(grad_output, bias)
        return grad_input, None, grad_bias, None, None, None, None, None


def _sum_tokens(grad_output: Tensor, bias: Tensor) -> Tensor:
    """Return the bias's gradient, ``[out]``, summed over tokens in at least float32."""
    dtype = torch.promote_types(bias.dtype, torch.float32)
    return grad_output.reshape(-1, grad_output.shape[-1]).sum(0, dtype=dtype)


@torch.library.custom_op("fusedopt::wgrad_accumulate", mutates_args=("main_grad",))
def wgrad_accumulate(main_grad: Tensor, token: Tensor, grad_output: Tensor, input: Tensor, exact: bool) -> None:
    """Add ``grad_output.T @ input`` to the main_grad of the parameter that ``token`` names.

    Args:
        main_grad: ``[out, in]``; the parameter's, or the clone that compiled code works on. Written.
        token: 0-d int64, see `main_grad.register`.
        grad_output: ``[tokens, out]``. Read.
        input: ``[tokens, in]``. Read.
        exact: see `fused_linear`.
    """
    is_wanted, has_sum = _claim_for(token, main_grad)
    if is_wanted:
        backend = for_weight(param_of_token(token))
        backend.wgrad_accumulate_(main_grad, grad_output, input, accumulate=has_sum, exact=exact)


@torch.library.custom_op("fusedopt::accumulate", mutates_args=("main_grad",))
def accumulate(main_grad: Tensor, token: Tensor, grad: Tensor) -> None:
    """Add ``grad`` to the main_grad of the parameter that ``token`` names; see `wgrad_accumulate`."""
    is_wanted, has_sum = _claim_for(token, main_grad)
    if is_wanted and has_sum:
        main_grad.add_(grad)
    elif is_wanted:
        main_grad.copy_(grad)


@wgrad_accumulate.register_fake
def _(main_grad: Tensor, token: Tensor, grad_output: Tensor, input: Tensor, exact: bool) -> None:
    return None


@accumulate.register_fake
def _(main_grad: Tensor, token: Tensor, grad: Tensor) -> None:
    return None


def _claim_for(token: Tensor, main_grad: Tensor) -> tuple[bool, bool]:
    """Return whether the running backward wants this parameter's gradient, and whether main_grad holds a sum."""
    param: Any = param_of_token(token)
    destination = destination_of(_accumulate_node(param), param)
    if destination is Destination.RETURN:
        raise RuntimeError(
            "torch.autograd.grad was asked for the weight of a FusedLinear inside a torch.compile'd region, which adds "
            "it to main_grad and cannot return it; run that part eagerly, or call restore_linears(model) first"
        )
    if destination is Destination.DROP:
        return False, False
    was_attached = param.grad is param.main_grad
    has_sum = claim_until_end(param)
    if has_sum and not was_attached:  # a gradient set by hand went into main_grad; compiled code may hold a clone
        main_grad.copy_(param.main_grad)
    return True, has_sum


def _accumulate_node(param: Tensor) -> Any:
    # Operators run below autograd: lift that for one view, whose history leads to the node.
    with ForceDispatchKeyGuard(NO_DISPATCH_KEYS, NO_DISPATCH_KEYS), torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(param).node
