"""What type checkers say of users' files: nothing about right lines, and where mistakes are.

typing/right.py also runs, so that its lines are right; typing/wrong.py marks its mistakes. The
stubs name what is there, with the parameters that it has, and say Any nowhere."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ext, lax, nn, ops, pl, tree
from pallas_mgpu import numpy as jnp

HERE = Path(__file__).parent / "typing"
PACKAGE = Path(plgpu.__file__).parent
CHECKERS = {
    "mypy": ["mypy", "--strict", "--no-error-summary", "--cache-dir"],
    "pyright": ["pyright", "--pythonpath", sys.executable],
}
STUBS = {
    plgpu: "__init__",
    pl: "pl",
    lax: "lax",
    jnp: "numpy",
    nn: "nn",
    tree: "tree",
    ext: "ext",
    ops: "ops/__init__",
}


def report(checker, file, tmp_path):
    pytest.importorskip(checker)
    command = [sys.executable, "-m", *CHECKERS[checker]]
    if checker == "mypy":
        command.append(str(tmp_path / "cache"))
    # an editable install is an import hook, which mypy does not follow
    env = dict(os.environ, MYPYPATH=str(PACKAGE.parent))
    done = subprocess.run([*command, file], cwd=HERE, env=env, text=True, capture_output=True)
    return done.stdout + done.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_right_lines_are_accepted(checker, tmp_path):
    text = report(checker, "right.py", tmp_path)
    assert "right.py:" not in text and "error:" not in text, text


def test_right_lines_run():
    done = subprocess.run([sys.executable, HERE / "right.py"], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("checker", CHECKERS)
def test_mistakes_are_reported_at_their_line(checker, tmp_path):
    text = report(checker, "wrong.py", tmp_path)
    found = {int(n) for n in re.findall(r"wrong\.py:(\d+)", text)}
    lines = enumerate((HERE / "wrong.py").read_text().splitlines(), 1)
    planted = {n for n, line in lines if line.endswith("# mistake")}
    assert len(planted) >= 60
    assert len(planted & found) >= len(planted) - 3, f"not found: {sorted(planted - found)}\n{text}"
    assert found <= planted, f"right, but reported: {sorted(found - planted)}\n{text}"


def definitions(stub):
    """Name to definition; of overloads the first."""
    found = {}
    for node in ast.parse((PACKAGE / f"{stub}.pyi").read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.AnnAssign):
            found[node.target.id] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname: node for a in node.names if a.asname and a.asname == a.name}
    return {name: node for name, node in found.items() if not name.startswith("_")}


@pytest.mark.parametrize("module", STUBS, ids=STUBS.values())
def test_stubs_name_what_is_there(module):
    typed = definitions(STUBS[module])
    assert not [name for name in typed if not hasattr(module, name)]
    public = {name for name in dir(module) if not isinstance(getattr(module, name), ModuleType)}
    assert not public - set(typed)


@pytest.mark.parametrize("module", STUBS, ids=STUBS.values())
def test_stubs_have_the_parameters(module):
    overloaded = {"atleast_1d", "atleast_2d", "atleast_3d", "ds", "kernel", "debug_print"}
    differ = {}
    for name, node in definitions(STUBS[module]).items():
        if not isinstance(node, ast.FunctionDef) or name in overloaded:
            continue
        typed = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        parameters = inspect.signature(getattr(module, name)).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            continue
        there = [
            p.name
            for p in parameters
            if p.kind is not p.VAR_POSITIONAL and not p.name.startswith("_")
        ]
        if module is ops:
            typed = [name for name in typed if name not in ("out", "stream")]  # of every function
        if typed != there:
            differ[name] = typed, there
    assert not differ


def test_stubs_say_any_nowhere():
    for stub in [*STUBS.values(), "_typing"]:
        assert not re.search(r"\bAny\b", (PACKAGE / f"{stub}.pyi").read_text()), stub
    core = ast.parse((PACKAGE / "_core.pyi").read_text())
    for node in core.body:
        if getattr(node, "name", "") in ("DeviceArray", "Array", "Ref", "Lowered", "device_put"):
            assert not re.search(r"\bAny\b", ast.unparse(node)), node.name
