"""What the tests of the Trainer share: a tiny LLaMA, padded data, the loop that a Trainer over main_grad must equal.

The loop is plain torch over `reference.Reference`: fp32 main parameters, fp32 sums, one clip, one schedule.
"""

from __future__ import annotations

import dataclasses
import re
import warnings

import torch
import transformers
from torch import nn
from transformers import TrainingArguments

from tests import accelerate_cases
from tests.accelerate_cases import forget_accelerators as forget_accelerators
from tests.models import tiny_llama
from tests.reference import Reference

VOCABULARY, LENGTH = 61, 12
FIRST_COUNTED = int(tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 10))
"""The first label of a row is predicted by nothing; older Trainers divide by its count all the same."""
BATCH, GA, LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 2, 4, 1e-2, 0.1, 0.9
NORM_BOUND = 1024 * 2**-24 / 2  # relative, of the wrapper's 2-norm: torch_ops.norm says why


def make_model(tied=False, dtype=torch.bfloat16, seed=0, **settings):
    return tiny_llama(dtype, seed, vocab_size=VOCABULARY, tie_word_embeddings=tied, **settings)


def make_data(num_examples, seed=1):
    """Return examples of which each has its own number of padded labels at its start."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(num_examples):
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(0, LENGTH - 2, (1,), generator=generator))] = -100
        examples.append({"input_ids": tokens, "labels": labels})
    return examples


def training_arguments(output_dir, **changed):
    settings = {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": GA,
        "num_train_epochs": 1,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_NORM,
        "optim": "adamw_torch",
        "logging_steps": 1,
        "logging_strategy": "steps",
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
        "log_level": "error",
        **changed,
    }
    return TrainingArguments(**settings)


def quiet(trainer):
    """Take off what prints every log to the screen."""
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)
    return trainer


def as_rank(rank, world_size):
    """Tell accelerate what torchrun would have, and let transformers warn."""
    accelerate_cases.as_rank(rank, world_size)
    warnings.filterwarnings("default")


@dataclasses.dataclass
class Outcome:
    """What a run ends with."""

    params: dict[str, torch.Tensor]
    mains: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]
    norms: list[float]
    losses: list[float]


def outcome_of(trainer):
    """Return how a Trainer over main_grad ended: state whole on the first rank."""
    optimizer = trainer.main_grad_optimizer
    optimizer.consolidate_state_dict(to=0)
    state_dict = optimizer.state_dict()
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    params = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    states = {names[i]: dict(state) for i, state in state_dict["state"].items()} if trainer.args.should_save else {}
    mains = {name: state.pop("main_param", params[name]) for name, state in states.items()}
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    return Outcome(params, mains, states, [log["grad_norm"] for log in logs], [log["loss"] for log in logs])


def decays(name):
    return "norm" not in name and "bias" not in name


class ReferenceLoop:
    """The loop of a Trainer with ``world_size`` ranks, in one process, one micro-batch after the other.

    Args:
        model: untied: two uses of one weight are summed in its dtype by autograd.grad, in fp32 by the wrapper.
        total_steps: of the linear schedule.
        world_size, ga: ranks, and micro-batches of each in a window.
        compiled: the model as torch.compile made it, loss included: compiled, its gradients have other last bits.
        make: the inner optimizer, from groups.
        scale: of the loss, by a GradScaler.
        every_backward: whether ranks are summed in every backward (shard="gradients"), or once a window.
    """

    def __init__(
        self,
        model,
        total_steps,
        world_size=1,
        ga=GA,
        max_norm=MAX_NORM,
        tied=False,
        compiled=None,
        make=None,
        scale=1.0,
        every_backward=False,
    ):
        self.compiled, self.scale, self.every_backward = compiled, scale, every_backward
        self.model, self.total_steps, self.world_size, self.ga = model, total_steps, world_size, ga
        self.max_norm, self.step_count = max_norm, 0
        self.tied = ("lm_head.weight", "model.embed_tokens.weight") if tied else None
        self.names = {param: name for name, param in model.named_parameters()}
        kept = [p for p, name in self.names.items() if not (tied and name == "lm_head.weight")]
        groups = [[p for p in kept if decays(self.names[p]) is flag] for flag in (True, False)]
        self.reference = Reference(model, lambda groups: (make or self._adamw)(self._with_decay(groups)), groups)
        self.norms, self.losses = [], []

    @staticmethod
    def _with_decay(groups):
        return [{"params": g, "weight_decay": d} for g, d in zip(groups, (WEIGHT_DECAY, 0.0), strict=True)]

    @staticmethod
    def _adamw(groups):
        return torch.optim.AdamW(groups, lr=LEARNING_RATE)

    def windows(self, data):
        """Yield, for one epoch, each window as one list of batches for every rank; the last may be short."""
        batches = [data[i : i + BATCH] for i in range(0, len(data), BATCH)]
        stacked = [{key: torch.stack([e[key] for e in batch]) for key in batch[0]} for batch in batches]
        per_window = self.ga * self.world_size
        for start in range(0, len(stacked), per_window):
            window = stacked[start : start + per_window]
            yield [window[rank :: self.world_size] for rank in range(self.world_size)]

    def run_window(self, window, logged_norm):
        """Take one step; clip by the norm that was logged, once it is known to be the right one."""
        num_items = sum(int((b["labels"][:, FIRST_COUNTED:] != -100).sum()) for batches in window for b in batches)
        grads, loss_sum = [], 0.0  # by rank and micro-batch
        for batches in window:
            grads.append([])
            for batch in batches:
                loss = self._loss(batch, torch.tensor(num_items)) * self.world_size
                loss_sum += loss.item() / self.world_size
                self._backward(loss * self.scale)
                grads[-1].append(dict(self.reference.sums))
                self.reference.sums.clear()
        self.losses.append(loss_sum)
        rows = zip(*grads, strict=True) if self.every_backward else grads
        total = _added([_added(row) for row in rows])
        mean = {p: grad / self.world_size / self.scale for p, grad in total.items()}
        self._clip(mean, logged_norm)
        self.reference.sums.update(mean)
        for group in self.reference.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * max(0.0, (self.total_steps - self.step_count) / self.total_steps)
        self.reference.step()
        self.step_count += 1
        if self.tied:
            head, embedding = (self.model.get_parameter(name) for name in self.tied)
            with torch.no_grad():
                head.copy_(embedding)

    def _loss(self, batch, num_items):
        if self.compiled is not None:
            return self.compiled(**batch, num_items_in_batch=num_items).loss
        logits = self.model(input_ids=batch["input_ids"]).logits.float()
        labels = batch["labels"][:, 1:].reshape(-1)
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        return nn.functional.cross_entropy(flat, labels, ignore_index=-100, reduction="sum") / num_items

    def _backward(self, loss):
        if not self.tied:
            self.reference.backward(loss)
            return
        head, embedding = (self.model.get_parameter(name) for name in self.tied)
        others = list(self.reference.params)
        *grads, head_grad = torch.autograd.grad(loss, [*others, head])
        for param, grad in zip(others, grads, strict=True):
            grad = grad.float() + head_grad.float() if param is embedding else grad.float()
            sums = self.reference.sums
            sums[param] = sums[param] + grad if param in sums else grad

    def _clip(self, grads, logged_norm):
        exact = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt().item()
        assert abs(logged_norm - exact) <= NORM_BOUND * exact, (logged_norm, exact)
        self.norms.append(exact)
        if self.max_norm:
            factor = torch.clamp(self.max_norm / (torch.tensor(logged_norm) + 1e-6), max=1.0)
            for param, grad in grads.items():
                grads[param] = grad * factor

    def outcome(self):
        reference, names = self.reference, self.names
        states = {names[p]: dict(reference.optimizer.state[main]) for p, main in reference.mains.items()}
        params = {name: p.detach() for p, name in names.items() if p in reference.mains}
        mains = {names[p]: main.detach() for p, main in reference.mains.items()}
        return Outcome(params, mains, states, self.norms, self.losses)


def _added(grads):
    total = dict(grads[0])
    for more in grads[1:]:
        total = {p: grad + more[p] for p, grad in total.items()}
    return total


def run_reference(model, data, norms, total_steps=None, epochs=1, tied=False, **settings):
    """Return what the loop ends with after ``len(norms)`` windows of ``data``, over and over."""
    loop = ReferenceLoop(model, total_steps or len(norms), tied=tied, **settings)
    windows = [window for _ in range(epochs) for window in loop.windows(data)]
    assert len(windows) >= len(norms)
    for window, norm in zip(windows, norms, strict=False):
        loop.run_window(window, norm)
    return loop.outcome()


def untied_copy(model):
    """Return an untied model with the weights of a tied one."""
    copy = make_model(tied=False, dtype=model.dtype)
    copy.load_state_dict({**model.state_dict(), "lm_head.weight": model.get_input_embeddings().weight})
    return copy


def assert_same(found, needed):
    """Compare two outcomes bit for bit."""
    for what in ("params", "mains"):
        have, want = getattr(found, what), getattr(needed, what)
        assert sorted(have) == sorted(want), what
        for name in want:
            assert torch.isfinite(want[name]).all(), (what, name)
            assert torch.isfinite(have[name]).all(), (what, name)
            assert have[name].dtype is want[name].dtype, (what, name)
            assert torch.equal(have[name], want[name]), (what, name, _difference(have[name], want[name]))
    for name, state in needed.states.items():
        assert sorted(found.states[name]) == sorted(state), name
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.isfinite(value).all(), (name, key)
                assert torch.equal(found.states[name][key], value), (name, key)
            else:
                assert found.states[name][key] == value, (name, key)


def _difference(a, b):
    return (a.double() - b.double()).abs().max().item()


def spell(problem):
    """Return a pattern that matches ``problem`` itself."""
    return re.escape(problem)
