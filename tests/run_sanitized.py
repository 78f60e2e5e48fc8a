"""Build with ASan and UBSan and run the suite under them: tests/run_sanitized.py [pytest args]

Works on a copy of the checkout in a temporary directory; the installed package is not touched.
Objects are kept in build/, so that a second run compiles only what has changed. Leaks of the
Python interpreter and of other packages drown ours, so leaks are not reported unless ASAN_OPTIONS
says otherwise.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = shutil.ignore_patterns(".git", "build", "*.so", "*.egg-info", "__pycache__", ".*_cache")


def runtime(name: str) -> str:
    """Path of one of the compiler's own shared libraries."""
    cc = os.environ.get("CC", "gcc").split()
    path = subprocess.check_output([*cc, f"-print-file-name={name}"], text=True).strip()
    if not os.path.isabs(path):
        sys.exit(f"run_sanitized: {' '.join(cc)} has no {name}; set CC to a gcc with sanitizers")
    return path


def can_build_here() -> bool:
    """Has this environment what pyproject.toml asks of a build? Then objects are kept between
    runs; an isolated build has its headers in a new place each time, and compiles all."""
    major = {"setuptools": 77, "numpy": 2}
    try:
        return all(int(version(name).split(".")[0]) >= n for name, n in major.items())
    except PackageNotFoundError:
        return False


def build(target: Path) -> None:
    """Install the sanitized package, without its requirements, into a directory."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, "."]
    if can_build_here():
        pip.insert(-1, "--no-build-isolation")
    subprocess.run(pip, cwd=ROOT, env={**os.environ, "PALLAS_MGPU_ASAN": "1"}, check=True)


def nvrtc_folders() -> str:
    """NVRTC opens its builtins by name; ASan hides from the loader where NVRTC itself lies."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    found = {str(lib.parent) for root in roots or [] for lib in Path(root).rglob("libnvrtc.so*")}
    return ":".join([*sorted(found), os.environ.get("LD_LIBRARY_PATH", "")])


def main() -> int:
    preload = [runtime("libasan.so"), runtime("libubsan.so"), runtime("libstdc++.so.6")]
    with tempfile.TemporaryDirectory(prefix="pallas_mgpu-sanitized-") as tmp:
        copy, site = Path(tmp, "copy"), Path(tmp, "site")
        shutil.copytree(ROOT, copy, ignore=SKIPPED)
        build(site)
        shutil.rmtree(copy / "pallas_mgpu")
        (site / "pallas_mgpu").rename(copy / "pallas_mgpu")
        env = {
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            **os.environ,
            "LD_PRELOAD": " ".join(preload),
            "LD_LIBRARY_PATH": nvrtc_folders(),
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(copy),
        }
        return subprocess.run(
            [sys.executable, "-m", "pytest", *sys.argv[1:]], cwd=copy, env=env
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
