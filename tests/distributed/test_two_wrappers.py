"""Several wrappers over the same ranks: exact whatever each rank reaches in whatever order, or all ranks raise.

Programs run on ranks and are compared with one process of plain torch: per-parameter sums of each rank, their mean, the
bare optimizer. Gradients are small multiples of 12, whatever the weights are, so that sums and means are exact in fp32.
"""

import contextlib
import copy
import dataclasses
import datetime
import gc
import itertools
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist
from launcher import GROUP_SECONDS, at, run, settle
from torch import nn

import fusedopt
from fusedopt.sharding.process_groups import timeout_of

SHARDS = ("none", "optimizer", "gradients")
SIZES = {"equal": (40, 40, 40), "unequal": (5, 1100, 33)}
LR = 0.125


@dataclasses.dataclass(frozen=True)
class Backward:
    """One backward through some wrappers' parameters, in this order; twice means two uses."""

    path: tuple[int, ...]
    paused: tuple[int, ...] = ()  # wrappers under no_sync()


@dataclasses.dataclass(frozen=True)
class Step:
    """`step()` of some wrappers, in this order."""

    order: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Clear:
    """`zero_grad()` of some wrappers."""

    which: tuple[int, ...]


class Several:
    """Wrappers ``0, 1, ...`` with two parameters (and buckets) each, and the one process that they must equal."""

    def __init__(self, rank, world_size, shard, overlap=True, sizes="unequal", num=2):
        at(f"{shard}, overlap {overlap}, {sizes} sizes, {num} wrappers")
        self.rank, self.shard = rank, shard
        self.params, self.wrappers, self.mains, self.bares = [], [], [], []
        self.problems = []
        for size in SIZES[sizes][:num]:
            self.add(size, shard=shard, overlap_grad_reduce=overlap)
        self.sums = [{} for _ in range(world_size)]
        self.num_backwards = 0
        self.local = set()  # wrappers whose gradients were not reduced since a backward under no_sync()

    def add(self, size, **settings):
        number = len(self.params)
        shapes = {f"p{number}.first": (size,), f"p{number}.second": (3, size + 1)}
        named = [(name, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))) for name, shape in shapes.items()]
        inner = torch.optim.SGD([{"params": [pair]} for pair in named], lr=LR, momentum=0.5)
        self.wrappers.append(fusedopt.FusedMainGradOptimizer(inner, **settings))
        self.params.append(dict(named))
        self.mains.append({name: nn.Parameter(torch.zeros(p.shape)) for name, p in named})
        self.bares.append(torch.optim.SGD(self.mains[-1].values(), lr=LR, momentum=0.5))

    def term(self, number, name, rank, position):
        """Return the gradient that one use of a parameter on one rank brings."""
        shape = self.mains[number][name].shape
        values = torch.arange(shape.numel()) % 5 - 2 + (rank + 1) * (position + 1 + self.num_backwards % 3)
        return 12.0 * values.view(shape)

    def play(self, row):
        """Do this rank's part of a row, replay all of it, and compare."""
        self.act(row[self.rank])
        for rank, event in enumerate(row):
            if isinstance(event, Backward):
                self.count(rank, event)
        if isinstance(row[0], Clear):
            for sums in self.sums:
                for name in [name for number in row[0].which for name in self.params[number]]:
                    sums.pop(name, None)
        elif isinstance(row[0], Step):
            for number in row[0].order:
                self.step_one(number)
        self.num_backwards += isinstance(row[0], Backward)
        self.note_local(row)
        self.compare(row)

    def note_local(self, row):
        if isinstance(row[0], Backward):
            touched = {number for event in row for number in event.path}
            paused = {number for number in touched if number in row[0].paused}
            self.local = (self.local - touched) | paused
        else:
            self.local -= set(row[0].order if isinstance(row[0], Step) else row[0].which)

    def act(self, event):
        if isinstance(event, Step):
            for number in event.order:
                self.wrappers[number].step()
        elif isinstance(event, Clear):
            for number in event.which:
                self.wrappers[number].zero_grad()
        elif isinstance(event, Backward) and event.path:
            total = 0.0
            for position, number in enumerate(event.path):
                for name, param in self.params[number].items():
                    total = total + (param.float() * self.term(number, name, self.rank, position)).sum()
            with contextlib.ExitStack() as stack:
                for number in event.paused:
                    stack.enter_context(self.wrappers[number].no_sync())
                total.backward()

    def count(self, rank, event):
        for position, number in enumerate(event.path):
            for name in self.params[number]:
                term = self.term(number, name, rank, position)
                self.sums[rank][name] = self.sums[rank][name] + term if name in self.sums[rank] else term

    def mean(self, name):
        found = [sums[name] for sums in self.sums if name in sums]
        return torch.stack(found).sum(0) / len(self.sums) if found else None

    @torch.no_grad()
    def step_one(self, number):
        grads = {name: self.mean(name) for name in self.params[number]}
        for name, main in self.mains[number].items():
            main.grad = grads[name]
        self.bares[number].step()
        for sums in self.sums:  # after a step all ranks hold the mean, and the mean of that is itself
            sums.update({name: grad for name, grad in grads.items() if grad is not None})

    def compare(self, row):
        for number, params in enumerate(self.params):
            for name, param in params.items():
                want = self.mains[number][name].detach()
                assert torch.isfinite(want).all()
                if not torch.equal(param, want.bfloat16()):
                    self.problems.append(f"after {row}: {name} is {param.flatten()[:3]} for {want.flatten()[:3]}")
                self.compare_grad(row, number, name, param)

    def compare_grad(self, row, number, name, param):
        want, is_backward = self.mean(name), isinstance(row[0], Backward)
        if self.shard == "gradients":
            if is_backward and (param.grad is not None or param.main_grad is not None):
                self.problems.append(f"after {row}: {name} holds a gradient outside its shard")
            return
        if number in self.local or (self.shard == "optimizer" and not isinstance(row[0], Step)):
            return
        if self.shard == "optimizer" and number not in row[0].order:
            return
        if (param.grad is None) != (want is None):
            self.problems.append(f"after {row}: .grad of {name} is None: {param.grad is None}")
        elif want is not None and self.shard == "none" and not torch.equal(param.grad, want):
            self.problems.append(
                f"after {row}: .grad of {name} is {param.grad.flatten()[:3]}, not {want.flatten()[:3]}"
            )

    def end_window(self, order=None):
        order = tuple(range(len(self.wrappers))) if order is None else order
        self.play([Step(order)] * len(self.sums))
        self.play([Clear(order)] * len(self.sums))

    def lose(self):
        """Clear everything on this rank, and in the one process."""
        for wrapper in self.wrappers:
            wrapper.zero_grad()
        self.sums = [{} for _ in self.sums]

    def plain_windows(self):
        for _ in range(2):
            self.play([Backward(tuple(range(len(self.wrappers))))] * len(self.sums))
            self.end_window()


B = Backward
RANKS = (2, 3)
CASES = list(itertools.product(SHARDS, (True, False), SIZES))


def assert_exact(results):
    problems = [f"rank {rank}: {text}" for rank, found in enumerate(results) for text in found]
    assert not problems, "\n".join([f"{len(problems)} problem(s)", *problems[:8]])


# -- what was reported


def one_backward_over_two(rank, shard, overlap, sizes):
    """Rank 0 reaches b and a, rank 1 only b."""
    several = Several(rank, 2, shard, overlap, sizes)
    for paths in (((1, 0), (1,)), ((0, 1), (0,)), ((0,), (1,)), ((1,), (0,)), ((0, 1, 0), (1, 0))):
        several.play([B(path) for path in paths])
        several.end_window()
        several.play([B(path) for path in paths])
        several.play([B(path) for path in reversed(paths)])
        several.end_window()
    several.plain_windows()
    return several.problems


@pytest.mark.parametrize(("shard", "overlap", "sizes"), CASES)
def test_a_backward_over_two_wrappers_may_reach_one_of_them_on_some_ranks_only(shard, overlap, sizes):
    assert_exact(run(one_backward_over_two, 2, shard, overlap, sizes, reuses=True))


def the_reported_numbers(rank, shard):
    a, b = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    wrappers = [fusedopt.FusedMainGradOptimizer(torch.optim.SGD([p], lr=1.0), shard=shard) for p in (a, b)]
    loss = b.mul(20).sum() + a.mul(2).sum() if rank == 0 else (b * 200).sum()
    loss.backward()
    grads = [p.grad.tolist() for p in (a, b)] if shard == "none" else None
    for wrapper in wrappers:
        wrapper.step()
    return grads, a.tolist(), b.tolist()


@pytest.mark.parametrize("shard", SHARDS)
def test_gradients_of_two_wrappers_are_not_exchanged(shard):
    expected = ([[1.0] * 4, [110.0] * 4] if shard == "none" else None, [-1.0] * 4, [-110.0] * 4)
    assert run(the_reported_numbers, 2, shard, reuses=True) == [expected] * 2


def two_critics(rank, world_size, shard, overlap, sizes):
    """One backward through both, whose forwards run in another order on each rank, or a backward each."""
    several = Several(rank, world_size, shard, overlap, sizes)
    orders = [(0, 1) if r % 2 else (1, 0) for r in range(world_size)]
    for _ in range(3):
        several.play([B(order) for order in orders])
        several.end_window()
        for i in range(2):
            several.play([B((order[i],)) for order in orders])
        several.end_window((1, 0))
    return several.problems


@pytest.mark.parametrize(("shard", "overlap", "sizes"), CASES)
@pytest.mark.parametrize("world_size", RANKS)
def test_two_critics_in_another_order_on_each_rank(world_size, shard, overlap, sizes):
    assert_exact(run(two_critics, world_size, world_size, shard, overlap, sizes, reuses=True))


def gan(rank, world_size, shard, overlap):
    """The generator's loss goes through the discriminator, on some ranks only; each steps in its turn."""
    several = Several(rank, world_size, shard, overlap)
    everybody = [None] * world_size
    for iteration in range(4):
        several.play([Clear((0,))] * world_size)
        several.play([B((0, 0)) for _ in everybody])
        several.play([Step((0,))] * world_size)
        several.play([Clear((1,))] * world_size)
        several.play([B((1, 0)) if (r + iteration) % 2 else B((1,)) for r in range(world_size)])
        several.play([Step((1,))] * world_size)
    return several.problems


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_gan_trains_as_one_process(shard, overlap):
    assert_exact(run(gan, 3, 3, shard, overlap, reuses=True))


def a_third_while_two_train(rank, shard):
    """Ranks make a third wrapper where one has had a backward more: what it came for is served first."""
    several = Several(rank, 2, shard)
    several.play([B((0, 1)), B((1,))])
    several.add(17, shard=shard)
    several.play([B((2,)), B((1, 0))])
    several.end_window((2, 0, 1))
    several.plain_windows()
    return several.problems


@pytest.mark.parametrize("shard", SHARDS)
def test_a_third_wrapper_joins_at_any_time(shard):
    assert_exact(run(a_third_while_two_train, 2, shard, reuses=True))


def another_group_of_ranks(rank, shard):
    """One wrapper over all ranks, one over the first two: a backward through both on these."""
    group = dist.new_group([0, 1])
    several = Several(rank, 3, shard, num=1)
    pair = nn.Parameter(torch.zeros(6))
    inner = torch.optim.SGD([pair], lr=1.0)
    wrapper = fusedopt.FusedMainGradOptimizer(inner, shard=shard, process_group=group) if rank < 2 else None
    for _ in range(3):
        total = sum((p * 3.0).sum() for p in several.params[0].values())
        (total + (pair * (rank + 1)).sum() if rank < 2 else total).backward()
        if wrapper is not None:
            wrapper.step()
            wrapper.zero_grad()
        several.wrappers[0].step()
        several.wrappers[0].zero_grad()
    return pair.tolist(), several.params[0]["p0.first"].tolist()


@pytest.mark.parametrize("shard", SHARDS)
def test_wrappers_over_other_ranks_meet_one_group_of_ranks_after_the_other(shard):
    *both, last = run(another_group_of_ranks, 3, shard)
    assert [pair for pair, _ in both] == [[-4.5] * 6] * 2
    assert last[0] == [0.0] * 6
    assert all(found == last[1] and found[0] < 0.0 for _, found in both)


# -- programs


def random_path(rng, num):
    path = rng.choices(range(num), k=rng.randint(1, num + 1))
    rng.shuffle(path)
    return tuple(path)


def random_program(rng, world_size, num, shard):
    """Return rows: backwards through any wrappers on each rank, steps and clears in any order, the same on all.

    Under ``"optimizer"`` ranks meet in steps only. What one rank sent early and all then clear is raised, not mended,
    where others send something else before; so a step comes before each clear.
    """
    rows = []
    for _ in range(10):
        kind = rng.random()
        if kind < 0.6:
            paused = tuple(range(num)) if rng.random() < 0.25 else ()
            rows.append([B(random_path(rng, num), paused) for _ in range(world_size)])
        else:
            some = tuple(rng.sample(range(num), rng.randint(1, num)))
            if kind < 0.8 or shard == "optimizer":
                rows.append([Step(some)] * world_size)
            if kind >= 0.8:
                rows.append([Clear(some)] * world_size)
    return rows


def random_programs(rank, world_size, seeds):
    problems = []
    for seed, shard in itertools.product(seeds, SHARDS):
        settle()
        rng = random.Random(f"{seed} {shard}")
        num = rng.choice((2, 2, 3))
        several = Several(rank, world_size, shard, rng.random() < 0.7, rng.choice(list(SIZES)), num)
        for row in random_program(rng, world_size, num, shard):
            several.play(row)
        several.end_window()
        several.plain_windows()
        problems += [f"seed {seed}, {shard}: {text}" for text in several.problems]
    return problems


@pytest.mark.parametrize("seeds", [range(0, 12), range(12, 24)], ids=str)
@pytest.mark.parametrize("world_size", RANKS)
def test_random_programs_over_several_wrappers_are_one_process(world_size, seeds):
    assert_exact(run(random_programs, world_size, world_size, seeds, reuses=True))


def wild_programs(rank, world_size, seeds):
    """Ranks differ in the number of their backwards, in clears and in the order of steps."""
    problems, raised = [], []
    for seed, shard in itertools.product(seeds, SHARDS):
        settle()
        rng = random.Random(f"wild {seed} {shard}")
        several = Several(rank, world_size, shard, rng.random() < 0.7, rng.choice(list(SIZES)), 2)
        for window in range(4):
            rows = [[B(random_path(rng, 2) if rng.random() < 0.8 else ()) for _ in range(world_size)] for _ in range(3)]
            order = random_order(rng, world_size)
            try:
                for row in rows:
                    several.act(row[rank])
                    for r, event in enumerate(row):
                        several.count(r, event)
                    several.num_backwards += 1
                several.act(order[rank])
            except RuntimeError as error:
                raised.append((seed, shard, window, str(error)))
                several.lose()
                break  # parameters of a wrapper that had stepped are ahead
            for number in order[0].order:
                several.step_one(number)
            several.compare(order)
            several.play([Clear((0, 1))] * world_size)
        problems += [f"seed {seed}, {shard}: {text}" for text in several.problems]
    return problems, raised


def random_order(rng, world_size):
    order = [Step((0, 1)) if rng.random() < 0.5 else Step((1, 0))] * world_size
    if rng.random() < 0.1:
        order[0] = Step(tuple(reversed(order[0].order)))
    return order


@pytest.mark.parametrize("world_size", RANKS)
def test_wild_programs_are_exact_or_raise_on_all_ranks(world_size):
    results = run(wild_programs, world_size, world_size, range(10), reuses=True)
    assert_exact([problems for problems, _ in results])
    raised = [[where[:3] for where in found] for _, found in results]
    assert all(found == raised[0] for found in raised)
    assert 0 < len(raised[0]) < 30  # of 30 programs
    assert any("same order" in where[3] for where in results[0][1])


# -- what cannot be exact raises on all ranks, and training goes on


def raised_by(action, kinds=RuntimeError):
    try:
        action()
    except kinds as error:
        return str(error)
    return None


def steps_in_another_order(rank, shard):
    several = Several(rank, 2, shard)
    texts = []
    for _ in range(2):
        several.play([B((0, 1)), B((1, 0))])
        texts.append(raised_by(several.wrappers[rank].step))
        several.end_window()  # nothing was changed: the same window can still step
    texts.append(raised_by(lambda: several.wrappers[rank].clip_grad_norm_(1.0)))
    several.lose()
    several.plain_windows()
    return several.problems, texts


@pytest.mark.parametrize("shard", SHARDS)
def test_steps_in_another_order_on_each_rank_raise_on_all_by_name(shard):
    for problems, texts in run(steps_in_another_order, 2, shard, reuses=True):
        assert problems == []
        for text, method in zip(texts, ("step()", "step()", "clip_grad_norm_()"), strict=True):
            assert "in the same order on all of them" in text
            assert f"rank 0 is in {method} of optimizer 0 (p0.first and 1 more)" in text
            assert f"rank 1 is in {method} of optimizer 1 (p1.first and 1 more)" in text


def other_methods(rank, shard):
    several = Several(rank, 2, shard)
    saved = several.wrappers[0].state_dict()
    several.play([B((0, 1)), B((1,))])
    extra = {"params": [("extra", nn.Parameter(torch.zeros(3)))]}
    calls = {
        "load_state_dict()": lambda: several.wrappers[0].load_state_dict(saved),
        "consolidate_state_dict()": lambda: several.wrappers[0].consolidate_state_dict(),
        "add_param_group()": lambda: several.wrappers[0].add_param_group(extra),
        "FusedMainGradOptimizer()": lambda: several.add(9, shard=shard),
        "broadcast_module()": lambda: fusedopt.broadcast_module(nn.Linear(2, 2)),
    }
    texts = {name: raised_by(call if rank == 0 else several.wrappers[1].step) for name, call in calls.items()}
    several.end_window()
    several.plain_windows()
    return several.problems, texts


@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_beside_any_other_method_that_all_ranks_call_raises_on_all(shard):
    for problems, texts in run(other_methods, 2, shard, reuses=True):
        assert problems == []
        for name, text in texts.items():
            assert f"rank 0 is in {name}" in text
            assert "rank 1 is in step() of optimizer 1" in text


def dropped_on_one_rank(rank, how):
    several = Several(rank, 2, "none")
    several.play([B((0, 1)), B((1,))])
    several.end_window()
    if rank == 1:
        if how == "drop":
            several.wrappers[0] = None
            gc.collect()
        else:
            several.wrappers[0].unwrap()
    texts = [raised_by(lambda: several.act(B((0, 1)) if rank == 0 else B((1,))))]
    texts.append(raised_by(several.wrappers[0 if rank == 0 else 1].step))
    several.wrappers[1].zero_grad()
    several.act(B((1,)))
    several.wrappers[1].step()
    return texts, several.params[1]["p1.first"].detach()


@pytest.mark.parametrize("how", ["drop", "unwrap"])
def test_a_wrapper_that_one_rank_dropped_raises_on_all_where_others_go_on_with_it(how):
    results = run(dropped_on_one_rank, 2, how, reuses=True)
    for texts, _ in results:
        assert all("optimizer 0 was dropped or unwrapped on rank 1" in text for text in texts)
    assert torch.equal(results[0][1], results[1][1])


def copied_on_one_rank(rank, shard):
    """An exponential average on rank 0 is a copy that never communicates; a copy on all ranks trains."""
    several = Several(rank, 2, shard)
    several.play([B((0, 1)), B((1,))])
    average = copy.deepcopy((several.params[0], several.wrappers[0])) if rank == 0 else None
    several.end_window()
    counts = dict(several.wrappers[0]._comm.counts)
    params, wrapper = copy.deepcopy((several.params[0], several.wrappers[0]))
    assert dict(several.wrappers[0]._comm.counts) == counts
    assert dict(wrapper._comm.counts) == {}
    original = several.params[0], several.wrappers[0]
    for _ in range(2):  # the copy goes on exactly as the original would, beside the other one
        several.params[0], several.wrappers[0] = params, wrapper
        several.play([B((1, 0)), B((0,))])
        several.end_window((1, 0))
    several.params[0], several.wrappers[0] = original
    for name, param in params.items():
        several.params[0][name].data.copy_(param)
    text = None
    if rank == 0:
        term = sum(param.float().sum() for param in average[0].values())
        text = raised_by(lambda: (term.backward(), average[1].step()))
    else:
        text = raised_by(lambda: (several.act(B((1,))), several.wrappers[1].step()))
    several.lose()
    return several.problems, text


@pytest.mark.parametrize("shard", SHARDS)
def test_copies_communicate_when_they_are_first_used_on_all_ranks_and_never_on_some(shard):
    for problems, text in run(copied_on_one_rank, 2, shard, reuses=True):
        assert problems == []
        assert "copy of an optimizer is used for the first time, on some ranks only" in text


class Pause(torch.autograd.Function):
    """Stop a backward until `leave`."""

    entered, leave = threading.Event(), threading.Event()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Pause.entered.set()
        Pause.leave.wait(20.0)
        return grad


def a_backward_in_another_thread(rank):
    """Rank 1 reduces wrapper 1 while on rank 0 a backward through it runs, in a thread, beside a step of wrapper 0."""
    several = Several(rank, 2, "none")
    if rank == 1:
        texts = [raised_by(lambda: several.act(B((1,))))]
    else:
        first, second = several.params[1].values()
        paused = Pause.apply((first.float() * 12.0).sum())  # made first, so the gradient of the second comes before it
        thread = threading.Thread(target=(paused + (second.float() * 12.0).sum()).backward)
        thread.start()
        assert Pause.entered.wait(20.0)
        texts = [raised_by(several.wrappers[0].step)]
        Pause.leave.set()
        thread.join()
    several.wrappers[1].step()
    theirs = several.term(1, "p1.first", 1, 0)
    return texts, torch.equal(several.params[1]["p1.first"].float(), -LR * (12.0 + theirs) / 2)


def test_a_wrapper_whose_backward_runs_in_another_thread_is_not_reduced_for_others():
    for texts, is_exact in run(a_backward_in_another_thread, 2):
        assert "on rank 0 a backward through it is running" in texts[0]
        assert is_exact


def a_backward_beside_a_meeting(rank):
    several = Several(rank, 2, "none")
    if rank == 1:
        dist.recv(torch.zeros(1), 0)
        several.wrappers[0].step()
        text = None
    else:
        thread = threading.Thread(target=several.wrappers[0].step)
        thread.start()
        while several.wrappers[0]._comm.channel._thread is None:
            time.sleep(0.01)
        text = raised_by(lambda: several.act(B((1,))))
        dist.send(torch.zeros(1), 1)
        thread.join()
    several.lose()
    several.plain_windows()
    return several.problems, text


def test_a_backward_that_begins_while_another_thread_is_in_a_meeting_is_refused():
    (problems, text), (others, _) = run(a_backward_beside_a_meeting, 2)
    assert problems == others == []
    assert "a backward begins while another thread is in step() of optimizer 0" in text


def groups_that_differ(rank, what):
    """One rank's group is refused, or another one than rank 0's; then all add an equal one."""
    several = Several(rank, 2, "none")
    several.plain_windows()
    wrapper = several.wrappers[0]
    params = several.params[0]["p0.first"] if rank == 1 and what == "refused" else nn.Parameter(torch.zeros(3 + rank))
    text = raised_by(lambda: wrapper.add_param_group({"params": [("extra", params)]}), (RuntimeError, ValueError))
    assert [len(group["params"]) for group in wrapper.param_groups] == [1, 1]
    several.plain_windows()
    last = nn.Parameter(torch.full((3,), 1.0 + rank))
    wrapper.add_param_group({"params": [("last", last)]})
    (last * 12.0 * (1 + rank)).sum().backward()
    wrapper.step()
    return several.problems, text, last.tolist()


@pytest.mark.parametrize(
    ("what", "says"), [("refused", "already has a main_grad"), ("other", "where rank 0 has extra (torch.float32, (3,)")]
)
def test_a_group_that_one_rank_refuses_is_added_on_none(what, says):
    for problems, text, last in run(groups_that_differ, 2, what, reuses=True):
        assert problems == []
        assert says in text
        assert last == [1.0 - LR * 18.0] * 3


# -- groups


def num_groups():
    return len(dist.distributed_c10d._world.pg_map)


def wrappers_in_a_loop(rank, shard):
    """Each wrapper is dropped before the next is made, but one rank keeps one, and one is left with a round begun."""
    several = Several(rank, 2, shard)
    several.plain_windows()
    before = num_groups()
    kept = []
    for i in range(6):
        again = Several(rank, 2, shard, num=1)
        again.plain_windows()
        if i == 2:
            again.wrappers[0].unwrap()
        if i == 1 and rank == 1:
            kept.append(again)
        del again
    after = num_groups()
    left = Several(rank, 2, shard, num=1)
    if rank == 0 and shard != "none":
        with contextlib.suppress(InjectedError):
            (Failing.apply(next(iter(left.params[0].values())).float().sum())).backward()
    del left
    last = Several(rank, 2, shard)
    last.plain_windows()
    several.plain_windows()
    return several.problems + last.problems, after - before


class InjectedError(Exception):
    """What a failing backward raises."""


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise InjectedError


@pytest.mark.parametrize("shard", SHARDS)
def test_groups_are_used_again_where_all_ranks_are_done_with_them(shard):
    for problems, num_made in run(wrappers_in_a_loop, 2, shard):
        assert problems == []
        assert num_made == 2  # the first of the loop's, and one more while rank 1 keeps its own


def no_collective_no_group(rank):
    before = num_groups()
    net = nn.Linear(3, 3)
    lone = dist.new_group([rank], use_local_synchronization=True)
    fusedopt.FusedMainGradOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), process_group=lone)
    assert num_groups() == before + 1  # the one that was given
    fusedopt.broadcast_module(net)
    after = num_groups()
    fusedopt.broadcast_module(net)
    several = Several(rank, 2, "optimizer", num=1)
    several.plain_windows()
    assert num_groups() == after  # broadcast_module gives its groups back
    return several.problems


def test_who_communicates_nothing_has_no_groups():
    assert_exact(run(no_collective_no_group, 2))


# -- timeouts


TIMEOUT = datetime.timedelta(seconds=5)


def timeouts(rank):
    """Return the timeouts of all groups made, for wrappers that were given nothing, a group and a mesh."""
    found = []
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for given in ({}, {"process_group": dist.new_group([0, 1, 2, 3], timeout=TIMEOUT)}, {"device_mesh": mesh}):
        comm = fusedopt.FusedMainGradOptimizer(
            torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1), shard="optimizer", **given
        )._comm
        groups = (comm._all, comm._shard, comm._replicate)
        found.append([timeout_of(group).total_seconds() for group in groups if group is not None])
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], timeout=TIMEOUT, use_local_synchronization=True)
    comm = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(9))], lr=0.1), process_group=pair)
    found.append([timeout_of(group).total_seconds() for group in (comm._comm._all, comm._comm._control)])
    return found


def test_groups_wait_as_long_as_the_users():
    for found in run(timeouts, 4):
        assert found == [[GROUP_SECONDS] * 2, [5.0] * 2, [GROUP_SECONDS] * 3, [5.0] * 2]


def a_missing_rank(rank, folder, where):
    """Return what the other rank raised, and after how many seconds."""
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    several = Several(rank, 2, "none")
    several.plain_windows()
    calls = {
        "step": several.wrappers[1].step,
        "backward": lambda: several.act(B((0, 1))),
        "constructor": lambda: several.add(4),
        "reduce": lambda: several.wrappers[0]._comm.start_all_reduce(torch.zeros(4)).wait(),
    }
    result = None
    if rank == 0:
        start = time.monotonic()
        text = raised_by(calls[where])
        result = text, time.monotonic() - start
        (folder / "done").touch()
    while not (folder / "done").exists():
        time.sleep(0.05)
    return result


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("step", "step() of optimizer 1 (p1.first and 1 more)"),
        ("backward", "the end of a backward through optimizer 0 (p0.first and 1 more) and optimizer 1 (p1.first"),
        ("constructor", "FusedMainGradOptimizer()"),
        ("reduce", "the reduction of gradients of optimizer 0"),
    ],
)
def test_a_missing_rank_ends_the_others_in_the_users_time_and_they_say_what_they_waited_for(tmp_path, where, says):
    (text, seconds), _ = run(a_missing_rank, 2, tmp_path, where)
    assert f"rank 0 is in {says}" in text
    assert "waited for the others of ranks [0, 1], 5 s at most" in text
    assert 4.0 < seconds < 30.0
