"""A layer's backward that failed, and was caught, leaves no trace: claim and write are one, whoever writes."""

import pytest
import torch
from torch import nn

import fusedopt
from fusedopt import FusedLinear, MainGradFunction
from fusedopt.layers import linear
from tests.doubles.te_linear import TELinear

BF16 = torch.bfloat16


class OutOfMemory(RuntimeError):
    """What an allocator raises."""


class AddsReady(MainGradFunction):
    """x * weight, whose gradient is added ready."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output @ weight, MainGradFunction.add_to_main_grad(ctx, weight, grad_output.t() @ x)


class Ready(nn.Linear):
    def forward(self, x):
        return AddsReady.apply(x, self.weight)


def fails(*args, **kwargs):
    raise OutOfMemory("no memory")


class NoCopy(torch.utils._python_dispatch.TorchDispatchMode):
    """Let copies and additions into float32 fail, half done."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("copy_", "add_") and args[0].shape == (4, 4) and args[0].dtype is torch.float32:
            args[0].view(-1)[:3].fill_(77.0)
            raise OutOfMemory("no memory")
        return func(*args, **(kwargs or {}))


def fused(monkeypatch):
    """Return a layer, and what makes its write fail until `monkeypatch.undo`."""

    def break_it(optimizer):
        (bucket,) = optimizer._buffers.buckets
        broken = type(bucket.backend)(wgrad_accumulate_=fails)
        for entry in bucket.entries:
            monkeypatch.setattr(entry.slot.main_grad, "backend", broken)

    return FusedLinear(4, 4, bias=False, dtype=BF16), break_it


def ready(monkeypatch):
    def break_it(optimizer):
        original = MainGradFunction.add_to_main_grad

        def under_mode(ctx, weight, grad):
            with NoCopy():
                return original(ctx, weight, grad)

        monkeypatch.setattr(MainGradFunction, "add_to_main_grad", staticmethod(under_mode))

    return Ready(4, 4, bias=False, dtype=BF16), break_it


def transformer_engine(monkeypatch):
    def break_it(optimizer):
        monkeypatch.setattr(torch.Tensor, "addmm_", fails)

    return TELinear(4, 4, bias=False, dtype=BF16), break_it


KINDS = {"FusedLinear": fused, "add_to_main_grad": ready, "TransformerEngine's route": transformer_engine}
X = torch.eye(4, dtype=BF16)


def wrap(layer):
    return fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.named_parameters(), lr=0.1))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("clear", ["optimizer", "model"])
def test_a_failed_layer_backward_does_not_bring_old_gradients_back(kind, clear, monkeypatch):
    layer, break_it = kind(monkeypatch)
    optimizer = wrap(layer)
    layer(X).sum().backward()
    good = layer.weight.grad.clone()
    assert good.abs().sum() > 0
    optimizer.zero_grad() if clear == "optimizer" else layer.zero_grad()
    touches = layer.weight.main_grad.num_first_touches
    break_it(optimizer)
    with pytest.raises(OutOfMemory):
        layer(X).sum().backward()
    monkeypatch.undo()
    assert layer.weight.grad is None
    assert layer.weight.main_grad.num_first_touches == touches
    layer(X).sum().backward()
    assert torch.equal(layer.weight.grad, good)
    assert layer.weight.grad is layer.weight.main_grad


@pytest.mark.parametrize("kind", [fused, transformer_engine], ids=["FusedLinear", "TransformerEngine's route"])
def test_a_failed_layer_backward_keeps_the_earlier_sum_of_the_window(kind, monkeypatch):
    layer, break_it = kind(monkeypatch)
    optimizer = wrap(layer)
    layer(X).sum().backward()
    good = layer.weight.grad.clone()
    break_it(optimizer)
    with pytest.raises(OutOfMemory):
        layer(X).sum().backward()
    monkeypatch.undo()
    assert layer.weight.grad is layer.weight.main_grad
    assert torch.equal(layer.weight.grad, good)
    layer(X).sum().backward()
    assert torch.equal(layer.weight.grad, 2 * good)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_gradient_set_by_hand_survives_a_failed_layer_backward(kind, monkeypatch):
    layer, break_it = kind(monkeypatch)
    optimizer = wrap(layer)
    mine = torch.full((4, 4), 5.0)
    layer.weight.grad = mine
    break_it(optimizer)
    with pytest.raises(OutOfMemory):
        layer(X).sum().backward()
    monkeypatch.undo()
    assert layer.weight.grad.tolist() == [[5.0] * 4] * 4
    layer(X).sum().backward()
    assert layer.weight.grad.tolist() == [[6.0] * 4] * 4


def test_a_wrong_dtype_in_a_users_layer_is_refused_before_main_grad_is_claimed():
    class Wrong(MainGradFunction):
        @staticmethod
        def forward(ctx, x, weight, factor):
            ctx.factor = factor
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad_output):
            x, weight = ctx.saved_tensors
            operand = x.float() if ctx.factor == "wrong" else x
            return None, MainGradFunction.addmm_to_main_grad(ctx, weight, grad_output, operand), None

    layer = nn.Linear(4, 4, bias=False, dtype=BF16)
    optimizer = wrap(layer)
    Wrong.apply(X, layer.weight, "right").sum().backward()
    good = layer.weight.grad.clone()
    optimizer.zero_grad()
    with pytest.raises(
        TypeError, match=r"parameter weight, grad_output is torch.bfloat16 and input torch.float32.*cast"
    ):
        Wrong.apply(X, layer.weight, "wrong").sum().backward()
    assert layer.weight.grad is None
    Wrong.apply(X, layer.weight, "right").sum().backward()
    assert torch.equal(layer.weight.grad, good)


def test_compiled_code_that_fails_after_its_write_does_not_bring_old_gradients_back(monkeypatch):
    """The operator's own failure, and one of the graph around it: what it wrote into was a clone then."""
    layer = FusedLinear(4, 4, bias=False, dtype=BF16)
    optimizer = wrap(layer)

    class Operator(torch.autograd.Function):
        """What torch.compile makes of the layer, with main_grad's clone and a place to fail."""

        @staticmethod
        def forward(ctx, x, weight, where):
            ctx.where = where
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            main_grad = ctx.weight.main_grad
            clone = main_grad.clone()
            with monkeypatch.context() as patch:
                if ctx.where == "inside":
                    patch.setattr(linear, "for_weight", fails)
                linear.wgrad_accumulate(clone, main_grad.token, grad_output, x, True)
            if ctx.where == "after":
                raise OutOfMemory("no memory")
            main_grad.copy_(clone)
            return None, None, None

    Operator.apply(X, layer.weight, "nowhere").sum().backward()
    good = layer.weight.grad.clone()
    for where in ("inside", "after"):
        optimizer.zero_grad()
        with pytest.raises(OutOfMemory):
            Operator.apply(X, layer.weight, where).sum().backward()
        assert layer.weight.grad is None
        Operator.apply(X, layer.weight, "nowhere").sum().backward()
        assert torch.equal(layer.weight.grad, good)
    optimizer.step()


def test_a_backward_that_fails_in_another_layer_keeps_what_fused_layers_finished():
    """As torch does: gradients that were accumulated before the failure stay."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise OutOfMemory("no memory")

    layer = FusedLinear(4, 4, bias=False, dtype=BF16)
    optimizer = wrap(layer)
    with pytest.raises(OutOfMemory):
        layer(Fails.apply(X.clone().requires_grad_())).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 4] * 4
    optimizer.zero_grad()
    layer(X).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0] * 4] * 4
