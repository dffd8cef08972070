"""`optimizer.param_groups` belongs to the user: an edit of the lists is followed as by a stock optimizer, or raises."""

import copy
import warnings
from collections import defaultdict

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fusedopt import FusedMainGradOptimizer

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.5, momentum=0.5),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.1, fused=True),
}
SHAPES = [(3,), (2, 2), (1,), (4,), (2, 3), (2,), (5,), (0,)]
NUM_LISTED = 5  # of SHAPES; the others may join


class Run:
    """An optimizer over some of a pool of parameters, and what was taken out of it."""

    def __init__(self, make, wrap, dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)
        self.pool = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
        listed = self.pool[:NUM_LISTED]
        self.optimizer = wrap(
            make([{"params": listed[:2]}, {"params": listed[2:4], "lr": 0.25}, {"params": listed[4:]}])
        )
        self.stash = []
        self.num_steps = 0

    @property
    def groups(self):
        return self.optimizer.param_groups

    def step(self, *_):
        """Give every parameter of the pool but one a gradient that does not depend on its value, and step."""
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.num_steps)
        gradients = [torch.randint(-8, 9, shape, generator=generator).float() for shape in SHAPES]
        used = [p for i, p in enumerate(self.pool) if i != self.num_steps % len(self.pool)]
        sum(
            (p * g.to(p.dtype)).sum() for p, g in zip(self.pool, gradients, strict=True) if any(p is u for u in used)
        ).backward()
        self.optimizer.step()
        for param in self.pool:
            param.grad = None

    def unlisted(self):
        listed = {id(p) for g in self.groups for p in g["params"]}
        listed |= {id(p) for g in self.stash for p in g["params"]}
        return [p for p in self.pool if id(p) not in listed]


def pick(items, number):
    return items[number % len(items)] if items else None


def reverse_groups(run, *_):
    run.groups.reverse()


def reverse_params(run, a, _):
    if run.groups:
        params = pick(run.groups, a)["params"]
        if isinstance(params, list):
            params.reverse()


def rotate_rebuilt(run, *_):
    rebuilt = [dict(group) for group in run.groups]
    run.optimizer.param_groups = rebuilt[1:] + rebuilt[:1]


def new_lists(run, *_):
    for group in run.groups:
        group["params"] = tuple(group["params"])


def slice_groups(run, a, _):
    keep = a % (len(run.groups) + 1)
    run.stash += run.groups[keep:]
    run.optimizer.param_groups = run.groups[:keep]


def pop_group(run, a, _):
    if run.groups:
        run.stash.append(run.groups.pop(a % len(run.groups)))


def put_group_back(run, a, b):
    if run.stash:
        run.groups.insert(b % (len(run.groups) + 1), run.stash.pop(a % len(run.stash)))


def remove_param(run, a, b):
    group = pick(run.groups, a)
    if group and group["params"]:
        group["params"] = list(group["params"])
        del group["params"][b % len(group["params"])]


def append_param(run, a, b):
    group, param = pick(run.groups, a), pick(run.unlisted(), b)
    if group and param is not None:
        group["params"] = [*group["params"], param]


def replace_param(run, a, b):
    group, param = pick(run.groups, a), pick(run.unlisted(), b)
    if group and group["params"] and param is not None:
        group["params"] = [param, *group["params"][1:]]


def move_param(run, a, b):
    origin, target = pick(run.groups, a), pick(run.groups, b)
    if origin and origin is not target and origin["params"]:
        origin["params"] = list(origin["params"])
        target["params"] = [*target["params"], origin["params"].pop()]


def split_group(run, a, _):
    group = pick(run.groups, a)
    if group and len(group["params"]) > 1:
        run.groups.append({**group, "params": list(group["params"][1:]), "lr": 0.125})
        group["params"] = list(group["params"][:1])


def join_groups(run, *_):
    if len(run.groups) > 1:
        run.groups[0]["params"] = [*run.groups[0]["params"], *run.groups.pop()["params"]]


def new_group(run, a, b):
    model, param = pick(run.groups, a), pick(run.unlisted(), b)
    if model and param is not None:
        run.groups.append({**model, "params": [param], "lr": 0.0625})


def set_lr(run, a, b):
    if run.groups:
        pick(run.groups, a)["lr"] = 2.0 ** -(b % 6)


def add_param_group(run, _, b):
    param = pick(run.unlisted(), b)
    if param is not None:
        run.optimizer.add_param_group({"params": [param], "lr": 0.5})


EDITS = [
    *(reverse_groups, reverse_params, rotate_rebuilt, new_lists, slice_groups, pop_group, put_group_back, remove_param),
    *(append_param, replace_param, move_param, split_group, join_groups, new_group, set_lr, add_param_group),
]
ACTIONS = st.tuples(st.sampled_from([Run.step, Run.step, *EDITS]), st.integers(0, 7), st.integers(0, 7))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(ACTIONS, max_size=14))
@example([(Run.step, 0, 0), (reverse_groups, 0, 0), (Run.step, 0, 0)])
@example([(Run.step, 0, 0), (pop_group, 0, 0), (Run.step, 0, 0), (put_group_back, 0, 1), (Run.step, 0, 0)])
@example([(slice_groups, 0, 0), (Run.step, 0, 0), (put_group_back, 0, 0), (Run.step, 0, 0)])
def test_any_edit_of_the_groups_ends_as_on_a_stock_optimizer(make, actions):
    stock, ours = Run(make, lambda opt: opt), Run(make, FusedMainGradOptimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, for groups of one empty parameter
        for act, a, b in [*actions, (Run.step, 0, 0), (Run.step, 0, 0)]:
            for run in (stock, ours):
                act(run, a, b)
            if act is not Run.step:
                continue
            for number, (theirs, mine) in enumerate(zip(stock.pool, ours.pool, strict=True)):
                assert torch.isfinite(theirs).all()
                assert torch.equal(theirs, mine), f"parameter {number} after {act.__name__}"
            state_dict = copy.deepcopy(ours.optimizer.state_dict())
            listed = {id(p) for group in ours.groups for p in group["params"]}
            if listed >= {id(p) for p in ours.optimizer.state}:  # loading drops the state of others, as in torch
                ours.optimizer.load_state_dict(state_dict)


KEEPING = [e for e in EDITS if e not in (append_param, replace_param, new_group, put_group_back, add_param_group)]
KEEPING_ACTIONS = st.tuples(st.sampled_from([Run.step, Run.step, *KEEPING]), st.integers(0, 7), st.integers(0, 7))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(KEEPING_ACTIONS, max_size=14))
def test_main_params_keep_their_digits_wherever_their_parameters_go(make, actions):
    twin, ours = Run(make, lambda opt: opt), Run(make, FusedMainGradOptimizer, dtype=torch.bfloat16)
    with torch.no_grad():
        for theirs, mine in zip(twin.pool, ours.pool, strict=True):
            theirs.copy_(mine)
    for act, a, b in [*actions, (Run.step, 0, 0), (Run.step, 0, 0)]:
        for run in (twin, ours):
            act(run, a, b)
        if act is Run.step:
            for theirs, mine in zip(twin.pool, ours.pool, strict=True):
                assert torch.isfinite(theirs).all()
                assert torch.equal(theirs.bfloat16(), mine)


def test_a_removed_parameter_is_given_back_as_torch_made_it_and_an_added_one_gets_its_buffers():
    run = Run(OPTIMIZERS["AdamW"], FusedMainGradOptimizer, dtype=torch.bfloat16)
    run.step()
    removed = run.groups[0]["params"].pop()
    run.groups[1]["params"].append(added := run.pool[6])
    removed.sum().backward()
    run.optimizer.step()
    assert not hasattr(removed, "main_grad")
    assert removed.grad.dtype is torch.bfloat16
    assert removed.grad_dtype is torch.bfloat16
    assert added.main_grad.dtype is torch.float32
    assert run.optimizer.memory_report()["model"] == sum(2 * p.numel() for g in run.groups for p in g["params"])
    state = run.optimizer.state_dict()
    assert [len(group["params"]) for group in state["param_groups"]] == [1, 3, 1]
    run.optimizer.load_state_dict(copy.deepcopy(state))


def test_the_norm_and_the_clip_are_of_the_parameters_that_are_listed():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([a, b], lr=1.0), max_grad_norm=1.0)
    (a * 4 + b * 300).backward()
    optimizer.param_groups[0]["params"].pop()
    assert optimizer.clip_grad_norm_(torch.inf).item() == 4
    optimizer.step()
    assert optimizer.grad_norm.item() == 4
    assert a.item() == pytest.approx(-1, abs=1e-6)
    assert (b.item(), b.grad.item()) == (0, 300)


def test_no_parameters_left_is_a_step_that_does_nothing_as_in_torch():
    run = Run(OPTIMIZERS["AdamW"], lambda opt: FusedMainGradOptimizer(opt, max_grad_norm=1.0))
    before = [param.detach().clone() for param in run.pool]
    run.groups.clear()
    run.step()
    run.step()
    assert all(map(torch.equal, before, run.pool))
    assert run.optimizer.state_dict()["param_groups"] == []


def named(model):
    return [{"params": [(n, p)], "lr": 0.1 * (i + 1)} for i, (n, p) in enumerate(model.named_parameters())]


def test_names_follow_their_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(named(model), lr=0.1))
    last, first = optimizer.param_groups.pop(), optimizer.param_groups[0]
    first["params"] += last["params"]
    names = optimizer.state_dict()["param_groups"][0]["param_names"]
    assert names == ["0.weight", "1.bias"]


REFUSED = {
    "a parameter twice": (lambda o, p: o.param_groups[0]["params"].append(p[2]), ValueError, "listed twice"),
    "no parameter": (lambda o, p: o.param_groups[0]["params"].append("weight"), TypeError, r"\[0\]\['params'\]\[2\]"),
    "a list": (lambda o, p: o.param_groups.append([p[6]]), TypeError, r"param_groups\[3\] is a list"),
    "no params": (lambda o, p: o.param_groups.append({"lr": 1.0}), TypeError, r"\[3\]\['params'\] is a NoneType"),
    "a generator": (lambda o, p: o.param_groups.append({"params": iter(p)}), TypeError, "add_param_group"),
    "complex": (
        lambda o, p: o.param_groups[0]["params"].append(nn.Parameter(torch.ones(1, dtype=torch.complex64))),
        TypeError,
        "complex64",
    ),
    "the inner lists": (
        lambda o, p: o.optimizers_of_the_test.param_groups.pop(),
        RuntimeError,
        "inner AdamW were edited",
    ),
}


@pytest.mark.parametrize("call", ["step", "state_dict", "zero_grad"])
@pytest.mark.parametrize(("edit", "error", "match"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_raises_by_name_and_changes_nothing(edit, error, match, call):
    run = Run(OPTIMIZERS["AdamW"], FusedMainGradOptimizer)
    inner = run.optimizer._inner.optimizers[0]
    run.optimizer.optimizers_of_the_test = inner
    run.step()
    inner_before = [[id(p) for p in group["params"]] for group in inner.param_groups]
    values = [param.detach().clone() for param in run.pool]
    edit(run.optimizer, run.pool)
    with pytest.raises(error, match=match):
        getattr(run.optimizer, call)()
    assert all(map(torch.equal, values, run.pool))
    if "inner" not in match:
        assert [[id(p) for p in group["params"]] for group in inner.param_groups] == inner_before


def test_a_new_group_of_several_inner_optimizers_goes_where_its_parameters_were_or_says_which():
    weight, bias, other = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,), (2,)))
    inner = [torch.optim.Muon([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1)]
    optimizer = FusedMainGradOptimizer(inner)
    optimizer.param_groups.append({"params": [other], "lr": 0.1})
    with pytest.raises(ValueError, match=r"0: Muon, 1: SGD.*add_param_group"):
        optimizer.step()
    optimizer.param_groups[-1]["inner"] = 1
    (weight.sum() + bias.sum() + other.sum()).backward()
    optimizer.step()
    assert other.tolist() == pytest.approx([0.9, 0.9])
    assert [group["params"] for group in inner[1].param_groups] == [[bias], [other]]
    copied = copy.deepcopy(optimizer)
    assert [len(group["params"]) for group in copied.param_groups] == [1, 1, 1]


def test_a_deepcopy_keeps_each_main_param_where_groups_of_two_optimizers_alternate():
    params = [nn.Parameter(torch.full((2, 2), value, dtype=torch.bfloat16)) for value in (1.0, 2.0, 3.0)]
    optimizer = FusedMainGradOptimizer([torch.optim.SGD(params[:1], lr=0.001), torch.optim.SGD(params[1:2], lr=0.001)])
    optimizer.add_param_group({"params": params[2:], "inner": 0})
    sum(param.sum() for param in params).backward()
    optimizer.step()
    model, copied = copy.deepcopy((params, optimizer))
    for number, param in enumerate(params):
        found = copied.state_dict()["state"][number]["main_param"]
        assert torch.equal(found, optimizer.state_dict()["state"][number]["main_param"])
        assert torch.equal(copied.param_groups[number]["params"][0], param)
        assert copied.param_groups[number]["params"][0] is model[number]


# -- state


def test_assigning_state_resets_it_as_on_a_stock_optimizer():
    stock, ours = Run(OPTIMIZERS["SGD"], lambda opt: opt), Run(OPTIMIZERS["SGD"], FusedMainGradOptimizer)
    for run in (stock, ours):
        run.step()
        run.step()
        run.optimizer.state = defaultdict(dict)
        assert len(run.optimizer.state) == 0
        run.step()
        run.optimizer.state = defaultdict(dict, {run.pool[0]: {"momentum_buffer": torch.ones(3)}})
        run.step()
    for theirs, mine in zip(stock.pool, ours.pool, strict=True):
        assert torch.equal(theirs, mine)


RESETS = {
    "del": lambda o, p: o.state.__delitem__(p),
    "clear": lambda o, p: o.state.clear(),
    "assign": lambda o, p: setattr(o, "state", defaultdict(dict)),
    "pop the buffer": lambda o, p: o.state[p].pop("momentum_buffer"),
    "no buffer": lambda o, p: o.state[p].update(momentum_buffer=None),
}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_a_skipped_step_leaves_no_uninitialised_momentum_where_state_went_away(reset):
    param = nn.Parameter(torch.ones(64))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.5, fused=True))
    for _ in range(2):
        param.grad = torch.ones(64)
        optimizer.step()
    reset(optimizer, param)
    before = param.detach().clone()
    param.grad = torch.full((64,), torch.inf)
    with pytest.warns(RuntimeWarning, match="skipped"):
        num_skipped = optimizer.step() or optimizer.skipped_steps
    assert num_skipped == 1
    assert torch.equal(param, before)
    assert optimizer.state.get(param, {}).get("momentum_buffer") is None
    param.grad = torch.ones(64)
    optimizer.step()
    assert torch.equal(param, before - 1)


def test_momentum_that_is_switched_on_in_a_skipped_step_starts_from_nothing():
    param = nn.Parameter(torch.ones(64))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0, momentum=0.0, fused=True))
    param.grad = torch.ones(64)
    optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    param.grad = torch.full((64,), torch.nan)
    with pytest.warns(RuntimeWarning, match="skipped"):
        num_skipped = optimizer.step() or optimizer.skipped_steps
    assert num_skipped == 1
    param.grad = torch.ones(64)
    optimizer.step()
    assert torch.equal(param, torch.full((64,), -1.0))


# -- the inner optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_calling_the_inner_optimizer_of_a_wrapper_raises_and_changes_nothing(call, dtype):
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    inner = torch.optim.SGD([param], lr=1.0)
    optimizer = FusedMainGradOptimizer(inner)
    param.sum().backward()
    with pytest.raises(
        RuntimeError, match=rf"SGD.{call}\(\) was called on an optimizer that a FusedMainGradOptimizer wraps"
    ):
        getattr(inner, call)()
    assert param.tolist() == [1, 1, 1]
    assert param.grad is param.main_grad
    optimizer.step()
    assert param.tolist() == [0, 0, 0]
    assert optimizer.unwrap() is inner
    inner.zero_grad()
    assert param.grad is None
    param.sum().backward()
    inner.step()
    assert param.tolist() == [-1, -1, -1]


def test_a_dropped_wrapper_leaves_the_inner_optimizer_free():
    param = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([param], lr=1.0)
    FusedMainGradOptimizer(inner).unwrap()
    assert "zero_grad" not in vars(inner)
    assert not inner._optimizer_step_pre_hooks


def test_what_a_scheduler_on_the_inner_optimizer_does_is_seen_at_once():
    param = nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
    optimizer = FusedMainGradOptimizer(inner)
    for number in range(3):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 ** (number + 1) == inner.param_groups[0]["lr"]
    inner.param_groups[0]["lr"] = 0.25
    optimizer.param_groups[0]["lr"] = 0.75
    inner.param_groups[0]["lr"] = 0.375
    with pytest.raises(RuntimeError, match="changed on both sides"):
        optimizer.step()


# -- weights that were loaded


def test_a_state_dict_after_loading_a_model_holds_its_weights():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([param], lr=1e-4))
    param.sum().backward()
    optimizer.step()
    with torch.no_grad():
        param[1:] = 5
    main = optimizer.state_dict()["state"][0]["main_param"]
    assert main.tolist() == [pytest.approx(1 - 1e-4, abs=1e-7), 5, 5]
    assert copy.deepcopy((param, optimizer))[1].state_dict()["state"][0]["main_param"].tolist() == main.tolist()


def test_a_state_dict_between_loading_the_optimizer_and_the_model_costs_no_digits():
    def start():
        param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        return param, FusedMainGradOptimizer(torch.optim.SGD([param], lr=1e-4))

    param, optimizer = start()
    for _ in range(30):
        param.grad = torch.ones(3)
        optimizer.step()
    saved = copy.deepcopy((param.detach(), optimizer.state_dict()))
    other, resumed = start()
    other.data.mul_(7)
    resumed.load_state_dict(saved[1])
    assert torch.equal(resumed.state_dict()["state"][0]["main_param"], saved[1]["state"][0]["main_param"])
    with torch.no_grad():
        other.copy_(saved[0])
    assert torch.equal(resumed.state_dict()["state"][0]["main_param"], saved[1]["state"][0]["main_param"])
    for each, opt in ((param, optimizer), (other, resumed)):
        each.grad = torch.ones(3)
        opt.step()
    assert torch.equal(optimizer.state_dict()["state"][0]["main_param"], resumed.state_dict()["state"][0]["main_param"])
