"""Tensor parallel by torch's `parallelize_module`, alone and times data parallel, against one process."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import fusedopt
from tests.distributed.launcher import run

DOUBLE_BOUND = 1e-12
"""fp64 sums of fewer than 100 addends in another order: 100 * 2**-53 = 1e-14 a window, relative, over three windows of
AdamW, which divides by a root; a hundred times that. A gradient lost or counted twice is off by more than 1e-3."""


class Block(nn.Module):
    """A norm, two linear layers that are split, one that is not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x, uses_norm=True):
        x = self.norm(x) if uses_norm else x
        return self.head(self.down(torch.relu(self.up(x))))


def plan(is_sequence_parallel):
    if not is_sequence_parallel:
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }


def make(mesh, dtype, is_sequence_parallel):
    torch.manual_seed(0)
    model = Block().to(dtype)
    reference = copy.deepcopy(model)
    return parallelize_module(model, mesh["tp"], plan(is_sequence_parallel)), reference


def batch(step, k, dp_rank, dtype):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * k + dp_rank)).to(dtype)


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def mesh_of(num_ranks):
    return init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("dp", "tp"))


def loss_of(model, x, mesh, is_sequence_parallel, **kwargs):
    if is_sequence_parallel:
        x = x.chunk(2)[mesh["tp"].get_local_rank()].clone()
    # An input that requires a gradient: without, torch's own hooks warn.
    return model(x.detach().requires_grad_(), **kwargs).square().sum()


def trains_as_one_process(rank, num_ranks, shard, is_sequence_parallel):
    mesh = mesh_of(num_ranks)
    dp, dp_rank = mesh["dp"].size(), mesh["dp"].get_local_rank()
    model, reference = make(mesh, torch.float64, is_sequence_parallel)
    stock = make(mesh, torch.float64, is_sequence_parallel)[0]
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0, device_mesh=mesh["dp"], shard=shard
    )
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    norms, collectives = [], []
    for step in range(3):
        for k in range(2):
            for other in range(dp):
                (reference(batch(step, k, other, torch.float64)).square().sum() / dp).backward()
            x = batch(step, k, dp_rank, torch.float64)
            with optimizer.no_sync() if k == 0 else contextlib.nullcontext(), CommDebugMode() as ours:
                loss_of(model, x, mesh, is_sequence_parallel).backward()
            with CommDebugMode() as stocks:
                loss_of(stock, x, mesh, is_sequence_parallel).backward()
            if k == 0 and shard != "gradients":
                collectives.append((ours.get_total_counts(), stocks.get_total_counts()))
        if shard != "gradients":
            assert all(p.grad is p.main_grad for p in model.parameters())
            assert all(isinstance(p.main_grad, DTensor) == isinstance(p, DTensor) for p in model.parameters())
        if is_sequence_parallel and shard == "none":
            assert list(model.norm.weight.grad.placements) == [Partial()]
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        norms.append((optimizer.grad_norm.item(), norm.item()))
        if shard == "none":
            assert list(model.norm.weight.grad.placements) == [Replicate()] if is_sequence_parallel else True
            assert torch.allclose(whole(model.norm.weight.grad), reference.norm.weight.grad, rtol=1e-10, atol=1e-14)
        reference_optimizer.step()
        for opt in (optimizer, reference_optimizer):
            opt.zero_grad()
        for param in stock.parameters():
            param.grad = None
    weights = [(whole(p), q.detach()) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]
    return norms, collectives, weights, dict(optimizer._comm.counts), len(optimizer._buffers.buckets)


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_two_by_two_ranks_train_as_one_process(shard, is_sequence_parallel):
    for norms, collectives, weights, counts, num_buckets in run(
        trains_as_one_process, 4, 4, shard, is_sequence_parallel, reuses=True
    ):
        for found, expected in norms:
            assert found == pytest.approx(expected, rel=DOUBLE_BOUND)
        for found, expected in weights:
            assert found.isfinite().all()
            assert torch.allclose(found, expected, rtol=DOUBLE_BOUND, atol=DOUBLE_BOUND)
        assert all(ours == stocks > 0 for ours, stocks in collectives)  # tensor-parallel ones: as many, untouched
        windows = 3
        assert counts["reduce"] == windows * num_buckets * (2 if shard == "gradients" else 1)
        # Shares of the norm are summed once a window, by the ranks that update it.
        needed = {0} if not is_sequence_parallel else {windows} if shard == "none" else {0, windows}
        assert counts.get("share", 0) in needed


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel_alone_needs_no_data_parallel_ranks(is_sequence_parallel):
    for norms, _, weights, counts, _ in run(trains_as_one_process, 2, 2, "none", is_sequence_parallel, reuses=True):
        assert all(found == pytest.approx(expected, rel=DOUBLE_BOUND) for found, expected in norms)
        assert all(torch.allclose(a, b, rtol=DOUBLE_BOUND, atol=DOUBLE_BOUND) for a, b in weights)
        assert "reduce" not in counts


def missing_on_one_replica(rank, shard):
    """The first data-parallel rank uses the norm, the second does not; its gradient there is the other's alone."""
    mesh = mesh_of(4)
    dp_rank = mesh["dp"].get_local_rank()
    model, reference = make(mesh, torch.float64, True)
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), device_mesh=mesh["dp"], shard=shard
    )
    for step in range(2):
        for other in range(2):
            (reference(batch(step, 0, other, torch.float64), uses_norm=other == 0).square().sum() / 2).backward()
        x = batch(step, 0, dp_rank, torch.float64)
        loss_of(model, x, mesh, True, uses_norm=dp_rank == 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in reference.parameters():
                param -= 0.1 * param.grad
                param.grad = None
    return [(whole(p), q.detach()) for p, q in zip(model.parameters(), reference.parameters(), strict=True)]


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_shares_that_some_replicas_lack_are_summed_on_all(shard):
    for weights in run(missing_on_one_replica, 4, shard, reuses=True):
        assert all(found.isfinite().all() for found, _ in weights)
        assert all(torch.allclose(a, b, rtol=DOUBLE_BOUND, atol=DOUBLE_BOUND) for a, b in weights)


def bits(rank):
    """256 then 1 is 257 on the local part; FusedLinear falls back; local state comes back bit for bit."""
    mesh = mesh_of(2)
    torch.manual_seed(0)
    model = nn.Sequential(fusedopt.FusedLinear(4, 4, bias=False), fusedopt.FusedLinear(4, 4, bias=False)).bfloat16()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    with torch.no_grad():
        for param in model.parameters():
            param.to_local().fill_(1.0)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1), device_mesh=mesh["dp"])
    with mock.patch.object(fusedopt.layers.linear._FusedLinear, "apply", side_effect=AssertionError("fused a DTensor")):
        for scale in (256.0, 1.0):
            x = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
            (scale * model(x).sum() / 4).backward()
    sums = [set(param.grad.to_local().flatten().tolist()) for param in model.parameters()]
    dtypes = {param.grad.dtype for param in model.parameters()}
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = [param.to_local().clone() for param in model.parameters()]
    optimizer.zero_grad()
    model(torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    optimizer.step()
    moved = not any(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.load_state_dict(saved)
    with torch.no_grad():
        for param, old in zip(model.parameters(), before, strict=True):
            param.copy_(DTensor.from_local(old, param.device_mesh, param.placements))
    again = optimizer.state_dict()["state"]
    same = all(torch.equal(saved["state"][i][k], again[i][k]) for i in again for k in again[i])
    swapped = {**saved, "fusedopt": {**saved["fusedopt"], "places": ["Shard(dim=0) 7"] * 2}}
    with pytest.raises(ValueError, match="another part of the DTensor parameter"):
        optimizer.load_state_dict(swapped)
    return sums, dtypes, moved, same


def test_local_parts_sum_in_fp32_and_state_is_this_ranks():
    for sums, dtypes, moved, same in run(bits, 2, reuses=True):
        assert sums == [{257.0}, {257.0}]
        assert dtypes == {torch.float32}
        assert moved
        assert same


def refusals(rank):
    mesh = mesh_of(4)
    model, _ = make(mesh, torch.float32, False)
    said = []

    def refuse(error, make_optimizer, **settings):
        with pytest.raises(error) as caught:
            fusedopt.FusedMainGradOptimizer(make_optimizer(), **settings)
        said.append(str(caught.value))
        assert not any(hasattr(p, "main_grad") for p in model.parameters())

    refuse(RuntimeError, lambda: torch.optim.AdamW(model.parameters()))
    matrices = [p for name, p in model.named_parameters() if name in ("up.weight", "down.weight")]
    refuse(ValueError, lambda: torch.optim.Muon(matrices), device_mesh=mesh["dp"])
    late = Block()
    early = torch.optim.AdamW(late.named_parameters())
    parallelize_module(late, mesh["tp"], plan(False))
    refuse(RuntimeError, lambda: early, device_mesh=mesh["dp"])
    tied = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    tied[1].weight = tied[0].weight
    parallelize_module(tied, mesh["tp"], {"1": ColwiseParallel()})
    refuse(RuntimeError, lambda: torch.optim.AdamW(tied.named_parameters()), device_mesh=mesh["dp"])
    twice = nn.Linear(8, 8, bias=False)  # of which no rank holds one block
    twice.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 8), mesh["tp"], [_StridedShard(0, split_factor=2)]))
    for shard in ("optimizer", "gradients"):
        inner = torch.optim.AdamW(twice.named_parameters())
        optimizer = fusedopt.FusedMainGradOptimizer(inner, device_mesh=mesh["dp"], shard=shard)
        with pytest.raises(ValueError, match=r"cannot put the state of DTensor parameter weight together") as caught:
            get_optimizer_state_dict(twice, optimizer)
        assert "_StridedShard" in str(caught.value)
        optimizer.unwrap()
    return said


def two_meshes(rank):
    """Layers on meshes of their own: over each, its elements are counted once."""
    meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("one", "other")]
    alone = mesh_of(2)["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double()
    reference = copy.deepcopy(model)
    for name, mesh in zip("01", meshes, strict=True):
        parallelize_module(model, mesh, {name: ColwiseParallel(output_layouts=Replicate())})
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0, device_mesh=alone
    )
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).double()
    model(x.clone().requires_grad_()).square().sum().backward()
    reference(x).square().sum().backward()
    optimizer.step()
    return optimizer.grad_norm.item(), torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]).item()


def test_layers_on_different_meshes_have_one_norm():
    for found, expected in run(two_meshes, 2, reuses=True):
        assert expected > 1.0
        assert found == pytest.approx(expected, rel=DOUBLE_BOUND)


def test_what_cannot_work_says_which_parameter_and_what_to_do():
    for all_ranks, matrix, orphan, untied in run(refusals, 4, reuses=True):
        assert "no data-parallel replicas" in all_ranks
        assert "device_mesh=mesh['dp']" in all_ranks
        assert "Muon works on whole matrices" in matrix
        assert "parameter up.weight is in no live module" in orphan
        assert "Parallelise first, then make the optimizer" in orphan
        assert "parameter 1.weight is a DTensor with the values of 0.weight, which is plain" in untied
        assert "tie_weights" in untied
