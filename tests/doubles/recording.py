"""What the doubles of compiled libraries share: records of calls, and arithmetic as their kernels do it.

A double proves our side only: which arguments we would pass, and that the answers are put together
right. It says nothing about the library; tests/gpu runs the same cases on the real one.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from dataclasses import dataclass, field

import torch

from fusedopt.backends import lists

INT32_END = 2**31
"""From this many elements on, kernels that index with int32 go wrong. Tests lower it with `lists.MAX_NUMEL`."""


class WouldCorrupt(Exception):
    """The real code checks nothing here, and would read or write wrong memory."""


@dataclass
class Call:
    """One call of a library function: what it was given, as it was then."""

    name: str
    lists: list
    arguments: tuple = ()
    flag: torch.Tensor | None = None
    flag_before: int = 0
    keywords: dict = field(default_factory=dict)

    @property
    def dtypes(self):
        """Per list, the dtypes in it."""
        return [sorted({str(tensor.dtype) for tensor in tensors}) for tensors in self.lists]

    @property
    def numels(self):
        """Per list, the elements of each tensor."""
        return [[tensor.numel() for tensor in tensors] for tensors in self.lists]


class Calls(list):
    """All calls, in order."""

    def of(self, name):
        """Return the calls of the function ``name``."""
        return [call for call in self if call.name == name]


def record(calls, name, flag, tensor_lists, *arguments):
    """Append a call; then check what every kernel relies on: an int32 flag beside the tensors."""
    before = 0 if flag.is_meta else int(flag[0])
    calls.append(Call(name, [list(tensors) for tensors in tensor_lists], arguments, flag, before))
    if flag.dtype is not torch.int32:
        raise WouldCorrupt(f"{name}: flag is {flag.dtype} and would be read as int32")
    if flag.device != tensor_lists[0][0].device:
        raise WouldCorrupt(f"{name}: flag on {flag.device}, tensors on {tensor_lists[0][0].device}")


def refuse_mixed(name, tensor_lists):
    """Raise where one list has several dtypes: kernels look at its first tensor only."""
    for index, tensors in enumerate(tensor_lists):
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise WouldCorrupt(f"{name}: list {index} mixes dtypes; all would be read as {tensors[0].dtype}")


def refuse_long(name, tensor_lists):
    """Raise where int32 would overflow."""
    if any(tensor.numel() >= INT32_END for tensors in tensor_lists for tensor in tensors):
        raise WouldCorrupt(f"{name}: int n = {INT32_END} or more elements")


def dense(tensor, shape):
    """Return what a kernel sees that is given an address and ``shape`` only, whatever the strides say."""
    strides, numel = [], 1
    for length in reversed(shape):
        strides.insert(0, numel)
        numel *= length
    return torch.as_strided(tensor, shape, strides)


def as_float(number):
    """Return ``number`` as C's float, which is what kernels are told."""
    if isinstance(number, torch.Tensor):
        raise WouldCorrupt("a tensor for a C float: read with .item(), which waits for the device")
    return torch.tensor(number, dtype=torch.float32).item()


@torch.no_grad()
def scale(flag, source, target, factor):
    """``target = source * factor`` in fp32; raise the flag if the source is not finite."""
    product = source.float() * factor
    if not source.is_meta and not torch.isfinite(source.float()).all():
        flag.fill_(1)
    target.copy_(product)


@torch.no_grad()
def l2norm(flag, tensors):
    """Return the 2-norm, ``[1]``, summed in fp32; raise the flag if it is not finite."""
    total = sum((tensor.float().square().sum() for tensor in tensors), torch.zeros((), device=tensors[0].device))
    if not total.is_meta and not torch.isfinite(total):
        flag.fill_(1)
    return total.sqrt().view(1)


@torch.no_grad()
def adam(g, p, m, v, lr, beta1, beta2, eps, step, mode, bias_correction, decay, model=None):
    """One Adam step in fp32 on ``p``; hyper-parameters are C floats, bias corrections powers of those in double."""
    lr, beta1, beta2, eps, decay = map(as_float, (lr, beta1, beta2, eps, decay))
    corrections = [as_float(1 - beta**step) if bias_correction == 1 else 1.0 for beta in (beta1, beta2)]
    grad = g.float() + decay * p.float() if mode == 0 else g.float()
    one_minus = [as_float(1 - beta) for beta in (beta1, beta2)]
    m.copy_(beta1 * m + one_minus[0] * grad)
    v.copy_(beta2 * v + one_minus[1] * grad * grad)
    update = (m / corrections[0]) / ((v / corrections[1]).sqrt() + eps)
    if mode == 1:
        update = update + decay * p.float()
    p.copy_(p.float() - lr * update)
    if model is not None:
        model.copy_(p)


@torch.no_grad()
def sgd(g, p, mom, wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale, model=None):
    """One SGD step in fp32 on ``p``."""
    wd, momentum, dampening, lr = map(as_float, (wd, momentum, dampening, lr))
    grad, weight, buffer = g.float() * scale, p.float(), mom.float()
    if wd and not wd_after_momentum:
        grad = grad + wd * weight
    if momentum:
        buffer = grad if first_run else buffer * momentum + as_float(1 - dampening) * grad
        grad = grad + momentum * buffer if nesterov else buffer
    if wd and wd_after_momentum:
        grad = grad + wd * weight
    p.copy_(weight - lr * grad)
    if momentum:
        mom.copy_(buffer)
    if model is not None:
        model.copy_(p)


class FusedAdam(torch.optim.Optimizer):
    """What the FusedAdam of both libraries have in common: fp32 lists, a step counter per group, a flag buffer.

    Subclasses say how they call their kernel.
    """

    def __init__(self, params, defaults, adam_w_mode, run):
        super().__init__(params, defaults)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self._dummy_overflow_buf = torch.zeros(1, dtype=torch.int32)
        self._run = run

    def _step(self, closure):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            columns = ([], [], [], [])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                for key in ("exp_avg", "exp_avg_sq"):
                    if key not in state:
                        state[key] = torch.zeros_like(p.data).float()
                if p.dtype is not torch.float32:
                    raise RuntimeError("this double steps fp32 parameters only")
                for column, tensor in zip(
                    columns, (p.grad.data, p.data, state["exp_avg"], state["exp_avg_sq"]), strict=True
                ):
                    column.append(tensor)
            if columns[0]:
                hyper = (group["lr"], *group["betas"], group["eps"], group["step"], self.adam_w_mode)
                hyper += (1 if group["bias_correction"] else 0, group["weight_decay"])
                self._run(self._dummy_overflow_buf, [list(column) for column in columns], *hyper)
        return loss


@contextlib.contextmanager
def installed(modules):
    """Put ``modules`` (by name; None: not to be found) into sys.modules, and let adapters reach them on the CPU."""
    before = {name: sys.modules.get(name) for name in modules}
    device_types = lists.DEVICE_TYPES
    lists.DEVICE_TYPES = (*device_types, "cpu", "meta")
    sys.modules.update(modules)
    try:
        yield
    finally:
        lists.DEVICE_TYPES = device_types
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


class _Raising(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, name, error):
        self._name, self._error = name, error

    def find_spec(self, fullname, path=None, target=None):
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self._name else None

    def exec_module(self, module):
        raise self._error


@contextlib.contextmanager
def import_raising(name, error):
    """Let the import of ``name`` raise ``error``, as a broken installation does."""
    finder = _Raising(name, error)
    before = sys.modules.pop(name, None)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if before is not None:
            sys.modules[name] = before
