"""api.md section 6: what FusedLinear computes, in which precision, from inputs of which shapes and layouts."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fusedopt
from fusedopt import FusedLinear, MainGradFunction, fused_linear
from fusedopt.backends import torch_ops
from tests.linear_cases import wrapped_layer
from tests.models import OwnLinear, integers

U32, U16 = 2.0**-24, 2.0**-9  # unit roundoffs of float32 and bfloat16


def bound_of(grad_output, x, main_grad):
    """n * u * sum |a||b| for the sum over n tokens (Higham 3.1), and u times the result for adding it."""
    product = grad_output.double().abs().T @ x.double().abs()
    return (grad_output.shape[0] + 2) * U32 * product + U32 * (main_grad.double().abs() + product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("accumulate", [True, False])
def test_wgrad_sums_are_float32_and_a_rounded_product_would_be_caught(dtype, accumulate):
    torch.manual_seed(0)
    grad_output, x = torch.randn(64, 9).to(dtype), torch.randn(64, 17).to(dtype)
    main_grad = torch.randn(9, 17)
    exact = grad_output.double().T @ x.double() + (main_grad.double() if accumulate else 0.0)
    bound = bound_of(grad_output, x, main_grad)
    rounded = (grad_output.T @ x).double() + (main_grad.double() if accumulate else 0.0)
    torch_ops.wgrad_accumulate_(main_grad, grad_output, x, accumulate=accumulate)
    assert torch.isfinite(main_grad).all()
    assert ((main_grad - exact).abs() <= bound).all()
    if dtype is not torch.float32:
        assert ((rounded - exact).abs() > bound).any()


def test_the_fast_option_rounds_each_product_once_and_tiles_it(monkeypatch):
    monkeypatch.setattr(torch_ops, "multiplies_bfloat16", lambda: True)
    torch.manual_seed(0)
    rows = 2 * torch_ops.TILE_ROWS + 3
    grad_output, x = torch.randn(16, rows).bfloat16(), torch.randn(16, 5).bfloat16()
    main_grad = torch.randn(rows, 5)
    start = main_grad.clone()
    torch_ops.wgrad_accumulate_(main_grad, grad_output, x, accumulate=True, exact=False)
    exact = grad_output.double().T @ x.double()
    error = (main_grad - (start.double() + exact)).abs()
    assert torch.isfinite(main_grad).all()
    assert torch.equal(main_grad, start + (grad_output.t() @ x))  # torch's own product, whatever its sums
    assert (error > bound_of(grad_output, x, start)).any()  # it really is the rounded one
    overwritten = torch.full_like(main_grad, math.nan)
    torch_ops.wgrad_accumulate_(overwritten, grad_output, x, accumulate=False, exact=False)
    assert torch.equal(overwritten, (grad_output.t() @ x).float())


def test_the_fast_option_does_not_round_where_rounding_is_slower(monkeypatch):
    monkeypatch.setattr(torch_ops, "multiplies_bfloat16", lambda: False)
    torch.manual_seed(0)
    grad_output, x = torch.randn(64, 9).bfloat16(), torch.randn(64, 17).bfloat16()
    sums = [torch.zeros(9, 17), torch.zeros(9, 17)]
    for main_grad, exact in zip(sums, (True, False), strict=True):
        torch_ops.wgrad_accumulate_(main_grad, grad_output, x, accumulate=True, exact=exact)
    assert torch.isfinite(sums[0]).all()
    assert torch.equal(*sums)


class CountProducts(TorchDispatchMode):
    """The matrix products that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in func.overloadpacket.__name__:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda loss, x, layer: loss.backward(), ["mm", "addmm_"]),
        (lambda loss, x, layer: torch.autograd.grad(loss, [x]), ["mm"]),
        (lambda loss, x, layer: loss.backward(inputs=[x]), ["mm"]),
        (lambda loss, x, layer: loss.backward(inputs=[layer.bias]), ["mm"]),
    ],
)
def test_no_weight_product_runs_that_nobody_asked_for(ask, expected):
    layer, _optimizer = wrapped_layer()
    x = integers(4, 8).requires_grad_()
    loss = layer(x).float().sum()
    with CountProducts() as products:
        ask(loss, x, layer)
    assert products.names == expected


def test_n9_a_frozen_base_runs_no_weight_product():
    """ms-swift#9790: fused backward of a frozen weight looked for main_grad, which it has not."""

    base, adapter = nn.Parameter(integers(6, 8), requires_grad=False), nn.Parameter(integers(6, 8))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([base, adapter], lr=0.1))
    loss = (OwnLinear.apply(integers(4, 8).requires_grad_(), base) * adapter.sum()).float().sum()
    with CountProducts() as products:
        loss.backward()
    assert products.names == ["mm"]
    assert not hasattr(base, "main_grad")
    assert base.grad is None
    assert adapter.grad is adapter.main_grad
    optimizer.step()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation returned, in bytes, tensors passed in left out."""

    def __init__(self, known):
        super().__init__()
        self.nbytes = 0
        self._known = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self._known:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("accumulate", [True, False])
def test_no_full_size_product_is_formed(exact, accumulate, monkeypatch):
    monkeypatch.setattr(torch_ops, "multiplies_bfloat16", lambda: True)
    tokens, out, n_in = 4, 4 * torch_ops.TILE_ROWS, 64
    grad_output, x = integers(tokens, out), integers(tokens, n_in)
    main_grad = torch.zeros(out, n_in)
    with Largest([grad_output, x, main_grad]) as largest:
        torch_ops.wgrad_accumulate_(main_grad, grad_output, x, accumulate=accumulate, exact=exact)
    tile = torch_ops.TILE_ROWS * n_in * 2
    operands = tokens * out * 4  # cast to float32
    assert 0 < largest.nbytes <= max(tile, operands) < main_grad.nbytes / 4


SHAPES = [(8,), (5, 8), (2, 3, 8), (2, 1, 3, 8), (0, 8), (1, 8), (2, 0, 8)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_and_dtype_is_exact_on_integers(shape, dtype, bias):
    layer, optimizer = wrapped_layer(bias=bias, dtype=dtype)
    plain = nn.Linear(8, 6, bias=bias, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    for window in range(3):
        for _ in range(2):
            x = integers(*shape, dtype=dtype).requires_grad_()
            y = x.detach().double().requires_grad_()
            output, want = layer(x), plain(y)
            assert torch.equal(output.double(), want)
            assert torch.equal(output, F.linear(x, layer.weight, layer.bias))
            factor = integers(*output.shape, dtype=torch.float64)
            (
                output.to(torch.promote_types(dtype, torch.float32))
                * factor.to(torch.promote_types(dtype, torch.float32))
            ).sum().backward()
            (want * factor).sum().backward()
            assert torch.equal(x.grad.double(), y.grad)
        for param, ref in zip(layer.parameters(), plain.parameters(), strict=True):
            assert param.grad is param.main_grad
            assert torch.equal(param.grad.double(), ref.grad)
        (optimizer.zero_grad, layer.zero_grad, optimizer.zero_grad)[window]()
        plain.zero_grad()


def test_non_contiguous_inputs_and_odd_channels():
    layer, _optimizer = wrapped_layer(7, 5)
    x = integers(7, 3, 4).permute(1, 2, 0)
    assert not x.is_contiguous()
    factor = integers(5, 4, 3).permute(2, 1, 0)
    (layer(x).float() * factor).sum().backward()
    exact = torch.einsum("abo,abi->oi", factor.double(), x.double())
    assert torch.equal(layer.weight.grad.double(), exact)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_gives_the_bits_of_linear_and_the_same_input_gradient(weights, inside):
    torch.manual_seed(0)
    layer, _optimizer = wrapped_layer(dtype=weights)
    plain = nn.Linear(8, 6, dtype=weights)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8)
    results = []
    for module in (layer, plain):
        y = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = module(y)
            if inside:  # not recommended by torch, but people do
                output.float().square().sum().backward()
        if not inside:
            output.float().square().sum().backward()
        results.append((output.detach(), y.grad, module.weight.grad, module.bias.grad))
    assert results[0][0].dtype is torch.bfloat16
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    product = results[1][2].float()
    assert ((results[0][2] - product).abs() <= 4 * U16 * (product.abs() + 1)).all()  # plain rounds its product
    assert layer.weight.grad is layer.weight.main_grad


def test_a_backward_called_under_autocast_does_not_round_a_float32_layer():
    layer, _optimizer = wrapped_layer(1, 1, bias=False, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.fill_(257.0)  # 256 in bf16
    for window in range(1, 4):
        x = torch.full((1, 1), 257.0, requires_grad=True)
        loss = layer(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        assert x.grad.item() == 257.0
        assert layer.weight.grad.item() == 257.0 * window


@pytest.mark.parametrize("order", ["fused, plain", "plain, fused", "fused, plain, fused"])
@pytest.mark.parametrize("clear", ["optimizer", "model", "param"])
def test_fused_and_plain_uses_of_one_weight_in_one_backward_add_up(order, clear):
    layer, optimizer = wrapped_layer(bias=False)
    uses = order.split(", ")
    for _ in range(3):
        layer.weight.main_grad.fill_(99.0)  # old bytes
        x = integers(4, 8)
        outputs = [(fused_linear if use == "fused" else F.linear)(x, layer.weight) for use in uses]
        sum(out.float().sum() for out in outputs).backward()
        assert layer.weight.grad is layer.weight.main_grad
        assert torch.equal(layer.weight.grad, len(uses) * x.float().sum(0).expand(6, 8))
        if clear == "optimizer":
            optimizer.zero_grad()
        elif clear == "model":
            layer.zero_grad()
        else:
            layer.weight.grad = None


def test_256_and_1_are_257_between_two_fused_uses():
    layer, _optimizer = wrapped_layer(1, 1, bias=True)
    for factor in (256.0, 1.0):
        (layer(torch.ones(1, 1, dtype=torch.bfloat16)) * factor).sum().backward()
    assert layer.weight.grad.item() == 257.0
    assert layer.bias.grad.item() == 257.0


def test_a_gradient_set_by_hand_is_added_to_by_a_fused_layer():
    layer, _optimizer = wrapped_layer(bias=False)
    layer.weight.grad = torch.full((6, 8), 5.0)
    x = integers(4, 8)
    layer(x).float().sum().backward()
    assert layer.weight.grad is layer.weight.main_grad
    assert torch.equal(layer.weight.grad, 5.0 + x.float().sum(0).expand(6, 8))


def test_a_pending_window_that_a_fused_layer_overwrote_is_noticed():
    layer = FusedLinear(8, 6, bias=False, dtype=torch.bfloat16)
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(layer.named_parameters(), lr=0.1), gradient_accumulation_steps=3
    )
    layer(integers(4, 8)).float().sum().backward()
    optimizer.step()
    layer.zero_grad()
    layer(integers(4, 8)).float().sum().backward()
    with pytest.raises(RuntimeError, match="parameter weight was cleared"):
        optimizer.step()


def test_hooks_fire_once_per_backward_and_see_main_grad():
    layer, _optimizer = wrapped_layer(bias=False)
    seen = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is p.main_grad))
    x = integers(4, 8).requires_grad_()
    layer(layer(x) @ torch.ones(6, 8, dtype=torch.bfloat16)).float().sum().backward()
    assert seen == [True]


def test_tensor_hooks_see_the_micro_batch_gradient_of_fused_weights_in_float32():
    layer = FusedLinear(1, 1, dtype=torch.bfloat16)
    seen = []
    layer.weight.register_hook(lambda grad: seen.append((grad.dtype, grad.item())))
    layer.bias.register_hook(lambda grad: seen.append((grad.dtype, grad.item())))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    x = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).sum().backward()
    assert sorted(seen, key=lambda pair: pair[1]) == [(torch.float32, 2.0)] * 2 + [(torch.float32, 257.0)] * 2
    assert layer.weight.grad is layer.weight.main_grad
    assert layer.weight.grad.item() == 514.0


def test_deepcopy_trains_on_its_own_main_grad():
    layer, optimizer = wrapped_layer()
    other, other_optimizer = copy.deepcopy((layer, optimizer))
    x = integers(4, 8)
    other(x).float().sum().backward()
    assert type(other) is FusedLinear
    assert layer.weight.grad is None
    assert other.weight.grad is other.weight.main_grad
    other_optimizer.step()


def test_a_plain_function_with_setup_context_works_too():
    class Scale(MainGradFunction):
        @staticmethod
        def forward(x, weight):
            return x * weight

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad_output):
            x, weight = ctx.saved_tensors
            assert isinstance(weight, nn.Parameter)
            grad = MainGradFunction.add_to_main_grad(ctx, weight, (grad_output * x).float().sum(0))
            return grad_output * weight, grad

    weight = nn.Parameter(integers(8))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))
    x = integers(4, 8).requires_grad_()
    for _ in range(2):
        checkpoint(lambda y: Scale.apply(y, weight), x, use_reentrant=False).float().sum().backward()
    assert torch.equal(weight.grad, 2 * x.detach().float().sum(0))
