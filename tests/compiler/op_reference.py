"""The reference of ops in docs/graph-text.md, from ops.def; run as a program, it writes it."""

import re

import tables

PAGE = tables.CORE.parent / "docs" / "graph-text.md"
BEGIN = "## Reference of ops\n"
HEAD = """
`python tests/compiler/op_reference.py` generates this section from `csrc/ir/ops.def`. An operand is
a letter with a name: a array, s scalar, i int32 scalar, t int32 scalar of one lane, p bool scalar,
r ref in global or shared memory, g ref in global memory, m ref in shared memory, x ref in tensor
memory, c accumulator, b barrier, h semaphore, v any value. `*` repeats it, `?` makes it optional.
`needs` lists the features of `csrc/ir/targets.def` that a target must have.
"""


def operands(spec, names):
    """`acc: c, a: v` of "c=~v<~" and "acc a"."""
    found, known = [], names.split()
    for k, m in enumerate(re.finditer(r"([a-z])[^a-z*?]*([*?]*)", spec)):
        name = f"{known[k]}: " if k < len(known) else ""
        found.append(f"{name}{m[1]}{m[2]}")
    return ", ".join(found)


def listed(text, macro):
    return ", ".join(re.findall(rf"{macro}\((\w+)\)", text))


def rows():
    """[name, operands, attributes, needs, meaning] of each op."""
    ops = tables.read(tables.CORE / "ir" / "ops.def")["PM_OP"]
    attributes = tables.read(tables.CORE / "ir" / "attrs.def")["PM_ATTR"]
    text_of = {row[0]: row[1].strip('"') for row in attributes.rows}
    for row in ops.rows:
        op = dict(zip(ops.columns, row, strict=True))
        yield [
            f"`{op['text'][1:-1]}`",
            operands(op["operands"][1:-1], op["names"][1:-1]),
            ", ".join(text_of[x] for x in re.findall(r"A\((\w+)\)", op["attrs"])),
            listed(op["needs"], "N"),
            op["doc"][1:-1].replace("|", "\\|"),
        ]


def page():
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = re.search(r"\n## .*", rest, re.S)
    lines = ["| op | operands | attributes | needs | |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows()]
    lines = [re.sub(r" +\|", " |", line) for line in lines]
    if not rest:
        before = before.rstrip("\n") + "\n\n"
    return before + BEGIN + HEAD + "\n" + "\n".join(lines) + "\n" + (after[0] if after else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
