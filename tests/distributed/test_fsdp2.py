"""FSDP2 (`fully_shard`) as the ZeRO-3 engine: it communicates, fusedopt keeps its shards' main_grad and main_param."""

import copy
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fusedopt
from tests.distributed.launcher import recorded_warnings, run

BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "bf16 parameters": (BF16, {"reduce_dtype": FP32}),
    "fp32 parameters, bf16 compute": (FP32, {"param_dtype": BF16, "reduce_dtype": FP32}),
    "fp32": (FP32, {}),
}
WIDTHS = (7, 5, 6, 3)


class Net(nn.Module):
    """Layers whose sizes no number of ranks divides; with `recomputes`, one is recomputed in backward."""

    def __init__(self, recomputes=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(WIDTHS))
        self.recomputes = recomputes

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def make(policy, mesh, recomputes=False):
    dtype, options = POLICIES[policy]
    torch.manual_seed(0)
    model = Net(recomputes).to(dtype)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(**options))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**options))


def batch(model, step, k, rank):
    dtype = next(model.parameters()).dtype
    return torch.randn(4, WIDTHS[0], generator=torch.Generator().manual_seed(100 * step + 10 * k + rank)).to(dtype)


def backward(model, step, k, rank):
    model(batch(model, step, k, rank)).float().square().sum().backward()


def whole(params):
    return [param.full_tensor().detach().clone() for param in params]


def mesh_of(kind):
    num_ranks = dist.get_world_size()
    if kind == "hsdp":
        return init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (num_ranks,))


def beside_stock(rank, policy, kind, recomputes):
    """Ours and torch's own AdamW on twins; return weights of both, with main_grads held against torch's gradients."""
    mesh = mesh_of(kind)
    model, twin = make(policy, mesh, recomputes), make(policy, mesh)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    stock = torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=False)
    for step in range(3):
        for k in range(2):
            for net in (model, twin):
                net.set_requires_gradient_sync(k == 1)
                backward(net, step, k, rank)
        for param, reference in zip(model.parameters(), twin.parameters(), strict=True):
            assert param.grad is param.main_grad
            assert param.grad.dtype is FP32
            assert param.grad.to_local().isfinite().all()
            assert torch.equal(param.grad.to_local(), reference.grad.to_local().float())
        optimizer.step()
        stock.step()
        optimizer.zero_grad()
        stock.zero_grad()
    report = optimizer.memory_report()
    local = sum(param.to_local().numel() for param in model.parameters())
    size = POLICIES[policy][0].itemsize
    assert report["model"] == size * local
    assert report["main_grad"] <= 4 * (local + 1024 * len(optimizer._buffers.buckets))
    return whole(model.parameters()), whole(twin.parameters())


@pytest.mark.parametrize("policy", ["fp32 parameters, bf16 compute", "fp32"])
@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "fsdp"), (3, "fsdp"), (4, "hsdp")])
def test_fp32_parameters_end_bit_equal_to_fsdp2_with_the_bare_optimizer(policy, num_ranks, kind):
    for ours, stocks in run(beside_stock, num_ranks, policy, kind, num_ranks == 3, reuses=True):
        for one, other in zip(ours, stocks, strict=True):
            assert one.isfinite().all()
            assert torch.equal(one, other)


def bf16_loop(rank, kind):
    """bf16 parameters against a loop by hand: torch's gradients of each backward summed in fp32, on fp32 mains."""
    mesh = mesh_of(kind)
    model, twin = make("bf16 parameters", mesh), make("bf16 parameters", mesh)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    mains = [nn.Parameter(param.to_local().detach().float()) for param in twin.parameters()]
    by_hand = torch.optim.AdamW(mains, lr=1e-2, foreach=False)
    for step in range(4):
        for main in mains:
            main.grad = torch.zeros_like(main)
        for k in range(3):
            backward(model, step, k, rank)
            backward(twin, step, k, rank)
            for main, param in zip(mains, twin.parameters(), strict=True):
                main.grad += param.grad.to_local()
                param.grad = None
        for main, param in zip(mains, model.parameters(), strict=True):
            assert param.grad is param.main_grad
            assert torch.equal(param.grad.to_local(), main.grad)
        optimizer.step()
        by_hand.step()
        with torch.no_grad():
            for main, param in zip(mains, twin.parameters(), strict=True):
                param.to_local().copy_(main)
        optimizer.zero_grad()
    return whole(model.parameters()), whole(twin.parameters())


@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "fsdp"), (3, "fsdp"), (4, "hsdp")])
def test_bf16_parameters_train_on_fp32_sums_and_fp32_main_params(num_ranks, kind):
    for ours, by_hand in run(bf16_loop, num_ranks, kind, reuses=True):
        for one, other in zip(ours, by_hand, strict=True):
            assert one.isfinite().all()
            assert torch.equal(one, other)


def clips_and_skips(rank, policy, kind):
    mesh = mesh_of(kind)
    model = make(policy, mesh)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=0.5)
    backward(model, 0, 0, rank)
    exact = math.sqrt(sum(float(p.grad.full_tensor().double().square().sum()) for p in model.parameters()))
    stocks = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor().item()
    optimizer.step()
    norms = optimizer.grad_norm.item(), stocks, exact
    clipped = math.sqrt(sum(float(p.grad.full_tensor().double().square().sum()) for p in model.parameters()))
    optimizer.zero_grad()
    backward(model, 1, 0, rank)
    before = [param.to_local().clone() for param in model.parameters()]
    if rank == dist.get_world_size() - 1:
        next(p for p in model.parameters() if p.to_local().numel()).grad.to_local().view(-1)[0] = math.nan
    with recorded_warnings() as warned:
        optimizer.step()
    assert any("skipped" in text for text in warned)
    kept = all(map(torch.equal, before, (param.to_local() for param in model.parameters())))
    was_skipped = optimizer.step_was_skipped
    optimizer.zero_grad()
    return norms, clipped, kept, was_skipped


@pytest.mark.parametrize("policy", ["bf16 parameters", "fp32"])
@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "fsdp"), (3, "fsdp"), (4, "hsdp")])
def test_the_norm_counts_each_element_once_and_nan_on_one_rank_skips_on_all(policy, num_ranks, kind):
    for (ours, stocks, exact), clipped, kept, was_skipped in run(clips_and_skips, num_ranks, policy, kind, reuses=True):
        assert ours == pytest.approx(exact, rel=1e-6)
        assert stocks == pytest.approx(exact, rel=1e-6)
        assert exact > 1.0
        assert clipped == pytest.approx(0.5, rel=1e-5)
        assert kept
        assert was_skipped


def saved_by_torch(rank, policy):
    """Through torch.distributed.checkpoint's state dicts into a new pair, which goes on in the same bits."""
    mesh = mesh_of("fsdp")
    model = make(policy, mesh)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2):
        backward(model, step, 0, rank)
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    placed = {key: type(value) for state in saved["state"].values() for key, value in state.items()}
    own = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    results = []
    for load in ("torch", "own", "go on"):
        if load != "go on":
            twin = make(policy, mesh)
            other = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(twin.parameters(), lr=1e-2))
            twin.load_state_dict(copy.deepcopy(weights))
            if load == "torch":
                set_optimizer_state_dict(twin, other, copy.deepcopy(saved))
            else:
                other.load_state_dict(own)
        else:
            twin, other = model, optimizer
        for step in range(2, 4):
            backward(twin, step, 0, rank)
            other.step()
            other.zero_grad()
        results.append(whole(twin.parameters()))
    return placed, results


@pytest.mark.parametrize("policy", ["bf16 parameters", "fp32"])
def test_checkpoints_go_on_in_the_same_bits(policy):
    for placed, (by_torch, by_own, went_on) in run(saved_by_torch, 2, policy, reuses=True):
        assert placed["exp_avg"] is DTensor
        assert ("main_param" in placed) == (policy == "bf16 parameters")
        for one, other, reference in zip(by_torch, by_own, went_on, strict=True):
            assert reference.isfinite().all()
            assert torch.equal(one, reference)
            assert torch.equal(other, reference)


def pair(policy, kind):
    if kind is None:  # whole, on one rank
        model = Net().to(POLICIES[policy][0])
    else:
        model = make(policy, mesh_of(kind))
    return model, fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.named_parameters(), lr=1e-2))


def everything(model, optimizer):
    """Return weights and state, whole."""
    state = get_optimizer_state_dict(model, optimizer)["state"]
    found = {f"{name}.{key}": value for name, of in state.items() for key, value in of.items()}
    found |= model.state_dict()
    return {key: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for key, v in found.items()}


def save_with_dcp(rank, folder, kind):
    saved = {}
    for policy in ("bf16 parameters", "fp32"):
        model, optimizer = pair(policy, kind)
        for step in range(2):
            backward(model, step, 0, rank)
            optimizer.step()
            optimizer.zero_grad()
        found = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.save(found, checkpoint_id=folder / policy)
        saved[policy] = everything(model, optimizer)
    return saved


def load_with_dcp(rank, folder, kind):
    loaded = {}
    for policy in ("bf16 parameters", "fp32"):
        model, optimizer = pair(policy, kind)
        found = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
        dcp.load(found, checkpoint_id=folder / policy)
        set_optimizer_state_dict(model, optimizer, found["optim"])
        model.load_state_dict(found["model"])
        loaded[policy] = everything(model, optimizer)
        backward(model, 2, 0, rank)
        optimizer.step()
        assert all(weight.isfinite().all() for weight in whole_of(model))
    return loaded


def whole_of(model):
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]


@pytest.mark.parametrize(
    ("saved_by", "saved_kind", "loaded_by", "loaded_kind"),
    [(2, "fsdp", 3, "fsdp"), (4, "hsdp", 2, "fsdp"), (3, "fsdp", 1, None), (1, None, 2, "fsdp")],
)
def test_other_numbers_of_ranks_load_every_bit(saved_by, saved_kind, loaded_by, loaded_kind, tmp_path):
    expected = run(save_with_dcp, saved_by, tmp_path, saved_kind, reuses=True)[0]
    for loaded in run(load_with_dcp, loaded_by, tmp_path, loaded_kind, reuses=True):
        for policy, tensors in loaded.items():
            assert tensors.keys() == expected[policy].keys()
            assert any(key.endswith("exp_avg") and value.any() for key, value in tensors.items())
            for key, value in tensors.items():
                assert value.isfinite().all()
                assert torch.equal(value, expected[policy][key]), key


def refusals(rank):
    mesh = mesh_of("fsdp")
    model = make("fp32", mesh)
    said = []

    def refuse(error, optimizer, **settings):
        with pytest.raises(error) as caught:
            fusedopt.FusedMainGradOptimizer(optimizer, **settings)
        said.append(str(caught.value))
        assert not any(hasattr(p, "main_grad") for p in model.parameters())

    for shard in ("optimizer", "gradients"):
        refuse(ValueError, torch.optim.AdamW(model.parameters()), shard=shard)
    outside = nn.Linear(2, 2)
    refuse(ValueError, torch.optim.AdamW([*model.named_parameters(), *outside.named_parameters("outside")]))
    refuse(ValueError, torch.optim.Muon([(n, p) for n, p in model.named_parameters() if p.ndim == 2]))
    late = Net()
    early = torch.optim.AdamW(late.named_parameters())
    fully_shard(late, mesh=mesh)
    refuse(RuntimeError, early)
    fused = fusedopt.convert_linears(make("fp32", mesh))
    return said, len(fused.converted)


def test_what_cannot_work_says_why_and_what_to_do():
    for (optimizer, gradients, outside, matrix, orphan), _ in run(refusals, 2, reuses=True):
        for said, shard in ((optimizer, "optimizer"), (gradients, "gradients")):
            assert f'shard="{shard}" with parameters that fully_shard holds' in said
            assert 'Use shard="none"' in said
        assert "not outside.weight: nobody would reduce its gradient" in outside
        assert "Muon works on whole matrices, and of parameter layers.0.weight" in matrix
        assert "parameter layers.0.weight is in no live module" in orphan


def fused_layers(rank):
    """FusedLinear under FSDP2: in forward its weight is another object, so the gradient goes through autograd."""
    mesh = mesh_of("fsdp")
    results = []
    for converts in (False, True):
        torch.manual_seed(0)
        model = Net()
        if converts:
            fusedopt.convert_linears(model)
        fully_shard(model, mesh=mesh)
        optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(2):
            backward(model, step, 0, rank)
            optimizer.step()
            optimizer.zero_grad()
        results.append(whole(model.parameters()))
    return results


def test_fused_linear_under_fsdp2_is_a_plain_linear():
    for plain, fused in run(fused_layers, 2, reuses=True):
        assert all(weight.isfinite().all() for weight in plain)
        assert all(map(torch.equal, plain, fused))
