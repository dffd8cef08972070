"""FusedOptArguments: flags beside TrainingArguments, aliases, files with "auto", and every mismatch at once."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import fusedopt
from fusedopt.integrations.arguments import FusedOptArguments, Owned, name_parameters

transformers = pytest.importorskip("transformers")
cases = pytest.importorskip("tests.trainer_cases")

OWNED = (
    Owned("gradient_accumulation_steps", 4, "TrainingArguments", 1),
    Owned("max_grad_norm", 1.0, "TrainingArguments", 1.0),
)


def parse(*flags):
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, FusedOptArguments))
    return parser.parse_args_into_dataclasses(["--output_dir", "out", "--use_cpu", *flags])[1]


def resolve(content=None, folder=None, suffix="json", environ=None, **flags):
    path = None
    if content is not None:
        path = folder / f"settings.{suffix}"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    arguments = FusedOptArguments(main_grad=True, main_grad_config=str(path) if path else None, **flags)
    return arguments.to_config(OWNED, environ=environ or {})


def test_no_flag_has_a_name_of_training_arguments():
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    ours = {field.name for field in dataclasses.fields(FusedOptArguments)}
    assert "max_grad_norm" in theirs
    assert len(ours) == 11
    assert not ours & theirs


def test_without_flags_training_is_stock():
    assert parse() == FusedOptArguments()
    assert not parse().main_grad


def test_every_flag_is_parsed():
    flags = ("--main_grad", "--fused_linear", "--main_grad_shard", "optimizer", "--main_grad_backend", "torch")
    flags += ("--main_grad_main_param", "split", "--main_grad_state_dtype", "int8", "--main_grad_release", "backward")
    more = ("--main_grad_config", "f.yaml", "--recompute", "--recompute_granularity", "core_attn")
    parsed = parse(*flags, *more, "--recompute_use_reentrant")
    held = ("split", "int8", "backward")
    assert dataclasses.astuple(parsed) == (True, True, "optimizer", *held, "torch", "f.yaml", True, "core_attn", True)


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        (("--amp_master_grad",), {"main_grad": True}),
        (("--amp_master_grad", "true"), {"main_grad": True}),
        (("--amp_master_grad", "0"), {}),
        (("--main-grad", "--enable_linear_fused_grad_add"), {"main_grad": True, "fused_linear": True}),
        (("--main_grad", "--enable_linear_fused_grad_add", "1"), {"main_grad": True, "fused_linear": True}),
        (("--main_grad", "--fused_linear", "False"), {"main_grad": True, "fused_linear": False}),
    ],
)
def test_paddles_spellings_mean_the_same(flags, needed):
    assert parse(*flags) == FusedOptArguments(**needed)


@pytest.mark.parametrize("flags", [("--main_grad_shard", "all"), ("--recompute_granularity", "half")])
def test_the_parser_refuses_unknown_values(flags, capsys):
    with pytest.raises(SystemExit):
        parse("--main_grad", "--recompute", *flags)
    assert "invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        ({"fused_linear": True}, ["fused_linear=True does nothing without main_grad"]),
        ({"main_grad_shard": "optimizer"}, ["main_grad_shard='optimizer' does nothing without main_grad"]),
        ({"main_grad_backend": "torch"}, ["main_grad_backend='torch' does nothing without main_grad"]),
        ({"main_grad_config": "x.json"}, ["main_grad_config='x.json' does nothing without main_grad"]),
        ({"recompute_granularity": "core_attn"}, ["does nothing without recompute"]),
        ({"recompute": True, "recompute_granularity": "half"}, ["use one of full, full_attn, core_attn"]),
        (
            {"fused_linear": True, "recompute_use_reentrant": True, "main_grad_shard": "gradients"},
            ["fused_linear", "recompute_use_reentrant", "main_grad_shard"],
        ),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused_and_all_are_named(flags, problems):
    with pytest.raises(ValueError, match="do not fit together") as caught:
        FusedOptArguments(**flags)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + len(problems)
    assert all(any(problem in line for line in lines) for problem in problems)


def test_what_training_arguments_own_comes_from_there():
    config = resolve()
    assert (config.gradient_accumulation_steps, config.max_grad_norm) == (1, 1.0)
    assert config == fusedopt.MainGradConfig(max_grad_norm=1.0)


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_a_file_may_say_auto_or_the_same(tmp_path, suffix):
    same = {"gradient_accumulation_steps": "auto", "max_grad_norm": 1.0, "bucket_mib": 3, "shard": "optimizer"}
    text = json.dumps(same) if suffix == "json" else "".join(f"{key}: {value}\n" for key, value in same.items())
    config = resolve(text, tmp_path, suffix)
    assert config == fusedopt.MainGradConfig(max_grad_norm=1.0, bucket_mib=3, shard="optimizer")
    assert resolve({"gradient_accumulation_steps": "4", "max_grad_norm": "Auto"}, tmp_path).max_grad_norm == 1.0


@pytest.mark.parametrize("off", [None, 0, 0.0, "none", "null", "inf"])
def test_no_clipping_has_many_spellings(tmp_path, off):
    owned = [Owned("max_grad_norm", 0.0, "TrainingArguments", float("inf"))]
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"max_grad_norm": off}))
    arguments = FusedOptArguments(main_grad=True, main_grad_config=str(path))
    assert arguments.to_config(owned, environ={}).max_grad_norm == float("inf")
    with pytest.raises(ValueError, match=r"TrainingArguments has 1\.0"):
        arguments.to_config(OWNED, environ={})


def test_flags_go_above_the_file_and_the_file_above_the_environment(tmp_path):
    environ = {"FUSEDOPT_BUCKET_MIB": "7", "FUSEDOPT_SHARD": "gradients", "FUSEDOPT_NONFINITE": "raise"}
    config = resolve({"bucket_mib": 5, "shard": "optimizer"}, tmp_path, environ=environ, main_grad_shard="none")
    assert (config.shard, config.bucket_mib, config.nonfinite) == ("none", 5, "raise")


def test_all_mismatches_and_bad_values_are_told_at_once_with_their_origin(tmp_path):
    content = {"gradient_accumulation_steps": 8, "max_grad_norm": 0.5, "bucket_mb": 3, "nonfinite": "stop"}
    with pytest.raises(ValueError, match="cannot be built") as caught:
        resolve(content, tmp_path, environ={"FUSEDOPT_MAX_GRAD_NORM": "2"}, main_grad_backend="cuda")
    lines = str(caught.value).splitlines()[1:]
    needed = [
        "gradient_accumulation_steps=8 (file",
        "max_grad_norm=0.5 (file",
        "max_grad_norm='2' (environment variable FUSEDOPT_MAX_GRAD_NORM): TrainingArguments has 1.0",
        "bucket_mb (file",
        "nonfinite='stop' (file",
        "backend='cuda' (flag): needed one of",
    ]
    assert len(lines) == len(needed)
    for problem in needed:
        assert any(problem in line for line in lines), problem


@pytest.mark.parametrize("value", [True, "many", [1], float("nan")])
def test_what_is_no_number_is_a_mismatch(tmp_path, value):
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        resolve({"gradient_accumulation_steps": value}, tmp_path)


def test_a_missing_file_is_said():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.json"):
        FusedOptArguments(main_grad=True, main_grad_config="nowhere.json").to_config()


def test_wrap_names_parameters_converts_and_undoes_nothing_half(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    arguments = FusedOptArguments(main_grad=True, fused_linear=True)
    wrapper = arguments.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), arguments.to_config(OWNED, environ={}))
    assert wrapper.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(type(layer) is fusedopt.FusedLinear for layer in model)
    assert wrapper.config.max_grad_norm == 1.0


def test_a_flag_without_a_layer_to_act_on_is_refused_and_nothing_is_left():
    model = nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4))
    arguments = FusedOptArguments(main_grad=True, fused_linear=True)
    config = arguments.to_config(OWNED, environ={})
    with pytest.raises(ValueError, match="Sequential has no linear layer to fuse") as caught:
        arguments.wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    assert not any(hasattr(param, "main_grad") for param in model.parameters())
    assert caught.tb is not None  # it keeps the frames, and what is in them, alive
    with pytest.raises(ValueError, match="no decoder layer"):
        FusedOptArguments(recompute=True).prepare_layers(model, fused_linear=False)


def test_recomputation_is_taken_off_again_where_fused_linear_finds_no_layer():
    model = cases.make_model()
    for name, param in model.named_parameters():
        param.requires_grad_("proj" not in name and "head" not in name)
    flags = FusedOptArguments(main_grad=True, recompute=True, fused_linear=True)
    flags.prepare_layers(model, fused_linear=False)
    layer = model.model.layers[0]
    assert "forward" in vars(layer)
    with pytest.raises(ValueError, match="no linear layer to fuse"):
        flags.prepare_layers(model, fused_linear=True)
    assert "forward" not in vars(layer)


def test_names_are_left_alone_where_there_are_some_or_a_parameter_is_foreign():
    model, foreign = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    named = torch.optim.SGD([("mine", model.weight)], lr=1.0)
    name_parameters(model, named)
    assert named.param_groups[0]["param_names"] == ["mine"]
    mixed = torch.optim.SGD([model.weight, foreign], lr=1.0)
    name_parameters(model, mixed)
    assert "param_names" not in mixed.param_groups[0]


def test_importing_the_integration_loads_no_transformers():
    script = (
        "import sys, fusedopt.integrations.transformers as i; i.FusedOptArguments(main_grad=True); i.FusedOptMixin;"
        "print('transformers' in sys.modules, 'accelerate' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_unknown_name_in_the_module_is_an_attribute_error():
    import fusedopt.integrations.transformers as integration

    with pytest.raises(AttributeError, match="Fused0ptTrainer"):
        _ = integration.Fused0ptTrainer
    assert integration.FusedOptTrainer is integration.FusedOptTrainer
    assert integration.FusedOptTrainer.__mro__[1:3] == (integration.FusedOptMixin, transformers.Trainer)
