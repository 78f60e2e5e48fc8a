"""Kernels that are compiled now and called later, without a compiler: `Lowered.export`,
`load_exported`.

A directory has five files of each kernel: the cubin; a launcher in C and its header
(_launcher.py), which need the CUDA driver alone; the text of the lowered graph; and a JSON file
with the digests of these, for Python. Loading generates the program's text from the graph once
more, which takes milliseconds: where its digest is another one, another version of the package
made the files, and what its cubin expects of a launch is not known."""

import json
from pathlib import Path

from . import _core
from ._launcher import launcher
from ._names import show

FORMAT = 1


def _digest(data):
    return _core.digest(data if isinstance(data, bytes) else data.encode())


def _name_of(name, entry):
    if name is None:
        return entry
    if not isinstance(name, str):
        raise TypeError(f"export: name must be a str, got {show(name)}")
    if not (name.isidentifier() and name.isascii()):
        raise ValueError(f"export: name must be an identifier of C, got {name!r}")
    return name


def _program(graph):
    return graph.cuda(line=False)


def _check(info, checks):
    if checks:
        raise NotImplementedError(
            f"export: kernel {info['entry']} was lowered with PALLAS_MGPU_SANITIZE=1, and only the"
            " package reports what its checks find: export it without"
        )
    what, kinds = f"export: kernel {info['entry']}", {kind for kind, _, _ in info["args"]}
    if info["devices"] > 1 or kinds & {"peers", "watch"}:
        raise NotImplementedError(
            f"{what} is for a mesh of devices, whose addresses a launch must find: export kernels"
            " for one device, and call this one with plgpu.spmd"
        )


def export(lowered, directory, *, name=None):
    """Write the kernel to files of a directory, which is made if it does not exist; the paths of
    them: NAME.cubin, NAME.h, NAME.c, NAME.graph, NAME.json. name: that of the kernel by default.
    Needs NVRTC and no GPU. NotImplementedError for kernels for a mesh of devices."""
    if not isinstance(directory, (str, Path)):
        raise TypeError(f"export: directory must be a str or a Path, got {show(directory)}")
    text, info = _program(lowered.graph)
    _check(info, lowered.program != text)
    name = _name_of(name, info["entry"])
    graph, cubin = lowered.graph.text(), lowered.cubin()
    header, source = launcher(name, info, lowered.n_results)
    record = {
        "format": FORMAT,
        "kernel": info["entry"],
        "target": info["target"],
        "results": lowered.n_results,
        "program": _digest(text),
        "graph": _digest(graph),
        "cubin": _digest(cubin),
    }
    files = {
        "cubin": cubin,
        "h": header,
        "c": source,
        "graph": graph,
        "json": json.dumps(record, indent=1) + "\n",
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for ending, content in files.items():
        paths.append(directory / f"{name}.{ending}")
        paths[-1].write_bytes(content if isinstance(content, bytes) else content.encode())
    return paths


# ---- loading -------------------------------------------------------------------------------------


def _find(path):
    """The JSON file that is meant."""
    path = Path(path)
    if not path.is_dir():
        return path if path.suffix == ".json" else path.with_name(path.name + ".json")
    found = sorted(path.glob("*.json"))
    if len(found) != 1:
        names = ", ".join(f.stem for f in found) or "none"
        raise ValueError(
            f"load_exported: {path} must have one exported kernel, and has {names}; give the path"
            " of one of its JSON files"
        )
    return found[0]


def _read_record(path):
    try:
        record = json.loads(path.read_text())
        good = isinstance(record, dict) and type(record["results"]) is int
        good = good and all(isinstance(record[k], str) for k in ("program", "graph", "cubin"))
    except FileNotFoundError:
        raise
    except (ValueError, KeyError):
        good = False
    if not good:
        raise ValueError(f"load_exported: {path} is no file that Lowered.export wrote")
    if record.get("format") != FORMAT:
        raise ValueError(
            f"load_exported: {path} has format {show(record.get('format'))}, and this version of"
            f" pallas_mgpu reads format {FORMAT}: export the kernel again"
        )
    return record


def _read(path, kind, record):
    file = path.with_suffix("." + kind)
    data = file.read_bytes()
    if _digest(data) != record[kind]:
        raise ValueError(f"load_exported: {file} is not the file that was exported with {path}")
    return data


class ExportedKernel:
    """A kernel that :meth:`Lowered.export` wrote, called as the kernel itself: ``k(*arrays,
    out=None, stream=None)``, on the arrays that it was lowered for and all kinds of them. Several
    results are a tuple. On host arrays without a GPU it runs on the interpreter."""

    def __init__(self, record, graph, cubin):
        parsed = _core.Graph.parse(graph)
        text, info = _program(parsed)
        self.__name__, self.target = parsed.name, info["target"]
        if _digest(text) != record["program"]:
            raise ValueError(
                f"load_exported: kernel {self.__name__} was exported by another version of"
                " pallas_mgpu, whose programs differ: export it again"
            )
        self._graph, self._cubin = graph, cubin
        n = info["operands"]
        if not 0 <= record["results"] <= len(info["params"]) - n:
            raise ValueError(
                f"load_exported: the JSON file of kernel {self.__name__} was changed: it has no"
                f" {record['results']} results"
            )
        self._scratch = len(info["params"]) - n - record["results"]
        self._operands = list(zip(info["params"][:n], info["extents"][:n], info["given"][:n]))
        options = {"outputs": "single" if record["results"] == 1 else "tuple"}
        bits = tuple(sum(1 << d for d, x in enumerate(e) if x) for _, e, _ in self._operands)
        if any(bits):
            options["open"] = bits
        self._kernel = _core.Kernel(self.__name__, self._compiled, options)

    def __call__(self, *arrays, out=None, stream=None):
        return self._kernel(*arrays, out=out, stream=stream)

    def __repr__(self):
        operands = ", ".join(self._text(k) for k in range(len(self._operands)))
        return f"<pallas_mgpu kernel {self.__name__}, exported for {self.target}: ({operands})>"

    def _text(self, k):
        (dtype, shape, *_), extents, _ = self._operands[k]
        return f"{dtype}[{','.join('?' if e else str(n) for n, e in zip(shape, extents))}]"

    def _compiled(self, specs):
        if len(specs) != len(self._operands):
            raise TypeError(
                f"kernel {self.__name__}: it was exported for {len(self._operands)} arrays, and"
                f" the call has {len(specs)}"
            )
        for k, (shape, dtype) in enumerate(specs):
            (want, dims, *_), extents, (name, _) = self._operands[k]
            fits = len(shape) == len(dims) and all(
                e or n == m for e, n, m in zip(extents, shape, dims)
            )
            if not fits or str(dtype) != want:
                raise (ValueError if str(dtype) == want else TypeError)(
                    f"kernel {self.__name__}: argument {k}{f' ({name})' if name else ''} is"
                    f" {dtype}[{','.join(map(str, shape))}], and the kernel was exported for"
                    f" {self._text(k)}"
                )
        return _core.compiled(_core.Graph.parse(self._graph), self._cubin, self._scratch)


def load_exported(path):
    """The kernel that :meth:`Lowered.export` wrote, as an :class:`ExportedKernel`, which needs no
    compiler. path: that of the directory if it has one kernel, or of one kernel's JSON file.
    FileNotFoundError where a file is missing; ValueError where files do not belong together or
    another version of the package made them."""
    if not isinstance(path, (str, Path)):
        raise TypeError(f"load_exported: path must be a str or a Path, got {show(path)}")
    path = _find(path)
    record = _read_record(path)
    return ExportedKernel(
        record, _read(path, "graph", record).decode(), _read(path, "cubin", record)
    )
