"""The table of torch's private names, held against the installed torch and against the source."""

import ast
import dis
import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fusedopt
from fusedopt._torch_private import NAMES, PATCHES

PACKAGE = Path(fusedopt.__file__).parent
HOME = "_torch_private.py"
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
FILES = [file for file in SOURCES if file != HOME]

IN_PLACE = {
    ("*", "_version"): "a number that changes, read for each parameter at each step: a call would cost more than it",
    ("layers/linear.py", "_current_level"): "a number that changes, read in each forward of a layer",
    ("optimizer.py", "_step_supports_amp_scaling"): "torch's scalers read the wrapper's property of this name",
    ("sharding/channel.py", "_timeout"): "an attribute of its own class",
    ("sharding/comm.py", "_timeout"): "the same",
    ("layers/function.py", "_parameters"): "the same",
    ("sharding/process_groups.py", "torch.distributed.distributed_c10d"): "torch.distributed is imported in five files",
    **{
        ("sharding/checkpoint_parts.py", name): "torch.distributed is imported in five files, here only when it asks"
        for name in (
            *("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.planner"),
            *("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__"),
        )
    },
    ("nested.py", "_make"): "a method of named tuples, in Python's documentation",
    # Other libraries; fusedopt/integrations/versions.py says which versions have what.
    ("integrations/accelerate.py", "_optimizers"): "accelerate's list of what it prepared",
    ("integrations/scaling.py", "_optimizers"): "the same",
    ("recompute.py", "_attn_implementation"): "transformers' setting",
    ("recompute.py", "_attn_implementation_internal"): "the same",
    **{
        ("integrations/versions.py", name): "a method of transformers' Trainer, whose presence is checked there"
        for name in (
            *("_clip_grad_norm", "_get_grad_norm", "_maybe_log_save_evaluate"),
            *("_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
        )
    },
}
"""What a file may name itself, and why."""

OWN_WRITES = {
    "buffers/main_grad.py": "the attributes of a parameter and of its main_grad that are fusedopt's own",
    "inner/copies.py": "a copy that was just made, and a parameter of it",
    "inner/optimizers.py": "grad_scale and found_inf, which torch.amp.GradScaler sets around a step as well",
    "inner/rollback.py": "an optimizer's counters, as they were before a step that failed",
    "optimizer.py": "its own attributes",
}
"""Files that write into what is not theirs, and replace nothing of torch there."""

PRIVATE = re.compile(r"_[A-Za-z]\w*")
DUNDER = re.compile(r"__\w+__")
LATE_BOUND = {"torch.nn.Parameter", "torch.nn.Linear", "torch.nn.Module.forward", "torch.optim.Optimizer.zero_grad"}
"""What PATCHES names that is public, and so in no row of NAMES."""


# -- what the source names


def is_private(name):
    return bool(PRIVATE.fullmatch(name)) and not name.startswith("_fusedopt") and not DUNDER.fullmatch(name)


def leaf_of(where):
    """Return the last attribute of a row's path."""
    return where.partition(":")[0].rpartition(".")[2]


LISTED = {leaf_of(row.where): row for row in NAMES}
PUBLIC_LOOKING = {row.where.partition(":")[0] for row in NAMES if ":" not in row.where and "._" not in row.where}


def components(where):
    return set(where.replace(":", ".").split("."))


def names_bound_to_torch(tree):
    """Return what the imports of a file bind to torch or to something in it: local name -> dotted path."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or target] = target
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: dotted for name, dotted in bound.items() if dotted.partition(".")[0] == "torch"}


def dotted_of(node, bound):
    """Return the dotted path of a chain of attributes that begins at torch; None for any other expression."""
    rest = []
    while isinstance(node, ast.Attribute):
        rest.insert(0, node.attr)
        node = node.value
    root = bound.get(node.id) if isinstance(node, ast.Name) else None
    return ".".join([root, *rest]) if root else None


def own_names(tree):
    """Return the private names that a file gives to things of its own: definitions, variables, attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "self" else set()
    return found


def mentions(tree):
    """Yield ``(line, name, is dotted)`` for whatever could name something of torch, wherever it hides."""
    bound = names_bound_to_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from ((node.lineno, f"{node.module}.{alias.name}", True) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name, True) for a in node.names if a.name.partition(".")[0] == "torch")
        elif isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names):
                yield node.lineno, node.attr, False
            dotted = dotted_of(node, bound)
            if dotted:
                yield node.lineno, dotted, True
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_dotted = re.fullmatch(r"torch(\.\w+)+", node.value) is not None
            if is_dotted or re.fullmatch(r"\w+", node.value):
                yield node.lineno, node.value, is_dotted


def excuse(file, name):
    """Return the key of IN_PLACE by which ``file`` may say ``name``; None if there is none."""
    leaf = name.rpartition(".")[2]
    for key in IN_PLACE:
        if key[0] in (file, "*") and (key[1] in (name, leaf) or name.startswith(f"{key[1]}.")):
            return key
    return None


def findings(source, file):
    """Return ``(line, name, problem)`` for each private name of torch in ``source``, excused ones included."""
    tree = ast.parse(source)
    own = own_names(tree)
    for line, name, is_dotted in mentions(tree):
        if is_dotted:
            is_listed = any(name == row or name.startswith(f"{row}.") for row in PUBLIC_LOOKING)
            if is_listed or any(map(is_private, name.split("."))):
                yield line, name, "is a path in torch that is not public"
        elif name in LISTED and (is_private(name) or DUNDER.fullmatch(name)):
            yield line, name, f"is listed as {LISTED[name].where}"
        elif is_private(name) and name not in own:
            yield line, name, "is private, and nothing of this file's own"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("f_locals", "co_name"):
            yield node.lineno, node.attr, "reads a frame of somebody else's function"


def problems(source, file):
    """Return what ``source``, as the file ``file`` of the package, names and may not: one line each."""
    found = {(line, name, problem) for line, name, problem in findings(source, file) if excuse(file, name) is None}
    return [f"{file}:{line} {name} {problem}; take it from {HOME}" for line, name, problem in sorted(found)]


@pytest.mark.parametrize("file", FILES)
def test_no_other_file_names_what_is_private_to_torch(file):
    assert problems(SOURCES[file], file) == []


def test_every_exception_is_needed():
    used = {excuse(file, name) for file in FILES for _, name, _ in findings(SOURCES[file], file)}
    assert used - {None} == set(IN_PLACE)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C._current_graph_task_id()", "_current_graph_task_id"),
        ("import torch\ntorch._new_thing", "_new_thing"),
        ("import torch._dynamo.callback", "torch._dynamo.callback"),
        ("def f():\n    import torch._dynamo.callback as c", "torch._dynamo.callback"),
        ("from torch._dynamo.callback import callback_handler", "torch._dynamo.callback.callback_handler"),
        ("from torch import _C", "torch._C"),
        ("from torch.nn.utils.clip_grad import _get_total_norm as f", "torch.nn.utils.clip_grad._get_total_norm"),
        ("def f(param):\n    return param._post_accumulate_grad_hooks", "_post_accumulate_grad_hooks"),
        ("def f(scaler):\n    return scaler._private_to_torch", "_private_to_torch"),
        ("getattr(thing, '_optimizer_step_pre_hooks', None)", "_optimizer_step_pre_hooks"),
        ("setattr(thing, '_anything', None)", "_anything"),
        ("vars(thing).get('_parameters')", "_parameters"),
        ("import sys\nsys.modules['torch._dynamo.eval_frame']", "torch._dynamo.eval_frame"),
        ("class C:\n    _backward_cls: int", "_backward_cls"),
        ("class C:\n    def f(self):\n        self._scale = 1", "_scale"),
        ("from torch.amp.grad_scaler import OptState", "torch.amp.grad_scaler.OptState"),
        ("import torch\ntorch.autograd.function.FunctionMeta", "torch.autograd.function.FunctionMeta"),
        ("import torch.distributed as d\nd.distributed_c10d", "torch.distributed.distributed_c10d"),
        ("def f(frame):\n    return frame.f_locals['self']", "f_locals"),
        ("def f(frame):\n    return frame.f_code.co_name", "co_name"),
    ],
)
def test_the_scan_catches(source, name):
    found = problems(source, "gradients/clip.py")
    assert any(f" {name} " in line for line in found), found


@pytest.mark.parametrize(
    "source",
    [
        "class C:\n    def f(self):\n        self._mine = 1\n    def g(self, other):\n        return other._mine",
        "_CONSTANT = 1\ndef _f():\n    return _CONSTANT",
        "from fusedopt._torch_private import current_graph_task_id",
        "import torch\ntorch.nn.utils.clip_grad_norm_",
        "def f(tensor):\n    return tensor._version",
        "vars(thing).get('__dict__')",
    ],
)
def test_the_scan_lets_pass(source):
    assert problems(source, "gradients/clip.py") == []


# -- the table


def resolve(where):
    """Return the object at the dotted path ``where``; importing what has to be.

    Raises:
        AttributeError: if there is none.
    """
    parts = where.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AttributeError(where)


def codes_of(function):
    """Yield the code of ``function``, of what decorators put it around, and of all that is defined in these."""
    waiting = [getattr(f, "__code__", None) for f in (function, inspect.unwrap(function))]
    while waiting:
        code = waiting.pop()
        if code is not None:
            yield code
            waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]


def is_set_by(cls, name):
    """Return whether instances of ``cls`` get an attribute ``name``: declared, or stored by one of its methods."""
    for base in cls.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return True
        for method in filter(callable, vars(base).values()):
            instructions = (i for code in codes_of(method) for i in dis.get_instructions(code))
            if any(i.opname == "STORE_ATTR" and i.argval == name for i in instructions):
                return True
    return False


def names_in(code):
    return {*code.co_varnames, *code.co_freevars, *(const for const in code.co_consts if isinstance(const, str))}


def exists(where):
    """Return whether the installed torch has what a row names."""
    path, _, variable = where.partition(":")
    owner, _, name = path.rpartition(".")
    try:
        found = resolve(path)
    except AttributeError:
        try:
            return isinstance(resolve(owner), type) and not variable and is_set_by(resolve(owner), name)
        except AttributeError:
            return False
    return not variable or any(variable in names_in(code) for code in codes_of(found))


@pytest.mark.parametrize("row", NAMES, ids=lambda row: row.where)
def test_the_installed_torch_has(row):
    assert exists(row.where)


@pytest.mark.parametrize(
    "where",
    [
        "torch._C._no_such_function",
        "torch.no_such_module.thing",
        "torch.amp.GradScaler._no_such_attribute",
        "torch.nn.utils.clip_grad.clip_grad_norm_:no_such_variable",
        "torch._C._current_graph_task_id:func",
        "torch.autograd.profiler._no_such_number",
    ],
)
def test_what_torch_lacks_would_be_seen(where):
    assert not exists(where)


def test_a_row_says_why_and_no_row_is_there_twice():
    assert len({row.where for row in NAMES}) == len(NAMES)
    assert all(row.why for row in NAMES)


def said_in(tree):
    """Return all names that a file uses: attributes, imports, short strings, parts of dotted ones, and keywords."""
    keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    return {part for _, name, _ in mentions(tree) for part in name.split(".")} | keywords


def test_the_file_uses_what_it_lists_and_lists_what_it_uses():
    tree = ast.parse(SOURCES[HOME])
    tables = {"NAMES", "PATCHES"}
    tree.body = [n for n in tree.body if not (isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in tables)]
    used = said_in(tree)
    elsewhere = set().union(*(said_in(ast.parse(SOURCES[file])) for file in FILES))
    unused = [row.where for row in NAMES if row.where.replace(":", ".").rpartition(".")[2] not in used | elsewhere]
    assert unused == []
    listed = set().union(*(components(row.where) for row in NAMES))
    unlisted = {name for name in used if is_private(name)} - listed - own_names(tree)
    assert unlisted == set()


# -- what fusedopt replaces


def writes(source):
    """Yield the lines at which ``source`` writes into something that may not be its own.

    Attributes of whatever an import bound, ``setattr``, a class, a closure's cell, and an object's ``vars()``.
    """
    tree = ast.parse(source)
    bound = names_bound_to_torch(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "delattr"}:
            yield node.lineno
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            if node.attr in {"__class__", "cell_contents", "_backward_cls"} or dotted_of(node, bound):
                yield node.lineno
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "vars":
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func
            is_vars = isinstance(called.value, ast.Call) and ast.unparse(called.value.func) == "vars"
            if is_vars and called.attr in {"update", "pop", "setdefault", "clear", "popitem"}:
                yield node.lineno


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.file}-{patch.what}")
def test_a_patch_is_of_something_that_is_there(patch):
    assert exists(patch.what)
    assert patch.file in SOURCES
    assert all((patch.why, patch.begins, patch.ends))
    assert patch.what in LATE_BOUND or any(row.where.startswith(patch.what) for row in NAMES)


def test_every_file_that_writes_into_torch_is_in_the_table_of_patches():
    writing = {file for file, source in SOURCES.items() if list(writes(source))}
    assert writing - {patch.file for patch in PATCHES} <= set(OWN_WRITES)
    assert set(OWN_WRITES) <= writing


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.autograd.backward = f",
        "from torch import optim\noptim.AdamW.step = f",
        "from torch.optim import AdamW\ndel AdamW.step",
        "setattr(cls, name, method)",
        "cell.cell_contents = f",
        "param.__class__ = Pending",
        "vars(module)['forward'] = f",
        "del vars(module)['forward']",
        "vars(module).update(forward=f)",
    ],
)
def test_a_write_would_be_seen(source):
    assert list(writes(source))


def test_importing_the_package_loads_nothing_that_torch_loads_late():
    script = "import torch, sys; before = set(sys.modules); import fusedopt; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert [name for name in done.stdout.split() if name.partition(".")[0] == "torch"] == []
