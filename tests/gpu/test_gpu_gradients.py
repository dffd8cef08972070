"""api.md section 2 on the device: `.grad` is main_grad, and sums are fp32."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusedopt
from tests.models import OneOfEachKind

LOW_PRECISION = [torch.bfloat16, torch.float16]
WHERE_ONE_IS_LOST = {torch.bfloat16: 256.0, torch.float16: 2048.0}


def wrap(params, **settings):
    return fusedopt.FusedMainGradOptimizer(torch.optim.SGD(params, lr=0.0), **settings)


@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_big_then_one_is_the_exact_sum_for_every_kind_of_parameter(device, dtype):
    model = OneOfEachKind().to(device, dtype)
    optimizer = wrap(model.parameters())
    big = WHERE_ONE_IS_LOST[dtype]
    assert torch.tensor(big, dtype=dtype) + 1 == big
    for _ in range(2):  # the second window overwrites the first
        for factor in (big, 1.0):
            model(factor).backward()
        for name, param in model.named_parameters():
            assert param.grad is param.main_grad, name
            assert param.grad.dtype is torch.float32, name
            assert param.grad.device == device, name
            assert param.grad.item() == big + 1, name
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", [nn.Linear, fusedopt.FusedLinear])
def test_tied_embedding_and_head_sum_in_float32(device, kind):
    embedding = nn.Embedding(2, 2, dtype=torch.bfloat16, device=device)
    head = kind(2, 2, bias=False, dtype=torch.bfloat16, device=device)
    head.weight = embedding.weight
    _optimizer = wrap(embedding.parameters())
    hidden = embedding(torch.tensor([0], device=device))
    out = head(torch.ones(1, 2, dtype=torch.bfloat16, device=device))
    (hidden.sum() * 256.0 + out[0, 0]).backward()
    assert embedding.weight.grad is embedding.weight.main_grad
    assert embedding.weight.grad[0].tolist() == [257.0, 257.0]


@pytest.mark.parametrize("kind", [nn.Linear, fusedopt.FusedLinear])
def test_two_uses_of_one_weight_inside_one_backward_sum_in_float32(device, kind):
    layer = kind(1, 1, bias=False, dtype=torch.bfloat16, device=device)
    _optimizer = wrap(layer.parameters())
    one = torch.ones(1, 1, dtype=torch.bfloat16, device=device)
    (layer(one) * 256.0 + layer(one)).sum().backward()
    assert layer.weight.grad.item() == 257.0


@pytest.mark.parametrize("kind", [nn.Linear, fusedopt.FusedLinear])
def test_old_bytes_never_leak_past_a_clear(device, kind):
    layer = kind(32, 16, dtype=torch.bfloat16, device=device)
    unused = nn.Linear(3, 3, dtype=torch.bfloat16, device=device)
    optimizer = wrap([*layer.parameters(), *unused.parameters()], max_grad_norm=1e9)
    x = torch.randn(8, 32, device=device).bfloat16()
    sums = []
    for _ in range(3):
        for param in (*layer.parameters(), *unused.parameters()):
            param.main_grad.fill_(float("nan"))
        layer(x).float().square().mean().backward()
        assert all(param.grad is None for param in unused.parameters())
        assert optimizer.clip_grad_norm_(1e9).isfinite()
        sums.append([param.grad.clone() for param in layer.parameters()])
        optimizer.step()
        assert not optimizer.step_was_skipped
        optimizer.zero_grad()
    assert all(grad.isfinite().all() and grad.any() for grad in sums[0])
    assert all(torch.equal(a, b) for later in sums[1:] for a, b in zip(sums[0], later, strict=True))


class Blocks(nn.Module):
    """Residual blocks of fused layers, recomputed or not."""

    def __init__(self, use_reentrant):
        super().__init__()
        pairs = [(fusedopt.FusedLinear(64, 128), fusedopt.FusedLinear(128, 64)) for _ in range(3)]
        self.blocks = nn.ModuleList(nn.Sequential(up, nn.GELU(), nn.Dropout(0.1), down) for up, down in pairs)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            run = block if self.use_reentrant is None else None
            y = run(x) if run else checkpoint(block, x, use_reentrant=self.use_reentrant)
            x = x + y
        return x


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_is_bit_equal_with_fused_layers(device, use_reentrant):
    results = []
    for mode in (None, use_reentrant):
        torch.manual_seed(1)
        model = Blocks(mode).to(device, torch.bfloat16)
        x = torch.randn(16, 64, device=device).bfloat16().requires_grad_()
        _optimizer = wrap(model.parameters())
        for _ in range(3):
            model(x).float().square().mean().backward()
        assert all(param.grad is param.main_grad for param in model.parameters())
        results.append([param.grad.clone() for param in model.parameters()] + [x.grad])
    for with_recompute, without in zip(*results, strict=True):
        assert without.isfinite().all()
        assert without.any()
        assert torch.equal(with_recompute, without)


# -- streams


@pytest.fixture
def layer_and_sum(cuda):
    """Return a maker of layers and what three backwards of one batch sum to in each."""
    torch.manual_seed(2)
    x = torch.randint(-3, 4, (64, 128), device=cuda).bfloat16()

    def make(kind):
        layer = kind(128, 96, bias=False, dtype=torch.bfloat16, device=cuda)
        return layer, wrap(layer.parameters())

    return make, x, 3 * x.float().sum(0).expand(96, 128)  # small integers: exact in fp32


@pytest.mark.parametrize("kind", [nn.Linear, fusedopt.FusedLinear])
def test_backwards_on_a_side_stream_see_right_sums(layer_and_sum, kind):
    make, x, expected = layer_and_sum
    layer, optimizer = make(kind)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).float().sum().backward()
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("kind", [nn.Linear, fusedopt.FusedLinear])
def test_a_forward_on_a_side_stream_and_a_backward_from_the_main_one_see_right_sums(layer_and_sum, kind):
    make, x, expected = layer_and_sum
    layer, _optimizer = make(kind)
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = layer(x)
            out.register_hook(lambda grad: torch.cuda._sleep(20_000_000))  # 10 ms: whoever does not wait, loses
            loss = out.float().sum()
        torch.cuda.current_stream().wait_stream(side)
        loss.backward()
    assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("kind", [nn.Linear, fusedopt.FusedLinear])
def test_one_weight_used_on_two_streams_in_one_backward_sums_both(layer_and_sum, kind):
    make, x, expected = layer_and_sum
    layer, _optimizer = make(kind)
    streams = [torch.cuda.Stream() for _ in range(3)]
    outs = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            outs.append(layer(x))
    outs[-1].register_hook(lambda grad: torch.cuda._sleep(20_000_000))  # its backward is the first to be launched
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    sum(out.float().sum() for out in outs).backward()
    assert torch.equal(layer.weight.grad, expected)
