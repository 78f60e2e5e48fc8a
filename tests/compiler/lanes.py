"""Runs the text of a generated program as one lane sees it, without data: what the lane issues and
where it synchronises, in order.

The entry of a program is written one statement to a line, with integer arithmetic on indices,
`if`, `for` and calls of device functions. `translate` turns it into Python line by line; loops
over registers fall out, as they move data only. `Lane.run` runs the result for one lane: calls of
device functions that touch memory or other threads become events (name, template arguments,
operands). What a lane reads from memory is UNKNOWN, which arithmetic keeps and `choose` decides
where a branch depends on it. Addresses of shared memory are offsets in that of the block plus
`PEER` times the block's rank of the cluster for addresses in the cluster.

`instructions(text)` gives the PTX that each device function of the program stands for."""

import functools
import re
from typing import NamedTuple

PEER = 1 << 24
EVENTS = re.compile(
    r"^(mbarrier_|tma_|tcgen05_(?!address)|tmem_|bulk_|fence_|st_shared|ld_shared|stmatrix|ldmatrix"
    r"|cp_async|setmaxnreg|try_cancel|query_cancel|\w+_sync$|wgmma_|group_sync|barrier_|peer_st"
    r"|lanes_any|lanes_all)"
)


def statements(lowered):
    """The text of a program with each statement on a line of its own, however long."""
    lines = lowered.as_text("cuda", lines=True).splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("#line "))


class Unknown:
    """A value that is not followed."""

    def _same(self, *_):
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _same
    __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _same
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = _same
    __invert__ = __getitem__ = __call__ = __lt__ = __le__ = __gt__ = __ge__ = __truediv__ = _same
    __rtruediv__ = __getattr__ = _same

    def __setitem__(self, *_):
        pass

    def __eq__(self, other):
        return self

    def __hash__(self):
        return 0

    def __repr__(self):
        return "?"

    def __bool__(self):
        raise LookupError("a branch depends on data")

    def __iter__(self):
        raise TypeError("data")


UNKNOWN = Unknown()


class Registers(Unknown):
    """An array in registers, from element `first` on."""

    def __init__(self, first=0):
        self.first = first

    def __getitem__(self, k):
        return UNKNOWN if k is UNKNOWN else Registers(self.first + k)

    def __repr__(self):
        return f"r{self.first}"


class Event(NamedTuple):
    name: str
    template: str
    args: tuple
    note: str  # the comment before it: op and line of the kernel


END = Event("end", "", (), "")


# ---- expressions and statements of C++ as Python -------------------------------------------------


def close_of(s, at):
    """Index of the bracket that closes the one at `at`."""
    depth = 0
    for k in range(at, len(s)):
        depth += s[k] in "([{"
        depth -= s[k] in ")]}"
        if not depth:
            return k
    raise SyntaxError(s)


def split_top(s, mark):
    """Pieces of s between marks that no bracket encloses."""
    out, depth, from_ = [], 0, 0
    for k, c in enumerate(s):
        depth += c in "([{"
        depth -= c in ")]}"
        if not depth and s.startswith(mark, k):
            out.append(s[from_:k])
            from_ = k + len(mark)
    return [*out, s[from_:]]


def ternary(s):
    """c ? a : b, also inside brackets."""
    out, k = "", 0
    while k < len(s):
        if s[k] in "([{":
            end = close_of(s, k)
            inside = ", ".join(ternary(x.strip()) for x in split_top(s[k + 1 : end], ","))
            out += s[k] + inside + s[end]
            k = end + 1
        else:
            out += s[k]
            k += 1
    parts = split_top(out, " ? ")
    if len(parts) == 1:
        return out
    condition, rest = parts[0], " ? ".join(parts[1:])
    yes, no = split_top(rest, " : ")[0], " : ".join(split_top(rest, " : ")[1:])
    return f"({yes} if truth({condition}) else {ternary(no)})"


def expression(s):
    s = re.sub(r"\((?:(?:const )?[iuf](?:8|16|32|64)\*?|int)\)", "", s)
    s = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)(?:ull|ll|u)\b", r"\1", s)
    s = re.sub(r"\b(\d+\.?\d*(?:e[+-]?\d+)?)f\b", r"\1", s)
    s = re.sub(r"\b(\w+)<([^<>;()]*)>(?=\()", r'\1["\2"]', s)
    s = re.sub(r"(?<![\w)\]] )(?<![\w)\]])&(?=\w)", "", s)
    s = re.sub(r"!(?!=)", " not ", s)
    s = s.replace("&&", " and ").replace("||", " or ").replace("true", "True")
    s = re.sub(r"(?<!/)/(?!/)", "//", s).replace("false", "False")
    s = re.sub(r"\{([^{}]*)\}", r"[\1]", s)
    return ternary(s.strip())


TYPE = r"(?:const |constexpr )?[A-Za-z]\w*\*?(?: const)?\*?"


def statement(s):
    s = s.strip()
    if s in (";", "") or re.match(r"(asm|static_assert|extern)", s):
        return "pass"
    for word in ("break", "continue", "return"):
        if s == word + ";":
            return word
    if m := re.match(r"if \(", s):
        end = close_of(s, m.end() - 1)
        return f"if truth({expression(s[m.end() : end])}): {statement(s[end + 1 :])}"
    if m := re.match(r"else (.*)", s):
        return f"else: {statement(m[1])}"
    s = re.sub(rf"^{TYPE} (?=\w+(?: =|;|\[|, \w+;))", "", s).rstrip(";")
    if m := re.match(r"ld_shared<i32, 1>\(&(\w+), ", s):
        return f"{m[1]} = {expression(s)}"
    if m := re.match(r"(\w+)\[([^\]]*)\]( = (.*))?$", s):
        if m[3] is None:
            return f"{m[1]} = Registers()"
        return f"{m[1]} = Registers()" if m[4].startswith("{") else "pass"
    if m := re.match(r"(\w+(?:, \w+)*)$", s):
        return " = ".join(m[1].split(", ")) + " = UNKNOWN"
    if m := re.match(r"(\w+) ([-+*/%&|^]|<<|>>)?= (.*)$", s):
        return f"{m[1]} {(m[2] or '').replace('/', '//')}= {expression(m[3])}"
    return expression(s)


def loop(s):
    """The head of a for loop, as a `while`: statements before it, its head, and its step."""
    inside = s[s.index("(") + 1 : close_of(s, s.index("("))]
    first, condition, step = (x.strip() for x in inside.split(";"))
    name = first.split(" = ")[0].split()[-1] if first else ""
    step = step.replace("++", " += 1")
    return (
        [statement(first)] if first else [],
        f"while {'True' if not condition else f'truth({expression(condition)})'}:",
        statement(step) if step else None,
        name,
    )


def blocks(lines):
    """The nesting of lines: a list whose items are statements or (head, list)."""
    stack, before = [[]], ""
    for line in lines:
        s = line.strip()
        s = s if s.startswith("//") else before + re.sub(r"\s+// .*$", "", s)
        if s.startswith("if (") and close_of(s, 3) == len(s) - 1:
            before = s + " "
            continue
        before = ""
        if not s or s.startswith("#pragma"):
            continue
        if s.startswith("}"):
            stack.pop()
            s = s[1:].strip()
            if not s:
                continue
        if s.endswith("{"):
            inner = []
            stack[-1].append((s[:-1].strip(), inner))
            stack.append(inner)
        else:
            stack[-1].append(s)
    return stack[0]


def has_events(tree):
    for item in tree:
        text = item if isinstance(item, str) else item[0]
        if not text.startswith("//") and any(
            EVENTS.match(x) for x in re.findall(r"\b(\w+)(?:<[^<>]*>)?\(", text)
        ):
            return True
        if "break" in text or "return" in text:
            return True
        if not isinstance(item, str) and has_events(item[1]):
            return True
    return False


def over_registers(head):
    return re.match(r"for \(int ", head)


def emit(tree, indent, out):
    pad = "  " * indent
    for item in tree:
        if isinstance(item, str):
            if item.startswith("//"):
                out.append(f"{pad}note({item[2:].strip()!r})")
            elif not over_registers(item) and not item.startswith("for ("):
                out.append(pad + statement(item))
            elif has_events([item]):
                end = close_of(item, item.index("("))
                emit([(item[: end + 1], [item[end + 1 :].strip()])], indent, out)
            continue
        head, inner = item
        if head.startswith("for ("):
            if over_registers(head) and not has_events(inner):
                continue
            before, test, step, _ = loop(head)
            out.extend(pad + x for x in before)
            out.append(pad + test)
            emit(inner, indent + 1, out)
            out.append(f"{pad}  {step or 'pass'}")
            continue
        if head.startswith("if ("):
            out.append(f"{pad}if truth({expression(head[4:-1])}):")
        elif head.startswith("else if ("):
            out.append(f"{pad}elif truth({expression(head[9:-1])}):")
        elif head == "else":
            out.append(f"{pad}else:")
        else:
            out.append(f"{pad}if True:")
        emit(inner, indent + 1, out)
        out.append(f"{pad}  pass")


def translate(text):
    """The entry of the program as Python source."""
    start = text.index("__global__")
    head = text.index(") {\n", start)
    out = []
    emit(blocks(text[head + 4 : text.rindex("}")].splitlines()), 0, out)
    return "\n".join(out)


# ---- running it ----------------------------------------------------------------------------------


class Dim(NamedTuple):
    x: int
    y: int = 0
    z: int = 0


class Function(Unknown):
    """A name that the entry does not declare. A device function: called, it is an event; else an
    argument."""

    def __init__(self, lane, name, template=""):
        self.lane, self.name, self.template = lane, name, template

    def __getitem__(self, k):
        return Function(self.lane, self.name, k) if isinstance(k, str) else UNKNOWN

    def __call__(self, *args):
        if not EVENTS.match(self.name):
            return UNKNOWN
        return self.lane.event(self.name, self.template, args)


class Swizzle:
    """Addresses before it: a swizzle moves bytes within a few rows."""

    def __getitem__(self, _):
        return lambda x: x


class Names(dict):
    def __init__(self, lane):
        super().__init__()
        self.lane = lane

    def __missing__(self, name):
        if name.endswith("_map") or re.match(r".*_map_\d+$", name):
            return name
        if m := re.match(r"(?:matrix|instruction)_([0-9a-f]{8})$", name):
            return int(m[1], 16)
        return Function(self.lane, name)


def least(a, b):
    return UNKNOWN if isinstance(a, Unknown) or isinstance(b, Unknown) else min(a, b)


def most(a, b):
    return UNKNOWN if isinstance(a, Unknown) or isinstance(b, Unknown) else max(a, b)


class Lane:
    """One lane of a block: its rank in a cluster of `blocks`, of which it is the first launched.
    known: (address, number) of shared memory, which it finds there; nothing else is known."""

    def __init__(self, text, tid, rank=0, blocks=1, responses=(), choose=True, known=()):
        self.events, self.note, self.choose = [], "", choose
        self.known = dict(known)
        self.rank, self.responses, self.tid = rank, list(responses), tid
        names = Names(self)
        self.names = names
        lane = tid % 32
        names |= {
            "threadIdx": Dim(tid),
            "blockIdx": Dim(rank),
            "gridDim": Dim(blocks, 1, 1),
            "UNKNOWN": UNKNOWN,
            "Registers": Registers,
            "note": self.set_note,
            "truth": self.truth,
            "shared_base": lambda: 0,
            "warp_uniform": lambda x: x,
            "elect_one": lambda: lane == 0,
            "cluster_rank": lambda: rank,
            "cluster_index_x": lambda: rank,
            "cluster_index_y": lambda: 0,
            "cluster_index_z": lambda: 0,
            "next_index": lambda x: x + 1,
            "wrap_add": lambda a, b: a + b,
            "wrap_sub": lambda a, b: a - b,
            "wrap_mul": lambda a, b: a * b,
            "swizzle": Swizzle(),
            "min_i32": least,
            "max_i32": most,
            "min_int": least,
            "max_int": most,
            "div_int": lambda a, b: a // b,
            "rem_int": lambda a, b: a % b,
            "range_hint": lambda x, *_: x,
            "peer_offset": lambda r: (r - rank) * PEER if r is not UNKNOWN else r,
            "tcgen05_address": lambda a, leading: ((a & 0x3FFFF) >> 4) | leading,
            "tmem": 0,
        }
        self.code = _compiled(text)

    def set_note(self, x):
        self.note = x

    def truth(self, x):
        return self.choose if isinstance(x, Unknown) else bool(x)

    def event(self, name, template, args):
        if name == "query_cancel":
            answer = self.responses.pop(0)
            self.names["block"] = [0, 0, 0] if answer is None else [answer, 0, 0]
            self.events.append(Event(name, template, (args[0], answer), self.note))
            return answer is not None
        if name == "ld_shared" and template == "i32, 1" and args[1] in self.known:
            self.events.append(Event(name, template, args, self.note))
            return self.known[args[1]]
        if name == "ld_shared" and self.note == "" and len(args) == 2:
            self.names["tmem"] = 0
            return UNKNOWN
        self.events.append(Event(name, template, args, self.note))
        return UNKNOWN

    def run(self):
        exec(self.code, {}, self.names)
        return self.events


@functools.lru_cache(64)
def _compiled(text):
    return compile(translate(text), "entry", "exec")


FUNCTION = re.compile(
    r"^(?:template <[^>]*> )?FN [\w:*&]+ (\w+)\(.*?(?=^FN|^template|^//|\Z)", re.M | re.S
)


class Instruction(NamedTuple):
    text: str  # without operands: "tcgen05.cp.cta_group::1.128x256b"
    whole: str  # as in the program, of all its strings
    registers: tuple  # indices of the elements of d, as operands have them


@functools.lru_cache(64)
def instructions(text):
    """(name, template arguments) of each device function with inline PTX: its instructions."""
    found = {}
    for m in FUNCTION.finditer(text):
        parts = [("", m[0])]
        if "if constexpr (CTAS == 2)" in m[0]:
            two, one = m[0].split("} else {")
            parts = [("2", two), ("1", one)]
        for template, part in parts:
            whole = "".join(re.findall(r'"([^"]*)"', part)).replace("\\n", " ")
            name = re.search(r"(?:tcgen05|clusterlaunchcontrol|cp\.async|mbarrier)[\w.:]+", whole)
            registers = tuple(int(x) for x in re.findall(r"d\[(\d+)\]", part))
            found[m[1], template] = Instruction(name[0] if name else "", whole, registers)
    return found
