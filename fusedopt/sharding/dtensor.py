"""DTensor parameters and gradients: their local parts, how they are placed, over which ranks their elements lie.

Everything behind `param.main_grad` works on the local part, a plain tensor; a DTensor is put around it again where
torch looks: on ``.grad`` and ``main_grad``. A program that made no DTensor does not load torch's.

Knows nothing of buckets or optimizers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusedopt._torch_private import fsdp_parameters, local_shape_and_offset, local_tensor

_PLAIN = frozenset((Tensor, nn.Parameter))


def is_loaded() -> bool:
    """Return whether there can be a DTensor in this program."""
    return "torch.distributed.tensor" in sys.modules


def is_dtensor(tensor: Any) -> bool:
    """Return whether ``tensor`` is a DTensor."""
    if type(tensor) in _PLAIN:  # a Parameter over a DTensor is of class DTensor
        return False
    module = sys.modules.get("torch.distributed.tensor")  # not loaded: there can be none
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that this rank holds, sharing its memory; a plain tensor itself."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def like(param: Tensor, local: Tensor, placements: Sequence[Any] | None = None) -> Tensor:
    """Return a DTensor over ``local``, sharing its memory, that is placed as ``param``; for a plain one, ``local``.

    Args:
        param: says on which mesh, and which whole shape.
        local: as this rank's part of ``param``.
        placements: in place of those of ``param``.
    """
    if not is_dtensor(param):
        return local
    from torch.distributed.tensor import DTensor

    placed: Any = param
    return DTensor.from_local(
        local,
        placed.device_mesh,
        placed.placements if placements is None else placements,
        run_check=False,
        shape=placed.shape,
        stride=placed.stride(),
    )


def rebind(param: Tensor, local: Tensor) -> None:
    """Let ``param`` use the memory of ``local`` for its part."""
    local_of(param).data = local


def is_share(grad: Tensor, param: Tensor) -> bool:
    """Return whether ``grad`` is a share that is still to be summed over all replicas of ``param``.

    Sequence parallel layers deliver such gradients of their replicated weights, and torch sums them when it has to.
    """
    return is_dtensor(grad) and list(grad.placements) == share_placements(param) != list(param.placements)  # type: ignore[attr-defined]


def copy_local_(target: Tensor, source: Tensor) -> None:
    """Copy ``source`` into ``target``: locally where both are placed alike, else by torch's redistribution."""
    if not (is_dtensor(target) or is_dtensor(source)):  # at every first arrival
        target.copy_(source)
        return
    placed = [tuple(t.placements) if is_dtensor(t) else None for t in (target, source)]  # type: ignore[attr-defined]
    if placed[0] == placed[1]:
        local_of(target).copy_(local_of(source))
    else:
        target.copy_(source)


@dataclass(frozen=True)
class Domain:
    """The ranks that a parameter's elements lie on.

    Args:
        mesh: a DeviceMesh.
        num_shards: over how many of its ranks the elements are split; the others hold the same.
    """

    mesh: Any
    num_shards: int


def mesh_of(param: Tensor) -> Any:
    """Return the DeviceMesh of ``param``; None for a plain parameter."""
    return param.device_mesh if is_dtensor(param) else None  # type: ignore[attr-defined]


def domain_of(param: Tensor) -> Domain | None:
    """Return where the elements of ``param`` lie; None for a plain parameter, whole on this rank."""
    if not is_dtensor(param):
        return None
    placed: Any = param
    mesh = placed.device_mesh
    return Domain(mesh, math.prod(mesh.size(dim) for dim, p in enumerate(placed.placements) if not p.is_replicate()))


def place_of(tensor: Tensor) -> str:
    """Return which part of ``tensor`` this rank holds, to be compared and read; empty for a plain tensor."""
    if not is_dtensor(tensor):
        return ""
    placed: Any = tensor
    places = zip(placed.placements, placed.device_mesh.get_coordinate(), strict=True)
    return ", ".join(f"{p} {c}" for p, c in places if not p.is_replicate()) or "whole"


def region_of(param: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the shape of the whole DTensor ``param`` and where in it this rank's part begins.

    None for a plain parameter, and where the part is no block of the whole (sharded twice in one dimension).
    """
    if not is_dtensor(param):
        return None
    from torch.distributed.tensor import Replicate, Shard

    placed: Any = param
    if any(type(placement) not in (Replicate, Shard) for placement in placed.placements):
        return None
    return tuple(param.shape), local_shape_and_offset(param)[1]


def is_cut(param: Tensor) -> bool:
    """Return whether this rank holds less than all of ``param``."""
    return is_dtensor(param) and local_of(param).shape != param.shape


def share_placements(param: Tensor) -> list[Any]:
    """Return how a gradient of ``param`` is placed of which each replica holds a share."""
    from torch.distributed.tensor import Partial

    placed: Any = param
    return [Partial() if placement.is_replicate() else placement for placement in placed.placements]


def share_groups(param: Tensor) -> list[Any]:
    """Return the process groups over which shares of the gradient of ``param`` are to be summed."""
    placed: Any = param
    return [placed.device_mesh.get_group(dim) for dim, p in enumerate(placed.placements) if p.is_replicate()]


def ranks_of(mesh: Any) -> list[int]:
    """Return the global ranks of a DeviceMesh; of a slice of one, those that this rank is with."""
    return [int(rank) for rank in mesh.mesh.flatten()]


def held_by_fsdp(params: Iterable[Tensor]) -> dict[int, Any]:
    """Return the mesh that ``fully_shard`` reduces over, by the ``id`` of each of ``params`` that it holds.

    FSDP2 leaves no mark on a parameter, so this looks through the objects alive; about 0.1 s, where FSDP2 is loaded.
    """
    ours = {id(param) for param in params if is_dtensor(param)}
    return {id(param): mesh for param, mesh in fsdp_parameters() if id(param) in ours} if ours else {}


def is_copy(param: Tensor, plain: Tensor) -> bool:
    """Return whether the DTensor ``param`` holds the values of the plain ``plain``: they were tied before it was made.

    Looks at this rank's part; values that are all equal, as fresh norms have them, say nothing.
    """
    if param.shape != plain.shape or param.dtype is not plain.dtype or plain.ndim < 2 or param.is_meta:
        return False
    sizes, offsets = local_shape_and_offset(param)
    part = plain.detach()[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    return part.numel() > 0 and bool((part != part.flatten()[0]).any()) and torch.equal(part, local_of(param).detach())


def numel_of(param: Tensor) -> int:
    """Return how many elements of ``param`` this rank holds."""
    return local_of(param).numel()


def strides_of(param: Tensor) -> tuple[int, ...]:
    """Return the strides that the local part of ``param`` has in flat memory: its own where dense, else contiguous."""
    return torch.empty_like(local_of(param), device="meta", memory_format=torch.preserve_format).stride()
