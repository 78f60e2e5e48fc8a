"""The Python blocks of docs/frameworks.md: those under the heading of a library are one program."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent.parent / "docs" / "frameworks.md"


@pytest.mark.parametrize("library, heading", [("torch", "PyTorch"), ("jax", "JAX")])
def test_blocks(library, heading, monkeypatch):
    pytest.importorskip(library)
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "interpret")
    text = PAGE.read_text()
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.S | re.M)[1]
    blocks = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(blocks) >= 2
    names = {}
    for k, block in enumerate(blocks):
        exec(compile(block, f"<{heading} block {k}>", "exec"), names)  # noqa: S102


def test_tables_name_what_is_there():
    """The functions of the tables are those of the modules."""
    text = PAGE.read_text()
    pt = pytest.importorskip("pallas_mgpu.torch")
    table = re.search(r"\| function \| gradients of .*?\n\n", text, re.S)[0]
    rows = [row.split("|")[1] for row in table.strip().splitlines()[2:]]
    named = [x for row in rows for x in re.findall(r"`(\w+)`", row)]
    rest = re.search(r"`pallas_mgpu.torch.AdamW` is(.*?)are those\s+of", text, re.S)[1]
    assert sorted([*named, *re.findall(r"`(\w+)`", rest), "AdamW"]) == sorted(pt.__all__)
    pj = pytest.importorskip("pallas_mgpu.jax")
    row = re.search(r"`pallas_mgpu.jax` has (.*?) with derivatives", text)[1]
    assert sorted(re.findall(r"`(\w+)`", row)) == sorted(pj.__all__)
