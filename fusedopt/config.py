"""What the user may set, checked in one place.

    keyword > file > environment > default  ->  [MainGradConfig]  ->  optimizer, integrations

Flat scalars only: no tensors, no process group, no idea which backends are
installed. The only module that reads the environment; nothing writes it.
Sizes are in MiB of fp32 elements, counts are in micro-batches.
"""

import difflib
import json
import math
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

_ENV_PREFIX = "FUSEDOPT_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_BOOLEANS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
_NONE = ("none", "null", "")
_BACKENDS = ("auto", "torch", "triton", "apex", "transformer_engine")
_MAX_BUCKET_MIB = 4096  # 4096 MiB * 2**20 bytes / 4 bytes per fp32 element = 2**30 elements

# What other projects call things: torch, DeepSpeed, Megatron, accelerate, Lightning, apex, TransformerEngine, Paddle.
_STAGES = "ZeRO stage 0 is 'none', 1 'optimizer', 2 'gradients'; 3 is torch's fully_shard (FSDP2), with shard='none'"
_OTHER_NAMES = (  # the field, what else to say, and its other names
    (
        "max_grad_norm",
        "",
        "clip clip_grad clip_grad_norm clip_gradients clip_norm clipping gradient_clip gradient_clip_norm "
        "gradient_clip_val gradient_clipping grad_clip grad_clip_norm grad_clipping grad_norm max_gradient_norm "
        "max_norm",
    ),
    (
        "gradient_accumulation_steps",
        "",
        "acc_steps accumulate_grad_batches accumulate_steps accumulation_steps gas grad_acc_steps grad_accum "
        "grad_accum_steps grad_accumulation_steps gradient_accumulation gradient_merge_steps k_steps micro_batches "
        "num_accumulation_steps num_micro_batches num_microbatches update_freq",
    ),
    ("gradient_average", "", "average average_gradients avg grad_average gradient_merge_avg"),
    (
        "nonfinite",
        "'skip' leaves such steps out, 'raise' stops by parameter name",
        "check_for_nan_in_grad check_for_nan_in_loss_and_grad error_if_nonfinite nan_policy on_nan on_nonfinite "
        "skip_nan skip_nonfinite",
    ),
    ("backend", "", "fused_backend implementation kernel_backend kernels library main_grad_backend"),
    (
        "fused_linear",
        "it is for integrations; elsewhere call fusedopt.convert_linears(model)",
        "convert_linears enable_linear_fused_grad_add fuse_linear fuse_wgrad_accumulation "
        "gradient_accumulation_fusion linear_fused_grad_add",
    ),
    (
        "shard",
        _STAGES,
        "data_parallel_sharding_strategy distributed_optimizer fsdp main_grad_shard sharding sharding_level "
        "sharding_stage sharding_strategy stage use_distributed_optimizer zero zero_level zero_optimization zero_stage",
    ),
    ("shard_by", "'element' cuts through parameters", "split_param"),
    (
        "bucket_mib",
        "MiB of fp32: elements * 4 / 2**20",
        "allgather_bucket_size bucket_size ddp_bucket_size reduce_bucket_size",
    ),
    (
        "bucket_mib",
        "MiB of fp32",
        "bucket_cap bucket_cap_mb bucket_size_mb comm_buffer_size_mb sharding_comm_buffer_size_mb",
    ),
    (
        "overlap_grad_reduce",
        "",
        "enable_stage1_overlap overlap_comm overlap_communication overlap_grad_sync overlap_gradient_reduce "
        "overlap_reduce",
    ),
    (
        "overlap_param_gather",
        "",
        "enable_stage1_allgather_overlap overlap_all_gather overlap_allgather overlap_gather overlap_param_sync",
    ),
    ("broadcast_params", "", "broadcast init_sync sync_params"),
)
_NO_SETTING = {  # why there is none, and the names
    "cast the model (model.bfloat16()) before its optimizer is made": (
        "amp bf16 bfloat16 dtype float16 fp16 half mixed_precision model_dtype opt_level param_dtype params_dtype "
        "precision torch_dtype"
    ),
    "main_grad and main_param are fp32 whatever the model's dtype": (
        "accumulate_allreduce_grads_in_fp32 amp_master_grad communication_data_type data_types grad_accum_dtype "
        "grad_dtype grad_reduce_in_fp32 main_grad_dtype main_grads_dtype main_param_dtype main_params_dtype "
        "master_grad master_weights multi_precision reduce_dtype"
    ),
    "fp16 losses are scaled by torch.amp.GradScaler, under a shard by ShardedGradScaler": (
        "dynamic_loss_scale grad_scaler initial_loss_scale loss_scale loss_scaling"
    ),
    "it belongs to the inner optimizer, which you make: FusedMainGradOptimizer(torch.optim.AdamW(..., lr=...))": (
        "beta1 beta2 betas capturable eps foreach fused learning_rate lr momentum optimizer params weight_decay"
    ),
    "schedulers are torch's, made on the FusedMainGradOptimizer": "lr_scheduler scheduler warmup_steps",
    "nothing is offloaded": "cpu_offload offload offload_optimizer offload_optimizer_device offload_param",
    "layers are recomputed by fusedopt.recompute.apply(model, ...), or --recompute": (
        "activation_checkpointing gradient_checkpointing recompute recompute_granularity"
    ),
    "give it to FusedMainGradOptimizer itself: process_group=, device_mesh=, norm_group= or rewrap=": (
        "data_parallel_group device_mesh dp_group group mesh norm_group pg process_group rewrap"
    ),
    "it is a flag of scripts: --main_grad, --main_grad_config FILE": "main_grad main_grad_config",
    "batches are the data loader's": "batch_size micro_batch_size train_batch_size train_micro_batch_size_per_gpu",
}
_MEANT = {name: (field, note) for field, note, names in _OTHER_NAMES for name in names.split()}
_WHY_NONE = {name: why for why, names in _NO_SETTING.items() for name in names.split()}
_OTHER_VALUES = {  # by field: what is meant, or what to say; and what others write for it
    "shard": {
        "none": "0 stage0 stage_0 zero0 zero_0 false off no no_shard",
        "optimizer": "1 stage1 stage_1 zero1 zero_1 os optim optimizer_state optimizer_states",
        "gradients": "2 stage2 stage_2 zero2 zero_2 os_g grads optim_grads shard_grad_op",
        _STAGES: (
            "3 stage3 stage_3 zero3 zero_3 p_g_os full full_shard hybrid_shard optim_grads_params parameters params "
            "true"
        ),
    },
    "shard_by": {
        "parameter": "param parameters params tensor tensors whole",
        "element": "elements flat",
        "auto": "none",
    },
    "nonfinite": {
        "raise": "abort assert crash error fail stop",
        "skip": "warn",
        "ignore": "allow keep pass propagate",
    },
    "backend": {
        "torch": "aten default eager native pytorch",
        "transformer_engine": "te",
        "auto": "none",
        "nccl and gloo are torch.distributed's: init_process_group(backend=...)": "nccl gloo mpi",
    },
}
_SWITCHES = {"true": "enable enabled y t 1.0", "false": "disable disabled n f 0.0 never"}


class Given(NamedTuple):
    """A value on its way into a field, and where it came from."""

    value: Any
    origin: str


def _about(help: str, valid: Sequence[Any] = ()) -> dict[str, Any]:
    return {"help": help, "valid": valid}


@dataclass(frozen=True, kw_only=True)
class MainGradConfig:
    """Settings of ``FusedMainGradOptimizer`` and its integrations.

    Text is parsed by the type of its field, however it came in. An unknown name raises
    ``TypeError`` here, as in any dataclass, and ``ValueError`` in the ``from_*`` constructors.

    Attributes:
        gradient_accumulation_steps: micro-batches in one window; with k > 1 every k-th ``step()`` acts.
        gradient_average: divide by the micro-batches of the window; False needs k > 1.
        max_grad_norm: global norm to clip to; inf measures without clipping, None switches clipping off.
        nonfinite: on inf or nan gradients "skip" the step, "raise" by parameter name, or "ignore" them.
        backend: the library that computes the fused operations; "auto" takes what is there.
        fused_linear: have the integrations convert ``nn.Linear`` layers to ``FusedLinear``.
        shard: what is split over the ranks: "none", "optimizer" (ZeRO-1) or "gradients" (ZeRO-2).
        shard_by: cut at any "element" or keep each "parameter" whole; "auto" tries the inner optimizer.
        main_param: how fp32 main_params of bf16 parameters are held: whole ("float32"), or as the parameter and 16
            more bits ("split"), which takes 2 bytes a parameter less and keeps every bit, or 8 ("split24"), which
            takes 3 less and keeps 24 bits, rounded stochastically.
        state_dtype: what inner state of a parameter's shape is between steps: "float32", or "bfloat16" or "int8",
            rounded stochastically; a step widens it, bucket by bucket.
        release: "backward" steps buckets inside backward, when they are complete; one process, one backward a step.
        clip_by: the step whose norm clips: "current", or "previous", which alone is known where gradients are released.
        bucket_mib: bucket size in MiB of fp32 elements: 1 is 2**18 elements, 4096 (the most) is 2**30.
        overlap_grad_reduce: start a bucket's reduction inside backward, at its last gradient.
        overlap_param_gather: let gathers finish under the next forward; needs a shard.
        broadcast_params: at construction, take the parameters of the group's first rank.

    Raises:
        ValueError: one error with every problem: field, value, origin, what is needed, what to do.
    """

    gradient_accumulation_steps: int = field(
        default=1, metadata=_about("micro-batches accumulated for one step", range(1, sys.maxsize))
    )
    gradient_average: bool = field(default=True, metadata=_about("divide by the number of micro-batches"))
    max_grad_norm: float | None = field(
        default=None, metadata=_about("global norm to clip to; inf only measures, none switches clipping off")
    )
    nonfinite: str = field(
        default="skip", metadata=_about("what to do on inf or nan gradients", ("skip", "raise", "ignore"))
    )
    backend: str = field(default="auto", metadata=_about("library behind the fused operations", _BACKENDS))
    fused_linear: bool = field(default=False, metadata=_about("have integrations convert nn.Linear layers"))
    shard: str = field(
        default="none", metadata=_about("what is split over the ranks", ("none", "optimizer", "gradients"))
    )
    shard_by: str = field(default="auto", metadata=_about("where a shard may cut", ("auto", "element", "parameter")))
    main_param: str = field(
        default="float32", metadata=_about("how fp32 main_params are held", ("float32", "split", "split24"))
    )
    state_dtype: str = field(
        default="float32",
        metadata=_about("what inner state is held as between steps", ("float32", "bfloat16", "int8")),
    )
    release: str = field(default="none", metadata=_about("when gradients give their memory back", ("none", "backward")))
    clip_by: str = field(default="current", metadata=_about("which step's norm clips", ("current", "previous")))
    bucket_mib: int = field(
        default=128, metadata=_about("bucket size in MiB of fp32 elements", range(1, _MAX_BUCKET_MIB + 1))
    )
    overlap_grad_reduce: bool = field(
        default=True, metadata=_about("reduce a bucket inside backward, at its last gradient")
    )
    overlap_param_gather: bool = field(default=False, metadata=_about("gather under the next forward"))
    broadcast_params: bool = field(default=True, metadata=_about("start from the first rank's parameters"))

    def __post_init__(self) -> None:
        values = {
            name: Given(value, "default" if value is _fields()[name].default else "keyword")
            for name, value in vars(self).items()
        }
        for name, value in _check(values).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], **keywords: Any) -> "MainGradConfig":
        """Build from ``mapping``, overridden by ``keywords``; nothing else is read.

        Raises:
            ValueError: every unknown name and bad value, in one error.
        """
        return cls(**_check(given(keywords, "keyword"), given(mapping, "mapping")))

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, environ: Mapping[str, str] | None = None, **keywords: Any
    ) -> "MainGradConfig":
        """Build from a .json, .yaml or .yml file, over the environment, overridden by ``keywords``.

        ``environ`` is read in place of ``os.environ``.

        Raises:
            FileNotFoundError: if there is no such file.
            ImportError: if the file is YAML and PyYAML is not installed.
            ValueError: if the file cannot be parsed or holds no mapping; every unknown name and bad value.
        """
        return cls(**_check(given(keywords, "keyword"), given_in_file(path), given_in_environment(environ)))

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **keywords: Any) -> "MainGradConfig":
        """Build from ``FUSEDOPT_<FIELD>`` variables, overridden by ``keywords``.

        ``environ`` is read in place of ``os.environ``.

        Raises:
            ValueError: every unknown ``FUSEDOPT_`` name and bad value, in one error.
        """
        return cls(**_check(given(keywords, "keyword"), given_in_environment(environ)))

    @classmethod
    def from_args(cls, namespace: object, **keywords: Any) -> "MainGradConfig":
        """Build from the attributes that are named like fields, overridden by ``keywords``.

        An attribute that is None was not given; attributes of other names are not ours.

        Raises:
            ValueError: every unknown keyword and bad value, in one error.
        """
        found = {name: getattr(namespace, name, None) for name in _fields()}
        arguments = {name: value for name, value in found.items() if value is not None}
        return cls(**_check(given(keywords, "keyword"), given(arguments, "argument")))

    @classmethod
    def from_given(cls, *sources: Mapping[str, Given], problems: Sequence[str] = ()) -> "MainGradConfig":
        """Build from values with their origins, the first source of which wins; for integrations.

        Args:
            sources: by field name: see `given`, `given_in_file`, `given_in_environment`.
            problems: what the caller found; reported together with what is found here.

        Raises:
            ValueError: every problem, in one error.
        """
        return cls(**_check(*sources, problems=problems))


def _fields() -> dict[str, Field[Any]]:
    return {spec.name: spec for spec in fields(MainGradConfig)}


def valid_values(name: str) -> tuple[str, ...]:
    """Return what the field ``name``, a word out of a few, may be."""
    return tuple(_fields()[name].metadata["valid"])


def given(mapping: Mapping[str, Any], origin: str) -> dict[str, Given]:
    """Return the values of ``mapping`` with their origin."""
    return {name: Given(value, origin) for name, value in mapping.items()}


def given_in_file(path: str | os.PathLike[str]) -> dict[str, Given]:
    """Return what a .json, .yaml or .yml file holds.

    Raises:
        FileNotFoundError, ImportError, ValueError: as `MainGradConfig.from_file`.
    """
    return given(_read_file(Path(path)), f"file {os.fspath(path)}")


def given_in_environment(environ: Mapping[str, str] | None = None) -> dict[str, Given]:
    """Return the ``FUSEDOPT_`` variables by field name; an unknown one keeps its own name."""
    variables = os.environ if environ is None else environ
    names = {_ENV_PREFIX + name.upper(): name for name in _fields()}
    return {
        names.get(variable, variable): Given(value, f"environment variable {variable}")
        for variable, value in variables.items()
        if variable.startswith(_ENV_PREFIX)
    }


def _read_file(path: Path) -> Mapping[str, Any]:
    suffix = path.suffix.lower()
    if suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"file {path}: found suffix {suffix!r}, needed .json, .yaml or .yml; rename it")
    if not path.is_file():
        raise FileNotFoundError(f"file {path}: found no such file, needed a configuration; correct the path")
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if suffix == ".json" else _parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"file {path}: needed valid {suffix[1:]}; correct this: {error}") from error
    if not isinstance(content, Mapping):
        found = type(content).__name__
        raise ValueError(f"file {path}: found {found}, needed a mapping; write 'field: value' pairs")
    return content


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "found no PyYAML, needed for a YAML configuration; pip install fusedopt[yaml], or write JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _check(*sources: Mapping[str, Given], problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return a valid value for every field from ``sources``, the first of which wins.

    Everything is checked here. ``__post_init__`` comes here for every instance; the constructors
    come before it, since only they know where a value is from and which names have no field.

    Raises:
        ValueError: all problems: unknown names in any source, bad values, contradictions.
    """
    problems = list(problems)
    found = {name: Given(spec.default, "default") for name, spec in _fields().items()}
    for source in reversed(sources):
        problems += [_unknown(name, item.origin) for name, item in source.items() if name not in _fields()]
        found |= source
    values: dict[str, Any] = {}  # without the bad ones, so that no contradiction is built on them
    for name, spec in _fields().items():
        value, origin = found[name]
        try:
            values[name] = _coerce(spec, value)
        except (KeyError, TypeError, ValueError, OverflowError):
            problems.append(f"{name}={value!r} ({origin}): needed {_needed(spec)}{_instead(spec, value)}")
    for name, other, problem in _contradictions(values):
        setting, under = f"{name}={values[name]!r}", f"{other}={values[other]!r}"
        problems.append(f"{setting} ({found[name].origin}) with {under} ({found[other].origin}): {problem}")
    if problems:
        raise ValueError("\n  - ".join(["MainGradConfig cannot be built:", *problems]))
    return values


def _contradictions(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each field that would be ignored, the field that is the cause, and the problem."""
    if values.get("shard") == "none":
        remedy = "needed shard='optimizer' or 'gradients'; set it, or drop"
        if values.get("shard_by") in ("element", "parameter"):
            yield "shard_by", "shard", f"nothing is cut, {remedy} shard_by"
        if values.get("overlap_param_gather"):
            yield "overlap_param_gather", "shard", f"nothing is gathered, {remedy} overlap_param_gather"
    if values.get("release") == "backward":
        yield from _beside_release(values)
    elif values.get("clip_by") == "previous" and values.get("release") == "none":
        yield "clip_by", "release", "the norm of the step itself is known; drop clip_by, or set release='backward'"
    if values.get("gradient_average") is False and values.get("gradient_accumulation_steps") == 1:
        remedy = "needed more than one micro-batch; set that, or drop gradient_average"
        yield "gradient_average", "gradient_accumulation_steps", f"nothing is averaged, {remedy}"


def _beside_release(values: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield what cannot be where a bucket steps as soon as it is complete."""
    if values.get("gradient_accumulation_steps", 1) > 1:
        problem = "a bucket steps after one backward; needed 1: larger batches by recomputation, or release='none'"
        yield "gradient_accumulation_steps", "release", problem
    is_clipped = values.get("max_grad_norm") not in (None, math.inf)
    if is_clipped and values.get("clip_by") == "current":
        problem = "the first bucket steps before the norm is known; set clip_by='previous', or drop max_grad_norm"
        yield "max_grad_norm", "release", problem
    if values.get("nonfinite") == "raise":
        problem = "other buckets have stepped by then; needed 'skip', which leaves out such buckets, or 'ignore'"
        yield "nonfinite", "release", problem
    if values.get("shard", "none") != "none":
        yield "shard", "release", "gradients are released on one process only; drop one of both"


def _coerce(spec: Field[Any], value: Any) -> Any:
    """Return ``value`` in the type of its field, parsed if it is text.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: if it does not fit; ``_needed`` says what does.
    """
    value = value.strip() if isinstance(value, str) else value
    if spec.type is bool:
        return _BOOLEANS[str(value).lower()]
    if isinstance(value, bool):  # True would pass for 1
        raise TypeError(value)
    if spec.type == float | None:
        norm = None if str(value).lower() in _NONE else float(value)
        if norm is not None and not norm > 0:  # nan is not
            raise ValueError(value)
        return norm
    if spec.type is int:
        value = int(value) if isinstance(value, str) else operator.index(value)
    if value not in spec.metadata["valid"]:
        raise ValueError(value)
    return value


def _needed(spec: Field[Any]) -> str:
    if spec.type is bool:
        return "one of 1/0, true/false, yes/no, on/off"
    if spec.type is str:
        return f"one of {', '.join(map(repr, spec.metadata['valid']))}"
    if spec.name == "bucket_mib":
        most = f"{_MAX_BUCKET_MIB} MiB * 2**20 bytes / 4 bytes per fp32 element = 2**30 elements"
        return f"a whole number from 1 to {_MAX_BUCKET_MIB} ({most})"
    if spec.type is int:
        return "a whole number of at least 1"
    return "a positive number, inf to measure without clipping, or None to switch clipping off"


def _instead(spec: Field[Any], value: Any) -> str:
    """Return what a bad value is likely to mean: by what other projects write, else by spelling, else nothing."""
    text = str(value).strip().lower()
    valid: Sequence[Any] = list(_BOOLEANS) if spec.type is bool else spec.metadata["valid"]
    if text == "auto":
        if spec.name in ("max_grad_norm", "gradient_accumulation_steps"):
            return "; 'auto' stands for the Trainer's or Accelerator's own value, where one has it: write a value here"
        return f"; leave it out for the default, {spec.default!r}"
    if spec.type == float | None:
        return "; use None" if text in ("0", "0.0", "false", "off", "no") or text.startswith("-") else ""
    if spec.type is int:
        return f"; use {_nearest_number(spec, value)!r}"
    words = text.replace("-", "_").replace("zero ", "zero").replace("stage ", "stage")
    for meant, names in (_SWITCHES if spec.type is bool else _OTHER_VALUES.get(spec.name, {})).items():
        if words in names.split():
            return f"; use {meant!r}" if meant in valid else f"; {meant}"
    is_text = isinstance(value, str) or (value is None and text in valid)
    found = difflib.get_close_matches(text, valid, n=1, cutoff=0.75) if is_text else []
    return f"; use {found[0]!r}" if found else ""


def _nearest_number(spec: Field[Any], value: Any) -> Any:
    """Return the whole number or bound that is nearest to a number, else the default."""
    valid: Sequence[Any] = spec.metadata["valid"]
    try:
        return round(min(max(float(value), valid[0]), valid[-1]))
    except (TypeError, ValueError, OverflowError):
        return spec.default


def _unknown(name: object, origin: str) -> str:
    """Say that there is no such field, and which one is meant: by what others call it, else by a close spelling."""
    is_variable = origin.startswith("environment")
    word = str(name).strip().lower().lstrip("-").replace("-", "_")
    word = word.removeprefix(_ENV_PREFIX.lower()) if is_variable else word
    found = f"{name} ({origin}): found an unknown name"
    if word in _WHY_NONE:
        return f"{found}; there is no such setting: {_WHY_NONE[word]}"
    close = difflib.get_close_matches(word, _fields(), n=1, cutoff=0.8)
    meant, note = _MEANT.get(word) or (close[0] if close else None, "")
    shown = {known: _ENV_PREFIX + known.upper() if is_variable else known for known in _fields()}
    if meant is None:
        return f"{found}, needed one of {', '.join(shown.values())}"
    return f"{found}, needed a field's; use {shown[meant]!r}{note and f' ({note})'}"
