"""The example under torch's engines reaches the losses and the weights of one rank: the lines of docs/parallel.md."""

import itertools
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.deep import IS_DEEP
from tests.scripts import ROOT, run_script

LINES = re.findall(r"^    (.*examples/llama/engines\.py.*)$", (ROOT / "docs/parallel.md").read_text(), flags=re.M)
FEW = (
    *("--base_steps", "2", "--max_steps", "2", "--learning_rate", "1e-4", "--block_size", "64"),
    *("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4", "--dtype", "float32"),
)


def start(line, output_dir, **settings):
    """Run a line of the page, with flags that make it short."""
    found = re.fullmatch(r"(?:python|torchrun --nproc_per_node (\d)) (examples/llama/engines\.py)(.*)", line)
    num_ranks, script, flags = found.groups(default="1")
    flags = (*flags.split(), *FEW, "--output_dir", str(output_dir))
    return run_script(ROOT / script, *flags, num_ranks=int(num_ranks), **settings)


def losses_in(output_dir, engine):
    return json.loads((output_dir / f"engine-{engine}.json").read_text())["losses"]


def distance(output_dir, one, other):
    """Return how far the weights of two models are apart, as one vector each."""
    here, there = (load_file(output_dir / name / "model.safetensors") for name in (one, other))
    assert here.keys() == there.keys()
    return math.sqrt(sum(float((here[key].double() - there[key].double()).square().sum()) for key in here))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    output_dir = tmp_path_factory.mktemp("engines")
    done = start(LINES[0], output_dir)
    assert done.returncode == 0, done.stderr
    losses = losses_in(output_dir, "none")
    assert min(abs(a - b) for a, b in itertools.pairwise(losses)) > 1e-2  # it did train
    return output_dir, losses


def after_engine(line):
    return line.partition("--engine ")[2]


def test_the_page_names_one_rank_and_every_engine():
    assert LINES[0] == "python examples/llama/engines.py"
    assert [(line.split()[2], after_engine(line)) for line in LINES[1:]] == [
        ("2", "fsdp2"),
        ("2", "tensor"),
        ("4", "tensor --main_grad_shard optimizer"),
        ("2", "pipeline"),
        ("4", "pipeline --main_grad_shard optimizer"),
    ]


@pytest.mark.parametrize("line", [*LINES[1:], LINES[-1].replace("optimizer", "gradients")], ids=after_engine)
def test_ranks_reach_the_losses_of_one(one_rank, line):
    output_dir, losses = one_rank
    engine = after_engine(line).split()[0]
    done = start(line, output_dir, is_real=IS_DEEP and engine == "fsdp2")
    assert done.returncode == 0, done.stderr
    found = losses_in(output_dir, engine)
    assert all(map(math.isfinite, found))
    # fp32 sums in another order: 1e-6 of the logits at most, and less of the mean of their losses over 256 tokens.
    assert found == pytest.approx(losses, rel=1e-5)
    # AdamW divides by roots, which lets rounding through where a gradient is nearly zero: 1e-5 of the way was measured.
    # Micro-batches dropped or counted twice turn it by tenths.
    assert distance(output_dir, engine, "none") < 1e-3 * distance(output_dir, "base", "none")
    assert done.stdout.count("losses:") == 1  # the first rank alone
    assert "destroy_process_group" not in done.stderr  # which torch would say if one were left


def tiny(**settings):
    torch.manual_seed(0)
    shape = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=5, **settings))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_one_after_another_are_the_model_bit_for_bit(monkeypatch, num_stages):
    monkeypatch.syspath_prepend(ROOT / "examples/llama")
    import pipeline_stages

    whole, parts = tiny(), [tiny() for _ in range(num_stages)]
    tokens = torch.randint(16, (3, 7))
    given = tokens
    for index, part in enumerate(parts):
        pipeline_stages.keep_stage(part, index, num_stages)
        given = pipeline_stages.Stage(part, index == 0)(given)
    logits = whole(input_ids=tokens).logits
    assert logits.isfinite().all()
    assert torch.equal(given, logits)
    for output in (given, logits):
        output.square().sum().backward()
    held = [dict(part.named_parameters()) for part in parts]
    assert [name for params in held for name in params] == [name for name, _ in whole.named_parameters()]  # each once
    for params in held:
        assert all(torch.equal(param.grad, whole.get_parameter(name).grad) for name, param in params.items())


@pytest.mark.parametrize(
    ("settings", "num_stages", "found"),
    [
        ({}, 6, "5 layers do not make --pipeline_parallel 6 stages"),
        ({"tie_word_embeddings": True}, 2, "the embedding and the head of this model are one weight"),
    ],
)
def test_what_does_not_suit_the_stages_is_said(monkeypatch, settings, num_stages, found):
    monkeypatch.syspath_prepend(ROOT / "examples/llama")
    import pipeline_stages

    with pytest.raises(SystemExit, match=found):
        pipeline_stages.keep_stage(tiny(**settings), 0, num_stages)


@pytest.mark.parametrize(
    ("flags", "num_ranks", "found"),
    [
        ({"engine": "fsdp2"}, 1, "--engine fsdp2 splits the model over ranks; start it with torchrun"),
        ({"engine": "tensor", "tensor_parallel": 3}, 2, "--tensor_parallel 3 does not divide 2 ranks"),
        ({"engine": "pipeline"}, 1, "--engine pipeline splits the model over ranks; start it with torchrun"),
        ({"engine": "pipeline", "pipeline_parallel": 3}, 4, "--pipeline_parallel 3 does not divide 4 ranks"),
        ({"engine": "fsdp2"}, 3, "--gradient_accumulation_steps is 8; give a multiple of the 3 replicas"),
        ({"engine": "pipeline"}, 6, "--gradient_accumulation_steps is 8; give a multiple of the 3 replicas"),
        ({"engine": "pipeline", "gradient_accumulation_steps": 2}, 4, "steps is 2; 1F1B needs 4, one for each stage"),
        ({"engine": "fsdp2", "main_grad_shard": "optimizer"}, 2, "--main_grad_shard optimizer with --engine fsdp2"),
    ],
)
def test_what_does_not_suit_the_engine_is_said(monkeypatch, flags, num_ranks, found):
    monkeypatch.syspath_prepend(ROOT / "examples/llama")
    import engines

    with pytest.raises(SystemExit) as caught:
        engines.check_engine(engines.EngineArguments(**flags), num_ranks)
    assert found in str(caught.value)
