"""main_grad never gets lost: every way of saving activations x every use of a weight, bit for bit.

Values are small integers, so that fp32 sums are exact in any order; each cell is compared with the run without
recomputation, over three windows with two micro-batches, from a random main_grad.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedopt
from fusedopt import MainGradFunction
from tests.models import integers

SIZE = 8
ROWS = (6, 4)


class Linear(MainGradFunction):
    """A user's fused layer, as docs/custom-layers.md writes it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight, bias = ctx.saved_tensors
        grad_x = grad_output @ weight.to(grad_output.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            x = x.to(grad_output.dtype)
            grad_weight = MainGradFunction.addmm_to_main_grad(ctx, weight, grad_output, x)
        if ctx.needs_input_grad[2]:
            grad = grad_output.sum(0, dtype=torch.float32)
            grad_bias = MainGradFunction.add_to_main_grad(ctx, bias, grad)
        return grad_x, grad_weight, grad_bias


class CastingLinear(Linear):
    """The same with autocast's own casting of inputs: the weight arrives as a copy."""

    forward = staticmethod(torch.amp.custom_fwd(Linear.forward, device_type="cpu", cast_inputs=torch.bfloat16))
    backward = staticmethod(torch.amp.custom_bwd(Linear.backward, device_type="cpu"))


def user_linear(x, weight, bias):
    return Linear.apply(x, weight, bias)


def casting_linear(x, weight, bias):
    return CastingLinear.apply(x, weight, bias)


LAYERS = {"MainGradFunction": user_linear, "fused_linear": fusedopt.fused_linear}


def plain(layer, x, weight, bias):
    return layer(x, weight, bias)


def non_reentrant(layer, x, weight, bias):
    return checkpoint(lambda y: layer(y, weight, bias), x, use_reentrant=False)


def non_reentrant_argument(layer, x, weight, bias):
    return checkpoint(layer, x, weight, bias, use_reentrant=False)


def reentrant(layer, x, weight, bias):
    return checkpoint(lambda y: layer(y, weight, bias), x, use_reentrant=True)


def reentrant_argument(layer, x, weight, bias):
    return checkpoint(layer, x, weight, bias, use_reentrant=True)


def nested(layer, x, weight, bias):
    def inner(y):
        return checkpoint(lambda z: layer(z, weight, bias), y, use_reentrant=False)

    return checkpoint(inner, x, use_reentrant=False)


def selective(policy):
    def way(layer, x, weight, bias):
        context = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(lambda y: layer(y, weight, bias), x, use_reentrant=False, context_fn=context)

    way.is_selective = True
    return way


def save_on_cpu(layer, x, weight, bias):
    with torch.autograd.graph.save_on_cpu():
        return layer(x, weight, bias)


def cloning_hooks(layer, x, weight, bias):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return layer(x, weight, bias)


def save_on_cpu_non_reentrant(layer, x, weight, bias):
    with torch.autograd.graph.save_on_cpu():
        return non_reentrant(layer, x, weight, bias)


WAYS = {
    "no checkpoint": plain,
    "non-reentrant": non_reentrant,
    "non-reentrant, weight an argument": non_reentrant_argument,
    "reentrant, weight in the closure": reentrant,
    "reentrant, weight an argument": reentrant_argument,
    "nested": nested,
    "selective, must save": selective(lambda *args, **kwargs: CheckpointPolicy.MUST_SAVE),
    "selective, prefer recompute": selective(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE),
    "selective, a list of operators": selective([torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
    "save_on_cpu": save_on_cpu,
    "hooks that clone": cloning_hooks,
    "save_on_cpu and non-reentrant": save_on_cpu_non_reentrant,
}


def forward(way, layer, uses, weight, bias, rows, autocast, dtype):
    """Return the loss of one micro-batch and its input."""
    x = integers(rows, SIZE, dtype=dtype).requires_grad_()
    coefficients = integers(rows, SIZE, dtype=torch.float32)
    # Selective checkpoints do not go with autocast's cache of cast weights, for a plain F.linear neither (torch 2.13).
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=not hasattr(way, "is_selective")):
        hidden = x
        if uses == "tied to an embedding":
            hidden = hidden + F.embedding(torch.arange(rows), weight)
        hidden = way(layer, hidden, weight, bias)
        if uses == "twice":
            hidden = way(layer, hidden.clamp(-4, 4), weight, bias)
    return (hidden.float() * coefficients).sum(), x


def run(way, layer, uses, order, kind, autocast=False):
    """Return every main_grad and input gradient of three windows."""
    torch.manual_seed(5)
    dtype = torch.float32 if autocast else torch.bfloat16
    weight = nn.Parameter(integers(SIZE, SIZE, limit=2, dtype=dtype), requires_grad=kind != "frozen")
    bias = None if kind == "bias None" else nn.Parameter(integers(SIZE, limit=2, dtype=dtype))
    params = [p for p in (weight, bias, nn.Parameter(torch.zeros(1))) if p is not None]
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.1))
    trained = [p for p in params[:-1] if p.requires_grad]
    results = []
    for window in range(3):
        for p in trained:
            p.main_grad.copy_(integers(*p.shape, limit=9))
            if window == 0:
                p.grad = p.main_grad  # a sum to add to; later windows begin after a clear, with old bytes
        losses, inputs = [], []
        for rows in ROWS:
            loss, x = forward(way, layer, uses, weight, bias, rows, autocast, dtype)
            inputs.append(x)
            if order == "f1 b1 f2 b2":
                loss.backward()
            else:
                losses.append(loss)
        for loss in losses:
            loss.backward()
        for p in trained:
            assert p.grad is p.main_grad
        results += [p.main_grad.clone() for p in trained] + [x.grad for x in inputs]
        optimizer.zero_grad()
    assert len(results) == 3 * (len(trained) + 2)
    if kind == "frozen":
        assert weight.grad is None
        assert not hasattr(weight, "main_grad")
    return results


@functools.cache
def without_recomputation(layer, uses, order, kind, autocast):
    return run(plain, layer, uses, order, kind, autocast)


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(b).all()
        assert torch.equal(a, b)
    assert sum(b.abs().sum() for b in want) > 0


USES = ("once", "twice", "tied to an embedding")
ORDERS = ("f1 b1 f2 b2", "f1 f2 b1 b2")
KINDS = ("trainable", "frozen", "bias None")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_main_grad_is_what_it_is_without_recomputation(layer, way, uses, order, kind):
    assert_same(run(way, layer, uses, order, kind), without_recomputation(layer, uses, order, kind, False))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("uses", ["once", "twice"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("layer", [*LAYERS.values(), casting_linear], ids=[*LAYERS, "custom_fwd(cast_inputs)"])
def test_the_same_under_autocast_over_float32_weights(layer, way, uses, kind):
    want = without_recomputation(layer, uses, "f1 b1 f2 b2", kind, True)
    assert_same(run(way, layer, uses, "f1 b1 f2 b2", kind, autocast=True), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_without_recomputation_it_is_the_plain_layer_summed_in_float32(layer, uses, order, kind):
    assert_same(without_recomputation(layer, uses, order, kind, False), run(plain, F.linear, uses, order, kind))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_backward_gets_the_registered_parameter_with_its_live_main_grad(way):
    seen = []

    class Watching(Linear):
        @staticmethod
        def backward(ctx, grad_output):
            x, weight, bias = ctx.saved_tensors
            seen.append((weight, bias))
            grad_weight = MainGradFunction.addmm_to_main_grad(ctx, weight, grad_output, x)
            return grad_output @ weight, grad_weight, MainGradFunction.add_to_main_grad(ctx, bias, grad_output.sum(0))

    weight, bias = nn.Parameter(integers(SIZE, SIZE)), nn.Parameter(integers(SIZE))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight, bias], lr=0.1))
    x = integers(4, SIZE).requires_grad_()
    way(lambda *args: Watching.apply(*args), x, weight, bias).float().sum().backward()
    assert len(seen) == 1
    if way is reentrant_argument:  # the checkpoint detaches its arguments: there is no Parameter to hand back
        assert not isinstance(seen[0][0], nn.Parameter)
    else:
        assert seen[0][0] is weight
        assert seen[0][1] is bias
    assert weight.grad is weight.main_grad
    assert bias.grad is bias.main_grad


def test_a_detached_weight_brings_fp32_digits_to_main_grad():
    """Reentrant, as an argument: the gradient travels through autograd, and is not rounded to bf16 on the way."""
    sums = []
    for way in (plain, reentrant_argument):
        weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
        _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))
        x = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16, requires_grad=True)
        way(user_linear, x, weight, None).sum().backward()
        sums.append(weight.main_grad.item())
    assert sums == [257.0, 257.0]
