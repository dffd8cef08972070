"""A clip that is not the wrapper's own never measures a share, or nothing, in silence: it raises."""

import contextlib
import copy
import gc
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from tests.distributed.launcher import run
from tests.distributed.programs import Backward, OneProcess, Settings, make_net

SHARDED = ("optimizer", "gradients")
BODIES = ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")


def bodies():
    return [getattr(clip_grad, name).__closure__[0].cell_contents for name in BODIES]


def grads_of(params):
    return [param.grad for param in params if param.grad is not None]


CLIPS = {
    "clip_grad_norm_, by its module": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "clip_grad_norm_, by name": lambda params: clip_grad_norm_(params, 1.0),
    "clip_grad_norm_, foreach": lambda params: clip_grad_norm_(params, max_norm=1.0, foreach=True),
    "clip_grad_norm_, a loop": lambda params: clip_grad_norm_(max_norm=1.0, parameters=params, foreach=False),
    "clip_grad_norm_, error_if_nonfinite": lambda params: clip_grad_norm_(params, 1.0, error_if_nonfinite=True),
    "clip_grad_norm_, a generator": lambda params: clip_grad_norm_((p for p in params), 1.0, norm_type="inf"),
    "clip_grad_norm_, one": lambda params: clip_grad_norm_(params[1], 1.0),
    "clip_grad_value_": lambda params: clip_grad_value_(params, 1.0),
    "get_total_norm": lambda params: get_total_norm(grads_of(params)),
    "clip_grads_with_norm_": lambda params: clip_grads_with_norm_(params, 1.0, torch.tensor(3.0)),
}


def windows_under_no_sync(rank, optimizer, net, one, number):
    """Run the loop of docs/zero.md, k = 2, up to its step; the one process takes half of each gradient."""
    for i in range(2):
        with optimizer.no_sync() if i == 0 else contextlib.nullcontext():
            net(Backward(), (number, i, rank)).backward()
        for r in range(2):
            one.backward(r, Backward(), (number, i, r))


def wrap(settings, rank, **more):
    net = make_net(settings.dtype, settings.width)
    return net, settings.make(net, **more), OneProcess(settings, 2)


def differing(net, one):
    pairs = zip(net.named_parameters(), one.net.parameters(), strict=True)
    return [name for (name, p), want in pairs if not (torch.isfinite(want).all() and torch.equal(p, want))]


def clip_by_stock_functions(rank, shard):
    """Call each once in a window; return what was raised, and what then differs from one process."""
    net, optimizer, one = wrap(Settings(shard), rank)
    texts, problems = {}, []
    for number, (name, clip) in enumerate(CLIPS.items()):
        windows_under_no_sync(rank, optimizer, net, one, number)
        try:
            clip(list(net.parameters()))
            texts[name] = "nothing raised"
        except RuntimeError as error:
            texts[name] = str(error)
        optimizer.step()
        one.step()
        problems += [f"{name}: {param}" for param in differing(net, one)]
        optimizer.zero_grad()
        one.lose_window()
    return texts, problems


@pytest.mark.parametrize("shard", SHARDED)
def test_a_stock_clip_under_a_shard_raises_where_it_is_called_and_spoils_nothing(shard):
    for texts, problems in run(clip_by_stock_functions, 2, shard):
        assert problems == []
        assert set(texts) == set(CLIPS)
        for name, text in texts.items():
            assert text.startswith(f"torch.nn.utils.{name.split(',')[0]} was given parameter blocks."), (name, text)
            assert "optimizer.clip_grad_norm_" in text
            assert "max_grad_norm" in text


def other_models_and_afterwards(rank, shard):
    before = bodies()
    torch.manual_seed(1)
    bare, twin = (nn.Linear(3, 3) for _ in range(2))
    for model in (bare, twin):
        for i, param in enumerate(model.parameters()):
            param.grad = torch.full_like(param, 3.0 + i)
    wants = [
        clip_grad_norm_(twin.parameters(), 2.0),
        get_total_norm(grads_of(twin.parameters())),
        clip_grad_value_(twin.parameters(), 0.5),
        get_total_norm([]),
        clip_grad_norm_(iter(list(twin.parameters())), 0.25),
    ]
    net, optimizer, _ = wrap(Settings(shard), rank)
    during = bodies()
    got = [
        clip_grad_norm_(bare.parameters(), 2.0),
        get_total_norm(grads_of(bare.parameters())),
        clip_grad_value_(bare.parameters(), 0.5),
        get_total_norm([]),  # no gradient of the wrapper's is there to be missed
        clip_grad_norm_(iter(list(bare.parameters())), 0.25),
    ]
    net(Backward(), (0, rank)).backward()
    no_grads = nn.Linear(2, 2)
    got.append(clip_grad_norm_(no_grads.parameters(), 1.0))  # nobody else's are, either
    wants.append(torch.tensor(0.0))
    same = [a is b is None or torch.equal(a, b) for a, b in zip(got, wants, strict=True)]
    same += [torch.equal(a.grad, b.grad) for a, b in zip(bare.parameters(), twin.parameters(), strict=True)]
    second_net, second, _ = wrap(Settings(shard), rank)
    optimizer.unwrap()
    clip_grad_norm_(net.parameters(), 1.0)
    try:
        clip_grad_norm_(second_net.parameters(), 1.0)
        same.append(False)
    except RuntimeError:
        same.append(True)
    del second
    gc.collect()
    clip_grad_norm_(second_net.parameters(), 1.0)
    after = bodies()
    return same, before == after, any(a is b for a, b in zip(before, during, strict=True))


@pytest.mark.parametrize("shard", SHARDED)
def test_other_models_are_clipped_as_ever_and_torchs_functions_are_its_own_again_after_the_last_wrapper(shard):
    for same, is_given_back, was_torchs in run(other_models_and_afterwards, 2, shard):
        assert all(same)
        assert len(same) == 9
        assert is_given_back
        assert not was_torchs


def wrap_without_a_shard(rank):
    before = bodies()
    kept = [wrap(Settings("none"), rank), wrap(Settings("none", gradient_accumulation_steps=2), rank)]
    after = bodies()
    return len(kept), before == after


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_shard_torchs_functions_are_not_touched(world_size):
    assert run(wrap_without_a_shard, world_size) == [(2, True)] * world_size


# -- edits that no function of torch's makes


def edit_by_hand(rank, edit, who, settings, uses_no_sync):
    """Edit gradients in the second of three windows; return in which windows a step raised, and what."""
    net, optimizer, one = wrap(settings, rank)
    k = settings.gradient_accumulation_steps
    texts, problems = [], []
    for number in range(3):
        if uses_no_sync:
            windows_under_no_sync(rank, optimizer, net, one, number)
        for i in range(0 if uses_no_sync else k):
            net(Backward(), (number, i, rank)).backward()
            for r in range(2):
                one.backward(r, Backward(), (number, i, r))
            if i + 1 < k:
                optimizer.step()
                one.step()
        if number == 1 and rank in who:
            EDITS[edit](net)
        try:
            optimizer.step()
            one.step()
        except RuntimeError as error:
            texts.append((number, str(error)))
        problems += [f"window {number}: {name}" for name in differing(net, one)]
        optimizer.zero_grad()
        one.lose_window()
    return texts, problems


EDITS = {
    "a clip by hand that finds a norm of zero": lambda net: [g.mul_(1.0) for g in grads_of(net.parameters())],
    "a halving by hand": lambda net: torch._foreach_mul_(grads_of(net.parameters()), 0.5),
    "one gradient": lambda net: net.blocks[1].layer.weight.grad.clamp_(-1, 1),
    "zeroed": lambda net: net.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_gradients_that_are_under_way_raises_on_all_ranks_also_where_it_finds_zeros(edit, who):
    for texts, problems in run(edit_by_hand, 2, edit, who, Settings("optimizer"), True):
        assert problems == []
        assert [number for number, _ in texts] == [1]
        assert "edited between backward and step" in texts[0][1]
        assert "optimizer.clip_grad_norm_" in texts[0][1]


@pytest.mark.parametrize("who", [(0, 1), (1,)], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("edit", ["a halving by hand", "one gradient"])
def test_an_edit_of_a_share_raises_on_all_ranks_in_the_step_and_names_the_remedy(edit, who):
    for texts, problems in run(edit_by_hand, 2, edit, who, Settings("optimizer"), False):
        assert problems == []
        assert [number for number, _ in texts] == [1]
        assert "blocks." in texts[0][1]
        assert "optimizer.clip_grad_norm_" in texts[0][1]


def clip_a_window_by_stock(rank):
    """k = 2 of the wrapper's own: the last backward sends the sums away, and stock code finds zeros."""
    settings = Settings("none", gradient_accumulation_steps=2)
    EDITS["stock"] = lambda net: clip_grad_norm_(net.parameters(), 1.0)
    return edit_by_hand(rank, "stock", (0, 1), settings, False)


def test_stock_clip_raises_too_where_a_window_is_under_way_without_a_shard():
    for texts, problems in run(clip_a_window_by_stock, 2):
        assert problems == []
        assert [number for number, _ in texts] == [1]
        assert "under way between ranks" in texts[0][1]


# -- loss scalers


def edit_after_unscaling(rank, edits_after_clip):
    settings = Settings("optimizer", dtype=torch.float16)
    net, optimizer, _ = wrap(settings, rank)
    scaler = ShardedGradScaler(device="cpu", init_scale=16.0)
    texts = []
    for number in range(3):
        scaler.scale(net(Backward(), (number, rank))).backward()
        scaler.unscale_(optimizer)
        if edits_after_clip:
            optimizer.clip_grad_norm_(1e9)
        if number == 1:
            net.blocks[1].layer.weight.grad.mul_(0.5)
        try:
            scaler.step(optimizer)
        except RuntimeError as error:
            texts.append((number, str(error)))
        scaler.update()
        optimizer.zero_grad()
    return texts


@pytest.mark.parametrize("edits_after_clip", [False, True])
def test_an_edit_after_unscale_raises_as_any_other(edits_after_clip):
    for texts in run(edit_after_unscaling, 2, edits_after_clip):
        assert [number for number, _ in texts] == [1]
        assert "edited between backward and step" in texts[0][1]


def ask_and_look(rank, shard):
    """One rank alone looks at its optimizer in every way; return collectives that ran, and whether it then trains."""
    settings = Settings(shard, dtype=torch.float16)
    net, optimizer, one = wrap(settings, rank)
    scaler = ShardedGradScaler(device="cpu", init_scale=16.0)
    answers, problems = [], []
    for number in range(3):
        scaler.scale(net(Backward(), (number, rank))).backward()
        for r in range(2):
            one.backward(r, Backward(), (number, r))
        if number == 1 and rank == 0:
            before = copy.copy(optimizer._comm.counts)
            answers += [hasattr(optimizer, "_step_supports_amp_scaling"), optimizer._step_supports_amp_scaling]
            answers.append(dict(inspect.getmembers(optimizer))["_step_supports_amp_scaling"])
            answers += [bool(scaler._per_optimizer_states), optimizer._comm.counts == before]
        scaler.step(optimizer)
        scaler.update()
        one.step()
        problems += differing(net, one)
        optimizer.zero_grad()
        one.lose_window()
    return answers, problems


@pytest.mark.parametrize("shard", SHARDED)
def test_whoever_looks_at_an_optimizer_but_a_scaler_in_its_step_runs_no_collective(shard):
    first, second = run(ask_and_look, 2, shard)
    assert first == ([True, False, False, False, True], [])
    assert second == ([], [])
