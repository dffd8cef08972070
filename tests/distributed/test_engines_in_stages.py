"""FSDP2 and tensor parallel inside pipeline stages, and both: against torch's own, a loop by hand, and one process."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.distributed.launcher import at, recorded_warnings, run
from tests.distributed.test_combined_engines import (
    BF16,
    FP64,
    POLICIES,
    SPLIT,
    Pair,
    are_equal,
    check_against_one_process,
    check_bits_and_norms,
    exact_norm,
    local,
    wrap,
)

K = 4  # micro-batches of one schedule step

SCHEDULES = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)


def loss_fn(output, target):
    return (output - target).double().square().sum()


def batch(step, replica, dtype):
    generator = torch.Generator().manual_seed(10 * step + replica)
    return [torch.randn(2 * K, 8, generator=generator).to(dtype) for _ in range(2)]


def pipeline(kind, pp, parts, **settings):
    """Return the schedule over this rank's ``parts``, its stages, and a function that feeds it one step."""
    indices = range(pp.get_local_rank(), 2 * len(parts), 2)
    stages = [
        PipelineStage(part, index, 2 * len(parts), torch.device("cpu"), group=pp.get_group())
        for index, part in zip(indices, parts, strict=True)
    ]
    schedule = kind(stages[0] if len(parts) == 1 else stages, K, loss_fn=loss_fn, **settings)

    def feed(step, replica, dtype):
        x, target = batch(step, replica, dtype)
        args = (x,) if any(stage.is_first for stage in stages) else ()
        schedule.step(*args, target=target if any(stage.is_last for stage in stages) else None)

    return feed


def sharded_parts(kind, pp, dp, policy):
    dtype, options = POLICIES[policy]
    torch.manual_seed(0)
    is_one_each = kind in (ScheduleGPipe, Schedule1F1B)
    whole = [Pair(8).to(dtype) for _ in range(2 if is_one_each else 4)]
    parts = whole[pp.get_local_rank() :: 2]
    for part in parts:
        fully_shard(part, mesh=dp, mp_policy=MixedPrecisionPolicy(**options))
    return nn.ModuleList(parts)


def fsdp2_in_stages(mesh, kind, policy):
    """Ours beside torch's own, or for bf16 beside a loop by hand; a nan in one part at the end."""
    pp, dp = mesh["pp"], mesh["dp"]
    dtype = POLICIES[policy][0]
    ours, twins = (sharded_parts(kind, pp, dp, policy) for _ in range(2))
    feeds = [pipeline(kind, pp, ours), pipeline(kind, pp, twins, scale_grads=dtype is not BF16)]
    optimizer = wrap(ours.parameters(), device_mesh=dp, norm_group=pp.get_group(), max_grad_norm=1e9)
    mains = [nn.Parameter(part.float()) for part in local(twins.parameters())] if dtype is BF16 else []
    pairs = list(zip(mains, twins.parameters(), strict=True)) if mains else []
    stock = torch.optim.AdamW(mains or twins.parameters(), lr=1e-2, foreach=False)
    norms = []
    for step in range(3):
        for feed in feeds:
            feed(step, dp.get_local_rank(), dtype)
        for main, twin in pairs:
            main.grad, twin.grad = twin.grad.to_local().float() / K, None
        assert all(param.grad is param.main_grad for param in ours.parameters())
        expected = [main.grad for main in mains] if mains else [p.grad.to_local() for p in twins.parameters()]
        assert are_equal([param.grad.to_local() for param in ours.parameters()], expected)
        square = torch.tensor(exact_norm(ours.parameters()), dtype=FP64).square()
        dist.all_reduce(square, group=pp.get_group())
        for opt in (optimizer, stock):
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            for main, twin in pairs:
                twin.to_local().copy_(main)
        norms.append((optimizer.grad_norm.item(), square.sqrt().item()))
    ends = local(ours.parameters()), local(twins.parameters())
    feeds[0](3, dp.get_local_rank(), dtype)
    if dist.get_rank() == 1:
        next(ours.parameters()).grad.to_local().view(-1)[0] = math.nan
    with recorded_warnings():
        optimizer.step()
    return *ends, norms, optimizer.step_was_skipped and are_equal(local(ours.parameters()), ends[0])


def tensor_in_stages(mesh, shard):
    """fp64 with clipping, against the whole model on one process. With replicas in the mesh, FSDP2 over them, too."""
    pp, dp = mesh["pp"], mesh["dp"]
    torch.manual_seed(0)
    whole = nn.Sequential(*(Pair(8).double() for _ in range(2)))
    reference = copy.deepcopy(whole)
    part = parallelize_module(whole[pp.get_local_rank()], mesh["tp"], SPLIT)
    if dp.size() > 1:
        fully_shard(part, mesh=dp)
    feed = pipeline(Schedule1F1B, pp, [part])
    optimizer = wrap(part.named_parameters(), device_mesh=dp, norm_group=pp.get_group(), shard=shard, max_grad_norm=1.0)
    reference_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    norms = []
    for step in range(3):
        feed(step, dp.get_local_rank(), FP64)
        for replica in range(dp.size()):
            x, target = batch(step, replica, FP64)
            (loss_fn(reference(x), target) / (K * dp.size())).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        for opt in (optimizer, reference_optimizer):
            opt.step()
            opt.zero_grad()
        norms.append((optimizer.grad_norm.item(), norm.item()))
    expected = reference[pp.get_local_rank()].parameters()
    whole_of = [p.full_tensor() if isinstance(p, DTensor) else p for p in part.parameters()]
    return norms, [(p.detach(), q.detach()) for p, q in zip(whole_of, expected, strict=True)]


def all_three(rank):
    return tensor_in_stages(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "tp")), "none")


def names_the_nan(mesh):
    """What each stage says where the gradient of the first is nan."""
    part = nn.Linear(2, 2)
    group = mesh["pp"].get_group()
    optimizer = wrap(part.named_parameters(), device_mesh=mesh["dp"], norm_group=group, nonfinite="raise")
    part(torch.ones(1, 2)).sum().backward()
    if mesh["pp"].get_local_rank() == 0:
        part.bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError) as caught:
        optimizer.step()
    return mesh["pp"].get_local_rank(), str(caught.value)


def in_stages(rank):
    dist.new_group([0])  # of which torch's names of groups that only their ranks make would not be equal any more
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    results = {}
    for kind in SCHEDULES:
        for policy in ("fp32", "bf16 parameters"):
            at(f"training {kind.__name__} {policy}")
            results[kind, policy] = fsdp2_in_stages(mesh, kind, policy)
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
    for shard in ("none", "optimizer", "gradients"):
        at(f"training tensor parallel stages {shard}")
        results[shard] = tensor_in_stages(mesh, shard)
    results["raises"] = names_the_nan(mesh)
    return results


@functools.cache
def run_in_stages():
    return run(in_stages, 4)


@pytest.mark.parametrize("policy", ["fp32", "bf16 parameters"])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_fsdp2_inside_stages_is_stock_in_fp32_and_updates_bf16_in_fp32(kind, policy):
    for ours, others, norms, was_skipped in (on_rank[kind, policy] for on_rank in run_in_stages()):
        check_bits_and_norms(ours, others, norms)
        assert was_skipped


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_tensor_parallel_inside_stages_trains_as_one_process(shard):
    for on_rank in run_in_stages():
        check_against_one_process(*on_rank[shard])


def test_tensor_parallel_under_fsdp2_inside_stages_trains_as_one_process():
    for norms, ends in run(all_three, 8):
        check_against_one_process(norms, ends)


def test_a_nan_of_another_stage_raises_here_too_and_says_who_names_it():
    for stage, said in (on_rank["raises"] for on_rank in run_in_stages()):
        expected = "in 1 parameter(s): bias" if stage == 0 else "in parts that other ranks hold, which name them"
        assert expected in said
