"""What each backend that answers on the device computes, against fp64, against torch, and on poisoned memory."""

import math

import pytest
import torch

from fusedopt import backends
from fusedopt.backends import torch_ops
from fusedopt.backends.offers import Adam, StepTensors
from fusedopt.sharding.layout import ROW_NUMEL
from tests.models import integers

U32 = 2.0**-24
LOW_PRECISION = [torch.bfloat16, torch.float16]
BIG_NUMEL = 2**31 + ROW_NUMEL
BIG_FREE_NBYTES = 40 * 2**30


# -- weight gradients


def accumulated(backend, main_grad, grad_output, input, accumulate):
    """Return main_grad after the backend added to ``main_grad``, or overwrote poison."""
    found = main_grad.clone() if accumulate else torch.full_like(main_grad, float("nan"))
    backend.wgrad_accumulate_(found, grad_output, input, accumulate=accumulate)
    return found


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_small_integers_sum_exactly(backend, device, dtype, accumulate):
    grad_output, input = integers(48, 40, device=device, dtype=dtype), integers(48, 72, device=device, dtype=dtype)
    main_grad = integers(40, 72, limit=1000, device=device, dtype=torch.float32) + 2.0**-10
    found = accumulated(backend, main_grad, grad_output, input, accumulate)
    product = (grad_output.double().t() @ input.double()).float()
    assert torch.equal(found, main_grad + product if accumulate else product)


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("num_tokens", [64, 4096])
@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_sums_over_tokens_are_float32(backend, device, dtype, num_tokens, accumulate):
    num_tokens = num_tokens if device.type == "cuda" else 64
    # Positive operands: no cancellation, so that a product rounded to bf16 or fp16 is far outside the bound.
    grad_output, input = (torch.rand(num_tokens, n, device=device).to(dtype) for n in (96, 160))
    main_grad = torch.rand(96, 160, device=device)
    found = accumulated(backend, main_grad, grad_output, input, accumulate).double()
    product = grad_output.double().t() @ input.double()
    exact = product + main_grad if accumulate else product
    # n + 1 additions, each within one unit in the last place (tensor cores truncate) of a sum of positive terms.
    bound = (num_tokens + 1) * 2 * U32 * exact
    assert found.isfinite().all()
    assert ((found - exact).abs() <= bound).all()
    assert ((product.to(dtype).double() - product).abs() > bound).any()  # what rounds the product would be caught


def test_transposed_and_empty_operands_are_right(backend, device):
    grad_output = integers(40, 48, device=device).t()
    input = integers(72, 48, device=device).t()
    main_grad = integers(40, 72, device=device, dtype=torch.float32)
    found = accumulated(backend, main_grad, grad_output, input, True)
    assert torch.equal(found.double(), main_grad.double() + grad_output.double().t() @ input.double())
    for accumulate in (True, False):
        found = accumulated(backend, main_grad, grad_output[:0], input[:0], accumulate)
        assert torch.equal(found, main_grad if accumulate else torch.zeros_like(main_grad))


# -- norm, flags, scale and cast


def test_norms_are_those_of_float64(backend, device):
    flats = [torch.randn(rows * ROW_NUMEL, device=device) * scale for rows, scale in ((300, 1.0), (7, 1e-3), (1, 50.0))]
    exact = torch.cat(flats).double().norm()
    found = backend.norm(flats).double()
    assert abs(found.item() - exact.item()) <= ROW_NUMEL * U32 / 2 * exact.item()
    largest = torch.cat(flats).abs().max().item()
    assert backend.norm(flats, math.inf).item() == largest


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_one_bad_element_is_found(backend, device, bad):
    flats = [torch.full((ROW_NUMEL * rows,), 3e38, device=device) for rows in (3, 5)]  # their norm overflows fp32
    assert backend.found_inf(flats).item() == 0.0
    flats[1][-1] = bad
    assert backend.found_inf(flats).item() == 1.0


@pytest.mark.parametrize("factor", [None, 0.3])
@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float32])
def test_scale_and_cast_round_as_torch_does(backend, device, dtype, factor):
    sources = [torch.randn(n, device=device) * 100 for n in (ROW_NUMEL, 1, 4097, 33)]
    targets = [torch.full_like(source, float("nan"), dtype=dtype) for source in sources]
    scale = None if factor is None else torch.tensor(factor, device=device)
    backend.scale_cast_(targets, sources, scale)
    for target, source in zip(targets, sources, strict=True):
        expected = (source if scale is None else source * scale).to(dtype)
        assert target.isfinite().all()
        assert torch.equal(target, expected)


# -- the fused step


def adam_case(device, dtype):
    """Return operands of three parameters in mid-training, and torch's own optimizer on fp64 copies of them."""
    numels = (ROW_NUMEL, 77, 5000)
    mains, grads = ([torch.randn(n, device=device) for n in numels] for _ in range(2))
    exp_avgs = [torch.randn(n, device=device) * 0.1 for n in numels]
    exp_avg_sqs = [torch.rand(n, device=device) for n in numels]
    models = [main.to(dtype) for main in mains]
    steps = [torch.tensor(5.0, device=device) for _ in numels]
    operands = StepTensors(grads, mains, [exp_avgs, exp_avg_sqs], None if dtype is torch.float32 else models, steps)
    params = [torch.nn.Parameter(main.double()) for main in mains]
    exact = torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1, foreach=False)
    for param, grad, exp_avg, exp_avg_sq in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        param.grad = grad.double()
        state = {"step": torch.tensor(4.0), "exp_avg": exp_avg.double(), "exp_avg_sq": exp_avg_sq.double()}
        exact.state[param] = state
    return operands, exact, params


RULE = Adam(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, is_decoupled=True)


@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float32])
def test_a_fused_step_is_one_of_adamw_and_rounds_the_model(backend, device, dtype):
    if backend.fused_step_ is None or not backend.fused_step_.takes(RULE):
        pytest.skip("this backend leaves the step to the inner optimizer")
    operands, exact, params = adam_case(device, dtype)
    exact.step()
    backend.fused_step_.run(RULE, operands)
    for index, param in enumerate(params):
        state = exact.state[param]
        found = [operands.mains[index], *(tensors[index] for tensors in operands.states)]
        for tensor, reference in zip(found, (param.detach(), state["exp_avg"], state["exp_avg_sq"]), strict=True):
            assert tensor.isfinite().all()
            # A dozen roundings, of values no larger than the weight, its update (a few lr) and the moments.
            bound = 16 * U32 * (reference.abs() + 10 * RULE.lr + (tensor is not found[0]) * 5)
            assert ((tensor.double() - reference).abs() <= bound).all()
        if operands.models is not None:
            assert torch.equal(operands.models[index], operands.mains[index].to(dtype))


def test_a_fused_step_divides_by_grad_scale_and_leaves_all_alone_on_found_inf(backend, device):
    fused = backend.fused_step_
    if fused is None or not fused.takes_found_inf:
        pytest.skip("this backend leaves scaled steps to the inner optimizer")
    operands, _, _ = adam_case(device, torch.bfloat16)
    written = [*operands.mains, *operands.models, *(t for tensors in operands.states for t in tensors)]
    before = [tensor.clone() for tensor in written]
    scale, flag = torch.tensor(4.0, device=device), torch.ones((), device=device)
    fused.run(RULE, operands, grad_scale=scale, found_inf=flag)
    assert all(torch.equal(a, b) for a, b in zip(written, before, strict=True))
    fused.run(RULE, operands, grad_scale=scale, found_inf=flag * 0)
    scaled = [tensor.clone() for tensor in written]
    for tensor, value in zip(written, before, strict=True):
        tensor.copy_(value)
    for grad in operands.grads:
        grad.div_(4.0)  # a power of two: exact
    fused.run(RULE, operands)
    assert all(torch.equal(a, b) for a, b in zip(written, scaled, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(operands.mains, before, strict=False))


# -- size


def test_more_than_two_to_the_31_elements_are_all_counted_and_scaled(backend, cuda):
    if torch.cuda.mem_get_info(cuda)[0] < BIG_FREE_NBYTES:
        pytest.skip("needs 40 GiB of free GPU memory")
    flat = torch.ones(BIG_NUMEL, device=cuda)
    flat[-1] = 3.0
    exact = math.sqrt(BIG_NUMEL + 8)
    assert abs(backend.norm([flat]).item() - exact) <= ROW_NUMEL * U32 / 2 * exact
    assert backend.found_inf([flat]).item() == 0.0
    model = torch.full((BIG_NUMEL,), float("nan"), dtype=torch.bfloat16, device=cuda)
    backend.scale_cast_([model], [flat], torch.tensor(2.0, device=cuda))
    assert model[-1].item() == 6.0
    assert bool((model[:-1] == 2.0).all())
    flat[-1] = float("nan")
    assert backend.found_inf([flat]).item() == 1.0


def test_the_report_names_what_runs_on_this_device(device):
    report = str(backends.report())
    assert all(name in report for name in ("triton", "apex", "transformer_engine"))
    assert device.type in report


def test_torchs_road_on_cuda_forms_no_low_precision_product(cuda):
    for dtype in LOW_PRECISION:
        assert torch_ops.cuda_road(cuda, dtype) is not torch_ops.Road.WIDEN, "operands are cast to fp32: slow"
