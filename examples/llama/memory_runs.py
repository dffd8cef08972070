"""The runs of ``finetune.py --compare_memory``: ways to hold a model in fewer bytes, side by side.

Each way trains the same model on the same windows, for each learning rate and seed, from the fine-tuning base and from
scratch, one backward a step (``release`` needs that). Ours differ in the settings of the wrapper; peers are optimizers
with narrow state of their own, on the bf16 model, where they are installed. What counts is the evaluation loss at the
end: the gain of a way is its drop from the start, as a part of the drop under fp32 state, and the spread is that of the
seeds.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
from base_model import SHAPE
from text_data import TokenWindows
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from fusedopt import FusedMainGradOptimizer

matplotlib.use("Agg")
from matplotlib import pyplot as plt

REFERENCE = "fp32 state"
OURS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "split": {"main_param": "split"},
    "split24": {"main_param": "split24"},
    "bf16 state": {"state_dtype": "bfloat16"},
    "int8 state": {"state_dtype": "int8"},
    "split24 + int8, released": {"main_param": "split24", "state_dtype": "int8", "release": "backward"},
}
PEERS = {
    "torchao AdamW8bit": ("torchao.optim", "AdamW8bit", {}),
    "torchao AdamW4bit": ("torchao.optim", "AdamW4bit", {}),
    "bitsandbytes AdamW8bit": ("bitsandbytes.optim", "AdamW8bit", {}),
    "optimi AdamW (Kahan)": ("optimi", "AdamW", {"kahan_sum": True}),
}
MAX_GRAD_NORM = 1.0
EVAL_BATCH_SIZE = 16


@dataclass
class Run:
    """One way, at one learning rate, with one seed; losses are in nats per token."""

    way: str
    start: str
    learning_rate: float
    seed: int
    first_loss: float
    last_loss: float
    bytes_per_param: float
    seconds: float

    @property
    def gain(self) -> float:
        """What it took off the evaluation loss."""
        return self.first_loss - self.last_loss


def wrapped(model: nn.Module, learning_rate: float, settings: dict[str, Any]) -> FusedMainGradOptimizer:
    """Return fused AdamW as the way holds it; clipping by the last norm where gradients are released."""
    inner = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    clip_by = "previous" if settings.get("release") == "backward" else "current"
    return FusedMainGradOptimizer(inner, max_grad_norm=MAX_GRAD_NORM, clip_by=clip_by, **settings)


def peer(model: nn.Module, learning_rate: float, name: str) -> torch.optim.Optimizer:
    """Return a peer's optimizer on the bf16 model, which clips as the other runs do.

    Raises:
        ImportError: if it is not installed.
    """
    module, cls, settings = PEERS[name]
    optimizer = getattr(importlib.import_module(module), cls)(model.parameters(), lr=learning_rate, **settings)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def bytes_per_param(optimizer: Any, model: nn.Module) -> float:
    """Return the bytes of weights, gradients and state after a step, as allocated."""
    if isinstance(optimizer, FusedMainGradOptimizer):
        return float(optimizer.memory_report()["bytes_per_param"])
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        for inner in (getattr(value, name, None) for name in ("codes", "scale", "qmap")):
            if isinstance(inner, Tensor):
                add(inner)
        if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
            found[value.data_ptr()] = value.nbytes
        elif isinstance(value, dict):
            for item in value.values():
                add(item)

    params = list(model.parameters())
    add(dict(enumerate(params)))
    add(dict(optimizer.state))
    num_params = sum(param.numel() for param in params)
    return sum(found.values()) / num_params + 2  # and bf16 gradients


def train(
    make: Callable[[nn.Module], Any],
    model: LlamaForCausalLM,
    batches: Iterator[Tensor],
    windows: Tensor,
    num_steps: int,
    num_warmup_steps: int,
) -> tuple[float, float, float, float]:
    """Return first and last evaluation loss, bytes a parameter, and the seconds of the steps."""
    optimizer = make(model)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_steps)
    first, seconds = evaluate(model, windows), 0.0
    for _ in range(num_steps):
        started, batch = time.perf_counter(), next(batches)
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
    return first, evaluate(model, windows), bytes_per_param(optimizer, model), seconds


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Return the mean loss over the held-out ``windows``."""
    model.eval()
    total = sum(model(input_ids=w, labels=w).loss.item() * len(w) for w in windows.split(EVAL_BATCH_SIZE))
    model.train()
    return total / len(windows)


@dataclass(frozen=True)
class Plan:
    """One start of the comparison.

    Args:
        start: ``"fine-tuning"`` or ``"from scratch"``.
        base_dir: the checkpoint that fine-tuning starts from.
        tokens: to train on.
        windows: to evaluate on.
        num_steps, num_warmup_steps: optimizer steps.
        batch_size: windows in a step.
        learning_rates: peaks.
    """

    start: str
    base_dir: Path
    tokens: Tensor
    windows: Tensor
    num_steps: int
    num_warmup_steps: int
    batch_size: int
    learning_rates: tuple[float, ...]

    def model(self, seed: int) -> LlamaForCausalLM:
        """Return the bf16 model that a run starts from."""
        if self.start == "fine-tuning":
            return LlamaForCausalLM.from_pretrained(self.base_dir, dtype=torch.bfloat16, local_files_only=True)
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16()


def compare(plans: Sequence[Plan], seeds: Sequence[int], record: Path) -> list[Run]:
    """Make all runs, and write each into ``record`` as soon as it is there."""
    runs: list[Run] = []
    names = [*OURS, *(name for name in PEERS if _is_installed(name))]
    cells = [
        (plan, rate, seed, name) for plan in plans for rate in plan.learning_rates for seed in seeds for name in names
    ]
    for plan, rate, seed, name in tqdm(cells, desc="ways to hold a model", unit="run"):
        model = plan.model(seed)
        block_size = plan.windows.shape[1]
        batches = TokenWindows(plan.tokens, block_size, plan.batch_size, seed)

        def make(model: nn.Module, name: str = name, rate: float = rate) -> Any:
            return wrapped(model, rate, OURS[name]) if name in OURS else peer(model, rate, name)

        found = train(make, model, batches, plan.windows, plan.num_steps, plan.num_warmup_steps)
        runs.append(Run(name, plan.start, rate, seed, *found))
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps([asdict(run) for run in runs], indent=1) + "\n", encoding="utf-8")
    return runs


def _is_installed(name: str) -> bool:
    try:
        importlib.import_module(PEERS[name][0])
    except ImportError:
        return False
    return True


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return, for each start, rate and way: means, the gain over that of fp32 state, and the spread of the seeds."""
    rows = []
    for start, rate, way in dict.fromkeys((run.start, run.learning_rate, run.way) for run in runs):
        here = [run for run in runs if (run.start, run.learning_rate, run.way) == (start, rate, way)]
        base = [run for run in runs if (run.start, run.learning_rate, run.way) == (start, rate, REFERENCE)]
        pairs = [(one.last_loss - other.last_loss) for one, other in zip(here, base, strict=True)]
        gains = [one.gain / other.gain if other.gain > 0 else math.nan for one, other in zip(here, base, strict=True)]
        rows.append(
            {
                "start": start,
                "learning_rate": rate,
                "way": way,
                "bytes_per_param": here[0].bytes_per_param,
                "last_loss": statistics.mean(run.last_loss for run in here),
                "seeds_apart": max(run.last_loss for run in base) - min(run.last_loss for run in base),
                "from_fp32": max(map(abs, pairs)),
                "gain": statistics.mean(gains),
                "least_gain": min(gains),
                "time": statistics.median(run.seconds for run in here) / statistics.median(r.seconds for r in base),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = [
        "| start | rate | way | bytes | last loss | at most from fp32 state | seeds lie apart | gain, least | time |",
        "|---|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['start']} | {row['learning_rate']:g} | {row['way']} | {row['bytes_per_param']:.2f} | "
            f"{row['last_loss']:.4f} | {row['from_fp32']:.4f} | {row['seeds_apart']:.4f} | {row['gain']:.1%}, "
            f"{row['least_gain']:.1%} | {row['time']:.2f} |"
        )
    return "\n".join(lines)


OUR_STYLE, PEER_STYLE = ("#0072B2", "o^vsDP"), ("#D55E00", "<>8X")  # colours of Okabe and Ito, and markers


def draw(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Draw bytes a parameter against the gain, one panel for each start and learning rate."""
    panels = list(dict.fromkeys((row["start"], row["learning_rate"]) for row in rows))
    size = (3.2 * len(panels), 4.4)
    figure, found = plt.subplots(
        1, len(panels), figsize=size, dpi=150, layout="constrained", sharey=True, squeeze=False
    )
    axes = list(found[0])
    for axis, (start, rate) in zip(axes, panels, strict=True):
        axis.axhline(99, color="#999999", linewidth=1)
        for color, markers, is_ours in ((*OUR_STYLE, True), (*PEER_STYLE, False)):
            here = [row for row in rows if (row["start"], row["learning_rate"]) == (start, rate)]
            here = [row for row in here if (row["way"] in OURS) is is_ours]
            for row, marker in zip(here, markers, strict=False):
                style = {"marker": marker, "color": color, "linestyle": "none", "markersize": 8, "alpha": 0.8}
                axis.plot(row["bytes_per_param"], 100 * row["gain"], label=row["way"], **style)
        axis.set_title(f"{start}, learning rate {rate:g}", fontsize=9)
        axis.set_xlabel("bytes a parameter")
        axis.set_ylim(0, 105)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("taken off the loss, % of what fp32 state takes")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(path)
    plt.close(figure)
    return path
