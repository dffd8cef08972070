"""Forward and backward of one window of micro-batches, with and without the wrapper.

Two copies of one bf16 model: the stock one accumulates into its bf16 ``.grad``, the wrapped one into
fp32 main_grad. Both start cleared, and neither steps.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import fusedopt
from benchmarks.models import Shape, is_bf16_slow, linears_as_fast_as_fp32, make_llama, numel
from benchmarks.timing import Claim, Contestant, Result, environment, interleaved_ms, ratios

NUM_MICRO_BATCHES = 4


def moved_bytes(is_wrapped: bool) -> int:
    """Return the bytes per parameter that accumulation moves in one window, matrix products apart.

    Stock: the first gradient becomes ``.grad``; each further one reads two bf16 and writes one.
    Wrapped: each is widened (2 read, 4 written); the first is copied into main_grad (4 read, 4 written),
    each further one added (8 read, 4 written).
    """
    further = NUM_MICRO_BATCHES - 1
    return NUM_MICRO_BATCHES * 6 + 8 + further * 12 if is_wrapped else further * 6


def window(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Run forward and backward for each of ``batches`` (token ids, ``[batch_size, num_tokens]``)."""
    for batch in batches:
        model(input_ids=batch, labels=batch).loss.backward()


def run(shape: Shape, repeats: int) -> Result:
    """Time one window, stock and wrapped, in turns."""
    stock = make_llama(shape)
    wrapped = copy.deepcopy(stock)
    num_params = numel(stock)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(wrapped.parameters(), fused=True))
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch_size, shape.num_tokens)
    batches = [torch.randint(shape.vocab_size, size, generator=generator) for _ in range(NUM_MICRO_BATCHES)]
    contestants = [
        Contestant("stock", stock.zero_grad, lambda: window(stock, batches)),
        Contestant("wrapped", optimizer.zero_grad, lambda: window(wrapped, batches)),
    ]
    env = environment()  # the load before we add to it
    with linears_as_fast_as_fp32():
        times = interleaved_ms(contestants, repeats, "backward")
    overhead = ratios("wrapped_over_stock", times["wrapped"], times["stock"])
    common = {
        "bench": "backward",
        "model": f"llama {num_params / 1e6:.1f} M",
        "num_params": num_params,
        "dtype": "bfloat16",
        "linears": "through fp32" if is_bf16_slow() else "bf16",
        "num_micro_batches": NUM_MICRO_BATCHES,
        "batch_size": shape.batch_size,
        "num_tokens": shape.num_tokens,
        "repeats": repeats,
    }
    rows = [
        {
            **common,
            "contestant": name,
            **times[name].spread(),
            "accumulated_bytes_per_param": moved_bytes(name == "wrapped"),
            **(overhead if name == "wrapped" else {}),
            **env,
        }
        for name in times
    ]
    wall, cpu = (round(100 * (overhead[f"wrapped_over_stock{key}_median_of_ratios"] - 1), 2) for key in ("", "_cpu"))
    return Result(rows, [Claim("forward + backward overhead, percent", 3.0, wall, True, cpu)])
