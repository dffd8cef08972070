"""Models, optimizers and layouts whose state is saved and loaded, and what one process saves of each."""

import math
import pickle

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedopt import FusedMainGradOptimizer

LAYOUTS = [("none", "auto"), ("optimizer", "element"), ("optimizer", "parameter"), ("gradients", "element")]
LAYOUTS += [("gradients", "parameter")]


class Net(nn.Module):
    """Parameters of every kind: 4-D channels_last, tied, matrix, vector, 0-d, empty, frozen; 10k elements in all."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(12, 20, 3, dtype=dtype).to(memory_format=torch.channels_last)
        self.embedding = nn.Embedding(40, 50, dtype=dtype)
        self.hidden = nn.Linear(50, 70, dtype=dtype)
        self.head = nn.Linear(50, 40, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(7, dtype=dtype), requires_grad=False)
        self.idle = nn.Parameter(torch.randn(1030, dtype=dtype))  # never gets a gradient

    def loss(self, number, names=None):
        """Return a loss whose gradients are multiples of 12, whatever the parameters are, on every rank the same."""
        generator = torch.Generator().manual_seed(number)
        total = torch.zeros(())
        for name, param in self.named_parameters():
            target = 12.0 * torch.randint(-2, 3, param.shape, generator=generator)
            if param.requires_grad and name != "idle" and (names is None or name in names):
                total = total + (param.float() * target).sum()
                if name == "embedding.weight":  # tied: a second use
                    total = total + (self.head.weight.float() * target).sum()
        return total


def adamw(net):
    return torch.optim.AdamW(net.named_parameters(), lr=0.125, weight_decay=0.25)


def sgd(net):
    return torch.optim.SGD(net.named_parameters(), lr=0.0625, momentum=0.5)


def muon_and_adamw(net):
    named = [item for item in net.named_parameters() if item[1].ndim == 2 and item[1].numel()]
    others = [item for item in net.named_parameters() if not (item[1].ndim == 2 and item[1].numel())]
    return [torch.optim.Muon(named, lr=0.125), torch.optim.AdamW(others, lr=0.125)]


KINDS = {
    "AdamW bf16": (adamw, torch.bfloat16),
    "AdamW fp32": (adamw, torch.float32),
    "SGD momentum bf16": (sgd, torch.bfloat16),
    "Muon + AdamW bf16": (muon_and_adamw, torch.bfloat16),
}


def start(kind, layout, seed=0, **settings):
    make, dtype = KINDS[kind]
    net = Net(dtype, seed)
    shard, shard_by = layout
    if "Muon" in kind and shard_by == "element":
        shard_by = "auto"
    settings = {"bucket_mib": 1, "shard": shard, **settings}
    if shard != "none":
        settings["shard_by"] = shard_by
    return net, FusedMainGradOptimizer(make(net), **settings)


def train(net, optimizer, numbers, names=None):
    for number in numbers:
        net.loss(number, names).backward()
        optimizer.step()
        optimizer.zero_grad()


def frozen(value):
    """Return ``value`` with every tensor turned into its dtype, shape and bytes: equal means bit-equal."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return (str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(map(frozen, value)) if type(value) in (list, tuple) else value


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in values for tensor in tensors_in(item)]


def bits(net, optimizer):
    return frozen([net.state_dict(), optimizer.state_dict()["state"]])


def whole(optimizer, to=0):
    """Return the whole state dict, on every rank."""
    optimizer.consolidate_state_dict(to=to)
    found = optimizer._comm.objects(pickle.dumps(optimizer.state_dict()))
    return pickle.loads(found[to])


def reference(rank, folder):
    for kind in KINDS:
        net, optimizer = start(kind, ("none", "auto"))
        train(net, optimizer, range(2))
        saved = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / f"{kind}.2.pt")
        for tensor in tensors_in(saved):
            assert torch.isfinite(tensor).all()
        train(net, optimizer, range(2, 5))
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"{kind}.5.pt")


def read(folder, kind, num_steps):
    return torch.load(folder / f"{kind}.{num_steps}.pt", weights_only=True)


def assert_same(found, expected):
    assert frozen(found["state"]) == frozen(expected["state"])
    assert frozen(found["param_groups"]) == frozen(expected["param_groups"])
    assert found["fusedopt"] == expected["fusedopt"]


class CountingReader(dcp.FileSystemReader):
    """Counts the elements that are asked of it."""

    def read_data(self, plan, planner):
        self.asked = {}
        for item in plan.items:
            fqn = item.dest_index.fqn
            self.asked[fqn] = self.asked.get(fqn, 0) + math.prod(item.lengths)
        return super().read_data(plan, planner)


ROUTES = {
    "optimizer itself": None,
    "get and set": {},
    "flattened": {"flatten_optimizer_state_dict": True},
    "offloaded": {"cpu_offload": True},
}


def save_checkpoint(net, optimizer, folder, route):
    found = optimizer
    if ROUTES[route] is not None:
        found = get_optimizer_state_dict(net, optimizer, options=StateDictOptions(**ROUTES[route]))
    dcp.save({"optim": found}, checkpoint_id=folder)


def load_checkpoint(net, optimizer, folder, route):
    reader = CountingReader(folder)
    if ROUTES[route] is None:
        dcp.load({"optim": optimizer}, storage_reader=reader)
        return reader.asked
    options = StateDictOptions(**ROUTES[route])
    found = {"optim": get_optimizer_state_dict(net, optimizer, options=options)}
    dcp.load(found, storage_reader=reader)
    set_optimizer_state_dict(net, optimizer, found["optim"], options=options)
    return reader.asked
