"""Ready kernels, written in the public language alone."""

from .attention import AttentionConfig, attention
from .matmul import MatmulConfig, matmul

__all__ = ["AttentionConfig", "MatmulConfig", "attention", "matmul"]
