"""Products over the devices of a mesh, which compute while their operands or results travel.

The product is that of matmul.py, with its tiles, order and ring: persistent clusters of blocks go
through the tiles of one part of the result after the other, a part for each device.

All-gather, then product: each device has some rows of A, and wants the product of all rows with
its own B. A warp of each block's producer, the *courier*, moves pieces of the rows of its device
through shared memory into staging memory of the others, by TMA. Pieces make up *cells*, some rows
and some columns each, which are sent in the order in which they are needed. The block works on the
device's own rows first, and on those of another device as cells arrive: all pieces of a cell raise
the same flag, two of them at a time where they are loaded.

Product, then reduce-scatter: each device has some columns of A and rows of B, so that its product
is one of the summands. Blocks begin with the tiles of the other devices. Consumers write their
summands, float32, to memory of their own device, from where the courier takes them to the device
whose rows they are, while the next tiles are multiplied. Blocks end with their own tiles. Another
warp, the *listener*, hears what came for them, and the consumers add it, in the order of the ranks.

Product, then all-reduce: as before, but tiles are dealt to the devices one by one, and the courier
sends the sum of a tile to all others. A kernel ends once all devices have signalled that their sums
have arrived.

Where there is one wave of tiles, all of them would be ready at its end, and the transfer begin
there. Blocks of a cluster then divide K among them, and go through the tiles in more waves.

With `transfer="pull"`, no device stores to another: couriers load instead. Rows are loaded from the
operands of the other devices, which are ready once their kernels have begun, and which must not
change until all devices have signalled that they have loaded them. Summands stay in memory of their
own device until a fourth warp of the producer of the block that adds them, the *puller*, sees their
flag; it copies them to memory of its own device and raises a flag for the whole tile.

Flags that only blocks of the own device wait for are released for that device alone, which takes a
fraction of the time of a release for all.

With `transfer="engine"` the copy engines move the data: _distributed_engine.py.

Staging memory has two halves, and flags count up, as in distributed.py. All blocks run at once, so
that a block that waits for one of another device waits for one that runs.

On Blackwell each consumer issues its own products of 64 rows, into tensor memory."""

import math

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

from ._common import SMEM_BYTES, StaticTiles
from ._matmul_checks import check
from ._matmul_choice import MatmulConfig, candidates, clusters_at_once, cycles
from .distributed import Own, each
from .matmul import _Block, _KernelPlan

_PIECE, _PIECES = (16, 256), 2  # rows and columns that a courier moves at a time, and its slots
_LEAVING = 1  # pieces on the way from there, while the other slots are filled
_CELLS = 8  # along K, at most
_PANEL = 8  # columns of summands that follow each other in memory
_WAITING = 2  # tiles of a block that are to be sent
_PULLING = 56, 224  # registers of a lane of the producer, which has four roles, and of consumers
_UNROLLED = 4  # devices whose summands are all loaded at once, at most
# For the choice of tiles, from times on two H200s: bytes that a device sends in a cycle of an SM;
# cycles until what blocks that divide K send each other is added, and until the first rows of
# another device are there; how much longer products take whose blocks share no operands; and, on
# four H100s, several waves of tiles of fewer than 256 columns: they read more from L2, as the
# transfer does.
_LINK, _JOIN, _FIRST_ROWS, _ALONE, _NARROW = 215, 8500, 14000, 1.03, 1.12


class Plan(_KernelPlan):
    """A part for each device of an axis: products of the same shape, x, or tiles of x, dealt.

    Blocks that divide K, `split` of them, exchange their sums by way of global memory, so that
    shared memory has room for the ring; each goes on with `width` columns of the tile."""

    def __init__(self, x, cfg, blocks, parts, threads, dealt=False):
        super().__init__(x, cfg._replace(split=1), blocks)
        self.parts, self.threads, self.single, self.split = parts, threads, False, cfg.split
        self.sms, self.dealt = blocks, dealt
        self.steps = pl.cdiv(self.steps, self.split)
        self.width = self.cols // self.split
        self.chunk = math.gcd(self.chunk, self.width)
        self.chunks = self.width // self.chunk
        self.buffers = max(b for b in range(1, self.buffers + 1) if self.chunks % b == 0)
        self.panels = (self.width // _PANEL, 64, _PANEL)
        if self.split > 1:
            self.cluster *= self.split
            self.axes["ck"] = self.split
        # tiles of a part; where they are dealt the last ones of some are for nobody
        self.each = pl.cdiv(self.tiles, parts) if dealt else self.tiles
        self.total = self.each * parts
        # all of them run at once
        most = int(clusters_at_once(blocks, self.cluster))
        self.clusters = min(self.total, max(most, 1))
        self.blocks = self.clusters * self.cluster

    @staticmethod
    def fits(x, cfg):
        """Is there a kernel with these tiles?"""
        return True

    def product(self, parts):
        """Cycles that the product takes, and how many waves of tiles there are. parts: how many
        times the rows of x."""
        x, waves = self.x, pl.cdiv(self.total, self.clusters)
        part = pl.cdiv(x.k, self.split)
        took = cycles(parts * x.m, x.n * self.split, part, self.cfg, self.sms)
        took *= _ALONE if self.cfg.cluster * self.cfg.cluster_n == 1 else 1
        if self.cfg.tile_n < 256 and self.each > self.clusters:
            took *= _NARROW
        return took + (waves * _JOIN if self.split > 1 else 0), waves

    def options(self):
        """Of the kernel."""
        return {
            "cluster": tuple(self.axes.values()),
            "cluster_names": tuple(self.axes),
            "num_threads": self.threads,
            "epochs": self.blocks * self.threads,
        }

    def scratch(self):
        found = super().scratch()
        if self.split > 1:
            found["joined"] = plgpu.ClusterBarrier(
                collective_axes=("ck",), num_barriers=self.consumers
            )
        return found

    def staging(self):
        """Sums of parts of K for each block, of two tiles."""
        shape = (2, self.blocks, self.split, self.consumers, *self.panels)
        return [Own(shape, np.dtype(np.float32))] if self.split > 1 else []

    def named(self, refs, *names):
        """The operands, the result and the staging memory by name."""
        return self.x.named(*refs[:3]) | dict(zip((*names, "halves"), refs[3:]))


def plan_of(kind, x, blocks, parts, tmem, given, **options):
    """The plan for a configuration, or the fastest one."""
    couriers = 2 if kind is PullSumPlan and options.get("dealt") else 1

    def plan(cfg):
        return kind(x, cfg, blocks, parts, **options)

    if tmem:
        return plan(MatmulConfig(2, 128, 4, 1, serpentine=False))
    if given and kind.fits(x, given):
        return plan(_fitted(given, couriers))
    found = []
    for cfg in candidates(x.m, x.n, x.k, blocks):
        if cfg.split * cfg.slices * cfg.shares > 1 or cfg.cluster * cfg.cluster_n > blocks:
            continue
        if cfg.consumers > 2 or cfg.consumer_rows > 64 or not kind.fits(x, cfg):
            continue
        alone = cfg.cluster == cfg.cluster_n == 1
        steps = pl.cdiv(x.k, cfg.step)
        for split in (1, 2, 4) if alone else (1,):
            if split == 1 or split <= blocks and steps >= 8 * split and cfg.tile_n >= 64 * split:
                fitted = _fitted(cfg._replace(buffers=1, split=split), couriers)
                found.append(plan(fitted))
    if not found or given and not kind.fits(x, given):
        raise NotImplementedError(
            f'transfer="engine" for a part ({x.m}, {x.n}) of the sums that is not a multiple of a'
            ' tile; use "push" or "pull"'
        )
    return min(found, key=lambda p: p.time())


def _fitted(cfg, couriers=1):
    """The same with as many slots as there is room for."""
    used = cfg.consumers * (cfg.buffers * 8192 + cfg.tile_n * 2)
    used += couriers * _PIECES * math.prod(_PIECE) * 2
    most = min((SMEM_BYTES - used) // ((64 * cfg.consumers + cfg.tile_n) * cfg.step * 2), 12)
    return cfg._replace(stages=min(cfg.stages or most, most))


def checked(config, what, m, tmem):
    """Raises an error for a configuration that there is no kernel for."""
    if config is None:
        return
    if tmem:
        raise NotImplementedError(f"{what}: config= on Blackwell; leave it out")
    check(config, m, False, False)
    whole = isinstance(config, MatmulConfig) and config.slices == config.shares == 1
    if not whole or config.swapped or config.consumer_rows > 64:
        raise ValueError(
            f"{what}: config must be a MatmulConfig without slices, shares, swapped operands"
            f" and consumer_rows; got {config}"
        )
    if _fitted(config).stages < 2:
        raise ValueError(f"{what}: shared memory must have room for two slots; got {config}")


class DeviceBlock(_Block):
    """A block of one device, and the flags that it exchanges with others."""

    acc = None  # accumulators in tensor memory

    def __init__(self, plan, axis, refs, flags, epochs):
        super().__init__(plan, refs)
        self.flags, self.axis = plgpu.ext.as_semaphores(flags), axis
        self.size, self.me = lax.axis_size(axis), lax.axis_index(axis)
        cfg = plan.cfg
        self.in_cluster = self.rank("cm") * cfg.cluster_n + self.rank("cn")
        self.in_cluster = self.in_cluster * plan.split + self.rank("ck")
        self.block = lax.axis_index("block") * plan.cluster + self.in_cluster
        self.epochs = epochs.at[self.block * plan.threads + lax.axis_index("wg")]
        self.epoch = self.epochs[...] + 1  # of this thread alone
        self.half = self.epoch % 2

    def run(self):
        super().run()
        self.epochs[...] = self.epoch

    def roles(self):
        """Of the warps of the producer: one fetches for the consumers, another is the courier."""
        return [super().producer, self.courier]

    def producer(self):
        roles = self.roles()

        @plgpu.warp_map
        def _(warp):
            for k, role in enumerate(roles):
                pl.when(warp == k)(role)

    def on(self, ref, device):
        return plgpu.remote_ref(ref, {self.axis: device})

    def signal(self, device, flag):
        """Raises this device's flag of a kind on another one."""
        plgpu.semaphore_signal(self.flags.at[flag, 0, self.me], device_id={self.axis: device})

    def raised(self, device, flag):
        """Raises the flag of a kind that another device has here, for blocks of this one."""
        plgpu.semaphore_signal(self.flags.at[flag, 0, device], memory_scope="gpu")

    def step_back(self, step):
        """The device so many places before this one."""
        return (self.me + self.size - step) % self.size

    def among(self, x, device):
        """The number of device x among the others of a device."""
        # the compiler cannot tell that it is in bounds
        return jnp.clip(x - (x > device).astype(jnp.int32), 0, self.size - 2)

    def await_signal(self, device, flag, times=1, n=None):
        """Waits until `device` has raised its flag n times in this launch; it does so `times` times
        in each one. n: all of them by default."""
        target = self.epoch * times if n is None else (self.epoch - 1) * times + n
        plgpu.semaphore_wait(self.flags.at[flag, 0, device], target, decrement=False)

    def carry(self, slots, first, n, source, targets, there=None, arrived=None):
        """A warp copies pieces j < n from source(j) to all of targets(j), by TMA through slots of
        shared memory. there(j) is called when piece j is there. first: pieces carried before.
        arrived: the barriers of the slots."""
        ahead, arrived = _PIECES - _LEAVING, self.arrived if arrived is None else arrived

        def load(j):
            slot = (first + j) % _PIECES
            plgpu.copy_gmem_to_smem(source(j), slots.at[slot], arrived.at[slot])

        def send(j, _):
            it = first + j
            plgpu.barrier_wait(arrived.at[it % _PIECES], phase=it // _PIECES)
            *others, last = targets(j)
            for target in others:
                plgpu.copy_smem_to_gmem(slots.at[it % _PIECES], target, commit_group=False)
            plgpu.copy_smem_to_gmem(slots.at[it % _PIECES], last)
            plgpu.wait_smem_to_gmem(_LEAVING)  # the piece so many before is there
            pl.when(j + ahead < n)(lambda: load(j + ahead))
            if there:
                pl.when(j >= _LEAVING)(lambda: there(j - _LEAVING))

        for j in range(ahead):
            pl.when(j < n)(lambda j=j: load(j))
        lax.fori_loop(0, n, send, None)
        plgpu.wait_smem_to_gmem(0)
        for j in reversed(range(_LEAVING)):
            if there:
                pl.when(j < n)(lambda j=j: there(n - 1 - j))

    def first_step(self):
        """Of this block's share of K."""
        return self.rank("ck") * self.plan.steps

    def corner(self, t):
        """First row and column of this block's part of the result of tile t."""
        row, col = self.origin(t)
        return row, col + self.rank("ck") * self.plan.width

    def others_of(self, me, size):
        """The others of so many, in their order."""
        return [jnp.int32(d) + (me <= d).astype(jnp.int32) for d in range(size - 1)]

    def join(self, me, it0, value):
        """Sums of all blocks that divide K, of this one's columns. it0: where the tile begins."""
        p, rank = self.plan, self.rank("ck")
        if p.split == 1:
            return value
        # a block that is still reading has not come to the sums after these
        halves, first = self.halves.at[it0 // p.steps % 2], self.block - rank
        parts = [value[:, j * p.width : (j + 1) * p.width] for j in range(p.split)]

        def panels(block, sender):
            return halves.at[block, sender, me].transpose((1, 0, 2))

        own = parts[0]
        for j, part in enumerate(parts):
            own = lax.select(rank == j, part, own)

            @pl.when(rank != j)
            def _(j=j, part=part):
                target = panels(first + j, rank)
                target[...] = part.reshape(target.shape)

        plgpu.barrier_arrive(self.joined.at[me])
        plgpu.barrier_wait(self.joined.at[me])
        others = self.others_of(rank, p.split)
        found = (panels(self.block, j)[...].reshape(64, p.width) for j in others)
        return in_order(rank, own, found, p.split)

    def tiles(self):
        return StaticTiles(self.plan.total, self.plan.clusters, lax.axis_index("block"))

    def part(self, t, first):
        """The device whose part of the result has tile t; the own one is the first or the last."""
        return (self.me + (0 if first else 1) + t // self.plan.each) % self.size

    def sum(self, me, it0, meanwhile=None):
        if self.acc is None:
            return super().sum(me, it0, meanwhile)
        acc, done = self.acc.at[me], self.done.at[me]

        def step(s, _):
            it = it0 + s
            slot = self.ring.slot(it)
            self.ring.wait(it)
            a = self.a_smem.at[slot, pl.ds(me * 64, 64)]
            # the tensor cores release the slot
            plgpu.tcgen05_mma(acc, a, self.b_smem.at[slot], self.empty.at[slot], accumulate=s > 0)

        lax.fori_loop(0, self.plan.steps, step, None)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        value = plgpu.async_load_tmem(acc)
        plgpu.wait_load_tmem()
        # all lanes have it before the next product overwrites it
        plgpu.barrier_arrive(self.taken.at[me])
        plgpu.barrier_wait(self.taken.at[me])
        return [value], None


def in_order(rank, own, others, n):
    """The sum of n arrays in their order: the own one, which is number `rank`, and the others."""
    if n == 2:
        (other,) = others
        return own + other
    total = lax.select(rank == 0, own, jnp.zeros_like(own))
    for d, value in enumerate(others):
        total = total + value
        total = lax.select(rank == d + 1, total + own, total)
    return total


def scratch_types(plan, tmem):
    found, consumers = plan.scratch(), plan.consumers
    if tmem:
        of_each = {"num_barriers": consumers, "orders_tensor_core": True}
        found |= {"done": plgpu.Barrier(**of_each), "taken": plgpu.Barrier(**of_each)}
        found["acc"] = plgpu.TMEM((consumers, 64, plan.cols), jnp.float32)
        found["empty"] = plgpu.Barrier(
            num_arrivals=consumers, num_barriers=plan.stages, orders_tensor_core=True
        )
    return found


# ---- rows that travel ---------------------------------------------------------------------------


class GatherPlan(Plan):
    """The same with cells. A *band* is the rows of A that tiles are worked on together for; the
    pieces of a run, of one cell, raise its flag together."""

    run = 1

    def time(self):
        """An estimate, in cycles."""
        took, waves = self.product(self.parts)
        sent = (self.parts - 1) * self.x.m * self.x.k * self.x.dtypes[0].itemsize / _LINK
        wave = took / waves
        if self.each < self.clusters:  # some blocks begin with rows that are yet to come
            took = max(took, _FIRST_ROWS + wave * pl.cdiv(self.total - self.each, self.clusters))
        return max(took, sent + wave / self.slabs)

    def __init__(self, x, cfg, blocks, parts):
        super().__init__(x, cfg, blocks, parts, cfg.consumers + 1)
        wide, steps = _PIECE[1] // cfg.step, self.steps * self.split  # steps of a piece
        self.slab = pl.cdiv(pl.cdiv(steps, _CELLS), wide) * wide  # steps of a cell
        self.slabs = pl.cdiv(steps, self.slab)
        self.across = self.slab // wide  # pieces of a cell side by side
        self.band = self.group * self.rows * cfg.cluster
        self.bands = pl.cdiv(x.m, self.band)
        self.flags = self.bands * self.slabs
        last = x.m - (self.bands - 1) * self.band
        # runs of pieces of a cell; the last ones may be beyond the rows
        self.runs, self.last_runs = (
            pl.cdiv(pl.cdiv(rows, _PIECE[0]) * self.across, self.run) for rows in (self.band, last)
        )

    def scratch(self):
        return super().scratch() | {
            "pieces": plgpu.SMEM((_PIECES, *_PIECE), self.x.dtypes[0]),
            "arrived": plgpu.Barrier(num_barriers=_PIECES),
        }

    def staging(self):
        columns = self.steps * self.split * self.cfg.step
        return [((2, self.parts - 1, self.x.m, columns), self.x.dtypes[0]), *super().staging()]

    def runs_of(self, band):
        return lax.select(band == self.bands - 1, self.last_runs, self.runs)


class GatherBlock(DeviceBlock):
    def fetch_tile(self, t, it0):
        p, shard = self.plan, self.part(t, True)
        own, (row, col) = t < p.tiles, self.origin(t % p.tiles)
        band, first = row // p.band, self.first_step()

        def arrived(s):
            cell = band * p.slabs + (first + s) // p.slab

            @pl.when(~own & ((s == 0) | ((first + s) % p.slab == 0)))
            def _():
                self.await_signal(shard, cell, p.runs_of(band))

        arrival = jnp.maximum(t // p.tiles, 1) - 1  # the shards of others, in this order
        sources = [(own, self.a), (~own, self.arrivals(arrival))]
        return self.fetch_steps(it0, row, col, first * p.cfg.step, sources, own, arrived)

    def arrivals(self, number):
        return self.staging.at[self.half, number]

    def block_pieces(self):
        """How many pieces of a device's rows this block moves; place(j), for piece j of them: the
        cell, and the rows and columns; and there(j, tell): tell(cell) when a run is there."""
        p = self.plan
        per_band = p.slabs * p.runs
        total = (p.bands - 1) * per_band + p.slabs * p.last_runs
        trips = (total - self.block + (p.blocks - 1)) // p.blocks

        def place(j):
            g = self.block + j // p.run * p.blocks
            band = jnp.minimum(g // per_band, p.bands - 1)
            inside, runs = g - band * per_band, p.runs_of(band)
            slab, i = inside // runs, inside % runs * p.run + j % p.run
            row = band * p.band + i // p.across * _PIECE[0]
            col = slab * (p.slab * p.cfg.step) + i % p.across * _PIECE[1]
            # not before the array, which the compiler cannot tell
            row, col = jnp.maximum(row, 0), jnp.maximum(col, 0)
            return band * p.slabs + slab, (pl.ds(row, _PIECE[0]), pl.ds(col, _PIECE[1]))

        def there(j, tell):
            pl.when(j % p.run == p.run - 1)(lambda: tell(place(j)[0]))

        return trips * p.run, place, there

    def courier(self):
        """The pieces of this block, to the device before this one first: it needs them next."""
        trips, place, there = self.block_pieces()

        def send(step):
            to = self.step_back(step)
            target = self.on(self.staging, to).at[self.half, step - 1]
            self.carry(
                self.pieces,
                trips * (step - 1),
                trips,
                lambda j: self.a.at[place(j)[1]],
                lambda j: [target.at[place(j)[1]]],
                lambda j: there(j, lambda cell: self.signal(to, cell)),
            )

        each(1, self.size, send)

    def consumer(self, me):
        def multiply(t, it0):
            [value], _ = self.sum(me, it0)
            value = self.join(me, it0, value)
            part, (row, col) = self.part(t, True), self.corner(t % self.plan.tiles)
            self.epilogue(me, [value], [self.o.at[part]], row, col)
            return it0 + self.plan.steps

        self.tiles().consume(multiply, jnp.int32(0))


class PullGatherPlan(GatherPlan):
    """The same with flags of blocks that have begun, and that have fetched all. A flag for each
    piece would take a courier longer than to fetch it."""

    run = 2

    def __init__(self, *args):
        super().__init__(*args)
        self.begun, self.fetched = self.flags, self.flags + 1
        self.flags += 2

    def staging(self):
        ((_, *shape), dtype), *others = super().staging()
        return [Own((1, *shape), dtype), *others]


class PullGatherBlock(GatherBlock):
    def arrivals(self, number):
        return self.staging.at[0, number]

    def courier(self):
        """The pieces of this block, of the device after this one first: they are needed next."""
        p, (trips, place, there) = self.plan, self.block_pieces()

        def step_on(k):
            return (self.me + k) % self.size

        def fetch(step):
            source = step_on(step)
            self.await_signal(source, p.begun)
            self.carry(
                self.pieces,
                trips * (step - 1),
                trips,
                lambda j: self.on(self.a, source).at[place(j)[1]],
                lambda j: [self.arrivals(step - 1).at[place(j)[1]]],
                lambda j: there(j, lambda cell: self.raised(source, cell)),
            )
            self.signal(source, p.fetched)

        first = self.block == 0
        pl.when(first)(lambda: each(1, self.size, lambda k: self.signal(step_on(k), p.begun)))
        each(1, self.size, fetch)
        pl.when(first)(
            lambda: each(1, self.size, lambda k: self.await_signal(step_on(k), p.fetched, p.blocks))
        )


# ---- summands that travel -----------------------------------------------------------------------


class SumPlan(Plan):
    """The same with summands. A *share* of a tile is that of a block. What blocks move at the same
    time, a consumer's part of the same chunk of columns, lies side by side in memory. It is stored
    in panels of 8 columns, which are contiguous for a warp as it holds the accumulators."""

    def time(self):
        """An estimate, in cycles."""
        x = self.x
        took, waves = self.product(1 if self.dealt else self.parts)
        wave, first = took / waves, pl.cdiv(self.total - self.each, self.clusters)
        sent = (self.total - self.each) * self.cluster * self.rows * self.width * 4 / _LINK
        # the last summands are there when all are sent, or the last ones alone
        took = max(took, wave + sent, first * wave + sent / first)
        if self.dealt:  # and the sums of the last tiles
            results = self.each * (self.parts - 1) * self.cluster * self.rows * self.width
            results *= x.out_dtype.itemsize / _LINK
            took = max(took + results / max(waves - first, 1), wave + sent + results)
        return took

    def __init__(self, x, cfg, blocks, parts, dealt=False):
        super().__init__(x, cfg, blocks, parts, cfg.consumers + 1, dealt)
        self.units = self.each * self.cluster  # shares that devices send to each other
        self.flags = self.units + 1
        self.part = (self.chunk // _PANEL, 64, _PANEL)
        part = 64 * self.chunk
        self.piece = min(math.prod(_PIECE) // 2, part)  # elements
        self.pieces = part // self.piece  # of a consumer's part of a chunk
        rows = 4 * math.prod(_PIECE) // 2 // (self.width * x.out_dtype.itemsize)
        self.result_piece = min(1 << rows.bit_length() - 1, 64), self.width

    def scratch(self):
        waiting = {"num_barriers": _WAITING}
        return super().scratch() | {
            # of summands, or of the result
            "pieces": plgpu.RefUnion(
                plgpu.SMEM((_PIECES, self.piece), jnp.float32),
                plgpu.SMEM((_PIECES, *self.result_piece), self.x.out_dtype),
            ),
            "arrived": plgpu.Barrier(num_barriers=_PIECES),
            "filled": plgpu.Barrier(num_arrivals=self.consumers, **waiting),
            "sent": plgpu.Barrier(**waiting),
            "came": plgpu.Barrier(num_barriers=self.chunks),
            "added": plgpu.Barrier(num_arrivals=self.consumers),
        }

    def staging(self):
        """What came from the others, in two halves, and what is to be sent."""
        share, f32 = (self.chunks, self.consumers), np.dtype(np.float32)
        return [
            ((2, self.parts - 1, *share, self.units, *self.part), f32),
            Own((_WAITING, *share, self.blocks, *self.part), f32),
            *super().staging(),
        ]


class Chunks:
    """A consumer's part of a tile, of which each chunk of columns is computed when it is needed."""

    def __init__(self, n, chunk):
        self.n, self.chunk = n, chunk

    def __len__(self):
        return self.n

    def __getitem__(self, c):
        return self.chunk(c)


class SumBlock(DeviceBlock):
    """Summands of the parts of other devices, then the sums of the own part.

    Consumers write a summand to memory of their device, and go on. A courier, a warp of the
    producer, sends it; another warp, the *listener*, hears what came, and lets the consumers add
    it. The unit of a block's share of a tile is the number of a flag, which counts chunks, and the
    place of a summand."""

    def source(self, t):
        """Where A of tile t is."""
        return self.a.at[self.part(t, False)]

    def tile(self, t):
        """The number of tile t in the product."""
        return t % self.plan.each

    def summed(self, t):
        """Is tile t of the own part one of the result?"""
        return t >= 0

    def sends(self):
        """How many tiles this block sends; those that it sums follow."""
        tiles = self.tiles()
        return StaticTiles(self.plan.each * (self.size - 1), tiles.clusters, tiles.first).count()

    def unit(self, t):
        return t % self.plan.each * self.plan.cluster + self.in_cluster

    def other(self, k):
        """Number k of the other devices, in the order of the ranks."""
        return k + (self.me <= k).astype(jnp.int32)

    def others(self):
        """The other devices, from the next one on."""
        return [(self.me + k) % self.size for k in range(1, self.size)]

    # ---- producer

    def roles(self):
        return [*super().roles(), self.listener]

    def fetch_tile(self, t, it0):
        first = self.first_step() * self.cfg.step
        return self.fetch_steps(it0, *self.origin(self.tile(t)), first, [(True, self.source(t))])

    def courier(self):
        sends = self.sends()
        self.each_filled(0, sends, self.carry_summands)

    def each_filled(self, first, end, carry):
        """carry(w) for tiles of this block from the first to the end, each when consumers allow."""

        def step(w, _):
            slot = w % _WAITING
            plgpu.barrier_wait(self.filled.at[slot], phase=w // _WAITING)
            carry(w)
            pl.when(w + _WAITING < self.filled_tiles())(
                lambda: plgpu.barrier_arrive(self.sent.at[slot])
            )

        lax.fori_loop(first, end, step, None)

    def filled_tiles(self):
        """How many tiles the courier carries something of."""
        return self.sends()

    def carried(self):
        """How many pieces of summands the courier carries."""
        p = self.plan
        return self.sends() * (p.chunks * p.consumers * p.pieces)

    def fill(self, w, write):
        """A consumer calls write(), which makes what the courier carries of tile w."""
        slot = w % _WAITING

        @pl.when(w >= _WAITING)
        def _():
            plgpu.barrier_wait(self.sent.at[slot], phase=w // _WAITING - 1)

        write()
        plgpu.barrier_arrive(self.filled.at[slot])

    def carry_share(self, before, source, target, signals, arrived=None):
        """A block's share of a tile, from a place (memory, number in it) to another one. signals():
        is called when a chunk is there, or, if it is fetched (arrived), all of it. before: shares
        carried before."""
        p = self.plan
        of_chunk = p.consumers * p.pieces
        n = p.chunks * of_chunk

        def there(j):
            told = of_chunk if arrived is None else n
            pl.when(j % told == told - 1)(signals)

        def piece(memory, unit, j):
            found = memory.at[j // of_chunk, j // p.pieces % p.consumers, unit]
            return found.reshape((p.pieces, p.piece)).at[j % p.pieces]

        self.carry(
            self.pieces[0] if arrived is None else self.pulled,
            before * n,
            n,
            lambda j: piece(*source, jnp.minimum(j, n - 1)),  # it is not beyond
            lambda j: [piece(*target, j)],
            there,
            arrived,
        )

    def carry_summands(self, w):
        t = self.tiles().tile(w)
        device, unit = self.part(t, False), self.unit(t)
        source = self.waiting.at[w % _WAITING], self.block
        there = self.on(self.staging, device).at[self.half, self.among(self.me, device)]
        self.carry_share(w, source, (there, unit), lambda: self.signal(device, unit))

    def outgoing(self, w, c, me):
        """Where a consumer's part of chunk c of tile w is to be left."""
        return self.waiting.at[w % _WAITING, c, me, self.block]

    def arrivals(self, number):
        return self.staging.at[self.half, number]

    def await_summands(self, t, c):
        """Waits for chunk c of tile t of all other devices."""
        n, unit = self.plan.chunks, self.unit(t)
        each(0, self.size - 1, lambda k: self.await_signal(self.other(k), unit, n, c + 1))

    def listener(self):
        p, tiles = self.plan, self.tiles()

        def await_signal(t, k):
            pl.when(k > 0)(lambda: plgpu.barrier_wait(self.added, phase=k - 1))
            for c in range(p.chunks):
                self.await_summands(t, c)
                plgpu.barrier_arrive(self.came.at[c])

        def step(w, k):
            t = tiles.tile(w)
            pl.when(self.summed(t))(lambda: await_signal(t, k))
            return k + self.summed(t).astype(jnp.int32)

        k = lax.fori_loop(self.sends(), tiles.count(), step, jnp.int32(0))
        pl.when(k > 0)(lambda: plgpu.barrier_wait(self.added, phase=k - 1))

    # ---- consumers

    def consumer(self, me):
        sends = self.sends()

        def multiply(t, carry):
            it0, w, k = carry
            [value], _ = self.sum(me, it0)
            value = self.join(me, it0, value)
            own = w >= sends
            summed = own & self.summed(t)
            pl.when(~own)(lambda: self.send(w, me, value))
            pl.when(summed)(lambda: self.total(t, w, me, value, k))
            return it0 + self.plan.steps, w + 1, k + summed.astype(jnp.int32)

        self.tiles().consume(multiply, (jnp.int32(0),) * 3)

    def columns(self, value, c):
        return value[:, c * self.plan.chunk : (c + 1) * self.plan.chunk]

    def send(self, w, me, value):
        def write():
            for c in range(self.plan.chunks):
                panels = self.outgoing(w, c, me).transpose((1, 0, 2))
                panels[...] = self.columns(value, c).reshape(panels.shape)

        self.fill(w, write)

    def total(self, t, w, me, value, k):
        p, unit = self.plan, self.unit(t)

        def summand(c, d):
            """Of the other device number d."""
            panels = self.arrivals(d).at[c, me, unit].transpose((1, 0, 2))
            return panels[...].reshape(64, p.chunk)

        def summands(c):
            plgpu.barrier_wait(self.came.at[c], phase=k)
            return (summand(c, d) for d in range(self.size - 1))

        # as many as registers have room for
        ahead = min(2, p.chunks) if self.size == 2 else 0
        coming = [list(summands(c)) for c in range(ahead)]

        def total_of(c):
            own = self.columns(value, c)
            if self.size > _UNROLLED:
                plgpu.barrier_wait(self.came.at[c], phase=k)
                total = self.total_in_turn(own, lambda d: summand(c, d))
            else:
                found = coming.pop(0) if coming else summands(c)
                total = in_order(self.me, own, found, self.size)
            if ahead and c + ahead < p.chunks:
                coming.append(list(summands(c + ahead)))
            if c == p.chunks - 1:
                plgpu.barrier_arrive(self.added, relaxed=True)
            return total

        chunks = Chunks(p.chunks, total_of)
        self.epilogue(me, chunks, [self.o], *self.corner(self.tile(t)))

    def total_in_turn(self, own, summand):
        """The sum in the order of the ranks; the next summand is loaded while one is added."""

        def add(d, carry):
            total, coming = carry
            total = lax.select(self.me == d, total + own, total) + coming
            return total, summand(jnp.minimum(d + 1, self.size - 2))

        start = jnp.zeros_like(own), summand(0)
        total, _ = lax.fori_loop(0, self.size - 1, add, start)
        return lax.select(self.me == self.size - 1, total + own, total)


class EverySumBlock(SumBlock):
    """The same, of tiles that are dealt to the devices, each of which sends its sums to all."""

    reads_only = False

    def source(self, t):
        return self.a

    def number(self, t):
        return t % self.plan.each * self.size + self.part(t, False)

    def tile(self, t):
        return jnp.minimum(self.number(t), self.plan.tiles - 1)

    def summed(self, t):
        return self.number(t) < self.plan.tiles

    def filled_tiles(self):
        tiles, sends = self.tiles(), self.sends()
        count = tiles.count()
        # the last one may be for nobody
        nobody = (count > sends) & ~self.summed(tiles.tile(count - 1))
        return count - nobody.astype(jnp.int32)

    def total(self, t, w, me, value, k):
        def write():
            super(EverySumBlock, self).total(t, w, me, value, k)
            plgpu.wait_smem_to_gmem(0)

        self.fill(w, write)

    def carry_sums(self, w, before):
        """From the own result to those of the others."""
        (rows, cols), t = self.plan.result_piece, self.tiles().tile(w)
        pieces, (row, col) = self.plan.rows // rows, self.corner(self.tile(t))

        def place(j):
            return pl.ds(row + j * rows, rows), pl.ds(col, cols)

        self.carry(
            self.pieces[1],
            before + w * pieces,
            pieces,
            lambda j: self.o.at[place(j)],
            lambda j: [self.on(self.o, d).at[place(j)] for d in self.others()],
        )

    def courier(self):
        super().courier()
        p, sends = self.plan, self.sends()
        before = self.carried() - sends * (p.rows // p.result_piece[0])
        self.each_filled(sends, self.filled_tiles(), lambda w: self.carry_sums(w, before))
        each(1, self.size, lambda k: self.signal((self.me + k) % self.size, p.units))
        each(
            1, self.size, lambda k: self.await_signal((self.me + k) % self.size, p.units, p.blocks)
        )


class PullSumPlan(SumPlan):
    """The same with a flag for each share that is to be fetched."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.ready = self.flags  # and the following ones
        self.flags += self.units
        if self.registers and self.parts > 2:  # with two, consumers load summands ahead
            self.registers = _PULLING

    def scratch(self):
        found = super().scratch()
        if self.dealt:  # the courier carries sums meanwhile
            found["pulled"] = plgpu.SMEM((_PIECES, self.piece), jnp.float32)
            found["pulled_arrived"] = plgpu.Barrier(num_barriers=_PIECES)
        return found

    def staging(self):
        """What is to be fetched, in two halves, and what was."""
        ((_, *shape), dtype), _, *others = super().staging()
        return [((2, *shape), dtype), Own(tuple(shape), dtype), *others]


class PullSumBlock(SumBlock):
    def roles(self):
        return [*super().roles(), self.puller]

    def outgoing(self, w, c, me):
        t = self.tiles().tile(w)
        number = self.among(self.part(t, False), self.me)
        return self.staging.at[self.half, number, c, me, self.unit(t)]

    def arrivals(self, number):
        return self.waiting.at[number]

    def carry_summands(self, w):
        """They are fetched."""
        t = self.tiles().tile(w)
        self.signal(self.part(t, False), self.plan.ready + self.unit(t))

    def await_summands(self, t, c):
        if c == 0:  # one flag for all chunks
            unit = self.unit(t)
            each(0, self.size - 1, lambda k: self.await_signal(self.other(k), unit))

    def carried(self):
        return 0

    def own_tiles(self):
        """How many tiles this block sums."""
        return self.tiles().count() - self.sends()

    def puller(self):
        """What this block adds, from the device before this one first: it began with it."""
        p, tiles, sends, own = self.plan, self.tiles(), self.sends(), self.own_tiles()
        if p.dealt:
            arrived = self.pulled_arrived
        else:
            self.pulled, arrived = self.pieces[0], self.arrived

        def fetch(step):
            source = self.step_back(step)
            here = self.arrivals(self.among(source, self.me))
            there = self.on(self.staging, source).at[self.half, self.among(self.me, source)]

            def share(i, _):
                unit = self.unit(tiles.tile(sends + i))
                self.await_signal(source, p.ready + unit)
                self.carry_share(
                    (step - 1) * own + i,
                    (there, unit),
                    (here, unit),
                    lambda: self.raised(source, unit),
                    arrived,
                )

            lax.fori_loop(0, own, share, None)

        each(1, self.size, fetch)


class PullEverySumBlock(EverySumBlock, PullSumBlock):
    def own_tiles(self):
        return self.filled_tiles() - self.sends()
