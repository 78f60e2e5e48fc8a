"""Functions of jnp that are compositions of others: NumPy's function of the same name is the judge,
on odd shapes, with NaN where the function cares; and host arrays go to NumPy itself."""

import warnings

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import lax
from pallas_mgpu import numpy as jnp

pytestmark = pytest.mark.covering(1, share=True)

# Of f (NumPy or jnp), x (7, 5), y (7, 5) with NaN, v (9,), w (9,) rising, i (7, 5) and n (9,) ints.
CASES = {
    "atleast": lambda f, x, y, v, w, i, n: (f.atleast_1d(v[0]), f.atleast_2d(v), f.atleast_3d(x)),
    "atleast 3": lambda f, x, y, v, w, i, n: f.atleast_3d(v, v[:1].reshape(1, 1, 1)),
    "column_stack": lambda f, x, y, v, w, i, n: f.column_stack([v, w, v]),
    "dstack": lambda f, x, y, v, w, i, n: (f.dstack([x, i]), f.dstack([v, w])),
    "concat": lambda f, x, y, v, w, i, n: (f.concat([x, y], axis=1), f.append(x, v)),
    "append": lambda f, x, y, v, w, i, n: f.append(x, x[:2], axis=0),
    "unstack": lambda f, x, y, v, w, i, n: f.unstack(x, axis=1),
    "splits": lambda f, x, y, v, w, i, n: (*f.hsplit(x, [2]), *f.vsplit(x, 7), *f.hsplit(v, 3)),
    "dsplit": lambda f, x, y, v, w, i, n: f.dsplit(x[:, :, None], 1),
    "flips": lambda f, x, y, v, w, i, n: (f.fliplr(x), f.flipud(x)),
    "rot90": lambda f, x, y, v, w, i, n: tuple(f.rot90(x, k) for k in (-1, 0, 1, 2, 3)),
    "rot90 axes": lambda f, x, y, v, w, i, n: f.rot90(x, axes=(1, 0)),
    "rollaxis": lambda f, x, y, v, w, i, n: (f.rollaxis(x, 1), f.rollaxis(x[None], 0, 3)),
    "meshgrid": lambda f, x, y, v, w, i, n: tuple(f.meshgrid(v, n)),
    "meshgrid ij": lambda f, x, y, v, w, i, n: tuple(
        f.meshgrid(v[:3], w[:2], n[:4], indexing="ij", sparse=True)
    ),
    "unravel": lambda f, x, y, v, w, i, n: f.unravel_index(abs(n) % 24, (2, 3, 4)),
    "ravel_multi": lambda f, x, y, v, w, i, n: f.ravel_multi_index((n, n + 1), (5, 7), "clip"),
    "ravel_multi wrap": lambda f, x, y, v, w, i, n: f.ravel_multi_index((n, n), (5, 7), "wrap"),
    "gcd": lambda f, x, y, v, w, i, n: (f.gcd(i, i * 3 + 6), f.lcm(n, 12)),
    "diagonal": lambda f, x, y, v, w, i, n: (f.diagonal(x), f.diagonal(x, -2), f.diag(x, 3)),
    "diagonal of more": lambda f, x, y, v, w, i, n: f.diagonal(x.reshape(1, 7, 5), 1, 2, 1),
    "diag": lambda f, x, y, v, w, i, n: (f.diag(v), f.diag(v, 2), f.diag(n, -1)),
    "trace": lambda f, x, y, v, w, i, n: (f.trace(x), f.trace(i, 1), f.trace(x, -3)),
    "diff": lambda f, x, y, v, w, i, n: (f.diff(x), f.diff(x, 2, axis=0), f.ediff1d(i)),
    "ptp": lambda f, x, y, v, w, i, n: (f.ptp(x), f.ptp(i, axis=1), f.ptp(x, 0, keepdims=True)),
    "cumulative": lambda f, x, y, v, w, i, n: (
        f.cumulative_sum(x, axis=1, include_initial=True),
        f.cumulative_prod(v),
    ),
    "inner": lambda f, x, y, v, w, i, n: (f.inner(x, x), f.inner(v, w)),
    "vecdot": lambda f, x, y, v, w, i, n: (f.vecdot(x, x + 1), f.matvec(x, x[0])),
    "vecmat": lambda f, x, y, v, w, i, n: f.vecmat(v[:7], x),
    "kron": lambda f, x, y, v, w, i, n: (f.kron(x[:2], x[:3]), f.kron(v[:2], x[:2])),
    "cross": lambda f, x, y, v, w, i, n: f.cross(x[:, :3], x[:, 2:]),
    "polyval": lambda f, x, y, v, w, i, n: (f.polyval(v[:4], x), f.polyval([2.0, 3.0], x)),
    "vander": lambda f, x, y, v, w, i, n: (f.vander(v, 4), f.vander(v[:3], increasing=True)),
    "isclose": lambda f, x, y, v, w, i, n: (
        f.isclose(x, x + 1e-7 * (i % 300)),
        f.isclose(y, y, equal_nan=True),
        f.isclose(y / 0, y),
    ),
    "equal": lambda f, x, y, v, w, i, n: tuple(
        f.asarray(z)
        for z in (
            f.allclose(x, x),
            f.allclose(y, y),
            f.array_equal(i, i),
            f.array_equal(x, v),
            f.array_equal(y, y, equal_nan=True),
        )
    ),
    "isin": lambda f, x, y, v, w, i, n: (f.isin(i, n), f.isin(n, n[2:4], invert=True)),
    "average": lambda f, x, y, v, w, i, n: (
        f.average(x, axis=0),
        f.average(x, axis=1, weights=x * x),
        f.average(x, axis=0, weights=abs(v[:7])),
    ),
    "nan sums": lambda f, x, y, v, w, i, n: (f.nansum(y, axis=0), f.nanprod(y), f.nancumsum(y, 1)),
    "nan extremes": lambda f, x, y, v, w, i, n: (f.nanmax(y, axis=1), f.nanmin(y), f.nanmax(i)),
    "nan places": lambda f, x, y, v, w, i, n: (f.nanargmax(y[:5], axis=1), f.nanargmin(y)),
    "nan moments": lambda f, x, y, v, w, i, n: (
        f.nanmean(y, axis=1, keepdims=True),
        f.nanvar(y, axis=0),
        f.nanstd(y, ddof=1),
    ),
    "quantile": lambda f, x, y, v, w, i, n: (
        f.quantile(x, 0.3, axis=0),
        f.quantile(x, [0.0, 0.5, 1.0]),
        f.percentile(v, 37.0, keepdims=True),
    ),
    "quantile methods": lambda f, x, y, v, w, i, n: tuple(
        f.quantile(v, 0.27, method=m) for m in ("lower", "higher", "nearest", "midpoint")
    ),
    "quantile of NaN": lambda f, x, y, v, w, i, n: f.quantile(y, 0.5, axis=1),
    "searchsorted": lambda f, x, y, v, w, i, n: (
        f.searchsorted(w, x),
        f.searchsorted(w, w, side="right"),
        f.searchsorted(w, w),
        f.searchsorted(w, y),
        f.digitize(x, w),
        f.digitize(w, w, right=True),
    ),
    "interp": lambda f, x, y, v, w, i, n: (f.interp(x, w, v), f.interp(x, w, v, left=-9, right=9)),
    "bincount": lambda f, x, y, v, w, i, n: (
        (f.bincount(abs(n), length=30), f.bincount(abs(n), v, length=30))
        if f is jnp
        else (f.bincount(abs(n), minlength=30), f.bincount(abs(n), v, minlength=30))
    ),
    "dims": lambda f, x, y, v, w, i, n: (
        (lax.collapse(x, 0), lax.collapse(x[None], 1, 3), lax.broadcast_to_rank(v, 3))
        if f is jnp
        else (x.ravel(), x.reshape(1, 35), v[None, None])
    ),
    "ravel all": lambda f, x, y, v, w, i, n: f.around(x, 0),
}


NEW = {"concat": "concat", "unstack": "unstack", "cumulative": "cumulative_sum"}
NEW |= {"vecdot": "matvec", "vecmat": "vecmat"}
TOO_NEW = [case for case, name in NEW.items() if not hasattr(np, name)]  # for this NumPy


def arguments(rng):
    x, v = (rng.standard_normal(s).astype(np.float32) for s in ((7, 5), (9,)))
    y = np.where(rng.random(x.shape) < 0.3, np.nan, x).astype(np.float32)
    y[:, 0] = x[:, 0]
    y[6, 1:] = np.nan
    i, n = (rng.integers(-20, 21, s).astype(np.int32) for s in ((7, 5), (9,)))
    return x, y, v, np.sort(v + 0.5), i, n


def group(k, of=7):
    return list(CASES)[k::of]


@pytest.mark.parametrize("names", [group(k) for k in range(7)], ids=lambda names: names[0])
def test_as_numpy(run, rng, names):
    args = arguments(rng)
    wants, counts = [], []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        names = [name for name in names if name not in TOO_NEW]
        for name in names:
            out = CASES[name](np, *args)
            out = out if isinstance(out, (tuple, list)) else (out,)
            wants += [np.asarray(o) for o in out]
            counts.append(len(out))
    narrow = {"float64": np.float32, "int64": np.int32}
    wants = [np.array(w, narrow.get(w.dtype.name, w.dtype), order="C") for w in wants]

    def body(*refs):
        xs, outs = [r[...] for r in refs[: len(args)]], iter(refs[len(args) :])
        for name in names:
            got = CASES[name](jnp, *xs)
            for x in got if isinstance(got, (tuple, list)) else (got,):
                o = next(outs)
                assert x.dtype == o.dtype, (name, x.dtype, o.dtype)
                o[...] = x

    got = iter(run(body, tuple(wants), *args))
    wants = iter(wants)
    for name, count in zip(names, counts):
        for _ in range(count):
            g, w = next(got), next(wants)
            np.testing.assert_allclose(g, w, rtol=3e-5, atol=1e-5, err_msg=name)


def test_arrays_of_nothing(run):
    """In a kernel they are traced; on the host NumPy's."""
    made = [
        lambda: jnp.linspace(0, 1, 7),
        lambda: jnp.linspace(-2.0, 5.0, 9, endpoint=False),
        lambda: jnp.linspace(0, 10, 5, dtype="int32"),
        lambda: jnp.linspace(3, 4, 1),
        lambda: jnp.logspace(0, 2, 5),
        lambda: jnp.identity(5),
        lambda: jnp.indices((3, 4)),
        lambda: jnp.indices((3, 4), sparse=True)[1],
    ]
    wants = tuple(f() for f in made)
    assert all(isinstance(w, np.ndarray) and w.dtype.itemsize == 4 for w in wants)

    def body(start, *outs):
        for f, o in zip(made, outs):
            o[...] = f().astype(o.dtype)
        outs[-1][...] = jnp.linspace(start[...], 4.0, 6)

    last = np.linspace(1.5, 4, 6, dtype=np.float32)
    for got, want in zip(run(body, (*wants, last), np.float32(1.5)), (*wants, last)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "use, error, text",
    [
        (lambda x: jnp.quantile(x, x[0, 0]), NotImplementedError, "known at trace time"),
        (lambda x: jnp.quantile(x, 2.0), ValueError, "from 0 to 1"),
        (lambda x: jnp.quantile(x, 0.5, method="hazen"), NotImplementedError, "'hazen'"),
        (lambda x: jnp.bincount(x[0].astype("int32")), ValueError, "length= must be given"),
        (lambda x: jnp.searchsorted(x, x), ValueError, "a vector"),
        (lambda x: jnp.gcd(x, x), TypeError, "integers are needed"),
        (lambda x: jnp.diagonal(x[0]), ValueError, "two dims"),
        (lambda x: jnp.diagonal(x, 9), ValueError, "leaves nothing of 7 x 5"),
        (lambda x: jnp.cross(x, x), ValueError, "3 elements"),
        (lambda x: jnp.linspace(x[0], x[1]), NotImplementedError, "must be scalars"),
        (lambda x: jnp.meshgrid(x[0], indexing="a"), ValueError, "'xy' or 'ij'"),
        (lambda x: jnp.average(x, weights=x[0]), TypeError, "a vector along one axis"),
        (lambda x: jnp.convolve(x[0], x[1]), NotImplementedError, "convolve"),
    ],
)
def test_misuse(use, error, text):
    def body(x_ref, o_ref):
        use(x_ref[...])
        o_ref[...] = x_ref[...]

    x = np.zeros((7, 5), np.float32)
    with pytest.raises(error, match=text):
        plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)
