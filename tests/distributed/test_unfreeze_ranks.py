"""A parameter that is unfrozen while some ranks have begun a round of reductions, and others have not."""

import pytest
import torch
from torch import nn

import fusedopt
from tests.distributed.launcher import run

NUMEL = 300_000  # more than a bucket of 1 MiB has room for, and all of one size: a mix-up would go unseen


def unfreeze_between_backward_and_step(rank, shard):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(NUMEL)) for _ in range(3)]
    params[2].requires_grad_(False)
    inner = torch.optim.SGD(params, lr=1.0)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, shard=shard, gradient_accumulation_steps=2, bucket_mib=1)
    for window in range(2):  # the first teaches the order of rounds: the second parameter's bucket comes first
        for micro_batch in range(2):
            if window == 1 and micro_batch == 1:
                if rank == 0:  # it alone has a last micro-batch, and launches its buckets inside
                    (params[1].sum() * 8 + params[0].sum() * 4).backward()
                params[2].requires_grad_(True)
            else:
                (params[1].sum() * 8 + params[0].sum() * 4).backward()
            optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer._buffers.buckets) == 3
    return [param.unique().tolist() for param in params]


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_gradients_stay_with_their_parameters_where_one_was_unfrozen_inside_a_round(shard):
    # Means over two micro-batches and two ranks: 4 and 8 in the first window, three quarters of that in the second.
    assert run(unfreeze_between_backward_and_step, 2, shard) == [[[-7.0], [-14.0], [0.0]]] * 2
