"""Productions of warps that go their own ways, and of CUDA source in kernels.

A warp computes scalars and stores them where no other warp does, or one fetches and another one
reads. The first line of CUDA source says what it computes (hopper_model.described), and stands in
for it where there are no lanes: in the model and on the interpreter."""

from .expressions import COMMON, FLOATS, INTS, itemsize, prod, tup
from .kernels import Block, Node

SCALARS = (*FLOATS, *INTS, "int8", "uint8")


class Warps:
    # ---- maps over warps -------------------------------------------------------------------------

    def emit_map(self, w, block):
        """The block once for each warp, whose number is w."""
        self.feature("warps")
        f, mesh = self.name("f"), f"plgpu.WarpMesh(axis_name='{w}')"
        form = self.rng.randrange(4)
        if form < 2:
            return self.emit(Node(f"@plgpu.warp_map\ndef {f}({w}):\n{{}}", block, keep=True))
        block.statements.insert(0, Node(f"{w} = lax.axis_index('{w}')", keep=True))
        if form == 2:
            self.emit(Node(f"@pl.core_map({mesh})\ndef {f}():\n{{}}", block, keep=True))
            return
        x, r = self.operand((4,), "int32", (0, 3)), self.name("r")
        self.emit(Node(f"def {f}({r}):\n{{}}", block, keep=True))
        self.emit(Node(f"pl.kernel({f}, mesh={mesh})({x})", keep=True))

    def push_warp(self):
        """Begins the body of a map; the warp's number, and what to give to `pop_warp`."""
        kept = self.tags, self.values, self.ints
        w = self.name("w")
        self.values = [[]]  # arrays of the thread are out of reach
        self.tags = [*self.tags, (w, 4)]
        self.push()
        return w, kept

    def pop_warp(self, kept):
        block = self.pop()
        self.tags, self.values, self.ints = kept
        return block

    def do_warps(self):
        """Scalars: stores, loops, branches."""
        w, kept = self.push_warp()
        for _ in range(self.rng.randint(1, 3)):
            self.warp_statement(0)
        block = self.pop_warp(kept)
        self.emit_map(w, block)

    def warp_statement(self, deep):
        form = self.rng.random()
        if deep > 1 or form < 0.5:
            return self.warp_store()
        f, tags = self.name("f"), self.tags
        self.push()
        if form < 0.7:
            i, n = self.name("i"), self.rng.randint(0, 3)
            upper = self.dynamic(0, n) if self.chance(0.4) else n
            self.ints[-1].append((i, 0, max(n - 1, 0)))
            self.tags = [*tags, (i, n)] if n else tags
            head = Node(f"@pl.loop(0, {{}})\ndef {f}({i}):\n{{}}", upper, None)
        else:
            head = Node(f"@pl.when({{}})\ndef {f}():\n{{}}", self.boolean(), None)
        self.warp_statement(deep + 1)
        self.tags = tags
        head.parts[1] = self.pop()
        self.emit(head)

    def warp_store(self):
        dtype = self.rng.choice((*COMMON, *SCALARS))
        self.store_to(self.target((), dtype), self.scalar(dtype))

    def scalar(self, dtype, depth=0):
        """A scalar that a warp can compute."""
        typed, form = f"jnp.{dtype}", self.rng.random()
        if depth > 2 or form < 0.35:
            if dtype in INTS and self.chance(0.5):
                return Node(f"{{}}.astype({typed})", self.dynamic(0, 9))
            n = self.rng.choice((1, 3, 8))
            kind = "norm" if dtype in FLOATS else "wild"
            return Node(f"{self.operand((n,), dtype, kind)}[{{}}]", self.dynamic(0, n - 1))
        if form < 0.5:
            other = self.rng.choice(SCALARS if dtype not in FLOATS else ("float32", "int16"))
            return Node(f"{{}}.astype({typed})", self.scalar(other, depth + 1))
        if form < 0.6:
            pair = (self.scalar(dtype, depth + 1) for _ in range(2))
            return Node("jnp.where({}, {}, {})", self.boolean(), *pair)
        if form < 0.7 and dtype == "int32":
            self.feature("source in warps")
            f = self.emit_source(
                "// r0 = a0 ^ a1\nr0[0] = a0 ^ a1;", ["SPLAT"] * 2, [((), dtype, "SPLAT")]
            )
            pair = (self.scalar(dtype, depth + 1) for _ in range(2))
            return Node(f"{f}({{}}, {{}})", *pair)
        if form < 0.8 and itemsize(dtype) > 1:
            c, n = self.name("c"), self.rng.randint(0, 3)
            step = self.scalar(dtype, depth + 2)
            f = "jnp.maximum" if dtype in FLOATS else "jnp.bitwise_xor"
            body = Node(f"lambda i, {c}: {f}({c}, {{}})", step)
            return Node(f"lax.fori_loop(0, {n}, {{}}, {{}})", body, self.scalar(dtype, depth + 1))
        if itemsize(dtype) == 1 or form < 0.85:
            return self.scalar(dtype, depth + 1)
        ops = ["jnp.maximum({}, {})", "jnp.minimum({}, {})"]
        ops += ["({} + {})", "({} * {})"] if dtype not in FLOATS else ["({} - {})"]
        ops += ["({} & {})", "({} ^ {})"] if dtype in INTS else []
        pair = (self.scalar(dtype, depth + 1) for _ in range(2))
        return Node(self.rng.choice(ops), *pair)

    def seg_warps(self):
        """A warp fetches rows, others read them in step; then copies of theirs."""
        self.feature("warps in step")
        t = self.threads
        slots, steps = self.rng.randint(1, 3), self.rng.randint(1, 5)
        dtype, n = self.rng.choice(COMMON), self.rng.choice((8, 24, 33, 128))
        x = self.operand((steps, n), dtype, self.data_kind(dtype, "norm"))
        s, out, full, empty = (self.name(c) for c in "ssbb")
        mine = "t, " if t > 1 else ""
        at = f"t * {slots} + " if t > 1 else ""
        readers = self.rng.sample((1, 2, 3), self.rng.randint(1, 3))
        sees = self.sees_the_last()
        self.push()
        w, kept = self.push_warp()
        i, j, fp, fl, fw, fe, fc = (self.name(c) for c in "iifffff")
        slot = f"{i} % {slots}"
        self.emit(
            Node(
                f"@pl.when({w} == 0)\ndef {fp}():\n"
                f"    @pl.loop(0, {steps})\n    def {fl}({i}):\n"
                f"        @pl.when({i} >= {slots})\n        def {fw}():\n"
                f"            plgpu.barrier_wait({empty}.at[{at}{slot}])\n"
                f"        plgpu.copy_gmem_to_smem({x}.at[{i}], {s}.at[{mine}{slot}],"
                f" {full}.at[{at}{slot}])",
                keep=True,
            )
        )
        self.push()
        self.ints[-1].append((j, 0, steps - 1))
        tags = self.tags
        self.tags = [*tags, (j, steps)]
        slot = f"{j} % {slots}"
        self.wait_for(f"{full}.at[{at}{slot}]")
        value = Node(f"{s}[{mine}{slot}, {{}}]", self.dynamic(0, n - 1))
        self.store_to(self.target((), dtype), value)
        if self.chance(0.4):
            self.warp_statement(1)
        self.emit(Node(f"plgpu.barrier_arrive({empty}.at[{at}{slot}])", keep=True))
        self.tags = tags
        loop = Node(f"@pl.loop(0, {steps})\ndef {fe}({j}):\n{{}}", self.pop(), keep=True)
        choice = " | ".join(f"({w} == {r})" for r in readers)
        self.emit(Node(f"@pl.when({choice})\ndef {fc}():\n{{}}", Block([loop]), keep=True))
        if self.chance(0.5):
            self.warp_statement(1)
        self.emit_map(w, self.pop_warp(kept))
        # the thread sees the last phases of the slots, or nobody
        for k in range(min(slots, steps)) if sees else ():
            self.emit(Node(f"plgpu.barrier_wait({empty}.at[{at}{k}])", keep=True))
        self.copies_of_warps(out, mine, n, dtype)
        block = self.pop()
        lead = (t,) if t > 1 else ()
        types = [
            self.smem_type((*lead, slots, n), dtype),
            self.smem_type((*lead, 4, n), dtype),
            Node(f"plgpu.Barrier(num_barriers={t * slots})"),
            Node(f"plgpu.Barrier({len(readers)}, num_barriers={t * slots})"),
        ]
        self.scoped(types, block, [s, out, full, empty])

    def copies_of_warps(self, s, mine, n, dtype):
        """Some warps copy rows to GMEM, and wait for their own, or the thread does."""
        who = self.rng.sample(range(4), self.rng.randint(1, 4))
        lead = f"{mine[:-2]}" if mine else "..."
        self.emit(Node(f"{s}[{lead}] = {{}}", self.value((4, n), dtype), keep=True))
        self.emit(Node("plgpu.commit_smem()", keep=True))
        w, kept = self.push_warp()
        f = self.name("f")
        target = self.target((n,), dtype, copy=True)
        copy = [Node(f"plgpu.copy_smem_to_gmem({s}.at[{mine}{w}], {{}})", target, keep=True)]
        wait = Node("plgpu.wait_smem_to_gmem(0)", keep=True)
        together = self.chance(0.5)
        choice = " | ".join(f"({w} == {r})" for r in who)
        block = Block(copy if together else [*copy, wait])
        self.emit(Node(f"@pl.when({choice})\ndef {f}():\n{{}}", block, keep=True))
        self.emit_map(w, self.pop_warp(kept))
        if together:
            self.feature("copies of warps that their thread awaits")
            self.emit(wait)

    def seg_warps_memory(self):
        """Warps read what the thread has stored, and store what it reads after them."""
        self.feature("warps and memory")
        t, dtype = self.threads, self.rng.choice((*COMMON, *SCALARS))
        n, m = self.rng.choice((4, 40, 129, 512)), 4 * self.rng.choice((1, 3, 16))
        s, r, v, old = (self.name(c) for c in "ssvv")
        mine = "t, " if t > 1 else ""
        lead = "t" if t > 1 else "..."
        i, f, tags = self.name("i"), self.name("f"), self.tags
        rounds, before = self.rng.randint(1, 3), self.chance(0.5)
        self.push()
        if before:
            self.emit(Node(f"{r}[{lead}] = {{}}", self.value((m,), dtype), keep=True))
        self.push()
        self.ints[-1].append((i, 0, rounds - 1))
        self.tags = [*tags, (i, rounds)]
        self.emit(Node(f"{s}[{lead}] = {{}}", self.value((n,), dtype), keep=True))
        if before:
            self.emit(Node(f"{old} = {r}[{lead}]", keep=True))
        w, kept = self.push_warp()
        for _ in range(self.rng.randint(1, 2)):
            value = Node(f"{s}[{mine}{{}}]", self.dynamic(0, n - 1))
            self.store_to(self.target((), dtype), value)
        k, g = self.name("k"), self.name("f")
        self.push()
        self.ints[-1].append((k, 0, m // 4 - 1))
        at = self.rng.choice((f"{k} * 4 + {w}", f"{w} * {m // 4} + {k}"))
        value = Node(f"{s}[{mine}{{}}]", self.dynamic(0, n - 1))
        value = value if self.chance(0.5) else self.scalar(dtype)
        self.emit(Node(f"{r}[{mine}{at}] = {{}}", value, keep=True))
        self.emit(Node(f"@pl.loop(0, {m // 4})\ndef {g}({k}):\n{{}}", self.pop(), keep=True))
        self.emit_map(w, self.pop_warp(kept))
        self.emit(Node(f"{v} = {r}[{lead}]", keep=True))
        self.store((m,), dtype, value=v)
        if before:
            self.store((m,), dtype, value=old)
        self.tags = tags
        loop = self.pop()
        self.emit(Node(f"@pl.loop(0, {rounds})\ndef {f}({i}):\n{{}}", loop, keep=True))
        block = self.pop()
        own = (t,) if t > 1 else ()
        types = [self.smem_type((*own, n), dtype), self.smem_type((*own, m), dtype)]
        self.scoped(types, block, [s, r])

    # ---- CUDA source -----------------------------------------------------------------------------

    def emit_source(self, source, given, results):
        """The name of a function of CUDA source; given: source of a layout each, or None for refs;
        results: (shape, dtype, layout) each."""
        layout = lambda x: f"plgpu.Layout.WG_{x}" if x == "SPLAT" else x  # noqa: E731
        types = ", ".join(layout(x) if x else "plgpu.RefType()" for x in given)
        outs = [f"plgpu.ShapeDtypeStruct({tup(s)}, jnp.{d}, {layout(x)})" for s, d, x in results]
        out = f"[{', '.join(outs)}]" if len(outs) > 1 else (outs or ["None"])[0]
        f = self.name("f")
        call = f"plgpu.inline_cuda({source!r}, arg_types=({types},), return_type={out})"
        assert "{}" not in call
        self.emit(Node(f"{f} = {call}", keep=True))
        return f

    def source_layout(self, shape):
        """(source of a layout, registers of a lane) or None"""
        options, n = [], prod(shape)
        for vec in (1, 2, 4, 8):
            if n and n % (128 * vec) == 0:
                options.append((f"plgpu.Layout.WG_STRIDED({tup(shape)}, {vec})", n // 128))
        if len(shape) == 2:
            padded = -(-shape[0] // 64) * 64 * -(-shape[1] // 8) * 8
            if padded <= 2048:
                names = ("WGMMA", "WGMMA_TRANSPOSED")
                options += [(f"plgpu.Layout.{x}", padded // 128) for x in names]
        return self.rng.choice(options) if options else None

    def source_of(self, arrays, depth=0):
        """An expression of uint32 arrays a0, a1 ... and the scalar after them: Python, CUDA."""
        if depth > 2 or self.chance(0.2):
            k = self.rng.randint(0, arrays)
            return f"a{k}", f"a{k}[k]" if k < arrays else f"a{k}"
        x, cx = self.source_of(arrays, depth + 1)
        form = self.rng.randrange(4)
        if form == 0:
            return f"(~{x})", f"(~{cx})"
        op = self.rng.choice("+-*^&|")
        if form == 1:
            n = self.rng.randint(0, 31)
            op = self.rng.choice((op, "<<", ">>"))
            return f"({x} {op} {n})", f"({cx} {op} {n}u)"
        y, cy = self.source_of(arrays, depth + 1)
        return f"({x} {op} {y})", f"({cx} {op} {cy})"

    def make_source(self, shape, dtype, kind):
        """What CUDA source computes, of registers."""
        found = self.source_layout(shape)
        if not found:
            return self.leaf(shape, dtype, kind)
        layout, registers = found
        self.feature("source")
        n = self.rng.randint(1, 2)
        number = dtype == "uint32" and self.chance(0.7)
        if number:
            made = [self.source_of(n) for _ in range(self.pick({1: 3, 2: 2, 3: 1}))]
            made = [(p, c) if "a" in p.replace(f"a{n}", "") else (f"(a0 + {p})", f"(a0[k] + {c})")
                    for p, c in made]  # fmt: skip
        else:  # one of two arrays of any dtype
            n, low = 2, self.rng.randrange(2)
            made = [(f"where((a2 & 1) == {low}, a0, a1)", f"(a2 & 1u) == {low} ? a0[k] : a1[k]")]
            made += [("a1", "a1[k]")] * self.chance(0.3)
        says = "; ".join(f"r{k} = {p}" for k, (p, _) in enumerate(made))
        does = " ".join(f"r{k}[k] = {c};" for k, (_, c) in enumerate(made))
        text = f"// {says}\n#pragma unroll\nfor (int k = 0; k < {registers}; k++) {{ {does} }}"
        f = self.emit_source(text, [*[layout] * n, "SPLAT"], [(shape, dtype, layout)] * len(made))
        arrays = [self.value(shape, dtype, kind) for _ in range(n)]
        scalar = Node("{}.astype(jnp.uint32)", self.dynamic(0, 99))
        slots = ", ".join(["{}"] * n)
        call = Node(f"{f}({slots}, {{}})", *arrays, scalar)
        if len(made) > 1:
            self.feature("source of several results")
            return Node(f"{{}}[{self.rng.randrange(len(made))}]", self.name_it(call, shape))
        return call

    def seg_source(self):
        """CUDA source that changes SMEM, and reads GMEM."""
        self.feature("source of refs")
        n = self.rng.choice((1, 33, 128, 200, 256))
        t, dtype = self.threads, "uint32"
        x, s = self.operand((n,), dtype, "wild"), self.name("s")
        v, old = self.name("v"), self.name("v")
        op, c = self.rng.choice("+-*^&|"), self.rng.randint(1, 99)
        text = (
            f"// a1 = ((a1 {op} a0) + {c}) * a2\n"
            f"for (u32 i = threadIdx.x & 127; i < {n}; i += 128) {{\n"
            "  u32 x, y;\n"
            "  ld_global<u32, 1>(&x, a0 + i);\n"
            "  ld_shared<u32, 1>(&y, a1 + i * 4);\n"
            f"  x = ((y {op} x) + {c}u) * a2;\n"
            "  st_shared<u32, 1>(a1 + i * 4, &x);\n"
            "}"
        )
        f = self.emit_source(text, [None, None, "SPLAT"], [])
        mine = f"{s}.at[t]" if t > 1 else s
        lead = (t,) if t > 1 else ()
        self.push()
        self.emit(Node(f"{mine}[...] = {{}}", self.value((n,), dtype), keep=True))
        scalar = Node("{}.astype(jnp.uint32)", self.dynamic(0, 99))
        self.emit(Node(f"{old} = {mine}[...]", keep=True))
        self.emit(Node(f"{f}({x}, {mine}, {{}})", scalar, keep=True))
        self.emit(Node(f"{v} = {mine}[...]", keep=True))
        self.store((n,), dtype, value=v)
        self.store((n,), dtype, value=old)
        block = self.pop()
        self.scoped([self.smem_type((*lead, n), dtype)], block, [s])
