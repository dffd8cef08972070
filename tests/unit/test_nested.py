"""One way through nested state: the same containers for all who copy, cast, cut, count, compare, load or send it."""

import collections
import contextlib
import copy
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fusedopt import FusedMainGradOptimizer
from fusedopt.checks import hidden_optimizers
from fusedopt.inner.copies import state_to_come
from fusedopt.inner.loading import load_in_place
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.inner.rollback import Snapshot
from fusedopt.inner.shard_probe import find_out
from fusedopt.nested import is_alike, leaves, map_leaves
from fusedopt.sharding.checkpoint_parts import CheckpointPart
from fusedopt.sharding.layout import Span
from fusedopt.sharding.local_state import Cut, label, take, wrap
from fusedopt.state.consolidation import check_alike, consolidate

Pair = collections.namedtuple("Pair", "count total")


class Attributes(dict):
    """The pattern of dicts whose items read as attributes."""

    __getattr__ = dict.get


class History(list):
    """A list that keeps more than its items: an object, not a container."""

    def __init__(self, items, best):
        super().__init__(items)
        self.best = best


MAPPINGS = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": lambda items: collections.defaultdict(list, items),
    "Counter": lambda items: collections.Counter(dict(items)),
    "dict of attributes": Attributes,
}
SEQUENCES = {
    "list": list,
    "tuple": tuple,
    "deque": lambda items: collections.deque(items, maxlen=4),
    "named tuple": lambda items: Pair(*items),
    "torch.return_types": torch.return_types.max,
}
CONTAINERS = {
    **{name: lambda one, two, make=make: make({"one": one, "two": two}) for name, make in MAPPINGS.items()},
    **{name: lambda one, two, make=make: make([one, two]) for name, make in SEQUENCES.items()},
    "deep": lambda one, two: [collections.defaultdict(list, a=(Pair(0, collections.deque([one, {"b": two}], 3)),))],
}
every_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


def tensors_in(value):
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def form(value):
    """Return what the containers are, by a walk of this file's own: classes, order, limits, factories; and leaves."""
    if isinstance(value, dict):
        factory = value.default_factory if isinstance(value, collections.defaultdict) else None
        return type(value), factory, [(key, form(item)) for key, item in value.items()]
    if type(value) in (list, tuple, collections.deque, Pair, torch.return_types.max):
        return type(value), getattr(value, "maxlen", None), [form(item) for item in value]
    return id(value)


LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=2),
    st.builds(torch.zeros, st.integers(0, 2)),
    st.builds(torch.Size, st.lists(st.integers(0, 3), max_size=2)),
    st.sets(st.integers(), max_size=2),
    st.builds(History, st.lists(st.integers(), max_size=2), st.integers()),
)


def containers(inside):
    keyed = st.dictionaries(st.one_of(st.text(max_size=2), st.integers(0, 2)), inside, max_size=3)
    pairs = st.lists(inside, min_size=2, max_size=2)
    mappings = [st.builds(make, keyed) for make in MAPPINGS.values()]
    fixed = [st.builds(SEQUENCES[name], pairs) for name in ("named tuple", "torch.return_types")]
    free = [st.builds(SEQUENCES[name], st.lists(inside, max_size=3)) for name in ("list", "tuple", "deque")]
    return st.one_of(*mappings, *fixed, *free)


NESTED = st.recursive(LEAVES, containers, max_leaves=12)
examples = settings(derandomize=True, deadline=None, database=None, max_examples=200)


# -- the walks themselves


@examples
@given(NESTED)
def test_a_map_that_changes_nothing_makes_the_same_containers_anew_around_the_same_leaves(value):
    before = form(value)
    mapped = map_leaves(lambda path, leaf: leaf, value)
    assert form(mapped) == form(value) == before
    if isinstance(value, (dict, list, collections.deque)) and not isinstance(value, History):
        assert mapped is not value


@examples
@given(NESTED)
def test_paths_lead_to_the_leaves_and_both_walks_take_them_in_one_order(value):
    seen = []
    map_leaves(lambda path, leaf: seen.append((path, leaf)), value)
    found = list(leaves(value))
    assert [path for path, _ in seen] == [path for path, _ in found]
    for path, leaf in found:
        there = value
        for key in path:
            there = there[key]
        assert there is leaf


@examples
@given(NESTED, st.data())
def test_alike_is_what_has_the_same_form_and_leaves_and_nothing_else(value, data):
    def is_same(one, other):
        return one is other

    assert is_alike(is_same, value, map_leaves(lambda path, leaf: leaf, value))
    paths = [path for path, _ in leaves(value)]
    if paths:
        place = data.draw(st.sampled_from(paths))
        assert not is_alike(is_same, value, map_leaves(lambda p, leaf: object() if p == place else leaf, value))
        assert not is_alike(is_same, value, map_leaves(lambda p, leaf: [leaf] if p == place else leaf, value))


@pytest.mark.parametrize(
    ("one", "other"),
    [([1], (1,)), ([1], collections.deque([1])), ([], {}), ([1, 2], [1]), ({"a": 1}, {"b": 1}), ({"a": []}, {})],
)
def test_what_stands_in_other_containers_is_not_alike(one, other):
    assert not is_alike(lambda *_: True, one, other)
    assert not is_alike(lambda *_: True, other, one)


def test_a_container_can_be_taken_as_a_leaf_and_an_object_with_items_is_one():
    value = {"a": [1, [2]], "b": History([3], best=4)}
    found = dict(leaves(value, is_leaf=lambda v: v == [2]))
    assert found == {("a", 0): 1, ("a", 1): [2], ("b",): value["b"]}
    mapped = map_leaves(lambda _, leaf: "leaf", value, is_leaf=lambda v: isinstance(v, list))
    assert mapped == {"a": "leaf", "b": "leaf"}


# -- everyone who walks state


class Holds(torch.optim.Optimizer):
    """SGD with momentum, which it keeps in a container of any kind, beside another value."""

    def __init__(self, params, make, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.make = make

    def other(self, p):
        return torch.zeros(2, dtype=torch.int32)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["held"] = self.make(torch.zeros_like(p), self.other(p))
                    momentum, _ = tensors_in(state["held"])
                    p.add_(momentum.mul_(0.9).add_(p.grad), alpha=-group["lr"])
        return loss


def make_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)


def train(model, optimizer, numbers):
    for number in numbers:
        optimizer.zero_grad()
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
        model(inputs.to(model[0].weight.dtype)).float().square().mean().backward()
        optimizer.step()


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        assert a.dtype is b.dtype
        assert torch.isfinite(a).all()
        assert torch.equal(a, b)


def container_of(value):
    """Return the classes of all containers in ``value``."""
    return [form(map_leaves(lambda path, leaf: None, value))]


@every_container
def test_state_is_cast_with_its_parameter_when_it_is_wrapped_and_back(make):
    model = make_model(torch.bfloat16)
    bare = Holds(model.parameters(), make)
    train(model, bare, range(2))
    params = list(model.parameters())
    before = {param: copy.deepcopy(tensors_in(bare.state[param]["held"])) for param in params}
    kinds = [container_of(bare.state[param]["held"]) for param in params]
    optimizer = FusedMainGradOptimizer(bare)
    assert len(params) == 4
    for param in params:
        momentum, count = tensors_in(optimizer.state[param]["held"])
        assert before[param][0].dtype is torch.bfloat16
        assert_same([momentum, count], [before[param][0].float(), before[param][1]])
    train(model, optimizer, range(2, 4))
    kept = [tensors_in(optimizer.state[param]["held"])[0].bfloat16() for param in params]
    optimizer.unwrap()
    assert_same([tensors_in(bare.state[param]["held"])[0] for param in params], kept)
    assert [container_of(bare.state[param]["held"]) for param in params] == kinds


@every_container
def test_all_tensors_of_state_are_counted(make):
    model = make_model()
    bare = Holds(model.parameters(), make)
    train(model, bare, range(1))
    assert InnerOptimizers([bare]).state_nbytes() == sum(4 * param.numel() + 8 for param in model.parameters())


@every_container
def test_state_that_is_to_come_is_zero_and_in_the_same_containers(make):
    class Ones(Holds):
        def other(self, p):
            return torch.ones(2)

    param = nn.Parameter(torch.ones(3))
    bare = Ones([param], make)
    state = state_to_come(bare, bare.param_groups[0], param, "weight")
    assert_same(tensors_in(state), [torch.zeros(3), torch.zeros(2)])
    assert container_of(state["held"]) == container_of(make(0, 0))


SHAPE, SPAN = (4, 6), Span(5, 17)
PART = Cut(SHAPE, (6, 1), SPAN)


@every_container
def test_a_rank_takes_its_elements_and_labels_them_and_takes_them_back(make):
    whole, count = torch.arange(24.0).view(SHAPE), torch.tensor(3)
    taken = take({"held": make(whole, count)}, PART)
    assert_same(tensors_in(taken), [torch.arange(5.0, 17.0), count])
    assert container_of(taken["held"]) == container_of(make(0, 0))
    labels = [path[-1] for path, leaf in leaves(label(taken, PART)) if getattr(leaf, "shape", ()) == (12,)]
    assert labels == ["5:17"]
    back = take(label(taken, PART), PART)
    assert_same(tensors_in(back), tensors_in(taken))
    assert container_of(back) == container_of(taken)
    with pytest.raises(ValueError, match="elements 5:17, and this rank has elements 0:5"):
        take(label(taken, PART), Cut(SHAPE, (6, 1), Span(0, 5)))


@every_container
def test_a_rank_of_a_dtensor_takes_its_block_of_a_whole(make):
    whole = torch.arange(24.0).view(SHAPE)
    cut = Cut((2, 6), (6, 1), Span(0, 12), (SHAPE, (2, 0)))
    assert_same(tensors_in(take(make(whole, torch.tensor(1)), cut)), [whole[2:], torch.tensor(1)])


@every_container
def test_torchs_checkpoints_get_parts_as_parts_wherever_they_are(make):
    param = nn.Parameter(torch.zeros(SHAPE))
    wrapped = wrap({"held": make(torch.zeros(12), torch.tensor(1))}, param, PART)
    piece, count = tensors_in(wrapped)
    assert isinstance(piece, CheckpointPart)
    assert piece.shape == SHAPE
    assert count == 1
    assert container_of(wrapped["held"]) == container_of(make(0, 0))


@pytest.mark.filterwarnings("ignore:.*weights_only=False:UserWarning")
@every_container
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_resumes_bit_exact_in_the_same_containers_with_its_own_dtypes(make, dtype):
    model, other = make_model(dtype), make_model(dtype)
    optimizer, resumed = (FusedMainGradOptimizer(Holds(each.parameters(), make)) for each in (model, other))
    train(model, optimizer, range(3))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    kept = copy.deepcopy(saved[1])
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        ours, theirs = optimizer.state[one]["held"], resumed.state[two]["held"]
        assert_same(tensors_in(ours), tensors_in(theirs))
        assert [value.dtype for value in tensors_in(theirs)] == [torch.float32, torch.int32]
        assert container_of(ours) == container_of(theirs)
    for each, opt in ((model, optimizer), (other, resumed)):
        train(each, opt, range(3, 5))
    assert_same(list(model.parameters()), list(other.parameters()))
    for number, state in saved[1]["state"].items():  # which is not shared
        assert_same(tensors_in(state), tensors_in(kept["state"][number]))


@every_container
def test_a_bare_low_precision_optimizers_floats_are_loaded_in_float32_and_its_counts_and_words_as_they_are(make):
    param = nn.Parameter(torch.zeros(3, dtype=torch.float32))
    optimizer = Holds([param], make)
    state = {"held": make(torch.ones(3, dtype=torch.bfloat16), [torch.tensor([7], dtype=torch.int64), "word"])}
    state_dict = {"state": {0: state}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    load_in_place(optimizer, state_dict, is_ours=False)
    loaded = optimizer.state[param]
    assert_same(tensors_in(loaded), [torch.ones(3), torch.tensor([7])])
    assert "word" in [leaf for _, leaf in leaves(loaded)]
    assert container_of(loaded) == container_of(state)


@pytest.mark.parametrize("is_named", [True, False])
def test_what_a_class_adds_where_it_takes_state_up_stays(is_named):
    class Adds(Holds):
        def __setstate__(self, state):
            super().__setstate__(state)
            for values in self.state.values():
                values.setdefault("new", torch.ones(()))
                if not is_named:
                    values["held"]["count"] = 5

    make = CONTAINERS["named tuple" if is_named else "OrderedDict"]
    param = nn.Parameter(torch.zeros(3))
    optimizer = Adds([param], make)
    saved = {"held": make(torch.ones(3), torch.tensor([7])), "word": "a"}
    load_in_place(optimizer, {"state": {0: saved}, "param_groups": [{"lr": 0.1, "params": [0]}]}, is_ours=True)
    loaded = optimizer.state[param]
    assert loaded["new"] == 1
    assert loaded["word"] == "a"
    assert_same(tensors_in(loaded["held"]), [torch.ones(3), torch.tensor([7])])
    if is_named:
        assert type(loaded["held"]) is Pair
    else:
        assert loaded["held"]["count"] == 5


@every_container
def test_a_kept_step_sees_what_changed_in_state_and_in_settings_and_puts_it_back(make):
    param = nn.Parameter(torch.ones(3))
    optimizer = Holds([param], make)
    optimizer.state[param]["held"] = make(torch.ones(3), torch.tensor(1))
    optimizer.param_groups[0]["plan"] = make(torch.ones(2), 0.5)
    kinds = [container_of(optimizer.state[param]), container_of(optimizer.param_groups[0]["plan"])]
    for where, key, number in ((optimizer.state[param], "held", 3), (optimizer.param_groups[0], "plan", 2)):
        kept = Snapshot(optimizer, [param])
        assert kept.is_untouched()
        tensors_in(where[key])[0].fill_(5.0)
        assert not kept.is_untouched()
        kept.restore()
        now = optimizer.state[param] if key == "held" else optimizer.param_groups[0]
        assert_same(tensors_in(now[key])[:1], [torch.ones(number)])
    assert [container_of(optimizer.state[param]), container_of(optimizer.param_groups[0]["plan"])] == kinds


@pytest.mark.parametrize("name", ["defaultdict", "Counter", "OrderedDict", "deque", "list"])
def test_a_kept_step_puts_back_what_was_added_to_a_container(name):
    param = nn.Parameter(torch.ones(3))
    optimizer = Holds([param], CONTAINERS[name])
    optimizer.state[param]["held"] = held = CONTAINERS[name](1, 2)
    before = copy.deepcopy(held)
    kept = Snapshot(optimizer, [param])
    if isinstance(held, dict):
        held["three"] = 3
    else:
        held.append(3)
    assert not kept.is_untouched()
    kept.restore()
    assert optimizer.state[param]["held"] == before


def test_a_set_or_a_shape_in_state_that_a_step_left_alone_counts_as_untouched():
    param = nn.Parameter(torch.ones(3))
    optimizer = Holds([param], CONTAINERS["list"])
    optimizer.state[param].update(seen={1, 2}, shape=torch.Size([3]))
    kept = Snapshot(optimizer, [param])
    optimizer.state[param]["shape"] = torch.Size([3])
    assert kept.is_untouched()
    optimizer.state[param]["seen"].add(3)
    assert not kept.is_untouched()


class Norms(Holds):
    """Element-wise in what it does, and keeps the norm of the whole gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    tensors_in(self.state[p]["held"])[1].copy_(p.grad.norm())

    def other(self, p):
        return torch.zeros(())


@every_container
def test_state_that_is_no_row_of_its_pieces_is_seen_by_the_probe_wherever_it_is(make):
    for cls, is_elementwise in ((Holds, True), (Norms, False)):
        inner = InnerOptimizers([cls([nn.Parameter(torch.ones(6, 4))], make)])
        found = find_out(inner.optimizers[0], inner.group(0))
        assert found.doubt is None
        assert found.is_elementwise is is_elementwise


def one_rank(answers=lambda value: [value]):
    return types.SimpleNamespace(rank=0, shard_rank=0, objects=answers, together=lambda topic: contextlib.nullcontext())


@every_container
def test_the_whole_is_put_together_in_the_same_containers(make):
    state = {0: {"held": make(torch.arange(24.0).view(SHAPE), torch.tensor(3))}}
    whole = consolidate(one_rank(), state, lambda index: Cut.whole(SHAPE, (6, 1)), 0)
    assert_same(tensors_in(whole), tensors_in(state))
    assert container_of(whole) == container_of(state)


@every_container
def test_state_that_differs_between_ranks_in_a_late_digit_is_noticed_wherever_it_is(make):
    said = []
    for change in (0.0, 2.0**-20):
        values = torch.ones(2000)
        values[1000] += change
        check_alike(one_rank(lambda value: said.append(value) or [value]), {0: {"norm": make(values, 1)}})
    assert said[0] != said[1]
    with pytest.raises(RuntimeError, match=r"norm.*differs between ranks"):
        check_alike(one_rank(lambda value: [value, said[0]]), {0: {"norm": make(values, 1)}})


@pytest.mark.parametrize("name", [*MAPPINGS, "list", "tuple", "deque", "named tuple"])
def test_an_optimizer_that_another_one_holds_is_found_wherever_it_is(name):
    params = list(make_model().parameters())
    held = [torch.optim.SGD([params[0]], lr=0.1), torch.optim.SGD([params[1]], lr=0.1)]
    outer = torch.optim.SGD(params, lr=0.1)
    outer.held = CONTAINERS[name](*held)
    assert {id(found) for found in hidden_optimizers(outer).values()} == {id(opt) for opt in held}
