"""Values of 8 bits, transposed once for attention of many queries on Hopper.

Blocks of attention that transpose values as they arrive (_attention_narrow.py) do so again for each
tile of queries, beside the softmax, whose instructions it slows down. A kernel of its own does it
once, by the same instructions. Parts of 64 keys lie one after the other in the memory of its
result, each as it is to lie in shared memory: a row for each column of V, whose order the result of
attention is stored by. The bits of the result stay the same."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu._caches import cached

from ._attention_narrow import Narrow, NarrowPlan, transpose_pairs, union, width
from ._attention_scores import PART_OF_KEYS, PLAIN
from ._common import SeveralKernels, overlap_launches, padded, swizzled

_PARTS = 4  # of a block of the grid
_LEAST = 2048  # queries to a head of keys for which it pays
_TRUSTED = 2048, 16384  # keys from which maxima need not be looked for; with a causal mask


def pays(x):
    """Is it faster to transpose values first? x: a Problem."""
    if x.dtype.itemsize != 1 or x.transposed or x.page or any(x.lengths) or x.is_open:
        return False
    if x.scores.adjusted or x.scores.dropout or width(x.dim) != width(x.value_dim):
        return False
    if width(x.dim) == 64 and (x.causal or x.scores != PLAIN):
        return False
    return x.queries * x.group >= _LEAST


def tiling(x, consumers):
    """The fields of an AttentionConfig that differ where values come transposed: without the
    converter there are registers and memory for more keys. With few keys maxima grow too often to
    be trusted."""
    dim, sees_all = width(x.dim), x.scores.left is None and x.scores.right is None
    trusting = sees_all and x.keys >= _TRUSTED[bool(x.causal)]
    block, stages = {64: 256, 128: 192, 256: 128}[dim], 2
    if dim == 64 and consumers == 3 and trusting:
        block, stages = 128, 4
    else:
        consumers = min(consumers, 2)
    late = dim == 256
    hold = not (late or x.causal)
    return {
        "consumers": consumers,
        "block": block,
        "stages": stages,
        "late": late,
        "hold": hold,
        "q_registers": False,
        "apart": False,
        "trusting": trusting,
    }


def shape_of(x):
    """Of transposed values: batch, heads, parts of the keys, columns, keys of a part."""
    parts = pl.cdiv(x.keys, PART_OF_KEYS)
    return x.batch, x.kv_heads, parts, width(x.value_dim), PART_OF_KEYS


@cached
def _transpose(x, interpret):
    """Kernel: values [batch, keys, heads, dim] as attention gets them."""
    n, columns = PART_OF_KEYS, width(x.value_dim)
    together = max(128 // columns, 1)  # parts whose rows lie side by side
    raw_shape = _PARTS // together, n, columns * together

    def body(v, out, raw, turned, full):
        overlap_launches()
        b, head, tile = (lax.axis_index(name) for name in ("batch", "head", "tile"))
        (raw, pairs), (turned, words) = raw, turned
        for i in range(_PARTS):
            at = b, pl.ds((tile * _PARTS + i) * n, n), head
            here = raw.at[i // together]
            if together > 1:
                here = here.at[:, pl.ds(i % together * columns, columns)]
            plgpu.copy_gmem_to_smem(padded(v, at, columns), here, full)
        plgpu.barrier_wait(full, phase=0)
        for i in range(0, _PARTS, together):
            for first in range(0, columns, 128):
                source = pairs.at[i // together, :, pl.ds(first // 2, 64)]
                if together > 1:
                    into = words.at[pl.ds(i, together)]
                else:
                    into = words.at[i, pl.ds(first, 128)]
                transpose_pairs(source, into, halves=together > 1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(turned, out.at[b, head, pl.ds(tile * _PARTS, _PARTS)])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct(shape_of(x), x.dtype),
        scratch_types={
            "raw": union(raw_shape, math.gcd(columns, 128), x.dtype),
            "turned": union((_PARTS, columns, n), n, x.dtype),
            "full": plgpu.Barrier(num_arrivals=_PARTS),
        },
        grid=(x.batch, x.kv_heads, pl.cdiv(x.keys, n * _PARTS)),
        grid_names=("batch", "head", "tile"),
        interpret=interpret,
        kernel_name="attention_transpose",
    )


class TransposedPlan(NarrowPlan):
    """What a plan of attention has besides, where values come transposed."""

    def fit(self):
        self.begin()
        self.copies = 1
        self.place_queries()

    def scratch(self):
        shape = (self.stages, self.block // PART_OF_KEYS, self.value_dim, PART_OF_KEYS)
        values = plgpu.SMEM(shape, self.x.dtype, transforms=swizzled(PART_OF_KEYS, self.x.dtype))
        return super(NarrowPlan, self).scratch() | {"v_smem": values}


class Transposed(Narrow):
    """What a block of attention does besides, where values come transposed: it has no converter."""

    def __init__(self, plan, refs):
        super(Narrow, self).__init__(plan, refs)

    def run(self):
        super(Narrow, self).run()

    def fetch_keys(self, it, place):
        super(Narrow, self).fetch_keys(it, place)

    def fetch_values(self, it, place):
        ring, (b, row, head) = self.v_ring, place
        pl.when(it >= ring.stages)(lambda: ring.await_release(it - ring.stages))
        slot, count = it % ring.stages, self.plan.block // PART_OF_KEYS
        parts = self.v.at[b, head, pl.ds(row // PART_OF_KEYS, count)]
        plgpu.copy_gmem_to_smem(parts, self.v_smem.at[slot], ring.full.at[slot])

    def drain(self, it):
        super(Narrow, self).drain(it)


class TransposedFirst(SeveralKernels):
    """Attention to values of 8 bits, after these were transposed."""

    def __init__(self, x, make, interpret):
        """make(problem): the kernel of a problem."""
        self.transpose = _transpose(x, interpret)
        self.attention = make(x._replace(transposed=shape_of(x)))

    def __call__(self, q, k, v, *others, out=None, stream=None):
        v = self.transpose(v, stream=stream)
        return self.attention(q, k, v, *others, out=out, stream=stream)
