"""Files that benchmarks write with --json, and what is made of them."""

import ast
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import make_results
    import results

    yield results, make_results
    for name in ("make_results", "results"):
        sys.modules.pop(name, None)


def written(results, path):
    found = results.Results(str(BENCHMARKS / "bench_ops_matmul.py"), path)
    for n in (1024, 2048):
        times = {"queued": {"torch": (4e-3, 3e-3, 6e-3), "ops.matmul": (2e-3, 1e-3, 2e-3)}}
        found.add("matmul", f"{n}x{n}", times, work=2e9, errors={"ops.matmul": 1e-3}, m=n, n=n, k=n)
    found.add_samples("host", "call", {"ops": [1e-6, 3e-6, 2e-6]})
    return results.read(path)


def test_a_file_has_the_run_and_each_contestant(modules, tmp_path):
    data = written(modules[0], tmp_path / "a" / "x.json")
    assert data["benchmark"] == "bench_ops_matmul" and data["command"].startswith("python ")
    assert {"gpu", "driver", "nvrtc", "torch", "commit"} <= set(data["machine"])
    torch, ours, *_, samples = data["rows"]
    assert torch["error"] is None and ours["error"] == 1e-3
    assert (torch["ours"], ours["ours"]) == (False, True) and ours["axes"]["n"] == 1024
    assert samples["seconds"] == [2e-6, 1e-6, 3e-6] and samples["unit"] is None


def test_nothing_is_kept_without_a_path(modules):
    found = modules[0].Results("bench_x.py", None)
    found.add_samples("a", "b", {"ops": [1.0]})
    assert found.rows == []


def test_tables_are_of_the_file(modules, tmp_path):
    results, make = modules
    text = make.section(written(results, tmp_path / "x.json"))
    assert "| 1024x1024 | 0.5 TFLOP/s (2.000) | 1 TFLOP/s (1.000) |" in text
    assert "| call | 2 us |" in text
    assert "errors at most 1.0e-03, 2 of 4 checked" in text


def test_long_times_and_numbers_of_cases(modules, tmp_path):
    results, make = modules
    found = results.Results("resources.py", tmp_path / "x.json")
    found.add_samples("compile", "softmax", {"ops": [0.25]}, registers=56, spill_bytes=0)
    text = make.section(results.read(tmp_path / "x.json"))
    assert "| case | ops | registers | spill bytes | smem bytes |" in text
    assert "| softmax | 250 ms | 56 | 0 | - |" in text


def test_other_files_are_refused(modules, tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="no file of benchmarks/results.py"):
        modules[0].read(path)


def test_peers_are_summed_up(modules, tmp_path):
    results, make = modules
    text = make.section(written(results, tmp_path / "x.json"), "What is said of it.\n")
    assert "geometric mean 2.000 over 2 cases, least 2.000 (1024x1024), 0 below 0.97." in text
    assert "\n\nWhat is said of it.\n\n### matmul, queued" in text


def test_long_tables_are_folded(modules, tmp_path):
    results, make = modules
    found = results.Results("bench_x.py", tmp_path / "x.json")
    for n in range(make.LONG + 1):
        found.add_samples("call", f"case {n}", {"ops": [1e-6]})
    text = make.section(results.read(tmp_path / "x.json"))
    assert f"<details><summary>{make.LONG + 1} cases</summary>\n\n| case |" in text


def test_the_page_has_the_order_of_its_sections(modules, tmp_path):
    results, make = modules
    files = {tmp_path / f"{n}.json": {"benchmark": n} for n in list(make.SECTIONS)[::-1]}
    for path, data in files.items():
        results.Results(data["benchmark"], path).write()
        files[path] = results.read(path)
    titles = [x for x in make.page(files, []).splitlines() if x.startswith("## ")]
    assert titles == [f"## {title}" for title in make.SECTIONS.values()]


def test_every_benchmark_has_a_section(modules):
    names = {path.stem for path in BENCHMARKS.glob("bench_*.py")} | {"resources"}
    assert set(modules[1].SECTIONS) == names


def test_the_page_is_what_the_files_make(modules):
    """No figure of it was typed by hand."""
    results, make = modules
    files = {path: results.read(path) for path in sorted(make.KEPT.glob("*.json"))}
    text = make.RESULTS.read_text()
    pictures = [x for x in text.split("\n\n") if x.startswith("![")]
    assert text == make.page(files, pictures)


def test_a_text_keeps_what_is_not_between_the_marks(modules, tmp_path):
    make = modules[1]
    path = tmp_path / "R.md"
    path.write_text("# A\n\nfirst\n\n## B\n\nsecond\n")
    for text in ("one", "two"):
        make.between_marks(path, text, r"^## ")
        found = path.read_text()
        assert found == f"# A\n\nfirst\n\n{make.BEGIN}\n{text}\n{make.END}\n\n## B\n\nsecond\n"


def test_plots(modules, tmp_path):
    pytest.importorskip("matplotlib")
    results, make = modules
    data = written(results, tmp_path / "x.json")
    ((title, path),) = make.plots([data], tmp_path / "plots")
    first = path.read_bytes()
    assert title == "ops.matmul, square, bfloat16" and b"<svg" in first
    make.plots([data], tmp_path / "plots")
    assert path.read_bytes() == first


def test_every_benchmark_can_write_a_file():
    for path in sorted(BENCHMARKS.glob("bench_*.py")):
        names = {
            n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)
        }
        assert {"Results", "argument"} <= names, path.name
        assert names & {"add", "add_samples"}, path.name
