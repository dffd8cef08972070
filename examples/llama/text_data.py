"""Text to tokens, tokens to windows.

    file -> read_tokens -> split_tokens -> training tokens (sampled), evaluation windows (fixed)

Knows nothing of models or dtypes. Lengths are in tokens; with the byte vocabulary a token is a byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

BYTE_VOCABULARY = 256
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def bytes_to_tokens(text: bytes) -> Tensor:
    """Return one int64 token per byte."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def read_tokens(path: Path, model_dir: Path, block_size: int) -> Tensor:
    """Return the tokens of the text at ``path``, as the checkpoint in ``model_dir`` reads it.

    The checkpoint's own tokenizer where it has one, else bytes.

    Raises:
        SystemExit: if there is no text, no way to tokenize it, or the model takes no such window.
    """
    if not path.is_file() or path.stat().st_size == 0:
        raise SystemExit(f"--train_file {path} is missing or empty; give a text file")
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    limit = config.max_position_embeddings
    if block_size > limit:
        raise SystemExit(f"--block_size is {block_size}; the model in {model_dir} takes 2 to {limit}")
    if any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        text = path.read_text(encoding="utf-8")
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if config.vocab_size < BYTE_VOCABULARY:
        raise SystemExit(
            f"{model_dir} holds no tokenizer ({', '.join(TOKENIZER_FILES)}), and its vocabulary of "
            f"{config.vocab_size} is too small for bytes ({BYTE_VOCABULARY}); save its tokenizer beside it"
        )
    return bytes_to_tokens(path.read_bytes())


def split_tokens(tokens: Tensor, eval_fraction: float, block_size: int) -> tuple[Tensor, Tensor]:
    """Return the head of ``tokens`` for training and its tail as ``[windows, block_size]``.

    Raises:
        SystemExit: if either part is shorter than one window.
    """
    held_out = int(len(tokens) * eval_fraction)
    train, tail = tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :]
    windows = len(tail) // block_size
    if block_size < 2 or windows == 0 or len(train) < block_size:
        raise SystemExit(
            f"{len(train)} tokens for training and {len(tail)} held out do not fill a window of --block_size "
            f"{block_size} each (at least 2); give a longer text, a smaller block, or another --eval_fraction"
        )
    return train, tail[: windows * block_size].view(windows, block_size)


class TokenWindows(Iterator[Tensor]):
    """An endless, seeded sequence of ``[batch_size, block_size]`` windows at random places."""

    def __init__(self, tokens: Tensor, block_size: int, batch_size: int, seed: int) -> None:
        self.tokens, self.batch_size = tokens, batch_size
        self.span = torch.arange(block_size)
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        """Return the next batch."""
        places = len(self.tokens) - len(self.span) + 1
        starts = torch.randint(places, (self.batch_size, 1), generator=self.generator)
        return self.tokens[starts + self.span]
