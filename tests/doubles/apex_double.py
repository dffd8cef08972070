"""A double of NVIDIA apex: amp_C, fused_weight_gradient_mlp_cuda, and the Python package beside them.

It proves our side only, the arguments that we would pass; what the library makes of them is shown
by tests/gpu, with the same cases. Where the real code checks, the double raises what it raises;
where the real code would silently go wrong, it goes wrong visibly or raises `WouldCorrupt`. Written
from csrc/ of github.com/NVIDIA/apex at 6424da3b4f.
"""

import contextlib
from types import ModuleType

import torch

from tests.doubles import recording
from tests.doubles.recording import Call, Calls, WouldCorrupt

MAX_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
MAX_BLOCKS = 320
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def launched(name, chunk_size, tensor_lists, depth):
    """Return the positions that the harness really works on.

    It starts a kernel inside its loop over chunks, so an empty tensor at the end leaves what was collected before it
    unlaunched; and an empty one in the last slot lets the next tensor write past the array.
    """
    if len(tensor_lists) != depth:
        raise RuntimeError(f"{name}: tensor_lists.size() != depth")
    if not tensor_lists[0]:
        raise RuntimeError(f"{name}: tensor_lists[0].size() > 0")
    first = tensor_lists[0][0]
    for tensors in tensor_lists:
        if len(tensors) != len(tensor_lists[0]):
            raise RuntimeError(f"{name}: size mismatch among tensor lists")
        for tensor, other in zip(tensors, tensor_lists[0], strict=True):
            if not tensor.is_contiguous():
                raise RuntimeError(f"{name}: a tensor was not contiguous")
            if tensor.device != first.device:
                raise RuntimeError(f"{name}: a tensor was not on the same device as the first")
            if tensor.numel() != other.numel():
                raise RuntimeError(f"{name}: numel mismatch")
    done, pending, num_blocks = [], [], 0
    last = len(tensor_lists[0]) - 1
    for position, tensor in enumerate(tensor_lists[0]):
        if len(pending) == MAX_TENSORS[depth]:
            raise WouldCorrupt(f"{name}: an empty tensor in the last slot; the next is written past the array")
        pending.append(position)
        num_chunks = -(-tensor.numel() // chunk_size)
        num_blocks += num_chunks
        if num_chunks and (len(pending) == MAX_TENSORS[depth] or position == last or num_blocks >= MAX_BLOCKS):
            done, pending, num_blocks = done + pending, [], num_blocks % MAX_BLOCKS
    return done


class AmpC(ModuleType):
    """The extension amp_C. Functions take positional arguments only."""

    def __init__(self, calls):
        super().__init__("amp_C")
        self._calls = calls

    def _enter(self, name, chunk_size, flag, tensor_lists, depth, *arguments):
        positions = launched(name, chunk_size, tensor_lists, depth)
        recording.record(self._calls, name, flag, tensor_lists, *arguments)
        recording.refuse_mixed(name, tensor_lists)
        if name != "multi_tensor_adam":  # the one with a 64-bit path
            recording.refuse_long(name, tensor_lists)
        return [[tensors[position] for tensors in tensor_lists] for position in positions]

    def multi_tensor_scale(self, chunk_size, noop_flag, tensor_lists, scale, /):
        """[in, out]; the flag is written, never read."""
        rows = self._enter("multi_tensor_scale", chunk_size, noop_flag, tensor_lists, 2, scale)
        if any(tensors[0].dtype not in KERNEL_DTYPES for tensors in tensor_lists):
            raise RuntimeError("multi_tensor_scale not implemented for this type")
        for source, target in rows:
            recording.scale(noop_flag, source, target, recording.as_float(scale))

    def multi_tensor_l2norm(self, chunk_size, noop_flag, tensor_lists, per_tensor=None, /):
        """[x] -> (norm [1], empty); the flag is written, never read."""
        rows = self._enter("multi_tensor_l2norm", chunk_size, noop_flag, tensor_lists, 1, per_tensor)
        if tensor_lists[0][0].dtype not in KERNEL_DTYPES:
            raise RuntimeError("multi_tensor_l2norm_cuda not implemented for this type")
        return recording.l2norm(noop_flag, [tensor for (tensor,) in rows]), torch.empty(0)

    def multi_tensor_adam(
        self, chunk_size, noop_flag, tensor_lists, lr, b1, b2, eps, step, mode, bias_correction, wd, /
    ):
        """[g, p, m, v]; p is read in g's dtype; the flag is ignored."""
        arguments = (lr, b1, b2, eps, step, mode, bias_correction, wd)
        rows = self._enter("multi_tensor_adam", chunk_size, noop_flag, tensor_lists, 4, *arguments)
        if not all(type(number) is int for number in (step, mode, bias_correction)):
            raise TypeError("multi_tensor_adam(): incompatible function arguments")
        g, p, m, v = (tensors[0].dtype for tensors in tensor_lists)
        if p is not g:
            raise WouldCorrupt(f"multi_tensor_adam: parameters of {p} would be read as {g}")
        if {m, v} != {torch.float32}:
            raise WouldCorrupt(f"multi_tensor_adam: state of {m}, {v} would be read as float32")
        for row in rows:
            recording.adam(*row, *arguments)

    def multi_tensor_sgd(
        self, chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov, first_run, after, scale, /
    ):
        """[g, p, momentum(, fp16 copy)]; does nothing where the flag is set."""
        arguments = (wd, momentum, dampening, lr, nesterov, first_run, after, scale)
        depth = len(tensor_lists)
        rows = self._enter("multi_tensor_sgd", chunk_size, noop_flag, tensor_lists, depth, *arguments)
        dtypes = [tensors[0].dtype for tensors in tensor_lists]
        half, full = torch.float16, torch.float32
        known = ([half] * 3, [full] * 3, [half, full, full, half], [full, full, full, half])
        if dtypes not in known:
            raise RuntimeError(f"multi_tensor_sgd only supports some combinations of types, got {dtypes}")
        if int(noop_flag[0]):
            return
        for g, p, mom, *model in rows:
            recording.sgd(g, p, mom, *arguments, *model)


class Wgrad(ModuleType):
    """The extension fused_weight_gradient_mlp_cuda: checks nothing at all, and always adds."""

    def __init__(self, calls):
        super().__init__("fused_weight_gradient_mlp_cuda")
        self._calls = calls

    @torch.no_grad()
    def wgrad_gemm_accum_fp32(self, input, d_output, d_weight, /):
        """``d_weight += d_output.T @ input``, all of them taken for dense, d_output for input's dtype."""
        self._calls.append(Call("wgrad_gemm_accum_fp32", [[input], [d_output], [d_weight]]))
        if input.dtype not in KERNEL_DTYPES:
            raise RuntimeError("wgrad_gemm_accum_fp32 not implemented for this type")
        if d_output.dtype is not input.dtype or d_weight.dtype is not torch.float32:
            raise WouldCorrupt(f"d_output of {d_output.dtype} and d_weight of {d_weight.dtype} would be misread")
        if not input.numel() or not d_output.numel() or len({t.device for t in (input, d_output, d_weight)}) > 1:
            raise WouldCorrupt("empty operands, or operands on several devices")
        num_tokens, num_in = input.shape
        num_out = d_weight.shape[0]
        x, dy = (
            recording.dense(input, (num_tokens, num_in)).float(),
            recording.dense(d_output, (num_tokens, num_out)).float(),
        )
        recording.dense(d_weight, (num_out, num_in)).add_(dy.t() @ x)


class FusedAdam(recording.FusedAdam):
    """apex.optimizers.FusedAdam by its signature, for fp32 parameters."""

    def __init__(
        self,
        params,
        lr=1e-3,
        bias_correction=True,
        betas=(0.9, 0.999),
        eps=1e-8,
        adam_w_mode=True,
        weight_decay=0.0,
        amsgrad=False,
        set_grad_none=True,
        capturable=False,
        master_weights=False,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        if capturable:
            raise NotImplementedError("not in the double")
        amp_c = AmpC(Calls())
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(
            params,
            {**defaults, "weight_decay": weight_decay},
            adam_w_mode,
            lambda *arguments: amp_c.multi_tensor_adam(65536, *arguments),
        )
        self.set_grad_none = set_grad_none

    def zero_grad(self):
        """Clear; takes no argument, unlike torch's."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self, closure=None, grads=None, output_params=None, scale=None, grad_norms=None, grad_scaler=None):
        """Step; the arguments after closure are remnants that the real one refuses too."""
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise RuntimeError("FusedAdam has been updated.")
        return self._step(closure)


@contextlib.contextmanager
def apex_installed(*, without=(), broken=None, package=True):
    """Install the double; yields its calls.

    Args:
        without: names of modules, or of functions, that this build lacks.
        broken: an exception that importing amp_C raises.
        package: whether the Python package is there beside the extensions.
    """
    calls = Calls()
    modules = {"amp_C": AmpC(calls), "fused_weight_gradient_mlp_cuda": Wgrad(calls)}
    if package:
        modules |= {name: ModuleType(name) for name in ("apex", "apex.multi_tensor_apply", "apex.optimizers")}
        modules["apex"].__path__ = []
        modules["apex.optimizers"].FusedAdam = FusedAdam
    for name in without:
        if name in modules:
            modules[name] = None  # makes import raise ModuleNotFoundError
        else:
            modules["amp_C"] = _without(modules["amp_C"], name)
    if broken is not None:
        modules.pop("amp_C")
        with recording.installed(modules), recording.import_raising("amp_C", broken):
            yield calls
        return
    with recording.installed(modules):
        yield calls


def _without(module, name):
    """Return a module with the functions of ``module`` but ``name``."""
    reduced = ModuleType(module.__name__)
    for attribute in [attribute for attribute in dir(type(module)) if attribute.startswith("multi_tensor_")]:
        if attribute != name:
            setattr(reduced, attribute, getattr(module, attribute))
    return reduced
