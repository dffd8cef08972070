"""The example under torchrun reaches the losses of one process, and leaves its process group on every path."""

import itertools
import json

import pytest

from tests.scripts import ROOT, run_script

SCRIPT = ROOT / "examples" / "llama" / "finetune.py"
FEW = (
    *("--base_steps", "3", "--max_steps", "3", "--warmup_steps", "0", "--eval_steps", "1", "--learning_rate", "1e-4"),
    *("--block_size", "64", "--per_device_train_batch_size", "1", "--eval_fraction", "0.01"),
    *("--gradient_accumulation_steps", "4"),
)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("one")
    done = run_script(SCRIPT, *FEW, "--output_dir", str(output_dir))
    assert done.returncode == 0, done.stderr
    return curve_in(output_dir)


def curve_in(output_dir):
    (run,) = json.loads((output_dir / "results.json").read_text())["runs"]
    assert run["curve"][0][1] != run["curve"][-1][1]  # it did train
    return run["curve"]


@pytest.mark.parametrize(("shard", "is_real"), [("optimizer", True), ("gradients", False)])
def test_two_ranks_reach_the_losses_of_one_process(one_process, shard, is_real, tmp_path):
    flags = ("--output_dir", str(tmp_path), "--main_grad_shard", shard)
    done = run_script(SCRIPT, *FEW, *flags, num_ranks=2, is_real=is_real)
    assert done.returncode == 0, done.stderr
    # The same four micro-batches in each step, summed in fp32 in another order: a relative change of at most 4 * 2**-24
    # of each sum, by which a few of 1.9 M bf16 weights round the other way. One step of learning moves the loss more.
    assert curve_in(tmp_path) == [[step, pytest.approx(loss, abs=1e-4)] for step, loss in one_process]
    assert min(abs(a[1] - b[1]) for a, b in itertools.pairwise(one_process)) > 2e-4
    assert "destroy_process_group" not in done.stderr  # which torch would say if one were left
    assert done.stdout.count("wrote") == 1  # the first rank alone


def test_what_ranks_cannot_share_is_said_and_the_process_group_is_left(tmp_path):
    flags = ("--output_dir", str(tmp_path), "--gradient_accumulation_steps", "3")
    done = run_script(SCRIPT, *FEW, *flags, num_ranks=2)
    assert done.returncode != 0
    assert "--gradient_accumulation_steps is 3, and 2 ranks cannot share that evenly" in done.stderr
    assert "destroy_process_group() was not called" not in done.stderr
