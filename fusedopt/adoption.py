"""Which parameters have buffers, hooks and a main_param: taken on by group, later when unfrozen, given back at the end.

    [parameters] -> layout -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

Holds no reference to the wrapper, so that a wrapper that is dropped can be finalised through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fusedopt import stock_clip
from fusedopt.arrival import Arrival
from fusedopt.buffers import Buffers, Entry
from fusedopt.checks import check_trainable, named_params
from fusedopt.gather import Gather
from fusedopt.inner import Group, InnerOptimizers


class Adoption:
    """The parameters of one wrapper.

    Args:
        inner: whose groups get main_params.
        buffers: make and hold the memory.
        arrival: hooks the parameters.
        gather: finished before parameters are given back.
        shard_by: tells of each outer group whether its parameters may be cut, see `plan_buckets`; None: not sharded.
    """

    def __init__(
        self,
        inner: InnerOptimizers,
        buffers: Buffers,
        arrival: Arrival,
        gather: Gather,
        shard_by: Callable[[int], str] | None,
    ) -> None:
        self._inner = inner
        self._buffers = buffers
        self._arrival = arrival
        self._gather = gather
        self._shard_by = shard_by
        self._frozen: list[tuple[int, str, nn.Parameter]] = []
        self.entries: dict[int, Entry] = {}
        """All trainable parameters, by ``id`` of the model parameter."""
        self.unfrozen: list[nn.Parameter] = []
        """Those that began to require a gradient after wrapping, in that order: their memory lies apart."""

    def adopt_group(self, index: int, group: Group) -> None:
        """Give buffers, hooks and main_params to the trainable parameters of outer group ``index``."""
        named = named_params(group, index)
        self._adopt(index, [(name, param) for name, param in named if param.requires_grad])
        for name, param in named:
            if not param.requires_grad:
                self._arrival.watch_frozen(name, param)
                self._frozen.append((index, name, param))

    def adopt_unfrozen(self) -> None:
        """Do the same for parameters that began to require a gradient since.

        Raises:
            TypeError, ValueError, RuntimeError: as wrapping; nothing was changed.
        """
        unfrozen = [item for item in self._frozen if item[2].requires_grad]
        if not unfrozen:
            return
        for _, name, param in unfrozen:
            check_trainable(name, param)
        self._frozen = [item for item in self._frozen if not item[2].requires_grad]
        for index, name, param in unfrozen:
            self._arrival.unwatch(param)
            self.unfrozen.append(param)
            self._adopt(index, [(name, param)])

    def _adopt(self, index: int, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        shard_by = self._shard_by(index) if self._shard_by is not None else "element"
        entries = self._buffers.add(index, named, shard_by)
        self._arrival.watch(entries)
        self._inner.adopt(index, entries)
        self.entries.update((id(entry.param), entry) for entry in entries)

    def release(self) -> None:
        """Give every parameter back as torch made it, and the inner optimizers their model parameters.

        The garbage collector calls this wherever it runs: while torch.compile traces over fake tensors, in inference
        mode. What those change about tensors is not meant for ours.
        """
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            self._gather.finish()
            self._inner.release()
            self._arrival.release()
            stock_clip.unwatch(self._buffers)
            self._buffers.release()
            self.entries.clear()
            self._frozen.clear()
            self.unfrozen.clear()
