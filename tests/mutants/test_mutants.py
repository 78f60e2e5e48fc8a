"""The mutants of mutants.py have their places, also after renames; running them takes hours."""

import functools
import re

import mutants
import pytest
from mutant_lists import find


def test_every_mutant_has_its_place():
    assert not mutants.stale()


def other(name):
    return name if name.isupper() else f"{name}_x"


@functools.cache
def renamed(path):
    """The text of a file with all names that may change changed."""
    text, out, at = path.read_text(), [], 0
    for token in find.tokens(text, find.language_of(path.name)):
        if token.is_name:
            out += [text[at : token.start], other(token.text)]
            at = token.end
    return "".join(out) + text[at:]


@pytest.mark.long
def test_renames_are_free():
    """Local names, fields, functions that the code calls and names in generated text are others,
    and so is the function's own, which the list of mutants follows."""
    for name, (_, function, pattern, replacement, _) in mutants.MUTANTS.items():
        path, _ = mutants.mutated(name)
        language, function = find.language_of(path.name), ".".join(map(other, function.split(".")))
        find.mutate(renamed(path), language, function, pattern, replacement)


C = """
static int count(const list *l, int most) {
  int n = 0; /* how many */
  for (const item *i = l->first; i && n < most; i = i->next) n++;
  put(l, "%d of "
         "them;", n);
  return n;
}
static int other(int n) { return n < 3; }
enum { LIMIT = 5, MORE };
ROW(name, 7)
"""


@pytest.mark.parametrize(
    "function, pattern, replacement, want",
    [
        ("count", "n < most", "n <= most", "n <= most"),
        ("count", "a < b", "a <= b", "n <= most"),  # other names
        ("count", 'put(l, "%d of them;", n);', "", "\n  \n  return n;"),  # divided literals
        ("count", '"%d of us;"', '"%d of us!"', '"%d of them!", n'),  # names in generated text
        ("LIMIT", "LIMIT = 5", "LIMIT = 6", "LIMIT = 6"),
        ("name", "7", "8", "ROW(name, 8)"),
        ("other", "x < 3", "x < 4", "return n < 4"),
    ],
)
def test_what_patterns_match(function, pattern, replacement, want):
    assert want in find.mutate(C, "c", function, pattern, replacement)


@pytest.mark.parametrize(
    "function, pattern, why",
    [
        ("count", "n <= most", "nothing in count"),
        ("count", "x->y", "2 places in count"),
        ("count", "a < a", "nothing"),
        ("counts", "n < most", "there is no counts"),
    ],
)
def test_what_is_stale(function, pattern, why):
    with pytest.raises(find.Stale, match=re.escape(why)):
        find.find(C, "c", function, pattern)
