"""Claims about state under a shard: parts, the whole, torch's checkpoints; any layout into any other, bit-equal."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from launcher import run, settle
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedopt import FusedMainGradOptimizer
from fusedopt.sharding.channel import BLOCK_NBYTES

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


# -- every layout to the whole and back


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


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Return a folder with what one process without a shard saves after 2 and 5 steps."""
    folder = tmp_path_factory.mktemp("references")
    run(reference, 1, folder)
    return folder


def read(folder, kind, num_steps):
    return torch.load(folder / f"{kind}.{num_steps}.pt", weights_only=True)


def assert_same(found, expected):
    assert frozen(found["state"]) == frozen(expected["state"])
    assert frozen(found["param_groups"]) == frozen(expected["param_groups"])
    assert found["fusedopt"] == expected["fusedopt"]


def assert_is_part(part, expected, optimizer):
    """Check that a rank's own state dict has its own elements of the whole, and nothing else."""
    entries = {entry.slot.name: entry for entry in optimizer._buffers.entries}
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    for index, name in enumerate(names):
        state, entry = part["state"].get(index, {}), entries.get(name)
        if entry is None or entry.part is None:
            assert state == {}
            continue
        for key, value in expected["state"].get(index, {}).items():
            found = state[key]
            if value.shape == entry.param.shape and entry.part.numel != entry.param.numel():
                ((label, found),) = found.items()
                assert label == f"{entry.part.start}:{entry.part.end}"
                order = torch.empty_strided(value.shape, entry.slot.strides).copy_(value)
                value = order.as_strided((value.numel(),), (1,))[entry.part.start : entry.part.end]
            assert frozen(found) == frozen(value), (name, key)


def every_layout(rank, world_size, folder):
    kinds_of_parts = set()
    kinds = list(KINDS)
    cases = [("AdamW bf16", layout) for layout in LAYOUTS]  # and every kind, over the sizes in every layout
    cases += [(kind, LAYOUTS[(number + world_size) % len(LAYOUTS)]) for number, kind in enumerate(kinds)]
    for kind, layout in cases:
        settle()
        expected = read(folder, kind, 2)
        net, optimizer = start(kind, layout)
        train(net, optimizer, range(2))
        part = optimizer.state_dict()
        assert frozen(net.state_dict()) == frozen(expected["model"])
        assert_same(whole(optimizer, to=world_size - 1), expected["optimizer"])
        assert_is_part(part, expected["optimizer"], optimizer)

        other, resumed = start(kind, layout, seed=7)
        resumed.load_state_dict(expected["optimizer"])
        other.load_state_dict(expected["model"])
        assert frozen(resumed.state_dict()) == frozen(part)
        assert_same(whole(resumed), expected["optimizer"])
        kinds_of_parts |= {type(item.get("exp_avg")) is dict for item in part["state"].values()}
        train(other, resumed, range(2, 5))
        after = read(folder, kind, 5)
        assert frozen(other.state_dict()) == frozen(after["model"])
        assert_same(whole(resumed), after["optimizer"])
    return True in kinds_of_parts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_gives_the_whole_and_takes_it_and_goes_on_from_it(world_size, references):
    cut = run(every_layout, world_size, world_size, references)
    assert any(cut) is (world_size > 1)  # shards did go through parameters


def bare(rank, world_size):
    for make, layout in itertools.product([adamw, sgd], LAYOUTS[1:]):
        stock_net = Net(torch.float32)
        stock = make(stock_net)
        train(stock_net, stock, range(2))
        net = Net(torch.float32, seed=7)
        settings = {"shard": layout[0], "shard_by": layout[1], "overlap_param_gather": True}
        optimizer = FusedMainGradOptimizer(make(net), **settings)
        net.load_state_dict(stock_net.state_dict())
        optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
        assert frozen(whole(optimizer)["state"]) == frozen(stock.state_dict()["state"])
        train(stock_net, stock, range(2, 5))
        train(net, optimizer, range(2, 5))
        assert frozen(whole(optimizer)["state"]) == frozen(stock.state_dict()["state"])
        assert frozen(net.state_dict()) == frozen(stock_net.state_dict())


def test_a_bare_optimizers_state_is_cut_and_training_goes_on_bit_equal():
    run(bare, 3, 3)


# -- torch.distributed.checkpoint


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


def save_many(rank, cases, folder):
    for number, (kind, layout, route) in cases:
        settle()
        net, optimizer = start(kind, layout)
        before = bits(net, optimizer)
        save_checkpoint(net, optimizer, folder / f"fresh{number}", route)
        assert bits(net, optimizer) == before  # nothing moved
        train(net, optimizer, range(2))
        save_checkpoint(net, optimizer, folder / f"{number}", route)


def load_many(rank, world_size, cases, folder, references):
    for number, (kind, layout, route) in cases:
        settle()
        expected, after = read(references, kind, 2), read(references, kind, 5)
        net, optimizer = start(kind, layout, seed=7)
        net.load_state_dict(expected["model"])
        asked = load_checkpoint(net, optimizer, folder / f"{number}", route)
        assert_same(whole(optimizer), expected["optimizer"])
        assert_reads_only_its_part(asked, optimizer)
        train(net, optimizer, range(2, 5))
        assert frozen(net.state_dict()) == frozen(after["model"])
        assert_same(whole(optimizer), after["optimizer"])
        load_checkpoint(net, optimizer, folder / f"{number}", route)  # into a running one: back in time
        assert_same(whole(optimizer), expected["optimizer"])
        load_checkpoint(net, optimizer, folder / f"fresh{number}", route)
        assert all(set(state) <= {"main_param"} for state in whole(optimizer)["state"].values())


def assert_reads_only_its_part(asked, optimizer):
    """Check that of everything with a parameter's shape this rank read its own elements, once."""
    numel = {"main_param": 0, "exp_avg": 0, "exp_avg_sq": 0, "momentum_buffer": 0}
    read = {key: sum(count for fqn, count in asked.items() if fqn.endswith(f".{key}")) for key in numel}
    owned = sum(e.part.numel for e in optimizer._buffers.entries if e.part is not None)
    if optimizer._buffers.buckets[0].main is not None:
        assert read["main_param"] == owned
    assert read["exp_avg"] + read["momentum_buffer"] == owned
    assert owned or optimizer._comm.rank > 0


PAIRS = [
    (2, ("optimizer", "element"), 3, ("gradients", "parameter")),
    (3, ("gradients", "element"), 1, ("none", "auto")),
    (1, ("none", "auto"), 2, ("optimizer", "element")),
    (2, ("none", "auto"), 2, ("gradients", "element")),
    (2, ("gradients", "parameter"), 4, ("optimizer", "element")),
    (1, ("none", "auto"), 1, ("none", "auto")),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_torchs_checkpoints_load_into_any_layout_and_training_goes_on_bit_equal(pair, references, tmp_path):
    saved_by, saved_layout, loaded_by, loaded_layout = pair
    cases = list(enumerate(zip(KINDS, ROUTES, strict=True)))  # every kind, every route
    if pair == PAIRS[0]:
        cases += [(10 + number, ("AdamW bf16", route)) for number, route in enumerate(list(ROUTES)[1:])]
    run(save_many, saved_by, [(n, (kind, saved_layout, route)) for n, (kind, route) in cases], tmp_path)
    loads = [(n, (kind, loaded_layout, route)) for n, (kind, route) in cases]
    run(load_many, loaded_by, loaded_by, loads, tmp_path, references)


def load_whole_from_one_rank(rank, references):
    for kind, is_running in zip(KINDS, [False, True, False, True], strict=True):
        net, optimizer = start(kind, ("gradients", "parameter"))
        train(net, optimizer, range(2))
        saved, weights = whole(optimizer), copy.deepcopy(net.state_dict())
        for tensor in tensors_in(saved["state"]):
            assert tensor.is_contiguous()  # torch's broadcast would mix up a channels_last one
        names = [name for group in saved["param_groups"] for name in group["param_names"]]
        groups = [{**g, "params": [names[number] for number in g["params"]]} for g in saved["param_groups"]]
        by_name = {"state": {names[n]: state for n, state in saved["state"].items()}, "param_groups": groups}

        net, optimizer = start(kind, ("optimizer", "element"), seed=7)
        train(net, optimizer, range(20, 20 + is_running))
        net.load_state_dict(weights)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_optimizer_state_dict(net, optimizer, by_name if rank == 0 else {}, options=options)
        train(net, optimizer, range(2, 5))
        assert frozen(net.state_dict()) == frozen(read(references, kind, 5)["model"])
        with pytest.raises(RuntimeError, match=r"(?s)consolidate_state_dict.*broadcast_from_rank0"):
            get_optimizer_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True))


def test_one_ranks_whole_state_is_broadcast_and_cut_and_whole_state_is_refused_by_name(references):
    run(load_whole_from_one_rank, 2, references)


# -- parts


def parts(rank, world_size, folder, references):
    for kind, layout in [("AdamW bf16", LAYOUTS[1]), ("SGD momentum bf16", LAYOUTS[4]), ("AdamW fp32", LAYOUTS[3])]:
        after = read(references, kind, 5)
        net, optimizer = start(kind, layout)
        train(net, optimizer, range(2))
        file = folder / f"{rank}.pt"
        torch.save([net.state_dict(), optimizer.state_dict()], file)
        saved = torch.load(file, weights_only=True)
        assert list(saved[1]["fusedopt"]["parts"]) == [f"{rank} of {world_size}"]
        before = bits(net, optimizer)
        optimizer.load_state_dict(saved[1])
        assert bits(net, optimizer) == before

        # Parts that a user hands over as plain dicts: every rank's tensors are saved, and come back to it.
        other = start(kind, layout, seed=6)
        train(*other, range(20, 22))
        template = other[1].state_dict()
        dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=folder / f"{kind}.dcp")
        dcp.load({"optim": template}, checkpoint_id=folder / f"{kind}.dcp")
        other[1].load_state_dict(template)
        assert frozen(other[1].state_dict()["state"]) == frozen(saved[1]["state"])

        resumed_net, resumed = start(kind, layout, seed=7)
        resumed.load_state_dict(saved[1])
        resumed_net.load_state_dict(saved[0])
        assert frozen(resumed.state_dict()) == frozen(saved[1])
        train(resumed_net, resumed, range(2, 5))
        assert frozen(resumed_net.state_dict()) == frozen(after["model"])
        assert_same(whole(resumed), after["optimizer"])


def test_every_ranks_own_part_resumes_bit_equal_on_the_same_layout(references, tmp_path):
    run(parts, 2, 2, tmp_path, references)


def copies(rank, world_size):
    for kind, layout in [("AdamW bf16", LAYOUTS[1]), ("Muon + AdamW bf16", LAYOUTS[4]), ("AdamW fp32", LAYOUTS[3])]:
        net, optimizer = start(kind, layout)
        net.hidden.requires_grad_(False)  # so that a layout occurs that nobody could guess from the model
        train(net, optimizer, range(2), {"conv.weight", "embedding.weight"})
        make, dtype = KINDS[kind]
        late = Net(dtype, seed=3)
        late.hidden.requires_grad_(False)
        wrapped = FusedMainGradOptimizer(make(late), bucket_mib=1, shard=layout[0], shard_by="auto")
        train(late, wrapped, range(2))
        late.hidden.requires_grad_(True)
        wrapped.zero_grad()
        for pair in ((net, optimizer), (late, wrapped)):
            train(*pair, range(2, 4), {"conv.weight", "embedding.weight", "hidden.weight"} if pair[0] is late else None)
            before = dict(pair[1]._comm.counts)
            twin = copy.deepcopy(pair)
            assert dict(pair[1]._comm.counts) == before
            assert bits(*twin) == bits(*pair)
            at_copy = bits(*pair)
            train(*twin, range(4, 6))
            assert bits(*pair) == at_copy
            train(*pair, range(4, 6))
            assert bits(*twin) == bits(*pair) != at_copy
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(pair[1])


def test_copies_of_a_sharded_pair_train_on_their_own_and_nothing_is_communicated():
    run(copies, 2, 2)


# -- refusals


def refusals(rank, world_size, folder, references):
    expected = read(references, "AdamW bf16", 2)["optimizer"]
    net, optimizer = start("AdamW bf16", ("optimizer", "element"))
    train(net, optimizer, range(2))
    part = copy.deepcopy(optimizer.state_dict())
    torch.save(part, folder / f"{rank}.pt")
    foreign = torch.load(folder / f"{rank}.pt", weights_only=True)
    names = expected["fusedopt"]["names"]
    number = names.index("hidden.weight")

    def edited(change):
        state_dict = copy.deepcopy(expected)
        if rank == world_size - 1:  # the other ranks have nothing to complain about
            change(state_dict)
        return state_dict

    cases = [
        (edited(lambda d: d["fusedopt"]["names"].__setitem__(number, "stem")), "hidden.weight.*stem"),
        (edited(lambda d: d["fusedopt"]["shapes"].__setitem__(number, [2, 2])), r"hidden.weight.*\[2, 2\]"),
        (edited(lambda d: d.pop("param_groups")), "param_groups"),
        (edited(lambda d: [s.pop("main_param") for s in d["state"].values()]), "no main_param for parameter"),
        (edited(lambda d: [s.update(exp_avg=torch.zeros(3, 3, 3)) for s in d["state"].values()]), "exp_avg.*needed"),
        (edited(lambda d: d["state"].update({i: {"main_param": {"0:5": torch.zeros(5)}} for i in d["state"]})), "part"),
    ]
    before = bits(net, optimizer)
    for state_dict, words in cases:
        with pytest.raises((ValueError, RuntimeError), match=f"(?s){words}") as caught:
            optimizer.load_state_dict(state_dict)
        assert (caught.type is ValueError) is (rank == world_size - 1)
        assert bits(net, optimizer) == before
    remedies = "(?s)consolidate_state_dict.*torch.distributed.checkpoint"
    for layout in [("optimizer", "parameter"), ("none", "auto")]:
        other_net, other = start("AdamW bf16", layout, seed=7)
        at_start = bits(other_net, other)
        with pytest.raises((ValueError, RuntimeError), match=remedies):
            other.load_state_dict(foreign)
        assert bits(other_net, other) == at_start
    with pytest.raises((ValueError, RuntimeError), match=remedies):  # the part of another rank
        optimizer.load_state_dict(torch.load(folder / f"{world_size - 1 - rank}.pt", weights_only=True))
    with pytest.raises(ValueError, match=r"to=7.*there are 2 ranks"):
        optimizer.consolidate_state_dict(to=7)
    with pytest.raises(RuntimeError, match=r"different ones, \[0, 1\]"):
        optimizer.consolidate_state_dict(to=rank)
    assert bits(net, optimizer) == before
    optimizer.load_state_dict(part)
    train(net, optimizer, range(2, 5))
    assert_same(whole(optimizer), read(references, "AdamW bf16", 5)["optimizer"])


def test_what_one_rank_must_refuse_all_refuse_and_nothing_changes(references, tmp_path):
    run(refusals, 2, 2, tmp_path, references)


class OwnFormat(torch.optim.SGD):
    """Writes and reads a format of its own."""

    def state_dict(self):
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["mine"])


class Global(torch.optim.SGD):
    """Keeps a count under a key that is no parameter."""

    def step(self, closure=None):
        self.state["global"]["count"] = self.state["global"].get("count", 0) + 1
        return super().step(closure)


def odd_ones(rank, folder):
    net = Net(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(OwnFormat(net.parameters(), lr=0.125, momentum=0.5), shard="optimizer")
    train(net, optimizer, range(2))
    with pytest.raises(ValueError, match=r"OwnFormat.*format of its own.*put together"):
        optimizer.consolidate_state_dict()
    with pytest.raises(ValueError, match=r"OwnFormat.*format of its own.*torch.distributed.checkpoint"):
        get_optimizer_state_dict(net, optimizer)
    part = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(2, 3))
    optimizer.load_state_dict(part)
    assert frozen(optimizer.state_dict()) == frozen(part)
    assert part["fusedopt"]["inner"][0]["mine"]["state"]
    unsharded = Net(torch.bfloat16)
    whole_one = FusedMainGradOptimizer(OwnFormat(unsharded.parameters(), lr=0.125, momentum=0.5))
    with pytest.raises(ValueError, match=r"OwnFormat.*cannot be cut"):
        optimizer.load_state_dict(whole_one.state_dict())

    net = Net(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(Global(net.parameters(), lr=0.125, momentum=0.5), shard="optimizer")
    train(net, optimizer, range(2))
    with pytest.raises(ValueError, match=r"Global keeps state under \['global'\]"):
        get_optimizer_state_dict(net, optimizer)
    saved = whole(optimizer)
    assert saved["state"]["global"] == {"count": 2}
    train(net, optimizer, range(2, 3))
    optimizer.load_state_dict(saved)
    assert frozen(whole(optimizer)) == frozen(saved)


def test_formats_and_keys_of_an_optimizers_own_are_refused_where_they_would_be_lost(tmp_path):
    run(odd_ones, 2, tmp_path)


# -- consolidation


def consolidations(rank, references):
    expected = read(references, "AdamW bf16", 2)["optimizer"]
    net, optimizer = start("AdamW bf16", ("optimizer", "element"))
    train(net, optimizer, range(2))
    part = frozen(optimizer.state_dict())
    counts, nbytes = optimizer._comm.counts.copy(), optimizer._comm.nbytes.copy()
    optimizer.consolidate_state_dict(to=1)
    sent = optimizer._comm.nbytes - nbytes
    found = optimizer.state_dict()
    if rank == 1:
        assert_same(found, expected)
        assert all(tensor.device.type == "cpu" for tensor in tensors_in(found))
    else:
        assert frozen(found) == part
    owned = sum(e.part.numel for e in optimizer._buffers.entries if e.part is not None)
    tensors = [t for state in optimizer._state_dicts().pack_state().values() for t in tensors_in(state)]
    if rank == 0:  # its tensors and two blocks to agree; nothing is sent twice, or by a rank that could keep it
        assert 12 * owned - 4 * 3 * 1030 <= sent["control"] - 2 * BLOCK_NBYTES <= sum(t.nbytes for t in tensors)
    assert optimizer._comm.counts["control"] - counts["control"] <= 3 + len(tensors) + 40
    assert {kind for kind in optimizer._comm.counts if optimizer._comm.counts[kind] != counts[kind]} == {"control"}

    optimizer.param_groups[0]["lr"] = 0.5  # a scheduler that steps after it
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 0.125
    before = frozen(optimizer.state_dict())
    get = get_optimizer_state_dict(net, optimizer)
    assert any(type(value).__name__ == "CheckpointPiece" for state in get["state"].values() for value in state.values())
    assert frozen(optimizer.state_dict()) == before
    for event in ("step", "load", "weights"):
        optimizer.consolidate_state_dict(to=1)
        assert ("parts" in optimizer.state_dict()["fusedopt"]) is (rank != 1)
        if event == "step":
            train(net, optimizer, range(2, 3))
        elif event == "load":
            optimizer.load_state_dict(expected)
        else:
            with torch.no_grad():
                net.hidden.weight.fill_(2.0)
                net.conv.weight.fill_(2.0)
            optimizer.sync_main_params()
        changed = optimizer._inner.consolidated is None or "parts" in optimizer.state_dict()["fusedopt"]
        assert changed, event
    unsharded_net, unsharded = start("AdamW bf16", ("none", "auto"))
    train(unsharded_net, unsharded, range(2))
    unsharded.consolidate_state_dict(to=1)
    assert_same(unsharded.state_dict(), expected)


def test_consolidation_sends_every_tensor_once_to_one_rank_until_the_next_step(references):
    run(consolidations, 2, references)


def on_a_mesh(rank, folder, references):
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = read(references, "AdamW bf16", 2)
    net = Net(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(adamw(net), device_mesh=mesh, shard="optimizer", bucket_mib=1)
    train(net, optimizer, range(2))
    before = optimizer._comm.nbytes.copy()
    optimizer.consolidate_state_dict(to=2)
    sent = (optimizer._comm.nbytes - before)["control"]
    found = optimizer._comm.objects(pickle.dumps(optimizer.state_dict()))
    assert_same(pickle.loads(found[2]), expected["optimizer"])
    optimizer.load_state_dict(pickle.loads(found[2]))
    assert_same(whole(optimizer), expected["optimizer"])
    save_checkpoint(net, optimizer, folder, "get and set")
    return sent


def test_of_replicas_on_a_mesh_one_sends(references, tmp_path):
    sent = run(on_a_mesh, 4, tmp_path, references)
    to_agree = 2 * (2 * BLOCK_NBYTES * 3 // 4)
    assert [nbytes - to_agree > 1000 for nbytes in sent].count(True) == 1  # rank 2 has its own part, and wants one more
    run(load_many, 1, 1, [], tmp_path, references)
    run(load_from_mesh, 3, tmp_path, references)


def load_from_mesh(rank, folder, references):
    net, optimizer = start("AdamW bf16", ("gradients", "parameter"), seed=7)
    load_checkpoint(net, optimizer, folder, "get and set")
    assert_same(whole(optimizer), read(references, "AdamW bf16", 2)["optimizer"])


# -- parameters that were frozen when loading


def unfreeze(rank, references):
    for kind, layout in itertools.product(["AdamW bf16", "AdamW fp32"], [LAYOUTS[1], LAYOUTS[4]]):
        expected, after = read(references, kind, 2), read(references, kind, 5)
        make, dtype = KINDS[kind]
        net = Net(dtype, seed=7)
        net.hidden.requires_grad_(False)
        settings = {"shard": layout[0], "shard_by": layout[1], "bucket_mib": 1}
        optimizer = FusedMainGradOptimizer(make(net), **settings)
        optimizer.load_state_dict(expected["optimizer"])
        net.load_state_dict(expected["model"])
        assert_same(whole(optimizer), expected["optimizer"])
        net.hidden.requires_grad_(True)
        optimizer.zero_grad()
        assert_same(whole(optimizer), expected["optimizer"])
        train(net, optimizer, range(2, 5))
        assert frozen(net.state_dict()) == frozen(after["model"])
        assert_same(whole(optimizer), after["optimizer"])


def test_state_that_was_loaded_for_a_frozen_parameter_is_cut_when_it_is_unfrozen(references):
    run(unfreeze, 2, references)
