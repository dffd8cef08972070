"""The checkpoint that fine-tuning starts from: a given one, or a small LLaMA trained here.

The small one (1.9 M parameters, a byte vocabulary) is trained in fp32 and saved in bf16, as LLaMA
checkpoints are released, so that fp32 and bf16 fine-tuning start from the very same numbers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from text_data import BYTE_VOCABULARY, TokenWindows, bytes_to_tokens
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

SETTINGS_FILE = "base_settings.json"
SHAPE: dict[str, Any] = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
TRAINING: dict[str, Any] = {"batch_size": 8, "block_size": 128, "learning_rate": 1e-3, "warmup_steps": 20, "seed": 0}


def check_llama_dir(path: str) -> Path:
    """Return ``path`` if a LLaMA checkpoint lies there.

    Raises:
        SystemExit: if it is not a directory, or holds something else.
    """
    remedy = "give a directory that LlamaForCausalLM.save_pretrained wrote; nothing is fetched from a hub"
    model_dir = Path(path)
    if not model_dir.is_dir():
        raise SystemExit(f"--model_name_or_path {path} is not a local directory; {remedy}")
    config_file = model_dir / "config.json"
    if not config_file.is_file():
        raise SystemExit(f"--model_name_or_path {path} has no config.json; {remedy}")
    model_type = json.loads(config_file.read_text(encoding="utf-8")).get("model_type")
    if model_type != "llama":
        raise SystemExit(f"--model_name_or_path {path} holds a model of type {model_type!r}, not 'llama'; {remedy}")
    return model_dir


def make_base(directory: Path, text_file: Path, steps: int, device: torch.device) -> Path:
    """Return ``directory`` with the small base in it, trained now unless the same one lies there."""
    settings = {"text": text_file.name, "steps": steps, "shape": SHAPE, "training": TRAINING}
    settings_file = directory / SETTINGS_FILE
    if settings_file.is_file() and json.loads(settings_file.read_text(encoding="utf-8")) == settings:
        print(f"base: reused from {directory}")
        return directory
    settings_file.unlink(missing_ok=True)
    model = train_base(bytes_to_tokens(text_file.read_bytes()), steps, device, **TRAINING)
    model.bfloat16().save_pretrained(directory)
    # Last, so that an interrupted run leaves no directory that looks finished.
    settings_file.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    return directory


def train_base(
    tokens: torch.Tensor,
    steps: int,
    device: torch.device,
    *,
    batch_size: int,
    block_size: int,
    learning_rate: float,
    warmup_steps: int,
    seed: int,
) -> LlamaForCausalLM:
    """Return a small LLaMA trained from scratch on ``tokens``, in fp32."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, steps)
    windows = TokenWindows(tokens, block_size, batch_size, seed)
    progress = tqdm(range(steps), desc="base", unit="step")
    for _ in progress:
        batch = next(windows).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.set_postfix(train_loss=f"{loss.item():.3f}")
    return model
