"""Random bits by counters: a function of numbers that say what they are for, without a state."""

from pallas_mgpu import numpy as jnp


def mixed(x):
    """A bijection of uint32 in whose results every bit depends on all bits of x."""
    u32 = jnp.uint32
    x = (x ^ (x >> u32(16))) * u32(0x7FEB352D)
    x = (x ^ (x >> u32(15))) * u32(0x846CA68B)
    return x ^ (x >> u32(16))
