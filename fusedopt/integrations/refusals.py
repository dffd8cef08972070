"""Refuse, before training starts, what a training library set up in a way that fusedopt would train wrongly.

    [refusals] -> wrap -> train

Every message says what was found, what is needed, what to do. Other libraries' classes are known by name, so that none
of them is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import nn

from fusedopt.checks import refuse_quantised
from fusedopt.integrations.versions import require_of

_REDUCERS = {
    "DistributedDataParallel": "DistributedDataParallel, and would reduce gradients that main_grad already holds",
    "DataParallel": "DataParallel, whose copies of the model have no main_grad",
    "FullyShardedDataParallel": "FSDP, which owns parameters and gradients itself",
    "FSDPModule": "FSDP2 (fully_shard), which owns parameters and gradients itself",
    "DeepSpeedEngine": "a DeepSpeed engine, which owns parameters and optimizer itself",
}
"""Classes around (or of) a model, by name, with what is said of them."""


_UNWRAPPABLE = (
    ("lomo", "updates each parameter inside backward, and never sees an accumulated gradient"),
    ("layerwise", "updates each parameter inside backward, and never sees an accumulated gradient"),
    ("8bit", "keeps 8-bit state in a format of its own, which is not cut over ranks or saved in full precision"),
    ("4bit", "keeps 4-bit state in a format of its own, which is not cut over ranks or saved in full precision"),
)
"""Parts of ``--optim`` names whose optimizers cannot be given fp32 main_params, with the reason."""


def refuse_model(model: nn.Module) -> None:
    """Raise unless ``model`` is a bare module with parameters that can have main_grad.

    Raises:
        ImportError: for modules of a PEFT outside the supported range.
        TypeError: if DDP, FSDP or DeepSpeed holds it, or trainable weights are quantised.
    """
    require_of(model)
    for name, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _REDUCERS:
                where = f"module {name} of the model" if name else "the model"
                raise TypeError(
                    f"{where} is a {type(module).__name__}: {_REDUCERS[cls.__name__]}. Give the bare module "
                    "(.module of the wrapped one): fusedopt reduces by itself. --main_grad_shard optimizer is ZeRO-1, "
                    "gradients is ZeRO-2"
                )
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        refuse_quantised(name, param)
        if hasattr(param, "device_mesh"):
            raise TypeError(
                f"parameter {name} is a DTensor (tensor parallel, or sharded at load time); load the model without "
                "tp_plan, device_mesh or distributed_config"
            )


def refuse_optim(name: str) -> None:
    """Raise if ``--optim name`` makes an optimizer that cannot be wrapped.

    Raises:
        ValueError: with the reason, and what to use.
    """
    for part, reason in _UNWRAPPABLE:
        if part in name:
            raise ValueError(
                f"optim={name!r} cannot be wrapped: it {reason}. Use a full-precision one, such as adamw_torch_fused "
                "or adafactor, with --main_grad_shard optimizer to save memory on several ranks; or drop --main_grad"
            )


def refuse_training_arguments(args: Any) -> None:
    """Raise if another library is told to own gradients, parameters or ranks.

    Args:
        args: ``TrainingArguments``.

    Raises:
        ValueError: with every such setting.
    """
    problems = list(_owners(args))
    if problems:
        raise ValueError("\n  - ".join(["fusedopt cannot train under these TrainingArguments:", *problems]))


def _owners(args: Any) -> Iterator[str]:
    if getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None):
        yield (
            "deepspeed: DeepSpeed replaces model and optimizer. Drop --deepspeed; --main_grad_shard optimizer is "
            "ZeRO-1, gradients is ZeRO-2"
        )
    if getattr(args, "fsdp", None) or getattr(args, "fsdp_plugin_args", None):
        yield (
            "fsdp: FSDP owns parameters and gradients. Drop --fsdp (and ACCELERATE_USE_FSDP); --main_grad_shard "
            "gradients shards all but the bf16 parameters"
        )
    if getattr(args, "parallelism_config", None) is not None:
        yield "parallelism_config: fusedopt takes the mean over all ranks, as copies of one model; drop it"
    num_started = int(os.environ.get("WORLD_SIZE", 1))
    if num_started > 1 and args.world_size == 1:
        yield (
            f"torchrun started {num_started} ranks, and TrainingArguments takes this one for the only one: all would "
            "read the same batches and write the same files. On CPUs add --use_cpu"
        )
    if getattr(args, "n_gpu", 1) > 1:
        yield (
            f"{args.n_gpu} GPUs in one process are nn.DataParallel, whose copies have no main_grad. Start one process "
            "for each (torchrun --nproc-per-node), or set CUDA_VISIBLE_DEVICES to one"
        )


class KnownParameters:
    """The parameters of a model as they were when its optimizer was wrapped.

    Args:
        model: the bare module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._known = {name: (p, p.shape, p.requires_grad) for name, p in model.named_parameters()}

    def refuse_changes(self, model: nn.Module) -> None:
        """Raise if a parameter that trains now is not the one that the optimizer holds.

        Raises:
            RuntimeError: naming it: replaced or resized (embeddings, for one), added or unfrozen since.
        """
        for name, param in model.named_parameters():
            if not param.requires_grad:
                continue
            known, shape, was_trainable = self._known.get(name, (None, None, False))
            if known is param and shape == param.shape and was_trainable:
                continue
            if known is None:
                what = "was added"
            elif known is param and shape == param.shape:
                what = "was frozen, and is trainable"
            else:
                what = f"was replaced or resized, {tuple(shape or ())} to {tuple(param.shape)}"
            raise RuntimeError(
                f"parameter {name} {what} since the optimizer was wrapped, and would not train. Resize embeddings and "
                "add layers before train(); or set trainer.optimizer and trainer.lr_scheduler to None, so that train() "
                "makes new ones"
            )
