"""What notebooks show: kernels and lowered kernels as HTML, and errors without frames of this
package, with the cell in place of its file.

A lowered kernel is shown as a table: for each line of Python the ops of the graph, the CUDA C++ and
the machine code that came from it; then its shared memory and the register layouts of its arrays.
All of it is read from the texts that ``as_text`` gives."""

import functools
import linecache
import os
import re
import sys
import types

import numpy as np

from . import _core, _introspect
from ._drawing import box, escape, shade
from ._types import itemsize_bits

_PACKAGE = os.path.dirname(__file__) + os.sep
_STDLIB = os.path.dirname(os.__file__) + os.sep
_STYLE = (
    "<style>.pm table{border-collapse:collapse;width:100%;table-layout:fixed}"
    ".pm td,.pm th{vertical-align:top;text-align:left;border-top:1px solid #ddd;padding:2px 6px}"
    ".pm pre{margin:0;font-size:11px;line-height:1.35;white-space:pre;overflow:auto;"
    "max-height:22em;background:none}.pm summary{cursor:pointer;font-weight:bold;margin-top:6px}"
    ".pm .n{color:#888}</style>"
)
_WIDTH, _ROW = 900, 22  # pixels of pictures
_CELLS, _CELL = 32, 14  # of a picture of a layout: elements along a side, pixels of one
_MOST_LAYOUTS = 3

# ---- errors --------------------------------------------------------------------------------------


def _shell():
    """IPython's shell, if this is one."""
    module = sys.modules.get("IPython")
    return module.get_ipython() if module is not None else None


def _name_cells(shell, text):
    """The text with "cell In[3], line 2" in place of the file of a cell."""

    def name(match):
        kind, cell = shell.compile.format_code_name(match[1]) or ("", "")
        return f"cell {cell}, line {match[2]}" if kind == "Cell" else match[0]

    return re.sub(r"(<ipython-[^>\s]*>|[^\s\"\']+\.py):(\d+)", name, text)


def place_name(file, line):
    """ "file.py:3", or "cell In[2], line 3" for a file that holds a cell."""
    text, shell = f"{file}:{line}", _shell()
    return text if shell is None else _name_cells(shell, text)


def _is_ours(frame, inner):
    """``inner``: the frame that called it is ours."""
    file = frame.f_code.co_filename
    return file.startswith(_PACKAGE) or (
        inner and file.startswith(_STDLIB) and "-packages" not in file
    )


def without_ours(traceback):
    """The traceback without the frames of this package, and of the standard library below it."""
    kept, inner = [], False
    while traceback is not None:
        inner = _is_ours(traceback.tb_frame, inner)
        if not inner:
            kept.append(traceback)
        traceback = traceback.tb_next
    out = None
    for t in reversed(kept):
        out = types.TracebackType(out, t.tb_frame, t.tb_lasti, t.tb_lineno)
    return out


def tidy(e):
    """Called by the extension with an error that leaves a kernel. Changes nothing outside of
    notebooks."""
    shell = _shell()
    if shell is None:
        return
    if len(e.args) == 1 and isinstance(e.args[0], str):
        e.args = (_name_cells(shell, e.args[0]),)
    notes = getattr(e, "__notes__", None)
    if notes:
        e.__notes__ = [_name_cells(shell, note) for note in notes]
    e.__traceback__ = without_ours(e.__traceback__)


# ---- texts by line -------------------------------------------------------------------------------

_GRAPH_PLACE = re.compile(r'^(.*?)\s*// "(.*)":(\d+)$')
_LINE = re.compile(r'^#line (\d+)(?: "(.*)")?$')
_SASS_PLACE = re.compile(r'//## File "(.*?)", line (\d+)')
_SASS = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?;)")


def _graph_lines(text):
    """(place, line) of the ops of a graph; place: (file, line) or None."""
    for line in text.splitlines():
        m = _GRAPH_PLACE.match(line)
        if m:
            yield (m[2], int(m[3])), m[1]


def _cuda_lines(text):
    """The same of the kernel in a program with #line directives."""
    _, _, body = text.partition('extern "C" __global__')
    place = None
    for line in body.splitlines():
        m = _LINE.match(line)
        if m:
            file = m[2] if m[2] is not None else place and place[0]
            place = (file, int(m[1])) if file else None
        elif line.strip() and not line.lstrip().startswith("//"):
            yield place, line


def _sass_lines(text):
    place = None
    for line in text.splitlines():
        m = _SASS_PLACE.search(line)
        if m:  # what is not the user's is in the file of the program
            place = None if m[1].endswith(".cu") else (m[1], int(m[2]))
        elif m := _SASS.match(line):
            yield place, m[1]


def _dedented(lines):
    margin = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
    return [x[margin:] for x in lines]


def _cell(lines):
    return f"<td><pre>{escape(chr(10).join(_dedented(lines)))}</pre></td>"


def _side_by_side(columns):
    """A table of {title: [(place, line)]}: a row for each place in Python."""
    rows = {}
    for title, lines in columns.items():
        for place, line in lines:
            rows.setdefault(place, {}).setdefault(title, []).append(line)
    places = sorted((p for p in rows if p), key=lambda p: (p[0], p[1]))
    out = ["<table><tr><th>Python</th>", *(f"<th>{title}</th>" for title in columns), "</tr>"]
    for at in [*places, *([None] if None in rows else [])]:
        if at:
            source = linecache.getline(*at).strip()
            where = escape(os.path.basename(place_name(*at)))
            out.append(f'<tr><td><pre>{escape(source)}</pre><span class="n">{where}</span>')
        else:
            out.append('<tr><td><span class="n">around the body</span>')
        out += ["</td>", *(_cell(rows[at].get(title, [])) for title in columns), "</tr>"]
    return "".join([*out, "</table>"])


# ---- shared memory -------------------------------------------------------------------------------

_ALLOC = re.compile(
    r"%(\w+) = alloc_(?:smem|barrier|semaphore) \{.*?offset = (\d+).*?\} :"
    r" (.*?)(?:\s+// .*)?$"
)
_BYTES = {"barrier": 8, "semaphore": 4}


def _bytes(type_text):
    """Of "smem float16[4,64]"."""
    m = re.fullmatch(r"(?:smem )?(\w+)(?:\[([\d, ]*)\])?.*", type_text)
    n = 1
    for d in (m[2] or "").split(",") if m else ():
        n *= int(d) if d.strip() else 1
    name = m[1] if m else ""
    return n * (_BYTES.get(name) or itemsize_bits(_core.as_dtype(name)) // 8)


def allocations(graph, threads=1):
    """[(name, first byte, bytes, type)] of the shared memory of a lowered graph's text."""
    out = []
    for line in graph.splitlines():
        m = _ALLOC.search(line)
        if m:
            out.append((re.sub(r"_\d+$", "", m[1]), int(m[2]), _bytes(m[3]), m[3]))
    head = graph.partition("{")[0]
    if m := re.search(r" scratch (\d+) (\d+)", head):
        out.append(("scratch", int(m[1]), int(m[2]), "reductions and layout conversions"))
    if m := re.search(r" profile (\d+) (\d) \d+ (\d+)", head):
        n = int(m[1]) * 4 * threads * (4 if m[2] == "1" else 1)
        out.append(("profile", int(m[3]), n, "events"))
    return sorted(out, key=lambda x: (x[1], x[2]))


def _memory_map(found, total):
    """A picture: a box for each allocation, those that share bytes above each other."""
    ends, out = [], []
    scale = (_WIDTH - 2) / max(total, 1)
    for name, first, size, kind in found:
        row = next((k for k, end in enumerate(ends) if end <= first), len(ends))
        ends[row:] = [first + size, *ends[row + 1 :]]
        title = f"{name}: {kind}\nbytes {first} to {first + size - 1}, {size} bytes"
        out.append(box(first * scale, row * _ROW, size * scale, _ROW - 2, shade(name), title, name))
    height = max(len(ends), 1) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}"'
        ' style="font:11px sans-serif">' + "".join(out) + "</svg>"
    )


# ---- register layouts ----------------------------------------------------------------------------

_LAYOUT = re.compile(r" : (\w+)\[([\d, ]+)\] @(\S+)")


def layouts(graph):
    """{(shape, layout): number of values} in a lowered graph's text, the largest arrays first."""
    out = {}
    for m in _LAYOUT.finditer(graph):
        shape = tuple(int(d) for d in m[2].split(","))
        if m[3] != "splat" and len(shape) <= 2:
            out[shape, m[3]] = out.get((shape, m[3]), 0) + 1
    return dict(sorted(out.items(), key=lambda x: -int(np.prod(x[0][0]))))


@functools.cache
def _layout_picture(shape, layout):
    """Which warp (hue) and lane (shade) holds an element first; titles name lane and register."""
    rows, columns = (1, *shape)[-2:]
    owner = {}
    for tid, elements in enumerate(_core.layout_elements(shape, ("text", layout))):
        for register, k in enumerate(elements):
            if k >= 0:
                owner.setdefault(k, []).append((tid, register))
    height, width = min(rows, _CELLS), min(columns, _CELLS)
    out = []
    for i in range(height):
        for j in range(width):
            holders = owner[i * columns + j]
            tid, register = holders[0]
            color = f"hsl({tid // 32 * 90},55%,{40 + tid % 32 * 1.6:.0f}%)"
            title = f"[{i}, {j}]: warp {tid // 32}, lane {tid % 32}, register {register}"
            if len(holders) > 1:
                title += f" and {len(holders) - 1} copies"
            out.append(box(j * _CELL, i * _CELL, _CELL, _CELL, color, title))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width * _CELL}"'
        f' height="{height * _CELL}">' + "".join(out) + "</svg>"
    )


# ---- kernels -------------------------------------------------------------------------------------


def _section(title, body, is_open=False):
    return f"<details{' open' if is_open else ''}><summary>{title}</summary>{body}</details>"


def _table(rows):
    cells = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in rows)
    return f'<table style="width:auto">{cells}</table>'


def _page(title, *parts):
    return f'{_STYLE}<div class="pm"><b>{escape(title)}</b>{"".join(parts)}</div>'


def _sass(lowered):
    """([(place, instruction)], why there are none)"""
    try:
        return list(_sass_lines(lowered.as_text("sass", lines=True))), ""
    except Exception as e:  # no NVRTC, no disassembler: the rest is worth showing
        return [], str(e)


def _resources(lowered, graph):
    rows = []
    try:
        used = lowered.resources()
        for name in ("registers", "spill_bytes", "stack_bytes", "smem_bytes", "threads", "grid"):
            rows.append((name.replace("_", " "), used[name]))
        rows += [("cluster", used["cluster"]), ("remarks", used["remarks"] or "none")]
    except Exception as e:  # not compiled here
        rows.append(("not compiled", e))
    if m := re.search(r" target (\w+)", graph.partition("{")[0]):
        rows.insert(0, ("target", m[1]))
    return rows


def _lowered_html(lowered):
    graph = lowered.as_text("graph")
    sass, why = _sass(lowered)
    columns = {
        "graph": list(_graph_lines(graph)),
        "CUDA": list(_cuda_lines(lowered.as_text("cuda", lines=True))),
        "SASS": sass,
    }
    m = re.search(r" threads (\d+)", graph)
    found = allocations(graph, int(m[1]) if m else 1)
    total = max((first + size for _, first, size, _ in found), default=0)
    parts = [_section("Resources", _table(_resources(lowered, graph)), True)]
    text = _side_by_side(columns)
    if why:
        text += f'<p class="n">No SASS: {escape(why)}</p>'
    parts.append(_section("Line by line", text, True))
    if found:
        parts.append(_section(f"Shared memory, {total} bytes", _memory_map(found, total), True))
    pictures = []
    for (shape, layout), n in list(layouts(graph).items())[:_MOST_LAYOUTS]:
        values = "1 value" if n == 1 else f"{n} values"
        pictures.append(f"<p>{list(shape)} {escape(layout)}, {values}</p>")
        pictures.append(_layout_picture(shape, layout))
    if pictures:
        parts.append(_section("Register layouts: warps by hue, lanes by shade", "".join(pictures)))
    return _page(repr(lowered)[1:-1], *parts)


def _kernel_html(kernel):
    definition = getattr(kernel, "definition", None)
    code = getattr(getattr(definition, "body", None), "__code__", None)
    parts = []
    if definition is not None:
        names = _introspect.scratch_names(definition)
        rows = [
            (f"scratch {name}" if name else "scratch", repr(x))
            for name, x in zip(names, _scratch(definition.scratch))
        ]
        rows += [("compiler_params", definition.params), ("interpret", definition.interpret)]
        parts.append(_table(rows))
    if code is not None:
        where = escape(os.path.basename(place_name(code.co_filename, code.co_firstlineno)))
        parts.append(f'<p class="n">{where}; kernel.lower(*args) shows what it becomes</p>')
    return _page(repr(kernel)[1:-1], *parts)


def _scratch(scratch):
    return list(scratch.values()) if hasattr(scratch, "values") else list(scratch)


def html(x):
    """``_repr_html_`` of a kernel or a lowered kernel."""
    return _lowered_html(x) if isinstance(x, _core.Lowered) else _kernel_html(x)
