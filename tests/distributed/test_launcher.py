"""The launcher itself: results and exceptions of ranks arrive, a hang is told, and nothing outlives a launch."""

import ctypes
import os
import threading
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed import launcher
from tests.distributed.launcher import RankError, at, run

EXIT_CODE = 7


def add_up(rank, offset):
    total = torch.tensor([float(rank + offset)])
    dist.all_reduce(total)
    return rank, dist.get_world_size(), total


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank_from_one_group_of_that_size(world_size):
    results = run(add_up, world_size, 10)
    total = torch.tensor([float(sum(range(10, 10 + world_size)))])
    assert [(rank, size) for rank, size, _ in results] == [(rank, world_size) for rank in range(world_size)]
    assert all(torch.equal(got, total) for _, _, got in results)


class OddError(ValueError):
    """Cannot be made from its text alone."""

    def __init__(self, text, extra):
        super().__init__(text)
        self.extra = extra


def fail_on_one(rank, kind):
    at("about to fail")
    if rank == 1:
        raise KeyError("parameter w of rank 1") if kind == "plain" else OddError("the odd text", 3)
    dist.all_reduce(torch.ones(1))


def test_an_exception_on_one_rank_arrives_with_its_type_text_and_traceback_of_all_ranks():
    with pytest.raises(KeyError, match="parameter w of rank 1") as caught:
        run(fail_on_one, 3, "plain")
    story = str(caught.value.__cause__)
    assert isinstance(caught.value.__cause__, RankError)
    assert "rank 1 of 3 failed first" in story
    assert "raised while about to fail" in story
    assert "in fail_on_one" in story
    assert "-- rank 0 " in story
    assert "-- rank 2 " in story


def test_an_exception_that_cannot_be_pickled_arrives_with_its_text():
    with pytest.raises(RuntimeError, match="OddError: the odd text"):
        run(fail_on_one, 2, "odd")


def never_join(rank):
    at(f"in the hang of rank {rank}")
    if rank == 0:
        dist.all_reduce(torch.ones(1))
    else:
        sleep_for_long()


def sleep_for_long():
    time.sleep(1000.0)


def test_a_hang_fails_with_the_stacks_of_all_ranks_and_the_next_launch_works():
    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1 of 2 did not return within 2 s") as caught:
        run(never_join, 2, timeout=2.0)
    text = str(caught.value)
    assert "it was in the hang of rank 0" in text
    assert "it was in the hang of rank 1" in text
    assert "in all_reduce" in text
    assert "in sleep_for_long" in text
    assert [rank for rank, _, _ in run(add_up, 2, 1)] == [0, 1]


def test_a_launch_in_which_no_rank_computes_is_a_hang_long_before_its_limit(monkeypatch):
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 2.0)
    with pytest.raises(
        TimeoutError, match=r"rank\(s\) 0, 1 of 2 did not return and none has computed for 2 s"
    ) as caught:
        run(never_join, 2)
    assert "in sleep_for_long" in str(caught.value)


def compute_on_one(rank, seconds):
    while rank == 1 and time.process_time() < seconds:
        pass
    dist.barrier()
    return rank


def test_a_launch_of_any_length_is_none_while_one_rank_computes(monkeypatch):
    monkeypatch.setattr(launcher, "IDLE_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "_POLL_SECONDS", 0.2)
    assert run(compute_on_one, 2, 1.5) == [0, 1]


def die(rank, how):
    at("dying")
    if rank == 0:
        print("the last words", flush=True)
        if how == "exit":
            os._exit(EXIT_CODE)
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("how", ["exit", "segmentation fault"])
def test_a_rank_that_dies_is_told_with_its_last_output(how):
    with pytest.raises(RuntimeError, match=r"rank 0 died with exit code .* while dying") as caught:
        run(die, 2, how)
    assert str(EXIT_CODE if how == "exit" else -11) in str(caught.value)
    assert "the last words" in str(caught.value.__cause__)
    assert ("Segmentation fault" in str(caught.value.__cause__)) == (how != "exit")


def warn(rank):
    warnings.warn("a warning of a rank", UserWarning, stacklevel=1)


def raise_where_nobody_sees(rank):
    class Holder:
        def __del__(self):
            raise ValueError("raised in a finaliser")

    holder = Holder()
    holder.cycle = holder


def raise_in_a_thread(rank):
    thread = threading.Thread(target=sleep_for_long, args=("no number",))
    thread.start()
    thread.join()


def test_warnings_are_errors_and_so_is_what_python_could_only_print():
    with pytest.raises(UserWarning, match="a warning of a rank"):
        run(warn, 1)
    with pytest.raises(RuntimeError, match="raised in a finaliser"):
        run(raise_where_nobody_sees, 2)
    with pytest.raises(RuntimeError, match="TypeError"):
        run(raise_in_a_thread, 2)


def start_one_collective_too_many(rank):
    if rank == 0:
        return dist.all_reduce(torch.ones(3), async_op=True) and None
    return None


def test_a_collective_that_the_other_ranks_lack_does_not_pass():
    with pytest.raises((RuntimeError, TimeoutError)):
        run(start_one_collective_too_many, 2, timeout=2.0)


def leave_traces(rank):
    traces = getattr(torch, "_traces_of_a_test", 0)
    torch._traces_of_a_test = traces + 1
    seed = torch.initial_seed()
    torch.manual_seed(99)
    return traces, seed, torch.get_num_threads(), os.getpid()


def test_every_launch_starts_fresh_with_one_thread_and_one_seed():
    results = [result for _ in range(2) for result in run(leave_traces, 2)]
    assert [result[:3] for result in results] == [(0, 0, 1)] * 4
    assert len({pid for *_, pid in results}) == 4
    assert not any(os.path.exists(f"/proc/{pid}") for *_, pid in results)


# -- ranks that are reused


def look_around(rank, leaves=None):
    """Return what tells whether this rank is as a new one, and its process."""
    seen = torch.initial_seed(), torch.get_num_threads(), dist.get_world_size(), int(add_up(rank, 1)[2])
    torch.manual_seed(99)
    if leaves == "optimizer":
        torch._left_by_a_test = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    elif leaves == "function":
        dist.all_reduce = dist.broadcast
    elif leaves == "thread":
        threading.Thread(target=sleep_for_long, daemon=True, name="left").start()
    elif leaves == "variable":
        os.environ["LEFT_BY_A_TEST"] = "1"
    return seen, os.getpid()


def test_ranks_that_are_reused_are_the_same_processes_in_a_fresh_group():
    launches = [run(look_around, world_size, reuses=True) for world_size in (2, 3, 2)]
    assert [[seen for seen, _ in results] for results in launches] == [
        [(0, 1, size, sum(range(1, 1 + size)))] * size for size in (2, 3, 2)
    ]
    pids = [[pid for _, pid in results] for results in launches]
    assert pids[0] == pids[2]
    assert not set(pids[0]) & set(pids[1])
    assert not set(pids[0]) & {pid for _, pid in run(look_around, 2)}  # others do not get them
    launcher.end_kept_ranks()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (*pids[0], *pids[1]))


@pytest.mark.parametrize(
    ("leaves", "says"),
    [
        ("optimizer", r"the number of optimizers \(from 0 to 1\)"),
        ("function", r"torch\.distributed\.all_reduce"),
        ("thread", r"the threads .*'left'"),
        ("variable", r"\$LEFT_BY_A_TEST \(from None to 1\)"),
    ],
    ids=["optimizer", "function", "thread", "variable"],
)
def test_what_a_launch_leaves_on_reused_ranks_fails_it_and_the_next_gets_new_ones(leaves, says):
    first = [pid for _, pid in run(look_around, 2, reuses=True)]
    with pytest.raises(RuntimeError, match=says):
        run(look_around, 2, leaves, reuses=True)
    again = run(look_around, 2, reuses=True)
    assert not set(first) & {pid for _, pid in again}
    assert [seen for seen, _ in again] == [(0, 1, 2, 3)] * 2


@pytest.mark.parametrize("how", ["raise", "hang", "die"])
def test_a_launch_that_fails_ends_reused_ranks_and_tells_of_itself_alone(how, monkeypatch):
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 1.0)  # the other rank waits all of it: no socket closes on it
    first = [pid for _, pid in run(look_around, 2, reuses=True)]
    if how == "raise":
        with pytest.raises(KeyError, match="parameter w of rank 1"):
            run(fail_on_one, 2, "plain", reuses=True)
    elif how == "hang":
        with pytest.raises(TimeoutError, match="in the hang of rank 0"):
            run(never_join, 2, timeout=2.0, reuses=True)
    else:
        with pytest.raises(RuntimeError, match="rank 0 died with exit code 7 while dying") as caught:
            run(die, 2, "exit", reuses=True)
        assert "the last words" in str(caught.value.__cause__)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in first)
    assert not set(first) & {pid for _, pid in run(look_around, 2, reuses=True)}
