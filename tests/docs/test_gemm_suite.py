"""Protects the products of benchmarks/gemm_suite.py: their number, and that all parts are there."""

import importlib.util
import pathlib

from pallas_mgpu.ops._matmul_choice import choose, choose_k_major

PATH = pathlib.Path(__file__).parents[2] / "benchmarks" / "gemm_suite.py"
spec = importlib.util.spec_from_file_location("gemm_suite", PATH)
gemm_suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gemm_suite)


def test_the_suite_has_every_part():
    found = gemm_suite.suite()
    of_models = [g for g in found if g.kind == "aligned"]
    assert len(of_models) >= 80 and len({g.text for g in found}) == len(found)
    assert {g.m for g in of_models} == set(gemm_suite.ROWS)
    assert {(g.n, g.k) for g in of_models} == {x[1:] for x in gemm_suite.layers()}
    for dtype in ("float16", "bfloat16"):
        assert {g.nt for g in found if g.dtype == dtype} == {False, True}
    assert all(g.nt for g in found if g.dtype == "float8_e4m3fn")


def test_text_is_read_back():
    for g in gemm_suite.suite():
        assert gemm_suite.parse(g.text)[1:-1] == g[1:-1]


def test_every_product_has_a_configuration():
    for g in gemm_suite.suite():
        if g.dtype.startswith("float8"):
            assert choose_k_major(g.m, g.n, g.k)
        else:
            assert choose(g.m, g.n, g.k, transpose_b=g.nt)
