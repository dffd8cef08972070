"""main_params held as the weight and 16 more bits: every bit as where they are whole, at 2 bytes a parameter less."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import fusedopt
from fusedopt import FusedMainGradOptimizer
from fusedopt.buffers import bucket

SHAPES = ((300, 20), (7,), (600, 500), (16, 3, 3, 3), (), (0, 4))
STEPS = 6


def make_params(dtype=torch.bfloat16, seed=0, *, with_empty=True):
    torch.manual_seed(seed)
    shapes = SHAPES if with_empty else SHAPES[:-1]
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    params[3] = nn.Parameter(params[3].detach().to(memory_format=torch.channels_last))
    return [*params, nn.Parameter(torch.randn(33))]  # an fp32 one beside them


class GroupCounting(torch.optim.Optimizer):
    """Counts its steps in its groups and in itself, and decays its learning rate by both."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "num_steps": 0})
        self.num_calls = 0

    @torch.no_grad()
    def step(self):
        self.num_calls += 1
        for group in self.param_groups:
            group["num_steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / (group["num_steps"] + self.num_calls))


class CountingFromItsFirstStep(torch.optim.Optimizer):
    """Has no counter before its first step, as many have that are not torch's."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        self.num_calls = getattr(self, "num_calls", 0) + 1
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / (group["step"] + self.num_calls))


class Drawing(torch.optim.Optimizer):
    """Draws a random number for each parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad * torch.randn(()), alpha=-group["lr"])


class Rebinding(torch.optim.Optimizer):
    """Puts a new tensor, contiguous, in the place of each parameter's memory."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = (param.data - group["lr"] * param.grad).contiguous()


INNERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True, amsgrad=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "Rprop": lambda groups: torch.optim.Rprop(groups, lr=1e-2),
    "ASGD": torch.optim.ASGD,
    "counts in its groups": GroupCounting,
    "draws random numbers": Drawing,
    "puts new tensors in place": Rebinding,
    "counts from its first step": CountingFromItsFirstStep,
}


def wrap(params, make, main_param, **more):
    groups = [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": 3e-3}]
    if make in (GroupCounting, CountingFromItsFirstStep, Drawing, Rebinding):
        groups[0].pop("weight_decay")
    return FusedMainGradOptimizer(make(groups), main_param=main_param, bucket_mib=1, max_grad_norm=1.0, **more)


def feed(params, step):
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator)
        if (step + number) % 5:
            param.grad = grad


def train(optimizer, params, steps):
    for step in steps:
        feed(params, step)
        optimizer.step()
        optimizer.zero_grad()


def assert_same_state(one, other):
    assert one.keys() == other.keys()
    for number, values in one["state"].items():
        assert values.keys() == other["state"][number].keys()
        for key, value in values.items():
            same = other["state"][number][key]
            if isinstance(value, torch.Tensor):
                assert torch.isfinite(value).all()
                assert torch.equal(value, same), (number, key)
            else:
                assert value == same


def only_ties_differ(model, other, main):
    """Return whether weights differ where main_param lies just between two of them, and nowhere else."""
    is_tie = (main.view(torch.int32) & 0xFFFF) == 0x8000
    return bool(((model == other) | is_tie).all())


@pytest.mark.parametrize("name", INNERS)
def test_main_params_and_state_have_every_bit_that_they_have_whole(name):
    found = {}
    for main_param in ("float32", "split"):
        params = make_params(with_empty=name != "Adafactor")  # which itself divides by their size
        optimizer = wrap(params, INNERS[name], main_param)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            train(optimizer, params, [step])
            scheduler.step()
        found[main_param] = params, optimizer.state_dict(), optimizer
    (whole, expected, bare), (params, got, optimizer) = found["float32"], found["split"]
    assert_same_state(expected, got)
    assert [group["lr"] for group in bare.param_groups] == [group["lr"] for group in optimizer.param_groups]
    mains = [got["state"].get(number, {}).get("main_param") for number in range(len(params))]
    for one, other, main in zip(whole, params, mains, strict=True):
        assert main is None or only_ties_differ(one, other, main)


def test_matrix_optimizers_beside_others_step_on_their_own():
    found = {}
    for main_param in ("float32", "split"):
        params = make_params()
        matrices = [params[0], params[2]]
        others = [param for param in params if all(param is not matrix for matrix in matrices)]
        inner = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-2)]
        optimizer = FusedMainGradOptimizer(
            inner, main_param=main_param, max_grad_norm=1.0, gradient_accumulation_steps=2
        )
        for step in range(2 * STEPS):
            for number, param in enumerate(params):
                (
                    param.float() * torch.cos(torch.arange(param.numel()) + step + number).view(param.shape)
                ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[main_param] = optimizer.state_dict()
    assert_same_state(found["float32"], found["split"])


def test_a_parameter_that_moved_to_another_group_is_stepped_by_its_settings():
    found = {}
    for main_param in ("float32", "split"):
        params = make_params()
        optimizer = wrap(params, INNERS["AdamW"], main_param)
        train(optimizer, params, range(2))
        moved = optimizer.param_groups[1]["params"].pop(0)
        optimizer.param_groups[0]["params"].append(moved)
        train(optimizer, params, range(2, 4))
        found[main_param] = optimizer.state_dict()
    assert_same_state(found["float32"], found["split"])


def test_it_takes_two_bytes_a_parameter_less():
    sizes = {}
    for main_param in ("float32", "split"):
        params = [nn.Parameter(torch.zeros(2**20, dtype=torch.bfloat16))]
        optimizer = FusedMainGradOptimizer(torch.optim.AdamW(params), main_param=main_param)
        train(optimizer, params, [1])
        sizes[main_param] = optimizer.memory_report()
    assert sizes["split"]["main_param"] == 2 * 2**20
    assert sizes["float32"]["bytes_per_param"] - sizes["split"]["bytes_per_param"] == 2
    assert 16 <= sizes["split"]["bytes_per_param"] < 16.001


@pytest.mark.parametrize("source", ["float32", "split"])
@pytest.mark.parametrize("target", ["float32", "split"])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_checkpoint_of_either_resumes_in_either(source, target, model_first, tmp_path):
    params = make_params()
    optimizer = wrap(params, INNERS["AdamW"], source)
    train(optimizer, params, range(3))
    torch.save({"model": params, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)

    resumed = make_params(seed=1)
    again = wrap(resumed, INNERS["AdamW"], target)

    def load_model():
        with torch.no_grad():
            for param, value in zip(resumed, saved["model"], strict=True):
                param.copy_(value)

    if model_first:
        load_model()
    again.load_state_dict(saved["optimizer"])
    if not model_first:
        load_model()
    train(optimizer, params, range(3, STEPS))
    train(again, resumed, range(3, STEPS))
    # A main_param just between two weights, of which torch chose the lower one, loses its last digit where it is split.
    tolerance = 1 if (source, target) == ("float32", "split") else 0
    for number, values in optimizer.state_dict()["state"].items():
        if "main_param" in values:
            expected, got = values["main_param"], again.state_dict()["state"][number]["main_param"]
            off = (expected.view(torch.int32) - got.view(torch.int32)).abs()
            assert off.numel() == 0 or off.max() <= 2 * tolerance  # twice where a power of two is crossed


def test_ties_that_torch_rounded_down_lose_one_digit_and_no_more():
    bits = torch.tensor([0x3F808000, 0x3F818000, 0xBF808000 - 2**32, 0x3F800001, 0x00008000], dtype=torch.int32)
    main = bits.view(torch.float32)
    model = nn.Parameter(main.bfloat16())  # to even: down, up, down, exact, down to 0
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([model], lr=0.0), main_param="split")
    state_dict = optimizer.state_dict()
    state_dict["state"] = {0: {"main_param": main.clone()}}
    optimizer.load_state_dict(state_dict)
    model.grad = torch.ones(5)
    optimizer.step()
    got = optimizer.state_dict()["state"][0]["main_param"].view(torch.int32)
    assert (got - bits).tolist() == [-1, 0, -1, 0, -1]


def test_a_copy_goes_on_by_itself():
    params = make_params()
    optimizer = wrap(params, INNERS["AdamW"], "split")
    train(optimizer, params, range(2))
    copied, copied_params = copy.deepcopy((optimizer, params))
    train(optimizer, params, range(2, 4))
    train(copied, copied_params, range(2, 4))
    assert_same_state(optimizer.state_dict(), copied.state_dict())


def test_unwrap_leaves_the_model_and_bf16_state():
    params = make_params()
    optimizer = wrap(params, INNERS["AdamW"], "split")
    train(optimizer, params, range(2))
    before = [param.detach().clone() for param in params]
    inner = optimizer.unwrap()
    assert all(map(torch.equal, before, params))
    assert inner.state[params[0]]["exp_avg"].dtype is torch.bfloat16
    assert inner.param_groups[0]["params"][0] is params[0]


@pytest.mark.parametrize("how", ["seen", "through .data"])
def test_weights_set_to_zero_stay_finite(how):
    param = nn.Parameter(-torch.rand(4096).bfloat16())
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([param], lr=1e-3), main_param="split")
    train(optimizer, [param, param], [1])
    assert (optimizer._buffers.buckets[0].low < 0).any()  # 0 with such a remainder would be nan
    target = param.data if how == "through .data" else param
    with torch.no_grad():
        target[::3] = 0.0
        target[1::3] *= 0.5
    expected = param.detach().float().clone()
    param.grad = torch.zeros(4096)
    optimizer.step()
    main = optimizer.state_dict()["state"][0]["main_param"]
    assert torch.isfinite(main).all()
    assert (main[::3] == 0).all()
    assert torch.equal(main.bfloat16().float()[1::3], expected[1::3])  # at most half a step of what was there before


def test_on_a_device_nobody_waits_and_a_weight_set_to_zero_is_no_nan(monkeypatch):
    param = nn.Parameter(-torch.rand(4096).bfloat16())
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([param], lr=1e-3), main_param="split")
    train(optimizer, [param, param], [1])
    before = optimizer.state_dict()["state"][0]["main_param"]
    param.data[::3] = 0.0
    assert (optimizer._buffers.buckets[0].low[::3] < 0).any()
    monkeypatch.setattr(bucket, "answers_late", lambda device: True)
    monkeypatch.setattr(torch, "isfinite", None)  # asks, and waits for the answer
    main = optimizer._buffers.entries[0].main_value()
    monkeypatch.undo()
    assert torch.isfinite(main).all()
    assert (main[::3].abs() < 2.0**-133).all()  # which rounds to 0, too
    assert torch.equal(main[1::3], before[1::3])
    assert torch.equal(main[2::3], before[2::3])


@pytest.mark.parametrize("is_template", [False, True])
def test_torchs_checkpoint_functions_carry_them(is_template):
    found = {}
    for main_param in ("float32", "split"):
        source, net = nn.Linear(30, 20).bfloat16(), nn.Linear(30, 20).bfloat16()
        source.load_state_dict({"weight": torch.linspace(-1, 1, 600).view(20, 30), "bias": torch.ones(20)})
        first = FusedMainGradOptimizer(torch.optim.AdamW(source.parameters(), lr=1e-2), main_param=main_param)
        train(first, list(source.parameters()), range(1, 4))
        options = StateDictOptions(full_state_dict=is_template, cpu_offload=is_template)
        saved = copy.deepcopy(get_optimizer_state_dict(source, first, options=options))
        second = FusedMainGradOptimizer(torch.optim.AdamW(net.parameters(), lr=1e-2), main_param=main_param)
        net.load_state_dict(source.state_dict())
        set_optimizer_state_dict(net, second, saved, options=options)
        assert_same_state(first.state_dict(), second.state_dict())
        train(second, list(net.parameters()), range(4, 6))
        found[main_param] = second.state_dict()
    assert_same_state(found["float32"], found["split"])


@pytest.mark.filterwarnings("ignore:.*optimizer step.* were skipped:RuntimeWarning")  # by the nan of a program
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_programs_of_edits_loads_and_steps_end_as_where_main_params_are_whole(data):
    programs = data.draw(st.lists(st.sampled_from(["step", "grow", "reload", "copy", "freeze", "nan"]), max_size=8))
    runs = {}
    for main_param in ("float32", "split"):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40, 30).bfloat16()), nn.Parameter(torch.randn(50).bfloat16())]
        optimizer = FusedMainGradOptimizer(torch.optim.AdamW(params, lr=1e-2), main_param=main_param)
        for number, action in enumerate(programs):
            if action in ("step", "nan"):
                feed(params, number + 1)
                if action == "nan" and params[0].grad is not None:
                    params[0].grad[0, 0] = math.nan
                optimizer.step()
                optimizer.zero_grad()
            elif action == "grow":  # by a power of two: no tie can come of it, and none is lost
                new = nn.Parameter(torch.full((8,), 0.5 + number, dtype=torch.bfloat16))
                params.append(new)
                optimizer.add_param_group({"params": [new]})
            elif action == "reload":
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif action == "copy":
                optimizer, params = copy.deepcopy((optimizer, params))
            else:
                params[1].requires_grad_(not params[1].requires_grad)
        params[1].requires_grad_(True)
        optimizer.zero_grad()
        runs[main_param] = optimizer.state_dict()
    assert_same_state(runs["float32"], runs["split"])


# -- what cannot be held so


class Coupled(torch.optim.Optimizer):
    """Moves each parameter by what all gradients have in common."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        total = sum(param.grad.sum() for param in params)
        for param in params:
            param.sub_(total * self.param_groups[0]["lr"])


class Viewing(torch.optim.Optimizer):
    """Writes through views of its parameters that it has made once, as heavyball does."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.views = {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    view = self.views.setdefault(id(param), param.data.view(-1))
                    view.sub_(param.grad.view(-1), alpha=group["lr"])


class CountingCalls(torch.optim.Optimizer):
    """Counts calls in a tensor of its own, which nobody can tell from what it keeps for a parameter."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.num_calls = torch.zeros(())

    @torch.no_grad()
    def step(self):
        self.num_calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad * group["lr"] / self.num_calls)


class Holding(torch.optim.Optimizer):
    """Steps another optimizer, as Lookahead does."""

    def __init__(self, params):
        self.base = torch.optim.SGD(params, lr=0.1)
        super().__init__(self.base.param_groups, {})

    def step(self):
        """Step the other one."""
        self.base.step()


class Switching(torch.optim.SGD):
    """Has a train() and an eval(), as schedule-free optimizers have."""

    def train(self):
        """Set other weights."""

    def eval(self):
        """Set other weights."""


@pytest.mark.parametrize(
    ("make", "dtype", "says"),
    [
        (Coupled, torch.bfloat16, "one parameter decides about another"),
        (Viewing, torch.bfloat16, "keeps their memory"),
        (CountingCalls, torch.bfloat16, "ends elsewhere"),
        (torch.optim.LBFGS, torch.bfloat16, "evaluates its closure"),
        (Holding, torch.bfloat16, "steps a SGD that it holds"),
        (Switching, torch.bfloat16, "train\\(\\) and eval\\(\\)"),
        (torch.optim.AdamW, torch.float16, "parameter param_groups\\[0\\]\\['params'\\]\\[0\\]: float16"),
    ],
)
def test_what_would_need_all_main_params_at_once_is_refused_by_name(make, dtype, says):
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    inner = make([param])
    with pytest.raises(ValueError, match=f'main_param="split" with .*{says}'):
        FusedMainGradOptimizer(inner, main_param="split")
    assert not hasattr(param, "main_grad")
    assert inner.param_groups[0]["params"][0] is param


def test_a_hook_on_the_inner_optimizer_would_run_for_each_piece_and_is_refused():
    params = make_params()
    optimizer = wrap(params, INNERS["AdamW"], "split")
    optimizer._inner.optimizers[0].register_step_post_hook(lambda *_: None)
    feed(params, 1)
    with pytest.raises(RuntimeError, match="a step hook of the inner AdamW"):
        optimizer.step()


class Asking(torch.optim.SGD):
    """May do anything with a closure, as far as its signature tells."""

    def step(self, closure=None):
        """Step as its base does."""
        return super().step(closure)


def test_a_closure_that_may_be_evaluated_in_between_is_refused_when_it_comes():
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = FusedMainGradOptimizer(Asking([param], lr=0.5), main_param="split")
    with pytest.raises(RuntimeError, match="Asking may evaluate it when it has moved some weights"):
        optimizer.step(lambda: param.sum())
    assert param.grad is None
    param.sum().backward()
    optimizer.step()
    assert param.tolist() == [0.5] * 4


def test_an_unknown_way_to_hold_them_is_named():
    with pytest.raises(ValueError, match="main_param"):
        fusedopt.MainGradConfig(main_param="halves")
