"""Clips and flushes in the middle of a window: in every order what plain torch makes of the mean, or an error."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fusedopt
from tests.window_twin import WindowTwin

CLIPS = st.tuples(
    st.just("clip"),
    st.sampled_from([0.25, 2.0, 1e9, float("inf")]),
    st.sampled_from([1.0, 2.0, float("inf")]),
)
GRADS = st.none() | st.sampled_from([-3.0, 1.0, 6.0])
BACKWARDS = st.tuples(st.just("backward"), GRADS, GRADS).filter(lambda op: op[1:] != (None, None))
STEPS, OTHERS = st.just(("step",)), st.sampled_from([("flush",), ("zero_grad",)])
PROGRAMS = st.lists(BACKWARDS | BACKWARDS | STEPS | STEPS | CLIPS | OTHERS, max_size=25)


class Both:
    """The wrapper and the twin, side by side."""

    def __init__(self, k, **settings):
        self.params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
        inner = torch.optim.SGD([("a", self.params[0]), ("b", self.params[1])], lr=1.0)
        self.optimizer = fusedopt.FusedMainGradOptimizer(inner, gradient_accumulation_steps=k, **settings)
        self.twin = WindowTwin(k)
        self.num_raised = 0

    def backward(self, *values):
        grads = [None if v is None else torch.full_like(p, v) for p, v in zip(self.params, values, strict=True)]
        sum((p * g).sum() for p, g in zip(self.params, grads, strict=True) if g is not None).backward()
        self.twin.backward(grads)

    def play(self, op, *args):
        """Do ``op`` on both; return the norm that the wrapper measured, if it is a clip."""
        if op == "backward":
            self.backward(*args)
            return None
        do = {"clip": self.optimizer.clip_grad_norm_}.get(op) or getattr(self.optimizer, op)
        try:
            wanted = getattr(self.twin, op)(*args)
        except RuntimeError:
            with pytest.raises(RuntimeError, match=r"step\(\)"):
                do(*args)
            self.num_raised += 1
            return None
        got = do(*args)
        if op == "clip":
            assert got.item() == pytest.approx(wanted, rel=1e-5, abs=1e-12)
        for param, expected in zip(self.params, self.twin.params, strict=True):
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-6)
        assert self.optimizer.window_ends == (self.twin.num_pending == 0)
        return got


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([2, 3]), PROGRAMS)
def test_every_order_of_backward_step_clip_flush_and_clear_is_right_or_raises(k, program):
    both = Both(k)
    for op in program:
        both.play(*op)


def test_the_programs_reach_every_kind_of_end():
    both = Both(3)
    for op in [("backward", 1.0, None), ("step",), ("clip", 1.0), ("flush",)]:
        both.play(*op)
    assert both.params[0].norm().item() == pytest.approx(1.0, rel=1e-5)
    assert both.num_raised == 0


def test_a_norm_before_flush_is_of_the_micro_batches_that_are_pending():
    both = Both(3)
    for _ in range(2):
        both.play("backward", 6.0, None)
        both.play("step")
    assert both.play("clip", float("inf"), float("inf")).item() == 6.0
    both.play("flush")
    assert both.params[0][0].item() == -6.0


@pytest.mark.parametrize("num_pending", [1, 2])
def test_a_clip_before_flush_clips_the_short_window(num_pending):
    both = Both(3)
    for _ in range(num_pending):
        both.play("backward", 6.0, 6.0)
        both.play("step")
    norm = both.play("clip", 1.0)
    assert norm.item() == pytest.approx(6.0 * 5**0.5)
    both.play("flush")
    assert torch.cat([p.detach() for p in both.params]).norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_clip_that_waited_is_dropped_by_a_step_that_goes_on():
    both = Both(3)
    for value in (6.0, 6.0):
        both.play("backward", value, None)
        both.play("clip", 1.0)
        both.play("step")
    both.play("backward", 6.0, None)
    both.play("step")
    assert both.params[0][0].item() == -6.0  # nobody clipped the whole window


def test_a_clip_before_the_last_backward_waits_for_it():
    both = Both(2)
    both.play("backward", 6.0, None)
    both.play("step")
    both.play("clip", 1.0)
    both.play("backward", 18.0, None)
    assert both.params[0].grad[0].item() == 24.0  # sums: nothing was divided yet
    both.play("step")
    assert both.params[0].norm().item() == pytest.approx(1.0, rel=1e-5)


def test_a_backward_after_the_window_was_clipped_raises_and_the_next_window_is_right():
    both = Both(2)
    for op in [("backward", 6.0, None), ("step",), ("backward", 6.0, None), ("clip", 1.0), ("backward", 6.0, None)]:
        both.play(*op)
    both.play("step")
    assert both.num_raised == 1
    assert not both.params[0].any()
    both.play("zero_grad")
    assert both.params[0].grad is None
    for op in [("backward", 6.0, None), ("step",)] * 2:
        both.play(*op)
    assert both.params[0][0].item() == -6.0


def test_a_backward_after_a_clip_of_sums_adds_as_ever():
    param = nn.Parameter(torch.zeros(1))
    inner = torch.optim.SGD([param], lr=1.0)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, gradient_accumulation_steps=2, gradient_average=False)
    for number in range(2):
        (param * 6.0).sum().backward()
        if number == 0:
            optimizer.step()
    optimizer.clip_grad_norm_(4.0)
    (param * 6.0).sum().backward()
    optimizer.step()
    assert param.item() == pytest.approx(-10.0, rel=1e-6)


def test_flush_after_a_backward_that_no_step_counted_raises_and_can_be_mended():
    both = Both(3)
    for op in [("backward", 6.0, None), ("step",), ("backward", 12.0, None)]:
        both.play(*op)
    with pytest.raises(RuntimeError, match=r"flush\(\) was called with 1 micro-batch.*Call step\(\)"):
        both.optimizer.flush()
    assert not both.params[0].any()
    both.play("step")
    both.play("flush")
    assert both.params[0][0].item() == -9.0


# -- what is no limit


BAD_LIMITS = [-1, -1.0, 0, 0.0, -0.0, float("nan"), float("-inf"), torch.tensor(-1.0), torch.tensor(float("nan"))]
NO_NUMBERS = ["1.0", "inf", True, False, None, [1.0], 1j, torch.tensor([1.0, 2.0]), torch.tensor(True)]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("bad", [*BAD_LIMITS, *NO_NUMBERS], ids=repr)
def test_a_limit_that_is_none_is_refused_by_value_before_anything_changes(bad, k):
    both = Both(k)
    both.backward(6.0, -6.0)
    with pytest.raises((TypeError, ValueError), match=r"clip_grad_norm_: max_norm=") as caught:
        both.optimizer.clip_grad_norm_(bad)
    assert (caught.type is TypeError) == any(bad is value for value in NO_NUMBERS)
    assert both.params[0].grad.tolist() == [6.0] * 3
    assert both.params[0].grad is both.params[0].main_grad
    both.optimizer.step()
    assert both.params[0][0].item() == (-6.0 if k == 1 else 0.0)


@pytest.mark.parametrize("bad", [0, -2, float("nan"), True, "2", "fro", None])
def test_a_norm_type_that_is_none_is_refused_by_value_before_anything_changes(bad):
    both = Both(1)
    both.backward(6.0, -6.0)
    with pytest.raises((TypeError, ValueError), match=r"clip_grad_norm_: norm_type="):
        both.optimizer.clip_grad_norm_(1.0, bad)
    assert both.params[0].grad.tolist() == [6.0] * 3


@pytest.mark.parametrize("limit", [2, 2.0, torch.tensor(2.0), torch.tensor([2])], ids=repr)
@pytest.mark.parametrize("norm_type", ["inf", float("inf"), torch.inf])
def test_numbers_of_every_kind_are_limits(limit, norm_type):
    both = Both(1)
    both.backward(6.0, -6.0)
    assert both.optimizer.clip_grad_norm_(limit, norm_type).item() == 6.0
    assert both.params[0].grad[0].item() == pytest.approx(2.0)


def test_measuring_leaves_gradients_that_are_not_finite_as_they_are():
    both = Both(1)
    both.backward(float("inf"), 1.0)
    assert both.optimizer.clip_grad_norm_(float("inf")).item() == float("inf")
    assert both.params[1].grad.tolist() == [1.0, 1.0]
