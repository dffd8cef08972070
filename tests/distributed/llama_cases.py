"""transformers' LLaMA, small, in the ways torch's `parallelize_module` splits it, with its data and its loss.

Nothing here knows fusedopt.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

VOCABULARY, HIDDEN, ROWS, TOKENS = 32, 16, 2, 8


@dataclass(frozen=True)
class Case:
    """Which model, and how it is split; the layers always are."""

    is_block: bool = False
    is_tied: bool = False
    splits_vocabulary: bool = False
    is_sequence: bool = False


CASES = {
    "block": Case(is_block=True),
    "block-sequence": Case(is_block=True, is_sequence=True),
    "tied": Case(is_tied=True),
    "untied": Case(),
    "tied-vocabulary": Case(is_tied=True, splits_vocabulary=True),
    "untied-vocabulary": Case(splits_vocabulary=True),
    "sequence": Case(splits_vocabulary=True, is_sequence=True),
}


class Block(nn.Module):
    """One decoder layer with its rotary positions, which are those of the whole sequence."""

    def __init__(self, config):
        super().__init__()
        self.rotary = LlamaRotaryEmbedding(config)
        self.layer = LlamaDecoderLayer(config, 0)

    def forward(self, x):
        return self.layer(x, position_embeddings=self.rotary(x, torch.arange(TOKENS)[None]))


class NormAsGiven(LlamaRMSNorm):
    """LLaMA's norm computes in fp32 whatever it is given; here fp64 stays fp64, or nothing could be compared in it."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def build(case, dtype):
    """Return the model on one process, the same on every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=case.is_tied, initializer_range=0.2, attn_implementation="sdpa",
    )  # fmt: skip
    model = (Block(config) if case.is_block else LlamaForCausalLM(config)).to(dtype).train()
    for module in model.modules():
        if type(module) is LlamaRMSNorm and dtype is torch.float64:
            module.__class__ = NormAsGiven
    return model


def layer_plan(is_sequence):
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan = {name: ColwiseParallel() for name in columns}
    if not is_sequence:
        return plan | {name: RowwiseParallel() for name in rows}
    hidden = {"hidden_states": Shard(1)}, {"hidden_states": Replicate()}
    return plan | {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(input_kwarg_layouts=hidden[0], desired_input_kwarg_layouts=hidden[1]),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{name: RowwiseParallel(output_layouts=Shard(1)) for name in rows},
    }


def split(model, case, mesh):
    """Parallelise ``model`` over the tensor-parallel ranks of ``mesh``."""
    for layer in [model.layer] if case.is_block else model.model.layers:
        parallelize_module(layer, mesh["tp"], layer_plan(case.is_sequence))
    if case.splits_vocabulary:
        inside = Shard(1) if case.is_sequence else Replicate()
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
            "lm_head": ColwiseParallel(input_layouts=inside, output_layouts=Replicate()),
        }
        if case.is_sequence:
            plan["model.norm"] = SequenceParallel()
        parallelize_module(model, mesh["tp"], plan)
        if case.is_tied:
            model.tie_weights()
    return model


def batch(case, step, k, dp_rank, dtype):
    generator = torch.Generator().manual_seed(100 * step + 10 * k + dp_rank)
    if case.is_block:
        return torch.randn(ROWS, TOKENS, HIDDEN, generator=generator).to(dtype)
    return torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)


def loss_of(model, case, x, mesh=None):
    """Return the loss; of its share of the tokens, where the output of a split model is split."""
    if case.is_block:
        if case.is_sequence and mesh is not None:
            x = x.chunk(2, dim=1)[mesh["tp"].get_local_rank()]
        return model(x.clone().requires_grad_()).square().sum() / x.shape[-1]
    # Positions by hand: under sequence parallel transformers sees a part of the sequence, and would number that.
    inputs = {"input_ids": x, "position_ids": torch.arange(TOKENS)[None], "use_cache": False}
    if model.dtype is torch.float64:  # transformers' own loss is fp32
        logits = model(**inputs).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    return model(**inputs, labels=x).loss
