"""Operands on the GPU that are not row-major: kernels read them by their strides. On the emulated
machine, which gets the memory that a view spans; on a GPU, where there is one, torch's views."""

import re

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu.machine import run as host


def shaped(*shape, dtype=np.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


def plain(x, o):
    o[...] = x[...] * 2


def rows(x, o):
    i = lax.axis_index("i")
    o[pl.ds(i * 16, 16)] = x[pl.ds(i * 16, 16)] * 2


def copied(x, o, smem, bar):
    plgpu.copy_gmem_to_smem(x, smem, bar)
    plgpu.barrier_wait(bar)
    o[...] = smem[...] * 2


def views(x, o):
    o[...] = (x.at[1:, ::2].T[...]).T * 2


KERNELS = {
    "plain": (plain, {}, lambda x: x * 2),
    "rows": (rows, dict(grid=(4,), grid_names=("i",)), lambda x: x * 2),
    "views": (views, {}, lambda x: x[1:, ::2] * 2),
}
VIEWS = {
    "transposed": lambda m: m[:64, :64].T,
    "columns": lambda m: m[:64, 3:67],
    "every other row": lambda m: m[::2, :64][:64],
    "every third element": lambda m: m[:64, : 64 * 3 : 3],
    "broadcast": lambda m: np.broadcast_to(m[0, :64], (64, 64)),
    "wide rows": lambda m: m[:64, :64],
}


def span(view):
    """The memory from the first element of a view to the last, and its strides in elements."""
    strides = [s // view.itemsize for s in view.strides]
    n = 1 + sum((d - 1) * s for d, s in zip(view.shape, strides))
    return np.lib.stride_tricks.as_strided(view, (n,), (view.itemsize,)).copy(), strides


def lowered(kernel, args, strides):
    """The graph of a kernel, lowered for operands of these strides."""
    text = kernel.lower(*args).as_text("traced")
    line = re.search(r"^  args .*$", text, re.M)[0]
    parts = line.split(", %")
    assert len(re.findall("gmem", line)) == 2
    first = re.sub(r"(: gmem \S+\])", rf"\1 strides {strides}", line, count=1)
    assert parts and first != line
    graph = _core.Graph.parse(text.replace(line, first))
    assert _core.Graph.parse(graph.text()).text() == graph.text()
    return graph.lower()


def run(low, memory, out):
    """On the emulated machine, with the memory that the operand spans."""
    text, info = low.cuda(line=False, catalogue=False)
    (dtype, _, *more), *others = info["params"]
    info["params"] = [(dtype, memory.shape, *more), *others]
    host.run_program(text, info, [memory], [out])


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", KERNELS)
def test_operands_are_read_by_their_strides(name, view, dtype, rng):
    body, options, want = KERNELS[name]
    x = VIEWS[view](rng.integers(-60, 60, (200, 200)).astype(dtype))
    memory, strides = span(x)
    out = want(x).astype(dtype)
    kernel = plgpu.kernel(body, out_type=shaped(*out.shape, dtype=dtype), **options)
    got = np.zeros(out.shape, dtype)
    run(lowered(kernel, [shaped(*x.shape, dtype=dtype)], strides), memory, got)
    np.testing.assert_array_equal(got, out)


@pytest.mark.parametrize("view", ["columns", "every other row", "wide rows", "transposed"])
def test_copies_by_tma(view, rng):
    """Rows whose pitch TMA can address are copied by it; an error names what it cannot."""
    m = rng.standard_normal((200, 200)).astype(np.float16)
    x = m[:64, 8:72] if view == "columns" else VIEWS[view](m)
    memory, strides = span(x)
    kernel = plgpu.kernel(
        copied,
        out_type=shaped(64, 64, dtype=np.float16),
        scratch_types=[plgpu.SMEM((64, 64), np.float16), plgpu.Barrier()],
    )
    args = [shaped(64, 64, dtype=np.float16)]
    if view == "transposed":
        try:
            low = lowered(kernel, args, strides)
        except (ValueError, NotImplementedError) as e:
            assert "GMEM" in str(e) or "TMA" in str(e)
            return
    else:
        low = lowered(kernel, args, strides)
        assert low.cuda()[1]["maps"]
    got = np.zeros((64, 64), np.float16)
    run(low, memory, got)
    np.testing.assert_array_equal(got, x * 2)


def test_reshapes_of_strided_refs_are_refused_or_right(rng):
    def flat(x, o):
        o[...] = x.reshape(64 * 64)[...]

    kernel = plgpu.kernel(flat, out_type=shaped(64 * 64))
    with pytest.raises(NotImplementedError, match="reshape.*cannot be folded"):
        lowered(kernel, [shaped(64, 64)], [200, 1])


def test_the_text_form_of_strides():
    text = plgpu.kernel(plain, out_type=shaped(4, 8)).lower(shaped(4, 8)).as_text("traced")
    for bad in ("[1]", "[1, -1]", "[1, 2, 3]"):
        with pytest.raises(ValueError):
            _core.Graph.parse(re.sub(r"(float32\[4,8\])", rf"\1 strides {bad}", text, count=1))
    with pytest.raises(ValueError, match="only operands"):
        _core.Graph.parse(re.sub(r"(out .*float32\[4,8\])", r"\1 strides [8, 1]", text, count=1))


@pytest.mark.gpu
def test_views_of_torch():
    torch = pytest.importorskip("torch")
    m = torch.randn(300, 300, device="cuda")
    for name, x in {
        "transposed": m[:64, :64].T,
        "columns": m[:64, 4:68],
        "rows": m[::2, :64][:64],
        "every third": m[:64, :192:3],
        "expanded": m[0, :64].expand(64, 64),
        "permuted": m[:64, :64].clone().T.contiguous().T,
    }.items():
        for body, options, want in KERNELS.values():
            out = want(x)
            kernel = plgpu.kernel(body, out_type=shaped(*out.shape), **options)
            assert torch.equal(kernel(x), out), name
            assert torch.equal(kernel(x.contiguous()), out), name
    with pytest.raises(ValueError, match="contiguous"):
        plgpu.kernel(plain, out_type=shaped(64, 64))(m[:64, :64], out=m[64:128, :64])
    with pytest.raises(ValueError, match="share"):
        plgpu.kernel(plain, out_type=shaped(64, 64))(
            m[:64, :64], out=m.view(-1)[8:4104].view(64, 64)
        )
    with pytest.raises(NotImplementedError, match="interpreter"):
        plgpu.kernel(plain, out_type=shaped(64, 64), interpret=True)(m[:64, :64])
