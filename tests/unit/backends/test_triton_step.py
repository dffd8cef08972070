"""Triton's one-pass step: bit by bit torch's, in Triton's interpreter, and within bounds of float64."""

import math

import pytest
import torch

from fusedopt.backends.offers import Adam, Sgd, StepTensors
from tests.compare import bits
from tests.triton_cases import ADAM, ADAMW, BLOCK, LOW, Problem, assert_same_bits, guarded

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton (Linux only)")
pytestmark = pytest.mark.usefixtures("numpy_overflows_silently")


@pytest.fixture
def exact_sqrt(monkeypatch):
    """Let torch's optimizers take the correctly rounded square root.

    Rounding a float64 root to float32 gives it, since 53 >= 2 * 24 + 2 (Figueroa, When is double rounding innocuous?).
    """
    monkeypatch.setattr(torch.Tensor, "sqrt", lambda tensor: tensor.double().pow(0.5).float())


def reference_step(optimizer, parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()


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
        operands = problem.operands()
        ops.fused_step_(rule, StepTensors(grads, operands.mains, operands.states, operands.models, operands.steps))
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
    ops.fused_step_(rule, problem.operands())
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
    ops.fused_step_(rule, problem.operands())
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
    ops.fused_step_(rule, scaled.operands(), grad_scale=scale)
    ops.fused_step_(rule, divided.operands())
    for one, other in zip(scaled.written(), divided.written(), strict=True):
        assert_same_bits(one, other)
    with_reciprocal = Problem()
    with_reciprocal.grads = reciprocal
    ops.fused_step_(rule, with_reciprocal.operands())
    assert any(not torch.equal(a, b) for a, b in zip(with_reciprocal.written(), scaled.written(), strict=True))


@pytest.mark.parametrize("found", [1.0, -2.0, math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", [None, *LOW], ids=str)
def test_found_inf_leaves_every_bit_as_it_was(ops, dtype, found):
    problem = Problem(dtype=dtype)
    problem.grads[0].fill_(math.nan)
    before = [bits(tensor).clone() for tensor in problem.written()]
    ops.fused_step_(ADAMW, problem.operands(), grad_scale=torch.tensor(2.0), found_inf=torch.tensor(found))
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(problem.written(), before, strict=True))


def test_found_inf_of_zero_changes_nothing_about_the_step(ops):
    asked, plain = Problem(), Problem()
    before = [tensor.clone() for tensor in asked.written()]
    ops.fused_step_(ADAMW, asked.operands(), found_inf=torch.tensor(0.0))
    ops.fused_step_(ADAMW, plain.operands())
    for one, other, old in zip(asked.written(), plain.written(), before, strict=True):
        assert_same_bits(one, other)
        assert one.numel() < 100 or not torch.equal(one, old)  # one element in bf16 may well stay


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_model_parameters_are_the_rounded_main_params(ops, dtype):
    problem, without = Problem(dtype=dtype), Problem(dtype=None)
    for model in problem.models:
        model.fill_(7.0)
    ops.fused_step_(ADAMW, problem.operands())
    ops.fused_step_(ADAMW, without.operands())
    for i, model in enumerate(problem.models):
        assert_same_bits(model, problem.mains[i].to(dtype))
        assert_same_bits(problem.mains[i], without.mains[i])


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("grad_scale", [None, 1.0, 3.0])
def test_gradients_are_divided_in_place_where_there_is_a_scale_and_else_not_written(ops, rule, grad_scale):
    problem = Problem()
    before = [grad.clone() for grad in problem.grads]
    scale = None if grad_scale is None else torch.tensor(grad_scale)
    ops.fused_step_(rule, problem.operands(), grad_scale=scale, found_inf=torch.tensor(0.0))
    for grad, old in zip(problem.grads, before, strict=True):
        assert_same_bits(grad, old if scale is None else old / scale)


def test_found_inf_leaves_gradients_undivided(ops):
    problem = Problem()
    before = [grad.clone() for grad in problem.grads]
    ops.fused_step_(ADAMW, problem.operands(), grad_scale=torch.tensor(3.0), found_inf=torch.tensor(1.0))
    assert all(map(torch.equal, problem.grads, before))


def test_step_writes_nothing_beside_its_operands(ops):
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
    ops.fused_step_(ADAMW, problem.operands())
    ops.fused_step_(ADAMW, plain.operands())
    for one, other in zip(problem.written(), plain.written(), strict=True):
        assert_same_bits(one, other)
    assert all((guard == 7.0).all() for guard in guards)


def test_nonfinite_gradients_make_nan_and_stay_where_they_are(ops):
    problem, clean = Problem(sizes=(100,)), Problem(sizes=(100,))
    problem.grads[0][3], problem.grads[0][5] = math.nan, math.inf
    ops.fused_step_(ADAMW, problem.operands())
    ops.fused_step_(ADAMW, clean.operands())
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
    ops.fused_step_(Adam(1, 0, 0, 1, 0, is_decoupled=True), whole.operands())
    ops.fused_step_(Adam(1.0, 0.0, 0.0, 1.0, 0.0, is_decoupled=True), real.operands())
    assert any(type(argument) is float for argument in given)
    assert not any(isinstance(argument, int) for argument in given)
    for one, other in zip(whole.written(), real.written(), strict=True):
        assert_same_bits(one, other)


def test_nothing_to_step_is_fine(ops):
    ops.fused_step_(ADAMW, StepTensors([], [], [[], []], None, []))
    ops.scale_cast_([], [], torch.tensor(2.0))


def test_rules_that_are_taken(ops):
    sgd = Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, is_nesterov=False)
    assert [*ops.STEPS] == [Adam]
    assert ops.takes(ADAMW)
    assert not ops.takes(sgd)
    assert ops.TAKES_FOUND_INF
    with pytest.raises(TypeError, match="rule is Sgd"):
        ops.fused_step_(sgd, StepTensors([], [], [[]], None, []))


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
        ops.fused_step_(ADAMW, problem.operands())
    for tensors, old in zip((problem.mains, problem.exp_avgs, problem.models), first, strict=True):
        assert_same_bits(tensors[0], old)  # refused before anything was written


@pytest.mark.parametrize("kind", ["grads", "exp_avgs", "models", "steps"])
def test_step_refuses_lists_of_other_lengths(ops, kind):
    problem = Problem()
    getattr(problem, kind).pop()
    with pytest.raises(ValueError, match="as many mains as grads"):
        ops.fused_step_(ADAMW, problem.operands())
