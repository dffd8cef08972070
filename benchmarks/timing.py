"""Interleaved timing, and the environment that every row carries.

Contestants take turns within a round, forwards in one and backwards in the next, so that whatever
else the machine does hits all of them alike. Times are milliseconds: *wall* is what counts; *cpu*, summed
over threads, leaves out the time in which the machine ran something else.
"""

from __future__ import annotations

import datetime
import gc
import os
import platform
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fusedopt

ROOT = Path(__file__).resolve().parent.parent
NUM_WARMUP_ROUNDS = 2  # the first steps create state, which is not what is measured


@dataclass(frozen=True)
class Contestant:
    """One thing to time: ``prepare`` is not timed, ``run`` is."""

    name: str
    prepare: Callable[[], None]
    run: Callable[[], None]


@dataclass(frozen=True)
class Claim:
    """One figure of the benchmark's table: what is to be reached, and what was."""

    what: str
    target: float
    reached: float
    is_upper_bound: bool
    reached_cpu: float | None = None  # the same by CPU time; None where nothing is timed

    @property
    def is_met(self) -> bool:
        """Whether ``reached`` is on the right side of ``target``."""
        return self.reached <= self.target if self.is_upper_bound else self.reached >= self.target


@dataclass(frozen=True)
class Result:
    """What a benchmark returns: rows for the file, claims for the table."""

    rows: list[dict[str, Any]]
    claims: list[Claim]


@dataclass(frozen=True)
class Times:
    """What one contestant took, round by round: milliseconds, and page faults served without reading a disk."""

    wall: list[float]
    cpu: list[float]
    faults: list[int]

    def spread(self) -> dict[str, float]:
        """Return the 20th, 50th and 80th percentile, under the names that rows use."""
        percentiles = {f"p{q}_ms": round(float(np.percentile(self.wall, q)), 3) for q in (20, 50, 80)}
        return {
            **percentiles,
            "p50_cpu_ms": round(float(np.median(self.cpu)), 3),
            "p50_page_faults": round(float(np.median(self.faults))),
        }


def interleaved_ms(contestants: Sequence[Contestant], repeats: int, label: str) -> dict[str, Times]:
    """Return ``repeats`` times per contestant.

    Args:
        contestants: run once a round each, in alternating order.
        repeats: rounds that count; `NUM_WARMUP_ROUNDS` more come first.
        label: for the progress bar.
    """
    from tqdm import tqdm  # absent where gpu_check runs, which times by other clocks

    times = {contestant.name: Times([], [], []) for contestant in contestants}
    gc.collect()
    for number in tqdm(range(-NUM_WARMUP_ROUNDS, repeats), desc=label, unit="round"):
        for contestant in contestants if number % 2 == 0 else reversed(contestants):
            contestant.prepare()
            faults, cpu, wall = _page_faults(), time.process_time(), time.perf_counter()
            contestant.run()
            wall, cpu, faults = time.perf_counter() - wall, time.process_time() - cpu, _page_faults() - faults
            if number >= 0:
                times[contestant.name].wall.append(1e3 * wall)
                times[contestant.name].cpu.append(1e3 * cpu)
                times[contestant.name].faults.append(faults)
    return times


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the ratio of the two medians."""
    return float(np.median(numerator) / np.median(denominator))


def median_of_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios within each round: slow rounds cancel."""
    return float(np.median(np.divide(numerator, denominator)))


def ratios(name: str, numerator: Times, denominator: Times) -> dict[str, float]:
    """Return the ratios by wall clock, both ways, and by CPU time, under the names that rows use."""
    return {
        f"{name}_median_of_ratios": round(median_of_ratios(numerator.wall, denominator.wall), 4),
        f"{name}_ratio_of_medians": round(ratio_of_medians(numerator.wall, denominator.wall), 4),
        f"{name}_cpu_median_of_ratios": round(median_of_ratios(numerator.cpu, denominator.cpu), 4),
    }


def environment() -> dict[str, Any]:
    """Return what a row needs so that it can be read by itself."""
    return {
        "device": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
        "torch": torch.__version__.split("+")[0],
        "malloc": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("MALLOC_")) or "defaults",
        "python": platform.python_version(),
        "fusedopt": fusedopt.__version__,
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Return the short hash of the commit, ``-dirty`` if the measured code differs from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "fusedopt", "benchmarks/*.py")
    return f"{commit}-dirty" if commit and changed else commit or "unknown"


def _git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
