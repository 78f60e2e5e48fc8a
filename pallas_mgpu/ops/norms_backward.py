"""Gradients of softmax, RMS norm and layer norm.

With y the normalised row (before the weight), r the factor of the norm and g = grad * weight, a row
of the gradient of x is

    softmax      y * (grad - sum(grad * y))
    rms_norm     r * (g - y * mean(g * y))
    layer_norm   r * (g - mean(g) - y * mean(g * y))

The statistics of a row are computed again from x, which is read anyway, so that a forward saves
nothing. Aligned rows pass through shared memory: _norms_backward_ring.py, long ones
_norms_backward_roles.py. Here are the others, and the formulas. A block works on tiles of whole
rows, about 2048 elements, one after the other; rows that registers do not hold are read in parts,
once for each pass over the row.

Gradients of the weight and of the bias are sums over rows: each block adds up those of its own rows
in registers, or in global memory where a row has parts, and further kernels add up the sums of the
blocks, always in the same order."""

import functools
import math
from typing import NamedTuple

import numpy as np

import pallas_mgpu as plgpu
from pallas_mgpu import _core, lax, pl
from pallas_mgpu import numpy as jnp
from pallas_mgpu._caches import cached

from . import _norms_backward_ring, _norms_backward_roles, _norms_columns
from ._common import FLOATS, SeveralKernels, dtype_of, overlap_launches
from ._norms_backward_ring import NormBackwardConfig, matrices
from ._open_rows import better, divides, in_shapes, rows_of, rowwise

_F32 = np.float32
_OPERANDS = ("grad", "x", "weight", "add")
_SHORT = 512  # elements of a row that do not pass through shared memory
_HELD = 8192  # elements of a row that registers hold, with its gradient and one sum; half with two
_HELD_WITH_ADDED = 5000  # of float32, with an array to add; others spill less than parts take
_NEVER_SPILLED = 24576  # elements of a row's operands, result and sums that never spill
_PART = 2048  # elements of a part of a longer row
_RING, _ROLES = NormBackwardConfig(), NormBackwardConfig(roles=True)
_WIDE, _PAIR = 1792, 2048  # elements of a row that two warpgroups do, one of each role
_PADDED = 3072  # most elements of a row whose segments for two would be padded by a third and more
_HALF = 4096  # elements of a row whose segments for two warpgroups fill them
_COLUMNS = 64  # columns of a tile of sums over rows
_EDGES = 0, 512, 1 << 26  # of numbers of rows that share a program


def _resident(x):
    """Blocks that an SM holds at once: registers hold a tile of each operand and of each sum."""
    if x.n > _HELD // max(x.sums, 1):
        return 7
    if x.n < 512 or x.n * (x.sums + 2) > 12288:
        return 2
    return 4 if x.n <= 2048 else 3


class Problem(NamedTuple):
    """What a kernel computes, for arrays seen as [outer, n, inner]."""

    name: str
    eps: float
    outer: int
    n: int
    inner: int
    dtypes: tuple  # of grad, x (or y), weight, add: None where there is none
    bias: bool  # also the gradient of a bias
    shape: tuple
    hopper: bool  # of measured forms the fastest; on other GPUs one that spills no registers
    rows: int  # that tiles and blocks are chosen for: `outer`, or many where that is known later

    def dtype_of(self, name):
        return self.dtypes[_OPERANDS.index(name)]

    @property
    def sums(self):
        """How many sums over rows there are."""
        return (self.dtypes[2] is not None) + self.bias


class _Tile:
    """A tile of `height` rows, in parts of `width` elements, while it is traced."""

    def __init__(self, x, refs, height, width):
        self.x, self.refs, self.height, self.width = x, refs, height, width
        self.parts = pl.cdiv(x.n, width)

    def at(self, tile):
        self.start = tile * self.height
        return self

    def where(self, k):
        return pl.ds(self.start, self.height), pl.ds(k * self.width, self.width)

    def mask(self, k):
        """Which elements of part k lie in the array; None: all."""
        x, shape, found = self.x, (self.height, self.width), None
        if not divides(self.height, x.outer):
            found = lax.broadcasted_iota(jnp.int32, shape, 0) < x.outer - self.start
        if x.n % self.width:
            inside = lax.broadcasted_iota(jnp.int32, shape, 1) < x.n - k * self.width
            found = inside if found is None else found & inside
        return found

    def load(self, name, k):
        ref, mask = self.refs[name], self.mask(k)
        return ref[self.where(k)] if mask is None else self._masked(ref, k, mask)

    def _masked(self, ref, k, mask):
        return pl.load(ref, self.where(k), mask=mask, other=0.0)

    def store(self, name, k, value):
        ref, mask = self.refs[name], self.mask(k)
        value = value.astype(ref.dtype)
        if mask is None:
            ref[self.where(k)] = value
        else:
            pl.store(ref, self.where(k), value, mask=mask)

    def weight(self, k):
        """The weight of part k as a tile."""
        ref, at = self.refs["weight"], pl.ds(k * self.width, self.width)
        if self.x.n % self.width:
            inside = jnp.arange(self.width) < self.x.n - k * self.width
            w = pl.load(ref, at, mask=inside, other=0.0)
        else:
            w = ref[at]
        return lax.broadcast_in_dim(w.astype(jnp.float32), (self.height, self.width), [1])

    def sum(self, part):
        """Sums of part(k) over the rows, as columns; part returns a tuple."""
        if self.parts == 1:
            return [jnp.sum(v, axis=1, keepdims=True) for v in part(0)]

        def add(k, sums):
            return tuple(s + jnp.sum(v, axis=1, keepdims=True) for s, v in zip(sums, part(k)))

        count = {"softmax": 1, "rms_norm": 2}.get(self.x.name, 2)
        zero = tuple(jnp.zeros((self.height, 1), jnp.float32) for _ in range(count))
        return lax.fori_loop(0, self.parts, add, zero)

    def centred(self, v, k):
        """v where there is an element, else 0: of a difference from the mean."""
        mask = self.mask(k)
        return v if mask is None else jnp.where(mask, v, 0.0)


class _Row:
    """The statistics of a tile, and from them the normalised values and the gradient of a part."""

    def __init__(self, t):
        self.t, self.held, self.mean = t, {}, None
        if t.x.name == "softmax":
            (self.dot,) = t.sum(self.dot_of_part)
            return
        if t.x.name == "layer_norm":
            total, grads = t.sum(lambda k: (self.load("x", k), self.g(k)))
            self.mean, self.grads = total * _F32(1 / t.x.n), grads * _F32(1 / t.x.n)
        self.scale(*t.sum(self.products))

    def scale(self, squares, dot):
        """The factor of the norm, and the mean of g * y, from sums over the row."""
        n = _F32(1 / self.t.x.n)
        self.factor = lax.rsqrt(squares * n + _F32(self.t.x.eps))
        self.dot = dot * self.factor * n

    def dot_of_part(self, k):
        return (self.load("grad", k) * self.load("x", k),)

    def products(self, k):
        return jnp.square(self.y(k)), self.g(k) * self.y(k)

    def load(self, name, k):
        """Part k of an operand, float32: registers hold the only part."""
        return self._held(name, k, lambda: self.exact(name, k).astype(jnp.float32))

    def exact(self, name, k):
        """The same in the dtype of the array."""
        return self._held(f"exact {name}", k, lambda: self.t.load(name, k))

    def hold(self, names):
        """The only part of these operands is in registers from here on."""
        for name in names:
            self.exact(name, 0)

    def _held(self, name, k, make):
        if self.t.parts > 1:
            return make()
        if name not in self.held:
            self.held[name] = make()
        return self.held[name]

    def raw_grad(self, k):
        # after the barrier it is as it was loaded: float32 would take twice the registers
        return lax.optimization_barrier(self.exact("grad", k)).astype(jnp.float32)

    def g(self, k):
        if self.t.x.dtypes[2] is None:
            return self.load("grad", k)
        grad = self.raw_grad(k)
        return self._held("g", k, lambda: grad * self.t.weight(k))

    def y(self, k):
        """Before the factor of the row."""
        x = self.load("x", k)
        return x if self.mean is None else self.t.centred(x - self.mean, k)

    def result(self, k):
        """Part k of the gradient of x."""
        if self.t.x.name == "softmax":
            return self.load("x", k) * (self.load("grad", k) - self.dot)
        out = self.g(k) * self.factor
        if self.mean is not None:
            out = out - self.grads * self.factor
        out = out - self.y(k) * (self.factor * self.factor * self.dot)
        return out if self.t.x.dtypes[3] is None else out + self.load("add", k)

    def sums(self, k):
        """What part k adds to the gradients of the weight and the bias, if there are these."""
        grad, found = self.raw_grad(k), []
        if self.t.x.dtypes[2] is not None:
            found.append(grad * self.y(k) * self.factor)
        return found + ([grad] if self.t.x.bias else [])


class _SentRow(_Row):
    """A row whose statistics one warpgroup sends to another: see _norms_backward_roles.py."""

    def __init__(self, t):
        self.t, self.part, self.held, self.mean = t, None, {}, None

    def _held(self, name, k, make):
        """Registers hold a part while it is worked on."""
        if k is not self.part:
            self.part, self.held = k, {}
        if name not in self.held:
            self.held[name] = make()
        return self.held[name]

    def sums_of_segment(self, meanwhile):
        """What statistics are made of, of the warpgroup's segment of a row: of softmax the sum of
        grad * y; of rms_norm those of x * x and g * x; of layer_norm those of x and g, and of the
        same two about the segment's mean. meanwhile: called while part k is in registers."""
        t, name = self.t, self.t.x.name
        if name == "layer_norm":
            self.mean = t.pivot_of_segment()

        def of_part(k):
            found = (self.y(k), self.g(k)) if name == "layer_norm" else ()
            found += self.dot_of_part(k) if name == "softmax" else self.products(k)
            meanwhile(k)
            return found

        sums = t.sum_of_segment(of_part)
        if name != "layer_norm":
            return sums
        total, grads, squares, dot = sums
        mean = t.mean_of_segment(total)
        squares = jnp.maximum(squares - total * mean, 0.0)
        total = total + self.mean * t.size_of_segment()
        return [total, grads, squares, dot - grads * mean]

    def take_sums(self, sums):
        """The statistics from these sums of all segments, an array (segment, sum)."""
        if self.t.x.name == "layer_norm":
            self.mean, grads, squares, dot = self.t.moments(sums)
            self.grads = grads * _F32(1 / self.t.x.n)
            self.scale(squares, dot)
            return self
        of_all = [jnp.sum(sums[:, v : v + 1], axis=0, keepdims=True) for v in range(sums.shape[1])]
        if self.t.x.name == "softmax":
            (self.dot,) = of_all
        else:
            self.scale(*of_all)
        return self

    def scaled_grad(self, k):
        return self._held("scaled grad", k, lambda: self.load("grad", k) * self.factor)

    def distance(self, k):
        """From the mean: also where there is no element, whose gradient is 0."""
        x = self.load("x", k)
        return x if self.mean is None else x - self.mean

    def result(self, k):
        if self.t.x.name == "softmax":
            return super().result(k)
        out = self.scaled_grad(k)
        if self.t.x.dtypes[2] is not None:
            out = out * self.t.weight(k)
        if self.mean is not None:
            out = out - self.grads * self.factor
        out = out - self.distance(k) * (self.factor * self.factor * self.dot)
        return out if self.t.x.dtypes[3] is None else out + self.load("add", k)

    def of_weight(self, k):
        """What part k adds to the gradient of the weight, if there is one."""
        has = self.t.x.dtypes[2] is not None
        return [self.scaled_grad(k) * self.distance(k)] if has else []

    def of_bias(self, k):
        return [self.raw_grad(k)] if self.t.x.bias else []


def _names(x):
    return tuple(name for name, dtype in zip(_OPERANDS, x.dtypes) if dtype is not None)


def _tile_of(x):
    """Rows of a tile, and elements of each that are in registers at once: on Hopper what is fastest
    though some tiles spill, elsewhere, where nothing was measured, what does not."""
    rows, add = min(_PART // x.n, x.rows), x.dtypes[3]
    if not x.hopper:
        rows = min(rows, 8) if x.n > 64 else rows
        held = min(_HELD, _NEVER_SPILLED // (2 + 2 * x.sums + (add is not None)))
    elif x.sums == 1 and add is not None and add.itemsize == x.dtypes[1].itemsize == 4:
        held = _HELD_WITH_ADDED
    else:
        held = _HELD // max(x.sums, 1)
    if x.n > held:
        return max(1, rows), _PART
    width = _with_vectors(x, max(1, rows))
    return max(1, min(rows, _PART // width)), width


def _with_vectors(x, rows):
    """The width of a tile that covers such rows: so much more that lanes have whole vectors, where
    they would have single elements. With sums and for the shortest rows that is no faster."""
    size = max(d.itemsize for d in x.dtypes if d is not None)
    lanes = 128 * 16 // size  # elements of all lanes, of a vector each
    if x.sums or x.n <= 128 or x.n % 4 or rows * x.n % (lanes // 2) == 0:
        return x.n
    return 1 << (x.n - 1).bit_length() if x.n <= _PART else pl.cdiv(x.n, lanes) * lanes


@cached
def _rows(x, programs, interpret):
    """Kernel of the last axis: the gradient of x, and the sums of each block."""
    height, width = _tile_of(x)
    parts, tiles = pl.cdiv(x.n, width), pl.cdiv(x.outer, height)
    padded = parts * width  # of sums, so that parts need no masks
    # without sums no block needs several
    programs = min(programs, pl.cdiv(x.rows, height)) if x.sums else tiles
    names = _names(x)
    arrays = *(name for name in names if name != "weight"), "out"

    def body(*refs):
        overlap_launches()
        given = matrices(dict(zip((*names, "out"), refs)), x, arrays)
        sums = refs[len(names) + 1 :]
        tile, me = _Tile(x, given, height, width), lax.axis_index("program")
        mine = (tiles - me + (programs - 1)) // programs

        def whole(i, total):
            row = _Row(tile.at(me + i * programs))
            tile.store("out", 0, row.result(0))
            return tuple(t + s for t, s in zip(total, row.sums(0)))

        def in_parts(i, _):
            row = _Row(tile.at(me + i * programs))

            def part(k, _):
                tile.store("out", k, row.result(k))
                at = pl.ds(k * width, width)
                for ref, s in zip(sums, row.sums(k)):
                    s, here = jnp.sum(s, axis=0), ref.at[me, at]
                    here[...] = s + jnp.where(i == 0, 0.0, here[...])

            lax.fori_loop(0, parts, part, None)

        def no_sums():
            for ref in sums:
                ref[me] = jnp.zeros((padded,), jnp.float32)

        if parts > 1:
            lax.fori_loop(0, mine, in_parts, None)
            if sums and x.rows is not x.outer:  # there may be more blocks than tiles
                pl.when(mine == 0)(no_sums)
            return
        zero = tuple(jnp.zeros((height, width), jnp.float32) for _ in sums)
        total = lax.fori_loop(0, mine, whole, zero)
        for ref, t in zip(sums, total):
            ref[me] = jnp.sum(t, axis=0)

    outs = [plgpu.ShapeDtypeStruct(x.shape, x.dtypes[1])]
    outs += [plgpu.ShapeDtypeStruct((programs, padded), _F32)] * x.sums
    return plgpu.kernel(
        body,
        out_type=tuple(outs) if x.sums else outs[0],
        grid=(programs,),
        grid_names=("program",),
        interpret=interpret,
        kernel_name=f"{x.name}_backward",
        **in_shapes(*(None if name == "weight" else x.shape for name in names)),
    )


# ---- sums over rows -----------------------------------------------------------------------------


@cached
def _column_sums(rows, n, cols, dtype, out_dtype, chunks, interpret):
    """Kernel: sums over the rows of an array (rows, n), of the first `cols` columns; of as many
    chunks of rows."""
    is_open = isinstance(rows, plgpu.Dim)
    height, width = 32 if is_open else min(32, rows), min(_COLUMNS, cols)
    steps = pl.cdiv(pl.cdiv(rows, chunks), height)

    def body(x, out):
        overlap_launches()
        first, c = lax.axis_index("chunk") * (steps * height), lax.axis_index("tile") * width
        x, shape = x if is_open else x.reshape((rows, n)), (height, width)

        def add(i, total):
            r = first + i * height
            keep = lax.broadcasted_iota(jnp.int32, shape, 0) < rows - r
            if cols % width:
                keep &= lax.broadcasted_iota(jnp.int32, shape, 1) < cols - c
            at = pl.ds(r, height), pl.ds(c, width)
            return total + pl.load(x, at, mask=keep, other=0.0).astype(jnp.float32)

        total = jnp.sum(lax.fori_loop(0, steps, add, jnp.zeros(shape, jnp.float32)), axis=0)
        total, at = total.astype(out.dtype), pl.ds(c, width)
        out = out.at[lax.axis_index("chunk")] if chunks > 1 else out
        if cols % width:
            pl.store(out, (at,), total, mask=jnp.arange(width) < cols - c)
        else:
            out[at] = total

    return plgpu.kernel(
        body,
        out_type=plgpu.ShapeDtypeStruct((chunks, cols) if chunks > 1 else (cols,), out_dtype),
        grid=(chunks, pl.cdiv(cols, width)),
        grid_names=("chunk", "tile"),
        interpret=interpret,
        kernel_name="column_sums",
        **in_shapes((rows, n)),
    )


class Chain(SeveralKernels):
    """Kernels one after the other: each gets the results of the one before."""

    def __init__(self, *kernels):
        self.kernels = kernels

    def __call__(self, x, out=None, stream=None):
        for kernel in self.kernels[:-1]:
            x = kernel(x, stream=stream)
        return self.kernels[-1](x, out=out, stream=stream)


def sums_of_rows(
    rows, n, dtype, out_dtype, sms, interpret, cols=None, typical=None, of_views=False
):
    """A kernel, or a chain of two: sums over the rows of an array [..., n] seen as (rows, n).
    typical: how many rows are expected, where they are known later; of_views: what the extension
    makes a matrix of then, of these rows."""
    cols, typical = n if cols is None else cols, typical or rows
    tiles = pl.cdiv(cols, _COLUMNS)
    chunks = max(1, min(pl.cdiv(typical, 128), 4 * sms // tiles))
    chunks = pl.cdiv(typical, pl.cdiv(pl.cdiv(typical, chunks), 32) * 32)
    to = out_dtype if chunks == 1 else np.dtype(_F32)
    how = n, cols, dtype, to, chunks, interpret
    first = _column_sums(rows, *how)
    if of_views:
        alone = functools.partial(_column_sums, of_views, *how)
        first = _core.Reshaped(first, alone, ((of_views, n),), (None,))
    if chunks == 1:
        return first
    return Chain(first, _column_sums(chunks, cols, cols, to, out_dtype, 1, interpret))


class WithSums(SeveralKernels):
    """The kernel of the rows, and those that add up the sums of its blocks: of each result of the
    first, or of all together."""

    def __init__(self, kernel, *sums):
        self.kernel, self.sums = kernel, sums

    def __call__(self, *operands, out=None, stream=None):
        if out is not None:
            raise NotImplementedError(
                f"{self.kernel.__name__}: out= with gradients of a weight or a bias"
            )
        found, *partial = self.kernel(*operands, stream=stream)
        added = [f(s, stream=stream) for f, s in zip(self.sums, partial)]
        return (found, *(added[0] if isinstance(added[0], tuple) else added))


# ---- the functions ------------------------------------------------------------------------------


def _check(name, grad, x, weight, add, other):
    for what, v in (("grad", grad), (other, x), ("weight", weight), ("add", add)):
        if v is not None and v.dtype.name not in FLOATS:
            raise TypeError(f"{name}: {what} must be float16, bfloat16 or float32, got {v.dtype}")
    if x.ndim == 0 or 0 in x.shape:
        raise ValueError(f"{name}: {other} must have a dim and elements, got shape {x.shape}")
    for what, v in (("grad", grad), ("add", add)):
        if v is not None and v.shape != x.shape:
            raise ValueError(
                f"{name}: {what} must have the shape of {other}, {x.shape}, got {v.shape}"
            )
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{name}: weight must have the shape {x.shape[-1:]}, got {weight.shape}")


def _make(name, grad, x, weight, add, bias, eps, config, interpret):
    _check(f"{name}_backward", grad, x, weight, add, "x")
    n, sms, rows = x.shape[-1], plgpu.sm_count(x.device), math.prod(x.shape[:-1])
    dtypes = tuple(None if v is None else v.dtype for v in (grad, x, weight, add))
    problem = Problem(
        name, float(eps), rows, n, 1, dtypes, bool(bias), x.shape, _is_hopper(x.device), rows
    )
    operands = [v for v in (grad, x, weight, add) if v is not None]
    if config is not None:
        return _of(problem, operands, x.device, sms, config, interpret)
    aligned = tuple(v.aligned for v in operands)
    kind = problem._replace(outer=0, rows=0, shape=(0, n)), aligned, x.device, interpret
    open_, typical = rows_of(kind, rows, _EDGES)
    if open_ is rows:
        return _of(problem, operands, x.device, sms, None, interpret)
    shared = problem._replace(outer=open_, rows=typical, shape=(open_, n))
    kernel = _of(shared, operands, x.device, sms, None, interpret)
    if x.ndim == 2:
        return kernel
    shapes = tuple(None if v is weight else (rows, n) for v in operands)

    def alone():  # with sums of as many blocks
        problem_alone = problem._replace(rows=typical)
        return _first(_of(problem_alone, operands, x.device, sms, None, interpret))

    views = _core.Reshaped(_first(kernel), alone, shapes, (x.shape,))
    return WithSums(views, *kernel.sums) if isinstance(kernel, WithSums) else views


def _first(kernel):
    return kernel.kernel if isinstance(kernel, WithSums) else kernel


def _of(problem, operands, device, sms, config, interpret):
    """The kernel of a problem, or those that also add up its sums."""
    name, n, (_, dtype, weight, _) = problem.name, problem.n, problem.dtypes
    chosen = _chosen(problem) if config is None else _checked(name, config)
    ring = _ring(problem, device, operands, sms, chosen)
    if config is not None and ring is None:
        raise ValueError(
            f"{name}_backward: rows of {n} elements cannot pass through shared memory with {config}"
        )
    of = dtype if weight is None else weight
    if ring:
        kernel = ring(interpret)
        if not problem.sums:
            return kernel
        shape = kernel.definition.outs[1].shape
        return WithSums(kernel, _norms_backward_ring.last_sums(*shape, n, of, interpret))
    kernel = _rows(problem, _resident(problem) * sms, interpret)
    if not problem.sums:
        return kernel
    programs, padded = kernel.definition.outs[1].shape
    add_up = sums_of_rows(programs, padded, np.dtype(_F32), of, sms, interpret, n)
    return WithSums(kernel, *[add_up] * problem.sums)


def _checked(name, config):
    name = f"{name}_backward"
    if not isinstance(config, NormBackwardConfig):
        raise TypeError(f"{name}: config must be a NormBackwardConfig, got {config!r}")
    c = config
    if c.members not in (0, 1, 2, 4) or c.cluster not in (0, 1, 2, 4, 8):
        raise ValueError(
            f"{name}: a NormBackwardConfig has 1, 2 or 4 members and a cluster of 1, 2, 4 or 8;"
            f" got {config}"
        )
    if c.roles and (c.members == 4 or c.height):
        raise ValueError(
            f"{name}: a NormBackwardConfig has, with roles, up to 2 members and a height of 0; got"
            f" {config}"
        )
    if c.cluster > 1 and not c.roles:
        raise ValueError(
            f"{name}: a NormBackwardConfig has a cluster with roles only; got {config}"
        )
    if c.height < 0 or c.stages < 0 or c.stages == 1:
        raise ValueError(
            f"{name}: a NormBackwardConfig has 2 stages or more and a height of 1 or more; got"
            f" {config}"
        )
    return config


def _chosen(x):
    """The config that was the fastest on an H100; elsewhere one that spills no registers."""
    narrow = all(d is None or d.itemsize == 2 for d in (*x.dtypes[:2], x.dtypes[3]))
    layer, alone = x.name == "layer_norm", x.dtypes[3] is None  # without an array to add
    if layer and narrow and _WIDE < x.n <= _PAIR:
        return NormBackwardConfig(roles=True, members=1)
    if not x.hopper:
        least = _PAIR
    elif not narrow:
        least = _HELD if alone else _WIDE if layer else _HALF - 1
    elif alone and layer and _PAIR < x.n <= _PADDED:
        return NormBackwardConfig(roles=True, members=1, cluster=1, stages=2)
    elif alone:
        least = _HALF - 1 if layer else _PADDED
    else:
        least = _PAIR
    return _ROLES if x.n > least else _RING


def _is_hopper(device):
    return "WGMMA" in _core.target(device)["features"]


def _ring(x, device, operands, sms, config):
    """What makes the kernel whose rows pass through shared memory; None where they cannot be: TMA
    takes aligned rows. Lanes have too many statistics of short rows."""
    if x.n < _SHORT or not {"TMA", "CLUSTER"} <= set(_core.target(device)["features"]):
        return None
    if not all(v.aligned and v.shape[-1] * v.dtype.itemsize % 16 == 0 for v in operands):
        return None
    module, row = (_norms_backward_ring, _Row)
    if config.roles:
        module, row = _norms_backward_roles, _SentRow
    plan = module.plan(x, _names(x), sms, config)
    return functools.partial(module.kernel, plan, row) if plan else None


def _along_columns(name, grad, y, extents, interpret):
    """The kernels of softmax_backward along another axis than the last."""
    dtypes, aligned = (grad.dtype, y.dtype), grad.aligned and y.aligned
    x = _norms_columns.Columns(name, y.shape, extents, dtypes, y.dtype, aligned)
    found = _norms_columns.open_kernel(x, y.device, interpret)
    if found:
        return found
    tiling = _norms_columns.choose(extents, x.itemsize, plgpu.sm_count(y.device))
    return _norms_columns.kernel(x, tiling, interpret)


@plgpu.specialize
@rowwise
def softmax_backward(grad, y, *, axis=-1, interpret=None):
    """The gradient of :func:`softmax` with respect to its argument, in float32 (Hopper):
    ``y * (grad - sum(grad * y))``.

    grad: the gradient of the result; y: the result of softmax; float16, bfloat16 or float32, of one
    shape, any number of dims from 1. axis: as for softmax. Returns an array like ``y``. TypeError,
    ValueError for other dtypes and shapes.
    """
    name = "softmax_backward"
    _check(name, grad, y, None, None, "y")
    if not isinstance(axis, int) or not -y.ndim <= axis < y.ndim:
        raise ValueError(
            f"{name}: axis must be an int from {-y.ndim} to {y.ndim - 1}, got {axis!r}"
        )
    axis %= y.ndim
    outer, inner = math.prod(y.shape[:axis]), math.prod(y.shape[axis + 1 :])
    if inner > 1:
        return _along_columns(name, grad, y, (outer, y.shape[axis], inner), interpret)
    of, n, dtypes = "softmax", y.shape[axis], (grad.dtype, y.dtype, None, None)
    x = Problem(of, 0.0, outer, n, inner, dtypes, False, y.shape, _is_hopper(y.device), outer)
    if y.ndim == 2:
        kind = x._replace(outer=0, rows=0, shape=(0, n)), grad.aligned, y.aligned
        rows, typical = rows_of((*kind, y.device, interpret), outer, _EDGES)
        x = x._replace(outer=rows, rows=typical, shape=(rows, n))
    ring = x.n > _HELD and _ring(x, y.device, [grad, y], plgpu.sm_count(y.device), _ROLES)
    if ring:
        return ring(interpret)
    return _rows(x, 0, interpret)


@plgpu.specialize
@better
def rms_norm_backward(grad, x, weight=None, *, add=None, eps=1e-6, config=None, interpret=None):
    """The gradients of :func:`rms_norm` with respect to ``x`` and ``weight``, in float32 (Hopper).

    grad: the gradient of the result; x, weight, eps: the arguments of rms_norm; float16, bfloat16
    or float32. add: an array like ``x`` that is added to the gradient of ``x``, for example that of
    a residual branch. config: a :class:`NormBackwardConfig`, for aligned rows from 512 elements on.
    The statistics of the rows are computed again from ``x``. Results repeat bit for bit, but for
    the one time that a number of rows gets a program of its own.

    Returns the gradient of ``x``, or with ``weight`` the pair of gradients, like ``x`` and like
    ``weight``. TypeError, ValueError for other dtypes and shapes.
    """
    return _make("rms_norm", grad, x, weight, add, False, eps, config, interpret)


@plgpu.specialize
@better
def layer_norm_backward(
    grad, x, weight=None, *, add=None, bias=False, eps=1e-5, config=None, interpret=None
):
    """The gradients of :func:`layer_norm` with respect to ``x``, ``weight`` and ``bias``, in
    float32 (Hopper).

    grad: the gradient of the result; x, weight, eps: the arguments of layer_norm; float16, bfloat16
    or float32. add: an array like ``x`` that is added to the gradient of ``x``. bias: also return
    the gradient of the bias, in the dtype of ``weight``, or else of ``x``. config: a
    :class:`NormBackwardConfig`, for aligned rows from 512 elements on. Results repeat bit for bit,
    but for the one time that a number of rows gets a program of its own.

    Returns the gradient of ``x``, or a tuple of it and those of ``weight`` (if there is one) and of
    the bias (if asked for). TypeError, ValueError for other dtypes and shapes.
    """
    return _make("layer_norm", grad, x, weight, add, bias, eps, config, interpret)


@plgpu.specialize
def column_sums(x, *, out_dtype=None, interpret=None):
    """Sums over all dims but the last, in float32 and always in the same order (Hopper): the
    gradient of a bias.

    x: float16, bfloat16 or float32, (..., N), at least two dims. out_dtype: one of these; that of
    ``x`` by default. Returns (N,). TypeError, ValueError for other dtypes and shapes.
    """
    name = "column_sums"
    if x.dtype.name not in FLOATS:
        raise TypeError(f"{name}: x must be float16, bfloat16 or float32, got {x.dtype}")
    out_dtype = dtype_of(name, out_dtype, x.dtype)
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"{name}: x must have two dims and elements, got shape {x.shape}")
    n, rows, sms = x.shape[-1], math.prod(x.shape[:-1]), plgpu.sm_count(x.device)
    how = n, x.dtype, out_dtype, sms, interpret
    found, typical = rows_of((name, how, x.device), rows, _EDGES)
    of_views = rows if found is not rows and x.ndim > 2 else 0
    return sums_of_rows(found, *how, typical=typical, of_views=of_views)
