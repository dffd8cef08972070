"""The wrapper is a torch.optim.Optimizer: everything that torch offers on one is there and behaves as on a bare one."""

import inspect
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fusedopt import FusedMainGradOptimizer

OVERRIDDEN = {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"}


def make_model(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def two_groups(model):
    return [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.02}]


def adamw(model):
    return torch.optim.AdamW(two_groups(model), lr=0.01, weight_decay=0.1)


def sgd(model):
    return torch.optim.SGD(two_groups(model), lr=0.01, momentum=0.9)


def bare_and_wrapped(make=adamw, dtype=torch.float32):
    """Return two equal models with equal optimizers, the second wrapped: ``(model, optimizer), (model, optimizer)``."""
    bare_model, wrapped_model = make_model(dtype), make_model(dtype)
    return (bare_model, make(bare_model)), (wrapped_model, FusedMainGradOptimizer(make(wrapped_model)))


def backward(model, number):
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(4, 6, generator=generator).to(next(model.parameters()).dtype)
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def train(model, optimizer, numbers):
    for number in numbers:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal_parameters(model, other):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.isfinite(ours).all(), name
        assert torch.equal(ours, theirs), name


def snapshot(model):
    return [param.detach().clone() for param in model.parameters()]


# -- methods, discovered


def public_methods(cls):
    routines = inspect.getmembers(cls, inspect.isroutine)
    return {name: method for name, method in routines if not name.startswith("_") or name in ("__repr__",)}


METHODS = public_methods(torch.optim.Optimizer)


def test_the_protocol_was_discovered():
    assert len(METHODS) >= 13
    assert set(METHODS) >= OVERRIDDEN | {"register_step_pre_hook", "register_load_state_dict_post_hook"}
    ours = {
        name for cls in FusedMainGradOptimizer.__mro__ if cls.__module__.startswith("fusedopt") for name in vars(cls)
    }
    assert set(ours) >= OVERRIDDEN  # so that the comparison below is not of torch with itself


@pytest.mark.parametrize("name", METHODS)
def test_method_of_torchs_optimizer_is_there_with_a_compatible_signature(name):
    ours = inspect.signature(getattr(FusedMainGradOptimizer, name)).parameters
    theirs = inspect.signature(METHODS[name]).parameters
    for position, (parameter, expected) in enumerate(theirs.items()):
        assert list(ours)[position] == parameter
        assert (ours[parameter].kind, ours[parameter].default) == (expected.kind, expected.default)
    for parameter in list(ours)[len(theirs) :]:
        assert ours[parameter].default is not inspect.Parameter.empty


def test_the_wrapper_is_an_optimizer_that_holds_the_models_own_parameters():
    (_, bare), (model, optimizer) = bare_and_wrapped(dtype=torch.bfloat16)
    assert isinstance(optimizer, torch.optim.Optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(param is own for param, own in zip(held, model.parameters(), strict=True))
    assert [set(group) for group in optimizer.param_groups] == [set(group) for group in bare.param_groups]


def test_defaults_and_repr_are_the_inner_optimizers():
    (_, bare), (_, optimizer) = bare_and_wrapped()
    assert optimizer.defaults == bare.defaults
    assert repr(optimizer) == repr(bare).replace("AdamW (", "FusedMainGradOptimizer (", 1)
    optimizer.param_groups[1]["lr"] = 0.125
    assert "lr: 0.125" in repr(optimizer)


def test_several_inner_optimizers_have_the_defaults_that_they_share():
    model = make_model()
    muon = torch.optim.Muon([model[0].weight], lr=0.03)
    optimizer = FusedMainGradOptimizer([muon, torch.optim.AdamW([model[2].weight], lr=0.01)])
    assert set(optimizer.defaults) == set(muon.defaults) & set(torch.optim.AdamW([model[2].weight]).defaults)
    assert optimizer.defaults["lr"] == 0.03
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.01]
    assert "momentum" in optimizer.param_groups[0]
    assert "betas" in optimizer.param_groups[1]


# -- state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_read_and_written_by_model_parameter(dtype):
    (_, _), (model, optimizer) = bare_and_wrapped(dtype=dtype)
    params = list(model.parameters())
    assert len(optimizer.state) == 0
    assert params[0] not in optimizer.state
    train(model, optimizer, range(3))
    assert len(optimizer.state) == len(params)
    assert [id(key) for key in optimizer.state] == [id(param) for param in params]
    for param in params:
        assert param in optimizer.state
        assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[param]["exp_avg"].shape == param.shape
        assert optimizer.state[param]["exp_avg"].abs().sum() > 0
    optimizer.state[params[0]]["exp_avg"].zero_()
    inner = optimizer.unwrap()
    assert inner.state[params[0]]["exp_avg"].abs().sum() == 0
    assert inner.state[params[1]]["exp_avg"].abs().sum() > 0


def test_state_can_be_assigned_and_deleted_as_on_a_stock_optimizer():
    (_, _), (model, optimizer) = bare_and_wrapped(dtype=torch.bfloat16)
    weight = model[0].weight
    optimizer.state[weight] = {"mine": 1}
    assert optimizer.state[weight] == {"mine": 1}
    del optimizer.state[weight]
    assert weight not in optimizer.state
    assert optimizer.state[weight] == {}  # a defaultdict, as torch's


# -- zero_grad, step


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_clears_as_torch_does_both_ways(foreach):
    model = make_model(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach))
    params = list(model.parameters())
    for number in range(3):
        backward(model, number)
        assert all(param.grad is param.main_grad and param.grad.abs().sum() > 0 for param in params)
        optimizer.zero_grad(set_to_none=False)
        assert all(param.grad is param.main_grad and param.grad.abs().sum() == 0 for param in params)
        backward(model, number)
        optimizer.zero_grad()
        assert all(param.grad is None for param in params)
    backward(model, 0)
    once = [param.grad.clone() for param in params]
    optimizer.zero_grad()
    backward(model, 0)
    assert all(torch.isfinite(param.grad).all() for param in params)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, once, strict=True))


@pytest.mark.parametrize("how", ["positional", "keyword"])
def test_step_evaluates_a_closure_once_with_gradients_enabled_and_returns_its_loss(how):
    (bare_model, bare), (model, optimizer) = bare_and_wrapped()
    num_calls = 0

    def closure_of(model, optimizer):
        def closure():
            nonlocal num_calls
            num_calls += 1
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            return backward(model, 7)

        return closure

    for _ in range(3):
        expected = bare.step(closure_of(bare_model, bare))
        num_calls = 0
        closure = closure_of(model, optimizer)
        loss = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
        assert num_calls == 1
        assert torch.isfinite(loss)
        assert torch.equal(loss, expected)
        assert_equal_parameters(model, bare_model)
    assert optimizer.step() is None


# -- hooks


def test_step_hooks_fire_once_with_the_wrapper_and_its_arguments():
    (_, _), (model, optimizer) = bare_and_wrapped()
    calls = []
    before = snapshot(model)

    def pre(opt, args, kwargs):
        calls.append("pre")
        assert opt is optimizer
        assert args[0] is optimizer
        assert all(torch.equal(a, b) for a, b in zip(snapshot(model), before, strict=True))

    def post(opt, args, kwargs):
        calls.append("post")
        assert opt is optimizer
        assert not any(torch.equal(a, b) for a, b in zip(snapshot(model), before, strict=True))

    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
    for number in range(3):
        before = snapshot(model)
        train(model, optimizer, [number])
    assert calls == ["pre", "post"] * 3
    for handle in handles:
        handle.remove()
    train(model, optimizer, range(3))
    assert len(calls) == 6


def test_a_step_pre_hook_may_replace_the_arguments():
    (_, _), (model, optimizer) = bare_and_wrapped()
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: (args, {"closure": lambda: "from the hook"}))
    backward(model, 0)
    assert optimizer.step() == "from the hook"


def adamw_and_muon(model):
    others = [param for param in model.parameters() if param is not model[0].weight]
    return [torch.optim.Muon([model[0].weight], lr=0.01), torch.optim.AdamW(others, lr=0.01)]


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("make", [adamw, adamw_and_muon, lbfgs], ids=lambda make: make.__name__)
def test_global_step_hooks_fire_once_a_step_with_the_wrapper(make):
    model = make_model(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(make(model))
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda opt, args, kwargs: seen.append(("pre", opt))),
        register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(("post", opt))),
    ]

    def closure():
        optimizer.zero_grad()
        return backward(model, 0)

    try:
        for _ in range(3):
            optimizer.step(closure)
    finally:
        for handle in handles:
            handle.remove()
    assert [kind for kind, _ in seen] == ["pre", "post"] * 3
    assert all(opt is optimizer for _, opt in seen)


@pytest.fixture
def _no_global_hook_stays():
    registries = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    yield
    assert registries[0] is torch_optimizer._global_optimizer_pre_hooks
    assert registries[1] is torch_optimizer._global_optimizer_post_hooks
    assert [len(registry) for registry in registries] == [0, 0]


class Within(torch.optim.Optimizer):
    """Runs ``act`` inside its step, as often as it likes."""

    act = staticmethod(lambda: None)

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1)
        self.act()


REGISTER = {"pre": register_optimizer_step_pre_hook, "post": register_optimizer_step_post_hook}


@pytest.mark.usefixtures("_no_global_hook_stays")
@pytest.mark.parametrize("kind", REGISTER)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["bare", "wrapped"])
def test_a_global_hook_removed_or_registered_inside_a_step_is_so_from_then_on_in_order(kind, is_wrapped):
    model = make_model(torch.float32)
    inner = Within(model.parameters())
    optimizer = FusedMainGradOptimizer(inner) if is_wrapped else inner
    seen, handles = [], []

    def register(name):
        handles.append(REGISTER[kind](lambda opt, args, kwargs: seen.append((name, opt))))

    for name in "abc":
        register(name)

    def act():
        handles[1].remove()
        register("d")
        register("e")
        handles[4].remove()

    def calls():
        train(model, optimizer, [0])
        found, names = {opt is optimizer for _, opt in seen}, "".join(name for name, _ in seen)
        seen.clear()
        assert found <= {True}
        return names

    inner.act = act
    assert calls() == ("acd" if kind == "post" else "abc")
    inner.act = lambda: None
    assert calls() == "acd"
    handles[0].remove()
    assert calls() == "cd"
    inner.act = handles[3].remove  # the handle of a hook that was registered inside a step
    assert calls() == ("c" if kind == "post" else "cd")
    inner.act = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, [0])
    seen.clear()
    inner.act = lambda: None
    assert calls() == "c"
    handles[2].remove()


@pytest.mark.usefixtures("_no_global_hook_stays")
def test_global_hooks_fire_for_a_step_in_another_thread_while_ones_inner_optimizer_steps():
    models = [make_model(torch.bfloat16) for _ in range(2)]
    inners = [Within(model.parameters()) for model in models]
    optimizers = [FusedMainGradOptimizer(inner) for inner in inners]
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    seen = []
    handle = register_optimizer_step_post_hook(lambda opt, args, kwargs: seen.append(opt))

    def act():  # both other steps begin and end inside this one
        inners[0].act = lambda: None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(optimizers[1].step).result()
            pool.submit(bare.step).result()

    for model in models:
        backward(model, 0)
    inners[0].act = act
    optimizers[0].step()
    handle.remove()
    assert [id(opt) for opt in seen] == [id(opt) for opt in (optimizers[1], bare, optimizers[0])]


def test_a_step_hook_of_the_inner_optimizer_keeps_firing_with_the_inner_optimizer():
    model = make_model()
    inner = adamw(model)
    seen = []
    inner.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    train(model, FusedMainGradOptimizer(inner), range(3))
    assert len(seen) == 3
    assert all(opt is inner for opt in seen)


def test_state_dict_hooks_fire_with_the_wrapper_and_may_replace_the_dict():
    (_, _), (model, optimizer) = bare_and_wrapped(dtype=torch.bfloat16)
    train(model, optimizer, range(3))
    order = []

    def pre(opt):
        order.append(("pre", opt))

    def edit_in_place(opt, state_dict):
        order.append(("post", opt))
        state_dict["note"] = 1

    def replace(opt, state_dict):
        order.append(("post", opt))
        return {**state_dict, "note": state_dict["note"] + 1}

    optimizer.register_state_dict_post_hook(replace)
    optimizer.register_state_dict_post_hook(edit_in_place, prepend=True)
    optimizer.register_state_dict_pre_hook(pre)
    state_dict = optimizer.state_dict()
    assert state_dict["note"] == 2
    assert [kind for kind, _ in order] == ["pre", "post", "post"]
    assert all(opt is optimizer for _, opt in order)


def test_load_state_dict_hooks_fire_with_the_wrapper_and_may_replace_the_dict():
    (_, _), (model, optimizer) = bare_and_wrapped(dtype=torch.bfloat16)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    order = []

    def halve_lr(opt, state_dict):
        order.append(("pre", opt))
        assert state_dict is not saved
        return {**state_dict, "param_groups": [{**g, "lr": g["lr"] / 2} for g in state_dict["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(halve_lr)
    optimizer.register_load_state_dict_post_hook(lambda opt: order.append(("post", opt)))
    optimizer.load_state_dict(state_dict=saved)
    assert [kind for kind, _ in order] == ["pre", "post"]
    assert all(opt is optimizer for _, opt in order)
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.01]
    assert [group["lr"] for group in saved["param_groups"]] == [0.01, 0.02]


# -- schedulers, discovered

ARGUMENTS = {
    "lr_lambda": lambda epoch: 0.9 ** (epoch + 1),
    "step_size": 2,
    "milestones": [2, 5],
    "gamma": 0.8,
    "total_iters": 6,
    "T_max": 6,
    "T_0": 3,
    "base_lr": 0.001,
    "max_lr": 0.02,
    "step_size_up": 3,
    "total_steps": 12,
    "patience": 0,
    "swa_lr": 0.05,
    "anneal_epochs": 4,
}


def scheduler_classes():
    base = torch.optim.lr_scheduler.LRScheduler
    values = [value for module in (torch.optim.lr_scheduler, swa_utils) for value in vars(module).values()]
    found = {value for value in values if inspect.isclass(value) and issubclass(value, base)}
    abstract = {cls for cls in found if cls.get_lr is base.get_lr and cls.step is base.step}
    return sorted(found - abstract, key=lambda cls: cls.__name__)


def make_scheduler(cls, optimizer):
    """Build a scheduler from its signature; a required argument that is not in ARGUMENTS is an error here."""
    parts = [torch.optim.lr_scheduler.LinearLR, torch.optim.lr_scheduler.ExponentialLR]
    arguments = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name == "optimizer":
            arguments[name] = optimizer
        elif name == "schedulers":
            arguments[name] = [make_scheduler(part, optimizer) for part in parts]
        elif name == "milestones" and "schedulers" in arguments:
            arguments[name] = [3]
        elif name in ARGUMENTS:
            arguments[name] = ARGUMENTS[name]
        else:
            assert parameter.default is not inspect.Parameter.empty, f"{cls.__name__} needs {name}: add it to ARGUMENTS"
    return cls(**arguments)


def step_scheduler(scheduler):
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(1.0)
    else:
        scheduler.step()


def hyper_parameters(optimizer):
    keys = ("lr", "momentum", "betas", "initial_lr")
    return [{key: group[key] for key in keys if key in group} for group in optimizer.param_groups]


def test_schedulers_were_discovered():
    names = {cls.__name__ for cls in scheduler_classes()}
    assert len(names) >= 16
    assert names >= {"LambdaLR", "OneCycleLR", "CyclicLR", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"}


@pytest.mark.parametrize("make", [adamw, sgd], ids=lambda make: make.__name__)
@pytest.mark.parametrize("cls", scheduler_classes(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("where", ["on the wrapper", "on the inner, before wrapping"])
def test_scheduler_drives_the_wrapper_as_it_drives_a_bare_optimizer(cls, make, where):
    bare_model, model = make_model(), make_model()
    bare, inner = make(bare_model), make(model)
    bare_scheduler = make_scheduler(cls, bare)
    if where == "on the wrapper":
        optimizer = FusedMainGradOptimizer(inner)
        scheduler = make_scheduler(cls, optimizer)
    else:
        scheduler = make_scheduler(cls, inner)
        optimizer = FusedMainGradOptimizer(inner)
    driven = []
    for number in range(10):
        for one_model, opt, sched in ((bare_model, bare, bare_scheduler), (model, optimizer, scheduler)):
            backward(one_model, number)
            opt.step()
            opt.zero_grad()
            step_scheduler(sched)
        assert hyper_parameters(inner if where != "on the wrapper" else optimizer) == hyper_parameters(bare)
        assert_equal_parameters(model, bare_model)
        driven.append(bare.param_groups[0]["lr"])
    assert len(set(driven)) > 1
    train(model, optimizer, [99])  # one more, so that the last values have reached both sides
    assert hyper_parameters(optimizer) == hyper_parameters(inner) == hyper_parameters(bare)


def test_a_scheduler_that_cycles_momentum_was_followed():
    (_, _), (model, optimizer) = bare_and_wrapped(sgd)
    inner = optimizer.unwrap()
    optimizer = FusedMainGradOptimizer(inner)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=12)
    seen = set()
    for number in range(6):
        train(model, optimizer, [number])
        seen.add(inner.param_groups[0]["momentum"])
        scheduler.step()
    assert len(seen) == 6


def test_one_scheduler_on_several_inner_optimizers_drives_each_as_one_of_its_own():
    bare_model, model = make_model(), make_model()
    bares, optimizer = adamw_and_muon(bare_model), FusedMainGradOptimizer(adamw_and_muon(model))
    bare_schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(bare, T_max=5) for bare in bares]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    for number in range(5):
        backward(bare_model, number)
        for bare, bare_scheduler in zip(bares, bare_schedulers, strict=True):
            bare.step()
            bare_scheduler.step()
        bare_model.zero_grad()
        train(model, optimizer, [number])
        scheduler.step()
        assert_equal_parameters(model, bare_model)
        assert hyper_parameters(optimizer) == [group for bare in bares for group in hyper_parameters(bare)]
    assert optimizer.param_groups[0]["lr"] < 0.001


# -- hyper-parameters


def test_a_value_set_on_the_wrapper_reaches_the_inner_optimizer_and_back():
    model = make_model()
    inner = adamw(model)
    optimizer = FusedMainGradOptimizer(inner)
    train(model, optimizer, [0])
    optimizer.param_groups[0]["lr"] = 0.5
    train(model, optimizer, [1])
    assert inner.param_groups[0]["lr"] == 0.5
    inner.param_groups[1]["weight_decay"] = 0.25
    train(model, optimizer, [2])
    assert optimizer.param_groups[1]["weight_decay"] == 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.125
    train(model, optimizer, [3])
    assert optimizer.unwrap().param_groups[0]["lr"] == 0.125


class SelfTuning(torch.optim.SGD):
    """Writes its own lr and a new key into its groups, as schedule-free and Prodigy do."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.5
            group["k"] = group.get("k", 0) + 1
        return loss


def test_what_the_inner_optimizer_writes_into_its_groups_shows_on_the_wrapper():
    (bare_model, bare), (model, optimizer) = bare_and_wrapped(lambda model: SelfTuning(two_groups(model), lr=1.0))
    for number in range(3):
        train(bare_model, bare, [number])
        train(model, optimizer, [number])
        assert [group["k"] for group in optimizer.param_groups] == [number + 1] * 2
        assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in bare.param_groups]
        assert_equal_parameters(model, bare_model)
    optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    train(bare_model, bare, [3])
    train(model, optimizer, [3])
    assert [group["k"] for group in optimizer.param_groups] == [4, 4]
    assert_equal_parameters(model, bare_model)


@pytest.mark.parametrize("key", ["lr", "weight_decay", "betas"])
def test_a_value_changed_on_both_sides_raises_naming_group_and_key(key):
    values = {"lr": (0.3, 0.4), "weight_decay": (0.0, 0.5), "betas": ((0.5, 0.5), (0.6, 0.6))}[key]
    model = make_model(torch.bfloat16)
    inner = adamw(model)
    optimizer = FusedMainGradOptimizer(inner)
    train(model, optimizer, range(2))
    before = snapshot(model)
    optimizer.param_groups[1][key], inner.param_groups[1][key] = values
    optimizer.param_groups[0]["lr"] = 0.75
    backward(model, 2)
    with pytest.raises(RuntimeError, match=re.escape(f"param_groups[1]['{key}'] was changed on both sides")) as caught:
        optimizer.step()
    assert all(repr(value) in str(caught.value) for value in values)
    assert "one side only" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(model), before, strict=True))
    assert inner.param_groups[0]["lr"] == 0.01  # nothing was carried
    inner.param_groups[1][key] = values[0]  # both sides say the same now
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(snapshot(model), before, strict=True))
    assert inner.param_groups[0]["lr"] == 0.75


def test_the_same_value_set_on_both_sides_is_no_conflict():
    model = make_model()
    inner = adamw(model)
    optimizer = FusedMainGradOptimizer(inner)
    optimizer.param_groups[0]["lr"] = inner.param_groups[0]["lr"] = 0.3
    train(model, optimizer, range(3))
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.3


def tensor_lr(model):
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))


def test_a_tensor_lr_is_filled_in_place_by_schedulers_by_hand_and_after_loading():
    bare_model, model = make_model(), make_model()
    bare, inner = tensor_lr(bare_model), tensor_lr(model)
    lr = inner.param_groups[0]["lr"]
    optimizer = FusedMainGradOptimizer(inner)
    bare_scheduler = torch.optim.lr_scheduler.ExponentialLR(bare, gamma=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)

    def assert_same_tensor(value):
        assert optimizer.param_groups[0]["lr"] is lr
        assert inner.param_groups[0]["lr"] is lr
        assert lr.item() == pytest.approx(value, rel=2**-23)

    for number in range(4):
        train(bare_model, bare, [number])
        train(model, optimizer, [number])
        assert_same_tensor(0.01 * 0.5**number)
        bare_scheduler.step()
        scheduler.step()
        assert_equal_parameters(model, bare_model)
    saved = deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.25  # rebound by hand to a float: the tensor is filled at the next step
    train(model, optimizer, [4])
    assert_same_tensor(0.25)
    optimizer.load_state_dict(saved)
    assert_same_tensor(0.01 * 0.5**4)
    for number in range(5, 8):
        scheduler.step()
        train(model, optimizer, [number])
        assert_same_tensor(0.01 * 0.5**number)


# -- groups


def test_a_group_added_between_steps_trains_as_on_a_bare_optimizer_with_a_scheduler_made_before():
    (bare_model, model), runs = (make_model(), make_model()), []
    for one_model in (bare_model, model):
        opt = torch.optim.AdamW(one_model[0].parameters(), lr=0.01)
        opt = opt if one_model is bare_model else FusedMainGradOptimizer(opt)
        runs.append((one_model, opt, torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)))
    for number in range(9):
        for one_model, opt, scheduler in runs:
            if number == 3:
                opt.zero_grad()
                opt.add_param_group({"params": list(one_model[2].parameters()), "weight_decay": 0.5, "lr": 0.04})
            train(one_model, opt, [number])
            one_model.zero_grad()
            scheduler.step()
        assert hyper_parameters(runs[0][1]) == hyper_parameters(runs[1][1])
        assert_equal_parameters(model, bare_model)
    optimizer = runs[1][1]
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert optimizer.param_groups[1]["weight_decay"] == 0.5
    assert optimizer.param_groups[1]["lr"] < 0.04
    assert all(param.main_grad is not None for param in model.parameters())
    assert not torch.equal(model[2].weight, make_model()[2].weight)


@pytest.mark.parametrize("form", ["tensor", "list", "generator", "named", "empty"])
def test_add_param_group_takes_what_torch_takes(form):
    model = make_model(torch.bfloat16)
    is_named = form == "named"
    first = model[0].named_parameters() if is_named else model[0].parameters()
    optimizer = FusedMainGradOptimizer(torch.optim.AdamW(first, lr=0.01))
    bare = torch.optim.AdamW(make_model()[0].named_parameters() if is_named else [nn.Parameter(torch.ones(1))], lr=0.01)
    params = {
        "tensor": lambda: model[2].weight,
        "list": lambda: [model[2].weight],
        "generator": lambda: (param for param in [model[2].weight]),
        "named": lambda: [("head.weight", model[2].weight)],
        "empty": lambda: [],
    }[form]
    before = model[2].weight.clone()
    bare.add_param_group({"params": params(), "lr": 0.02})
    optimizer.add_param_group({"params": params(), "lr": 0.02})
    added, expected = optimizer.param_groups[1], bare.param_groups[1]
    assert {key: value for key, value in added.items() if key != "params"} == {
        key: value for key, value in expected.items() if key != "params"
    }
    assert [id(param) for param in added["params"]] == [id(param) for param in expected["params"]]
    for number in range(3):
        backward(model, number)
        optimizer.step()
        model.zero_grad()
    assert torch.equal(model[2].weight, before) == (form == "empty")
    if is_named:
        assert added["param_names"] == ["head.weight"]
        del model[2].weight.main_grad
        with pytest.raises(RuntimeError, match=re.escape("parameter head.weight")):
            optimizer.step()


def refused_groups(model):
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    return {
        "again": ({"params": [model[0].weight]}, RuntimeError, "already has a main_grad"),
        "twice": ({"params": [model[2].weight, model[2].weight]}, ValueError, "is given twice"),
        "frozen twice": ({"params": [frozen, frozen]}, ValueError, "is given twice"),
        "complex": ({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]}, TypeError, "complex64"),
        "names": ({"params": [("a", model[2].weight)]}, ValueError, "with/without names"),
        "set": ({"params": {model[2].weight}}, TypeError, "ordered collections"),
    }


@pytest.mark.parametrize("case", ["again", "twice", "frozen twice", "complex", "names", "set"])
def test_a_group_that_cannot_be_added_changes_nothing(case):
    (bare_model, bare), (model, optimizer) = bare_and_wrapped(lambda model: torch.optim.AdamW(model[0].parameters()))
    train(bare_model, bare, [0])
    train(model, optimizer, [0])
    group, error, message = refused_groups(model)[case]
    with pytest.raises(error, match=re.escape(message)):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert not hasattr(model[2].weight, "main_grad")
    for number in range(3):
        train(bare_model, bare, [number])
        train(model, optimizer, [number])
    assert_equal_parameters(model, bare_model)
    assert len(optimizer.unwrap().param_groups) == 1


def test_with_several_inner_optimizers_a_group_says_which_one_it_joins():
    model = make_model()
    inners = [torch.optim.Muon([model[0].weight], lr=0.01), torch.optim.AdamW([model[0].bias], lr=0.02)]
    optimizer = FusedMainGradOptimizer(inners)
    for inner in ({}, {"inner": 2}, {"inner": "AdamW"}):
        with pytest.raises(ValueError, match=r"needed is the number of one of \(0: Muon, 1: AdamW\)"):
            optimizer.add_param_group({"params": [model[2].bias], **inner})
    optimizer.add_param_group({"params": [model[2].weight], "inner": 0, "lr": 0.5})
    optimizer.add_param_group({"params": [model[2].bias], "inner": 1})
    assert [len(inner.param_groups) for inner in inners] == [2, 2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.02, 0.5, 0.02]
    before = snapshot(model)
    train(model, optimizer, range(3))
    assert not any(torch.equal(a, b) for a, b in zip(snapshot(model), before, strict=True))
    optimizer.param_groups[2]["lr"] = 0.25
    train(model, optimizer, [3])
    assert inners[0].param_groups[1]["lr"] == 0.25


def test_a_frozen_parameter_cannot_join_a_second_inner_optimizer():
    model, frozen = make_model(), nn.Parameter(torch.ones(2), requires_grad=False)
    inners = [torch.optim.SGD([model[0].weight, frozen], lr=0.1), torch.optim.AdamW([model[2].weight])]
    optimizer = FusedMainGradOptimizer(inners)
    with pytest.raises(ValueError, match="number 1 of the group is in a group already"):
        optimizer.add_param_group({"params": [model[2].bias, frozen], "inner": 1})
    assert len(inners[1].param_groups) == 1
    train(model, optimizer, range(3))
    optimizer.add_param_group({"params": [model[2].bias], "inner": 1})
    assert [len(inner.param_groups) for inner in inners] == [1, 2]


# -- what the inner optimizer sees


class Records(torch.optim.SGD):
    """Keeps what its parameters look like inside step()."""

    def step(self, closure=None):
        self.seen = [(param, param.grad, dict(vars(param))) for param in self.param_groups[0]["params"]]
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_inner_optimizer_sees_main_params_with_main_grad_and_the_parameters_own_attributes(dtype):
    model = make_model(dtype)
    params = list(model.parameters())
    params[0].is_embedding = "yes"
    optimizer = FusedMainGradOptimizer(Records(params, lr=0.1))
    for number in range(3):
        backward(model, number)
        params[3].grad = None
        optimizer.step()
        for param, (main_param, grad, attributes) in zip(params, optimizer.seen, strict=True):
            assert isinstance(main_param, nn.Parameter)
            assert main_param.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
            assert main_param.shape == param.shape
            assert grad is (None if param is params[3] else param.main_grad)
            assert (main_param is param) == (dtype in (torch.float64, torch.float32))  # no second copy
            assert ("is_embedding" in attributes) == (param is params[0])
            assert attributes["main_grad"] is param.main_grad
        optimizer.zero_grad()


# -- the rest of the object


class WithExtras(torch.optim.SGD):
    """Has what stock optimizers have not."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.extra = [1, 2]

    @property
    def num_params(self):
        return sum(len(group["params"]) for group in self.param_groups)

    def scaled(self, factor, *, plus=0):
        return factor * 2 + plus


def test_unknown_attributes_fall_through_to_the_inner_optimizer():
    (_, _), (_, optimizer) = bare_and_wrapped(lambda model: WithExtras(model.parameters(), lr=0.1))
    assert optimizer.extra == [1, 2]
    assert optimizer.num_params == 4
    assert optimizer.scaled(3, plus=1) == 7
    assert not hasattr(optimizer, "no_such_thing")
    with pytest.raises(AttributeError, match=r"FusedMainGradOptimizer nor its inner optimizer has .*'no_such_thing'"):
        _ = optimizer.no_such_thing


def test_with_several_inner_optimizers_the_first_that_has_an_attribute_answers():
    model = make_model()
    optimizer = FusedMainGradOptimizer(
        [torch.optim.AdamW(model[0].parameters()), WithExtras(model[2].parameters(), lr=0.1)]
    )
    assert optimizer.extra == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy", [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_a_copied_model_and_optimizer_train_on_as_the_originals(copy, dtype):
    model = make_model(dtype)
    optimizer = FusedMainGradOptimizer(adamw(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # instance attribute on `step`
    train(model, optimizer, range(3))
    scheduler.step()
    copied_model, copied = copy((model, optimizer))
    assert isinstance(copied, FusedMainGradOptimizer)
    assert hyper_parameters(copied) == hyper_parameters(optimizer)
    assert copied.param_groups[0]["params"][0] is copied_model[0].weight
    for number in range(3, 6):
        backward(copied_model, number)
        assert all(param.grad is param.main_grad for param in copied_model.parameters())
        assert all(param.grad is None for param in model.parameters())
        copied.step()
        copied.zero_grad()
    train(model, optimizer, range(3, 6))
    assert_equal_parameters(copied_model, model)
