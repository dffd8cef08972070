"""Write the matrix in docs/backends.md: from the adapters what each offers, from the rows what was measured.

python -m benchmarks.backends_page [--check]
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fusedopt import backends
from fusedopt.backends.offers import FUNCTIONS, Adam, Sgd

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "backends.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- begin: make docs -->", "<!-- end: make docs -->"
NOT_YET = "not measured yet"
RULES = {
    "Adam, AdamW": (Adam(1e-3, 0.9, 0.999, 1e-8, 0.0, is_decoupled=True),),
    "SGD with momentum": (Sgd(1e-3, 0.9, 0.0, 0.0, is_nesterov=False),),
}
NEEDS = {
    "torch": "nothing more",
    "triton": "Triton, which comes with CUDA builds of torch",
    "apex": "NVIDIA's apex with its CUDA extensions",
    "transformer_engine": "TransformerEngine for PyTorch",
}
TESTED = {
    "torch": "`tests/unit/backends/test_backends.py`, the whole suite",
    "triton": "`tests/unit/backends/test_triton_ops.py`, `test_triton_step.py`, in Triton's interpreter",
    "apex": "`tests/unit/backends/test_adapters.py`, against a double",
    "transformer_engine": "`tests/unit/backends/test_adapters.py`, `test_te_modules.py`, against doubles",
}


def main(argv: Sequence[str]) -> int:
    """Rewrite the page; with ``--check`` only say whether it is as it would be written."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    fresh = f"{head}{BEGIN}\n{matrix(measured_rows(RESULTS))}\n{END}{tail}"
    if "--check" in argv:
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


def measured_rows(results: Path) -> list[dict[str, Any]]:
    """Return the rows that a GPU wrote, oldest first."""
    files = sorted(results.glob("gpu_check_*.jsonl"), key=lambda path: path.stem.rsplit("_", 1)[-1])
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row.get("rehearsal") is False]


def matrix(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table: a line per backend and function."""
    lines = [
        "| backend | needs | function | offered | tested without a GPU by | on a GPU |",
        "|---|---|---|---|---|---|",
    ]
    for backend in ("torch", *backends.ADAPTERS):
        for index, (function, offered) in enumerate(offered_by(backend)):
            needs, tested = (NEEDS[backend], TESTED[backend]) if index == 0 else ("", "")
            name = f"`{backend}`" if index == 0 else ""
            on_gpu = "" if offered.startswith("no") else measured(rows, backend, function)
            lines.append(f"| {name} | {needs} | `{function}` | {offered} | {tested} | {on_gpu} |")
    return "\n".join(lines)


def offered_by(backend: str) -> Iterator[tuple[str, str]]:
    """Yield every function of the table, and whether an installation with everything in it brings it."""
    module = None if backend == "torch" else importlib.import_module(f"fusedopt.backends.{backends.ADAPTERS[backend]}")
    for function in FUNCTIONS:
        if module is None:
            yield function, "the inner optimizer's own" if function == "fused_step_" else "yes"
        elif function not in module.OFFERS:
            yield function, "no, torch's is used"
        elif function == "fused_step_":
            yield function, "; ".join(name for name, rules in RULES.items() if all(map(module.takes, rules)))
        else:
            yield function, "yes"


def measured(rows: Sequence[dict[str, Any]], backend: str, function: str) -> str:
    """Return the latest figures of ``backend`` for ``function``, with device and date."""
    prefixes = {"wgrad_accumulate_": f"wgrad accumulate_{backend},", "fused_step_": f"optimizer phase, {backend}_"}
    prefix = prefixes.get(function)
    found = [row for row in rows if prefix and row.get("kind") == "claim" and str(row["what"]).startswith(prefix)]
    if not found:
        return NOT_YET
    last = max(row["date"] for row in found)
    latest = [row for row in found if row["date"] == last]
    figures = "; ".join(f"{row['what'].removeprefix(prefix).strip(' ,')} {row['reached']:.2f}" for row in latest)
    return f"{figures} ({latest[-1]['device']}, torch {latest[-1]['torch']}, {last})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
