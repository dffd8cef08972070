"""A linear layer that reaches main_grad by TransformerEngine's protocol, in plain torch.

Written from what is known of ``te.Linear(fuse_wgrad_accumulation=True)``: in forward it keeps a weak reference to
the Parameter and a callable that fetches main_grad, ``weight.get_main_grad`` if the weight has an attribute
``__fsdp_param__``; in backward it calls that once, assigns what it got to ``weight.main_grad``, adds the product
with beta = 1, and returns None, or a dummy of uninitialised memory if the weight has an attribute
``grad_added_to_main_grad``. It proves our side of the protocol; tests/gpu runs the real library where there is one.
"""

import weakref

import torch
from torch import nn
from torch.nn import functional


class TELinear(nn.Linear):
    """``te.Linear(fuse_wgrad_accumulation=True)``, as far as main_grad goes."""

    def forward(self, x):
        if not (torch.is_grad_enabled() and self.weight.requires_grad and hasattr(self.weight, "main_grad")):
            return functional.linear(x, self.weight)
        fetch = self.weight.get_main_grad if hasattr(self.weight, "__fsdp_param__") else lambda: self.weight.main_grad
        return _Function.apply(x, self.weight, fetch)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, fetch):
        ctx.weight, ctx.fetch = weakref.ref(weight), fetch
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    def backward(ctx, grad_output):
        x, unpacked = ctx.saved_tensors
        weight = ctx.weight()
        main_grad = weight.main_grad = ctx.fetch()
        if main_grad.dtype is not torch.float32 or not main_grad.is_contiguous():
            raise ValueError("the output of the wgrad GEMM must be contiguous float32")
        tokens, columns = grad_output.flatten(0, -2).float(), x.flatten(0, -2).float()
        main_grad.addmm_(tokens.t(), columns)
        dummy = None
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True
            dummy = torch.full_like(weight, float("nan"))
        return grad_output.matmul(unpacked), dummy, None
