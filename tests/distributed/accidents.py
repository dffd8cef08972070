"""Every accident of a training loop, as the windows that ranks play; see `programs`."""

import itertools

from tests.deep import in_turn
from tests.distributed.programs import (
    ALL,
    Backward,
    Clear,
    Settings,
    Step,
    Window,
    each,
    plain_window,
    same,
)

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
    """Return one accident under every kind of shard, then a window without any; 3 ranks with overlap only.

    Left to `make test-deep`: on 2 ranks the other overlap of each shard, on 3 ranks all shards but one.
    """
    program = (*windows, plain_window(world_size, 2))
    shards = [shard for shard in SHARDS if shard != "gradients" or "not_seen_under_gradients" not in name]
    turn = [*EXACT, *MENDED_OR_RAISED].index(name)
    if world_size == 2:
        pairs = [(shard, overlap) for i, shard in enumerate(shards) for overlap in in_turn((True, False), turn + i)]
    else:
        pairs = [(shard, True) for shard in in_turn(shards, turn)]
    return [(name, Settings(shard, overlap_grad_reduce=overlap, **fixed), program) for shard, overlap in pairs]
