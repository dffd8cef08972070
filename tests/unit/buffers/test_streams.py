"""Whoever reads main_grad waits for the stream that added to it last.

Streams are imitated, since there are none without a GPU: each records what it was told to wait for. tests/gpu provokes
the race itself, with a delay on the other stream.
"""

import pytest
import torch
from torch import nn

from fusedopt import FusedLinear, FusedMainGradOptimizer
from fusedopt.buffers import main_grad
from tests.doubles.te_linear import TELinear

AUTOGRADS = "the stream of AccumulateGrad"


class Stream:
    """Knows the streams that it waits for."""

    def __init__(self, name):
        self.name = name
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other.name)


@pytest.fixture
def streams(monkeypatch):
    """Return the streams by name and a way to make one current: in forward, and so in that part of backward."""

    class Streams(dict):
        def __missing__(self, name):
            self[name] = Stream(name)
            return self[name]

    found = Streams()
    found.current = AUTOGRADS

    def current_stream(tensor):
        node = torch._C._current_autograd_node()
        return found[AUTOGRADS if node is None or node.name().endswith("AccumulateGrad") else found.current]

    monkeypatch.setattr(main_grad, "current_stream", current_stream)
    return found


class OnStream(torch.autograd.Function):
    """Makes a stream current for the backward of what comes before, and autograd's for what comes after."""

    @staticmethod
    def forward(ctx, x, streams, name):
        ctx.streams, ctx.name = streams, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        ctx.streams.current = ctx.name
        return grad_output, None, None


def on(streams, name, layer, x):
    x = OnStream.apply(x, streams, AUTOGRADS)
    return OnStream.apply(layer(x), streams, name)


def wrapped(kind):
    torch.manual_seed(0)
    layer = kind(4, 4, bias=False).bfloat16()
    return layer, FusedMainGradOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))


@pytest.mark.parametrize("kind", [FusedLinear, TELinear])
def test_autograds_stream_waits_for_a_fused_layers_once_a_backward(streams, kind):
    layer, optimizer = wrapped(kind)
    for _ in range(2):
        x = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
        on(streams, "side", layer, x).sum().backward()
        assert layer.weight.main_grad.writer is None
    assert streams[AUTOGRADS].waited_for == ["side", "side"]
    assert streams["side"].waited_for == []
    optimizer.step()


def test_a_second_use_on_another_stream_waits_for_the_first(streams):
    layer, optimizer = wrapped(FusedLinear)
    x = torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)
    y = on(streams, "first", layer, x)
    on(streams, "second", layer, y).sum().backward()
    assert streams["first"].waited_for == ["second"]  # backward meets the second use first
    assert streams[AUTOGRADS].waited_for == ["first"]
    optimizer.step()


@pytest.mark.parametrize("kind", [FusedLinear, nn.Linear])
def test_on_one_stream_nothing_waits(streams, kind):
    layer, optimizer = wrapped(kind)
    for _ in range(2):
        layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        assert layer.weight.main_grad.writer is None
    optimizer.step()
    assert streams[AUTOGRADS].waited_for == []


def test_a_cpu_has_no_streams():
    layer, optimizer = wrapped(FusedLinear)
    assert main_grad.current_stream(layer.weight) is None
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.main_grad.writer is None
    optimizer.step()
