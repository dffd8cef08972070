"""What every adapter of a compiled library must do right, as cases that take the function and a device.

tests/unit runs them on doubles, on the CPU; tests/gpu on the libraries themselves. Bounds are derived
from fp32 (u = 2**-24) and hold for kernels that sum in any order and divide within a few roundings.
"""

import math
from dataclasses import dataclass

import pytest
import torch

from fusedopt.backends.offers import Adam, Sgd, StepTensors

U = 2.0**-24
LOW = (torch.bfloat16, torch.float16)
CASES = []

ADAMW = Adam(lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, is_decoupled=True)
ADAM = Adam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.1, is_decoupled=False)
SGD = Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.0, is_nesterov=False)
NESTEROV = Sgd(lr=0.1, momentum=0.9, dampening=0.0, weight_decay=0.01, is_nesterov=True)
DAMPED = Sgd(lr=0.1, momentum=0.8, dampening=0.1, weight_decay=0.01, is_nesterov=False)


@dataclass(frozen=True)
class Case:
    """One claim about the function of this name in the adapters' table; some only the libraries keep, not torch_ops."""

    function: str
    run: object
    is_torchs: bool = True

    def __str__(self):
        return f"{self.function}-{self.run.__name__}"


def case(function, is_torchs=True):
    """Register what follows as a case of ``function``."""

    def register(run):
        CASES.append(Case(function, run, is_torchs))
        return run

    return register


def finite(tensor):
    """Return ``tensor`` in float64 on the CPU, after a look at it."""
    tensor = tensor.detach().double().cpu()
    assert torch.isfinite(tensor).all()
    return tensor


def integers(low, high, shape, device, dtype=torch.float32):
    """Return whole numbers, which sum exactly in fp32."""
    return torch.randint(low, high, shape).to(device, dtype)


# wgrad_accumulate_(main_grad, grad_output, input, *, accumulate, exact=True)


def exact_product(grad_output, input):
    return finite(grad_output).t() @ finite(input)


@case("wgrad_accumulate_")
def adds_to_what_is_there(wgrad, device):
    for dtype in LOW:
        grad_output, input = integers(-8, 9, (64, 24), device, dtype), integers(-8, 9, (64, 40), device, dtype)
        main_grad = integers(-99, 99, (24, 40), device) + 2.0**-8  # lost wherever a product is rounded to 16 bits
        before = finite(main_grad)
        for window in range(1, 4):
            assert wgrad(main_grad, grad_output, input, accumulate=True) is None
            assert torch.equal(finite(main_grad), before + window * exact_product(grad_output, input))


@case("wgrad_accumulate_", is_torchs=False)
def is_exact_even_where_it_need_not_be(wgrad, device):
    grad_output, input = (integers(-8, 9, (64, n), device, torch.bfloat16) for n in (24, 40))
    main_grad = torch.zeros(24, 40, device=device)
    wgrad(main_grad, grad_output, input, accumulate=True, exact=False)
    product = exact_product(grad_output, input)
    assert torch.equal(finite(main_grad), product)
    assert not torch.equal(finite(product.bfloat16()), product)


@case("wgrad_accumulate_")
def overwrites_without_reading_what_was_there(wgrad, device):
    for dtype in LOW:
        for old in (7.0, math.nan, math.inf):
            grad_output, input = integers(-8, 9, (32, 16), device, dtype), integers(-8, 9, (32, 8), device, dtype)
            main_grad = torch.full((16, 8), old, device=device)
            wgrad(main_grad, grad_output, input, accumulate=False)
            assert torch.equal(finite(main_grad), exact_product(grad_output, input))


@case("wgrad_accumulate_")
def sums_in_float32(wgrad, device):
    for dtype in LOW:
        grad_output, input = (torch.randn(256, n).to(device, dtype) for n in (16, 32))
        main_grad = torch.randn(16, 32).to(device)
        exact = finite(main_grad) + exact_product(grad_output, input)
        sizes = finite(main_grad).abs() + finite(grad_output).abs().t() @ finite(input).abs()
        bound = 257 * 2 * U * sizes  # tensor cores may truncate, which loses up to 2 u per addition
        wgrad(main_grad, grad_output, input, accumulate=True)
        assert ((finite(main_grad) - exact).abs() <= bound).all()
        rounded = finite((exact_product(grad_output, input)).to(dtype)) - exact_product(grad_output, input)
        assert (rounded.abs() > bound).any()  # a product rounded to 16 bits would be caught


@case("wgrad_accumulate_")
def takes_strided_operands(wgrad, device):
    for dtype in LOW:
        grad_output = integers(-8, 9, (24, 64), device, dtype).t()
        input = integers(-8, 9, (64, 80), device, dtype)[:, ::2]
        assert not grad_output.is_contiguous()
        assert not input.is_contiguous()
        main_grad = integers(-9, 9, (24, 40), device)
        expected = finite(main_grad) + exact_product(grad_output, input)
        wgrad(main_grad, grad_output, input, accumulate=True)
        assert torch.equal(finite(main_grad), expected)


@case("wgrad_accumulate_")
def writes_a_strided_main_grad_and_nothing_beside_it(wgrad, device):
    for accumulate in (True, False):
        grad_output, input = (integers(-8, 9, (64, n), device, torch.bfloat16) for n in (24, 40))
        around = integers(-9, 9, (40, 48), device)
        main_grad = around[:, ::2].t()
        assert not main_grad.is_contiguous()
        expected = finite(around)
        product = exact_product(grad_output, input)
        expected[:, ::2] = (expected[:, ::2].t() + product if accumulate else product).t()
        wgrad(main_grad, grad_output, input, accumulate=accumulate)
        assert torch.equal(finite(around), expected)


@case("wgrad_accumulate_")
def stays_inside_its_view_of_the_buffer(wgrad, device):
    buffer = integers(-9, 9, (3 * 24 * 40,), device)
    grad_output, input = (integers(-8, 9, (64, n), device, torch.bfloat16) for n in (24, 40))
    expected = finite(buffer)
    expected[960:1920] += exact_product(grad_output, input).flatten()
    wgrad(buffer[960:1920].view(24, 40), grad_output, input, accumulate=True)
    assert torch.equal(finite(buffer), expected)


@case("wgrad_accumulate_")
def adds_nothing_for_zero_tokens(wgrad, device):
    for accumulate, old, expected in ((True, 3.0, 3.0), (False, math.nan, 0.0)):
        main_grad = torch.full((8, 16), old, device=device)
        operands = (torch.empty(0, n, dtype=torch.bfloat16, device=device) for n in (8, 16))
        wgrad(main_grad, *operands, accumulate=accumulate)
        assert (finite(main_grad) == expected).all()
    operands = (torch.ones(4, n, dtype=torch.bfloat16, device=device) for n in (0, 16))
    wgrad(torch.empty(0, 16, device=device), *operands, accumulate=False)


@case("wgrad_accumulate_", is_torchs=False)
def refuses_by_dtype_what_the_library_would_misread(wgrad, device):
    for dtypes in (
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float16),
        (torch.float32, torch.float32, torch.bfloat16),
    ):
        shapes = ((8, 16), (4, 8), (4, 16))
        tensors = [torch.ones(shape, dtype=d, device=device) for shape, d in zip(shapes, dtypes, strict=True)]
        with pytest.raises(TypeError, match=f"main_grad is {dtypes[0]}, grad_output {dtypes[1]} and input {dtypes[2]}"):
            wgrad(*tensors, accumulate=True)
        assert all((finite(tensor) == 1).all() for tensor in tensors)


@case("wgrad_accumulate_", is_torchs=False)
def refuses_by_shape_what_does_not_fit(wgrad, device):
    for shapes in (
        ((8, 16), (4, 8), (5, 16)),
        ((8, 16), (4, 16), (4, 8)),
        ((8, 16), (4, 9), (4, 16)),
        ((8, 16), (4, 8), (4, 17)),
        ((8, 16), (2, 2, 8), (2, 2, 16)),
        ((128,), (4, 8), (4, 16)),
    ):
        main_grad, *operands = (torch.ones(shape, device=device) for shape in shapes)
        with pytest.raises(ValueError, match=r"main_grad is \[.*needed are \[out, in\]"):
            wgrad(main_grad, *(operand.bfloat16() for operand in operands), accumulate=True)
        assert (finite(main_grad) == 1).all()


# norm(flats, norm_type=2.0, dtype=None)


@case("norm")
def counts_every_element_once(norm, device):
    for sizes in ((1024,), (1024, 4096, 2048), (1024,) * 130, (65536, 1024, 131072, 3072)):
        flats = [integers(-3, 4, (n,), device) for n in sizes]
        squares = sum(finite(flat).square().sum() for flat in flats)
        assert 0 < squares < 2**24  # so that fp32 sums are exact
        total = norm(flats)
        assert (total.dtype, total.shape, total.device) == (torch.float64, torch.Size(), flats[0].device)
        assert abs(float(finite(total)) - math.sqrt(squares)) <= 4 * U * math.sqrt(squares)
        if len(sizes) == 1:
            assert math.sqrt(squares - 1) < (1 - 8 * U) * math.sqrt(squares)  # one element too few would be caught


@case("norm")
def is_right_within_float32_sums(norm, device):
    flats = [torch.randn(n).to(device) for n in (2048, 1024)]
    exact = math.sqrt(sum(finite(flat).square().sum() for flat in flats))
    assert abs(float(finite(norm(flats))) - exact) <= (2048 / 2 + 4) * U * exact


@case("norm", is_torchs=False)
def keeps_low_precision_apart(norm, device):
    flats = [integers(-3, 4, (1024,), device, dtype) for dtype in (torch.float32, *LOW, torch.float32, *LOW)]
    exact = math.sqrt(sum(finite(flat).square().sum() for flat in flats))
    assert abs(float(finite(norm(flats))) - exact) <= 4 * U * exact


@case("norm")
def passes_inf_and_nan_on(norm, device):
    for bad in (math.inf, -math.inf, math.nan):
        for where in ((0, 0), (1, 2047), (2, 500)):
            flats = [torch.ones(n, device=device) for n in (1024, 2048, 1024)]
            assert math.isfinite(norm(flats))
            flats[where[0]][where[1]] = bad
            total = float(norm(flats))
            assert math.isnan(total) if math.isnan(bad) else total == math.inf
            assert math.isfinite(norm([torch.ones(1024, device=device)]))  # the flag does not stay


@case("norm")
def passes_over_empty_tensors(norm, device):
    empty, ones = torch.empty(0, device=device), torch.ones(1024, device=device)
    for flats in ([empty, ones], [ones, empty], [ones, empty, empty], [empty] * 110 + [ones, empty]):
        assert float(norm(flats)) == 32.0
    assert float(norm([empty])) == 0.0
    assert norm([empty, empty]).dtype is torch.float64


@case("norm")
def leaves_other_norms_to_torch(norm, device):
    flats = [torch.randn(n).to(device) for n in (2048, 1024)]
    everything = torch.cat([finite(flat) for flat in flats])
    for norm_type in (1.0, 3.0, math.inf, 0.5):
        exact = torch.linalg.vector_norm(everything, norm_type)
        found = finite(norm(flats, norm_type))
        assert abs(found - exact) <= 4 * 1024 * U * exact  # 1 / p roundings of up to 1024 elements, and of the power
    exact = torch.linalg.vector_norm(everything)
    for answer in (norm(flats, dtype=torch.float64), norm([flat.double() for flat in flats], 2.0)):
        assert abs(finite(answer) - exact) <= 1e-13 * exact  # float64: no library sums in it


@case("norm", is_torchs=False)
def passes_over_empty_tensors_in_other_norms(norm, device):
    empty, twos = torch.empty(0, device=device), torch.full((1024,), 2.0, device=device)
    for norm_type, expected in ((1.0, 2048.0), (math.inf, 2.0)):
        for flats in ([empty, twos], [twos, empty]):
            assert float(norm(flats, norm_type)) == expected
    assert float(norm([empty], math.inf)) == 0.0


@case("norm")
def adds_rows_up_in_float64(norm, device):
    rows = torch.full((17, 1024), 2048.0, device=device)
    rows[:, 0] += 1
    assert float(norm([rows.view(-1)], 1.0)) == 17 * (2**21 + 1)  # odd, and beyond 2**24


# scale_cast_(targets, sources, factor=None)

CASTS = (torch.float32, *LOW)


def halfway(device):
    """Return fp32 values on, and one bit beside, the middle between neighbours in 16 bits, and large ones."""
    base = torch.arange(1, 513, dtype=torch.float32)
    values = [
        base * 2.0**k * (1 + 2.0**-s + e)
        for k in (-6, 0, 5)
        for s in (8, 9, 11, 12)
        for e in (-(2.0**-22), 0, 2.0**-22)
    ]
    return torch.cat([*values, -base]).to(device)


@case("scale_cast_")
def rounds_to_nearest_even(scale_cast_, device):
    for dtype in CASTS:
        source = halfway(device)
        target = torch.full_like(source, math.nan, dtype=dtype)
        assert scale_cast_([target], [source]) is None
        assert torch.equal(finite(target), finite(source.to(dtype)))
        if dtype in LOW:  # truncation would be caught
            bits = source.view(torch.int32).cpu() & (-(1 << 16) if dtype is torch.bfloat16 else -(1 << 13))
            assert not torch.equal(bits.view(torch.float32).double(), finite(target))


@case("scale_cast_")
def scales_in_float32_and_rounds_once_more(scale_cast_, device):
    for dtype in CASTS:
        for factor in (torch.tensor(0.3), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(0.3, device=device)):
            sources = [torch.randn(n).to(device) for n in (1024, 7, 513)]
            targets = [torch.full_like(source, math.nan, dtype=dtype) for source in sources]
            kept = [source.clone() for source in sources]
            scale_cast_(targets, sources, factor)
            for target, source in zip(targets, kept, strict=True):
                assert torch.equal(finite(target), finite((source * factor.to(source)).to(dtype)))
            assert all(torch.equal(source, before) for source, before in zip(sources, kept, strict=True))


@case("scale_cast_")
def scales_in_place(scale_cast_, device):
    sources = [torch.randn(n).to(device) for n in (1024, 7, 513)]
    expected = [finite(source * 0.3) for source in sources]
    scale_cast_(sources, sources, torch.tensor(0.3, device=device))
    assert all(torch.equal(finite(source), other) for source, other in zip(sources, expected, strict=True))


@case("scale_cast_")
def keeps_many_dtypes_and_empty_tensors_apart(scale_cast_, device):
    for factor in (None, torch.tensor(0.5, device=device)):
        dtypes = [(source, target) for source in CASTS for target in CASTS] * 20
        sources = [torch.randn(0 if n % 7 == 6 else n % 50 + 1).to(device, dtypes[n][0]) for n in range(len(dtypes))]
        sources.append(torch.empty(0, device=device))
        targets = [
            torch.full_like(s, math.nan, dtype=t) for s, (_, t) in zip(sources, [*dtypes, (0, LOW[0])], strict=True)
        ]
        scale_cast_(targets, sources, factor)
        for target, source in zip(targets, sources, strict=True):
            scaled = source if factor is None else source * factor.to(source)
            assert torch.equal(finite(target), finite(scaled.to(target.dtype)))


@case("scale_cast_")
def rounds_a_low_precision_product_twice_as_torch_does(scale_cast_, device):
    for dtype in LOW:
        source, factor = torch.randn(1024).to(device, dtype), torch.tensor(0.3, device=device)
        target = torch.zeros(1024, device=device)
        scale_cast_([target], [source], factor)
        assert torch.equal(finite(target), finite(source * factor.to(dtype)))
        assert not torch.equal(finite(target), finite(source.float() * factor.float()))


@case("scale_cast_")
def keeps_inf_and_nan(scale_cast_, device):
    source = torch.tensor([math.inf, -math.inf, math.nan, 1.0] * 64, device=device)
    for dtype in CASTS:
        for factor in (None, torch.tensor(0.5, device=device)):
            target = torch.zeros(256, dtype=dtype, device=device)
            scale_cast_([target], [source], factor)
            one = 1.0 if factor is None else 0.5
            expected = torch.tensor([math.inf, -math.inf, math.nan, one] * 64)
            assert torch.equal(target.float().cpu().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@case("scale_cast_")
def takes_strided_tensors_and_other_dtypes(scale_cast_, device):
    strided, double = torch.randn(64, 32).to(device).t(), torch.randn(512, dtype=torch.float64).to(device)
    for factor in (None, torch.tensor(0.5, device=device)):
        targets = [torch.zeros(32, 64, device=device), torch.zeros(512, dtype=torch.float64, device=device)]
        scale_cast_(targets, [strided, double], factor)
        for target, source in zip(targets, (strided, double), strict=True):
            assert torch.equal(finite(target), finite(source) * (1.0 if factor is None else 0.5))
    scale_cast_([], [])


# fused_step_(rule, operands, *, grad_scale=None, found_inf=None)


def make_operands(sizes, rule, models, device, steps):
    """Return operands with random parameters, and state as after some steps."""
    mains = [torch.randn(n).to(device) for n in sizes]
    momentum = [torch.randn(n).to(device) for n in sizes]
    states = [momentum, [torch.rand(n).add(0.5).to(device) for n in sizes]] if isinstance(rule, Adam) else [momentum]
    low = None if models is None else [torch.full((n,), math.nan, dtype=models, device=device) for n in sizes]
    return StepTensors(
        [torch.randn(n).to(device) for n in sizes], mains, states, low, [torch.tensor(float(s)) for s in steps]
    )


class Oracle:
    """torch.optim in float64, with how far fp32 kernels may be from it.

    Per step an fp32 kernel rounds its hyper-parameters once (which costs ``1 - beta`` a relative error of
    ``u * beta / (1 - beta)``, and bias corrections the same), its moments, quotient and root a few times, and the
    parameter twice. Errors are carried as bounds on sums of absolute values, which no cancellation can hide.
    """

    def __init__(self, rule, operands):
        self.rule, self.num_steps = rule, 0
        self.params = [torch.nn.Parameter(finite(main)) for main in operands.mains]
        is_adam = isinstance(rule, Adam)
        if is_adam:
            cls = torch.optim.AdamW if rule.is_decoupled else torch.optim.Adam
            betas = (rule.beta1, rule.beta2)
            self.optimizer = cls(self.params, rule.lr, betas, rule.eps, rule.weight_decay, foreach=False)
        else:
            given = (rule.lr, rule.momentum, rule.dampening, rule.weight_decay)
            self.optimizer = torch.optim.SGD(self.params, *given, nesterov=rule.is_nesterov, foreach=False)
        self.keys = ("exp_avg", "exp_avg_sq") if is_adam else ("momentum_buffer",)
        for position, param in enumerate(self.params):
            state = {key: finite(tensors[position]) for key, tensors in zip(self.keys, operands.states, strict=True)}
            if is_adam:
                state["step"] = operands.steps[position].clone().cpu() - 1
            self.optimizer.state[param].update(state)
        self.sizes = [finite(tensor).abs() for tensor in operands.states[0]]  # of the terms that are summed
        self.bounds = [torch.zeros_like(param) for param in self.params]

    def step(self, grads):
        rule, self.num_steps = self.rule, self.num_steps + 1
        before = [param.detach().abs() for param in self.params]
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = finite(grad)
        self.optimizer.step()
        for position, param in enumerate(self.params):
            enters = not (isinstance(rule, Adam) and rule.is_decoupled)
            grad = param.grad.abs() + (rule.weight_decay * before[position] if enters else 0.0)
            fed = self.bounds[position] * (rule.weight_decay if enters else 0.0)
            update, error = self._update(position, grad, before[position], fed)
            relative = (10 * self.num_steps + 30) * U + error
            self.bounds[position] = (
                self.bounds[position]
                + rule.lr * (update * relative + 4 * fed)
                + 2 * U * (before[position] + rule.lr * update)
            )

    def _update(self, position, grad, weight, fed):
        """Return the absolute terms of the update, and the relative error that hyper-parameters cost."""
        rule, state = self.rule, self.optimizer.state[self.params[position]]
        if isinstance(rule, Sgd):
            self.sizes[position] = rule.momentum * self.sizes[position] + (1 - rule.dampening) * grad
            own = grad + rule.momentum * self.sizes[position] if rule.is_nesterov else self.sizes[position]
            return own, U * rule.dampening / (1 - rule.dampening)
        self.sizes[position] = rule.beta1 * self.sizes[position] + (1 - rule.beta1) * grad
        number = float(state["step"])
        corrections = [1 - beta**number for beta in (rule.beta1, rule.beta2)]
        root = (state["exp_avg_sq"] / corrections[1]).sqrt() + rule.eps
        update = self.sizes[position] / corrections[0] / root
        update = update + rule.weight_decay * weight if rule.is_decoupled else update
        return update, U * (2 * rule.beta1 / (1 - rule.beta1) + rule.beta2 / (1 - rule.beta2))

    def misses(self, operands):
        """Return, per kind of tensor, by how many bounds the worst element is off."""
        found = {"main": 0.0, **dict.fromkeys(self.keys, 0.0)}
        for position, param in enumerate(self.params):
            if not param.numel():
                continue
            tiny = 1e-300
            error = (finite(operands.mains[position]) - param.detach()).abs()
            found["main"] = max(found["main"], float((error / (self.bounds[position] + tiny)).max()))
            for key, tensors in zip(self.keys, operands.states, strict=True):
                exact = self.optimizer.state[param][key]
                size = exact if key == "exp_avg_sq" else self.sizes[position]
                hyper = {"exp_avg": "beta1", "exp_avg_sq": "beta2"}.get(key)
                beta = getattr(self.rule, hyper) if hyper else 0.2
                fed = self.bounds[position] * self.rule.weight_decay * 4
                bound = (beta / (1 - beta) + 10 * self.num_steps + 10) * U * size + fed
                error = (finite(tensors[position]) - exact).abs()
                found[key] = max(found[key], float((error / (bound + tiny)).max()))
        return found


def run_steps(fused_step_, rule, operands, num_steps=3, told=None):
    """Step ``operands`` and the oracle; ``told`` is the rule that the adapter is told instead. Returns the misses."""
    oracle = Oracle(rule, operands)
    for _ in range(num_steps):
        grads = [grad.clone() for grad in operands.grads]
        oracle.step(grads)
        assert fused_step_(told or rule, operands) is None
        assert all(torch.equal(grad, before) for grad, before in zip(operands.grads, grads, strict=True))
        for model, main in zip(operands.models or [], operands.mains, strict=bool(operands.models)):
            assert torch.equal(finite(model), finite(main.to(model.dtype)))
        for grad, step in zip(operands.grads, operands.steps, strict=True):
            grad.copy_(torch.randn(grad.shape))
            step.add_(1)
    return oracle.misses(operands)


def check_rule(fused_step_, rule, device):
    for models in (None, *LOW):
        operands = make_operands((1024, 5, 700), rule, models, device, steps=(2, 2, 2))
        misses = run_steps(fused_step_, rule, operands)
        assert max(misses.values()) <= 1, misses


@case("fused_step_")
def steps_adamw_as_torch_does(fused_step_, device):
    check_rule(fused_step_, ADAMW, device)


@case("fused_step_")
def steps_adam_as_torch_does(fused_step_, device):
    check_rule(fused_step_, ADAM, device)


@case("fused_step_")
def steps_sgd_with_momentum_as_torch_does(fused_step_, device):
    for rule in (SGD, NESTEROV, DAMPED):
        check_rule(fused_step_, rule, device)


@case("fused_step_")
def steps_each_parameter_by_its_own_count(fused_step_, device):
    operands = make_operands((1024, 5, 700, 64), ADAMW, torch.bfloat16, device, steps=(1, 5, 1, 1000))
    misses = run_steps(fused_step_, ADAMW, operands)
    assert max(misses.values()) <= 1, misses
    operands = make_operands((1024, 5), SGD, torch.bfloat16, device, steps=(1, 5))
    assert max(run_steps(fused_step_, SGD, operands).values()) <= 1


@case("fused_step_")
def steps_many_parameters_with_empty_ones_between(fused_step_, device):
    for rule in (ADAMW, NESTEROV):
        for models in (None, *LOW):
            sizes = (0, *[n % 5 for n in range(100)], 3, 0)
            operands = make_operands(sizes, rule, models, device, steps=[1.0] * len(sizes))
            misses = run_steps(fused_step_, rule, operands)
            assert max(misses.values()) <= 1, misses
            assert (
                fused_step_(
                    rule, StepTensors([], [], [[] for _ in operands.states], None if models is None else [], [])
                )
                is None
            )


@case("fused_step_")
def another_rule_would_be_caught(fused_step_, device):
    changes = {
        "weight decay": (ADAM, Adam(0.01, 0.8, 0.99, 1e-6, 0.1, True)),
        "betas": (ADAMW, Adam(0.01, 0.999, 0.9, 1e-8, 0.1, True)),
        "eps": (ADAM, Adam(0.01, 0.8, 0.99, 1e-3, 0.1, False)),
        "nesterov": (NESTEROV, Sgd(0.1, 0.9, 0.0, 0.01, False)),
        "dampening": (DAMPED, Sgd(0.1, 0.8, 0.0, 0.01, False)),
        "decay": (DAMPED, Sgd(0.1, 0.8, 0.1, 0.0, False)),
    }
    for name, (rule, told) in changes.items():
        operands = make_operands((1024,), rule, None, device, steps=(2,))
        assert run_steps(fused_step_, rule, operands, told=told)["main"] > 10, name


@case("fused_step_")
def refuses_what_it_would_compute_wrong(fused_step_, device):
    one = torch.ones((), device=device)
    plain = Sgd(lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, is_nesterov=False)
    for rule, keywords, message in (
        (ADAMW, {"grad_scale": one}, "without grad_scale"),
        (ADAMW, {"found_inf": one}, "without grad_scale"),
        (plain, {}, "SGD with momentum"),
    ):
        operands = make_operands((8,), ADAMW, torch.bfloat16, device, steps=(1,))
        before = operands.mains[0].clone()
        with pytest.raises(TypeError, match=message):
            fused_step_(rule, operands, **keywords)
        assert torch.equal(operands.mains[0], before)


@case("fused_step_")
def refuses_dtypes_and_layouts_that_the_kernel_would_misread(fused_step_, device):
    for rule in (ADAMW, SGD):
        for change, error, message in (
            (lambda s: s.grads.__setitem__(1, s.grads[1].bfloat16()), TypeError, "takes float32"),
            (lambda s: s.states[0].__setitem__(0, s.states[0][0].double()), TypeError, "takes float32"),
            (lambda s: s.models.__setitem__(1, s.models[1].half()), TypeError, "all bfloat16 or all float16"),
            (lambda s: s.models.__setitem__(0, s.models[0].float()), TypeError, "all bfloat16 or all float16"),
            (lambda s: s.mains.__setitem__(0, torch.randn(16).to(device)[::2]), ValueError, "not contiguous"),
            (lambda s: s.mains.__setitem__(0, torch.randn(9).to(device)), ValueError, "9 elements on"),
            (lambda s: s.grads.pop(), ValueError, "one of each per position"),
            (lambda s: s.models.pop(), ValueError, "one of each per position"),
            (lambda s: s.states.pop(), ValueError, "lists of state"),
        ):
            operands = make_operands((8, 4), rule, torch.bfloat16, device, steps=(1, 1))
            change(operands)
            before = [main.clone() for main in operands.mains]
            with pytest.raises(error, match=message):
                fused_step_(rule, operands)
            assert all(torch.equal(main, old) for main, old in zip(operands.mains, before, strict=True))
    operands = make_operands((8, 4), ADAMW, None, device, steps=(1, 0))
    with pytest.raises(ValueError, match="counted from 1"):
        fused_step_(ADAMW, operands)
    operands.steps.pop()
    with pytest.raises(ValueError, match="one of each per position"):
        fused_step_(ADAMW, operands)
