"""Ready kernels, written in the public language alone."""

from ._arguments import check_arguments as _check_arguments
from ._merged_batches import merged as _merged
from .activation_backward import activation_backward
from .adamw import adamw
from .add_norm import add_layer_norm, add_rms_norm
from .append_pages import append_pages
from .attention import (
    AttentionConfig,
    MmaAttentionConfig,
    TensorMemoryAttentionConfig,
    attention,
)
from .attention_backward import (
    AttentionBackwardConfig,
    TensorMemoryBackwardConfig,
    attention_backward,
)
from .attention_decode import AttentionDecodeConfig, attention_decode
from .block_mask import block_mask
from .cross_entropy import cross_entropy, cross_entropy_backward
from .gated import gated_linear_unit, gated_linear_unit_backward
from .gated_matmul import gated_matmul
from .gated_matmul_backward import GatedBackwardConfig, gated_matmul_backward
from .matmul import FewRowsConfig, MatmulConfig, MmaConfig, TensorMemoryConfig, matmul
from .merge_attention import merge_attention
from .mixed import MixedConfig, TensorMemoryMixedConfig, mixed_matmul
from .mla_decode import MlaConfig, mla_decode
from .norms import NormConfig, layer_norm, rms_norm, softmax
from .norms_backward import (
    NormBackwardConfig,
    column_sums,
    layer_norm_backward,
    rms_norm_backward,
    softmax_backward,
)
from .quantize import dequantize, quantize, quantize_by_scale
from .quantize_fused import gated_linear_unit_quantize, rms_norm_quantize
from .ragged import RaggedConfig, ragged_dot, transposed_ragged_dot
from .rotary import rotary, rotary_backward
from .sample import SampleConfig, sample

__all__ = [
    "AttentionBackwardConfig",
    "AttentionConfig",
    "AttentionDecodeConfig",
    "FewRowsConfig",
    "GatedBackwardConfig",
    "MatmulConfig",
    "MixedConfig",
    "MlaConfig",
    "MmaAttentionConfig",
    "MmaConfig",
    "NormBackwardConfig",
    "NormConfig",
    "RaggedConfig",
    "SampleConfig",
    "TensorMemoryAttentionConfig",
    "TensorMemoryBackwardConfig",
    "TensorMemoryConfig",
    "TensorMemoryMixedConfig",
    "activation_backward",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "append_pages",
    "attention",
    "attention_backward",
    "attention_decode",
    "block_mask",
    "column_sums",
    "cross_entropy",
    "cross_entropy_backward",
    "dequantize",
    "gated_linear_unit",
    "gated_linear_unit_backward",
    "gated_linear_unit_quantize",
    "gated_matmul",
    "gated_matmul_backward",
    "layer_norm",
    "layer_norm_backward",
    "matmul",
    "merge_attention",
    "mixed_matmul",
    "mla_decode",
    "quantize",
    "quantize_by_scale",
    "ragged_dot",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rotary",
    "rotary_backward",
    "sample",
    "softmax",
    "softmax_backward",
    "transposed_ragged_dot",
]

for _name in __all__:
    if hasattr(globals()[_name], "maker"):
        globals()[_name].maker.check = _check_arguments
        globals()[_name].maker.merged = _merged


def __dir__():
    return sorted(__all__)
