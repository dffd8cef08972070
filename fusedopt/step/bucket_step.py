"""Step inner optimizers piece by piece, where main_params are held in fewer bytes than they have in a step.

    ... -> clip -> [widen -> inner step -> narrow] -> gather

A few main_params of a group are widened into scratch, the inner optimizer steps on these alone, and they are narrowed
again, by which the model is written, too. Scratch for one such piece exists at any time. Inner optimizers whose
parameters decide about each other, or that keep views of them, are refused at construction, by trying.

What an optimizer counts in its groups, or in itself, it counts once a step: each piece finds the values from before the
step, and those that the last one leaves stay.

Knows nothing of ranks, windows or where gradients come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt._torch_private import step_hooks
from fusedopt.buffers.bucket import Entry
from fusedopt.buffers.encodings import why_not_split
from fusedopt.buffers.flat import Buffers
from fusedopt.checks import hidden_optimizers
from fusedopt.inner.bucket_probe import why_not_by_bucket
from fusedopt.inner.hooks import StepGuard
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.inner.rollback import Counters
from fusedopt.inner.signatures import requires_closure

PIECE_NUMEL = 2**20
"""Elements that are widened at once, a larger parameter apart: 4 MiB of fp32, which a CPU's cache takes."""


def step_by_bucket(
    inner: InnerOptimizers, buffers: Buffers, grad_scale: Tensor | None = None, found_inf: Tensor | None = None
) -> list[Entry]:
    """Step the inner optimizers on all main_params that have a gradient.

    Args:
        inner: the wrapped optimizers.
        buffers: gradients, main_params and models.
        grad_scale: as in `InnerOptimizers.step`.
        found_inf: as in `InnerOptimizers.step`.

    Returns:
        The entries whose model parameters were written.
    """
    _refuse_hooks(inner)
    inner.consolidated = None
    buffers.is_stepping = True
    pieces = [
        (index, piece)
        for index, listed in enumerate(inner.listed)
        for piece in _pieces_of([inner.entry_by_param[id(p)] for p in listed.params if id(p) in inner.entry_by_param])
    ]
    counters = {id(opt): Counters(opt) for opt in inner.optimizers}
    scratch: dict[torch.device, Tensor] = {}
    written: list[Entry] = []
    try:
        for group, entries in pieces:
            counters[id(inner.optimizer_of(group))].rewind()
            split = [entry for entry in entries if entry.is_split]
            _widen(split, scratch)
            try:
                inner.step_some(group, entries, grad_scale=grad_scale, found_inf=found_inf)
            finally:
                for entry in split:
                    entry.narrow()
            written += split
    finally:
        for counted in counters.values():
            counted.finish()
    return written


def _refuse_hooks(inner: InnerOptimizers) -> None:
    for opt in inner.optimizers:
        pre_hooks, post_hooks = step_hooks(opt)
        hooks = [*pre_hooks.values(), *post_hooks.values()]
        if any(not isinstance(hook, StepGuard) for hook in hooks):
            raise RuntimeError(
                f"a step hook of the inner {type(opt).__name__} would run once for each piece of a step that goes "
                'bucket by bucket (main_param="split"), on main_params that are not all there. Register it on the '
                "FusedMainGradOptimizer, or take it off"
            )


def _pieces_of(members: Sequence[Entry]) -> Iterator[list[Entry]]:
    """Yield those with a gradient in their order in the group, by which random numbers are drawn; or once none."""
    piece: list[Entry] = []
    numel = num_pieces = 0
    for entry in members:
        if entry.main_param is None or not entry.has_grad:
            continue
        is_full = numel + entry.main_param.numel() > PIECE_NUMEL
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


def refuse_narrow(main_param: str, named: Sequence[tuple[str, Tensor]], optimizers: Sequence[Optimizer]) -> None:
    """Refuse what a step that goes bucket by bucket cannot do; see `MainGradConfig.main_param`.

    Raises:
        ValueError: naming the field, and the parameter or the inner optimizer.
    """
    if main_param == "float32":
        return
    for name, param in named:
        if param.dtype is torch.float16 and param.requires_grad:
            raise ValueError(f'main_param="{main_param}" with parameter {name}: {why_not_split(param.dtype)}')
    for opt in optimizers:
        why = _why_all_at_once(opt)
        if why is not None:
            raise ValueError(
                f'main_param="{main_param}" with {type(opt).__name__}, {why}: all main_params would have to exist at '
                'once. Use main_param="float32"'
            )


def _why_all_at_once(optimizer: Optimizer) -> str | None:
    if requires_closure(type(optimizer)):
        return "whose step() evaluates its closure in between"
    if any(callable(getattr(optimizer, method, None)) for method in ("train", "eval")):
        return "whose train() and eval() write all main_params"
    held = [type(other).__name__ for other in hidden_optimizers(optimizer).values()]
    if held:
        return f"which steps a {held[0]} that it holds"
    tried: list[Any] = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if repr(settings) not in tried:
            tried.append(repr(settings))
            why = why_not_by_bucket(optimizer, group)
            if why is not None:
                return why
    return None
