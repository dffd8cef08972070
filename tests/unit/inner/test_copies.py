"""Claims about copies: deepcopy, pickle, unwrap, and wrappers that are dropped."""

import contextlib
import copy
import functools
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
from tests.models import Mlp, adamw, loss_of, muon_and_adamw, train

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Mixed(torch.optim.Optimizer):
    """SGD with state in fp64 and bf16, whatever the dtype of the parameters."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[param]
            if not state:
                state["sum"] = torch.zeros(param.shape, dtype=torch.float64)
                state["low"] = torch.zeros(param.shape, dtype=torch.bfloat16)
            state["sum"] += param.grad.double() / 3
            state["low"] += param.grad.to(torch.bfloat16)
            param.add_((state["sum"] + state["low"]).to(param.dtype), alpha=-self.param_groups[0]["lr"])


OPTIMIZERS = {
    "AdamW": functools.partial(adamw, foreach=False),
    "AdamW fused": functools.partial(adamw, fused=True),
    "AdamW amsgrad, tensor lr": lambda net: adamw(net, amsgrad=True, lr=torch.tensor(0.01)),
    "SGD momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "Muon + AdamW": muon_and_adamw,
    "fp64 and bf16 state": lambda net: Mixed(net.parameters()),
}


def everything(net, optimizer):
    state_dict = optimizer.state_dict()
    for group in state_dict["param_groups"]:
        group.pop("differentiable", None)  # torch adds it to the defaults of any optimizer that it unpickles
    return frozen([dict(net.named_parameters()), state_dict])


def storages(optimizer):
    """Return the addresses of all memory that the wrapper and its model hold."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state = [t for s in optimizer.state_dict()["state"].values() for t in s.values() if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr() for t in [*params, *(p.main_grad for p in params), *state]}


def by_deepcopy(pair):
    return copy.deepcopy(pair)


def by_pickle(pair):
    return pickle.loads(pickle.dumps(pair))


WAYS = [by_deepcopy, by_pickle]


# -- copies of model and optimizer together


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_copied_pair_trains_on_as_the_original_would_on_buffers_of_its_own(dtype, make, way):
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(make(net))
    begin = {name: p.detach().clone() for name, p in net.named_parameters()}
    train(net, optimizer, range(3))
    assert_is_finite_and_moved(net, begin)
    before = everything(net, optimizer)

    copied_net, copied = way((net, optimizer))
    assert type(copied) is FusedMainGradOptimizer
    assert everything(copied_net, copied) == before
    assert not storages(optimizer) & storages(copied)
    assert [p for g in copied.param_groups for p in g["params"]] != []
    assert {id(p) for g in copied.param_groups for p in g["params"]} == {id(p) for p in copied_net.parameters()}

    train(copied_net, copied, range(3, 6))
    assert everything(net, optimizer) == before
    assert everything(copied_net, copied) != before
    for param in copied_net.parameters():
        assert param.grad is None
    loss_of(copied_net, 9).backward()
    for param, original in zip(copied_net.parameters(), net.parameters(), strict=True):
        assert param.grad is param.main_grad
        assert original.grad is None
    copied.zero_grad()

    train(net, optimizer, range(3, 6))
    assert_is_finite_and_moved(net, begin)
    assert everything(net, optimizer) == everything(copied_net, copied)


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_before_the_first_step_trains_as_the_original(way):
    net = Mlp()
    optimizer = FusedMainGradOptimizer(adamw(net))
    copied_net, copied = way((net, optimizer))
    for each in ((net, optimizer), (copied_net, copied)):
        train(*each, range(3))
    assert everything(net, optimizer) == everything(copied_net, copied)
    assert torch.isfinite(net.first.weight).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_copy_made_after_edits_from_outside_starts_from_them(dtype, way):
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(3))
    with torch.no_grad():
        net.first.weight[0].fill_(0.5)
    copied_net, copied = way((net, optimizer))
    for each in ((net, optimizer), (copied_net, copied)):
        train(*each, range(3, 6))
    assert torch.isfinite(net.first.weight).all()
    assert everything(net, optimizer) == everything(copied_net, copied)


@pytest.mark.parametrize("make", [OPTIMIZERS["AdamW"], muon_and_adamw])
def test_a_scheduler_copied_along_drives_the_copy(make):
    net = Mlp()
    optimizer = FusedMainGradOptimizer(make(net))
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    train(net, optimizer, range(3), scheduler)
    copied_net, copied, copied_scheduler = copy.deepcopy((net, optimizer, scheduler))
    assert copied_scheduler.optimizer is copied
    at_copy = [group["lr"] for group in optimizer.param_groups]
    train(copied_net, copied, range(3, 6), copied_scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == at_copy
    assert [group["lr"] for group in copied.param_groups] == [lr / 8 for lr in at_copy]
    train(net, optimizer, range(3, 6), scheduler)
    assert torch.isfinite(net.first.weight).all()
    assert everything(net, optimizer) == everything(copied_net, copied)


def test_configuration_and_the_count_of_skipped_steps_are_copied():
    net = Mlp()
    optimizer = FusedMainGradOptimizer(adamw(net), max_grad_norm=0.5, gradient_accumulation_steps=2)
    for _ in range(2):
        (loss_of(net, 0) * torch.inf).backward()
        with pytest.warns(RuntimeWarning, match="skipped") if not optimizer.window_ends else _nothing():
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    for way in WAYS:
        _, copied = way((net, optimizer))
        assert copied.config == optimizer.config
        assert copied.config.max_grad_norm == 0.5
        assert copied.skipped_steps == 1


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *args):
        return None


def test_gradients_and_a_pending_window_are_left_out_as_torch_leaves_gradients_out():
    net = Mlp()
    optimizer = FusedMainGradOptimizer(adamw(net), gradient_accumulation_steps=3)
    loss_of(net, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not optimizer.window_ends
    for way in WAYS:
        copied_net, copied = way((net, optimizer))
        assert copied.window_ends
        assert all(p.grad is None for p in copied_net.parameters())
        assert all(p.grad is p.main_grad for p in net.parameters())
        train(copied_net, copied, range(3))
        assert copied.window_ends
        assert copied.state_dict()["state"][0]["step"] == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_pair_with_frozen_unfrozen_and_refrozen_parameters_is_copied_whole(way):
    net = Mlp()
    net.norm.requires_grad_(False)
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(2))
    net.norm.requires_grad_(True)
    net.first.requires_grad_(False)
    optimizer.zero_grad()
    train(net, optimizer, range(2, 4))
    copied_net, copied = way((net, optimizer))
    assert [p.requires_grad for p in copied_net.parameters()] == [p.requires_grad for p in net.parameters()]
    assert everything(copied_net, copied) == everything(net, optimizer)
    for each in ((net, optimizer), (copied_net, copied)):
        each[0].first.requires_grad_(True)
        each[1].zero_grad()
        train(*each, range(4, 7))
    assert torch.isfinite(net.first.weight).all()
    assert everything(copied_net, copied) == everything(net, optimizer)


def test_attributes_on_parameters_survive_a_pickle_as_without_fusedopt():
    net = Mlp()
    net.first.weight.note = "mine"
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(3))
    copied_net, copied = by_pickle((net, optimizer))
    assert copied_net.first.weight.note == "mine"
    assert vars(by_pickle(net).first.weight) == {"note": "mine"}
    train(copied_net, copied, range(3, 6))


# -- copies of the model alone


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_copy_of_the_model_alone_is_a_stock_model(dtype, way):
    net = Mlp(dtype)
    net.norm.requires_grad_(False)
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(3))
    loss_of(net, 3).backward()
    twin = Mlp(dtype)
    twin.load_state_dict(net.state_dict())
    copied = way(net)
    for param, stock in zip(copied.parameters(), twin.parameters(), strict=True):
        assert vars(param) == vars(stock) == {}
        assert param.grad_dtype is stock.grad_dtype is dtype
        assert not param._post_accumulate_grad_hooks
        assert param.grad is None
        assert torch.equal(param, stock)
    before = everything(net, optimizer)
    copied.requires_grad_(True)
    stock_optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (copied, twin)]
    for each, stock_optimizer in zip((copied, twin), stock_optimizers, strict=True):
        train(each, stock_optimizer, range(3))
    for param, stock in zip(copied.parameters(), twin.parameters(), strict=True):
        assert torch.isfinite(param).all()
        assert torch.equal(param, stock)
    assert everything(net, optimizer) == before


def test_a_copy_of_a_wrapped_model_can_be_wrapped():
    net = Mlp()
    optimizer = FusedMainGradOptimizer(adamw(net))
    train(net, optimizer, range(2))
    ema = copy.deepcopy(net)
    second = FusedMainGradOptimizer(adamw(ema))
    train(ema, second, range(3))
    assert not storages(optimizer) & storages(second)


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
