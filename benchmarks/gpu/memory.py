"""Section 4: bytes per parameter as allocated, against the table of docs and `memory_report()`; and three peaks.

On CUDA the allocator's own count of requested bytes (its rounding to blocks left out), on a CPU the storages of
live tensors and the profiler's events, as in `benchmarks.memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fusedopt
from benchmarks.gpu.harness import Section
from benchmarks.gpu.llama import BILLION, TINY, make_llama, make_tokens, numel
from benchmarks.memory import FORMULA, LiveTensors, peak_nbytes
from fusedopt import backends

BUCKET_MIB = {False: 128, True: 1}
"""fp32 MiB; tiny: not more than the rehearsal's model has."""
ROUNDING = 0.05
"""Bytes per parameter over the formula that pass: padding, step counts."""
SLACK_MIB = 64
"""Activations of `FEW_TOKENS`, workspaces of GEMMs: not ours, and not nothing."""
FEW_TOKENS = 16


class Meter:
    """Bytes in use on the device since this was made, and peaks above that."""

    def __init__(self, section: Section) -> None:
        self._section = section
        _make_workspaces(section)
        section.empty_cache()
        self._live = None if section.is_cuda else LiveTensors()
        self._before = self._stat("current") if section.is_cuda else 0

    def _stat(self, kind: str) -> int:
        self._section.synchronize()
        return int(torch.cuda.memory_stats(self._section.device)[f"requested_bytes.all.{kind}"])

    def nbytes(self) -> int:
        """Return what is in use."""
        return self._live.nbytes() if self._live is not None else self._stat("current") - self._before

    def peak_of(self, action: Callable[[], Any]) -> int:
        """Run ``action``, which keeps what it makes, and return how high use rose above that before, at most."""
        if self._live is not None:
            return peak_nbytes(action)[0]
        before = self._stat("current")
        torch.cuda.reset_peak_memory_stats(self._section.device)
        action()
        return self._stat("peak") - before


def _make_workspaces(section: Section) -> None:
    """Let cuBLAS take its workspaces, which it keeps, before anything is counted."""
    for dtype in FORMULA:
        operand = torch.ones(64, 64, dtype=dtype, device=section.device)
        torch.mm(operand, operand)
    if section.is_cuda:
        operand = torch.ones(64, 64, dtype=torch.bfloat16, device=section.device)
        main_grad = torch.zeros(64, 64, device=section.device)
        backends.resolve("auto", section.device, torch.bfloat16).wgrad_accumulate_(
            main_grad, operand, operand, accumulate=True
        )


def run(section: Section) -> None:
    """Measure the bf16 and the fp32 model."""
    for dtype, formula in FORMULA.items():
        name = str(dtype).removeprefix("torch.")
        row = section.attempt(f"{name} model", lambda dtype=dtype: _measure(section, dtype))
        if row is None:
            continue
        num_params = row["num_params"]
        section.row("measurement", dtype=name, formula_bytes_per_param=formula, **row)
        section.claim(
            f"bytes per parameter, {name} model, AdamW", row["bytes_per_param"], formula + ROUNDING, is_upper_bound=True
        )
        section.claim(
            f"bytes per parameter, {name} model, allocated and not in memory_report()",
            abs(row["stepped_bytes"] - row["reported_bytes"]) / num_params,
            ROUNDING,
            is_upper_bound=True,
        )
        mib = {key: row[f"{key}_bytes"] / 2**20 for key in ("above_wrapped", "backward_peak", "largest_gradient")}
        section.claim(
            f"MiB above the final figure while wrapping, {name} model",
            mib["above_wrapped"],
            row["bucket_mib"],
            is_upper_bound=True,
        )
        section.claim(
            f"MiB above what is held in a backward of {FEW_TOKENS} tokens, {name} model",
            mib["backward_peak"],
            mib["largest_gradient"] + SLACK_MIB,
            is_upper_bound=True,
        )


def _measure(section: Section, dtype: torch.dtype) -> dict[str, Any]:
    """Wrap AdamW over a new model, train three windows, and return bytes at each point."""
    shape = TINY if section.is_tiny else BILLION
    meter = Meter(section)
    model = make_llama(shape, section.device, dtype)
    tables = sum(buffer.nbytes for buffer in model.buffers())
    model_nbytes = meter.nbytes() - tables
    made: list[fusedopt.FusedMainGradOptimizer] = []
    bucket_mib = BUCKET_MIB[section.is_tiny]

    def wrap() -> fusedopt.FusedMainGradOptimizer:
        inner = torch.optim.AdamW(model.parameters(), fused=True)
        made.append(fusedopt.FusedMainGradOptimizer(inner, bucket_mib=bucket_mib, max_grad_norm=1.0))
        return made[0]

    wrapping_peak = meter.peak_of(wrap)
    wrapped_nbytes = meter.nbytes() - tables
    (optimizer,) = made
    tokens = make_tokens(shape, section.device)[:1, :FEW_TOKENS]

    def backward() -> None:
        model(tokens).backward()

    peaks = {}
    for _ in range(3):  # the first creates state and workspaces
        peaks = {
            "backward_peak_bytes": meter.peak_of(backward),
            "step_peak_bytes": meter.peak_of(optimizer.step),
        }
        optimizer.zero_grad()
    report = optimizer.memory_report()
    stepped_nbytes = meter.nbytes() - tables
    num_params = numel(model)
    return {
        "num_params": num_params,
        "num_tensors": len(list(model.parameters())),
        "bucket_mib": bucket_mib,
        "inner": "AdamW(fused=True)",
        "model_bytes": model_nbytes,
        "wrapped_bytes": wrapped_nbytes,
        "above_wrapped_bytes": model_nbytes + wrapping_peak - wrapped_nbytes,
        "stepped_bytes": stepped_nbytes,
        "reported_bytes": int(report["total"]),
        "bytes_per_param": round(stepped_nbytes / num_params, 4),
        "largest_gradient_bytes": _largest_gradient_nbytes(model, dtype),
        **peaks,
    }


def _largest_gradient_nbytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of one unfused parameter's gradient, in its own dtype and in fp32."""
    per_element = dtype.itemsize + (4 if dtype.itemsize < 4 else 0)
    return per_element * max(param.numel() for param in model.parameters())
