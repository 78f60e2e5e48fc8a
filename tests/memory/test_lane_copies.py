"""Copies without a barrier (cp.async): what they bring, that it is there after the wait and not
before, groups and predicates, and what is refused."""

import re
import warnings

import ml_dtypes
import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu.machine import run as host

S, P = plgpu.ShapeDtypeStruct, plgpu.InterpretParams
BF16 = np.dtype(ml_dtypes.bfloat16)
BACKENDS = ["interpret", "emulate"]


def swizzled(row, dtype):
    return plgpu.TilingTransform((8, row)), plgpu.SwizzleTransform(row * np.dtype(dtype).itemsize)


def kernel(body, out, scratch, backend, seed=0, **options):
    how = P(backend=backend, seed=seed, detect_races=True)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=how, **options)


COPIES = {  # array, block, its start, dtype, transforms, bytes of a piece
    "aligned": ((64, 64), (64, 64), (0, 0), np.float16, (), 16),
    "a part": ((128, 96), (32, 64), (64, 32), BF16, (), 16),
    "swizzled": ((64, 128), (64, 64), (0, 64), BF16, swizzled(64, BF16), 16),
    "swizzled 32": ((16, 64), (16, 16), (0, 16), BF16, swizzled(16, BF16), 16),
    "overhangs": ((50, 72), (64, 64), (32, 24), np.float32, swizzled(32, np.float32), 16),
    "8 bytes": ((16, 20), (16, 16), (0, 4), np.float16, (), 8),
    "4 bytes": ((16, 18), (16, 16), (0, 2), np.float16, (), 4),
    "by loads": ((16, 17), (16, 16), (0, 1), np.float16, (), 0),
    "bytes": ((32, 33), (32, 32), (0, 1), np.int8, (), 0),
    "vector": ((1000,), (256,), (800,), np.int32, (), 16),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", COPIES)
def test_copies(name, backend, rng):
    """What lies outside of the array is zeros; pieces are as large as alignment allows."""
    shape, block, start, dtype, transforms, piece = COPIES[name]

    def body(x, o, s):
        starts = (pl.multiple_of(jnp.int32(a), a) if a else 0 for a in start)
        plgpu.copy_gmem_to_smem(x.at[tuple(map(pl.ds, starts, block))], s)
        plgpu.wait_gmem_to_smem(0)
        o[...] = s[...]

    k = kernel(body, S(block, dtype), [plgpu.SMEM(block, dtype, transforms=transforms)], backend)
    x = rng.integers(-100, 100, shape).astype(dtype)
    want = np.zeros(block, dtype)
    part = x[tuple(slice(a, a + n) for a, n in zip(start, block))]
    want[tuple(slice(n) for n in part.shape)] = part
    np.testing.assert_array_equal(k(x), want)
    found = set(re.findall(r"cp_async(?:_or_zeros)?<(\d+)>\(", k.lower(x).as_text("cuda")))
    assert found == ({str(piece)} if piece else set())


def test_instructions():
    """PTX of the four forms, and of the wait; a block does not end under its copies."""

    def body(x, y, o, s, t):
        k = o[0]
        plgpu.copy_gmem_to_smem(x.at[pl.ds(k * 16, 16)], s)
        plgpu.copy_gmem_to_smem(x.at[:16], s)
        plgpu.copy_gmem_to_smem(y.at[pl.ds(k * 16, 16)], t)
        plgpu.copy_gmem_to_smem(y.at[:16], t)
        plgpu.wait_gmem_to_smem(3)
        o[0] = s[0, 0].astype(jnp.int32)

    f16 = S((40, 64), np.float16), S((40, 66), np.float16)
    smem = [plgpu.SMEM((16, x.shape[1]), np.float16) for x in f16]
    kernel = plgpu.kernel(body, out_type=S((1,), np.int32), scratch_types=smem)
    ptx = kernel.lower(*f16, target="sm_80").as_text("ptx")
    place = r" \[%r\d+\], \[%rd\d+\], "
    assert re.search("cp.async.cg.shared.global.L2::128B" + place + "16;", ptx)
    assert re.search("cp.async.ca.shared.global" + place + "4;", ptx)
    for form, n in ("cg.shared.global.L2::128B", 16), ("ca.shared.global", 4):
        read = re.search(f"cp.async.{form}{place}{n}, (%r\\d+);", ptx)[1]
        assert re.search(rf"selp\.[bu]32\s+{read}, (0, {n}|{n}, 0), ", ptx)
    assert re.findall(r"cp\.async\.(?:bulk\.)?wait_\w+(?: \d)?", ptx) == [
        "cp.async.wait_group 3",
        "cp.async.wait_group 0",
    ]


def ring(slots, steps, pending, early=0):
    """Sums steps blocks through a ring of slots. early: copies are issued before so many reads."""

    def body(x, o, s):
        def fetch(step):
            block = x.at[pl.ds(step * 16, 16)]
            plgpu.copy_gmem_to_smem(block, s.at[step % slots], predicate=step < steps)

        for step in range(slots - 1):
            fetch(jnp.int32(step))

        def add(step, total):
            plgpu.wait_gmem_to_smem(pending)
            if early:
                fetch(step + slots)
            else:
                fetch(step + slots - 1)
            return total + s[step % slots]

        o[...] = lax.fori_loop(0, steps, add, jnp.zeros((16, 64), jnp.float32))

    return body


def run_ring(body, slots, steps, backend, seed=0):
    x = np.random.default_rng(seed).integers(-50, 50, (16 * steps, 64)).astype(np.float32)
    f32 = S((16, 64), np.float32)
    got = kernel(body, f32, [plgpu.SMEM((slots, 16, 64), np.float32)], backend, seed)(x)
    np.testing.assert_array_equal(got, x.reshape(steps, 16, 64).sum(0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots, steps", [(2, 5), (3, 2), (4, 6)])
def test_ring(slots, steps, backend):
    """Empty groups count: the last steps need no waits of their own."""
    for seed in range(3):
        run_ring(ring(slots, steps, slots - 2), slots, steps, backend, seed)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pending, early", [(2, 0), (1, 1)])
def test_race(pending, early, backend):
    """A wait that leaves the copy in flight, and a copy into a slot that is read later."""
    with pytest.raises((plgpu.RaceError, ValueError)) as error:
        run_ring(ring(3, 5, pending, early), 3, 5, backend)
    if pending == 2:
        assert "wait_gmem_to_smem" in str(error.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_race_with_the_latest(backend, rng):
    """A wait covers the groups before it, not one more, whether their data happen to be there."""

    def body(x, o, s):
        for k in range(2):
            plgpu.copy_gmem_to_smem(x.at[k], s.at[k])
        plgpu.wait_gmem_to_smem(1)
        o[0] = s[0]
        o[1] = s[1]
        plgpu.wait_gmem_to_smem(0)

    x = rng.standard_normal((2, 16, 64)).astype(np.float32)
    for seed in range(16 if backend == "interpret" else 2):
        with pytest.raises(
            plgpu.RaceError, match=r"on 's' in SMEM, \[1.*\n(.*\n)*.*wait_gmem_to_sm"
        ):
            kernel(body, S(x.shape, x.dtype), [plgpu.SMEM(x.shape, x.dtype)], backend, seed)(x)


def test_no_wait(rng):
    """Each checker tells: a warning when the kernel is lowered, and an error of the run."""

    def body(x, o, s):
        plgpu.copy_gmem_to_smem(x, s)
        o[...] = s[...]

    x = rng.standard_normal((16, 64)).astype(np.float32)
    scratch = [plgpu.SMEM(x.shape, x.dtype)]
    with pytest.warns(UserWarning, match=r"load reads 's', which may still be written by.*wait_gm"):
        plgpu.kernel(body, out_type=x, scratch_types=scratch).lower(x, target="sm_80")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for backend, kind in (("interpret", ValueError), ("emulate", plgpu.RaceError)):
            with pytest.raises(kind, match="wait_gmem_to_smem"):
                kernel(body, S(x.shape, x.dtype), scratch, backend)(x)


@pytest.mark.parametrize("lost, match", [
    ("cp_async_commit();", "may still write"),
    ("cp_async_wait<0>();", "cp.async"),
    ("warpgroup_sync(wg);", "never written"),
])  # fmt: skip
def test_machine_notices(lost, match, rng):
    """The emulated machine judges by the program alone."""

    def body(x, o, s):
        plgpu.copy_gmem_to_smem(x, s)
        plgpu.wait_gmem_to_smem(0)
        o[...] = plgpu.transpose_ref(s, (1, 0))[...]  # what other lanes copied

    x = rng.standard_normal((32, 64)).astype(np.float32)
    out, scratch = S((64, 32), np.float32), [plgpu.SMEM(x.shape, x.dtype)]
    low = plgpu.kernel(body, out_type=out, scratch_types=scratch).lower(x, target="sm_80")
    (text, info), got = host.program(low), np.empty((64, 32), np.float32)
    host.run_program(text, info, [x], [got])
    np.testing.assert_array_equal(got, x.T)
    head, main = text[: text.index("__global__")], text[text.index("__global__") :]
    assert lost in main
    with pytest.raises(host.HostError, match=match):
        host.run_program(head + main.replace(lost, ""), info, [x], [got])


def test_refused():
    def copies(x, o, s):
        plgpu.copy_gmem_to_smem(x, s)

    def waits(x, o, s):
        plgpu.wait_gmem_to_smem(0)

    def alone(**how):
        return lambda x, o, s: plgpu.copy_gmem_to_smem(x, s, **how)

    x = S((64,), np.float32)

    def lower(body, target="sm_80"):
        plgpu.kernel(body, out_type=x, scratch_types=[plgpu.SMEM((64,), np.float32)]).lower(
            x, target=target
        )

    for body in (copies, waits):
        lower(body)
        for target in ("sm_90a", "sm_100a", "sm_120a"):
            with pytest.raises(ValueError, match=f"which {target} lacks.*barrier_wait") as error:
                lower(body, target)
            assert "test_lane_copies.py" in str(error.value)
    for how in ({"engine": "tma"}, {"collective_axes": "c"}, {"leader_tracked": object()}):
        with pytest.raises(ValueError, match=f"{next(iter(how))} needs a barrier"):
            lower(alone(**how))
    with pytest.raises(ValueError, match="negative"):
        lower(lambda x, o, s: plgpu.wait_gmem_to_smem(-1))
    with pytest.raises(ValueError, match="src has shape"):
        lower(lambda x, o, s: plgpu.copy_gmem_to_smem(x.at[:32], s))
