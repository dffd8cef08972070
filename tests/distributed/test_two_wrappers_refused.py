"""Several wrappers over the same ranks: what cannot be exact raises on all ranks, and training goes on."""

import copy
import gc
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedopt
from tests.distributed.launcher import run
from tests.distributed.several import LR, SHARDS, B, Several, raised_by


def steps_in_another_order(rank, shard):
    several = Several(rank, 2, shard)
    texts = []
    for _ in range(2):
        several.play([B((0, 1)), B((1, 0))])
        texts.append(raised_by(several.wrappers[rank].step))
        several.end_window()  # nothing was changed: the same window can still step
    texts.append(raised_by(lambda: several.wrappers[rank].clip_grad_norm_(1.0)))
    several.lose()
    several.plain_windows()
    return several.problems, texts


@pytest.mark.parametrize("shard", SHARDS)
def test_steps_in_another_order_on_each_rank_raise_on_all_by_name(shard):
    for problems, texts in run(steps_in_another_order, 2, shard, reuses=True):
        assert problems == []
        for text, method in zip(texts, ("step()", "step()", "clip_grad_norm_()"), strict=True):
            assert "in the same order on all of them" in text
            assert f"rank 0 is in {method} of optimizer 0 (p0.first and 1 more)" in text
            assert f"rank 1 is in {method} of optimizer 1 (p1.first and 1 more)" in text


def other_methods(rank, shard):
    several = Several(rank, 2, shard)
    saved = several.wrappers[0].state_dict()
    several.play([B((0, 1)), B((1,))])
    extra = {"params": [("extra", nn.Parameter(torch.zeros(3)))]}
    calls = {
        "load_state_dict()": lambda: several.wrappers[0].load_state_dict(saved),
        "consolidate_state_dict()": lambda: several.wrappers[0].consolidate_state_dict(),
        "add_param_group()": lambda: several.wrappers[0].add_param_group(extra),
        "FusedMainGradOptimizer()": lambda: several.add(9, shard=shard),
        "broadcast_module()": lambda: fusedopt.broadcast_module(nn.Linear(2, 2)),
    }
    texts = {name: raised_by(call if rank == 0 else several.wrappers[1].step) for name, call in calls.items()}
    several.end_window()
    several.plain_windows()
    return several.problems, texts


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_beside_any_other_method_that_all_ranks_call_raises_on_all(shard):
    for problems, texts in run(other_methods, 2, shard, reuses=True):
        assert problems == []
        for name, text in texts.items():
            assert f"rank 0 is in {name}" in text
            assert "rank 1 is in step() of optimizer 1" in text


def dropped_on_one_rank(rank, how):
    several = Several(rank, 2, "none")
    several.play([B((0, 1)), B((1,))])
    several.end_window()
    if rank == 1:
        if how == "drop":
            several.wrappers[0] = None
            gc.collect()
        else:
            several.wrappers[0].unwrap()
    texts = [raised_by(lambda: several.act(B((0, 1)) if rank == 0 else B((1,))))]
    texts.append(raised_by(several.wrappers[0 if rank == 0 else 1].step))
    several.wrappers[1].zero_grad()
    several.act(B((1,)))
    several.wrappers[1].step()
    return texts, several.params[1]["p1.first"].detach()


@pytest.mark.parametrize("how", ["drop", "unwrap"])
def test_a_wrapper_that_one_rank_dropped_raises_on_all_where_others_go_on_with_it(how):
    results = run(dropped_on_one_rank, 2, how, reuses=True)
    for texts, _ in results:
        assert all("optimizer 0 was dropped or unwrapped on rank 1" in text for text in texts)
    assert torch.equal(results[0][1], results[1][1])


def copied_on_one_rank(rank, shard):
    """An exponential average on rank 0 is a copy that never communicates; a copy on all ranks trains."""
    several = Several(rank, 2, shard)
    several.play([B((0, 1)), B((1,))])
    average = copy.deepcopy((several.params[0], several.wrappers[0])) if rank == 0 else None
    several.end_window()
    counts = dict(several.wrappers[0]._comm.counts)
    params, wrapper = copy.deepcopy((several.params[0], several.wrappers[0]))
    assert dict(several.wrappers[0]._comm.counts) == counts
    assert dict(wrapper._comm.counts) == {}
    original = several.params[0], several.wrappers[0]
    for _ in range(2):  # the copy goes on exactly as the original would, beside the other one
        several.params[0], several.wrappers[0] = params, wrapper
        several.play([B((1, 0)), B((0,))])
        several.end_window((1, 0))
    several.params[0], several.wrappers[0] = original
    for name, param in params.items():
        several.params[0][name].data.copy_(param)
    text = None
    if rank == 0:
        term = sum(param.float().sum() for param in average[0].values())
        text = raised_by(lambda: (term.backward(), average[1].step()))
    else:
        text = raised_by(lambda: (several.act(B((1,))), several.wrappers[1].step()))
    several.lose()
    return several.problems, text


@pytest.mark.parametrize("shard", SHARDS)
def test_copies_communicate_when_they_are_first_used_on_all_ranks_and_never_on_some(shard):
    for problems, text in run(copied_on_one_rank, 2, shard, reuses=True):
        assert problems == []
        assert "copy of an optimizer is used for the first time, on some ranks only" in text


class Pause(torch.autograd.Function):
    """Stop a backward until `leave`."""

    entered, leave = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Pause.entered.set()
        Pause.leave.wait(20.0)
        return grad


def a_backward_in_another_thread(rank):
    """Rank 1 reduces wrapper 1 while on rank 0 a backward through it runs, in a thread, beside a step of wrapper 0."""
    several = Several(rank, 2, "none")
    if rank == 1:
        texts = [raised_by(lambda: several.act(B((1,))))]
    else:
        first, second = several.params[1].values()
        paused = Pause.apply((first.float() * 12.0).sum())  # made first, so the gradient of the second comes before it
        thread = threading.Thread(target=(paused + (second.float() * 12.0).sum()).backward)
        thread.start()
        assert Pause.entered.wait(20.0)
        texts = [raised_by(several.wrappers[0].step)]
        Pause.leave.set()
        thread.join()
    several.wrappers[1].step()
    theirs = several.term(1, "p1.first", 1, 0)
    return texts, torch.equal(several.params[1]["p1.first"].float(), -LR * (12.0 + theirs) / 2)


def test_a_wrapper_whose_backward_runs_in_another_thread_is_not_reduced_for_others():
    for texts, is_exact in run(a_backward_in_another_thread, 2):
        assert "on rank 0 a backward through it is running" in texts[0]
        assert is_exact


def a_backward_beside_a_meeting(rank):
    several = Several(rank, 2, "none")
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        several.wrappers[0].step()
        text = None
    else:
        thread = threading.Thread(target=several.wrappers[0].step)
        thread.start()
        while several.wrappers[0]._comm.channel._thread is None:
            time.sleep(0.01)
        text = raised_by(lambda: several.act(B((1,))))
        dist.send(torch.zeros(1), 1)
        thread.join()
    several.lose()
    several.plain_windows()
    return several.problems, text


def test_a_backward_that_begins_while_another_thread_is_in_a_meeting_is_refused():
    (problems, text), (others, _) = run(a_backward_beside_a_meeting, 2)
    assert problems == others == []
    assert "a backward begins while another thread is in step() of optimizer 0" in text


def groups_that_differ(rank, what):
    """One rank's group is refused, or another one than rank 0's; then all add an equal one."""
    several = Several(rank, 2, "none")
    several.plain_windows()
    wrapper = several.wrappers[0]
    params = several.params[0]["p0.first"] if rank == 1 and what == "refused" else nn.Parameter(torch.zeros(3 + rank))
    text = raised_by(lambda: wrapper.add_param_group({"params": [("extra", params)]}), (RuntimeError, ValueError))
    assert [len(group["params"]) for group in wrapper.param_groups] == [1, 1]
    several.plain_windows()
    last = nn.Parameter(torch.full((3,), 1.0 + rank))
    wrapper.add_param_group({"params": [("last", last)]})
    (last * 12.0 * (1 + rank)).sum().backward()
    wrapper.step()
    return several.problems, text, last.tolist()


@pytest.mark.parametrize(
    ("what", "says"), [("refused", "already has a main_grad"), ("other", "where rank 0 has extra (torch.float32, (3,)")]
)
def test_a_group_that_one_rank_refuses_is_added_on_none(what, says):
    for problems, text, last in run(groups_that_differ, 2, what, reuses=True):
        assert problems == []
        assert says in text
        assert last == [1.0 - LR * 18.0] * 3
