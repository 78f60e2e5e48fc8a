"""Rows for norms.py that may begin at any address: a bulk copy brings them to SMEM.

The array is seen as flat. A *span* is what one warpgroup works on: a contiguous range of it, which
is a row, a segment of a row, or several short rows. A *piece* is 16 aligned bytes, the grain of
bulk copies. A bulk copy brings the pieces that belong to the span alone to SMEM, and lanes load the
elements at both ends, whose pieces neighbours have, too: these may be stored already where the
result takes the place of x. In SMEM results take the place of what was read, and leave in the same
way.

A bulk copy has a static number of bytes: so many whole pieces lie in every span, wherever it
begins. The last tile may have fewer rows; if their number is known at run time only, lanes copy
them all. So they do with arrays that do not begin at a multiple of 16 bytes.

Several short rows are one tile (height, n). Consecutive lanes read consecutive words of 4 bytes, at
whatever element the row starts, so that there are no bank conflicts. Long rows, or their segments,
are processed in parts, of which only the last has a mask. With softmax, parts begin with the piece
in which the row begins, 16 bytes for each lane, and the first one has a mask, too. Weights and
biases with the alignment of the row come through SMEM where there is room; otherwise each part
would wait for them. A row that registers hold is one part: they have its weight, too, or, with
`stream`, SMEM has it.

The warpgroups of a block and the blocks of a cluster divide a row, and send each other the
statistics of their segments by asynchronous stores, so only the receiver waits. No lane reads what
another lane has written before a commit_smem, so no other barriers between lanes are needed."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import SMEM_BYTES, overlap_launches, unaligned
from ._open_rows import in_shapes

SHORT = 2048  # elements of a row, up to which a tile has several at once
_LANES = 128
_AT_ONCE = 8  # elements of a lane that are on their way, where lanes load them
_HELD_OF_LANE = 32  # elements of a short row
_CACHED = 8192  # elements of a weight or bias up to which lanes load it, from the L1 cache
STREAMED_BYTES = 73728  # of a block in SMEM, longer vectors among them: three blocks on an SM


class Span:
    """Where spans of `count` elements lie in a flat array, and in the buffer they are copied to."""

    def __init__(self, total, count, pitch, itemsize):
        """pitch: spans start at multiples of it."""
        self.total, self.count, self.piece = total, count, 16 // itemsize
        self.exact = pitch % self.piece == 0
        self.buffer = (pl.cdiv(count, self.piece) + 1) * self.piece

    def first(self, start):
        """The first element of the piece in which a span begins, as the buffer does."""
        if not self.exact:
            start = start // self.piece * self.piece
        return pl.multiple_of(start, self.piece)

    def whole(self, start, inner):
        """The first whole piece of a span, with so many elements after it that lie inside."""
        if not self.exact:
            start = (start + (self.piece - 1)) // self.piece * self.piece
        return pl.multiple_of(jnp.clip(start, 0, self.total - inner), self.piece)

    def inner(self, count):
        """Elements of whole pieces that lie in every span of so many elements."""
        return (count if self.exact else max(count - self.piece + 1, 0)) // self.piece * self.piece


class Vector:
    """The same for a weight or bias, which is not written: what comes beside the segment does no
    harm, so one copy brings all pieces, or those before the end of the array."""

    def __init__(self, total, count, itemsize):
        """count: elements of a segment; segments start at multiples of it."""
        self.piece = 16 // itemsize
        self.room = min(pl.cdiv(count, self.piece), total // self.piece) * self.piece
        self.buffer = (pl.cdiv(count, self.piece) + 1) * self.piece
        self.top = (total - self.room) // self.piece * self.piece  # where the last one starts
        # elements after that, which bulk copies do not reach
        self.rest = total - self.top - self.room

    def base(self, start):
        """The first element of the buffer that has the segment from `start` on."""
        return pl.multiple_of(jnp.clip(start, 0, self.top), self.piece)

    def load(self, source, base, buffer, full):
        """Starts the copy of a segment to the buffer."""
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(base, self.room)],
            buffer.at[pl.ds(0, self.room)],
            full,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )
        if self.rest:

            @pl.when(base == self.top)
            def _():
                keep, after = jnp.arange(_LANES) < self.rest, self.top + self.room
                value = pl.load(source, pl.ds(after, _LANES), mask=keep, other=0.0)
                pl.store(buffer, pl.ds(self.room, _LANES), value, mask=keep)
                plgpu.commit_smem()


class Plan:
    """Numbers that follow from the shape and the configuration."""

    def __init__(self, x, total, cfg):
        """x: a Problem of norms.py; total: elements of the array, perhaps a size of the call."""
        self.problem, self.total, self.cluster = x, total, cfg.cluster
        # whether arrays begin at a multiple of 16 bytes; otherwise lanes load and store elements
        self.bulk = x.aligned[0] and x.aligned[-1]
        self.outer, self.n, _ = x.extents
        self.threads, self.segments = cfg.threads, cfg.cluster * cfg.threads  # of a row
        self.joint = self.n <= SHORT and self.segments == 1  # is a tile of several rows one span?
        self.height = cfg.height  # rows of a span
        vectors = [v for v in x.vectors if v is not None]
        sizes = [x.dtype.itemsize, x.out_dtype.itemsize]
        self.width = self.n
        if self.segments > 1:
            pieces = 16 // min(*sizes, *(v.itemsize for v in vectors))
            self.width = pl.cdiv(pl.cdiv(self.n, self.segments), pieces) * pieces
        self.last = self.n - (self.segments - 1) * self.width  # elements of the last segment
        count, pitch = self.height * self.width, self.height * self.n
        self.x, self.o = (Span(total, count, pitch, size) for size in sizes)
        self.tiles = pl.cdiv(self.outer, self.height)
        over = self.outer % self.height
        self.full_tiles = not isinstance(over, plgpu.Dim) and over == 0
        self.divide(cfg, max(sizes))
        self.streamed = {}  # vectors that come through SMEM, by number
        if self.exact and (cfg.stream or self.parts > 1 and self.n > _CACHED):
            for i, v in enumerate(x.vectors):
                if v is not None and x.aligned[1 + i]:
                    room = SMEM_BYTES - 2048 if cfg.stream else STREAMED_BYTES
                    self.stream(i, Vector(self.n, self.width, v.itemsize), room)

    def stream(self, i, span, room):
        """Has vector number i come through SMEM, if there is room."""
        self.streamed[i] = span
        if not span.room or self.smem_bytes() > room:
            del self.streamed[i]

    def divide(self, cfg, size):
        """The parts of a row."""
        piece = 16 // size
        self.exact = self.x.exact and self.o.exact
        plain = self.exact or all(v is None for v in self.problem.vectors)
        self.pieces = plain and not self.joint and 0 < cfg.part < self.width
        vector = max(math.gcd(self.n, piece), 4 // size)
        of_row = span_lanes(self.n, vector, size, self.height) if self.joint else _LANES
        if self.height % (_LANES // of_row):
            of_row = _LANES
        # parts begin with the piece in which the row begins: so many elements before it, at most
        self.before = piece - 1 if self.pieces and not self.exact else 0
        first = piece if self.pieces else even_vector(self.width, of_row, vector, 4 // size)
        self.layout = row_layout(of_row, first)
        grain = of_row * first
        self.part = pl.cdiv(min(cfg.part or self.width, self.width), grain) * grain
        self.parts = pl.cdiv(self.width + self.before, self.part)
        # parts without a mask
        self.whole = range(1 if self.before else 0, self.last // self.part)
        if self.parts == 1:
            self.whole = range(0)
        # no mask at all
        self.even = not self.before and self.parts * self.part == self.width == self.last

    def why_not(self):
        """What is wrong, or None."""
        if self.height > 1 and not self.joint:
            return f"segments, and rows of more than {SHORT} elements, have tiles of one row"
        if self.last <= 0:
            return "a segment of a row would be empty"
        if _sizes.most(self.total) > _sizes.MOST:
            return f"the array has more than {_sizes.MOST} elements"
        if self.smem_bytes() > SMEM_BYTES - 2048:
            return f"a tile takes {self.smem_bytes()} bytes of shared memory"
        return None

    def smem_bytes(self):
        spans = {self.x.piece: self.x, self.o.piece: self.o}.values()
        spans = [*spans, *self.streamed.values()]
        return self.threads * sum(16 * s.buffer // s.piece for s in spans)

    def scratch(self):
        x, found, threads = self.problem, {}, self.threads
        found["x_smem"] = plgpu.SMEM((threads, self.x.buffer), x.dtype)
        if x.dtype != x.out_dtype:
            found["o_smem"] = plgpu.SMEM((threads, self.o.buffer), x.out_dtype)
        for i, span in self.streamed.items():
            found[f"v{i}_smem"] = plgpu.SMEM((threads, span.buffer), x.vectors[i])
        if self.streamed:
            of_vectors = {"num_arrivals": len(self.streamed), "num_barriers": threads}
            found["vectors_full"] = plgpu.Barrier(**of_vectors)
        if self.segments > 1:
            found["stats"] = plgpu.SMEM((self.segments, 2), jnp.float32)
            found["arrived"] = plgpu.Barrier(num_arrivals=self.segments)
        return found | {"full": plgpu.Barrier(num_barriers=threads)}


def row_lanes(n, vector):
    """Lanes of a warp that share a short row."""
    return min(32, pl.next_power_of_2(pl.cdiv(n, vector)))


def span_lanes(n, vector, itemsize, height=_LANES):
    """Lanes of a warp that share a short row of a tile, where a lane reads vectors of so many
    elements: with fewer, reductions take fewer shuffles. Of 16 bits, which arithmetic bounds, as
    few as leave fewest places without an element; not of rows that are read 4 bytes at a time."""
    most = row_lanes(n, vector)
    if itemsize > 2 or vector * itemsize < 8:
        return most
    vectors = pl.cdiv(n, vector)
    found = [k for k in (32, 16, 8, 4) if k < most and height % (_LANES // k) == 0]
    found = [k for k in found if pl.cdiv(vectors, k) * vector <= _HELD_OF_LANE]
    return min([most, *found], key=lambda k: pl.cdiv(vectors, k) * k)


def even_vector(n, lanes, vector, least):
    """Elements that a lane reads at once, of up to `vector`: shorter ones if lanes share a row
    evenly only so, since masks take more time."""
    found = [v for v in (vector, vector // 2, vector // 4) if v >= least and n % (lanes * v) == 0]
    return found[0] if found else vector


def row_layout(lanes, vector):
    """Rows of which so many lanes have a vector at a time: those of a warp or fewer, or all."""
    rows, width = 32 // lanes, lanes * vector
    if lanes > 32:
        tiles, warps, of_warp = ((width,), (width // 4,), (vector,)), -3, (-2,)
    elif rows == 1:
        tiles, warps, of_warp = ((4, width), (vector,)), -3, (-2,)
    elif lanes == 1:
        tiles, warps, of_warp = ((128, width), (32, width)), -4, (-2,)
    else:
        tiles, warps, of_warp = ((4 * rows, width), (rows, width), (vector,)), -5, (-3, -2)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), (warps,), of_warp, -1)


def pair(numbers):
    """One or two scalars as an array of two."""
    numbers = [value.reshape(()) for value in numbers]
    return jnp.where(jnp.arange(2) == 0, numbers[0], numbers[-1])


def send(numbers, here, arrived, **to):
    """The statistics of a segment, to a block of the cluster."""
    plgpu.async_store_smem(pair(numbers), here, arrived, **to)


class Block:
    """The work of a warpgroup, while the kernel is traced: a span, with the interface that the
    functions of norms.py need of a tile. x, o: flat."""

    def __init__(self, plan, refs):
        self.plan = p = plan
        vars(self).update(refs)
        self.op, self.n, self.shared = p.problem.op(), p.n, p.segments > 1
        self.op.fast = p.problem.is_fast()
        self.shape, self.sizes = (p.height, p.part), [p.width] * (p.segments - 1) + [p.last]
        self.thread = lax.axis_index("wg") if p.threads > 1 else 0
        rank = lax.axis_index("c") if p.cluster > 1 else 0
        self.segment = rank * p.threads + self.thread  # of a row
        self.offset = self.segment * p.width
        self.mine, self.share = p.n, 1 / p.n  # elements of the segment
        if self.shared:
            inner = self.segment < p.segments - 1
            self.mine = jnp.where(inner, p.width, p.last)
            self.share = jnp.where(inner, 1 / p.width, 1 / p.last)
        self.first = lax.axis_index("tile") * p.height  # row
        self.start = self.first * p.n + self.offset
        self.base, self.o_base = p.x.first(self.start), p.o.first(self.start)
        self.x_smem, self.o_smem = (b.at[self.thread] for b in (self.x_smem, self.o_smem))
        # elements between the beginning of part 0 and the row
        self.lead = self.start - self.base if p.before else 0

    def run(self):
        p, full = self.plan, self.full.at[self.thread]
        self.by_count(lambda count: self.fetch(count, full))
        bases = {i: span.base(self.offset) for i, span in p.streamed.items()}
        for i, span in p.streamed.items():
            span.load(self.vectors[i], bases[i], self.buffer(i), self.vectors_full.at[self.thread])
        self.by_count(self.load_beside)
        # while the row comes
        early = self.vectors_of(0, True, {}) if p.parts == 1 and not p.streamed else None
        plgpu.barrier_wait(full)
        self.held = self.read(0) if p.parts == 1 else None
        self.make_statistics()
        if p.streamed:
            plgpu.barrier_wait(self.vectors_full.at[self.thread])
        if early:  # they stay as they were loaded
            early = {i: lax.optimization_barrier(v) for i, v in early.items()}

        def write(k, _, masked=False):
            vectors = self.vectors_of(k, masked, bases) if early is None else early
            self.write(k, vectors, masked)

        self.loop(write, None)
        plgpu.commit_smem()
        self.by_count(self.store)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def loop(self, step, carry):
        """carry = step(k, carry, is part k masked) over the parts of a row."""
        p = self.plan
        for k in range(p.whole.start):
            carry = step(k, carry, True)
        if p.whole:
            carry = lax.fori_loop(p.whole.start, p.whole.stop, step, carry)
        for k in range(max(p.whole.start, p.whole.stop), p.parts):
            carry = step(k, carry, True)
        return carry

    # ---- statistics

    def make_statistics(self):
        p, mine = self.plan, self.op.local(self)
        if not self.shared:
            self.op.alone(self, *mine)
            return
        here = self.stats.at[self.segment]
        for k in range(p.cluster) if p.cluster > 1 else ():
            send(mine, here, self.arrived, cluster_idx=k, cluster_dim="c")
        if p.cluster == 1:
            here[...] = pair(mine)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.arrived)
        plgpu.barrier_wait(self.arrived)
        numbers = range(self.op.numbers)
        self.op.joined(self, [[self.stats[k, i] for i in numbers] for k in range(p.segments)])

    def each(self, f, start, raw=False):
        """f(acc, part, which elements are there or None) over the parts. raw: of their own dtype,
        unless registers hold them."""
        if self.held is not None:
            return f(None, self.held, self.inside(0))
        dtype = self.plan.problem.dtype if raw else jnp.float32
        acc = self.fixed(jnp.full(self.shape, start, dtype))

        def step(k, acc, masked=False):
            return f(acc, self.read(k, masked, raw), self.inside(k) if masked else None)

        return self.loop(step, acc)

    def most(self, x):
        return self.fixed(x).max(axis=1, keepdims=True)

    def total(self, x):
        return self.fixed(x).sum(axis=1, keepdims=True)

    def fixed(self, x):
        return plgpu.layout_cast(x, self.plan.layout)

    # ---- parts

    def inside(self, k):
        """Which elements of part k are there; None: all."""
        p, found = self.plan, None
        if not p.even:
            at = lax.broadcasted_iota(jnp.int32, self.shape, 1)
            found = at < self.mine + self.lead - k * p.part
            if p.before and k == 0:
                found &= at >= self.lead
        return self.rows_inside(found)

    def rows_inside(self, keep=None):
        p = self.plan
        if p.full_tiles:
            return keep
        there = lax.broadcasted_iota(jnp.int32, self.shape, 0) < p.outer - self.first
        return there if keep is None else keep & there

    def view(self, ref, base, k):
        """Part k in a buffer: a ref and an index of it."""
        p, start = self.plan, self.start - base
        if p.height > 1:
            rows = ref.at[pl.ds(start, p.height * p.n)].reshape((p.height, p.n))
            return rows, (slice(None), pl.ds(k * p.part, p.part))
        start -= self.lead
        if p.pieces:
            start = pl.multiple_of(start, min(p.x.piece, p.o.piece))
        return ref.reshape((1, ref.size)), (slice(None), pl.ds(start + k * p.part, p.part))

    def read(self, k, masked=True, raw=False):
        """Part k, float32 unless raw."""
        keep = self.inside(k) if masked else self.rows_inside()
        ref, at = self.view(self.x_smem, self.base, k)
        if keep is None:
            value = ref[at]
        else:
            value = pl.load(ref, at, mask=keep, other=self.op.fill)
        value = self.fixed(value)
        return value if raw else value.astype(jnp.float32)

    def write(self, k, vectors, masked):
        """The result of part k. vectors: parts of weight and bias."""
        value = self.held if self.held is not None else self.read(k, masked)
        value = self.op.result(self, value)
        for i, v in vectors.items():
            v = lax.broadcast_in_dim(v.astype(jnp.float32), self.shape, [1])
            value = value * v if i == 0 else value + v
        value = value.astype(self.plan.problem.out_dtype)
        keep = self.inside(k) if masked else self.rows_inside()
        ref, at = self.view(self.o_smem, self.o_base, k)
        if keep is None:
            ref[at] = value
        else:
            pl.store(ref, at, value, mask=keep)

    def buffer(self, i):
        return getattr(self, f"v{i}_smem").at[self.thread]

    def vectors_of(self, k, masked, bases):
        """Parts of weight and bias, by number. bases: of those in SMEM."""
        p, found = self.plan, {}
        for i, ref in enumerate(self.vectors):
            if ref is None:
                continue
            start = self.offset + k * p.part
            if i in bases:
                ref = self.buffer(i)
                start = pl.multiple_of(start - bases[i], p.streamed[i].piece)
            elif not p.problem.aligned[1 + i]:
                start = unaligned(start)
            found[i] = self.part_of(ref, start, k, masked)
        return found

    def part_of(self, ref, start, k, masked):
        p, at = self.plan, pl.ds(start, self.plan.part)
        if not masked or p.even:
            return ref[at]
        index = jnp.arange(p.part)
        if p.height == p.part:  # not the index of rows, whose layout is another one
            index = plgpu.broadcasted_iota(jnp.int32, (p.part,), 0, layout=p.layout.reduce(0))
        return pl.load(ref, at, mask=index < self.mine - k * p.part, other=0.0)

    # ---- from and to global memory

    def by_count(self, work):
        """work(count) for the elements of the span: a static number, but for the last tile of a
        number of rows that is known at run time only."""
        p, last = self.plan, self.plan.segments - 1
        if p.last != p.width:
            pl.when(self.segment < last)(lambda: work(p.width))
            pl.when(self.segment == last)(lambda: work(p.last))
            return
        if p.full_tiles:
            work(p.x.count)
            return
        is_open = isinstance(p.outer, plgpu.Dim)
        rest = p.outer - self.first if is_open else p.outer % p.height
        if _sizes.most(p.outer) < p.height:
            work(rest * p.n)
            return
        full = self.first <= p.outer - p.height
        pl.when(full)(lambda: work(p.x.count))
        pl.when(jnp.logical_not(full))(lambda: work(rest * p.n))

    def whole(self, span, count):
        """Elements that the bulk engine copies of so many; 0: all may lie inside one piece."""
        return span.inner(count) if self.plan.bulk and isinstance(count, int) else 0

    def beside(self, span, count, step):
        """step(places) for the other elements, up to _AT_ONCE of a lane at a time; places: in the
        array, with masks."""
        whole = self.whole(span, count)
        most = count - whole if isinstance(count, int) else span.count
        at_once = min(_AT_ONCE, pl.cdiv(most, _LANES))
        before = 0  # elements before whole pieces
        if whole and not span.exact:
            before = span.whole(self.start, whole) - self.start

        def place(k):
            number = jnp.arange(_LANES) + k * _LANES
            at = self.start + number
            if whole:
                at = at + jnp.where(number < before, 0, whole)
            return at, number < count - whole

        def some(k, _):
            step([place(k * at_once + j) for j in range(at_once)])

        lax.fori_loop(0, pl.cdiv(most, at_once * _LANES), some, None)

    def fetch(self, count, full):
        """Starts the bulk copy of the pieces that belong to the span alone."""
        span = self.plan.x
        whole = self.whole(span, count)
        if not whole:
            plgpu.barrier_arrive(full)
            return
        begin = span.whole(self.start, whole)
        here = pl.multiple_of(begin - self.base, span.piece)
        plgpu.copy_gmem_to_smem(
            self.x.at[pl.ds(begin, whole)],
            self.x_smem.at[pl.ds(jnp.clip(here, 0, span.buffer - whole), whole)],
            full,
            oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
        )

    def load_beside(self, count):
        """The other elements."""

        def step(places):
            values = [pl.load(self.x, at, mask=keep, other=0.0) for at, keep in places]
            for (at, keep), value in zip(places, values):
                pl.store(self.x_smem, at - self.base, value, mask=keep)

        if not isinstance(count, int) or self.whole(self.plan.x, count) < count:
            self.beside(self.plan.x, count, step)
            plgpu.commit_smem()

    def store(self, count):
        span = self.plan.o
        whole = self.whole(span, count)
        if whole:
            begin = span.whole(self.start, whole)
            here = jnp.clip(begin - self.o_base, 0, span.buffer - whole)
            source = self.o_smem.at[pl.ds(pl.multiple_of(here, span.piece), whole)]
            plgpu.copy_smem_to_gmem(source, self.o.at[pl.ds(begin, whole)])

        def step(places):
            for at, keep in places:
                value = pl.load(self.o_smem, at - self.o_base, mask=keep, other=0.0)
                pl.store(self.o, at, value, mask=keep)

        if not isinstance(count, int) or whole < count:
            self.beside(span, count, step)


@cached
def kernel(x, total, cfg, interpret):
    """x, total, cfg: of Plan. If `total` is a size of the call, the arrays have one dimension."""
    p, is_open = Plan(x, total, cfg), _sizes.is_open((total,))
    shape = (total,) if is_open else x.shape

    def body(source, *refs, **scratch):
        overlap_launches()
        ends = source, refs[-1]
        if not is_open:
            ends = [ref.reshape((total,)) for ref in ends]
        given = dict(x=ends[0], o=ends[1], vectors=x.given(refs), o_smem=scratch["x_smem"])
        Block(p, given | scratch).run()

    params = plgpu.CompilerParams(
        approx_math=x.out_dtype.itemsize == 2, unsafe_no_auto_barriers=True
    )
    clusters = dict(cluster=(p.cluster,), cluster_names=("c",)) if p.cluster > 1 else {}
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape, x.out_dtype),
        scratch_types=p.scratch(),
        grid=(p.tiles,),
        grid_names=("tile",),
        **clusters,
        **(dict(num_threads=p.threads, thread_name="wg") if p.threads > 1 else {}),
        compiler_params=params,
        interpret=interpret,
        kernel_name=x.name,
        **in_shapes(shape, *(None for v in x.vectors if v is not None)),
    )
