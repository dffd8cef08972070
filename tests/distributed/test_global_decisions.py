"""What all ranks decide together: the norm, skipping, raising, loss scales, refusals."""

import contextlib
import dataclasses
import functools
import math
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fusedopt
from tests.deep import paired
from tests.distributed.launcher import recorded_warnings, run
from tests.distributed.programs import Backward, OneProcess, Settings, make_net

SHARDS = ("none", "optimizer", "gradients")
MAX_NORM = 100.0
SCALE = 2.0**4
NUM_WINDOWS = 4
SPOILT = 1  # the window in which one rank's gradient is not finite
SPOILT_NAME = "blocks.3.layer.weight"


class Pair:
    """A wrapped model on this rank, and the one process that all ranks must equal."""

    def __init__(self, rank, world_size, settings, clips_by_hand=False, **more):
        self.rank, self.world_size, self.settings = rank, world_size, settings
        self.net = make_net(settings.dtype, settings.width)
        self.optimizer = settings.make(self.net, **more)
        if clips_by_hand:
            settings = dataclasses.replace(settings, max_grad_norm=MAX_NORM)
        self.one = OneProcess(settings, world_size)
        self.problems = []

    def backward(self, number, scale=None, spoil=None):
        """Run a backward here, and those of all ranks in the one process unless a gradient is spoilt."""
        with self._spoilt(spoil):
            loss = self.net(Backward(), (number, self.rank))
            (loss if scale is None else scale(loss)).backward()
        for rank in range(self.world_size):
            self.one.backward(rank, Backward(), (number, rank))

    @contextlib.contextmanager
    def _spoilt(self, factor):
        if factor is None:
            yield
            return
        param = dict(self.net.named_parameters())[SPOILT_NAME]
        handle = param.register_hook(lambda grad: grad * factor)
        yield
        handle.remove()

    def clear(self):
        self.optimizer.zero_grad()
        self.one.lose_window()

    def compare(self, where):
        for (name, param), want in zip(self.net.named_parameters(), self.one.net.parameters(), strict=True):
            if not torch.isfinite(want).all() or not torch.equal(param, want):
                self.problems.append(f"{where}: {name}")

    def check(self, condition, text):
        if not condition:
            self.problems.append(text)


def rounding(net):
    """Return the relative error of a norm whose sums of squares are exact within rows of 1024 elements."""
    return (sum(-(-p.numel() // 1024) for p in net.parameters()) + 4) * 2**-24


# -- the norm


def clip_by_hand(rank, world_size, settings):
    pair = Pair(rank, world_size, settings, clips_by_hand=True)
    norms = []
    for number in range(3):
        pair.backward(number)
        grads = torch.cat([grad.flatten().double() for grad in pair.one.averaged().values()])
        for norm_type in (1.0, math.inf, 2.0):
            max_norm = MAX_NORM if norm_type == 2.0 else math.inf
            norm = pair.optimizer.clip_grad_norm_(max_norm, norm_type)
            exact = torch.linalg.vector_norm(grads, norm_type).item()
            close = abs(norm.item() - exact) <= rounding(pair.net) * exact
            pair.check(close and exact > MAX_NORM / 10, f"norm {norm_type} is {norm.item()} instead of {exact}")
            norms.append(norm.item())
        pair.optimizer.step()
        pair.one.step(norm)
        pair.compare(f"window {number}")
        pair.clear()
    return pair.problems, norms


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("shard", "shard_by"),
    [("none", "element"), *((shard, by) for shard in ("optimizer", "gradients") for by in ("element", "parameter"))],
)
def test_clip_grad_norm_measures_and_clips_all_ranks_as_one_process(shard, shard_by, world_size):
    settings = Settings(shard, shard_by, dtype=torch.float32 if world_size == 4 else torch.bfloat16)
    results = run(clip_by_hand, world_size, world_size, settings, reuses=True)
    assert [problems for problems, _ in results] == [[]] * world_size
    assert all(norms == results[0][1] for _, norms in results)
    assert len(results[0][1]) == 9


def clip_with_stock(rank):
    pair = Pair(rank, 2, Settings("none"), clips_by_hand=True)
    for number in range(3):
        pair.backward(number)
        norm = nn.utils.clip_grad_norm_(pair.net.parameters(), MAX_NORM)
        pair.check(norm.item() > MAX_NORM, f"nothing to clip: {norm}")
        pair.optimizer.step()
        pair.one.step(norm)
        pair.compare(f"window {number}")
        pair.clear()
    return pair.problems


def test_stock_clip_is_right_where_gradients_are_whole():
    assert run(clip_with_stock, 2, reuses=True) == [[], []]


def norm_over_model_parallel_ranks(rank, shard):
    """Four ranks: two halves of a model, each trained by two data-parallel ranks."""
    data_parallel = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model_parallel = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    settings = Settings(shard, max_grad_norm=MAX_NORM)
    net = make_net(settings.dtype, seed=rank % 2)
    optimizer = settings.make(net, process_group=data_parallel, norm_group=model_parallel)
    halves = [OneProcess(settings, 2) for _ in range(2)]
    seen = []
    for number in range(3):
        net(Backward(), (number, rank)).backward()
        for half, one in enumerate(halves):
            for replica in range(2):
                one.backward(replica, Backward(), (number, 2 * replica + half))
        optimizer.step()
        exact = math.hypot(*(one.exact_norm() for one in halves))
        seen.append(
            (optimizer.grad_norm.item(), exact, abs(optimizer.grad_norm.item() - exact) <= 2 * rounding(net) * exact)
        )
        optimizer.zero_grad()
        for one in halves:
            one.lose_window()
    return seen


@pytest.mark.parametrize("shard", SHARDS)
def test_norm_group_adds_the_ranks_that_hold_other_parts_of_the_model(shard):
    results = run(norm_over_model_parallel_ranks, 4, shard)
    assert all(is_close for seen in results for _, _, is_close in seen), results
    assert all([norm for norm, _, _ in seen] == [norm for norm, _, _ in results[0]] for seen in results)


# -- gradients that are not finite


def skip_together(rank, world_size, settings, factor):
    pair = Pair(rank, world_size, settings)
    skipped = []
    with recorded_warnings() as texts:
        for number in range(NUM_WINDOWS):
            is_spoilt = number == SPOILT
            pair.backward(number, spoil=factor if is_spoilt and rank == 1 else None)
            pair.optimizer.step()
            if not is_spoilt:
                pair.one.step(pair.optimizer.grad_norm)
            pair.compare(f"window {number}")
            pair.check(pair.optimizer.step_was_skipped == is_spoilt, f"window {number}: step_was_skipped")
            skipped.append(pair.optimizer.skipped_steps)
            pair.clear()
    return pair.problems, skipped, sum("optimizer step" in text for text in texts), len(texts)


@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_counted(shard, factor):
    for max_grad_norm in (None, MAX_NORM):
        settings = Settings(shard, max_grad_norm=max_grad_norm)
        for problems, skipped, num_told, num_warnings in run(skip_together, 3, 3, settings, factor, reuses=True):
            assert problems == []
            assert skipped == [0, 1, 1, 1]
            assert num_told == num_warnings == 1


def raise_together(rank, settings):
    pair = Pair(rank, 2, settings, nonfinite="raise")
    texts = []
    for number in range(NUM_WINDOWS):
        is_spoilt = number == SPOILT
        pair.backward(number, spoil=math.nan if is_spoilt and rank == 1 else None)
        try:
            pair.optimizer.step()
        except FloatingPointError as error:
            texts.append((number, str(error)))
        if not is_spoilt:
            pair.one.step(pair.optimizer.grad_norm)
        pair.compare(f"window {number}")
        pair.clear()
    return pair.problems, texts


@pytest.mark.parametrize(
    ("shard", "shard_by"), [("none", "element"), ("optimizer", "element"), ("gradients", "parameter")]
)
def test_nonfinite_raise_names_the_parameter_on_all_ranks_and_training_goes_on(shard, shard_by):
    settings = Settings(shard, shard_by)
    for problems, texts in run(raise_together, 2, settings, reuses=True):
        assert problems == []
        assert [number for number, _ in texts] == [SPOILT]
        assert f"1 parameter(s): {SPOILT_NAME}." in texts[0][1]


# -- edits from outside, and loss scalers


def use_stock_scaler_under_a_shard(rank, shard):
    pair = Pair(rank, 2, Settings(shard, dtype=torch.float16))
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    pair.backward(0, scaler.scale)
    try:
        scaler.step(pair.optimizer)
        scaler.update()
    except RuntimeError as error:
        return pair.problems, str(error)
    return pair.problems, "nothing raised"


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_stock_grad_scaler_under_a_shard_raises_on_all_ranks_and_names_the_remedy(shard):
    for problems, text in run(use_stock_scaler_under_a_shard, 2, shard, reuses=True):
        assert problems == []
        assert "ShardedGradScaler" in text


def train_fp16(rank, world_size, shard, kind, clip, by_fused_layers):
    settings = Settings(shard, dtype=torch.float16, is_fused=by_fused_layers)
    pair = Pair(rank, world_size, settings, clips_by_hand=clip)
    if kind == "sharded":
        scaler = ShardedGradScaler(device="cpu", init_scale=SCALE, growth_interval=2)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    scales = []
    for number in range(NUM_WINDOWS + 1):
        is_spoilt = number == SPOILT
        for i in range(2):
            pair.backward(10 * number + i, scaler.scale, math.inf if is_spoilt and rank == 1 and i == 0 else None)
        norm = None
        if clip:
            scaler.unscale_(pair.optimizer)
            norm = pair.optimizer.clip_grad_norm_(MAX_NORM)
            pair.check(math.isfinite(norm.item()) != is_spoilt, f"window {number}: norm {norm}")
        scaler.step(pair.optimizer)
        scaler.update()
        if not is_spoilt:
            pair.one.step(norm)
        pair.compare(f"window {number}")
        scales.append(scaler.get_scale())
        pair.clear()
    return pair.problems, scales, pair.optimizer.skipped_steps


SCALERS = [("none", "stock"), ("none", "sharded"), ("optimizer", "sharded"), ("gradients", "sharded")]


@pytest.mark.parametrize(("scaler", "clip", "by_fused_layers"), paired(SCALERS, (False, True), (False, True)))
def test_an_fp16_model_trains_under_the_scaler_that_fits_and_an_inf_on_one_rank_halves_the_scale_of_all(
    scaler, clip, by_fused_layers
):  # half of all combinations; `make test-deep` has all
    for problems, scales, num_skipped in run(train_fp16, 2, 2, *scaler, clip, by_fused_layers, reuses=True):
        assert problems == []
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE, SCALE]
        assert num_skipped == 0  # the scaler's skip, not ours


# -- what one rank must refuse, all refuse


def refuse_a_parameter(rank, shard):
    net = make_net(torch.float32)
    if rank == 1:
        net.blocks[2].layer.weight = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    try:
        Settings(shard).make(net)
    except (TypeError, RuntimeError) as error:
        return str(error), [hasattr(p, "main_grad") for p in net.parameters()]
    return "nothing raised", []


@pytest.mark.parametrize("shard", SHARDS)
def test_a_parameter_that_one_rank_cannot_wrap_is_refused_by_all_and_nothing_is_changed(shard):
    for text, wrapped in run(refuse_a_parameter, 3, shard, reuses=True):
        assert "blocks.2.layer.weight" in text
        assert "complex64" in text
        assert not any(wrapped)


def wrap_other_shapes(rank, shard):
    try:
        Settings(shard, width=40 + 8 * (rank == 1)).make(make_net(torch.float32, 40 + 8 * (rank == 1)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("shard", SHARDS)
def test_models_that_differ_between_ranks_are_refused_by_all(shard):
    for text in run(wrap_other_shapes, 2, shard, reuses=True):
        assert "rank" in text
        assert "blocks.0.layer.weight" in text


def change_lr_on_both_sides(rank, shard):
    pair = Pair(rank, 2, Settings(shard))
    inner = pair.optimizer._inner.optimizers[0]
    texts = []
    for number in range(3):
        pair.backward(number)
        if number == 1 and rank == 1:
            pair.optimizer.param_groups[0]["lr"], inner.param_groups[0]["lr"] = 2.0, 3.0
            try:
                pair.optimizer.step()
            except RuntimeError as error:
                texts.append(str(error))
            pair.optimizer.param_groups[0]["lr"] = inner.param_groups[0]["lr"] = 0.125
        elif number == 1:
            try:
                pair.optimizer.step()
            except RuntimeError as error:
                texts.append(str(error))
        pair.optimizer.step()
        pair.one.step(pair.optimizer.grad_norm)
        pair.compare(f"window {number}")
        pair.clear()
    return pair.problems, texts


@pytest.mark.parametrize("shard", SHARDS)
def test_a_mistake_on_one_rank_raises_on_all_and_once_mended_loses_no_gradient(shard):
    for problems, texts in run(change_lr_on_both_sides, 2, shard, reuses=True):
        assert problems == []
        assert len(texts) == 1
        assert "param_groups[0]['lr'] was changed on both sides" in texts[0]


def clip_on_one_rank(rank, shard):
    pair = Pair(rank, 2, Settings(shard))
    texts = []
    for number in range(3):
        pair.backward(number)
        try:
            if number == 1 and rank == 0:
                pair.optimizer.clip_grad_norm_(MAX_NORM)
            pair.optimizer.step()
            pair.one.step(pair.optimizer.grad_norm)
        except RuntimeError as error:
            texts.append((number, str(error)))
        pair.compare(f"window {number}")
        pair.clear()
    return pair.problems, texts


@pytest.mark.parametrize("shard", SHARDS)
def test_clipping_on_one_rank_only_raises_on_all(shard):
    for problems, texts in run(clip_on_one_rank, 2, shard, reuses=True):
        assert problems == []
        assert [number for number, _ in texts] == [1]


def merge_with_a_closure(rank, shard):
    """Train by closures; return whether it equals one process."""
    pair = Pair(rank, 2, Settings(shard))
    losses = []
    for number in range(3):

        def closure(number=number):
            pair.clear()
            loss = pair.net(Backward(), (number, rank))
            loss.backward()
            for r in range(2):
                pair.one.backward(r, Backward(), (number, r))
            return loss.item()

        losses.append(pair.optimizer.step(closure))
        pair.one.step(pair.optimizer.grad_norm)
        pair.compare(f"window {number}")
    return pair.problems, all(math.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_closure_is_one_micro_batch_on_every_rank(shard):
    assert run(merge_with_a_closure, 2, shard, reuses=True) == [([], True)] * 2


def flush_a_short_window(rank, shard):
    """Two of three micro-batches, then flush, three times; return what differs from the mean of the two."""
    net = make_net(torch.float32)
    optimizer = Settings(shard, gradient_accumulation_steps=3, dtype=torch.float32).make(net)
    pair = Pair.__new__(Pair)
    pair.net, pair.problems = net, []
    pair.one = OneProcess(Settings(shard, gradient_accumulation_steps=2, dtype=torch.float32), 2)
    for number in range(3):
        for i in range(2):
            net(Backward(), (number, i, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            for r in range(2):
                pair.one.backward(r, Backward(), (number, i, r))
            pair.one.step()
        pair.check(not optimizer.window_ends, f"window {number} ended early")
        optimizer.flush()
        pair.check(optimizer.window_ends, f"window {number} did not end")
        pair.compare(f"window {number}")
        optimizer.zero_grad()
        pair.one.lose_window()
    return pair.problems


@pytest.mark.parametrize("shard", SHARDS)
def test_flush_ends_a_short_window_on_all_ranks(shard):
    assert run(flush_a_short_window, 2, shard, reuses=True) == [[], []]


def put_under_ddp(rank, when):
    net = make_net(torch.float32)
    texts = []
    ddp = nn.parallel.DistributedDataParallel(net) if when == "before" else None
    try:
        optimizer = Settings("none").make(net)
        ddp = nn.parallel.DistributedDataParallel(net) if ddp is None else ddp
        ddp(Backward(), (0, rank)).backward()
        optimizer.step()
    except RuntimeError as error:
        texts.append(str(error))
    return texts


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_model_that_ddp_holds_is_refused(when):
    for texts in run(put_under_ddp, 2, when):
        assert len(texts) == 1
        assert "DistributedDataParallel" in texts[0]


def ask_without_a_group(rank):
    dist.destroy_process_group()
    net = make_net(torch.float32)
    texts = []
    for shard in ("optimizer", "gradients"):
        try:
            optimizer = Settings(shard).make(net)
            net(Backward(), (0,)).backward()
            optimizer.step()
            texts.append("trained")
            optimizer.unwrap()
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return texts


def test_a_shard_on_one_process_without_torchrun_trains_as_one_rank():
    assert run(ask_without_a_group, 1) == [["trained", "trained"]]


def test_importing_fusedopt_needs_no_process_group():
    assert not dist.is_initialized()
    assert fusedopt.FusedMainGradOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0)).window_ends


# SGD(fused=True) is not among them: torch's refuses a step in which some momentum is there, and some is not.
FUSED = {name: functools.partial(getattr(torch.optim, name), lr=0.1, fused=True) for name in ("AdamW", "Adagrad")}


def late_state_program(seed, world_size, num_windows=10):
    """Return for each window whether state of a layer is deleted before, and a factor by rank and layer, or None."""
    random = Random(seed)
    factors = [None, None, 2.0, -6.0, 4.0, 8.0]
    windows = []
    for _ in range(num_windows):
        deleted = random.choice([None, None, None, 0, 1, 2])
        by_rank = [[random.choice(factors) for _ in range(3)] for _ in range(world_size)]
        if random.random() < 0.4:
            by_rank[random.randrange(world_size)][random.randrange(3)] = math.nan
        windows.append((deleted, by_rank))
    return windows


def late_state(rank, world_size, inner, shard, seeds):
    alone = dist.new_group([rank], use_local_synchronization=True)
    with recorded_warnings():  # steps are skipped
        return [
            problem for seed in seeds for problem in late_state_problems(rank, world_size, inner, shard, alone, seed)
        ]


def late_state_problems(rank, world_size, inner, shard, alone, seed):
    pairs = []
    for settings in ({"shard": shard}, {"process_group": alone}):
        torch.manual_seed(seed)
        net = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))
        pairs.append((net, fusedopt.FusedMainGradOptimizer(FUSED[inner](net.parameters()), **settings)))
    (net, optimizer), (net_of_one, one) = pairs
    for number, (deleted, by_rank) in enumerate(late_state_program(seed, world_size)):
        if deleted is not None:
            optimizer.state.pop(net[deleted].weight, None)
            one.state.pop(net_of_one[deleted].weight, None)
        late_state_backward(net, by_rank[rank], 1)
        for factors in by_rank:
            late_state_backward(net_of_one, factors, world_size)
        for _, each in pairs:
            each.step()
            each.zero_grad()
        if optimizer.skipped_steps != one.skipped_steps:
            yield f"seed {seed}, window {number}: skipped {optimizer.skipped_steps}, needed {one.skipped_steps}"
        for param, needed in zip(net.parameters(), net_of_one.parameters(), strict=True):
            if not torch.isfinite(needed).all() or not torch.equal(param, needed):
                yield f"seed {seed}, window {number}: parameters"


def late_state_backward(net, factors, divisor):
    terms = [net[i].weight.sum() * factor for i, factor in enumerate(factors) if factor is not None]
    if terms:
        (sum(terms) / divisor).backward()


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("inner", FUSED)
def test_steps_that_make_state_on_some_ranks_only_are_left_out_on_all_or_on_none(inner, shard):
    assert run(late_state, 2, 2, inner, shard, range(8), reuses=True) == [[], []]


def late_state_of_stages(rank, seeds):
    """Each rank holds layers of its own, and all share one norm."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    history = []
    with recorded_warnings():
        for seed in seeds:
            net = nn.ModuleList(nn.Linear(32, 64, bias=False) for _ in range(3))
            inner = FUSED["AdamW"](net.parameters())
            options = {"process_group": alone, "norm_group": dist.group.WORLD, "max_grad_norm": 1.0}
            optimizer = fusedopt.FusedMainGradOptimizer(inner, **options)
            for _, by_rank in late_state_program(seed, 2):
                late_state_backward(net, by_rank[rank], 1)
                before = [param.clone() for param in net.parameters()]
                has_grad = any(param.grad is not None for param in net.parameters())
                optimizer.step()
                optimizer.zero_grad()
                was_moved = not all(map(torch.equal, before, net.parameters()))
                assert was_moved == (has_grad and not optimizer.step_was_skipped)
                has_nan = any(factor is not None and math.isnan(factor) for row in by_rank for factor in row)
                assert optimizer.step_was_skipped == has_nan
                history.append((has_nan, float(optimizer.grad_norm)))
    return history


def test_stages_that_share_a_norm_decide_alike_also_where_some_of_them_make_state():
    first, second = run(late_state_of_stages, 2, range(8))
    assert any(has_nan for has_nan, _ in first)
    assert [norm for has_nan, norm in first if not has_nan] == [norm for has_nan, norm in second if not has_nan]
