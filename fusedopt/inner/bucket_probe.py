"""Find out, by trying, whether an inner optimizer may be stepped bucket by bucket, on memory that comes and goes.

    [constructor] -> ...; step: -> clip -> [inner step, one bucket after the other] -> ...

An optimizer may let one parameter decide about another, count what each call does, or keep views of its parameters'
memory: then a step in pieces would go wrong in silence. So two copies of it step two small tensors, one in the usual
way, one in pieces whose memory is new in each step, and bits are compared.

Knows nothing of buckets or ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.inner.copies import NotCopied, copy_over, reseed, unnoticed
from fusedopt.inner.rollback import Counters

_SHAPES = ((24, 16), (9,))
_MATRICES = ((24, 16), (9, 12))
"""In the place of `_SHAPES` where a group has no vectors: some optimizers take matrices only."""

_NUM_STEPS = 5
_ABSENT = (2, 1)
"""The step in which a parameter has no gradient, and its number."""


def why_not_by_bucket(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    """Return why ``optimizer``, with the settings of ``group``, must be stepped on all parameters at once; None if not.

    Neither the optimizer nor its parameters move.
    """
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    try:
        with unnoticed(device), torch.no_grad():
            whole = _run(optimizer, group, device, in_pieces=False)
            pieces = _run(optimizer, group, device, in_pieces=True)
    except NotCopied as error:
        return f"of which no copy could be tried: {error}"
    except Exception as error:
        return f"a copy of which raised {error!r} when it was tried"
    if not all(map(torch.equal, map(_bits, whole), map(_bits, pieces))):
        return (
            "which ends elsewhere when it is stepped bucket by bucket: one parameter decides about another, or it keeps"
            " their memory"
        )
    return None


def _run(optimizer: Optimizer, group: dict[str, Any], device: torch.device, *, in_pieces: bool) -> list[Tensor]:
    """Return where a copy brings two parameters."""
    reseed(device)
    has_vectors = not group["params"] or any(param.ndim < 2 for param in group["params"])
    shapes = _SHAPES if has_vectors else _MATRICES
    values = [torch.linspace(-1.0, 1.0, math.prod(shape), device=device).view(shape) for shape in shapes]
    params = [nn.Parameter(value.clone()) for value in values]
    copied = copy_over(optimizer, group, params)
    (copied_group,) = copied.param_groups
    for step in range(_NUM_STEPS):
        grads = [torch.cos(torch.arange(v.numel(), device=device) * (0.3 + step)).view(v.shape) for v in values]
        grads = [grad * 3.0**number for number, grad in enumerate(grads)]
        given = [None if (step, number) == _ABSENT else grad for number, grad in enumerate(grads)]
        if not in_pieces:
            for param, grad in zip(params, given, strict=True):
                param.grad = grad
            copied.step()
            continue
        counters = Counters(copied)
        for number, (param, grad) in enumerate(zip(params, given, strict=True)):
            if grad is None:
                continue
            counters.rewind()
            memory = values[number].clone()
            param.data, param.grad = memory, grad
            copied_group["params"][:] = [param]
            copied.step()
            values[number] = param.detach().clone()
            param.grad = None
            param.data = torch.full((), math.nan, device=device).expand(memory.shape)
            memory.fill_(math.nan)
        counters.finish()
        copied_group["params"][:] = params
    return values if in_pieces else [param.detach() for param in params]


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)
