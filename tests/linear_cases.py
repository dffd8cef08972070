"""What the tests of fused linear layers share."""

from __future__ import annotations

import torch

from fusedopt import FusedLinear, FusedMainGradOptimizer
from tests.models import integers


def wrapped_layer(
    num_in: int = 8, num_out: int = 6, bias: bool = True, dtype: torch.dtype = torch.bfloat16
) -> tuple[FusedLinear, FusedMainGradOptimizer]:
    """Return a layer with small integers for weights, and its optimizer."""
    layer = FusedLinear(num_in, num_out, bias=bias, dtype=dtype)
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(integers(*param.shape, limit=2))
    return layer, FusedMainGradOptimizer(torch.optim.SGD(layer.named_parameters(), lr=0.1))
