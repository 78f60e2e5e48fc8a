"""How blocks of attention with a long cache divide the keys of all sequences.

The work of all sequences and heads is one row of blocks of keys, *units*; each block of the grid
has an equal share of it, whatever the lengths, which are read when the kernel runs. A share is
worked on from its end to its beginning, one *segment* for each (sequence, head).

Where a plan has *lanes*, that many blocks of the grid work side by side on the same keys of
different heads (or rows of queries), which lie beside one another in memory: block number
``place * lanes + lane`` has a share of the heads ``lane``, ``lane + lanes``, ... The shares of a
lane are merged among themselves. ``places``: how many blocks a lane has.

Where the number of sequences is known when the kernel runs (`OpenBatch`), arrays with dims of each
sequence are views in which these dims are one: the kernel computes where a sequence begins."""

from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import WarpSpecialized
from ._open_rows import is_static

_BATCHES = 0, 16, 64, 256, 1024  # sequences: edges of the programs


class OpenBatch(NamedTuple):
    """Sizes that are known when a kernel runs: ``rows`` of q, a few for each sequence; ``cache``:
    rows of the cache, or pages; ``table``: entries of the page table, None without one. ``most``:
    sequences that the program is for."""

    rows: plgpu.Dim
    cache: plgpu.Dim
    table: plgpu.Dim | None
    most: int


def open_batch(kind, q, k, page_table, rows=1):
    """An OpenBatch, or None where a call has the program of its shapes. kind: what else
    distinguishes programs; rows: of q, of a sequence."""
    batch = q.shape[0]
    entries = None if page_table is None else page_table.shape[1]
    met = batch, entries, *k.shape[: 1 if entries else 2]
    if batch > _BATCHES[-1] or is_static(kind, met):
        return None
    bucket = next(k for k, edge in enumerate(_BATCHES) if batch <= edge)
    least, most = _BATCHES[bucket - 1] + 1, _BATCHES[bucket]
    cache = plgpu.dim("C", min=1 if entries else least)
    table = plgpu.dim("T", min=least) if entries else None
    q = plgpu.dim("N", min=least * rows, max=most * rows, multiple_of=rows)
    return OpenBatch(q, cache, table, most)


_SEQUENCES = 1 << 16  # whose blocks a thread adds up


class Shares(WarpSpecialized):
    reads_only = False

    def __init__(self, plan, refs):
        super().__init__(plan, refs)
        self.x, self.refs, self.block = plan.x, refs, plan.block
        self.me = lax.axis_index("cluster")
        for name, size in plan.axes.items():
            self.me = self.me * size + lax.axis_index(name)
        self.lane, self.place = self.me % plan.lanes, self.me // plan.lanes
        keys = self.x.keys  # that the cache holds, maybe a plgpu.dim
        self.capacity = jnp.int32(keys) if isinstance(keys, int) else keys + 0 * self.me

    # ---- division of the work

    def extent(self, n):
        """The first block of keys that a sequence of n keys needs, and how many it needs."""
        x, end = self.x, (n + (self.block - 1)) // self.block
        # an empty sequence has one block, all masked
        if x.scores.left is None:
            return 0, jnp.maximum(end, 1)
        first = jnp.clip(n - (x.queries + x.scores.left), 0, self.capacity) // self.block
        return first, jnp.maximum(end - first, 1)

    def share(self):
        """Blocks of keys before each sequence's end (all heads), and this block's first and last
        unit."""
        x, count, there = self.x, self.x.batch, None
        if x.open:
            count = x.open.most
            there = jnp.arange(count) < x.batch
        if x.lengths:
            n = pl.load(
                self.lengths, pl.ds(0, count), mask=there, other=None if there is None else 0
            )
            n = jnp.clip(n, 0, self.capacity)
        else:
            n = jnp.full((count,), self.capacity, jnp.int32)
        _, blocks = self.extent(n)
        blocks = blocks if there is None else jnp.where(there, blocks, 0)
        self.ends = jnp.cumsum(blocks) * self.plan.heads
        self.total = jnp.sum(blocks) * self.plan.heads
        return self.start(self.place), self.start(self.place + 1)

    def start(self, block):
        """The first unit of a block, without products that overflow."""
        places = self.plan.places
        each, rest = self.total // places, self.total % places
        return block * each + jnp.minimum(block, rest)

    def owner(self, unit):
        """The block that has a unit."""
        places = self.plan.places
        each, rest = self.total // places, self.total % places
        wide = rest * (each + 1)
        later = rest + (unit - wide) // jnp.maximum(each, 1)
        return lax.select(unit < wide, unit // (each + 1), later)

    def segment(self, begin, end):
        """The last segment of the units from begin to end: sequence, head, first unit of that
        head, its blocks, the length, first and last block of the segment."""
        x = self.x
        b = jnp.sum((self.ends < end).astype(jnp.int32))
        length = jnp.clip(self.lengths[b], 0, self.capacity) if x.lengths else self.capacity
        _, blocks = self.extent(length)
        stop = jnp.max(jnp.where(self.ends < end, self.ends, 0))  # where the sequence begins
        head = (end - 1 - stop) // blocks
        first = stop + head * blocks
        head = head * self.plan.lanes + self.lane
        return b, head, first, blocks, length, jnp.maximum(begin - first, 0), end - first

    def segments(self, work, carry):
        """carry = work(segment, carry) for each segment, from the last on."""
        begin, end = self.share()

        def step(state):
            end, carry = state
            found = self.segment(begin, end)
            return found[2] + found[5], work(found, carry)

        return lax.while_loop(lambda state: state[0] > begin, step, (end, carry))[1]

    def pieces(self, b, head, key, length):
        """Rows of a slot (None: all) and where in the cache they are, for each copy of a block."""
        x, n = self.x, self.plan.piece
        if not x.page:
            entry, key = (0, b * self.capacity + key) if x.open else (b, key)
            return [(None, (entry, pl.ds(key, self.block), head))]
        last = jnp.maximum(length - 1, 0) // x.page  # entries beyond it may be anything
        found = []
        for i in range(0, self.block, n):
            entry = jnp.minimum((key + i) // x.page, last)
            page = self.page_table[b * (x.open.table // x.batch) + entry if x.open else (b, entry)]
            page = jnp.clip(page, 0, self.k.shape[0] - 1)
            at = page, pl.ds((key + i) % x.page, n), head
            found.append((None if n == self.block else pl.ds(i, n), at))
        return found


class WithParts:
    """A kernel without what it keeps in global memory for itself. memory: makes that."""

    takes_views = True  # _strides.py

    def __init__(self, name, kernel, memory, return_lse):
        self.name, self.kernel, self.memory, self.return_lse = name, kernel, memory, return_lse

    def __call__(self, *operands, out=None, stream=None):
        if out is not None:
            outs = tuple(out) if self.return_lse and isinstance(out, (tuple, list)) else (out,)
            if len(outs) != 1 + self.return_lse:
                raise ValueError(
                    f"{self.name}: with return_lse=True, out must be (result, logarithms)"
                )
            out = (*outs, *self.memory(operands[0], stream=stream))
        found = self.kernel(*operands, out=out, stream=stream)
        return (found[0], found[1]) if self.return_lse else found[0]

    def lower(self, *operands, **options):
        """The kernel, lowered: its first results are those of a call."""
        return self.kernel.lower(*operands, **options)


@cached
def memory_of(name, shape, parts, interpret):
    """A function of q that makes such parts, for calls with out=, which must give all results.
    shape: of an entry of the batch of q."""

    def body(q, *outs):
        for out in outs:  # a kernel warns of results that it leaves as they are
            out[(0,) * out.ndim] = jnp.zeros((), out.dtype)

    return plgpu.kernel(
        body,
        in_shapes=((plgpu.dim("B"), *shape),),
        out_type=parts,
        interpret=interpret,
        kernel_name=f"{name}_memory",
    )


def check_array(op, name, x, shape, dtype):
    fits = len(x.shape) == len(shape) and all(w in (None, n) for n, w in zip(x.shape, shape))
    if not fits or x.dtype != dtype or 0 in x.shape:
        want = ", ".join("any" if n is None else str(n) for n in shape)
        want += "," * (len(shape) == 1)
        raise ValueError(
            f"{op}: {name} must be {np.dtype(dtype)} of shape ({want}), got {x.dtype}"
            f" of shape {x.shape}"
        )


def check_batch(op, q):
    if q.shape[0] > _SEQUENCES:
        raise NotImplementedError(
            f"{op}: up to {_SEQUENCES} sequences, got q {q.shape}; divide the batch"
        )


def check_pages(op, q, k, page_table):
    if page_table is None:
        if k.shape[0] != q.shape[0]:
            raise ValueError(
                f"{op}: q {q.shape} and k {k.shape} differ in batch; give page_table"
                " for caches in pages"
            )
        return
    check_array(op, "page_table", page_table, (q.shape[0], None), np.int32)
    if k.shape[1] % 8 or k.shape[1] < 16:
        raise NotImplementedError(
            f"{op}: a page must have a multiple of 8 keys, at least 16; got"
            f" {k.shape[1]} (k {k.shape})"
        )


def check_scale(op, name, scale, x, shape):
    """scale: of the heads of x; shape: [batch, heads], the first of which it need not have."""
    if scale is None:
        return
    if x.dtype.itemsize != 1:
        raise ValueError(f"{op}: {name} is for elements of 8 bits, got {x.dtype}")
    if scale.dtype != np.float32 or scale.shape not in (shape, shape[1:]):
        raise ValueError(
            f"{op}: {name} must be float32, a number for each head or each batch entry and head,"
            f" {shape[1:]} or {shape}; got {scale.dtype} of shape {scale.shape}"
        )
