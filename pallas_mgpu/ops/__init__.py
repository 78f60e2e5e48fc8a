"""Ready kernels, written in the public language alone."""

from .attention import AttentionConfig, attention
from .matmul import FewRowsConfig, MatmulConfig, matmul
from .mixed import MixedConfig, mixed_matmul
from .norms import NormConfig, layer_norm, rms_norm, softmax
from .ragged import RaggedConfig, ragged_dot, transposed_ragged_dot

__all__ = [
    "AttentionConfig",
    "FewRowsConfig",
    "MatmulConfig",
    "MixedConfig",
    "NormConfig",
    "RaggedConfig",
    "attention",
    "layer_norm",
    "matmul",
    "mixed_matmul",
    "ragged_dot",
    "rms_norm",
    "softmax",
    "transposed_ragged_dot",
]


def __dir__():
    return sorted(__all__)
