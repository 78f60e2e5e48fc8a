"""The runtime without a GPU: launch path on a stand-in for libcuda, compile cache, dumps."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu

HERE = Path(__file__).resolve().parent
CASES = re.findall(r"^def case_(\w+)", (HERE / "fake_driver.py").read_text(), re.M)
CASES.remove("no_gpu")


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
    with pytest.raises(ValueError, match="graph, traced, cuda, ptx and sass"):
        lowered.as_text("mlir")
    with pytest.raises(NotImplementedError, match="sm_90a"):
        plgpu.kernel(add_one, out_type=plgpu.ShapeDtypeStruct((8,), np.float32)).lower(
            plgpu.ShapeDtypeStruct((8,), np.float32), arch=100
        )


def test_sass_without_nvdisasm(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", "")
    if os.path.exists("/usr/local/cuda/bin/nvdisasm"):
        pytest.skip("a toolkit is installed")
    with pytest.raises(RuntimeError, match="nvdisasm"):
        compile_one()[1].as_text("sass")


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
