"""api.md section 3, closures: who is given one evaluates it when and as often as it wants, as the bare one does."""

import copy
import math

import pytest
import schedulefree
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import values
from tests.models import Mlp, loss_of


class Sam(torch.optim.Optimizer):
    """The pattern of pytorch-optimizer's SAM: climbs by the gradients that stand, evaluates, goes back, steps."""

    def __init__(self, params, rho=0.05, **settings):
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("Sam requires a closure")
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm() + 1e-12
        for p in params:
            self.state[p]["old_p"] = p.clone()
            p.add_(p.grad * (0.05 / norm))
        self.zero_grad()
        with torch.enable_grad():
            closure()
        for p in params:
            p.copy_(self.state[p].pop("old_p"))
        self.base_optimizer.step()


class Armijo(torch.optim.SGD):
    """The pattern of ncg-optimizer's BASIC: evaluates first, then again at points that it writes through `.data`."""

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure()
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        old, direction, lr = [p.detach().clone() for p in params], [p.grad.clone() for p in params], 4.0
        slope = sum(d.square().sum() for d in direction)
        while True:
            for p, start, d in zip(params, old, direction, strict=True):
                p.data.copy_(start - lr * d)
            with torch.enable_grad():
                trial = closure()
            if trial <= loss - 1e-4 * lr * slope or lr < 1e-3:
                return loss
            lr /= 2


class AliG(torch.optim.SGD):
    """The pattern of pytorch-optimizer's AliG: needs the loss itself, which the closure returns as a float."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is None:
            raise RuntimeError("AliG requires a closure")
        loss = float(closure())
        norm = sum(p.grad.square().sum() for group in self.param_groups for p in group["params"])
        for group in self.param_groups:
            group["step_size"] = min(loss / (norm.item() + 1e-6), group["lr"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["step_size"])
        return loss


class Counts(torch.optim.SGD):
    """Counts in its group and in itself before it evaluates, and steps by that."""

    number = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.number += 1
        group = self.param_groups[0]
        group["t"] = group.get("t", 0) + 1
        with torch.enable_grad():
            loss = closure()
        for p in group["params"]:
            p.add_(p.grad, alpha=-group["lr"] / (group["t"] + self.number))
        return loss


def free(cls):
    return lambda params: cls(params, lr=0.05)


OPTIMIZERS = {
    "AdamWScheduleFreeClosure": free(schedulefree.AdamWScheduleFreeClosure),
    "SGDScheduleFreeClosure": free(schedulefree.SGDScheduleFreeClosure),
    "RAdamScheduleFreeClosure": free(schedulefree.RAdamScheduleFreeClosure),
    "Sam": lambda params: Sam(params, lr=0.1, momentum=0.9),
    "Armijo": lambda params: Armijo(params, lr=0.1),
    "AliG": lambda params: AliG(params, lr=0.1),
    "Counts": lambda params: Counts(params, lr=0.1),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2),
}


class Loop:
    """Steps with a closure; gradients stand before each step, too, and the closure clears them or does not."""

    def __init__(self, model, optimizer, *, clears=True):
        self.model, self.optimizer, self.clears = model, optimizer, clears
        self.losses = []

    def step(self, number, factor=1.0):
        self.optimizer.zero_grad()
        loss_of(self.model, number + 100).backward()

        def closure():
            if self.clears:
                self.optimizer.zero_grad()
            with torch.enable_grad():
                loss = loss_of(self.model, number) * factor
                loss.backward()
            self.losses.append(loss.item())
            return loss

        return self.optimizer.step(closure)


def everything(optimizer):
    """Values of parameters, state and hyper-parameters of a bare optimizer or the inner one."""
    found = []
    for group in optimizer.param_groups:
        found += [(key, value) for key, value in sorted(group.items()) if key != "params"]
        for param in group["params"]:
            found += [("param", param), *sorted(optimizer.state.get(param, {}).items())]
    found += [(key, value) for key, value in sorted(vars(optimizer).items()) if type(value) in (int, float)]
    return [(key, copy.deepcopy(value.detach() if isinstance(value, torch.Tensor) else value)) for key, value in found]


def assert_same(one, other, where="values"):
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            assert_same(a, b, one)
    else:
        assert one == other, where


@pytest.mark.parametrize(("name", "clears"), [*((name, True) for name in OPTIMIZERS), ("Sam", False)])
def test_whoever_is_given_a_closure_evaluates_it_as_the_bare_optimizer_does_bit_for_bit(name, clears):
    loops = []
    for wraps in (False, True):
        model = Mlp(torch.float32)
        optimizer = OPTIMIZERS[name](model.parameters())
        loops.append(Loop(model, FusedMainGradOptimizer(optimizer) if wraps else optimizer, clears=clears))
    start = values(loops[0].model)
    for number in range(6):
        returned = [loop.step(number) for loop in loops]
        assert returned[0] == returned[1]
        assert loops[0].losses == loops[1].losses
        for a, b in zip(*(values(loop.model) for loop in loops), strict=True):
            assert torch.equal(a, b)
    assert_same(everything(loops[0].optimizer), everything(loops[1].optimizer._inner.optimizers[0]))
    assert not torch.equal(start[0], values(loops[0].model)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_evaluation_of_a_low_precision_model_sees_the_rounded_weights_that_the_inner_optimizer_set(name):
    """The twin evaluates the same bf16 model at rounded copies of bare fp32 parameters."""
    model, twin = Mlp(torch.bfloat16), Mlp(torch.bfloat16)
    loop = Loop(model, FusedMainGradOptimizer(OPTIMIZERS[name](model.parameters())), clears=name != "Sam")
    mains = [nn.Parameter(param.detach().float()) for param in twin.parameters()]
    bare = OPTIMIZERS[name](mains)
    losses = []

    def evaluate(number):
        with torch.no_grad():
            for param, main in zip(twin.parameters(), mains, strict=True):
                param.copy_(main)
        with torch.enable_grad():
            loss = loss_of(twin, number)
            grads = torch.autograd.grad(loss, list(twin.parameters()))
        for main, grad in zip(mains, grads, strict=True):
            main.grad = grad.float()
        return loss

    for number in range(5):
        loop.step(number)
        evaluate(number + 100)

        def closure(number=number):
            loss = evaluate(number)
            losses.append(loss.item())
            return loss

        bare.step(closure)
        assert loop.losses == losses
        for entry, main in zip(loop.optimizer._buffers.entries, mains, strict=True):
            assert torch.equal(entry.main_param.detach(), main.detach())
            assert torch.equal(entry.param.detach(), main.detach().to(torch.bfloat16))
    assert all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_first_evaluation_that_is_not_finite_leaves_everything_as_it_was_though_weights_had_moved(
    name, at, nonfinite, dtype
):
    models = [Mlp(dtype) for _ in range(2)]
    inners = [OPTIMIZERS[name](model.parameters()) for model in models]
    loop, other = (
        Loop(model, FusedMainGradOptimizer(inner, nonfinite=nonfinite), clears=name != "Sam")
        for model, inner in zip(models, inners, strict=True)
    )
    for number in range(at):
        loop.step(number)
        other.step(number)
    before = everything(inners[0])
    if nonfinite == "raise":
        with pytest.raises(FloatingPointError, match="inf or nan"):
            loop.step(50, factor=math.inf)
    else:
        with pytest.warns(RuntimeWarning, match="skipped"):
            loop.step(50, factor=math.inf)
        assert loop.optimizer.step_was_skipped
    assert_same(everything(inners[0]), before)
    for number in range(at, at + 3):  # and nothing of it is left for later
        loop.step(number)
        other.step(number)
    assert_same(everything(inners[0]), everything(inners[1]))
    for a, b in zip(*(values(model) for model in models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_evaluation_is_clipped(dtype):
    model = Mlp(dtype)
    norms = []

    class Watches(Armijo):
        def step(self, closure=None):
            def watched():
                loss = closure()
                grads = [p.grad for p in self.param_groups[0]["params"]]
                norms.append(torch.stack([grad.norm() for grad in grads]).norm().item())
                return loss

            return super().step(watched)

    loop = Loop(model, FusedMainGradOptimizer(Watches(model.parameters(), lr=0.1), max_grad_norm=1e-2))
    loop.step(0)
    assert len(norms) > 1
    assert norms == pytest.approx([1e-2] * len(norms), rel=1e-3)


def test_a_closure_that_raises_leaves_the_weights_where_the_step_found_them():
    model = Mlp(torch.float32)
    optimizer = FusedMainGradOptimizer(OPTIMIZERS["AdamWScheduleFreeClosure"](model.parameters()))
    loop = Loop(model, optimizer)
    before = values(model)

    def closure():
        raise KeyError("no batch")

    with pytest.raises(KeyError, match="no batch"):
        optimizer.step(closure)
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))
    loop.step(0)
    assert not torch.equal(before[0], values(model)[0])


@pytest.mark.parametrize("name", ["Sam", "Armijo"])
def test_gradient_merge_with_an_optimizer_that_evaluates_more_than_the_last_micro_batch_is_refused(name):
    model = Mlp(torch.float32)
    inner = OPTIMIZERS[name](model.parameters())
    optimizer = FusedMainGradOptimizer(inner, gradient_accumulation_steps=2)
    before = everything(inner)

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = loss_of(model, 0)
            loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(RuntimeError, match=rf"{name} moves weights.*gradient_accumulation_steps=1"):
        optimizer.step(closure)
    assert_same(everything(inner), before)


@pytest.mark.parametrize("cls", [torch.optim.SGD, AliG])
def test_gradient_merge_with_closures_is_one_large_batch(cls):
    models = [Mlp(torch.float32), Mlp(torch.float32)]
    merged = FusedMainGradOptimizer(cls(models[0].parameters(), lr=0.05), gradient_accumulation_steps=2)
    whole = FusedMainGradOptimizer(cls(models[1].parameters(), lr=0.05))
    for number in range(0, 6, 2):
        for part in (number, number + 1):

            def closure(part=part):
                merged.zero_grad()
                with torch.enable_grad():
                    loss = loss_of(models[0], part)
                    loss.backward()
                return 1.0

            merged.step(closure)

        def both(number=number):
            whole.zero_grad()
            with torch.enable_grad():
                (loss_of(models[1], number).div(2)).backward()
                (loss_of(models[1], number + 1).div(2)).backward()
            return 1.0

        whole.step(both)
    for a, b in zip(*(values(model) for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_one_evaluation_serves_several_inner_optimizers_that_did_not_move_before_it():
    model, twin = Mlp(torch.float32), Mlp(torch.float32)
    inners = [
        AliG([model.first.weight, model.first.bias], lr=0.05),
        torch.optim.SGD(model.second.parameters(), lr=0.05),
    ]
    optimizer = FusedMainGradOptimizer([*inners])
    twins = [AliG(twin.first.parameters(), lr=0.05), torch.optim.SGD(twin.second.parameters(), lr=0.05)]
    loop = Loop(model, optimizer)
    for number in range(3):
        loop.step(number)
        twin.zero_grad()
        loss = loss_of(twin, number)
        loss.backward()
        twins[0].step(lambda loss=loss: loss)
        twins[1].step()
    assert len(loop.losses) == 3
    for a, b in zip(values(model), values(twin), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_that_takes_a_closure_and_never_evaluates_it_raises_and_nothing_moved():
    class Ignores(torch.optim.SGD):
        def step(self, closure=None):
            return super().step()

    model = Mlp(torch.float32)
    loop = Loop(model, FusedMainGradOptimizer(Ignores(model.parameters(), lr=0.1)))
    before = values(model)
    with pytest.raises(RuntimeError, match=r"Ignores\.step\(\) took the closure and never evaluated it"):
        loop.step(0)
    assert all(torch.equal(a, b) for a, b in zip(before, values(model), strict=True))


@pytest.mark.parametrize("name", ["Sam", "AliG"])
def test_a_step_without_a_closure_is_the_inner_optimizers_own(name):
    model = Mlp(torch.float32)
    optimizer = FusedMainGradOptimizer(OPTIMIZERS[name](model.parameters()))
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="requires a closure"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_an_inner_optimizer_clears_in_its_step_are_cleared(dtype):
    """heavyball takes gradients off its parameters; a loop that relies on it must not add to the old ones."""

    class Consumes(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            self.zero_grad()
            return loss

    model = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(Consumes(model.parameters(), lr=0.1))
    for number in range(2):
        loss_of(model, number).backward()
        grads = [param.grad.clone() for param in model.parameters()]
        expected = torch.autograd.grad(loss_of(model, number), list(model.parameters()))
        for grad, want in zip(grads, expected, strict=True):
            assert torch.equal(grad.to(dtype), want)
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())


class Keyword(Armijo):
    def step(self, *, closure=None):
        return super().step(closure)


class OtherName(Armijo):
    def step(self, evaluate=None):
        return super().step(evaluate)


class Anything(Armijo):
    def step(self, *args):
        return super().step(*args)


@pytest.mark.parametrize("cls", [Keyword, OtherName, Anything])
def test_a_closure_is_handed_over_however_step_takes_it(cls):
    loops = []
    for wraps in (False, True):
        model = Mlp(torch.float32)
        optimizer = (cls if wraps else Armijo)(model.parameters(), lr=0.1)
        loops.append(Loop(model, FusedMainGradOptimizer(optimizer) if wraps else optimizer))
    for number in range(3):
        assert loops[0].step(number) == loops[1].step(number)
    assert loops[0].losses == loops[1].losses
    assert len(loops[0].losses) > 3


def test_an_optimizer_that_takes_no_closure_steps_with_what_the_closure_computed():
    class Takes(torch.optim.SGD):
        def step(self):
            return super().step()

    models = [Mlp(torch.float32), Mlp(torch.float32)]
    wrapped = Loop(models[0], FusedMainGradOptimizer(Takes(models[0].parameters(), lr=0.1)))
    bare = Loop(models[1], torch.optim.SGD(models[1].parameters(), lr=0.1))
    for number in range(3):
        assert wrapped.step(number) == bare.step(number)
    for a, b in zip(*(values(model) for model in models), strict=True):
        assert torch.equal(a, b)
