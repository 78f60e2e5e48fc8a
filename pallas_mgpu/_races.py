"""Races that ``InterpretParams(detect_races=True)`` or the emulated machine found."""

import dataclasses
import os
import warnings


@dataclasses.dataclass(frozen=True)
class RaceAccess:
    """One of the two accesses of a :class:`Race`.

    ``touch``: "read", "write" or "atomic". ``ref``, ``index``: the name of the ref and the part
    that was accessed, such as "tile" and "[0:64, 3]". ``agent``: who made the access, such as "TMA,
    for thread 0". ``file``, ``line``: the location in Python; None and 0 if unknown.
    """

    touch: str
    ref: str
    index: str
    agent: str
    file: str | None
    line: int


@dataclasses.dataclass(frozen=True)
class Race:
    """Two accesses to the same memory that nothing orders. ``str()`` returns the whole report.

    ``first``, ``second``: the accesses, in the order of this run. ``space``: "SMEM" or "GMEM".
    ``index``, ``bytes``: where they overlap, in elements and bytes of the second ref. ``hint``:
    what is missing.
    """

    first: RaceAccess
    second: RaceAccess
    space: str
    index: str
    bytes: tuple[int, int]
    hint: str
    text: str

    kind = property(lambda self: f"{self.first.touch}/{self.second.touch}")

    def __str__(self):
        return self.text


@dataclasses.dataclass(frozen=True)
class RaceLog:
    """The results of one run: ``races``, each pair of lines once; ``notes``, of mode "strict": what
    is correct here but refused by JAX, as (text, file, line)."""

    races: tuple[Race, ...] = ()
    notes: tuple[tuple[str, str | None, int], ...] = ()

    races_found = property(lambda self: bool(self.races))


_OWN = os.path.dirname(__file__) + os.sep
_latest = None


def get_races():
    """The :class:`RaceLog` of the latest run with ``detect_races`` in this process, even if the run
    raised an exception. RuntimeError if there was none."""
    if _latest is None:
        raise RuntimeError(
            "get_races: no kernel ran with interpret=plgpu.InterpretParams(detect_races=True) yet"
        )
    return _latest


def emulated(races):
    """Note the result of a run on the emulated machine, which ends at the first race."""
    global _latest
    _latest = RaceLog(tuple(races), ())


def _warn(text, file, line):
    warnings.warn_explicit(text, UserWarning, file or "<kernel>", line)


def finish(found, params):
    """Called by the extension at the end of a run, with the results of csrc/python/races.c."""
    global _latest
    races, notes, seen = [], [], set()
    for x in found:
        if len(x) == 3:
            if not (x[1] or "").startswith(_OWN):  # kernels of ops are no code to port
                notes.append(x)
            continue
        space, index, start, end, hint, text, first, second = x
        sides = RaceAccess(*first), RaceAccess(*second)
        lines = frozenset((s.file, s.line, s.ref) for s in sides)
        if lines in seen:  # under another seed
            continue
        seen.add(lines)
        races.append(Race(*sides, space, index, (start, end), hint, "RACE DETECTED on " + text))
    _latest = RaceLog(tuple(races), tuple(notes))
    for note in notes:
        _warn(*note)
    for race in races if params.on_race == "warn" else ():
        at = race.second if race.second.file else race.first
        _warn(race.text, at.file, at.line)
