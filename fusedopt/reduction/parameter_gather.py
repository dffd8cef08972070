"""Bring every rank's updated part of the model parameters to all ranks, at once or under the next forward.

    parameters -> layout -> buffers -> arrival -> reduction -> clip -> step -> write-back -> [gather]

A parameter whose values are still on their way changes its class to `PendingParameter`, which waits for them at the
first use by any torch function, and changes back. So nobody, a forward, a state dict, an evaluation, sees a half.

Knows nothing of gradients or of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fusedopt.buffers.bucket import Bucket
from fusedopt.buffers.flat import Buffers
from fusedopt.sharding.comm import DataParallelGroup, Pending

_KEY = "pending_gather"

_BLIND = {
    *(getattr(torch.Tensor, name).__get__ for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout")),
    *(getattr(torch.Tensor, name).__get__ for name in ("grad_dtype", "grad_fn", "is_leaf", "ndim", "_version")),
    *(vars(torch._C.TensorBase)["grad"].__set__, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.dim),
}
"""What does not look at values; `zero_grad`, which stands between step and forward, is made of it."""


class BucketGather:
    """One bucket's parameters on their way."""

    def __init__(self, bucket: Bucket, pending: Pending) -> None:
        self._pending = pending
        self._params = [entry.param for entry in bucket.entries]

    def lend_out(self) -> None:
        """Let the parameters be used: the first use of one finishes the gather of all."""
        for param in self._params:
            if type(param) is nn.Parameter:  # a class of the user's own has a torch function of its own
                vars(param)[_KEY] = self
                param.__class__ = PendingParameter
        if not all(type(param) is PendingParameter for param in self._params):
            self.finish()

    def finish(self) -> None:
        """Wait until the values are there."""
        self._pending.wait()
        for param in self._params:
            if vars(param).pop(_KEY, None) is not None:
                param.__class__ = nn.Parameter
        self._params = []


class PendingParameter(nn.Parameter):
    """A Parameter whose values are still arriving; a plain one again as soon as anything uses it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Finish the gathers of all pending arguments, then run ``func`` on what are plain Parameters now."""
        kwargs = kwargs or {}
        if func in _BLIND:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for param in _pending_in((args, kwargs)):
            vars(param)[_KEY].finish()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        vars(self)[_KEY].finish()
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, proto: Any) -> Any:
        vars(self)[_KEY].finish()
        return self.__reduce_ex__(proto)


def _pending_in(value: Any) -> Iterator[PendingParameter]:
    # Not by `nested`: runs in every torch function on such parameters, and looks at arguments as torch passes them.
    if type(value) is PendingParameter:
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pending_in(item)
    elif isinstance(value, dict):
        yield from _pending_in(list(value.values()))


class Gather:
    """The gathers of one wrapper.

    Args:
        comm: the ranks.
        buffers: whose buckets are gathered.
        overlap: leave gathers unfinished until a parameter is used.
    """

    def __init__(self, comm: DataParallelGroup, buffers: Buffers, *, overlap: bool) -> None:
        self._comm = comm
        self._buffers = buffers
        self._overlap = overlap
        self._started: list[BucketGather] = []

    def start(self, *, may_overlap: bool) -> None:
        """Gather all buckets, in the order in which a forward uses them: the reverse of their own.

        Args:
            may_overlap: False waits for them, whatever the setting.
        """
        if not self._buffers.sharding.is_sharded:
            return
        for bucket in reversed(self._buffers.buckets):
            if bucket.model is not None:
                self._started.append(BucketGather(bucket, self._comm.start_gather(bucket.model)))
        if self._overlap and may_overlap:
            for gather in self._started:
                gather.lend_out()
        else:
            self.finish()

    def finish(self) -> None:
        """Wait for all that are unfinished: model parameters are whole."""
        while self._started:
            self._started.pop().finish()
