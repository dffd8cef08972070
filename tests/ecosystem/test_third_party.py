"""Claims about optimizers of other packages, wrapped: the same bits on fp32, fp32 state on bf16, exact resuming."""

import copy
import functools

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from lion_pytorch import Lion
from prodigyopt import Prodigy
from schedulefree import AdamWScheduleFree, SGDScheduleFree
from torch.optim.lr_scheduler import CosineAnnealingLR

from fusedopt import FusedMainGradOptimizer
from tests import models
from tests.compare import assert_is_finite_and_moved, frozen, through_a_file
from tests.models import Mlp, loss_of
from tests.reference import Reference

NUM_STEPS = 20

OPTIMIZERS = {
    "AdamWScheduleFree": functools.partial(AdamWScheduleFree, lr=0.01, warmup_steps=5, weight_decay=0.1),
    "AdamWScheduleFree loop": functools.partial(AdamWScheduleFree, lr=0.01, warmup_steps=5, foreach=False),
    "SGDScheduleFree": functools.partial(SGDScheduleFree, lr=0.5, warmup_steps=5),
    "Prodigy": functools.partial(Prodigy, lr=1.0, d0=0.004),
    "Prodigy coupled": functools.partial(
        Prodigy, lr=1.0, d0=0.004, weight_decay=0.01, decouple=False, safeguard_warmup=True
    ),
    "Lion": functools.partial(Lion, lr=0.003, weight_decay=0.1),
    "Lion decoupled": functools.partial(Lion, lr=0.003, weight_decay=0.1, decoupled_weight_decay=True),
}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {**LOW, "fp32": torch.float32}


def switch(optimizer, mode):
    """Do what schedule-free's README asks of the loop; other optimizers have no such method."""
    if hasattr(optimizer, mode):
        getattr(optimizer, mode)()


def train(net, optimizer, numbers, scheduler=None):
    net.train()
    switch(optimizer, "train")
    models.train(net, optimizer, numbers, scheduler)
    net.eval()
    switch(optimizer, "eval")


def groups_of(optimizer):
    return [{key: frozen(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_wrapped_on_fp32_equals_bare_bit_for_bit(make):
    nets = [Mlp(torch.float32) for _ in range(2)]
    bare, inner = (make(net.parameters()) for net in nets)
    optimizer = FusedMainGradOptimizer(inner)
    for start in range(0, NUM_STEPS, 5):  # evaluated after every fifth step
        train(nets[0], bare, range(start, start + 5))
        train(nets[1], optimizer, range(start, start + 5))
        for theirs, ours in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert loss_of(nets[1], 99).item() == loss_of(nets[0], 99).item()
    assert_is_finite_and_moved(nets[1], Mlp(nets[1].first.weight.dtype))
    assert frozen(list(inner.state.values())) == frozen(list(bare.state.values()))
    assert inner.state
    assert groups_of(optimizer) == groups_of(inner) == groups_of(bare)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_wrapped_on_low_precision_equals_the_bare_one_on_fp32_copies(dtype, make):
    net, twin = Mlp(dtype), Mlp(dtype)
    inner = make(net.parameters())
    optimizer = FusedMainGradOptimizer(inner)
    reference = Reference(twin, lambda groups: make(groups[0]))
    switch(optimizer, "train")
    switch(reference.optimizer, "train")
    for number in range(NUM_STEPS):
        loss_of(net, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.backward(loss_of(twin, number))
        reference.step()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.isfinite(ours).all()
            assert torch.equal(ours, theirs)
    assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
    assert frozen(list(inner.state.values())) == frozen(list(reference.optimizer.state.values()))
    floats = [t for s in inner.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    assert {t.dtype for t in floats} == {torch.float32}
    mains = [p for group in inner.param_groups for p in group["params"]]
    assert any((main != param).any() for main, param in zip(mains, net.parameters(), strict=True))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_resumed_run_is_bit_equal_to_the_uninterrupted_one(dtype, make):
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(make(net.parameters()))
    train(net, optimizer, range(6))
    saved = through_a_file([net.state_dict(), optimizer.state_dict()])
    train(net, optimizer, range(6, 12))
    assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
    for order in ([0, 1], [1, 0]):
        resumed_net = Mlp(dtype, seed=7)
        resumed = FusedMainGradOptimizer(make(resumed_net.parameters()))
        for which in order:
            (resumed_net, resumed)[which].load_state_dict(saved[which])
        train(resumed_net, resumed, range(6, 12))
        for ours, theirs in zip(resumed_net.parameters(), net.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert frozen(resumed.state_dict()) == frozen(optimizer.state_dict())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_between_steps_changes_no_bit(dtype, make):
    nets = [Mlp(dtype) for _ in range(2)]
    optimizers = [FusedMainGradOptimizer(make(net.parameters())) for net in nets]
    for number in range(6):
        train(nets[0], optimizers[0], [number])
        train(nets[1], optimizers[1], [number])
        optimizers[0].load_state_dict(optimizers[0].state_dict())
    assert_is_finite_and_moved(nets[0], Mlp(nets[0].first.weight.dtype))
    assert frozen(optimizers[0].state_dict()) == frozen(optimizers[1].state_dict())
    assert frozen(list(nets[0].parameters())) == frozen(list(nets[1].parameters()))


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_averaging_micro_batches_equals_their_mean_loss_in_the_reference(dtype, make):
    net, twin = Mlp(dtype), Mlp(dtype)
    optimizer = FusedMainGradOptimizer(make(net.parameters()), gradient_accumulation_steps=2)
    reference = Reference(twin, lambda groups: make(groups[0]))
    switch(optimizer, "train")
    switch(reference.optimizer, "train")
    for number in range(12):
        loss_of(net, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.backward(loss_of(twin, number))
        assert optimizer.window_ends is (number % 2 == 1)
        if optimizer.window_ends:
            reference.step(divide_by=2)
    assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- schedule-free: train() and eval()

SCHEDULE_FREE = {name: make for name, make in OPTIMIZERS.items() if "ScheduleFree" in name}


@pytest.mark.parametrize("make", SCHEDULE_FREE.values(), ids=SCHEDULE_FREE)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_schedule_free_shows_its_average_in_eval_and_the_same_bits_as_before_in_train(dtype, make):
    net = Mlp(dtype)
    inner = make(net.parameters())
    optimizer = FusedMainGradOptimizer(inner)
    train(net, optimizer, range(5))
    mains = [p for group in inner.param_groups for p in group["params"]]

    def shown():
        for main, param in zip(mains, net.parameters(), strict=True):
            assert torch.isfinite(main).all()
            assert torch.equal(main.to(dtype), param)
        return frozen(list(net.parameters()))

    averaged = shown()
    assert not optimizer.param_groups[0]["train_mode"]
    optimizer.train()
    assert optimizer.param_groups[0]["train_mode"]
    stepped = shown()
    assert averaged != stepped
    optimizer.train()
    assert shown() == stepped
    optimizer.eval()
    assert not optimizer.param_groups[0]["train_mode"]
    assert shown() != stepped


@pytest.mark.parametrize("make", SCHEDULE_FREE.values(), ids=SCHEDULE_FREE)
def test_schedule_free_refuses_to_step_in_eval_as_it_does_bare_and_nothing_moves(make):
    net = Mlp(torch.bfloat16)
    optimizer = FusedMainGradOptimizer(make(net.parameters()))
    train(net, optimizer, range(3))
    before = frozen([list(net.parameters()), optimizer.state_dict()])
    loss_of(net, 3).backward()
    with pytest.raises(Exception, match="not in train mode"):
        optimizer.step()
    optimizer.zero_grad()
    assert frozen([list(net.parameters()), optimizer.state_dict()]) == before
    train(net, optimizer, range(3))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_schedule_free_checkpoints_taken_in_train_mode_resume_in_train_mode(dtype):
    make = SCHEDULE_FREE["AdamWScheduleFree"]
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(make(net.parameters()))
    train(net, optimizer, range(3))
    optimizer.train()
    saved = through_a_file([net.state_dict(), optimizer.state_dict()])
    resumed_net = Mlp(dtype, seed=7)
    resumed = FusedMainGradOptimizer(make(resumed_net.parameters()))
    resumed_net.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["train_mode"]
    train(net, optimizer, range(3, 6))
    train(resumed_net, resumed, range(3, 6))
    assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
    assert frozen([list(resumed_net.parameters()), resumed.state_dict()]) == frozen(
        [list(net.parameters()), optimizer.state_dict()]
    )


# -- hyper-parameters that the inner optimizer writes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_prodigy_writes_appears_in_the_outer_group_after_every_step(dtype):
    net = Mlp(dtype)
    inner = Prodigy(net.parameters(), lr=1.0, d_coef=10.0)
    optimizer = FusedMainGradOptimizer(inner)
    seen = []
    for number in range(NUM_STEPS):
        train(net, optimizer, [number])
        group = optimizer.param_groups[0]
        assert groups_of(optimizer) == groups_of(inner)
        assert group["k"] == number + 1
        assert group["d_denom"] > 0
        seen.append(group["d"])
    assert seen[-1] > 10 * seen[0] > 0
    saved = through_a_file(optimizer.state_dict())
    assert saved["param_groups"][0]["d"] == seen[-1]


def test_what_is_set_on_the_outer_group_reaches_prodigy_beside_what_it_writes():
    net = Mlp(torch.bfloat16)
    inner = Prodigy(net.parameters(), lr=1.0)
    optimizer = FusedMainGradOptimizer(inner)
    for number in range(6):
        optimizer.param_groups[0]["weight_decay"] = 0.1 * number
        train(net, optimizer, [number])
        assert inner.param_groups[0]["weight_decay"] == 0.1 * number
        assert optimizer.param_groups[0]["k"] == number + 1


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_scheduler_drives_prodigys_learning_rate_while_prodigy_drives_d(dtype):
    def scheduled(seed=0):
        net = Mlp(dtype, seed)
        inner = Prodigy(net.parameters(), lr=1.0, d0=0.001, d_coef=10.0)
        optimizer = FusedMainGradOptimizer(inner)
        return net, inner, optimizer, CosineAnnealingLR(optimizer, T_max=NUM_STEPS)

    net, inner, optimizer, scheduler = scheduled()
    seen = []
    for number in range(6):
        train(net, optimizer, [number], scheduler)
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["d"]))
        assert scheduler.get_last_lr() == [seen[-1][0]]
    assert len({lr for lr, _ in seen}) == 6
    assert seen[-1][1] > seen[0][1]
    saved = through_a_file([net.state_dict(), optimizer.state_dict(), scheduler.state_dict()])
    train(net, optimizer, range(6, 12), scheduler)
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]

    resumed_net, resumed_inner, resumed, resumed_scheduler = scheduled(seed=7)
    for thing, part in zip((resumed_net, resumed, resumed_scheduler), saved, strict=True):
        thing.load_state_dict(part)
    assert groups_of(resumed) == groups_of(resumed_inner)
    train(resumed_net, resumed, range(6, 12), resumed_scheduler)
    assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
    assert frozen([list(resumed_net.parameters()), resumed.state_dict()]) == frozen(
        [list(net.parameters()), optimizer.state_dict()]
    )


def test_a_scheduler_over_wrapped_prodigy_equals_one_over_bare_prodigy_on_fp32():
    runs = []
    for wrap in (lambda inner: inner, FusedMainGradOptimizer):
        net = Mlp(torch.float32)
        optimizer = wrap(Prodigy(net.parameters(), lr=1.0))
        train(net, optimizer, range(NUM_STEPS), CosineAnnealingLR(optimizer, T_max=NUM_STEPS))
        assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
        runs.append((frozen(list(net.parameters())), groups_of(optimizer)))
    assert runs[0] == runs[1]


# -- Lion writes through .data


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_lions_writes_through_data_reach_the_model_and_its_version(dtype):
    net = Mlp(dtype)
    optimizer = FusedMainGradOptimizer(OPTIMIZERS["Lion"](net.parameters()))
    for number in range(3):
        versions = [p._version for p in net.parameters()]
        before = [p.detach().clone() for p in net.parameters()]
        train(net, optimizer, [number])
        for param, version, value in zip(net.parameters(), versions, before, strict=True):
            assert param._version > version
            assert not torch.equal(param, value)


# -- accelerate's wrapper


@pytest.fixture
def accelerator():
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_inside_an_accelerated_optimizer_nothing_changes(dtype, make, accelerator):
    plain_net, net = Mlp(dtype), Mlp(dtype)
    plain = FusedMainGradOptimizer(make(plain_net.parameters()))
    prepared = accelerator.prepare(FusedMainGradOptimizer(make(net.parameters())))
    assert type(prepared).__name__ == "AcceleratedOptimizer"
    for number in range(6):
        train(plain_net, plain, [number])
        train(net, prepared, [number])
    assert_is_finite_and_moved(net, Mlp(net.first.weight.dtype))
    assert groups_of(prepared) == groups_of(plain)
    assert frozen(prepared.state_dict()) == frozen(plain.state_dict())
    assert frozen(list(net.parameters())) == frozen(list(plain_net.parameters()))
    saved = copy.deepcopy(prepared.state_dict())
    train(net, prepared, range(6, 9))
    assert frozen(prepared.state_dict()) != frozen(saved)
    prepared.load_state_dict(saved)
    assert frozen(prepared.state_dict()) == frozen(saved)
