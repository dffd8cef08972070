"""Hold main_param and optimizer state in fewer bytes: pure arithmetic on flat tensors.

All tensors are 1-D, contiguous, on one device, of one length; written ones end the function's name with ``_``. Nothing
depends on how a range of elements is cut into calls: noise is a hash of (seed, step, element number), so a caller who
hands in a part says with which element it begins. Work goes in chunks that stay in a CPU's cache; scratch is one chunk,
6 bytes an element.

=================  ==============  ===========================================================================
what               bytes           what is kept of fp32
=================  ==============  ===========================================================================
`split_`           2 (bf16) + 2    every bit
`split24_`         2 (bf16) + 1    24 bits: relative error at most 2**-16 to nearest, below 2**-15 stochastic
`narrow_bf16_`     2               8 bits of significand, rounded stochastically: right in the mean
=================  ==============  ===========================================================================

**Halves of a main_param.** The weight is main_param rounded to bf16, *ties away from zero*, and ``low`` is what is
left: ``bits(main) = (bits(weight) << 16) + low``, with ``low`` signed, in int32 arithmetic. It differs from torch's own
cast (ties to even) at every other exact tie, one value in 131072: with ties to even, a remainder of half a step could
have either sign, which would take a seventeenth bit. A main_param of 3.396e38 (0x7F7F8000) and more has weight inf, as
torch's cast gives, and keeps every bit all the same. A nan stays one, in the weight and joined, though not always with
its payload. (A GPU's nan, 0x7FFFFFFF, would overflow into a weight of -0.)

**Edits from outside.** Adding ``low`` to the bits of a finite, nonzero weight w moves it by at most half the distance
to its neighbours, in units of its own binade; the join rounds back to w. So ``low`` may stay where a weight was edited,
but where the new weight is 0, inf or nan: 0 with a negative ``low`` joins to nan. `repair_` clears these.

**Noise.** ``word(row, j) = (A_row ^ C_j) * M_row mod 2**32`` for rows of 1024 elements; its lower and upper half are
the 16 bits of elements 2j and 2j + 1. ``A``, ``M`` (odd) and ``C`` are 32-bit hashes ("lowbias32" of C. Wellons, 2018,
https://nullprogram.com/blog/2018/07/31/) of row or column, seed and step. Why that is enough: with ``A`` uniform a word
is uniform, whatever ``M`` and ``C`` are; words of two rows are independent, as ``A`` is; words of two columns are, as
``C`` is; another step has other tables. The same two columns in all rows are related by ``M_row`` alone: without it
the errors of a matrix would be a matrix of rank one, which an optimizer that orthogonalizes would see. Lanes 0 to 7 of
a lower half stay related so; they decide a rounding in one case of 256. It costs a tenth of a full hash of each
element in torch's integer operations (0.23 to 2.3 ns on one core).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NOISE_ROW = 1024
"""Elements that share a row of the noise."""

CPU_CHUNK = 256 * 1024
"""Elements worked on at once on a CPU: they stay in its cache, and 3 microseconds of each call to torch are few."""

DEVICE_CHUNK = 16 * 1024 * 1024
"""The same elsewhere, where a launch costs more than a chunk of `CPU_CHUNK`."""

_WORD = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_LARGEST = 0x7F7FFFFF  # bits of the largest finite fp32
_LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def why_not_split(dtype: torch.dtype) -> str | None:
    """Return why a main_param of parameters of ``dtype`` cannot be held in halves; None where it can.

    float16 keeps 11 bits and 16 more would do for any value of its normal range. Below it (6.1e-5) they do not: more
    than 2**30 fp32 values round to a float16 of 0, and 16 bits tell 2**16 apart; 0.5 % of the elements of a weight of
    deviation 0.01 are that small. Held as multiples of 2**-40 these would be off by up to 2**-41, so nothing exact
    can be promised.
    """
    if dtype is torch.bfloat16:
        return None
    if dtype is torch.float16:
        return (
            "float16 has 5 bits of exponent, so main_params below 6.1e-05 do not fit into a float16 weight and 16 bits "
            "of remainder; make the model bfloat16, whose exponent is that of float32"
        )
    if dtype is torch.float32:
        return "a float32 parameter is its own main_param, there is nothing to split"
    return f"only a bfloat16 weight is the upper half of a float32 main_param, {dtype} is not"


def split_(main: Tensor, model: Tensor, low: Tensor) -> None:
    """Cut ``main`` into a weight and a remainder, exactly; see the top of this file.

    Args:
        main: float32. Read.
        model: bfloat16. Written: ``main`` to nearest, ties away from zero; nan where it is nan.
        low: int16. Written.
    """
    scratch = _scratch(main)
    for part in _chunks(main):
        wide, upper, lower = main[part], model[part], low[part]
        bits, rounded = wide.view(torch.int32), scratch[: wide.numel()]
        lower.copy_(bits)  # the lower half: a cast to fewer bits keeps these
        rounded.copy_(lower)  # and not in the subtraction: mixed dtypes take longer there
        upper.copy_(torch.sub(bits, rounded, out=rounded).view(torch.float32))
        if not _is_ordinary(wide):
            upper.masked_fill_(wide.isnan(), math.nan)


def join_(model: Tensor, low: Tensor, main: Tensor) -> None:
    """Undo `split_`.

    Args:
        model: bfloat16. Read.
        low: int16. Read.
        main: float32. Written.
    """
    for part in _chunks(main):
        main[part].copy_(model[part]).view(torch.int32).add_(low[part])


def split24_(
    main: Tensor,
    model: Tensor,
    low: Tensor,
    *,
    noise: Noise | None = None,
    first: int = 0,
) -> None:
    """Cut ``main``, rounded to 24 bits, into a weight and a remainder of 8 bits.

    What is stored has 1 + 15 bits of significand, so a step of 2**-15 of the power of two below: to nearest it is off
    by at most half of one, relative 2**-16 (below 2**-126, where fp32 itself has fewer bits, absolute 2**-142);
    stochastically by less than one, 2**-15, and by nothing in the mean. Values that 24 bits hold stay. Finite stays
    finite, inf and nan stay. The weight is what is stored, to nearest: within 0.5 + 2**-9 of a bf16 step of ``main``
    itself, or 0.5 + 2**-8 stochastically.

    Args:
        main: float32. Read.
        model: bfloat16. Written.
        low: int8. Written: ``bits(main) = (bits(model) << 16) + (low << 8)``.
        noise: None for rounding to nearest.
        first: number of the first element, as `Noise` counts.
    """
    scratch = _scratch(main)
    for part in _chunks(main):
        wide, upper, lower = main[part], model[part], low[part]
        bits, rounded = wide.view(torch.int32), scratch[: wide.numel()]
        if noise is None:
            rounded.fill_(0x80)
        else:
            noise.fill_(rounded, first + part.start)
            torch.bitwise_right_shift(rounded, 8, out=rounded)
        is_ordinary = _is_ordinary(wide)
        if not is_ordinary:
            _limit_(rounded, bits)
        torch.bitwise_right_shift(rounded.add_(bits), 8, out=rounded)
        lower.copy_(rounded)
        torch.bitwise_left_shift(rounded.sub_(lower), 8, out=rounded)
        upper.copy_(rounded.view(torch.float32))
        if not is_ordinary:
            upper.masked_fill_(wide.isnan(), math.nan)


def join24_(model: Tensor, low: Tensor, main: Tensor) -> None:
    """Undo `split24_`, but for its rounding.

    Args:
        model: bfloat16. Read.
        low: int8. Read.
        main: float32. Written.
    """
    for part in _chunks(main):
        main[part].copy_(model[part]).view(torch.int32).add_(low[part], alpha=256)


def cut_(main: Tensor, model: Tensor, low: Tensor, *, noise: Noise | None = None, first: int = 0) -> None:
    """Cut ``main`` by `split_` or `split24_`, as ``low``, int16 or int8, has room for; see there."""
    if low.dtype is torch.int16:
        split_(main, model, low)
    else:
        split24_(main, model, low, noise=noise, first=first)


def put_together_(model: Tensor, low: Tensor, main: Tensor) -> None:
    """Undo `cut_`, but for its rounding."""
    if low.dtype is torch.int16:
        join_(model, low, main)
    else:
        join24_(model, low, main)


def repair_(model: Tensor, low: Tensor) -> None:
    """Clear what is left of the old value where weights were edited from outside to 0 (of either sign), inf or nan.

    Then a join gives nan and inf where the weight has them, and nowhere else; other elements keep ``low``. Without an
    edit it changes main_params that round to 0 or inf: below 2**-134, to 0, and from 3.396e38, to inf.

    Args:
        model: bfloat16. Read.
        low: int16 of `split_`, or int8 of `split24_`. Written.
    """
    for part in _chunks(model):
        magnitude = model[part].view(torch.int16).bitwise_and(0x7FFF)
        low[part].masked_fill_((magnitude == 0).logical_or_(magnitude >= 0x7F80), 0)


def clear_impossible_(model: Tensor, low: Tensor) -> None:
    """Clear remainders that no split leaves, and that would join to nan: negative ones of a weight of 0.

    It changes no main_param, and asks no device for anything: for every join of weights whose edits may be unseen.

    Args:
        model: bfloat16. Read.
        low: int16 or int8. Written.
    """
    for part in _chunks(model):
        low[part].masked_fill_((model[part] == 0).logical_and_(low[part] < 0), 0)


def narrow_bf16_(wide: Tensor, narrow: Tensor, *, noise: Noise, first: int) -> None:
    """Round to bf16 stochastically: up or down so that the mean over noise is ``wide`` itself, exactly.

    An exponential average by nearest rounding freezes: with a decay of 0.999 its increments are below half a bf16 step,
    2**-9. Values that bf16 holds stay; nan and inf stay; what is above the largest bf16 becomes that, and not inf.

    Args:
        wide: float32. Read.
        narrow: bfloat16. Written. Back again is ``wide.copy_(narrow)``.
        noise: of a range that holds these elements; another step has another.
        first: number of the first element, as `Noise` counts.
    """
    scratch = _scratch(wide)
    for part in _chunks(wide):
        source, target = wide[part], narrow[part]
        bits, rounded = source.view(torch.int32), scratch[: source.numel()]
        noise.fill_(rounded, first + part.start)
        is_ordinary = _is_ordinary(source)
        if not is_ordinary:
            _limit_(rounded, bits)
        target.view(torch.int16).copy_(torch.bitwise_right_shift(rounded.add_(bits), 16, out=rounded))
        if not is_ordinary:
            target.masked_fill_(source.isnan(), math.nan)


class Noise:
    """16 uniform bits for each element of a range; the top of this file says which.

    Tables are made here, 8 bytes for 1024 elements; so make it for a bucket, and cut the bucket into calls.

    Args:
        seed: any integer, of which 64 bits count; two states of one optimizer have their own, or their errors are
            alike.
        step: the count of steps, below 2**32; a 0-d tensor, of any dtype that holds it exactly, is not read back from a
            device.
        first: number of the range's first element, of all elements that share seed and step. Rows repeat after 2**42.
        numel: of the range.
        device: of the noise, and of ``step`` where that is a tensor on a device.
    """

    def __init__(self, seed: int, step: int | Tensor, first: int, numel: int, device: torch.device) -> None:
        self._first_row = first // NOISE_ROW
        rows = torch.arange(self._first_row, -(-(first + numel) // NOISE_ROW), device=device).bitwise_and_(_WORD)
        columns = torch.arange(NOISE_ROW // 2, device=device)
        count = step.to(torch.int64) if isinstance(step, Tensor) and not step.is_cpu else int(step) & _WORD
        key = _mix(_mix(_mix(seed & _WORD) ^ (seed >> 32 & _WORD)) ^ count)
        keys = [_mix(key ^ number) for number in (1, 2, 3)]
        hashed = _mix(torch.cat([rows ^ keys[0], rows ^ keys[1], columns ^ keys[2]])).to(torch.int32)
        added, multiplied, self._columns = hashed.split([rows.numel(), rows.numel(), columns.numel()])
        self._added, self._multiplied = added[:, None], multiplied.bitwise_or(1)[:, None]

    def fill_(self, out: Tensor, first: int) -> None:
        """Write the noise of ``out.numel()`` elements, 0 to 65535, from element number ``first`` on.

        Args:
            out: int32 or float32, 1-D, contiguous. Written.
            first: in the range.

        Raises:
            ValueError: where elements are outside the range.
        """
        begin, end = first - self._first_row * NOISE_ROW, first + out.numel() - self._first_row * NOISE_ROW
        if begin < 0 or end > self._added.numel() * NOISE_ROW:
            raise ValueError(f"noise for elements {first} to {first + out.numel()}, outside the range it was made for")
        row = begin // NOISE_ROW
        rows = slice(row, -(-end // NOISE_ROW))
        words = torch.bitwise_xor(self._added[rows], self._columns).mul_(self._multiplied[rows])
        halves = words.view(torch.uint16).view(-1)
        out.copy_(halves[begin - row * NOISE_ROW : end - row * NOISE_ROW])


def _mix(word: Any) -> Any:
    """Return a hash of 32 bits, "lowbias32": a bijection. A Python int, or an int64 tensor of such."""
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D & _WORD
    word = word ^ (word >> 15)
    word = word * 0x846CA68B & _WORD
    return word ^ (word >> 16)


def _limit_(added: Tensor, bits: Tensor) -> None:
    """Make ``added``, to the bits of fp32 values, so small that no finite one becomes inf; 0 for inf and nan."""
    room = bits.bitwise_and(_MAGNITUDE).neg_().add_(_LARGEST).clamp_(min=0)
    torch.minimum(added, room, out=added)


def _is_ordinary(wide: Tensor) -> bool:
    """Return whether no element is nan, inf or above the largest bf16; False on a device, which nobody waits for."""
    if not wide.is_cpu:
        return False
    lowest, highest = torch.aminmax(wide)
    return float(lowest) >= -_LARGEST_BF16 and float(highest) <= _LARGEST_BF16


def chunk_numel(flat: Tensor) -> int:
    """Return how many elements are worked on at once, on the device of ``flat``."""
    return CPU_CHUNK if flat.is_cpu else DEVICE_CHUNK


def _chunks(flat: Tensor) -> Iterator[slice]:
    """Yield the chunks of ``flat``."""
    size = chunk_numel(flat)
    return (slice(start, min(start + size, flat.numel())) for start in range(0, flat.numel(), size))


def _scratch(flat: Tensor) -> Tensor:
    """Return int32 scratch for the largest chunk of ``flat``."""
    return torch.empty(min(chunk_numel(flat), flat.numel()), dtype=torch.int32, device=flat.device)
