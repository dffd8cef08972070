"""What a Trainer over main_grad cannot train is refused before training starts, with the remedy."""

import warnings

import pytest
import torch
from torch import nn
from transformers import Trainer

from fusedopt import FusedMainGradOptimizer
from fusedopt.integrations.refusals import refuse_model
from fusedopt.integrations.transformers import FusedOptArguments, FusedOptTrainer, optimizer_factory
from tests import trainer_cases as cases


@pytest.fixture
def args(tmp_path):
    return cases.training_arguments(tmp_path)


def make_trainer(args, model=None, flags=None, **kwargs):
    model = cases.make_model() if model is None else model
    flags = FusedOptArguments(main_grad=True, **(flags or {}))
    data = cases.make_data(8)
    return cases.quiet(FusedOptTrainer(model, args, train_dataset=data, fusedopt_args=flags, **kwargs))


def assert_untouched(model):
    assert not any(hasattr(param, "main_grad") for param in model.parameters())


class DistributedDataParallel(nn.Module):
    """Named as torch's, which needs a process group."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class FSDPModule:
    """Named as torch's: fully_shard makes it a base of the model's class."""


class FSDPLlama(FSDPModule, nn.Linear):
    pass


class DeepSpeedEngine(DistributedDataParallel):
    """Named as DeepSpeed's."""


WRAPPED = {
    "DDP": (lambda: DistributedDataParallel(cases.make_model()), "main_grad already holds"),
    "DataParallel": (lambda: nn.DataParallel(cases.make_model()), "whose copies of the model have no main_grad"),
    "FSDP2": (lambda: FSDPLlama(2, 2), "fully_shard"),
    "FSDP2 inside": (lambda: nn.Sequential(nn.Linear(2, 2), FSDPLlama(2, 2)), "module 1 of the model"),
    "DeepSpeed": (lambda: DeepSpeedEngine(cases.make_model()), "a DeepSpeed engine"),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_wrapped_model_is_refused(args, wrapped):
    make, problem = WRAPPED[wrapped]
    model = make()
    with pytest.raises(TypeError, match=problem) as caught:
        make_trainer(args, model)
    assert "Give the bare module" in str(caught.value)
    assert_untouched(model)


def test_torchs_own_wrappers_have_the_names_that_are_looked_for():
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    assert nn.parallel.DistributedDataParallel.__name__ == "DistributedDataParallel"
    assert (FSDPModule.__name__, FullyShardedDataParallel.__name__) == ("FSDPModule", "FullyShardedDataParallel")
    refuse_model(cases.make_model())


@pytest.mark.parametrize(
    ("settings", "problems"),
    [
        ({"deepspeed": "ds.json"}, ["--main_grad_shard optimizer is ZeRO-1"]),
        ({"fsdp": ["full_shard"]}, ["Drop --fsdp"]),
        ({"parallelism_config": object()}, ["drop it"]),
        ({"_n_gpu": 2}, ["torchrun --nproc-per-node"]),
        ({"deepspeed": "ds.json", "fsdp": ["full_shard"]}, ["deepspeed:", "fsdp:"]),
    ],
)
def test_training_arguments_that_give_gradients_away_are_refused_all_at_once(args, settings, problems):
    vars(args).update(settings)
    for make in (optimizer_factory, make_trainer):
        with pytest.raises(ValueError, match="cannot train under these TrainingArguments") as caught:
            make(args)
        assert all(problem in str(caught.value) for problem in problems)


def test_ranks_that_the_trainer_takes_for_single_processes_are_refused(args, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it; on a CPU without use_cpu, accelerate looks away
    assert args.world_size == 1
    for make in (optimizer_factory, make_trainer):
        with pytest.raises(ValueError, match="torchrun started 2 ranks") as caught:
            make(args)
        assert "--use_cpu" in str(caught.value)


@pytest.mark.parametrize("plugin", ["is_fsdp_enabled", "is_deepspeed_enabled"])
def test_what_accelerate_was_configured_for_is_refused(args, plugin):
    class Configured(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            setattr(self, plugin, True)

    from fusedopt.integrations.transformers import FusedOptMixin

    cls = type("Mine", (FusedOptMixin, Configured), {})
    with pytest.raises(ValueError, match="Start with torchrun"):
        cls(cases.make_model(), args)


@pytest.mark.parametrize(
    ("optim", "reason"),
    [
        ("adamw_bnb_8bit", "8-bit state"),
        ("paged_lion_8bit", "8-bit state"),
        ("adamw_torch_4bit", "4-bit state"),
        ("lomo", "inside backward"),
        ("adalomo", "inside backward"),
        ("galore_adamw_layerwise", "inside backward"),
    ],
)
def test_an_optim_that_cannot_be_wrapped_is_refused_before_its_library_is_asked_for(tmp_path, optim, reason):
    args = cases.training_arguments(tmp_path, optim=optim, optim_target_modules="all-linear")
    for make in (make_trainer, optimizer_factory):
        with pytest.raises(ValueError, match=f"optim='{optim}' cannot be wrapped") as caught:
            make(args)
        assert reason in str(caught.value)
        assert "adafactor" in str(caught.value)


def test_every_optim_of_transformers_that_updates_in_backward_or_in_few_bits_is_known():
    from transformers.training_args import OptimizerNames

    from fusedopt.integrations.refusals import refuse_optim

    refused = []
    for name in OptimizerNames:
        try:
            refuse_optim(name.value)
        except ValueError:
            refused.append(name.value)
    assert {"adamw_torch_8bit", "adamw_torch_4bit", "lomo", "apollo_adamw_layerwise"} <= set(refused)
    assert not {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "schedule_free_adamw", "lion_32bit"} & set(
        refused
    )


class Params4bit(nn.Parameter):
    """Named as bitsandbytes'."""


def test_trainable_quantised_weights_are_refused_and_frozen_ones_are_not(args):
    model = cases.make_model()
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = Params4bit(layer.weight.detach(), requires_grad=True)
    with pytest.raises(TypeError, match=r"layers\.0\.mlp\.up_proj\.weight is trainable and quantised") as caught:
        make_trainer(args, model)
    assert "train adapters" in str(caught.value)
    layer.weight.requires_grad_(False)
    make_trainer(args, model).train()


def test_a_dtensor_is_refused():
    model = nn.Linear(2, 2)
    model.weight.device_mesh = object()
    with pytest.raises(TypeError, match="weight is a DTensor"):
        refuse_model(model)


def test_mismatches_of_file_flags_and_training_arguments_are_told_at_once(tmp_path, args):
    path = tmp_path / "settings.json"
    path.write_text('{"gradient_accumulation_steps": 2, "max_grad_norm": 3.0, "gradient_average": false}')
    args.gradient_checkpointing = True
    for make in (lambda flags: make_trainer(args, flags=flags), lambda flags: _factory(args, flags)):
        with pytest.raises(ValueError, match="cannot be built") as caught:
            make({"main_grad_config": str(path), "recompute": True})
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == 4
        for problem in ("accumulation_steps=2", "max_grad_norm=3.0", "gradient_average=False", "recompute twice"):
            assert any(problem in line for line in lines), problem


def _factory(args, flags):
    optimizer_factory(args, FusedOptArguments(main_grad=True, **flags))


@pytest.mark.parametrize("word", ["true", "yes", 1, True, "auto"])
def test_what_the_trainer_does_anyway_may_be_said(tmp_path, args, word):
    import json

    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"gradient_average": word, "gradient_accumulation_steps": cases.GA}))
    make_trainer(args, flags={"main_grad_config": str(path)})


def test_a_model_init_that_returns_the_same_model_is_refused_at_the_second_run(args):
    model = cases.make_model()
    trainer = FusedOptTrainer(args=args, model_init=lambda: model, train_dataset=cases.make_data(8))
    cases.quiet(trainer).train()
    with pytest.raises(RuntimeError, match="Build a new model on each call"):
        trainer.train()


def same_head(model):
    head = nn.Linear(32, cases.VOCABULARY, bias=False, dtype=torch.bfloat16)
    head.load_state_dict(model.lm_head.state_dict())
    return head


CHANGES = {
    "resized": (
        lambda model: model.resize_token_embeddings(70),
        r"embed_tokens\.weight was replaced or resized, \(61,",
    ),
    "replaced": (lambda model: setattr(model, "lm_head", same_head(model)), r"lm_head\.weight was replaced or resized"),
    "added": (lambda model: model.add_module("extra", nn.Linear(2, 2)), r"extra\.weight was added"),
    "unfrozen": (lambda model: model.model.norm.weight.requires_grad_(True), r"norm\.weight was frozen"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_changed_since_wrapping_is_refused_and_the_remedy_works(args, change):
    edit, problem = CHANGES[change]
    model = cases.make_model()
    model.model.norm.weight.requires_grad_(False)
    trainer = make_trainer(args, model)
    trainer.train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        edit(model)
    with pytest.raises(RuntimeError, match=problem) as caught:
        trainer.train()
    assert "trainer.optimizer and trainer.lr_scheduler to None" in str(caught.value)

    trainer.optimizer = trainer.lr_scheduler = None
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    trainer.train()
    held = {id(param) for group in trainer.main_grad_optimizer.param_groups for param in group["params"]}
    for name, param in model.named_parameters():
        assert param.requires_grad is False or id(param) in held, name
        if not name.startswith("extra"):  # which no forward uses
            assert torch.isfinite(param).all()
            assert torch.equal(param, before[name]) is not param.requires_grad, name


def test_embeddings_may_be_resized_before_training(args):
    model = cases.make_model()
    trainer = make_trainer(args, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.resize_token_embeddings(70)
    trainer.train()
    assert model.get_input_embeddings().weight.main_grad.shape[0] == 70


def test_a_wrapped_optimizer_is_refused(args):
    model = cases.make_model()
    wrapped = FusedMainGradOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    trainer = make_trainer(args, model, optimizers=(wrapped, None))
    with pytest.raises(RuntimeError, match="give it the bare optimizer"):
        trainer.train()


def test_the_factory_needs_one_process(args):
    args.__dict__["distributed_state"] = type("Two", (), {"num_processes": 2, "process_index": 0})()
    assert args.world_size == 2
    with pytest.raises(ValueError, match="Use FusedOptTrainer"):
        optimizer_factory(args)
    optimizer_factory(args, FusedOptArguments())  # stock


def test_fused_linear_without_a_linear_layer_is_refused_before_the_first_step(args):
    class Bigram(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(cases.VOCABULARY, cases.VOCABULARY)

        def forward(self, input_ids, labels):
            return {
                "loss": nn.functional.cross_entropy(
                    self.table(input_ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
                )
            }

    model = Bigram()
    trainer = make_trainer(args, model, flags={"fused_linear": True})
    with pytest.raises(ValueError, match="Bigram has no linear layer to fuse"):
        trainer.train()
    assert_untouched(model)
    assert trainer.state.global_step == 0
