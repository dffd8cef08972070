"""Every name of torch that is not part of its public interface, and every place where fusedopt changes torch.

The rest of the package takes these from here. `NAMES` says what each is for and `PATCHES` what is replaced;
`tests/unit/test_torch_private.py` holds both against the installed torch and against the source. What torch has as a
C function is bound once, so that nothing is added to an arrival or a step. Nothing is imported that torch loads late.

Knows nothing of fusedopt.
"""

from __future__ import annotations

import datetime
import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler, grad_scaler
from torch.autograd import Variable
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils import _python_dispatch


@dataclass(frozen=True)
class Name:
    """A name of torch that its documentation does not promise.

    Args:
        where: dotted path; behind a colon a name inside a function: a variable that is read from its frame or its
            closure, or a key or an attribute that it uses.
        why: what it is needed for, that no public name does.
        if_gone: what a torch without it means; default: the import of fusedopt, or the first use, raises.
    """

    where: str
    why: str
    if_gone: str = ""


_ENGINE = "the engine tells nobody else"
_AT_ONCE = "one kernel for many tensors; undocumented where it writes"
_FOUND_BY_GC = "a module found among all live objects may be half made, and its attributes may run code"
_PROTOCOL = "torch.distributed.checkpoint saves and loads any tensor that answers it"
_ITEMS = "what that protocol's answers are made of"

NAMES = (
    # -- autograd
    Name("torch._C._current_graph_task_id", f"which backward runs in this thread, -1 for none: {_ENGINE}"),
    Name("torch._C._current_autograd_node", "whether a task that ends is a reentrant checkpoint's own"),
    Name("torch._C._will_engine_execute_node", "whether the running backward wants a weight's gradient"),
    Name("torch._C._functions.AccumulateGrad.variable", "which leaf a layer's context leads to", "not fused"),
    Name("torch.autograd.Variable._execution_engine.queue_callback", f"the end of a backward: {_ENGINE}"),
    Name("torch.autograd._engine_run_backward", f"that a backward begins: {_ENGINE}; see PATCHES"),
    Name("torch.autograd.function.FunctionMeta", "its subclass gives contexts of MainGradFunction the Parameters"),
    Name("torch.autograd.Function._backward_cls", "the class of these contexts"),
    Name("torch.autograd.forward_ad._current_level", "whether forward-mode AD is on, under which no Function is used"),
    Name(
        "torch.autograd.profiler._is_profiler_enabled",
        "without a profile, record_function costs 10 us",
        "always recorded",
    ),
    Name("torch._C._are_functorch_transforms_active", "the same for torch.func"),
    Name("torch._C.DispatchKeySet", "autograd below a custom operator: the way to a leaf's AccumulateGrad"),
    Name("torch._C.DispatchKey", "the same"),
    Name("torch._C._ForceDispatchKeyGuard", "the same"),
    # -- tensors and modules
    Name("torch.Tensor._version", "whether a tensor was written; notes on autograd tell of the counter"),
    Name("torch.Tensor._post_accumulate_grad_hooks", "our hook goes before those that a user registered earlier"),
    Name("torch.utils.hooks.RemovableHandle.id", "which of the hooks is ours"),
    Name("torch.Tensor._backward_hooks", "whether a user's hook is to see a gradient, which is then not fused"),
    Name("torch.Tensor._make_wrapper_subclass", "CheckpointPart: the shape of a whole, the memory of a part"),
    Name("torch._C.TensorBase", "the setter of .grad, which does not look at values of a PendingParameter"),
    Name("torch._C.DisableTorchFunctionSubclass", "reads a PendingParameter without finishing its gather"),
    Name(
        "torch.utils._python_dispatch._disable_current_modes", "our memory is real under a mode that makes fake tensors"
    ),
    Name("torch.nn.Module._parameters", _FOUND_BY_GC),
    Name("torch.nn.Module._modules", "a decoder layer's self_attn, where that is a module"),
    Name("torch._foreach_add", _AT_ONCE),
    Name("torch._foreach_add_", _AT_ONCE),
    Name("torch._foreach_copy_", _AT_ONCE),
    Name("torch._foreach_div_", _AT_ONCE),
    Name("torch._foreach_mul", _AT_ONCE),
    Name("torch._foreach_mul_", _AT_ONCE),
    Name("torch._foreach_zero_", _AT_ONCE),
    Name("torch.ops.aten._to_copy.default", "what checkpointing does to a CheckpointPart to move it"),
    Name("torch.cpu._is_avx512_bf16_supported", "whether bf16 products are fast on this CPU", "taken to be slow"),
    Name("torch.cpu._is_amx_tile_supported", "the same", "taken to be slow"),
    # -- torch.compile
    Name("torch._compile._disable_dynamo", "torch.compiler.disable that does not import Dynamo"),
    Name("torch._dynamo.callback.callback_handler.start_callbacks", "traces begin: fp32 .grad is taken off"),
    Name("torch._dynamo.callback.callback_handler.end_callbacks", "traces end"),
    Name("torch._dynamo.callback.callback_handler.register_start_callback", "the same"),
    Name("torch._dynamo.callback.callback_handler.register_end_callback", "the same"),
    Name("torch._dynamo.callback.CallbackArgs.callback_trigger", "whether a trace is one of a forward"),
    Name("torch._dynamo.callback.CallbackTrigger.DYNAMO", "the same"),
    Name("torch._dynamo.compiled_autograd.compiled_autograd_enabled", "compiled autograd drops callbacks: refused"),
    # -- optimizers, loss scalers, clipping
    Name("torch.optim.Optimizer._optimizer_step_pre_hooks", "whether a class has step hooks; a user's prevent fusing"),
    Name("torch.optim.Optimizer._optimizer_step_post_hooks", "the same"),
    Name("torch.optim.Optimizer._optimizer_state_dict_pre_hooks", "the wrapper is an Optimizer, and fires its hooks"),
    Name("torch.optim.Optimizer._optimizer_state_dict_post_hooks", "the same"),
    Name("torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks", "the same"),
    Name("torch.optim.Optimizer._optimizer_load_state_dict_post_hooks", "the same"),
    Name("torch.optim.optimizer._global_optimizer_pre_hooks", "fire once, for the wrapper's step; see PATCHES"),
    Name("torch.optim.optimizer._global_optimizer_post_hooks", "the same"),
    Name("torch.optim.Adam._step_supports_amp_scaling", "whether steps unscale by themselves; scalers read ours"),
    Name("torch.amp.GradScaler._per_optimizer_states", "which scaler drives an optimizer, and whether it unscaled"),
    Name("torch.amp.GradScaler._scale", "undoes and redoes an unscaling, on the device"),
    Name("torch.amp.GradScaler.unscale_:stage", "a key of such a state"),
    Name("torch.amp.GradScaler.unscale_:found_inf_per_device", "the same"),
    Name("torch.optim.Adam.step:grad_scale", "an attribute by which a fused step is told to unscale, on the device"),
    Name("torch.optim.Adam.step:found_inf", "an attribute by which it is told to skip, on the device"),
    Name("torch.amp.grad_scaler.OptState", "what a scaler's state of one optimizer says"),
    Name("torch.amp.GradScaler.step:self", "the scaler that is about to step: it tells an optimizer nothing before"),
    Name("torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler.process_group", "tells it from GradScaler"),
    Name("torch.nn.utils.clip_grad.clip_grad_norm_:func", "torch's body, see PATCHES", "a warning, and no refusal"),
    Name("torch.nn.utils.clip_grad.clip_grad_value_:func", "the same", "a warning, and no refusal"),
    Name("torch.nn.utils.clip_grad._get_total_norm:func", "the same", "a warning, and no refusal"),
    Name("torch.nn.utils.clip_grad._clip_grads_with_norm_:func", "the same", "a warning, and no refusal"),
    # -- torch.distributed
    Name("torch.distributed.distributed_c10d", "the module of the next"),
    Name("torch.distributed.distributed_c10d._hash_ranks_to_str", "names a group, see PATCHES", "torch's own name"),
    Name("torch.distributed.ProcessGroup._device_types", "the timeout of a user's group", "torch's default timeout"),
    Name("torch.distributed.ProcessGroup._get_backend", "the same", "torch's default timeout"),
    Name("torch._C._distributed_c10d.Backend.Options._timeout", "the same", "torch's default timeout"),
    Name("torch.distributed.tensor.DTensor._local_tensor", "the part itself; to_local() makes a node of autograd"),
    Name("torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "where in the whole a part lies"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.sharded_param", "which parameters FSDP2 holds"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.mesh_info", "over which ranks it reduces them"),
    Name("torch.distributed.fsdp._fully_shard._fsdp_common.DataParallelMeshInfo.mesh", "the same"),
    Name("torch.distributed.pipelining.stage._PipelineStageBase.scale_grads", "edits gradients, see PATCHES"),
    Name("torch.distributed.pipelining.stage._PipelineStageBase.backward_weight_one_chunk", "the same"),
    Name("torch.distributed.pipelining.stage._PipelineStageBase.submod", "whose gradients these are"),
    Name("torch.distributed._checkpointable._Checkpointable.__create_write_items__", _PROTOCOL),
    Name("torch.distributed._checkpointable._Checkpointable.__create_chunk_list__", _PROTOCOL),
    Name("torch.distributed._checkpointable._Checkpointable.__get_tensor_shard__", _PROTOCOL),
    Name("torch.distributed.checkpoint.metadata.ChunkStorageMetadata", _ITEMS),
    Name("torch.distributed.checkpoint.metadata.MetadataIndex", _ITEMS),
    Name("torch.distributed.checkpoint.metadata.TensorProperties", _ITEMS),
    Name("torch.distributed.checkpoint.planner.TensorWriteData", _ITEMS),
    Name("torch.distributed.checkpoint.planner.WriteItem", _ITEMS),
    Name("torch.distributed.checkpoint.planner.WriteItemType", _ITEMS),
    Name(
        "torch.distributed.checkpoint.state_dict._load_optim_state_dict:state_dict",
        "the empty group, which gets lost",
    ),
    Name("torch.distributed.checkpoint.state_dict._load_optim_state_dict:info", "whether a template is asked for"),
    Name("torch.distributed.checkpoint.state_dict._get_optim_state_dict:info", "whether whole tensors are asked for"),
)


@dataclass(frozen=True)
class Patch:
    """Something of torch that fusedopt replaces, or wraps, while it needs to.

    Args:
        what: dotted path; behind a colon a variable in a function's closure.
        file: of fusedopt, that does it.
        why: what needs it, that no hook of torch does.
        begins: when it is put in place.
        ends: when torch's own is put back.
    """

    what: str
    file: str
    why: str
    begins: str
    ends: str


_UNWRAPPED = "unwrap(), or garbage collection of the wrapper"

PATCHES = (
    Patch(
        "torch.autograd._engine_run_backward",
        "buffers/main_grad.py",
        "backwards in several threads must know of each other before the first addition; docs/decisions/0010",
        "with the first wrapper",
        "never: it counts, and passes on",
    ),
    *(
        Patch(
            f"torch.optim.optimizer.{name}",
            "inner/hooks.py",
            "global step hooks fire for the wrapper's step, not once more for each inner optimizer",
            "when inner optimizers step, or a copy of one",
            "at the end of that; the lock and the count are for several threads",
        )
        for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    ),
    Patch(
        "torch.optim.Optimizer.zero_grad",
        "inner/hooks.py",
        "on wrapped instances: a call that meant the wrapper is refused, since it would clear nothing",
        "when wrapped",
        _UNWRAPPED,
    ),
    *(
        Patch(
            f"torch.nn.utils.clip_grad.{name}:func",
            "gradients/stock_clip.py",
            "under a shard its result is wrong; whoever imported the function has it, so its body is exchanged",
            "with the first sharded wrapper",
            f"with the last one: {_UNWRAPPED}",
        )
        for name in ("clip_grad_norm_", "clip_grad_value_", "_get_total_norm", "_clip_grads_with_norm_")
    ),
    *(
        Patch(
            f"torch.distributed.pipelining.stage._PipelineStageBase.{name}",
            "reduction/pipeline_stages.py",
            "stages divide and add gradients outside of any backward, and no hook sees it",
            "with the first wrapper that several ranks share, or in a backward after the module was loaded",
            f"with the last one: {_UNWRAPPED}",
        )
        for name in ("scale_grads", "backward_weight_one_chunk")
    ),
    Patch(
        "torch.distributed.distributed_c10d._hash_ranks_to_str",
        "sharding/process_groups.py",
        "torch puts into a group's name how many groups a rank is in; where those differ, ranks wait forever",
        "when fusedopt makes a group",
        "as soon as that is made",
    ),
    Patch(
        "torch.nn.Parameter",
        "reduction/transport.py",
        "the class of a parameter whose gather is under way is PendingParameter: the first use finishes it",
        "at the end of a step under a shard, where gathers overlap",
        "at the first use of any parameter of the bucket",
    ),
    Patch(
        "torch.nn.Parameter",
        "buffers/bucket.py",
        "on wrapped instances, __getstate__: torch pickles a Parameter's attributes, and would write main_grad",
        "when wrapped",
        f"{_UNWRAPPED}, or when the parameter leaves the groups",
    ),
    Patch(
        "torch.nn.Linear",
        "layers/convert.py",
        "the class of a layer becomes FusedLinear: same parameters, keys and forward",
        "convert_linears(), or fused_linear=True",
        "restore_linears()",
    ),
    Patch(
        "torch.nn.Module.forward",
        "recompute.py",
        "on instances of decoder layers or their attention, which recompute in backward",
        "recompute.apply()",
        "recompute.remove()",
    ),
    Patch(
        "torch.autograd.Function._backward_cls",
        "_torch_private.py",
        "on subclasses of MainGradFunction: ctx.saved_tensors gives back the Parameters that were saved",
        "where the subclass is defined",
        "never: it is that class's own",
    ),
    Patch(
        "torch.amp.GradScaler._per_optimizer_states",
        "reduction/grad_scaler.py",
        "the state of one optimizer is marked as unscaled, and gets the decision of all ranks",
        "in step(), or in a clip after scaler.unscale_()",
        "scaler.update(), which makes a new one",
    ),
    Patch(
        "torch._dynamo.callback.callback_handler",
        "gradients/arrival.py",
        "callbacks around traces, of which Dynamo has no public registry",
        "with the first wrapper; looked for at each step, since torch._dynamo.reset() clears them",
        "never: they look for live wrappers",
    ),
)


# -- autograd

current_graph_task_id = torch._C._current_graph_task_id
current_autograd_node = torch._C._current_autograd_node
will_engine_execute_node = torch._C._will_engine_execute_node
queue_callback = Variable._execution_engine.queue_callback
"""Called at the end of the backward that runs in this thread."""

ENGINE_RUN_BACKWARD = "_engine_run_backward"
"""In `torch.autograd`: the one function through which each of its entries calls the engine."""

FunctionMeta = torch.autograd.function.FunctionMeta
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
is_profiling = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", True)
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard
NO_DISPATCH_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)


def mix_into_contexts(function: Any, mixin: type) -> None:
    """Let the contexts of ``function``, a class of autograd Functions, inherit from ``mixin`` first."""
    stock = function._backward_cls
    if not issubclass(stock, mixin):
        function._backward_cls = type(stock.__name__, (mixin, stock), {})


# -- tensors and modules

post_accumulate_grad_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
backward_hooks = operator.attrgetter("_backward_hooks")
local_tensor: Callable[[Any], Tensor] = operator.attrgetter("_local_tensor")
"""Of a DTensor: this rank's part."""

make_wrapper_subclass: Any = Tensor._make_wrapper_subclass
TensorBase = torch._C.TensorBase
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
disable_current_modes = _python_dispatch._disable_current_modes
submodules = operator.attrgetter("_modules")

foreach_add = torch._foreach_add
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_div_ = torch._foreach_div_
foreach_mul = torch._foreach_mul
foreach_mul_ = torch._foreach_mul_
foreach_zero_ = torch._foreach_zero_
aten_to_copy = torch.ops.aten._to_copy.default
BFLOAT16_PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
"""In `torch.cpu`: each tells of one kind of instruction."""


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of ``module`` itself, by name; none of one that is half made."""
    found: dict[str, Any] = vars(module).get("_parameters", {})
    return found


# -- torch.compile

disable_dynamo = torch._compile._disable_dynamo
COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"
"""Holds ``compiled_autograd_enabled``."""


@functools.cache
def compiler_callbacks() -> Any:
    """Return what calls back around each trace; imports Dynamo, which is heavy."""
    from torch._dynamo.callback import callback_handler

    return callback_handler


# -- optimizers, loss scalers, clipping

GLOBAL_STEP_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
"""In `torch.optim.optimizer`, where each step looks them up."""

STEP_SUPPORTS_AMP_SCALING = "_step_supports_amp_scaling"
step_hooks = operator.attrgetter("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
state_dict_hooks = operator.attrgetter("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
load_state_dict_hooks = operator.attrgetter(
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"
)
"""Of an optimizer: those before, and those after."""

OptState = grad_scaler.OptState
scale_of = operator.attrgetter("_scale")
"""Of a loss scaler: a tensor; None before it scaled anything."""

GET_TOTAL_NORM = "_get_total_norm"
CLIP_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", GET_TOTAL_NORM, "_clip_grads_with_norm_")
"""In `torch.nn.utils.clip_grad`; in `torch.nn.utils` without the first underscore."""


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` can have hooks: some classes never call torch's constructor."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


def states_by_optimizer(scaler: GradScaler) -> dict[int, dict[str, Any]]:
    """Return what ``scaler`` knows of each optimizer, by the optimizer's ``id``; nothing of one that is half made."""
    found: dict[int, dict[str, Any]] = getattr(scaler, "_per_optimizer_states", {})
    return found


def asking_scaler() -> GradScaler | None:
    """Return the loss scaler in whose ``step`` the property that calls this is being read; None for anybody else.

    A scaler's only word before it unscales and steps is to read ``_step_supports_amp_scaling``, and so may ``hasattr``,
    ``inspect.getmembers``, a debugger, or a library that wants to know. What differs is who asks.
    """
    frame = sys._getframe(2)
    asker = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
    return asker if isinstance(asker, GradScaler) else None


def clip_body(name: str) -> CellType | None:
    """Return where torch keeps the body of one of `CLIP_FUNCTIONS`; None where this torch does it otherwise."""
    function: Any = getattr(clip_grad, name, None)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cell: CellType | None = function.__closure__[names.index("func")] if "func" in names else None
    return cell


# -- torch.distributed, which this file does not import: modules and groups are passed in, or loaded by whoever has one

HASH_RANKS_TO_STR = "_hash_ranks_to_str"
"""In `torch.distributed.distributed_c10d`: makes the name of a group."""

stage_base = operator.attrgetter("_PipelineStageBase")
"""Of the module `torch.distributed.pipelining.stage`."""


def timeouts_of(group: Any) -> Iterator[datetime.timedelta]:
    """Yield the timeouts of the backends of ``group``, a process group; none where torch does not say."""
    for device in getattr(group, "_device_types", ()):
        try:
            timeout = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(timeout, datetime.timedelta):
            yield timeout


def local_shape_and_offset(param: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of the DTensor ``param``, and where in the whole it begins."""
    utils: Any = sys.modules["torch.distributed.tensor._utils"]  # loaded with DTensor
    shape, offset = utils.compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(shape), tuple(offset)


def fsdp_parameters() -> Iterator[tuple[Tensor, Any]]:
    """Yield each parameter that FSDP2 holds, with the mesh over which it reduces; looks through the objects alive."""
    module = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    if module is not None:
        holders = (obj for obj in gc.get_objects() if type(obj) is module.FSDPParam)
        yield from ((holder.sharded_param, holder.mesh_info.mesh) for holder in holders)


def checkpoint_info(frame: FrameType) -> Any:
    """Return the options with which ``torch.distributed.checkpoint`` was called, in one of its frames that has them."""
    return frame.f_locals.get("info")


def is_loading_checkpoint(frame: FrameType) -> bool:
    """Return whether ``frame`` is that in which ``torch.distributed.checkpoint`` loads an optimizer's state."""
    return frame.f_code.co_name == "_load_optim_state_dict"


def checkpoint_content(frame: FrameType) -> dict[str, Any]:
    """Return the state that is loaded in ``frame``, see `is_loading_checkpoint`; empty where this rank has none."""
    return frame.f_locals.get("state_dict") or {}
