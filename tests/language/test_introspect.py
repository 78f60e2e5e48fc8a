"""What kernel objects say about themselves."""

import functools
import inspect
import os
import pickle
import pydoc
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import pallas_mgpu as plgpu
from pallas_mgpu import ops, pl


def shaped(*shape, dtype=np.float32):
    return plgpu.ShapeDtypeStruct(shape, dtype)


@plgpu.kernel(out_type=shaped(8), interpret=True)
def documented(x_ref, y_ref, o_ref):
    """Adds."""
    o_ref[...] = x_ref[...] + y_ref[...]


def body(x, o, *scratch):
    o[...] = x[...]


renamed = plgpu.kernel(body, out_type=shaped(8), kernel_name="other", interpret=True)


class Holder:
    @plgpu.kernel(out_type=shaped(8))
    def inside(x, o):  # noqa: N805 - no method
        o[...] = x[...]


@plgpu.specialize
def family(x, *, scale=1):
    """Scales."""
    return plgpu.kernel(lambda x, o: o.__setitem__(..., x[...] * scale), out_type=shaped(8))


X = np.arange(8, dtype=np.float32)


def names(f):
    return [*map(str, inspect.signature(f).parameters.values())]


def test_names_and_documentation_are_those_of_the_body():
    assert (documented.__name__, documented.__qualname__) == ("documented", "documented")
    assert documented.__doc__ == "Adds." and documented.__module__ == __name__
    assert documented.__wrapped__.__code__.co_name == "documented"
    assert "Adds." in pydoc.render_doc(documented) and "x_ref" in pydoc.render_doc(documented)
    assert renamed.__doc__ is None and renamed.__wrapped__ is body
    assert (renamed.__name__, renamed.__qualname__) == ("other", "body")
    assert inspect.unwrap(documented) is documented.__wrapped__
    assert inspect.getsourcelines(documented)[0][0].startswith("@plgpu.kernel")
    part = plgpu.kernel(functools.partial(body), out_type=shaped(8))
    assert (part.__module__, part.__qualname__) == (__name__, "body")
    assert family.__doc__ == "Scales." and family.__wrapped__.__name__ == "family"


def test_signature_is_that_of_a_call():
    assert names(documented) == ["x_ref", "y_ref", "out=None", "stream=None"]
    bound = inspect.signature(documented).bind(X, X, out=np.empty_like(X))
    assert (documented(*bound.args, **bound.kwargs) == X + X).all()
    assert names(renamed) == ["x", "o", "*scratch", "out=None", "stream=None"]
    assert names(Holder.inside)[:1] == ["x"]
    assert names(family) == ["x", "scale=1"]  # of the maker

    def positional(x, y, a, b, s, t):
        pass

    k = plgpu.kernel(
        positional, out_type=[shaped(8)] * 2, scratch_types=[plgpu.SMEM((8,), "f4")] * 2
    )
    assert names(k)[:2] == ["x", "y"] and len(names(k)) == 4

    def keyword(x, o, smem):
        pass

    k = plgpu.kernel(keyword, out_type=shaped(8), scratch_types={"smem": plgpu.SMEM((8,), "f4")})
    assert names(k) == ["x", "out=None", "stream=None"]
    assert names(plgpu.kernel(keyword, out_type=shaped(8), scratch_types=[plgpu.Barrier()])) == [
        "x", "out=None", "stream=None"]  # fmt: skip
    call = pl.pallas_call(keyword, out_shape=(shaped(8), shaped(8)))
    assert names(call)[0] == "x"
    assert names(plgpu.vmap(documented))[:2] == ["x_ref", "y_ref"]
    assert "config=None" in names(ops.matmul)
    assert not hasattr(documented, "nothing")
    with pytest.raises(AttributeError, match="nothing"):
        documented.nothing  # noqa: B018


def test_representations():
    assert repr(documented).startswith("<pallas_mgpu kernel documented(x_ref, y_ref) -> float32[8]")

    def big(x, o, p, s, u, b):
        pass

    k = plgpu.kernel(
        big,
        out_type=(shaped(8, 16), shaped(dtype="bfloat16")),
        grid=(4, 2),
        grid_names=("m", "n"),
        cluster=(2,),
        cluster_names=("c",),
        num_threads=3,
        thread_name="wg",
        scratch_types=[
            plgpu.SMEM((64, 64), "float16"),
            plgpu.RefUnion(plgpu.SMEM((8, 8), "int4"), [plgpu.SMEM((8,), "int32")] * 2),
            plgpu.Barrier(),
        ],
    )
    assert repr(k) == (
        "<pallas_mgpu kernel big(x) -> (float32[8,16], bfloat16[]), grid 4 x 2 (m, n),"
        " cluster 2 (c), 3 threads (wg), 8256 bytes of SMEM as scratch>"
    )
    call = pl.pallas_call(body, out_shape=shaped(8), grid=(4, 2))
    assert "grid 4 x 2" in repr(call)
    low = documented.lower(X, X)
    assert repr(low) == (
        "<pallas_mgpu kernel documented, lowered: (float32[8], float32[8]) -> (float32[8]),"
        " 128 lanes, 0 bytes of SMEM>"
    )

    def staged(x, o, s):
        s[...] = x[...]
        o[...] = s[...]

    k = plgpu.kernel(staged, out_type=shaped(8), scratch_types=[plgpu.SMEM((8,), "f4")], grid=(3,))
    assert ", grid 3, 128 lanes, 1024 bytes of SMEM>" in repr(k.lower(X))
    assert "family family" in repr(family)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_kernels_of_modules_are_pickled_by_name(protocol):
    for k in (documented, renamed, Holder.inside, family, ops.matmul):
        assert pickle.loads(pickle.dumps([k], protocol))[0] is k


def test_kernels_without_a_name_are_not_pickled():
    local = plgpu.kernel(body, out_type=shaped(8))
    with pytest.raises(TypeError, match="cannot pickle.*make it in each process"):
        pickle.dumps(local)
    hidden = {"k": local}
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(hidden)


def test_a_kernel_goes_to_another_process(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np, pallas_mgpu as p\n"
        "@p.kernel(out_type=p.ShapeDtypeStruct((8,), np.float32), interpret=True)\n"
        "def add(x, y, o):\n"
        "    o[...] = x[...] + y[...]\n"
    )
    code = (
        "import pickle, numpy as np, pathlib\n"
        "k = pickle.loads(pathlib.Path('k').read_bytes())\n"
        "x = np.arange(8, dtype=np.float32)\n"
        "print(k(x, x).tolist())\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import mine

        (tmp_path / "k").write_bytes(pickle.dumps(mine.add))
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("mine", None)
    root = Path(plgpu.__file__).parent.parent
    env = {**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, text=True, capture_output=True
    )
    assert done.stdout.strip() == str((X + X).tolist()), done.stderr
