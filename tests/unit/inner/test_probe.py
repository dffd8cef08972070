"""How an inner optimizer may be sharded is found out by running it: whole tensors, their pieces, two side by side."""

import copy
import random
import warnings

import numpy
import prodigyopt
import pytest
import schedulefree
import torch
from lion_pytorch import Lion
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fusedopt
from fusedopt.inner.optimizers import InnerOptimizers
from fusedopt.inner.shard_probe import find_out, shard_by

MATRIX = (6, 4)


def inner(cls, **settings):
    return InnerOptimizers([cls([nn.Parameter(torch.ones(MATRIX))], **settings)])


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 0.0}),
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "fused": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
        (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
        (torch.optim.RMSprop, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.RAdam, {"lr": 1e-2}),
        (torch.optim.Adamax, {"lr": 1e-2}),
        (torch.optim.Adadelta, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
        (Lion, {"lr": 1e-3}),
        (schedulefree.AdamWScheduleFree, {"lr": 1e-2}),
    ],
)
def test_an_element_wise_optimizer_is_cut_anywhere(cls, settings):
    optimizers = inner(cls, **settings)
    if hasattr(optimizers.optimizers[0], "train"):
        optimizers.optimizers[0].train()
    assert shard_by(optimizers, "auto", 0) == "element"
    assert shard_by(optimizers, "parameter", 0) == "parameter"


class OverTensors(torch.optim.Optimizer):
    """Does to each whole tensor what a subclass says."""

    def __init__(self, params, lr=0.01, **settings):
        super().__init__(params, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    param.sub_(group["lr"] * self.update(param, param.grad, state, group))


class TrustRatio(OverTensors):
    """As Lamb: the update's size follows from two norms."""

    def update(self, param, grad, state, group):
        return grad * (param.norm() / (grad.norm() + 1e-6))


class ClippedByTensor(OverTensors):
    """As StableAdamW and Adafactor: a root mean square above 1 is divided by."""

    def update(self, param, grad, state, group):
        return grad / grad.square().mean().sqrt().clamp(min=1.0)


class MaskedByMean(OverTensors):
    """As cautious optimizers: a mask that is divided by its mean."""

    def update(self, param, grad, state, group):
        last = state.get("last", grad).clone()
        state["last"] = grad.clone()
        mask = (last * grad > 0).float()
        return grad.sign() * mask / mask.mean().clamp(min=1e-3)


class NormEveryTenth(OverTensors):
    """As optimizers with an interval: only every tenth step looks at the whole tensor."""

    def update(self, param, grad, state, group):
        return grad / grad.norm() if state["step"] % group["interval"] == 0 else grad.sign()


class FactoredIfLarge(OverTensors):
    """As Adafactor's library forms: from 128 rows on it works on rows and columns."""

    def update(self, param, grad, state, group):
        if param.ndim == 2 and min(param.shape) >= 128:
            return grad / grad.square().mean(dim=1, keepdim=True).sqrt()
        return grad.sign()


class BlockwiseIfLarge(OverTensors):
    """As 8-bit optimizers: from 4096 elements on state is quantised in blocks of 256, counted from the start."""

    def update(self, param, grad, state, group):
        flat = grad.flatten()
        if flat.numel() < 4096:
            return grad
        blocks = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256)
        scale = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-9)
        return (torch.round(blocks / scale * 127) * scale / 127).flatten()[: flat.numel()].view_as(grad)


class LargestOnly(OverTensors):
    """Moves the element with the largest gradient alone."""

    def update(self, param, grad, state, group):
        return torch.where(grad.abs() == grad.abs().max(), grad, torch.zeros_like(grad))


class StateOfTheWhole(OverTensors):
    """Moves nothing by it yet, but keeps a norm that later steps may use."""

    def update(self, param, grad, state, group):
        state["largest_norm"] = torch.maximum(state.get("largest_norm", torch.zeros(())), grad.norm())
        return grad.sign()


WHOLE = [
    *(TrustRatio, ClippedByTensor, MaskedByMean, FactoredIfLarge, BlockwiseIfLarge, LargestOnly, StateOfTheWhole),
    *(torch.optim.Muon, torch.optim.Adafactor),
]


@pytest.mark.parametrize("lr", [0.01, 1e-6, 0.0])
@pytest.mark.parametrize("cls", WHOLE)
def test_an_optimizer_that_works_on_whole_tensors_gets_whole_parameters(cls, lr):
    optimizers = inner(cls, lr=lr)
    assert shard_by(optimizers, "auto", 0) == "parameter"
    assert shard_by(optimizers, "parameter", 0) == "parameter"
    with pytest.raises(ValueError, match=rf'shard_by="element" cuts through.*{cls.__name__}.*shard_by="parameter"'):
        shard_by(optimizers, "element", 0)


@pytest.mark.parametrize("interval", [10, 25, 50, 200, 10_000])
def test_steps_go_past_the_intervals_that_settings_name(interval):
    assert shard_by(inner(NormEveryTenth, interval=interval), "auto", 0) == "parameter"


class Coupled(OverTensors):
    """As a global norm clip: what a tensor gets depends on all."""

    def update(self, param, grad, state, group):
        return grad / sum(p.grad.norm() for p in group["params"])


class CoupledWhileBothRun(OverTensors):
    """Counts into its group, which moves nothing."""

    def update(self, param, grad, state, group):
        group["param_count"] = sum(p.numel() for p in group["params"])
        group["num_updates"] = group.get("num_updates", 0) + 1
        return grad.sign()


@pytest.mark.parametrize("wanted", ["auto", "parameter", "element"])
@pytest.mark.parametrize(("cls", "settings"), [(prodigyopt.Prodigy, {"lr": 1.0}), (Coupled, {})])
def test_an_optimizer_that_couples_parameters_is_refused(cls, settings, wanted):
    with pytest.raises(ValueError, match=rf'{cls.__name__} cannot be sharded.*depends on the others.*shard="none"'):
        shard_by(inner(cls, **settings), wanted, 0)


def test_what_is_written_into_the_group_alone_couples_nothing():
    assert shard_by(inner(CoupledWhileBothRun), "auto", 0) == "element"


# -- doubts


class Noisy(OverTensors):
    def update(self, param, grad, state, group):
        return grad + torch.randn(param.numel()).view_as(param)


class NoisyByPython(OverTensors):
    def update(self, param, grad, state, group):
        return grad * random.random()


class NoisyByNumpy(OverTensors):
    def update(self, param, grad, state, group):
        return grad * numpy.random.rand()


class Broken(OverTensors):
    def update(self, param, grad, state, group):
        raise RuntimeError("not today")


class BrokenForTwo(OverTensors):
    def update(self, param, grad, state, group):
        if len(group["params"]) > 1:
            raise RuntimeError("one is enough")
        return grad


class Exploding(OverTensors):
    def update(self, param, grad, state, group):
        return grad / 0.0


class HoldsAModel(OverTensors):
    """Steps a model of its own, live."""

    def __init__(self, params, model=None):
        super().__init__(params)
        self.model = model

    def update(self, param, grad, state, group):
        for weight in self.model.parameters():
            weight.data.add_(1.0)
        return grad


DOUBTFUL = {
    Noisy: "draws random numbers",
    NoisyByPython: "draws random numbers",
    NoisyByNumpy: "draws random numbers",
    Broken: "RuntimeError: not today",
    BrokenForTwo: "two parameters raised RuntimeError: one is enough",
    Exploding: "not finite",
}


@pytest.mark.parametrize("wanted", ["auto", "parameter"])
@pytest.mark.parametrize(("cls", "doubt"), DOUBTFUL.items())
def test_where_nothing_is_found_out_parameters_stay_whole_with_a_word(cls, doubt, wanted):
    with pytest.warns(UserWarning, match=rf'whether {cls.__name__} may be sharded.*{doubt}.*stay whole.*shard="none"'):
        assert shard_by(inner(cls), wanted, 0) == "parameter"
    with pytest.raises(ValueError, match="cuts through"):
        shard_by(inner(cls), "element", 0)


def test_an_optimizer_that_holds_a_model_is_not_run():
    model = nn.Linear(2, 2)
    before = copy.deepcopy(model.state_dict())
    optimizers = inner(HoldsAModel, model=model)
    with pytest.warns(UserWarning, match="it holds a Linear, whose weights a step could move"):
        assert shard_by(optimizers, "auto", 0) == "parameter"
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


# -- nothing live is touched


class Lookahead(torch.optim.Optimizer):
    """As the published ones: shares the groups of an optimizer that it holds, and keeps slow copies."""

    def __init__(self, optimizer, slow_in_state=True):
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.param_groups = optimizer.param_groups
        self.state = {}
        self.by_hand = [p for g in self.param_groups for p in g["params"]]
        self.slow = {p: p.detach().clone() for p in self.by_hand}
        self.bound = self.optimizer.step
        self.count = 0

    def step(self, closure=None):
        self.bound()
        self.count += 1
        with torch.no_grad():
            for param in self.by_hand:
                param.data.add_(0.5)
                self.slow[param].add_(1.0)


class HoldsParts(OverTensors):
    """Keeps tensors and its parameters wherever there is room."""

    def __init__(self, params):
        super().__init__(params)
        self.names = dict.fromkeys(self.param_groups[0]["params"], "p")
        self.nested = [{"tensor": torch.zeros(3), "params": tuple(self.param_groups[0]["params"])}]
        self.counter = type("Counter", (), {})()
        self.counter.tensor = torch.zeros(2)

    def update(self, param, grad, state, group):
        self.nested[0]["tensor"].add_(1)
        self.counter.tensor.add_(1)
        for known in (*self.nested[0]["params"], *self.names):
            known.data.add_(1.0)
        return grad


class ReachesByClosure(OverTensors):
    def __init__(self, params):
        super().__init__(params)
        held = self.param_groups[0]["params"]
        self.reach = lambda: held[0]

    def update(self, param, grad, state, group):
        self.reach().data.mul_(2.0)
        return grad


def scheduled(params):
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.kept = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def hashes(*tensors):
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Lookahead(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        lambda p: HoldsParts(p),
        lambda p: ReachesByClosure(p),
        lambda p: Lookahead(scheduled(p)),
        scheduled,
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: prodigyopt.Prodigy(p),
        lambda p: schedulefree.AdamWScheduleFree(p),
        lambda p: Lion(p),
    ],
)
def test_a_probe_touches_nothing_live(make):
    params = [nn.Parameter(torch.randn(MATRIX)), nn.Parameter(torch.randn(5))]
    optimizer = make(params)
    if isinstance(optimizer, Lookahead):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.optimizer.step()
    live = [*params, *getattr(optimizer, "slow", {}).values()]
    live += [optimizer.nested[0]["tensor"], optimizer.counter.tensor] if isinstance(optimizer, HoldsParts) else []
    inner_state = getattr(optimizer, "optimizer", optimizer).state
    live += [value for item in inner_state.values() for value in item.values() if isinstance(value, torch.Tensor)]
    before, versions, keys = hashes(*live), [tensor._version for tensor in live], {id(key) for key in inner_state}
    groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    calls = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(args))
    randomness = torch.random.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        find_out(optimizer, optimizer.param_groups[0])
    handle.remove()
    assert calls == []
    assert torch.equal(torch.random.get_rng_state(), randomness[0])
    assert random.getstate() == randomness[1]
    assert (numpy.random.get_state()[1] == randomness[2]).all()
    assert all(map(torch.equal, before, live))
    assert versions == [tensor._version for tensor in live]
    assert keys == {id(key) for key in inner_state}
    for group, known in zip(optimizer.param_groups, groups, strict=True):
        assert group.keys() == known.keys()
        assert all(a is b for a, b in zip(group["params"], known["params"], strict=True))
        assert all(group[key] is value for key, value in known.items() if key != "params")


def test_probing_leaves_the_optimizer_and_the_random_numbers_alone():
    param = nn.Parameter(torch.randn(MATRIX))
    optimizer = torch.optim.AdamW([param], lr=torch.tensor(0.5))
    state, value = torch.random.get_rng_state(), param.detach().clone()
    assert shard_by(InnerOptimizers([optimizer]), "auto", 0) == "element"
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(param.detach(), value)
    assert optimizer.state == {}
    assert optimizer.param_groups[0]["lr"].item() == 0.5


def test_one_process_needs_no_shard_and_probes_nothing():
    param = nn.Parameter(torch.ones(MATRIX))
    optimizer = fusedopt.FusedMainGradOptimizer(Broken([param]), shard="optimizer")
    param.sum().backward()
    assert param.grad is param.main_grad
    with pytest.raises(RuntimeError, match="not today"):
        optimizer.step()


@pytest.mark.parametrize("main_param", ["float32", "split"])
def test_trying_a_copy_seeds_no_generator_of_a_device_that_it_does_not_use(main_param, monkeypatch):
    seeded = []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, lambda seed, name=name: seeded.append(name))
    before = torch.get_rng_state()
    param = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.NAdam([param]), main_param=main_param)
    find_out(torch.optim.NAdam([nn.Parameter(torch.zeros(4))]), {**optimizer.param_groups[0], "params": []})
    assert seeded == []
    assert torch.equal(torch.get_rng_state(), before)
