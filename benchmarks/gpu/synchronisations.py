"""Section 5: how often `step()` makes the host wait for the device.

Counted by ``torch.cuda.set_sync_debug_mode("warn")``, which sees copies to the host, ``item()`` and the like.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusedopt
from benchmarks.gpu.harness import Section, present_backends
from benchmarks.timing import ROOT

SYNC_WARNING = "called a synchronizing CUDA operation"
NUM_STEPS = 4
CASES: tuple[tuple[str, dict[str, Any], dict[str, Any], int], ...] = (
    ("AdamW(fused=True)", {"fused": True}, {}, 0),
    ("AdamW(fused=True), max_grad_norm", {"fused": True}, {"max_grad_norm": 1.0}, 0),
    ("AdamW()", {}, {}, 1),
    ("AdamW(), max_grad_norm", {}, {"max_grad_norm": 1.0}, 1),
)
"""Name, arguments of the inner optimizer and of the wrapper, and at most how many per step."""


class Seen:
    """What `counting` saw: how often, and from which lines of ours."""

    def __init__(self) -> None:
        self.num_syncs = 0
        self.places: Counter[str] = Counter()

    def note(self) -> None:
        """Count one, under the innermost line of fusedopt that led to it."""
        self.num_syncs += 1
        ours = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "fusedopt"))]
        where = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else "elsewhere"
        self.places[where] += 1


@contextmanager
def counting(is_cuda: bool) -> Iterator[Seen]:
    """Return a context that counts synchronisations; on a CPU there are none to see."""
    seen = Seen()

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if SYNC_WARNING in str(message):
            seen.note()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            if is_cuda:
                torch.cuda.set_sync_debug_mode("default")


def run(section: Section) -> None:
    """Count for every case, and for each backend around the fused inner optimizer."""
    per_item = _count_one_item(section)
    cases = [*CASES]
    for backend in present_backends(section, torch.bfloat16):
        if backend != "torch":
            settings = {"max_grad_norm": 1.0, "backend": backend}
            cases.append((f"AdamW(fused=True), max_grad_norm, backend={backend}", {"fused": True}, settings, 0))
    for case in cases:
        section.attempt(case[0], partial(_count, section, case, per_item))


def _count_one_item(section: Section) -> int:
    """Return what one ``item()`` is counted as: a counter that always says 0 would prove nothing."""
    if not section.is_cuda:
        section.left_out("synchronisations", "not applicable on cpu; the steps run, and nothing is there to count")
        return 1
    value = torch.ones((), device=section.device)
    with counting(True) as seen:
        value.item()
    if seen.num_syncs == 0:
        raise RuntimeError("an item() was not counted as a synchronisation; the counts would mean nothing")
    section.row("note", what="one item()", syncs=seen.num_syncs)
    return seen.num_syncs


def _count(section: Section, case: tuple[str, dict[str, Any], dict[str, Any], int], per_item: int) -> None:
    name, inner, settings, target = case
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(4)]
    model = nn.Sequential(*layers, nn.LayerNorm(256)).to(section.device, torch.bfloat16)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, **inner), **settings)
    x = torch.randn(32, 256, device=section.device, dtype=torch.bfloat16)
    seen_in_backward = seen_in_step = 0
    places: Counter[str] = Counter()
    for number in range(NUM_STEPS + 1):
        with counting(section.is_cuda) as backward:
            model(x).float().square().mean().backward()
        with counting(section.is_cuda) as step:
            optimizer.step()
        optimizer.zero_grad()
        if number:  # a step that would create inner state is decided on the host
            seen_in_backward += backward.num_syncs
            seen_in_step += step.num_syncs
            places += step.places
    if optimizer.skipped_steps:
        raise RuntimeError(f"{name}: steps were skipped, so what was counted is another road")
    section.row(
        "measurement" if section.is_cuda else "not applicable on cpu",
        what=name,
        steps=NUM_STEPS,
        syncs_in_steps=seen_in_step,
        syncs_in_forward_and_backward=seen_in_backward,
        places=dict(places),
    )
    per_step = seen_in_step / per_item / NUM_STEPS
    section.claim(f"host synchronisations per step, {name}", per_step, target, is_upper_bound=True)
