"""The Triton kernels, compiled for an sm_90 GPU that need not be here: IEEE arithmetic and 64-bit offsets."""

import os
import re
import subprocess
import sys

import pytest

from tests.triton_cases import BLOCK

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton (Linux only)")
tl = triton.language


def compile_for_gpu(kernel, pointers, monkeypatch, tmp_path, *, numel="i64", **constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants["BLOCK"] = BLOCK
    types = {"numel": numel, **pointers, **dict.fromkeys(constants, "constexpr")}
    types = {name: types.get(name, "fp32") for name in kernel.arg_names}
    absent = {name: None for name, kind in types.items() if kind is None}
    types = {name: kind or "constexpr" for name, kind in types.items()}
    multiples = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == numel]
    aligned = {(i,): [["tt.divisibility", 16]] for i in multiples}  # of bytes, and of elements: as most weights are
    source = ASTSource(kernel, types, {**constants, **absent}, aligned)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"enable_fp_fusion": False}).asm


def assert_ieee_and_64_bit(asm):
    assert not re.findall(r"\.(?:ftz|approx|full)\b", asm["ptx"])
    block_offsets = re.findall(r"tt\.addptr .* tensor<\d+x(i\d+)>", asm["ttir"])
    assert block_offsets
    assert set(block_offsets) == {"i64"}


@pytest.mark.parametrize("dtype", ["*bf16", "*fp16", None], ids=str)
def test_step_compiles_to_the_operations_it_promises(compiled_ops, monkeypatch, tmp_path, dtype):
    names = ("main", "grad", "exp_avg", "exp_avg_sq", "correction", "grad_scale", "found_inf")
    pointers = {**dict.fromkeys(names, "*fp32"), "model": dtype}
    asm = compile_for_gpu(compiled_ops._adam_kernel, pointers, monkeypatch, tmp_path, IS_COUPLED=True)
    assert_ieee_and_64_bit(asm)
    per_thread = BLOCK // 128
    counts = {op: len(re.findall(rf"\b{op}\.rn\.f32\b", asm["ptx"])) for op in ("fma", "div", "sqrt")}
    assert counts == {"fma": 3 * per_thread, "div": 3 * per_thread, "sqrt": per_thread}
    vectors = per_thread // 4
    assert len(re.findall(r"ld\.global\.v4\.b32", asm["ptx"])) == 4 * vectors  # 16 bytes each: 4 reads
    # 3 writes, a fourth where a scale is not 1, and the parameter
    assert len(re.findall(r"st\.global\.v4\.b32", asm["ptx"])) == 4 * vectors + (dtype is not None)


@pytest.mark.parametrize("numel", ["i32", "i64"])
@pytest.mark.parametrize("dtype", ["*fp32", "*bf16", "*fp16"])
def test_scale_cast_compiles(compiled_ops, monkeypatch, tmp_path, dtype, numel):
    pointers = {"target": dtype, "source": "*fp32", "factor": "*fp32"}
    asm = compile_for_gpu(compiled_ops._scale_cast_kernel, pointers, monkeypatch, tmp_path, numel=numel)
    assert_ieee_and_64_bit(asm)
    assert len(re.findall(r"ld\.global\.v4\.b32", asm["ptx"])) == BLOCK // 128 // 4


TRAINING = """
import torch, fusedopt
from fusedopt.backends import torch_ops

def train(backend):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(33, 40), torch.nn.LayerNorm(40)).bfloat16()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    optimizer = fusedopt.FusedMainGradOptimizer(inner, backend=backend, max_grad_norm=0.5)
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer

(model, optimizer), (twin, other) = train("triton"), train("torch")
table = optimizer._buffers.buckets[0].backend
assert table.scale_cast_ is not torch_ops.scale_cast_ and table.fused_step_ is not None
for param, reference in zip(model.parameters(), twin.parameters()):
    ours, theirs = optimizer.state[param], other.state[reference]
    assert ours["step"] == theirs["step"] == 2
    for key in ("exp_avg", "exp_avg_sq"):
        assert ours[key].isfinite().all() and torch.equal(ours[key], theirs[key]), key
    entry = next(e for e in optimizer._buffers.entries if e.param is param)
    assert torch.equal(param, entry.main_param.bfloat16())
    reference_main = next(e for e in other._buffers.entries if e.param is reference).main_param
    # Two steps; in each the update, at most 2 * lr = 0.02, is off by at most 8 roundings (root, two divisions, sum,
    # product, and torch's root by one more each way), and the sum with the weight by one on either side.
    difference = (entry.main_param - reference_main).abs()
    assert (difference <= 2 * 2**-24 * (8 * 0.02 + 2 * reference_main.abs())).all(), difference.max()
print("trained")
"""


@pytest.mark.usefixtures("both_contract")
def test_a_wrapper_with_backend_triton_trains_as_with_torch():
    """The whole road, under the interpreter: self-check, clipping on the device, the fused step, the write-back."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "trained", done.stderr
