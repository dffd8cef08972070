"""A Trainer's checkpoint folder with a sharded optimizer: written by all ranks, and read back.

    optimizer -> [whole on the ranks that save | one part a rank] -> checkpoint-N/

Whole: ``optimizer.pt``, in the form of one process, for any number of ranks. Parts: ``optimizer_part_0_of_2.pt`` beside
``scheduler.pt``, for as many ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fusedopt.optimizer import FusedMainGradOptimizer

OPTIMIZER_NAME = "optimizer.pt"
SCHEDULER_NAME = "scheduler.pt"
_PART = "optimizer_part_{rank}_of_{world_size}.pt"
_ANY_PART = _PART.format(rank="*", world_size="*")


def save_on_all_ranks(
    optimizer: FusedMainGradOptimizer, args: Any, output_dir: str, save: Callable[[], None], *, whole: bool
) -> None:
    """Write optimizer and scheduler of a sharded run; all ranks call it.

    Args:
        optimizer: the wrapper.
        args: ``TrainingArguments``: which ranks save.
        output_dir: the checkpoint's folder.
        save: writes ``optimizer.pt`` from ``optimizer.state_dict()``, and the scheduler, on ranks that save.
        whole: False writes every rank's part. An inner optimizer with a state dict in a format of its own is always
            written so.
    """
    from accelerate.utils import gather_object  # type: ignore[import-untyped]

    saving = [rank for rank, saves in enumerate(gather_object([bool(args.should_save)])) if saves]
    for rank in saving if whole else ():
        try:
            optimizer.consolidate_state_dict(to=rank)
        except ValueError:  # a format of its own, on all ranks
            break
        if args.process_index == rank:
            save()
    else:
        if whole:
            return
    _save_part(optimizer, args, Path(output_dir), save)


def _save_part(optimizer: FusedMainGradOptimizer, args: Any, folder: Path, save: Callable[[], None]) -> None:
    part = folder / _PART.format(rank=args.process_index, world_size=args.world_size)
    folder.mkdir(parents=True, exist_ok=True)
    if args.should_save:
        save()
        os.replace(folder / OPTIMIZER_NAME, part)
    else:
        torch.save(optimizer.state_dict(), part)


def is_ours_to_load(args: Any, checkpoint: str) -> bool:
    """Return whether a checkpoint has an optimizer that a Trainer would not load, or not load well: see below."""
    folder = Path(checkpoint)
    if (folder / OPTIMIZER_NAME).is_file():
        return bool(args.world_size > 1) and (folder / SCHEDULER_NAME).is_file()
    return any(folder.glob(_ANY_PART))


def load_on_all_ranks(optimizer: FusedMainGradOptimizer, scheduler: Any, args: Any, checkpoint: str) -> None:
    """Load the whole, of which each rank takes its part, or this rank's part; and the scheduler. All ranks call it.

    From the file, on the CPU: a Trainer would have every rank bring the whole to its device.

    Raises:
        FileNotFoundError: if another number of ranks wrote the parts, or one is missing.
    """
    whole = Path(checkpoint) / OPTIMIZER_NAME
    part = Path(checkpoint) / _PART.format(rank=args.process_index, world_size=args.world_size)
    if not whole.is_file() and not part.is_file():
        found = sorted(path.name for path in Path(checkpoint).glob(_ANY_PART))
        raise FileNotFoundError(
            f"{checkpoint} has the optimizer in parts, {found}, and not {part.name}. Resume on as many ranks as saved "
            "it; checkpoints written with save_optimizer_whole = True load on any number"
        )
    file = whole if whole.is_file() else part
    optimizer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
