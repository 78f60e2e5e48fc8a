"""The runtime without a GPU: launch path on a stand-in for libcuda, compile cache, dumps."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import _core, pl

HERE = Path(__file__).resolve().parent
ROOT = Path(plgpu.__file__).parent.parent
CASES = re.findall(r"^def case_(\w+)", (HERE / "fake_driver.py").read_text(), re.M)
MESHES = [c for c in CASES if c.startswith("mesh")]
ELSEWHERE = *MESHES, "no_gpu", "older_driver", "other_gpu", "second_device", "targets"
CASES = [c for c in CASES if c not in ELSEWHERE]


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory):
    """Directory of the stand-in for libcuda.so.1."""
    cc = os.environ.get("CC", "gcc").split()
    if not shutil.which(cc[0]):
        pytest.skip("needs a C compiler")
    out = tmp_path_factory.mktemp("libcuda")
    subprocess.run(
        [*cc, "-std=gnu11", "-shared", "-fPIC", "-o", out / "libcuda.so.1", HERE / "fake_cuda.c"],
        check=True,
    )
    return out


def run_case(case, libraries, cache, **env):
    paths = os.pathsep.join(
        filter(None, [str(libraries or ""), os.environ.get("LD_LIBRARY_PATH", "")])
    )
    package = Path(plgpu.__file__).parent.parent
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": paths,
        "PALLAS_MGPU_CACHE_DIR": str(cache),
        "PALLAS_MGPU_BACKEND": "auto",
        "PYTHONPATH": str(package),
        **env,
    }
    done = subprocess.run(
        [sys.executable, HERE / "fake_driver.py", case],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES)
def test_launch_path(case, stand_in, tmp_path_factory):
    run_case(case, stand_in, tmp_path_factory.getbasetemp() / "cache")


@pytest.mark.parametrize(
    "env, expected",
    [
        ({"FAKE_CUDA_VERSION": "11080"}, "too old.*11.8.*12.0"),
        ({"FAKE_CUDA_DEVICES": "0"}, "sees no GPU"),
    ],
)
def test_no_gpu(env, expected, stand_in, tmp_path):
    run_case("no_gpu", stand_in, tmp_path, EXPECTED=expected, **env)


def test_older_driver(stand_in, tmp_path):
    run_case("older_driver", stand_in, tmp_path, FAKE_CUDA_VERSION="12040")


def test_second_device(stand_in, tmp_path):
    run_case("second_device", stand_in, tmp_path, FAKE_CUDA_DEVICES="2")


@pytest.mark.parametrize("case", MESHES)
def test_mesh(case, stand_in, tmp_path):
    run_case(case, stand_in, tmp_path, FAKE_CUDA_DEVICES="2")


def test_other_gpu(stand_in, tmp_path):
    run_case("other_gpu", stand_in, tmp_path, FAKE_CUDA_ARCH="75")


@pytest.mark.parametrize("arch", ["80", "100"])
def test_targets(arch, stand_in, tmp_path):
    run_case("targets", stand_in, tmp_path, FAKE_CUDA_ARCH=arch)


def add_one(x, o):
    o[...] = x[...] + 1


def compile_one(n=128):
    kernel = plgpu.kernel(add_one, out_type=plgpu.ShapeDtypeStruct((n,), np.float32))
    lowered = kernel.lower(plgpu.ShapeDtypeStruct((n,), np.float32))
    return lowered.resources(), lowered


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache_hit(cache):
    first, lowered = compile_one()
    second, again = compile_one()
    assert not first["from_disk"] and second["from_disk"]
    assert lowered.cubin() == again.cubin() and first["log"] == second["log"]
    assert cache.stat().st_mode & 0o777 == 0o700
    assert not list(cache.glob("tmp-*"))


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "grow"])
def test_cache_damage(cache, damage):
    _, lowered = compile_one()
    [entry] = cache.glob("*.cubin")
    data = bytearray(entry.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    entry.write_bytes(
        {"truncate": data[:200], "empty": b"", "flip": data, "grow": data + b"x"}[damage]
    )
    used, again = compile_one()
    assert not used["from_disk"] and again.cubin() == lowered.cubin()
    assert compile_one()[0]["from_disk"]


def test_cache_unusable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PALLAS_MGPU_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert not compile_one()[0]["from_disk"]


def test_cache_switched_off(cache, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_NO_CACHE", "1")
    compile_one()
    assert not cache.exists()


def test_cache_limit(cache, monkeypatch):
    compile_one(128)
    [first] = cache.glob("*.cubin")
    os.utime(first, (1, 1))
    monkeypatch.setenv("PALLAS_MGPU_CACHE_BYTES", str(first.stat().st_size * 3 // 2))
    compile_one(256)
    [left] = cache.glob("*.cubin")
    assert left != first


def test_cache_key_has_options(cache, monkeypatch):
    compile_one()
    monkeypatch.setenv("PALLAS_MGPU_LINEINFO", "1")
    assert not compile_one()[0]["from_disk"]


def test_dump(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_DUMP", str(tmp_path / "dump"))
    compile_one()
    kinds = {p.suffix for p in (tmp_path / "dump").glob("add_one_*")}
    assert kinds == {".traced", ".graph", ".cu", ".ptx", ".cubin", ".log"}


def test_lowered():
    _, lowered = compile_one()
    assert "stage traced" in lowered.as_text("traced")
    assert "stage synced" in lowered.as_text()
    assert "add_one" in lowered.as_text("cuda")
    assert ".target sm_90a" in lowered.as_text("ptx")
    with pytest.raises(ValueError, match="graph, traced, cuda, ptx, sass"):
        lowered.as_text("mlir")


def beside_nvrtc():
    """Is there an nvdisasm where the wheels put it?"""
    path = plgpu._core.system_info()["nvrtc"]
    return any(
        (Path(p).parent.parent / "bin" / "nvdisasm").exists() for p in re.findall(r"/\S+", path)
    )


def test_sass_without_nvdisasm(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "")
    if os.path.exists("/usr/local/cuda/bin/nvdisasm"):
        pytest.skip("a toolkit is installed")
    if beside_nvrtc():
        assert "add_one" in compile_one()[1].as_text("sass")
        return
    with pytest.raises(RuntimeError, match="nvdisasm"):
        compile_one()[1].as_text("sass")


def test_spills_by_line():
    """The line whose values do not fit the registers is named; a small kernel needs no tool."""
    assert compile_one()[1].spills() == []
    if not (shutil.which("nvdisasm") or beside_nvrtc()):
        pytest.skip("needs nvdisasm")
    n = (256, 128)

    def large(x, y, o):
        a = x[...]
        b = y[...]

        @pl.loop(0, 10)
        def _(i):
            o[...] = o[...] + a * b

    x = plgpu.ShapeDtypeStruct(n, np.float32)
    low = plgpu.kernel(large, out_type=x).lower(x, x)
    found = low.spills()
    first = large.__code__.co_firstlineno
    assert low.resources()["spill_bytes"] and found
    assert all(file == __file__ and first < line <= first + 6 for file, line, _ in found[:3]), found
    assert [n for _, _, n in found] == sorted((n for _, _, n in found), reverse=True)
    assert sum(n for _, _, n in found) == pytest.approx(low.resources()["spill_bytes"], rel=0.3)


def test_nvrtc_path_is_checked(tmp_path):
    code = (
        "import numpy as np, pallas_mgpu as p\n"
        "s = p.ShapeDtypeStruct((8,), np.float32)\n"
        "k = p.kernel(lambda x, o: o.__setitem__(..., x[...]), out_type=s)\n"
        "try: k.lower(s).resources()\n"
        "except p.NVRTCError as e: print(e)\n"
    )
    env = {**os.environ, "PALLAS_MGPU_NVRTC": str(tmp_path / "none.so")}
    env["PYTHONPATH"] = str(Path(plgpu.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True)
    assert "none.so, which is no file" in done.stdout, done.stderr


SMALL = """
import sys, numpy as np, pallas_mgpu as p
def add_one(x, o): o[...] = x[...] + 1
s = p.ShapeDtypeStruct((8,), np.float32)
try:
    used = p.kernel(add_one, out_type=s).lower(s).resources()
    print("registers", used["registers"], "from_disk", used["from_disk"])
except Exception as e:
    print(type(e).__name__, e)
print("nvrtc is open:", "libnvrtc" in open("/proc/self/maps").read())
"""


def in_process(**env):
    """What SMALL prints in a process with these environment variables."""
    env = {**os.environ, "PYTHONPATH": str(Path(plgpu.__file__).parent.parent), **env}
    done = subprocess.run([sys.executable, "-c", SMALL], env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_cache_hit_opens_no_nvrtc(cache):
    assert "from_disk False\nnvrtc is open: True" in in_process()
    assert "from_disk True\nnvrtc is open: False" in in_process()
    [entry] = cache.glob("*.cubin")
    entry.unlink()
    os.mkfifo(entry)  # waits for a writer unless it is opened with care
    assert "from_disk False" in in_process()


@pytest.mark.parametrize(
    "name, value, wanted",
    [
        ("CACHE_BYTES", "abc", "a whole number of at least 0"),
        ("CACHE_BYTES", "1G", "a whole number"),
        ("CACHE_BYTES", "-1", "a whole number"),
        ("COMPILE_SECONDS", "-3", "a whole number"),
        ("CACHE_BYTES", "99999999999999999999", "a whole number"),
        ("PLAN_BYTES", "1.5", "a whole number"),
        ("NO_CACHE", "maybe", "0, 1, false, true"),
        ("LINEINFO", "2", "0, 1, false, true"),
        ("CACHE_DIR", "~/cache", "a path without ~"),
        ("DUMP", "~", "a path without ~"),
        ("BACKEND", "gpu", "auto, cuda, interpret and emulate"),
    ],
)
def test_environment_variables_are_checked(name, value, wanted, monkeypatch, cache):
    name = f"PALLAS_MGPU_{name}"
    monkeypatch.setenv(name, value)
    k = plgpu.kernel(add_one, out_type=plgpu.ShapeDtypeStruct((8,), np.float32))
    x = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=f"{name}.*{wanted}|{name}.*{re.escape(value)}.*{wanted}"):
        k(x)
    monkeypatch.setenv(name, "")  # as unset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (k(x) == 1).all()


def test_many_options_of_nvrtc(cache, monkeypatch):
    for n, accepted in [(100, True), (1000, False)]:
        monkeypatch.setenv("PALLAS_MGPU_NVRTC_OPTIONS", "--fmad=true " * n)
        if accepted:
            compile_one()
            continue
        with pytest.raises(ValueError, match="NVRTC_OPTIONS has 12000 characters"):
            compile_one()
    monkeypatch.setenv("PALLAS_MGPU_NVRTC_OPTIONS", " \t--fmad=false\n ")
    compile_one(256)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a directory away")
def test_cache_of_another_user(cache):
    cache.mkdir()
    os.chown(cache, 12345, 12345)
    got = in_process()
    assert "from_disk False" in got and got.count("belongs to another user") == 1
    assert str(cache) in got and not list(cache.iterdir())
    assert "belongs" not in in_process(PALLAS_MGPU_NO_CACHE="1")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to give a file away")
def test_cache_entry_of_another_user(cache):
    """In a directory of one's own it is not used either."""
    compile_one()
    [entry] = cache.glob("*.cubin")
    os.chown(entry, 12345, 12345)
    assert not compile_one()[0]["from_disk"]


def test_home_that_cannot_be_written(tmp_path):
    """As in containers: kernels are compiled and not kept, and that is said once."""
    home = tmp_path / "home"
    home.write_text("")  # a file, so that nothing can be made in it, even by root
    got = in_process(HOME=str(home), PALLAS_MGPU_CACHE_DIR="", XDG_CACHE_HOME="")
    assert "registers" in got and "from_disk False" in got
    assert got.count("compiled kernels are not kept on disk") == 1, got
    got = in_process(PALLAS_MGPU_CACHE_DIR=str(tmp_path / ("x" * 200) / ("y/" * 2500)))
    assert "has too long a name" in got and not (tmp_path / ("x" * 200)).exists()


def test_switches(cache, monkeypatch):
    compile_one()
    monkeypatch.setenv("PALLAS_MGPU_CACHE_BYTES", "")  # as unset
    for word in ("0", "false", "No", "OFF", "", "1", "yes", "true", "On"):
        monkeypatch.setenv("PALLAS_MGPU_NO_CACHE", word)
        assert compile_one()[0]["from_disk"] == (word not in ("1", "yes", "true", "On")), word


def test_environment_variables(cache, tmp_path):
    unwritable = in_process(PALLAS_MGPU_CACHE_DIR="/proc/nowhere")
    assert "registers" in unwritable and "from_disk False" in unwritable
    assert "/proc/nowhere cannot be written" in unwritable
    got = in_process(PALLAS_MGPU_NVRTC_OPTIONS="--bogus")
    assert "CompileError" in got and "unrecognized option --bogus" in got
    (tmp_path / "text.so").write_text("no library")
    got = in_process(PALLAS_MGPU_NVRTC=str(tmp_path / "text.so"))
    assert "NVRTCError libnvrtc cannot be opened" in got and "text.so" in got
    libm = next((p for p in Path("/lib").glob("*/libm.so.6")), None)
    if libm:
        got = in_process(PALLAS_MGPU_NVRTC=str(libm))
        assert "NVRTCError" in got and "it has no nvrtcVersion" in got


def test_dumps_in_odd_places(cache, tmp_path):
    got = in_process(PALLAS_MGPU_DUMP=str(tmp_path / "a" / "b" / "c"))
    assert "registers" in got and len(list((tmp_path / "a" / "b" / "c").iterdir())) == 6
    got = in_process(PALLAS_MGPU_DUMP="-")
    for kind in ("traced", "graph", "cu", "ptx", "log"):
        assert f"==== add_one_0.{kind}" in got
    got = in_process(PALLAS_MGPU_DUMP="/proc/nowhere")
    assert "registers" in got and got.count("cannot be written") == 1


def test_dump_names_stay_in_their_directory(cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_MGPU_DUMP", str(tmp_path / "dump"))
    s = plgpu.ShapeDtypeStruct((8,), np.float32)
    for name in ("../up", "a/b c", "ядро", "x" * 1000):
        plgpu.kernel(add_one, out_type=s, kernel_name=name).lower(s).resources()
    names = [p.name for p in (tmp_path / "dump").iterdir()]
    assert len(names) == 4 * 6 and not list(tmp_path.glob("up*"))


def test_missing_nvrtc(tmp_path):
    """Without the wheel, a toolkit or a library the error says what to install."""
    if Path("/usr/local/cuda/lib64/libnvrtc.so.13").exists():
        pytest.skip("a toolkit is installed")
    for package in ("numpy", "ml_dtypes", "numpy.libs", "ml_dtypes.libs"):
        found = Path(np.__file__).parent.parent / package
        if found.exists():
            (tmp_path / package).symlink_to(found)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n{SMALL}"
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    env.update(PALLAS_MGPU_CACHE_DIR=str(tmp_path / "cache"), CUDA_HOME="", CUDA_PATH="")
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=env, text=True, capture_output=True
    )
    assert "NVRTCError" in done.stdout and "pip install 'pallas_mgpu[cu13]'" in done.stdout, (
        done.stdout + done.stderr
    )


def test_interpreter_after_a_fork():
    """A forked child may interpret; only the driver is lost to it."""
    s = plgpu.ShapeDtypeStruct((8,), np.float32)
    k = plgpu.kernel(add_one, out_type=s, interpret=True)
    x = np.ones(8, np.float32)
    k(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if (k(x) == 2).all() and (k(x) == 2).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_cache_command(cache, capsys):
    from pallas_mgpu.__main__ import main

    compile_one(), compile_one(256)
    (cache / "other").write_text("not ours")
    (cache / "autotune").mkdir()
    (cache / "autotune" / "choice.json").write_text("{}")
    (cache / "gone.cubin").symlink_to("what another process has removed")
    assert main(["cache"]) == 0 and "4 entries" in capsys.readouterr().out
    assert main(["cache", "clear"]) == 0 and "removed 4 entries" in capsys.readouterr().out
    assert {entry.name for entry in cache.iterdir()} == {"other", "autotune"}
    assert main(["cache", "size"]) == 0 and "0 entries" in capsys.readouterr().out
    assert not compile_one()[0]["from_disk"]
    with pytest.raises(SystemExit):
        main(["info", "clear"])


def test_the_table_of_gaps_is_in_the_package(capsys):
    from pallas_mgpu.__main__ import main

    assert main(["gaps"]) == 0
    text = capsys.readouterr().out
    assert "| missing | use instead |" in text and "inline_mgpu" in text
    with pytest.raises(NotImplementedError, match="python -m pallas_mgpu gaps"):
        plgpu.inline_mgpu()


def test_cache_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.delenv("PALLAS_MGPU_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    cases = {
        "": tmp_path / "home/.cache/pallas_mgpu",
        "relative": tmp_path / "home/.cache/pallas_mgpu",
        str(tmp_path / "xdg"): tmp_path / "xdg/pallas_mgpu",
    }
    for value, folder in cases.items():
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert _core.system_info()["cache_dir"] == str(folder)


@pytest.mark.parametrize("command", ["info", "layouts"])
def test_readers_that_close_early(command):
    """As in `python -m pallas_mgpu info | head -1`."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = f"import pallas_mgpu.__main__ as m, sys; sys.exit(m.main([{command!r}]))"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert done.returncode == 0 and not done.stderr, done.stderr
