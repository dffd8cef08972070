"""Step inner optimizers piece by piece, where main_params are held in fewer bytes than they have in a step.

    ... -> clip -> [widen -> inner step -> narrow] -> gather

A few main_params of a group, or their state, or both, are widened into scratch, the inner optimizer steps on these
alone, and they are narrowed again, by which the model is written, too, where main_params are. Scratch for one such
piece exists at any time. Inner optimizers whose parameters decide about each other, or that keep views of them, are
refused at construction, by trying.

What an optimizer counts in its groups, or in itself, it counts once a step: each piece finds the values from before the
step, and those that the last one leaves stay.

Knows nothing of ranks, windows or where gradients come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt._torch_private import step_hooks
from fusedopt.buffers.bucket import Entry, answers_late
from fusedopt.buffers.encodings import why_not_split
from fusedopt.buffers.flat import Buffers
from fusedopt.checks import hidden_optimizers
from fusedopt.config import MainGradConfig
from fusedopt.inner.bucket_probe import Tried, try_by_bucket
from fusedopt.inner.hooks import StepGuard
from fusedopt.inner.narrow_state import Narrowing, Opened
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.inner.rollback import Counters
from fusedopt.inner.signatures import requires_closure

PIECE_NUMEL = 2**20
"""Elements that are widened at once, a larger parameter apart: 4 MiB of fp32, which a CPU's cache takes."""

DEVICE_PIECE_NUMEL = 2**25
"""The same elsewhere: a bucket of 128 MiB, since many small launches would cost more than memory."""


class BucketStep:
    """One step of the inner optimizers, made of several calls.

    Args:
        inner: the wrapped optimizers.
        buffers: gradients, main_params and models.
    """

    def __init__(self, inner: InnerOptimizers, buffers: Buffers) -> None:
        _refuse_hooks(inner)
        inner.consolidated = None
        self._inner = inner
        self._counters = {id(opt): Counters(opt) for opt in inner.optimizers}
        self._numbers: dict[int, int] = {}
        self._scratch: dict[torch.device, Tensor] = {}
        self._state_scratch: dict[torch.device, Tensor] = {}
        self._touched: set[int] = set()
        buffers.is_stepping = True

    def step(
        self,
        group: int,
        members: Sequence[Entry],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> list[Entry]:
        """Step those of ``members``, of outer group ``group``, that have a gradient, in their order, piece by piece.

        Args:
            group: number of the outer group.
            members: of it.
            grad_scale: as in `InnerOptimizers.step`.
            found_inf: as in `InnerOptimizers.step`.

        Returns:
            The entries whose model parameters were written.
        """
        inner, written = self._inner, []
        optimizer, narrowing = inner.optimizer_of(group), inner.narrowing[inner.number_of(group)]
        self._touched.add(group)
        for entries in _pieces_of(members):
            self._counters[id(optimizer)].rewind()
            split = [entry for entry in entries if entry.is_split]
            opened = Opened(narrowing, optimizer, entries, self._number_of, self._state_scratch)
            _widen(split, self._scratch)
            try:
                inner.step_some(group, entries, grad_scale=grad_scale, found_inf=found_inf)
            finally:
                opened.close()
            written += split
        return written

    def _number_of(self, entry: Entry) -> int:
        """Return the number of the first element of the part, see `numbering`; asked where there is noise only."""
        if id(entry.param) not in self._numbers:  # first asked, or it came since
            self._numbers = self._inner.numbers()
        return self._numbers[id(entry.param)]

    def untouched(self) -> list[int]:
        """Return the groups of which nothing was stepped."""
        return [index for index in range(self._inner.num_groups) if index not in self._touched]

    def finish(self) -> None:
        """Let stay what inner optimizers counted."""
        for counted in self._counters.values():
            counted.finish()


def step_by_bucket(
    inner: InnerOptimizers, buffers: Buffers, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> list[Entry]:
    """Step the inner optimizers on all main_params that have a gradient; see `BucketStep`.

    Returns:
        The entries whose model parameters were written.
    """
    step = BucketStep(inner, buffers)
    written: list[Entry] = []
    try:
        for index, listed in enumerate(inner.listed):
            members = [inner.entry_by_param[id(p)] for p in listed.params if id(p) in inner.entry_by_param]
            written += step.step(index, members, grad_scale, found_inf)
    finally:
        step.finish()
    return written


def _refuse_hooks(inner: InnerOptimizers) -> None:
    for opt in inner.optimizers:
        pre_hooks, post_hooks = step_hooks(opt)
        hooks = [*pre_hooks.values(), *post_hooks.values()]
        if any(not isinstance(hook, StepGuard) for hook in hooks):
            raise RuntimeError(
                f"a step hook of the inner {type(opt).__name__} would run once for each piece of a step that goes "
                "bucket by bucket (main_param, state_dtype or release), on main_params that are not all there. "
                "Register it on the FusedMainGradOptimizer, or take it off"
            )


def _pieces_of(members: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield those with a gradient in their order in the group, by which random numbers are drawn; or once none."""
    piece: list[Entry] = []
    numel = num_pieces = 0
    for entry in members:
        if entry.main_param is None or not entry.has_grad:
            continue
        most = DEVICE_PIECE_NUMEL if answers_late(entry.bucket.device) else PIECE_NUMEL
        is_full = numel + entry.main_param.numel() > most
        if piece and (is_full or entry.bucket.device != piece[0].bucket.device):
            yield piece
            piece, numel, num_pieces = [], 0, num_pieces + 1
        piece.append(entry)
        numel += entry.main_param.numel()
    if piece or not num_pieces:
        yield piece


def _widen(entries: list[Entry], scratch: dict[torch.device, Tensor]) -> None:
    sizes = [entry.main_param.numel() if entry.main_param is not None else 0 for entry in entries]
    if not entries:
        return
    device, dtype = entries[0].bucket.device, entries[0].bucket.dtype
    if device not in scratch or scratch[device].numel() < sum(sizes):
        scratch[device] = torch.empty(sum(sizes), dtype=dtype, device=device)
    for entry, wide in zip(entries, torch.split(scratch[device][: sum(sizes)], sizes), strict=True):
        entry.widen(wide)


def _given(config: MainGradConfig) -> dict[str, str]:
    """Return the fields because of which steps go bucket by bucket, with the values that would not have that."""
    fields = {"main_param": "float32", "state_dtype": "float32", "release": "none"}
    return {name: default for name, default in fields.items() if getattr(config, name) != default}


def _listed(settings: dict[str, str]) -> str:
    return " and ".join(f'{name}="{value}"' for name, value in settings.items())


def narrowing_of(
    config: MainGradConfig, named: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer]
) -> dict[int, Narrowing]:
    """Refuse what a step that goes bucket by bucket cannot do, and return how state is held, by number of optimizer.

    Raises:
        ValueError: naming the field, and the parameter or the inner optimizer.
    """
    if not _given(config):
        return {}
    for name, param in named if config.main_param != "float32" else ():
        if param.dtype is torch.float16 and param.requires_grad:
            raise ValueError(f'main_param="{config.main_param}" with parameter {name}: {why_not_split(param.dtype)}')
    found = {}
    for number, opt in enumerate(optimizers):
        tried = [] if _why_all_at_once(opt) is not None else _try_settings(opt, config.state_dtype)
        why = _why_all_at_once(opt) or next((one.why_not for one in tried if one.why_not is not None), None)
        if why is not None:
            given = _given(config)
            raise ValueError(
                f"{_listed({name: getattr(config, name) for name in given})} with {type(opt).__name__}, {why}: all "
                f"parameters would have to be there at once. Use {_listed(given)}"
            )
        following = {path for one in tried for path in one.following}
        nonnegative = {path for one in tried for path in one.nonnegative}
        negative = {path for one in tried for path in one.negative}
        found[number] = Narrowing(config.state_dtype, frozenset(following), frozenset(nonnegative - negative))
    return found


def _why_all_at_once(optimizer: Optimizer) -> str | None:
    if requires_closure(type(optimizer)):
        return "whose step() evaluates its closure in between"
    if any(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        return "whose train() and eval() write all main_params"
    held = [type(other).__name__ for other in hidden_optimizers(optimizer).values()]
    if held:
        return f"which steps a {held[0]} that it holds"
    return None


def _try_settings(optimizer: Optimizer, state_dtype: str) -> list[Tried]:
    """Try each different set of settings of its groups."""
    tried: dict[str, Tried] = {}
    for group in optimizer.param_groups:
        settings = repr({key: value for key, value in group.items() if key not in ("params", "param_names")})
        if settings not in tried:
            tried[settings] = try_by_bucket(optimizer, group, state_dtype)
    return list(tried.values())
