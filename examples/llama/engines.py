"""Fine-tune a LLaMA under torch's own parallel engines, with fusedopt over what each leaves on a rank.

    python examples/llama/engines.py                                                        # one rank, for comparison
    torchrun --nproc_per_node 2 examples/llama/engines.py --engine fsdp2
    torchrun --nproc_per_node 2 examples/llama/engines.py --engine tensor
    torchrun --nproc_per_node 4 examples/llama/engines.py --engine tensor --main_grad_shard optimizer   # 2 x 2
    torchrun --nproc_per_node 2 examples/llama/engines.py --engine pipeline

The order is the point: parallelise the model, then make the optimizer, then wrap it. Every run learns the same
windows, so their losses are the same, up to rounding. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import HERE, DataArguments, ModelArguments, check_flags
from base_model import check_llama_dir, make_base
from cpu_bf16 import fast_bf16_linears
from pipeline_stages import Pipeline, gather_stages, keep_stage
from ranks import Ranks, ranks
from text_data import TokenWindows, read_tokens, split_tokens
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import HfArgumentParser, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from fusedopt import FusedMainGradOptimizer


@dataclass
class EngineArguments:
    """Which engine holds the model, and how it is trained."""

    engine: str = field(
        default="none", metadata={"help": "Who splits the model.", "choices": ["none", "fsdp2", "tensor", "pipeline"]}
    )
    tensor_parallel: int = field(default=2, metadata={"help": "Ranks per model, under tensor; more are replicas."})
    pipeline_parallel: int = field(default=2, metadata={"help": "The same, under pipeline: a stage on each."})
    main_grad_shard: str = field(
        default="none", metadata={"help": "What replicas share.", "choices": ["none", "optimizer", "gradients"]}
    )
    dtype: str = field(default="bfloat16", metadata={"help": "Of parameters.", "choices": ["bfloat16", "float32"]})
    output_dir: str = field(default=str(HERE / "output"), metadata={"help": "Where the model and the losses go."})
    max_steps: int = field(default=20, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the global gradient norm to this."})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "Windows per micro-batch."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Micro-batches per step, over all ranks."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampled windows."})

    @property
    def ranks_per_model(self) -> int:
        """How many ranks hold one model between them; those beyond are data parallel, as all of FSDP2's are."""
        return {"tensor": self.tensor_parallel, "pipeline": self.pipeline_parallel}.get(self.engine, 1)


def check_engine(args: EngineArguments, world_size: int) -> None:
    """Exit with a message where the ranks do not suit the engine."""
    if args.engine != "none" and world_size == 1:
        raise SystemExit(f"--engine {args.engine} splits the model over ranks; start it with torchrun")
    if args.engine == "fsdp2" and args.main_grad_shard != "none":
        raise SystemExit(f"--main_grad_shard {args.main_grad_shard} with --engine fsdp2: FSDP2 shards itself; drop it")
    if world_size % args.ranks_per_model:
        raise SystemExit(f"--{args.engine}_parallel {args.ranks_per_model} does not divide {world_size} ranks")
    num_replicas, merged = world_size // args.ranks_per_model, args.gradient_accumulation_steps
    if merged % num_replicas:
        raise SystemExit(f"--gradient_accumulation_steps is {merged}; give a multiple of the {num_replicas} replicas")
    if args.engine == "pipeline" and merged < world_size:
        raise SystemExit(f"--gradient_accumulation_steps is {merged}; 1F1B needs {world_size}, one for each stage")


def shard_fully(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Let FSDP2 hold a part of every parameter on each rank; a decoder layer is gathered at a time."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def split_layers(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Split heads of attention and columns of the MLP over ``mesh``; norms and embeddings stay whole on each rank."""
    config = model.config
    if config.num_key_value_heads % mesh.size() or config.num_attention_heads % mesh.size():
        raise SystemExit(
            f"{config.num_attention_heads} heads, {config.num_key_value_heads} of keys and values, cannot be split over"
            f" --tensor_parallel {mesh.size()}; give a number that divides both"
        )
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        parallelize_module(layer, mesh, plan)


def parallelise(model: LlamaForCausalLM, args: EngineArguments, here: Ranks) -> DeviceMesh | None:
    """Hand ``model`` to the engine; return the mesh if there are ranks, along whose "dp" each takes other data."""
    if here.world_size == 1:
        model.to(here.device)
        return None
    inner, names = args.ranks_per_model, ("dp", "pp" if args.engine == "pipeline" else "tp")
    mesh = init_device_mesh(here.device.type, (here.world_size // inner, inner), mesh_dim_names=names)
    if args.engine == "pipeline":
        keep_stage(model, mesh["pp"].get_local_rank(), inner)
    model.to(here.device)
    if args.engine == "fsdp2":
        shard_fully(model, mesh["dp"])
    elif args.engine == "tensor":
        split_layers(model, mesh["tp"])
    return mesh


def merge_gradients(model: LlamaForCausalLM, micro_batches: list[Tensor], optimizer: FusedMainGradOptimizer) -> Tensor:
    """Run ``micro_batches`` forward and backward, one after another; return the mean of their losses."""
    losses = []
    for batch in micro_batches:
        # FSDP2 reduces in every backward and knows no no_sync: main_grad adds up what it delivers.
        with optimizer.no_sync() if len(losses) < len(micro_batches) - 1 else nullcontext():
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss / len(micro_batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def train(
    model: LlamaForCausalLM, batches: Iterator[Tensor], args: EngineArguments, mesh: DeviceMesh | None
) -> list[float]:
    """Train ``model``; return the loss of each step, the mean over all ranks."""
    replicas = mesh["dp"] if mesh is not None else None
    stages = mesh["pp"] if mesh is not None and args.engine == "pipeline" else None
    optimizer = FusedMainGradOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.learning_rate),
        max_grad_norm=args.max_grad_norm,
        shard=args.main_grad_shard,
        device_mesh=replicas,
        norm_group=stages.get_group() if stages is not None else None,
    )
    num_replicas, replica = (1, 0) if replicas is None else (replicas.size(), replicas.get_local_rank())
    k = args.gradient_accumulation_steps // num_replicas
    backward = partial(merge_gradients, model) if stages is None else Pipeline(model, stages, k).backward
    batches = islice(batches, replica, None, num_replicas)  # they take turns
    losses: list[float] = []
    for _ in range(args.max_steps):
        train_loss = backward([batch.to(model.device) for batch in islice(batches, k)], optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if replicas is not None:
            dist.all_reduce(train_loss, group=replicas.get_group())
        losses.append(train_loss.item() / num_replicas)
    print(f"{optimizer.memory_report()['total'] / 2**20:.1f} MiB on this rank, {optimizer.skipped_steps} steps skipped")
    return losses


def main(here: Ranks) -> None:
    """Read the flags, find the base, train under the engine, save."""
    parser = HfArgumentParser((ModelArguments, DataArguments, EngineArguments), description=__doc__.splitlines()[0])
    model_args, data_args, args = parser.parse_args_into_dataclasses()
    check_flags(model_args, data_args, args)
    check_engine(args, here.world_size)
    transformers_logging.disable_progress_bar()
    output_dir = Path(args.output_dir)
    if model_args.model_name_or_path is None:
        with here.first_alone():
            base_dir = make_base(output_dir / "base", HERE / "plays.txt", model_args.base_steps, here.device)
    else:
        base_dir = check_llama_dir(model_args.model_name_or_path)
    text = read_tokens(Path(data_args.train_file), base_dir, data_args.block_size)
    tokens, _ = split_tokens(text, data_args.eval_fraction, data_args.block_size)
    model = LlamaForCausalLM.from_pretrained(base_dir, dtype=getattr(torch, args.dtype), local_files_only=True)
    mesh = parallelise(model, args, here)
    batches = TokenWindows(tokens, data_args.block_size, args.per_device_train_batch_size, args.seed)
    with fast_bf16_linears(here.device):
        losses = train(model, batches, args, mesh)

    if mesh is not None and args.engine == "pipeline":
        weights = gather_stages(model, mesh["pp"])
    else:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    with here.first_alone():  # the others wait: ranks end together
        if here.is_first:
            model.save_pretrained(output_dir / args.engine, state_dict=weights)
            results = json.dumps({"losses": losses, "flags": asdict(args)})
            (output_dir / f"engine-{args.engine}.json").write_text(results)
            print("losses:", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    with ranks() as found:
        main(found)
