"""The flags of finetune.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


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
    main_grad_shard: str = field(
        default="none",
        metadata={"help": "Under torchrun: what ranks share, none, optimizer (ZeRO-1) or gradients (ZeRO-2)."},
    )
    compare: bool = field(
        default=False, metadata={"help": "Run fp32, plain bf16 and bf16 + fusedopt; write table and picture."}
    )
    compare_memory: bool = field(
        default=False,
        metadata={"help": "Run every way to hold main_params and state in fewer bytes; write table and picture."},
    )
    max_steps: int = field(default=40, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Peak learning rate."})
    warmup_steps: int = field(default=4, metadata={"help": "Steps of linear warmup; linear decay to zero after."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW weight decay."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the global gradient norm to this."})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "Windows per micro-batch."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Micro-batches per step, over all ranks."})
    eval_steps: int = field(default=5, metadata={"help": "Evaluate every so many steps, and at both ends."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampled windows, the same in every run."})


def check_flags(*argument_groups: object) -> None:
    """Exit with a message where a count or a rate cannot be what it is."""
    for group in argument_groups:
        for name, value in vars(group).items():
            least_is_zero = name in ("seed", "warmup_steps", "weight_decay")
            if type(value) in (int, float) and not (value > 0 or (value == 0 and least_is_zero)):
                raise SystemExit(f"--{name} is {value}; give {'0 or more' if least_is_zero else 'more than 0'}")


def check_ranks(args: TrainArguments, world_size: int) -> None:
    """Exit with a message where the run cannot be split over ``world_size`` ranks."""
    if world_size > 1 and (args.compare or args.compare_memory or not args.main_grad):
        raise SystemExit(
            "--compare, --compare_memory and --main_grad false run in one process: start them without torchrun"
        )
    if args.gradient_accumulation_steps % world_size:
        raise SystemExit(
            f"--gradient_accumulation_steps is {args.gradient_accumulation_steps}, and {world_size} ranks cannot share "
            "that evenly; give a multiple"
        )
