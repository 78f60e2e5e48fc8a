"""What a configuration of a product on Hopper may be; ValueError and TypeError for others."""

import numpy as np

from pallas_mgpu._names import show

from . import _few_rows
from ._few_rows import FewRowsConfig
from ._matmul_choice import MatmulConfig, blocks_take
from ._scaled import BLOCK


def check_k_major(config, forms, in_bytes):
    what = "tf32" if in_bytes == 4 else "8-bit operands"
    if not isinstance(config, MatmulConfig):
        raise ValueError(f"matmul: config must be a MatmulConfig for {what}, got {config}")
    _check_numbers(config)
    steps = [n // in_bytes for n in (64, 128, 256)]
    if config.step not in steps:
        raise ValueError(f"matmul: the step of {what} is one of {steps}, got {config}")
    if forms.blocks and (config.shares > 1 or config.swapped):
        raise ValueError(f"matmul: scales of blocks without shares and swapped, got {config}")
    fits = blocks_take(config.consumers, config.tile_n, config.split)
    if forms.blocks and (config.step != BLOCK or not fits):
        raise ValueError(
            f"matmul: with scales of blocks step must be {BLOCK} and tile_n divide it, or be"
            f" {2 * BLOCK} with 2 consumers and a split of 1, got {config}"
        )
    if forms.blocks and config.consumer_rows > 64:
        raise ValueError(f"matmul: scales of blocks with 64 rows of a consumer, got {config}")
    _check_tile(config)


def _check_numbers(config):
    for name, value in config._asdict().items():
        if not isinstance(value, (int, np.integer)):
            raise TypeError(f"matmul: {name} of a MatmulConfig must be an int, got {show(value)}")


def _check_tile(c, tb=True):
    """Widths that the tensor cores, the registers of a lane and rows in shared memory take."""
    widths = (16, 32, *range(64, 257, 32))
    if c.swapped:
        widths = range(8, 257, 8)
    elif tb:
        widths = (*widths, *range(64, 257, 16))
    if c.tile_n not in widths or c.consumers == 3 and c.tile_n > 200:
        raise ValueError(
            "matmul: tile_n is 16, 32 or a multiple of 32 from 64 to 256, of 16 where B is stored"
            " as (N, K), with swapped any multiple of 8 up to 256, with 3 consumers up to 200; got"
            f" {c}"
        )
    if c.consumer_rows not in (64, 128) or c.consumer_rows > 64 and not _tall(c):
        raise ValueError(
            "matmul: consumer_rows is 64 or 128, 128 with 1 or 2 consumers, a tile_n up to 200 and"
            f" a split of 1; got {c}"
        )


def _tall(c):
    """Is there a kernel whose consumers have 128 rows of such tiles?"""
    return c.consumers < 3 and c.tile_n <= 200 and c.split == 1


def check(config, m, ta, tb):
    if isinstance(config, FewRowsConfig):
        return _few_rows.check_config(config, m, ta, tb)
    if not isinstance(config, MatmulConfig):
        raise TypeError(f"matmul: config must be a MatmulConfig or a FewRowsConfig, got {config!r}")
    _check_numbers(config)
    c = config
    if (
        c.consumers not in (1, 2, 3)
        or c.swapped
        and ta
        or min(c.cluster, c.cluster_n, c.split, c.slices, c.shares) < 1
        or c.shares > 1
        and c.split * c.slices > 1
        or c.tile_n % (8 if c.swapped else 8 * c.split)
        or c.cluster * c.cluster_n * c.split > 8
        or c.stages < 0
        or min(c.buffers, c.group) < 1
        or c.step not in (64, 128)
        or c.lag not in (0, 1)
    ):
        raise ValueError(
            "matmul: a MatmulConfig has 1 to 3 consumers, a split that leaves a multiple of 8"
            " columns, up to 8 blocks a cluster (cluster * cluster_n * split), stages from 0,"
            " buffers, a group, slices and shares from 1 (shares above 1 with a split and slices of"
            " 1), a step of 64 or 128, a lag of 0 or 1 and no transpose_a if it is swapped; got"
            f" {config}"
        )
    _check_tile(config, tb)
