"""fusedopt in an accelerate loop, on any number of ranks.

    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

What ``accelerator.prepare`` does, but for the DistributedDataParallel around the model: the wrapper reduces. The loop
stays accelerate's. What touches gradients or their optimizer's state it hands to the wrapper: ``no_sync`` (and so
``accumulate``), ``clip_grad_norm_``, ``clip_grad_value_``, and ``save_state``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt.config import MainGradConfig
from fusedopt.integrations.arguments import FusedOptArguments, Owned, refuse_released_accumulation
from fusedopt.integrations.refusals import refuse_model
from fusedopt.integrations.scaling import share_scaler
from fusedopt.integrations.versions import require
from fusedopt.optimizer import FusedMainGradOptimizer
from fusedopt.sharding.replicas import broadcast_module

_OWNERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")
"""What accelerate may be configured for that owns gradients itself; names in its ``DistributedType``."""


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Optimizer,
    *others: Any,
    fusedopt_args: FusedOptArguments | None = None,
    **settings: Any,
) -> tuple[Any, ...]:
    """Do what ``accelerator.prepare`` does, with the optimizer wrapped and nothing around the model that reduces.

    All ranks call it. A bare ``optimizer`` is wrapped here, after the model was moved to its device; frozen weights and
    buffers, too, start as the first rank's.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: bare.
        optimizer: over parameters of ``model``; bare, or a `FusedMainGradOptimizer` made on the model's device.
        *others: dataloaders, schedulers and what else ``accelerator.prepare`` takes.
        fusedopt_args: flags; without ``main_grad`` training is stock.
        **settings: fields of `MainGradConfig`: ``shard="optimizer"``.

    Returns:
        ``(model, optimizer, *others)``, prepared; the wrapper is the prepared optimizer's ``.optimizer``.

    Raises:
        ImportError, TypeError, ValueError, RuntimeError: for versions, a model, optimizer or ``Accelerator`` that
            cannot train so. What wrapping refuses comes after ``model`` was moved and its layers prepared by the flags.
    """
    if fusedopt_args is not None and settings:
        raise ValueError(f"prepare() was given fusedopt_args and {sorted(settings)}; give all of it as flags, or none")
    _refuse_objects(model, optimizer)
    if fusedopt_args is not None and not fusedopt_args.main_grad:
        fusedopt_args.prepare_layers(model, fused_linear=False)
        return tuple(accelerator.prepare(model, optimizer, *others))
    _refuse_accelerator(accelerator)
    refuse_model(model)
    _refuse_strangers(model, optimizer)
    if isinstance(optimizer, FusedMainGradOptimizer):
        if fusedopt_args is not None or settings:
            raise ValueError("the optimizer is wrapped already, and has its settings; drop those given to prepare()")
        config = optimizer.config
        _refuse_wrapped_elsewhere(accelerator, optimizer)
    else:
        config = _config(accelerator, fusedopt_args, settings)
    _refuse_merging_twice(accelerator, config)
    if config.shard != "none" and accelerator.num_processes > 1:
        share_scaler(accelerator)
    if not isinstance(optimizer, FusedMainGradOptimizer):
        (fusedopt_args or FusedOptArguments()).prepare_layers(model, fused_linear=config.fused_linear)
    # As for evaluation: autocast, device placement and torch.compile, but nothing around the model that reduces.
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    if accelerator.num_processes > 1 and config.broadcast_params:
        broadcast_module(model)  # frozen weights and buffers as well, as DDP does
    if not isinstance(optimizer, FusedMainGradOptimizer):
        bare_layers = FusedOptArguments(main_grad=True)  # they were prepared before torch.compile saw them
        optimizer = bare_layers.wrap(model, optimizer, dataclasses.replace(config, fused_linear=False))
    _Routes.install(accelerator)
    # Without the model: before 1.14 accelerate would prepare it a second time, with DistributedDataParallel.
    ready = accelerator.prepare(optimizer, *others)
    return (prepared, *ready) if others else (prepared, ready)


def _config(accelerator: Any, flags: FusedOptArguments | None, settings: dict[str, Any]) -> MainGradConfig:
    if flags is None:
        return MainGradConfig.from_env(**settings)
    steps = Owned("gradient_accumulation_steps", accelerator.gradient_accumulation_steps, "the Accelerator", 1)
    return flags.to_config((steps,))


class _Routes:
    """What one Accelerator hands to those of its optimizers that are wrappers.

    Looks them up each time: ``free_memory()`` lets go of them.

    Args:
        accelerator: its methods are replaced on the instance.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._no_sync = accelerator.no_sync
        self._clip_norm = accelerator.clip_grad_norm_
        self._clip_value = accelerator.clip_grad_value_

    @classmethod
    def install(cls, accelerator: Any) -> None:
        """Put the routes into ``accelerator``, once."""
        if isinstance(getattr(accelerator.no_sync, "__self__", None), cls):
            return
        routes = cls(accelerator)
        accelerator.no_sync = routes.no_sync
        accelerator.clip_grad_norm_ = routes.clip_grad_norm_
        accelerator.clip_grad_value_ = routes.clip_grad_value_
        accelerator.register_save_state_pre_hook(routes.before_save)

    def _wrappers(self) -> Iterator[FusedMainGradOptimizer]:
        for prepared in self._accelerator._optimizers:
            if isinstance(prepared.optimizer, FusedMainGradOptimizer):
                yield prepared.optimizer

    def _is_sharded(self, wrapper: FusedMainGradOptimizer) -> bool:
        return wrapper.config.shard != "none" and self._accelerator.num_processes > 1

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Keep gradients of ``model`` on their rank, as accelerate's own does for DDP."""
        of_model = {id(param) for param in model.parameters()}
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._no_sync(model))
            for wrapper in self._wrappers():
                if not of_model.isdisjoint(map(id, _params(wrapper))):
                    stack.enter_context(wrapper.no_sync())
            yield

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clip with the wrapper that holds ``parameters``: one norm over all ranks. Others are clipped by accelerate.

        Raises:
            ValueError: if ``parameters`` are some of a sharded wrapper's, or more: a rank sees its share of them.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        asked = {id(param): param for param in parameters}
        for wrapper in self._wrappers():
            ours = {id(param) for param in _params(wrapper) if param.requires_grad}
            missing = ours - asked.keys()
            strangers = [p for p in parameters if id(p) not in ours and p.grad is not None]
            if ours.isdisjoint(asked) or not ours:
                continue
            if not missing and not strangers:
                self._accelerator.unscale_gradients()
                return wrapper.clip_grad_norm_(max_norm, float(norm_type))
            if self._is_sharded(wrapper):
                raise ValueError(
                    f"clip_grad_norm_ was given {len(ours) - len(missing)} of the {len(ours)} parameters of an "
                    f"optimizer with shard={wrapper.config.shard!r}, and {len(strangers)} others that have gradients. "
                    "Under a shard a rank sees its share of the gradients only, and one norm goes over all of the "
                    "optimizer's: give accelerator.clip_grad_norm_ all of them, or use shard='none'"
                )
        return self._clip_norm(parameters, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> Any:
        """Clip values where gradients are whole.

        Raises:
            ValueError: under a shard.
        """
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        asked = {id(param) for param in parameters}
        for wrapper in self._wrappers():
            if self._is_sharded(wrapper) and not asked.isdisjoint(map(id, _params(wrapper))):
                raise ValueError(
                    f"clip_grad_value_ with shard={wrapper.config.shard!r}: a rank sees its share of the gradients "
                    "only, not their mean over ranks. Use accelerator.clip_grad_norm_, or shard='none'"
                )
        return self._clip_value(parameters, clip_value)

    def before_save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """Bring sharded state together on the main process, which writes it; all ranks are here."""
        for wrapper in filter(self._is_sharded, self._wrappers()):
            if self._accelerator.project_configuration.save_on_each_node:
                raise ValueError(
                    f"save_on_each_node=True with shard={wrapper.config.shard!r}: the whole optimizer state is brought "
                    "together on the main process only. Save to a folder that all nodes see, with "
                    "save_on_each_node=False"
                )
            wrapper.consolidate_state_dict(to=0)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])


# -- what cannot be trained so


def _refuse_objects(model: Any, optimizer: Any) -> None:
    require("accelerate")
    from accelerate.optimizer import AcceleratedOptimizer  # type: ignore[import-untyped]

    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare(accelerator, model, optimizer, *others) was given a {type(model).__name__} for the model and a "
            f"{type(optimizer).__name__} for the optimizer; needed are a torch.nn.Module and a torch.optim.Optimizer, "
            "in this order. Several optimizers go into one FusedMainGradOptimizer([...])"
        )
    if isinstance(optimizer, AcceleratedOptimizer):
        raise TypeError(
            "the optimizer went through accelerator.prepare already; give the bare one to "
            "fusedopt.integrations.accelerate.prepare, which does that as well"
        )


def _refuse_accelerator(accelerator: Any) -> None:
    problems = []
    kind = str(getattr(accelerator.distributed_type, "name", accelerator.distributed_type))
    if kind in _OWNERS:
        problems.append(
            f"it is configured for {kind}, which owns parameters or gradients itself. Start with torchrun, or choose "
            "multi-GPU in accelerate config; shard='optimizer' is ZeRO-1, shard='gradients' ZeRO-2"
        )
    elif accelerator.mixed_precision == "fp8":
        problems.append("mixed_precision='fp8' replaces layers while preparing; use 'bf16', 'fp16' or 'no'")
    if accelerator.parallelism_config is not None:
        problems.append("parallelism_config: fusedopt takes the mean over all ranks, as copies of one model; drop it")
    num_started = int(os.environ.get("WORLD_SIZE", 1))
    if num_started > 1 and accelerator.num_processes == 1:
        problems.append(
            f"torchrun started {num_started} ranks, and it takes this one for the only one: all would read the same "
            "batches and write the same files. On CPUs make it Accelerator(cpu=True)"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", "no")
    hook = str(getattr(hook, "value", hook))
    if hook != "no":
        problems.append(
            f"DistributedDataParallelKwargs(comm_hook={hook}): there is no DDP to run it, gradients travel in fp32; "
            "drop it"
        )
    if problems:
        raise ValueError("\n  - ".join(["fusedopt cannot train under this Accelerator:", *problems]))


def _refuse_strangers(model: nn.Module, optimizer: Optimizer) -> None:
    known = {id(param) for param in model.parameters()}
    strangers = [param for param in _params(optimizer) if id(param) not in known]
    if strangers:
        raise ValueError(
            f"the optimizer holds {len(strangers)} parameter(s) that are not the model's, the first of shape "
            f"{tuple(strangers[0].shape)}. Make it over the parameters of the model given here; several modules under "
            "one optimizer go into one (torch.nn.ModuleList)"
        )


def _refuse_wrapped_elsewhere(accelerator: Any, wrapper: FusedMainGradOptimizer) -> None:
    place = accelerator.device
    for param in _params(wrapper) if accelerator.device_placement else ():
        at = param.device
        is_same_index = at.index == place.index or None in (at.index, place.index)
        if at.type != place.type or not is_same_index:
            raise ValueError(
                f"the FusedMainGradOptimizer was made while the model was on {at}, and accelerate moves the model to "
                f"{place}, away from its main_grads. Give prepare() the bare optimizer, with the settings as keywords; "
                "or call model.to(accelerator.device) first, and wrap after"
            )


def _refuse_merging_twice(accelerator: Any, config: MainGradConfig) -> None:
    k, merged = accelerator.gradient_accumulation_steps, config.gradient_accumulation_steps
    if k > 1 and merged > 1:
        raise ValueError(
            f"gradient_accumulation_steps is {k} in the Accelerator and {merged} in fusedopt, which would step every "
            f"{k * merged} micro-batches; leave fusedopt's at 1"
        )
    refuse_released_accumulation(config, k, "the Accelerator")
