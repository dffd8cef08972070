"""main_params and state in fewer bytes: bytes a parameter as allocated and at the peak of a step, and the phase's time.

``python -m benchmarks.run --only narrow --threads 1``. Contestants are `AdamW(fused=True)` wrapped in each way, in the
same rounds, with the same gradients; the ratio is to fp32 main_params and state. Under ``release`` a phase is what one
backward's hooks and `step()` do together: gradients are handed over one by one, as autograd does, last layer first.

The peak is over the model's, main_grad's, main_param's and state's bytes at rest: what the allocator rose by in a step,
with whole gradients counted at rest, and released ones in the peak.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fusedopt
from benchmarks.memory import peak_nbytes
from benchmarks.models import Shape, make_llama
from benchmarks.optimizer_phase import LEARNING_RATE, NORM_CLIPPED, random_grads
from benchmarks.timing import Claim, Contestant, Result, environment, interleaved_ms, ratios

BUCKET_MIB = 16
TARGETS = {"float32": 1.0, "bfloat16": 1.3, "int8": 2.0}
"""Of the phase's time over that of fp32 main_params and state, by state_dtype, with split main_params or without."""


class Held:
    """`AdamW(fused=True)` around a model held in one of the ways.

    Args:
        shape: of the model.
        settings: of `MainGradConfig`.
    """

    def __init__(self, shape: Shape, **settings: str) -> None:
        self.settings = settings
        self.params = list(make_llama(shape).parameters())
        inner = torch.optim.AdamW(self.params, lr=LEARNING_RATE, fused=True)
        self.optimizer = fusedopt.FusedMainGradOptimizer(inner, bucket_mib=BUCKET_MIB, **settings)
        self._grads: Sequence[Tensor] = ()

    @property
    def name(self) -> str:
        """The settings, in one word."""
        return "/".join(self.settings.values())

    def refill(self, grads: Sequence[Tensor]) -> None:
        """Have gradients ready: summed in main_grad, or those that backward will bring."""
        self._grads = grads
        if self.settings["release"] == "none":
            for param, grad in zip(self.params, grads, strict=True):
                param.grad = param.main_grad.copy_(grad)  # type: ignore[attr-defined]  # attached by wrapping

    def phase(self) -> None:
        """Step and clear."""
        if self.settings["release"] == "backward":
            pairs = zip(reversed(self.params), reversed(self._grads), strict=True)
            for param, grad in pairs:  # the sum is a leaf's gradient: what arrives is `grad` itself
                torch.autograd.backward([param], [grad.to(param.dtype)])
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(shape: Shape, repeats: int) -> Result:
    """Measure all combinations."""
    ways = itertools.product(("float32", "split", "split24"), ("float32", "bfloat16", "int8"), ("none", "backward"))
    held = [Held(shape, main_param=m, state_dtype=s, release=r) for m, s, r in ways]
    grads = random_grads(held[0].params, NORM_CLIPPED)
    num_params = sum(param.numel() for param in held[0].params)
    sizes = {way.name: _sizes(way, grads, num_params) for way in held}
    env = environment()
    contestants = [Contestant(way.name, lambda way=way: way.refill(grads), way.phase) for way in held]
    times = interleaved_ms(contestants, repeats, "all ways to hold a model")
    result = Result([], [])
    for way in held:
        row: dict[str, Any] = {
            "bench": "narrow",
            "model": f"llama {num_params / 1e6:.1f} M",
            "num_params": num_params,
            "dtype": "bfloat16",
            **way.settings,
            **sizes[way.name],
            **times[way.name].spread(),
            **ratios("time_over_float32", times[way.name], times["float32/float32/none"]),
            "repeats": repeats,
        }
        result.rows.append({**row, **env})
        if way.settings["release"] == "none" and way.settings["main_param"] != "split24":
            ratio, cpu = row["time_over_float32_median_of_ratios"], row["time_over_float32_cpu_median_of_ratios"]
            target = TARGETS[way.settings["state_dtype"]]
            result.claims.append(Claim(f"time / fp32, {way.name}", target, ratio, True, cpu))
    return result


def _sizes(way: Held, grads: Sequence[Tensor], num_params: int) -> dict[str, float]:
    way.refill(grads)
    way.phase()
    report = way.optimizer.memory_report()
    way.refill(grads)
    peak, _ = peak_nbytes(way.phase)
    return {
        "bytes_per_param": round(report["bytes_per_param"], 3),
        "peak_bytes_per_param": round(report["bytes_per_param"] + peak / num_params, 3),
    }
