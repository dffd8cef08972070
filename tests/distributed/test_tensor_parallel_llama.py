"""transformers' LLaMA under torch's `parallelize_module`, two ranks of tensor parallel times two of data parallel.

One decoder layer alone, and a whole model: tied and untied, embedding and head whole on each rank or split by torch's
vocabulary-parallel plan, sequence parallel as in torch's tutorial. In fp64 against one process, in bf16 bit for bit
against the same model under torch alone.
"""

import contextlib
import warnings
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.debug import CommDebugMode

import fusedopt
from fusedopt import recompute
from tests.deep import IS_DEEP, in_turn
from tests.distributed.launcher import at, run, settle
from tests.distributed.llama_cases import CASES, batch, build, loss_of, split

WINDOWS, MICRO_BATCHES = 3, 2
MAX_NORM = 0.1
BOUND = 1e-12
"""fp64 sums in another order. Behind an element stand 2 layers of 7 products, forward and backward, each a sum of at
most 64 addends (columns, or the tokens of a window on all ranks): 2 * 2 * 7 * 64 * 2**-53 = 2e-13, of a gradient whose
norm is clipped to 0.1. AdamW makes of that at most lr / eps = 10 times as much in a weight, in each of three
windows: 6e-13. The largest found is 7e-16. The least that was broken on purpose, the global norm counting what is
replicated twice, puts weights off by 7e-5."""

SHARDS = ("none", "optimizer", "gradients")


VARIANTS = ("converted", "full", "full_attn")

# Each way of splitting with one shard and one variant in its turn, what splits sequences with every shard once more on
# the small model, and both ways of fusing a whole head; `make test-deep` has all with all.
TRAININGS = [
    (name, shard)
    for turn, (name, case) in enumerate(CASES.items())
    for shard in (SHARDS if case.is_block and case.is_sequence else in_turn(SHARDS, turn))
]
VARIATIONS = [
    (name, variant)
    for turn, name in enumerate(CASES)
    for variant in (VARIANTS[:2] if name == "untied" and not IS_DEEP else in_turn(VARIANTS, turn + 1))
]


def local(tensor):
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@contextlib.contextmanager
def counting(into):
    """Count the collectives of layers into a list; the hooks that do it warn of modules without an input gradient."""
    with warnings.catch_warnings(), CommDebugMode() as mode:
        warnings.filterwarnings("ignore", "(Full|For) backward hook", UserWarning)
        yield
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    into.append({op: count for op, count in counts.items() if op.startswith("c10d_functional.")})


def mesh_of():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def backward(model, case, step, k, mesh, into=None):
    x = batch(case, step, k, mesh["dp"].get_local_rank(), next(model.parameters()).dtype)
    with counting(into) if into is not None else contextlib.nullcontext():  # counting doubles the time
        loss = loss_of(model, case, x, mesh)
        loss.backward()
    assert torch.isfinite(loss)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def wrap(model, mesh, shard="none"):
    settings = {"max_grad_norm": MAX_NORM, "device_mesh": mesh["dp"], "shard": shard}
    return fusedopt.FusedMainGradOptimizer(adamw(model), **settings)


# -- fp64, against one process


def one_process(case):
    """Train on the data of all data-parallel ranks; return each window's norm, its clipped gradients, the weights."""
    model = build(case, torch.float64)
    optimizer = adamw(model)
    norms, grads = [], []
    for step in range(WINDOWS):
        for k in range(MICRO_BATCHES):
            for dp_rank in range(2):
                (loss_of(model, case, batch(case, step, k, dp_rank, torch.float64)) / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        grads.append([p.grad.clone() for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return norms, grads, [p.detach() for p in model.parameters()]


def differences(model, found, expected):
    """Return by name how far apart the largest elements are; all are finite."""
    found = [whole(tensor) for tensor in found]
    assert all(torch.isfinite(tensor).all() for tensor in [*found, *expected])
    names = [name for name, _ in model.named_parameters()]
    return {n: (a - b).abs().max().item() for n, a, b in zip(names, found, expected, strict=True)}


def before_step(model, case, shard):
    """See what the step is about to find: `.grad` is main_grad, placed as its parameter, norms of sequences apart."""
    for name, param in model.named_parameters() if shard != "gradients" else ():
        assert param.grad is param.main_grad, name
        assert isinstance(param.grad, DTensor) == isinstance(param, DTensor), name
        if isinstance(param, DTensor) and shard == "none":
            is_share = case.is_sequence and "norm" in name
            assert list(param.placements) == [Replicate()] or not is_share, name
            assert list(param.grad.placements) == ([Partial()] if is_share else list(param.placements)), name


def train(mesh, case, shard, reference):
    model = split(build(case, torch.float64), case, mesh)
    optimizer = wrap(model, mesh, shard)
    norms, collectives, errors = [], [], {}
    for step in range(WINDOWS):
        for k in range(MICRO_BATCHES):
            with optimizer.no_sync() if k < MICRO_BATCHES - 1 else contextlib.nullcontext():
                backward(model, case, step, k, mesh, collectives if step == WINDOWS - 1 else None)
        before_step(model, case, shard)
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
        if shard == "none":  # every rank has the mean
            errors[step] = differences(model, [p.grad for p in model.parameters()], reference[1][step])
        optimizer.zero_grad()
    errors["weights"] = differences(model, model.parameters(), reference[2])
    return norms, errors, collectives, dict(optimizer._comm.counts), len(optimizer._buffers.buckets)


def train_all(rank):
    mesh = mesh_of()
    results = {}
    for name, case in CASES.items():
        at(f"{name}: one process, and torch alone")
        settle()
        reference = one_process(case)
        stock, collectives = split(build(case, torch.float64), case, mesh), []
        backward(stock, case, 0, 0, mesh, collectives)
        results[name] = (reference[0], collectives)
        for _, shard in [pair for pair in TRAININGS if pair[0] == name]:
            at(f"{name}, {shard}")
            settle()
            results[name, shard] = train(mesh, case, shard, reference)
    return results


@pytest.fixture(scope="module")
def trained():
    """The trainings in fp64, in one launch; by rank."""
    return run(train_all, 4, reuses=True)


every_training = pytest.mark.parametrize(("name", "shard"), TRAININGS)


@every_training
def test_two_by_two_ranks_train_as_one_process(trained, name, shard):
    for results in trained:
        _, errors, *_ = results[name, shard]
        assert len(errors) == (WINDOWS + 1 if shard == "none" else 1)
        for where, by_name in errors.items():
            assert by_name, where
            assert {n: error for n, error in by_name.items() if not error <= BOUND} == {}, where


@every_training
def test_the_norm_is_that_of_one_process_and_clips(trained, name, shard):
    for results in trained:
        expected, _ = results[name]
        assert min(expected) > 2 * MAX_NORM
        assert results[name, shard][0] == pytest.approx(expected, rel=BOUND)


@every_training
def test_layers_communicate_as_under_torch_alone_and_gradients_once_a_window(trained, name, shard):
    shares = []
    for results in trained:
        _, stock = results[name]
        _, _, collectives, counts, num_buckets = results[name, shard]
        assert sum(stock[0].values()) >= 7
        assert collectives == stock * MICRO_BATCHES
        assert counts["reduce"] == WINDOWS * num_buckets * (MICRO_BATCHES if shard == "gradients" else 1)
        shares.append(counts.get("share", 0))
    # Shares of the norms are summed once a window, by the ranks that update them.
    assert max(shares) == (WINDOWS if CASES[name].is_sequence else 0)
    assert set(shares) == {max(shares)} or (shard != "none" and set(shares) == {0, WINDOWS})


# -- bf16, against torch alone


def start(case, mesh, variant=None):
    """Return a bf16 model, changed as ``variant`` says before it is split, and its optimizer."""
    model = build(case, torch.bfloat16)
    if variant == "converted":
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        assert fusedopt.convert_linears(model).converted == linears
    elif variant == "full" and not case.is_block:  # transformers' own switch, which is one of whole models
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    elif variant is not None:
        assert recompute.apply(model, variant)
    return model, wrap(split(model, case, mesh), mesh)


def alone(case, mesh):
    """Return the bf16 model for torch alone, with the same values, and untied, so that each use has its gradient."""
    stock = build(replace(case, is_tied=False), torch.bfloat16)
    stock.load_state_dict(build(case, torch.bfloat16).state_dict())
    return split(stock, replace(case, is_tied=False), mesh)


def take(stock, case):
    """Return this rank's parts of the gradients of one micro-batch, which torch rounded to bf16, and clear them."""
    grads = []
    for param in stock.parameters():
        grad, param.grad = param.grad, None
        if isinstance(grad, DTensor) and list(grad.placements) == [Replicate()]:
            grad = grad.redistribute(placements=param.placements)  # an embedding's, which torch leaves whole
        grads.append(local(grad))
    assert all(grad.dtype is torch.bfloat16 and torch.isfinite(grad).all() for grad in grads)
    if case.is_tied:  # torch would round the sum of both uses once more, fusedopt does not
        head = grads.pop()
        grads[0] = grads[0].float() + head.float()
    return grads


def differing_from(model, by_micro_batch):
    """Return by name which main_grads have other bits than the fp32 sum, and by which part of the addends' norms."""
    differing = {}
    for (name, param), grads in zip(model.named_parameters(), zip(*by_micro_batch, strict=True), strict=True):
        assert param.grad is param.main_grad, name
        found, expected = local(param.main_grad), sum(grad.float() for grad in grads)
        assert param.main_grad.dtype is found.dtype is torch.float32, name
        assert torch.isfinite(found).all(), name
        if not torch.equal(found, expected):
            differing[name] = ((found - expected).norm() / sum(grad.float().norm() for grad in grads)).item()
    return differing


def follow(stock, model):
    """Give ``stock`` the weights of ``model``; a tied one goes into both."""
    named = model.named_parameters(remove_duplicate=False)
    with torch.no_grad():
        for (name, param), other in zip(named, stock.parameters(), strict=True):
            assert torch.isfinite(local(param)).all(), name
            assert not torch.equal(local(param), local(other)), name
            other.copy_(param)


def train_in_bf16(mesh, case):
    """Train beside torch alone; return by window torch's gradients, main_grads that differ, whether bf16 sums would."""
    (model, optimizer), stock = start(case, mesh), alone(case, mesh)
    grads, differing, rounded = [], [], []
    for step in range(WINDOWS):
        grads.append([])
        for k in range(MICRO_BATCHES):
            with optimizer.no_sync():
                backward(model, case, step, k, mesh)
            backward(stock, case, step, k, mesh)
            grads[step].append(take(stock, case))
        differing.append(differing_from(model, grads[step]))
        pairs = zip(*grads[step], strict=True)
        rounded.append(any(not torch.equal((a + b).float(), a.float() + b.float()) for a, b in pairs))
        optimizer.step()  # reduces
        optimizer.zero_grad()
        follow(stock, model)
    assert optimizer.skipped_steps == 0
    return grads, differing, rounded


def vary(mesh, case, variant, grads):
    """Return which main_grads of a variant differ in either of two windows, its fused backwards, and forwards."""
    model, optimizer = start(case, mesh, variant)
    differing, forwards = {}, []
    layer = model.layer if case.is_block else model.model.layers[0]
    layer.self_attn.q_proj.register_forward_hook(lambda *_: forwards.append(1))
    apply = fusedopt.layers.linear._FusedLinear.apply
    with mock.patch.object(fusedopt.layers.linear._FusedLinear, "apply", side_effect=apply) as fused:
        for _ in range(2):  # over the same data, with the same weights
            for k in range(MICRO_BATCHES):
                with optimizer.no_sync():
                    backward(model, case, 0, k, mesh)
            differing |= differing_from(model, grads)
            optimizer.zero_grad()
    return differing, fused.call_count, len(forwards)


def compare_all(rank):
    mesh = mesh_of()
    results = {}
    for name, case in CASES.items():
        at(f"{name}, bf16")
        settle()
        grads, *results[name] = train_in_bf16(mesh, case)
        for _, variant in [pair for pair in VARIATIONS if pair[0] == name]:
            at(f"{name}, {variant}")
            settle()
            results[name, variant] = vary(mesh, case, variant, grads[0])
    return results


@pytest.fixture(scope="module")
def compared():
    """Every case in bf16, with its variants, in one launch; by rank."""
    return run(compare_all, 4, reuses=True)


@pytest.mark.parametrize("name", CASES)
def test_main_grad_is_the_fp32_sum_of_the_bf16_gradients_of_torch_alone(compared, name):
    for results in compared:
        differing, rounded = results[name]
        assert differing == [{}] * WINDOWS
        assert rounded == [True] * WINDOWS  # a bf16 sum would be caught


@pytest.mark.parametrize("name", [name for name, variant in VARIATIONS if variant == "converted"])
def test_converted_linears_that_are_split_have_the_bits_of_plain_ones(compared, name):
    case = CASES[name]
    is_head_whole = not (case.is_block or case.splits_vocabulary)
    head = {"model.embed_tokens.weight" if case.is_tied else "lm_head.weight"} if is_head_whole else set()
    for results in compared:
        differing, num_fused, num_forwards = results[name, "converted"]
        assert num_forwards == 2 * MICRO_BATCHES
        # A head that is whole is really fused: not rounded to bf16, by up to 2**-8 of each element of each gradient.
        assert num_fused == (2 * MICRO_BATCHES if is_head_whole else 0)
        assert differing.keys() == head
        assert all(0.0 < error <= 2**-8 for error in differing.values())


@pytest.mark.parametrize(("name", "variant"), [pair for pair in VARIATIONS if pair[1] != "converted"])
def test_recomputation_changes_no_bit_of_main_grad(compared, name, variant):
    for results in compared:
        differing, _, num_forwards = results[name, variant]
        assert differing == {}
        assert num_forwards == 2 * (2 * MICRO_BATCHES)  # layers did run a second time
