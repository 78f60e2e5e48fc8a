// Tensor memory and its tensor cores for tests on Hopper (stand_in.c), but for what needs PTX.
//
// tensor_memory has 512 columns of 128 lanes for each block of the launch, by tensor_block(). The
// engine of a block takes commands from a queue in the order of their tickets; each of its warps
// takes every command and has its own rows of D. Products of pairs go to the engines of both
// blocks: each computes the columns of D of its half of B, for the rows of both. A commit of a pair
// is an arrival when both engines have come to it.

//! TENSOR_BLOCKS
enum { TENSOR_BLOCKS = 512, TENSOR_COLUMNS = 512 };
enum { TENSOR_PRODUCT, TENSOR_COMMIT, TENSOR_MEET, TENSOR_END };  // word 0 of a command
// word 7; A: in tensor memory
enum { TENSOR_ADDS = 1, TENSOR_OF_PAIR = 2, TENSOR_A = 4, TENSOR_FP8 = 8 };

//! tensor_queues
struct TensorCommand { u32 ready, word[9]; };  // ready: ticket + 1
struct TensorQueue {
  u32 tickets, taken[4];     // commands so far, and by each warp of the engine
  u32 commits[4], of_pairs;  // by each warp; those of pairs that all warps have come to
  TensorCommand ring[64];
};
__device__ TensorQueue tensor_queues[TENSOR_BLOCKS];

//! tensor_memory
__device__ u32 tensor_memory[TENSOR_BLOCKS * TENSOR_COLUMNS * 128];

//! tensor_columns
__device__ u32 tensor_columns[1024];  // that are allocated, by multiprocessor

//! tensor_launch
// by cluster, 0: has not begun, 1: has begun, 2: will not, another has its place
struct TensorLaunch { u32 ended, state[TENSOR_BLOCKS]; };
__device__ TensorLaunch tensor_launch;

//! tensor_block
// the number in the launch of a block of this cluster
FN u32 tensor_block(u32 rank) {
  constexpr u32 all = cluster_blocks[0] * cluster_blocks[1] * cluster_blocks[2];
  const u32 z = blockIdx.z / cluster_blocks[2], y = blockIdx.y / cluster_blocks[1];
  const u32 row = z * (gridDim.y / cluster_blocks[1]) + y;
  return (row * (gridDim.x / cluster_blocks[0]) + blockIdx.x / cluster_blocks[0]) * all + rank;
}

//! tensor_cells
FN u32* tensor_cells(u32 block, u32 a) {
  return &tensor_memory[(block * TENSOR_COLUMNS + (a & 0xffff)) * 128 + (a >> 16)];
}

//! tensor_send
FN void tensor_send(u32 block, u32 kind, u32 flags, u32 d, u32 a, u32 a_high, u32 b, u32 b_high,
                    u32 instruction) {
  const u32 word[9] = {kind, d, a, a_high, b, b_high, instruction, flags, shared_base()};
  TensorQueue* q = &tensor_queues[block];
  const u32 ticket = queue_add(&q->tickets, 1);
  for (int w = 0; w < 4; w++)
    while (ticket - queue_load(&q->taken[w]) >= 64) queue_pause(100);
  TensorCommand* c = &q->ring[ticket % 64];
  for (int k = 0; k < 9; k++) cell_store(&c->word[k], word[k]);
  queue_store(&c->ready, ticket + 1);
}

// ---- the engine

//! tensor_lane
// of row m of a matrix; with 64 rows they are in half of the lanes of each warp
FN u32 tensor_lane(u32 m, bool half) { return half ? m / 16 * 32 + m % 16 : m; }

//! tensor_operand
// address in shared memory of an element of A, by the descriptor
FN u32 tensor_operand(u32 low, u32 high, bool m_major, u32 bytes, u32 m, u32 k) {
  const u32 row = 256 >> (high >> 30);  // bytes of the swizzle: 128, 64, 32
  const u32 stride = (high & 0x3fff) << 4, leading = (low >> 16 & 0x3fff) << 4;
  const u32 fast = (m_major ? m : k) * bytes, slow = m_major ? k : m;
  const u32 a = ((low & 0x3fff) << 4) + fast / row * leading + fast % row + slow / 8 * stride +
                slow % 8 * row;
  return a ^ (a >> 3 & (row - 16));
}

//! tensor_fragment
// A in registers: of 64 rows from `first`, in tensor memory or in the shared memory of a block
FN void tensor_fragment(u32* f, const u32* w, u32 block, u32 offset, u32 first, bool half) {
  const u32 lane = threadIdx.x & 31, bytes = w[7] & TENSOR_FP8 ? 1 : 2, per = 4 / bytes;
  const bool m_major = w[6] >> 15 & 1;
  #pragma unroll
  for (u32 r = 0; r < 4; r++) {
    const u32 m = first + lane / 4 + r % 2 * 8, k = (lane % 4 + r / 2 * 4) * per;
    if (w[7] & TENSOR_A) {
      f[r] = cell_load(tensor_cells(block, w[2] + k / per) + tensor_lane(m, half));
    } else if (!m_major) {
      ld_cluster<u32, 1>(&f[r], tensor_operand(w[2], w[3], false, bytes, m, k) + offset);
    } else {
      u16 x[2];
      ld_cluster<u16, 1>(&x[0], tensor_operand(w[2], w[3], true, bytes, m, k) + offset);
      ld_cluster<u16, 1>(&x[1], tensor_operand(w[2], w[3], true, bytes, m, k + 1) + offset);
      f[r] = x[0] | (u32)x[1] << 16;
    }
  }
}

//! tensor_piece
// N columns of D from `cells`, of 64 rows from `first`; f: A in registers, else by its descriptor
template <int N, int TYPES, bool TA, bool TB> FN void tensor_piece(
    u32* cells, u32 first, bool half, bool adds, const u32* f, bool in_registers, u32 a,
    u32 a_high, u32 b, u32 b_high) {
  const u32 lane = threadIdx.x & 31, m = first + lane / 4;
  f32 d[N / 2];
  #pragma unroll
  for (int k = 0; k < N / 2; k++) {
    const u32 column = k / 4 * 8 + lane % 4 * 2 + k % 2, row = tensor_lane(m + k / 2 % 2 * 8, half);
    u32 x = 0;
    if (adds) x = cell_load(&cells[column * 128 + row]);
    from_bits(d[k], x);
  }
  if (in_registers) tensor_wgmma_registers<N, TYPES, TB>(d, f, b, b_high);
  else tensor_wgmma<N, TYPES, TA, TB>(d, a, a_high, b, b_high);
  #pragma unroll
  for (int k = 0; k < N / 2; k++) {
    const u32 column = k / 4 * 8 + lane % 4 * 2 + k % 2, row = tensor_lane(m + k / 2 % 2 * 8, half);
    cell_store(&cells[column * 128 + row], bits_of(d[k]));
  }
}

//! tensor_columns_of
// all columns of D whose part of B is in this block, for 64 rows of a block
template <int TYPES, bool TA, bool TB> FN void tensor_columns_of(
    const u32* w, u32* cells, u32 columns, u32 first, bool half, const u32* f, bool in_registers,
    u32 a) {
  constexpr u32 bytes = TYPES < 2 ? 2 : 1;
  const u32 a_high = w[3] & ~0x1c000u, b_high = w[5] & ~0x1c000u;  // bits 46 to 48 are not wgmma's
  const u32 row = 256 >> (b_high >> 30), stride = b_high & 0x3fff, leading = w[4] >> 16 & 0x3fff;
  const bool adds = w[7] & TENSOR_ADDS;
  for (u32 c = 0; c < columns;) {
    const u32 b = w[4] + (TB ? c * bytes / row * leading + c * bytes % row / 16 : c / 8 * stride);
    u32* at = cells + c * 128;
    if (columns - c >= 64) {
      tensor_piece<64, TYPES, TA, TB>(at, first, half, adds, f, in_registers, a, a_high, b, b_high);
      c += 64;
    } else {
      tensor_piece<8, TYPES, TA, TB>(at, first, half, adds, f, in_registers, a, a_high, b, b_high);
      c += 8;
    }
  }
}

//! tensor_product
FN void tensor_product(u32* w) {
  const u32 moved = (shared_base() - w[8]) >> 4;  // if the block that asks has another base
  if (!(w[7] & TENSOR_A)) w[2] = (w[2] & ~0x3fffu) | ((w[2] + moved) & 0x3fff);
  w[4] = (w[4] & ~0x3fffu) | ((w[4] + moved) & 0x3fff);
  const bool pair = w[7] & TENSOR_OF_PAIR, ta = w[6] >> 15 & 1, tb = w[6] >> 16 & 1;
  const u32 me = cluster_rank(), blocks = pair ? 2 : 1, warp = threadIdx.x / 32 % 4;
  const u32 rows = (w[6] >> 24 & 31) * 16 / blocks, columns = (w[6] >> 17 & 63) * 8 / blocks;
  const u32 row_bytes = 256 >> (w[3] >> 30), bytes = w[7] & TENSOR_FP8 ? 1 : 2;
  for (u32 k = 0; k < blocks; k++) {
    const u32 of = pair ? me / 2 * 2 + k : me, block = tensor_block(of);
    const bool in_registers = w[7] & TENSOR_A || of != me;
    u32* cells = tensor_cells(block, w[1]) + (pair ? me % 2 * columns * 128 : 0);
    for (u32 m = 0; m < rows; m += 64) {
      u32 f[4] = {0, 0, 0, 0};
      const u32 first = m + warp * 16, strides = m / 8 * (w[3] & 0x3fff);
      const u32 chunks = m * bytes / row_bytes * (w[2] >> 16 & 0x3fff);
      const u32 a = w[2] + (ta ? chunks : strides);
      // descriptors have 18 bits of an address; those of the block's place in the cluster come back
      const u32 there = peer_offset(of) + (shared_base() & ~0x3ffffu);
      if (in_registers) tensor_fragment(f, w, block, there, first, rows == 64);
#define COLUMNS(types, ta, tb) \
  tensor_columns_of<types, ta, tb>(w, cells, columns, first, rows == 64, f, in_registers, a)
#define TYPES_OF(types) \
  if (ta && tb) COLUMNS(types, true, true); \
  else if (ta) COLUMNS(types, true, false); \
  else if (tb) COLUMNS(types, false, true); \
  else COLUMNS(types, false, false)
      const u32 of_a = w[6] >> 7 & 1, of_b = w[6] >> 10 & 1;
      const u32 types = w[7] & TENSOR_FP8 ? 2 + of_a + of_b * 2 : of_a;
      if constexpr (engine_types & 1) { if (types == 0) { TYPES_OF(0); } }
      if constexpr (engine_types & 2) { if (types == 1) { TYPES_OF(1); } }
      if constexpr (engine_types & 4) { if (types == 2) COLUMNS(2, false, false); }
      if constexpr (engine_types & 8) { if (types == 3) COLUMNS(3, false, false); }
      if constexpr (engine_types & 16) { if (types == 4) COLUMNS(4, false, false); }
      if constexpr (engine_types & 32) { if (types == 5) COLUMNS(5, false, false); }
#undef TYPES_OF
#undef COLUMNS
    }
  }
}

//! tensor_commit
// by each warp; number: of this commit. Warp 0 arrives when the others are here as well.
FN void tensor_commit(TensorQueue* q, const u32* w, u32 number) {
  const u32 warp = threadIdx.x / 32 % 4, me = cluster_rank();
  cells_fence();
  fence_proxy_async();
  warp_sync();
  if ((threadIdx.x & 31) == 0) {
    queue_store(&q->commits[warp], number);
    if (warp == 0) {
      for (int k = 1; k < 4; k++)
        while ((i32)(queue_load(&q->commits[k]) - number) < 0) queue_pause(50);
      if (!(w[7] & TENSOR_OF_PAIR)) {
        mbarrier_arrive(w[1]);
      } else {
        const u32 here = queue_add(&q->of_pairs, 1) + 1;
        if (me % 2 == 0) {
          const u32* there = &tensor_queues[tensor_block(me + 1)].of_pairs;
          while ((i32)(queue_load(there) - here) < 0) queue_pause(50);
          for (u32 k = 0; k < 16; k++)
            if (w[2] >> k & 1) mbarrier_arrive_release(w[1], k);
        }
      }
    }
  }
  warp_sync();
}

//! tensor_engine
FN void tensor_engine() {
  const u32 warp = threadIdx.x / 32 % 4, lane = threadIdx.x & 31;
  TensorQueue* q = &tensor_queues[tensor_block(cluster_rank())];
  u32 commits = queue_load(&q->commits[warp]);
  for (u32 at = queue_load(&q->taken[warp]);; at++) {
    const TensorCommand* c = &q->ring[at % 64];
    u32 w[9];
    if (lane == 0) {
      for (u32 polls = 0; queue_load(&c->ready) != at + 1; polls++) {
        if (polls >> 24) check_failed("the tensor cores have had nothing to do for long", "", 0);
        queue_pause(50);
      }
      const u32 noise = queue_noise() * 2654435761u >> 16;
      if (noise % 4 == 0) queue_pause(noise / 4 % 4096);
    }
    warp_sync();
    #pragma unroll
    for (int k = 0; k < 9; k++) w[k] = cell_load(&c->word[k]);
    warp_sync();
    if (lane == 0) queue_store(&q->taken[warp], at + 1);
    if (w[0] == TENSOR_END) return;
    if (w[0] == TENSOR_PRODUCT) tensor_product(w);
    else if (w[0] == TENSOR_COMMIT) tensor_commit(q, w, ++commits);
    else cluster_meet();
  }
}

// ---- allocation

//! tmem_alloc
// Warp 0 waits until the multiprocessor has as many columns. What they hold is not a number.
template <int CTAS> FN void tmem_alloc(u32 slot, u32 columns) {
  const u32 first = TENSOR_COLUMNS - columns, block = tensor_block(cluster_rank());
  const u32 lane = threadIdx.x & 31;
  if (lane == 0) {
    if (gridDim.x * gridDim.y * gridDim.z > TENSOR_BLOCKS)
      check_failed("the stand-in for tensor memory is for at most 512 blocks", "", 0);
    u32* taken = &tensor_columns[multiprocessor()];
    while (queue_add(taken, columns) + columns > TENSOR_COLUMNS) {
      queue_add(taken, 0u - columns);
      queue_pause(1000);
    }
    st_shared<u32, 1>(slot, &first);
    engine_begins();
  }
  for (u32 k = lane; k < columns * 128; k += 32) cell_store(tensor_cells(block, first) + k, ~0u);
  cells_fence();
  warp_sync();
}

//! tmem_relinquish
template <int CTAS> FN void tmem_relinquish() {}

//! tmem_dealloc
template <int CTAS> FN void tmem_dealloc(u32 tmem, u32 columns) {
  if ((threadIdx.x & 31) != 0) return;
  tensor_send(tensor_block(cluster_rank()), TENSOR_END, 0, 0, 0, 0, 0, 0, 0);
  queue_add(&tensor_columns[multiprocessor()], 0u - columns);
  if (takes_over) block_ends();
}

// ---- what lanes ask for

//! tcgen05_mma_f16
FN void tcgen05_mma_f16(u32 d, u32 a, u32 ah, u32 b, u32 bh, u32 instruction, bool adds) {
  tensor_send(tensor_block(cluster_rank()), TENSOR_PRODUCT, adds, d, a, ah, b, bh, instruction);
}

//! tcgen05_mma_f16_tmem
FN void tcgen05_mma_f16_tmem(u32 d, u32 a, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_A | (u32)adds;
  tensor_send(tensor_block(cluster_rank()), TENSOR_PRODUCT, flags, d, a, 0, b, bh, instruction);
}

//! tcgen05_mma_f16_pair
FN void tcgen05_mma_f16_pair(u32 d, u32 a, u32 ah, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_OF_PAIR | (u32)adds, me = tensor_block(cluster_rank());
  for (u32 k = 0; k < 2; k++)
    tensor_send(me + k, TENSOR_PRODUCT, flags, d, a, ah, b, bh, instruction);
}

//! tcgen05_mma_f16_pair_tmem
FN void tcgen05_mma_f16_pair_tmem(u32 d, u32 a, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_OF_PAIR | TENSOR_A | (u32)adds, me = tensor_block(cluster_rank());
  for (u32 k = 0; k < 2; k++)
    tensor_send(me + k, TENSOR_PRODUCT, flags, d, a, 0, b, bh, instruction);
}

//! tcgen05_mma_f8f6f4
FN void tcgen05_mma_f8f6f4(u32 d, u32 a, u32 ah, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_FP8 | (u32)adds;
  tensor_send(tensor_block(cluster_rank()), TENSOR_PRODUCT, flags, d, a, ah, b, bh, instruction);
}

//! tcgen05_mma_f8f6f4_tmem
FN void tcgen05_mma_f8f6f4_tmem(u32 d, u32 a, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_FP8 | TENSOR_A | (u32)adds;
  tensor_send(tensor_block(cluster_rank()), TENSOR_PRODUCT, flags, d, a, 0, b, bh, instruction);
}

//! tcgen05_mma_f8f6f4_pair
FN void tcgen05_mma_f8f6f4_pair(u32 d, u32 a, u32 ah, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_FP8 | TENSOR_OF_PAIR | (u32)adds, me = tensor_block(cluster_rank());
  for (u32 k = 0; k < 2; k++)
    tensor_send(me + k, TENSOR_PRODUCT, flags, d, a, ah, b, bh, instruction);
}

//! tcgen05_mma_f8f6f4_pair_tmem
FN void tcgen05_mma_f8f6f4_pair_tmem(u32 d, u32 a, u32 b, u32 bh, u32 instruction, bool adds) {
  const u32 flags = TENSOR_FP8 | TENSOR_OF_PAIR | TENSOR_A | (u32)adds;
  for (u32 k = 0; k < 2; k++)
    tensor_send(tensor_block(cluster_rank() + k), TENSOR_PRODUCT, flags, d, a, 0, b, bh,
                instruction);
}

//! tcgen05_commit
FN void tcgen05_commit(u32 b) {
  tensor_send(tensor_block(cluster_rank()), TENSOR_COMMIT, 0, b, 0, 0, 0, 0, 0);
}

//! tcgen05_commit_pair
FN void tcgen05_commit_pair(u32 b, u32 mask) {
  for (u32 k = 0; k < 2; k++)
    tensor_send(tensor_block(cluster_rank() + k), TENSOR_COMMIT, TENSOR_OF_PAIR, b, mask, 0, 0, 0,
                0);
}

//! tcgen05_fence_before
FN void tcgen05_fence_before() {}

//! tcgen05_fence_after
FN void tcgen05_fence_after() {}

// ---- between registers and tensor memory

//! tensor_place
// row and column of register r of a lane. REGISTERS: of .x1; 1: 32x32b, 4: 16x256b, 2: 16x128b
template <int REGISTERS> FN void tensor_place(int r, u32* row, u32* column) {
  const u32 lane = threadIdx.x & 31;
  *row = REGISTERS == 4 ? lane / 4 + r / 2 % 2 * 8 : REGISTERS == 2 ? lane / 4 + r % 2 * 8 : lane;
  *column = REGISTERS == 4   ? r % 2 + lane % 4 * 2 + r / 4 * 8
            : REGISTERS == 2 ? lane % 4 + r / 2 * 4
                             : r;
}

//! tensor_load
// HALVES: a register is two cells of 16 bits
template <int REGISTERS, int N, bool HALVES> FN void tensor_load(u32* const* d, u32 a) {
  const u32* cells = tensor_cells(tensor_block(cluster_rank()), a);
  #pragma unroll
  for (int r = 0; r < N * REGISTERS; r++) {
    u32 row, column;
    tensor_place<REGISTERS>(r, &row, &column);
    const u32* at = &cells[column * (HALVES ? 256 : 128) + row];
    *d[r] = HALVES ? (cell_load(at) & 0xffff) | cell_load(at + 128) << 16 : cell_load(at);
  }
}

//! tensor_store
template <int REGISTERS, int N, bool HALVES> FN void tensor_store(u32* const* s, u32 a) {
  u32* cells = tensor_cells(tensor_block(cluster_rank()), a);
  #pragma unroll
  for (int r = 0; r < N * REGISTERS; r++) {
    u32 row, column;
    tensor_place<REGISTERS>(r, &row, &column);
    u32* at = &cells[column * (HALVES ? 256 : 128) + row];
    cell_store(at, HALVES ? *s[r] & 0xffff : *s[r]);
    if (HALVES) cell_store(at + 128, *s[r] >> 16);
  }
}

//! tmem_load_32x32b
template <int N, bool HALVES> FN void tmem_load_32x32b(u32* const* d, u32 a) {
  tensor_load<1, N, HALVES>(d, a);
}

//! tmem_load_16x256b
template <int N, bool HALVES> FN void tmem_load_16x256b(u32* const* d, u32 a) {
  tensor_load<4, N, HALVES>(d, a);
}

//! tmem_load_16x128b
template <int N, bool HALVES> FN void tmem_load_16x128b(u32* const* d, u32 a) {
  tensor_load<2, N, HALVES>(d, a);
}

//! tmem_store_32x32b
template <int N, bool HALVES> FN void tmem_store_32x32b(u32* const* s, u32 a) {
  tensor_store<1, N, HALVES>(s, a);
}

//! tmem_store_16x256b
template <int N, bool HALVES> FN void tmem_store_16x256b(u32* const* s, u32 a) {
  tensor_store<4, N, HALVES>(s, a);
}

//! tmem_store_16x128b
template <int N, bool HALVES> FN void tmem_store_16x128b(u32* const* s, u32 a) {
  tensor_store<2, N, HALVES>(s, a);
}

//! tmem_wait_load
FN void tmem_wait_load() {}

//! tmem_wait_store
FN void tmem_wait_store() { cells_fence(); }

// ---- blocks

//! block_sync
FN void block_sync() { named_barrier_sync(0, program_lanes); }

//! cluster_sync
// the engine is part of the cluster, and comes when all lanes of its block do
FN void cluster_sync() {
  block_sync();
  if (threadIdx.x == 0)
    tensor_send(tensor_block(cluster_rank()), TENSOR_MEET, 0, 0, 0, 0, 0, 0, 0);
  cluster_meet();
}

//! mbarrier_wait
// The engines of a pair read what copies wrote in the other block.
FN void mbarrier_wait(u32 b, u32 parity) { mbarrier_wait_cluster(b, parity); }

//! setmaxnreg_inc
template <int N> FN void setmaxnreg_inc() {}

//! setmaxnreg_dec
template <int N> FN void setmaxnreg_dec() {}

// ---- cluster launch control

//! block_ends
// the last block of the launch leaves all clusters as they were before it
FN void block_ends() {
  const u32 blocks = gridDim.x * gridDim.y * gridDim.z;
  if (queue_add(&tensor_launch.ended, 1) + 1 != blocks) return;
  for (u32 k = 0; k < TENSOR_BLOCKS; k++) cell_store(&tensor_launch.state[k], 0);
  cell_store(&tensor_launch.ended, 0);
  cells_fence();
}

//! cluster_begins
// Half of the clusters begin late, so that others take their places.
FN bool cluster_begins() {
  constexpr u32 all = cluster_blocks[0] * cluster_blocks[1] * cluster_blocks[2];
  const u32 cluster = tensor_block(0) / all;
  if (cluster * 2654435761u >> 31) queue_pause(200000);
  const bool begins = queue_cas(&tensor_launch.state[cluster], 0, 1) != 2;
  named_barrier_sync(0, program_lanes + 128);
  if (!begins && threadIdx.x == 0) block_ends();
  return begins;
}

//! try_cancel
FN void try_cancel(u32 result, u32 barrier) {
  constexpr u32 all = cluster_blocks[0] * cluster_blocks[1] * cluster_blocks[2];
  const u32 nx = gridDim.x / cluster_blocks[0], ny = gridDim.y / cluster_blocks[1];
  const u32 n = nx * ny * (gridDim.z / cluster_blocks[2]);
  u32 k = 0, w[4] = {0, 0, 0, 0};
  while (k < n && (queue_load(&tensor_launch.state[k]) != 0 ||
                   queue_cas(&tensor_launch.state[k], 0, 2) != 0)) k++;
  if (k < n) {
    w[0] = 1;
    w[1] = k % nx * cluster_blocks[0];
    w[2] = k / nx % ny * cluster_blocks[1];
    w[3] = k / nx / ny * cluster_blocks[2];
  }
  for (u32 rank = 0; rank < all; rank++) {
    if (rank == cluster_rank()) {
      answer_here(result, w, barrier);
    } else {
      const u32 there = peer_offset(rank);
      st_async<u32, 4>(result + there, w, barrier + there);
    }
  }
}

//! query_cancel
FN bool query_cancel(u32 result, u32* block) {
  u32 w[4];
  ld_shared<u32, 4>(w, result);
  for (int k = 0; k < 3; k++) block[k] = w[k + 1];
  return w[0] != 0;
}
