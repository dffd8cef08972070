"""The README's diff and every Python block of the documentation run as printed."""

import ast
import re
import types
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]


def blocks(file, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(), flags=re.M | re.S)


class Model(nn.Linear):
    def forward(self, x):
        return types.SimpleNamespace(loss=super().forward(x).float().square().mean())


def run_readme_diff(dropped):
    """Run the README's loop without the lines that begin with ``dropped``; return the weights per step."""
    (diff,) = blocks("README.md", "diff")
    program = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(dropped))
    torch.manual_seed(0)
    loader = [[{"x": torch.randn(2, 8).bfloat16()} for _ in range(4)] for _ in range(3)]
    namespace = {"build_model": lambda: Model(8, 8), "loader": loader}
    exec(compile(program, "README.md", "exec"), namespace)
    return namespace


def test_the_readmes_diff_runs_before_and_after():
    before, after = run_readme_diff("+"), run_readme_diff("-")
    assert type(before["optimizer"]).__name__ == "AdamW"
    optimizer = after["optimizer"]
    assert type(optimizer).__name__ == "FusedMainGradOptimizer"
    assert optimizer.skipped_steps == 0
    for entry in optimizer._buffers.entries:
        assert entry.main_param.dtype is torch.float32
        assert torch.isfinite(entry.main_param).all()
        assert optimizer.state[entry.param]["step"] == 3


def test_the_readme_shows_the_diff_on_its_first_screen():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```diff") < 10


@pytest.mark.parametrize(
    ("file", "num_blocks", "printed"),
    [
        ("docs/usage.md", 6, "gradient norm"),
        ("docs/custom-layers.md", 3, ""),
        ("docs/checkpoint.md", 5, ""),
        ("docs/zero.md", 1, ""),
        ("docs/backends.md", 1, "who runs it"),
        ("docs/recompute.md", 1, "22 linear layer(s) converted, 0 skipped\n['model.layers.0', 'model.layers.1']"),
    ],
)
def test_the_blocks_of_a_page_run_top_to_bottom(file, num_blocks, printed, capsys):
    found = blocks(file, "python")
    assert len(found) >= num_blocks
    namespace = {}
    for block in found:
        exec(compile(block, file, "exec"), namespace)
    assert printed in capsys.readouterr().out


def test_the_table_of_recomputation_names_every_way_that_is_tested():
    tree = ast.parse((ROOT / "tests/unit/test_recompute_matrix.py").read_text())
    (ways,) = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WAYS"
    ]
    tested = [key.value for key in ways.keys]
    rows = re.findall(r"^\| `([^`]+)` \| (?:yes|no)", (ROOT / "docs/recompute.md").read_text(), flags=re.M)
    assert rows == tested
    assert len(rows) >= 10


def test_every_link_in_the_documentation_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    targets = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text())]
    assert len(targets) > 5
    for page, link in targets:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
