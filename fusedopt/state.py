"""State dicts: per-parameter, in full precision, checked before anything is written.

    ... -> step -> write-back -> gather -> [checkpoint]

The format is torch's own packed one, so that stock tools read it: ``state`` by
parameter number, with ``main_param`` beside the inner state, and ``param_groups``;
plus one key ``fusedopt`` with names, shapes and dtypes. Tensors and builtins only.

Knows nothing of hooks or backends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt.buffers import Entry
from fusedopt.inner import Group, InnerOptimizers

FORMAT = 1
KEY = "fusedopt"

_PARAM_SHAPED_STATE = frozenset(
    (
        "exp_avg",
        "exp_avg_sq",
        "exp_inf",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "acc_delta",
        "grad_avg",
        "sum",
        "ax",
    )
)  # the names torch.optim 2.13 uses for state that has the shape of its parameter (Adafactor's factors: others)

_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, type(None))


class StateDicts:
    """Pack and unpack the state of one wrapper.

    Args:
        inner: the wrapped optimizers.
        outer_groups: the wrapper's groups, with model parameters.
        entries: all trainable parameters, by ``id`` of the model parameter.
    """

    def __init__(self, inner: InnerOptimizers, outer_groups: Sequence[Group], entries: Mapping[int, Entry]) -> None:
        self._inner = inner
        self._groups = outer_groups
        self._entries = entries
        self._params = [param for group in outer_groups for param in group["params"]]

    def pack(self) -> dict[str, Any]:
        """Return the state dict. Tensors are the live ones, not copies, as with torch.

        Raises:
            TypeError: naming a piece of inner state that is neither a tensor nor a builtin.
        """
        state: dict[Any, Any] = {}
        custom = {}
        for number, opt in enumerate(self._inner.optimizers):
            if has_own_format(opt):
                custom[number] = opt.state_dict()
        for index, param in enumerate(self._params):
            main = self._inner.main_of(param)
            home = self._inner.home_of(main)
            packed = dict(home.state.get(main, {})) if not has_own_format(home) else {}
            entry = self._entries.get(id(param))
            if entry is not None and entry.has_own_main_param:
                packed["main_param"] = entry.main_param.detach()
            if packed:
                state[index] = packed
        for opt in self._inner.optimizers:
            if not has_own_format(opt):
                state.update({key: value for key, value in opt.state.items() if not isinstance(key, Tensor)})
        packed_dict = {
            "state": state,
            "param_groups": self._pack_groups(),
            KEY: {**self._signature(), "inner": custom},
        }
        for index, value in state.items():
            check_plain(value, f"the state of parameter {self._name(index)}")
        check_plain({k: v for k, v in packed_dict.items() if k != "state"}, "the state dict")
        return packed_dict

    def _pack_groups(self) -> list[Group]:
        numbers = iter(range(len(self._params)))
        return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self._groups]

    def _signature(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "names": [name for group in self._groups for name in group.get("param_names", ())],
            "shapes": [list(param.shape) for param in self._params],
            "dtypes": [str(param.dtype) for param in self._params],
        }

    def _name(self, index: Any) -> str:
        if not isinstance(index, int):
            return repr(index)
        entry = self._entries.get(id(self._params[index]))
        return entry.slot.name if entry is not None else f"number {index}"

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state dict that does not fit, before anything is written.

        Raises:
            ValueError: naming the first group, parameter or key that differs, what was found and what was needed.
        """
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(f"not an optimizer state dict: it lacks {missing} (keys: {sorted(map(str, state_dict))})")
        found = [len(group["params"]) for group in state_dict["param_groups"]]
        needed = [len(group["params"]) for group in self._groups]
        if found != needed:
            raise ValueError(
                f"the state dict has {len(found)} parameter group(s) with {found} parameters; this optimizer has "
                f"{len(needed)} with {needed}. Build the optimizer over the same parameters as the saved one"
            )
        if KEY in state_dict:
            self._check_signature(state_dict[KEY])
        elif len(self._inner.optimizers) > 1 and any(map(has_own_format, self._inner.optimizers)):
            raise ValueError(
                "a bare state dict cannot be split over several inner optimizers with formats of their own"
            )
        for index, saved in self._by_index(state_dict).items():
            self._check_param(index, saved, is_ours=KEY in state_dict)

    def _by_index(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        return {index: state_dict["state"].get(number, {}) for index, number in enumerate(numbers)}

    def _check_signature(self, found: Mapping[str, Any]) -> None:
        needed = self._signature()
        if found.get("format") != FORMAT:
            raise ValueError(f"the state dict has format {found.get('format')!r}; this version reads format {FORMAT}")
        if not (found["names"] and needed["names"]):  # unnamed on one side: positions decide, as in torch
            needed["names"] = found["names"]
        for what in ("names", "shapes", "dtypes"):
            for index, (have, want) in enumerate(zip(found[what], needed[what], strict=True)):
                if have != want:
                    raise ValueError(
                        f"the state dict does not fit parameter {self._name(index)}: its {what[:-1]} was {have} when "
                        f"saved and is {want} here. Load it into the model and optimizer it was saved from"
                    )

    def _check_param(self, index: int, saved: Mapping[str, Any], *, is_ours: bool) -> None:
        entry = self._entries.get(id(self._params[index]))
        if entry is None:
            return
        if is_ours and entry.has_own_main_param and "main_param" not in saved:
            raise ValueError(f"the state dict has no main_param for parameter {entry.slot.name}; it is incomplete")
        current = self._inner.home_of(entry.main_param).state.get(entry.main_param, {})
        for key, value in saved.items():
            have = current.get(key) if key != "main_param" else entry.main_param
            if have is None and key in _PARAM_SHAPED_STATE:
                have = entry.main_param
            if isinstance(value, Tensor) and isinstance(have, Tensor) and value.shape != have.shape:
                raise ValueError(
                    f"the state dict does not fit parameter {entry.slot.name}: {key!r} has shape {tuple(value.shape)}, "
                    f"needed is {tuple(have.shape)}. Load it into the model and optimizer it was saved from"
                )
        main = saved.get("main_param")
        if main is not None and (not isinstance(main, Tensor) or main.dtype is not entry.main_param.dtype):
            raise ValueError(
                f"main_param of parameter {entry.slot.name} is {getattr(main, 'dtype', type(main))} in the state dict; "
                f"needed is {entry.main_param.dtype}"
            )

    def unpack(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict that `check` accepted, ours or a bare torch optimizer's, into existing storage."""
        by_index = self._by_index(state_dict)
        custom = state_dict.get(KEY, {}).get("inner", {})
        for number, opt in enumerate(self._inner.optimizers):
            if has_own_format(opt):
                part = custom.get(number, state_dict)
            else:
                part = self._part_for(number, state_dict, by_index)
            _load_in_place(opt, part)
        for index, saved in by_index.items():
            entry = self._entries.get(id(self._params[index]))
            if entry is not None and entry.has_own_main_param and "main_param" in saved:
                with torch.no_grad():
                    entry.main_param.copy_(saved["main_param"])
        for index, outer in enumerate(self._groups):
            inner = self._inner.group(index)
            outer.update({key: value for key, value in inner.items() if key != "params"})

    def _part_for(self, number: int, state_dict: Mapping[str, Any], by_index: Mapping[int, Any]) -> dict[str, Any]:
        """Cut out what belongs to inner optimizer ``number``, in torch's own packed form."""
        groups, state, index = [], {}, 0
        for position, saved_group in enumerate(state_dict["param_groups"]):
            indices = range(index, index + len(saved_group["params"]))
            index = indices.stop
            if self._inner.optimizer_of(position) is self._inner.optimizers[number]:
                groups.append({**saved_group, "params": list(indices)})
                for i in indices:
                    inner_state = {key: value for key, value in by_index[i].items() if key != "main_param"}
                    if inner_state:
                        state[i] = inner_state
        others = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)}
        return {"state": {**state, **others}, "param_groups": groups}


def has_own_format(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class has a ``state_dict`` or ``load_state_dict`` of its own."""
    cls = type(optimizer)
    return cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict


def _load_in_place(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load through the optimizer's own method, then keep the tensors it had where the new values fit them.

    torch's ``load_state_dict`` makes the caller's tensors the state; here they are copied.
    """
    before = dict(optimizer.state)
    groups_before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    if not has_own_format(optimizer):
        _restore_strings(optimizer, state_dict)
    with torch.no_grad():
        for key in list(optimizer.state):
            optimizer.state[key] = _settle(before.get(key), optimizer.state[key])
        for group, old in zip(optimizer.param_groups, groups_before, strict=True):
            for name, value in old.items():
                if isinstance(value, Tensor) and name in group:
                    group[name] = value.copy_(torch.as_tensor(group[name]))


def _restore_strings(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    # torch's load rebuilds every iterable from a generator, which turns a str into that generator's repr.
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        for key, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, (str, bytes)):
                optimizer.state[param][key] = value


def _settle(old: Any, new: Any) -> Any:
    """Return ``old`` holding the value of tensor ``new`` if it fits, else a copy that the caller does not share."""
    if isinstance(new, Tensor):
        fits = isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (
            new.shape,
            new.dtype,
            new.device,
        )
        return old.copy_(new) if fits else new.clone()
    if isinstance(new, dict):
        olds = old if isinstance(old, dict) else {}
        for key, value in new.items():
            new[key] = _settle(olds.get(key), value)
        return new
    if type(new) in (list, tuple):
        return type(new)(_settle(None, value) for value in new)
    return new


def check_plain(value: Any, where: str) -> None:
    """Raise unless ``value`` is made of plain tensors and builtins, which ``torch.load(weights_only=True)`` reads.

    Raises:
        TypeError: naming the place and the type found there.
    """
    if type(value) in (Tensor, torch.nn.Parameter) or type(value) in _PLAIN:
        return
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            check_plain(key, f"a key of {where}")
            check_plain(item, f"{where}, {key!r}")
    elif type(value) in (list, tuple, set):
        for item in value:
            check_plain(item, where)
    else:
        raise TypeError(
            f"{where} holds a {type(value).__module__}.{type(value).__qualname__}, which "
            "torch.load(weights_only=True) does not read; keep it as a tensor or a builtin in the inner optimizer, "
            "or give that class state_dict() and load_state_dict() that do"
        )
