"""A LLaMA cut into stages for torch.distributed.pipelining: one stage on each rank of a mesh.

    tokens -> [embedding, first layers] -> hidden states -> [last layers, norm, head] -> logits -> loss

A stage is LlamaForCausalLM with the parts of the other stages taken out. So mask, positions and the order of things are
transformers' own, and each weight keeps its name: the weights of all stages, put together, are those of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import LlamaForCausalLM

from fusedopt import FusedMainGradOptimizer


class Elsewhere(nn.Module):
    """In the place of a part that another stage holds: what comes in goes out."""

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Return ``hidden_states`` as they are."""
        return hidden_states


def keep_stage(model: LlamaForCausalLM, index: int, num_stages: int) -> None:
    """Take everything out of ``model`` that is not in stage ``index``: layers in order, equally many, one more at most.

    Raises:
        SystemExit: if there are too few layers, or the first and the last stage would hold the same weight.
    """
    num_layers = len(model.model.layers)
    if num_layers < num_stages:
        raise SystemExit(f"{num_layers} layers do not make --pipeline_parallel {num_stages} stages; give {num_layers}")
    if model.config.tie_word_embeddings:
        raise SystemExit(
            "the embedding and the head of this model are one weight, which the first and the last stage would both"
            " have to hold; --engine pipeline does not (docs/parallel.md, Pipeline parallel, says how)"
        )
    first, end = num_layers * index // num_stages, num_layers * (index + 1) // num_stages
    for i in (*range(first), *range(end, num_layers)):
        model.model.layers[i] = Elsewhere()
    if index > 0:
        model.model.embed_tokens = Elsewhere()
    if index < num_stages - 1:
        model.model.norm = Elsewhere()
        model.lm_head = Elsewhere()


class Stage(nn.Module):
    """A model that :func:`keep_stage` cut, from one tensor to one tensor."""

    def __init__(self, model: LlamaForCausalLM, is_first: bool) -> None:
        super().__init__()
        self.model, self.takes = model, "input_ids" if is_first else "inputs_embeds"

    def forward(self, given: Tensor) -> Tensor:
        """Return hidden states, ``[windows, tokens, hidden_size]``; logits from the last stage, which has the head."""
        return self.model(**{self.takes: given}, use_cache=False).logits


class Pipeline:
    """The stages of one replica at work, by the 1F1B schedule; ``mesh`` has a rank for each."""

    def __init__(self, model: LlamaForCausalLM, mesh: DeviceMesh, num_micro_batches: int) -> None:
        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)

        index, self.group = mesh.get_local_rank(), mesh.get_group()
        self.stage = PipelineStage(Stage(model, index == 0), index, mesh.size(), model.device, group=self.group)
        # It takes the mean of the micro-batches: .grad is divided by their number after the last backward.
        self.schedule = Schedule1F1B(self.stage, num_micro_batches, loss_fn=loss_of)

    def backward(self, micro_batches: list[Tensor], optimizer: FusedMainGradOptimizer) -> Tensor:
        """Run ``micro_batches`` forward and backward; return the mean of their losses, on every stage."""
        tokens = torch.cat(micro_batches)  # the schedule cuts them apart again
        losses: list[Tensor] = []
        inputs = (tokens,) if self.stage.is_first else ()
        target = tokens if self.stage.is_last else None
        with optimizer.no_sync():  # replicas reduce in step(), once, where their shard lets it wait
            self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        loss = torch.stack(losses).detach().mean() if self.stage.is_last else torch.zeros((), device=tokens.device)
        dist.all_reduce(loss, group=self.group)  # only the last stage has one to add
        return loss


def gather_stages(model: LlamaForCausalLM, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the weights of all stages on the rank of the first one, none on the others. All ranks call it."""
    own = {name: weight.cpu() for name, weight in model.state_dict().items()}
    parts: list[dict[str, Tensor]] | None = [{} for _ in range(mesh.size())] if mesh.get_local_rank() == 0 else None
    dist.gather_object(own, parts, group=mesh.get_group(), group_dst=0)
    return {name: weight for part in parts or () for name, weight in part.items()}
