"""Problems of attention whose lengths are known when a kernel runs: which sizes stand for the
lengths of a call, and in which shapes kernels get arrays that lengths index.

A size may be the first extent above 1 of an array alone. So the entries of a batch are one after
the other in the arrays that a kernel gets, and a bias, a block mask and a page table are one row.
An array of lengths has as many elements as there are entries. Without one, the last operand tells
their number, and is there for its extent alone (the sizes of `Reshaped`)."""

import math

import pallas_mgpu as plgpu
from pallas_mgpu import _sizes

from ._open_rows import ENTRIES, MOST_ROWS, any_rows, entries, sizes_of
from .block_mask import open_mask, shape_of

_MOST = 1 << 24  # of lengths


def edges(x):
    """Edges between numbers of queries, whose programs have other tiles: those of one warpgroup,
    of two and of three. Masks have tiles of two, and only short rows those of three."""
    f = x.scores
    if f.mask:
        return 0, _MOST
    two = f.adjusted or f.dropout or max(x.dim, x.value_dim) > 64
    return (0, 64, _MOST) if two else (0, 64, 128, _MOST)


def is_large(x):
    """Has it more entries than a batch of any size, or arrays of more elements than sizes can
    count?"""
    f = x.scores
    if x.batch > ENTRIES:
        return True
    blocks = shape_of(f.mask, x.queries, x.keys) if f.mask else (0,)
    return max(math.prod(f.bias or (0,)), math.prod(blocks)) > MOST_ROWS


def dims_of_bias(x):
    """Which of heads, queries and keys its bias has. Of one query the row may be that of all
    queries, or its own, which is likely where heads have theirs."""
    _, heads, queries, keys = x.scores.bias
    own = queries == x.queries and (queries > 1 or heads > 1)
    return heads > 1, own, keys == x.keys


def kind_of(x, call):
    """What distinguishes the programs of a problem for any lengths, and the sizes of this call."""
    kind = "attention", (without_lengths(x), call.q.device, call.interpret, call.config)
    sizes = {"N": x.queries, "M": x.keys, "B": x.batch}
    return kind, sizes | ({"P": call.k.shape[0]} if x.page else {})


def has_even_rows(x):
    """Has it a bias with a row for each query, of an even number of elements?"""
    return bool(x.scores.bias) and all(dims_of_bias(x)[1:]) and x.keys % 2 == 0


def has_pairs(x):
    """Are rows of its bias read in pairs, by a program for even numbers of keys? Few queries do
    without, so that there are few programs."""
    return has_even_rows(x) and x.queries > edges(x)[-2]


def with_pairs(x, given):
    """The problem with open lengths of the kernels that read and write rows of a bias in pairs,
    where the problem `given` has even ones."""
    if not x.is_open or not has_even_rows(given):
        return x
    if x.whole:
        keys = even_keys(x.whole[1] // x.batch, x.keys.most)
    else:
        keys = plgpu.dim("M", min=2, max=x.keys.most, multiple_of=2)
    return with_options(x._replace(keys=keys), given)


def even_keys(n, most):
    """The size of an even number of keys, at most so many."""
    return _sizes.clamp(n // 2, 1, most // 2) * 2


def without_lengths(x):
    """What distinguishes programs for any batch and any lengths."""
    there, f = x.angles > 0, x.scores
    f = f._replace(sequences=bool(f.sequences))
    if f.bias:
        f = f._replace(bias=dims_of_bias(x))
    if f.mask:
        f = f._replace(mask=f.mask.with_open_data(0)._replace(batch=0))
    x = x._replace(batch=0, queries=0, keys=0, scores=f)
    return x._replace(angles=int(there), first=int(there and x.first > 0))


def with_options(x, given):
    """A problem with open lengths, with a bias and tables of angles of any length. given: the
    problem of a call."""
    if x.scores.bias:
        sizes = zip((x.heads, x.queries, x.keys), dims_of_bias(given))
        one = x.scores._replace(bias=(1, *(n if there else 1 for n, there in sizes)))
        batch = 1
        if x.whole:  # as many or one
            batch = _sizes.clamp(one.open_elements // math.prod(one.bias), 1, ENTRIES)
        x = x._replace(scores=one._replace(bias=(batch, *one.bias[1:])))
    if not x.angles:
        return x._replace(first=0)
    first = _sizes.clamp(x.keys - x.queries, 0, _sizes.MOST) if given.first else 0
    return x._replace(angles=plgpu.dim("L"), first=first)


def with_mask(x, call):
    """A problem with open lengths, with a mask that reads data of any size; None: of this one."""
    mask = x.scores.mask
    if not mask:
        return x
    arrays = call.q, call.k, call.mask_data
    mask = mask.with_batch(x.batch) if x.whole else mask
    mask = open_mask(mask, arrays, x.queries, x.keys, like_of(x))
    return mask and x._replace(scores=x.scores._replace(mask=mask))


def like_of(x):
    """Shapes of the arrays that tell the lengths to kernels of block masks."""
    return *x.shapes[:2], *[(x.batch,)] * x.counted


def flat_options(x, whole):
    """The shapes in which a kernel gets its `kernel_operands`. x, whole: the problems of the call
    and, with open lengths, of the kernel."""
    f, named, pair = x.scores, {}, whole.scores.bias_pair
    if f.bias:
        named["bias"] = (math.prod(f.bias) // pair, pair)[:pair]
    if f.mask:
        named["block_mask"] = (math.prod(shape_of(f.mask, x.queries, x.keys)),)
    return [named.get(name) for name in x.kernel_operands]


LEAST = {"S": 2}  # elements of cu_seqlens


def sequences_of(f):
    """The size of its packed sequences, if there are any."""
    return {"S": f.sequences + 1} if f.sequences else {}


def open_lengths(x, call):
    """The problem, maybe with lengths that are known when the kernel runs, and the number of
    queries that its program is tuned for."""
    f = x.scores
    if x.batch > 1 or is_large(x) or x.others or x.is_narrow:
        return x, x.queries
    kind, sizes = kind_of(x, call)
    found = sizes_of(kind, sizes | sequences_of(f), edges(x), LEAST)
    if found is None:
        return x, x.queries
    keys = found["M"]
    if has_pairs(x):
        keys = plgpu.dim("M", min=2, max=keys.most, multiple_of=2)
    given, x = x, with_options(x._replace(queries=found["N"], keys=keys), x)
    if f.sequences:
        x = x._replace(scores=x.scores._replace(sequences=found["S"] - 1))
    x = with_mask(x, call)
    return (x, found["N"].most) if x else (given, given.queries)


def open_batch(x, found):
    """The problem whose batch entries are one after the other. found: the sizes of an entry."""
    n, m, batch, table = found["N"], found["M"], entries(), None
    whole = any_rows("N", n.least), any_rows("M", m.least)
    queries, keys = (_sizes.clamp(w // batch, d.least, d.most) for w, d in zip(whole, (n, m)))
    if has_pairs(x):
        keys = even_keys(whole[1] // batch, m.most)
    if x.page:
        table = plgpu.dim("T", max=MOST_ROWS // x.page)
        keys = _sizes.clamp(table // batch, 1, MOST_ROWS // x.page) * x.page
        whole = whole[0], any_rows("P")
    given = x
    x = x._replace(batch=batch, queries=queries, keys=keys, whole=whole, table=table)
    return with_options(x, given)


def logarithms(x):
    """The shape of the logarithms, if there are any."""
    return [(x.batch, x.heads, x.queries)] * x.return_lse
