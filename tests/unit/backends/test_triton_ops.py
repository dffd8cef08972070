"""The Triton kernels: bit by bit against torch in Triton's interpreter, and compiled, unrun, for an sm_90 GPU."""

import importlib
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusedopt
from fusedopt.backends.offers import FUNCTIONS, Adam, Sgd, Spans

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton (Linux only)")
tl = triton.language

BLOCK = 1024
BOUNDARIES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
SIZES = (1, 7, 0, BLOCK - 1, BLOCK, 2 * BLOCK + 1)
LOW = (torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
GUARD = 64  # elements before and after each target, which nobody may write
ADAMW = Adam(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-3, weight_decay=0.1, is_decoupled=True)
ADAM = Adam(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-3, weight_decay=0.1, is_decoupled=False)


def load_copy(name):
    """Return a copy of triton_ops of our own: others may have imported it with or without the interpreter."""
    path = Path(fusedopt.__file__).parent / "backends" / "triton_ops.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ops():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where @triton.jit decorates
        return load_copy("triton_ops_interpreted")


@pytest.fixture(scope="module")
def compiled_ops():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return load_copy("triton_ops_compiled")


@pytest.fixture(autouse=True)
def _numpy_overflows_silently():
    with np.errstate(all="ignore"):  # the interpreter is NumPy, which warns where hardware just makes an inf
        yield


def bits(tensor):
    return tensor.contiguous().view(BITS[tensor.dtype])


def assert_same_bits(found, expected):
    assert found.dtype is expected.dtype
    assert torch.isfinite(expected).all()
    assert torch.equal(bits(found), bits(expected))


def assert_same_bits_or_nan(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found)[~found.isnan()], bits(expected)[~expected.isnan()])


def guarded(numel, dtype):
    """Return a target, and what surrounds it in memory."""
    memory = torch.full((numel + 2 * GUARD,), 7.0, dtype=dtype)
    return memory[GUARD : GUARD + numel], (memory[:GUARD], memory[GUARD + numel :])


class Problem:
    """Spans for an Adam step from random gradients and states; parameter i makes step 2 + 5 * i."""

    def __init__(self, sizes=SIZES, dtype=torch.bfloat16, on_first_step=False):
        generator = torch.Generator().manual_seed(len(sizes))
        random = [torch.randn(4, size, generator=generator) for size in sizes]
        self.grads = [r[0].clone() for r in random]
        self.mains = [r[1].clone() for r in random]
        self.exp_avgs = [r[2] * 0.1 * (not on_first_step) for r in random]
        self.exp_avg_sqs = [r[3].square() * 0.1 * (not on_first_step) for r in random]
        self.models = None if dtype is None else [m.to(dtype) for m in self.mains]
        self.steps = [torch.tensor(1.0 if on_first_step else 2.0 + 5 * i) for i in range(len(sizes))]

    def spans(self):
        return Spans(self.grads, self.mains, [self.exp_avgs, self.exp_avg_sqs], self.models, self.steps)

    def written(self):
        return [*self.mains, *self.exp_avgs, *self.exp_avg_sqs, *(self.models or [])]

    def torch_optimizer(self, rule):
        """Return torch's own optimizer in the same place: its parameters, before their next step."""
        parameters = [torch.nn.Parameter(main.clone()) for main in self.mains]
        cls = torch.optim.AdamW if rule.is_decoupled else torch.optim.Adam
        betas = (rule.beta1, rule.beta2)
        optimizer = cls(parameters, rule.lr, betas, rule.eps, rule.weight_decay, foreach=False)
        for parameter, m, v, step in zip(parameters, self.exp_avgs, self.exp_avg_sqs, self.steps, strict=True):
            optimizer.state[parameter] = {"step": step - 1, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        return optimizer, parameters


def reference_step(optimizer, parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()


@pytest.fixture
def both_contract():
    """Skip where torch's CPU kernels were built without FMA, or the interpreter's fma rounds twice."""
    # No GPU's does. A torch built for CUDA brings its own Triton; before 3.9 the interpreter multiplied, then added.
    x = torch.full((64,), 1 + 2.0**-12)  # x * x needs 25 bits
    once = 2.0**-11 + 2.0**-24
    if not bool((torch.full((64,), -1.0).addcmul(x, x) == once).all()):
        pytest.skip(f"torch does not contract on this CPU ({torch.backends.cpu.get_cpu_capability()})")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    factor, minus_one = (interpreter.TensorHandle(t.numpy(), tl.float32) for t in (x, torch.full((64,), -1.0)))
    if not bool((interpreter.interpreter_builder.create_fma(factor, factor, minus_one).data == once).all()):
        pytest.skip(f"the fma of Triton {triton.__version__}'s interpreter rounds twice; 3.9 and later round once")


@pytest.fixture
def exact_sqrt(monkeypatch):
    """Let torch's optimizers take the correctly rounded square root.

    Rounding a float64 root to float32 gives it, since 53 >= 2 * 24 + 2 (Figueroa, When is double rounding innocuous?).
    """
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda tensor: tensor.double().pow(0.5).float())


# ---- scale_cast_


@pytest.mark.parametrize("factor", [None, 0.3], ids=["cast", "scaled"])
@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_scale_cast_equals_torch_around_every_block_boundary(ops, dtype, factor):
    sources = [torch.randn(numel) for numel in BOUNDARIES]
    targets, guards = zip(*(guarded(numel, dtype) for numel in BOUNDARIES), strict=True)
    scale = None if factor is None else torch.tensor(factor)
    before = [source.clone() for source in sources]
    ops.scale_cast_(targets, sources, scale)
    for target, source, guard, old in zip(targets, sources, guards, before, strict=True):
        assert_same_bits(target, (source if scale is None else source * scale).to(dtype))
        assert all((side == 7.0).all() for side in guard)
        assert torch.equal(source, old)


def test_scaling_in_place_equals_torch(ops):
    tensors = [torch.randn(numel) for numel in BOUNDARIES]
    expected = [tensor * torch.tensor(0.3) for tensor in tensors]
    ops.scale_cast_(tensors, tensors, torch.tensor(0.3))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_scaled_cast_rounds_the_product_before_the_cast(ops):
    source = torch.randn(200_000)
    factor = torch.tensor(1 / 3)
    target = torch.empty_like(source, dtype=torch.float16)
    ops.scale_cast_([target], [source], factor)
    assert_same_bits(target, (source * factor).half())
    in_one_rounding = torch.from_numpy((source.double() * factor.double()).numpy().astype(np.float16))
    assert (target != in_one_rounding).any()


def test_factor_is_converted_like_torch_ops_does(ops):
    source, target = torch.randn(100), torch.empty(100)
    ops.scale_cast_([target], [source], torch.tensor([1 / 3], dtype=torch.float64))
    assert_same_bits(target, source * torch.tensor(1 / 3))
    with pytest.raises(ValueError, match=r"factor is .*reads one element"):
        ops.scale_cast_([target], [source], torch.ones(2))


def test_every_bfloat16_and_its_neighbourhood_round_as_in_torch(ops):
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).view(-1, 1) * 2**16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)  # exact, around ties, the next's edge
    source = (high + low).view(torch.float32).flatten()
    target = torch.empty_like(source, dtype=torch.bfloat16)
    ops.scale_cast_([target], [source])
    expected = source.bfloat16()
    regimes = [source == 0, source.isnan(), source.isinf(), (source.abs() < 2.0**-126) & (source != 0)]
    assert all(regime.any() for regime in regimes)
    assert (expected.isinf() & source.isfinite()).any()
    assert_same_bits_or_nan(target, expected)
    truncated = (bits(source) >> 16).to(torch.int16)
    assert (bits(expected)[~source.isnan()] != truncated[~source.isnan()]).any()


def test_every_float16_and_its_ties_round_as_in_torch(ops):
    finite = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    following = torch.cat([finite[1:], torch.tensor([65536.0])])  # the tie above 65504 goes to inf
    middle = (finite + following) / 2
    others = torch.tensor([math.inf, math.nan, 3e38, 1e-40, 2.0**-149, 2.0**-25])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    source = torch.cat([finite, middle, middle.nextafter(up), middle.nextafter(down), others])
    source = torch.cat([source, -source])
    target = torch.empty_like(source, dtype=torch.float16)
    ops.scale_cast_([target], [source])
    expected = source.half()
    assert (expected.isinf() & source.isfinite()).any()
    assert ((expected.abs() < 2.0**-14) & (expected != 0)).any()
    assert_same_bits_or_nan(target, expected)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_special_values_pass_through_scaling(ops, dtype):
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3.4e38, -65504.0, 65520.0, 1.0]
    source = torch.tensor(values)
    for factor in (1.0, -1.0, 0.0, 2.0, 0.5, math.inf, math.nan):
        target = torch.empty_like(source, dtype=dtype)
        ops.scale_cast_([target], [source], torch.tensor(factor))
        assert_same_bits_or_nan(target, (source * torch.tensor(factor)).to(dtype))


def test_dense_tensors_of_any_stride_order_are_cast(ops):
    sources = [torch.randn(30, 50).t(), torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last), torch.randn(())]
    sources.append(torch.randn(3000)[100:2500].view(24, 100).t())
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    assert [t.stride() for t in targets] == [s.stride() for s in sources]
    assert sum(not source.is_contiguous() for source in sources) == 3
    ops.scale_cast_(targets, sources, torch.tensor(0.7))
    for target, source in zip(targets, sources, strict=True):
        assert_same_bits(target, (source * torch.tensor(0.7)).bfloat16())


@pytest.mark.parametrize(
    ("target", "source", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64), TypeError, "source is torch.float64"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), TypeError, "source is torch.bfloat16"),
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4), TypeError, "target is torch.float64"),
        (torch.zeros(4), torch.zeros(5), ValueError, "equal shapes"),
        (torch.zeros(3, 2), torch.zeros(2, 3).t(), ValueError, "equal shapes"),
        (torch.zeros(4), torch.zeros(4, device="meta"), ValueError, "devices"),
        (torch.zeros(8)[::2], torch.zeros(8)[::2], ValueError, "dense"),
        (torch.zeros(1).expand(4), torch.zeros(1).expand(4), ValueError, "dense"),
    ],
)
def test_scale_cast_refuses_by_name(ops, target, source, error, message):
    fine = torch.zeros(3)
    with pytest.raises(error, match=message):
        ops.scale_cast_([fine, target], [torch.ones(3), source])
    assert (fine == 0).all()  # refused before anything was written


# ---- fused_step_


@pytest.mark.parametrize("is_decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.5, 0.9), (0.0, 0.0)], ids=str)
def test_steps_have_the_bits_of_torch_but_for_its_square_root(
    ops, both_contract, exact_sqrt, is_decoupled, weight_decay, betas
):
    rule = Adam(1e-2, *betas, eps=1e-3, weight_decay=weight_decay, is_decoupled=is_decoupled)
    problem = Problem(on_first_step=betas == (0.9, 0.999))
    optimizer, parameters = problem.torch_optimizer(rule)
    for number in range(3):
        grads = [grad.roll(number) * 3.0**number for grad in problem.grads]
        reference_step(optimizer, parameters, grads)
        spans = problem.spans()
        ops.fused_step_(rule, Spans(grads, spans.mains, spans.states, spans.models, spans.steps))
        for i, parameter in enumerate(parameters):
            assert_same_bits(problem.mains[i], parameter.detach())
            assert_same_bits(problem.exp_avgs[i], optimizer.state[parameter]["exp_avg"])
            assert_same_bits(problem.exp_avg_sqs[i], optimizer.state[parameter]["exp_avg_sq"])
            assert_same_bits(problem.models[i], parameter.detach().bfloat16())
            assert problem.steps[i] == optimizer.state[parameter]["step"]
        problem.steps = [step + 1 for step in problem.steps]


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["AdamW", "Adam"])
def test_only_the_square_root_parts_a_step_from_torch_untouched(ops, both_contract, rule):
    # torch's root (MKL's) is within 1 ulp: 2**-23 relative to ours. Dividing, adding eps and dividing again may each
    # turn that into one ulp more of the update, and the last addition into one of the result.
    problem = Problem(sizes=(30_000,))
    optimizer, (parameter,) = problem.torch_optimizer(rule)
    before = parameter.detach().clone()
    reference_step(optimizer, [parameter], problem.grads)
    ops.fused_step_(rule, problem.spans())
    assert_same_bits(problem.exp_avgs[0], optimizer.state[parameter]["exp_avg"])
    assert_same_bits(problem.exp_avg_sqs[0], optimizer.state[parameter]["exp_avg_sq"])
    expected = parameter.detach()
    kept = before.double() * (1 - rule.lr * rule.weight_decay if rule.is_decoupled else 1)
    update = (expected.double() - kept).abs()
    bound = 1.001 * 2.0**-23 * (4 * update + expected.double().abs())
    assert torch.isfinite(problem.mains[0]).all()
    assert ((problem.mains[0].double() - expected.double()).abs() <= bound).all()


def float64_step(rule, grad, main, exp_avg, exp_avg_sq, step, *, eps_inside=False):
    """Return main, exp_avg, exp_avg_sq after the step in float64, and bounds on what a float32 step errs by."""
    u = 2.0**-24
    g, p, m, v = (tensor.double() for tensor in (grad, main, exp_avg, exp_avg_sq))
    g_error = torch.zeros_like(g)
    if rule.is_decoupled:
        p = p * (1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        g = g + rule.weight_decay * p
        g_error = u * (rule.weight_decay * p.abs() + g.abs())
    w1, w2 = 1 - rule.beta1, 1 - rule.beta2
    difference = (g - m).abs()
    # weight, difference and sum are rounded once each; w - 1 starts from the other end, with a weight as large as beta1
    m_error = u * (2 * max(w1, 1 - w1) * difference) + max(w1, 1 - w1) * g_error + g_error * (w1 >= 0.5)
    m = m + w1 * (g - m)
    m_error = m_error + u * m.abs()
    v = v * rule.beta2 + w2 * g * g
    v_error = 4 * u * v + 2 * w2 * g.abs() * g_error  # two weights, two products, one sum; all terms positive
    s = (1 - rule.beta2**step) ** 0.5
    denom = ((v / s**2 + rule.eps**2) ** 0.5) if eps_inside else v.sqrt() / s + rule.eps
    # half of v's relative error, then root, correction, quotient, eps and sum: one rounding each
    denom_error = (v_error / v.clamp(min=1e-300) / 2 + 5 * u) * denom
    size = rule.lr / (1 - rule.beta1**step)
    update = size * m / denom
    update_error = size * m_error / denom + update.abs() * (denom_error / denom + 3 * u)
    p_error = 2 * u * p.abs() + update_error
    p = p - update
    p_error = p_error + u * p.abs()
    return (p, m, v), tuple(1.001 * error + 1e-44 for error in (p_error, m_error, v_error))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95)], ids=str)
@pytest.mark.parametrize("is_decoupled", [True, False], ids=["AdamW", "Adam"])
def test_step_errs_by_no_more_than_its_roundings(ops, is_decoupled, betas):
    rule = Adam(1e-2, *betas, eps=1e-3, weight_decay=0.1, is_decoupled=is_decoupled)
    problem = Problem(sizes=(10_000,))
    problem.steps = [torch.tensor(3.0)]
    start = [tensors[0].clone() for tensors in (problem.grads, problem.mains, problem.exp_avgs, problem.exp_avg_sqs)]
    ops.fused_step_(rule, problem.spans())
    exact, bounds = float64_step(rule, *start, step=3)
    found = (problem.mains[0], problem.exp_avgs[0], problem.exp_avg_sqs[0])
    for one, other, bound in zip(found, exact, bounds, strict=True):
        assert torch.isfinite(one).all()
        assert ((one.double() - other).abs() <= bound).all()
    (wrong, _, _), _ = float64_step(rule, *start, step=3, eps_inside=True)
    assert ((found[0].double() - wrong).abs() > bounds[0]).any()


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["AdamW", "Adam"])
def test_grad_scale_divides_gradients_as_torch_does(ops, rule):
    scale = torch.tensor(3.0)
    scaled, divided = Problem(), Problem()
    divided.grads = [grad / scale for grad in divided.grads]
    reciprocal = [grad * (1 / scale) for grad in scaled.grads]
    assert any((one != other).any() for one, other in zip(reciprocal, divided.grads, strict=True))
    ops.fused_step_(rule, scaled.spans(), grad_scale=scale)
    ops.fused_step_(rule, divided.spans())
    for one, other in zip(scaled.written(), divided.written(), strict=True):
        assert_same_bits(one, other)
    with_reciprocal = Problem()
    with_reciprocal.grads = reciprocal
    ops.fused_step_(rule, with_reciprocal.spans())
    assert any(not torch.equal(a, b) for a, b in zip(with_reciprocal.written(), scaled.written(), strict=True))


@pytest.mark.parametrize("found", [1.0, -2.0, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [None, *LOW], ids=str)
def test_found_inf_leaves_every_bit_as_it_was(ops, dtype, found):
    problem = Problem(dtype=dtype)
    problem.grads[0].fill_(math.nan)
    before = [bits(tensor).clone() for tensor in problem.written()]
    ops.fused_step_(ADAMW, problem.spans(), grad_scale=torch.tensor(2.0), found_inf=torch.tensor(found))
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(problem.written(), before, strict=True))


def test_found_inf_of_zero_changes_nothing_about_the_step(ops):
    asked, plain = Problem(), Problem()
    before = [tensor.clone() for tensor in asked.written()]
    ops.fused_step_(ADAMW, asked.spans(), found_inf=torch.tensor(0.0))
    ops.fused_step_(ADAMW, plain.spans())
    for one, other, old in zip(asked.written(), plain.written(), before, strict=True):
        assert_same_bits(one, other)
        assert one.numel() < 100 or not torch.equal(one, old)  # one element in bf16 may well stay


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_model_parameters_are_the_rounded_main_params(ops, dtype):
    problem, without = Problem(dtype=dtype), Problem(dtype=None)
    for model in problem.models:
        model.fill_(7.0)
    ops.fused_step_(ADAMW, problem.spans())
    ops.fused_step_(ADAMW, without.spans())
    for i, model in enumerate(problem.models):
        assert_same_bits(model, problem.mains[i].to(dtype))
        assert_same_bits(problem.mains[i], without.mains[i])


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("grad_scale", [None, 1.0, 3.0])
def test_gradients_are_divided_in_place_where_there_is_a_scale_and_else_not_written(ops, rule, grad_scale):
    problem = Problem()
    before = [grad.clone() for grad in problem.grads]
    scale = None if grad_scale is None else torch.tensor(grad_scale)
    ops.fused_step_(rule, problem.spans(), grad_scale=scale, found_inf=torch.tensor(0.0))
    for grad, old in zip(problem.grads, before, strict=True):
        assert_same_bits(grad, old if scale is None else old / scale)


def test_found_inf_leaves_gradients_undivided(ops):
    problem = Problem()
    before = [grad.clone() for grad in problem.grads]
    ops.fused_step_(ADAMW, problem.spans(), grad_scale=torch.tensor(3.0), found_inf=torch.tensor(1.0))
    assert all(map(torch.equal, problem.grads, before))


def test_step_writes_nothing_beside_its_spans(ops):
    problem = Problem(sizes=(BLOCK + 1,))
    kinds = ("mains", "exp_avgs", "exp_avg_sqs", "models")
    guards = []
    for kind in kinds:
        (values,) = getattr(problem, kind)
        inner, guard = guarded(values.numel(), values.dtype)
        inner.copy_(values)
        setattr(problem, kind, [inner])
        guards += guard
    plain = Problem(sizes=(BLOCK + 1,))
    ops.fused_step_(ADAMW, problem.spans())
    ops.fused_step_(ADAMW, plain.spans())
    for one, other in zip(problem.written(), plain.written(), strict=True):
        assert_same_bits(one, other)
    assert all((guard == 7.0).all() for guard in guards)


def test_nonfinite_gradients_make_nan_and_stay_where_they_are(ops):
    problem, clean = Problem(sizes=(100,)), Problem(sizes=(100,))
    problem.grads[0][3], problem.grads[0][5] = math.nan, math.inf
    ops.fused_step_(ADAMW, problem.spans())
    ops.fused_step_(ADAMW, clean.spans())
    others = torch.ones(100, dtype=torch.bool)
    others[[3, 5]] = False
    for one, other in zip(problem.written(), clean.written(), strict=True):
        assert_same_bits(one[others], other[others])
    assert problem.models[0][[3, 5]].isnan().all()


def test_kernels_get_floats_for_integer_hyper_parameters(ops, monkeypatch):
    # Triton compiles the integer 1 into a kernel as a constant, and other integers as such.
    launch, given = ops._launch, []
    monkeypatch.setattr(ops, "_launch", lambda *args, **constants: (given.extend(args), launch(*args, **constants)))
    whole, real = Problem(), Problem()
    ops.fused_step_(Adam(1, 0, 0, 1, 0, is_decoupled=True), whole.spans())
    ops.fused_step_(Adam(1.0, 0.0, 0.0, 1.0, 0.0, is_decoupled=True), real.spans())
    assert any(type(argument) is float for argument in given)
    assert not any(isinstance(argument, int) for argument in given)
    for one, other in zip(whole.written(), real.written(), strict=True):
        assert_same_bits(one, other)


def test_nothing_to_step_is_fine(ops):
    ops.fused_step_(ADAMW, Spans([], [], [[], []], None, []))
    ops.scale_cast_([], [], torch.tensor(2.0))


def test_rules_that_are_taken(ops):
    sgd = Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, is_nesterov=False)
    assert [*ops.STEPS] == [Adam]
    assert ops.takes(ADAMW)
    assert not ops.takes(sgd)
    assert ops.TAKES_FOUND_INF
    with pytest.raises(TypeError, match="rule is Sgd"):
        ops.fused_step_(sgd, Spans([], [], [[]], None, []))


@pytest.mark.parametrize(
    ("kind", "wrong", "error", "message"),
    [
        ("grads", torch.zeros(7, dtype=torch.bfloat16), TypeError, "grad of parameter 1 is torch.bfloat16"),
        ("mains", torch.zeros(7, dtype=torch.float64), TypeError, "main of parameter 1 is torch.float64"),
        ("models", torch.zeros(7), TypeError, "model of parameter 1 is torch.float32"),
        ("exp_avgs", torch.zeros(8), ValueError, "exp_avg of parameter 1"),
        ("exp_avg_sqs", torch.zeros(14)[::2], ValueError, "exp_avg_sq of parameter 1"),
        ("mains", torch.zeros(7, 1), ValueError, "main of parameter 1"),
        ("grads", torch.zeros(7, device="meta"), ValueError, "on one device"),
    ],
)
def test_step_refuses_by_name(ops, kind, wrong, error, message):
    problem = Problem()
    getattr(problem, kind)[1] = wrong
    first = [tensors[0].clone() for tensors in (problem.mains, problem.exp_avgs, problem.models)]
    with pytest.raises(error, match=message):
        ops.fused_step_(ADAMW, problem.spans())
    for tensors, old in zip((problem.mains, problem.exp_avgs, problem.models), first, strict=True):
        assert_same_bits(tensors[0], old)  # refused before anything was written


@pytest.mark.parametrize("kind", ["grads", "exp_avgs", "models", "steps"])
def test_step_refuses_lists_of_other_lengths(ops, kind):
    problem = Problem()
    getattr(problem, kind).pop()
    with pytest.raises(ValueError, match="as many mains as grads"):
        ops.fused_step_(ADAMW, problem.spans())


# ---- both


class Operations(TorchDispatchMode):
    """Records which operations of torch run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **kwargs or {})


READ = "_local_scalar_dense.default"  # what .item(), float() and bool() of a tensor come down to


def test_nothing_is_read_back_to_the_host(ops):
    problem = Problem(sizes=(100, 200))
    with Operations() as seen:
        ops.fused_step_(ADAMW, problem.spans(), grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0))
        ops.scale_cast_(problem.mains, problem.mains, torch.tensor(2.0))
    assert "stack.default" in seen.names
    assert READ not in seen.names
    with Operations() as seen:
        bool(torch.tensor(0.0))
    assert READ in seen.names


def test_written_tensors_count_as_changed_and_read_ones_do_not(ops):
    problem = Problem(sizes=(100, 200))
    written = [(tensor, tensor._version) for tensor in problem.written()]
    read = [(tensor, tensor._version) for tensor in (*problem.grads, *problem.steps)]
    ops.fused_step_(ADAMW, problem.spans())
    assert all(tensor._version > old for tensor, old in written)
    assert all(tensor._version == old for tensor, old in read)
    source, target = torch.randn(5), torch.randn(5)
    versions = source._version, target._version
    ops.scale_cast_((target,), (source,))
    assert (source._version, target._version) == (versions[0], versions[1] + 1)


def test_a_cpu_tensor_without_the_interpreter_is_refused_by_name(ops, compiled_ops):
    cpu, cuda, meta = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
    assert [ops.runs_on(device) for device in (cpu, cuda, meta)] == [True, True, False]
    assert [compiled_ops.runs_on(device) for device in (cpu, cuda, meta)] == [False, True, False]
    with pytest.raises(RuntimeError, match="do not run on cpu"):
        compiled_ops.scale_cast_([torch.zeros(3)], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="do not run on cpu"):
        compiled_ops.fused_step_(ADAMW, Problem().spans())


def test_offer_names_every_function(ops, monkeypatch):
    offered = ops.offer()
    assert offered.version == triton.__version__
    assert offered.functions == {"scale_cast_": ops.scale_cast_, "fused_step_": ops.fused_step_}
    assert {*offered.functions, *offered.missing} == set(FUNCTIONS)
    assert all(why and "\n" not in why for why in offered.missing.values())
    monkeypatch.delattr(tl, "fma")
    old = ops.offer()
    assert old.functions == {}
    assert old.missing == dict.fromkeys(FUNCTIONS, "triton.language has no fma")


def test_importing_without_triton_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="triton"):
        load_copy("triton_ops_without_triton")


@pytest.mark.parametrize("numel", [0, 1, BLOCK, BLOCK + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**40])
def test_grid_covers_every_element(ops, numel):
    assert ops.BLOCK == BLOCK
    (programs,) = ops.grid(numel)
    assert (programs - 1) * BLOCK < numel <= programs * BLOCK or numel == programs == 0
    assert programs < 2**31  # CUDA's limit on the first axis of a grid


def store_offsets(target, program, offsets_of: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK), offsets_of(program, BLOCK))


def test_offsets_beyond_two_to_the_31_do_not_overflow(ops, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = torch.zeros(BLOCK, dtype=torch.int64)
    (programs,) = ops.grid(3 * 2**31)
    assert programs * BLOCK > 2**31
    triton.jit(store_offsets)[(1,)](target, programs - 1, ops._offsets, BLOCK)
    assert torch.equal(target, torch.arange((programs - 1) * BLOCK, programs * BLOCK))


# ---- compiled for a GPU that need not be here


def compile_for_gpu(kernel, pointers, monkeypatch, tmp_path, *, numel="i64", **constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants["BLOCK"] = BLOCK
    types = {"numel": numel, **pointers, **dict.fromkeys(constants, "constexpr")}
    types = {name: types.get(name, "fp32") for name in kernel.arg_names}
    absent = {name: None for name, kind in types.items() if kind is None}
    types = {name: kind or "constexpr" for name, kind in types.items()}
    multiples = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == numel]
    aligned = {(i,): [["tt.divisibility", 16]] for i in multiples}  # of bytes, and of elements: as most weights are
    source = ASTSource(kernel, types, {**constants, **absent}, aligned)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}).asm


def assert_ieee_and_64_bit(asm):
    assert not re.findall(r"\.(?:ftz|approx|full)\b", asm["ptx"])
    block_offsets = re.findall(r"tt\.addptr .* tensor<\d+x(i\d+)>", asm["ttir"])
    assert block_offsets
    assert set(block_offsets) == {"i64"}


@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", None], ids=str)
def test_step_compiles_to_the_operations_it_promises(compiled_ops, monkeypatch, tmp_path, dtype):
    names = ("main", "grad", "exp_avg", "exp_avg_sq", "correction", "grad_scale", "found_inf")
    pointers = {**dict.fromkeys(names, "*fp32"), "model": dtype}
    asm = compile_for_gpu(compiled_ops._adam_kernel, pointers, monkeypatch, tmp_path, IS_COUPLED=True)
    assert_ieee_and_64_bit(asm)
    per_thread = BLOCK // 128
    counts = {op: len(re.findall(rf"\b{op}\.rn\.f32\b", asm["ptx"])) for op in ("fma", "div", "sqrt")}
    assert counts == {"fma": 3 * per_thread, "div": 3 * per_thread, "sqrt": per_thread}
    vectors = per_thread // 4
    assert len(re.findall(r"ld\.global\.v4\.b32", asm["ptx"])) == 4 * vectors  # 16 bytes each: 4 reads
    # 3 writes, a fourth where a scale is not 1, and the parameter
    assert len(re.findall(r"st\.global\.v4\.b32", asm["ptx"])) == 4 * vectors + (dtype is not None)


@pytest.mark.parametrize("numel", ["i32", "i64"])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16", "*fp16"])
def test_scale_cast_compiles(compiled_ops, monkeypatch, tmp_path, dtype, numel):
    pointers = {"target": dtype, "source": "*fp32", "factor": "*fp32"}
    asm = compile_for_gpu(compiled_ops._scale_cast_kernel, pointers, monkeypatch, tmp_path, numel=numel)
    assert_ieee_and_64_bit(asm)
    assert len(re.findall(r"ld\.global\.v4\.b32", asm["ptx"])) == BLOCK // 128 // 4


TRAINING = """
import torch, fusedopt
from fusedopt.backends import torch_ops

def train(backend):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.LayerNorm(40)).bfloat16()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, backend=backend, max_grad_norm=0.5)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

(model, optimizer), (twin, other) = train("triton"), train("torch")
table = optimizer._buffers.buckets[0].backend
assert table.scale_cast_ is not torch_ops.scale_cast_ and table.fused_step_ is not None
for param, reference in zip(model.parameters(), twin.parameters()):
    ours, theirs = optimizer.state[param], other.state[reference]
    assert ours["step"] == theirs["step"] == 2
    for key in ("exp_avg", "exp_avg_sq"):
        assert ours[key].isfinite().all() and torch.equal(ours[key], theirs[key]), key
    entry = next(e for e in optimizer._buffers.entries if e.param is param)
    assert torch.equal(param, entry.main_param.bfloat16())
    reference_main = next(e for e in other._buffers.entries if e.param is reference).main_param
    # Two steps; in each the update, at most 2 * lr = 0.02, is off by at most 8 roundings (root, two divisions, sum,
    # product, and torch's root by one more each way), and the sum with the weight by one on either side.
    difference = (entry.main_param - reference_main).abs()
    assert (difference <= 2 * 2**-24 * (8 * 0.02 + 2 * reference_main.abs())).all(), difference.max()
print("trained")
"""


@pytest.mark.usefixtures("both_contract")
def test_a_wrapper_with_backend_triton_trains_as_with_torch():
    """The whole road, under the interpreter: self-check, clipping on the device, the fused step, the write-back."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "trained", done.stderr
