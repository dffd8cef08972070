"""The flags of a script, and how they become a `MainGradConfig`.

    flag > file > environment > default  ->  [FusedOptArguments]  ->  MainGradConfig, layers, wrapper

What the training library already has a setting for (accumulation steps, max_grad_norm) is owned by it: a file may say
"auto", or the same value. Whatever does not fit is reported in one error.

Knows no training library: `Owned` is how one says what it owns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fusedopt.backends.offers import LOW_PRECISION
from fusedopt.config import Given, MainGradConfig, given, given_in_environment, given_in_file, valid_values
from fusedopt.layers.convert import convert_linears
from fusedopt.optimizer import FusedMainGradOptimizer
from fusedopt.recompute import GRANULARITIES
from fusedopt.recompute import apply as apply_recompute
from fusedopt.recompute import remove as remove_recompute

logger = logging.getLogger(__name__)

_SWITCH = {"nargs": "?", "const": True}  # what HfArgumentParser gives a bool, and not a `bool | None`


_FLAGS = {
    "main_grad_shard": "shard",
    "main_grad_main_param": "main_param",
    "main_grad_state_dtype": "state_dtype",
    "main_grad_release": "release",
    "main_grad_backend": "backend",
    "fused_linear": "fused_linear",
}
"""Fields of `FusedOptArguments` that are fields of `MainGradConfig`."""


@dataclass(frozen=True)
class Owned:
    """A setting that belongs to the training library.

    Args:
        name: the field of `MainGradConfig`.
        value: what the library has; None, 0 and inf are one: off.
        owner: where it is set, for messages: ``"TrainingArguments"``.
        used: what the wrapper gets, which need not be the same: a Trainer does its own accumulation.
    """

    name: str
    value: Any
    owner: str
    used: Any


@dataclass
class FusedOptArguments:
    """Flags for ``HfArgumentParser``, beside ``TrainingArguments``; without ``main_grad`` training is stock.

    A flag that is None was not given: the file, the environment (``FUSEDOPT_<FIELD>``) or the default decides.

    Raises:
        ValueError: every flag that would do nothing, or has no such value, in one error.
    """

    main_grad: bool = field(
        default=False,
        metadata={
            "aliases": ["--amp_master_grad"],
            "help": "Train with fp32 main gradients and main parameters (fusedopt).",
        },
    )
    fused_linear: bool | None = field(
        default=None,
        metadata={
            "aliases": ["--enable_linear_fused_grad_add"],
            "help": "Accumulate weight gradients of linear layers straight into main_grad. Default: false.",
            **_SWITCH,
        },
    )
    main_grad_shard: str | None = field(
        default=None,
        metadata={
            "help": "What ranks share: none, optimizer (ZeRO-1) or gradients (ZeRO-2). Default: none.",
            "choices": valid_values("shard"),
        },
    )
    main_grad_main_param: str | None = field(
        default=None,
        metadata={
            "help": "How fp32 main_params are held: float32, or bf16 and 16 more bits (split) or 8 (split24).",
            "choices": valid_values("main_param"),
        },
    )
    main_grad_state_dtype: str | None = field(
        default=None,
        metadata={
            "help": "What optimizer state is held as between steps: float32, bfloat16 or int8. Default: float32.",
            "choices": valid_values("state_dtype"),
        },
    )
    main_grad_release: str | None = field(
        default=None,
        metadata={
            "help": "When gradients give their memory back: none, or backward, which steps inside it. Default: none.",
            "choices": valid_values("release"),
        },
    )
    main_grad_backend: str | None = field(
        default=None,
        metadata={
            "help": "Library behind the fused operations. Default: auto.",
            "choices": valid_values("backend"),
        },
    )
    main_grad_config: str | None = field(
        default=None,
        metadata={"help": "YAML or JSON file with fields of fusedopt.MainGradConfig; flags go above it."},
    )
    recompute: bool = field(
        default=False, metadata={"help": "Recompute activations in backward (models of the LLaMA family)."}
    )
    recompute_granularity: str = field(
        default="full",
        metadata={"help": "What is recomputed: full, full_attn or core_attn.", "choices": GRANULARITIES},
    )
    recompute_use_reentrant: bool = field(
        default=False, metadata={"help": "Recompute with torch's reentrant checkpoint."}
    )

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("\n  - ".join(["FusedOptArguments do not fit together:", *problems]))

    def _problems(self) -> Iterator[str]:
        if not self.main_grad:
            for name in (*_FLAGS, "main_grad_config"):
                if getattr(self, name) not in (None, False):
                    yield f"{name}={getattr(self, name)!r} does nothing without main_grad; add --main_grad, or drop it"
        if self.recompute_granularity not in GRANULARITIES:
            known = ", ".join(GRANULARITIES)
            yield f"recompute_granularity={self.recompute_granularity!r} is unknown; use one of {known}"
        elif not self.recompute:
            if self.recompute_granularity != "full":
                granularity = self.recompute_granularity
                yield f"recompute_granularity={granularity!r} does nothing without recompute; add --recompute"
            if self.recompute_use_reentrant:
                yield "recompute_use_reentrant=True does nothing without recompute; add --recompute, or drop it"

    def to_config(
        self,
        owned: Sequence[Owned] = (),
        *,
        problems: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> MainGradConfig:
        """Return all settings: flag > file > environment > default, and what the training library owns from there.

        Args:
            owned: see `Owned`.
            problems: what the caller found; reported in the same error.
            environ: read in place of ``os.environ``.

        Raises:
            FileNotFoundError, ImportError: for the file.
            ValueError: every mismatch with an owner, unknown name and bad value, in one error.
        """
        flags = {name: getattr(self, flag) for flag, name in _FLAGS.items()}
        sources = [given({name: value for name, value in flags.items() if value is not None}, "flag")]
        if self.main_grad_config is not None:
            sources.append(given_in_file(self.main_grad_config))
        sources.append(given_in_environment(environ))
        mismatches = [text for setting in owned for text in _mismatches(setting, sources)]
        owners = {setting.name: Given(setting.used, setting.owner) for setting in owned}
        others = [{name: item for name, item in source.items() if name not in owners} for source in sources]
        return MainGradConfig.from_given(owners, *others, problems=[*problems, *mismatches])

    def prepare_layers(self, model: nn.Module, *, fused_linear: bool) -> None:
        """Apply recomputation to ``model`` and, with ``fused_linear``, convert its linear layers; in place.

        Raises:
            ValueError: if there is no layer for a flag to act on. Nothing was changed.
        """
        if self.recompute:
            apply_recompute(model, self.recompute_granularity, self.recompute_use_reentrant)
        if fused_linear:
            report = convert_linears(model)
            logger.info("fusedopt: %s", report)
            if not report.converted and "is a FusedLinear already" not in report.skipped.values():
                if self.recompute:
                    remove_recompute(model)
                name = type(model).__name__
                raise ValueError(f"fused_linear: {name} has no linear layer to fuse; drop the flag. {report}")

    def wrap(
        self, model: nn.Module, optimizer: Optimizer, config: MainGradConfig, **keywords: Any
    ) -> FusedMainGradOptimizer:
        """Return ``optimizer`` wrapped, with the layers of ``model`` prepared as the flags say.

        Args:
            model: the bare module whose parameters ``optimizer`` holds; gives them their names.
            optimizer: bare; it belongs to the wrapper from now on.
            config: from `to_config`.
            **keywords: of `FusedMainGradOptimizer`: ``process_group``, ``device_mesh``, ``norm_group``.

        Raises:
            TypeError, ValueError, RuntimeError: as `FusedMainGradOptimizer` and `prepare_layers`; nothing was changed.
        """
        name_parameters(model, optimizer)
        wrapper = FusedMainGradOptimizer(optimizer, config, fused_linear=False, **keywords)
        wrapper.register_load_state_dict_pre_hook(_without_stale_main_params)
        try:
            self.prepare_layers(model, fused_linear=config.fused_linear)
        except BaseException:
            wrapper.unwrap()
            raise
        return wrapper


def refuse_released_accumulation(config: MainGradConfig, num_micro_batches: int, owner: str) -> None:
    """Raise if a training library accumulates, and buckets step in the first backward.

    Raises:
        ValueError: naming both settings.
    """
    if config.release == "backward" and num_micro_batches > 1:
        raise ValueError(
            f'release="backward" with gradient_accumulation_steps={num_micro_batches} of {owner}: buckets step in the '
            'first backward. Use gradient_accumulation_steps=1 (a larger batch fits with recompute), or release="none"'
        )


def name_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Give the optimizer's groups the names that its parameters have in ``model``, where it has none yet.

    Messages and state dicts speak of these names. If one parameter is not the model's, none are given.
    """
    if any("param_names" in group for group in optimizer.param_groups):
        return
    names = {id(param): name for name, param in model.named_parameters()}
    if all(id(param) in names for group in optimizer.param_groups for param in group["params"]):
        for group in optimizer.param_groups:
            group["param_names"] = [names[id(param)] for param in group["params"]]


def _without_stale_main_params(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a bare torch optimizer made of main_params: it resumed from a wrapper's state dict, and saved.

    It cast them to the parameter's dtype, and did not update them.
    """
    if "fusedopt" in state_dict or "state" not in state_dict:
        return state_dict

    def is_stale(name: str, value: Any) -> bool:
        return name == "main_param" and getattr(value, "dtype", None) in LOW_PRECISION

    state = {
        key: {name: value for name, value in item.items() if not is_stale(name, value)}
        if isinstance(item, Mapping)
        else item
        for key, item in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _mismatches(setting: Owned, sources: Sequence[Mapping[str, Given]]) -> Iterator[str]:
    """Yield a line for every value in ``sources`` that is neither "auto" nor the owner's."""
    for source in sources:
        item = source.get(setting.name)
        if item is None or str(item.value).strip().lower() == "auto":
            continue
        spelt = _as_switch if isinstance(setting.value, bool) else _as_number
        if spelt(item.value) != spelt(setting.value):
            yield (
                f"{setting.name}={item.value!r} ({item.origin}): {setting.owner} has {setting.value!r}; write 'auto', "
                f"or the same in both"
            )


def _as_switch(value: Any) -> bool:
    return str(value).strip().lower() in ("1", "true", "yes", "on")


def _as_number(value: Any) -> float | str:
    """Return what two spellings of one number have in common; 0 stands for off."""
    text = str(value).strip().lower()
    if text in ("", "none", "null"):
        return 0.0
    try:
        number = float(text)
    except ValueError:
        return text
    return 0.0 if number == float("inf") else number
