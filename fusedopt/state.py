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
from itertools import zip_longest
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

    def main_params(self) -> list[Tensor | None]:
        """Return every parameter's main_param where that is a tensor of its own, in order of the groups."""
        return [self._main_param(param) for param in self._params]

    def _main_param(self, param: Tensor) -> Tensor | None:
        entry = self._entries.get(id(param))
        if entry is None:
            return self._inner.set_aside.get(id(param))
        return entry.main_param.detach() if entry.main_param is not None and entry.is_rounded else None

    @torch.no_grad()
    def set_main_params(self, values: Sequence[Tensor | None]) -> None:
        """Fill main_params from what `main_params` returned; None leaves one as it is.

        A parameter that is frozen has no main_param yet; its value is set aside until it is unfrozen.
        """
        for param, value in zip(self._params, values, strict=True):
            current = self._main_param(param)
            if value is None:
                continue
            if current is not None:
                current.copy_(value)
            elif id(param) not in self._entries:
                self._inner.set_aside[id(param)] = value.to(param.device, copy=True)

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
            own_main_param = self._main_param(param)
            if own_main_param is not None:
                packed["main_param"] = own_main_param
            if packed:
                state[index] = packed
        others = {
            number: {key: value for key, value in opt.state.items() if not isinstance(key, Tensor)}
            for number, opt in enumerate(self._inner.optimizers)
            if not has_own_format(opt)
        }
        for values in others.values():
            state.update(values)
        signature = {**self._signature(), "inner": custom}
        if len(others) > 1 and any(others.values()):
            signature["others"] = others  # apart, too: two optimizers may use the same key
        packed_dict = {"state": state, "param_groups": self._pack_groups(), KEY: signature}
        for index, value in state.items():
            check_plain(index, "a key of the state")
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
        if entry is not None:
            return entry.slot.name
        names = self._signature()["names"]
        return names[index] if names else f"number {index}"

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state dict that does not fit, before anything is written.

        Raises:
            ValueError: naming the first group, parameter or key that differs, what was found and what was needed.
        """
        missing = [key for key in ("state", "param_groups") if key not in state_dict]
        if missing:
            raise ValueError(f"not an optimizer state dict: it lacks {missing} (keys: {sorted(map(str, state_dict))})")
        if not all(isinstance(g, Mapping) and "params" in g for g in state_dict["param_groups"]):
            raise ValueError('not an optimizer state dict: a group in its "param_groups" lacks "params"')
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
        if not isinstance(found, Mapping) or found.get("format") != FORMAT:
            have = found.get("format") if isinstance(found, Mapping) else found
            raise ValueError(f"the state dict has {KEY} format {have!r}; this version reads format {FORMAT}")
        for what in ("names", "shapes", "dtypes"):
            have = len(found.get(what, ()))
            if have != len(self._params) and (what != "names" or have):
                raise ValueError(
                    f"the state dict is damaged: it has {have} {what} for {len(self._params)} parameters. "
                    "Load another copy"
                )
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
        param = self._params[index]
        own_main_param = self._main_param(param)
        if is_ours and own_main_param is not None and "main_param" not in saved:
            raise ValueError(f"the state dict has no main_param for parameter {self._name(index)}; it is incomplete")
        here = self._inner.main_of(param)
        # Other classes give these names to state of other shapes, too (low-rank moments, growing histories).
        is_torchs = type(self._inner.home_of(here)).__module__.startswith("torch.optim")
        for key, value in saved.items():
            has_param_shape = key == "main_param" or (is_torchs and key in _PARAM_SHAPED_STATE)
            if has_param_shape and isinstance(value, Tensor) and value.shape != here.shape:
                raise ValueError(
                    f"the state dict does not fit parameter {self._name(index)}: {key!r} has shape "
                    f"{tuple(value.shape)}, needed is {tuple(here.shape)}. Load it into the model and optimizer it was "
                    "saved from"
                )
        main = saved.get("main_param")
        if main is not None and (not isinstance(main, Tensor) or main.dtype is not torch.float32):
            raise ValueError(
                f"main_param of parameter {self._name(index)} is {getattr(main, 'dtype', type(main))} in the state "
                "dict; needed is torch.float32"
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
            _load_in_place(opt, part, is_ours=KEY in state_dict)
        self.set_main_params([saved.get("main_param") for saved in by_index.values()])
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
        others = state_dict.get(KEY, {}).get("others", {}).get(number)
        if others is None:
            others = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)}
        return {"state": {**state, **others}, "param_groups": groups}


def has_own_format(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's class has a ``state_dict`` or ``load_state_dict`` of its own."""
    cls = type(optimizer)
    return cls.state_dict is not Optimizer.state_dict or cls.load_state_dict is not Optimizer.load_state_dict


def copy_for_hooks(state_dict: Any) -> dict[str, Any]:
    """Return a shallow copy of a state dict, for load hooks to change.

    Raises:
        ValueError: if it is no mapping at all.
    """
    if not isinstance(state_dict, Mapping):
        raise ValueError(
            f"not an optimizer state dict but a {type(state_dict).__name__}; load what state_dict() returned"
        )
    return dict(state_dict)


def _load_in_place(optimizer: Optimizer, state_dict: dict[str, Any], *, is_ours: bool) -> None:
    """Load through the optimizer's own method, then keep the tensors it had where the new values fit them.

    torch's ``load_state_dict`` makes the caller's tensors the state; here they are copied.
    """
    before = dict(optimizer.state)
    groups_before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state_dict)
    saved = {} if has_own_format(optimizer) else _by_param(optimizer, state_dict)
    with torch.no_grad():
        for key, loaded in list(optimizer.state.items()):
            value = _undo_casts(saved.get(key, loaded), loaded, is_ours=is_ours)
            optimizer.state[key] = _settle(before.get(key), value)
        for group, old in zip(optimizer.param_groups, groups_before, strict=True):
            for name, value in old.items():
                if isinstance(value, Tensor) and name in group:
                    group[name] = value.copy_(torch.as_tensor(group[name]))


def _by_param(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, Any]:
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {p: state_dict["state"][n] for n, p in zip(numbers, params, strict=True) if n in state_dict["state"]}


def _undo_casts(saved: Any, loaded: Any, *, is_ours: bool) -> Any:
    """Return what torch made of ``saved``, ``loaded``, without what its policy on load spoils.

    It casts every tensor to its parameter's dtype, counts, masks and codes included, which is wanted only for
    floats that a bare bf16 or fp16 optimizer saved; and it rebuilds every iterable from a generator, which
    makes a str that generator's repr.
    """
    if isinstance(loaded, Tensor):
        is_cast = isinstance(saved, Tensor) and (is_ours or not saved.is_floating_point())
        return saved.to(loaded.device) if is_cast else loaded
    if type(saved) is not type(loaded):  # the class's own __setstate__ changed it
        return loaded
    if isinstance(loaded, dict):
        return {key: _undo_casts(saved.get(key), value, is_ours=is_ours) for key, value in loaded.items()}
    if type(loaded) in (list, tuple):
        return type(loaded)(_undo_casts(s, v, is_ours=is_ours) for s, v in zip(saved, loaded, strict=True))
    return saved


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
        return type(new)((key, _settle(olds.get(key), value)) for key, value in new.items())
    if type(new) in (list, tuple):
        in_order = old if isinstance(old, (list, tuple)) else ()
        return type(new)(_settle(o, n) for o, n in zip_longest(in_order[: len(new)], new))
    return set(new) if type(new) is set else new


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
