"""Pieces through torch.distributed.checkpoint: saved by W ranks, loaded by any other number, bit-equal."""

import contextlib
import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedopt.sharding.checkpoint_parts import checkpoint_wants, extract, from_checkpoint, to_checkpoint
from fusedopt.sharding.layout import Span
from tests.distributed.launcher import recorded_warnings, run

SHAPED = ("main_param", "exp_avg")


class Net(nn.Module):
    """Parameters of every kind: 4-D channels_last, matrix, transposed matrix, vector, 0-d, empty, frozen."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Parameter(torch.zeros(4, 3, 5, 2).to(memory_format=torch.channels_last))
        self.matrix = nn.Parameter(torch.zeros(7, 5, dtype=torch.bfloat16))
        self.transposed = nn.Parameter(torch.zeros(3, 8).t())
        self.bias = nn.Parameter(torch.zeros(6))
        self.scale = nn.Parameter(torch.zeros(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        for param in (self.conv, self.matrix, self.transposed, self.bias, self.scale, self.empty):
            param.grad_dtype = torch.float32


def truth(param, number, key):
    """Return the value that all ranks together must save, for the whole parameter."""
    generator = torch.Generator().manual_seed(1000 * number + SHAPED.index(key))
    return torch.randn(param.shape, generator=generator)


def span_of(param, number, rank, world_size, shard_by):
    """Return this rank's elements of a parameter: an uneven cut, or all of it on one rank."""
    numel = param.numel()
    if shard_by == "parameter":
        return Span(0, numel) if number % world_size == rank else None
    if numel == 0:
        return Span(0, 0)  # on every rank: somebody has to save its step count
    share = -(-numel // world_size) + (1 if world_size > 1 else 0)
    start, end = min(rank * share, numel), min((rank + 1) * share, numel)
    return Span(start, end) if start < end else None


class Sharded(torch.optim.Optimizer):
    """What a sharded optimizer keeps and shows, without one: pieces, replicated counts, nothing where it owns none."""

    def __init__(self, model, rank, world_size, shard_by, *, is_filled):
        super().__init__(model.parameters(), {"lr": 0.1, "betas": (0.9, 0.999)})
        self.spans = {}
        for number, param in enumerate(self.param_groups[0]["params"]):
            span = span_of(param, number, rank, world_size, shard_by) if param.requires_grad else None
            self.spans[number] = span
            self.state[param] = {}
            if span is not None:
                for key in SHAPED:
                    piece = extract(truth(param, number, key), param.stride(), span)
                    if shard_by == "parameter":
                        piece = truth(param, number, key)
                    self.state[param][key] = piece if is_filled else torch.full_like(piece, -1.0)
                self.state[param]["step"] = torch.tensor(7.0 if is_filled else 0.0)

    def state_dict(self):
        wants = checkpoint_wants()
        state = {}
        for number, param in enumerate(self.param_groups[0]["params"]):
            state[number] = dict(self.state[param])
            if wants is None or not param.requires_grad:
                continue
            for key in SHAPED:
                piece = self.state[param].get(key, torch.empty(0))
                state[number][key] = to_checkpoint(piece, param.shape, param.stride(), self.spans[number])
        group = {**self.param_groups[0], "params": list(range(len(self.spans)))}
        return {"state": state, "param_groups": [group]}

    def load_state_dict(self, state_dict):
        group = state_dict["param_groups"][0]
        self.param_groups[0]["lr"] = group["lr"]
        for number, name in enumerate(group["params"]):
            param, loaded = self.param_groups[0]["params"][number], state_dict["state"].get(name, {})
            for key, value in self.state[param].items():
                if key in SHAPED:
                    piece = from_checkpoint(loaded[key], param.shape, param.stride(), self.spans[number])
                    value.copy_(piece.view(value.shape))
                else:
                    value.copy_(loaded[key])

    def step(self, closure=None):
        raise RuntimeError("checkpointing made a step")


def check(optimizer, rank, world_size, shard_by):
    expected = Sharded(Net(), rank, world_size, shard_by, is_filled=True)
    for number, (found, wanted) in enumerate(zip(optimizer.state.values(), expected.state.values(), strict=True)):
        assert found.keys() == wanted.keys(), number
        for key in wanted:
            assert torch.equal(found[key], wanted[key]), (number, key)


class CountingReader(dcp.FileSystemReader):
    """Counts what is asked of it: elements, and the saved blocks they lie in."""

    def read_data(self, plan, planner):
        self.asked = {}
        for item in plan.items:
            fqn = item.dest_index.fqn
            self.asked[fqn] = self.asked.get(fqn, 0) + math.prod(item.lengths)
        return super().read_data(plan, planner)


def save(rank, world_size, shard_by, folder, route, options):
    model = Net()
    optimizer = Sharded(model, rank, world_size, shard_by, is_filled=True)
    if route == "optimizer itself":
        dcp.save({"optim": optimizer}, checkpoint_id=folder)
    else:
        found = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))
        dcp.save({"optim": found}, checkpoint_id=folder)


def load(rank, world_size, shard_by, folder, route, options):
    model = Net()
    optimizer = Sharded(model, rank, world_size, shard_by, is_filled=False)
    reader = CountingReader(folder)
    if route == "optimizer itself":
        dcp.load({"optim": optimizer}, storage_reader=reader)
    else:
        found = {"optim": get_optimizer_state_dict(model, optimizer, options=StateDictOptions(**options))}
        dcp.load(found, storage_reader=reader)
        set_optimizer_state_dict(model, optimizer, found["optim"], options=StateDictOptions(**options))
    check(optimizer, rank, world_size, shard_by)
    asked = sum(numel for fqn, numel in reader.asked.items() if fqn.endswith(SHAPED))
    assert asked == sum(len(SHAPED) * span.numel for span in optimizer.spans.values() if span is not None)


PAIRS = [
    ((1, "element"), (3, "element")),
    ((2, "element"), (1, "element")),
    ((2, "element"), (3, "parameter")),
    ((3, "element"), (2, "element")),
    ((3, "parameter"), (2, "element")),
    ((2, "parameter"), (1, "parameter")),
]


@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=str)
def test_saved_by_some_ranks_loads_on_others(saved, loaded, tmp_path):
    run(save, saved[0], *saved, tmp_path, "get and set", {})
    run(load, loaded[0], *loaded, tmp_path, "get and set", {})


@pytest.mark.parametrize(
    ("route", "options"),
    [
        ("optimizer itself", {}),
        ("get and set", {"cpu_offload": True}),
        ("get and set", {"flatten_optimizer_state_dict": True}),
    ],
    ids=str,
)
def test_every_route_of_torch_takes_pieces(route, options, tmp_path):
    run(save, 3, 3, "element", tmp_path, route, options)
    run(load, 2, 2, "parameter", tmp_path, route, options)


def save_stock(rank, folder):
    """Save what a stock optimizer on one process shows: whole, plain tensors."""
    model = Net()
    state = {
        name: {**{key: truth(param, number, key) for key in SHAPED}, "step": torch.tensor(7.0)}
        for number, (name, param) in enumerate(model.named_parameters())
        if param.requires_grad
    }
    group = {"lr": 0.1, "betas": (0.9, 0.999), "params": [name for name, _ in model.named_parameters()]}
    dcp.save({"optim": {"state": state, "param_groups": [group]}}, checkpoint_id=folder)


def load_stock(rank, folder):
    model = Net()
    for number, (name, param) in enumerate(model.named_parameters()):
        for key in SHAPED if param.requires_grad else ():
            found = {"optim": {"state": {name: {key: torch.full(param.shape, -1.0)}}}}
            dcp.load(found, checkpoint_id=folder)
            assert torch.equal(found["optim"]["state"][name][key], truth(param, number, key))


def test_a_stock_checkpoint_loads_into_pieces_and_pieces_into_a_stock_optimizer(tmp_path):
    run(save_stock, 1, tmp_path / "stock")
    run(load, 2, 2, "element", tmp_path / "stock", "get and set", {})
    run(save, 3, 3, "element", tmp_path / "pieces", "get and set", {})
    run(load_stock, 1, tmp_path / "pieces")


def load_broadcast(rank, world_size):
    model = Net()
    optimizer = Sharded(model, rank, world_size, "element", is_filled=False)
    names = [name for name, _ in model.named_parameters()]
    whole = Sharded(model, 0, 1, "parameter", is_filled=True).state_dict()
    whole["state"] = {names[number]: values for number, values in whole["state"].items()}
    whole["param_groups"][0]["params"] = names
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, whole if rank == 0 else {}, options=options)
    check(optimizer, rank, world_size, "element")


def test_a_whole_state_on_one_rank_is_broadcast_into_pieces():
    run(load_broadcast, 2, 2)


def save_in_background(rank, world_size, folder):
    model = Net()
    optimizer = Sharded(model, rank, world_size, "element", is_filled=True)
    state = get_optimizer_state_dict(model, optimizer)
    with recorded_warnings():
        future = dcp.async_save({"optim": state}, checkpoint_id=folder)
        for values in optimizer.state.values():  # training goes on while the copy is written
            for key in values:
                values[key].fill_(-2.0)
        future.result()


def test_async_save_writes_what_was_there_when_it_was_called(tmp_path):
    run(save_in_background, 2, 2, tmp_path)
    run(load, 3, 3, "element", tmp_path, "get and set", {})


class BytesWritten(dcp.FileSystemWriter):
    def finish(self, metadata, results):
        self.num_bytes = sum(result.size_in_bytes for per_rank in results for result in per_rank)
        super().finish(metadata, results)


def save_large(rank, world_size, folder):
    """Save pieces that are views of one large bucket, as the real ones are."""
    bucket = torch.zeros(1_000_000)
    span = Span(rank * 5001, (rank + 1) * 5001)
    writer = BytesWritten(folder)
    sizes = (5001 * world_size // 3, 3)
    dcp.save({"x": to_checkpoint(bucket[: span.numel], sizes, (3, 1), span)}, storage_writer=writer)
    return writer.num_bytes if rank == 0 else None


def test_a_piece_writes_its_own_bytes_not_its_buckets(tmp_path):
    num_bytes, _ = run(save_large, 2, 2, tmp_path)
    assert 4 * 2 * 5001 < num_bytes < 4 * 2 * 5001 + 20_000


class DeadlyFileSystem(FileSystem):
    """Kills its process at one operation."""

    moment = ""

    def reach(self, moment):
        if moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        kind = "metadata" if ".metadata" in str(path) else "data"
        with super().create_stream(path, mode) as stream:
            self.reach(f"{kind} opened")
            yield stream
            self.reach(f"{kind} written, not closed")

    def rename(self, path, new_path):
        self.reach("before rename")
        super().rename(path, new_path)
        self.reach("after rename")


def save_and_die(rank, world_size, folder, victim, moment):
    optimizer = Sharded(Net(), rank, world_size, "element", is_filled=True)
    writer = dcp.FileSystemWriter(folder)
    writer.fs = DeadlyFileSystem()
    writer.fs.moment = moment if rank == victim else ""
    dcp.save({"optim": optimizer}, storage_writer=writer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("victim", "moment", "is_saved"),
    [
        (1, "data opened", False),
        (1, "data written, not closed", False),
        (0, "metadata opened", False),
        (0, "metadata written, not closed", False),
        (0, "before rename", False),
        (0, "after rename", True),
    ],
)
def test_a_save_killed_at_any_moment_is_whole_or_refused(victim, moment, is_saved, tmp_path):
    dcp.save({"optim": Sharded(Net(), 0, 1, "element", is_filled=True)}, checkpoint_id=tmp_path / "previous")
    with pytest.raises(RuntimeError, match=rf"rank {victim} died|[Cc]onnection|CheckpointException"):
        run(save_and_die, 2, 2, tmp_path / "new", victim, moment)
    for folder, is_there in (("previous", True), ("new", is_saved)):
        optimizer = Sharded(Net(), 0, 1, "element", is_filled=False)
        loaded = contextlib.nullcontext() if is_there else pytest.raises(dcp.CheckpointException, match="metadata")
        with loaded:
            dcp.load({"optim": optimizer}, checkpoint_id=tmp_path / folder)
            check(optimizer, 0, 1, "element")
