"""What the adapters of apex and TransformerEngine offer of which release and build, and why not the rest."""

import inspect
import sys
import types

import pytest
import torch

from fusedopt.backends import apex_ops, te_ops, torch_ops
from fusedopt.backends.offers import FUNCTIONS, Absent, Sgd, load, version_of
from tests import adapter_cases
from tests.adapter_cases import ADAM, ADAMW, SGD
from tests.doubles.adapters import ADAPTERS, OFFERED, functions_of
from tests.doubles.apex_double import apex_installed
from tests.doubles.te_double import te_installed

CPU = torch.device("cpu")


# -- What is offered


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
    assert list(inspect.signature(functions["fused_step_"]).parameters) == [
        "rule",
        "operands",
        "grad_scale",
        "found_inf",
    ]


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


# -- Signatures of general_gemm


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
