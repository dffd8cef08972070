"""Section 6: forward, backward and step captured in one CUDA graph, and what replays compute.

A capture that is refused is a result, not a failure: its message is the row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import fusedopt
from benchmarks.gpu.harness import Section, describe

NUM_WARMUP, NUM_REPLAYS = 3, 4
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], bool], ...] = (
    ("AdamW(fused, capturable)", {"fused": True, "capturable": True}, {}, False),
    ("AdamW(fused, capturable), max_grad_norm", {"fused": True, "capturable": True}, {"max_grad_norm": 1.0}, False),
    ("AdamW(fused, capturable), convert_linears", {"fused": True, "capturable": True}, {}, True),
    ("AdamW(capturable), nonfinite=ignore", {"capturable": True, "foreach": True}, {"nonfinite": "ignore"}, False),
    ("AdamW(capturable), which asks the host", {"capturable": True, "foreach": True}, {}, False),
)
"""Name, arguments of the inner optimizer and of the wrapper, whether linears are fused. The last one cannot work."""


class Loop:
    """A small model with its wrapper; `body` is one whole training step on a fixed input."""

    def __init__(self, model: nn.Module, inner: dict[str, Any], settings: dict[str, Any], *, is_fused: bool) -> None:
        self.model = model
        if is_fused:
            fusedopt.convert_linears(model)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, **inner)
        self.optimizer = fusedopt.FusedMainGradOptimizer(adamw, **settings)
        device = next(model.parameters()).device
        self.x = torch.zeros(64, 128, device=device, dtype=torch.bfloat16)

    def load(self, number: int) -> None:
        """Put batch ``number`` where the graph reads it."""
        generator = torch.Generator(self.x.device).manual_seed(number)
        self.x.normal_(generator=generator)

    def body(self) -> None:
        """Forward, backward, step, clear."""
        self.model(self.x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        """Return model parameters, main_params and inner state."""
        state = self.optimizer.state_dict()["state"]
        tensors = [v for entry in state.values() for _, v in sorted(entry.items()) if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*self.model.parameters(), *tensors)]


def run(section: Section) -> None:
    """Compare replays with eager steps, case by case."""
    for name, inner, settings, is_fused in CASES:
        if not section.is_cuda:
            inner = {**inner, "capturable": False}  # torch refuses it on a CPU

        def compare(inner: dict[str, Any] = inner, settings: dict[str, Any] = settings, fused: bool = is_fused) -> Any:
            return _compare(section, lambda model: Loop(model, inner, settings, is_fused=fused))

        result = section.attempt(name, compare)
        if result is None:
            continue
        section.row("measurement" if section.is_cuda else "not applicable on cpu", what=name, **result)
        if "capture_error" in result:
            print(f"  {name}: {result['capture_error']}", flush=True)
        section.claim(f"CUDA graph, {name}, captured", float(result["is_captured"]), None if "host" in name else 1.0)
        if result["is_captured"]:
            section.claim(f"CUDA graph, {name}, equal to eager", float(result["is_bit_equal"]), 1.0)


def make_model(device: torch.device) -> nn.Module:
    """Return a small bf16 model, the same at every call."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 64))
    return layers.to(device, torch.bfloat16)


def _compare(section: Section, make_loop: Callable[[nn.Module], Loop]) -> dict[str, Any]:
    """Return what became of the capture, and how far replays are from eager steps."""
    eager, graphed = make_loop(make_model(section.device)), make_loop(make_model(section.device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # capturable=True without a capture; streams of AccumulateGrad
        for number in range(NUM_WARMUP):
            eager.load(number)
            eager.body()
        replay, error = capture(graphed, section)
        if replay is None:
            return {"is_captured": False, "capture_error": error}
        for number in range(NUM_WARMUP, NUM_WARMUP + NUM_REPLAYS):
            eager.load(number)
            eager.body()
            graphed.load(number)
            replay()
        after_replays = _distance(graphed.values(), eager.values())
        for loop in (eager, graphed):  # a step outside the graph goes on from where the replays left off
            loop.load(99)
            loop.body()
    after_eager = _distance(graphed.values(), eager.values())
    return {
        "is_captured": section.is_cuda,
        "replays": NUM_REPLAYS,
        "is_bit_equal": after_replays == 0 and after_eager == 0,
        "max_difference": after_replays,
        "max_difference_after_an_eager_step": after_eager,
        "skipped_steps": graphed.optimizer.skipped_steps,
    }


def capture(loop: Loop, section: Section) -> tuple[Callable[[], None] | None, str]:
    """Warm up on a side stream and capture `Loop.body`; on a CPU a replay is the body itself.

    Returns:
        What replays it, or None and why it could not be captured.
    """
    if not section.is_cuda:
        for number in range(NUM_WARMUP):
            loop.load(number)
            loop.body()
        return loop.body, ""
    try:
        side = torch.cuda.Stream(section.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for number in range(NUM_WARMUP):
                loop.load(number)
                loop.body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loop.body()
    except Exception as error:
        torch.cuda.synchronize(section.device)
        return None, describe(error)
    return graph.replay, ""


def _distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference; infinite where one is not finite."""
    pairs = [(f.double(), e.double()) for f, e in zip(found, expected, strict=True)]
    if not all(bool(f.isfinite().all() and e.isfinite().all()) for f, e in pairs):
        return float("inf")
    return max(float((f - e).abs().max()) for f, e in pairs)
