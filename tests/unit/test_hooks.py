"""Hooks on the wrapper, on the inner optimizer and on all optimizers fire as on a bare one, once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fusedopt import FusedMainGradOptimizer
from tests.compare import values
from tests.models import Mlp, backward, train
from tests.protocol_cases import adamw, adamw_and_muon, bare_and_wrapped


def test_step_hooks_fire_once_with_the_wrapper_and_its_arguments():
    (_, _), (model, optimizer) = bare_and_wrapped()
    calls = []
    before = values(model)

    def pre(opt, args, kwargs):
        calls.append("pre")
        assert opt is optimizer
        assert args[0] is optimizer
        assert all(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))

    def post(opt, args, kwargs):
        calls.append("post")
        assert opt is optimizer
        assert not any(torch.equal(a, b) for a, b in zip(values(model), before, strict=True))

    handles = [optimizer.register_step_pre_hook(pre), optimizer.register_step_post_hook(post)]
    for number in range(3):
        before = values(model)
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


def lbfgs(model):
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize("make", [adamw, adamw_and_muon, lbfgs], ids=lambda make: make.__name__)
def test_global_step_hooks_fire_once_a_step_with_the_wrapper(make):
    model = Mlp(torch.bfloat16, has_norm=False)
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
    model = Mlp(torch.float32, has_norm=False)
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
    models = [Mlp(torch.bfloat16, has_norm=False) for _ in range(2)]
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
    model = Mlp(torch.float32, has_norm=False)
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
