"""Hold optimizer state in 8 bits: blocks of 256 elements with one fp32 scale each, and a map that bends.

=================  ====================================  ========================================================
state              code                                  relative error to nearest, of code k
=================  ====================================  ========================================================
signed             int8, ``sign(x) sqrt(|x|/max) 127``   at most ``(k / (k - 0.5))**2 - 1``: 0.8 % at the top, 1.1 %
                                                         at half of it; below max / 64516 it becomes 0
non-negative       uint8, ``(v/max)**(1/4) 255``         at most ``(k / (k - 0.5))**4 - 1``: 0.8 % and 0.9 %; what is
                                                         positive is code 1 at least, max / 4.2e9
=================  ====================================  ========================================================

The scale is the block's largest magnitude, and its own element decodes to exactly that. So a state that no step touched
does not drift: encoding what was decoded gives the same codes and scales, bit for bit, with noise or without. For that,
blocks whose largest is below 2**-112 (non-negative: 2**-94) are scaled as though it were that, so that code 1 is a
normal number.

*Not finite, or negative where it must not be*: the scale is nan, codes are 0, and all 256 elements decode to nan.
Nothing is silent, and nothing else is affected.

**Noise.** To nearest, the increments of an exponential average are lost where they are below half a code, which a
second moment with a decay of 0.999 always is (they are 0.1 %, half a code at the top 0.8 %), while the scale goes on
decaying: it drifts *down*. With `Noise` a value goes to one of the two codes around it so that the mean is the value
itself. AdamW (0.9, 0.999) on a small regression, 2000 steps, narrowed after each; medians over elements of the second
moment over that with fp32 state, and the final loss over that of fp32, three seeds:

====================================  ==============  ==============  ==============
state                                 second moment   5 to 95 %       final loss
====================================  ==============  ==============  ==============
bf16 to nearest                       3.58 to 3.65    3.3 to 3.9      1.53 to 1.57
bf16 with noise                       0.998 to 1.000  0.89 to 1.12    0.999 to 1.003
int8 to nearest                       0.80 to 0.88    0.65 to 1.13    0.86 to 0.99
int8, noise in the second moment      0.989 to 0.996  0.76 to 1.27    0.984 to 1.012
int8 with noise                       0.992 to 0.997  0.76 to 1.27    0.985 to 1.012
====================================  ==============  ==============  ==============

A lower loss than fp32's is no gain: the run is short, and too small a second moment is a larger learning rate.
So give noise to whatever averages slowly. The noise of code k leaves a relative deviation of about ``sqrt(2 / k)`` in a
second moment with a decay of 0.999.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedopt.buffers.encodings import Noise, chunk_numel
from fusedopt.sharding.layout import BLOCK_NUMEL

BLOCK = BLOCK_NUMEL
"""Elements that share a scale: the layout's, so that a shard never cuts one."""

SIGNED_LEVELS, UNSIGNED_LEVELS = 127, 255
SMALLEST_SIGNED, SMALLEST_UNSIGNED = 2.0**-112, 2.0**-94
"""Of scales: such that code 1 decodes to 2**-126 at least, which no processor flushes to zero."""

MARGIN = 2.0**-13
"""Of a code: that near to a code a value always goes to it. Rounding of decoded values is below 2**-15 of one."""


def num_blocks(numel: int) -> int:
    """Return how many scales ``numel`` elements have; the last block may be short."""
    return -(-numel // BLOCK)


def encode_int8_(
    wide: Tensor, codes: Tensor, scales: Tensor, *, is_signed: bool, noise: Noise | None = None, first: int = 0
) -> None:
    """Narrow ``wide`` to 8 bits; see the top of this file.

    The same whether called once or in parts that are whole blocks.

    Args:
        wide: float32, 1-D, contiguous. Read.
        codes: int8 if signed, else uint8; as many. Written.
        scales: float32, ``[num_blocks]``. Written.
        is_signed: else no element may be negative.
        noise: None for rounding to nearest.
        first: number of the first element, as `Noise` counts.
    """
    scratch = _scratch(wide, 2 if noise is None else 4)
    for part, blocks, shape in _pieces(wide):
        source, target, scale = wide[part].view(shape), codes[part].view(shape), scales[blocks]
        level, *work = [buffer[: source.numel()].view(shape) for buffer in scratch]
        _scale_of(source, scale, level, is_signed)
        if is_signed:  # the level in its own space, before the root: 127**2 or 255**4 at the largest
            level.div_(scale.div(SIGNED_LEVELS**2)[:, None])
        else:
            torch.div(source, scale.div(UNSIGNED_LEVELS**4)[:, None], out=level)
        if noise is None:
            level.sqrt_()
            if not is_signed:
                level.sqrt_()
            level.round_()
        else:
            _round_stochastically(level, work, is_signed, noise, first + part.start)
        if is_signed:
            target.copy_(torch.copysign(level, source, out=level))
        else:  # positive bits, as an integer, are at least 1: such an element never becomes 0
            whole, positive = work[0].view(torch.int32), level.view(torch.int32)
            whole.copy_(level)
            torch.clamp(source.view(torch.int32), 0, 1, out=positive)
            target.view(torch.int8).copy_(torch.maximum(whole, positive, out=whole))
        broken = scale.isnan()
        if not wide.is_cpu or bool(broken.any()):
            target.masked_fill_(broken[:, None], 0)


def decode_int8_(codes: Tensor, scales: Tensor, wide: Tensor, *, is_signed: bool) -> None:
    """Widen what `encode_int8_` narrowed.

    Args:
        codes: int8 if signed, else uint8. Read.
        scales: float32, ``[num_blocks]``. Read.
        wide: float32. Written: ``sign(k) (k / 127)**2 scale`` or ``(k / 255)**4 scale``, with the largest code exactly
            ``scale``.
        is_signed: as it was encoded.
    """
    scratch = _scratch(wide, 1 if is_signed else 0)
    for part, blocks, shape in _pieces(wide):
        target = wide[part].view(shape).copy_(codes[part].view(shape))
        if is_signed:
            target.mul_(1 / SIGNED_LEVELS)  # 127 and 255 times their rounded inverses round to 1
            target.mul_(torch.abs(target, out=scratch[0][: target.numel()].view(shape)))
        else:
            target.mul_(1 / UNSIGNED_LEVELS).square_().square_()
        target.mul_(scales[blocks, None])


def _scale_of(source: Tensor, scale: Tensor, level: Tensor, is_signed: bool) -> None:
    """Write each row's scale, nan where it has none; for signed, magnitudes into ``level``."""
    if is_signed:
        torch.amax(torch.abs(source, out=level), 1, out=scale)
    else:
        torch.amax(source, 1, out=scale)
        scale.masked_fill_(torch.amin(source, 1) < 0, math.nan)
    scale.clamp_(min=SMALLEST_SIGNED if is_signed else SMALLEST_UNSIGNED)
    scale.masked_fill_(scale.isinf(), math.nan)


def _round_stochastically(level: Tensor, work: list[Tensor], is_signed: bool, noise: Noise, first: int) -> None:
    """Replace ``level`` by the code below or above it: up with the probability ``(level - below) / (above - below)``.

    With r the root of the level, k the code below and s = k**2, for signed that is ``(level - s) / (2k + 1)``, and else
    ``(r - s) (r + s) / ((2k + 1) (2s + 2k + 1))``, in which nothing large cancels.

    Args:
        level: in its own space. Written.
        work: three of its shape. Written.
        is_signed: whether a code is the square root of its level, or the fourth.
        noise: of a range that holds these elements.
        first: number of the first of them.
    """
    below, width, spare = work
    if is_signed:
        torch.sqrt(level, out=below).floor_()
        level.addcmul_(below, below, value=-1)
        torch.mul(below, 2, out=width).add_(1)
    else:
        torch.sqrt(level.sqrt_(), out=below).floor_()
        torch.mul(below, below, out=spare)
        torch.add(level, spare, out=width)
        level.sub_(spare).mul_(width)
        torch.mul(below, 2, out=width).add_(1)
        width.mul_(spare.mul_(2).add_(width))
    noise.fill_(spare.view(-1), first)
    level.div_(width).add_(MARGIN).add_(spare, alpha=(1 - 2 * MARGIN) / 65536).floor_().add_(below)


def _pieces(flat: Tensor) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield elements, their blocks and their shape, block by block: chunks of whole blocks, then a short one."""
    whole = flat.numel() - flat.numel() % BLOCK
    size = chunk_numel(flat)
    for start in range(0, whole, size):
        end = min(start + size, whole)
        yield slice(start, end), slice(start // BLOCK, end // BLOCK), (-1, BLOCK)
    if flat.numel() > whole:
        yield slice(whole, flat.numel()), slice(whole // BLOCK, whole // BLOCK + 1), (1, -1)


def _scratch(flat: Tensor, count: int) -> list[Tensor]:
    numel = min(chunk_numel(flat), flat.numel())
    return [torch.empty(numel, device=flat.device) for _ in range(count)]
