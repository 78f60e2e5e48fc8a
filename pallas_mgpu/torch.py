"""The functions of :mod:`pallas_mgpu.ops` for tensors of PyTorch.

Importing this module registers ``torch.ops.pallas_mgpu.*``. Its functions have the names, the
parameters and the defaults of those operators. They are differentiable, follow autocast and modes,
and work under ``torch.compile``, ``torch.export`` and ``torch.func``; docs/frameworks.md has the
table."""

from ._torch import (  # noqa: F401
    AsTorchKernel,
    call_recorded,
    call_special,
    has_no_memory,
    make_operator,
)
from ._torch_distributed import (
    all_gather,
    all_gather_matmul,
    all_reduce,
    all_reduce_rms_norm,
    all_to_all,
    matmul_all_reduce,
    matmul_reduce_scatter,
    ragged_all_to_all,
    reduce_scatter,
)
from ._torch_fp8 import Fp8Linear, fp8_matmul, quantize_by_scale
from ._torch_inference import (
    adamw,
    append_pages,
    attention_decode,
    gated_linear_unit_quantize,
    merge_attention,
    mla_decode,
    rms_norm_quantize,
    sample,
)
from ._torch_ops import (
    AdamW,
    add_layer_norm,
    add_rms_norm,
    attention,
    column_sums,
    cross_entropy,
    dequantize,
    gated_linear_unit,
    gated_matmul,
    layer_norm,
    linear_cross_entropy,
    matmul,
    mixed_matmul,
    quantize,
    ragged_dot,
    rms_norm,
    rotary,
    softmax,
    transposed_ragged_dot,
)

__all__ = [
    "AdamW",
    "Fp8Linear",
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_to_all",
    "append_pages",
    "attention",
    "attention_decode",
    "column_sums",
    "cross_entropy",
    "dequantize",
    "fp8_matmul",
    "gated_linear_unit",
    "gated_linear_unit_quantize",
    "gated_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "merge_attention",
    "mixed_matmul",
    "mla_decode",
    "quantize",
    "quantize_by_scale",
    "ragged_all_to_all",
    "ragged_dot",
    "reduce_scatter",
    "rms_norm",
    "rms_norm_quantize",
    "rotary",
    "sample",
    "softmax",
    "transposed_ragged_dot",
]


def __dir__():
    return sorted(__all__)
