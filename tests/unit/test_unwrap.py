"""Claims about the end of a wrapper: unwrap gives everything back, and one that is dropped leaves nothing behind."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import StepLR

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_is_finite_and_moved, frozen
from tests.copy_cases import OPTIMIZERS, everything
from tests.models import Mlp, adamw, loss_of, muon_and_adamw, train

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


# -- unwrap


def remember(net):
    return {
        name: (dict(vars(p)), p.grad_dtype, p.requires_grad, id(p), len(p._post_accumulate_grad_hooks or ()))
        for name, p in net.named_parameters()
    }


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_unwrap_gives_back_a_stock_model_and_its_optimizer_which_trains_on(dtype, make):
    net = Mlp(dtype)
    net.first.weight.note = "mine"
    net.norm.bias.requires_grad_(False)
    inner = make(net)
    before = remember(net)
    optimizer = FusedMainGradOptimizer(inner)
    assert remember(net) != before
    train(net, optimizer, range(3))
    weights = {name: p.detach().clone() for name, p in net.named_parameters()}

    given = optimizer.unwrap()
    assert given == inner
    assert remember(net) == before
    inners = inner if isinstance(inner, list) else [inner]
    params = [p for opt in inners for group in opt.param_groups for p in group["params"]]
    assert {id(p) for p in params} == {id(p) for p in net.parameters()}
    for opt in inners:
        assert all(isinstance(key, nn.Parameter) and id(key) in map(id, net.parameters()) for key in opt.state)
    assert sum(len(opt.state) for opt in inners) == 5
    for name, p in net.named_parameters():
        assert torch.equal(p, weights[name])

    for number in range(3, 6):
        loss_of(net, number).backward()
        assert net.first.weight.grad.dtype is dtype
        for opt in inners:
            opt.step()
            opt.zero_grad()
    del weights["norm.bias"]
    for name, start in weights.items():
        assert torch.isfinite(net.get_parameter(name)).all()
        assert not torch.equal(net.get_parameter(name), start)


def test_an_unwrapped_optimizer_continues_bit_equal_on_an_fp32_model():
    nets = [Mlp(torch.float32) for _ in range(2)]
    bare, inner = (adamw(net) for net in nets)
    optimizer = FusedMainGradOptimizer(inner)
    train(nets[0], bare, range(3))
    train(nets[1], optimizer, range(3))
    for net, each in zip(nets, (bare, optimizer.unwrap()), strict=True):
        train(net, each, range(3, 6))
    assert torch.isfinite(nets[0].first.weight).all()
    assert frozen(list(nets[0].parameters())) == frozen(list(nets[1].parameters()))
    assert frozen(list(bare.state.values())) == frozen(list(inner.state.values()))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_unwrapped_state_has_the_dtype_torch_gives_it(dtype):
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(3))
    wide = {p: s["exp_avg"].clone() for p, s in optimizer.state.items()}
    inner = optimizer.unwrap()
    for param, state in inner.state.items():
        assert state["exp_avg"].dtype is dtype
        assert state["step"].dtype is torch.float32
        assert torch.equal(state["exp_avg"], wide[param].to(dtype))
        assert wide[param].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_unwrapped_lbfgs_trains_on_with_its_histories(dtype):
    net = Mlp(dtype)
    inner = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)
    optimizer = FusedMainGradOptimizer(inner)

    def step(each):
        def closure():
            each.zero_grad()
            loss = loss_of(net, 0)
            loss.backward()
            return loss

        return each.step(closure).item()

    first = step(optimizer)
    for _ in range(2):
        step(optimizer)
    assert optimizer.unwrap() is inner
    (state,) = inner.state.values()
    assert state["old_dirs"]
    assert {t.dtype for t in [state["d"], *state["old_dirs"], *state["old_stps"]]} == {dtype}
    for _ in range(3):
        last = step(inner)
    assert last < first


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_unwrap_keeps_a_gradient_in_the_parameters_own_dtype(dtype):
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(adamw(net))
    loss_of(net, 0).backward()
    main_grad = net.first.weight.main_grad
    wide = main_grad.clone()
    optimizer.unwrap()
    assert net.first.weight.grad.dtype is dtype
    assert torch.isfinite(wide).all()
    assert torch.equal(net.first.weight.grad, wide.to(dtype))
    assert net.first.weight.grad.untyped_storage().data_ptr() != main_grad.untyped_storage().data_ptr()


def test_hooks_of_others_stay_when_ours_go():
    net = Mlp()
    seen = []
    for when in ("before", "after"):
        if when == "after":
            optimizer = FusedMainGradOptimizer(adamw(net))
        net.first.weight.register_post_accumulate_grad_hook(lambda p, when=when: seen.append((when, p.grad.dtype)))
    train(net, optimizer, range(3))
    optimizer.unwrap()
    assert seen == [("before", torch.float32), ("after", torch.float32)] * 3
    loss_of(net, 0).backward()
    assert seen[6:] == [("before", torch.bfloat16), ("after", torch.bfloat16)]


def test_a_grad_dtype_of_the_users_own_comes_back():
    net = Mlp()
    net.first.weight.grad_dtype = torch.float32
    net.second.weight.grad_dtype = None
    FusedMainGradOptimizer(adamw(net)).unwrap()
    assert net.first.weight.grad_dtype is torch.float32
    assert net.second.weight.grad_dtype is None
    assert net.first.bias.grad_dtype is torch.bfloat16


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_an_unwrapped_optimizer_can_be_wrapped_again(dtype, make):
    net = Mlp(dtype)
    inner = make(net)
    for round_number in range(3):
        optimizer = FusedMainGradOptimizer(inner)
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        train(net, optimizer, range(3 * round_number, 3 * round_number + 3))
        assert_is_finite_and_moved(net, before)
        assert optimizer.state_dict()["state"]
        optimizer.unwrap()


USES = {
    "step": lambda optimizer: optimizer.step(),
    "flush": lambda optimizer: optimizer.flush(),
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "add_param_group": lambda optimizer: optimizer.add_param_group({"params": nn.Parameter(torch.ones(3))}),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "train": lambda optimizer: optimizer.train(),
    "eval": lambda optimizer: optimizer.eval(),
    "sync_main_params": lambda optimizer: optimizer.sync_main_params(),
    "unwrap": lambda optimizer: optimizer.unwrap(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_using_an_unwrapped_wrapper_raises_and_leaves_the_inner_optimizer_alone(use):
    net = Mlp()
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(3))
    inner = optimizer.unwrap()
    before = frozen([list(net.parameters()), list(inner.state.values()), len(inner.param_groups)])
    with pytest.raises(RuntimeError, match="was unwrapped"):
        use(optimizer)
    assert frozen([list(net.parameters()), list(inner.state.values()), len(inner.param_groups)]) == before
    train(net, inner, range(3))


# -- wrappers that are dropped


def test_a_dropped_wrapper_leaves_a_stock_model_without_waiting_for_the_collector():
    net = Mlp()
    before = remember(net)
    gc.collect()
    gc.disable()
    try:
        optimizer = FusedMainGradOptimizer(adamw(net))
        train(net, optimizer, range(3))
        assert remember(net) != before
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
        assert remember(net) == before
    finally:
        gc.enable()
    bare = adamw(net)
    train(net, bare, range(3))
    assert torch.isfinite(net.first.weight).all()


def test_a_wrapper_in_a_cycle_is_collected_and_a_new_one_takes_its_place():
    net = Mlp()
    before = remember(net)
    optimizer = FusedMainGradOptimizer(adamw(net))
    scheduler = StepLR(optimizer, 1)  # patches optimizer.step: a cycle
    train(net, optimizer, range(3), scheduler)
    gone = weakref.ref(optimizer)
    del optimizer, scheduler
    second = FusedMainGradOptimizer(adamw(net))  # collects by itself
    assert gone() is None
    train(net, second, range(3))
    assert net.first.weight.grad is None
    del second
    assert remember(net) == before


@pytest.mark.parametrize(
    "mode",
    [FakeTensorMode, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["fake tensors", "inference mode", "meta device", "autocast"],
)
@pytest.mark.parametrize("is_dropped", [True, False], ids=["dropped", "unwrapped"])
def test_a_wrapper_goes_in_whatever_mode_torch_is(mode, is_dropped):
    """The collector runs where it likes: it once did while torch.compile traced another model."""

    def left(mode):
        net = Mlp()
        optimizer = FusedMainGradOptimizer(adamw(net))
        train(net, optimizer, range(3))
        loss_of(net, 3).backward()
        with mode():
            if not is_dropped:
                optimizer.unwrap()
            del optimizer
        assert not any(param.grad.is_inference() or param.is_inference() for param in net.parameters())
        values = frozen([list(net.parameters()), [param.grad for param in net.parameters()]])
        bare = adamw(net)
        bare.step()
        train(net, bare, range(4, 6))
        return values, frozen(list(net.parameters()))

    assert left(mode) == left(contextlib.nullcontext)


def test_model_and_wrapper_are_freed_together():
    net = Mlp()
    optimizer = FusedMainGradOptimizer(muon_and_adamw(net))
    train(net, optimizer, range(3))
    loss_of(net, 3).backward()
    gone = [weakref.ref(thing) for thing in (net, optimizer, *net.parameters(), net.first.weight.main_grad)]
    del net, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


CELL = """
net = Mlp()
optimizer = FusedMainGradOptimizer(adamw(net))
train(net, optimizer, range(3))
loss_of(net, 3).backward()
"""
LINE = "optimizer = FusedMainGradOptimizer(adamw(net))"


def notebook():
    return {
        "Mlp": Mlp,
        "FusedMainGradOptimizer": FusedMainGradOptimizer,
        "adamw": adamw,
        "train": train,
        "loss_of": loss_of,
    }


def test_a_cell_that_is_run_again_frees_the_model_and_wrapper_of_the_run_before():
    names, gone = notebook(), []
    for _ in range(3):
        exec(CELL, names)
        assert names["net"].first.weight.grad is names["net"].first.weight.main_grad
        gone.append((weakref.ref(names["net"]), weakref.ref(names["optimizer"])))
    gc.collect()
    assert [(net() is None, optimizer() is None) for net, optimizer in gone] == [(True, True)] * 2 + [(False, False)]


def test_a_wrapping_line_that_is_run_again_raises_with_the_remedy_and_the_remedy_works():
    names = notebook()
    exec(CELL, names)
    train(names["net"], names["optimizer"], [3])
    before = everything(names["net"], names["optimizer"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"already has a main_grad.*unwrap\(\).*drop the last reference"):
            exec(LINE, names)
    assert everything(names["net"], names["optimizer"]) == before
    train(names["net"], names["optimizer"], range(3))
    exec("del optimizer", names)
    exec(LINE, names)
    train(names["net"], names["optimizer"], range(3))
    exec("optimizer.unwrap()", names)
    exec(LINE, names)
    train(names["net"], names["optimizer"], range(3))
    assert torch.isfinite(names["net"].first.weight).all()


def test_a_wrapper_whose_construction_fails_leaves_nothing_behind():
    net = Mlp()
    before = remember(net)
    net.second.bias.main_grad = torch.zeros(3)
    inner = adamw(net)
    with pytest.raises(RuntimeError, match="main_grad"):
        FusedMainGradOptimizer(inner)
    del net.second.bias.main_grad
    assert remember(net) == before
    train(net, FusedMainGradOptimizer(inner), range(3))


def live_tensors():
    gc.collect()
    return [obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor)]


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], OPTIMIZERS["AdamW fused"], muon_and_adamw])
def test_two_hundred_steps_leave_no_tensor_behind(make):
    net = Mlp()
    optimizer = FusedMainGradOptimizer(make(net), max_grad_norm=1.0)

    def window(number):
        for micro_batch in range(2):
            loss_of(net, 2 * number + micro_batch).backward()
        optimizer.step()
        optimizer.state_dict()
        optimizer.zero_grad(set_to_none=number % 2 == 0)

    for number in range(5):
        window(number)
    before = live_tensors()
    num_tensors, nbytes = len(before), sum(t.untyped_storage().nbytes() for t in before)
    del before
    for number in range(5, 205):
        window(number)
    assert torch.isfinite(net.first.weight).all()
    assert optimizer.grad_norm > 0
    assert num_tensors > 3 * 6
    assert len(live_tensors()) == num_tensors
    assert sum(t.untyped_storage().nbytes() for t in live_tensors()) == nbytes


def test_fifty_wrappers_leave_no_tensor_behind():
    net = Mlp()
    counts = []
    for _ in range(50):
        optimizer = FusedMainGradOptimizer(adamw(net))
        train(net, optimizer, range(3))
        copy.deepcopy((net, optimizer))
        del optimizer
        counts.append(len(live_tensors()))
    assert len(set(counts[1:])) == 1
