"""The doubles refuse what the real libraries would, and their FusedAdams, wrapped, step as bare ones on fp32 copies."""

import math

import pytest
import torch
from torch import nn

from fusedopt import FusedMainGradOptimizer
from tests.compare import assert_equal_parameters
from tests.doubles import apex_double, recording, te_double
from tests.doubles.recording import WouldCorrupt
from tests.models import Mlp, loss_of
from tests.reference import Reference

CPU = torch.device("cpu")


# -- The doubles themselves


def test_the_double_of_apex_goes_wrong_where_apex_does():
    amp_c = apex_double.AmpC(recording.Calls())
    flag, ones = torch.zeros(1, dtype=torch.int32), torch.ones(8)
    targets = [torch.zeros(8), torch.zeros(0)]
    amp_c.multi_tensor_scale(64, flag, [[ones, torch.ones(0)], targets], 2.0)
    assert (targets[0] == 0).all()  # the trailing empty tensor left it unlaunched
    many = [ones] * 109 + [torch.ones(0), ones]
    with pytest.raises(WouldCorrupt, match="past the array"):
        amp_c.multi_tensor_l2norm(64, flag, [many])
    with pytest.raises(WouldCorrupt, match="mixes dtypes"):
        amp_c.multi_tensor_l2norm(64, flag, [[ones, ones.half()]])
    with pytest.raises(WouldCorrupt, match="read as int32"):
        amp_c.multi_tensor_l2norm(64, flag.float(), [[ones]])
    with pytest.raises(WouldCorrupt, match="int n"):
        amp_c.multi_tensor_l2norm(
            64, torch.zeros(1, dtype=torch.int32, device="meta"), [[torch.empty(2**31, device="meta")]]
        )
    with pytest.raises(WouldCorrupt, match=r"\.item\(\)"):
        amp_c.multi_tensor_scale(64, flag, [[ones], [ones]], torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="not contiguous"):
        amp_c.multi_tensor_l2norm(64, flag, [[torch.ones(8, 8)[:, ::2]]])
    with pytest.raises(RuntimeError, match="size mismatch"):
        amp_c.multi_tensor_scale(64, flag, [[ones], []], 1.0)
    with pytest.raises(RuntimeError, match="size"):
        amp_c.multi_tensor_l2norm(64, flag, [[]])
    with pytest.raises(TypeError):
        amp_c.multi_tensor_l2norm(64, noop_flag=flag, tensor_lists=[[ones]])
    with pytest.raises(TypeError):
        amp_c.multi_tensor_adam(64, flag, [[ones]] * 4, 0.1, 0.9, 0.9, 0.0, 1.0, 1, 1, 0.0)
    with pytest.raises(WouldCorrupt, match=r"parameters of torch\.bfloat16 would be read as torch\.float32"):
        amp_c.multi_tensor_adam(64, flag, [[ones], [ones.bfloat16()], [ones], [ones]], 0.1, 0.9, 0.9, 0.0, 1, 1, 1, 0.0)
    with pytest.raises(RuntimeError, match="some combinations"):
        amp_c.multi_tensor_sgd(64, flag, [[ones.bfloat16()]] * 3, 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)


def test_kernels_of_the_doubles_heed_the_flag_as_the_real_ones_do():
    kernels = (apex_double.AmpC(recording.Calls()), te_double.Kernels(recording.Calls()))
    for kernel in kernels:
        flag = torch.ones(1, dtype=torch.int32)
        columns = [[torch.ones(8)] for _ in range(3)]
        kernel.multi_tensor_sgd(64, flag, columns, 0.0, 0.9, 0.0, 0.1, False, False, False, 1.0)
        assert (columns[1][0] == 1).all()  # skipped
        columns = [[torch.ones(8)] for _ in range(4)]
        kernel.multi_tensor_adam(64, flag, columns, 0.1, 0.9, 0.9, 0.0, 1, 1, 1, 0.0)
        assert (columns[1][0] != 1).all()  # ignored
        flag.zero_()
        kernel.multi_tensor_scale(64, flag, [[torch.tensor([math.nan])], [torch.zeros(1)]], 1.0)
        assert int(flag) == 1


def test_the_double_of_transformer_engine_goes_wrong_where_it_does():
    kernels, apply = te_double.Kernels(recording.Calls()), te_double.MultiTensorApply(64)
    flag, ones = torch.zeros(1, dtype=torch.int32), torch.ones(8)
    given = [[ones, torch.ones(0)]]
    before = given[0]
    apply(kernels.multi_tensor_l2norm, flag, given)
    assert given[0] is not before  # rebound
    assert apply(kernels.multi_tensor_l2norm, flag, [[torch.ones(0)]]) is None
    with pytest.raises(RuntimeError, match="aligned"):
        apply(kernels.multi_tensor_scale, flag, [[ones], []], 1.0)
    with pytest.raises(RuntimeError, match="zero size"):
        kernels.multi_tensor_l2norm(64, flag, [[torch.ones(0)]])
    with pytest.raises(WouldCorrupt, match="strides"):
        kernels.multi_tensor_l2norm(64, flag, [[torch.ones(8, 8)[:, ::2]]])
    with pytest.raises(RuntimeError, match="one type per list"):
        kernels.multi_tensor_adam(64, flag, [[ones, ones], [ones, ones.half()], [ones] * 2, [ones] * 2], *[1] * 8)
    with pytest.raises(WouldCorrupt, match="would be read as float32"):
        kernels.multi_tensor_scale_tensor(64, flag, [[ones], [ones]], torch.tensor(1.0).double())
    gemm, x = te_double.Gemm(recording.Calls()).current, torch.full((1, 1), 1 + 2.0**-12)
    out = torch.zeros(1, 1)
    gemm(x, torch.ones(1, 1), layout="NT", grad=True, out=out, out_dtype=torch.float32)
    assert float(out) == 1.0  # TF32
    with pytest.raises(ValueError, match="not contiguous"):
        gemm(x, x, layout="NT", grad=True, out=torch.zeros(4, 4).t(), out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match="invalid value"):
        gemm(torch.ones(0, 2), torch.ones(0, 2), layout="NT", grad=True, out=torch.zeros(2, 2), out_dtype=torch.float32)


def test_gemms_of_the_doubles_take_strided_operands_for_dense_ones():
    x, dy = torch.arange(16.0).view(4, 4).bfloat16().t(), torch.eye(4).bfloat16()
    out = torch.zeros(4, 4)
    apex_double.Wgrad(recording.Calls()).wgrad_gemm_accum_fp32(x, dy, out)
    assert torch.equal(out, x.t().float())
    te_double.Gemm(recording.Calls()).current(x, dy, layout="NT", grad=True, out=out, out_dtype=torch.float32)
    assert torch.equal(out, x.t().float())


# -- The libraries' optimizers, wrapped

FUSED_ADAMS = {"apex": apex_double.FusedAdam, "te": te_double.FusedAdam}


@pytest.mark.parametrize("name", FUSED_ADAMS)
def test_a_fused_adam_wrapped_ends_bit_equal_to_the_bare_one_on_fp32_copies(name):
    cls, settings = FUSED_ADAMS[name], {"lr": 0.01, "weight_decay": 0.1}
    net, twin = Mlp(), Mlp()
    optimizer = FusedMainGradOptimizer(cls(net.parameters(), **settings))
    reference = Reference(twin, lambda groups: cls(groups[0], **settings))
    start = [param.detach().clone() for param in net.parameters()]
    for window in range(6):
        for micro_batch in range(2):
            loss_of(net, 2 * window + micro_batch).backward()
            reference.backward(loss_of(twin, 2 * window + micro_batch))
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        assert optimizer.param_groups[0]["step"] == reference.optimizer.param_groups[0]["step"] == window + 1
        assert_equal_parameters(net, twin)
    state = optimizer.state_dict()["state"]
    for index, main in enumerate(reference.mains.values()):
        assert torch.equal(state[index]["main_param"], main)
        for key in ("exp_avg", "exp_avg_sq"):
            assert state[index][key].dtype is torch.float32
            assert torch.equal(state[index][key], reference.optimizer.state[main][key])
    assert any(not torch.equal(before, param) for before, param in zip(start, net.parameters(), strict=True))


def test_fused_adams_clear_as_the_real_ones_do():
    param = nn.Parameter(torch.ones(4))
    apex, te = apex_double.FusedAdam([param]), te_double.FusedAdam([param])
    with pytest.raises(TypeError):
        apex.zero_grad(set_to_none=True)
    te.zero_grad(set_to_none=True)
    for cls in FUSED_ADAMS.values():
        with pytest.raises(RuntimeError, match="AMSGrad"):
            cls([param], amsgrad=True)
