"""`FusedMainGradOptimizer`: any torch optimizer, with fp32 main gradients and main parameters.

    loss.backward() -> arrival -> main_grad -> reduce -> unscale + clip -> inner.step() on main_param -> write-back

Wires the other files; the work is theirs. Knows nothing of Hugging Face or of module types.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fusedopt import backends, compiling
from fusedopt.adoption import Adoption
from fusedopt.arrival import Arrival
from fusedopt.buffers import Buffers
from fusedopt.checks import (
    check_all_parameters,
    check_parameters,
    checked_optimizers,
    default_name,
    refuse_unsupported,
)
from fusedopt.clip import Clip
from fusedopt.config import MainGradConfig
from fusedopt.inner import Group, InnerOptimizers, StateView, from_portable
from fusedopt.state import StateDicts, copy_for_hooks
from fusedopt.update import Update
from fusedopt.window import Window

Closure = Callable[[], Any]

MIB_NUMEL = 2**20 // 4
"""fp32 elements in one MiB."""

_GONE_WHEN_UNWRAPPED = ("_inner", "_buffers", "_arrival", "_adoption", "_update")


class FusedMainGradOptimizer(Optimizer):
    """Wrap any torch optimizer: fp32 gradient accumulation and fp32 updates for a bf16 or fp16 model.

    Every trainable parameter gets ``param.main_grad``, a view of a flat fp32 buffer, and after a backward
    ``param.grad is param.main_grad``. The inner optimizer updates fp32 ``main_param``s, which are then
    rounded into the model. An fp32 parameter is its own main_param, and ends bit-equal to the bare
    optimizer's. Bytes per parameter of a bf16 model under Adam: 2 + 4 + 4 + 8 = 18; fp32: 4 + 4 + 8 = 16.

    Args:
        inner: a torch optimizer over the model's parameters, or a sequence of them over disjoint parameters.
            It is edited in place and belongs to the wrapper until `unwrap`.
        config: all settings; default: `MainGradConfig.from_env`.
        **overrides: single fields of `MainGradConfig`, above ``config``: ``max_grad_norm=1.0``.

    Raises:
        TypeError: if ``inner`` is no torch optimizer, or needs sparse gradients; complex, sparse or otherwise
            unsuitable parameters.
        ValueError: for bad configuration, no trainable parameter, a parameter given twice, on the meta device
            or uninitialised.
        RuntimeError: if parameters are wrapped already, or held by a live DistributedDataParallel.
        Nothing was changed when one of these is raised.
    """

    def __init__(
        self, inner: Optimizer | Sequence[Optimizer], config: MainGradConfig | None = None, **overrides: Any
    ) -> None:
        optimizers = checked_optimizers(inner, FusedMainGradOptimizer)
        config = MainGradConfig.from_env(**overrides) if config is None else _override(config, overrides)
        backend = backends.resolve(config.backend)
        inner_optimizers = InnerOptimizers(optimizers)
        refuse_unsupported(config, inner_optimizers.requires_closure)
        check_all_parameters(optimizers)

        self.config = config
        self._inner = inner_optimizers
        self._buffers = Buffers(backend, config.bucket_mib * MIB_NUMEL)
        self._arrival = Arrival(self._buffers)
        self._window = Window(config.gradient_accumulation_steps)
        self._clip = Clip(backend, self._buffers, config.max_grad_norm, config.nonfinite)
        self._update = Update(self._inner, self._buffers, self._clip)
        self._adoption = Adoption(self._inner, self._buffers, self._arrival)
        super().__init__(
            [dict(self._inner.group(i)) for i in range(self._inner.num_groups)], self._inner.common_defaults()
        )
        self.state = StateView(self._inner)  # type: ignore[assignment]
        # A wrapper that is dropped leaves the model as torch made it: hooks hold no reference to the wrapper.
        self._finalizer = weakref.finalize(self, self._adoption.release)
        self._finalizer.atexit = False
        try:
            for index, group in enumerate(self.param_groups):
                self._adoption.adopt_group(index, group)
        except BaseException:  # out of memory, for one
            self._finalizer()
            raise
        compiling.watch(self._buffers)

    # -- parameters and groups

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as on a stock optimizer; with several inner ones, ``param_group["inner"]`` is its number.

        Raises:
            TypeError, ValueError, RuntimeError: as the constructor; nothing was changed.
        """
        if len(self.param_groups) < self._inner.num_groups:  # torch's constructor adds the groups that inner has
            super().add_param_group(param_group)
            return
        params = param_group["params"]
        if not isinstance(params, set):  # torch refuses a set, whose order changes between runs
            params = [params] if isinstance(params, Tensor) else list(params)
        index = len(self.param_groups)
        named = [p if isinstance(p, tuple) else (default_name(index, i), p) for i, p in enumerate(params)]
        check_parameters(named)
        self._inner.add_group({**param_group, "params": params})
        inner_group = self._inner.group(index)
        super().add_param_group({**inner_group, "params": list(inner_group["params"])})
        self._adoption.adopt_group(index, self.param_groups[index])

    # -- the step

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Reduce, clip, step the inner optimizer on main_params, and round them into the model.

        With ``gradient_accumulation_steps=k > 1`` every call is one micro-batch and every k-th acts.

        Args:
            closure: clears gradients, computes the loss, calls backward, returns the loss. Evaluated once,
                except by an inner optimizer that requires a closure (LBFGS), which may ask repeatedly.

        Returns:
            What the closure returned, or None.

        Raises:
            RuntimeError: naming the parameter, if it or its main_grad was replaced, moved, cast or resized, if a
                pending gradient was cleared, if a closure is missing, or a hyper-parameter was changed on two sides.
            FloatingPointError: naming the parameters with non-finite gradients, under ``nonfinite="raise"``.
            Parameters and state were not changed when one of these is raised.
        """
        self._check_usable(closure)
        if self._inner.requires_closure:
            return self._step_by_closure(closure)
        loss = _evaluate(closure)
        self._prepare()
        if self._window.is_last:
            self._finish_window(self._window.num_pending + 1)
        else:
            self._window.add(self._buffers.with_grad())
        return loss

    def flush(self) -> None:
        """End a window early: step with the micro-batches that are pending, if any (the last, short window)."""
        self._check_usable(None)
        if self._window.num_pending:
            with torch.no_grad():
                self._prepare()
                self._finish_window(self._window.num_pending)

    def _check_usable(self, closure: Closure | None) -> None:
        if closure is None and self._inner.requires_closure:
            names = ", ".join(type(opt).__name__ for opt in self._inner.optimizers)
            raise RuntimeError(
                f"the inner optimizer ({names}) needs a closure that clears gradients, computes the loss and calls "
                "backward; call optimizer.step(closure)"
            )

    def _prepare(self) -> None:
        """Bring main_grad up to date, and raise on anything that was replaced since wrapping."""
        compiling.watch(self._buffers)
        self._adoption.adopt_unfrozen()
        self._buffers.check_views()
        self._arrival.adopt()
        self._window.check_kept()

    def _finish_window(self, num_micro_batches: int) -> None:
        self._update.begin(self.param_groups)  # what it raises can be mended, and the window stays for the next call
        try:
            self._average(num_micro_batches)
            self._update.apply(self.param_groups)
        finally:
            self._window.restart()

    def _average(self, num_micro_batches: int) -> None:
        if self.config.gradient_average and self._window.is_merging and not self._window.is_averaged:
            self._clip.average(num_micro_batches)
            self._window.is_averaged = True

    def _step_by_closure(self, closure: Closure | None) -> Any:
        def evaluate() -> Any:
            loss = _evaluate(closure)
            with torch.no_grad():
                self._prepare()
            return loss

        loss = evaluate()
        self._update.begin(self.param_groups)
        return self._update.apply_by_closure(self.param_groups, loss, evaluate)

    # -- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does; does nothing while a micro-batch of a window is pending."""
        self._adoption.adopt_unfrozen()
        if self._window.num_pending == 0:
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``, without a host synchronisation.

        Under gradient merge (k > 1) this averages first and clips before the call of `step` that ends the
        window; before the others it only measures the mean so far, since clipping a part would change the sum.

        Args:
            max_norm: positive; ``inf`` measures only.
            norm_type: positive, or ``inf``.

        Returns:
            The norm before clipping, 0-d, float32 (float64 if there are float64 parameters).

        Raises:
            ValueError: for a norm type that is not a norm.
            RuntimeError: as `step`.
        """
        self._prepare()
        num_micro_batches = self._window.num_pending + 1
        if self._window.is_last:
            self._average(num_micro_batches)
        norm = self._clip.measure(norm_type)
        if self._window.is_last:
            self._clip.scale(norm, float(max_norm))
        elif self.config.gradient_average:
            norm = norm / num_micro_batches
        return norm

    # -- what a loop asks

    @property
    def window_ends(self) -> bool:
        """Whether the last `step` call ended a window, and a scheduler should step; always with k = 1."""
        return self._window.num_pending == 0

    @property
    def grad_norm(self) -> Tensor | None:
        """Global gradient norm before clipping, of the last `step` that measured one; 0-d, read it to synchronise."""
        return self._clip.norm

    @property
    def skipped_steps(self) -> int:
        """Steps left out so far because a gradient was not finite. Reading may synchronise, and may warn."""
        return self._clip.skips.total()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was left out because a gradient was not finite. Reading may synchronise."""
        return self._clip.skips.last_was_skipped()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler asks this at each step. False: it unscales `.grad`, and calls step() unless it found an inf.
        if self._window.is_merging:
            raise RuntimeError(
                f"GradScaler does not go with gradient_accumulation_steps={self._window.num_micro_batches}: it would "
                "unscale the partial sum at every micro-batch. Use gradient_accumulation_steps=1, divide the loss by "
                "k, and call scaler.step() and zero_grad() every k-th micro-batch"
            )
        return False

    def memory_report(self) -> dict[str, float]:
        """Return bytes as allocated, by kind, and ``bytes_per_param``.

        Kinds: ``model`` (trainable parameters), ``main_grad``, ``main_param``, ``state`` (there from the first
        step on), and their ``total``.
        """
        report: dict[str, float] = {**self._buffers.nbytes(), "state": self._inner.state_nbytes()}
        report["total"] = sum(report.values())
        report["bytes_per_param"] = report["total"] / max(1, sum(e.param.numel() for e in self._buffers.entries))
        return report

    # -- weights from outside, train and eval

    def sync_main_params(self) -> None:
        """Take over edits of the model's weights that torch does not count: writes through ``param.data``."""
        self._buffers.take_over(everything=True)

    def train(self) -> None:
        """Reach the inner optimizer's ``train()`` where it has one (schedule-free), and refresh the model."""
        self._update.switch(self.param_groups, "train")

    def eval(self) -> None:
        """Reach the inner optimizer's ``eval()`` where it has one (schedule-free), and refresh the model."""
        self._update.switch(self.param_groups, "eval")

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return parameters' main_param and inner state in full precision, and the groups; never communicates.

        Tensors are the live ones, as with torch. Read it back with ``torch.load(weights_only=True)``.

        Raises:
            TypeError: naming inner state that is neither a tensor nor a builtin.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        self._arrival.adopt()
        self._inner.agree(self.param_groups)
        state_dict = self._state_dicts().pack()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or a bare torch optimizer's state dict, into existing storage.

        The model's weights are not touched: at the next step an element whose model value still is the rounded
        main_param keeps the loaded main_param, so that model and optimizer load in either order.

        Raises:
            ValueError: naming what does not fit (groups, names, shapes, dtypes); nothing was changed.
        """
        state_dict = copy_for_hooks(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state_dicts = self._state_dicts()
        state_dicts.check(state_dict)
        state_dicts.unpack(state_dict)
        self._buffers.forget_agreement()
        self._inner.forget_steps()
        self._inner.agree(self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _state_dicts(self) -> StateDicts:
        return StateDicts(self._inner, self.param_groups, self._adoption.entries)

    def unwrap(self) -> Optimizer | list[Optimizer]:
        """Give back the inner optimizer (the list, if several) over the model's own parameters.

        Every hook and attribute is removed; state is cast to the parameters' dtype, as torch keeps it; the
        fp32 digits of main_params are gone. The wrapper cannot be used any more.
        """
        self._inner.agree(self.param_groups)
        optimizers = list(self._inner.optimizers)
        self._finalizer()
        for name in _GONE_WHEN_UNWRAPPED:
            del vars(self)[name]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of; gradients and a pending window are left out, as in torch."""
        self._inner.agree(self.param_groups)
        return {
            "config": self.config,
            "inner": self._inner.portable(),
            "main_params": [main if main is None else main.clone() for main in self._state_dicts().main_params()],
            "skipped_steps": self._clip.skips.total(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wrap the copied inner optimizers anew, on buffers of their own."""
        optimizers = from_portable(state["inner"])
        FusedMainGradOptimizer.__init__(self, optimizers, state["config"])
        self._inner.take_state(state["inner"])
        self._state_dicts().set_main_params(state["main_params"])
        self._buffers.forget_agreement()
        self._clip.skips.restore(state["skipped_steps"])

    def __getattr__(self, name: str) -> Any:
        """Fall through to the first inner optimizer that has the attribute."""
        if name in _GONE_WHEN_UNWRAPPED and "_finalizer" in vars(self):
            raise RuntimeError("this FusedMainGradOptimizer was unwrapped; step the inner optimizer, or wrap it anew")
        inner = vars(self).get("_inner")
        if inner is not None and not name.startswith("__"):
            for opt in inner.optimizers:
                if hasattr(opt, name):
                    return getattr(opt, name)
        raise AttributeError(f"neither {type(self).__name__} nor its inner optimizer has an attribute {name!r}")


def _evaluate(closure: Closure | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _override(config: MainGradConfig, overrides: dict[str, Any]) -> MainGradConfig:
    return MainGradConfig.from_dict(dataclasses.asdict(config), **overrides)
