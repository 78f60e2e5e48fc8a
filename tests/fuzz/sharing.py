"""Productions of what is shared: one place by several buffers, points of a launch by its blocks,
turns of threads, counters; and of memory seen as another dtype, or of less than a byte."""

from .expressions import COMMON, Val, prod, tup
from .kernels import Block, Node

SAME_WIDTH = {
    "float32": ("int32", "uint32"),
    "int32": ("float32", "uint32"),
    "uint32": ("float32", "int32"),
    "float16": ("int16", "uint16", "bfloat16"),
    "bfloat16": ("int16", "uint16", "float16"),
    "int16": ("uint16", "bfloat16"),
    "uint16": ("int16", "float16"),
    "int8": ("uint8",),
    "uint8": ("int8",),
}
PACKED = {"int4": ("int32", "int16", "int8"), "uint4": ("int32", "uint8", "float32")}
EIGHTS = {"float8_e4m3fn": ("float32", "bfloat16"), "float8_e5m2": ("float32", "float16")}


class Sharing:
    # ---- one place -------------------------------------------------------------------------------

    def seg_union(self):
        """Groups of SMEM at one place, used one after the other."""
        self.feature("union")
        groups = []
        for _ in range(self.rng.randint(2, 3)):
            group = []
            for _ in range(self.pick({1: 2, 2: 1})):
                dtype, shape = self.rng.choice(COMMON), self.shape(limit=1024)[-2:]
                group.append((self.name("s"), shape, dtype, self.transforms(shape, dtype)[0]))
            groups.append(group)
        u, b = self.name("u"), self.name("b")
        self.push()
        names = [[g[0] for g in group] for group in groups]
        alone = [len(g) == 1 and self.chance(0.5) for g in names]
        where = [g[0] if one else f"({', '.join(g)},)" for g, one in zip(names, alone)]
        self.emit(Node(f"{', '.join(where)}, = {u}", keep=True))
        again = self.chance(0.4)
        tags, i, f = self.tags, self.name("i"), self.name("f")
        if again:
            n = self.rng.randint(1, 3)
            self.push()
            self.ints[-1].append((i, 0, n - 1))
            self.tags = [*tags, (i, n)]
        for _ in range(self.rng.randint(2, 4)):
            self.use_buffer(self.rng.choice(self.rng.choice(groups)), b)
        if again:
            self.tags = tags
            self.emit(Node(f"@pl.loop(0, {n})\ndef {f}({i}):\n{{}}", self.pop(), keep=True))
        block = self.pop()
        types = []
        for group, one in zip(groups, alone):
            made = [self.smem_type(s, d, t).text for _, s, d, t in group]
            types.append(made[0] if one else f"({', '.join(made)},)")
        self.scoped([Node(f"plgpu.RefUnion({', '.join(types)})"), Node("plgpu.Barrier()")],
                    block, [u, b])  # fmt: skip

    def use_buffer(self, buffer, barrier):
        """Through one of the buffers, which nothing else needs after it."""
        s, shape, dtype, _ = buffer
        form = self.rng.randrange(3)
        if form == 0:
            self.emit(Node("plgpu.commit_smem()", keep=True))
            src = self.gmem_view(shape, dtype, "norm", copy=True)
            self.emit(Node(f"plgpu.copy_gmem_to_smem({{}}, {s}, {barrier})", src, keep=True))
            self.emit(Node(f"plgpu.barrier_wait({barrier})", keep=True))
        else:
            self.emit(Node(f"{s}[...] = {{}}", self.value(shape, dtype), keep=True))
        if form == 2:
            self.emit(Node("plgpu.commit_smem()", keep=True))
            target = self.target(shape, dtype, copy=True)
            self.emit(Node(f"plgpu.copy_smem_to_gmem({s}, {{}})", target))
            self.emit(Node("plgpu.wait_smem_to_gmem(0)", keep=True))
            return
        v = self.name("v")
        self.emit(Node(f"{v} = {s}[...]"))
        self.values[-1].append(Val(v, shape, dtype, "wild"))
        self.store(shape, dtype, value=v)

    # ---- points ----------------------------------------------------------------------------------

    def in_a_dynamic_loop(self, table):
        """The whole of the program, for points of the grid that blocks take from a counter."""
        self.feature("dynamic loop")
        o, f, info = self.p.options, self.name("f"), self.name("n")
        if self.chance(0.15):  # more than run at a time
            o["grid"] = self.rng.choice(((400,), (23, 19), (2, 199)))
            self.budget = 3
        else:
            o["grid"] = tuple(self.rng.choice((1, 2, 3)) for _ in range(self.rng.randint(1, 3)))
        names = o["grid_names"] = tuple(f"g{k}" for k in range(len(o["grid"])))
        self.feature("many points") if prod(o["grid"]) > 100 else None
        order = self.rng.sample(names, len(names))
        table = {**table, "specialised": 0}
        self.push()
        self.emit(Node(f"{', '.join(order)}, = {info}.index", keep=True))
        tags = self.tags
        self.tags = [*tags, *zip(names, o["grid"])]
        for _ in range(1 if self.budget == 3 else self.pick({1: 5, 2: 3})):
            self.segment(table)
        self.tags = tags
        given = [repr(tuple(order))]
        if self.threads > 1:
            given.append('thread_axis="t"')
        if "cluster" in o:
            given.append(f"cluster_axes={o['cluster_names']!r}")
        call = f"@plgpu.dynamic_scheduling_loop({', '.join(given)})"
        self.emit(Node(f"{call}\ndef {f}({info}):\n{{}}", self.pop(), keep=True))

    def seg_tiles(self):
        """Numbers from a counter of the launch; who gets which is left to chance."""
        if self.nesting:
            return self.store_any()
        self.feature("tiles")
        kept = self.tags, self.values, self.ints
        n, f, g, k = self.rng.randint(1, 6), self.name("f"), self.name("f"), self.name("k")
        counter = self.counters
        self.counters += 1
        take = f"plgpu.ext.TileScheduler(counter={counter}).fetch()"
        self.values, self.ints = [[]], [[]]  # what depends on who it is
        self.tags = [(k, n)]
        self.push()
        self.ints[-1].append((k, 0, n - 1))
        self.statements(self.rng.randint(1, 2))
        self.emit(Node(f"return {take}", keep=True))
        block = self.pop()
        self.tags, self.values, self.ints = kept
        self.emit(Node(f"def {f}({k}):\n{{}}", block, keep=True))
        self.emit(Node(f"{g} = lambda {k}: {k} < {n}", keep=True))
        self.emit(Node(f"lax.while_loop({g}, {f}, {take})", keep=True))

    # ---- threads ---------------------------------------------------------------------------------

    def seg_ring_of_turns(self):
        """Threads change one buffer in turns, as the language has them."""
        if self.nesting or "turns in a ring" in self.p.features:
            return self.store_any()
        self.feature("turns in a ring")
        t = self.threads
        dtype = self.rng.choice(("int32", "uint32", "float32", "int16"))
        shape = self.shape(limit=1024)[-2:]
        s, i, g, v = (self.name(c) for c in "sifv")
        rounds = self.rng.randint(1, 3)
        self.push()
        # the first turn of each: what is there at the beginning
        self.emit(Node(f"with plgpu.ext.ordered_section({t}):\n{{}}", Block([
            Node(f"@pl.when(t == 0)\ndef {self.name('f')}():\n"
                 f"    {s}[...] = jnp.full({tup(shape)}, 3, jnp.{dtype})", keep=True),
        ]), keep=True))  # fmt: skip
        self.push()
        self.ints[-1].append((i, 0, rounds - 1))
        early = self.let(self.value(shape, dtype), shape, dtype, "wild")
        self.push()
        self.emit(Node(f"{v} = {s}[...]", keep=True))
        self.emit(Node(f"{s}[...] = jnp.maximum({v}, {{}})", early))
        tags = self.tags
        self.tags = [*tags, (i, rounds)]
        self.store(shape, dtype, value=v)
        self.tags = tags
        turn = self.pop()
        self.emit(Node(f"with plgpu.ext.ordered_section({t}):\n{{}}", turn, keep=True))
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {rounds})\ndef {g}({i}):\n{{}}", loop, keep=True))
        block = self.pop()
        self.scoped([self.smem_type(shape, dtype)], block, [s])

    def seg_counts(self):
        """A thread counts with a semaphore of its own, and looks."""
        self.feature("semaphore read")
        t = self.threads
        tags = [x for x in self.tags if x[1] > 1]
        of_the_launch = not self.nesting and tags and len(tags) == len(self.tags)
        q, f, i = self.name("q"), self.name("f"), self.name("i")
        n = prod(s for _, s in tags) if of_the_launch else t
        one = f"{q}.at[{{}}]" if n > 1 else f"{q}.at[0]"
        me = [self.linear(tags) if of_the_launch else "t"] if n > 1 else []
        if of_the_launch:
            self.emit(Node(f"{q} = pl.get_global(plgpu.SemaphoreType.REGULAR(({n},)))", keep=True))
        self.push()
        sem, rounds = self.name("q"), self.rng.randint(1, 3)
        self.emit(Node(f"{sem} = {one}", *me, keep=True))
        self.push()
        self.ints[-1].append((i, 0, rounds - 1))
        more, less = self.rng.randint(2, 5), self.rng.randint(0, 2)
        self.emit(Node(f"plgpu.semaphore_signal({sem}, {more})", keep=True))
        tags = self.tags
        self.tags = [*tags, (i, rounds)]
        self.store((), "int32", value=Node(f"(pl.semaphore_read({sem}) * 3)"))
        self.emit(Node(f"plgpu.semaphore_wait({sem}, {less})", keep=True))
        self.tags = tags
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {rounds})\ndef {f}({i}):\n{{}}", loop, keep=True))
        self.emit(Node(f"plgpu.semaphore_wait({sem}, {(more - less) * rounds})", keep=True))
        block = self.pop()
        if of_the_launch:
            return self.blocks[-1].statements.extend(block.statements)
        self.scoped([Node(f"plgpu.SemaphoreType.REGULAR(({n},))")], block, [q])

    # ---- memory ----------------------------------------------------------------------------------

    def make_seen(self, shape, dtype, kind):
        """A load of memory that is seen as another dtype of the same width."""
        if dtype not in SAME_WIDTH:
            return self.leaf(shape, dtype, kind)
        self.feature("bitcast of a ref")
        other = self.rng.choice(SAME_WIDTH[dtype])
        ref = Node(f"{{}}.bitcast(jnp.{dtype})", self.gmem_view(shape, other, "wild"))
        return self.load(ref, shape)

    def store_seen(self, shape, dtype):
        """A store to memory that is seen as another dtype."""
        self.feature("bitcast of a target")
        other = self.rng.choice(SAME_WIDTH[dtype])
        ref = Node(f"{{}}.bitcast(jnp.{dtype})", self.target(shape, other))
        self.emit(Node("{}[...] = {}", ref, self.value(shape, dtype)))

    def store_narrow(self, shape):
        """A store of elements of 8 or 4 bits, perhaps by way of SMEM."""
        self.feature("narrow store")
        table = PACKED if self.chance(0.6) else EIGHTS
        dtype = self.rng.choice(list(table))
        shape = (*shape[:-1], shape[-1] + shape[-1] % 2)
        x = self.value(shape, self.rng.choice(table[dtype]))
        x = Node(f"{{}}.astype(jnp.{dtype})", x)
        tags = [t for t in self.tags if t[1] > 1]
        o = self.output((*([prod(s for _, s in tags)] if tags else []), *shape), dtype)
        ref = Node(f"{o}.at[{{}}]", self.linear(tags)) if tags else o
        if self.threads > 1 or self.chance(0.5):
            return self.store_to(ref, x)
        s = self.name("s")
        self.push()
        self.emit(Node(f"{s}[...] = {{}}", x))
        self.emit(Node("plgpu.commit_smem()"))
        self.emit(Node(f"plgpu.copy_smem_to_gmem({s}, {{}})", ref))
        self.emit(Node("plgpu.wait_smem_to_gmem(0)"))
        self.scoped([self.smem_type(shape, dtype)], self.pop(), [s])
