"""Does the suite notice a broken generator? Breaks it on purpose, one small change at a time.

`python tests/mutants/mutants.py [--only NAME ...] [--jobs N] [--list]`

Each mutant is a pattern in a function of a source file and what replaces it; renames and new lines
leave it alone (mutant_lists/find.py). It is applied to a copy of the tree, built incrementally, and
the tests run until the first one fails: those named with the mutant, then the rest of the suite,
all of it without a GPU. In the end the tests that noticed something run once more without a mutant:
those that fail then have noticed nothing. Prints a table and the share of noticed mutants; below
95 % it fails. A pattern that is not in its function exactly once is stale and stops the run before
it begins. Tests or a build that do not start at all are an error of the mutant. The mutants are in
mutant_lists/."""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutant_lists import (  # noqa: F401 - most fill MUTANTS
    ALL,
    MUTANTS,
    ROOT,
    calls,
    copies,
    devices,
    dtypes,
    find,
    generator,
    hopper,
    lanes,
    parts,
    patterns,
    products,
    shapes,
    tensor,
    triton,
)

LIMIT = 300  # seconds for the tests of one mutant
# Of the tests that come first, those that have several ways go the one that sees most.
FIRST_WAY = ["-k", "not interpret"]
INTERPRETED = ["-k", "not host"]
CRASH = "or one after it: signal"
PYTEST = "-m pytest -q --no-header -p no:cacheprovider --tb=no -rfE -m".split() + ["not gpu"]


class Broken(Exception):
    """The mutant itself is no good."""


def mutated(name, root=ROOT):
    """(file, its text with the mutant). The function may have moved to another file."""
    file, function, pattern, replacement, _ = MUTANTS[name]
    for path in find.files_with(root, file, function):
        text, language = path.read_text(), find.language_of(path.name)
        return path, find.mutate(text, language, function, pattern, replacement)
    raise find.Stale(f"no file beside {file} has a function {function}")


def stale(names=MUTANTS):
    """name -> why it has no place; and tests that are not there."""
    out = {}
    for name in names:
        try:
            mutated(name)
        except find.Stale as e:
            out[name] = str(e)
        for test in MUTANTS[name][-1]:
            path, _, function = test.partition("[")[0].partition("::")
            if function and f"def {function}(" not in (ROOT / "tests" / path).read_text():
                out[name] = f"there is no test {test}"
    return out


def copy_tree(to):
    """What the build and the tests need, with times, so that little is compiled."""
    skip = shutil.ignore_patterns(
        ".git", "__pycache__", ".pytest_cache", "*-sanitized", "lib.*", "shared", "*.egg-info"
    )
    shutil.copytree(ROOT, to, ignore=skip, symlinks=True)


def run(tree, *command, limit):
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *map(str, command)]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return "", None


def build(tree):
    out, code = run(tree, "setup.py", "build_ext", "--inplace", limit=600)
    if code != 0:
        raise Broken(f"it does not compile:\n{out[-2000:]}")


def failures(out):
    """Their names; where a parameter holds blanks, the function's."""
    names = re.findall(r"^(?:FAILED|ERROR) tests/(\S+)(.*)", out, re.M)
    return [n if "[" not in n or n.endswith("]") else n.partition("[")[0] for n, _ in names]


def first_failure(tree, tests, limit, *more):
    """(the test that fails first or None, why there is none). Too slow is no failure."""
    files = [*(f"tests/{t}" for t in tests), *more]
    out, code = run(tree, *PYTEST, "-x", *files, limit=limit)
    if code is None:
        return None, f"not in {limit} s"
    if code in (0, 5):  # 5: none of them was selected
        return None, ""
    failed = failures(out)
    if code == 1 and failed:
        return failed[0], ""
    if -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT):
        return f"{tests[0]} {CRASH} {-code}", ""
    raise Broken(f"pytest ends with {code}:\n{out[-2000:]}")


def fail_anyway(tree, tests):
    tests = [f"tests/{t}" for t in sorted(tests) if CRASH not in t]
    out, code = run(tree, *PYTEST, *tests, limit=None) if tests else ("", 0)
    if code not in (0, 1):
        raise SystemExit(f"pytest ends with {code} without a mutant:\n{out[-2000:]}")
    return set(failures(out))


def attempt(name, tree):
    """(noticed by or None, why not, seconds)"""
    tests, start = MUTANTS[name][-1], time.time()
    path, text = mutated(name, tree)
    file = str(path.relative_to(tree))
    original, times = path.read_text(), path.stat()
    try:
        path.write_text(text)
        build(tree)
        first = INTERPRETED if file.startswith("csrc/interp") else FIRST_WAY
        for group, more in ((tests, first), (ALL, ())):
            by, why = first_failure(tree, group, LIMIT, *more)
            if by or why:
                return by, why, time.time() - start
        return None, "", time.time() - start
    finally:
        path.write_text(original)
        if file.startswith("pallas_mgpu"):
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutants whose names hold this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = [n for n in MUTANTS if not options.only or any(o in n for o in options.only)]
    if options.list:
        print("\n".join(f"{n:44} {MUTANTS[n][0]}" for n in names))
        return 0
    if lost := stale(names):
        raise SystemExit("\n".join(f"stale mutant {name}: {why}" for name, why in lost.items()))
    rows, bad, begin = {}, [], time.time()
    print_lock, trees = threading.Lock(), queue.Queue()

    def one(name):
        tree = trees.get()
        try:
            by, why, seconds = attempt(name, tree)
            text = by or why or "SURVIVES"
        except Broken as e:
            by, text, seconds = None, f"NO MUTANT: {e}", 0
            bad.append(name)
        finally:
            trees.put(tree)
        with print_lock:
            rows[name] = by
            print(f"{name:44} {text:76} {seconds:6.1f}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        for k in range(options.jobs):
            tree = Path(directory) / str(k) / "tree"
            copy_tree(tree)
            build(tree)
            trees.put(tree)
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(one, names))
        build(tree)
        void = fail_anyway(tree, {by for by in rows.values() if by})
    for name, by in rows.items():
        if by in void:
            print(f"{name}: {by} fails without the mutant as well")
            rows[name] = None
    print(f"\n| {'file':32} | mutants | noticed |\n|{'-' * 34}|--------:|--------:|")
    for file in dict.fromkeys(MUTANTS[n][0] for n in names):
        of = [rows[n] for n in names if MUTANTS[n][0] == file]
        print(f"| {file:32} | {len(of):7} | {sum(by is not None for by in of):7} |")
    lost = [n for n, by in rows.items() if not by and n not in bad]
    noticed = sum(by is not None for by in rows.values())
    share = 100 * noticed / max(len(names), 1)
    print(f"\n{noticed} of {len(names)} noticed: {share:.1f} %, {time.time() - begin:.0f} s")
    print(f"survive: {', '.join(lost) or 'none'}")
    if bad:
        print(f"no mutants: {', '.join(bad)}")
    return 0 if share >= 95 and not bad else 1


if __name__ == "__main__":
    sys.exit(main())
