"""`convert_linears` and `restore_linears`: what changes, what stays, what is left alone."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fusedopt
from fusedopt import FusedLinear, convert_linears, restore_linears


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"q": nn.Linear(4, 4), "o": nn.Linear(4, 4, bias=False)})
        self.mlp = Mlp()

    def forward(self, x):
        return self.mlp(self.attn["o"](self.attn["q"](x)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 3))


NAMES = [f"{i}.{n}" for i in (0, 1) for n in ("attn.q", "attn.o", "mlp.up", "mlp.down")] + ["2"]


def fused_names(module):
    return [name for name, layer in module.named_modules() if type(layer) is FusedLinear]


def test_all_plain_linear_layers_are_converted_and_restored():
    net = model()
    report = convert_linears(net)
    assert report.converted == fused_names(net) == NAMES
    assert report.skipped == {}
    assert str(report) == "9 linear layer(s) converted, 0 skipped"
    assert all(isinstance(m, nn.Linear) for n, m in net.named_modules() if n in NAMES)
    assert restore_linears(net) == NAMES
    assert fused_names(net) == []
    assert all(type(m) is nn.Linear and "exact" not in vars(m) for n, m in net.named_modules() if n in NAMES)


def test_objects_names_hooks_training_flag_and_tying_stay():
    net = model()
    net[1].attn["q"] = net[0].attn["q"]  # a shared layer
    net[1].mlp.up.weight = net[0].mlp.up.weight  # a tied weight
    net[0].mlp.eval()
    calls = []
    net[2].register_forward_hook(lambda *args: calls.append("forward"))
    net[2].weight.register_hook(lambda grad: calls.append("weight"))
    before = {name: id(param) for name, param in net.named_parameters(remove_duplicate=False)}
    modules = {name: id(module) for name, module in net.named_modules(remove_duplicate=False)}
    keys, flags = list(net.state_dict()), [m.training for m in net.modules()]
    for change in (convert_linears, restore_linears):
        change(net)
        assert {name: id(param) for name, param in net.named_parameters(remove_duplicate=False)} == before
        assert {name: id(module) for name, module in net.named_modules(remove_duplicate=False)} == modules
        assert list(net.state_dict()) == keys
        assert [m.training for m in net.modules()] == flags
        calls.clear()
        net(torch.ones(1, 4)).sum().backward()
        assert calls == ["forward", "weight"]


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("*.mlp.*", None, ["0.mlp.up", "0.mlp.down", "1.mlp.up", "1.mlp.down"]),
        (Mlp, None, ["0.mlp.up", "0.mlp.down", "1.mlp.up", "1.mlp.down"]),
        (None, ["2", "*.o"], [n for n in NAMES if n != "2" and not n.endswith(".o")]),
        ([Block], [Mlp], ["0.attn.q", "0.attn.o", "1.attn.q", "1.attn.o"]),
        (["0.*", "2"], "*.down", ["0.attn.q", "0.attn.o", "0.mlp.up", "2"]),
        (nn.Linear, None, NAMES),
    ],
)
def test_include_and_exclude_take_names_and_classes(include, exclude, expected):
    net = model()
    report = convert_linears(net, include, exclude)
    assert report.converted == fused_names(net) == expected
    assert set(report.skipped.values()) <= {"not included", "excluded"}
    assert sorted([*report.converted, *report.skipped]) == sorted(NAMES)


def test_a_pattern_that_matches_nothing_raises_and_changes_nothing():
    net = model()
    with pytest.raises(ValueError, match=r"'lm_head' matches none of the 9 linear layer\(s\).*'0\.attn\.q'"):
        convert_linears(net, exclude=["2", "lm_head"])
    with pytest.raises(ValueError, match=r"Embedding.*matches none"):
        convert_linears(net, include=nn.Embedding)
    assert fused_names(net) == []


class QuantisedLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x.round())


def test_what_must_not_be_touched_is_reported_with_the_reason():
    net = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "subclass": QuantisedLinear(4, 4),
            "frozen": nn.Linear(4, 4).requires_grad_(False),
            "patched": nn.Linear(4, 4),
            "parametrised": parametrizations.weight_norm(nn.Linear(4, 4)),
            "attention": nn.MultiheadAttention(4, 1),
            "fused": FusedLinear(4, 4),
            "lazy": nn.LazyLinear(4),
        }
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm is deprecated, and still in use
        net["old_weight_norm"] = nn.utils.weight_norm(nn.Linear(4, 4))
    net["patched"].forward = lambda x: x
    report = convert_linears(net)
    assert report.converted == ["plain"]
    assert report.skipped == {
        "subclass": "is a QuantisedLinear, which has its own forward",
        "frozen": "has a frozen weight",
        "patched": "has a forward of its own set on the instance",
        "parametrised": "is a ParametrizedLinear, which has its own forward",
        "attention.out_proj": "is a NonDynamicallyQuantizableLinear, which has its own forward",
        "fused": "is a FusedLinear already",
        "lazy": "is a LazyLinear, which has its own forward",
        "old_weight_norm": "has a weight that is no Parameter (weight_norm, for one)",
    }
    assert "  frozen: has a frozen weight" in str(report).splitlines()


def test_lora_wrapped_bases_stay_and_adapters_are_converted():
    class LoraLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(4, 4).requires_grad_(False)
            self.lora_A, self.lora_B = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

        def forward(self, x):
            return self.base_layer(x) + self.lora_B(self.lora_A(x))

    net = LoraLinear()
    report = convert_linears(net)
    assert report.converted == ["lora_A", "lora_B"]
    assert report.skipped == {"base_layer": "has a frozen weight"}
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW([p for p in net.parameters() if p.requires_grad]))
    net(torch.randn(2, 4)).sum().backward()
    assert net.lora_A.weight.grad is net.lora_A.weight.main_grad
    assert not hasattr(net.base_layer.weight, "main_grad")
    assert net.base_layer.weight.grad is None
    optimizer.step()


@pytest.mark.parametrize("convert_first", [True, False])
def test_order_against_wrapping_does_not_matter(convert_first):
    net = model().bfloat16()
    if convert_first:
        convert_linears(net)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    if not convert_first:
        convert_linears(net)
    output = net(torch.ones(2, 4, dtype=torch.bfloat16))
    assert "FusedLinear" in type(output.grad_fn).__name__
    output.float().sum().backward()
    assert all(p.grad is p.main_grad for p in net.parameters())
    optimizer.step()


def test_a_single_layer_is_converted_itself_and_a_copy_stays_converted():
    layer = nn.Linear(4, 4)
    assert convert_linears(layer).converted == [""]
    assert type(layer) is FusedLinear
    assert type(copy.deepcopy(layer)) is FusedLinear
    assert restore_linears(layer) == [""]


def test_the_fast_option_is_kept_on_the_layer():
    net = model()
    convert_linears(net, exact=False)
    assert {layer.exact for layer in net.modules() if type(layer) is FusedLinear} == {False}
    assert FusedLinear(4, 4).exact is True
