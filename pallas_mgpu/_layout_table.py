"""docs/layouts.md: what each conversion between named register layouts costs. Made from the plans
that the compiler follows; ``python -m pallas_mgpu layouts`` writes it."""

import numpy as np

from . import _core
from ._types import Layout, layout_spec

SHAPE = (64, 64)
MATRICES = {
    "WGMMA": Layout.WGMMA,
    "WGMMA_TRANSPOSED": Layout.WGMMA_TRANSPOSED,
    "WGMMA_8BIT": Layout.WGMMA_8BIT,
    "WGMMA_UPCAST_2X": Layout.WGMMA_UPCAST_2X,
    "WGMMA_UPCAST_4X": Layout.WGMMA_UPCAST_4X,
    "MMA_LHS(16 bit)": Layout.MMA_LHS(np.int16),
    "MMA_LHS(8 bit)": Layout.MMA_LHS(np.int8),
    "MMA_RHS(16 bit)": Layout.MMA_RHS(np.int16),
    "MMA_RHS(8 bit)": Layout.MMA_RHS(np.int8),
    "WG_STRIDED": Layout.WG_STRIDED(SHAPE, 4),
    "SMEM_GMEM_COPY": Layout.SMEM_GMEM_COPY(SHAPE, np.int16, 128),
}
# rows of 128, as the tensor cores of Blackwell hold them; they are layouts of Hopper as well
TALL_SHAPE = (128, 64)
TALL = {
    "WGMMA": Layout.WGMMA,
    "TCGEN05": Layout.TCGEN05,
    "TCGEN05_TRANSPOSED": Layout.TCGEN05_TRANSPOSED,
    "TCGEN05_TMEM_NATIVE": Layout.TCGEN05_TMEM_NATIVE,
    "TCGEN05_TMEM_NATIVE(4)": Layout.TCGEN05_TMEM_NATIVE(4),
    "TCGEN05_M64_COLLECTIVE(64)": Layout.TCGEN05_M64_COLLECTIVE(64),
    "TCGEN05_M64_COLLECTIVE_NATIVE(64)": Layout.TCGEN05_M64_COLLECTIVE_NATIVE(64),
}
VECTORS = {
    "WGMMA.reduce(1)": Layout.WGMMA.reduce(1),
    "WGMMA.reduce(0)": Layout.WGMMA.reduce(0),
    "WGMMA_TRANSPOSED.reduce(1)": Layout.WGMMA_TRANSPOSED.reduce(1),
    "WGMMA_8BIT.reduce(0)": Layout.WGMMA_8BIT.reduce(0),
    "MMA_RHS(16 bit).reduce(0)": Layout.MMA_RHS(np.int16).reduce(0),
    "TMA_INDICES": Layout.TMA_INDICES,
    "TMA_INDICES_4": Layout.TMA_INDICES_4,
    "TCGEN05.reduce(1)": Layout.TCGEN05.reduce(1),
    "TCGEN05_TMEM_NATIVE.reduce(1)": Layout.TCGEN05_TMEM_NATIVE.reduce(1),
    "TCGEN05_M64_COLLECTIVE(64).reduce(0)": Layout.TCGEN05_M64_COLLECTIVE(64).reduce(0),
}


def _table(layouts, shape, dtype):
    head = ["from \\ to", *layouts]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, a in layouts.items():
        cells = [f"**{name}**"]
        for b in layouts.values():
            shuffles, size, _ = _core.layout_conversion(
                dtype, shape, layout_spec(a), layout_spec(b)
            )
            cells.append(f"{shuffles} sh" if shuffles else f"{size} B" if size else "0")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def text():
    """The document."""
    parts = [
        "# Cost of conversions between register layouts",
        "`python -m pallas_mgpu layouts` writes this page, and a test compares it with what the"
        " compiler plans.",
        "`plgpu.layout_cast` works between any two layouts and for any shape. A cell gives the cost"
        " of converting one array:",
        "- `0`: free, registers are only renamed\n"
        "- `8 sh`: eight 32-bit shuffles in each lane\n"
        "- `8192 B`: the array passes through shared memory once, with two barriers of the"
        " warpgroup",
        "Converting a splat is free. A load or an iota produces its array directly in the requested"
        " layout.",
    ]
    for dtype in (np.float32, np.float16, np.int8):
        name = np.dtype(dtype).name
        parts += [f"## {name}{list(SHAPE)}", _table(MATRICES, SHAPE, dtype)]
    parts += [f"## float16{list(TALL_SHAPE)}", _table(TALL, TALL_SHAPE, np.float16)]
    parts += [
        "## float32[64]",
        _table(VECTORS, (64,), np.float32),
        "A row reduction of a WGMMA array takes two shuffles for each row in a lane, but no shared"
        " memory. Its result\nhas the layout `WGMMA.reduce(1)`, and broadcasting it back to WGMMA"
        " is free.",
    ]
    return "\n\n".join(parts) + "\n"
