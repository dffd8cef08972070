"""The whole optimizer phase (clip, step, write-back, clear) against its peers and against a copy.

Contestants take the same gradients, refilled before each turn outside the timed part:

- ``fusedopt_fused``: ours around ``AdamW(fused=True)``, the headline; ``fusedopt_default``: around ``AdamW()``.
- ``stock_fused``: ``AdamW(fused=True)`` with torch's clip on the bf16 model itself, bf16 state. Does less work.
- ``plain_loop``: what one writes by hand: fp32 main parameters, foreach AdamW on them, copies back.
- ``copy``: one ``copy_`` that reads and writes `LOWER_BOUND` bytes per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import fusedopt
from benchmarks.models import Shape, make_llama, numel
from benchmarks.timing import Claim, Contestant, Result, Times, environment, interleaved_ms, ratios

LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0
NORM_CLIPPED, NORM_NOT_CLIPPED = 50.0, 0.05  # of the gradients

LOWER_BOUND = 34
"""Bytes per parameter that any loop must move which keeps fp32 main parameters and decides on the norm of
all gradients before the first update: norm 4 read, AdamW 16 read + 12 written, bf16 weight 2 written."""

NORM = 4
FUSED_STEP = 16 + 12  # main_param, main_grad, two moments read; all but main_grad written
SCALED_GRAD = 4  # the fused kernel writes the gradient back when it is handed a grad_scale, 1.0 included
SCALE_PASS = 4 + 4
LOOP_STEP = 8 + 12 + 8 + 12 + 8 + 8 + 8 + 16  # decay, lerp, mul, addcmul, sqrt, div, add, addcdiv: fp32, one pass each
WRITE_BACK = 4 + 2


def moved_bytes(contestant: str, is_clipping: bool) -> int:
    """Return the bytes per parameter that ``contestant`` reads and writes, counted pass by pass."""
    return {
        "fusedopt_fused": NORM + FUSED_STEP + SCALED_GRAD + WRITE_BACK,
        "fusedopt_default": NORM + is_clipping * SCALE_PASS + LOOP_STEP + WRITE_BACK,
        "stock_fused": (NORM + SCALE_PASS + FUSED_STEP) // 2,  # all in bf16; torch's clip multiplies by 1, too
        "plain_loop": NORM + SCALE_PASS + LOOP_STEP + WRITE_BACK,
        "copy": LOWER_BOUND,
    }[contestant]


class Wrapped:
    """fusedopt around ``torch.optim.AdamW(**kwargs)``; `max_grad_norm` clips inside its step."""

    def __init__(self, model: nn.Module, max_grad_norm: float | None = MAX_GRAD_NORM, **kwargs: Any) -> None:
        self.params = list(model.parameters())
        inner = torch.optim.AdamW(self.params, lr=LEARNING_RATE, **kwargs)
        self.optimizer = fusedopt.FusedMainGradOptimizer(inner, max_grad_norm=max_grad_norm)

    def refill(self, grads: Sequence[Tensor]) -> None:
        """Leave behind what a window of micro-batches leaves: gradients summed in main_grad."""
        for param, grad in zip(self.params, grads, strict=True):
            main_grad: Tensor = param.main_grad  # type: ignore[attr-defined]
            param.grad = main_grad.copy_(grad)

    def phase(self) -> None:
        """Clip, step, write back, clear."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Stock:
    """torch's fused AdamW and clip on the bf16 model: bf16 gradients, weights and state, no write-back."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.grads = [torch.zeros_like(param) for param in self.params]
        self.optimizer = torch.optim.AdamW(self.params, lr=LEARNING_RATE, fused=True)

    def refill(self, grads: Sequence[Tensor]) -> None:
        """Leave behind bf16 gradients, rounded."""
        for param, own, grad in zip(self.params, self.grads, grads, strict=True):
            own.copy_(grad)
            param.grad = own

    def phase(self) -> None:
        """Clip, step, clear."""
        nn.utils.clip_grad_norm_(self.params, MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


class PlainLoop:
    """fp32 main gradients and parameters written by hand: a post-accumulate hook, foreach AdamW, copies.

    Clearing is `set_to_none`, the cheaper way; the first gradient of a window then costs the hook an allocation.
    """

    def __init__(self, model: nn.Module, max_grad_norm: float | None = MAX_GRAD_NORM) -> None:
        self.params = [param for param in model.parameters() if isinstance(param, nn.Parameter)]
        self.mains = [nn.Parameter(param.detach().float()) for param in self.params]
        self.grads = [torch.zeros_like(main) for main in self.mains]
        self.optimizer = torch.optim.AdamW(self.mains, lr=LEARNING_RATE, foreach=True)
        self.max_grad_norm = max_grad_norm
        main_of = dict(zip(self.params, self.mains, strict=True))

        def accumulate(param: nn.Parameter) -> None:
            main, grad = main_of[param], param.grad
            if grad is not None:
                main.grad = grad.float() if main.grad is None else main.grad.add_(grad)
            param.grad = None

        for param in self.params:
            param.register_post_accumulate_grad_hook(accumulate)  # type: ignore[no-untyped-call]

    def refill(self, grads: Sequence[Tensor]) -> None:
        """Leave behind what the hook leaves: fp32 sums on the main parameters."""
        for main, own, grad in zip(self.mains, self.grads, grads, strict=True):
            own.copy_(grad)
            main.grad = own

    def phase(self) -> None:
        """Clip, step, write back, clear."""
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.mains, self.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for param, main in zip(self.params, self.mains, strict=True):
                param.copy_(main)
        self.optimizer.zero_grad()


class Copy:
    """One ``copy_`` between two fp32 buffers, `LOWER_BOUND` bytes per parameter, half read and half written."""

    def __init__(self, num_params: int) -> None:
        self.source = torch.ones(num_params * LOWER_BOUND // 8)
        self.target = torch.zeros_like(self.source)

    def refill(self, grads: Sequence[Tensor]) -> None:
        """Nothing: a copy takes no gradients."""

    def phase(self) -> None:
        """Copy."""
        self.target.copy_(self.source)


def random_grads(params: Sequence[Tensor], norm: float) -> list[Tensor]:
    """Return normally distributed fp32 gradients whose global norm is about ``norm``."""
    generator = torch.Generator().manual_seed(0)
    deviation = norm / sum(param.numel() for param in params) ** 0.5
    return [torch.randn(param.shape, generator=generator) * deviation for param in params]


def run(shape: Shape, repeats: int) -> Result:
    """Time the phase where clipping scales and where it does not."""
    model = make_llama(shape)
    num_params = numel(model)
    # Made first, so that in both cases temporaries lie at the end of the heap, as in training: there glibc gives
    # them back to the kernel at every step. (See README.md, page faults.)
    grads_of = {
        is_clipping: random_grads(list(model.parameters()), norm)
        for is_clipping, norm in ((True, NORM_CLIPPED), (False, NORM_NOT_CLIPPED))
    }
    loops: dict[str, Wrapped | Stock | PlainLoop | Copy] = {
        "fusedopt_fused": Wrapped(model, fused=True),
        "fusedopt_default": Wrapped(make_llama(shape)),
        "stock_fused": Stock(make_llama(shape)),
        "plain_loop": PlainLoop(make_llama(shape)),
        "copy": Copy(num_params),
    }
    result = Result([], [])
    for is_clipping, grads in grads_of.items():
        contestants = [_contestant(name, loop, grads) for name, loop in loops.items()]
        env = environment()  # the load before we add to it
        label = "clipping" if is_clipping else "not clipping"
        times = interleaved_ms(contestants, repeats, f"optimizer phase, {label}")
        common = {
            "bench": "optimizer_phase",
            "model": f"llama {num_params / 1e6:.1f} M",
            "num_params": num_params,
            "num_tensors": len(grads),
            "dtype": "bfloat16",
            "is_clipping": is_clipping,
            "repeats": repeats,
        }
        result.rows.extend({**common, **_row(name, times, num_params, is_clipping), **env} for name in loops)
        result.claims.extend(_claims(result.rows[-len(loops)], label))
    return result


def _contestant(name: str, loop: Wrapped | Stock | PlainLoop | Copy, grads: Sequence[Tensor]) -> Contestant:
    return Contestant(name, lambda: loop.refill(grads), loop.phase)


def _row(name: str, times: dict[str, Times], num_params: int, is_clipping: bool) -> dict[str, Any]:
    moved = moved_bytes(name, is_clipping)
    row: dict[str, Any] = {"contestant": name, **times[name].spread(), "moved_bytes_per_param": moved}
    row["moved_gb_per_s"] = round(moved * num_params / row["p50_ms"] / 1e6, 2)
    if name.startswith("fusedopt"):
        row.update(ratios("time_over_stock_fused", times[name], times["stock_fused"]))
        row.update(ratios("speed_over_plain_loop", times["plain_loop"], times[name]))
        row.update(ratios("copy_bandwidth_fraction", times["copy"], times[name]))
    return row


def _claims(row: dict[str, Any], label: str) -> list[Claim]:
    def claim(what: str, target: float, key: str, is_upper_bound: bool) -> Claim:
        wall, cpu = row[f"{key}_median_of_ratios"], row[f"{key}_cpu_median_of_ratios"]
        return Claim(f"{what}, {label}", target, wall, is_upper_bound, cpu)

    return [
        claim("(a) time / stock fused bf16 AdamW + clip", 1.3, "time_over_stock_fused", True),
        claim("(b) speed / plain fp32 loop", 2.5, "speed_over_plain_loop", False),
        claim(f"fraction of a {LOWER_BOUND} B/param copy", 0.95, "copy_bandwidth_fraction", False),
    ]
