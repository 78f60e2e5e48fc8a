"""Draws a token of each row of logits: temperature, top-k, top-p.

A block takes a row and reads it some times; after the first time it comes from the L2 cache.
Thresholds of logits are integers of the same order, their *keys*. The k-th largest key, and the
largest key above which the tokens have enough of the probability, are found from the highest bits
down, two bits each time the row is read: counts and sums of probabilities do not grow as the
threshold does. The token is drawn without a sum: with E exponentially distributed for each token,
the least E / p is that of a token drawn with the probabilities p. E is a function of seed, row and
token, so a draw does not depend on what else is in the batch, nor on how the row is divided.

Probabilities, as parts of the largest one, are rounded to integers of up to 34 bits, whose sums are
exact in any order: they do not depend either on how the row is divided. An element of a lane's
array adds up the upper and the lower bits of its columns in two integers.

The row is divided among the threads of the block, or of the blocks of a cluster, which meet once
for each time it is read. What they tell each other is in one of two halves of shared memory by
turns, in every block, so that one meeting is enough."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from ._common import FLOATS, overlap_launches
from ._open_rows import in_shapes, rows_of
from ._random import mixed

_F32 = np.float32
_LOW = _F32(-np.inf)
_THREADS = 4
_PART = 1024  # elements that a thread takes at a time
_ARRAY = "array"  # in place of a number; True would be equal to 1 where kernels are looked up
_LEAST = _F32(1e-20)  # of temperatures that are divided by
_LOW_BITS = 12  # of a probability, below its up to 22 upper ones
_SUM_BITS = 22  # of the lower of two integers that have a sum
_WHOLE = _F32(1.5 * 2**23)  # numbers near it are whole
_GOLDEN = np.uint32(0x9E3779B9)
_LOG2_E = _F32(math.log2(math.e))


class SampleConfig(NamedTuple):
    """How a row of `sample` is divided. ``blocks``: of the cluster that works on a row, 1, 2, 4 or
    8, on GPUs without clusters 1. The tokens are the same for each."""

    blocks: int = 1


class Problem(NamedTuple):
    """What a kernel computes. top_k, top_p, temperature: a number, None or _ARRAY."""

    rows: int
    n: int
    dtype: np.dtype
    top_k: int | str | None
    top_p: float | str | None
    temperature: float | str


class _Row:
    """A row of a block, while it is traced for one of the threads."""

    def __init__(self, x, blocks, refs):
        self.x, self.blocks, self.refs = x, blocks, refs
        self.me, self.row = lax.axis_index("thread"), lax.axis_index("row")
        self.threads = _THREADS * blocks  # of the row
        if blocks > 1:
            self.me = lax.axis_index("block") * _THREADS + self.me
        self.width = min(x.n, _PART)
        self.bits = 8 * x.dtype.itemsize
        self.meetings = 0

    def option(self, name, dtype=jnp.float32):
        """This row's number."""
        value = getattr(self.x, name)
        return self.refs[name][self.row] if value == _ARRAY else dtype(value)

    def read(self, step, state):
        """state = step(logits, their columns, state) for each part of this thread. Columns beyond
        the row hold -inf. A part is loaded while the one before is worked on."""
        n, width, low = self.x.n, self.width, self.x.dtype.type(-np.inf)
        parts = (pl.cdiv(n, width) - self.me + (self.threads - 1)) // self.threads

        index = jnp.arange(width)  # here, and not for each part

        def columns(i):
            return (i * self.threads + self.me) * width + index

        def load(i):
            i = jnp.clip(i, 0, jnp.maximum(parts - 1, 0))
            at = self.row, pl.ds((i * self.threads + self.me) * width, width)
            inside = n % (width * self.threads) == 0
            keep, other = (None, None) if inside else (columns(i) < n, low)
            return pl.load(self.refs["logits"], at, mask=keep, other=other)

        def part(i, carry):
            value, state = carry
            following = load(i + 1)
            return following, step(value, columns(i), state)

        return lax.fori_loop(0, parts, part, (load(jnp.int32(0)), state))[1]

    def share(self, *values):
        """Meets the other threads: for each scalar the list of all threads' ones."""
        found = self._exchange(self.meetings % 2, values)
        self.meetings += 1
        return found

    def _exchange(self, half, values):
        exchanged = self.refs["exchanged"]
        everywhere = [exchanged]
        if self.blocks > 1:
            everywhere = [plgpu.cluster_ref(exchanged, {"block": b}) for b in range(self.blocks)]
        for i, value in enumerate(values):
            for there in everywhere:
                there[half, self.me, i] = lax.bitcast_convert_type(value, jnp.int32)
        if self.blocks > 1:
            plgpu.barrier_arrive(self.refs["met"])
            plgpu.barrier_wait(self.refs["met"])
        else:
            plgpu.ext.named_barrier_sync(0, _THREADS)
        return [
            [
                lax.bitcast_convert_type(exchanged[half, t, i], value.dtype)
                for t in range(self.threads)
            ]
            for i, value in enumerate(values)
        ]

    def logit(self, key):
        """The logit of a key; of lower keys than that of -inf, -inf; of higher ones than that of
        inf, NaN, which no logit reaches."""
        u32, sign = jnp.uint32, 1 << (self.bits - 1)
        infinity = np.array(np.inf, self.x.dtype).view(f"uint{self.bits}")
        key = jnp.maximum(key, u32(sign - 1 - int(infinity)))
        key = jnp.where(key >= u32(sign), key ^ u32(sign), u32(2 * sign - 1) ^ key)
        value = lax.bitcast_convert_type(key.astype(f"uint{self.bits}"), self.x.dtype)
        return value.astype(_F32)

    def threshold(self, measure, total, enough, least=None):
        """The largest key such that enough(total of measure(logits) over the logits that are not
        less), or the key `least` where that is larger. measure: a tuple of int32 arrays; total: see
        :func:`_count`, :func:`_weight`."""
        u32, first = jnp.uint32, self.meetings
        none = jnp.zeros((self.width,), jnp.int32)
        count = len(measure(jnp.zeros((self.width,), _F32)))

        def digit(i, found):
            shift = (self.bits - 2 - 2 * i).astype(u32)
            tried = [found | (u32(d) << shift) for d in (1, 2, 3)]
            limits = [self.logit(t) for t in tried]

            def step(value, _, sums):
                value = value.astype(_F32)
                amounts = measure(value)
                return tuple(
                    tuple(s + jnp.where(value >= t, a, none) for s, a in zip(one, amounts))
                    for one, t in zip(sums, limits)
                )

            sums = self.read(step, ((none,) * count,) * 3)
            parts = [x for one in sums for x in total.of_thread(*one)]
            shared = self._exchange((i + first) % 2, parts)
            for j, t in enumerate(tried):
                good = enough(total.of_row(*shared[j * count : (j + 1) * count]))
                found = jnp.where(good if least is None else good | (t <= least), t, found)
            return found

        return lax.fori_loop(0, self.bits // 2, digit, u32(0))  # an even number of meetings

    def largest(self):
        def step(value, _, top):
            return jnp.maximum(top, value.astype(_F32))

        (tops,) = self.share(jnp.max(self.read(step, jnp.full((self.width,), _LOW))))
        return functools.reduce(jnp.maximum, tops)

    def draw(self, top, temperature, least):
        """The token, of those whose logit is not less than `least` (None: of all)."""
        u32 = jnp.uint32
        key = mixed(mixed(self.refs["seed"][0].astype(u32)) ^ (self.row.astype(u32) * _GOLDEN))

        def step(value, column, state):
            best, token = state
            bits = mixed(column.astype(u32) ^ key)
            # in (0, 1], with all the bits near 0, where the least ones are
            uniform = (bits >> u32(1)).astype(jnp.int32).astype(_F32) * _F32(2**-31) + _F32(2**-33)
            value = value.astype(_F32)
            score = value - top - temperature * jnp.log(-jnp.log1p(-uniform))
            good = score > best
            if least is not None:
                good &= value >= least
            return jnp.where(good, score, best), jnp.where(good, column, token)

        none = jnp.full((self.width,), jnp.int32(self.x.n))
        best, token = self.read(step, (jnp.full((self.width,), _LOW), none))
        most = jnp.max(best)
        tops, tokens = self.share(most, jnp.min(jnp.where(best == most, token, none)))
        most = functools.reduce(jnp.maximum, tops)
        found = [jnp.where(t == most, token, self.x.n) for t, token in zip(tops, tokens)]
        return functools.reduce(jnp.minimum, found, jnp.int32(self.x.n - 1))


class _Count:
    """Totals of numbers of tokens."""

    @staticmethod
    def of_thread(counts):
        return [jnp.sum(counts)]

    @staticmethod
    def of_row(parts):
        return sum(parts[1:], parts[0])


class _Weight:
    """Totals of probabilities: integers of two parts, the lower one of _SUM_BITS. A probability of
    1 is 2 ** (upper + _LOW_BITS)."""

    def __init__(self, n):
        # what an element of an array adds up, and the upper part of a total, are below 2^31
        most = pl.cdiv(n, _PART * _THREADS).bit_length(), n.bit_length()
        self.upper = min(22, 30 - most[0], 30 + _SUM_BITS - _LOW_BITS - most[1])

    def split(self, weight):
        """Upper and lower bits of probabilities: what rounding to a whole number leaves is rounded
        again, in smaller units."""
        zero = lax.bitcast_convert_type(_WHOLE, jnp.int32)
        scaled = weight * _F32(2.0**self.upper)
        upper = scaled + _WHOLE
        lower = (scaled - (upper - _WHOLE)) * _F32(2.0**_LOW_BITS) + _WHOLE
        return tuple(lax.bitcast_convert_type(x, jnp.int32) - zero for x in (upper, lower))

    @staticmethod
    def of_thread(upper, lower):
        more = _SUM_BITS - _LOW_BITS
        upper, lower = upper + (lower >> _LOW_BITS), lower & ((1 << _LOW_BITS) - 1)
        lower = jnp.sum(((upper & ((1 << more) - 1)) << _LOW_BITS | lower).astype(jnp.uint32))
        upper = jnp.sum(upper >> more) + (lower >> jnp.uint32(_SUM_BITS)).astype(jnp.int32)
        return [upper, (lower & jnp.uint32((1 << _SUM_BITS) - 1)).astype(jnp.int32)]

    @staticmethod
    def of_row(uppers, lowers):
        upper, lower = sum(uppers[1:], uppers[0]), sum(lowers[1:], lowers[0])
        return upper + (lower >> _SUM_BITS), lower & ((1 << _SUM_BITS) - 1)

    @staticmethod
    def part(total, rate):
        """A part of a total, at least the least one."""
        upper, lower = (x.astype(_F32) for x in total)
        unit = _F32(2.0**_SUM_BITS)
        aim = jnp.maximum((upper * unit + lower) * rate, _F32(1))
        upper = (aim * (1 / unit)).astype(jnp.int32)
        return upper, (aim - upper.astype(_F32) * unit).astype(jnp.int32)

    @staticmethod
    def reaches(total, aim):
        return (total[0] > aim[0]) | (total[0] == aim[0]) & (total[1] >= aim[1])


@cached
def _kernel(x, blocks, interpret):
    names = [name for name in ("top_k", "top_p", "temperature") if getattr(x, name) == _ARRAY]

    def body(logits, seed, *refs):
        overlap_launches()
        arrays, (out, exchanged, *met) = refs[: len(names)], refs[len(names) :]
        refs = dict(zip(names, arrays), logits=logits, seed=seed, exchanged=exchanged)
        row = _Row(x, blocks, refs | dict(zip(["met"], met)))
        top, temperature, least = row.largest(), row.option("temperature"), None

        if x.top_k is not None:
            k = row.option("top_k", jnp.int32)
            k = jnp.where(k > 0, k, x.n)
            one = jnp.ones((row.width,), jnp.int32)
            least = row.threshold(lambda value: (one,), _Count, lambda n: n >= k)

        if x.top_p is not None:
            total, rate = _Weight(x.n), _LOG2_E / jnp.maximum(temperature, _LEAST)
            limit = None if least is None else row.logit(least)

            def weights(value):
                return total.split(jnp.exp2((value - top) * rate))

            def step(value, _, sums):
                value = value.astype(_F32)
                amounts = weights(value)
                if limit is not None:
                    amounts = [jnp.where(value >= limit, a, 0) for a in amounts]
                return tuple(s + a for s, a in zip(sums, amounts))

            sums = row.read(step, (jnp.zeros((row.width,), jnp.int32),) * 2)
            whole = total.of_row(*row.share(*total.of_thread(*sums)))
            aim = total.part(whole, row.option("top_p"))
            least = row.threshold(weights, total, lambda s: total.reaches(s, aim), least)

        least = None if least is None else row.logit(least)
        token = row.draw(top, temperature, least)

        @pl.when(row.me == 0)
        def _():
            out[row.row] = token

    scratch, cluster = [plgpu.SMEM((2, _THREADS * blocks, 6), np.int32)], {}
    if blocks > 1:
        met = plgpu.ClusterBarrier(collective_axes=("block",), num_arrivals=_THREADS)
        scratch.append(met)
        cluster = {"cluster": (blocks,), "cluster_names": ("block",)}
    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((x.rows,), np.int32),
        scratch_types=scratch,
        **cluster,
        grid=(x.rows,),
        grid_names=("row",),
        num_threads=_THREADS,
        thread_name="thread",
        interpret=interpret,
        kernel_name="sample",
        **in_shapes((x.rows, x.n), None, *((x.rows,),) * len(names)),
    )


def _option(name, value, rows, dtype, fits, accepted):
    """None, the number, or _ARRAY; checked."""
    if value is None:
        return None
    if hasattr(value, "shape"):
        if value.shape != (rows,) or value.dtype != dtype:
            raise ValueError(
                f"sample: {name} must be a number or {np.dtype(dtype)} of shape {(rows,)}, got"
                f" {value.dtype} of shape {value.shape}"
            )
        return _ARRAY
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not fits(value):
        raise ValueError(f"sample: {name} must be {accepted}; got {value!r}")
    return value


def _choose(x, device):
    """Clusters for few, long rows, on half of the SMs at most, as measured on an H100."""
    found, sms = 1, plgpu.sm_count(device)
    while (
        2 * found <= min(8, _core.target(device)["cluster"])
        and 2 * found * x.rows <= sms // 2
        and 2 * found * _THREADS * _PART <= x.n
    ):
        found *= 2
    return found


def _edges(x, device):
    """Of numbers of rows whose clusters are alike."""
    half = plgpu.sm_count(device) // 2
    return 0, *(n for n in (half // 8, half // 4, half // 2) if n), 1 << 26


def _blocks_of(x, config, device):
    if config is None:
        return _choose(x, device)
    if not isinstance(config, SampleConfig):
        raise TypeError(f"sample: config must be a SampleConfig, got {config!r}")
    target = _core.target(device)
    most = 8 if "CLUSTER" in target["features"] else 1
    if config.blocks not in (1, 2, 4, 8) or config.blocks > most:
        raise ValueError(
            "sample: blocks of a SampleConfig must be 1, 2, 4 or 8, and 1 on GPUs without clusters;"
            f" got {config.blocks} on {target['name']}"
        )
    return config.blocks


@plgpu.specialize(in_place=False)
def sample(logits, seed, *, top_k=None, top_p=None, temperature=1.0, config=None, interpret=None):
    """A token of each row, drawn with the probabilities ``softmax(logits / temperature)``.

    logits: [rows, vocabulary], float16, bfloat16 or float32; tokens of -inf are never drawn if
    another one is finite. Of rows with NaN or inf, or with -inf alone, some token is drawn. seed:
    int32 or uint32 [1]: the same seed, row number and row give the same token, whatever the other
    rows. top_k: draw from the k largest logits of a row alone; 0: from all. top_p: of those that
    top_k leaves, draw from the smallest set of the largest logits whose probabilities (after
    temperature and top_k) add up to at least top_p. Logits equal to the least of the set belong to
    it. temperature: 0 takes the largest logit, of equal ones the first.
    Each of the three is a number or an array of one for each row: int32, float32, float32. In
    arrays top_k below 1 is 0, top_p above 1 is 1, and negative temperatures are undefined.
    config: a :class:`SampleConfig`; None: clusters for few, long rows. The token is the same.

    Returns int32 [rows]. TypeError, ValueError for other dtypes, shapes and numbers. Any GPU from
    sm_80 on.
    """
    if logits.dtype.name not in FLOATS:
        raise TypeError(f"sample: logits must be float16, bfloat16 or float32, got {logits.dtype}")
    if logits.ndim != 2 or 0 in logits.shape:
        raise ValueError(f"sample: logits must be [rows, vocabulary], got shape {logits.shape}")
    if seed.shape != (1,) or seed.dtype.name not in ("int32", "uint32"):
        raise ValueError(
            f"sample: seed must be int32 or uint32 of shape (1,), got {seed.dtype} of shape"
            f" {seed.shape}"
        )
    rows, n = logits.shape
    k = _option(
        "top_k", top_k, rows, np.int32, lambda v: 0 <= v < np.inf and v == int(v), "an int from 0"
    )
    p = _option("top_p", top_p, rows, _F32, lambda v: 0 < v <= 1, "above 0 and at most 1")
    t = _option(
        "temperature", temperature, rows, _F32, lambda v: 0 <= v < np.inf, "from 0 and finite"
    )
    if t is None:
        raise ValueError("sample: temperature must be a number or an array, got None")
    if k not in (None, _ARRAY):
        k = None if k == 0 or k >= n else int(k)
    p = None if p == 1 else p
    x = Problem(rows, n, np.dtype(logits.dtype), k, p, t)
    if config is None:
        kind = x._replace(rows=0), logits.device, interpret
        found, most = rows_of(kind, rows, _edges(x, logits.device))
        blocks = _choose(x._replace(rows=most), logits.device)
        return _kernel(x._replace(rows=found), blocks, interpret)
    return _kernel(x, _blocks_of(x, config, logits.device), interpret)
