"""Random tcgen05 pipelines: a ring of slots, one or two accumulators, tiles, and who does what,
drawn from a seed; NumPy says what comes out. Numbers are small, so that sums are exact.

Roles are the producer (copies), the multiplier (products, from its thread or from one warp of it)
and the epilogue (results, and what accumulators begin with). One, two or three threads of a block
share them. A may come from tensor memory, copied there from shared memory. Pairs of blocks use
leader-tracked copies."""

import dataclasses
import random

import ml_dtypes
import numpy as np
from compiler.tcgen05_kernels import E2M1, E8M0, F8, Product, bits
from compiler.tcgen05_kernels import random as small

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl

BF16, F32 = ml_dtypes.bfloat16, np.float32
KINDS = [  # A, B, D
    (np.float16, None, F32), (np.float16, None, np.float16), (BF16, None, F32),
    (F8[0], F8[1], F32), (F8[1], F8[0], np.float16), (np.int8, None, np.int32),
    (np.uint8, None, np.int32),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pipeline:
    product: Product  # one step of it
    tiles: int
    steps: int
    slots: int
    accumulators: int
    roles: int  # threads
    from_warp: int | None  # that issues products
    initial: bool  # accumulators begin with what the epilogue stores there
    apart: bool  # products and commits are ops of their own
    widths: tuple  # columns of the parts that the epilogue loads; (): all at once
    unrolled: bool

    @property
    def pair(self):
        return self.product.pair

    def scratch(self):
        p, n = self.product, {}
        for name, ref in p.scratch.items():
            if name.endswith("smem"):
                n[name] = plgpu.SMEM(
                    (self.slots, *ref.shape), ref.dtype, transforms=ref.transforms
                )  # fmt: skip
            elif name not in ("full", "done", "meet", "acc"):
                n[name] = ref
        copies = sum(name.endswith("smem") for name in n)
        tensor = {"orders_tensor_core": True}
        n["acc"] = plgpu.TMEM(
            (self.accumulators, p.m, p.n), p.d, collective=self.pair,
            packed=None if bits(p.d) == 32 else False,
        )  # fmt: skip
        n["full"] = plgpu.Barrier(num_arrivals=copies, num_barriers=self.slots)
        n["empty"] = plgpu.Barrier(num_barriers=self.slots, **tensor)
        n["ready"] = plgpu.Barrier(num_barriers=self.accumulators, **tensor)
        if self.pair:
            n["taken"] = plgpu.ClusterBarrier(
                collective_axes=("pair",), leader_tracked=True, num_barriers=self.accumulators,
                **tensor,
            )  # fmt: skip
        else:
            n["taken"] = plgpu.Barrier(num_barriers=self.accumulators, **tensor)
        return n

    # ---- what the roles do

    def body(self, *refs, **scratch):
        *refs, o = refs
        run = _Run(self, refs, o, scratch)
        if self.roles == 1:
            threads = [[run.begin, run.all]]
        elif self.roles == 2:
            threads = [[run.produce_all], [run.begin, run.multiply_and_finish]]
        else:
            threads = [[run.produce_all], [run.multiply_all], [run.begin, run.finish_all]]
        if len(threads) == 1:
            for f in threads[0]:
                f()
            return
        me = lax.axis_index("wg")
        for k, fs in enumerate(threads):

            @pl.when(me == k)
            def _(fs=fs):
                for f in fs:
                    f()

    def kernel(self, **options):
        p = self.product
        if self.pair:
            options |= dict(cluster=(2,), cluster_names=("pair",))
        if self.roles > 1:
            options |= dict(num_threads=self.roles, thread_name="wg")
        out = np.zeros((self.tiles, p.blocks * p.m, p.n), p.d)
        return plgpu.kernel(
            self.body, out_type=out, scratch_types=self.scratch(), **options
        )  # fmt: skip

    # ---- data

    def operands(self, rng):
        """Arrays as the kernel takes them, and the result."""
        p, lead = self.product, self.tiles * self.steps
        parts = dataclasses.replace(p, steps=lead)
        drawn = parts.operands(rng)
        args = parts.arranged(drawn)
        x, y, *more = drawn
        one = [dataclasses.replace(p, steps=1).expected([z[k : k + 1] for z in (x, y, *more)])
               for k in range(lead)]  # fmt: skip
        want = np.stack(one).astype(np.float64)
        want = want.reshape(self.tiles, self.steps, p.blocks * p.m, p.n).sum(1)
        joined = [self.joined(z, k) for k, z in enumerate(args)]
        if self.initial:
            joined.append(small(rng, want.shape, p.d))
            want = want + joined[-1]
        return joined, want.astype(p.d)

    def joined(self, x, k):
        """[step][block] of blocks' parts: [step] of the pair's whole."""
        if not self.pair:
            return x[:, 0]
        return np.ascontiguousarray(np.concatenate([x[:, 0], x[:, 1]], self.axis(k)))

    def axis(self, k):
        """The dimension, after steps, along which blocks of a pair have parts of operand k."""
        p = self.product
        return 1 + (p.a_mn_major if k == 0 else not p.b_k_major)


class _Run:
    """A pipeline while it is traced."""

    def __init__(self, pipeline, refs, o, scratch):
        self.x, self.p, self.o = pipeline, pipeline.product, o
        self.__dict__ |= scratch
        self.initial = refs[-1] if pipeline.initial else None
        self.refs = refs[: len(refs) - pipeline.initial]
        names = ["a", "b"] + ["a_scale", "b_scale"] * (self.p.scale is not None)
        self.names = names + ["meta"] * self.p.sparse
        self.rank = lax.axis_index("pair") if pipeline.pair else 0
        self.collective = "pair" if pipeline.pair else None
        self.it = pipeline.tiles * pipeline.steps

    def smem(self, name, slot):
        return getattr(self, f"{name}_smem").at[slot]

    def loop(self, n, f):
        if self.x.unrolled:
            for k in range(n):
                f(k)
        else:
            lax.fori_loop(0, n, lambda k, _: f(k), None)

    def when(self, condition, f):
        if isinstance(condition, bool):
            if condition:
                f()
        else:
            pl.when(condition)(f)

    def leader(self, f):
        f() if not self.x.pair else pl.when(self.rank == 0)(f)

    def fetch(self, it):
        slots = self.x.slots
        slot = it % slots
        self.when(
            it >= slots, lambda: plgpu.barrier_wait(self.empty.at[slot], phase=it // slots - 1)
        )
        for k, (name, ref) in enumerate(zip(self.names, self.refs, strict=True)):
            how = {}
            if self.x.pair:
                part = plgpu.CopyPartition.PARTITIONED(self.x.axis(k) - 1)
                how = dict(collective_axes="pair", leader_tracked=part)
            plgpu.copy_gmem_to_smem(ref.at[it], self.smem(name, slot), self.full.at[slot], **how)

    def one_step(self, tile, s):
        x, p = self.x, self.p
        it = tile * x.steps + s
        slot, which = it % x.slots, tile % x.accumulators
        self.leader(lambda: plgpu.barrier_wait(self.full.at[slot], phase=it // x.slots))
        a, b = self.smem("a", slot), self.smem("b", slot)
        a, b = (a.T if p.a_mn_major else a), (b.T if p.b_k_major else b)
        if p.a_in_tmem:
            plgpu.async_copy_smem_to_tmem(a, self.a_tmem, self.collective)
            a = self.a_tmem
        kw = {}
        for name in self.names[2:]:
            copy = plgpu.async_copy_scales_to_tmem
            if name == "meta":
                copy = plgpu.async_copy_sparse_metadata_to_tmem
            copy(self.smem(name, slot), getattr(self, name), self.collective)
            kw["a_sparse_metadata" if name == "meta" else name] = getattr(self, name)
        done = [] if x.apart else [self.empty.at[slot]]
        plgpu.tcgen05_mma(
            self.acc.at[which], a, b, *done, accumulate=True if x.initial else s > 0,
            collective_axis=self.collective, **kw,
        )  # fmt: skip
        if x.apart:
            plgpu.tcgen05_commit_arrive(self.empty.at[slot], self.collective)

    def multiply(self, tile, fetch=False):
        x = self.x
        which, use = tile % x.accumulators, tile // x.accumulators

        def products():
            phase = use if x.initial else use - 1
            wait = lambda: plgpu.barrier_wait(self.taken.at[which], phase=phase)  # noqa: E731
            if x.initial:
                self.leader(wait)
            else:
                self.when(tile >= x.accumulators, lambda: self.leader(wait))

            def step(s):
                if fetch:
                    self.fetch(tile * x.steps + s)
                self.one_step(tile, s)

            self.loop(x.steps, step)
            plgpu.tcgen05_commit_arrive(self.ready.at[which], self.collective)

        if x.from_warp is None or fetch:
            return products()

        @pl.core_map(plgpu.WarpMesh(axis_name="warp"))
        def _():
            pl.when(lax.axis_index("warp") == x.from_warp)(products)

        return None

    def rows(self):
        return pl.ds(self.rank * self.p.m, self.p.m)

    def store_initial(self, tile):
        acc = self.acc.at[tile % self.x.accumulators]
        layout = None
        if self.p.m == 128:
            layout = plgpu.Layout.TCGEN05
        value = plgpu.load(self.initial.at[tile, self.rows()], layout=layout, optimized=False)
        plgpu.async_store_tmem(acc, value)
        plgpu.commit_tmem()
        plgpu.barrier_arrive(self.taken.at[tile % self.x.accumulators])

    def begin(self):
        if self.x.initial:
            for tile in range(min(self.x.tiles, self.x.accumulators)):
                self.store_initial(tile)

    def finish(self, tile):
        x, p = self.x, self.p
        which = tile % x.accumulators
        plgpu.barrier_wait(self.ready.at[which], phase=tile // x.accumulators)
        acc, at = self.acc.at[which], 0
        for width in x.widths or (p.n,):
            part = acc if width == p.n else acc.at[:, pl.ds(at, width)]
            self.o[tile, self.rows(), pl.ds(at, width)] = plgpu.async_load_tmem(part)
            at += width
        plgpu.wait_load_tmem()
        if x.initial:
            self.when(
                tile + x.accumulators < x.tiles, lambda: self.store_initial(tile + x.accumulators)
            )
        else:
            plgpu.barrier_arrive(self.taken.at[which])

    # ---- threads

    def produce_all(self):
        self.loop(self.it, self.fetch)

    def multiply_all(self):
        self.loop(self.x.tiles, self.multiply)

    def finish_all(self):
        self.loop(self.x.tiles, self.finish)

    def multiply_and_finish(self):
        def work(tile):
            self.multiply(tile)
            self.finish(tile)

        self.loop(self.x.tiles, work)

    def all(self):
        def work(tile):
            self.multiply(tile, fetch=True)
            self.finish(tile)

        self.loop(self.x.tiles, work)


# ---- drawing -------------------------------------------------------------------------------------


def product(r):
    """A step that is legal."""
    pair, form = r.random() < 0.35, r.random()
    flags = dict(a_mn_major=r.random() < 0.3, b_k_major=r.random() < 0.6)
    if not pair and form < 0.15:
        scale, block, a = r.choice([(E8M0, 32, F8[0]), (E8M0, 32, E2M1), (E4M3, 16, E2M1)])
        n, k = r.choice((64, 128, 256)), 256 if a is E2M1 else 128
        return Product(a=a, n=n, k=k, scale=scale, block=block, b_k_major=True)
    if not pair and form < 0.25:
        a = r.choice((np.float16, BF16, F8[0]))
        n = r.choice((64, 128))
        k_major = flags["b_k_major"] or n < 128 // np.dtype(a).itemsize
        return Product(a=a, n=n, k=256, sparse=True, b_k_major=k_major)
    a, b, d = r.choice(KINDS)
    size = np.dtype(a).itemsize
    m = r.choice((64, 128, 128))
    a_swizzle, b_swizzle = r.choice((32, 64, 128, 128)), r.choice((32, 64, 128, 128))
    k = r.choice((1, 2, 3)) * max(a_swizzle, b_swizzle) // size
    unit = 64 if pair else 16
    n = r.choice(range(unit, 257, unit))
    columns = n // (1 + pair)
    if m == 64 and not pair:
        n = columns = -(-n // 64) * 64
        b_swizzle = max(x for x in (32, 64, 128) if x <= n // 2 * size and x <= b_swizzle)
    if columns % (b_swizzle // size):
        flags["b_k_major"] = True
    if m % (a_swizzle // size):
        flags["a_mn_major"] = False
    in_tmem = m == 128 and form > 0.8
    if in_tmem:
        flags["a_mn_major"] = False
    return Product(
        a=a, b=b, d=d, m=m, n=n, k=k, pair=pair, a_swizzle=a_swizzle, b_swizzle=b_swizzle,
        a_in_tmem=in_tmem, **flags,
    )  # fmt: skip


E4M3 = F8[0]


def draw(seed):
    r = random.Random(seed)
    p = product(r)
    roles = r.choice((1, 2, 3, 3))
    most = 512 - 32 - (p.a_in_tmem and p.k * bits(p.a) // 32)
    used = 32 if p.scale is not None or p.sparse else 0
    accumulators = r.choice((1, 2)) if 2 * p.n <= most - 2 * used else 1
    slot = (p.m * p.k_of_a * bits(p.a) + p.columns * p.k * bits(p.b or p.a)) // 8
    tiles, widths = r.randint(1, 3), ()
    if p.m == 128 and r.random() < 0.6:
        left = p.n
        while left:
            widths += (min(left, 8 * r.randint(1, 16)),)
            left -= widths[-1]
    initial = r.random() < 0.35 and np.dtype(p.d) != np.float16 and p.n <= 128
    return Pipeline(
        product=p,
        tiles=tiles,
        steps=r.randint(1, 3),
        slots=min(r.randint(1, 4), max(190_000 // slot, 1)),
        # a thread that does all takes each tile before it multiplies the next
        accumulators=accumulators,
        roles=roles,
        from_warp=r.randrange(4) if roles == 3 and r.random() < 0.5 else None,
        initial=initial,
        apart=r.random() < 0.3,
        widths=widths,
        unrolled=r.random() < 0.3,
    )
