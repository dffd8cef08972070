"""Inner state in fewer bytes between steps: bfloat16, or 8 bits; float32 while its parameters are stepped.

    ... -> clip -> [widen -> inner step -> narrow] -> ...

What is narrowed is a float32 tensor of its parameter's shape, of a parameter of at least `SMALLEST` elements, and no
step count. In an optimizer's state a *narrow* one is a dict of its codes and, of 8 bits, of its scales, so that whoever
copies, saves or sends state does so as it is. What follows the parameter itself stays float32: a copy of the weights or
an average of them (schedule-free's z, ASGD's ax), of which 8 bits would be a percent off; the probe tells which.

Rounding is stochastic, by a hash of (seed of the tensor's name, count of narrowings, element): the same on any number
of ranks, and after a resume, for the count is in the state. Narrowing what was widened gives the same bits, whatever
the count, so that state that travels as float32 (`consolidate_state_dict`, torch's checkpoints) loses nothing. 8-bit
blocks are counted from the start of a parameter in memory; a shard never cuts one.

Knows nothing of the step, ranks or files.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt.buffers.bucket import Entry
from fusedopt.buffers.encodings import NOISE_ROW, Noise, narrow_bf16_
from fusedopt.buffers.int8 import BLOCK, decode_int8_, encode_int8_, num_blocks
from fusedopt.nested import Path, items_of, leaves, map_leaves
from fusedopt.sharding.local_state import Cut, labelled, take

CODES, SCALES, COUNT = "fusedopt.codes", "fusedopt.scales", "fusedopt.narrowings"
"""Keys: of a narrow tensor, and beside it in the state of its parameter."""

_MAIN_PARAM: Path = ("main_param",)

SMALLEST = BLOCK
"""Elements of a parameter whose state is narrowed; of fewer there is nothing to gain."""


def is_narrow(value: Any) -> bool:
    """Return whether ``value`` is what a tensor of state becomes between steps."""
    return type(value) is dict and CODES in value


def widen(narrow: Mapping[str, Tensor], wide: Tensor | None = None) -> Tensor:
    """Return the float32 tensor of ``narrow``, in its memory order; in ``wide``, if that is given."""
    codes = narrow[CODES]
    wide = torch.empty_like(codes, dtype=torch.float32) if wide is None else wide
    if codes.dtype is torch.bfloat16:
        return wide.copy_(codes)
    decode_int8_(_flat(codes), narrow[SCALES], _flat(wide), is_signed=codes.dtype is torch.int8)
    return wide


def widened(state: Any) -> Any:
    """Return state of one parameter as it would be without narrowing: float32 tensors, new ones, and no count."""
    made = widened_in(state)
    if isinstance(made, MutableMapping):
        made.pop(COUNT, None)
    return made


def widened_in(value: Any) -> Any:
    """Return a state dict, of any format, with a new float32 tensor in the place of every narrow one."""
    return map_leaves(lambda _, leaf: widen(leaf) if is_narrow(leaf) else leaf, value, is_leaf=is_narrow)


def without_narrow(value: Any) -> Any:
    """Return a state dict, of any format, as it would be without narrowing; what it holds is not changed."""
    return _without_counts(widened_in(value))


def _without_counts(value: Any) -> Any:
    items = items_of(value)
    if items is None or is_narrow(value):
        return value
    for _, item in list(items):
        if isinstance(item, dict) and not getattr(item, "__dict__", None):
            item.pop(COUNT, None)
        _without_counts(item)
    return value


def counts_of(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[Tensor, int]:
    """Return how often state was narrowed, by parameter, as torch's packed form says; none for any other."""
    try:
        saved, groups = state_dict["state"], state_dict["param_groups"]
        numbers = [number for group in groups for number in group["params"]]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        pairs = list(zip(numbers, params, strict=True))
        return {param: _count_of(saved[number]) for number, param in pairs if number in saved}
    except (KeyError, TypeError, ValueError):
        return {}


def narrow_dtypes(value: Any) -> str:
    """Return the `MainGradConfig.state_dtype` that ``value`` was narrowed by; several are joined by "and"."""
    found = [unlabelled(leaf)[CODES] for _, leaf in _narrow_in(value)]
    names = sorted({"bfloat16" if codes.dtype is torch.bfloat16 else "int8" for codes in found})
    return " and ".join(names) or "float32"


def _narrow_in(value: Any) -> Iterator[tuple[Path, dict[str, Any]]]:
    return ((path, leaf) for path, leaf in leaves(value, is_leaf=is_narrow) if is_narrow(leaf))


def unlabelled(narrow: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a narrow tensor without what `label` put around the tensors of a slice."""
    return {key: (labelled(value) or (None, value))[1] for key, value in narrow.items()}


def opened(saved: Mapping[str, Any], cut: Cut) -> dict[str, Any]:
    """Return saved state of a parameter with narrow tensors as this rank takes them: whole ones that it cuts, widened.

    Raises:
        ValueError: for the part of another layout.
    """

    def act(_: Path, leaf: Any) -> Any:
        if not is_narrow(leaf):
            return leaf
        if labelled(leaf[CODES]) is not None:
            take(leaf[CODES], cut)  # raises
            return unlabelled(leaf)
        return widen(leaf) if cut.is_partial or cut.region is not None else leaf

    made: dict[str, Any] = map_leaves(act, dict(saved), is_leaf=is_narrow)
    return made


def why_damaged(state: Any, shape: torch.Size) -> tuple[str, str] | None:
    """Return the name of a tensor in loaded state, and why it is no narrow one of ``shape``; None where all are."""
    found = ((path[0], _why_damaged(leaf, shape)) for path, leaf in _narrow_in(state))
    return next(((name, why) for name, why in found if why is not None), None)


def _why_damaged(narrow: Mapping[str, Any], shape: torch.Size) -> str | None:
    codes, scales = narrow[CODES], narrow.get(SCALES)
    if not isinstance(codes, Tensor) or codes.shape != shape:
        return f"has codes of shape {tuple(getattr(codes, 'shape', ()))}, needed is {tuple(shape)}"
    if codes.dtype not in (torch.bfloat16, torch.int8, torch.uint8):
        return f"has codes of {codes.dtype}, needed is torch.bfloat16, int8 or uint8"
    needed = (num_blocks(codes.numel()),) if codes.dtype is not torch.bfloat16 else None
    if needed is not None and (not isinstance(scales, Tensor) or scales.shape != needed):
        return f"has scales of shape {tuple(getattr(scales, 'shape', ()))}, needed is {needed}"
    return None


def may_be_narrow(value: Any, path: Path, part: torch.Size, whole_numel: int) -> bool:
    """Return whether a leaf of state is a float32 tensor of its parameter's shape, and worth narrowing.

    Args:
        value: the leaf.
        path: of it, in its parameter's state.
        part: shape of the main_param.
        whole_numel: elements of the parameter, of which that may be a part.
    """
    return (
        isinstance(value, Tensor)
        and value.dtype is torch.float32
        and value.shape == part
        and whole_numel >= SMALLEST
        and "step" not in path
    )


@dataclass(frozen=True)
class Narrowing:
    """How the state of one inner optimizer is held between steps.

    Args:
        dtype: as `MainGradConfig.state_dtype`; of ``"float32"`` nothing is narrowed, and steps are counted where
            main_params lose digits.
        wide: paths in a parameter's state that stay float32.
        nonnegative: paths whose values never are negative.
    """

    dtype: str
    wide: frozenset[Path] = frozenset()
    nonnegative: frozenset[Path] = frozenset()

    def takes(self, value: Any, path: Path, entry: Entry) -> bool:
        """Return whether a leaf of the state of ``entry`` is narrowed."""
        main = entry.main_param
        if self.dtype == "float32" or main is None or path in self.wide:
            return False
        return may_be_narrow(value, path, main.shape, entry.slot.numel)

    def fits(self, narrow: Mapping[str, Tensor], path: Path) -> bool:
        """Return whether ``narrow`` is held as this would hold it."""
        return self.dtype != "float32" and path not in self.wide and narrow[CODES].dtype is self._codes_dtype(path)

    def _codes_dtype(self, path: Path) -> torch.dtype:
        if self.dtype == "bfloat16":
            return torch.bfloat16
        return torch.uint8 if path in self.nonnegative else torch.int8

    def narrow(
        self,
        wide: Tensor,
        path: Path,
        strides: tuple[int, ...],
        noise: Noise,
        first: int,
        into: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return what ``wide`` becomes.

        Args:
            wide: float32, in any memory order.
            path: of it, in its parameter's state.
            strides: dense ones, of what it becomes.
            noise: of a range that holds these elements.
            first: number of its first element, as the noise counts.
            into: what it was narrowed into before, if it was; filled again, where that fits.
        """
        dtype = self._codes_dtype(path)
        if into is not None and into[CODES].dtype is dtype and into[CODES].stride() == strides:
            narrow = dict(into)
        else:
            narrow = {CODES: torch.empty_strided(wide.shape, strides, dtype=dtype, device=wide.device)}
            if dtype is not torch.bfloat16:
                narrow[SCALES] = torch.empty(num_blocks(wide.numel()), device=wide.device)
        codes = narrow[CODES]
        if wide.stride() != strides:
            wide = torch.empty_strided(wide.shape, strides, dtype=wide.dtype, device=wide.device).copy_(wide)
        if dtype is torch.bfloat16:
            narrow_bf16_(_flat(wide), _flat(codes), noise=noise, first=first)
        else:
            is_signed = dtype is torch.int8
            encode_int8_(_flat(wide), _flat(codes), narrow[SCALES], is_signed=is_signed, noise=noise, first=first)
        return narrow

    def narrowed(self, state: Mapping[Any, Any], entry: Entry, first: int) -> dict[Any, Any]:
        """Return saved state, as it is held: narrow where it was wide, and the other way round.

        Args:
            state: of ``entry``, this rank's part. Read.
            entry: the parameter.
            first: number of the first element of the part; see `numbering`.
        """
        count = _count_of(state)

        def hold(path: Path, leaf: Any) -> Any:
            if is_narrow(leaf):
                if self.fits(leaf, path):
                    return leaf
                leaf = widen(leaf)
            if not self.takes(leaf, path, entry):
                return leaf
            noise = noise_for(path, count, first, leaf.numel(), leaf.device)
            return self.narrow(leaf, path, _strides_of(entry, leaf), noise, first)

        held = {key: map_leaves(hold, value, is_leaf=is_narrow, path=(key,)) for key, value in state.items()}
        if not (entry.is_lossy or any(_narrow_in(held))):
            held.pop(COUNT, None)
        return held


def numbering(groups: Sequence[Sequence[Tensor]], entries: Mapping[int, Entry]) -> dict[int, int]:
    """Return the number of the first element of every entry's part, by ``id`` of the model parameter.

    Parameters are counted as they stand in the groups, frozen ones included, each from a multiple of `NOISE_ROW` on:
    so it depends neither on ranks nor on buckets.

    Args:
        groups: model parameters, by group.
        entries: the trainable ones, by ``id``.
    """
    numbers, start = {}, 0
    for param in (param for params in groups for param in params):
        entry = entries.get(id(param))
        if entry is not None and entry.part is not None:
            numbers[id(param)] = start + _rows_before(entry) + entry.part.start
        start += -(-param.numel() // NOISE_ROW) * NOISE_ROW
    return numbers


def _rows_before(entry: Entry) -> int:
    """Return how many elements of a DTensor lie before its local part, where that is a block of rows."""
    region, local = entry.cut.region if entry.slot.is_dtensor else None, entry.slot.shape
    if region is None or any(region[1][1:]) or tuple(region[0][1:]) != tuple(local[1:]):
        return 0
    return region[1][0] * local[1:].numel() if len(local) else 0


@dataclass
class _Opened:
    entry: Entry
    number: Callable[[], int]
    state: MutableMapping[Any, Any]
    count: int = 0
    narrow: dict[Path, dict[str, Tensor]] = field(default_factory=dict)


class Opened:
    """The state of a few main_params, float32 until `close`, which narrows main_params that are split, too.

    Args:
        narrowing: how it is held.
        optimizer: the inner one.
        entries: that it updates here.
        number_of: gives the number of the first element of an entry's part, see `numbering`.
        scratch: by device: float32, 1-D, which this may make longer; in use until `close`.
    """

    def __init__(
        self,
        narrowing: Narrowing,
        optimizer: Optimizer,
        entries: Sequence[Entry],
        number_of: Callable[[Entry], int],
        scratch: dict[torch.device, Tensor],
    ) -> None:
        self._narrowing = narrowing
        self._optimizer = optimizer
        self._noises: dict[tuple[Path, int], Noise] = {}
        self._opened = [_Opened(entry, functools.partial(number_of, entry), {}) for entry in entries]
        for opened in self._opened:
            state = self._state_of(opened.entry)
            if state:
                opened.state, opened.count = state, _count_of(state)
                state.pop(COUNT, None)
                opened.narrow = dict(_narrow_in(state))
        memory = _wide_for([narrow for opened in self._opened for narrow in opened.narrow.values()], scratch)
        for opened in self._opened:
            wide = {path: widen(narrow, next(memory)) for path, narrow in opened.narrow.items()}
            replace(opened.state, functools.partial(_instead, wide))

    def _state_of(self, entry: Entry) -> MutableMapping[Any, Any]:
        states: Mapping[Any, Any] = self._optimizer.state
        state = states.get(entry.main_param)
        return state if isinstance(state, MutableMapping) else {}

    @torch.no_grad()
    def close(self) -> None:
        """Narrow what the step left."""
        for opened in self._opened:
            opened.state = self._state_of(opened.entry)
            was_narrowed = self._narrow_main_param(opened)

            def hold(path: Path, leaf: Any, opened: _Opened = opened) -> Any:
                nonlocal was_narrowed
                if not self._narrowing.takes(leaf, path, opened.entry):
                    return leaf
                was_narrowed = True
                noise = self._noise_of(path, opened.count, leaf.device)
                strides = _strides_of(opened.entry, leaf)
                return self._narrowing.narrow(leaf, path, strides, noise, opened.number(), opened.narrow.get(path))

            replace(opened.state, hold)
            if was_narrowed:
                opened.state[COUNT] = opened.count + 1
                states: MutableMapping[Any, Any] = self._optimizer.state
                states.setdefault(opened.entry.main_param, opened.state)  # of an inner optimizer that keeps none

    def _narrow_main_param(self, opened: _Opened) -> bool:
        """Narrow the main_param, where it is split; return whether that lost digits."""
        entry = opened.entry
        if entry.is_lossy:
            entry.narrow(self._noise_of(_MAIN_PARAM, opened.count, entry.bucket.device), opened.number())
        else:
            entry.narrow()
        return entry.is_lossy

    def _noise_of(self, path: Path, count: int, device: torch.device) -> Noise:
        """Return the noise of all parameters that were narrowed ``count`` times."""
        if (path, count) not in self._noises:
            alike = [opened for opened in self._opened if opened.count == count]
            first = min(opened.number() for opened in alike)
            end = max(o.number() + o.entry.main_param.numel() for o in alike if o.entry.main_param is not None)
            self._noises[path, count] = noise_for(path, count, first, end - first, device)
        return self._noises[path, count]


def _strides_of(entry: Entry, part: Tensor) -> tuple[int, ...]:
    """Return the memory order of a parameter, for state of all of it, or of a part, which is 1-D."""
    return entry.slot.strides if part.shape == entry.slot.shape else (1,)


def _instead(wide: Mapping[Path, Tensor], path: Path, leaf: Any) -> Any:
    return wide.get(path, leaf)


def _count_of(state: Mapping[Any, Any]) -> int:
    count = state.get(COUNT, 0) if isinstance(state, Mapping) else 0
    return count if type(count) is int else 0


def replace(state: MutableMapping[Any, Any], act: Callable[[Path, Any], Any]) -> None:
    """Put what ``act`` makes of each leaf in its place; a container inside is made anew where that changes something.

    Args:
        state: of one parameter. Written.
        act: gets the path and the leaf; a narrow tensor is one.
    """
    for key, value in list(state.items()):
        made = map_leaves(act, value, is_leaf=is_narrow, path=(key,))
        pairs = zip(leaves(made, is_leaf=is_narrow), leaves(value, is_leaf=is_narrow), strict=True)
        if any(new is not old for (_, new), (_, old) in pairs):
            state[key] = made


def noise_for(path: Path, count: int, first: int, numel: int, device: torch.device) -> Noise:
    """Return the noise of ``numel`` elements from ``first`` on of all state at ``path``, narrowed ``count`` times."""
    return Noise(zlib.crc32(repr(path).encode()), count, first, max(1, numel), device)


def _wide_for(narrow: Sequence[Mapping[str, Tensor]], scratch: dict[torch.device, Tensor]) -> Iterator[Tensor]:
    """Yield a float32 tensor for each, in memory that is scratch."""
    if not narrow:
        return
    device = narrow[0][CODES].device
    sizes = [-(-item[CODES].numel() // BLOCK) * BLOCK for item in narrow]
    if device not in scratch or scratch[device].numel() < sum(sizes):
        scratch[device] = torch.empty(sum(sizes), device=device)
    start = 0
    for item, size in zip(narrow, sizes, strict=True):
        yield scratch[device].as_strided(item[CODES].shape, item[CODES].stride(), start)
        start += size


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of ``tensor``, which has no gaps, in its order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
