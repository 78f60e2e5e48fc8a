"""Productions of what Hopper has beside products and copies: blocks of a cluster that use each
other's memory, blocks of a launch that wait for each other, refs indexed by arrays, copies that
combine, operands of products in registers."""

from .expressions import COMMON, Val, prod, tup
from .kernels import Block, Node

BITS4 = ("int4", "uint4")
WIDE = {  # what becomes an operand in registers: numbers that are exact as that
    "int8": ("float16", "bfloat16"),
    "uint8": ("float16", "bfloat16"),
    "int4": ("float16", "bfloat16"),
    "uint4": ("float16", "bfloat16"),
    "float8_e4m3fn": ("float16", "bfloat16"),
    "float8_e5m2": ("float16", "bfloat16"),
}
SMALL = {"uint8": (0, 9), "uint4": (0, 9), "float8_e4m3fn": (-2, 2), "float8_e5m2": (-2, 2)}
LAYOUTS = ("WGMMA_UPCAST_2X", "WGMMA_UPCAST_4X")


class Hopper:
    # ---- values ----------------------------------------------------------------------------------

    def make_indexed(self, shape, dtype, kind):
        """A load from a ref by arrays of indices."""
        self.feature("indexed")
        rank, axis = len(shape), self.rng.randrange(len(shape))
        n = self.rng.choice((1, 3, 8, 17, 33, 64))
        d, rest = shape[axis], prod(shape) // shape[axis]
        if n * rest > 4096:
            return self.leaf(shape, dtype, kind)
        if rank == 2 and self.chance(0.4):  # two arrays that broadcast
            m = self.rng.choice((2, 7, 16))
            x = self.operand((n, m), dtype, self.data_kind(dtype, kind))
            i, j = self.inside((shape[0], 1), n), self.inside((1, shape[1]), m)
            return self.name_it(Node(f"{x}[{{}}, {{}}]", i, j), shape)
        source = (*shape[:axis], n, *shape[axis + 1 :])
        x = self.operand(source, dtype, self.data_kind(dtype, kind))
        where = ", ".join("{}" if k == axis else ":" for k in range(rank))
        return self.name_it(Node(f"{x}[{where}]", self.inside((d,), n)), shape)

    def make_upcast(self, shape, dtype, kind):
        """Narrow elements that become floats in registers, in a layout fit for it."""
        if -(-shape[0] // 64) * 64 * -(-shape[1] // 32) * 32 > 4096:
            return self.leaf(shape, dtype, kind)
        narrow = self.rng.choice([n for n in WIDE if shape[1] % 2 == 0 or n not in BITS4])
        self.feature("upcast")
        layout = LAYOUTS[narrow in BITS4 or self.chance(0.3)]
        x = self.operand(shape, narrow, SMALL.get(narrow, (-8, 7)))
        x = f"plgpu.load({x}, layout=plgpu.Layout.{layout}, optimized=False)"
        if self.chance(0.4):
            x = f"plgpu.layout_cast({x}, plgpu.Layout.WGMMA)"
        return f"{x}.astype(jnp.{dtype})"

    def make_lazy(self, shape, dtype, kind):
        """A choice whose first part is only computed by warps that need it."""
        self.feature("lazy")
        x = self.name_it(self.value(shape, dtype, kind), shape)
        y = self.name_it(self.value(shape, dtype, kind), shape)
        forms = [f"lambda: {x}", f"lambda: jnp.where({x} == {y}, {y}, {x})"]
        if dtype not in ("bool", "int8", "uint8"):
            forms += [f"lambda: jnp.maximum({x}, {y})", f"lambda: -{x}"]
        return Node(f"plgpu.ext.warp_where({{}}, {self.rng.choice(forms)}, {y})",
                    self.value(shape, "bool"))  # fmt: skip

    def inside(self, shape, n):
        """An int array of that shape, of numbers in [0, n)."""
        if self.chance(0.5):
            dtype = self.rng.choice(("int32", "int32", "uint16"))
            return Node("{}[...]", self.operand(shape, dtype, (0, n - 1)))
        return Node(f"({{}} % {n})", self.value(shape, self.rng.choice(("int32", "uint32"))))

    # ---- stores ----------------------------------------------------------------------------------

    def store_indexed(self, shape, dtype):
        """A store by an array of indices that hits each row once."""
        self.feature("indexed store")
        d, axis = shape[0], 0
        tags = [t for t in self.tags if t[1] > 1]
        o = self.output((*([prod(s for _, s in tags)] if tags else []), *shape), dtype)
        ref = Node(f"{o}.at[{{}}]", self.linear(tags)) if tags else o
        r, value = self.name("r"), self.value(shape, dtype)
        by = self.rng.choice((1, -1))
        start = self.dynamic(0, 9)
        iota = f"lax.broadcasted_iota(jnp.int32, ({d},), {axis})"
        i = Node(f"(({iota} * {by} + {{}}) % {d})", start)
        self.emit(Node(f"{r} = {{}}", ref, keep=True))
        self.emit(Node(f"{r}[{{}}] = {{}}", i, value))

    def combine_floats(self, s, ref, shape, dtype):
        """Copies onto what others have brought: whole numbers, whose sums are exact."""
        self.feature("combining floats")
        ops = ("add",) if dtype == "float32" else ("add", "min", "max")
        for _ in range(self.rng.randint(1, 2)):
            op = self.rng.choice(ops)
            self.emit(Node(f"plgpu.copy_smem_to_gmem({s}, {{}}, reduction_op='{op}')", ref))
            self.emit(Node("plgpu.wait_smem_to_gmem(0)"))

    # ---- products --------------------------------------------------------------------------------

    def seg_widened(self):
        """A product whose left operand becomes wide in registers."""
        self.feature("widened")
        narrow = self.rng.choice(list(WIDE))
        dtype = self.rng.choice(WIDE[narrow])
        m, n = self.pick({64: 3, 128: 1}), self.rng.choice((8, 16, 32, 64, 72))
        k = 64 * self.rng.randint(1, 3)
        a = self.operand((m, k), narrow, SMALL.get(narrow, (-8, 7)))
        y = self.operand((n, k), dtype, "small")
        b, bar, w, acc, f, v = (self.name(c) for c in "sbvcfv")
        s = self.name("s") if self.chance(0.6) else None
        source = s or a
        form = self.rng.random()
        if form < 0.7:
            layout = LAYOUTS[narrow in BITS4 or self.chance(0.3)]
            optimized = "" if s else ", optimized=False"
            load = f"plgpu.load({source}, layout=plgpu.Layout.{layout}{optimized})"
            if self.chance(0.5):
                load = f"plgpu.layout_cast({load}, plgpu.Layout.WGMMA)"
        else:
            load = f"{source}[...]"
        self.push()
        copies = [(y, b), *([(a, s)] if s else [])]
        for src, to in copies:
            self.emit(Node(f"plgpu.copy_gmem_to_smem({src}, {to}, {bar})", keep=True))
        self.emit(Node(f"plgpu.barrier_wait({bar})", keep=True))
        self.emit(Node(f"{w} = {load}.astype(jnp.{dtype})", keep=True))
        product = Block(
            [
                Node(f"plgpu.wgmma({acc}, {w}, {b}.T)", keep=True),
                Node(f"return {acc}[...]", keep=True),
            ]
        )
        self.emit(Node(f"def {f}({acc}):\n{{}}", product, keep=True))
        self.emit(Node(f"{v} = pl.run_scoped({f}, plgpu.ACC({tup((m, n))}))", keep=True))
        self.epilogue(v, (m, n), "float32", True)
        block = self.pop()
        types = [self.smem_type((n, k), dtype), Node(f"plgpu.Barrier({len(copies)})")]
        types += [self.smem_type((m, k), narrow)] if s else []
        self.scoped(types, block, [b, bar, *([s] if s else [])])

    # ---- points ----------------------------------------------------------------------------------

    def do_points(self):
        """Points that programs share; each is done once."""
        axes = [n for n, _ in self.tags if n in self.axis_names]
        if not axes or len(axes) != len(self.tags) or self.nesting:
            return self.store_any()
        self.feature("points")
        names = self.rng.sample(axes, self.rng.randint(1, len(axes)))
        grid = [self.rng.randint(1, 4) for _ in range(self.rng.randint(1, 3))]
        f, info, k = self.name("f"), self.name("n"), self.name("k")
        index = [self.name("i") for _ in grid]
        self.push()
        self.emit(Node(f"{', '.join(index)}, = {info}.index", keep=True))
        self.emit(Node(f"{k} = {info}.local_index", keep=True))
        self.ints[-1] += [(i, 0, n - 1) for i, n in zip(index, grid)] + [(k, 0, prod(grid))]
        tags = self.tags
        self.tags = [t for t in tags if t[0] not in names] + list(zip(index, grid))
        self.statements(self.rng.randint(1, 2))
        self.tags = tags
        block = self.pop()
        given = repr(names[0] if len(names) == 1 and self.chance(0.5) else tuple(names))
        call = f"@plgpu.nd_loop({tup(grid)}, collective_axes={given})"
        self.emit(Node(f"{call}\ndef {f}({info}):\n{{}}", block, keep=True))

    # ---- blocks ----------------------------------------------------------------------------------

    def seg_cluster(self):
        """Blocks of a cluster write to, or read from, the next one."""
        axes = [(n, s) for n, s in self.tags if n.startswith("c") and s > 1]
        if not axes or self.threads > 1 or self.nesting:
            return self.store_any()
        self.feature("peers")
        c, n = self.rng.choice(axes)
        form = self.rng.choice(("load", "store", "async", "atomic"))
        numbers = {"async": ("int32", "uint32", "float32"), "atomic": ("int32", "uint32")}
        dtype = self.rng.choice(numbers.get(form, COMMON))
        shape = self.shape(limit=1024)[-2:]
        s, met, bar, v, i, g = (self.name(k) for k in "sbbvif")
        by, rounds = self.rng.randint(1, n - 1), self.rng.randint(1, 3)
        other, everybody = f"({c} + {by}) % {n}", f"plgpu.barrier_arrive({met})"
        meet = [everybody, f"plgpu.barrier_wait({met})"]
        self.push()
        self.push()
        self.ints[-1].append((i, 0, rounds - 1))
        value = self.let(self.value(shape, dtype), shape, dtype, "wild")
        there = f"plgpu.cluster_ref({s}, {{'{c}': {other}}})"
        if form == "load":
            steps = [f"{s}[...] = {value}", *meet, f"{v} = {there}[...]"]
        elif form == "store":
            steps = [f"{there}[...] = {value}", *meet, f"{v} = {s}[...]"]
        else:
            where = f"cluster_idx={other}, cluster_dim='{c}'"
            send = f"plgpu.async_store_smem({value}, {s}, {bar}, {where}"
            first, more = [], ""
            if form == "atomic":
                first = [f"{s}[...] = jnp.full({tup(shape)}, 5, jnp.{dtype})", *meet]
                more = f", atomic='{self.rng.choice(('add', 'max', 'min', 'and', 'or', 'xor'))}'"
            steps = [*first, f"{send}{more})", f"plgpu.barrier_wait({bar})", f"{v} = {s}[...]"]
        for text in steps:
            self.emit(Node(text, keep=True))
        self.values[-1].append(Val(v, shape, dtype, "wild"))
        tags = self.tags
        self.tags = [*tags, (i, rounds)]
        self.store(shape, dtype, value=v)
        if self.chance(0.4):
            self.store(shape, dtype)
        self.tags = tags
        for text in meet:
            self.emit(Node(text, keep=True))
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {rounds})\ndef {g}({i}):\n{{}}", loop, keep=True))
        block = self.pop()
        types = [
            self.smem_type(shape, dtype),
            Node(f"plgpu.ClusterBarrier(collective_axes=('{c}',))"),
            Node("plgpu.Barrier()"),
        ]
        names = [s, met, bar]
        if form in ("load", "store"):
            types, names = types[:2], names[:2]
        self.scoped(types, block, names)

    def seg_launch(self):
        """Each block hands an array to another one through GMEM, with a semaphore of the launch."""
        tags = [t for t in self.tags if t[1] > 1]
        n = prod(s for _, s in tags)
        if not tags or self.threads > 1 or self.nesting or len(tags) != len(self.tags):
            return self.store_any()
        self.feature("launch")
        dtype = self.rng.choice(COMMON)
        shape = self.shape(limit=1024)[-2:]
        o = self.output((n, *shape), dtype)
        sem, me, v = self.name("q"), self.name("n"), self.name("v")
        by, count = self.rng.randint(1, n - 1), self.rng.randint(1, 3)
        self.emit(Node(f"{me} = {{}}", self.linear(tags), keep=True))
        self.emit(Node(f"{sem} = pl.get_global(plgpu.SemaphoreType.REGULAR(({n},)))", keep=True))
        self.emit(Node(f"{o}[{me}] = {{}}", self.value(shape, dtype), keep=True))
        scope = ", memory_scope='gpu'" if self.chance(0.5) else ""
        inc = f", {count}" if count > 1 else ""
        self.emit(Node(f"plgpu.semaphore_signal({sem}.at[{me}]{inc}{scope})", keep=True))
        after = f"({me} + {by}) % {n}"
        take = ", decrement=False" if self.chance(0.3) else ""
        self.emit(Node(f"plgpu.semaphore_wait({sem}.at[{after}]{inc}{take}{scope})", keep=True))
        if self.chance(0.5):
            self.emit(Node(f"{v} = {o}[{after}]", keep=True))
            self.values[-1].append(Val(v, shape, dtype, "wild"))
            return self.store(shape, dtype)
        s, bar = self.name("s"), self.name("b")
        transforms, _ = self.transforms(shape, dtype)
        self.push()
        self.emit(Node(f"plgpu.copy_gmem_to_smem({o}.at[{after}], {s}, {bar})", keep=True))
        self.emit(Node(f"plgpu.barrier_wait({bar})", keep=True))
        self.emit(Node(f"{v} = {s}[...]", keep=True))
        self.values[-1].append(Val(v, shape, dtype, "wild"))
        self.store(shape, dtype)
        block = self.pop()
        types = [self.smem_type(shape, dtype, transforms), Node("plgpu.Barrier()")]
        self.scoped(types, block, [s, bar])
