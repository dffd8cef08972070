"""The example over transformers' Trainer: as its README starts it, with every layer flag, on one rank and on two."""

import json
import math
import re
import shlex
import sys
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file

from fusedopt.integrations.arguments import FusedOptArguments
from tests.deep import IS_DEEP
from tests.scripts import ROOT, run_script

EXAMPLE = ROOT / "examples" / "llama"
SCRIPT = EXAMPLE / "finetune_trainer.py"
STEPS = 3
FEW = (
    *("--max_steps", str(STEPS), "--save_strategy", "steps", "--save_steps", str(STEPS), "--learning_rate", "1e-3"),
    *("--block_size", "32", "--eval_fraction", "0.02", "--warmup_steps", "0", "--per_device_train_batch_size", "1"),
    *("--logging_steps", "1", "--disable_tqdm", "true"),
)
LAYERS = ("--fused_linear", "--recompute", "--recompute_granularity", "core_attn", "--recompute_use_reentrant")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny checkpoint in bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    directory = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def ran(base, tmp_path_factory):
    """Return a function that runs the script, once for the same flags; deep, two ranks under torchrun itself."""
    done = {}

    def run(*flags, num_ranks=1):
        is_real = IS_DEEP and num_ranks > 1
        if (num_ranks, flags) not in done:
            output_dir = tmp_path_factory.mktemp("out") / "trainer"
            paths = ("--model_name_or_path", str(base), "--output_dir", str(output_dir))
            ended = run_script(SCRIPT, *flags, *FEW, *paths, num_ranks=num_ranks, is_real=is_real)
            assert ended.returncode == 0, ended.stderr
            done[num_ranks, flags] = Run(output_dir, ended.stdout, ended.stderr)
        return done[num_ranks, flags]

    return run


class Run:
    """What one run of the script left."""

    def __init__(self, output_dir, printed, stderr):
        self.output_dir, self.printed, self.stderr = output_dir, printed, stderr
        self.weights = load_file(output_dir / "model.safetensors")
        self.saved = torch.load(output_dir / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
        logs = json.loads((output_dir / "trainer_state.json").read_text())["log_history"]
        self.eval_losses = [log["eval_loss"] for log in logs if "eval_loss" in log]
        self.losses = [log["loss"] for log in logs if "loss" in log]
        self.norms = [log["grad_norm"] for log in logs if "grad_norm" in log]

    @property
    def has_main_params(self):
        return all("main_param" in state for state in self.saved["state"].values())


def assert_trained(run):
    assert len(run.losses) == len(run.norms) == STEPS
    assert all(math.isfinite(value) for value in (*run.losses, *run.norms, *run.eval_losses))
    assert min(run.norms) > 0
    assert run.eval_losses[-1] < run.eval_losses[0] - 1e-2
    assert all(weight.dtype is torch.bfloat16 for weight in run.weights.values())


def test_one_flag_trains_in_main_grad_and_none_is_stock(ran):
    stock, ours = ran(), ran("--main_grad")
    assert_trained(stock)
    assert_trained(ours)
    assert ours.has_main_params
    assert all(state["main_param"].dtype is torch.float32 for state in ours.saved["state"].values())
    assert not any("main_param" in state for state in stock.saved["state"].values())
    assert re.search(r"^18\.\d bytes per parameter on this rank, 0 steps skipped$", ours.printed, flags=re.M)
    assert "bytes per parameter" not in stock.printed
    assert stock.eval_losses[0] == ours.eval_losses[0]  # from the same weights


def test_recomputation_changes_no_bit_and_fused_layers_only_rounding(ran):
    fused, both = ran("--main_grad", "--fused_linear"), ran("--main_grad", *LAYERS)
    plain = ran("--main_grad")
    assert_trained(both)
    assert both.losses == fused.losses
    assert all(torch.equal(both.weights[name], weight) for name, weight in fused.weights.items())
    assert fused.losses != plain.losses  # they did run
    for got, want in zip(fused.losses, plain.losses, strict=True):
        assert abs(got - want) < 2**-8 * want  # one bf16 step, what the forward itself rounds by


def test_two_ranks_reach_the_losses_of_one(ran):
    one = ran("--main_grad", "--fused_linear", "--gradient_accumulation_steps", "8")
    flags = ("--main_grad", "--main_grad_shard", "gradients", *LAYERS, "--gradient_accumulation_steps", "4")
    two = ran(*flags, num_ranks=2)
    assert_trained(two)
    assert two.has_main_params
    # The same eight windows in each step, summed in fp32 in another order: a few bf16 weights round the other way.
    for got, want in zip(two.losses, one.losses, strict=True):
        assert abs(got - want) < 2**-8 * want
    assert re.findall(r"^(\d+)\.\d bytes per parameter", two.printed, flags=re.M) == [
        "10"
    ]  # 2 + 16/2; one rank says it
    assert "destroy_process_group() was not called" not in two.stderr


def test_the_script_is_under_200_lines():
    assert len(SCRIPT.read_text().splitlines()) < 200


def test_both_scripts_call_a_flag_by_one_name(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    from arguments import TrainArguments
    from layers import LayerArguments

    ours = {field.name for field in fields(FusedOptArguments)}
    of_layers = {field.name for field in fields(LayerArguments)}
    of_training = {field.name for field in fields(TrainArguments) if field.name.startswith("main_grad")}
    assert len(of_layers) >= 4
    assert len(of_training) >= 2
    assert of_layers | of_training <= ours


def commands():
    """Every command line of this script in its README, in its docstring and on the page that shows it."""
    texts = [(EXAMPLE / "README.md").read_text(), SCRIPT.read_text(), (ROOT / "docs" / "huggingface.md").read_text()]
    joined = "\n".join(texts).replace("\\\n", " ")
    return re.findall(r"finetune_trainer\.py((?: +[-\w./]+)*)(?: +#.*)?$", joined, flags=re.M)


def test_every_command_that_is_shown_parses(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    import finetune_trainer

    shown = sorted(set(commands()))
    assert len(shown) >= 3
    assert any("--main_grad_shard" in flags for flags in shown)
    for flags in shown:
        monkeypatch.setattr(sys, "argv", ["finetune_trainer.py", *shlex.split(flags)])
        fusedopt_args = finetune_trainer.read_arguments()[-1]
        assert fusedopt_args.main_grad is ("--main_grad" in flags.split())
