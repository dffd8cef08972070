"""Claims about memory that is given back: at once, by reference counts alone, with the cyclic collector off."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from benchmarks.memory import LiveTensors
from fusedopt import FusedMainGradOptimizer, convert_linears
from fusedopt.buffers import flat as buffers_module
from tests.models import Mlp, loss_of, train

NORM = 4  # bytes of `grad_norm`, which an unwrapped wrapper still tells
COMPILER_WARNINGS = ("ignore:.*is deprecated", "ignore:.*should not be instantiated", "ignore:The .grad attribute")
pytestmark = [pytest.mark.filterwarnings(warning) for warning in COMPILER_WARNINGS]  # raised inside torch's compiler

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@pytest.fixture(autouse=True, scope="module")
def _torch_has_imported_what_it_needs():
    train(net := Mlp(), FusedMainGradOptimizer(torch.optim.AdamW(net.parameters())), range(2))
    gc.collect()  # importing dynamo leaves the frames around it in a cycle, once


@pytest.fixture(autouse=True)
def _the_collector_is_off():
    gc.disable()
    yield
    gc.enable()


def memory_of(optimizer):
    """Return weak references to all that only the wrapper is to keep alive."""
    buckets, entries = optimizer._buffers.buckets, optimizer._buffers.entries
    tensors = {f"{name} of bucket {b.index}": getattr(b, name) for b in buckets for name in ("grad", "main", "model")}
    tensors |= {f"grad_part of bucket {b.index}": b.grad_part for b in buckets}
    tensors |= {f"main_grad of {e.slot.name}": e.slot.main_grad for e in entries}
    tensors |= {f"main_param of {e.slot.name}": e.main_param for e in entries if e.main_param is not e.param}
    return {name: weakref.ref(tensor) for name, tensor in tensors.items() if tensor is not None}


def state_of(optimizer):
    tensors = {
        f"{key} of parameter {number}": value
        for number, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return {name: weakref.ref(tensor) for name, tensor in tensors.items()}


def alive(refs):
    return [name for name, ref in refs.items() if ref() is not None]


def plain(net, **settings):
    optimizer = FusedMainGradOptimizer(torch.optim.AdamW(net.parameters()), bucket_mib=1, **settings)
    train(net, optimizer, range(2))
    return optimizer


def merging(net):
    optimizer = plain(net, gradient_accumulation_steps=3)
    train(net, optimizer, range(3))  # one step, and two micro-batches are pending
    assert optimizer._window.num_pending == 2
    return optimizer


def with_fused_layers(net):
    optimizer = plain(net)
    convert_linears(net)
    train(net, optimizer, range(2))
    return optimizer


def with_gradients(net):
    optimizer = plain(net)
    loss_of(net, 0).backward()
    return optimizer


def with_a_scheduler(net):
    optimizer = plain(net)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    train(net, optimizer, range(2))
    scheduler.step()
    return optimizer


def copied(net):
    optimizer = plain(net)
    train(*copy.deepcopy((net, optimizer)), range(2))
    return optimizer


def loaded(net):
    optimizer = plain(net)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(net, optimizer, range(2))
    return optimizer


def fails(error, use):
    with pytest.raises(error) as caught:
        use()
    del caught  # a frame that holds the exception that holds the frame


def after_a_failed_step(net):
    optimizer = plain(net, nonfinite="raise")
    loss_of(net, 0).backward()
    net.first.weight.grad.fill_(torch.nan)
    fails(FloatingPointError, optimizer.step)
    main_grad, net.first.weight.main_grad = net.first.weight.main_grad, torch.zeros(6, 5)  # rebound: refused by name
    for use in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
        fails(RuntimeError, use)
    net.first.weight.main_grad = main_grad
    optimizer.zero_grad()
    for bad in ({"state": {}, "param_groups": []}, {}):
        fails((ValueError, KeyError), lambda bad=bad: optimizer.load_state_dict(bad))
    fails(RuntimeError, lambda: optimizer.add_param_group({"params": [net.first.weight]}))
    return optimizer


def after_a_failed_backward(net):
    optimizer = plain(net)
    handle = net.first.weight.register_hook(lambda grad: 1 / 0)
    fails(ZeroDivisionError, lambda: loss_of(net, 0).backward())
    handle.remove()
    return optimizer


def after_a_refused_wrapping(net):
    optimizer = plain(net)
    fails(RuntimeError, lambda: FusedMainGradOptimizer(torch.optim.AdamW(net.parameters())))
    return optimizer


def with_user_hooks(net):
    optimizer = plain(net)
    for param in net.parameters():
        param.register_post_accumulate_grad_hook(lambda p: None)
    optimizer.register_step_post_hook(lambda *_: None)
    train(net, optimizer, range(2))
    return optimizer


def compiled(net):
    convert_linears(net)
    optimizer = plain(net)
    torch._dynamo.reset()
    run = torch.compile(net, backend="aot_eager")
    for _ in range(2):
        run(torch.ones(4, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


MAKERS = [
    *(plain, merging, with_fused_layers, with_gradients, with_a_scheduler, copied, loaded, after_a_failed_step),
    *(after_a_failed_backward, after_a_refused_wrapping, with_user_hooks, compiled),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_a_dropped_wrapper_frees_its_memory_at_once(make, dtype):
    net = Mlp(dtype)
    optimizer = make(net)
    refs = memory_of(optimizer) | state_of(optimizer)
    assert len(alive(refs)) > 12
    del optimizer
    assert alive(refs) == []


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", MAKERS)
def test_unwrap_frees_the_wrappers_memory_at_once_though_the_wrapper_is_kept(make, dtype):
    net = Mlp(dtype)
    optimizer = make(net)
    refs, state = memory_of(optimizer), state_of(optimizer)
    inner = optimizer.unwrap()
    assert alive(refs) == []
    assert len(inner.state) == 6
    del inner
    assert alive(state) == []
    with pytest.raises(RuntimeError, match="was unwrapped"):
        optimizer.step()


@pytest.mark.parametrize("is_unwrapped", [True, False], ids=["unwrapped", "dropped"])
def test_bytes_are_those_of_a_bare_model_again(is_unwrapped):
    live = LiveTensors()
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).bfloat16()
    bare = live.nbytes()
    for _ in range(2):
        optimizer = FusedMainGradOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), bucket_mib=1)
        net(torch.ones(4, 256).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert live.nbytes() > 4.9 * bare
        if is_unwrapped:
            optimizer.unwrap()
            assert live.nbytes() - bare <= NORM
        del optimizer
        assert live.nbytes() == bare


def test_a_wrapping_that_runs_out_of_memory_leaves_nothing_behind(monkeypatch):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))).bfloat16()
    before = [(dict(vars(p)), p.grad_dtype) for p in net.parameters()]
    live = LiveTensors()
    bare, made = live.nbytes(), []

    class Full(buffers_module.Bucket):
        def __init__(self, *args, **kwargs):
            if len(made) == 2:
                raise MemoryError("no memory for a third bucket")
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))

    monkeypatch.setattr(buffers_module, "Bucket", Full)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    fails(MemoryError, lambda: FusedMainGradOptimizer(inner, bucket_mib=1))
    assert len(made) == 2
    assert [ref() for ref in made] == [None, None]
    assert live.nbytes() == bare
    assert [(dict(vars(p)), p.grad_dtype) for p in net.parameters()] == before
    assert [id(p) for p in inner.param_groups[0]["params"]] == [id(p) for p in net.parameters()]
    monkeypatch.undo()
    FusedMainGradOptimizer(inner, bucket_mib=1)


def test_the_traceback_of_a_failed_step_keeps_no_flat_memory_of_an_unwrapped_wrapper():
    net = Mlp(torch.bfloat16)
    optimizer = plain(net, nonfinite="raise")
    refs = memory_of(optimizer)
    loss_of(net, 0).backward()
    net.first.weight.grad.fill_(torch.nan)
    kept = []
    try:
        optimizer.step()
    except FloatingPointError as error:
        kept.append(error)
    optimizer.unwrap()
    assert kept[0].__traceback__ is not None
    assert alive(refs) == []
