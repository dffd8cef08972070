"""Which live wrapper holds a parameter, or an inner optimizer: for messages, and for a new wrapper that takes it over.

    [holders] <- wrappers

Knows nothing of what a wrapper does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

_live: weakref.WeakKeyDictionary[Any, Callable[[object], bool]] = weakref.WeakKeyDictionary()


def add(wrapper: object, holds: Callable[[object], bool]) -> None:
    """Note a wrapper, as long as it lives.

    Args:
        wrapper: held weakly.
        holds: tells whether a parameter, or an inner optimizer, is the wrapper's; must not refer to it.
    """
    _live[wrapper] = holds


def remove(wrapper: object) -> None:
    """Forget a wrapper, which holds nothing any more."""
    _live.pop(wrapper, None)


def find(thing: object) -> Any | None:
    """Return the live wrapper that holds ``thing``, a parameter or an inner optimizer; None if there is none."""
    return next((wrapper for wrapper, holds in list(_live.items()) if holds(thing)), None)
