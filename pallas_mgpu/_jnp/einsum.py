"""`jnp.einsum`: sums of products named by subscripts.

Each dim of each operand has a label. A label that occurs twice in one operand takes its diagonal (a
gather); one that occurs in a single operand and not in the result is summed. Then operands are
multiplied from the left, two at a time: by `dot_general` where a label is contracted, otherwise as
broadcast arrays. A final transpose gives the order of the result. Dims under an ellipsis get labels
of their own, counted from the right; those of size 1 are dropped where another operand has more.
"""

from .. import _core
from .._names import show
from .._trace import Array, Ref
from .._types import ints
from .base import either, numbers, strides, value
from .linalg import dot_general
from .shape import transpose

__all__ = ["einsum"]

WHAT = "jnp.einsum"


def _interleaved(operands):
    """The subscripts of einsum(a, [0, 1], b, [1, 2], [0, 2]) and its operands."""

    def text(labels):
        if not isinstance(labels, (list, tuple)):
            raise TypeError(f"{WHAT}: labels must be a list of ints, got {show(labels)}")
        given = [k for k in labels if k is not Ellipsis]
        if any(not 0 <= k < 52 for k in ints(given, f"{WHAT}: labels")):
            raise ValueError(f"{WHAT}: labels must be 0..51, got {show(labels)}")
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
        return "".join("..." if k is Ellipsis else letters[k] for k in labels)

    pairs = [operands[k : k + 2] for k in range(0, len(operands) - 1, 2)]
    subscripts = ",".join(text(labels) for _, labels in pairs)
    if len(operands) % 2:
        subscripts += "->" + text(operands[-1])
    return subscripts, [x for x, _ in pairs]


def _labels(text, rank):
    """Labels of the dims; those under an ellipsis are numbers, -1 the last of them."""
    head, dots, tail = text.partition("...")
    for c in head + tail:
        if not (c.isascii() and c.isalpha()):
            raise ValueError(f"{WHAT}: {show(c)} in the subscripts {show(text)} is not a letter")
    hidden = rank - len(head) - len(tail)
    if hidden < 0 or hidden and not dots:
        raise ValueError(
            f"{WHAT}: the subscripts {show(text)} name {len(head + tail)} dimensions of an operand"
            f" of rank {rank}"
        )
    return [*head, *range(-hidden, 0), *tail]


def _parse(subscripts, ranks):
    """Labels of each operand and of the result."""
    given, arrow, result = subscripts.replace(" ", "").partition("->")
    given = given.split(",")
    if len(given) != len(ranks):
        raise ValueError(
            f"{WHAT}: {show(subscripts)} has subscripts for {len(given)} operands, got {len(ranks)}"
        )
    labels = [_labels(text, rank) for text, rank in zip(given, ranks)]
    every = [c for part in labels for c in part]
    hidden = sorted({c for c in every if isinstance(c, int)})
    if not arrow:
        letters = [c for c in every if isinstance(c, str)]
        return labels, [*hidden, *sorted(c for c in letters if letters.count(c) == 1)]
    dots = len(hidden) if "..." in result else 0
    out = _labels(result, dots + len(result.replace("...", "")))
    if hidden and "..." not in result:
        raise ValueError(f"{WHAT}: {show(subscripts)} has an ellipsis that the result has not")
    if len(set(out)) != len(out) or not set(out) <= set(every):
        raise ValueError(
            f"{WHAT}: the result of {show(subscripts)} must name each of its labels once, and only"
            " labels of operands"
        )
    return labels, out


def _array(x):
    return x[...] if isinstance(x, Ref) else value(x, WHAT)


def _diagonal(x, labels):
    """Labels that stand twice take the diagonal."""
    once = list(dict.fromkeys(labels))
    if len(once) == len(labels):
        return x, labels
    x = _array(x)
    stride = strides(x.shape)
    steps = [sum(s for s, c in zip(stride, labels) if c == label) for label in once]
    shape = tuple(x.shape[labels.index(c)] for c in once)
    return _core.gather(x, numbers(shape, steps)), once


def _without(x, labels, gone, reduce):
    """Without the dims of some labels: summed, or dropped as they have size 1."""
    places = tuple(k for k, c in enumerate(labels) if c in gone)
    if not places:
        return x, labels
    x = _array(x)
    kept = [k for k in range(x.ndim) if k not in places]
    if reduce:
        x = _core.reduce("add", _core.convert(x, "int32") if x.dtype == bool else x, places)
    else:
        x = x.reshape(tuple(x.shape[k] for k in kept))
    return x, [labels[k] for k in kept]


def _spread(x, labels, to, sizes):
    """Dims in the order of ``to``, broadcast along those that x has not."""
    x = _array(x)
    order = [c for c in to if c in labels]
    x = transpose(x, tuple(labels.index(c) for c in order)) if x.ndim else x
    shape = tuple(sizes[c] for c in to)
    if x.shape == shape:
        return x
    return _core.broadcast_in_dim(x, shape, tuple(to.index(c) for c in order))


def _two(a, b, later, sizes, precision, preferred):
    """The product of two (array, labels); labels that no later part has are summed."""
    (x, p), (y, q) = a, b
    both = [c for c in p if c in q]
    ends, batch = [c for c in both if c not in later], [c for c in both if c in later]
    if not ends:
        to = [*p, *(c for c in q if c not in p)]
        x, y = _spread(x, p, to, sizes), _spread(y, q, to, sizes)
        return _core.binary("and" if x.dtype == y.dtype == bool else "mul", x, y), to
    x, y = (v if isinstance(v, Ref) else value(v, WHAT) for v in (x, y))
    dims = tuple(
        (tuple(p.index(c) for c in cs), tuple(q.index(c) for c in cs)) for cs in (ends, batch)
    )
    out = dot_general(x, y, dims, precision, preferred)
    rest = [c for c in p if c not in both] + [c for c in q if c not in both]
    return out, batch + rest


@either
def einsum(
    subscripts,
    *operands,
    out=None,
    optimize="optimal",
    precision=None,
    preferred_element_type=None,
    out_sharding=None,
):
    """Sums of products: ``einsum("ij,jk->ik", a, b)``. Any number of operands, multiplied from the
    left (``optimize`` is accepted); ellipses, diagonals and the form with lists of numbers too."""
    if out is not None:
        raise NotImplementedError(f"{WHAT}: out= is not supported")
    if not isinstance(subscripts, str):
        subscripts, operands = _interleaved((subscripts, *operands))
    if not operands:
        raise ValueError(f"{WHAT}: at least one operand is needed")
    operands = [x if isinstance(x, (Array, Ref)) else value(x, WHAT) for x in operands]
    labels, result = _parse(subscripts, [x.ndim for x in operands])
    sizes: dict = {}
    for x, part in zip(operands, labels):
        for c, n in zip(part, x.shape):
            wide = isinstance(c, int) and 1 in (n, sizes.get(c, n))  # broadcasts
            if sizes.get(c, n) != n and not wide:
                raise ValueError(
                    f"{WHAT}: label {show(c)} of {show(subscripts)} is {sizes[c]} elements in one"
                    f" place and {n} in another; shapes {', '.join(str(v.shape) for v in operands)}"
                )
            sizes[c] = max(n, sizes.get(c, n))
    parts = []
    for k, (x, part) in enumerate(zip(operands, labels)):
        narrow = {c for c, n in zip(part, x.shape) if n < sizes[c]}
        x, part = _diagonal(*_without(x, part, narrow, False))
        others = {c for j, other in enumerate(labels) if j != k for c in other} | {*result}
        parts.append(_without(x, part, {*part} - others, True))
    while len(parts) > 1:
        first, second, *rest = parts
        later = {*result}.union(*(part for _, part in rest))
        parts = [_two(first, second, later, sizes, precision, preferred_element_type), *rest]
    x = _spread(*parts[0], result, sizes)
    if preferred_element_type is not None:
        x = _core.convert(x, _core.as_dtype(preferred_element_type))
    return x
