"""What notebooks show: kernels and lowered kernels as HTML, and errors."""

import html.parser
import inspect
import linecache
import re
import sys
import traceback
import types

import numpy as np
import pytest
from test_timeline import DEPTH, ROWS, kernel

import pallas_mgpu as plgpu
from pallas_mgpu import _core, ops
from pallas_mgpu.ops import matmul

F16, F32 = np.float16, np.float32
LOADS = "plgpu.copy_gmem_to_smem(a.at[:, pl.ds(k * STEP, STEP)], a_s.at[slot], full.at[slot])"


class Page(html.parser.HTMLParser):
    """Checks that tags are closed; collects the cells of tables and the tooltips of pictures."""

    ALONE = {"rect"}

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.titles, self.text = [], [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "title":
            self.titles.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if "title" in self.open:
            self.titles[-1] += data
        elif "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def lowered():
    a, b = np.zeros((ROWS, DEPTH), F16), np.zeros((DEPTH, ROWS), F16)
    return kernel(None).lower(a, b)


def test_lowered(lowered):
    """For a line of Python its ops, C++ and instructions; resources; everything escaped."""
    page = Page(lowered._repr_html_())
    head = next(r for r in page.rows if r[:1] == ["Python"])
    assert head == ["Python", "graph", "CUDA", "SASS"]
    (row,) = [r for r in page.rows if r[0].startswith(LOADS)]
    assert "test_timeline.py:" in row[0]
    assert "copy_gmem_to_smem %" in row[1] and "tma_load_2d(" in row[2] and "UTMALDG" in row[3]
    (row,) = [r for r in page.rows if r[0].startswith("plgpu.wgmma(acc")]
    assert "wgmma %" in row[1] and "wgmma_m64n128k16" in row[2] and "HGMMA" in row[3]
    facts = {r[0]: r[1] for r in page.rows if len(r) == 2}
    used = lowered.resources()
    assert facts["registers"] == str(used["registers"]) and facts["target"] == "sm_90a"
    assert facts["smem bytes"] == str(used["smem_bytes"])


def test_memory_map(lowered):
    """Every allocation at its bytes; nothing reaches beyond the kernel's memory."""
    titles = Page(lowered._repr_html_()).titles
    for name, first, size in (("a_s", 0, 32768), ("b_s", 32768, 32768), ("o_s", 65536, 32768)):
        (title,) = [t for t in titles if t.startswith(f"{name}:")]
        assert f"bytes {first} to {first + size - 1}, {size} bytes" in title
    assert any(t.startswith("full: barrier[2]") and "16 bytes" in t for t in titles)
    ends = [int(m[1]) for t in titles if (m := re.search(r"bytes \d+ to (\d+)", t))]
    assert max(ends) < lowered.resources()["smem_bytes"]


def test_layout_picture(lowered):
    """As WGMMA is defined: rows of 16 for each warp, pairs of columns in a lane."""
    titles = set(Page(lowered._repr_html_()).titles)
    assert "[0, 0]: warp 0, lane 0, register 0" in titles
    assert "[0, 1]: warp 0, lane 0, register 1" in titles
    assert "[17, 2]: warp 1, lane 5, register 0" in titles
    assert _core.layout_elements((64, 8), ("text", "wgmma"))[5][:2] == [10, 11]
    with pytest.raises(ValueError, match="layout"):
        _core.layout_elements((64, 8), ("text", "nonsense"))


def test_without_a_compiler(lowered, monkeypatch):
    """What cannot be made is left out, with the reason."""

    class Bare:
        def __init__(self, of):
            self.of = of

        def as_text(self, kind, **options):
            if kind == "sass":
                raise RuntimeError("no <nvdisasm>")
            return self.of.as_text(kind, **options)

        def resources(self):
            raise RuntimeError("no NVRTC")

    monkeypatch.setattr(_core, "Lowered", Bare)
    page = Page(sys.modules["pallas_mgpu._notebook"].html(Bare(lowered)))
    assert "No SASS: no <nvdisasm>" in page.text
    assert ["not compiled", "no NVRTC"] in page.rows


def test_kernels():
    k = kernel(None)
    page = Page(k._repr_html_())
    assert "product(a, b)" in page.text and "test_timeline.py:" in page.text
    names = list(inspect.signature(k.definition.body).parameters)[-len(k.definition.scratch) :]
    shown = [r for r in page.rows if r[0].startswith("scratch")]
    assert shown == [[f"scratch {n}", repr(x)] for n, x in zip(names, k.definition.scratch)]
    x = plgpu.ShapeDtypeStruct((8,), np.float32)
    kept = {"sums": plgpu.SMEM((4,), np.int32), "done": plgpu.Barrier()}
    for body, scratch, heads in (
        (lambda x, o, *, sums, done: None, kept, ["scratch sums", "scratch done"]),
        (lambda x, o, *refs: None, [*kept.values()], ["scratch"] * 2),
    ):
        page = Page(plgpu.kernel(body, out_type=x, scratch_types=scratch)._repr_html_())
        assert [r[0] for r in page.rows if r[0].startswith("scratch")] == heads


def test_sass_with_lines(lowered):
    assert "//## File" in lowered.as_text("sass", lines=True)
    assert "//## File" not in lowered.as_text("sass")


# ---- errors --------------------------------------------------------------------------------------

CELL = """\
import numpy as np
import pallas_mgpu as plgpu
def body(x, o):
    plgpu.named_scope(3)
def stuck(x, o, b):
    plgpu.barrier_wait(b)
def use(body, **options):
    kernel = plgpu.kernel(
        body, out_type=plgpu.ShapeDtypeStruct((128,), np.float32), interpret=True, **options
    )
    return kernel(np.zeros(128, np.float32))
def copied(x, o):
    o[...] = x[...]
"""


@pytest.fixture
def cell(monkeypatch):
    """A cell In[7] of a notebook, run; a stand-in for IPython says so."""
    name = "/tmp/ipykernel_12/345.py"
    linecache.cache[name] = len(CELL), None, CELL.splitlines(True), name
    shell = types.SimpleNamespace(
        compile=types.SimpleNamespace(
            format_code_name=lambda n: ("Cell", "In[7]") if n == name else None
        )
    )
    module = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", module)
    scope = {}
    exec(compile(CELL, name, "exec"), scope)
    yield scope
    del linecache.cache[name]


def frames(e):
    return [f.filename for f in traceback.extract_tb(e.__traceback__)]


def test_errors_name_the_cell(cell):
    """While tracing and while running; no frame of ours is between those of the user."""
    with pytest.raises(TypeError) as caught:
        cell["use"](cell["body"])
    assert "cell In[7], line 4" in str(caught.value) and "ipykernel" not in str(caught.value)
    assert frames(caught.value) == [__file__, *["/tmp/ipykernel_12/345.py"] * 2]
    with pytest.raises(plgpu.DeadlockError) as caught:
        cell["use"](cell["stuck"], scratch_types=[plgpu.Barrier()])
    assert str(caught.value).count("cell In[7], line 6") == 2
    assert frames(caught.value) == [__file__, "/tmp/ipykernel_12/345.py"]


def test_errors_of_ready_kernels(cell):
    with pytest.raises(TypeError, match="interpret must be") as caught:
        ops.softmax(np.zeros((2, 8), F32), interpret="on")
    assert frames(caught.value) == [__file__]


def test_pages_and_traces_name_the_cell(cell, tmp_path):
    file = tmp_path / "trace.json"
    k = plgpu.kernel(
        cell["copied"],
        out_type=plgpu.ShapeDtypeStruct((128,), F32),
        interpret=plgpu.InterpretParams(timeline=file),
    )
    x = np.zeros(128, F32)
    k(x)
    page = k.lower(x)._repr_html_()
    assert "cell In[7], line 13" in page
    assert "cell In[7], line 12" in k._repr_html_()
    text = file.read_text()
    assert "cell In[7], line 13" in text and "ipykernel" not in text + page


def test_all_frames(cell, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_TRACEBACK", "1")
    with pytest.raises(TypeError) as caught:
        cell["use"](cell["body"])
    assert any("pallas_mgpu/_kernel.py" in f for f in frames(caught.value))


def test_outside_of_notebooks():
    """Errors are as they were."""

    def body(x, o):
        plgpu.named_scope(3)

    k = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((8,), F32), interpret=True)
    with pytest.raises(TypeError, match="at .*test_notebook.py:") as caught:
        k(np.zeros(8, F32))
    assert any("pallas_mgpu" in f for f in frames(caught.value))


def test_in_ipython(tmp_path):
    """The real thing, where it is installed."""
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    result = shell.run_cell(CELL + "use(stuck, scratch_types=[plgpu.Barrier()])\n")
    assert isinstance(result.error_in_exec, plgpu.DeadlockError)
    assert re.search(r"cell In\[\d+\], line 6", str(result.error_in_exec))
    assert not any("pallas_mgpu" in f for f in frames(result.error_in_exec))


def test_ready_kernels(rng):
    a = rng.standard_normal((128, 128)).astype(F16)
    page = Page(matmul.kernel(a, a).lower(a, a)._repr_html_())
    assert any("HGMMA" in r[3] for r in page.rows if len(r) == 4)
