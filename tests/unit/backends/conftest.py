"""What tests of several backends share: doubles of libraries, and Triton's kernels with and without its interpreter."""

import numpy as np
import pytest
import torch

from tests.doubles.adapters import ADAPTERS
from tests.triton_cases import load_copy


@pytest.fixture(params=ADAPTERS)
def library(request):
    """The functions of one adapter, and the calls that reach its double."""
    module, install = ADAPTERS[request.param]
    with install() as calls:
        yield module, module.offer().functions, calls


@pytest.fixture(scope="module")
def ops():
    """Triton's kernels in its interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # read where @triton.jit decorates
        return load_copy("triton_ops_interpreted")


@pytest.fixture(scope="module")
def compiled_ops():
    """Triton's kernels, to be compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        return load_copy("triton_ops_compiled")


@pytest.fixture
def both_contract():
    """Skip where torch's CPU kernels were built without FMA, or the interpreter's fma rounds twice."""
    # No GPU's does. A torch built for CUDA brings its own Triton; before 3.9 the interpreter multiplied, then added.
    import triton.language
    import triton.runtime.interpreter as interpreter

    x = torch.full((64,), 1 + 2.0**-12)  # x * x needs 25 bits
    once = 2.0**-11 + 2.0**-24
    if not bool((torch.full((64,), -1.0).addcmul(x, x) == once).all()):
        pytest.skip(f"torch does not contract on this CPU ({torch.backends.cpu.get_cpu_capability()})")
    factor, minus_one = (
        interpreter.TensorHandle(t.numpy(), triton.language.float32) for t in (x, torch.full((64,), -1.0))
    )
    if not bool((interpreter.interpreter_builder.create_fma(factor, factor, minus_one).data == once).all()):
        pytest.skip(f"the fma of Triton {triton.__version__}'s interpreter rounds twice; 3.9 and later round once")


@pytest.fixture
def numpy_overflows_silently():
    """The interpreter is NumPy, which warns where hardware just makes an inf."""
    with np.errstate(all="ignore"):
        yield
