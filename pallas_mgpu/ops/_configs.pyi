from typing import NamedTuple

class AttentionConfig(NamedTuple):
    consumers: int = 2
    block: int = 128
    stages: int = 2
    lazy: bool = True
    late: bool = True
    hold: bool = False
    q_registers: bool = False
    programs: int = 0
    apart: bool = False
    early: bool = False

class AttentionDecodeConfig(NamedTuple):
    consumers: int = 0
    stages: int = 0
    lanes: int = 0
    prefetch: bool | None = None

class FewRowsConfig(NamedTuple):
    tile_n: int = 128
    split: int = 8
    stages: int = 4
    step: int = 64

class SampleConfig(NamedTuple):
    blocks: int = 1

class MatmulConfig(NamedTuple):
    consumers: int = 2
    tile_n: int = 256
    stages: int = 0
    cluster: int = 2
    buffers: int = 2
    group: int = 8
    cluster_n: int = 1
    split: int = 1
    step: int = 64
    lag: int = 1
    serpentine: bool = True
    slices: int = 1
    shares: int = 1
    swapped: bool = False
    consumer_rows: int = 64

class GatedBackwardConfig(NamedTuple):
    product: MatmulConfig = ...
    height: int = 32

class MixedConfig(NamedTuple):
    consumers: int = 2
    tile_m: int = 128
    split: int = 1
    stages: int = 0
    step: int = 128
    group: int = 8
    turns: int = 1
    ahead: int = 0
    cluster: int = 1
    ordered: bool = False

class MlaConfig(NamedTuple):
    block: int = 64
    stages: int = 0

class NormBackwardConfig(NamedTuple):
    members: int = 0
    cluster: int = 0
    height: int = 0
    stages: int = 0
    roles: bool = False

class NormConfig(NamedTuple):
    height: int = 1
    cluster: int = 1
    part: int = 0
    staged: bool = True
    ring: int = 0
    consumers: int = 2
    programs: int = 0
    unroll: int = 0
    stream: bool = False
    spans: bool = False
    threads: int = 1
    divided: bool = False
    slices: int = 0

class AttentionBackwardConfig(NamedTuple):
    products: int = 7
    stages: int = 0

class TensorMemoryBackwardConfig(NamedTuple):
    rotate: bool = True

class MmaAttentionConfig(NamedTuple):
    rows: int = 64
    block: int = 64
    stages: int = 2

class MmaConfig(NamedTuple):
    tile_m: int = 128
    tile_n: int = 128
    step: int = 32
    stages: int = 0
    group: int = 8

class TensorMemoryAttentionConfig(NamedTuple):
    stages: int = 0
    polynomials: int | None = None

class TensorMemoryConfig(NamedTuple):
    tile_n: int = 256
    pair: bool = True
    stages: int = 0
    buffers: int = 2
    group: int = 8
    step: int = 128
    dynamic: bool = True

class TensorMemoryMixedConfig(NamedTuple):
    tile_m: int = 128
    stages: int = 0
    step: int = 128
    group: int = 8

class RaggedConfig(NamedTuple):
    consumers: int = 2
    tile: int = 256
    stages: int = 0
    cluster: int = 2
    buffers: int = 2
    group: int = 16
