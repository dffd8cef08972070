"""State dicts: per-parameter, in full precision, checked before anything is written.

    ... -> step -> write-back -> gather -> [checkpoint]

The format is torch's own packed one, so that stock tools read it: ``state`` by
parameter number, with ``main_param`` beside the inner state, and ``param_groups``;
plus one key ``fusedopt`` with names, shapes and dtypes. Tensors and builtins only.
Under a shard it is one rank's part: see `parts`. A whole one loads into any layout,
a part into its own; what ``torch.distributed.checkpoint`` gets is a third form,
without the key, in which parts are whole tensors of which it sees a few blocks.

Knows nothing of hooks, backends or communication.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number, Real
from typing import Any

import torch
from torch import Tensor

from fusedopt.buffers.bucket import Entry
from fusedopt.inner.loading import has_own_format, load_in_place
from fusedopt.inner.narrow_state import COUNT, counts_of, narrow_dtypes, opened, why_damaged, widened, widened_in
from fusedopt.inner.optimizers import Group, InnerOptimizers
from fusedopt.inner.plain import find_objects, name_of, refuse_objects
from fusedopt.nested import leaves
from fusedopt.sharding.dtensor import place_of
from fusedopt.sharding.local_state import REMEDY, Cut, label, take
from fusedopt.state.view import HAS_STATE, checkpoint_state

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Checked:
    """A state dict that fits, cut to what this rank updates.

    Args:
        source: as it was given.
        state: by position of the parameter; its own parts only.
        others: state under keys that are no parameters.
        signature: what is under ``fusedopt``, if anything.
        is_ours: whether a wrapper saved it; a bare optimizer's floats have the parameters' dtype.
    """

    source: Mapping[str, Any]
    state: Mapping[int, Mapping[str, Any]]
    others: Mapping[Any, Any]
    signature: Mapping[str, Any]
    is_ours: bool


class StateDicts:
    """Pack and unpack the state of one wrapper.

    Args:
        inner: the wrapped optimizers.
        outer_groups: the wrapper's groups, with model parameters.
        entries: all trainable parameters, by ``id`` of the model parameter.
        part: which one this rank has, ``"1 of 4"``, under a shard; None: everything.
    """

    def __init__(
        self,
        inner: InnerOptimizers,
        outer_groups: Sequence[Group],
        entries: Mapping[int, Entry],
        part: str | None = None,
    ) -> None:
        self._inner = inner
        self._part = part
        self._groups = outer_groups
        self._entries = entries
        self._params = [param for group in outer_groups for param in group["params"]]
        self._numbered: dict[int, int] = {}

    def main_params(self) -> list[Tensor | None]:
        """Return every parameter's main_param where that is a tensor of its own, up to date, by order of the groups."""
        return [self._saved_main_param(param) for param in self._params]

    def _saved_main_param(self, param: Tensor) -> Tensor | None:
        entry = self._entries.get(id(param))
        current = entry.up_to_date_main_param() if entry is not None and entry.is_rounded else self._main_param(param)
        return current.detach() if current is not None else None

    def _main_param(self, param: Tensor) -> Tensor | None:
        entry = self._entries.get(id(param))
        if entry is None:
            return self._inner.set_aside.get(id(param))
        return entry.main_value() if entry.is_rounded else None

    @torch.no_grad()
    def set_main_params(self, values: Sequence[Tensor | None]) -> None:
        """Fill main_params from what `main_params` returned; None leaves one as it is.

        A parameter that is frozen has no main_param yet; its value is set aside until it is unfrozen.
        """
        for param, value in zip(self._params, values, strict=True):
            if value is None:
                continue
            entry = self._entries.get(id(param))
            if entry is not None and entry.is_rounded:
                entry.load_main_param(value)
            elif id(param) in self._inner.set_aside:
                self._inner.set_aside[id(param)].copy_(value)
            elif entry is None:
                self._inner.set_aside[id(param)] = value.to(param.device, copy=True)

    def cut(self, index: int) -> Cut:
        """Return which elements of parameter number ``index`` are this rank's; a frozen one is whole everywhere."""
        param = self._params[index]
        entry = self._entries.get(id(param))
        return Cut.whole(param.shape, param.stride()) if entry is None else entry.cut

    def pack(self) -> dict[str, Any]:
        """Return the state dict. Tensors are the live ones, not copies, as with torch.

        Under a shard it is this rank's part, or the whole where that was consolidated here. What
        ``torch.load(weights_only=True)`` does not read goes in as it is, with a warning, once for each class.
        """
        whole = self._inner.consolidated
        optimizers = enumerate(self._inner.optimizers)
        custom = {number: opt.state_dict() for number, opt in optimizers if has_own_format(opt)}
        if whole is not None:
            custom = {number: widened_in(value) for number, value in custom.items()}
        signature = {**self._signature(), "inner": custom}
        others = self.others()
        if any(others.values()):
            signature["others"] = others  # apart: optimizers may use the same keys, and numbers that are parameters'
        if self._part is not None and whole is None:
            signature["parts"] = {self._part: self._spans()}
        state = self.pack_state() if whole is None else dict(whole)
        for values in others.values():
            state.update({key: value for key, value in values.items() if not isinstance(key, Number)})
        packed_dict = {"state": state, "param_groups": self._pack_groups(custom), KEY: signature}
        self._warn_of_objects(packed_dict)
        return packed_dict

    def _warn_of_objects(self, packed_dict: Mapping[str, Any]) -> None:
        names = ", ".join(type(opt).__name__ for opt in self._inner.optimizers)
        rest = {key: value for key, value in packed_dict.items() if key != "state"}
        places = [(value, f"the state of parameter {self._name(i)}") for i, value in packed_dict["state"].items()]
        for value, place in (*places, (rest, "the state dict")):
            for where, found in find_objects(value, place):
                if type(found) not in self._inner.warned_of:
                    self._inner.warned_of.add(type(found))
                    warnings.warn(
                        f"{where} holds a {name_of(found)} of the inner optimizer ({names}), which "
                        "torch.load(weights_only=True) does not read. It is saved as it is: read the file back with "
                        "torch.load(weights_only=False), which may run code that is in it",
                        UserWarning,
                        stacklevel=4,
                    )

    def pack_state(self) -> dict[Any, Any]:
        """Return main_params and inner state by position of the parameter; see `others`."""
        state: dict[Any, Any] = {}
        for index, param in enumerate(self._params):
            main = self._inner.main_of(param)
            updater = self._inner.updater_of(main)
            packed = dict(updater.state.get(main, {})) if main is not None and not has_own_format(updater) else {}
            own_main_param = self._saved_main_param(param)
            if own_main_param is not None:
                packed["main_param"] = own_main_param
            if packed:
                state[index] = label(packed, self.cut(index))
        return state

    def others(self) -> dict[int, dict[Any, Any]]:
        """Return state under keys that are no parameters, by number of the inner optimizer."""
        return {
            number: {key: value for key, value in opt.state.items() if not isinstance(key, Tensor)}
            for number, opt in enumerate(self._inner.optimizers)
            if not has_own_format(opt)
        }

    def refuse_objects(self, why: str) -> None:
        """Raise if there are objects in the state of a parameter that a shard cuts.

        Raises:
            ValueError: naming the parameter and the class.
        """
        for index, value in self.pack_state().items():
            if self.cut(index).is_partial:
                refuse_objects(value, f"the state of parameter {self._name(index)}", why)

    def pack_for_checkpoint(self, *, is_template: bool) -> dict[str, Any]:
        """Return the state dict in the form for torch.distributed.checkpoint; see `InnerOptimizers.for_checkpoint`.

        Raises:
            ValueError: if there is state that it could not save.
            RuntimeError: if there is some that is not known before its first step.
        """
        self.refuse_own_format("torch.distributed.checkpoint cannot tell parameters in it apart")
        for number, others in self.others().items():
            if others:
                name = type(self._inner.optimizers[number]).__name__
                raise ValueError(
                    f"{name} keeps state under {sorted(map(str, others))}, which are no parameters; "
                    "torch.distributed.checkpoint saves what belongs to parameters only. Use optimizer.state_dict()"
                )
        self._refuse_for_checkpoint()
        state = {}
        for index, param in enumerate(self._params):
            packed = checkpoint_state(self._inner, param, is_template=is_template)
            if packed or param.requires_grad:
                state[index] = packed
        return {"state": state, "param_groups": self._pack_groups({})}

    def _refuse_for_checkpoint(self) -> None:
        """Raise if torch.distributed.checkpoint would take one rank's part for the whole.

        It puts together what is in dicts and lists; the rest it saves as one rank has it, and loads that on all ranks.
        """
        why = "torch.distributed.checkpoint cannot put parts of it together"
        for index, value in self.pack_state().items():
            cut, where = self.cut(index), f"the state of parameter {self._name(index)}"
            if not cut.is_partial and place_of(self._params[index]) in ("", "whole"):
                continue
            refuse_objects(value, where, why)
            for path, found in leaves(value, is_leaf=lambda item: isinstance(item, tuple)):
                items = leaves(found) if isinstance(found, tuple) else ()
                if any(
                    isinstance(item, Tensor) and (cut.is_slice(item) or item.shape == cut.shape) for _, item in items
                ):
                    raise ValueError(
                        f"{where}, {path[0]!r} holds a tuple of tensors, and {why}. Save every rank's own "
                        "optimizer.state_dict() and load it on the same rank"
                    )

    def refuse_own_format(self, why: str) -> None:
        """Raise if an inner optimizer's state dict is in a format of its own.

        Raises:
            ValueError: naming the class.
        """
        for opt in self._inner.optimizers:
            if has_own_format(opt):
                raise ValueError(
                    f"{type(opt).__name__} has a state dict in a format of its own, and {why}. Save every rank's own "
                    "optimizer.state_dict(), and load it on the same rank"
                )

    def _spans(self) -> list[list[int] | None]:
        """Return the elements of every parameter that are this rank's, None where it has none (or it is frozen)."""
        parts = [self._entries[id(p)].part if id(p) in self._entries else None for p in self._params]
        return [[part.start, part.end] if part is not None else None for part in parts]

    def _pack_groups(self, custom: Mapping[int, Mapping[str, Any]]) -> list[Group]:
        """Return the outer groups; of an inner optimizer with a format of its own, what it saves of its groups."""
        numbers = iter(range(len(self._params)))
        saved = {number: iter(own.get("param_groups", ())) for number, own in custom.items()}
        packed = []
        for index, group in enumerate(self._groups):
            own = next(saved.get(self._inner.number_of(index), iter(())), None)
            kept = group if own is None else {k: v for k, v in group.items() if k in own or k == "param_names"}
            packed.append({**kept, "params": [next(numbers) for _ in group["params"]]})
        return packed

    def _signature(self) -> dict[str, Any]:
        places = [place_of(param) for param in self._params]
        return {
            "format": FORMAT,
            "names": [name for group in self._groups for name in group.get("param_names", ())],
            "shapes": [list(param.shape) for param in self._params],
            "dtypes": [str(param.dtype) for param in self._params],
            **({"places": places} if any(places) else {}),
        }

    def _name(self, index: Any) -> str:
        if not isinstance(index, int):
            return repr(index)
        entry = self._entries.get(id(self._params[index]))
        if entry is not None:
            return entry.slot.name
        names = self._signature()["names"]
        return names[index] if names else f"number {index}"

    def check(self, state_dict: Mapping[str, Any]) -> Checked:
        """Refuse a state dict that does not fit, before anything is written; return this rank's part of it.

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
        signature = state_dict.get(KEY)
        if signature is not None:
            self._check_signature(signature)
            self._check_layout(signature.get("parts"))
        elif len(self._inner.optimizers) > 1 and any(map(has_own_format, self._inner.optimizers)):
            raise ValueError(
                "a bare state dict cannot be split over several inner optimizers with formats of their own"
            )
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = [state_dict["state"].get(number, {}) for number in numbers]
        is_ours = signature is not None or any("main_param" in s or HAS_STATE in s for s in saved)
        is_part = signature is not None and "parts" in signature
        state = {i: self._check_param(i, item, is_ours=is_ours, is_part=is_part) for i, item in enumerate(saved)}
        was, now = narrow_dtypes([saved[i] for i, held in state.items() if held]), narrow_dtypes(state)
        if was != now:
            logger.info("fusedopt: the state dict holds state as %s, this optimizer holds it as %s", was, now)
        own = set(numbers)
        others = {k: value for k, value in state_dict["state"].items() if k not in own and not isinstance(k, int)}
        return Checked(state_dict, state, others, signature or {}, is_ours)

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
        places, here = (of.get("places") or [""] * len(self._params) for of in (found, needed))
        for index, (have, want) in enumerate(zip(places, here, strict=True)):
            if have != want:
                raise ValueError(
                    f"the state dict has another part of the DTensor parameter {self._name(index)} ({have or 'plain'}) "
                    f"than this rank ({want or 'plain'}). Load what this rank saved under the same parallel layout, or "
                    "save and load with torch.distributed.checkpoint, which redistributes"
                )
        for what in ("names", "shapes", "dtypes"):
            for index, (have, want) in enumerate(zip(found[what], needed[what], strict=True)):
                if have != want:
                    raise ValueError(
                        f"the state dict does not fit parameter {self._name(index)}: its {what[:-1]} was {have} when "
                        f"saved and is {want} here. Load it into the model and optimizer it was saved from"
                    )

    def _check_layout(self, parts: Any) -> None:
        """Refuse the part of another layout, and a whole that cannot be cut."""
        if parts is None:
            if self._part is not None:
                self.refuse_own_format("a whole one cannot be cut")
            return
        saved_as, spans = next(iter(parts.items())) if self._part not in parts else (self._part, parts[self._part])
        needed = self._spans()
        differ = (i for i, (have, want) in enumerate(zip(spans, needed, strict=True)) if have != want)
        index = next(differ, 0 if self._part is None else None)
        if index is not None:
            here = f"part {self._part}, {_describe(needed[index])}" if self._part is not None else "the whole"
            raise ValueError(
                f"the state dict is part {saved_as} of a sharded optimizer's state and does not fit: of parameter "
                f"{self._name(index)} it has {_describe(spans[index])}; needed here is {here}. {REMEDY}"
            )

    def _check_param(self, index: int, saved: Mapping[str, Any], *, is_ours: bool, is_part: bool) -> Mapping[str, Any]:
        param, cut = self._params[index], self.cut(index)
        if cut.span is None:
            return {}
        if cut.is_partial and not is_part:
            refuse_objects(saved, f"the saved state of parameter {self._name(index)}", "a rank cannot take its part")
        try:
            own: dict[str, Any] = take(opened(saved, cut), cut)
        except ValueError as error:
            raise ValueError(f"the state dict does not fit parameter {self._name(index)}: {error}") from None
        entry = self._entries.get(id(param))
        has_main_param = entry.is_rounded if entry is not None else id(param) in self._inner.set_aside
        if is_ours and has_main_param and "main_param" not in own:
            raise ValueError(f"the state dict has no main_param for parameter {self._name(index)}; it is incomplete")
        here = self._inner.main_of(param)
        # Other classes give these names to state of other shapes, too (low-rank moments, growing histories).
        is_torchs = type(self._inner.updater_of(here)).__module__.startswith("torch.optim")
        for key, value in own.items():
            has_param_shape = key == "main_param" or (is_torchs and key in _PARAM_SHAPED_STATE)
            if has_param_shape and isinstance(value, Tensor) and value.shape != here.shape:
                raise ValueError(
                    f"the state dict does not fit parameter {self._name(index)}: {key!r} has shape "
                    f"{tuple(value.shape)}, needed is {tuple(param.shape)}. Load it into the model and optimizer it "
                    "was saved from"
                )
        main = own.get("main_param")
        if main is not None and (not isinstance(main, Tensor) or main.dtype is not torch.float32):
            raise ValueError(
                f"main_param of parameter {self._name(index)} is {getattr(main, 'dtype', type(main))} in the state "
                "dict; needed is torch.float32"
            )
        had_state = own.pop(HAS_STATE, None)
        if isinstance(had_state, Tensor):
            if had_state <= 0:  # what was saved beside it were placeholders
                own = {"main_param": main} if main is not None else {}
            own[COUNT] = abs(int(had_state)) - int(had_state > 0)
        return self._held(index, own)

    def _held(self, index: int, own: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's state of a parameter as it is held between steps here, narrow or not.

        Raises:
            ValueError: if a narrow tensor in it is damaged.
        """
        param = self._params[index]
        entry, main = self._entries.get(id(param)), self._inner.main_of(param)
        why = why_damaged(own, main.shape)
        if why is not None:
            raise ValueError(
                f"the state dict is damaged: {why[0]!r} of parameter {self._name(index)} {why[1]}. Load another copy"
            )
        updater = self._inner.updater_of(main)
        numbers = [number for number, opt in enumerate(self._inner.optimizers) if opt is updater]
        narrowing = self._inner.narrowing.get(numbers[0])
        if narrowing is None or entry is None:
            return dict(widened(own))
        main_param = {key: own.pop(key) for key in ("main_param",) if key in own}
        return {**narrowing.narrowed(own, entry, self._numbers()[id(param)]), **main_param}

    def _numbers(self) -> dict[int, int]:
        self._numbered = self._numbered or self._inner.numbers()
        return self._numbered

    def unpack(self, checked: Checked) -> None:
        """Load a state dict that `check` accepted, ours or a bare torch optimizer's, into existing storage."""
        custom = checked.signature.get("inner", {})
        for number, opt in enumerate(self._inner.optimizers):
            if has_own_format(opt):
                part = custom.get(number, checked.source)
            else:
                part = self._part_for(number, checked)
            load_in_place(opt, part, is_ours=checked.is_ours, held=self._inner.held[number])
            if has_own_format(opt):
                self._inner.narrow_loaded(number, counts_of(opt, part))
        self.set_main_params([own.get("main_param") for own in checked.state.values()])
        for index, own in checked.state.items():
            if own.get(COUNT):  # apart: inner optimizers take a state that is not empty for all that they keep
                main = self._inner.main_of(self._params[index])
                self._inner.updater_of(main).state[main][COUNT] = own[COUNT]
        for index, outer in enumerate(self._groups):
            inner = self._inner.group(index)
            outer.update({key: value for key, value in inner.items() if key != "params"})

    def _part_for(self, number: int, checked: Checked) -> dict[str, Any]:
        """Cut out what belongs to inner optimizer ``number``, in torch's own packed form."""
        groups, state, index = [], {}, 0
        others = checked.signature.get("others", {}).get(number, checked.others)
        numbers = [int(float(key)) for key in others if isinstance(key, Real) and math.isfinite(key)]
        first = 1 + max(numbers, default=-1)  # from here on they are free for parameters
        for position, saved_group in enumerate(checked.source["param_groups"]):
            indices = range(index, index + len(saved_group["params"]))
            index = indices.stop
            if self._inner.optimizer_of(position) is self._inner.optimizers[number]:
                here = [i for i in indices if self._inner.main_of(self._params[i]) is not None]
                groups.append({**saved_group, "params": [first + i for i in here]})
                for i in here:
                    inner_state = {k: value for k, value in checked.state[i].items() if k not in ("main_param", COUNT)}
                    if inner_state:
                        state[first + i] = inner_state
        return {"state": {**state, **others}, "param_groups": groups}


def _describe(span: Sequence[int] | None) -> str:
    return "no elements" if span is None else f"elements {span[0]}:{span[1]}"
