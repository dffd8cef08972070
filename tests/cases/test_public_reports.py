"""Public bug reports about this kind of software, each as a test named after its claim.

Where a report is covered elsewhere, `COVERED_BY` names the test. Reports on fused layers, several ranks,
CUDA, and Hugging Face's Trainer come with those parts of fusedopt.
"""

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import fusedopt

COVERED_BY = {
    # id: test that holds the requirement
    "N15 (256 + 1 must be 257)": (
        "unit/gradients/test_gradients.py::test_256_then_1_is_257_over_micro_batches_for_every_kind_of_parameter"
    ),
    "N21 (2**31 elements)": "unit/sharding/test_layout.py",
    "N31 (why 18 bytes)": "unit/step/test_step.py::test_memory_report_counts_what_was_allocated",
    "N40 (zero gradients are legal)": "unit/gradients/test_clip.py::test_a_step_of_zero_gradients_is_an_ordinary_step",
    "N45, H18 (bf16 nan unnoticed)": (
        "unit/step/test_step.py::test_skip_leaves_parameters_state_and_step_counts_untouched"
    ),
    "H4 (4096 equal micro-gradients)": "unit/gradients/test_gradients.py::test_4096_equal_micro_gradients_sum_exactly",
    "H45 (stale value after a clear)": (
        "unit/gradients/test_gradients.py::test_every_way_of_clearing_clears_all_that_came_before"
    ),
    "H47, N8 (hooks fire per reentrant region)": (
        "unit/gradients/test_gradients.py::test_reentrant_and_non_reentrant_checkpoints_accumulate_as_without"
    ),
    "N42, N43, H21 (GradScaler)": "parity/test_grad_scaler.py",
    "N46, H22 (a wrapper that is no Optimizer)": "unit/test_protocol.py",
    "N34, H2, H33 (state changes dtype on resume)": "unit/state/test_state_kinds.py",
    "H27 (pickling)": "unit/inner/test_copies.py",
    "H32 (weights_only)": "unit/state/test_state.py",
    "H20, H23 (accelerate)": "ecosystem/test_accelerate_loop.py",
    "N37 (LoRA, empty groups)": "ecosystem/test_peft_style.py",
}


@pytest.mark.parametrize("place", COVERED_BY.values(), ids=COVERED_BY)
def test_the_test_named_here_exists(place):
    file, _, name = place.partition("::")
    tree = ast.parse((Path(__file__).parents[1] / file).read_text())
    tests = [
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert tests
    assert not name or name in tests


def test_n1_h41_a_layer_that_forward_does_not_use_has_main_grad_and_is_left_alone():
    used, unused = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3).bfloat16()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([*used.parameters(), *unused.parameters()], lr=0.1))
    before = [p.detach().clone() for p in unused.parameters()]
    for _ in range(3):
        used(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, value in zip(unused.parameters(), before, strict=True):
        assert param.main_grad.dtype is torch.float32
        assert torch.equal(param.detach(), value)


def test_n36_an_fp32_model_has_no_second_copy():
    model = nn.Linear(1024, 64, bias=False)
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    assert inner.param_groups[0]["params"][0] is model.weight
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    report = optimizer.memory_report()
    assert report["main_param"] == 0
    assert report["total"] == (4 + 4 + 8) * model.weight.numel() + 4  # and one step count


def test_n41_h17_stock_clipping_sees_the_gradients_of_a_bf16_model():
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        model.bfloat16()
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(models[1].parameters(), lr=0.1))
    for model in models:
        for _ in range(2):
            model(torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()).float().sum().backward()
    fp32 = nn.utils.clip_grad_norm_(models[1].parameters(), 1e-2)
    assert fp32.dtype is torch.float32
    assert fp32.item() > 0
    exact = torch.cat([p.grad.double().flatten() for p in models[1].parameters()]).norm()
    assert exact.item() == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_h1_h3_small_updates_reach_main_param_and_the_model_is_its_rounding(dtype):
    param = nn.Parameter(torch.ones(8, dtype=dtype))
    inner = torch.optim.SGD([param], lr=2.0**-20)
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    (main,) = inner.param_groups[0]["params"]
    for _ in range(100):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert main.dtype is torch.float32
    assert torch.equal(main.detach(), torch.full((8,), 1.0 - 100 * 2.0**-20))  # exact: each is a multiple of 2**-20
    assert torch.equal(param.detach(), main.detach().to(dtype))
    bare = nn.Parameter(torch.ones(8, dtype=dtype))
    stock = torch.optim.SGD([bare], lr=2.0**-20)
    for _ in range(100):
        bare.grad = torch.ones_like(bare)
        stock.step()
    assert torch.equal(bare.detach(), torch.ones_like(bare))  # rounds back each time


def test_h13_accumulation_steps_do_not_change_norm_or_parameters():
    data = torch.randint(-3, 4, (8, 6)).bfloat16()  # integers: every sum is exact
    norms, weights = [], []
    for micro_batch in (8, 2):
        torch.manual_seed(0)
        model = nn.Linear(6, 2).bfloat16()
        k = 8 // micro_batch
        optimizer = fusedopt.FusedMainGradOptimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=0.5, gradient_accumulation_steps=k
        )
        for _ in range(3):
            for batch in data.split(micro_batch):
                (model(batch).float().sum() * (8 / micro_batch) / 8).backward()
                optimizer.step()
                optimizer.zero_grad()
            norms.append(optimizer.grad_norm.item())
        weights.append([p.detach().clone() for p in model.parameters()])
    assert norms[:3] == norms[3:]
    assert norms[0] > 0.5
    for one, four in zip(*weights, strict=True):
        assert torch.isfinite(one).all()
        assert torch.equal(one, four)


def test_h15_the_norm_reported_is_before_clipping_and_the_step_used_clipped_gradients():
    param = nn.Parameter(torch.zeros(4))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0), max_grad_norm=1.0)
    (param * 5.0).sum().backward()
    optimizer.step()
    assert optimizer.grad_norm.item() == 10.0
    assert param.detach().norm().item() == pytest.approx(1.0, rel=1e-5)
    assert param.grad.norm().item() == pytest.approx(1.0, rel=1e-5)


def test_h19_a_skip_with_a_fused_inner_optimizer_is_reported_to_the_loop():
    param = nn.Parameter(torch.zeros(4))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW([param], lr=1.0, fused=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for value in (1.0, math.inf, 1.0):
        param.grad = torch.full((4,), value)
        optimizer.step()
        if value == 1.0:
            assert not optimizer.step_was_skipped
            scheduler.step()
        else:
            assert optimizer.step_was_skipped
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert next(iter(optimizer.state.values()))["step"].item() == 2.0
    assert optimizer._step_supports_amp_scaling is False  # with it, accelerate never sees a skip


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_h26_no_warning_whatever_the_order_of_scheduler_and_wrapping(scheduler_first):
    model = nn.Linear(2, 2).bfloat16()
    inner = torch.optim.AdamW(model.parameters(), lr=1.0)
    if scheduler_first:
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = fusedopt.FusedMainGradOptimizer(inner)
    else:
        optimizer = fusedopt.FusedMainGradOptimizer(inner)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for _ in range(3):  # a warning is an error here
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.125


def test_h31_an_optimizer_that_makes_its_state_in_its_constructor_works():
    model = nn.Linear(4, 4).bfloat16()
    inner = torch.optim.Adagrad(model.parameters(), lr=0.1, initial_accumulator_value=0.5)
    assert all(state["sum"].dtype is torch.bfloat16 for state in inner.state.values())
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(optimizer.state) == 2
    for param in model.parameters():
        assert optimizer.state[param]["sum"].dtype is torch.float32
        assert optimizer.state[param]["step"].item() == 3.0


def test_h40_a_state_dict_for_other_names_is_refused_with_the_names():
    def make(names):
        params = [nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in names]
        return fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(list(zip(names, params, strict=True))))

    saved = make(["encoder.weight", "decoder.weight"]).state_dict()
    swapped = make(["decoder.weight", "encoder.weight"])
    with pytest.raises(
        ValueError, match=r"parameter decoder\.weight: its name was encoder\.weight.*is decoder\.weight"
    ):
        swapped.load_state_dict(saved)
