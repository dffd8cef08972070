"""Run a script as `python` or `torchrun` would, in ranks that are forked with its imports done: a third of the time.

What a script needs of a process of its own, and what torchrun does, is tested with a real one: for the first example
always, for each script in `make test-deep`.
"""

from __future__ import annotations

import os
import random
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch.distributed as dist

from tests.distributed.launcher import LIMIT_SECONDS, run

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Ended:
    """How a script ended: the exit code of the first rank that failed, or 0, and what all ranks wrote."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: str | Path, *flags: str, num_ranks: int = 1, is_real: bool = False) -> Ended:
    """Run ``script`` from the root of the checkout, on one thread; on several ranks as under torchrun.

    Args:
        script: its path.
        flags: what follows it on the command line.
        num_ranks: ranks; a single one has no torchrun.
        is_real: in processes of its own, and under torchrun itself.
    """
    if is_real:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *torchrun * (num_ranks > 1), str(script), *flags]
        settings = {"capture_output": True, "text": True, "timeout": LIMIT_SECONDS, "check": False}
        done = subprocess.run(command, cwd=ROOT, env=env, **settings)
        return Ended(done.returncode, done.stdout, done.stderr)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent has it
    ends = run(_play, num_ranks, num_ranks, store.port, str(script), flags, makes_group=False)
    codes, printed, complaints = zip(*ends, strict=True)
    return Ended(next(filter(None, codes), 0), "".join(printed), "".join(complaints))


def _play(rank: int, num_ranks: int, port: int, script: str, flags: Sequence[str]) -> tuple[int, str, str]:
    warnings.resetwarnings()
    warnings.simplefilter("default")
    random.seed()
    os.chdir(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if num_ranks > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
        os.environ.update({name: str(value) for name, value in (numbers | where).items()})
    sys.argv = [script, *flags]
    sys.path[:0] = [str(Path(script).parent), str(ROOT)]
    with tempfile.TemporaryFile("w+", buffering=1) as printed, tempfile.TemporaryFile("w+", buffering=1) as complaints:
        os.dup2(printed.fileno(), 1)
        os.dup2(complaints.fileno(), 2)
        sys.stdout, sys.stderr = printed, complaints
        code = _run(script)
        if dist.is_initialized():
            print("destroy_process_group() was not called", file=sys.stderr)  # torch says so where a process ends
        return code, _text(printed), _text(complaints)


def _run(script: str) -> int:
    """Run the script and return its exit code."""
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _text(output: IO[str]) -> str:
    output.flush()
    output.seek(0)
    return output.read()
