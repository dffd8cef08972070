"""What a state dict may be made of.

Knows nothing of what is in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

CONTAINERS_READ = (dict, OrderedDict, list, tuple, set)
"""By ``torch.load(weights_only=True)``."""

_PLAIN = (bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size, type(None))


def copy_for_hooks(state_dict: Any) -> dict[str, Any]:
    """Return a shallow copy of a state dict, for load hooks to change.

    Raises:
        ValueError: if it is no mapping at all.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"not an optimizer state dict but a {type(state_dict).__name__}; load what state_dict() returned"
        )
    return dict(state_dict)


def find_objects(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield what is in ``value`` and ``torch.load(weights_only=True)`` does not read, with its place.

    Plain tensors and builtins it reads; deques, numpy's scalars and objects of other classes it does not. So it is
    none of the walks of `nested`: it judges containers, and looks at keys.
    """
    if type(value) in (Tensor, torch.nn.Parameter) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from find_objects(key, f"a key of {where}")
            yield from find_objects(item, f"{where}, {key!r}")
    elif type(value) in CONTAINERS_READ:
        for item in value:
            yield from find_objects(item, where)
    else:
        yield where, value


def name_of(value: Any) -> str:
    """Return how messages call the class of ``value``."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def refuse_objects(value: Any, where: str, why: str) -> None:
    """Raise if there are objects in ``value``, numbers and tensors apart: nobody knows what of them is a rank's.

    Raises:
        ValueError: naming the place, the class found there, and ``why`` that matters.
    """
    for place, found in find_objects(value, where):
        if not isinstance(found, (Number, Tensor)):
            raise ValueError(
                f"{place} holds a {name_of(found)}, and {why}. Save every rank's own optimizer.state_dict() and load "
                'it on the same rank; or use shard_by="parameter", which keeps parameters whole, or shard="none"'
            )
