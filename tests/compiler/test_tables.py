"""The tables of the core, csrc/**/*.def: a column that nobody reads is not there."""

import re
import tokenize

import op_reference
import pytest
import tables

import pallas_mgpu as plgpu
from pallas_mgpu import lax

SOURCES = {p: p.read_text() for p in tables.CORE.rglob("*") if p.suffix in (".c", ".h")}
PACKAGE = tables.CORE.parent / "pallas_mgpu"
TABLES = [
    (path.name, macro, table)
    for path, found in tables.every().items()
    for macro, table in found.items()
]
# columns that pages of the documentation are made from, or compared with
ON_PAGES = {("PM_OP", "doc"): op_reference.rows, ("PM_ENV", "meaning"): "test_environment_table"}


def uses(macro, column):
    """What the expansions of a macro make of its column: the fields that it initialises, and other
    texts that contain it."""
    fields, others = set(), []
    for text in SOURCES.values():
        for parameters, body in tables.definitions(text).get(macro, []):
            parameter = parameters[column]
            item = rf"(?:\{{[^{{}}]*|[\w# ]*?){re.escape(parameter)}\b"
            for m in re.finditer(rf"\.(\w+) = {item}|{re.escape(parameter)}\b", body):
                fields.add(m[1]) if m[1] else others.append(body)
    return fields, others


def is_read(field):
    """Does anything but an initialiser of a table mention the field?"""
    mention = re.compile(rf"(?:->|[\w\])]\.){field}\b")
    return any(mention.search(text) for text in SOURCES.values())


@pytest.mark.parametrize("file, macro, table", TABLES, ids=lambda x: x if type(x) is str else "")
def test_columns_have_readers(file, macro, table):
    assert table.rows and all(len(row) == len(table.columns) for row in table.rows)
    for k, column in enumerate(table.columns):
        if (macro, column) in ON_PAGES:
            continue
        fields, others = uses(macro, k)
        assert others or any(map(is_read, fields)), f"{file}: nobody reads {macro}'s {column}"


def test_effects_have_readers():
    """Every E_ bit of ops.def is tested somewhere."""
    [of_ops] = [table for _, macro, table in TABLES if macro == "PM_OP"]
    column = of_ops.columns.index("effects")
    bits = set(re.findall(r"E_\w+", " ".join(row[column] for row in of_ops.rows)))
    readers = "".join(text for path, text in SOURCES.items() if path.suffix == ".c")
    assert len(bits) > 5
    assert {bit for bit in bits if not re.search(rf"\b{bit}\b", readers)} == set()


def numbers_in(path):
    """Numbers in the code of a file, not in its comments and texts."""
    if path.suffix == ".py":
        with path.open("rb") as f:
            return {t.string for t in tokenize.tokenize(f.readline) if t.type == tokenize.NUMBER}
    text = re.sub(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"', " ", path.read_text(), flags=re.S)
    return set(re.findall(r"\b\d+", text))


def test_limits_of_gpus_stand_in_one_table():
    """Shared memory and SMs of targets are in no other file."""
    [targets] = [table for _, macro, table in TABLES if macro == "PM_TARGET"]
    columns = [targets.columns.index(name) for name in ("smem", "sms")]
    limits = {row[k] for row in targets.rows for k in columns}
    limits = {n for n in limits if int(n) > 128}  # others mean something else
    assert {"232448", "132"} <= limits
    files = [*SOURCES, *(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".h", ".cpp"))]
    assert len(files) > 300
    assert not {path.name: n for path in files if (n := numbers_in(path) & limits)}


def test_a_column_without_reader_is_found():
    """The search itself: a macro whose column goes to a field that nobody reads."""
    assert not is_read("no_such_field") and is_read("known_to")
    [of_ops] = [table for _, macro, table in TABLES if macro == "PM_OP"]
    fields, others = uses("PM_OP", of_ops.columns.index("known_to"))
    assert fields == {"known_to"} and not others


def test_reference_of_ops_is_fresh():
    assert op_reference.page() == op_reference.PAGE.read_text(encoding="utf-8"), (
        "run python tests/compiler/op_reference.py"
    )


def test_messages_name_what_users_wrote():
    [of_names] = [table for _, macro, table in TABLES if macro == "PM_OP_NAME"]
    public = {"ref": plgpu.Ref, **vars(plgpu.ext), **vars(lax), **vars(plgpu)}
    for _, name in of_names.rows:
        found, *members = name.strip('"').split(".")
        found = public[found]
        for member in members:
            found = getattr(found, member)
