"""Claims about state dicts: resuming is bit-exact, loading is in place, and a misfit changes nothing."""

import copy
import functools
import io
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from fusedopt import FusedMainGradOptimizer
from fusedopt.state.state_dicts import FORMAT

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
}
LOW = ["bf16", "fp16", "mixed"]


class Net(nn.Module):
    """Two layers, each in its own dtype; ``scale`` is 0-d, so that state of shape () occurs."""

    def __init__(self, dtypes, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 6, dtype=dtypes[0])
        self.second = nn.Linear(6, 3, dtype=dtypes[1])
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=dtypes[0]))

    def forward(self, x):
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)) * self.scale)
        return self.second(hidden.to(self.second.weight.dtype)).float()


def adamw(**settings):
    return lambda net: [torch.optim.AdamW(net.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **settings})]


def muon_and_adamw(net):
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS = {
    "AdamW loop": adamw(foreach=False),
    "AdamW foreach": adamw(foreach=True),
    "AdamW fused": adamw(fused=True),
    "AdamW amsgrad": adamw(amsgrad=True),
    "AdamW tensor lr": lambda net: adamw(lr=torch.tensor(0.01), foreach=False)(net),
    "SGD momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)],
    "Adafactor": lambda net: [torch.optim.Adafactor(net.parameters(), lr=0.05)],
    "Muon + AdamW": muon_and_adamw,
    "LBFGS": lambda net: [torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=2, history_size=4)],
}


@dataclass
class Run:
    net: Net
    inners: list
    optimizer: FusedMainGradOptimizer

    @property
    def main_params(self):
        return [p for inner in self.inners for group in inner.param_groups for p in group["params"]]


def start(dtypes, make, seed=0, **settings):
    net = Net(dtypes, seed)
    inners = make(net)
    return Run(net, inners, FusedMainGradOptimizer(inners if len(inners) > 1 else inners[0], **settings))


def batch(number):
    generator = torch.Generator().manual_seed(100 + number)
    return torch.randn(7, 5, generator=generator), torch.randn(7, 3, generator=generator)


def loss_of(net, number):
    x, y = batch(number)
    return (net(x) - y).square().mean()


def train(run, numbers):
    for number in numbers:

        def closure(number=number):
            run.optimizer.zero_grad()
            loss = loss_of(run.net, number)
            loss.backward()
            return loss

        run.optimizer.step(closure)
    run.optimizer.zero_grad()


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def frozen(value):
    """Return ``value`` with every tensor turned into its dtype, shape and bytes: equal means bit-equal."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().clone().reshape(-1)
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(map(frozen, value)) if type(value) in (list, tuple) else value


def everything(run):
    """Return the bits of parameters, gradients, main_params, inner state and hyper-parameters."""
    number = {param: index for index, param in enumerate(run.main_params)}
    return {
        "params": {name: frozen(p) for name, p in run.net.named_parameters()},
        "grads": {name: frozen(p.grad) for name, p in run.net.named_parameters()},
        "main_params": frozen(run.main_params),
        "state": [{number.get(k, k): frozen(v) for k, v in inner.state.items()} for inner in run.inners],
        "groups": hyper_parameters(run.optimizer),
        "inner_groups": [hyper_parameters(inner) for inner in run.inners],
    }


def hyper_parameters(optimizer):
    return [{k: frozen(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    return [t for item in value for t in tensors_in(item)] if type(value) in (list, tuple, set) else []


def addresses(run):
    states = [dict(inner.state) for inner in run.inners]
    owned = [*run.net.parameters(), *run.main_params, *(p.main_grad for p in run.net.parameters())]
    return sorted(t.data_ptr() for t in owned + tensors_in(states))


def assert_is_finite_and_trained(run):
    for tensor in [*run.net.parameters(), *run.main_params, *tensors_in([dict(i.state) for i in run.inners])]:
        assert torch.isfinite(tensor).all()
    fresh = Net(tuple(p.dtype for p in (run.net.first.weight, run.net.second.weight)))
    for ours, theirs in zip(run.net.parameters(), fresh.parameters(), strict=True):
        assert not torch.equal(ours, theirs)


def assert_main_params_hold_more_than_the_model(run):
    """Without this, resuming from the model's weights alone would pass, too."""
    low = [m for m, p in zip(run.main_params, run.net.parameters(), strict=True) if p.dtype.itemsize == 2]
    assert low
    assert all((m != m.bfloat16()).any() or (m != m.half()).any() for m in low)


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


# -- in place


def before_the_first_step(run):
    assert not any(inner.state for inner in run.inners)


def between_steps(run):
    train(run, range(3))


def with_gradients(run):
    train(run, range(3))
    loss_of(run.net, 3).backward()


def after_outside_edits(run):
    train(run, range(3))
    with torch.no_grad():
        run.net.first.weight[0].mul_(2.0)
        run.net.second.bias.copy_(torch.tensor([0.5, -0.0, 3.0]))
    run.net.first.bias.data = torch.ones_like(run.net.first.bias)


def after_an_edited_learning_rate(run):
    train(run, range(3))
    lr = run.optimizer.param_groups[0]["lr"]
    run.optimizer.param_groups[0]["lr"] = lr.fill_(0.125) if isinstance(lr, torch.Tensor) else 0.125


MOMENTS = [before_the_first_step, between_steps, with_gradients, after_outside_edits, after_an_edited_learning_rate]


def assert_loading_its_own_state_changes_no_bit(run, moves=False):
    before, owned = everything(run), addresses(run)
    before.pop("inner_groups")  # these follow the wrapper's
    state_dict = run.optimizer.state_dict()
    assert before.items() <= everything(run).items()
    if moves:  # loading gives main_params what their edited weights say
        run.optimizer.load_state_dict(state_dict)
        before = everything(run)
        before.pop("inner_groups")
    run.optimizer.load_state_dict(state_dict)
    assert before.items() <= everything(run).items()
    assert addresses(run) == owned


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_changes_no_bit_and_moves_no_tensor(dtypes, make, moment):
    run = start(dtypes, make)
    moment(run)
    assert_loading_its_own_state_changes_no_bit(run, moves=moment is after_outside_edits)


@pytest.mark.parametrize("make", [adamw(foreach=False), adamw(fused=True)], ids=["host decides", "device decides"])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_after_a_skip_changes_no_bit(dtypes, make):
    run = start(dtypes, make)
    train(run, range(3))
    loss_of(run.net, 3).backward()
    run.net.first.weight.grad[0, 0] = torch.inf
    before = everything(run)
    with pytest.warns(RuntimeWarning, match="skipped"):
        num_skipped = run.optimizer.step() or run.optimizer.skipped_steps
    assert num_skipped == 1
    assert everything(run)["main_params"] == before["main_params"]
    assert_loading_its_own_state_changes_no_bit(run)
    assert run.optimizer.skipped_steps == 1


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_in_mid_window_changes_no_bit(dtypes):
    run = start(dtypes, OPTIMIZERS["AdamW loop"], gradient_accumulation_steps=4)
    twin = start(dtypes, OPTIMIZERS["AdamW loop"], gradient_accumulation_steps=4)
    for number in range(12):
        for each in (run, twin):
            loss_of(each.net, number).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert run.optimizer.window_ends is (number % 4 == 3)
        assert_loading_its_own_state_changes_no_bit(run)
    assert_is_finite_and_trained(run)
    assert everything(run) == everything(twin)


@pytest.mark.parametrize("dtypes", [DTYPES[d] for d in LOW], ids=LOW)
def test_outside_edits_survive_loading_its_own_state(dtypes):
    runs = [start(dtypes, OPTIMIZERS["AdamW loop"]) for _ in range(2)]
    for run in runs:
        after_outside_edits(run)
    runs[0].optimizer.load_state_dict(runs[0].optimizer.state_dict())
    for run in runs:
        train(run, range(3, 6))
    assert_is_finite_and_trained(runs[0])
    assert everything(runs[0]) == everything(runs[1])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_loaded_tensors_are_copied_not_kept(dtypes, make):
    source = start(dtypes, make)
    train(source, range(3))
    for num_steps_before in (0, 3):
        saved = copy.deepcopy(source.optimizer.state_dict())
        run = start(dtypes, make)
        train(run, range(num_steps_before))
        run.optimizer.load_state_dict(saved)
        loaded = everything(run)
        assert loaded["state"] == everything(source)["state"]
        assert tensors_in(saved["state"])
        for tensor in tensors_in(saved):
            tensor.fill_(77)
        assert everything(run) == loaded
        train(run, range(3, 6))
        assert all((tensor == 77).all() for tensor in tensors_in(saved))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_into_a_running_optimizer_goes_back_in_time(dtypes):
    run = start(dtypes, OPTIMIZERS["AdamW amsgrad"])
    train(run, range(3))
    saved = copy.deepcopy([run.net.state_dict(), run.optimizer.state_dict()])
    at_save, owned = everything(run), addresses(run)
    train(run, range(3, 6))
    later = everything(run)
    assert later["state"] != at_save["state"]
    run.net.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    assert everything(run) == at_save
    assert addresses(run) == owned
    train(run, range(3, 6))
    assert_is_finite_and_trained(run)
    assert everything(run) == later


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_asking_for_a_state_dict_before_the_first_step_moves_nothing(make):
    asked, twin = start(DTYPES["mixed"], make), start(DTYPES["mixed"], make)
    before = everything(asked)
    state_dict = asked.optimizer.state_dict()
    assert everything(asked) == before
    assert all(set(state) <= {"main_param"} for state in state_dict["state"].values())
    for run in (asked, twin):
        train(run, range(3))
    assert_is_finite_and_trained(asked)
    assert everything(asked) == everything(twin)


def test_a_state_dict_of_an_fp32_model_before_the_first_step_holds_no_state():
    assert start(DTYPES["fp32"], OPTIMIZERS["AdamW loop"]).optimizer.state_dict()["state"] == {}


def test_a_pending_gradient_is_not_saved():
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"], gradient_accumulation_steps=3)
    train(run, range(3))
    empty = frozen(run.optimizer.state_dict())
    loss_of(run.net, 3).backward()
    run.optimizer.step()
    assert not run.optimizer.window_ends
    assert run.net.first.weight.grad.count_nonzero()
    assert frozen(run.optimizer.state_dict()) == empty


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


# -- states of every kind


class Zoo(torch.optim.Optimizer):
    """SGD whose state holds one of everything that ``torch.load(weights_only=True)`` reads."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"], self.state[param])
        return loss

    def _update(self, param, lr, state):
        if not state:
            rows, columns = (*param.shape, 1, 1)[:2]
            state.update(
                count=torch.tensor(0),
                scalar=torch.tensor(0.0),
                row=torch.zeros(rows, 1),
                column=torch.zeros(1, columns),
                double=torch.zeros(param.shape, dtype=torch.float64),
                low=torch.zeros(param.shape, dtype=torch.bfloat16),
                codes=torch.zeros(param.shape, dtype=torch.uint8),
                mask=torch.zeros(param.shape, dtype=torch.bool),
                empty=torch.zeros(0),
                phase="warm-up",
                raw=b"\x00\xff",
                pair=(torch.zeros(2), "text", 0.1),
                history=[torch.zeros(param.shape)],
                nested={"inner": {"sum": torch.zeros(param.shape), "name": "text"}, 3: [1, 2]},
                names={"one", "two"},
                size=torch.Size([2, 3]),
                kind=torch.float32,
                nothing=None,
                flag=True,
            )
        grad = param.grad.float()
        state["count"] += 1
        state["scalar"] += grad.sum() / 3
        state["row"] += grad.sum()
        state["column"] -= grad.sum()
        state["double"] += grad.double() / 3
        state["low"] += grad.to(torch.bfloat16)
        state["codes"] += 1
        state["mask"] = grad > 0
        state["pair"][0].add_(1 / 3)
        state["history"][-1].add_(grad)
        state["nested"]["inner"]["sum"] += grad
        state["phase"] = "steady" if state["count"] > 1 else "warm-up"
        change = state["double"].float() + state["low"].float() + state["nested"]["inner"]["sum"]
        param.add_(change * state["mask"] / state["count"], alpha=-lr)


def zoo(net):
    return [Zoo(net.parameters())]


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_states_of_every_kind_survive_in_value_type_and_place(dtypes):
    run = start(dtypes, zoo)
    train(run, range(3))
    assert_loading_its_own_state_changes_no_bit(run)
    saved = through_a_file([run.net.state_dict(), run.optimizer.state_dict()])
    resumed = start(dtypes, zoo, seed=7)
    resumed.net.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert everything(resumed) == everything(run)
    state = resumed.inners[0].state[resumed.main_params[0]]
    assert state["phase"] == "steady"
    assert state["nested"]["inner"]["name"] == state["pair"][1] == "text"
    assert {k: v.dtype for k, v in state.items() if k in ("count", "double", "low", "codes", "mask")} == {
        "count": torch.int64,
        "double": torch.float64,
        "low": torch.bfloat16,
        "codes": torch.uint8,
        "mask": torch.bool,
    }
    for each in (run, resumed):
        train(each, range(3, 6))
    assert_is_finite_and_trained(run)
    assert everything(resumed) == everything(run)


class Stubborn(torch.optim.SGD):
    """Keeps in its state what weights-only loading does not read."""

    def __init__(self, params, thing, lr=0.1):
        super().__init__(params, lr=lr)
        self.thing = thing

    def step(self, closure=None):
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["keeper"] = {"deep": [self.thing]}
        return loss


class Thing:
    pass


@pytest.mark.parametrize(("thing", "named"), [(Thing(), "Thing"), (slice(3), "builtins.slice"), (range(3), "range")])
def test_state_that_is_neither_tensor_nor_builtin_is_saved_as_it_is_with_a_warning_that_names_it(thing, named):
    net = Net(DTYPES["bf16"])
    inner = Stubborn(net.named_parameters(), thing)
    run = Run(net, [inner], FusedMainGradOptimizer(inner))
    run.optimizer.state_dict()
    train(run, range(3))
    with pytest.warns(UserWarning, match=rf"parameter scale, 'keeper'.*{named}.*weights_only=False") as caught:
        state = run.optimizer.state_dict()
    assert len(caught) == 1
    assert state["state"][0]["keeper"]["deep"][0] is thing
    run.optimizer.state_dict()  # said once


@pytest.mark.parametrize("place", ["hyper-parameter", "own format", "key"])
def test_what_weights_only_loading_does_not_read_is_named_at_save_wherever_it_is(place):
    net = Net(DTYPES["bf16"])
    inner = (OwnFormat if place == "own format" else torch.optim.SGD)(net.parameters(), lr=0.1)
    run = Run(net, [inner], FusedMainGradOptimizer(inner))
    run.optimizer.state_dict()
    if place == "key":
        inner.state[Thing()]["count"] = 1
    else:
        inner.param_groups[0]["thing"] = Thing()
    with pytest.warns(UserWarning, match=r"Thing.*weights_only=False"):
        run.optimizer.state_dict()


class OwnFormat(torch.optim.SGD):
    """Writes and reads a format of its own, and counts how often it was asked."""

    calls = 0

    def state_dict(self):
        type(self).calls += 1
        return {"mine": super().state_dict(), "wrote": "OwnFormat"}

    def load_state_dict(self, state_dict):
        type(self).calls += 100
        if state_dict.get("wrote") != "OwnFormat":
            raise KeyError("not written by OwnFormat")
        super().load_state_dict(state_dict["mine"])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_an_inner_class_with_its_own_format_is_asked_to_write_and_read_it(dtypes):
    def make(net):
        matrices = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim != 2]
        return [torch.optim.AdamW(others, lr=0.01), OwnFormat(matrices, lr=0.05, momentum=0.9)]

    run = start(dtypes, make)
    train(run, range(3))
    OwnFormat.calls = 0
    state_dict = run.optimizer.state_dict()
    assert OwnFormat.calls == 1
    assert state_dict["fusedopt"]["inner"][1]["wrote"] == "OwnFormat"
    saved = through_a_file([run.net.state_dict(), state_dict])
    resumed = start(dtypes, make, seed=7)
    resumed.optimizer.load_state_dict(saved[1])
    assert OwnFormat.calls == 101
    resumed.net.load_state_dict(saved[0])
    assert resumed.inners[1].state[resumed.inners[1].param_groups[0]["params"][0]]["momentum_buffer"].count_nonzero()
    assert everything(resumed) == everything(run)
    for each in (run, resumed):
        train(each, range(3, 6))
    assert_is_finite_and_trained(run)
    assert everything(resumed) == everything(run)


class Global(torch.optim.SGD):
    """Keeps a count under a key that is no parameter."""

    def __init__(self, params, by=1, lr=0.05):
        super().__init__(params, lr=lr, momentum=0.9)
        self.by = by

    def step(self, closure=None):
        counter = self.state["global"].setdefault("count", torch.zeros(1, dtype=torch.int64))
        counter += self.by
        return super().step(closure)


@pytest.mark.parametrize("num_inner", [1, 2])
def test_state_under_other_keys_than_parameters_is_kept_by_its_optimizer(num_inner):
    def make(net):
        params = list(net.parameters())
        return [Global(params)] if num_inner == 1 else [Global(params[:2], by=1), Global(params[2:], by=10)]

    run = start(DTYPES["bf16"], make)
    train(run, range(3))
    counts = [int(inner.state["global"]["count"]) for inner in run.inners]
    assert counts == [3, 30][:num_inner]
    assert_loading_its_own_state_changes_no_bit(run)
    resumed = start(DTYPES["bf16"], make, seed=7)
    saved = through_a_file([run.net.state_dict(), run.optimizer.state_dict()])
    resumed.net.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert everything(resumed) == everything(run)
    saved[1]["state"]["global"]["count"].fill_(77)
    for each in (run, resumed):
        train(each, range(3, 6))
    assert [int(inner.state["global"]["count"]) for inner in resumed.inners] == [2 * count for count in counts]
    assert everything(resumed) == everything(run)


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


# -- misfits


def named_adamw(net, num_groups=1, **settings):
    named = list(net.named_parameters())
    parts = [named] if num_groups == 1 else [named[:2], named[2:]]
    return [torch.optim.AdamW([{"params": part} for part in parts], **{"lr": 0.01, **settings})]


def edit(path, value):
    """Return what sets ``state_dict[path[0]][path[1]]...`` to ``value``, or deletes it."""

    def apply(state_dict):
        target = functools.reduce(lambda holder, key: holder[key], path[:-1], state_dict)
        if value is DELETED:
            del target[path[-1]]
        else:
            target[path[-1]] = value(target[path[-1]]) if callable(value) else value
        return state_dict

    return apply


DELETED = object()
# Parameters in order: 0 scale, 1 first.weight, 2 first.bias, 3 second.weight, 4 second.bias.
EDITS = {
    "another format": (edit(["fusedopt", "format"], FORMAT + 1), [f"format {FORMAT + 1}", f"format {FORMAT}"]),
    "another name": (edit(["fusedopt", "names", 1], "stem.weight"), ["first.weight", "stem.weight"]),
    "another shape": (edit(["fusedopt", "shapes", 1], [6, 4]), ["first.weight", r"\[6, 4\]", r"\[6, 5\]"]),
    "another dtype": (
        edit(["fusedopt", "dtypes", 1], "torch.float16"),
        ["first.weight", "torch.float16", "torch.bfloat16"],
    ),
    "no main_param": (edit(["state", 1, "main_param"], DELETED), ["first.weight", "main_param"]),
    "a rounded main_param": (
        edit(["state", 1, "main_param"], lambda t: t.bfloat16()),
        ["first.weight", "main_param", "torch.bfloat16", "torch.float32"],
    ),
    "a main_param of another shape": (
        edit(["state", 1, "main_param"], lambda t: t[:, :4]),
        ["first.weight", "main_param", r"\(6, 4\)", r"\(6, 5\)"],
    ),
    "a main_param that is none": (edit(["state", 1, "main_param"], 3.0), ["first.weight", "main_param", "float"]),
    "state of another shape": (
        edit(["state", 1, "exp_avg"], lambda t: t[:5]),
        ["first.weight", "exp_avg", r"\(5, 5\)", r"\(6, 5\)"],
    ),
    "the last one wrong": (
        edit(["state", 4, "exp_avg_sq"], lambda t: t[:2]),
        ["second.bias", "exp_avg_sq", r"\(2,\)", r"\(3,\)"],
    ),
    "no groups": (edit(["param_groups"], DELETED), ["param_groups"]),
    "no state": (edit(["state"], DELETED), ["state"]),
    "a group without parameters": (edit(["param_groups", 0, "params"], DELETED), ["params"]),
    "a truncated signature": (edit(["fusedopt", "shapes"], lambda shapes: shapes[:-1]), ["shapes"]),
    "a signature without shapes": (edit(["fusedopt", "shapes"], DELETED), ["shapes"]),
    "a signature that is none": (edit(["fusedopt"], 3), ["fusedopt"]),
}


def assert_refused(run, state_dict, words):
    before, owned = everything(run), addresses(run)
    with pytest.raises(ValueError, match=words[0]) as caught:
        run.optimizer.load_state_dict(state_dict)
    for word in words:
        assert caught.match(word)
    assert everything(run) == before
    assert addresses(run) == owned
    train(run, [11])


@pytest.mark.parametrize("has_state", [True, False], ids=["running", "fresh"])
@pytest.mark.parametrize("name", EDITS)
def test_a_state_dict_that_does_not_fit_is_refused_by_name_and_nothing_is_written(name, has_state):
    apply, words = EDITS[name]
    saved = start(DTYPES["bf16"], named_adamw)
    train(saved, range(3))
    state_dict = copy.deepcopy(saved.optimizer.state_dict())
    start(DTYPES["bf16"], named_adamw, seed=7).optimizer.load_state_dict(state_dict)  # fits before the edit
    run = start(DTYPES["bf16"], named_adamw, seed=7)
    train(run, range(2 if has_state else 0))
    assert_refused(run, apply(state_dict), words)


def trained_state_dict(dtypes=DTYPES["bf16"], make=named_adamw, **settings):
    run = start(dtypes, functools.partial(make, **settings) if settings else make)
    train(run, range(3))
    return run.optimizer.state_dict()


def test_another_number_of_groups_is_refused():
    run = start(DTYPES["bf16"], named_adamw)
    assert_refused(run, trained_state_dict(num_groups=2), ["2 parameter group", "has 1", r"\[2, 3\]", r"\[5\]"])


def test_groups_of_other_sizes_are_refused():
    def make(net):
        named = list(net.named_parameters())
        return [torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:]}], lr=0.01)]

    run = start(DTYPES["bf16"], make)
    assert_refused(run, trained_state_dict(num_groups=2), [r"\[2, 3\]", r"\[3, 2\]"])


def test_parameters_in_another_order_are_refused_by_name():
    def make(net):
        return [torch.optim.AdamW(reversed(list(net.named_parameters())), lr=0.01)]

    run = start(DTYPES["bf16"], make)
    assert_refused(run, trained_state_dict(), ["second.bias", "scale"])


def test_another_model_is_refused_also_without_names():
    class Wider(Net):
        def __init__(self, dtypes, seed=0):
            super().__init__(dtypes, seed)
            self.second = nn.Linear(6, 4, dtype=dtypes[1])

    wider = Wider(DTYPES["bf16"])
    inner = torch.optim.AdamW(wider.parameters())
    saved = FusedMainGradOptimizer(inner).state_dict()
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    assert_refused(run, saved, [r"param_groups\[0\]\['params'\]\[3\]", r"\[4, 6\]", r"\[3, 6\]"])


@pytest.mark.parametrize("pair", [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("mixed", "bf16")])
def test_another_model_dtype_is_refused(pair):
    saved, here = (DTYPES[name] for name in pair)
    run = start(here, named_adamw)
    assert_refused(run, trained_state_dict(saved), ["dtype", "torch."])


def test_a_bare_state_of_another_shape_is_refused():
    net = Net(DTYPES["bf16"])
    bare = torch.optim.AdamW(net.parameters())
    loss_of(net, 0).backward()
    bare.step()
    saved = copy.deepcopy(bare.state_dict())
    saved["state"][3]["exp_avg"] = torch.zeros(3, 5, dtype=torch.bfloat16)
    for num_steps in (0, 2):
        run = start(DTYPES["bf16"], named_adamw)
        train(run, range(num_steps))
        assert_refused(run, saved, ["second.weight", "exp_avg", r"\(3, 5\)", r"\(3, 6\)"])


@pytest.mark.parametrize("thing", [None, 3, "text", [], [1, 2], {}, {"state": {}}, {"epoch": 3}], ids=repr)
def test_what_is_no_state_dict_at_all_is_refused(thing):
    assert_refused(start(DTYPES["bf16"], named_adamw), thing, ["state dict"])


def test_a_models_state_dict_is_refused():
    run = start(DTYPES["bf16"], named_adamw)
    train(run, range(2))
    assert_refused(run, run.net.state_dict(), ["state dict", "first.weight"])


def test_names_on_one_side_only_let_positions_decide():
    unnamed = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    train(unnamed, range(3))
    named = start(DTYPES["bf16"], named_adamw)
    named.optimizer.load_state_dict(unnamed.optimizer.state_dict())
    assert everything(named)["state"] == everything(unnamed)["state"]
    assert named.optimizer.param_groups[0]["param_names"][1] == "first.weight"
    unnamed.optimizer.load_state_dict(named.optimizer.state_dict())


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


# -- torch.distributed.checkpoint on one process; several: tests/distributed/test_checkpoints_of_torch.py

OPTIONS = [{}, {"full_state_dict": True}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [OPTIMIZERS[o] for o in OPTIMIZERS if o != "LBFGS"], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_torchs_get_and_set_resume_bit_equal_and_move_nothing(dtypes, make, options):
    options = StateDictOptions(**options)
    run = start(dtypes, make)
    before = everything(run)
    fresh = copy.deepcopy(get_optimizer_state_dict(run.net, run.optimizer, options=options))
    assert everything(run) == before
    train(run, range(3))
    at_save = everything(run)
    saved = get_optimizer_state_dict(run.net, run.optimizer, options=options)
    assert everything(run) == at_save
    resumed = start(dtypes, make, seed=7)
    resumed.net.load_state_dict(run.net.state_dict())
    set_optimizer_state_dict(resumed.net, resumed.optimizer, copy.deepcopy(saved), options=options)
    assert tensor_bits(resumed) == {key: at_save[key] for key in tensor_bits(resumed)}
    for each in (run, resumed):
        train(each, range(3, 6))
    assert_is_finite_and_trained(run)
    assert tensor_bits(resumed) == tensor_bits(run)
    set_optimizer_state_dict(run.net, run.optimizer, fresh, options=options)  # what was never stepped has no state
    assert not any(inner.state for inner in run.inners)
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    for main, param, at_start in zip(run.main_params, params, before["main_params"], strict=True):
        assert main is param or frozen(main) == at_start


def tensor_bits(run):
    return {key: value for key, value in everything(run).items() if "groups" not in key}  # torch makes betas a list


@pytest.mark.parametrize("has_state", [True, False], ids=["running", "fresh"])
def test_a_checkpoint_without_a_main_param_is_refused_by_name(has_state):
    run = start(DTYPES["bf16"], named_adamw)
    train(run, range(2 if has_state else 0))
    saved = copy.deepcopy(get_optimizer_state_dict(run.net, run.optimizer))
    before = everything(run)
    del saved["state"]["first.bias"]["main_param"]
    with pytest.raises(ValueError, match=r"no main_param for parameter first\.bias"):
        set_optimizer_state_dict(run.net, run.optimizer, saved)
    assert everything(run) == before


def test_a_stock_optimizers_checkpoint_is_taken():
    net = Net(DTYPES["fp32"])
    (bare,) = named_adamw(net)
    train(Run(net, [bare], bare), range(3))
    run = start(DTYPES["fp32"], named_adamw, seed=7)
    set_optimizer_state_dict(run.net, run.optimizer, get_optimizer_state_dict(net, bare))
    assert frozen([*run.inners[0].state.values()]) == frozen([*bare.state.values()])


def test_state_is_shown_empty_to_everybody_but_torchs_checkpoints():
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    assert not run.optimizer.state
    train(run, range(1))
    assert run.optimizer.state
    assert set(run.optimizer.state[run.net.scale]) == {"step", "exp_avg", "exp_avg_sq"}


def test_state_that_cannot_be_foretold_is_refused_before_the_first_step():
    run = start(DTYPES["bf16"], OPTIMIZERS["LBFGS"])
    before = everything(run)
    with pytest.raises(RuntimeError, match=r"LBFGS.*not known before its first step.*after a step"):
        get_optimizer_state_dict(run.net, run.optimizer)
    assert everything(run) == before
