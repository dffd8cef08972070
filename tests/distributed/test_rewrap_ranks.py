"""Claims about several ranks: wrapping again while a wrapper lives, and gradients that hang where one is wrapped."""

import warnings

import pytest
import torch
from torch import nn

import fusedopt
from tests.distributed.launcher import recorded_warnings, run

SHARDS = ("none", "optimizer", "gradients")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).bfloat16()


def wrap(net, **settings):
    return fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(net.parameters(), lr=0.01), **settings)


def loss_of(net, number):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
    return net(x.bfloat16()).float().square().mean()


def train(net, optimizer, numbers, rank):
    for number in numbers:
        loss_of(net, 10 * number + rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(net):
    return [param.detach().float().tolist() for param in net.parameters()]


def rewrapped(rank, shard, settings):
    """Return values of a model that was rewrapped, and of one that was loaded and wrapped anew."""
    net, other = make_net(), make_net()
    first = wrap(net, shard=shard, **settings)
    train(net, first, range(3), rank)
    other.load_state_dict(net.state_dict())
    second = wrap(net, shard=shard, rewrap=True, **settings)
    fresh = wrap(other, shard=shard, **settings)
    for each, optimizer in ((net, second), (other, fresh)):
        train(each, optimizer, range(3, 6), rank)
    with pytest.raises(RuntimeError, match="was unwrapped"):
        first.step()
    return values(net), values(other)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_ranks_rewrap_and_train_as_if_the_model_was_loaded_and_wrapped_anew(shard, overlap):
    found = run(rewrapped, 2, shard, {"overlap_param_gather": overlap and shard != "none"}, reuses=True)
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def with_gradients(rank, shard, k):
    """Return the norm of the gradient that a new wrapper starts from, and the warnings."""
    net = make_net()
    first = wrap(net, shard=shard, gradient_accumulation_steps=k)
    for number in range(k - 1):
        loss_of(net, number).backward()
        first.step()
    loss_of(net, rank).backward()
    with recorded_warnings() as caught:
        second = wrap(net, shard=shard, rewrap=True)
    hanging = [param.grad is not None for param in net.parameters()]
    norm = second.clip_grad_norm_(torch.inf).item()
    if not any(hanging):
        loss_of(net, rank).backward()
    second.step()
    return norm, list(caught), all(hanging), values(net)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_go_on_as_the_mean_over_ranks_or_are_cleared_with_a_warning(shard, k):
    one, other = run(with_gradients, 2, shard, k, reuses=True)
    assert one[3] == other[3]
    is_kept = shard == "none" and k == 1
    for norm, texts, hangs, _ in (one, other):
        assert hangs is is_kept
        assert (norm > 0.1) is is_kept
        assert len(texts) == (0 if is_kept else 1)
        assert all("rewrap=True cleared the gradients of 6 parameter(s)" in text for text in texts)
    net = make_net()
    for rank in range(2):
        loss_of(net, rank).backward()
    expected = torch.nn.utils.get_total_norm([param.grad.float() / 2 for param in net.parameters()]).item()
    assert not is_kept or one[0] == pytest.approx(expected, rel=0.02)


def refused(rank, shard):
    """One rank rewraps and the other does not: all raise, and go on with the wrapper that they had."""
    net, other = make_net(), make_net()
    optimizers = [wrap(each, shard=shard) for each in (net, other)]
    for each, optimizer in zip((net, other), optimizers, strict=True):
        train(each, optimizer, range(2), rank)
    with pytest.raises(RuntimeError, match="already has a main_grad: a FusedMainGradOptimizer that is still there"):
        wrap(net, shard=shard, rewrap=rank == 0)
    with pytest.raises(RuntimeError, match="rank 1 has the settings"):
        wrap(net, shard=shard, rewrap=True, max_grad_norm=1.0 + rank)
    for each, optimizer in zip((net, other), optimizers, strict=True):
        train(each, optimizer, range(2, 4), rank)
    return values(net), values(other)


@pytest.mark.parametrize("shard", SHARDS)
def test_what_one_rank_must_refuse_all_refuse_and_the_wrapper_before_works_on(shard):
    found = run(refused, 2, shard, reuses=True)
    assert found[0][0] == found[0][1] == found[1][0] == found[1][1]


def wrapped_with_a_gradient(rank, shard):
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    if rank < 2:
        layer(torch.full((1, 4), rank + 1.0)).sum().backward()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=1.0), shard=shard)
    with warnings.catch_warnings(action="error"):
        optimizer.step()
    return layer.weight.tolist()


@pytest.mark.parametrize("shard", SHARDS)
def test_a_gradient_that_hangs_where_ranks_wrap_is_each_ranks_own_and_is_reduced(shard):
    assert run(wrapped_with_a_gradient, 3, shard, reuses=True) == [[[1.0 - (1 + 2) / 3] * 4] * 4] * 3
