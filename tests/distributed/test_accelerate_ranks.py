"""An accelerate loop prepared by fusedopt on two ranks is the plain loop over the wrapper bit for bit, every shard."""

import contextlib
import itertools
import warnings

import pytest
import torch
from torch import nn

import fusedopt
from fusedopt.integrations.accelerate import prepare
from tests import accelerate_cases as cases
from tests.deep import IS_DEEP, paired
from tests.distributed.launcher import at, run

SHARDS = ("none", "optimizer", "gradients")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MATRIX = paired(SHARDS, DTYPES, (None, cases.MAX_NORM))  # six of 12, but for `make test-deep`


def batches_of(loop):
    return [tokens for (tokens,) in loop.loader]


def outcome(net, wrapper, epochs, num_exchanges):
    return {"state": cases.state_of(net, wrapper), "epochs": epochs, "exchanges": num_exchanges}


def loops(rank):
    """Run every cell by accelerate and without; the nets of rank 1 start elsewhere."""
    cases.as_rank(rank, 2)
    results = []
    for shard, dtype, max_norm in MATRIX:
        at(f"{shard} {dtype} {max_norm}")
        ours = cases.Prepared(DTYPES[dtype], seed=rank, wraps=max_norm is None, shard=shard)
        assert type(ours.net) is cases.Net
        assert ours.accelerator.num_processes == 2
        batches = batches_of(ours)
        with cases.counted_exchanges() as count:
            epochs = [ours.epoch(max_norm) for _ in range(2)]
        found = outcome(ours.bare_net, ours.wrapper, epochs, count[0])
        plain = cases.Plain(DTYPES[dtype], batches, num_ranks=2, shard=shard)
        with cases.counted_exchanges() as count:
            epochs = [plain.epoch(max_norm) for _ in range(2)]
        results.append((found, outcome(plain.net, plain.wrapper, epochs, count[0]), batches))
    return results


def test_every_shard_is_the_plain_loop_with_its_clip_its_schedule_and_its_messages():
    first, second = run(loops, 2)
    assert len(first) == len(MATRIX) == (12 if IS_DEEP else 6)
    for (shard, dtype, max_norm), mine, theirs in zip(MATRIX, first, second, strict=True):
        for found, needed, batches in (mine, theirs):
            cases.assert_same(found["state"], needed["state"])
            assert found["epochs"] == needed["epochs"]  # norms and rates
            assert found["exchanges"] == needed["exchanges"] > 0, shard
            assert len(batches) == 6
        cases.assert_moved(mine[0]["state"], DTYPES[dtype])
        assert not torch.equal(mine[2][0], theirs[2][0])  # each rank its own data
        for name, tensor in theirs[0]["state"].items():
            assert torch.equal(tensor, mine[0]["state"][name])
        norms = [norm for norms, _ in mine[0]["epochs"] for norm in norms]
        assert len(norms) == (0 if max_norm is None else 2 * cases.num_windows(2))
        assert all(torch.isfinite(norm) and norm > cases.MAX_NORM for norm in norms)
        rates = mine[0]["epochs"][0][1]
        assert rates == [0.02] * 3 + [0.005] * 2 + [0.00125]  # accelerate steps a schedule once for each rank


def exchanges_of_a_window(shard, with_accumulate):
    loop = cases.Prepared(torch.bfloat16, shard=shard)
    with cases.counted_exchanges() as count:
        for (tokens,) in list(loop.loader)[: cases.K]:
            with loop.accelerator.accumulate(*([loop.net] if with_accumulate else [])):
                loop.accelerator.backward(cases.loss_of(loop.net, tokens))
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    return count[0]


def messages(rank):
    cases.as_rank(rank, 2)
    return [(exchanges_of_a_window("none", True), exchanges_of_a_window("none", False))]


def test_accumulate_keeps_gradients_on_their_rank_until_the_window_ends():
    for ((with_no_sync, without),) in run(messages, 2):
        assert without == with_no_sync + cases.K - 1


# -- fp16


def windows_with_sgd(rank, shard, overlap, scale, max_norm):
    """Return the weights after two windows of two micro-batches; the losses are scaled, unless ``scale`` is None."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    torch.manual_seed(0)
    net = nn.Linear(4, 4).half()
    optimizer = fusedopt.FusedMainGradOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), shard=shard, overlap_grad_reduce=overlap
    )
    scaler = ShardedGradScaler(device="cpu", init_scale=scale or 1.0, enabled=scale is not None)
    for window in range(2):
        for micro_batch in range(2):
            batch = torch.full((2, 4), 1.0 + micro_batch + 2 * window + rank).half()
            with contextlib.nullcontext() if micro_batch else optimizer.no_sync():
                scaler.scale(net(batch).float().sum() / 256).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(max_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return net.weight.detach().clone()


def scaled_and_not(rank):
    return [
        [windows_with_sgd(rank, shard, overlap, scale, max_norm) for scale in (None, 16.0)]
        for shard, overlap, max_norm in itertools.product(SHARDS, (True, False), (None, 0.01))
    ]


def test_a_scaler_finds_all_gradients_that_travelled_and_unscales_them():
    """Under "optimizer" they were under way when scaler.unscale_() looked, and the step took them scaled."""
    torch.manual_seed(0)
    start = nn.Linear(4, 4).half().weight
    for bare, scaled in itertools.chain(*run(scaled_and_not, 2)):
        assert torch.isfinite(bare).all()
        assert not torch.equal(bare, start)
        assert torch.equal(scaled, bare)


def spoil_on(rank):
    """Make the gradients of the second window of the first rank infinite."""
    return lambda number: float("inf") if rank == 0 and number == cases.K else 1.0


def scaled_loops(rank):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    cases.as_rank(rank, 2)
    results = []
    for shard, max_norm in itertools.product(SHARDS, (None, cases.MAX_NORM)):
        at(f"{shard} {max_norm}")
        ours = cases.Prepared(torch.float16, accelerator=cases.make_accelerator(scales=True), shard=shard)
        scaler = ours.accelerator.scaler
        kind = torch.amp.GradScaler if shard == "none" else ShardedGradScaler
        assert type(scaler) is kind
        batches = batches_of(ours)
        epochs, skipped = [ours.epoch(max_norm)], [ours.accelerator.optimizer_step_was_skipped]
        epochs.append(ours.epoch(max_norm, spoil_on(rank)))
        skipped.append(ours.accelerator.optimizer_step_was_skipped)
        found = (cases.state_of(ours.bare_net, ours.wrapper), epochs, scaler.get_scale())

        scaler = kind(device="cpu", **cases.FP16)
        plain = cases.Plain(torch.float16, batches, num_ranks=2, shard=shard, scaler=scaler)
        epochs = [plain.epoch(max_norm), plain.epoch(max_norm, spoil_on(rank))]
        results.append((found, (cases.state_of(plain.net, plain.wrapper), epochs, scaler.get_scale()), skipped))
        assert ours.wrapper.skipped_steps == plain.wrapper.skipped_steps == 0  # the scaler left them out
    return results


def test_fp16_with_accelerates_scaler_is_the_plain_loop_and_all_ranks_skip_together():
    first, second = run(scaled_loops, 2)
    assert len(first) == 6
    for mine, theirs in zip(first, second, strict=True):
        for found, needed, skipped in (mine, theirs):
            cases.assert_same(found[0], needed[0])
            assert [rates for _, rates in found[1]] == [rates for _, rates in needed[1]]
            assert found[2] == needed[2] == cases.FP16["init_scale"] / 2 * 2  # grew once after two steps, and halved
            assert skipped == [False, True]
        cases.assert_moved(mine[0][0], torch.float16)
        for mine_of_epoch, theirs_of_epoch in zip(mine[0][1], theirs[0][1], strict=True):
            for ours, other in zip(mine_of_epoch[0], theirs_of_epoch[0], strict=True):
                assert torch.equal(ours, other) or not torch.isfinite(torch.stack([ours, other])).any()


# -- save_state and load_state


def save_and_go_on(rank, folder):
    """Save after an epoch and run another; resume each shard in a fresh Accelerator, and from the others' states."""
    cases.as_rank(rank, 2)
    results = {}
    for shard in SHARDS:
        at(f"saving {shard}")
        loop = cases.Prepared(torch.bfloat16, shard=shard)
        loop.epoch(cases.MAX_NORM)
        loop.accelerator.save_state(folder / shard)
        loop.accelerator.wait_for_everyone()  # save_state has no barrier at its end
        saved = cases.state_of(loop.bare_net, loop.wrapper)
        later = loop.epoch(cases.MAX_NORM)
        results[shard, "saved"], results[shard, "later"] = saved, (cases.state_of(loop.bare_net, loop.wrapper), later)
    for shard in SHARDS:
        at(f"resuming {shard}")
        loop = cases.Prepared(torch.bfloat16, seed=7, shard=shard)
        loop.accelerator.load_state(folder / shard)
        loaded = cases.state_of(loop.bare_net, loop.wrapper)
        later = loop.epoch(cases.MAX_NORM)
        results[shard, "loaded"] = loaded
        results[shard, "resumed"] = (cases.state_of(loop.bare_net, loop.wrapper), later)
        results[shard, "from others"] = [load_from(folder / name, shard) for name in (*SHARDS, "one rank")]
    return results


def load_from(folder, shard, **keywords):
    """Return what a fresh loop holds after loading, with its rate; and let it train on."""
    loop = cases.Prepared(torch.bfloat16, seed=7, shard=shard)
    loop.accelerator.load_state(folder, **keywords)
    state = cases.state_of(loop.bare_net, loop.wrapper)
    rate = loop.optimizer.param_groups[0]["lr"]
    loop.epoch()
    assert all(torch.isfinite(p).all() for p in loop.net.parameters())
    return state, rate


@pytest.fixture
def _no_accelerator_is_left():
    yield
    cases.forget_accelerators()


@pytest.mark.usefixtures("_no_accelerator_is_left")
def test_states_resume_bit_equal_in_a_fresh_process_under_other_shards_and_on_another_number_of_ranks(tmp_path):
    alone = cases.Prepared(torch.bfloat16)
    alone.epoch(cases.MAX_NORM)
    alone.accelerator.save_state(tmp_path / "one rank")
    saved_alone = cases.state_of(alone.bare_net, alone.wrapper)
    rate_alone = alone.optimizer.param_groups[0]["lr"]

    first, second = run(save_and_go_on, 2, tmp_path)
    for shard in SHARDS:
        saved = first[shard, "saved"]
        cases.assert_moved(saved, torch.bfloat16)
        for found in (first, second):
            cases.assert_same(found[shard, "loaded"], found[shard, "saved"])
            cases.assert_same(found[shard, "resumed"][0], found[shard, "later"][0])
            assert found[shard, "resumed"][1] == found[shard, "later"][1]
        assert not torch.equal(first[shard, "later"][0]["head.weight"], saved["head.weight"])
        sources = [(first[name, "saved"], 0.00125) for name in SHARDS] + [(saved_alone, rate_alone)]
        for (state, rate), (needed, needed_rate) in zip(first[shard, "from others"], sources, strict=True):
            cases.assert_same(state, needed)
            assert rate == needed_rate
        state, rate = load_from(tmp_path / shard, "none")  # two ranks saved it, one loads it
        cases.assert_same(state, saved)
        assert rate == 0.00125


# -- PEFT


def adapters(rank, folder):
    """Train LoRA adapters in every shard, by accelerate and without; save one, and load it into the others' shards."""
    from tests import peft_cases

    cases.as_rank(rank, 2)
    warnings.filterwarnings("ignore", message=peft_cases.WARNING)
    results = []
    for shard in SHARDS:
        at(shard)
        model, twin = peft_cases.make_model(), peft_cases.make_model()
        start = {name: param.detach().clone() for name, param in model.named_parameters()}
        accelerator = cases.make_accelerator(gradient_accumulation_steps=2)
        settings = {"shard": shard, "max_grad_norm": peft_cases.MAX_NORM}
        prepared, ours = prepare(accelerator, model, peft_cases.adamw(peft_cases.trainable(model).values()), **settings)
        plain = fusedopt.FusedMainGradOptimizer(peft_cases.adamw(peft_cases.trainable(twin).values()), **settings)
        for number in range(6):
            loss = peft_cases.loss_of(prepared, 2 * number + rank)
            with accelerator.accumulate(prepared):
                accelerator.backward(loss)
                ours.step()
                ours.zero_grad()
            with contextlib.nullcontext() if number % 2 else plain.no_sync():
                (peft_cases.loss_of(twin, 2 * number + rank) / 2).backward()
            if number % 2:
                plain.step()
                plain.zero_grad()
        moved = {name for name, param in model.named_parameters() if not torch.equal(param, start[name])}
        assert moved == set(peft_cases.trainable(model))
        accelerator.save_state(folder / shard)
        accelerator.wait_for_everyone()
        found = cases.state_of(model, ours.optimizer)
        accelerator.load_state(folder / SHARDS[0])
        results.append((found, cases.state_of(twin, plain), cases.state_of(model, ours.optimizer)))
    return results


def test_lora_trains_in_every_shard_as_the_plain_loop_and_loads_what_another_shard_saved(tmp_path):
    first, second = run(adapters, 2, tmp_path)
    for mine, theirs in zip(first, second, strict=True):
        for found, needed, _ in (mine, theirs):
            cases.assert_same(found, needed)
        assert sum(name.endswith("main_param") for name in mine[0]) == 1  # fp32 adapters are their own
        cases.assert_same(mine[2], first[0][0])


# -- what is refused


class OwnFormat(torch.optim.AdamW):
    """Its state dict is not torch's, so that nobody can put parts of it together."""

    def state_dict(self):
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["mine"])


def refusals(rank):
    from accelerate.utils import ProjectConfiguration
    from torch.nn.parallel import DistributedDataParallel

    cases.as_rank(rank, 2)
    texts = {}

    def raised(name, function, *args, **keywords):
        at(name)
        try:
            function(*args, **keywords)
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    for order, dtype in itertools.product((0, 1), DTYPES.values()):
        net = cases.Net(dtype)
        wrapper = fusedopt.FusedMainGradOptimizer(cases.adamw(net))
        accelerator = cases.make_accelerator()
        prepared = accelerator.prepare(*((net, wrapper) if order == 0 else (wrapper, net)))
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        loss = cases.loss_of(prepared[order], torch.arange(4))
        raised(f"plain prepare {order} {dtype}", accelerator.backward, loss)
        cases.assert_same(net.state_dict(), before)
        del prepared, accelerator, loss

    net = cases.Net(torch.bfloat16)
    held = DistributedDataParallel(net)
    raised("DDP given", prepare, cases.make_accelerator(), held, cases.adamw(net))
    del held

    for shard in SHARDS:
        loop = cases.Prepared(torch.bfloat16, shard=shard)
        loop.accelerator.backward(cases.loss_of(loop.net, torch.arange(4)))
        raised(f"a part {shard}", loop.accelerator.clip_grad_norm_, loop.net.head.parameters(), 1.0)
        stray = nn.Parameter(torch.zeros(2))
        stray.grad = torch.ones(2)
        raised(f"more {shard}", loop.accelerator.clip_grad_norm_, [*loop.net.parameters(), stray], 1.0)
        raised(f"values {shard}", loop.accelerator.clip_grad_value_, loop.net.parameters(), 1.0)
        loop.optimizer.zero_grad()
        loop.accelerator.project_configuration = ProjectConfiguration(save_on_each_node=True)
        if shard != "none":
            raised(f"each node {shard}", loop.accelerator.save_state, "nowhere")
    accelerator, net = cases.make_accelerator(), cases.Net(torch.bfloat16)
    held = prepare(accelerator, net, OwnFormat(net.parameters()), shard="optimizer")
    raised("own format", accelerator.save_state, "nowhere")
    del held
    accelerator = cases.make_accelerator(scales=True)
    accelerator.prepare(torch.optim.SGD([nn.Parameter(torch.zeros(2))]))
    net = cases.Net(torch.float16)
    raised("scaler", prepare, accelerator, net, cases.adamw(net), shard="optimizer")
    return texts


def test_what_ranks_cannot_train_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for texts in run(refusals, 2):
        plain = [text for name, text in texts.items() if name.startswith("plain")]
        assert len(plain) == 4
        for text in plain:
            assert text.startswith("RuntimeError: a live DistributedDataParallel around Net")
            assert "fusedopt.integrations.accelerate.prepare(accelerator, ...)" in text
        assert texts["DDP given"].startswith("TypeError: the model is a DistributedDataParallel")
        for shard in ("optimizer", "gradients"):
            assert "2 of the 5 parameters" in texts[f"a part {shard}"]
            assert "5 of the 5 parameters" in texts[f"more {shard}"]
            assert "1 others that have gradients" in texts[f"more {shard}"]
            assert "accelerator.clip_grad_norm_" in texts[f"values {shard}"]
            assert "save_on_each_node=False" in texts[f"each node {shard}"]
        assert "OwnFormat has a state dict in a format of its own" in texts["own format"]
        assert "Save every rank's own optimizer.state_dict()" in texts["own format"]
        assert "before accelerator.prepare" in texts["scaler"]
        assert {"a part none", "more none", "values none"}.isdisjoint(
            texts
        )  # whole gradients: accelerate's own are right
