"""Results of functions of ops that take more than one kernel, each of which a test runs its way."""


def by_steps(call, f, arrays):
    """call: of a kernel and its operands, as Runner.call of conftest.py. f: what f.kernel() of a
    function of ops gives: a kernel, one of padded copies, or one of slices."""
    if hasattr(f, "pads"):
        arrays = [x if pad is None else call(pad, x) for x, pad in zip(arrays, f.pads)]
        return by_steps(call, f.product, arrays)
    if hasattr(f, "slicing"):
        first, second = f.operands(*arrays)
        return call(f.adding, call(f.slicing, *first), *second)
    return call(f, *arrays)
