"""What the runs gave: a table, a JSON file, a picture.

Every statement is computed from the losses, whichever way they came out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib
import torch
import transformers

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# Okabe and Ito's colours, told apart with any colour vision; width and marker differ as well.
STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#999999", "linewidth": 6.0, "solid_capstyle": "round"},
    {"color": "#D55E00", "linewidth": 1.8, "marker": "s", "markersize": 5},
    {"color": "#0072B2", "linewidth": 1.8, "marker": "o", "markersize": 5},
)
LABEL_COLORS = ("#595959", "#A84A00", "#0072B2")
LABEL_GAP = 0.055  # of the axis height: labels closer than this are moved apart


@dataclass
class RunResult:
    """One run: ``curve`` holds (step, evaluation loss), from step 0 to the last."""

    name: str
    curve: list[tuple[int, float]]
    changed_share: float  # of the weights, compared as bf16 with the base
    train_seconds: float  # without the evaluations

    @property
    def start_loss(self) -> float:
        """Evaluation loss of the base."""
        return self.curve[0][1]

    @property
    def final_loss(self) -> float:
        """Evaluation loss after the last step."""
        return self.curve[-1][1]


def comparison_table(results: Sequence[RunResult]) -> str:
    """Return a plain text table, one line per run."""
    lines = [f"{'run':<16} {'start loss':>10} {'final loss':>10} {'weights changed':>15} {'train s':>8}"]
    for r in results:
        lines.append(
            f"{r.name:<16} {r.start_loss:>10.4f} {r.final_loss:>10.4f} {r.changed_share:>15.1%} {r.train_seconds:>8.1f}"
        )
    return "\n".join(lines)


def finding(results: Sequence[RunResult]) -> str:
    """Return what the numbers say: each run's drop in loss as a part of the first run's."""
    reference, *others = results
    drop = reference.start_loss - reference.final_loss
    if not drop > 0:
        return (
            f"{reference.name} did not lower the evaluation loss "
            f"({reference.start_loss:.3f} to {reference.final_loss:.3f}): nothing to compare with"
        )
    parts = [f"{r.name} {(r.start_loss - r.final_loss) / drop:.0%}" for r in others]
    return f"Of the {drop:.3f} that {reference.name} takes off the loss: {', '.join(parts)}"


def write_results(path: Path, results: Sequence[RunResult], arguments: Sequence[Any]) -> Path:
    """Write everything that the table and the picture show, with the flags, as JSON."""
    record = {
        "arguments": {name: value for group in arguments for name, value in asdict(group).items()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "runs": [asdict(r) | {"start_loss": r.start_loss, "final_loss": r.final_loss} for r in results],
    }
    if len(results) > 1:
        record["finding"] = finding(results)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return ``heights`` moved up where needed, in order, so that no two are closer than ``gap``."""
    placed = list(heights)
    order = sorted(range(len(placed)), key=placed.__getitem__)
    for below, above in itertools.pairwise(order):
        placed[above] = max(placed[above], placed[below] + gap)
    return placed


def draw_comparison(path: Path, results: Sequence[RunResult]) -> Path:
    """Draw the evaluation curves, each labelled at its end, as a PNG."""
    figure, axes = plt.subplots(figsize=(8, 4.8), dpi=150, layout="constrained")
    for result, style in zip(results, STYLES, strict=True):
        axes.plot(*zip(*result.curve, strict=True), **style)
    low, high = axes.get_ylim()
    heights = spread([r.final_loss for r in results], LABEL_GAP * (high - low))
    for result, height, color in zip(results, heights, LABEL_COLORS, strict=True):
        last_step = result.curve[-1][0]
        axes.annotate(
            f"{result.name}  {result.final_loss:.4f}",
            (last_step, height),
            xytext=(10, 0),
            textcoords="offset points",
            color=color,
            va="center",
            annotation_clip=False,
        )
    axes.set_ylim(low, high)
    axes.set_title(finding(results), fontsize=11, loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel("evaluation loss, nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    return path
