"""Forward and backward of one LLaMA block under the wrapper: plain linear layers against fused ones.

All contestants accumulate into fp32 main_grad; they differ in how the weights' gradients get there. Peak
memory of the last backward of a window is counted by torch's profiler, and is the same at every run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

import fusedopt
from benchmarks.memory import peak_nbytes
from benchmarks.models import TINY, Shape, is_bf16_slow, linears_as_fast_as_fp32, numel
from benchmarks.timing import Claim, Contestant, Result, environment, interleaved_ms, ratios
from fusedopt.backends.torch_ops import TILE_ROWS

KINDS = ("plain", "fused exact", "fused fast")


def make_block(shape: Shape) -> tuple[nn.Module, Tensor]:
    """Return a model of one decoder layer in bf16, and its input ``[1, tokens, hidden]``."""
    hidden, tokens = (64, 32) if shape is TINY else (1024, 512)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=1,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = LlamaModel(config).bfloat16().train()
        x = torch.randn(1, tokens, hidden).bfloat16()
    return model, x.requires_grad_()


def prepare(block: nn.Module, kind: str, recomputes: bool) -> tuple[nn.Module, fusedopt.FusedMainGradOptimizer]:
    """Return a wrapped copy of ``block`` with the layers that ``kind`` names."""
    model = copy.deepcopy(block)
    if kind != "plain":
        fusedopt.convert_linears(model, exact=kind == "fused exact")
    if recomputes:
        fusedopt.recompute.apply(model)
    params = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    return model, fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(params, fused=True))


def window(model: nn.Module, x: Tensor, num_micro_batches: int) -> None:
    """Run forward and backward ``num_micro_batches`` times."""
    for _ in range(num_micro_batches):
        _loss(model, x).backward()  # type: ignore[no-untyped-call]


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(inputs_embeds=x).last_hidden_state.float().square().mean()
    return loss


def backward_peak(model: nn.Module, x: Tensor, num_micro_batches: int, clear: Callable[[], None]) -> int:
    """Return how many bytes the last backward of a window holds at most beyond those before it."""
    clear()
    with linears_as_fast_as_fp32():
        window(model, x, num_micro_batches - 1)
    loss = _loss(model, x)
    peak, _ = peak_nbytes(loss.backward)  # type: ignore[arg-type]
    return peak


def run(shape: Shape, repeats: int) -> Result:
    """Time and weigh each kind of layer, for 1 and 4 micro-batches, with and without recomputation."""
    result = Result([], [])
    block, x = make_block(shape)
    for recomputes in (False, True):
        pairs = {kind: prepare(block, kind, recomputes) for kind in KINDS}
        for num_micro_batches in (1, 4):
            _measure(result, pairs, x, num_micro_batches, recomputes, repeats)
    return result


def _measure(result: Result, pairs: Any, x: Tensor, num_micro_batches: int, recomputes: bool, repeats: int) -> None:
    label = f"{num_micro_batches} micro-batch{'es' * (num_micro_batches > 1)}, {'' if recomputes else 'no '}recompute"
    contestants = [
        Contestant(kind, optimizer.zero_grad, partial(window, model, x, num_micro_batches))
        for kind, (model, optimizer) in pairs.items()
    ]
    with linears_as_fast_as_fp32():
        times = interleaved_ms(contestants, repeats, label)
    # Bytes with torch's own bf16 products: the road through fp32 widens whole weights, in all contestants.
    peaks = {
        kind: backward_peak(model, x, num_micro_batches, optimizer.zero_grad)
        for kind, (model, optimizer) in pairs.items()
    }
    model = pairs["plain"][0]
    largest = max(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    for kind in KINDS:
        over_plain = ratios("over_plain", times[kind], times["plain"])
        row = {
            "bench": "fused_linear",
            "model": f"llama block {numel(model.layers[0]) / 1e6:.1f} M",
            "tokens": x.shape[1],
            "hidden": x.shape[2],
            "dtype": "bfloat16",
            "linears": "through fp32" if is_bf16_slow() else "bf16",
            "contestant": kind,
            "num_micro_batches": num_micro_batches,
            "recompute": recomputes,
            **times[kind].spread(),
            **({} if kind == "plain" else over_plain),
            "backward_peak_bytes": peaks[kind],
            "largest_weight_numel": largest,
            "tile_rows": TILE_ROWS,
            "repeats": repeats,
        }
        result.rows.append({**row, **environment()})
        if kind != "plain":
            wall, cpu = (over_plain[f"over_plain{key}_median_of_ratios"] for key in ("", "_cpu"))
            result.claims.append(Claim(f"{kind} / plain, {label}", 1.0, round(wall, 3), True, round(cpu, 3)))
            saved = (peaks["plain"] - peaks[kind]) / 2**20
            result.claims.append(Claim(f"MiB of backward's peak saved, {kind}, {label}", 0.0, round(saved, 2), False))
