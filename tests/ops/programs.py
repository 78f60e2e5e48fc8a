"""The programs of what functions of ops return."""

from pallas_mgpu import _core


def kernels_in(x):
    """The kernels of what `ops` makes, which may consist of several."""
    if hasattr(x, "definition"):
        return [x]
    if isinstance(x, (list, tuple)):
        parts = x
    elif type(x).__module__.startswith("pallas_mgpu.ops"):
        parts = list(vars(x).values())
    else:
        parts = [x.kernel] if isinstance(x, _core.Reshaped) else []
    return [kernel for part in parts for kernel in kernels_in(part)]
