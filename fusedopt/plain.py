"""What a state dict may be made of.

Knows nothing of what is in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


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


def check_plain(value: Any, where: str) -> None:
    """Raise unless ``value`` is made of plain tensors and builtins, which ``torch.load(weights_only=True)`` reads.

    Raises:
        TypeError: naming the place and the type found there.
    """
    if type(value) in (Tensor, torch.nn.Parameter) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, f"a key of {where}")
            check_plain(item, f"{where}, {key!r}")
    elif type(value) in (list, tuple, set):
        for item in value:
            check_plain(item, where)
    else:
        raise TypeError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which "
            "torch.load(weights_only=True) does not read; keep it as a tensor or a builtin in the inner optimizer, "
            "or give that class state_dict() and load_state_dict() that do"
        )
