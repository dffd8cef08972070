"""api.md section 3: non-finite gradients, closures, host reads."""

import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fusedopt
from tests.compare import assert_bit_equal, everything
from tests.models import INNERS, Mlp, backward

# -- non-finite gradients


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("first", [True, False])
def test_skip_leaves_parameters_state_and_step_counts_untouched(bad, make, max_grad_norm, first):
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(make(model.parameters()), max_grad_norm=max_grad_norm)
    if not first:
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    before = everything(model, optimizer)
    num_states = len(optimizer.state)
    backward(model)
    model.first.bias.grad[3] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        optimizer.step()
        assert optimizer.step_was_skipped
        assert optimizer.skipped_steps == 1
    assert len(optimizer.state) == num_states
    assert_bit_equal(everything(model, optimizer), before)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert optimizer.skipped_steps == 1
    after = everything(model, optimizer)
    assert all(torch.isfinite(t).all() for t in after)
    assert not torch.equal(after[0], before[0])


def test_a_finite_gradient_whose_squares_overflow_is_no_reason_to_skip():
    param = nn.Parameter(torch.zeros(4))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=1e-30), max_grad_norm=None)
    (param * 1e30).sum().backward()
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert torch.equal(param.detach(), -(torch.full((4,), 1e30) * 1e-30))
    assert optimizer.grad_norm.item() == pytest.approx(2e30, rel=1e-6)


def test_raise_names_the_parameters_and_changes_nothing():
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.AdamW(model.named_parameters(), lr=1e-2), max_grad_norm=1.0, nonfinite="raise"
    )
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    backward(model)
    model.first.bias.grad[0] = math.nan
    model.second.weight.grad[1, 2] = math.inf
    before = everything(model, optimizer)
    with pytest.raises(FloatingPointError, match=r"in 2 parameter\(s\): first\.bias, second\.weight\."):
        optimizer.step()
    assert_bit_equal(everything(model, optimizer), before)
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_ignore_is_what_torch_does(max_grad_norm):
    models = [Mlp(torch.float32), Mlp(torch.float32)]
    bare = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    wrapped = fusedopt.FusedMainGradOptimizer(
        torch.optim.AdamW(models[1].parameters(), lr=1e-2), max_grad_norm=max_grad_norm, nonfinite="ignore"
    )
    for model in models:
        backward(model)
        model.first.bias.grad[3] = math.nan
    if max_grad_norm is not None:
        nn.utils.clip_grad_norm_(models[0].parameters(), max_grad_norm)
    for optimizer in (bare, wrapped):
        optimizer.step()
    for want, got in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(torch.isnan(want), torch.isnan(got))
        assert torch.equal(want.nan_to_num(0.0), got.nan_to_num(0.0))
    assert torch.isnan(models[1].first.bias[3])
    assert torch.isnan(models[1].first.bias).all() == (max_grad_norm is not None)  # a nan norm spreads, in torch too


def test_clipping_by_a_nan_norm_leaves_nothing_behind_for_the_next_window():
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    backward(model)
    model.first.bias.grad[3] = math.nan
    assert math.isnan(optimizer.clip_grad_norm_(1.0).item())
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    optimizer.zero_grad()
    backward(model)
    assert math.isfinite(optimizer.clip_grad_norm_(1.0).item())  # padding between parameters, too
    optimizer.step()
    assert not optimizer.step_was_skipped


def test_warnings_come_ever_more_rarely():
    param = nn.Parameter(torch.zeros(2))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0))
    warned_at = []
    for i in range(1, 20):
        param.grad = torch.full((2,), math.inf)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        if caught:
            assert str(caught[0].message).startswith(f"{i} optimizer step(s) so far were skipped")
            warned_at.append(i)
    assert warned_at == [1, 2, 4, 8, 16]


def test_a_skip_decided_on_the_device_warns_at_the_next_read():
    param = nn.Parameter(torch.zeros(2))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0, fused=True))
    param.grad = torch.ones(2)
    optimizer.step()
    param.grad.fill_(math.inf)
    optimizer.step()  # a warning here would be an error
    with pytest.warns(RuntimeWarning, match="1 optimizer step"):
        assert optimizer.skipped_steps == 1
    assert optimizer.skipped_steps == 1
    assert torch.equal(param.detach(), -torch.ones(2))


# -- host reads


class CountHostReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def host_reads(optimizer, model):
    backward(model)
    with CountHostReads() as reads:
        optimizer.step()
        optimizer.zero_grad()
    return reads.count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("max_grad_norm", [None, 1e-3, 1e6])
def test_a_fused_inner_optimizer_reads_nothing_back_after_its_first_step(dtype, max_grad_norm):
    model = Mlp(dtype)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, max_grad_norm=max_grad_norm)
    counts = [host_reads(optimizer, model) for _ in range(4)]
    assert counts == [1, 0, 0, 0]  # the step that creates state is decided on the host
    assert math.isfinite(optimizer.grad_norm.item())


def test_a_parameters_first_gradient_is_decided_on_the_host_again():
    model, late = Mlp(), nn.Linear(2, 2).bfloat16()
    inner = torch.optim.AdamW([*model.parameters(), *late.parameters()], lr=1e-2, fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    counts = [host_reads(optimizer, model) for _ in range(2)]
    late(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    counts += [host_reads(optimizer, model) for _ in range(2)]
    assert counts == [1, 0, 1, 0]


@pytest.mark.parametrize("max_grad_norm", [None, 1e-3, 1e6])
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_other_inner_optimizers_read_back_once_a_step(max_grad_norm, nonfinite):
    model = Mlp()
    # SGD reads nothing back itself; Adam's for-loop and foreach forms read their step counts.
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, max_grad_norm=max_grad_norm, nonfinite=nonfinite)
    assert [host_reads(optimizer, model) for _ in range(4)] == [1, 1, 1, 1]


def test_ignore_reads_nothing_back():
    model = Mlp()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, max_grad_norm=1e-3, nonfinite="ignore")
    assert [host_reads(optimizer, model) for _ in range(3)] == [0, 0, 0]


def test_clip_grad_norm_reads_nothing_back():
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
    backward(model)
    with CountHostReads() as reads:
        norm = optimizer.clip_grad_norm_(1e-3)
    assert reads.count == 0
    assert norm.item() > 1e-3


# -- closures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_closure_is_evaluated_once_and_clipped(dtype):
    with_closure, without = Mlp(dtype), Mlp(dtype)
    calls = []

    def run(model, optimizer, closure):
        for _ in range(3):
            if closure:

                def evaluate():
                    calls.append(torch.is_grad_enabled())
                    optimizer.zero_grad()
                    backward(model)
                    return "loss"

                assert optimizer.step(evaluate) == "loss"
            else:
                optimizer.zero_grad()
                backward(model)
                assert optimizer.step() is None

    for model, closure in ((with_closure, True), (without, False)):
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run(model, fusedopt.FusedMainGradOptimizer(inner, max_grad_norm=1e-3), closure)
    assert calls == [True] * 3
    assert_bit_equal(list(with_closure.parameters()), list(without.parameters()))
    assert not torch.equal(with_closure.first.weight, Mlp(dtype).first.weight)


class Quadratic(nn.Module):
    """Half the squared distance to a target, badly scaled, so that LBFGS evaluates often."""

    def __init__(self, dtype):
        super().__init__()
        self.x = nn.Parameter(torch.full((6,), 2.0, dtype=dtype))
        self.register_buffer("scale", torch.tensor([1.0, 4.0, 16.0, 2.0, 8.0, 1.0]))

    def forward(self):
        return 0.5 * (self.scale * (self.x.float() - 0.3).square()).sum()


def lbfgs_run(model, optimizer, steps=4):
    counts, losses = [], []

    def closure():
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        counts.append(torch.is_grad_enabled())
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
    return counts, losses


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_on_fp32_is_bit_equal_to_the_bare_one(search):
    settings = {"lr": 0.5, "max_iter": 5, "line_search_fn": search}
    models = [Quadratic(torch.float32), Quadratic(torch.float32)]
    bare = torch.optim.LBFGS(models[0].parameters(), **settings)
    wrapped = fusedopt.FusedMainGradOptimizer(torch.optim.LBFGS(models[1].parameters(), **settings))
    runs = [lbfgs_run(model, optimizer) for model, optimizer in zip(models, (bare, wrapped), strict=True)]
    assert len(runs[0][0]) > 8  # many evaluations a step
    assert runs[0] == runs[1]
    assert_bit_equal([models[0].x], [models[1].x])


def test_lbfgs_on_bf16_evaluates_the_model_at_its_trial_points():
    model = Quadratic(torch.bfloat16)
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(module.x.detach().clone()))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4))
    _, losses = lbfgs_run(model, optimizer, steps=5)
    assert losses[-1] < 0.01 * losses[0]
    assert any(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    main = optimizer._buffers.entries[0].main_param
    assert main.dtype is torch.float32
    assert torch.equal(model.x.detach(), main.detach().to(torch.bfloat16))
    state = next(iter(optimizer.state.values()))
    assert state["d"].dtype is torch.float32


def test_lbfgs_clips_around_each_evaluation():
    model = Quadratic(torch.float32)
    norms = []
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3), max_grad_norm=1e-2
    )

    def watch(inner_closure_result, *_):
        norms.append(model.x.grad.norm().item())

    model.register_forward_pre_hook(lambda *_: norms.append(None if model.x.grad is None else 0.0))
    inner_step = torch.optim.LBFGS.step.__wrapped__

    def step(self, closure):
        def watched():
            loss = closure()
            watch(loss)
            return loss

        return inner_step(self, watched)

    optimizer._inner.optimizers[0].step = step.__get__(optimizer._inner.optimizers[0])
    lbfgs_run(model, optimizer, steps=1)
    clipped = [norm for norm in norms if norm]
    assert len(clipped) == 3
    assert all(norm == pytest.approx(1e-2, rel=1e-3) for norm in clipped)


def test_a_closure_driven_step_whose_first_gradient_is_not_finite_is_left_out():
    model = Quadratic(torch.float32)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.LBFGS(model.parameters(), lr=0.5))
    before = model.x.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = model() * math.inf
        loss.backward()
        return loss

    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step(closure)
    assert optimizer.step_was_skipped
    assert torch.equal(model.x.detach(), before)
    assert not optimizer.state or not next(iter(optimizer.state.values()))


# -- one norm over several inner optimizers


def test_several_inner_optimizers_step_under_one_norm():
    matrix, vector = (nn.Parameter(torch.full(shape, 1.0, dtype=torch.bfloat16)) for shape in ((3, 3), (4,)))
    optimizer = fusedopt.FusedMainGradOptimizer(
        [torch.optim.Muon([matrix], lr=0.1), torch.optim.AdamW([vector], lr=0.1)], max_grad_norm=1.0
    )
    ((matrix * 2.0).sum() + (vector * 4.0).sum()).backward()
    optimizer.step()
    assert optimizer.grad_norm.item() == 10.0  # sqrt(9 * 4 + 4 * 16)
    assert matrix.grad[0, 0].item() == pytest.approx(0.2, rel=1e-5)
    assert vector.grad[0].item() == pytest.approx(0.4, rel=1e-5)
    assert [type(opt).__name__ for opt in optimizer._inner.optimizers] == ["Muon", "AdamW"]
    assert len(optimizer.param_groups) == 2
    assert len(optimizer.state) == 2
    assert not torch.equal(matrix.detach(), torch.ones_like(matrix))
    assert not torch.equal(vector.detach(), torch.ones_like(vector))


def test_main_params_carry_the_parameters_own_attributes():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    param.no_weight_decay = "mine"
    inner = torch.optim.SGD([param], lr=0.1)
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    (main,) = inner.param_groups[0]["params"]
    assert main is not param
    assert (main.no_weight_decay, main.dtype, main.shape) == ("mine", torch.float32, param.shape)
    seen = []
    inner.register_step_pre_hook(lambda opt, args, kwargs: seen.append(main.grad is param.main_grad))
    param.sum().backward()
    optimizer.step()
    assert seen == [True]


def test_memory_report_counts_what_was_allocated():
    model = nn.Linear(1024, 64, bias=False).bfloat16()  # 65,536 elements: no padding
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    n = 65536
    assert optimizer.memory_report() == {
        "model": 2 * n, "main_grad": 4 * n, "main_param": 4 * n, "state": 0, "total": 10 * n, "bytes_per_param": 10.0,
    }  # fmt: skip
    model(torch.ones(1, 1024, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    report = optimizer.memory_report()
    assert report["state"] == 8 * n + 4  # two moments and one step count
    assert report["bytes_per_param"] == 18.0 + 4 / n


@pytest.mark.parametrize("inner", ["AdamW", "LBFGS"])
def test_a_profile_names_the_parts_of_a_step_in_their_order(inner):
    model = nn.Linear(8, 8).bfloat16()
    optimizer = fusedopt.FusedMainGradOptimizer(getattr(torch.optim, inner)(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 8, dtype=torch.bfloat16)).float().square().sum()
        loss.backward()
        return loss

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step(closure)
    found = [event for event in profile.events() if event.name.startswith("fusedopt.")]
    ours = sorted(found, key=lambda event: event.time_range.start)
    names = list(dict.fromkeys(event.name.removeprefix("fusedopt.") for event in ours))
    assert (
        names
        == {
            "AdamW": ["reduce", "clip", "step", "write_back", "gather"],
            "LBFGS": ["reduce", "step", "gather"],  # it clips and writes back at each evaluation, inside of its step
        }[inner]
    )
