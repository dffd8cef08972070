"""The diffs of docs/huggingface.md applied to a script in the style of transformers' run_clm: two lines, then flags."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.deep import IS_DEEP
from tests.scripts import ROOT, run_script

STOCK = (Path(__file__).parent / "clm_script.py").read_text()
STEPS, LINES = 4, 60
ARGUMENTS = {
    "do_train": True,
    "do_eval": True,
    "max_steps": STEPS,
    "save_steps": STEPS,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-2,
    "max_eval_samples": 8,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}


def diffs():
    """Return the page's diffs: the two lines, and the flags."""
    return re.findall(r"^```diff\n(.*?)^```", (ROOT / "docs/huggingface.md").read_text(), flags=re.M | re.S)


def hunks(diff):
    """Return for each hunk of a diff the lines that it takes and those that it gives."""
    for hunk in re.split(r"^ \.\.\.\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        yield tuple("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))


def patched(source, diff):
    """Apply a diff as `patch` would; every hunk has to fit in one place."""
    for before, after in hunks(diff):
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def changed_lines(before, after):
    return len(set(after.splitlines()) - set(before.splitlines()))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A tiny random LLaMA in bf16 with a tokenizer, and text: whole words, so that a few steps learn them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("inputs")
    words = ["?", "to", "be", "or", "not", "that", "is", "the", "question", "whether", "tis", "nobler", "in", "mind"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=64, **sizes))
    model.bfloat16().save_pretrained(folder / "model")
    drawn = torch.randint(1, len(words), (LINES, 40), generator=torch.Generator().manual_seed(1)).tolist()
    (folder / "text.txt").write_text("\n".join(" ".join(words[i] for i in sorted(line)) for line in drawn))
    return folder


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The stock script, and what the page's diffs make of it."""
    folder = tmp_path_factory.mktemp("scripts")
    two_lines, flags = diffs()
    sources = {"stock": STOCK, "two_lines": patched(STOCK, two_lines)}
    sources["flags"] = patched(sources["two_lines"], flags)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    return folder


@pytest.fixture(scope="module")
def ran(scripts, inputs, tmp_path_factory):
    """Return a function that runs one of the scripts from a JSON file, as run_clm does, and returns what it left."""
    done = {}

    def run(name, *, num_ranks=1, **flags):
        key = (name, num_ranks, *sorted(flags.items()))
        if key not in done:
            output = tmp_path_factory.mktemp(name)
            done[key] = start(scripts / f"{name}.py", inputs, output, num_ranks, flags)
        return done[key]

    return run


def start(script, inputs, output, num_ranks, flags):
    files = {name: str(inputs / "text.txt") for name in ("train_file", "validation_file")}
    paths = {"output_dir": str(output / "run"), "model_name_or_path": str(inputs / "model"), **files}
    (output / "flags.json").write_text(json.dumps({**ARGUMENTS, **paths, **flags}))
    ended = run_script(script, str(output / "flags.json"), num_ranks=num_ranks, is_real=IS_DEEP and num_ranks > 1)
    assert ended.returncode == 0, ended.stderr
    return Run(output / "run")


class Run:
    """What one run of a script left in its folder."""

    def __init__(self, folder):
        self.folder = folder
        self.weights = load_file(folder / "model.safetensors")
        self.results = json.loads((folder / "all_results.json").read_text())
        saved = torch.load(folder / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
        self.states = list(saved["state"].values())
        logs = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        self.losses = [log["loss"] for log in logs if "loss" in log]
        self.norms = [log["grad_norm"] for log in logs if "grad_norm" in log]


def assert_trained(run, inputs):
    before = load_file(inputs / "model" / "model.safetensors")
    assert len(run.losses) == len(run.norms) == STEPS
    assert all(math.isfinite(value) for value in (*run.losses, *run.norms, run.results["perplexity"]))
    assert run.losses[-1] < run.losses[0] - 0.05
    assert 0 <= run.results["eval_accuracy"] <= 1
    assert sorted(run.weights) == sorted(before)
    assert all(weight.dtype is torch.bfloat16 for weight in run.weights.values())
    assert any(not torch.equal(weight, before[name]) for name, weight in run.weights.items())


def trains_in_main_grad(run):
    return [state.get("main_param", torch.empty(0, dtype=torch.bfloat16)).dtype for state in run.states] == [
        torch.float32
    ] * len(run.states)


def test_the_first_diff_is_two_lines_and_the_second_four_more():
    two_lines, flags = diffs()
    added = [[line for line in diff.splitlines() if line.startswith("+")] for diff in (two_lines, flags)]
    assert [len(lines) for lines in added] == [2, 4]
    once = patched(STOCK, two_lines)
    assert changed_lines(STOCK, once) == 2
    assert changed_lines(once, patched(once, flags)) == 4
    assert "fusedopt" not in STOCK
    with pytest.raises(AssertionError):
        patched(STOCK.replace("trainer = Trainer(", "trainer = Other("), two_lines)


def test_two_lines_make_a_stock_script_train_in_main_grad(ran, inputs):
    stock, ours = ran("stock"), ran("two_lines")
    assert_trained(stock, inputs)
    assert_trained(ours, inputs)
    assert not trains_in_main_grad(stock)
    assert all(state["exp_avg"].dtype is torch.bfloat16 for state in stock.states)
    assert trains_in_main_grad(ours)
    assert all(state["exp_avg"].dtype is torch.float32 for state in ours.states)
    assert ours.losses[0] == stock.losses[0]  # the same batches, from the same weights
    assert ours.losses[1:] != stock.losses[1:]


def test_with_flags_the_script_is_stock_without_them_and_the_two_lines_with_one(ran, inputs):
    off, on = ran("flags"), ran("flags", main_grad=True)
    assert not trains_in_main_grad(off)
    assert off.losses == ran("stock").losses
    assert trains_in_main_grad(on)
    assert on.losses == ran("two_lines").losses
    assert all(torch.equal(on.weights[name], weight) for name, weight in ran("two_lines").weights.items())


def test_layer_flags_and_a_shard_under_two_ranks_reach_the_same_losses(ran, inputs):
    # Half the accumulation: the Trainer counts it for each rank.
    flags = {"main_grad": True, "main_grad_shard": "gradients", "fused_linear": True, "recompute": True}
    run = ran("flags", num_ranks=2, gradient_accumulation_steps=2, **flags)
    assert_trained(run, inputs)
    assert trains_in_main_grad(run)
    for got, want in zip(run.losses, ran("two_lines").losses, strict=True):
        assert abs(got - want) < 2**-8 * want * STEPS  # a bf16 step of the forward, and what weights rounded so far
