"""What every test shares: a fixed seed, one thread, and no settings from the surroundings."""

import os

import pytest
import torch

for name in [name for name in os.environ if name.startswith("FUSEDOPT_")]:
    del os.environ[name]  # a test that wants one sets it


@pytest.fixture(autouse=True)
def _fixed_seed_and_one_thread():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
