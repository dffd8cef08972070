"""A resumed run ends in the bits of the one that went on, whoever steps, clips, counts and shards."""

import copy
import itertools

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.deep import paired
from tests.distributed.launcher import run, settle

NUM_WINDOWS = 3  # before and after

OPTIMIZERS = {
    "AdamW loop": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adam amsgrad fused": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, fused=True),
    "SGD momentum fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}
CLIPS = {"no clip": None, "clip binds": 0.01, "clip does not bind": 1e6}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Job:
    def __init__(self, make, dtype, max_grad_norm, k, shard):
        torch.manual_seed(2)
        self.model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5, bias=False)).to(dtype)
        self.k = k
        shard = {"shard": shard} if shard != "none" else {}
        self.optimizer = FusedMainGradOptimizer(
            make(self.model.parameters()), max_grad_norm=max_grad_norm, gradient_accumulation_steps=k, **shard
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: step / 4)  # starts at 0

    def train(self, windows, rank):
        dtype = self.model[0].weight.dtype
        for window, micro in itertools.product(windows, range(self.k)):
            batch = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * window + 10 * micro + rank))
            (30 * self.model(batch.to(dtype)).square().mean()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.optimizer.window_ends:
                self.scheduler.step()

    def save(self):
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "lr": self.scheduler.state_dict(),
            }
        )

    def load(self, saved):
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        self.model.load_state_dict(saved["model"])
        self.scheduler.load_state_dict(saved["lr"])

    def everything(self):
        state = self.optimizer.state_dict()["state"]
        tensors = {f"model {name}": value for name, value in self.model.state_dict().items()}
        for number, values in state.items():
            for key, value in values.items():
                ((part, tensor),) = value.items() if isinstance(value, dict) else ((None, value),)
                tensors[f"state {number} {key} {part}"] = tensor
        return copy.deepcopy(tensors)


COMBINATIONS = list(itertools.product(CLIPS, DTYPES, (1, 2), (True, False)))


def resume_each(rank, names, shard, combinations):
    """Return what differs between the run that went on and the resumed one, over all combinations."""
    differing = []
    for name, (clip, dtype, k, is_new) in itertools.product(names, combinations):
        label = f"{name}, {clip}, {dtype}, k={k}, {'new' if is_new else 'same'}"
        found = resume(rank, (OPTIMIZERS[name], DTYPES[dtype], CLIPS[clip], k, shard), is_new)
        differing += [f"{label}: {what}" for what in found]
        settle()
    return differing


def resume(rank, settings, is_new):
    job = Job(*settings)
    job.train(range(NUM_WINDOWS), rank)
    saved = job.save()
    job.train(range(NUM_WINDOWS, 2 * NUM_WINDOWS), rank)
    expected = job.everything()
    resumed = Job(*settings) if is_new else job
    resumed.load(saved)
    resumed.train(range(NUM_WINDOWS, 2 * NUM_WINDOWS), rank)
    found = resumed.everything()
    is_finite = all(bool(torch.isfinite(value).all()) for value in expected.values())
    differing = [key for key in expected if key not in found or not torch.equal(expected[key], found[key])]
    return differing if is_finite else [*differing, "not finite"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_ends_in_the_bits_of_the_one_that_went_on(name):
    assert resume_each(0, [name], "none", COMBINATIONS) == []


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
@pytest.mark.parametrize(
    "names", [[name for name in OPTIMIZERS if "AdamW" in name], ["SGD fused", "SGD momentum fused"]]
)
def test_a_run_of_two_ranks_resumes_in_the_bits_of_the_one_that_went_on(names, shard):
    # Six combinations of 24, in which each two settings meet; one process has all. The rest is for `make test-deep`.
    combinations = paired(CLIPS, DTYPES, (1, 2), (True, False))
    assert run(resume_each, 2, names, shard, combinations, reuses=True) == [[], []]
