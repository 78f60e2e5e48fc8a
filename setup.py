"""Builds pallas_mgpu._core: all of csrc/, in parallel, and only what has changed.

Objects stay in build/core-<ABI>; each has a .d file, written by the compiler, that names the files
it depends on. PALLAS_MGPU_ASAN=1 builds with ASan and UBSan, in a directory of its own.
Warnings are errors where CI is set.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SANITIZE = os.environ.get("PALLAS_MGPU_ASAN", "0") not in ("", "0")
SANITIZERS = "-fsanitize=address,undefined"
CFLAGS = [
    "-std=gnu11",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
if SANITIZE:
    CFLAGS += [
        "-O1",
        "-g",
        "-UNDEBUG",
        "-fno-omit-frame-pointer",
        SANITIZERS,
        "-fno-sanitize-recover=undefined",
        "-Wno-maybe-uninitialized",  # instrumented code sets it off for nothing
    ]
else:
    CFLAGS += ["-O3", "-g0"]
if os.environ.get("CI"):
    CFLAGS += ["-Werror"]
LDFLAGS = [SANITIZERS] if SANITIZE else []


def embed(files: list[Path]) -> str:
    """C text of the table in csrc/cuda/device.h."""
    out = ['#include "cuda/device.h"', "", "const struct pm_device_file pm_device_files[] = {"]
    for file in files:
        out.append(f'    {{"{file.name}",')
        for line in file.read_text(encoding="utf-8").splitlines():
            escaped = line.replace("\\", "\\\\").replace('"', '\\"').replace("?", "\\?")
            out.append(f'     "{escaped}\\n"')
        out.append('     ""},')
    out += ["    {0, 0}};", f"const unsigned pm_device_file_count = {len(files)};", ""]
    return "\n".join(out)


def is_stale(obj: Path, dep: Path) -> bool:
    """Does the object have to be made (again)? The .d file reads "object: file file \\ file"."""
    try:
        made = obj.stat().st_mtime
        words = dep.read_text().replace("\\\n", " ").split()[1:]
        return any(os.stat(word).st_mtime >= made for word in [*words, __file__])
    except OSError:
        return True


def check_platform(compiler: list[str], python_include: str) -> None:
    """Say what to install where something that the build needs is missing."""
    if not sys.platform.startswith("linux"):
        raise SystemExit(
            f"pallas_mgpu runs on Linux (x86-64 and Arm); this is {sys.platform}."
            " On Windows, use WSL 2."
        )
    if not shutil.which(compiler[0]):
        raise SystemExit(
            f"pallas_mgpu is built from C, and the compiler {compiler[0]!r} was not found. Install"
            " gcc or clang (Debian, Ubuntu: apt install gcc; Fedora: dnf install gcc), or name one"
            " in the environment variable CC."
        )
    if not Path(python_include, "Python.h").exists():
        raise SystemExit(
            f"pallas_mgpu is built from C, and {python_include} has no Python.h. Install Python's"
            " headers (Debian, Ubuntu: apt install python3-dev; Fedora: dnf install python3-devel)."
        )


class BuildExt(build_ext):
    def build_extension(self, ext: Extension) -> None:
        check_platform(self.compiler.compiler_so, sysconfig.get_paths()["include"])
        abi = sysconfig.get_config_var("SOABI")
        objects = Path("build") / f"core-{abi}{'-sanitized' if SANITIZE else ''}"
        table = objects / "device_embed.c"
        text = embed(sorted(Path("csrc/cuda/device").glob("*.cuh")))
        objects.mkdir(parents=True, exist_ok=True)
        if not table.exists() or table.read_text() != text:
            table.write_text(text)
        includes = ["-Icsrc"]
        for path in [*ext.include_dirs, *self.compiler.include_dirs]:
            includes += ["-isystem", path]

        def compile_one(source: Path) -> Path:
            name = "-".join(source.with_suffix("").parts[-2:])
            obj, dep, new = (objects / f"{name}{end}" for end in (".o", ".d", f".{os.getpid()}.o"))
            if is_stale(obj, dep):
                start = time.time()
                flags = [*CFLAGS, *includes, "-MMD", "-MF", dep, "-c", source, "-o", new]
                if subprocess.run([*self.compiler.compiler_so, *flags]).returncode:
                    raise CompileError(f"{source} does not compile, see above")
                os.utime(new, (start, start))  # an edit made meanwhile counts as newer
                new.replace(obj)
            return obj

        sources = [Path(source) for source in ext.sources] + [table]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            made = list(pool.map(compile_one, sources))
        self.compiler.link_shared_object(
            [str(obj) for obj in made],
            self.get_ext_fullpath(ext.name),
            libraries=ext.libraries,
            extra_postargs=LDFLAGS,
        )


def files(*endings: str) -> list[str]:
    return sorted(str(p) for p in Path("csrc").rglob("*") if p.suffix in endings)


setup(
    cmdclass={"build_ext": BuildExt},
    ext_modules=[
        Extension(
            "pallas_mgpu._core",
            files(".c"),
            depends=files(".h", ".def", ".cuh"),
            include_dirs=[numpy.get_include()],
            libraries=["dl", "pthread", "m"],
        )
    ],
)
