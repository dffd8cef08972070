"""Run the benchmarks, write one JSON object per line and file, and print target and reached.

python -m benchmarks.run [--tiny] [--only NAME] [--repeats N] [--threads N ...] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import backward, encodings, fused_linear, memory, narrow, optimizer_phase
from benchmarks.models import FULL, TINY, Shape
from benchmarks.timing import Claim, Result

BENCHES = {
    "memory": memory.run,
    "optimizer_phase": optimizer_phase.run,
    "backward": backward.run,
    "fused_linear": fused_linear.run,
    "encodings": encodings.run,
    "narrow": narrow.run,
}
RESULTS = Path(__file__).resolve().parent / "results"
MIN_REPEATS = 9  # what a median that is reported rests on, at least
TINY_REPEATS = 3


def main(argv: Sequence[str] | None = None) -> list[Claim]:
    """Run what the command line asks for; return the claims of the table."""
    args = _parse(argv)
    out = args.out or (None if args.tiny else RESULTS)
    repeats = args.repeats or (TINY_REPEATS if args.tiny else 11)
    claims = []
    for name in [args.only] if args.only else list(BENCHES):
        results = _run_with_threads(name, args.threads, TINY if args.tiny else FULL, repeats)
        claims += [claim for result in results for claim in result.claims]
        if out is not None:
            print(f"wrote {write([row for result in results for row in result.rows], out, name)}")
    print_table(claims)
    if args.tiny:
        print("a rehearsal on a tiny model: the figures mean nothing")
    return claims


def _run_with_threads(name: str, thread_counts: Sequence[int] | None, shape: Shape, repeats: int) -> list[Result]:
    before = torch.get_num_threads()
    counts = list(thread_counts or [before])
    if name == "memory":
        counts = counts[:1]  # bytes do not depend on threads
    results = []
    try:
        for count in counts:
            torch.set_num_threads(count)
            result = BENCHES[name](shape, repeats)
            label = f", {count} thread{'s' * (count > 1)}" if len(counts) > 1 else ""
            claims = [dataclasses.replace(claim, what=claim.what + label) for claim in result.claims]
            results.append(Result(result.rows, claims))
    finally:
        torch.set_num_threads(before)
    return results


def write(rows: Sequence[dict[str, Any]], directory: Path, name: str) -> Path:
    """Write ``rows`` to ``<name>_cpu_<date>.jsonl`` in ``directory``, replacing what an earlier run wrote there."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}_cpu_{datetime.date.today().isoformat()}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def print_table(claims: Sequence[Claim]) -> None:
    """Print one line per claim: what, target, reached by wall clock, and by CPU time where that was taken."""
    width = max((len(claim.what) for claim in claims), default=0)
    print(f"\n{'':{width}}    target   reached  CPU time")
    for claim in claims:
        sign = "<=" if claim.is_upper_bound else ">="
        cpu = "" if claim.reached_cpu is None else f"{claim.reached_cpu:g}"
        verdict = "" if claim.is_met else "   missed"
        print(f"{claim.what:{width}} {sign} {claim.target:6g} {claim.reached:9g} {cpu:>9}{verdict}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Benchmarks of fusedopt on CPU.")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of seconds; writes only where --out says")
    parser.add_argument("--only", choices=list(BENCHES), help="one benchmark (default: all)")
    parser.add_argument("--repeats", type=int, help=f"timed rounds, {MIN_REPEATS} or more (default: 11)")
    parser.add_argument(
        "--threads", type=int, nargs="+", help="torch's threads, one run each (default: torch's own choice)"
    )
    parser.add_argument("--out", type=Path, help="directory for the rows (default: benchmarks/results)")
    args = parser.parse_args(argv)
    if args.repeats is not None and args.repeats < (1 if args.tiny else MIN_REPEATS):
        parser.error(f"--repeats {args.repeats} is too few for a median; give {MIN_REPEATS} or more")
    if args.threads is not None and min(args.threads) < 1:
        parser.error(f"--threads {min(args.threads)} must be at least 1")
    return args


if __name__ == "__main__":
    main()
