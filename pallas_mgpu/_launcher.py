"""The launcher of an exported kernel: C11 for the CUDA driver, with its header.

It does at each launch what the package does: sizes that follow from those of the call, tensor maps
of the arrays, the grid, the attributes. All numbers of one kernel stand in its text."""

import re
import textwrap

# of C, and of C++, from which the header may be included
_KEYWORDS = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t"
    " char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr"
    " constinit continue decltype default delete do double dynamic_cast else enum explicit export"
    " extern false float for friend goto if inline int long mutable namespace new noexcept not"
    " not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires"
    " restrict return short signed sizeof static static_assert static_cast struct switch template"
    " this thread_local throw true try typedef typeid typename union unsigned using virtual void"
    " volatile wchar_t while xor xor_eq".split()
)
_MOST = 2**31 - 2  # that a size may be, as of calls from Python
_TYPES = {"U": "UINT", "I": "INT", "F": "FLOAT", "BF": "BFLOAT"}
_PORTABLE_CLUSTER = 8
_MOST_BLOCKS = 2**31 - 1, 65535, 65535
_COMBINED = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "floordiv": "floor_div({}, {})",
    "mod": "{0} - floor_div({0}, {1}) * {1}",
    "min": "{0} < {1} ? {0} : {1}",
    "max": "{0} > {1} ? {0} : {1}",
}


def _names(wanted, taken):
    """An identifier of C for each, all different, and none that is taken."""
    taken, out = {*_KEYWORDS, *taken}, []
    for k, name in enumerate(wanted):
        name = re.sub(r"\W", "_", name or "", flags=re.ASCII) or f"arg{k}"
        name = f"_{name}" if name[0].isdigit() else name
        while name in taken:
            name += "_"
        taken.add(name)
        out.append(name)
    return out


def _wanted(info):
    """What arrays, and sizes that a caller gives, are called in Python."""
    sizes = [rule[-1] or "size" for rule in info["size_rules"] if rule[0] == "extent"]
    return [name for name, _ in info["given"]] + sizes


class _Launcher:
    """names: identifiers for `_wanted`."""

    def __init__(self, name, info, n_results, names):
        self.name, self.info = name, info
        self.n_params, self.operands = len(info["params"]), info["operands"]
        self.n_results = n_results
        self.rules = info["size_rules"]
        given = [k for k, r in enumerate(self.rules) if r[0] == "extent"]
        self.arrays = names[: self.n_params]
        self.given = dict(zip(given, names[self.n_params :]))  # sizes that the caller gives

    def size(self, number):
        """The variable that has the size of this number."""
        return self.given.get(number - 1, f"size{number}")

    def parameters(self):
        sizes = [f"int64_t {n}" for n in self.given.values()]
        arrays = [f"CUdeviceptr {a}" for a in self.arrays]
        return ", ".join([f"const {self.name}_kernel *k", "CUstream stream", *arrays, *sizes])

    def prototype(self):
        return _wrapped(f"CUresult {self.name}_launch({self.parameters()})")

    # ---- the header

    def about_array(self, k):
        (dtype, shape, align, same), extents = self.info["params"][k], self.info["extents"][k]
        strides = self.info["given"][k][1]
        dims = ", ".join(self.size(e) if e else str(n) for n, e in zip(shape, extents))
        kind = "operand" if k < self.operands else "output"
        if k >= self.operands + self.n_results:
            kind = "memory that the kernel needs"
        text = f"{self.arrays[k]}: {kind}, {dtype} [{dims}]"
        if strides:
            text += f" of strides {list(strides)} in elements"
        if align > 1:
            text += f", at an address divisible by {align}"
        if same >= 0:
            text += f"; it begins as {self.arrays[same]}: give that address, or copy it first"
        return text + "."

    def about_size(self, rule, name):
        _, array, dim, least, most, multiple, _ = rule
        text = f"{name}: dimension {dim} of {self.arrays[array]}, {least} to {most}"
        return text + (f", a multiple of {multiple}." if multiple > 1 else ".")

    def header(self):
        name, info = self.name, self.info
        about = [self.about_array(k) for k in range(self.n_params)]
        about += [self.about_size(self.rules[k], n) for k, n in self.given.items()]
        once = ""
        if info["counters"]:
            once = (
                " The kernel counts in memory of k: launches that may run at the same time need"
                " kernels loaded once for each."
            )
        comment = _comment(
            f"Kernel {info['entry']} for {info['target']}: see {name}.c. Arrays are row-major in"
            " memory of the GPU. All functions work in the current context of the CUDA driver, and"
            " return its error code.",
            f"Link with -lcuda.{once}",
            *about,
        )
        fields = ["CUmodule module;", "CUfunction function;"]
        fields += ["CUdeviceptr counters;"] if info["counters"] else []
        fields += ["unsigned most_blocks;"] if info["shares_grid"] else []
        guard = f"{name.upper()}_H"
        body = "\n".join(f"  {f}" for f in fields)
        return f"""{comment}
#ifndef {guard}
#define {guard}

#include <cuda.h>
#include <stdint.h>

typedef struct {name}_kernel {{
{body}
}} {name}_kernel;

#ifdef __cplusplus
extern "C" {{
#endif

/* image: the contents of {name}.cubin. */
CUresult {name}_load({name}_kernel *k, const void *image);
/* CUDA_ERROR_INVALID_VALUE, too, for an address or a size that does not fit. */
{self.prototype()};
CUresult {name}_unload({name}_kernel *k);

#ifdef __cplusplus
}}
#endif

#endif
"""

    # ---- the source

    def load(self):
        name, info = self.name, self.info
        out = [
            f"CUresult {name}_load({name}_kernel *k, const void *image) {{",
            "  memset(k, 0, sizeof *k);",
            "  CUresult r = cuModuleLoadData(&k->module, image);",
            f'  if (!r) r = cuModuleGetFunction(&k->function, k->module, "{info["entry"]}");',
        ]

        def attribute(which, value):
            out.append("  if (!r)")
            out.append(
                f"    r = cuFuncSetAttribute(k->function, CU_FUNC_ATTRIBUTE_{which}, {value});"
            )

        if info["smem_bytes"]:
            attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", info["smem_bytes"])
        if _product(info["cluster"]) > _PORTABLE_CLUSTER:
            attribute("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)
        if info["counters"]:
            words = info["counters"] + 1
            out.append(f"  if (!r) r = cuMemAlloc(&k->counters, {4 * words});")
            out.append(f"  if (!r) r = cuMemsetD32(k->counters, 0, {words});")
        if info["shares_grid"]:
            out += self.most_blocks()
        out += [f"  if (r) {name}_unload(k);", "  return r;", "}"]
        return out

    def most_blocks(self):
        """As many clusters as run at the same time: more would find nothing left to do."""
        info, cluster = self.info, _product(self.info["cluster"])
        out = ["  int n = 0;"]
        if cluster > 1:
            out += [
                "  CUlaunchAttribute attributes[2];",
                "  const CUlaunchConfig c = configuration(attributes, NULL, "
                f"{', '.join(map(str, info['grid']))});",
                "  if (!r) r = cuOccupancyMaxActiveClusters(&n, k->function, &c);",
            ]
        else:
            out += [
                "  CUdevice device;",
                "  int sms = 0;",
                "  if (!r) r = cuCtxGetDevice(&device);",
                "  if (!r)",
                "    r = cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,",
                "                             device);",
                "  if (!r)",
                "    r = cuOccupancyMaxActiveBlocksPerMultiprocessor(&n, k->function, "
                f"{info['block']}, {info['smem_bytes']});",
                "  n *= sms;",
            ]
        out.append(f"  k->most_blocks = (unsigned)n * {info['cluster'][0]};")
        return out

    def configuration(self):
        """A function that describes a launch, but for its parameters."""
        info, cluster = self.info, self.info["cluster"]
        out = [
            "/* attributes: room for 2. */",
            "static CUlaunchConfig configuration(CUlaunchAttribute *attributes, CUstream stream,"
            " unsigned x,",
            "                                    unsigned y, unsigned z) {",
            "  CUlaunchConfig c;",
            "  memset(&c, 0, sizeof c);",
            "  memset(attributes, 0, 2 * sizeof *attributes);",
            "  c.gridDimX = x;",
            "  c.gridDimY = y;",
            "  c.gridDimZ = z;",
            f"  c.blockDimX = {info['block']};",
            "  c.blockDimY = c.blockDimZ = 1;",
            f"  c.sharedMemBytes = {info['smem_bytes']};",
            "  c.hStream = stream;",
            "  c.attrs = attributes;",
        ]
        if _product(cluster) > 1:
            out.append("  attributes[c.numAttrs].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;")
            out += [
                f"  attributes[c.numAttrs].value.clusterDim.{d} = {n};"
                for d, n in zip("xyz", cluster)
            ]
            out.append("  c.numAttrs++;")
        if info["pdl"]:
            out += [
                "  attributes[c.numAttrs].id ="
                " CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;",
                "  attributes[c.numAttrs++].value.programmaticStreamSerializationAllowed = 1;",
            ]
        return [*out, "  return c;", "}"]

    def check(self):
        """Conditions under which a launch is refused."""
        bad = [
            f"{a} % {align}"
            for a, (_, _, align, _) in zip(self.arrays, self.info["params"])
            if align > 1
        ]
        for k, n in self.given.items():
            _, _, _, least, most, multiple, _ = self.rules[k]
            bad += [f"{n} < {least}", f"{n} > {most}"]
            bad += [f"{n} % {multiple}"] if multiple > 1 else []
        return bad

    def check_of_size(self, k):
        """That a size computed from others is one that the package would accept."""
        how, _, _, least, most, *_ = self.rules[k]
        of_array = any(k + 1 in extents for extents in self.info["extents"])
        bad = [f"size{k + 1} < {1 if of_array else -_MOST}"]
        if least > (0 if of_array else -_MOST):
            bad = []
        if most >= _MOST:
            bad.append(f"size{k + 1} > {_MOST}")
        if not bad:
            return []
        return _statement(f"  if ({' || '.join(bad)})", "    return CUDA_ERROR_INVALID_VALUE;")

    def sizes(self):
        out = []
        for k, (how, a, b, *_) in enumerate(self.rules):
            if how == "number":
                out.append(f"  const int64_t size{k + 1} = {a};")
            elif how != "extent":
                value = _COMBINED[how].format(self.size(a), self.size(b))
                out.append(f"  const int64_t size{k + 1} = {value};")
                out += self.check_of_size(k)
        used = {p for kind, p, _ in self.info["args"] if kind == "size"}
        return out + [f"  int32_t value{p} = (int32_t){self.size(p)};" for p in sorted(used)]

    def tensor_map(self, at):
        m = self.info["maps"][at]
        letters, bits = re.fullmatch(r"([A-Z]+)(\d+)", m["element"]).groups()
        dims = ", ".join(
            f"(cuuint64_t){self.size(e)}" if e else str(n) for n, e in zip(m["dim"], m["extent"])
        )
        strides = ", ".join(map(str, m["stride"][1:])) or "0"
        swizzle = f"{m['swizzle']}B" if m["swizzle"] else "NONE"
        return [
            "  if (!r) {",
            f"    const cuuint64_t dims[] = {{{dims}}}, strides[] = {{{strides}}};",
            f"    const cuuint32_t box[] = {{{', '.join(map(str, m['box']))}}};",
            f"    r = encode(&maps[{at}], CU_TENSOR_MAP_DATA_TYPE_{_TYPES[letters]}{bits},"
            f" {len(m['dim'])}, {self.arrays[m['param']]},",
            f"               dims, strides, box, CU_TENSOR_MAP_SWIZZLE_{swizzle});",
            "  }",
        ]

    def grid(self):
        """Statements that leave the blocks in grid[]."""
        info = self.info
        if not any(info["grid_extents"]):
            blocks = [str(n) for n in info["grid"]]
            out = [f"  unsigned grid[3] = {{{', '.join(blocks)}}};"]
        else:
            axes = [[], [], []]
            n = len(info["grid_sizes"])
            for k, (points, e) in enumerate(zip(info["grid_sizes"], info["grid_extents"])):
                axis = 0 if info["folds_grid"] else min(n - 1 - k, 2)
                axes[axis].append(self.size(e) if e else str(points))
            terms = [" * ".join([*a, str(c)]) for a, c in zip(axes, info["cluster"])]
            out = [f"  const int64_t blocks[3] = {{{', '.join(terms)}}};"]
            limits = " || ".join(
                f"blocks[{d}] < 1 || blocks[{d}] > {most}" for d, most in enumerate(_MOST_BLOCKS)
            )
            out += _statement(f"  if ({limits})", "    return CUDA_ERROR_INVALID_VALUE;")
            out.append(
                "  unsigned grid[3] = {(unsigned)blocks[0], (unsigned)blocks[1],"
                " (unsigned)blocks[2]};"
            )
        if info["shares_grid"]:
            out.append("  if (grid[0] > k->most_blocks) grid[0] = k->most_blocks;")
        return out

    def launch(self):
        info = self.info
        out = [f"{self.prototype()} {{"]
        bad = self.check()
        if bad:
            out += _statement(f"  if ({' || '.join(bad)})", "    return CUDA_ERROR_INVALID_VALUE;")
        out += self.sizes()
        if info["maps"]:
            out += [f"  CUtensorMap maps[{len(info['maps'])}];", "  CUresult r = CUDA_SUCCESS;"]
            for at in range(len(info["maps"])):
                out += self.tensor_map(at)
            out.append("  if (r) return r;")
        out += self.grid()
        expression = {
            "tensor_map": lambda param, at: f"&maps[{at}]",
            "pointer": lambda param, at: f"&{self.arrays[param]}",
            "size": lambda param, at: f"&value{param}",
            "counters": lambda param, at: "(void *)&k->counters",
        }
        params = [expression[kind](param, at) for kind, param, at in info["args"]]
        out += [
            "  CUlaunchAttribute attributes[2];",
            "  const CUlaunchConfig c = configuration(attributes, stream, grid[0], grid[1],"
            " grid[2]);",
            *_wrapped(f"  void *params[] = {{{', '.join(params)}}};").split("\n"),
            *self.cleared(),
            "  return cuLaunchKernelEx(&c, k->function, params, NULL);",
            "}",
        ]
        return out

    def cleared(self):
        """Counters that the kernel does not leave at 0."""
        if not (self.info["counters"] and self.info["clears_counters"]):
            return []
        bytes_of = 4 * (self.info["counters"] + 1)
        return [
            f"  const CUresult cleared = cuMemsetD8Async(k->counters, 0, {bytes_of}, stream);",
            "  if (cleared) return cleared;",
        ]

    def unload(self):
        name = self.name
        out = [
            f"CUresult {name}_unload({name}_kernel *k) {{",
            "  const CUresult r = k->module ? cuModuleUnload(k->module) : CUDA_SUCCESS;",
        ]
        if self.info["counters"]:
            out.append("  if (k->counters) cuMemFree(k->counters);")
        return [*out, "  memset(k, 0, sizeof *k);", "  return r;", "}"]

    def source(self):
        name = self.name
        comment = _comment(
            f"Loads {name}.cubin and launches its kernel. Written by pallas_mgpu from the lowered"
            " kernel; the tensor maps, the shared memory and the grid are those that this cubin"
            " expects, so the two belong together."
        )
        parts = [[comment, f'#include "{name}.h"', "", "#include <string.h>"]]
        if any(how in ("floordiv", "mod") for how, *_ in self.rules):
            parts.append(_FLOOR_DIV)
        if self.info["maps"]:
            parts.append(_ENCODE)
        parts += [self.configuration(), self.load(), self.launch(), self.unload()]
        return "\n\n".join("\n".join(p) for p in parts) + "\n"


_FLOOR_DIV = [
    "static int64_t floor_div(int64_t a, int64_t b) {",
    "  return b ? a / b - (a % b && (a < 0) != (b < 0)) : 0;",
    "}",
]
_ENCODE = [
    "static CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,",
    "                       CUdeviceptr array, const cuuint64_t *dims, const cuuint64_t *strides,",
    "                       const cuuint32_t *box, CUtensorMapSwizzle swizzle) {",
    "  static const cuuint32_t ones[] = {1, 1, 1, 1, 1};",
    "  return cuTensorMapEncodeTiled(map, type, rank, (void *)(uintptr_t)array, dims, strides,",
    "                                box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,",
    "                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,",
    "                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);",
    "}",
]


def _product(x):
    return x[0] * x[1] * x[2]


def _wrapped(text, width=100):
    """Of C, broken after commas and before ||; later lines are indented by four."""
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    lines = [""]
    for word in re.split(r"(?<=,) |(?= \|\|)", text):
        joined = (
            f"{lines[-1]} {word}" if lines[-1] and not word.startswith(" ") else lines[-1] + word
        )
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(indent + word.lstrip())
    return "\n".join(lines)


def _statement(condition, then):
    return [*_wrapped(condition).split("\n"), then]


def _comment(*paragraphs):
    """A comment of C, 100 columns wide; a line or more for each paragraph."""
    lines = []
    for p in paragraphs:
        lines += textwrap.wrap(p, 96)
    return "/* " + "\n * ".join(lines) + " */"


def launcher(name, info, n_results):
    """(header, source) for a program that `Graph.cuda` describes as `info`."""
    wanted = _wanted(info)
    no_words = _Launcher(name, info, n_results, [f"${k}" for k in range(len(wanted))])
    taken = set(re.findall(r"\b[A-Za-z_]\w*", "\n".join(no_words.launch())))
    x = _Launcher(name, info, n_results, _names(wanted, taken))
    return x.header(), x.source()
