"""State of others' optimizers: Python objects, formats of their own, keys that are numbers, optimizers inside them."""

import collections
import copy

import numpy as np
import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_bit_equal, through_a_file, values
from tests.models import Mlp, loss_of, train

DTYPES = [torch.float32, torch.bfloat16]


# -- Python objects


class Projector:
    """The pattern of GaLore's projector: an object with tensors, of which one is shared by all parameters."""

    def __init__(self, shared):
        self.shared = shared
        self.sum = torch.zeros(())

    def __call__(self, grad):
        self.sum += grad.mean()
        return grad * self.shared.scale + self.sum


class Shared:
    def __init__(self):
        self.scale = torch.ones(())


Pair = collections.namedtuple("Pair", "count total")


class Keeps(torch.optim.SGD):
    """Keeps deques, numpy's scalars and arrays, a named tuple, a Counter, an object; each decides about the update."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            shared = Shared()
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(
                        queue=collections.deque(maxlen=2),
                        factor=np.float32(1.0),
                        history=np.zeros(3),
                        pair=Pair(0, 0.0),
                        seen=collections.Counter(),
                        projector=Projector(shared),
                    )
                state["queue"].append(p.grad.clone())
                state["factor"] = state["factor"] * np.float32(0.9)
                state["history"][state["seen"]["steps"] % 3] += float(state["factor"])
                state["seen"]["steps"] += 1
                state["pair"] = Pair(state["pair"].count + 1, state["pair"].total + float(state["history"].sum()))
                change = state["projector"](state["queue"][0]) * float(state["factor"]) / state["pair"].count
                p.add_(change, alpha=-group["lr"] / (1 + state["pair"].total))


@pytest.mark.filterwarnings("ignore:.*weights_only=False:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [1, 4])
def test_state_with_python_objects_resumes_bit_exact(dtype, steps):
    model = Mlp(dtype, has_norm=False)
    optimizer = FusedMainGradOptimizer(Keeps(model.parameters(), lr=0.1))
    train(model, optimizer, range(steps))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()], weights_only=False)
    other = Mlp(dtype, has_norm=False)
    resumed = FusedMainGradOptimizer(Keeps(other.parameters(), lr=0.1))
    resumed.load_state_dict(saved[1])
    other.load_state_dict(saved[0])
    for each, opt in ((model, optimizer), (other, resumed)):
        train(each, opt, range(steps, steps + 4))
    assert_bit_equal(values(model), values(other))
    for one, two in zip(optimizer._buffers.entries, resumed._buffers.entries, strict=True):
        ours, theirs = optimizer.state[one.param], resumed.state[two.param]
        assert [type(value) for value in ours.values()] == [type(value) for value in theirs.values()]
        assert ours["queue"].maxlen == theirs["queue"].maxlen == 2
        assert ours["pair"] == theirs["pair"]
        assert ours["seen"] == theirs["seen"]
        assert np.array_equal(ours["history"], theirs["history"])
    states = [resumed.state[entry.param] for entry in resumed._buffers.entries]
    assert len({id(state["projector"].shared) for state in states}) == 1  # shared by all before, and again


@pytest.mark.filterwarnings("ignore:.*weights_only=False:UserWarning")
def test_loaded_objects_are_copies():
    model = Mlp(torch.bfloat16, has_norm=False)
    optimizer = FusedMainGradOptimizer(Keeps(model.parameters(), lr=0.1))
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 5))
    for number, state in saved["state"].items():
        before = kept["state"][number]
        assert_bit_equal(state["queue"], before["queue"])
        assert np.array_equal(state["history"], before["history"])
        assert state["seen"] == before["seen"]
        assert torch.equal(state["projector"].sum, before["projector"].sum)


def test_each_class_of_object_is_named_once_with_the_parameter_and_what_to_do():
    model = Mlp(torch.bfloat16, has_norm=False)
    optimizer = FusedMainGradOptimizer(Keeps(model.named_parameters(), lr=0.1))
    train(model, optimizer, range(1))
    with pytest.warns(UserWarning, match=r"weights_only=False") as caught:
        optimizer.state_dict()
    texts = [str(warning.message) for warning in caught]
    found = [text for text in texts if "collections.deque" in text]
    assert len(found) == 1
    assert found[0].startswith("the state of parameter first.weight, 'queue' holds a collections.deque")
    assert "(Keeps)" in found[0]
    assert {text.split(" holds a ")[1].split(" ")[0] for text in texts} == {
        *("collections.deque", "numpy.float32", "numpy.ndarray", "collections.Counter"),
        *(f"{__name__}.Pair", f"{__name__}.Projector"),
    }
    optimizer.state_dict()


# -- formats of their own


class HidesSome(torch.optim.SGD):
    """The pattern of heavyball: what its groups hold under ``_`` cannot be saved, and its `state_dict` drops it."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["_shapes"] = {param: param.shape for param in group["params"]}
            group["_plan"] = lambda grad: grad
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)

    def state_dict(self):
        state = super().state_dict()
        for group in state["param_groups"]:
            for key in [key for key in group if key.startswith("_")]:
                del group[key]
        return state


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_own_state_dict_drops_is_not_saved_and_the_rest_resumes_bit_exact(dtype):
    model, other = Mlp(dtype, has_norm=False), Mlp(dtype, has_norm=False)
    optimizer, resumed = (
        FusedMainGradOptimizer(
            HidesSome([{"params": each.first.parameters()}, {"params": each.second.parameters()}], **kwargs)
        )
        for each, kwargs in ((model, {"lr": 0.1, "momentum": 0.9}), (other, {"lr": 0.5, "momentum": 0.9}))
    )
    train(model, optimizer, range(3))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    assert [group["count"] for group in saved[1]["param_groups"]] == [3, 3]
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, opt in ((model, optimizer), (other, resumed)):
        train(each, opt, range(3, 6))
    assert_bit_equal(values(model), values(other))
    assert [group["count"] for group in resumed.param_groups] == [6, 6]


# -- keys that are no parameters


class Numbers(torch.optim.SGD):
    """The pattern of DoWG: state under numbers, and under a name, beside its parameters'."""

    @torch.no_grad()
    def step(self, closure=None):
        for number, p in enumerate(p for group in self.param_groups for p in group["params"]):
            state = self.state[number]
            state.setdefault("start", p.clone())
            p.add_(p - state["start"], alpha=0.1)
        self.state["norm"] = self.state.get("norm", torch.zeros(())) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / float(self.state["norm"])
        return super().step(closure)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("several", [False, True])
def test_state_under_numbers_and_parameters_state_do_not_take_each_others_place(dtype, several):
    def build():
        model = Mlp(dtype, has_norm=False)
        parts = [model.first.parameters(), model.second.parameters()] if several else [model.parameters()]
        return model, FusedMainGradOptimizer([Numbers(part, lr=0.1, momentum=0.9) for part in parts])

    (model, optimizer), (other, resumed) = build(), build()
    train(model, optimizer, range(3))
    state = optimizer.state_dict()
    for number, param in enumerate(model.parameters()):
        assert state["state"][number]["momentum_buffer"].shape == param.shape
        assert ("main_param" in state["state"][number]) == (dtype is torch.bfloat16)
    saved = through_a_file([model.state_dict(), state])
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, opt in ((model, optimizer), (other, resumed)):
        train(each, opt, range(3, 6))
    assert_bit_equal(values(model), values(other))
    for one, two in zip(optimizer._inner.optimizers, resumed._inner.optimizers, strict=True):
        apart = {key for key in one.state if not isinstance(key, torch.Tensor)}
        assert apart == {*range(2 if several else 4), "norm"}
        for key, value in one.state.items():
            if isinstance(key, int):
                assert torch.equal(value["start"], two.state[key]["start"])
        assert torch.equal(one.state["norm"], two.state["norm"])


def test_a_state_dict_of_before_with_named_state_beside_parameters_state_still_loads():
    model, other = Mlp(torch.bfloat16, has_norm=False), Mlp(torch.bfloat16, has_norm=False)
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    train(model, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["norm"] = {"sum": torch.tensor(2.5)}  # where it was before "others" was written for one optimizer
    assert "others" not in saved["fusedopt"]
    resumed = FusedMainGradOptimizer(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    resumed.load_state_dict(saved)
    assert resumed._inner.optimizers[0].state["norm"]["sum"] == 2.5


# -- optimizers inside optimizers


class Shares(torch.optim.Optimizer):
    """The pattern of Lookahead: its groups are those of the optimizer that it holds."""

    def __init__(self, optimizer):
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                slow.lerp_(p, 0.5)


class Splits(torch.optim.Optimizer):
    """The pattern of heavyball's SplitOpt: holds optimizers with lists of their own over its parameters."""

    def __init__(self, params, extra=()):
        params = list(params)
        self.optimizers = {"matrices": [torch.optim.SGD([p for p in params if p.ndim == 2], lr=0.1, momentum=0.9)]}
        self.rest = torch.optim.AdamW([*(p for p in params if p.ndim != 2), *extra], lr=0.01)
        super().__init__(params, {})

    def step(self, closure=None):
        self.optimizers["matrices"][0].step()
        self.rest.step()

    def held(self):
        return [self.optimizers["matrices"][0], self.rest]

    def state_dict(self):
        return {"held": [opt.state_dict() for opt in self.held()]}

    def load_state_dict(self, state_dict):
        for opt, state in zip(self.held(), state_dict["held"], strict=True):
            opt.load_state_dict(state)


def shares(params):
    return Shares(torch.optim.AdamW(params, lr=0.01))


@pytest.mark.parametrize("make", [shares, Splits])
@pytest.mark.parametrize("bare_steps", [0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_held_optimizers_step_main_params_with_the_state_they_had(make, bare_steps, dtype):
    """The twin is the same optimizer on fp32 copies, fed the gradients of the same rounded weights."""
    model = Mlp(torch.float32, has_norm=False)
    twin = Mlp(torch.float32, has_norm=False)
    inner, bare = make(model.parameters()), make(twin.parameters())
    for each, opt in ((model, inner), (twin, bare)):
        train(each, opt, range(bare_steps))
    if dtype is torch.bfloat16:  # the state is that of the same parameters, which now are bf16
        with torch.no_grad():
            for param in twin.parameters():
                param.copy_(param.bfloat16())
        for param in model.parameters():
            param.grad = None
            param.data = param.data.bfloat16()
        model.bfloat16()
    optimizer = FusedMainGradOptimizer(inner)
    shadow = Mlp(dtype, has_norm=False)
    for number in range(bare_steps, bare_steps + 4):
        train(model, optimizer, [number])
        with torch.no_grad():
            for param, main in zip(shadow.parameters(), twin.parameters(), strict=True):
                param.copy_(main)
        grads = torch.autograd.grad(loss_of(shadow, number), list(shadow.parameters()))
        for main, grad in zip(twin.parameters(), grads, strict=True):
            main.grad = grad.float()
        bare.step()
        for entry, main in zip(optimizer._buffers.entries, twin.parameters(), strict=True):
            assert torch.equal(entry.main_param.detach(), main.detach())
    values(model)
    unwrapped = optimizer.unwrap()
    params = list(model.parameters())
    for opt in [unwrapped, *(unwrapped.held() if make is Splits else [unwrapped.optimizer])]:
        held = [param for group in opt.param_groups for param in group["params"]]
        assert all(any(param is other for other in params) for param in held)
        assert all(any(key is other for other in params) for key in opt.state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_held_optimizers_loaded_state_is_its_own(dtype):
    model, other = Mlp(dtype, has_norm=False), Mlp(dtype, has_norm=False)
    optimizer, resumed = (FusedMainGradOptimizer(Splits(each.parameters())) for each in (model, other))
    train(model, optimizer, range(2))
    saved = through_a_file([model.state_dict(), optimizer.state_dict()])
    kept = copy.deepcopy(saved[1])
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for each, opt in ((model, optimizer), (other, resumed)):
        train(each, opt, range(2, 5))
    assert_bit_equal(values(model), values(other))
    pairs = zip(saved[1]["fusedopt"]["inner"][0]["held"], kept["fusedopt"]["inner"][0]["held"], strict=True)
    for state, before in pairs:
        for number, values_of in state["state"].items():
            assert_bit_equal(
                [v for v in values_of.values() if v is not None],
                [v for v in before["state"][number].values() if v is not None],
            )


def test_a_held_optimizer_over_parameters_of_no_group_is_refused_by_name_and_nothing_was_changed():
    model = Mlp(torch.bfloat16, has_norm=False)
    stranger = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    inner = Splits(model.parameters(), extra=[stranger])
    with pytest.raises(ValueError, match=r"Splits holds another optimizer, \.rest \(AdamW\).*of shape \(3,\).*none of"):
        FusedMainGradOptimizer(inner)
    assert not any(hasattr(param, "main_grad") for param in [*model.parameters(), stranger])
    assert inner.rest.param_groups[0]["params"][-1] is stranger
