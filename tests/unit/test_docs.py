"""The README's diff and every Python block of the documentation run as printed."""

import ast
import dataclasses
import json
import re
import types
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from fusedopt import MainGradConfig
from fusedopt.integrations.arguments import _FLAGS, FusedOptArguments

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
        ("docs/usage.md", 7, "gradient norm"),
        ("docs/custom-layers.md", 3, ""),
        ("docs/checkpoint.md", 5, ""),
        ("docs/zero.md", 1, ""),
        ("docs/memory.md", 1, "16.0"),
        ("docs/backends.md", 1, "who runs it"),
        ("docs/huggingface.md", 6, "0 steps skipped"),
        ("docs/moving-from.md", 6, "linear layer(s) converted"),
        ("docs/recompute.md", 1, "22 linear layer(s) converted, 0 skipped\n['model.layers.0', 'model.layers.1']"),
    ],
)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated|Could not find a config file")  # PEFT's
def test_the_blocks_of_a_page_run_top_to_bottom(file, num_blocks, printed, capsys, tmp_path, monkeypatch):
    found = blocks(file, "python")
    assert len(found) >= num_blocks
    monkeypatch.chdir(tmp_path)
    for text in blocks(file, "yaml"):
        Path("main_grad.yaml").write_text(text)
    namespace = {}
    for block in found:
        exec(compile(block, file, "exec"), namespace)
    assert printed in capsys.readouterr().out


def test_the_table_of_flags_names_every_flag_with_its_aliases_and_its_default():
    needed = {}
    for spec in dataclasses.fields(FusedOptArguments):
        names = [f"--{spec.name}", *spec.metadata.get("aliases", ())]
        default = "off" if isinstance(spec.default, bool) or spec.name == "fused_linear" else spec.default
        setting = _FLAGS.get(spec.name, spec.name)
        is_setting = setting in {field.name for field in dataclasses.fields(MainGradConfig)}
        if default is None and is_setting:
            default = getattr(MainGradConfig(), setting)
        needed[", ".join(f"`{name}`" for name in names)] = (str(default).lower(), setting if is_setting else None)
    page = (ROOT / "docs/huggingface.md").read_text()
    rows = re.findall(r"^\| (`--.*?`) \| (.*?) \| (.*?) ?\| .* \|$", page.partition("## DeepSpeed's")[0], flags=re.M)
    shown = {name: (default.strip("`"), source) for name, default, source in rows}
    assert len(needed) >= 8
    assert sorted(shown) == sorted(needed)
    for name, (default, setting) in needed.items():
        assert shown[name][0] == default, name
        assert (f"`FUSEDOPT_{setting.upper()}`" if setting else "") in shown[name][1], name
        assert bool(shown[name][1]) is bool(setting), name


def test_the_table_of_sources_names_every_setting_that_no_flag_has():
    page = (ROOT / "docs/huggingface.md").read_text()
    table = page.partition("| setting | from |")[2].partition("\n\n")[0]
    of_flags = set(_FLAGS.values())
    by_the_trainer = {"gradient_average"}  # the loss is divided already
    settings = {field.name for field in dataclasses.fields(MainGradConfig)} - of_flags - by_the_trainer
    assert settings <= set(re.findall(r"`(\w+)`", table))


def test_the_deepspeed_config_and_ours_say_the_same():
    (theirs,) = (json.loads(text) for text in blocks("docs/moving-from.md", "json"))
    (ours,) = (yaml.safe_load(text) for text in blocks("docs/moving-from.md", "yaml"))
    zero = theirs["zero_optimization"]
    assert ours == {
        "gradient_accumulation_steps": theirs["gradient_accumulation_steps"],
        "max_grad_norm": theirs["gradient_clipping"],
        "shard": ("none", "optimizer", "gradients")[zero["stage"]],
        "bucket_mib": zero["reduce_bucket_size"] * 4 // 2**20,
        "overlap_grad_reduce": zero["overlap_comm"],
    }
    assert theirs["data_types"]["grad_accum_dtype"] == "fp32"


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
