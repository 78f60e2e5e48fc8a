"""The machine code that compilers make of products: nothing is lost, nothing is overwritten.

Each version of NVRTC below the folders of PALLAS_MGPU_TEST_NVRTC, and the one that is found
without it. `.ci/run` fetches them (compilers.py fetch)."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compiler_kernels
import numpy as np
import pytest
import sass
from compilers import PLACES, SUITES, libraries, run
from selection import only_long

import pallas_mgpu as plgpu
from pallas_mgpu import _compilers, _core, lax, pl
from pallas_mgpu import numpy as jnp

EVERY = {**compiler_kernels.REPRODUCTIONS, **compiler_kernels.CASES}
needs_nvdisasm = pytest.mark.skipif(
    not sass.nvdisasm(), reason="nvdisasm was found neither on PATH nor in a wheel or a toolkit"
)
F16, F32 = np.float16, np.float32


def checked(library, *suites):
    well, said = run(libraries()[library], *suites)
    print(said)
    assert well, said
    kernels, products = map(int, re.search(r"(\d+) kernels, (\d+) products", said).groups())
    assert products > kernels > 0, said


@needs_nvdisasm
@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize(
    "suite",
    only_long(["reproductions", "kernels --every 5", "kernels"], "reproductions", rare=["kernels"]),
)
def test_kernels(library, suite):
    """The kernels that showed the bugs, and their neighbours."""
    checked(library, *suite.split())


@needs_nvdisasm
@pytest.mark.skipif(not os.environ.get(PLACES), reason=f"{PLACES} names no compilers")
@pytest.mark.parametrize("library", libraries())
@pytest.mark.parametrize(
    "suite",
    only_long(["examples", "ops --every 5", "ops"], "examples", rare=["ops"]),
)
def test_ops_and_examples(library, suite):
    checked(library, *suite.split())


@pytest.mark.parametrize("way", ["interpret", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.filterwarnings("ignore:.*is converted from layout")
def test_results(name, way):
    put = plgpu.device_put if way == "cuda" else np.asarray
    assert compiler_kernels.run_on(EVERY[name], put) < 2e-3


# ---- what is held ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*is converted from layout")
def test_what_is_held():
    """A that is in registers and the same in every iteration, wherever it is computed; no other
    one. Where loops load B, such an A goes to shared memory (passes/stage.c), and nothing is held:
    "branch", "nested loops", "three products", "128 rows"."""
    held = {
        *("overwritten", "computed in the loop", "loaded in the loop", "in branches", "carried"),
        *("constant", "int8 in registers", "float8 in registers", "stored accumulator"),
    }
    texts = {name: compiler_kernels.lower(make).as_text("cuda") for name, make in EVERY.items()}
    assert {name for name, text in texts.items() if "hold_operand<u32" in text} == held


def test_ops_hold_nothing():
    for name, lower in SUITES["ops"]().items():
        if "matmul" in name or "attention" in name:
            assert "hold_operand" not in lower().as_text("cuda"), name


def test_inline_code_holds_what_it_multiplies():
    layout = plgpu.Layout.WGMMA

    def text(source):
        result = plgpu.ShapeDtypeStruct((64, 64), F16, layout)
        f = plgpu.inline_cuda(source, arg_types=layout, return_type=result)

        def body(x, o):
            a = plgpu.load(x, layout=layout, optimized=False)
            o[...] = lax.fori_loop(0, 8, lambda j, acc: acc + f(a), jnp.zeros((64, 64), F16))

        out = plgpu.ShapeDtypeStruct((64, 64), F16)
        return plgpu.kernel(body, out_type=out).lower(np.zeros((64, 64), F16)).as_text("cuda")

    copy = "for (int k = 0; k < 32; k++) r0[k] = a0[k];"
    assert "hold_operand" not in text(copy)
    assert re.search(r"^ +hold_operand<f16, 32>\(\w+\);", text(f"{copy} // wgmma"), re.M)


# ---- products that a compiler loses ------------------------------------------------------------


def lost_text(k_steps=4):
    """A statement as it was printed once, with the registers of each step used again, of which
    ptxas 13.3 to 13.5 makes half the products."""
    d = ",".join(f"%{k}" for k in range(32))
    steps = []
    for k in range(k_steps):
        of_a, of_b = ("%32", "%34") if not k else ("t", "t")
        p = {0: "setp.ne.b32 p, 0, 0; ", 1: "setp.eq.b32 p, 0, 0; "}.get(k, "")
        a = f"add.u32 t, %32, {2 * k}; " if k else ""
        b = f"add.u32 t, %34, {128 * k}; " if k else ""
        steps.append(
            f"{p}{a}mov.b64 ma, {{{of_a}, %33}}; {b}mov.b64 mb, {{{of_b}, %35}}; "
            f"wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {{{d}}}, ma, mb, p, 1, 1, 0, 1;"
        )
    outs = ", ".join(f'"=f"(r0[{k}])' for k in range(32))
    asm = ".reg .pred p; .reg .b64 ma, mb; .reg .b32 t; wgmma.fence.sync.aligned; "
    return f"""u32 a = wgmma_address(a0, 16), b = wgmma_address(a1, 16);
      asm volatile("{{ {asm}{" ".join(steps)} }}" : {outs}
                   : "r"(a), "r"(0x40000040u), "r"(b), "r"(0x40000040u) : "memory");
      wgmma_commit(); wgmma_wait<0>();"""


def lost():
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out = plgpu.ShapeDtypeStruct((64, 64), F32, plgpu.Layout.WGMMA)
    f = plgpu.inline_cuda(lost_text(), arg_types=[plgpu.RefType(tiled)] * 2, return_type=out)

    def body(a, b, o, sa, sb):
        sa[...] = a[...]
        sb[...] = b[...]
        plgpu.commit_smem()
        o[...] = f(sa, sb)

    scratch = [plgpu.SMEM((64, 64), F16, transforms=tiled)] * 2
    out = plgpu.ShapeDtypeStruct((64, 64), F32)
    x = np.zeros((64, 64), F16)
    return plgpu.kernel(body, out_type=out, scratch_types=scratch), (x, x)


@needs_nvdisasm
def test_lost_products_are_an_error(tmp_path, monkeypatch):
    """The real bug, where the compiler has it; nothing goes to the cache, and what comes next
    works."""
    monkeypatch.setenv("PALLAS_MGPU_CACHE_DIR", str(tmp_path))
    kernel, args = lost()
    low = kernel.lower(*args)
    for _ in range(2):
        try:
            low.cubin()
        except plgpu.CompileError as e:
            told = (
                r"NVRTC \S+ lost .* of kernel body_kernel: (\d+) of its products "
                r"must become HGMMA, and the machine code has (\d+)"
            )
            found = re.search(told, str(e))
            assert found and found[1] == "4" and int(found[2]) < 4, e
            assert "13.2" in str(e) and "PALLAS_MGPU_NVRTC" in str(e)
            assert not list(tmp_path.glob("*.cubin"))
        else:
            assert sass.counts(low.as_text("ptx"), sass.disassemble(low.cubin()))["HGMMA"] == [4, 4]
    x = np.zeros((64, 64), F16)
    assert compiler_kernels.lost(64, 64, 64)[0].lower(x, x).cubin()


def mma(dtype, k, target=None):
    def body(a, b, c, o):
        o[...] = plgpu.mma(c[...], a[...], b[...])

    acc = np.int32 if dtype in (np.int8, np.uint8) else F32
    spec = [plgpu.ShapeDtypeStruct(d, t) for d, t in
            (((64, k), dtype), ((k, 16), dtype), ((64, 16), acc))]  # fmt: skip
    out = plgpu.ShapeDtypeStruct((64, 16), acc)
    return plgpu.kernel(body, out_type=out).lower(*spec, target=target)


KINDS = {
    "HGMMA": lambda: compiler_kernels.lower(EVERY["lost 64 x 64 x 64"]),
    "HGMMA, A in registers": lambda: compiler_kernels.lower(EVERY["overwritten"]),
    "QGMMA": lambda: compiler_kernels.lower(EVERY["float8"]),
    "IGMMA": lambda: compiler_kernels.lower(EVERY["int8"]),
    "HMMA": lambda: mma(F16, 64),
    "HMMA, tf32": lambda: mma(F32, 64),
    "QMMA": lambda: mma(jnp.float8_e4m3fn, 64, "sm_89"),
    "QMMA, sm_120a": lambda: mma(jnp.float8_e5m2, 64, "sm_120a"),
    "IMMA": lambda: mma(np.int8, 64),
}


@needs_nvdisasm
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:.*through shared memory")
def test_every_missing_instruction_is_found(name):
    """One product of the machine code becomes a NOP: that is seen, and told."""
    low = KINDS[name]()
    kind = name.partition(",")[0]
    cubin, ptx = bytearray(low.cubin()), low.as_text("ptx")
    _core.check_products(ptx, bytes(cubin))
    text = sass.disassemble(bytes(cubin), "-hex")
    words = re.findall(rf"\s{kind}\.[^\n]*/\* 0x(\w+) \*/\n\s+/\* 0x(\w+) \*/", text)
    assert len(words) >= 4
    for low_word, high_word in words:
        one = bytes.fromhex(low_word)[::-1] + bytes.fromhex(high_word)[::-1]
        at = cubin.index(one)
        broken = bytearray(cubin)
        broken[at : at + 16] = bytes.fromhex("1879000000000000" + "0000000000c00f00")
        with pytest.raises(
            plgpu.CompileError, match=rf"{len(words)} of .* {kind}, .* {len(words) - 1}\."
        ):
            _core.check_products(ptx, bytes(broken))
    for bad in (b"", bytes(cubin[:64]), bytes(cubin[: len(cubin) // 2]), b"\x7fELF" + bytes(200)):
        with pytest.raises(plgpu.CompileError, match=f"must become {kind}"):
            _core.check_products(ptx, bad)


def with_scope(multiply):
    """multiply(acc, a in SMEM, b in SMEM, flag) gives what is stored."""

    def body(a, b, flag, o):
        def scope(sa, sb):
            sa[...] = a[...]
            sb[...] = b[...]
            plgpu.commit_smem()
            acc = plgpu.ACC((64, 64), F32)
            o[...] = pl.run_scoped(lambda acc: multiply(acc, sa, sb, flag), acc)

        pl.run_scoped(scope, *[plgpu.SMEM((64, 64), F16)] * 2)

    x = np.zeros((64, 64), F16)
    kernel = plgpu.kernel(body, out_type=plgpu.ShapeDtypeStruct((64, 64), F32))
    return kernel.lower(x, x, np.zeros(1, np.int32))


def unused(acc, a, b, flag):
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)
    return jnp.zeros((64, 64), F32)


def overwritten(acc, a, b, flag):
    plgpu.wgmma(acc, a, b)
    plgpu.wgmma_wait(0)
    acc[...] = jnp.zeros((64, 64), F32)
    plgpu.wgmma(acc, a, b)
    return acc[...]


def in_a_branch(acc, a, b, flag):
    @pl.when(flag[0] > 0)
    def _():
        plgpu.wgmma(acc, a, b)
        plgpu.wgmma_wait(0)

    @pl.when(flag[0] > 1)
    def _():
        acc[...] = jnp.zeros((64, 64), F32)

    return acc[...]


def columns(acc, a, b, flag):
    x = plgpu.mma(jnp.zeros((64, 64), F32), a[...], b[...])
    return jnp.concatenate([x[:, :8]] * 8, axis=1)


def twice(acc, a, b, flag):
    x, y = (plgpu.mma(jnp.zeros((64, 64), F32), a[...], b[...]) for _ in range(2))
    return x + y


@pytest.mark.parametrize("multiply", [unused, overwritten, in_a_branch, columns, twice])
@pytest.mark.filterwarnings("ignore:.*through shared memory")
def test_what_a_compiler_may_leave_out(multiply):
    """Products that nobody reads, that are overwritten, that are done twice: no error."""
    low = with_scope(multiply)
    assert low.cubin() and sass.products(low.as_text("ptx")) >= 4


# ---- figures -----------------------------------------------------------------------------------

# NVRTC without its log, as where its own cache knows the program.
SILENT = """
#include <dlfcn.h>
#include <stdlib.h>
typedef void *P;
typedef size_t *S;
static P real(const char *name) {
  static P library;
  if (!library) library = dlopen(getenv("REAL_NVRTC"), RTLD_NOW | RTLD_LOCAL);
  return dlsym(library, name);
}
#define NAMED(name, result, given, passed) \\
  result name given { return ((result(*) given)real(#name)) passed; }
NAMED(nvrtcVersion, int, (int *a, int *b), (a, b))
NAMED(nvrtcGetErrorString, const char *, (int e), (e))
NAMED(nvrtcCreateProgram, int, (P p, P t, P n, int k, P h, P i), (p, t, n, k, h, i))
NAMED(nvrtcDestroyProgram, int, (P p), (p))
NAMED(nvrtcCompileProgram, int, (P p, int n, P o), (p, n, o))
NAMED(nvrtcGetCUBINSize, int, (P p, S n), (p, n))
NAMED(nvrtcGetCUBIN, int, (P p, char *c), (p, c))
NAMED(nvrtcGetPTXSize, int, (P p, S n), (p, n))
NAMED(nvrtcGetPTX, int, (P p, char *c), (p, c))
int nvrtcGetProgramLogSize(P p, S n) { *n = 1; return 0; }
int nvrtcGetProgramLog(P p, char *c) { *c = 0; return 0; }
"""

FIGURES = """
import json, sys, warnings
import numpy as np
import pallas_mgpu as plgpu
from pallas_mgpu import pl
from pallas_mgpu import numpy as jnp
warnings.simplefilter("ignore")

def add_one(x, o):
    o[...] = x[...] + 1

def spills(x, o):
    a = x[...]
    b = x[...].T.reshape(x.shape)
    o[...] = a * b
    o[...] = o[...] + a * b

def spills_in_loops(x, o):
    a = x[...]

    @pl.loop(0, 10)
    def _(i):
        b = x[...]
        o[...] = jnp.where(b > a, b - a, b * o[...])

def prints(x, o):
    pl.debug_print("{}", x[0])
    o[...] = x[...]

out = []
for body, shape, dtype in ((add_one, (128,), np.float32), (spills, (256, 128), np.float32),
                           (spills_in_loops, (512, 128), np.float16), (prints, (128,), np.float32)):
    s = plgpu.ShapeDtypeStruct(shape, dtype)
    used = plgpu.kernel(body, out_type=s).lower(s).resources()
    out.append([used[k] for k in ("log", "registers", "stack_bytes", "spill_bytes", "smem_bytes")])
print(json.dumps(out))
"""


@pytest.mark.long
@pytest.mark.parametrize("library", only_long(libraries(), every=4))
def test_figures_without_a_log(library, tmp_path):
    """The cubin has the same registers, stack and spills as the log."""
    cc = os.environ.get("CC", "gcc").split()
    if not shutil.which(cc[0]):
        pytest.skip("needs a C compiler")
    (tmp_path / "nvrtc.c").write_text(SILENT)
    silent = tmp_path / "libnvrtc.so.13"
    command = [*cc, "-shared", "-fPIC", "-o", silent, tmp_path / "nvrtc.c", "-ldl"]
    subprocess.run(command, check=True)
    real = libraries()[library] or re.search(r"/\S+", _core.system_info()["nvrtc"])[0]

    def figures(nvrtc):
        env = {
            **os.environ,
            "PYTHONPATH": str(Path(plgpu.__file__).parent.parent),
            "PALLAS_MGPU_NO_CACHE": "1",
            "PALLAS_MGPU_NVRTC": str(nvrtc),
            "REAL_NVRTC": real,
        }
        done = subprocess.run([sys.executable, "-c", FIGURES], env=env, stdout=subprocess.PIPE)
        assert done.returncode == 0
        return json.loads(done.stdout)

    told, read = figures(real), figures(silent)
    assert all(log for log, *_ in told) and not any(log for log, *_ in read)
    assert [x for _, *x in told] == [x for _, *x in read]
    stacks, spills = ({k for k, x in enumerate(told) if x[n]} for n in (2, 3))
    assert spills == {1, 2} and stacks == {1, 2, 3}, told


def test_versions_are_documented():
    """docs/compilers.md, `info` and the tests speak of the same versions."""
    text = (Path(__file__).parent.parent.parent / "docs" / "compilers.md").read_text()
    assert re.findall(r"^\| (\d+\.\d+\.\d+) \|", text, re.M) == list(_compilers.TESTED)
    assert "(tested; tested are 12.9, 13.0," in _compilers.describe("13.0, /x/libnvrtc.so.13")
    assert "(not tested; " in _compilers.describe("13.4, /x/libnvrtc.so.13")


def test_dumped_ptx_is_text(tmp_path, monkeypatch):
    """ptxas refuses a NUL byte at the end."""
    monkeypatch.setenv("PALLAS_MGPU_DUMP", str(tmp_path))
    compiler_kernels.lower(EVERY["lost 64 x 64 x 64"]).cubin()
    (dump,) = tmp_path.glob("*.ptx")
    text = dump.read_bytes()
    assert b"\0" not in text and text.rstrip().endswith(b"}")


def test_ptx_with_line_info(monkeypatch):
    """`.file` and `.loc` where profilers' lines are asked for, and not otherwise."""
    low = compiler_kernels.lower(EVERY["by TMA"])
    assert ".loc" not in low.as_text("ptx")
    monkeypatch.setenv("PALLAS_MGPU_LINEINFO", "1")
    text = low.as_text("ptx")
    (file,) = re.findall(r'^\s*\.file\s+(\d+) ".*compiler_kernels\.py"', text, re.M)
    source = open(compiler_kernels.__file__).read().splitlines()
    lines = {int(k) for k in re.findall(rf"^\s*\.loc\s+{file} (\d+)", text, re.M)}
    assert any("plgpu.copy_gmem_to_smem(a," in source[k - 1] for k in lines)


def test_contiguous_copies_without_a_cluster():
    """They name their own block's shared memory; in clusters the form for clusters stays."""

    def body(x, o, smem, barrier):
        plgpu.copy_gmem_to_smem(x, smem, barrier)
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    def ptx(**options):
        out = plgpu.ShapeDtypeStruct((1000,), F32)
        scratch = [plgpu.SMEM((1000,), F32), plgpu.Barrier()]
        kernel = plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)
        return re.findall(r"cp\.async\.bulk\.shared::(\w+)", kernel.lower(out).as_text("ptx"))

    assert ptx() == ["cta"]
    assert ptx(cluster=(2,), cluster_names=("c",)) == ["cluster"]
