"""bf16 and fp16 models: bit for bit what the plain-torch twin computes with fp32 sums and fp32 main parameters."""

import numpy as np
import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_bit_equal, main_params
from tests.models import TokenNet, token_loss_of
from tests.reference import Reference

NUM_WINDOWS = 4
LOW = [torch.bfloat16, torch.float16]
UNIT = 2.0**-24  # unit roundoff of float32


class UntiedReference(Reference):
    """The twin of a tied model: the two uses are two parameters, whose gradients are summed in fp32."""

    def backward(self, loss):
        embed, before = self.model.embed.weight, self.sums.get(self.model.embed.weight)
        of_embed, of_head = torch.autograd.grad(loss, [embed, self.model.head], retain_graph=True)
        super().backward(loss)
        both = of_embed.float() + of_head.float()
        self.sums[embed] = both if before is None else before + both

    @torch.no_grad()
    def step(self, divide_by=1):
        super().step(divide_by)
        self.model.head.copy_(self.model.embed.weight)


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, foreach=True),
    "AdamW fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, fused=True),
    "SGD momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01, weight_decay=0.01),
    "Muon": lambda groups: torch.optim.Muon(groups, lr=0.02),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.003, momentum=0.9, centered=True),
}


def with_lr(groups):
    """Give the second group another learning rate."""
    return [{"params": groups[0]}, {"params": groups[1], "lr": 0.004}]


def groups_of(model, name):
    params = [param for key, param in model.named_parameters() if key != "head"]
    params = [param for param in params if name != "Muon" or param.ndim == 2]
    return [params[0::2], params[1::2]]


def make_pair(name, dtype, **settings):
    """Return a wrapped tied model and its twin: ``(model, optimizer), reference``."""
    model = TokenNet(dtype, has_unused=True)
    optimizer = FusedMainGradOptimizer(OPTIMIZERS[name](with_lr(groups_of(model, name))), **settings)
    twin = TokenNet(dtype, head="copy", has_unused=True)
    reference = UntiedReference(twin, lambda groups: OPTIMIZERS[name](with_lr(groups)), groups_of(twin, name))
    return (model, optimizer), reference


def held(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in tensors_in(item)] if isinstance(value, dict) else []


def assert_is_rounded_main_param(optimizer):
    for param, main_param in zip(held(optimizer), main_params(optimizer), strict=True):
        assert main_param.dtype is torch.float32
        assert_bit_equal([param], [main_param.to(param.dtype)])


def assert_inner_state_is_float32(optimizer):
    tensors = [tensor for param in optimizer.state for tensor in tensors_in(optimizer.state[param])]
    assert len(tensors) >= len(optimizer.state) > 0
    assert {tensor.dtype for tensor in tensors} == {torch.float32}


def assert_matches(model, optimizer, reference):
    assert_bit_equal(held(optimizer), reference.params)
    assert_bit_equal(main_params(optimizer), [reference.mains[param] for param in reference.params])
    assert_is_rounded_main_param(optimizer)
    assert_inner_state_is_float32(optimizer)
    assert torch.equal(model.embed.weight, reference.model.head)


WAYS = {  # settings of the wrapper, micro-batches in a window
    "1 micro-batch": ({}, 1),
    "4 micro-batches, counted by the caller": ({}, 4),
    "4 micro-batches, merged": ({"gradient_accumulation_steps": 4}, 4),
    "4 micro-batches, merged and summed": ({"gradient_accumulation_steps": 4, "gradient_average": False}, 4),
}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_window_ends_bit_equal_to_the_twin(name, way, dtype):
    settings, num_micro_batches = WAYS[way]
    (model, optimizer), reference = make_pair(name, dtype, **settings)
    is_merging = optimizer.config.gradient_accumulation_steps > 1
    assert is_merging == ("merged" in way)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for window in range(NUM_WINDOWS):
        for i in range(num_micro_batches):
            number = window * num_micro_batches + i
            loss = token_loss_of(model, number)
            assert torch.isfinite(loss)
            loss.backward()
            assert model.embed.weight.grad is model.embed.weight.main_grad
            reference.backward(token_loss_of(reference.model, number))
            if is_merging:
                optimizer.step()
                assert optimizer.window_ends == (i == num_micro_batches - 1)
        if not is_merging:
            optimizer.step()
        average = is_merging and optimizer.config.gradient_average
        reference.step(divide_by=num_micro_batches if average else 1)
        assert_matches(model, optimizer, reference)
        model.zero_grad()
    ids = {id(param) for param in held(optimizer)}
    for key, param in model.named_parameters():
        assert torch.equal(param, before[key]) != (id(param) in ids and not key.startswith("never")), key
    assert model.never.weight not in optimizer.state


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inner_state_is_float32_and_training_goes_on_bit_equal_after_a_load(name, dtype):
    (model, optimizer), reference = make_pair(name, dtype)
    (other_model, other), _ = make_pair(name, dtype)

    def train(numbers, model, optimizer):
        for number in numbers:
            token_loss_of(model, number).backward()
            optimizer.step()
            model.zero_grad()

    train(range(3), model, optimizer)
    other.load_state_dict(optimizer.state_dict())
    other_model.load_state_dict(model.state_dict())
    assert_inner_state_is_float32(other)
    train(range(3, 6), other_model, other)
    for number in range(6):
        reference.backward(token_loss_of(reference.model, number))
        reference.step()
    assert_matches(other_model, other, reference)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "AdamW foreach", "SGD momentum", "RMSprop"])
def test_state_that_an_optimizer_had_before_wrapping_becomes_float32_and_step_counts_stay(name, dtype):
    model = TokenNet(dtype, has_unused=True)
    inner = OPTIMIZERS[name](with_lr(groups_of(model, name)))
    token_loss_of(model, 0).backward()
    inner.step()
    model.zero_grad()
    for state in inner.state.values():  # bare fp16 training is no source of finite numbers
        for value in state.values():
            if value.dtype is dtype:
                value.uniform_()
    before = {param: {key: value.clone() for key, value in state.items()} for param, state in inner.state.items()}
    assert any(value.dtype is dtype for state in before.values() for value in state.values())
    optimizer = FusedMainGradOptimizer(inner)
    assert_inner_state_is_float32(optimizer)
    assert {id(param) for param in optimizer.state} == {id(param) for param in before}
    for param, state in before.items():
        assert_bit_equal(list(optimizer.state[param].values()), [value.float() for value in state.values()])
    unwrapped = optimizer.unwrap()
    for param, state in before.items():
        assert_bit_equal(list(unwrapped.state[param].values()), list(state.values()))


class DecaysAll(torch.optim.SGD):
    """Moves every parameter, with or without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_main_param_that_moved_without_a_gradient_reaches_the_model(dtype):
    model = TokenNet(dtype, has_unused=True)
    optimizer = FusedMainGradOptimizer(DecaysAll(model.parameters(), lr=0.1))
    main = model.never.weight.detach().float()
    for number in range(3):
        token_loss_of(model, number).backward()
        assert model.never.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
        main = main * 0.9
        assert_bit_equal([model.never.weight.detach()], [main.to(dtype)])
        assert_is_rounded_main_param(optimizer)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_inner_closure_is_evaluated_at_the_rounded_main_params_bit_equal_to_the_twin(line_search, dtype):
    settings = {"lr": 0.3, "max_iter": 4, "line_search_fn": line_search}
    model, twin = TokenNet(dtype, has_unused=True), TokenNet(dtype, head="copy", has_unused=True)
    optimizer = FusedMainGradOptimizer(torch.optim.LBFGS(model.parameters(), **settings))
    # Parameter by parameter in the same order: LBFGS works on one flat vector.
    params = [dict(twin.named_parameters())[key] for key, _ in model.named_parameters()]
    reference = UntiedReference(twin, lambda groups: torch.optim.LBFGS(groups[0], **settings), [params])
    losses, twin_losses = [], []

    def closure():
        optimizer.zero_grad()
        losses.append(token_loss_of(model, len(losses)))  # every second evaluation gives a parameter no gradient
        losses[-1].backward()
        return losses[-1]

    def twin_closure():
        with torch.no_grad():
            for param, main in reference.mains.items():
                param.copy_(main)
            twin.head.copy_(twin.embed.weight)
        reference.sums.clear()
        twin_losses.append(token_loss_of(twin, len(twin_losses)))
        reference.backward(twin_losses[-1])
        for param, main in reference.mains.items():
            main.grad = reference.sums.get(param)
        return twin_losses[-1]

    for _ in range(3):
        optimizer.step(closure)
        with torch.enable_grad():
            reference.optimizer.step(twin_closure)
        assert_bit_equal([loss.detach() for loss in losses], [loss.detach() for loss in twin_losses])
        assert_bit_equal(main_params(optimizer), [reference.mains[param].detach() for param in params])
        assert_is_rounded_main_param(optimizer)
    assert len(losses) > 2 * 3  # the inner optimizer did ask again
    assert not torch.equal(model.sometimes.weight, TokenNet(dtype, has_unused=True).sometimes.weight)


def test_two_uses_of_one_weight_in_one_backward_are_summed_in_float32():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    stock = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([weight], lr=1.0))
    uses = torch.tensor([256.0, 512.0, 1024.0], dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)
    for window in range(1, 4):
        for param in (weight, stock):
            ((param * uses[0]).sum() + (param * uses[1]).sum()).backward()
        assert torch.equal(weight.grad, torch.tensor([257.0, 513.0, 1025.0]))
        assert torch.equal(stock.grad.float(), torch.tensor([256.0, 512.0, 1024.0]))  # what torch alone loses
        optimizer.step()
        assert torch.equal(main_params(optimizer)[0], -window * torch.tensor([257.0, 513.0, 1025.0]))
        optimizer.zero_grad()
        stock.grad = None


# -- clipping


def linear_loss(params, gradients):
    """Return a loss whose gradient with respect to each parameter is the given tensor, wherever the parameter is."""
    return sum((param * gradient).sum() for param, gradient in zip(params, gradients, strict=True))


def fixed_params(dtype, *shapes):
    torch.manual_seed(0)
    return nn.ParameterList([nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes])


def assert_within_fused_division(mains, references, num_steps):
    """Compare two AdamW runs, one of which divides gradients by ``1 / coefficient`` (torch's fused kernels).

    All gradients have one size c, so the averages are at most c and the root of the second moment is c. Relative to c,
    over at most four steps: the gradients differ by 3 roundings (two divisions, one product). First moment: these, and
    3 roundings a step and side, on terms up to 2 c: 3 + 4 * 2 * 3 * 2 = 51. Second moment: twice 3, and 4 a step and
    side, 38, which the root halves: 19. Root, bias correction, epsilon: 3 a side, 6. Quotient and lr: 2 a side, 4.
    Together 80 a step, times lr; and on the parameter itself weight decay and subtraction, 2 a side.
    """
    assert num_steps <= 4
    for ours, theirs in zip(mains, references, strict=True):
        assert torch.isfinite(ours).all()
        bound = num_steps * (80 * UNIT * 0.01 + 4 * UNIT * (theirs.double().abs() + num_steps * 0.01))
        assert ((ours.double() - theirs.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_is_bit_equal_where_the_norm_is_exact(name, num_micro_batches, dtype):
    """144 + 25 signs: every sum of squares is whole, the norm is exactly 13, so both coefficients have equal bits."""
    shapes = [(12, 12), (5, 5) if name == "Muon" else (25,)]
    ours, theirs = fixed_params(dtype, *shapes), fixed_params(dtype, *shapes)
    start = [param.detach().clone() for param in ours]
    settings = {"gradient_accumulation_steps": num_micro_batches, "max_grad_norm": 1.0}
    optimizer = FusedMainGradOptimizer(OPTIMIZERS[name](with_lr([[param] for param in ours])), **settings)
    reference = Reference(
        theirs, lambda groups: OPTIMIZERS[name](with_lr(groups)), [[p] for p in theirs], max_grad_norm=1.0
    )
    for window in range(NUM_WINDOWS):
        torch.manual_seed(window)
        signs = [(torch.randint(0, 2, shape) * 2 - 1).to(dtype) for shape in shapes]
        for _ in range(num_micro_batches):
            linear_loss(ours, signs).backward()
            reference.backward(linear_loss(theirs, signs))
            optimizer.step()
        reference.step(divide_by=num_micro_batches)
        assert optimizer.grad_norm == 13.0
        clipped = torch.cat([param.grad.flatten() for param in ours])
        assert abs(clipped.double().norm() - 1) <= 1e-6 / 13 + 8 * UNIT  # the epsilon; coefficient and product
        mains = [reference.mains[param].detach() for param in reference.params]
        if name == "AdamW fused":
            assert_within_fused_division(main_params(optimizer), mains, window + 1)
        else:
            assert_bit_equal(main_params(optimizer), mains)
            assert_bit_equal(list(ours), list(theirs))
        assert_is_rounded_main_param(optimizer)
        optimizer.zero_grad()
    assert not any(torch.equal(a, b) for a, b in zip(ours, start, strict=True))


def gamma(num_roundings):
    """Return Higham's bound on the relative error that ``num_roundings`` float32 roundings build up to."""
    return num_roundings * UNIT / (1 - num_roundings * UNIT)


def coefficient_bound(numels):
    """Return how far apart, relatively, two float32 clip coefficients ``max_norm / (norm + 1e-6)`` can be.

    A sum of n squares in float32, in any order, is off by at most gamma(n): one rounding for the square and
    n - 1 for the additions. The root halves that and adds a rounding of its own.
    torch: a norm per tensor, then the norm of these norms. fusedopt: a norm per row of at most 1024 elements,
    then float64 (which adds nothing to speak of), rounded to float32 once. Each side rounds twice more for the
    coefficient (addition, division). Terms of second order are below 1 % of these.
    """
    of_torch = (gamma(max(numels)) / 2 + UNIT) + (gamma(len(numels)) / 2 + UNIT)
    of_fusedopt = (gamma(1024) / 2 + UNIT) + UNIT
    return 1.01 * (of_torch + of_fusedopt + 2 * 2 * UNIT)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_clipped_training_stays_within_the_rounding_of_one_norm(num_micro_batches, dtype):
    shapes, lr, momentum = [(40, 30), (700,), (3, 5, 7)], 0.1, 0.9
    ours = fixed_params(dtype, *shapes)
    settings = {"gradient_accumulation_steps": num_micro_batches, "max_grad_norm": 1.0}
    optimizer = FusedMainGradOptimizer(torch.optim.SGD(ours, lr=lr, momentum=momentum), **settings)

    def twin(max_grad_norm):
        def make(groups):
            return torch.optim.SGD(groups[0], lr=lr, momentum=momentum)

        return Reference(fixed_params(dtype, *shapes), make, max_grad_norm=max_grad_norm)

    reference, wrong = twin(1.0), twin(1.003)  # a coefficient that is 0.3 % off has to be seen
    delta = coefficient_bound([param.numel() for param in ours])
    buffer_bounds = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    param_bounds = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for window in range(NUM_WINDOWS):
        for i in range(num_micro_batches):
            # Gradients do not depend on the parameters, so both sides clip the very same float32 sums.
            torch.manual_seed(100 * window + i)
            gradients = [torch.randn(shape).to(dtype) for shape in shapes]
            linear_loss(ours, gradients).backward()
            for one in (reference, wrong):
                one.backward(linear_loss(one.params, gradients))
            optimizer.step()
        for one in (reference, wrong):
            one.step(divide_by=num_micro_batches)
        assert optimizer.grad_norm > 2.0  # it was clipped
        for index, (param, main_param) in enumerate(zip(reference.params, main_params(optimizer), strict=True)):
            main = reference.mains[param]
            gradient = main.grad.double().abs()
            buffer = reference.optimizer.state[main]["momentum_buffer"].double().abs()
            # Either side: gradient = fl(coefficient * sum); buffer = fl(fl(momentum * buffer) + gradient);
            # main_param = fl(main_param - fl(lr * buffer)). 1.01 covers second order and the other side's sizes.
            buffer_bounds[index] = (
                momentum * buffer_bounds[index] + (delta + 2 * UNIT) * gradient + 4 * UNIT * (buffer + gradient)
            )
            param_bounds[index] += lr * buffer_bounds[index] + 2 * UNIT * (lr * buffer + main.double().abs())
            assert torch.isfinite(main_param).all()
            assert ((main_param.double() - main.double()).abs() <= 1.01 * param_bounds[index]).all()
        assert_is_rounded_main_param(optimizer)
        optimizer.zero_grad()
    mains = main_params(optimizer)
    of_wrong = [wrong.mains[param] for param in wrong.params]
    for ours_main, wrong_main, bound in zip(mains, of_wrong, param_bounds, strict=True):
        assert ((ours_main.double() - wrong_main.double()).abs() > 1.01 * bound).any()


# -- what low precision alone would lose


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_learning_rate_of_1e_6_moves_main_param_exactly_where_the_bare_model_stands_still(dtype):
    gradient = torch.tensor([1, -1, 8, -8, 64, -64, 0], dtype=dtype)  # powers of two: lr * gradient is exact in fp32
    wrapped, bare = (nn.Parameter(torch.ones(7, dtype=dtype)) for _ in range(2))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([wrapped], lr=1e-6))
    bare_optimizer = torch.optim.SGD([bare], lr=1e-6)
    expected, step = np.ones(7, np.float32), np.float32(1e-6) * gradient.float().numpy()
    for _ in range(100):
        for param, opt in ((wrapped, optimizer), (bare, bare_optimizer)):
            (param * gradient).sum().backward()
            opt.step()
            opt.zero_grad()
        expected = expected - step
        assert expected.dtype == np.float32
        assert_bit_equal(main_params(optimizer), [torch.from_numpy(expected)])
        assert_is_rounded_main_param(optimizer)
    assert torch.equal(bare, torch.ones(7, dtype=dtype))  # every single step was rounded away
    assert (wrapped[4:6] != 1).all()  # 100 of them are not
    assert (main_params(optimizer)[0][:6] != 1).all()
    assert main_params(optimizer)[0][6] == 1


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_adamw_at_a_learning_rate_of_1e_6_moves_main_param_where_the_bare_model_stands_still(dtype):
    wrapped, bare, main = (nn.Parameter(torch.ones(5, dtype=d)) for d in (dtype, dtype, torch.float32))
    optimizer = FusedMainGradOptimizer(torch.optim.AdamW([wrapped], lr=1e-6, weight_decay=0))
    bare_optimizer, main_optimizer = (torch.optim.AdamW([param], lr=1e-6, weight_decay=0) for param in (bare, main))
    for _ in range(100):
        for param, opt in ((wrapped, optimizer), (bare, bare_optimizer), (main, main_optimizer)):
            param.sum().backward()
            opt.step()
            opt.zero_grad()
        assert_bit_equal(main_params(optimizer), [main.detach()])
    assert torch.equal(bare, torch.ones(5, dtype=dtype))
    assert (main_params(optimizer)[0] < 1 - 9e-5).all()


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_4096_equal_micro_gradients_sum_exactly(dtype):
    value = torch.tensor([1e-3, -3e-3, 0.7], dtype=dtype)  # 8 or 11 significant bits: 4096 of them fit in fp32's 24
    wrapped, bare = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(2))
    optimizer = FusedMainGradOptimizer(torch.optim.SGD([wrapped], lr=1.0), gradient_accumulation_steps=4096)
    for count in range(1, 4097):
        for param in (wrapped, bare):
            (param * value).sum().backward()
        if count in (3, 100, 1000, 4096):
            assert_bit_equal([wrapped.main_grad], [count * value.float()])
        optimizer.step()
    assert optimizer.window_ends
    assert_bit_equal([wrapped.main_grad], [value.float()])  # averaged, which a power of two does exactly
    assert_bit_equal(main_params(optimizer), [-value.float()])
    assert (bare.grad.float() != 4096 * value.float()).all()  # what torch alone loses
