"""Checks of kernels, for tests: :func:`check` runs one under many schedules. pytest_plugin.py
offers the same as a fixture."""

from ._testing import check

__all__ = ["check"]


def __dir__():
    return __all__
