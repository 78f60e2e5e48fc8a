"""Every interleaving of the Blackwell kernels of `ops`, with data removed (interleavings.py): no
deadlock, nothing used too early or overwritten while in use, no tile handed out twice. Planted
errors are found. `pytest -s` prints how many states there are."""

import functools
import re

import lanes
import ml_dtypes
import numpy as np
import pytest
from interleavings import Wrong, explore

import pallas_mgpu as plgpu
from pallas_mgpu.ops import (
    TensorMemoryAttentionConfig,
    TensorMemoryBackwardConfig,
    TensorMemoryConfig,
    TensorMemoryMixedConfig,
    attention,
    attention_backward,
    gated_matmul,
    matmul,
    mixed_matmul,
    ragged_dot,
    transposed_ragged_dot,
)


def text_of(op, args, config, blocks=1, **options):
    """The program of a call on a GPU with so many SMs."""
    patch = pytest.MonkeyPatch()
    patch.setattr(plgpu, "sm_count", lambda device=None: blocks)
    op.maker.forget()
    try:
        f = op.kernel(*args, config=config, **options)
        arrays = [x for x in options.values() if isinstance(x, np.ndarray)]
        return lanes.statements(f.lower(*args, *arrays, target="sm_100a"))
    finally:
        patch.undo()
        op.maker.forget()


@functools.cache
def product(tiles, steps, pair=False, dynamic=False):
    """The program of `tiles` tiles of one block, or pair, with a ring of two slots."""
    a = np.zeros((128 * (1 + pair), 64 * steps), np.float16)
    b = np.zeros((64 * steps, 128 * tiles), np.float16)
    config = TensorMemoryConfig(128, pair, 2, dynamic=dynamic)
    return text_of(matmul, (a, b), config, 1 + pair)


@functools.cache
def scaled(tiles, steps, pair=False):
    """With scales of blocks of 32; two accumulators do not fit beside them."""
    a = np.zeros((128 * (1 + pair), 128 * steps), ml_dtypes.float8_e4m3fn)
    b = np.zeros(((128 << pair) * tiles, 128 * steps), a.dtype)
    scales = [np.ones((len(x), 4 * steps), ml_dtypes.float8_e8m0fnu) for x in (a, b)]
    scales = [plgpu.ext.format_tcgen05_scales(x) for x in scales]
    config = TensorMemoryConfig(128 << pair, pair, 2, dynamic=False)
    how = dict(scale_a=scales[0], scale_b=scales[1], transpose_b=True, out_dtype=np.float32)
    return text_of(matmul, (a, b), config, 1 + pair, **how)


@functools.cache
def gated(tiles, steps, pair=False):
    a = np.zeros((128 * (1 + pair), 64 * steps), np.float16)
    b = np.zeros((64 * steps, (128 << pair) * tiles), np.float16)
    config = TensorMemoryConfig(128 << pair, pair, 2, dynamic=False)
    return text_of(gated_matmul, (a, b), config, 1 + pair)


@functools.cache
def grouped(op, rows=(128, 128, 128)):
    """Groups of so many rows for one block, and the table that it finds in shared memory, of their
    first rows and, for each group, the number of tiles up to it. A ring of two slots."""
    total, groups = sum(rows), len(rows)
    other = (groups, 128, 64) if op is ragged_dot else (total, 64)
    args = np.zeros((total, 128), np.float16), np.zeros(other, np.float16), np.asarray(rows, "i4")
    text = text_of(op, args, TensorMemoryConfig(64, False, 2, dynamic=False))
    table = int(re.search(r"const u32 table = smem \+ (\d+);", text)[1])
    numbers = [*np.cumsum([0, *rows]), *np.cumsum([0, *(-(-n // 128) for n in rows)])]
    return text, tuple((table + 4 * i, int(x)) for i, x in enumerate(numbers))


def groups(op, *rows, **how):
    text, known = grouped(op, rows)
    return text, 1, {"known": known, **how}


@functools.cache
def softmax(keys, causal=False, dim=64):
    q, k = (np.zeros((1, n, 1, dim), np.float16) for n in (256, keys))
    f = attention.kernel(q, k, k, config=TensorMemoryAttentionConfig(2), causal=causal)
    return lanes.statements(f.lower(q, k, k, target="sm_100a"))


@functools.cache
def gradients(queries, dim=64):
    """One block of keys; 64 and 128 elements differ in the slots of the ring."""
    q, k = (np.zeros((1, n, 1, dim), np.float16) for n in (queries, 128))
    lse = np.zeros((1, 1, queries), np.float32)
    config = TensorMemoryBackwardConfig()
    f = attention_backward.kernel(q, q, k, k, q, lse, config=config).fused.fused
    return lanes.statements(f.lower(q, q, k, k, lse, lse, target="sm_100a"))


@functools.cache
def seven(which, queries=128, keys=128, dim=64):
    """By seven products: the kernel for dK and dV, for one of them, or for dQ."""
    q, k = (np.zeros((1, n, 1, dim), np.float16) for n in (queries, keys))
    lse = np.zeros((1, 1, queries), np.float32)
    f = attention_backward.kernel(
        q, q, k, k, q, lse, config=TensorMemoryBackwardConfig(), deterministic=True
    )
    of = {"keys": f.by_keys, "queries": f.by_queries} if dim <= 192 else vars(f.by_keys)
    return lanes.statements(of[which].lower(q, q, k, k, lse, lse, target="sm_100a"))


@functools.cache
def of_bias(keys):
    """The gradient of a bias of all heads: one block goes over three."""
    q, k = (np.zeros((1, n, 3, 64), np.float16) for n in (128, keys))
    lse, bias = np.zeros((1, 3, 128), np.float32), np.zeros((1, 1, 128, keys), np.float16)
    config = TensorMemoryBackwardConfig()
    how = dict(bias=bias, bias_gradient=True, config=config)
    f = attention_backward.kernel(q, q, k, k, q, lse, **how).bias
    return lanes.statements(f.lower(q, q, k, k, lse, lse, bias, target="sm_100a"))


@functools.cache
def mixed(groups, steps, tiles=1):
    """Tiles of one block, with so many groups of scales (0: none) of so many steps."""
    k, n = 64 * steps * max(groups, 1), 128 * tiles
    args = [np.zeros((16, k), np.float16), np.zeros((n, k), np.int8)]
    args += [np.zeros((groups, n), np.float16)] if groups else []
    return text_of(mixed_matmul, args, TensorMemoryMixedConfig(16, 2, 64))


def answers(tiles, pair):
    """Of cluster launch control: the first blocks of the other tiles, then none."""
    return [t * (1 + pair) for t in range(1, tiles)] + [None]


PROGRAMS = {  # text, blocks, options
    "3 tiles": lambda: (product(3, 2), 1, {}),
    "3 tiles taken over": lambda: (
        product(3, 2, dynamic=True), 1, {"responses": answers(3, False)},
    ),
    "pair": lambda: (product(1, 2, pair=True), 2, {}),
    "3 tiles of a pair": lambda: (product(3, 1, pair=True), 2, {}),
    "2 tiles taken over by a pair": lambda: (
        product(2, 1, True, True), 2, {"responses": answers(2, True), "followers": ()},
    ),
    "gated, 3 tiles": lambda: (gated(3, 2), 1, {}),
    "gated, pair": lambda: (gated(1, 2, True), 2, {"followers": ()}),
    "gated, 3 tiles of a pair": lambda: (gated(3, 1, True), 2, {"followers": ()}),
    "groups": lambda: groups(ragged_dot, 128, 128, 128),
    "groups, uneven": lambda: groups(ragged_dot, 200, 0, 40, followers=()),
    "sums of groups": lambda: groups(transposed_ragged_dot, 128, 128, 128, followers=()),
    "sums of groups, uneven": lambda: groups(transposed_ragged_dot, 130, 0, 64, followers=()),
    "attention, 192": lambda: (softmax(128, dim=192), 1, {"followers": ()}),
    "attention, 256": lambda: (softmax(192, dim=256), 1, {"followers": ()}),
    "mixed": lambda: (mixed(0, 2, 3), 1, {"followers": ()}),
    "mixed, groups": lambda: (mixed(3, 2), 1, {"followers": ()}),
    "gradients": lambda: (gradients(256), 1, {"followers": ()}),
    "gradients, one slot": lambda: (gradients(256, 128), 1, {"followers": ()}),
    "gradients, ring": lambda: (gradients(384), 1, {"followers": ()}),
    "gradients of keys": lambda: (seven("keys", 192), 1, {"followers": ()}),
    "gradients of queries": lambda: (seven("queries", keys=192), 1, {"followers": ()}),
    "gradients of keys, 192": lambda: (seven("keys", dim=192), 1, {"followers": ()}),
    "gradients of 256, dK": lambda: (seven("dk", dim=256), 1, {"followers": ()}),
    "gradients of 256, dV": lambda: (seven("dv", dim=256), 1, {"followers": ()}),
    "gradient of a bias": lambda: (of_bias(64), 1, {"followers": ()}),
    "scales, 3 tiles": lambda: (scaled(3, 2), 1, {"followers": ()}),
    "scales, pair": lambda: (scaled(1, 2, True), 2, {"followers": ()}),
    "attention": lambda: (softmax(128), 1, {"followers": ()}),
    "attention, ring": lambda: (softmax(256), 1, {"followers": ()}),
    "attention, rescaled never": lambda: (softmax(256), 1, {"choose": False, "followers": ()}),
}  # fmt: skip
MARKS = {  # by seconds
    "long": "attention, ring; attention, rescaled never; 3 tiles taken over; groups; scales, pair;"
    " scales, 3 tiles; gated, pair; mixed; gradients, one slot; gradients of 256, dK;"
    " gradients of keys, 192; gradients",
    "exhaustive": "3 tiles of a pair; gated, 3 tiles of a pair; 2 tiles taken over by a pair;"
    " attention, 192; attention, 256; gradients of keys; gradients, ring",
}
LONG = {name.strip(): mark for mark, names in MARKS.items() for name in names.split(";")}
assert LONG.keys() <= PROGRAMS.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=getattr(pytest.mark, LONG[x]) if x in LONG else ()) for x in PROGRAMS],
)
def test_no_interleaving_is_wrong(name):
    text, blocks, how = PROGRAMS[name]()
    n = explore(text, blocks, **how)
    print(f"{name}: {n} states")
    assert n > (30 if "bias" in name else 1000)  # of a bias: one thread


PLANTED = [
    *(("3 tiles", "mbarrier_wait", k) for k in range(7)),
    *(("3 tiles", "mbarrier_arrive_expect_tx", k) for k in range(6)),
    *(("3 tiles", "tcgen05_commit", k) for k in range(9)),
    ("3 tiles", "mbarrier_arrive", 0),
    ("3 tiles", "bulk_group_wait_read", 2),
    *(("3 tiles", "bulk_group_commit", k) for k in (0, 5)),
    *(("3 tiles", "warpgroup_sync", k) for k in (1, 5, 7)),
    *(("pair", "tcgen05_commit_pair", k) for k in range(3)),
    *(("pair", "mbarrier_wait", k) for k in range(2)),
    ("pair", "mbarrier_arrive_expect_tx", 0),
    *(("attention", "mbarrier_wait", k) for k in range(6)),
    *(("attention", "tcgen05_commit", k) for k in range(6)),
    *(("attention", "mbarrier_arrive_expect_tx", k) for k in range(4)),
    *(("gradients", "mbarrier_wait", k) for k in range(6)),
    *(("gradients", "tcgen05_commit", k) for k in range(4)),
    *(("gradients", "mbarrier_arrive", k) for k in range(4)),
    *(("gradients of queries", "mbarrier_wait", k) for k in range(7)),
    *(("gradients of queries", "mbarrier_arrive", k) for k in range(3)),
    *(("gradients of 256, dK", "mbarrier_wait", k) for k in range(5)),
    *(("gradients of 256, dK", "tcgen05_commit", k) for k in range(3)),
    *(("gradient of a bias", "mbarrier_wait", k) for k in range(2)),
    *(("scales, 3 tiles", "mbarrier_wait", k) for k in range(6)),
    *(("scales, 3 tiles", "tcgen05_commit", k) for k in range(4)),
    *(("gated, 3 tiles", "mbarrier_wait", k) for k in range(5)),
    *(("gated, 3 tiles", "tcgen05_commit", k) for k in range(4)),
    ("gated, 3 tiles", "mbarrier_arrive", 0),
    *(("gated, pair", "tcgen05_commit_pair", k) for k in range(3)),
    *(("groups, uneven", "mbarrier_wait", k) for k in range(5)),
    *(("groups, uneven", "tcgen05_commit", k) for k in range(4)),
    *(("sums of groups", "mbarrier_wait", k) for k in range(5)),
    *(("sums of groups", "tcgen05_commit", k) for k in range(4)),
    *(("mixed", "mbarrier_wait", k) for k in range(4)),
    *(("mixed", "mbarrier_arrive", k) for k in (0, 2)),
    *(("mixed", "tcgen05_commit", k) for k in range(2)),
    *(("attention", name, 0) for name in ("tmem_wait_store", "mbarrier_arrive")),
]


@pytest.mark.parametrize(
    "name, event, n",
    [pytest.param(*x, marks=pytest.mark.long if k % 3 else ()) for k, x in enumerate(PLANTED)],
)
def test_an_event_that_is_left_out(name, event, n):
    """Left out in every lane: some interleaving is wrong."""
    text, blocks, how = PROGRAMS[name]()
    with pytest.raises(Wrong):
        explore(text, blocks, drop=[(event, n)], **how)


@pytest.mark.parametrize(
    "old, new",
    [
        ("mbarrier_init(smem + {empty}, 1)", "mbarrier_init(smem + {empty}, 2)"),
        ("mbarrier_arrive_expect_tx(full + slot *", "mbarrier_arrive_expect_tx(full + 8 - slot *"),
        (", 32768);", ", 16384);"),
        ("tcgen05_commit(ready", "tcgen05_commit(taken"),
    ],
)
def test_a_line_that_is_changed(old, new):
    text, blocks, how = PROGRAMS["3 tiles"]()
    empty = text[text.index("const u32 empty = smem + ") + 25 :].split(";")[0]
    old, new = old.format(empty=empty), new.format(empty=empty)
    assert old in text
    with pytest.raises(Wrong):
        explore(text.replace(old, new), blocks, **how)


def test_tiles_are_handed_out_once():
    """A request whose answer another thread has not read yet overwrites it."""
    text, blocks, how = PROGRAMS["3 tiles taken over"]()
    for n in range(2):
        with pytest.raises(Wrong):
            explore(text, blocks, drop=[("mbarrier_wait", n)], **how)
    with pytest.raises(Wrong):
        explore(text, blocks, drop=[("try_cancel", 1)], **how)
