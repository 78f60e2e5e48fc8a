from typing import Literal, overload

import numpy as np

from .._typing import A, Activation, DType, Interpret, PairMask, Stream
from ._configs import AttentionBackwardConfig as AttentionBackwardConfig
from ._configs import AttentionConfig as AttentionConfig
from ._configs import AttentionDecodeConfig as AttentionDecodeConfig
from ._configs import FewRowsConfig as FewRowsConfig
from ._configs import GatedBackwardConfig as GatedBackwardConfig
from ._configs import MatmulConfig as MatmulConfig
from ._configs import MixedConfig as MixedConfig
from ._configs import MlaConfig as MlaConfig
from ._configs import MmaAttentionConfig as MmaAttentionConfig
from ._configs import MmaConfig as MmaConfig
from ._configs import NormBackwardConfig as NormBackwardConfig
from ._configs import NormConfig as NormConfig
from ._configs import RaggedConfig as RaggedConfig
from ._configs import SampleConfig as SampleConfig
from ._configs import TensorMemoryAttentionConfig as TensorMemoryAttentionConfig
from ._configs import TensorMemoryBackwardConfig as TensorMemoryBackwardConfig
from ._configs import TensorMemoryConfig as TensorMemoryConfig
from ._configs import TensorMemoryMixedConfig as TensorMemoryMixedConfig

@overload
def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    block_mask: np.ndarray | None = None,
    mask_data: np.ndarray | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    q_lengths: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    q_scale: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    mask: PairMask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    config: AttentionConfig | TensorMemoryAttentionConfig | MmaAttentionConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def attention(
    q: A,
    k: A,
    v: A,
    *,
    bias: A | None = None,
    cu_seqlens_q: A | None = None,
    cu_seqlens_k: A | None = None,
    seed: A | None = None,
    block_mask: A | None = None,
    mask_data: A | None = None,
    cos: A | None = None,
    sin: A | None = None,
    kv_lengths: A | None = None,
    q_lengths: A | None = None,
    page_table: A | None = None,
    q_scale: A | None = None,
    k_scale: A | None = None,
    v_scale: A | None = None,
    mask: PairMask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    config: AttentionConfig | TensorMemoryAttentionConfig | MmaAttentionConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    block_mask: np.ndarray | None = None,
    mask_data: np.ndarray | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    kv_lengths: np.ndarray | None = None,
    q_lengths: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    q_scale: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    mask: PairMask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[True],
    config: AttentionConfig | TensorMemoryAttentionConfig | MmaAttentionConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def attention(
    q: A,
    k: A,
    v: A,
    *,
    bias: A | None = None,
    cu_seqlens_q: A | None = None,
    cu_seqlens_k: A | None = None,
    seed: A | None = None,
    block_mask: A | None = None,
    mask_data: A | None = None,
    cos: A | None = None,
    sin: A | None = None,
    kv_lengths: A | None = None,
    q_lengths: A | None = None,
    page_table: A | None = None,
    q_scale: A | None = None,
    k_scale: A | None = None,
    v_scale: A | None = None,
    mask: PairMask | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    return_lse: Literal[True],
    config: AttentionConfig | TensorMemoryAttentionConfig | MmaAttentionConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def layer_norm(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-5,
    out_dtype: DType | None = None,
    config: NormConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def layer_norm(
    x: A,
    weight: A | None = None,
    bias: A | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-5,
    out_dtype: DType | None = None,
    config: NormConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def rms_norm(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-6,
    out_dtype: DType | None = None,
    config: NormConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def rms_norm(
    x: A,
    weight: A | None = None,
    *,
    axis: int | tuple[int, ...] = -1,
    eps: float = 1e-6,
    out_dtype: DType | None = None,
    config: NormConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def softmax(
    x: np.ndarray,
    *,
    axis: int | tuple[int, ...] = -1,
    out_dtype: DType | None = None,
    config: NormConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def softmax(
    x: A,
    *,
    axis: int | tuple[int, ...] = -1,
    out_dtype: DType | None = None,
    config: NormConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    activation: Activation | None = None,
    out_dtype: DType | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: np.ndarray | None = None,
    scale_b: np.ndarray | None = None,
    config: MatmulConfig | FewRowsConfig | TensorMemoryConfig | MmaConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    accumulate: bool = False,
    precision: Literal["bf16x3", "tf32"] = "bf16x3",
    return_product: Literal[False] = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def matmul(
    a: np.ndarray,
    b: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    activation: Activation | None = None,
    out_dtype: DType | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: np.ndarray | None = None,
    scale_b: np.ndarray | None = None,
    config: MatmulConfig | FewRowsConfig | TensorMemoryConfig | MmaConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    accumulate: bool = False,
    precision: Literal["bf16x3", "tf32"] = "bf16x3",
    return_product: Literal[True],
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def matmul(
    a: A,
    b: A,
    *,
    bias: A | None = None,
    activation: Activation | None = None,
    out_dtype: DType | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: A | None = None,
    scale_b: A | None = None,
    config: MatmulConfig | FewRowsConfig | TensorMemoryConfig | MmaConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    accumulate: bool = False,
    precision: Literal["bf16x3", "tf32"] = "bf16x3",
    return_product: Literal[False] = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def matmul(
    a: A,
    b: A,
    *,
    bias: A | None = None,
    activation: Activation | None = None,
    out_dtype: DType | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    scale_a: A | None = None,
    scale_b: A | None = None,
    config: MatmulConfig | FewRowsConfig | TensorMemoryConfig | MmaConfig | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    accumulate: bool = False,
    precision: Literal["bf16x3", "tf32"] = "bf16x3",
    return_product: Literal[True],
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def mixed_matmul(
    x: np.ndarray,
    weights: np.ndarray,
    scales: np.ndarray | None = None,
    *,
    out_dtype: DType | None = None,
    config: MixedConfig | TensorMemoryMixedConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def mixed_matmul(
    x: A,
    weights: A,
    scales: A | None = None,
    *,
    out_dtype: DType | None = None,
    config: MixedConfig | TensorMemoryMixedConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def ragged_dot(
    lhs: np.ndarray,
    rhs: np.ndarray,
    group_sizes: np.ndarray,
    *,
    transpose_rhs: bool = False,
    scale_lhs: np.ndarray | None = None,
    scale_rhs: np.ndarray | None = None,
    out_dtype: DType | None = None,
    config: RaggedConfig | TensorMemoryConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def ragged_dot(
    lhs: A,
    rhs: A,
    group_sizes: A,
    *,
    transpose_rhs: bool = False,
    scale_lhs: A | None = None,
    scale_rhs: A | None = None,
    out_dtype: DType | None = None,
    config: RaggedConfig | TensorMemoryConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def transposed_ragged_dot(
    lhs: np.ndarray,
    rhs: np.ndarray,
    group_sizes: np.ndarray,
    *,
    out_dtype: DType | None = None,
    config: RaggedConfig | TensorMemoryConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def transposed_ragged_dot(
    lhs: A,
    rhs: A,
    group_sizes: A,
    *,
    out_dtype: DType | None = None,
    config: RaggedConfig | TensorMemoryConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def softmax_backward(
    grad: np.ndarray,
    y: np.ndarray,
    *,
    axis: int = -1,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def softmax_backward(
    grad: A,
    y: A,
    *,
    axis: int = -1,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def column_sums(
    x: np.ndarray,
    *,
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def column_sums(
    x: A,
    *,
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def rms_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    add: np.ndarray | None = None,
    eps: float = 1e-6,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def rms_norm_backward(
    grad: A,
    x: A,
    weight: A,
    *,
    add: A | None = None,
    eps: float = 1e-6,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def rms_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: None = None,
    *,
    add: np.ndarray | None = None,
    eps: float = 1e-6,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def rms_norm_backward(
    grad: A,
    x: A,
    weight: None = None,
    *,
    add: A | None = None,
    eps: float = 1e-6,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def layer_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    add: np.ndarray | None = None,
    bias: Literal[True],
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
@overload
def layer_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    add: np.ndarray | None = None,
    bias: Literal[False] = False,
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def layer_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: None = None,
    *,
    add: np.ndarray | None = None,
    bias: Literal[True],
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def layer_norm_backward(
    grad: np.ndarray,
    x: np.ndarray,
    weight: None = None,
    *,
    add: np.ndarray | None = None,
    bias: Literal[False] = False,
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def layer_norm_backward(
    grad: A,
    x: A,
    weight: A,
    *,
    add: A | None = None,
    bias: Literal[True],
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[A, A, A]: ...
@overload
def layer_norm_backward(
    grad: A,
    x: A,
    weight: A,
    *,
    add: A | None = None,
    bias: Literal[False] = False,
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def layer_norm_backward(
    grad: A,
    x: A,
    weight: None = None,
    *,
    add: A | None = None,
    bias: Literal[True],
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def layer_norm_backward(
    grad: A,
    x: A,
    weight: None = None,
    *,
    add: A | None = None,
    bias: Literal[False] = False,
    eps: float = 1e-5,
    config: NormBackwardConfig | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def attention_decode(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    kv_lengths: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    tree: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    config: AttentionDecodeConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def attention_decode(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    kv_lengths: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    tree: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    config: AttentionDecodeConfig | None = None,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def attention_decode(
    q: A,
    k: A,
    v: A,
    *,
    kv_lengths: A | None = None,
    page_table: A | None = None,
    sinks: A | None = None,
    tree: A | None = None,
    k_scale: A | None = None,
    v_scale: A | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    config: AttentionDecodeConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def attention_decode(
    q: A,
    k: A,
    v: A,
    *,
    kv_lengths: A | None = None,
    page_table: A | None = None,
    sinks: A | None = None,
    tree: A | None = None,
    k_scale: A | None = None,
    v_scale: A | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    config: AttentionDecodeConfig | None = None,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def mla_decode(
    q: np.ndarray,
    cache: np.ndarray,
    *,
    kv_lengths: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    value_dim: int = 512,
    causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    config: MlaConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def mla_decode(
    q: np.ndarray,
    cache: np.ndarray,
    *,
    kv_lengths: np.ndarray | None = None,
    page_table: np.ndarray | None = None,
    value_dim: int = 512,
    causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
    config: MlaConfig | None = None,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def mla_decode(
    q: A,
    cache: A,
    *,
    kv_lengths: A | None = None,
    page_table: A | None = None,
    value_dim: int = 512,
    causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    config: MlaConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def mla_decode(
    q: A,
    cache: A,
    *,
    kv_lengths: A | None = None,
    page_table: A | None = None,
    value_dim: int = 512,
    causal: bool = False,
    scale: float | None = None,
    return_lse: Literal[True],
    config: MlaConfig | None = None,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def block_mask(
    q: np.ndarray,
    k: np.ndarray,
    *,
    mask_data: np.ndarray | None = None,
    mask: PairMask,
    by_batch: bool = False,
    by_head: bool = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def block_mask(
    q: A,
    k: A,
    *,
    mask_data: A | None = None,
    mask: PairMask,
    by_batch: bool = False,
    by_head: bool = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def merge_attention(
    o: np.ndarray,
    lse: np.ndarray,
    *,
    return_lse: Literal[False] = False,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def merge_attention(
    o: np.ndarray,
    lse: np.ndarray,
    *,
    return_lse: Literal[True],
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def merge_attention(
    o: A,
    lse: A,
    *,
    return_lse: Literal[False] = False,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def merge_attention(
    o: A,
    lse: A,
    *,
    return_lse: Literal[True],
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def append_pages(
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    page_table: np.ndarray,
    lengths: np.ndarray,
    *,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def append_pages(
    k_pages: A,
    v_pages: A,
    k: A,
    v: A,
    page_table: A,
    lengths: A,
    *,
    cos: A | None = None,
    sin: A | None = None,
    k_scale: A | None = None,
    v_scale: A | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def attention_backward(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias_gradient: Literal[False] = False,
    config: AttentionBackwardConfig | TensorMemoryBackwardConfig | None = None,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
@overload
def attention_backward(
    grad: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seed: np.ndarray | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias_gradient: Literal[True],
    config: AttentionBackwardConfig | TensorMemoryBackwardConfig | None = None,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]: ...
@overload
def attention_backward(
    grad: A,
    q: A,
    k: A,
    v: A,
    o: A,
    lse: A,
    *,
    bias: A | None = None,
    cu_seqlens_q: A | None = None,
    cu_seqlens_k: A | None = None,
    seed: A | None = None,
    cos: A | None = None,
    sin: A | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias_gradient: Literal[False] = False,
    config: AttentionBackwardConfig | TensorMemoryBackwardConfig | None = None,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: tuple[A, A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A, A]: ...
@overload
def attention_backward(
    grad: A,
    q: A,
    k: A,
    v: A,
    o: A,
    lse: A,
    *,
    bias: A | None = None,
    cu_seqlens_q: A | None = None,
    cu_seqlens_k: A | None = None,
    seed: A | None = None,
    cos: A | None = None,
    sin: A | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bottom_right: bool = False,
    softcap: float | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    bias_gradient: Literal[True],
    config: AttentionBackwardConfig | TensorMemoryBackwardConfig | None = None,
    deterministic: bool = False,
    interpret: Interpret = None,
    out: tuple[A, A, A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A, A, A]: ...
@overload
def gated_linear_unit(
    gate: np.ndarray,
    up: np.ndarray | None = None,
    *,
    activation: str = "silu",
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def gated_linear_unit(
    gate: A,
    up: A | None = None,
    *,
    activation: str = "silu",
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def rotary(
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    inverse: bool = False,
    eps: float = 1e-6,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def rotary(
    x: A,
    cos: A,
    sin: A,
    weight: A | None = None,
    *,
    inverse: bool = False,
    eps: float = 1e-6,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def sample(
    logits: np.ndarray,
    seed: np.ndarray,
    *,
    top_k: int | np.ndarray | None = None,
    top_p: float | np.ndarray | None = None,
    temperature: float | np.ndarray = 1.0,
    config: SampleConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def sample(
    logits: A,
    seed: A,
    *,
    top_k: int | A | None = None,
    top_p: float | A | None = None,
    temperature: float | A = 1.0,
    config: SampleConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def cross_entropy(
    logits: np.ndarray,
    targets: np.ndarray,
    *,
    ignore_index: int = -100,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def cross_entropy(
    logits: A,
    targets: A,
    *,
    ignore_index: int = -100,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def cross_entropy_backward(
    grad: np.ndarray,
    logits: np.ndarray,
    targets: np.ndarray,
    lse: np.ndarray,
    *,
    ignore_index: int = -100,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def cross_entropy_backward(
    grad: A,
    logits: A,
    targets: A,
    lse: A,
    *,
    ignore_index: int = -100,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def gated_linear_unit_backward(
    grad: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    *,
    activation: str = "silu",
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def gated_linear_unit_backward(
    grad: np.ndarray,
    gate: np.ndarray,
    up: None = None,
    *,
    activation: str = "silu",
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def gated_linear_unit_backward(
    grad: A,
    gate: A,
    up: A,
    *,
    activation: str = "silu",
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def gated_linear_unit_backward(
    grad: A,
    gate: A,
    up: None = None,
    *,
    activation: str = "silu",
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def gated_matmul_backward(
    grad: np.ndarray,
    products: np.ndarray,
    w: np.ndarray,
    *,
    activation: str = "silu",
    transpose_b: bool = False,
    config: GatedBackwardConfig | None = None,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def gated_matmul_backward(
    grad: A,
    products: A,
    w: A,
    *,
    activation: str = "silu",
    transpose_b: bool = False,
    config: GatedBackwardConfig | None = None,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def quantize(
    x: np.ndarray,
    *,
    dtype: DType = "float8_e4m3fn",
    block: int | tuple[int, int] | None = None,
    mx: bool = False,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def quantize(
    x: A,
    *,
    dtype: DType = "float8_e4m3fn",
    block: int | tuple[int, int] | None = None,
    mx: bool = False,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def dequantize(
    q: np.ndarray,
    scales: np.ndarray,
    *,
    block: int | tuple[int, int] | None = None,
    out_dtype: DType = "bfloat16",
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def dequantize(
    q: A,
    scales: A,
    *,
    block: int | tuple[int, int] | None = None,
    out_dtype: DType = "bfloat16",
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def add_rms_norm(
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def add_rms_norm(
    x: A,
    residual: A,
    weight: A | None = None,
    *,
    eps: float = 1e-6,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def add_layer_norm(
    x: np.ndarray,
    residual: np.ndarray,
    weight: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    *,
    eps: float = 1e-5,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def add_layer_norm(
    x: A,
    residual: A,
    weight: A | None = None,
    bias: A | None = None,
    *,
    eps: float = 1e-5,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def quantize_by_scale(
    x: np.ndarray,
    scale: np.ndarray,
    *,
    dtype: DType = "float8_e4m3fn",
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def quantize_by_scale(
    x: A,
    scale: A,
    *,
    dtype: DType = "float8_e4m3fn",
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def rms_norm_quantize(
    x: np.ndarray,
    weight: np.ndarray | None = None,
    *,
    eps: float = 1e-6,
    dtype: DType = "float8_e4m3fn",
    block: int | tuple[int, int] | None = None,
    mx: bool = False,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def rms_norm_quantize(
    x: A,
    weight: A | None = None,
    *,
    eps: float = 1e-6,
    dtype: DType = "float8_e4m3fn",
    block: int | tuple[int, int] | None = None,
    mx: bool = False,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def gated_linear_unit_quantize(
    gate: np.ndarray,
    up: np.ndarray | None = None,
    *,
    activation: str = "silu",
    dtype: DType = "float8_e4m3fn",
    block: int | tuple[int, int] | None = None,
    mx: bool = False,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def gated_linear_unit_quantize(
    gate: A,
    up: A | None = None,
    *,
    activation: str = "silu",
    dtype: DType = "float8_e4m3fn",
    block: int | tuple[int, int] | None = None,
    mx: bool = False,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def rotary_backward(
    grad: np.ndarray,
    x: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    weight: np.ndarray,
    *,
    eps: float = 1e-6,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def rotary_backward(
    grad: A,
    x: A,
    cos: A,
    sin: A,
    weight: A,
    *,
    eps: float = 1e-6,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def activation_backward(
    grad: np.ndarray,
    x: np.ndarray,
    *,
    activation: str = "silu",
    of_result: bool = False,
    bias: Literal[False] = False,
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def activation_backward(
    grad: A,
    x: A,
    *,
    activation: str = "silu",
    of_result: bool = False,
    bias: Literal[False] = False,
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def activation_backward(
    grad: np.ndarray,
    x: np.ndarray,
    *,
    activation: str = "silu",
    of_result: bool = False,
    bias: Literal[True],
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def activation_backward(
    grad: A,
    x: A,
    *,
    activation: str = "silu",
    of_result: bool = False,
    bias: Literal[True],
    out_dtype: DType | None = None,
    interpret: Interpret = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
@overload
def adamw(
    param: np.ndarray,
    grad: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    settings: np.ndarray,
    *,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...
@overload
def adamw(
    param: A,
    grad: A,
    first: A,
    second: A,
    settings: A,
    *,
    interpret: Interpret = None,
    out: tuple[A, A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A, A]: ...
@overload
def gated_matmul(
    x: np.ndarray,
    w: np.ndarray,
    up: np.ndarray | None = None,
    *,
    scale_b: np.ndarray | None = None,
    activation: str = "silu",
    transpose_b: bool = False,
    return_products: Literal[False] = False,
    config: MatmulConfig | MixedConfig | None = None,
    interpret: Interpret = None,
    out: np.ndarray | None = None,
    stream: Stream | None = None,
) -> np.ndarray: ...
@overload
def gated_matmul(
    x: np.ndarray,
    w: np.ndarray,
    up: np.ndarray | None = None,
    *,
    scale_b: np.ndarray | None = None,
    activation: str = "silu",
    transpose_b: bool = False,
    return_products: Literal[True],
    config: MatmulConfig | MixedConfig | None = None,
    interpret: Interpret = None,
    out: tuple[np.ndarray, np.ndarray] | None = None,
    stream: Stream | None = None,
) -> tuple[np.ndarray, np.ndarray]: ...
@overload
def gated_matmul(
    x: A,
    w: A,
    up: A | None = None,
    *,
    scale_b: A | None = None,
    activation: str = "silu",
    transpose_b: bool = False,
    return_products: Literal[False] = False,
    config: MatmulConfig | MixedConfig | None = None,
    interpret: Interpret = None,
    out: A | None = None,
    stream: Stream | None = None,
) -> A: ...
@overload
def gated_matmul(
    x: A,
    w: A,
    up: A | None = None,
    *,
    scale_b: A | None = None,
    activation: str = "silu",
    transpose_b: bool = False,
    return_products: Literal[True],
    config: MatmulConfig | MixedConfig | None = None,
    interpret: Interpret = None,
    out: tuple[A, A] | None = None,
    stream: Stream | None = None,
) -> tuple[A, A]: ...
