"""A backend's one-pass step in the place of the inner optimizer's: when it may, and that nothing else changes.

The backend here is torch arithmetic under another name, so that every comparison is of bits. The real kernels are
tested in test_triton_step.py and test_adapters.py.
"""

import copy
import sys

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer, backends
from fusedopt.backends import offers
from fusedopt.backends.offers import Adam, Offer, Sgd, StepTensors
from fusedopt.step.fused_step import rule_of

NUM_STEPS = 4


class Double:
    """The steps of torch.optim.Adam, AdamW and SGD on `StepTensors`, in torch's own order; records its calls."""

    def __init__(self, takes_found_inf=True):
        self.calls = []
        self.TAKES_FOUND_INF = takes_found_inf

    def takes(self, rule):
        return isinstance(rule, (Adam, Sgd))

    def offer(self):
        return Offer("0", {"fused_step_": self.fused_step_}, {})

    def fused_step_(self, rule, operands, *, grad_scale=None, found_inf=None):
        self.check(operands)
        self.calls.append((rule, operands, grad_scale is not None, found_inf is not None))
        if found_inf is not None and bool(found_inf):
            return
        for index, (grad, main) in enumerate(zip(operands.grads, operands.mains, strict=True)):
            grad = grad if grad_scale is None else grad.div_(grad_scale)
            state = [tensors[index] for tensors in operands.states]
            adam(rule, grad, main, state, operands.steps[index]) if isinstance(rule, Adam) else sgd(
                rule, grad, main, state
            )
            if operands.models is not None:
                operands.models[index].data.copy_(main)  # as a kernel does: no version is bumped

    @staticmethod
    def check(operands):
        everything = [*operands.grads, *operands.mains, *(t for tensors in operands.states for t in tensors)]
        assert {t.dtype for t in everything} <= {torch.float32}
        assert all(t.ndim == 1 and t.is_contiguous() and not t.requires_grad for t in everything)
        lists = [
            operands.grads,
            operands.mains,
            *operands.states,
            *([] if operands.models is None else [operands.models]),
        ]
        for tensors in lists:
            assert [t.numel() for t in tensors] == [t.numel() for t in operands.mains]
        assert len(operands.steps) == len(operands.mains)
        if operands.models is not None:
            assert len({t.dtype for t in operands.models}) <= 1


def adam(rule, grad, main, state, step):
    exp_avg, exp_avg_sq = state
    if rule.is_decoupled:
        main.mul_(1 - rule.lr * rule.weight_decay)
    elif rule.weight_decay:
        grad = grad.add(main, alpha=rule.weight_decay)
    exp_avg.lerp_(grad, 1 - rule.beta1)
    exp_avg_sq.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
    correction1, correction2 = 1 - rule.beta1 ** float(step), 1 - rule.beta2 ** float(step)
    denom = (exp_avg_sq.sqrt() / correction2**0.5).add_(rule.eps)
    main.addcdiv_(exp_avg, denom, value=-(rule.lr / correction1))


def sgd(rule, grad, main, state):
    if rule.weight_decay:
        grad = grad.add(main, alpha=rule.weight_decay)
    if rule.momentum:
        state[0].mul_(rule.momentum).add_(grad, alpha=1 - rule.dampening)
        grad = grad.add(state[0], alpha=rule.momentum) if rule.is_nesterov else state[0]
    main.add_(grad, alpha=-rule.lr)


@pytest.fixture
def double(monkeypatch):
    return install(monkeypatch, Double())


def install(monkeypatch, double):
    for cache in (backends.offer, backends._decide, backends._why_not, backends._adapted):
        cache.cache_clear()
    monkeypatch.setitem(sys.modules, "fusedopt.backends.triton_ops", double)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        backends.resolve("triton", torch.device("cpu"), dtype)
    double.calls.clear()  # of the self-check
    return double


@pytest.fixture(autouse=True)
def undecided():
    yield
    for cache in (backends.offer, backends._decide, backends._why_not, backends._adapted):
        cache.cache_clear()


def make_model(dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Conv2d(2, 2, 3), nn.Linear(5, 3)).to(dtype)
    model[2].to(memory_format=torch.channels_last)
    return model


def train(model, make, steps=NUM_STEPS, **settings):
    """Step with random gradients; every second step one parameter has none."""
    optimizer = FusedMainGradOptimizer(make(model), **settings)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=generator)
            if not (index == 1 and step % 2):
                param.grad = grad.to(param.main_grad.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def everything(model, optimizer):
    state = optimizer.state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for index, entry in state["state"].items():
        tensors.update({f"{index}.{key}": value for key, value in entry.items() if isinstance(value, torch.Tensor)})
    return tensors


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].isfinite().all(), key
        assert torch.equal(one[key], other[key]), key


def two_groups(model, **of_second):
    return [{"params": list(model[0].parameters())}, {"params": list(model[1:].parameters()), **of_second}]


MAKERS = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False),
    "AdamW fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "Adam decay": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=0.1, foreach=False),
    "Adam decoupled": lambda m: torch.optim.Adam(
        m.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, foreach=False
    ),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, weight_decay=0.1, foreach=False),
    "SGD momentum": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, dampening=0.1, foreach=False),
    "SGD nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
    "two groups": lambda m: torch.optim.AdamW(two_groups(m, weight_decay=0.3), lr=1e-2, foreach=False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in MAKERS if name != "AdamW fused"])
def test_the_backends_step_ends_in_the_bits_of_the_inner_optimizers_own(double, name, dtype):
    model, twin = make_model(dtype), make_model(dtype)
    fused = train(model, MAKERS[name], backend="triton")
    assert double.calls, "the backend made no step"
    own = train(twin, MAKERS[name], backend="torch")
    assert_same(everything(model, fused), everything(twin, own))
    # every step but one that makes state, of all parameters, in as many calls as there are groups
    num_groups, makes_state = len(fused.param_groups), name != "SGD"
    assert len(double.calls) == (NUM_STEPS - makes_state) * num_groups
    assert (double.calls[0][1].models is None) == (dtype is torch.float32)


def test_a_mixed_model_is_stepped_in_one_call_per_dtype(double):
    def mixed():
        model = make_model()
        model[1].float()
        return model

    model, twin = mixed(), mixed()
    fused = train(model, MAKERS["AdamW"], backend="triton")
    own = train(twin, MAKERS["AdamW"], backend="torch")
    assert_same(everything(model, fused), everything(twin, own))
    assert {None if call[1].models is None else call[1].models[0].dtype for call in double.calls} == {
        None,
        torch.bfloat16,
    }


def test_the_first_step_of_every_parameter_makes_its_state_by_the_inner_optimizer(double):
    train(make_model(), MAKERS["AdamW"], steps=1, backend="triton")
    assert double.calls == []


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_skips_are_left_to_the_kernel_where_it_takes_found_inf(double, max_grad_norm):
    model = make_model()
    optimizer = train(model, MAKERS["AdamW fused"], backend="triton", max_grad_norm=max_grad_norm)
    assert all(
        has_found_inf and has_scale == (max_grad_norm is not None) for *_, has_scale, has_found_inf in double.calls
    )
    before = copy.deepcopy(everything(model, optimizer))
    num_calls = len(double.calls)
    for param in model.parameters():
        param.grad = torch.full_like(param, float("inf"), dtype=torch.float32)
    optimizer.step()
    assert len(double.calls) == num_calls + 1
    assert_same(everything(model, optimizer), before)
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert optimizer.skipped_steps == 1


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused"])
def test_after_a_step_that_clipped_grad_is_the_clipped_gradient(double, name):
    norms = []
    for backend in ("triton", "torch"):
        model = make_model()
        optimizer = train(model, MAKERS[name], backend=backend, max_grad_norm=0.5)
        for param in model.parameters():
            param.grad = torch.ones_like(param, dtype=torch.float32)
        optimizer.step()
        norms.append(torch.stack([param.grad.norm() for param in model.parameters()]).norm())
        assert float(norms[-1]) == pytest.approx(0.5, rel=1e-4)
    assert torch.equal(*norms)


def test_a_kernel_that_takes_no_found_inf_leaves_fused_optimizers_to_torch(monkeypatch):
    double = install(monkeypatch, Double(takes_found_inf=False))
    model, twin = make_model(), make_model()
    fused = train(model, MAKERS["AdamW fused"], backend="triton", max_grad_norm=0.5)
    assert double.calls == []
    own = train(twin, MAKERS["AdamW fused"], backend="torch", max_grad_norm=0.5)
    assert_same(everything(model, fused), everything(twin, own))
    train(make_model(), MAKERS["AdamW"], backend="triton")
    assert double.calls


class Slower(torch.optim.AdamW):
    """A subclass may do anything in its step."""


OWN_STEP = {
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True),
    "maximize": lambda m: torch.optim.AdamW(m.parameters(), maximize=True),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-3), foreach=False),
    "tensor betas": lambda m: torch.optim.AdamW(
        m.parameters(), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "subclass": lambda m: Slower(m.parameters()),
    "other": lambda m: torch.optim.RMSprop(m.parameters()),
    "one group of two": lambda m: torch.optim.AdamW(two_groups(m, maximize=True)),
}


@pytest.mark.parametrize("name", OWN_STEP)
def test_whatever_the_backend_does_not_know_is_the_inner_optimizers_own_step(double, name):
    model, twin = make_model(), make_model()
    fused = train(model, OWN_STEP[name], backend="triton")
    assert double.calls == []
    own = train(twin, OWN_STEP[name], backend="torch")
    assert_same(everything(model, fused), everything(twin, own))


def test_a_float64_model_is_stepped_by_the_inner_optimizer(double):
    with pytest.raises(AssertionError):
        double.check(StepTensors([torch.zeros(1, dtype=torch.float64)], [torch.zeros(1)], [], None, [torch.ones(())]))
    model = make_model(torch.float64)
    train(model, MAKERS["AdamW"], backend="triton")
    assert double.calls == []


def test_step_hooks_of_the_inner_optimizer_are_called(double):
    seen = []

    def make(model):
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        inner.register_step_post_hook(lambda *args: seen.append(1))
        return inner

    train(make_model(), make, backend="triton")
    assert len(seen) == NUM_STEPS
    assert double.calls == []


def test_state_in_another_dtype_or_form_is_left_to_its_owner(double):
    model = make_model()
    optimizer = train(model, MAKERS["AdamW"], steps=2, backend="triton")
    assert len(double.calls) == 1
    state = optimizer.state[model[0].weight]
    state["exp_avg"] = state["exp_avg"].double()
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=torch.float32)
    with pytest.raises(RuntimeError):  # torch's own step does not take it, either: and ours must not have begun
        optimizer.step()
    assert len(double.calls) == 1


def test_state_that_lies_otherwise_in_memory_than_its_parameter_is_left_to_its_owner(double):
    """A contiguous moment of a channels-last weight: flat memory would mix its elements up."""
    results = []
    for backend in ("triton", "torch"):
        model = make_model()
        optimizer = train(model, MAKERS["AdamW"], steps=2, backend=backend)
        state = optimizer.state[model[2].weight]
        assert state["exp_avg"].stride() == model[2].weight.stride() != state["exp_avg"].contiguous().stride()
        state["exp_avg"] = state["exp_avg"].contiguous()
        for param in model.parameters():
            param.grad = torch.ones_like(param, dtype=torch.float32)
        optimizer.step()
        results.append(everything(model, optimizer))
    assert len(double.calls) == 1
    assert_same(*results)


def test_hyper_parameters_and_checkpoints_are_those_of_the_inner_optimizer(double):
    model, twin = make_model(), make_model()
    fused = train(model, MAKERS["AdamW"], backend="triton")
    own = train(twin, MAKERS["AdamW"], backend="torch")
    saved = copy.deepcopy(own.state_dict())
    own.load_state_dict(fused.state_dict())
    fused.load_state_dict(saved)
    for optimizer, target in ((fused, model), (own, twin)):
        optimizer.param_groups[0]["lr"] = 0.5
        for param in target.parameters():
            param.grad = torch.ones_like(param, dtype=torch.float32)
        optimizer.step()
        optimizer.zero_grad()
        for param in target.parameters():
            param.grad = torch.ones_like(param, dtype=torch.float32)
        optimizer.step()
    assert double.calls[-1][0].lr == 0.5
    assert_same(everything(model, fused), everything(twin, own))


def test_a_step_between_forward_and_backward_is_seen_by_torch_as_always(double):
    model = nn.Linear(4, 4).bfloat16()
    optimizer = train(model, MAKERS["AdamW"], backend="triton")
    loss = model(torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)).sum()
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=torch.float32)
    num_calls = len(double.calls)
    optimizer.step()
    assert len(double.calls) == num_calls + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_kernel_that_raises_has_advanced_no_step_count(double, monkeypatch):
    model = make_model()
    optimizer = train(model, MAKERS["AdamW"], steps=2, backend="triton")
    before = copy.deepcopy(everything(model, optimizer))

    def fails(rule, operands, **kwargs):
        raise RuntimeError("no kernel image is available")

    fused = optimizer._buffers.entries[0].bucket.backend.fused_step_
    monkeypatch.setitem(vars(fused), "run", fails)
    for param in model.parameters():
        param.grad = torch.ones_like(param, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="no kernel image"):
        optimizer.step()
    assert_same(everything(model, optimizer), before)


def test_rules_carry_every_number_of_the_group():
    weight = nn.Parameter(torch.zeros(1))
    adam_w = torch.optim.AdamW([weight], lr=1.0, betas=(0.5, 0.25), eps=0.125, weight_decay=2.0)
    assert rule_of(adam_w, adam_w.param_groups[0]) == offers.Adam(1.0, 0.5, 0.25, 0.125, 2.0, is_decoupled=True)
    coupled = torch.optim.Adam([weight], lr=1.0, betas=(0.5, 0.25), eps=0.125, weight_decay=2.0)
    assert rule_of(coupled, coupled.param_groups[0]) == offers.Adam(1.0, 0.5, 0.25, 0.125, 2.0, is_decoupled=False)
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.5, dampening=0.25, weight_decay=2.0)
    assert rule_of(sgd, sgd.param_groups[0]) == offers.Sgd(1.0, 0.5, 0.25, 2.0, is_nesterov=False)
