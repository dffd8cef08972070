"""Reductions start inside the last backward, gathers end under the next forward, by recorded order and not by time."""

import copy

import pytest
import torch
from torch import nn

import fusedopt
from fusedopt.reduction.transport import BucketGather, PendingParameter
from tests.distributed.launcher import run

NUM_LAYERS = 4


def make(**settings):
    """A chain of layers, each a parameter group and so a bucket of its own; the last layer's gradients come first."""
    torch.manual_seed(3)
    model = nn.Sequential(*[nn.Linear(24, 24) for _ in range(NUM_LAYERS)]).bfloat16()
    groups = [{"params": list(layer.parameters())} for layer in model]
    inner = torch.optim.AdamW(groups, lr=1e-2)
    return model, fusedopt.FusedMainGradOptimizer(inner, **settings)


def loss_of(model, seed):
    batch = torch.randint(-2, 3, (4, 24), generator=torch.Generator().manual_seed(seed)).bfloat16()
    return model(batch).float().pow(2).sum()


def record_launches(optimizer, model, events):
    for name in ("start_all_reduce", "start_reduce"):
        original = getattr(optimizer._comm, name)

        def spy(*args, original=original, **kwargs):
            events.append("reduce")
            return original(*args, **kwargs)

        setattr(optimizer._comm, name, spy)
    model[0].weight.register_post_accumulate_grad_hook(lambda param: events.append("the first layer's gradient"))


def launches_before_the_first_layers_gradient(rank, shard, overlap, how):
    k = 3 if how == "merge" else 1
    model, optimizer = make(shard=shard, overlap_grad_reduce=overlap, gradient_accumulation_steps=k)
    found = []
    for window in range(3):
        for micro_batch in range(3):
            events = []
            record_launches(optimizer, model, events)
            is_last = micro_batch == 2
            if how == "no_sync" and not is_last:
                with optimizer.no_sync():
                    loss_of(model, 10 * window + micro_batch + rank).backward()
            else:
                loss_of(model, 10 * window + micro_batch + rank).backward()
            found.append(events.index("the first layer's gradient"))
            for name in ("start_all_reduce", "start_reduce"):
                vars(optimizer._comm).pop(name)
            if how == "merge" or is_last:
                optimizer.step()
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("how", ["merge", "no_sync"])
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_reductions_start_inside_the_last_backward_and_only_there(shard, how):
    for found in run(launches_before_the_first_layers_gradient, 2, shard, True, how):
        windows = [found[i : i + 3] for i in range(0, 9, 3)]
        earlier = NUM_LAYERS - 2 if shard == "gradients" else 0  # there every backward reduces
        for first, second, last in windows:
            # The bucket before this one waits for its own users' hooks: until the next arrival, which is this layer's.
            assert last >= NUM_LAYERS - 2
            assert min(first, second) >= earlier
            assert max(first, second) == 0 or shard == "gradients"
    for found in run(launches_before_the_first_layers_gradient, 2, shard, False, how):
        assert found == [0] * 9


def train(model, optimizer, rank):
    for window in range(4):
        loss_of(model, 10 * window + rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def gathers_under_forward(rank, shard):
    finished = []
    original = BucketGather.finish

    def spy(self):
        if self._params:
            finished.append([tuple(vars(p)) != () and type(p) is PendingParameter for p in self._params])
        original(self)

    BucketGather.finish = spy
    model, optimizer = make(shard=shard, overlap_param_gather=True)
    loss_of(model, rank).backward()
    optimizer.step()
    assert finished == []  # nothing was waited for in step()
    assert all(type(param) is PendingParameter for param in model.parameters())
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())
    counts = []
    for layer in model:
        layer.register_forward_hook(lambda *_: counts.append(len(finished)))
    optimizer.zero_grad()
    loss_of(model, rank + 5).backward()
    assert counts == [1, 2, 3, 4]  # each layer waited for its own bucket, when it ran
    assert all(type(param) is nn.Parameter for param in model.parameters())
    optimizer.step()
    return optimizer._comm.counts["gather"]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_gathers_end_under_the_next_forward_each_bucket_when_its_layer_runs(shard):
    assert run(gathers_under_forward, 2, shard) == [2 * NUM_LAYERS] * 2


def everybody_sees_whole_parameters(rank, shard):
    reference, optimizer = make(shard=shard)
    train(reference, optimizer, rank)
    expected = [param.detach().clone() for param in reference.parameters()]
    problems = []

    def check(what, values):
        if not all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)):
            problems.append(what)

    looks = {
        "state_dict of the model": lambda model, _: list(model.state_dict().values()),
        "parameters in place": lambda model, _: [param.data for param in model.parameters()],
        "a list of all": lambda model, _: torch._foreach_mul(list(model.parameters()), 1.0),
        "a copy": lambda model, _: list(copy.deepcopy(model).parameters()),
        "the flat vector": lambda model, _: nn.utils.parameters_to_vector(model.parameters()).split(
            [param.numel() for param in model.parameters()]
        ),
        "state_dict of the optimizer": lambda model, opt: (opt.state_dict(), list(model.parameters()))[1],
        "evaluation": lambda model, _: (model(torch.zeros(1, 24).bfloat16()), list(model.parameters()))[1],
    }
    for what, look in looks.items():
        model, optimizer = make(shard=shard, overlap_param_gather=True)
        train(model, optimizer, rank)
        assert any(type(param) is PendingParameter for param in model.parameters())
        with torch.no_grad():
            found = look(model, optimizer)
            check(what, [value.view_as(want) for value, want in zip(found, expected, strict=True)])
    for other in (reference, model):
        loss_of(other, 99 + rank).backward()
    optimizer.step()
    optimizer.step()  # a second step finishes the first one's gathers
    assert all(torch.isfinite(param).all() for param in model.parameters())
    return problems


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_whoever_looks_at_a_parameter_sees_all_of_it(shard):
    assert run(everybody_sees_whole_parameters, 2, shard) == [[], []]


def compiled_models(rank):
    torch._dynamo.reset()
    model, optimizer = make(shard="optimizer", overlap_param_gather=True)
    plain, other = make(shard="optimizer")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for window in range(3):
        for forward, opt in ((compiled, optimizer), (plain, other)):
            loss_of(forward, window + rank).backward()
            opt.step()
            opt.zero_grad()
        assert all(type(param) is nn.Parameter for param in model.parameters())
    torch._dynamo.reset()
    return all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_compiled_code_which_checks_the_class_of_parameters_never_meets_a_pending_one():
    assert run(compiled_models, 2) == [True, True]
