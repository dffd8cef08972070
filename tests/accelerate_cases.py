"""What the tests of accelerate share: a small net with frozen weights and a buffer, and two loops over it.

`Prepared` is the loop of a script that calls `fusedopt.integrations.accelerate.prepare`; `Plain` is the same loop over
the wrapper alone, without accelerate, on the same ranks and the same batches.
"""

from __future__ import annotations

import contextlib
import math
import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import fusedopt
from fusedopt.integrations.accelerate import prepare
from fusedopt.sharding import channel as channel_module

K, BATCH, NUM_EXAMPLES, MAX_NORM = 4, 4, 44, 0.05
"""Eleven batches: windows of 4, 4 and 3 on one rank, of 4 and 2 on each of two."""

FP16 = {"init_scale": 2.0**8, "growth_interval": 2}


def as_rank(rank, world_size):
    """Tell accelerate what torchrun would have."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.environ["OMP_NUM_THREADS"] = "1"


def forget_accelerators():
    """accelerate keeps its state in class attributes, across tests."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class Net(nn.Module):
    """Everything once: an embedding, a norm, a head with a bias; with ``has_frozen`` frozen weights and a buffer."""

    def __init__(self, dtype, seed=0, *, has_frozen=True):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(9, 6, dtype=dtype)
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False) if has_frozen else None
        self.norm = nn.LayerNorm(6, dtype=dtype)
        self.register_buffer("shift", torch.randn(6).to(dtype) if has_frozen else None)
        self.head = nn.Linear(6, 9, dtype=dtype)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.frozen is not None:
            x = self.frozen(x) + self.shift
        return self.head(torch.tanh(self.norm(x))).float()


def loss_of(net, tokens):
    return nn.functional.cross_entropy(net(tokens), (tokens * 2) % 9)


def make_loader():
    tokens = torch.randint(0, 9, (NUM_EXAMPLES,), generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(tokens), batch_size=BATCH)


def adamw(net):
    return torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=0.02)


def halving(optimizer):
    return LambdaLR(optimizer, lambda step: 0.5**step)


def make_accelerator(scales=False, **keywords):
    """Return an Accelerator on the CPU; with ``scales`` one for fp16, as accelerate makes it on a GPU only.

    On a CPU accelerate takes mixed_precision="fp16" and leaves out both autocast and scaler: set here by hand.
    """
    forget_accelerators()
    keywords = {"cpu": True, "gradient_accumulation_steps": K, **keywords}
    if not scales:
        return Accelerator(**keywords)
    from accelerate.utils import GradScalerKwargs

    accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**FP16)], **keywords)
    assert accelerator.scaler is None
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu", **FP16)
    return accelerator


class Prepared:
    """What a script holds after `fusedopt.integrations.accelerate.prepare`."""

    def __init__(self, dtype, seed=0, accelerator=None, wraps=False, **settings):
        self.accelerator = accelerator or make_accelerator()
        self.bare_net = Net(dtype, seed)
        optimizer = adamw(self.bare_net)
        scheduler = halving(optimizer)
        if wraps:
            optimizer, settings = fusedopt.FusedMainGradOptimizer(optimizer, **settings), {}
        self.net, self.optimizer, self.loader, self.scheduler = prepare(
            self.accelerator, self.bare_net, optimizer, make_loader(), scheduler, **settings
        )
        self.wrapper = self.optimizer.optimizer

    def epoch(self, max_norm=None, spoil=lambda number: 1.0):
        """Run one epoch; return each window's norm, if it clips, and the learning rate after every micro-batch."""
        norms, rates = [], []
        for number, (tokens,) in enumerate(self.loader):
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward(loss_of(self.net, tokens) * spoil(number))
                if self.accelerator.sync_gradients and max_norm is not None:
                    norms.append(self.accelerator.clip_grad_norm_(self.net.parameters(), max_norm).clone())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            rates.append(self.scheduler.get_last_lr()[0])
        return norms, rates


class Plain:
    """The same without accelerate.

    Args:
        batches: of this rank, in order.
        scaler: of fp16 losses.
    """

    def __init__(self, dtype, batches, num_ranks=1, scaler=None, **settings):
        self.net, self.batches, self.num_ranks, self.scaler = Net(dtype), batches, num_ranks, scaler
        self.wrapper = fusedopt.FusedMainGradOptimizer(adamw(self.net), **settings)
        self.scheduler = halving(self.wrapper)

    def epoch(self, max_norm=None, spoil=lambda number: 1.0):
        norms, rates, count = [], [], len(self.batches)
        for number, tokens in enumerate(self.batches):
            is_last = (number + 1) % K == 0 or number + 1 == count
            with contextlib.nullcontext() if is_last else self.wrapper.no_sync():
                self._backward(tokens, spoil(number))
            if is_last:
                self._step(max_norm, norms)
            rates.append(self.scheduler.get_last_lr()[0])
        return norms, rates

    def _backward(self, tokens, factor):
        if self.scaler is None:
            (loss_of(self.net, tokens) * factor / K).backward()
        else:
            with torch.autocast("cpu", torch.float16):
                logits = self.net(tokens)
            loss = nn.functional.cross_entropy(logits.float(), (tokens * 2) % 9)
            self.scaler.scale(loss * factor / K).backward()

    def _step(self, max_norm, norms):
        is_taken = True
        if self.scaler is not None and max_norm is not None:
            self.scaler.unscale_(self.wrapper)
        if max_norm is not None:
            norms.append(self.wrapper.clip_grad_norm_(max_norm).clone())
        if self.scaler is None:
            self.wrapper.step()
        else:
            before = self.scaler.get_scale()
            self.scaler.step(self.wrapper)
            self.scaler.update()
            is_taken = self.scaler.get_scale() >= before
        if is_taken:
            for _ in range(self.num_ranks):  # accelerate's schedulers count batches of all ranks
                self.scheduler.step()
        self.wrapper.zero_grad()


def state_of(net, wrapper):
    """Return copies of all weights, buffers and, on the first rank, main_params and inner state; all ranks call it."""
    wrapper.consolidate_state_dict(to=0)
    found = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    if wrapper.config.shard == "none" or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        for index, state in wrapper.state_dict()["state"].items():
            found |= {f"{index}.{key}": value.detach().clone() for key, value in state.items()}
    return found


def assert_same(found, needed):
    assert found.keys() == needed.keys()
    for name, tensor in found.items():
        assert tensor.dtype is needed[name].dtype, name
        assert torch.isfinite(tensor).all(), name
        assert torch.equal(tensor, needed[name]), name


def assert_moved(found, dtype, num_state=None):
    """Assert that training moved what trains and nothing else, and that there are fp32 main_params of it."""
    start = Net(dtype).state_dict()
    still = {name for name in start if torch.equal(found[name], start[name])}
    assert still == {"frozen.weight", "frozen.bias", "shift"}
    mains = [tensor for name, tensor in found.items() if name.endswith("main_param")]
    assert {tensor.dtype for tensor in mains} <= {torch.float32}
    if dtype is not torch.float32 and num_state != 0:
        assert len(mains) == 5


@contextlib.contextmanager
def counted_exchanges():
    """Count the messages by which ranks meet: what `no_sync` saves."""
    cls = channel_module.Channel
    stock, counts = cls.exchange, [0]

    def exchange(self, message, tally):
        counts[0] += 1
        return stock(self, message, tally)

    cls.exchange = exchange
    try:
        yield counts
    finally:
        cls.exchange = stock


def num_windows(num_ranks):
    return math.ceil(math.ceil(NUM_EXAMPLES / BATCH / num_ranks) / K)
