"""What every test shares: a fixed seed, one thread, and no settings from the surroundings."""

import atexit
import gc
import os
import sys

import pytest
import torch
import torch._dynamo  # which the first optimizer of a process imports

for name in [name for name in os.environ if name.startswith("FUSEDOPT_")]:
    del os.environ[name]  # a test that wants one sets it


# Ranks and scripts import the package afresh hundreds of times: compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.fixture(autouse=True, scope="module")
def _the_collector_looks_at_objects_of_this_file_only():
    """Imported modules are a million objects: the collector, and every search among all objects, would go through."""
    gc.collect()
    gc.freeze()


atexit.register(gc.unfreeze)  # or some libraries miss objects at the end


@pytest.fixture(autouse=True)
def _fixed_seed_and_one_thread():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
