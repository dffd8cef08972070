"""The slices of deep proofs leave no value out, and a deep run leaves nothing out."""

import itertools

import pytest

from tests import deep

DIMENSIONS = [("a", "b", "c"), (1, 2), (None, "x"), (False, True)]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_each_two_values_of_two_dimensions_meet(monkeypatch, num):
    monkeypatch.setattr(deep, "IS_DEEP", False)
    found, everything = deep.paired(*DIMENSIONS[:num]), list(itertools.product(*DIMENSIONS[:num]))
    for i, j in itertools.combinations(range(num), 2):
        assert {(at[i], at[j]) for at in found} == set(itertools.product(DIMENSIONS[i], DIMENSIONS[j]))
    assert len(found) == len(set(found))
    assert set(found) <= set(everything)
    assert (len(found) < len(everything)) == (num > 2)


def test_neighbours_take_turns_until_each_value_had_one(monkeypatch):
    monkeypatch.setattr(deep, "IS_DEEP", False)
    assert [deep.in_turn("abc", turn) for turn in range(4)] == [["a"], ["b"], ["c"], ["a"]]


def test_a_deep_run_has_everything_in_order(monkeypatch):
    monkeypatch.setattr(deep, "IS_DEEP", True)
    assert deep.in_turn("abc", 1) == ["a", "b", "c"]
    assert deep.paired(*DIMENSIONS) == list(itertools.product(*DIMENSIONS))
