"""fusedopt: fp32 main gradients and main parameters around any torch optimizer."""

from fusedopt import backends
from fusedopt._version import __version__
from fusedopt.config import MainGradConfig
from fusedopt.optimizer import FusedMainGradOptimizer

__all__ = ["FusedMainGradOptimizer", "MainGradConfig", "__version__", "backends"]
