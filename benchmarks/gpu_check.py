"""What `benchmarks/gpu_check.sh` runs: correctness, then rows against their targets, in under seven minutes.

    tests/gpu -> wgrad -> optimizer phase -> memory -> synchronisations -> CUDA graph -> LLaMA step

Each section runs in a process of its own, with a limit: an illegal address or a hang in one leaves the others.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fusedopt
from benchmarks.gpu import correctness, cuda_graph, llama_step, memory, optimizer_phase, synchronisations, wgrad
from benchmarks.gpu.harness import Section, append, describe

PROBE_S = 60
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Part:
    """One section of the check.

    Args:
        file: in the name of the file its rows go to.
        run: does it.
        limit_s: after which it is killed.
        is_optional: running out of its limit is no failure.
    """

    file: str
    run: Callable[[Section], None]
    limit_s: float
    is_optional: bool = False


PARTS = (
    Part("correctness", correctness.run, 110),
    Part("wgrad", wgrad.run, 50),
    Part("optimizer_phase", optimizer_phase.run, 70),
    Part("memory", memory.run, 35),
    Part("synchronisations", synchronisations.run, 20),
    Part("cuda_graph", cuda_graph.run, 25),
    Part("llama_step", llama_step.run, 45),
    Part("llama_step", llama_step.run_compiled, 50, is_optional=True),
)
"""In the order in which an interrupted lease would miss them least; seven files, since a lease returns eight."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run all sections and print the table; return 1 if one failed, or a test of tests/gpu did."""
    args = _parse(argv)
    with _directory(args.tiny) as directory:
        date = datetime.date.today().isoformat()
        paths = {part.file: directory / f"gpu_check_{part.file}_{args.device}_{date}.jsonl" for part in PARTS}
        for path in paths.values():
            path.unlink(missing_ok=True)
        begun = time.monotonic()
        _import_once()
        method = _start_method(args.device)
        failed = []
        for part in PARTS:
            if not _run(part, paths[part.file], args, method):
                failed.append(part.file)
            print(f"  {time.monotonic() - begun:.0f} s since the start", flush=True)
        rows = [json.loads(line) for path in paths.values() if path.exists() for line in path.read_text().splitlines()]
    print_table(rows, is_rehearsal=args.device == "cpu")
    for name in failed:
        print(f"FAILED: {name}")
    return 1 if failed else 0


def _import_once() -> None:
    """Import here what every child would; nothing of it touches the device, or `_start_method` finds out."""
    importlib.import_module("torch._dynamo.callback")  # the wrapper does, at the first one made
    fusedopt.backends.offer("triton")


def _start_method(device_type: str) -> str:
    """Return how children are made: forked, so that imports are paid for once, unless that breaks CUDA in them."""
    if device_type == "cpu":
        return "fork"
    probe = multiprocessing.get_context("fork").Process(target=_touch_device)
    probe.start()
    probe.join(PROBE_S)
    if probe.is_alive():
        probe.kill()
    return "fork" if probe.exitcode == 0 else "spawn"


def _touch_device() -> None:
    print(f"on {torch.cuda.get_device_name(torch.ones(1, device='cuda').device)}", flush=True)


def _run(part: Part, path: Path, args: argparse.Namespace, method: str = "fork") -> bool:
    """Run one section in a child; return whether it ended well."""
    print(f"\n== {part.file} (at most {part.limit_s:.0f} s)", flush=True)
    child: Any = multiprocessing.get_context(method).Process(target=_child, args=(part, path, args))  # type: ignore[attr-defined]
    child.start()
    child.join(part.limit_s)
    if child.is_alive():
        why = f"killed after its limit of {part.limit_s:.0f} s"
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    elif child.exitcode is not None and child.exitcode < 0:
        why = f"died of signal {signal.Signals(-child.exitcode).name}"
    else:
        return child.exitcode == 0
    print(f"  {why}")
    is_fine = part.is_optional and "limit" in why
    _append_bare(part, path, "left_out" if is_fine else "error", why)
    return is_fine


def _append_bare(part: Part, path: Path, kind: str, error: str) -> None:
    append(
        path,
        {"bench": "gpu_check", "section": part.file, "kind": kind, "what": part.file, "why": error, "error": error},
    )


def _child(part: Part, path: Path, args: argparse.Namespace) -> None:
    os.setpgrp()  # compilers that it starts end with it
    try:
        section = Section(part.file, path, args.device, is_tiny=args.tiny, limit_s=part.limit_s)
    except Exception as error:
        _append_bare(part, path, "error", describe(error))
        raise
    try:
        if part.file == "correctness":
            section.row("note", what="backends", report=str(fusedopt.backends.report()))
            print(fusedopt.backends.report(), flush=True)
        part.run(section)
    except Exception as error:
        section.error(part.file, error)
    sys.stdout.flush()
    sys.exit(1 if section.has_failed else 0)


def print_table(rows: Sequence[dict[str, Any]], *, is_rehearsal: bool) -> None:
    """Print what was claimed: what, target, reached, and whether that is met; then what went wrong."""
    claims = [row for row in rows if row["kind"] == "claim"]
    width = max((len(claim["what"]) for claim in claims), default=0)
    print(f"\n{'':{width}}    target   reached")
    for claim in claims:
        target, reached = claim["target"], claim["reached"]
        sign = "<=" if claim["is_upper_bound"] else ">="
        wanted = f"{sign} {target:7.4g}" if target is not None else f"{'-':>10}"
        print(f"{claim['what']:{width}} {wanted} {reached:9.4g}   {'rehearsal' if is_rehearsal else _verdict(claim)}")
    for row in rows:
        if row["kind"] == "error":
            print(f"error in {row['section']}, {row['what']}: {row['error']}")


def _verdict(claim: dict[str, Any]) -> str:
    target, reached = claim["target"], claim["reached"]
    if target is None:
        return ""
    is_met = reached <= target if claim["is_upper_bound"] else reached >= target
    return "met" if is_met else "not met"


@contextmanager
def _directory(is_tiny: bool) -> Iterator[Path]:
    """Return where rows go: ``$OUT``, or benchmarks/results; nowhere that lasts for a tiny run without ``$OUT``."""
    out = os.environ.get("OUT")
    if out is None and is_tiny:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
        return
    directory = Path(out) if out else RESULTS
    directory.mkdir(parents=True, exist_ok=True)
    yield directory


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu_check.sh", description="Check fusedopt on a GPU.")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, tiny (default: cuda)"
    )
    parser.add_argument("--tiny", action="store_true", help="shapes of a rehearsal; writes only where $OUT says")
    args = parser.parse_args(argv)
    args.tiny = args.tiny or args.device == "cpu"  # a billion parameters would take a CPU an hour
    return args


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    sys.exit(main())
