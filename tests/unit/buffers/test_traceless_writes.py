"""Claims about weights that are changed from outside by writes that torch does not count: through `.data`, or NumPy."""

import copy

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from fusedopt.buffers import flat
from tests.compare import bits
from tests.outside_cases import LOW, ThroughData, Wrapped, loss_of
from tests.reference import Reference

DTYPES = {**LOW, "fp32": torch.float32}


def write_without_a_trace(param, edit):
    version, address = param._version, param.data_ptr()
    edit(param)
    assert (param._version, param.data_ptr()) == (version, address)


TRACELESS = {
    "copy_": lambda p: p.data.copy_(p.data * 0.5 + 1),
    "clamp_": lambda p: p.data.clamp_(-0.05, 0.05),
    "mul_ by a mask": lambda p: p.data.mul_(torch.arange(p.numel()).view_as(p) % 2),
    "add_": lambda p: p.data.add_(0.25),
    "swap": lambda p: p.data.copy_(p.data.flip(0) + 2),
    "numpy": lambda p: p.detach().view(torch.int16).numpy().__setitem__(..., 0),
}


@pytest.mark.parametrize("edit", TRACELESS.values(), ids=TRACELESS)
def test_a_write_through_data_is_taken_over_as_an_edit_that_torch_counts(wrapped, edit):
    counted = Wrapped(wrapped.weight.dtype)
    for ours, theirs in zip(wrapped.net.parameters(), counted.net.parameters(), strict=True):
        write_without_a_trace(ours, edit)
        with torch.no_grad():
            theirs.copy_(ours)
    for number in range(3, 6):
        wrapped.train(number)
        counted.train(number)
    for ours, theirs in zip(wrapped.main_params, counted.main_params, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(bits(ours), bits(theirs))


def test_a_write_through_data_keeps_the_main_params_of_elements_that_it_left_alone(wrapped):
    before = bits(wrapped.main)
    write_without_a_trace(wrapped.weight, lambda p: p.data[:, 1:].fill_(0.5))
    wrapped.step_without_gradients()
    assert torch.equal(wrapped.main[:, 1:], torch.full((6, 4), 0.5))
    assert torch.equal(bits(wrapped.main)[:, 0], before[:, 0])


def test_clamped_weights_stay_clamped(wrapped):
    """A critic whose weights are clamped after every step, as the Wasserstein GAN's."""
    twin = copy.deepcopy(wrapped.net)
    reference = Reference(twin, lambda groups: torch.optim.SGD(groups[0], lr=0.01))
    for main, of_twin in zip(wrapped.main_params, reference.mains.values(), strict=True):
        of_twin.data.copy_(main)
    for number in range(3, 9):
        wrapped.train(number)
        reference.backward(loss_of(twin, number))
        reference.step()
        for param, of_twin in zip(wrapped.net.parameters(), twin.parameters(), strict=True):
            param.data.clamp_(-0.1, 0.1)
            clamped = of_twin.detach().clamp(-0.1, 0.1)
            main = reference.mains[of_twin]
            main.data.copy_(torch.where(clamped == of_twin, main, clamped.float()))
            of_twin.data.copy_(clamped)
        for param, of_twin in zip(wrapped.net.parameters(), twin.parameters(), strict=True):
            assert torch.isfinite(param).all()
            assert torch.equal(param, of_twin)
    wrapped.step_without_gradients()
    for main, of_twin in zip(wrapped.main_params, reference.mains.values(), strict=True):
        assert torch.equal(main, of_twin)


def test_every_parameter_of_a_large_model_is_looked_at():
    for index in (0, 13, 39):
        net = nn.ModuleList(nn.Linear(9, 9) for _ in range(20)).bfloat16()
        params = list(net.parameters())
        optimizer = FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.01))
        write_without_a_trace(params[index], lambda p: p.data.fill_(0.5))
        optimizer.step()
        (main,) = (e.main_param for e in optimizer._buffers.entries if e.param is params[index])
        assert torch.equal(main, torch.full_like(main, 0.5))


SHAPES = {
    "0-d": lambda: torch.randn(()),
    "one": lambda: torch.randn(1),
    "empty": lambda: torch.randn(0, 3),
    "matrix": lambda: torch.randn(300, 7),
    "transposed": lambda: torch.randn(30, 40).t(),
    "channels last": lambda: torch.randn(4, 6, 3, 3).to(memory_format=torch.channels_last),
    "a slice": lambda: torch.randn(30, 40)[:, 3:20],
    "every other": lambda: torch.randn(90)[::2],
}


@pytest.mark.parametrize("make", SHAPES.values(), ids=SHAPES)
def test_parameters_of_every_shape_are_looked_at_and_raise_no_false_alarm(make):
    param, other = nn.Parameter(make().bfloat16()), nn.Parameter(torch.randn(5).bfloat16())
    inner = torch.optim.SGD([param, other], lr=0.01)
    optimizer = FusedMainGradOptimizer(inner)
    main = inner.param_groups[0]["params"][0]
    for _ in range(3):
        (param.float() * 1.001).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not optimizer._buffers._shows_unseen_edit()
    param.data.add_(1)
    assert optimizer._buffers._shows_unseen_edit() == (param.numel() > 0)
    optimizer.step()
    assert torch.equal(main, param.float())


def test_a_write_that_misses_every_element_looked_at_waits_for_sync_main_params():
    param = nn.Parameter(torch.randn(1000, 1000).bfloat16())
    inner = torch.optim.SGD([param], lr=0.01)
    optimizer = FusedMainGradOptimizer(inner)
    (main,) = inner.param_groups[0]["params"]
    optimizer.step()
    flat = param.data.view(-1)
    for number in range(0, 1_000_000, 1000):
        before = flat[number].item()
        flat[number] = before + 1
        if optimizer._buffers._shows_unseen_edit():
            flat[number] = before
            continue
        optimizer.step()
        assert main.view(-1)[number].item() == before
        optimizer.sync_main_params()
        assert main.view(-1)[number].item() == flat[number].item()
        return
    pytest.fail("no element of a column was missed")


def test_sync_main_params_takes_over_what_was_written_through_data_at_once(wrapped):
    before = [bits(main) for main in wrapped.main_params]
    wrapped.weight.data[1].fill_(0.5)
    wrapped.optimizer.sync_main_params()
    assert torch.equal(wrapped.main[1], torch.full((5,), 0.5))
    kept = [0, 2, 3, 4, 5]
    assert torch.equal(bits(wrapped.main)[kept], before[0][kept])
    for main, unchanged in zip(wrapped.main_params[1:], before[1:], strict=True):
        assert torch.equal(bits(main), unchanged)


class FailsHalfway(torch.optim.SGD):
    """Steps all but the last parameter, without a trace, and runs out of memory."""

    fails = False

    def step(self, closure=None):
        for param in self.param_groups[0]["params"][: -1 if self.fails else None]:
            if param.grad is not None:
                param.data.add_(param.grad, alpha=-0.1)
        if self.fails:
            raise MemoryError


def test_a_step_that_failed_halfway_is_not_taken_for_an_edit(wrapped):
    failing = Wrapped(wrapped.weight.dtype, FailsHalfway)
    failing.inner.fails = True
    failing.loss(7).backward()
    with pytest.raises(MemoryError):
        failing.optimizer.step()
    ahead = [bits(main) for main in failing.main_params]
    assert (failing.main.to(failing.weight.dtype) != failing.weight).any()
    failing.inner.fails = False
    failing.optimizer.zero_grad()
    failing.step_without_gradients()
    assert [bits(main).tolist() for main in failing.main_params] == [bits_.tolist() for bits_ in ahead]


def test_main_params_that_were_written_on_purpose_win(wrapped):
    with torch.no_grad():
        wrapped.main.add_(1)
    value = bits(wrapped.main)
    wrapped.step_without_gradients()
    assert torch.equal(bits(wrapped.main), value)
    assert torch.equal(wrapped.weight, wrapped.main.to(wrapped.weight.dtype))


class Rebinds(torch.optim.SGD):
    """Gives parameters new memory at every step."""

    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.data = param.data.add(param.grad, alpha=-0.1)


def test_an_inner_optimizer_that_rebinds_its_parameters_is_no_edit_from_outside():
    wrapped = Wrapped(torch.bfloat16, Rebinds)
    twin = Wrapped(torch.bfloat16, ThroughData)
    for number in range(3, 6):
        wrapped.train(number)
        twin.train(number)
        assert not wrapped.optimizer._buffers._shows_unseen_edit()
    for ours, theirs in zip(wrapped.main_params, twin.main_params, strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def answers_late(monkeypatch):
    """A device whose answers come in the background, and are there by the next step."""
    monkeypatch.setattr(flat, "answers_late", lambda device: True)
    monkeypatch.setattr(flat, "_host_cell", lambda: torch.zeros((), dtype=torch.int64))


def test_on_a_device_a_write_through_data_raises_by_name_in_the_next_step(answers_late):
    net = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3)).bfloat16()
    inner = torch.optim.SGD(net.named_parameters(), lr=0.01)
    optimizer = FusedMainGradOptimizer(inner)
    for number in range(6):
        if number == 2:
            net[1].weight.data.mul_(2)
        net(torch.ones(1, 5).bfloat16()).float().sum().backward()
        if number == 3:
            before = [bits(p) for p in net.parameters()]
            with pytest.raises(RuntimeError, match=r"parameter 1\.weight was written through \.data.*sync_main_params"):
                optimizer.step()
            for param, kept in zip(net.parameters(), before, strict=True):
                assert torch.equal(bits(param), kept)
        if number == 4:
            net[1].weight.data.mul_(2)
            optimizer.sync_main_params()
        optimizer.step()
        optimizer.zero_grad()


def test_on_a_device_nothing_that_is_seen_raises(answers_late, wrapped):
    for number in range(3, 12):
        if number % 3 == 0:
            with torch.no_grad():
                wrapped.weight.mul_(0.5)
        if number % 3 == 1:
            wrapped.weight.data = wrapped.weight.data * 2
        if number == 8:
            wrapped.optimizer.load_state_dict(copy.deepcopy(wrapped.optimizer.state_dict()))
        with torch.no_grad():
            wrapped.main_params[1].add_(1)
        wrapped.train(number)
        assert torch.equal(wrapped.main.to(wrapped.weight.dtype), wrapped.weight)


def test_an_average_swapped_in_for_evaluation_and_out_again_leaves_the_run_as_it_was(wrapped):
    """EMA helpers write through ``p.data.copy_``: saved, averaged weights in, evaluated, saved weights back."""
    twin = Wrapped(wrapped.weight.dtype)
    for number in range(3, 7):
        wrapped.train(number)
        saved = [p.data.clone() for p in wrapped.net.parameters()]
        for param in wrapped.net.parameters():
            param.data.copy_(param.data * 0.9)
        loss = wrapped.loss(number)
        wrapped.optimizer.state_dict()
        for param, value in zip(wrapped.net.parameters(), saved, strict=True):
            param.data.copy_(value)
        twin.train(number)
        assert loss.item() != twin.loss(number).item()
    for ours, theirs in zip(wrapped.main_params, twin.main_params, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(bits(ours), bits(theirs))


def test_averaged_weights_that_stay_in_train_on_after_sync_main_params(wrapped):
    for param in wrapped.net.parameters():
        param.data.copy_(param.data * 0.5)
    wrapped.optimizer.sync_main_params()
    for main, param in zip(wrapped.main_params, wrapped.net.parameters(), strict=True):
        assert torch.equal(main, param.float())
    start = bits(wrapped.main)
    for number in range(3):
        wrapped.train(number)
    assert not torch.equal(bits(wrapped.main), start)
    assert torch.isfinite(wrapped.main).all()
    assert torch.equal(wrapped.main.to(wrapped.weight.dtype), wrapped.weight)
