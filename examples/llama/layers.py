"""Flags that change how layers compute, not what: fused weight gradients, and recomputed activations."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn


@dataclass
class LayerArguments:
    """How layers run backward."""

    fused_linear: bool = field(
        default=False, metadata={"help": "Accumulate weight gradients straight into main_grad (runs with fusedopt)."}
    )
    recompute: bool = field(default=False, metadata={"help": "Recompute activations in backward, in every run."})
    recompute_granularity: str = field(
        default="full", metadata={"help": "What is recomputed: full, full_attn or core_attn."}
    )
    recompute_use_reentrant: bool = field(default=False, metadata={"help": "Use torch's reentrant checkpoint."})


def prepare_layers(model: nn.Module, args: LayerArguments, main_grad: bool) -> None:
    """Apply the flags to ``model``, in place; without ``main_grad`` there is nothing to fuse into."""
    if not (args.recompute or (args.fused_linear and main_grad)):
        return
    import fusedopt  # here, because a plain run does without

    if args.fused_linear and main_grad:
        print(fusedopt.convert_linears(model))
    if args.recompute:
        fusedopt.recompute.apply(model, args.recompute_granularity, args.recompute_use_reentrant)
