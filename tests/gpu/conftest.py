"""The device of these tests: a CUDA device, or with GPU_TESTS_DEVICE=cpu a rehearsal of what makes sense on a CPU."""

import os

import pytest
import torch

from fusedopt import backends

BACKENDS = ("torch", "triton", "apex", "transformer_engine")


@pytest.fixture
def device():
    """Return the device to test on."""
    if os.environ.get("GPU_TESTS_DEVICE") == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch sees none (GPU_TESTS_DEVICE=cpu rehearses on the CPU)")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def cuda(device):
    """Return the CUDA device, where only that makes sense."""
    if device.type != "cuda":
        pytest.skip("CUDA only: a CPU has no streams, graphs, allocator statistics or synchronisations")
    yield device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@pytest.fixture(params=BACKENDS)
def backend_name(request, device):
    """Return the name of each backend that answers on this device."""
    try:
        backends.resolve(request.param, device, torch.bfloat16)
    except RuntimeError as error:
        pytest.skip(f"backend {request.param}: {error}"[:200])
    return request.param


@pytest.fixture
def backend(backend_name, device):
    """Return the table of each backend that answers on this device."""
    return backends.resolve(backend_name, device, torch.bfloat16)
