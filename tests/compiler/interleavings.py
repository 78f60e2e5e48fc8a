"""Explores every interleaving of a generated program, with data removed: barriers, copies, tensor
core, lanes that meet. No state may be a deadlock, and every read must find what the same write left
there in all of them, and nothing that is under way may be touched; so nothing is used before it is
there and no buffer is overwritten too early.

The lanes' events come from lanes.py. Lanes with the same events act as one, lanes that touch
neither memory nor mbarriers drop out. A place is a part of shared memory of a block (a buffer's
first dimension, cut where copies begin) or columns of tensor memory. It holds the name of the write
that filled it, or that one is under way. What an engine does (a copy, products, a commit, the
answer of cluster launch control) begins when it is issued and takes effect at any later time; what
tells nobody (products, stores) ends as late as somebody may learn of it, with the commit or the
wait for it, as ends before that only make fewer orders wrong. The tensor core does in order what
one lane issues.

A step of a lane is a wait, a meeting, or all accesses up to the next arrival with that arrival:
orders that differ inside steps only give the same values, unless two accesses conflict without an
order, and then some order of steps shows it. Meetings concern nobody else and are taken at once.
States are kept whole, none is left out.

Not modelled: lanes of a warp that meet (programs whose warps arrive one by one need `followers=()`,
which makes a warpgroup one lane), fences, whether mbarriers are initialised when they are used, and
data; branches on data go one way in a search, for all of it."""

import array
import bisect
import functools
import math
import re
from typing import NamedTuple

import lanes
from lanes import PEER, Unknown


class Wrong(Exception):
    """An interleaving that must not be; `args`: what, and the steps that lead to it."""


class Op(NamedTuple):
    kind: str
    reads: tuple = ()  # places
    writes: tuple = ()
    barriers: tuple = ()  # (barrier, arrivals, bytes)
    parity: int = 0
    needs: frozenset = frozenset()  # ops of the lane that must have ended
    group: object = None
    text: str = ""
    lanes: bool = False  # each lane its part
    id: int = 0  # in its lane


# ---- what lanes do -------------------------------------------------------------------------------

SKIPPED = re.compile(
    r"fence_|tcgen05_fence|setmaxnreg|mbarrier_init|tmem_(alloc|relinquish)|warp_sync|tma_prefetch"
    r"|bulk_prefetch"
)
COLUMNS = {"16x256b": 8, "16x128b": 4, "32x32b": 1}


def address(x):
    if isinstance(x, Unknown):
        raise NotImplementedError("an address depends on data")
    return x


class Memory:
    """Places of shared memory, of a block: (block, from, to), and of tensor memory."""

    def __init__(self, text, events):
        self.slots = {}  # where buffers, or elements of their first dimension, begin and end
        for m in re.finditer(r"= smem \+ (\d+); // smem (\w+)\[([\d,]*)\]", text):
            shape = [int(x) for x in m[3].split(",") if x]
            parts = shape[0] if len(shape) > 2 or len(shape) == 2 and shape[0] <= 8 else 1
            size = bytes_of(m[2], shape) // parts
            for start in range(int(m[1]), int(m[1]) + parts * size, size):
                self.slots.setdefault(start, start + size)
        starts = sorted(self.slots)
        for end in list(self.slots.values()):  # what lies between buffers is no part of them
            if end not in self.slots:
                self.slots[end] = next((s for s in starts if s > end), end + (1 << 16))
        self.of_lanes = set()  # buffers of which each lane loads what it has stored, or its like
        cuts = {*self.slots, *self.slots.values()}
        for e in events:
            if e.name.startswith(("tma_load", "tma_multicast", "bulk_load")):
                cuts.add(address(e.args[0]) % PEER)
        self.cuts, self.halves = sorted(cuts), {}

    def find_halves(self, events):
        """Cuts buffers of which one warpgroup stores all bytes before, and one after, a place."""
        stored = {}
        for (_, tid), found in events.items():
            for e in found:
                if e.name.startswith(("st_shared", "stmatrix")):
                    at = address(e.args[0]) % PEER
                    start = max(s for s in self.slots if s <= at)
                    stored.setdefault(start, {}).setdefault(tid // 128, set()).add(at)
        for start, by in stored.items():
            parts = sorted((min(x), max(x)) for x in by.values())
            if len(parts) == 2 and parts[0][1] < parts[1][0]:
                self.halves[start] = parts[1][0] & ~1023
        self.cuts = sorted({*self.cuts, *self.halves.values()})

    def stored(self, block, at):
        """The places of a store to byte `at`."""
        start = max(s for s in self.slots if s <= at)
        half = self.halves.get(start, start)
        return tuple(p for p in self.slot(block, at) if (p[2] < half) == (at < half))

    def find_lanes(self, events):
        """A lane's like is that of the same number in another warpgroup."""
        stored, loaded = {}, {}
        for (block, tid), found in events.items():
            for e in found:
                if e.name == "st_shared":
                    stored.setdefault((block, tid % 128), set()).add(address(e.args[0]))
                elif e.name in ("ld_shared", "ldmatrix_x4", "ldmatrix_x4_trans"):
                    loaded.setdefault((block, tid % 128), set()).add(address(e.args[1]))
        starts = sorted(self.slots)
        of = lambda x: starts[bisect.bisect(starts, x) - 1]  # noqa: E731
        others = {of(x) for k, all_ in loaded.items() for x in all_ - stored.get(k, set())}
        self.of_lanes = {of(x) for all_ in loaded.values() for x in all_} - others

    def part(self, block, at):
        """What a copy to `at` fills: (place, bytes)."""
        k = self.cuts.index(at)
        return ("s", block, at), self.cuts[k + 1] - at

    def slot(self, block, at):
        """The places of the buffer that has byte `at`."""
        start = max(s for s in self.slots if s <= at)
        end = self.slots[start]
        return tuple(("s", block, c) for c in self.cuts if start <= c < end)


def bytes_of(dtype, shape):
    bits = 8 if dtype.startswith("float8") else int(re.search(r"\d+", dtype)[0])
    return math.prod(shape) * bits // 8


def columns(block, at, n):
    at &= 0xFFFF
    return tuple(("t", block, c) for c in range(at // 4 * 4, at + n, 4))


class Reader:
    """Turns events of one lane into ops."""

    def __init__(self, memory, block, tid, blocks):
        self.memory, self.block, self.wg, self.blocks = memory, block, tid // 128, blocks
        self.tid, self.ops = tid, []
        self.groups = [[]]  # of bulk stores
        self.loads, self.stores = [], []

    def put(self, kind, **fields):
        self.ops.append(Op(kind, text=self.text, id=len(self.ops), **fields))

    def smem(self, at):
        at = address(at)
        return self.memory.slot(self.block + at // PEER, at % PEER)

    def barrier(self, at, arrivals=0, tx=0, block=None):
        at = address(at)
        own = self.block + at // PEER if block is None else address(block)
        return ((own, at % PEER), arrivals, tx)

    def read(self, events):
        for k, e in enumerate(events):
            self.text, self.next = f"{e.name} ({e.note})", events[k + 1 :]
            if not SKIPPED.match(e.name):
                handler = next((h for p, h in HANDLERS if re.match(p, e.name)), None)
                if handler is None:
                    raise NotImplementedError(str(e))
                handler(self, e)
        return self.ops

    # ---- barriers

    def wait(self, e):
        bar, _, _ = self.barrier(e.args[0])
        self.put("wait", barriers=((bar, 0, 0),), parity=address(e.args[1]))

    def arrive(self, e):
        n = int(e.template) if e.name.startswith("mbarrier_arrive_n") else 1
        self.put("arrive", barriers=(self.barrier(e.args[0], n),))

    def arrive_remote(self, e):
        self.put("arrive", barriers=(self.barrier(e.args[0], 1, block=e.args[1]),))

    def expect(self, e):
        self.put("arrive", barriers=(self.barrier(e.args[0], 1, address(e.args[1])),))

    def meet(self, e):
        where = {"cluster_sync": ("cluster",), "block_sync": ("block", self.block)}
        of = where.get(e.name) or ("warpgroup", self.block, self.wg)
        self.put("meet", group=of)

    # ---- copies

    def fill(self, e, blocks, barrier_of, barrier=None):
        at = address(e.args[0])
        writes, barriers = [], []
        for b in blocks:
            place, size = self.memory.part(b + at // PEER, at % PEER)
            writes.append(place)
            barriers.append(self.barrier(barrier or e.args[2], 0, -size, barrier_of(b)))
        self.put("copy", writes=tuple(writes), barriers=tuple(barriers))

    def load(self, e):
        self.fill(e, [self.block], lambda b: None)

    def multicast(self, e):
        to = [b for b in range(self.blocks) if address(e.args[3]) >> b & 1]
        pair = "pair" in e.name
        self.fill(e, to, (lambda b: None) if pair else (lambda b: b))

    def bulk_load(self, e):
        self.fill(e, [self.block], lambda b: None, e.args[3])

    def store(self, e):
        self.groups[-1].append(len(self.ops))
        self.put("store", reads=self.smem(e.args[1]))

    def bulk_commit(self, _):
        self.groups.append([])

    def bulk_wait(self, e):
        done = self.groups[: max(len(self.groups) - 1 - int(e.template), 0)]
        self.put("need", needs=frozenset(x for g in done for x in g))

    # ---- tensor core

    def mma(self, e):
        a = list(e.args)
        pair, sparse = "_pair" in e.name, "_mma_sp_" in e.name
        blocks = [self.block, self.block ^ 1] if pair else [self.block]
        d, reads = address(a.pop(0)), []
        if e.name.endswith("_tmem"):
            at = address(a.pop(0))
            reads += [p for b in blocks for p in columns(b, at, 8)]
        else:
            low, _ = a.pop(0), a.pop(0)
            reads += self.described(blocks, low)
        low, _ = a.pop(0), a.pop(0)
        reads += self.described(blocks, low)
        instruction = address(a.pop(0))
        n = (instruction >> 17 & 63) * 8
        if sparse:
            reads += [p for b in blocks for p in columns(b, address(a.pop(0)), 4)]
        for scale in a[:-1]:
            reads += [p for b in blocks for p in columns(b, address(scale), 4)]
        adds = a[-1] is True or isinstance(a[-1], Unknown)
        writes = tuple(p for b in blocks for p in columns(b, d, n))
        self.put("mma", reads=tuple(reads), writes=writes, parity=int(adds))

    def described(self, blocks, low):
        at = (address(low) & 0x3FFF) << 4
        return [p for b in blocks for p in self.memory.slot(b, at)]

    def tensor_copy(self, e):
        blocks = [self.block, self.block ^ 1] if "pair" in e.name else [self.block]
        n = 8 if "128x256b" in e.name else 4
        writes = tuple(p for b in blocks for p in columns(b, address(e.args[0]), n))
        self.put("mma", reads=tuple(self.described(blocks, e.args[1])), writes=writes)

    def commit(self, e):
        mask = address(e.args[1]) if len(e.args) > 1 else 1 << self.block
        to = [b for b in range(self.blocks) if mask >> b & 1]
        self.put("commit", barriers=tuple(self.barrier(e.args[0], 1, 0, b) for b in to))

    def moved(self, e):
        shape, times = re.search(r"(\d+x\d+b)_x(\d+)", e.name).groups()
        n = COLUMNS[shape] * int(times) * (2 if "_halves" in e.name else 1)
        return columns(self.block, address(e.args[-1]), n)

    def waits_next(self, name):
        """Is there such a wait before this lane synchronises again?"""
        for e in self.next:
            if e.name == name:
                return True
            if not re.match("tmem_|fence_|st_|ld_|stmatrix", e.name):
                return False
        return False

    def tmem_load(self, e):
        if self.waits_next("tmem_wait_load"):
            self.put("access", reads=self.moved(e), lanes=True)
        else:
            self.loads.append(len(self.ops))
            self.put("store", reads=self.moved(e), lanes=True)

    def tmem_store(self, e):
        if self.waits_next("tmem_wait_store"):
            self.put("access", writes=self.moved(e), lanes=True)
        else:
            self.stores.append(len(self.ops))
            self.put("copy", writes=self.moved(e), lanes=True)

    def tmem_wait(self, e):
        of = self.loads if e.name == "tmem_wait_load" else self.stores
        if of:
            self.put("need", needs=frozenset(of))
        of.clear()

    def dealloc(self, e):
        if self.tid:  # one for the warp
            return
        self.put("access", writes=columns(self.block, address(e.args[0]), address(e.args[1])))

    # ---- shared memory, cluster launch control

    def shared_store(self, e):
        at = address(e.args[0])
        writes = self.memory.stored(self.block + at // PEER, at % PEER)
        self.put("access", writes=writes, lanes=True)

    def shared_load(self, e):
        places = self.smem(e.args[1])
        self.put("access", reads=places, lanes=places[0][2] in self.memory.of_lanes)

    def try_cancel(self, e):
        at = address(e.args[0])
        writes = tuple(p for b in range(self.blocks) for p in self.memory.slot(b, at))
        barriers = tuple(self.barrier(e.args[1], 0, -16, b) for b in range(self.blocks))
        self.put("copy", writes=writes, barriers=barriers)

    def query(self, e):
        self.put("access", reads=self.smem(e.args[0]))

    def nothing(self, e):
        pass


R = Reader
HANDLERS = [
    (r"mbarrier_wait", R.wait),
    (r"mbarrier_arrive_(remote|release)", R.arrive_remote),
    (r"mbarrier_arrive_expect_tx", R.expect),
    (r"mbarrier_arrive", R.arrive),
    (r"(block|cluster|warpgroup)_sync|lanes_a", R.meet),
    (r"tma_load", R.load),
    (r"tma_multicast", R.multicast),
    (r"bulk_load", R.bulk_load),
    (r"tma_store|tma_add|bulk_store", R.store),
    (r"bulk_group_commit", R.bulk_commit),
    (r"bulk_group_wait", R.bulk_wait),
    (r"tcgen05_mma", R.mma),
    (r"tcgen05_copy", R.tensor_copy),
    (r"tcgen05_commit", R.commit),
    (r"tmem_load", R.tmem_load),
    (r"tmem_store", R.tmem_store),
    (r"tmem_wait", R.tmem_wait),
    (r"tmem_dealloc", R.dealloc),
    (r"st_shared|stmatrix", R.shared_store),
    (r"ld_shared|ldmatrix", R.shared_load),
    (r"try_cancel", R.try_cancel),
    (r"query_cancel", R.query),
]


# ---- the program as steps ------------------------------------------------------------------------


def merged(ops):
    """Neighbours of one kind as one op: accesses, products, copies that count on one barrier."""
    out = []
    for op in ops:
        last = out[-1] if out else None
        same = last and last.kind == op.kind and op.kind in ("access", "mma", "copy")
        if same and op.kind == "copy":
            same = [b for b, *_ in last.barriers] == [b for b, *_ in op.barriers] != []
        if same and op.kind == "access":
            same = not (set(last.writes) & set(op.reads)) and last.lanes == op.lanes
        if same and op.kind == "mma":
            same = last.writes == op.writes
        if same:
            reads = tuple(dict.fromkeys(last.reads + op.reads))
            writes = tuple(dict.fromkeys(last.writes + op.writes))
            barriers = tuple(
                (b, n, x + y)
                for (b, n, x), (_, _, y) in zip(last.barriers, op.barriers, strict=True)
            )
            out[-1] = last._replace(reads=reads, writes=writes, barriers=barriers)
        else:
            out.append(op)
    return out


def steps_of(ops):
    """[op] that blocks, or accesses and what engines are given, with the arrival after them."""
    out, run = [], []
    for op in merged(ops):
        if op.kind in ("wait", "meet", "need"):
            out += [run] * bool(run) + [[op]]
            run = []
        else:
            run.append(op)
            if op.kind == "arrive":
                out.append(run)
                run = []
    return out + [run] * bool(run)


class Agent(NamedTuple):
    name: str
    where: tuple  # block, warpgroup
    lanes: frozenset  # of the warpgroup
    steps: list


TOUCHES = {"wait", "arrive", "access", "copy", "store", "mma", "commit"}


@functools.lru_cache(32)
def lanes_alike(text, blocks, responses, choose, known):
    """Memory, {(block, lanes that do the same): events of the first}, counts of the barriers."""
    threads = int(re.search(r"__launch_bounds__\((\d+)", text)[1])
    events = {
        (block, tid): lanes.Lane(text, tid, block, blocks, responses, choose, known).run()
        for block in range(blocks)
        for tid in range(threads)
    }
    memory = Memory(text, [e for lane in events.values() for e in lane])
    memory.find_halves(events)
    memory.find_lanes(events)
    same = {}
    for (block, tid), found in events.items():
        ops = tuple(Reader(memory, block, tid, blocks).read(found))
        same.setdefault((block, tid // 128, ops), []).append(tid)
    classes = {(key[0], tuple(tids)): events[key[0], tids[0]] for key, tids in same.items()}
    inits = {
        (block, e.args[0]): e.args[1]
        for block in range(blocks)
        for e in events[block, 0]
        if e.name == "mbarrier_init"
    }
    return memory, classes, inits


def agents_of(text, blocks, responses=(), choose=True, drop=(), followers=None, known=()):
    """`responses`: what cluster launch control answers; `choose`: which way branches on data go;
    `drop`: (name, n): the n-th event of that name is left out in each lane, for tests;
    `followers`: warpgroups whose lanes are several agents; others are their first lane alone;
    `known`: (address, number) of shared memory that branches depend on."""
    memory, classes, inits = lanes_alike(text, blocks, tuple(responses), choose, tuple(known))
    alike = {}
    for (block, tids), found in classes.items():
        left = [e for e in found if not dropped(e, found, drop)]
        ops = Reader(memory, block, tids[0], blocks).read(left)
        if {op.kind for op in ops} & TOUCHES:
            alike.setdefault((block, tids[0] // 128, tuple(ops)), []).extend(tids)
    if followers is not None:
        alike = folded(alike, followers)
    agents = []
    for (block, wg, ops), tids in alike.items():
        name = f"block {block}, warpgroup {wg}, thread {tids[0]}"
        n = len(tids)
        threads = frozenset(tid % 128 for tid in tids)
        agents.append(Agent(name, (block, wg), threads, steps_of([times(op, n) for op in ops])))
    return agents, inits


def issues(op):
    """Does it give an engine something to do?"""
    return op.kind in ("mma", "commit") or op.kind == "copy" and op.barriers != ()


def folded(alike, followers):
    """One agent for each warpgroup that is not of `followers`: its first lane, which also makes the
    arrivals of the others."""
    out = {}
    for (block, wg, ops), tids in alike.items():
        if wg in followers or 128 * wg in tids or any(issues(op) for op in ops):
            out[block, wg, ops] = tids
    for (block, wg, ops), tids in alike.items():
        if (block, wg, ops) in out:
            continue
        key = next((k for k, x in out.items() if k[:2] == (block, wg) and 128 * wg in x), None)
        if key is None:  # the first lane does nothing: this one is the warpgroup
            out[block, wg, ops] = tids
            continue
        first, own = list(key[2]), [times(op, len(tids)) for op in ops if op.kind == "arrive"]
        for text in {op.text for op in own}:
            theirs = [op for op in own if op.text == text]
            places = [k for k, op in enumerate(first) if (op.kind, op.text) == ("arrive", text)]
            for k, op in zip(places, theirs, strict=True):
                first[k] = first[k]._replace(barriers=first[k].barriers + op.barriers)
        out[block, wg, tuple(first)] = out.pop(key)
    return out


def dropped(event, events, drop):
    for name, which in drop:
        if (
            event.name == name
            and [e is event for e in events if e.name == name].index(True) == which
        ):
            return True
    return False


def times(op, n):
    if op.kind != "arrive":
        return op
    return op._replace(barriers=tuple((b, k * n, tx * n) for b, k, tx in op.barriers))


# ---- the search ----------------------------------------------------------------------------------


class Search:
    """States are (steps of the agents, barriers, ops under way, what places hold)."""

    def __init__(self, agents, inits):
        self.agents = agents
        self.barrier = {b: k for k, b in enumerate(inits)}
        self.counts = list(inits.values())
        self.ops, self.owner, self.number = [None], [None], {}
        for a, agent in enumerate(agents):
            for step in agent.steps:
                for op in step:
                    self.number[a, op.id] = len(self.ops)
                    self.ops.append(op)
                    self.owner.append(a)
        self._places()
        self.expected, self.n_states = {}, 0
        self.members = {}
        for a, agent in enumerate(agents):
            block, wg = agent.where
            for group in (("cluster",), ("block", block), ("warpgroup", block, wg)):
                self.members.setdefault(group, []).append(a)

    def _places(self):
        """Each place is as many as there are kinds of lanes: a lane writes its part of a place in
        shared memory, and reaches its lanes of tensor memory. Those that the same ops touch are
        one."""
        kinds = {}
        for lane in range(128):
            key = frozenset(a for a, x in enumerate(self.agents) if lane in x.lanes)
            kinds.setdefault(key, set()).add(lane)
        parts = [frozenset(lanes_) for lanes_ in kinds.values()]
        touched = {}
        for k, op in enumerate(self.ops):
            if not op:
                continue
            own = [x for x in parts if x & self.agents[self.owner[k]].lanes]
            for how, places in (("r", op.reads), ("w", op.writes)):
                for p in places:
                    for part in own if op.lanes else parts:
                        touched.setdefault((p, part), set()).add((k, how))
        classes = {}
        for x, by in touched.items():
            classes.setdefault(frozenset(by), []).append(x)
        self.n_places = len(classes)
        self.reads = [[] for _ in self.ops]
        self.writes = [[] for _ in self.ops]
        for n, by in enumerate(classes):
            for k, how in by:
                (self.reads if how == "r" else self.writes)[k].append(n)
        self.read_set = [frozenset(x) for x in self.reads]
        self.write_set = [frozenset(x) for x in self.writes]

    # ---- effects; a place holds k: what op k wrote; -k: op k is writing

    def in_order(self, k, other):
        """Does the tensor core end `other` before it begins op k?"""
        if not other or self.owner[k] != self.owner[other]:
            return False
        return self.ops[k].kind == self.ops[other].kind == "mma" and other < k

    def begin(self, k, flight, tags):
        """Op k reads the same in all interleavings, and touches nothing that is under way."""
        before = self.expected.setdefault(k, {})
        for p in self.reads[k]:
            y = abs(tags[p])
            if tags[p] < 0 and not self.in_order(k, y):
                raise Wrong(f"{self.describe(k)} reads what {self.describe(y)} is writing")
            x = before.setdefault(p, y)
            if x != y:
                raise Wrong(f"{self.describe(k)} finds {self.describe(x)} or {self.describe(y)}")
        for p in self.writes[k]:
            if tags[p] < 0 and not self.in_order(k, -tags[p]):
                raise Wrong(f"{self.describe(k)} writes where {self.describe(-tags[p])} is writing")
        for other in flight:
            if not self.in_order(k, other) and self.read_set[other] & self.write_set[k]:
                raise Wrong(f"{self.describe(k)} overwrites what {self.describe(other)} reads")

    def signal(self, op, bars):
        for b, arrivals, tx in op.barriers:
            k = self.barrier[b]
            phase, pending, bytes_ = bars[k]
            pending, bytes_ = pending - arrivals, bytes_ + tx
            if pending < 0:
                raise Wrong(f"{op.text}: more arrivals at {b} than it counts")
            if not pending and not bytes_:
                phase, pending = phase ^ 1, self.counts[k]
            bars[k] = (phase, pending, bytes_)

    def issue(self, k, bars, flight, tags):
        op = self.ops[k]
        self.begin(k, flight, tags)
        if op.kind == "arrive":
            self.signal(op, bars)
            return
        for p in self.writes[k]:
            tags[p] = k if op.kind == "access" else -k
        if op.kind != "access":
            flight.add(k)

    def end(self, k, bars, flight, tags):
        """Op k takes effect; with a commit all products before it."""
        ended = [k]
        if self.ops[k].kind == "commit":
            ended += [x for x in flight if x < k and self.owner[x] == self.owner[k]
                      and self.ops[x].kind == "mma"]  # fmt: skip
        for x in ended:
            flight.discard(x)
            for p in self.writes[x]:
                if tags[p] == -x:
                    tags[p] = x
        self.signal(self.ops[k], bars)

    # ---- transitions

    def meeting(self, pcs):
        """Agents that all have come to one place to meet."""
        for a, agent in enumerate(self.agents):
            if pcs[a] < len(agent.steps):
                op = agent.steps[pcs[a]][0]
                if op.kind == "meet" and self.meets(op.group, pcs):
                    return op.group
        return None

    def meets(self, group, pcs):
        for a in self.members[group]:
            steps = self.agents[a].steps
            if pcs[a] == len(steps) or steps[pcs[a]][0].group != group:
                return False
        return True

    def enabled(self, state):
        pcs, bars, flight, _ = state
        group = self.meeting(pcs)
        if group is not None:
            return [("meet", group)]
        found = []
        for a, agent in enumerate(self.agents):
            if pcs[a] == len(agent.steps):
                continue
            op = agent.steps[pcs[a]][0]
            if op.kind == "meet":
                continue
            if op.kind == "wait" and bars[self.barrier[op.barriers[0][0]]][0] == op.parity:
                continue
            found.append(("step", a))
        heads = set()
        for k in sorted(flight):
            if self.ops[k].kind == "commit":
                if self.owner[k] in heads:
                    continue
                heads.add(self.owner[k])
            if self.ops[k].barriers:  # others end when somebody waits for them
                found.append(("end", k))
        return found

    def after(self, state, what):
        pcs, bars, flight, tags = state
        kind, x = what
        if kind == "meet":
            pcs = tuple(pc + (a in self.members[x]) for a, pc in enumerate(pcs))
            return pcs, bars, flight, tags
        bars, flight, tags = list(bars), set(flight), list(tags)
        if kind == "end":
            self.end(x, bars, flight, tags)
        else:
            for op in self.agents[x].steps[pcs[x]]:
                if op.kind == "need":
                    for k in sorted(self.number[x, n] for n in op.needs):
                        if k in flight:
                            self.end(k, bars, flight, tags)
                elif op.kind != "wait":
                    self.issue(self.number[x, op.id], bars, flight, tags)
            pcs = (*pcs[:x], pcs[x] + 1, *pcs[x + 1 :])
        return pcs, tuple(bars), frozenset(flight), tuple(tags)

    def run(self, most=10**7):
        start = (
            (0,) * len(self.agents),
            tuple((0, n, 0) for n in self.counts),
            frozenset(),
            (0,) * self.n_places,
        )
        seen, stack, path = {packed(start)}, [(start, iter(self.enabled(start)))], []
        while stack:
            state, todo = stack[-1]
            what = next(todo, None)
            if what is None:
                stack.pop()
                if path:
                    path.pop()
                continue
            try:
                new = self.after(state, what)
                key = packed(new)
                if key in seen:
                    continue
                seen.add(key)
                if len(seen) > most:
                    raise MemoryError(f"more than {most} states")
                more = self.enabled(new)
                if not more:
                    self.check_end(new)
            except Wrong as e:
                steps = [self.tell(x) for x in [*path, what]]
                raise Wrong(str(e), steps) from None
            path.append(what)
            stack.append((new, iter(more)))
        self.n_states = len(seen)
        return self.n_states

    def check_end(self, state):
        pcs, _, flight, _ = state
        if flight:
            raise Wrong(
                "the kernel ends while " + self.describe(next(iter(flight))) + " is under way"
            )
        waits = [
            f"{agent.name} in {agent.steps[pc][0].text}"
            for agent, pc in zip(self.agents, pcs, strict=True)
            if pc < len(agent.steps)
        ]
        if waits:
            raise Wrong("deadlock: " + "; ".join(waits))

    def describe(self, k):
        return f"{self.ops[k].text} of {self.agents[self.owner[k]].name}" if k else "nothing"

    def tell(self, what):
        kind, x = what
        if kind == "meet":
            return f"{x} meets"
        if kind == "end":
            return f"ends: {self.describe(x)}"
        return f"{self.agents[x].name}"


def packed(state):
    """The state in few bytes."""
    pcs, bars, flight, tags = state
    numbers = array.array("h", pcs)
    for phase, pending, bytes_ in bars:
        numbers.extend((pending << 1 | phase, bytes_ >> 4))
    numbers.extend(tags)
    numbers.extend(sorted(flight))
    return numbers.tobytes()


def explore(text, blocks=1, **how):
    """Number of states of the program's interleavings; Wrong: one of them is not right."""
    return Search(*agents_of(text, blocks, **how)).run()
