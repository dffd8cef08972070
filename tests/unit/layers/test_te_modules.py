"""TransformerEngine's modules in the model: main_grad by their own `get_main_grad()` route, on one rank and on two."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from fusedopt import FusedLinear, FusedMainGradOptimizer
from tests.distributed.launcher import run
from tests.doubles.te_linear import TELinear

BF16 = torch.bfloat16


def make(kind, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(kind(8, 8, bias=False) for _ in range(3))).to(BF16)
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **settings)
    return model, optimizer


def forward(model, x, mode="plain"):
    context = save_on_cpu() if mode == "save_on_cpu" else contextlib.nullcontext()
    with context:
        if mode in ("reentrant", "non-reentrant"):
            return checkpoint(model, x, use_reentrant=mode == "reentrant")
        return model(x)


def poison(model):
    """Fill main_grads that were cleared: what a clear left behind must not matter."""
    for param in model.parameters():
        assert param.grad is None
        param.main_grad.fill_(float("nan"))


@pytest.mark.parametrize("mode", ["plain", "non-reentrant", "reentrant", "save_on_cpu"])
def test_te_modules_add_to_main_grad_and_no_dummy_gradient_exists(mode):
    (model, optimizer), (twin, other) = make(TELinear), make(FusedLinear)
    for window in range(3):
        poison(model)
        for micro_batch in range(2):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * window + micro_batch)).to(BF16)
            for net in (model, twin):
                forward(net, x.clone().requires_grad_(), mode).float().square().sum().backward()
        for param, reference in zip(model.parameters(), twin.parameters(), strict=True):
            assert param.grad is param.main_grad
            assert not hasattr(param, "grad_added_to_main_grad")
            assert param.main_grad.isfinite().all()
            assert torch.equal(param.main_grad, reference.main_grad)
        for opt in (optimizer, other):
            opt.step()
            opt.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_weight_used_twice_is_cleared_once():
    model, optimizer = make(TELinear)
    shared = model[0]
    poison(model)
    x = torch.ones(1, 8, dtype=BF16)
    (256 * shared(x) + shared(x)).sum().backward()
    assert shared.weight.main_grad.unique().tolist() == [257.0]
    assert shared.weight.grad is shared.weight.main_grad
    assert model[1].weight.grad is None
    optimizer.step()


def test_the_route_goes_with_the_wrapper_and_is_in_no_pickle_or_copy():
    model, optimizer = make(TELinear)
    weight = model[0].weight
    assert callable(weight.get_main_grad)
    clone = copy.deepcopy(model)
    assert not hasattr(clone[0].weight, "get_main_grad")
    restored = pickle.loads(pickle.dumps(weight))
    assert not hasattr(restored, "get_main_grad")
    assert not hasattr(restored, "__fsdp_param__")
    optimizer.unwrap()
    assert not hasattr(weight, "get_main_grad")
    assert not hasattr(weight, "__fsdp_param__")
    model(torch.ones(1, 8, dtype=BF16)).sum().backward()
    assert weight.grad.dtype is BF16


def two_ranks(rank, shard):
    """Return the weights after three windows, with TE's layers and with ours."""
    weights = []
    for kind in (TELinear, FusedLinear):
        model, optimizer = make(kind, shard=shard)
        for window in range(3):
            for micro_batch in range(2):
                seed = 100 * window + 10 * micro_batch + rank
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(BF16)
                with optimizer.no_sync() if micro_batch == 0 else contextlib.nullcontext():
                    model(x).float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([param.detach().clone() for param in model.parameters()])
    return weights


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_on_two_ranks_te_modules_train_to_the_bits_of_ours(shard):
    results = run(two_ranks, 2, shard)
    for te, ours in results:
        assert all(weight.isfinite().all() for weight in te)
        assert all(map(torch.equal, te, ours))
    assert all(map(torch.equal, results[0][0], results[1][0]))
    start = make(FusedLinear)[0]
    assert not any(map(torch.equal, results[0][0], start.parameters()))
