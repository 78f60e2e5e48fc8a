/* acc += a @ b for one wgmma.
 *
 * Both operands are widened to f32 and packed into panels: for each run of rows of
 * a (columns of b) as wide as the register block, all of K in order. A microkernel keeps one block
 * of acc in vector registers over the whole K. It is one function, written with vector extensions
 * and compiled for three instruction sets; the block's size is chosen to fill their registers.
 *
 * An f16 accumulator is rounded once per wgmma. */
#include "vm.h"

enum { MAX_ROWS = 8, MAX_COLS = 32 };

typedef void (*micro_fn)(int64_t k, const float *a, const float *b, float *c, int64_t ldc);

/* c[ROWS][VECS * LANES] += a[k][ROWS] x b[k][VECS * LANES] */
#define MICRO(name, target, ROWS, VECS, LANES)                                                   \
  typedef float name##_vec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));       \
  target static void name(int64_t k, const float *a, const float *b, float *c, int64_t ldc) {    \
    typedef float vec __attribute__((vector_size(LANES * 4)));                                   \
    vec sum[ROWS][VECS];                                                                         \
    for (int r = 0; r < ROWS; r++)                                                               \
      for (int v = 0; v < VECS; v++) sum[r][v] = *(const name##_vec *)(c + r * ldc + v * LANES); \
    for (; k > 0; k--, a += ROWS, b += VECS * LANES)                                             \
      for (int v = 0; v < VECS; v++) {                                                           \
        vec x = *(const name##_vec *)(b + v * LANES);                                            \
        for (int r = 0; r < ROWS; r++) sum[r][v] += a[r] * x;                                    \
      }                                                                                          \
    for (int r = 0; r < ROWS; r++)                                                               \
      for (int v = 0; v < VECS; v++) *(name##_vec *)(c + r * ldc + v * LANES) = sum[r][v];       \
  }

#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast") /* the build forbids it elsewhere */
#if defined(__x86_64__)
MICRO(micro_avx512, __attribute__((target("avx512f"))), 8, 2, 16)
MICRO(micro_avx2, __attribute__((target("avx2,fma"))), 4, 2, 8)
#endif
MICRO(micro_plain, , 4, 2, 4)
#pragma GCC pop_options

typedef struct block_shape {
  micro_fn micro;
  int64_t rows, cols;
} block_shape;

static block_shape choose_block(void) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return (block_shape){micro_avx512, 8, 32};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return (block_shape){micro_avx2, 4, 16};
  }
#endif
  return (block_shape){micro_plain, 4, 8};
}

size_t pm_vm_pack_bytes(int64_t m, int64_t n, int64_t k) {
  int64_t rows = pm_round_up(m, MAX_ROWS), cols = pm_round_up(n, MAX_COLS);
  int64_t line = pm_max(pm_max(m, n), k);
  return (size_t)((rows + cols) * k + m * n + MAX_ROWS * MAX_COLS + line) * sizeof(float);
}

/* ---- packing ------------------------------------------------------------------------------ */

/* A matrix of `major` rows (of a) or columns (of b) by K: its element (i, p) is at i * step + p *
 * k_step. */
typedef struct operand {
  const char *at;
  int64_t major, k, step, k_step;
} operand;

/* Panels of `width` majors, padded with zeros, each [K][width]. `line` holds one row of the source.
 */
static void pack(pm_dtype d, operand x, int64_t width, float *line, float *dst) {
  uint8_t bytes = pm_dtypes[d].bytes;
  int64_t padded = pm_round_up(x.major, width);
  if (x.step == 1) {
    for (int64_t p = 0; p < x.k; p++) {
      pm_convert_array(d, PM_F32, x.at + p * x.k_step * bytes, line, (size_t)x.major);
      for (int64_t i = 0; i < padded; i += width) {
        float *to = dst + i * x.k + p * width;
        int64_t n = pm_min(width, x.major - i);
        memcpy(to, line + i, (size_t)n * sizeof *to);
        if (n < width) memset(to + n, 0, (size_t)(width - n) * sizeof *to);
      }
    }
    return;
  }
  for (int64_t i = 0; i < padded; i++) {
    float *to = dst + i / width * width * x.k + i % width;
    const char *from = x.at + i * x.step * bytes;
    if (i >= x.major) {
      memset(line, 0, (size_t)x.k * sizeof *line);
    } else if (x.k_step == 1) {
      pm_convert_array(d, PM_F32, from, line, (size_t)x.k);
    } else {
      for (int64_t p = 0; p < x.k; p++) {
        pm_convert_array(d, PM_F32, from + p * x.k_step * bytes, line + p, 1);
      }
    }
    for (int64_t p = 0; p < x.k; p++) to[p * width] = line[p];
  }
}

static operand operand_of(const spot *s, const void *array, int64_t major, int64_t k,
                          int major_dim) {
  if (!s->mem) return (operand){array, major, k, k, 1}; /* a, row-major */
  return (operand){s->at, major, k, s->mem->stride[major_dim], s->mem->stride[1 - major_dim]};
}

/* ---- products ----------------------------------------------------------------------------- */

static void multiply(block_shape block, int64_t m, int64_t n, int64_t k, const float *a,
                     const float *b, float *c, int64_t ldc) {
  float tile[MAX_ROWS * MAX_COLS];
  for (int64_t j = 0; j < n; j += block.cols) {
    for (int64_t i = 0; i < m; i += block.rows) {
      float *to = c + i * ldc + j;
      int64_t rows = pm_min(block.rows, m - i), cols = pm_min(block.cols, n - j);
      if (rows == block.rows && cols == block.cols) {
        block.micro(k, a + i * k, b + j * k, to, ldc);
        continue;
      }
      memset(tile, 0, sizeof tile);
      for (int64_t r = 0; r < rows; r++) {
        memcpy(tile + r * block.cols, to + r * ldc, (size_t)cols * sizeof *tile);
      }
      block.micro(k, a + i * k, b + j * k, tile, block.cols);
      for (int64_t r = 0; r < rows; r++) {
        memcpy(to + r * ldc, tile + r * block.cols, (size_t)cols * sizeof *tile);
      }
    }
  }
}

void pm_vm_matmul(char *pack_buffer, const spot *acc, const spot *lhs, const void *lhs_array,
                  const spot *rhs, pm_dtype dtype) {
  int64_t m = acc->mem->dim[0], n = acc->mem->dim[1], k = rhs->mem->dim[0],
          ldc = acc->mem->stride[0];
  operand a = operand_of(lhs, lhs_array, m, k, 0), b = operand_of(rhs, NULL, n, k, 1);
  float *c = (float *)pack_buffer, *line = c + m * n, *pa = line + pm_max(pm_max(m, n), k);
  block_shape block = choose_block();
  float *pb = pa + pm_round_up(m, block.rows) * k;
  pack(dtype, a, block.rows, line, pa);
  pack(dtype, b, block.cols, line, pb);
  if (acc->mem->dtype == PM_F32) {
    multiply(block, m, n, k, pa, pb, (float *)acc->at, ldc);
    return;
  }
  for (int64_t i = 0; i < m; i++) {
    pm_convert_array(acc->mem->dtype, PM_F32, acc->at + i * ldc * 2, c + i * n, (size_t)n);
  }
  multiply(block, m, n, k, pa, pb, c, n);
  for (int64_t i = 0; i < m; i++) {
    pm_convert_array(PM_F32, acc->mem->dtype, c + i * n, acc->at + i * ldc * 2, (size_t)n);
  }
}
