"""torch.distributed.checkpoint of DTensor parameters that data-parallel ranks split once more, bit for bit."""

import collections
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fusedopt
from fusedopt.sharding.checkpoint_parts import CheckpointPart
from tests.deep import in_turn
from tests.distributed.launcher import run

BF16, FP32 = torch.bfloat16, torch.float32
PLAN = {
    "words": RowwiseParallel(),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}
LAYOUTS = [("none", "auto"), ("optimizer", "element"), ("gradients", "parameter"), ("gradients", "element")]


class Net(nn.Module):
    """Sizes that two ranks split unevenly, or not at all: one row for two ranks, a norm and a head on every rank."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(30, dtype=dtype)
        self.words = nn.Embedding(123, 30, dtype=dtype)  # large enough that a shard cuts through each rank's part
        self.up = nn.Linear(30, 37, dtype=dtype)
        self.down = nn.Linear(37, 30, dtype=dtype)
        self.gate = nn.Parameter(torch.randn(1, 9, dtype=dtype))
        self.head = nn.Linear(30, 3, dtype=dtype)


def region(param):
    """Return what of the whole lies on this rank, as slices."""
    found = fusedopt.sharding.dtensor.region_of(param)
    if found is None:
        return tuple(slice(None) for _ in param.shape)
    return tuple(slice(o, o + n) for o, n in zip(found[1], param.to_local().shape, strict=True))


def train(net, optimizer, numbers):
    """Gradients are whole multiples of 4, of which every rank sees its part: the same sums in every layout."""
    for number in numbers:
        generator = torch.Generator().manual_seed(number)
        total = torch.zeros(())
        for param in net.parameters():
            target = 4.0 * torch.randint(-2, 3, param.shape, generator=generator)
            local = param.to_local() if isinstance(param, DTensor) else param
            total = total + (local.float() * target[region(param)]).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()


def start(layout, dtype, tensor_parallel, seed=0):
    net = Net(dtype, seed)
    mesh, dp = None, None
    if dist.is_initialized():
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size() // tensor_parallel, tensor_parallel), mesh_dim_names=("dp", "tp")
        )
        dp = mesh["dp"]
    if tensor_parallel > 1:
        parallelize_module(net, mesh["tp"], PLAN)
        net.gate = nn.Parameter(distribute_tensor(net.gate.detach(), mesh["tp"], [Shard(0)]))
    shard, shard_by = layout
    settings = {} if shard == "none" else {"shard": shard, "shard_by": shard_by}
    inner = torch.optim.AdamW(net.named_parameters(), lr=0.125, weight_decay=0.25)
    return net, fusedopt.FusedMainGradOptimizer(inner, device_mesh=dp, bucket_mib=1, **settings)


def whole(net):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in net.named_parameters()}


def assert_has(net, optimizer, weights, state):
    """Check that weights, and this rank's part of the state, have the bits of those of one process."""
    for name, weight in whole(net).items():
        assert weight.isfinite().all()
        assert torch.equal(weight, weights[name]), name
    num_checked = 0
    names = [name for name, _ in net.named_parameters()]
    for entry in optimizer._buffers.entries:
        expected = state[names.index(entry.slot.name)]
        own = {**optimizer.state.get(entry.param, {}), "main_param": entry.main_param}
        for key, value in own.items() if entry.part is not None else ():
            if key not in expected:
                assert key == "main_param"
                continue
            wanted = expected[key]
            if wanted.ndim:
                wanted = wanted[region(entry.param)].reshape(-1)[entry.part.start : entry.part.end]
            assert torch.equal(value.detach().reshape(-1), wanted.reshape(-1)), (entry.slot.name, key)
            num_checked += value.numel()
    return num_checked


def reference(dtype, folder):
    """One process, without ranks."""
    net, optimizer = start(("none", "auto"), dtype, 1)
    found = {}
    for end in (2, 4):
        train(net, optimizer, range(end - 2, end))
        found[end] = {"weights": whole(net), "state": optimizer.state_dict()["state"]}
        torch.save(found[end], folder / f"{dtype}.{end}.pt")


def save(rank, cases, tensor_parallel, folder):
    """Return how many slices of state begin inside the whole, and how many at its first element."""
    pieces = []
    for number, layout, dtype in cases:
        net, optimizer = start(layout, dtype, tensor_parallel)
        train(net, optimizer, range(2))
        found = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
        pieces += [value for of in found["optim"]["state"].values() for value in of.values()]
        dcp.save(found, checkpoint_id=folder / f"{number}")
    pieces = [piece for piece in pieces if isinstance(piece, CheckpointPart) and piece._part.numel()]
    return [sum(any(piece._begin) for piece in pieces), sum(not any(piece._begin) for piece in pieces)]


def load(rank, cases, tensor_parallel, folder, layout):
    num_checked = 0
    for number, _, dtype in cases:
        then, after = (torch.load(folder / f"{dtype}.{end}.pt", weights_only=True) for end in (2, 4))
        net, optimizer = start(layout, dtype, tensor_parallel, seed=7)
        found = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
        dcp.load(found, checkpoint_id=folder / f"{number}")
        set_optimizer_state_dict(net, optimizer, found["optim"])
        net.load_state_dict(found["model"])
        num_checked += assert_has(net, optimizer, **then)
        train(net, optimizer, range(2, 4))
        assert_has(net, optimizer, **after)
    return num_checked


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of 2 x 2 ranks in every layout, beside what one process has at the same steps and later."""
    folder = tmp_path_factory.mktemp("saved")
    for dtype in (BF16, FP32):
        reference(dtype, folder)
    cases = [(number, layout, BF16 if number != 2 else FP32) for number, layout in enumerate(LAYOUTS)]
    inside, at_first = map(sum, zip(*run(save, 4, cases, 2, folder, reuses=True), strict=True))
    assert inside > 0
    assert at_first > 0
    return folder, cases


LOADERS = [
    (1, 1, LAYOUTS[0]),
    (2, 2, LAYOUTS[0]),
    (3, 1, LAYOUTS[3]),
    (4, 2, LAYOUTS[1]),
    (4, 2, LAYOUTS[3]),
    (4, 4, LAYOUTS[0]),
]


@pytest.mark.parametrize(
    ("num_ranks", "tensor_parallel", "layout"),
    LOADERS,
    ids=["one rank", "TP 2", "3 gradients", "TP 2 optimizer", "TP 2 gradients", "TP 4"],
)
def test_any_layout_loads_what_two_by_two_ranks_saved_and_goes_on(saved, num_ranks, tensor_parallel, layout):
    folder, cases = saved  # what two layouts saved, or in a deep run all four
    both = in_turn([cases[::2], cases[1::2]], LOADERS.index((num_ranks, tensor_parallel, layout)))
    cases = [case for half in both for case in half]
    assert all(count > 0 for count in run(load, num_ranks, cases, tensor_parallel, folder, layout, reuses=True)[:1])


def from_plain(rank, folder):
    """Whole state, of one process or a stock optimizer, is cut twice: by the mesh, and by the shard."""
    for layout, dtype in [(LAYOUTS[1], FP32), (LAYOUTS[3], FP32), (LAYOUTS[0], FP32)]:
        then, after = (torch.load(folder / f"{dtype}.{end}.pt", weights_only=True) for end in (2, 4))
        for route in ("load_state_dict", "broadcast"):
            net, optimizer = start(layout, dtype, 2, seed=7)
            with torch.no_grad():
                for name, param in net.named_parameters():
                    mine = then["weights"][name][region(param)]
                    (param.to_local() if isinstance(param, DTensor) else param).copy_(mine)
            numbers = [{"lr": 0.125, "weight_decay": 0.25, "params": list(range(len(then["state"])))}]
            groups = [{**optimizer.param_groups[0], **numbers[0]}]
            if route == "load_state_dict":
                optimizer.load_state_dict({"state": then["state"], "param_groups": groups})
            else:
                names = [name for name, _ in net.named_parameters()]
                by_name = {
                    "state": {names[n]: value for n, value in then["state"].items()},
                    "param_groups": [{**groups[0], "params": names}],
                }
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
                set_optimizer_state_dict(net, optimizer, by_name if rank == 0 else {}, options=options)
            assert_has(net, optimizer, **then)
            train(net, optimizer, range(2, 4))
            assert_has(net, optimizer, **after)


def test_whole_state_of_one_process_is_cut_for_every_rank(saved):
    run(from_plain, 4, saved[0], reuses=True)


def onto_a_rank_without_elements(rank):
    """A model so small that the first rank updates all of it; one rank has its whole state, of a stock optimizer."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    stock = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 4)).sum().backward()
    stock.step()
    net.zero_grad()
    state = {name: stock.state[param] for name, param in net.named_parameters()}
    groups = [{**stock.param_groups[0], "params": list(state)}]
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(net.named_parameters()), shard="optimizer")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    whole_state = {"state": state, "param_groups": groups} if rank == 0 else {}
    set_optimizer_state_dict(net, optimizer, whole_state, options=options)
    for name, param in net.named_parameters() if rank == 0 else ():
        assert state[name]["exp_avg"].isfinite().all()
        assert torch.equal(optimizer.state[param]["exp_avg"], state[name]["exp_avg"])
    return sum(entry.part is not None for entry in optimizer._buffers.entries)


def test_whole_state_is_broadcast_also_to_a_rank_that_has_no_element():
    assert run(onto_a_rank_without_elements, 2, reuses=True) == [2, 0]


Pair = collections.namedtuple("Pair", "count total")
SEEN = {
    "list": lambda tensor: [tensor, 0],
    "OrderedDict": lambda tensor: collections.OrderedDict(a=[tensor]),
}
UNSEEN = {
    "tuple": lambda tensor: (tensor, 0),
    "tuple in a list": lambda tensor: [0, ([tensor],)],
    "deque": lambda tensor: collections.deque([tensor], 2),
    "named tuple": lambda tensor: Pair(0, tensor),
}


class Keeps(torch.optim.SGD):
    """Keeps the last gradient in a container."""

    def __init__(self, params, make):
        super().__init__(params, lr=0.1)
        self.make = make

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["held"] = self.make(param.grad.clone())


def kept_in_containers(rank, folder):
    """One rank of two has rows 0 and 1 of a parameter, the other one rows 2 and 3."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    held = []

    def start(make, scale):
        net = nn.Module()
        net.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh["tp"], [Shard(0)]))
        optimizer = fusedopt.FusedMainGradOptimizer(Keeps(net.named_parameters(), make), device_mesh=mesh["dp"])
        (net.weight.to_local() * scale).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return net, optimizer

    for number, make in enumerate(SEEN.values()):
        net, optimizer = start(make, rank + 1.0)
        dcp.save(get_optimizer_state_dict(net, optimizer), checkpoint_id=folder / str(number))
        net, optimizer = start(make, 7.0)
        template = get_optimizer_state_dict(net, optimizer)
        dcp.load(template, checkpoint_id=folder / str(number))
        set_optimizer_state_dict(net, optimizer, template)
        held.append(copy.deepcopy(optimizer.state[net.weight]["held"]))
    for make in UNSEEN.values():
        net, optimizer = start(make, rank + 1.0)
        with pytest.raises(ValueError, match=r"parameter .*weight, 'held' holds a .*cannot put parts of it together"):
            get_optimizer_state_dict(net, optimizer)
    plain = nn.Linear(128, 128, bias=False)
    inner = Keeps(plain.named_parameters(), UNSEEN["tuple"])
    optimizer = fusedopt.FusedMainGradOptimizer(inner, shard="optimizer", shard_by="element")
    plain(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    assert optimizer.state[plain.weight]["held"][0].shape == (128 * 128 // 2,)
    with pytest.raises(ValueError, match=r"parameter weight, 'held' holds a tuple of tensors.*parts of it together"):
        get_optimizer_state_dict(plain, optimizer)
    return held


def test_parts_in_lists_and_dicts_are_put_together_and_refused_where_torch_would_load_one_ranks_on_all(tmp_path):
    for rank, held in enumerate(run(kept_in_containers, 2, tmp_path, reuses=True)):
        part = torch.full((2, 3), rank + 1.0)
        assert [type(value) for value in held] == [list, collections.OrderedDict]
        assert torch.equal(held[0][0], part)
        assert torch.equal(held[1]["a"][0], part)
