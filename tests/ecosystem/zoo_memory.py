"""Every optimizer class of the development environment, held in fewer bytes: beside itself in full precision.

Halves of main_params and released gradients change no bit. State in bfloat16 or 8 bits changes updates by what its
encodings lose, which depends on what an optimizer makes of its state: `BOUND` is of the whole movement in ten steps,
from what was measured (docs/optimizers.md has the figures), and 24 bits may lose `LOST_BITS` of a weight in each step.
A class is refused with its reason, or it is right.

``python -m tests.ecosystem.zoo_memory`` writes docs/optimizers.md.
"""

import functools
import importlib
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from fusedopt import FusedMainGradOptimizer
from fusedopt.inner.narrow_state import is_narrow
from fusedopt.nested import leaves
from tests.ecosystem.zoo_probe import build, classes

SHAPES = [(40, 30), (300,), (16, 8, 3, 3), (7,)]
NUM_STEPS = 10
WAYS = {
    "split": {"main_param": "split"},
    "released": {"release": "backward"},
    "bfloat16": {"state_dtype": "bfloat16"},
    "int8": {"state_dtype": "int8"},
    "all": {"main_param": "split24", "state_dtype": "int8", "release": "backward"},
}
EXACT = ("split", "released")
BOUND = {"bfloat16": 0.05, "int8": 0.15, "all": 0.15}
"""Relative error of the movement, in the 2-norm over all parameters; the worst are Conda, and Lion's signs near 0."""

LOST_BITS = 2.0**-15
"""Of a weight, by rounding it to 24 bits stochastically (`encodings`)."""


def all_classes():
    found = {f"torch.{name}": cls for name, cls in vars(torch.optim).items() if isinstance(cls, type)}
    found = {name: cls for name, cls in found.items() if issubclass(cls, Optimizer) and cls is not Optimizer}
    # heavyball compiles each step, for minutes; tests/unit/step/test_bucket_step.py has what it does to memory.
    return found | {name: cls for name, cls in classes().items() if not name.startswith("heavyball.")}


def train(cls, **settings):
    """Return where it brings main_params, how far that is, and the names of what was narrow."""
    generator = torch.Generator().manual_seed(7)
    params = [nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    starts = [param.detach().float() for param in params]
    torch.manual_seed(0)
    optimizer = FusedMainGradOptimizer(build(cls, params), **settings)
    for _ in range(NUM_STEPS):
        for param, shape in zip(params, SHAPES, strict=True):
            rows = 10.0 ** torch.randint(-1, 2, shape[:1] + (1,) * (len(shape) - 1), generator=generator)
            param.grad = torch.randn(shape, generator=generator) * rows
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    mains = [state[number]["main_param"].clone() for number in range(len(SHAPES))]
    moved = [main - start for main, start in zip(mains, starts, strict=True)]
    held = {path[0] for param in params for path, leaf in narrow_in(optimizer, param)}
    return mains, torch.cat([one.flatten() for one in moved]), held


def narrow_in(optimizer, param):
    found = leaves(optimizer.state[param], is_leaf=is_narrow) if param in optimizer.state else ()
    return [(path, leaf) for path, leaf in found if is_narrow(leaf)]


def outcome(cls):
    """Return by way: the reason of a refusal, or whether bits are equal or the relative error, and what was narrow."""
    whole, moved, _ = train(cls)
    if not torch.isfinite(moved).all():
        raise FloatingPointError(cls)
    found = {}
    for way, settings in WAYS.items():
        try:
            mains, other, held = train(cls, **settings)
        except ValueError as error:
            found[way] = str(error)
            continue
        apart = float((other - moved).norm())
        if way == "all":
            size = torch.cat([main.flatten() for main in whole]).norm()
            apart = max(0.0, apart - NUM_STEPS * LOST_BITS * float(size))
        error = apart / max(float(moved.norm()), 1e-30)
        found[way] = (all(map(torch.equal, mains, whole)) if way in EXACT else error, held)
    return found


@functools.cache
def outcomes():
    result = {}
    importlib.import_module("heavyball.utils").compile_mode = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, cls in all_classes().items():
            try:
                whole = train(cls)
            except Exception:  # wants a closure, a graph, matrices only, other arguments
                continue
            if torch.isfinite(whole[1]).all():
                result[name] = outcome(cls)
    return result


def test_no_bit_differs_in_halves_or_released():
    assert len(outcomes()) > 100
    found = {(name, way): ways[way] for name, ways in outcomes().items() for way in EXACT}
    exact = [key for key, value in found.items() if not isinstance(value, str) and value[0]]
    wrong = [key for key, value in found.items() if not isinstance(value, str) and not value[0]]
    assert wrong == []
    assert len(exact) > 180


@pytest.mark.parametrize("way", BOUND)
def test_narrow_state_stays_within_the_bound(way):
    found = {name: ways[way] for name, ways in outcomes().items() if not isinstance(ways[way], str)}
    narrow = {name: error for name, (error, held) in found.items() if held}
    assert len(narrow) >= 60
    assert {name: error for name, error in narrow.items() if not error < BOUND[way]} == {}


def test_who_is_refused_is_told_why():
    refusals = [value for ways in outcomes().values() for value in ways.values() if isinstance(value, str)]
    known = (
        "one parameter decides",
        "train() and eval()",
        "that it holds",
        "closure",
        "could be tried",
        "raised",
        "random numbers",
        "is rounded",
    )
    assert all(any(reason in text for reason in known) for text in refusals)


PAGE = """# Optimizers in fewer bytes

Every class of torch and of the packages in the development requirements that runs with plain arguments (a closure, a
graph or matrices only: not here), held in the ways of [memory.md](memory.md). `python -m tests.ecosystem.zoo_memory`
writes this page; `make zoo` holds it. Four tensors of a bf16 model, ten steps with gradients over three orders of
magnitude.

*equal*: main_params have every bit of the same run in full precision. A percentage is how far parameters end from that
run, of the way that they went; *narrow* says which state was. "all" is `"split24"`, `"int8"` and released; what
rounding to 24 bits may lose is taken off.

{counts}

| class | `"split"` | released | `"bfloat16"` | `"int8"` | all | narrow |
|---|---|---|--:|--:|--:|---|
{rows}

## Refused

{refusals}
"""


def page():
    """Return docs/optimizers.md."""
    rows, refusals = [], []
    for name, ways in sorted(outcomes().items()):
        cells, reason = [], None
        for way in WAYS:
            if isinstance(ways[way], str):
                cells.append("-")
                reason = reason or (way, ways[way].partition(f"with {name.split('.')[-1]}, ")[2].partition(": all")[0])
            else:
                found, held = ways[way]
                cells.append(("equal" if found else "**differs**") if way in EXACT else f"{found:.1%}" if held else "")
        held = ways["int8"][1] if not isinstance(ways["int8"], str) else ()
        if set(cells) != {"-"}:
            rows.append(
                f"| `{name}` | {' | '.join(cells)} | {', '.join(f'`{one}`' for one in sorted(map(str, held)))} |"
            )
        if reason is not None:
            refusals.append(f"- `{name}`{'' if set(cells) == {'-'} else ', narrow state'}: {reason[1]}")
    num = {way: sum(not isinstance(ways[way], str) for ways in outcomes().values()) for way in WAYS}
    went = f"{num['split']} go in halves, {num['released']} released, and {num['int8']} with 8 bits"
    counts = f"Of {len(outcomes())} classes {went}."
    return PAGE.format(counts=counts, rows="\n".join(rows), refusals="\n".join(refusals))


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs/optimizers.md").write_text(page(), encoding="utf-8")
