"""The profiler of kernels: ``CompilerParams(profile_space=, profile_dir=)``.

A kernel with a profiler has one more output, int32 ``(traces, words)``, whose form csrc/ir/ir.h
describes. After a call it becomes a trace, a file as `_timeline.py` writes them. The clock of a
multiprocessor counts cycles; how many nanoseconds one takes follows from the global timer, which
every trace reads at its begin and end."""

import math
import os
import time
import warnings

import numpy as np

from ._names import later
from ._types import TraceScope

name_rows, write_trace = (later("_timeline", name) for name in ("name_rows", "write_trace"))

_HEAD, _TAIL, _WARPS = 3, 4, 4
_ENDS = 1 << 31
_INIT = "Init"  # the kernel's own initialisation, scope 0


def _per_block(definition):
    threads = definition.mesh.num_threads or 1
    return threads * (_WARPS if definition.params.profile_trace_scope is TraceScope.WARP else 1)


def trace_options(definition):
    """Arguments of `_core.Trace`."""
    params = definition.params
    return {
        "profile_words": 4 * params.profile_space,
        "profile_warps": params.profile_trace_scope is TraceScope.WARP,
        "profile_output": len(definition.outs),
    }


def scopes(definition):
    """Where `named_scope` keeps the names; None: they are not recorded."""
    timeline = definition.interpret is not None and definition.interpret.timeline is not None
    if not (definition.params.profile_space or timeline):
        return None
    definition.scopes.setdefault(_INIT, 0)
    return definition.scopes


def shape(definition, batch):
    """Of the output, for a kernel mapped over these sizes."""
    mesh = definition.mesh
    blocks = math.prod((*batch, *mesh.grid, *mesh.cluster))
    return blocks * _per_block(definition), 4 * definition.params.profile_space + _TAIL


def _to_host(words):
    for method in ("cpu", "get", "numpy"):  # of torch, CuPy, DeviceArray
        if hasattr(words, method):
            return np.asarray(getattr(words, method)()).view(np.uint32)
    return np.asarray(words).view(np.uint32)


def _difference(a, b):
    """b - a of the low words of counters, which may have begun anew in between."""
    return (int(b) - int(a)) % 2**32


def _events(name, words, room, names, ns_per_cycle):
    """[(ph, name, ns since the begin)] of one trace, with every scope that is left open closed."""
    used, begin = int(words[2]), words[room + _HEAD]
    out, open_names = [], []
    end = 0.0
    for k in range(min(used, room // 2 * 2) // 2):
        tag, clock = words[_HEAD + 2 * k : _HEAD + 2 * k + 2]
        end = max(end, _difference(begin, clock) * ns_per_cycle)
        what = names[int(tag) & (_ENDS - 1)]
        if not int(tag) & _ENDS:
            open_names.append(what)
            out.append(("B", what, end))
        elif what in open_names:
            while open_names:
                out.append(("E", open_names[-1], end))
                if open_names.pop() == what:
                    break
    last = max(end, _difference(begin, words[room + _HEAD + 2]) * ns_per_cycle)
    return out + [("E", what, last) for what in reversed(open_names)]


def _check_space(definition, words, room):
    """Are events lost? RuntimeError unless that is meant."""
    most = int(words[:, 2].max())
    if most <= room // 2 * 2:
        return False
    if not definition.params.profile_bounds_check:
        need = -(-(most + _HEAD) // 4)
        raise RuntimeError(
            f"kernel {definition.name}: the profiler has insufficient space, {most // 2} events of"
            f" one trace with profile_space={definition.params.profile_space}; at least"
            f" profile_space={need} is needed, or profile_bounds_check=True, which drops events"
        )
    return True


def events(definition, words):
    """(events of Chrome's trace format, whether some are lost) from the output of a call."""
    words = _to_host(words)
    n = _per_block(definition)
    words = words[: int(words[0, -1]) * n]  # a grid that is handed out may have had fewer blocks
    room = words.shape[1] - _HEAD - _TAIL
    truncated = _check_space(definition, words, room)
    cycles = sum(_difference(w[-4], w[-2]) for w in words)
    ns = sum(_difference(w[0], w[-3]) for w in words)
    rate = ns / cycles if ns and cycles else 1.0
    names = list(definition.scopes)
    first = words[0, 0]
    # the timer of the first block need not be the earliest
    starts = [(_difference(first, w[0]) + 2**31) % 2**32 - 2**31 for w in words]
    out, rows = [], {}
    level = "warp" if definition.params.profile_trace_scope is TraceScope.WARP else "thread"
    for k in np.argsort(starts, kind="stable"):
        block, trace = divmod(int(k), n)
        pid, tid = 1 + int(words[k, 1]), 1 + trace + n * block
        rows.setdefault(pid, (f"SM {pid - 1}", {}))[1][tid] = f"block {block}, {level} {trace}"
        start = starts[k] - min(starts)
        for ph, name, at in _events(definition.name, words[k], room, names, rate):
            one = {"name": name, "ph": ph, "ts": (start + at) / 1000, "pid": pid, "tid": tid}
            out.append(one)
    return name_rows(rows) + out, truncated


def write(definition, words):
    """Write the trace of a call into the directory of the profiler."""
    found, truncated = events(definition, words)
    if truncated:
        warnings.warn(
            f"kernel {definition.name}: scopes are missing in its trace, for which profile_space ="
            f" {definition.params.profile_space} is not enough",
            stacklevel=3,
        )
    directory = definition.params.profile_dir
    os.makedirs(directory, exist_ok=True)
    name = f"{definition.name}-{time.time_ns()}-trace.json"
    write_trace(
        os.path.join(directory, name),
        definition.name,
        found,
        exclusive=True,
        truncated=truncated,
        clock="the GPU",
    )
