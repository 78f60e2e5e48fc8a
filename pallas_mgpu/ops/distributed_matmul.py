"""Products over the devices of a mesh, which compute while their operands or results travel.

All-gather, then product: each device has some rows of A, and wants the product of all rows with
its own B. A warpgroup of each block, the *courier*, writes the rows of its device into staging
memory of the others. Producer and consumers of the block work on the device's own rows first, and
on those of another device once all couriers of that one have told that they are there.

Product, then reduce-scatter: each device has some columns of A and rows of B, so that its product
is one of the summands. Blocks send the tiles of a summand, float32, to the device whose rows they
are, beginning with those of the next device and ending with their own. Then each block sums the
tiles that it is in charge of, in the order of the ranks, once all of their summands are there.

Product, then all-reduce: as before, but tiles are dealt to the devices one by one, and the sum of a
tile goes to all devices. A kernel ends once all devices have told that their sums are there.

Staging memory has two halves, and flags count up, as in distributed.py. Operands are fetched
through a ring of slots in shared memory (_common.py). The blocks are persistent: all of them run
at once, so that a block that waits for one of another device waits for one that runs.

On Blackwell each consumer issues its own products of 64 rows, into tensor memory."""

import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _tensor_memory, distributed
from ._common import SMS, Ring, StaticTiles, store, swizzled
from .distributed import _THREADS, Collective

_CONSUMERS, _ROWS, _COLUMNS, _STEP, _STAGES = 2, 128, 128, 64, 4
_CHUNK = 64  # columns of a store buffer


class _Device:
    """What a block knows of its device, and the flags that it exchanges with others."""

    def __init__(self, flags, epochs, axis, blocks):
        self.flags, self.epochs, self.axis = plgpu.ext.as_semaphores(flags), epochs, axis
        self.size, self.me = lax.axis_size(axis), lax.axis_index(axis)
        self.block, self.blocks = lax.axis_index("block"), blocks
        self.thread = self.block * _THREADS + lax.axis_index("wg")
        self.epoch = epochs[self.thread] + 1  # of this thread alone
        self.half = self.epoch % 2

    def on(self, ref, device):
        return plgpu.remote_ref(ref, {self.axis: device})

    def end(self):
        self.epochs[self.thread] = self.epoch

    def tell(self, device, flag):
        """Raises this device's flag of a kind on another one."""
        plgpu.semaphore_signal(self.flags.at[flag, 0, self.me], device_id={self.axis: device})

    def hear(self, device, flag, times=1):
        """Waits until `device` has raised its flag so often in each launch."""
        target = self.epoch * times
        plgpu.semaphore_wait(self.flags.at[flag, 0, device], target, decrement=False)


class _Products:
    """The ring of a block, and the products of its consumers."""

    acc = None  # accumulators in tensor memory

    def __init__(self, k, refs):
        vars(self).update(refs)
        self.steps = pl.cdiv(k, _STEP)
        self.ring = Ring(_STAGES, self.full, self.empty, self.a_smem, self.b_smem)

    @staticmethod
    def scratch(dtype, tensor_memory):
        found = {
            "a_smem": plgpu.SMEM((_STAGES, _ROWS, _STEP), dtype, transforms=swizzled(_STEP, dtype)),
            "b_smem": plgpu.SMEM((_STAGES, _STEP, _COLUMNS), dtype, transforms=swizzled(64, dtype)),
            **Ring.barriers(_STAGES, 2, _CONSUMERS),
        }
        if tensor_memory:
            found["empty"] = plgpu.Barrier(
                num_arrivals=_CONSUMERS, num_barriers=_STAGES, orders_tensor_core=True
            )
            found["acc"] = plgpu.TMEM((_CONSUMERS, 64, _COLUMNS), jnp.float32)
            of_each = {"num_barriers": _CONSUMERS, "orders_tensor_core": True}
            found |= {"done": plgpu.Barrier(**of_each), "taken": plgpu.Barrier(**of_each)}
        return found

    def fetch(self, a, b, row, col, it0):
        """Producer: the tile of A and of B of each step, from step number it0 on. a: (where, ref)
        pairs, of which one is where it holds."""

        def one(s, _):
            it = it0 + s
            slot = self.ring.slot(it)
            along_k = pl.ds(s * _STEP, _STEP)
            self.ring.acquire(it)
            for where, ref in a:

                def copy(ref=ref):
                    source = ref.at[pl.ds(row, _ROWS), along_k]
                    plgpu.copy_gmem_to_smem(source, self.a_smem.at[slot], self.full.at[slot])

                pl.when(where)(copy)
            source = b.at[along_k, pl.ds(col, _COLUMNS)]
            plgpu.copy_gmem_to_smem(source, self.b_smem.at[slot], self.full.at[slot])

        lax.fori_loop(0, self.steps, one, None)
        return it0 + self.steps

    def sum(self, wg, it0):
        """Consumer: its 64 rows of the product, float32."""
        if self.acc is not None:
            return self.sum_in_tensor_memory(wg, it0)

        def multiply(acc):
            def step(s, _):
                it = it0 + s
                slot = self.ring.slot(it)
                self.ring.wait(it)
                plgpu.wgmma(acc, self.a_smem.at[slot, pl.ds(wg * 64, 64)], self.b_smem.at[slot])
                plgpu.wgmma_wait(1)
                pl.when(s > 0)(lambda: self.ring.release(it - 1))

            lax.fori_loop(0, self.steps, step, None)
            value = acc[...]
            self.ring.release(it0 + (self.steps - 1))
            return value

        return pl.run_scoped(multiply, plgpu.ACC((64, _COLUMNS)))

    def sum_in_tensor_memory(self, wg, it0):
        """The same on Blackwell. The tensor cores release slots."""
        acc, done = self.acc.at[wg], self.done.at[wg]

        def step(s, _):
            it = it0 + s
            slot = self.ring.slot(it)
            self.ring.wait(it)
            a = self.a_smem.at[slot, pl.ds(wg * 64, 64)]
            plgpu.tcgen05_mma(acc, a, self.b_smem.at[slot], self.empty.at[slot], accumulate=s > 0)

        lax.fori_loop(0, self.steps, step, None)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        value = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        # all lanes have it before the next product overwrites it
        plgpu.barrier_arrive(self.taken.at[wg])
        plgpu.barrier_wait(self.taken.at[wg])
        return value


def _roles(producer, consumer, courier=None):
    wg = lax.axis_index("wg")

    pl.when(wg == _CONSUMERS)(producer)
    if courier:
        pl.when(wg == _CONSUMERS + 1)(courier)
    pl.when(wg < _CONSUMERS)(lambda: consumer(wg))


@cached
def _gathered(mesh, axis, m, k, n, dtype, out_dtype, blocks, interpret, tmem=False):
    size = distributed._size(mesh, axis)
    tiles_m, tiles_n = pl.cdiv(m, _ROWS), pl.cdiv(n, _COLUMNS)
    each = tiles_m * tiles_n
    padded = pl.cdiv(k, _STEP) * _STEP
    height = pl.cdiv(m, blocks)  # rows that a courier takes

    def body(refs, flags, epochs, **scratch):
        a, b, out, staging = refs
        d = _Device(flags, epochs, axis, blocks)
        products = _Products(k, scratch)
        out = out.reshape((size, m, n))
        tiles = StaticTiles(each * size, blocks, d.block)

        def place(t):
            shard, tile = (d.me + t // each) % size, t % each
            return shard, tile % tiles_m * _ROWS, tile // tiles_m * _COLUMNS

        def courier():
            """The rows of this block, to the device before this one first: it needs them next."""
            first = d.block * height
            for step in range(1, size):
                to = (d.me + size - step) % size
                target = d.on(staging, to).at[d.half, d.me]

                def send(r, _, target=target):
                    target[r, pl.ds(0, k)] = a[r]

                lax.fori_loop(first, jnp.minimum(first + height, m), send, None)
                d.tell(to, 0)

        def producer():
            def fetch(t, it0):
                shard, row, col = place(t)
                own = t < each
                pl.when(~own)(lambda: d.hear(shard, 0, blocks))
                sources = [(own, a), (~own, staging.at[d.half, shard])]
                return products.fetch(sources, b, row, col, it0)

            products.ring.drain(tiles.produce(fetch, jnp.int32(0)))

        def consumer(wg):
            def multiply(t, it0):
                shard, row, col = place(t)
                value = products.sum(wg, it0)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for c in range(_COLUMNS // _CHUNK):
                    where = pl.ds(row + wg * 64, 64), pl.ds(col + c * _CHUNK, _CHUNK)
                    part = value[:, c * _CHUNK : (c + 1) * _CHUNK].astype(out_dtype)
                    store(products.o_smem.at[wg, c], part, out.at[(shard, *where)])
                return it0 + products.steps

            tiles.consume(multiply, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        _roles(producer, consumer, courier)
        d.end()

    return Collective(
        mesh,
        body,
        "all_gather_matmul",
        [((size * m, n), out_dtype)],
        [((2, size, m, padded), dtype)],
        blocks,
        interpret,
        num_threads=_CONSUMERS + 2,
        flags=(1, 1),
        scratch_types={
            **_Products.scratch(dtype, tmem),
            "o_smem": plgpu.SMEM((_CONSUMERS, _COLUMNS // _CHUNK, 64, _CHUNK), out_dtype),
        },
    )


@cached
def _scattered(mesh, axis, m, k, n, dtype, out_dtype, blocks, interpret, tmem=False):
    """m: rows of the result of a device."""
    size = distributed._size(mesh, axis)
    tiles_m, tiles_n = pl.cdiv(m, _ROWS), pl.cdiv(n, _COLUMNS)
    each = tiles_m * tiles_n

    def body(refs, flags, epochs, **scratch):
        a, b, out, staging = refs
        d = _Device(flags, epochs, axis, blocks)
        products = _Products(k, scratch)
        a = a.reshape((size, m, k))
        tiles = StaticTiles(each * size, blocks, d.block)

        def place(tile):
            return tile % tiles_m * _ROWS, tile // tiles_m * _COLUMNS

        def device(t):
            return (d.me + 1 + t // each) % size

        def producer():
            def fetch(t, it0):
                return products.fetch([(True, a.at[device(t)])], b, *place(t % each), it0)

            products.ring.drain(tiles.produce(fetch, jnp.int32(0)))

        def consumer(wg):
            def tell(t):
                """What was sent of tile t is there."""
                plgpu.wait_smem_to_gmem(0)
                d.tell(device(t), t % each * _CONSUMERS + wg)

            def send(t, carry):
                it0, before = carry
                row, col = place(t % each)
                value = products.sum(wg, it0)
                pl.when(before >= 0)(lambda: tell(before))
                target = d.on(staging, device(t)).at[d.half, d.me]
                for c in range(_COLUMNS // _CHUNK):
                    where = pl.ds(row + wg * 64, 64), pl.ds(col + c * _CHUNK, _CHUNK)
                    part = value[:, c * _CHUNK : (c + 1) * _CHUNK]
                    store(products.sums.at[wg, c], part, target.at[where])
                return it0 + products.steps, t

            tell(tiles.consume(send, (jnp.int32(0), jnp.int32(-1)))[1])

            def total(tile, _):
                row, col = place(tile)
                for s in range(size):
                    d.hear(s, tile * _CONSUMERS + wg)
                for c in range(_COLUMNS // _CHUNK):
                    where = pl.ds(row + wg * 64, 64), pl.ds(col + c * _CHUNK, _CHUNK)
                    value = staging[(d.half, 0, *where)]
                    for s in range(1, size):
                        value = value + staging[(d.half, s, *where)]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    store(products.o_smem.at[wg], value.astype(out_dtype), out.at[where])

            StaticTiles(each, blocks, d.block).consume(total, None)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        _roles(producer, consumer)
        d.end()

    return Collective(
        mesh,
        body,
        "matmul_reduce_scatter",
        [((m, n), out_dtype)],
        [((2, size, tiles_m * _ROWS, tiles_n * _COLUMNS), np.dtype(np.float32))],
        blocks,
        interpret,
        num_threads=_CONSUMERS + 1,
        flags=(each * _CONSUMERS, 1),
        scratch_types={
            **_Products.scratch(dtype, tmem),
            "sums": plgpu.SMEM((_CONSUMERS, _COLUMNS // _CHUNK, 64, _CHUNK), jnp.float32),
            "o_smem": plgpu.SMEM((_CONSUMERS, 64, _CHUNK), out_dtype),
        },
    )


@cached
def _reduced(mesh, axis, m, k, n, dtype, out_dtype, blocks, interpret, tmem=False):
    size = distributed._size(mesh, axis)
    tiles_m, tiles_n = pl.cdiv(m, _ROWS), pl.cdiv(n, _COLUMNS)
    all_tiles = tiles_m * tiles_n
    each = pl.cdiv(all_tiles, size)  # of a device; the last one of some is computed for nobody
    ends = each * _CONSUMERS  # the flag of the end

    def body(refs, flags, epochs, **scratch):
        a, b, out, staging = refs
        d = _Device(flags, epochs, axis, blocks)
        products = _Products(k, scratch)
        tiles = StaticTiles(each * size, blocks, d.block)

        def place(tile):
            tile = jnp.minimum(tile, all_tiles - 1)
            return tile % tiles_m * _ROWS, tile // tiles_m * _COLUMNS

        def device(t):
            return (d.me + 1 + t // each) % size

        def number(t):
            return t % each * size + device(t)

        def producer():
            def fetch(t, it0):
                return products.fetch([(True, a)], b, *place(number(t)), it0)

            products.ring.drain(tiles.produce(fetch, jnp.int32(0)))

        def parts(wg, row, col):
            for c in range(_COLUMNS // _CHUNK):
                yield c, (pl.ds(row + wg * 64, 64), pl.ds(col + c * _CHUNK, _CHUNK))

        def consumer(wg):
            def tell(t):
                """What was sent of tile t is there."""
                plgpu.wait_smem_to_gmem(0)
                d.tell(device(t), t % each * _CONSUMERS + wg)

            def send(t, carry):
                it0, before = carry
                value = products.sum(wg, it0)
                pl.when(before >= 0)(lambda: tell(before))
                target = d.on(staging, device(t)).at[d.half, d.me, t % each]
                for c, where in parts(wg, 0, 0):
                    part = value[:, c * _CHUNK : (c + 1) * _CHUNK]
                    store(products.sums.at[wg, c], part, target.at[where])
                return it0 + products.steps, t

            tell(tiles.consume(send, (jnp.int32(0), jnp.int32(-1)))[1])
            targets = [d.on(out, (d.me + s) % size) for s in range(size)]

            def total(tile, _):
                for s in range(size):
                    d.hear(s, tile * _CONSUMERS + wg)
                places = zip(parts(wg, 0, 0), parts(wg, *place(tile * size + d.me)))
                for (_, source), (_, where) in places:
                    value = staging[(d.half, 0, tile, *source)]
                    for s in range(1, size):
                        value = value + staging[(d.half, s, tile, *source)]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    products.o_smem[wg] = value.astype(out_dtype)
                    plgpu.commit_smem()
                    for target in targets:
                        plgpu.copy_smem_to_gmem(products.o_smem.at[wg], target.at[where])

            mine = (all_tiles - d.me + (size - 1)) // size
            trips = (mine - d.block + (blocks - 1)) // blocks
            lax.fori_loop(0, trips, lambda w, _: total(d.block + w * blocks, None), None)
            plgpu.wait_smem_to_gmem(0)
            for s in range(1, size):
                d.tell((d.me + s) % size, ends)
            for s in range(1, size):
                d.hear((d.me + s) % size, ends, blocks * _CONSUMERS)

        _roles(producer, consumer)
        d.end()

    return Collective(
        mesh,
        body,
        "matmul_all_reduce",
        [((m, n), out_dtype)],
        [((2, size, each, _ROWS, _COLUMNS), np.dtype(np.float32))],
        blocks,
        interpret,
        num_threads=_CONSUMERS + 1,
        flags=(ends + 1, 1),
        scratch_types={
            **_Products.scratch(dtype, tmem),
            "sums": plgpu.SMEM((_CONSUMERS, _COLUMNS // _CHUNK, 64, _CHUNK), jnp.float32),
            "o_smem": plgpu.SMEM((_CONSUMERS, 64, _CHUNK), out_dtype),
        },
    )


def _has_tensor_memory(mesh):
    return _tensor_memory.runs_here(mesh.devices[0] if mesh.devices else None)


def _operands(a, b, mesh, what):
    x, y = distributed._operand(a, mesh, what), distributed._operand(b, mesh, what)
    dtype = distributed._dtype(x, what)
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[1] != y.shape[0]:
        raise ValueError(
            f"{what}: a must be (m, k) and b (k, n), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if distributed._dtype(y, what) != dtype or dtype.name not in ("float16", "bfloat16"):
        raise NotImplementedError(
            f"{what}: a and b of float16, or of bfloat16; got {x.dtype} and {y.dtype}"
        )
    return (*map(int, x.shape), int(y.shape[1])), dtype


def all_gather_matmul(
    a, b, mesh, axis_name=None, *, out_dtype=None, blocks=SMS, interpret=None, out=None
):
    """The product of all devices' rows of A with each device's own B, while the rows travel.

    a: (m, k) on each device; b: (k, n); float16 or bfloat16. Returns (devices * m, n), in
    ``out_dtype`` (that of the operands), the rows in the order of the devices. Arrays as for
    :func:`all_gather`. ``blocks``: SMs of each device, at most as many as it has."""
    what = "all_gather_matmul"
    (m, k, n), dtype = _operands(a, b, mesh, what)
    axis, size = distributed._along(mesh, axis_name, what)
    out_dtype = dtype if out_dtype is None else plgpu.ShapeDtypeStruct((), out_dtype).dtype
    most = math.prod((pl.cdiv(m, _ROWS), pl.cdiv(n, _COLUMNS), size))
    blocks = min(distributed._blocks(blocks, what), most)
    how = blocks, interpret, _has_tensor_memory(mesh)
    f = _gathered(mesh, axis, m, k, n, dtype, out_dtype, *how)
    return f(a, b, out=out)


def matmul_reduce_scatter(
    a, b, mesh, axis_name=None, *, out_dtype=None, blocks=SMS, interpret=None, out=None
):
    """The sum over the devices of A @ B, of which each gets its rows, while the summands travel.

    a: (devices * m, k) on each device; b: (k, n); float16 or bfloat16. Returns (m, n): device d has
    the rows from d * m on. Summands are float32, added in the order of the devices. ValueError if
    the rows have no equal parts. Else as :func:`all_gather_matmul`."""
    what = "matmul_reduce_scatter"
    (rows, k, n), dtype = _operands(a, b, mesh, what)
    axis, size = distributed._along(mesh, axis_name, what)
    if rows % size:
        raise ValueError(f"{what}: {rows} rows have no {size} equal parts")
    out_dtype = dtype if out_dtype is None else plgpu.ShapeDtypeStruct((), out_dtype).dtype
    m = rows // size
    most = math.prod((pl.cdiv(m, _ROWS), pl.cdiv(n, _COLUMNS), size))
    blocks = min(distributed._blocks(blocks, what), most)
    how = blocks, interpret, _has_tensor_memory(mesh)
    f = _scattered(mesh, axis, m, k, n, dtype, out_dtype, *how)
    return f(a, b, out=out)


def matmul_all_reduce(
    a, b, mesh, axis_name=None, *, out_dtype=None, blocks=SMS, interpret=None, out=None
):
    """The sum over the devices of A @ B, on all of them, while the summands travel.

    a: (m, k) on each device; b: (k, n); float16 or bfloat16. Returns (m, n), the same bits on all
    devices. Summands are float32, added in the order of the devices. Else as
    :func:`all_gather_matmul`."""
    what = "matmul_all_reduce"
    (m, k, n), dtype = _operands(a, b, mesh, what)
    axis, size = distributed._along(mesh, axis_name, what)
    out_dtype = dtype if out_dtype is None else plgpu.ShapeDtypeStruct((), out_dtype).dtype
    each = pl.cdiv(math.prod((pl.cdiv(m, _ROWS), pl.cdiv(n, _COLUMNS))), size)
    blocks = min(distributed._blocks(blocks, what), each * size)
    how = blocks, interpret, _has_tensor_memory(mesh)
    f = _reduced(mesh, axis, m, k, n, dtype, out_dtype, *how)
    return f(a, b, out=out)
