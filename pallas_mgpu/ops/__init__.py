"""Ready kernels, written in the public language alone."""

from .matmul import MatmulConfig, matmul

__all__ = ["MatmulConfig", "matmul"]
