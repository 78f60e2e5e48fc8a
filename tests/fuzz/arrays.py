"""Productions of what moves, scans, searches and sorts arrays, of masked and atomic accesses,
small products and narrow dtypes. Like those of expressions.py they work from the type that is
wanted to operands that give it; what a traced index may be, and which sums are exact, is left to
the model where that is likely to hold."""

from math import prod

from .kernels import Node

FLOATS = ("float32", "float16", "bfloat16")
INTS = ("int32", "uint32", "int16", "uint16")
NARROW = ("float8_e4m3fn", "float8_e5m2", "int4", "uint4")
ROOM = 2048  # elements of an operand
FEW = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 64)


def tup(shape):
    """Python source of a tuple."""
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


def typed(dtype):
    return "jnp.bool_" if dtype == "bool" else f"jnp.{dtype}"


class Arrays:
    def array_productions(self, shape, dtype, kind):
        """Weights of the productions here."""
        flat, few = prod(shape) <= ROOM // 2, prod(shape) <= ROOM // 4
        number, wild = dtype in (*FLOATS, *INTS), kind == "wild"
        return {
            "transpose": 1.2 if len(shape) > 1 else 0,
            "join": 1 if shape else 0,
            "gather": 1.2 if flat and len(shape) < 4 else 0,
            "move": 0.8 if shape else 0,
            "pad": 0.5 if shape else 0,
            "at": 1 if shape else 0,
            "scan": 1 if shape and number and (wild or dtype in INTS) else 0,
            "prod": 0.4 if few and dtype in INTS else 0,
            "search": 0.8 if few and dtype == "int32" else 0,
            "logical": 1.5 if few and dtype == "bool" else 0,
            "sort": 0.3 if shape and prod(shape) <= 512 else 0,
            "masked": 0.8 if 0 < len(shape) < 4 and (wild or dtype not in FLOATS) else 0,
            "atomic": 0.6 if shape and dtype in ("int32", "uint32") else 0,
            "dot": 0.6 if few and dtype in (*FLOATS, "int32") and wild and len(shape) < 4 else 0,
            "narrow": 0.6 if number and wild else 0,
        }

    def operand_value(self, shape, dtype, kind):
        """A value that is used as an operand of a move; sometimes in a layout of its own."""
        x = self.value(shape, dtype, kind)
        given = self.layout(shape) if shape and self.chance(0.3) else None
        return Node(f"plgpu.layout_cast({{}}, {given})", x) if given else x

    def index_array(self, shape, n):
        """An int array of that shape, mostly with numbers in [0, n)."""
        form = self.rng.random()
        if form < 0.5:
            low = self.rng.choice((0, 0, -n))
            high = n - 1 + (self.rng.choice((1, 5)) if self.chance(0.1) else 0)
            dtype = self.rng.choice(("int32", "int32", "int16"))
            return Node("{}[...]", self.operand(shape, dtype, (low, high)))
        if form < 0.8 or not shape:
            dtype = self.rng.choice(("int32", "uint32", "int16", "uint16"))
            return Node(f"({{}} % {n})", self.value(shape, dtype))
        k = self.rng.randrange(len(shape))
        return f"((jnp.int32({n - 1}) - lax.broadcasted_iota(jnp.int32, {tup(shape)}, {k})) % {n})"

    # ---- moves -----------------------------------------------------------------------------------

    def make_transpose(self, shape, dtype, kind):
        self.feature("transpose")
        rank = len(shape)
        perm = list(range(rank))
        self.rng.shuffle(perm)
        form = self.rng.random()
        if form < 0.3:
            perm = list(range(rank))[::-1]
        elif form < 0.6:
            a, b = self.rng.sample(range(rank), 2)
            perm = list(range(rank))
            perm[a], perm[b] = b, a
        source = [0] * rank
        for k, p in enumerate(perm):
            source[p] = shape[k]
        x = self.operand_value(tuple(source), dtype, kind)
        if form < 0.3:
            text = self.rng.choice(("{}.T", "jnp.transpose({})", "{}.transpose()"))
        elif form < 0.6:
            text = self.rng.choice((f"jnp.swapaxes({{}}, {a}, {b - rank})",
                                    f"{{}}.swapaxes({a}, {b})"))  # fmt: skip
        else:
            text = self.rng.choice((f"jnp.transpose({{}}, {tup(perm)})",
                                    f"lax.transpose({{}}, {tup(perm)})",
                                    f"{{}}.transpose({tup(perm)})"))  # fmt: skip
        return Node(text, x)

    def make_join(self, shape, dtype, kind):
        self.feature("concatenate")
        axis = self.rng.randrange(len(shape))
        n, form = shape[axis], self.rng.random()
        put = lambda d: (*shape[:axis], *d, *shape[axis + 1 :])  # noqa: E731
        at = self.rng.choice((axis, axis - len(shape)))
        if form < 0.2 and n <= 4:
            parts = [self.operand_value(put(()), dtype, kind) for _ in range(n)]
            if len(shape) == 1:  # numbers of the host would be stacked by NumPy
                parts[0] = Node("jnp.where(jnp.full((), True), {}, {})", parts[0], parts[0])
            return Node(f"jnp.stack([{', '.join(['{}'] * n)}], axis={at})", *parts)
        divisors = [d for d in (2, 3, 4) if n % d == 0]
        if form < 0.3 and divisors:
            d = self.rng.choice(divisors)
            x = self.operand_value(put((n // d,)), dtype, kind)
            if self.chance(0.5):
                return Node(f"jnp.repeat({{}}, {d}, axis={at})", x)
            reps = tup([d if k == axis else 1 for k in range(len(shape))])
            return Node(f"jnp.tile({{}}, {reps})", x)
        if form < 0.4 and prod(shape) * 2 <= ROOM:
            x = self.name_it(self.operand_value(put((2 * n,)), dtype, kind), shape)
            return f"jnp.split({x}, 2, axis={at})[{self.rng.randrange(2)}]"
        if n == 1:
            return self.leaf(shape, dtype, kind)
        cuts = sorted(self.rng.sample(range(1, n), min(n - 1, self.rng.choice((1, 1, 2)))))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n])]
        parts = [self.operand_value(put((d,)), dtype, kind) for d in sizes]
        slots = ", ".join(["{}"] * len(parts))
        text = f"jnp.concatenate([{slots}], axis={at})"
        if self.chance(0.3):
            text = f"lax.concatenate([{slots}], {axis})"
        elif axis == 0 and len(shape) > 1 and self.chance(0.3):
            text = f"jnp.vstack([{slots}])"
        elif axis == 1 and self.chance(0.3):
            text = f"jnp.hstack([{slots}])"
        return Node(text, *parts)

    def make_gather(self, shape, dtype, kind):
        self.feature("gather")
        form = self.rng.randrange(6)
        rank, size = len(shape), max(prod(shape), 1)
        if form == 0 or not shape:  # traced scalars
            at = self.rng.randint(0, rank)
            n = self.rng.choice([d for d in FEW if d * size <= ROOM] or [1])
            source = (*shape[:at], n, *shape[at:])
            x = self.operand_value(source, dtype, kind)
            i = self.dynamic(-n if self.chance(0.3) else 0, n - 1 + self.chance(0.1))
            if self.chance(0.3):
                return Node(f"lax.dynamic_index_in_dim({{}}, {{}}, {at}, keepdims=False)", x, i)
            where = [":"] * at + ["{}"]
            return Node(f"{{}}[{', '.join(where)}]", x, i)
        axis = self.rng.randrange(rank)
        d = shape[axis]
        rest = size // d
        put = lambda n: (*shape[:axis], n, *shape[axis + 1 :])  # noqa: E731
        if form == 1:  # strides
            source, where = [], []
            for k, e in enumerate(shape):
                step = self.rng.choice((1, 2, 3, -1, -2)) if k == axis or self.chance(0.2) else 1
                room = prod(source) * prod(shape[k + 1 :])
                n = (e - 1) * abs(step) + 1
                if n * room > ROOM:
                    n, step = e, 1
                extra = self.rng.choice((0, 0, 1, abs(step) - 1))
                extra = extra if (n + extra) * room <= ROOM and extra < abs(step) else 0
                source.append(n + extra)
                where.append(f"::{step}" if step != 1 else ":")
            return Node(f"{{}}[{', '.join(where)}]",
                        self.operand_value(tuple(source), dtype, kind))  # fmt: skip
        n = self.rng.choice([m for m in (*FEW, d) if m * rest <= ROOM] or [1])
        if form == 2:  # integer arrays
            x, i = self.operand_value(put(n), dtype, kind), self.index_array((d,), n)
            mode = self.rng.choice(("", ', mode="clip"', ', mode="wrap"', "["))
            if mode == "[":
                return Node(f"{{}}[{', '.join([':'] * axis + ['{}'])}]", x, i)
            return Node(f"jnp.take({{}}, {{}}, axis={axis}{mode})", x, i)
        if form == 3:
            x, i = self.operand_value(put(n), dtype, kind), self.index_array(shape, n)
            return Node(f"jnp.take_along_axis({{}}, {{}}, axis={axis})", x, i)
        if form == 4 and d <= n:
            x = self.operand_value(put(n), dtype, kind)
            start = self.dynamic(0, n - d + self.rng.choice((0, 0, 2)))
            if self.chance(0.5):
                return Node(f"lax.dynamic_slice_in_dim({{}}, {{}}, {d}, axis={axis})", x, start)
            starts = ", ".join("{}" if k == axis else "0" for k in range(rank))
            return Node(f"lax.dynamic_slice({{}}, ({starts},), {tup(shape)})", x, start)
        if rank == 2:  # two index arrays that broadcast
            m = self.rng.choice([e for e in FEW if e * n <= ROOM])
            x = self.operand_value((n, m), dtype, kind)
            i, j = self.index_array((shape[0], 1), n), self.index_array((1, shape[1]), m)
            return Node("{}[{}, {}]", x, i, j)
        return Node("{}.ravel()[{}]", self.operand_value(put(n), dtype, kind),
                    self.index_array(shape, n * rest))  # fmt: skip

    def make_move(self, shape, dtype, kind):
        self.feature("move")
        x = self.operand_value(shape, dtype, kind)
        axis = self.rng.randrange(len(shape))
        form = self.rng.randrange(5)
        if form == 0:
            by = self.rng.choice((1, -1, 3, shape[axis] // 2))
            return Node(f"jnp.roll({{}}, {by}, axis={axis})", x)
        if form == 1:
            return Node(f"jnp.roll({{}}, {{}}, axis={axis})", x, self.dynamic(-5, 9))
        if form == 2:
            return Node(f"jnp.flip({{}}, axis={axis})", x)
        if form == 3 and len(shape) > 1 and dtype != "bool":
            f = self.rng.choice(("tril", "triu"))
            return Node(f"jnp.{f}({{}}, {self.rng.randint(-2, 2)})", x)
        axes = self.rng.sample(range(len(shape)), self.rng.randint(1, len(shape)))
        return Node(f"lax.rev({{}}, {tup(axes)})", x)

    def make_pad(self, shape, dtype, kind):
        self.feature("pad")
        source, config = [], []
        for n in shape:
            low, high = (self.rng.choice((0, 0, 1, 3, n // 2)) for _ in range(2))
            low, high = (low, high) if low + high < n else (0, 0)
            source.append(n - low - high)
            config.append([low, high, 0])
        value = self.literal(dtype, "small" if kind != "norm" else kind)
        k = self.rng.randrange(len(shape))
        n, (low, high, _) = source[k], config[k]
        form = self.rng.random()
        if form < 0.2 and n % 2:
            source[k], config[k][2] = n // 2 + 1, 1
        elif form < 0.4 and prod(source) // n * (n + 2) <= ROOM:
            source[k] += 2
            config[k][self.rng.randrange(2)] -= 2
        x = self.operand_value(tuple(source), dtype, kind)
        if any(c[2] or min(c) < 0 for c in config) or self.chance(0.3):
            config = ", ".join(tup(c) for c in config)
            return Node(f"lax.pad({{}}, {typed(dtype)}({value}), ({config},))", x)
        config = ", ".join(tup(c[:2]) for c in config)
        return Node(f"jnp.pad({{}}, ({config},), constant_values={value})", x)

    def make_at(self, shape, dtype, kind):
        """Some elements of an array changed."""
        self.feature("at")
        x = self.operand_value(shape, dtype, kind)
        if self.chance(0.25):
            part = tuple(self.rng.choice((d, max(1, d // 2), 1)) for d in shape)
            starts = [self.dynamic(0, d - p + self.chance(0.2)) for d, p in zip(shape, part)]
            slots = ", ".join(["{}"] * len(shape))
            v = self.operand_value(part, dtype, kind)
            return Node(f"lax.dynamic_update_slice({{}}, {{}}, ({slots},))", x, v, *starts)
        where, part, parts, arrays = [], [], [], False
        for d in shape:
            form = self.rng.random()
            if form < 0.3:
                where.append(":")
                part.append(d)
            elif form < 0.5:
                a = self.rng.randrange(d)
                b = self.rng.randint(a + 1, d)
                where.append(f"{a}:{b}")
                part.append(b - a)
            elif form < 0.65:
                step = self.rng.choice((2, 3, -1))
                where.append(f"::{step}")
                part.append(len(range(d)[::step]))
            elif form < 0.8:
                where.append(str(self.rng.randrange(-d, d)))
            elif form < 0.9 and not arrays:
                where.append("{}")
                parts.append(self.dynamic(-d if self.chance(0.2) else 0, d - 1 + self.chance(0.2)))
            elif not arrays and not parts and len(shape) == 1:
                arrays = True
                n = self.rng.randint(1, d)
                where.append("{}")
                iota = f"lax.broadcasted_iota(jnp.int32, ({n},), 0)"
                parts.append(Node(f"(({iota} + {{}}) % {d})", self.dynamic(0, 9)))
                part.append(n)
            else:
                where.append(":")
                part.append(d)
        form = "set"
        if not arrays and dtype in INTS and self.chance(0.5):
            form = self.rng.choice(("add", "multiply", "min", "max"))
        elif not arrays and dtype in FLOATS and self.chance(0.3):
            form = self.rng.choice(("min", "max"))
        part = tuple(part)
        if self.chance(0.2) and dtype != "bool":
            v = self.literal(dtype, "small")
        elif self.chance(0.2):
            v = self.value(part[1:], dtype, kind)
        else:
            v = self.operand_value(part, dtype, kind)
        return Node(f"{{}}.at[{', '.join(where)}].{form}({{}})", x, *parts, v)

    # ---- scans, searches, sorts ------------------------------------------------------------------

    def make_scan(self, shape, dtype, kind):
        self.feature("scan")
        axis = self.rng.randrange(len(shape))
        forms = ("sum", "prod", "max", "min") if dtype in INTS else ("sum", "max", "min")
        form = self.rng.choice(forms)
        exact = dtype in FLOATS and form == "sum"
        x = self.operand_value(shape, dtype, "small" if exact else kind)
        if form in ("sum", "prod") and self.chance(0.5):
            return Node(f"jnp.cum{form}({{}}, axis={axis})", x)
        back = self.rng.choice(("", ", reverse=True"))
        return Node(f"lax.cum{form}({{}}, axis={axis}{back})", x)

    def widened(self, shape):
        """(a shape with one more dim, the dim)"""
        n = self.rng.choice([d for d in FEW if d * max(prod(shape), 1) <= ROOM] or [1])
        axis = self.rng.randint(0, len(shape))
        return (*shape[:axis], n, *shape[axis:]), axis

    def make_prod(self, shape, dtype, kind):
        self.feature("prod")
        full, axis = self.widened(shape)
        if dtype in ("int16", "uint16"):
            return Node(f"lax.reduce_prod({{}}, ({axis},))", self.value(full, dtype))
        d = dtype
        if self.chance(0.3):
            d = {"int32": "int16", "uint32": "uint16"}[dtype]
        f = self.rng.choice(("jnp.prod({}, axis=%d)", "{}.prod(axis=%d)")) % axis
        return Node(f, self.value(full, d))

    def make_search(self, shape, dtype, kind):
        self.feature("search")
        full, axis = self.widened(shape)
        d = self.rng.choice((*FLOATS, *INTS))
        x = self.operand_value(full, d, "wild")
        f = self.rng.choice(("argmax", "argmin", "argmax", "count_nonzero"))
        at = "None" if not shape and self.chance(0.5) else axis
        if f == "count_nonzero" or self.chance(0.7):
            return Node(f"jnp.{f}({{}}, axis={at})", x)
        if at == "None":
            return Node(f"{{}}.{f}()", x)
        return Node(f"lax.{f}({{}}, {axis}, jnp.int32)", x)

    def make_logical(self, shape, dtype, kind):
        self.feature("any")
        full, axis = self.widened(shape)
        d = "bool" if self.chance(0.7) else self.rng.choice((*FLOATS, *INTS))
        x, f = self.operand_value(full, d, "wild"), self.rng.choice(("any", "all"))
        at = "None" if not shape and self.chance(0.5) else axis
        return Node(self.rng.choice((f"jnp.{f}({{}}, axis={at})", f"{{}}.{f}(axis={at})")), x)

    def make_sort(self, shape, dtype, kind):
        if dtype not in (*FLOATS, *INTS, "bool"):
            return self.leaf(shape, dtype, kind)
        axis = self.rng.randrange(len(shape))
        if shape[axis] > 64:
            return self.leaf(shape, dtype, kind)
        self.feature("sort")
        if dtype == "int32" and self.chance(0.5):
            x = self.operand_value(shape, self.rng.choice(("int16", "float32", "bool")), "wild")
            return Node(f"jnp.argsort({{}}, axis={axis})", x)
        x = self.operand_value(shape, dtype, kind)
        return Node(self.rng.choice((f"jnp.sort({{}}, axis={axis})", f"lax.sort({{}}, {axis})")), x)

    # ---- memory ----------------------------------------------------------------------------------

    def mask(self, shape, starts, bounds):
        """Of that shape: where start + number is inside of bounds, and perhaps more."""
        out = None
        for k, (s, n) in enumerate(zip(starts, bounds)):
            if s is None:
                continue
            dims = shape
            if self.chance(0.4):
                dims = tuple(d if j == k else 1 for j, d in enumerate(shape))
            at = f"lax.broadcasted_iota(jnp.int32, {tup(dims)}, {k})"
            if k == len(shape) - 1 and self.chance(0.4):
                at = f"jnp.arange({shape[k]})"
            part = self.rng.choice((f"({at} + {s} < {n})", f"({at} < {n} - {s})"))
            out = part if out is None else f"({out} & {part})"
        if out is None or self.chance(0.3):
            more = self.value(shape, "bool")
            out = more if out is None else Node("({} & {})", out, more)
        return out

    def overhanging(self, shape):
        """(dims of the memory, its index, starts) of a slice that may reach out of the end."""
        source, where, starts = [], [], []
        for d in shape:
            if self.chance(0.4):
                source.append(d)
                where.append(":")
                starts.append(None)
                continue
            n = max(1, d + self.rng.choice((-d // 2, -1, 0, 1, 8, d)))
            s = self.name("n")
            if self.chance(0.7):
                start = self.dynamic(0, n)
            else:
                start = Node("pl.multiple_of({} * 8, 8)", self.dynamic(0, n // 8))
            self.emit(Node(f"{s} = {{}}", start, keep=True))
            source.append(n)
            where.append(f"pl.ds({s}, {d})")
            starts.append(s)
        return tuple(source), where, starts

    def make_masked(self, shape, dtype, kind):
        self.feature("masked")
        source, where, starts = self.overhanging(shape)
        m = self.mask(shape, starts, source)
        ref = self.operand(source, dtype, self.data_kind(dtype, kind))
        other = ""
        parts = [m]
        if self.chance(0.6):
            other = ", other={}"
            part = shape if self.chance(0.5) else ()
            if self.chance(0.4) and dtype != "bool":
                parts.append(self.literal(dtype, "small"))
            else:
                parts.append(self.value(part, dtype, kind))
        return Node(f"pl.load({ref}, ({', '.join(self.index(where))},), mask={{}}{other})", *parts)

    def index(self, where):
        return ["slice(None)" if w == ":" else w for w in where]

    def store_masked(self, shape, dtype):
        """A store under a mask to a place of its own."""
        self.feature("masked store")
        tags = [t for t in self.tags if t[1] > 1]
        source, where, starts = self.overhanging(shape)
        lead, linear = [], None
        if tags:
            lead.append(prod(s for _, s in tags))
            linear = self.linear(tags)
        o = self.output((*lead, *source), dtype)
        m = self.mask(shape, starts, source)
        ref = Node(f"{o}.at[{{}}]", linear) if tags else o
        value = self.value(shape, dtype)
        where = ", ".join(self.index(where))
        self.emit(Node(f"pl.store({{}}, ({where},), {{}}, mask={{}})", ref, value, m))

    def change_atomically(self, ref, shape, dtype):
        """Emits an atomic change of a ref that holds numbers; the name of what was there or None"""
        self.feature("atomic")
        f = self.rng.choice(("add", "max", "min", "and", "or", "xor", "xchg", "cas"))
        v = self.value(shape if self.chance(0.7) else (), dtype)
        if f not in ("xchg", "cas") and self.chance(0.3):
            v = self.value(shape, dtype)
            self.emit(Node(f"plgpu.atomic_{f}({ref}, {{}})", v))
            return None
        parts = [v]
        if f == "cas":
            parts.insert(0, self.value(shape, dtype))
        mask = ""
        if self.chance(0.3):
            mask = ", mask={}"
            parts.append(self.value(shape, "bool"))
        slots = ", ".join(["{}"] * (2 if f == "cas" else 1))
        call = Node(f"pl.atomic_{f}({ref}, ..., {slots}{mask})", *parts)
        if mask or self.chance(0.3):
            self.emit(call)
            return None
        return self.name_it(call, shape)

    def make_atomic(self, shape, dtype, kind):
        """Atomics on shared memory."""
        if self.threads > 1 or self.nesting > 3:
            return self.leaf(shape, dtype, kind)
        s = self.name("s")
        self.push()
        self.emit(Node(f"{s}[...] = {{}}", self.operand_value(shape, dtype, kind)))
        old = None
        for _ in range(self.rng.randint(1, 2)):
            old = self.change_atomically(s, shape, dtype)
        out = old if old and self.chance(0.5) else self.name_it(Node(f"{s}[...]"), shape)
        block = self.pop()
        return self.scoped([self.smem_type(shape, dtype)], block, [s], out)

    # ---- products, narrow dtypes -----------------------------------------------------------------

    def make_dot(self, shape, dtype, kind):
        if self.threads > 1:
            return self.leaf(shape, dtype, kind)
        self.feature("dot")
        d, cast = dtype, ""
        if dtype == "float32":
            d = self.rng.choice(FLOATS)
            cast = ", preferred_element_type=jnp.float32" if d != dtype else ""
        k = self.rng.choice((1, 2, 3, 5, 8, 16, 17, 32, 33))
        small = "small" if d in FLOATS else "wild"
        if len(shape) == 3 and shape[0] > 4:
            return self.leaf(shape, dtype, kind)
        lead, left, right = shape[:-2], shape[-2:-1], shape[-1:]
        if len(shape) == 1 and self.chance(0.5):
            left, right = right, left
        pair = ((*lead, *left, k), (*lead, k, *right))
        if max(map(prod, pair)) > ROOM // 2:
            return self.leaf(shape, dtype, kind)
        form = self.rng.random()
        if form < 0.4 and len(shape) == 2:
            swap = self.rng.choice(((1, 0), (0, 0), (0, 1), (1, 1)))
            pair = [p[::-1] if (c == 1) != own else p for p, c, own in zip(pair, swap, (1, 0))]
            text = f"lax.dot_general({{}}, {{}}, ((({swap[0]},), ({swap[1]},)), ((), ())){cast})"
        elif form < 0.6 and not cast:
            text = "({} @ {})"
        else:
            text = f"jnp.{'matmul' if lead or self.chance(0.3) else 'dot'}({{}}, {{}}{cast})"
        a, b = (self.operand_value(tuple(p), d, small) for p in pair)
        return Node(text, a, b)

    def make_narrow(self, shape, dtype, kind):
        """Through floats of 8 bits or integers of 4."""
        self.feature("narrow")
        to = self.rng.choice(NARROW)
        d = self.rng.choice((*FLOATS, *INTS, "int8", "uint8", "bool"))
        x = Node(f"{{}}.astype(jnp.{to})", self.value(shape, d))
        form = self.rng.randrange(6)
        if form == 0 and len(shape) > 1:
            y = self.value(shape[::-1], d)
            x = Node(f"{{}}.astype(jnp.{to}).T", y)
        elif form == 1 and self.layout(shape):
            x = Node(f"plgpu.layout_cast({{}}, {self.layout(shape)})", x)
        elif form == 2 and shape:
            x = Node("jnp.flip({}, axis=0)", x)
        elif form == 3 and shape:
            x = Node(f"jnp.where({{}}, {{}}, {{}}.astype(jnp.{to}))", self.value(shape, "bool"), x,
                     self.value(shape, d))  # fmt: skip
        return Node(f"{{}}.astype({typed(dtype)})", x)
