"""Flags of tracing that users switch: `pl.enable_debug_checks`, `pl.enable_poison_buffers`. Their
state is part of the key of every plan."""

from . import _core
from ._names import show

_flags: list["Flag"] = []


class Flag:
    """``flag(True)`` sets it; as a context manager, until its end. ``flag.value`` is its state.
    Kernels are compiled separately for each state. TypeError unless the argument is a bool."""

    def __init__(self, name):
        self.value, self.name = False, name
        _flags.append(self)

    def __call__(self, on):
        if not isinstance(on, bool):
            raise TypeError(f"{self.name}: expected a bool, got {show(on)}")
        before = self.value
        self._set(on)
        return _Restored(self, before)

    def _set(self, on):
        self.value = on
        _core.set_trace_flags(sum(flag.value << k for k, flag in enumerate(_flags)))

    def __repr__(self):
        return f"<pl.{self.name}: {self.value}>"


class _Restored:
    def __init__(self, flag, before):
        self.flag, self.before = flag, before

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.flag._set(self.before)


def state():
    """That of all flags: kernels are compiled separately for each."""
    return tuple(flag.value for flag in _flags)


enable_debug_checks = Flag("enable_debug_checks")
enable_poison_buffers = Flag("enable_poison_buffers")
