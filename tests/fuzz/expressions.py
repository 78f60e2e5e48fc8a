"""Random expressions, made top-down: `value(shape, dtype, kind)` picks a production whose result
has that type - an operator, a cast, a reduction of something larger, a broadcast of something
smaller, a slice, a loop with a carry, a trip through SMEM - and asks for its operands in turn,
until a load, a constant or a name ends it. `kind` says what the numbers must be: "small" ones
are integers that add up exactly, so that sums and products compare bit for bit; "norm" ones are
tame floats; "wild" may be anything. Memory is made backwards: from the view that is wanted to a
ref that has it, through slices, integers, transposes and reshapes."""

import random
from math import prod

from .arrays import Arrays, tup
from .kernels import Block, Node, Program

FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int32", "uint32", "int16", "uint16")
BYTES = ("int8", "uint8")
EVERY = (*FLOATS, *INTS, *BYTES, "bool")
SIZE = {"float32": 4, "int32": 4, "uint32": 4, "bool": 1, "int8": 1, "uint8": 1}
COMMON = (*("float32",) * 5, *("int32",) * 3, *("bfloat16", "float16") * 2)
COMMON += ("uint32", "int16", "uint16")

EXTENTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 32, 33, 40, 48, 63, 64, 65, 72, 96, 100)
EXTENTS += (127, 128, 129)
MAX_SIZE = 2048  # elements of a register array


def itemsize(dtype):
    return SIZE.get(dtype, 2)


class Val:
    __slots__ = ("name", "shape", "dtype", "kind")

    def __init__(self, name, shape, dtype, kind):
        self.name, self.shape, self.dtype, self.kind = name, shape, dtype, kind


class Expressions(Arrays):
    def __init__(self, seed, attempt):
        self.rng = random.Random(f"{seed}/{attempt}")
        self.p = Program(seed)
        self.blocks = [self.p.body]
        self.values = [[]]  # frames of Val
        self.ints = [[]]  # frames of (name, low, high): dynamic int32 scalars
        self.tags = []  # (name, size): what distinguishes this instance of a statement
        self.count = 0
        self.swarm = {}
        self.budget = self.rng.choice((12, 20, 30, 45, 70))
        self.sizes = [self.rng.choice(EXTENTS) for _ in range(4)]
        self.tf32 = set()  # operands of products that only SMEM can hold
        self.threads = 1
        self.depth = 0
        self.nesting = 0

    # ---- small things ----------------------------------------------------------------------------

    def chance(self, p):
        return self.rng.random() < p

    def name(self, letter):
        self.count += 1
        return f"{letter}{self.count}"

    def pick(self, table):
        """A key of {key: weight}."""
        keys = [k for k, w in table.items() if w > 0]
        return self.rng.choices(keys, [table[k] for k in keys])[0]

    def pick_swarm(self, table):
        """The same, but each program has favourites of its own, and leaves some things out."""
        for k in table:
            if k not in self.swarm:
                self.swarm[k] = self.rng.choice((0.05, 0.3, 1, 1, 1, 3, 8))
        return self.pick({k: w * self.swarm[k] for k, w in table.items()})

    def emit(self, node):
        self.blocks[-1].statements.append(node)

    def let(self, node, shape, dtype, kind):
        if shape and self.chance(0.75) or isinstance(node, Node):
            n = self.name("v")
            self.emit(Node(f"{n} = {{}}", node))
            self.values[-1].append(Val(n, shape, dtype, kind))
            return n
        return node

    def push(self):
        self.blocks.append(Block())
        self.values.append([])
        self.ints.append([])
        self.nesting += 1

    def pop(self):
        self.values.pop()
        self.ints.pop()
        self.nesting -= 1
        return self.blocks.pop()

    def feature(self, name):
        self.p.features.add(name)

    def extent(self):
        return self.rng.choice(self.sizes if self.chance(0.6) else EXTENTS)

    def shape(self, limit=MAX_SIZE, rank=None):
        rank = self.pick({1: 4, 2: 6, 3: 2, 4: 0.5}) if rank is None else rank
        while rank:
            form = self.rng.random()
            if form < 0.2 and rank >= 2:  # what tensor cores like
                s = (self.rng.choice((64, 64, 128)), self.rng.choice((8, 16, 24, 32, 64)))
                s = (*[self.rng.choice((1, 2)) for _ in range(rank - 2)], *s)
            elif form < 0.4:  # what divides into lanes
                s = [self.rng.choice((1, 2, 4, 8)) for _ in range(rank)]
                s[-1] = self.rng.choice((32, 64, 128, 256))
                s = tuple(s)
            else:
                s = tuple(self.extent() for _ in range(rank))
            if prod(s) <= limit:
                return s
            if rank > 1 and self.chance(0.3):
                rank -= 1
        return ()

    # ---- scalars ---------------------------------------------------------------------------------

    def known_ints(self):
        return [x for frame in self.ints for x in frame] + [(n, 0, s - 1) for n, s in self.tags]

    def dynamic(self, low, high, depth=0):
        """A traced int32 scalar in [low, high]."""
        n = high - low + 1
        pool = self.known_ints()
        fits = [x for x in pool if low <= x[1] and x[2] <= high]
        if fits and self.chance(0.3):
            return self.rng.choice(fits)[0]
        form = self.rng.random()
        if form < 0.12 and depth < 2 and n > 1:
            middle = self.rng.randint(low, high)
            a, b = self.dynamic(low, middle, depth + 1), self.dynamic(middle, high, depth + 1)
            form = self.rng.randrange(5)
            if form == 0:
                return Node("jnp.where({}, {}, {})", self.boolean(depth + 1), a, b)
            if form == 1:
                c = self.boolean(depth + 1)
                return Node("lax.cond({}, lambda: {}, lambda: {})", c, a, b)
            if form == 2:
                return Node(
                    "lax.switch({}, [lambda: {}, lambda: {}])", self.dynamic(-1, 2, 2), a, b
                )
            return Node(self.rng.choice(("jnp.minimum({}, {})", "jnp.maximum({}, {})")), a, b)
        if form < 0.2 and depth < 2 and n > 1:
            a = self.rng.randint(0, n - 1)
            x, y = self.dynamic(low, high - a, depth + 1), self.dynamic(0, a, depth + 1)
            return Node("({} + {})", x, y)
        if form < 0.25 and depth < 2:
            k = self.rng.randint(0, 3)
            return Node(
                f"lax.fori_loop(0, {{}}, lambda i, c: c + 1, jnp.int32({low}))", min(k, n - 1)
            )
        if pool and form < 0.8:
            return self.fitted(self.rng.choice(pool), low, high)
        if form < 0.85:
            ref = self.operand((4,), "int16", (low, high))
            return Node(f"{ref}[{{}}].astype(jnp.int32)", self.rng.randrange(4))
        ref = self.operand((4,), "int32", (low, high))
        return Node(f"{ref}[{{}}]", self.rng.randrange(4))

    def fitted(self, known, low, high):
        """A known scalar, brought into [low, high]."""
        name, a, b = known
        n = high - low + 1
        if b - a < n and self.chance(0.4):
            return Node("({} + {})", name, self.rng.randint(low - a, high - b))
        base = name if a >= 0 else Node("({} - {})", name, a)
        mask = (1 << n.bit_length() - 1) - 1
        half = (b - a) // 2
        forms = [
            lambda: Node("(lax.rem({}, {}) + {})", base, n, low),
            lambda: Node("({} % {} + {})", name, n, low),
            lambda: Node("jnp.clip({}, {}, {})", name, low, high),
            lambda: Node("jnp.maximum(jnp.minimum({}, {}), {})", name, high, low),
            lambda: Node("lax.clamp({}, {}, {})", low, name, high),
            lambda: Node("(({} & {}) + {})", name, mask, low),
            lambda: Node("({} - ({} % {}))", high, name, n),
            lambda: Node("((-{}) % {} + {})", name, n, low),
            lambda: Node("(jnp.abs({}) % {} + {})", name, n, low),
        ]
        if half < n:
            forms += [
                lambda: Node("({} // 2 + {})", base, low),
                lambda: Node("(({} >> 1) + {})", base, low),
                lambda: Node("(lax.div({}, 2) + {})", base, low),
            ]
        if 2 * (b - a) < n:
            forms += [
                lambda: Node("({} * 2 + {})", base, low),
                lambda: Node("(({} << 1) + {})", base, low),
                lambda: Node("({} + {} + {})", base, base, low),
            ]
        if b - a < n and a >= 0 and low == a:
            forms.append(lambda: Node("{}.astype(jnp.int16).astype(jnp.int32)", name))
        return self.rng.choice(forms)()

    def start(self, low, high, multiple=1):
        """A start of a slice in [low, high], low and high multiples; static or dynamic."""
        if self.chance(0.4):
            return multiple * self.rng.randint(low // multiple, high // multiple)
        if multiple == 1:
            return self.dynamic(low, high)
        low, high = low // multiple, high // multiple
        k = self.dynamic(low, high)
        form = self.rng.randrange(8)
        if form < 3:
            return Node(f"pl.multiple_of({{}}, {multiple})", Node(f"{{}} * {multiple}", k))
        # what follows has to be proved
        self.feature("facts")
        if form == 3 and multiple & (multiple - 1) == 0:
            return Node(f"({{}} << {multiple.bit_length() - 1})", k)
        if form == 4:
            return Node(f"({multiple * high} - {{}} * {multiple})", self.dynamic(0, high - low))
        if form == 5:
            f = self.rng.choice(("lax.cond({}, lambda: {}, lambda: {})", "jnp.where({}, {}, {})"))
            other = multiple * self.rng.randint(low, high)
            other = f"jnp.int32({other})"
            return Node(f, self.boolean(), Node(f"{{}} * {multiple}", k), other)
        if form == 6:
            return Node(f"jnp.minimum({{}} * {multiple}, {multiple * high})", k)
        if form == 7 and high > low:
            step = self.dynamic(0, 1)
            return Node(
                f"({{}} * {multiple} + {multiple * low} + {{}} * {multiple})",
                self.dynamic(0, high - low - 1),
                step,
            )
        return Node(f"{{}} * {multiple}", k)

    def boolean(self, depth=0):
        """A traced bool scalar."""
        low = self.rng.randint(-2, 2)
        a = self.dynamic(low, low + self.rng.randint(1, 5), depth)
        if self.chance(0.3):
            return Node("({} % 2 == {})", a, self.rng.randint(0, 1))
        op = self.rng.choice(("<", "<=", ">", ">=", "==", "!="))
        return Node(f"({{}} {op} {{}})", a, self.rng.randint(low - 1, low + 4))

    def literal(self, dtype, kind):
        if dtype == "bool":
            return self.rng.choice(("True", "False"))
        if dtype in FLOATS:
            if kind == "small":
                return repr(float(self.rng.randint(-3, 3)))
            return repr(self.rng.choice((0.5, 1.0, -1.5, 2.0, 0.25, -3.0, 0.1, 100.0, 7.0)))
        if dtype.startswith("u"):
            return str(self.rng.randint(0, 9))
        return str(self.rng.randint(-9, 9) if kind != "small" else self.rng.randint(-3, 3))

    # ---- memory ----------------------------------------------------------------------------------

    def operand(self, shape, dtype, kind):
        """Name of an operand; an old one if it fits."""
        for n, s, d, k in self.p.operands:
            if (s, d, k) == (shape, dtype, kind) and self.chance(0.5):
                return n
        n = self.name("x")
        self.p.operands.append((n, shape, dtype, kind))
        return n

    def output(self, shape, dtype):
        n = self.name("o")
        self.p.outputs.append((n, shape, dtype))
        return n

    def data_kind(self, dtype, kind):
        if kind == "wild":
            return self.rng.choice(("wild", "norm")) if dtype in FLOATS else "wild"
        return kind if dtype in FLOATS else "small"

    def path(self, shape, copy=False, limit=1 << 15):
        """(source shape, [ops]) so that the ops lead from a ref of that shape to `shape`.
        Ops are functions from a ref node to a ref node, to be applied in order."""
        ops, cut = [], [False] * len(shape)
        for _ in range(self.pick({0: 4, 1: 4, 2: 2, 3: 1})):
            kind = self.pick(
                {
                    "slice": 4,
                    "int": 2,
                    "transpose": 1.5 * (len(shape) > 1),
                    "reshape": 1 if not copy else 0.3,
                }  # fmt: skip
            )
            if kind == "slice" and shape:
                source, where = [], []
                for k, d in enumerate(shape):
                    if self.chance(0.5) or cut[k]:
                        source.append(d)
                        where.append(self.rng.choice((":", f"0:{d}")))
                        continue
                    more = self.rng.choice((0, 1, 2, 3, 8, d, self.extent()))
                    n = d + more
                    form = self.rng.random()
                    if form < 0.3:
                        a = self.rng.randint(0, more)
                        where.append(f"{a}:{a + d}" if a + d < n or self.chance(0.5) else f"{a}:")
                    elif form < 0.4 and more:
                        where.append(f"{-d}:")
                    else:
                        where.append(Node(f"pl.ds({{}}, {d})", self.start(0, more)))
                    source.append(n)
                    cut[k] = True
                if prod(source) > limit:
                    break
                while where and where[-1] == ":" and self.chance(0.7):
                    where.pop()
                if where and len(where) < len(shape) and self.chance(0.2):
                    where.append("...")
                elif len(where) == 1 and where[0] == ":":
                    where = []
                if where:
                    ops.append(("at", where))
                shape = tuple(source)
            elif kind == "int" and len(shape) < 5:
                at = self.rng.randint(0, len(shape))
                n = self.rng.choice((1, 2, 3, 5))
                if prod(shape) * n > limit:
                    break
                where = [":"] * len(shape)
                i = self.start(0, n - 1) if self.chance(0.8) else self.rng.randint(-n, -1)
                where.insert(at, Node("{}", i) if not isinstance(i, (Node, str)) else i)
                while where[-1] == ":" and self.chance(0.6):
                    where.pop()
                ops.append(("at", where))
                shape = (*shape[:at], n, *shape[at:])
                cut.insert(at, True)
            elif kind == "transpose" and len(shape) > 1:
                perm = list(range(len(shape)))
                self.rng.shuffle(perm)
                # view = source.transpose(perm): view dim k is source dim perm[k]
                source, source_cut = [0] * len(shape), [False] * len(shape)
                for k, p in enumerate(perm):
                    source[p], source_cut[p] = shape[k], cut[k]
                if perm == list(range(len(shape)))[::-1]:
                    ops.append(("T", None))
                else:
                    form = self.rng.choice(("transpose", "transpose_ref"))
                    ops.append((form, tuple(perm)))
                shape, cut = tuple(source), source_cut
            elif kind == "reshape" and shape and not any(cut):
                source = self.other_shape(shape)
                if source is None:
                    continue
                ops.append(("reshape", shape))
                shape, cut = source, [True] * len(source)
                break  # only of what is whole
        return shape, ops[::-1]

    def other_shape(self, shape):
        """A shape of as many elements, or None."""
        if len(shape) > 1 and self.chance(0.6):
            k = self.rng.randrange(len(shape) - 1)
            return (*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :])
        k = self.rng.randrange(len(shape)) if shape else 0
        divisors = [d for d in (2, 3, 4, 8, 16, 32, 64) if shape and shape[k] % d == 0]
        if not divisors or len(shape) > 4:
            return None
        d = self.rng.choice(divisors)
        return (*shape[:k], shape[k] // d, d, *shape[k + 1 :])

    def apply(self, ref, ops):
        for form, arg in ops:
            if form == "at":
                parts = [w for w in arg if isinstance(w, Node) or not isinstance(w, str)]
                text = ", ".join(w if isinstance(w, str) else "{}" for w in arg)
                ref = Node(f"{{}}.at[{text}]", ref, *parts)
            elif form == "T":
                ref = Node("{}.T", ref)
            elif form == "transpose":
                ref = Node(f"{{}}.transpose({tup(arg)})", ref)
            elif form == "transpose_ref":
                ref = Node(f"plgpu.transpose_ref({{}}, {tup(arg)})", ref)
            else:
                ref = Node(f"{{}}.reshape({', '.join(map(str, arg))})", ref)
        return ref

    def gmem_view(self, shape, dtype, kind, copy=False):
        """A ref in GMEM of that shape, to read."""
        source, ops = self.path(shape, copy)
        return self.apply(self.operand(source, dtype, self.data_kind(dtype, kind)), ops)

    def target(self, shape, dtype, copy=False, limit=1 << 13):
        """A ref in GMEM of that shape, to write: one place for each block, thread, iteration."""
        source, ops = self.path(shape, copy, limit=limit)
        tags = list(self.tags)
        self.rng.shuffle(tags)
        tags = [t for t in tags if t[1] > 1 or self.chance(0.3)]
        n = prod(s for _, s in tags)
        if not tags:
            return self.apply(self.output(source, dtype), ops)
        folds = bool(ops) and ops[0][0] == "reshape"
        if source and self.chance(0.3) and len(source) < 5 and not folds:
            # side by side along one dim
            k = self.rng.randrange(len(source))
            total = tuple(d * n if j == k else d for j, d in enumerate(source))
            where = [":"] * len(source)
            index = self.linear(tags)
            where[k] = Node(f"pl.ds({{}}, {source[k]})", Node(f"{{}} * {source[k]}", index))
            return self.apply(self.output(total, dtype), [("at", where), *ops])
        if len(tags) + len(source) > 7 or self.chance(0.3):
            tags, where = [("", n)], [self.linear(tags)]
        else:
            where = [t for t, _ in tags]
        full = (*(s for _, s in tags), *source)
        where = [Node("{}", w) if not isinstance(w, Node) else w for w in where]
        return self.apply(self.output(full, dtype), [("at", where), *ops])

    def linear(self, tags):
        axes = [t for t in tags if t[0] in self.axis_names]
        if len(tags) > 1 and len(axes) == len(tags) and self.chance(0.5):
            names = ", ".join(repr(self.axis_names[t]) for t, _ in tags)
            return Node(f"lax.axis_index(({names}))")
        node = tags[0][0]
        for t, s in tags[1:]:
            node = Node(f"({{}} * {s} + {{}})", node, t)
        return node

    # ---- values ----------------------------------------------------------------------------------

    def value(self, shape, dtype, kind="wild"):
        """An expression of that type."""
        self.budget -= 1
        self.depth += 1
        try:
            return self._value(tuple(shape), dtype, kind)
        finally:
            self.depth -= 1

    def _value(self, shape, dtype, kind):
        leaf = self.budget <= 0 or self.depth > 6
        if leaf or self.chance(0.25):
            return self.leaf(shape, dtype, kind)
        if kind == "small" and dtype in FLOATS:
            return self.small_float(shape, dtype)
        small = prod(shape) <= MAX_SIZE // 4
        table = {
            "binary": 6,
            "unary": 3 if dtype != "bool" and dtype not in BYTES else 0,
            "where": 2,
            "cast": 2,
            "compare": 6 if dtype == "bool" else 0,
            "bitcast": 0.7 if dtype not in ("bool",) else 0,
            "reduce": 1.6 if small and dtype in (*FLOATS, *INTS) else 0,
            "broadcast": 1.5 if shape else 0,
            "reshape": 1 if shape and len(shape) < 5 else 0,
            "slice": 1 if shape and small else 0,
            "layout": 1.5 if len(shape) in (1, 2, 3) else 0,
            "barrier": 0.3,
            "fori": 0.8 if self.nesting < 3 else 0,
            "while": 0.3 if self.nesting < 3 else 0,
            "cond": 0.7 if self.nesting < 3 else 0,
            "switch": 0.4 if self.nesting < 3 else 0,
            "smem": 0.7 if self.nesting < 4 and shape else 0,
            "let": 1.5,
            "lazy": 0.4 if shape and self.nesting < 4 else 0,
            "upcast": 0.5 if len(shape) == 2 and dtype in FLOATS and kind != "small" else 0,
            "seen": 0.4 if kind == "wild" and shape else 0,
            "nn": 0.4 if dtype in FLOATS else 0,
            "source": (1.5 if dtype == "uint32" else 0.3) if shape and dtype != "bool" else 0,
            "indexed": 1.5 if 0 < len(shape) < 3 else 0,
            **self.array_productions(shape, dtype, kind),
        }
        return getattr(self, "make_" + self.pick_swarm(table))(shape, dtype, kind)

    def known(self, shape, dtype, kind):
        order = {"small": 0, "norm": 1, "wild": 2}
        return [
            v
            for frame in self.values
            for v in frame
            if v.shape == shape and v.dtype == dtype
            and (dtype not in FLOATS or order[v.kind] <= order[kind])
        ]  # fmt: skip

    def leaf(self, shape, dtype, kind):
        old = self.known(shape, dtype, kind)
        if old and self.chance(0.6):
            return self.rng.choice(old).name
        form = self.rng.random()
        if not shape and dtype not in ("bool", *BYTES) and self.chance(0.35):
            low = 0 if dtype.startswith("u") else -3
            return Node(f"{{}}.astype(jnp.{dtype})", self.dynamic(low, 9))
        if form < 0.12 or not shape and form < 0.3:
            value = self.literal(dtype, kind)
            if not shape:
                typed = "jnp.bool_" if dtype == "bool" else f"jnp.{dtype}"
                # numbers outside of kernels are NumPy's, which has rules of its own for bfloat16
                host = dtype != "bfloat16" and self.chance(0.5)
                return f"{typed}({value})" if host else f"jnp.full((), {value}, {typed})"
            if self.chance(0.3) and dtype != "bool":
                return f"jnp.{self.rng.choice(('zeros', 'ones'))}({tup(shape)}, jnp.{dtype})"
            typed = "jnp.bool_" if dtype == "bool" else f"jnp.{dtype}"
            return f"jnp.full({tup(shape)}, {value}, {typed})"
        if form < 0.25 and shape and dtype in ("int32", "float32", "int16", "uint32"):
            dim = self.rng.randrange(len(shape))
            if shape[dim] <= 8 or dtype not in FLOATS or kind != "small":
                given = self.layout(shape)
                if given and self.chance(0.4):
                    where = f", layout={given}"
                    return f"plgpu.broadcasted_iota(jnp.{dtype}, {tup(shape)}, {dim}{where})"
                f = self.rng.choice(("lax.broadcasted_iota", "plgpu.broadcasted_iota"))
                return f"{f}(jnp.{dtype}, {tup(shape)}, {dim})"
        ref = self.gmem_view(shape, dtype, kind)
        return self.load(ref, shape)

    def load(self, ref, shape):
        given = self.layout(shape) if shape else None
        if given and self.chance(0.15):
            optimized = self.rng.choice(("", ", optimized=False"))
            return Node(f"plgpu.load({{}}, layout={given}{optimized})", ref)
        # x.at[i].at[j][...] or x.at[i][j]
        if isinstance(ref, Node) and ref.text.startswith("{}.at[") and self.chance(0.7):
            return Node("{}" + ref.text[5:], *ref.parts)
        return Node("{}[...]", ref)

    def small_float(self, shape, dtype):
        form = self.rng.randrange(5)
        if form == 0:
            x = self.value(shape, "float32", "norm")
            x = Node("jnp.clip(jnp.round({}), -8.0, 8.0)", x)
            x = Node("jnp.where(jnp.isnan({}), 0.0, {})", n := self.name_it(x, shape), n)
        elif form == 1:
            x = Node("({} & 7)", self.value(shape, "int32"))
        elif form == 2:
            x = self.value(shape, "bool")
        elif form == 3:
            a, b = (self.value(shape, dtype, "small") for _ in range(2))
            f = self.rng.choice(("jnp.maximum({}, {})", "jnp.minimum({}, {})"))
            return Node(f, a, b)
        else:
            return self.leaf(shape, dtype, "small")
        return Node(f"{{}}.astype(jnp.{dtype})", x)

    def name_it(self, node, shape):
        n = self.name("v")
        self.emit(Node(f"{n} = {{}}", node))
        return n

    def make_let(self, shape, dtype, kind):
        return self.let(self.value(shape, dtype, kind), shape, dtype, kind)

    def make_binary(self, shape, dtype, kind):
        two = lambda: (self.value(shape, dtype, kind), self.second(shape, dtype, kind))  # noqa: E731
        if dtype == "bool":
            op = self.rng.choice(
                (
                    "({} & {})",
                    "({} | {})",
                    "({} ^ {})",
                    "jnp.logical_and({}, {})",
                    "jnp.logical_or({}, {})",
                    "({} == {})",
                    "({} != {})",
                )
            )
            return Node(op, self.value(shape, dtype), self.value(shape, dtype))
        if dtype in BYTES:
            op = self.rng.choice(("({} & {})", "({} | {})", "({} ^ {})"))
            return Node(op, self.value(shape, dtype), self.value(shape, dtype))
        if dtype in FLOATS:
            if kind == "norm":
                op = self.rng.choice(("jnp.maximum({}, {})", "jnp.minimum({}, {})"))
                return Node(op, *two())
            op = self.pick({"({} + {})": 3, "({} - {})": 3, "({} * {})": 2, "({} / {})": 1,
                            "jnp.maximum({}, {})": 2, "jnp.minimum({}, {})": 2,
                            "lax.max({}, {})": 1, "lax.rem({}, {})": 0.5})  # fmt: skip
            a, b = two()
            if shape and self.chance(0.1):
                op = self.rng.choice(("jnp.fmax({}, {})", "jnp.fmin({}, {})",
                                      "jnp.copysign({}, {})"))  # fmt: skip
                return Node(op, self.value(shape, dtype, kind), self.value(shape, dtype, kind))
            if shape and self.chance(0.1):
                return Node(
                    self.rng.choice(("({} - {})", "({} + {})")), self.literal(dtype, kind), a
                )
            if op == "({} * {})" and self.chance(0.7):
                return Node("lax.optimization_barrier({} * {})", a, b)
            return Node(op, a, b)
        if self.chance(0.25):  # by something that is no divisor of trouble
            ops = ["({} // {})", "({} % {})", "lax.div({}, {})", "lax.rem({}, {})"]
            a = self.value(shape, dtype)
            if self.chance(0.5):
                b = self.rng.choice((1, 2, 3, 5, 7, 8, 16, 100))
            else:
                b = Node("({} | 1)", Node("({} & 15)", self.value(shape, dtype)))
            return Node(self.rng.choice(ops), a, b)
        if self.chance(0.2):
            ops = ["({} << {})", "({} >> {})"]
            ops += ["lax.shift_right_logical({}, {})", "lax.shift_right_arithmetic({}, {})"]
            a = self.value(shape, dtype)
            width = 8 * itemsize(dtype) - 1
            if self.chance(0.5):
                b = self.rng.randint(0, width)
                return Node(self.rng.choice(ops[:2]), a, b)
            return Node(
                self.rng.choice(ops), a, Node(f"({{}} & {width})", self.value(shape, dtype))
            )
        op = self.pick({"({} + {})": 3, "({} - {})": 3, "({} * {})": 2, "({} & {})": 1,
                        "({} | {})": 1, "({} ^ {})": 1, "jnp.maximum({}, {})": 1,
                        "jnp.minimum({}, {})": 1, "lax.add({}, {})": 0.5})  # fmt: skip
        if shape and self.chance(0.1):  # a weak number comes first
            op = self.rng.choice(("({} - {})", "({} * {})", "({} ^ {})"))
            return Node(op, self.literal(dtype, kind), self.value(shape, dtype, kind))
        return Node(op, *two())

    def second(self, shape, dtype, kind):
        """The other operand: an array, a scalar, a Python number, a row or a column."""
        form = self.rng.random()
        if form < 0.2 and dtype != "bool":
            return self.literal(dtype, kind)
        if form < 0.24 and dtype in FLOATS and kind != "small":
            return Node("({} * 0.5)", self.dynamic(-3, 9))  # weak: takes the other's dtype
        if form < 0.3:
            return self.value((), dtype, kind)
        if form < 0.4 and len(shape) > 1:
            # NumPy's broadcasting
            k = self.rng.randrange(len(shape))
            part = tuple(1 if j == k else d for j, d in enumerate(shape))
            return self.value(part if self.chance(0.5) else shape[1:], dtype, kind)
        return self.value(shape, dtype, kind)

    def make_unary(self, shape, dtype, kind):
        x = self.value(shape, dtype, kind)
        if dtype in FLOATS:
            if kind == "norm":
                ops = ("(-{})", "jnp.abs({})", "jnp.round({})", "jnp.floor({})", "jnp.ceil({})",
                       "lax.round({})", "jnp.trunc({})")  # fmt: skip
            else:
                ops = ("(-{})", "jnp.abs({})", "jnp.floor({})", "jnp.ceil({})", "jnp.round({})",
                       "lax.round({})", "jnp.sqrt(jnp.abs({}))", "lax.neg({})", "jnp.square({})",
                       "jnp.clip({}, -2.5, 3.0)", "jnp.trunc({})", "lax.clamp(-1.0, {}, 1.0)",
                       "(1.0 / {})")  # fmt: skip
            return Node(self.rng.choice(ops), x)
        ops = ["(-{})", "(~{})", "jnp.square({})", "({} ** 2)", "jnp.abs({})"]
        ops += ["jnp.sign({})", "jnp.clip({}, 2, 77)", "lax.clz({})", "lax.population_count({})"]
        return Node(self.rng.choice(ops), x)

    def make_where(self, shape, dtype, kind):
        if self.chance(0.8) or not shape:
            c = self.value(shape, "bool")
        else:
            c = self.boolean()
        f = self.rng.choice(("jnp.where({}, {}, {})", "jnp.where({}, {}, {})",
                             "lax.select({}, {}, {})"))  # fmt: skip
        a = self.value(shape, dtype, kind)
        b = self.value(shape, dtype, kind) if "select" in f else self.second(shape, dtype, kind)
        if "select" in f and self.chance(0.3):
            return Node("lax.select_n({}, {}, {})", c, b, a)
        return Node(f, c, a, b)

    def make_compare(self, shape, dtype, kind):
        d = self.rng.choice(COMMON)
        if self.chance(0.1):
            f = self.rng.choice(("jnp.isnan({})", "jnp.isfinite({})", "jnp.isinf({})"))
            return Node(f, self.value(shape, self.rng.choice(FLOATS)))
        if self.chance(0.05):
            return Node("jnp.signbit({})", self.value(shape, self.rng.choice(FLOATS), "norm"))
        if self.chance(0.15):
            return Node("({} != {})", self.value(shape, b := self.rng.choice(BYTES)),
                        self.value(shape, b))  # fmt: skip
        op = self.rng.choice(("<", "<=", ">", ">=", "==", "!="))
        return Node(f"({{}} {op} {{}})", self.value(shape, d), self.second(shape, d, "wild"))

    def make_cast(self, shape, dtype, kind):
        if dtype in FLOATS and kind != "wild":
            d = self.rng.choice(FLOATS)
            return Node(f"{{}}.astype(jnp.{dtype})", self.value(shape, d, kind))
        d = self.rng.choice([d for d in EVERY if d != dtype])
        target = "jnp.bool_" if dtype == "bool" else f"jnp.{dtype}"
        x = self.value(shape, d)
        if self.chance(0.2):
            return Node(f"lax.convert_element_type({{}}, {target})", x)
        return Node(f"{{}}.astype({target})", x)

    def make_bitcast(self, shape, dtype, kind):
        if kind != "wild" and dtype in FLOATS:
            return self.leaf(shape, dtype, kind)
        same = [d for d in EVERY if itemsize(d) == itemsize(dtype) and d not in ("bool", dtype)]
        if dtype in INTS and self.chance(0.3):
            x = self.value(shape, d := self.rng.choice(same), "norm")
            return Node(f"lax.bitcast_convert_type({{}}, jnp.{dtype})", x)
        d = self.rng.choice([d for d in same if d not in FLOATS] or same)
        return Node(f"{{}}.view(jnp.{dtype})", self.value(shape, d, "norm"))

    def make_reduce(self, shape, dtype, kind):
        self.feature("reduce")
        room = MAX_SIZE // max(prod(shape), 1)
        n = self.rng.choice([e for e in (*EXTENTS, 256, 512) if e <= room] or [1])
        axis = self.rng.randint(0, len(shape))
        full = (*shape[:axis], n, *shape[axis:])
        axes, keep = axis, ""
        if self.chance(0.2) and len(full) < 5 and room // n > 1:
            m = self.rng.choice([e for e in EXTENTS if e <= room // n])
            second = self.rng.randint(0, len(full))
            full = (*full[:second], m, *full[second:])
            axes = tuple(sorted((second, axis + (second <= axis))))
        if not shape and self.chance(0.5):
            axes = None
        elif isinstance(axes, int) and self.chance(0.2):
            axes -= len(full)
        if (
            shape
            and isinstance(axes, int)
            and axes >= 0
            and shape[axis - 1 :][:1]
            and (self.chance(0.15))
        ):
            keep = ", keepdims=True"
        op = self.rng.choice(("sum", "max", "min"))
        x = self.sum_operand(full, dtype, kind) if op == "sum" else self.value(full, dtype, kind)
        if op == "sum" and dtype in ("int16", "uint16"):
            at = tuple(range(len(full))) if axes is None else axes
            at = (at,) if isinstance(at, int) else at
            at = tuple(a % len(full) for a in at)
            return Node(f"lax.reduce_sum({{}}, {tup(at)})", x)
        if op == "sum" and dtype in FLOATS and kind != "wild":
            op = "max"  # sums are no longer small
        elif op == "sum" and dtype in FLOATS and self.chance(0.2):
            op = "mean"
        text, parts = f"axis={axes}{keep}", []
        if op != "mean" and self.chance(0.1) and kind == "wild":
            text += ", initial={}"
            parts.append(self.literal(dtype, "small"))
        if (op == "sum" or parts) and self.chance(0.2) and kind == "wild":
            text += ", where={}"
            parts.append(self.value(full, "bool"))
        if op != "mean" and self.chance(0.4):
            node = Node(f"{{}}.{op}({text})", x, *parts)
        else:
            node = Node(f"jnp.{op}({{}}, {text})", x, *parts)
        return Node(f"{{}}.reshape{tup(shape)}", node) if keep else node

    def sum_operand(self, shape, dtype, kind):
        if dtype in FLOATS:
            return self.value(shape, dtype, "small")
        if dtype == "int32" and self.chance(0.3):
            return self.value(shape, self.rng.choice(("int8", "int16", "bool")))
        if dtype == "uint32" and self.chance(0.3):
            return self.value(shape, self.rng.choice(("uint8", "uint16")))
        return self.value(shape, dtype, kind)

    def make_broadcast(self, shape, dtype, kind):
        self.feature("broadcast")
        kept = sorted(self.rng.sample(range(len(shape)), self.rng.randrange(len(shape) + 1)))
        part = tuple(shape[k] for k in kept)
        form = self.rng.random()
        if form < 0.2:
            part = tuple(d if self.chance(0.5) else 1 for d in shape)
            return Node(f"jnp.broadcast_to({{}}, {tup(shape)})", self.value(part, dtype, kind))
        if form < 0.35:
            lead = self.rng.randint(0, len(shape))
            x = self.value(shape[lead:], dtype, kind)
            return Node(f"lax.broadcast({{}}, {tup(shape[:lead])})", x)
        if form < 0.5:
            lead = self.rng.randint(0, len(shape))
            x = self.value(shape[lead:], dtype, kind)
            return Node(f"jnp.broadcast_to({{}}, {tup(shape)})", x)
        if form < 0.6:
            return Node(f"jnp.full({tup(shape)}, {{}})", self.value((), dtype, kind))
        x = self.value(part, dtype, kind)
        return Node(f"lax.broadcast_in_dim({{}}, {tup(shape)}, {tup(kept)})", x)

    def make_reshape(self, shape, dtype, kind):
        other = self.other_shape(shape)
        if other is None:
            return self.leaf(shape, dtype, kind)
        if 1 in shape and self.chance(0.3):
            k = shape.index(1)
            x = self.value((*shape[:k], *shape[k + 1 :]), dtype, kind)
            return Node(f"jnp.expand_dims({{}}, {k})", x)
        x = self.value(other, dtype, kind)
        return Node(f"{{}}.reshape({', '.join(map(str, shape))})", x)

    def make_slice(self, shape, dtype, kind):
        source, where = [], []
        for d in shape:
            room = MAX_SIZE // max(prod(source) * prod(shape[len(source) :]), 1)
            more = self.rng.choice([m for m in (0, 0, 1, 8, 16, 64, d) if (d + m) <= d * room])
            a = self.rng.choice((0, more, self.rng.randint(0, more)))
            source.append(d + more)
            where.append(f"{a}:{a + d}")
        if self.chance(0.3) and prod(source) * 2 <= MAX_SIZE:
            at = self.rng.randint(0, len(source))
            source.insert(at, 2)
            where.insert(at, str(self.rng.choice((0, 1, -1))))
        x = self.value(tuple(source), dtype, kind)
        x = self.let(x, tuple(source), dtype, kind)
        return Node(f"{{}}[{', '.join(where)}]", x)

    def layout(self, shape):
        """Source of a layout that an array of that shape can have, or None."""
        n, L = prod(shape), "plgpu.Layout"
        options = []
        for vec in (1, 2, 4, 8):
            if n and n % (128 * vec) == 0:
                options.append(f"{L}.WG_STRIDED({tup(shape)}, {vec})")
        # these pad to (64, 8)
        if len(shape) == 2 and -(-shape[0] // 64) * 64 * -(-shape[1] // 8) * 8 <= MAX_SIZE:
            options += [f"{L}.WGMMA", f"{L}.WGMMA_TRANSPOSED"]
            if -(-shape[0] // 64) * 64 * -(-shape[1] // 32) * 32 <= 2 * MAX_SIZE:
                others = ("WGMMA_8BIT", "WGMMA_UPCAST_2X", "WGMMA_UPCAST_4X", "MMA_LHS(jnp.int8)",
                          "MMA_LHS(jnp.float16)", "MMA_RHS(jnp.float16)")  # fmt: skip
                options.append(f"{L}.{self.rng.choice(others)}")
            if shape[0] % 64 == 0 and shape[1] % 8 == 0:
                options += [
                    f"{L}.TILED(plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,))), (-7,), (-3, -2),"
                    f" -1)"
                ]
        if len(shape) == 1:
            if n <= 64:
                options.append(f"{L}.TMA_INDICES")
            if n <= 32:
                options.append(f"{L}.TMA_INDICES_4")
            # the layout of columns is 32 copies, that of rows 4
            for axis in (0, 1) if n <= 64 else (1,):
                options += [f"{L}.WGMMA.reduce({axis})", f"{L}.WGMMA_TRANSPOSED.reduce({axis})"]
        return self.rng.choice(options) if options else None

    def make_layout(self, shape, dtype, kind):
        given = self.layout(shape)
        if not given:
            return self.leaf(shape, dtype, kind)
        self.feature("layout")
        return Node(f"plgpu.layout_cast({{}}, {given})", self.value(shape, dtype, kind))

    def make_barrier(self, shape, dtype, kind):
        return Node("lax.optimization_barrier({})", self.value(shape, dtype, kind))

    # ---- control flow as values ------------------------------------------------------------------

    def bounds(self):
        """(lower, upper, trips at most, index low, index high): nodes and facts."""
        n = self.rng.choice((0, 1, 2, 3, 4, 5)) if self.chance(0.3) else self.rng.randint(1, 4)
        low = self.rng.choice((0, 0, 0, 1, -2))
        if self.chance(0.6):
            return low, low + n, n, True
        upper = self.dynamic(low, low + n)
        return low, upper, n, False

    def make_fori(self, shape, dtype, kind):
        self.feature("fori")
        lower, upper, n, static = self.bounds()
        carries = [(shape, dtype, kind)]
        if self.chance(0.4):
            carries.append((self.rng.choice(((), shape)), self.rng.choice(COMMON), "wild"))
        inits = [self.value(*c) for c in carries]
        if self.chance(0.3):  # a number, which takes the dtype of the body
            numbers = [c[0] == () and c[1] in ("int32", "float32") for c in carries]
            inits = [
                self.literal(c[1], c[2]) if n else x for n, c, x in zip(numbers, carries, inits)
            ]
        i, names = self.name("i"), [self.name("c") for _ in carries]
        f = self.name("f")
        self.push()
        self.ints[-1].append((i, min(lower, 0), lower + max(n - 1, 0)))
        for c, (s, d, k) in zip(names, carries):
            self.values[-1].append(Val(c, s, d, k))
        outs = [self.value(*c) for c in carries]
        if len(carries) > 1 and carries[0] == carries[1] and self.chance(0.3):
            outs.reverse()
        block = self.pop()
        one = len(carries) == 1
        head = [] if one else [Node(f"{', '.join(names)} = {self.name('c')}", keep=True)]
        arg = names[0] if one else head[0].text.split(" = ")[1]
        pattern = "return {}" if one else "return {}, {}"
        block.statements = [*head, *block.statements, Node(pattern, *outs, keep=True)]
        unroll = ""
        if static and n and self.chance(0.25):
            unroll = ", unroll=True" if self.chance(0.5) else f", unroll={n}"
        if self.chance(0.25) and one:
            self.emit(
                Node(
                    f"@pl.loop({{}}, {{}}, init_carry={{}}{unroll})\ndef {f}({i}, {arg}):\n{{}}",
                    lower,
                    upper,
                    inits[0],
                    block,
                )
            )
            return f
        self.emit(Node(f"def {f}({i}, {arg}):\n{{}}", block, keep=True))
        init = inits[0] if one else Node("({}, {})", *inits)
        out = Node(f"lax.fori_loop({{}}, {{}}, {f}, {{}}{unroll})", lower, upper, init)
        return out if one else Node("{}[0]", out)

    def make_while(self, shape, dtype, kind):
        self.feature("while")
        limit = self.rng.randint(0, 5)
        init = self.value(shape, dtype, kind)
        n, c, both, f, g = (self.name(x) for x in ("n", "c", "c", "f", "f"))
        self.push()
        self.ints[-1].append((n, 0, max(limit, 1)))
        self.values[-1].append(Val(c, shape, dtype, kind))
        out = self.value(shape, dtype, kind)
        block = self.pop()
        step = self.rng.randint(1, 2)
        block.statements = [
            Node(f"{n}, {c} = {both}", keep=True),
            *block.statements,
            Node(f"return {n} + {step}, {{}}", out, keep=True),
        ]
        self.emit(Node(f"def {f}({both}):\n{{}}", block, keep=True))
        self.emit(Node(f"def {g}({both}):\n    return {both}[0] < {{}}", limit, keep=True))
        first = "jnp.int32(0)" if self.chance(0.5) else "0"
        return Node(f"lax.while_loop({g}, {f}, ({first}, {{}}))[1]", init)

    def branch(self, shape, dtype, kind):
        f = self.name("f")
        self.push()
        out = self.value(shape, dtype, kind)
        block = self.pop()
        block.statements.append(Node("return {}", out, keep=True))
        self.emit(Node(f"def {f}():\n{{}}", block, keep=True))
        return f

    def make_cond(self, shape, dtype, kind):
        self.feature("cond")
        f, g = self.branch(shape, dtype, kind), self.branch(shape, dtype, kind)
        return Node(f"lax.cond({{}}, {f}, {g})", self.boolean())

    def make_switch(self, shape, dtype, kind):
        self.feature("switch")
        branches = [self.branch(shape, dtype, kind) for _ in range(self.rng.randint(1, 4))]
        index = self.dynamic(-1, len(branches))
        return Node(f"lax.switch({{}}, [{', '.join(branches)}])", index)

    # ---- SMEM ------------------------------------------------------------------------------------

    def transforms(self, shape, dtype, force=False):
        """Source of legal transforms of an SMEM ref and the tile of its last dim (1: none)."""
        options = []
        if len(shape) >= 2 and shape[-2] % 8 == 0:
            for sw in (32, 64, 128):
                n = sw // itemsize(dtype)
                if shape[-1] % n == 0:
                    t = f"plgpu.TilingTransform((8, {n})), plgpu.SwizzleTransform({sw})"
                    options.append((f"({t})", n))
                    if self.chance(0.2):
                        options.append((f"(plgpu.TilingTransform((8, {n})),)", n))
        if not options or (not force and self.chance(0.4)):
            return "", 1
        text, n = self.rng.choice(options)
        self.feature("swizzle")
        return f", transforms={text}", n

    def smem_type(self, shape, dtype, transforms=""):
        typed = "jnp.bool_" if dtype == "bool" else f"jnp.{dtype}"
        return Node(f"plgpu.SMEM({tup(shape)}, {typed}{transforms})")

    def smem_path(self, shape, tile):
        """Like path, for an SMEM ref: slices keep to tiles."""
        if tile == 1 and self.chance(0.7):
            return self.path(shape, copy=True, limit=1 << 13)
        ops = []
        if len(shape) >= 2 and self.chance(0.5):
            rows, columns = shape[-2:]
            r, c = self.rng.choice((0, 8, 64)), self.rng.choice((0, tile, 2 * tile))
            where = ["..."] if len(shape) > 2 or self.chance(0.2) else []
            where.append(Node(f"pl.ds({{}}, {rows})", self.start(0, r, 8 if r else 1)))
            where.append(Node(f"pl.ds({{}}, {columns})", self.start(0, c, tile)))
            ops.append(("at", where))
            shape = (*shape[:-2], rows + r, columns + c)
        if self.chance(0.3) and len(shape) < 4:
            ops.append(("at", [Node("{}", self.start(0, 1))]))
            shape = (2, *shape)
        return shape, ops[::-1]

    def scoped(self, types, block, names, result=None):
        """Emit a run_scoped with the block as its function; the name of its result."""
        f = self.name("f")
        if result is not None:
            block.statements.append(Node("return {}", result, keep=True))
        self.emit(Node(f"def {f}({', '.join(names)}):\n{{}}", block, keep=True))
        if (
            len(self.blocks) == 1
            and self.chance(0.35)
            and not any("transforms" in t.text and self.chance(0.5) for t in types)
        ):
            self.feature("scratch")
            given = [self.name("q") for _ in types]
            self.p.scratch += zip(given, types)
            call = Node(f"{f}({', '.join(given)})")
            return call if result is not None else self.emit(call)
        collective = ', collective_axes="t"' if self.threads > 1 else ""
        slots = ", ".join("{}" for _ in types)
        call = Node(f"pl.run_scoped({f}, {slots}{collective})", *types)
        if result is None:
            self.emit(call)
            return None
        return call

    def make_smem(self, shape, dtype, kind):
        """A value by way of shared memory."""
        if self.threads > 1:
            return self.leaf(shape, dtype, kind)
        self.feature("smem")
        if self.chance(0.5):
            return self.smem_store(shape, dtype, kind)
        return self.smem_copy(shape, dtype, kind)

    def smem_store(self, shape, dtype, kind):
        """Stored and loaded again, perhaps through a view."""
        form = self.rng.random()
        s = self.name("s")
        if form < 0.35 and len(shape) == 2:
            transforms, _ = self.transforms(shape[::-1], dtype)
            self.push()
            self.emit(Node(f"{s}[...] = {{}}", self.value(shape[::-1], dtype, kind)))
            out, source = Node(f"{s}.T[...]"), shape[::-1]
        elif form < 0.6:
            transforms, source = "", self.other_shape(shape) or shape
            self.push()
            self.emit(Node(f"{s}[...] = {{}}", self.value(source, dtype, kind)))
            out = Node(f"{s}.reshape({', '.join(map(str, shape))})[...]")
        else:
            transforms, tile = self.transforms(shape, dtype)
            source, ops = self.smem_path(shape, tile)
            if prod(source) > MAX_SIZE:
                source, ops = shape, []
            if transforms and (source[-2] % 8 or source[-1] % tile):
                transforms = ""
            self.push()
            if self.chance(0.5):
                self.emit(Node(f"{s}[...] = {{}}", self.value(source, dtype, kind)))
            elif not ops or source[0] == 1:
                self.emit(Node(f"{s}[...] = {{}}", self.value(source, dtype, kind)))
            else:
                for k in range(source[0]) if source[0] <= 3 else [0]:
                    if source[0] <= 3:
                        self.emit(Node(f"{s}[{k}] = {{}}", self.value(source[1:], dtype, kind)))
                    else:
                        h = source[0] // 2 // 8 * 8 or source[0] // 2
                        for a, b in ((0, h), (h, source[0])):
                            part = (b - a, *source[1:])
                            self.emit(Node(f"{s}[{a}:{b}] = {{}}", self.value(part, dtype, kind)))
            out = self.load(self.apply(s, ops), shape)
        if self.chance(0.15):
            self.emit(Node(f"{s}[...] = {s}[...]"))
        out = self.let(out, shape, dtype, kind)
        block = self.pop()
        return self.scoped([self.smem_type(source, dtype, transforms)], block, [s], out)

    def smem_copy(self, shape, dtype, kind):
        """Copied from GMEM."""
        if dtype == "bool":
            return self.leaf(shape, dtype, kind)
        self.feature("copy")
        s, b = self.name("s"), self.name("b")
        transforms, tile = self.transforms(shape, dtype)
        source, ops = self.smem_path(shape, tile)
        if transforms and (len(source) < 2 or source[-2] % 8 or source[-1] % tile):
            source, ops = shape, []
        if self.chance(0.6):
            where, n_arrivals = self.copy_in(s, source, dtype, kind, tile)
        else:
            where, n_arrivals = [(s, source)], 1
        self.push()
        extra = self.chance(0.2)
        predicate = ""
        if self.chance(0.15):
            # where nothing is copied, what was stored before stays
            self.emit(Node(f"{s}[...] = {{}}", self.value(source, dtype, kind)))
            self.emit(Node("plgpu.commit_smem()"))
            predicate = Node(", predicate={}", self.boolean())
        for ref, part in where:
            if self.chance(0.25):
                src = self.overhang(part, dtype, kind)
            else:
                src = self.gmem_view(part, dtype, kind, copy=True)
            self.emit(Node("plgpu.copy_gmem_to_smem({}, {}, {}{})", src, ref, b, predicate))
        if extra:
            self.emit(Node(f"plgpu.barrier_arrive({b})"))
            n_arrivals += 1
        if self.chance(0.3):
            self.let(self.value(shape, dtype, kind), shape, dtype, kind)
        self.emit(Node(f"plgpu.barrier_wait({b})"))
        out = self.load(self.apply(s, ops), shape)
        out = self.let(out, shape, dtype, kind)
        block = self.pop()
        bar = f"plgpu.Barrier({n_arrivals})" if n_arrivals > 1 else "plgpu.Barrier()"
        types = [self.smem_type(source, dtype, transforms), Node(bar)]
        return self.scoped(types, block, [s, b], out)

    def copy_in(self, s, shape, dtype, kind, tile):
        """[(ref, shape)] of parts that cover an SMEM ref, and how many."""
        n = shape[0]
        if len(shape) == 2 and tile > 1:
            h = n // 2 // 8 * 8
        elif len(shape) >= 2 and n <= 3:
            return [(f"{s}.at[{k}]", shape[1:]) for k in range(n)], n
        else:
            h = n // 2
        if not 0 < h < n:
            return [(s, shape)], 1
        parts = [(f"{s}.at[:{h}]", (h, *shape[1:])), (f"{s}.at[{h}:]", (n - h, *shape[1:]))]
        return parts, 2

    def overhang(self, shape, dtype, kind):
        """A GMEM slice that may reach out of the array."""
        self.feature("overhang")
        source, where = [], []
        for d in shape:
            n = max(1, d + self.rng.choice((-d // 2, -1, 0, 1, 3, d)))
            low = -self.rng.choice((0, 0, 1, d // 2)) if self.chance(0.3) else 0
            high = n + self.rng.choice((-1, 0, 2)) if self.chance(0.3) else max(n - 1, 0)
            if self.chance(0.7) or d > n:
                where.append(Node(f"pl.ds({{}}, {d})", self.dynamic(low, max(high, low))))
            else:
                where.append(Node(f"pl.ds({{}}, {d})", self.start(0, n - d)))
            source.append(n)
        ref = self.operand(tuple(source), dtype, self.data_kind(dtype, kind))
        return self.apply(ref, [("at", where)])
