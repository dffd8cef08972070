"""Backwards in several threads of one process add up as torch's do; compiled fused layers refuse."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedopt
from fusedopt import FusedLinear
from fusedopt.layers import linear
from tests.models import OwnLinear

BF16 = torch.bfloat16
NUM_THREADS, NUM_WINDOWS = 4, 25


class Waits(torch.autograd.Function):
    """Says that its backward began, and waits for a go."""

    @staticmethod
    def forward(ctx, x, reached, go):
        ctx.reached, ctx.go = reached, go
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.reached.set()
        if not ctx.go.wait(20):
            raise TimeoutError("nobody said go")
        return grad, None, None


def wrap(*params):
    return fusedopt.FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.1))


def in_threads(jobs):
    """Run ``jobs`` at once and return what they raised."""
    errors = []

    def run(job):
        try:
            job()
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    return errors


def uses(kind, weight, bias, index):
    if kind == "mixed":
        kind = ("plain", "FusedLinear", "MainGradFunction", "tied")[index]
    return {
        "plain": lambda x: F.linear(x, weight, bias),
        "FusedLinear": lambda x: fusedopt.fused_linear(x, weight, bias),
        "MainGradFunction": lambda x: OwnLinear.apply(x, weight) + bias,
        "tied": lambda x: fusedopt.fused_linear(x, weight) + F.linear(x, weight, bias) - F.linear(x, weight.detach()),
    }[kind]


@pytest.mark.parametrize("size", [8, 256])
@pytest.mark.parametrize("kind", ["plain", "FusedLinear", "MainGradFunction", "mixed"])
def test_sums_of_several_threads_are_exact(kind, size):
    weight = nn.Parameter(torch.randint(-2, 3, (size, size)).to(BF16))
    bias = nn.Parameter(torch.zeros(size, dtype=BF16))
    optimizer = wrap(weight, bias)
    for window in range(NUM_WINDOWS):
        start = threading.Barrier(NUM_THREADS)
        expected, jobs = torch.zeros(size), []
        for index in range(NUM_THREADS):
            x = torch.randint(-2, 3, (6, size)).to(BF16)
            expected += x.float().sum(0) * (2 if kind == "mixed" and index == 3 else 1)

            use = uses(kind, weight, bias, index)

            def job(use=use, x=x, start=start):
                loss = use(x).float().sum()
                start.wait(20)
                loss.backward()

            jobs.append(job)
        assert in_threads(jobs) == []
        assert weight.grad.dtype is bias.grad.dtype is torch.float32
        assert torch.equal(weight.grad, expected.expand(size, size))
        assert torch.equal(bias.grad, torch.full((size,), 6.0 * NUM_THREADS))
        if window % 2:
            optimizer.step()
            assert weight.grad is weight.main_grad
            assert torch.equal(weight.grad, expected.expand(size, size))
        optimizer.zero_grad()


class Overlap:
    """Two backwards: the first one waits in its midst until the second one has ended."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def here(self, x):
        """Return ``x``; its gradient waits."""
        return Waits.apply(x, self.reached, self.go)

    def run(self, first, second):
        """Run both, each in a thread, and return what they raised."""

        def after():
            assert self.reached.wait(20)
            try:
                second.backward()
            finally:
                self.go.set()

        return in_threads([first.backward, after])


def loss_of(kind, weight, x):
    return (fusedopt.fused_linear if kind == "fused" else F.linear)(x, weight).float().sum()


@pytest.mark.parametrize("has_sum", [False, True])
@pytest.mark.parametrize("second", ["plain", "fused"])
@pytest.mark.parametrize("first", ["plain", "fused"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_backwards_that_overlap_add_up_and_the_step_takes_them_over(first, second, when, has_sum):
    """The second runs before, or after, the first one's gradient arrived."""
    weight = nn.Parameter(torch.zeros(3, 3, dtype=BF16))
    optimizer = wrap(weight)
    x = torch.eye(3, dtype=BF16)
    for _ in range(3):
        expected = 257.0
        if has_sum:
            loss_of(first, weight, x).backward()
            expected += 1
        overlap = Overlap()
        if when == "before":
            loss = overlap.here(loss_of(first, weight, 256 * x))
        else:
            loss = loss_of(first, weight, overlap.here((256 * x).requires_grad_()))
        assert overlap.run(loss, loss_of(second, weight, x)) == []
        assert weight.grad.dtype is torch.float32
        assert weight.grad.tolist() == [[expected] * 3] * 3
        optimizer.step()
        assert weight.grad is weight.main_grad
        assert weight.grad.tolist() == [[expected] * 3] * 3
        optimizer.zero_grad()
    loss_of(second, weight, x).backward()
    assert weight.grad is weight.main_grad


def test_a_clip_between_takes_over_what_torch_kept():
    weight = nn.Parameter(torch.zeros(3, 3, dtype=BF16))
    optimizer = wrap(weight)
    x = torch.eye(3, dtype=BF16)
    overlap = Overlap()
    assert overlap.run(overlap.here(loss_of("plain", weight, x)), loss_of("fused", weight, x)) == []
    assert optimizer.clip_grad_norm_(float("inf")).item() == 6.0
    assert weight.grad is weight.main_grad


def compiled_loss(weight, x):
    """Return what torch.compile makes of a FusedLinear: an operator that adds to main_grad."""

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            ctx.weight = weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            main_grad = ctx.weight.main_grad
            linear.wgrad_accumulate(main_grad, main_grad.token, grad_output, x, True)
            return grad_output @ ctx.weight, None

    return Operator.apply(x, weight).float().sum()


@pytest.mark.parametrize("compiled", ["first", "second"])
@pytest.mark.parametrize("other", ["plain", "fused", "compiled"])
def test_compiled_fused_layers_that_overlap_are_refused(compiled, other):
    weight = nn.Parameter(torch.zeros(3, 3, dtype=BF16))
    optimizer = wrap(weight)
    x = torch.eye(3, dtype=BF16)
    make = {"compiled": compiled_loss, "other": functools.partial(loss_of, other)}
    make["other"] = compiled_loss if other == "compiled" else make["other"]
    kinds = ["compiled", "other"] if compiled == "first" else ["other", "compiled"]
    for _ in range(2):
        overlap = Overlap()
        first = make[kinds[0]](weight, overlap.here(x.clone().requires_grad_()))
        errors = overlap.run(first, make[kinds[1]](weight, x))
        assert errors
        for error in errors:
            assert "two backwards of one model ran at once" in str(error)
            assert "zero_grad()" in str(error)
        optimizer.zero_grad()
        compiled_loss(weight, x).backward()  # and training goes on
        assert weight.grad.tolist() == [[1.0] * 3] * 3
        optimizer.step()
        optimizer.zero_grad()


def test_compiled_fused_layers_of_other_models_are_not_refused():
    weights = [nn.Parameter(torch.zeros(3, 3, dtype=BF16)) for _ in range(2)]
    optimizers = [wrap(weight) for weight in weights]
    x = torch.eye(3, dtype=BF16)
    overlap = Overlap()
    first = compiled_loss(weights[0], overlap.here(x.clone().requires_grad_()))
    assert overlap.run(first, compiled_loss(weights[1], x)) == []
    assert all(weight.grad.tolist() == [[1.0] * 3] * 3 for weight in weights)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("kind", [nn.Linear, FusedLinear])
def test_threads_that_take_turns_find_main_grad_on_grad(kind):
    layer = kind(3, 3, bias=False, dtype=BF16)
    optimizer = wrap(layer.weight)
    turn = threading.Lock()
    x = torch.eye(3, dtype=BF16)

    def job():
        for _ in range(5):
            loss = layer(x).sum()
            with turn:
                loss.backward()
                assert layer.weight.grad is layer.weight.main_grad

    for _ in range(3):
        assert in_threads([job] * 4) == []
        assert layer.weight.grad.tolist() == [[20.0] * 3] * 3
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [nn.Linear, FusedLinear])
def test_models_of_their_own_train_at_once(kind):
    x = torch.eye(3, dtype=BF16)
    models = [kind(3, 3, bias=False, dtype=BF16) for _ in range(4)]
    optimizers = [wrap(model.weight) for model in models]

    def job(model, optimizer):
        for _ in range(20):
            for _ in range(3):
                model(x).sum().backward()
            assert model.weight.grad.tolist() == [[3.0] * 3] * 3
            optimizer.step()
            optimizer.zero_grad()

    assert in_threads([functools.partial(job, *pair) for pair in zip(models, optimizers, strict=True)]) == []


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_nested_backwards_of_one_thread_are_one(use_reentrant):
    layer = FusedLinear(3, 3, bias=False, dtype=BF16)
    optimizer = wrap(layer.weight)
    for _ in range(2):
        x = torch.eye(3, dtype=BF16).requires_grad_()
        y = checkpoint(layer, checkpoint(layer, x, use_reentrant=use_reentrant), use_reentrant=use_reentrant)
        layer(y).sum().backward()
        assert layer.weight.grad is layer.weight.main_grad
        optimizer.step()
        optimizer.zero_grad()


def test_a_backward_that_failed_is_not_taken_for_one_that_runs():
    layer = FusedLinear(3, 3, bias=False, dtype=BF16)
    optimizer = wrap(layer.weight)
    x = torch.eye(3, dtype=BF16)

    def fails():
        hidden = x.clone().requires_grad_()
        hidden.register_hook(lambda grad: 1 / 0)
        layer(hidden).sum().backward()

    (error,) = in_threads([fails])
    assert isinstance(error, ZeroDivisionError)
    optimizer.zero_grad()
    layer(x).sum().backward()
    assert layer.weight.grad is layer.weight.main_grad
    assert layer.weight.grad.tolist() == [[1.0] * 3] * 3
