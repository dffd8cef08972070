"""Every accident of a training loop: each gradient is counted once, or all ranks raise and go on together.

Programs are played under every kind of shard, with and without overlap, on 2 and 3 ranks, and compared with one
process after every row; see `programs`.
"""

import contextlib
import dataclasses
import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from launcher import run
from programs import (
    ALL,
    NUM_BLOCKS,
    Backward,
    Clear,
    InjectedError,
    Settings,
    Step,
    Window,
    assert_exact,
    each,
    make_net,
    plain_window,
    play_on_ranks,
    same,
)
from torch._dynamo import compiled_autograd

SHARDS = ("none", "optimizer", "gradients")
END = (Step(), Clear())
B = Backward


def window(*rows, **keywords):
    return Window(tuple(rows), **keywords)


def by_rank(world_size, first, others):
    """Return a row in which rank 0 does ``first`` and all others do ``others``."""
    return each(first, *[others] * (world_size - 1))


def last(world_size, others, last):
    return each(*[others] * (world_size - 1), last)


# -- accidents: world_size -> windows, all of which must be exact

EXACT = {}


def exact(accident):
    EXACT[accident.__name__] = accident
    return accident


@exact
def a_parameter_unused_everywhere_is_skipped(w):
    return [window(same(w, B((0, 1, 3, 4))), same(w, *END))] * 2


@exact
def a_parameter_used_on_some_ranks_counts_zero_on_the_others(w):
    return [window(by_rank(w, B((0, 1, 3)), B((0, 2, 3))), same(w, *END)), window(last(w, B((4,)), B()), same(w, *END))]


@exact
def a_parameter_first_used_in_the_last_micro_batch(w):
    few, late = same(w, B((0, 1))), last(w, B((0, 1)), B())
    return [window(few, few, late, same(w, *END)), window(few, same(w, B(ALL)), same(w, *END))]


@exact
def a_parameter_used_in_the_first_micro_batch_only(w):
    few = same(w, B((0, 1)))
    return [window(by_rank(w, B(), B((0, 1))), few, few, same(w, *END))]


@exact
def blocks_in_another_order_on_each_rank(w):
    orders = list(itertools.permutations(ALL))[7::29]
    return [window(each(*(B(orders[i + r]) for r in range(w))), same(w, *END)) for i in range(2)]


@exact
def every_rank_uses_other_parameters(w):
    return [window(each(*(B((r, 4 - r)) for r in range(w))), same(w, *END))] * 2


@exact
def tied_weights(w):
    path = (0, 1, 2, 1, 3, 0)
    return [window(same(w, B(path)), same(w, *END)), window(by_rank(w, B(path), B((1, 1))), same(w, *END))]


@exact
def checkpointed_regions(w):
    rows = [same(w, B(recompute=how)) for how in ("reentrant", "non-reentrant")]
    return [window(row, same(w, *END)) for row in rows] + [window(*rows, same(w, *END))]


@exact
def a_weight_in_two_reentrant_regions(w):
    path = (0, 1, 3, 1, 4, 3)
    twice = same(w, B(path, recompute="reentrant"))
    return [window(twice, same(w, *END))] * 2 + [window(twice, twice, same(w, *END))]


@exact
def a_weight_in_two_regions_on_one_rank_only(w):
    path = (0, 1, 3, 1, 4, 3)
    row = by_rank(w, B(path, recompute="reentrant"), B(path[:3], recompute="non-reentrant"))
    return [window(row, same(w, *END)), plain_window(w), window(row, same(w, B()), same(w, *END))]


@exact
def a_second_backward_before_the_step(w):
    return [window(same(w, B()), same(w, B()), same(w, *END)), window(same(w, B((1, 2))), same(w, B()), same(w, *END))]


@exact
def a_graph_that_is_retained_and_walked_again(w):
    return [window(same(w, B(times=2)), same(w, *END)), window(same(w, B(times=3), B(times=2)), same(w, *END))]


@exact
def a_rank_without_any_gradient_in_a_backward(w):
    return [
        window(last(w, B(), B(())), same(w, *END)),
        window(last(w, B(()), B()), same(w, *END)),
        window(by_rank(w, B(()), B()), same(w, B()), same(w, *END)),
    ]


@exact
def a_backward_without_any_gradient_on_all_ranks(w):
    return [window(same(w, B(())), same(w, *END)), window(same(w, B(())), same(w, B()), same(w, *END))]


@exact
def an_empty_window(w):
    return [window(same(w, *END)), plain_window(w), window(same(w, *END))]


@exact
def a_step_called_twice(w):
    return [window(same(w, B()), same(w, Step()), same(w, *END))] * 2


@exact
def gradients_kept_over_a_step(w):
    kept = window(same(w, B()), same(w, Step()))
    return [kept, kept, window(same(w, B()), same(w, *END))]


@exact
def kept_gradients_of_parameters_that_are_used_no_more(w):
    return [window(same(w, B()), same(w, Step())), window(same(w, B((1,))), same(w, Step())), window(same(w, *END))]


@exact
def kept_gradients_to_which_some_ranks_add(w):
    return [
        window(by_rank(w, B((0, 1)), B((1, 2))), same(w, Step())),
        window(last(w, B((3,)), B((0, 1))), same(w, Step())),
        window(by_rank(w, B(()), B((2, 2))), same(w, *END)),
    ]


@exact
def a_clear_before_the_step_on_all_ranks(w):
    return [window(same(w, B()), same(w, Clear()), same(w, *END)), window(same(w, B(), Clear(), B()), same(w, *END))]


@exact
def several_clears_in_one_window(w):
    few = same(w, B((0, 3)))
    return [window(same(w, Clear(), B(), Clear(), Clear()), few, same(w, Clear(), Clear()), few, same(w, *END))]


@exact
def a_clear_of_kept_gradients_on_all_ranks(w):
    kept = window(same(w, B()), same(w, Step()))
    return [kept, window(same(w, Clear()), same(w, B((0, 1))), same(w, Step())), window(same(w, Clear(), B(), *END))]


@exact
def an_exception_between_two_micro_batches_then_a_clear(w):
    return [window(same(w, B()), same(w, Clear()), same(w, B()), same(w, B()), same(w, *END))]  # it left no trace


@exact
def backwards_under_no_sync(w):
    quiet, partly = same(w, B(sync=False)), last(w, B(sync=False), B((1, 2), sync=False))
    return [
        window(quiet, quiet, same(w, B()), same(w, *END)),
        window(quiet, partly, same(w, B((0,))), same(w, *END)),
        window(quiet, same(w, B()), quiet, same(w, *END)),
        window(partly, quiet, same(w, *END)),
    ]


@exact
def another_number_of_backwards_under_no_sync_on_each_rank(w):
    return [window(last(w, B(sync=False), ()), last(w, (), B(sync=False)), same(w, B((0, 1))), same(w, *END))] * 2


@exact
def no_sync_after_a_clear_and_before_one(w):
    quiet = same(w, B(sync=False))
    return [window(quiet, same(w, Clear()), quiet, same(w, B((2,))), same(w, *END))]


@exact
def a_failed_backward_on_all_ranks_then_a_clear_and_a_retry(w):
    places = each(*(B(fails_at=1 + r) for r in range(w)))
    return [window(places, same(w, Clear()), same(w, B()), same(w, *END))] * 2


@exact
def a_failed_backward_on_all_ranks_then_a_retry(w):
    places = each(*(B(fails_at=3 - r) for r in range(w)))
    return [window(places, same(w, B()), same(w, *END)), window(same(w, B()), places, same(w, B()), same(w, *END))]


@exact
def a_failed_backward_on_all_ranks_then_a_step(w):
    places = each(*(B(fails_at=5 - r) for r in range(w)))
    return [window(places, same(w, *END)), window(same(w, B()), places, same(w, *END))]


@exact
def a_failed_backward_in_checkpointed_regions_on_all_ranks(w):
    places = each(*(B((0, 1, 3, 1, 4), fails_at=1 + r, recompute="reentrant") for r in range(w)))
    return [window(places, same(w, *END)), window(places, same(w, B()), same(w, *END))]


@exact
def a_failed_backward_under_no_sync(w):
    places = each(*(B(fails_at=1 + 2 * (r % 2), sync=False) for r in range(w)))
    return [window(places, same(w, B()), same(w, *END)), window(places, places, same(w, *END))]


@exact
def a_failed_backward_on_one_rank_under_no_sync(w):
    row = by_rank(w, B(fails_at=2, sync=False), B(sync=False))
    return [window(row, same(w, B()), same(w, *END)), window(row, same(w, *END))]


# These clear without the optimizer, which cannot be seen where `.grad` is None after each backward ("gradients").


@exact
def a_clear_by_the_model_on_all_ranks_not_seen_under_gradients(w):
    clear = same(w, Clear("model"))
    return [
        window(same(w, B()), clear, same(w, Step(), Clear("model"))),
        window(same(w, B()), clear, same(w, B(), *END)),
    ]


@exact
def a_clear_of_some_parameters_on_all_ranks_not_seen_under_gradients(w):
    clear = same(w, Clear("param", (1, 4)))
    return [
        window(same(w, B()), clear, same(w, *END)),
        window(same(w, B()), clear, same(w, B((1, 2))), clear, same(w, Step())),
        window(clear, same(w, B((0, 1))), same(w, *END)),
    ]


# -- accidents: world_size -> windows, some of which may raise, on all ranks

MENDED_OR_RAISED = {}


def mended_or_raised(accident):
    MENDED_OR_RAISED[accident.__name__] = accident
    return accident


@mended_or_raised
def a_failed_backward_on_one_rank_then_a_step(w):
    return [window(by_rank(w, B(fails_at=2), B()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_failed_backward_on_one_rank_then_a_retry_of_all(w):
    return [window(last(w, B(), B(fails_at=2)), same(w, B()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_failed_backward_on_one_rank_that_it_alone_retries(w):
    return [window(last(w, B(), (B(fails_at=2), B())), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_failed_backward_on_one_rank_that_clears_and_retries_alone(w):
    return [window(last(w, B(), (B(fails_at=2), Clear(), B())), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_failed_backward_on_one_rank_then_a_clear_of_all(w):
    return [window(by_rank(w, B(fails_at=2), B()), same(w, Clear()), same(w, B()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_failed_checkpointed_backward_on_one_rank(w):
    failed = B((0, 1, 3, 1, 4), fails_at=2, recompute="reentrant")
    return [window(by_rank(w, failed, B((0, 1))), same(w, B()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def another_number_of_backwards_on_each_rank(w):
    uneven = by_rank(w, (B(), B()), B())
    return [window(uneven, same(w, *END), may_raise=True), window(uneven, same(w, B()), same(w, *END), may_raise=True)]


@mended_or_raised
def a_rank_that_does_nothing_in_a_window(w):
    return [window(last(w, B(), ()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_rank_without_gradients_whose_backward_is_followed_by_a_clear_of_all(w):
    return [window(last(w, B(), B(())), same(w, Clear()), same(w, B()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_clear_on_one_rank_only(w):
    return [window(same(w, B()), by_rank(w, Clear(), ()), same(w, *END), may_raise=True)] * 2


@mended_or_raised
def a_clear_on_one_rank_only_and_a_backward(w):
    rows = (same(w, B()), last(w, (), Clear()), same(w, B((0, 1))), same(w, *END))
    return [window(*rows, may_raise=True)] * 2


@mended_or_raised
def a_clear_of_kept_gradients_on_one_rank_only(w):
    kept = window(same(w, B()), same(w, Step()), may_raise=True)
    return [kept, window(by_rank(w, Clear(), ()), same(w, B((0, 1))), same(w, *END), may_raise=True)]


@mended_or_raised
def a_clear_before_a_retry_on_one_rank_under_no_sync(w):
    rows = (same(w, B(sync=False)), by_rank(w, Clear(), ()), same(w, B()), same(w, *END))
    return [window(*rows, may_raise=True)] * 2


def cases_of(name, windows, world_size, **fixed):
    """Return one accident under every kind of shard, then a window without any; 3 ranks with overlap only."""
    program = (*windows, plain_window(world_size, 2))
    return [
        (name, Settings(shard, overlap_grad_reduce=overlap, **fixed), program)
        for shard in SHARDS
        for overlap in ((True, False) if world_size == 2 else (True,))
        if shard != "gradients" or "not_seen_under_gradients" not in name
    ]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", list(EXACT))
def test_exact(name, world_size):
    cases = cases_of(name, EXACT[name](world_size), world_size)
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    assert len(results[0]) == len(cases) >= 2
    assert all(sum(counts["reduce"] for counts in played.counts) >= NUM_BLOCKS for played in results[0])
    assert not any(played.raised for played in results[0])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", list(MENDED_OR_RAISED))
def test_mended_or_raised_by_all(name, world_size):
    cases = cases_of(name, MENDED_OR_RAISED[name](world_size), world_size)
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    assert len(results[0]) == len(cases) >= 3
    plain = [len(program) - 1 for _, _, program in cases]
    assert all(max(played.raised, default=-1) < first for played, first in zip(results[0], plain, strict=True))


FUSED = [
    "a_parameter_used_on_some_ranks_counts_zero_on_the_others",
    "tied_weights",
    "a_weight_in_two_reentrant_regions",
    "a_weight_in_two_regions_on_one_rank_only",
    "a_graph_that_is_retained_and_walked_again",
    "gradients_kept_over_a_step",
    "a_clear_before_the_step_on_all_ranks",
    "backwards_under_no_sync",
    "a_failed_backward_on_all_ranks_then_a_retry",
    "a_failed_backward_on_all_ranks_then_a_step",
    "a_failed_backward_under_no_sync",
]


@pytest.mark.parametrize("name", FUSED)
def test_exact_with_fused_layers_which_write_before_the_hooks_run(name):
    results = play_on_ranks(2, cases_of(name, EXACT[name](2), 2, is_fused=True, dtype=torch.float32))
    assert_exact(results)


MERGED = [
    "a_parameter_first_used_in_the_last_micro_batch",
    "a_parameter_used_on_some_ranks_counts_zero_on_the_others",
    "every_rank_uses_other_parameters",
    "a_weight_in_two_reentrant_regions",
    "a_rank_without_any_gradient_in_a_backward",
    "a_graph_that_is_retained_and_walked_again",
]


def merged(windows, k):
    """Return the windows with all their backwards as micro-batches of merged windows of ``k``."""
    rows = [row for w in windows for row in w.rows if isinstance(row[0][0], Backward)]
    rows = (rows * k)[: k * max(2, len(rows) // k)]
    world_size = len(rows[0])
    return [
        window(*(r for row in rows[i : i + k] for r in (row, same(world_size, *END)))) for i in range(0, len(rows), k)
    ]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MERGED)
def test_exact_under_gradient_merge_where_the_last_backward_is_known(name, world_size):
    windows = merged(EXACT[name](world_size), 2)
    cases = [
        (name, dataclasses.replace(s, gradient_accumulation_steps=2), program[:-1])
        for _, s, program in cases_of(name, windows, world_size)
    ]
    assert len(cases[0][2]) >= 2
    results = play_on_ranks(world_size, cases)
    assert_exact(results)


# -- a clear on some ranks only, of what all ranks have already


RAISES = r"blocks\.\d.*All ranks raise this.*optimizer\.zero_grad\(\)"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", [Clear(), Clear("model"), Clear("param", (3,))], ids=["optimizer", "model", "param"])
def test_a_clear_on_one_rank_of_what_was_reduced_raises_on_all_by_name_and_training_goes_on(how, world_size):
    pattern = RAISES if how.how != "param" else RAISES.replace(r"\d", "3")
    lost = [
        window(same(world_size, B()), by_rank(world_size, how, ()), same(world_size, *END), raises=pattern),
        plain_window(world_size),
        window(
            same(world_size, B()),
            last(world_size, (), how),
            same(world_size, B()),
            same(world_size, *END),
            raises=pattern,
        ),
        plain_window(world_size),
    ]
    kept = [
        window(same(world_size, B()), same(world_size, Step())),
        window(by_rank(world_size, how, ()), same(world_size, B((0,))), same(world_size, *END), raises=pattern),
        plain_window(world_size),
    ]
    cases = []
    for overlap in (True, False):
        cases.append(("cleared", Settings("none", overlap_grad_reduce=overlap), (*lost, *kept)))
        cases.append(("kept", Settings("optimizer", overlap_grad_reduce=overlap), tuple(kept)))
        if how.how == "optimizer":
            cases.append(("kept", Settings("gradients", overlap_grad_reduce=overlap), tuple(kept)))
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    assert [list(played.raised) for played in results[0][:2]] == [[0, 2, 5], [1]]


# -- what a hook, a hand or a failed loop sees


def hand_set(rank, shard, who):
    """Return the parameter after each of three windows in which some ranks assign ``.grad`` before the step."""
    net = make_net(torch.float32)
    settings = Settings(shard, optimizer="plain SGD")
    optimizer = settings.make(net)
    weight = net.blocks[2].layer.weight
    trace = [weight.detach().clone()]
    for i in range(3):
        net(B((0, 1)), (i, rank)).backward()  # another parameter's gradient arrives
        if rank in who:
            weight.grad = torch.full_like(weight, 12.0 * (i + 1))
        optimizer.step()
        optimizer.zero_grad()
        trace.append(weight.detach().clone())
    return trace


@pytest.mark.parametrize("who", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_gradient_set_by_hand_is_counted_on_the_ranks_that_set_it(shard, who):
    for trace in run(hand_set, 3, shard, who):
        for i in range(3):
            expected = trace[i] - 0.125 * (12.0 * (i + 1) * len(who) / 3)
            assert torch.isfinite(expected).all()
            assert torch.equal(trace[i + 1], expected)


def watch_with_hooks(rank, shard):
    """Return what users' hooks, registered before and after wrapping, saw over two micro-batches, for three windows."""
    net = make_net(torch.bfloat16)
    weight = net.blocks[1].layer.weight
    seen = []

    def look(param):
        seen.append((param.grad is not None and param.grad is param.main_grad, param.grad.dtype, param.grad.clone()))

    weight.register_post_accumulate_grad_hook(look)
    optimizer = Settings(shard).make(net)
    weight.register_post_accumulate_grad_hook(look)
    weight.register_hook(lambda grad: seen.append(("tensor hook", grad.dtype, grad.clone())))
    for i in range(3):
        with optimizer.no_sync():
            net(B((1, 3)), (i, 0, rank)).backward()
        net(B((1, 3)), (i, 1, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("shard", SHARDS)
def test_users_hooks_see_main_grad_accumulated(shard):
    for seen in run(watch_with_hooks, 2, shard):
        assert len(seen) == 3 * 2 * 3
        for i in range(0, len(seen), 6):
            (_, _, first), *after_first, (_, _, second), early, late = seen[i : i + 6]
            assert [what for what, _, _ in seen[i : i + 6]] == ["tensor hook", True, True] * 2
            assert {dtype for _, dtype, _ in seen} == {torch.float32}
            assert first.any()
            assert second.any()
            assert all(torch.equal(grad, first) for _, _, grad in after_first)
            total = second if shard == "gradients" else first + second  # there the first is in the shard by now
            assert torch.equal(early[2], total)
            assert torch.equal(late[2], total)


def fail_and_read(rank, shard):
    """Return `.grad` after a good backward, and after one that failed on top of it, under no_sync."""
    net = make_net(torch.float32)
    optimizer = Settings(shard).make(net)
    grads = []
    with optimizer.no_sync():
        net(B(), (0, rank)).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
        with contextlib.suppress(InjectedError):
            net(B(fails_at=NUM_BLOCKS), (1, rank)).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    optimizer.step()
    return grads


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_the_sum_of_earlier_micro_batches_is_kept_when_a_backward_fails(shard):
    for before, after in run(fail_and_read, 2, shard):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def grad_of_a_backward(rank, shard):
    """Return whether `torch.autograd.grad` in the middle of a window left gradients and counts alone."""
    net = make_net(torch.float32)
    optimizer = Settings(shard).make(net)
    net(B(), (0, rank)).backward()
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    counts = dict(optimizer._comm.counts)
    torch.autograd.grad(net(B(), (1, rank)), list(net.parameters()))
    after = [p.grad for p in net.parameters()]
    same_grads = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return same_grads, counts == dict(optimizer._comm.counts)


@pytest.mark.parametrize("shard", SHARDS)
def test_autograd_grad_reduces_nothing(shard):
    assert run(grad_of_a_backward, 2, shard) == [(True, True)] * 2


# -- control messages keep off the data group


class _Spy:
    """Collect (operation, group, dtype) of what is communicated."""

    NAMES = ("all_reduce", "all_to_all_single", "isend", "irecv", "broadcast", "all_gather_object", "send", "recv")

    def __init__(self):
        self.seen = []
        for name in self.NAMES:
            setattr(dist, name, self._wrap(name, getattr(dist, name)))

    def _wrap(self, name, function):
        def call(*args, **keywords):
            tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
            self.seen.append((name, keywords.get("group"), None if tensor is None else tensor.dtype))
            return function(*args, **keywords)

        return call


def spy(rank, shard):
    """Return the dtypes that travelled on each kind of group in three windows with accidents."""
    watch = _Spy()
    net = make_net(torch.bfloat16)
    optimizer = Settings(shard, max_grad_norm=1.0).make(net)
    for i in range(3):
        net(B(ALL if rank else (0, 1)), (i, rank)).backward()
        net(B(ALL if i else ()), (i, 1, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    control = optimizer._comm._control
    on_default = {dtype for _, group, dtype in watch.seen if group in (None, dist.group.WORLD)}
    on_control = {dtype for _, group, dtype in watch.seen if group is control}
    elsewhere = {dtype for _, group, dtype in watch.seen if group not in (None, dist.group.WORLD, control)}
    return on_default, on_control, elsewhere, len(watch.seen), sum(optimizer._comm.counts.values())


@pytest.mark.parametrize("shard", SHARDS)
def test_control_messages_and_data_never_share_a_group_nor_take_the_loops(shard):
    for on_default, on_control, elsewhere, num_calls, num_counted in run(spy, 3, shard):
        assert on_default == set()
        assert torch.uint8 in on_control
        assert not on_control - {torch.uint8, None}  # None: a pickled object
        assert torch.float32 in elsewhere
        assert not elsewhere & {torch.uint8, None}
        assert num_calls >= num_counted > 0  # an exchange from rank to rank is several calls


# -- backwards of other kinds


def backward_of_some_inputs(rank, shard):
    """Return what three windows of ``backward(inputs=...)`` changed."""
    net = make_net(torch.float32)
    optimizer = Settings(shard, optimizer="plain SGD").make(net)
    names = [f"blocks.{i}.layer.weight" for i in (1, 4)]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for i in range(3):
        net(B(), (i, rank)).backward(inputs=[net.get_parameter(name) for name in names])
        optimizer.step()
        optimizer.zero_grad()
    return [name for name, p in net.named_parameters() if not torch.equal(p, before[name])], list(net.parameters())


@pytest.mark.parametrize("shard", SHARDS)
def test_backward_of_some_inputs_reduces_those(shard):
    results = run(backward_of_some_inputs, 2, shard)
    assert [changed for changed, _ in results] == [["blocks.1.layer.weight", "blocks.4.layer.weight"]] * 2
    for got, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, other)


def backward_under_compiled_autograd(rank):
    net = make_net(torch.float32)
    optimizer = Settings("none").make(net)
    loss = net(B(), (0, rank))
    try:
        with compiled_autograd._enable(lambda graph: graph):
            loss.backward()
    except RuntimeError as error:
        text = str(error)
    else:
        text = "nothing raised"
    optimizer.zero_grad()
    net(B(), (1, rank)).backward()
    optimizer.step()
    return text, [p.detach().clone() for p in net.parameters()]


def test_compiled_autograd_which_drops_the_end_of_backward_is_refused_and_training_goes_on():
    results = run(backward_under_compiled_autograd, 2)
    for text, _ in results:
        assert "compiled autograd" in text
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


class _TakeTurns(torch.autograd.Function):
    """Let the other thread's backward go on for one block before this one does."""

    turns = None

    @staticmethod
    def forward(ctx, carry):
        return carry.clone()

    @staticmethod
    def backward(ctx, grad):
        with contextlib.suppress(threading.BrokenBarrierError):
            _TakeTurns.turns.wait(5.0)
        return grad


def backward_in_two_threads(rank):
    net = make_net(torch.float32)
    optimizer = Settings("optimizer").make(net)
    _TakeTurns.turns = threading.Barrier(2)
    texts = []

    def work(number):
        carry = torch.zeros((), requires_grad=True)
        total = 0.0
        for block in net.blocks:
            term, carry = block(*block.data(torch.float32, (number, rank)), _TakeTurns.apply(carry))
            total = total + term
        try:
            total.backward()
        except RuntimeError as error:
            texts.append(str(error))
            _TakeTurns.turns.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.zero_grad()
    return texts


def test_backwards_of_one_model_in_two_threads_at_once_are_refused():
    for texts in run(backward_in_two_threads, 2):
        assert len(texts) >= 1
        assert "two threads" in texts[0]
