"""The wrapper is a torch.optim.Optimizer: everything that torch offers on one is there and behaves as on a bare one."""

import inspect
import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_equal_parameters
from tests.models import Mlp, backward, train
from tests.protocol_cases import adamw, bare_and_wrapped, hyper_parameters

OVERRIDDEN = {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"}


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
    model = Mlp(torch.float32, has_norm=False)
    muon = torch.optim.Muon([model.first.weight], lr=0.03)
    optimizer = FusedMainGradOptimizer([muon, torch.optim.AdamW([model.second.weight], lr=0.01)])
    assert set(optimizer.defaults) == set(muon.defaults) & set(torch.optim.AdamW([model.second.weight]).defaults)
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
    weight = model.first.weight
    optimizer.state[weight] = {"mine": 1}
    assert optimizer.state[weight] == {"mine": 1}
    del optimizer.state[weight]
    assert weight not in optimizer.state
    assert optimizer.state[weight] == {}  # a defaultdict, as torch's


# -- zero_grad, step


@pytest.mark.parametrize("foreach", [False, True])
def test_zero_grad_clears_as_torch_does_both_ways(foreach):
    model = Mlp(torch.bfloat16, has_norm=False)
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


# -- what the inner optimizer sees


class Records(torch.optim.SGD):
    """Keeps what its parameters look like inside step()."""

    def step(self, closure=None):
        self.seen = [(param, param.grad, dict(vars(param))) for param in self.param_groups[0]["params"]]
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_inner_optimizer_sees_main_params_with_main_grad_and_the_parameters_own_attributes(dtype):
    model = Mlp(dtype, has_norm=False)
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
    model = Mlp(torch.float32, has_norm=False)
    optimizer = FusedMainGradOptimizer(
        [torch.optim.AdamW(model.first.parameters()), WithExtras(model.second.parameters(), lr=0.1)]
    )
    assert optimizer.extra == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copy", [deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["deepcopy", "pickle"])
def test_a_copied_model_and_optimizer_train_on_as_the_originals(copy, dtype):
    model = Mlp(dtype, has_norm=False)
    optimizer = FusedMainGradOptimizer(adamw(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # instance attribute on `step`
    train(model, optimizer, range(3))
    scheduler.step()
    copied_model, copied = copy((model, optimizer))
    assert isinstance(copied, FusedMainGradOptimizer)
    assert hyper_parameters(copied) == hyper_parameters(optimizer)
    assert copied.param_groups[0]["params"][0] is copied_model.first.weight
    for number in range(3, 6):
        backward(copied_model, number)
        assert all(param.grad is param.main_grad for param in copied_model.parameters())
        assert all(param.grad is None for param in model.parameters())
        copied.step()
        copied.zero_grad()
    train(model, optimizer, range(3, 6))
    assert_equal_parameters(copied_model, model)
