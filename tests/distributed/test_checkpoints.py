"""State under a shard: parts and the whole; any layout into any other, bit-equal."""

import copy
import itertools
import pickle

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
)

from fusedopt import FusedMainGradOptimizer
from fusedopt.sharding.channel import BLOCK_NBYTES
from tests.deep import IS_DEEP
from tests.distributed.checkpoint_cases import (
    KINDS,
    LAYOUTS,
    Net,
    adamw,
    assert_same,
    bits,
    frozen,
    read,
    sgd,
    start,
    tensors_in,
    train,
    whole,
)
from tests.distributed.launcher import run, settle


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
    # Every kind, over the sizes in every layout, and AdamW cut by elements; in a deep run AdamW in every layout.
    cases = [(kind, LAYOUTS[(number + world_size) % len(LAYOUTS)]) for number, kind in enumerate(kinds)]
    cases += [("AdamW bf16", layout) for layout in LAYOUTS if IS_DEEP or layout == LAYOUTS[1 if world_size == 3 else 3]]
    for kind, layout in cases:
        kinds_of_parts |= one_layout(kind, layout, world_size, folder)
        settle()
    return True in kinds_of_parts


def one_layout(kind, layout, world_size, folder):
    """Return whether exponential averages are parts."""
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
    train(other, resumed, range(2, 5))
    after = read(folder, kind, 5)
    assert frozen(other.state_dict()) == frozen(after["model"])
    assert_same(whole(resumed), after["optimizer"])
    return {type(item.get("exp_avg")) is dict for item in part["state"].values()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_gives_the_whole_and_takes_it_and_goes_on_from_it(world_size, references):
    cut = run(every_layout, world_size, world_size, references, reuses=True)
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
    run(bare, 3, 3, reuses=True)


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
    run(parts, 2, 2, tmp_path, references, reuses=True)


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
    run(copies, 2, 2, reuses=True)


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
    run(refusals, 2, 2, tmp_path, references, reuses=True)


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
    run(odd_ones, 2, tmp_path, reuses=True)


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
    tensors = [
        t
        for state in optimizer._persistence._state_dicts(optimizer.param_groups).pack_state().values()
        for t in tensors_in(state)
    ]
    if rank == 0:  # its tensors and two blocks to agree; nothing is sent twice, or by a rank that could keep it
        assert 12 * owned - 4 * 3 * 1030 <= sent["control"] - 2 * BLOCK_NBYTES <= sum(t.nbytes for t in tensors)
    assert optimizer._comm.counts["control"] - counts["control"] <= 3 + len(tensors) + 40
    assert {kind for kind in optimizer._comm.counts if optimizer._comm.counts[kind] != counts[kind]} == {"control"}

    optimizer.param_groups[0]["lr"] = 0.5  # a scheduler that steps after it
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 0.125
    before = frozen(optimizer.state_dict())
    get = get_optimizer_state_dict(net, optimizer)
    assert any(type(value).__name__ == "CheckpointPart" for state in get["state"].values() for value in state.values())
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
    run(consolidations, 2, references, reuses=True)


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
    run(unfreeze, 2, references, reuses=True)
