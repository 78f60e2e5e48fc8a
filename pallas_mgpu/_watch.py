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
import functools
import importlib
import math
import numbers
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
    """That of one mesh. The number of `_core.mesh_watch` is made for the first launch.

    _symmetric.py keeps here, in the order of allocation: ``tensors``, their addresses and storage;
    ``buffers`` of NVSHMEM, and its processing ``elements`` by ranks."""

    def __init__(self, name, devices, timeout, control=None):
        self.name, self.devices, self.timeout, self.control = name, devices, timeout, control
        self.number, self.why, self.closed = 0, None, False
        self.tensors, self.buffers, self.elements = [], [], None
        self._key = self._wake = None

    def __repr__(self):
        return f"<watch of {self.devices} devices>"

    def open(self, device):
        """The number for launches, which check whether waits were ended before."""
        if not self.number or self.closed:
            self.check()
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
        if self.closed:
            raise RuntimeError(f"the mesh {self.name} was closed; make a new DeviceMesh")
        if self.number:
            _core.mesh_check(self.number)
        elif self.why:
            raise _core.DeadlockError(
                f"the mesh of {self.devices} devices cannot be used any more: {self.why}. Make a"
                " new DeviceMesh, and arrays for it"
            )

    def gather(self, mine):
        """What each process of the group gives, by ranks; on the CPU. RuntimeError after the
        timeout."""
        dist = importlib.import_module("torch.distributed")
        everyone = [None] * self.devices
        dist.all_gather_object(everyone, mine, group=self.control)
        return everyone

    def is_over(self):
        try:
            self.check()
        except _core.DeadlockError:
            return True
        return False

    def forget(self):
        """Equal meshes that are made from now on get another watch."""
        if _known.get(self._key) is self:
            del _known[self._key]
        if self._wake is not None:
            os.eventfd_write(self._wake, 1)


@functools.cache
def _leave_at_exit():
    atexit.register(_core.mesh_leave, _LEAVE)


def watch_of(what, name, timeout):
    """The watch of a mesh, which equal meshes share. what: its shape, axes, devices, group and
    memory. With a group, all of its processes call this."""
    bad = isinstance(timeout, bool) or not isinstance(timeout, (numbers.Real, type(None)))
    if bad or (timeout is not None and not 0 <= timeout < 4_000_000):
        raise ValueError(
            f"DeviceMesh: timeout must be seconds below 4,000,000, 0 for none, got {show(timeout)}"
        )
    shape, _, devices, group, memory = what
    if devices is None and group is None:
        timeout = None
    else:
        _leave_at_exit()
    key = (*what, timeout)
    found = _known.get(key)
    usable = found is not None and not found.is_over()
    control, processes = _meet(group, timeout, usable, memory) if group is not None else (None, [])
    if usable and all(p["usable"] for p in processes):
        return found
    n = math.prod(shape)
    made = _known[key] = Watch(name, n, timeout, control)
    made._key = key
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


def _meet(group, timeout, usable, memory):
    """That group, a new one if the old one is broken, and what its processes say. ValueError if
    they ask for different memory."""
    try:
        control = _control_of(group, timeout)
        found = _processes(control, usable, memory)
    except RuntimeError:
        del _control[group, timeout]
        control = _control_of(group, timeout)
        found = _processes(control, False, memory)
    for p in found:
        if p["memory"] != found[0]["memory"]:
            raise ValueError(
                f"DeviceMesh: memory is {found[0]['memory']!r} on rank 0 and {p['memory']!r} on"
                f" rank {p['rank']}"
            )
    return control, found


def _processes(group, usable, memory):
    """What each process of a group says of itself."""
    dist = importlib.import_module("torch.distributed")
    own = {"usable": usable, "memory": memory, "pid": os.getpid(), "host": socket.gethostname()}
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
    wake = watch._wake = os.eventfd(0)
    poll.register(wake, select.POLLIN)

    def run():
        for fd, _ in poll.poll():
            if fd in ends:
                watch.end(ends[fd])
        watch._wake = None
        for fd in (wake, *ends):
            os.close(fd)

    threading.Thread(target=run, name="pallas_mgpu mesh", daemon=True).start()
