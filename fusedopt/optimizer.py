"""`FusedMainGradOptimizer`: any torch optimizer, with fp32 main gradients and main parameters.

    loss.backward() -> arrival -> main_grad -> reduce -> unscale + clip -> inner.step() on main_param -> write-back

Wires the other files; the work is theirs. `step` is the diagram, from main_grad on: every arrow is one call.
Knows nothing of Hugging Face or of module types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from fusedopt import backends, live_wrappers
from fusedopt._torch_private import asking_scaler, is_profiling, load_state_dict_hooks, state_dict_hooks
from fusedopt.buffers.bucket import Entry, Sharding
from fusedopt.buffers.flat import Buffers
from fusedopt.checks import (
    all_named,
    check_all_parameters,
    check_engines,
    check_parameters,
    checked_optimizers,
    default_name,
    named_params,
    refuse_hidden,
    refuse_shared_memory,
    refuse_unsupported,
)
from fusedopt.config import MainGradConfig
from fusedopt.gradients import stock_clip
from fusedopt.gradients.arrival import Arrival, Window, has_compiled, watch_compiler
from fusedopt.gradients.clip import Clip, Scaling, checked_norm
from fusedopt.inner.copies import from_portable
from fusedopt.inner.optimizers import Group, InnerOptimizers
from fusedopt.inner.shard_probe import ShardBy
from fusedopt.reduction.grad_scaler import Scalers
from fusedopt.reduction.reducer import Reducer
from fusedopt.reduction.transport import Gather
from fusedopt.registration import Registration
from fusedopt.sharding.channel import Kind
from fusedopt.sharding.comm import DataParallelGroup
from fusedopt.sharding.replicas import start_alike
from fusedopt.state.persistence import Persistence
from fusedopt.state.state_dicts import KEY
from fusedopt.state.view import StateView
from fusedopt.step.bucket_step import narrowing_of, step_by_bucket
from fusedopt.step.closures import Closures
from fusedopt.step.fused_step import step_fused
from fusedopt.step.release import Release, refuse_release

Closure = Callable[[], Any]

MIB_NUMEL = 2**20 // 4
"""fp32 elements in one MiB."""

_GONE_WHEN_UNWRAPPED = (
    *(
        "_inner",
        "_buffers",
        "_arrival",
        "_registration",
        "_closures",
        "_gather",
        "_reducer",
        "_persistence",
        "_release",
    ),
    "_state",
)


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
        process_group: the data-parallel ranks; default all. Gradients are reduced to their mean over them.
        device_mesh: in place of ``process_group``: 1-D, or 2-D (replicate, shard).
        norm_group: ranks that hold other parts of the model (pipeline, model parallel); norms count them, too.
        rewrap: take parameters over from live wrappers that hold them, as a training library has to that makes its
            optimizer again. Those are unwrapped, also of parameters that are not in ``inner``, and raise when they are
            used. As with a new torch optimizer, weights start from the model's values, state from nothing, and
            gradients stay, in fp32; of a pending window, and under a shard, they are cleared with a warning.
        **overrides: single fields of `MainGradConfig`, above ``config``: ``max_grad_norm=1.0``.

    Raises:
        TypeError: if ``inner`` is no torch optimizer, or needs sparse gradients; complex, sparse or otherwise
            unsuitable parameters.
        ValueError: for bad configuration, no trainable parameter, a parameter given twice, on the meta device
            or uninitialised; for an inner optimizer that cannot be sharded as asked.
        RuntimeError: if parameters are wrapped already, held by a live DistributedDataParallel, or differ between
            ranks; if ``backend`` names a library that is not there.
        Nothing was changed when one of these is raised, and all ranks raise it.
    """

    def __init__(
        self,
        inner: Optimizer | Sequence[Optimizer],
        config: MainGradConfig | None = None,
        *,
        process_group: Any = None,
        device_mesh: Any = None,
        norm_group: Any = None,
        rewrap: bool = False,
        **overrides: Any,
    ) -> None:
        comm = DataParallelGroup(process_group, device_mesh, norm_group)
        with comm.together("FusedMainGradOptimizer()"):
            optimizers = checked_optimizers(inner, FusedMainGradOptimizer)
            config = MainGradConfig.from_env(**overrides) if config is None else _override(config, overrides)
            inner_optimizers = InnerOptimizers(optimizers)
            is_sharded = config.shard != "none" and comm.num_shards > 1
            refuse_unsupported(config, requires_closure=inner_optimizers.requires_closure, is_sharded=is_sharded)
            inner_optimizers.narrowing = narrowing_of(config, all_named(optimizers), optimizers)
            held = check_all_parameters(optimizers, is_sharded=is_sharded, rewrap=rewrap)
            refuse_hidden(optimizers)
            for wrapper in held:
                wrapper._agree_with_inner()
            is_fsdp = check_engines(all_named(optimizers), config.shard)
            if config.release == "backward":
                refuse_release(
                    all_named(optimizers), is_alone=comm.world_size == 1 and norm_group is None and not is_fsdp
                )
            _check_backend(config.backend, all_named(optimizers))
            shard_by = ShardBy(inner_optimizers, config.shard_by)
            shard_by.check(is_sharded=is_sharded)
        comm = DataParallelGroup.alone(norm_group) if is_fsdp else comm
        settings = {**dataclasses.asdict(config), "shard_by": shard_by.decided or config.shard_by}
        start_alike(comm, all_named(optimizers), settings, broadcast=config.broadcast_params)
        trainable = {id(param) for _, param in all_named(optimizers) if param.requires_grad}
        gradients: list[tuple[nn.Parameter, Tensor]] = []
        for wrapper in held:
            gradients += wrapper._give_up(trainable)
        self._wire(inner_optimizers, config, comm, shard_by)
        for param, grad in gradients:
            param.grad = grad
        self._arrival.fold_assigned()

    def _wire(
        self, inner: InnerOptimizers, config: MainGradConfig, comm: DataParallelGroup, shard_by: ShardBy | None = None
    ) -> None:
        """Put the parts together over checked parameters, and take these on."""
        sharding = Sharding.of(config.shard, comm.shard_rank, comm.num_shards)
        self.config = config
        self._comm = comm
        self._inner = inner
        is_released = config.release == "backward"
        self._buffers = Buffers(
            config.backend, config.bucket_mib * MIB_NUMEL, sharding, config.main_param, is_released=is_released
        )
        self._window = window = Window(config.gradient_accumulation_steps)
        self._reducer = Reducer(
            comm,
            self._buffers,
            overlap=config.overlap_grad_reduce,
            is_merging=window.is_merging,
            is_last=lambda: window.is_last,
            on_lost=window.restart,
            lacking_state=inner.lacking_state,
        )
        self._release = Release(self._buffers, inner, config, self._before_release)
        listener = self._release.arrived if is_released else self._reducer.arrived if comm.world_size > 1 else None
        self._arrival = Arrival(self._buffers, listener)
        self._gather = Gather(comm, self._buffers, overlap=config.overlap_param_gather)
        self._clip = Clip(self._buffers, comm, config.max_grad_norm, config.nonfinite)
        self._closures = Closures(inner, self._buffers, self._clip, comm)
        self._scalers = Scalers(self, self._buffers)
        placement = (shard_by or ShardBy(inner, config.shard_by)) if sharding.is_sharded else None
        is_alone = comm.world_size == 1
        self._registration = registration = Registration(
            inner, self._buffers, self._arrival, self._gather, placement, is_alone=is_alone
        )
        self._persistence = Persistence(inner, self._buffers, registration, comm)
        super().__init__([dict(inner.group(i)) for i in range(inner.num_groups)], inner.common_defaults())
        self._state = StateView(inner)
        # A wrapper that is dropped leaves the model as torch made it: hooks hold no reference to the wrapper.
        self._finalizer = weakref.finalize(self, self._registration.release)
        self._finalizer.atexit = False
        live_wrappers.add(self, self._registration.holds)
        try:
            for index in range(len(self.param_groups)):
                self._registration.register_group(index, self.param_groups)
        except BaseException:  # out of memory, for one
            self._retire("was never finished: wrapping it failed")
            raise
        watch_compiler(self._buffers)
        if sharding.is_sharded or is_released:
            stock_clip.watch(self._buffers)

    # -- parameters and groups

    @property
    def param_groups(self) -> list[Group]:
        """The groups with the model's parameters: what the lists hold, in their order, is what is trained.

        An edit is followed, by identity of the parameters, in the next `step`, `zero_grad` or `state_dict`.
        Hyper-parameters that a scheduler on the inner optimizer changed are seen here.
        """
        inner: InnerOptimizers | None = vars(self).get("_inner")
        if inner is not None:
            inner.show()
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[Group]) -> None:
        """Take other lists; see above."""
        self._param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizers' state by model parameter, live; assigning to it replaces all of that."""
        return self._state

    @state.setter
    def state(self, state: MutableMapping[Any, Any]) -> None:
        """Replace all inner state."""
        if "_state" in vars(self):  # not in torch's constructor, which starts without any
            entries = dict(state)
            self._state.clear()
            self._state.update(entries)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as on a stock optimizer; with several inner ones, ``param_group["inner"]`` is its number.

        Raises:
            TypeError, ValueError, RuntimeError: as the constructor; nothing was changed.
        """
        if len(self.param_groups) < self._inner.num_groups:  # torch's constructor adds the groups that inner has
            super().add_param_group(param_group)
            return
        self._registration.follow(self.param_groups)
        if self._comm.world_size == 1:  # else something of them may be under way
            self._registration.let_go()
        params = param_group["params"]
        if not isinstance(params, set):  # torch refuses a set, whose order changes between runs
            params = [params] if isinstance(params, Tensor) else list(params)
        index = len(self.param_groups)
        named = [p if isinstance(p, tuple) else (default_name(index, i), p) for i, p in enumerate(params)]
        held = [(entry.slot.name, entry.param) for entry in self._buffers.entries]
        try:
            with self._comm.together("add_param_group()"):
                check_parameters(named)
                refuse_shared_memory([*held, *named], is_sharded=self._buffers.sharding.is_sharded)
                _check_backend(self.config.backend, named)
                self._registration.wiring.add_group({**param_group, "params": params})
            inner_group = self._inner.group(index)
            start_alike(self._comm, named_params(inner_group, index), None, broadcast=self.config.broadcast_params)
        except BaseException:  # for one, of another rank
            self._registration.wiring.drop_groups(index)
            raise
        super().add_param_group({**inner_group, "params": list(inner_group["params"])})
        self._registration.register_group(index, self.param_groups)

    # -- the step

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Reduce, clip, step the inner optimizer on main_params, and round them into the model.

        With ``gradient_accumulation_steps=k > 1`` every call is one micro-batch and every k-th acts.

        Args:
            closure: clears gradients, computes the loss, calls backward, returns the loss. torch's own optimizers
                evaluate it once, before all else; LBFGS, and optimizers that are not torch's, evaluate it themselves,
                when and as often as they want (SAM, line searches): each time gradients are reduced and clipped.

        Returns:
            What the closure returned, or None; what the inner optimizer's ``step`` made of it, where it is not torch's.

        Raises:
            RuntimeError: naming the parameter, if it or its main_grad was replaced, moved, cast or resized, if a
                pending gradient was cleared, if a closure is missing, or a hyper-parameter was changed on two sides.
            FloatingPointError: naming the parameters with non-finite gradients, under ``nonfinite="raise"``.
            Parameters and state were not changed when one of these is raised.
        """
        self._check_usable(closure)
        if closure is not None and self._window.is_last and self._inner.evaluates:
            if self._inner.narrowing:
                names = ", ".join(type(opt).__name__ for opt in self._inner.optimizers)
                raise RuntimeError(
                    f'step(closure) with main_param="{self.config.main_param}", state_dtype="{self.config.state_dtype}"'
                    f": {names} may evaluate it when it has moved some weights, and main_params or state exist bucket "
                    'by bucket. Compute gradients before, and call optimizer.step(); or use "float32" for both'
                )
            return self._step_by_closure(closure)
        loss = _evaluate(closure)
        if self._window.is_last:
            self._finish_window(self._window.num_pending + 1)
        else:
            self._prepare()
            kept = [] if self._buffers.sharding.is_lending else self._buffers.with_grad()
            self._window.add(kept, self._arrival.num_arrivals)
        return loss

    def flush(self) -> None:
        """End a window early: step with the micro-batches that are pending, if any (the last, short window).

        Raises:
            RuntimeError: as `step`, and if gradients arrived for which `step` was not called.
        """
        self._check_usable(None)
        if self._window.num_pending:
            with torch.no_grad():
                self._finish_window(self._window.num_pending, is_early=True)

    def _check_usable(self, closure: Closure | None) -> None:
        if closure is None and self._inner.requires_closure:
            names = ", ".join(type(opt).__name__ for opt in self._inner.optimizers)
            raise RuntimeError(
                f"the inner optimizer ({names}) needs a closure that clears gradients, computes the loss and calls "
                "backward; call optimizer.step(closure)"
            )

    def _finish_window(self, num_micro_batches: int, *, is_early: bool = False) -> None:
        """Make one update: the diagram at the top of this file, from main_grad on."""

        def prepare() -> bool:
            self._prepare()
            if is_early:
                self._window.check_flush(self._arrival.num_arrivals)
            return self._take_over()

        if self._buffers.is_released:
            self._prepare()
            norm, was_skipped = self._release.finish()
            self._clip.note(norm, was_skipped=was_skipped)
            self._inner.agree(self.param_groups)
            return
        self._reduce(Kind.STEP, num_micro_batches, prepare)
        try:
            scaling = self._clip_gradients(num_micro_batches)
            if scaling is not None:
                written = self._step_inner(scaling)
                self._write_back(written)
                self._gather_parameters()
        finally:
            self._window.end(self._arrival.num_arrivals)
            self._reducer.window_ended()

    def _before_release(self) -> None:
        """Bring all up to date before the first bucket of a backward steps."""
        self._registration.follow(self.param_groups)
        self._buffers.check_views()
        self._take_over()

    def _prepare(self) -> None:
        """Bring main_grad up to date, and raise on anything that was replaced or edited since wrapping."""
        edited = self._reducer.edited_outside()
        if edited:
            self._window.restart()
            self._scalers.explain(edited)
        watch_compiler(self._buffers)
        self._registration.follow(self.param_groups)
        self._buffers.check_views()
        self._registration.look_for(self._arrival.fold_assigned())
        self._window.check_kept()
        self._window.check_averaged(self._arrival.num_arrivals)
        self._reducer.note_versions()

    def _take_over(self) -> bool:
        """Bring hyper-parameters and main_params up to date with what was changed from outside.

        Returns:
            Whether weights had been changed in a way that torch does not see, see `Buffers.take_over`.

        Raises:
            RuntimeError: naming a hyper-parameter that was changed on both sides.
        """
        if self._gather.started:
            self._gather.finish()
        self._inner.agree(self.param_groups)
        return self._buffers.take_over()

    def _reduce(self, kind: Kind, num_micro_batches: int, prepare: Callable[[], bool]) -> bool:
        """Prepare, and make gradients the sum over ranks. What one rank must refuse, all refuse; the window stays.

        Args:
            kind: where this rank is.
            num_micro_batches: whose gradients these are.
            prepare: checks, and brings all up to date, before anything is reduced.

        Returns:
            What ``prepare`` returned: whether it was true on any rank.
        """
        with _profiled("fusedopt.reduce"):
            noted = self._reducer.meet(kind, num_micro_batches, prepare)
        self._registration.let_go()
        if kind is Kind.STEP and noted and self._comm.world_size > 1:
            self._buffers.take_over_unseen()  # an edit that shows in one rank's part may not in another's
        return noted

    def _clip_gradients(self, num_micro_batches: int) -> Scaling | None:
        """Bring gradients to their clipped mean, or leave that to the step; None where it must be left out."""
        with _profiled("fusedopt.clip"):
            for max_norm, norm_type in self._window.clips:
                self._clip_mean(max_norm, norm_type, num_micro_batches)
            return self._clip.for_step(
                self._num_addends(num_micro_batches),
                may_be_on_device=self._inner.takes_found_inf,
                makes_state=self._reducer.makes_state,
            )

    def _step_inner(self, scaling: Scaling) -> list[Entry]:
        """Step the inner optimizers on main_params; return the entries whose model parameters were written as well."""
        grad_scale, found_inf = scaling
        if self._inner.narrowing:  # piece by piece
            with _profiled("fusedopt.step"):
                return step_by_bucket(self._inner, self._buffers, grad_scale, found_inf)
        written: list[Entry] = []
        instead = None
        if self._buffers.has_fused_step:
            instead = functools.partial(step_fused, self._buffers, written)
        with _profiled("fusedopt.step"):
            self._buffers.is_stepping = True
            self._inner.step(self._buffers.entries, grad_scale=grad_scale, found_inf=found_inf, instead=instead)
        return written

    def _write_back(self, written: Sequence[Entry]) -> None:
        """Round main_params into the model, but for the entries whose step did so itself."""
        with _profiled("fusedopt.write_back"):
            self._buffers.write_back(done=written)

    def _gather_parameters(self, *, may_overlap: bool = True) -> None:
        """Bring what other ranks updated, and let groups show what inner optimizers wrote into theirs."""
        with _profiled("fusedopt.gather"):
            if self._buffers.sharding.is_sharded:
                self._gather.start(may_overlap=may_overlap and not has_compiled())
            self._inner.agree(self.param_groups)

    def _clip_mean(self, max_norm: float, norm_type: float, num_micro_batches: int) -> Tensor:
        """Clip the mean of a whole window, and return its norm before."""
        num_addends = 1
        if self._buffers.sharding.is_sharded:  # sums stay sums until the step: gradients may still arrive
            num_addends = self._num_addends(num_micro_batches)
        elif self._num_addends(num_micro_batches) != 1:
            self._clip.average(self._num_addends(num_micro_batches))
            self._window.averaged(self._arrival.num_arrivals)
        norm = self._clip.measure(norm_type) / num_addends
        self._clip.scale(norm, max_norm)
        self._reducer.note_versions()
        return norm

    def _num_addends(self, num_micro_batches: int) -> int:
        """Return what sums are divided by, once: ranks, where those were summed, and averaged micro-batches."""
        if self._window.is_averaged:
            return 1
        num_ranks = self._comm.world_size if self._buffers.sharding.is_sharded else 1
        return num_ranks * (num_micro_batches if self._window.is_merging and self.config.gradient_average else 1)

    def _step_by_closure(self, closure: Closure) -> Any:
        is_merging, is_sharded = self._window.is_merging, self._buffers.sharding.is_sharded

        def prepare() -> bool:
            self._prepare()
            self._take_over()
            return False

        def begin() -> None:
            with torch.no_grad():
                self._reduce(Kind.STEP, 0, prepare)

        def evaluate() -> Any:
            loss = _evaluate(closure)
            begin()
            return loss

        def num_addends() -> int:
            return self._num_addends(self._window.num_pending + 1)

        if not (is_merging or is_sharded):
            begin()  # SAM begins with the gradients that stand
        elif not is_sharded:
            with self._comm.together("step(closure)"):
                self._take_over()
        try:
            with _profiled("fusedopt.step"):
                result = self._closures.step(evaluate, num_addends, is_merging=is_merging)
            self._gather_parameters()
            return result
        finally:
            self._window.restart()
            self._reducer.window_ended()

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients of the backwards inside on their rank, as DDP's: the next one outside reduces them, too.

        Around all backwards of a window but the last, it tells which one that is: with it, reductions start inside.
        Under ``shard="gradients"`` every backward reduces: it does without whole gradients.
        """
        return self._reducer.paused()

    # -- gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, as torch does; does nothing while a micro-batch of a window is pending."""
        self._registration.follow(self.param_groups)
        if self._window.num_pending == 0:
            super().zero_grad(set_to_none)
            if self._buffers.is_released:
                self._release.cleared()
            if set_to_none:
                self._reducer.cleared()
            else:
                self._reducer.zeroed()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their global norm is at most ``max_norm``, without a host synchronisation.

        Over all ranks, which all call it. Under gradient merge (k > 1) it averages first, and clips after the last
        backward of a window. Anywhere else it only measures the mean so far, since clipping a part would change the
        sum; should the next call of `step` or `flush` end the window, it clips the whole mean then.

        Args:
            max_norm: positive; ``inf`` measures only.
            norm_type: positive, or ``inf``.

        Returns:
            The norm before clipping, 0-d, float32 (float64 if there are float64 parameters).

        Raises:
            TypeError, ValueError: naming the value, for what is no limit or no norm; nothing was changed.
            RuntimeError: as `step`.
        """
        if self._buffers.is_released:
            raise RuntimeError(
                'clip_grad_norm_() with release="backward": buckets have stepped, and their gradients are gone. Set '
                'max_grad_norm and clip_by="previous", or use release="none"'
            )
        window, limit, order = self._window, math.inf, 2.0

        def prepare() -> bool:
            nonlocal limit, order
            limit, order = checked_norm(max_norm, norm_type)
            self._prepare()
            return window.has_begun(self._arrival.num_arrivals)

        with self._scalers.unscaling(self._clip.found_inf):
            has_begun = self._reduce(Kind.CLIP, window.num_pending, prepare)  # on any rank
        if not window.is_merging or (window.is_last and has_begun):
            for waiting in window.clips:
                self._clip_mean(*waiting, window.num_pending + 1)
            window.clips = []
            return self._clip_mean(limit, order, window.num_pending + 1)
        window.clips.append((limit, order))
        return self._clip.measure(order) / self._num_addends(max(1, window.num_pending + has_begun))

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
        # False: a scaler unscales `.grad`, and calls step() unless it found an inf. For anybody else that is all.
        scaler = asking_scaler()
        if scaler is not None:
            self._before_scaled_step(scaler)
        return False

    def _before_scaled_step(self, scaler: GradScaler) -> None:
        if self._buffers.is_released:
            raise RuntimeError(
                'GradScaler does not go with release="backward": buckets stepped inside backward with gradients that '
                "were multiplied by its scale, so the weights are spoilt. Train in bfloat16, which needs none, or use "
                'release="none", and start from the last checkpoint'
            )
        if self._window.is_merging:
            raise RuntimeError(
                f"GradScaler does not go with gradient_accumulation_steps={self._window.num_micro_batches}: it would "
                "unscale the partial sum at every micro-batch. Use gradient_accumulation_steps=1, divide the loss by "
                "k, and call scaler.step() and zero_grad() every k-th micro-batch"
            )
        if self._buffers.sharding.is_sharded and self._scalers.check_step(scaler):
            with torch.no_grad(), self._scalers.unscaling(self._clip.found_inf, is_step=True):
                self._reducer.meet(Kind.CLIP, self._window.num_pending, self._prepare)

    def memory_report(self) -> dict[str, float]:
        """Return bytes as allocated, by kind, and ``bytes_per_param``.

        Kinds: ``model`` (trainable parameters), ``main_grad``, ``main_param``, ``state`` (there from the first
        step on), and their ``total``.
        """
        report: dict[str, float] = {**self._buffers.nbytes(), "state": self._inner.state_nbytes()}
        report["total"] = sum(report.values())
        report["bytes_per_param"] = report["total"] / max(1, sum(e.slot.numel for e in self._buffers.entries))
        return report

    # -- weights from outside, train and eval

    def sync_main_params(self) -> None:
        """Take over all edits of the model's weights, also single elements written through ``param.data``."""
        self._gather.finish()
        self._buffers.take_over(everything=True)

    def train(self) -> None:
        """Reach the inner optimizer's ``train()`` where it has one (schedule-free), and refresh the model."""
        self._switch("train")

    def eval(self) -> None:
        """Reach the inner optimizer's ``eval()`` where it has one (schedule-free), and refresh the model."""
        self._switch("eval")

    def _switch(self, method: str) -> None:
        self._registration.follow(self.param_groups)
        has_it = self._inner.has(method)
        if method == "train" and not has_it:  # a Trainer calls it before every micro-batch; gathers are to overlap
            return
        self._take_over()
        if has_it:
            self._inner.call(method)
            self._buffers.write_back(everything=True)
            self._gather_parameters(may_overlap=False)

    # -- what outlives a step

    def state_dict(self) -> dict[str, Any]:
        """Return parameters' main_param and inner state in full precision, and the groups; never communicates.

        Tensors are the live ones, as with torch. Read it back with ``torch.load(weights_only=True)``. Under a shard it
        is this rank's part, unless `consolidate_state_dict` brought the whole here.

        Inner state that is neither a tensor nor a builtin goes in as it is, with a warning: it takes
        ``weights_only=False`` to read it.

        Raises:
            ValueError, RuntimeError: if ``torch.distributed.checkpoint`` asks for what it cannot have.
        """
        pre_hooks, post_hooks = state_dict_hooks(self)
        for pre_hook in pre_hooks.values():
            pre_hook(self)
        self._gather.finish()
        self._agree_with_inner()
        self._arrival.fold_assigned()
        state_dict = self._persistence.state_dict(self.param_groups)
        if self._release.last_norm is not None and KEY in state_dict:
            state_dict[KEY]["last_norm"] = self._release.last_norm
        for post_hook in post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, or a bare torch optimizer's state dict, into existing storage.

        All ranks call it. Each takes its own part out of a whole state dict, whatever saved that; a part that one rank
        saved loads on that rank, in the same layout. The model's weights are not touched: at the next step an element
        whose model value still is the rounded main_param keeps the loaded main_param, so that model and optimizer load
        in either order.

        Raises:
            ValueError: naming what does not fit (groups, names, shapes, dtypes, layout); nothing was changed, on any
                rank: the others raise a RuntimeError that quotes it.
        """
        pre_hooks, post_hooks = load_state_dict_hooks(self)

        def run_pre_hooks(copied: dict[str, Any]) -> dict[str, Any]:
            for pre_hook in pre_hooks.values():
                replaced = pre_hook(self, copied)
                copied = copied if replaced is None else replaced
            return copied

        self._persistence.load(self.param_groups, state_dict, run_pre_hooks)
        self._release.last_norm = dict(state_dict.get(KEY, {})).get("last_norm")
        for post_hook in post_hooks.values():
            post_hook(self)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all state together on rank ``to``: until the next step or load, `state_dict` returns the whole there.

        All ranks call it; the other ranks' `state_dict` stays their part. The whole is on the CPU, in the form of one
        process, and loads into any layout. Takes there as much memory as that, and one tensor more. Without a shard
        every rank has the whole anyway, and nothing is done.

        Args:
            to: rank among the data-parallel ranks.

        Raises:
            ValueError: if there is no such rank, or an inner optimizer's state is in a format of its own.
            RuntimeError: if state differs between ranks.
            All ranks raise it.
        """
        self._gather.finish()
        self._persistence.consolidate(self.param_groups, to)

    def _agree_with_inner(self) -> None:
        """Bring the inner optimizers' groups and hyper-parameters up to date with the wrapper's."""
        self._registration.follow(self.param_groups)
        self._inner.agree(self.param_groups)

    def unwrap(self) -> Optimizer | list[Optimizer]:
        """Give back the inner optimizer (the list, if several) over the model's own parameters.

        Every hook and attribute is removed, and memory is freed at once; state is cast to the parameters' dtype, as
        torch keeps it; the fp32 digits of main_params are gone. A gradient is kept, rounded to the parameter's dtype;
        under a shard, where a rank has its share of it, it is cleared. The wrapper cannot be used any more.
        """
        self._gather.finish()
        self._agree_with_inner()
        optimizers = list(self._inner.optimizers)
        self._retire("was unwrapped; step the inner optimizer, or wrap it anew")
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def _retire(self, why: str) -> None:
        live_wrappers.remove(self)
        self._finalizer()
        self._why_gone = why
        for name in _GONE_WHEN_UNWRAPPED:
            vars(self).pop(name, None)

    def _give_up(self, trainable: Collection[int]) -> list[tuple[nn.Parameter, Tensor]]:
        """Unwrap in favour of a new wrapper, which goes on with the gradients of its parameters as they stand.

        Args:
            trainable: `id` of the new wrapper's trainable parameters.

        Returns:
            The parameters among them that have a gradient, with that. Of a window that is pending, or under a shard,
            where a rank has a share, gradients are cleared, with a warning.
        """
        self._gather.finish()
        entries = [entry for entry in self._buffers.with_grad() if id(entry.param) in trainable]
        num_pending, is_sharded = self._window.num_pending, self._buffers.sharding.is_sharded
        is_whole = not (num_pending or is_sharded)
        if entries and not is_whole:
            found = f"{num_pending} micro-batch(es) of a window are pending" if num_pending else "a rank has its share"
            warnings.warn(
                f"rewrap=True cleared the gradients of {len(entries)} parameter(s), {entries[0].slot.name} the first: "
                f"the wrapper that held them cannot hand them over ({found}). To lose none, end a window with flush(), "
                "and step and clear before wrapping anew",
                RuntimeWarning,
                stacklevel=3,
            )
        kept = [(entry.param, entry.param.grad) for entry in entries if is_whole and entry.param.grad is not None]
        for entry in entries:
            entry.param.grad = None
        self._retire(f"was unwrapped: a later {type(self).__name__}(rewrap=True) took its parameters over; use that")
        return kept

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles are made of; gradients and a pending window are left out, as in torch."""
        self._agree_with_inner()
        if self._registration.was_relaid and self._buffers.sharding.is_sharded:
            raise RuntimeError(
                "an optimizer whose param_groups were edited under a shard cannot be copied: a copy would be laid out "
                "in another way. Build an equal one, and load what consolidate_state_dict() and state_dict() give"
            )
        return {
            "config": self.config,
            "comm": self._comm,
            "inner": self._registration.wiring.portable(),
            "order": self._inner.order,
            "trained": [entry.param for entry in self._buffers.entries],
            "unfrozen": list(self._registration.unfrozen),
            "main_params": self._persistence.copied_main_params(self.param_groups),
            "skipped_steps": self._clip.skips.total(),
            "last_norm": self._release.last_norm,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Wrap the copied inner optimizers anew, on buffers of their own."""
        optimizers = from_portable(state["inner"])
        trained, unfrozen = state["trained"], state["unfrozen"]
        requires_grad = [param.requires_grad for param in trained]
        for param in trained:  # all in the order of the original, since a shard's layout has to be the same
            param.requires_grad_(all(param is not late for late in unfrozen))
        inner = InnerOptimizers(optimizers, state["order"])
        inner.narrowing = narrowing_of(state["config"], all_named(optimizers), optimizers)
        self._wire(inner, state["config"], state["comm"])
        for param in unfrozen:
            param.requires_grad_(True)
            self._registration.follow(self.param_groups)
        for param, flag in zip(trained, requires_grad, strict=True):
            param.requires_grad_(flag)
        self._registration.wiring.take_state(state["inner"])
        self._persistence.restore_main_params(self.param_groups, state["main_params"])
        self._clip.skips.restore(state["skipped_steps"])
        self._release.last_norm = state["last_norm"]

    def __getattr__(self, name: str) -> Any:
        """Fall through to the first inner optimizer that has the attribute."""
        if name in _GONE_WHEN_UNWRAPPED and "_finalizer" in vars(self):
            raise RuntimeError(f"this FusedMainGradOptimizer {self._why_gone}")
        inner = vars(self).get("_inner")
        if inner is not None and not name.startswith("__"):
            for opt in inner.optimizers:
                if hasattr(opt, name):
                    return getattr(opt, name)
        raise AttributeError(f"neither {type(self).__name__} nor its inner optimizer has an attribute {name!r}")


def _profiled(name: str) -> AbstractContextManager[Any]:
    """Let a profile show the body as ``name``; where there is none, torch's own function would cost 10 us."""
    return torch.profiler.record_function(name) if is_profiling() else contextlib.nullcontext()


def _check_backend(backend: str, named: Iterable[tuple[str, Tensor]]) -> None:
    for device, dtype in {(param.device, param.dtype): None for _, param in named}:
        backends.resolve(backend, device, dtype)


def _evaluate(closure: Closure | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _override(config: MainGradConfig, overrides: dict[str, Any]) -> MainGradConfig:
    return MainGradConfig.from_dict(dataclasses.asdict(config), **overrides)
