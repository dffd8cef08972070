"""Claims about `fusedopt.integrations.accelerate.prepare` on one process; tests/distributed has two ranks."""

import gc
import weakref

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
)
from torch import nn
from torch.utils.data import DataLoader

import fusedopt
from fusedopt.integrations.accelerate import prepare
from fusedopt.integrations.arguments import FusedOptArguments
from tests import accelerate_cases as cases
from tests.reference import Reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
K = cases.K


def batches_of(loop):
    return [tokens for (tokens,) in loop.loader]


def weights(net):
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


# -- the loop


@pytest.mark.parametrize("wraps", [False, True], ids=["bare optimizer", "wrapped before"])
@pytest.mark.parametrize("max_norm", [None, cases.MAX_NORM], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_loop_is_the_plain_loop_over_the_wrapper_bit_for_bit(dtype, max_norm, wraps):
    ours = cases.Prepared(dtype, wraps=wraps)
    assert isinstance(ours.optimizer, AcceleratedOptimizer)
    assert isinstance(ours.scheduler, AcceleratedScheduler)
    assert isinstance(ours.loader, DataLoader)
    assert ours.net is ours.bare_net
    plain = cases.Plain(dtype, batches_of(ours))
    for _ in range(2):
        norms, rates = ours.epoch(max_norm)
        assert (norms, rates) == plain.epoch(max_norm)
        assert len(norms) == (0 if max_norm is None else cases.num_windows(1))
        assert all(norm > cases.MAX_NORM for norm in norms)
    found = cases.state_of(ours.bare_net, ours.wrapper)
    cases.assert_same(found, cases.state_of(plain.net, plain.wrapper))
    cases.assert_moved(found, dtype)
    assert rates[-1] == 0.02 * 0.5 ** (2 * cases.num_windows(1))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_loop_is_the_reference_bit_for_bit(dtype):
    ours = cases.Prepared(dtype)
    twin = cases.Net(dtype)
    trainable = [p for p in twin.parameters() if p.requires_grad]
    reference = Reference(twin, lambda groups: torch.optim.AdamW(groups[0], lr=0.02), groups=[trainable])
    scheduler = cases.halving(reference.optimizer)
    batches = batches_of(ours)
    for _ in range(2):
        ours.epoch()
        for start in range(0, len(batches), K):
            for tokens in batches[start : start + K]:
                reference.backward(cases.loss_of(twin, tokens) / K)
            reference.step()
            scheduler.step()
    cases.assert_same(weights(ours.bare_net), weights(twin))
    cases.assert_moved(weights(twin), dtype, num_state=0)


def test_parameters_get_their_names():
    ours = cases.Prepared(torch.bfloat16)
    trainable = [name for name, param in ours.bare_net.named_parameters() if param.requires_grad]
    assert ours.wrapper.param_groups[0]["param_names"] == trainable


@pytest.mark.parametrize("max_norm", [None, cases.MAX_NORM], ids=["unclipped", "clipped"])
def test_fp16_with_accelerates_scaler_is_the_plain_loop_and_a_skipped_step_moves_no_schedule(max_norm):
    ours = cases.Prepared(torch.float16, accelerator=cases.make_accelerator(scales=True))
    scaler = torch.amp.GradScaler("cpu", **cases.FP16)
    plain = cases.Plain(torch.float16, batches_of(ours), scaler=scaler)

    def spoil(number):
        return float("inf") if number == 1 else 1.0

    assert ours.epoch(max_norm) == plain.epoch(max_norm)
    _, rates = ours.epoch(max_norm, spoil)
    assert rates == plain.epoch(max_norm, spoil)[1]
    assert rates[K] == rates[0]
    assert ours.accelerator.scaler.get_scale() == scaler.get_scale() == cases.FP16["init_scale"] * 2 / 2 * 2
    found = cases.state_of(ours.bare_net, ours.wrapper)
    cases.assert_same(found, cases.state_of(plain.net, plain.wrapper))
    cases.assert_moved(found, torch.float16)


def test_mixed_precision_bf16_autocasts_an_fp32_model():
    ours = cases.Prepared(torch.float32, accelerator=cases.make_accelerator(mixed_precision="bf16"))
    plain = cases.Plain(torch.float32, batches_of(ours))
    ours.epoch()
    stock = plain.net.forward
    plain.net.forward = torch.autocast("cpu", torch.bfloat16)(stock)
    plain.epoch()
    cases.assert_same(weights(ours.bare_net), weights(plain.net))
    exact = cases.Plain(torch.float32, batches_of(ours))
    exact.epoch()
    assert not torch.equal(exact.net.head.weight, ours.bare_net.head.weight)  # autocast was on


def test_a_compiled_model_is_kept_compiled_and_trains_the_same():
    plugin = TorchDynamoPlugin(backend="eager")
    ours = cases.Prepared(torch.bfloat16, accelerator=cases.make_accelerator(dynamo_plugin=plugin))
    assert type(ours.net).__name__ == "OptimizedModule"
    plain = cases.Plain(torch.bfloat16, batches_of(ours))
    assert ours.epoch(cases.MAX_NORM) == plain.epoch(cases.MAX_NORM)
    cases.assert_same(weights(ours.bare_net), weights(plain.net))


def test_the_accumulation_plugin_decides_when_windows_end():
    plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False, sync_with_dataloader=False)
    accelerator = cases.make_accelerator(gradient_accumulation_plugin=plugin, gradient_accumulation_steps=1)
    ours = cases.Prepared(torch.bfloat16, accelerator=accelerator)
    for _ in range(3):
        ours.epoch()
    (steps,) = {int(state["step"]) for state in ours.wrapper.state.values()}
    assert steps == 11 * 3 // 3  # windows of 3 go on over the ends of epochs
    assert ours.wrapper.config.gradient_accumulation_steps == 1


def test_save_state_and_load_state_resume_bit_equal(tmp_path):
    loop = cases.Prepared(torch.bfloat16)
    loop.epoch()
    loop.accelerator.save_state(tmp_path)
    saved = cases.state_of(loop.bare_net, loop.wrapper)
    later = loop.epoch()
    resumed = cases.Prepared(torch.bfloat16, accelerator=cases.make_accelerator(), seed=7)
    resumed.accelerator.load_state(tmp_path)
    cases.assert_same(cases.state_of(resumed.bare_net, resumed.wrapper), saved)
    assert resumed.epoch() == later
    found = cases.state_of(resumed.bare_net, resumed.wrapper)
    cases.assert_same(found, cases.state_of(loop.bare_net, loop.wrapper))
    assert not torch.equal(found["head.weight"], saved["head.weight"])


# -- what goes where


def test_two_models_of_one_accelerator_are_paused_and_clipped_each_by_its_own_optimizer():
    accelerator = cases.make_accelerator(gradient_accumulation_steps=1)
    pairs = []
    for seed in (0, 1):
        net = cases.Net(torch.bfloat16, seed)
        pairs.append(prepare(accelerator, net, cases.adamw(net)))
    for net, optimizer in pairs:
        accelerator.backward(cases.loss_of(net, torch.arange(4)))
        for other_net, other in pairs:
            with accelerator.no_sync(net):
                assert other.optimizer._reducer._is_paused is (other is optimizer)
            assert not other.optimizer._reducer._is_paused
            assert other_net.head.weight.grad is not None or other is not optimizer
    other_grad = pairs[1][0].head.weight.grad.clone()
    norm = accelerator.clip_grad_norm_(pairs[0][0].parameters(), 1e-3)
    needed = nn.utils.get_total_norm([p.grad for p in pairs[0][0].parameters() if p.grad is not None])
    assert norm > 1e-3 >= needed * 0.99
    assert torch.equal(pairs[1][0].head.weight.grad, other_grad)
    assert accelerator.clip_grad_norm_(pairs[1][0].head.parameters(), 1e-3) > 1e-3  # some of its: accelerate's own
    assert not torch.equal(pairs[1][0].head.weight.grad, other_grad)


def test_an_accelerator_that_lets_go_of_its_objects_frees_the_wrapper_and_can_prepare_again():
    accelerator = cases.make_accelerator()
    net = cases.Net(torch.bfloat16)
    _, optimizer = prepare(accelerator, net, cases.adamw(net))
    wrapper = weakref.ref(optimizer.optimizer)
    accelerator.free_memory()
    del optimizer
    gc.collect()
    assert wrapper() is None
    assert not hasattr(net.head.weight, "main_grad")
    again = prepare(accelerator, net, cases.adamw(net))
    accelerator.backward(cases.loss_of(again[0], torch.arange(4)))
    assert net.head.weight.grad is net.head.weight.main_grad


def test_flags_convert_layers_and_own_no_accumulation(tmp_path):
    settings = tmp_path / "fusedopt.yaml"
    settings.write_text("gradient_accumulation_steps: auto\nmax_grad_norm: 0.05\n")
    flags = FusedOptArguments(main_grad=True, fused_linear=True, main_grad_config=str(settings))
    net = cases.Net(torch.bfloat16)
    _, optimizer = prepare(cases.make_accelerator(), net, cases.adamw(net), fusedopt_args=flags)
    assert type(net.head) is fusedopt.FusedLinear
    assert type(net.frozen) is nn.Linear
    assert optimizer.optimizer.config.max_grad_norm == 0.05
    assert optimizer.optimizer.config.gradient_accumulation_steps == 1

    settings.write_text("gradient_accumulation_steps: 3\n")
    flags = FusedOptArguments(main_grad=True, main_grad_config=str(settings))
    net = cases.Net(torch.bfloat16)
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3 .*: the Accelerator has 4"):
        prepare(cases.make_accelerator(), net, cases.adamw(net), fusedopt_args=flags)


def test_without_the_flag_training_is_stock():
    net = cases.Net(torch.bfloat16)
    prepared, optimizer = prepare(cases.make_accelerator(), net, cases.adamw(net), fusedopt_args=FusedOptArguments())
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert prepared is net
    assert not hasattr(net.head.weight, "main_grad")


# -- what is refused


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"])
def test_an_accelerator_for_what_owns_gradients_is_refused(kind):
    accelerator = cases.make_accelerator()
    accelerator.state.distributed_type = DistributedType[kind]  # none of them can be configured without its library
    net = cases.Net(torch.bfloat16)
    with pytest.raises(ValueError, match=rf"configured for {kind}.*torchrun.*shard='optimizer' is ZeRO-1"):
        prepare(accelerator, net, cases.adamw(net))
    assert not hasattr(net.head.weight, "main_grad")


@pytest.mark.parametrize("hook", ["fp16", DDPCommunicationHookType.FP16])
def test_a_communication_hook_and_fp8_are_refused_together(monkeypatch, hook):
    handler = DistributedDataParallelKwargs(comm_hook=hook)
    accelerator = cases.make_accelerator(kwargs_handlers=[handler])
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp8")
    net = cases.Net(torch.bfloat16)
    with pytest.raises(ValueError, match=r"(?s)mixed_precision='fp8'.*comm_hook=fp16"):
        prepare(accelerator, net, cases.adamw(net))


def test_an_accelerator_that_overlooks_its_other_ranks_is_refused(monkeypatch):
    """On a CPU, without cpu=True, accelerate takes each rank that torchrun starts for the only one."""
    net, accelerator = cases.Net(torch.bfloat16), cases.make_accelerator()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"torchrun started 2 ranks.*Accelerator\(cpu=True\)"):
        prepare(accelerator, net, cases.adamw(net))


def refused(case):
    """Return arguments of `prepare` that it refuses, and what it says."""
    net, other = cases.Net(torch.bfloat16), cases.Net(torch.bfloat16)
    optimizer, accelerator, settings = cases.adamw(net), cases.make_accelerator(), {}
    if case == "order":
        return (accelerator, optimizer, net), settings, TypeError, "was given a AdamW for the model and a Net"
    if case == "list":
        return (accelerator, net, [optimizer]), settings, TypeError, "go into one FusedMainGradOptimizer"
    if case == "prepared":
        return (accelerator, net, accelerator.prepare(optimizer)), settings, TypeError, "give the bare one"
    if case == "strangers":
        return (accelerator, other, optimizer), settings, ValueError, "5 parameter.s. that are not the model's"
    if case == "settings twice":
        flags = FusedOptArguments(main_grad=True)
        settings = {"fusedopt_args": flags, "shard": "none"}
        return (accelerator, net, optimizer), settings, ValueError, "give all of it as flags, or none"
    if case == "settings of a wrapper":
        wrapper = fusedopt.FusedMainGradOptimizer(optimizer)
        return (accelerator, net, wrapper), {"shard": "none"}, ValueError, "is wrapped already"
    if case == "merging twice":
        settings = {"gradient_accumulation_steps": 3}
        return (accelerator, net, optimizer), settings, ValueError, "step every 12 micro-batches"
    accelerator.state.device = torch.device("meta")  # stands for a GPU
    wrapper = fusedopt.FusedMainGradOptimizer(optimizer)
    return (accelerator, net, wrapper), settings, ValueError, "bare optimizer, with the settings as keywords"


CASES = ("order", "list", "prepared", "strangers", "settings twice", "settings of a wrapper", "merging twice", "moved")


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_with_the_remedy_before_anything_is_changed(case):
    arguments, settings, kind, text = refused(case)
    nets = [item for item in arguments if isinstance(item, nn.Module)]
    had = [hasattr(net.head.weight, "main_grad") for net in nets]
    with pytest.raises(kind, match=text):
        prepare(*arguments, **settings)
    assert [hasattr(net.head.weight, "main_grad") for net in nets] == had
    assert not any(getattr(net, "_is_accelerate_prepared", False) for net in nets)


def test_fusedopts_own_gradient_merge_works_where_accelerate_does_not_accumulate():
    accelerator = cases.make_accelerator(gradient_accumulation_steps=1)
    net = cases.Net(torch.bfloat16)
    prepared, optimizer = prepare(accelerator, net, cases.adamw(net), gradient_accumulation_steps=K)
    plain = cases.Plain(torch.bfloat16, [])
    plain.scheduler = torch.optim.lr_scheduler.ConstantLR(plain.wrapper, factor=1.0)
    batches = [tokens for (tokens,) in cases.make_loader()][: 2 * K]
    for tokens in batches:
        accelerator.backward(cases.loss_of(prepared, tokens))
        optimizer.step()
        optimizer.zero_grad()
    plain.batches = batches
    plain.epoch()
    assert optimizer.optimizer.window_ends
    # Dividing each loss by 4 and dividing the sum by 4 are both exact.
    cases.assert_same(weights(net), weights(plain.net))
    cases.assert_moved(weights(net), torch.bfloat16, num_state=0)
