"""`recompute.apply` on transformers' LLaMA: equal bits, counted forwards, both checkpoints."""

import copy
import itertools

import pytest
import torch
from torch import nn

import fusedopt
from fusedopt import recompute
from tests.models import tiny_llama

LAYERS = 3


def llama(attention="sdpa", dropout=0.2, dtype=torch.bfloat16, tie=False):
    settings = {"attn_implementation": attention, "attention_dropout": dropout, "tie_word_embeddings": tie}
    return tiny_llama(dtype, num_hidden_layers=LAYERS, vocab_size=64, **settings).train()


def count_calls(model):
    """Return counters of the forwards of each layer's q_proj, gate_proj, and attention core."""
    counts = {"q_proj": [0] * LAYERS, "gate_proj": [0] * LAYERS, "core": 0}
    for i, layer in enumerate(model.model.layers):
        for name, module in (("q_proj", layer.self_attn.q_proj), ("gate_proj", layer.mlp.gate_proj)):
            module.register_forward_hook(lambda *_, n=name, i=i: counts[n].__setitem__(i, counts[n][i] + 1))
    return counts


def train(granularity=None, use_reentrant=False, skip=(), fused=False, attention="sdpa", autocast=False, **settings):
    """Train for three windows of two micro-batches; return losses, norms, parameters, and the counts of forwards."""
    model = llama(attention, dtype=torch.float32 if autocast else torch.bfloat16, **settings)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), max_grad_norm=1.0)
    if fused:
        assert len(fusedopt.convert_linears(model).converted) >= 7 * LAYERS
    applied = recompute.apply(model, granularity, use_reentrant, skip) if granularity else []
    counts = count_calls(model)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        for _ in range(2):
            ids = torch.randint(0, 64, (2, 16))
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        assert all(p.grad is p.main_grad for p in model.parameters())
        optimizer.step()
        losses.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return torch.stack(losses), [p.detach().clone() for p in model.parameters()], counts, applied


def assert_same(got, want):
    assert torch.isfinite(want[0]).all()
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1], want[1], strict=True):
        assert torch.isfinite(b).all()
        assert torch.equal(a, b)


MICRO_BATCHES = 6


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("granularity", recompute.GRANULARITIES)
def test_results_are_bit_equal_with_dropout_and_forwards_are_counted(granularity, use_reentrant, attention, fused):
    want = train(fused=fused, attention=attention)
    assert want[2]["q_proj"] == [MICRO_BATCHES] * LAYERS
    got = train(granularity, use_reentrant, skip=[1], fused=fused, attention=attention)
    assert_same(got, want)
    twice = [2 * MICRO_BATCHES, MICRO_BATCHES, 2 * MICRO_BATCHES]
    once = [MICRO_BATCHES] * LAYERS
    assert got[2]["q_proj"] == (once if granularity == "core_attn" else twice)
    assert got[2]["gate_proj"] == (twice if granularity == "full" else once)
    suffix = "" if granularity == "full" else ".self_attn"
    assert got[3] == [f"model.layers.0{suffix}", f"model.layers.2{suffix}"]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("granularity", recompute.GRANULARITIES)
@pytest.mark.parametrize("case", ["autocast", "tied"])
def test_autocast_is_restored_and_tied_weights_are_right(case, granularity, use_reentrant):
    settings = {"autocast": True} if case == "autocast" else {"tie": True}
    assert_same(train(granularity, use_reentrant, fused=True, **settings), train(fused=True, **settings))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_the_core_really_is_recomputed(use_reentrant, monkeypatch):
    from transformers.models.llama import modeling_llama

    model = llama("eager", dropout=0.0)
    calls = []
    stock = modeling_llama.eager_attention_forward
    monkeypatch.setattr(
        modeling_llama,
        "eager_attention_forward",
        lambda *a, **k: calls.append(torch.is_grad_enabled()) or stock(*a, **k),
    )
    recompute.apply(model, "core_attn", use_reentrant)
    ids = torch.randint(0, 64, (1, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(calls) == 2 * LAYERS
    calls.clear()
    model.eval()
    model(input_ids=ids, labels=ids).loss.backward()
    assert len(calls) == LAYERS


def saved_nbytes(model, ids):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        model(input_ids=ids, labels=ids)
    return sum(saved)


def test_activations_are_dropped():
    peaks = {}
    ids = torch.randint(0, 64, (2, 64))
    for granularity in (None, *recompute.GRANULARITIES):
        model = llama("eager", dropout=0.0)
        if granularity:
            recompute.apply(model, granularity)
        peaks[granularity] = saved_nbytes(model, ids)
    assert peaks["full"] < peaks["full_attn"] < peaks["core_attn"] < peaks[None]


@pytest.mark.parametrize("granularity", recompute.GRANULARITIES)
def test_the_reentrant_checkpoint_keeps_gradients_where_no_input_requires_one(granularity):
    results = []
    for use_recompute in (False, True):
        model = llama(dropout=0.0)
        model.get_input_embeddings().requires_grad_(False)
        optimizer = fusedopt.FusedMainGradOptimizer(
            torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        )
        if use_recompute:
            recompute.apply(model, granularity, use_reentrant=True)
        ids = torch.arange(16).reshape(1, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is p.main_grad for p in model.parameters() if p.requires_grad)
        results.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
        optimizer.step()
    for with_, without in zip(*reversed(results), strict=True):
        assert torch.isfinite(without).all()
        assert torch.equal(with_, without)


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(recompute.GRANULARITIES, 2)))
def test_a_second_call_replaces_the_first_and_remove_undoes_it(first, second):
    model = llama(dropout=0.0)
    configs = [id(layer.self_attn.config) for layer in model.model.layers]
    recompute.apply(model, first)
    recompute.apply(model, second, use_reentrant=True)
    counts = count_calls(model)
    ids = torch.randint(0, 64, (1, 8))
    model(input_ids=ids, labels=ids).loss.backward()
    assert counts["q_proj"] == [1 if second == "core_attn" else 2] * LAYERS
    recompute.remove(model)
    assert [id(layer.self_attn.config) for layer in model.model.layers] == configs
    for module in model.modules():
        assert "forward" not in vars(module)
        assert not [name for name in vars(module) if "fusedopt" in name]


def test_a_copy_recomputes_through_its_own_parameters():
    model = llama(dropout=0.0)
    recompute.apply(model, "full")
    other = copy.deepcopy(model)
    ids = torch.randint(0, 64, (1, 8))
    other(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in other.parameters())


def test_a_cache_is_not_written_twice_and_generation_still_uses_it():
    model = llama(dropout=0.0)
    ids = torch.randint(0, 64, (1, 8))
    want = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    recompute.apply(model, "full")
    outputs = model(input_ids=ids, labels=ids, use_cache=True)
    outputs.loss.backward()
    assert outputs.loss.item() == want
    assert cache_of(outputs).get_seq_length() == 0  # 16 if forward and recomputation had both written it
    model.eval()
    with torch.no_grad():
        assert cache_of(model(input_ids=ids, use_cache=True)).get_seq_length() == 8


def cache_of(outputs):
    return outputs.cache if hasattr(outputs, "cache") else outputs.past_key_values  # the second, in older transformers


def checkpointing_on(model):
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: recompute.apply(m, "half"), "granularity='half' is unknown; use one of full, full_attn, core_attn"),
        (lambda m: recompute.apply(m, skip_layers=[1, 7]), r"skip_layers names \[7\]; the model has layers 0 to 2"),
        (lambda m: recompute.apply(nn.Linear(2, 2)), "Linear has no decoder layer with a self_attn"),
        (lambda m: (checkpointing_on(m), recompute.apply(m)), r"activation_checkpointing_disable\(\)"),
    ],
)
def test_bad_input_is_refused_before_anything_changed(call, match):
    model = llama()
    with pytest.raises(ValueError, match=match):
        call(model)
    for module in model.modules():
        assert not [name for name in vars(module) if "fusedopt" in name]
