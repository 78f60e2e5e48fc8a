"""Runs the text of a PTX kernel as one lane sees it, without data: what the lane issues and where
it synchronises, in order. The counterpart of lanes.py for programs of other compilers.

Registers hold integers, which follow from constants, the number of the thread and the rank of its
block; shared and tensor memory begin at 0. What comes from memory is unknown (None), and so is all
that depends on it. Branches that depend on what is unknown are not taken. A branch table is entered
at `entry`, the second time it ends the walk. A lane is the elected one of its warp."""

import itertools
import re
from typing import NamedTuple

EVENTS = re.compile(
    r"(mbarrier\.(?!inval)|tcgen05\.(?!alloc|dealloc|relinquish)|cp\.async\.bulk|fence\.proxy"
    r"|clusterlaunchcontrol|cp\.reduce)"
)
MASK = {"b16": 16, "u16": 16, "b32": 32, "u32": 32, "s32": 32, "b64": 64, "u64": 64, "s64": 64}
MASK["pred"] = 1


WORDS = [
    (r"mbarrier\.(try|test)_wait", "wait"),
    (r"mbarrier\.arrive\.expect_tx", "expect"),
    (r"mbarrier\.arrive", "arrive"),
    (r"cp\.async\.bulk\.tensor.*\.mbarrier", "copy"),
    (r"tcgen05\.mma", "products"),
    (r"tcgen05\.commit", "commit"),
    (r"tcgen05\.cp", "copy to tmem"),
    (r"tcgen05\.fence::after", "fence after"),
    (r"tcgen05\.fence::before", "fence before"),
    (r"tcgen05\.ld", "load"),
    (r"tcgen05\.st", "store"),
    (r"tcgen05\.wait::st", "wait store"),
    (r"tcgen05\.wait::ld", "wait load"),
    (r"fence\.proxy\.async", "proxy fence"),
    (r"clusterlaunchcontrol\.try", "request"),
    (r"clusterlaunchcontrol\.query_cancel\.is_canceled", "answer"),
]


def word(name):
    """What an instruction is called in data/sequences.json; None if it is not there."""
    return next((w for pattern, w in WORDS if re.match(pattern, name)), None)


class Instruction(NamedTuple):
    guard: str  # "", "p", "!p"
    name: str
    operands: list


class Event(NamedTuple):
    name: str
    operands: list  # numbers, None or text


def pieces(text):
    """Operands, split at commas that no bracket encloses."""
    out, depth, start = [], 0, 0
    for k, c in enumerate(text):
        depth += c in "[{("
        depth -= c in "]})"
        if c == "," and not depth:
            out.append(text[start:k].strip())
            start = k + 1
    return [x for x in (*out, text[start:].strip()) if x]


def parse(text, kernel=None):
    """(instructions, places of each label, branch table) of the entry, or of one by name."""
    text = re.sub(r"//[^\n]*", "", text[text.index(".entry " + (kernel or "")) :])
    depths = itertools.accumulate((c == "{") - (c == "}") for c in text)
    end = next(k for k, (c, depth) in enumerate(zip(text, depths)) if c == "}" and not depth)
    body = re.sub(r"^\s*(\.(?:loc|pragma)\b.*|[{}]\s*)$", "", text[:end], flags=re.M)
    body = re.sub(r"^(\s*[\w$]+:)", r"\1;", body[body.index(")") + 1 :], flags=re.M)
    code, labels, table = [], {}, []
    for part in body.split(";"):
        part = re.sub(r"^[{}\s]+", "", part).strip()
        if re.fullmatch(r"[\w$]+:", part):
            labels.setdefault(part[:-1], []).append(len(code))
        elif m := re.match(r"\.branchtargets\s+(.*)", part, re.S):
            table = pieces(m[1])
        elif m := re.match(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)$", part, re.S):
            code.append(Instruction((m[1] or "") + (m[2] or ""), m[3], pieces(m[4] or "")))
    return code, labels, table


class Lane:
    """One lane. regs: values by name, also of special registers."""

    def __init__(self, program, tid, rank=0, blocks=1, entry=0):
        self.code, self.labels, self.table = program
        self.entry = entry
        self.events, self.memory, self.stores = [], {}, []
        self.regs = {"%tid.x": tid, "%laneid": tid % 32, "%cluster_ctarank": rank, "WARP_SZ": 32}
        self.regs |= {"%cluster_ctaid.x": rank, "%cluster_nctarank": blocks, "%ctaid.x": rank}
        self.regs |= {"%ctaid.y": 0, "%ctaid.z": 0, "%tid.y": 0, "%tid.z": 0, "%ntid.x": None}

    def value(self, text):
        """Of an operand: a number, None if it is unknown."""
        text = text.strip()
        if text.startswith(("[", "{")):
            inside = [self.value(x) for x in pieces(text[1:-1])]
            return inside if text.startswith("{") or len(inside) > 1 else inside[0]
        if m := re.fullmatch(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?", text):
            return int(m[0].rstrip("U"), 0)
        if text in self.regs:
            return self.regs[text]
        if "+" in text:
            parts = [self.value(x) for x in text.split("+")]
            return None if None in parts else sum(parts)
        return None if text.startswith("%") else 0  # a symbol: where memory begins

    def run(self, limit=200000):
        at, entered = 0, False
        for _ in range(limit):
            if at >= len(self.code):
                return self.events
            guard, name, operands = self.code[at]
            at += 1
            if guard:
                known = self.regs.get(guard.lstrip("!"))
                if known is not None and bool(known) == guard.startswith("!"):
                    continue
            if name in ("ret", "exit", "trap"):
                return self.events
            if name.startswith("bra"):
                known = True if not guard else self.regs.get(guard.lstrip("!"))
                if known is not None:
                    at = self.place(operands[0], at)
            elif name.startswith("brx"):
                if entered:
                    return self.events
                entered = True
                at = self.place(self.table[self.entry], at)
            else:
                self.step(name, operands)
        raise RuntimeError("the walk has no end")

    def place(self, label, at):
        """Of a label; of those of one name, which scopes of inline assembly have, the next."""
        places = self.labels[label]
        return next((k for k in places if k >= at), places[-1])

    def step(self, name, operands):
        if EVENTS.match(name):
            self.events.append(Event(name, [self.value(x) for x in operands]))
            if ".try_wait" in name or ".test_wait" in name:
                self.regs[operands[0]] = 1
            return
        if name.startswith("elect"):
            self.regs[operands[0].split("|")[1]] = 1
            return
        if name.startswith(("st.shared", "tcgen05.alloc")):
            at, what = (self.value(x) for x in operands)
            self.memory[at] = what if name.startswith("st.") else 0
            self.stores.append((at, self.memory[at]))
        if not operands or name.startswith(("st.", "bar", "setmaxnreg", "fence", "tcgen05", "red")):
            return
        target, *rest = operands
        if name == "mov.b64" and target.startswith("{"):
            self.unpack(target, rest[0], 32)
        else:
            self.regs[target.split("|")[0]] = self.compute(name, rest)

    def unpack(self, target, source, bits):
        whole = self.value(source)
        for k, name in enumerate(pieces(target[1:-1])):
            self.regs[name] = None if whole is None else whole >> bits * k & (1 << bits) - 1

    def compute(self, name, operands):
        op, *rest = name.split(".")
        values = [self.value(x) for x in operands]
        if op == "ld" and rest[0] == "shared":
            return self.memory.get(values[0])
        if op == "mov" and operands[0].startswith("{"):
            low, high = values[0]
            return None if None in (low, high) else low | high << 32
        if op == "shfl" or op == "mapa":
            return values[0] if op == "shfl" else (values[0], values[1])
        if op == "selp":
            return None if values[2] is None else values[0] if values[2] else values[1]
        if None in values or any(isinstance(x, (list, tuple)) for x in values):
            return self.partly(op, values)
        found = self.arithmetic(op, rest, values)
        width = MASK.get(rest[-1]) if rest else None
        return found & (1 << width) - 1 if found is not None and width else found

    @staticmethod
    def partly(op, values):
        """What is known although an operand is not."""
        return 0 if op == "and" and 0 in values else None

    @staticmethod
    def arithmetic(op, rest, v):
        if op in ("mov", "cvt", "cvta"):
            return v[0]
        if op == "setp":
            a, b = v[:2]
            compare = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b}
            return compare.get(rest[0], a >= b)
        if op == "bfe":
            return v[0] >> v[1] & (1 << v[2]) - 1
        two = {
            "add": lambda a, b: a + b,
            "sub": lambda a, b: a - b,
            "mul": lambda a, b: a * b,
            "or": lambda a, b: a | b,
            "and": lambda a, b: a & b,
            "xor": lambda a, b: a ^ b,
            "shl": lambda a, b: a << b,
            "shr": lambda a, b: a >> b,
            "min": min,
            "max": max,
        }.get(op)
        if op == "mad":
            return v[0] * v[1] + v[2]
        if op == "not":
            return ~v[0]
        return two(*v) if two and len(v) == 2 else None


def innermost(program, *patterns):
    """The instructions of the smallest loop that has one of each of these names, in the order of
    the text. Loops of waits within it count as the wait."""
    code, labels, _ = program
    found = []
    for end, (_, name, operands) in enumerate(code):
        target = operands[0] if name in ("bra", "bra.uni") else ""
        starts = [k for k in labels.get(target, ()) if k <= end and target.startswith("$")]
        if starts:
            body = code[starts[-1] : end + 1]
            if all(any(re.match(p, x.name) for x in body) for p in patterns):
                found.append((len(body), starts[-1], body))
    return min(found)[2]


def summary(body):
    """[word, how often in a row] of instructions. A wait that only asks, whose answer is a number,
    is not one."""
    out = []
    for x, following in zip(body, [*body[1:], body[0]]):
        name = word(x.name)
        if name is None or name == "wait" and following.name.startswith("selp"):
            continue
        if out and out[-1][0] == name:
            out[-1][1] += 1
        else:
            out.append([name, 1])
    return out
