"""The encodings of main_param and state, beside `AdamW(fused=True)` on as many fp32 elements.

``python -m benchmarks.run --only encodings --threads 1``: each function on one flat tensor, in cache and not.
Contestants are called often enough in a turn to take about `TURN_NUMEL` elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.models import TINY, Shape
from benchmarks.timing import Claim, Contestant, Result, environment, interleaved_ms, ratios
from fusedopt.buffers.encodings import Noise, join24_, join_, narrow_bf16_, split24_, split_
from fusedopt.buffers.int8 import decode_int8_, encode_int8_, num_blocks

SIZES = {"64 Ki": 2**16, "1 Mi": 2**20, "16 Mi": 2**24}
TINY_SIZES = {"64 Ki": 2**16}
TURN_NUMEL = 2**23
PAIR = ("split", "join")  # what every step with a split main_param needs


def calls(numel: int) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name, each a call on ``numel`` elements."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(numel, generator=generator)
    positive, out = wide.square(), torch.empty(numel)
    model, low, low8 = (torch.empty(numel, dtype=dtype) for dtype in (torch.bfloat16, torch.int16, torch.int8))
    codes, scales = torch.empty(numel, dtype=torch.uint8), torch.empty(num_blocks(numel))
    signed_codes, signed_scales = torch.empty(numel, dtype=torch.int8), scales.clone()
    noise = Noise(0, 0, 0, numel, wide.device)
    split_(wide, model, low)
    split24_(wide, model, low8)
    encode_int8_(wide, signed_codes, signed_scales, is_signed=True)
    encode_int8_(positive, codes, scales, is_signed=False)
    return {
        "adamw": _adamw(wide, out.normal_(generator=generator)),
        "split": lambda: split_(wide, model, low),
        "join": lambda: join_(model, low, out),
        "split24": lambda: split24_(wide, model, low8),
        "split24, noise": lambda: split24_(wide, model, low8, noise=noise),
        "join24": lambda: join24_(model, low8, out),
        "narrow_bf16": lambda: narrow_bf16_(wide, model, noise=noise, first=0),
        "bf16 to nearest": lambda: model.copy_(wide),
        "widen bf16": lambda: out.copy_(model),
        "Noise": lambda: Noise(0, 0, 0, numel, wide.device),
        "encode signed": lambda: encode_int8_(wide, signed_codes, signed_scales, is_signed=True),
        "encode signed, noise": lambda: encode_int8_(wide, signed_codes, signed_scales, is_signed=True, noise=noise),
        "decode signed": lambda: decode_int8_(signed_codes, signed_scales, out, is_signed=True),
        "encode": lambda: encode_int8_(positive, codes, scales, is_signed=False),
        "encode, noise": lambda: encode_int8_(positive, codes, scales, is_signed=False, noise=noise),
        "decode": lambda: decode_int8_(codes, scales, out, is_signed=False),
    }


def _adamw(main: Tensor, grad: Tensor) -> Callable[[], object]:
    param = nn.Parameter(main.clone())
    param.grad = grad.clone()
    return torch.optim.AdamW([param], fused=True).step


def run(shape: Shape, repeats: int) -> Result:
    """Time every function at every size. What is claimed is the pair without which no step goes."""
    result = Result([], [])
    for label, numel in (TINY_SIZES if shape is TINY else SIZES).items():
        times_called = max(1, TURN_NUMEL // numel)
        timed = calls(numel)
        env = environment()  # the load before we add to it
        contestants = [Contestant(name, lambda: None, _repeated(call, times_called)) for name, call in timed.items()]
        times = interleaved_ms(contestants, repeats, f"encodings, {label}")
        for name, measured in times.items():
            row: dict[str, Any] = {
                "bench": "encodings",
                "model": "one flat tensor",
                "dtype": "float32",
                "numel": numel,
                "calls": times_called,
                "repeats": repeats,
                "contestant": name,
                **measured.spread(),
            }
            per_ms = 1e6 / (numel * times_called)
            row["p50_cpu_ns_per_element"] = round(row["p50_cpu_ms"] * per_ms, 3)
            row.update(ratios("time_over_adamw", measured, times["adamw"]))
            result.rows.append({**row, **env})
        wall, cpu = (
            round(
                sum(_median(getattr(times[name], clock)) for name in PAIR) / _median(getattr(times["adamw"], clock)), 3
            )
            for clock in ("wall", "cpu")
        )
        result.claims.append(Claim(f"split + join / AdamW(fused=True), {label} elements", 2.0, wall, True, cpu))
    return result


def _median(values: list[float]) -> float:
    return float(np.median(values))


def _repeated(call: Callable[[], object], times: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            call()

    return run
