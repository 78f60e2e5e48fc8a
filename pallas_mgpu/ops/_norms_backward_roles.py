"""Gradients of row norms and of softmax, of long rows, by two roles.

Of the four warpgroups of a block, two compute the statistics of rows, and two compute the gradients
from them. The two of a role share a row, or have rows of their own; a cluster of blocks shares long
rows. So a row is divided into segments of up to 4096 elements, 8192 if 8 blocks are not enough for
that; a warpgroup of each role has the same segment. A lane always has the same columns, and sums
over rows stay in registers: those of the bias in lanes of statistics, those of the weight in lanes
of gradients.

A warpgroup of gradients fetches its segments by TMA into a ring of slots; one of statistics reads
them first. It sends the sums of its segment to every block of the cluster, by stores that arrive on
the barriers there, and goes on to the next row without waiting for those of the others. The chain
of reductions of a row is so hidden behind the gradients of the rows before it. The sums of all
segments are loaded by the lanes of a warp, one segment each, and added up by shuffles. Sums of
layer_norm are taken about a pivot near the mean, a few elements of the segment, so that one pass is
enough.

Nobody says when sums that were sent have been read, except that of every 16 rows the warpgroups of
gradients say it once, to all blocks. Warpgroups of statistics wait for that when they are a few
rows further, as many as there are slots: by then it has been said, since gradients cannot be
further behind. So there are buffers for 16 rows and as many more. Within one block there are two
for each slot: sums of row i are sent when its segment has arrived, after the gradients of row
i - stages by the warpgroup that fetched it. These needed the sums of row i - stages of all
segments, so all warpgroups have done row i - 2 * stages, whose buffer is written again.

Which rows a block has is fixed, and so is the order of all sums: results repeat bit for bit."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches
from ._matmul_choice import clusters_at_once
from ._norms_backward_ring import _Tile, matrices, with_sums

_F32 = np.float32
_PAIRS = 2  # warpgroups of each role
_LONGEST = 8192  # elements of a segment
_SHORT = 2048, 4096  # of one that is worth a block, of one whose sums do not fill the registers
_PART = 1024  # elements that are read at once
_FEW = 4  # elements of a segment that its pivot is the mean of
_FLIGHT = 72 << 10, 96 << 10  # bytes of slots: of a block, of one in a cluster of 8
_GROUP = 16  # rows whose sums a cluster says it has read, at once
_ALONE = SMEM_BYTES // 2 + 4096  # bytes with which a block has its SM for itself


class Plan:
    """Numbers that follow from the shape, the blocks of a cluster and the rest of a config."""

    height = 1

    def __init__(self, x, names, sms, cluster, cfg):
        self.x, self.names, self.cluster = x, names, cluster
        self.members = cfg.members or _PAIRS
        self.teams = _PAIRS // self.members
        self.segments = cluster * self.members
        grain = 2048 // min(d.itemsize for d in x.dtypes[:2])  # 16 bytes for each lane
        width = pl.cdiv(pl.cdiv(x.n, self.segments), grain) * grain
        self.parts = pl.cdiv(width, _PART)
        self.part = pl.cdiv(width, self.parts * grain) * grain
        self.width = self.part * self.parts
        self.tiles = x.outer
        at_once = int(clusters_at_once(sms, cluster))
        self.programs = max(1, min(at_once, pl.cdiv(x.rows, self.teams)))
        self.of_tile = [n for n in names if n != "weight"]
        self.summed = x.sums if self.teams > 1 else 0
        self.numbers = {"softmax": 1, "rms_norm": 2, "layer_norm": 4}[x.name]  # sums of a segment
        used = 2048 + self.summed * self.width * 4
        if cluster > 1:
            used += 2 * _GROUP * self.segments * self.numbers * 4
        size = _PAIRS * self.width * sum(x.dtype_of(n).itemsize for n in self.of_tile)
        self.kept = "weight" in names
        if self.kept:  # where two slots leave room for it; otherwise each row loads it again
            weight = _PAIRS * self.width * x.dtype_of("weight").itemsize
            self.kept = used + weight + 2 * size <= SMEM_BYTES
            used += self.kept * weight
        chosen = max(2, min(3 if cluster <= 2 else 4, _FLIGHT[cluster == 8] // size))
        most = _GROUP // self.teams - 1  # an array has up to 32 barriers
        self.stages = min((SMEM_BYTES - used) // size, cfg.stages or chosen, most)
        self.slots = max(self.stages, pl.cdiv(_ALONE - used, size))  # with those nobody uses
        self.buffers = (_GROUP if cluster > 1 else self.stages) + self.stages
        # where segments are long, registers of a lane of each role: statistics, gradients; masks
        # and elements of 4 bytes take some, too, which Hopper, as it was measured, spills
        plain = x.hopper or (self.segments * self.width == x.n and x.dtypes[1].itemsize == 2)
        self.registers = None
        if x.sums and self.width > _SHORT[plain]:
            more = 8 * (self.width <= _SHORT[1])
            self.registers = (120 - more, 136 + more) if x.bias else (112 - more, 144 + more)

    def fits(self):
        together = self.cluster == 1 or self.teams == 1  # only single rows are shared
        return self.stages >= 2 and self.width <= _LONGEST and together

    def across_lanes(self):
        """The layout of the sums of all segments: those of one in a lane, copies in every warp."""
        tiling = plgpu.Tiling(((self.segments, self.numbers),))
        lanes = plgpu.Replicated(32 // self.segments), -2
        return plgpu.Layout.TILED(tiling, (plgpu.Replicated(4),), lanes, -1)

    def scratch(self):
        x, found = self.x, {}
        for name in self.of_tile:
            shape = _PAIRS, self.slots, 1, self.width
            found[f"{name}_smem"] = plgpu.SMEM(shape, x.dtype_of(name))
        of_slots = {"num_barriers": (_PAIRS, self.stages)}
        found["full"] = plgpu.Barrier(num_arrivals=len(self.of_tile), **of_slots)
        if self.kept:
            found["weight_smem"] = plgpu.SMEM((_PAIRS, self.width), x.dtype_of("weight"))
            found["weight_full"] = plgpu.Barrier(num_barriers=_PAIRS)
        of_rows = self.teams, self.buffers
        shape = *of_rows, self.segments * self.numbers
        found["partial_smem"] = plgpu.SMEM(shape, _F32)
        of_segments = {"num_arrivals": self.segments, "num_barriers": of_rows}
        found["partial_full"] = plgpu.Barrier(**of_segments)
        if self.cluster > 1:
            everyone = {"collective_axes": ("c",), "num_arrivals": _PAIRS}
            found["partial_read"] = plgpu.ClusterBarrier(**everyone)
        if self.summed:
            found["sums_smem"] = plgpu.SMEM((x.sums, self.width), _F32)
            found["sums_full"] = plgpu.Barrier(num_barriers=2)
        return found


class _Segment(_Tile):
    """A warpgroup's segment of a row, while it is traced."""

    def __init__(self, plan, refs, pair):
        self.plan, self.x, self.refs = plan, plan.x, refs
        self.parts = plan.parts
        self.me = pair
        self.team = pair // plan.members
        self.rank = lax.axis_index("c") if plan.cluster > 1 else 0
        self.segment = self.rank * plan.members + pair % plan.members
        self.offset = self.segment * plan.width
        self.program = lax.axis_index("program")
        self.first, self.step = self.program * plan.teams + self.team, plan.programs * plan.teams
        self.count = (plan.tiles - self.first + (self.step - 1)) // self.step
        if plan.teams > 1:
            self.count = jnp.maximum(self.count, 0)

    def keep_weight(self):
        p = self.plan
        if p.kept:
            for k in range(p.parts):
                self.refs["weight_smem"][self.me, pl.ds(k * p.part, p.part)] = self._weight(k)
            plgpu.barrier_arrive(self.refs["weight_full"].at[self.me])

    def weight(self, k):
        p = self.plan
        at = self.me, pl.ds(k * p.part, p.part)
        w = self.refs["weight_smem"][at] if p.kept else self._weight(k)
        return lax.broadcast_in_dim(w.astype(jnp.float32), (1, p.part), [1])

    def await_weight(self):
        if self.plan.kept:
            plgpu.barrier_wait(self.refs["weight_full"].at[self.me])

    # ---- sums over a row

    def pivot_of_segment(self):
        """The mean of a few elements of the segment. Its distance from the mean of all n is at most
        sqrt(n / few) deviations: sums about it lose that many roundings at worst, of rows whose
        outliers are these elements."""
        p = self.plan
        last = self.x.n - (pl.cdiv(self.x.n, p.width) - 1) * p.width  # elements of the last segment
        few = min(_FEW, last)
        box = self.refs["x_smem"]
        found = [box[self.me, self.slot, 0, j * (last // few)] for j in range(few)]
        found = sum(v.astype(jnp.float32) for v in found) * _F32(1 / few)
        return found.reshape((1, 1))

    def sum_of_segment(self, part):
        """Sums of part(k), a tuple, over the segment: by one exchange between the warps."""
        found = part(0)
        for k in range(1, self.parts):
            found = [s + v for s, v in zip(found, part(k))]
        sums = jnp.sum(jnp.concatenate(found, axis=0), axis=1)
        return [sums[v].reshape((1, 1)) for v in range(len(found))]

    def size_of_segment(self):
        """How many elements of a row the warpgroup has, float32; at least 1."""
        p = self.plan
        if p.segments * p.width == self.x.n:
            return _F32(p.width)
        return jnp.clip(self.x.n - self.offset, 1, p.width).astype(jnp.float32)

    def mean_of_segment(self, total):
        """From the sum of the warpgroup's segment."""
        size = self.size_of_segment()
        return total * _F32(1 / size) if isinstance(size, np.float32) else total / size

    def send(self, sums):
        """Those of this segment, to all blocks of the cluster."""
        p, refs = self.plan, self.refs
        number, mine = self.i % p.buffers, jnp.stack([v.reshape(()) for v in sums])
        full = refs["partial_full"].at[self.team, number]
        box = refs["partial_smem"].at[self.team, number, pl.ds(self.segment * p.numbers, p.numbers)]
        if p.cluster == 1:
            box[...] = mine
            plgpu.barrier_arrive(full)
            return

        @pl.when((self.i >= _GROUP) & (self.i % _GROUP == p.stages))
        def _():
            plgpu.barrier_wait(refs["partial_read"], phase=self.i // _GROUP - 1)

        for c in range(p.cluster):
            plgpu.async_store_smem(mine, box, full, cluster_idx=c, cluster_dim="c")

    def receive(self):
        """Sums of each segment of the row, an array (segment, sum)."""
        p = self.plan
        at = self.team, self.i % p.buffers
        plgpu.barrier_wait(self.refs["partial_full"].at[at], phase=self.i // p.buffers)
        box = self.refs["partial_smem"].at[at].reshape((p.segments, p.numbers))
        return plgpu.load(box, layout=p.across_lanes())

    def have_received(self):
        if self.plan.cluster > 1:

            @pl.when(self.i % _GROUP == _GROUP - 1)
            def _():
                plgpu.barrier_arrive(self.refs["partial_read"])

    def moments(self, sums):
        """(mean of x, sum of g, sum of (x - mean)^2, sum of g * (x - mean)) of the row, from the
        sums of each segment: of x and g, and of the last two about the segment's own mean. What the
        means of segments differ is made up for."""
        p, n = self.plan, self.x.n
        total, grads, squares, dot = (sums[:, v : v + 1] for v in range(4))
        mean = jnp.sum(total, axis=0, keepdims=True) * _F32(1 / n)
        if p.segments * p.width == n:
            size = _F32(p.width)
            off = total * _F32(1 / p.width) - mean
        else:
            before = lax.broadcasted_iota(jnp.int32, (p.segments, 1), 0) * p.width
            size = jnp.clip(n - before, 0, p.width).astype(jnp.float32)
            off = jnp.where(before < n, total / jnp.maximum(size, 1.0) - mean, 0.0)
        parts = grads, squares + off * off * size, dot + off * grads
        return mean, *(jnp.sum(v, axis=0, keepdims=True) for v in parts)

    def write_sums(self, first, total):
        """Sums over rows, the first of that number: those of both teams together."""
        p, refs = self.plan, self.refs
        if not total[0]:
            return
        box = refs["sums_smem"] if p.summed else None
        full = refs["sums_full"].at[int(first > 0)] if p.summed else None
        sums = [
            (s + first, k, jnp.sum(v, axis=0)) for k, t in enumerate(total) for s, v in enumerate(t)
        ]

        def give():
            for s, k, v in sums:
                box[s, pl.ds(k * p.part, p.part)] = v
            plgpu.barrier_arrive(full)

        if p.summed:
            pl.when(self.team > 0)(give)

        @pl.when(self.team == 0)
        def _():
            if p.summed:
                plgpu.barrier_wait(full)
            for s, k, v in sums:
                v = v + box[s, pl.ds(k * p.part, p.part)] if p.summed else v
                refs["sums"][s, self.program, pl.ds(self.offset + k * p.part, p.part)] = v


@cached
def kernel(p, row, interpret):
    """As that of _norms_backward_ring.py."""
    x, names = p.x, p.names

    def zeros(count):
        return [[jnp.zeros((1, p.part), jnp.float32)] * count for _ in range(p.parts)]

    def add(total, found):
        """Now: later, what is added would take registers."""
        return lax.optimization_barrier([t + s for t, s in zip(total, found)])

    def statistics(segment):
        if p.registers:
            plgpu.set_max_registers(p.registers[0], action="decrease")
        segment.await_weight()

        def step(i, total):
            of_row, found = row(segment.at(i)), []
            sums = of_row.sums_of_segment(lambda k: found.append(add(total[k], of_row.of_bias(k))))
            segment.send(sums)
            return found

        total = lax.fori_loop(0, segment.count, step, zeros(x.bias))
        segment.write_sums(x.sums - x.bias, total)

    def gradients(segment):
        if p.registers:
            plgpu.set_max_registers(p.registers[1], action="increase")
        segment.fetch_first()
        segment.keep_weight()

        def step(i, total):
            of_row = row(segment.at(i)).take_sums(segment.receive())
            results, found = [], []
            for k in range(p.parts):
                results.append(lax.optimization_barrier(of_row.result(k).astype(x.dtypes[1])))
                found.append(add(total[k], of_row.of_weight(k)))
            segment.fetch_next()
            segment.have_received()
            for k, result in enumerate(results):
                segment.store(i, k, result)
            return found

        total = lax.fori_loop(0, segment.count, step, zeros(x.sums - x.bias))
        segment.write_sums(0, total)

    def body(*refs, **scratch):
        overlap_launches()
        given = dict(zip((*names, "out", "sums"), refs))
        given = matrices(given, x, (*p.of_tile, "out")) | scratch
        me = lax.axis_index("wg")
        segment = _Segment(p, given, me % _PAIRS)
        pl.when(me < _PAIRS)(lambda: statistics(segment))
        pl.when(me >= _PAIRS)(lambda: gradients(segment))

    return with_sums(p, body, 2 * _PAIRS, interpret)


@cached
def plan(x, names, sms, cfg):
    """What the config says. Otherwise, with sums over rows, the cluster whose segments need the
    fewest elements beyond the row, the largest of several; without, the smallest. None: shared
    memory holds none."""
    clusters = [c for c in ((cfg.cluster,) if cfg.cluster else (1, 2, 4, 8)) if c <= sms]
    plans = [p for p in (Plan(x, names, sms, c, cfg) for c in clusters) if p.fits()]
    if not cfg.cluster and x.sums:
        plans = [p for p in plans if p.cluster == 1 or p.width >= _SHORT[0]]
        plans.sort(key=lambda p: (p.width > _SHORT[1], p.segments * p.width, -p.cluster))
    return plans[0] if plans else None
