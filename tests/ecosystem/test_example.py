"""The example in examples/llama runs as its README says, and its numbers are what it says they are.

The runs are short: a base of three steps, three steps of fine-tuning. They need fusedopt.
"""

import json
import math

import matplotlib.image
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig

from tests.scripts import ROOT, run_script

EXAMPLE = ROOT / "examples" / "llama"
SCRIPT = EXAMPLE / "finetune.py"
RUNS = ("fp32", "plain bf16", "bf16 + fusedopt")
FEW = (
    *("--base_steps", "3", "--max_steps", "3", "--warmup_steps", "0", "--eval_steps", "2"),
    *("--block_size", "64", "--per_device_train_batch_size", "1", "--eval_fraction", "0.01"),
)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("comparison")
    done = run_script(SCRIPT, "--compare", *FEW, "--output_dir", str(output_dir))
    assert done.returncode == 0, done.stderr
    return output_dir, done.stdout, json.loads((output_dir / "comparison.json").read_text())


@pytest.fixture
def modules(monkeypatch):
    """The example's helper modules, importable as its script imports them."""
    monkeypatch.syspath_prepend(EXAMPLE)


def changed_share(base, tuned):
    """The share of weights in which two bf16 checkpoints differ, from their files alone."""
    before, after = (load_file(d / "model.safetensors") for d in (base, tuned))
    assert before.keys() == after.keys()
    assert all(t.dtype is torch.bfloat16 for t in (*before.values(), *after.values()))
    return sum(int((before[n] != after[n]).sum()) for n in before) / sum(t.numel() for t in before.values())


def test_the_comparison_records_three_finite_curves_from_one_start(comparison):
    _, _, record = comparison
    assert tuple(r["name"] for r in record["runs"]) == RUNS
    for result in record["runs"]:
        assert [step for step, _ in result["curve"]] == [0, 2, 3]
        assert all(math.isfinite(loss) for _, loss in result["curve"])
        assert result["start_loss"] == result["curve"][0][1]
        assert result["final_loss"] == result["curve"][-1][1]
    fp32, plain, fused = (r["start_loss"] for r in record["runs"])
    assert plain == fused
    assert abs(fp32 - fused) < 2**-8 * fp32  # one bf16 step: the weights are the same, the forward is rounded


def test_the_comparison_prints_a_table_of_what_it_recorded(comparison):
    _, printed, record = comparison
    for result in record["runs"]:
        (line,) = [line for line in printed.splitlines() if line.startswith(result["name"] + " ")]
        cells = line[len(result["name"]) :].split()
        assert cells[:3] == [
            f"{result['start_loss']:.4f}",
            f"{result['final_loss']:.4f}",
            f"{result['changed_share']:.1%}",
        ]


def test_the_comparison_draws_a_picture(comparison):
    output_dir, _, _ = comparison
    picture = matplotlib.image.imread(output_dir / "comparison.png")
    assert picture.shape[0] >= 400
    assert picture.shape[1] >= 800
    pixels = (picture[..., :3] * 255).round().astype(int)
    for color in ((0x99, 0x99, 0x99), (0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2)):
        assert (pixels == color).all(axis=-1).any()  # this run's curve is there


def test_plain_bf16_leaves_more_weights_unmoved_than_fusedopt(comparison):
    output_dir, _, record = comparison
    plain, fused = (changed_share(output_dir / "base", output_dir / d) for d in ("plain-bf16", "bf16-fusedopt"))
    assert [plain, fused] == [r["changed_share"] for r in record["runs"][1:]]
    assert 0 < plain < fused < 1


def test_a_single_run_reuses_the_base_of_the_comparison(comparison):
    output_dir, _, record = comparison
    weights = output_dir / "base" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    done = run_script(SCRIPT, *FEW, "--output_dir", str(output_dir), is_real=True)  # fusedopt is the default
    assert done.returncode == 0, done.stderr
    assert "base: reused" in done.stdout
    assert weights.stat().st_mtime_ns == written
    (result,) = json.loads((output_dir / "results.json").read_text())["runs"]
    compared = record["runs"][2]
    assert result["name"] == compared["name"]
    assert result["curve"] == compared["curve"]


def test_a_missing_checkpoint_directory_is_named_in_one_line(tmp_path):
    done = run_script(SCRIPT, "--model_name_or_path", str(tmp_path / "nowhere"), "--output_dir", str(tmp_path))
    assert done.returncode == 1
    assert f"--model_name_or_path {tmp_path / 'nowhere'} is not a local directory; give" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_is_under_200_lines():
    assert len(SCRIPT.read_text().splitlines()) < 200


@pytest.mark.usefixtures("modules")
def test_the_base_is_made_again_when_its_settings_differ(tmp_path, monkeypatch, capsys):
    import base_model

    trained = []

    def train_base(tokens, steps, device, **settings):
        trained.append(steps)
        return base_model.LlamaForCausalLM(LlamaConfig(**base_model.SHAPE))

    monkeypatch.setattr(base_model, "train_base", train_base)
    text, cpu = EXAMPLE / "sonnets.txt", torch.device("cpu")
    for steps in (1, 1, 2):
        base_model.make_base(tmp_path / "base", text, steps, cpu)
    assert trained == [1, 2]
    assert capsys.readouterr().out.count("base: reused") == 1


@pytest.mark.usefixtures("modules")
def test_a_checkpoint_that_cannot_be_used_is_refused_with_the_reason(tmp_path):
    from base_model import check_llama_dir
    from text_data import read_tokens, split_tokens

    with pytest.raises(SystemExit, match=r"has no config\.json"):
        check_llama_dir(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit, match="'gpt2', not 'llama'"):
        check_llama_dir(str(tmp_path))
    LlamaConfig(vocab_size=100, max_position_embeddings=64).save_pretrained(tmp_path)
    assert check_llama_dir(str(tmp_path)) == tmp_path
    with pytest.raises(SystemExit, match="vocabulary of 100 is too small for bytes"):
        read_tokens(EXAMPLE / "sonnets.txt", tmp_path, 64)
    with pytest.raises(SystemExit, match="takes 2 to 64"):
        read_tokens(EXAMPLE / "sonnets.txt", tmp_path, 65)
    with pytest.raises(SystemExit, match="missing or empty"):
        read_tokens(tmp_path / "none.txt", tmp_path, 64)
    with pytest.raises(SystemExit, match="90 tokens for training and 10 held out"):
        split_tokens(torch.arange(100), 0.1, 16)


@pytest.mark.usefixtures("modules")
def test_a_checkpoint_with_a_tokenizer_reads_the_text_with_it(tmp_path):
    from text_data import read_tokens
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    LlamaConfig(vocab_size=5).save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be quoted")
    assert read_tokens(text, tmp_path, 4).tolist() == [1, 2, 3, 4, 1, 2, 0]


@pytest.mark.usefixtures("modules")
def test_held_out_windows_and_training_tokens_do_not_overlap():
    from text_data import TokenWindows, split_tokens

    train, windows = split_tokens(torch.arange(1000), 0.1, 32)
    assert train.tolist() == list(range(900))
    assert windows.flatten().tolist() == list(range(900, 996))
    first, again = (list(zip(range(50), TokenWindows(train, 32, 4, seed=3), strict=False)) for _ in range(2))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, again, strict=True))
    drawn = torch.stack([batch for _, batch in first])
    assert drawn.shape == (50, 4, 32)
    assert 0 <= drawn.min() < drawn.max() <= 899
    assert (drawn.diff() == 1).all()


@pytest.mark.usefixtures("modules")
def test_the_title_says_what_the_losses_say():
    from report import RunResult, finding

    def ran(name, final):
        return RunResult(name, [(0, 2.0), (40, final)], changed_share=0.5, train_seconds=1.0)

    good = [ran("a", 1.9), ran("b", 1.99), ran("c", 1.901)]
    assert finding(good) == "Of the 0.100 that a takes off the loss: b 10%, c 99%"
    bad = [ran("a", 1.9), ran("b", 1.8), ran("c", 2.05)]
    assert finding(bad) == "Of the 0.100 that a takes off the loss: b 200%, c -50%"
    assert "did not lower" in finding([ran("a", 2.0), ran("b", 1.9)])
    assert "did not lower" in finding([ran("a", math.nan), ran("b", 1.9)])


@pytest.mark.usefixtures("modules")
def test_bf16_linears_through_fp32_are_the_exact_product_rounded_to_bf16(monkeypatch):
    from cpu_bf16 import fast_bf16_linears

    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    layer = nn.Linear(32, 16, bias=False, dtype=torch.bfloat16)
    x = torch.randn(8, 32, dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn(8, 16, dtype=torch.bfloat16)
    with fast_bf16_linears(cpu):
        out = layer(x)
    out.backward(grad_output)
    x64, w64, g64 = (t.detach().double() for t in (x, layer.weight, grad_output))
    for got, left, right in ((out, x64, w64.T), (x.grad, g64, w64), (layer.weight.grad, g64.T, x64)):
        exact = left @ right
        sums = left.shape[1] * 2**-24 * (left.abs() @ right.abs())  # n * u * sum |a||b|
        assert got.dtype is torch.bfloat16
        assert ((got - exact).abs() <= sums + 2**-8 * (exact.abs() + sums)).all()

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    with fast_bf16_linears(cpu) as context:
        assert context is None  # a CPU that has bf16 instructions keeps its own products
