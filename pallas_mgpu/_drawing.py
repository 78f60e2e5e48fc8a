"""Pictures of traces, as SVG: a row for each thread, and below it the work of its engines."""

import zlib

_ROW, _ENGINE, _LEFT, _TOP, _TEXT = 26, 9, 150, 34, 11  # pixels
_MOST = 6  # rows of overlapping engine work below a thread
_STYLE = (
    "text{font:11px sans-serif;fill:#222} .m{fill:#777} .n{font-size:10px;pointer-events:none}"
    " .wait{fill:#e8e8e8} .costly{fill:#e5484d} rect{stroke:#fff;stroke-width:.5}"
)
_ENGINES = {"copy in": "#3b82c4", "copy out": "#8a63d2", "product": "#2f9e63"}


def shade(name):
    """A light colour for a name."""
    return f"hsl({zlib.crc32(name.encode()) % 360},50%,80%)"


def escape(text):
    """Text for HTML and SVG."""
    for c, name in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot")):
        text = text.replace(c, f"&{name};")
    return text


def pairs(events):
    """(begin event, end in microseconds, depth in nested slices), in the order of the begins."""
    out, stacks, open_ids = [], {}, {}
    for e in events:
        row = (e["pid"], e.get("tid"))
        if e["ph"] == "B":
            stack = stacks.setdefault(row, [])
            stack.append(len(out))
            out.append([e, e["ts"], len(stack) - 1])
        elif e["ph"] == "E" and stacks.get(row):
            out[stacks[row].pop()][1] = e["ts"]
        elif e["ph"] == "b":
            open_ids[e["pid"], e["id"]] = len(out)
            out.append([e, e["ts"], 0])
        elif e["ph"] == "e":
            out[open_ids.pop((e["pid"], e["id"]))][1] = e["ts"]
    return out


def _lanes(work):
    """Each (event, begin, end) with a lane in which it overlaps no other."""
    ends = []
    for e, begin, end in sorted(work, key=lambda x: x[1]):
        lane = next((k for k, last in enumerate(ends) if last <= begin), len(ends))
        ends[lane:] = [end, *ends[lane + 1 :]]
        yield e, begin, end, min(lane, _MOST - 1)


def _round(us):
    """A length for the marks of the axis: 1, 2 or 5 times a power of ten."""
    unit = 1e-6
    while unit * 10 < us:
        unit *= 10
    return next(unit * k for k in (1, 2, 5, 10) if unit * k >= us)


def box(x, y, width, height, fill, title, text=""):
    """A rectangle with a tooltip, and as much of a text as it has room for."""
    style = f'class="{fill}"' if fill in ("wait", "costly") else f'fill="{fill}"'
    out = (
        f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.5):.1f}" height="{height}" {style}>'
        f"<title>{escape(title)}</title></rect>"
    )
    most = int((width - 4) / 5.2)
    if text and most > 3:
        out += f'<text class="n" x="{x + 2:.1f}" y="{y + _TEXT}">{escape(text[:most])}</text>'
    return out


class _Picture:
    def __init__(self, slices, names, width):
        self.begin = min((e["ts"] for e, _, _ in slices), default=0)
        self.end = max((end for _, end, _ in slices), default=1)
        self.width, self.names, self.slices = width, names, slices
        self.out, self.y = [], _TOP

    def at(self, us):
        span = max(self.end - self.begin, 1e-9)
        return _LEFT + (us - self.begin) / span * (self.width - _LEFT - 4)

    def row(self, tid):
        mine = [s for s in self.slices if s[0]["tid"] == tid]
        work = [(e, e["ts"], end) for e, end, _ in mine if e["ph"] == "b"]
        deepest = max((depth for e, _, depth in mine if e["ph"] == "B"), default=0)
        height = _ROW // (deepest + 1)
        name = escape(self.names.get(tid, f"row {tid}"))
        self.out.append(f'<text x="4" y="{self.y + _ROW - 9}">{name}</text>')
        for e, end, depth in mine:
            if e["ph"] == "B":
                self.slice(e, end, self.y + depth * height, height)
        self.y += _ROW
        lanes = list(_lanes(work))
        for e, begin, end, lane in lanes:
            x, fill = self.at(begin), _ENGINES.get(e.get("cat"), "#999")
            title = self.title(e, end)
            y = self.y + 2 + lane * _ENGINE
            self.out.append(box(x, y, self.at(end) - x, _ENGINE - 1, fill, title))
        self.y += (1 + max((lane for *_, lane in lanes), default=-1)) * _ENGINE + 8

    def title(self, e, end):
        args = e.get("args", {})
        at, awaited = (args.get(k, "").rpartition("/")[2] for k in ("at", "for"))
        parts = [e["name"], f"{(end - e['ts']) * 1000:.0f} ns", at]
        if awaited:
            parts.append(f"waits for {awaited} ({args['of']})")
        return "\n".join(p for p in parts if p)

    def slice(self, e, end, y, height):
        x, name = self.at(e["ts"]), e["name"]
        fill = shade(name)
        if e.get("cat") == "wait":
            fill = "costly" if "rank" in e["args"] else "wait"
        self.out.append(box(x, y, self.at(end) - x, height - 1, fill, self.title(e, end), name))

    def axis(self):
        step = _round((self.end - self.begin) / 10)
        for k in range(int((self.end - self.begin) / step) + 1):
            x, ns = self.at(self.begin + k * step), k * step * 1000
            self.out.append(f'<text class="m" x="{x:.1f}" y="{_TOP - 6}">{ns:.0f} ns</text>')


def draw(trace, process, width):
    named = {e["pid"]: e["args"]["name"] for e in trace.events if e["name"] == "process_name"}
    pid = min(named, default=None) if process is None else process
    if pid not in named:
        raise ValueError(f"svg: process must be one of {sorted(named)[:8]}, got {process!r}")
    mine = [e for e in trace.events if e["pid"] == pid]
    rows = {e["tid"]: e["args"]["name"] for e in mine if e["name"] == "thread_name"}
    picture = _Picture(pairs(mine), rows, width)
    picture.axis()
    for tid in sorted(rows):
        picture.row(tid)
    title = escape(f"{trace.kernel}, {named[pid]}")
    costly = [w for w in trace.waits[:3] if w.critical_ns]
    for k, w in enumerate(costly):
        text = f"wait #{k + 1}: {w.critical_ns:.0f} of {w.ns:.0f} ns are critical, {w.source}"
        picture.y += 15
        picture.out.append(f'<text x="4" y="{picture.y}">{escape(text)}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{picture.y + 8}">'
    return "\n".join(
        [head, f"<style>{_STYLE}</style>", f'<text x="4" y="14">{title}</text>', *picture.out]
        + ["</svg>\n"]
    )
