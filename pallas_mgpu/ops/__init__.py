"""Ready kernels, written in the public language alone."""

from .attention import AttentionConfig, attention
from .matmul import FewRowsConfig, MatmulConfig, matmul

__all__ = ["AttentionConfig", "FewRowsConfig", "MatmulConfig", "attention", "matmul"]
