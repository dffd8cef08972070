"""The house rules as data, enforced by AST; and that importing the package changes nothing around it."""

import ast
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import fusedopt

PACKAGE = Path(fusedopt.__file__).parent
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_CORE_LINES = 12000
MAX_ADAPTER_LINES = 2500
MAX_INTEGRATION_LINES = 2000


@dataclass(frozen=True)
class Row:
    """One file: its level, the files of the package that it may import, and other libraries."""

    level: int
    may_import: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()  # inside functions only: files of the package, or libraries


ADAPTERS = ("backends.triton_ops", "backends.apex_ops", "backends.te_ops")
AROUND_ADAPTERS = ("backends", "backends.offers", "backends.selfcheck", "backends.lists", "fused_step")
INTEGRATIONS = (
    *("integrations", "integrations.arguments", "integrations.refusals", "integrations.resume", "integrations.trainer"),
    *("integrations.transformers", "integrations.accelerate", "integrations.scaling", "integrations.versions"),
)
WIRED_BY_THE_OPTIMIZER = (
    *("config", "layout", "comm", "dtensor", "checks", "backends", "buckets", "buffers", "channel", "arrival"),
    *("compiling", "reduction", "gather", "amp", "clip", "inner", "adoption", "probe", "replicas", "closures"),
    *("update", "state", "stateful", "state_view", "listing", "holders", "stock_clip", "window"),
)
INTEGRATION_IMPORTS = ("optimizer", "convert", "recompute", "config", "replicas")

# docs/decisions/0001-house-table.md says where and why this differs from the first draft.
# Rows of files that do not exist yet are promises about where they will stand.
TABLE = {
    "_version": Row(0),
    "config": Row(0, lazily=("yaml",)),
    "layout": Row(0),
    "planner": Row(1, ("layout",)),
    "holders": Row(0),
    "overlap": Row(0, (), ("torch",)),
    "checks": Row(1, ("config", "dtensor", "holders", "overlap"), ("torch",)),
    "main_grad": Row(1, ("dtensor", "threads"), ("torch",)),
    "groups": Row(0, (), ("torch", "torch.distributed")),
    "channel": Row(1, ("groups",), ("torch", "torch.distributed")),
    "comm": Row(2, ("channel", "groups"), ("torch", "torch.distributed")),
    "dtensor": Row(0, (), ("torch",), lazily=("torch.distributed",)),
    "backends.offers": Row(0, (), ("torch",)),
    "backends.torch_ops": Row(1, ("layout",), ("torch",)),
    "backends.triton_ops": Row(1, ("layout", "backends.offers"), ("torch", "triton")),
    "backends.lists": Row(1, ("backends.offers",), ("torch",)),
    "backends.apex_ops": Row(2, ("backends.lists", "backends.offers"), ("torch",)),  # the libraries by `offers.load`
    "backends.te_ops": Row(2, ("backends.lists", "backends.offers"), ("torch",)),
    "backends.selfcheck": Row(2, ("backends.offers", "backends.torch_ops"), ("torch",)),
    "backends": Row(
        3, ("_version", "backends.offers", "backends.torch_ops", "backends.selfcheck"), ("torch",), lazily=ADAPTERS
    ),
    "backward": Row(1, (), ("torch",)),
    "threads": Row(0, (), ("torch",)),
    "pieces": Row(2, ("layout",), ("torch",), lazily=("torch.distributed",)),
    "buckets": Row(2, ("layout", "checks", "dtensor", "main_grad"), ("torch",)),
    "replicas": Row(3, ("dtensor", "comm"), ("torch",)),
    "sample": Row(1, (), ("torch",)),
    "buffers": Row(
        4, ("layout", "dtensor", "buckets", "main_grad", "backends", "backends.torch_ops", "sample"), ("torch",)
    ),
    "autograd": Row(4, ("main_grad", "backends", "threads"), ("torch",)),
    "arrival": Row(5, ("dtensor", "buckets", "buffers", "checks", "main_grad", "threads"), ("torch",)),
    "compiling": Row(5, ("buffers",), ("torch",)),
    "window": Row(5, ("buffers",), ("torch",)),
    "stock_clip": Row(5, ("buffers",), ("torch",)),
    "ballot": Row(5, ("buckets", "buffers", "channel")),
    "transport": Row(5, ("buckets", "buffers", "comm"), ("torch",)),
    "pipelines": Row(5, ("buffers", "backends.torch_ops")),
    "reduction": Row(
        6,
        (
            *("dtensor", "groups", "channel", "backward", "ballot", "buckets", "buffers", "comm", "main_grad"),
            *("pipelines", "transport", "window"),
        ),
        ("torch",),
    ),
    "gather": Row(5, ("buckets", "buffers", "comm"), ("torch",)),
    "amp": Row(6, ("buckets", "buffers", "window"), ("torch",)),
    "clip": Row(5, ("buffers", "comm", "backends", "backends.torch_ops"), ("torch",)),
    "parts": Row(4, ("dtensor", "layout", "pieces"), ("torch",)),
    "scratch": Row(2, ("main_grad",), ("torch", "numpy")),
    "stand_ins": Row(3, ("scratch",), ("torch",)),
    "plain": Row(1, (), ("torch",)),
    "loading": Row(1, (), ("torch",)),
    "rollback": Row(2, ("loading",), ("torch",)),
    "guard": Row(1, (), ("torch",)),
    "listing": Row(1, (), ("torch",)),
    "signatures": Row(1, (), ("torch",)),
    "inner": Row(
        5,
        (
            *("dtensor", "buffers", "checks", "guard", "listing", "parts", "plain", "scratch", "signatures"),
            "stand_ins",
        ),
        ("torch",),
    ),
    "membership": Row(6, ("checks", "inner", "listing"), ("torch",)),
    "linear": Row(5, ("main_grad", "autograd", "backends"), ("torch",)),
    "adoption": Row(
        7, ("checks", "buffers", "arrival", "gather", "inner", "listing", "membership", "stock_clip"), ("torch",)
    ),
    "probe": Row(6, ("dtensor", "inner", "scratch"), ("torch", "numpy")),
    "fused_step": Row(5, ("backends", "backends.offers", "buffers", "guard"), ("torch",)),
    "state_view": Row(6, ("inner", "pieces"), ("torch",)),
    "closures": Row(6, ("buffers", "clip", "comm", "inner", "rollback"), ("torch",)),
    "update": Row(7, ("buffers", "clip", "closures", "fused_step", "gather", "inner", "listing"), ("torch",)),
    "state": Row(6, ("dtensor", "buffers", "inner", "listing", "loading", "parts", "plain"), ("torch",)),
    "consolidation": Row(6, ("layout", "pieces", "parts", "plain", "comm"), ("torch",)),
    "stateful": Row(
        8,
        (
            *("config", "comm", "buffers", "arrival", "gather", "clip", "inner", "adoption", "state", "pieces"),
            *("consolidation", "holders", "listing", "plain", "scratch", "state_view", "window"),
        ),
        ("torch",),
    ),
    "recompute": Row(6, (), ("torch",)),
    "convert": Row(6, ("linear",), ("torch",)),
    "optimizer": Row(9, WIRED_BY_THE_OPTIMIZER, ("torch",)),
    "integrations": Row(10),
    "integrations.versions": Row(1, (), ("torch",)),
    "integrations.arguments": Row(10, INTEGRATION_IMPORTS, ("torch",)),
    "integrations.scaling": Row(1, (), (), lazily=("accelerate",)),
    "integrations.refusals": Row(10, ("integrations.versions",), ("torch",)),
    "integrations.resume": Row(10, INTEGRATION_IMPORTS, ("torch",), lazily=("accelerate",)),
    "integrations.trainer": Row(
        11,
        (
            *(*INTEGRATION_IMPORTS, "integrations.arguments", "integrations.refusals", "integrations.resume"),
            *("integrations.scaling", "integrations.versions"),
        ),
        ("torch",),
        lazily=("transformers",),
    ),
    "integrations.transformers": Row(
        12,
        (
            *(*INTEGRATION_IMPORTS, "integrations.arguments", "integrations.refusals", "integrations.trainer"),
            "integrations.versions",
        ),
        ("torch",),
        lazily=("transformers",),
    ),
    "integrations.accelerate": Row(
        12,
        (
            *(*INTEGRATION_IMPORTS, "integrations.arguments", "integrations.refusals", "integrations.scaling"),
            "integrations.versions",
        ),
        ("torch",),
        lazily=("accelerate",),
    ),
    "__main__": Row(10, ("_version", "config", "planner", "backends"), ("torch",)),
}
TABLE[""] = Row(13, tuple(TABLE))  # fusedopt/__init__.py: the public names of all above

OPTIONAL_LIBRARIES = {"transformers", "accelerate", "yaml", "safetensors", "triton", "apex", "transformer_engine"}
MAY_IMPORT_DISTRIBUTED = ("groups", "channel", "comm", "dtensor", "pieces")
CORE = [name for name, row in TABLE.items() if row.level <= TABLE["optimizer"].level]
CORE = [name for name in CORE if name not in (*ADAPTERS, *AROUND_ADAPTERS, *INTEGRATIONS)]


def module_of(path):
    """Return the dotted name inside the package of ``path``, relative to it; empty for the package itself."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(node, name, is_package):
    """Return the dotted name that ``from X import ...`` takes from, relative imports resolved."""
    if not node.level:
        return node.module
    parts = ["fusedopt", *name.split(".")] if name else ["fusedopt"]
    kept = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, node.module] if node.module else kept)


def imports_of(tree, name, is_package):
    """Yield ``(line, dotted name, is inside a function)`` for every import, wherever it hides."""
    lazy = {id(inner) for node in ast.walk(tree) if is_function(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{absolute(node, name, is_package)}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, dotted, id(node) in lazy) for dotted in found)


def internal(dotted):
    """Return the file of the package that an import of ``dotted`` names; None for other libraries."""
    top, _, rest = dotted.partition(".")
    if top != "fusedopt":
        return None
    while rest and rest not in TABLE:  # the tail is a name inside the file
        rest = rest.rpartition(".")[0]
    return rest


def import_violations(tree, name, is_package):
    row = TABLE[name]
    for line, dotted, is_lazy in imports_of(tree, name, is_package):
        target = internal(dotted)
        if target is not None:
            if TABLE[target].level >= row.level:
                yield line, f"imports {dotted}, level {TABLE[target].level}, from level {row.level}"
            elif target not in row.may_import and not (is_lazy and target in row.lazily):
                yield line, f"imports {dotted}, which the table does not allow"
            continue
        top = dotted.split(".")[0]
        if dotted.startswith("torch.distributed") and name not in MAY_IMPORT_DISTRIBUTED:
            yield line, f"imports {dotted}; only {MAY_IMPORT_DISTRIBUTED} may"
        is_allowed = top in sys.stdlib_module_names or top in row.libraries or (is_lazy and top in row.lazily)
        if not is_allowed:
            yield line, f"imports {dotted} {'in a function' if is_lazy else 'at module level'}, which it may not"


def is_function(node):
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def public_definitions(tree):
    """Yield the public functions and classes of a file, and the public methods of these classes."""
    for node in tree.body:
        if not (is_function(node) or isinstance(node, ast.ClassDef)) or node.name.startswith("_"):
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from (item for item in node.body if is_function(item) and not item.name.startswith("_"))


def unannotated(function, is_method):
    args = function.args
    named = args.posonlyargs + args.args
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
    named = named[1:] if is_method and not is_static else named
    return [arg.arg for arg in [*named, *args.kwonlyargs, args.vararg, args.kwarg] if arg and arg.annotation is None]


def style_violations(tree, source):
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield num_lines, f"has {num_lines} lines, more than {MAX_FILE_LINES}"
    for number, text in enumerate(source.splitlines(), 1):
        if not text.isascii():
            yield number, "is not ASCII"
    if not ast.get_docstring(tree):
        yield 1, "has no module docstring"
    methods = {id(item) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "has an assert, which python -O removes; raise instead"
        if is_function(node):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
            missing = unannotated(node, id(node) in methods)
            if missing or node.returns is None:
                yield node.lineno, f"{node.name} lacks annotations of {missing or 'its return'}"
    for node in public_definitions(tree):
        if not ast.get_docstring(node):
            yield node.lineno, f"{node.name} has no docstring"


def violations(source, path):
    """Return what ``source``, as the file ``path`` of the package, breaks: one line each."""
    path = Path(path)
    name = module_of(path)
    if name not in TABLE:
        return [f"{path} is not in the table; give it a level, and say why in docs/decisions"]
    tree = ast.parse(source)
    found = [*import_violations(tree, name, path.name == "__init__.py"), *style_violations(tree, source)]
    return [f"{path}:{line} {problem}" for line, problem in sorted(found)]


def package_files():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def num_lines(names):
    files = [path for path in package_files() if module_of(path) in names]
    return sum(len((PACKAGE / path).read_text(encoding="utf-8").splitlines()) for path in files)


@pytest.mark.parametrize("path", package_files(), ids=str)
def test_file_keeps_to_its_level_and_the_house_style(path):
    assert violations((PACKAGE / path).read_text(encoding="utf-8"), path) == []


def test_the_table_was_held_against_the_real_package():
    names = {module_of(path) for path in package_files()}
    assert {"", "config", "layout", "backends", "backends.torch_ops", "buffers", "optimizer"} <= names
    source = (PACKAGE / "optimizer.py").read_text(encoding="utf-8")
    found = {internal(dotted) for _, dotted, _ in imports_of(ast.parse(source), "optimizer", False)} - {None}
    assert found >= {"buffers", "clip", "inner", "backends"}


@pytest.mark.parametrize("name", TABLE, ids=lambda name: name or "__init__")
def test_the_table_itself_only_points_down(name):
    row = TABLE[name]
    internal_names = [*row.may_import, *(target for target in row.lazily if target in TABLE)]
    assert [target for target in internal_names if TABLE[target].level >= row.level] == []


def test_the_core_and_the_adapters_stay_small():
    assert 1000 < num_lines(CORE) < MAX_CORE_LINES
    assert num_lines((*ADAPTERS, *AROUND_ADAPTERS)) < MAX_ADAPTER_LINES
    assert num_lines(INTEGRATIONS) < MAX_INTEGRATION_LINES


DOCSTRING = '"""Docstring."""\n'


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("arrival.py", "from fusedopt.inner import Group", "level 5, from level 5"),
        ("buffers.py", "from fusedopt.optimizer import FusedMainGradOptimizer", "level 9, from level 4"),
        ("buffers.py", "import fusedopt.clip", "level 5, from level 4"),
        ("buffers.py", "from fusedopt import clip", "level 5, from level 4"),
        ("buffers.py", "from . import clip", "level 5, from level 4"),
        ("buffers.py", "from .clip import Clip", "level 5, from level 4"),
        ("backends/torch_ops.py", "from ..buffers import Buffers", "level 4, from level 1"),
        ("backends/__init__.py", "from .triton_ops import norm", "which the table does not allow"),
        ("backends/__init__.py", "from ..buffers import Buffers", "level 4, from level 3"),
        ("buffers.py", "def f() -> None:\n    from fusedopt.clip import Clip", "level 5, from level 4"),
        ("buffers.py", "from fusedopt import FusedMainGradOptimizer", "level 13, from level 4"),
        ("window.py", "from fusedopt.config import MainGradConfig", "which the table does not allow"),
        ("layout.py", "import torch", "at module level"),
        ("config.py", "import yaml", "at module level"),
        ("layout.py", "def f() -> None:\n    import torch", "in a function"),
        ("clip.py", "import torch.distributed", f"only {MAY_IMPORT_DISTRIBUTED} may"),
        ("clip.py", "from torch import distributed", f"only {MAY_IMPORT_DISTRIBUTED} may"),
        ("clip.py", "from torch.distributed import all_reduce", f"only {MAY_IMPORT_DISTRIBUTED} may"),
        ("clip.py", "def f() -> None:\n    import torch.distributed as dist", f"only {MAY_IMPORT_DISTRIBUTED} may"),
        ("clip.py", "assert True", "has an assert"),
        ("clip.py", "x = '\N{EM DASH}'", "is not ASCII"),
        ("clip.py", "\n" * MAX_FILE_LINES, "lines, more than 500"),
        ("clip.py", "def f() -> None:\n" + "    f()\n" * MAX_FUNCTION_LINES, "f has 61 lines"),
        ("clip.py", "def f() -> None:\n    f()", "f has no docstring"),
        ("clip.py", "class C:\n    x = 1", "C has no docstring"),
        ("clip.py", f"class C:\n    {DOCSTRING}    def f(self) -> None:\n        pass", "f has no docstring"),
        ("clip.py", f"def f(x) -> None:\n    {DOCSTRING}", "lacks annotations of ['x']"),
        ("clip.py", f"def f(*x: int, **y) -> None:\n    {DOCSTRING}", "lacks annotations of ['y']"),
        ("clip.py", "def _f(x: int):\n    pass", "_f lacks annotations of its return"),
        ("surprise.py", "x = 1", "is not in the table"),
    ],
)
def test_the_checker_catches(path, source, problem):
    clean = [line for line in violations(DOCSTRING, path) if "not in the table" not in line]
    found = violations(DOCSTRING + source, path)
    assert clean == []
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "def f() -> None:\n    '''Load.'''\n    import yaml"),
        ("backends/__init__.py", "def f() -> None:\n    '''Load.'''\n    from fusedopt.backends import triton_ops"),
        ("comm.py", "import torch.distributed as dist"),
        ("optimizer.py", "from fusedopt import backends"),
        ("__init__.py", "from fusedopt._version import __version__"),
    ],
)
def test_the_checker_lets_pass_what_the_table_allows(path, source):
    assert violations(DOCSTRING + source, path) == []


def test_a_file_without_a_docstring_is_caught():
    assert violations("x = 1", "clip.py") == ["clip.py:1 has no module docstring"]


SNAPSHOT = """
import atexit, json, logging, os, random, signal, sys, threading, warnings
import numpy, torch, torch.optim.lr_scheduler
from torch.optim import optimizer as torch_optimizer

def registries():
    return {
        "step pre hooks": len(torch_optimizer._global_optimizer_pre_hooks),
        "step post hooks": len(torch_optimizer._global_optimizer_post_hooks),
        "module hooks": [len(v) for k, v in sorted(vars(torch.nn.modules.module).items()) if k.startswith("_global_")
                         and hasattr(v, "__len__")],
    }

def patched(cls):
    return {name: id(value) for name, value in vars(cls).items()}

def snapshot():
    return {
        "threads": threading.active_count(),
        "os threads": len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0,
        "environment": dict(os.environ),
        "handlers": [repr(h) for h in logging.getLogger().handlers],
        "loggers": sorted(n for n, l in logging.root.manager.loggerDict.items() if getattr(l, "handlers", None)),
        "log level": logging.getLogger().level,
        "warning filters": [str(f) for f in warnings.filters],
        "sys.path": list(sys.path),
        "excepthook": repr(sys.excepthook),
        "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "atexit": atexit._ncallbacks(),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad mode": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()],
        "random": [hash(torch.get_rng_state().numpy().tobytes()), hash(random.getstate()),
                   hash(numpy.random.get_state()[1].tobytes())],
        "safe globals": len(torch.serialization.get_safe_globals()),
        "hooks": registries(),
        "classes": [patched(c) for c in (torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.nn.Linear,
                                         torch.optim.Optimizer, torch.optim.AdamW)],
        "process group": torch.distributed.is_initialized(),
    }

before = snapshot()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import fusedopt
after = snapshot()
print(json.dumps({
    "changed": sorted(key for key in before if before[key] != after[key]),
    "compared": sorted(before),
    "warnings": [str(w.message) for w in caught],
}))
"""


def run_python(script, **env):
    """Run ``script`` in a fresh interpreter in which a warning is an error; return its standard output."""
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_changes_nothing_around_it():
    report = json.loads(run_python(SNAPSHOT))
    assert len(report["compared"]) > 15
    assert report["changed"] == []
    assert report["warnings"] == []


RUDE = """
    import fusedopt
    os.environ["RUDE"] = "1"
    torch.set_num_threads(torch.get_num_threads() + 1)
    logging.basicConfig()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    warnings.warn("rude")
    torch.manual_seed(12345)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.optim.Optimizer.step = torch.optim.AdamW.step
    torch_optimizer.register_optimizer_step_pre_hook(print)
    atexit.register(int)
"""


def test_the_snapshot_would_see_a_change():
    rude = SNAPSHOT.replace("\n    import fusedopt\n", RUDE)
    assert rude != SNAPSHOT
    report = json.loads(run_python(rude))
    expected = {"environment", "torch threads", "handlers", "threads", "random", "grad mode", "default dtype"}
    assert expected | {"classes", "hooks", "atexit"} <= set(report["changed"])
    assert report["warnings"] == ["rude"]


def test_importing_loads_no_optional_library_and_prints_nothing():
    script = "import torch, sys; there = set(sys.modules); import fusedopt; print(*set(sys.modules) - there)"
    loaded = {name.split(".")[0] for name in run_python(script).split()}
    assert "fusedopt" in loaded
    assert loaded.isdisjoint(OPTIONAL_LIBRARIES), loaded


def test_importing_reads_no_setting():
    assert run_python("import fusedopt; print('ok')", FUSEDOPT_BACKEND="nonsense", FUSEDOPT_NO_SUCH="1") == "ok\n"
