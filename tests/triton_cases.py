"""What the tests of the Triton kernels share: sizes around a block, guarded targets, and a problem for a step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

import fusedopt
from fusedopt.backends.offers import Adam, StepTensors
from tests.compare import bits

BLOCK = 1024
SIZES = (1, 7, 0, BLOCK - 1, BLOCK, 2 * BLOCK + 1)
LOW = (torch.bfloat16, torch.float16)
GUARD = 64  # elements before and after each target, which nobody may write
ADAMW = Adam(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-3, weight_decay=0.1, is_decoupled=True)
ADAM = Adam(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-3, weight_decay=0.1, is_decoupled=False)


def load_copy(name):
    """Return a copy of triton_ops of our own: others may have imported it with or without the interpreter."""
    path = Path(fusedopt.__file__).parent / "backends" / "triton_ops.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_bits(found, expected):
    assert found.dtype is expected.dtype
    assert torch.isfinite(expected).all()
    assert torch.equal(bits(found), bits(expected))


def guarded(numel, dtype):
    """Return a target, and what surrounds it in memory."""
    memory = torch.full((numel + 2 * GUARD,), 7.0, dtype=dtype)
    return memory[GUARD : GUARD + numel], (memory[:GUARD], memory[GUARD + numel :])


class Problem:
    """StepTensors for an Adam step from random gradients and states; parameter i makes step 2 + 5 * i."""

    def __init__(self, sizes=SIZES, dtype=torch.bfloat16, on_first_step=False):
        generator = torch.Generator().manual_seed(len(sizes))
        random = [torch.randn(4, size, generator=generator) for size in sizes]
        self.grads = [r[0].clone() for r in random]
        self.mains = [r[1].clone() for r in random]
        self.exp_avgs = [r[2] * 0.1 * (not on_first_step) for r in random]
        self.exp_avg_sqs = [r[3].square() * 0.1 * (not on_first_step) for r in random]
        self.models = None if dtype is None else [m.to(dtype) for m in self.mains]
        self.steps = [torch.tensor(1.0 if on_first_step else 2.0 + 5 * i) for i in range(len(sizes))]

    def operands(self):
        return StepTensors(self.grads, self.mains, [self.exp_avgs, self.exp_avg_sqs], self.models, self.steps)

    def written(self):
        return [*self.mains, *self.exp_avgs, *self.exp_avg_sqs, *(self.models or [])]

    def torch_optimizer(self, rule):
        """Return torch's own optimizer in the same place: its parameters, before their next step."""
        parameters = [torch.nn.Parameter(main.clone()) for main in self.mains]
        cls = torch.optim.AdamW if rule.is_decoupled else torch.optim.Adam
        betas = (rule.beta1, rule.beta2)
        optimizer = cls(parameters, rule.lr, betas, rule.eps, rule.weight_decay, foreach=False)
        for parameter, m, v, step in zip(parameters, self.exp_avgs, self.exp_avg_sqs, self.steps, strict=True):
            optimizer.state[parameter] = {"step": step - 1, "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        return optimizer, parameters
