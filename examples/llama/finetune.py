"""Fine-tune a LLaMA on text with one plain loop, and show what fusedopt changes in it.

    python examples/llama/finetune.py             # one run: bf16 with fusedopt
    python examples/llama/finetune.py --compare   # three runs from one base: table and picture
    python examples/llama/finetune.py --compare_memory   # all ways to hold a model in fewer bytes, and peers; an hour
    torchrun --nproc-per-node 2 examples/llama/finetune.py --main_grad_shard optimizer   # two ranks, the same losses

Every run goes through ``finetune()``; the model's dtype and what ``make_optimizer()`` returns are the
only differences. Losses are in nats per token. Nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from arguments import HERE, DataArguments, ModelArguments, TrainArguments, check_flags, check_ranks
from base_model import TRAINING as BASE
from base_model import check_llama_dir, make_base
from cpu_bf16 import fast_bf16_linears
from layers import LayerArguments, prepare_layers
from ranks import Ranks, ranks
from report import RunResult, comparison_table, draw_comparison, write_results
from text_data import TokenWindows, read_tokens, split_tokens
from torch import Tensor, nn
from tqdm import tqdm
from transformers import HfArgumentParser, LlamaForCausalLM, get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging

EVAL_BATCH_SIZE = 16  # windows per forward pass; memory only, the loss does not depend on it


class Mode(NamedTuple):
    """One way to run the loop: the model's dtype, and whether fusedopt wraps the optimizer."""

    name: str
    dtype: torch.dtype
    main_grad: bool


FP32 = Mode("fp32", torch.float32, main_grad=False)
PLAIN_BF16 = Mode("plain bf16", torch.bfloat16, main_grad=False)
FUSEDOPT_BF16 = Mode("bf16 + fusedopt", torch.bfloat16, main_grad=True)
FINE_TUNING_RATES = (1e-5, 3e-5, 1e-4)
ONE_RANK = Ranks(0, 1, torch.device("cpu"))


def make_optimizer(model: nn.Module, mode: Mode, args: TrainArguments) -> torch.optim.Optimizer:
    """Return AdamW, clipping in its ``step()``: the one place where fusedopt comes in."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    if mode.main_grad:
        from fusedopt import FusedMainGradOptimizer  # here, because the other runs do without

        return FusedMainGradOptimizer(optimizer, max_grad_norm=args.max_grad_norm, shard=args.main_grad_shard)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Return the mean loss over the held-out ``windows``: weights as they stand, loss in fp32."""
    model.eval()
    total = sum(model(input_ids=w, labels=w).loss.item() * len(w) for w in windows.split(EVAL_BATCH_SIZE))
    model.train()
    return total / len(windows)


def finetune(
    mode: Mode,
    base_dir: Path,
    batches: Iterator[Tensor],
    windows: Tensor,
    args: TrainArguments,
    layers: LayerArguments,
    here: Ranks = ONE_RANK,
) -> RunResult:
    """Train the checkpoint in ``base_dir`` as ``mode`` says, and save it under ``args.output_dir``.

    Ranks take turns at the ``batches`` of a step, and fusedopt takes the mean of what they find.
    """
    device, k = windows.device, args.gradient_accumulation_steps // here.world_size
    batches = islice(batches, here.rank, None, here.world_size)
    model = LlamaForCausalLM.from_pretrained(base_dir, dtype=mode.dtype, local_files_only=True).to(device)
    base_weights = [p.detach().bfloat16().clone() for p in model.parameters()]
    prepare_layers(model, layers, mode.main_grad)
    optimizer = make_optimizer(model, mode, args)
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup_steps, args.max_steps)

    curve, train_seconds = [(0, evaluate(model, windows))], 0.0
    progress = tqdm(range(1, args.max_steps + 1), desc=mode.name, unit="step", disable=not here.is_first)
    for step in progress:
        started = time.perf_counter()
        train_loss = 0.0
        for micro_batch in range(k):
            is_last = micro_batch == k - 1
            batch = next(batches).to(device)
            with nullcontext() if is_last or not mode.main_grad else optimizer.no_sync():
                loss = model(input_ids=batch, labels=batch).loss / k
                loss.backward()
            train_loss += loss.detach()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        train_seconds += time.perf_counter() - started
        if step % args.eval_steps == 0 or step == args.max_steps:
            curve.append((step, evaluate(model, windows)))
        progress.set_postfix(train_loss=f"{train_loss:.3f}", eval_loss=f"{curve[-1][1]:.4f}")

    changed = sum(int((p.bfloat16() != b).sum()) for p, b in zip(model.parameters(), base_weights, strict=True))
    if here.is_first:
        model.save_pretrained(Path(args.output_dir) / mode.name.replace(" + ", "-").replace(" ", "-"))
    return RunResult(mode.name, curve, changed / sum(p.numel() for p in base_weights), train_seconds)


def compare_memory(
    output_dir: Path,
    base_dir: Path,
    split: tuple[Tensor, Tensor],
    model_args: ModelArguments,
    data_args: DataArguments,
    args: TrainArguments,
) -> None:
    """Train in every way of `memory_runs`, from the base at three rates and from scratch at one; table and picture."""
    import memory_runs  # here, because it imports fusedopt

    plays = read_tokens(HERE / "plays.txt", base_dir, data_args.block_size)
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps // 2  # many runs
    plans = [
        memory_runs.Plan(
            "fine-tuning", base_dir, *split, args.max_steps, args.warmup_steps, batch_size, FINE_TUNING_RATES
        ),
        memory_runs.Plan(
            "from scratch",
            base_dir,
            *split_tokens(plays, data_args.eval_fraction, data_args.block_size),
            *(model_args.base_steps, BASE["warmup_steps"], BASE["batch_size"] // 2, (BASE["learning_rate"],)),
        ),
    ]
    with fast_bf16_linears(split[1].device):
        runs = memory_runs.compare(plans, range(args.seed, args.seed + 3), output_dir / "memory.json")
    rows = memory_runs.summary(runs)
    print(memory_runs.table(rows))
    print("wrote", output_dir / "memory.json", memory_runs.draw(output_dir / "memory.png", rows))


def main(here: Ranks) -> None:
    """Read the flags, find the base, run one mode or all three."""
    groups = (ModelArguments, DataArguments, TrainArguments, LayerArguments)
    parser = HfArgumentParser(groups, description=__doc__.splitlines()[0])
    model_args, data_args, args, layers = parser.parse_args_into_dataclasses()
    check_flags(model_args, data_args, args)
    check_ranks(args, here.world_size)
    transformers_logging.disable_progress_bar()
    output_dir = Path(args.output_dir)

    if model_args.model_name_or_path is None:
        with here.first_alone():
            base_dir = make_base(output_dir / "base", HERE / "plays.txt", model_args.base_steps, here.device)
    else:
        base_dir = check_llama_dir(model_args.model_name_or_path)
    tokens = read_tokens(Path(data_args.train_file), base_dir, data_args.block_size)
    train_tokens, eval_windows = split_tokens(tokens, data_args.eval_fraction, data_args.block_size)

    if args.compare_memory:
        compare_memory(output_dir, base_dir, (train_tokens, eval_windows), model_args, data_args, args)
        return
    if args.compare:
        modes = [FP32, PLAIN_BF16, FUSEDOPT_BF16]
    else:
        modes = [FUSEDOPT_BF16 if args.main_grad else PLAIN_BF16]
    results = []
    with fast_bf16_linears(here.device):
        for mode in modes:
            micro_batches = TokenWindows(
                train_tokens, data_args.block_size, args.per_device_train_batch_size, args.seed
            )
            results.append(finetune(mode, base_dir, micro_batches, eval_windows.to(here.device), args, layers, here))

    if not here.is_first:
        return
    print(comparison_table(results))
    record = output_dir / ("comparison.json" if args.compare else "results.json")
    print("wrote", write_results(record, results, (model_args, data_args, args, layers)))
    if args.compare:
        print("wrote", draw_comparison(output_dir / "comparison.png", results))


if __name__ == "__main__":
    with ranks() as found:
        main(found)
