"""Section 1: tests/gpu, one row per test as soon as it ended."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.gpu.harness import MESSAGE_CHARACTERS, Section
from benchmarks.timing import ROOT

DEVICE = "GPU_TESTS_DEVICE"  # tests/gpu/conftest.py reads it


class RowPerTest:
    """A pytest plugin."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self.num_of = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write a row for a test that ran, was skipped, or broke while it was set up or torn down."""
        if report.when == "call" or report.outcome != "passed":
            self.num_of[report.outcome] += 1
            why = "" if report.outcome == "passed" else _why(report)[-MESSAGE_CHARACTERS:]
            self._section.row(
                "test", test=report.nodeid, outcome=report.outcome, seconds=round(report.duration, 3), why=why
            )

    def pytest_collectreport(self, report: Any) -> None:
        """Write a row for a file that could not be imported."""
        if report.outcome == "failed":
            self.num_of["failed"] += 1
            self._section.row("test", test=report.nodeid, outcome="failed", seconds=0.0, why=_why(report))


def run(section: Section) -> None:
    """Run the tests in this process; a machine without pytest goes on to the rows."""
    try:
        import pytest
    except ModuleNotFoundError:
        section.left_out("tests/gpu", "pytest is not installed on this machine")
        return
    os.environ[DEVICE] = section.device.type
    rows = RowPerTest(section)
    # Versions here are not those that warnings were checked against, and what else is installed is not ours.
    arguments = ["-q", "-W", "default", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(ROOT)]
    status = pytest.main([*arguments, str(ROOT / "tests" / "gpu")], plugins=[rows])
    section.claim("tests/gpu failed", rows.num_of["failed"], 0, is_upper_bound=True, **rows.num_of)
    if status != pytest.ExitCode.OK:
        section.has_failed = True
        section.row("error", what="tests/gpu", error=f"pytest ended with {pytest.ExitCode(status).name}")


def _why(report: Any) -> str:
    longrepr = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
