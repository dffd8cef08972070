"""The process groups that fusedopt makes for itself: by name, with the user's timeout, one maker at a time.

    [groups] -> channel -> comm -> ...

What the loop itself communicates, between a backward and a step, may come in another order on a rank that had no
gradient; on groups of its own it never meets ours.

Knows nothing of what is sent.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fusedopt._torch_private import HASH_RANKS_TO_STR, timeouts_of

Ranks = tuple[int, ...]


class DataGroups:
    """Process groups for the data of one wrapper at a time.

    Args:
        slot: number among those that share a channel; the same on all its ranks.
        layout: what ranks, and what timeout, they were made for.
        by_ranks: the groups.

    Attributes:
        num_started: collectives that this rank started on them, ever. Ranks that started as many are in step with each
            other, and may use the groups for something else.
    """

    def __init__(self, slot: int, layout: Hashable, by_ranks: Mapping[Ranks, Any]) -> None:
        self.slot = slot
        self.layout = layout
        self.by_ranks = by_ranks
        self.num_started = 0


def timeout_of(*groups: Any) -> datetime.timedelta | None:
    """Return how long the most impatient of the user's ``groups`` waits for a rank; None where torch does not say."""
    found = [timeout for group in groups for timeout in timeouts_of(group)]
    return min(found, default=None)


def make_group(name: str, ranks: Ranks, timeout: datetime.timedelta | None, backend: str | None = None) -> Any:
    """Return a new group of ``ranks``, which all call this, and nobody else.

    Args:
        name: no other group over these ranks has it.
        ranks: global ones, in ascending order.
        timeout: of its collectives; None is torch's default.
        backend: None is that of the default group.
    """
    with _named(ranks, hashlib.sha1(f"fusedopt {name} {ranks}".encode(), usedforsecurity=False).hexdigest()):
        return dist.new_group(list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True)


@contextlib.contextmanager
def _named(ranks: Sequence[int], name: str) -> Iterator[None]:
    """Let the group that ``ranks`` alone make in the body be called ``name``, by which they find each other.

    torch puts into it how many groups a rank is in. Where those differ (a mesh over some ranks, a group of the first
    rank of each node), ranks would wait for each other forever.
    """
    c10d: Any = dist.distributed_c10d
    torchs = getattr(c10d, HASH_RANKS_TO_STR, None)
    if torchs is None:
        yield
        return
    setattr(c10d, HASH_RANKS_TO_STR, lambda others: name if list(others) == list(ranks) else torchs(others))
    try:
        yield
    finally:
        setattr(c10d, HASH_RANKS_TO_STR, torchs)
