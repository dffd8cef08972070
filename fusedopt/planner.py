"""What a layout costs: bytes on each rank, and collectives and bytes on the wire in each window.

    parameters -> layout -> [planner]

Integer arithmetic only, from the same layout that is then allocated. Bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusedopt.sharding.layout import BLOCK_NUMEL, BucketPlan, ParamSpec, Span, intersect, plan_buckets

MAIN_NBYTES = 4
"""Of one fp32 element: main_grad, main_param."""

MAIN_PARAM_NBYTES = {"float32": 4, "split": 2, "split24": 1}
"""Of a main_param's element beside the model's, by the setting ``main_param``."""


NUM_RELEASED = 2
"""Buckets whose gradients are there at a time, at most, where they are released."""


@dataclass(frozen=True)
class Cost:
    """What one rank pays.

    Attributes:
        model: trainable parameters, in their own dtype.
        main_grad, main_param, state: as allocated, padding included; state without its scalars.
        num_reduces, num_gathers: collectives in a window, one for each bucket: under ``"gradients"`` each of the
            window's backwards reduces, else one does.
        reduce_nbytes, gather_nbytes: sent by this rank in a window.
    """

    model: int
    main_grad: int
    main_param: int
    state: int
    num_reduces: int
    num_gathers: int
    reduce_nbytes: int
    gather_nbytes: int

    @property
    def total(self) -> int:
        """Bytes held between steps."""
        return self.model + self.main_grad + self.main_param + self.state


def full_buckets(numel: int, bucket_numel: int) -> list[ParamSpec]:
    """Return parameters of ``numel`` elements in all that fill buckets: for a model of which only the size is known."""
    sizes = [bucket_numel] * (numel // bucket_numel) + [numel % bucket_numel]
    return [ParamSpec("", size, 0) for size in sizes if size]


def cost(
    specs: Sequence[ParamSpec],
    *,
    bucket_numel: int,
    model_nbytes: int = 2,
    state_nbytes: int = 8,
    shard: str = "none",
    shard_by: str = "element",
    world_size: int = 1,
    rank: int = 0,
    num_micro_batches: int = 1,
    main_param: str = "float32",
    state_dtype: str = "float32",
    release: str = "none",
) -> Cost:
    """Return what a wrapper over ``specs`` costs on ``rank``.

    Args:
        specs: one per parameter, in order of registration; parameters with different keys share no bucket.
        bucket_numel: elements, see `plan_buckets`.
        model_nbytes: of one model parameter's element: 2 for bf16 and fp16, 4 for fp32, which needs no main_param.
        state_nbytes: of inner state for one element: 8 for Adam.
        shard: ``"none"``, ``"optimizer"`` or ``"gradients"``.
        shard_by: ``"element"`` or ``"parameter"``.
        world_size: ranks that share the buckets.
        rank: of them.
        num_micro_batches: backwards in a window.
        main_param: ``"float32"``, ``"split"`` or ``"split24"``; fp32 and fp16 models cannot be split.
        state_dtype: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        release: ``"backward"``: main_grad is what two buckets take, the most that is there at a time.

    The wire: with W ranks an all-reduce of n bytes sends 2 (W-1)/W n from each rank, a reduce-scatter or an
    all-gather (W-1)/W n, which are the lower bounds (Chan et al., Collective communication, 2007).
    """
    is_sharded = shard != "none" and world_size > 1
    buckets = plan_buckets(specs, bucket_numel, world_size if is_sharded else 1, shard_by)
    whole = sum(bucket.numel for bucket in buckets)
    part = whole // world_size if is_sharded else whole
    owned = [span for bucket in buckets for span in _owned(bucket, rank if is_sharded else 0)]
    num_reduces = num_micro_batches if shard == "gradients" and is_sharded else 1
    grads = part if shard == "gradients" else whole
    if release == "backward":
        grads = sum(sorted((bucket.numel for bucket in buckets), reverse=True)[:NUM_RELEASED])
    return Cost(
        model=model_nbytes * sum(spec.numel for spec in specs),
        main_grad=MAIN_NBYTES * grads,
        main_param=MAIN_PARAM_NBYTES[main_param] * part if model_nbytes < MAIN_NBYTES else 0,
        state=sum(_state_nbytes(specs[index].numel, span, state_nbytes, state_dtype) for index, span in owned),
        num_reduces=len(buckets) * num_reduces if world_size > 1 else 0,
        num_gathers=len(buckets) if is_sharded else 0,
        reduce_nbytes=num_reduces * _sent(buckets, MAIN_NBYTES, world_size, 1 if is_sharded else 2),
        gather_nbytes=_sent(buckets, model_nbytes, world_size, 1) if is_sharded else 0,
    )


def _owned(bucket: BucketPlan, rank: int) -> list[tuple[int, int]]:
    """Return the parameters of which ``rank`` updates something, by number, and how many elements of each."""
    shard = bucket.shard_span(rank)
    spans = ((placement.index, intersect(placement.span, shard)) for placement in bucket.placements)
    return [(index, span.numel) for index, span in spans if isinstance(span, Span)]


def _state_nbytes(numel: int, owned: int, nbytes: int, state_dtype: str) -> int:
    """Return the bytes of the state of ``owned`` elements of a parameter of ``numel``, of ``nbytes`` each in fp32."""
    if state_dtype == "float32" or numel < BLOCK_NUMEL:
        return nbytes * owned
    if state_dtype == "bfloat16":
        return nbytes * owned // 2
    return nbytes * owned // MAIN_NBYTES + nbytes * -(-owned // BLOCK_NUMEL)


def _sent(buckets: Sequence[BucketPlan], element_nbytes: int, world_size: int, times: int) -> int:
    """Return the bytes one rank sends when every bucket travels ``times``."""
    return sum(times * (element_nbytes * bucket.numel * (world_size - 1) // world_size) for bucket in buckets)
