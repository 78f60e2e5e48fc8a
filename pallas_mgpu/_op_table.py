"""docs/graph-ops.md: the ops of the graph, as csrc/ir/ops.def has them. ``python -m pallas_mgpu
ops`` writes it."""

import re

from . import _core

KINDS = {
    "a": "array",
    "s": "scalar",
    "i": "int32",
    "t": "int32",
    "p": "bool",
    "r": "ref",
    "g": "ref in GMEM",
    "m": "ref in SMEM",
    "c": "accumulator",
    "b": "barrier",
    "h": "semaphore",
    "v": "value",
}
ROLES = {"<": "read", ">": "written", "=": "read and written", "!": "used by the source", "": ""}

PAGE = """\
# Ops of the graph

`python -m pallas_mgpu ops` writes this page from `csrc/ir/ops.def`, and a test compares the two.
[graph-text.md](graph-text.md) describes the text form of graphs.

An operand is given by what messages call it, its kind, and how the op touches what it refers to;
`async`: by an engine, in the async proxy; `cluster`: in other blocks of the cluster, too. `...`
marks operands that may be repeated, `?` an optional one. "Needs" names features of the target.

| op | operands | attributes | needs | meaning |
|---|---|---|---|---|
"""


def _operands(spec, names):
    names = names.split()
    for k, m in enumerate(re.finditer(r"(\w)([<>=!]?)(~?)(@?)([*?]?)", spec)):
        letter, role, proxy, remote, repeat = m.groups()
        facts = [KINDS[letter], ROLES[role], "async" * bool(proxy), "cluster" * bool(remote)]
        facts = ", ".join(filter(None, facts))
        name = f"*{names[k]}*: " if k < len(names) else ""
        yield name + facts + {"*": " ...", "?": " ?", "": ""}[repeat]


def text():
    """The page."""
    lines = []
    for op, spec, names, attrs, needs, doc in _core.op_table():
        cells = [
            f"`{op}`",
            "; ".join(_operands(spec, names)),
            ", ".join(f"`{a}`" for a in attrs),
            ", ".join(needs),
            doc.replace("|", "\\|"),
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return PAGE + "".join(lines)
