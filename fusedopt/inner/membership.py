"""Follow edits of ``optimizer.param_groups``: what the lists hold, in their order, is what is trained.

    [parameters] -> layout -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

A stock optimizer reads its lists anew in each step, so people reverse, slice, extend and rebuild them. Here they are
compared, by identity, with what they held before. A group is the same if its dict is, or if its parameters all come
from one group that is no longer there; a parameter is the same wherever it went.

Knows nothing of buffers, hooks or ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusedopt.checks import default_name
from fusedopt.inner.optimizers import Group, InnerOptimizers, Listed


@dataclass(frozen=True)
class Edit:
    """What changed.

    Args:
        listings: as `Wiring.relist` takes them.
        added: the outer group's number, name and parameter of each that was nowhere before.
        removed: parameters that are nowhere now.
        moved: name and parameter, with the number of the group that it came from, and the one that it is in now and
            the number that this had, None for a new one.
    """

    listings: list[Listed | Group]
    added: list[tuple[int, str, nn.Parameter]]
    removed: list[nn.Parameter]
    moved: list[tuple[str, nn.Parameter, int, int, int | None]]


class Membership:
    """Remembers what the groups of one wrapper held.

    Args:
        inner: the wrapped optimizers.
    """

    def __init__(self, inner: InnerOptimizers) -> None:
        self._inner = inner
        self.names: dict[int, str] = {}
        """What messages call each parameter, by ``id``."""

    def note(self, groups: Sequence[Group]) -> None:
        """Remember ``groups``, which `InnerOptimizers.listed` holds as well."""
        for index, (group, listed) in enumerate(zip(groups, self._inner.listed, strict=False)):
            listed.outer = group
            names = group.get("param_names") or [default_name(index, i) for i in range(len(group["params"]))]
            for name, param in zip(names, group["params"], strict=True):
                self.names.setdefault(id(param), name)

    def edit(self, groups: Sequence[Group]) -> Edit:
        """Return what was edited since `note`; changes nothing.

        Raises:
            TypeError: if something else than a parameter is in a group, or a group is no dict with ``"params"``.
            ValueError: if a parameter is listed twice, a group's names do not fit its parameters, or a new group could
                belong to several inner optimizers.
        """
        for index, group in enumerate(groups):
            _check_form(index, group)
        self._check_names(groups)
        before = {id(p): index for index, listed in enumerate(self._inner.listed) for p in listed.params}
        partners = self._partners(groups, before)
        listings: list[Listed | Group] = []
        added, moved, seen = [], [], dict[int, str]()
        for index, (group, partner) in enumerate(zip(groups, partners, strict=True)):
            for position, param in enumerate(group["params"]):
                name, here = self.names.get(id(param), ""), default_name(index, position)
                if id(param) in seen:
                    raise ValueError(
                        f"parameter {name or here} is listed twice, as {seen[id(param)]} and {here}; give each "
                        "parameter to one group, once"
                    )
                seen[id(param)] = here
                if id(param) not in before:
                    added.append((index, (group.get("param_names") or {position: here})[position], param))
                elif before[id(param)] != partner:
                    moved.append((name, param, before[id(param)], index, partner))
            if partner is None:
                listings.append({**group, "inner": self._optimizer_for(index, group, before)})
            else:
                listings.append(replace(self._inner.listed[partner], params=list(group["params"])))
        removed = [p for listed in self._inner.listed for p in listed.params if id(p) not in seen]
        return Edit(listings, added, removed, moved)

    def _partners(self, groups: Sequence[Group], before: dict[int, int]) -> list[int | None]:
        """Return for each of ``groups`` the number that it had, None for a new one."""
        place = {id(listed.outer): index for index, listed in enumerate(self._inner.listed)}
        partners = [place.get(id(group)) for group in groups]
        for index, group in enumerate(groups):
            if partners[index] is None:
                origins = {before.get(id(param)) for param in group["params"]}
                (origin,) = origins if len(origins) == 1 else (None,)
                partners[index] = origin if origin not in partners else None
        return partners

    def _optimizer_for(self, index: int, group: Group, before: dict[int, int]) -> int:
        """Return the number of the inner optimizer that a new group belongs to."""
        optimizers = self._inner.optimizers
        origins = {id(self._inner.optimizer_of(before[id(p)])) for p in group["params"] if id(p) in before}
        fitting = [number for number, opt in enumerate(optimizers) if len(optimizers) == 1 or id(opt) in origins]
        chosen: Any = group.get("inner", fitting[0] if len(fitting) == 1 else None)
        if chosen not in range(len(optimizers)):
            names = ", ".join(f"{i}: {type(opt).__name__}" for i, opt in enumerate(optimizers))
            raise ValueError(
                f"param_groups[{index}] is new, and could belong to any of the inner optimizers ({names}); call "
                'optimizer.add_param_group({"params": ..., "inner": number})'
            )
        return int(chosen)

    def _check_names(self, groups: Sequence[Group]) -> None:
        """Raise unless each group that names its parameters names all; names of known ones follow by themselves."""
        for index, group in enumerate(groups):
            names, params = group.get("param_names"), group["params"]
            if names is None or len(names) == len(params):
                continue
            unknown = [i for i, param in enumerate(params) if id(param) not in self.names]
            if unknown:
                raise ValueError(
                    f"param_groups[{index}] has {len(names)} param_names for {len(params)} parameters, and number "
                    f"{unknown[0]} is new: put its name into param_names, or call optimizer.add_param_group() with "
                    "(name, parameter) pairs"
                )

    def name_again(self, groups: Sequence[Group]) -> None:
        """Put the names of parameters that were removed or moved in their order; see `edit`."""
        for group in groups:
            names, params = group.get("param_names"), group["params"]
            if names is not None:
                known = [self.names.get(id(param)) for param in params]
                given = names if len(names) == len(params) else [""] * len(params)
                names[:] = [name if name is not None else given[i] for i, name in enumerate(known)]


def _check_form(index: int, group: Any) -> None:
    needed = (
        'needed is a dict with hyper-parameters and "params", a list. Call optimizer.add_param_group({"params": [...]})'
    )
    if not isinstance(group, dict):
        raise TypeError(f"param_groups[{index}] is a {type(group).__name__}; {needed}")
    params = group.get("params")
    if not isinstance(params, (list, tuple)):
        raise TypeError(f"param_groups[{index}]['params'] is a {type(params).__name__}; {needed}")
    for position, param in enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(f"{default_name(index, position)} is a {type(param).__name__}; needed is a parameter")
