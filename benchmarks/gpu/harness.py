"""What the sections of gpu_check share: rows that are on disk as soon as they are measured, clocks, backends.

Needs torch, numpy and fusedopt, nothing else. On a CPU the same code runs with a host clock, as a rehearsal.
"""

from __future__ import annotations

import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import Contestant, environment
from fusedopt import backends
from fusedopt.backends import Backend

BACKENDS = ("torch", "triton", "apex", "transformer_engine")
NUM_WARMUP_ROUNDS = 3  # the first step creates state, the second meets the road of all later ones
MIN_REPEATS, MAX_REPEATS = 5, 101
MESSAGE_CHARACTERS, SHOWN_CHARACTERS = 2000, 150  # in a row, and on the screen
FLUSH_NBYTES = 1 << 30
"""Written before each timed run where operands could lie in the L2 (60 MB on an H200): seventeen times that, and
0.25 ms of work for the device, during which the host launches what is timed."""


class Section:
    """Where one section writes its rows, and what it knows of the run.

    Args:
        name: of the section, and in the file's name.
        path: of the JSON-lines file; rows are appended.
        device_type: ``"cuda"`` or ``"cpu"``.
        is_tiny: shapes of a rehearsal.
        limit_s: after which the section is killed.
    """

    def __init__(self, name: str, path: Path, device_type: str, *, is_tiny: bool, limit_s: float) -> None:
        self.name = name
        self.device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else None)
        self.is_tiny = is_tiny
        self.has_failed = False
        self._path = path
        self._ends_at = time.monotonic() + limit_s
        self._environment = gpu_environment(self.device)

    @property
    def is_cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device.type == "cuda"

    def left_s(self) -> float:
        """Return the seconds until the section is killed."""
        return self._ends_at - time.monotonic()

    def row(self, kind: str, **fields: Any) -> None:
        """Append one row to the file, and to the disk."""
        append(self._path, {"bench": "gpu_check", "section": self.name, "kind": kind, **fields, **self._environment})

    def claim(
        self, what: str, reached: float, target: float | None = None, *, is_upper_bound: bool = False, **fields: Any
    ) -> None:
        """Append a row for the table; without a target it is for the reader only."""
        self.row("claim", what=what, target=target, reached=reached, is_upper_bound=is_upper_bound, **fields)

    def left_out(self, what: str, why: str) -> None:
        """Say that something was not done, which is no failure."""
        print(f"  {what}: left out, {why[:SHOWN_CHARACTERS]}", flush=True)
        self.row("left_out", what=what, why=why)

    def error(self, what: str, error: BaseException) -> None:
        """Record an exception; the section goes on, and the run ends nonzero."""
        self.has_failed = True
        print(f"  {what}: {describe(error)}", flush=True)
        text = "".join(traceback.format_exception(error))[-MESSAGE_CHARACTERS:]
        self.row("error", what=what, error=describe(error), traceback=text)

    def attempt(self, what: str, action: Callable[[], Any]) -> Any:
        """Return what ``action`` returns; None where it raised, which is recorded. Memory is given back."""
        try:
            return action()
        except Exception as error:
            self.error(what, error)
        finally:
            self.empty_cache()
        return None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give memory that nothing holds back to the device."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def free_nbytes(self) -> int:
        """Return the bytes that can still be allocated; a rehearsal always has enough."""
        return torch.cuda.mem_get_info(self.device)[0] if self.is_cuda else 1 << 40


def append(path: Path, row: dict[str, Any]) -> None:
    """Append ``row`` to ``path`` and wait until it is on the disk: a lease may end at any time."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def describe(error: BaseException) -> str:
    """Return kind and message of ``error``, shortened."""
    return f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]


def gpu_environment(device: torch.device) -> dict[str, Any]:
    """Return what a row needs so that it can be read by itself."""
    env = environment()
    if env["commit"] == "unknown":  # the lent machine has the files without git
        env["commit"] = os.environ.get("COMMIT", "unknown")
    if device.type != "cuda":
        return {**env, "clock": "time.perf_counter", "rehearsal": True}
    properties = torch.cuda.get_device_properties(device)
    return {
        **env,
        "cpu": env["device"],
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "triton": _version_of("triton"),
        "clock": "CUDA events",
        "rehearsal": False,
    }


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def present_backends(section: Section, dtype: torch.dtype) -> dict[str, Backend]:
    """Return the table of each backend that answers here; a row says why another does not."""
    found = {}
    for name in BACKENDS:
        try:
            found[name] = backends.resolve(name, section.device, dtype)
        except RuntimeError as error:
            section.left_out(f"backend {name}", str(error))
    return found


# -- clocks


@dataclass(frozen=True)
class Times:
    """What one contestant took, round by round: milliseconds.

    Attributes:
        ms: on the device, from the first of its kernels to the last, idle gaps included.
        host_ms: until the host had launched it all.
    """

    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    @property
    def p50(self) -> float:
        """Return the median."""
        return float(np.median(self.ms))

    def spread(self) -> dict[str, float]:
        """Return the percentiles, under the names that rows use."""
        percentiles = {f"p{q}_ms": round(float(np.percentile(self.ms, q)), 4) for q in (20, 50, 80)}
        return {**percentiles, "p50_host_ms": round(float(np.median(self.host_ms)), 4), "repeats": len(self.ms)}


def interleaved(section: Section, contestants: Sequence[Contestant], seconds: float) -> dict[str, Times]:
    """Return times of all contestants, which take turns within a round, in alternating order.

    A contestant that raises is recorded, and dropped. How many rounds count is chosen from the time of the
    last one that does not, so that all of them take about ``seconds``.
    """
    running = [c for c in contestants if _warm_up(section, c)]
    times = {contestant.name: Times() for contestant in running}
    begun = time.perf_counter()
    _round(section, running, times, number=0)
    round_s = max(time.perf_counter() - begun, 1e-6)
    wanted = MIN_REPEATS if section.is_tiny else MAX_REPEATS
    repeats = max(MIN_REPEATS, min(wanted, int(min(seconds, section.left_s() / 2) / round_s)))
    for taken in times.values():  # the round that told how long one takes was the first of its kind
        taken.ms.clear()
        taken.host_ms.clear()
    for number in range(repeats):
        _round(section, running, times, number)
    return times


def _warm_up(section: Section, contestant: Contestant) -> bool:
    try:
        for _ in range(NUM_WARMUP_ROUNDS):
            contestant.prepare()
            contestant.run()
        section.synchronize()
    except Exception as error:
        section.error(contestant.name, error)
        return False
    return True


def _round(section: Section, contestants: Sequence[Contestant], times: dict[str, Times], number: int) -> None:
    pending: list[tuple[str, Any, Any]] = []
    for contestant in contestants if number % 2 == 0 else reversed(contestants):
        contestant.prepare()
        if section.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            begun = time.perf_counter()
            contestant.run()
            host = time.perf_counter() - begun
            end.record()
            pending.append((contestant.name, start, end))
        else:
            begun = time.perf_counter()
            contestant.run()
            host = time.perf_counter() - begun
            times[contestant.name].ms.append(1e3 * host)
        times[contestant.name].host_ms.append(1e3 * host)
    section.synchronize()
    for name, start, end in pending:
        times[name].ms.append(start.elapsed_time(end))


class CacheFlush:
    """Writes more than any cache holds."""

    def __init__(self, section: Section) -> None:
        nbytes = FLUSH_NBYTES if section.is_cuda else 1 << 16
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=section.device)

    def __call__(self) -> None:
        """Flush."""
        self._buffer.zero_()
