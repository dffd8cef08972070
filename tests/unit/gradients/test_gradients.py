"""api.md section 2: gradients, `param.grad is param.main_grad`."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedopt
from tests.models import Mlp, OneOfEachKind, backward

BF16_STEP = 256.0  # in bf16, 256 + 1 == 256: eight bits of mantissa


def wrap(model, **settings):
    return fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_256_then_1_is_257_over_micro_batches_for_every_kind_of_parameter(dtype):
    model = OneOfEachKind().to(dtype)
    _optimizer = wrap(model)
    big = BF16_STEP if dtype is torch.bfloat16 else 2048.0  # where adding 1 is lost in this dtype
    for factor in (big, 1.0):
        model(factor).backward()
    assert torch.tensor(big, dtype=dtype) + 1 == big
    for name, param in model.named_parameters():
        assert param.grad.dtype is torch.float32, name
        assert param.grad.item() == big + 1, name


def test_256_and_1_are_257_between_two_uses_inside_one_backward():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    stock = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))
    for param in (weight, stock):
        (param * 256.0 + param * 1.0).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 257.0))
    assert torch.equal(stock.grad.float(), torch.full((3,), 256.0))  # what torch does by itself


def test_tied_embedding_and_head_sum_in_float32():
    embedding = nn.Embedding(2, 2, dtype=torch.bfloat16)
    head = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    head.weight = embedding.weight
    _optimizer = wrap(embedding)
    hidden = embedding(torch.tensor([0]))
    out = head(torch.ones(1, 2, dtype=torch.bfloat16))
    (hidden.sum() * 256.0 + out[0, 0]).backward()
    assert embedding.weight.grad[0].tolist() == [257.0, 257.0]


def test_4096_equal_micro_gradients_sum_exactly():
    weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    wrap_one = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([weight], lr=0.1))
    for _ in range(4096):
        weight.sum().backward()
    assert torch.equal(weight.main_grad, torch.full((4,), 4096.0))
    wrap_one.zero_grad()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_main_grad_is_a_view_of_a_contiguous_bucket_whose_storage_never_moves(dtype):
    model = Mlp(dtype)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
    flats = [bucket.grad for bucket in optimizer._buffers.buckets]
    assert len(flats) == 1
    assert flats[0].is_contiguous()
    addresses = [param.main_grad.data_ptr() for param in model.parameters()]
    for number in range(3):
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    storage = flats[0].untyped_storage().data_ptr()
    for param, address in zip(model.parameters(), addresses, strict=True):
        assert param.main_grad.untyped_storage().data_ptr() == storage
        assert param.main_grad.data_ptr() == address
        assert param.main_grad.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
        assert param.main_grad.shape == param.shape


def test_main_grad_has_the_strides_of_a_dense_parameter():
    channels_last = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
    transposed = nn.Parameter(torch.randn(6, 4).t())
    not_dense = nn.Parameter(torch.randn(6, 8)[:, ::2])
    scalar, empty = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 3))
    params = [channels_last, transposed, not_dense, scalar, empty]
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.1))
    assert channels_last.main_grad.stride() == channels_last.stride()
    assert transposed.main_grad.stride() == transposed.stride()
    assert not_dense.main_grad.is_contiguous()
    assert scalar.main_grad.shape == ()
    assert empty.main_grad.shape == (0, 3)
    for _ in range(2):
        sum((param * 2).sum() for param in params).backward()
    for param in params:
        assert param.grad is param.main_grad
        assert torch.equal(param.grad, torch.full_like(param, 4.0))


def test_after_a_backward_grad_is_main_grad_where_a_gradient_arrived_and_none_elsewhere():
    model = Mlp()
    unused = nn.Linear(3, 3).bfloat16()
    _optimizer = wrap(nn.ModuleList([model, unused]))
    for number in range(3):
        backward(model, number)
        assert all(param.grad is param.main_grad for param in model.parameters())
        assert all(param.grad is None for param in unused.parameters())


CLEARS = {
    "optimizer.zero_grad()": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda model, optimizer: model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "param.grad = None": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "param.grad.zero_()": lambda model, optimizer: [p.grad.zero_() for p in model.parameters()],
}


@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_way_of_clearing_clears_all_that_came_before(clear, dtype):
    model = Mlp(dtype)
    optimizer = wrap(model, max_grad_norm=1e9)
    x = torch.randn(4, 5).to(dtype)

    def run():
        model(x).float().square().mean().backward()
        return [param.grad.clone() for param in model.parameters()]

    first = run()
    assert all(grad.abs().sum() > 0 for grad in first)
    for _ in range(3):
        for param in model.parameters():
            param.main_grad.fill_(99.0)  # what a clear must not let through
        clear(model, optimizer)
        again = run()
        for param, want, got in zip(model.parameters(), first, again, strict=True):
            assert torch.isfinite(got).all()
            assert torch.equal(got, want)
            assert param.grad is param.main_grad


def test_whole_bucket_operations_see_zero_where_grad_is_none():
    used, unused = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(5))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([used, unused], lr=0.0), max_grad_norm=1e9)
    (used.sum() * 1.0 + unused.sum() * 50.0).backward()
    unused.grad = None  # runs no code of ours: the bucket still holds 50s
    assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(6**0.5, rel=2**-22)
    unused.main_grad.fill_(float("nan"))
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(6**0.5, rel=2**-22)
    assert not optimizer.step_was_skipped


def test_step_does_not_clear():
    model = Mlp()
    optimizer = wrap(model)
    backward(model)
    before = [param.grad.clone() for param in model.parameters()]
    optimizer.step()
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("where", ["arrival", "clip", "step", "state_dict"])
def test_a_gradient_set_by_hand_is_taken_over(where):
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0))
    mine = torch.tensor([1.0, 2.0, 4.0])
    param.grad = mine.clone()
    assert param.grad is not param.main_grad
    expected = mine.clone()
    if where == "arrival":
        param.sum().backward()
        expected += 1.0
    elif where == "clip":
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(21**0.5, rel=2**-22)
    elif where == "step":
        optimizer.step()
        assert torch.equal(param.detach().float(), -mine)
    else:
        optimizer.state_dict()
    assert param.grad is param.main_grad
    assert torch.equal(param.grad, expected)


def test_torch_refuses_a_gradient_of_another_dtype_or_shape():
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=1.0))
    with pytest.raises(RuntimeError, match="dtype"):
        param.grad = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="size"):
        param.grad = torch.zeros(4)
    param.grad = param.main_grad.view_as(param)  # an alias of main_grad is fine
    param.main_grad.fill_(3.0)
    param.sum().backward()
    assert param.grad is param.main_grad
    assert param.grad.tolist() == [4.0, 4.0, 4.0]


def test_a_gradient_that_hung_there_before_wrapping_is_kept():
    model = Mlp()
    backward(model)
    before = [param.grad.float() for param in model.parameters()]
    _optimizer = wrap(model)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        assert torch.equal(param.grad, grad)


@pytest.mark.parametrize("when", ["arrival", "step", "clip"])
@pytest.mark.parametrize("how", ["rebound", "deleted"])
def test_a_rebound_main_grad_raises_by_name(when, how):
    model = Mlp()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    backward(model)
    if how == "rebound":
        model.second.weight.main_grad = torch.zeros(3, 6)
    else:
        del model.second.weight.main_grad
    act = {"arrival": lambda: backward(model), "step": optimizer.step, "clip": lambda: optimizer.clip_grad_norm_(1.0)}
    with pytest.raises(RuntimeError, match=r"main_grad of parameter second\.weight .*param\.grad"):
        act[when]()


def test_tensor_hooks_see_the_micro_batch_gradient_in_float32():
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    seen = []
    param.register_hook(lambda grad: seen.append((grad.dtype, grad.tolist())))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=0.1))
    param.register_hook(lambda grad: seen.append((grad.dtype, grad.tolist())))
    for factor in (256.0, 1.0):
        (param * factor).sum().backward()
    assert seen == [(torch.float32, [f, f]) for f in (256.0, 256.0, 1.0, 1.0)]


@pytest.mark.parametrize("registered", ["before wrapping", "after wrapping"])
def test_post_accumulate_hooks_see_grad_is_main_grad_accumulated(registered):
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    seen = []

    def hook(p):
        seen.append((p.grad is getattr(p, "main_grad", None), p.grad.tolist()))

    handles = [param.register_post_accumulate_grad_hook(hook)] if registered == "before wrapping" else []
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=0.1))
    if not handles:
        handles.append(param.register_post_accumulate_grad_hook(hook))
    for _ in range(2):
        for factor in (256.0, 1.0):
            (param * factor).sum().backward()
        optimizer.zero_grad()
    assert seen == [(True, [256.0, 256.0]), (True, [257.0, 257.0])] * 2
    handles[0].remove()
    param.sum().backward()
    assert len(seen) == 4
    assert param.grad is param.main_grad


def test_stock_clip_grad_norm_clips_main_grad():
    model, twin = Mlp(torch.float32), Mlp(torch.float32)
    twin.load_state_dict(model.state_dict())
    optimizer = wrap(model)
    x = torch.randn(4, 5)
    for m in (model, twin):
        m(x).square().mean().backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 1e-3) for m in (model, twin)]
    assert norms[0] > 1e-3
    assert torch.equal(norms[0], norms[1])
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert param.grad is param.main_grad
        assert torch.equal(param.grad, other.grad)
    optimizer.step()


def test_autograd_grad_leaves_main_grad_untouched_and_returns_the_gradient():
    model = Mlp()
    _optimizer = wrap(model)
    backward(model)
    before = [param.main_grad.clone() for param in model.parameters()]
    x = torch.randn(4, 5, dtype=torch.bfloat16, requires_grad=True)
    loss = model(x).float().square().mean()
    grads = torch.autograd.grad(loss, [x, model.first.weight], retain_graph=True)
    assert torch.isfinite(grads[1]).all()
    assert grads[1].abs().sum() > 0
    (again,) = torch.autograd.grad(loss, [model.first.weight], create_graph=True)
    assert again.requires_grad
    assert torch.equal(again.detach().float(), grads[1].float())
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        assert torch.equal(param.main_grad, grad)


def test_backward_twice_with_retain_graph_adds_twice():
    model = Mlp()
    _optimizer = wrap(model)
    loss = model(torch.randn(4, 5, dtype=torch.bfloat16)).float().square().mean()
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in model.parameters()]
    loss.backward()
    for param, grad in zip(model.parameters(), once, strict=True):
        assert grad.abs().sum() > 0
        assert torch.equal(param.grad, 2 * grad)


def test_backward_with_inputs_accumulates_only_what_it_names():
    model = Mlp()
    _optimizer = wrap(model)
    loss = model(torch.randn(4, 5, dtype=torch.bfloat16)).float().square().mean()
    loss.backward(inputs=[model.first.weight])
    assert model.first.weight.grad is model[0].weight.main_grad
    assert all(param.grad is None for name, param in model.named_parameters() if name != "first.weight")


@pytest.mark.parametrize("has_earlier_sum", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_create_graph_raises_by_name_and_keeps_the_earlier_sum(dtype, has_earlier_sum):
    param = nn.Parameter(torch.full((3,), 2.0, dtype=dtype))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([("alpha", param)], lr=0.1))
    if has_earlier_sum:
        (param * 5.0).sum().backward()
    param.main_grad.add_(0.0 if has_earlier_sum else 99.0)  # stale bytes where nothing was summed
    with pytest.raises(
        RuntimeError, match=r"parameter alpha .*torch\.autograd\.grad\(loss, parameters, create_graph=True"
    ):
        param.square().sum().backward(create_graph=True)
    if has_earlier_sum:
        assert param.grad is param.main_grad
        assert param.grad.tolist() == [5.0] * 3
    else:
        assert param.grad is None
    param.square().sum().backward()
    assert param.grad.tolist() == [9.0 if has_earlier_sum else 4.0] * 3
    optimizer.step()


def test_a_raising_hook_keeps_the_windows_sum():
    model = Mlp()
    optimizer = wrap(model)
    backward(model)
    before = [param.grad.clone() for param in model.parameters()]
    should_raise = True

    def hook(grad):
        if should_raise:
            raise ValueError("from the user's hook")

    model.first.bias.register_hook(hook)
    first_layer = [model.first.weight, model[0].bias]
    with pytest.raises(ValueError, match="user's hook"):
        backward(model)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is param.main_grad
        if any(param is p for p in first_layer):
            assert torch.equal(param.grad, grad)  # nothing of the failed backward reached these
    should_raise = False
    optimizer.zero_grad()
    backward(model)
    assert all(torch.isfinite(param.grad).all() for param in model.parameters())


def test_an_exception_in_the_backward_of_a_layer_keeps_the_earlier_sum():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("out of memory, say")

    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=0.1))
    (param * 3.0).sum().backward()
    with pytest.raises(ValueError, match="out of memory"):
        Fails.apply(param * 2.0).sum().backward()
    assert param.grad is param.main_grad
    assert param.grad.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("when", ["arrival", "step"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("had_gradient", [True, False])
def test_casting_the_model_after_wrapping_raises_by_name_at_the_next_arrival_or_step(cast, when, dtype, had_gradient):
    model = Mlp(dtype)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))
    if had_gradient:
        backward(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    getattr(model, cast)()
    if next(model.parameters()).dtype is dtype and not had_gradient:
        backward(model)  # a cast that changed nothing is no error; with a gradient, torch casts that one
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"parameter \w+\.(weight|bias) .*wrap the optimizer after"):
        backward(model) if when == "arrival" else optimizer.step()
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), before[name].to(param.dtype))


@pytest.mark.parametrize("when", ["arrival", "step"])
def test_a_parameter_whose_shape_changed_raises_by_name(when):
    embedding = nn.Embedding(4, 2, dtype=torch.bfloat16)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(embedding.named_parameters(), lr=0.1))
    embedding.weight.data = torch.zeros(6, 2, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"parameter weight has shape \(6, 2\) but had \(4, 2\)"):
        embedding(torch.tensor([5])).sum().backward() if when == "arrival" else optimizer.step()


def test_a_sparse_gradient_raises_by_name_at_the_first_arrival():
    embedding = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(embedding.named_parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"parameter weight is torch\.sparse_coo.*sparse=False"):
        embedding(torch.tensor([1])).sum().backward()
    assert embedding.weight.grad is None


def test_a_function_that_returns_none_for_a_parameter_leaves_grad_none():
    class Drops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    param = nn.Parameter(torch.ones(3))
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([param], lr=0.1))
    Drops.apply(torch.ones(3, requires_grad=True), param).sum().backward()
    assert param.grad is None


def test_reentrant_and_non_reentrant_checkpoints_accumulate_as_without():
    results = []
    x = torch.randn(4, 5, dtype=torch.bfloat16)
    for use_reentrant in (None, False, True):
        torch.manual_seed(1)
        model = Mlp()
        _optimizer = wrap(model)
        for _ in range(3):
            inputs = x.clone().requires_grad_()
            ways = {"use_reentrant": use_reentrant} if use_reentrant is not None else None
            outs = [model(y) if ways is None else checkpoint(model, y, **ways) for y in (inputs, inputs * 2)]
            (outs[0].float().square().mean() + outs[1].float().mean()).backward()  # two regions, one weight
        assert all(param.grad is param.main_grad for param in model.parameters())
        results.append([param.grad.clone() for param in model.parameters()])
    for other in results[1:]:
        for want, got in zip(results[0], other, strict=True):
            assert torch.isfinite(got).all()
            assert torch.equal(got, want)


def test_hooks_do_not_keep_a_dropped_model_alive():
    model = Mlp()
    optimizer = wrap(model)
    backward(model)
    optimizer.step()
    watched = [weakref.ref(param) for param in model.parameters()] + [weakref.ref(optimizer)]
    storage = weakref.ref(optimizer._buffers.buckets[0].grad)
    del model, optimizer
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert storage() is None
