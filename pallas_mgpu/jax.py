"""The functions of :mod:`pallas_mgpu.ops` with derivatives, for JAX.

Kernels and the functions of `ops` can be called inside ``jax.jit``. Those of this module also have
derivatives for reverse mode."""

from ._jax import call_special  # noqa: F401
