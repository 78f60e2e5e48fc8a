"""Ends the waits of a mesh for devices that will not signal any more.

Kernels look at words in host memory while they wait for other devices (csrc/runtime/watch.c). A
wait ends when it has lasted longer than the timeout of its mesh. It ends at once when a launch on
another device of this process failed, when the process of another device ended, or when the
interpreter exits. A mesh whose waits were ended stays unusable, since its devices have counted
different numbers of launches.

Processes of a group tell each other their numbers when they make a mesh. A thread waits for the end
of those on the same host, by file descriptors of the processes."""

import atexit
import contextlib
import datetime
import importlib
import os
import select
import socket
import threading

from . import _core
from ._names import show

_LEAVE = 5000  # milliseconds that kernels may go on when the interpreter exits
_known: dict = {}  # what describes a mesh: its watch
_control: dict = {}  # (group, timeout): a group of the same processes that meets on the CPU


class Watch:
    """That of one mesh. The number of `_core.mesh_watch` is made for the first launch."""

    def __init__(self, devices, timeout, control=None):
        self.devices, self.timeout, self.control = devices, timeout, control
        self.number, self.why = 0, None

    def __repr__(self):
        return f"<watch of {self.devices} devices>"

    def open(self, device):
        """The number for launches; DeadlockError if waits were ended before."""
        self.check()
        if not self.number:
            after = -1 if self.timeout is None else int(self.timeout * 1000)
            self.number = _core.mesh_watch(device, self.devices, after)
            if self.why:  # meanwhile
                _core.mesh_end(self.number, self.why)
        return self.number

    def end(self, why):
        """End all waits, for a reason that later calls give."""
        self.why = self.why or why
        if self.number:
            _core.mesh_end(self.number, self.why)

    def check(self):
        if self.number:
            _core.mesh_check(self.number)
        elif self.why:
            raise _core.DeadlockError(
                f"the mesh of {self.devices} devices cannot be used any more: {self.why}. Make a"
                " new DeviceMesh, and arrays for it"
            )

    def meet(self):
        """Wait for all processes of the group, on the CPU. RuntimeError after the timeout."""
        dist = importlib.import_module("torch.distributed")
        dist.all_gather_object([None] * self.devices, 0, group=self.control)

    def is_over(self):
        try:
            self.check()
        except _core.DeadlockError:
            return True
        return False


def watch_of(what, n, group, timeout):
    """The watch of a mesh, which equal meshes share; None: it has no GPUs. group: all of its
    processes call this."""
    bad = isinstance(timeout, bool) or not isinstance(timeout, (int, float, type(None)))
    if bad or (timeout is not None and not 0 <= timeout < 4_000_000):
        raise ValueError(
            f"DeviceMesh: timeout must be seconds below 4,000,000, 0 for none, got {show(timeout)}"
        )
    *_, devices, _ = what
    if devices is None and group is None:
        return None
    if not _known:
        atexit.register(_core.mesh_leave, _LEAVE)
    key = (*what, timeout)
    found = _known.get(key)
    usable = found is not None and not found.is_over()
    control, processes = _meet(group, timeout, usable) if group is not None else (None, [])
    if usable and all(p["usable"] for p in processes):
        return found
    made = _known[key] = Watch(n, timeout, control)
    if n > 1:
        _follow(made, processes)
    return made


def _control_of(group, timeout):
    """A group of the same processes, whose meetings need no GPU and end in time."""
    dist = importlib.import_module("torch.distributed")
    if (group, timeout) not in _control:
        after = datetime.timedelta(seconds=timeout) if timeout else None
        ranks = dist.get_process_group_ranks(group)
        _control[group, timeout] = dist.new_group(
            ranks, after, "gloo", use_local_synchronization=len(ranks) < dist.get_world_size()
        )
    return _control[group, timeout]


def _meet(group, timeout, usable):
    """That group, a new one if the old one is broken, and what its processes say."""
    try:
        control = _control_of(group, timeout)
        return control, _processes(control, usable)
    except RuntimeError:
        del _control[group, timeout]
        control = _control_of(group, timeout)
        return control, _processes(control, False)


def _processes(group, usable):
    """What each process of a group says of itself."""
    dist = importlib.import_module("torch.distributed")
    own = {"usable": usable, "pid": os.getpid(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):  # processes of other containers have numbers of their own
        own["space"] = os.readlink("/proc/self/ns/pid")
    everyone = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, own, group=group)
    return [dict(p, rank=r, near=p != own and _same_host(p, own)) for r, p in enumerate(everyone)]


def _same_host(a, b):
    return "space" in a and all(a[k] == b.get(k) for k in ("host", "space"))


def _follow(watch, processes):
    """End the waits once another process of this host has ended."""
    if not hasattr(os, "pidfd_open"):
        return
    ends, poll = {}, select.poll()
    for p in processes:
        if not p["near"] or p["pid"] == os.getpid():
            continue
        text = f"the process of rank {p['rank']} ({p['pid']}) has ended"
        try:
            fd = os.pidfd_open(p["pid"])
        except ProcessLookupError:
            watch.end(text)
            continue
        except OSError:  # not allowed here; the timeout remains
            continue
        ends[fd] = text
        poll.register(fd, select.POLLIN)
    if not ends:
        return

    def run():
        for fd, _ in poll.poll():
            watch.end(ends[fd])
        for fd in ends:
            os.close(fd)

    threading.Thread(target=run, name="pallas_mgpu mesh", daemon=True).start()
