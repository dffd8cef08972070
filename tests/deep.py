"""Deep proofs: `make test` runs a slice of each, in which every value still occurs, and `make test-deep` all of it.

The variable ``TEST_DEEP`` decides, which ranks and scripts inherit. It has no prefix of ours, which is for settings.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

IS_DEEP = os.environ.get("TEST_DEEP", "") == "1"


def in_turn(values: Sequence[Any], turn: int) -> list[Any]:
    """Return all of ``values`` in a deep run, else the one whose turn it is: a neighbour takes the next."""
    return list(values) if IS_DEEP else [values[turn % len(values)]]


def paired(*dimensions: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return all combinations in a deep run, else some in which each two values of two dimensions meet."""
    dimensions = tuple(tuple(values) for values in dimensions)
    places = list(itertools.product(*(range(len(values)) for values in dimensions)))
    return [tuple(values[i] for values, i in zip(dimensions, at, strict=True)) for at in _cover(places)]


def _cover(places: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the places that are run: each time one of those with most pairs that no other has."""
    if IS_DEEP:
        return places
    pairs = {at: set(itertools.combinations(enumerate(at), 2)) for at in places}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(places, key=lambda at: len(pairs[at] & missing)))
        missing -= pairs[chosen[-1]]
    return sorted(chosen)
