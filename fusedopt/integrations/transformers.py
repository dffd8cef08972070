"""fusedopt in a transformers Trainer, by one flag.

    parser = HfArgumentParser((ModelArguments, TrainingArguments, FusedOptArguments))
    trainer = FusedOptTrainer(model, args, fusedopt_args=fusedopt_args, ...)

`FusedOptTrainer` is ``Trainer`` with `FusedOptMixin`, which goes before any Trainer class. `optimizer_factory` plugs
into a stock Trainer where there is one process.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fusedopt.integrations.arguments import FusedOptArguments
from fusedopt.integrations.refusals import refuse_model, refuse_optim, refuse_training_arguments
from fusedopt.integrations.trainer import FusedOptMixin, trainer_config
from fusedopt.integrations.versions import require
from fusedopt.optimizer import FusedMainGradOptimizer

__all__ = ["FusedOptArguments", "FusedOptMixin", "FusedOptTrainer", "optimizer_factory"]  # noqa: F822 - see __getattr__


def optimizer_factory(args: Any, fusedopt_args: FusedOptArguments | None = None) -> tuple[type, dict[str, Any]]:
    """Return ``optimizer_cls_and_kwargs`` for a stock Trainer in one process.

    The Trainer calls it with the whole model: it makes the optimizer that ``--optim`` names over the Trainer's decay
    groups, wraps it, converts linear layers and applies recomputation.

    Args:
        args: ``TrainingArguments``.
        fusedopt_args: the flags; default: main_grad. Without ``main_grad`` the optimizer stays bare.

    Raises:
        ImportError: for transformers or accelerate outside the supported range.
        ValueError: for settings that do not fit together, and for several ranks, which need `FusedOptTrainer`.
    """
    require("transformers", "accelerate")
    fusedopt_args = FusedOptArguments(main_grad=True) if fusedopt_args is None else fusedopt_args
    if fusedopt_args.main_grad:
        trainer_config(fusedopt_args, args, trainer_clips=True)
        refuse_training_arguments(args)
        refuse_optim(str(getattr(args.optim, "value", args.optim)))
        if args.world_size > 1:
            raise ValueError(
                f"optimizer_factory under {args.world_size} ranks: a stock Trainer puts DistributedDataParallel around "
                "the model, which would reduce a second time. Use FusedOptTrainer, or FusedOptMixin before your class"
            )
    return _Factory, {"args": args, "fusedopt_args": fusedopt_args}


class _Factory:
    """What a Trainer takes for something that makes an optimizer from a model: it is no Optimizer class."""

    def __call__(self, model: nn.Module, args: Any, fusedopt_args: FusedOptArguments) -> Any:
        from transformers import Trainer

        trainer = Trainer.__new__(Trainer)  # one that makes its optimizer, and nothing else
        trainer.args, trainer.model = args, model
        trainer.optimizer = trainer.optimizer_cls_and_kwargs = None
        if not fusedopt_args.main_grad:
            fusedopt_args.prepare_layers(model, fused_linear=False)
            return trainer.create_optimizer()
        refuse_model(model)
        optimizer = trainer.create_optimizer()
        config = trainer_config(fusedopt_args, args, trainer_clips=True)
        wrapper: FusedMainGradOptimizer = fusedopt_args.wrap(model, optimizer, config)
        return wrapper


def __getattr__(name: str) -> Any:
    """Make `FusedOptTrainer` when it is first asked for: importing this module imports no transformers."""
    if name != "FusedOptTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers", "accelerate")
    from transformers import Trainer

    doc = "transformers' Trainer over fp32 main gradients; see `FusedOptMixin`."
    made = type("FusedOptTrainer", (FusedOptMixin, Trainer), {"__module__": __name__, "__doc__": doc})
    globals()["FusedOptTrainer"] = made
    return made
