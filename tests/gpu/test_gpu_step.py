"""api.md section 3 on the device: the step, clipping, skipping, scalers, graphs, memory and synchronisations."""

import pytest
import torch
from torch import nn

import fusedopt
from benchmarks.gpu.cuda_graph import CASES, NUM_REPLAYS, NUM_WARMUP, Loop, make_model
from benchmarks.gpu.synchronisations import counting
from fusedopt.sharding.layout import ALIGNMENT, ROW_NUMEL
from tests.compare import assert_bit_equal
from tests.models import Mlp

U32 = 2.0**-24
INNER = {
    "AdamW loop": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False, fused=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
}
FUSED = [name for name in INNER if "fused" in name]
SIZES = (40, 72, 24)


def set_gradients(params, number):
    """Give each parameter the same gradient at every call with ``number``; those of odd parameters are larger."""
    for index, param in enumerate(params):
        generator = torch.Generator(param.device).manual_seed(100 * number + index)
        grad = torch.randn(param.shape, generator=generator, device=param.device) * (1 + index % 2)
        param.grad = grad.to(param.grad_dtype)


def everything(model, optimizer):
    state = optimizer.state_dict()["state"]
    values = [v for entry in state.values() for _, v in sorted(entry.items()) if isinstance(v, torch.Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *values)]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", INNER)
def test_a_wrapped_optimizer_ends_bit_equal_to_the_bare_one_on_an_fp32_model(device, name, backend):
    bare_model, model = Mlp(torch.float32, sizes=SIZES).to(device), Mlp(torch.float32, sizes=SIZES).to(device)
    bare = INNER[name](bare_model.parameters())
    optimizer = fusedopt.FusedMainGradOptimizer(INNER[name](model.parameters()), backend=backend)
    start = [param.detach().clone() for param in model.parameters()]
    for number in range(4):
        for params, stepped in ((bare_model.parameters(), bare), (model.parameters(), optimizer)):
            set_gradients(params, number)
            stepped.step()
            stepped.zero_grad()
    assert optimizer.skipped_steps == 0
    assert_bit_equal(list(model.parameters()), list(bare_model.parameters()))
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), start, strict=True))


@pytest.mark.parametrize("name", INNER)
def test_a_bf16_model_ends_bit_equal_to_the_bare_optimizer_on_fp32_copies(device, name):
    model = Mlp(sizes=SIZES).to(device)
    mains = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    bare = INNER[name](mains)
    optimizer = fusedopt.FusedMainGradOptimizer(INNER[name](model.parameters()), backend="torch")
    for number in range(4):
        for params, stepped in ((mains, bare), (model.parameters(), optimizer)):
            set_gradients(params, number)
            stepped.step()
            stepped.zero_grad()
    assert_bit_equal(list(model.parameters()), [main.detach().bfloat16() for main in mains])


@pytest.mark.parametrize("inner", [{"fused": True}, {"foreach": True}])
def test_each_backend_steps_as_torch_within_a_few_roundings(device, backend_name, inner):
    models = [Mlp(sizes=SIZES).to(device), Mlp(sizes=SIZES).to(device)]
    optimizers = [
        fusedopt.FusedMainGradOptimizer(
            torch.optim.AdamW(model.parameters(), lr=0.01, **inner), backend=name, max_grad_norm=1.0
        )
        for model, name in zip(models, ("torch", backend_name), strict=True)
    ]
    num_steps = 4
    for number in range(num_steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            set_gradients(model.parameters(), number)
            optimizer.step()
            optimizer.zero_grad()
    for reference, found in zip(*(o.state_dict()["state"].values() for o in optimizers), strict=True):
        for key in ("main_param", "exp_avg", "exp_avg_sq"):
            assert reference[key].isfinite().all()
            # Two norms that differ by half a row's roundings, and a dozen roundings in each step.
            bound = num_steps * (ROW_NUMEL / 2 + 16) * U32 * (reference[key].abs() + 0.01)
            assert ((found[key] - reference[key]).abs() <= bound).all(), key
        assert found["step"].item() == num_steps


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}])
@pytest.mark.parametrize("name", FUSED)
def test_one_inf_moves_no_bit_and_the_next_step_goes_on(device, name, settings, backend_name):
    model = Mlp(sizes=SIZES).to(device)
    optimizer = fusedopt.FusedMainGradOptimizer(INNER[name](model.parameters()), backend=backend_name, **settings)
    for number in range(2):
        set_gradients(model.parameters(), number)
        optimizer.step()
        optimizer.zero_grad()
    before = everything(model, optimizer)
    set_gradients(model.parameters(), 2)
    model.second.weight.grad[1, 2] = float("inf")
    optimizer.step()
    optimizer.zero_grad()
    assert_bit_equal(everything(model, optimizer), before)
    assert optimizer.step_was_skipped
    with pytest.warns(RuntimeWarning, match="skipped"):
        assert optimizer.skipped_steps == 1
    set_gradients(model.parameters(), 3)
    optimizer.step()
    assert not optimizer.step_was_skipped
    assert not any(torch.equal(a, b) for a, b in zip(everything(model, optimizer)[:4], before, strict=False))


@pytest.mark.parametrize("name", INNER)
def test_clipping_scales_by_the_norm_of_all_gradients(device, name, backend_name):
    model = Mlp(sizes=SIZES).to(device)
    optimizer = fusedopt.FusedMainGradOptimizer(
        INNER[name](model.parameters()), max_grad_norm=0.5, backend=backend_name
    )
    for number in range(3):
        set_gradients(model.parameters(), number)
        exact = torch.cat([param.grad.flatten() for param in model.parameters()]).double()
        optimizer.step()
        assert abs(optimizer.grad_norm.item() - exact.norm().item()) <= ROW_NUMEL * U32 * exact.norm().item()
        clipped = torch.cat([param.grad.flatten() for param in model.parameters()]).double()
        expected = exact * (0.5 / (exact.norm() + 1e-6))
        assert ((clipped - expected).abs() <= (ROW_NUMEL + 4) * U32 * expected.abs()).all()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused"])
def test_a_write_through_data_raises_by_name_in_the_next_step_and_none_that_is_seen_does(cuda, name):
    model = Mlp(sizes=SIZES).to(cuda)
    optimizer = fusedopt.FusedMainGradOptimizer(INNER[name](model.named_parameters()))
    raised = []
    for number in range(12):
        set_gradients(model.parameters(), number)
        if number % 3 == 0:
            with torch.no_grad():
                model.first.weight.mul_(0.5)
        if number % 3 == 1:
            model.second.weight.data = model[3].weight.data * 2
        if number == 6:
            model.second.weight.data.mul_(0.5)
        torch.cuda.synchronize()
        try:
            optimizer.step()
        except RuntimeError as error:
            raised.append((number, str(error)))
            optimizer.step()
        optimizer.zero_grad()
    assert [number for number, _ in raised] == [7]
    assert "parameter 3.weight was written through .data" in raised[0][1]


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused"])
def test_a_grad_scaler_drives_an_fp16_model(device, name):
    model = Mlp(torch.float16, sizes=SIZES).to(device)
    optimizer = fusedopt.FusedMainGradOptimizer(INNER[name](model.parameters()))
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    x = torch.randn(8, 40, device=device).half()
    scales, moved = [], []
    for number in range(5):
        scaler.scale(model(x).float().square().mean()).backward()
        assert all(param.grad is param.main_grad for param in model.parameters())
        if number == 2:
            model.first.weight.grad[0, 0] = float("inf")
        before = everything(model, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(not all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=False)))
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11]
    assert moved == [True, True, False, True, True]
    assert all(param.isfinite().all() for param in model.parameters())


# -- CUDA only


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", CASES[:4], ids=[case[0] for case in CASES[:4]])
def test_replays_of_a_captured_step_are_eager_steps(cuda, case):
    from benchmarks.gpu.cuda_graph import capture

    class Section:
        is_cuda, device = True, cuda

    _, inner, settings, is_fused = case
    eager, graphed = (Loop(make_model(cuda), inner, settings, is_fused=is_fused) for _ in range(2))
    replay, why_not = capture(graphed, Section())
    assert replay is not None, why_not
    for number in range(NUM_WARMUP + NUM_REPLAYS):
        eager.load(number)
        eager.body()
        if number >= NUM_WARMUP:
            graphed.load(number)
            replay()
    assert_bit_equal(graphed.values(), eager.values())


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}])
def test_a_fused_step_never_waits_for_the_device(cuda, settings):
    model = Mlp(sizes=SIZES).to(cuda)
    adamw = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(adamw, backend="torch", **settings)
    for number in range(4):
        set_gradients(model.parameters(), number)
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step is decided on the host
        try:
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert optimizer.skipped_steps == 0
    with counting(True) as seen:
        torch.ones((), device=cuda).item()
    assert seen.num_syncs  # it would have been seen


@pytest.mark.parametrize("settings", [{}, {"max_grad_norm": 1.0}])
def test_any_other_step_waits_at_most_once(cuda, settings):
    model = Mlp(sizes=SIZES).to(cuda)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters()), backend="torch", **settings)
    with counting(True) as one:
        torch.ones((), device=cuda).item()
    for number in range(4):
        set_gradients(model.parameters(), number)
        with counting(True) as seen:
            optimizer.step()
        assert number == 0 or seen.num_syncs <= one.num_syncs, seen.places


@pytest.mark.parametrize(("dtype", "formula"), [(torch.bfloat16, 18), (torch.float32, 16)])
def test_bytes_per_parameter_are_those_of_the_formula_as_the_allocator_counts_them(cuda, dtype, formula):
    def requested(kind):
        torch.cuda.synchronize(cuda)
        return torch.cuda.memory_stats(cuda)[f"requested_bytes.all.{kind}"]

    before = requested("current")
    bucket_mib = 2
    model = nn.Sequential(*[nn.Linear(512, 511, device=cuda, dtype=dtype) for _ in range(8)])
    params = list(model.parameters())
    numel = sum(param.numel() for param in params)
    torch.cuda.reset_peak_memory_stats(cuda)
    adamw = torch.optim.AdamW(params, fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(adamw, bucket_mib=bucket_mib, max_grad_norm=1.0)
    wrapped, peak = requested("current"), requested("peak")
    assert peak <= wrapped + bucket_mib * 2**20
    for param in params:
        param.grad = param.main_grad.fill_(1e-3)
    optimizer.step()
    optimizer.zero_grad()
    held = requested("current") - before
    num_buckets = -(-numel * 4 // (bucket_mib * 2**20)) + 1
    padding = 8 * (len(params) * ALIGNMENT + num_buckets * ROW_NUMEL)
    scalars = 512 * (len(params) + 16)  # step counts, norm, flag, counter: 4 bytes each, in blocks of 512 at most
    assert formula * numel <= held <= formula * numel + padding + scalars
    assert abs(optimizer.memory_report()["total"] - held) <= scalars


def test_parameters_on_two_devices_train_under_one_norm(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    first, second = (Mlp(sizes=SIZES).to(torch.device("cuda", index)) for index in range(2))
    params = [*first.parameters(), *second.parameters()]
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(params, lr=0.01, fused=True), max_grad_norm=1.0)
    for number in range(3):
        set_gradients(params, number)
        exact = torch.cat([param.grad.flatten().cpu() for param in params]).double().norm().item()
        optimizer.step()
        assert abs(optimizer.grad_norm.item() - exact) <= ROW_NUMEL * U32 * exact
        optimizer.zero_grad()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert one.isfinite().all()
        assert one.device != other.device
