"""The README's diff and every Python block of the documentation run as printed."""

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


@pytest.mark.parametrize("file", ["docs/usage.md"])
def test_the_blocks_of_a_page_run_top_to_bottom(file, capsys):
    found = blocks(file, "python")
    assert len(found) >= 6
    namespace = {}
    for block in found:
        exec(compile(block, file, "exec"), namespace)
    assert "gradient norm" in capsys.readouterr().out


def test_every_link_in_the_documentation_leads_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    targets = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text())]
    assert len(targets) > 5
    for page, link in targets:
        if not link.startswith("http"):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
