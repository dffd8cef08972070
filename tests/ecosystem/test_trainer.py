"""A Trainer over main_grad is the plain fp32 loop, bit for bit, in one process; and stays a Trainer in all else."""

import itertools

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from fusedopt import FusedLinear, FusedMainGradOptimizer
from fusedopt.integrations.transformers import FusedOptArguments, FusedOptMixin, FusedOptTrainer, optimizer_factory
from tests import trainer_cases as cases
from tests.accelerate_cases import forget_accelerators

NUM_EXAMPLES = 22  # eleven batches: windows of 4, 4 and 3
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CHECKPOINTING = {
    "kept": ({}, {}),
    "recompute": ({"recompute": True}, {}),
    "recompute reentrant": ({"recompute": True, "recompute_use_reentrant": True}, {}),
    "core_attn": ({"recompute": True, "recompute_granularity": "core_attn"}, {}),
    "the Trainer's": ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    "the Trainer's reentrant": (
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _dynamo_starts_anew():
    yield
    torch._dynamo.reset()


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a Trainer over main_grad."""

    def make_trainer(model=None, flags=None, cls=FusedOptTrainer, num_examples=NUM_EXAMPLES, callbacks=None, **changed):
        args = cases.training_arguments(tmp_path, **changed)
        model = cases.make_model() if model is None else model
        datasets = {"train_dataset": cases.make_data(num_examples), "eval_dataset": cases.make_data(4, seed=7)}
        flags = FusedOptArguments(main_grad=True, **(flags or {}))
        return cases.quiet(cls(model, args, fusedopt_args=flags, callbacks=callbacks, **datasets))

    return make_trainer


def trained(trainer):
    trainer.train()
    return cases.outcome_of(trainer)


def reference_of(norms, tied=False, dtype=torch.bfloat16, num_examples=NUM_EXAMPLES, **settings):
    model = cases.make_model(tied, dtype)
    model = cases.untied_copy(model) if tied else model
    return cases.run_reference(model, cases.make_data(num_examples), norms, tied=tied, **settings)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(("tied", "dtype"), list(itertools.product((False, True), DTYPES)))
def test_the_one_line_way_is_the_plain_loop(make, tied, dtype, checkpointing):
    flags, changed = CHECKPOINTING[checkpointing]
    model = cases.make_model(tied, DTYPES[dtype])
    found = trained(make(model, flags, **changed))
    assert len(found.norms) == 3
    assert max(found.norms) > cases.MAX_NORM  # it clipped
    needed = reference_of(found.norms, tied, DTYPES[dtype])
    cases.assert_same(found, needed)
    assert found.losses == pytest.approx(needed.losses, rel=1e-5)
    start = dict(cases.make_model(tied, DTYPES[dtype]).named_parameters())
    assert not any(torch.equal(param, start[name]) for name, param in found.params.items())


@pytest.mark.parametrize("tied", [False, True])
def test_the_factory_in_a_stock_trainer_is_the_plain_loop(tmp_path, tied):
    args, model = cases.training_arguments(tmp_path), cases.make_model(tied)
    plug = optimizer_factory(args, FusedOptArguments(main_grad=True, recompute=True))
    trainer = cases.quiet(
        Trainer(model, args, train_dataset=cases.make_data(NUM_EXAMPLES), optimizer_cls_and_kwargs=plug)
    )
    trainer.train()
    trainer.main_grad_optimizer = trainer.optimizer.optimizer
    assert isinstance(trainer.main_grad_optimizer, FusedMainGradOptimizer)
    assert trainer.main_grad_optimizer.config.max_grad_norm is None  # the Trainer clips
    found = cases.outcome_of(trainer)
    assert max(found.norms) > cases.MAX_NORM
    cases.assert_same(found, reference_of(found.norms, tied))


@pytest.mark.parametrize(
    "optim", ["sgd", "adagrad", "rmsprop", "adafactor", "schedule_free_sgd", "schedule_free_adamw"]
)
def test_any_optim_choice_is_wrapped_over_the_trainers_decay_groups(make, optim):
    trainer = make(optim=optim)
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    found = trained(trainer)
    groups = trainer.main_grad_optimizer.param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(16, cases.WEIGHT_DECAY), (5, 0.0)]
    assert all("norm" in name for name in groups[1]["param_names"])

    def make_inner(groups):
        inner = cls(groups, **kwargs)
        if hasattr(inner, "train"):
            inner.train()
        return inner

    needed = reference_of(found.norms, make=make_inner)
    cases.assert_same(found, needed)


def test_the_default_optim_is_fused_and_close_to_the_plain_loop(make):
    trainer = make(optim="adamw_torch_fused", max_grad_norm=0.0)
    found = trained(trainer)
    assert trainer.main_grad_optimizer.param_groups[0]["fused"]
    needed = reference_of(found.norms, max_norm=None)
    for name, main in needed.mains.items():
        assert torch.isfinite(found.mains[name]).all()
        # AdamW moves a weight by at most lr a step here; fused kernels round a few operations of it differently.
        limit = 64 * 2**-24 * (main.abs() + cases.LEARNING_RATE * 3)
        assert ((found.mains[name] - main).abs() <= limit).float().mean() > 0.99, name


def test_without_clipping_the_norm_is_logged_all_the_same(make):
    found = trained(make(max_grad_norm=0.0))
    assert min(found.norms) > cases.MAX_NORM / 2
    cases.assert_same(found, reference_of(found.norms, max_norm=None))


def test_fused_linear_converts_the_model_and_keeps_to_the_plain_loop_within_rounding(make):
    model = cases.make_model(dtype=torch.float32)
    found = trained(make(model, {"fused_linear": True}, max_grad_norm=0.0))
    assert type(model.lm_head) is FusedLinear
    needed = reference_of(found.norms, dtype=torch.float32, max_norm=None)
    assert found.norms == pytest.approx(needed.norms, rel=1e-4)


def test_windows_are_normalised_by_their_labels_and_not_by_batch(make):
    """A padded window in four micro-batches has the gradient of one batch; a mean of means would not."""
    in_four = trained(make(cases.make_model(dtype=torch.float32), num_examples=8, max_steps=1))
    forget_accelerators()
    changed = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    in_one = trained(make(cases.make_model(dtype=torch.float32), num_examples=8, max_steps=1, **changed))
    assert in_four.norms == pytest.approx(in_one.norms, rel=1e-5)

    model, data = cases.make_model(dtype=torch.float32), cases.make_data(8)
    for batch in (data[i : i + 2] for i in range(0, 8, 2)):
        inputs = {key: torch.stack([e[key] for e in batch]) for key in batch[0]}
        (model(**inputs).loss / 4).backward()
    wrong = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert wrong != pytest.approx(in_one.norms[0], rel=1e-2)


@pytest.mark.parametrize("flags", [{}, {"recompute": True}], ids=["kept", "recompute"])
def test_torch_compile_is_the_compiled_plain_loop(make, flags):
    trainer = make(flags=flags, torch_compile=True, torch_compile_backend="aot_eager")
    found = trained(trainer)
    assert type(trainer.model_wrapped).__name__ == "OptimizedModule"
    torch._dynamo.reset()
    model = cases.make_model().train()
    model.config.use_cache = False
    compiled = torch.compile(model, backend="aot_eager")
    needed = cases.run_reference(model, cases.make_data(NUM_EXAMPLES), found.norms, compiled=compiled)
    cases.assert_same(found, needed)


def test_schedule_free_evaluates_the_average_and_trains_on(make):
    """In evaluation the model holds the rounded average, in training the rounded iterate, as the bare optimizer's."""
    seen = []

    class Watch(TrainerCallback):
        def on_evaluate(self, args, state, control, model=None, **kwargs):
            seen.append({name: param.detach().clone() for name, param in model.named_parameters()})

    trainer = make(optim="schedule_free_adamw", eval_strategy="steps", eval_steps=1, callbacks=[Watch()])
    cls, kwargs = Trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    found = trained(trainer)
    loop = cases.ReferenceLoop(cases.make_model(), 3, make=lambda groups: cls(groups, **kwargs))
    assert len(seen) == 3
    num_differ = 0
    for window, norm, evaluated in zip(loop.windows(cases.make_data(NUM_EXAMPLES)), found.norms, seen, strict=True):
        loop.reference.optimizer.train()
        with torch.no_grad():
            for param, main in loop.reference.mains.items():
                param.copy_(main)
        loop.run_window(window, norm)
        iterate = {name: param.clone() for param, name in loop.names.items()}
        loop.reference.optimizer.eval()
        for param, main in loop.reference.mains.items():
            name = loop.names[param]
            assert torch.isfinite(main).all()
            assert torch.equal(evaluated[name], main.to(torch.bfloat16)), name
            param.data.copy_(main)
        num_differ += any(not torch.equal(evaluated[name], iterate[name]) for name in iterate)
    assert num_differ == 2  # after the first step the average is the iterate
    cases.assert_same(found, loop.outcome())


class InfGradient:
    """Make one gradient of ``param`` infinite."""

    def __init__(self, param, at_backward):
        self.left = at_backward
        param.register_hook(self)

    def __call__(self, grad):
        self.left -= 1
        return torch.full_like(grad, float("inf")) if self.left == 0 else grad


@pytest.mark.filterwarnings("ignore:.* optimizer step.* were skipped:RuntimeWarning")
def test_a_step_with_an_infinite_gradient_is_left_out_and_logged(make):
    model = cases.make_model()
    trainer = make(model)
    InfGradient(model.model.norm.weight, at_backward=6)
    found = trained(trainer)
    assert trainer.main_grad_optimizer.skipped_steps == 1
    assert found.norms[1] == float("inf")
    assert all(torch.isfinite(param).all() for param in found.params.values())
    loop = cases.ReferenceLoop(cases.make_model(), 3)
    first, _, third = loop.windows(cases.make_data(NUM_EXAMPLES))
    loop.run_window(first, found.norms[0])
    loop.step_count += 1  # the schedule goes on, the optimizer does not
    loop.run_window(third, found.norms[2])
    cases.assert_same(found, loop.outcome())


class WithScaler(FusedOptTrainer):
    """accelerate has no GradScaler on a CPU."""

    init_scale = 2.0**10

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=self.init_scale)


def test_fp16_under_a_scaler_is_the_plain_loop(make):
    found = trained(make(cases.make_model(dtype=torch.float16), cls=WithScaler))
    needed = reference_of(found.norms, dtype=torch.float16, scale=WithScaler.init_scale)
    cases.assert_same(found, needed)
    assert any(param.dtype is torch.float16 for param in found.params.values())


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_steps_that_the_scaler_skips_are_logged_as_not_measured_and_training_goes_on(make):
    class HighScaler(WithScaler):
        init_scale = 2.0**24

    trainer = make(cases.make_model(dtype=torch.float16), cls=HighScaler, num_train_epochs=6)
    found = trained(trainer)
    took = [norm == norm for norm in found.norms]
    assert not took[0]
    assert any(took)
    rates = [log["learning_rate"] for log in trainer.state.log_history if "grad_norm" in log]
    left = [len(took) - sum(took[:step]) for step in range(len(took))]  # the schedule waits with the optimizer
    assert rates == pytest.approx([cases.LEARNING_RATE * steps / len(took) for steps in left], rel=1e-12)


def test_without_main_grad_training_is_stock(tmp_path):
    outcomes = []
    for cls, kwargs in ((Trainer, {}), (FusedOptTrainer, {"fusedopt_args": FusedOptArguments(recompute=True)})):
        model, args = cases.make_model(), cases.training_arguments(tmp_path)
        trainer = cases.quiet(cls(model, args, train_dataset=cases.make_data(NUM_EXAMPLES), **kwargs))
        trainer.train()
        outcomes.append((trainer.state.log_history[:-1], dict(model.named_parameters())))
        if cls is not Trainer:
            assert trainer.main_grad_optimizer is None
            assert "forward" in vars(model.model.layers[0])  # it recomputed
    (stock_log, stock), (our_log, ours) = outcomes
    assert stock_log == our_log
    for name, param in stock.items():
        assert torch.isfinite(param).all()
        assert torch.equal(param, ours[name]), name


def test_the_mixin_goes_before_a_users_own_trainer(make):
    calls = []

    class Mine(Trainer):
        def compute_loss(self, *args, **kwargs):
            calls.append("loss")
            return super().compute_loss(*args, **kwargs)

    class Ours(FusedOptMixin, Mine):
        pass

    found = trained(make(cls=Ours))
    assert len(calls) == 11
    cases.assert_same(found, reference_of(found.norms))


def test_evaluation_comes_before_and_training_twice_over_one_wrapper(make):
    trainer = make()
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    wrapper, middle = trainer.main_grad_optimizer, trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.main_grad_optimizer is wrapper
    assert len({before, middle, trainer.evaluate()["eval_loss"]}) == 3
    assert trainer.predict(cases.make_data(2)).predictions.shape[0] == 2


def test_a_bare_optimizer_of_the_user_is_wrapped(tmp_path):
    model, args = cases.make_model(), cases.training_arguments(tmp_path)
    bare = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(bare, factor=0.5, total_iters=2)
    trainer = FusedOptTrainer(model, args, train_dataset=cases.make_data(NUM_EXAMPLES), optimizers=(bare, scheduler))
    cases.quiet(trainer).train()
    assert isinstance(trainer.main_grad_optimizer, FusedMainGradOptimizer)
    rates = [log["learning_rate"] for log in trainer.state.log_history if "grad_norm" in log]
    assert rates == [0.25, 0.25, 0.5]


def test_model_init_makes_every_run_anew(tmp_path):
    made = []

    def model_init():
        made.append(cases.make_model())
        return made[-1]

    args = cases.training_arguments(tmp_path)
    trainer = cases.quiet(
        FusedOptTrainer(args=args, model_init=model_init, train_dataset=cases.make_data(NUM_EXAMPLES))
    )
    outcomes = []
    for learning_rate in (cases.LEARNING_RATE, 0.5 * cases.LEARNING_RATE, cases.LEARNING_RATE):
        args.learning_rate = learning_rate  # as a search over hyper-parameters does
        outcomes.append(trained(trainer))
    assert len({id(model) for model in made}) == 4
    cases.assert_same(outcomes[0], outcomes[2])
    cases.assert_same(outcomes[0], reference_of(outcomes[0].norms))
    assert any(not torch.equal(p, outcomes[1].params[name]) for name, p in outcomes[0].params.items())
    assert not any(hasattr(param, "main_grad") for model in made[:-1] for param in model.parameters())


def test_auto_find_batch_size_starts_over_without_what_the_failed_run_left(make):
    class OutOfMemory(FusedOptTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if self._train_batch_size > cases.BATCH and self.state.global_step == 0:
                raise RuntimeError("CUDA out of memory.")
            return loss

    trainer = make(cls=OutOfMemory, auto_find_batch_size=True, per_device_train_batch_size=2 * cases.BATCH)
    trainer.train()
    assert trainer._train_batch_size < 2 * cases.BATCH
    assert trainer.main_grad_optimizer.skipped_steps == 0
    assert trainer.state.log_history[0]["grad_norm"] > 0


def test_released_gradients_are_the_plain_loop_without_clipping(make):
    """Accumulation, and clipping by the norm of the step, are refused before training starts."""
    changed = {"gradient_accumulation_steps": 1, "max_grad_norm": 0}
    flags = {"main_grad_release": "backward"}
    found, needed = trained(make(flags=flags, **changed)), trained(make(**changed))
    assert len(found.norms) == 11
    assert found.norms == pytest.approx(needed.norms, rel=2**-23)  # summed bucket by bucket, in fp64
    assert found.losses == needed.losses
    assert all(torch.equal(param, needed.params[name]) for name, param in found.params.items())
    for wrong in ({"gradient_accumulation_steps": 4, "max_grad_norm": 0}, {"gradient_accumulation_steps": 1}):
        with pytest.raises(ValueError, match=r"release.*(gradient_accumulation_steps|max_grad_norm)|max_grad_norm"):
            make(flags=flags, **wrong).train()
