"""Accidents on some ranks only: each gradient is counted once, or all ranks raise and go on together."""

import pytest

from tests.distributed.accidents import END, MENDED_OR_RAISED, B, by_rank, cases_of, last, window
from tests.distributed.programs import (
    Clear,
    Settings,
    Step,
    assert_exact,
    plain_window,
    play_on_ranks,
    same,
)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", list(MENDED_OR_RAISED))
def test_mended_or_raised_by_all(name, world_size):
    cases = cases_of(name, MENDED_OR_RAISED[name](world_size), world_size)
    results = play_on_ranks(world_size, cases)
    assert_exact(results)
    assert len(results[0]) == len(cases) >= (3 if world_size == 2 else 1)
    plain = [len(program) - 1 for _, _, program in cases]
    assert all(max(played.raised, default=-1) < first for played, first in zip(results[0], plain, strict=True))


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
