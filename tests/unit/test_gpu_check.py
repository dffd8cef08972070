"""gpu_check.sh rehearsed on the CPU: all sections leave their rows, in the stated order, and a table ends it."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest

from benchmarks import gpu_check
from benchmarks.gpu import correctness
from benchmarks.gpu.harness import Section
from benchmarks.gpu.synchronisations import SYNC_WARNING, counting
from benchmarks.timing import ROOT

SCRIPT = ROOT / "benchmarks" / "gpu_check.sh"
LEASE_S = 7 * 60
LEASE_FILES = 8  # that come back from a lent machine; one is left for the log
ENVIRONMENT = {"device", "torch", "python", "fusedopt", "commit", "date", "clock", "rehearsal"}


def run_script(*arguments, **environ):
    kept = {key: value for key, value in os.environ.items() if key not in ("OUT", "PYTHON", "COMMIT")}
    return subprocess.run(
        ["bash", str(SCRIPT), *arguments],
        env={**kept, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=600,  # a rehearsal takes 50 s on a quiet machine, and must not fail on a busy one
        check=False,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory):
    """Return the finished process and the folder of its rows."""
    out = tmp_path_factory.mktemp("out")
    return run_script("--device", "cpu", "--tiny", OUT=str(out)), out


def rows_of(out, name):
    (path,) = out.glob(f"gpu_check_{name}_cpu_*.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_rehearsal_ends_well_and_prints_the_table_last(rehearsal):
    done, out = rehearsal
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = done.stdout[done.stdout.rindex("target   reached") :]
    claims = [row for part in gpu_check.PARTS for row in rows_of(out, part.file) if row["kind"] == "claim"]
    assert len(claims) > 20
    assert all(f"{claim['what']} " in table for claim in claims)
    assert table.count("rehearsal") >= len({claim["what"] for claim in claims})
    assert "met" not in table.split()


def test_sections_run_in_the_order_in_which_a_lease_misses_them_least(rehearsal):
    done, _ = rehearsal
    headings = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert headings == [
        *("correctness", "wgrad", "optimizer_phase", "memory", "synchronisations", "cuda_graph"),
        *("llama_step", "llama_step"),
    ]
    assert headings == [part.file for part in gpu_check.PARTS]


@pytest.mark.parametrize("name", list(dict.fromkeys(part.file for part in gpu_check.PARTS)))
def test_every_section_leaves_rows_that_stand_by_themselves(rehearsal, name):
    rows = rows_of(rehearsal[1], name)
    kinds = {row["kind"] for row in rows}
    assert "error" not in kinds
    assert kinds & {"measurement", "test", "not applicable on cpu"}
    assert "claim" in kinds
    for row in rows:
        assert row["section"] == name
        assert row.keys() >= ENVIRONMENT
        assert row["rehearsal"] is True
        if "p50_ms" in row:
            assert 0 < row["p20_ms"] <= row["p50_ms"] <= row["p80_ms"]
            assert "caches" in row or row["contestant"] == "copy"


def test_correctness_has_a_row_for_every_test_and_says_why_one_is_skipped(rehearsal):
    tests = [row for row in rows_of(rehearsal[1], "correctness") if row["kind"] == "test"]
    assert sum(row["outcome"] == "passed" for row in tests) > 50
    assert all(row["why"] for row in tests if row["outcome"] == "skipped")
    (report,) = [row["report"] for row in rows_of(rehearsal[1], "correctness") if row["kind"] == "note"]
    assert "transformer_engine" in report


def test_contestants_of_the_issue_are_there(rehearsal):
    out = rehearsal[1]
    wgrad = {row["contestant"] for row in rows_of(out, "wgrad") if row["kind"] == "measurement"}
    assert wgrad >= {"mm", "mm_add", "accumulate_torch"}
    phase = [row for row in rows_of(out, "optimizer_phase") if row["kind"] == "measurement"]
    assert {row["contestant"] for row in phase} >= {"torch_foreach", "torch_fused", "copy"}
    assert {row["is_clipping"] for row in phase} == {True, False}
    steps = {row["contestant"] for row in rows_of(out, "llama_step") if row["kind"] == "measurement"}
    assert steps == {"plain_bf16", "fusedopt", "fusedopt_linears"}
    graphs = [row for row in rows_of(out, "cuda_graph") if row["kind"] == "not applicable on cpu"]
    assert graphs
    assert all(row["max_difference"] == 0 for row in graphs)


def test_limits_fit_into_a_lease_and_files_come_back_from_it():
    assert sum(part.limit_s for part in gpu_check.PARTS) < LEASE_S
    assert len({part.file for part in gpu_check.PARTS}) < LEASE_FILES


def test_without_the_device_the_script_says_what_to_do(tmp_path):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    done = run_script("--tiny", PYTHON=str(fake))
    assert done.returncode == 2
    assert "--device cpu --tiny" in done.stderr


def test_nothing_is_needed_that_the_lent_machine_may_lack():
    lacking = "import sys; sys.modules.update(dict.fromkeys(('transformers', 'tqdm', 'pytest', 'yaml', 'triton')))"
    done = subprocess.run(
        [sys.executable, "-c", f"{lacking}; from benchmarks import gpu_check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_machine_without_pytest_is_told_so_and_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    section = Section("correctness", path, "cpu", is_tiny=True, limit_s=60)
    monkeypatch.setitem(sys.modules, "pytest", None)
    correctness.run(section)
    (row,) = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert row["kind"] == "left_out"
    assert "pytest is not installed" in row["why"]
    assert not section.has_failed


def run_part(action, tmp_path, **settings):
    """Run ``action`` as the only section; return whether it ended well, and its rows."""
    path = tmp_path / "rows.jsonl"
    part = gpu_check.Part("part", action, **{"limit_s": 30, **settings})
    is_fine = gpu_check._run(part, path, argparse.Namespace(device="cpu", tiny=True))
    return is_fine, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_optional", [False, True])
def test_rows_of_a_section_that_hangs_are_kept_and_it_is_killed(tmp_path, is_optional):
    def hang(section):
        section.row("measurement", what="before")
        time.sleep(60)

    is_fine, rows = run_part(hang, tmp_path, limit_s=1, is_optional=is_optional)
    assert is_fine is is_optional
    assert [row["kind"] for row in rows] == ["measurement", "left_out" if is_optional else "error"]
    assert "limit" in rows[-1]["why"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_section_that_raises_or_dies_is_a_row_and_a_failure(tmp_path):
    def fail(section):
        raise ValueError("what went wrong")

    is_fine, rows = run_part(fail, tmp_path)
    assert not is_fine
    assert "what went wrong" in rows[-1]["error"]
    is_fine, rows = run_part(lambda section: os.kill(os.getpid(), signal.SIGKILL), tmp_path)
    assert not is_fine
    assert "SIGKILL" in rows[-1]["error"]


def test_synchronisations_are_counted_each_time_and_other_warnings_are_not():
    with counting(False) as seen:
        for _ in range(3):
            warnings.warn(SYNC_WARNING, UserWarning, stacklevel=1)
        warnings.warn("another", UserWarning, stacklevel=1)
    assert seen.num_syncs == 3
    assert seen.places == {"elsewhere": 3}
