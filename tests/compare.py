"""How tests compare: by bits, and never without a look whether values are finite."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor's bits as integers, so that equal means bit-equal, NaN and -0.0 included."""
    return tensor.detach().clone().view(_INTEGERS[tensor.element_size()])


def assert_bit_equal(ours: Iterable[Tensor] | dict[Any, Tensor], theirs: Iterable[Tensor] | dict[Any, Tensor]) -> None:
    """Assert that tensors, in order or by name, are finite, and equal in dtype, shape and every bit."""
    found, needed = (dict(each if isinstance(each, dict) else enumerate(each)) for each in (ours, theirs))
    assert found.keys() == needed.keys()
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
        assert tensor.dtype is needed[name].dtype, name
        assert torch.equal(bits(tensor), bits(needed[name])), name


def assert_equal_parameters(net: nn.Module, other: nn.Module) -> None:
    """Assert that two models have the same parameters, bit for bit."""
    assert_bit_equal(dict(net.named_parameters()), dict(other.named_parameters()))


def assert_is_finite_and_moved(net: nn.Module, start: nn.Module | dict[str, Tensor]) -> None:
    """Assert that training moved each parameter away from ``start``: a model as it was, or tensors by name."""
    start = dict(start.named_parameters()) if isinstance(start, nn.Module) else start
    for name, param in net.named_parameters():
        assert torch.isfinite(param).all(), name
        assert not torch.equal(param, start[name]), name


def values(net: nn.Module) -> list[Tensor]:
    """Return copies of the parameters, which are finite."""
    found = [param.detach().clone() for param in net.parameters()]
    assert all(torch.isfinite(value).all() for value in found)
    return found


def main_params(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the main_params of a wrapper of a low-precision model, in order, as its state dict holds them."""
    state = optimizer.state_dict()["state"]
    return [state[index]["main_param"] for index in range(len(state))]


def everything(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return copies of parameters, main_params and inner state: what a skipped step must leave alone."""
    tensors = [*net.parameters(), *(entry.main_param for entry in optimizer._buffers.entries)]
    tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def snapshot(net: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name."""
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def frozen(value: Any) -> Any:
    """Return ``value`` with every tensor turned into its dtype, shape and bytes: equal means bit-equal."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().clone().reshape(-1).view(torch.uint8).tolist())
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    return type(value)(map(frozen, value)) if type(value) in (list, tuple) else value


def through_a_file(value: Any, *, weights_only: bool = True) -> Any:
    """Save ``value`` with torch and load it again."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
