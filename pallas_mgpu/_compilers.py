"""Which versions of NVRTC were tested; docs/compilers.md says how."""

TESTED = ("12.9.86", "13.0.88", "13.1.115", "13.2.86", "13.5.37")


def describe(found: str) -> str:
    """A line about the compiler that `system_info` found, "13.5, /path/to/libnvrtc.so.13"."""
    tested = [version.rpartition(".")[0] for version in TESTED]
    known = found.partition(",")[0] in tested
    return f"{found} ({'' if known else 'not '}tested; tested are {', '.join(tested)})"
