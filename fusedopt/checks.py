"""Refuse what cannot be wrapped, before anything is changed.

    [checks] -> parameters -> layout -> buffers -> arrival -> reduction -> clip -> step -> write-back -> gather

Every message says which parameter, what was found, what is needed, what to do.
Knows nothing of buffers.
"""

from __future__ import annotations

import gc
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fusedopt import live_wrappers
from fusedopt._torch_private import parameters_of
from fusedopt.buffers.main_grad import MAIN_DTYPES
from fusedopt.buffers.overlap import extent, has_overlap, have_common_elements
from fusedopt.config import MainGradConfig
from fusedopt.sharding import dtensor

_QUANTISED = re.compile("4bit|8bit|int8|quantized|float8|fp8", re.IGNORECASE)


def checked_optimizers(inner: Any, wrapper: type[Optimizer]) -> list[Optimizer]:
    """Return the optimizers to wrap as a list.

    Raises:
        TypeError: if one is no torch optimizer, or works on sparse gradients only.
        ValueError: if there is none.
        RuntimeError: if one is a ``wrapper`` already.
    """
    optimizers = list(inner) if isinstance(inner, (list, tuple)) else [inner]
    for opt in optimizers:
        if isinstance(opt, wrapper):
            raise RuntimeError("this optimizer is a FusedMainGradOptimizer already; wrap the bare optimizer, once")
        if not isinstance(opt, Optimizer):
            raise TypeError(
                f"inner is a {type(opt).__module__}.{type(opt).__qualname__}; needed is a torch.optim.Optimizer "
                "instance, or a list of them: FusedMainGradOptimizer(torch.optim.AdamW(model.parameters()))"
            )
        if isinstance(opt, torch.optim.SparseAdam):
            raise TypeError(
                "SparseAdam works on sparse gradients only, and main_grad is dense; use Adam with "
                "nn.Embedding(sparse=False), or keep SparseAdam unwrapped for its own parameters"
            )
    if not optimizers:
        raise ValueError("inner is an empty list; needed is at least one torch optimizer")
    return optimizers


def hidden_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that ``optimizer`` holds: in attributes, in containers there, and in these.

    Args:
        optimizer: an inner one.

    Returns:
        By where they were found, ``"optimizers[1]"``.
    """
    found: dict[str, Optimizer] = {}
    seen = {id(optimizer)}
    todo: list[tuple[str, Any]] = list(vars(optimizer).items())
    while todo:
        where, value = todo.pop()
        if id(value) in seen or where.rpartition(".")[2] == "state":
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            found[where] = value
            todo += [(f"{where}.{name}", held) for name, held in vars(value).items()]
        elif isinstance(value, dict):
            for number, (key, held) in enumerate(value.items()):
                if not isinstance(held, Tensor):
                    todo.append((f"{where}[{repr(key) if isinstance(key, str) else number}]", held))
        elif isinstance(value, (list, tuple, deque)):
            todo += [(f"{where}[{number}]", held) for number, held in enumerate(value) if not isinstance(held, Tensor)]
    return found


def refuse_hidden(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that hold others over parameters that are in none of their own groups.

    Those would get no main_grad, and nobody would reduce their gradients.

    Raises:
        ValueError: naming the class, where the other one is, and a parameter.
    """
    for opt in optimizers:
        known = {id(param) for group in opt.param_groups for param in group["params"]}
        for where, hidden in hidden_optimizers(opt).items():
            for group, name, param in _all_trainable(hidden):
                if id(param) not in known:
                    raise ValueError(
                        f"{type(opt).__name__} holds another optimizer, .{where} ({type(hidden).__name__}), and "
                        f"parameter {name} of its group {group}, of shape {tuple(param.shape)}, is in none of the "
                        f"groups of {type(opt).__name__}: it would get no main_grad. Give the wrapper the optimizers "
                        "themselves, each over its own parameters: FusedMainGradOptimizer([one, other])"
                    )


def _all_trainable(optimizer: Optimizer) -> list[tuple[int, str, nn.Parameter]]:
    groups = enumerate(optimizer.param_groups)
    return [(i, name, p) for i, group in groups for name, p in named_params(group, i) if p.requires_grad]


def refuse_unsupported(config: MainGradConfig, *, requires_closure: bool, is_sharded: bool) -> None:
    """Refuse settings that would do less than they were asked to.

    Args:
        config: as given.
        requires_closure: whether an inner optimizer cannot step without a closure.
        is_sharded: whether several ranks share its state.

    Raises:
        ValueError: naming the field.
    """
    if is_sharded and requires_closure:
        raise ValueError(
            f'shard="{config.shard}" with an inner optimizer that evaluates its closure itself (LBFGS): it works on '
            'all parameters at once, and a rank would see only its own. Use shard="none"'
        )
    if config.fused_linear:
        raise ValueError(
            "fused_linear=True was given to FusedMainGradOptimizer, which sees parameters and no modules; it is for "
            "the integrations. Drop it here"
        )
    if config.gradient_accumulation_steps > 1 and requires_closure:
        raise ValueError(
            f"gradient_accumulation_steps={config.gradient_accumulation_steps} with an inner optimizer that evaluates "
            "its closure itself; accumulate inside the closure and use gradient_accumulation_steps=1"
        )


def check_all_parameters(optimizers: Sequence[Optimizer], *, is_sharded: bool, rewrap: bool = False) -> list[Any]:
    """Refuse optimizers whose parameters cannot be wrapped; see `check_parameters` and `refuse_shared_memory`.

    Args:
        optimizers: bare ones.
        is_sharded: see `refuse_shared_memory`.
        rewrap: parameters may be held by live wrappers.

    Returns:
        These wrappers.

    Raises:
        ValueError: also if no parameter requires a gradient.
        RuntimeError: also if a live wrapper is around one of ``optimizers``, or a live DistributedDataParallel holds a
            parameter.
    """
    named = all_named(optimizers)
    if any(hasattr(param, "main_grad") for _, param in named):
        gc.collect()  # a wrapper that was dropped, but sits in a reference cycle, lets go of them now
        named = all_named(optimizers)
    for opt in optimizers:
        if live_wrappers.find(opt) is not None:
            raise RuntimeError(
                f"this {type(opt).__name__} is wrapped already: a FusedMainGradOptimizer that is still there holds it; "
                f"parameter {_first_name(opt)} already has a main_grad. Use that one; or call unwrap() on it first, "
                "which gives this optimizer back with its state in the parameters' dtype. rewrap=True takes parameters "
                "over into a new inner optimizer only"
            )
    found = [live_wrappers.find(param) for _, param in named] if rewrap else []
    wrappers = list({id(wrapper): wrapper for wrapper in found if wrapper is not None}.values())
    check_parameters(named, free_of=wrappers)
    trainable = [param for _, param in named if param.requires_grad]
    if not trainable:
        raise ValueError(
            f"none of the {len(named)} parameter(s) of the inner optimizer requires a gradient; unfreeze some "
            "(requires_grad_(True)) or pass those that train"
        )
    refuse_shared_memory(named, is_sharded=is_sharded)
    refuse_ddp(trainable)
    return wrappers


def all_named(optimizers: Sequence[Optimizer]) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters of ``optimizers`` as `named_params`."""
    groups = [group for opt in optimizers for group in opt.param_groups]
    return [pair for index, group in enumerate(groups) for pair in named_params(group, index)]


def named_params(group: dict[str, Any], index: int) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of group number ``index`` with their names, or with their places where they have none."""
    names = group.get("param_names") or [default_name(index, i) for i in range(len(group["params"]))]
    return list(zip(names, group["params"], strict=True))


def default_name(group: int, index: int) -> str:
    """Return what messages call a parameter without a name."""
    return f"param_groups[{group}]['params'][{index}]"


def _first_name(optimizer: Optimizer) -> str:
    return all_named([optimizer])[0][0]


def check_parameters(named_params: Iterable[tuple[str, Tensor]], *, free_of: Sequence[Any] = ()) -> None:
    """Refuse parameters that cannot be wrapped, before anything is changed.

    Args:
        named_params: the parameters, with their names.
        free_of: wrappers that will let go of theirs.

    Raises:
        TypeError: complex, sparse or non-floating dtype.
        ValueError: on the meta device, uninitialised, or given twice.
        RuntimeError: if a parameter already has a ``main_grad``.
    """
    seen: dict[int, str] = {}
    for name, param in named_params:
        if id(param) in seen:
            raise ValueError(
                f"parameter {name} is given twice (first as {seen[id(param)]}); give each parameter to one group of "
                "one inner optimizer, once"
            )
        seen[id(param)] = name
        if nn.parameter.is_lazy(param):
            raise ValueError(f"parameter {name} is uninitialised (a lazy module); run one forward first, then wrap")
        if param.requires_grad:
            check_trainable(name, param, free_of=free_of)


def check_trainable(name: str, param: Tensor, *, free_of: Sequence[Any] = ()) -> None:
    """Refuse one trainable parameter that cannot have main_grad; see `check_parameters`."""
    if not param.is_leaf:  # an optimizer with differentiable=True takes it
        raise ValueError(
            f"parameter {name} is not a leaf: it was computed ({param.grad_fn.name() if param.grad_fn else 'a view'}), "
            "so that autograd gives it no gradient. Give the optimizer the Parameter it was computed from; "
            "differentiable=True, for steps that are part of a graph, goes with the bare optimizer only"
        )
    if param.is_complex():
        raise TypeError(
            f"parameter {name} is {param.dtype}; fusedopt wraps real parameters only. Hold it as two real ones "
            "(torch.view_as_real), or leave it to an optimizer of its own"
        )
    refuse_quantised(name, param)
    if param.layout is not torch.strided:
        raise TypeError(f"parameter {name} has layout {param.layout}; make it dense (param.to_dense()) before wrapping")
    if param.dtype not in MAIN_DTYPES:
        raise TypeError(
            f"parameter {name} is {param.dtype}; a trainable parameter must be bfloat16, float16, float32 or float64. "
            "Freeze it (requires_grad=False) or cast it before wrapping"
        )
    if param.is_meta:
        raise ValueError(
            f"parameter {name} is on the meta device and has no values; materialise it (model.to_empty(device=...) "
            "and load weights) before wrapping"
        )
    if param.grad is not None and (param.grad.layout is not torch.strided or param.grad.requires_grad):
        raise TypeError(
            f"the gradient that parameter {name} has is sparse or part of a graph; clear it (param.grad = None) "
            "and make its layer deliver dense gradients before wrapping"
        )
    if has_overlap(dtensor.local_of(param)):
        raise ValueError(
            f"parameter {name} has shape {tuple(param.shape)} with strides {param.stride()}: some of its elements are "
            "the same memory (expand(), for one), and a step could not write them one by one. Make the small tensor "
            "the Parameter and expand it in forward, or give each element memory of its own (param.detach().clone())"
        )
    if hasattr(param, "main_grad"):
        holder = live_wrappers.find(param)
        if holder is None or all(holder is not wrapper for wrapper in free_of):
            _refuse_held(name, param, holder)


def refuse_quantised(name: str, param: Tensor) -> None:
    """Raise if ``param``, a trainable one, holds codes and no numbers."""
    # bitsandbytes' packed bytes may pose as bf16; torchao's and TransformerEngine's say it in the name of their class.
    if hasattr(param, "quant_state") or _QUANTISED.search(type(param).__name__):
        raise TypeError(
            f"parameter {name} is trainable and quantised ({type(param).__name__}): it has no digits that a step could "
            "move. Freeze it (requires_grad_(False)) and train adapters on it (PEFT), or load the model in bf16"
        )


def _refuse_held(name: str, param: Tensor, holder: Any) -> NoReturn:
    if holder is None:
        raise RuntimeError(
            f"parameter {name} already has a main_grad that no FusedMainGradOptimizer made: Megatron's DDP or another "
            "library did. Only one can own it: give fusedopt the bare model, or `del param.main_grad` where nothing "
            "uses it any more"
        )
    if not any(param is given for group in holder.param_groups for given in group["params"]):
        raise RuntimeError(
            f"parameter {name} already has a main_grad: it is no parameter of the model but a main_param, which a "
            "FusedMainGradOptimizer made for its inner optimizer. Make the new inner optimizer from "
            "model.parameters(), not from the groups of that one"
        )
    raise RuntimeError(
        f"parameter {name} already has a main_grad: a FusedMainGradOptimizer that is still there holds it. Call "
        "unwrap() on that one, or drop the last reference to it, before wrapping again; or give the new one "
        "rewrap=True, which unwraps it"
    )


def refuse_shared_memory(named: Sequence[tuple[str, Tensor]], *, is_sharded: bool) -> None:
    """Raise if two trainable parameters have elements in common, and each would train a copy of them.

    A float32 parameter that is whole on this rank trains in its own memory, as in torch, and may share it with others.

    Args:
        named: all parameters of one wrapper.
        is_sharded: whether each is moved into memory of its own.

    Raises:
        ValueError: naming both.
    """
    spans = []
    for name, param in named:
        local = dtensor.local_of(param)
        if param.requires_grad and local.numel() and local.layout is torch.strided and local.data_ptr():
            spans.append((str(local.device), local.data_ptr(), local.data_ptr() + extent(local), name, local))
    spans.sort(key=lambda span: span[:3])
    open_spans: list[Any] = []
    for span in spans:
        device, start, _, name, local = span
        open_spans = [other for other in open_spans if other[0] == device and other[2] > start]
        for _, _, _, other_name, other in open_spans:
            are_copied = is_sharded or MAIN_DTYPES[local.dtype] is not local.dtype or other.dtype is not local.dtype
            if are_copied and have_common_elements(local, other):
                raise ValueError(
                    f"parameters {other_name} and {name} are two Parameters over the same memory, as "
                    "nn.Parameter(other.data) makes them: each would train a copy of it, and one would overwrite what "
                    "the other learned. Tie them as one Parameter (module.weight = other.weight), or give the "
                    "optimizer one of them"
                )
        open_spans.append(span)


def check_engines(named: Sequence[tuple[str, Tensor]], shard: str) -> bool:
    """Check how torch's parallel engines hold the trainable ones of ``named``.

    Args:
        named: all parameters of the inner optimizer.
        shard: the setting.

    Returns:
        Whether FSDP2 holds them, and does all communication.

    Raises:
        ValueError: for FSDP2 with a shard of ours, for a part of the parameters only, or over other ranks for some; for
            a parameter on a mesh that this rank is not in.
        RuntimeError: naming a parameter that an engine replaced after the optimizer was made, or untied from another.
    """
    trainable = [(name, param) for name, param in named if param.requires_grad]
    _refuse_strangers(trainable)
    _refuse_orphans(trainable)
    _refuse_untied(trainable)
    held = dtensor.held_by_fsdp(param for _, param in trainable)
    if not held:
        return False
    if shard != "none":
        raise ValueError(
            f'shard="{shard}" with parameters that fully_shard holds: FSDP2 shards gradients and parameters itself, '
            'and fusedopt keeps main_grad and main_param for what it leaves on this rank. Use shard="none"'
        )
    outside = [name for name, param in trainable if id(param) not in held]
    if outside:
        raise ValueError(
            f"fully_shard holds {len(held)} of the trainable parameters and not {outside[0]}: nobody would reduce its "
            "gradient. Apply fully_shard to the whole model, too, or give that parameter an optimizer of its own"
        )
    _refuse_unequal_meshes(trainable, held)
    return True


def _refuse_strangers(trainable: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if a parameter lies on ranks of which this one is none: it has no part of it, nor a copy."""
    for name, param in trainable:
        mesh = dtensor.mesh_of(param)
        if mesh is not None and mesh.get_coordinate() is None:
            raise ValueError(
                f"parameter {name} is a DTensor over ranks {dtensor.ranks_of(mesh)}, and rank "
                f"{torch.distributed.get_rank()} is none of them; needed is a mesh that each rank is in. Make one over "
                "all ranks, init_device_mesh(device, (replicas, parts), mesh_dim_names=('dp', 'tp')), parallelise "
                "over mesh['tp'], make the optimizer, and wrap it with device_mesh=mesh['dp']; or keep such a "
                "parameter out of the optimizers of other ranks"
            )


def _refuse_unequal_meshes(trainable: Sequence[tuple[str, Tensor]], held: dict[int, Any]) -> None:
    """Raise if FSDP2 trains some parameters on ranks that others do not know of: norms and skips would differ."""
    reduced = {tuple(dtensor.ranks_of(held[id(param)])): name for name, param in trainable}
    for name, param in trainable if len(reduced) > 1 else []:
        found = dtensor.ranks_of(dtensor.mesh_of(param))
        for ranks, other in reduced.items():
            if not set(ranks) <= set(found):
                raise ValueError(
                    f"fully_shard holds parameter {name} on ranks {found} and {other} on ranks {list(ranks)}: the "
                    f"others of these would not know of {name}, so norms and skipped steps would differ. Needed are "
                    "the same ranks for both: where the others hold copies, fully_shard(layer, mesh=mesh['replicate', "
                    "'shard']); where they hold other experts, first spread these over a mesh dimension of their own "
                    "(parallelize_module), then fully_shard. Or give each an optimizer and a wrapper of its own"
                )


def _refuse_untied(trainable: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if one of two tied parameters became a DTensor, and the other did not: each would train by itself."""
    placed = [(name, param) for name, param in trainable if dtensor.is_dtensor(param)]
    plain = [(name, param) for name, param in trainable if not dtensor.is_dtensor(param)] if placed else []
    for name, param in plain:
        for other, copied in placed:
            if dtensor.is_copy(copied, param):
                raise RuntimeError(
                    f"parameter {other} is a DTensor with the values of {name}, which is plain: they were tied, and "
                    "only one of them was parallelised. Parallelise both with one plan, and tie them again "
                    "(model.tie_weights()) before making the optimizer"
                )


def _refuse_orphans(trainable: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if an engine replaced parameters by DTensors after the optimizer was made: it would train nothing."""
    plain = [(name, param) for name, param in trainable if not dtensor.is_dtensor(param)]
    if not plain or not dtensor.is_loaded() or not _has_process_group():
        return
    held: set[int] = set()
    replacements: set[tuple[torch.Size, torch.dtype]] = set()
    for module in gc.get_objects():
        if issubclass(type(module), nn.Module):
            params = [param for param in parameters_of(module).values() if param is not None]
            held.update(id(param) for param in params)
            replacements.update((param.shape, param.dtype) for param in params if dtensor.is_dtensor(param))
    for name, param in plain:
        if id(param) not in held and (param.shape, param.dtype) in replacements:
            raise RuntimeError(
                f"parameter {name} is in no live module, and there is one with a DTensor parameter of its shape: "
                "parallelize_module or fully_shard replaced it after the optimizer was made. Parallelise first, then "
                "make the optimizer from model.parameters(), then wrap"
            )


def refuse_replaced(absent: Sequence[tuple[str, Tensor]]) -> None:
    """Raise if another Parameter trains in the place of one of ``absent``, which got no gradient.

    Looks through the objects alive, about 0.1 s: a Parameter of the same form that no wrapper holds, with a gradient,
    in a live module, while no module holds the one that was wrapped.

    Args:
        absent: parameters of one wrapper, with their names.

    Raises:
        RuntimeError: naming both.
    """
    held: set[int] = set()
    training: dict[tuple[torch.Size, torch.dtype], str] = {}
    for module in gc.get_objects():
        if not issubclass(type(module), nn.Module):
            continue
        for name, param in parameters_of(module).items():
            held.add(id(param))
            is_strange = isinstance(param, nn.Parameter) and param.is_leaf and not hasattr(param, "main_grad")
            if is_strange and param.grad is not None:
                training[param.shape, param.dtype] = f"{type(module).__name__}.{name}"
    for name, param in absent:
        found = training.get((param.shape, param.dtype))
        if id(param) not in held and found is not None:
            raise RuntimeError(
                f"parameter {name} got no gradient and is in no live module, while {found}, of the same shape, has one "
                "and belongs to no wrapper: load_state_dict(assign=True), or `module.weight = nn.Parameter(...)`, put "
                "it there after wrapping, and it would never train. Load with assign=True first, then make the "
                "optimizer and wrap; or load without assign, which copies into the parameters that train"
            )


def refuse_ddp(params: Sequence[Tensor]) -> None:
    """Raise if a live DistributedDataParallel module holds one of ``params``.

    DDP leaves no mark on a parameter, so this looks through the objects alive; it costs about 0.1 s
    and runs only where a process group exists.

    Raises:
        RuntimeError: naming the module DDP wraps.
    """
    if not _has_process_group():
        return
    ours = {id(param) for param in params}
    for module in gc.get_objects():
        # type(), not isinstance(): the latter runs code of lazy modules and dead weak proxies. Its bases, not
        # issubclass(): among those is an abstract class, which asks Python code about each type.
        if nn.parallel.DistributedDataParallel not in type(module).__mro__:
            continue
        if any(id(p) in ours for p in module.parameters()):
            raise RuntimeError(
                f"a live DistributedDataParallel around {type(module.module).__name__} holds parameters of this "
                "optimizer, and would reduce gradients that main_grad already holds. Give fusedopt the bare module: "
                "it reduces by itself. In place of accelerator.prepare(...), which makes one, call "
                "fusedopt.integrations.accelerate.prepare(accelerator, ...)"
            )


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
