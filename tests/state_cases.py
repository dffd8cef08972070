"""What the tests of state dicts share: a net of two dtypes, optimizers of many kinds, and all bits of a run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import frozen
from tests.models import loss_of, muon_and_adamw

DTYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp32": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
}
LOW = ["bf16", "fp16", "mixed"]


class Net(nn.Module):
    """Two layers, each in its own dtype; ``scale`` is 0-d, so that state of shape () occurs."""

    def __init__(self, dtypes, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 6, dtype=dtypes[0])
        self.second = nn.Linear(6, 3, dtype=dtypes[1])
        self.scale = nn.Parameter(torch.tensor(1.25, dtype=dtypes[0]))

    def forward(self, x):
        hidden = torch.tanh(self.first(x.to(self.first.weight.dtype)) * self.scale)
        return self.second(hidden.to(self.second.weight.dtype)).float()


def adamw(**settings):
    return lambda net: [torch.optim.AdamW(net.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **settings})]


OPTIMIZERS = {
    "AdamW loop": adamw(foreach=False),
    "AdamW foreach": adamw(foreach=True),
    "AdamW fused": adamw(fused=True),
    "AdamW amsgrad": adamw(amsgrad=True),
    "AdamW tensor lr": lambda net: adamw(lr=torch.tensor(0.01), foreach=False)(net),
    "SGD momentum": lambda net: [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)],
    "Adafactor": lambda net: [torch.optim.Adafactor(net.parameters(), lr=0.05)],
    "Muon + AdamW": muon_and_adamw,
    "LBFGS": lambda net: [torch.optim.LBFGS(net.parameters(), lr=0.2, max_iter=2, history_size=4)],
}


@dataclass
class Run:
    net: Net
    inners: list
    optimizer: FusedMainGradOptimizer

    @property
    def main_params(self):
        return [p for inner in self.inners for group in inner.param_groups for p in group["params"]]


def start(dtypes, make, seed=0, **settings):
    net = Net(dtypes, seed)
    inners = make(net)
    return Run(net, inners, FusedMainGradOptimizer(inners if len(inners) > 1 else inners[0], **settings))


def train(run, numbers):
    for number in numbers:

        def closure(number=number):
            run.optimizer.zero_grad()
            loss = loss_of(run.net, number)
            loss.backward()
            return loss

        run.optimizer.step(closure)
    run.optimizer.zero_grad()


def everything(run):
    """Return the bits of parameters, gradients, main_params, inner state and hyper-parameters."""
    number = {param: index for index, param in enumerate(run.main_params)}
    return {
        "params": {name: frozen(p) for name, p in run.net.named_parameters()},
        "grads": {name: frozen(p.grad) for name, p in run.net.named_parameters()},
        "main_params": frozen(run.main_params),
        "state": [{number.get(k, k): frozen(v) for k, v in inner.state.items()} for inner in run.inners],
        "groups": hyper_parameters(run.optimizer),
        "inner_groups": [hyper_parameters(inner) for inner in run.inners],
    }


def hyper_parameters(optimizer):
    return [{k: frozen(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    return [t for item in value for t in tensors_in(item)] if type(value) in (list, tuple, set) else []


def addresses(run):
    states = [dict(inner.state) for inner in run.inners]
    owned = [*run.net.parameters(), *run.main_params, *(p.main_grad for p in run.net.parameters())]
    return sorted(t.data_ptr() for t in owned + tensors_in(states))


def assert_is_finite_and_trained(run):
    for tensor in [*run.net.parameters(), *run.main_params, *tensors_in([dict(i.state) for i in run.inners])]:
        assert torch.isfinite(tensor).all()
    fresh = Net(tuple(p.dtype for p in (run.net.first.weight, run.net.second.weight)))
    for ours, theirs in zip(run.net.parameters(), fresh.parameters(), strict=True):
        assert not torch.equal(ours, theirs)


def assert_main_params_hold_more_than_the_model(run):
    """Without this, resuming from the model's weights alone would pass, too."""
    low = [m for m, p in zip(run.main_params, run.net.parameters(), strict=True) if p.dtype.itemsize == 2]
    assert low
    assert all((m != m.bfloat16()).any() or (m != m.half()).any() for m in low)


def before_the_first_step(run):
    assert not any(inner.state for inner in run.inners)


def assert_loading_its_own_state_changes_no_bit(run, moves=False):
    before, owned = everything(run), addresses(run)
    before.pop("inner_groups")  # these follow the wrapper's
    state_dict = run.optimizer.state_dict()
    assert before.items() <= everything(run).items()
    if moves:  # loading gives main_params what their edited weights say
        run.optimizer.load_state_dict(state_dict)
        before = everything(run)
        before.pop("inner_groups")
    run.optimizer.load_state_dict(state_dict)
    assert before.items() <= everything(run).items()
    assert addresses(run) == owned


def named_adamw(net, num_groups=1, **settings):
    named = list(net.named_parameters())
    parts = [named] if num_groups == 1 else [named[:2], named[2:]]
    return [torch.optim.AdamW([{"params": part} for part in parts], **{"lr": 0.01, **settings})]


def after_outside_edits(run):
    train(run, range(3))
    with torch.no_grad():
        run.net.first.weight[0].mul_(2.0)
        run.net.second.bias.copy_(torch.tensor([0.5, -0.0, 3.0]))
    run.net.first.bias.data = torch.ones_like(run.net.first.bias)
