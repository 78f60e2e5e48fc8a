"""Gradients of row norms of long rows, by two roles.

Of the four warpgroups of a block, two compute the statistics of rows, and two compute the gradients
from them. A block has one row at a time, a cluster of blocks shares the longest. The row is divided
into segments; a warpgroup of each role has the same segment.

A warpgroup of gradients fetches its segments by TMA into a ring of slots; one of statistics reads
them first. It sends the sums of its segment to every block of the cluster and goes on to the next
row without waiting for those of the others. The chain of reductions of a row is so hidden behind
the gradients of the rows before it, and the fence that comes before a fetch waits for the stores of
the same warpgroup alone. The sums over rows, the gradients of the weight and of the bias, stay in
registers: of the bias in those of statistics, of the weight in those of gradients.

Nobody says when sums that were sent have been read; there are buffers enough instead. Sums of row i
are sent when its segment has arrived, after the gradients of row i - stages by the warpgroup that
fetched it. These needed the sums of row i - stages of all segments, so all warpgroups have done row
i - 2 * stages, whose buffer is written again.

Which rows a block has is fixed, and so is the order of all sums: results repeat bit for bit."""

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches
from ._matmul_choice import clusters_at_once
from ._norms_backward_ring import _Tile, with_sums

_F32 = np.float32
_PAIRS = 2  # warpgroups of each role
_LONGEST = 8192  # elements of a segment
_PART = 1024  # elements that are read at once
_FEW = 4  # elements of a segment that its pivot is the mean of
_REGISTERS = 112, 144  # of a lane, where segments are long: statistics, gradients


class Plan:
    """Numbers that follow from the shape and the blocks of a cluster."""

    height, members, teams = 1, _PAIRS, 1

    def __init__(self, x, names, sms, cluster, cfg):
        self.x, self.names, self.cluster = x, names, cluster
        self.segments = cluster * _PAIRS
        grain = 2048 // min(d.itemsize for d in x.dtypes[:2])  # 16 bytes for each lane
        width = pl.cdiv(pl.cdiv(x.n, self.segments), grain) * grain
        self.parts = pl.cdiv(width, _PART)
        self.part = pl.cdiv(width, self.parts * grain) * grain
        self.width = self.part * self.parts
        self.tiles = x.outer
        self.programs = max(1, min(int(clusters_at_once(sms, cluster)), x.outer))
        self.of_tile = [n for n in names if n != "weight"]
        self.kept = "weight" in names
        size = _PAIRS * self.width * sum(x.dtype_of(n).itemsize for n in self.of_tile)
        room = SMEM_BYTES - 2048
        if self.kept:
            room -= _PAIRS * self.width * x.dtype_of("weight").itemsize
        self.stages = min(room // size, cfg.stages or 4)
        self.pivot = cfg.pivot and x.name == "layer_norm"
        self.buffers = 2 * self.stages
        self.uneven = x.bias and self.width > _LONGEST // 2
        self.numbers = 2 if x.name == "rms_norm" else 4  # sums of a segment

    def fits(self):
        return self.stages >= 2 and self.width <= _LONGEST

    def scratch(self):
        x, found = self.x, {}
        for name in self.of_tile:
            shape = _PAIRS, self.stages, 1, self.width
            found[f"{name}_smem"] = plgpu.SMEM(shape, x.dtype_of(name))
        of_slots = {"num_barriers": (_PAIRS, self.stages)}
        found["full"] = plgpu.Barrier(num_arrivals=len(self.of_tile), **of_slots)
        if self.kept:
            found["weight_smem"] = plgpu.SMEM((_PAIRS, self.width), x.dtype_of("weight"))
            found["weight_full"] = plgpu.Barrier(num_barriers=_PAIRS)
        found["partial_smem"] = plgpu.SMEM((self.buffers, self.numbers, self.segments), _F32)
        of_rows = {"num_arrivals": _PAIRS, "num_barriers": self.buffers}
        if self.cluster > 1:
            found["partial_full"] = plgpu.ClusterBarrier(collective_axes=("c",), **of_rows)
        else:
            found["partial_full"] = plgpu.Barrier(**of_rows)
        return found


class _Segment(_Tile):
    """A warpgroup's segment of a row, while it is traced."""

    def __init__(self, plan, refs, pair):
        self.plan, self.x, self.refs = plan, plan.x, refs
        self.parts = plan.parts
        self.me = self.member = pair
        self.rank = lax.axis_index("c") if plan.cluster > 1 else 0
        self.segment = self.rank * _PAIRS + pair
        self.offset = self.segment * plan.width
        self.first, self.step = lax.axis_index("program"), plan.programs
        self.count = (plan.tiles - self.first + (self.step - 1)) // self.step

    def keep_weight(self):
        p = self.plan
        if p.kept:
            for k in range(p.parts):
                self.refs["weight_smem"][self.me, pl.ds(k * p.part, p.part)] = self._weight(k)
            plgpu.barrier_arrive(self.refs["weight_full"].at[self.me])

    def await_weight(self):
        if self.plan.kept:
            plgpu.barrier_wait(self.refs["weight_full"].at[self.me])

    def sum_of_segment(self, part, rolled=False):
        """rolled: by a loop over the parts, which takes fewer registers."""
        if not rolled or self.parts < 2:
            return super().sum_of_segment(part)

        def add(k, found):
            return [s + v for s, v in zip(found, part(k))]

        zero = jnp.zeros((1, self.plan.part), jnp.float32)
        found = lax.fori_loop(0, self.parts, add, [zero, zero])
        return [jnp.sum(v, axis=1, keepdims=True) for v in found]

    def send(self, sums):
        """Those of this segment, to all blocks of the cluster."""
        p, refs = self.plan, self.refs
        number = self.i % p.buffers
        for j in range(p.cluster):
            box = refs["partial_smem"].at[number]
            box = plgpu.cluster_ref(box, {"c": j}) if p.cluster > 1 else box
            for v, value in enumerate(sums):
                box[v, self.segment] = value.reshape(())
        plgpu.barrier_arrive(refs["partial_full"].at[number])

    def receive(self):
        """Sums of each segment of the row."""
        p, refs = self.plan, self.refs
        number = self.i % p.buffers
        plgpu.barrier_wait(refs["partial_full"].at[number], phase=self.i // p.buffers)
        box = refs["partial_smem"].at[number]
        return [[box[v, s].reshape((1, 1)) for v in range(p.numbers)] for s in range(p.segments)]

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

    def write_sums(self, first, total):
        """Sums over rows, the first of that number."""
        for k, of_part in enumerate(total):
            at = pl.ds(self.offset + k * self.plan.part, self.plan.part)
            for s, v in enumerate(of_part):
                self.refs["sums"][first + s, self.first, at] = jnp.sum(v, axis=0)


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
        if p.uneven:
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")
        segment.await_weight()

        def step(i, total):
            of_row, found = row(segment.at(i), complete=False), []

            def add_bias(k):
                found.append(add(total[k], of_row.sums(k, weight=False)))

            segment.send(of_row.sums_of_segment(add_bias))
            return found

        total = lax.fori_loop(0, segment.count, step, zeros(x.bias))
        segment.write_sums(x.sums - x.bias, total)

    def gradients(segment):
        if p.uneven:
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
        segment.fetch_first()
        segment.keep_weight()

        def step(i, total):
            of_row = row(segment.at(i), complete=False).take_sums(segment.receive())
            results, found = [], []
            for k in range(p.parts):
                results.append(lax.optimization_barrier(of_row.result(k).astype(x.dtypes[1])))
                found.append(add(total[k], of_row.sums(k, bias=False)))
            total = found
            segment.fetch_next()
            for k, result in enumerate(results):
                segment.store(i, k, result)
            return total

        total = lax.fori_loop(0, segment.count, step, zeros(x.sums - x.bias))
        segment.write_sums(0, total)

    def body(*refs, **scratch):
        overlap_launches()
        given = dict(zip((*names, "out", "sums"), refs)) | scratch
        for name in (*p.of_tile, "out"):
            given[name] = given[name].reshape((x.outer, x.n))
        me = lax.axis_index("wg")
        segment = _Segment(p, given, me % _PAIRS)
        pl.when(me < _PAIRS)(lambda: statistics(segment))
        pl.when(me >= _PAIRS)(lambda: gradients(segment))

    return with_sums(p, body, 2 * _PAIRS, interpret)


@cached
def plan(x, names, sms, cfg):
    """The smallest cluster that shared memory holds, or what the config says; None: there is
    none."""
    for cluster in (cfg.cluster,) if cfg.cluster else (1, 2, 4, 8):
        p = Plan(x, names, sms, cluster, cfg)
        if p.fits() and cluster <= sms:
            return p
    return None
