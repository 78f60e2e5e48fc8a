"""Operands of functions of arrays that are not contiguous: kernels read them by their strides, or
contiguous copies are made. On the emulated machine, which gets the memory that views span; on a
GPU, where there is one, views of torch and CuPy."""

import contextlib
import functools

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, _strides, ops, pl
from pallas_mgpu._emulate import Emulation

BF16, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, np.float32))


def described(view):
    """As a function of arrays sees a view in the memory of a GPU."""
    strides = tuple(0 if n == 1 else s // view.itemsize for n, s in zip(view.shape, view.strides))
    dense = view.flags.c_contiguous
    return plgpu.ArrayInfo(view.shape, view.dtype, None, True, None if dense else strides)


def spans(view):
    """The memory from the first element of a view to the last."""
    n = 1 + sum((d - 1) * s // view.itemsize for d, s in zip(view.shape, view.strides))
    return np.lib.stride_tricks.as_strided(view, (n,), (view.itemsize,)).copy()


def emulated(target, views, shape, dtype):
    """The result of a kernel, maybe one of arrays of other shapes, or of transposed ones, for views
    as they lie in memory. It has no sizes of the call."""
    infos, shapes = [described(x) for x in views], [None] * len(views)
    if isinstance(target, _strides.Transposed):
        infos = target._given(infos)
        target = target.target
    if isinstance(target, _core.Reshaped):
        target, shapes = target.kernel, target.operands
    assert isinstance(target, _core.Kernel)
    infos = [
        x.replace(shape=s or x.shape, element_strides=_strides.reshaped(x, s))
        for x, s in zip(infos, shapes)
    ]
    memory = [np.ascontiguousarray(spans(x)) for x in views]
    out = np.zeros(shape, dtype)
    addresses = [x.ctypes.data for x in (*memory, out)]
    Emulation(target.lower(*infos).graph)(None, addresses, True, [])
    return out


def normal(rng, *shape, dtype=BF16):
    return (rng.standard_normal(shape) / 2).astype(dtype)


MATRICES = {
    "rows of wider arrays": lambda x: (x(70, 320)[:, 64:192], x(128, 200)[:, :96]),
    "transposed": lambda x: (x(128, 72).T, x(96, 128).T),
    "transposed and wider": lambda x: (x(70, 128), x(96, 256)[:, :128].T),
    "heads before rows": lambda x: (x(2, 40, 3, 64).swapaxes(1, 2), x(2, 3, 64, 72)),
    "heads of both": lambda x: (
        x(2, 40, 3, 64).swapaxes(1, 2),
        x(2, 50, 3, 64).transpose(0, 2, 3, 1),
    ),
    "one of them shared": lambda x: (x(2, 40, 3, 64).swapaxes(1, 2), x(3, 64, 72)),
    "a shared matrix": lambda x: (x(2, 40, 3, 64).swapaxes(1, 2), x(64, 72)),
    "three dims": lambda x: (x(3, 2, 2, 16, 64).transpose(2, 0, 1, 3, 4), x(2, 3, 2, 64, 72)),
    "every other matrix": lambda x: (x(6, 40, 64)[::2], x(6, 64, 72)[1::2]),
    "one matrix for all": lambda x: (np.broadcast_to(x(40, 64), (3, 40, 64)), x(3, 64, 72)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_products_read_views(name, rng):
    """Of any strides between rows and between matrices, also of transposed ones."""
    plgpu.clear_caches()
    a, b = MATRICES[name](functools.partial(normal, rng))
    target = ops.matmul.kernel(described(a), described(b))
    want = a.astype(F32) @ b.astype(F32)
    got = emulated(target, (a, b), want.shape, BF16)
    np.testing.assert_allclose(got.astype(F32), want, rtol=2e-2, atol=2e-2)


def attention(q, k, v):
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("form", ["heads first", "packed", "part of a cache"])
def test_attention_reads_views(form, rng):
    plgpu.clear_caches()
    x = functools.partial(normal, rng)
    q, k, v = {
        "heads first": lambda: [x(1, 2, n, 64).swapaxes(1, 2) for n in (70, 90, 90)],
        "packed": lambda: x(1, 70, 3, 2, 64).transpose(2, 0, 1, 3, 4),
        "part of a cache": lambda: [x(1, 70, 2, 64), *(x(1, 128, 2, 64)[:, :90] for _ in "kv")],
    }[form]()
    target = ops.attention.kernel(*map(described, (q, k, v)))
    got = emulated(target, (q, k, v), q.shape, BF16)
    want = attention(*(x.astype(F32) for x in (q, k, v)))
    np.testing.assert_allclose(got.astype(F32), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(9, 128), (3, 5, 256), (4, 1000)])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_rows_of_wider_arrays(shape, dtype, rng):
    plgpu.clear_caches()
    x = normal(rng, *shape[:-1], shape[-1] + 24, dtype=dtype)[..., : shape[-1]]
    got = emulated(ops.softmax.kernel(described(x)), (x,), shape, dtype)
    e = np.exp(x.astype(F32))
    np.testing.assert_allclose(got.astype(F32), e / e.sum(-1, keepdims=True), rtol=1e-2)


def test_sizes_at_run_time_of_views(rng):
    """Strides are a part of the program, the extent of the first dimension is not."""
    rows = plgpu.dim("M", max=4096)

    def body(x, o):
        i = pl.program_id(0)
        o[pl.ds(i * 8, 8)] = x[pl.ds(i * 8, 8)] * 2

    kernel = plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((rows, 64), F32),
        grid=(rows // 8,),
        grid_names=("i",),
        in_shapes=((rows, 64),),
    )
    graphs = set()
    for m in (16, 40):
        x = normal(rng, m, 96, dtype=F32)[:, 16:80]
        graph = kernel.lower(described(x)).graph
        graphs.add(graph.text())
        memory, out = spans(x), np.zeros((m, 64), F32)
        Emulation(graph)(None, [memory.ctypes.data, out.ctypes.data], True, [0, m, 8, m // 8])
        np.testing.assert_array_equal(out, x * 2)
    assert len(graphs) == 1


def test_when_copies_are_made(rng):
    """Where the elements of a row are apart, where rows begin between multiples of 16 bytes, and
    for the fifth combination of strides."""
    plgpu.clear_caches()
    x = functools.partial(normal, rng)
    softmax, matmul = ops.softmax.kernel, ops.matmul.kernel
    made = [softmax(described(x(8, n + 64)[:, :64])) for n in (8, 16, 24, 32, 40)]
    assert all(isinstance(k, _core.Kernel) for k in made[:4])
    assert isinstance(made[4], _strides.OfCopies)
    assert isinstance(softmax(described(x(64, 8).T)), _strides.OfCopies)
    assert isinstance(softmax(described(x(8, 128)[:, ::2])), _strides.OfCopies)
    assert isinstance(matmul(described(x(64, 71)[:, :64]), described(x(64, 64))), _strides.OfCopies)
    assert isinstance(matmul(described(x(64, 72)[:, :64]), described(x(64, 64))), _core.Kernel)


def test_copies_are_aligned(rng):
    """The kernel is that of contiguous arrays which begin at a multiple of 16 bytes."""
    weights = normal(rng, 96, 134).astype(np.int8)[:, 3:131]
    info = described(weights).replace(aligned=False)
    x = normal(rng, 70, 128)
    target = ops.mixed_matmul.kernel(x, info)
    assert isinstance(target, _strides.OfCopies)
    want = ops.mixed_matmul.kernel(x, np.ascontiguousarray(weights))
    assert target.target is want


def test_misaligned_arrays(rng):
    """They are copied where the kernel relies on 16 bytes, and read where it does not."""
    plgpu.clear_caches()

    def chosen(f, *shapes):
        return f.maker([(shape, dtype, None, False, None) for shape, dtype in shapes], {}, {})[0]

    assert isinstance(chosen(ops.quantize, ((64, 512), BF16)), _strides.OfCopies)
    int8 = (256, 128), np.dtype(np.int8)
    assert isinstance(chosen(ops.mixed_matmul, ((64, 128), BF16), int8), _strides.OfCopies)
    assert isinstance(chosen(ops.softmax, ((64, 512), BF16)), _core.Kernel)
    angles = (50, 32), F32
    rotary = chosen(ops.rotary, ((2, 50, 4, 64), BF16), angles, angles)
    assert isinstance(rotary, _core.Kernel)


def test_arrays_that_are_written_to(rng):
    pages, new = normal(rng, 4, 16, 2, 64), normal(rng, 1, 3, 2, 64)
    table, lengths = np.arange(4, dtype=np.int32)[None], np.zeros(1, np.int32)
    others = new, new, table, lengths
    wider = normal(rng, 4, 16, 2, 128)[..., :64]
    with pytest.raises(ValueError, match="append_pages: argument 1, which is written to"):
        ops.append_pages.kernel(*map(described, (pages, wider, *others)))


def test_strides_of_other_shapes():
    assert _core.restride((4, 6), (10, 1), (2, 2, 6)) == (20, 10, 1)
    assert _core.restride((2, 3, 8), (48, 16, 1), (6, 8)) == (16, 1)
    assert _core.restride((2, 1, 3, 8), (24, 5, 8, 1), (48,)) is None
    assert _core.restride((3, 4), (0, 1), (1, 3, 2, 2)) == (0, 0, 2, 1)
    for shape, strides, to in (
        ((4, 6), (10, 1), (24,)),
        ((4, 6), (10, 1), (8, 3)),
        ((4,), (1, 2), (4,)),
    ):
        with pytest.raises(ValueError, match="no array of shape"):
            _core.restride(shape, strides, to)


# ---- on a GPU ------------------------------------------------------------------------------------


def wider(x, n=16):
    """The same numbers, in rows of a wider tensor."""
    import torch

    whole = torch.full((*x.shape[:-1], x.shape[-1] + 2 * n), 99.0, device="cuda").to(x.dtype)
    whole[..., n:-n] = x
    return whole[..., n:-n]


def misaligned(x):
    """The same numbers, contiguous from the second element of a tensor on."""
    import torch

    whole = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")
    whole[1:] = x.flatten()
    return whole[1:].view(x.shape)


def swapped(x, i=-1, j=-2):
    """The same numbers, with two dimensions exchanged in memory."""
    return x.transpose(i, j).contiguous().transpose(i, j)


def _operands():
    """Calls by name: a function of arrays, operands, options."""
    import torch

    def x(*shape, dtype=torch.bfloat16):
        return (torch.randn(shape, device="cuda") / 2).to(dtype)

    def ints(*numbers):
        return torch.tensor(numbers, dtype=torch.int32, device="cuda")

    q, kv = x(2, 200, 8, 64), x(2, 200, 2, 64)
    scales = torch.rand(1, 256, device="cuda")
    weights = torch.randint(-127, 127, (256, 128), device="cuda", dtype=torch.int8)
    f32 = torch.float32
    table = torch.arange(26, dtype=torch.int32, device="cuda").reshape(2, 13)
    return {
        "matmul": (ops.matmul, (x(200, 128), x(128, 256)), {}),
        "matmul, float32": (ops.matmul, (x(200, 128, dtype=f32), x(128, 256, dtype=f32)), {}),
        "matmul, batches": (ops.matmul, (x(3, 4, 50, 64), x(3, 4, 64, 72)), {}),
        "matmul, one b": (ops.matmul, (x(3, 4, 50, 64), x(64, 72)), {}),
        "mixed_matmul": (ops.mixed_matmul, (x(70, 128), weights, scales), {}),
        "gated_matmul": (ops.gated_matmul, (x(200, 128), x(128, 512)), {}),
        "ragged_dot": (ops.ragged_dot, (x(200, 128), x(3, 128, 256), ints(50, 0, 150)), {}),
        "attention": (ops.attention, (q, kv, kv), {"causal": True}),
        "attention_decode": (ops.attention_decode, (q[:, :1], kv, kv), {}),
        "attention_decode, pages": (
            ops.attention_decode,
            (q[:, :1], x(26, 16, 2, 64), x(26, 16, 2, 64)),
            {"page_table": table, "kv_lengths": ints(199, 63)},
        ),
        "softmax": (ops.softmax, (x(300, 1000),), {}),
        "softmax, axis 0": (ops.softmax, (x(300, 1000),), {"axis": 0}),
        "layer_norm": (ops.layer_norm, (x(3, 70, 512), x(512), x(512)), {}),
        "rms_norm": (ops.rms_norm, (x(3, 70, 512), x(512)), {}),
        "rotary": (ops.rotary, (x(2, 50, 4, 64), x(50, 32, dtype=f32), x(50, 32, dtype=f32)), {}),
        "quantize": (ops.quantize, (x(70, 512),), {}),
        "gated_linear_unit": (ops.gated_linear_unit, (x(70, 512),), {}),
        "cross_entropy": (ops.cross_entropy, (x(70, 1000), ints(*range(70))), {}),
    }


CALLS = (
    "matmul", "matmul, float32", "matmul, batches", "matmul, one b", "mixed_matmul",
    "gated_matmul", "ragged_dot", "attention", "attention_decode", "attention_decode, pages",
    "softmax", "softmax, axis 0", "layer_norm", "rms_norm", "rotary", "quantize",
    "gated_linear_unit", "cross_entropy",
)  # fmt: skip


def _same(got, want):
    import torch

    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want))):
        assert x.shape == y.shape and x.is_contiguous()
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_functions_take_views_of_torch(name):
    """Each operand with more than one dim as part of wider rows, with rows at odd multiples,
    transposed, as every other row of a longer array; all together; on a stream, in a graph."""
    torch = pytest.importorskip("torch")
    f, operands, options = _operands()[name]
    want = f(*operands, **options)
    forms = {
        "wider": wider,
        "at odd multiples": lambda x: wider(x, 3),
        "swapped": swapped,
        "outer dims swapped": lambda x: swapped(x, 0, min(1, x.ndim - 2)),
        "misaligned": misaligned,
        "every other": lambda x: torch.stack([x, x], 1).flatten(0, 1)[::2],
    }
    for form in forms.values():
        for i in [*range(len(operands)), None]:
            given = [
                form(x) if i in (k, None) and x.ndim > 1 else x for k, x in enumerate(operands)
            ]
            _same(f(*given, **options), want)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    got = f(*given, **options, stream=side.cuda_stream)
    torch.cuda.current_stream().wait_stream(side)
    _same(got, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = f(*given, **options)
    graph.replay()
    _same(got, want)


@pytest.mark.gpu
def test_expanded_tensors():
    torch = pytest.importorskip("torch")
    a, b = (torch.randn(3, 64, 64, device="cuda").bfloat16() for _ in "ab")
    one = a[0].expand(3, 64, 64)
    torch.testing.assert_close(ops.matmul(one, b), ops.matmul(one.contiguous(), b))
    row = a[0, :1].expand(40, 64)
    torch.testing.assert_close(ops.softmax(row), ops.softmax(row.contiguous()))
    kv = a[None, :, :1].expand(2, 3, 4, 64)
    q = torch.randn(2, 5, 8, 64, device="cuda").bfloat16()
    torch.testing.assert_close(ops.attention(q, kv, kv), ops.attention(q, *[kv.contiguous()] * 2))


@pytest.mark.gpu
def test_pages_in_place():
    """Keys and values that are parts of one projection; caches must be contiguous."""
    torch = pytest.importorskip("torch")
    qkv = torch.randn(2, 3, 3, 2, 64, device="cuda").bfloat16()
    _, k, v = qkv.unbind(2)
    table = torch.arange(4, dtype=torch.int32, device="cuda").reshape(2, 2)
    lengths = torch.tensor([5, 20], dtype=torch.int32, device="cuda")
    pages = [torch.zeros(4, 16, 2, 64, device="cuda").bfloat16() for _ in range(4)]
    ops.append_pages(*pages[:2], k, v, table, lengths)
    ops.append_pages(*pages[2:], k.contiguous(), v.contiguous(), table, lengths)
    assert torch.equal(pages[0], pages[2]) and torch.equal(pages[1], pages[3])
    assert pages[0].any()
    whole = torch.zeros(4, 16, 2, 128, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="argument 0, which is written to, is not contiguous"):
        ops.append_pages(whole[..., :64], pages[1], k, v, table, lengths)
    with pytest.raises(ValueError, match=r"out\[0\].*contiguous"):
        ops.softmax(pages[0], out=whole[..., :64])


@pytest.mark.gpu
def test_views_of_cupy():
    cupy = pytest.importorskip("cupy")
    a, b = (cupy.random.standard_normal((96, 160)).astype("float16") for _ in "ab")
    for x, y in ((a[:, :64], b[:64]), (a[:, :64], b[:, :64].T), (a[::2, 1:65], b[:64, ::2])):
        want = x.astype("f4") @ y.astype("f4")
        cupy.testing.assert_allclose(ops.matmul(x, y).astype("f4"), want, rtol=1e-2, atol=5e-2)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        got = ops.softmax(a[:, ::2])
    stream.synchronize()
    want = ops.softmax(cupy.ascontiguousarray(a[:, ::2]))
    cupy.testing.assert_array_equal(got, want)
    for x in (a[:, ::-1], a[::-1]):
        with contextlib.suppress(ValueError):
            cupy.testing.assert_array_equal(ops.softmax(x), ops.softmax(x.copy()))


@pytest.mark.gpu
def test_gradients_of_views():
    torch = pytest.importorskip("torch")
    a, w = (torch.randn(64, 64, device="cuda", requires_grad=True) for _ in "aw")
    ops.matmul(a.T, w[:, ::2]).sum().backward()
    of_a, of_w = a.grad.clone(), w.grad.clone()
    a.grad = w.grad = None
    (a.T @ w[:, ::2]).sum().backward()
    torch.testing.assert_close(of_a, a.grad, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(of_w, w.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_gradients_of_a_packed_projection():
    """Autograd keeps the parts as they lie in memory; their gradients are those of copies."""
    torch = pytest.importorskip("torch")
    qkv = torch.randn(2, 150, 3, 4, 64, device="cuda").bfloat16().requires_grad_()
    heads_first = torch.randn(2, 4, 150, 64, device="cuda").bfloat16()
    found = []
    for form in (lambda x: x, lambda x: x.contiguous()):
        qkv.grad = None
        out = ops.attention(*map(form, qkv.unbind(2)), causal=True)
        (out * form(heads_first.transpose(1, 2))).sum().backward()
        found.append((out.detach(), qkv.grad))
    for x, y in zip(*found):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
