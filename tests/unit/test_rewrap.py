"""Claims about wrapping again while a wrapper lives: `rewrap=True`, and what is said without it."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer, convert_linears, live_wrappers
from fusedopt.buffers import main_grad
from tests.compare import assert_bit_equal, values
from tests.models import Mlp, adamw, loss_of, train

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_rewrapped_model_trains_as_one_that_was_loaded_and_wrapped_anew(dtype):
    net, other = Mlp(dtype), Mlp(dtype)
    first = FusedMainGradOptimizer(adamw(net))
    train(net, first, range(3))
    other.load_state_dict(net.state_dict())
    second = FusedMainGradOptimizer(adamw(net), rewrap=True)
    fresh = FusedMainGradOptimizer(adamw(other))
    start = values(net)
    for optimizer, each in ((second, net), (fresh, other)):
        train(each, optimizer, range(3, 6))
    assert_bit_equal(values(net), values(other))
    assert not torch.equal(values(net)[0], start[0])
    assert all(param.main_grad is not None for param in net.parameters())


def test_an_fp32_model_ends_bit_equal_to_two_bare_optimizers_one_after_the_other():
    net, other = Mlp(torch.float32), Mlp(torch.float32)
    held = []
    for numbers in (range(3), range(3, 6)):
        train(other, adamw(other), numbers)
        held.append(FusedMainGradOptimizer(adamw(net), rewrap=True))
        train(net, held[-1], numbers)
    assert_bit_equal(values(net), values(other))


USES = {
    "step": lambda optimizer: optimizer.step(),
    "zero_grad": lambda optimizer: optimizer.zero_grad(),
    "clip": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "state": lambda optimizer: optimizer.state,
    "unwrap": lambda optimizer: optimizer.unwrap(),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_wrapper_that_held_the_parameters_raises_when_it_is_used_and_says_why(use):
    net = Mlp()
    first = FusedMainGradOptimizer(adamw(net))
    train(net, first, range(2))
    second = FusedMainGradOptimizer(adamw(net), rewrap=True)
    before = values(net)
    with pytest.raises(RuntimeError, match=r"was unwrapped: a later FusedMainGradOptimizer\(rewrap=True\) took"):
        use(first)
    assert_bit_equal(values(net), before)
    train(net, second, range(2))


def test_without_a_wrapper_that_lives_rewrap_wraps():
    net = Mlp()
    train(net, FusedMainGradOptimizer(adamw(net), rewrap=True), range(2))
    optimizer = FusedMainGradOptimizer(adamw(net), rewrap=True)
    optimizer.unwrap()
    train(net, FusedMainGradOptimizer(adamw(net), rewrap=True), range(2))


# -- gradients


def test_a_gradient_goes_on_in_fp32():
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    first = FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    layer(torch.full((1, 1), 256.0).bfloat16()).sum().backward()
    layer(torch.full((1, 1), 1.0).bfloat16()).sum().backward()  # 257 is no bf16
    with warnings.catch_warnings(action="error"):
        FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), rewrap=True)  # and dropped
    assert layer.weight.grad.item() == 256  # as unwrap() rounds it
    layer.weight.grad = None
    first = FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0))
    for value in (256.0, 1.0):
        layer(torch.full((1, 1), value).bfloat16()).sum().backward()
    kept = FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), rewrap=True)
    assert layer.weight.grad is layer.weight.main_grad
    assert layer.weight.grad.item() == 257
    layer(torch.full((1, 1), 1.0).bfloat16()).sum().backward()
    assert layer.weight.grad.item() == 258
    layer.weight.data.zero_()
    kept.sync_main_params()
    kept.step()
    assert kept.state_dict()["state"][0]["main_param"].item() == -258
    with pytest.raises(RuntimeError, match="was unwrapped"):
        first.step()


def test_a_gradient_that_was_set_by_hand_goes_on_and_none_stays_none():
    net = Mlp()
    first = FusedMainGradOptimizer(adamw(net))
    net.first.bias.grad = torch.arange(6.0)
    second = FusedMainGradOptimizer(adamw(net), rewrap=True)
    assert net.first.bias.grad is net.first.bias.main_grad
    assert net.first.bias.grad.tolist() == [0, 1, 2, 3, 4, 5]
    assert [name for name, p in net.named_parameters() if p.grad is not None] == ["first.bias"]
    second.step()
    del first


@pytest.mark.parametrize("k", [1, 3])
def test_a_pending_window_is_cleared_with_a_warning_and_flush_ends_it_without_one(k):
    for is_flushed in (False, True):
        net, other = Mlp(), Mlp()
        first = FusedMainGradOptimizer(adamw(net), gradient_accumulation_steps=3)
        for number in range(4):
            loss_of(net, number).backward()
            first.step()
            first.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if is_flushed:
                first.flush()
                first.zero_grad()
            other.load_state_dict(net.state_dict())
            second = FusedMainGradOptimizer(adamw(net), gradient_accumulation_steps=k, rewrap=True)
        texts = [str(warning.message) for warning in caught]
        assert [("1 micro-batch(es) of a window are pending" in text, "flush()" in text) for text in texts] == (
            [] if is_flushed else [(True, True)]
        )
        assert all(warning.filename == __file__ for warning in caught)
        assert all(param.grad is None for param in net.parameters())
        train(net, second, range(6))
        train(other, FusedMainGradOptimizer(adamw(other), gradient_accumulation_steps=k), range(6))
        assert_bit_equal(values(net), values(other))


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_backward_whose_forward_ran_under_the_wrapper_before_arrives_at_the_new_one(is_fused):
    net, other = Mlp(), Mlp()
    if is_fused:
        convert_linears(net), convert_linears(other)
    first = FusedMainGradOptimizer(adamw(net))
    loss = loss_of(net, 0)
    second = FusedMainGradOptimizer(adamw(net), rewrap=True)
    fresh = FusedMainGradOptimizer(adamw(other))
    for each, optimizer in ((loss, second), (loss_of(other, 0), fresh)):
        each.backward()
        optimizer.step()
    assert_bit_equal(values(net), values(other))
    assert_bit_equal([p.grad for p in net.parameters()], [p.grad for p in other.parameters()])
    del first


# -- who held them


def test_several_wrappers_become_one_and_one_becomes_several():
    net, other = Mlp(), Mlp()
    params = list(net.parameters())
    halves = [FusedMainGradOptimizer(torch.optim.SGD(part, lr=0.1)) for part in (params[:3], params[3:])]
    whole = FusedMainGradOptimizer(adamw(net), rewrap=True)
    for half in halves:
        with pytest.raises(RuntimeError, match="was unwrapped"):
            half.step()
    train(net, whole, range(2))
    train(other, FusedMainGradOptimizer(adamw(other)), range(2))
    assert_bit_equal(values(net), values(other))
    first = FusedMainGradOptimizer(torch.optim.SGD(params[:3], lr=0.1), rewrap=True)
    assert not hasattr(params[5], "main_grad")  # given back, as by unwrap()
    second = FusedMainGradOptimizer(torch.optim.SGD(params[3:], lr=0.1), rewrap=True)
    loss_of(net, 0).backward()
    first.step(), second.step()


def test_parameters_that_the_new_optimizer_leaves_out_are_as_torch_made_them_and_keep_their_gradient():
    net = Mlp()
    before = [(dict(vars(param)), param.grad_dtype, param._post_accumulate_grad_hooks) for param in net.parameters()]
    first = FusedMainGradOptimizer(adamw(net))
    loss_of(net, 0).backward()
    rounded = [param.grad.bfloat16() for param in net.parameters()]
    second = FusedMainGradOptimizer(torch.optim.SGD(net.first.parameters(), lr=0.1), rewrap=True)
    for param, was, grad in list(zip(net.parameters(), before, rounded, strict=True))[2:]:
        assert (dict(vars(param)), param.grad_dtype, param._post_accumulate_grad_hooks or None) == was
        assert torch.equal(param.grad, grad)
    second.unwrap()
    del first


def test_parameters_that_were_frozen_are_taken_over_as_well():
    net = Mlp()
    net.first.requires_grad_(False)
    first = FusedMainGradOptimizer(adamw(net))
    net.first.requires_grad_(True)
    second = FusedMainGradOptimizer(torch.optim.SGD(net.first.parameters(), lr=0.1), rewrap=True)
    start = values(net)
    loss_of(net, 0).backward()  # the hook that refuses a gradient of a frozen parameter is gone
    second.step()
    assert not torch.equal(net.first.weight, start[0])
    with pytest.raises(RuntimeError, match="was unwrapped"):
        first.step()


def test_the_inner_optimizer_before_gets_its_parameters_and_state_back_as_by_unwrap():
    nets = [Mlp(), Mlp()]
    inners = [adamw(net) for net in nets]
    wrappers = [FusedMainGradOptimizer(inner) for inner in inners]
    for net, wrapper in zip(nets, wrappers, strict=True):
        train(net, wrapper, range(3))
        wrapper.param_groups[0]["lr"] = 0.5
    kept = FusedMainGradOptimizer(adamw(nets[0]), rewrap=True)
    wrappers[1].unwrap()
    for key in ("exp_avg", "exp_avg_sq", "step"):
        assert_bit_equal(*([state[key] for state in inner.state.values()] for inner in inners))
    assert [id(param) for param in inners[0].param_groups[0]["params"]] == [id(param) for param in nets[0].parameters()]
    assert [inner.param_groups[0]["lr"] for inner in inners] == [0.5, 0.5]
    kept.unwrap()


def test_a_model_that_was_copied_with_its_wrapper_is_rewrapped_by_itself():
    net = Mlp()
    first = FusedMainGradOptimizer(adamw(net))
    train(net, first, range(2))
    copied, wrapper = copy.deepcopy((net, first))
    second = FusedMainGradOptimizer(adamw(copied), rewrap=True)
    with pytest.raises(RuntimeError, match="was unwrapped"):
        wrapper.step()
    train(net, first, range(2))
    train(copied, second, range(2))


def test_memory_of_the_wrapper_before_is_freed_though_it_is_kept():
    net = Mlp()
    first = FusedMainGradOptimizer(adamw(net))
    train(net, first, range(2))
    loss_of(net, 0).backward()
    gc.collect()
    gc.disable()
    try:
        refs = [weakref.ref(tensor) for bucket in first._buffers.buckets for tensor in (bucket.grad, bucket.main)]
        refs += [weakref.ref(state["exp_avg"]) for state in first.state.values()]
        second = FusedMainGradOptimizer(adamw(net), rewrap=True)
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()
    train(net, second, range(2))


# -- refused, with nothing changed


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"bucket_mib": 0}, ValueError), ({"fused_linear": True}, ValueError), ({"backend": "apex"}, RuntimeError)],
    ids=str,
)
def test_a_refused_rewrap_leaves_the_wrapper_that_holds_the_parameters_at_work(settings, error):
    net, other = Mlp(), Mlp()
    wrappers = [FusedMainGradOptimizer(adamw(each)) for each in (net, other)]
    for each, wrapper in zip((net, other), wrappers, strict=True):
        train(each, wrapper, range(2))
        loss_of(each, 2).backward()
    with pytest.raises(error):
        FusedMainGradOptimizer(adamw(net), rewrap=True, **settings)
    net.first.weight.note = torch.ones(1)
    frozen = torch.optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64)), *net.parameters()], lr=0.1)
    with pytest.raises(TypeError, match="complex"):
        FusedMainGradOptimizer(frozen, rewrap=True)
    for each, wrapper in zip((net, other), wrappers, strict=True):
        wrapper.step()
        wrapper.zero_grad()
        train(each, wrapper, range(3, 5))
    assert_bit_equal(values(net), values(other))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("rewrap", [False, True])
def test_an_inner_optimizer_that_is_wrapped_already_is_told_from_one_that_is_new(rewrap, dtype):
    net = Mlp(dtype)
    inner = adamw(net)
    wrapper = FusedMainGradOptimizer(inner)
    train(net, wrapper, range(2))
    for given in (inner, [torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), inner]):
        with pytest.raises(RuntimeError, match=r"this AdamW is wrapped already.*Use that one; or call unwrap\(\)"):
            FusedMainGradOptimizer(given, rewrap=rewrap)
    with pytest.raises(RuntimeError, match="wrap the bare optimizer, once"):
        FusedMainGradOptimizer(wrapper, rewrap=rewrap)
    train(net, wrapper, range(2))
    train(net, FusedMainGradOptimizer(wrapper.unwrap(), rewrap=rewrap), range(2))


def test_main_params_in_a_new_optimizer_are_told_from_the_models_parameters():
    net = Mlp()
    inner = adamw(net)
    wrapper = FusedMainGradOptimizer(inner)
    with pytest.raises(RuntimeError, match=r"already has a main_grad.*a main_param.*model\.parameters\(\)"):
        FusedMainGradOptimizer(torch.optim.SGD(inner.param_groups[0]["params"], lr=0.1))
    train(net, wrapper, range(2))


@pytest.mark.parametrize("rewrap", [False, True])
def test_a_main_grad_of_another_library_is_named_so_and_never_taken_over(rewrap):
    net = Mlp()
    net.first.weight.main_grad = mine = torch.ones(6, 5)
    with pytest.raises(RuntimeError, match=r"already has a main_grad that no FusedMainGradOptimizer made: Megatron"):
        FusedMainGradOptimizer(adamw(net), rewrap=rewrap)
    assert net.first.weight.main_grad is mine
    assert not hasattr(net.second.weight, "main_grad")


def test_the_message_names_unwrap_before_the_other_ways_out_and_each_works():
    net = Mlp()
    wrapper = FusedMainGradOptimizer(adamw(net))
    with pytest.raises(RuntimeError) as caught:
        FusedMainGradOptimizer(adamw(net))
    text = str(caught.value)
    del caught
    assert text.startswith("parameter param_groups[0]['params'][0] already has a main_grad: a FusedMainGradOptimizer")
    assert 0 < text.index("unwrap()") < text.index("last reference") < text.index("rewrap=True")
    wrapper.unwrap()
    wrapper = FusedMainGradOptimizer(adamw(net))
    del wrapper
    held = [FusedMainGradOptimizer(adamw(net))]
    held.append(FusedMainGradOptimizer(adamw(net), rewrap=True))
    train(net, held[1], range(2))


def test_holders_forget_wrappers_that_are_unwrapped_dropped_or_never_finished(monkeypatch):
    net = Mlp()
    inner = adamw(net)
    wrapper = FusedMainGradOptimizer(inner)
    assert live_wrappers.find(inner) is live_wrappers.find(net.first.weight) is wrapper
    assert live_wrappers.find(inner.param_groups[0]["params"][0]) is wrapper
    wrapper.unwrap()
    assert live_wrappers.find(inner) is None
    FusedMainGradOptimizer(inner)
    assert live_wrappers.find(net.first.weight) is None

    def full(*_):
        raise MemoryError

    monkeypatch.setattr("fusedopt.optimizer.watch_compiler", full)
    with pytest.raises(MemoryError) as caught:
        FusedMainGradOptimizer(inner)
    del caught
    assert live_wrappers.find(net.first.weight) is None


def test_wrapping_again_and_again_leaves_nothing_registered():
    weight = nn.Parameter(torch.ones(3))
    before = len(main_grad._params)
    for _ in range(5):
        optimizer = FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))
        assert len(main_grad._params) == before + 1
        optimizer.unwrap()
    assert len(main_grad._params) == before
