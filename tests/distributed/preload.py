"""What the server of ranks has done before it forks them: imports, which take seconds, and no use of what they bring.

A rank would do all of it by itself, only later; no test needs it. It leaves one setting behind: a rank tries each class
of torch's optimizers out once for each group of settings, not anew for each of the many equal ones that it wraps.
"""

import atexit
import gc
import importlib.util
import inspect
from typing import Any

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.checkpoint

from fusedopt.inner import shard_probe

if importlib.util.find_spec("transformers") is not None:
    import accelerate  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401

_find_out = shard_probe.find_out
_found: dict[tuple[type, str], shard_probe.Found] = {}


def _find_out_once(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> shard_probe.Found:
    if not type(optimizer).__module__.startswith("torch.optim."):
        return _find_out(optimizer, group)
    settings = {key: value for key, value in sorted(group.items()) if key not in ("params", "param_names")}
    key = (type(optimizer), repr(settings))
    if key not in _found:
        _found[key] = _find_out(optimizer, group)
    return _found[key]


shard_probe.find_out = _find_out_once

# What Python looks up once in the sources of all modules: for seeds of a GPU, which keep the stack, and for custom ops.
torch.manual_seed(torch.initial_seed())
inspect.getmodule(None, "any file but those of modules")
gc.collect()
gc.freeze()  # ranks share these pages for as long as nobody looks at them
atexit.register(gc.unfreeze)  # or some libraries miss objects at the end
