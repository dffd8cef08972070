"""The adapters of apex and Transformer Engine, on doubles: what is passed, what comes back.

The doubles refuse, or visibly corrupt, what the real code would; see tests/doubles. The claims about
results are in tests/adapter_cases.py, for tests/gpu to run on the real libraries.
"""

import math

import pytest
import torch

from fusedopt.backends import apex_ops, lists, te_ops, torch_ops
from fusedopt.backends.offers import StepTensors
from fusedopt.backends.selfcheck import fault
from tests import adapter_cases
from tests.adapter_cases import ADAM, ADAMW, NESTEROV, make_operands
from tests.doubles import recording
from tests.doubles.adapters import ADAPTERS, OFFERED, functions_of
from tests.doubles.apex_double import apex_installed
from tests.doubles.te_double import te_installed

CPU = torch.device("cpu")
WITHOUT_THE_LIBRARY = (
    adapter_cases.adds_nothing_for_zero_tokens,
    adapter_cases.refuses_by_dtype_what_the_library_would_misread,
    adapter_cases.refuses_by_shape_what_does_not_fit,
    adapter_cases.leaves_other_norms_to_torch,
    adapter_cases.passes_over_empty_tensors_in_other_norms,
    adapter_cases.adds_rows_up_in_float64,
    adapter_cases.rounds_a_low_precision_product_twice_as_torch_does,
    adapter_cases.takes_strided_tensors_and_other_dtypes,
    adapter_cases.refuses_what_it_would_compute_wrong,
    adapter_cases.refuses_dtypes_and_layouts_that_the_kernel_would_misread,
)


# -- Results


@pytest.mark.parametrize("case", adapter_cases.CASES, ids=str)
def test_claim_holds_on_the_double(case, library):
    _, functions, calls = library
    case.run(functions[case.function], CPU)
    assert bool(calls) is (case.run not in WITHOUT_THE_LIBRARY)


@pytest.mark.parametrize(
    "case", [c for c in adapter_cases.CASES if c.is_torchs and hasattr(torch_ops, c.function)], ids=str
)
def test_claim_holds_for_the_reference_as_well(case):
    case.run(getattr(torch_ops, case.function), CPU)


def test_every_function_has_cases():
    assert {case.function for case in adapter_cases.CASES} == set(OFFERED)
    assert len({str(case) for case in adapter_cases.CASES}) == len(adapter_cases.CASES) > 25


@pytest.mark.parametrize("dtype", adapter_cases.LOW, ids=str)
def test_the_self_check_believes_the_doubles(library, dtype):
    _, functions, calls = library
    assert {name: fault(name, run, CPU, dtype) for name, run in functions.items()} == dict.fromkeys(OFFERED)
    assert calls


# -- What is passed


def test_wgrad_passes_dense_operands_in_the_order_of_each_library():
    x, dy, main_grad = torch.ones(8, 4).bfloat16(), torch.ones(6, 8).bfloat16().t(), torch.zeros(6, 4)
    with apex_installed() as calls:
        apex_ops.offer().functions["wgrad_accumulate_"](main_grad, dy, x, accumulate=True)
    (call,) = functions_of(calls, "wgrad_gemm_accum_fp32")
    (input,), (grad_output,), (out,) = call.lists
    assert (input.shape, grad_output.shape) == (x.shape, dy.shape)
    assert grad_output.is_contiguous()
    assert input is x  # dense already: no copy
    assert out is main_grad
    with te_installed() as calls:
        for accumulate in (True, False):
            te_ops.offer().functions["wgrad_accumulate_"](main_grad, dy, x, accumulate=accumulate)
    for call, accumulate in zip(functions_of(calls, "general_gemm"), (True, False), strict=True):
        assert [tensors[0].shape for tensors in call.lists] == [x.shape, dy.shape, main_grad.shape]
        assert call.lists[2][0] is main_grad
        expected = {"layout": "NT", "grad": True, "out_dtype": torch.float32, "accumulate": accumulate}
        assert call.keywords == {**expected, "workspace": None}


def test_the_devices_of_the_operands_have_to_be_one(library):
    _, functions, calls = library
    operands = [torch.ones(4, n, dtype=torch.bfloat16) for n in (8, 16)]
    with pytest.raises(ValueError, match="on meta, cpu, cpu; needed is one device"):
        functions["wgrad_accumulate_"](torch.ones(8, 16, device="meta"), *operands, accumulate=True)
    with pytest.raises(ValueError, match=r"target 0 is .* on meta and its source .* on cpu"):
        functions["scale_cast_"]([torch.ones(8, device="meta")], [torch.ones(8)])
    with pytest.raises(ValueError, match=r"target 1 is \[7\]"):
        functions["scale_cast_"]([torch.ones(8), torch.ones(7)], [torch.ones(8), torch.ones(8)])
    assert not calls


def test_dimensions_beyond_int32_are_refused(library):
    _, functions, calls = library
    main_grad, grad_output, input = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((1, 1), torch.float32), ((2**31, 1), torch.bfloat16), ((2**31, 1), torch.bfloat16))
    )
    with pytest.raises(ValueError, match="do not fit the library's int32"):
        functions["wgrad_accumulate_"](main_grad, grad_output, input, accumulate=True)
    assert not calls


def test_nothing_on_the_cpu_reaches_a_real_library(library, monkeypatch):
    _, functions, calls = library
    monkeypatch.setattr(lists, "DEVICE_TYPES", ("cuda",))
    operands = [torch.ones(4, n, dtype=torch.bfloat16) for n in (8, 16)]
    with pytest.raises(TypeError, match=r"on cpu; this library adds products .* on cuda"):
        functions["wgrad_accumulate_"](torch.ones(8, 16), *operands, accumulate=True)
    with pytest.raises(TypeError, match="tensors on cpu; this library steps on cuda"):
        functions["fused_step_"](ADAMW, make_operands((8,), ADAMW, None, CPU, (1,)))
    adapter_cases.counts_every_element_once(functions["norm"], CPU)
    adapter_cases.scales_in_float32_and_rounds_once_more(functions["scale_cast_"], CPU)
    assert not calls


def test_kernels_get_one_dtype_per_list_no_empties_and_a_fresh_flag(library):
    _, functions, calls = library
    dtypes = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float32)
    flats = [torch.ones(n, dtype=dtype) for n, dtype in zip((8, 8, 0, 8, 16), dtypes, strict=True)]
    flats[0][0] = math.inf  # raises the flag of its own launch
    functions["norm"](flats)
    assert [call.numels for call in functions_of(calls, "multi_tensor_l2norm")] == [[[8, 16]], [[8]], [[8]]]
    assert [call.dtypes for call in calls] == [[["torch.float32"]], [["torch.bfloat16"]], [["torch.float16"]]]
    assert [call.arguments for call in calls] == [(False,)] * 3
    assert [call.flag_before for call in calls] == [0, 0, 0]
    assert int(calls[0].flag[0]) == 1
    assert len({call.flag.data_ptr() for call in calls}) == 3


def test_casts_go_by_number_and_factors_by_what_the_library_takes():
    sources, factor = [torch.ones(8), torch.ones(4)], torch.tensor(0.5)
    targets = [torch.empty(8, dtype=torch.bfloat16), torch.empty(4, dtype=torch.float16)]
    with apex_installed() as calls:
        for given in (None, factor):
            apex_ops.offer().functions["scale_cast_"](targets, sources, given)
    assert [call.arguments for call in functions_of(calls, "multi_tensor_scale")] == [(1.0,), (1.0,), (0.5,), (0.5,)]
    assert all(type(call.arguments[0]) is float for call in calls)
    assert [call.dtypes for call in calls[:2]] == [
        [["torch.float32"], ["torch.bfloat16"]],
        [["torch.float32"], ["torch.float16"]],
    ]
    with te_installed() as calls:
        for given in (None, factor.double()):
            te_ops.offer().functions["scale_cast_"](targets, sources, given)
    names = [call.name for call in calls]
    assert names == ["multi_tensor_scale"] * 2 + ["multi_tensor_scale_tensor"] * 2
    assert all(torch.equal(call.arguments[0], torch.tensor([0.5])) for call in calls[2:])
    with te_installed(without=["multi_tensor_scale_tensor"]) as calls:
        te_ops.offer().functions["scale_cast_"](targets, sources, factor)
    assert {call.name for call in calls} == {"multi_tensor_scale"}
    assert all((target == 0.5).all() for target in targets)


def test_a_factor_on_the_device_is_never_read_back():
    targets, sources = ([torch.empty(8, dtype=dtype, device="meta")] for dtype in (torch.bfloat16, torch.float32))
    factor = torch.empty((), device="meta")  # a value that the host cannot have
    with pytest.raises(RuntimeError):
        float(factor)
    with apex_installed() as calls:
        apex_ops.offer().functions["scale_cast_"](targets, sources, factor)
    assert not calls
    with te_installed(without=["multi_tensor_scale_tensor"]) as calls:
        te_ops.offer().functions["scale_cast_"](targets, sources, factor)
    assert not calls
    with te_installed() as calls:
        te_ops.offer().functions["scale_cast_"](targets, sources, factor)
    (call,) = functions_of(calls, "multi_tensor_scale_tensor")
    assert call.arguments[0].device.type == "meta"


def test_a_factor_on_the_host_is_passed_as_a_number_where_the_tensors_are_elsewhere():
    targets, sources = ([torch.empty(8, device="meta")] for _ in range(2))
    with te_installed() as calls:
        te_ops.offer().functions["scale_cast_"](targets, sources, torch.tensor(0.5))
    (call,) = functions_of(calls, "multi_tensor_scale")
    assert call.arguments == (0.5,)


def step(module, rule, models, steps=(3, 3)):
    """Make a step on the double that is installed; return the operands."""
    operands = make_operands((8, 4), rule, models, CPU, steps)
    module.offer().functions["fused_step_"](rule, operands)
    return operands


def same(tensors, others):
    return [t.data_ptr() for t in tensors] == [t.data_ptr() for t in others]


@pytest.mark.parametrize("models", [None, *adapter_cases.LOW], ids=str)
def test_adam_gets_its_lists_and_numbers_in_order(models):
    with apex_installed() as calls:
        operands = step(apex_ops, ADAMW, models)
    (call,) = functions_of(calls, "multi_tensor_adam")
    for passed, meant in zip(call.lists, [operands.grads, operands.mains, *operands.states], strict=True):
        assert same(passed, meant)
    assert call.arguments == (0.01, 0.9, 0.999, 1e-8, 3, 1, 1, 0.1)
    with te_installed() as calls:
        operands = step(te_ops, ADAM, models)
    (call,) = functions_of(calls, "multi_tensor_adam")
    columns = [operands.grads, operands.models or operands.mains, *operands.states] + (
        [operands.mains] if models else []
    )
    for passed, meant in zip(call.lists, columns, strict=True):
        assert same(passed, meant)
    assert call.arguments == (0.01, 0.8, 0.99, 1e-6, 3, 0, 1, 0.1)


@pytest.mark.parametrize("models", [None, *adapter_cases.LOW], ids=str)
def test_sgd_gets_its_lists_and_numbers_in_order(models):
    for name, (module, install) in ADAPTERS.items():
        with install() as calls:
            operands = step(module, NESTEROV, models)
        (call,) = functions_of(calls, "multi_tensor_sgd")
        columns = [operands.grads, operands.mains, *operands.states]
        columns += [operands.models] if name == "te" and models is torch.float16 else []
        for passed, meant in zip(call.lists, columns, strict=True):
            assert same(passed, meant)
        assert call.arguments == (0.01, 0.9, 0.0, 0.1, True, False, False, 1.0)
        assert call.flag_before == 0


def test_parameters_of_one_step_number_go_together(library):
    module, _, calls = library
    operands = make_operands((8, 4, 2, 0, 6), ADAMW, torch.bfloat16, CPU, (1, 7, 1, 9, 7))
    module.offer().functions["fused_step_"](ADAMW, operands)
    assert [(call.arguments[4], call.numels[0]) for call in functions_of(calls, "multi_tensor_adam")] == [
        (1, [8, 2]),
        (7, [4, 6]),
    ]


# -- Long tensors


def test_tensors_beyond_int32_are_split_at_equal_places(library):
    _, functions, calls = library
    huge = [torch.empty(n, device="meta") for n in (2**31 + 8, 8)]
    total = functions["norm"](huge)
    assert (total.dtype, total.shape) == (torch.float64, torch.Size())
    (call,) = functions_of(calls, "multi_tensor_l2norm")
    assert call.numels == [[2**30, 2**30, 8, 8]]
    calls.clear()
    functions["scale_cast_"]([tensor.bfloat16() for tensor in huge], huge)
    (call,) = functions_of(calls, "multi_tensor_scale")
    assert call.numels == [[2**30, 2**30, 8, 8]] * 2
    assert [tensor.storage_offset() for tensor in call.lists[1]] == [0, 2**30, 2**31, 0]
    calls.clear()
    columns = [[torch.empty(2**31 + 8, device="meta")] for _ in range(4)]
    models = [torch.empty(2**31 + 8, device="meta", dtype=torch.float16)]
    functions["fused_step_"](ADAMW, StepTensors(columns[0], columns[1], columns[2:], models, [torch.tensor(1.0)]))
    (call,) = functions_of(calls, "multi_tensor_adam")
    assert call.numels == [[2**30, 2**30, 8]] * len(call.lists)


@pytest.mark.parametrize("case", adapter_cases.CASES, ids=str)
def test_split_tensors_end_as_whole_ones(case, library, monkeypatch):
    _, functions, calls = library
    monkeypatch.setattr(lists, "MAX_NUMEL", 256)
    monkeypatch.setattr(recording, "INT32_END", 512)
    case.run(functions[case.function], CPU)
    assert all(max(map(max, call.numels)) <= 256 for call in calls if call.name.startswith("multi"))


def test_pieces_stay_aligned_to_16_bytes():
    assert all(lists.MAX_NUMEL * dtype.itemsize % 16 == 0 for dtype in lists.KERNEL_DTYPES)
    assert lists.MAX_NUMEL < 2**31
    flat = torch.empty(3 * 256 + 5)
    pieces = lists.launches([[flat]])[0].lists[0]
    assert same(pieces, [flat])
    assert pieces[0].data_ptr() % 16 == 0
