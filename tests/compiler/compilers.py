"""What compilers make of kernels: each version of NVRTC in a process of its own.

    python tests/compiler/compilers.py fetch DIR    # VERSIONS from PyPI, a folder each
    python tests/compiler/compilers.py check SUITE ...  # with the NVRTC of this process
    python tests/compiler/compilers.py check random --count 300 --first 0

`check` compiles the kernels of suites (`reproductions`, `kernels`, `ops`, `examples`, `random`),
without the disk cache, and looks at each by sass.check: no product is lost, no loop overwrites
registers of A, no inline assembly assigns a register twice. `PALLAS_MGPU_TEST_NVRTC` lists folders
with compilers for the tests (test_compilers.py)."""

import argparse
import concurrent.futures
import contextlib
import functools
import io
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import sass

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))  # fuzz
# the last ones of CUDA 12 and of torch 2.11, and what pip gives
VERSIONS = {"12.9.86": "nvidia-cuda-nvrtc-cu12==12.9.86", "13.0.88": "nvidia-cuda-nvrtc==13.0.88",
            "newest": "nvidia-cuda-nvrtc"}  # fmt: skip
PLACES = "PALLAS_MGPU_TEST_NVRTC"


def fetch(into):
    for name, requirement in VERSIONS.items():
        to = Path(into) / name
        if list(to.rglob("libnvrtc.so.*")):
            continue
        to.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", to]
        subprocess.run([*command, requirement], check=True)
        for wheel in to.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(to)
            wheel.unlink()


@functools.cache
def libraries():
    """name -> path of libnvrtc, for each folder of PALLAS_MGPU_TEST_NVRTC or below it; "default":
    the one that is found without a word."""
    found = {"default": None}
    for place in filter(None, os.environ.get(PLACES, "").split(os.pathsep)):
        for path in sorted(Path(place).rglob("libnvrtc.so.1?")):
            relative = path.relative_to(place).parts
            found[relative[0] if len(relative) > 1 else path.name] = str(path)
    return found


def run(library, *arguments):
    """`check` in another process: whether it was well, and what it said."""
    env = {**os.environ, "PYTHONPATH": str(HERE.parent.parent), "PALLAS_MGPU_NO_CACHE": "1"}
    if library:
        env["PALLAS_MGPU_NVRTC"] = library
    command = [sys.executable, str(HERE / "compilers.py"), "check", *arguments]
    p = subprocess.run(command, env=env, capture_output=True, text=True)
    return p.returncode == 0, p.stdout + p.stderr


# ---- suites: name -> function that lowers --------------------------------------------------------


def reproductions():
    from compiler_kernels import REPRODUCTIONS, lower

    return {name: functools.partial(lower, make) for name, make in REPRODUCTIONS.items()}


def kernels():
    from compiler_kernels import CASES, lower

    return {name: functools.partial(lower, make) for name, make in CASES.items()}


def ops():
    sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))
    from resources import KERNELS

    return KERNELS


def examples():
    """What the examples call is lowered, too."""
    import pallas_mgpu as plgpu

    found = {}
    lower = type(plgpu.kernel(lambda o: None, out_type=())).lower
    for path in sorted((HERE.parent.parent / "examples").glob("*.py")):
        if "plgpu.spmd" in path.read_text():
            continue  # kernels on meshes; tests/distributed compiles them
        seen = []

        def kernel(*args, real=plgpu.kernel, seen=seen, **options):
            made = real(*args, **options)

            def call(*arrays, **more):
                seen.append(functools.partial(lower, made, *arrays))
                return made(*arrays, **more)

            if not hasattr(made, "lower"):  # a decorator
                return lambda body: kernel(body, *args, **options)
            return call

        real, plgpu.kernel = plgpu.kernel, kernel
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                runpy.run_path(str(path), run_name="__main__")
        finally:
            plgpu.kernel = real
        found.update({f"{path.name} {k}": x for k, x in enumerate(seen)})
    return found


PRODUCTS = {"wgmma", "wgmma of others", "a in registers", "dot", "mma", "acc store"}


def random(first, count):
    """Random kernels (fuzz/) that multiply by wgmma, or by mma."""
    from fuzz import generate, kernels

    found, seed = {}, first
    while len(found) < count:
        program = generate.generate(seed)
        if program.features & PRODUCTS:
            case = kernels.Case(program.source())
            found[f"seed {seed}"] = functools.partial(lower_case, case)
        seed += 1
    return found


def lower_case(case):
    from fuzz.kernels import GAPS

    try:
        return case.kernel().lower(*case.operands)
    except (NotImplementedError, ValueError) as e:
        if not GAPS.search(str(e)):
            raise
        return None


SUITES = {f.__name__: f for f in (reproductions, kernels, ops, examples)}

# ---- check ---------------------------------------------------------------------------------------


def faults_of(name, lower):
    """The faults, and how many products it has."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low = lower()
    if low is None:
        return name, [], 0
    try:
        cubin, ptx = low.cubin(), low.as_text("ptx")
    except RuntimeError as e:
        return name, [str(e)], 0
    return name, sass.check(ptx, cubin), sass.products(ptx)


def check(suites, count, first, every):
    todo = {}
    for suite in suites:
        todo |= random(first, count) if suite == "random" else SUITES[suite]()
    todo = dict(list(todo.items())[::every])
    bad = products = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, faults, n in pool.map(lambda x: faults_of(*x), todo.items()):
            products += n
            bad += bool(faults)
            for fault in faults:
                print(f"{name}: {fault}", flush=True)
    print(f"{len(todo)} kernels, {products} products, {bad} kernels with faults")
    return not bad


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("do", choices=("fetch", "check"))
    parser.add_argument("what", nargs="+")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="check one kernel of so many")
    given = parser.parse_args()
    if given.do == "fetch":
        return fetch(given.what[0])
    os.environ.setdefault("PALLAS_MGPU_NO_CACHE", "1")
    return sys.exit(not check(given.what, given.count, given.first, given.every))


if __name__ == "__main__":
    main()
