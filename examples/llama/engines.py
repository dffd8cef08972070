"""Fine-tune a LLaMA under torch's own parallel engines, with fusedopt over what each leaves on a rank.

    python examples/llama/engines.py                                                        # one rank, for comparison
    torchrun --nproc_per_node 2 examples/llama/engines.py --engine fsdp2
    torchrun --nproc_per_node 2 examples/llama/engines.py --engine tensor
    torchrun --nproc_per_node 4 examples/llama/engines.py --engine tensor --main_grad_shard optimizer   # 2 x 2

The order is the point: parallelise the model, then make the optimizer, then wrap it. Every run learns the same
windows, so their losses are the same, up to rounding. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import HERE, DataArguments, ModelArguments, check_flags
from base_model import check_llama_dir, make_base
from cpu_bf16 import fast_bf16_linears
from ranks import Ranks, ranks
from text_data import TokenWindows, read_tokens, split_tokens
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import HfArgumentParser, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import fusedopt


@dataclass
class EngineArguments:
    """Which engine holds the model, and how it is trained."""

    engine: str = field(
        default="none", metadata={"help": "Who splits the model.", "choices": ["none", "fsdp2", "tensor"]}
    )
    tensor_parallel: int = field(
        default=2, metadata={"help": "Ranks that split one model under --engine tensor; more ranks are data parallel."}
    )
    main_grad_shard: str = field(
        default="none",
        metadata={"help": "What data-parallel ranks share.", "choices": ["none", "optimizer", "gradients"]},
    )
    dtype: str = field(
        default="bfloat16", metadata={"help": "Of the model's parameters.", "choices": ["bfloat16", "float32"]}
    )
    output_dir: str = field(default=str(HERE / "output"), metadata={"help": "Where the model and the losses go."})
    max_steps: int = field(default=20, metadata={"help": "Optimizer steps."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Clip the global gradient norm to this."})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "Windows per micro-batch."})
    gradient_accumulation_steps: int = field(default=8, metadata={"help": "Micro-batches per step, over all ranks."})
    seed: int = field(default=0, metadata={"help": "Seed of the sampled windows."})


def check_engine(args: EngineArguments, world_size: int) -> None:
    """Exit with a message where the ranks do not suit the engine."""
    if args.engine != "none" and world_size == 1:
        raise SystemExit(f"--engine {args.engine} splits the model over ranks; start it with torchrun")
    if args.engine == "fsdp2" and args.main_grad_shard != "none":
        raise SystemExit(f"--main_grad_shard {args.main_grad_shard} with --engine fsdp2: FSDP2 shards itself; drop it")
    if args.engine == "tensor" and world_size % args.tensor_parallel:
        raise SystemExit(f"--tensor_parallel {args.tensor_parallel} does not divide {world_size} ranks")
    num_replicas = world_size // (args.tensor_parallel if args.engine == "tensor" else 1)
    if args.gradient_accumulation_steps % num_replicas:
        raise SystemExit(
            f"--gradient_accumulation_steps is {args.gradient_accumulation_steps}, and {num_replicas} data-parallel"
            " ranks cannot share that evenly; give a multiple"
        )


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
    """Hand ``model`` to the engine; return the mesh of the ranks that take other data each, if there are ranks."""
    if here.world_size == 1:
        return None
    inner = args.tensor_parallel if args.engine == "tensor" else 1
    mesh = init_device_mesh(here.device.type, (here.world_size // inner, inner), mesh_dim_names=("dp", "tp"))
    if args.engine == "fsdp2":
        shard_fully(model, mesh["dp"])
    elif args.engine == "tensor":
        split_layers(model, mesh["tp"])
    return mesh["dp"]


def train(model: nn.Module, batches: Iterator[Tensor], args: EngineArguments, mesh: DeviceMesh | None) -> list[float]:
    """Train ``model``; return the loss of each step, the mean over all ranks."""
    inner = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    optimizer = fusedopt.FusedMainGradOptimizer(
        inner, max_grad_norm=args.max_grad_norm, shard=args.main_grad_shard, device_mesh=mesh
    )
    num_ranks, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    device, k = next(model.parameters()).device, args.gradient_accumulation_steps // num_ranks
    batches = islice(batches, rank, None, num_ranks)  # they take turns
    losses = []
    for _ in range(args.max_steps):
        train_loss = torch.zeros((), device=device)
        for micro_batch in range(k):
            batch = next(batches).to(device)
            # FSDP2 reduces in every backward and knows no no_sync: main_grad adds up what it delivers.
            with optimizer.no_sync() if micro_batch < k - 1 else nullcontext():
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss / k
                loss.backward()
            train_loss += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if mesh is not None:
            dist.all_reduce(train_loss, group=mesh.get_group())
        losses.append(train_loss.item() / num_ranks)
    report = optimizer.memory_report()
    print(f"{report['total'] / 2**20:.1f} MiB on this rank, {optimizer.skipped_steps} steps skipped")
    return losses


def main(here: Ranks) -> None:
    """Read the flags, find the base, train under the engine, save."""
    groups = (ModelArguments, DataArguments, EngineArguments)
    model_args, data_args, args = HfArgumentParser(
        groups, description=__doc__.splitlines()[0]
    ).parse_args_into_dataclasses()
    check_flags(model_args, data_args, args)
    check_engine(args, here.world_size)
    transformers_logging.disable_progress_bar()
    output_dir = Path(args.output_dir)
    if model_args.model_name_or_path is None:
        with here.first_alone():
            base_dir = make_base(output_dir / "base", HERE / "plays.txt", model_args.base_steps, here.device)
    else:
        base_dir = check_llama_dir(model_args.model_name_or_path)
    tokens, _ = split_tokens(
        read_tokens(Path(data_args.train_file), base_dir, data_args.block_size),
        data_args.eval_fraction,
        data_args.block_size,
    )
    model = LlamaForCausalLM.from_pretrained(base_dir, dtype=getattr(torch, args.dtype), local_files_only=True)
    model.to(here.device)

    mesh = parallelise(model, args, here)
    batches = TokenWindows(tokens, data_args.block_size, args.per_device_train_batch_size, args.seed)
    with fast_bf16_linears(here.device):
        losses = train(model, batches, args, mesh)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if here.is_first:
        model.save_pretrained(output_dir / args.engine, state_dict=weights)
        (output_dir / f"engine-{args.engine}.json").write_text(json.dumps({"losses": losses, "flags": asdict(args)}))
        print("losses:", " ".join(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    with ranks() as found:
        main(found)
