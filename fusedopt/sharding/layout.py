"""Where each parameter lives in the flat buffers.

    parameters -> [layout] -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

Integer arithmetic only: no tensors, no devices, no process group. Offsets and
sizes are in elements, never bytes. Spans are half-open, ``[start, end)``.

One *buffer* holds the parameters of one key (parameter group, dtype, device).
It is cut into *buckets*, the unit of one collective and one whole-bucket
operation; a bucket is cut into ``world_size`` equal *shards*, one per rank:

    bucket    |  p7  .|   p6   ....|  p5 .|     p4      ...|      . = padding, always zero
    shards    |---- rank 0 ----|---- rank 1 ----|---- rank 2 ---|

Parameters are laid out in reverse order of registration, which is roughly the
order in which backward completes their gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements. A parameter starts at a multiple of this: 256 bytes in fp32, 128 in bf16, a cache
line on every CPU and the alignment that vector loads and NCCL want."""

BLOCK_NUMEL = 256
"""Elements of a block of 8-bit state. A parameter of at least as many starts at a multiple of this, and rows
are a multiple, so that a shard never cuts a block, and state has the same bits on any number of ranks."""

ROW_NUMEL = 1024
"""Elements. A shard is a whole number of rows of this many elements, so that a norm can sum row
by row: one long fp32 sum loses digits (relative error 2e-3 at 30 M elements on CPU; rows: 1e-7)."""


@dataclass(frozen=True)
class Span:
    """A half-open range of elements, ``[start, end)``."""

    start: int
    end: int

    @property
    def numel(self) -> int:
        """Number of elements in the span."""
        return self.end - self.start


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of one parameter.

    Args:
        name: for error messages.
        numel: elements; zero is allowed.
        key: parameters that share a buffer have equal keys: (group, dtype, device).
    """

    name: str
    numel: int
    key: Hashable


@dataclass(frozen=True)
class Placement:
    """The place of parameter number ``index`` (in the order given to `plan_buckets`) in its bucket."""

    index: int
    span: Span


@dataclass(frozen=True)
class BucketPlan:
    """One flat tensor's worth of parameters.

    Args:
        key: the key that its parameters share.
        numel: elements, padding included; a multiple of ``world_size * ROW_NUMEL``.
        world_size: number of equal shards.
        placements: disjoint spans, ascending.
    """

    key: Hashable
    numel: int
    world_size: int
    placements: tuple[Placement, ...]

    def shard_span(self, rank: int) -> Span:
        """Return the part of this bucket that ``rank`` reduces, updates and gathers.

        Raises:
            ValueError: if ``rank`` is not in ``[0, world_size)``.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size}), the ranks this bucket was cut for")
        shard = self.numel // self.world_size
        return Span(rank * shard, (rank + 1) * shard)


def intersect(a: Span, b: Span) -> Span | None:
    """Return the elements in both spans, or None where there are none."""
    start, end = max(a.start, b.start), min(a.end, b.end)
    return Span(start, end) if start < end else None


def plan_buckets(
    specs: Sequence[ParamSpec], bucket_numel: int, world_size: int = 1, shard_by: str = "element"
) -> tuple[BucketPlan, ...]:
    """Lay parameters out in buckets.

    Args:
        specs: one per parameter, in order of registration.
        bucket_numel: elements; a bucket takes parameters until the next would pass this. A larger
            parameter gets a bucket of its own.
        world_size: ranks that share each bucket.
        shard_by: ``"element"`` cuts shards through parameters; ``"parameter"`` keeps each parameter
            inside one shard, the largest first to the emptiest shard.

    Returns:
        Buckets; every spec is placed exactly once.

    Raises:
        ValueError: for a non-positive size, a negative numel, or an unknown ``shard_by``.
    """
    if bucket_numel < 1 or world_size < 1:
        raise ValueError(f"bucket_numel={bucket_numel} and world_size={world_size} must both be at least 1")
    if shard_by not in ("element", "parameter"):
        raise ValueError(f'shard_by={shard_by!r} is unknown; use "element" or "parameter"')
    for spec in specs:
        if spec.numel < 0:
            raise ValueError(f"parameter {spec.name!r} has numel={spec.numel}; sizes cannot be negative")
    place = _place_by_element if shard_by == "element" else _place_by_parameter
    return tuple(
        place(key, chunk, world_size) for key, members in _by_key(specs) for chunk in _chunks(members, bucket_numel)
    )


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _start(end: int, numel: int) -> int:
    """Return where a parameter of ``numel`` elements starts, after one that ends at ``end``."""
    alignment = BLOCK_NUMEL if numel >= BLOCK_NUMEL else ALIGNMENT
    return -(-end // alignment) * alignment


def _shard_numel(numel: int) -> int:
    return max(1, -(-numel // ROW_NUMEL)) * ROW_NUMEL


_Member = tuple[int, int]  # (index, numel)


def _by_key(specs: Sequence[ParamSpec]) -> Iterable[tuple[Hashable, list[_Member]]]:
    members: dict[Hashable, list[_Member]] = {}
    for index in reversed(range(len(specs))):
        members.setdefault(specs[index].key, []).append((index, specs[index].numel))
    return members.items()


def _chunks(members: list[_Member], bucket_numel: int) -> Iterable[list[_Member]]:
    chunk: list[_Member] = []
    filled = 0
    for index, numel in members:
        if chunk and _start(filled, numel) + _aligned(numel) > bucket_numel:
            yield chunk
            chunk, filled = [], 0
        chunk.append((index, numel))
        filled = _start(filled, numel) + _aligned(numel)
    if chunk:
        yield chunk


def _place_by_element(key: Hashable, chunk: list[_Member], world_size: int) -> BucketPlan:
    placements = []
    end = 0
    for index, numel in chunk:
        start = _start(end, numel)
        placements.append(Placement(index, Span(start, start + numel)))
        end = start + _aligned(numel)
    shard = _shard_numel(-(-end // world_size))
    return BucketPlan(key, shard * world_size, world_size, tuple(placements))


def _place_by_parameter(key: Hashable, chunk: list[_Member], world_size: int) -> BucketPlan:
    shards: list[list[_Member]] = [[] for _ in range(world_size)]
    filled = [0] * world_size
    for member in sorted(chunk, key=lambda m: (-m[1], m[0])):
        emptiest = filled.index(min(filled))
        shards[emptiest].append(member)
        filled[emptiest] = _start(filled[emptiest], member[1]) + _aligned(member[1])
    shard_numel = _shard_numel(max(filled))
    placements = []
    for rank, members in enumerate(shards):
        end = rank * shard_numel
        for index, numel in members:
            start = _start(end, numel)  # a shard starts at a row
            placements.append(Placement(index, Span(start, start + numel)))
            end = start + _aligned(numel)
    return BucketPlan(key, shard_numel * world_size, world_size, tuple(placements))
