"""What the tests of PEFT share: LoRA by real PEFT on a tiny LLaMA, a frozen bf16 base, and a loss."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model

from tests.models import tiny_llama

WARNING = "`is_gradient_checkpointing` is deprecated|Model has `tie_word_embeddings=True`|Could not find a config file"
"""PEFT asks transformers 5 for a property that it renamed; before 0.21 it takes an untied head for a tied one, and
looks for the configuration of a model that has no folder."""

VOCABULARY, LENGTH, MAX_NORM = 61, 10, 0.5
TARGETS = ["q_proj", "v_proj", "down_proj"]
NUM_ADAPTED = 2 * 2 * len(TARGETS)  # two layers, an A and a B each


def make_base(seed=0):
    return tiny_llama(seed=seed, vocab_size=VOCABULARY, max_position_embeddings=32)


def lora(saves_head=True):
    whole = ["lm_head"] if saves_head else None
    return LoraConfig(r=2, lora_alpha=4, target_modules=TARGETS, modules_to_save=whole, task_type="CAUSAL_LM")


def make_model(saves_head=True, **keywords):
    base = make_base()
    torch.manual_seed(1)
    model = get_peft_model(base, lora(saves_head), **keywords)
    model.train()
    return model


def trainable(model):
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def loss_of(model, number):
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(number))
    return model(input_ids=tokens, labels=tokens).loss / 2
