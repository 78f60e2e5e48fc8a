"""Gradients of row norms: rows pass through shared memory, each element is read once.

A block has four warpgroups, in teams. A team has a tile of whole rows at a time, about 2048
elements for each warpgroup: warpgroups of a team share long rows, each has a segment of the
columns. So a lane always has the same few columns, and its sums over rows, the gradients of the
weight and of the bias, stay in registers until the block has done its last row. Rows that are too
long for that are divided in _norms_backward_roles.py.

Each warpgroup fetches its own segments by TMA, several tiles ahead, into slots of its own. Once a
tile is in registers, the next one is fetched into its slot. Before that, the fence that ends the
loads from shared memory waits for earlier stores to global memory, too: hence the result of a tile
is stored after the fence of the next one. Warpgroups that share a row exchange their sums over it
through shared memory, by two buffers that alternate: all warpgroups have met at the other one
before a buffer is written again.

Which rows a block has is fixed, and so is the order of all sums: results repeat bit for bit.

Few slots are best: what is in flight beyond the latency of memory delays the stores. A config
changes teams, heights and numbers of slots."""

import typing

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches
from ._open_rows import divides, in_shapes

_F32 = np.float32
WARPGROUPS = 4
_SEGMENT = 2048  # elements of a row that a warpgroup keeps in registers
_HEIGHT = 64  # rows that a block that adds up sums reads at once
_SUMMED = 16  # its columns, of so many rows: with few registers it starts beside the others


class NormBackwardConfig(typing.NamedTuple):
    """How rows of the gradients of norms pass through shared memory; 0: chosen.

    ``members``: warpgroups that share a row, 1, 2 or 4. ``height``: rows of a tile. ``stages``:
    slots of each warpgroup, at least 2. ``roles``: warpgroups of their own compute the statistics
    of rows (_norms_backward_roles.py); a tile is a row, shared by 1 or 2 ``members`` of each role
    and by a ``cluster`` of 1, 2, 4 or 8 blocks."""

    members: int = 0
    cluster: int = 0
    height: int = 0
    stages: int = 0
    roles: bool = False


class Plan:
    """Numbers that follow from the shape, the rows of a tile, the warpgroups of a team, and the
    rest of a config."""

    parts, cluster = 1, 1  # of a segment in registers, blocks that share a row

    def __init__(self, x, names, sms, height, members, cfg):
        self.x, self.names, self.height = x, names, height
        self.members = self.segments = members
        # boxes of TMA have up to 256 columns; each lane has 16 bytes of a segment
        grain = 256 if x.n <= _SEGMENT else 2048 // min(d.itemsize for d in x.dtypes[:2])
        width = pl.cdiv(x.n, members)
        self.width = self.part = width if width <= 256 else pl.cdiv(width, grain) * grain
        self.teams = WARPGROUPS // members
        self.tiles = pl.cdiv(x.outer, height)
        self.programs = max(1, min(sms, pl.cdiv(pl.cdiv(x.rows, height), self.teams)))
        self.of_tile = [n for n in names if n != "weight"]
        size = sum(x.dtype_of(n).itemsize for n in self.of_tile)
        # in registers, or in shared memory
        self.summed = x.sums if self.teams > 1 else 0
        room = SMEM_BYTES - 2048 - (self.teams - 1) * self.summed * members * self.width * 4
        self.stages = min(room // (WARPGROUPS * height * self.width * size), cfg.stages or 2)

    def fits(self):
        return self.stages >= 2 and self.width <= _SEGMENT

    def scratch(self):
        x, found = self.x, {}
        for name in self.of_tile:
            shape = WARPGROUPS, self.stages, self.height, self.width
            found[f"{name}_smem"] = plgpu.SMEM(shape, x.dtype_of(name))
        found["full"] = plgpu.Barrier(
            num_arrivals=len(self.of_tile), num_barriers=(WARPGROUPS, self.stages)
        )
        if self.members > 1:
            found["partial_smem"] = plgpu.SMEM((self.teams, 2, 2, self.members), _F32)
            found["partial_full"] = plgpu.Barrier(
                num_arrivals=self.members, num_barriers=self.teams
            )
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
        self.parts, self.me = plan.parts, lax.axis_index("wg")
        self.team, self.member = self.me // plan.members, self.me % plan.members
        self.offset = self.member * plan.width
        self.first = lax.axis_index("program") * plan.teams + self.team
        self.step = plan.programs * plan.teams
        self.count = (plan.tiles - self.first + (self.step - 1)) // self.step  # tiles of the team
        self.count = jnp.maximum(self.count, 0)
        if "weight" in refs:
            self.held_weight = self._weight(0)

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
        if not divides(p.height, self.x.outer):
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
        """The weight as a tile."""
        p = self.plan
        # after the barrier it is as it was loaded: float32 would take twice the registers
        w = lax.optimization_barrier(self.held_weight).astype(jnp.float32)
        return lax.broadcast_in_dim(w, (p.height, p.part), [1])

    # ---- sums

    def sum(self, part):
        """Sums of part(0), a tuple, over the rows, as columns."""
        mine = [jnp.sum(v, axis=1, keepdims=True) for v in part(0)]
        return self._of_all(mine) if self.plan.members > 1 else mine

    def _of_all(self, mine):
        """Sums of the segments of a row."""
        p, refs = self.plan, self.refs
        exchanges = 2 if self.x.name == "layer_norm" else 1
        number = self.i * exchanges + self.exchanged
        self.exchanged += 1
        buffer = refs["partial_smem"].at[self.team, number % 2]
        for v, value in enumerate(mine):
            buffer[v, self.member] = value.reshape(())
        full = refs["partial_full"].at[self.team]
        plgpu.barrier_arrive(full)
        plgpu.barrier_wait(full, phase=number)
        members = range(p.members)
        return [sum(buffer[v, s].reshape((1, 1)) for s in members) for v in range(len(mine))]


def _write_sums(tile, total):
    """The sums of the block's rows: those of its teams together."""
    p, refs = tile.plan, tile.refs
    total = [jnp.sum(v, axis=0) for v in total]
    if p.teams > 1:
        box = refs["sums_smem"]

        @pl.when(tile.team > 0)
        def _():
            for s, v in enumerate(total):
                box[tile.team - 1, s, tile.member] = v

        plgpu.barrier_arrive(refs["joined"])
        plgpu.barrier_wait(refs["joined"])

    @pl.when(tile.team == 0)
    def _():
        for s, v in enumerate(total):
            for t in range(p.teams - 1):
                v = v + box[t, s, tile.member]
            refs["sums"][s, lax.axis_index("program"), pl.ds(tile.offset, p.width)] = v


def with_sums(p, body, threads, interpret):
    """The kernel of a plan, by programs: the gradient of x, and the sums of each program."""
    x = p.x
    shapes = (None if name == "weight" else x.shape for name in p.names)
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
        **in_shapes(*shapes),
    )


def matrices(refs, x, names):
    """The refs by name, of these as matrices of rows."""
    as_they_are = _sizes.is_open(x.shape)
    flat = x.outer, x.n
    return {k: r if as_they_are or k not in names else r.reshape(flat) for k, r in refs.items()}


@cached
def kernel(p, row, interpret):
    """The gradient of x, and sums (sum, program, column) of each block. p: a Plan; row: what
    computes its rows."""
    x, names = p.x, p.names

    def body(*refs, **scratch):
        overlap_launches()
        given = dict(zip((*names, "out", "sums"), refs))
        tile = _Tile(p, matrices(given, x, (*p.of_tile, "out")) | scratch)
        tile.fetch_first()

        def step(i, carry):
            before, total = carry
            of_row = row(tile.at(i))
            of_row.hold(p.of_tile)
            tile.fetch_next()
            pl.when(i > 0)(lambda: tile.store(i - 1, 0, before))
            result = of_row.result(0).astype(x.dtypes[1])
            return result, [t + s for t, s in zip(total, of_row.sums(0))]

        zero = jnp.zeros((p.height, p.part), jnp.float32)
        carry = zero.astype(x.dtypes[1]), [zero] * x.sums
        last, total = lax.fori_loop(0, tile.count, step, carry)
        pl.when(tile.count > 0)(lambda: tile.store(tile.count - 1, 0, last))
        if x.sums:
            _write_sums(tile, total)

    return with_sums(p, body, WARPGROUPS, interpret)


@cached
def last_sums(sums, programs, padded, n, dtype, interpret):
    """Kernel: of sums (sum, program, column) those over the programs, each as an array of n."""
    height = min(_HEIGHT, programs)
    width = min(_SUMMED << (_HEIGHT // height).bit_length() - 1, n)
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
    """The highest tile that shared memory holds, or what the config says; None: there is none."""
    most = max(1, min(_SEGMENT // x.n, pl.cdiv(x.rows, WARPGROUPS)))
    for height in (cfg.height,) if cfg.height else range(most, 0, -1):
        members = cfg.members or 1
        while not cfg.members and members < WARPGROUPS and x.n > members * _SEGMENT:
            members *= 2
        p = Plan(x, names, sms, height, members, cfg)
        if p.fits() and (height == 1 or members == 1):  # only single rows are shared
            return p
    return None
