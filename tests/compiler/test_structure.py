"""The shape of the source tree: imports, sizes, and which folder of C may include which.

Each rule is a function from a folder to what breaks it; `test_rules_find_what_breaks_them` runs all
of them on a tree that breaks every one."""

import ast
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_LINES, MOST_COLUMNS, LONGEST_FUNCTION = 1500, 100, 100
MOST_NAMED = 350


# What each folder of csrc may include, beside its own files.
BELOW = {
    "base": (),
    "ir": ("base",),
    "passes": ("base", "ir"),
    "cuda": ("base", "ir", "passes"),
    "interp": ("base", "ir", "passes"),
    "runtime": ("base", "ir", "passes", "cuda"),
    "python": ("base", "ir", "passes", "cuda", "interp", "runtime"),
}


def modules(root):
    """{name: file} of a package's modules; an extension is known by its stub."""
    found = {}
    for file in [*root.rglob("*.pyi"), *root.rglob("*.py")]:
        name = ".".join([root.name, *file.relative_to(root).with_suffix("").parts])
        found[name.removesuffix(".__init__")] = file
    return found


def imported(file, name, known):
    """The modules that the import statements of a file name, in the whole of it."""
    package = name if file.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            above = above[: len(above) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for a in node.names:
                member = f"{source}.{a.name}"
                yield member if member in known else source


def circles_of(edges):
    """Sets of nodes that reach one another. `edges`: node -> the nodes that it leads to."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return [c for c in found if len(c) > 1]


def call_circles(root):
    """Folder of csrc -> sets of its .c files of which each mentions functions or data that another
    defines. Names that only an expansion of a table makes (pm_cuda_ADD) are not seen."""
    definition = re.compile(
        r"^(?!static\b|typedef\b|extern\b|return\b|#)[a-z_][\w *]*?\b(\w+)"
        r"(?:\([^;{}]*\)\s*\{|(?:\[\w*\])?\s*[=;])",
        re.M,
    )
    nothing = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
    circles = {}
    for folder in sorted(d for d in root.iterdir() if d.is_dir()):
        texts = {f.stem: nothing.sub(" ", f.read_text()) for f in folder.glob("*.c")}
        home = {name: f for f, text in texts.items() for name in definition.findall(text)}
        edges = {
            f: {home[w] for w in re.findall(r"\w+", text) if w in home} - {f}
            for f, text in texts.items()
        }
        found = circles_of(edges)
        if found:
            circles[folder.name] = found
    return circles


def import_circles(root):
    """Chains of modules that import one another."""
    known = modules(root)
    edges = {
        name: {m for m in imported(file, name, known) if m in known and m != name}
        for name, file in known.items()
        if file.suffix == ".py"
    }
    done, chain, circles = set(), [], []

    def visit(name):
        if name in chain:
            circles.append(" -> ".join([*chain[chain.index(name) :], name]))
        elif name not in done:
            chain.append(name)
            for other in sorted(edges.get(name, ())):
                visit(other)
            done.add(chain.pop())

    for name in sorted(edges):
        visit(name)
    return circles


def inner_imports(root):
    """Import statements in the bodies of functions."""
    found = set()
    for name, file in modules(root).items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                found |= {f"{name}:{n.lineno}: {ast.unparse(n)}" for n in inner}
    return sorted(found)


def long_functions(root):
    """Qualified names of functions with too many lines."""
    found = set()

    def visit(node, name):
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            named = (
                f"{name}.{child.name}" if is_function or isinstance(child, ast.ClassDef) else name
            )
            if is_function and child.end_lineno - child.lineno >= LONGEST_FUNCTION:
                found.add(named)
            visit(child, named)

    for name, file in modules(root).items():
        visit(ast.parse(file.read_text(encoding="utf-8")), name)
    return found


def long_c_functions(root):
    """The same of C: from a line that begins a definition to a brace in the first column."""
    found = []
    for file in sorted([*root.rglob("*.c"), *root.rglob("*.h")]):
        lines = file.read_text(encoding="utf-8").splitlines()
        start = None
        for k, line in enumerate(lines):
            if re.match(r"(?!typedef|enum|struct|union|extern)[A-Za-z].*\(", line):
                start = k
            if line.startswith("}"):
                if line == "}" and start is not None and k - start >= LONGEST_FUNCTION:
                    found.append(f"{file}:{start + 1}")
                start = None
    return found


def sources(root):
    kinds = ("*.py", "*.pyi", "*.c", "*.cpp", "*.h", "*.cuh")  # the rows of tables (.def) are lines
    return sorted(file for kind in kinds for file in root.rglob(kind))


def long_files(root):
    return [f for f in sources(root) if f.read_text(encoding="utf-8").count("\n") > MOST_LINES]


def long_lines(root):
    return [
        f"{file}:{k}"
        for file in sources(root)
        for k, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]


def wrong_includes(root):
    """Files that include what lies above their folder, or Python.h outside of python/."""
    found = []
    for file in sources(root):
        folder = file.relative_to(root).parts[0]
        for name in re.findall(r'#\s*include\s+[<"]([^>"]+)[>"]', file.read_text(encoding="utf-8")):
            other = Path(os.path.normpath(file.parent / name))
            other = other.relative_to(root).parts[0] if root in other.parents else folder
            if name == "Python.h":
                other = "python"
            if other not in {folder, *BELOW[folder]}:
                found.append(f"{folder}/{file.name}: {name}")
    return found


def test_no_import_circle():
    assert not import_circles(ROOT / "pallas_mgpu")


def test_imports_stand_at_the_top():
    assert not inner_imports(ROOT / "pallas_mgpu")


def test_functions_are_short():
    assert not long_functions(ROOT / "pallas_mgpu"), f"longer than {LONGEST_FUNCTION} lines"
    assert not long_c_functions(ROOT / "csrc"), f"longer than {LONGEST_FUNCTION} lines"


@pytest.mark.parametrize("folder", ["pallas_mgpu", "csrc"])
def test_files_and_lines_are_short(folder):
    assert not long_files(ROOT / folder)
    assert not long_lines(ROOT / folder)


def test_folders_include_what_is_below_them():
    assert (ROOT / "csrc" / "python" / "module.h").read_text().count("#include <Python.h>") == 1
    assert not wrong_includes(ROOT / "csrc")


def test_files_of_a_folder_call_one_way():
    """What is below in a folder does not call what is above it."""
    assert not call_circles(ROOT / "csrc")


def named_ops(root):
    """Mentions of single ops: opcodes, and functions of an op but for their definitions."""
    mention = re.compile(
        r"\bPM_OP_[A-Z0-9_]+"
        r"|\bpm_cuda_[A-Z0-9_]+\b(?!\(pm_gen \*e, pm_opid op\))"
        r"|\bpm_vm_[A-Z][A-Z0-9_]+\b(?!\s*= \{)"
    )
    return [name for file in sources(root) for name in mention.findall(file.read_text())]


def test_single_ops_are_rarely_named():
    """What passes, generator and interpreter know of ops stands in tables, not in switches."""
    folders = [ROOT / "csrc" / folder for folder in ("ir", "passes", "cuda", "interp")]
    assert 0 < sum(len(named_ops(folder)) for folder in folders) <= MOST_NAMED
    for file in sources(ROOT / "csrc"):  # nor do opcodes have other names
        assert not re.search(r"#define \w+ PM_OP_|^\s*\w+ = PM_OP_\w+,", file.read_text(), re.M)


def test_ptx_is_printed_by_one_file():
    """Its text is in the device functions, and in what ptx.c prints for a program."""
    statement = re.compile(r"\basm\s*(volatile)?\s*\(")
    files = [f for f in sources(ROOT / "csrc") if f.suffix != ".cuh"]
    assert [f.name for f in files if statement.search(f.read_text())] == ["ptx.c"]
    assert not any("__asm" in f.read_text() for f in files)


def test_the_emulated_machine_shares_nothing():
    """It judges what csrc generates, so it knows no header of it, nor does csrc one of its own."""
    machine = ROOT / "pallas_mgpu" / "machine"
    own = {file.name for file in machine.iterdir()}
    quoted = re.compile(r'^\s*#\s*include\s+"(.*)"', re.M)
    for file in [*machine.glob("*.cpp"), *machine.glob("*.h")]:
        assert set(quoted.findall(file.read_text())) <= own, file
    for file in sources(ROOT / "csrc"):
        assert not re.search("include.*machine/", file.read_text()), file


def test_rules_find_what_breaks_them(tmp_path):
    package, c = tmp_path / "package", tmp_path / "c"
    files = {
        package / "__init__.py": "from . import a\n",
        package / "a.py": "from .sub import b\nfrom ._core import x\n",
        package / "_core.pyi": "x: int\n",
        package / "sub" / "__init__.py": "",
        package / "sub" / "b.py": "class C:\n    def f(self):\n        from ..a import g\n",
        package / "long.py": "class C:\n    def f(self):\n" + "        f()\n" * LONGEST_FUNCTION,
        package / "wide.py": "#" * (MOST_COLUMNS + 1) + "\n",
        c / "python" / "x.h": "#include <Python.h>\n",
        c / "base" / "a.c": "#include <Python.h>\n",
        c / "base" / "b.c": '#include "../python/x.h"\n',
        c / "base" / "c.h": "\n" * (MOST_LINES + 1),
        c / "ir" / "low.c": "int low(int x) { return x; } /* for high */\n",
        c / "ir" / "high.c": "int high(int x) {\n  return low(x) + other(x);\n}\n",
        c / "ir" / "named.c": "const handler pm_vm_ADD = {PM_OP_ADD, &pm_vm_ADD};\n",
        c / "ir" / "switch.c": "pm_code pm_cuda_MUL(pm_gen *e, pm_opid op) {\n  PM_OP_MUL;\n}\n",
        c / "ir" / "long.c": "struct x {\n  int y;\n};\n\nint f(int x,\n      int y) {\n"
        + "  x++;\n" * LONGEST_FUNCTION
        + "}\n",
        c / "ir" / "other.c": "int other(int x) {\n  return x ? high(x - 1) : 0;\n}\n",
    }
    for file, text in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert import_circles(package) == ["package.a -> package.sub.b -> package.a"]
    assert inner_imports(package) == ["package.sub.b:3: from ..a import g"]
    assert long_functions(package) == {"package.long.C.f"}
    assert long_c_functions(c) == [f"{c / 'ir' / 'long.c'}:5"]
    assert long_lines(package) == [f"{package / 'wide.py'}:1"]
    assert wrong_includes(c) == ["base/a.c: Python.h", "base/b.c: ../python/x.h"]
    assert long_files(c) == [c / "base" / "c.h"]
    assert call_circles(c) == {"ir": [{"high", "other"}]}
    assert named_ops(c) == ["PM_OP_ADD", "pm_vm_ADD", "PM_OP_MUL"]
