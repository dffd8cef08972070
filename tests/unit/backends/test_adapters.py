"""The adapters of apex and Transformer Engine, on doubles: what is offered, what is passed, what comes back.

The doubles refuse, or visibly corrupt, what the real code would; see tests/doubles. The claims about
results are in tests/adapter_cases.py, for tests/gpu to run on the real libraries.
"""

import inspect
import math
import sys
import types

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from fusedopt.backends import apex_ops, lists, te_ops, torch_ops
from fusedopt.backends.offers import FUNCTIONS, Absent, Sgd, Spans, load, version_of
from fusedopt.backends.selfcheck import fault
from tests import adapter_cases
from tests.adapter_cases import ADAM, ADAMW, NESTEROV, SGD, make_spans
from tests.doubles import apex_double, recording, te_double
from tests.doubles.apex_double import apex_installed
from tests.doubles.recording import WouldCorrupt
from tests.doubles.te_double import te_installed
from tests.reference import Reference

ADAPTERS = {"apex": (apex_ops, apex_installed), "te": (te_ops, te_installed)}
OFFERED = ("wgrad_accumulate_", "norm", "scale_cast_", "fused_step_")
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


@pytest.fixture(params=ADAPTERS)
def library(request):
    """The functions of one adapter, and the calls that reach its double."""
    module, install = ADAPTERS[request.param]
    with install() as calls:
        yield module, module.offer().functions, calls


def functions_of(calls, *names):
    """Return the calls of ``names``, and check that every other was of none."""
    assert {call.name for call in calls} <= set(names), {call.name for call in calls}
    return list(calls)


# Results


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


# What is offered


def test_everything_there_is_offered_and_the_rest_has_a_reason(library):
    module, _, _ = library
    found = module.offer()
    assert tuple(found.functions) == OFFERED
    assert set(found.functions) | set(found.missing) == set(FUNCTIONS)
    assert "sum overflows float32" in found.missing["found_inf"]
    assert found.version == "unknown"  # no metadata beside the double


def test_functions_have_the_signatures_of_the_reference(library):
    _, functions, _ = library
    for name in ("norm", "scale_cast_", "wgrad_accumulate_"):
        ours, theirs = inspect.signature(functions[name]), inspect.signature(getattr(torch_ops, name))
        assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
            (p.name, p.kind, p.default) for p in theirs.parameters.values()
        ]
    assert list(inspect.signature(functions["fused_step_"]).parameters) == ["rule", "spans", "grad_scale", "found_inf"]


def test_rules_that_the_kernels_know_are_taken(library):
    module, _, _ = library
    assert module.takes(ADAMW)
    assert module.takes(ADAM)
    assert module.takes(SGD)
    assert not module.takes(Sgd(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, is_nesterov=False))
    assert module.TAKES_FOUND_INF is False
    assert set(module.WGRAD_DTYPES) == {torch.bfloat16, torch.float16}


def test_without_the_libraries_everything_is_missing_by_name():
    found = te_ops.offer()
    assert (found.version, found.functions) == (None, {})
    assert found.missing == dict.fromkeys(FUNCTIONS, "no module named transformer_engine")
    found = apex_ops.offer()
    assert (found.version, found.functions, set(found.missing)) == (None, {}, set(FUNCTIONS))
    assert found.missing["norm"] == (
        "no module named amp_C; NVIDIA's apex is built from github.com/NVIDIA/apex with APEX_CPP_EXT=1 APEX_CUDA_EXT=1"
    )
    assert found.missing["wgrad_accumulate_"].startswith("no module named fused_weight_gradient_mlp_cuda; NVIDIA's")


def test_each_of_apex_extensions_is_offered_without_the_other():
    with apex_installed(without=["amp_C"]):
        found = apex_ops.offer()
        assert list(found.functions) == ["wgrad_accumulate_"]
        assert found.missing["norm"].startswith("no module named amp_C")
        assert found.missing["norm"].endswith("APEX_CUDA_EXT=1, and the one installed was not")
    with apex_installed(without=["fused_weight_gradient_mlp_cuda"]):
        assert tuple(apex_ops.offer().functions) == OFFERED[1:]
    with apex_installed(package=False):  # the extensions need no Python package
        found = apex_ops.offer()
        assert (found.version, tuple(found.functions)) == ("unknown", OFFERED)


@pytest.mark.parametrize(
    ("symbol", "function", "adapters"),
    [
        ("multi_tensor_l2norm", "norm", ("apex", "te")),
        ("multi_tensor_scale", "scale_cast_", ("apex", "te")),
        ("multi_tensor_adam", "fused_step_", ("apex", "te")),
        ("multi_tensor_sgd", "fused_step_", ("apex", "te")),
        ("general_gemm", "wgrad_accumulate_", ("te",)),
    ],
)
def test_a_missing_symbol_costs_its_function_only(symbol, function, adapters):
    for name in adapters:
        module, install = ADAPTERS[name]
        with install(without=[symbol]):
            found = module.offer()
        assert set(found.functions) == set(OFFERED) - {function}
        assert found.missing[function].endswith(f"has no {symbol}")


@pytest.mark.parametrize(
    "error",
    [
        *(OSError("libc10_cuda.so: cannot open"), RuntimeError("no CUDA\nsecond line"), KeyError()),
        *(SystemExit("needs a GPU"), GeneratorExit(), BaseException("no more")),
    ],
    ids=repr,
)
def test_an_import_that_raises_anything_means_absent_with_the_reason(error):
    text = f"{type(error).__name__}: {error.args[0].splitlines()[0]}" if error.args else type(error).__name__
    with te_installed(broken=error):
        found = te_ops.offer()
    assert found.functions == {}
    assert found.missing == dict.fromkeys(FUNCTIONS, f"importing transformer_engine.pytorch raised {text}")
    with apex_installed(broken=error):
        found = apex_ops.offer()
    assert list(found.functions) == ["wgrad_accumulate_"]
    assert found.missing["norm"] == f"importing amp_C raised {text}"


def test_an_interrupt_while_a_library_is_imported_is_the_users():
    with te_installed(broken=KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        te_ops.offer()
    with apex_installed(broken=KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        apex_ops.offer()


def test_a_lazy_module_that_breaks_at_the_symbol_is_absent_with_the_reason(monkeypatch):
    def breaks(name):
        raise SystemExit(f"{name} needs a GPU")

    lazy = types.ModuleType("lazy_library")
    lazy.__getattr__ = breaks
    monkeypatch.setitem(sys.modules, "lazy_library", lazy)
    with pytest.raises(Absent, match=r"^importing lazy_library raised SystemExit: kernel needs a GPU$"):
        load("lazy_library", "kernel")


class Unreadable:
    """A function whose signature raises where it is read."""

    @property
    def __signature__(self):
        raise SystemExit("not now")

    def __call__(self):
        raise NotImplementedError


def test_a_signature_that_raises_anything_costs_its_function_only(monkeypatch):
    with te_installed():
        monkeypatch.setattr(sys.modules["transformer_engine.pytorch.cpp_extensions"], "general_gemm", Unreadable())
        found = te_ops.offer()
    assert set(found.functions) == set(OFFERED) - {"wgrad_accumulate_"}
    assert found.missing["wgrad_accumulate_"] == "reading the signature of general_gemm raised SystemExit: not now"


def test_a_finder_and_metadata_that_raise_anything_mean_absent(monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "apex":
                raise SystemExit("no finder")

        def find_distributions(self, context=None):
            raise SystemExit("no metadata")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "apex", raising=False)
    assert apex_ops.offer().functions == {}
    assert version_of("transformer_engine") is None


def put_distribution(monkeypatch, folder, version, *packages, init=""):
    """Install a distribution "apex" of Python files into ``folder``, and put that on the path."""
    for package in packages:
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(init)
    info = folder / f"apex-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: apex\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "apex", raising=False)


def test_the_other_project_of_that_name_is_recognised_and_not_imported(monkeypatch, tmp_path):
    put_distribution(monkeypatch, tmp_path, "0.9.10.dev0", "apex", init="raise SystemExit('Pyramid')")
    found = apex_ops.offer()
    assert (found.version, found.functions) == (None, {})
    assert "the \"apex\" installed is another project of that name (PyPI's), NVIDIA's is built" in found.missing["norm"]
    assert found.missing["norm"].endswith("with APEX_CPP_EXT=1 APEX_CUDA_EXT=1")
    assert "apex" not in sys.modules


def test_apex_without_its_extensions_is_recognised_as_nvidias(monkeypatch, tmp_path):
    put_distribution(monkeypatch, tmp_path, "0.1", "apex", "apex/multi_tensor_apply")
    found = apex_ops.offer()
    assert (found.version, found.functions) == ("0.1", {})
    assert found.missing["fused_step_"].endswith("APEX_CUDA_EXT=1, and the one installed was not")


def test_extensions_beside_the_other_project_are_offered_and_its_version_is_not_theirs(monkeypatch, tmp_path):
    put_distribution(monkeypatch, tmp_path, "0.9.10.dev0", "apex")
    with apex_installed(package=False):
        found = apex_ops.offer()
    assert tuple(found.functions) == OFFERED
    assert found.version == "unknown"


def test_versions_are_those_of_the_distributions(monkeypatch):
    versions = {"apex": "0.1", "transformer_engine": "2.20.2"}
    for module in (apex_ops, te_ops):
        monkeypatch.setattr(module, "version_of", versions.get)
    with apex_installed(), te_installed():
        assert apex_ops.offer().version == "0.1"
        assert te_ops.offer().version == "2.20.2"


# Signatures of general_gemm


def test_an_older_gemm_gets_its_workspace():
    with te_installed(gemm="with_workspace") as calls:
        wgrad = te_ops.offer().functions["wgrad_accumulate_"]
        adapter_cases.adds_to_what_is_there(wgrad, CPU)
        adapter_cases.overwrites_without_reading_what_was_there(wgrad, CPU)
    assert all(call.keywords["workspace"].dtype is torch.uint8 for call in functions_of(calls, "general_gemm"))


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ({"gemm": "without_accumulate"}, "general_gemm of this release has no parameter accumulate"),
        ({"gemm": "with_stranger"}, "general_gemm of this release wants stranger, which this adapter does not know"),
        (
            {"gemm": "with_workspace", "get_workspace": "absent"},
            "general_gemm of this release wants a workspace, and transformer_engine.pytorch.module.base has no "
            "get_workspace",
        ),
        (
            {"gemm": "with_workspace", "get_workspace": "with a device"},
            "general_gemm of this release wants a workspace, and get_workspace of this release wants device",
        ),
    ],
    ids=str,
)
def test_a_gemm_of_another_signature_is_not_offered_and_the_reason_names_it(release, reason):
    with te_installed(**release):
        found = te_ops.offer()
    assert set(found.functions) == set(OFFERED) - {"wgrad_accumulate_"}
    assert found.missing["wgrad_accumulate_"] == reason


def test_a_gemm_whose_signature_cannot_be_read_is_not_offered(monkeypatch):
    with te_installed():
        monkeypatch.setattr(sys.modules["transformer_engine.pytorch.cpp_extensions"], "general_gemm", dict.fromkeys)
        assert "general_gemm" in te_ops.offer().missing["wgrad_accumulate_"]


# What is passed


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
        functions["fused_step_"](ADAMW, make_spans((8,), ADAMW, None, CPU, (1,)))
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
    """Make a step on the double that is installed; return the spans."""
    spans = make_spans((8, 4), rule, models, CPU, steps)
    module.offer().functions["fused_step_"](rule, spans)
    return spans


def same(tensors, others):
    return [t.data_ptr() for t in tensors] == [t.data_ptr() for t in others]


@pytest.mark.parametrize("models", [None, *adapter_cases.LOW], ids=str)
def test_adam_gets_its_lists_and_numbers_in_order(models):
    with apex_installed() as calls:
        spans = step(apex_ops, ADAMW, models)
    (call,) = functions_of(calls, "multi_tensor_adam")
    for passed, meant in zip(call.lists, [spans.grads, spans.mains, *spans.states], strict=True):
        assert same(passed, meant)
    assert call.arguments == (0.01, 0.9, 0.999, 1e-8, 3, 1, 1, 0.1)
    with te_installed() as calls:
        spans = step(te_ops, ADAM, models)
    (call,) = functions_of(calls, "multi_tensor_adam")
    columns = [spans.grads, spans.models or spans.mains, *spans.states] + ([spans.mains] if models else [])
    for passed, meant in zip(call.lists, columns, strict=True):
        assert same(passed, meant)
    assert call.arguments == (0.01, 0.8, 0.99, 1e-6, 3, 0, 1, 0.1)


@pytest.mark.parametrize("models", [None, *adapter_cases.LOW], ids=str)
def test_sgd_gets_its_lists_and_numbers_in_order(models):
    for name, (module, install) in ADAPTERS.items():
        with install() as calls:
            spans = step(module, NESTEROV, models)
        (call,) = functions_of(calls, "multi_tensor_sgd")
        columns = [spans.grads, spans.mains, *spans.states]
        columns += [spans.models] if name == "te" and models is torch.float16 else []
        for passed, meant in zip(call.lists, columns, strict=True):
            assert same(passed, meant)
        assert call.arguments == (0.01, 0.9, 0.0, 0.1, True, False, False, 1.0)
        assert call.flag_before == 0


def test_parameters_of_one_step_number_go_together(library):
    module, _, calls = library
    spans = make_spans((8, 4, 2, 0, 6), ADAMW, torch.bfloat16, CPU, (1, 7, 1, 9, 7))
    module.offer().functions["fused_step_"](ADAMW, spans)
    assert [(call.arguments[4], call.numels[0]) for call in functions_of(calls, "multi_tensor_adam")] == [
        (1, [8, 2]),
        (7, [4, 6]),
    ]


# Long tensors


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
    functions["fused_step_"](ADAMW, Spans(columns[0], columns[1], columns[2:], models, [torch.tensor(1.0)]))
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


# The doubles themselves


def test_the_double_of_apex_goes_wrong_where_apex_does():
    amp_c = apex_double.AmpC(recording.Calls())
    flag, ones = torch.zeros(1, dtype=torch.int32), torch.ones(8)
    targets = [torch.zeros(8), torch.zeros(0)]
    amp_c.multi_tensor_scale(64, flag, [[ones, torch.ones(0)], targets], 2.0)
    assert (targets[0] == 0).all()  # the trailing empty tensor left it unlaunched
    many = [ones] * 109 + [torch.ones(0), ones]
    with pytest.raises(WouldCorrupt, match="past the array"):
        amp_c.multi_tensor_l2norm(64, flag, [many])
    with pytest.raises(WouldCorrupt, match="mixes dtypes"):
        amp_c.multi_tensor_l2norm(64, flag, [[ones, ones.half()]])
    with pytest.raises(WouldCorrupt, match="read as int32"):
        amp_c.multi_tensor_l2norm(64, flag.float(), [[ones]])
    with pytest.raises(WouldCorrupt, match="int n"):
        amp_c.multi_tensor_l2norm(
            64, torch.zeros(1, dtype=torch.int32, device="meta"), [[torch.empty(2**31, device="meta")]]
        )
    with pytest.raises(WouldCorrupt, match=r"\.item\(\)"):
        amp_c.multi_tensor_scale(64, flag, [[ones], [ones]], torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="not contiguous"):
        amp_c.multi_tensor_l2norm(64, flag, [[torch.ones(8, 8)[:, ::2]]])
    with pytest.raises(RuntimeError, match="size mismatch"):
        amp_c.multi_tensor_scale(64, flag, [[ones], []], 1.0)
    with pytest.raises(RuntimeError, match="size"):
        amp_c.multi_tensor_l2norm(64, flag, [[]])
    with pytest.raises(TypeError):
        amp_c.multi_tensor_l2norm(64, noop_flag=flag, tensor_lists=[[ones]])
    with pytest.raises(TypeError):
        amp_c.multi_tensor_adam(64, flag, [[ones]] * 4, 0.1, 0.9, 0.9, 0.0, 1.0, 1, 1, 0.0)
    with pytest.raises(WouldCorrupt, match=r"parameters of torch\.bfloat16 would be read as torch\.float32"):
        amp_c.multi_tensor_adam(64, flag, [[ones], [ones.bfloat16()], [ones], [ones]], 0.1, 0.9, 0.9, 0.0, 1, 1, 1, 0.0)
    with pytest.raises(RuntimeError, match="some combinations"):
        amp_c.multi_tensor_sgd(64, flag, [[ones.bfloat16()]] * 3, 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)


def test_kernels_of_the_doubles_heed_the_flag_as_the_real_ones_do():
    kernels = (apex_double.AmpC(recording.Calls()), te_double.Kernels(recording.Calls()))
    for kernel in kernels:
        flag = torch.ones(1, dtype=torch.int32)
        columns = [[torch.ones(8)] for _ in range(3)]
        kernel.multi_tensor_sgd(64, flag, columns, 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)
        assert (columns[1][0] == 1).all()  # skipped
        columns = [[torch.ones(8)] for _ in range(4)]
        kernel.multi_tensor_adam(64, flag, columns, 0.1, 0.9, 0.9, 0.0, 1, 1, 1, 0.0)
        assert (columns[1][0] != 1).all()  # ignored
        flag.zero_()
        kernel.multi_tensor_scale(64, flag, [[torch.tensor([math.nan])], [torch.zeros(1)]], 1.0)
        assert int(flag) == 1


def test_the_double_of_transformer_engine_goes_wrong_where_it_does():
    kernels, apply = te_double.Kernels(recording.Calls()), te_double.MultiTensorApply(64)
    flag, ones = torch.zeros(1, dtype=torch.int32), torch.ones(8)
    given = [[ones, torch.ones(0)]]
    before = given[0]
    apply(kernels.multi_tensor_l2norm, flag, given)
    assert given[0] is not before  # rebound
    assert apply(kernels.multi_tensor_l2norm, flag, [[torch.ones(0)]]) is None
    with pytest.raises(RuntimeError, match="aligned"):
        apply(kernels.multi_tensor_scale, flag, [[ones], []], 1.0)
    with pytest.raises(RuntimeError, match="zero size"):
        kernels.multi_tensor_l2norm(64, flag, [[torch.ones(0)]])
    with pytest.raises(WouldCorrupt, match="strides"):
        kernels.multi_tensor_l2norm(64, flag, [[torch.ones(8, 8)[:, ::2]]])
    with pytest.raises(RuntimeError, match="one type per list"):
        kernels.multi_tensor_adam(64, flag, [[ones, ones], [ones, ones.half()], [ones] * 2, [ones] * 2], *[1] * 8)
    with pytest.raises(WouldCorrupt, match="would be read as float32"):
        kernels.multi_tensor_scale_tensor(64, flag, [[ones], [ones]], torch.tensor(1.0).double())
    gemm, x = te_double.Gemm(recording.Calls()).current, torch.full((1, 1), 1 + 2.0**-12)
    out = torch.zeros(1, 1)
    gemm(x, torch.ones(1, 1), layout="NT", grad=True, out=out, out_dtype=torch.float32)
    assert float(out) == 1.0  # TF32
    with pytest.raises(ValueError, match="not contiguous"):
        gemm(x, x, layout="NT", grad=True, out=torch.zeros(4, 4).t(), out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="invalid value"):
        gemm(torch.ones(0, 2), torch.ones(0, 2), layout="NT", grad=True, out=torch.zeros(2, 2), out_dtype=torch.float32)


def test_gemms_of_the_doubles_take_strided_operands_for_dense_ones():
    x, dy = torch.arange(16.0).view(4, 4).bfloat16().t(), torch.eye(4).bfloat16()
    out = torch.zeros(4, 4)
    apex_double.Wgrad(recording.Calls()).wgrad_gemm_accum_fp32(x, dy, out)
    assert torch.equal(out, x.t().float())
    te_double.Gemm(recording.Calls()).current(x, dy, layout="NT", grad=True, out=out, out_dtype=torch.float32)
    assert torch.equal(out, x.t().float())


# The libraries' optimizers, wrapped

FUSED_ADAMS = {"apex": apex_double.FusedAdam, "te": te_double.FusedAdam}


def make_net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).bfloat16()


def loss_of(net, number):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number)).bfloat16()
    return net(x).float().square().mean()


@pytest.mark.parametrize("name", FUSED_ADAMS)
def test_a_fused_adam_wrapped_ends_bit_equal_to_the_bare_one_on_fp32_copies(name):
    cls, settings = FUSED_ADAMS[name], {"lr": 0.01, "weight_decay": 0.1}
    net, twin = make_net(), make_net()
    optimizer = FusedMainGradOptimizer(cls(net.parameters(), **settings))
    reference = Reference(twin, lambda groups: cls(groups[0], **settings))
    start = [param.detach().clone() for param in net.parameters()]
    for window in range(6):
        for micro_batch in range(2):
            loss_of(net, 2 * window + micro_batch).backward()
            reference.backward(loss_of(twin, 2 * window + micro_batch))
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        assert optimizer.param_groups[0]["step"] == reference.optimizer.param_groups[0]["step"] == window + 1
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.isfinite(ours).all()
            assert torch.equal(ours, theirs)
    state = optimizer.state_dict()["state"]
    for index, main in enumerate(reference.mains.values()):
        assert torch.equal(state[index]["main_param"], main)
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[index][key].dtype is torch.float32
            assert torch.equal(state[index][key], reference.optimizer.state[main][key])
    assert any(not torch.equal(before, param) for before, param in zip(start, net.parameters(), strict=True))


def test_fused_adams_clear_as_the_real_ones_do():
    param = nn.Parameter(torch.ones(4))
    apex, te = apex_double.FusedAdam([param]), te_double.FusedAdam([param])
    with pytest.raises(TypeError):
        apex.zero_grad(set_to_none=True)
    te.zero_grad(set_to_none=True)
    for cls in FUSED_ADAMS.values():
        with pytest.raises(RuntimeError, match="AMSGrad"):
            cls([param], amsgrad=True)
