"""Print the way of one gradient: which files of the package a backward and a step visit, in order.

    python -m benchmarks.trace                    # one process
    python -m benchmarks.trace --shard gradients  # two ranks, over gloo

Counts files, calls and changes from one file to another in the second window, when all state is there.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fusedopt

PACKAGE = Path(fusedopt.__file__).parent


class Trace:
    """Notes every call into the package while it is on, in this thread and in those of autograd."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        """Note one event of `sys.setprofile`."""
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            self.calls.append(str(Path(frame.f_code.co_filename).relative_to(PACKAGE)))

    def report(self) -> list[str]:
        """Return lines: the files in the order in which they are first visited, and the three counts."""
        files = list(dict.fromkeys(self.calls))
        num_changes = sum(a != b for a, b in zip(self.calls, self.calls[1:], strict=False))
        width = max(map(len, files))
        lines = [f"  {name:<{width}} {self.calls.count(name):>5} calls" for name in files]
        return [*lines, f"{len(files)} files, {len(self.calls)} calls, {num_changes} changes of file"]


def trace(shard: str = "none") -> Trace:
    """Return the trace of the second window of one bf16 parameter under AdamW with a clip."""
    model = nn.Linear(64, 64, bias=False).bfloat16()
    inner = torch.optim.AdamW(model.parameters())
    optimizer = fusedopt.FusedMainGradOptimizer(inner, shard=shard, max_grad_norm=1.0)
    found = Trace()
    for number in range(2):
        loss = model(torch.ones(2, 64, dtype=torch.bfloat16)).float().square().sum()
        sys.setprofile(found if number == 1 else None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sys.setprofile(None)
    return found


def _rank(rank: int, store: str, shard: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    lines = trace(shard).report()
    if rank == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


def main() -> None:
    """Print the trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", choices=("none", "optimizer", "gradients"), help="on two ranks; else one process")
    shard = parser.parse_args().shard
    if shard is None:
        print("\n".join(trace().report()))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(_rank, (store, shard), nprocs=2)


if __name__ == "__main__":
    main()
