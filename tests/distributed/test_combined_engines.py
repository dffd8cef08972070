"""Torch's engines together: tensor parallel under FSDP2, and several meshes in one wrapper."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fusedopt
from tests.distributed.launcher import at, recorded_warnings, run

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
POLICIES = {
    "bf16 parameters": (BF16, {"reduce_dtype": FP32}),
    "fp32 parameters, bf16 compute": (FP32, {"param_dtype": BF16, "reduce_dtype": FP32}),
    "fp32": (FP32, {}),
    "fp64": (FP64, {}),
}
SINGLE_BOUND = 1e-5
"""Norms of fewer than 300 elements: sums of squares in fp32 are off by less than 300 * 2**-24 = 2e-5, roots by half."""

DOUBLE_BOUND = 1e-12
"""fp64 sums of fewer than 100 addends in another order: 100 * 2**-53 = 1e-14 a window, relative, over three windows of
AdamW, which divides by a root; a hundred times that. A gradient lost or counted twice is off by more than 1e-3."""


class Pair(nn.Module):
    """Two linear layers to split, in sizes that FSDP2 cuts unevenly then; returns no view, of which FSDP2 warns."""

    def __init__(self, num_out=7):
        super().__init__()
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, num_out)

    def forward(self, x):
        return torch.tanh(self.down(torch.relu(self.up(x))))


class Block(nn.Module):
    """A norm, a pair of layers that is split, a layer that tensor parallel knows nothing of."""

    def __init__(self):
        super().__init__()
        self.norm, self.pair, self.head = nn.LayerNorm(8), Pair(), nn.Linear(7, 5, bias=False)

    def forward(self, x):
        return self.head(self.pair(self.norm(x)))


SPLIT = {"up": ColwiseParallel(), "down": RowwiseParallel()}
PLANS = {
    "tensor": {f"pair.{name}": style for name, style in SPLIT.items()},
    "sequence": {
        "norm": SequenceParallel(sequence_dim=0),
        "pair.up": ColwiseParallel(input_layouts=Shard(0)),
        "pair.down": RowwiseParallel(output_layouts=Replicate()),
    },
}


def block(dtype):
    torch.manual_seed(0)
    return Block().to(dtype)


def make(mesh, policy, plan):
    dtype, options = POLICIES[policy]
    model = parallelize_module(block(dtype), mesh["tp"], PLANS[plan])
    for module in (model.pair, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(**options))
    return model


def batch(step, k, dp_rank, dtype):
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * k + dp_rank)).to(dtype)


def backward(model, mesh, plan, step, k=0):
    x = batch(step, k, mesh["dp"].get_local_rank(), next(model.parameters()).dtype)
    x = x.chunk(2)[mesh["tp"].get_local_rank()].clone() if plan == "sequence" else x
    model(x.requires_grad_()).double().square().sum().backward()  # without, hooks of torch warn


def exact_norm(params):
    return math.sqrt(sum(float(param.grad.full_tensor().double().square().sum()) for param in params))


def local(params):
    return [param.to_local().detach().clone() for param in params]


def are_equal(ones, others):
    """Return whether two lists are finite and the same bits."""
    return all(bool(one.isfinite().all()) and torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def check_bits_and_norms(ours, others, norms):
    assert are_equal(ours, others)
    for found, exact in norms:
        assert exact > 0.1
        assert found == pytest.approx(exact, rel=SINGLE_BOUND)


def check_against_one_process(norms, ends):
    for found, expected in norms:
        assert expected > 1.0
        assert found == pytest.approx(expected, rel=DOUBLE_BOUND)
    for found, expected in ends:
        assert found.isfinite().all()
        assert torch.allclose(found, expected, rtol=DOUBLE_BOUND, atol=DOUBLE_BOUND)


def wrap(params, lr=1e-2, **settings):
    return fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(params, lr=lr, foreach=False), **settings)


def beside_stock(make_one, backward_one):
    """Ours and torch's own AdamW on twins, three windows of two micro-batches."""
    model, twin = make_one(), make_one()
    optimizer = wrap(model.parameters(), max_grad_norm=1e9)
    stock = torch.optim.AdamW(twin.parameters(), lr=1e-2, foreach=False)
    norms = []
    for step in range(3):
        for k in range(2):
            for net in (model, twin):
                net.set_requires_gradient_sync(k == 1)
                backward_one(net, step, k)
        for param, reference in zip(model.parameters(), twin.parameters(), strict=True):
            assert param.grad is param.main_grad
            assert param.grad.placements == param.placements
            assert torch.equal(param.grad.to_local(), reference.grad.to_local())
        exact = exact_norm(model.parameters())
        for opt in (optimizer, stock):
            opt.step()
            opt.zero_grad()
        norms.append((optimizer.grad_norm.item(), exact))
    return local(model.parameters()), local(twin.parameters()), norms


def by_hand(mesh, plan):
    """bf16 parameters, against torch's gradients of each backward summed in fp32, on fp32 mains."""
    model, twin = (make(mesh, "bf16 parameters", plan) for _ in range(2))
    optimizer = wrap(model.parameters())
    mains = [nn.Parameter(part.float()) for part in local(twin.parameters())]
    reference = torch.optim.AdamW(mains, lr=1e-2, foreach=False)
    norms = []
    for step in range(3):
        for main in mains:
            main.grad = torch.zeros_like(main)
        for k in range(3):
            for net in (model, twin):
                backward(net, mesh, plan, step, k)
            for main, param in zip(mains, twin.parameters(), strict=True):
                main.grad += param.grad.to_local()
                param.grad = None
        assert are_equal([param.main_grad.to_local() for param in model.parameters()], [main.grad for main in mains])
        exact = exact_norm(model.parameters())
        for opt in (optimizer, reference):
            opt.step()
        norms.append((optimizer.grad_norm.item(), exact))
        optimizer.zero_grad()
        with torch.no_grad():
            for main, param in zip(mains, twin.parameters(), strict=True):
                param.to_local().copy_(main)
    return local(model.parameters()), local(twin.parameters()), norms


def against_one_process(mesh, plan):
    """fp64 with clipping, against the whole model on one process; how many collectives a norm takes."""
    model, reference = make(mesh, "fp64", plan), block(FP64)
    optimizer = wrap(model.parameters(), max_grad_norm=1.0)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        backward(model, mesh, plan, step)
        for dp_rank in range(2):
            (reference(batch(step, 0, dp_rank, FP64)).double().square().sum() / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for opt in (optimizer, reference_optimizer):
            opt.step()
            opt.zero_grad()
        norms.append((optimizer.grad_norm.item(), norm.item()))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return norms, [(p.full_tensor().detach(), q.detach()) for p, q in pairs], dict(optimizer._comm.counts)


KINDS = ("norm.weight", "pair.up.weight", "pair.down.bias", "head.weight")  # cut by both engines, or by FSDP2 alone


def skips(mesh, plan):
    """A nan in one rank's part of one parameter: who leaves the step out, and what stays as it was."""
    model = make(mesh, "fp32", plan)
    optimizer = wrap(model.parameters(), max_grad_norm=0.5)
    seen = []
    for name in KINDS:
        at(f"skipping for {name}")
        backward(model, mesh, plan, 0)
        if dist.get_rank() == 1:
            dict(model.named_parameters())[name].grad.to_local().view(-1)[0] = math.nan
        before = local(model.parameters())
        with recorded_warnings():
            optimizer.step()
        seen.append(optimizer.step_was_skipped and are_equal(before, local(model.parameters())))
        optimizer.zero_grad()
    return seen


def checkpoints(mesh, policy, folder):
    """Through each form of checkpoint into a new pair, which goes on in the same bits."""

    def fresh():
        model = make(mesh, policy, "sequence")
        return model, wrap(model.parameters())

    def go_on(model, optimizer, steps):
        for step in steps:
            backward(model, mesh, "sequence", step)
            optimizer.step()
            optimizer.zero_grad()
        return local(model.parameters())

    model, optimizer = fresh()
    go_on(model, optimizer, range(2))
    weights, own = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    saved = f"{folder}/{policy}"
    dcp.save({"model": weights, "optim": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=saved)
    by_torch, by_own = fresh(), fresh()
    state = {"model": by_torch[0].state_dict(), "optim": get_optimizer_state_dict(*by_torch)}
    dcp.load(state, checkpoint_id=saved)
    by_torch[0].load_state_dict(state["model"])
    set_optimizer_state_dict(*by_torch, state["optim"])
    by_own[0].load_state_dict(weights)
    by_own[1].load_state_dict(own)
    expected = go_on(model, optimizer, range(2, 4))
    return [are_equal(expected, go_on(*pair, range(2, 4))) for pair in (by_torch, by_own)]


def state_of_another_rank(mesh):
    """The part of the rank that has the same of tensor parallel, and other rows of FSDP2."""
    model = make(mesh, "fp32", "tensor")
    optimizer = wrap(model.pair.up.named_parameters("up"))
    parts = [None] * 4
    dist.all_gather_object(parts, optimizer.state_dict())
    with pytest.raises(ValueError, match=r"another part of the DTensor parameter up\.weight"):
        optimizer.load_state_dict(parts[dist.get_rank() ^ 2])
    return True


def tensor_under_fsdp2(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {"part": state_of_another_rank(mesh)}
    for plan in PLANS:
        at(f"training {plan}")
        for policy in ("fp32 parameters, bf16 compute", "fp32"):
            results[policy, plan] = beside_stock(
                functools.partial(make, mesh, policy, plan),
                lambda net, step, k, plan=plan: backward(net, mesh, plan, step, k),
            )
        results["bf16 parameters", plan] = by_hand(mesh, plan)
        results["fp64", plan] = against_one_process(mesh, plan)
        results["skips", plan] = skips(mesh, plan)
    for policy in ("bf16 parameters", "fp32"):
        at(f"saving {policy}")
        results["checkpoints", policy] = checkpoints(mesh, policy, folder)
    return results


@pytest.fixture(scope="module")
def under_fsdp2(tmp_path_factory):
    return run(tensor_under_fsdp2, 4, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("policy", ["fp32 parameters, bf16 compute", "fp32", "bf16 parameters"])
def test_tensor_parallel_under_fsdp2_is_stock_in_fp32_and_sums_bf16_in_fp32(under_fsdp2, policy, plan):
    for on_rank in under_fsdp2:
        check_bits_and_norms(*on_rank[policy, plan])


@pytest.mark.parametrize("plan", PLANS)
def test_tensor_parallel_under_fsdp2_clips_and_trains_as_one_process(under_fsdp2, plan):
    for norms, ends, counts in (on_rank["fp64", plan] for on_rank in under_fsdp2):
        check_against_one_process(norms, ends)
        assert counts == {"scalar": 2 * 3}  # each dimension once a step, whatever meshes there are; FSDP2 does the rest


@pytest.mark.parametrize("plan", PLANS)
def test_a_nan_on_one_rank_skips_on_all_whatever_is_replicated(under_fsdp2, plan):
    assert all(on_rank["skips", plan] == [True] * len(KINDS) for on_rank in under_fsdp2)


@pytest.mark.parametrize("policy", ["bf16 parameters", "fp32"])
def test_checkpoints_of_both_engines_go_on_in_the_same_bits(under_fsdp2, policy):
    assert all(on_rank["checkpoints", policy] == [True, True] for on_rank in under_fsdp2)


def test_the_state_of_another_rank_is_refused_where_both_engines_cut_one_dimension(under_fsdp2):
    assert all(on_rank["part"] for on_rank in under_fsdp2)


# -- several meshes in one wrapper


def on_two_meshes(mesh, flat, kind):
    """A pair on one mesh, the rest on another over all four ranks, each with rows of its own."""
    model = block(FP32)
    if kind == "experts":  # a stand-in: what tensor parallel splits here gets the rows of two ranks, as experts do
        styles = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
        parallelize_module(model.pair, mesh["tp"], dict(zip(("up", "down"), styles, strict=True)))
    fully_shard(model.pair, mesh=mesh["dp"] if kind == "experts" else mesh)
    return fully_shard(model, mesh=flat)


def skips_with_plain_parameters(mesh):
    """Tensor parallel alone: a nan, on one of its ranks, in the gradient of what it does not split."""
    model = parallelize_module(block(FP32), mesh["tp"], PLANS["tensor"])
    optimizer = wrap(model.parameters(), device_mesh=mesh["dp"], max_grad_norm=0.5)
    backward(model, mesh, "tensor", 0)
    if mesh["tp"].get_local_rank() == 1:
        model.head.weight.grad[0, 0] = math.nan
    with recorded_warnings():
        optimizer.step()
    return optimizer.step_was_skipped


def refusals(mesh, flat):
    """What each rank is told; nothing is changed by then."""
    said = {}

    def refuse(name, model, **settings):
        at(f"refusing {name}")
        with pytest.raises((ValueError, RuntimeError)) as caught:
            wrap(model.named_parameters(), **settings)
        said[name] = str(caught.value)
        assert not any(hasattr(param, "main_grad") for param in model.parameters())

    model = parallelize_module(block(FP32), mesh["tp"], PLANS["tensor"])
    for module in (model.norm, model.head):
        fully_shard(module, mesh=mesh["dp"])
    refuse("not all in FSDP2", model)
    model = parallelize_module(block(FP32), mesh["tp"], PLANS["tensor"])
    fully_shard(model.pair, mesh=mesh["dp"])
    model.head = nn.Linear(8, 10)  # plain, and of the shape of what both engines cut
    refuse("plain beside both", model)
    model = block(FP32)
    fully_shard(model.pair, mesh=mesh["tp"])
    refuse("fewer ranks", fully_shard(model, mesh=flat))
    model = parallelize_module(block(FP32), DeviceMesh("cpu", [0, 1]), PLANS["tensor"])
    refuse("half", model, device_mesh=mesh["dp"])
    model = parallelize_module(block(FP32), mesh["tp"], PLANS["tensor"])
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0), Shard(1)]))
    refuse("split over replicas", model, device_mesh=mesh["dp"])
    return said


def several_meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    results = {"refusals": refusals(mesh, flat), "skips": skips_with_plain_parameters(mesh)}
    for kind in ("hybrid", "experts"):
        at(f"training {kind}")
        results[kind] = beside_stock(
            functools.partial(on_two_meshes, mesh, flat, kind),
            lambda net, step, k: net(batch(step, k, rank, FP32)).square().sum().backward(),
        )
    return results


@functools.cache
def run_several_meshes():
    return run(several_meshes, 4)


@pytest.mark.parametrize("kind", ["hybrid", "experts"])
def test_fsdp2_on_two_meshes_over_the_same_ranks_has_one_norm(kind):
    for on_rank in run_several_meshes():
        check_bits_and_norms(*on_rank[kind])


def test_a_nan_in_a_plain_parameter_on_one_rank_of_tensor_parallel_skips_on_all():
    assert all(on_rank["skips"] for on_rank in run_several_meshes())


def test_what_cannot_go_together_is_refused_by_name_on_all_ranks():
    for rank, said in enumerate(on_rank["refusals"] for on_rank in run_several_meshes()):
        assert "fully_shard holds 3 of the trainable parameters and not pair.up.weight" in said["not all in FSDP2"]
        assert "fully_shard holds 4 of the trainable parameters and not norm.weight" in said["plain beside both"]
        found = [0, 1] if rank < 2 else [2, 3]
        assert f"pair.up.weight on ranks {found} and" in said["fewer ranks"]
        assert "on ranks [0, 1, 2, 3]" in said["fewer ranks"]
        assert "mesh['replicate', 'shard']" in said["fewer ranks"]
        assert "parameter pair.up.weight is a DTensor over ranks [0, 1], and rank" in said["half"]
        assert "parallelise over mesh['tp'], make the optimizer, and wrap it" in said["half"]
        assert "holds another part of head.weight" in said["split over replicas"]
        assert "device_mesh=mesh['dp']" in said["split over replicas"]
