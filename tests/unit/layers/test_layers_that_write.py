"""Layers that write into main_grad by themselves, in the style of Megatron-LM, are refused by name; never silent."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedopt
from fusedopt import FusedLinear

BF16 = torch.bfloat16
WAYS = ["counted", "by a kernel"]


class Megatrons(torch.autograd.Function):
    """x @ weight.T, whose backward adds to main_grad itself, and returns None or the gradient."""

    @staticmethod
    def forward(ctx, x, weight, returns, way):
        ctx.save_for_backward(x)
        ctx.weight, ctx.returns, ctx.way = weight, returns, way
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad = grad_output.t() @ x
        main_grad = ctx.weight.main_grad
        # An extension's kernel leaves no trace in the version; neither does a write through `.data`.
        (main_grad if ctx.way == "counted" else main_grad.data).add_(grad)
        return grad_output @ ctx.weight, grad if ctx.returns else None, None, None


def wrap(*params):
    named = [(f"layer{i}.weight", param) for i, param in enumerate(params)]
    return fusedopt.FusedMainGradOptimizer(torch.optim.SGD(named, lr=0.1))


def weight_of(rows=3, columns=4):
    return nn.Parameter(torch.randn(rows, columns).to(BF16))


def forward(weight, returns, way):
    return (
        Megatrons.apply(torch.randn(5, weight.shape[1]).to(BF16).requires_grad_(), weight, returns, way).square().sum()
    )


MESSAGE = r"main_grad of parameter layer0\.weight: .*MainGradFunction\.add_to_main_grad\(ctx, weight, grad\)"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("returns", [False, True], ids=["returns None", "returns the gradient, too"])
def test_a_layer_that_adds_to_main_grad_itself_raises_by_name_in_its_first_backward(returns, way):
    weight = weight_of()
    optimizer = wrap(weight)
    for _ in range(3):  # and in every one, until it is mended
        with pytest.raises(RuntimeError, match=MESSAGE):
            forward(weight, returns, way).backward()
        optimizer.zero_grad()
    F.linear(torch.ones(1, 4, dtype=BF16), weight).sum().backward()
    assert weight.grad is weight.main_grad
    assert weight.grad.tolist() == [[1.0] * 4] * 3


@pytest.mark.parametrize("returns", [False, True])
def test_gradients_of_ones_are_noticed_as_well(returns):
    weight = weight_of()
    _optimizer = wrap(weight)
    with pytest.raises(RuntimeError, match=MESSAGE):
        Megatrons.apply(torch.ones(1, 4, dtype=BF16), weight, returns, "counted").sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_megatron_style_head_tied_to_a_plain_embedding_raises(way):
    """autograd delivers the embedding's gradient, and the head's would be overwritten by it."""
    weight = weight_of(6, 4)
    _optimizer = wrap(weight)
    hidden = F.embedding(torch.arange(5), weight)
    with pytest.raises(RuntimeError, match=MESSAGE):
        Megatrons.apply(hidden, weight, False, way).square().sum().backward()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_layer_that_begins_to_write_later_raises_in_its_second_backward_at_the_latest(kind, way):
    weight = weight_of()
    optimizer = wrap(weight)
    for _ in range(2):
        x = torch.ones(2, 4, dtype=BF16)
        (F.linear(x, weight) if kind == "plain" else fusedopt.fused_linear(x, weight)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    forward(weight, False, way).backward()  # among old bytes, which nobody can tell from it
    with pytest.raises(RuntimeError, match=MESSAGE):
        forward(weight, False, way).backward()


class Drops(torch.autograd.Function):
    """Has no gradient for its weight."""

    @staticmethod
    def forward(ctx, x, weight):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_function_without_a_gradient_for_its_weight_is_not_taken_for_one():
    weight = weight_of()
    optimizer = wrap(weight)
    for window in range(4):
        for _ in range(2):
            Drops.apply(torch.ones(3, requires_grad=True), weight).sum().backward()
        assert weight.grad is None
        if window % 2:
            F.linear(torch.ones(2, 4, dtype=BF16), weight).sum().backward()
            assert weight.grad.tolist() == [[2.0] * 4] * 3
            weight.grad.mul_(0.5)  # as a clip does
            Drops.apply(torch.ones(3, requires_grad=True), weight).sum().backward()
            assert weight.grad.tolist() == [[1.0] * 4] * 3
        optimizer.step() if window else None
        weight.grad = None


def test_a_sum_that_was_hung_up_by_hand_is_none_either():
    weight = weight_of()
    optimizer = wrap(weight)
    for clear in (lambda: setattr(weight, "grad", None), optimizer.zero_grad):
        weight.grad = weight.main_grad.copy_(torch.randn(3, 4))
        optimizer.step()
        clear()
        F.linear(torch.ones(1, 4, dtype=BF16), weight).sum().backward()
        assert weight.grad.tolist() == [[1.0] * 4] * 3
        optimizer.zero_grad()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_main_grad_that_fusedopt_did_not_attach_is_none_to_a_fused_layer(compiled):
    layer, plain = FusedLinear(4, 3, dtype=BF16), nn.Linear(4, 3, dtype=BF16)
    plain.load_state_dict(layer.state_dict())
    for param in layer.parameters():
        param.main_grad = torch.zeros(param.shape)  # Megatron's DDP does
    x = torch.randn(2, 4).to(BF16)
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    call(x).square().sum().backward()
    plain(x).square().sum().backward()
    for ours, torchs in zip(layer.parameters(), plain.parameters(), strict=True):
        assert ours.grad.dtype is BF16
        assert torch.equal(ours.grad, torchs.grad)
        assert not ours.main_grad.any()
