"""What an inner optimizer finds in a group of which this rank has no gradient, while other ranks have some.

    ... -> clip -> [inner step] -> write-back -> ...

Most classes pass over such a group, and count it in their hyper-parameters as on other ranks. Some fail ("Tensor list
must have at least one tensor"): these find one element there, with a gradient of zero, for as long as the step lasts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.inner.copies import copy_over, unnoticed


class StandIns:
    """Remembers which inner optimizers need one; asked once, of a copy."""

    def __init__(self) -> None:
        self._fails: dict[tuple[int, int], bool] = {}  # by ids of optimizer and group

    @contextlib.contextmanager
    def during(
        self, optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], Tensor]], *, takes_closure: bool
    ) -> Iterator[None]:
        """Put stand-ins into those of ``groups`` that have no gradient here, if ``optimizer`` fails without.

        Args:
            optimizer: an inner one, which holds no other.
            groups: its groups that several ranks share, each with a parameter like those in it.
            takes_closure: whether its ``step`` is to be tried with one.
        """
        lacking = [item for item in groups if all(param.grad is None for param in item[0]["params"])]
        placed = []
        for group, like in lacking:
            key = (id(optimizer), id(group["params"]))
            if key not in self._fails:
                self._fails[key] = _fails_without(optimizer, group, like, takes_closure=takes_closure)
            if self._fails[key]:
                stand_in = nn.Parameter(torch.zeros((1,) * like.ndim, dtype=torch.float32, device=like.device))
                stand_in.grad = torch.zeros_like(stand_in)
                group["params"].append(stand_in)
                placed.append((group["params"], stand_in))
        try:
            yield
        finally:
            for params, stand_in in placed:
                params[:] = [param for param in params if param is not stand_in]
                optimizer.state.pop(stand_in, None)


def _fails_without(optimizer: Optimizer, group: dict[str, Any], like: Tensor, *, takes_closure: bool) -> bool:
    try:
        with unnoticed(like.device), torch.no_grad():
            copied = copy_over(optimizer, group, [])
            copied.step(lambda: 0.0) if takes_closure else copied.step()
    except Exception:
        return True
    return False
