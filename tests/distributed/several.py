"""Several wrappers over the same ranks, and the one process that they must equal.

Programs run on ranks and are compared with one process of plain torch: per-parameter sums of each rank, their mean, the
bare optimizer. Gradients are small multiples of 12, whatever the weights are, so that sums and means are exact in fp32.
"""

import contextlib
import dataclasses

import torch
from torch import nn

import fusedopt
from tests.deep import paired
from tests.distributed.launcher import at

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
CASES = paired(SHARDS, (True, False), SIZES)  # all combinations in `make test-deep`


def assert_exact(results):
    problems = [f"rank {rank}: {text}" for rank, found in enumerate(results) for text in found]
    assert not problems, "\n".join([f"{len(problems)} problem(s)", *problems[:8]])


def raised_by(action, kinds=RuntimeError):
    try:
        action()
    except kinds as error:
        return str(error)
    return None
