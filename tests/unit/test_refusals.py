"""What cannot be wrapped is refused by name, with a remedy, before anything was changed."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fusedopt


def snapshot(optimizer):
    """All that wrapping touches, comparable."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return (
        [id(p) for p in params],
        [sorted(vars(p)) for p in params],
        [p.grad_dtype for p in params if p.is_leaf],
        [p.requires_grad for p in params],
        [len(p._post_accumulate_grad_hooks or ()) for p in params],
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups],
        len(optimizer.state),
    )


def refuses(optimizer, error, match, **settings):
    inners = optimizer if isinstance(optimizer, list) else [optimizer]
    before = [snapshot(inner) for inner in inners]
    with pytest.raises(error, match=match):
        fusedopt.FusedMainGradOptimizer(optimizer, **settings)
    assert [snapshot(inner) for inner in inners] == before


def good(*shape):
    return nn.Parameter(torch.randn(shape or (3,), dtype=torch.bfloat16))


def adamw(*params):
    return torch.optim.AdamW([(f"layer{i}.weight", param) for i, param in enumerate(params)], lr=1e-2)


def test_a_complex_parameter_is_refused():
    refuses(adamw(good(), nn.Parameter(torch.randn(3, dtype=torch.complex64))), TypeError, r"layer1\.weight.*complex64")


def test_a_parameter_on_the_meta_device_is_refused():
    refuses(adamw(good(), nn.Parameter(torch.empty(3, device="meta"))), ValueError, r"layer1\.weight.*meta.*to_empty")


def test_an_uninitialised_parameter_is_refused():
    lazy = nn.LazyLinear(4).weight
    optimizer = torch.optim.AdamW([("head.weight", good()), ("lazy.weight", lazy)])
    with pytest.raises(ValueError, match=r"lazy\.weight is uninitialised.*run one forward"):
        fusedopt.FusedMainGradOptimizer(optimizer)
    assert not hasattr(optimizer.param_groups[0]["params"][0], "main_grad")


def test_a_sparse_parameter_is_refused():
    sparse = nn.Parameter(torch.eye(3).to_sparse())
    refuses(torch.optim.SGD([("table", sparse), ("w", good())], lr=0.1), TypeError, r"table has layout.*to_dense")


def test_a_sparse_gradient_that_is_there_already_is_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    refuses(torch.optim.SGD(embedding.named_parameters(), lr=0.1), TypeError, r"that parameter weight has is sparse")
    assert embedding.weight.grad.is_sparse


def test_an_optimizer_that_needs_sparse_gradients_is_refused():
    refuses(torch.optim.SparseAdam([good(4, 2)]), TypeError, "SparseAdam works on sparse gradients only")


def test_a_quantised_trainable_parameter_is_refused():
    param = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))
    refuses(torch.optim.SGD([("w8", param)], lr=0.1), TypeError, r"w8 is torch\.float8_e4m3fn.*Freeze it")


def test_a_parameter_that_is_no_leaf_is_refused_without_a_warning():
    root = nn.Parameter(torch.ones(3))
    computed = root * 2
    optimizer = torch.optim.SGD([("scaled", computed)], lr=0.1, differentiable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuses(optimizer, ValueError, r"parameter scaled is not a leaf.*MulBackward0.*Parameter it was computed from")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "make",
    [lambda t: t[:4].expand(3, 4), lambda t: t.as_strided((3, 2), (1, 1)), lambda t: t.as_strided((3, 4), (3, 1))],
    ids=["expanded", "sliding", "rows that overlap"],
)
def test_a_parameter_whose_elements_overlap_is_refused(make, dtype):
    overlapping = nn.Parameter(make(torch.zeros(12, dtype=dtype)))
    refuses(adamw(good(), overlapping), ValueError, r"layer1\.weight has shape \(3, .*strides.*expand it in forward")


@pytest.mark.parametrize("make", [lambda t: t.t(), lambda t: t[:, :2], lambda t: t[::2], lambda t: t[:0]])
def test_a_view_without_overlap_is_none(make):
    optimizer = fusedopt.FusedMainGradOptimizer(adamw(nn.Parameter(make(torch.zeros(4, 6, dtype=torch.bfloat16)))))
    optimizer.unwrap()


SHARING = {
    "the same memory": lambda t: (t, t.data),
    "a part of it": lambda t: (t, t[1:, :]),
    "its transpose": lambda t: (t, t.t()),
    "columns in common": lambda t: (t[:, :3], t[:, 2:]),
    "another dtype": lambda t: (t, t.view(torch.int16).view(torch.float16)),
}


@pytest.mark.parametrize("share", SHARING.values(), ids=SHARING)
def test_two_parameters_over_one_memory_are_refused(share):
    one, other = map(nn.Parameter, share(torch.zeros(4, 4, dtype=torch.bfloat16)))
    for params in ([one, good(), other], [other, good(), one]):
        refuses(adamw(*params), ValueError, r"layer\d\.weight and layer\d\.weight are two Parameters over.*Tie them as")


def test_two_parameters_over_one_memory_are_refused_when_a_group_is_added_or_one_is_unfrozen():
    one, frozen = good(4), nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    alias = nn.Parameter(frozen.data, requires_grad=False)
    optimizer = fusedopt.FusedMainGradOptimizer(adamw(one, frozen, alias))
    with pytest.raises(ValueError, match=r"layer0\.weight and again are two Parameters over the same memory"):
        optimizer.add_param_group({"params": [("again", nn.Parameter(one.data))]})
    assert len(optimizer.param_groups) == 1
    frozen.requires_grad_(True)
    optimizer.zero_grad()  # an alias that is frozen does no harm
    alias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"layer1\.weight and layer2\.weight are two Parameters"):
        optimizer.zero_grad()


DISJOINT = {
    "parts of one flat memory": lambda t: (t.flatten()[:7].view(7), t.flatten()[7:].view(3, 3)),
    "columns": lambda t: (t[:, :1], t[:, 1:]),
    "every other element": lambda t: (t.flatten()[::2], t.flatten()[1::2]),
    "nothing": lambda t: (t, t[:0]),
}


@pytest.mark.parametrize("split", DISJOINT.values(), ids=DISJOINT)
def test_disjoint_parts_of_one_memory_train(split):
    flat = torch.zeros(4, 4, dtype=torch.bfloat16)
    one, other = map(nn.Parameter, split(flat))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([one, other], lr=1.0))
    (one.sum() * 2 + other.sum() * 3).backward()
    optimizer.step()
    assert one.eq(-2).all()
    assert other.eq(-3).all()
    assert flat.sum() == -(2 * one.numel() + 3 * other.numel())


def test_two_float32_parameters_over_one_memory_train_as_in_torch():
    ends = []
    for is_wrapped in (False, True):
        one = nn.Parameter(torch.zeros(4))
        other = nn.Parameter(one.data)
        optimizer = torch.optim.SGD([one, other], lr=1.0)
        optimizer = fusedopt.FusedMainGradOptimizer(optimizer) if is_wrapped else optimizer
        for _ in range(2):
            (one * 2 + other * 4).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(one.tolist())
        assert torch.equal(one, other)
    assert ends == [[-12.0] * 4] * 2


@pytest.mark.parametrize("part", ["whole model", "a submodule"])
def test_parameters_that_were_replaced_after_wrapping_raise_at_the_step(part):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).bfloat16()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.named_parameters(), lr=0.1))

    def train():
        model(torch.ones(2, 3).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    target, name = (model, r"0\.weight") if part == "whole model" else (model[1], r"1\.weight")
    target.load_state_dict(copy.deepcopy(target.state_dict()), assign=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"parameter {name} got no gradient.*Linear\.weight.*assign=True first"):
            train()


def test_absent_gradients_for_other_reasons_do_not_raise():
    model = nn.Linear(3, 3).bfloat16()
    ema, other = copy.deepcopy(model), nn.Linear(3, 3).bfloat16()
    bare = nn.Parameter(torch.zeros(3, 3, dtype=torch.bfloat16))
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD([*model.parameters(), bare], lr=0.1))
    optimizer.step()
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    other_optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
    other(torch.ones(1, 3).bfloat16()).sum().backward()
    for _ in range(3):
        optimizer.step()
    other_optimizer.step()
    assert ema.weight.grad is None


@pytest.mark.parametrize("convert", [fusedopt.convert_linears, fusedopt.restore_linears])
@pytest.mark.parametrize("model", [[1], [nn.Linear(2, 2)], None, nn.Linear], ids=str)
def test_what_is_no_module_is_not_converted(convert, model):
    with pytest.raises(TypeError, match=r"model is a \w+; needed is one torch\.nn\.Module"):
        convert(model)


@pytest.mark.parametrize("pattern", [1, [None], [nn.Linear(2, 2)], int], ids=str)
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(TypeError, match=r"the pattern .* needed is a module name such as"):
        fusedopt.convert_linears(nn.Linear(2, 2), include=pattern)


def test_an_optimizer_without_a_trainable_parameter_is_refused():
    frozen = good().requires_grad_(False)
    refuses(torch.optim.SGD([frozen], lr=0.1), ValueError, r"none of the 1 parameter.*requires_grad_\(True\)")


def test_wrapping_twice_is_refused():
    param = good()
    inner = adamw(param)
    optimizer = fusedopt.FusedMainGradOptimizer(inner)
    with pytest.raises(RuntimeError, match="wrap the bare optimizer, once"):
        fusedopt.FusedMainGradOptimizer(optimizer)
    with pytest.raises(RuntimeError, match=r"layer0\.weight already has a main_grad.*unwrap\(\)"):
        fusedopt.FusedMainGradOptimizer(adamw(param))
    with pytest.raises(RuntimeError, match=r"layer0\.weight already has a main_grad.*unwrap\(\)"):
        fusedopt.FusedMainGradOptimizer(inner)  # its parameters are main_params now
    param.sum().backward()
    assert param.grad is param.main_grad
    optimizer.step()


def test_wrapping_an_fp32_models_inner_optimizer_twice_is_refused():
    inner = torch.optim.AdamW([nn.Parameter(torch.randn(3))])
    _optimizer = fusedopt.FusedMainGradOptimizer(inner)
    with pytest.raises(RuntimeError, match="already has a main_grad"):
        fusedopt.FusedMainGradOptimizer(inner)


def test_a_parameter_given_to_two_inner_optimizers_is_refused():
    shared = good()
    refuses([adamw(good(), shared), torch.optim.SGD([shared], lr=0.1)], ValueError, r"given twice \(first as layer1")


def test_a_parameter_twice_in_one_group_is_refused():
    shared = good()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([shared, shared], lr=0.1)
    refuses(optimizer, ValueError, "given twice")


@pytest.mark.parametrize("not_one", [None, nn.Linear(2, 2), torch.optim.AdamW, "adamw"])
def test_what_is_no_optimizer_is_refused(not_one):
    with pytest.raises(TypeError, match=r"needed is a torch\.optim\.Optimizer instance"):
        fusedopt.FusedMainGradOptimizer(not_one)


def test_an_empty_list_of_optimizers_is_refused():
    with pytest.raises(ValueError, match="empty list"):
        fusedopt.FusedMainGradOptimizer([])


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"fused_linear": True}, ValueError, "fused_linear=True.*sees parameters and no modules"),
        ({"backend": "apex"}, RuntimeError, 'backend="apex" was asked for'),
        ({"max_grad_nrom": 1.0}, ValueError, "max_grad_nrom.*max_grad_norm"),
        ({"nonfinite": "rase"}, ValueError, "nonfinite.*raise"),
        (
            {"max_grad_norm": -1.0, "bucket_mib": 0},
            ValueError,
            r"(?s)max_grad_norm.*bucket_mib|bucket_mib.*max_grad_norm",
        ),
        ({"gradient_average": False}, ValueError, "gradient_average"),
    ],
)
def test_bad_settings_are_refused(settings, error, match):
    refuses(adamw(good()), error, match, **settings)


def test_settings_given_as_a_config_are_overridden_by_keywords_and_checked():
    config = fusedopt.MainGradConfig(max_grad_norm=1.0, nonfinite="raise")
    optimizer = fusedopt.FusedMainGradOptimizer(adamw(good()), config, max_grad_norm=2.0)
    assert (optimizer.config.max_grad_norm, optimizer.config.nonfinite) == (2.0, "raise")
    refuses(adamw(good()), ValueError, "max_grad_nrom", config=config, max_grad_nrom=1.0)


def test_settings_come_from_the_environment_below_keywords(monkeypatch):
    monkeypatch.setenv("FUSEDOPT_NONFINITE", "raise")
    monkeypatch.setenv("FUSEDOPT_MAX_GRAD_NORM", "3.0")
    optimizer = fusedopt.FusedMainGradOptimizer(adamw(good()), max_grad_norm=2.0)
    assert (optimizer.config.max_grad_norm, optimizer.config.nonfinite) == (2.0, "raise")


def test_gradient_merge_over_a_closure_driven_optimizer_is_refused():
    refuses(torch.optim.LBFGS([good()]), ValueError, "gradient_accumulation_steps=2.*inside the closure",
            gradient_accumulation_steps=2)  # fmt: skip


def test_a_missing_closure_is_refused_before_anything_moves():
    param = good()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.LBFGS([param]))
    param.sum().backward()
    before = param.detach().clone()
    with pytest.raises(RuntimeError, match=r"LBFGS.*needs a closure.*optimizer\.step\(closure\)"):
        optimizer.step()
    assert torch.equal(param.detach(), before)
    assert param.grad is param.main_grad


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parameters_of_a_live_ddp_are_refused(process_group):
    model = nn.Linear(3, 3)
    ddp = nn.parallel.DistributedDataParallel(model)
    refuses(torch.optim.SGD(model.parameters(), lr=0.1), RuntimeError, "DistributedDataParallel around Linear")
    del ddp


def test_a_ddp_made_after_wrapping_raises_at_the_first_arrival(process_group):
    model = nn.Linear(3, 3)
    _optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    ddp = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel around Linear.*the bare module"):
        ddp(torch.ones(1, 3)).sum().backward()


def test_a_process_group_without_ddp_is_no_obstacle(process_group):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    ddp = nn.parallel.DistributedDataParallel(other)
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.grad is model.weight.main_grad
    del ddp


def test_an_error_while_wrapping_leaves_the_model_as_it_was(monkeypatch):
    params = [good(), good()]
    inner = torch.optim.AdamW([{"params": params[:1]}, {"params": params[1:]}])
    before = snapshot(inner)
    add = fusedopt.optimizer.Buffers.add
    calls = []

    def out_of_memory_at_the_second_group(self, group, named, shard_by):
        calls.append(group)
        if len(calls) == 2:
            raise MemoryError("no room")
        return add(self, group, named, shard_by)

    monkeypatch.setattr(fusedopt.optimizer.Buffers, "add", out_of_memory_at_the_second_group)
    with pytest.raises(MemoryError):
        fusedopt.FusedMainGradOptimizer(inner)
    assert len(calls) == 2
    assert snapshot(inner) == before


@pytest.mark.parametrize(
    ("make_group", "error", "match"),
    [
        (
            lambda old: {"params": [old]},
            (RuntimeError, ValueError),
            r"given twice|already has a main_grad|more than one",
        ),
        (lambda old: {"params": [nn.Parameter(torch.empty(2, device="meta"))]}, ValueError, "meta"),
        (lambda old: {"params": [good()], "betas": (2.0, 3.0), "inner": 5}, ValueError, r'"inner"'),
    ],
)
def test_a_bad_group_added_later_changes_nothing(make_group, error, match):
    old = good()
    optimizer = fusedopt.FusedMainGradOptimizer(torch.optim.AdamW([old]))
    buffers, inner = optimizer._buffers, optimizer._inner
    counts = (len(optimizer.param_groups), inner.num_groups, len(buffers.entries), len(buffers.buckets))
    with pytest.raises(error, match=match):
        optimizer.add_param_group(make_group(old))
    assert counts == (len(optimizer.param_groups), inner.num_groups, len(buffers.entries), len(buffers.buckets))
    old.sum().backward()
    optimizer.step()


def test_a_group_for_several_inner_optimizers_says_which():
    first, second = good(4, 4), good()
    optimizer = fusedopt.FusedMainGradOptimizer([torch.optim.Muon([first]), torch.optim.AdamW([second])])
    with pytest.raises(ValueError, match=r'group\["inner"\] is None.*0: Muon, 1: AdamW'):
        optimizer.add_param_group({"params": [good()]})
    added = good()
    optimizer.add_param_group({"params": [added], "inner": 1})
    assert len(optimizer.param_groups) == 3
    before = added.detach().clone()
    (added.float() * 3).sum().backward()
    optimizer.step()
    assert not torch.equal(added.detach(), before)
