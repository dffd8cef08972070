"""Programs that ranks play, and the one process that they must equal bit for bit.

A *program* is a list of windows, a window a list of rows, a row what each rank does next: backwards (through a
path of blocks, possibly none, possibly failing), clears, steps. `OneProcess` replays all ranks in one process of
plain torch: per-parameter fp32 sums of each rank, their mean, the bare optimizer. It knows no buckets, no
collectives and no order of arrival.

Every gradient is a multiple of 12 and small, whatever the weights are: each block sees data of its own, and the
blocks hang together by a carry that is zero. So sums over micro-batches and ranks, and their means for 2, 3 or 4
ranks, are exact in fp32 and in bf16, in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusedopt
from tests.distributed.launcher import at, run, settle

NUM_BLOCKS = 5
ALL = tuple(range(NUM_BLOCKS))
_ROWS = 4  # of a micro-batch
_UNIT = 12  # what every gradient is a multiple of
_TOKENS = 64

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.125, weight_decay=0.25),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5, weight_decay=0.25),
    "plain SGD": lambda groups: torch.optim.SGD(groups, lr=0.125),
}


# -- the model


class Block(nn.Module):
    """A layer, the loss term that it alone decides, and a carry that makes blocks depend on each other."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.shape_in = (_ROWS,) if kind == "embedding" else (_ROWS, width)
        self.shape_out = (_ROWS, width) if kind in ("embedding", "scale") else (_ROWS, width + 8)
        if kind == "embedding":
            self.layer = nn.Embedding(_TOKENS, width)
        elif kind == "scale":
            self.layer = nn.Linear(1, width, bias=False)  # its weight is used as a vector
        else:
            self.layer = nn.Linear(width, width + 8, bias=kind == "linear")

    def forward(self, x: Tensor, target: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind == "embedding":
            out = self.layer(x) + carry
        elif self.kind == "scale":
            out = (x + carry) * self.layer.weight.squeeze(1)
        else:
            out = self.layer(x + carry)
        return (out.float() * target).sum(), out.sum() * 0.0

    def data(self, dtype: torch.dtype, key: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return input and target of a micro-batch; ``key`` tells it from all others."""
        return _data(self.kind == "embedding", self.shape_in, self.shape_out, dtype, tuple(key))


@functools.cache  # every program is played under many settings, on the same data
def _data(
    is_embedding: bool, shape_in: tuple[int, ...], shape_out: tuple[int, ...], dtype: torch.dtype, key: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    seed = 0
    for number in key:
        seed = (seed * 1_000_003 + number + 1) % 2**31
    generator = torch.Generator().manual_seed(seed)
    target = _UNIT * torch.randint(-1, 2, shape_out, generator=generator).float()
    if is_embedding:
        return torch.randint(0, _TOKENS, shape_in, generator=generator), target
    return torch.randint(-2, 3, shape_in, generator=generator).to(dtype), target


class Net(nn.Module):
    """Blocks of several kinds; 5 parameters cross the cuts between shards of 2 and 3 ranks."""

    def __init__(self, width: int = 40) -> None:
        super().__init__()
        kinds = ["embedding", "linear", "scale", "linear without bias", "linear"]
        self.blocks = nn.ModuleList(Block(kind, width) for kind in kinds)

    def forward(self, backward: Backward, key: Sequence[int]) -> Tensor:
        dtype = next(self.parameters()).dtype
        carry = torch.zeros((), dtype=dtype, requires_grad=True)
        total = torch.zeros(())
        for position, index in enumerate(backward.path):
            if position == backward.fails_at:
                carry = _FailInBackward.apply(carry)
            block = self.blocks[index]
            inputs = (*block.data(dtype, (*key, position)), carry)
            if backward.recompute is None:
                term, carry = block(*inputs)
            else:
                term, carry = checkpoint(block, *inputs, use_reentrant=backward.recompute == "reentrant")
            total = total + term
        if backward.fails_at == len(backward.path):
            carry = _FailInBackward.apply(carry)
        return total + carry.float()


class InjectedError(Exception):
    """What a failing backward raises."""


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, carry):
        return carry.clone()

    @staticmethod
    def backward(ctx, grad):
        raise InjectedError


def make_net(dtype: torch.dtype, width: int = 40, seed: int = 7) -> Net:
    """Return a `Net` whose weights depend on ``seed`` alone."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds GPUs, too, which is ten times as slow
    return Net(width).to(dtype)


def groups_of(net: nn.Module, num_groups: int) -> list[dict[str, Any]]:
    """Return named parameter groups: one per block, or fewer with neighbouring blocks together."""
    groups: list[dict[str, Any]] = [{"params": []} for _ in range(num_groups)]
    for name, param in net.named_parameters():
        index = int(name.split(".")[1]) * num_groups // NUM_BLOCKS
        groups[index]["params"].append((name, param))
    return groups


# -- what a rank does


@dataclasses.dataclass(frozen=True)
class Backward:
    """One forward and backward.

    Args:
        path: blocks in the order of the forward; one may come twice, and there may be none.
        fails_at: position in ``path``; the backward raises when the blocks from there on have their gradients.
        sync: False for a backward under ``no_sync()``.
        recompute: None, ``"reentrant"`` or ``"non-reentrant"``: every block is a checkpointed region.
        times: calls of ``backward``, all but the last with ``retain_graph=True``.
    """

    path: tuple[int, ...] = ALL
    fails_at: int | None = None
    sync: bool = True
    recompute: str | None = None
    times: int = 1

    def arrived(self) -> list[int]:
        """Return the positions in ``path`` whose gradients are accumulated when it ends, or fails."""
        first = self.fails_at or 0
        arrived = range(first, len(self.path))
        if self.recompute == "reentrant":  # every region is a backward of its own
            return list(arrived)
        return [p for p in arrived if all(q >= first for q, block in enumerate(self.path) if block == self.path[p])]


@dataclasses.dataclass(frozen=True)
class Clear:
    """Clear gradients: of all parameters by ``"optimizer"`` or ``"model"``, or ``.grad = None`` of some blocks."""

    how: str = "optimizer"
    blocks: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """`optimizer.step()`."""


Event = Backward | Clear | Step
Row = tuple[tuple[Event, ...], ...]  # by rank


@dataclasses.dataclass(frozen=True)
class Window:
    """Rows up to and with a step.

    Args:
        rows: what each rank does, row by row; ranks are compared with one process at the end of each.
        raises: a pattern: some row must raise such a RuntimeError on every rank, and the window is lost. All
            ranks then call ``zero_grad()``.
        may_raise: as it is, or a RuntimeError on every rank, which ends the program.
    """

    rows: tuple[Row, ...]
    raises: str | None = None
    may_raise: bool = False


Program = tuple[Window, ...]


def same(world_size: int, *events: Event) -> Row:
    """Return a row in which all ranks do the same (on data of their own)."""
    return (tuple(events),) * world_size


def each(*events_by_rank: Event | Sequence[Event]) -> Row:
    """Return a row from what each rank does: one event, or several."""
    return tuple(tuple(events) if isinstance(events, (list, tuple)) else (events,) for events in events_by_rank)


def plain_window(world_size: int, num_micro_batches: int = 1, merging: bool = False, event: Event | None = None):
    """Return a window of ordinary micro-batches; ``merging`` calls ``step`` after each."""
    event = Backward() if event is None else event
    rows: list[Row] = []
    for i in range(num_micro_batches):
        rows.append(same(world_size, event))
        if merging or i == num_micro_batches - 1:
            rows.append(same(world_size, Step(), Clear()))
    return Window(tuple(rows))


# -- how it is played


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a program is played. Most are those of `MainGradConfig`; ``shard_by`` counts under a shard only."""

    shard: str = "none"
    shard_by: str = "element"
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool | None = None
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "AdamW"
    num_groups: int = NUM_BLOCKS
    width: int = 40
    is_fused: bool = False

    def label(self) -> str:
        """Return the settings that differ from their defaults."""
        fields = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        return ", ".join(f"{name}={value}" for name, value, default in fields if name == "shard" or value != default)

    def make(self, net: Net, **more: Any) -> fusedopt.FusedMainGradOptimizer:
        """Wrap an inner optimizer over ``net``."""
        given = {
            "shard": self.shard,
            "shard_by": None if self.shard == "none" else self.shard_by,
            "overlap_grad_reduce": self.overlap_grad_reduce,
            "overlap_param_gather": self.overlap_param_gather,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "max_grad_norm": self.max_grad_norm,
            "bucket_mib": 1,
        }
        inner = OPTIMIZERS[self.optimizer](groups_of(net, self.num_groups))
        optimizer = fusedopt.FusedMainGradOptimizer(
            inner, **{name: value for name, value in given.items() if value is not None}, **more
        )
        if self.is_fused:
            fusedopt.convert_linears(net)
        return optimizer


class OneProcess:
    """What all ranks together must amount to.

    Args:
        settings: dtype, optimizer, groups, accumulation and clipping are read.
        world_size: ranks that are replayed.
    """

    def __init__(self, settings: Settings, world_size: int) -> None:
        self.settings = settings
        self.net = make_net(settings.dtype, settings.width)
        self.names = [name for name, _ in self.net.named_parameters()]
        params = dict(self.net.named_parameters())
        self.mains = {name: nn.Parameter(p.detach().float().clone()) for name, p in params.items()}
        groups = groups_of(self.net, settings.num_groups)
        self.optimizer = OPTIMIZERS[settings.optimizer](
            [{"params": [self.mains[name] for name, _ in group["params"]]} for group in groups]
        )
        # Per rank: the sum since its last clear. After a step all ranks hold the mean, and the mean of that is itself.
        self.sums: list[dict[str, Tensor]] = [{} for _ in range(world_size)]
        self.num_pending = 0

    def backward(self, rank: int, backward: Backward, key: Sequence[int]) -> None:
        """Add what arrives on ``rank``; each block's gradients by autograd, in the model's dtype, then in fp32."""
        for position in backward.arrived() * backward.times:
            index, sums = backward.path[position], self.sums[rank]
            for name, grad in _gradients(self.settings.dtype, self.settings.width, index, (*key, position)).items():
                sums[name] = sums[name] + grad if name in sums else grad

    def clear(self, rank: int, clear: Clear) -> None:
        """Drop sums, as torch does."""
        if clear.how == "optimizer" and self.num_pending:
            return
        for name in _cleared_names(clear, self.names):
            self.sums[rank].pop(name, None)

    def grads(self) -> dict[str, Tensor]:
        """Return the mean over ranks, of the parameters that have a gradient on any."""
        present = [name for name in self.names if any(name in sums for sums in self.sums)]
        return {
            name: torch.stack([sums[name] for sums in self.sums if name in sums]).sum(0) / len(self.sums)
            for name in present
        }

    def averaged(self) -> dict[str, Tensor]:
        """Return the mean over ranks and micro-batches."""
        return {name: grad / self.settings.gradient_accumulation_steps for name, grad in self.grads().items()}

    def exact_norm(self) -> float:
        """Return the global norm of `averaged`, in float64."""
        return sum(grad.double().square().sum().item() for grad in self.averaged().values()) ** 0.5

    @torch.no_grad()
    def step(self, norm: Tensor | None = None) -> None:
        """Average, clip, step the bare optimizer, round into the model; every k-th call.

        Args:
            norm: what the ranks measured; equal to the exact one but for the rounding of one norm, which
                clipping carries into every element.
        """
        self.num_pending = (self.num_pending + 1) % self.settings.gradient_accumulation_steps
        if self.num_pending:
            return
        grads = self.averaged()
        if self.settings.max_grad_norm is not None and grads:
            coefficient = torch.clamp(self.settings.max_grad_norm / (norm + 1e-6), max=1.0)
            grads = {name: grad * coefficient for name, grad in grads.items()}
        for name, main in self.mains.items():
            main.grad = grads.get(name)
        self.optimizer.step()
        for name, param in self.net.named_parameters():
            if name in grads:
                param.copy_(self.mains[name])
        self.sums = [dict(grads) for _ in self.sums]

    def lose_window(self) -> None:
        """Drop everything since the last step."""
        self.sums = [{} for _ in self.sums]
        self.num_pending = 0


_any_net = functools.cache(make_net)


@functools.cache  # they are the same whatever the weights are, so under all settings that a program is played with
def _gradients(dtype: torch.dtype, width: int, index: int, key: tuple[int, ...]) -> dict[str, Tensor]:
    """Return what one use of block ``index`` brings, by autograd in the model's dtype, then in fp32."""
    block = _any_net(dtype, width).blocks[index]
    term, _ = block(*block.data(dtype, key), torch.zeros((), dtype=dtype))
    params = dict(block.named_parameters(prefix=f"blocks.{index}"))
    grads = torch.autograd.grad(term, list(params.values()))
    return {name: grad.float() for name, grad in zip(params, grads, strict=True)}


def _cleared_names(clear: Clear, names: Sequence[str]) -> list[str]:
    if not clear.blocks:
        return list(names)
    return [name for name in names if int(name.split(".")[1]) in clear.blocks]


@dataclasses.dataclass
class Played:
    """What came of a program on one rank.

    Args:
        label: of the settings.
        problems: differences from one process.
        counts: collectives started, by kind, in each window.
        num_buckets: of the wrapper.
        norms: that were measured, one for each step that acted.
        raised: number of each window that raised, and the text of its RuntimeError.
    """

    label: str
    problems: list[str]
    counts: list[Counter[str]]
    num_buckets: int
    norms: list[float] = dataclasses.field(default_factory=list)
    raised: dict[int, str] = dataclasses.field(default_factory=dict)


def play(rank: int, world_size: int, settings: Settings, program: Program, name: str = "", **more: Any) -> Played:
    """Play ``program`` on this rank and compare with `OneProcess` as it goes; ``more`` goes to the wrapper."""
    player = _Player(rank, world_size, settings, f"{name} [{settings.label()}]".strip(), more)
    played = player.played
    for number, window in enumerate(program):
        before = Counter(player.optimizer._comm.counts)
        player.window(number, window)
        played.counts.append(Counter(player.optimizer._comm.counts) - before)
    player.compare_parameters("at the end")
    player.compare_state()
    return played


def play_all(rank: int, world_size: int, cases: Sequence[tuple[str, Settings, Program]]) -> list[Played]:
    """Play several programs one after the other, each with a model and a wrapper of its own."""
    results = []
    for name, settings, program in cases:
        results.append(play(rank, world_size, settings, program, name))
        settle()
    return results


def play_on_ranks(world_size: int, cases: Sequence[tuple[str, Settings, Program]]) -> list[list[Played]]:
    """Return what came of `play_all` on ``world_size`` ranks, by rank; the ranks play the next programs, too."""
    return run(play_all, world_size, world_size, cases, reuses=True)


def problems_of(results: Sequence[Sequence[Played]]) -> list[str]:
    """Return all problems of all ranks, norms that differ between ranks, and raising on some ranks only."""
    problems = []
    for plays in zip(*results, strict=True):
        problems += [f"rank {rank}: {text}" for rank, played in enumerate(plays) for text in played.problems]
        if len({tuple(played.norms) for played in plays}) > 1:
            problems.append(f"{plays[0].label}: norms differ between ranks: {[played.norms for played in plays]}")
        if len({tuple(played.raised) for played in plays}) > 1:
            problems.append(f"{plays[0].label}: raised on some ranks only: {[played.raised for played in plays]}")
    return problems


def assert_exact(results: Sequence[Sequence[Played]]) -> None:
    """Fail with the first problems, if there are any; see `problems_of`."""
    problems = problems_of(results)
    if problems:
        raise AssertionError("\n".join([f"{len(problems)} problem(s):", *problems[:12]]))


class _Player:
    def __init__(self, rank: int, world_size: int, settings: Settings, label: str, more: dict[str, Any]) -> None:
        at(label)
        self.rank = rank
        self.label = label
        self.settings = settings
        # The first rank's parameters are everybody's.
        self.net = make_net(settings.dtype, settings.width, seed=7 if rank == 0 else 8)
        self.optimizer = settings.make(self.net, **more)
        self.params = dict(self.net.named_parameters())
        self.one = OneProcess(settings, world_size)
        self.num_meetings = [0] * world_size
        self.played = Played(label, [], [], len(self.optimizer._buffers.buckets))
        self.compare_parameters("after wrapping")

    def window(self, number: int, window: Window) -> None:
        try:
            for r, row in enumerate(window.rows):
                where = f"window {number} row {r}"
                at(f"{self.label}, {where}: {row[self.rank]}")
                self._row(number, r, row)
                if window.raises is None:
                    self._replay(number, r, row, where)
                    self._compare(row, where)
        except RuntimeError as error:
            if window.raises is None and not window.may_raise:
                raise
            self.played.raised[number] = str(error)
            if window.raises is not None and re.search(window.raises, str(error)) is None:
                self._problem(f"window {number}: raised {str(error)!r}")
            self.optimizer.zero_grad()
            self.one.lose_window()
            self.num_meetings = [0] * len(self.num_meetings)
            self.compare_parameters(f"window {number}, which raised")
        else:
            if window.raises is not None:
                self._problem(f"window {number}: nothing raised {window.raises!r}")

    def _row(self, number: int, r: int, row: Row) -> None:
        for e, event in enumerate(row[self.rank]):
            if isinstance(event, Step):
                self.optimizer.step()
            elif isinstance(event, Clear):
                self._clear(event)
            else:
                self._backward(event, (number, r, e, self.rank))

    def _clear(self, clear: Clear) -> None:
        if clear.how == "optimizer":
            self.optimizer.zero_grad()
        elif clear.how == "model":
            self.net.zero_grad()
        else:
            for name in _cleared_names(clear, list(self.params)):
                self.params[name].grad = None

    def _backward(self, backward: Backward, key: tuple[int, ...]) -> None:
        context = contextlib.nullcontext() if backward.sync else self.optimizer.no_sync()
        with context:
            loss = self.net(backward, key)
            try:
                for i in range(backward.times):
                    loss.backward(retain_graph=i + 1 < backward.times)
            except InjectedError:
                if backward.fails_at is None:
                    raise
            else:
                if backward.fails_at is not None:
                    self.played.problems.append(f"{self.label}: the backward did not fail")

    def _replay(self, number: int, r: int, row: Row, where: str) -> None:
        """Replay a row of all ranks; steps come last, once for all."""
        for rank, events in enumerate(row):
            stepped = False
            for e, event in enumerate(events):
                if isinstance(event, Backward):
                    self.one.backward(rank, event, (number, r, e, rank))
                elif isinstance(event, Step):
                    stepped = True
                elif not stepped:
                    self.one.clear(rank, event)
        if any(isinstance(event, Step) for event in row[0]):
            self._replay_step(where)
            for rank, events in enumerate(row):
                for event in events[events.index(Step()) + 1 :]:
                    self.one.clear(rank, event)

    def _replay_step(self, where: str) -> None:
        if self.one.num_pending + 1 < self.settings.gradient_accumulation_steps:
            self.one.step()
            return
        norm, exact = self.optimizer.grad_norm, self.one.exact_norm()
        self.played.norms.append(norm.item())
        # Sums of squares are exact within a row of 1024; each row's root and the sum of their squares round.
        num_rows = sum(-(-p.numel() // 1024) for p in self.params.values())
        if not abs(norm.item() - exact) <= (num_rows + 4) * 2**-24 * exact:
            self._problem(f"{where}: the norm is {norm.item()} instead of {exact}")
        self.one.step(norm)

    def _compare(self, row: Row, where: str) -> None:
        if any(isinstance(event, Step) for event in row[self.rank]):
            self.num_meetings = [0] * len(row)  # in a step all ranks meet, however often they did before
            self.compare_parameters(where)
            self._compare_grads(where, after_step=True)
            return
        for rank, events in enumerate(row):
            self.num_meetings[rank] += sum(event.times for event in events if _is_meeting(event))
        if len(set(self.num_meetings)) == 1 and all(events and _is_meeting(events[-1]) for events in row):
            self._compare_grads(where, after_step=False)

    def compare_parameters(self, where: str) -> None:
        """Compare the model's parameters with those of one process."""
        expected = dict(self.one.net.named_parameters())
        for name, param in self.params.items():
            self._equal(f"{where}: {name}", param.detach(), expected[name].detach())

    def _compare_grads(self, where: str, after_step: bool) -> None:
        """Compare ``.grad`` after a reduction, as far as the kind of shard says what it is."""
        if self.settings.shard == "gradients" and len(self.num_meetings) == 1:
            return  # one rank holds everything
        if self.settings.shard == "gradients":
            for name, param in self.params.items():
                if param.grad is not None or param.main_grad is not None:
                    self._problem(f"{where}: {name} holds a gradient outside its shard")
            return
        if self.one.num_pending or not (after_step or self._reduces_in_every_backward()):
            return
        expected = self.one.grads()
        for name, param in self.params.items():
            if (param.grad is None) != (name not in expected):
                self._problem(f"{where}: .grad of {name} is {'None' if param.grad is None else 'not None'}")
            elif param.grad is not None:
                if param.grad is not param.main_grad:
                    self._problem(f"{where}: .grad of {name} is not main_grad")
                if self.settings.shard == "none":  # else it is right on the rank that owns it, and only there
                    self._equal(f"{where}: .grad of {name}", param.grad, expected[name])

    def _reduces_in_every_backward(self) -> bool:
        return self.settings.shard == "none" and self.settings.gradient_accumulation_steps == 1

    def compare_state(self) -> None:
        """Compare main_params and inner state, where this rank has them whole."""
        if self.settings.shard != "none":
            return
        for entry in self.optimizer._buffers.entries:
            name = entry.slot.name
            main = self.one.mains[name]
            self._equal(f"main_param of {name}", entry.main_param.detach(), main.detach())
            expected, got = self.one.optimizer.state[main], self.optimizer.state[entry.param]
            if set(expected) != set(got):
                self._problem(f"state of {name}: {sorted(got)} instead of {sorted(expected)}")
                continue
            for key, value in expected.items():
                if isinstance(value, Tensor):
                    self._equal(f"{key} of {name}", got[key], value)

    def _equal(self, what: str, got: Tensor, want: Tensor) -> None:
        if not torch.isfinite(want).all():
            self._problem(f"{what}: the expected value is not finite")
        elif got.shape != want.shape or got.dtype != want.dtype:
            self._problem(f"{what}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
        elif not torch.equal(got, want):
            differing = (got != want).nonzero()
            first = tuple(differing[0].tolist())
            self._problem(
                f"{what}: {len(differing)} of {want.numel()} elements differ, at {first} "
                f"{got[first].item()} instead of {want[first].item()}"
            )

    def _problem(self, text: str) -> None:
        if len(self.played.problems) < 12:
            self.played.problems.append(f"{self.label}, {text}")


def _is_meeting(event: Event) -> bool:
    """Return whether the ranks meet at the return of this backward, where one reduces in every backward."""
    return isinstance(event, Backward) and event.sync and event.fails_at is None and bool(event.path)
