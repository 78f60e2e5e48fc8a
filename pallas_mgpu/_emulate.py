"""``interpret="emulate"``: the generated program of a kernel on the CPU, on the emulated machine.

The extension asks :func:`emulation` once for each plan and then calls it with addresses of arrays.
The machine itself (`pallas_mgpu.machine`) is imported when it is first needed."""

import ctypes
import importlib
import math
import re
import sys

import numpy as np

from . import _core, _races
from ._types import InterpretParams


def emulation(graph):
    """Called by the extension: what runs the program of a lowered graph."""
    return Emulation(graph)


def _memory(address, size):
    if not size:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


class Emulation:
    """The program of one graph, compiled at its first call."""

    def __init__(self, graph):
        run, explain = (
            importlib.import_module(f".machine.{m}", __package__) for m in ("run", "explain")
        )
        run.compiler()
        checks = {"check_indices": True}  # accesses out of bounds, as the interpreter finds them
        marked, self.info = graph.cuda(line=True, catalogue=False, **checks)
        self.names = explain.Names(marked, self.info, graph.text())
        self.text, self.run, self.explain = self.names.text, run, explain

    @staticmethod
    def _span(shape, strides):
        if strides is None:
            return math.prod(shape)
        return 1 + sum((d - 1) * s for d, s in zip(shape, strides))

    def __call__(self, params, addresses, fresh, values):
        """One launch on memory of the host, of one device after the other; ``fresh``: outputs have
        no contents yet; ``values``: sizes of the call, by number."""
        params = params or InterpretParams()
        info = self.run.for_sizes(self.info, values)
        sizes = [
            self._span(shape, strides) * self.explain.bits_of(dtype) // 8
            for (dtype, shape, *_), (_, strides) in zip(info["params"], info["given"])
        ]
        each = len(sizes)
        rows = [
            [_memory(a, size) for a, size in zip(addresses[k : k + each], sizes, strict=True)]
            for k in range(0, len(addresses), each)
        ]
        before = [[x.copy() for x in row] for row in rows] if params.seeds > 1 else rows
        self._launch(info, params, params.seed, rows, fresh)
        for seed in range(params.seed + 1, params.seed + params.seeds):
            again = [[x.copy() for x in row] for row in before]
            self._launch(info, params, seed, again, fresh)
            self._compare(rows, again, params.seed, seed)
        _races.emulated(())
        return True

    def _compare(self, rows, again, first, seed):
        n = self.info["operands"]
        for device, (row, other) in enumerate(zip(rows, again)):
            for k, (x, y) in enumerate(zip(row[n:], other[n:]), n):
                if x.tobytes() != y.tobytes():
                    raise self._schedule(k, x, y, first, seed, device)

    def _schedule(self, k, x, y, first, seed, device):
        wrong = np.flatnonzero(x != y)
        name = repr(self.info["given"][k][0] or f"output {k - self.info['operands']}")
        dtype, shape, *_ = self.info["params"][k]
        at = self.explain.unravel(int(wrong[0]) * 8 // self.explain.bits_of(dtype), shape)
        where = f" on {self.names.device(device)}" if self.info["mesh"] else ""
        return _core.ScheduleError(
            f"the result depends on the schedule: {name}{where} differs between seeds {first} and"
            f" {seed}, the first time at {at}"
        )

    def _launch(self, info, params, seed, rows, fresh):
        options = {"written": not fresh, "unwritten_ok": not params.detect_uninitialized}
        n = info["operands"]
        try:
            printed = self.run.run_rows(self.text, info, rows, n, seed, **options)
        except self.run.BuildError as e:
            raise self._refused(str(e)) from None
        except self.run.HostError as e:
            sys.stdout.write(e.printed)
            error = self._error(e)
            error.add_note(f"on the emulated machine, seed {seed}")
            raise error from None
        sys.stdout.write(printed)

    def _refused(self, text):
        """The exception of a program that the C++ compiler or the assembler refuses."""
        found = re.search(r"(?:kernel\.cpp:(\d+):\d+: error|Error): (.*)", text)
        if not found:
            return _core.InternalError(text)
        kernel, where = self.info["entry"][:-7], self.names.source(int(found[1] or 0))
        return NotImplementedError(
            f"interpret='emulate': the program of kernel {kernel} is no plain C++ for the emulated"
            f" machine: {found[2]}. PTX in inline_cuda runs on a GPU alone; with"
            f" inline_cuda(interpret=) a kernel runs on the interpreter{where}"
        )

    def _error(self, e):
        """The exception of what the machine refused, in the terms of the kernel."""
        names, x = self.names, self.explain
        kind = next((f[1] for f in e.facts if f[0] == "kind"), "other")
        what = names.translate(e.what)
        where = names.source(e.line)
        if kind == "race":
            found = x.race(names, e.facts)
            _races.emulated((found,))
            return _core.RaceError(f"{found.text}{where}")
        if kind == "unwritten":
            return _core.UninitializedError(x.unwritten(names, e.facts) + where)
        if kind == "outside":
            return IndexError(x.site(names, e.facts))
        if kind == "bounds":
            return IndexError(x.bounds(names, e.facts, e.what) + where)
        if kind == "deadlock":
            return _core.DeadlockError(x.deadlock(names, e.facts, self.info["entry"][:-7]))
        if kind == "endless":
            return _core.DeadlockError(f"the program does not end{where}")
        if "debug_check: " in what:
            return AssertionError(what + where)
        if kind == "protocol":
            return ValueError(what + where)
        generated = names.lines[e.line].strip() if 0 < e.line < len(names.lines) else ""
        return RuntimeError(f"{what}{where}" + (f"\n  generated: {generated}" if generated else ""))
