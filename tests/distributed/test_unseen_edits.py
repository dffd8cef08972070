"""Writes through ``p.data`` on several ranks: taken over whole, also where they show in one rank's part only."""

import pytest
import torch
from torch import nn

import fusedopt
from tests.distributed.launcher import run

SHARDS = ("none", "optimizer", "gradients")


def make(shard, **more):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 8)).bfloat16()
    by = {} if shard == "none" else {"shard_by": "element"}
    inner = torch.optim.SGD(net.named_parameters(), lr=0.01)
    return net, fusedopt.FusedMainGradOptimizer(inner, shard=shard, **by, **more)


def train(net, optimizer, number, rank):
    generator = torch.Generator().manual_seed(10 * number + rank)
    net(torch.randn(4, 40, generator=generator).bfloat16()).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def average_weights(rank, shard, overlap):
    """Copy other weights in between steps, through ``.data`` and as torch counts it: the runs must be one."""
    settings = {} if shard == "none" else {"overlap_param_gather": overlap}
    runs = [make(shard, **settings) for _ in range(2)]
    for number in range(6):
        for net, optimizer in runs:
            train(net, optimizer, number, rank)
        if number % 2:
            for ours, theirs in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
                average = ours.detach() * 0.75
                ours.data.copy_(average)
                with torch.no_grad():
                    theirs.copy_(average)
    same = [torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True)]
    return same, [p.float().sum().item() for p in runs[0][0].parameters()]


@pytest.mark.parametrize(
    ("shard", "overlap"), [("none", False), *((shard, overlap) for shard in SHARDS[1:] for overlap in (False, True))]
)
def test_weights_that_an_average_was_copied_into_train_on_from_it(shard, overlap):
    results = run(average_weights, 2, shard, overlap)
    for same, sums in results:
        assert all(same)
        assert sums == results[0][1]


def edit_that_shows_on_one_rank(rank, shard):
    """Write one element of each rank's part; the first is looked at, the second, on another rank, is not."""
    net, optimizer = make(shard)
    train(net, optimizer, 0, rank)
    buffers = optimizer._buffers
    (bucket,) = buffers.buckets
    half = bucket.model.numel() // 2
    shows = []
    for start in (0, half):
        places = []
        for place in range(start, start + half, 8):
            before = bucket.model[place].item()
            bucket.model[place] = before + 1
            if buffers._shows_unseen_edit():
                places.append(place)
            bucket.model[place] = before
        shows.append(places)
    first = torch.tensor([shows[rank][0]])
    torch.distributed.broadcast(first, 0)
    unseen = next(p for p in range(half + 8, 2 * half, 8) if p not in shows[1])
    unseen = torch.tensor([unseen])
    torch.distributed.broadcast(unseen, 1)
    wanted = []
    for place in (int(first), int(unseen)):
        bucket.model[place] = 5.0
        wanted.append(5.0)
    optimizer.step()
    return [bucket.model[int(place)].item() for place in (first, unseen)], wanted, len(shows[0]), len(shows[1])


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_an_edit_that_shows_in_one_ranks_part_is_taken_over_by_all(shard):
    results = run(edit_that_shows_on_one_rank, 2, shard)
    for got, wanted, _, _ in results:
        assert got == wanted
    assert results[0][2] > 0
    assert results[1][3] > 0
    assert results[0][3] == results[1][2] == 0  # each looks at its own part
