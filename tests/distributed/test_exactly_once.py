"""Every accident of a training loop: each gradient is counted once.

Programs are played under every kind of shard, with and without overlap, on 2 and 3 ranks, and compared with one
process after every row; see `programs`. Which of these meet is for `cases_of`.
"""

import dataclasses

import pytest
import torch

from tests.distributed.accidents import END, EXACT, cases_of, window
from tests.distributed.programs import (
    NUM_BLOCKS,
    Backward,
    assert_exact,
    play_on_ranks,
    same,
)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", list(EXACT))
def test_exact(name, world_size):
    cases = cases_of(name, EXACT[name](world_size), world_size)
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    assert len(results[0]) == len(cases) >= (2 if world_size == 2 else 1)
    assert all(sum(counts["reduce"] for counts in played.counts) >= NUM_BLOCKS for played in results[0])
    assert not any(played.raised for played in results[0])


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
