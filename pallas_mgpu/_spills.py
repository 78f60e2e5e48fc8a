"""Which lines of Python the registers that spill belong to: from the disassembly of a program that
was compiled with line information."""

import re

_PLACE = re.compile(r'//## File "(.*?)", line (\d+)')
_ACCESS = re.compile(r"\b(?:STL|LDL)((?:\.\w+)*)\s")


def _bytes(suffixes):
    """Of one access of a lane, by the suffixes of its instruction: .64, .U8, ..."""
    for s in suffixes.split("."):
        width = re.fullmatch(r"[US]?(8|16|64|128)", s)
        if width:
            return int(width[1]) // 8
    return 4


def by_line(text):
    """``[(file, line, bytes)]`` of nvdisasm's text, the largest first: bytes that a lane stores to
    and loads from local memory. Of functions that were inlined the last place counts, which is
    where the user's line called them."""
    place, found = ("", 0), {}
    for line in text.splitlines():
        at = _PLACE.search(line)
        if at:
            place = at[1], int(at[2])
        elif access := _ACCESS.search(line):
            found[place] = found.get(place, 0) + _bytes(access[1])
    return sorted(((*where, n) for where, n in found.items()), key=lambda x: (-x[2], x[:2]))
