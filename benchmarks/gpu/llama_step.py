"""Section 7: a LLaMA of 1 B parameters, whole training steps: tokens per second and peak memory.

- ``plain_bf16``: ``AdamW(fused=True)`` on the bf16 model itself, bf16 gradients and state. **Does less work.**
- ``fusedopt``: wrapped. ``fusedopt_linears``: wrapped, and `convert_linears`.

Each step is `NUM_MICRO_BATCHES` micro-batches, clipped to a norm of 1.0. With ``compiled`` each layer is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fusedopt
from benchmarks.gpu.harness import Section, interleaved
from benchmarks.gpu.llama import BILLION, TINY, Llama, make_llama, make_tokens, numel
from benchmarks.gpu.memory import Meter
from benchmarks.timing import Contestant, median_of_ratios

NUM_MICRO_BATCHES = 2
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
COMPILING_WANTS = (2, 13)  # the torch whose fake tensors know grad_dtype
SECONDS = {False: 20.0, True: 8.0}  # eager, compiled
ANOTHER_COMPILE_S = 25


class Plain:
    """torch alone, all in bf16."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def clip(self) -> None:
        """Clip as torch does."""
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)

    def step(self, micro_batches: list[torch.Tensor]) -> torch.Tensor:
        """Train one window and return the sum of its losses."""
        losses = []
        for tokens in micro_batches:
            loss = self.model(tokens) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()


class Wrapped(Plain):
    """fusedopt, which clips in its step."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model)
        self.optimizer = fusedopt.FusedMainGradOptimizer(self.optimizer, max_grad_norm=MAX_GRAD_NORM)

    def clip(self) -> None:
        """Nothing: `step` does."""


class WrappedLinears(Wrapped):
    """fusedopt, with weight gradients accumulated straight into main_grad."""

    def __init__(self, model: Llama) -> None:
        super().__init__(model)
        fusedopt.convert_linears(model)


LOOPS: dict[str, Callable[[Llama], Plain]] = {
    "plain_bf16": Plain,
    "fusedopt": Wrapped,
    "fusedopt_linears": WrappedLinears,
}


def run(section: Section) -> None:
    """Time eager steps."""
    _run(section, is_compiled=False)


def run_compiled(section: Section) -> None:
    """Time steps whose layers are compiled, one by one; slow to compile, so a run of its own."""
    if section.is_tiny:
        section.left_out("compiled", "a rehearsal compiles nothing: tests/unit/layers/test_compile.py does")
        return
    if tuple(map(int, torch.__version__.split(".")[:2])) < COMPILING_WANTS:
        section.left_out("compiled", f"torch is {torch.__version__}; a wrapped model compiles with 2.13 and later")
        return
    _run(section, is_compiled=True)


def _run(section: Section, *, is_compiled: bool) -> None:
    shape = TINY if section.is_tiny else BILLION
    micro_batches = [make_tokens(shape, section.device, number) for number in range(NUM_MICRO_BATCHES)]
    num_tokens = sum(tokens.numel() for tokens in micro_batches)
    label = ", compiled layers" if is_compiled else ""
    built: dict[str, Plain] = {}
    facts: dict[str, dict[str, Any]] = {}
    for name, make in LOOPS.items():
        if built and is_compiled and section.left_s() < ANOTHER_COMPILE_S:
            section.left_out(f"{name}{label}", f"{section.left_s():.0f} s are left of the section")
            continue

        def build(name: str = name, make: Callable[[Llama], Plain] = make) -> None:
            meter = Meter(section)
            loop = make(make_llama(shape, section.device))
            if is_compiled:
                for layer in loop.model.layers:
                    layer.compile()
            losses = [float(loop.step(micro_batches)) for _ in range(2)]
            peak = meter.peak_of(partial(loop.step, micro_batches))
            held = meter.nbytes()
            facts[name] = {"first_loss": losses[0], "held_bytes": held, "step_peak_bytes": held + peak}
            built[name] = loop

        section.attempt(f"{name}{label}", build)
    turns = [Contestant(name, lambda: None, partial(loop.step, micro_batches)) for name, loop in built.items()]
    times = interleaved(section, turns, SECONDS[is_compiled])
    for name, taken in times.items():
        num_params = numel(built[name].model)
        section.row(
            "measurement",
            contestant=name,
            is_compiled=is_compiled,
            num_params=num_params,
            tokens_per_step=num_tokens,
            micro_batches=NUM_MICRO_BATCHES,
            tokens_per_s=round(num_tokens / taken.p50 * 1e3, 1),
            held_bytes_per_param=round(facts[name]["held_bytes"] / num_params, 3),
            caches="a step moves far more than the caches hold",
            **facts[name],
            **taken.spread(),
        )
        section.claim(f"LLaMA step, {name}{label}, thousand tokens per second", num_tokens / taken.p50)
        peak_gib = facts[name]["step_peak_bytes"] / 2**30
        section.claim(f"LLaMA step, {name}{label}, peak GiB", peak_gib, is_upper_bound=True)
        if name != "plain_bf16" and "plain_bf16" in times:
            speed = median_of_ratios(times["plain_bf16"].ms, taken.ms)
            section.claim(f"LLaMA step, {name}{label}, speed over plain bf16", speed)
