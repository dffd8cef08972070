"""Buckets that step inside backward: the bits of whole steps, and gradients that never are there all at once."""

import copy
import gc
import math
import weakref

import pytest
import pytorch_optimizer
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusedopt import FusedLinear, FusedMainGradOptimizer, MainGradConfig
from tests.deep import IS_DEEP

WIDTH = 520  # a weight is a bucket of 1 MiB
STEPS = 4


class Net(nn.Module):
    """Layers of which the first and the last may share a weight, and one may be left out."""

    def __init__(
        self, dtype=torch.bfloat16, *, num_layers=4, is_tied=False, linear=nn.Linear, recomputes=False, skips=()
    ):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(linear(WIDTH, WIDTH, dtype=dtype) for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        if is_tied:
            self.layers[-1].weight = self.layers[0].weight
        self.recomputes, self.skips = recomputes, skips

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number in self.skips:
                continue
            if self.recomputes and 0 < number < len(self.layers) - 1:
                x = x + checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
            else:
                x = x + layer(x).tanh()
        return self.norm(x).float()


def train(net, optimizer, steps):
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(net.norm.weight.dtype)
        net(x).square().mean().mul(1 + step).backward()
        optimizer.step()
        optimizer.zero_grad()


INNERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "AdaBelief": lambda params: pytorch_optimizer.AdaBelief(params, lr=1e-2),  # counts steps in its groups
}


def wrap(net, name="AdamW", **settings):
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 3e-3},
    ]
    return FusedMainGradOptimizer(INNERS[name](groups), bucket_mib=1, **settings)


def assert_same(one, other):
    assert one.keys() == other.keys()
    for number, values in one.items():
        assert values.keys() == other[number].keys()
        for key, value in values.items():
            if torch.is_tensor(value):
                assert torch.isfinite(value).all()
                assert torch.equal(value, other[number][key]), (number, key)


@pytest.mark.parametrize("main_param", ["float32", "split", "split24"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", INNERS)
def test_weights_and_state_have_every_bit_of_whole_steps(name, dtype, main_param):
    found = {}
    for release in ("none", "backward"):
        net = Net(dtype)
        optimizer = wrap(net, name, release=release, main_param=main_param)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for step in range(STEPS):
            train(net, optimizer, [step])
            scheduler.step()
        found[release] = optimizer.state_dict()["state"], list(net.parameters()), optimizer.param_groups[0]["lr"]
    assert_same(found["none"][0], found["backward"][0])
    assert all(map(torch.equal, found["none"][1], found["backward"][1]))
    assert found["none"][2] == found["backward"][2]


@settings(max_examples=40 if IS_DEEP else 10, deadline=None)
@given(data=st.data())
def test_models_of_all_kinds_end_where_whole_steps_bring_them(data):
    more = {
        "is_tied": data.draw(st.booleans()),
        "linear": data.draw(st.sampled_from([nn.Linear, FusedLinear])),
        "recomputes": data.draw(st.booleans()),
        "skips": data.draw(st.sampled_from([(), (1,), (1, 2)])),
    }
    state_dtype = data.draw(st.sampled_from(["float32", "bfloat16", "int8"]))
    frozen = data.draw(st.sampled_from([None, 0, 2]))
    actions = data.draw(st.lists(st.sampled_from(["step", "freeze", "copy", "load", "edit"]), min_size=2, max_size=5))
    found = {}
    for release in ("none", "backward"):
        net = Net(**more)
        if frozen is not None:
            net.layers[frozen].requires_grad_(False)
        settings = {"release": release, "state_dtype": state_dtype, "main_param": "split"}
        optimizer = wrap(net, **settings)
        for number, action in enumerate(actions):
            if action == "freeze":
                net.layers[3].bias.requires_grad_(not net.layers[3].bias.requires_grad)
                optimizer.zero_grad()
            elif action == "copy":
                net, optimizer = copy.deepcopy((net, optimizer))
            elif action == "edit":
                with torch.no_grad():
                    net.layers[number % 4].weight.mul_(0.5)
            elif action == "load":
                again = copy.deepcopy(net)
                for param in again.parameters():
                    param.grad = None
                    vars(param).clear()
                loaded = wrap(again, **settings)
                loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                net, optimizer = again, loaded
            train(net, optimizer, [number])
        found[release] = optimizer.state_dict()["state"], list(net.parameters())
    assert_same(found["none"][0], found["backward"][0])
    assert all(map(torch.equal, found["none"][1], found["backward"][1]))


def test_gradients_of_two_buckets_are_all_there_is():
    net = Net(num_layers=8)
    optimizer = wrap(net, release="backward")
    seen = []
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(optimizer.memory_report()["main_grad"]))
    train(net, optimizer, range(2))
    largest = max(bucket.plan.numel for bucket in optimizer._buffers.buckets) * 4
    small = 4 * 1024 * 9  # biases and the norm, in a group of their own
    assert len(optimizer._buffers.buckets) >= 9
    assert 0 < max(seen) <= 2 * largest + small
    assert optimizer.memory_report()["main_grad"] == 0
    assert all(param.grad is None for param in net.parameters())


def test_a_second_backward_is_refused_by_name_and_the_first_one_stays():
    net, other = Net(), Net()
    optimizer, expected = wrap(net, release="backward"), wrap(other)
    train(other, expected, [0])
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    net(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"parameter .* after it was stepped inside backward"):
        net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_same(expected.state_dict()["state"], optimizer.state_dict()["state"])
    train(net, optimizer, [1])
    train(other, expected, [1])
    assert_same(expected.state_dict()["state"], optimizer.state_dict()["state"])


def test_gradients_set_by_hand_step_like_those_that_arrive():
    net, other = Net(), Net()
    optimizer, expected = wrap(net, release="backward"), wrap(other)
    for params, wrapper in ((list(net.parameters()), optimizer), (list(other.parameters()), expected)):
        for number, param in enumerate(params):
            param.grad = torch.full_like(param, 0.1 * (number + 1), dtype=torch.float32) if number != 2 else None
        wrapper.step()
    assert_same(expected.state_dict()["state"], optimizer.state_dict()["state"])


def test_clipping_goes_by_the_norm_of_the_step_before():
    limit = 1e-3
    net, other = Net(), Net()
    optimizer = wrap(net, "SGD", release="backward", max_grad_norm=limit, clip_by="previous")
    plain = wrap(other, "SGD", max_grad_norm=float("inf"))
    last = None
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        for model in (net, other):
            model(x).square().mean().mul(1 + step).backward()
        norm = torch.cat([p.grad.double().view(-1) for p in other.parameters() if p.grad is not None]).norm().item()
        if last is not None:
            coefficient = torch.clamp(limit / (last + 1e-6), max=1.0).float()
            assert coefficient < 1
            for param in other.parameters():
                param.grad.mul_(coefficient)
        plain.step()
        plain.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        # Rows of 1024 squares are added in fp32, in 8 lanes at least, norms of rows in fp64 (`torch_ops.norm`). By the
        # bound that it cites: (1024 / 8 + 4) * 2**-24 / 2, and 2**-24 of the result, are less than 2**-17.
        assert math.isfinite(norm)
        assert abs(optimizer.grad_norm.item() - norm) <= norm * 2**-17
        last = optimizer.state_dict()["fusedopt"]["last_norm"]
    assert_same(plain.state_dict()["state"], optimizer.state_dict()["state"])


def test_the_last_norm_outlives_a_checkpoint_and_a_copy():
    net = Net()
    settings = {"release": "backward", "max_grad_norm": 1e-3, "clip_by": "previous"}
    optimizer = wrap(net, **settings)
    train(net, optimizer, range(2))
    copied_net, copied = copy.deepcopy((net, optimizer))
    again = Net()
    again.load_state_dict(net.state_dict())
    loaded = wrap(again, **settings)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, range(2, 4))
    for model, other in ((copied_net, copied), (again, loaded)):
        train(model, other, range(2, 4))
        assert_same(optimizer.state_dict()["state"], other.state_dict()["state"])


@pytest.mark.parametrize("is_huge", [False, True])
def test_a_bucket_that_is_not_finite_is_left_out_by_itself(is_huge):
    net = Net()
    optimizer = wrap(net, "SGD", release="backward")
    before = [param.detach().clone() for param in net.parameters()]
    value = 1e30 if is_huge else float("nan")
    net.layers[1].weight.register_hook(lambda grad: grad.float().fill_(value).to(grad.dtype))
    x = torch.randn(4, WIDTH).bfloat16()
    net(x).square().mean().backward()
    if is_huge:
        optimizer.step()
        assert not optimizer.step_was_skipped
        assert torch.isfinite(net.layers[1].weight).all()
        assert not torch.equal(net.layers[1].weight, before[2])
        return
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    assert optimizer.step_was_skipped
    assert torch.equal(net.layers[1].weight, before[2])
    assert not torch.equal(net.layers[2].weight, before[4])
    assert torch.isfinite(torch.cat([param.detach().float().view(-1) for param in net.parameters()])).all()


def test_an_infinite_norm_that_is_ignored_is_not_what_the_next_step_clips_by():
    net = Net()
    settings = {"release": "backward", "max_grad_norm": 1e-3, "clip_by": "previous"}
    optimizer = wrap(net, "SGD", nonfinite="ignore", **settings)
    train(net, optimizer, [0])
    net.layers[1].bias.register_hook(lambda grad: torch.full_like(grad, float("inf")))
    last = optimizer.state_dict()["fusedopt"]["last_norm"]
    train(net, optimizer, [1])
    assert not torch.isfinite(optimizer.grad_norm)
    assert optimizer.state_dict()["fusedopt"]["last_norm"] == last
    assert 0 < last < math.inf


def test_a_parameter_that_comes_in_the_middle_of_a_backward_is_stepped():
    found = []
    for release in ("none", "backward"):
        net = Net()
        optimizer = wrap(net, release=release)
        late = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        is_there = False

        def add(grad, optimizer=optimizer, late=late):
            nonlocal is_there
            if not is_there:
                is_there = True
                optimizer.add_param_group({"params": [late]})

        net.layers[1].bias.register_hook(add)
        for step in range(STEPS):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
            net(x * late).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(late, torch.ones_like(late))
        found.append(optimizer.state_dict()["state"])
    assert_same(*found)


def test_a_weight_that_two_reentrant_recomputed_layers_share_is_refused_by_name():
    net = Net(num_layers=3)
    net.layers[1].weight = net.layers[2].weight
    optimizer = wrap(net, release="backward")
    x = torch.randn(4, WIDTH).bfloat16().requires_grad_()
    for layer in net.layers[1:]:
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="after it was stepped inside backward"):
        x.float().square().mean().backward()
    assert all(torch.isfinite(param).all() for param in net.parameters())
    optimizer.zero_grad()


def set_rate(net, optimizer):
    optimizer.param_groups[1]["lr"] = 0.5


def set_tensor_rate(net, optimizer):
    optimizer.param_groups[0]["lr"].mul_(0.5)


def step_the_scheduler_of_the_inner(net, optimizer):
    net.scheduler.step()


def decay_by_hand(net, optimizer):
    with torch.no_grad():
        net.layers[2].weight.mul_(0.9)


def take_out(net, optimizer):
    group = optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if param is not net.layers[1].weight]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step()`")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (set_rate, r"param_groups\[1\]\['lr'\] was changed, to 0.5,"),
        (set_tensor_rate, r"param_groups\[0\]\['lr'\] was changed"),
        (step_the_scheduler_of_the_inner, r"param_groups\[0\]\['lr'\] was changed"),
        (decay_by_hand, r"parameter \S+ was edited between backward"),
        (take_out, r"parameter \S+ was taken out of param_groups"),
    ],
)
def test_an_edit_between_backward_and_step_is_refused_by_name(edit, says, dtype):
    net = Net(dtype)
    inner = INNERS["AdamW"]([{"params": list(net.parameters())[::2]}, {"params": list(net.parameters())[1::2]}])
    if edit is set_tensor_rate:
        inner.param_groups[0]["lr"] = torch.tensor(1e-2)
    net.scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = FusedMainGradOptimizer(inner, bucket_mib=1, release="backward")
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        net(x).square().mean().backward()
        if step == 1:
            edit(net, optimizer)
            with pytest.raises(RuntimeError, match=says):
                optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.isfinite(param).all() for param in net.parameters())


def clip_by_torch(net, optimizer):
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def clip_by_wrapper(net, optimizer):
    optimizer.clip_grad_norm_(1.0)


def measure_by_torch(net, optimizer):
    torch.nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])


def step_by_scaler(net, optimizer):
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones((), requires_grad=True)).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (clip_by_torch, "stepped|steps"),
        (measure_by_torch, "stepped|steps"),
        (clip_by_wrapper, "buckets have stepped"),
        (step_by_scaler, "GradScaler"),
    ],
)
def test_what_comes_too_late_is_refused(act, says):
    net = Net()
    optimizer = wrap(net, release="backward")
    net(torch.randn(4, WIDTH).bfloat16()).mean().backward()
    with pytest.raises(RuntimeError, match=says):
        act(net, optimizer)


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"gradient_accumulation_steps": 2}, ["gradient_accumulation_steps", "release"]),
        ({"max_grad_norm": 1.0}, ["max_grad_norm", "release", "clip_by='previous'"]),
        ({"nonfinite": "raise"}, ["nonfinite", "release"]),
        ({"shard": "optimizer"}, ["shard", "release"]),
        ({"clip_by": "previous", "release": "none"}, ["clip_by", "release"]),
    ],
)
def test_settings_that_contradict_are_refused_together(more, names):
    with pytest.raises(ValueError, match="cannot be built") as caught:
        MainGradConfig(**{"release": "backward", **more})
    assert all(name in str(caught.value) for name in names)


def test_fp16_and_optimizers_that_couple_parameters_are_refused():
    with pytest.raises(ValueError, match="GradScaler"):
        wrap(Net(torch.float16), release="backward")
    net = Net()
    with pytest.raises(ValueError, match='release="backward" with LBFGS'):
        FusedMainGradOptimizer(torch.optim.LBFGS(net.parameters()), release="backward")
    assert not any(hasattr(param, "main_grad") for param in net.parameters())


def test_a_wrapper_that_is_dropped_is_gone_at_once():
    net = Net(num_layers=2)
    optimizer = wrap(net, release="backward")
    train(net, optimizer, [0])
    gc.collect()
    gc.disable()
    try:
        watched = weakref.ref(optimizer)
        del optimizer
        assert watched() is None
    finally:
        gc.enable()


def test_unwrap_gives_the_model_back():
    net = Net(num_layers=2)
    optimizer = wrap(net, release="backward")
    train(net, optimizer, [0])
    inner = optimizer.unwrap()
    net(torch.randn(4, WIDTH).bfloat16()).mean().backward()
    assert all(param.grad is not None for param in net.parameters())
    inner.step()
