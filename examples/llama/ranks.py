"""The processes that torchrun started, if it did; one otherwise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist


class Ranks(NamedTuple):
    """This process among those that train together."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this one prints and writes."""
        return self.rank == 0

    @contextlib.contextmanager
    def first_alone(self) -> Iterator[None]:
        """Let the first rank run the body before the others do: it makes the files they read."""
        if self.world_size > 1 and not self.is_first:
            dist.barrier()
        yield
        if self.world_size > 1 and self.is_first:
            dist.barrier()


@contextlib.contextmanager
def ranks() -> Iterator[Ranks]:
    """Join the process group under torchrun, and leave it however the body ends."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if has_gpu else torch.device("cpu")
    if "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, device)
        return
    if has_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()
