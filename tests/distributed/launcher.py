"""Run a function on several ranks: fresh processes and a fresh gloo group each time, about 0.1 s a launch.

    results = run(fn, world_size, *args)        # fn(rank, *args) on every rank; results by rank

Ranks are forked from a server that has made imports and nothing else (`preload`), so no hook, group or setting outlives
a launch. Where a file launches the same again and again, `run(..., reuses=True)` saves the warming up of ranks: they go
on to the next launch of the file, in a fresh group, if they left nothing behind. A failed launch ends its ranks.
On every rank warnings are errors, and so is an exception that Python could only print.
A launch that fails says what every rank did last: its output, and its stacks where it had to be stopped.
A slow machine fails no launch: ranks may take long as long as one of them computes.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_SECONDS = 600.0
"""How long a launch may take, however slow the machine is."""

IDLE_SECONDS = 30.0
"""After how long a launch hangs in which no rank computes."""

GRACE_SECONDS = 5.0
"""How long the other ranks have to report once one has failed; gloo tells them as soon as its sockets close."""

GROUP_SECONDS = 2 * LIMIT_SECONDS
"""The timeout of the ranks' default group: a hang is found by the parent, which asks for stacks."""

_POLL_SECONDS = 1.0
_IDLE_SHARE = 0.05  # of a core: what waits by looking again and again takes less

_STACKS_SECONDS = 2.0
_PRELOAD = ["tests.distributed.preload"]

_parent: connection.Connection | None = None  # of this process, if it is a rank

_kept: dict[int, list[_Rank]] = {}  # by world size; they wait for the next launch with `reuses`


class RankError(Exception):
    """What happened on the ranks of a failed launch; the cause of the exception that `run` raises."""


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = LIMIT_SECONDS,
    makes_group: bool = True,
    reuses: bool = False,
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` ranks and return the results by rank.

    Args:
        fn: a function of a test module (a rank imports it by name).
        world_size: ranks in the default process group, gloo.
        args: picklable, as is the result.
        timeout: seconds, after which the stacks of all ranks are printed and the launch fails; it fails sooner if no
            rank has computed for `IDLE_SECONDS`.
        makes_group: else there is no default group, unless ``fn`` makes one and leaves it.
        reuses: take the ranks that an earlier launch of this test file left, if any, and leave them to the next one.
            ``fn`` must undo what it changes beyond its own objects; what `_traces` sees is checked.

    Raises:
        Exception: the one that came first on any rank, of its own type; `RankError` behind it tells of all ranks.
        TimeoutError: with the stacks of all ranks.
    """
    # The function by name and the arguments as bytes: a rank that cannot import or read them reports that.
    what = (fn.__module__, fn.__qualname__, pickle.dumps(args))
    with tempfile.TemporaryDirectory(prefix="fusedopt-ranks-") as folder:
        store = str(Path(folder) / "store") if makes_group else None
        ranks = _kept.pop(world_size, []) if reuses else []
        try:
            if not ranks:
                context = multiprocessing.get_context("forkserver")
                context.set_forkserver_preload(_PRELOAD)
                ranks += [_Rank(context, rank) for rank in range(world_size)]
            for rank in ranks:
                rank.begin(
                    _Job(rank.rank, world_size, store, str(Path(folder) / f"rank{rank.rank}.log"), reuses, *what)
                )
            _wait(ranks, timeout)
            results = [pickle.loads(rank.outcome[1]) for rank in ranks]
            if reuses:
                _kept[world_size], ranks = ranks, []
            return results
        finally:
            for rank in ranks:
                rank.close()


def end_kept_ranks() -> None:
    """End the ranks that wait for a next launch; at the end of each test file."""
    while _kept:
        for rank in _kept.popitem()[1]:
            rank.close()


def at(text: str) -> None:
    """Say on a rank what it is about to do, for the message of a launch that fails there."""
    if _parent is not None:
        _parent.send_bytes(pickle.dumps(("at", text)))


def settle() -> None:
    """On a rank, between cases: free what the last one left, and take what lives out of searches among all objects.

    Each wrapper looks for what else may hold its parameters, which costs a tenth of many tests.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings, which would be errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(item.message) for item in caught]


@dataclass(frozen=True)
class _Job:
    """What a rank does in one launch."""

    rank: int
    world_size: int
    store: str | None  # of the default group
    log: str
    stays: bool  # for another launch
    module: str
    qualname: str
    pickled_args: bytes


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, context: Any, rank: int) -> None:
        self.rank = rank
        self.outcome: tuple[str, bytes, str] | None = None  # "result" or "error", pickled, traceback
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, job: _Job) -> None:
        self.log = Path(job.log)
        self.outcome = None
        self.doing = "starting"
        self.has_died = False
        with contextlib.suppress(BrokenPipeError):  # it has died since the last launch; `receive` tells
            self.connection.send(job)

    def receive(self) -> None:
        try:
            message = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE_SECONDS)
            self.has_died = True
            text = f"rank {self.rank} died with exit code {self.process.exitcode} while {self.doing}"
            message = ("error", pickle.dumps(RuntimeError(text)), text)
        if message[0] == "at":
            self.doing = message[1]
        else:
            self.outcome = message

    def story(self) -> str:
        """Return how it ended here, with the end of the output (which has the stacks, where they were asked for)."""
        if self.outcome is None:
            ended = f"did not return; it was {self.doing}"
        elif self.outcome[0] == "error":
            ended = f"raised while {self.doing}:\n{self.outcome[2].rstrip()}"
        else:
            ended = "returned"
        output = self.log.read_text(errors="replace")[-8000:].rstrip() if self.log.exists() else ""
        return f"-- rank {self.rank} {ended}" + (f"\noutput:\n{output}" if output else "")

    def close(self) -> None:
        self.connection.close()
        if self.outcome is None:
            self.process.kill()
        self.process.join(GRACE_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()


def _wait(ranks: list[_Rank], timeout: float) -> None:
    """Return when every rank has; raise what the first failed one raised, or TimeoutError."""
    deadline = time.monotonic() + timeout
    activity = _Activity([rank.process.pid for rank in ranks])
    why = f"within {timeout:g} s"
    first_failed: _Rank | None = None
    while waiting := {rank.connection: rank for rank in ranks if rank.outcome is None}:
        ready = connection.wait(list(waiting), min(_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        for item in ready:
            rank = waiting[item]
            rank.receive()
            has_failed = rank.outcome is not None and rank.outcome[0] == "error"
            # Others may lose their connection to a rank that died before its end is seen here: it comes first.
            if has_failed and (first_failed is None or (rank.has_died and not first_failed.has_died)):
                first_failed = rank
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not ready and time.monotonic() < deadline:
            if activity.seconds_idle() < IDLE_SECONDS:
                continue
            why = f"and none has computed for {IDLE_SECONDS:g} s"
        if not ready:
            _print_stacks(list(waiting.values()))
            break
    stories = "\n".join(rank.story() for rank in ranks)
    if first_failed is not None:
        raise pickle.loads(first_failed.outcome[1]) from RankError(
            f"rank {first_failed.rank} of {len(ranks)} failed first:\n{stories}"
        )
    if waiting:
        stuck = ", ".join(str(rank.rank) for rank in waiting.values())
        raise TimeoutError(f"rank(s) {stuck} of {len(ranks)} did not return {why}:\n{stories}")


class _Activity:
    """Whether any of some processes computes, which a slow machine does not make look like a hang."""

    def __init__(self, pids: list[int]):
        self.pids = pids
        self.seconds = 0.0  # of all of them on the CPU
        self.since = time.monotonic()

    def seconds_idle(self) -> float:
        """Return for how long none has computed; see `_IDLE_SHARE`. A process that waits for a core does."""
        now, seconds, is_ready = time.monotonic(), 0.0, False
        for pid in self.pids:
            try:
                state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            is_ready |= state in "RD"
            seconds += sum(map(int, fields[10:12])) / os.sysconf("SC_CLK_TCK")
        if is_ready or abs(seconds - self.seconds) > _IDLE_SHARE * (now - self.since):
            self.seconds, self.since = seconds, now
        return now - self.since


def _print_stacks(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _STACKS_SECONDS
    while time.monotonic() < deadline and not all("most recent call first" in rank.story() for rank in ranks):
        time.sleep(0.05)
    time.sleep(0.05)  # the rest of the stack


def _work(parent: connection.Connection) -> None:
    """What a rank does, from its first line to its last report."""
    global _parent
    _parent = parent
    stays = True
    while stays:
        try:
            job: _Job = parent.recv()
        except EOFError:
            return
        stays = job.stays
        with open(job.log, "w", buffering=1) as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            sys.stdout = sys.stderr = output
            faulthandler.enable(output)
            faulthandler.register(signal.SIGUSR1, output, all_threads=True)
            try:
                message = ("result", pickle.dumps(_call(job)), "")
            except BaseException as error:
                message = ("error", _pickled(error), "".join(traceback.format_exception(error)))
            parent.send_bytes(pickle.dumps(message))


def _call(job: _Job) -> Any:
    sys.dont_write_bytecode = False  # or every rank would compile fusedopt and its tests anew
    unraisable: list[str] = []
    sys.unraisablehook = lambda what: unraisable.append(f"{what.exc_value!r} in {what.object!r}")
    threading.excepthook = lambda what: unraisable.append(f"{what.exc_value!r} in {what.thread!r}")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    fn = importlib.import_module(job.module)
    for name in job.qualname.split("."):
        fn = getattr(fn, name)
    args = pickle.loads(job.pickled_args)
    gc.freeze()  # what imports made needs no collecting, and fusedopt's search for DDP skips it
    before = _traces() if job.stays else {}
    with _default_group(job) if job.store is not None else contextlib.nullcontext():
        result = fn(job.rank, *args)
    after = _traces() if job.stays else {}
    if changed := [name for name in before | after if before.get(name) != after.get(name)]:
        found = ", ".join(f"{name} (from {before.get(name)} to {after.get(name)})" for name in changed)
        raise RuntimeError(f"what reuses ranks must leave them as they were, and changed {found}")
    if unraisable:
        raise RuntimeError("exceptions that Python could only print: " + "; ".join(unraisable))
    return result


def _traces() -> dict[str, Any]:
    """Return, by name, what a launch could leave behind for the next one, and must not."""
    gc.collect()
    functions = {f"torch.distributed.{name}": id(value) for name, value in vars(dist).items() if callable(value)}
    variables = {f"${name}": value for name, value in os.environ.items()}
    return {
        **functions,
        **variables,
        "the number of optimizers": sum(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects()),
        "the threads": [thread.name for thread in threading.enumerate()],
        "the warning filters": list(warnings.filters),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "whether there is a default group": dist.is_initialized(),
    }


@contextlib.contextmanager
def _default_group(job: _Job) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world_size),
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=GROUP_SECONDS),
    )
    yield
    at("waiting for all ranks at the end")
    dist.barrier()  # a collective that another rank lacks shows here; and no rank closes its sockets on another
    gc.collect()
    dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled
