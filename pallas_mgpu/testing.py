"""For tests and measurements: :func:`check` runs a kernel under many schedules (pytest_plugin.py
offers the same as a fixture), :func:`do_bench` times functions against each other on a GPU."""

from ._bench import Timing, do_bench, rotated
from ._testing import check

__all__ = ["Timing", "check", "do_bench", "rotated"]


def __dir__():
    return __all__
