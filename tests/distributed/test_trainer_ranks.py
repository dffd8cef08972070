"""FusedOptTrainer on two ranks is the plain fp32 loop bit for bit: every shard, checkpointing, tied or not."""

import pytest
import torch

from fusedopt.integrations.transformers import FusedOptArguments
from tests import trainer_cases as cases
from tests.deep import IS_DEEP, paired
from tests.distributed.launcher import at, run

NUM_EXAMPLES = 40  # 20 batches, ten on each rank: windows of 4, 4 and 2
NUM_WINDOWS = 3
SHARDS = ("none", "optimizer", "gradients")
RECOMPUTE = {
    "kept": {},
    "recomputed": {"recompute": True},
    "reentrant": {"recompute": True, "recompute_use_reentrant": True},
}
MATRIX = paired((False, True), SHARDS, RECOMPUTE)  # nine of 18, but for `make test-deep`


def make_trainer(model, output_dir, flags, data=None, cls=None, inner=None, **changed):
    from fusedopt.integrations.transformers import FusedOptTrainer

    args = cases.training_arguments(output_dir, **changed)
    flags = FusedOptArguments(main_grad=True, **flags)
    data = cases.make_data(NUM_EXAMPLES) if data is None else data
    others = {"train_dataset": data, "eval_dataset": cases.make_data(4, seed=7)}
    if inner is not None:
        others["optimizer_cls_and_kwargs"] = (inner, {"lr": cases.LEARNING_RATE})
    return cases.quiet((cls or FusedOptTrainer)(model, args, fusedopt_args=flags, **others))


def train_matrix(rank, folder):
    """Train every cell; on the first rank return how it ended, on the others only the model."""
    cases.as_rank(rank, 2)
    outcomes = []
    for tied, shard, recompute in MATRIX:
        at(f"{tied} {shard} {recompute}")
        flags = {"main_grad_shard": shard, **RECOMPUTE[recompute]}
        trainer = make_trainer(cases.make_model(tied, seed=rank), folder, flags)  # rank 0's weights count
        assert trainer.args.world_size == 2
        trainer.train()
        assert type(trainer.model_wrapped).__name__ == "LlamaForCausalLM"
        assert trainer.main_grad_optimizer.config.shard == shard
        outcomes.append(cases.outcome_of(trainer))
    return outcomes


def reference_of(tied, norms, world_size=2, data=None, **settings):
    model = cases.make_model(tied)
    model = cases.untied_copy(model) if tied else model
    data = cases.make_data(NUM_EXAMPLES) if data is None else data
    return cases.run_reference(model, data, norms, tied=tied, world_size=world_size, **settings)


def test_every_shard_and_checkpointing_is_the_plain_loop_tied_or_not(tmp_path):
    first, second = run(train_matrix, 2, tmp_path)
    assert len(first) == len(MATRIX) == (18 if IS_DEEP else 9)
    for (tied, shard, recompute), found, other in zip(MATRIX, first, second, strict=True):
        assert len(found.norms) == NUM_WINDOWS, (tied, shard, recompute)
        assert max(found.norms) > cases.MAX_NORM > min(found.norms)  # it clipped, and it let pass
        needed = reference_of(tied, found.norms, every_backward=shard == "gradients")
        cases.assert_same(found, needed)
        assert found.losses == pytest.approx(needed.losses, rel=1e-5)
        assert found.norms == other.norms
        for name, param in other.params.items():
            assert torch.equal(param, found.params[name]), (tied, shard, recompute, name)
    start = dict(cases.make_model().named_parameters())
    assert not any(torch.equal(param, start[name]) for name, param in first[0].params.items())


STRATEGIES = {
    "steps": {"save_strategy": "steps", "save_steps": 1},
    "epoch": {"save_strategy": "epoch", "num_train_epochs": 2},
    "best": {
        **{"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1},
        **{"num_train_epochs": 2},
    },
}
SAVINGS = [(shard, "steps") for shard in SHARDS] + [("gradients", "epoch"), ("optimizer", "best")]
SAVED = {"steps": ["checkpoint-1", "checkpoint-2", "checkpoint-3"], "epoch": ["checkpoint-3", "checkpoint-6"]}


def parts_trainer():
    from fusedopt.integrations.transformers import FusedOptTrainer

    class InParts(FusedOptTrainer):
        save_optimizer_whole = False

    return InParts


class OwnFormat(torch.optim.AdamW):
    """Its state dict is not torch's, so that nobody can put parts of it together."""

    def state_dict(self):
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict.get("mine", state_dict))


def train_in(folder, shard, cls=None, resume=None, inner=None, **changed):
    flags = {"main_grad_shard": shard}
    trainer = make_trainer(cases.make_model(), folder, flags, cls=cls, inner=inner, **changed)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    if inner is not None:
        return {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    return cases.outcome_of(trainer)


def save_and_resume(rank, folder, from_one_rank):
    """Save under every strategy and shard; resume each from its first checkpoint, and one that one rank saved."""
    cases.as_rank(rank, 2)
    torch.set_num_threads(1)
    outcomes = {}
    for shard, strategy in SAVINGS:
        changed = STRATEGIES[strategy]
        at(f"saving {shard} {strategy}")
        home = folder / f"{shard}-{strategy}"
        outcomes[shard, strategy, "whole run"] = train_in(home, shard, **changed)
        first = min(home.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
        at(f"resuming {shard} {strategy}")
        outcomes[shard, strategy, "resumed"] = train_in(folder / "again", shard, resume=first, **changed)
    for shard in ("optimizer", "gradients"):
        at(f"parts {shard}")
        home, changed = folder / f"{shard}-parts", STRATEGIES["steps"]
        train_in(home, shard, cls=parts_trainer(), **changed)
        outcomes[shard, "parts", "resumed"] = train_in(folder / "again", shard, resume=home / "checkpoint-1")
        at(f"from one rank {shard}")
        outcomes[shard, "from one rank"] = train_in(folder / "again", shard, resume=from_one_rank)
    at("a format of its own")
    home = folder / "own-format"
    outcomes["own format"] = train_in(home, "optimizer", inner=OwnFormat, **STRATEGIES["steps"])
    again = train_in(folder / "again", "optimizer", inner=OwnFormat, resume=home / "checkpoint-1")
    outcomes["own format", "resumed"] = again
    return outcomes


def resumed_reference(found, norms, before, after):
    """Return the loop's end, with ``(world_size, ga)`` before the first window and after it."""
    loop = cases.ReferenceLoop(cases.make_model(), NUM_WINDOWS, *before)
    data = cases.make_data(NUM_EXAMPLES)
    loop.run_window(next(iter(loop.windows(data))), norms[0])
    loop.world_size, loop.ga = after
    for window, norm in zip(list(loop.windows(data))[1:], norms[1:], strict=True):
        loop.run_window(window, norm)
    cases.assert_same(found, loop.outcome())


PARTS = ["optimizer_part_0_of_2.pt", "optimizer_part_1_of_2.pt"]


def optimizer_files(home):
    return sorted(path.name for path in (home / "checkpoint-1").glob("optimizer*"))


@pytest.fixture
def _one_process():
    cases.forget_accelerators()
    yield
    cases.forget_accelerators()


@pytest.mark.usefixtures("_one_process")
def test_checkpoints_of_every_strategy_resume_bit_for_bit_also_on_another_number_of_ranks(tmp_path):
    steps = STRATEGIES["steps"]
    alone = train_in(tmp_path / "alone", "none", gradient_accumulation_steps=8, **steps)
    cases.forget_accelerators()
    from_one_rank = tmp_path / "alone" / "checkpoint-1"
    outcomes, _ = run(save_and_resume, 2, tmp_path, from_one_rank)

    for shard, strategy in SAVINGS:
        whole_run, resumed = outcomes[shard, strategy, "whole run"], outcomes[shard, strategy, "resumed"]
        home = tmp_path / f"{shard}-{strategy}"
        saved = sorted(path.name for path in home.glob("checkpoint-*"))
        assert saved == SAVED.get(strategy, saved)
        assert saved
        assert all((home / name / "optimizer.pt").is_file() for name in saved)
        assert resumed.norms == whole_run.norms  # the log of the first steps comes with the checkpoint
        cases.assert_same(resumed, whole_run)
    for shard in ("optimizer", "gradients"):
        whole_run = outcomes[shard, "steps", "whole run"]
        cases.assert_same(outcomes[shard, "parts", "resumed"], whole_run)
        assert optimizer_files(tmp_path / f"{shard}-parts") == PARTS

        on_two = outcomes[shard, "from one rank"]
        assert on_two.norms[0] == alone.norms[0]
        resumed_reference(on_two, on_two.norms, (1, 8), (2, 4))
        cases.forget_accelerators()
        changed = {"gradient_accumulation_steps": 8}
        checkpoint = tmp_path / f"{shard}-steps" / "checkpoint-1"
        on_one = train_in(tmp_path / "again", "none", resume=checkpoint, **changed)
        assert on_one.norms[0] == whole_run.norms[0]
        resumed_reference(on_one, on_one.norms, (2, 4), (1, 8))
        cases.forget_accelerators()
        with pytest.raises(FileNotFoundError, match="Resume on as many ranks"):
            train_in(tmp_path / "again", "none", resume=tmp_path / f"{shard}-parts" / "checkpoint-1", **changed)
        cases.forget_accelerators()

    assert optimizer_files(tmp_path / "own-format") == PARTS
    plain = outcomes["optimizer", "steps", "whole run"].params
    for name, param in outcomes["own format"].items():
        assert torch.isfinite(param).all()
        assert torch.equal(param, plain[name]), name
        assert torch.equal(outcomes["own format", "resumed"][name], param), name


SCALE = 2.0**10


def scaler_trainer():
    from fusedopt.integrations.transformers import FusedOptTrainer

    class WithScaler(FusedOptTrainer):
        """accelerate has no GradScaler on a CPU."""

        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)

    return WithScaler


def train_others(rank, folder):
    """Return, by name, runs that are not in the matrix."""
    cases.as_rank(rank, 2)
    outcomes = {}
    for shard in SHARDS:
        at(f"scaler {shard}")
        model = cases.make_model(dtype=torch.float16)
        trainer = make_trainer(model, folder, {"main_grad_shard": shard}, cls=scaler_trainer())
        trainer.train()
        is_sharded = type(trainer.accelerator.scaler).__name__ == "ShardedGradScaler"
        assert is_sharded == (shard != "none")
        outcomes["scaler", shard] = cases.outcome_of(trainer)

        at(f"schedule-free {shard}")
        # Unclipped: norms of shards agree within rounding, and only then are the rest bit-equal.
        changed = {"optim": "schedule_free_adamw", "max_grad_norm": 0.0, "eval_strategy": "steps", "eval_steps": 1}
        trainer = make_trainer(cases.make_model(), folder, {"main_grad_shard": shard}, **changed)
        trainer.train()
        outcomes["schedule-free", shard] = cases.outcome_of(trainer)
        outcomes["schedule-free loss", shard] = [
            log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log
        ]

        at(f"sync_each_batch {shard}")
        changed = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
        trainer = make_trainer(cases.make_model(), folder, {"main_grad_shard": shard}, max_grad_norm=0.0, **changed)
        trainer.train()
        outcomes["sync_each_batch", shard] = cases.outcome_of(trainer)

    at("frozen weights and buffers")
    model = cases.make_model(seed=rank)
    model.model.embed_tokens.weight.requires_grad_(False)
    model.register_buffer("mine", torch.tensor([float(rank)]))
    trainer = make_trainer(model, folder, {"main_grad_shard": "gradients"})
    trainer.train()
    outcomes["frozen"] = (model.model.embed_tokens.weight.detach(), model.mine)
    return outcomes


def test_scalers_schedule_free_and_frozen_weights_on_two_ranks(tmp_path):
    first, second = run(train_others, 2, tmp_path)
    for shard in SHARDS:
        found = first["scaler", shard]
        settings = {"world_size": 2, "scale": SCALE, "every_backward": shard == "gradients"}
        model = cases.make_model(dtype=torch.float16)
        cases.assert_same(found, cases.run_reference(model, cases.make_data(NUM_EXAMPLES), found.norms, **settings))

        found = first["schedule-free", shard]
        assert len(first["schedule-free loss", shard]) == NUM_WINDOWS
        unsharded = first["schedule-free", "none"]
        assert found.norms == pytest.approx(unsharded.norms, rel=2 * cases.NORM_BOUND)
        if shard != "gradients":
            assert first["schedule-free loss", shard] == first["schedule-free loss", "none"]
            cases.assert_same(found, unsharded)
        for name, main in unsharded.mains.items():  # ranks are summed in every backward: other last bits of a gradient
            assert torch.isfinite(main).all()
            assert (found.mains[name] - main).abs().max() < cases.LEARNING_RATE / 1000, name  # of a step

        found = first["sync_each_batch", shard]
        assert found.norms == pytest.approx(reference_of(False, found.norms, max_norm=None).norms, rel=1e-5)

    embedding, buffer = second["frozen"]
    assert torch.equal(embedding, cases.make_model(seed=0).model.embed_tokens.weight)
    assert torch.equal(buffer, torch.zeros(1))


def refuse_alike(rank, folder):
    """Return the messages of what only two ranks can get wrong."""
    from transformers import Trainer

    from fusedopt.integrations.transformers import FusedOptTrainer, optimizer_factory

    cases.as_rank(rank, 2)
    args = cases.training_arguments(folder)
    messages = []
    with pytest.raises(ValueError, match="optimizer_factory under 2 ranks") as caught:
        optimizer_factory(args)
    messages.append(str(caught.value))

    model = cases.make_model()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    with pytest.raises(TypeError, match="DistributedDataParallel") as caught:
        FusedOptTrainer(wrapped, args)
    messages.append(str(caught.value))
    trainer = FusedOptTrainer(model, args, train_dataset=cases.make_data(16))
    with pytest.raises(RuntimeError, match="a live DistributedDataParallel") as caught:
        trainer.train()
    messages.append(str(caught.value))
    del wrapped, trainer

    stock = cases.quiet(Trainer(cases.make_model(), args, train_dataset=cases.make_data(16)))
    stock.train()
    return [*messages, type(stock.model_wrapped).__name__]


def test_ddp_and_the_factory_are_refused_on_all_ranks(tmp_path):
    first, second = run(refuse_alike, 2, tmp_path)
    assert first == second
    assert first[-1] == "DistributedDataParallel"  # what a stock Trainer puts around the model
