"""Kernels that compilers got wrong, and their neighbours: see docs/compilers.md.

Each is a function without arguments that gives the kernel, its operands and what NumPy says.
`REPRODUCTIONS` are those that showed the bugs, `KERNELS` others of the same kind: `lower` of one
is what compilers.py checks."""

import functools

import ml_dtypes
import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F16, F32, BF16 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)
E4M3, I8, I32 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8), np.dtype(np.int32)
shape = plgpu.ShapeDtypeStruct


def numbers(*dims, dtype=F16, seed=0):
    rng = np.random.default_rng([seed, *dims])
    if dtype == I8:
        return rng.integers(-8, 8, dims).astype(I8)
    return rng.standard_normal(dims).astype(dtype)


def product(a, b, transposed=False):
    exact = I32 if a.dtype == I8 else F32
    return a.astype(exact) @ (b.T if transposed else b).astype(exact)


# ---- products that ptxas 13.3 to 13.5 lost -------------------------------------------------------


def lost(m, n, k, dtype=F16, acc=F32, swizzle=128, fill="registers", transposed=False, begin=None):
    """One product of operands in SMEM. `fill`: how they come there; `transposed`: b is (n, k);
    `begin`: what the accumulator holds first."""
    dims = ((m, k), (n, k) if transposed else (k, n))
    tiled = (plgpu.TilingTransform((8, swizzle // dtype.itemsize)), plgpu.SwizzleTransform(swizzle))

    def body(a, b, o):
        def scope(sa, sb, barrier):
            if fill == "tma":
                plgpu.copy_gmem_to_smem(a, sa, barrier)
                plgpu.copy_gmem_to_smem(b, sb, barrier)
                plgpu.barrier_wait(barrier)
            else:
                sa[...] = a[...]
                sb[...] = b[...]
                plgpu.commit_smem()

            def multiply(ref):
                if begin is not None:
                    ref[...] = jnp.full((m, n), begin, acc)
                plgpu.wgmma(ref, sa, plgpu.transpose_ref(sb, (1, 0)) if transposed else sb)
                return plgpu.wgmma_accumulator_load(ref)

            o[...] = pl.run_scoped(multiply, plgpu.ACC((m, n), acc))

        pl.run_scoped(scope, *(plgpu.SMEM(d, dtype, transforms=tiled) for d in dims),
                      plgpu.Barrier(num_arrivals=2))  # fmt: skip

    kernel = plgpu.kernel(body, out_type=shape((m, n), acc))
    a, b = (numbers(*d, dtype=dtype, seed=k) for k, d in enumerate(dims))
    return kernel, (a, b), product(a, b, transposed) + (begin or 0)


# ---- A in registers that ptxas before 13.1 overwrote ---------------------------------------------

N = 512
SCORES = (N, 64)


def attend(step_of):
    """o = sum over j of what step_of(a)(j, acc, ...) adds; a: 64 rows of q, in registers."""

    def body(q, k, v, *rest):
        mine = pl.ds(lax.axis_index("i") * 64, 64)
        step = step_of(q[mine], q, k, v, mine, *rest[:-1])
        rest[-1][mine] = lax.fori_loop(0, N // 64, step, jnp.zeros((64, 64), F32))

    return plgpu.kernel(body, out_type=shape(SCORES, F32), grid=(N // 64,), grid_names=("i",))


def dot(a, b):
    return jnp.dot(a, b, preferred_element_type=F32)


def rows(j):
    return pl.ds(j * 64, 64)


def overwritten(between, half=F16):
    """Two products in a loop, A of the first one the same in each iteration; `between` them what
    keeps the compiler from moving them together."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            s = between(dot(a, k[rows(j)].T), j, flag)
            return acc + dot(s.astype(half), v[rows(j)])

        return step

    q, k, v = (numbers(N, 64, dtype=half, seed=i) / 4 for i in range(3))
    q, k, v = (x.astype(half) for x in (q, k, v))
    flag = np.zeros(8, I32)
    scores = (q.astype(F32) @ k.astype(F32).T).astype(half).astype(F32)
    return attend(step_of), (q, k, v, flag), scores @ v.astype(F32)


def reproduction():
    """As it was found: the first product is stored, in a branch."""

    def body(q, k, v, flag, o, s_out):
        mine = pl.ds(lax.axis_index("i") * 64, 64)
        a = q[mine]

        def step(j, acc):
            s = dot(a, k[rows(j)].T)

            @pl.when(flag[j] > 0)
            def _():
                s_out[mine] = s

            return acc + dot(s.astype(F16), v[rows(j)])

        o[mine] = lax.fori_loop(0, N // 64, step, jnp.zeros((64, 64), F32))

    q, k, v = (numbers(N, 64, seed=i) for i in range(3))
    flag = np.zeros(8, I32)
    flag[-1] = 1
    scores = q.astype(F32) @ k.astype(F32).T
    want = scores.astype(F16).astype(F32) @ v.astype(F32), scores[:, -64:]
    out = [shape(SCORES, F32)] * 2
    return plgpu.kernel(body, out_type=out, grid=(N // 64,), grid_names=("i",)), (
        q, k, v, flag), want  # fmt: skip


def branch(s, j, flag):
    return lax.cond(flag[j] > 0, lambda: s * 2, lambda: s)


def computed():
    """A is computed in the loop, from what does not change there."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            s = branch(dot(a * 2 + 1, k[rows(j)].T), j, flag)
            return acc + dot(s.astype(F16), v[rows(j)])

        return step

    q, k, v = (numbers(N, 64, seed=i) / F16.type(4) for i in range(3))
    scores = ((q * F16.type(2) + F16.type(1)).astype(F32) @ k.astype(F32).T).astype(F16)
    return attend(step_of), (q, k, v, np.zeros(8, I32)), scores.astype(F32) @ v.astype(F32)


def loaded():
    """The loop loads A again and again, from the same place."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            s = branch(dot(q[mine], k[rows(j)].T), j, flag)
            return acc + dot(s.astype(F16), v[rows(j)])

        return step

    _, args, want = overwritten(branch)
    return attend(step_of), args, want


def nested():
    """A is the same in the inner loop alone."""

    def body(q, k, v, flag, o):
        def outer(i, none):
            a = q[rows(i)]

            def step(j, acc):
                s = branch(dot(a, k[rows(j)].T), j, flag)
                return acc + dot(s.astype(F16), v[rows(j)])

            o[rows(i)] = lax.fori_loop(0, N // 64, step, jnp.zeros((64, 64), F32))
            return none

        lax.fori_loop(0, N // 64, outer, 0)

    _, (q, k, v, flag), want = overwritten(branch)
    return plgpu.kernel(body, out_type=shape(SCORES, F32)), (q, k, v, flag), want


def in_branches():
    """The products stand in branches of the loop."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            def one():
                s = branch(dot(a, k[rows(j)].T), j, flag)
                return acc + dot(s.astype(F16), v[rows(j)])

            return lax.cond(flag[j] < 5, one, lambda: acc)

        return step

    _, args, want = overwritten(branch)
    return attend(step_of), args, want


def carried():
    """The loop carries A and never changes it."""

    def body(q, k, v, flag, o):
        mine = pl.ds(lax.axis_index("i") * 64, 64)

        def step(j, carry):
            a, acc = carry
            s = branch(dot(a, k[rows(j)].T), j, flag)
            return a, acc + dot(s.astype(F16), v[rows(j)])

        o[mine] = lax.fori_loop(0, N // 64, step, (q[mine], jnp.zeros((64, 64), F32)))[1]

    _, args, want = overwritten(branch)
    return plgpu.kernel(body, out_type=shape(SCORES, F32), grid=(8,), grid_names=("i",)), args, want


def changing():
    """A changes from one iteration to the next, and nothing is to be held."""

    def body(q, k, v, flag, o):
        mine = pl.ds(lax.axis_index("i") * 64, 64)

        def step(j, carry):
            a, acc = carry
            s = branch(dot(a, k[rows(j)].T), j, flag)
            return -a, acc + dot(s.astype(F16), v[rows(j)])

        o[mine] = lax.fori_loop(0, N // 64, step, (q[mine], jnp.zeros((64, 64), F32)))[1]

    _, (q, k, v, flag), _ = overwritten(branch)
    scores = (q.astype(F32) @ k.astype(F32).T) * np.repeat([1, -1] * 4, 64)
    want = scores.astype(F16).astype(F32) @ v.astype(F32)
    made = plgpu.kernel(body, out_type=shape(SCORES, F32), grid=(8,), grid_names=("i",))
    return made, (q, k, v, flag), want


def constant():
    """A is one number."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            s = branch(dot(jnp.full((64, 64), 0.5, F16), k[rows(j)].T), j, flag)
            return acc + dot(s.astype(F16), v[rows(j)])

        return step

    _, (q, k, v, flag), _ = overwritten(branch)
    scores = np.full((N, 64), 0.5, F32) @ k.astype(F32).T
    return attend(step_of), (q, k, v, flag), scores.astype(F16).astype(F32) @ v.astype(F32)


def three():
    """Two products with the same A, and a third one."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            s = branch(dot(a, k[rows(j)].T), j, flag)
            acc = acc + dot(s.astype(F16), v[rows(j)])
            return acc + branch(dot(a, v[rows(j)]), j, flag)

        return step

    _, (q, k, v, flag), want = overwritten(branch)
    want = want + q.astype(F32) @ v.astype(F32).reshape(8, 64, 64).sum(0)
    return attend(step_of), (q, k, v, flag), want


def of_8_bits(dtype, acc):
    """A of one byte an element, in its own layout."""

    def body(q, k, v, flag, o):
        mine = pl.ds(lax.axis_index("i") * 64, 64)
        a = plgpu.load(q.at[mine], layout=plgpu.Layout.WGMMA_8BIT, optimized=False)

        def step(j, total):
            def multiply(ref, b):
                def scope(sb, barrier):
                    plgpu.copy_gmem_to_smem(b.at[:, rows(j)], sb, barrier)
                    plgpu.barrier_wait(barrier)
                    plgpu.wgmma(ref, a, plgpu.transpose_ref(sb, (1, 0)))
                    return ref[...]

                tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(64))
                return pl.run_scoped(scope, plgpu.SMEM((64, 64), dtype, transforms=tiled),
                                     plgpu.Barrier())  # fmt: skip

            s = pl.run_scoped(functools.partial(multiply, b=k), plgpu.ACC((64, 64), acc))
            s = branch(s, j, flag)
            return total + s + pl.run_scoped(functools.partial(multiply, b=v),
                                             plgpu.ACC((64, 64), acc))  # fmt: skip

        o[mine] = lax.fori_loop(0, 8, step, jnp.zeros((64, 64), acc))

    q = numbers(N, 64, dtype=dtype)
    k, v = (numbers(64, N, dtype=dtype, seed=i) for i in (1, 2))
    made = plgpu.kernel(body, out_type=shape((N, 64), acc), grid=(8,), grid_names=("i",))
    each = [product(q, x.reshape(64, 8, 64)[:, i], True) for x in (k, v) for i in range(8)]
    return made, (q, k, v, np.zeros(8, I32)), sum(each)


def tall():
    """128 rows of A: two blocks of rows, pinned."""

    def body(q, k, v, flag, o):
        mine = pl.ds(lax.axis_index("i") * 128, 128)
        a = q[mine]

        def step(j, acc):
            s = branch(dot(a, k[rows(j)].T), j, flag)
            return acc + dot(s.astype(F16), v[rows(j)])

        o[mine] = lax.fori_loop(0, N // 64, step, jnp.zeros((128, 64), F32))

    _, args, want = overwritten(branch)
    return plgpu.kernel(body, out_type=shape(SCORES, F32), grid=(4,), grid_names=("i",)), args, want


def stored():
    """A comes from an accumulator that the loop does not touch."""

    def body(q, k, v, flag, o):
        mine = pl.ds(lax.axis_index("i") * 64, 64)

        def scope(acc):
            acc[...] = q[mine].astype(F32)

            def step(j, total):
                s = branch(dot(acc[...].astype(F16), k[rows(j)].T), j, flag)
                return total + dot(s.astype(F16), v[rows(j)])

            return lax.fori_loop(0, N // 64, step, jnp.zeros((64, 64), F32))

        o[mine] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))

    _, args, want = overwritten(branch)
    return plgpu.kernel(body, out_type=shape(SCORES, F32), grid=(8,), grid_names=("i",)), args, want


def in_mma():
    """The same with mma, whose operands are all in registers."""

    def step_of(a, q, k, v, mine, flag):
        def step(j, acc):
            s = branch(plgpu.mma(jnp.zeros((64, 64), F32), a, k[rows(j)].T), j, flag)
            return plgpu.mma(acc, s.astype(F16), v[rows(j)])

        return step

    _, args, want = overwritten(branch)
    return attend(step_of), args, want


def stepped():
    """The address of a slot steps from that of the first one, which is where shared memory begins;
    the scratch of a scan lies at a fixed distance from it, and stepped along before ptxas 13.5."""

    def body(x, o, ring):
        order = jnp.arange(512).reshape(4, 128) * 3 % 128

        @pl.loop(0, 3)
        def _(i):
            plgpu.wait_smem_to_gmem(2, wait_read_only=True)
            ring[i % 3] = jnp.take(jnp.cumsum(x[pl.ds(i * 128, 128)]), order)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(ring.at[i % 3], o.at[:, pl.ds(i * 128, 128)])

        plgpu.wait_smem_to_gmem(0)

    x = numbers(384, dtype=F32)
    sums = np.cumsum(x.reshape(3, 128), axis=1, dtype=np.float64)
    want = np.concatenate([s[np.arange(512).reshape(4, 128) * 3 % 128] for s in sums], axis=1)
    kernel = plgpu.kernel(body, out_type=shape((4, 384), F32),
                          scratch_types=[plgpu.SMEM((3, 4, 128), F32)])  # fmt: skip
    return kernel, (x,), want


REPRODUCTIONS = {
    **{f"lost {m} x {n} x {k}": functools.partial(lost, m, n, k)
       for m, n, k in ((64, 64, 64), (64, 64, 128), (128, 64, 64), (64, 128, 64))},
    "lost 64 x 8 x 64": functools.partial(lost, 64, 8, 64, transposed=True),
    "lost 64 x 64 x 64, B transposed": functools.partial(lost, 64, 64, 64, transposed=True),
    "overwritten": reproduction,
    "stepped": stepped,
}  # fmt: skip

CASES = {
    "bfloat16": functools.partial(lost, 64, 64, 64, dtype=BF16),
    "float16 sums": functools.partial(lost, 64, 64, 64, acc=F16),
    "swizzle 64": functools.partial(lost, 64, 32, 64, swizzle=64),
    "swizzle 32": functools.partial(lost, 64, 16, 64, swizzle=32),
    "by TMA": functools.partial(lost, 64, 64, 64, fill="tma"),
    "begins with 3": functools.partial(lost, 64, 64, 64, begin=3.0),
    "float32": functools.partial(lost, 64, 64, 32, dtype=F32, transposed=True),
    "float8": functools.partial(lost, 64, 64, 128, dtype=E4M3, transposed=True),
    "int8": functools.partial(lost, 64, 64, 128, dtype=I8, acc=I32, transposed=True),
    "branch": functools.partial(overwritten, branch),
    "branch, bfloat16": functools.partial(overwritten, branch, half=BF16),
    "computed in the loop": computed,
    "loaded in the loop": loaded,
    "nested loops": nested,
    "in branches": in_branches,
    "carried": carried,
    "changing": changing,
    "constant": constant,
    "three products": three,
    "int8 in registers": functools.partial(of_8_bits, I8, I32),
    "float8 in registers": functools.partial(of_8_bits, E4M3, F32),
    "128 rows": tall,
    "stored accumulator": stored,
    "mma": in_mma,
}


def lower(make):
    kernel, operands, _ = make()
    return kernel.lower(*operands)


def run_on(make, put):
    """The largest error of the results, relative to the largest value that is right."""
    kernel, operands, want = make()
    results = kernel(*map(put, operands))
    want = want if isinstance(want, tuple) else (want,)
    results = results if isinstance(results, (list, tuple)) else (results,)
    errors = []
    for x, y in zip(results, want):
        x = x.numpy() if isinstance(x, plgpu.DeviceArray) else np.asarray(x)
        x, y = x.astype(np.float64), np.asarray(y, np.float64)
        error = np.abs(x[:, : y.shape[1]] - y).max() / np.abs(y).max()
        errors.append(error if np.isfinite(error) else np.inf)
    return max(errors)
