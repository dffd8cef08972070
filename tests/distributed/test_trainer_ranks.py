"""FusedOptTrainer on two ranks is the plain fp32 loop bit for bit: every shard, checkpointing, tied or not."""

import itertools

import pytest
import torch
import trainer_cases as cases
from launcher import at, run

from fusedopt.integrations.transformers import FusedOptArguments

NUM_EXAMPLES = 40  # 20 batches, ten on each rank: windows of 4, 4 and 2
NUM_WINDOWS = 3
SHARDS = ("none", "optimizer", "gradients")
RECOMPUTE = {
    "kept": {},
    "recomputed": {"recompute": True},
    "reentrant": {"recompute": True, "recompute_use_reentrant": True},
}
MATRIX = list(itertools.product((False, True), SHARDS, RECOMPUTE))


def make_trainer(model, output_dir, flags, data=None, cls=None, **changed):
    from fusedopt.integrations.transformers import FusedOptTrainer

    args = cases.training_arguments(output_dir, **changed)
    flags = FusedOptArguments(main_grad=True, **flags)
    data = cases.make_data(NUM_EXAMPLES) if data is None else data
    datasets = {"train_dataset": data, "eval_dataset": cases.make_data(4, seed=7)}
    return cases.quiet((cls or FusedOptTrainer)(model, args, fusedopt_args=flags, **datasets))


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
    first, second = run(train_matrix, 2, tmp_path, timeout=180.0)
    assert len(first) == len(MATRIX) == 18
    for (tied, shard, recompute), found, other in zip(MATRIX, first, second, strict=True):
        assert len(found.norms) == NUM_WINDOWS, (tied, shard, recompute)
        assert max(found.norms) > cases.MAX_NORM > min(found.norms)  # it clipped, and it let pass
        needed = reference_of(tied, found.norms)
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


def train_in(folder, shard, cls=None, resume=None, **changed):
    flags = {"main_grad_shard": shard}
    trainer = make_trainer(cases.make_model(), folder, flags, cls=cls, **changed)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
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
    outcomes, _ = run(save_and_resume, 2, tmp_path, from_one_rank, timeout=240.0)

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
        saved = sorted(path.name for path in (tmp_path / f"{shard}-parts" / "checkpoint-1").glob("optimizer*"))
        assert saved == ["optimizer_part_0_of_2.pt", "optimizer_part_1_of_2.pt"]

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
