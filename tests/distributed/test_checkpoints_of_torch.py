"""torch.distributed.checkpoint under a shard: what any layout saved, any other loads, bit-equal."""

import copy
import pickle

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from fusedopt import FusedMainGradOptimizer
from fusedopt.sharding.channel import BLOCK_NBYTES
from tests.deep import IS_DEEP, in_turn
from tests.distributed.checkpoint_cases import (
    KINDS,
    ROUTES,
    Net,
    adamw,
    assert_same,
    bits,
    frozen,
    load_checkpoint,
    read,
    save_checkpoint,
    start,
    tensors_in,
    train,
    whole,
)
from tests.distributed.launcher import run, settle


def save_many(rank, cases, folder):
    for number, (kind, layout, route) in cases:
        save_one(folder, number, kind, layout, route)
        settle()


def save_one(folder, number, kind, layout, route):
    net, optimizer = start(kind, layout)
    before = bits(net, optimizer)
    save_checkpoint(net, optimizer, folder / f"fresh{number}", route)
    assert bits(net, optimizer) == before  # nothing moved
    train(net, optimizer, range(2))
    save_checkpoint(net, optimizer, folder / f"{number}", route)


def load_many(rank, world_size, cases, folder, references):
    for number, (kind, layout, route) in cases:
        load_one(folder, references, number, kind, layout, route)
        settle()


def load_one(folder, references, number, kind, layout, route):
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
    # Every kind by a route of its own in three pairs; in a deep run in every pair, and the first kind by every route.
    cases = list(enumerate(zip(KINDS, ROUTES, strict=True)))
    cases = in_turn([cases[::2], cases[1::2]], PAIRS.index(pair))
    cases = [case for half in cases for case in half]
    if IS_DEEP and pair == PAIRS[0]:
        cases += [(10 + number, ("AdamW bf16", route)) for number, route in enumerate(list(ROUTES)[1:])]
    run(save_many, saved_by, [(n, (kind, saved_layout, route)) for n, (kind, route) in cases], tmp_path, reuses=True)
    loads = [(n, (kind, loaded_layout, route)) for n, (kind, route) in cases]
    run(load_many, loaded_by, loaded_by, loads, tmp_path, references, reuses=True)


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
    run(load_whole_from_one_rank, 2, references, reuses=True)


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
    sent = run(on_a_mesh, 4, tmp_path, references, reuses=True)
    to_agree = 2 * (2 * BLOCK_NBYTES * 3 // 4)
    assert [nbytes - to_agree > 1000 for nbytes in sent].count(True) == 1  # rank 2 has its own part, and wants one more
    run(load_many, 1, 1, [], tmp_path, references, reuses=True)
    run(load_from_mesh, 3, tmp_path, references, reuses=True)


def load_from_mesh(rank, folder, references):
    net, optimizer = start("AdamW bf16", ("gradients", "parameter"), seed=7)
    load_checkpoint(net, optimizer, folder, "get and set")
    assert_same(whole(optimizer), read(references, "AdamW bf16", 2)["optimizer"])
