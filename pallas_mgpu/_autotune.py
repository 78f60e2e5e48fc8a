"""`autotune`: the fastest of several configurations of a function, found once and kept on disk.

Candidates run in child processes, because a wrong configuration may hang or poison a GPU: a child
that does not answer in time is killed, and the next candidate gets a fresh one.

1. Every candidate runs once, `workers` of them at a time, so programs are compiled in parallel; the
   result is checked. What fails or hangs is out.
2. One child times those that are left in turns, a round at a time. After a few rounds, candidates
   that are slower for sure (the interval of the median of ratios to the best one) leave. It ends
   when one is left, or after `rounds`.

Each answer is written to disk when it comes, so that tuning that was cut off resumes."""

import concurrent.futures
import contextlib
import functools
import hashlib
import inspect
import json
import multiprocessing
import queue
import sys
import time
from pathlib import Path

from . import _core, tree
from ._bench import Timing
from ._names import show

_FEWEST = 5  # rounds before candidates leave
_START = 300.0  # seconds that a child may take to import what it needs


def host_timer(f, seconds=0.02):
    """Seconds per call by the clock of the host, with the GPU idle before and after."""
    f()
    _core.synchronize()
    count, took = 1, 0.0
    while True:
        start = time.perf_counter()
        for _ in range(count):
            f()
        _core.synchronize()
        took = time.perf_counter() - start
        if took > seconds or count >= 1 << 16:
            return took / count
        count *= 4


# ---- in a child ----------------------------------------------------------------------------------


def _host(x):
    return x.numpy() if isinstance(x, _core.DeviceArray) else x


def _serve(connection, tuned, timer):
    """Answers (command, configs, args) until the other side is gone."""
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        connection.send("ready")  # from here on the time of a candidate counts
        while True:
            command, configs, on_gpu, args = connection.recv()
            args = [_core.device_put(x) if put else x for x, put in zip(args, on_gpu)]
            try:
                if command == "run":
                    result = tuned.function(*args, config=configs[0])
                    _core.synchronize()
                    why = tuned.check(result, *args) if tuned.check else None
                    answer = None if why in (None, True) else str(why or "check returned False")
                else:
                    calls = [functools.partial(tuned.function, *args, config=c) for c in configs]
                    answer = [timer(f) for f in calls]
                connection.send(("ok", answer))
            except Exception as e:  # noqa: BLE001 - the parent decides
                connection.send(("failed", f"{type(e).__name__}: {e}"))


class _Child:
    """A process that runs candidates; made when it is needed, and anew after it was killed."""

    def __init__(self, tuned):
        self.tuned, self.process = tuned, None

    def ask(self, command, configs, args, timeout):
        """("ok", answer), ("failed", why) or ("hung", why)."""
        on_gpu = [isinstance(x, _core.DeviceArray) for x in args]
        try:
            if self.process is None:
                self._start()
                if not self.connection.poll(_START):
                    self.stop()
                    return "failed", f"a process for it did not start in {_START:.0f} s"
                self.connection.recv()
            self.connection.send((command, configs, on_gpu, [_host(x) for x in args]))
            if not self.connection.poll(timeout):
                self.stop()
                return "hung", f"no answer in {timeout} s"
            return self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = self.stop()
            return "failed", f"the process ended with code {code}"

    def _start(self):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(other, self.tuned, self.tuned.timer), daemon=True
        )
        self.process.start()
        other.close()

    def stop(self):
        if self.process is None:
            return None
        self.process.kill()
        self.process.join()
        self.connection.close()
        code, self.process = self.process.exitcode, None
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
                if found["what"] == what:
                    self.data = found

    def save(self):
        if self.path is None:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part = self.path.with_suffix(f".{time.time_ns()}")
            part.write_text(json.dumps(self.data))
            part.replace(self.path)


def _shape_of(x):
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return [list(x.shape), str(x.dtype)]
    return repr(x)


# ---- the function --------------------------------------------------------------------------------


class Autotuned:
    """What :func:`autotune` returns: the function without its argument ``config``."""

    def __init__(self, function, configs, key, prune, check, listener, timer, options):
        functools.update_wrapper(self, function)
        self.function, self.configs, self.key, self.prune = function, configs, key, prune
        self.check, self.listener, self.timer = check, listener or (lambda event: None), timer
        self.timeout, self.workers, self.rounds = options
        self.best = {}  # by key

    def __reduce__(self):
        return self.__qualname__

    def __call__(self, *args):
        return self.function(*args, config=self.tune(*args))

    def tune(self, *args):
        """The configuration for such arguments; found first where it is not known."""
        key = [_shape_of(x) for x in tree.leaves(list(args))] if self.key is None else None
        key = repr(key if self.key is None else self.key(*args))
        if key not in self.best:
            self.best[key] = self._find(key, args)
        return self.best[key]

    def _find(self, key, args):
        configs = [c for c in self.configs if self.prune is None or self.prune(c, *args)]
        if not configs:
            raise ValueError(f"autotune: prune leaves no configuration of {self.__qualname__}")
        if len(configs) == 1:
            return configs[0]
        names = {repr(c): c for c in configs}
        record = _Record([self.__module__, self.__qualname__, self._source(), key, self._place()])
        best = record.data["best"]
        if best in names and set(names) <= set(record.data["candidates"]):
            return names[best]
        children = [_Child(self) for _ in range(min(self.workers, len(configs)))]
        try:
            alive = self._run_all(names, args, record, children)
            times = self._time(alive, names, args, record, children[0])
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
            return hashlib.sha256(inspect.getsource(self.function).encode()).hexdigest()
        except (OSError, TypeError):
            return ""

    @staticmethod
    def _place():
        info = _core.system_info()
        device = info["devices"][info["device"]] if info["device"] >= 0 else {}
        versions = [device.get("driver"), info["nvrtc"], sys.modules[__package__].__version__]
        return [device.get("name"), *versions, info["backend"]]

    def _run_all(self, names, args, record, children):
        """The names of candidates that run and pass the check."""
        known, idle = record.data["candidates"], queue.SimpleQueue()
        for child in children:
            idle.put(child)

        def run(name):
            child = idle.get()
            try:
                return name, *child.ask("run", [names[name]], args, self.timeout)
            finally:
                idle.put(child)

        todo = [n for n in names if n not in known]
        with concurrent.futures.ThreadPoolExecutor(len(children)) as pool:
            for done in concurrent.futures.as_completed([pool.submit(run, n) for n in todo]):
                name, status, why = done.result()
                if status == "ok" and why is not None:
                    status = "wrong"
                known[name] = {"status": status, "why": why}
                record.save()
                event = {"event": "run", "config": names[name], "status": status, "why": why}
                self.listener(event)
        return [n for n in names if known[n]["status"] == "ok"]

    def _time(self, alive, names, args, record, child):
        """{name: Timing} of the candidates that stay to the end."""
        samples = {n: [] for n in alive}
        for k in range(self.rounds):
            if len(samples) == 1 and k:
                break
            order = list(samples)[:: -1 if k % 2 else 1]
            timeout = self.timeout * len(order)
            status, found = child.ask("time", [names[n] for n in order], args, timeout)
            if status != "ok":  # one of them; find out which
                for n in order:
                    status, found = child.ask("time", [names[n]], args, self.timeout)
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

    ``configs``: any objects whose repr tells them apart and that can be pickled. ``key(*args)``:
    what the choice depends on; by default shapes, dtypes and other arguments. ``prune(config,
    *args)``: is it worth a try? ``check(result, *args)``: None or True if the result is right, else
    False or what is wrong; it runs in a child process. ``listener(event)``: gets a dict for every
    candidate that ran and for the choice. ``timer(f)``: seconds of a call ``f()``, in a child.
    ``timeout``: seconds after which a candidate hangs; imports do not count. ``workers``: processes
    that compile. ``rounds``: how often candidates are timed at most.

    The function must be an attribute of a module that child processes can import. The choice is
    kept in the compile cache, for each GPU, driver, NVRTC, version of this package and text of the
    function.
    ``f.tune(*args)`` returns it without a call. TypeError for what is no function, ValueError if no
    configurations are given or ``prune`` leaves none, RuntimeError if none works.
    """
    configs = list(configs)
    if not configs or len({repr(c) for c in configs}) != len(configs):
        raise ValueError(f"autotune: configs must be different ones, at least one; got {configs}")
    if not (timeout > 0 and workers >= 1 and rounds >= 1):
        raise ValueError(
            f"autotune: timeout, workers and rounds must be positive, got {timeout}, {workers},"
            f" {rounds}"
        )

    def wrap(function):
        if not callable(function):
            raise TypeError(f"autotune: expected a function, got {show(function)}")
        options = timeout, workers, rounds
        return Autotuned(function, configs, key, prune, check, listener, timer, options)

    return wrap
