"""`FusedOptMixin`: what a transformers Trainer does differently over fp32 main gradients, and nothing else.

    create_optimizer -> wrap -> [no_sync around micro-batches] -> step (reduces, clips, measures) -> save on all ranks

The Trainer keeps its loop: accumulation windows, loss scaling, schedules, evaluation. Left out is the
DistributedDataParallel around the model, since the wrapper reduces. Clipping is the wrapper's, in `step`: one
pass for norm and clip, of which the norm is known, and logged, after the step.

Needs no transformers itself: it is mixed into a Trainer class.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fusedopt.config import MainGradConfig
from fusedopt.integrations import resume
from fusedopt.integrations.arguments import FusedOptArguments, Owned, refuse_released_accumulation
from fusedopt.integrations.refusals import KnownParameters, refuse_model, refuse_optim, refuse_training_arguments
from fusedopt.integrations.scaling import share_scaler
from fusedopt.integrations.versions import require_trainer
from fusedopt.optimizer import FusedMainGradOptimizer
from fusedopt.sharding.replicas import broadcast_module

_Trainer: Any = object  # a class of transformers stands behind the mixin


def trainer_config(fusedopt_args: FusedOptArguments, args: Any, *, trainer_clips: bool) -> MainGradConfig:
    """Return the settings for a Trainer with ``args``.

    The Trainer accumulates by itself: every ``step()`` ends a window, and ``gradient_accumulation_steps`` is 1.

    Args:
        fusedopt_args: the flags.
        args: ``TrainingArguments``.
        trainer_clips: whether clipping stays with the Trainer, as in a stock one; else ``step()`` clips and measures.

    Raises:
        ValueError: every mismatch between flags, file, environment and ``args``, in one error.
    """
    max_grad_norm = args.max_grad_norm or None
    measured = None if trainer_clips else (max_grad_norm or float("inf"))
    owned = (
        Owned("gradient_accumulation_steps", args.gradient_accumulation_steps, "TrainingArguments", 1),
        Owned("max_grad_norm", args.max_grad_norm, "TrainingArguments", measured),
        Owned("gradient_average", True, "Trainer, which divides the loss itself,", True),
    )
    problems = []
    names = ("activation_checkpointing", "gradient_checkpointing")  # the second, in older transformers
    if fusedopt_args.recompute and any(getattr(args, name, False) for name in names):
        problems.append(
            "recompute with the Trainer's own checkpointing: layers would recompute twice; drop one of them"
        )
    config = fusedopt_args.to_config(owned, problems=problems)
    refuse_released_accumulation(config, args.gradient_accumulation_steps, "TrainingArguments")
    if config.release == "backward" and trainer_clips and max_grad_norm is not None:
        raise ValueError(
            f'release="backward" with max_grad_norm={max_grad_norm} of TrainingArguments: the Trainer clips after '
            "backward, when buckets have stepped. Set max_grad_norm=0 there, or use FusedOptTrainer, which clips by "
            'the norm of the last step where clip_by="previous"'
        )
    return config


class FusedOptMixin(_Trainer):  # type: ignore[misc]
    """Train with fp32 main gradients: put it before a Trainer class, ``class Mine(FusedOptMixin, SFTTrainer)``.

    Args:
        *args: of the Trainer.
        fusedopt_args: the flags; default: main_grad, unsharded. Without ``main_grad`` training is stock.
        **kwargs: of the Trainer.

    Raises:
        ImportError: for transformers or accelerate outside the supported range.
        TypeError, ValueError: for a model, optimizer or ``TrainingArguments`` that cannot be trained so, and for
            every mismatch of settings; before training starts.
    """

    save_optimizer_whole = True
    """Whether checkpoints hold one whole optimizer state, which loads on any number of ranks. False: each rank writes
    its part, which needs no memory for the whole and loads on as many ranks only."""

    optimizer: Any

    def __init__(self, *args: Any, fusedopt_args: FusedOptArguments | None = None, **kwargs: Any) -> None:
        require_trainer(FusedOptMixin, self)
        self.fusedopt_args = FusedOptArguments(main_grad=True) if fusedopt_args is None else fusedopt_args
        self._wrapper: FusedMainGradOptimizer | None = None
        self._known: KnownParameters | None = None
        self._trained: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        super().__init__(*args, **kwargs)
        if self.fusedopt_args.main_grad:
            if self.optimizer is None and self.optimizer_cls_and_kwargs is None:
                refuse_optim(str(getattr(self.args.optim, "value", self.args.optim)))
            self.add_callback(_clearing_callback(self))

    @property
    def main_grad_optimizer(self) -> FusedMainGradOptimizer | None:
        """The wrapper, once training has started: ``skipped_steps``, ``memory_report()``."""
        return self._wrapper

    # -- before training

    def create_accelerator_and_postprocess(self) -> None:
        """Have accelerate prepare models without DistributedDataParallel; check what can be checked by now."""
        if self.fusedopt_args.main_grad:
            trainer_config(self.fusedopt_args, self.args, trainer_clips=False)
            refuse_training_arguments(self.args)
        super().create_accelerator_and_postprocess()
        if not self.fusedopt_args.main_grad:
            return
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # by accelerate launch
            raise ValueError(
                "accelerate was configured for DeepSpeed or FSDP, which own parameters and gradients. Start with "
                "torchrun, or choose multi-GPU in accelerate config; --main_grad_shard optimizer is ZeRO-1, gradients "
                "is ZeRO-2"
            )
        if getattr(self, "model", None) is not None:
            refuse_model(self.model)
        # As for evaluation: autocast, device placement and torch.compile, but nothing around the model that reduces.
        self.accelerator.prepare_model = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer as the Trainer does, and wrap it; prepare the model's layers."""
        if self._wrapper is not None and self._wrapper in (self.optimizer, getattr(self.optimizer, "optimizer", None)):
            if self._known is not None:
                self._known.refuse_changes(self.model)
            return self.optimizer
        self._release()
        if not self.fusedopt_args.main_grad:
            super().create_optimizer(*args, **kwargs)
            self.fusedopt_args.prepare_layers(self.model, fused_linear=False)
            return self.optimizer
        refuse_model(self.model)
        if self.model in self._trained:
            raise RuntimeError(
                "model_init returned a model that this Trainer has trained before: a second run would start from its "
                "weights. Build a new model on each call"
            )
        super().create_optimizer(*args, **kwargs)
        if isinstance(self.optimizer, FusedMainGradOptimizer):
            raise RuntimeError(
                "the Trainer was given a FusedMainGradOptimizer; give it the bare optimizer, or none: FusedOptTrainer "
                "wraps it with the settings of TrainingArguments and fusedopt_args"
            )
        self.optimizer = self._wrapper = self._wrap(self.optimizer)
        return self.optimizer

    def _wrap(self, optimizer: torch.optim.Optimizer) -> FusedMainGradOptimizer:
        config = trainer_config(self.fusedopt_args, self.args, trainer_clips=False)
        if self.args.world_size > 1 and config.broadcast_params:
            broadcast_module(self.model)  # frozen weights and buffers as well, which DDP would have done
        wrapper = self.fusedopt_args.wrap(self.model, optimizer, config)
        self._known = KnownParameters(self.model)
        if self.model_init is not None:
            self._trained.add(self.model)
        if self._is_sharded(wrapper):
            share_scaler(self.accelerator)
        return wrapper

    def _release(self) -> None:
        """Let go of the wrapper of an earlier run: its buffers, and what it attached to the model."""
        wrapper, self._wrapper, self._known = self._wrapper, None, None
        if wrapper is not None:
            wrapper.unwrap()

    def _is_sharded(self, wrapper: FusedMainGradOptimizer) -> bool:
        return wrapper.config.shard != "none" and self.args.world_size > 1

    # -- one window

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch; all but the window's last keep their gradients on their rank."""
        return self._step_under_no_sync(super().training_step, *args, **kwargs)

    def _step_under_no_sync(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.accelerator.gradient_state
        reduces = state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False)
        with nullcontext() if self._wrapper is None or reduces else self._wrapper.no_sync():
            return step(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return super()._clip_grad_norm(model) if self._wrapper is None else None  # step() clips

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self._wrapper is None:
            return super()._get_grad_norm(model, grad_norm=grad_norm)
        return float("nan")  # known after the step, see `_maybe_log_save_evaluate`

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        if self._wrapper is not None and grad_norm is not None and not self.accelerator.optimizer_step_was_skipped:
            grad_norm = self._wrapper.grad_norm
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # -- checkpoints

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save = super()._save_optimizer_and_scheduler
        if self._wrapper is None or not self._is_sharded(self._wrapper):
            save(output_dir)
        else:
            resume.save_on_all_ranks(
                self._wrapper,
                self.args,
                output_dir,
                functools.partial(save, output_dir),
                whole=self.save_optimizer_whole,
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._wrapper is None or checkpoint is None or not resume.is_ours_to_load(self.args, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            resume.load_on_all_ranks(self._wrapper, self.lr_scheduler, self.args, checkpoint)


def _clearing_callback(trainer: FusedOptMixin) -> Any:
    """Return a callback that clears through the wrapper: under a shard of gradients, model.zero_grad() sees none."""
    from transformers import TrainerCallback

    class ClearMainGrads(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer.main_grad_optimizer is not None:
                trainer.main_grad_optimizer.zero_grad()

        on_step_end = on_train_begin

    return ClearMainGrads()
