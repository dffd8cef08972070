"""torch.compile: fused layers without a graph break, plain models with gradients attached, users' Functions."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import fusedopt
from fusedopt import FusedLinear
from tests.deep import IS_DEEP, paired
from tests.models import OwnLinear, integers

ORDERS = ["f1 b1 f2 b2", "f1 f2 b1 b2"]
# Raised inside torch's own compiler stack (2.13), the third on any attribute of a ctx, the last on any graph break.
COMPILER_WARNINGS = [
    "ignore:.*is deprecated:DeprecationWarning",
    "ignore:.*is deprecated:FutureWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
]
pytestmark = [pytest.mark.filterwarnings(warning) for warning in COMPILER_WARNINGS]


@pytest.fixture(autouse=True)
def _fresh_dynamo(request):
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("inductor needs a C++ compiler, and this machine has none")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Model(nn.Module):
    """Two linear layers with a bias, one used twice, and an embedding tied to it."""

    def __init__(self, linear, uses, recompute):
        super().__init__()
        self.first = linear(8, 8, dtype=torch.bfloat16)
        self.second = linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.uses, self.recompute = uses, recompute
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(integers(*param.shape, limit=1))

    def body(self, x):
        hidden = self.first(x).clamp(-3, 3)
        if self.uses == "twice":
            hidden = self.first(hidden).clamp(-3, 3)
        return self.second(hidden)

    def forward(self, x):
        if self.uses == "tied":
            x = x + F.embedding(torch.arange(x.shape[0]) % 8, self.second.weight)
        return checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)


def run(linear, uses, order, recompute=None, backend=None, fullgraph=True):
    """Return main_grads and input gradients of three windows of two micro-batches of changing shape."""
    torch.manual_seed(2)
    model = Model(linear, uses, recompute == "inside")
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    call = model if backend is None else torch.compile(model, backend=backend, fullgraph=fullgraph)
    if recompute == "outside":
        compiled = call
        call = lambda x: checkpoint(compiled, x, use_reentrant=False)  # noqa: E731
    results = []
    for window in range(3):
        for p in model.parameters():
            p.main_grad.copy_(integers(*p.shape, limit=9))
            if window == 0:
                p.grad = p.main_grad
        inputs = [integers(rows, 8).requires_grad_() for rows in (4 + window, 7)]
        if order == "f1 b1 f2 b2":
            for x in inputs:
                call(x).float().sum().backward()
        else:
            losses = [call(x).float().sum() for x in inputs]
            for loss in losses:
                loss.backward()
        assert all(p.grad is p.main_grad for p in model.parameters())
        results += [p.main_grad.clone() for p in model.parameters()] + [x.grad for x in inputs]
        model.zero_grad() if window % 2 else optimizer.zero_grad()
    return results


def assert_same(got, want):
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(b).all()
        assert torch.equal(a, b)
    assert sum(b.abs().sum() for b in want) > 0


# Tracing is the same for both backends: each two settings meet with the quick one (all of them in `make test-deep`),
# with inductor a few do, of which the first is left to that.
CELLS = paired(["once", "twice", "tied"], ORDERS, [None, "inside", "outside"])
INDUCTOR_CELLS = [("twice", ORDERS[1], None), ("tied", ORDERS[1], "inside"), ("twice", ORDERS[0], "outside")]
INDUCTOR_CELLS = INDUCTOR_CELLS if IS_DEEP else INDUCTOR_CELLS[1:]


@pytest.mark.parametrize(
    ("uses", "order", "recompute", "backend"),
    [(*cell, "aot_eager") for cell in CELLS] + [(*cell, "inductor") for cell in INDUCTOR_CELLS],
)
def test_a_compiled_fused_layer_has_no_graph_break_and_the_same_sums(uses, order, recompute, backend):
    want = run(FusedLinear, uses, order)
    got = run(FusedLinear, uses, order, recompute, backend)
    assert_same(got, want)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] >= 1


def test_eager_fused_sums_are_the_plain_ones_on_integers():
    assert_same(run(FusedLinear, "twice", "f1 f2 b1 b2"), run(nn.Linear, "twice", "f1 f2 b1 b2"))


@pytest.mark.parametrize(
    ("recompute", "backend"),
    [(None, "aot_eager"), ("inside", "aot_eager"), ("outside", "aot_eager"), (None, "inductor")],
)
def test_a_plain_model_compiles_in_full_while_gradients_hang_on_it(recompute, backend):
    """Re-traces for new shapes included: Dynamo refuses an fp32 gradient on a bf16 parameter."""
    want = run(nn.Linear, "once", "f1 b1 f2 b2", recompute)
    assert_same(run(nn.Linear, "once", "f1 b1 f2 b2", recompute, backend), want)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] >= 2  # a second trace, with gradients attached


def test_without_the_callbacks_dynamo_stops_at_the_attached_gradient(monkeypatch):
    """The test above is about something: this is what happens without it."""
    monkeypatch.setattr("fusedopt.gradients.arrival._take_off", lambda args: None)
    monkeypatch.setattr("fusedopt.optimizer.watch_compiler", lambda buffers: None)
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=r"(?i)grad"):
        run(nn.Linear, "once", "f1 b1 f2 b2", backend="aot_eager")


def test_a_reset_of_dynamo_is_mended_at_the_next_step():
    model = nn.Linear(8, 8).bfloat16()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in (3, 4, 5):
        torch._dynamo.reset()
        optimizer.step()
        model(integers(2, 8)).float().sum().backward()  # eager, so that a gradient hangs there
        counter = CompileCounterWithBackend("aot_eager")
        torch.compile(model, backend=counter, fullgraph=True)(integers(rows, 8)).float().sum().backward()
        assert counter.frame_count == 1
        assert model.weight.grad is model.weight.main_grad
        optimizer.zero_grad()


def test_a_failing_trace_gives_the_gradients_back():
    model = nn.Linear(8, 8).bfloat16()
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(integers(2, 8)).float().sum().backward()

    def fails(x):
        torch._dynamo.graph_break()
        return model(x)

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(fails, backend="aot_eager", fullgraph=True)(integers(3, 8))
    assert all(p.grad is p.main_grad for p in model.parameters())


def test_a_wrapper_that_is_freed_during_a_trace_does_not_break_it():
    model = nn.Linear(8, 8).bfloat16()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(integers(2, 8)).float().sum().backward()
    want = model.weight.grad.clone()

    def unwraps(graph, inputs):
        optimizer.unwrap()
        return graph.forward

    torch.compile(model, backend=unwraps, fullgraph=True)(integers(3, 8))
    assert not hasattr(model.weight, "main_grad")
    assert model.weight.grad.dtype is torch.bfloat16
    assert torch.equal(model.weight.grad, want.bfloat16())


def test_autograd_grad_in_compiled_code_leaves_main_grad_untouched():
    layer = FusedLinear(8, 8, bias=False, dtype=torch.bfloat16)
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled(integers(4, 8).requires_grad_()).float().sum().backward()
    before = layer.weight.main_grad.clone()
    x = integers(4, 8).requires_grad_()
    (grad,) = torch.autograd.grad(compiled(x).float().sum(), [x])
    assert torch.equal(grad, layer(x.detach()).new_ones(4, 8) @ layer.weight.detach())
    assert torch.equal(layer.weight.main_grad, before)
    with pytest.raises(RuntimeError, match="restore_linears"):
        torch.autograd.grad(compiled(x).float().sum(), [layer.weight])
    assert torch.equal(layer.weight.main_grad, before)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_autocast_over_any_weights_compiles_to_the_eager_sums(weights):
    results = []
    for compiles in (False, True):
        torch.manual_seed(4)
        layer = FusedLinear(8, 8, dtype=weights)
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(integers(*param.shape, limit=2))
        _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
        call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiles else layer
        for _ in range(2):
            x = integers(4, 8, dtype=torch.float32).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                output = call(x)
            assert output.dtype is torch.bfloat16
            output.float().square().sum().backward()
        results.append([output.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())])
    assert_same(*reversed(results))


def test_a_gradient_set_by_hand_counts_in_compiled_code():
    layer = FusedLinear(8, 8, bias=False, dtype=torch.bfloat16)
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        layer.weight.grad = torch.full((8, 8), 5.0)
        x = integers(4, 8)
        compiled(x).float().sum().backward()
        assert torch.equal(layer.weight.grad, 5.0 + x.float().sum(0).expand(8, 8))
        assert layer.weight.grad is layer.weight.main_grad
        layer.zero_grad()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_users_function_breaks_the_graph_and_is_right(backend):
    weight = nn.Parameter(integers(8, 8))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))

    def model(x):
        return OwnLinear.apply(x * 2, weight) + 1

    compiled = torch.compile(model, backend=backend)
    for recompute in (False, True):
        weight.grad = None
        x = integers(4, 8).requires_grad_()
        out = checkpoint(compiled, x, use_reentrant=False) if recompute else compiled(x)
        out.float().sum().backward()
        assert torch.equal(weight.grad, 2 * x.detach().float().sum(0).expand(8, 8))
    assert sum(counters["graph_break"].values()) >= 1
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend=backend, fullgraph=True)(x)


class Plain(torch.optim.Optimizer):
    """Somebody's own optimizer: no graph break in its step, as torch's have one."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.5)


def test_an_inner_step_compiles_as_one_graph_and_global_hooks_fire_with_the_wrapper_alone():
    layer = nn.Linear(4, 4)
    inner = Plain(layer.parameters())
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    inner.step = torch.compile(inner.step, fullgraph=True, backend="eager")
    seen = []
    handle = register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    for _ in range(3):
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert [opt is optimizer for opt in seen] == [True] * 3
    assert counters["stats"]["unique_graphs"] == 1
