"""A double of NVIDIA Transformer Engine: transformer_engine.pytorch, its cpp_extensions and optimizers.

It proves our side only, the arguments that we would pass; what the library makes of them is shown
by tests/gpu, with the same cases. Where the real code checks, the double raises what it raises;
where the real code would silently go wrong, it goes wrong visibly or raises `WouldCorrupt`. Written
from TransformerEngine at d0067d0da6, and from an older general_gemm that wants a workspace.
"""

import contextlib
from types import ModuleType

import torch

from tests.doubles import recording
from tests.doubles.recording import Call, Calls, WouldCorrupt

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PACKAGE = "transformer_engine.pytorch"


def in_tf32(tensor):
    """Return fp32 with ten bits of mantissa: what TE's GEMM makes of fp32 operands."""
    return (tensor.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


class Gemm:
    """general_gemm, in the signatures of three releases. Operands' strides are not looked at."""

    def __init__(self, calls):
        self._calls = calls

    def current(
        self,
        A,
        B,
        out_dtype=None,
        quantization_params=None,
        gelu=False,
        gelu_in=None,
        alpha=1.0,
        beta=None,
        accumulate=False,
        layout="TN",
        out=None,
        bias=None,
        use_split_accumulator=False,
        grad=False,
        ub=None,
        ub_type=None,
        extra_output=None,
        bulk_overlap=False,
    ):
        """As of 2.20."""
        return self._run(A, B, out_dtype, accumulate, layout, out, grad, None)

    def with_workspace(
        self,
        A,
        B,
        workspace,
        out_dtype=None,
        quantization_params=None,
        gelu=False,
        gelu_in=None,
        accumulate=False,
        layout="TN",
        out=None,
        bias=None,
        use_split_accumulator=False,
        grad=False,
        ub=None,
        ub_type=None,
        extra_output=None,
        bulk_overlap=False,
    ):
        """As of 2.0 to 2.8 or so."""
        if not isinstance(workspace, torch.Tensor):
            raise TypeError("workspace.shape")
        return self._run(A, B, out_dtype, accumulate, layout, out, grad, workspace)

    def without_accumulate(self, A, B, out_dtype=None, layout="TN", out=None, grad=False):
        """An imagined release that cannot add."""
        return self._run(A, B, out_dtype, False, layout, out, grad, None)

    def with_stranger(self, A, B, stranger, out_dtype=None, accumulate=False, layout="TN", out=None, grad=False):
        """An imagined release that wants something new."""
        return self._run(A, B, out_dtype, accumulate, layout, out, grad, None)

    @torch.no_grad()
    def _run(self, a, b, out_dtype, accumulate, layout, out, grad, workspace):
        keywords = {"out_dtype": out_dtype, "accumulate": accumulate, "layout": layout, "grad": grad}
        self._calls.append(Call("general_gemm", [[a], [b], [out]], keywords={**keywords, "workspace": workspace}))
        if layout not in ("TN", "NN", "NT"):
            raise AssertionError(f"GEMM layout {layout} not supported.")
        if out is not None and not out.is_contiguous():
            raise ValueError("Output tensor is not contiguous.")
        if layout != "NT" or out is None or not grad or out.dtype is not out_dtype:
            raise NotImplementedError("the double knows the weight gradient only")
        if not a.numel() or not b.numel():
            raise RuntimeError("cuBLAS: an invalid value was passed")
        if a.dtype is not b.dtype or a.dtype not in KERNEL_DTYPES or a.device != b.device or a.shape[0] != b.shape[0]:
            raise WouldCorrupt(f"operands {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}")
        x, dy = (recording.dense(tensor, tuple(tensor.shape)).float() for tensor in (a, b))
        if a.dtype is torch.float32:
            x, dy = in_tf32(x), in_tf32(dy)
        product = dy.t() @ x
        if out.shape != product.shape:
            raise RuntimeError(f"cuBLAS: output is {list(out.shape)} for {list(product.shape)}")
        if accumulate:
            out.add_(product)
        else:
            out.copy_(product)
        return out, None, None, None


class MultiTensorApply:
    """The applier: drops empty tensors, rebinds the entries of the list it is given, may return None."""

    def __init__(self, chunk_size):
        self.chunk_size = chunk_size

    def __call__(self, op, noop_flag_buffer, tensor_lists, *args):
        """Call ``op`` with the chunk size in front, unless nothing is left."""
        if len({len(tensors) for tensors in tensor_lists}) > 1:
            raise RuntimeError("Expected aligned multi-tensor lists.")
        kept = [position for position, tensor in enumerate(tensor_lists[0]) if tensor.numel()]
        tensor_lists[:] = [[tensors[position] for position in kept] for tensors in tensor_lists]
        if not kept:
            return None
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


class Kernels:
    """The multi-tensor functions of transformer_engine_torch. They take positional arguments only."""

    def __init__(self, calls):
        self._calls = calls

    def _enter(self, name, flag, tensor_lists, *arguments):
        recording.record(self._calls, name, flag, tensor_lists, *arguments)
        for tensors in tensor_lists:
            if any(not tensor.numel() for tensor in tensors):
                raise RuntimeError(f"{name}: a tensor has zero size")
            if any(not tensor.is_contiguous() or tensor.device != tensor_lists[0][0].device for tensor in tensors):
                raise WouldCorrupt(f"{name}: strides and devices are not looked at")
            if [t.numel() for t in tensors] != [t.numel() for t in tensor_lists[0]]:
                raise WouldCorrupt(f"{name}: lengths are taken from list 0")

    def multi_tensor_scale(self, chunk_size, noop_flag, tensor_lists, scale, /):
        """[in, out] by a number."""
        self._enter("multi_tensor_scale", noop_flag, tensor_lists, scale)
        self._scale(noop_flag, tensor_lists, recording.as_float(scale))

    def multi_tensor_scale_tensor(self, chunk_size, noop_flag, tensor_lists, scale, /):
        """[in, out] by an fp32 tensor on the device."""
        self._enter("multi_tensor_scale_tensor", noop_flag, tensor_lists, scale)
        if not isinstance(scale, torch.Tensor):
            raise TypeError("multi_tensor_scale_tensor(): incompatible function arguments")
        if scale.dtype is not torch.float32 or scale.device != tensor_lists[0][0].device:
            raise WouldCorrupt(f"a scale of {scale.dtype} on {scale.device} would be read as float32 on the device")
        self._scale(noop_flag, tensor_lists, scale.view(()))

    def _scale(self, flag, tensor_lists, factor):
        recording.refuse_mixed("scale", tensor_lists)
        if len(tensor_lists) != 2 or any(tensors[0].dtype not in KERNEL_DTYPES for tensors in tensor_lists):
            raise RuntimeError("Invalid type.")
        for source, target in zip(*tensor_lists, strict=True):
            recording.scale(flag, source, target, factor)

    def multi_tensor_l2norm(self, chunk_size, noop_flag, tensor_lists, per_tensor=None, /):
        """[x] -> (norm [1], empty)."""
        self._enter("multi_tensor_l2norm", noop_flag, tensor_lists, per_tensor)
        recording.refuse_mixed("multi_tensor_l2norm", tensor_lists)
        recording.refuse_long("multi_tensor_l2norm", tensor_lists)
        if len(tensor_lists) != 1 or tensor_lists[0][0].dtype not in KERNEL_DTYPES:
            raise RuntimeError("Invalid type.")
        return recording.l2norm(noop_flag, tensor_lists[0]), torch.empty(0)

    def multi_tensor_adam(
        self, chunk_size, noop_flag, tensor_lists, lr, b1, b2, eps, step, mode, bias_correction, wd, /
    ):
        """[g, p, m, v] or [g, p, m, v, master]; every dtype is checked; the flag is ignored."""
        arguments = (lr, b1, b2, eps, step, mode, bias_correction, wd)
        self._enter("multi_tensor_adam", noop_flag, tensor_lists, *arguments)
        if not all(type(number) is int for number in (step, mode, bias_correction)):
            raise TypeError("multi_tensor_adam(): incompatible function arguments")
        if len(tensor_lists) not in (4, 5):
            raise RuntimeError("Expected 4 or 5 tensor lists")
        dtypes = [{tensor.dtype for tensor in tensors} for tensors in tensor_lists]
        if any(len(found) != 1 for found in dtypes) or any(found != {torch.float32} for found in dtypes[2:]):
            raise RuntimeError(f"Expected tensors of one type per list, state and master in float32, got {dtypes}")
        for g, p, m, v, *master in zip(*tensor_lists, strict=True):
            if master:
                recording.adam(g, master[0], m, v, *arguments, model=p)
            else:
                recording.adam(g, p, m, v, *arguments)

    def multi_tensor_sgd(
        self, chunk_size, noop_flag, tensor_lists, wd, momentum, dampening, lr, nesterov, first_run, after, scale, /
    ):
        """[g, p, momentum(, fp16 copy)]; does nothing where the flag is set."""
        arguments = (wd, momentum, dampening, lr, nesterov, first_run, after, scale)
        self._enter("multi_tensor_sgd", noop_flag, tensor_lists, *arguments)
        recording.refuse_mixed("multi_tensor_sgd", tensor_lists)
        recording.refuse_long("multi_tensor_sgd", tensor_lists)
        dtypes = [tensors[0].dtype for tensors in tensor_lists]
        half, full = torch.float16, torch.float32
        if dtypes not in ([half] * 3, [full] * 3, [half, full, full, half], [full, full, full, half]):
            raise RuntimeError("Unsupported combination of weight and gradient types.")
        if int(noop_flag[0]):
            return
        for g, p, mom, *model in zip(*tensor_lists, strict=True):
            recording.sgd(g, p, mom, *arguments, *model)


class FusedAdam(recording.FusedAdam):
    """transformer_engine.pytorch.optimizers.FusedAdam by its signature, for fp32 parameters."""

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        *,
        bias_correction=True,
        adam_w_mode=True,
        capturable=False,
        master_weights=False,
        master_weight_dtype=torch.float32,
        exp_avg_dtype=torch.float32,
        exp_avg_sq_dtype=torch.float32,
        use_decoupled_grad=False,
        store_param_remainders=False,
        set_grad_none=None,
    ):
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if capturable or master_weights or use_decoupled_grad or store_param_remainders:
            raise NotImplementedError("not in the double")
        apply, kernels = MultiTensorApply(65536), Kernels(Calls())
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(
            params,
            {**defaults, "weight_decay": weight_decay},
            adam_w_mode,
            lambda *arguments: apply(kernels.multi_tensor_adam, *arguments),
        )

    def zero_grad(self, set_to_none=None):
        """Clear."""
        super().zero_grad(set_to_none is not False)

    def step(self, closure=None, grad_scaler=None):
        """Step."""
        return self._step(closure)


@contextlib.contextmanager
def te_installed(*, without=(), broken=None, gemm="current", get_workspace="without arguments"):
    """Install the double; yields its calls.

    Args:
        without: names of functions that this release lacks.
        broken: an exception that importing transformer_engine.pytorch raises.
        gemm: which of the signatures of `Gemm`.
        get_workspace: ``"without arguments"``, ``"with a device"``, or ``"absent"``.
    """
    calls = Calls()
    names = (
        "",
        ".pytorch",
        ".pytorch.cpp_extensions",
        ".pytorch.optimizers",
        ".pytorch.module",
        ".pytorch.module.base",
    )
    modules = {f"transformer_engine{name}": ModuleType(f"transformer_engine{name}") for name in names}
    for module in modules.values():
        module.__path__ = []
    kernels, optimizers = Kernels(calls), modules[f"{PACKAGE}.optimizers"]
    for name in [name for name in dir(kernels) if name.startswith("multi_tensor_")]:
        setattr(optimizers, name, getattr(kernels, name))
    optimizers.multi_tensor_applier = MultiTensorApply(2048 * 32)
    optimizers.FusedAdam = FusedAdam
    modules[f"{PACKAGE}.cpp_extensions"].general_gemm = getattr(Gemm(calls), gemm)
    workspaces = {
        "without arguments": lambda: torch.empty(32, dtype=torch.uint8),
        "with a device": lambda device: torch.empty(32, dtype=torch.uint8, device=device),
    }
    if get_workspace in workspaces:
        modules[f"{PACKAGE}.module.base"].get_workspace = workspaces[get_workspace]
    for name in without:
        owner = modules[f"{PACKAGE}.cpp_extensions" if name == "general_gemm" else f"{PACKAGE}.optimizers"]
        delattr(owner, name)
    if broken is None:
        with recording.installed(modules):
            yield calls
        return
    parent = {"transformer_engine": modules["transformer_engine"]}
    with recording.installed(parent), recording.import_raising(PACKAGE, broken):
        yield calls
