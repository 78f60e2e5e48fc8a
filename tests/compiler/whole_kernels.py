"""Whole kernels, whose order of synchronisation per role is compared with records of other
compilers (data/sequences.json, data/triton.json). Each is written for the names that it is given
(`L`: plgpu, pl, lax, jnp), without loops, so that what is issued can be read off.
`KERNELS[name](L)`: body, scratch, shapes of operands, shape of the result, number of threads,
blocks of the cluster."""

ROWS, COLUMNS, K = 128, 128, 64


def tiles(L, dtype, shape, n=None):
    swizzle = (L.plgpu.TilingTransform((8, 64)), L.plgpu.SwizzleTransform(128))
    return L.plgpu.SMEM(shape if n is None else (n, *shape), dtype, transforms=swizzle)


def barriers(L, n=1, arrivals=1, tensor=False):
    return L.plgpu.Barrier(num_arrivals=arrivals, num_barriers=n, orders_tensor_core=tensor)


def roles(L, *functions):
    me = L.lax.axis_index("wg")
    for k, f in enumerate(functions):
        L.pl.when(me == k)(f)


def result(L, acc, o):
    """The accumulator to the result, in one load."""
    o[...] = L.lax.optimization_barrier(L.plgpu.async_load_tmem(acc))
    L.plgpu.wait_load_tmem()


def ring(L, steps=8, slots=4):
    """A ring of four slots; the tensor core releases them."""
    p, f16 = L.plgpu, L.jnp.float16

    def body(a, b, o, a_smem, b_smem, acc, full, empty, done):
        def produce():
            for it in range(steps):
                slot = it % slots
                if it >= slots:
                    p.barrier_wait(empty.at[slot])
                part = L.pl.ds(it * K, K)
                p.copy_gmem_to_smem(a.at[:, part], a_smem.at[slot], full.at[slot])
                p.copy_gmem_to_smem(b.at[part], b_smem.at[slot], full.at[slot])

        def consume():
            for it in range(steps):
                slot = it % slots
                p.barrier_wait(full.at[slot])
                p.tcgen05_mma(
                    acc, a_smem.at[slot], b_smem.at[slot], empty.at[slot], accumulate=it > 0
                )
            p.tcgen05_commit_arrive(done)
            p.barrier_wait(done)
            result(L, acc, o)

        roles(L, produce, consume)

    scratch = dict(
        a_smem=tiles(L, f16, (ROWS, K), slots),
        b_smem=tiles(L, f16, (K, COLUMNS), slots),
        acc=p.TMEM((ROWS, COLUMNS), L.jnp.float32),
        full=barriers(L, slots, 2),
        empty=barriers(L, slots, tensor=True),
        done=barriers(L, tensor=True),
    )
    shapes = [(ROWS, steps * K), (steps * K, COLUMNS)]
    return body, scratch, shapes, (ROWS, COLUMNS), 2, 1


def pair(L, steps=4, slots=2):
    """A ring of a pair of blocks: the first one issues, its barriers count the copies of both."""
    p, f16 = L.plgpu, L.jnp.float16
    part = p.CopyPartition.PARTITIONED

    def body(a, b, o, a_smem, b_smem, acc, full, empty, done):
        rank = L.lax.axis_index("c")

        def produce():
            for it in range(steps):
                slot = it % slots
                if it >= slots:
                    p.barrier_wait(empty.at[slot])
                along = L.pl.ds(it * K, K)
                how = dict(collective_axes="c")
                p.copy_gmem_to_smem(
                    a.at[:, along], a_smem.at[slot], full.at[slot], leader_tracked=part(0), **how
                )
                p.copy_gmem_to_smem(
                    b.at[along], b_smem.at[slot], full.at[slot], leader_tracked=part(1), **how
                )

        def consume():
            for it in range(steps):
                slot = it % slots
                L.pl.when(rank == 0)(lambda slot=slot: p.barrier_wait(full.at[slot]))
                p.tcgen05_mma(
                    acc, a_smem.at[slot], b_smem.at[slot], empty.at[slot], accumulate=it > 0,
                    collective_axis="c",
                )  # fmt: skip
            p.tcgen05_commit_arrive(done, collective_axis="c")
            p.barrier_wait(done)
            result(L, acc, o.at[L.pl.ds(rank * ROWS, ROWS)])

        roles(L, produce, consume)

    scratch = dict(
        a_smem=tiles(L, f16, (ROWS, K), slots),
        b_smem=tiles(L, f16, (K, COLUMNS), slots),
        acc=p.TMEM((ROWS, 2 * COLUMNS), L.jnp.float32, collective=True),
        full=barriers(L, slots, 2),
        empty=barriers(L, slots, tensor=True),
        done=barriers(L, tensor=True),
    )
    shapes = [(2 * ROWS, steps * K), (steps * K, 2 * COLUMNS)]
    return body, scratch, shapes, (2 * ROWS, 2 * COLUMNS), 2, 2


def accumulators(L, work=4, slots=2):
    """Two accumulators: a thread multiplies while another one takes what is finished."""
    p, f16 = L.plgpu, L.jnp.float16

    def body(a, b, o, a_smem, b_smem, acc, full, empty, ready, taken):
        def produce():
            for it in range(work):
                slot = it % slots
                if it >= slots:
                    p.barrier_wait(empty.at[slot])
                rows = L.pl.ds(it * ROWS, ROWS)
                p.copy_gmem_to_smem(a.at[rows], a_smem.at[slot], full.at[slot])
                p.copy_gmem_to_smem(b, b_smem.at[slot], full.at[slot])

        def multiply():
            for it in range(work):
                slot, which = it % slots, it % 2
                if it >= 2:
                    p.barrier_wait(taken.at[which])
                p.barrier_wait(full.at[slot])
                part = acc.at[:, L.pl.ds(which * COLUMNS, COLUMNS)]
                p.tcgen05_mma(
                    part, a_smem.at[slot], b_smem.at[slot], empty.at[slot], accumulate=False
                )
                p.tcgen05_commit_arrive(ready.at[which])

        def take():
            for it in range(work):
                which = it % 2
                p.barrier_wait(ready.at[which])
                part = acc.at[:, L.pl.ds(which * COLUMNS, COLUMNS)]
                result(L, part, o.at[L.pl.ds(it * ROWS, ROWS)])
                p.barrier_arrive(taken.at[which])

        roles(L, produce, multiply, take)

    scratch = dict(
        a_smem=tiles(L, f16, (ROWS, K), slots),
        b_smem=tiles(L, f16, (K, COLUMNS), slots),
        acc=p.TMEM((ROWS, 2 * COLUMNS), L.jnp.float32),
        full=barriers(L, slots, 2),
        empty=barriers(L, slots, tensor=True),
        ready=barriers(L, 2, tensor=True),
        taken=barriers(L, 2, tensor=True),
    )
    return body, scratch, [(work * ROWS, K), (K, COLUMNS)], (work * ROWS, COLUMNS), 3, 1


def in_tensor_memory(L):
    """A is stored in tensor memory from registers."""
    p, bf16 = L.plgpu, L.jnp.bfloat16

    def body(a, b, o, a_smem, b_smem, a_tmem, acc, full, done):
        p.copy_gmem_to_smem(a, a_smem, full)
        p.copy_gmem_to_smem(b, b_smem, full)
        p.barrier_wait(full)
        x = p.load(a_smem, (), layout=p.Layout.TCGEN05)
        p.async_store_tmem(a_tmem, x)
        p.commit_tmem()
        p.tcgen05_mma(acc, a_tmem, b_smem, done, accumulate=False)
        p.barrier_wait(done)
        result(L, acc, o)

    scratch = dict(
        a_smem=tiles(L, bf16, (ROWS, K)),
        b_smem=tiles(L, bf16, (K, COLUMNS)),
        a_tmem=p.TMEM((ROWS, K), bf16, packed=True),
        acc=p.TMEM((ROWS, COLUMNS), L.jnp.float32),
        full=barriers(L, 1, 2),
        done=barriers(L, tensor=True),
    )
    return body, scratch, [(ROWS, K, "bfloat16"), (K, COLUMNS, "bfloat16")], (ROWS, COLUMNS), 1, 1


def scales(L):
    """Scales of blocks of 32 are copied to tensor memory before the product."""
    p, f8, e8 = L.plgpu, L.jnp.float8_e4m3fn, L.jnp.float8_e8m0fnu

    def body(a, b, sa, sb, o, a_smem, b_smem, sa_smem, sb_smem, sa_tmem, sb_tmem, acc, full, done):
        for x, smem in ((a, a_smem), (b, b_smem), (sa, sa_smem), (sb, sb_smem)):
            p.copy_gmem_to_smem(x, smem, full)
        p.barrier_wait(full)
        p.async_copy_scales_to_tmem(sa_smem, sa_tmem)
        p.async_copy_scales_to_tmem(sb_smem, sb_tmem)
        right = p.transpose_ref(b_smem, (1, 0))
        kw = dict(a_scale=sa_tmem, b_scale=sb_tmem)
        p.tcgen05_mma(acc, a_smem, right, done, accumulate=False, **kw)
        p.barrier_wait(done)
        result(L, acc, o)

    swizzle = (p.TilingTransform((8, 128)), p.SwizzleTransform(128))
    of_scales = p.TMEM((ROWS, 4), e8, layout=p.TMEMLayout.SCALES_LAYOUT)
    scratch = dict(
        a_smem=p.SMEM((ROWS, 128), f8, transforms=swizzle),
        b_smem=p.SMEM((COLUMNS, 128), f8, transforms=swizzle),
        sa_smem=p.SMEM((1, 1, 32, 16), e8),
        sb_smem=p.SMEM((1, 1, 32, 16), e8),
        sa_tmem=of_scales,
        sb_tmem=of_scales,
        acc=p.TMEM((ROWS, COLUMNS), L.jnp.float32),
        full=barriers(L, 1, 4),
        done=barriers(L, tensor=True),
    )
    f8, e8 = "float8_e4m3fn", "float8_e8m0fnu"
    shapes = [(ROWS, 128, f8), (COLUMNS, 128, f8), (1, 1, 32, 16, e8), (1, 1, 32, 16, e8)]
    return body, scratch, shapes, (ROWS, COLUMNS), 1, 1


def launched(L):
    """Persistent by cluster launch control: two requests, the second after the first's answer."""
    p, f16 = L.plgpu, L.jnp.float16

    def body(a, b, o, a_smem, b_smem, acc, answer, full, done, known):
        def tile(k):
            p.copy_gmem_to_smem(a.at[L.pl.ds(k * ROWS, ROWS)], a_smem, full)
            p.copy_gmem_to_smem(b, b_smem, full)
            p.barrier_wait(full)
            p.tcgen05_mma(acc, a_smem, b_smem, done, accumulate=False)
            p.barrier_wait(done)
            result(L, acc, o.at[L.pl.ds(k * ROWS, ROWS)])

        def go_on(left):
            p.try_cluster_cancel(answer, known)
            p.barrier_wait(known)
            index, valid = p.query_cluster_cancel(answer, ("g",))

            @L.pl.when(valid)
            def _():
                tile(index[0])
                if left:
                    go_on(left - 1)

        tile(L.lax.axis_index("g"))
        go_on(1)

    scratch = dict(
        a_smem=tiles(L, f16, (ROWS, K)),
        b_smem=tiles(L, f16, (K, COLUMNS)),
        acc=p.TMEM((ROWS, COLUMNS), L.jnp.float32),
        answer=p.TryClusterCancelResult(),
        full=barriers(L, 1, 2),
        done=barriers(L, tensor=True),
        known=barriers(L),
    )
    return body, scratch, [(4 * ROWS, K), (K, COLUMNS)], (4 * ROWS, COLUMNS), 1, 1


def products(L):
    """Two products, as attention has them: P of the second lies over S of the first."""
    p, f16 = L.plgpu, L.jnp.float16

    def body(q, k, v, o, q_smem, k_smem, v_smem, sp, out, full, s_ready, p_ready, out_ready):
        (scores,), (probabilities,) = sp

        def fetch():
            for x, smem in ((q, q_smem), (k, k_smem), (v, v_smem)):
                p.copy_gmem_to_smem(x, smem, full)

        def multiply():
            p.barrier_wait(full)
            right = p.transpose_ref(k_smem, (1, 0))
            p.tcgen05_mma(scores, q_smem, right, s_ready, accumulate=False)
            p.barrier_wait(p_ready)
            p.tcgen05_mma(out, probabilities, v_smem, out_ready, accumulate=False)

        def softmax():
            p.barrier_wait(s_ready)
            s = p.async_load_tmem(scores)
            p.wait_load_tmem()
            p.async_store_tmem(probabilities, L.jnp.exp2(s).astype(f16))
            p.commit_tmem()
            p.barrier_arrive(p_ready)
            p.barrier_wait(out_ready)
            result(L, out, o)

        roles(L, fetch, multiply, softmax)

    scores = p.TMEM((ROWS, COLUMNS), L.jnp.float32)
    probabilities = p.TMEM((ROWS, COLUMNS), f16, packed=True)
    scratch = dict(
        q_smem=tiles(L, f16, (ROWS, K)),
        k_smem=tiles(L, f16, (COLUMNS, K)),
        v_smem=tiles(L, f16, (COLUMNS, K)),
        sp=p.RefUnion([scores], [probabilities]),
        out=p.TMEM((ROWS, K), L.jnp.float32),
        full=barriers(L, 1, 3),
        s_ready=barriers(L, tensor=True),
        p_ready=barriers(L, tensor=True),
        out_ready=barriers(L, tensor=True),
    )
    return body, scratch, [(ROWS, K), (COLUMNS, K), (COLUMNS, K)], (ROWS, K), 3, 1


KERNELS = {
    "ring of four": ring,
    "pair": pair,
    "two accumulators": accumulators,
    "A in tensor memory": in_tensor_memory,
    "scales": scales,
    "launched": launched,
    "two products": products,
}
GRIDS = {"launched": 4}
