"""Make all ranks start from the same weights, and make sure that they can.

[parameters] -> layout -> buffers -> ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fusedopt.sharding import dtensor
from fusedopt.sharding.comm import DataParallelGroup


def broadcast_module(module: nn.Module, group: Any = None) -> None:
    """Give every rank the parameters, frozen ones included, and buffers of the group's first rank.

    All ranks call it. `FusedMainGradOptimizer` does this by itself for the parameters it holds.

    Args:
        module: the same architecture on all ranks. Written in place.
        group: a process group; default all ranks.

    Raises:
        RuntimeError: on all ranks, naming the first tensor whose name, shape or dtype differs.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    comm = DataParallelGroup(group)
    comm.agree("broadcast_module()", None)
    start_alike(comm, named, None, broadcast=True)


def start_alike(
    comm: DataParallelGroup, named: Sequence[tuple[str, Tensor]], settings: object, *, broadcast: bool
) -> None:
    """Make sure that all ranks hold the same tensors, see `check_same`, and give them the first rank's values.

    From then on ``comm`` has groups of its own.

    Args:
        comm: the ranks; all call this.
        named: tensors with their names. Written.
        settings: have to be equal, too.
        broadcast: False leaves every rank the values it has.
    """
    if comm.world_size == 1:
        return
    check_same(comm, named, settings)
    comm.open()
    if broadcast:
        comm.broadcast_([dtensor.local_of(tensor.data) for _, tensor in named])


def check_same(comm: DataParallelGroup, named: Sequence[tuple[str, Tensor]], settings: object = None) -> None:
    """Raise, on all ranks, unless all of them have the same tensors and settings.

    Args:
        comm: the ranks; all call this.
        named: tensors with their names; shape, dtype and ``requires_grad`` are compared.
        settings: anything that pickles and can be compared.

    Raises:
        RuntimeError: naming the first difference, and the ranks.
    """
    described = [(name, tuple(t.shape), str(t.dtype), t.requires_grad, dtensor.place_of(t)) for name, t in named]
    first, *others = comm.objects((described, settings))
    for rank, (found, found_settings) in enumerate(others, 1):
        if found_settings != first[1]:
            raise RuntimeError(f"rank {rank} has the settings {found_settings}, rank 0 has {first[1]}; make them equal")
        if len(found) != len(first[0]):
            raise RuntimeError(
                f"rank {rank} has {len(found)} tensors, rank 0 has {len(first[0])}; build the same model on all ranks"
            )
        for ours, theirs in zip(found, first[0], strict=True):
            if ours != theirs:
                if ours[:-1] == theirs[:-1]:
                    raise RuntimeError(
                        f"rank {rank} holds another part of {ours[0]} ({ours[-1]}) than rank 0 ({theirs[-1]}), so they "
                        "are no data-parallel replicas. Give the data-parallel ranks alone, device_mesh=mesh['dp'] or "
                        "process_group=...; a mesh dimension of size 1 where there are none"
                    )
                raise RuntimeError(
                    f"rank {rank} has {_describe(ours)} where rank 0 has {_describe(theirs)}; build the same model on "
                    "all ranks, with the same parameters frozen"
                )


def _describe(described: tuple[str, tuple[int, ...], str, bool, str]) -> str:
    name, shape, dtype, requires_grad, _ = described
    return f"{name} ({dtype}, {shape}{'' if requires_grad else ', frozen'})"
