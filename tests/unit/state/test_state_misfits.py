"""Claims about state dicts that do not fit: each is refused by name, and nothing was changed."""

import copy
import functools

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from fusedopt.state.state_dicts import FORMAT
from tests.models import loss_of
from tests.state_cases import (
    DTYPES,
    OPTIMIZERS,
    Net,
    addresses,
    everything,
    named_adamw,
    start,
    train,
)


def edit(path, value):
    """Return what sets ``state_dict[path[0]][path[1]]...`` to ``value``, or deletes it."""

    def apply(state_dict):
        target = functools.reduce(lambda holder, key: holder[key], path[:-1], state_dict)
        if value is DELETED:
            del target[path[-1]]
        else:
            target[path[-1]] = value(target[path[-1]]) if callable(value) else value
        return state_dict

    return apply


DELETED = object()
# Parameters in order: 0 scale, 1 first.weight, 2 first.bias, 3 second.weight, 4 second.bias.
EDITS = {
    "another format": (edit(["fusedopt", "format"], FORMAT + 1), [f"format {FORMAT + 1}", f"format {FORMAT}"]),
    "another name": (edit(["fusedopt", "names", 1], "stem.weight"), ["first.weight", "stem.weight"]),
    "another shape": (edit(["fusedopt", "shapes", 1], [6, 4]), ["first.weight", r"\[6, 4\]", r"\[6, 5\]"]),
    "another dtype": (
        edit(["fusedopt", "dtypes", 1], "torch.float16"),
        ["first.weight", "torch.float16", "torch.bfloat16"],
    ),
    "no main_param": (edit(["state", 1, "main_param"], DELETED), ["first.weight", "main_param"]),
    "a rounded main_param": (
        edit(["state", 1, "main_param"], lambda t: t.bfloat16()),
        ["first.weight", "main_param", "torch.bfloat16", "torch.float32"],
    ),
    "a main_param of another shape": (
        edit(["state", 1, "main_param"], lambda t: t[:, :4]),
        ["first.weight", "main_param", r"\(6, 4\)", r"\(6, 5\)"],
    ),
    "a main_param that is none": (edit(["state", 1, "main_param"], 3.0), ["first.weight", "main_param", "float"]),
    "state of another shape": (
        edit(["state", 1, "exp_avg"], lambda t: t[:5]),
        ["first.weight", "exp_avg", r"\(5, 5\)", r"\(6, 5\)"],
    ),
    "the last one wrong": (
        edit(["state", 4, "exp_avg_sq"], lambda t: t[:2]),
        ["second.bias", "exp_avg_sq", r"\(2,\)", r"\(3,\)"],
    ),
    "no groups": (edit(["param_groups"], DELETED), ["param_groups"]),
    "no state": (edit(["state"], DELETED), ["state"]),
    "a group without parameters": (edit(["param_groups", 0, "params"], DELETED), ["params"]),
    "a truncated signature": (edit(["fusedopt", "shapes"], lambda shapes: shapes[:-1]), ["shapes"]),
    "a signature without shapes": (edit(["fusedopt", "shapes"], DELETED), ["shapes"]),
    "a signature that is none": (edit(["fusedopt"], 3), ["fusedopt"]),
}


def assert_refused(run, state_dict, words):
    before, owned = everything(run), addresses(run)
    with pytest.raises(ValueError, match=words[0]) as caught:
        run.optimizer.load_state_dict(state_dict)
    for word in words:
        assert caught.match(word)
    assert everything(run) == before
    assert addresses(run) == owned
    train(run, [11])


@pytest.mark.parametrize("has_state", [True, False], ids=["running", "fresh"])
@pytest.mark.parametrize("name", EDITS)
def test_a_state_dict_that_does_not_fit_is_refused_by_name_and_nothing_is_written(name, has_state):
    apply, words = EDITS[name]
    saved = start(DTYPES["bf16"], named_adamw)
    train(saved, range(3))
    state_dict = copy.deepcopy(saved.optimizer.state_dict())
    start(DTYPES["bf16"], named_adamw, seed=7).optimizer.load_state_dict(state_dict)  # fits before the edit
    run = start(DTYPES["bf16"], named_adamw, seed=7)
    train(run, range(2 if has_state else 0))
    assert_refused(run, apply(state_dict), words)


def trained_state_dict(dtypes=DTYPES["bf16"], make=named_adamw, **settings):
    run = start(dtypes, functools.partial(make, **settings) if settings else make)
    train(run, range(3))
    return run.optimizer.state_dict()


def test_another_number_of_groups_is_refused():
    run = start(DTYPES["bf16"], named_adamw)
    assert_refused(run, trained_state_dict(num_groups=2), ["2 parameter group", "has 1", r"\[2, 3\]", r"\[5\]"])


def test_groups_of_other_sizes_are_refused():
    def make(net):
        named = list(net.named_parameters())
        return [torch.optim.AdamW([{"params": named[:3]}, {"params": named[3:]}], lr=0.01)]

    run = start(DTYPES["bf16"], make)
    assert_refused(run, trained_state_dict(num_groups=2), [r"\[2, 3\]", r"\[3, 2\]"])


def test_parameters_in_another_order_are_refused_by_name():
    def make(net):
        return [torch.optim.AdamW(reversed(list(net.named_parameters())), lr=0.01)]

    run = start(DTYPES["bf16"], make)
    assert_refused(run, trained_state_dict(), ["second.bias", "scale"])


def test_another_model_is_refused_also_without_names():
    class Wider(Net):
        def __init__(self, dtypes, seed=0):
            super().__init__(dtypes, seed)
            self.second = nn.Linear(6, 4, dtype=dtypes[1])

    wider = Wider(DTYPES["bf16"])
    inner = torch.optim.AdamW(wider.parameters())
    saved = FusedMainGradOptimizer(inner).state_dict()
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    assert_refused(run, saved, [r"param_groups\[0\]\['params'\]\[3\]", r"\[4, 6\]", r"\[3, 6\]"])


@pytest.mark.parametrize("pair", [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("mixed", "bf16")])
def test_another_model_dtype_is_refused(pair):
    saved, here = (DTYPES[name] for name in pair)
    run = start(here, named_adamw)
    assert_refused(run, trained_state_dict(saved), ["dtype", "torch."])


def test_a_bare_state_of_another_shape_is_refused():
    net = Net(DTYPES["bf16"])
    bare = torch.optim.AdamW(net.parameters())
    loss_of(net, 0).backward()
    bare.step()
    saved = copy.deepcopy(bare.state_dict())
    saved["state"][3]["exp_avg"] = torch.zeros(3, 5, dtype=torch.bfloat16)
    for num_steps in (0, 2):
        run = start(DTYPES["bf16"], named_adamw)
        train(run, range(num_steps))
        assert_refused(run, saved, ["second.weight", "exp_avg", r"\(3, 5\)", r"\(3, 6\)"])


@pytest.mark.parametrize("thing", [None, 3, "text", [], [1, 2], {}, {"state": {}}, {"epoch": 3}], ids=repr)
def test_what_is_no_state_dict_at_all_is_refused(thing):
    assert_refused(start(DTYPES["bf16"], named_adamw), thing, ["state dict"])


def test_a_models_state_dict_is_refused():
    run = start(DTYPES["bf16"], named_adamw)
    train(run, range(2))
    assert_refused(run, run.net.state_dict(), ["state dict", "first.weight"])


def test_names_on_one_side_only_let_positions_decide():
    unnamed = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    train(unnamed, range(3))
    named = start(DTYPES["bf16"], named_adamw)
    named.optimizer.load_state_dict(unnamed.optimizer.state_dict())
    assert everything(named)["state"] == everything(unnamed)["state"]
    assert named.optimizer.param_groups[0]["param_names"][1] == "first.weight"
    unnamed.optimizer.load_state_dict(named.optimizer.state_dict())
