"""Claims about copies: deepcopy and pickle, of a model with its wrapper, and of a model alone."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_is_finite_and_moved
from tests.copy_cases import OPTIMIZERS, everything
from tests.models import Mlp, adamw, loss_of, muon_and_adamw, train

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
        with pytest.warns(RuntimeWarning, match="skipped") if not optimizer.window_ends else contextlib.nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.skipped_steps == 1
    for way in WAYS:
        _, copied = way((net, optimizer))
        assert copied.config == optimizer.config
        assert copied.config.max_grad_norm == 0.5
        assert copied.skipped_steps == 1


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
