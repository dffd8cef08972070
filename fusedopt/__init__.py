"""fusedopt: fp32 main gradients and main parameters around any torch optimizer."""

from fusedopt import backends, recompute
from fusedopt._version import __version__
from fusedopt.config import MainGradConfig
from fusedopt.layers.convert import convert_linears, restore_linears
from fusedopt.layers.function import MainGradFunction
from fusedopt.layers.linear import FusedLinear, fused_linear
from fusedopt.optimizer import FusedMainGradOptimizer
from fusedopt.sharding.replicas import broadcast_module

__all__ = [
    "FusedLinear",
    "FusedMainGradOptimizer",
    "MainGradConfig",
    "MainGradFunction",
    "__version__",
    "backends",
    "broadcast_module",
    "convert_linears",
    "fused_linear",
    "recompute",
    "restore_linears",
]
