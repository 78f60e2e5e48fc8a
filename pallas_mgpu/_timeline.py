"""Traces of what a kernel did when: written by the interpreter (``InterpretParams(timeline=)``) and
by the profiler (``CompilerParams(profile_space=, profile_dir=)``), read by :func:`read_trace`.

A trace is a file in the JSON format of Chrome's tracing, which https://ui.perfetto.dev opens. A
process is a block, or on a GPU a multiprocessor; its rows are the threads and warps. Slices of work
and waits are pairs of events "B" and "E". What engines do overlaps, and is a pair "b" and "e" of
the thread that issued it. ``otherData`` sums up the waits by line."""

import bisect
import collections
import dataclasses
import json
import linecache
import os

from . import _notebook
from ._drawing import draw

_COSTLY = 3  # lines whose waits are marked
_ROWS = 8  # of a thread in a process: its own, then those of its warps


@dataclasses.dataclass(frozen=True)
class Wait:
    """Waits of one line of Python, in a :class:`Trace`.

    ``at``, ``source``: the line, as "file:line", and its text. ``what``: what is waited for, such
    as a barrier. ``awaited``: the lines that came last, with the longest waits first. ``ns``: the
    sum over all agents. ``critical_ns``: the part of it on the critical path, the chain of work and
    waits that ends last; other waits cost nothing. ``count``: how many waits took time.
    """

    at: str
    source: str
    what: str
    awaited: tuple[str, ...]
    ns: float
    critical_ns: float
    count: int


@dataclasses.dataclass(frozen=True)
class Trace:
    """A trace, as :func:`read_trace` returns it; in a notebook it is shown as a picture.

    ``kernel``: the name of the kernel. ``events``: those of the file, dicts as Chrome's trace
    format has them, with times in microseconds. ``waits``: those that cost most first, a tuple of
    :class:`Wait`; empty for traces of a GPU. ``truncated``: were events dropped, for lack of space?
    """

    kernel: str
    events: list
    waits: tuple[Wait, ...]
    truncated: bool

    def svg(self, process=None, width=1000):
        """The text of an SVG picture, ``width`` pixels wide, of one process of the trace; None: the
        first one. ValueError if the trace has no such process."""
        return draw(self, process, width)

    def _repr_html_(self):
        return self.svg()


def write_trace(path, kernel, events, exclusive=False, **other):
    """Write a trace. OSError if the file cannot be written; with ``exclusive``, if it exists."""
    data = {"displayTimeUnit": "ns", "traceEvents": events}
    data["otherData"] = {"kernel": kernel, "truncated": False, "waits": [], **other}
    with open(path, "x" if exclusive else "w", encoding="utf-8") as f:
        f.write(json.dumps(data, separators=(",", ":")))  # faster than json.dump


def read_trace(path):
    """Read a trace that the interpreter or the profiler wrote, and return a :class:`Trace`. OSError
    if the file cannot be read, ValueError if it is no such trace."""
    with open(path, encoding="utf-8") as f:
        data = json.load(f)
    try:
        other = data["otherData"]
        waits = tuple(Wait(**{**w, "awaited": tuple(w["awaited"])}) for w in other["waits"])
        return Trace(other["kernel"], data["traceEvents"], waits, other["truncated"])
    except (KeyError, TypeError):
        raise ValueError(f"read_trace: {os.fspath(path)} is no trace of a kernel") from None


def name_rows(rows):
    """Events that name processes and rows; ``rows``: {pid: (name, {tid: name})}."""
    out = []
    for pid, (name, tids) in sorted(rows.items()):
        out.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
        for tid, row in sorted(tids.items()):
            args = {"name": row}
            out.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": args})
    return out


# ---- the interpreter's events --------------------------------------------------------------------


def _unravel(number, sizes):
    out = []
    for size in reversed(sizes):
        number, at = divmod(number, size)
        out.append(at)
    return tuple(reversed(out))


def _place(file, line):
    return _notebook.place_name(file, line) if file else ""


def _source(file, line):
    return linecache.getline(file, line).strip() if file else ""


def _short(text, most=80):
    return text if len(text) <= most else text[: most - 3] + "..."


class _Rows:
    """Processes and rows of agents, which are (cluster, block, thread, warp)."""

    def __init__(self, grid, cluster):
        self.grid, self.cluster, self.names = grid, cluster, {}
        self.n_blocks = 1
        for size in cluster:
            self.n_blocks *= size

    def of(self, agent):
        """(pid, tid)"""
        number, block, thread, warp = agent
        pid, tid = 1 + number * self.n_blocks + block, 1 + thread * _ROWS + 1 + warp
        if pid not in self.names:
            self.names[pid] = (self._block(number, block) or "block", {})
        name = f"thread {thread}" if warp < 0 else f"thread {thread}, warp {warp}"
        self.names[pid][1].setdefault(tid, name)
        return pid, tid

    def _block(self, number, block):
        parts = []
        if self.grid:
            parts.append(f"grid point {_unravel(number, self.grid)}")
        if self.cluster:
            parts.append(f"block {_unravel(block, self.cluster)}")
        return ", ".join(parts)

    def text(self, agent):
        parts = [self._block(*agent[:2]), f"thread {agent[2]}"]
        if agent[3] >= 0:
            parts.append(f"warp {agent[3]}")
        return ", ".join(p for p in parts if p)


def _critical(events):
    """{(file, line): cycles} of the waits on the critical path.

    From the agent that ends last backwards: its latest wait leads to the agent that it waited for,
    to the moment at which that one arrived, or issued the copy or product."""
    waits, issued, last = collections.defaultdict(list), {}, (0, None)
    for e in events:
        kind, agent, begin, end = e[:4]
        if kind == "wait":
            waits[agent].append(e)
        elif kind not in ("work", "scope"):
            issued[agent, end] = begin
        last = max(last, (end, agent), key=lambda x: x[0])
    ends = {agent: [e[3] for e in of] for agent, of in waits.items()}  # in order, as they happened
    end, agent = last
    at, found = issued.get((agent, end), end), collections.Counter()
    for _ in events:
        k = bisect.bisect_right(ends.get(agent, ()), at) - 1
        if k < 0:
            break
        _, waiting, begin, end, _, _, file, line, agent, _, _ = waits[agent][k]
        found[file, line] += end - begin
        at = issued.get((agent, end), begin if agent == waiting else end)
    return found


def _sum_up(events, mhz):
    """The waits by line, those that cost most first."""
    critical = _critical(events)
    total, count, what = collections.Counter(), collections.Counter(), {}
    awaited = collections.defaultdict(collections.Counter)
    for kind, _, begin, end, name, _, file, line, _, for_file, for_line in events:
        if kind == "wait":
            at = (file, line)
            total[at] += end - begin
            count[at] += 1
            what.setdefault(at, name)
            awaited[at][_place(for_file, for_line)] += end - begin
    return [
        (
            at,
            {
                "at": _place(*at),
                "source": _source(*at),
                "what": what[at],
                "awaited": [place for place, _ in awaited[at].most_common() if place],
                "ns": cycles * 1000 / mhz,
                "critical_ns": critical[at] * 1000 / mhz,
                "count": count[at],
            },
        )
        for at, cycles in sorted(total.items(), key=lambda x: (critical[x[0]], x[1]), reverse=True)
    ]


def finish(params, kernel, grid, cluster, mhz, events, truncated):
    """Called by the extension at the end of a run, with the events of csrc/interp/timeline.c."""
    rows, out = _Rows(grid, cluster), []
    waits = _sum_up(events, mhz)
    ranks = {at: k + 1 for k, (at, w) in enumerate(waits[:_COSTLY]) if w["critical_ns"]}
    for number, e in enumerate(events):
        kind, agent, begin, end, what, index, file, line, for_agent, for_file, for_line = e
        pid, tid = rows.of(agent)
        name = what if index < 0 else f"{what}[{index}]"
        args = {"at": _place(file, line), "source": _source(file, line)}
        if kind == "scope":  # its begin and its end are events of their own
            one = {"name": what, "cat": kind, "ph": "BE"[index], "ts": begin / mhz}
            out.append({**one, "pid": pid, "tid": tid, "args": args})
            continue
        one = {"cat": kind, "pid": pid, "tid": tid}
        phases = "BE"
        if kind == "work":
            name = _short(args["source"]) or what
        elif kind == "wait":
            rank = ranks.get((file, line))
            name = f"wait #{rank}: {name}" if rank else f"wait: {name}"
            args |= {"for": _place(for_file, for_line), "of": rows.text(for_agent)}
            if rank:
                args["rank"] = rank
        else:
            phases, one["id"] = "be", number
            name = f"{kind}: {what}"
        out.append({"name": name, "ph": phases[0], "ts": begin / mhz, **one, "args": args})
        out.append({"name": name, "ph": phases[1], "ts": end / mhz, **one})
    write_trace(
        params.timeline,
        kernel,
        name_rows(rows.names) + out,
        truncated=bool(truncated),
        waits=[w for _, w in waits],
        clock="a model of the GPU",
    )
