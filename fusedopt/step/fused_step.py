"""Step Adam, AdamW and SGD through the backend, one pass over memory with the write-back in it.

    ... -> clip -> [step -> write-back] -> gather

Only under a backend that was asked for by name: another kernel rounds differently than the inner
optimizer's own step does. State stays where the inner optimizer made it, under its names; the
first step of a parameter, which makes state, is the inner optimizer's own. Knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fusedopt._torch_private import foreach_add, foreach_add_, step_hooks
from fusedopt.backends import FusedStep
from fusedopt.backends.offers import Adam as AdamRule
from fusedopt.backends.offers import Rule, StepTensors
from fusedopt.backends.offers import Sgd as SgdRule
from fusedopt.buffers.bucket import Entry
from fusedopt.buffers.flat import Buffers
from fusedopt.inner.hooks import StepGuard

_MADE_OTHERWISE = ("amsgrad", "maximize", "differentiable", "capturable")


def step_fused(
    buffers: Buffers, written: list[Entry], optimizer: Optimizer, grad_scale: Tensor | None, found_inf: Tensor | None
) -> bool:
    """Make the step of ``optimizer`` with the gradients that its main_params have, if the backend can.

    Args:
        buffers: whose entries are stepped.
        written: the entries whose model parameters are written as well are added here.
        optimizer: an inner one.
        grad_scale: as in `InnerOptimizers.step`.
        found_inf: as in `InnerOptimizers.step`.

    Returns:
        False, with nothing changed, where the inner optimizer has to step itself.
    """
    plan = _plan(buffers, optimizer, is_on_device=found_inf is not None)
    if plan is None:
        return False
    for fused, rule, entries, operands, steps in plan:
        fused.run(rule, operands, grad_scale=grad_scale, found_inf=found_inf)
        if steps:
            foreach_add_(steps, 1.0 if found_inf is None else 1.0 - found_inf)
        written += [entry for entry in entries if entry.is_rounded]
    return True


def _plan(buffers: Buffers, optimizer: Optimizer, *, is_on_device: bool) -> list[Any] | None:
    """Return calls to make; None if anything about ``optimizer`` needs its own step."""
    entry_of = {id(entry.main_param): entry for entry in buffers.entries if entry.main_param is not None}
    pre_hooks, post_hooks = step_hooks(optimizer)
    if post_hooks or any(not isinstance(hook, StepGuard) for hook in pre_hooks.values()):
        return None
    plan = []
    for group in optimizer.param_groups:
        rule = rule_of(optimizer, group)
        entries = [entry_of.get(id(main)) for main in group["params"] if main.grad is not None]
        by_kind: dict[Any, list[Entry]] = {}
        for entry in entries:
            if entry is None:
                return None
            kind = (entry.bucket.backend.fused_step_, entry.bucket.device, entry.slot.dtype)
            by_kind.setdefault(kind, []).append(entry)
        for (fused, _, _), alike in by_kind.items():
            if rule is None or not _takes(fused, rule, is_on_device):
                return None
            made = operands_of(rule, alike, [optimizer.state.get(main, {}) for main in _mains(alike)])
            if made is None:
                return None
            plan.append((fused, rule, alike, *made))
    return plan


def _mains(entries: Sequence[Entry]) -> list[Tensor]:
    return [entry.main_param for entry in entries if entry.main_param is not None]


def _takes(fused: FusedStep | None, rule: Rule, is_on_device: bool) -> bool:
    return fused is not None and fused.takes(rule) and (fused.takes_found_inf or not is_on_device)


def rule_of(optimizer: Optimizer, group: dict[str, Any]) -> Rule | None:
    """Return the step rule of ``group``; None if it is none that backends know, or reads a tensor's value."""
    numbers = ("lr", "weight_decay", "momentum", "dampening", "eps")
    if any(group.get(flag) for flag in _MADE_OTHERWISE) or any(isinstance(group.get(key), Tensor) for key in numbers):
        return None
    if type(optimizer) is SGD:
        lr, momentum, dampening, decay = (float(group[key]) for key in ("lr", "momentum", "dampening", "weight_decay"))
        return SgdRule(lr, momentum, dampening, decay, is_nesterov=bool(group["nesterov"]))
    if type(optimizer) in (Adam, AdamW) and not any(isinstance(beta, Tensor) for beta in group["betas"]):
        is_decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))
        beta1, beta2 = map(float, group["betas"])
        lr, eps, decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        return AdamRule(lr, beta1, beta2, eps, decay, is_decoupled)
    return None


def operands_of(
    rule: Rule, entries: Sequence[Entry], states: Sequence[dict[str, Any]]
) -> tuple[StepTensors, list[Tensor]] | None:
    """Return the flat memory of ``entries`` and the step counts to advance; None unless all of it is there, and dense.

    Args:
        rule: decides which state there has to be.
        entries: with a gradient, of one dtype and device.
        states: one per entry, the inner optimizer's.
    """
    is_adam = isinstance(rule, AdamRule)
    keys: tuple[str, ...] = ("exp_avg", "exp_avg_sq") if is_adam else ()
    if isinstance(rule, SgdRule) and rule.momentum:
        keys = ("momentum_buffer",)
    rows = []
    for entry, state in zip(entries, states, strict=True):
        row = [entry.main_param, entry.grad_part, *(state.get(key) for key in keys)]
        row += [entry.model_part] if entry.is_rounded else []
        if not _are_alike(row) or (is_adam and not isinstance(state.get("step"), Tensor)):
            return None
        rows.append([tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in row if tensor is not None])
    mains, grads, *others = map(list, zip(*rows, strict=True))
    models = others.pop() if entries[0].is_rounded else None
    steps: list[Tensor] = [state["step"] for state in states] if is_adam else []
    next_steps = foreach_add(steps, 1.0) if steps else [torch.ones(()) for _ in entries]
    return StepTensors(grads, mains, others, models, list(next_steps)), steps


def _are_alike(tensors: Sequence[Any]) -> bool:
    first = tensors[0]
    return all(
        isinstance(t, Tensor) and t.shape == first.shape and t.stride() == first.stride() and t.device == first.device
        for t in tensors
    ) and all(t.dtype is torch.float32 for t in tensors[:-1] or tensors)
