"""One rank of one data-parallel system: builds it, and runs a window whenever `data_parallel` says so.

    coordinator --("step", args)--> [worker: build, window, phases, peak] --("done", figures)--> coordinator

Knows every system's own way to accumulate, reduce and step; nothing of rounds, rows or ratios. Between commands a
worker sleeps in a read of its pipe. Times are milliseconds, sizes bytes, of this rank alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import importlib.util
import os
import resource
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fusedopt
from benchmarks.memory import LiveTensors, peak_nbytes
from benchmarks.models import TINY, Shape, all_linears_as_fast_as_fp32, make_llama

WORLD_SIZE = 2
NUM_MICRO_BATCHES = 4
LEARNING_RATE = 1e-4
COLLECTIVE_TIMEOUT_S = 120
NUM_WARMUP_WINDOWS = 2  # the first creates optimizer state, the second reuses it


@dataclass(frozen=True)
class Setup:
    """What every rank of every system is told: the same for all, so that only the systems differ."""

    shape: Shape
    bucket_mib: int  # of fp32 elements, for every system that has buckets
    overlaps: bool  # fusedopt reduces inside backward; the others do as they always do


Mark = Callable[[str], None]


class System:
    """A model and an optimizer on `WORLD_SIZE` ranks. Subclasses say how the system is meant to be used.

    The class attributes say in words what it computes and holds; rows carry them.
    """

    arithmetic: ClassVar[str]
    same_arithmetic_as: ClassVar[str | None] = None
    shards: ClassVar[str] = "nothing"
    state_formula: ClassVar[str]
    """Bytes per parameter that outlive a window, on each of W ranks."""
    traffic_formula: ClassVar[str]
    """Bytes per parameter that a rank sends per window of k micro-batches, f = (W - 1) / W, on rings."""
    model: Any
    optimizer: Any

    def __init__(self, setup: Setup) -> None:
        raise NotImplementedError

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of one micro-batch's forward and backward."""
        return nullcontext()

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss to call backward on, as this system scales it."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        """Run backward."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, is_last: bool) -> None:
        """Step after a micro-batch; systems that do not count micro-batches act on the last only."""
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def window(self, batches: list[Tensor], mark: Mark = lambda phase: None) -> Tensor:
        """Run one window; return the mean loss. ``mark`` is told the name of each phase as it ends."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            with self.micro_batch(is_last):
                loss = self.loss(batch)
                mark("forward")
                self.backward(loss)
                mark("last backward" if is_last else "earlier backwards")
            losses.append(loss.detach())
            self.step(is_last)
            mark("step" if is_last else "earlier steps")
        return torch.stack(losses).float().mean()

    @property
    def loss_scale(self) -> int:
        """The factor by which `loss` is smaller than the mean loss of the micro-batch."""
        return 1


class FusedoptNone(System):
    """fusedopt with everything on every rank."""

    shard: ClassVar[str] = "none"
    arithmetic = (
        "bf16 parameters and activations; weight gradients bf16 per micro-batch, accumulated and reduced in fp32; "
        "AdamW on fp32 main parameters"
    )
    state_formula = "2 + 16 = 18"
    traffic_formula = "8f = 4"

    def __init__(self, setup: Setup) -> None:
        self.model = make_llama(setup.shape)
        inner = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        cut: dict[str, Any] = {} if self.shard == "none" else {"shard_by": "element"}
        self.optimizer = fusedopt.FusedMainGradOptimizer(
            inner,
            shard=self.shard,
            gradient_accumulation_steps=NUM_MICRO_BATCHES,
            bucket_mib=setup.bucket_mib,
            overlap_grad_reduce=setup.overlaps,
            **cut,
        )

    def step(self, is_last: bool) -> None:
        """Step after every micro-batch: the wrapper counts."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class FusedoptOptimizer(FusedoptNone):
    """fusedopt, ZeRO-1."""

    shard = "optimizer"
    same_arithmetic_as = "fusedopt_none"
    shards = "main parameters, optimizer state"
    state_formula = "6 + 12/W = 12"
    traffic_formula = "6f = 3"


class FusedoptGradients(FusedoptNone):
    """fusedopt, ZeRO-2."""

    shard = "gradients"
    same_arithmetic_as = "fusedopt_none"
    shards = "gradients, main parameters, optimizer state"
    state_formula = "2 + 16/W = 10"
    traffic_formula = "(4k + 2)f = 9"


class DdpAutocast(System):
    """DDP on fp32 parameters, bf16 by autocast."""

    arithmetic = (
        "fp32 parameters, residual stream and norms, bf16 products (autocast); weight gradients bf16 per micro-batch, "
        "accumulated and reduced in fp32; AdamW on the fp32 parameters"
    )
    same_arithmetic_as = "fusedopt_none, but for fp32 activations between products"
    state_formula = "16"
    traffic_formula = "8f = 4"

    def __init__(self, setup: Setup) -> None:
        self.model = DistributedDataParallel(
            make_llama(setup.shape).float(), bucket_cap_mb=setup.bucket_mib, gradient_as_bucket_view=True
        )
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer over the model's parameters."""
        return torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    def micro_batch(self, is_last: bool) -> AbstractContextManager[object]:
        """Reduce in the last backward only."""
        return nullcontext() if is_last else self.model.no_sync()

    def loss(self, batch: Tensor) -> Tensor:
        """Run forward under autocast; gradients average over the window."""
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(batch) / NUM_MICRO_BATCHES

    @property
    def loss_scale(self) -> int:
        """Divided by hand."""
        return NUM_MICRO_BATCHES

    def step(self, is_last: bool) -> None:
        """Keep the gradients, views of DDP's buckets: set to None they take as long, and 4 bytes more at the peak."""
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)


class ZeroRedundancy(DdpAutocast):
    """torch's ZeroRedundancyOptimizer over DDP."""

    shards = "optimizer state, by parameter"
    state_formula = "8 + 8/W = 12"
    traffic_formula = "8f + 4f = 6"

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return the sharded optimizer; flat parameters, so that it broadcasts one tensor per rank."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # warns when imported, of torch.jit

        return ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LEARNING_RATE,
            fused=True,
        )


class Fsdp2(System):
    """FSDP2 per block, parameters gathered once a window: what ZeRO-2 is, and its faster way to accumulate."""

    arithmetic = (
        "bf16 parameters (gathered from fp32 shards) and activations; weight gradients bf16 per micro-batch, "
        "accumulated and reduced in fp32; AdamW on fp32 shards"
    )
    same_arithmetic_as = "fusedopt_gradients"
    shards = "parameters between windows, reduced gradients, optimizer state"
    state_formula = "12/W = 6, and within a window 2 + 4 more"
    traffic_formula = "(2 + 4)f = 3; 5 with gloo, whose reduce-scatter is an all-reduce"
    reshards: ClassVar[bool] = False

    def __init__(self, setup: Setup) -> None:
        model: Any = make_llama(setup.shape).float()
        settings: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (WORLD_SIZE,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "reshard_after_forward": self.reshards,
        }
        for block in model.model.layers:
            fully_shard(block, **settings)
        self.model = fully_shard(model, **settings)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Reduce in the last backward only, and give the gathered parameters back after it."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)
        if not self.reshards:
            self.model.set_reshard_after_backward(is_last)
        yield

    def loss(self, batch: Tensor) -> Tensor:
        """Gradients average over the window."""
        return super().loss(batch) / NUM_MICRO_BATCHES

    @property
    def loss_scale(self) -> int:
        """Divided by hand."""
        return NUM_MICRO_BATCHES


class Fsdp2Resharding(Fsdp2):
    """FSDP2 per block as it comes: parameters gathered for every forward and every backward."""

    shards = "parameters, reduced gradients, optimizer state"
    state_formula = "12/W = 6, and within a window 4 more"
    traffic_formula = "(4k + 4)f = 10; 12 with gloo, whose reduce-scatter is an all-reduce"
    reshards = True


class DeepSpeedZero1(System):
    """DeepSpeed ZeRO-1 as it comes for bf16: gradients never wider than bf16."""

    arithmetic = (
        "bf16 parameters and activations; gradients accumulated and reduced in bf16: less arithmetic; AdamW on fp32 "
        "main parameters"
    )
    shards = "main parameters, optimizer state"
    state_formula = "2 + 12/W = 8 between windows, 2 more within one"
    traffic_formula = "4f + 2f = 3"
    config: ClassVar[dict[str, Any]] = {"zero_optimization": {"stage": 1}}

    def __init__(self, setup: Setup) -> None:
        import deepspeed  # type: ignore[import-not-found]

        bucket_numel = setup.bucket_mib * 2**18
        config = {
            "train_micro_batch_size_per_gpu": setup.shape.batch_size,
            "gradient_accumulation_steps": NUM_MICRO_BATCHES,
            "gradient_clipping": 0.0,  # nobody clips; left out, DeepSpeed clips to 1.0
            "bf16": {"enabled": True},
            **self.config,
            "zero_optimization": {
                "reduce_bucket_size": bucket_numel,
                "allgather_bucket_size": bucket_numel,
                **self.config["zero_optimization"],
            },
        }
        model = make_llama(setup.shape)
        # torch's AdamW is on DeepSpeed's list of tested optimizers; the same inner optimizer as everybody's.
        inner = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=inner, config=config, dist_init_required=False
        )

    def backward(self, loss: Tensor) -> None:
        """Run the engine's backward, which divides by the micro-batches."""
        self.model.backward(loss)

    def step(self, is_last: bool) -> None:
        """Step after every micro-batch: the engine counts."""
        self.model.step()


class DeepSpeedZero2(DeepSpeedZero1):
    """DeepSpeed ZeRO-2 as it comes for bf16."""

    arithmetic = (
        "bf16 parameters and activations; gradients reduced in bf16 at every micro-batch, the shard accumulated in "
        "bf16: less arithmetic; AdamW on fp32 main parameters"
    )
    shards = "gradients, main parameters, optimizer state"
    state_formula = "2 + 12/W = 8 between windows, 2/W more within one"
    traffic_formula = "4fk + 2f = 9, by all-reduces"
    config: ClassVar[dict[str, Any]] = {"zero_optimization": {"stage": 2}}


class DeepSpeedZero2Float32(DeepSpeedZero1):
    """DeepSpeed ZeRO-2, told to accumulate and to reduce in fp32."""

    arithmetic = (
        "bf16 parameters and activations; weight gradients bf16 per micro-batch, reduced in fp32 at every micro-batch, "
        "the shard accumulated in fp32; AdamW on fp32 main parameters"
    )
    same_arithmetic_as = "fusedopt_gradients"
    shards = "gradients, main parameters, optimizer state"
    state_formula = "2 + 12/W = 8 between windows, 4/W more within one"
    traffic_formula = "8fk + 2f = 17, by all-reduces"
    config: ClassVar[dict[str, Any]] = {
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
    }


class DeepSpeedBf16Optimizer(DeepSpeedZero1):
    """DeepSpeed's BF16_Optimizer: ZeRO-1 with fp32 accumulation. It reduces in bf16, as it comes."""

    arithmetic = (
        "bf16 parameters and activations; weight gradients bf16 per micro-batch, accumulated in fp32, reduced in bf16: "
        "less arithmetic; AdamW on fp32 main parameters; measures the gradients' norm"
    )
    state_formula = "2 + 4 + 12/W = 12, and 2 more within a window"
    traffic_formula = "4f + 2f = 3"
    config: ClassVar[dict[str, Any]] = {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}}


class DeepSpeedBf16OptimizerFloat32(DeepSpeedBf16Optimizer):
    """DeepSpeed's BF16_Optimizer, told to reduce in fp32 what it accumulated in fp32."""

    arithmetic = (
        "bf16 parameters and activations; weight gradients bf16 per micro-batch, accumulated and reduced in fp32; "
        "AdamW on fp32 main parameters; measures the gradients' norm"
    )
    same_arithmetic_as = "fusedopt_optimizer"
    traffic_formula = "8f + 2f = 5"
    config: ClassVar[dict[str, Any]] = {**DeepSpeedBf16Optimizer.config, "communication_data_type": "fp32"}


SYSTEMS: dict[str, type[System]] = {
    "fusedopt_none": FusedoptNone,
    "fusedopt_optimizer": FusedoptOptimizer,
    "fusedopt_gradients": FusedoptGradients,
    "ddp_autocast": DdpAutocast,
    "zero_redundancy": ZeroRedundancy,
    "deepspeed_zero1": DeepSpeedZero1,
    "deepspeed_bf16_optimizer": DeepSpeedBf16Optimizer,
    "deepspeed_bf16_optimizer_fp32": DeepSpeedBf16OptimizerFloat32,
    "deepspeed_zero2": DeepSpeedZero2,
    "deepspeed_zero2_fp32": DeepSpeedZero2Float32,
    "fsdp2": Fsdp2,
    "fsdp2_resharding": Fsdp2Resharding,
}


def is_available(name: str) -> bool:
    """Return whether what system ``name`` needs is installed."""
    return not issubclass(SYSTEMS[name], DeepSpeedZero1) or importlib.util.find_spec("deepspeed") is not None


class Worker:
    """One rank: a system, and the commands that a coordinator may send, which are its public methods."""

    def __init__(self, name: str, rank: int, setup: Setup) -> None:
        self.kind, self.setup, self.rank = SYSTEMS[name], setup, rank
        self.system: System

    def build(self) -> dict[str, Any]:
        """Build the system, run it warm, and return what it holds.

        A tiny one is built and dropped first: what torch and DeepSpeed import or allocate once is no system's memory.
        """
        tiny = self.kind(dataclasses.replace(self.setup, shape=TINY))
        for _ in range(NUM_WARMUP_WINDOWS):
            tiny.window(self._batches(TINY))
        del tiny
        _give_back_freed()
        gc.freeze()  # what is alive by now is no system's, and need not be walked again
        live, baseline = LiveTensors(), _reset_peak_rss()
        self.system = self.kind(self.setup)
        self.batches = self._batches(self.setup.shape)
        num_params = sum(param.numel() for param in self.system.model.parameters())  # a DTensor has its global size
        first = self.system.window(self.batches)
        self.system.window(self.batches)
        peak = _peak_rss() - baseline
        _give_back_freed()
        held_rss = _reset_peak_rss() - baseline
        held = live.nbytes()
        window_peak, _ = peak_nbytes(lambda: self.system.window(self.batches))
        _give_back_freed()
        _reset_peak_rss()
        self.system.window(self.batches)
        return {
            "num_params": num_params,
            "first_loss": float(first) * self.system.loss_scale,
            "held_bytes": held,
            "window_peak_bytes": held + window_peak,
            "held_rss_bytes": held_rss,
            "window_peak_rss_bytes": _peak_rss() - baseline,
            "peak_rss_bytes": peak,
            "optimizer_class": type(self.system.optimizer).__name__,
        }

    def step(self) -> dict[str, Any]:
        """Time one window from a common start."""
        dist.barrier()
        faults, cpu, wall = _page_faults(), time.process_time(), time.perf_counter()
        loss = self.system.window(self.batches)
        wall, cpu, faults = time.perf_counter() - wall, time.process_time() - cpu, _page_faults() - faults
        return {
            "wall_ms": 1e3 * wall,
            "cpu_ms": 1e3 * cpu,
            "page_faults": faults,
            "loss": float(loss) * self.system.loss_scale,
        }

    def cpu(self) -> dict[str, Any]:
        """Return the CPU time spent so far: a coordinator that asks twice knows whether idling is idle."""
        return {"cpu_ms": 1e3 * time.process_time()}

    def phases(self) -> dict[str, Any]:
        """Return the wall time of each phase of one window, in the order in which they first end."""
        dist.barrier()
        times: dict[str, float] = {}
        last = time.perf_counter()

        def mark(phase: str) -> None:
            nonlocal last
            now = time.perf_counter()
            times[phase] = times.get(phase, 0.0) + 1e3 * (now - last)
            last = now

        self.system.window(self.batches, mark)
        return times

    def trace(self) -> dict[str, Any]:
        """Profile one window: its collectives (count, ms from launch to end), and a table of the costliest ops."""
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.system.window(self.batches)
        averages = profiler.key_averages()
        collectives = {
            event.key: {"count": event.count, "ms": event.cpu_time_total / 1e3}
            for event in averages
            if event.key.startswith("gloo:")
        }
        table = averages.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=48)
        return {"collectives": collectives, "table": table}

    def _batches(self, shape: Shape) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1 + self.rank)
        size = (shape.batch_size, shape.num_tokens)
        return [torch.randint(shape.vocab_size, size, generator=generator) for _ in range(NUM_MICRO_BATCHES)]


def serve(connection: Connection, name: str, rank: int, setup: Setup, store: Path, log: Path) -> None:
    """Join the group of system ``name`` and obey commands until "stop", or until the coordinator is gone.

    What libraries print goes to ``log``; errors go to the coordinator.
    """
    with ExitStack() as stack:
        try:
            _prepare_process(rank, log)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=WORLD_SIZE,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )
            stack.callback(dist.destroy_process_group)
            if issubclass(SYSTEMS[name], DeepSpeedZero1):
                import deepspeed  # noqa: F401 - heavy: before the baseline of memory
            stack.enter_context(all_linears_as_fast_as_fp32())
            worker = Worker(name, rank, setup)
            while (command := connection.recv()) != "stop":
                connection.send(("done", getattr(worker, command)()))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return  # nobody is left to tell
        except Exception:
            with contextlib.suppress(OSError):
                connection.send(("failed", traceback.format_exc()))


def _prepare_process(rank: int, log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _give_back_freed() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (value,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(value) * 1024


def _reset_peak_rss() -> int:
    """Start a new high-water mark; return the resident bytes it starts from."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _peak_rss() -> int:
    return _status_bytes("VmHWM")
