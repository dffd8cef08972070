"""Activation recomputation for transformers' LLaMA family, in three granularities, over torch's own checkpoint.

    forward (activations dropped) -> backward: recompute -> grad_input, main_grad += wgrad

``"full"`` recomputes each decoder layer, ``"full_attn"`` its attention module, ``"core_attn"``
only the scaled dot product between the projections. Results are bit-equal with and without:
torch restores dropout's generators and autocast.

Knows torch and the shape of such models (decoder layers with ``self_attn``), not transformers
itself, and nothing of optimizers.
"""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fusedopt._torch_private import submodules

GRANULARITIES = ("full", "full_attn", "core_attn")

_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
_SETTING = "_fusedopt_recompute"


def apply(
    model: nn.Module, granularity: str = "full", use_reentrant: bool = False, skip_layers: Iterable[int] = ()
) -> list[str]:
    """Recompute activations of ``model`` in backward, from now on, while it is in training mode.

    Args:
        model: of transformers' LLaMA family: decoder layers with a ``self_attn``.
        granularity: ``"full"``, ``"full_attn"`` or ``"core_attn"``.
        use_reentrant: which of torch's two checkpoints. The reentrant one leaves a layer alone that no input
            requires a gradient of, since it would lose the gradients of its parameters.
        skip_layers: numbers of decoder layers that keep their activations.

    Returns:
        The names of the modules that recompute, in order. A second call replaces the first.

    Raises:
        ValueError: unknown granularity, no decoder layer found, a layer number out of range, or a model whose own
            gradient checkpointing is on. Nothing was changed.
    """
    layers = _decoder_layers(model)
    skipped = set(skip_layers)
    _check(model, layers, granularity, skipped)
    remove(model)
    applied = []
    for number, (name, layer) in enumerate(layers):
        if number in skipped:
            continue
        target = layer if granularity == "full" else layer.self_attn
        setattr(target, _SETTING, use_reentrant)
        if granularity == "core_attn":
            _route_core(target, use_reentrant)
        else:
            target.forward = types.MethodType(_recomputing_forward, target)
        applied.append(name if granularity == "full" else f"{name}.self_attn")
    return applied


def remove(model: nn.Module) -> None:
    """Undo `apply`."""
    for module in model.modules():
        if vars(module).pop(_SETTING, None) is None:
            continue
        vars(module).pop("forward", None)
        if "_fusedopt_config" in vars(module):
            module.config = vars(module).pop("_fusedopt_config")


def _decoder_layers(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(_attention_of(module), nn.Module)]


def _attention_of(module: nn.Module) -> Any:
    return submodules(module).get("self_attn")


def _check(model: nn.Module, layers: list[tuple[str, Any]], granularity: str, skipped: set[int]) -> None:
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity={granularity!r} is unknown; use one of {', '.join(GRANULARITIES)}")
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no decoder layer with a self_attn; recompute.apply works on transformers' "
            "LLaMA family. Wrap other models' layers in torch.utils.checkpoint.checkpoint"
        )
    outside = sorted(number for number in skipped if not 0 <= number < len(layers))
    if outside:
        raise ValueError(f"skip_layers names {outside}; the model has layers 0 to {len(layers) - 1}")
    for name, layer in layers:
        if getattr(layer, "gradient_checkpointing", False):
            raise ValueError(
                f"gradient checkpointing of layer {name} is on already, and would recompute a second time; call model."
                "activation_checkpointing_disable() first (gradient_checkpointing_disable() in older transformers)"
            )
        for module in (layer, layer.self_attn):
            if "forward" in vars(module) and not hasattr(module, _SETTING):
                raise ValueError(f"layer {name} has a forward of its own set on the instance; remove that first")


def _recomputing_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    # A method of the instance: deepcopy binds it to the copied module.
    forward = types.MethodType(type(self).forward, self)
    if not self.training:
        return forward(*args, **kwargs)
    for name in _CACHES:  # a cache would be written a second time by the recomputation
        if kwargs.get(name) is not None:
            kwargs[name] = None
    if kwargs.get("use_cache"):
        kwargs["use_cache"] = False
    return _run(forward, args, kwargs, getattr(self, _SETTING))


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], use_reentrant: bool) -> Any:
    """Call ``function``, under a checkpoint where there is a gradient to recompute for."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if not use_reentrant:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if not any(isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())):
        return function(*args, **kwargs)
    names = list(kwargs)
    num_args = len(args)

    def positional(*values: Any) -> Any:  # the reentrant checkpoint sees gradients of positional tensors only
        return function(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    return checkpoint(positional, *args, *kwargs.values(), use_reentrant=True)


def _route_core(attention: Any, use_reentrant: bool) -> None:
    """Give one attention module a config of its own that names a recomputing attention function."""
    modeling = sys.modules[type(attention).__module__]
    registry = modeling.ALL_ATTENTION_FUNCTIONS
    implementation = attention.config._attn_implementation
    name = f"fusedopt_recompute_{'reentrant_' if use_reentrant else ''}{implementation}"
    stock = registry.get_interface(implementation, modeling.eager_attention_forward)
    registry.register(name, _RecomputedCore(stock, use_reentrant))
    vars(attention)["_fusedopt_config"] = attention.config
    attention.config = copy.copy(attention.config)
    attention.config._attn_implementation_internal = name


class _RecomputedCore:
    """An attention function that drops the scores and recomputes them in backward."""

    def __init__(self, stock: Callable[..., Any], use_reentrant: bool) -> None:
        self._stock = stock
        self._use_reentrant = use_reentrant

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not module.training:
            return self._stock(module, *args, **kwargs)
        return _run(self._stock, (module, *args), kwargs, self._use_reentrant)
