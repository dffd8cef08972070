"""Claims about memory that several ranks give back: at once, by reference counts alone, with the collector off."""

import gc
import weakref

import pytest
import torch
from torch import nn

import fusedopt
from tests.distributed.launcher import run

SHARDS = ("none", "optimizer", "gradients")


def loss_of(net, rank):
    return net(torch.full((4, 16), rank + 1.0).bfloat16()).float().square().mean()


def step(net, optimizer, rank):
    loss_of(net, rank).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(rank, net, optimizer):
    step(net, optimizer, rank)


def with_gradients(rank, net, optimizer):
    step(net, optimizer, rank)
    loss_of(net, rank).backward()


def in_a_window(rank, net, optimizer):
    """The last micro-batch's reductions were started inside its backward, and nobody waits for them."""
    for _ in range(2):
        step(net, optimizer, rank)
    step(net, optimizer, rank)
    loss_of(net, rank).backward()


def with_fused_layers(rank, net, optimizer):
    fusedopt.convert_linears(net)
    step(net, optimizer, rank)


def after_a_refusal_of_one_rank(rank, net, optimizer):
    step(net, optimizer, rank)
    loss_of(net, rank).backward()
    if rank == 0:
        net[0].weight.main_grad = torch.zeros(32, 16)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    del caught
    if rank == 0:
        del net[0].weight.main_grad
    with pytest.raises((ValueError, RuntimeError, KeyError)) as caught:
        optimizer.load_state_dict({"state": {}, "param_groups": []} if rank == 0 else optimizer.state_dict())
    del caught


def after_a_clear_on_one_rank(rank, net, optimizer):
    step(net, optimizer, rank)
    loss_of(net, rank).backward()
    if rank == 0:
        optimizer.zero_grad()
    try:
        optimizer.step()
    except RuntimeError:
        optimizer.zero_grad()


CASES = {
    "plain": (plain, {}),
    "with gradients": (with_gradients, {}),
    "in a window": (in_a_window, {"gradient_accumulation_steps": 2}),
    "fused layers": (with_fused_layers, {}),
    "gathers under way": (plain, {"overlap_param_gather": True}),
    "one rank refuses": (after_a_refusal_of_one_rank, {}),
    "one rank clears": (after_a_clear_on_one_rank, {}),
}


def wrapped(net, settings):
    return fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(net.parameters()), bucket_mib=1, **settings)


def alive_after(rank, shard):
    """Return, per case and way to go, what was to be freed and was not; and how much there was."""
    found = {}
    for case, (use, settings) in {"warm-up": CASES["plain"], **CASES}.items():
        for is_unwrapped in (True, False):
            if shard == "none":
                settings = {key: value for key, value in settings.items() if key != "overlap_param_gather"}
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)).bfloat16()
            optimizer = wrapped(net, {**settings, "shard": shard})
            use(rank, net, optimizer)
            buckets, entries = optimizer._buffers.buckets, optimizer._buffers.entries
            tensors = [getattr(bucket, name) for bucket in buckets for name in ("grad", "grad_part", "main", "model")]
            tensors += [parcel.pending._result for parcel in optimizer._reducer._round.in_flight]
            tensors += [entry.main_param for entry in entries] + [entry.slot.main_grad for entry in entries]
            refs = [weakref.ref(tensor) for tensor in tensors if tensor is not None]
            parcels = [weakref.ref(parcel) for parcel in optimizer._reducer._round.in_flight]
            del tensors, buckets, entries
            if is_unwrapped:
                optimizer.unwrap()
            else:
                del optimizer
            num_alive = sum(ref() is not None for ref in [*refs, *parcels])
            values = [bool(torch.isfinite(param).all()) for param in net.parameters()]
            found[case, is_unwrapped] = num_alive, len(refs) > 2, all(values)
            gc.collect() if case == "warm-up" else gc.disable()
    gc.enable()
    del found["warm-up", True], found["warm-up", False]
    return found


@pytest.mark.parametrize("shard", SHARDS)
def test_ranks_free_the_memory_of_a_dropped_and_of_an_unwrapped_wrapper_at_once(shard):
    expected = {(case, is_unwrapped): (0, True, True) for case in CASES for is_unwrapped in (True, False)}
    assert run(alive_after, 2, shard) == [expected] * 2
