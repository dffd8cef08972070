"""Trainer checkpoints in one process: resume bit for bit; from a stock Trainer's optimizer.pt, and back to one."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer

from fusedopt.integrations.transformers import FusedOptArguments, FusedOptTrainer, optimizer_factory
from tests import trainer_cases as cases
from tests.accelerate_cases import forget_accelerators

NUM_EXAMPLES = 22  # windows of 4, 4 and 3 batches
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
STRATEGIES = {
    "steps": EVERY_STEP,
    "epoch": {"save_strategy": "epoch", "num_train_epochs": 2},
    "best": {
        **{"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1},
        **{"load_best_model_at_end": True, "num_train_epochs": 2},
    },
}


def train(cls, folder, dtype="bf16", resume=None, trains=True, **changed):
    """Train from the first example, or go on from a checkpoint; every call with a model and Trainer of its own."""
    forget_accelerators()
    model = cases.make_model(dtype=DTYPES[dtype], seed=0 if resume is None else 9)  # a checkpoint brings its weights
    args = cases.training_arguments(folder, **changed)
    kwargs = {"fusedopt_args": FusedOptArguments(main_grad=True)} if cls is FusedOptTrainer else {}
    data = {"train_dataset": cases.make_data(NUM_EXAMPLES), "eval_dataset": cases.make_data(4, seed=7)}
    trainer = cases.quiet(cls(model, args, **data, **kwargs))
    if trains:
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


def first_checkpoint(folder):
    return min(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def assert_same_params(found, needed):
    needed = dict(needed.model.named_parameters())
    for name, param in found.model.named_parameters():
        assert torch.isfinite(param).all(), name
        assert torch.equal(param, needed[name]), (name, (param - needed[name]).abs().max())


def assert_saved_state_is_finite(checkpoint):
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    tensors = [value for item in state.values() for value in item.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > len(state)
    assert all(torch.isfinite(tensor).all() for tensor in tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resume_is_bit_exact_under_every_save_strategy(tmp_path, strategy, dtype):
    whole_run = train(FusedOptTrainer, tmp_path, dtype, **STRATEGIES[strategy])
    checkpoint = first_checkpoint(tmp_path)
    assert_saved_state_is_finite(checkpoint)
    resumed = train(FusedOptTrainer, tmp_path / "again", dtype, resume=checkpoint, **STRATEGIES[strategy])
    assert resumed.state.global_step == whole_run.state.global_step > int(checkpoint.name.partition("-")[2])
    cases.assert_same(cases.outcome_of(resumed), cases.outcome_of(whole_run))
    assert len(cases.outcome_of(whole_run).norms) == whole_run.state.global_step


@pytest.mark.parametrize("max_grad_norm", [0.01, 1e6], ids=["clip binds", "clip does not bind"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_trainers_default_optimizer_resumes_bit_exact(tmp_path, dtype, max_grad_norm):
    settings = {**EVERY_STEP, "optim": "adamw_torch_fused", "max_grad_norm": max_grad_norm}
    whole_run = train(FusedOptTrainer, tmp_path, dtype, **settings)
    resumed = train(FusedOptTrainer, tmp_path / "again", dtype, resume=first_checkpoint(tmp_path), **settings)
    cases.assert_same(cases.outcome_of(resumed), cases.outcome_of(whole_run))


def test_without_its_main_params_a_resumed_run_would_differ(tmp_path):
    """The test above can fail: a bf16 model alone does not hold what the optimizer goes on from."""
    whole_run = train(FusedOptTrainer, tmp_path, **EVERY_STEP)
    checkpoint = first_checkpoint(tmp_path)
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    for state in saved["state"].values():
        state["main_param"] = state["main_param"].bfloat16().float()
    torch.save(saved, checkpoint / "optimizer.pt")
    resumed = train(FusedOptTrainer, tmp_path / "again", resume=checkpoint)
    with pytest.raises(AssertionError, match=r"mains|params"):
        cases.assert_same(cases.outcome_of(resumed), cases.outcome_of(whole_run))


def test_schedule_free_resumes_bit_exact(tmp_path):
    changed = {**EVERY_STEP, "optim": "schedule_free_adamw", "eval_strategy": "steps", "eval_steps": 1}
    whole_run = train(FusedOptTrainer, tmp_path, **changed)
    resumed = train(FusedOptTrainer, tmp_path / "again", resume=first_checkpoint(tmp_path), **changed)
    cases.assert_same(cases.outcome_of(resumed), cases.outcome_of(whole_run))
    evaluations = [
        [log["eval_loss"] for log in t.state.log_history if "eval_loss" in log] for t in (whole_run, resumed)
    ]
    assert len(evaluations[0]) == 3
    assert evaluations[0] == evaluations[1]


def test_the_factory_in_a_stock_trainer_resumes_bit_exact(tmp_path):
    outcomes = []
    for resume in (None, tmp_path / "checkpoint-1"):
        forget_accelerators()
        args = cases.training_arguments(tmp_path if resume is None else tmp_path / "again", **EVERY_STEP)
        data = cases.make_data(NUM_EXAMPLES)
        plug = optimizer_factory(args)
        model = cases.make_model(seed=0 if resume is None else 9)
        trainer = cases.quiet(Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=plug))
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        trainer.main_grad_optimizer = trainer.optimizer.optimizer
        outcomes.append(cases.outcome_of(trainer))
    cases.assert_same(outcomes[1], outcomes[0])


def test_a_second_run_of_one_trainer_resumes_from_what_the_first_saved(tmp_path):
    trainer = train(FusedOptTrainer, tmp_path, **EVERY_STEP)
    first = cases.outcome_of(trainer)
    before = {name: param.clone() for name, param in first.mains.items()}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert trainer.state.global_step == 3
    again = cases.outcome_of(trainer)
    for name, main in before.items():
        assert torch.isfinite(main).all()
        assert torch.equal(again.mains[name], main), name


# -- stock checkpoints


def reference_from(checkpoint, dtype, norms):
    """Return the plain loop over the windows after the first, from a stock checkpoint's weights and state."""
    model = cases.make_model(dtype=DTYPES[dtype])
    weights = load_file(checkpoint / "model.safetensors")
    model.load_state_dict(weights)
    loop = cases.ReferenceLoop(model, total_steps=3)
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    mains = [main for group in loop.reference.optimizer.param_groups for main in group["params"]]
    for number, main in enumerate(mains):
        loop.reference.optimizer.state[main] = {key: value.float() for key, value in state[number].items()}
    loop.step_count = 1
    for window, norm in zip(list(loop.windows(cases.make_data(NUM_EXAMPLES)))[1:], norms, strict=True):
        loop.run_window(window, norm)
    return loop.outcome()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stock_trainers_checkpoint_is_resumed_in_full_precision_from_there_on(tmp_path, dtype):
    train(Trainer, tmp_path, dtype, **EVERY_STEP)
    checkpoint = tmp_path / "checkpoint-1"
    assert_saved_state_is_finite(checkpoint)
    resumed = train(FusedOptTrainer, tmp_path / "again", dtype, resume=checkpoint)
    found = cases.outcome_of(resumed)
    needed = reference_from(checkpoint, dtype, found.norms[1:])
    needed.norms.insert(0, None)
    cases.assert_same(found, needed)
    assert resumed.state.global_step == 3


def replace_by_stock_state(checkpoint, dtype):
    """Give the checkpoint the state dict that a bare AdamW over the model would have written for this state."""
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    del saved["fusedopt"]
    for state in saved["state"].values():
        state.pop("main_param", None)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(DTYPES[dtype])
    for group in saved["param_groups"]:
        del group["param_names"]
    torch.save(saved, checkpoint / "optimizer.pt")


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stock_trainer_resumes_from_our_checkpoint(tmp_path, dtype, optim):
    train(FusedOptTrainer, tmp_path, dtype, optim=optim, **EVERY_STEP)
    checkpoint, bare = tmp_path / "checkpoint-1", tmp_path / "bare-1"
    shutil.copytree(checkpoint, bare)
    replace_by_stock_state(bare, dtype)
    from_ours = train(Trainer, tmp_path / "a", dtype, resume=checkpoint, optim=optim)
    from_bare = train(Trainer, tmp_path / "b", dtype, resume=bare, optim=optim)
    assert from_ours.state.global_step == 3
    assert_same_params(from_ours, from_bare)
    without_state = train(Trainer, tmp_path / "c", dtype, trains=False, optim=optim)
    (bare / "optimizer.pt").unlink()
    without_state = train(Trainer, tmp_path / "c", dtype, resume=bare, optim=optim)
    with pytest.raises(AssertionError):  # the state made a difference
        assert_same_params(from_ours, without_state)


def test_a_checkpoint_that_went_through_a_stock_trainer_comes_back(tmp_path):
    """A bare AdamW keeps our main_params as state that it casts and does not update; they are not taken for ours."""
    train(FusedOptTrainer, tmp_path / "ours", **EVERY_STEP)
    train(Trainer, tmp_path / "stock", resume=tmp_path / "ours" / "checkpoint-1", **EVERY_STEP)
    checkpoint = tmp_path / "stock" / "checkpoint-2"
    saved = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"][0]
    assert saved["main_param"].dtype is torch.bfloat16
    again = train(FusedOptTrainer, tmp_path / "again", resume=checkpoint)
    found = cases.outcome_of(again)

    model = cases.make_model()
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    assert not torch.equal(model.model.embed_tokens.weight, saved["main_param"])  # stale it is
    loop = cases.ReferenceLoop(model, total_steps=3)
    state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    mains = [main for group in loop.reference.optimizer.param_groups for main in group["params"]]
    for number, main in enumerate(mains):
        own = {key: value.float() for key, value in state[number].items() if key != "main_param"}
        loop.reference.optimizer.state[main] = own
    loop.step_count = 2
    loop.run_window(list(loop.windows(cases.make_data(NUM_EXAMPLES)))[2], found.norms[2])
    cases.assert_same(found, loop.outcome())


def test_a_saved_model_has_the_bytes_of_a_stock_one(tmp_path):
    trainer = train(FusedOptTrainer, tmp_path, **EVERY_STEP)
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert sorted(saved) == sorted(trainer.model.state_dict())
    numel = sum(tensor.numel() for tensor in saved.values())
    assert (tmp_path / "checkpoint-3" / "model.safetensors").stat().st_size < 2 * numel + 8192
    for name, tensor in saved.items():
        assert torch.equal(tensor, trainer.model.state_dict()[name]), name
