"""The transformer of examples/frameworks stays beside PyTorch's own while both are trained."""

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "frameworks" / "transformer_block.py"
SMALL = "--device cpu --steps 12 --width 128 --length 40 --batch 2 --layers 1 --vocabulary 50"


def test_transformer_block(monkeypatch, capsys):
    monkeypatch.setenv("PALLAS_MGPU_BACKEND", "interpret")
    ours, theirs = runpy.run_path(str(EXAMPLE))["main"](SMALL.split())
    torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=5e-3)
    assert theirs[-3:].mean() < theirs[0]
    assert "kernels" in capsys.readouterr().out


@pytest.mark.gpu
def test_transformer_block_on_a_gpu():
    ours, theirs = runpy.run_path(str(EXAMPLE))["main"](["--steps", "300"])
    assert ours[-10:].mean() < ours[0] / 4
    torch.testing.assert_close(ours[-10:].mean(), theirs[-10:].mean(), rtol=0.1, atol=0.05)
