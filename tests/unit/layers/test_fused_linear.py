"""api.md section 6: MainGradFunction besides the matrix, and FusedLinear."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fusedopt
from fusedopt import FusedLinear, MainGradFunction
from tests.linear_cases import wrapped_layer
from tests.models import integers

U32 = 2.0**-24  # unit roundoff of float32


# -- what autograd asks for


def test_autograd_grad_for_the_input_leaves_main_grad_untouched():
    layer, _optimizer = wrapped_layer()
    layer(integers(4, 8)).float().sum().backward()
    before = [p.main_grad.clone() for p in layer.parameters()]
    x = integers(4, 8).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).float().sum(), [x])
    assert torch.equal(grad.float(), layer.weight.detach().float().sum(0).expand(4, 8))
    for param, value in zip(layer.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        assert torch.equal(param.main_grad, value)


@pytest.mark.parametrize("cleared", [True, False])
def test_autograd_grad_for_the_weight_returns_its_gradient(cleared):
    layer, optimizer = wrapped_layer()
    if not cleared:
        layer(integers(4, 8)).float().sum().backward()
    before = layer.weight.main_grad.clone()
    x = integers(4, 8)
    grads = torch.autograd.grad(layer(x).float().sum(), [layer.weight, layer.bias])
    assert torch.equal(grads[0].float(), x.float().sum(0).expand(6, 8))
    assert torch.equal(grads[1].float(), torch.full((6,), 4.0))
    assert torch.equal(layer.weight.main_grad, before)
    assert (layer.weight.grad is None) == cleared
    optimizer.zero_grad()


def test_backward_with_inputs_accumulates_only_what_it_names():
    layer, _optimizer = wrapped_layer()
    x = integers(4, 8).requires_grad_()
    layer(x).float().sum().backward(inputs=[x])
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    assert x.grad is not None
    layer(x).float().sum().backward(inputs=[layer.weight])
    assert layer.weight.grad is layer.weight.main_grad
    assert torch.equal(layer.weight.grad, x.detach().float().sum(0).expand(6, 8))
    assert layer.bias.grad is None


def test_backward_twice_with_retain_graph_adds_twice():
    layer, _optimizer = wrapped_layer()
    x = integers(4, 8)
    loss = layer(x).float().sum()
    loss.backward(retain_graph=True)
    once = layer.weight.grad.clone()
    loss.backward()
    assert once.abs().sum() > 0
    assert torch.equal(layer.weight.grad, 2 * once)


def test_create_graph_raises_by_name_and_autograd_grad_is_twice_differentiable():
    torch.manual_seed(0)
    layer, _optimizer = wrapped_layer(dtype=torch.float32)
    plain = nn.Linear(8, 6)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match=r"parameter (weight|bias) is part of a graph.*create_graph=True"):
        layer(x).square().sum().backward(create_graph=True)
    layer.zero_grad()
    results = []
    for module in (layer, plain):
        y = x.clone().requires_grad_()
        loss = module(y).square().sum()
        grads = torch.autograd.grad(loss, [y, module.weight, module.bias], create_graph=True)
        penalty = sum(g.square().sum() for g in grads)
        again = torch.autograd.grad(penalty, [y, module.weight, module.bias], create_graph=True)
        third = torch.autograd.grad(again[0].sum() + again[1].sum(), [y, module.weight])
        results.append([*grads, *again, *third])
    assert layer.weight.grad is None
    for got, want in zip(*results, strict=True):
        assert torch.isfinite(want).all()
        # The same sums of products in another order: 6 * 8 * 4 terms at most, a few levels deep.
        assert torch.allclose(got, want, rtol=0, atol=(6 * 8 * 4 * 8 * U32 * want.abs().max()).item())


def test_zero_bubble_backward_in_two_parts_gets_the_weights_gradient():
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    layer, _optimizer = wrapped_layer()
    x = integers(4, 8).requires_grad_()
    output = layer(x).float().sum()
    grads, groups = stage_backward_input([output], [torch.ones(())], [x], iter(layer.parameters()))
    assert torch.equal(grads[0].float(), layer.weight.detach().float().sum(0).expand(4, 8))
    stage_backward_weight(iter(layer.parameters()), groups)
    assert torch.equal(layer.weight.grad.float(), x.detach().float().sum(0).expand(6, 8))
    assert torch.equal(layer.bias.grad.float(), torch.full((6,), 4.0))
    _optimizer.step()
    assert layer.weight.grad is layer.weight.main_grad


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch.func.jvp's own, of either kind
def test_torch_func_and_forward_mode_are_exactly_linear():
    layer, _optimizer = wrapped_layer(dtype=torch.float32)
    plain = nn.Linear(8, 6)
    plain.load_state_dict(layer.state_dict())
    x, tangent = torch.randn(4, 8), torch.randn(4, 8)
    results = []
    for module in (layer, plain):
        params = dict(module.named_parameters())

        def loss(p, y, module=module):
            return torch.func.functional_call(module, p, (y,)).square().sum()

        grads = torch.func.grad(loss)(params, x)
        input_grad = torch.func.grad(lambda y, module=module: module(y).square().sum())(x)
        _, jvp = torch.func.jvp(module, (x,), (tangent,))
        batched = torch.func.vmap(module)(x)
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(module(forward_ad.make_dual(x, tangent)))
        results.append([grads["weight"], grads["bias"], input_grad, jvp, batched, out.primal, out.tangent])
    assert layer.weight.grad is None
    for got, want in zip(*results, strict=True):
        assert torch.isfinite(want).all()
        assert torch.equal(got, want)


@pytest.mark.parametrize("why", ["no wrapper", "frozen", "no_grad", "inference_mode"])
def test_without_main_grad_it_is_exactly_linear(why):
    fused, plain = FusedLinear(8, 6), nn.Linear(8, 6)
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(3, 5, 8)
    if why != "no wrapper":
        _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(fused.parameters(), lr=0.1))
    if why == "frozen":
        fused.requires_grad_(False)
        plain.requires_grad_(False)
    mode = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(why, torch.enable_grad)
    with mode():
        outputs = [module(x) for module in (fused, plain)]
    assert torch.equal(*outputs)
    name = type(outputs[1].grad_fn).__name__
    assert type(outputs[0].grad_fn).__name__ == name
    if why == "no wrapper":
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(fused.weight.grad, plain.weight.grad)
        assert not hasattr(fused.weight, "main_grad")


# -- memory and lifetime


def test_activations_saved_by_the_function_are_freed_under_recomputation():
    kept = []

    class Watching(MainGradFunction):
        @staticmethod
        def forward(ctx, x, weight):
            activation = x * 2
            kept.append(weakref.ref(activation))
            ctx.save_for_backward(activation, weight)
            return activation @ weight.t()

        @staticmethod
        def backward(ctx, grad_output):
            activation, weight = ctx.saved_tensors
            grad = MainGradFunction.addmm_to_main_grad(ctx, weight, grad_output, activation)
            return grad_output @ weight * 2, grad

    weight = nn.Parameter(integers(6, 8))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))
    x = integers(4, 8).requires_grad_()
    loss = Watching.apply(x, weight).float().sum()
    assert kept[0]() is not None
    loss.backward()
    for use_reentrant in (False, True):
        kept.clear()
        loss = checkpoint(lambda y: Watching.apply(y, weight), x, use_reentrant=use_reentrant).float().sum()
        assert len(kept) == 1
        assert kept[0]() is None
        loss.backward()
        assert len(kept) == 2
        assert kept[1]() is None


@pytest.mark.parametrize("kind", ["FusedLinear", "MainGradFunction"])
def test_a_weight_changed_between_forward_and_backward_raises_torchs_own_error(kind):
    layer, optimizer = wrapped_layer()
    x = integers(4, 8).requires_grad_()
    loss = layer(x).float().sum()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = layer(x).float().sum()
    layer(x).float().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_leak_over_200_steps():
    layer, optimizer = wrapped_layer()
    model = nn.Sequential(layer, nn.ReLU())

    def steps(n):
        for _ in range(n):
            x = integers(4, 8).requires_grad_()
            checkpoint(model, x, use_reentrant=False).float().sum().backward()
            model(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    baseline = steps(20)
    assert steps(200) <= baseline


# -- a layer's arguments


class Layer(MainGradFunction):
    """Hands backward's arguments through a function of the test."""

    @staticmethod
    def forward(ctx, x, weight, add):
        ctx.add = add
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        return None, ctx.add(ctx, weight, grad_output, x), None


add, addmm = MainGradFunction.add_to_main_grad, MainGradFunction.addmm_to_main_grad
WRONG = {
    "swapped operands": (lambda c, w, g, x: addmm(c, w, x, g), ValueError, r"grad_output \[4, 8\].*in the order addmm"),
    "another dtype": (lambda c, w, g, x: addmm(c, w, g, x.float()), TypeError, r"input torch\.float32.*input\.to"),
    "whole numbers": (lambda c, w, g, x: addmm(c, w, g.int(), x.int()), TypeError, r"one floating dtype"),
    "too few tokens": (lambda c, w, g, x: addmm(c, w, g[:3], x), ValueError, r"\[3, 6\].*as many tokens"),
    "a transposed weight's": (lambda c, w, g, x: addmm(c, w, g.t(), x.t()), ValueError, r"needed are \[out, in\]"),
    "a scalar": (lambda c, w, g, x: addmm(c, w, g.sum(), x), ValueError, r"grad_output \[\]"),
    "an activation for the weight": (lambda c, w, g, x: addmm(c, x, g, x), ValueError, r"no Parameter: is it an act"),
    "a transposed gradient": (
        lambda c, w, g, x: add(c, w, x.t() @ g),
        ValueError,
        r"is \[8, 6\].*the parameter \[6, 8",
    ),
    "a gradient that broadcasts": (lambda c, w, g, x: add(c, w, x.sum(0)), ValueError, r"is \[8\] on cpu.*\[6, 8\]"),
    "a sparse gradient": (lambda c, w, g, x: add(c, w, (g.t() @ x).to_sparse()), TypeError, r"torch\.sparse_coo"),
    "a whole-number gradient": (lambda c, w, g, x: add(c, w, (g.t() @ x).int()), TypeError, r"is torch\.int32"),
}


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_named_and_main_grad_untouched(wrong, is_wrapped):
    pass_on, error, match = wrong
    layer = nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
    if is_wrapped:
        _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.named_parameters(), lr=0.1))
        layer.weight.main_grad.fill_(float("nan"))
        match = match if "activation" in str(match) or "no Parameter" in match else rf"parameter weight.*{match}"
    with pytest.raises(error, match=match):
        Layer.apply(integers(4, 8), layer.weight, pass_on).float().sum().backward()
    assert layer.weight.grad is None
    assert not is_wrapped or layer.weight.main_grad.isnan().all()


def test_leading_dimensions_may_differ_where_tokens_do_not():
    layer, _optimizer = wrapped_layer(bias=False)
    x = integers(4, 8)

    def reshaped(ctx, weight, grad_output, x):
        return addmm(ctx, weight, grad_output.view(2, 2, 6), x.view(1, 4, 8))

    Layer.apply(x, layer.weight, reshaped).float().sum().backward()
    assert torch.equal(layer.weight.grad, x.float().sum(0).expand(6, 8))
