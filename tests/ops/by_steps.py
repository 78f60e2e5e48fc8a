"""Results of functions of ops that take more than one kernel, each of which a test runs its way."""

from pallas_mgpu import _core


def by_steps(call, f, arrays):
    """call: of a kernel and its operands, as Runner.call of conftest.py. f: what f.kernel() of a
    function of ops gives: a kernel, one of padded copies, or one of slices."""
    if hasattr(f, "pads"):
        pairs = zip(arrays, [*f.pads, *[None] * len(arrays)])
        arrays = [x if pad is None else by_steps(call, pad, [x]) for x, pad in pairs]
        return by_steps(call, f.product, arrays)
    if hasattr(f, "slicing"):
        first, second = f.operands(*arrays)
        return call(f.adding, call(f.slicing, *first), *second)
    if isinstance(f, _core.Reshaped):  # one result, with the shapes of any sizes
        views = f.alone()
        found = call(views.kernel, *views.given(arrays))
        return found if views.results[0] is None else found.reshape(views.results[0])
    return call(f, *arrays)
