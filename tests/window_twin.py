"""Gradient merge in plain torch: what every order of backward, step, clip, flush and clear must amount to."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class WindowTwin:
    """Two fp32 parameters under SGD with lr 1, and a window of ``k`` micro-batches, one for each call of `step`.

    Args:
        k: micro-batches of a window.
        keeps_sums: a clip in the last micro-batch leaves sums, to which more may be added (under a shard); else it
            divides, and whatever reads the window after one more backward raises.
    """

    def __init__(self, k: int, *, keeps_sums: bool = False) -> None:
        self.k, self.keeps_sums = k, keeps_sums
        self.params = [torch.zeros(3), torch.zeros(2)]
        self.sums: list[Tensor | None] = [None, None]
        self.restart()

    def restart(self) -> None:
        self.num_pending, self.has_begun, self.is_mean, self.is_spoilt = 0, False, False, False
        self.clips: list[tuple[float, float]] = []

    def backward(self, grads: list[Tensor | None]) -> None:
        self.sums = [a if b is None else b if a is None else a + b for a, b in zip(self.sums, grads, strict=True)]
        self.has_begun = True
        self.is_spoilt = self.is_mean

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        self._check()
        if self.num_pending + 1 < self.k or not self.has_begun:
            self.clips.append((max_norm, norm_type))
            return self._clip_mean(self.num_pending + self.has_begun or 1, float("inf"), norm_type)
        if not self.keeps_sums and not self.is_mean:
            self._divide(self.k)
            self.is_mean = True
        waiting, self.clips = self.clips, []
        for clip in waiting:
            self._clip_mean(1 if self.is_mean else self.k, *clip)
        return self._clip_mean(1 if self.is_mean else self.k, max_norm, norm_type)

    def step(self) -> None:
        self._check()
        if self.num_pending + 1 < self.k:
            self.num_pending, self.has_begun, self.clips = self.num_pending + 1, False, []
        else:
            self._act(self.k)

    def flush(self) -> None:
        if self.num_pending == 0:
            return
        self._check()
        if self.has_begun:
            raise RuntimeError("step() was not called")
        self._act(self.num_pending)

    def zero_grad(self) -> None:
        if self.num_pending == 0:
            self.sums = [None, None]

    def _check(self) -> None:
        if self.is_spoilt:
            has_begun = self.has_begun
            self.restart()
            self.has_begun = has_begun
            raise RuntimeError("a backward ran after a clip")

    def _act(self, num_micro_batches: int) -> None:
        if not self.is_mean:
            self._divide(num_micro_batches)
        for clip in self.clips:
            self._clip_mean(1, *clip)
        self.params = [p if g is None else p - g for p, g in zip(self.params, self.sums, strict=True)]
        self.restart()

    def _divide(self, divisor: int) -> None:
        self.sums = [g if g is None else g / divisor for g in self.sums]

    def _clip_mean(self, num_addends: int, max_norm: float, norm_type: float) -> float:
        """Clip the mean with torch's own function; return the norm before."""
        params = [nn.Parameter(torch.zeros_like(g)) for g in self.sums if g is not None]
        for param, grad in zip(params, [g for g in self.sums if g is not None], strict=True):
            param.grad = grad / num_addends
        norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type)
        clipped = [param.grad * num_addends for param in params]
        self.sums = [None if g is None else clipped.pop(0) for g in self.sums]
        return norm.item()
