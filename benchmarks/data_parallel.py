"""Data-parallel training on two ranks of one machine: fusedopt beside DDP, DeepSpeed, FSDP2 and ZeroRedundancy.

python -m benchmarks.data_parallel [--repeats N] [--systems NAME ...] [--tiny] [--out DIR] [--profile SYSTEM]

Each system is a pair of processes on one thread each (gloo on loopback), all alive for the whole run. They take turns:
one pair at a time runs one window while all others sleep, so that slow moments of the machine hit all alike. Times are
milliseconds of the slower rank, sizes bytes of the larger rank, traffic what loopback counted while the pair ran.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.data_parallel_worker import NUM_MICRO_BATCHES, SYSTEMS, WORLD_SIZE, Setup, is_available, serve
from benchmarks.models import FULL, TINY, is_bf16_slow
from benchmarks.timing import Times, environment, median_of_ratios, ratios

RESULTS = Path(__file__).resolve().parent / "results"
SHAPE = dataclasses.replace(FULL, batch_size=1, num_tokens=64)  # 29.9 M parameters, and few tokens: short steps
MIN_REPEATS = 20
REPLY_TIMEOUT_S = 240
STOP_TIMEOUT_S = 10

PEERS = {
    "fusedopt_none": ("ddp_autocast",),
    "fusedopt_optimizer": ("deepspeed_zero1", "deepspeed_bf16_optimizer", "deepspeed_bf16_optimizer_fp32"),
    "fusedopt_gradients": ("deepspeed_zero2", "deepspeed_zero2_fp32", "fsdp2", "fsdp2_resharding"),
}
"""What each of ours is divided by: the fastest of its peers."""

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DS_ACCELERATOR": "cpu",
    "TOKENIZERS_PARALLELISM": "false",
    "MASTER_ADDR": "127.0.0.1",  # DeepSpeed wants to see them; the group meets in a file
    "MASTER_PORT": "0",
}


class Pair:
    """The processes of one system, both sent the same command and both waited for."""

    def __init__(self, name: str, setup: Setup, directory: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([serve.__module__])  # torch is imported once, and its pages are shared
        self._connections: list[Connection] = []
        self.processes = []
        self._logs = [directory / f"{name}.{rank}.log" for rank in range(WORLD_SIZE)]
        for rank, log in enumerate(self._logs):
            ours, theirs = context.Pipe()
            arguments = (theirs, name, rank, setup, directory / name, log)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def ask(self, command: str) -> list[dict[str, Any]]:
        """Have both ranks run ``command``; return what they found, by rank.

        Raises:
            RuntimeError: with its traceback if a rank failed, and if one died or is late.
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):  # that it is gone, the read says
                connection.send(command)
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < WORLD_SIZE:
            pending = [c for rank, c in enumerate(self._connections) if rank not in replies]
            ready: list[Any] = wait(pending, REPLY_TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{self.name}: no reply to {command!r} for {REPLY_TIMEOUT_S} s")
            for connection in ready:
                rank = self._connections.index(connection)
                replies[rank] = self._receive(rank, command)
        return [replies[rank] for rank in range(WORLD_SIZE)]

    def _receive(self, rank: int, command: str) -> dict[str, Any]:
        try:
            status, value = self._connections[rank].recv()
        except (EOFError, ConnectionError) as error:
            self.processes[rank].join(STOP_TIMEOUT_S)
            code = self.processes[rank].exitcode
            log = self._logs[rank].read_text(encoding="utf-8", errors="replace") if self._logs[rank].exists() else ""
            raise RuntimeError(
                f"{self.name}: rank {rank} died in {command!r} with exit code {code}; it said last:\n{log[-2000:]}"
            ) from error
        if status == "failed":
            raise RuntimeError(f"{self.name}: rank {rank} failed in {command!r}:\n{value}")
        return value  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End both processes, by force if they do not go."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send("stop")
        for process in self.processes:
            process.join(STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()


@contextmanager
def running(names: Sequence[str], setup: Setup) -> Iterator[dict[str, Pair]]:
    """Return a context with a built pair for each of ``names``; none of their processes outlives it."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(mock.patch.dict(os.environ, WORKER_ENVIRONMENT))
        pairs = {}
        for name in names:
            pairs[name] = Pair(name, setup, directory)
            stack.callback(pairs[name].stop)
        yield pairs


@dataclasses.dataclass
class Measured:
    """What one system did, over rounds."""

    built: dict[str, Any]
    times: Times = dataclasses.field(default_factory=lambda: Times([], [], []))
    loopback_bytes: list[int] = dataclasses.field(default_factory=list)
    idle_cpu_ms: list[float] = dataclasses.field(default_factory=list)
    last_loss: float = float("nan")


def measure(names: Sequence[str], setup: Setup, repeats: int) -> dict[str, Measured]:
    """Build all systems one after another, then give each a window in every round."""
    with running(names, setup) as pairs:
        measured = {}
        for name, pair in tqdm(pairs.items(), desc="build", unit="system"):
            measured[name] = Measured(_larger(pair.ask("build")))
        idle_since = {name: _summed(pair.ask("cpu"), "cpu_ms") for name, pair in pairs.items()}
        for number in tqdm(range(-1, repeats), desc="data parallel", unit="round"):
            for name in names if number % 2 == 0 else reversed(names):
                idle = _summed(pairs[name].ask("cpu"), "cpu_ms") - idle_since[name]
                before = loopback_sent_bytes()
                ranks = pairs[name].ask("step")
                sent = loopback_sent_bytes() - before
                idle_since[name] = _summed(pairs[name].ask("cpu"), "cpu_ms")
                if number >= 0:
                    _record(measured[name], ranks, sent, idle)
    return measured


def _record(measured: Measured, ranks: Sequence[Mapping[str, Any]], sent: int, idle_cpu_ms: float) -> None:
    measured.times.wall.append(max(rank["wall_ms"] for rank in ranks))
    measured.times.cpu.append(_summed(ranks, "cpu_ms"))
    measured.times.faults.append(int(_summed(ranks, "page_faults")))
    measured.loopback_bytes.append(sent)
    measured.idle_cpu_ms.append(idle_cpu_ms)
    measured.last_loss = _summed(ranks, "loss") / WORLD_SIZE


def _summed(ranks: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(sum(rank[key] for rank in ranks))


def _larger(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return rank 0's figures, with the larger of each size and the mean loss."""
    larger = {key: max(rank[key] for rank in ranks) for key in ranks[0] if key.endswith("_bytes")}
    return {**ranks[0], **larger, "first_loss": _summed(ranks, "first_loss") / WORLD_SIZE}


def loopback_sent_bytes() -> int:
    """Return what the loopback interface has sent since boot, headers included; 0 where there is no such counter."""
    counters = Path("/proc/net/dev")
    lines = counters.read_text(encoding="utf-8").splitlines() if counters.is_file() else []
    return sum(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def make_rows(measured: Mapping[str, Measured], setup: Setup, env: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one row per system; ours carry their ratios to the fastest of their peers."""
    return [
        {**_common(found, setup), **_row(name, found), **_ratios(name, measured), **env}
        for name, found in measured.items()
    ]


def _common(found: Measured, setup: Setup) -> dict[str, Any]:
    num_params = found.built["num_params"]
    return {
        "bench": "data_parallel",
        "model": f"llama {num_params / 1e6:.1f} M",
        "num_params": num_params,
        "dtype": "bfloat16",
        "linears": "through fp32" if is_bf16_slow() else "bf16",
        "process_group": "gloo on loopback",
        "world_size": WORLD_SIZE,
        "num_micro_batches": NUM_MICRO_BATCHES,
        "batch_size": setup.shape.batch_size,
        "num_tokens": setup.shape.num_tokens,
        "bucket_mib": setup.bucket_mib,
        "fusedopt_overlaps": setup.overlaps,
        "inner": "torch.optim.AdamW(fused=True)",
        "repeats": len(found.times.wall),
    }


def _row(name: str, found: Measured) -> dict[str, Any]:
    kind, num_params = SYSTEMS[name], found.built["num_params"]
    sent = min(found.loopback_bytes) / WORLD_SIZE  # every window sends the same; what others send on loopback only adds
    return {
        "contestant": name,
        "arithmetic": kind.arithmetic,
        "same_arithmetic_as": kind.same_arithmetic_as,
        "shards": kind.shards,
        **found.times.spread(),
        "held_bytes": found.built["held_bytes"],
        "held_bytes_per_param": round(found.built["held_bytes"] / num_params, 3),
        "held_bytes_per_param_formula": kind.state_formula,
        "window_peak_bytes": found.built["window_peak_bytes"],
        "window_peak_bytes_per_param": round(found.built["window_peak_bytes"] / num_params, 3),
        **{f"{key}_mib": round(found.built[f"{key}_bytes"] / 2**20, 1) for key in _RSS},
        "sent_bytes": round(sent),
        "sent_bytes_per_param": round(sent / num_params, 3),
        "sent_bytes_per_param_formula": kind.traffic_formula,
        "idle_cpu_ms": round(float(np.median(found.idle_cpu_ms)), 3),
        "first_loss": round(found.built["first_loss"], 4),
        "last_loss": round(found.last_loss, 4),
        "optimizer_class": found.built["optimizer_class"],
    }


_RSS = ("held_rss", "window_peak_rss", "peak_rss")


def _ratios(name: str, measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Return ours over the fastest peer, over the fastest of the same arithmetic, over each, and over the leanest."""
    peers = [peer for peer in PEERS.get(name, ()) if peer in measured]
    if not peers:
        return {}
    ours = measured[name]
    equals = [peer for peer in peers if (SYSTEMS[peer].same_arithmetic_as or "").startswith(name)]
    found: dict[str, Any] = {}
    for label, candidates in (("best_peer", peers), ("best_peer_of_same_arithmetic", equals)):
        if candidates:
            best = min(candidates, key=lambda peer: float(np.median(measured[peer].times.wall)))
            found |= {label: best, **ratios(f"time_over_{label}", ours.times, measured[best].times)}
    each = {peer: peers_own.times for peer, peers_own in measured.items() if peer not in PEERS}
    found["time_over_each_median_of_ratios"] = {
        peer: round(median_of_ratios(ours.times.wall, times.wall), 4) for peer, times in each.items()
    }
    leanest = min(peers, key=lambda peer: int(measured[peer].built["window_peak_bytes"]))
    lean_bytes = measured[leanest].built["window_peak_bytes"]
    found |= {
        "leanest_peer": leanest,
        "peak_bytes_over_leanest_peer": round(ours.built["window_peak_bytes"] / lean_bytes, 4),
    }
    return found


def write(rows: Sequence[Mapping[str, Any]], directory: Path) -> Path:
    """Write ``rows`` to ``data_parallel_gloo_<date>.jsonl`` in ``directory``, replacing an earlier run of that day."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"data_parallel_gloo_{datetime.date.today().isoformat()}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per system, and ours over the best of their peers."""
    print(f"\n{'':30}{'ms, p20 / p50 / p80':>25}{'cpu ms':>9}{'held':>8}{'peak':>8}{'sent':>8}   over best peer")
    for row in rows:
        times = f"{row['p20_ms']:.0f} / {row['p50_ms']:.0f} / {row['p80_ms']:.0f}"
        per_param = [row[f"{key}_bytes_per_param"] for key in ("held", "window_peak", "sent")]
        ratio = f"{row['time_over_best_peer_median_of_ratios']:.3f} {row['best_peer']}" if "best_peer" in row else ""
        figures = "".join(f"{value:8.2f}" for value in per_param)
        print(f"{row['contestant']:30}{times:>25}{row['p50_cpu_ms']:9.0f}{figures}   {ratio}")
    print("held, peak, sent: bytes per parameter and rank, between windows, at a window's peak, and per window")


def print_profile(name: str, setup: Setup, repeats: int) -> None:
    """Print where one system's window goes: wall time by phase, collectives, and the costliest operations of rank 0."""
    with running([name], setup) as pairs:
        pairs[name].ask("build")
        rounds = [pairs[name].ask("phases")[0] for _ in tqdm(range(repeats), desc="phases", unit="window")]
        traced = pairs[name].ask("trace")[0]
    print(f"{name}, rank 0, median of {repeats} windows")
    for phase in rounds[0]:
        print(f"  {phase:28}{np.median([times[phase] for times in rounds]):9.1f} ms")
    print(f"  {'window':28}{np.median([sum(times.values()) for times in rounds]):9.1f} ms")
    print("collectives of one window, from launch to end; they may run beside a backward, and wait for the other rank")
    for collective, found in traced["collectives"].items():
        print(f"  {collective:28}{found['ms']:9.1f} ms in {found['count']}")
    print(traced["table"])


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what the command line asks for; return the rows."""
    args = _parse(argv)
    shape = TINY if args.tiny else SHAPE
    setup = Setup(shape, args.bucket_mib, not args.no_overlap)
    repeats = args.repeats or (2 if args.tiny else MIN_REPEATS)
    names = args.systems or list(SYSTEMS)
    missing = [name for name in names if not is_available(name)]
    if missing:
        print(f"left out, since DeepSpeed is not installed (requirements-bench.txt): {', '.join(missing)}")
        names = [name for name in names if name not in missing]
    if args.profile:
        print_profile(args.profile, setup, repeats)
        return []
    with _one_thread():
        env = environment()  # the load before we add to it
        rows = make_rows(measure(names, setup, repeats), setup, env)
    out = args.out or (None if args.tiny else RESULTS)
    if out is not None:
        print(f"wrote {write(rows, out)}")
    print_table(rows)
    if args.tiny:
        print("a rehearsal on a tiny model: the figures mean nothing")
    return rows


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.data_parallel",
        description="Data-parallel training on two ranks: fusedopt and peers.",
    )
    parser.add_argument("--tiny", action="store_true", help="a rehearsal of a tiny model; writes only where --out says")
    parser.add_argument("--repeats", type=int, help=f"timed rounds, {MIN_REPEATS} or more (default: {MIN_REPEATS})")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="some systems (default: all)")
    parser.add_argument("--bucket-mib", type=int, default=25, help="buckets of every system, fp32 MiB (default: 25)")
    parser.add_argument("--no-overlap", action="store_true", help="fusedopt reduces after the last backward, not in it")
    parser.add_argument("--profile", choices=list(SYSTEMS), help="print one system's phases instead; no rows")
    parser.add_argument("--out", type=Path, help="directory for the rows (default: benchmarks/results)")
    args = parser.parse_args(argv)
    if args.repeats is not None and args.repeats < (1 if args.tiny or args.profile else MIN_REPEATS):
        parser.error(f"--repeats {args.repeats} is too few for quantiles; give {MIN_REPEATS} or more")
    if args.bucket_mib < 1:
        parser.error(f"--bucket-mib {args.bucket_mib} must be at least 1")
    return args


if __name__ == "__main__":
    main()
