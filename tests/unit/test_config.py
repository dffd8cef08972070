"""Claims about MainGradConfig: its defaults, the ways in, which of them wins, and what it refuses."""

import argparse
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusedopt import config
from fusedopt.config import MainGradConfig

FIELDS = {  # its default; then another value, as text and as what the text means
    "gradient_accumulation_steps": (1, "4", 4),
    "gradient_average": (True, "off", False),
    "max_grad_norm": (None, "0.5", 0.5),
    "nonfinite": ("skip", "raise", "raise"),
    "backend": ("auto", "torch", "torch"),
    "fused_linear": (False, "on", True),
    "shard": ("none", "gradients", "gradients"),
    "shard_by": ("auto", "parameter", "parameter"),
    "main_param": ("float32", "split", "split"),
    "state_dtype": ("float32", "int8", "int8"),
    "release": ("none", "backward", "backward"),
    "clip_by": ("current", "previous", "previous"),
    "bucket_mib": (128, "32", 32),
    "overlap_grad_reduce": (True, "No", False),
    "overlap_param_gather": (False, "TRUE", True),
    "broadcast_params": (True, "0", False),
}
DEFAULTS, TEXT_ALL, PARSED_ALL = ({name: row[column] for name, row in FIELDS.items()} for column in range(3))


def problems(build, *args, **keywords):
    """Return the lines of the one ValueError that ``build`` raises."""
    with pytest.raises(ValueError, match="cannot be built") as caught:
        build(*args, **keywords)
    return [line.strip(" -") for line in str(caught.value).splitlines()[1:]]


def write(folder, name, content):
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


@st.composite
def valid_settings(draw):
    is_released = draw(st.booleans())
    steps = 1 if is_released else draw(st.integers(1, 10**6))
    shard = "none" if is_released else draw(st.sampled_from(["none", "optimizer", "gradients"]))
    norms = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=True)
    return {
        "gradient_accumulation_steps": steps,
        "gradient_average": steps == 1 or draw(st.booleans()),
        "max_grad_norm": draw(st.none() | norms),
        "nonfinite": draw(st.sampled_from(["skip", "ignore", *(() if is_released else ("raise",))])),
        "backend": draw(st.sampled_from(["auto", "torch", "triton", "apex", "transformer_engine"])),
        "fused_linear": draw(st.booleans()),
        "shard": shard,
        "shard_by": "auto" if shard == "none" else draw(st.sampled_from(["auto", "element", "parameter"])),
        "main_param": draw(st.sampled_from(["float32", "split", "split24"])),
        "state_dtype": draw(st.sampled_from(["float32", "bfloat16", "int8"])),
        "release": "backward" if is_released else "none",
        "clip_by": "previous" if is_released else "current",
        "bucket_mib": draw(st.integers(1, 4096)),
        "overlap_grad_reduce": draw(st.booleans()),
        "overlap_param_gather": shard != "none" and draw(st.booleans()),
        "broadcast_params": draw(st.booleans()),
    }


def test_the_defaults_are_those_of_the_contract():
    assert dataclasses.asdict(MainGradConfig()) == DEFAULTS


def test_every_field_has_help():
    fields = dataclasses.fields(MainGradConfig)
    assert [field.name for field in fields] == list(DEFAULTS)
    assert all(len(field.metadata["help"]) > 10 for field in fields)


def test_a_config_is_frozen_and_keyword_only():
    config = MainGradConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.shard = "optimizer"
    with pytest.raises(TypeError, match="positional"):
        MainGradConfig(2)
    with pytest.raises(TypeError, match="shrad"):
        MainGradConfig(shrad="optimizer")


def test_replacing_a_field_checks_again():
    config = MainGradConfig(shard="optimizer", shard_by="element")
    assert dataclasses.replace(config, shard_by="parameter").shard_by == "parameter"
    assert len(problems(dataclasses.replace, config, shard="none")) == 1


def test_importing_and_building_need_neither_torch_nor_yaml():
    build = "import runpy, sys; runpy.run_path(sys.argv[1])['MainGradConfig'].from_dict({'shard': 'optimizer'})"
    code = f"{build}; sys.exit(bool({{'torch', 'yaml'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code, sys.modules["fusedopt.config"].__file__], check=True)


@settings(deadline=None)
@given(valid_settings())
def test_a_valid_config_round_trips_through_a_dict(values):
    config = MainGradConfig(**values)
    assert dataclasses.asdict(config) == values
    assert MainGradConfig.from_dict(dataclasses.asdict(config)) == config


@settings(deadline=None)
@given(valid_settings())
def test_a_valid_config_round_trips_through_a_json_file(tmp_path_factory, values):
    config = MainGradConfig(**values)
    path = write(tmp_path_factory.getbasetemp(), "round_trip.json", json.dumps(dataclasses.asdict(config)))
    assert MainGradConfig.from_file(path, environ={}) == config


RELEASING = ("release", "clip_by")  # contradict others that are not at their defaults


@pytest.mark.parametrize(
    "names", [RELEASING, [name for name in FIELDS if name not in RELEASING]], ids=["two", "others"]
)
def test_every_field_comes_in_by_every_way(names, tmp_path):
    assert all(PARSED_ALL[name] != DEFAULTS[name] for name in DEFAULTS)
    text = {name: TEXT_ALL[name] for name in names}
    parsed = {name: PARSED_ALL[name] for name in names}
    text_environ = {f"FUSEDOPT_{name.upper()}": text for name, text in text.items()}
    yaml = "\n".join(f"{name}: {text}" for name, text in text.items())
    configs = [
        MainGradConfig(**parsed),
        MainGradConfig.from_dict(text),
        MainGradConfig.from_dict({}, **text),
        MainGradConfig.from_env({**text_environ, "HOME": "elsewhere"}),
        MainGradConfig.from_args(argparse.Namespace(**text, learning_rate=1.0)),
        MainGradConfig.from_args(SimpleNamespace(**parsed)),
        MainGradConfig.from_file(write(tmp_path, "text.json", json.dumps(text)), environ={}),
        MainGradConfig.from_file(write(tmp_path, "typed.json", json.dumps(parsed)), environ={}),
        MainGradConfig.from_file(str(write(tmp_path, "config.yaml", yaml)), environ={}),
        MainGradConfig.from_file(write(tmp_path, "config.YML", yaml), environ={}),
    ]
    # As text, since True == 1 == 1.0.
    assert [repr(dataclasses.asdict(config)) for config in configs] == [repr({**DEFAULTS, **parsed})] * len(configs)


@pytest.mark.parametrize("case", [str.lower, str.upper, str.capitalize])
def test_a_boolean_is_read_in_all_spellings_and_cases(case):
    for meaning, spellings in [(True, ["1", "true", "yes", "on"]), (False, ["0", "false", "no", "off"])]:
        for spelling in spellings:
            config = MainGradConfig.from_env({"FUSEDOPT_BROADCAST_PARAMS": case(spelling)})
            assert config.broadcast_params is meaning
        assert MainGradConfig.from_dict({"broadcast_params": int(meaning)}).broadcast_params is meaning


def test_max_grad_norm_is_read_from_text():
    readings = {"none": None, "NULL": None, "": None, "inf": math.inf, "1e-3": 1e-3, " 2 ": 2.0}
    for text, meaning in readings.items():
        norm = MainGradConfig.from_env({"FUSEDOPT_MAX_GRAD_NORM": text}).max_grad_norm
        assert (type(norm), norm) == (type(meaning), meaning)


def test_an_argument_that_is_none_was_not_given():
    namespace = argparse.Namespace(max_grad_norm=None, shard=None, bucket_mib="16")
    assert MainGradConfig.from_args(namespace) == MainGradConfig(bucket_mib=16)


def test_keyword_wins_over_file_over_environment_over_default(tmp_path, monkeypatch):
    path = write(tmp_path, "config.json", json.dumps({"bucket_mib": 3, "nonfinite": "raise"}))
    environ = {"FUSEDOPT_BUCKET_MIB": "2", "FUSEDOPT_NONFINITE": "ignore", "FUSEDOPT_BACKEND": "torch"}
    expected = MainGradConfig(bucket_mib=4, nonfinite="raise", backend="torch")
    assert MainGradConfig.from_file(path, environ=environ, bucket_mib=4) == expected
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert MainGradConfig.from_file(path, bucket_mib=4) == expected
    assert MainGradConfig.from_file(path, environ={}).backend == "auto"
    assert MainGradConfig.from_env(bucket_mib=4).bucket_mib == 4
    assert MainGradConfig.from_env().bucket_mib == 2
    assert MainGradConfig.from_dict({"bucket_mib": 3}, bucket_mib=4).bucket_mib == 4
    assert MainGradConfig.from_args(argparse.Namespace(bucket_mib=3), bucket_mib=4).bucket_mib == 4


def test_a_keyword_stands_in_for_a_bad_value_below_it(tmp_path):
    path = write(tmp_path, "config.json", '{"gradient_accumulation_steps": "auto"}')
    assert len(problems(MainGradConfig.from_file, path, environ={})) == 1
    config = MainGradConfig.from_file(path, environ={}, gradient_accumulation_steps=8)
    assert config.gradient_accumulation_steps == 8


def test_only_from_file_and_from_env_read_the_environment_and_nothing_writes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSEDOPT_BUCKET_MIB", "2")
    before = dict(os.environ)
    others = [MainGradConfig(), MainGradConfig.from_dict({}), MainGradConfig.from_args(argparse.Namespace())]
    assert [config.bucket_mib for config in others] == [128, 128, 128]
    readers = [MainGradConfig.from_env(), MainGradConfig.from_file(write(tmp_path, "config.json", "{}"))]
    assert [config.bucket_mib for config in readers] == [2, 2]
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "values", "needed", "remedy"),
    [
        ("gradient_accumulation_steps", [0, -3, True, "", None], "a whole number of at least 1", 1),
        ("gradient_accumulation_steps", [2.5, "2.5"], "a whole number of at least 1", 2),
        ("max_grad_norm", [0, -1.0, "-1", False, "off"], "or None to switch clipping off", None),
        ("bucket_mib", [0, "-1", True], "from 1 to 4096", 1),
        ("bucket_mib", [4097, "9000", math.inf], "4096 MiB * 2**20 bytes / 4 bytes per fp32 element", 4096),
        ("bucket_mib", ["large", None, [64]], "= 2**30 elements", 128),
        ("fused_linear", ["ture", "tru"], "1/0, true/false, yes/no, on/off", "true"),
        ("fused_linear", [1.0, "enabled", "Y"], "1/0, true/false, yes/no, on/off", "true"),
        ("fused_linear", [0.0, "disable", "flase"], "1/0, true/false, yes/no, on/off", "false"),
        ("nonfinite", ["skipp", "warn"], "'skip', 'raise', 'ignore'", "skip"),
        ("nonfinite", ["error", "Fail"], "'skip', 'raise', 'ignore'", "raise"),
        ("backend", ["te", "TE"], "'apex', 'transformer_engine'", "transformer_engine"),
        ("backend", ["pytorch", "ATen", "eager"], "'auto', 'torch'", "torch"),
        ("shard", [0, "0", None, False, "ZeRO-0", "stage0", "no_shard"], "'none', 'optimizer', 'gradients'", "none"),
        ("shard", [1, "1", "zero1", "ZeRO-1", "zero 1", "os", "optim", "stage1"], "one of 'none'", "optimizer"),
        ("shard", [2, "2", "zero2", "ZeRO-2", "os_g", "stage2", "SHARD_GRAD_OP", "grads"], "one of", "gradients"),
        (
            "backend",
            ["transformerengine", "Transformer-Engine"],
            "'apex', 'transformer_engine'",
            "transformer_engine",
        ),
        ("shard", ["gradient", "Gradients"], "'none', 'optimizer', 'gradients'", "gradients"),
        ("shard_by", ["params", "Parameter"], "'auto', 'element', 'parameter'", "parameter"),
    ],
)
def test_a_bad_value_is_refused_by_what_was_found_what_is_needed_and_what_to_do(name, values, needed, remedy):
    for value in values:
        (problem,) = problems(MainGradConfig, **{name: value})
        assert problem.startswith(f"{name}={value!r} (keyword): needed ")
        assert needed in problem
        assert problem.endswith(f"; use {remedy!r}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_grad_norm", value) for value in (math.nan, True, 10**400, "big", [1.0])),
        *(("fused_linear", value) for value in (2, None, "maybe", [])),
        *(("nonfinite", value) for value in (None, False, True, "zero", 0)),
        *(("backend", value) for value in ("bf16", "cuda", 1, True)),
        *(("shard", value) for value in ("yes please", 4, -1, "ddp", [])),
        *(("shard_by", value) for value in (1, "rows", True)),
    ],
    ids=str,
)
def test_a_value_that_means_nothing_known_gets_no_suggestion(name, value):
    (problem,) = problems(MainGradConfig, **{name: value})
    assert problem.startswith(f"{name}={value!r} (keyword): needed ")
    assert ";" not in problem


@pytest.mark.parametrize("value", [3, "3", "zero3", "ZeRO-3", "stage_3", "p_g_os", "FULL_SHARD", True, "parameters"])
def test_a_third_stage_of_zero_is_sent_to_fsdp2_not_to_another_stage(value):
    (problem,) = problems(MainGradConfig, shard=value)
    assert problem.endswith("3 is torch's fully_shard (FSDP2), with shard='none'")
    assert "use '" not in problem


def test_auto_where_nobody_fills_it_in_is_told_so(tmp_path):
    path = write(tmp_path, "config.yaml", "max_grad_norm: auto\nbucket_mib: auto\nshard: auto\nfused_linear: auto")
    found = {line.split("=")[0]: line for line in problems(MainGradConfig.from_file, path, environ={})}
    assert len(found) == 4
    assert "'auto' stands for the Trainer's or Accelerator's own value" in found["max_grad_norm"]
    assert found["max_grad_norm"].endswith("write a value here")
    assert found["bucket_mib"].endswith("; leave it out for the default, 128")
    assert found["shard"].endswith("; leave it out for the default, 'none'")
    assert found["fused_linear"].endswith("; leave it out for the default, False")


def test_a_process_groups_backend_is_told_from_ours():
    assert problems(MainGradConfig, backend="nccl")[0].endswith("init_process_group(backend=...)")


MEANT = {
    "max_grad_norm": ["gradient_clipping", "clip_grad", "max_norm", "clip", "gradient_clip_val", "clip-grad"],
    "gradient_accumulation_steps": ["gradient_accumulation", "accumulate_grad_batches", "num_micro_batches", "k_steps"],
    "gradient_average": ["avg"],
    "nonfinite": ["check_for_nan_in_grad", "error_if_nonfinite"],
    "fused_linear": ["gradient_accumulation_fusion", "fuse_wgrad_accumulation", "enable_linear_fused_grad_add"],
    "shard": ["zero_stage", "stage", "zero_optimization", "sharding", "use_distributed_optimizer", "fsdp"],
    "shard_by": ["split_param", "shardby"],
    "bucket_mib": ["reduce_bucket_size", "bucket_cap_mb", "ddp_bucket_size", "sharding_comm_buffer_size_MB"],
    "overlap_grad_reduce": ["overlap_comm", "overlap_grad_sync", "overlap_grad_reduces", "overlap_gradient_reduce"],
    "overlap_param_gather": ["overlap_param_sync", "enable_stage1_allgather_overlap"],
    "broadcast_params": ["init_sync", "broadcast_parameters"],
}


@pytest.mark.parametrize(("field", "names"), MEANT.items(), ids=MEANT)
def test_another_projects_name_is_answered_with_the_field_that_it_means_on_every_road(tmp_path, field, names):
    for name in names:
        path = write(tmp_path, "config.json", json.dumps({name: 1}))
        variable = f"FUSEDOPT_{name.upper()}"
        roads = [
            (problems(MainGradConfig.from_dict, {name: 1}), field),
            (problems(MainGradConfig.from_file, path, environ={}), field),
            (problems(MainGradConfig.from_dict, {}, **{name: 1}), field),
            (problems(MainGradConfig.from_env, {variable: "1"}), f"FUSEDOPT_{field.upper()}"),
        ]
        for (problem,), expected in roads:
            assert f"found an unknown name, needed a field's; use {expected!r}" in problem, name


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["bf16", "fp16", "mixed_precision", "precision", "torch_dtype"], "cast the model (model.bfloat16())"),
        (["grad_accum_dtype", "grad_reduce_in_fp32", "master_weights", "master_grad"], "are fp32 whatever"),
        (["lr", "weight_decay", "fused"], "belongs to the inner optimizer"),
        (["loss_scale"], "ShardedGradScaler"),
        (["offload_optimizer"], "nothing is offloaded"),
        (["process_group", "mesh"], "give it to FusedMainGradOptimizer itself"),
        (["gradient_checkpointing"], "fusedopt.recompute.apply"),
        (["main_grad"], "--main_grad"),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_a_name_for_which_there_is_no_setting_is_answered_with_what_to_do_instead(names, why):
    for name in names:
        for problem in (
            *problems(MainGradConfig.from_dict, {name: 1}),
            *problems(MainGradConfig.from_env, {f"FUSEDOPT_{name.upper()}": "1"}),
        ):
            assert "found an unknown name; there is no such setting: " in problem
            assert why in problem
            assert "; use '" not in problem


@pytest.mark.parametrize("name", ["tokenizer", "seed", "frobnicate", "x", "", "gradient", "overlap"])
def test_a_name_that_is_near_to_none_gets_the_list_of_fields_and_no_guess(name):
    for problem in (*problems(MainGradConfig.from_dict, {name: 1}),):
        assert problem.endswith(f"needed one of {', '.join(DEFAULTS)}")
    variables = ", ".join(f"FUSEDOPT_{field.upper()}" for field in DEFAULTS)
    assert problems(MainGradConfig.from_env, {f"FUSEDOPT_{name}": "1"})[0].endswith(f"needed one of {variables}")


def test_the_tables_of_other_names_hold_no_field_and_no_name_twice():
    rows = [names.split() for _, _, names in config._OTHER_NAMES]
    rows += [names.split() for names in config._NO_SETTING.values()]
    names = [name for row in rows for name in row]
    assert len(set(names)) == len(names)
    assert not set(names) & set(DEFAULTS)
    assert {field for field, _, _ in config._OTHER_NAMES} <= set(DEFAULTS)
    for field, values in config._OTHER_VALUES.items():
        valid = next(spec.metadata["valid"] for spec in dataclasses.fields(MainGradConfig) if spec.name == field)
        words = [word for others in values.values() for word in others.split()]
        assert len(set(words)) == len(words)
        assert not set(words) & set(valid)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("shard_by", "element", "shard='none' (default): nothing is cut"),
        ("shard_by", "parameter", "shard='none' (default): nothing is cut"),
        ("overlap_param_gather", True, "shard='none' (default): nothing is gathered"),
        ("gradient_average", False, "gradient_accumulation_steps=1 (default): nothing is averaged"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(name, value, cause):
    (problem,) = problems(MainGradConfig, **{name: value})
    assert problem.startswith(f"{name}={value!r} (keyword) with {cause}, needed ")
    assert problem.endswith(f"or drop {name}")
    assert problems(MainGradConfig.from_dict, {name: value}) == [problem.replace("keyword", "mapping")]
    heeded = MainGradConfig(**{name: value}, shard="optimizer", gradient_accumulation_steps=2)
    assert getattr(heeded, name) == value


def test_no_contradiction_is_built_on_a_bad_value():
    (problem,) = problems(MainGradConfig, shard="optimiser", shard_by="element", overlap_param_gather=True)
    assert problem.startswith("shard='optimiser'")


def test_all_problems_of_all_sources_are_reported_together_with_their_origin(tmp_path):
    path = write(tmp_path, "config.json", '{"bucket_mb": 4, "shard": "gradient", "overlap_param_gather": 3}')
    environ = {"FUSEDOPT_SHRAD": "none", "FUSEDOPT_BACKEND": "tritn", "FUSEDOPT_GRADIENT_AVERAGE": "no"}
    found = problems(MainGradConfig.from_file, path, environ=environ, max_grad_norms=1, bucket_mib=0)
    expected = [
        ("FUSEDOPT_SHRAD (environment variable FUSEDOPT_SHRAD): found an unk", "use 'FUSEDOPT_SHARD'"),
        (f"bucket_mb (file {path}): found an unknown name", "use 'bucket_mib'"),
        ("max_grad_norms (keyword): found an unknown name", "use 'max_grad_norm'"),
        ("backend='tritn' (environment variable FUSEDOPT_BACKEND)", "use 'triton'"),
        (f"shard='gradient' (file {path})", "use 'gradients'"),
        ("bucket_mib=0 (keyword)", "use 1"),
        (f"overlap_param_gather=3 (file {path})", "needed one of 1/0, true/false, yes/no, on/off"),
        ("gradient_average=False (environment variable FUSEDOPT_GRADIENT_AVERAGE)", "drop gradient_average"),
    ]
    assert len(found) == len(expected)
    for problem, (beginning, end) in zip(found, expected, strict=True):
        assert problem.startswith(beginning)
        assert problem.endswith(end)


def test_mappings_and_arguments_name_themselves_as_origin():
    assert "(mapping)" in problems(MainGradConfig.from_dict, {"Shard": "none"})[0]
    assert "(argument)" in problems(MainGradConfig.from_args, argparse.Namespace(shard="all"))[0]
    assert "(keyword)" in problems(MainGradConfig.from_args, argparse.Namespace(), shards="none")[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.json", "{", "needed valid json"),
        ("broken.yaml", "shard: [", "needed valid yaml"),
        ("list.json", "[1]", "found list, needed a mapping"),
        ("empty.yaml", "", "found NoneType, needed a mapping"),
        ("config.toml", "", "found suffix '.toml', needed .json, .yaml or .yml"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_its_path(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=f"^file {re.escape(str(path))}: {re.escape(message)}"):
        MainGradConfig.from_file(path, environ={})


def test_a_missing_file_is_refused_by_its_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        MainGradConfig.from_file(tmp_path / "absent.json", environ={})


def test_a_yaml_file_without_pyyaml_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"pip install fusedopt\[yaml\]"):
        MainGradConfig.from_file(write(tmp_path, "config.yaml", "shard: none"), environ={})
    assert MainGradConfig.from_file(write(tmp_path, "config.json", "{}"), environ={}) == MainGradConfig()
