"""The Python blocks of docs/parallel.md run as printed, on two ranks."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fusedopt
from tests.distributed.launcher import run

PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


def whole(model):
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().float() for p in model.parameters()]


def blocks_top_to_bottom(rank, folder):
    os.chdir(folder)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    namespace = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    optimizers = namespace["optimizer"], namespace["split_optimizer"]
    assert all(optimizer.skipped_steps == 0 for optimizer in optimizers)
    assert all(entry.main_param.dtype is torch.float32 for o in optimizers for entry in o._buffers.entries)
    trained = [whole(namespace[name]) for name in ("model", "split")]
    return len(blocks), trained, whole(namespace["build"]())


def test_the_blocks_run_and_train_the_same_weights_on_both_ranks(tmp_path):
    (num_blocks, trained, untrained), (_, on_the_other, _) = run(blocks_top_to_bottom, 2, str(tmp_path))
    assert num_blocks >= 4
    for here, there in zip(trained, on_the_other, strict=True):
        assert all(weight.isfinite().all() for weight in here)
        assert all(map(torch.equal, here, there))
        assert not any(map(torch.equal, here, untrained))
    assert {path.name for path in tmp_path.iterdir()} == {"step-3", "part0.pt", "part1.pt"}


def redistributed(rank, engine, folder, trains):
    """Train and save, or load what another number of ranks saved; return every tensor of state, whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)).bfloat16()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
    if engine == "fsdp2":
        fully_shard(model)
    else:
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), device_mesh=None if engine == "fsdp2" else mesh["dp"]
    )
    if trains:
        for _ in range(2):
            model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    if trains:
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(model, optimizer, state["optim"])
        model.load_state_dict(state["model"])
    held = get_optimizer_state_dict(model, optimizer)["state"]
    found = {(name, key): value for name, of in held.items() for key, value in of.items() if torch.is_tensor(value)}
    found |= {(name, "model"): param.detach() for name, param in model.named_parameters()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


@pytest.mark.parametrize(("engine", "others"), [("fsdp2", 3), ("tensor", 4)])
def test_other_numbers_of_ranks_load_what_two_saved(engine, others, tmp_path):
    folder = str(tmp_path / "saved")
    saved, _ = run(redistributed, 2, engine, folder, True)
    assert {key for _, key in saved} >= {"main_param", "exp_avg", "exp_avg_sq", "step", "model"}
    assert any(value.abs().max() > 0 for (_, key), value in saved.items() if key == "exp_avg")
    for loaded in run(redistributed, others, engine, folder, False):
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
