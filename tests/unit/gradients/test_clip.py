"""api.md section 3: the global norm, and clipping by it."""

import math

import pytest
import torch
from torch import nn

import fusedopt
from tests.compare import assert_bit_equal, everything
from tests.models import INNERS, Mlp, backward

U = 2.0**-24  # unit roundoff of float32


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
def test_clip_grad_norm_returns_the_global_norm_within_the_rounding_of_one_norm(norm_type):
    torch.manual_seed(1)
    params = [nn.Parameter(torch.randn(n)) for n in (1, 7, 1024, 5000, 33)]
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.0))
    sum((p * torch.randn_like(p)).sum() for p in params).backward()
    exact = torch.linalg.vector_norm(torch.cat([p.grad.double().flatten() for p in params]), norm_type).item()
    norm = optimizer.clip_grad_norm_(math.inf, norm_type)
    assert norm.shape == ()
    assert norm.dtype is torch.float32
    # Rows of 1024 fp32 elements: each power is rounded a few times (pow: 2 ulp), sums 1024 terms, and
    # the root divides the relative error by the norm type; then one rounding to fp32.
    bound = ((1024 + 8) / min(norm_type, 2.0) + 8) * U if norm_type != math.inf else 0.0
    assert abs(norm.item() - exact) <= bound * exact


def test_the_norm_of_a_long_bucket_keeps_digits_that_one_flat_sum_loses():
    param = nn.Parameter(torch.zeros(2**24))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=0.0))
    param.grad = torch.ones(2**24)
    assert optimizer.clip_grad_norm_(math.inf).item() == 4096.0
    generator = torch.Generator().manual_seed(0)
    param.grad.copy_(torch.randn(2**24, generator=generator))
    exact = param.grad.double().norm().item()
    bound = ((1024 + 8) / 2 + 8) * U * exact
    assert abs(optimizer.clip_grad_norm_(math.inf).item() - exact) <= bound
    assert abs(torch.linalg.vector_norm(param.grad).item() - exact) > bound  # the obvious way is caught


def test_every_element_is_counted_once_also_of_tied_parameters_and_mixed_dtypes():
    tied = nn.Parameter(torch.full((4,), 1.0, dtype=torch.bfloat16))
    double = nn.Parameter(torch.full((2,), 1.0, dtype=torch.float64))
    optimizer = fusedopt.FusedMainGradOptimizer(
        [torch.optim.SGD([tied], lr=0.0), torch.optim.SGD([double], lr=0.0)], max_grad_norm=1e9
    )
    (tied.sum() + tied.sum() + (double * 3.0).sum()).backward()
    norm = optimizer.clip_grad_norm_(math.inf)
    assert norm.dtype is torch.float64
    assert norm.item() == pytest.approx((4 * 4.0 + 2 * 9.0) ** 0.5, rel=1e-15)
    optimizer.step()
    assert optimizer.grad_norm.item() == norm.item()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan])
def test_a_norm_type_that_is_no_norm_is_refused(bad):
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    backward(model)
    with pytest.raises(ValueError, match="is not a norm"):
        optimizer.clip_grad_norm_(1.0, bad)


@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_after_a_step_that_clipped_grad_is_the_clipped_gradient(make, dtype):
    model = Mlp(dtype)
    optimizer = fusedopt.FusedMainGradOptimizer(make(model.parameters()), max_grad_norm=1e-3)
    for _ in range(3):  # the fused ones decide on the host first, on the device from the second step on
        backward(model)
        raw = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        norm = optimizer.grad_norm
        assert norm.item() > 1e-3
        for param, grad in zip(model.parameters(), raw, strict=True):
            assert param.grad is param.main_grad
            # One rounding of the coefficient's sum, its quotient, its inverse and the product: 4 U at most.
            want = grad.double() * (1e-3 / (norm.double() + 1e-6))
            assert torch.isfinite(param.grad).all()
            assert ((param.grad - want).abs() <= 4 * U * want.abs()).all()
        assert torch.stack([p.grad.norm() for p in model.parameters()]).norm().item() == pytest.approx(1e-3, rel=1e-2)
        optimizer.zero_grad()


@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
def test_a_clip_that_does_not_bind_changes_no_bit(make):
    models = [Mlp(torch.float32), Mlp(torch.float32)]
    bare = make(models[0].parameters())
    wrapped = fusedopt.FusedMainGradOptimizer(make(models[1].parameters()), max_grad_norm=1e6)
    for _ in range(4):
        for model, optimizer in zip(models, (bare, wrapped), strict=True):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    assert_bit_equal(list(models[0].parameters()), list(models[1].parameters()))


def test_a_step_of_zero_gradients_is_an_ordinary_step():
    models = [Mlp(torch.float32), Mlp(torch.float32)]
    bare = torch.optim.AdamW(models[0].parameters(), lr=1e-2, weight_decay=0.5)
    wrapped = fusedopt.FusedMainGradOptimizer(
        torch.optim.AdamW(models[1].parameters(), lr=1e-2, weight_decay=0.5), max_grad_norm=1.0, nonfinite="raise"
    )
    start = [p.detach().clone() for p in models[0].parameters()]
    for _ in range(3):
        for model, optimizer in zip(models, (bare, wrapped), strict=True):
            backward(model, factor=0.0)
            optimizer.step()
            optimizer.zero_grad()
    assert wrapped.grad_norm.item() == 0.0
    assert wrapped.skipped_steps == 0
    assert not torch.equal(start[0], models[0].first.weight)
    assert_bit_equal(list(models[0].parameters()), list(models[1].parameters()))


def test_a_step_without_any_gradient_moves_nothing():
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1.0), max_grad_norm=1.0)
    before = everything(model, optimizer)
    optimizer.step()
    assert_bit_equal(everything(model, optimizer), before)
    assert not optimizer.step_was_skipped
