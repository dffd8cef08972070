"""Claims about state dicts: resuming is bit-exact, what one looks like, hooks, and a bare optimizer's is taken."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from fusedopt import FusedMainGradOptimizer
from fusedopt.state.state_dicts import FORMAT
from tests.compare import frozen, through_a_file
from tests.models import loss_of
from tests.state_cases import (
    DTYPES,
    LOW,
    OPTIMIZERS,
    Net,
    Run,
    adamw,
    after_outside_edits,
    assert_is_finite_and_trained,
    assert_main_params_hold_more_than_the_model,
    everything,
    named_adamw,
    start,
    tensors_in,
    train,
)

# -- resuming

LOAD_ORDERS = ["weights before wrapping", "weights, then optimizer", "optimizer, then weights", "prepared in between"]


def resume(dtypes, make, order, weights, saved):
    """Load into fresh objects that began with other weights."""
    net = Net(dtypes, seed=7)
    assert not torch.equal(net.first.weight, weights["first.weight"])
    if order == "weights before wrapping":
        net.load_state_dict(weights)
    inners = make(net)
    run = Run(net, inners, FusedMainGradOptimizer(inners if len(inners) > 1 else inners[0]))
    if order == "weights, then optimizer":
        net.load_state_dict(weights)
    run.optimizer.load_state_dict(saved)
    if order == "prepared in between":  # accelerate's prepare() does this to every optimizer
        run.optimizer.load_state_dict(run.optimizer.state_dict())
    if order in ("optimizer, then weights", "prepared in between"):
        net.load_state_dict(weights)
    return run


@pytest.mark.parametrize("order", LOAD_ORDERS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_a_resumed_run_is_bit_equal_to_the_uninterrupted_one(dtypes, make, order):
    uninterrupted = start(dtypes, make)
    train(uninterrupted, range(3))
    saved = through_a_file({"model": uninterrupted.net.state_dict(), "optimizer": uninterrupted.optimizer.state_dict()})
    at_save = everything(uninterrupted)
    train(uninterrupted, range(3, 7))
    assert_is_finite_and_trained(uninterrupted)
    assert everything(uninterrupted)["params"] != at_save["params"]

    resumed = resume(dtypes, make, order, saved["model"], saved["optimizer"])
    assert everything(resumed) == at_save
    train(resumed, range(3, 7))
    assert everything(resumed) == everything(uninterrupted)


@pytest.mark.parametrize("order", LOAD_ORDERS)
@pytest.mark.parametrize("dtypes", [DTYPES[d] for d in LOW], ids=LOW)
def test_edits_from_outside_that_no_step_has_seen_yet_are_resumed_from(dtypes, order):
    uninterrupted = start(dtypes, OPTIMIZERS["AdamW loop"])
    after_outside_edits(uninterrupted)
    saved = through_a_file({"model": uninterrupted.net.state_dict(), "optimizer": uninterrupted.optimizer.state_dict()})
    train(uninterrupted, range(3, 6))
    assert_is_finite_and_trained(uninterrupted)
    resumed = resume(dtypes, OPTIMIZERS["AdamW loop"], order, saved["model"], saved["optimizer"])
    train(resumed, range(3, 6))
    assert everything(resumed) == everything(uninterrupted)


@pytest.mark.parametrize("dtypes", [DTYPES[d] for d in ("bf16", "fp16")], ids=["bf16", "fp16"])
def test_the_model_alone_could_not_have_resumed(dtypes):
    run = start(dtypes, OPTIMIZERS["AdamW loop"])
    train(run, range(3))
    assert_main_params_hold_more_than_the_model(run)
    state = run.optimizer.state_dict()["state"]
    assert all(frozen(state[i]["main_param"]) == frozen(m) for i, m in enumerate(run.main_params))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_learning_rates_resume_with_their_scheduler(dtypes):
    def scheduled(seed):
        run = start(dtypes, OPTIMIZERS["AdamW loop"], seed)
        return run, CosineAnnealingLR(run.optimizer, T_max=8)

    def train_with(run, scheduler, numbers):
        rates = []
        for number in numbers:
            train(run, [number])
            scheduler.step()
            rates.append((run.optimizer.param_groups[0]["lr"], run.inners[0].param_groups[0]["lr"]))
        return rates

    run, scheduler = scheduled(seed=0)
    train_with(run, scheduler, range(3))
    saved = through_a_file([run.net.state_dict(), run.optimizer.state_dict(), scheduler.state_dict()])
    rate = run.optimizer.param_groups[0]["lr"]

    resumed, resumed_scheduler = scheduled(seed=7)
    resumed.net.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert rate != 0.01
    assert resumed.optimizer.param_groups[0]["lr"] == resumed.inners[0].param_groups[0]["lr"] == rate
    resumed_scheduler.load_state_dict(saved[2])
    rates = train_with(run, scheduler, range(3, 7))
    assert len({rate for rate, _ in rates}) == 4
    assert train_with(resumed, resumed_scheduler, range(3, 7)) == rates
    assert_is_finite_and_trained(run)
    assert everything(resumed) == everything(run)


def test_a_scheduler_made_on_the_inner_optimizer_keeps_working_after_a_load():
    net = Net(DTYPES["bf16"])
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = LambdaLR(inner, lambda epoch: 0.5**epoch)
    run = Run(net, [inner], FusedMainGradOptimizer(inner))
    train(run, [0])
    scheduler.step()
    saved = copy.deepcopy(run.optimizer.state_dict())
    train(run, [1])
    scheduler.step()
    run.optimizer.load_state_dict(saved)
    assert run.optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.5
    train(run, [2])
    scheduler.step()  # was not loaded: counts on, as on a bare optimizer
    train(run, [3])
    assert run.optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.125


def test_loaded_hyper_parameters_win_over_those_set_before():
    saved = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"]).optimizer.state_dict()
    run = start(DTYPES["bf16"], adamw(foreach=False, lr=0.5))
    run.optimizer.param_groups[0]["weight_decay"] = 0.7
    run.optimizer.load_state_dict(saved)
    for _ in range(3):
        assert [o.param_groups[0]["lr"] for o in (run.optimizer, *run.inners)] == [0.01, 0.01]
        assert [o.param_groups[0]["weight_decay"] for o in (run.optimizer, *run.inners)] == [0.1, 0.1]
        train(run, [0])


# -- format


def test_the_state_dict_is_torchs_packed_form_with_main_param_and_a_signature():
    net = Net(DTYPES["mixed"])
    groups = [{"params": net.first.named_parameters()}, {"params": [("scale", net.scale)], "lr": 0.5}]
    inner = torch.optim.AdamW([*groups, {"params": net.second.named_parameters()}], lr=0.01)
    run = Run(net, [inner], FusedMainGradOptimizer(inner))
    train(run, range(3))
    state_dict = run.optimizer.state_dict()
    assert set(state_dict) == {"state", "param_groups", "fusedopt"}
    assert [group["params"] for group in state_dict["param_groups"]] == [[0, 1], [2], [3, 4]]
    assert [group["lr"] for group in state_dict["param_groups"]] == [0.01, 0.5, 0.01]
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert [set(state_dict["state"][i]) for i in range(3)] == [adam | {"main_param"}] * 3
    assert [set(state_dict["state"][i]) for i in (3, 4)] == [adam] * 2
    assert state_dict["fusedopt"] == {
        "format": FORMAT,
        "names": ["weight", "bias", "scale", "weight", "bias"],
        "shapes": [[6, 5], [6], [], [3, 6], [3]],
        "dtypes": ["torch.bfloat16"] * 3 + ["torch.float32"] * 2,
        "inner": {},
    }
    floats = [t for t in tensors_in(state_dict) if t.is_floating_point()]
    assert len(floats) == 3 * 4 + 2 * 3
    assert {t.dtype for t in floats} == {torch.float32}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_state_dict_goes_through_weights_only_loading_unchanged(dtypes, make):
    run = start(dtypes, make)
    train(run, range(3))
    state_dict = run.optimizer.state_dict()
    assert tensors_in(state_dict["state"])
    assert frozen(through_a_file(state_dict)) == frozen(state_dict)


# -- a bare optimizer's state dict


@pytest.mark.parametrize("make", [OPTIMIZERS[o] for o in OPTIMIZERS if "+" not in o], ids=lambda make: make.__name__)
def test_a_bare_state_dict_continues_bit_equal_on_an_fp32_model(make):
    net = Net(DTYPES["fp32"])
    (bare,) = make(net)
    as_run = Run(net, [bare], bare)
    train(as_run, range(3))
    saved = through_a_file([net.state_dict(), bare.state_dict()])
    train(as_run, range(3, 7))

    wrapped = start(DTYPES["fp32"], make, seed=7)
    wrapped.net.load_state_dict(saved[0])
    wrapped.optimizer.load_state_dict(saved[1])
    train(wrapped, range(3, 7))
    assert_is_finite_and_trained(wrapped)
    for ours, theirs in zip(wrapped.net.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert frozen([*wrapped.inners[0].state.values()]) == frozen([*bare.state.values()])


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_bare_low_precision_state_becomes_fp32(name):
    net = Net(DTYPES[name])
    bare = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)  # 1e-8 is zero in fp16
    for number in range(3):
        loss_of(net, number).backward()
        bare.step()
        bare.zero_grad()
    saved = through_a_file(bare.state_dict())
    assert saved["state"][0]["exp_avg"].dtype is DTYPES[name][0]

    run = start(DTYPES[name], OPTIMIZERS["AdamW loop"])
    run.optimizer.load_state_dict(saved)
    for index, main in enumerate(run.main_params):
        state = run.inners[0].state[main]
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.float32
        assert torch.equal(state["exp_avg"], saved["state"][index]["exp_avg"].float())
        assert state["step"] == 3
    train(run, range(3, 6))
    assert_is_finite_and_trained(run)


def test_wrapping_an_optimizer_that_trained_bare_takes_its_state_along():
    net = Net(DTYPES["bf16"])
    bare = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loss_of(net, 0).backward()
    bare.step()
    bare.zero_grad()
    kept = [bare.state[p]["momentum_buffer"].clone() for p in net.parameters()]
    run = Run(net, [bare], FusedMainGradOptimizer(bare))
    for main, momentum in zip(run.main_params, kept, strict=True):
        assert momentum.count_nonzero()
        assert bare.state[main]["momentum_buffer"].dtype is torch.float32
        assert torch.equal(bare.state[main]["momentum_buffer"], momentum.float())
    train(run, range(1, 4))
    assert_is_finite_and_trained(run)


# -- hooks


def test_save_and_load_hooks_run_as_on_a_stock_optimizer():
    def observe(optimizer):
        seen = []
        optimizer.register_state_dict_pre_hook(lambda opt: seen.append(("before save", opt is optimizer)))
        optimizer.register_state_dict_post_hook(lambda opt, state_dict: {**state_dict, "note": "added"})
        optimizer.register_load_state_dict_pre_hook(
            lambda opt, state_dict: seen.append(("before load", state_dict.get("note")))
        )
        optimizer.register_load_state_dict_pre_hook(
            lambda opt, state_dict: {
                **state_dict,
                "param_groups": [{**group, "lr": 0.75} for group in state_dict["param_groups"]],
            }
        )
        optimizer.register_load_state_dict_post_hook(
            lambda opt: seen.append(("after load", opt.param_groups[0]["lr"], opt is optimizer))
        )
        return seen

    net = Net(DTYPES["fp32"])
    stock = torch.optim.AdamW(net.parameters(), lr=0.01)
    run = start(DTYPES["fp32"], OPTIMIZERS["AdamW loop"])
    saw_stock, saw_ours = observe(stock), observe(run.optimizer)
    for optimizer in (stock, run.optimizer):
        state_dict = optimizer.state_dict()
        assert state_dict["note"] == "added"
        optimizer.load_state_dict(state_dict)
        assert state_dict["param_groups"][0]["lr"] == 0.01
    assert saw_ours == saw_stock == [("before save", True), ("before load", "added"), ("after load", 0.75, True)]
    assert run.inners[0].param_groups[0]["lr"] == 0.75
    train(run, range(3))
    assert run.optimizer.param_groups[0]["lr"] == 0.75


def test_load_state_dict_takes_its_argument_by_torchs_name():
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    run.optimizer.load_state_dict(state_dict=run.optimizer.state_dict())


# -- parameters that were frozen at one end


def partly_frozen(dtypes, seed=0):
    net = Net(dtypes, seed)
    net.first.requires_grad_(False)
    (inner,) = named_adamw(net)
    return Run(net, [inner], FusedMainGradOptimizer(inner))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_a_parameter_frozen_when_loading_resumes_bit_equal_once_unfrozen(dtypes):
    run = partly_frozen(dtypes)
    train(run, range(2))
    run.net.first.requires_grad_(True)
    run.optimizer.zero_grad()
    train(run, range(2, 5))
    saved = through_a_file([run.net.state_dict(), run.optimizer.state_dict()])
    train(run, range(5, 8))
    assert_is_finite_and_trained(run)
    for order in ("weights first", "weights last"):
        resumed = partly_frozen(dtypes, seed=7)
        if order == "weights first":
            resumed.net.load_state_dict(saved[0])
        resumed.optimizer.load_state_dict(saved[1])
        assert frozen(resumed.optimizer.state_dict()) == frozen(saved[1])
        resumed.net.load_state_dict(saved[0])
        resumed.net.first.requires_grad_(True)
        resumed.optimizer.zero_grad()
        assert frozen(resumed.optimizer.state_dict()) == frozen(saved[1])
        train(resumed, range(5, 8))
        assert everything(resumed) == everything(run)
