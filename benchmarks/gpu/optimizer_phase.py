"""Section 3: the optimizer phase (clip, step, write-back, clear) on 1 B bf16 parameters against a device copy.

Contestants hold 18 bytes per parameter each and take turns with a copy; gradients are refilled before each turn,
outside the timed part. Every tensor of a pass is far larger than the caches (the buffers of one contestant: 18 GB).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fusedopt
from benchmarks.gpu.harness import Section, interleaved, present_backends
from benchmarks.gpu.llama import BILLION, TINY, make_llama
from benchmarks.optimizer_phase import LEARNING_RATE, LOWER_BOUND, MAX_GRAD_NORM, NORM_CLIPPED
from benchmarks.timing import Contestant, median_of_ratios

OF_COPY = 0.85  # target: fraction of the bandwidth of a device copy, at LOWER_BOUND bytes per parameter
HELD_BYTES, TEMPORARY_BYTES = 18, 12  # per parameter: of a contestant, and of foreach's temporaries
COPY_BYTES = 4  # per parameter: of each of the two buffers of the copy
SECONDS = 12.0  # of each of clipping and not


@dataclass(frozen=True)
class Loop:
    """How one contestant is built."""

    name: str
    backend: str
    inner: dict[str, Any]


class Wrapped:
    """fusedopt around AdamW on a model of its own."""

    def __init__(self, section: Section, loop: Loop, max_grad_norm: float | None) -> None:
        self.params = list(make_llama(TINY if section.is_tiny else BILLION, section.device).parameters())
        inner = torch.optim.AdamW(self.params, lr=LEARNING_RATE, **loop.inner)
        self.optimizer = fusedopt.FusedMainGradOptimizer(inner, backend=loop.backend, max_grad_norm=max_grad_norm)

    def refill(self, grads: Sequence[Tensor]) -> None:
        """Leave behind what a window of micro-batches leaves: gradients summed in main_grad."""
        mains = [param.main_grad for param in self.params]  # type: ignore[attr-defined]
        torch._foreach_copy_(mains, list(grads))
        for param, main_grad in zip(self.params, mains, strict=True):
            param.grad = main_grad

    def phase(self) -> None:
        """Clip, step, write back, clear."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def loops(section: Section) -> list[Loop]:
    """Return the contestants; a named backend comes around both inner optimizers where it has a step of its own."""
    found = [Loop("torch_foreach", "torch", {"foreach": True}), Loop("torch_fused", "torch", {"fused": True})]
    for name, backend in present_backends(section, torch.bfloat16).items():
        if name == "torch":
            continue
        found.append(Loop(f"{name}_in_fused", name, {"fused": True}))
        if backend.fused_step_ is not None:
            found.append(Loop(f"{name}_in_default", name, {}))
    return found


def run(section: Section) -> None:
    """Time all contestants, once without clipping and once with."""
    contestants = loops(section)
    for max_grad_norm in (None, MAX_GRAD_NORM):
        section.attempt(f"max_grad_norm={max_grad_norm}", lambda norm=max_grad_norm: _run(section, contestants, norm))


def _run(section: Section, contestants: Sequence[Loop], max_grad_norm: float | None) -> None:
    label = "not clipping" if max_grad_norm is None else "clipping"
    built: dict[str, Wrapped] = {}
    probe = list(make_llama(TINY if section.is_tiny else BILLION, section.device).parameters())
    num_params = sum(param.numel() for param in probe)
    grads = _random_grads(probe, section.device)
    del probe
    section.empty_cache()
    source = torch.randn(num_params * COPY_BYTES // 4, device=section.device)
    target = torch.empty_like(source)
    for loop in contestants:
        needed = (HELD_BYTES + TEMPORARY_BYTES) * num_params
        if section.free_nbytes() < needed:
            section.left_out(f"{loop.name}, {label}", f"{section.free_nbytes() >> 30} GiB are free")
            continue
        wrapped = section.attempt(f"{loop.name}, {label}", lambda loop=loop: Wrapped(section, loop, max_grad_norm))
        if wrapped is not None:
            built[loop.name] = wrapped
    turns = [
        Contestant(name, lambda wrapped=wrapped: wrapped.refill(grads), wrapped.phase)
        for name, wrapped in built.items()
    ]
    turns.append(Contestant("copy", lambda: None, lambda: target.copy_(source)))
    times = interleaved(section, turns, SECONDS)
    copy = times.pop("copy")
    copy_gb_per_s = 2 * source.nbytes / copy.p50 / 1e6
    common = {
        "num_params": num_params,
        "num_tensors": len(grads),
        "dtype": "bfloat16",
        "is_clipping": max_grad_norm is not None,
    }
    section.row("measurement", contestant="copy", gb_per_s=round(copy_gb_per_s, 1), **common, **copy.spread())
    for name, taken in times.items():
        bound_ms = [ms * LOWER_BOUND * num_params / (2 * source.nbytes) for ms in copy.ms]
        fraction = median_of_ratios(bound_ms, taken.ms)
        section.row(
            "measurement",
            contestant=name,
            gb_per_s_at_34_bytes=round(LOWER_BOUND * num_params / taken.p50 / 1e6, 1),
            copy_bandwidth_fraction=round(fraction, 4),
            caches="buffers far larger than the caches",
            **common,
            **taken.spread(),
        )
        section.claim(f"optimizer phase, {name}, {label}, of copy bandwidth", fraction, OF_COPY)


def _random_grads(params: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return normally distributed fp32 gradients whose global norm is about ``NORM_CLIPPED``."""
    generator = torch.Generator(device).manual_seed(0)
    deviation = NORM_CLIPPED / sum(param.numel() for param in params) ** 0.5
    return [torch.randn(param.shape, generator=generator, device=device).mul_(deviation) for param in params]
