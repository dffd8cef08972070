"""Which library does the work on flat buffers: the only place that decides.

    parameters -> layout -> buffers -> arrival -> reduction -> [clip -> step -> write-back] -> gather

A `Backend` is a frozen table of functions with the signatures of `fusedopt.backends.torch_ops`,
which is the reference. What another library offers is taken only after it gave the right answer
to a small question on the very device. Knows nothing of who calls it.
"""

from __future__ import annotations

import functools
import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusedopt._version import __version__
from fusedopt.backends import torch_ops
from fusedopt.backends.offers import FUNCTIONS, LOW_PRECISION, Absent, Offer, Rule, asking
from fusedopt.backends.selfcheck import fault

ADAPTERS = {"transformer_engine": "te_ops", "apex": "apex_ops", "triton": "triton_ops"}
"""Of each library, the file here that knows it."""

NEEDS_CUDA = ("transformer_engine", "apex")
"""Libraries that read a CPU tensor's address as one on the device."""

AUTO = {"wgrad_accumulate_": ("transformer_engine", "apex")}
"""What ``"auto"`` tries before torch; docs/decisions/0005-auto-backend.md says why it is this little."""

HINTS = {
    "apex": "build it from github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1",
    "transformer_engine": 'pip install --no-build-isolation "transformer_engine[pytorch]"',
    "triton": "pip install triton (it comes with CUDA builds of torch)",
}


@dataclass(frozen=True)
class FusedStep:
    """A step rule in one pass over memory, model parameters included.

    Args:
        run: ``run(rule, operands, grad_scale=None, found_inf=None)``, see `offers.StepTensors`. ``grad_scale`` divides
            gradients, in place, and a nonzero ``found_inf`` leaves all as it is; both 0-d float32, on the device.
        takes: whether it knows a rule.
        takes_found_inf: whether ``grad_scale`` and ``found_inf`` may be given.
    """

    run: Callable[..., None]
    takes: Callable[[Rule], bool]
    takes_found_inf: bool


@dataclass(frozen=True)
class Backend:
    """The operations that a wrapper runs on one device; see `fusedopt.backends.torch_ops` for what each promises."""

    norm: Callable[..., Tensor] = torch_ops.norm
    found_inf: Callable[..., Tensor] = torch_ops.found_inf
    scale_cast_: Callable[..., None] = torch_ops.scale_cast_
    wgrad_accumulate_: Callable[..., None] = torch_ops.wgrad_accumulate_
    fused_step_: FusedStep | None = None
    """None: the inner optimizer's own step, which is torch's fused kernel under ``fused=True``."""


def resolve(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the table for model parameters of ``dtype`` on ``device``; decided once for each.

    Args:
        name: a value of `MainGradConfig.backend`.
        device: with its index, where it has one.
        dtype: of the model parameters.

    Raises:
        RuntimeError: if ``name`` asks for a library that is not there, or offers nothing on ``device``: why, and how
            to get it. Where it offers nothing for ``dtype`` alone, the functions are torch's.
    """
    backend, _ = _decide(name, device, dtype)
    return backend


def for_weight(weight: Tensor) -> Backend:
    """Return the table of whoever wrapped ``weight``; that of ``"auto"`` where nobody did."""
    backend: Backend | None = getattr(getattr(weight, "main_grad", None), "backend", None)
    return backend or resolve("auto", weight.device, weight.dtype)


@functools.cache
def offer(library: str) -> Offer:
    """Return what ``library`` offers; whatever goes wrong while finding out means that it is absent."""
    try:
        with asking("looking for it"):
            found: Offer = importlib.import_module(f"{__name__}.{ADAPTERS[library]}").offer()
    except Absent as absent:
        return Offer(None, {}, dict.fromkeys(FUNCTIONS, str(absent)))
    return found


@functools.cache
def _decide(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Backend, dict[str, tuple[str, str]]]:
    """Return the table, and per function who runs it and why the others that were asked do not."""
    chosen: dict[str, Any] = {}
    reasons: dict[str, tuple[str, str]] = {}
    for function in FUNCTIONS:
        libraries = AUTO.get(function, ()) if name == "auto" else () if name == "torch" else (name,)
        passed_over: list[str] = []
        for library in libraries:
            why_not = _why_not(library, function, device, dtype)
            if why_not is None:
                chosen[function] = _adapted(library, function)
                reasons[function] = library, "; ".join(passed_over)
                break
            passed_over.append(f"{library}: {why_not}")
        else:
            reasons[function] = "torch", "; ".join(passed_over)
    if not chosen and name not in ("auto", "torch"):
        _refuse_absent(name, device)
    if device.type == "cuda" and dtype in LOW_PRECISION:
        torch_ops.cuda_road(device, dtype)  # finds out now: it could not while a CUDA graph is captured
    return Backend(**chosen), reasons


def _refuse_absent(library: str, device: torch.device) -> None:
    """Raise unless ``library`` offers something on ``device``, be it for other dtypes only."""
    whys = [_why_not(library, function, device, LOW_PRECISION[0]) for function in FUNCTIONS]
    if all(whys):
        raise RuntimeError(
            f'backend="{library}" was asked for, and it has nothing to offer on {device} '
            f"({'; '.join(dict.fromkeys(filter(None, whys)))}). To get it: {HINTS[library]}. "
            'Or use backend="torch", or "auto" to take what is there'
        )


@functools.cache
def _why_not(library: str, function: str, device: torch.device, dtype: torch.dtype) -> str | None:
    if library in NEEDS_CUDA and device.type != "cuda":
        return "needs a CUDA device"
    if dtype not in (*LOW_PRECISION, torch.float32):
        return f"{dtype} is torch's"
    found = offer(library)  # imports it
    if function not in found.functions:
        return found.missing.get(function, "not offered")
    if function == "wgrad_accumulate_" and dtype not in LOW_PRECISION:
        return f"operands of {dtype} are torch's"
    return fault(function, found.functions[function], device, dtype if dtype in LOW_PRECISION else torch.bfloat16)


@functools.cache
def _adapted(library: str, function: str) -> Any:
    run = offer(library).functions[function]
    if function == "fused_step_":
        module = importlib.import_module(f"{__name__}.{ADAPTERS[library]}")
        return FusedStep(run, module.takes, module.TAKES_FOUND_INF)
    return _for_low_precision(run) if function == "wgrad_accumulate_" else run


def _for_low_precision(run: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(torch_ops.wgrad_accumulate_)
    def wgrad_accumulate_(
        main_grad: Tensor, grad_output: Tensor, input: Tensor, *, accumulate: bool, exact: bool = True
    ) -> None:
        # Autocast decides what dtype the operands have; the libraries take the common ones.
        is_common = main_grad.dtype is torch.float32 and grad_output.dtype is input.dtype in LOW_PRECISION
        do = run if is_common else torch_ops.wgrad_accumulate_
        do(main_grad, grad_output, input, accumulate=accumulate, exact=exact)

    return wgrad_accumulate_


@dataclass(frozen=True)
class Report:
    """What was found and chosen; ``str()`` of it is made to be pasted into a bug report.

    Args:
        versions: of fusedopt, Python, torch and the devices.
        libraries: per library: its version or "absent", what it offers; and per function that it does not, why.
        choices: per device, dtype and function: who runs it, and why not the others.
    """

    versions: tuple[str, ...]
    libraries: tuple[tuple[str, str, str, str], ...]
    choices: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        return "\n\n".join(
            (
                "\n".join(self.versions),
                _table(("library", "found", "offers", "why not"), self.libraries),
                _table(("device, dtype", "function", "who runs it", "why not the others"), self.choices),
            )
        )


def report(name: str = "auto") -> Report:
    """Say which libraries were found, what runs what under ``backend=name``, and why.

    Args:
        name: a value of `MainGradConfig.backend`.

    Raises:
        RuntimeError: as `resolve`.
    """
    cards = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    versions = [
        f"fusedopt {__version__}, backend={name}",
        f"Python {platform.python_version()}, torch {torch.__version__}, CUDA {torch.version.cuda or 'not built in'}",
        *(f"{card}: {torch.cuda.get_device_name(card)}" for card in cards),
    ]
    places = [(device, torch.bfloat16) for device in cards or [torch.device("cpu")]]
    choices = []
    for device, dtype in places:
        _, reasons = _decide(name, device, dtype)
        for function, (chosen, why_not) in reasons.items():
            label = "the inner optimizer" if function == "fused_step_" and chosen == "torch" else chosen
            choices.append((f"{device}, {dtype}".replace("torch.", ""), function, label, why_not))
        if device.type == "cuda":
            label = torch_ops.cuda_road(device, dtype).value
            choices.append((f"{device}, {dtype}".replace("torch.", ""), "torch's own wgrad", label, ""))
    libraries = [row for library in ADAPTERS for row in _found(library)]
    return Report(tuple(versions), tuple(libraries), tuple(choices))


def _found(library: str) -> list[tuple[str, str, str, str]]:
    found = offer(library)
    rows = [(library, found.version or "absent", ", ".join(found.functions) or "nothing", "")]
    if not found.functions:
        return [(*rows[0][:3], "; ".join(dict.fromkeys(found.missing.values())))]
    return rows + [("", "", f"not {function}", why) for function, why in found.missing.items()]


def _table(header: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
