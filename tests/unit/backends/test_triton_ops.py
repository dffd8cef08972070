"""The Triton kernels in Triton's interpreter: casts bit by bit as torch's, and what all of them have in common."""

import math
import sys

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusedopt.backends.offers import FUNCTIONS
from tests.compare import bits
from tests.triton_cases import ADAMW, BLOCK, LOW, Problem, assert_same_bits, guarded, load_copy

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton (Linux only)")
tl = triton.language
pytestmark = pytest.mark.usefixtures("numpy_overflows_silently")

BOUNDARIES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)


def assert_same_bits_or_nan(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(bits(found)[~found.isnan()], bits(expected)[~expected.isnan()])


# -- scale_cast_


@pytest.mark.parametrize("factor", [None, 0.3], ids=["cast", "scaled"])
@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_scale_cast_equals_torch_around_every_block_boundary(ops, dtype, factor):
    sources = [torch.randn(numel) for numel in BOUNDARIES]
    targets, guards = zip(*(guarded(numel, dtype) for numel in BOUNDARIES), strict=True)
    scale = None if factor is None else torch.tensor(factor)
    before = [source.clone() for source in sources]
    ops.scale_cast_(targets, sources, scale)
    for target, source, guard, old in zip(targets, sources, guards, before, strict=True):
        assert_same_bits(target, (source if scale is None else source * scale).to(dtype))
        assert all((side == 7.0).all() for side in guard)
        assert torch.equal(source, old)


def test_scaling_in_place_equals_torch(ops):
    tensors = [torch.randn(numel) for numel in BOUNDARIES]
    expected = [tensor * torch.tensor(0.3) for tensor in tensors]
    ops.scale_cast_(tensors, tensors, torch.tensor(0.3))
    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, wanted)


def test_scaled_cast_rounds_the_product_before_the_cast(ops):
    source = torch.randn(200_000)
    factor = torch.tensor(1 / 3)
    target = torch.empty_like(source, dtype=torch.float16)
    ops.scale_cast_([target], [source], factor)
    assert_same_bits(target, (source * factor).half())
    in_one_rounding = torch.from_numpy((source.double() * factor.double()).numpy().astype(np.float16))
    assert (target != in_one_rounding).any()


def test_factor_is_converted_like_torch_ops_does(ops):
    source, target = torch.randn(100), torch.empty(100)
    ops.scale_cast_([target], [source], torch.tensor([1 / 3], dtype=torch.float64))
    assert_same_bits(target, source * torch.tensor(1 / 3))
    with pytest.raises(ValueError, match=r"factor is .*reads one element"):
        ops.scale_cast_([target], [source], torch.ones(2))


def test_every_bfloat16_and_its_neighbourhood_round_as_in_torch(ops):
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).view(-1, 1) * 2**16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)  # exact, around ties, the next's edge
    source = (high + low).view(torch.float32).flatten()
    target = torch.empty_like(source, dtype=torch.bfloat16)
    ops.scale_cast_([target], [source])
    expected = source.bfloat16()
    regimes = [source == 0, source.isnan(), source.isinf(), (source.abs() < 2.0**-126) & (source != 0)]
    assert all(regime.any() for regime in regimes)
    assert (expected.isinf() & source.isfinite()).any()
    assert_same_bits_or_nan(target, expected)
    truncated = (bits(source) >> 16).to(torch.int16)
    assert (bits(expected)[~source.isnan()] != truncated[~source.isnan()]).any()


def test_every_float16_and_its_ties_round_as_in_torch(ops):
    finite = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).float()
    following = torch.cat([finite[1:], torch.tensor([65536.0])])  # the tie above 65504 goes to inf
    middle = (finite + following) / 2
    others = torch.tensor([math.inf, math.nan, 3e38, 1e-40, 2.0**-149, 2.0**-25])
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    source = torch.cat([finite, middle, middle.nextafter(up), middle.nextafter(down), others])
    source = torch.cat([source, -source])
    target = torch.empty_like(source, dtype=torch.float16)
    ops.scale_cast_([target], [source])
    expected = source.half()
    assert (expected.isinf() & source.isfinite()).any()
    assert ((expected.abs() < 2.0**-14) & (expected != 0)).any()
    assert_same_bits_or_nan(target, expected)


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_special_values_pass_through_scaling(ops, dtype):
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-126), 3.4e38, -65504.0, 65520.0, 1.0]
    source = torch.tensor(values)
    for factor in (1.0, -1.0, 0.0, 2.0, 0.5, math.inf, math.nan):
        target = torch.empty_like(source, dtype=dtype)
        ops.scale_cast_([target], [source], torch.tensor(factor))
        assert_same_bits_or_nan(target, (source * torch.tensor(factor)).to(dtype))


def test_dense_tensors_of_any_stride_order_are_cast(ops):
    sources = [torch.randn(30, 50).t(), torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last), torch.randn(())]
    sources.append(torch.randn(3000)[100:2500].view(24, 100).t())
    targets = [torch.empty_like(source, dtype=torch.bfloat16) for source in sources]
    assert [t.stride() for t in targets] == [s.stride() for s in sources]
    assert sum(not source.is_contiguous() for source in sources) == 3
    ops.scale_cast_(targets, sources, torch.tensor(0.7))
    for target, source in zip(targets, sources, strict=True):
        assert_same_bits(target, (source * torch.tensor(0.7)).bfloat16())


@pytest.mark.parametrize(
    ("target", "source", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.float64), TypeError, "source is torch.float64"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16), TypeError, "source is torch.bfloat16"),
        (torch.zeros(4, dtype=torch.float64), torch.zeros(4), TypeError, "target is torch.float64"),
        (torch.zeros(4), torch.zeros(5), ValueError, "equal shapes"),
        (torch.zeros(3, 2), torch.zeros(2, 3).t(), ValueError, "equal shapes"),
        (torch.zeros(4), torch.zeros(4, device="meta"), ValueError, "devices"),
        (torch.zeros(8)[::2], torch.zeros(8)[::2], ValueError, "dense"),
        (torch.zeros(1).expand(4), torch.zeros(1).expand(4), ValueError, "dense"),
    ],
)
def test_scale_cast_refuses_by_name(ops, target, source, error, message):
    fine = torch.zeros(3)
    with pytest.raises(error, match=message):
        ops.scale_cast_([fine, target], [torch.ones(3), source])
    assert (fine == 0).all()  # refused before anything was written


# -- both


class Operations(TorchDispatchMode):
    """Records which operations of torch run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.__name__)
        return func(*args, **kwargs or {})


READ = "_local_scalar_dense.default"  # what .item(), float() and bool() of a tensor come down to


def test_nothing_is_read_back_to_the_host(ops):
    problem = Problem(sizes=(100, 200))
    with Operations() as seen:
        ops.fused_step_(ADAMW, problem.operands(), grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0))
        ops.scale_cast_(problem.mains, problem.mains, torch.tensor(2.0))
    assert "stack.default" in seen.names
    assert READ not in seen.names
    with Operations() as seen:
        bool(torch.tensor(0.0))
    assert READ in seen.names


def test_written_tensors_count_as_changed_and_read_ones_do_not(ops):
    problem = Problem(sizes=(100, 200))
    written = [(tensor, tensor._version) for tensor in problem.written()]
    read = [(tensor, tensor._version) for tensor in (*problem.grads, *problem.steps)]
    ops.fused_step_(ADAMW, problem.operands())
    assert all(tensor._version > old for tensor, old in written)
    assert all(tensor._version == old for tensor, old in read)
    source, target = torch.randn(5), torch.randn(5)
    versions = source._version, target._version
    ops.scale_cast_((target,), (source,))
    assert (source._version, target._version) == (versions[0], versions[1] + 1)


def test_a_cpu_tensor_without_the_interpreter_is_refused_by_name(ops, compiled_ops):
    cpu, cuda, meta = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")
    assert [ops.runs_on(device) for device in (cpu, cuda, meta)] == [True, True, False]
    assert [compiled_ops.runs_on(device) for device in (cpu, cuda, meta)] == [False, True, False]
    with pytest.raises(RuntimeError, match="do not run on cpu"):
        compiled_ops.scale_cast_([torch.zeros(3)], [torch.zeros(3)])
    with pytest.raises(RuntimeError, match="do not run on cpu"):
        compiled_ops.fused_step_(ADAMW, Problem().operands())


def test_offer_names_every_function(ops, monkeypatch):
    offered = ops.offer()
    assert offered.version == triton.__version__
    assert offered.functions == {"scale_cast_": ops.scale_cast_, "fused_step_": ops.fused_step_}
    assert {*offered.functions, *offered.missing} == set(FUNCTIONS)
    assert all(why and "\n" not in why for why in offered.missing.values())
    monkeypatch.delattr(tl, "fma")
    old = ops.offer()
    assert old.functions == {}
    assert old.missing == dict.fromkeys(FUNCTIONS, "triton.language has no fma")


def test_importing_without_triton_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="triton"):
        load_copy("triton_ops_without_triton")


@pytest.mark.parametrize("numel", [0, 1, BLOCK, BLOCK + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**40])
def test_grid_covers_every_element(ops, numel):
    assert ops.BLOCK == BLOCK
    (programs,) = ops.grid(numel)
    assert (programs - 1) * BLOCK < numel <= programs * BLOCK or numel == programs == 0
    assert programs < 2**31  # CUDA's limit on the first axis of a grid


def store_offsets(target, program, offsets_of: tl.constexpr, BLOCK: tl.constexpr):
    tl.store(target + tl.arange(0, BLOCK), offsets_of(program, BLOCK))


def test_offsets_beyond_two_to_the_31_do_not_overflow(ops, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = torch.zeros(BLOCK, dtype=torch.int64)
    (programs,) = ops.grid(3 * 2**31)
    assert programs * BLOCK > 2**31
    triton.jit(store_offsets)[(1,)](target, programs - 1, ops._offsets, BLOCK)
    assert torch.equal(target, torch.arange((programs - 1) * BLOCK, programs * BLOCK))
