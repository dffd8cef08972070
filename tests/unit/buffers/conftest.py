"""A wrapped model, for tests of weights that are changed from outside."""

import pytest
import torch

from tests.outside_cases import LOW, Wrapped


@pytest.fixture(params=LOW.values(), ids=LOW)
def wrapped(request):
    wrapped = Wrapped(request.param)
    for main, param in zip(wrapped.main_params, wrapped.net.parameters(), strict=True):
        assert torch.isfinite(main).all()
        assert (main != param).any()  # else keeping main_param and taking the model over would be the same
        assert torch.equal(main.to(param.dtype), param)
    return wrapped
