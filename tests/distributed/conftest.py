"""Ranks that are kept for another launch end with the test file."""

from collections.abc import Iterator

import pytest
from launcher import end_kept_ranks


@pytest.fixture(autouse=True, scope="module")
def _kept_ranks_end_with_the_file() -> Iterator[None]:
    yield
    end_kept_ranks()
