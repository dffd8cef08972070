"""Claims about real PEFT: LoRA on a tiny LLaMA with a frozen bf16 base, fp32 adapters, a bf16 module saved whole.

tests/ecosystem/test_peft_style.py makes the same claims, and more, about layers written there.
"""

import gc

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn

import fusedopt
from fusedopt import FusedMainGradOptimizer
from fusedopt.integrations.accelerate import prepare
from tests import accelerate_cases, peft_cases
from tests.compare import assert_equal_parameters, bits, snapshot
from tests.peft_cases import LENGTH, MAX_NORM, NUM_ADAPTED, adamw, lora, loss_of, make_base, make_model, trainable
from tests.reference import Reference

pytestmark = pytest.mark.filterwarnings(f"ignore:{peft_cases.WARNING}")


def with_an_empty_group(params):
    """Return the groups that Trainer makes of a PEFT model: decayed, and not decayed, of which there are none."""
    return adamw([{"params": params}, {"params": [], "weight_decay": 0.0}])


def train(model, optimizer, windows, max_norm=None):
    for window in windows:
        for number in (2 * window, 2 * window + 1):
            loss_of(model, number).backward()
        if max_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm
        optimizer.step()
        optimizer.zero_grad()


def train_reference(reference, windows):
    for window in windows:
        for number in (2 * window, 2 * window + 1):
            reference.backward(loss_of(reference.model, number))
        reference.step()


def assert_only_trainable_moved(model, start):
    for name, param in model.named_parameters():
        assert torch.equal(bits(param), bits(start[name])) is not param.requires_grad, name


def assert_buffers_cover(optimizer, model):
    """Assert that what trains, and nothing else of the model, has main_grad, and that the report counts no other."""
    ours = {id(p) for p in trainable(model).values()}
    assert ours
    for name, param in model.named_parameters():
        assert hasattr(param, "main_grad") is (id(param) in ours), name
    report = optimizer.memory_report()
    assert report["model"] == sum(p.nbytes for p in trainable(model).values())
    numel = sum(p.numel() for p in trainable(model).values())
    assert 4 * numel <= report["main_grad"] < 4 * (numel + 2 * 1024)  # two buckets of whole rows: fp32 and bf16
    assert report["state"] == 8 * numel + 4 * len(ours)  # two moments, a 0-d step each


# -- one group of fp32 adapters and a bf16 module


@pytest.mark.parametrize("max_norm", [None, MAX_NORM], ids=["unclipped", "clipped by torch"])
@pytest.mark.parametrize("autocasts", [True, False], ids=["fp32 adapters", "bf16 adapters"])
def test_adapters_and_a_saved_module_train_as_the_reference_does(autocasts, max_norm):
    model, twin = (make_model(autocast_adapter_dtype=autocasts) for _ in range(2))
    start = snapshot(model)
    dtypes = {name: param.dtype for name, param in trainable(model).items()}
    assert len(dtypes) == NUM_ADAPTED + 1
    assert sum(dtype is torch.float32 for dtype in dtypes.values()) == (NUM_ADAPTED if autocasts else 0)
    assert {param.dtype for param in model.parameters() if not param.requires_grad} == {torch.bfloat16}

    optimizer = FusedMainGradOptimizer(with_an_empty_group(list(trainable(model).values())))
    assert [len(group["params"]) for group in optimizer.param_groups] == [NUM_ADAPTED + 1, 0]
    reference = Reference(
        twin,
        lambda groups: with_an_empty_group(groups[0]),
        groups=[trainable(twin).values()],
        max_grad_norm=max_norm,
    )
    train(model, optimizer, range(4), max_norm)
    train_reference(reference, range(4))
    assert_equal_parameters(model, twin)
    assert_only_trainable_moved(model, start)


def test_frozen_weights_get_no_buffer_also_where_all_are_given():
    for give in (lambda model: trainable(model).values(), lambda model: model.parameters()):
        model = make_model()
        optimizer = FusedMainGradOptimizer(adamw(list(give(model))))
        train(model, optimizer, range(1))
        assert_buffers_cover(optimizer, model)
        if not optimizer.param_groups[0]["params"][0].requires_grad:  # all were given
            assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        report = optimizer.memory_report()
        head = model.base_model.model.lm_head.modules_to_save["default"].weight
        assert 4 * head.numel() <= report["main_param"] < 4 * (head.numel() + 1024)  # fp32 adapters are their own


def test_accelerates_loop_trains_a_peft_model_as_the_plain_loop():
    accelerate_cases.forget_accelerators()
    model, twin = make_model(), make_model()
    accelerator = accelerate_cases.make_accelerator(gradient_accumulation_steps=1)
    prepared, ours = prepare(accelerator, model, adamw(trainable(model).values()), max_grad_norm=MAX_NORM)
    assert prepared is model
    assert ours.param_groups[0]["param_names"] == list(trainable(model))
    plain = FusedMainGradOptimizer(adamw(trainable(twin).values()), max_grad_norm=MAX_NORM)
    start = snapshot(model)
    for number in range(4):
        accelerator.backward(loss_of(prepared, number))
        ours.step()
        ours.zero_grad()
        loss_of(twin, number).backward()
        plain.step()
        plain.zero_grad()
    assert_equal_parameters(model, twin)
    assert_only_trainable_moved(model, start)
    accelerate_cases.forget_accelerators()


# -- saving and merging


def test_saving_writes_the_adapter_and_no_byte_more_and_loads_on_a_fresh_base(tmp_path):
    model, bare = make_model(), make_model()
    optimizer = FusedMainGradOptimizer(adamw(trainable(model).values()))
    train(model, optimizer, range(3))
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), bare.parameters(), strict=True):
            theirs.copy_(ours)
    model.save_pretrained(tmp_path / "ours")
    bare.save_pretrained(tmp_path / "bare")
    name = "adapter_model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "bare" / name).read_bytes()
    saved = load_file(tmp_path / "ours" / name)
    assert len(saved) == NUM_ADAPTED + 1
    assert {tensor.numel() for tensor in saved.values()} == {p.numel() for p in trainable(model).values()}
    assert not any("main" in key for key in saved)

    loaded = PeftModel.from_pretrained(make_base(), tmp_path / "ours", is_trainable=True)
    assert_equal_parameters(loaded, model)


def test_a_resumed_adapter_run_is_bit_equal(tmp_path):
    model = make_model()
    optimizer = FusedMainGradOptimizer(with_an_empty_group(list(trainable(model).values())))
    train(model, optimizer, range(3))
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    resumed = PeftModel.from_pretrained(make_base(), tmp_path, is_trainable=True)
    resumed.train()
    resumed_optimizer = FusedMainGradOptimizer(with_an_empty_group(list(trainable(resumed).values())))
    resumed_optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    start = snapshot(model)
    train(model, optimizer, range(3, 6))
    train(resumed, resumed_optimizer, range(3, 6))
    assert_equal_parameters(resumed, model)
    assert_only_trainable_moved(model, start)


def test_merge_and_unload_gives_the_base_with_the_reference_weights_and_leaves_nothing_of_ours():
    model, twin = make_model(), make_model()
    optimizer = FusedMainGradOptimizer(adamw(trainable(model).values()))
    reference = Reference(twin, lambda groups: adamw(groups[0]), groups=[trainable(twin).values()])
    train(model, optimizer, range(3))
    train_reference(reference, range(3))
    query = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = query.detach().clone()
    merged, needed = model.merge_and_unload(), twin.merge_and_unload()
    assert merged.model.layers[0].self_attn.q_proj.weight is query
    assert not torch.equal(query, before)
    assert_equal_parameters(merged, needed)
    optimizer.unwrap()
    del optimizer
    gc.collect()
    for name, param in merged.named_parameters():
        assert vars(param) == {}, name
        assert not param._post_accumulate_grad_hooks, name
    tokens = torch.arange(LENGTH)[None]
    assert torch.equal(merged(tokens).logits, needed(tokens).logits)


# -- adapters that are switched or added


def add_other(model):
    torch.manual_seed(2)
    model.add_adapter("other", lora(saves_head=False))
    model.set_adapter("other")
    return {name: param for name, param in model.named_parameters() if ".other." in name}


def test_an_adapter_added_later_trains_as_the_reference_after_add_param_group():
    model, twin = make_model(saves_head=False), make_model(saves_head=False)
    optimizer = FusedMainGradOptimizer(adamw(trainable(model).values()))
    reference = Reference(twin, lambda groups: adamw(groups[0]), groups=[trainable(twin).values()])
    train(model, optimizer, range(2))
    train_reference(reference, range(2))

    added, twins = add_other(model), list(add_other(twin).values())
    assert list(added) == list(trainable(model))
    assert len(added) == NUM_ADAPTED
    optimizer.add_param_group({"params": list(added.values()), "lr": 0.05})
    mains = [nn.Parameter(p.detach().clone()) for p in twins]
    reference.optimizer.add_param_group({"params": mains, "lr": 0.05})
    reference.mains.update(zip(twins, mains, strict=True))
    reference.params = twins
    start = snapshot(model)
    train(model, optimizer, range(2, 6))
    train_reference(reference, range(2, 6))
    assert_equal_parameters(model, twin)
    assert_only_trainable_moved(model, start)


def test_a_switch_to_an_adapter_that_was_frozen_in_the_group_says_what_to_do_and_then_trains():
    model, twin = make_model(saves_head=False), make_model(saves_head=False)
    optimizers = []
    for each, wrap in ((model, FusedMainGradOptimizer), (twin, lambda inner: inner)):  # fp32: the bare one is right
        torch.manual_seed(2)
        each.add_adapter("other", lora(saves_head=False))
        optimizers.append(wrap(adamw(each.named_parameters())))
        train(each, optimizers[-1], range(2))
        each.set_adapter("other")
    with pytest.raises(RuntimeError, match=r"lora_[AB]\.other\.weight.*zero_grad\(\)"):
        loss_of(model, 0).backward()
    model.zero_grad()
    for round_number, name in enumerate(("other", "default", "other")):
        start = snapshot(model)
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            each.set_adapter(name)
            optimizer.zero_grad()
            train(each, optimizer, range(2 + 2 * round_number, 4 + 2 * round_number))
        assert_equal_parameters(model, twin)
        assert_only_trainable_moved(model, start)


# -- fused layers and recomputation


def test_convert_linears_takes_adapters_and_the_saved_module_and_says_that_the_base_is_frozen():
    model = make_model()
    report = fusedopt.convert_linears(model)
    assert set(report.converted) == {name.removesuffix(".weight") for name in trainable(model)}
    assert len(report.converted) == NUM_ADAPTED + 1
    assert set(report.skipped.values()) == {"has a frozen weight"}
    assert len(report.skipped) == 2 * 7 + 1  # seven linear layers in each of two, and the head under the saved one
    assert sorted(fusedopt.restore_linears(model)) == sorted(report.converted)


@pytest.mark.parametrize("saves_head", [False, True], ids=["adapters only", "a bf16 head as well"])
def test_fused_adapters_train_bit_equal_to_plain_ones_window_by_window(saves_head):
    """A gradient goes straight into main_grad: where that is zero the sum is the product, bit for bit."""
    models = [make_model(saves_head) for _ in range(2)]
    start = snapshot(models[0])
    report = fusedopt.convert_linears(models[0], exclude="*.lm_head.*" if saves_head else None)
    assert len(report.converted) == NUM_ADAPTED
    optimizers = [FusedMainGradOptimizer(adamw(trainable(model).values())) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        for number in range(4):  # windows of one micro-batch
            loss_of(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_equal_parameters(*models)
    assert_only_trainable_moved(models[0], start)


def recomputing(model, kind):
    if kind == "kept":
        return model
    if kind.startswith("fusedopt"):
        applied = fusedopt.recompute.apply(model, use_reentrant=kind.endswith("reentrant"))
        assert len(applied) == 2
        return model
    model.enable_input_require_grads()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": kind.endswith("reentrant")})
    assert model.base_model.model.model.layers[0].gradient_checkpointing
    return model


KINDS = ("transformers", "transformers reentrant", "fusedopt", "fusedopt reentrant")


@pytest.mark.parametrize("is_fused", [False, True], ids=["plain", "fused layers"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_over_a_frozen_base_changes_no_bit(kind, is_fused):
    models = [recomputing(make_model(), each) for each in ("kept", kind)]
    start = snapshot(models[0])
    num_forwards = []
    layer = models[1].base_model.model.model.layers[1].mlp
    layer.register_forward_pre_hook(lambda *_: num_forwards.append(1))  # a recomputation may stop inside
    for model in models:
        if is_fused:
            assert fusedopt.convert_linears(model).converted
        train(model, FusedMainGradOptimizer(adamw(trainable(model).values())), range(3))
    assert len(num_forwards) == 2 * 6  # each of six micro-batches twice
    assert_equal_parameters(*models)
    assert_only_trainable_moved(models[0], start)


# -- quantised weights


class Params4bit(nn.Parameter):
    """What bitsandbytes makes of a weight, as far as it exists without a GPU: packed bytes and a ``quant_state``.

    Packed into uint8 it cannot require a gradient, torch says so itself. With ``bnb_4bit_quant_storage=bfloat16``, as
    QLoRA under FSDP wants it, the same bytes pose as a bf16 parameter, and can.
    """

    def __new__(cls, packed, requires_grad=False):
        made = super().__new__(cls, packed, requires_grad)
        made.quant_state = {"quant_type": "nf4"}
        return made


class Linear4bit(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.detach().view(torch.uint8)[:, : self.in_features].to(x.dtype) / 256)


def quantise(model, storage, requires_grad=False):
    """Put packed weights under every adapted query projection."""
    for layer in model.base_model.model.model.layers:
        base = layer.self_attn.q_proj.base_layer
        packed = torch.randint(0, 255, (32, 64), dtype=torch.uint8).view(storage)
        base.weight, base.__class__ = Params4bit(packed, requires_grad), Linear4bit
    return model


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=["uint8", "bf16 storage"])
def test_adapters_train_over_a_frozen_quantised_base(storage):
    model = quantise(make_model(saves_head=False), storage)
    start = snapshot(model)
    optimizer = FusedMainGradOptimizer(adamw(model.parameters()))
    report = fusedopt.convert_linears(model)
    assert len(report.converted) == NUM_ADAPTED
    assert sum("Linear4bit" in reason for reason in report.skipped.values()) == 2
    train(model, optimizer, range(3))
    assert_buffers_cover(optimizer, model)
    assert_only_trainable_moved(model, start)


def test_a_trainable_quantised_weight_is_refused_with_the_remedy():
    model = quantise(make_model(saves_head=False), torch.bfloat16, requires_grad=True)
    remedy = r"q_proj\.base_layer\.weight is trainable and quantised \(Params4bit\).*Freeze it"
    with pytest.raises(TypeError, match=remedy):
        FusedMainGradOptimizer(adamw(model.named_parameters()))
    accelerate_cases.forget_accelerators()
    with pytest.raises(TypeError, match=remedy):
        prepare(accelerate_cases.make_accelerator(), model, adamw(model.parameters()))
    accelerate_cases.forget_accelerators()
    assert not any(hasattr(param, "main_grad") for param in model.parameters())


def test_uint8_cannot_be_made_trainable_in_the_first_place():
    with pytest.raises(RuntimeError, match="floating point"):
        Params4bit(torch.zeros(4, dtype=torch.uint8), requires_grad=True)
