"""Swap ``nn.Linear`` for `FusedLinear` inside a model, and back.

Only the module's class changes: the module object, its Parameters, their names, hooks, the training
flag and tying stay what they were, so that order against wrapping the optimizer does not matter.

Knows nothing of optimizers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from fusedopt._torch_private import parameters_of
from fusedopt.layers.linear import FusedLinear

Pattern = str | type[nn.Module]


@dataclass
class Conversion:
    """What `convert_linears` did.

    Args:
        converted: names of the modules that are `FusedLinear` now.
        skipped: names of the linear layers that were left alone, each with the reason.
    """

    converted: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line per skipped layer under a line of counts."""
        lines = [f"{len(self.converted)} linear layer(s) converted, {len(self.skipped)} skipped"]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.skipped.items()])


def convert_linears(
    model: nn.Module,
    include: Pattern | Iterable[Pattern] | None = None,
    exclude: Pattern | Iterable[Pattern] | None = None,
    *,
    exact: bool = True,
) -> Conversion:
    """Make the plain linear layers of ``model`` `FusedLinear`, in place.

    Args:
        model: any module; itself, too, if it is a linear layer.
        include: only these: name patterns (``"*.mlp.*"``, matched against the whole module name) and module
            classes (the layer itself, or a module around it). Default: all.
        exclude: not these; same forms, above ``include``.
        exact: see `fused_linear`.

    Returns:
        What was converted, and what was skipped and why: classes with a forward of their own (quantised layers,
        LoRA layers, parametrised weights), weights that are frozen or no Parameter.

    Raises:
        TypeError: if ``model`` is no module, or a pattern neither a string nor a module class.
        ValueError: if a pattern matches no linear layer.
        Nothing was changed when one of these is raised.
    """
    _check_module(model)
    included, excluded = _as_list(include), _as_list(exclude)
    layers = list(_linears(model))
    for pattern in [*included, *excluded]:
        if not any(_matches(pattern, name, chain) for name, chain in layers):
            names = ", ".join(repr(name) for name, _ in layers[:3])
            raise ValueError(
                f"the pattern {pattern!r} matches none of the {len(layers)} linear layer(s) of the model; patterns are "
                f"module classes, or match whole module names, such as {names or '(none there)'}"
            )
    report = Conversion()
    for name, chain in layers:
        layer = chain[-1]
        if included and not any(_matches(p, name, chain) for p in included):
            reason: str | None = "not included"
        elif any(_matches(p, name, chain) for p in excluded):
            reason = "excluded"
        else:
            reason = _why_not(layer)
        if reason is None:
            layer.__class__ = FusedLinear
            layer.exact = exact  # type: ignore[assignment]
            report.converted.append(name)
        else:
            report.skipped[name] = reason
    return report


def restore_linears(model: nn.Module) -> list[str]:
    """Make every `FusedLinear` of ``model`` a plain ``nn.Linear`` again, in place; return their names."""
    _check_module(model)
    restored = []
    for name, module in model.named_modules():
        if type(module) is FusedLinear:
            module.__class__ = nn.Linear  # type: ignore[assignment]
            vars(module).pop("exact", None)
            restored.append(name)
    return restored


def _linears(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield every linear layer's name and the chain of modules down to it, each layer once."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            parts = name.split(".") if name else []
            chain = [model]
            for part in parts:
                chain.append(chain[-1].get_submodule(part))
            yield name, chain


def _matches(pattern: Pattern, name: str, chain: list[nn.Module]) -> bool:
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    return any(isinstance(module, pattern) for module in chain)


def _as_list(patterns: Pattern | Iterable[Pattern] | None) -> list[Pattern]:
    if patterns is None:
        return []
    found = list(patterns) if isinstance(patterns, Iterable) and not isinstance(patterns, (str, type)) else [patterns]
    for pattern in found:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(
                f"the pattern {pattern!r} is a {type(pattern).__name__}; needed is a module name such as '*.mlp.*', a "
                "module class such as nn.Linear, or a list of these"
            )
    return found


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}; needed is one torch.nn.Module, whose linear layers are swapped in "
            "place (several: nn.ModuleList([...]), or one call for each)"
        )


def _why_not(layer: nn.Module) -> str | None:
    if type(layer) is FusedLinear:
        return "is a FusedLinear already"
    if type(layer) is not nn.Linear:
        return f"is a {type(layer).__name__}, which has its own forward"
    if "forward" in vars(layer):
        return "has a forward of its own set on the instance"
    weight = parameters_of(layer).get("weight")
    if not isinstance(weight, nn.Parameter):
        return "has a weight that is no Parameter (weight_norm, for one)"
    if not weight.requires_grad:
        return "has a frozen weight"
    if not weight.dtype.is_floating_point or hasattr(weight, "device_mesh"):
        return f"has a weight of {weight.dtype} ({type(weight).__name__}) that is not a plain floating-point one"
    return None
