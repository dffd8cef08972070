"""How an inner optimizer may be sharded is found out by running copies of it, which touch nothing."""

import contextlib
import copy
import random
import warnings

import numpy as np
import prodigyopt
import pytest
import schedulefree
import torch
from lion_pytorch import Lion
from lion_pytorch.cautious_lion import Lion as CautiousLion
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fusedopt
from fusedopt import probe
from fusedopt.inner import InnerOptimizers
from fusedopt.probe import ShardBy, try_out

MATRIX = (6, 4)


def make(cls, **settings):
    return cls([nn.Parameter(torch.randn(MATRIX))], **settings)


def shard_by(optimizer, wanted="auto"):
    return ShardBy(InnerOptimizers([optimizer]), wanted)(0)


def kind(optimizer):
    return try_out(optimizer, optimizer.param_groups[0]).kind


class Toy(torch.optim.Optimizer):
    """SGD with momentum; what a subclass does about it is in `update`."""

    def __init__(self, params, **settings):
        super().__init__(params, {"lr": 0.1, "steps_taken": 0, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps_taken"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                    momentum.mul_(0.9).add_(param.grad)
                    param.sub_(group["lr"] * self.update(group, param, momentum))

    def update(self, group, param, momentum):
        return momentum


# -- element-wise


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2), "foreach": False}),
        (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"lr": 1e-2, "fused": True}),
        (torch.optim.Adagrad, {"lr": 1e-2}),  # makes its state in its constructor
        (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.5, "fused": True}),
        (torch.optim.RMSprop, {"lr": 1e-2}),
        (torch.optim.NAdam, {"lr": 1e-2}),
        (torch.optim.Rprop, {"lr": 1e-2}),
        (torch.optim.ASGD, {"lr": 1e-2}),
        (Lion, {"lr": 1e-3}),
        (schedulefree.AdamWScheduleFree, {"lr": 1e-2}),
        (schedulefree.RAdamScheduleFree, {"lr": 1e-2, "foreach": False}),
        (Toy, {}),
    ],
)
def test_an_element_wise_optimizer_is_cut_anywhere(cls, settings):
    optimizer = make(cls, **settings)
    assert shard_by(optimizer) == "element"
    assert shard_by(optimizer, "parameter") == "parameter"


# -- what is not: none of these is seen by running the whole in one row


class Trusted(Toy):
    """The length of its steps goes by norms of the tensor, as LAMB's and Fromage's."""

    def update(self, group, param, momentum):
        return momentum * param.norm() / momentum.norm().clamp(min=1e-12)


class Clipped(Toy):
    """Clips each tensor's update, and only where that is long."""

    def update(self, group, param, momentum):
        return momentum * (200.0 / momentum.norm()).clamp(max=1.0)


class Masked(Toy):
    """Cautious: leaves signs out that do not fit, and makes up for it by their mean."""

    def update(self, group, param, momentum):
        mask = (momentum * param.grad > 0).float()
        return momentum * mask / mask.mean().clamp(min=1e-3)


class MaskedBySigns(Toy):
    def update(self, group, param, momentum):
        return momentum.abs().mean() * momentum.sign()


class Centred(Toy):
    """Takes out the mean of convolutions only."""

    def update(self, group, param, momentum):
        return momentum - momentum.mean() if momentum.dim() == 4 else momentum


class Decaying(Toy):
    """Decays matrices and leaves vectors alone, as many recipes do: a slice of a matrix is a vector."""

    def update(self, group, param, momentum):
        return momentum + 0.1 * param if param.dim() > 1 else momentum


class Factored(Toy):
    """Looks at rows and columns of large matrices only, as Adafactor."""

    def update(self, group, param, momentum):
        is_factored = momentum.dim() == 2 and min(momentum.shape) >= 128
        return momentum - momentum.mean(dim=0) if is_factored else momentum


class Periodic(Toy):
    """Normalises every ``update_gap``-th step."""

    def update(self, group, param, momentum):
        is_due = group["steps_taken"] % group["update_gap"] == 0
        return momentum / (momentum.norm() + 1e-6) if is_due else momentum


class WarmedUp(Toy):
    """Is plain as long as it warms up."""

    def update(self, group, param, momentum):
        return momentum if group["steps_taken"] <= group["warmup_steps"] else momentum / (momentum.norm() + 1e-6)


class Bookkeeping(Toy):
    """Writes down a norm that it may need later."""

    def update(self, group, param, momentum):
        self.state[param]["norm"] = momentum.norm()
        return momentum


class Picky(Toy):
    """Does not take vectors."""

    def update(self, group, param, momentum):
        if momentum.dim() < 2:
            raise ValueError("matrices only")
        return momentum


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.Muon, {"lr": 1e-2}),
        (torch.optim.Adafactor, {"lr": 1e-2}),
        (CautiousLion, {"lr": 1e-3, "cautious_factor": 0.5}),
        (Trusted, {}),
        (Trusted, {"lr": 0.0}),  # a warm-up begins so
        (Trusted, {"lr": torch.tensor(1e-9)}),
        (Clipped, {}),
        (Masked, {}),
        (MaskedBySigns, {}),
        (Centred, {}),
        (Decaying, {}),
        (Factored, {}),
        (Periodic, {"update_gap": 10}),
        (Periodic, {"update_gap": 500}),
        (WarmedUp, {"warmup_steps": 1000}),
        (Bookkeeping, {}),
        (Picky, {}),
    ],
)
def test_what_looks_at_a_whole_tensor_gets_whole_parameters(cls, settings):
    optimizer = make(cls, **settings)
    assert shard_by(optimizer) == shard_by(optimizer, "parameter") == "parameter"
    with pytest.raises(ValueError, match=rf'shard_by="element" cuts through.*{cls.__name__}.*shard_by="parameter"'):
        shard_by(optimizer, "element")


# -- coupled


class ClippedTogether(Toy):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step()


class Relay(Toy):
    """Hands something on from one parameter to those after it, within a step."""

    def step(self, closure=None):
        self.handed_on = 0.0
        super().step()

    def update(self, group, param, momentum):
        self.handed_on += momentum.norm().item()
        return momentum * min(1.0, self.handed_on / 1000.0)


class LateTogether(Toy):
    """Couples parameters after some warm-up only."""

    def update(self, group, param, momentum):
        if group["steps_taken"] <= group["num_warmup"]:
            return momentum
        return momentum / sum(other.grad.norm() for other in group["params"])


COUPLED = [
    (prodigyopt.Prodigy, {"lr": 1.0}),
    (ClippedTogether, {}),
    (Relay, {}),
    (LateTogether, {"num_warmup": 700}),
]


@pytest.mark.parametrize("wanted", ["auto", "element", "parameter"])
@pytest.mark.parametrize(("cls", "settings"), COUPLED)
def test_an_optimizer_that_couples_parameters_is_refused(cls, settings, wanted):
    with pytest.raises(ValueError, match=rf'{cls.__name__} cannot be sharded.*depends on the others.*shard="none"'):
        shard_by(make(cls, **settings), wanted)


class Counting(Toy):
    """Notes about its group what says nothing about its updates, as heavyball does."""

    def step(self, closure=None):
        group = self.param_groups[0]
        group["param_count"] = sum(param.numel() for param in group["params"])
        first = self.state[group["params"][0]]
        first["step"] = first.get("step", 0) + 1  # the group's, in the state of its first parameter
        super().step()


def test_what_is_written_about_a_group_couples_nothing():
    assert shard_by(make(Counting)) == "element"


# -- not known


class Broken(Toy):
    def step(self, closure=None):
        raise RuntimeError("not today")


class Lonely(Toy):
    """Takes one parameter, and raises where there are more."""

    def step(self, closure=None):
        (_,) = self.param_groups[0]["params"]
        super().step()


class Idle(Toy):
    """Waits for something."""

    def update(self, group, param, momentum):
        return torch.zeros_like(momentum)


class Exploding(Toy):
    def update(self, group, param, momentum):
        return momentum / 0.0


class WithModel(Toy):
    """Works on a model that it holds, as LOMO."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.model = nn.ParameterList(self.param_groups[0]["params"])

    def step(self, closure=None):
        for param in self.model:
            param.data.add_(1.0)


UNKNOWN = [
    (Broken, "raised RuntimeError.*not today"),
    (Lonely, "raised ValueError"),
    (Idle, "did not move"),
    (Exploding, "inf or nan"),
    (WithModel, "holds parameters beside its param_groups, or a model"),
]


@pytest.mark.parametrize(("cls", "reason"), UNKNOWN)
def test_what_cannot_be_tried_is_sharded_at_the_users_word_only(cls, reason):
    with pytest.raises(ValueError, match=rf'{cls.__name__} can be sharded is not known.*{reason}.*"parameter".*"none"'):
        shard_by(make(cls))
    with pytest.raises(ValueError, match=rf'shard_by="element".*{cls.__name__} could not be tried.*{reason}'):
        shard_by(make(cls), "element")
    with pytest.warns(UserWarning, match=rf'"parameter" is taken at its word: a copy of {cls.__name__}.*{reason}'):
        assert shard_by(make(cls), "parameter") == "parameter"


class Noisy(Toy):
    def update(self, group, param, momentum):
        return momentum + torch.randn_like(momentum)


class NoisyByHand(Toy):
    def update(self, group, param, momentum):
        return momentum * random.random()


class NoisyByNumpy(Toy):
    def update(self, group, param, momentum):
        return momentum * np.random.rand()


class OwnGenerators(Toy):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.generators = [torch.Generator(), random.Random(3)]

    def update(self, group, param, momentum):
        return momentum + torch.rand((), generator=self.generators[0]) + self.generators[1].random()


class NoisyByStep(Toy):
    """Throws its own coin once a step, seeded alike everywhere."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.coin = random.Random(3)

    def step(self, closure=None):
        self.factor = self.coin.random()
        super().step()

    def update(self, group, param, momentum):
        return momentum * self.factor


class NoisyAndCoupled(ClippedTogether):
    def update(self, group, param, momentum):
        return momentum + torch.randn_like(momentum)


@pytest.mark.parametrize("wanted", ["auto", "parameter"])
@pytest.mark.parametrize("cls", [Noisy, NoisyByStep])
def test_random_numbers_are_noticed_and_said(cls, wanted):
    with pytest.warns(UserWarning, match=rf"{cls.__name__} draws random numbers.*every rank draws its own"):
        assert shard_by(make(cls), wanted) == "parameter"
    with pytest.raises(ValueError, match=rf'shard_by="element".*{cls.__name__} draws random numbers'):
        shard_by(make(cls), "element")


@pytest.mark.parametrize("cls", [NoisyAndCoupled, NoisyByHand, NoisyByNumpy, OwnGenerators])
def test_where_random_numbers_may_hide_more_they_are_sharded_at_the_users_word_only(cls):
    """The operators of torch begin anew for each parameter of a trial; Python's and numpy's generators cannot."""
    with pytest.raises(ValueError, match=rf"{cls.__name__} can be sharded is not known.*draws random numbers"):
        shard_by(make(cls))
    with pytest.warns(UserWarning, match=rf"{cls.__name__} .*draws random numbers, and what it does to one"):
        assert shard_by(make(cls), "parameter") == "parameter"


class Choosy(Toy):
    """Draws until it likes what it gets."""

    def update(self, group, param, momentum):
        while torch.rand(()) < 0.9 or torch.rand(()) > 0.1:
            pass
        return momentum


def test_who_draws_without_end_is_stopped():
    with pytest.raises(ValueError, match=r"Choosy can be sharded is not known.*draws until it likes what it gets"):
        shard_by(make(Choosy))


# -- nothing is touched


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer, shows its groups, and makes state of its own in its constructor."""

    def __init__(self, params):
        self.optimizer = torch.optim.AdamW(params, lr=0.1)
        self.param_groups = self.optimizer.param_groups
        self.defaults = self.optimizer.defaults
        self.state = {p: {"slow": p.detach().clone()} for group in self.param_groups for p in group["params"]}
        self.calls = 0

    def __getstate__(self):
        return {"state": self.state, "optimizer": self.optimizer, "calls": self.calls}

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.calls += 1
        if self.calls % 5 == 0:
            for param in self.param_groups[0]["params"]:
                slow = self.state[param]["slow"]
                param.copy_(slow.lerp_(param, 0.5))


class OwnTensors(Toy):
    """Counts on its own, in tensors and lists."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.count, self.seen = torch.zeros(()), [[]]

    def update(self, group, param, momentum):
        self.count += 1
        self.seen[0].append(momentum.norm().item())
        return momentum


OUTSIDE = torch.zeros(4)


class OutsideWriter(Toy):
    """Writes into a tensor that no copy can know of."""

    def update(self, group, param, momentum):
        OUTSIDE.data.view(-1)[1:].add_(1.0)
        return momentum


class QuietOutsideWriter(Toy):
    def update(self, group, param, momentum):
        with contextlib.suppress(RuntimeError):
            torch.add(OUTSIDE, 1.0, out=OUTSIDE)
        return momentum


class Closing(Toy):
    """Its function knows its parameters."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        (param,) = self.param_groups[0]["params"]
        self.act = lambda: param.data.zero_()

    def update(self, group, param, momentum):
        self.act()
        return momentum


class Copying(Toy):
    """Copies tensors in its steps, which is nobody's business."""

    def update(self, group, param, momentum):
        return copy.deepcopy(momentum).mul_(0.5) + torch.tensor(0.0).add_(1.0) * 0.0


def everything(value):
    """Return all that can be compared of an object and what it holds."""
    if isinstance(value, torch.Tensor):
        return (id(value), value._version, value.detach().clone().reshape(-1).tolist(), everything(value.grad))
    if isinstance(value, dict):
        return [(everything(key), everything(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [everything(item) for item in value]
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    return everything(vars(value)) if isinstance(value, torch.optim.Optimizer) else (id(value), repr(value))


def drawn():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:3][0].tolist()]


RANDOM = [Noisy, NoisyByHand, NoisyByNumpy, NoisyByStep]
TOUCHED = [Lookahead, OwnGenerators, OwnTensors, OutsideWriter, QuietOutsideWriter, Closing, Copying, WithModel]


@pytest.mark.parametrize("cls", [*TOUCHED, *RANDOM, torch.optim.AdamW, torch.optim.Adagrad])
def test_probing_leaves_the_optimizer_what_it_holds_and_random_numbers_alone(cls):
    optimizer = make(cls)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    calls = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(args))
    optimizer.register_step_post_hook(lambda *args: calls.append(args)) if cls is not Lookahead else None
    before, random_numbers, outside = everything(optimizer), drawn(), OUTSIDE.tolist()
    try_out(optimizer, optimizer.param_groups[0])
    handle.remove()
    assert calls == []
    assert everything(optimizer) == before
    assert drawn() == random_numbers
    assert OUTSIDE.tolist() == outside


def test_what_a_copy_can_have_of_its_own_is_no_reason_to_refuse():
    assert [kind(make(cls)) for cls in (Lookahead, OwnTensors, Copying)] == ["element"] * 3
    for cls in (OutsideWriter, QuietOutsideWriter):
        with pytest.raises(ValueError, match=r"(writes|would write) into (a tensor|tensors)"):
            shard_by(make(cls))
    with pytest.raises(ValueError, match=r"holds a function.*that knows it or its parameters"):
        shard_by(make(Closing))


def test_a_large_tensor_beside_the_state_is_not_copied():
    optimizer = make(Toy)
    optimizer.teacher = [torch.zeros(2**21)]
    with pytest.raises(ValueError, match="holds tensors of more than 1048576 elements beside its state"):
        shard_by(optimizer)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Muon, Trusted, Lookahead])
def test_a_scheduler_on_the_inner_optimizer_does_not_make_the_probe_step_it(cls):
    """Schedulers replace `step` by a function that knows the optimizer, and begin a warm-up at a tiny lr."""
    optimizer = make(cls)
    expected = kind(optimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = torch.ones_like(param)
    assert optimizer.param_groups[0]["lr"] == 0.0
    before = everything(optimizer)
    assert kind(optimizer) == expected
    assert everything(optimizer) == before


def test_state_that_was_trained_already_does_not_matter():
    optimizer = make(torch.optim.AdamW)
    for _ in range(3):
        optimizer.param_groups[0]["params"][0].grad = torch.randn(MATRIX)
        optimizer.step()
    before = everything(optimizer)
    assert shard_by(optimizer) == "element"
    assert everything(optimizer) == before


# -- how often


def test_groups_with_equal_settings_are_tried_once_and_other_optimizers_apart(monkeypatch):
    tried = []

    def counted(optimizer, group):
        tried.append(type(optimizer).__name__)
        return try_out(optimizer, group)

    monkeypatch.setattr(probe, "try_out", counted)
    params = [nn.Parameter(torch.randn(MATRIX)) for _ in range(4)]
    groups = [{"params": params[:1]}, {"params": params[1:2]}, {"params": params[2:3], "weight_decay": 0.0}]
    decide = ShardBy(InnerOptimizers([torch.optim.AdamW(groups), torch.optim.Muon(params[3:])]), "auto")
    assert [decide(index) for index in (0, 1, 2, 3, 0)] == ["element", "element", "element", "parameter", "element"]
    assert tried == ["AdamW", "AdamW", "Muon"]
    assert decide.decided == ["element", "element", "parameter"]


def test_a_warning_comes_once_a_wrapping():
    decide = ShardBy(InnerOptimizers([make(Noisy)]), "auto")
    with pytest.warns(UserWarning, match="draws random"):
        decide.check(is_sharded=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(0) == "parameter"


def test_one_process_needs_no_shard_and_probes_nothing():
    param = nn.Parameter(torch.ones(MATRIX))
    optimizer = fusedopt.FusedMainGradOptimizer(Broken([param]), shard="optimizer")
    param.sum().backward()
    assert param.grad is param.main_grad
    with pytest.raises(RuntimeError, match="not today"):
        optimizer.step()
