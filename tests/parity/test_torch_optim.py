"""Wrapping never changes the mathematics: every torch optimizer, in every form, ends bit-equal to the bare one."""

import functools
import inspect
import itertools

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from fusedopt.gradients.clip import Clip
from tests import models
from tests.compare import assert_bit_equal, snapshot
from tests.models import TokenNet, token_loss_of

NUM_STEPS = 20
LATE = 3  # the step at which a parameter gets its first gradient

make_model = functools.partial(TokenNet, late=LATE, has_unused=True)
backward = functools.partial(models.backward, loss_of=token_loss_of)


def optimizer_classes():
    found = {cls for cls in vars(torch.optim).values() if inspect.isclass(cls)}
    found = {cls for cls in found if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer}
    return sorted(found, key=lambda cls: cls.__name__)


CLASSES = optimizer_classes()
ELSEWHERE = {torch.optim.SparseAdam, torch.optim.LBFGS}  # refused; driven by closures: tests of their own
NOT_ON_CPU_OR_NOT_A_FORM = {"capturable", "differentiable", "foreach", "fused"}


def base_settings(cls):
    offered = inspect.signature(cls).parameters
    wanted = {"weight_decay": 0.1, "momentum": 0.9, "initial_accumulator_value": 0.1}
    return {key: value for key, value in wanted.items() if key in offered}


def is_accepted(cls, settings):
    """Return whether a bare optimizer of this class takes ``settings`` for a CPU parameter, and a step with them."""
    param = nn.Parameter(torch.ones(2, 2))
    param.grad = torch.ones(2, 2)
    try:
        cls([param], **settings).step()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def can_start_late(cls, settings):
    """Return whether bare torch takes a parameter whose first gradient comes later (SGD's fused momentum does not)."""
    params = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))]
    bare = cls(params, **settings)
    try:
        for param in params:
            param.grad = torch.ones(2, 2)
            bare.step()
    except TypeError:
        return False
    return True


def settings_of(cls):
    """Return every form of the class, each with every boolean option that it offers, one at a time."""
    offered = inspect.signature(cls).parameters
    forms = [{}] + [{form: True} for form in ("foreach", "fused") if form in offered]
    options = [key for key, p in offered.items() if isinstance(p.default, bool) and key not in NOT_ON_CPU_OR_NOT_A_FORM]
    flags = [{}] + [{key: not offered[key].default} for key in options]
    combined = [{**base_settings(cls), **form, **flag} for form, flag in itertools.product(forms, flags)]
    return [settings for settings in combined if is_accepted(cls, settings)]


CASES = [(cls, settings) for cls in CLASSES if cls not in ELSEWHERE for settings in settings_of(cls)]


def case_id(case):
    cls, settings = case
    return "-".join([cls.__name__, *(f"{k}={v}" for k, v in settings.items() if isinstance(v, bool))])


def params_for(cls, model):
    return [param for param in model.parameters() if cls is not torch.optim.Muon or param.ndim == 2]


def two_groups(cls, model):
    params = params_for(cls, model)
    second = {"params": params[1::2], "lr": 0.003}
    if "weight_decay" in inspect.signature(cls).parameters:
        second["weight_decay"] = 0.02
    return [{"params": params[0::2]}, second]


def assert_equal_state(wrapped, model, bare, bare_model):
    for param, bare_param in zip(model.parameters(), bare_model.parameters(), strict=True):
        assert (param in wrapped.state) == (bare_param in bare.state)
        if param not in wrapped.state:
            continue
        ours, theirs = wrapped.state[param], bare.state[bare_param]
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert torch.isfinite(value).all()
                assert torch.equal(ours[key], value), key
            else:
                assert ours[key] == value, key


def train_side_by_side(cls, settings, dtype=torch.float32, num_steps=NUM_STEPS):
    """Train a bare and a wrapped optimizer with schedulers; compare after every step. Return both optimizers."""
    late = LATE if can_start_late(cls, settings) else 0
    models = [make_model(dtype, late=late), make_model(dtype, late=late)]
    before = snapshot(models[0])
    bare, wrapped = (cls(two_groups(cls, model), **settings) for model in models)
    wrapped = FusedMainGradOptimizer(wrapped)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=num_steps) for opt in (bare, wrapped)]
    for number in range(num_steps):
        for model, opt, scheduler in zip(models, (bare, wrapped), schedulers, strict=True):
            backward(model, number)
            opt.step()
            model.zero_grad()
            scheduler.step()
        assert_bit_equal(list(models[1].parameters()), list(models[0].parameters()))
    assert_equal_state(wrapped, models[1], bare, models[0])
    held = {id(param) for param in params_for(cls, models[1])}
    for name, param in models[1].named_parameters():
        should_move = id(param) in held and not name.startswith("never")
        assert torch.equal(param, before[name]) != should_move, name
    return bare, wrapped


def test_the_optimizers_of_torch_were_discovered():
    names = {cls.__name__ for cls in CLASSES}
    assert len(names) > 10
    assert names >= {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "LBFGS", "Muon"}
    assert names >= {"NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "SparseAdam"}
    assert {cls for cls, _ in CASES} == set(CLASSES) - ELSEWHERE
    forms = {
        form: {cls.__name__ for cls, settings in CASES if settings.get(form)}
        for form in ("foreach", "fused", "maximize")
    }
    assert len(forms["foreach"]) >= 11
    assert forms["fused"] >= {"Adam", "AdamW", "SGD", "Adagrad"}
    assert len(forms["maximize"]) >= 11
    assert len(MIXED) >= 2 * 11 + 4  # as it is and foreach, and the four that have a fused form
    cannot_start_late = {cls.__name__ for cls, settings in CASES if not can_start_late(cls, settings)}
    assert cannot_start_late <= {"SGD"}
    assert sum("amsgrad" in settings for _, settings in CASES) >= 6


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_wrapped_ends_bit_equal_to_bare(case):
    train_side_by_side(*case)


@pytest.fixture
def roads(monkeypatch):
    """The roads that the steps of the test took, in order."""
    taken = []
    for road in ("on_host", "on_device"):
        real = getattr(Clip, road)

        def noted(self, *args, real=real, road=road, **kwargs):
            taken.append(road)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Clip, road, noted)
    return taken


FUSED = [case for case in CASES if case[1].get("fused")]


@pytest.mark.parametrize("case", FUSED, ids=case_id)
def test_a_fused_optimizer_takes_the_road_without_a_host_read_but_for_steps_that_create_state(case, roads):
    train_side_by_side(*case, num_steps=6)
    late = LATE if can_start_late(*case) else 0
    creating = () if case[0] is torch.optim.Adagrad else (0, late)  # Adagrad has its state when it is constructed
    assert roads == ["on_host" if number in creating else "on_device" for number in range(6)]


def test_after_loading_a_state_from_before_the_first_step_the_next_step_is_decided_on_the_host(roads):
    model = make_model(late=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    wrapped = FusedMainGradOptimizer(inner)
    empty = wrapped.state_dict()
    for number in range(2):
        backward(model, number)
        wrapped.step()
        wrapped.zero_grad()
    wrapped.load_state_dict(empty)
    weight = model.hidden.weight
    backward(model, 2)
    weight.grad[0, 0] = float("inf")
    wrapped.step()
    with pytest.warns(RuntimeWarning, match="skipped because a gradient held inf or nan"):
        assert wrapped.skipped_steps == 1
    assert wrapped.state[weight].get("momentum_buffer") is None  # the fused kernel would leave one uninitialised
    wrapped.zero_grad()
    backward(model, 2)
    wrapped.step()
    assert_bit_equal([wrapped.state[weight]["momentum_buffer"]], [weight.grad])
    assert roads == ["on_host", "on_device", "on_host", "on_host"]


@pytest.mark.parametrize("case", FUSED, ids=case_id)
def test_what_a_fused_step_is_told_on_the_device_does_not_stay_with_the_inner_optimizer(case, roads):
    cls, settings = case
    model = make_model(late=LATE if can_start_late(*case) else 0)
    inner = cls(params_for(cls, model), **settings)
    wrapped = FusedMainGradOptimizer(inner, max_grad_norm=0.01)
    for number in range(LATE + 1):
        backward(model, number)
        wrapped.step()
        wrapped.zero_grad()
        assert wrapped.grad_norm > 0.01
        assert not {"grad_scale", "found_inf"} & set(vars(inner))
    assert "on_device" in roads


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls not in ELSEWHERE], ids=lambda cls: cls.__name__)
def test_wrapped_ends_bit_equal_to_bare_in_float64(cls):
    _, wrapped = train_side_by_side(cls, base_settings(cls), torch.float64, num_steps=5)
    params = [param for group in wrapped.param_groups for param in group["params"]]
    assert all(param.main_grad.dtype is torch.float64 for param in params)
    assert wrapped.grad_norm.dtype is torch.float64


@pytest.mark.parametrize("settings", [{"nonfinite": "ignore"}, {"nonfinite": "raise"}, {"max_grad_norm": 1e6}], ids=str)
@pytest.mark.parametrize("form", ["for-loop", "foreach", "fused"])
def test_a_clip_that_does_not_clip_and_the_finite_check_change_no_bit(settings, form):
    models = [make_model(), make_model()]
    flags = {} if form == "for-loop" else {form: True}
    bare, inner = (torch.optim.AdamW(two_groups(torch.optim.AdamW, model), lr=0.01, **flags) for model in models)
    wrapped = FusedMainGradOptimizer(inner, **settings)
    before = snapshot(models[0])
    for number in range(5):
        for model, opt in zip(models, (bare, wrapped), strict=True):
            backward(model, number)
            opt.step()
            opt.zero_grad()
        assert_bit_equal(list(models[1].parameters()), list(models[0].parameters()))
    assert not torch.equal(models[0].hidden.weight, before["hidden.weight"])
    if "max_grad_norm" in settings:
        assert 0 < wrapped.grad_norm.item() < 1e6


# -- one model of every dtype, layout and size


class Odd(nn.Module):
    """fp32 and fp64, channels_last, transposed, 0-d, empty: what has strides or sizes of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4).t())
        self.precise = nn.Linear(5, 3).double()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, images):
        x = self.conv(images).mean((2, 3)) @ self.transposed
        y = self.precise(x.double() * self.scale)
        return y.square().sum() + self.empty.sum()


FLAT_ONLY = {torch.optim.Muon}  # takes 2-D parameters only
DIVIDES_BY_NUMEL = {torch.optim.Adafactor}  # bare, it divides by zero for an empty parameter


MIXED = [
    (cls, form)
    for cls, form in itertools.product(CLASSES, ({}, {"foreach": True}, {"fused": True}))
    if cls not in ELSEWHERE | FLAT_ONLY and is_accepted(cls, form)
]


@pytest.mark.parametrize(("cls", "form"), MIXED, ids=[case_id(case) for case in MIXED])
def test_a_model_of_mixed_dtypes_strides_and_sizes_ends_bit_equal(cls, form):
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(Odd())
    params = [list(model.parameters()) for model in models]
    if cls in DIVIDES_BY_NUMEL:
        params = [[param for param in held if param.numel()] for held in params]
    bare, inner = (cls(held, **base_settings(cls), **form) for held in params)
    before = snapshot(models[0])
    optimizer = FusedMainGradOptimizer(inner)
    for number in range(5):
        for model, opt in zip(models, (bare, optimizer), strict=True):
            images = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(number))
            model(images.to(memory_format=torch.channels_last)).backward()
            opt.step()
            opt.zero_grad(set_to_none=bool(number % 2))
        assert_bit_equal(params[1], params[0])
    for name, param in models[1].named_parameters():
        assert param.numel() == 0 or not torch.equal(param, before[name]), name
    for param in params[1]:
        assert param.main_grad.dtype is param.dtype
        assert param.main_grad.shape == param.shape
        assert param.main_grad.stride() == param.stride()
    assert models[1].conv.weight.stride() != models[1].conv.weight.contiguous().stride()


# -- closures


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lbfgs_evaluates_the_same_closures_and_ends_bit_equal(line_search, dtype):
    runs = []
    for is_wrapped in (False, True):
        model = make_model(dtype)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)
        optimizer = FusedMainGradOptimizer(optimizer) if is_wrapped else optimizer
        losses = []

        def closure(model=model, optimizer=optimizer, losses=losses):
            optimizer.zero_grad()
            losses.append(backward(model, 1).detach())
            return losses[-1]

        returned = [optimizer.step(closure).detach() for _ in range(4)]
        runs.append((model, optimizer, losses, returned))
    (bare_model, bare, bare_losses, bare_returned), (model, wrapped, losses, returned) = runs
    assert len(losses) > 4 * 2  # the inner optimizer did ask again
    assert_bit_equal(losses, bare_losses)
    assert_bit_equal(returned, bare_returned)
    assert_bit_equal(list(model.parameters()), list(bare_model.parameters()))
    assert losses[-1] < losses[0]
    assert next(iter(wrapped.state.values()))["n_iter"] == next(iter(bare.state.values()))["n_iter"] > 0


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Rprop], ids=lambda cls: cls.__name__)
def test_an_optimizer_that_does_not_need_its_closure_ends_bit_equal_with_one(cls):
    models = [make_model(), make_model()]
    bare, inner = (cls(params_for(cls, model), lr=0.01) for model in models)
    wrapped = FusedMainGradOptimizer(inner)
    before = snapshot(models[0])
    for number in range(5):
        for model, opt in zip(models, (bare, wrapped), strict=True):

            def closure(model=model, opt=opt):
                opt.zero_grad()
                return backward(model, number)  # noqa: B023

            opt.step(closure)
        assert_bit_equal(list(models[1].parameters()), list(models[0].parameters()))
    assert not torch.equal(models[1].hidden.weight, before["hidden.weight"])


# -- refused, and several at once


def test_sparse_adam_is_refused_by_an_error_that_names_the_remedy_and_nothing_is_changed():
    embedding = nn.Embedding(5, 3, sparse=True)
    inner = torch.optim.SparseAdam(embedding.parameters())
    with pytest.raises(TypeError, match=r"SparseAdam works on sparse gradients only.*nn\.Embedding\(sparse=False\)"):
        FusedMainGradOptimizer(inner)
    assert not hasattr(embedding.weight, "main_grad")
    assert inner.param_groups[0]["params"][0] is embedding.weight
    for _ in range(3):
        embedding(torch.tensor([1, 2])).sum().backward()
        inner.step()
    assert embedding.weight.grad.is_sparse


def muon_and_adamw(model):
    matrices = [param for param in model.parameters() if param.ndim == 2 and param is not model.embed.weight]
    others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def test_muon_and_adamw_in_one_wrapper_end_bit_equal_to_the_two_bare_ones():
    bare_model, model = make_model(), make_model()
    bares, wrapped = muon_and_adamw(bare_model), FusedMainGradOptimizer(muon_and_adamw(model))
    before = snapshot(model)
    for number in range(NUM_STEPS):
        backward(bare_model, number)
        for bare in bares:
            bare.step()
        bare_model.zero_grad()
        backward(model, number)
        wrapped.step()
        wrapped.zero_grad()
        assert_bit_equal(list(model.parameters()), list(bare_model.parameters()))
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith("never"), name
    assert "momentum_buffer" in wrapped.state[model.hidden.weight]
    assert "exp_avg" in wrapped.state[model.embed.weight]


def test_muon_and_adamw_are_clipped_by_one_norm_over_both():
    """All sums of squares are whole and the norm is exactly 13, so that every way to sum gives the same bits."""
    pairs = []
    for _ in range(2):
        torch.manual_seed(0)
        pairs.append((nn.Parameter(torch.randn(12, 12)), nn.Parameter(torch.randn(25))))
    signs = [torch.randint(0, 2, p.shape) * 2.0 - 1.0 for p in pairs[0]]  # 144 + 25 = 13 ** 2

    def inners(pair):
        return [torch.optim.Muon([pair[0]], lr=0.02), torch.optim.AdamW([pair[1]], lr=0.01)]

    bares = inners(pairs[0])
    wrapped = FusedMainGradOptimizer(inners(pairs[1]), max_grad_norm=1.0)
    start = [param.detach().clone() for param in pairs[1]]
    for _ in range(5):
        for pair in pairs:
            sum((param * sign).sum() for param, sign in zip(pair, signs, strict=True)).backward()
        norm = nn.utils.clip_grad_norm_(pairs[0], 1.0)
        for bare in bares:
            bare.step()
            bare.zero_grad()
        wrapped.step()
        assert wrapped.grad_norm == norm == 13.0
        clipped = torch.cat([param.grad.flatten() for param in pairs[1]])
        assert abs(clipped.norm().item() - 1.0) < 1e-6  # coefficient 1 / (13 + 1e-6), and the rounding of a norm
        wrapped.zero_grad()
        assert_bit_equal(pairs[1], pairs[0])
    assert not any(torch.equal(a, b) for a, b in zip(pairs[1], start, strict=True))
