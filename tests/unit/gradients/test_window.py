"""Gradient merge: `gradient_accumulation_steps`, `flush`, `window_ends`."""

import pytest
import torch
from torch import nn

import fusedopt


def sgd(param, k, **settings):
    return fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD([("w", param)], lr=1.0), gradient_accumulation_steps=k, **settings
    )


def vector(dtype=torch.bfloat16, value=0.0):
    return nn.Parameter(torch.full((4,), value, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("clear_at", ["top", "end"])
def test_every_kth_step_acts_on_the_mean_wherever_the_loop_clears(dtype, clear_at):
    param = vector(dtype)
    optimizer = sgd(param, 4)
    trace = []
    for factor in [1.0, 2.0, 3.0, 10.0] * 3:
        if clear_at == "top":
            optimizer.zero_grad()
        (param * factor).sum().backward()
        optimizer.step()
        if clear_at == "end":
            optimizer.zero_grad()
        trace.append((param[0].item(), optimizer.window_ends))
    assert trace == [(-4.0 * (i // 4), i % 4 == 0) for i in range(1, 13)]  # the mean of a window is 4


def test_the_window_is_one_batch_of_k_times_the_size_bit_for_bit():
    torch.manual_seed(3)
    models = [nn.Linear(8, 4).bfloat16() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    data = torch.randint(-4, 5, (6, 4, 8)).bfloat16()  # small integers: fp32 sums of products are exact
    targets = torch.randint(-4, 5, (6, 4, 4)).bfloat16()
    merged = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(models[0].parameters()), gradient_accumulation_steps=2)
    whole = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(models[1].parameters()))
    for window in range(3):
        for i in (2 * window, 2 * window + 1):
            (models[0](data[i]) * targets[i]).float().sum().backward()
            merged.step()
            merged.zero_grad()
        for i in (2 * window, 2 * window + 1):
            ((models[1](data[i]) * targets[i]).float().sum() / 2).backward()
        whole.step()
        whole.zero_grad()
    for got, want in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, want)


def test_the_mean_is_one_division_of_the_sum():
    param = vector(torch.float32)
    optimizer = sgd(param, 3)
    for factor in (1.0, 2.0, 4.0):
        (param * factor).sum().backward()
        optimizer.step()
    assert torch.equal(param.detach(), torch.full((4,), -(torch.tensor(7.0) / 3).item()))
    of_each = torch.tensor(1.0) / 3 + torch.tensor(2.0) / 3 + torch.tensor(4.0) / 3
    assert torch.tensor(7.0) / 3 != of_each  # dividing every micro-batch would show


def test_gradient_average_false_steps_with_the_sum():
    param = vector()
    optimizer = sgd(param, 2, gradient_average=False)
    for factor in (1.0, 2.0):
        (param * factor).sum().backward()
        assert param.grad[0].item() == (1.0 if factor == 1.0 else 3.0)
        optimizer.step()
    assert param[0].item() == -3.0


def test_grad_holds_the_sum_until_the_kth_call():
    param = vector()
    optimizer = sgd(param, 4)
    for i in range(1, 5):
        optimizer.zero_grad()
        (param * 256.0 if i == 1 else param).sum().backward()
        assert param.grad is param.main_grad
        assert param.grad[0].item() == 255.0 + i
        optimizer.step()


def test_flush_ends_a_short_window_with_the_mean_of_what_is_there():
    param = vector()
    optimizer = sgd(param, 4)
    optimizer.flush()  # nothing pending
    assert param[0].item() == 0.0
    for factor in (1.0, 3.0):
        (param * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not optimizer.window_ends
    optimizer.flush()
    assert optimizer.window_ends
    assert param[0].item() == -2.0
    optimizer.zero_grad()
    assert param.grad is None
    for _ in range(4):
        param.sum().backward()
        optimizer.step()
    assert param[0].item() == -3.0


def test_a_parameter_used_in_some_micro_batches_counts_zero_in_the_others():
    used, rare, never = vector(), vector(), vector()
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD([used, rare, never], lr=1.0, weight_decay=0.5), gradient_accumulation_steps=2
    )
    never.data.fill_(8.0)
    optimizer.sync_main_params()
    for i in range(6):
        (used.sum() + (rare * 4.0).sum() if i % 2 else used.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = [0.0, 0.0]
    for _ in range(3):
        reference = [v - (g + 0.5 * v) for v, g in zip(reference, (1.0, 2.0), strict=True)]
    assert [used[0].item(), rare[0].item()] == reference
    assert never[0].item() == 8.0


@pytest.mark.parametrize("clear", ["model.zero_grad()", "param.grad = None", "model.zero_grad() and a backward"])
def test_a_pending_gradient_cleared_behind_its_back_raises_and_the_next_window_is_right(clear):
    model = nn.Linear(1, 4, bias=False).bfloat16()
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(model.named_parameters(), lr=1.0), gradient_accumulation_steps=3
    )
    x = torch.ones(1, 1, dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    if clear == "param.grad = None":
        model.weight.grad = None
    else:
        model.zero_grad()
    if clear.endswith("backward"):
        model(x).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"parameter weight was cleared.*1 micro-batch.*optimizer\.zero_grad\(\)"):
        optimizer.step()
    assert torch.equal(model.weight.detach(), before)
    optimizer.zero_grad()
    assert model.weight.grad is None
    main = optimizer._buffers.entries[0].main_param.detach().clone()
    for _ in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(optimizer._buffers.entries[0].main_param.detach(), main - 1.0)


def test_a_first_use_in_a_later_micro_batch_is_no_cleared_gradient():
    first, later = vector(), vector()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([first, later], lr=1.0), gradient_accumulation_steps=2)
    first.sum().backward()
    optimizer.step()
    (first.sum() + later.sum()).backward()
    optimizer.step()
    assert (first[0].item(), later[0].item()) == (-1.0, -0.5)


@pytest.mark.parametrize("k", [1, 2])
def test_max_grad_norm_clips_the_mean_of_the_window(k):
    param = vector(torch.float32)
    optimizer = sgd(param, k, max_grad_norm=1.0)
    for _ in range(k):
        (param * 6.0).sum().backward()
        optimizer.step()
    norm = torch.tensor(12.0)  # sqrt(4 * 36), of the mean
    expected = torch.full((4,), 6.0) * (1.0 / (norm + 1e-6)).clamp(max=1.0)
    assert optimizer.grad_norm.item() == 12.0
    assert torch.equal(param.grad, expected)
    assert torch.equal(param.detach(), -expected)


def test_clip_grad_norm_under_a_window_clips_before_the_last_call_and_only_measures_before():
    param = vector(torch.float32)
    optimizer = sgd(param, 2)
    (param * 6.0).sum().backward()
    assert optimizer.clip_grad_norm_(1.0).item() == 12.0
    assert param.grad[0].item() == 6.0
    optimizer.step()
    (param * 18.0).sum().backward()
    assert optimizer.clip_grad_norm_(1.0).item() == 24.0  # of the mean, 12 per element
    clipped = param.grad.clone()
    assert clipped.norm().item() == pytest.approx(1.0, rel=1e-5)
    optimizer.step()
    assert torch.equal(param.detach(), -clipped)  # not divided a second time


def test_a_non_finite_micro_batch_skips_the_window_and_the_next_one_is_clean():
    param = vector()
    optimizer = sgd(param, 2)
    for factor in (float("inf"), 1.0):
        (param * factor).sum().backward()
        if factor == 1.0:
            with pytest.warns(RuntimeWarning, match="1 optimizer step"):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.step_was_skipped
    assert optimizer.window_ends
    assert param[0].item() == 0.0
    for factor in (1.0, 3.0):
        (param * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert param[0].item() == -2.0
    assert optimizer.skipped_steps == 1


def test_a_scheduler_stepped_at_window_ends_sees_one_step_per_window():
    param = vector()
    optimizer = sgd(param, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    values = []
    for _ in range(6):
        (param * 2.0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.window_ends:
            scheduler.step()
        values.append(param[0].item())
    assert values == [0.0, -2.0, -2.0, -3.0, -3.0, -3.5]


def test_closures_count_as_micro_batches():
    param = vector()
    optimizer = sgd(param, 2)
    losses = []
    for _ in range(4):

        def closure():
            optimizer.zero_grad()
            loss = (param * 2.0).sum()
            loss.backward()
            return loss.item()

        losses.append(optimizer.step(closure))
    assert param[0].item() == -4.0
    assert losses == [0.0, 0.0, -16.0, -16.0]


def test_a_mistake_that_can_be_mended_does_not_lose_the_window():
    param = vector()
    inner = torch.optim.SGD([("w", param)], lr=1.0)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, gradient_accumulation_steps=2)
    for factor in (1.0, 3.0):
        (param * factor).sum().backward()
        if factor == 1.0:
            optimizer.step()
    optimizer.param_groups[0]["lr"], inner.param_groups[0]["lr"] = 2.0, 3.0
    with pytest.raises(RuntimeError, match=r"param_groups\[0\]\['lr'\] was changed on both sides"):
        optimizer.step()
    assert not optimizer.window_ends
    inner.param_groups[0]["lr"] = 2.0
    optimizer.step()
    assert optimizer.window_ends
    assert param[0].item() == -4.0
