"""What ops promise about the bits of their results.

Every kernel of `ops` sums in an order that its tiling fixes, so that a call repeats bit for bit on
one kind of GPU: that is ``deterministic``. The tiling is chosen from the whole shape, however, and
so the bits of one row may depend on how many rows there are. ``batch_invariant`` takes the choice
from what one row has in common with all others: its extents, the dtypes and the options."""

from .._names import show


def batch_invariance(name, batch_invariant, deterministic):
    """The first option, after checks of both. TypeError for what is no bool."""
    for what, value in (("batch_invariant", batch_invariant), ("deterministic", deterministic)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {what} must be True or False, got {show(value)}")
    return batch_invariant
