"""Ready kernels, written in the public language alone."""

from .attention import AttentionConfig, attention
from .matmul import FewRowsConfig, MatmulConfig, matmul
from .norms import NormConfig, layer_norm, rms_norm, softmax

__all__ = [
    "AttentionConfig",
    "FewRowsConfig",
    "MatmulConfig",
    "NormConfig",
    "attention",
    "layer_norm",
    "matmul",
    "rms_norm",
    "softmax",
]
