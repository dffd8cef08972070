"""Which process groups wrappers make, use again and give back, and how long they wait for a rank."""

import contextlib
import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedopt
from fusedopt.sharding.process_groups import timeout_of
from tests.distributed.launcher import GROUP_SECONDS, run
from tests.distributed.several import SHARDS, B, Several, assert_exact, raised_by

# -- groups


def num_groups():
    return len(dist.distributed_c10d._world.pg_map)


def wrappers_in_a_loop(rank, shard):
    """Each wrapper is dropped before the next is made, but one rank keeps one, and one is left with a round begun."""
    several = Several(rank, 2, shard)
    several.plain_windows()
    before = num_groups()
    kept = []
    for i in range(6):
        again = Several(rank, 2, shard, num=1)
        again.plain_windows()
        if i == 2:
            again.wrappers[0].unwrap()
        if i == 1 and rank == 1:
            kept.append(again)
        del again
    after = num_groups()
    left = Several(rank, 2, shard, num=1)
    if rank == 0 and shard != "none":
        with contextlib.suppress(InjectedError):
            (Failing.apply(next(iter(left.params[0].values())).float().sum())).backward()
    del left
    last = Several(rank, 2, shard)
    last.plain_windows()
    several.plain_windows()
    return several.problems + last.problems, after - before


class InjectedError(Exception):
    """What a failing backward raises."""


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise InjectedError


@pytest.mark.parametrize("shard", SHARDS)
def test_groups_are_used_again_where_all_ranks_are_done_with_them(shard):
    for problems, num_made in run(wrappers_in_a_loop, 2, shard):
        assert problems == []
        assert num_made == 2  # the first of the loop's, and one more while rank 1 keeps its own


def no_collective_no_group(rank):
    before = num_groups()
    net = nn.Linear(3, 3)
    lone = dist.new_group([rank], use_local_synchronization=True)
    fusedopt.FusedMainGradOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_group=lone)
    assert num_groups() == before + 1  # the one that was given
    fusedopt.broadcast_module(net)
    after = num_groups()
    fusedopt.broadcast_module(net)
    several = Several(rank, 2, "optimizer", num=1)
    several.plain_windows()
    assert num_groups() == after  # broadcast_module gives its groups back
    return several.problems


def test_who_communicates_nothing_has_no_groups():
    assert_exact(run(no_collective_no_group, 2))


# -- timeouts


TIMEOUT = datetime.timedelta(seconds=2)


def timeouts(rank):
    """Return the timeouts of all groups made, for wrappers that were given nothing, a group and a mesh."""
    found = []
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for given in ({}, {"process_group": dist.new_group([0, 1, 2, 3], timeout=TIMEOUT)}, {"device_mesh": mesh}):
        comm = fusedopt.FusedMainGradOptimizer(
            torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1), shard="optimizer", **given
        )._comm
        groups = (comm._all, comm._shard, comm._replicate)
        found.append([timeout_of(group).total_seconds() for group in groups if group is not None])
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], timeout=TIMEOUT, use_local_synchronization=True)
    comm = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1), process_group=pair)
    found.append([timeout_of(group).total_seconds() for group in (comm._comm._all, comm._comm._control)])
    return found


def test_groups_wait_as_long_as_the_users():
    for found in run(timeouts, 4):
        assert found == [[GROUP_SECONDS] * 2, [2.0] * 2, [GROUP_SECONDS] * 3, [2.0] * 2]


def a_missing_rank(rank, folder, where):
    """Return what the other rank raised, and after how many seconds."""
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    several = Several(rank, 2, "none")
    several.plain_windows()
    calls = {
        "step": several.wrappers[1].step,
        "backward": lambda: several.act(B((0, 1))),
        "constructor": lambda: several.add(4),
        "reduce": lambda: several.wrappers[0]._comm.start_all_reduce(torch.zeros(4)).wait(),
    }
    result = None
    if rank == 0:
        start = time.monotonic()
        text = raised_by(calls[where])
        result = text, time.monotonic() - start
        (folder / "done").touch()
    while not (folder / "done").exists():
        time.sleep(0.05)
    return result


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("step", "step() of optimizer 1 (p1.first and 1 more)"),
        ("backward", "the end of a backward through optimizer 0 (p0.first and 1 more) and optimizer 1 (p1.first"),
        ("constructor", "FusedMainGradOptimizer()"),
        ("reduce", "the reduction of gradients of optimizer 0"),
    ],
)
def test_a_missing_rank_ends_the_others_in_the_users_time_and_they_say_what_they_waited_for(tmp_path, where, says):
    (text, seconds), _ = run(a_missing_rank, 2, tmp_path, where)
    assert f"rank 0 is in {says}" in text
    assert "waited for the others of ranks [0, 1], 2 s at most" in text
    assert 1.6 < seconds < 30.0
