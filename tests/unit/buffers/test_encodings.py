"""Claims about the halves of fp32 values, and about bf16 by stochastic rounding. Noise has a fixed seed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusedopt.buffers import encodings
from fusedopt.buffers.encodings import (
    NOISE_ROW,
    Noise,
    clear_impossible_,
    join24_,
    join_,
    narrow_bf16_,
    repair_,
    split24_,
    split_,
    why_not_split,
)
from tests.compare import bits

CPU = torch.device("cpu")
LOWER = [0, 1, 0x40, 0x7F, 0x80, 0x81, 0x7FFE, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xBEEF, 0xFF7F, 0xFF80, 0xFFFE, 0xFFFF]
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
SIGMAS = 5  # of a standard deviation, two-sided: one test in 1.7 million of truly random bits would fail


def from_bits(values):
    return values.to(torch.int32).view(torch.float32)


@pytest.fixture(scope="module")
def patterns():
    """Every upper half with `LOWER`: each exponent, denormals, the largest finite, every kind of nan; 2**20 values."""
    return from_bits((torch.arange(2**16)[:, None] * 2**16 + torch.tensor(LOWER)).view(-1))


def low_of(main, dtype=torch.int16):
    return torch.empty(main.numel(), dtype=torch.bfloat16), torch.empty(main.numel(), dtype=dtype)


def split(main):
    model, low = low_of(main)
    split_(main, model, low)
    return model, low


def join(model, low):
    main = torch.empty(model.numel())
    (join_ if low.dtype is torch.int16 else join24_)(model, low, main)
    return main


def split24(main, noise=None, first=0):
    model, low = low_of(main, torch.int8)
    split24_(main, model, low, noise=noise, first=first)
    return model, low


def noise_for(tensor, seed=0, step=0, first=0):
    return Noise(seed, step, first, tensor.numel(), tensor.device)


def narrow(wide, seed=0, step=0, first=0):
    out = torch.empty(wide.numel(), dtype=torch.bfloat16)
    narrow_bf16_(wide, out, noise=noise_for(wide, seed, step, first), first=first)
    return out


def uniform(numel, seed=0, step=0, first=0):
    out = torch.empty(numel, dtype=torch.int32)
    Noise(seed, step, first, numel, CPU).fill_(out, first)
    return out


def test_two_halves_hold_every_bit(patterns):
    model, low = split(patterns)
    is_nan = patterns.isnan()
    assert int(is_nan.sum()) > 4000
    assert torch.equal(bits(join(model, low))[~is_nan], bits(patterns)[~is_nan])
    assert torch.equal(join(model, low).isnan(), is_nan)
    assert torch.equal(model.isnan(), is_nan)  # 0x7FFFFFFF, a GPU's nan, would overflow into a weight of -0


def test_the_weight_is_the_nearest_and_differs_from_torch_at_ties_alone(patterns):
    model, _ = split(patterns)
    is_number = ~patterns.isnan()
    is_tie = (bits(patterns) & 0xFFFF) == 0x8000
    assert torch.equal(bits(model)[is_number & ~is_tie], bits(patterns.bfloat16())[is_number & ~is_tie])
    ties = is_number & is_tie
    assert torch.equal(bits(model)[ties], (bits(patterns)[ties] // 2**16 + 1).to(torch.int16))  # away from zero
    assert (bits(model) != bits(patterns.bfloat16()))[ties].any()


def test_an_edited_weight_keeps_half_a_step_of_its_old_remainder_and_rounds_back():
    """Every weight with each of the extreme remainders and some between."""
    lows = torch.tensor([-32768, -32767, -12345, -1, 0, 1, 54, 32766, 32767], dtype=torch.int16)
    model = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).repeat_interleave(lows.numel())
    low = lows.repeat(2**16)
    before = low.clone()
    repair_(model, low)
    is_special = (model == 0) | ~model.isfinite()
    assert torch.equal(low[~is_special], before[~is_special])
    assert not low[is_special].any()
    main = join(model, low)
    again, rest = split(main)
    assert torch.equal(main.isnan(), model.isnan())
    assert torch.equal(main.isinf(), model.isinf())
    is_number = ~model.isnan()
    assert torch.equal(bits(again)[is_number], bits(model)[is_number])
    assert torch.equal(rest[is_number], low[is_number])
    assert int((bits(main).long() - bits(model.float()).long()).abs()[is_number].max()) == 2**15


def test_without_repair_a_pruned_weight_joins_to_nan():
    model, low = split(torch.tensor([1.0 - 2**-12]))
    assert low.item() < 0
    assert join(torch.zeros_like(model), low).isnan()
    repair_(torch.zeros_like(model), low)
    assert join(torch.zeros_like(model), low).item() == 0


@given(st.integers(0, 2**32 - 1), st.integers(-(2**15), 2**15 - 1))
def test_any_main_param_may_be_edited_to_any_weight(main_bits, edited):
    main = from_bits(torch.tensor([main_bits]))
    _, low = split(main)
    model = torch.tensor([edited], dtype=torch.int16).view(torch.bfloat16)
    repair_(model, low)
    joined = join(model, low)
    assert bool(joined.isnan()) == bool(model.isnan())
    if not model.isnan():
        assert torch.equal(bits(split(joined)[0]), bits(model))


@pytest.mark.parametrize("noisy", [False, True], ids=["nearest", "stochastic"])
def test_24_bits_are_off_by_their_bound(patterns, noisy):
    model, low = split24(patterns, noise_for(patterns) if noisy else None)
    joined = join(model, low)
    is_nan = patterns.isnan()
    assert torch.equal(joined.isnan(), is_nan)
    assert torch.equal(model.isnan(), is_nan)
    assert torch.equal(joined.isinf(), patterns.isinf())  # the largest finite value stays finite
    numbers = patterns.isfinite()
    exact, stored = patterns[numbers].double(), joined[numbers].double()
    error = (stored - exact).abs()
    is_normal = exact.abs() >= 2.0**-126
    below_largest = exact.abs() <= 2.0**128 * (1 - 2.0**-16)  # above it the next one would be inf
    half_step = 2.0**-16  # of the power of two below
    bound = half_step * (2 if noisy else 1)
    assert float((error / exact.abs())[is_normal & below_largest].max()) <= bound
    assert float(error[~is_normal].max()) <= 2.0**-126 * bound
    assert float((error / exact.abs())[is_normal].max()) < 2.0**-15
    again = split24(joined, noise_for(patterns, seed=9) if noisy else None)
    assert torch.equal(bits(join(*again))[~is_nan], bits(joined)[~is_nan])  # values of 24 bits stay
    assert torch.equal(bits(again[0])[~is_nan], bits(split(joined)[0])[~is_nan])  # the weight is the nearest


def test_24_bits_by_noise_are_right_in_the_mean():
    numel = 2**20
    for lower in (1, 64, 128, 200, 255):
        main = from_bits(torch.full((numel,), 0x3F801200 + lower))
        is_up = bits(join(*split24(main, noise_for(main)))) > 0x3F801200
        deviation = (lower / 256 * (1 - lower / 256) / numel) ** 0.5
        assert abs(is_up.double().mean().item() - lower / 256) < SIGMAS * deviation


def test_only_bfloat16_weights_are_halves():
    assert why_not_split(torch.bfloat16) is None
    assert "exponent" in why_not_split(torch.float16)
    assert all(why_not_split(dtype) for dtype in (torch.float32, torch.float64, torch.float8_e4m3fn))


def test_what_is_said_of_float16_is_so():
    """More fp32 values round to a float16 of 0 than 16 bits tell apart; in the normal range 13 bits would do."""
    largest_to_zero = 2.0**-25  # a tie, to even
    assert torch.tensor([largest_to_zero, -largest_to_zero]).half().tolist() == [0, 0]
    assert int(bits(torch.tensor([largest_to_zero]))) * 2 > 2**16 * 2**14
    small = torch.distributions.Normal(0.0, 0.01)
    assert 0.004 < 2 * float(small.cdf(torch.tensor(6.1e-5)) - 0.5) < 0.006


def test_what_bf16_holds_stays_and_kinds_stay(patterns):
    narrowed = narrow(patterns)
    is_nan, is_held = patterns.isnan(), (bits(patterns) & 0xFFFF) == 0
    assert torch.equal(narrowed.isnan(), is_nan)
    assert torch.equal(narrowed.isinf(), patterns.isinf())
    assert torch.equal(bits(narrowed)[is_held & ~is_nan], bits(patterns.bfloat16())[is_held & ~is_nan])
    above = patterns.isfinite() & (patterns.abs() > LARGEST_BF16)
    assert above.any()
    assert (narrowed[above].abs() == LARGEST_BF16).all()
    low, high = ((bits(patterns).long() & ~0xFFFF) + added for added in (0, 2**16))
    out = bits(narrowed.float()).long()
    assert ((out == low) | (out == high))[~is_nan].all()  # one of the two neighbours


@pytest.mark.parametrize("lower", [1, 2, 0x00FF, 0x4000, 0x8000, 0xC001, 0xFFFE, 0xFFFF])
def test_bf16_by_noise_goes_up_as_often_as_it_must(lower):
    numel = 2**21
    is_up = bits(narrow(from_bits(torch.full((numel,), 0x40490000 + lower)))) > 0x4049
    share = lower / 2**16
    assert abs(is_up.double().mean().item() - share) < SIGMAS * (share * (1 - share) / numel) ** 0.5


def averaged(narrow_, steps=4000, numel=4096, beta=0.999):
    """Return an average kept in bf16 over one in fp64, of values that are 1 in all steps but begin at 0.25."""
    kept = torch.full((numel,), 0.25)
    exact = 0.25
    for step in range(steps):
        wide = kept.mul_(beta).add_(1 - beta)
        exact = exact * beta + (1 - beta)
        kept = narrow_(wide, step).float()
    return kept.double().mean().item() / exact, kept.double().std().item() / exact


def test_an_exponential_average_does_not_freeze():
    """With a memory of 1 / (1 - beta**2) = 500 steps its variance is at most 500 times that of one rounding.

    One goes up by a step of 2**-7 or less with a chance p = increment / step: p (1 - p) step**2 < 0.75e-3 * 2**-7.
    """
    ratio, deviation = averaged(lambda wide, step: narrow(wide, step=step))
    largest = (0.75e-3 * 2**-7 * 500) ** 0.5
    assert deviation < largest
    assert abs(ratio - 1) < SIGMAS * largest / 4096**0.5 + 4000 * 2.0**-24  # and fp32 rounds once a step
    frozen, _ = averaged(lambda wide, _: wide.bfloat16())
    assert frozen < 0.7


def signs(values, lane):
    return ((values >> lane & 1) * 2 - 1).double()


def test_each_bit_of_the_noise_is_fair_and_owes_nothing_to_the_others():
    noise = uniform(2**20, seed=1)
    bound = SIGMAS * 2.0**-10
    for lane in range(16):
        assert abs(signs(noise, lane).mean().item()) < bound, lane
        for other in range(lane):
            assert abs((signs(noise, lane) * signs(noise, other)).mean().item()) < bound, (lane, other)


def test_the_noise_is_uniform():
    counts = torch.bincount(uniform(2**22, seed=2), minlength=2**16).double()
    statistic = ((counts - 64) ** 2 / 64).sum().item()  # chi-squared with 65535 degrees of freedom
    assert abs(statistic - 65535) < SIGMAS * (2 * 65535) ** 0.5


NEIGHBOURS = {
    "next": lambda first: uniform(2**20, 3, first=first + 1),
    "next but one": lambda first: uniform(2**20, 3, first=first + 2),
    "next row": lambda first: uniform(2**20, 3, first=first + NOISE_ROW),
    "next step": lambda first: uniform(2**20, 3, step=1, first=first),
    "far step": lambda first: uniform(2**20, 3, step=2**20, first=first),
    "next seed": lambda first: uniform(2**20, 4, first=first),
    "seed of more than 32 bits": lambda first: uniform(2**20, 3 + 2**32, first=first),
}


@pytest.mark.parametrize("neighbour", NEIGHBOURS.values(), ids=NEIGHBOURS)
@pytest.mark.parametrize("threshold", [2**15, 2**14, 60000, 5000])
def test_what_a_rounding_decides_owes_nothing_to_its_neighbours(neighbour, threshold):
    """The covariance of two decisions, in units of that of one: its deviation is 2**-10 for independent ones."""
    share = threshold / 2**16
    here, there = ((noise < threshold).double() - share for noise in (uniform(2**20, 3), neighbour(0)))
    assert abs((here * there).mean().item() / (share * (1 - share))) < SIGMAS * 2.0**-10


@pytest.mark.parametrize("lane", range(8, 16))
def test_two_columns_are_not_related_alike_in_all_rows(lane):
    """Else the errors of a matrix would be of rank one. For each pair of columns, over 4096 rows."""
    noise = uniform(4096 * NOISE_ROW, seed=5).view(4096, NOISE_ROW)
    agree = (signs(noise, lane)[:, :-1] * signs(noise, lane)[:, 1:]).mean(0)
    assert agree.square().mean().sqrt().item() < 2 * 4096**-0.5  # 1 were it so, 1/64 if independent
    assert agree.abs().max().item() < 0.25


def test_a_rounding_of_a_matrix_has_no_large_direction():
    """A matrix of independent signs, n by n, has norm 2 sqrt(n); one of rank one, n. Bound: half as much again."""
    matrix = (uniform(512 * NOISE_ROW, seed=6) >> 15).view(-1, 512)[:512].double() * 2 - 1
    assert torch.linalg.matrix_norm(matrix, 2).item() < 1.5 * 2 * 512**0.5


def test_noise_does_not_depend_on_how_a_step_is_counted():
    expected = uniform(3000, seed=7, step=123, first=500)
    for step in (torch.tensor(123), torch.tensor(123.0), torch.tensor(123, dtype=torch.int32)):
        assert torch.equal(uniform(3000, seed=7, step=step, first=500), expected)
    tensor, number = encodings._mix(torch.tensor(123456789)), encodings._mix(123456789)  # as on a device, and here
    assert tensor.item() == number


def hashed(word):
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word ^= word >> shift
        word = word * factor % 2**32
    return word ^ word >> 16


def noise_of(seed, step, element):
    """The noise of one element, in plain integers: for whoever writes it again, in another language."""
    row, column = divmod(element, 1024)
    key = hashed(hashed(hashed(seed % 2**32) ^ seed // 2**32 % 2**32) ^ step)
    added, multiplied = (hashed(row % 2**32 ^ hashed(key ^ number)) for number in (1, 2))
    word = (added ^ hashed(column // 2 ^ hashed(key ^ 3))) * (multiplied | 1) % 2**32
    return word >> 16 if column % 2 else word % 2**16


@pytest.mark.parametrize("first", [0, 1022, 2**40 + 77, 2**43])
def test_the_noise_is_the_hash_that_is_written_down(first):
    for seed, step in ((0, 0), (42, 7), (2**63 - 1, 2**31), (-5, 1)):
        assert uniform(1100, seed, step, first).tolist() == [noise_of(seed, step, first + i) for i in range(1100)]


def test_the_noise_is_what_it_was():
    """A run that resumes has the noise it would have had: a change of the hash is a change of results."""
    assert uniform(6, seed=42, step=7, first=1022).tolist() == [53852, 7836, 49991, 37339, 42559, 12239]


def test_noise_outside_its_range_is_refused():
    noise = Noise(0, 0, 2048, 1024, CPU)
    for first, numel in ((2047, 1), (3071, 2), (0, 1)):
        with pytest.raises(ValueError, match="outside the range"):
            noise.fill_(torch.empty(numel, dtype=torch.int32), first)


CASES = {
    "split": lambda x, _noise, _first: split(x),
    "join": lambda x, _noise, _first: (join(x.bfloat16(), bits(x).to(torch.int16)),),
    "split24": lambda x, _noise, _first: split24(x),
    "split24, noise": split24,
    "join24": lambda x, _noise, _first: (join(x.bfloat16(), bits(x).to(torch.int8)),),
    "narrow": lambda x, noise, first: (narrowed(x, noise, first),),
}


def narrowed(x, noise, first):
    out = torch.empty(x.numel(), dtype=torch.bfloat16)
    narrow_bf16_(x, out, noise=noise, first=first)
    return out


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("chunk", [1000, 2048, encodings.CPU_CHUNK])
def test_cuts_change_no_bit(case, chunk, patterns, monkeypatch):
    values = torch.cat([torch.randn(5000, generator=torch.Generator().manual_seed(0)), patterns[::331]])
    noise = noise_for(values, first=12345)
    whole = [bits(part) for part in case(values, noise, 12345)]
    monkeypatch.setattr(encodings, "CPU_CHUNK", chunk)
    for cuts in ([0, 1, 1023, 4000], [0, 2500], [0, 5000]):
        ends = [*cuts[1:], values.numel()]
        parts = [case(values[a:b].clone(), noise, 12345 + a) for a, b in zip(cuts, ends, strict=True)]
        for number, expected in enumerate(whole):
            assert torch.equal(torch.cat([bits(part[number]) for part in parts]), expected)
    later = Noise(0, 0, 12345 + 2500, values.numel() - 2500, CPU)  # made for a part only
    for number, expected in enumerate(whole):
        assert torch.equal(bits(case(values[2500:].clone(), later, 12345 + 2500)[number]), expected[2500:])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_looking_for_special_values_every_bit_is_the_same(case, monkeypatch):
    """A device is not asked whether there are any."""
    values = torch.randn(70000, generator=torch.Generator().manual_seed(0)) ** 3
    asked = case(values, noise_for(values), 0)
    monkeypatch.setattr(encodings, "_is_ordinary", lambda wide: False)
    for ours, theirs in zip(case(values, noise_for(values), 0), asked, strict=True):
        assert torch.equal(bits(ours), bits(theirs))


def test_nothing_is_written_where_there_is_nothing():
    empty = torch.empty(0)
    assert join(*split(empty)).numel() == join(*split24(empty, noise_for(empty))).numel() == narrow(empty).numel() == 0


def test_clearing_what_is_impossible_leaves_each_split_as_it_is_and_joins_no_zero_to_nan():
    main = torch.arange(-(2**15), 2**15, dtype=torch.int32).repeat(3)
    main[2**16 :] += 0x3F80 << 16
    main = torch.cat([main, main | -(2**31)]).view(torch.float32)
    model, low = torch.empty_like(main, dtype=torch.bfloat16), torch.empty_like(main, dtype=torch.int16)
    split_(main, model, low)
    kept = low.clone()
    clear_impossible_(model, low)
    assert torch.equal(low, kept)
    joined = torch.empty_like(main)
    for zero in (0.0, -0.0):
        model[::2] = zero
        low.copy_(kept)
        assert (low[::2] < 0).any()
        clear_impossible_(model, low)
        join_(model, low, joined)
        is_zero = model == 0
        assert torch.isfinite(joined[is_zero]).all()
        assert (joined[is_zero].abs() < 2.0**-133).all()
        assert torch.equal(low[~is_zero], kept[~is_zero])
