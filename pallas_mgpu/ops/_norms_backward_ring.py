"""Gradients of row norms: rows pass through shared memory, each element is read once.

A block has four warpgroups, in teams. A team has a tile of whole rows at a time, about 2048
elements for each warpgroup: warpgroups of a team share long rows, each has a segment of the
columns, and a cluster of blocks shares the longest. So a lane always has the same few columns, and
its sums over rows, the gradients of the weight and of the bias, stay in registers until the block
has done its last row.

Each warpgroup fetches its own segments by TMA, several tiles ahead, into slots of its own. Once a
tile is in registers, the next one is fetched into its slot. Before that, the fence that ends the
loads from shared memory waits for earlier stores to global memory, too: hence the result of a tile
is stored after the fence of the next one, or, of long rows, which are read from shared memory
again, after the fence of its own. Warpgroups that share a row
exchange their sums over it through shared memory, by two buffers that alternate: all warpgroups
have met at the other one before a buffer is written again.

Which rows a block has is fixed, and so is the order of all sums: results repeat bit for bit.

Few slots are best: what is in flight beyond the latency of memory delays the stores. Blocks of a
cluster exchange the statistics of layer norm once, those of their segments, from which the mean of
the row follows; within a block, the mean first is faster. A config changes teams, clusters, heights
and numbers of slots."""

import typing

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches
from ._matmul_choice import clusters_at_once

_F32 = np.float32
WARPGROUPS = 4
_SEGMENT = 2048  # elements of a row that a warpgroup keeps in registers
_LONGEST = 4096  # of a segment, which is read from shared memory in parts
_PART = 1024  # elements of such a part
_SUMMED = 16  # columns of a block that adds up sums: with few registers it starts beside the others


class NormBackwardConfig(typing.NamedTuple):
    """How rows of the gradients of norms pass through shared memory; 0: chosen.

    ``members``: warpgroups that share a row, 1, 2 or 4. ``cluster``: blocks that share it, 1, 2, 4
    or 8. ``height``: rows of a tile. ``stages``: slots of each warpgroup, at least 2; 0: 2, or up
    to 4 of softmax. ``roles``: warpgroups of their own compute the statistics of rows
    (_norms_backward_roles.py); a tile is a row, ``members`` and ``height`` are 0. ``pivot``, with
    roles: layer_norm's statistics by one pass about a pivot, the mean of a few elements."""

    members: int = 0
    cluster: int = 0
    height: int = 0
    stages: int = 0
    roles: bool = False
    pivot: bool = False


class Plan:
    """Numbers that follow from the shape, the rows of a tile, the blocks of a cluster, the
    warpgroups of a team, and the rest of a config."""

    pivot = False

    def __init__(self, x, names, sms, height, cluster, members, cfg):
        self.x, self.names, self.height, self.cluster = x, names, height, cluster
        self.members = members
        self.segments = cluster * self.members
        # boxes of TMA have up to 256 columns; each lane has 16 bytes of a segment
        grain = 256 if x.n <= _SEGMENT else 2048 // min(d.itemsize for d in x.dtypes[:2])
        width = pl.cdiv(x.n, self.segments)
        self.width = width if width <= 256 else pl.cdiv(width, grain) * grain
        self.parts = 1 if self.width <= _SEGMENT else pl.cdiv(self.width, _PART)
        self.part = pl.cdiv(self.width, self.parts)
        self.width = self.part * self.parts
        self.teams = WARPGROUPS // self.members
        self.tiles = pl.cdiv(x.outer, self.height)
        most = int(clusters_at_once(sms, cluster))
        self.programs = max(1, min(most, pl.cdiv(self.tiles, self.teams)))
        self.once = x.name == "layer_norm" and cluster > 1
        self.of_tile = [n for n in names if n != "weight"]
        size = sum(x.dtype_of(n).itemsize for n in self.of_tile)
        # in registers, or in shared memory
        self.kept = "weight" in names and self.parts > 1
        of_block = self.members * self.width
        self.summed = x.sums if self.teams > 1 else 0
        room = SMEM_BYTES - 2048 - (self.teams - 1) * self.summed * of_block * 4
        if self.kept:
            room -= of_block * x.dtype_of("weight").itemsize
        most = room // (WARPGROUPS * self.height * self.width * size)
        self.stages = min(most, cfg.stages or (4 if x.name == "softmax" else 2))

    def fits(self):
        alone = self.teams == 1 or not self.kept  # each team would write the weight
        return self.stages >= 2 and self.width <= _LONGEST and alone

    def scratch(self):
        x, found = self.x, {}
        for name in self.of_tile:
            shape = WARPGROUPS, self.stages, self.height, self.width
            found[f"{name}_smem"] = plgpu.SMEM(shape, x.dtype_of(name))
        found["full"] = plgpu.Barrier(
            num_arrivals=len(self.of_tile), num_barriers=(WARPGROUPS, self.stages)
        )
        if self.kept:
            found["weight_smem"] = plgpu.SMEM((self.members, self.width), x.dtype_of("weight"))
        if self.segments > 1:
            shape = self.teams, 2, 4 if self.once else 2, self.segments
            found["partial_smem"] = plgpu.SMEM(shape, _F32)
        of_teams = {"num_arrivals": self.members, "num_barriers": self.teams}
        if self.cluster > 1:
            found["partial_full"] = plgpu.ClusterBarrier(collective_axes=("c",), **of_teams)
        elif self.segments > 1:
            found["partial_full"] = plgpu.Barrier(**of_teams)
        if self.summed:
            shape = self.teams - 1, x.sums, self.members, self.width
            found["sums_smem"] = plgpu.SMEM(shape, _F32)
            found["joined"] = plgpu.Barrier(num_arrivals=WARPGROUPS)
        return found


class _Tile:
    """A warpgroup's segment of a tile, while it is traced."""

    def __init__(self, plan, refs):
        """refs: operands, results and scratch by name."""
        self.plan, self.x, self.refs = plan, plan.x, refs
        self.parts, self.once, self.me = plan.parts, plan.once, lax.axis_index("wg")
        self.team, self.member = self.me // plan.members, self.me % plan.members
        self.rank = lax.axis_index("c") if plan.cluster > 1 else 0
        self.segment = self.rank * plan.members + self.member
        self.offset = self.segment * plan.width
        self.first = lax.axis_index("program") * plan.teams + self.team
        self.step = plan.programs * plan.teams
        self.count = (plan.tiles - self.first + (self.step - 1)) // self.step  # tiles of the team
        self.count = jnp.maximum(self.count, 0)
        if "weight" in refs:
            self.weights = [self._weight(k) for k in range(self.parts)]
        if plan.kept:
            for k, w in enumerate(self.weights):
                refs["weight_smem"][self.member, pl.ds(k * plan.part, plan.part)] = w

    # ---- the ring

    def fetch(self, i):
        """The team's tile number i."""
        p, slot = self.plan, i % self.plan.stages
        start = (self.first + i * self.step) * p.height
        where = pl.ds(start, p.height), pl.ds(self.offset, p.width)
        for name in p.of_tile:
            box = self.refs[f"{name}_smem"].at[self.me, slot]
            barrier = self.refs["full"].at[self.me, slot]
            plgpu.copy_gmem_to_smem(self.refs[name].at[where], box, barrier)

    def fetch_first(self):
        for s in range(self.plan.stages):
            pl.when(s < self.count)(lambda s=s: self.fetch(jnp.int32(s)))

    def fetch_next(self):
        i = self.i + self.plan.stages
        pl.when(i < self.count)(lambda: self.fetch(i))

    def at(self, i):
        """Waits for tile number i."""
        self.i, self.slot = i, i % self.plan.stages
        self.start = (self.first + i * self.step) * self.plan.height
        plgpu.barrier_wait(self.refs["full"].at[self.me, self.slot], phase=i // self.plan.stages)
        self.exchanged = 0  # times in this tile
        return self

    # ---- elements

    def load(self, name, k):
        at = pl.ds(k * self.plan.part, self.plan.part)
        return self.refs[f"{name}_smem"][self.me, self.slot, :, at]

    def inside(self, k):
        """Which elements of part k lie in the row; None: all."""
        p = self.plan
        if p.segments * p.width == self.x.n:
            return None
        at = lax.broadcasted_iota(jnp.int32, (p.height, p.part), 1)
        return at < self.x.n - (self.offset + k * p.part)

    def mask(self, k, start=None):
        """Which elements of part k lie in the array; None: all. start: of another tile."""
        p, found = self.plan, self.inside(k)
        if self.x.outer % p.height:
            at = lax.broadcasted_iota(jnp.int32, (p.height, p.part), 0)
            there = at < self.x.outer - (self.start if start is None else start)
            found = there if found is None else found & there
        return found

    def centred(self, v, k):
        """v where there is an element, else 0: of a difference from the mean."""
        mask = self.mask(k)
        return v if mask is None else jnp.where(mask, v, 0.0)

    def store(self, i, k, value):
        """Part k of the result of the team's tile number i."""
        p, ref = self.plan, self.refs["out"]
        start = (self.first + i * self.step) * p.height
        mask, at = (
            self.mask(k, start),
            (
                pl.ds(start, p.height),
                pl.ds(self.offset + k * p.part, p.part),
            ),
        )
        if mask is None:
            ref[at] = value
        else:
            pl.store(ref, at, value, mask=mask)

    def _weight(self, k):
        p = self.plan
        at = pl.ds(self.offset + k * p.part, p.part)
        if p.segments * p.width == self.x.n:
            return self.refs["weight"][at]
        inside = jnp.arange(p.part) < self.x.n - (self.offset + k * p.part)
        return pl.load(self.refs["weight"], at, mask=inside, other=0.0)

    def weight(self, k):
        """The weight of part k as a tile."""
        p = self.plan
        if p.kept:
            w = self.refs["weight_smem"][self.member, pl.ds(k * p.part, p.part)]
        else:
            # after the barrier it is as it was loaded: float32 would take twice the registers
            w = lax.optimization_barrier(self.weights[k])
        return lax.broadcast_in_dim(w.astype(jnp.float32), (p.height, p.part), [1])

    # ---- sums

    def sum(self, part):
        """Sums of part(k) over the rows, as columns; part returns a tuple."""
        found = self.sum_of_segment(part)
        return self._of_all(found) if self.plan.segments > 1 else found

    def sum_of_segment(self, part, rolled=False):
        """The same over the warpgroup's own segment. rolled: by a loop, if the plan wants that."""
        found = part(0)
        for k in range(1, self.parts):
            found = [s + v for s, v in zip(found, part(k))]
        return [jnp.sum(v, axis=1, keepdims=True) for v in found]

    def moments(self, all_of):
        """(mean of x, sum of g, sum of (x - mean)^2, sum of g * (x - mean)) of the row, from the
        sums of each segment: of x and g, and of the last two about the segment's own mean. What the
        means of segments differ is made up for."""
        p, n = self.plan, self.x.n
        total, grads, squares, dot = ([of_segment[v] for of_segment in all_of] for v in range(4))
        mean, all_squares, all_dots = sum(total) * _F32(1 / n), sum(squares), sum(dot)
        for s in range(p.segments):
            size = min(max(n - s * p.width, 0), p.width)
            if size == 0:
                continue
            off = total[s] * _F32(1 / size) - mean
            all_squares = all_squares + off * off * _F32(size)
            all_dots = all_dots + off * grads[s]
        return mean, sum(grads), all_squares, all_dots

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

    def _of_all(self, mine):
        """Sums of the segments of a row."""
        found = self.exchange(mine)
        return [sum(of_segment[v] for of_segment in found) for v in range(len(mine))]

    def exchange(self, mine):
        """These numbers of each segment of a row."""
        p, refs = self.plan, self.refs
        exchanges = 2 if self.x.name == "layer_norm" and not p.once else 1
        number = self.i * exchanges + self.exchanged
        self.exchanged += 1
        buffer = refs["partial_smem"].at[self.team, number % 2]
        for j in range(p.cluster):
            to = plgpu.cluster_ref(buffer, {"c": j}) if p.cluster > 1 else buffer
            for v, value in enumerate(mine):
                to[v, self.segment] = value.reshape(())
        full = refs["partial_full"].at[self.team]
        plgpu.barrier_arrive(full)
        plgpu.barrier_wait(full, phase=number)
        numbers = range(len(mine))
        return [[buffer[v, s].reshape((1, 1)) for v in numbers] for s in range(p.segments)]


def _write_sums(tile, total):
    """The sums of the block's rows: those of its teams together."""
    p, refs = tile.plan, tile.refs
    total = [[jnp.sum(v, axis=0) for v in of_part] for of_part in total]
    if p.teams > 1:
        box = refs["sums_smem"]

        @pl.when(tile.team > 0)
        def _():
            for k, of_part in enumerate(total):
                for s, v in enumerate(of_part):
                    box[tile.team - 1, s, tile.member, pl.ds(k * p.part, p.part)] = v

        plgpu.barrier_arrive(refs["joined"])
        plgpu.barrier_wait(refs["joined"])

    @pl.when(tile.team == 0)
    def _():
        for k, of_part in enumerate(total):
            at = pl.ds(tile.offset + k * p.part, p.part)
            for s, v in enumerate(of_part):
                for t in range(p.teams - 1):
                    v = v + box[t, s, tile.member, pl.ds(k * p.part, p.part)]
                refs["sums"][s, lax.axis_index("program"), at] = v


def with_sums(p, body, threads, interpret):
    """The kernel of a plan, by programs: the gradient of x, and the sums of each program."""
    x = p.x
    outs = [plgpu.ShapeDtypeStruct(x.shape, x.dtypes[1])]
    if x.sums:
        shape = x.sums, p.programs, p.segments * p.width
        outs.append(plgpu.ShapeDtypeStruct(shape, _F32))
    return plgpu.kernel(
        body,
        out_type=tuple(outs) if x.sums else outs[0],
        scratch_types=p.scratch(),
        grid=(p.programs,),
        grid_names=("program",),
        cluster=(p.cluster,) if p.cluster > 1 else (),
        cluster_names=("c",) if p.cluster > 1 else (),
        num_threads=threads,
        thread_name="wg",
        interpret=interpret,
        kernel_name=f"{x.name}_backward",
    )


@cached
def kernel(p, row, interpret):
    """The gradient of x, and sums (sum, program, column) of each block. p: a Plan; row: what
    computes its rows."""
    x, names = p.x, p.names

    def body(*refs, **scratch):
        overlap_launches()
        flat = x.outer, x.n
        given = dict(zip((*names, "out", "sums"), refs)) | scratch
        for name in (*p.of_tile, "out"):
            given[name] = given[name].reshape(flat)
        tile = _Tile(p, given)
        tile.fetch_first()

        def finish(of_row, total):
            """The result, and the sums with those of this tile; of all parts."""
            results, sums = [], []
            for k in range(p.parts):
                results.append(of_row.result(k).astype(x.dtypes[1]))
                sums.append([t + s for t, s in zip(total[k], of_row.sums(k))])
            return results, sums

        def in_registers(i, carry):
            before, total = carry
            of_row = row(tile.at(i))
            of_row.hold(p.of_tile)
            tile.fetch_next()
            pl.when(i > 0)(lambda: tile.store(i - 1, 0, before[0]))
            return finish(of_row, total)

        def in_parts(i, total):
            results, total = finish(row(tile.at(i)), total)
            tile.fetch_next()
            for k, result in enumerate(results):
                tile.store(i, k, result)
            return total

        zero = jnp.zeros((p.height, p.part), jnp.float32)
        total = [[zero] * x.sums for _ in range(p.parts)]
        if p.parts == 1:
            carry = [zero.astype(x.dtypes[1])], total
            last, total = lax.fori_loop(0, tile.count, in_registers, carry)
            pl.when(tile.count > 0)(lambda: tile.store(tile.count - 1, 0, last[0]))
        else:
            total = lax.fori_loop(0, tile.count, in_parts, total)
        if x.sums:
            _write_sums(tile, total)

    return with_sums(p, body, WARPGROUPS, interpret)


@cached
def last_sums(sums, programs, padded, n, dtype, interpret):
    """Kernel: of sums (sum, program, column) those over the programs, each as an array of n."""
    height, width = min(64, programs), min(_SUMMED, n)
    steps = pl.cdiv(programs, height)

    def body(x, *outs):
        overlap_launches()
        which, c = lax.axis_index("sum"), lax.axis_index("tile") * width

        def part(k):
            at = which, pl.ds(k * height, height), pl.ds(c, width)
            if programs % height == 0 and padded % width == 0:
                return x[at]
            row = lax.broadcasted_iota(jnp.int32, (height, width), 0) + k * height
            keep = row < programs
            if padded % width:
                keep &= lax.broadcasted_iota(jnp.int32, (height, width), 1) < padded - c
            return pl.load(x, at, mask=keep, other=0.0)

        if steps <= 4:  # all loads are under way at once
            total = sum(part(k) for k in range(steps))
        else:
            zero = jnp.zeros((height, width), jnp.float32)
            total = lax.fori_loop(0, steps, lambda k, t: t + part(k), zero)
        total = jnp.sum(total, axis=0).astype(dtype)
        for s, out in enumerate(outs):

            @pl.when(which == s)
            def _(out=out):
                if n % width:
                    pl.store(out, pl.ds(c, width), total, mask=jnp.arange(width) < n - c)
                else:
                    out[pl.ds(c, width)] = total

    return plgpu.kernel(
        body,
        out_type=tuple(plgpu.ShapeDtypeStruct((n,), dtype) for _ in range(sums)),
        grid=(sums, pl.cdiv(n, width)),
        grid_names=("sum", "tile"),
        interpret=interpret,
        kernel_name="last_sums",
    )


@cached
def plan(x, names, sms, cfg):
    """The highest tile, or the smallest cluster, that shared memory holds, or what the config says;
    None: there is none."""
    height = max(1, min(_SEGMENT // x.n, pl.cdiv(x.outer, WARPGROUPS)))
    forms = [(h, 1) for h in range(height, 0, -1)] + [(1, cluster) for cluster in (2, 4, 8)]
    if cfg.height or cfg.cluster:
        forms = [(cfg.height or 1, cfg.cluster or 1)]
    for height, cluster in forms:
        members = cfg.members or 1
        while not cfg.members and members < WARPGROUPS and x.n > cluster * members * _SEGMENT:
            members *= 2
        p = Plan(x, names, sms, height, cluster, members, cfg)
        whole = height == 1 or members == cluster == 1  # only single rows are shared
        if p.fits() and whole and cluster <= sms:
            return p
    return None
