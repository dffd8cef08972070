"""The adapters, each with what installs the double of its library."""

from __future__ import annotations

from collections.abc import Iterable

from fusedopt.backends import apex_ops, te_ops
from tests.doubles.apex_double import apex_installed
from tests.doubles.recording import Call
from tests.doubles.te_double import te_installed

ADAPTERS = {"apex": (apex_ops, apex_installed), "te": (te_ops, te_installed)}
OFFERED = ("wgrad_accumulate_", "norm", "scale_cast_", "fused_step_")


def functions_of(calls: Iterable[Call], *names: str) -> list[Call]:
    """Return the calls of ``names``, and check that every other was of none."""
    assert {call.name for call in calls} <= set(names), {call.name for call in calls}
    return list(calls)
