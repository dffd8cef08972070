"""Values in containers in containers, as optimizers keep them in their state: one way through them for all who walk.

A container is a dict, a list, a tuple, a named tuple or a deque, or of a class made of one (OrderedDict, defaultdict,
Counter) whose instances keep nothing beside their items. All else is a leaf, into which nobody looks: tensors, numbers,
objects; and sets, whose items have no place.

Knows nothing of tensors.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Path = tuple[Any, ...]
"""Keys and positions, from the outermost container to an item."""


def items_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container with their keys or positions; None for a leaf."""
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, deque)) or _is_tuple(value):
        items = enumerate(value)
    else:
        return None
    return None if getattr(value, "__dict__", None) else items


def _is_tuple(value: Any) -> bool:
    """Return whether it is a tuple that can be made anew: plain, named, or one of torch.return_types."""
    cls = type(value)
    return cls is tuple or (isinstance(value, tuple) and (hasattr(cls, "_make") or hasattr(cls, "n_sequence_fields")))


def leaves(value: Any, *, is_leaf: Callable[[Any], bool] | None = None, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield all leaves with their paths; ``value`` itself, if it is one.

    Args:
        value: a container, or a leaf.
        is_leaf: says of a container that it is to be taken as a leaf.
        path: of ``value``.
    """
    items = None if is_leaf is not None and is_leaf(value) else items_of(value)
    if items is None:
        yield path, value
    else:
        for key, item in items:
            yield from leaves(item, is_leaf=is_leaf, path=(*path, key))


def map_leaves(
    act: Callable[[Path, Any], Any], value: Any, *, is_leaf: Callable[[Any], bool] | None = None, path: Path = ()
) -> Any:
    """Return containers as in ``value``, of the same classes, with what ``act`` makes of each leaf.

    Args:
        act: gets the path and the leaf.
        value: a container, or a leaf. Not changed.
        is_leaf: says of a container that it is to be taken as a leaf.
        path: of ``value``.
    """
    items = None if is_leaf is not None and is_leaf(value) else items_of(value)
    if items is None:
        return act(path, value)
    made = [(key, map_leaves(act, item, is_leaf=is_leaf, path=(*path, key))) for key, item in items]
    if isinstance(value, tuple):
        return getattr(type(value), "_make", type(value))([item for _, item in made])
    copied = copy.copy(value)  # with the limit of a deque, the factory of a defaultdict
    for key, item in made:
        copied[key] = item
    return copied


def is_alike(is_same: Callable[..., bool], one: Any, *others: Any) -> bool:
    """Return whether all have the same items in the same containers, and ``is_same`` holds of the leaves of each path.

    Args:
        is_same: gets the leaf of ``one``, and those of ``others``.
        one: a container, or a leaf.
        others: to be compared with it.
    """
    forms = [map_leaves(lambda path, leaf: None, value) for value in (one, *others)]
    if any(form != forms[0] for form in forms[1:]):
        return False
    found = [dict(leaves(other)) for other in others]
    return all(is_same(leaf, *(of[path] for of in found)) for path, leaf in leaves(one))
