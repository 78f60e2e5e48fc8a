"""The members of `Array`: one table.

The extension gives the type its data (shape, dtype, ndim, size, ...), the operators and indexing;
all other members are functions of this package, of which most are those of `jnp`.
"""

from .. import _core
from .._trace import Array
from . import elementwise, index, linalg, reduce, shape, sort


def _astype(self, dtype, /):
    """Convert to another dtype by value. The result is strongly typed."""
    return _core.convert(self, dtype)


def _view(self, dtype, /):
    """The same bits in another dtype of the same width."""
    return _core.bitcast(self, dtype)


def _reshape(self, *shape):
    """The same elements in row-major order with another shape; one extent may be -1."""
    return _core.reshape(self, shape[0] if len(shape) == 1 else shape)


def _ravel(self):
    """Flatten to one dimension."""
    return _core.reshape(self, (-1,))


def _transpose(self, *axes):
    """Permute the dimensions; without ``axes``, reverse them."""
    if len(axes) == 1 and (axes[0] is None or isinstance(axes[0], (tuple, list))):
        return shape.transpose(self, axes[0])
    return shape.transpose(self, axes or None)


def _itself(self):
    """The array itself: it cannot change, and there are no complex dtypes."""
    return self


def _clip(self, min=None, max=None):  # noqa: A002
    """Clip to [min, max]; NaN stays NaN."""
    return elementwise.clip(self, min, max)


def _round(self, ndigits=None, /):
    """Round to nearest, ties to even."""
    return elementwise.round(self, ndigits or 0)


def _no_value(self):
    """Raises: the value is not known while the kernel is traced."""
    return int(self)


def _no_numpy(self, *args, **kwargs):
    """Raises: the value is not known while the kernel is traced."""
    raise _core.TracerArrayConversionError(
        f"A traced array with shape {self.dtype}{list(self.shape)} cannot become a NumPy array: use"
        " the functions of pallas_mgpu.numpy inside a kernel"
    )


def _format(self, spec):
    if spec:
        raise TypeError(
            f"a traced value has no number to format with {spec!r} while the kernel is traced;"
            ' print its number when the kernel runs: pl.debug_print("{}", x)'
        )
    return repr(self)


MEMBERS = {
    "T": property(shape.transpose, doc="Dims reversed."),
    "__array__": _no_numpy,
    "__format__": _format,
    "__matmul__": linalg.matmul,
    "__rmatmul__": lambda self, other: linalg.matmul(other, self),
    "__round__": _round,
    "all": reduce.all,
    "any": reduce.any,
    "argmax": reduce.argmax,
    "argmin": reduce.argmin,
    "argsort": sort.argsort,
    "astype": _astype,
    "at": property(index.At, doc="x.at[idx].set(y) and so on: a new array."),
    "block_until_ready": _no_value,
    "clip": _clip,
    "conj": _itself,
    "conjugate": _itself,
    "copy": _itself,
    "cumprod": reduce.cumprod,
    "cumsum": reduce.cumsum,
    "diagonal": index.diagonal,
    "dot": linalg.matmul,
    "flatten": _ravel,
    "item": _no_value,
    "mT": property(shape.matrix_transpose, doc="The last two dims exchanged."),
    "max": reduce.max,
    "mean": reduce.mean,
    "min": reduce.min,
    "prod": reduce.prod,
    "ravel": _ravel,
    "real": property(_itself, doc="The array itself."),
    "repeat": shape.repeat,
    "reshape": _reshape,
    "round": elementwise.round,
    "searchsorted": sort.searchsorted,
    "sort": sort.sort,
    "squeeze": shape.squeeze,
    "std": reduce.std,
    "sum": reduce.sum,
    "swapaxes": shape.swapaxes,
    "take": index.take,
    "tolist": _no_value,
    "trace": linalg.trace,
    "transpose": _transpose,
    "var": reduce.var,
    "view": _view,
}


def add_members():
    """Once, when the package is imported."""
    for name, member in MEMBERS.items():
        setattr(Array, name, member)
