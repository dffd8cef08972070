"""Fine-tune a LLaMA on text with one plain loop, and show what fusedopt changes in it.

    python examples/llama/finetune.py             # one run: bf16 with fusedopt
    python examples/llama/finetune.py --compare   # three runs from one base: table and picture

Every run goes through ``finetune()``; the model's dtype and what ``make_optimizer()`` returns are the
only differences. Losses are in nats per token. Nothing is downloaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from base_model import check_llama_dir, make_base
from cpu_bf16 import fast_bf16_linears
from layers import LayerArguments, prepare_layers
from report import RunResult, comparison_table, draw_comparison, write_results
from text_data import TokenWindows, read_tokens, split_tokens
from torch import Tensor, nn
from tqdm import tqdm
from transformers import HfArgumentParser, LlamaForCausalLM, get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parent
EVAL_BATCH_SIZE = 16  # windows per forward pass; memory only, the loss does not depend on it


class Mode(NamedTuple):
    """One way to run the loop: the model's dtype, and whether fusedopt wraps the optimizer."""

    name: str
    dtype: torch.dtype
    main_grad: bool


FP32 = Mode("fp32", torch.float32, main_grad=False)
PLAIN_BF16 = Mode("plain bf16", torch.bfloat16, main_grad=False)
FUSEDOPT_BF16 = Mode("bf16 + fusedopt", torch.bfloat16, main_grad=True)


@dataclass
class ModelArguments:
    """Which weights the fine-tuning starts from."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={"help": "Local directory of a LLaMA checkpoint. Default: a small base made from plays.txt."},
    )
    base_steps: int = field(default=300, metadata={"help": "Training steps of the default base."})


@dataclass
class DataArguments:
    """Which text is learned, and how it is cut."""

    train_file: str = field(
        default=str(HERE / "sonnets.txt"), metadata={"help": "Text to fine-tune on. Default: sonnets.txt."}
    )
    block_size: int = field(default=128, metadata={"help": "Tokens per window."})
    eval_fraction: float = field(
        default=0.1, metadata={"help": "Part of the text, at its end, held out for evaluation."}
    )


@dataclass
class TrainArguments:
    """How the weights are trained, and where the results go."""

    output_dir: str = field(default=str(HERE / "output"), metadata={"help": "Where models and results go."})
    main_grad: bool = field(
        default=True,
        metadata={"help": "Single run: true wraps AdamW in fusedopt, false is plain bf16 AdamW."},
    )
    compare: bool = field(
        default=False, metadata={"help": "Run fp32, plain bf16 and bf16 + fusedopt; write table and picture."}
    )
    max_steps: int = field(default=40, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate."})
    warmup_steps: int = field(default=4, metadata={"help": "Steps of linear warmup; linear decay to zero after."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW weight decay."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the global gradient norm to this."})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "Windows per micro-batch."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Micro-batches per step."})
    eval_steps: int = field(default=5, metadata={"help": "Evaluate every so many steps, and at both ends."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampled windows, the same in every run."})


def make_optimizer(model: nn.Module, mode: Mode, args: TrainArguments) -> torch.optim.Optimizer:
    """Return AdamW, clipping in its ``step()``: the one place where fusedopt comes in."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    if mode.main_grad:
        from fusedopt import FusedMainGradOptimizer  # here, because the other runs do without

        return FusedMainGradOptimizer(optimizer, max_grad_norm=args.max_grad_norm)

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
    mode: Mode, base_dir: Path, batches: Iterator[Tensor], windows: Tensor, args: TrainArguments, layers: LayerArguments
) -> RunResult:
    """Train the checkpoint in ``base_dir`` as ``mode`` says, and save it under ``args.output_dir``."""
    device, k = windows.device, args.gradient_accumulation_steps
    model = LlamaForCausalLM.from_pretrained(base_dir, dtype=mode.dtype, local_files_only=True).to(device)
    base_weights = [p.detach().bfloat16().clone() for p in model.parameters()]
    prepare_layers(model, layers, mode.main_grad)
    optimizer = make_optimizer(model, mode, args)
    scheduler = get_linear_schedule_with_warmup(optimizer, args.warmup_steps, args.max_steps)

    curve, train_seconds = [(0, evaluate(model, windows))], 0.0
    progress = tqdm(range(1, args.max_steps + 1), desc=mode.name, unit="step")
    for step in progress:
        started = time.perf_counter()
        train_loss = 0.0
        for _ in range(k):
            batch = next(batches).to(device)
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
    model.save_pretrained(Path(args.output_dir) / mode.name.replace(" + ", "-").replace(" ", "-"))
    return RunResult(mode.name, curve, changed / sum(p.numel() for p in base_weights), train_seconds)


def check_flags(*argument_groups: object) -> None:
    """Exit with a message where a count or a rate cannot be what it is."""
    for group in argument_groups:
        for name, value in vars(group).items():
            least_is_zero = name in ("seed", "warmup_steps", "weight_decay")
            if type(value) in (int, float) and not (value > 0 or (value == 0 and least_is_zero)):
                raise SystemExit(f"--{name} is {value}; give {'0 or more' if least_is_zero else 'more than 0'}")


def main() -> None:
    """Read the flags, find the base, run one mode or all three."""
    groups = (ModelArguments, DataArguments, TrainArguments, LayerArguments)
    parser = HfArgumentParser(groups, description=__doc__.splitlines()[0])
    model_args, data_args, args, layers = parser.parse_args_into_dataclasses()
    check_flags(model_args, data_args, args)
    transformers_logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output_dir = Path(args.output_dir)

    if model_args.model_name_or_path is None:
        base_dir = make_base(output_dir / "base", HERE / "plays.txt", model_args.base_steps, device)
    else:
        base_dir = check_llama_dir(model_args.model_name_or_path)
    tokens = read_tokens(Path(data_args.train_file), base_dir, data_args.block_size)
    train_tokens, eval_windows = split_tokens(tokens, data_args.eval_fraction, data_args.block_size)

    if args.compare:
        modes = [FP32, PLAIN_BF16, FUSEDOPT_BF16]
    else:
        modes = [FUSEDOPT_BF16 if args.main_grad else PLAIN_BF16]
    results = []
    with fast_bf16_linears(device):
        for mode in modes:
            micro_batches = TokenWindows(
                train_tokens, data_args.block_size, args.per_device_train_batch_size, args.seed
            )
            results.append(finetune(mode, base_dir, micro_batches, eval_windows.to(device), args, layers))

    print(comparison_table(results))
    record = output_dir / ("comparison.json" if args.compare else "results.json")
    print("wrote", write_results(record, results, (model_args, data_args, args, layers)))
    if args.compare:
        print("wrote", draw_comparison(output_dir / "comparison.png", results))


if __name__ == "__main__":
    main()
