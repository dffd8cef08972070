"""What the probe says of every optimizer class that the development requirements bring, held against real cuts.

Each class steps three parameters of its own choice of shapes (not the probe's) whole, each alone, and cut in two as two
ranks would have them; rounding apart, that decides what is right. No class may be cut that must not be.
"""

import functools
import importlib
import io
import pkgutil
import warnings

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.optim import Optimizer

from fusedopt.inner.shard_probe import find_out

PACKAGES = ("pytorch_optimizer", "heavyball", "schedulefree", "prodigyopt", "lion_pytorch")
SHAPES = [(40, 30), (50,), (3, 4, 5, 6)]
CUTS = [500, 17, 201]
NUM_STEPS = 30

# Element-wise as far as 30 steps tell; the probe is right all the same.
NOT_ELEMENT_WISE = {
    "AdamP": "projects by a cosine of whole tensors",
    "AdamS": "decays by a mean over all parameters, where there is weight decay",
    "DAdaptLion": "estimates one learning rate for all",
    "DAdaptSGD": "estimates one learning rate for all",
    "SWATS": "switches to SGD for all parameters when one says so",
}
KEPT_NEEDLESSLY = {"SaRA": "makes its state when it is constructed, which a copy lacks"}
SLOW = ("SpectralSphere", "SM3")  # seconds in these shapes; neither is element-wise


@functools.cache
def classes():
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            try:
                importlib.import_module(module.name)
            except ImportError:  # wants a library that is not there
                continue
    found, waiting = {}, [Optimizer]
    while waiting:
        for cls in waiting.pop().__subclasses__():
            if cls.__module__.split(".")[0] in PACKAGES and cls.__name__ not in SLOW:
                found[f"{cls.__module__.split('.')[0]}.{cls.__name__}"] = cls
            waiting.append(cls)
    return dict(sorted(found.items()))


def build(cls, params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            optimizer = cls(params)
        except TypeError:  # wants a learning rate
            optimizer = cls(params, lr=0.01)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def near(a, b):
    """Tell differences of rounding, some 30 x 2**-24, from a norm or mean that is another one."""
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-4 * a.abs() + 1e-6).all())


def steps(cls, parts):
    """Step the parts, ``(number, slice or None)``, together; return their values."""
    generator = torch.Generator().manual_seed(7)
    starts = [torch.randn(shape, generator=generator) for shape in SHAPES]
    params = [nn.Parameter(starts[i].clone() if cut is None else starts[i].flatten()[cut].clone()) for i, cut in parts]
    torch.manual_seed(0)
    optimizer = build(cls, params)
    for _ in range(NUM_STEPS):
        gradients = []
        for shape in SHAPES:
            rows = 10.0 ** torch.randint(-2, 3, shape[:1] + (1,) * (len(shape) - 1), generator=generator)
            gradients.append(torch.randn(shape, generator=generator) * rows)
        for param, (i, cut) in zip(params, parts, strict=True):
            param.grad = gradients[i].clone() if cut is None else gradients[i].flatten()[cut].clone()
        optimizer.step()
    values = [param.detach() for param in params]
    if not all(bool(torch.isfinite(value).all()) for value in values):
        raise FloatingPointError(cls)
    return values


def truth(cls):
    whole = steps(cls, [(i, None) for i in range(3)])
    if not all(near(steps(cls, [(i, None)])[0], whole[i]) for i in range(3)):
        return "coupled"
    try:
        first = steps(cls, [(i, slice(0, cut)) for i, cut in enumerate(CUTS)])
        second = steps(cls, [(i, slice(cut, None)) for i, cut in enumerate(CUTS)])
    except Exception:  # takes no vectors
        return "parameter"
    pairs = zip(first, second, whole, strict=True)
    return "element" if all(near(torch.cat([a, b]), value.flatten()) for a, b, value in pairs) else "parameter"


def verdict(found):
    return "coupled" if found.is_coupled else "element" if found.is_elementwise else "parameter"


def fingerprint(optimizer, live):
    """Return bytes that change with the parameters, the state, the groups or the random numbers to come."""
    state = [optimizer.state.get(param) for param in live], len(optimizer.state)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    buffer = io.BytesIO()
    torch.save([[param.detach() for param in live], state, groups, torch.get_rng_state()], buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def outcomes():
    """By class: what is right, what was found, and whether the probe left everything live as it was."""
    result = {}
    heavyball = importlib.import_module("heavyball.utils")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(heavyball, "compile_mode", None)  # it would compile each step, for minutes
        warnings.simplefilter("ignore")
        for name, cls in classes().items():
            live = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(5))]
            try:
                optimizer, right = build(cls, live), truth(cls)
            except Exception as error:  # wants a closure, a graph, two-dimensional parameters
                optimizer, right = None, f"{type(error).__name__}"
            if optimizer is not None:
                before = fingerprint(optimizer, live)
                found = find_out(optimizer, optimizer.param_groups[0])
                result[name] = right, found, fingerprint(optimizer, live) == before
    return result


def test_no_class_is_cut_that_must_not_be(outcomes):
    assert len(outcomes) > 120
    wrong = {name: right for name, (right, found, _) in outcomes.items() if found.is_elementwise and right != "element"}
    assert wrong == {}


def test_no_coupled_class_passes_without_a_word(outcomes):
    silent = [n for n, (right, f, _) in outcomes.items() if right == "coupled" and not (f.is_coupled or f.doubt)]
    assert silent == []


def test_element_wise_classes_are_cut(outcomes):
    right = {name for name, (right, _, _) in outcomes.items() if right == "element"}
    right = {name for name in right if name.split(".")[1] not in NOT_ELEMENT_WISE}
    whole = {name for name in right if not outcomes[name][1].is_elementwise}
    assert {name.split(".")[1] for name in whole} <= set(KEPT_NEEDLESSLY)
    assert len(whole) <= 0.03 * len(right)


def test_nothing_live_is_touched(outcomes):
    assert [name for name, (_, _, is_untouched) in outcomes.items() if not is_untouched] == []
