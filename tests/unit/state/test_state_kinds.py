"""Claims about state of every kind: shapes and dtypes of its own, Python objects, an optimizer's own format."""

import pytest
import torch

from fusedopt import FusedMainGradOptimizer
from tests.compare import through_a_file
from tests.state_cases import (
    DTYPES,
    Net,
    Run,
    assert_is_finite_and_trained,
    assert_loading_its_own_state_changes_no_bit,
    everything,
    start,
    train,
)


class Zoo(torch.optim.Optimizer):
    """SGD whose state holds one of everything that ``torch.load(weights_only=True)`` reads."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group["lr"], self.state[param])
        return loss

    def _update(self, param, lr, state):
        if not state:
            rows, columns = (*param.shape, 1, 1)[:2]
            state.update(
                count=torch.tensor(0),
                scalar=torch.tensor(0.0),
                row=torch.zeros(rows, 1),
                column=torch.zeros(1, columns),
                double=torch.zeros(param.shape, dtype=torch.float64),
                low=torch.zeros(param.shape, dtype=torch.bfloat16),
                codes=torch.zeros(param.shape, dtype=torch.uint8),
                mask=torch.zeros(param.shape, dtype=torch.bool),
                empty=torch.zeros(0),
                phase="warm-up",
                raw=b"\x00\xff",
                pair=(torch.zeros(2), "text", 0.1),
                history=[torch.zeros(param.shape)],
                nested={"inner": {"sum": torch.zeros(param.shape), "name": "text"}, 3: [1, 2]},
                names={"one", "two"},
                size=torch.Size([2, 3]),
                kind=torch.float32,
                nothing=None,
                flag=True,
            )
        grad = param.grad.float()
        state["count"] += 1
        state["scalar"] += grad.sum() / 3
        state["row"] += grad.sum()
        state["column"] -= grad.sum()
        state["double"] += grad.double() / 3
        state["low"] += grad.to(torch.bfloat16)
        state["codes"] += 1
        state["mask"] = grad > 0
        state["pair"][0].add_(1 / 3)
        state["history"][-1].add_(grad)
        state["nested"]["inner"]["sum"] += grad
        state["phase"] = "steady" if state["count"] > 1 else "warm-up"
        change = state["double"].float() + state["low"].float() + state["nested"]["inner"]["sum"]
        param.add_(change * state["mask"] / state["count"], alpha=-lr)


def zoo(net):
    return [Zoo(net.parameters())]


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_states_of_every_kind_survive_in_value_type_and_place(dtypes):
    run = start(dtypes, zoo)
    train(run, range(3))
    assert_loading_its_own_state_changes_no_bit(run)
    saved = through_a_file([run.net.state_dict(), run.optimizer.state_dict()])
    resumed = start(dtypes, zoo, seed=7)
    resumed.net.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert everything(resumed) == everything(run)
    state = resumed.inners[0].state[resumed.main_params[0]]
    assert state["phase"] == "steady"
    assert state["nested"]["inner"]["name"] == state["pair"][1] == "text"
    assert {k: v.dtype for k, v in state.items() if k in ("count", "double", "low", "codes", "mask")} == {
        "count": torch.int64,
        "double": torch.float64,
        "low": torch.bfloat16,
        "codes": torch.uint8,
        "mask": torch.bool,
    }
    for each in (run, resumed):
        train(each, range(3, 6))
    assert_is_finite_and_trained(run)
    assert everything(resumed) == everything(run)


class Stubborn(torch.optim.SGD):
    """Keeps in its state what weights-only loading does not read."""

    def __init__(self, params, thing, lr=0.1):
        super().__init__(params, lr=lr)
        self.thing = thing

    def step(self, closure=None):
        loss = super().step(closure)
        for param in self.param_groups[0]["params"]:
            self.state[param]["keeper"] = {"deep": [self.thing]}
        return loss


class Thing:
    pass


@pytest.mark.parametrize(("thing", "named"), [(Thing(), "Thing"), (slice(3), "builtins.slice"), (range(3), "range")])
def test_state_that_is_neither_tensor_nor_builtin_is_saved_as_it_is_with_a_warning_that_names_it(thing, named):
    net = Net(DTYPES["bf16"])
    inner = Stubborn(net.named_parameters(), thing)
    run = Run(net, [inner], FusedMainGradOptimizer(inner))
    run.optimizer.state_dict()
    train(run, range(3))
    with pytest.warns(UserWarning, match=rf"parameter scale, 'keeper'.*{named}.*weights_only=False") as caught:
        state = run.optimizer.state_dict()
    assert len(caught) == 1
    assert state["state"][0]["keeper"]["deep"][0] is thing
    run.optimizer.state_dict()  # said once


@pytest.mark.parametrize("place", ["hyper-parameter", "own format", "key"])
def test_what_weights_only_loading_does_not_read_is_named_at_save_wherever_it_is(place):
    net = Net(DTYPES["bf16"])
    inner = (OwnFormat if place == "own format" else torch.optim.SGD)(net.parameters(), lr=0.1)
    run = Run(net, [inner], FusedMainGradOptimizer(inner))
    run.optimizer.state_dict()
    if place == "key":
        inner.state[Thing()]["count"] = 1
    else:
        inner.param_groups[0]["thing"] = Thing()
    with pytest.warns(UserWarning, match=r"Thing.*weights_only=False"):
        run.optimizer.state_dict()


class OwnFormat(torch.optim.SGD):
    """Writes and reads a format of its own, and counts how often it was asked."""

    calls = 0

    def state_dict(self):
        type(self).calls += 1
        return {"mine": super().state_dict(), "wrote": "OwnFormat"}

    def load_state_dict(self, state_dict):
        type(self).calls += 100
        if state_dict.get("wrote") != "OwnFormat":
            raise KeyError("not written by OwnFormat")
        super().load_state_dict(state_dict["mine"])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_an_inner_class_with_its_own_format_is_asked_to_write_and_read_it(dtypes):
    def make(net):
        matrices = [p for p in net.parameters() if p.ndim == 2]
        others = [p for p in net.parameters() if p.ndim != 2]
        return [torch.optim.AdamW(others, lr=0.01), OwnFormat(matrices, lr=0.05, momentum=0.9)]

    run = start(dtypes, make)
    train(run, range(3))
    OwnFormat.calls = 0
    state_dict = run.optimizer.state_dict()
    assert OwnFormat.calls == 1
    assert state_dict["fusedopt"]["inner"][1]["wrote"] == "OwnFormat"
    saved = through_a_file([run.net.state_dict(), state_dict])
    resumed = start(dtypes, make, seed=7)
    resumed.optimizer.load_state_dict(saved[1])
    assert OwnFormat.calls == 101
    resumed.net.load_state_dict(saved[0])
    assert resumed.inners[1].state[resumed.inners[1].param_groups[0]["params"][0]]["momentum_buffer"].count_nonzero()
    assert everything(resumed) == everything(run)
    for each in (run, resumed):
        train(each, range(3, 6))
    assert_is_finite_and_trained(run)
    assert everything(resumed) == everything(run)


class Global(torch.optim.SGD):
    """Keeps a count under a key that is no parameter."""

    def __init__(self, params, by=1, lr=0.05):
        super().__init__(params, lr=lr, momentum=0.9)
        self.by = by

    def step(self, closure=None):
        counter = self.state["global"].setdefault("count", torch.zeros(1, dtype=torch.int64))
        counter += self.by
        return super().step(closure)


@pytest.mark.parametrize("num_inner", [1, 2])
def test_state_under_other_keys_than_parameters_is_kept_by_its_optimizer(num_inner):
    def make(net):
        params = list(net.parameters())
        return [Global(params)] if num_inner == 1 else [Global(params[:2], by=1), Global(params[2:], by=10)]

    run = start(DTYPES["bf16"], make)
    train(run, range(3))
    counts = [int(inner.state["global"]["count"]) for inner in run.inners]
    assert counts == [3, 30][:num_inner]
    assert_loading_its_own_state_changes_no_bit(run)
    resumed = start(DTYPES["bf16"], make, seed=7)
    saved = through_a_file([run.net.state_dict(), run.optimizer.state_dict()])
    resumed.net.load_state_dict(saved[0])
    resumed.optimizer.load_state_dict(saved[1])
    assert everything(resumed) == everything(run)
    saved[1]["state"]["global"]["count"].fill_(77)
    for each in (run, resumed):
        train(each, range(3, 6))
    assert [int(inner.state["global"]["count"]) for inner in resumed.inners] == [2 * count for count in counts]
    assert everything(resumed) == everything(run)
