"""Reads the tables of the core, csrc/**/*.def, as Python sees them: columns and rows."""

import re
from pathlib import Path
from typing import NamedTuple

CORE = Path(__file__).parent.parent.parent / "csrc"


class Table(NamedTuple):
    """One macro of a .def file: the names of its columns, and a list of texts for each row."""

    columns: list[str]
    rows: list[list[str]]


def arguments(text, at):
    """The arguments of the parenthesis at ``text[at]``, and where it ends."""
    depth, quoted, parts, start = 0, False, [], at + 1
    for k in range(at, len(text)):
        c = text[k]
        if c == '"' and text[k - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        if (c == "," and depth == 1) or depth == 0:
            parts.append(" ".join(text[start:k].split()))
            start = k + 1
        if depth == 0:
            return parts, k + 1
    raise ValueError(f"no end: {text[at : at + 80]}")


def definitions(text):
    """name -> (parameters, body) of the macros with parameters that a text defines; a name may have
    several."""
    found = {}
    joined = re.sub(r"\\\n", " ", text)
    for m in re.finditer(r"^[ \t]*#define (\w+)(?=\()", joined, re.M):
        parameters, end = arguments(joined, m.end())
        body = joined[end : joined.index("\n", end)]
        found.setdefault(m[1], []).append((parameters, body))
    return found


def substitute(body, parameters, values):
    of = dict(zip(parameters, values, strict=True))
    return re.sub(r'"[^"]*"|\b\w+\b', lambda m: of.get(m[0], m[0]), body)


def read(path):
    """macro -> Table, of a .def file. The comment at the top names the columns."""
    text = path.read_text()
    head = re.sub(r"\n \*  +", " ", text)
    macros = {
        m[1]: arguments(head, m.end())[0]
        for m in re.finditer(r"^(?:/| )\* (PM_\w+)(?=\()", head, re.M)
    }
    helpers = definitions(text)
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    code = re.sub(r"^[ \t]*#.*?(?<!\\)\n", "", code, flags=re.M | re.S)
    tables = {name: Table(columns, []) for name, columns in macros.items()}
    at = 0
    while m := re.compile(r"\b([A-Z_]+)\(").search(code, at):
        values, at = arguments(code, m.end() - 1)
        name = m[1]
        if name in helpers:
            (parameters, body) = helpers[name][0]
            body = substitute(body, parameters, values)
            name = re.search(r"(\w+)\(", body)[1]
            values, _ = arguments(body, body.index("("))
        if name in tables:
            tables[name].rows.append(values)
    return tables


def every():
    """path -> its tables."""
    return {path: read(path) for path in sorted(CORE.rglob("*.def"))}
