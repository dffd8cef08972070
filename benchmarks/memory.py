"""Bytes per parameter as allocated, against the formula and `memory_report()`; and the peak while wrapping.

Nothing here is timed: the figures are the same at every run, and tests/unit/buffers/test_memory.py holds them.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fusedopt
from benchmarks.models import Shape, make_llama, numel
from benchmarks.timing import Claim, Result, environment

BUCKET_MIB = 16
"""Several buckets for the measured model, so that one bucket more than the final figure would show."""

FORMULA = {torch.bfloat16: 2 + 4 + 4 + 8, torch.float32: 4 + 4 + 8}
"""Bytes per parameter under Adam on one process: weight, main_grad, main_param of its own, two moments."""


class LiveTensors:
    """Count the bytes of tensors made since this was constructed and still alive, each storage once."""

    def __init__(self) -> None:
        self._before = _storages()  # kept, so that no address is used again

    def nbytes(self) -> int:
        """Return the bytes of all new storages."""
        return sum(s.nbytes() for address, s in _storages().items() if address not in self._before)


def _storages() -> dict[int, torch.UntypedStorage]:
    gc.collect()
    tensors = [obj for obj in gc.get_objects() if issubclass(type(obj), Tensor) and not _is_without_memory(obj)]
    tensors += [t.grad for t in tensors if t.is_leaf and t.grad is not None]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t.layout is torch.strided}


def _is_without_memory(tensor: Tensor) -> bool:
    """Whether this is a meta tensor, or one of those that a compiler traces with and leaves behind."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return True
    return torch._is_functional_tensor(tensor)


def peak_nbytes(action: Callable[[], object]) -> tuple[int, int]:
    """Return how far the allocator's bytes rose during ``action`` at most, and by its end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = action()  # what it returns lives until the end is recorded
    del kept
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    peak = total = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        total += change
        peak = max(peak, total)
    return peak, total


def measure(make_model: Callable[[], nn.Module], bucket_mib: int = BUCKET_MIB) -> dict[str, Any]:
    """Wrap AdamW over a new model, step once, and return bytes at each point."""
    live = LiveTensors()
    model = make_model()
    inner = torch.optim.AdamW(model.parameters())
    buffers_nbytes = sum(buffer.nbytes for buffer in model.buffers())  # of the module: no parameters, not ours
    model_nbytes = live.nbytes() - buffers_nbytes
    wrapper: list[fusedopt.FusedMainGradOptimizer] = []
    peak, _ = peak_nbytes(
        lambda: wrapper.append(fusedopt.FusedMainGradOptimizer(inner, bucket_mib=bucket_mib, max_grad_norm=1.0))
    )
    (optimizer,) = wrapper
    wrapped_nbytes = live.nbytes() - buffers_nbytes
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3, dtype=torch.float32)
    optimizer.step()
    return {
        "num_params": numel(model),
        "num_tensors": len(list(model.parameters())),
        "bucket_mib": bucket_mib,
        "model_bytes": model_nbytes,
        "wrapped_bytes": wrapped_nbytes,
        "wrapping_peak_bytes": model_nbytes + peak,
        "stepped_bytes": live.nbytes() - buffers_nbytes,
        "reported_bytes": int(optimizer.memory_report()["total"]),
    }


def run(shape: Shape, repeats: int) -> Result:
    """Measure the bf16 and the fp32 model. ``repeats`` changes nothing: memory is not noisy."""
    result = Result([], [])
    for dtype, formula in FORMULA.items():
        name = str(dtype).removeprefix("torch.")
        bytes_at = measure(lambda dtype=dtype: make_llama(shape, dtype))  # type: ignore[misc]
        num_params = bytes_at["num_params"]
        row = {
            "bench": "memory",
            "model": f"llama {num_params / 1e6:.1f} M",
            "dtype": name,
            "inner": "AdamW",
            **bytes_at,
            "bytes_per_param": round(bytes_at["stepped_bytes"] / num_params, 4),
            "formula_bytes_per_param": formula,
            "wrapping_peak_over_wrapped_bytes": bytes_at["wrapping_peak_bytes"] - bytes_at["wrapped_bytes"],
        }
        result.rows.append({**row, **environment()})
        over_mib = row["wrapping_peak_over_wrapped_bytes"] / 2**20
        result.claims.extend(
            [
                Claim(f"bytes per parameter, {name} model", formula, round(row["bytes_per_param"], 2), True),
                Claim(f"MiB above the final figure while wrapping, {name} model", BUCKET_MIB, round(over_mib, 3), True),
            ]
        )
    return result
