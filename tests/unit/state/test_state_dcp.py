"""torch.distributed.checkpoint on one process; on several: tests/distributed/test_checkpoints_of_torch.py."""

import copy

import pytest
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.compare import frozen
from tests.state_cases import (
    DTYPES,
    OPTIMIZERS,
    Net,
    Run,
    assert_is_finite_and_trained,
    everything,
    named_adamw,
    start,
    train,
)

OPTIONS = [{}, {"full_state_dict": True}, {"cpu_offload": True}, {"flatten_optimizer_state_dict": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [OPTIMIZERS[o] for o in OPTIMIZERS if o != "LBFGS"], ids=lambda make: make.__name__)
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_torchs_get_and_set_resume_bit_equal_and_move_nothing(dtypes, make, options):
    options = StateDictOptions(**options)
    run = start(dtypes, make)
    before = everything(run)
    fresh = copy.deepcopy(get_optimizer_state_dict(run.net, run.optimizer, options=options))
    assert everything(run) == before
    train(run, range(3))
    at_save = everything(run)
    saved = get_optimizer_state_dict(run.net, run.optimizer, options=options)
    assert everything(run) == at_save
    resumed = start(dtypes, make, seed=7)
    resumed.net.load_state_dict(run.net.state_dict())
    set_optimizer_state_dict(resumed.net, resumed.optimizer, copy.deepcopy(saved), options=options)
    assert tensor_bits(resumed) == {key: at_save[key] for key in tensor_bits(resumed)}
    for each in (run, resumed):
        train(each, range(3, 6))
    assert_is_finite_and_trained(run)
    assert tensor_bits(resumed) == tensor_bits(run)
    set_optimizer_state_dict(run.net, run.optimizer, fresh, options=options)  # what was never stepped has no state
    assert not any(inner.state for inner in run.inners)
    params = [param for group in run.optimizer.param_groups for param in group["params"]]
    for main, param, at_start in zip(run.main_params, params, before["main_params"], strict=True):
        assert main is param or frozen(main) == at_start


def tensor_bits(run):
    return {key: value for key, value in everything(run).items() if "groups" not in key}  # torch makes betas a list


@pytest.mark.parametrize("has_state", [True, False], ids=["running", "fresh"])
def test_a_checkpoint_without_a_main_param_is_refused_by_name(has_state):
    run = start(DTYPES["bf16"], named_adamw)
    train(run, range(2 if has_state else 0))
    saved = copy.deepcopy(get_optimizer_state_dict(run.net, run.optimizer))
    before = everything(run)
    del saved["state"]["first.bias"]["main_param"]
    with pytest.raises(ValueError, match=r"no main_param for parameter first\.bias"):
        set_optimizer_state_dict(run.net, run.optimizer, saved)
    assert everything(run) == before


def test_a_stock_optimizers_checkpoint_is_taken():
    net = Net(DTYPES["fp32"])
    (bare,) = named_adamw(net)
    train(Run(net, [bare], bare), range(3))
    run = start(DTYPES["fp32"], named_adamw, seed=7)
    set_optimizer_state_dict(run.net, run.optimizer, get_optimizer_state_dict(net, bare))
    assert frozen([*run.inners[0].state.values()]) == frozen([*bare.state.values()])


def test_state_is_shown_empty_to_everybody_but_torchs_checkpoints():
    run = start(DTYPES["bf16"], OPTIMIZERS["AdamW loop"])
    assert not run.optimizer.state
    train(run, range(1))
    assert run.optimizer.state
    assert set(run.optimizer.state[run.net.scale]) == {"step", "exp_avg", "exp_avg_sq"}


def test_state_that_cannot_be_foretold_is_refused_before_the_first_step():
    run = start(DTYPES["bf16"], OPTIMIZERS["LBFGS"])
    before = everything(run)
    with pytest.raises(RuntimeError, match=r"LBFGS.*not known before its first step.*after a step"):
        get_optimizer_state_dict(run.net, run.optimizer)
    assert everything(run) == before
