"""Who does the work: probing, self-checks, the choice, the report, and the CUDA roads as far as a CPU goes."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import fusedopt
from benchmarks import backends_page
from fusedopt import FusedLinear, FusedMainGradOptimizer, backends
from fusedopt.backends import Backend, apex_ops, offers, resolve, selfcheck, te_ops, torch_ops
from fusedopt.backends.offers import FUNCTIONS, Offer
from fusedopt.backends.torch_ops import Road
from tests.doubles.apex_double import apex_installed
from tests.doubles.te_double import te_installed

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def undecided():
    """Forget what was decided, before and after: these tests replace libraries."""
    caches = (backends.offer, backends._decide, backends._why_not, backends._adapted)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Return a function that makes a library offer these functions, on the CPU, too."""

    def install(library, functions, missing=None, version="1.0"):
        real = backends.offer.__wrapped__
        offered = {library: Offer(version, functions, missing or {})}
        monkeypatch.setattr(backends, "NEEDS_CUDA", ())
        monkeypatch.setattr(backends, "offer", lambda name: offered.get(name) or real(name))

    return install


class Recorder:
    """torch's wgrad under another name, counting."""

    def __init__(self):
        self.calls = []

    def __call__(self, main_grad, grad_output, input, *, accumulate, exact=True):
        self.calls.append((main_grad.dtype, grad_output.dtype, accumulate))
        torch_ops.wgrad_accumulate_(main_grad, grad_output, input, accumulate=accumulate, exact=exact)


def forget_self_check(recorder):
    recorder.calls.clear()


def test_on_a_cpu_auto_is_torch_and_imports_no_library():
    code = (
        "import sys, torch, fusedopt\n"
        "model = torch.nn.Linear(8, 8).bfloat16()\n"
        "fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "from fusedopt.backends import Backend, resolve\n"
        "assert resolve('auto', torch.device('cpu'), torch.bfloat16) == Backend()\n"
        "print([name for name in ('transformer_engine', 'apex', 'amp_C', 'fusedopt.backends.triton_ops')"
        " if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["apex", "transformer_engine"])
def test_a_library_asked_for_by_name_and_absent_raises_with_the_hint_and_changes_nothing(name):
    model = nn.Linear(4, 4).bfloat16()
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        RuntimeError, match=f'backend="{name}" was asked for.*needs a CUDA device.*To get it: '
    ) as caught:
        FusedMainGradOptimizer(inner, backend=name)
    assert backends.HINTS[name] in str(caught.value)
    assert not hasattr(model.weight, "main_grad")
    assert inner.param_groups[0]["params"][0] is model.weight
    wrapped = FusedMainGradOptimizer(inner)
    with pytest.raises(RuntimeError, match="was asked for"):
        resolve(name, CPU, BF16)
    assert wrapped.config.backend == "auto"


def test_an_added_group_asks_the_same_backend_before_anything_changes(installed, monkeypatch):
    installed("apex", {"wgrad_accumulate_": Recorder()})
    model, added = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4).half()
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend="apex")
    monkeypatch.setattr(backends, "NEEDS_CUDA", ("apex",))  # as if the new parameters were on another device
    backends._why_not.cache_clear()
    with pytest.raises(RuntimeError, match=r'backend="apex" was asked for, and it has nothing to offer on cpu'):
        optimizer.add_param_group({"params": list(added.parameters())})
    assert len(optimizer.param_groups) == 1
    assert not hasattr(added.weight, "main_grad")


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("an exception that cannot even be printed")


BROKEN = [OSError("libcudart.so.12: cannot open"), RuntimeError("no driver"), KeyError("x"), Mute()]
BROKEN += [SystemExit(1), GeneratorExit(), StopIteration(), BaseException("torn down")]


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
def test_whatever_a_broken_installation_raises_means_absent_with_that_reason(monkeypatch, error):
    def broken(module, *symbols):
        raise error

    monkeypatch.setattr(offers.importlib, "import_module", broken)
    with pytest.raises(offers.Absent, match=f"importing amp_C raised {type(error).__name__}"):
        offers.load("amp_C", "multi_tensor_adam")
    monkeypatch.undo()
    monkeypatch.setattr(backends.importlib, "import_module", broken)
    found = backends.offer("apex")
    assert found.version is None
    assert set(found.missing) == set(FUNCTIONS)
    assert all(type(error).__name__ in why for why in found.missing.values())


def test_an_interrupt_at_probing_is_the_users(monkeypatch, installed):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    installed("apex", {"wgrad_accumulate_": interrupted})
    with pytest.raises(KeyboardInterrupt):
        resolve("apex", CPU, BF16)
    monkeypatch.setattr(backends.importlib, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        backends.offer("triton")


def test_a_triton_that_exits_at_import_is_reported_as_absent(monkeypatch):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "fusedopt.backends.triton_ops":
                raise SystemExit("no LLVM")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "fusedopt.backends.triton_ops", raising=False)
    monkeypatch.delattr(backends, "triton_ops", raising=False)
    (row,) = [row for row in backends.report().libraries if row[0] == "triton"]
    assert row == ("triton", "absent", "nothing", "looking for it raised SystemExit: no LLVM")
    with pytest.raises(RuntimeError, match="looking for it raised SystemExit: no LLVM"):
        resolve("triton", CPU, BF16)


def test_a_missing_module_and_a_missing_symbol_are_named():
    with pytest.raises(offers.Absent, match="no module named nowhere_to_be_found"):
        offers.load("nowhere_to_be_found")
    with pytest.raises(offers.Absent, match="math has no cosine, sine"):
        offers.load("math", "cos", "cosine", "sine")
    assert offers.load("math", "cos") == [__import__("math").cos]


# -- self-checks


def wrong(function):
    """Return functions that are almost right, by what is wrong with them."""

    def sums_in_bf16(main_grad, grad_output, input, *, accumulate, exact=True):
        old = main_grad.bfloat16() if accumulate else 0
        main_grad.copy_(old + grad_output.t().mm(input))

    def always_adds(main_grad, grad_output, input, *, accumulate, exact=True):
        torch_ops.wgrad_accumulate_(main_grad, grad_output, input, accumulate=True)

    def truncates(targets, sources, factor=None):
        for target, source in zip(targets, sources, strict=True):
            value = source if factor is None else source * factor
            if target.dtype is torch.bfloat16:
                value = (value.view(torch.int32) & -65536).view(torch.float32)
            target.copy_(value)

    def ignores_factor(targets, sources, factor=None):
        torch_ops.scale_cast_(targets, sources)

    return {
        "wgrad_accumulate_": [sums_in_bf16, always_adds, lambda *a, **k: None],
        "norm": [
            lambda flats, p=2.0, dtype=None: torch_ops.norm(flats[:1], p),
            lambda flats, p=2.0, dtype=None: torch_ops.norm(flats, p).nan_to_num(posinf=1.0),
            lambda flats, p=2.0, dtype=None: torch_ops.norm(flats, 2.0),
        ],
        "found_inf": [
            lambda flats: torch.zeros(()),
            lambda flats: torch_ops.norm(flats).float().isinf().float(),
            lambda flats: torch_ops.found_inf(flats[:1]),
        ],
        "scale_cast_": [truncates, ignores_factor],
        "fused_step_": [lambda rule, operands, **k: None],
    }[function]


@pytest.mark.parametrize("function", ["wgrad_accumulate_", "norm", "found_inf", "scale_cast_", "fused_step_"])
def test_the_self_check_tells_right_from_wrong(function):
    if function != "fused_step_":
        assert selfcheck.fault(function, getattr(torch_ops, function), CPU, BF16) is None
        assert selfcheck.fault(function, getattr(torch_ops, function), CPU, torch.float16) is None
    for run in wrong(function):
        assert "self-check" in selfcheck.fault(function, run, CPU, BF16)


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit("gone"), BaseException("gone")], ids=repr)
def test_a_function_that_exits_in_its_self_check_is_passed_over(installed, error):
    def exits(*args, **kwargs):
        raise error

    installed("apex", {"wgrad_accumulate_": exits})
    assert resolve("auto", CPU, BF16) == Backend()
    why = backends._why_not("apex", "wgrad_accumulate_", CPU, BF16)
    assert why == f"its self-check raised {type(error).__name__}: {error}"


def test_a_function_that_raises_in_its_self_check_is_passed_over_by_name(installed):
    def raises(*args, **kwargs):
        raise TypeError("incompatible function arguments\nmore")

    installed("apex", {"wgrad_accumulate_": raises})
    backend, reasons = backends._decide("auto", CPU, BF16)
    assert backend == Backend()
    chosen, why = reasons["wgrad_accumulate_"]
    assert chosen == "torch"
    assert "apex: its self-check raised TypeError: incompatible function arguments" in why
    assert "more" not in why
    with pytest.raises(RuntimeError, match="its self-check raised TypeError"):
        resolve("apex", CPU, BF16)


# -- the choice


def test_auto_takes_wgrad_from_a_library_that_is_there_and_everything_else_from_torch(installed):
    recorder = Recorder()
    everything = {name: getattr(torch_ops, name) for name in FUNCTIONS if name != "fused_step_"}
    installed("transformer_engine", {**everything, "wgrad_accumulate_": recorder})
    backend = resolve("auto", CPU, BF16)
    assert backend.wgrad_accumulate_ is not torch_ops.wgrad_accumulate_
    assert backend == Backend(wgrad_accumulate_=backend.wgrad_accumulate_)
    assert resolve("torch", CPU, BF16) == Backend()
    assert resolve("auto", CPU, torch.float32) == Backend()
    assert resolve("auto", CPU, torch.float16) == backend  # equal tables work on their buckets together


@pytest.mark.parametrize("name", ["auto", "apex"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_fused_layers_add_with_the_backend_of_the_wrapper(installed, name, dtype):
    recorder = Recorder()
    installed("apex", {"wgrad_accumulate_": recorder})
    model = nn.Sequential(FusedLinear(8, 8, bias=False), FusedLinear(8, 4, bias=False)).to(dtype)
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend=name)
    forget_self_check(recorder)
    for _ in range(2):
        model(torch.ones(3, 8, dtype=dtype)).sum().backward()
    assert recorder.calls == [(torch.float32, dtype, accumulate) for accumulate in (False, False, True, True)]
    other = FusedLinear(8, 8).to(dtype)
    another = FusedMainGradOptimizer(torch.optim.SGD(other.parameters(), lr=0.1), backend="torch")
    forget_self_check(recorder)
    other(torch.ones(3, 8, dtype=dtype)).sum().backward()
    assert recorder.calls == []
    assert other.weight.grad is other.weight.main_grad
    assert (optimizer.config.backend, another.config.backend) == (name, "torch")  # both alive: a dropped one unwraps


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_compiled_fused_layers_add_with_the_backend_of_the_wrapper(installed):
    recorder = Recorder()
    installed("apex", {"wgrad_accumulate_": recorder})
    model = FusedLinear(8, 8, bias=False).bfloat16()
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend="apex")
    forget_self_check(recorder)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        compiled(torch.ones(3, 8, dtype=BF16)).sum().backward()
    assert [accumulate for *_, accumulate in recorder.calls] == [False, True]
    assert optimizer.param_groups[0]["params"][0].grad is model.weight.main_grad


def test_operands_that_no_library_multiplies_right_go_to_torch(installed):
    recorder = Recorder()
    installed("apex", {"wgrad_accumulate_": recorder})
    backend = resolve("apex", CPU, BF16)
    forget_self_check(recorder)
    for main_dtype, dtype in ((torch.float32, torch.float32), (torch.float64, torch.float64)):
        main_grad = torch.zeros(4, 4, dtype=main_dtype)
        backend.wgrad_accumulate_(
            main_grad, torch.ones(2, 4, dtype=dtype), torch.ones(2, 4, dtype=dtype), accumulate=True
        )
        assert bool((main_grad == 2).all())
    assert recorder.calls == []


def test_dtypes_that_a_library_is_not_asked_for_are_torchs_without_an_error(installed):
    """A bf16 model with fp32 norms, and only apex's weight-gradient extension built: no reason to refuse it."""
    recorder = Recorder()
    installed("apex", {"wgrad_accumulate_": recorder, "norm": Recorder()})
    assert resolve("apex", CPU, BF16) != Backend()
    for dtype in (torch.float32, torch.float64):
        assert resolve("apex", CPU, dtype) == Backend()
        assert resolve("auto", CPU, dtype) == Backend()
    _, reasons = backends._decide("apex", CPU, torch.float64)
    assert reasons["norm"] == ("torch", "apex: torch.float64 is torch's")


def test_mixed_buckets_still_have_one_norm_and_one_scale(installed):
    """bf16 buckets by a library's functions, fp32 ones by torch's: every element is counted once, and scaled once."""
    calls = []

    def norm(flats, norm_type=2.0, dtype=None):
        calls.append(len(flats))
        return torch_ops.norm(flats, norm_type, dtype)

    installed("apex", {"norm": norm, "wgrad_accumulate_": Recorder()})
    model = nn.ModuleList([nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4, bias=False)])
    wrapped = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), backend="apex")
    calls.clear()
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0, dtype=torch.float32)
    total = wrapped.clip_grad_norm_(6.0)
    assert calls
    assert float(total) == pytest.approx((32 * 9.0) ** 0.5, rel=1e-6)
    for p in model.parameters():
        assert p.grad.norm().item() == pytest.approx(6.0 / 2**0.5, rel=1e-5)


# -- the report


def test_the_report_says_what_was_found_chosen_and_why():
    text = str(backends.report())
    assert f"fusedopt {fusedopt.__version__}, backend=auto" in text
    assert f"torch {torch.__version__}" in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:3] == ["transformer_engine", "absent", "nothing"] for row in rows)
    for function in FUNCTIONS:
        assert any(function in row and row[:2] == ["cpu,", "bfloat16"] for row in rows), function
    assert "needs a CUDA device" in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_the_report_shows_a_chosen_library_and_why_the_better_one_was_not(installed):
    installed(
        "apex", {"wgrad_accumulate_": Recorder()}, missing={"norm": "amp_C has no multi_tensor_l2norm"}, version="0.1"
    )
    report = backends.report()
    assert ("cpu, bfloat16", "wgrad_accumulate_", "apex") in [row[:3] for row in report.choices]
    why = next(row[3] for row in report.choices if row[1] == "wgrad_accumulate_")
    assert why.startswith("transformer_engine: ")
    assert ("", "", "not norm", "amp_C has no multi_tensor_l2norm") in report.libraries
    assert "needs a CUDA device" not in why


def test_info_prints_the_report_and_a_wrong_backend_fails_with_its_reason():
    command = [sys.executable, "-m", "fusedopt", "info"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "who runs it" in done.stdout
    for backend, expected in (("apex", "needs a CUDA device"), ("apax", "use 'apex'")):
        done = subprocess.run([*command, "--backend", backend], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert expected in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("adapter", "installed_double"), [(apex_ops, apex_installed), (te_ops, te_installed)])
def test_adapters_bring_what_the_page_says_of_them(adapter, installed_double):
    with installed_double():
        assert set(adapter.offer().functions) == set(adapter.OFFERS)


def test_the_page_is_as_make_docs_writes_it():
    assert backends_page.main(["--check"]) == 0


def test_the_page_takes_the_last_figures_of_a_gpu_and_no_rehearsals(tmp_path):
    row = {"kind": "claim", "device": "H", "torch": "2.13.0", "rehearsal": False}
    rows = [
        {**row, "what": "wgrad accumulate_apex, speed over mm, a layer", "reached": 0.5, "date": "2026-01-01"},
        {**row, "what": "wgrad accumulate_apex, speed over mm, a layer", "reached": 0.97, "date": "2026-02-01"},
        {
            **row,
            "what": "wgrad accumulate_torch, speed over mm, a layer",
            "reached": 0.9,
            "date": "2026-02-01",
            "rehearsal": True,
        },
        {
            **row,
            "what": "optimizer phase, triton_in_fused, clipping, of copy bandwidth",
            "reached": 0.8,
            "date": "2026-02-01",
        },
    ]
    (tmp_path / "gpu_check_wgrad_H_2026-02-01.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = backends_page.matrix(backends_page.measured_rows(tmp_path))
    assert "speed over mm, a layer 0.97 (H, torch 2.13.0, 2026-02-01)" in text
    assert "in_fused, clipping, of copy bandwidth 0.80" in text
    assert "0.5" not in text
    assert "0.90" not in text
    assert text.count(backends_page.NOT_YET) == 13


# -- torch's own functions


def test_found_inf_is_exact_where_a_norm_overflows():
    big = torch.full((2048,), 3e38)
    assert torch_ops.norm([big]).isinf()
    assert float(torch_ops.found_inf([big])) == 0.0
    for bad in (float("inf"), float("-inf"), float("nan")):
        for place in (0, 1023, 2047):
            flat = torch.zeros(2048)
            flat[place] = bad
            assert float(torch_ops.found_inf([big, flat])) == 1.0
    assert float(torch_ops.found_inf([torch.zeros(0)])) == 0.0
    assert torch_ops.found_inf([torch.zeros(4, dtype=torch.float64)]).dtype is torch.float32


def test_scale_cast_scales_in_place_rounds_out_of_place_and_mixes_dtypes():
    torch.manual_seed(0)
    sources = [torch.randn(5, 3), torch.randn(7), torch.randn(4, dtype=torch.float64), torch.randn(0)]
    targets = [torch.empty(5, 3, dtype=BF16), torch.empty(7, dtype=torch.float16), torch.empty(4), torch.empty(0)]
    factor = torch.tensor(0.3)
    torch_ops.scale_cast_(targets, sources, factor)
    for target, source in zip(targets, sources, strict=True):
        assert torch.equal(target, (source * factor.to(source.dtype)).to(target.dtype))
    expected = [source * factor.to(source.dtype) for source in sources]
    addresses = [source.data_ptr() for source in sources]
    torch_ops.scale_cast_(sources, sources, factor)
    assert [source.data_ptr() for source in sources] == addresses
    assert all(map(torch.equal, sources, expected))
    torch_ops.scale_cast_([], [], factor)


class FakeDevice:
    """Stands in for a CUDA device, which this machine lacks: ``mm`` and ``addmm`` with ``out_dtype``, in fp32."""

    def __init__(self, monkeypatch, *, epilogue, product, wrong_epilogue=False):
        self.calls = []
        real_mm, real_addmm = torch.mm, torch.addmm

        def addmm(addend, one, other, *, beta=1.0, out_dtype=None, out=None):
            if out_dtype is None:
                return real_addmm(addend, one, other, beta=beta, out=out)
            if not epilogue:
                raise RuntimeError("self and the operands must have one dtype")
            self.calls.append("addmm")
            addend = addend.bfloat16().float() if wrong_epilogue else addend
            old = addend * beta if beta else torch.zeros(())
            return out.copy_(old + real_mm(one.float(), other.float()))

        def mm(one, other, *, out_dtype=None):
            if out_dtype is None:
                return real_mm(one, other)
            if not product:
                raise NotImplementedError("no mm with out_dtype")
            self.calls.append("mm")
            return real_mm(one.float(), other.float())

        monkeypatch.setattr(torch, "addmm", addmm)
        monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.parametrize(
    ("device", "road"),
    [
        ({"epilogue": True, "product": True}, Road.EPILOGUE),
        ({"epilogue": False, "product": True}, Road.TILES),
        ({"epilogue": True, "product": True, "wrong_epilogue": True}, Road.TILES),
        ({"epilogue": False, "product": False}, Road.WIDEN),
    ],
    ids=str,
)
def test_a_device_is_asked_for_the_best_road_that_it_really_has(monkeypatch, device, road):
    FakeDevice(monkeypatch, **device)
    assert torch_ops.cuda_road.__wrapped__(CPU, BF16) is road


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("rows_in_tile", [1, 3, 8, 100])
def test_the_tiled_road_sums_in_fp32_and_reads_old_bytes_only_to_add(monkeypatch, accumulate, rows_in_tile):
    FakeDevice(monkeypatch, epilogue=False, product=True)
    monkeypatch.setattr(torch_ops, "TILE_NBYTES", rows_in_tile * 5 * 4)
    torch.manual_seed(0)
    grad_output, input = torch.randn(6, 8).bfloat16(), torch.randn(6, 5).bfloat16()
    main_grad = torch.full((8, 5), 2.0**-10 if accumulate else float("nan"))
    expected = grad_output.double().t() @ input.double() + (2.0**-10 if accumulate else 0.0)
    torch_ops._add_tiles(main_grad, grad_output, input, accumulate=accumulate)
    assert main_grad.isfinite().all()
    # Sums of 6 products of bf16 numbers in fp32: at most 7 roundings of partial sums (Higham, section 3.1).
    bound = 7 * 2.0**-24 * (grad_output.double().abs().t() @ input.double().abs() + 1)
    assert bool(((main_grad.double() - expected).abs() <= bound).all())
