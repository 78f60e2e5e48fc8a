"""The race detector on strided, masked and indexed accesses: it keeps the history of a strided
range as one period of it, and finds exactly the accesses that have an element in common."""

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax, pl
from pallas_mgpu import numpy as jnp

F32 = np.float32
SHAPES = [(64, 256), (40, 300), (128, 96), (9, 4100)]


def drawn(rng, shape):
    """A part of an array: (slices, mask, flat indices), as far as there are, and its elements."""
    numbers = np.arange(np.prod(shape)).reshape(shape)
    if rng.random() < 0.2:
        at = rng.choice(numbers.size // 8, rng.integers(1, 60), replace=bool(rng.integers(2)))
        at = (at * 8 + rng.integers(8)).astype(np.int32)
        return (None, None, at), set(at.tolist())
    regular, parts = rng.random() < 0.6, []
    for k, d in enumerate(shape):
        stride = int(rng.choice([4, 6] if regular and k else [1, 2, 3]))
        size = max(1, (d - stride) // stride) if regular else int(rng.integers(1, 9))
        size = min(size, (d - 1) // stride + 1)
        parts.append((int(rng.integers(0, d - (size - 1) * stride)), size, stride))
    kept = numbers[tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in parts)]
    if rng.random() < 0.2:
        mask = rng.integers(0, 8, kept.shape) == 0
        return (parts, mask, None), set(kept[mask].tolist())
    return (parts, None, None), set(kept.ravel().tolist())


def touch(what, write, o, given, total):
    parts, mask, at = what
    if at is not None:
        flat = o.reshape(o.shape[0] * o.shape[1])
        if write:
            flat[given[...]] = lax.full(at.shape, 1.0, F32)
        else:
            total[0] += jnp.sum(flat[given[...]])
        return
    view, mask = o.at[tuple(pl.ds(*p) for p in parts)], None if mask is None else given[...] != 0
    if write:
        plgpu.store(view, lax.full(view.shape, 1.0, F32), mask=mask)
    else:
        total[0] += jnp.sum(plgpu.load(view, mask=mask))


def find(accesses, shape, **options):
    """Runs accesses as (thread, what, write, elements); the races."""
    data = [np.int32(0 if a[1][2] is None else a[1][2]) for a in accesses]
    data = [d if a[1][1] is None else a[1][1].astype(np.int32) for a, d in zip(accesses, data)]

    def body(*refs):
        *given, o, totals = refs
        me = lax.axis_index("t")
        for t in (0, 1):

            @pl.when(me == t)
            def _(t=t):
                for x, g in zip(accesses, given):
                    if x[0] == t:
                        touch(x[1], x[2], o, g, totals.at[t])

    params = plgpu.InterpretParams(detect_races=True, on_race="record", **options)
    outs = [plgpu.ShapeDtypeStruct(s, F32) for s in (shape, (2, 1))]
    plgpu.kernel(body, out_type=outs, num_threads=2, thread_name="t", interpret=params)(
        *(np.atleast_1d(d) for d in data)
    )
    return plgpu.get_races().races


@pytest.mark.filterwarnings("ignore:.*nothing writes output")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strided_accesses_race_where_they_meet(shape):
    rng, seen = np.random.default_rng(shape), {True: 0, False: 0}
    for seed in range(25):
        accesses = []
        for k in range(rng.integers(2, 7)):
            what, elements = drawn(rng, shape)
            write = k == 0 or bool(rng.random() < 0.4)
            accesses.append((int(rng.integers(2)), what, write, elements))
        common = set()
        for t, _, write, elements in accesses:
            for u, _, other, more in accesses:
                if t == 0 and u == 1 and (write or other):
                    common |= elements & more
        races = find(accesses, shape, seed=seed)
        assert bool(races) == bool(common), (seed, accesses)
        for race in races:
            first, end = (b // 4 for b in race.bytes)
            assert set(range(first, end)) <= common, (seed, race)
        seen[bool(common)] += 1
    assert min(seen.values()) >= 4, seen
