"""Finds the place of a mutant: in a function, by a pattern that renames leave alone.

A pattern is a piece of source text. It is compared token by token, so that line breaks, comments
and how string literals are divided do not count. Its names match as they are; where they are not
found so, other names may stand in their place, each name for one: first those that are not all
upper case, then all. Names in the strings of C files, which hold generated text, are names, too.
So a pattern goes stale only where the code that it shows has changed.

A function is named as in the source, a method with its class (`Runner.call`). What is outside of
functions belongs to a definition: a variable, an enum's first constant, a macro, or a row of a
table, `ROW(name, ...)`, by that name."""

import ast
import builtins
import functools
import keyword
import re
from pathlib import Path
from typing import NamedTuple

C_WORDS = set(
    """if else for while do return break continue switch case default goto sizeof static const
    struct enum union typedef int char bool void unsigned signed long short float double inline
    true false NULL template typename asm volatile extern size_t ptrdiff_t FN u8 u16 u32 u64 i8 i16
    i32 i64 f16 f32 f64 bf16 defined include define ifdef ifndef elif endif""".split()
) | {f"{u}int{n}_t" for u in ("", "u") for n in (8, 16, 32, 64)}
PYTHON_WORDS = {*keyword.kwlist, *dir(builtins), "self"}

QUOTE = r"[\"']"
OPERATOR = r"->|\+\+|--|<<=|>>=|\.\.\.|\*\*|//|::|:=|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|[^\s\w]"
NUMBER = r"\.?\d(?:[eE][-+]\d|[\w.])*"
CODE = re.compile(
    rf"(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>\w*(?:{QUOTE}))|(?P<name>[^\W\d]\w*)"
    rf"|(?P<fixed>{NUMBER}|{OPERATOR})",
    re.DOTALL,
)
PYTHON_CODE = re.compile(
    CODE.pattern.replace(r"//[^\n]*|/\*.*?\*/", r"\#[^\n]*").replace(
        QUOTE, rf"\"{{3}}|'{{3}}|{QUOTE}"
    ),
    re.DOTALL,
)
IN_STRING = re.compile(
    rf"(?P<fixed>\\.|%%|%[-\d.*]*(?:ll|l|z)?[a-zA-Z]|\s+|{NUMBER})|(?P<name>[^\W\d]\w*)"
    rf"|(?P<operator>{OPERATOR})",
    re.DOTALL,
)


class Token(NamedTuple):
    text: str
    start: int
    end: int
    is_name: bool  # one that may change


class Stale(Exception):
    """A mutant has no place, or several."""


# ---- tokens --------------------------------------------------------------------------------------


def string_end(text, at, quote, escapes=True):
    while not text.startswith(quote, at):
        at += 2 if text[at] == "\\" and escapes else 1
    return at


def language_of(file):
    return "python" if file.endswith(".py") else "device" if file.endswith(".cuh") else "c"


@functools.lru_cache(2000)
def tokens(text, language):
    """All tokens; literals that follow each other count as one."""
    python, words = language == "python", PYTHON_WORDS if language == "python" else C_WORDS
    code, out, at = PYTHON_CODE if python else CODE, [], 0
    while found := code.search(text, at):
        at = found.end()
        if found["name"]:
            out.append(Token(found[0], found.start(), at, found[0] not in words))
        elif found["fixed"]:
            out.append(Token(found[0], found.start(), at, False))
        elif found["string"]:
            quote = found[0].lstrip("rbfuRBFU")
            end = string_end(text, at, quote)
            if out and out[-1].text == quote and not python:
                out.pop()
            else:
                out.append(Token(found[0], found.start(), at, False))
            for part in IN_STRING.finditer(text, at, end):
                renamed = language == "c" and part["name"] and part[0] not in words
                out.append(Token(part[0], part.start(), part.end(), bool(renamed)))
            at = end + len(quote)
            out.append(Token(quote, end, at, False))
    return tuple(out)


@functools.lru_cache(2000)
def tokens_between(text, language, start, end):
    return tuple(t for t in tokens(text, language) if start <= t.start and t.end <= end)


# ---- functions and definitions -------------------------------------------------------------------


def closing(found, k):
    """The index of the bracket that closes the one at k. Of #if and #else each may open it."""
    depth, outside = 0, []
    for j in range(k, len(found)):
        directive = found[j + 1].text if found[j].text == "#" and j + 1 < len(found) else ""
        if directive.startswith("if"):
            outside.append(depth)
        elif directive == "else" and outside:
            depth = outside[-1]
        elif directive == "endif" and outside:
            outside.pop()
        depth += (found[j].text in ("(", "[", "{")) - (found[j].text in (")", "]", "}"))
        if not depth:
            return j
    return len(found) - 1


def without_strings(found):
    """Tokens of code; quotes stand for literals."""
    out, inside = [], None
    for token in found:
        if inside:
            if token.text == inside and not token.is_name:
                inside = None
        else:
            out.append(token)
            if token.text in ('"', "'"):
                inside = token.text
    return out


def c_functions(text, language):
    """(name, start, end) of functions and of definitions outside of them."""
    code = without_strings(tokens(text, language))
    first, k = 0, 0  # tokens of what is being defined
    while k < len(code):
        here = code[k].text
        if here == "#":
            line_end = re.compile(r"(?<!\\)\n|\Z").search(text, code[k].start).start()
            end = k
            while end < len(code) and code[end].start < line_end:
                end += 1
            if code[k + 1].text == "define":
                yield code[k + 2].text, code[k].start, line_end
            first = k = end
        elif here == "(":
            end = closing(code, k)
            name = code[k - 1].text
            after = code[end + 1].text if end + 1 < len(code) else ";"
            if after == "{" and name not in C_WORDS:
                close = closing(code, end + 1)
                yield name, code[first].start, code[close].end
                first = k = close + 1
            elif name.isupper() and k == first + 1:  # a row of a table
                row = re.compile(r"\W*(\w+)").match(text, code[k].end)
                yield row[1] if row else "", code[first].start, code[end].end
                first = k = end + 1
            else:
                k = end + 1
        elif here == "{":
            heads = [t.text for t in code[first:k]]
            if "struct" in heads and "=" not in heads or "extern" in heads:  # methods inside
                first = k = k + 1
                continue
            end = closing(code, k)
            names = [t.text for t in code[first:k] if t.is_name]
            enum = "enum" in heads
            yield (
                code[k + 1].text if enum else names[-1] if names else "",
                *(
                    code[first].start,
                    code[end].end,
                ),
            )
            k = end + 1
        elif here in (";", "}"):
            first = k = k + 1
        else:
            k += 1


def python_functions(text):
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def span(node):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
        return lines[first - 1], lines[node.end_lineno]

    def walk(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield prefix + node.name, *span(node)
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                yield prefix + node.name, *span(node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Name):
                    yield prefix + target.id, *span(node)

    yield from walk(ast.parse(text).body, "")


@functools.lru_cache(2000)
def functions(text, language):
    """name -> [(start, end)]"""
    found = {}
    for name, *span in (
        python_functions(text) if language == "python" else c_functions(text, language)
    ):
        found.setdefault(name, []).append(tuple(span))
    return found


def files_with(root, file, function):
    """The file, if it has the function; else the others of its kind that have one of that name."""
    path = Path(root, file)
    if path.exists() and function in functions(path.read_text(), language_of(file)):
        return [path]
    beside = sorted(Path(root, Path(file).parts[0]).rglob(f"*{path.suffix}"))
    found = [p for p in beside if function in functions(p.read_text(), language_of(p.name))]
    return found if len(found) == 1 else []


# ---- patterns ------------------------------------------------------------------------------------

EXACT, LOWER, ALL = range(3)  # which names may be others


def match(pattern, found, at, level):
    """Names of the pattern -> names that stand for them; None: it is not there."""
    there, back = {}, {}
    for want, got in zip(pattern, found[at : at + len(pattern)]):
        if want.is_name != got.is_name:
            return None
        free = want.is_name and level > EXACT and (level == ALL or not want.text.isupper())
        if not free and want.text != got.text:
            return None
        if want.is_name and (
            there.setdefault(want.text, got.text) != got.text
            or back.setdefault(got.text, want.text) != want.text
        ):
            return None
    return there


def places(pattern, found, level):
    """[(index of the first token, names)]"""
    sure = next((k for k, token in enumerate(pattern) if not token.is_name), 0)
    first = pattern[sure]
    out = []
    for k in range(len(found) - len(pattern) + 1):
        if first.is_name or found[k + sure].text == first.text:
            names = match(pattern, found, k, level)
            out += [] if names is None else [(k, names)]
    return out


def find(text, language, function, pattern):
    """(start, end, names) of a pattern in a function."""
    spans = functions(text, language).get(function)
    if not spans:
        raise Stale(f"there is no {function}")
    wanted = tokens(pattern, language)
    for level in (EXACT, LOWER, ALL):
        got = []
        for start, end in spans:
            inside = tokens_between(text, language, start, end)
            for k, names in places(wanted, inside, level):
                got.append((inside[k].start, inside[k + len(wanted) - 1].end, names))
        if len(got) == 1:
            return got[0]
        if got:
            raise Stale(f"{len(got)} places in {function} match:\n{pattern}")
    raise Stale(f"nothing in {function} matches:\n{pattern}")


def mutate(text, language, function, pattern, replacement):
    """The text with what replaces the pattern, in which its names are those that were found."""
    start, end, names = find(text, language, function, pattern)
    out, at = [], 0
    for token in tokens(replacement, language):
        if token.is_name:
            out += [replacement[at : token.start], names.get(token.text, token.text)]
            at = token.end
    return text[:start] + "".join(out) + replacement[at:] + text[end:]
