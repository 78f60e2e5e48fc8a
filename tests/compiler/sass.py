"""What a compiler made of products of the tensor cores: PTX beside machine code.

`check(ptx, cubin)` returns a list of faults, empty if there are none:

- products that were lost: fewer tensor-core instructions of a kind in the machine code than in the
  PTX (where all of them are needed; `counts` gives both numbers).
- registers of A that a loop overwrites. A wgmma may read A from registers. If by the PTX they hold
  the same in every iteration of a loop around it, they do in the machine code, too: each of their
  definitions in the loop that reaches the instruction gives the same every time, a copy of what
  lies outside, say. Where one does not, another product got the registers.

- sums from before a loop whose operand the loop changes, which ptxas before 13.5 may compute anew.

Both texts become a list of instructions with the registers that each reads and writes. Loops are
natural loops of the flow graph; definitions are followed backwards from the operand. Instructions
are matched in order, those that look alike, if there are equally many. `blocks_assign_once`
looks at inline assembly alone."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

# ---- flow ----------------------------------------------------------------------------------------


class Instruction:
    def __init__(self, text, name, writes, reads, guard=None, target=None, ends=False):
        self.text, self.name = text, name
        self.writes, self.reads = writes, reads
        self.guard = guard  # a predicate: what it writes may then stay as it was
        self.target = target  # label of a branch
        self.ends = ends  # the next instruction does not follow it
        self.a = None  # registers of A of a product
        self.slot = None  # of a spill


class Flow:
    """Instructions, and labels with the number of the one after each."""

    def __init__(self, code, labels):
        self.code = code
        begins = sorted({0, *labels.values(), *(
            k + 1 for k, x in enumerate(code) if x.target or x.ends)} - {len(code)})  # fmt: skip
        self.ends = [*begins[1:], len(code)]
        self.begins = begins
        self.block_of = [b for b, (s, e) in enumerate(zip(begins, self.ends)) for _ in range(s, e)]
        self.after = [[] for _ in begins]
        for b, end in enumerate(self.ends):
            last = code[end - 1]
            if end < len(code) and (not last.ends or last.guard):
                self.after[b].append(b + 1)
            for label in last.target or ():
                if labels.get(label, len(code)) < len(code):
                    self.after[b].append(self.block_of[labels[label]])
        self.before = [[] for _ in begins]
        for b, following in enumerate(self.after):
            for c in following:
                self.before[c].append(b)
        self.defined = [{} for _ in begins]  # per block: register -> instructions that write it
        for k, x in enumerate(code):
            for r in x.writes:
                self.defined[self.block_of[k]].setdefault(r, []).append(k)
        self.loops = self.find_loops()
        self.same = {}

    def find_loops(self):
        """Blocks of each natural loop, larger ones first."""
        n = len(self.begins)
        order, seen = [], set()
        stack = [(0, iter(self.after[0]))] if n else []
        seen.add(0)
        while stack:
            b, rest = stack[-1]
            following = next((c for c in rest if c not in seen), None)
            if following is None:
                order.append(b)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(self.after[following])))
        order.reverse()
        every = (1 << n) - 1
        over = [every] * n  # bit mask of the blocks that dominate
        if n:
            over[0] = 1
        changed = True
        while changed:
            changed = False
            for b in order[1:]:
                new = every
                for p in self.before[b]:
                    if p in seen:
                        new &= over[p]
                new |= 1 << b
                changed |= new != over[b]
                over[b] = new
        loops = {}
        for b in order:
            for head in self.after[b]:
                if not over[b] >> head & 1:
                    continue
                body, todo = {head}, [b]
                while todo:
                    c = todo.pop()
                    if c not in body:
                        body.add(c)
                        todo += [p for p in self.before[c] if p in seen]
                loops.setdefault(head, set()).update(body)
        return sorted(map(frozenset, loops.values()), key=len, reverse=True)

    @functools.cache  # noqa: B019
    def definitions(self, register, at):
        """Numbers of the instructions whose value of the register may reach instruction `at`."""
        found, seen = set(), set()
        todo = [(self.block_of[at], at)]
        while todo:
            b, end = todo.pop()
            killed = False
            for k in reversed(self.defined[b].get(register, ())):
                if k >= end:
                    continue
                found.add(k)
                if not self.code[k].guard:
                    killed = True
                    break
            if killed:
                continue
            for p in self.before[b]:
                if p not in seen:
                    seen.add(p)
                    todo.append((p, self.ends[p]))
        return frozenset(found)

    def around(self, at):
        return [loop for loop in self.loops if self.block_of[at] in loop]

    def changes(self, registers, at, loop):
        """May what instruction `at` reads there differ from one iteration to the next?"""
        return any(
            self.gives_other(k, loop)
            for r in registers
            for k in self.definitions(r, at)
            if self.block_of[k] in loop
        )

    ANEW = re.compile(  # results that no operand tells
        r"(LD[GSM]?|LDGSTS|ATOM[GS]?|SYNCS|[HQIB]GMMA|VOTE|CS2R|UTM\w*|ld|atom|mbarrier|wgmma|elect"
        r"|activemask)(?![a-zA-Z])"
    )

    def gives_other(self, k, loop):
        key = k, loop
        if key not in self.same:
            self.same[key] = True  # if it leads to itself
            x = self.code[k]
            if x.slot:
                self.same[key] = any(
                    self.changes(y.reads, j, loop)
                    for j, y in enumerate(self.code)
                    if y.slot == x.slot and y.name.startswith("ST") and self.block_of[j] in loop
                )
            elif self.ANEW.match(x.name) and not re.match(r"ld\.(param|const)|CS2R.*SRZ", x.text):
                self.same[key] = True
            else:
                self.same[key] = self.changes(x.reads, k, loop)
        return self.same[key]


# ---- machine code --------------------------------------------------------------------------------


@functools.cache
def nvdisasm():
    """Path of nvdisasm: on PATH, in the wheel nvidia-cuda-nvdisasm, in a toolkit; or None."""
    found = [shutil.which("nvdisasm")]
    found += [Path(p) / "nvidia" / d / "bin" / "nvdisasm" for p in sys.path
              for d in ("cu13", "cuda_nvdisasm")]  # fmt: skip
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found += [Path(h) / "bin" / "nvdisasm" for h in homes if h]
    return next((str(p) for p in found if p and os.access(p, os.X_OK)), None)


def disassemble(cubin, *options):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [nvdisasm(), "-ndf", "-c", *options, f.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


PRODUCT = re.compile(r"[HIBQ]GMMA|[HIBD]MMA")
SILENT = re.compile(  # no register is written
    r"ST(?![A-Z]*2)|RED(?!UX)|BAR|BRA|BRX|EXIT|RET|CALL|NOP|MEMBAR|FENCE|WARP|DEPBAR|LDGSTS|BSYNC|BSSY"
    r"|UTMA|UBLK|CCTL|ERRBAR|USETMAXREG|UCGABAR|ACQBULK|LDGDEPBAR|R2UR|BREAK|YIELD|NANOSLEEP|PREEXIT"
)


def registers_from(first, n):
    """R24 and the n - 1 after it."""
    kind, number = re.fullmatch(r"(U?R)(\d+)", first).groups()
    return [f"{kind}{int(number) + k}" for k in range(n)]


def width(name, text):
    """32-bit registers of the result."""
    gmma = re.match(r"[HIBQ]GMMA(?:\.SP)?\.64x(\d+)x\d+\.(\w+)", name)
    if gmma:
        return int(gmma[1]) // (4 if gmma[2] == "F16" else 2)
    if PRODUCT.match(name):
        return 2 if name.endswith(".F16") else 4
    matrix = re.match(r"LDSM\..*\.([124])$", name)
    if matrix:
        return int(matrix[1])
    if ".128" in name:
        return 4
    wide = re.match(r"(U?IMAD\.WIDE|CS2R(?!\.32)|D[A-Z]+|.*\.64|.*\.F64)", name)
    return 2 if wide else 1


def split_operands(text):
    parts, depth, at = [], 0, 0
    for k, c in enumerate(text):
        depth += (c in "[({") - (c in "])}")
        if c == "," and not depth:
            parts.append(text[at:k].strip())
            at = k + 1
    return [*parts, text[at:].strip()] if text.strip() else []


def sass_instruction(text):
    guard, name, rest = re.match(r"(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*)", text, re.S).groups()
    operands = split_operands(rest)
    target = re.findall(r"\((\.L_x_\w+)\)", rest)
    words = re.compile(r"\b(U?[RP]\d+)\b")
    writes, reads = [], []
    first_read = 0
    if operands and not SILENT.match(name):
        m = re.match(r"(U?R\d+)\b", operands[0])
        if m:
            writes = registers_from(m[1], width(name, text))
            first_read = 1
        while first_read < len(operands) and re.fullmatch(r"U?P(\d|T)", operands[first_read]):
            writes += words.findall(operands[first_read])
            first_read += 1
            if first_read >= 2:
                break
        after = operands[first_read] if first_read < len(operands) and not writes else ""
        m = re.match(r"U?R\d+\b", after)
        if m:  # after predicates: SHFL.IDX PT, R4, ...
            writes += registers_from(m[0], width(name, text))
            first_read += 1
    elif name.startswith("R2UR"):
        writes, first_read = words.findall(operands[0]), 1
    for x in operands[first_read:]:
        for r in words.findall(x):
            reads.append(r)
            wide = re.search(rf"\b{r}\.64\b", x) or ".64" in name or "WIDE" in name
            if wide and "R" in r:
                reads += registers_from(r, 2)[1:]
            if name.startswith(("STL", "STS", "STG")) and ".128" in name:
                reads += registers_from(r, 4)[1:]
    kind = name.split(".")[0]
    if kind == "BSSY":
        target = []
    ends = kind in ("BRA", "EXIT", "RET", "BRX")
    x = Instruction(text, name, writes, reads, guard, target, ends)
    if PRODUCT.match(name):
        a = operands[1] if len(operands) > 1 else ""
        if "GMMA" in name and re.match(r"R\d+", a):
            x.a = registers_from(re.match(r"R\d+", a)[0], 4)
            x.reads += x.a
    if kind in ("STL", "LDL"):
        x.slot = re.search(r"\[.*\]", text)[0]
    return x


def sass_flow(text):
    """The flow of each function."""
    flows, code, labels = [], [], {}
    synced = []  # labels of BSSY, to which a BSYNC goes
    for line in text.splitlines():
        if re.match(r"\.text\.", line):
            code, labels, synced = [], {}, []
            flows.append((code, labels))
        m = re.match(r"(\.L_x_\w+):", line)
        if m:
            labels[m[1]] = len(code)
        m = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
        if m and flows:
            code.append(sass_instruction(m[1]))
            if m[1].startswith("BSSY"):
                synced += re.findall(r"\((\.L_x_\w+)\)", m[1])
    return [Flow(code, labels) for code, labels in flows if code]


# ---- PTX -----------------------------------------------------------------------------------------

PTX_SILENT = re.compile(
    r"(st|red|bar|barrier|fence|membar|bra|brx|ret|exit|trap|call|cp|prefetch|stmatrix|setmaxnreg"
    r"|nanosleep|griddepcontrol|multimem|discard)(?![a-z])|wgmma\.(fence|commit|wait)|mbarrier\.(init|"
    r"inval|arrive|expect)"
)


class Scope:
    def __init__(self, outer, number):
        self.outer, self.number, self.names = outer, number, set()

    def find(self, word):
        s = self
        while s:
            if word in s.names or re.sub(r"\d+$", "<", word) in s.names:
                return f"{word}@{s.number}"
            s = s.outer
        return None


def ptx_instruction(text, scope):
    guard, rest = re.match(r"(?:@!?([\w$%]+)\s+)?(.*)", text, re.S).groups()
    name, _, rest = rest.partition(" ") if " " in rest else (rest, "", "")
    operands = split_operands(rest)

    def regs(x):
        found = (scope.find(w) for w in re.findall(r"(?<![\w$%])[A-Za-z_$%][\w$%]*", x))
        return [r for r in found if r]

    silent = PTX_SILENT.match(name) and not name.startswith("bar.red")
    writes = [] if silent or not operands or operands[0][0] == "[" else regs(operands[0])
    reads = [r for x in operands[bool(writes) :] for r in regs(x)]
    target = None
    if name.startswith("bra"):
        target = [(operands[0], scope)]
    x = Instruction(text, name, writes, reads, guard and scope.find(guard), target,
                    name.split(".")[0] in ("bra", "brx", "ret", "exit", "trap"))  # fmt: skip
    if name.startswith("wgmma.mma_async"):
        x.reads += x.writes
        if operands[1][0] == "{":
            x.a = regs(operands[1])
    return x


def ptx_flow(ptx):
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    ptx = re.sub(r"^\s*\.(loc|file)\b.*$", "", ptx, flags=re.M)
    flows = []
    for m in re.finditer(r"\.(?:entry|func)\b[^{;]*\{", ptx):
        code, labels, scope, count, at = [], {}, Scope(None, 0), 0, m.end()
        while scope:
            at = re.compile(r"\s*").match(ptx, at).end()
            if ptx[at] in "{}":
                count += 1
                scope = Scope(scope, count) if ptx[at] == "{" else scope.outer
                at += 1
                continue
            label = re.compile(r"([\w$]+):(?!:)").match(ptx, at)
            if label:
                labels[label[1], scope] = len(code)
                at = label.end()
                continue
            end = ptx.index(";", at)
            text = re.sub(r"\s+", " ", ptx[at:end]).strip()
            at = end + 1
            if text.startswith(".reg"):
                declared = re.sub(r"^\.reg\s+\.\w+\s+", "", text)
                scope.names |= {re.sub(r"<\d+>", "<", x.strip()) for x in declared.split(",")}
            elif text and text[0] != ".":
                code.append(ptx_instruction(text, scope))
        for x in code:
            if x.target:
                (name, s), x.target = x.target[0], []
                while s and (name, s) not in labels:
                    s = s.outer
                x.target = [(name, s)] if s else []
        flows.append(Flow(code, labels))
    return flows


def blocks_assign_once(ptx):
    """Instructions of inline assembly that assign a register which another one of the same block
    assigned; accumulators of wgmma are read by each step, and labels may be passed again."""
    faults = []
    for block in re.findall(r"// begin inline asm(.*?)// end inline asm", ptx, re.S):
        seen = set()
        for text in re.split(r"[;\n]\s*|(?<=[{:])\s", block.replace("{ .reg", "\n.reg")):
            if text.count("{") < text.count("}"):
                text = text.strip().removesuffix("}")
            text = re.sub(r"^\w+:\s*", "", text.strip())
            if not text or text[0] in ".{}" or text.startswith("wgmma"):
                continue
            name, _, rest = re.sub(r"^@!?\w+\s+", "", text).partition(" ")
            operands = split_operands(rest)
            if PTX_SILENT.match(name) or not operands or operands[0][0] == "[":
                continue
            for r in re.findall(r"(?<![\w$%])[A-Za-z_%][\w%]*", operands[0]):
                if r in seen and r != "_":
                    faults.append(text)
                seen.add(r)
    return faults


# ---- the comparison ------------------------------------------------------------------------------


def kind_of(name):
    """What a product of PTX becomes on Hopper."""
    parts = name.split(".")
    narrow = {"e4m3": "Q", "e5m2": "Q", "s8": "I", "u8": "I", "b1": "B", "f64": "D"}  # fmt: skip
    letter = next((narrow[p] for p in parts if p in narrow), "H")
    if name.startswith("wgmma"):
        return letter + "GMMA"
    return ("H" if letter == "Q" else letter) + "MMA"


PTX_PRODUCT = re.compile(r"(?<![\w.])(wgmma\.mma_async\.\S+|w?mma\.(?:mma\.|sp\S*?\.)?sync\.\S+)")


def asked(ptx):
    """Names of the products of the PTX. Those of int4 and the like are calls on Hopper."""
    calls = re.compile(r"\.([su]4|xor)(\.|$)|\.m8n8k4\.(?!.*f64)")
    return [n for n in PTX_PRODUCT.findall(ptx) if not calls.search(n)]


def products(ptx):
    return len(asked(ptx))


def counts(ptx, text):
    """Per kind: products of the PTX, of the machine code."""
    found = {}
    for name in asked(ptx):
        found.setdefault(kind_of(name), [0, 0])[0] += 1
    for name in re.findall(r"\s([HIBQ]GMMA|[HIBD]MMA)\.", text):
        found.setdefault(name, [0, 0])[1] += 1
    return found


def look_of(x):
    """What PTX and machine code both say of a wgmma with A in registers: columns, types, whether B
    is transposed."""
    if x.name[0] == "w":
        of = re.match(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.\w+\.(\w+)", x.name)
        halves = of[2] in ("f16", "bf16")
        return of[1], of[2] == "bf16", halves and split_operands(x.text)[-1] == "1"
    columns = re.match(r"[HIBQ]GMMA(?:\.SP)?\.64x(\d+)x", x.name)[1]
    return columns, ".BF16" in x.name, ".tnspB" in x.text


def overwritten(ptx, text):
    """Texts of machine instructions whose A a loop overwrites."""

    def by_look(flows):
        found = {}
        for flow in flows:
            for k, x in enumerate(flow.code):
                if x.a:
                    changing = [flow.changes(x.a, k, loop) for loop in flow.around(k)]
                    found.setdefault(look_of(x), []).append((x.text, changing))
        return found

    faults, want = [], by_look(ptx_flow(ptx))
    for look, have in by_look(sass_flow(text)).items():
        asked = [changing for _, changing in want.get(look, ())]
        for n, (name, got) in enumerate(have):
            if len(asked) == len(have) and len(asked[n]) == len(got):
                bad = any(g and not w for g, w in zip(got, asked[n], strict=True))
            else:
                bad = any(got) and bool(asked) and not any(map(any, asked))
            if bad:
                faults.append(name)
    return faults


def stepped(ptx):
    """Sums with a constant that a loop uses while it changes the register they were computed from:
    ptxas before 13.5 may compute them in the loop, from what the register holds by then."""
    found = []
    for flow in ptx_flow(ptx):
        for k, x in enumerate(flow.code):
            if not re.match(r"add\.s(32|64) .*, -?\d+$", x.text) or x.reads == x.writes:
                continue
            for loop in flow.loops:
                inside = [y for b in loop for y in flow.code[flow.begins[b] : flow.ends[b]]]
                if flow.block_of[k] not in loop and any(x.reads[0] in y.writes for y in inside):
                    found += [x.text for y in inside if x.writes[0] in y.reads][:1]
    return found


def check(ptx, cubin):
    faults = [f"a second assignment: {x}" for x in blocks_assign_once(ptx)]
    if tuple(map(int, re.search(r"release (\d+)\.(\d+)", ptx).groups())) < (13, 5):
        faults += [f"a loop changes what is added in {x}" for x in stepped(ptx)]
    if not asked(ptx):
        return faults
    text = disassemble(cubin)
    faults += [f"{kind}: {n} in PTX, {made} in the machine code"
               for kind, (n, made) in counts(ptx, text).items() if made < n]  # fmt: skip
    return faults + [f"a loop overwrites A of {x}" for x in overwritten(ptx, text)]
