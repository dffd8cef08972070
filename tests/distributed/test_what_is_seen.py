"""What hooks, hands and failed loops see of gradients on several ranks, and backwards of other kinds."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import compiled_autograd

from tests.distributed.accidents import SHARDS, B
from tests.distributed.launcher import run
from tests.distributed.programs import (
    ALL,
    NUM_BLOCKS,
    InjectedError,
    Settings,
    make_net,
)

# -- what a hook, a hand or a failed loop sees


def hand_set(rank, shard, who):
    """Return the parameter after each of three windows in which some ranks assign ``.grad`` before the step."""
    net = make_net(torch.float32)
    settings = Settings(shard, optimizer="plain SGD")
    optimizer = settings.make(net)
    weight = net.blocks[2].layer.weight
    trace = [weight.detach().clone()]
    for i in range(3):
        net(B((0, 1)), (i, rank)).backward()  # another parameter's gradient arrives
        if rank in who:
            weight.grad = torch.full_like(weight, 12.0 * (i + 1))
        optimizer.step()
        optimizer.zero_grad()
        trace.append(weight.detach().clone())
    return trace


@pytest.mark.parametrize("who", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_gradient_set_by_hand_is_counted_on_the_ranks_that_set_it(shard, who):
    for trace in run(hand_set, 3, shard, who):
        for i in range(3):
            expected = trace[i] - 0.125 * (12.0 * (i + 1) * len(who) / 3)
            assert torch.isfinite(expected).all()
            assert torch.equal(trace[i + 1], expected)


def watch_with_hooks(rank, shard):
    """Return what users' hooks, registered before and after wrapping, saw over two micro-batches, for three windows."""
    net = make_net(torch.bfloat16)
    weight = net.blocks[1].layer.weight
    seen = []

    def look(param):
        seen.append((param.grad is not None and param.grad is param.main_grad, param.grad.dtype, param.grad.clone()))

    weight.register_post_accumulate_grad_hook(look)
    optimizer = Settings(shard).make(net)
    weight.register_post_accumulate_grad_hook(look)
    weight.register_hook(lambda grad: seen.append(("tensor hook", grad.dtype, grad.clone())))
    for i in range(3):
        with optimizer.no_sync():
            net(B((1, 3)), (i, 0, rank)).backward()
        net(B((1, 3)), (i, 1, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("shard", SHARDS)
def test_users_hooks_see_main_grad_accumulated(shard):
    for seen in run(watch_with_hooks, 2, shard):
        assert len(seen) == 3 * 2 * 3
        for i in range(0, len(seen), 6):
            (_, _, first), *after_first, (_, _, second), early, late = seen[i : i + 6]
            assert [what for what, _, _ in seen[i : i + 6]] == ["tensor hook", True, True] * 2
            assert {dtype for _, dtype, _ in seen} == {torch.float32}
            assert first.any()
            assert second.any()
            assert all(torch.equal(grad, first) for _, _, grad in after_first)
            total = second if shard == "gradients" else first + second  # there the first is in the shard by now
            assert torch.equal(early[2], total)
            assert torch.equal(late[2], total)


def fail_and_read(rank, shard):
    """Return `.grad` after a good backward, and after one that failed on top of it, under no_sync."""
    net = make_net(torch.float32)
    optimizer = Settings(shard).make(net)
    grads = []
    with optimizer.no_sync():
        net(B(), (0, rank)).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
        with contextlib.suppress(InjectedError):
            net(B(fails_at=NUM_BLOCKS), (1, rank)).backward()
        grads.append([p.grad.clone() for p in net.parameters()])
    optimizer.step()
    return grads


@pytest.mark.parametrize("shard", ["none", "optimizer"])
def test_the_sum_of_earlier_micro_batches_is_kept_when_a_backward_fails(shard):
    for before, after in run(fail_and_read, 2, shard):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def grad_of_a_backward(rank, shard):
    """Return whether `torch.autograd.grad` in the middle of a window left gradients and counts alone."""
    net = make_net(torch.float32)
    optimizer = Settings(shard).make(net)
    net(B(), (0, rank)).backward()
    before = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    counts = dict(optimizer._comm.counts)
    torch.autograd.grad(net(B(), (1, rank)), list(net.parameters()))
    after = [p.grad for p in net.parameters()]
    same_grads = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return same_grads, counts == dict(optimizer._comm.counts)


@pytest.mark.parametrize("shard", SHARDS)
def test_autograd_grad_reduces_nothing(shard):
    assert run(grad_of_a_backward, 2, shard) == [(True, True)] * 2


# -- control messages keep off the data group


class _Spy:
    """Collect (operation, group, dtype) of what is communicated."""

    NAMES = ("all_reduce", "all_to_all_single", "isend", "irecv", "broadcast", "all_gather_object", "send", "recv")

    def __init__(self):
        self.seen = []
        for name in self.NAMES:
            setattr(dist, name, self._wrap(name, getattr(dist, name)))

    def _wrap(self, name, function):
        def call(*args, **keywords):
            tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
            self.seen.append((name, keywords.get("group"), None if tensor is None else tensor.dtype))
            return function(*args, **keywords)

        return call


def spy(rank, shard):
    """Return the dtypes that travelled on each kind of group in three windows with accidents."""
    watch = _Spy()
    net = make_net(torch.bfloat16)
    optimizer = Settings(shard, max_grad_norm=1.0).make(net)
    for i in range(3):
        net(B(ALL if rank else (0, 1)), (i, rank)).backward()
        net(B(ALL if i else ()), (i, 1, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    control = optimizer._comm._control
    on_default = {dtype for _, group, dtype in watch.seen if group in (None, dist.group.WORLD)}
    on_control = {dtype for _, group, dtype in watch.seen if group is control}
    elsewhere = {dtype for _, group, dtype in watch.seen if group not in (None, dist.group.WORLD, control)}
    return on_default, on_control, elsewhere, len(watch.seen), sum(optimizer._comm.counts.values())


@pytest.mark.parametrize("shard", SHARDS)
def test_control_messages_and_data_never_share_a_group_nor_take_the_loops(shard):
    for on_default, on_control, elsewhere, num_calls, num_counted in run(spy, 3, shard):
        assert on_default == set()
        assert torch.uint8 in on_control
        assert not on_control - {torch.uint8, None}  # None: a pickled object
        assert torch.float32 in elsewhere
        assert not elsewhere & {torch.uint8, None}
        assert num_calls >= num_counted > 0  # an exchange from rank to rank is several calls


# -- backwards of other kinds


def backward_of_some_inputs(rank, shard):
    """Return what three windows of ``backward(inputs=...)`` changed."""
    net = make_net(torch.float32)
    optimizer = Settings(shard, optimizer="plain SGD").make(net)
    names = [f"blocks.{i}.layer.weight" for i in (1, 4)]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    for i in range(3):
        net(B(), (i, rank)).backward(inputs=[net.get_parameter(name) for name in names])
        optimizer.step()
        optimizer.zero_grad()
    return [name for name, p in net.named_parameters() if not torch.equal(p, before[name])], list(net.parameters())


@pytest.mark.parametrize("shard", SHARDS)
def test_backward_of_some_inputs_reduces_those(shard):
    results = run(backward_of_some_inputs, 2, shard)
    assert [changed for changed, _ in results] == [["blocks.1.layer.weight", "blocks.4.layer.weight"]] * 2
    for got, other in zip(results[0][1], results[1][1], strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, other)


def backward_under_compiled_autograd(rank):
    net = make_net(torch.float32)
    optimizer = Settings("none").make(net)
    loss = net(B(), (0, rank))
    try:
        with compiled_autograd._enable(lambda graph: graph):
            loss.backward()
    except RuntimeError as error:
        text = str(error)
    else:
        text = "nothing raised"
    optimizer.zero_grad()
    net(B(), (1, rank)).backward()
    optimizer.step()
    return text, [p.detach().clone() for p in net.parameters()]


def test_compiled_autograd_which_drops_the_end_of_backward_is_refused_and_training_goes_on():
    results = run(backward_under_compiled_autograd, 2)
    for text, _ in results:
        assert "compiled autograd" in text
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


class _TakeTurns(torch.autograd.Function):
    """Let the other thread's backward go on for one block before this one does."""

    turns = None

    @staticmethod
    def forward(ctx, carry):
        return carry.clone()

    @staticmethod
    def backward(ctx, grad):
        with contextlib.suppress(threading.BrokenBarrierError):
            _TakeTurns.turns.wait(5.0)
        return grad


def backward_in_two_threads(rank):
    net = make_net(torch.float32)
    optimizer = Settings("optimizer").make(net)
    _TakeTurns.turns = threading.Barrier(2)
    texts = []

    def work(number):
        carry = torch.zeros((), requires_grad=True)
        total = 0.0
        for block in net.blocks:
            term, carry = block(*block.data(torch.float32, (number, rank)), _TakeTurns.apply(carry))
            total = total + term
        try:
            total.backward()
        except RuntimeError as error:
            texts.append(str(error))
            _TakeTurns.turns.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimizer.zero_grad()
    return texts


def test_backwards_of_one_model_in_two_threads_at_once_are_refused():
    for texts in run(backward_in_two_threads, 2):
        assert len(texts) >= 1
        assert "two threads" in texts[0]
