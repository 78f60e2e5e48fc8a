"""What nvcc emits for CUTLASS' examples for sm_100: makes data/cutlass.json, with which
test_third_sources.py compares.

`python tests/compiler/cutlass_programs.py --nvcc /usr/local/cuda/bin/nvcc [--ptx FOLDER]` needs
CUTLASS' sources (`pip install nvidia-cutlass`) and nvcc 13, and no GPU; it takes minutes. With
--ptx, PTX that is already in the folder is not made again. Only facts are kept: what the loop of
each role issues, in order, and instruction and matrix descriptors."""

import argparse
import importlib.metadata
import importlib.util
import json
import re
import subprocess
from pathlib import Path

import ptx_lanes

EXAMPLES = {
    "matmul": "70_blackwell_gemm/70_blackwell_fp16_gemm",
    "scales": "72_blackwell_narrow_precision_gemm/72a_blackwell_nvfp4_bf16_gemm",
    "grouped": "75_blackwell_grouped_gemm/75_blackwell_grouped_gemm",
    "attention": "77_blackwell_fmha/77_blackwell_fmha",
    "gradients": "77_blackwell_fmha/77_blackwell_fmha_bwd",
}
LOOPS = {  # of each role: names of instructions that its smallest loop has
    "multiplier": [r"tcgen05\.mma"],
    "producer": [r"cp\.async\.bulk\.tensor.*mbarrier"],
    "requests": [r"clusterlaunchcontrol\.try"],
    "epilogue": [r"tcgen05\.ld", r"cp\.async\.bulk\.tensor.*global\.shared"],
}
SOFTMAX = {
    "softmax": [r"tcgen05\.ld.*x32\.", r"tcgen05\.st.*x32\."],
    "correction": [r"tcgen05\.ld.*x16\.", r"tcgen05\.st.*x16\."],
}
ROLES = {
    "matmul": LOOPS,
    "scales": LOOPS,
    "grouped": LOOPS,
    "attention": {k: v for k, v in LOOPS.items() if k == "multiplier"} | SOFTMAX,
    "gradients": {k: v for k, v in LOOPS.items() if k == "multiplier"},
}
KERNELS = {  # parts of the names of the entry, where an example has several
    "attention": [
        "Sm100FmhaFwdKernel",
        "tupleIJiiiNS5_",
        "Li256EEENSC_ILi128EEESE_EEENS5",
        "NoMask",
    ],
    "gradients": ["Sm100FmhaBwdKernel", "SB_SB_SB", "NoMask"],
}


def entry(text, name):
    found = re.findall(r"\.entry (_ZN7cutlass13device_kernel\w*)", text)
    found = [x for x in found if all(part in x for part in KERNELS.get(name, ()))]
    return found[0]


def constant(code, name):
    """A register that is set once, to a number."""
    sets = [x.operands[1] for x in code if x.operands[:1] == [name]]
    return int(sets[0]) if len(sets) == 1 and re.fullmatch(r"-?\d+", sets[0]) else None


def facts(text, name):
    program = code, _, _ = ptx_lanes.parse(text, entry(text, name))
    found = {"loops": {}}
    for role, patterns in ROLES[name].items():
        try:
            found["loops"][role] = ptx_lanes.summary(ptx_lanes.innermost(program, *patterns))
        except ValueError:
            pass  # a program of static tiles has no requests
    products = {(x.name, constant(code, x.operands[3])) for x in code if "tcgen05.mma" in x.name}
    found["products"] = sorted(products, key=str)
    found["loads"] = sorted({x.name for x in code if re.match(r"tcgen05\.(ld|st)", x.name)})
    found["fences"] = sum(x.name.startswith("tcgen05.fence") for x in code)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--ptx", type=Path, required=True, help="where the PTX goes")
    options = parser.parse_args()
    root = (
        Path(importlib.util.find_spec("cutlass_library").submodule_search_locations[0]) / "source"
    )
    release = subprocess.run([options.nvcc, "--version"], capture_output=True, text=True).stdout
    data = {
        "cutlass": importlib.metadata.version("nvidia-cutlass"),
        "nvcc": re.search(r"V([\d.]+)", release)[1],
    }
    for name, example in EXAMPLES.items():
        path = options.ptx / f"{Path(example).name}.ptx"
        if not path.exists():
            include = [root / "include", root / "tools/util/include", root / "examples/common"]
            include.append((root / "examples" / example).parent)
            flags = ["-ptx", "-std=c++17", "-arch=sm_100a", "--expt-relaxed-constexpr", "-w"]
            flags += [f"-I{x}" for x in include] + ["-DCUTLASS_ARCH_MMA_SM100_SUPPORTED=1"]
            source = root / "examples" / f"{example}.cu"
            subprocess.run([options.nvcc, *flags, "-o", path, source], check=True)
        data[name] = facts(path.read_text(), name)
    text = json.dumps(data).replace(', "', ',\n"')
    (Path(__file__).parent / "data" / "cutlass.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
