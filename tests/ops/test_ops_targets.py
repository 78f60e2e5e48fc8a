"""Every op on Blackwell's targets: each kernel that a call runs compiles for sm_100a and sm_103a
without remarks and without local memory; those that need Hopper's tensor cores say so."""

import functools

import ml_dtypes
import numpy as np
import pytest
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu import ops
from pallas_mgpu._caches import clear_caches

TARGETS = ("sm_100a", "sm_103a")
bf16, f32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def zeros(*shape, dtype=bf16):
    return np.zeros(shape, dtype)


x, w, long = zeros(16, 1024), zeros(1024), zeros(2, 20000)
heads, lse = zeros(1, 256, 2, 128), zeros(1, 2, 256, dtype=f32)
few = zeros(16, dtype=f32)
angles = zeros(256, 64, dtype=f32)
targets = zeros(16, dtype=np.int32)
table, few_lengths = np.zeros((1, 2), np.int32), np.zeros(1, np.int32)
square, sizes = zeros(256, 256), np.full(2, 128, np.int32)
settings = np.asarray([0.1, 0.9, 0.99, 1e-8, 0.1, 1], f32)
memory = {"config": ops.TensorMemoryConfig()}
latent = zeros(1, 1, 16, 576)
table, few_lengths = np.zeros((1, 2), np.int32), np.zeros(1, np.int32)


def lower_half(b, h, i, j):
    return j <= i


CALLS = {
    "softmax": lambda **o: ops.softmax(x, **o),
    "softmax, long rows": lambda **o: ops.softmax(long, **o),
    "softmax, along columns": lambda **o: ops.softmax(x, axis=0, **o),
    "rms_norm": lambda **o: ops.rms_norm(x, w, **o),
    "rms_norm, odd rows": lambda **o: ops.rms_norm(x[:, :999].copy(), **o),
    "layer_norm": lambda **o: ops.layer_norm(x, w, w, **o),
    "layer_norm, long rows": lambda **o: ops.layer_norm(long, long[0], long[0], **o),
    "gated_linear_unit": lambda **o: ops.gated_linear_unit(x, x, **o),
    "rotary": lambda **o: ops.rotary(heads, angles, angles, **o),
    "rotary, with norm": lambda **o: ops.rotary(heads, angles, angles, heads[0, 0, 0], **o),
    "rotary_backward": lambda **o: ops.rotary_backward(
        heads, heads, angles, angles, heads[0, 0, 0], **o
    ),
    "add_rms_norm": lambda **o: ops.add_rms_norm(x, x, w, **o),
    "add_layer_norm": lambda **o: ops.add_layer_norm(x, x, w, w, **o),
    "merge_attention": lambda **o: ops.merge_attention(heads[None], lse[None], **o),
    "append_pages": lambda **o: ops.append_pages(
        zeros(4, 16, 2, 64), zeros(4, 16, 2, 64), *[zeros(1, 1, 2, 64)] * 2, table, few_lengths, **o
    ),
    "cross_entropy": lambda **o: ops.cross_entropy(x, targets, **o),
    "sample": lambda **o: ops.sample(x, targets[:1], top_k=5, top_p=0.9, **o),
    "column_sums": lambda **o: ops.column_sums(square, **o),
    "quantize": lambda **o: ops.quantize(x, **o),
    "quantize, mx": lambda **o: ops.quantize(x, block=32, mx=True, **o),
    "quantize, square": lambda **o: ops.quantize(square, block=(128, 128), **o),
    "quantize_by_scale": lambda **o: ops.quantize_by_scale(x, few[:1], **o),
    "rms_norm_quantize": lambda **o: ops.rms_norm_quantize(x, w, block=128, **o),
    "gated_linear_unit_quantize": lambda **o: ops.gated_linear_unit_quantize(x, x, **o),
    "dequantize": lambda **o: ops.dequantize(
        x.astype(E4M3), zeros(16, 8, dtype=f32), block=128, **o
    ),
    "block_mask": lambda **o: ops.block_mask(heads, heads, mask=lower_half, **o),
    "adamw": lambda **o: ops.adamw(*[x.astype(f32)] * 4, settings, **o),
    "softmax_backward": lambda **o: ops.softmax_backward(x, x, **o),
    "rms_norm_backward": lambda **o: ops.rms_norm_backward(x, x, w, **o),
    "layer_norm_backward": lambda **o: ops.layer_norm_backward(x, x, w, bias=True, **o),
    "gated_linear_unit_backward": lambda **o: ops.gated_linear_unit_backward(x, x, x, **o),
    "activation_backward": lambda **o: ops.activation_backward(x, x, bias=True, **o),
    "cross_entropy_backward": lambda **o: ops.cross_entropy_backward(few, x, targets, few, **o),
    "matmul": lambda **o: ops.matmul(square, square, **memory, **o),
    "matmul, odd rows": lambda **o: ops.matmul(square[:, :99].copy(), square[:99], **memory, **o),
    "attention": lambda **o: ops.attention(
        heads, heads, heads, config=ops.TensorMemoryAttentionConfig(), **o
    ),
}

BLACKWELL = CALLS | {  # configurations of other kernels than elsewhere
    "mixed_matmul": lambda **o: ops.mixed_matmul(
        square, zeros(256, 256, dtype=np.int8), config=ops.TensorMemoryMixedConfig(), **o
    ),
    "transposed_ragged_dot": lambda **o: ops.transposed_ragged_dot(
        square, square, sizes, config=ops.TensorMemoryConfig(256, False, dynamic=False), **o
    ),
}

HOPPER = {  # gaps.md has them
    "attention_backward": lambda **o: ops.attention_backward(*[heads] * 5, lse, **o),
    "attention_decode": lambda **o: ops.attention_decode(heads[:, :1].copy(), heads, heads, **o),
    "mla_decode": lambda **o: ops.mla_decode(latent, latent[0], **o),
    "ragged_dot": lambda **o: ops.ragged_dot(square, zeros(2, 256, 256), sizes, **o),
    "transposed_ragged_dot": lambda **o: ops.transposed_ragged_dot(square, square, sizes, **o),
    "mixed_matmul": lambda **o: ops.mixed_matmul(square, zeros(256, 256, dtype=np.int8), **o),
    "gated_matmul": lambda **o: ops.gated_matmul(square, square, **o),
    "gated_matmul_backward": lambda **o: ops.gated_matmul_backward(
        square[:, :128].copy(), square, square, **o
    ),
}


class Recorded:
    """A kernel that writes down what it is called with."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __call__(self, *args, **options):
        self.calls.append((self.kernel, args))
        return self.kernel(*args, **options)

    def __getattr__(self, name):
        return getattr(self.kernel, name)


@pytest.fixture
def calls(monkeypatch):
    """The kernels that run, with their arguments."""
    found, make = [], plgpu.kernel

    @functools.wraps(make)
    def recording(*args, **options):
        return Recorded(make(*args, **options), found)

    clear_caches()
    monkeypatch.setattr(plgpu, "kernel", recording)
    yield found
    clear_caches()


def of_each_op(calls):
    """One call of each op, the others with --long."""
    return only_long(calls, *(name for name in calls if "," not in name))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", of_each_op(BLACKWELL))
def test_compiled(name, calls, some):
    BLACKWELL[name](interpret=True)
    assert calls
    for kernel, args in calls:
        for target in some(TARGETS):
            used = kernel.lower(*args, target=target).resources()
            assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", HOPPER)
def test_refused(name, calls):
    """What to use instead stands in the error."""
    HOPPER[name](interpret=True)
    for target in TARGETS:
        with pytest.raises(NotImplementedError, match=r"tcgen05_mma"):
            for kernel, args in calls:
                kernel.lower(*args, target=target)


BY_NAME = {  # what an op says on such a GPU before any kernel is made
    "attention_decode": HOPPER["attention_decode"],
    "mla_decode": HOPPER["mla_decode"],
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BY_NAME)
def test_refused_by_name(name, target, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    op = name.split(",")[0]
    with pytest.raises(NotImplementedError, match=rf"^{op}: .*{target}.*; (use|pass|write)"):
        BY_NAME[name](interpret=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted({*HOPPER} - {*BY_NAME}))
def test_chosen_on_blackwell(name, calls, monkeypatch):
    """Calls without a config run kernels that the target has."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", "sm_100a")
    HOPPER[name](interpret=True)
    assert calls
    for kernel, args in calls:
        assert "target sm_100a" in kernel.lower(*args).as_text("graph")


def test_all_ops_are_here():
    called = {name.split(",")[0] for name in (*CALLS, *HOPPER)}
    assert called == {name for name in ops.__all__ if name.islower()}


# ---- GPUs without clusters -----------------------------------------------------------------------

PORTABLE = {name: call for name, call in CALLS.items() if "matmul" not in name} | {
    "matmul": lambda **o: ops.matmul(square, square, **o),
    "matmul, accumulate": lambda **o: ops.matmul(
        square, square, accumulate=True, out=square.copy(), **o
    ),
    "matmul, float8": lambda **o: ops.matmul(square.astype(E4M3), square.astype(E4M3), **o),
    "matmul, odd rows": lambda **o: ops.matmul(square[:, :99].copy(), square[:99], **o),
    "attention": lambda **o: ops.attention(heads, heads, heads, **o),
    # elsewhere these are two kernels
    **{name: HOPPER[name] for name in ("gated_matmul", "gated_matmul_backward")},
}


@pytest.mark.parametrize("target", ["sm_80", "sm_120a"])
@pytest.mark.parametrize("what", [{"up": square}, {"config": ops.MatmulConfig()}], ids=list)
def test_gated_matmul_refused_by_name(target, what, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    with pytest.raises(NotImplementedError, match=rf"^gated_matmul: .*{target}.*; pass both"):
        ops.gated_matmul(square, square, **what, interpret=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_120a"])
def test_configs_refused_by_name(target, monkeypatch):
    """Those of other GPUs, with what to use instead."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    for config in (ops.MatmulConfig(), ops.TensorMemoryConfig(), ops.FewRowsConfig()):
        message = rf"^matmul: config= has type {type(config).__name__}, .*{target}.*use MmaConfig"
        for a in (x, x[None]):
            with pytest.raises(NotImplementedError, match=message):
                ops.matmul(a, zeros(1024, 64), config=config, interpret=True)
    for config in (ops.AttentionConfig(), ops.TensorMemoryAttentionConfig()):
        with pytest.raises(NotImplementedError, match=rf"{target}.*use MmaAttentionConfig"):
            ops.attention(heads, heads, heads, config=config, interpret=True)
    with pytest.raises(NotImplementedError, match=rf"^softmax: clusters.*{target}.*cluster 1"):
        ops.softmax(x, config=ops.NormConfig(cluster=2), interpret=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.covering(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120a"])
@pytest.mark.parametrize("name", of_each_op(PORTABLE))
def test_compiled_without_clusters(name, target, calls, monkeypatch):
    """The kernels that a call chooses for the target."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    PORTABLE[name](interpret=True)
    assert calls
    for kernel, args in calls:
        low = kernel.lower(*args)
        used = low.resources()
        assert f"target {target}" in low.as_text("graph")
        assert used["spill_bytes"] == used["stack_bytes"] == 0 and not used["remarks"], used


@pytest.mark.parametrize("target", ["sm_80", "sm_120a"])
@pytest.mark.parametrize("name", sorted({*HOPPER} - {*PORTABLE}))
def test_refused_without_clusters(name, target, monkeypatch):
    """By the name of the op, with what to use instead, before any kernel is made."""
    monkeypatch.setenv("PALLAS_MGPU_TARGET", target)
    message = rf"^{name}: needs .*, which {target} lacks; (use|differentiate) .*ops\."
    with pytest.raises(NotImplementedError, match=message):
        HOPPER[name](interpret=True)
