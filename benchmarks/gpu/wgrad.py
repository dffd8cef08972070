"""Section 2: weight gradients of a LLaMA-8B layer, added into fp32 main_grad, against the product alone.

Contestants, with the L2 flushed before each run, on normally distributed bf16 operands:

- ``mm``: the bf16 product into a bf16 tensor, the roof. ``mm_add``: the same, added to main_grad; what plain layers do.
- ``accumulate_<backend>``: ``wgrad_accumulate_`` of each backend.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.harness import CacheFlush, Section, Times, interleaved, present_backends
from benchmarks.timing import Contestant, median_of_ratios
from fusedopt.backends import Backend, torch_ops

LAYER = (("q, o", 4096, 4096, 2), ("k, v", 1024, 4096, 2), ("gate, up", 14336, 4096, 2), ("down", 4096, 14336, 1))
"""Name, out, in, and how many of them a LLaMA-8B layer has."""
TINY_LAYER = (("q, o", 32, 32, 2), ("k, v", 8, 32, 2), ("gate, up", 96, 32, 2), ("down", 32, 96, 1))
NUM_TOKENS, TINY_TOKENS = 8192, 64
OF_PRODUCT, OF_MM_ADD = 0.95, 1.2  # targets: speed over the product alone, and over product and add
SECONDS = 4.0  # of each shape


def run(section: Section) -> None:
    """Time every shape, then claim for the sum of a layer and for the worst shape."""
    backends = present_backends(section, torch.bfloat16)
    for name, backend in backends.items():
        if name != "torch" and backend.wgrad_accumulate_ is torch_ops.wgrad_accumulate_:
            section.left_out(f"wgrad of {name}", "it has none of its own and takes torch's")
    own = {n: b for n, b in backends.items() if n == "torch" or b.wgrad_accumulate_ is not torch_ops.wgrad_accumulate_}
    if section.is_cuda:
        road = torch_ops.cuda_road(section.device, torch.bfloat16)
        section.row("note", what="torch's own wgrad", road=road.name, meaning=road.value)
    flush = CacheFlush(section)
    layer: dict[str, list[tuple[int, Times]]] = {}
    for shape in TINY_LAYER if section.is_tiny else LAYER:
        times = _time(section, shape, own, flush)
        for name, taken in times.items():
            layer.setdefault(name, []).append((shape[3], taken))
    _claim(section, layer)


def _time(
    section: Section, shape: tuple[str, int, int, int], backends: dict[str, Backend], flush: CacheFlush
) -> dict[str, Times]:
    label, num_out, num_in, count = shape
    num_tokens = TINY_TOKENS if section.is_tiny else NUM_TOKENS
    generator = torch.Generator(section.device).manual_seed(0)
    grad_output, input = (
        torch.randn(num_tokens, n, generator=generator, device=section.device).bfloat16() for n in (num_out, num_in)
    )
    product = torch.empty(num_out, num_in, dtype=torch.bfloat16, device=section.device)
    main_grad = torch.randn(num_out, num_in, generator=generator, device=section.device)

    def mm() -> None:
        torch.mm(grad_output.t(), input, out=product)

    def mm_add() -> None:
        main_grad.add_(torch.mm(grad_output.t(), input, out=product))

    runs = {"mm": mm, "mm_add": mm_add}
    for name, backend in backends.items():
        runs[f"accumulate_{name}"] = partial(backend.wgrad_accumulate_, main_grad, grad_output, input, accumulate=True)
    times = interleaved(section, [Contestant(name, flush, call) for name, call in runs.items()], SECONDS)
    flops = 2 * num_tokens * num_out * num_in
    for name, taken in times.items():
        section.row(
            "measurement",
            contestant=name,
            weights=label,
            out=num_out,
            tokens=num_tokens,
            per_layer=count,
            dtype="bfloat16",
            caches="L2 flushed before each run",
            tflop_per_s=round(flops / taken.p50 / 1e9, 2),
            speed_over_mm=round(median_of_ratios(times["mm"].ms, taken.ms), 4),
            speed_over_mm_add=round(median_of_ratios(times["mm_add"].ms, taken.ms), 4),
            **{"in": num_in},
            **taken.spread(),
        )
    return times


def _claim(section: Section, layer: dict[str, list[tuple[int, Times]]]) -> None:
    def total(name: str) -> float:
        return sum(count * taken.p50 for count, taken in layer[name])

    def worst(name: str, baseline: str) -> float:
        pairs = zip(layer[baseline], layer[name], strict=True)
        return min(median_of_ratios(base.ms, taken.ms) for (_, base), (_, taken) in pairs)

    num_shapes = len(layer["mm"])
    for name, taken in layer.items():
        if not name.startswith("accumulate_") or len(taken) != num_shapes:
            continue
        for baseline, target in (("mm", OF_PRODUCT), ("mm_add", OF_MM_ADD)):
            section.claim(f"wgrad {name}, speed over {baseline}, a layer", total(baseline) / total(name), target)
            section.claim(f"wgrad {name}, speed over {baseline}, worst shape", worst(name, baseline), target)
