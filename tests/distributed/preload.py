"""What the server of ranks has done before it forks them: imports that take seconds, and nothing of fusedopt.

A rank would do all of it by itself, only later; no test needs it. It leaves no setting behind.
"""

import atexit
import gc
import importlib.util
import inspect

import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp.sharded_grad_scaler
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.checkpoint

if importlib.util.find_spec("transformers") is not None:
    import accelerate  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.trainer  # noqa: F401

# What Python looks up once in the sources of all modules: for seeds of a GPU, which keep the stack, and for custom ops.
torch.manual_seed(torch.initial_seed())
inspect.getmodule(None, "any file but those of modules")
gc.collect()
gc.freeze()  # ranks share these pages for as long as nobody looks at them
atexit.register(gc.unfreeze)  # or some libraries miss objects at the end
