"""Small questions with known answers: a library is believed on a device after it answered them there.

    offers -> [selfcheck] -> resolve

A wrong build, a changed signature or a kernel that this device cannot run shows here, once, by
name, and not in somebody's training run. Each question costs a few launches and one synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from fusedopt.backends import torch_ops
from fusedopt.backends.offers import Absent, Adam, StepTensors, asking

NUMEL = 2048
STEP_TOLERANCE = 1e-5
"""Of one Adam update relative to the learning rate: some libraries divide and take roots within a few fp32 roundings
(each ``2**-24 = 6e-8``), and a wrong rule, bias correction or order of arguments is off by more than 1e-2."""


def fault(function: str, run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    """Return what is wrong with ``run`` on ``device``, in a few words; None if it answers right.

    Args:
        function: the name in `offers.FUNCTIONS` that ``run`` stands for.
        run: the function under question.
        device: to ask on.
        dtype: of low-precision operands, bfloat16 or float16.
    """
    try:
        with asking("its self-check"):
            return _QUESTIONS[function](run, device, dtype)
    except Absent as absent:
        return str(absent)


def _wgrad(run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    # Whole numbers, so that fp32 sums are exact; 2**-10 is lost in any lower precision.
    grad_output = (torch.arange(64 * 32).remainder(7) - 3).view(64, 32).to(device, dtype)
    input = (torch.arange(64 * 16).remainder(5) - 1).view(64, 16).to(device, dtype)
    product = grad_output.double().t().cpu() @ input.double().cpu()
    for accumulate, old in ((True, 2.0**-10), (False, float("nan"))):
        main_grad = torch.full((32, 16), old, device=device)
        run(main_grad, grad_output, input, accumulate=accumulate)
        if not torch.equal(main_grad.double().cpu(), product + old if accumulate else product):
            return f"its self-check gave a wrong product with accumulate={accumulate}"
    return None


def _norm(run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    ones = torch.ones(NUMEL, device=device)
    answers = [run([ones, ones * 3]), run([ones, ones / 0.0]), run([ones * -5.0], float("inf"))]
    expected = [(NUMEL * 10) ** 0.5, float("inf"), 5.0]
    found = [float(answer) for answer in answers]
    if all(math.isclose(one, value, rel_tol=1e-6) for one, value in zip(found, expected, strict=True)):
        return None
    return f"its self-check gave the norms {found} for {expected}"


def _found_inf(run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    flats = [torch.full((NUMEL,), value, device=device) for value in (3e38, float("inf"), float("nan"))]
    answers = [float(run([flats[0], flat])) for flat in flats]
    return None if answers == [0.0, 1.0, 1.0] else f"its self-check gave {answers} for finite, inf and nan"


def _scale_cast(run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    sources = [torch.linspace(-300.0, 300.0, NUMEL - n, device=device) for n in (0, 1, 7)]
    for factor in (None, torch.tensor(0.3, device=device)):
        for target_dtype in (dtype, torch.float32):
            targets, expected = ([torch.zeros_like(s, dtype=target_dtype) for s in sources] for _ in range(2))
            run(targets, sources, factor)
            torch_ops.scale_cast_(expected, sources, factor)
            if not _are_equal(targets, expected):
                return f"its self-check rounded {target_dtype} values to other bits"
    return None


def _fused_step(run: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> str | None:
    rule = Adam(lr=0.125, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, is_decoupled=True)
    weight = torch.nn.Parameter(torch.linspace(-2.0, 2.0, NUMEL))
    betas = (rule.beta1, rule.beta2)
    reference = torch.optim.AdamW([weight], rule.lr, betas, rule.eps, rule.weight_decay, foreach=False)
    weight.grad = torch.linspace(-1.0, 3.0, NUMEL)
    reference.step()
    state = reference.state[weight]
    operands = StepTensors(
        grads=[weight.grad.to(device)],
        mains=[weight.detach().to(device, copy=True)],
        states=[[state[key].to(device, copy=True)] for key in ("exp_avg", "exp_avg_sq")],
        models=[torch.zeros(NUMEL, dtype=dtype, device=device)],
        steps=[torch.tensor(2.0)],
    )
    reference.step()
    run(rule, operands)
    expected = [weight.detach(), state["exp_avg"], state["exp_avg_sq"]]
    found = [operands.mains[0], *(tensors[0] for tensors in operands.states)]
    for one, other in zip(found, expected, strict=True):
        if not bool(((one.cpu() - other).abs() <= STEP_TOLERANCE * (rule.lr + other.abs())).all()):
            return "its self-check made another AdamW step than torch"
    models = operands.models or ()
    return None if _are_equal(models, [found[0].to(dtype)]) else "its self-check rounded model parameters wrongly"


_QUESTIONS = {
    "wgrad_accumulate_": _wgrad,
    "norm": _norm,
    "found_inf": _found_inf,
    "scale_cast_": _scale_cast,
    "fused_step_": _fused_step,
}


def _are_equal(found: Any, expected: Any) -> bool:
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(found, expected, strict=True))
