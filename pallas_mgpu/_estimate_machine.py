"""A multiprocessor in time, for `plgpu.estimate`: what one SM does with the blocks that it gets.

Threads are generators (`_estimate_program`). Each runs until it uses an engine or waits; the one
whose time is least goes on. Engines are the instruction slots of the four schedulers, the special
function units, the tensor cores, shared memory, and the ways in from and out to the L2. An engine
does one thing after another, in the order of requests. The other SMs are not simulated: they do the
same at the same time, so each gets an equal share of the bandwidth of L2 and memory, and a counter
of the launch that one of them asks goes on by the number of those that ask.

Times are cycles of the SM."""

import dataclasses
import functools
import heapq
import math

from . import _core
from ._estimate_loops import EVENTS, MOST
from ._estimate_values import UNKNOWN


@dataclasses.dataclass(frozen=True)
class Facts:
    """A GPU. Bytes and operations per cycle of the clock, latencies in cycles.

    What ends in "fitted" was chosen so that times of every other kernel of
    benchmarks/estimate_cases.py come near those that are kept there (H200), by steps in one
    constant after another; `wgmma_least` and `launch` were changed by hand after that. So they
    stand for more than their names say: `wgmma_latency`, for one, is all that happens between the
    end of a product and what its thread does next. The others are those of the instruction set, of
    data sheets, or of the model of `ops.matmul`."""

    name: str
    sms: int
    memory: float  # bytes a second that a copy reads and writes
    clock: float = 1.82e9  # cycles a second where power does not limit it; fitted
    warm_bytes: float = 7.5e6  # a call that moves no more finds all of it in the L2; fitted
    cold_bytes: float = 47e6  # nothing, from here on; fitted
    l2: float = 7890.0  # bytes that it gives to all SMs; fitted
    intake: float = 84.0  # bytes that one SM takes in; fitted
    outflow: float = 107.0  # fitted
    latency: float = 386.0  # of a copy from the L2; fitted
    lane_latency: float = 555.0  # of a load by lanes from there; fitted
    memory_latency: float = 652.0  # more, from memory; fitted
    tensor: float = 4350.0  # wgmma: multiply-adds times bytes of an element; fitted
    mma: float = 2048.0  # the same of mma
    special: float = 11.5  # fitted
    shared: float = 128.0  # bytes
    registers: int = 65536
    threads: int = 2048
    blocks: int = 32
    shared_bytes: int = 233472  # of all blocks, with 1024 of each that the driver takes
    wgmma_least: float = 35.8  # cycles of one instruction, however few columns it has; fitted
    wgmma_latency: float = 443.0  # fitted
    wgmma_gap: float = 7.7  # of the tensor cores between two products; fitted
    issue: float = 8.5  # an asynchronous operation, an arrival; fitted
    wake: float = 45.0  # from the end of a phase to the next instruction; fitted
    exchange_latency: float = 200.0  # to another block of the cluster
    exchange: float = 11.0  # bytes
    instruction: float = 1.2  # cycles of a scheduler for one of a warp; fitted
    alone: float = 2.0  # from one instruction of a warp to its next
    begin: float = 460.0  # a block starts; fitted
    next_block: float = 296.0  # from the start of a block to that of the next on the SM; fitted
    end: float = 239.0  # stores are seen; fitted
    launch: float = 1.0e-6  # seconds between kernels in a stream; fitted
    overlapped: float = 0.1e-6  # the same where the next one starts before the end (PDL); fitted
    joules: float = 1.49e-12  # of a multiply-add of 16 bits; fitted
    joules_byte: float = 11.8e-12  # of a byte that an SM takes in; fitted
    joules_memory: float = 81e-12  # of a byte from or to memory; fitted
    watts: float = 620.0  # that are left for those


# what is known of the GPUs
GPUS = {
    "H200": Facts("H200", _core.target("sm_90a")["sms"], 4.16e12),
    "H100": Facts("H100", _core.target("sm_90a")["sms"], 3.0e12),
}


class Barrier:
    """Phases of one mbarrier. An arrival may lie in the future: of a copy, its completion."""

    __slots__ = ("needed", "count", "last", "done", "waiting")

    def __init__(self, needed):
        self.needed, self.count, self.last = needed, 0, 0.0
        self.done, self.waiting = [], {}

    def arrive(self, t):
        self.last = max(self.last, t)
        self.count += 1
        if self.count == self.needed:
            self.done.append(self.last)
            self.count, self.last = 0, 0.0
            for wake, since in self.waiting.pop(len(self.done) - 1, ()):
                wake(max(since, self.done[-1]))

    def until(self, t, waits, phase=None):
        """What a thread yields that waits at time t for its next phase."""
        if phase is None or phase is UNKNOWN:
            phase = waits.get(self, 0)
        waits[self] = phase + 1
        if phase < len(self.done):
            return max(t, self.done[phase])
        return self, phase, t

    def block(self, phase, t, wake):
        self.waiting.setdefault(phase, []).append((wake, t))


class Section:
    """A ring of threads that take turns."""

    def __init__(self):
        self.turn, self.since, self.waiting = 0, 0.0, {}

    def until(self, t, thread, n):
        return max(t, self.since) if self.turn == thread % n else (self, thread % n, t)

    def block(self, thread, t, wake):
        self.waiting[thread] = (wake, t)

    def leave(self, t, n):
        self.turn, self.since = (self.turn + 1) % n, t
        if self.turn in self.waiting:
            wake, since = self.waiting.pop(self.turn)
            wake(max(since, t))


class Named(Barrier):
    """A named barrier: of lanes, all of which join or come."""

    __slots__ = ("lanes",)

    def __init__(self, needed):
        super().__init__(needed)
        self.lanes = 0

    def come(self, t, lanes, waits):
        phase = len(self.done)
        self.last, self.lanes = max(self.last, t), self.lanes + lanes
        if self.lanes >= self.needed:
            self.lanes, self.count = 0, self.needed - 1
            self.arrive(t)
        return phase

    def join(self, t, lanes, waits):
        phase = self.come(t, lanes, waits)
        return self.until(t, {}, phase)


class Place:
    """A block: its barriers, the scalars in its shared memory, its counters."""

    def __init__(self, cluster, clusters, values):
        self.cluster, self.clusters = cluster, clusters
        self.scalars, self.kept, self.names, self.calls = {}, {}, {}, {}
        self.section, self.values = Section(), values
        self.skipped, self.told = 0, False

    def barriers(self, value, count, arrivals):
        """One array for all threads of the block, made anew where a scope begins again."""
        if value not in self.kept:
            self.kept[value] = [Barrier(arrivals) for _ in range(count)]
        return self.kept[value]

    def named(self, number, lanes):
        key = 0 if number is UNKNOWN else number
        if key not in self.names:
            self.names[key] = Named(lanes)
        return self.names[key]

    def next(self, n, sm):
        """The answer of a counter that all clusters ask: spread evenly over what the others got."""
        k = self.calls.get(n, -1) + 1
        if sm.over:
            self.skipped = k // 32
            k += self.skipped
        self.calls[n] = k
        return int((k + (k * 0.618 + self.cluster / self.clusters) % 1) * self.clusters)

    def argument(self, value, *index):
        array = self.values.get(value)
        if array is None or any(i is UNKNOWN for i in index):
            return UNKNOWN
        return array[tuple(min(max(i, 0), n - 1) for i, n in zip(index, array.shape))].item()


class Machine:
    """One SM. `share`: bytes a cycle of the L2 that it gets; `memory`: of memory; `cold`: by number
    of an argument, the part of its bytes that passes between L2 and memory."""

    def __init__(self, facts, share, memory, cold, dynamic):
        self.facts, self.cold = facts, cold
        self.in_cost = 1 / min(facts.intake, share)
        self.out_cost = 1 / min(facts.outflow, share)
        self.memory_cost = 1 / min(memory, facts.intake)
        self.slots = self.special = self.tensor = self.smem = 0.0
        self.way_in = self.way_out = self.memory = 0.0
        self.busy = dict.fromkeys(("instructions", "exponentials", "tensor cores", "SMEM"), 0.0)
        self.read, self.written, self.taken = {}, {}, 0.0
        self.macs = self.work_16 = 0  # multiply-adds; as many of 16 bits, for their energy
        self.ready, self.order, self.blocked = [], 0, {}
        self.left, self.over, self.extra, self.before = EVENTS, False, 0.0, None
        self.place = "the beginning"  # of the last loop that went on
        self.known = dynamic  # whether loops that go on now can be left out
        self.loops, self.left_out = {}, {}  # the last time of each loop; iterations, by line

    # -- engines

    def work(self, t, every, special):
        begin = max(t, self.slots)
        self.slots = begin + every * self.facts.instruction
        self.busy["instructions"] += every * self.facts.instruction
        end = max(self.slots, t + every * self.facts.alone)
        if special:
            special *= 128 / self.facts.special
            self.special = max(begin, self.special) + special
            self.busy["exponentials"] += special
            end = max(end, self.special)
        return end

    def shared(self, t, nbytes, latency):
        took = nbytes / self.facts.shared
        begin = max(t, self.smem)
        self.smem = begin + took
        self.busy["SMEM"] += took
        return self.smem + latency

    def exchange(self, t, nbytes, barrier):
        t += nbytes / self.facts.exchange
        barrier.arrive(t + self.facts.exchange_latency)
        return t

    def _take(self, t, array, nbytes, latency, blocks=1):
        """When bytes are there that so many blocks get with one copy."""
        self.taken += nbytes
        self.way_in = at = max(t, self.way_in) + nbytes * self.in_cost
        cold = self.cold.get(array, 0.0)
        if cold:
            self.memory = max(t, self.memory) + nbytes / blocks * cold * self.memory_cost
            at = max(at, self.memory)
            latency += min(1.0, 4 * cold) * self.facts.memory_latency
        return at + latency

    def load(self, t, since, array, nbytes):
        """(when the lanes go on, when the elements are there). since: the lanes met last; the
        compiler asks for elements as early as that, as far as registers go."""
        since = max(since, t - 600)
        self.read[array] = self.read.get(array, 0.0) + nbytes
        return t + nbytes / 512 + 4, self._take(since, array, nbytes, self.facts.lane_latency)

    def copy_in(self, t, array, nbytes, blocks, barrier):
        self.read[array] = self.read.get(array, 0.0) + nbytes / blocks
        barrier.arrive(self._take(t, array, nbytes, self.facts.latency, blocks))

    def _give(self, t, array, nbytes):
        self.written[array] = self.written.get(array, 0.0) + nbytes
        self.way_out = max(t, self.way_out) + nbytes * self.out_cost
        cold = self.cold.get(array, 0.0)
        if cold:  # what is written takes the way of what is read later
            self.memory = max(t, self.memory) + nbytes * cold * self.memory_cost
        return self.way_out

    def store(self, t, array, nbytes):
        left = self._give(t, array, nbytes)
        return max(t + nbytes / 512 + 4, left - 2000)  # what the ways can hold

    def copy_out(self, t, array, nbytes, stores):
        left = self._give(t, array, nbytes)
        stores.append((left + 300, left + self.facts.latency))

    def await_stores(self, t, stores, n, read_only):
        k = len(stores) - n
        if k > 0:
            t = max(t, max(s[not read_only] for s in stores[:k]))
            if not read_only:
                del stores[:k]
        return t

    def wgmma(self, t, macs, bits, cycles, read, products):
        shared = read / self.facts.shared
        took = max(cycles, shared) + self.facts.wgmma_gap
        begin = max(t, self.tensor)
        self.tensor = begin + took
        self.macs += macs
        self.work_16 += macs * bits / 16
        self.busy["tensor cores"] += cycles
        self.busy["SMEM"] += shared
        products.append(self.tensor + self.facts.wgmma_latency)
        return t

    def mma(self, t, macs, bits, cycles):
        begin = max(t, self.tensor)
        self.tensor = begin + cycles
        self.macs += macs
        self.work_16 += macs * bits / 16
        self.busy["tensor cores"] += cycles
        return self.tensor + 20

    def await_products(self, t, products, n):
        k = len(products) - n
        if k > 0:
            t = max(t, products[k - 1])
            del products[:k]
        return t

    def finish(self, t, stores, products, rest):
        """A thread ends: its shared memory must have been read, its stores come later. rest: cycles
        of iterations that were left out."""
        self.extra = max(self.extra, rest)
        self.end = max([self.end, t, *(s[1] for s in stores)])
        return max([t, *(s[0] for s in stores), *products])

    # -- more than can be simulated

    def _totals(self):
        single = {"taken": self.taken, "macs": self.macs, "work_16": self.work_16}
        return [dict(self.busy), dict(self.read), dict(self.written), single]

    def count(self, t, place):
        """An event at time t: an iteration of a loop at a line of Python, or a wait."""
        self.left -= 1
        self.place = place or self.place
        if self.left == EVENTS // 2:
            self.before = t, self._totals()
        elif self.left <= 0 and not self.over and self.known:
            self.over, self.since, self.left = True, (t, self._totals()), 0
            for thread, done in self.blocked.values():
                self._push(t, thread, done)
            self.blocked.clear()
        elif self.left < -MOST * EVENTS:
            raise NotImplementedError(
                f"plgpu.estimate: the loop at {self.place} has more iterations than are simulated,"
                " and their number is not known beforehand; measure with plgpu.testing.do_bench"
            )

    def _extrapolate(self):
        """What was left out reads, writes and multiplies at the rate of the last half before."""
        (begin, first), (end, last) = self.before, self.since
        factor = self.extra / (end - begin) if end > begin else 0.0
        more = [{k: (n - x.get(k, 0.0)) * factor for k, n in y.items()}
                for x, y in zip(first, last)]  # fmt: skip
        for total, x in zip((self.busy, self.read, self.written), more):
            total.update((k, total[k] + n) for k, n in x.items())
        self.taken += more[3]["taken"]
        self.macs += more[3]["macs"]
        self.work_16 += more[3]["work_16"]

    # -- threads

    def run(self, blocks, slots):
        """The time at which the last of `blocks` ends, `slots` of them at once. blocks: an iterator
        of functions of a begin that give the generators of a block's threads. `begun` of them begin
        before the machine has simulated EVENTS; no other one does."""
        self.end, self.started, self.blocks = 0.0, 0.0, iter(blocks)
        self.running = self.begun = 0  # blocks
        for _ in range(slots):
            self._start(0.0)
        while self.ready:
            t, _, thread, done = heapq.heappop(self.ready)
            self._resume(thread, t, done)
        if self.running:
            raise NotImplementedError(
                "plgpu.estimate: threads wait for what no thread of their block does, as far as the"
                " model knows; measure with plgpu.testing.do_bench"
            )
        if self.over:
            self._extrapolate()
        return self.end + self.extra

    def _push(self, t, thread, done):
        self.order += 1
        heapq.heappush(self.ready, (t, self.order, thread, done))

    def _wake(self, number, t):
        found = self.blocked.pop(number, None)
        if found:
            self._push(t, *found)

    def _start(self, t):
        make = None if self.over else next(self.blocks, None)
        if make is None:
            return
        self.begun += 1
        self.started = t = max(t + self.facts.begin, self.started + self.facts.next_block)
        threads = make(t)
        left = [len(threads), 0.0]
        self.running += 1

        def done(at):
            left[0] -= 1
            left[1] = max(left[1], at)
            if not left[0]:
                self.running -= 1
                self.end = max(self.end, left[1])
                self._start(left[1])

        for thread in threads:
            thread.send(None)
            self._push(t, thread, done)

    def _resume(self, thread, t, done):
        """Let a thread go on at time t, until another one is earlier or it waits."""
        ready = self.ready
        while True:
            self.count(t, None)
            try:
                found = thread.send(t)
            except StopIteration as stop:
                done(stop.value)
                return
            if type(found) is tuple:
                what, phase, since = found
                if self.over:  # whom it waits for may have left out what would end the wait
                    t = since
                    continue
                self.order += 1
                self.blocked[self.order] = thread, done
                what.block(phase, since, functools.partial(self._wake, self.order))
                return
            if type(found) is list:
                self._fork(found, t, thread, done)
                return
            t = found
            if ready and ready[0][0] < t:
                self._push(t, thread, done)
                return

    def _fork(self, warps, t, thread, done):
        left = [len(warps), t]

        def joined(at):
            left[0] -= 1
            left[1] = max(left[1], at)
            if not left[0]:
                self._push(left[1], thread, done)

        for warp in warps:
            warp.send(None)
            self._push(t, warp, joined)


def occupancy(facts, threads, smem, registers):
    """Blocks of an SM at once."""
    found = [facts.blocks, facts.threads // threads, facts.shared_bytes // (smem + 1024)]
    if registers:
        a_warp = math.ceil(registers * 32 / 256) * 256
        found.append(facts.registers // (a_warp * (threads // 32)))
    return max(min(found), 1)
