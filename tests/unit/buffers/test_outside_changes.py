"""Claims about weights that are changed from outside between two steps: seen, and taken over element by element."""

import copy

import numpy as np
import pytest
import torch
from lion_pytorch import Lion
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import bits
from tests.outside_cases import LOW, ThroughData, Wrapped, loss_of
from tests.reference import Reference

DTYPES = {**LOW, "fp32": torch.float32}


# -- in-place edits that torch counts


def test_some_elements_edited_the_others_keep_every_bit_of_their_main_param(wrapped):
    before = bits(wrapped.main)
    with torch.no_grad():
        wrapped.weight[1].copy_(torch.tensor([0.5, -0.25, 3.0, -7.0, 1 / 3]))
    wrapped.step_without_gradients()
    assert torch.equal(bits(wrapped.main)[1], bits(wrapped.weight[1].float()))
    kept = [0, 2, 3, 4, 5]
    assert torch.equal(bits(wrapped.main)[kept], before[kept])
    assert torch.equal(wrapped.main.to(wrapped.weight.dtype), wrapped.weight)


def test_an_edit_that_writes_the_same_values_keeps_every_bit(wrapped):
    before = [bits(main) for main in wrapped.main_params]
    weights = {name: value.clone() for name, value in wrapped.net.state_dict().items()}
    version = wrapped.weight._version
    wrapped.net.load_state_dict(weights)
    assert wrapped.weight._version > version
    wrapped.step_without_gradients()
    for main, kept in zip(wrapped.main_params, before, strict=True):
        assert torch.equal(bits(main), kept)


def test_other_weights_loaded_into_the_model_are_what_the_next_step_starts_from(wrapped):
    torch.manual_seed(1)
    other = copy.deepcopy(wrapped.net)
    for module in other:
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    wrapped.net.load_state_dict(other.state_dict())
    reference = Reference(other, lambda groups: torch.optim.SGD(groups[0], lr=0.01))
    for number in range(3, 6):
        wrapped.train(number)
        reference.backward(loss_of(other, number))
        reference.step()
    for main, param, theirs in zip(wrapped.main_params, wrapped.net.parameters(), other.parameters(), strict=True):
        assert torch.isfinite(main).all()
        assert torch.equal(bits(param), bits(theirs))
        assert torch.equal(bits(main), bits(reference.mains[theirs]))


EDITS = {
    "copy_": lambda w: w.copy_(torch.full_like(w, 0.5)),
    "mul_": lambda w: w.mul_(2),
    "zero_": lambda w: w.zero_(),
    "indexing": lambda w: w.__setitem__((2, slice(None)), 3.0),
    "masked_fill_": lambda w: w.masked_fill_(w > 0, -1.0),
    "init": nn.init.ones_,
    "a view": lambda w: w.view(-1)[3:9].fill_(4.0),
    "detach": lambda w: w.detach().fill_(4.0),
    "foreach": lambda w: torch._foreach_mul_([w], 2.0),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_in_place_edit_is_seen_however_it_is_made(wrapped, edit):
    before, main_before = bits(wrapped.weight), bits(wrapped.main)
    with torch.no_grad():
        edit(wrapped.weight)
    edited = bits(wrapped.weight) != before
    assert edited.any()
    wrapped.step_without_gradients()
    assert torch.equal(bits(wrapped.main)[edited], bits(wrapped.weight.float())[edited])
    assert torch.equal(bits(wrapped.main)[~edited], main_before[~edited])


def test_an_edit_between_backward_and_step_is_stepped_from(wrapped):
    wrapped.loss(3).backward()
    with torch.no_grad():
        wrapped.weight.fill_(0.5)
    grad = wrapped.weight.grad.clone()
    assert grad.count_nonzero()
    wrapped.optimizer.step()
    assert torch.equal(wrapped.main, torch.full_like(wrapped.main, 0.5).add_(grad, alpha=-0.01))


def test_minus_zero_for_plus_zero_is_an_edit(wrapped):
    with torch.no_grad():
        wrapped.weight[0].zero_()
    wrapped.step_without_gradients()
    assert not torch.signbit(wrapped.main[0]).any()
    for sign in (-0.0, 0.0, -0.0):
        with torch.no_grad():
            wrapped.weight[0].fill_(sign)
        wrapped.step_without_gradients()
        assert torch.equal(torch.signbit(wrapped.main[0]), torch.signbit(wrapped.weight[0]))
        assert torch.signbit(wrapped.main[0]).all() == (str(sign) == "-0.0")


def test_nan_elements_come_and_go_and_others_keep_every_bit(wrapped):
    others = torch.ones_like(wrapped.main, dtype=torch.bool)
    others[0, 0] = False
    before = bits(wrapped.main)[others]
    for value in (torch.nan, torch.nan, 1.5):
        with torch.no_grad():
            wrapped.weight[0, 0] = value
        wrapped.step_without_gradients()
        assert torch.isnan(wrapped.main[0, 0]) == (value != value)
        assert torch.equal(bits(wrapped.main)[others], before)
    assert wrapped.main[0, 0] == 1.5
    assert torch.isfinite(wrapped.main).all()


def test_a_main_param_too_large_for_fp16_survives_an_edit_beside_it():
    wrapped = Wrapped(torch.float16, lambda params: torch.optim.SGD(params, lr=1.0))
    wrapped.weight.grad = torch.zeros(6, 5)
    wrapped.weight.grad[0, 0] = -1e6
    wrapped.optimizer.step()
    wrapped.optimizer.zero_grad()
    large = wrapped.main[0, 0].item()
    assert 9e5 < large < 1.1e6
    assert torch.isinf(wrapped.weight[0, 0])
    for _ in range(3):
        with torch.no_grad():
            wrapped.weight[1, 1] += 1
        wrapped.step_without_gradients()
        assert wrapped.main[0, 0].item() == large
        assert wrapped.main[1, 1] == wrapped.weight[1, 1].float()


# -- embeddings that renormalise in forward


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_an_embedding_with_max_norm_keeps_its_main_params_over_a_hundred_tiny_steps(dtype):
    """One row is below max_norm and steps by 1e-4, far below a bf16 ulp of 1: 0.99 where 0.9999 would be wrong."""
    embedding = nn.Embedding(3, 1, max_norm=2.0, dtype=dtype)
    with torch.no_grad():
        embedding.weight.fill_(1.0)
        embedding.weight[2] = 5.0  # renormalised in its first forward
    inner = torch.optim.SGD(embedding.parameters(), lr=1e-4)
    optimizer = FusedMainGradOptimizer(inner)
    (main,) = inner.param_groups[0]["params"]
    expected = torch.ones(())
    versions = set()
    for _ in range(100):
        embedding(torch.tensor([0])).float().sum().backward()
        versions.add(embedding.weight._version)
        optimizer.step()
        optimizer.zero_grad()
        expected = expected - 1e-4
    assert len(versions) == 100  # every forward wrote, so every step compared
    assert torch.equal(main[0, 0], expected)
    assert abs(main[0, 0].item() - 0.99) < 1e-5
    assert torch.equal(embedding.weight[0, 0], expected.to(dtype))
    assert main[1, 0] == 1.0
    embedding(torch.tensor([2]))
    assert embedding.weight[2, 0] < 2.1
    optimizer.step()
    assert torch.equal(main[2].to(dtype), embedding.weight[2])
    assert main[2, 0] < 2.1


@pytest.mark.parametrize("dtype", LOW.values(), ids=LOW)
def test_an_embedding_with_max_norm_equals_a_reference_that_keeps_its_main_params(dtype):
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 6, max_norm=1.0, dtype=dtype)
    twin = copy.deepcopy(embedding)
    inner = torch.optim.SGD(embedding.parameters(), lr=0.01)
    optimizer = FusedMainGradOptimizer(inner)
    (main,) = inner.param_groups[0]["params"]
    reference_main = twin.weight.detach().float()
    num_renormalised = 0
    for number in range(30):
        rows = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(number))
        embedding(rows).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

        rounded = twin.weight.detach().clone()
        (grad,) = torch.autograd.grad(twin(rows).float().square().sum(), twin.weight)
        edited = bits(twin.weight) != bits(rounded)
        num_renormalised += int(edited.any())
        reference_main[edited] = twin.weight.detach().float()[edited]
        reference_main.add_(grad.float(), alpha=-0.01)
        with torch.no_grad():
            twin.weight.copy_(reference_main)
        assert torch.isfinite(main).all()
        assert torch.equal(main, reference_main)
        assert torch.equal(embedding.weight, twin.weight)
    assert 3 <= num_renormalised < 30
    assert (main != embedding.weight).any()


# -- parameters that are rebound


def test_vector_to_parameters_is_seen_by_its_pointer(wrapped):
    params = list(wrapped.net.parameters())
    versions = [p._version for p in params]
    vector = nn.utils.parameters_to_vector(params).detach() * 2
    nn.utils.vector_to_parameters(vector, params)
    assert [p._version for p in params] == versions
    edited = [bits(p.float()) for p in params]
    wrapped.step_without_gradients()
    for main, values in zip(wrapped.main_params, edited, strict=True):
        assert torch.equal(bits(main), values)
    for number in range(3):
        wrapped.train(number)
    for main, param in zip(wrapped.main_params, params, strict=True):
        assert torch.isfinite(main).all()
        assert torch.equal(main.to(param.dtype), param)


def test_vector_to_parameters_of_what_was_there_keeps_every_bit(wrapped):
    params = list(wrapped.net.parameters())
    before = [bits(main) for main in wrapped.main_params]
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach(), params)
    wrapped.step_without_gradients()
    for main, kept in zip(wrapped.main_params, before, strict=True):
        assert torch.equal(bits(main), kept)


def test_a_rebound_parameter_is_taken_over_element_by_element(wrapped):
    before = bits(wrapped.main)
    new = wrapped.weight.detach().clone()
    new[2] = 0.75
    wrapped.weight.data = new
    wrapped.step_without_gradients()
    assert torch.equal(wrapped.main[2], torch.full((5,), 0.75))
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(bits(wrapped.main)[kept], before[kept])
    wrapped.train(5)
    assert torch.equal(wrapped.main.to(new.dtype), wrapped.weight)
    assert wrapped.weight.data_ptr() == new.data_ptr()


@pytest.mark.parametrize("width", [4, 16, 64, 256, 1024])
def test_a_parameter_rebound_twice_is_seen_also_where_the_old_memory_is_used_again(width):
    """The allocator likes to hand the second tensor the memory that the first assignment freed."""
    layer = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
    inner = torch.optim.SGD(layer.parameters(), lr=0.1)
    optimizer = FusedMainGradOptimizer(inner)
    (main,) = inner.param_groups[0]["params"]
    for _ in range(20):
        layer.weight.data = layer.weight.data * 0.5
        layer.weight.data = layer.weight.data + 1
        optimizer.step()
        assert torch.equal(main, layer.weight.float())
    assert torch.isfinite(main).all()


def test_another_tensor_at_the_same_address_is_seen(wrapped):
    memory = np.zeros(30, dtype=np.int16)

    def tensor_there(value):
        tensor = torch.from_numpy(memory).view(wrapped.weight.dtype).view(6, 5)
        tensor.fill_(value)
        return tensor

    addresses = set()
    for value in (0.5, 0.25, 3.0):
        wrapped.weight.data = tensor_there(value)
        addresses.add(wrapped.weight.data_ptr())
        wrapped.step_without_gradients()
        assert torch.equal(wrapped.main, torch.full((6, 5), value))
    assert len(addresses) == 1


def test_a_rebound_fp32_parameter_is_its_own_main_param():
    wrapped = Wrapped(torch.float32)
    wrapped.weight.data = torch.full((6, 5), 0.5)
    assert wrapped.main is wrapped.weight
    wrapped.loss(3).backward()
    grad = wrapped.weight.grad.clone()
    assert grad.count_nonzero()
    wrapped.optimizer.step()
    assert torch.equal(wrapped.weight, torch.full((6, 5), 0.5).add_(grad, alpha=-0.01))


# -- a step between forward and backward


def lion(params):
    return Lion(params, lr=0.01, weight_decay=0.1)


INNERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Lion": lion,
    "writes through data": ThroughData,
}


@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_step_between_forward_and_backward_raises_torchs_own_error(dtype, make):
    wrapped = Wrapped(dtype, make)
    for number in range(3):
        wrapped.loss(number).backward()
        early = wrapped.loss(number)
        wrapped.optimizer.step()
        wrapped.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            early.backward()
        wrapped.optimizer.zero_grad()
        wrapped.train(number)
    assert all(torch.isfinite(p).all() for p in wrapped.net.parameters())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_step_that_moves_nothing_does_not_disturb_a_graph(dtype):
    wrapped = Wrapped(dtype)
    for number in range(3):
        early = wrapped.loss(number)
        wrapped.step_without_gradients()
        early.backward()
        assert wrapped.weight.grad.count_nonzero()
        wrapped.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_skipped_step_does_not_disturb_a_graph(dtype):
    wrapped = Wrapped(dtype)
    wrapped.weight.grad = torch.full((6, 5), torch.inf)
    early = wrapped.loss(0)
    with pytest.warns(RuntimeWarning, match="skipped"):
        wrapped.optimizer.step()
    assert wrapped.optimizer.step_was_skipped
    wrapped.optimizer.zero_grad()
    early.backward()
    assert wrapped.weight.grad.count_nonzero()


# -- train and eval


class Averaging(torch.optim.SGD):
    """Schedule-free in miniature: eval() shows other parameters than train() steps."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr=lr)
        self.param_groups[0]["mode"] = "train"

    @torch.no_grad()
    def _switch(self, mode, factor):
        if self.param_groups[0]["mode"] != mode:
            self.param_groups[0]["mode"] = mode
            for param in self.param_groups[0]["params"]:
                param.data.mul_(factor)

    def train(self):
        self._switch("train", 4.0)

    def eval(self):
        self._switch("eval", 0.25)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_eval_and_train_reach_the_inner_optimizer_and_refresh_the_model(dtype):
    wrapped = Wrapped(dtype, Averaging)
    twin = Wrapped(dtype, Averaging)
    for number in range(3, 6):
        before = [bits(p) for p in wrapped.net.parameters()]
        mains = [bits(main) for main in wrapped.main_params]
        for _ in range(2):  # the second changes nothing
            wrapped.optimizer.eval()
            assert wrapped.optimizer.param_groups[0]["mode"] == wrapped.inner.param_groups[0]["mode"] == "eval"
            for param, kept in zip(wrapped.net.parameters(), before, strict=True):
                assert torch.equal(param, kept.view(param.dtype) * 0.25)
        for _ in range(2):
            wrapped.optimizer.train()
            assert wrapped.optimizer.param_groups[0]["mode"] == wrapped.inner.param_groups[0]["mode"] == "train"
            assert [bits(p).tolist() for p in wrapped.net.parameters()] == [kept.tolist() for kept in before]
            assert [bits(main).tolist() for main in wrapped.main_params] == [kept.tolist() for kept in mains]
        wrapped.train(number)
        twin.train(number)
    for ours, theirs in zip(wrapped.main_params, twin.main_params, strict=True):
        assert torch.isfinite(ours).all()
        assert torch.equal(bits(ours), bits(theirs))


def test_eval_disturbs_a_graph_that_needs_the_weights_it_changed():
    wrapped = Wrapped(torch.float32, Averaging)
    early = wrapped.loss(0)
    wrapped.optimizer.eval()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_eval_and_train_of_an_inner_optimizer_without_them_change_nothing(dtype):
    wrapped = Wrapped(dtype)
    before = [bits(t).tolist() for t in [*wrapped.net.parameters(), *wrapped.main_params]]
    versions = [p._version for p in wrapped.net.parameters()]
    for switch in (wrapped.optimizer.eval, wrapped.optimizer.train, wrapped.optimizer.train):
        switch()
        assert [bits(t).tolist() for t in [*wrapped.net.parameters(), *wrapped.main_params]] == before
        assert [p._version for p in wrapped.net.parameters()] == versions


def test_edits_made_in_eval_mode_survive_the_switch_back():
    wrapped = Wrapped(torch.bfloat16, Averaging)
    wrapped.optimizer.eval()
    with torch.no_grad():
        wrapped.weight[0].fill_(0.5)
    wrapped.optimizer.train()
    assert torch.equal(wrapped.main[0], torch.full((5,), 2.0))
    assert torch.equal(wrapped.weight[0], torch.full((5,), 2.0, dtype=torch.bfloat16))
