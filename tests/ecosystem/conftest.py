"""What all these tests need: accelerate without the state of the test before."""

import pytest

from tests.accelerate_cases import forget_accelerators


@pytest.fixture(autouse=True)
def _accelerate_starts_anew():
    forget_accelerators()
    yield
    forget_accelerators()
