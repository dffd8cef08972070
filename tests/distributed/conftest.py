"""What tests of several ranks share: ranks that are kept for another launch, and saved state."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.launcher import end_kept_ranks, run


@pytest.fixture(autouse=True, scope="module")
def _kept_ranks_end_with_the_file() -> Iterator[None]:
    yield
    end_kept_ranks()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what one process without a shard saves after 2 and 5 steps."""
    from checkpoint_cases import reference

    folder = tmp_path_factory.mktemp("references")
    run(reference, 1, folder)
    return folder
