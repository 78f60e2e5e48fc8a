"""`autotune`: the fastest of several configurations of a function, found once and kept on disk.

Candidates run in child processes, because a wrong configuration may hang or poison a GPU: a child
that does not answer in time is killed, and the next candidate gets a fresh one.

1. Every candidate runs once, `workers` of them at a time, so programs are compiled in parallel; the
   result is checked. What fails or hangs is out.
2. One child times those that are left in turns, a round at a time. After a few rounds, candidates
   that are slower for sure (the interval of the median of ratios to the best one) leave. It ends
   when one is left, or after `rounds`.

Each answer is written to disk when it comes, so that tuning that was cut off resumes.

A child imports the module of the function. If that is the script itself, the child executes it as
far as the first call of the function, where tuning began: a script needs no `if __name__ ==
"__main__"`. Other tuned functions that it calls on the way take what the disk knows of them."""

import concurrent.futures
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import math
import multiprocessing
import multiprocessing.connection
import numbers
import operator
import os
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path

from . import _core, tree
from ._bench import Timing
from ._names import show

_FEWEST = 5  # rounds before candidates leave
_START = 300.0  # seconds that a child may take to import what it needs
_REFUSED = (TypeError, ValueError, NotImplementedError)  # after others the GPU may be unusable


_LONG = 200e-6  # seconds of the host that a call of a kernel that exists does not take


def host_timer(f, seconds=0.02):
    """Seconds per call by the clock of the host, with the GPU idle before and after. Warns if most
    of them are the host's own work."""
    f()
    _core.synchronize()
    count, took = 1, 0.0
    while True:
        start = time.perf_counter()
        for _ in range(count):
            f()
        submitted = time.perf_counter() - start
        _core.synchronize()
        took = time.perf_counter() - start
        if took > seconds or count >= 1 << 16:
            if submitted > max(0.9 * took, _LONG * count) and _core.system_info()["device"] >= 0:
                warnings.warn(
                    f"autotune: {submitted / took:.0%} of the {took / count * 1e6:.0f} us of a call"
                    " are work of the host, which hides what the GPU takes. Make the kernel once"
                    " for each configuration (functools.cache), not in each call",
                    stacklevel=2,
                )
            return took / count
        count *= 4


# Not Connection.send: for tensors, PyTorch registers ways to share memory with it.
def _send(connection, x):
    connection.send_bytes(pickle.dumps(x))


def _receive(connection):
    return pickle.loads(connection.recv_bytes())


# ---- in a child ----------------------------------------------------------------------------------

_loading = None  # the module and name of what this child is for


class _ReachedError(BaseException):
    """The module calls what this child is for. args: the Autotuned."""


def _load(module, qualname, script, package):
    global _loading
    _loading = module, qualname
    try:
        if script is None:
            return operator.attrgetter(qualname)(importlib.import_module(module))
        main = types.ModuleType("__main__")
        main.__file__, main.__package__, main.__name__ = script, package, "__mp_main__"
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)
        return operator.attrgetter(qualname)(main)
    except _ReachedError as e:
        return e.args[0]


def _seconds(x):
    if not isinstance(x, numbers.Real) or not 0 <= x < math.inf:
        raise ValueError(f"the timer must return seconds, got {show(x)}")
    return float(x)


def _call(on_gpu, leaves, structure):
    """(args, kwargs) that were sent."""
    leaves = [_core.device_put(x) if put else x for x, put in zip(leaves, on_gpu)]
    return tree.unflatten(structure, leaves)


def _answer(tuned, command, configs, args, kwargs):
    if command == "time":
        call = functools.partial(tuned.function, *args, **kwargs)
        return [_seconds(tuned.timer(functools.partial(call, config=c))) for c in configs]
    result = tuned.function(*args, **kwargs, config=configs[0])
    _core.synchronize()
    why = tuned.check(result, *args, **kwargs) if tuned.check else None
    return None if why in (None, True) else str(why or "check returned False")


def _end_with(parent):
    """A candidate that hangs must not stay when the process that would kill it was killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def serve(fd, parent, *where):
    """Loads what `where` says, then answers commands until the other side is gone."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    connection = multiprocessing.connection.Connection(fd)
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        try:
            tuned = _load(*where)
            if not isinstance(tuned, Autotuned):
                raise TypeError(f"{where[1]} is {show(tuned)} there, not what autotune returned")
        except (Exception, SystemExit) as e:  # noqa: BLE001 - the parent raises it
            _send(connection, f"{type(e).__name__}: {e}")
            return
        _send(connection, None)  # from here on the time of a candidate counts
        call = None
        while True:
            try:
                command, configs, sent = _receive(connection)
                call = _call(*sent) if sent else call
                _send(connection, ("ok", _answer(tuned, command, configs, *call), False))
            except (EOFError, BrokenPipeError):
                raise
            except Exception as e:  # noqa: BLE001 - the parent decides
                refused = isinstance(e, _REFUSED)
                _send(connection, ("failed", f"{type(e).__name__}: {e}", not refused))


# ---- children, in the parent ---------------------------------------------------------------------


class _Child:
    """A process that runs candidates; made when it is needed, and anew after it was stopped."""

    def __init__(self, tuned):
        self.tuned, self.process = tuned, None
        self.timed = None  # the call whose arrays the process has from an earlier round

    def ask(self, command, configs, call, timeout):
        """("ok", answer), ("failed", why) or ("hung", why). RuntimeError without a process."""
        if self.process is None:
            self._start()
        sent = None
        if command != "time" or self.timed is not call:
            leaves, structure = tree.flatten(call)
            on_gpu = [isinstance(x, _core.DeviceArray) for x in leaves]
            leaves = [x.numpy() if put else x for x, put in zip(leaves, on_gpu)]
            sent = on_gpu, leaves, structure
            self.timed = call if command == "time" else None
        try:
            _send(self.connection, (command, configs, sent))
            if not self.connection.poll(timeout):
                self.stop()
                return "hung", f"no answer in {timeout} s"
            status, answer, unusable = _receive(self.connection)
            if unusable:
                self.stop()
            return status, answer
        except (EOFError, BrokenPipeError, ConnectionResetError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # for the code with which it ends by itself
            return "failed", f"the process ended with code {self.stop()}"

    def _start(self):
        tuned = self.tuned
        self.connection, other = multiprocessing.Pipe()
        where = tuned.module, tuned.__qualname__, *tuned.script()
        code = f"import sys; sys.path[:], sys.argv[:] = {sys.path!r}, {sys.argv!r}; "
        code += f"from {__name__} import serve; serve"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{code}({other.fileno()}, {os.getpid()}, *{where!r})"],
            pass_fds=[other.fileno()],
            stdin=subprocess.DEVNULL,
        )
        other.close()
        try:
            if not self.connection.poll(_START):
                why = f"it did not start in {_START:.0f} s"
            elif (why := _receive(self.connection)) is None:
                return
        except EOFError:
            why = f"it ended with code {self.process.wait()}"
        self.stop()
        raise RuntimeError(
            f"autotune: no child process could load {tuned.module}.{tuned.__qualname__}: {why}"
        )

    def stop(self):
        if self.process is None:
            return None
        self.process.kill()
        code, self.process, self.timed = self.process.wait(), None, None
        self.connection.close()
        return code


# ---- what is known -------------------------------------------------------------------------------


class _Record:
    """Answers on disk: of a function, its candidates, a key, a GPU and versions."""

    def __init__(self, what):
        cache = _core.cache_dir()
        name = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
        self.path = Path(cache[0]) / "autotune" / f"{name}.json" if cache else None
        self.data = {"what": what, "candidates": {}, "best": None}
        if self.path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError):
                found = json.loads(self.path.read_text())
                if found["what"] == what and _is_whole(found):
                    self.data = found

    def save(self):
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{os.getpid()}.{time.time_ns()}")
            part.write_text(json.dumps(self.data))
            part.replace(self.path)


def _is_whole(data):
    """Is it what :class:`_Record` writes? Files may have been damaged."""
    candidates, best = data.get("candidates"), data.get("best", 0)
    whole = isinstance(candidates, dict) and (best is None or isinstance(best, str))
    return whole and all(
        isinstance(c, dict) and c.keys() >= {"status", "why"} for c in candidates.values()
    )


def _shape_of(x):
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return [list(x.shape), str(x.dtype)]
    return repr(x)


# ---- the function --------------------------------------------------------------------------------


class Autotuned:
    """What :func:`autotune` returns: the function without its argument ``config``."""

    def __init__(self, function, configs, key, prune, check, listener, timer, options):
        functools.update_wrapper(self, function)
        self.module = (self.__module__ or "").replace("__mp_main__", "__main__")
        self.function, self.configs, self.key, self.prune = function, configs, key, prune
        self.check, self.listener, self.timer = check, listener or (lambda event: None), timer
        self.timeout, self.workers, self.rounds = options
        self.best = {}  # by key

    def __reduce__(self):
        return self.__qualname__

    def __call__(self, *args, **kwargs):
        return self.function(*args, **kwargs, config=self.tune(*args, **kwargs))

    def tune(self, *args, **kwargs):
        """The configuration for such arguments; found first where it is not known."""
        if "config" in kwargs:
            name = self.__qualname__
            raise TypeError(f"autotune: {name} chooses config itself; {name}.__wrapped__ takes one")
        if self.key is None:
            key = [_shape_of(x) for x in tree.leaves([list(args), kwargs])] + sorted(kwargs)
        else:
            key = self.key(*args, **kwargs)
        key = repr(key)
        if key not in self.best:
            self.best[key] = self._find(key, args, kwargs)
        return self.best[key]

    def script(self):
        """The script that defines the function, and its package; None twice: a module does."""
        if "<locals>" in self.__qualname__:
            why = "is defined in a function"
        elif not self.module:
            why = "has no module"
        elif self.module != "__main__":
            return None, None
        else:
            main = sys.modules["__main__"]
            path = getattr(main, "__file__", None)
            if path and os.path.isfile(path):
                return os.path.abspath(path), main.__package__
            why = "is defined in an interactive session"
        raise TypeError(
            f"autotune: {self.__qualname__} {why}, which child processes cannot import; make it an"
            " attribute of a module"
        )

    def _find(self, key, args, kwargs):
        if _loading == (self.module, self.__qualname__):
            raise _ReachedError(self)
        call = args, kwargs
        configs = [c for c in self.configs if self.prune is None or self.prune(c, *args, **kwargs)]
        if not configs:
            raise ValueError(f"autotune: prune leaves no configuration of {self.__qualname__}")
        if len(configs) == 1:
            return configs[0]
        names = {repr(c): c for c in configs}
        record = _Record([self.module, self.__qualname__, self._source(), key, self._place()])
        best = record.data["best"]
        if best in names and set(names) <= set(record.data["candidates"]):
            return names[best]
        if _loading:  # tuning another function: in this process nothing may hang
            return configs[0]
        self.script()
        children = [_Child(self) for _ in range(min(self.workers, len(configs)))]
        try:
            alive = self._run_all(names, call, record, children)
            times = self._time(alive, names, call, record, children[0])
        finally:
            for child in children:
                child.stop()
        if not times:
            whys = "; ".join(f"{n}: {c['why']}" for n, c in record.data["candidates"].items())
            raise RuntimeError(f"autotune: no configuration of {self.__qualname__} works: {whys}")
        best = min(times, key=lambda n: times[n].median)
        record.data["best"] = best
        record.save()
        self.listener({"event": "best", "config": names[best], "seconds": times[best].median})
        return names[best]

    def _source(self):
        try:
            text = inspect.getsource(inspect.getmodule(self.function))
            return hashlib.sha256(text.encode()).hexdigest()
        except (OSError, TypeError):
            return ""

    @staticmethod
    def _place():
        info = _core.system_info()
        device = info["devices"][info["device"]] if info["device"] >= 0 else {}
        versions = [device.get("driver"), info["nvrtc"], sys.modules[__package__].__version__]
        return [device.get("name"), *versions, info["backend"]]

    def _run_all(self, names, call, record, children):
        """The names of candidates that run and pass the check."""
        known, idle = record.data["candidates"], queue.SimpleQueue()
        for child in children:
            idle.put(child)

        def run(name):
            child = idle.get()
            try:
                return name, *child.ask("run", [names[name]], call, self.timeout)
            finally:
                idle.put(child)

        todo = [n for n in names if n not in known]
        with concurrent.futures.ThreadPoolExecutor(len(children)) as pool:
            running = [pool.submit(run, n) for n in todo]
            try:
                for done in concurrent.futures.as_completed(running):
                    name, status, why = done.result()
                    if status == "ok" and why is not None:
                        status = "wrong"
                    known[name] = {"status": status, "why": why}
                    record.save()
                    event = {"event": "run", "config": names[name], "status": status, "why": why}
                    self.listener(event)
            finally:  # no others, if one cannot start or the user interrupts
                pool.shutdown(wait=False, cancel_futures=True)
        return [n for n in names if known[n]["status"] == "ok"]

    def _time(self, alive, names, call, record, child):
        """{name: Timing} of the candidates that stay to the end."""
        samples = {n: [] for n in alive}
        for k in range(self.rounds):
            if len(samples) == 1 and k:
                break
            order = list(samples)[:: -1 if k % 2 else 1]
            timeout = self.timeout * len(order)
            status, found = child.ask("time", [names[n] for n in order], call, timeout)
            if status != "ok":  # one of them; find out which
                for n in order:
                    status, found = child.ask("time", [names[n]], call, self.timeout)
                    if status != "ok":
                        del samples[n]
                        record.data["candidates"][n] = {"status": status, "why": found}
                        record.save()
                        self.listener(
                            {"event": "run", "config": names[n], "status": status, "why": found}
                        )
                if not samples:
                    return {}
                continue
            for n, seconds in zip(order, found):
                samples[n].append(seconds)
            samples = self._faster(samples)
        return {n: Timing(tuple(s)) for n, s in samples.items() if s}

    @staticmethod
    def _faster(samples):
        """Without those that are slower than the best one for sure."""
        times = {n: Timing(tuple(s)) for n, s in samples.items()}
        best = min(times.values(), key=lambda t: t.median)
        if len(best.samples) < _FEWEST:
            return samples
        slow = [n for n, t in times.items() if t is not best and best.ratio(t)[1] > 1]
        return {n: s for n, s in samples.items() if n not in slow}


def _takes_config(function):
    """Can it be called with config=?"""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # unknown
        return True
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return "config" in by_name or any(p.kind is p.VAR_KEYWORD for p in parameters)


def autotune(
    configs,
    *,
    key=None,
    prune=None,
    check=None,
    listener=None,
    timer=host_timer,
    timeout=120.0,
    workers=2,
    rounds=30,
):
    """Decorator: a function of arrays and ``config=`` as a function of the arrays, which runs with
    the fastest of ``configs``.

    ``configs``: any objects that can be pickled and whose repr tells them apart, in every process
    in the same way. ``key(*args)``: what the choice depends on; by default shapes, dtypes and other
    arguments. ``prune(config, *args)``: is it worth a try? ``check(result, *args)``: None or True
    if the result is right, else False or what is wrong; it runs in a child process.
    ``listener(event)``: gets a dict for every candidate that ran and for the choice. ``timer(f)``:
    seconds of a call ``f()``, in a child; by default by the clock of the host, so the function
    should make a kernel once, not in each call. ``timeout``: seconds after which a candidate hangs;
    imports do not count. ``workers``: processes that compile. ``rounds``: how often candidates are
    timed at most.

    The function must be an attribute of a module, which child processes import, or of a script,
    which they execute as far as the first call of the function. The choice is kept in the compile
    cache, for each GPU, driver, NVRTC, version of this package and text of the module.
    ``f.tune(*args)`` returns it without a call. Keyword arguments are passed on. TypeError for what
    is no function, has no argument ``config`` or cannot be imported, ValueError if there are no
    configurations or ``prune`` leaves none, RuntimeError if none works or no child process starts.
    """
    configs = list(configs)
    if not configs or len({repr(c) for c in configs}) != len(configs):
        raise ValueError(f"autotune: configs must be different ones, at least one; got {configs}")
    for c in configs:
        if re.search(r" at 0x[0-9a-f]+>", repr(c)):
            raise ValueError(
                f"autotune: the repr of a config is its name on disk, and {c!r} has another one in"
                " each process: pass tuples, dicts, named tuples or dataclasses"
            )
    if not (timeout > 0 and workers >= 1 and rounds >= 1):
        raise ValueError(
            f"autotune: timeout, workers and rounds must be positive, got {timeout}, {workers},"
            f" {rounds}"
        )

    def wrap(function):
        if not (callable(function) and hasattr(function, "__qualname__")):
            raise TypeError(f"autotune: expected a function, got {show(function)}")
        if not _takes_config(function):
            raise TypeError(f"autotune: {function.__qualname__} has no argument config=")
        options = timeout, workers, rounds
        return Autotuned(function, configs, key, prune, check, listener, timer, options)

    return wrap
