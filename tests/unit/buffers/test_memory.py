"""Bytes per parameter, as allocated: the formula, the report, and the peak while wrapping."""

import pytest
import torch
from torch import nn

import fusedopt
from benchmarks.memory import FORMULA, LiveTensors, measure, peak_nbytes
from fusedopt.sharding.layout import ALIGNMENT, ROW_NUMEL

MIB = 2**20
SMALL_TENSORS = 64  # the norm, the found_inf flag and the counter of the last step: 0-d, 16 bytes
TOKEN = 8  # per parameter, 0-d int64: by which compiled code names it; the report leaves it out


def layers(dtype):
    """Return eight layers of 1 MiB of fp32 each, with biases: four buckets of 2 MiB, and none without padding."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(512, 511) for _ in range(8)]).to(dtype)


def most_padding_bytes(bytes_at):
    """Return what alignment of each parameter and whole rows of each bucket may add, in main_grad and main_param."""
    num_buckets = -(-bytes_at["num_params"] * 4 // (bytes_at["bucket_mib"] * MIB)) + 1
    return 8 * (bytes_at["num_tensors"] * ALIGNMENT + num_buckets * ROW_NUMEL)


@pytest.mark.parametrize("dtype", list(FORMULA))
def test_bytes_per_parameter_are_those_of_the_formula(dtype):
    bytes_at = measure(lambda: layers(dtype), bucket_mib=2)
    exact = FORMULA[dtype] * bytes_at["num_params"]
    step_counts = 4 * bytes_at["num_tensors"]
    assert bytes_at["num_params"] * 4 > 3 * bytes_at["bucket_mib"] * MIB  # several buckets, or their sum says little
    extra = bytes_at["stepped_bytes"] - exact
    assert (
        step_counts
        <= extra
        <= step_counts + most_padding_bytes(bytes_at) + SMALL_TENSORS + TOKEN * bytes_at["num_tensors"]
    )
    assert most_padding_bytes(bytes_at) < 0.01 * exact


@pytest.mark.parametrize("dtype", list(FORMULA))
def test_memory_report_says_what_was_allocated(dtype):
    bytes_at = measure(lambda: layers(dtype), bucket_mib=2)
    assert (
        0 <= bytes_at["stepped_bytes"] - bytes_at["reported_bytes"] <= SMALL_TENSORS + TOKEN * bytes_at["num_tensors"]
    )


@pytest.mark.parametrize("dtype", list(FORMULA))
def test_wrapping_never_needs_more_than_the_final_figure_plus_one_bucket(dtype):
    bytes_at = measure(lambda: layers(dtype), bucket_mib=2)
    assert bytes_at["wrapped_bytes"] > bytes_at["model_bytes"]
    assert bytes_at["wrapping_peak_bytes"] <= bytes_at["wrapped_bytes"] + bytes_at["bucket_mib"] * MIB


def test_the_peak_of_a_whole_flat_copy_would_be_caught():
    model = layers(torch.bfloat16)
    numel = sum(param.numel() for param in model.parameters())
    # The obvious way: one flat bf16 tensor, widened; then the flat bf16 one is dropped.
    peak, final = peak_nbytes(lambda: torch.cat([p.detach().flatten() for p in model.parameters()]).float())
    assert final == 4 * numel
    assert peak - final == 2 * numel
    assert peak - final > 2 * MIB


def test_live_tensors_counts_a_storage_once_and_forgets_it_when_it_is_dropped():
    live = LiveTensors()
    tensor = torch.zeros(1000)
    views = [tensor[i:] for i in range(3)]
    assert live.nbytes() == 4000
    tensor.requires_grad_(True)
    tensor.grad = torch.ones(1000)
    assert live.nbytes() == 8000
    del tensor, views
    assert live.nbytes() == 0


def test_unwrapping_gives_all_memory_back():
    live = LiveTensors()
    model = layers(torch.bfloat16)
    before = live.nbytes()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert live.nbytes() > before
    optimizer.unwrap()
    del optimizer
    assert live.nbytes() == before
