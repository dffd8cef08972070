"""Run a function on several ranks: fresh processes and a fresh gloo group each time, about 0.1 s a launch.

    results = run(fn, world_size, *args)        # fn(rank, *args) on every rank; results by rank

Ranks are forked from a server that has imported torch and nothing else of ours, so no hook, group or setting
outlives a launch. On every rank warnings are errors, and so is an exception that Python could only print.
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

_report: connection.Connection | None = None  # of this process, if it is a rank


class RankError(Exception):
    """What happened on the ranks of a failed launch; the cause of the exception that `run` raises."""


def run(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LIMIT_SECONDS, makes_group: bool = True
) -> list[Any]:
    """Call ``fn(rank, *args)`` on ``world_size`` ranks and return the results by rank.

    Args:
        fn: a function of a test module (a rank imports it by name).
        world_size: ranks in the default process group, gloo.
        args: picklable, as is the result.
        timeout: seconds, after which the stacks of all ranks are printed and the launch fails; it fails sooner if no
            rank has computed for `IDLE_SECONDS`.
        makes_group: else there is no default group, unless ``fn`` makes one and leaves it.

    Raises:
        Exception: the one that came first on any rank, of its own type; `RankError` behind it tells of all ranks.
        TimeoutError: with the stacks of all ranks.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory(prefix="fusedopt-ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            ranks += [
                _Rank(context, Path(folder), fn, rank, world_size, args, makes_group) for rank in range(world_size)
            ]
            _wait(ranks, timeout)
            return [pickle.loads(rank.outcome[1]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()


def at(text: str) -> None:
    """Say on a rank what it is about to do, for the message of a launch that fails there."""
    if _report is not None:
        _report.send_bytes(pickle.dumps(("at", text)))


@contextlib.contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Collect the texts of warnings, which would be errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
        texts += [str(item.message) for item in caught]


class _Rank:
    """The parent's side of one rank."""

    def __init__(self, context, folder, fn, rank, world_size, args, makes_group):
        self.rank = rank
        self.log = folder / f"rank{rank}.log"
        self.outcome: tuple[str, bytes, str] | None = None  # "result" or "error", pickled, traceback
        self.doing = "starting"
        self.has_died = False
        self.connection, theirs = context.Pipe(duplex=False)
        # The function by name and the arguments as bytes: a rank that cannot import or read them reports that.
        job = (fn.__module__, fn.__qualname__, pickle.dumps(args))
        where = (rank, world_size, str(folder / "store") if makes_group else None, str(self.log))
        self.process = context.Process(target=_work, args=(*where, theirs, *job), daemon=True)
        self.process.start()
        theirs.close()

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


def _work(rank, world_size, store, log, report, module, qualname, pickled_args) -> None:
    """What a rank does, from its first line to its report."""
    global _report
    _report = report
    with open(log, "w", buffering=1) as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        faulthandler.enable(output)
        faulthandler.register(signal.SIGUSR1, output, all_threads=True)
        try:
            result = _call(rank, world_size, store, module, qualname, pickled_args)
            message = ("result", pickle.dumps(result), "")
        except BaseException as error:
            message = ("error", _pickled(error), "".join(traceback.format_exception(error)))
        report.send_bytes(pickle.dumps(message))


def _call(rank, world_size, store, module, qualname, pickled_args) -> Any:
    sys.dont_write_bytecode = False  # or every rank would compile fusedopt and its tests anew
    unraisable: list[str] = []
    sys.unraisablehook = lambda what: unraisable.append(f"{what.exc_value!r} in {what.object!r}")
    threading.excepthook = lambda what: unraisable.append(f"{what.exc_value!r} in {what.thread!r}")
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    fn = importlib.import_module(module)
    for name in qualname.split("."):
        fn = getattr(fn, name)
    args = pickle.loads(pickled_args)
    gc.freeze()  # what imports made needs no collecting, and fusedopt's search for DDP skips it
    with _default_group(store, rank, world_size) if store is not None else contextlib.nullcontext():
        result = fn(rank, *args)
    if unraisable:
        raise RuntimeError("exceptions that Python could only print: " + "; ".join(unraisable))
    return result


@contextlib.contextmanager
def _default_group(store, rank, world_size) -> Iterator[None]:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
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
