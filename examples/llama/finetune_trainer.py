"""Fine-tune a LLaMA on text with transformers' Trainer. Two lines are fusedopt's: the flags, and the Trainer's name.

    python examples/llama/finetune_trainer.py --main_grad                      # bf16 weights, fp32 main gradients
    python examples/llama/finetune_trainer.py                                  # plain bf16, a stock Trainer
    torchrun --nproc-per-node 2 examples/llama/finetune_trainer.py --main_grad --main_grad_shard optimizer

All flags of TrainingArguments work, with other defaults for some (`DEFAULTS`). Nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from arguments import HERE, DataArguments, ModelArguments, check_flags
from base_model import check_llama_dir, make_base
from cpu_bf16 import fast_bf16_linears
from text_data import read_tokens, split_tokens
from torch import Tensor
from transformers import HfArgumentParser, LlamaForCausalLM, TrainingArguments, set_seed

from fusedopt.integrations.transformers import FusedOptArguments, FusedOptTrainer

HAS_ACCELERATOR = torch.accelerator.is_available()
DEFAULTS: dict[str, Any] = {
    "use_cpu": not HAS_ACCELERATOR,  # under torchrun, too: accelerate takes ranks on a CPU for ranks only if told so
    "dataloader_pin_memory": HAS_ACCELERATOR,
    "output_dir": str(HERE / "output" / "trainer"),
    "max_steps": 20,
    "learning_rate": 1e-5,
    "warmup_steps": 2,
    "per_device_train_batch_size": 2,
    "per_device_eval_batch_size": 16,
    "gradient_accumulation_steps": 8,
    "logging_steps": 5,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "eval_on_start": True,
    "save_strategy": "no",
    "report_to": [],
}


def windows_of(tokens: Tensor, block_size: int) -> Tensor:
    """Return ``tokens`` cut into ``[windows, block_size]``; what is left at the end is dropped."""
    count = len(tokens) // block_size
    return tokens[: count * block_size].view(count, block_size)


def as_dataset(windows: Tensor) -> list[dict[str, Tensor]]:
    """Return what a Trainer takes: every window predicts itself, shifted by the model."""
    return [{"input_ids": window, "labels": window} for window in windows]


def read_arguments() -> tuple[ModelArguments, DataArguments, TrainingArguments, FusedOptArguments]:
    """Return the flags, each group as its own dataclass."""
    groups = (ModelArguments, DataArguments, TrainingArguments, FusedOptArguments)
    parser = HfArgumentParser(groups, description=__doc__.splitlines()[0])
    parser.set_defaults(**DEFAULTS)
    model_args, data_args, args, fusedopt_args = parser.parse_args_into_dataclasses()
    check_flags(model_args, data_args)
    return model_args, data_args, args, fusedopt_args


def find_base(model_args: ModelArguments, args: TrainingArguments) -> Path:
    """Return the checkpoint to start from: the one that was named, or the small base beside the outputs."""
    if model_args.model_name_or_path is not None:
        return check_llama_dir(model_args.model_name_or_path)
    with args.main_process_first(local=False):
        return make_base(Path(args.output_dir).parent / "base", HERE / "plays.txt", model_args.base_steps, args.device)


def main() -> None:
    """Read the flags, train, evaluate, save."""
    model_args, data_args, args, fusedopt_args = read_arguments()
    set_seed(args.seed)

    base_dir = find_base(model_args, args)
    tokens = read_tokens(Path(data_args.train_file), base_dir, data_args.block_size)
    train_tokens, eval_windows = split_tokens(tokens, data_args.eval_fraction, data_args.block_size)
    model = LlamaForCausalLM.from_pretrained(base_dir, dtype=torch.bfloat16, local_files_only=True)
    trainer = FusedOptTrainer(
        model=model,
        args=args,
        train_dataset=as_dataset(windows_of(train_tokens, data_args.block_size)),
        eval_dataset=as_dataset(eval_windows),
        fusedopt_args=fusedopt_args,
    )
    with fast_bf16_linears(args.device):
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        metrics = trainer.evaluate()

    trainer.save_model()
    trainer.save_state()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    optimizer = trainer.main_grad_optimizer  # None without --main_grad
    if optimizer is not None and trainer.is_world_process_zero():
        num_bytes = optimizer.memory_report()["bytes_per_param"]
        print(f"{num_bytes:.1f} bytes per parameter on this rank, {optimizer.skipped_steps} steps skipped")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
