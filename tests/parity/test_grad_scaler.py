"""torch.amp.GradScaler drives the wrapper of an fp16 model as it drives a stock optimizer with fp32 gradients."""

import functools
import inspect
import itertools
from copy import deepcopy

import pytest
import torch

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_bit_equal, main_params
from tests.models import TokenNet, token_loss_of
from tests.reference import Reference

NUM_STEPS = 6

make_model = functools.partial(TokenNet, head="linear")


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
}


def make_wrapped(name="AdamW", **settings):
    model = make_model(torch.float16)
    return model, FusedMainGradOptimizer(OPTIMIZERS[name](model.parameters()), **settings)


class ScaledReference(Reference):
    """The twin under loss scaling: scale the loss, unscale the fp32 sums, skip where they are not finite."""

    def __init__(self, name, scale, growth_interval, **keywords):
        super().__init__(make_model(torch.float16), lambda groups: OPTIMIZERS[name](groups[0]), **keywords)
        self.scale, self.growth_interval, self.num_good = scale, growth_interval, 0

    def scaled_backward(self, number):
        self.backward(token_loss_of(self.model, number) * self.scale)

    def scaled_step(self):
        """Return whether the step was taken."""
        self.sums = {param: grad * (1 / self.scale) for param, grad in self.sums.items()}
        is_finite = all(bool(torch.isfinite(grad).all()) for grad in self.sums.values())
        if is_finite:
            self.step()
            self.num_good += 1
            if self.num_good == self.growth_interval:
                self.scale, self.num_good = self.scale * 2, 0
        else:
            self.sums.clear()
            self.scale, self.num_good = self.scale / 2, 0
        return is_finite


def assert_matches(model, optimizer, reference):
    assert_bit_equal(list(model.parameters()), list(reference.model.parameters()))
    assert_bit_equal(main_params(optimizer), [main.detach() for main in reference.mains.values()])


def changed(model):
    start = make_model(torch.float16)
    return [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_training_ends_bit_equal_to_the_twin_while_the_scale_grows(name, num_micro_batches):
    model, optimizer = make_wrapped(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    reference = ScaledReference(name, 2.0**10, growth_interval=2)
    scales = []
    for step in range(NUM_STEPS):
        for i in range(num_micro_batches):
            number = step * num_micro_batches + i
            scaler.scale(token_loss_of(model, number)).backward()
            reference.scaled_backward(number)
        assert all(param.grad is param.main_grad for param in model.hidden.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert reference.scaled_step()
        scales.append(scaler.get_scale())
        assert scales[-1] == reference.scale
        assert_matches(model, optimizer, reference)
    assert scales == [2.0**10, 2.0**11, 2.0**11, 2.0**12, 2.0**12, 2.0**13]
    assert all(changed(model))
    assert optimizer.skipped_steps == 0


def test_a_scale_that_overflows_fp16_is_halved_until_training_starts():
    model, optimizer = make_wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=100)
    reference = ScaledReference("AdamW", 2.0**22, growth_interval=100)
    taken = []
    for number in range(14):
        scaler.scale(token_loss_of(model, number)).backward()
        reference.scaled_backward(number)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
        taken.append(reference.scaled_step())
        assert scaler.get_scale() == reference.scale
        assert_matches(model, optimizer, reference)
        assert any(changed(model)) == any(taken)
    assert taken[0] is False
    assert taken[-3:] == [True] * 3
    assert optimizer.skipped_steps == 0


CLEARS = {
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "param.grad = None": lambda model, optimizer: [setattr(param, "grad", None) for param in model.parameters()],
}


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_injected_inf_leaves_everything_untouched_halves_the_scale_and_counts_nothing(name, bad):
    model, optimizer = make_wrapped(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(7):
        scaler.scale(token_loss_of(model, number)).backward()
        before = deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
        if number in (3, 4):
            model.hidden.weight.grad[0, 0] = bad
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights, state = model.state_dict(), optimizer.state_dict()["state"]
        was_skipped = number in (3, 4)
        assert scaler.get_scale() == (scale / 2 if was_skipped else scale)
        assert torch.equal(weights["hidden.weight"], before[0]["hidden.weight"]) == was_skipped
        if was_skipped:
            assert_bit_equal(list(weights.values()), list(before[0].values()))
            for index, saved in before[1].items():
                assert set(saved) == set(state[index]) > {"main_param"}
                assert_bit_equal(list(state[index].values()), list(saved.values()))
    if "AdamW" in name:
        assert optimizer.state[model.hidden.weight]["step"] == 5
    assert optimizer.skipped_steps == 0
    assert optimizer.step_was_skipped is False


@pytest.mark.parametrize("clear", CLEARS)
def test_clearing_after_a_skip_leaves_no_inf_behind(clear):
    model, optimizer = make_wrapped(max_grad_norm=1e9)  # a whole-bucket norm would see what stayed behind
    reference = ScaledReference("AdamW", 2.0**10, growth_interval=2000)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    norms = []
    for number in range(8):
        scaler.scale(token_loss_of(model, number)).backward()
        reference.scaled_backward(number)
        if number in (2, 4):  # the next batch gives this parameter no gradient
            for of_model in (model.sometimes.weight.grad, reference.sums[reference.model.sometimes.weight]):
                of_model[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert reference.scaled_step() == (number not in (2, 4))
        CLEARS[clear](model, optimizer)
        norms.append(optimizer.grad_norm.item())
        grads = [param.grad for param in model.parameters()]
        assert all(grad is None for grad in grads) or all(grad is None or not grad.any() for grad in grads)
        if "False" not in clear:  # a zero gradient is one: AdamW then moves by its momentum, where the twin skips
            assert_matches(model, optimizer, reference)
    assert all(norm > 0 and norm < 1e6 for norm in norms)
    assert model.sometimes.weight.main_grad.isfinite().all() or "False" not in clear
    assert all(param.isfinite().all() for param in model.parameters())


def test_stock_clipping_after_unscale_clips_the_unscaled_gradients_as_in_the_twin():
    model, optimizer = make_wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    reference = ScaledReference("AdamW", 2.0**10, growth_interval=2000, max_grad_norm=0.1)
    for number in range(NUM_STEPS):
        scaler.scale(token_loss_of(model, number)).backward()
        reference.scaled_backward(number)
        scaled = model.hidden.weight.grad.clone()
        scaler.unscale_(optimizer)
        assert model.hidden.weight.grad is model.hidden.weight.main_grad
        assert_bit_equal([model.hidden.weight.grad], [scaled / 2.0**10])
        expected = sum(grad.double().div(2.0**10).square().sum() for grad in reference.sums.values()).sqrt().item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm.item() == pytest.approx(expected, rel=1e-4)  # the unscaled norm, not 2 ** 10 times it
        assert norm > 0.2
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert reference.scaled_step()
        assert_matches(model, optimizer, reference)
    assert all(changed(model))


def test_the_wrappers_own_clip_after_unscale_measures_the_unscaled_gradients():
    model, optimizer = make_wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(3):
        scaler.scale(token_loss_of(model, number)).backward()
        scaler.unscale_(optimizer)
        grads = [param.grad.double() for param in model.parameters() if param.grad is not None]
        exact = sum(grad.square().sum() for grad in grads).sqrt().item()
        norm = optimizer.clip_grad_norm_(0.1).item()
        # Rows of 1024 float32 squares: below 1024 roundings, halved by the root, and two more (see torch_ops.norm).
        assert abs(norm - exact) <= (1024 / 2 + 2) * 2.0**-24 * exact
        clipped = [param.grad.double() for param in model.parameters() if param.grad is not None]
        assert sum(grad.square().sum() for grad in clipped).sqrt().item() <= 0.1 * (1 + (1024 / 2 + 4) * 2.0**-24)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(changed(model))


def test_unscaling_twice_raises_as_with_a_stock_optimizer():
    model, optimizer = make_wrapped()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(3):
        scaler.scale(token_loss_of(model, number)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_scaler_with_merged_micro_batches_raises_with_the_remedy_and_changes_nothing():
    model, optimizer = make_wrapped(gradient_accumulation_steps=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(3):
        scaler.scale(token_loss_of(model, number)).backward()
        with pytest.raises(RuntimeError, match=r"gradient_accumulation_steps=2.*Use gradient_accumulation_steps=1"):
            scaler.step(optimizer)
        assert not any(changed(model))
        assert optimizer.window_ends  # no micro-batch was counted
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())


def test_whoever_looks_at_a_wrapper_that_merges_sees_no_error():
    _, optimizer = make_wrapped(gradient_accumulation_steps=2)
    assert hasattr(optimizer, "_step_supports_amp_scaling")
    assert dict(inspect.getmembers(optimizer))["_step_supports_amp_scaling"] is False
    assert deepcopy(optimizer)._step_supports_amp_scaling is False

    class Debugger:
        def step(self):
            return optimizer._step_supports_amp_scaling

    assert Debugger().step() is False


class LaterScaler(torch.amp.GradScaler):
    """A subclass that steps in its own words, as other releases and projects do."""

    def step(self, optimizer):
        assert getattr(optimizer, "_step_supports_amp_scaling", False) is False
        return super().step(optimizer)


@pytest.mark.parametrize("num_merged", [1, 2])
def test_a_scaler_of_another_class_is_known_by_what_it_is(num_merged):
    model, optimizer = make_wrapped(gradient_accumulation_steps=num_merged)
    scaler = LaterScaler("cpu", init_scale=2.0**10)
    for number in range(3):
        scaler.scale(token_loss_of(model, number)).backward()
        if num_merged == 2:
            with pytest.raises(RuntimeError, match="gradient_accumulation_steps=2"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    assert any(changed(model)) == (num_merged == 1)


def test_a_scaler_that_is_switched_off_goes_with_merged_micro_batches():
    model, optimizer = make_wrapped(gradient_accumulation_steps=2)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for number in range(6):
        scaler.scale(token_loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert optimizer.window_ends == (number % 2 == 1)
        assert any(changed(model)) == (number > 0)


def test_without_any_gradient_a_scaler_says_what_it_says_with_a_stock_optimizer():
    stock_model = make_model(torch.float32)
    model, optimizer = make_wrapped()
    messages = []
    for opt in (torch.optim.AdamW(stock_model.parameters()), optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError) as caught:
            scaler.step(opt)
        messages.append(str(caught.value))
    assert messages[0] == messages[1] == "No inf checks were recorded for this optimizer."
    assert not any(changed(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in range(3):  # and it still trains
        scaler.scale(token_loss_of(model, number)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert all(changed(model))


def test_an_inf_in_one_of_several_inner_optimizers_skips_all_of_them():
    model = make_model(torch.float16)
    matrices = [model.hidden.weight, model.sometimes.weight]
    others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    optimizer = FusedMainGradOptimizer([torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for number in (0, 2, 4):
        before = deepcopy(model.state_dict())
        scaler.scale(token_loss_of(model, number)).backward()
        if number == 2:
            model.head.bias.grad[0] = float("inf")  # AdamW's
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = [not torch.equal(value, before[key]) for key, value in model.state_dict().items()]
        assert moved == [number != 2] * len(moved)
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_fp32_model_under_fp16_autocast_ends_bit_equal_to_the_bare_optimizer(name):
    models = [make_model(torch.float32), make_model(torch.float32)]
    bare, inner = (OPTIMIZERS[name](model.parameters()) for model in models)
    optimizers = [bare, FusedMainGradOptimizer(inner)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2) for _ in models]
    scales = []
    for number in range(12):
        for model, opt, scaler in zip(models, optimizers, scalers, strict=True):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = token_loss_of(model, number)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert_bit_equal(list(models[1].parameters()), list(models[0].parameters()))
        scales.append(scalers[0].get_scale())
        assert scalers[1].get_scale() == scales[-1]
    assert any(b < a for a, b in itertools.pairwise(scales))  # it overflowed
    assert any(b > a for a, b in itertools.pairwise(scales))  # and grew
    assert not torch.equal(models[0].hidden.weight, make_model(torch.float32).hidden.weight)
