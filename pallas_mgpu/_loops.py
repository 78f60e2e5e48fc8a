"""Loops over the elements of arrays: `lax.scan`, `map`, `associative_scan`.

`scan` is a `fori_loop` whose carry includes the stacked outputs: step k gathers element k of each
array and stores its outputs at index k of the first dimension. The types of the outputs are found
by tracing the body once beforehand. `associative_scan` takes log2(n) steps: after step s, each
element is combined with up to 2**s elements before it."""

from . import _core, tree
from ._control import fori_loop
from ._jnp.base import axis_of, numbers, strides, value
from ._jnp.index import dynamic_index_in_dim
from ._names import show
from ._trace import Array, Leaves, Ref, as_array, check_arity, type_text
from ._types import ints


class _Outputs(Exception):
    """The body was traced and gives these."""

    def __init__(self, leaves):
        self.structure = leaves.structure
        self.types = [(v.shape, v.dtype) for v in leaves.arrays()]


def _length(xs, length, what):
    """How many steps the leaves of ``xs`` and ``length`` make."""
    found = {}
    for x in tree.leaves(xs):
        if not x.ndim:
            raise ValueError(f"{what}: a scalar among the arrays has no dimension to loop over")
        found[x.shape[0]] = x.shape
    if length is not None:
        (length,) = ints(length, f"{what}: length")
        found.setdefault(length, f"length={length}")
        if length < 0:
            raise ValueError(f"{what}: length must not be negative, got {length}")
    if len(found) > 1:
        texts = " and ".join(str(t) for t in found.values())
        raise ValueError(f"{what}: the leading dimensions differ: {texts}")
    if not found:
        raise ValueError(f"{what}: length must be given when xs is None")
    return next(iter(found))


def scan(f, init, xs=None, length=None, reverse=False, unroll=1):
    """``carry, y = f(carry, x)`` for each x along the first dimension of ``xs``, a pytree of
    arrays; with ``reverse`` starting from the last. Returns the final carry and the outputs y,
    stacked in the order of ``xs``. Without ``xs`` there are ``length`` steps, and x is None."""
    check_arity(f, "scan: f", "a carry and an element", 2)
    xs = tree.map(lambda x: value(as_array(x, "scan") if _plain(x) else x, "scan"), xs)
    n = _length(xs, length, "scan")
    outputs = None

    def body(k, values):
        carry, stacked = values
        k = n - 1 - k if reverse else k
        x = tree.map(lambda a: dynamic_index_in_dim(a, k, 0, False), xs)
        result = f(carry, x)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"scan: f must return a pair (carry, y), got {show(result)}")
        y = Leaves(result[1], "scan: y")
        if any(isinstance(v, Ref) for v in y.values):
            raise TypeError("scan: y must not hold refs")
        if outputs is None and y.values:
            raise _Outputs(y)
        return result[0], [_put(s, v, k) for s, v in zip(stacked, y.values)]

    unroll = None if unroll is not True and unroll == 1 else unroll
    try:
        return fori_loop(0, n, body, (init, []), unroll=unroll)[0], None
    except _Outputs as found:
        outputs = found
    if not n:
        raise NotImplementedError("scan: no steps would give arrays without elements")
    stacked = [_core.full((n, *shape), 0, dtype) for shape, dtype in outputs.types]
    carry, stacked = fori_loop(0, n, body, (init, stacked), unroll=unroll)
    return carry, tree.unflatten(outputs.structure, stacked)


def _plain(x):
    return not isinstance(x, (Array, Ref))


def _put(stacked, y, k):
    """``stacked`` with ``y`` at k along the first dim."""
    here = _core.iota("int32", stacked.shape, 0) == k
    y = _core.convert(y, stacked.dtype)
    if y.ndim:
        y = _core.broadcast_in_dim(y, stacked.shape, tuple(range(1, stacked.ndim)))
    return _core.where(here, y, stacked)


def map(f, xs, *, batch_size=None):  # noqa: A001 - the name of the language
    """Apply ``f`` to each element along the first dimension of ``xs``, a pytree of arrays, and
    stack the results. Processes one element at a time, even with ``batch_size``."""
    check_arity(f, "lax.map: f", "an element", 1)
    if batch_size is not None:
        (batch_size,) = ints(batch_size, "lax.map: batch_size")
        if batch_size < 1:
            raise ValueError(f"lax.map: batch_size must be positive, got {batch_size}")
    return scan(lambda _, x: (None, f(x)), None, xs)[1]


def associative_scan(fn, elems, reverse=False, axis=0):
    """Combine each element of the arrays ``elems`` (a pytree) with all elements before it along
    ``axis`` (after it, with ``reverse``). ``fn(a, b)`` is an associative function of such pytrees
    that works on many elements at a time."""
    what = "associative_scan"
    check_arity(fn, f"{what}: fn", "two pytrees of elements", 2)
    leaves, structure = tree.flatten(elems)
    leaves = [value(as_array(x, what) if _plain(x) else x, what) for x in leaves]
    if not leaves:
        raise ValueError(f"{what}: at least one array is needed")
    axes = [axis_of(axis, x.ndim, what) for x in leaves]
    sizes = {x.shape[a] for x, a in zip(leaves, axes)}
    if len(sizes) > 1:
        shapes = ", ".join(str(x.shape) for x in leaves)
        raise ValueError(f"{what}: shapes {shapes} differ along axis {axis}")
    (n,) = sizes

    def step(p, values):
        far = _core.binary("shl", _core.as_array(1, "int32"), p)
        partners, inside = [], []
        for x, a in zip(values, axes):
            at = _core.iota("int32", x.shape, a)
            ok = at < n - far if reverse else at >= far
            mine = numbers(x.shape, strides(x.shape))
            by = _core.where(ok, far if reverse else 0 - far, 0) * strides(x.shape)[a]
            partners.append(_core.gather(x, mine + by))
            inside.append(ok)
        out = fn(*(tree.unflatten(structure, v) for v in (partners, values)))
        out = Leaves(out, f"{what}: fn")
        same = out.structure == structure and len(out.values) == len(values)
        if not same or any(v.shape != x.shape for v, x in zip(out.values, values)):
            got = ", ".join(type_text(v) for v in out.values)
            want = ", ".join(type_text(x) for x in values)
            raise TypeError(f"{what}: fn must return what it gets, {want}; it returned {got}")
        pairs = zip(inside, out.values, values)
        return [_core.where(ok, _core.convert(v, x.dtype), x) for ok, v, x in pairs]

    steps = (n - 1).bit_length()
    out = fori_loop(0, steps, step, leaves) if steps else leaves
    return tree.unflatten(structure, out)
