"""Claims about accelerate's plain loop, one process: prepare, accumulate, clip, step, save and resume."""

import copy
import functools
import math

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from fusedopt import FusedMainGradOptimizer
from tests import accelerate_cases
from tests.accelerate_cases import NUM_EXAMPLES, K, forget_accelerators, halving, loss_of, make_loader
from tests.compare import assert_is_finite_and_moved
from tests.reference import Reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUM_WINDOWS = math.ceil(NUM_EXAMPLES / 4 / K)

Net = functools.partial(accelerate_cases.Net, has_frozen=False)


class Loop:
    """What a script holds after ``accelerator.prepare``."""

    def __init__(self, dtype, seed=0, inner=None, make_scheduler=halving, k=K, **settings):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
        self.bare_net = Net(dtype, seed)
        self.inner = (inner or (lambda params: torch.optim.AdamW(params, lr=0.02)))(self.bare_net.parameters())
        self.wrapper = FusedMainGradOptimizer(self.inner, **settings)
        self.net, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.bare_net, self.wrapper, make_loader(), make_scheduler(self.wrapper)
        )

    def epoch(self, max_norm=None):
        """Run one epoch; return each window's gradient norm, and the learning rate after every micro-batch.

        With ``max_norm`` accelerate clips and measures, else the wrapper may.
        """
        norms, rates = [], []
        for (tokens,) in self.loader:
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(loss_of(self.net, tokens))
                if self.accelerator.sync_gradients and max_norm is not None:
                    norms.append(self.accelerator.clip_grad_norm_(self.net.parameters(), max_norm))
                self.optimizer.step()
                if self.accelerator.sync_gradients and max_norm is None:
                    norms.append(getattr(self.wrapper, "grad_norm", None))
                self.scheduler.step()
                self.optimizer.zero_grad()
            rates.append(self.optimizer.param_groups[0]["lr"])
        return norms, rates

    def bits(self):
        state_dict = self.optimizer.state_dict()
        tensors = [t for s in state_dict["state"].values() for t in s.values()]
        return [(str(t.dtype), t.detach().float().tolist()) for t in [*self.bare_net.parameters(), *tensors]]


def windows():
    batches = [tokens for (tokens,) in make_loader()]
    return [batches[i : i + K] for i in range(0, len(batches), K)]


def test_prepare_recognises_the_wrapper_and_moves_nothing():
    net = Net(torch.bfloat16)
    wrapper = FusedMainGradOptimizer(torch.optim.AdamW(net.parameters(), lr=0.02))
    main_params = [state["main_param"] for state in wrapper.state_dict()["state"].values()]
    before = [(m.data_ptr(), m.tolist()) for m in main_params]
    prepared = Accelerator(cpu=True).prepare(wrapper)
    assert isinstance(prepared, AcceleratedOptimizer)
    assert prepared.optimizer is wrapper
    assert [(m.data_ptr(), m.tolist()) for m in main_params] == before
    assert [s["main_param"].data_ptr() for s in prepared.state_dict()["state"].values()] == [b[0] for b in before]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_loop_equals_the_reference_bit_for_bit(dtype):
    loop = Loop(dtype)
    twin = Net(dtype)
    reference = Reference(twin, lambda groups: torch.optim.AdamW(groups[0], lr=0.02))
    scheduler = halving(reference.optimizer)
    num_windows = 0
    for _ in range(2):
        _, rates = loop.epoch()
        for window in windows():
            for tokens in window:
                reference.backward(loss_of(twin, tokens) / K)  # as accelerate does, by K also in a short window
            reference.step()
            scheduler.step()
            num_windows += 1
        assert len(set(rates)) == NUM_WINDOWS + 1 == 4
    assert num_windows == loop.inner.state[loop.inner.param_groups[0]["params"][0]]["step"] == 6
    assert loop.inner.param_groups[0]["params"][0].dtype is torch.float32
    assert_is_finite_and_moved(loop.bare_net, Net(loop.bare_net.head.weight.dtype))
    for ours, theirs in zip(loop.bare_net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=lambda make: make.__name__)
def test_on_fp32_the_loop_equals_the_same_loop_over_the_bare_optimizer(make):
    loop = Loop(torch.float32, inner=lambda params: make(params, lr=0.05))
    rates = [loop.epoch()[1] for _ in range(2)]
    forget_accelerators()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=K)
    bare_net = Net(torch.float32)
    bare = make(bare_net.parameters(), lr=0.05)
    stock = Loop.__new__(Loop)
    stock.wrapper = None
    stock.accelerator, stock.bare_net = accelerator, bare_net
    stock.net, stock.optimizer, stock.loader, stock.scheduler = accelerator.prepare(
        bare_net, bare, make_loader(), halving(bare)
    )
    assert [stock.epoch()[1] for _ in range(2)] == rates
    assert_is_finite_and_moved(bare_net, Net(bare_net.head.weight.dtype))
    for ours, theirs in zip(loop.bare_net.parameters(), bare_net.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_clipping_sees_whole_fp32_gradients_and_the_norm_is_not_zero(dtype):
    max_norm = 0.01
    loop = Loop(dtype)
    twin = Net(dtype)
    reference = Reference(twin, lambda groups: torch.optim.AdamW(groups[0], lr=0.02), max_grad_norm=max_norm)
    scheduler = halving(reference.optimizer)
    for _ in range(2):
        norms, _ = loop.epoch(max_norm)
        assert len(norms) == NUM_WINDOWS
        for window, norm in zip(windows(), norms, strict=True):
            for tokens in window:
                reference.backward(loss_of(twin, tokens) / K)
            expected = nn.utils.get_total_norm(reference.sums.values())
            assert norm.dtype is torch.float32
            assert norm > max_norm  # it did clip
            assert torch.equal(norm, expected)  # torch's own clip on the same gradients
            reference.step()
            scheduler.step()
    assert_is_finite_and_moved(loop.bare_net, Net(loop.bare_net.head.weight.dtype))
    for ours, theirs in zip(loop.bare_net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_add_up_over_the_window_and_are_cleared_after_it():
    loop = Loop(torch.bfloat16)
    seen = []
    for (tokens,) in loop.loader:
        with loop.accelerator.accumulate(loop.net):
            loop.accelerator.backward(loss_of(loop.net, tokens))
            assert all(p.grad is p.main_grad for p in loop.bare_net.parameters())
            before = [p.detach().clone() for p in loop.bare_net.parameters()]
            loop.optimizer.step()
            seen.append(any(not torch.equal(p, b) for p, b in zip(loop.bare_net.parameters(), before, strict=True)))
            loop.optimizer.zero_grad()
            assert all((p.grad is None) is loop.accelerator.sync_gradients for p in loop.bare_net.parameters())
    assert seen == [False, False, False, True] * 2 + [False, False, True]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_learning_rate_moves_once_a_window(dtype):
    _, rates = Loop(dtype).epoch()
    assert rates == [0.02] * 3 + [0.01] * 4 + [0.005] * 3 + [0.0025]


def test_the_wrappers_own_clipping_works_as_well():
    loop = Loop(torch.bfloat16, max_grad_norm=0.01)
    twin = Net(torch.bfloat16)
    reference = Reference(twin, lambda groups: torch.optim.AdamW(groups[0], lr=0.02))
    scheduler = halving(reference.optimizer)
    norms, _ = loop.epoch()
    assert len(norms) == NUM_WINDOWS
    for window, norm in zip(windows(), norms, strict=True):
        for tokens in window:
            reference.backward(loss_of(twin, tokens) / K)
        exact = torch.linalg.vector_norm(torch.cat([s.flatten() for s in reference.sums.values()]).double())
        assert abs(norm - exact) <= 1024 * 2**-24 / 2 * exact  # the bound that torch_ops.norm states
        assert norm > 0.01
        coefficient = 0.01 / (norm + 1e-6)
        reference.sums = {param: total * coefficient for param, total in reference.sums.items()}
        reference.step()
        scheduler.step()
    assert_is_finite_and_moved(loop.bare_net, Net(loop.bare_net.head.weight.dtype))
    for ours, theirs in zip(loop.bare_net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_scheduler_made_on_the_prepared_optimizer_drives_it():
    accelerator = Accelerator(cpu=True)
    net = Net(torch.bfloat16)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    net, optimizer = accelerator.prepare(net, FusedMainGradOptimizer(inner))
    scheduler = halving(optimizer)
    for exponent, (tokens,) in enumerate(list(make_loader())[:4]):
        assert optimizer.param_groups[0]["lr"] == 0.5**exponent
        accelerator.backward(loss_of(net, tokens))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert inner.param_groups[0]["lr"] == 0.5**3  # of the last step


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_save_state_and_load_state_resume_bit_equal_in_a_fresh_process_state(dtype, tmp_path):
    loop = Loop(dtype)
    loop.epoch()
    loop.accelerator.save_state(tmp_path)
    at_save = loop.bits()
    rate = loop.optimizer.param_groups[0]["lr"]
    loop.epoch()
    later = loop.bits()
    assert later != at_save
    assert_is_finite_and_moved(loop.bare_net, Net(loop.bare_net.head.weight.dtype))
    forget_accelerators()

    resumed = Loop(dtype, seed=7)
    assert resumed.bits() != at_save
    resumed.accelerator.load_state(tmp_path)
    assert resumed.bits() == at_save
    assert resumed.optimizer.param_groups[0]["lr"] == resumed.inner.param_groups[0]["lr"] == rate == 0.0025
    resumed.epoch()
    assert resumed.bits() == later


def test_load_state_into_the_running_loop_goes_back_in_time(tmp_path):
    loop = Loop(torch.bfloat16)
    loop.epoch()
    loop.accelerator.save_state(tmp_path)
    at_save = loop.bits()
    loop.epoch()
    later = loop.bits()
    loop.accelerator.load_state(tmp_path)
    assert loop.bits() == at_save
    loop.epoch()
    assert loop.bits() == later != at_save


def test_gradient_merge_by_fusedopt_needs_no_accumulate():
    """accelerate counts to 1, fusedopt to K: equal to accelerate counting, where every window is whole."""
    runs = []
    for k in (1, K):
        forget_accelerators()
        ours = {} if k == K else {"gradient_accumulation_steps": K}
        loop = Loop(torch.bfloat16, make_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1.0), k=k, **ours)
        for (tokens,) in list(loop.loader)[: 2 * K]:
            with loop.accelerator.accumulate(loop.net):
                loop.accelerator.backward(loss_of(loop.net, tokens))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        assert loop.wrapper.window_ends
        assert loop.inner.state[loop.inner.param_groups[0]["params"][0]]["step"] == 2
        runs.append([p.detach().clone() for p in loop.bare_net.parameters()])
    # Dividing the loss by 4 and dividing the sum by 4 are both exact.
    for ours, theirs in zip(*runs, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(ours, theirs)


def test_a_skipped_step_leaves_everything_as_it_was():
    loop = Loop(torch.bfloat16, k=1)
    loop.epoch()
    before = copy.deepcopy(loop.bits())
    loss = loss_of(loop.net, torch.arange(4)) * torch.inf
    loop.accelerator.backward(loss)
    with pytest.warns(RuntimeWarning, match="skipped"):
        loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert loop.wrapper.step_was_skipped
    assert loop.bits() == before
    loop.epoch()
    assert not loop.wrapper.step_was_skipped
