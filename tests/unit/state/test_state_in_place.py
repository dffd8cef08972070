"""Claims about loading a state dict in place: no tensor moves, and loading its own changes no bit."""

import copy

import pytest
import torch

from tests.compare import frozen
from tests.models import loss_of
from tests.state_cases import (
    DTYPES,
    LOW,
    OPTIMIZERS,
    adamw,
    addresses,
    after_outside_edits,
    assert_is_finite_and_trained,
    assert_loading_its_own_state_changes_no_bit,
    before_the_first_step,
    everything,
    start,
    tensors_in,
    train,
)


def between_steps(run):
    train(run, range(3))


def with_gradients(run):
    train(run, range(3))
    loss_of(run.net, 3).backward()


def after_an_edited_learning_rate(run):
    train(run, range(3))
    lr = run.optimizer.param_groups[0]["lr"]
    run.optimizer.param_groups[0]["lr"] = lr.fill_(0.125) if isinstance(lr, torch.Tensor) else 0.125


MOMENTS = [before_the_first_step, between_steps, with_gradients, after_outside_edits, after_an_edited_learning_rate]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_changes_no_bit_and_moves_no_tensor(dtypes, make, moment):
    run = start(dtypes, make)
    moment(run)
    assert_loading_its_own_state_changes_no_bit(run, moves=moment is after_outside_edits)


@pytest.mark.parametrize("make", [adamw(foreach=False), adamw(fused=True)], ids=["host decides", "device decides"])
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_after_a_skip_changes_no_bit(dtypes, make):
    run = start(dtypes, make)
    train(run, range(3))
    loss_of(run.net, 3).backward()
    run.net.first.weight.grad[0, 0] = torch.inf
    before = everything(run)
    with pytest.warns(RuntimeWarning, match="skipped"):
        num_skipped = run.optimizer.step() or run.optimizer.skipped_steps
    assert num_skipped == 1
    assert everything(run)["main_params"] == before["main_params"]
    assert_loading_its_own_state_changes_no_bit(run)
    assert run.optimizer.skipped_steps == 1


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_its_own_state_in_mid_window_changes_no_bit(dtypes):
    run = start(dtypes, OPTIMIZERS["AdamW loop"], gradient_accumulation_steps=4)
    twin = start(dtypes, OPTIMIZERS["AdamW loop"], gradient_accumulation_steps=4)
    for number in range(12):
        for each in (run, twin):
            loss_of(each.net, number).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
        assert run.optimizer.window_ends is (number % 4 == 3)
        assert_loading_its_own_state_changes_no_bit(run)
    assert_is_finite_and_trained(run)
    assert everything(run) == everything(twin)


@pytest.mark.parametrize("dtypes", [DTYPES[d] for d in LOW], ids=LOW)
def test_outside_edits_survive_loading_its_own_state(dtypes):
    runs = [start(dtypes, OPTIMIZERS["AdamW loop"]) for _ in range(2)]
    for run in runs:
        after_outside_edits(run)
    runs[0].optimizer.load_state_dict(runs[0].optimizer.state_dict())
    for run in runs:
        train(run, range(3, 6))
    assert_is_finite_and_trained(runs[0])
    assert everything(runs[0]) == everything(runs[1])


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_loaded_tensors_are_copied_not_kept(dtypes, make):
    source = start(dtypes, make)
    train(source, range(3))
    for num_steps_before in (0, 3):
        saved = copy.deepcopy(source.optimizer.state_dict())
        run = start(dtypes, make)
        train(run, range(num_steps_before))
        run.optimizer.load_state_dict(saved)
        loaded = everything(run)
        assert loaded["state"] == everything(source)["state"]
        assert tensors_in(saved["state"])
        for tensor in tensors_in(saved):
            tensor.fill_(77)
        assert everything(run) == loaded
        train(run, range(3, 6))
        assert all((tensor == 77).all() for tensor in tensors_in(saved))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_loading_into_a_running_optimizer_goes_back_in_time(dtypes):
    run = start(dtypes, OPTIMIZERS["AdamW amsgrad"])
    train(run, range(3))
    saved = copy.deepcopy([run.net.state_dict(), run.optimizer.state_dict()])
    at_save, owned = everything(run), addresses(run)
    train(run, range(3, 6))
    later = everything(run)
    assert later["state"] != at_save["state"]
    run.net.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    assert everything(run) == at_save
    assert addresses(run) == owned
    train(run, range(3, 6))
    assert_is_finite_and_trained(run)
    assert everything(run) == later


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_asking_for_a_state_dict_before_the_first_step_moves_nothing(make):
    asked, twin = start(DTYPES["mixed"], make), start(DTYPES["mixed"], make)
    before = everything(asked)
    state_dict = asked.optimizer.state_dict()
    assert everything(asked) == before
    assert all(set(state) <= {"main_param"} for state in state_dict["state"].values())
    for run in (asked, twin):
        train(run, range(3))
    assert_is_finite_and_trained(asked)
    assert everything(asked) == everything(twin)


def test_a_state_dict_of_an_fp32_model_before_the_first_step_holds_no_state():
    assert start(DTYPES["fp32"], OPTIMIZERS["AdamW loop"]).optimizer.state_dict()["state"] == {}


def test_a_pending_gradient_is_not_saved():
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"], gradient_accumulation_steps=3)
    train(run, range(3))
    empty = frozen(run.optimizer.state_dict())
    loss_of(run.net, 3).backward()
    run.optimizer.step()
    assert not run.optimizer.window_ends
    assert run.net.first.weight.grad.count_nonzero()
    assert frozen(run.optimizer.state_dict()) == empty
