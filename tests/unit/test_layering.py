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
LONG_FILES = ("optimizer.py", "buffers/bucket.py")  # docs/decisions/0011-rooms.md says why
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Room:
    """A sub-package, or a file beside them.

    Its files may import each other, without a circle, and from the rooms that it names.
    """

    may_import: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    lazily: tuple[str, ...] = ()  # other libraries, inside functions only


# In the order in which data flows: a row names rooms above it only. docs/decisions/0011-rooms.md says why it is this.
TABLE = {
    "_version": Room(),
    "_torch_private": Room((), ("torch",)),
    "config": Room((), (), ("yaml",)),
    "live_wrappers": Room(),
    "nested": Room(),
    "sharding": Room(("_torch_private", "nested"), ("torch",)),
    "backends": Room(("_version", "_torch_private", "sharding"), ("torch",)),
    "buffers": Room(("_torch_private", "sharding", "backends"), ("torch",)),
    "checks": Room(("_torch_private", "config", "live_wrappers", "sharding", "buffers"), ("torch",)),
    "layers": Room(("_torch_private", "backends", "buffers"), ("torch",)),
    "gradients": Room(("_torch_private", "sharding", "backends", "buffers", "checks"), ("torch",)),
    "reduction": Room(("_torch_private", "sharding", "backends", "buffers", "gradients"), ("torch",)),
    "inner": Room(("_torch_private", "nested", "sharding", "buffers", "checks"), ("torch", "numpy")),
    "step": Room(
        ("_torch_private", "config", "sharding", "backends", "buffers", "checks", "gradients", "reduction", "inner"),
        ("torch",),
    ),
    "registration": Room(("_torch_private", "buffers", "checks", "gradients", "reduction", "inner"), ("torch",)),
    "state": Room(
        (
            *("config", "live_wrappers", "nested", "sharding", "buffers", "gradients", "reduction", "inner"),
            "registration",
        ),
        ("torch",),
    ),
    "optimizer": Room(
        (
            *("_torch_private", "config", "live_wrappers", "sharding", "backends", "buffers", "checks", "gradients"),
            *("reduction", "inner", "step", "registration", "state"),
        ),
        ("torch",),
    ),
    "recompute": Room(("_torch_private",), ("torch",)),
    "planner": Room(("sharding",)),
    "integrations": Room(
        ("config", "sharding", "backends", "checks", "layers", "optimizer", "recompute"),
        ("torch",),
        ("transformers", "accelerate"),
    ),
    "__main__": Room(("_version", "config", "planner", "backends")),
}
TABLE[""] = Room(tuple(TABLE))  # fusedopt/__init__.py: the public names of all above

ADAPTERS = {"backends.triton_ops": "triton", "backends.apex_ops": "apex", "backends.te_ops": "transformer_engine"}
"""By the library that each speaks to: loaded where one is asked for, and by nobody else."""

OPTIONAL_LIBRARIES = {"transformers", "accelerate", "yaml", "safetensors", "triton", "apex", "transformer_engine"}
MAY_IMPORT_DISTRIBUTED = tuple(
    f"sharding.{name}" for name in ("process_groups", "channel", "comm", "dtensor", "checkpoint_parts")
)
WITHOUT_TORCH = ("sharding.layout",)


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


def room_of(name):
    """Return the room of a file, or of anything in it, by its dotted name inside the package."""
    top = name.partition(".")[0]
    return top if top in TABLE else ""


def internal(dotted):
    """Return the dotted name inside the package that an import of ``dotted`` names; None for other libraries."""
    top, _, rest = dotted.partition(".")
    return rest if top == "fusedopt" else None


def import_violations(tree, name, is_package):
    row = TABLE[room_of(name)]
    for line, dotted, is_lazy in imports_of(tree, name, is_package):
        target = internal(dotted)
        if target is not None:
            if room_of(target) not in (room_of(name), *row.may_import):
                yield line, f"imports {dotted}, which the row of {room_of(name)!r} does not allow"
            if not is_lazy and any(target == adapter or target.startswith(f"{adapter}.") for adapter in ADAPTERS):
                yield line, f"imports {dotted} at module level; an adapter is loaded where its library is asked for"
            continue
        top = dotted.split(".")[0]
        if dotted.startswith("torch.distributed") and name not in MAY_IMPORT_DISTRIBUTED:
            yield line, f"imports {dotted}; only {MAY_IMPORT_DISTRIBUTED} may"
        if top == "torch" and name in WITHOUT_TORCH:
            yield line, f"imports {dotted}; integers only"
        libraries = (*row.libraries, *(row.lazily if is_lazy else ()), ADAPTERS.get(name))
        if top not in sys.stdlib_module_names and top not in libraries:
            yield line, f"imports {dotted} {'in a function' if is_lazy else 'at module level'}, which it may not"


def circles():
    """Return the files of the package that import each other in a circle."""
    arrows = {}
    for path in package_files():
        name = module_of(path)
        tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
        found = imports_of(tree, name, path.name == "__init__.py")
        targets = {internal(dotted) for _, dotted, is_lazy in found if not is_lazy} - {None}
        arrows[name] = {target if target in ALL_FILES else target.rpartition(".")[0] for target in targets} - {name}
    while free := [name for name, targets in arrows.items() if not targets & set(arrows)]:
        for name in free:
            del arrows[name]
    return sorted(arrows)


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


def style_violations(tree, source, *, is_long):
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES and not is_long:
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
    if name and room_of(name) == "":
        return [f"{path} is in no room of the table; give it one, and say why in docs/decisions"]
    tree = ast.parse(source)
    styles = style_violations(tree, source, is_long=str(path) in LONG_FILES)
    found = [*import_violations(tree, name, path.name == "__init__.py"), *styles]
    return [f"{path}:{line} {problem}" for line, problem in sorted(found)]


def package_files():
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


ALL_FILES = {module_of(path) for path in package_files()}


@pytest.mark.parametrize("path", package_files(), ids=str)
def test_file_keeps_to_its_room_and_the_house_style(path):
    assert violations((PACKAGE / path).read_text(encoding="utf-8"), path) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles() == []


def test_the_table_was_held_against_the_real_package():
    assert {room_of(name) for name in ALL_FILES} == set(TABLE)
    assert set(ADAPTERS) | set(MAY_IMPORT_DISTRIBUTED) | set(WITHOUT_TORCH) <= ALL_FILES
    source = (PACKAGE / "optimizer.py").read_text(encoding="utf-8")
    found = {room_of(internal(d)) for _, d, _ in imports_of(ast.parse(source), "optimizer", False) if internal(d)}
    assert found >= {"buffers", "gradients", "inner", "backends"}


@pytest.mark.parametrize("name", TABLE, ids=lambda name: name or "__init__")
def test_the_table_itself_only_points_up(name):
    above = list(TABLE)[: list(TABLE).index(name)]
    assert set(TABLE[name].may_import) <= set(above)


ONLY_THESE_MAY = f"only {MAY_IMPORT_DISTRIBUTED} may"
DOCSTRING = '"""Docstring."""\n'


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("gradients/arrival.py", "from fusedopt.inner.optimizers import Group", "row of 'gradients' does not allow"),
        ("buffers/flat.py", "from fusedopt.optimizer import FusedMainGradOptimizer", "row of 'buffers' does not"),
        ("buffers/flat.py", "import fusedopt.gradients.clip", "row of 'buffers' does not allow"),
        ("buffers/flat.py", "from fusedopt import gradients", "row of 'buffers' does not allow"),
        ("buffers/flat.py", "from fusedopt.gradients import clip", "row of 'buffers' does not allow"),
        ("buffers/flat.py", "from ..gradients import clip", "row of 'buffers' does not allow"),
        ("buffers/flat.py", "from ..gradients.clip import Clip", "row of 'buffers' does not allow"),
        ("optimizer.py", "from .layers import linear", "row of 'optimizer' does not allow"),
        ("backends/torch_ops.py", "from ..buffers.flat import Buffers", "row of 'backends' does not allow"),
        ("backends/__init__.py", "from .triton_ops import norm", "an adapter is loaded where"),
        ("backends/__init__.py", "from ..buffers.flat import Buffers", "row of 'backends' does not allow"),
        ("buffers/flat.py", "def f() -> None:\n    from fusedopt.gradients.clip import Clip", "row of 'buffers' does"),
        ("buffers/flat.py", "from fusedopt import FusedMainGradOptimizer", "row of 'buffers' does not allow"),
        ("gradients/clip.py", "from fusedopt.config import MainGradConfig", "row of 'gradients' does not"),
        ("sharding/layout.py", "import torch", "integers only"),
        ("backends/torch_ops.py", "import triton", "at module level, which it may not"),
        ("planner.py", "import torch", "at module level"),
        ("config.py", "import yaml", "at module level"),
        ("planner.py", "def f() -> None:\n    import torch", "in a function"),
        ("gradients/clip.py", "import torch.distributed", ONLY_THESE_MAY),
        ("gradients/clip.py", "from torch import distributed", ONLY_THESE_MAY),
        ("gradients/clip.py", "from torch.distributed import all_reduce", ONLY_THESE_MAY),
        (
            "gradients/clip.py",
            "def f() -> None:\n    import torch.distributed as dist",
            ONLY_THESE_MAY,
        ),
        ("gradients/clip.py", "assert True", "has an assert"),
        ("gradients/clip.py", "x = '\N{EM DASH}'", "is not ASCII"),
        ("gradients/clip.py", "\n" * MAX_FILE_LINES, "lines, more than 500"),
        ("gradients/clip.py", "def f() -> None:\n" + "    f()\n" * MAX_FUNCTION_LINES, "f has 61 lines"),
        ("gradients/clip.py", "def f() -> None:\n    f()", "f has no docstring"),
        ("gradients/clip.py", "class C:\n    x = 1", "C has no docstring"),
        ("gradients/clip.py", f"class C:\n    {DOCSTRING}    def f(self) -> None:\n        pass", "f has no docstring"),
        ("gradients/clip.py", f"def f(x) -> None:\n    {DOCSTRING}", "lacks annotations of ['x']"),
        ("gradients/clip.py", f"def f(*x: int, **y) -> None:\n    {DOCSTRING}", "lacks annotations of ['y']"),
        ("gradients/clip.py", "def _f(x: int):\n    pass", "_f lacks annotations of its return"),
        ("surprise.py", "x = 1", "is in no room of the table"),
    ],
)
def test_the_checker_catches(path, source, problem):
    clean = [line for line in violations(DOCSTRING, path) if "in no room" not in line]
    found = violations(DOCSTRING + source, path)
    assert clean == []
    assert any(problem in line for line in found), found


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("config.py", "def f() -> None:\n    '''Load.'''\n    import yaml"),
        ("backends/__init__.py", "def f() -> None:\n    '''Load.'''\n    from fusedopt.backends import triton_ops"),
        ("sharding/comm.py", "import torch.distributed as dist"),
        ("backends/triton_ops.py", "import triton"),
        ("optimizer.py", "from fusedopt import backends"),
        ("__init__.py", "from fusedopt._version import __version__"),
    ],
)
def test_the_checker_lets_pass_what_the_table_allows(path, source):
    assert violations(DOCSTRING + source, path) == []


def test_a_file_without_a_docstring_is_caught():
    assert violations("x = 1", "gradients/clip.py") == ["gradients/clip.py:1 has no module docstring"]


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
