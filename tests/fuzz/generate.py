"""The generator: a random program of the language from one integer.

Statements store expressions (expressions.py) where no other block, thread or iteration stores.
Segments are the larger patterns: plain computing, SMEM with copies, pipelines, products of the
tensor cores, threads that exchange data. What they share is synchronised by construction; what
is left to chance is judged by the model, and a program that it refuses is thrown away."""

from . import kernels, model
from .expressions import COMMON, EVERY, FLOATS, MAX_SIZE, Expressions, Val, itemsize, prod, tup
from .functions import Functions
from .hopper import Hopper
from .kernels import Block, Node
from .sharing import SAME_WIDTH, Sharing
from .warps import Warps


class Gen(Hopper, Sharing, Warps, Functions, Expressions):
    # ---- stores ----------------------------------------------------------------------------------

    def store(self, shape, dtype, kind="wild", value=None):
        """A store of a value to a place of its own."""
        value = self.value(shape, dtype, kind) if value is None else value
        ref = self.target(shape, dtype)
        self.store_to(ref, value)

    def store_to(self, ref, value):
        if isinstance(ref, Node) and ref.text.startswith("{}.at[") and self.chance(0.8):
            self.emit(Node("{}" + ref.text[5:] + " = {}", *ref.parts, value))
        else:
            self.emit(Node("{}[...] = {}", ref, value))

    def store_by_copy(self, shape, dtype, value=None, kind="wild"):
        """A store through SMEM and an asynchronous copy."""
        if self.threads > 1 or dtype == "bool" or not shape:
            return self.store(shape, dtype, kind, value)
        self.feature("copy out")
        whole = value is None and dtype in FLOATS and self.chance(0.15)
        kind = "small" if whole else kind
        value = self.value(shape, dtype, kind) if value is None else value
        s = self.name("s")
        transforms, tile = self.transforms(shape, dtype)
        self.push()
        self.emit(Node(f"{s}[...] = {{}}", value))
        self.emit(Node("plgpu.commit_smem()"))
        if self.chance(0.25):
            ref = self.overhang_target(shape, dtype)
        else:
            ref = self.target(shape, dtype, copy=True)
        predicate = Node(", predicate={}", self.boolean()) if self.chance(0.2) else ""
        group = self.chance(0.2)
        tail = ", commit_group=False" if group else ""
        tail += ", evict_first=True" if self.chance(0.2) else ""
        self.emit(Node(f"plgpu.copy_smem_to_gmem({s}, {{}}{{}}{tail})", ref, predicate))
        if group:
            self.emit(Node("plgpu.commit_smem_to_gmem_group()"))
        if self.chance(0.2):
            self.emit(Node("plgpu.wait_smem_to_gmem(0, wait_read_only=True)"))
            self.emit(Node("plgpu.wait_smem_to_gmem(0)"))
        else:
            self.emit(Node("plgpu.wait_smem_to_gmem(0)"))
        if dtype in ("int32", "uint32") and not predicate and self.chance(0.4):
            self.combine_by_copy(s, ref, shape, dtype)
        if whole and not predicate:
            self.combine_floats(s, ref, shape, dtype)
        block = self.pop()
        self.scoped([self.smem_type(shape, dtype, transforms)], block, [s])

    def combine_by_copy(self, s, ref, shape, dtype):
        """A copy onto what another one has brought there."""
        self.feature("combining copy")
        ops = "add umin umax smin smax inc dec and or xor".split()
        if self.chance(0.5):
            self.emit(Node(f"{s}[...] = {{}}", self.value(shape, dtype, "wild")))
            self.emit(Node("plgpu.commit_smem()"))
        for _ in range(self.rng.randint(1, 2)):
            op = self.rng.choice(ops)
            self.emit(Node(f"plgpu.copy_smem_to_gmem({s}, {{}}, reduction_op='{op}')", ref))
            self.emit(Node("plgpu.wait_smem_to_gmem(0)"))

    def wait_for(self, barrier):
        """A wait, or tests until one is true."""
        together = self.threads * prod(self.p.options.get("cluster", ()))
        if together > 4 or self.chance(0.75):  # of many that ask, few come further
            return self.emit(Node(f"plgpu.barrier_wait({barrier})", keep=True))
        self.feature("barrier test")
        d, test = self.name("d"), f"plgpu.barrier_test({barrier})"
        loop = f"lax.while_loop(lambda {d}: jnp.logical_not({d}), lambda {d}: {test}, {test})"
        self.emit(Node(loop, keep=True))

    def overhang_target(self, shape, dtype):
        """A slice of an output that may reach out of it."""
        tags = [t for t in self.tags if t[1] > 1]
        source, where = [], []
        for d in shape:
            n = max(1, d + self.rng.choice((-d // 2, -1, 0, 1, 3)))
            low = -self.rng.choice((0, 1, d // 2)) if self.chance(0.3) else 0
            where.append(Node(f"pl.ds({{}}, {d})", self.dynamic(low, n - 1)))
            source.append(n)
        index = [Node("{}", self.linear(tags))] if tags else []
        full = (*([prod(s for _, s in tags)] if tags else []), *source)
        return self.apply(self.output(full, dtype), [("at", [*index, *where])])

    def store_any(self):
        dtype = self.rng.choice((*COMMON, *EVERY))
        shape = self.shape(rank=0) if self.chance(0.08) else self.shape()
        if self.chance(0.2) and dtype in FLOATS:
            return self.stores_inexact(shape, dtype)
        if self.chance(0.25):
            return self.store_by_copy(shape, dtype)
        if self.chance(0.1) and 0 < len(shape) < 4:
            return self.store_masked(shape, dtype)
        if self.chance(0.15) and 0 < len(shape) < 4:
            return self.store_indexed(shape, dtype)
        if self.chance(0.08) and 0 < len(shape) < 4:
            return self.store_narrow(shape)
        if self.chance(0.08) and dtype in SAME_WIDTH:
            return self.store_seen(shape, dtype)
        return self.store(shape, dtype)

    def phase(self, number):
        """Perhaps the argument that says which phase a wait is for."""
        if self.chance(0.5):
            return ""
        self.feature("phase")
        return f", phase={number}"

    def sees_the_last(self):
        """Must somebody wait for the last phases of barriers? Where a loop comes back to them."""
        if self.nesting or self.chance(0.6):
            return True
        self.feature("phases that nobody sees")
        return False

    # ---- segments --------------------------------------------------------------------------------

    def statements(self, n):
        for _ in range(n):
            self.statement()

    def statement(self):
        deep = self.nesting > 2
        form = self.pick_swarm({
            "store": 6,
            "loop": 0 if deep else 1,
            "when": 0 if deep else 1,
            "cond": 0 if deep else 0.4,
            "update": 0.7,
            "delay": 0.1,
            "check": 0.1,
            "scope": 0.1,
            "warps": 0.5,
            "points": 1 if self.axis_names and not self.nesting else 0,
            "segment": 0.5 if self.threads == 1 and 0 < self.nesting < 3 else 0,
        })  # fmt: skip
        getattr(self, "do_" + form)()

    def do_segment(self):
        """A larger pattern inside of control flow."""
        if self.segments > 2:
            return self.store_any()
        self.segments += 1
        form = self.pick(
            {"pipeline": 2, "wgmma": 1, "matmul": 0.5, "ring": 1, "stores": 1, "big": 0.5}
        )
        getattr(self, "seg_" + form)()

    def do_store(self):
        self.store_any()

    def do_delay(self):
        self.feature("delay")
        self.emit(Node("pl.delay({})", self.dynamic(0, 500)))

    def do_scope(self):
        """A name for a part of the body, whose values are those of the whole."""
        self.feature("scope")
        self.blocks.append(Block())
        self.statement()
        block = self.blocks.pop()
        self.emit(Node(f"with plgpu.named_scope('{self.name('part')}'):\n{{}}", block))

    def do_check(self):
        """What is true; the interpreter looks under one of its schedules."""
        self.feature("check")
        high = self.rng.randint(0, 5)
        self.emit(
            Node(f'pl.debug_check({{}} <= {high}, "more than {high}")', self.dynamic(-2, high))
        )

    def do_update(self):
        """A store, and a change of what was stored."""
        dtype = self.rng.choice(("float32", "int32", "uint32"))
        shape = self.shape(limit=1024)
        o = self.name("r")
        self.emit(Node(f"{o} = {{}}", self.target(shape, dtype)))
        self.emit(Node(f"{o}[...] = {{}}", self.value(shape, dtype)))
        form = self.rng.randrange(5)
        if form > 2 and dtype != "float32":
            old = self.change_atomically(o, shape, dtype)
            if old:
                self.store(shape, dtype, value=old)
        elif form == 0:
            self.emit(Node(f"{o}[...] += {{}}", self.value(shape, dtype)))
        elif form == 1:
            old = self.name("v")
            self.emit(Node(f"{old} = {o}.swap({{}})", self.value(shape, dtype)))
            self.values[-1].append(Val(old, shape, dtype, "wild"))
            self.store(shape, dtype, value=old)
        else:
            self.emit(Node(f"{o}[...] = {{}}", Node(f"{o}[...]")))

    def do_loop(self):
        self.feature("loop")
        lower, upper, n, static = self.bounds()
        i, f = self.name("i"), self.name("f")
        step, form = "", self.rng.random()
        by = 1
        if form < 0.25:
            by = self.rng.randint(1, 3)
            step = f", step={by}"
        self.push()
        high = lower + max(n - 1, 0)
        self.ints[-1].append((i, min(lower, 0), high))
        tags = self.tags
        apart = self.chance(0.7)
        if apart and n:
            k = self.name("k")
            self.emit(Node(f"{k} = {i} - {lower}" if lower else f"{k} = {i} + 0", keep=True))
            self.tags = [*tags, (k, n)]
        self.statements(self.rng.randint(1, 2))
        self.tags = tags
        block = self.pop()
        self.emit(Node(f"@pl.loop({{}}, {{}}{step})\ndef {f}({i}):\n{{}}", lower, upper, block))

    def do_when(self):
        self.feature("when")
        c, f = self.boolean(), self.name("f")
        self.push()
        self.statements(self.rng.randint(1, 2))
        block = self.pop()
        self.emit(Node(f"@pl.when({{}})\ndef {f}():\n{{}}", c, block))

    def do_cond(self):
        """Branches that store."""
        c = self.boolean()
        names = []
        for _ in range(2):
            f = self.name("f")
            self.push()
            self.statements(1)
            block = self.pop()
            self.emit(Node(f"def {f}():\n{{}}", block, keep=True))
            names.append(f)
        self.emit(Node(f"lax.cond({{}}, {names[0]}, {names[1]})", c))

    # ---- pipelines -------------------------------------------------------------------------------

    def block_spec(self, grid, indices, shape, dtype, kind, out, transforms, delay):
        """(source of a BlockSpec, operand name). The block seen by the body has `shape`."""
        rank = len(grid)
        dims, source, maps = [], [], []
        args = [f"a{k}" for k in range(rank)]
        # outputs: a one-to-one map of some axes, or none at all
        free = list(range(rank))
        self.rng.shuffle(free)
        squeezed = []
        if out:
            constant = self.chance(0.2)
            used = [] if constant else free
        for d in shape:
            if out and used and self.chance(0.7):
                k = used.pop()
                n = grid[k]
                over = self.rng.choice((0, 0, 1, d // 2)) if d > 1 else 0
                dims.append(str(d))
                maps.append(args[k] if self.chance(0.7) else f"{n - 1} - {args[k]}")
                source.append(n * d - over)
            elif out:
                n = self.rng.choice((1, 1, 2))
                dims.append(str(d))
                maps.append(str(self.rng.randrange(n)))
                source.append(n * d)
            else:
                form = self.rng.random()
                k = self.rng.randrange(rank)
                n = grid[k]
                if form < 0.45:
                    dims.append(str(d))
                    maps.append(args[k] if self.chance(0.7) else f"{n - 1} - {args[k]}")
                    source.append(max(1, n * d - self.rng.choice((0, 0, 0, 1, d // 2))))
                elif form < 0.6:
                    e = self.rng.choice((1, 2, d, 8))
                    dims.append(f"pl.Element({d})")
                    maps.append(f"{args[k]} * {e}")
                    source.append(d + e * (n - 1))
                elif form < 0.75:
                    m = self.rng.randint(1, 3)
                    dims.append(str(d))
                    maps.append(f"({args[k]} + {self.rng.randrange(3)}) % {m}")
                    source.append(m * d)
                else:
                    n = self.rng.choice((1, 2))
                    dims.append(str(d))
                    node = self.rng.randrange(n)
                    maps.append(str(node))
                    source.append(n * d)
        if out:
            squeezed = [(args[k], grid[k]) for k in used]
        elif self.chance(0.4):
            k = self.rng.randrange(rank)
            squeezed = [(args[k], grid[k])]
        for text, n in squeezed:
            at = self.rng.randint(0, max(len(dims) - 2, 0))
            dims.insert(at, self.rng.choice(("None", "pl.squeezed")))
            maps.insert(at, text)
            source.insert(at, n)
        options = transforms
        if delay:
            options += f", delay_release={delay}"
        tagged = []
        if out:
            tagged = [t for t in self.tags if t[1] > 1]
            for text, n in tagged:
                dims.insert(0, "None")
                maps.insert(0, text)
                source.insert(0, n)
        body = ", ".join(maps) + ("," if len(maps) == 1 else "")
        spec = (
            f"plgpu.BlockSpec(({', '.join(dims)}{',' if len(dims) == 1 else ''}),"
            f" lambda {', '.join(args)}: ({body}){options})"
        )
        if prod(source) > 1 << 16 or len(source) > 5:
            return None
        if out:
            return spec, self.output(tuple(source), dtype)
        return spec, self.operand(tuple(source), dtype, self.data_kind(dtype, kind))

    def seg_pipeline(self):
        self.feature("pipeline")
        rank = self.pick({1: 5, 2: 3, 3: 1})
        grid = tuple(self.rng.randint(1, 4 if rank < 3 else 2) for _ in range(rank))
        slots = self.pick({1: 2, 2: 4, 3: 3, 4: 1, 7: 0.5})
        n_in, n_out = self.rng.randint(0, 3), self.rng.randint(0, 2)
        carry = self.chance(0.4) or not n_out
        specs, refs, names, kinds = ([], []), [], [], []
        for k in range(n_in + n_out):
            out = k >= n_in
            dtype = self.rng.choice(COMMON)
            shape = self.shape(limit=2048)
            if len(shape) > 3:
                shape = shape[-2:]
            transforms, tile = self.transforms(shape, dtype)
            kind = self.rng.choice(("wild", "small", "norm"))
            delay = self.rng.randrange(slots) if not out and self.chance(0.3) else 0
            made = self.block_spec(grid, None, shape, dtype, kind, out, transforms, delay)
            if made is None:
                continue
            specs[out].append(made[0])
            refs.append(made[1])
            names.append(self.name("p"))
            kinds.append((shape, dtype, kind, out))
        whole = None
        if self.chance(0.15):
            shape = self.shape(limit=1024)
            whole = (self.name("p"), shape)
            specs[0].append("plgpu.BlockSpec(memory_space=plgpu.GMEM)")
            n = sum(not k[3] for k in kinds)
            refs.insert(n, self.operand(shape, "float32", "norm"))
            names.insert(n, whole[0])
            kinds.insert(n, None)
        if not refs:
            return self.statement()
        c_type = (self.shape(limit=1024), self.rng.choice(COMMON), "wild")
        init = self.value(*c_type) if carry else None
        f, index, c = self.name("f"), self.name("i"), self.name("c")
        dynamic = self.chance(0.25) and self.tags_are_single()
        self.push()
        parts = [self.name("i") for _ in grid]
        self.emit(Node(f"{', '.join(parts)}{',' if rank == 1 else ''} = {index}", keep=True))
        for p, g in zip(parts, grid):
            self.ints[-1].append((p, 0, g - 1))
        for n, k in zip(names, kinds):
            if k and not k[3] and self.chance(0.9):
                v = self.name("v")
                self.emit(Node(f"{v} = {n}[...]"))
                self.values[-1].append(Val(v, k[0], k[1], k[2]))
        if whole:
            v = self.name("v")
            self.emit(Node(f"{v} = {whole[0]}[...]"))
            self.values[-1].append(Val(v, whole[1], "float32", "norm"))
        if carry:
            self.values[-1].append(Val(c, *c_type))
        self.budget += 10
        for n, k in zip(names, kinds):
            if k and k[3]:
                self.emit(Node(f"{n}[...] = {{}}", self.value(k[0], k[1], k[2])))
        tags = self.tags
        if self.chance(0.2):
            self.tags = [*tags, *zip(parts, grid)]
            self.statement()
        out = self.value(*c_type) if carry else None
        self.tags = tags
        block = self.pop()
        if carry:
            block.statements.append(Node("return {}", out, keep=True))
        arguments = [index, *names, *([c] if carry else [])]
        self.emit(Node(f"def {f}({', '.join(arguments)}):\n{{}}", block, keep=True))
        sizes = list(map(str, grid))
        if dynamic:
            x = self.operand((1,), "int32", (grid[0], grid[0]))
            sizes[0] = f"{x}[0]"
        options = [
            f"grid=({', '.join(sizes)}{',' if rank == 1 else ''})",
            f"in_specs=[{', '.join(specs[0])}]" if specs[0] else "",
            f"out_specs=[{', '.join(specs[1])}]" if specs[1] else "",
            f"max_concurrent_steps={slots}",
        ]
        tail = ", ".join(o for o in options if o)
        if carry:
            node = Node(
                f"plgpu.emit_pipeline({f}, {tail}, init_carry={{}})({', '.join(refs)})", init
            )
            self.store(c_type[0], c_type[1], value=self.let(node, *c_type))
        else:
            self.emit(Node(f"plgpu.emit_pipeline({f}, {tail})({', '.join(refs)})"))

    def tags_are_single(self):
        return True

    # ---- tensor cores ----------------------------------------------------------------------------

    def seg_wgmma_of_others(self):
        """A product of fp8, integers or float32: rows along K, numbers whose sums are exact."""
        a_type, b_type, acc, low = self.rng.choice(
            (
                ("float8_e4m3fn", "float8_e4m3fn", "float32", (-2, 2)),
                ("float8_e4m3fn", "float8_e5m2", "float32", (-2, 2)),
                ("float8_e5m2", "float8_e4m3fn", "float16", (-2, 2)),
                ("int8", "int8", "int32", (-128, 127)),
                ("uint8", "uint8", "int32", (0, 255)),
                ("float32", "float32", "float32", (-8, 8)),
            )
        )
        self.feature("wgmma of others")
        size = 4 if a_type == "float32" else 1
        m = self.pick({64: 5, 128: 3})
        n = self.rng.choice((8, 16, 24, 32, 48, 64, 96, 128))
        sw = self.rng.choice((32, 64, 128))
        s = sw // size
        steps = self.pick({1: 3, 2: 2, 3: 1})
        k = s * self.rng.choice((1, 1, 2)) if sw < 128 or size == 4 else s
        given = f"(plgpu.TilingTransform((8, {s})), plgpu.SwizzleTransform({sw}))"
        given = f", transforms={given}" if self.chance(0.5) else ""
        a, b, bar = self.name("s"), self.name("s"), self.name("b")
        shapes = (m, k * steps), (n, k * steps)
        self.push()
        for ref, shape, dtype in zip((a, b), shapes, (a_type, b_type), strict=True):
            src = self.operand(shape, dtype, low)
            self.emit(Node(f"plgpu.copy_gmem_to_smem({src}, {ref}, {bar})", keep=True))
        self.emit(Node(f"plgpu.barrier_wait({bar})", keep=True))
        if size == 4:
            self.tf32.add(a)
        result = self.product(a, b, (m, n, k, steps), (False, True), acc, "exact")
        self.epilogue(result, (m, n), acc, True)
        block = self.pop()
        types = [
            self.smem_type(shape, dtype, given)
            for shape, dtype in zip(shapes, (a_type, b_type), strict=True)
        ]
        self.scoped([*types, Node("plgpu.Barrier(2)")], block, [a, b, bar])

    def seg_mma(self):
        """A product with all operands in registers."""
        self.feature("mma")
        dtype, acc, low = self.rng.choice(
            (
                ("float16", "float32", (-8, 8)),
                ("bfloat16", "float32", (-8, 8)),
                ("float32", "float32", (-8, 8)),
                ("float8_e4m3fn", "float32", (-2, 2)),
                ("float8_e5m2", "float32", (-2, 2)),
                ("int8", "int32", (-128, 127)),
                ("uint8", "int32", (0, 255)),
                ("int4", "int32", (-8, 7)),
                ("uint4", "int32", (0, 15)),
            )
        )
        depths = {"float32": 8, "float16": 16, "bfloat16": 16, "int4": 64, "uint4": 64}
        step = depths.get(dtype, 32)
        m, n = self.pick({64: 4, 128: 1}), 8 * self.rng.randint(1, 4)
        k = step * self.rng.randint(1, 2)
        layout = f"plgpu.Layout.MMA_LHS(jnp.{dtype})"
        a, c = self.operand((m, k), dtype, low), self.operand((m, n), acc, (-9, 9))
        transposed = self.chance(0.5) and step < 64
        b = self.operand((n, k) if transposed else (k, n), dtype, low)
        a = (
            f"plgpu.load({a}, layout={layout}, optimized=False)"
            if self.chance(0.5)
            else f"{a}[...]"
        )
        c = f"jnp.zeros({tup((m, n))}, jnp.{acc})" if self.chance(0.3) else f"{c}[...]"
        v = self.name("v")
        self.emit(Node(f"{v} = plgpu.mma({c}, {a}, {b}{'.T' * transposed}[...])", keep=True))
        self.epilogue(v, (m, n), acc, True)

    def seg_wgmma(self):
        if self.chance(0.3):
            return self.seg_wgmma_of_others()
        self.feature("wgmma")
        dtype = self.rng.choice(("float16", "bfloat16"))
        acc = "float16" if dtype == "float16" and self.chance(0.2) else "float32"
        m = self.pick({64: 5, 128: 3, 192: 0.5})
        n = self.rng.choice((8, 16, 24, 32, 40, 64, 64, 72, 96, 128, 128, 136, 192, 256))
        if m * n > 128 * 128:
            m = 64
        sw = self.rng.choice((32, 64, 128))
        s = sw // 2
        steps = self.pick({1: 4, 2: 3, 3: 1})
        k = self.rng.choice([x for x in (16, 32, 48, 64, 96, 128) if x % s == 0])
        if acc == "float16":
            k, steps = min(k, 64), 1
            if k % s:
                k = s
        exact = acc == "float16" or self.chance(0.8)
        kind = "small" if exact else "norm"
        ta = self.chance(0.3) and m % s == 0
        tb = self.chance(0.5) or n % s != 0
        total = k * steps
        a_shape = (total, m) if ta else (m, total)
        b_shape = (n, total) if tb else (total, n)
        if prod(a_shape) * 2 + prod(b_shape) * 2 > 120_000:
            return self.seg_wgmma()
        given = f"(plgpu.TilingTransform((8, {s})), plgpu.SwizzleTransform({sw}))"
        given = f", transforms={given}" if self.chance(0.5) else ""
        a, b, bar = self.name("s"), self.name("s"), self.name("b")
        by_hand = self.chance(0.25)
        self.push()
        copies = 0
        for ref, shape in ((a, a_shape), (b, b_shape)):
            low = "small" if acc == "float32" else (-2, 2)
            if by_hand and low == "small" and prod(shape) <= MAX_SIZE * 2:
                if exact:
                    x = self.operand(shape, "float32", "small")
                    self.emit(Node(f"{ref}[...] = {x}[...].astype(jnp.{dtype})"))
                else:
                    self.emit(Node(f"{ref}[...] = {{}}", self.leaf(shape, dtype, kind)))
                self.emit(Node("plgpu.commit_smem()"))
                continue
            if acc == "float16":
                src = self.operand(shape, dtype, low)
            elif self.chance(0.3):
                src = self.overhang(shape, dtype, kind)
            else:
                src = self.gmem_view(shape, dtype, kind, copy=True)
            self.emit(Node(f"plgpu.copy_gmem_to_smem({{}}, {ref}, {bar})", src))
            copies += 1
        if copies:
            self.emit(Node(f"plgpu.barrier_wait({bar})"))
        result = self.product(a, b, (m, n, k, steps), (ta, tb), acc, kind)
        self.epilogue(result, (m, n), acc, exact)
        block = self.pop()
        types = [self.smem_type(a_shape, dtype, given), self.smem_type(b_shape, dtype, given)]
        names = [a, b]
        if copies:
            types.append(Node(f"plgpu.Barrier({copies})" if copies > 1 else "plgpu.Barrier()"))
            names.append(bar)
        self.scoped(types, block, names)

    def seg_matmul(self):
        """A pipeline whose body is a product: tiles of larger matrices, which need not divide."""
        self.feature("matmul")
        dtype = self.rng.choice(("float16", "bfloat16"))
        m, n = self.rng.choice((64, 64, 128)), self.rng.choice((32, 64, 128))
        sw = self.rng.choice((32, 64, 128))
        s = sw // 2
        k = self.rng.choice([x for x in (32, 64, 128) if x % s == 0])
        ta, tb = self.chance(0.3), self.chance(0.4) or n % s != 0
        ta = ta and m % s == 0
        steps = self.rng.randint(1, 5)
        total = max(1, steps * k - self.rng.choice((0, 0, 1, 8, k // 2)))
        over = self.rng.choice((0, 0, 0, 1, 16))
        rows, columns = max(1, m - over), max(1, n - over)
        exact = self.chance(0.8)
        kind = "small" if exact else "norm"
        x = self.operand((total, rows) if ta else (rows, total), dtype, kind)
        y = self.operand((columns, total) if tb else (total, columns), dtype, kind)
        given = f"(plgpu.TilingTransform((8, {s})), plgpu.SwizzleTransform({sw}))"
        given = f", transforms={given}" if self.chance(0.6) else ""
        slots = self.rng.randint(1, 4)
        delay = self.rng.randint(0, min(slots - 1, 2))
        late = f", delay_release={delay}" if delay else ""
        a, b, acc, f, g, i = (self.name(c) for c in "ppcffi")
        a_spec = f"({k}, {m}), lambda a0: (a0, 0)" if ta else f"({m}, {k}), lambda a0: (0, a0)"
        b_spec = f"({n}, {k}), lambda a0: (0, a0)" if tb else f"({k}, {n}), lambda a0: (a0, 0)"
        body = Block(
            [
                Node(f"plgpu.wgmma({acc}, {a}{'.T' if ta else ''}, {b}{'.T' if tb else ''})"),
                Node(f"plgpu.wgmma_wait({delay})"),
            ]
        )
        inner = Block(
            [
                Node(f"def {f}({i}, {a}, {b}):\n{{}}", body, keep=True),
                Node(
                    f"plgpu.emit_pipeline({f}, grid=({steps},),"
                    f" in_specs=[plgpu.BlockSpec({a_spec}{given}{late}),"
                    f" plgpu.BlockSpec({b_spec}{given}{late})],"
                    f" max_concurrent_steps={{}})({x}, {y})",
                    slots,
                ),
                Node(f"return {acc}[...]", keep=True),
            ]
        )
        v = self.name("v")
        self.emit(Node(f"def {g}({acc}):\n{{}}", inner, keep=True))
        self.emit(Node(f"{v} = pl.run_scoped({g}, plgpu.ACC({tup((m, n))}))", keep=True))
        self.epilogue(v, (m, n), "float32", exact)

    def seg_together(self):
        """All threads multiply their rows of one pair of matrices that thread 0 copies."""
        self.feature("products of threads")
        t = self.threads
        dtype = self.rng.choice(("float16", "bfloat16"))
        n, k = self.rng.choice((64, 128)), self.rng.choice((64, 128))
        tb = self.chance(0.5)
        rows = 64 * t
        x = self.operand((rows, k), dtype, "small")
        y = self.operand((n, k) if tb else (k, n), dtype, "small")
        a, b, bar, acc, f, g = (self.name(c) for c in "ssbcff")
        given = "(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))"
        given = f", transforms={given}" if self.chance(0.5) else ""
        self.push()
        self.emit(
            Node(
                f"@pl.when(t == 0)\ndef {f}():\n"
                f"    plgpu.copy_gmem_to_smem({x}, {a}, {bar})\n"
                f"    plgpu.copy_gmem_to_smem({y}, {b}, {bar})",
                keep=True,
            )
        )
        self.emit(Node(f"plgpu.barrier_wait({bar})", keep=True))
        part = f"{a}.at[pl.ds(pl.multiple_of(t * 64, 64), 64)]"
        product = Block(
            [
                Node(f"plgpu.wgmma({acc}, {part}, {b}{'.T' if tb else ''})"),
                Node(f"return {acc}[...]", keep=True),
            ]
        )
        v = self.name("v")
        self.emit(Node(f"def {g}({acc}):\n{{}}", product, keep=True))
        self.emit(Node(f"{v} = pl.run_scoped({g}, plgpu.ACC({tup((64, n))}))", keep=True))
        self.epilogue(v, (64, n), "float32", True)
        block = self.pop()
        types = [
            self.smem_type((rows, k), dtype, given),
            self.smem_type((n, k) if tb else (k, n), dtype, given),
            Node("plgpu.Barrier(2)"),
        ]
        self.scoped(types, block, [a, b, bar])

    def product(self, a, b, mnk, majors, acc_dtype, kind):
        """The accumulated product, as a name."""
        m, n, k, steps = mnk
        ta, tb = majors
        acc, f = self.name("c"), self.name("f")

        def part(ref, dim, at):
            if steps == 1:
                return ref
            if isinstance(at, int):
                where = f"{at * k}:{(at + 1) * k}"
                where = ["...", where] if dim else [where]
                return self.apply(ref, [("at", where)])
            ds = Node(f"pl.ds({{}}, {k})", Node(f"pl.multiple_of({{}} * {k}, {k})", at))
            return self.apply(ref, [("at", [":", ds] if dim else [ds])])

        def one(at):
            x = part(a, 0 if ta else 1, at)
            y = part(b, 1 if tb else 0, at)
            x = Node("{}.T", x) if ta else Node(held, x) if held else x
            y = Node("{}.T", y) if tb else y
            halves = n % 16 == 0 and n >= 32 and self.sub and not tb
            if not halves:
                self.emit(Node(f"plgpu.wgmma({acc}, {{}}, {{}})", x, y))
                return
            h = n // 2
            for lo, hi in ((0, h), (h, n)):
                y2 = Node(f"{{}}.at[:, {lo}:{hi}]", y)
                self.emit(Node(f"plgpu.wgmma({acc}.at[:, {lo}:{hi}], {{}}, {{}})", x, y2))

        self.sub = self.chance(0.3) and (n // 2) % 64 == 0
        held = None
        if not ta and self.chance(0.25) and getattr(a, "text", a) not in self.tf32:
            self.feature("a in registers")
            held = self.rng.choice(("{}[...]", "plgpu.load({}, layout=plgpu.Layout.WGMMA)"))
        self.push()
        if acc_dtype == "float32" and self.chance(0.2) and kind == "small":
            self.feature("acc store")
            x = self.operand((m, n), acc_dtype, "small")
            load = (
                f"plgpu.load({x}, layout=plgpu.Layout.WGMMA, optimized=False)"
                if self.chance(0.5) else f"{x}[...]"
            )  # fmt: skip
            self.emit(Node(f"{acc}[...] = {load}"))
        if steps > 1 and self.chance(0.5):
            i, g = self.name("i"), self.name("f")
            self.push()
            one(i)
            if self.chance(0.7):
                self.emit(Node(f"plgpu.wgmma_wait({self.rng.randint(0, 1)})"))
            block = self.pop()
            self.emit(Node(f"@pl.loop(0, {steps})\ndef {g}({i}):\n{{}}", block))
        else:
            for at in range(steps):
                one(at)
                if self.chance(0.3):
                    self.emit(Node(f"plgpu.wgmma_wait({self.rng.randint(0, 2)})"))
        if self.chance(0.3):
            self.emit(Node("plgpu.wgmma_wait(0)"))
        state = self.chance(0.2)
        if not state:
            out = f"{acc}[...]" if self.chance(0.7) else f"plgpu.wgmma_accumulator_load({acc})"
            self.emit(Node(f"return {out}", keep=True))
        block = self.pop()
        self.emit(Node(f"def {f}({acc}):\n{{}}", block, keep=True))
        v = self.name("v")
        if state:
            start = (
                f"jnp.zeros({tup((m, n))}, jnp.{acc_dtype})" if self.chance(0.5) or kind != "small"
                or acc_dtype != "float32" else f"{self.operand((m, n), acc_dtype, 'small')}[...]"
            )  # fmt: skip
            self.emit(Node(f"{v} = pl.run_state({f})(plgpu.ACC.init({start}))", keep=True))
        else:
            self.emit(
                Node(f"{v} = pl.run_scoped({f}, plgpu.ACC({tup((m, n))}, jnp.{acc_dtype}))",
                     keep=True)
            )  # fmt: skip
        return v

    def epilogue(self, v, shape, dtype, exact):
        """Store a product in some form."""
        self.values[-1].append(Val(v, shape, dtype, "norm")) if exact else None
        form = self.rng.random()
        if not exact:
            return self.store(shape, dtype, value=v)
        if form < 0.35:
            return self.store(shape, dtype, value=v)
        if form < 0.55:
            d = self.rng.choice(("float16", "bfloat16", "float32", "int32"))
            return self.store_by_copy(shape, d, Node(f"{v}.astype(jnp.{d})"))
        if form < 0.75:
            axis = self.rng.randint(0, 1)
            r = self.name("v")
            self.emit(Node(f"{r} = jnp.max({v}, axis={axis})"))
            wide = Node(f"lax.broadcast_in_dim({r}, {tup(shape)}, ({1 - axis},))")
            self.store(shape, dtype, value=Node(f"({v} - {{}})", wide))
            return self.store((shape[1 - axis],), dtype, value=r)
        if form < 0.85 and shape[1] % 16 == 0:
            h = shape[1] // 2
            x = Node(f"({v}[:, :{h}] - {v}[:, {h}:])")
            return self.store((shape[0], h), dtype, value=x)
        self.budget += 6
        big, self.depth = self.depth, 3
        x = self.value(shape, dtype)
        self.depth = big
        self.store(shape, dtype, value=Node(f"jnp.maximum({v}, {{}})", x))

    # ---- rings and threads -----------------------------------------------------------------------

    def seg_ring(self):
        """Copies ahead of their use, by hand; one thread."""
        self.feature("ring")
        slots, steps = self.rng.randint(1, 3), self.rng.randint(1, 6)
        ahead = self.rng.randint(1, slots)
        dtype = self.rng.choice(COMMON)
        shape = self.shape(limit=1024)[-2:]
        kind = self.rng.choice(("wild", "norm", "small"))
        x = self.operand((steps, *shape), dtype, self.data_kind(dtype, kind))
        s, b, i, f, g = (self.name(c) for c in "sbiff")
        transforms, _ = self.transforms(shape, dtype)
        self.push()

        def fetch(k):
            return Node(
                f"plgpu.copy_gmem_to_smem({x}.at[{k}], {s}.at[{{}}], {b}.at[{{}}])",
                Node(f"{k} % {slots}"), Node(f"{k} % {slots}"),
            )  # fmt: skip

        for k in range(min(ahead, steps)):
            self.emit(fetch(str(k)))
        self.push()
        self.ints[-1].append((i, 0, steps - 1))
        phase = self.phase(f"{i} // {slots}")
        self.emit(Node(f"plgpu.barrier_wait({b}.at[{i} % {slots}]{phase})"))
        v = self.name("v")
        self.emit(Node(f"{v} = {s}[{i} % {slots}]"))
        self.values[-1].append(Val(v, shape, dtype, kind))
        tags = self.tags
        self.tags = [*tags, (i, steps)]
        early = ahead < slots
        more = Block([fetch(f"({i} + {ahead})")])
        if early:
            self.emit(Node(f"@pl.when({i} + {ahead} < {steps})\ndef {f}():\n{{}}", more))
        self.store(shape, dtype)
        if self.chance(0.3):
            self.statement()
        if not early:
            self.emit(Node(f"@pl.when({i} + {ahead} < {steps})\ndef {f}():\n{{}}", more))
        self.tags = tags
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {steps})\ndef {g}({i}):\n{{}}", loop, keep=True))
        block = self.pop()
        types = [
            self.smem_type((slots, *shape), dtype, transforms),
            Node(f"plgpu.Barrier(num_barriers={slots})"),
        ]
        self.scoped(types, block, [s, b])

    def seg_stores(self):
        """Stores in flight: groups, and waits that leave some."""
        self.feature("store groups")
        slots, steps = self.rng.randint(1, 3), self.rng.randint(1, 6)
        dtype = self.rng.choice(COMMON)
        shape = self.shape(limit=1024)[-2:]
        s, i, g = (self.name(c) for c in "sif")
        transforms, _ = self.transforms(shape, dtype)
        awaits = self.nesting or self.chance(0.7)
        self.push()
        self.push()
        self.ints[-1].append((i, 0, steps - 1))
        tags = self.tags
        value = self.let(self.value(shape, dtype), shape, dtype, "wild")
        self.emit(Node(f"plgpu.wait_smem_to_gmem({slots - 1}, wait_read_only=True)"))
        self.emit(Node(f"{s}[{i} % {slots}] = {{}}", value))
        self.emit(Node("plgpu.commit_smem()"))
        self.tags = [*tags, (i, steps)]
        target = self.target(shape, dtype, copy=True)
        self.tags = tags
        predicate = Node(", predicate={}", self.boolean()) if self.chance(0.2) else ""
        self.emit(
            Node(f"plgpu.copy_smem_to_gmem({s}.at[{i} % {slots}], {{}}{{}})", target, predicate)
        )
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {steps})\ndef {g}({i}):\n{{}}", loop))
        if awaits:
            self.emit(Node("plgpu.wait_smem_to_gmem(0)"))
        else:
            self.feature("copies that nobody awaits")
        block = self.pop()
        self.scoped([self.smem_type((slots, *shape), dtype, transforms)], block, [s])

    def seg_big(self):
        """A buffer larger than registers, filled and emptied by several copies."""
        self.feature("big copies")
        dtype = self.rng.choice((*COMMON, "int8", "uint8"))
        size, most = 1 << self.rng.randint(10, 15), 1 << 16
        if self.chance(0.15):
            self.feature("bigger copies")
            size, most = 1 << self.rng.randint(15, 17), 200 << 10
        while True:
            rows = self.rng.choice((8, 16, 64, 128, 256, 264, 320, 512, self.extent()))
            columns = self.rng.choice((16, 32, 64, 128, 256, 320, 520, 1024, self.extent()))
            if rows * columns <= size and rows * columns * itemsize(dtype) <= most:
                break
        shape = (rows, columns)
        if self.chance(0.25):
            shape = (self.rng.choice((2, 3)), rows, columns)
            if prod(shape) * itemsize(dtype) > most:
                shape = shape[1:]
        transforms, tile = self.transforms(shape, dtype)
        s, b = self.name("s"), self.name("b")
        parts = [(s, shape)]
        if len(shape) == 3:
            parts = [(f"{s}.at[{k}]", shape[1:]) for k in range(shape[0])]
        elif columns % (2 * tile) == 0 and self.chance(0.4):
            h = columns // 2
            parts = [(f"{s}.at[:, :{h}]", (rows, h)), (f"{s}.at[:, {h}:]", (rows, h))]
        elif rows % 16 == 0 and self.chance(0.5):
            h = 8 * self.rng.randint(1, rows // 8 - 1)
            parts = [(f"{s}.at[:{h}]", (h, columns)), (f"{s}.at[{h}:]", (rows - h, columns))]
        self.push()
        for ref, part in parts:
            if self.chance(0.4):
                src = self.overhang(part, dtype, "norm")
            else:
                src = self.gmem_view(part, dtype, "norm", copy=True)
            self.emit(Node(f"plgpu.copy_gmem_to_smem({{}}, {ref}, {b})", src))
        self.emit(Node(f"plgpu.barrier_wait({b})"))
        for _ in range(self.rng.randint(1, 3)):
            r = min(rows, self.rng.choice((8, 16, 24, 64, rows)))
            c = min(columns, self.rng.choice((tile, 2 * tile, 4 * tile, columns)))
            if tile == 1 and self.chance(0.5):
                r, c = self.rng.randint(1, rows), self.rng.randint(1, columns)
            align = 8 if self.chance(0.5) and rows % 8 == r % 8 == 0 else 1
            i = self.start(0, (rows - r) // align * align, align)
            j = self.start(0, (columns - c) // tile * tile, tile)
            where = [Node(f"pl.ds({{}}, {r})", i), Node(f"pl.ds({{}}, {c})", j)]
            if len(shape) == 3:
                where.insert(0, Node("{}", self.start(0, shape[0] - 1)))
            part = self.apply(s, [("at", where)])
            if r * c <= MAX_SIZE and self.chance(0.4):
                v = self.let(self.load(part, (r, c)), (r, c), dtype, "norm")
                self.store((r, c), dtype, value=v)
            else:
                if self.chance(0.3):
                    to = self.overhang_target((r, c), dtype)
                else:
                    to = self.target((r, c), dtype, copy=True, limit=1 << 15)
                self.emit(Node("plgpu.copy_smem_to_gmem({}, {})", part, to))
        self.emit(Node("plgpu.wait_smem_to_gmem(0)"))
        block = self.pop()
        n = len(parts)
        bar = Node(f"plgpu.Barrier({n})" if n > 1 else "plgpu.Barrier()")
        self.scoped([self.smem_type(shape, dtype, transforms), bar], block, [s, b])

    def seg_exchange(self):
        """Every thread writes a part, all read the whole after a barrier."""
        self.feature("exchange")
        t = self.threads
        dtype = self.rng.choice(COMMON)
        shape = self.shape(limit=1024)[-2:]
        s, b = self.name("s"), self.name("b")
        rounds = self.rng.randint(1, 2)
        self.push()
        for k in range(rounds):
            self.emit(Node(f"{s}[{k}, t] = {{}}", self.value(shape, dtype), keep=True))
            self.emit(Node(f"plgpu.barrier_arrive({b})", keep=True))
            self.emit(Node(f"plgpu.barrier_wait({b})", keep=True))
            v = self.name("v")
            form = self.rng.randrange(3)
            if form == 0:
                other = f"{s}[{k}, (t + 1) % {t}]"
            elif form == 1:
                other = f"{s}[{k}, {self.rng.randrange(t)}]"
            else:
                other = f"{s}[{k}, {t - 1} - t]"
            self.emit(Node(f"{v} = {other}"))
            self.values[-1].append(Val(v, shape, dtype, "wild"))
            self.store(shape, dtype, value=v)
            self.store(shape, dtype)
        block = self.pop()
        types = [self.smem_type((rounds, t, *shape), dtype), Node(f"plgpu.Barrier({t})")]
        self.scoped(types, block, [s, b])

    def seg_turns(self):
        """Threads change one buffer in turns; a barrier of each says whose turn it is, or a
        semaphore."""
        self.feature("turns")
        counts = self.chance(0.4)
        if counts:
            self.feature("semaphores")
        t = self.threads
        dtype = self.rng.choice(("int32", "uint32", "float32", "int16"))
        shape = self.shape(limit=1024)[-2:]
        s, b, i, f, g, h, v = (self.name(c) for c in "sbifffv")
        rounds = self.rng.randint(1, 3)
        signal = "plgpu.semaphore_signal" if counts else "plgpu.barrier_arrive"
        wait = "plgpu.semaphore_wait" if counts else "plgpu.barrier_wait"
        many = ", 3" if counts and self.chance(0.3) else ""
        self.push()
        first = Block(
            [
                Node(f"{s}[...] = {{}}", self.leaf(shape, dtype, "wild"), keep=True),
                Node(f"{signal}({b}.at[0]{many})", keep=True),
            ]
        )
        self.emit(Node(f"@pl.when(t == 0)\ndef {f}():\n{{}}", first, keep=True))
        self.push()
        self.ints[-1].append((i, 0, rounds - 1))
        if counts:
            self.emit(Node(f"{wait}({b}.at[t]{many})", keep=True))
        else:
            self.wait_for(f"{b}.at[t]")
        self.emit(Node(f"{v} = {s}[...]"))
        self.values[-1].append(Val(v, shape, dtype, "wild"))
        self.emit(Node(f"{s}[...] = jnp.maximum({v}, {{}})", self.value(shape, dtype)))
        tags = self.tags
        self.tags = [*tags, (i, rounds)]
        if self.chance(0.6):
            self.emit(Node("plgpu.commit_smem()", keep=True))
            target = self.target(shape, dtype, copy=True)
            self.emit(Node(f"plgpu.copy_smem_to_gmem({s}, {{}})", target))
            self.emit(Node("plgpu.wait_smem_to_gmem(0)", keep=True))
        self.emit(Node(f"{signal}({b}.at[(t + 1) % {t}]{many})", keep=True))
        if self.chance(0.3):
            self.store(shape, dtype)
        self.tags = tags
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {rounds})\ndef {g}({i}):\n{{}}", loop, keep=True))
        self.emit(Node(f"@pl.when(t == 0)\ndef {h}():\n    {wait}({b}.at[0]{many})", keep=True))
        block = self.pop()
        turns = f"SemaphoreType.REGULAR(({t},))" if counts else f"Barrier(num_barriers={t})"
        types = [self.smem_type(shape, dtype), Node(f"plgpu.{turns}")]
        self.scoped(types, block, [s, b])

    def seg_own(self):
        """Each thread copies into its own part of SMEM, with its own barrier."""
        self.feature("own parts")
        t = self.threads
        dtype = self.rng.choice(COMMON)
        shape = self.shape(limit=1024)[-2:]
        s, b = self.name("s"), self.name("b")
        transforms, _ = self.transforms(shape, dtype)
        self.push()
        src = self.gmem_view(shape, dtype, "norm", copy=True)
        if self.chance(0.5):
            self.feature("prefetch")
            self.emit(Node("plgpu.async_prefetch({})", src))
        self.emit(Node(f"plgpu.copy_gmem_to_smem({{}}, {s}.at[t], {b}.at[t])", src, keep=True))
        self.wait_for(f"{b}.at[t]")
        v = self.name("v")
        self.emit(Node(f"{v} = {s}[t]"))
        self.values[-1].append(Val(v, shape, dtype, "norm"))
        self.store(shape, dtype)
        if self.chance(0.5):
            self.emit(Node(f"{s}[t] = {{}}", self.value(shape, dtype), keep=True))
            self.emit(Node("plgpu.commit_smem()", keep=True))
            target = self.target(shape, dtype, copy=True)
            self.emit(Node(f"plgpu.copy_smem_to_gmem({s}.at[t], {{}})", target))
            self.emit(Node("plgpu.wait_smem_to_gmem(0)", keep=True))
        block = self.pop()
        types = [
            self.smem_type((t, *shape), dtype, transforms),
            Node(f"plgpu.Barrier(num_barriers={t})"),
        ]
        self.scoped(types, block, [s, b])

    def seg_producer(self):
        """One thread copies, the others consume; slots go round."""
        self.feature("producer")
        consumers = self.threads - 1
        slots, steps = self.rng.randint(1, 3), self.rng.randint(1, 5)
        dtype = self.rng.choice(COMMON)
        shape = self.shape(limit=1024)[-2:]
        kind = self.rng.choice(("wild", "norm", "small"))
        x = self.operand((steps, *shape), dtype, self.data_kind(dtype, kind))
        s, full, empty, i, j = (self.name(c) for c in "sbbii")
        fp, fc, fl, fw, fe = (self.name("f") for _ in range(5))
        transforms, _ = self.transforms(shape, dtype)
        # registers that are given away do not come back in the next round of a loop
        registers = self.chance(0.3) and not self.nesting
        sees = self.sees_the_last()
        self.push()
        producer = Block()
        if registers:
            self.feature("registers")
            producer.statements.append(
                Node('plgpu.set_max_registers(40, action="decrease")', keep=True)
            )
        producer.statements.append(
            Node(
                f"@pl.loop(0, {steps})\ndef {fl}({i}):\n"
                f"    @pl.when({i} >= {slots})\n"
                f"    def {fw}():\n"
                f"        plgpu.barrier_wait({empty}.at[{i} % {slots}]"
                f"{self.phase(f'{i} // {slots} - 1')})\n"
                f"    plgpu.copy_gmem_to_smem({x}.at[{i}], {s}.at[{i} % {slots}],"
                f" {full}.at[{i} % {slots}])",
                keep=True,
            )
        )
        for k in range(max(0, steps - slots), steps) if sees else ():
            producer.statements.append(
                Node(
                    f"plgpu.barrier_wait({empty}.at[{k % slots}]{self.phase(k // slots)})",
                    keep=True,
                )  # fmt: skip
            )
        self.emit(Node(f"@pl.when(t == 0)\ndef {fp}():\n{{}}", producer, keep=True))
        self.push()  # the consumers' branch
        self.push()  # its loop
        self.ints[-1].append((j, 0, steps - 1))
        v = self.name("v")
        phase = self.phase(f"{j} // {slots}")
        self.emit(Node(f"plgpu.barrier_wait({full}.at[{j} % {slots}]{phase})", keep=True))
        self.emit(Node(f"{v} = {s}[{j} % {slots}]"))
        self.values[-1].append(Val(v, shape, dtype, kind))
        early = self.chance(0.5)
        arrive = Node(f"plgpu.barrier_arrive({empty}.at[{j} % {slots}])", keep=True)
        if early:
            self.emit(arrive)
        tags = self.tags
        self.tags = [*tags, (j, steps)]
        self.store(shape, dtype)
        if self.chance(0.3):
            self.statement()
        self.tags = tags
        if not early:
            self.emit(arrive)
        loop = self.pop()
        if registers:
            more = {2: 256, 3: 232, 4: 152}[self.threads]
            self.emit(Node(f'plgpu.set_max_registers({more}, action="increase")', keep=True))
        self.emit(Node(f"@pl.loop(0, {steps})\ndef {fe}({j}):\n{{}}", loop, keep=True))
        branch = self.pop()
        self.emit(Node(f"@pl.when(t > 0)\ndef {fc}():\n{{}}", branch, keep=True))
        block = self.pop()
        types = [
            self.smem_type((slots, *shape), dtype, transforms),
            Node(f"plgpu.Barrier(num_barriers={slots})"),
            Node(f"plgpu.Barrier({consumers}, num_barriers={slots})"),
        ]
        self.scoped(types, block, [s, full, empty])

    def specialised_input(self, steps, shared, dtype, late):
        """A BlockSpec, its operand, shape and kind of its blocks."""
        # what any blocks of a cluster can share: rows of 128 bytes, swizzle patterns for each
        rows, columns = self.rng.choice((16, 32)), 128 // itemsize(dtype)
        collective = shared and self.chance(0.7)
        if not collective and self.chance(0.5):
            rows, columns = self.rng.choice((1, 3, 8)), self.rng.choice((16, 33, 64))
        transforms, _ = self.transforms((rows, columns), dtype)
        kind = self.rng.choice(("wild", "norm", "small"))
        form, over = self.pick({"a0": 4, "a0 // 2": 1, f"{steps - 1} - a0": 1}), 0
        if self.chance(0.25):
            over = self.rng.randint(1, rows)
        total = max(1, (1 + (steps - 1) // (2 if "/" in form else 1)) * rows - over)
        x = self.operand((total, columns), dtype, self.data_kind(dtype, kind))
        axes = ""
        if collective:
            self.feature("multicast")
            axes = f', collective_axes="{self.rng.choice(shared)}"'
        spec = f"({rows}, {columns}), lambda a0: ({form}, 0){transforms}{late}{axes}"
        return f"plgpu.BlockSpec({spec})", x, ((rows, columns), kind)

    def seg_specialised(self):
        """A pipeline with a memory thread; blocks of a cluster share what they all load."""
        self.feature("specialised")
        compute = self.threads - 1
        steps = self.pick({1: 1, 2: 2, 3: 3, 6: 2})
        slots = self.rng.randint(1, 4)
        delay = self.rng.randrange(slots) if self.chance(0.3) else 0
        late = f", delay_release={delay}" if delay else ""
        shared = [n for n, _ in self.tags if n.startswith("c")]
        dtype = self.rng.choice(COMMON)
        specs, refs, names, blocks = [], [], [], []
        for _ in range(self.rng.randint(1, 3)):
            spec, x, block = self.specialised_input(steps, shared, dtype, late)
            specs.append(spec)
            refs.append(x)
            names.append(self.name("p"))
            blocks.append(block)
        outs = []
        if compute == 1 and self.chance(0.5):
            shape = (self.rng.choice((1, 4, 16)), self.rng.choice((32, 33, 128)))
            tags = [t for t in self.tags if t[1] > 1 and t[0] != "t"]
            fixed = self.chance(0.3)
            lead = [n for n, _ in tags]
            at = ", ".join([*lead, "0" if fixed else "a0", "0"])
            dims = ", ".join([*["None"] * len(lead), *map(str, shape)])
            outs.append(f"plgpu.BlockSpec(({dims}), lambda a0: ({at}))")
            total = (shape[0] * (1 if fixed else steps), shape[1])
            refs.append(self.output((*[n for _, n in tags], *total), dtype))
            names.append(self.name("p"))
        carry = self.chance(0.4)
        c_type = (self.shape(limit=1024), self.rng.choice(COMMON), "wild")
        f, g, pipe, index, i, c = (self.name(k) for k in "ffpiic")
        self.push()
        self.emit(Node(f"{i}, = {index}", keep=True))
        self.ints[-1].append((i, 0, steps - 1))
        by_hand = self.chance(0.25), self.chance(0.25)  # waits, releases
        waits, releases = ([self.name("b") for _ in blocks] if x else [] for x in by_hand)
        for k, (n, (shape, kind)) in enumerate(zip(names, blocks)):
            v = self.name("v")
            if waits:
                self.emit(Node(f"plgpu.barrier_wait({waits[k]})", keep=True))
            self.emit(Node(f"{v} = {n}[...]"))
            self.values[-1].append(Val(v, shape, dtype, kind))
        if releases:
            arrive = "\n".join(f"    plgpu.barrier_arrive({b})" for b in releases)
            self.emit(
                Node(f"@pl.when({i} >= {delay})\ndef {self.name('f')}():\n{arrive}", keep=True)
            )
        if carry:
            self.values[-1].append(Val(c, *c_type))
        self.budget += 8
        if outs:
            self.emit(Node(f"{names[-1]}[...] = {{}}", self.value(shape, dtype, "wild")))
        tags = self.tags
        self.tags = [*tags, (i, steps)]
        self.store(*self.rng.choice([(s, dtype) for s, _ in blocks]))
        self.tags = tags
        if carry:
            self.emit(Node("return {}", self.value(*c_type), keep=True))
        block = self.pop()
        arguments = [index, *names, *waits, *releases, *([c] if carry else [])]
        self.emit(Node(f"def {f}({', '.join(arguments)}):\n{{}}", block, keep=True))
        context = ""
        if waits or releases:
            self.feature("pipeline by hand")
            context += ", manual_ready_barriers=True" if waits else ""
            context += ", manual_consumed_barriers=True" if releases else ""
        if carry:
            v = self.name("v")
            self.push()
            self.emit(Node(f"{v} = {pipe}({{}})", self.value(*c_type), keep=True))
            self.values[-1].append(Val(v, *c_type))
            self.store(c_type[0], c_type[1])
            self.emit(Node(f"def {g}({pipe}):\n{{}}", self.pop(), keep=True))
            context += f", compute_context={g}"
        out_specs = f", out_specs=[{', '.join(outs)}]" if outs else ""
        call = (
            f"plgpu.emit_pipeline_warp_specialized({f}, grid=({steps},), memory_registers=40,"
            f" in_specs=[{', '.join(specs)}]{out_specs}, max_concurrent_steps={slots},"
            f' wg_axis="t", num_compute_wgs={compute}{context})'
        )
        if self.chance(0.7):
            return self.emit(Node(f"{call}({', '.join(refs)})"))
        self.feature("pipeline in given memory")  # perhaps once more
        whole, a, h, given = self.name("p"), self.name("s"), self.name("f"), ", ".join(refs)
        run = Node(f"{whole}({given}, allocations={a})", keep=True)
        self.emit(Node(f"{whole} = {call}", keep=True))
        block = Block([run] * self.rng.randint(1, 2))
        self.emit(Node(f"def {h}({a}):\n{{}}", block, keep=True))
        types = f"{whole}.get_allocations({given})"
        self.emit(Node(f'pl.run_scoped({h}, {types}, collective_axes="t")', keep=True))

    # ---- the whole -------------------------------------------------------------------------------

    def launch(self):
        """Grid, cluster, threads; and the statements that name their indices."""
        o = self.p.options
        self.axis_names = {}
        axes = []
        if self.chance(0.55):
            rank = self.pick({1: 5, 2: 3, 3: 1.5, 4: 0.5, 5: 0.3})
            grid = [self.rng.choice((1, 2, 3)) for _ in range(rank)]
            while prod(grid) > 6:
                grid[self.rng.randrange(rank)] = 1
            o["grid"] = tuple(grid)
            o["grid_names"] = tuple(f"g{k}" for k in range(rank))
            for k, n in enumerate(grid):
                call = f"pl.program_id({k})" if self.chance(0.2) else f'lax.axis_index("g{k}")'
                axes.append((f"g{k}", call, n))
            if self.chance(0.2):
                sizes = self.rng.choice(((2,), (2, 1), (1, 2), (2, 2), (1, 1, 2)))
                o["cluster"] = sizes
                o["cluster_names"] = tuple(f"c{k}" for k in range(len(sizes)))
                self.feature("cluster")
                for k, n in enumerate(sizes):
                    axes.append((f"c{k}", f'lax.axis_index("c{k}")', n))
        if self.chance(0.2):
            self.threads = 2 if "cluster" in o else self.pick({2: 4, 3: 2, 4: 1})
            o["num_threads"], o["thread_name"] = self.threads, "t"
            axes.append(("t", 'lax.axis_index("t")', self.threads))
            self.feature("threads")
        for n, call, size in axes:
            self.emit(Node(f"{n} = {call}", keep=True))
            self.axis_names[n] = n
            self.tags.append((n, size))

    def program(self):
        self.segments = self.counters = 0
        if self.chance(0.05):
            self.feature("dependent launches")
            self.emit(Node("plgpu.griddepcontrol_wait()", keep=True))
            if self.chance(0.7):
                self.emit(Node("plgpu.griddepcontrol_launch_dependents()"))
        self.launch()
        if self.chance(0.08):
            self.feature("approx math")
            params = Node("plgpu.CompilerParams(approx_math=True)")
            self.p.options["compiler_params"] = params
        if self.threads > 1:
            table = {
                "compute": 3,
                "exchange": 2,
                "own": 2,
                "producer": 3,
                "together": 1.5,
                "turns": 1.5,
                "specialised": 2,
                "warps": 1,
                "warps_memory": 0.7,
                "source": 0.5,
                "ring_of_turns": 1.5,
                "functions": 0.5,
                "counts": 0.5,
                "tiles": 0.4,
            }
        else:
            table = {
                "compute": 5,
                "pipeline": 3,
                "wgmma": 2,
                "mma": 0.8,
                "matmul": 1,
                "ring": 1.2,
                "stores": 1,
                "copy": 1.5,
                "big": 1.5,
                "widened": 0.7,
                "warps": 0.8,
                "warps_memory": 0.6,
                "source": 0.4,
                "union": 0.8,
                "functions": 1,
                "counts": 0.4,
                "tiles": 0.4,
                "cluster": 3 if "cluster" in self.p.features else 0,
                "launch": 1 if "grid" in self.p.options and "cluster" not in self.p.features else 0,
            }
        if "grid" not in self.p.options and self.chance(0.12):
            self.in_a_dynamic_loop(table)
            return self.p
        for _ in range(self.pick({1: 5, 2: 3, 3: 1})):
            self.segment(table)
            if self.p.features & {"registers", "specialised"}:
                break  # a thread has given its registers away
        return self.p

    def segment(self, table):
        form = self.pick_swarm(table)
        if form == "compute":
            self.statements(self.rng.randint(1, 3))
        elif form == "copy":
            self.store_by_copy(self.shape(), self.rng.choice(COMMON))
        else:
            getattr(self, "seg_" + form)()


def generate(seed):
    """The program of a seed: the first attempt that the model accepts."""
    for attempt in range(200):
        program = Gen(seed, attempt).program()
        if len(program.operands) + len(program.outputs) > 60:
            continue
        try:
            expected = kernels.Case(program.source()).expected()
        except model.Invalid:
            continue
        if any(e.mask.any() for e in expected):
            return program
    raise RuntimeError(f"no program for seed {seed}")
