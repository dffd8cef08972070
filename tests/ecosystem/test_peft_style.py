"""Claims about adapters as PEFT makes them: frozen bf16 base, fp32 adapters, a bf16 module saved whole, an empty group.

The layers are written here; they follow PEFT's defaults (adapters in fp32, copies in ``modules_to_save`` in the
base's dtype, the second parameter group empty).
"""

import copy
import functools
import io

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests import models
from tests.compare import assert_equal_parameters, bits
from tests.reference import Reference

WIDTH, RANK, NUM_CLASSES = 96, 2, 5


class Lora(nn.Module):
    """``base(x) + b a x``: the base frozen in its dtype, one fp32 pair (a, b) per adapter, one adapter active."""

    def __init__(self, base, adapters=("default",)):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for name in adapters:
            self.add_adapter(name)
        self.set_adapter(adapters[0])

    def add_adapter(self, name):
        generator = torch.Generator().manual_seed(len(self.a) + self.base.out_features)
        self.a[name] = nn.Parameter(torch.randn(RANK, self.base.in_features, generator=generator) / 8)
        self.b[name] = nn.Parameter(torch.zeros(self.base.out_features, RANK))

    def set_adapter(self, active):
        self.active = active
        for name in self.a:
            self.a[name].requires_grad_(name == active)
            self.b[name].requires_grad_(name == active)

    def forward(self, x):
        update = x.float() @ self.a[self.active].T @ self.b[self.active].T
        return self.base(x) + update.to(x.dtype)


class Net(nn.Module):
    def __init__(self, adapters=("default",)):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.first = Lora(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), adapters)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.second = Lora(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), adapters)
        self.head = nn.Linear(WIDTH, NUM_CLASSES, dtype=torch.bfloat16)  # saved whole

    def forward(self, tokens):
        return self.head(self.second(torch.tanh(self.norm(self.first(self.embedding(tokens)))))).float()

    def set_adapter(self, name):
        self.first.set_adapter(name)
        self.second.set_adapter(name)

    def trainable(self):
        return [param for param in self.parameters() if param.requires_grad]


def loss_of(net, number):
    tokens = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(net(tokens), tokens % NUM_CLASSES)


def adamw(groups, **settings):
    return torch.optim.AdamW(groups, **{"lr": 0.02, "weight_decay": 0.1, **settings})


train = functools.partial(models.train, loss_of=loss_of)
train_reference = functools.partial(models.train_reference, loss_of=loss_of)


def with_an_empty_group(params):
    """Return the groups that Trainer makes: decayed, and not decayed, of which there are none."""
    return adamw([{"params": params}, {"params": [], "weight_decay": 0.0}])


def assert_moved(params, starts):
    assert params
    for param, start in zip(params, starts, strict=True):
        assert not torch.equal(param, start)


def assert_buffers_cover(optimizer, params):
    """Assert that ``params``, and no others, have main_grad, and that the report counts their memory only."""
    with_buffers = [p for group in optimizer.param_groups for p in group["params"] if hasattr(p, "main_grad")]
    assert {id(p) for p in with_buffers} == {id(p) for p in params}
    report = optimizer.memory_report()
    assert report["model"] == sum(p.nbytes for p in params)
    storages = {p.main_grad.untyped_storage().data_ptr(): p.main_grad.untyped_storage() for p in params}
    assert report["main_grad"] == sum(storage.nbytes() for storage in storages.values())


# -- a frozen base


def test_frozen_weights_get_no_buffer_and_adapters_no_second_copy():
    net = Net()
    inner = with_an_empty_group(net.trainable())
    optimizer = FusedMainGradOptimizer(inner)
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 0]
    assert_buffers_cover(optimizer, net.trainable())
    assert {p.dtype for p in net.trainable()} == {torch.float32, torch.bfloat16}
    frozen = [p for p in net.parameters() if not p.requires_grad]
    assert sum(p.numel() for p in frozen) > 8 * sum(p.numel() for p in net.trainable())
    for param in frozen:
        assert vars(param) == {}
        assert not param._post_accumulate_grad_hooks
    train(net, optimizer, range(3))
    for param, main in zip(net.trainable(), inner.param_groups[0]["params"], strict=True):
        assert (main is param) == (param.dtype is torch.float32)
    head = sum(p.numel() for p in net.head.parameters())
    report = optimizer.memory_report()
    assert 4 * head <= report["main_param"] < 4 * (head + 1024)  # the head's, in one bucket of whole rows
    num_adam = 2 * sum(p.numel() for p in net.trainable()) + len(net.trainable())  # two moments, a 0-d step each
    assert report["state"] == 4 * num_adam


@pytest.mark.parametrize("max_grad_norm", [None, 0.05], ids=["unclipped", "clipped by torch"])
def test_adapters_and_a_saved_module_train_as_the_reference_does(max_grad_norm):
    net, twin = Net(), Net()
    optimizer = FusedMainGradOptimizer(with_an_empty_group(net.trainable()))
    reference = Reference(
        twin,
        lambda groups: with_an_empty_group(groups[0]),
        groups=[twin.trainable()],
        max_grad_norm=max_grad_norm,
    )
    starts = [p.detach().clone() for p in net.trainable()]
    for window in range(4):
        for micro_batch in range(2):
            loss_of(net, 2 * window + micro_batch).backward()
            reference.backward(loss_of(twin, 2 * window + micro_batch))
        if max_grad_norm is not None:
            assert nn.utils.clip_grad_norm_(net.parameters(), max_grad_norm) > max_grad_norm
        optimizer.step()
        net.zero_grad()  # as Trainer clears
        reference.step()
        assert_equal_parameters(net, twin)
    assert_moved(net.trainable(), starts)


def test_frozen_weights_that_are_given_to_the_optimizer_get_no_buffer_either():
    net, twin = Net(), Net()
    optimizer = FusedMainGradOptimizer(adamw(net.parameters()))
    assert len(optimizer.param_groups[0]["params"]) == len(list(net.parameters())) > len(net.trainable())
    assert_buffers_cover(optimizer, net.trainable())
    reference = Reference(twin, lambda groups: adamw(groups[0]), groups=[twin.trainable()])
    starts = [p.detach().clone() for p in net.parameters()]
    train(net, optimizer, range(3))
    train_reference(reference, range(3))
    assert_equal_parameters(net, twin)
    for param, start in zip(net.parameters(), starts, strict=True):
        assert torch.equal(param, start) is not param.requires_grad


@pytest.mark.parametrize("gives_all", [False, True], ids=["trainable given", "all given"])
def test_a_resumed_run_with_an_empty_group_is_bit_equal(gives_all):
    def start():
        net = Net()
        return net, FusedMainGradOptimizer(
            with_an_empty_group(list(net.parameters()) if gives_all else net.trainable())
        )

    net, optimizer = start()
    train(net, optimizer, range(3))
    file = io.BytesIO()
    torch.save([net.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state_dict = torch.load(file, weights_only=True)
    assert state_dict["param_groups"][1]["params"] == []
    assert len(state_dict["state"]) == 6
    resumed_net, resumed = start()
    resumed.load_state_dict(state_dict)
    resumed_net.load_state_dict(weights)
    starts = [p.detach().clone() for p in resumed_net.trainable()]
    train(net, optimizer, range(3, 6))
    train(resumed_net, resumed, range(3, 6))
    assert_equal_parameters(resumed_net, net)
    assert_moved(resumed_net.trainable(), starts)


def test_a_copied_pair_with_frozen_weights_trains_on():
    net = Net()
    optimizer = FusedMainGradOptimizer(with_an_empty_group(list(net.parameters())))
    train(net, optimizer, range(3))
    copied_net, copied = copy.deepcopy((net, optimizer))
    train(net, optimizer, range(3, 6))
    train(copied_net, copied, range(3, 6))
    assert_equal_parameters(copied_net, net)
    assert [p.requires_grad for p in copied_net.parameters()] == [p.requires_grad for p in net.parameters()]


# -- unfreezing late


def named_adamw(net):
    return adamw(net.named_parameters())


@pytest.mark.parametrize("moment", ["zero_grad", "step"])
def test_an_unfrozen_parameter_gets_buffers_at_the_next_zero_grad_or_step_and_trains_as_the_reference(moment):
    net, twin = Net(), Net()
    inner = named_adamw(net)
    optimizer = FusedMainGradOptimizer(inner)
    reference = Reference(twin, lambda groups: adamw(groups[0]), groups=[twin.trainable()])
    train(net, optimizer, range(2))
    train_reference(reference, range(2))

    for each in (net, twin):
        each.norm.requires_grad_(True)
    assert not hasattr(net.norm.weight, "main_grad")
    getattr(optimizer, moment)()
    assert_buffers_cover(optimizer, net.trainable())
    main_of = dict(zip(net.parameters(), inner.param_groups[0]["params"], strict=True))
    assert main_of[net.norm.weight].dtype is torch.float32
    assert main_of[net.first.base.weight] is net.first.base.weight  # frozen still

    mains = [nn.Parameter(p.detach().float()) for p in twin.norm.parameters()]
    reference.optimizer.add_param_group({"params": mains})
    reference.mains.update(zip(twin.norm.parameters(), mains, strict=True))
    reference.params.extend(twin.norm.parameters())
    starts = [p.detach().clone() for p in net.trainable()]
    train(net, optimizer, range(2, 6))
    train_reference(reference, range(2, 6))
    assert net.norm.weight.grad is None
    assert_equal_parameters(net, twin)
    assert_moved(net.trainable(), starts)


def test_a_gradient_that_arrives_before_raises_by_name_and_leaves_none_behind():
    net = Net()
    optimizer = FusedMainGradOptimizer(named_adamw(net))
    train(net, optimizer, range(2))
    net.first.base.requires_grad_(True)
    before = [bits(p) for p in net.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"first\.base\.(weight|bias).*zero_grad\(\)"):
            loss_of(net, 2).backward()
        assert net.first.base.weight.grad is net.first.base.bias.grad is None
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())
    for param, kept in zip(net.parameters(), before, strict=True):
        assert torch.equal(bits(param), kept)
    assert_buffers_cover(optimizer, net.trainable())
    start = net.first.base.weight.detach().clone()
    train(net, optimizer, range(2, 5))
    assert torch.isfinite(net.first.base.weight).all()
    assert not torch.equal(net.first.base.weight, start)


def test_unfreezing_layer_by_layer_equals_the_bare_optimizer_on_fp32():
    nets = [Net().float() for _ in range(2)]
    bare = adamw(nets[0].parameters())
    optimizer = FusedMainGradOptimizer(adamw(nets[1].parameters()))
    layers = ["norm", "second.base", "first.base", "embedding"]
    for number, layer in enumerate(layers):
        for net, each in zip(nets, (bare, optimizer), strict=True):
            net.get_submodule(layer).requires_grad_(True)
            each.zero_grad()
            train(net, each, range(3 * number, 3 * number + 3))
        assert_equal_parameters(*nets)
    starts = [p.detach() for p in Net().float().parameters()]
    assert_moved(list(nets[1].parameters()), starts)
    assert_buffers_cover(optimizer, list(nets[1].parameters()))


def test_a_parameter_unfrozen_and_frozen_again_before_the_next_step_gets_nothing():
    net = Net()
    optimizer = FusedMainGradOptimizer(named_adamw(net))
    train(net, optimizer, range(2))
    net.norm.requires_grad_(True)
    net.norm.requires_grad_(False)
    train(net, optimizer, range(2, 5))
    assert_buffers_cover(optimizer, net.trainable())
    assert not hasattr(net.norm.weight, "main_grad")


# -- freezing again, and switching adapters


def test_a_refrozen_parameter_stands_still_and_trains_on_with_its_state_when_unfrozen():
    net, twin = Net(), Net()
    optimizer = FusedMainGradOptimizer(adamw(net.parameters()))
    reference = Reference(twin, lambda groups: adamw(groups[0]), groups=[twin.trainable()])
    for round_number in range(3):
        is_frozen = round_number == 1
        net.head.requires_grad_(not is_frozen)
        before = [bits(p) for p in net.head.parameters()]
        numbers = range(3 * round_number, 3 * round_number + 3)
        train(net, optimizer, numbers)  # no zero_grad() needed: it kept its buffers
        twin.head.requires_grad_(not is_frozen)
        reference.params = [p for p in reference.mains if p.requires_grad]
        train_reference(reference, numbers)
        assert_equal_parameters(net, twin)
        for param, kept in zip(net.head.parameters(), before, strict=True):
            assert torch.equal(bits(param), kept) is is_frozen
    steps = [int(optimizer.state[p]["step"]) for p in (net.head.weight, net.first.a["default"])]
    assert steps == [6, 9]


def test_a_gradient_left_on_a_refrozen_parameter_is_stepped_as_torch_steps_it():
    nets = [Net().float() for _ in range(2)]
    optimizers = [adamw(nets[0].trainable()), FusedMainGradOptimizer(adamw(nets[1].trainable()))]
    for number in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            loss_of(net, number).backward()
            net.head.requires_grad_(False)
            assert net.head.weight.grad.count_nonzero()
            optimizer.step()
            optimizer.zero_grad()
            assert net.head.weight.grad is None
            net.head.requires_grad_(True)
        assert_equal_parameters(*nets)
    assert not torch.equal(nets[1].head.weight, Net().head.weight.float())


@pytest.mark.parametrize("is_given", [False, True], ids=["added when chosen", "given at the start"])
def test_switching_adapters_trains_each_with_state_of_its_own(is_given):
    """PEFT's set_adapter() swaps which parameters require a gradient, after the optimizer was made."""
    names = ("default", "other")
    nets = [Net(names).float() for _ in range(2)]
    optimizers = []
    for net, wrap in zip(nets, (lambda inner: inner, FusedMainGradOptimizer), strict=True):
        optimizers.append(wrap(adamw(net.parameters() if is_given else net.trainable())))
    has_been_added = is_given
    for round_number, name in enumerate(("default", "other", "default", "other")):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.set_adapter(name)
            if not has_been_added and name == "other":
                optimizer.add_param_group({"params": [p for n, p in net.named_parameters() if n.endswith("other")]})
            optimizer.zero_grad()
        has_been_added = has_been_added or name == "other"
        idle = [p for n, p in nets[1].named_parameters() if n.endswith(tuple(set(names) - {name}))]
        before = [bits(p) for p in idle]
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(3 * round_number, 3 * round_number + 3))
        assert_equal_parameters(*nets)
        assert len(idle) == 4
        assert all(torch.equal(bits(p), kept) for p, kept in zip(idle, before, strict=True))
    assert int(optimizers[1].state[nets[1].first.b["other"]]["step"]) == 6


# -- adapters that are added


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 adapters", "bf16 adapters"])
def test_adapters_added_by_add_param_group_train_as_the_reference_does(dtype):
    net, twin = Net(), Net()
    optimizer = FusedMainGradOptimizer(adamw(net.trainable()))
    reference = Reference(twin, lambda groups: adamw(groups[0]), groups=[twin.trainable()])
    train(net, optimizer, range(3))
    train_reference(reference, range(3))

    added = []
    for each in (net, twin):
        for layer in (each.first, each.second):
            layer.add_adapter("added")
            for pair in (layer.a, layer.b):
                pair["added"] = nn.Parameter(pair["added"].detach().to(dtype))
            layer.active = "added"
            layer.forward = _forward_with_added.__get__(layer)
        added.append([p for name, p in each.named_parameters() if name.endswith("added")])
    optimizer.add_param_group({"params": added[0], "lr": 0.05})
    mains = [nn.Parameter(p.detach().clone().float()) for p in added[1]]
    reference.optimizer.add_param_group({"params": mains, "lr": 0.05})
    reference.mains.update(zip(added[1], mains, strict=True))
    reference.params.extend(added[1])

    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.05]
    assert_buffers_cover(optimizer, net.trainable())
    starts = [p.detach().clone() for p in added[0]]
    train(net, optimizer, range(3, 7))
    train_reference(reference, range(3, 7))
    assert_equal_parameters(net, twin)
    assert_moved(added[0], starts)
    assert len(added[0]) == 4


def _forward_with_added(self, x):
    total = self.base(x)
    for name in self.a:
        total = total + (x.float() @ self.a[name].T.float() @ self.b[name].T.float()).to(x.dtype)
    return total


def test_an_empty_group_may_be_added_and_filled_state_dicts_still_resume():
    net = Net()
    optimizer = FusedMainGradOptimizer(adamw(net.trainable()))
    optimizer.add_param_group({"params": []})
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 0]
    train(net, optimizer, range(3))
    twin = Net()
    resumed = FusedMainGradOptimizer(with_an_empty_group(twin.trainable()))
    resumed.load_state_dict(optimizer.state_dict())
    twin.load_state_dict(net.state_dict())
    train(net, optimizer, range(3, 6))
    train(twin, resumed, range(3, 6))
    assert_equal_parameters(twin, net)


def test_merging_an_adapter_into_the_frozen_base_needs_no_word_to_the_optimizer():
    net = Net()
    optimizer = FusedMainGradOptimizer(with_an_empty_group(net.trainable()))
    train(net, optimizer, range(3))
    with torch.no_grad():
        for layer in (net.first, net.second):
            layer.base.weight += (layer.b["default"] @ layer.a["default"]).to(torch.bfloat16)
            layer.b["default"].zero_()
    merged = [bits(layer.base.weight) for layer in (net.first, net.second)]
    train(net, optimizer, range(3, 6))
    assert [bits(layer.base.weight).tolist() for layer in (net.first, net.second)] == [m.tolist() for m in merged]
    assert net.first.b["default"].count_nonzero()
    assert all(torch.isfinite(p).all() for p in net.parameters())
