"""TransformerEngine's own modules over main_grad, and the adapters' cases, where the libraries are installed."""

import pytest
import torch

import fusedopt
from fusedopt import backends
from fusedopt.backends import torch_ops
from tests.adapter_cases import CASES

TORCHS = [case for case in CASES if case.is_torchs and hasattr(torch_ops, case.function)]


@pytest.mark.parametrize("case", TORCHS, ids=str)
def test_torchs_functions_keep_every_case(device, case):
    case.run(getattr(torch_ops, case.function), device)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("library", ["apex", "transformer_engine"])
def test_a_librarys_functions_keep_every_case(cuda, library, case):
    found = backends.offer(library)
    if case.function not in found.functions:
        pytest.skip(f"{library}: {found.missing.get(case.function, 'not offered')}"[:200])
    case.run(found.functions[case.function], cuda)


def test_a_te_linear_accumulates_into_main_grad(cuda):
    te = pytest.importorskip("transformer_engine.pytorch", reason="TransformerEngine is not installed")
    model = te.Linear(64, 48, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True, device="cuda")
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    x = torch.randint(-2, 3, (32, 64), device=cuda).bfloat16()
    for _ in range(3):  # windows: old bytes of the last one must not leak
        for num_passes in (1, 2):
            model(x).float().sum().backward()
            assert model.weight.grad is model.weight.main_grad
            expected = num_passes * x.float().sum(0).expand(48, 64)
            assert torch.equal(model.weight.grad, expected)
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
        model.weight.main_grad.fill_(float("nan"))
    assert not hasattr(model.weight, "grad_added_to_main_grad")
