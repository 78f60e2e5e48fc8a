/* acc += a @ b for one wgmma or mma.
 *
 * Both operands are widened to f32 and packed into panels: for each group of rows of a (columns of
 * b) as wide as the register block, all of K in order. A microkernel keeps one block of acc in
 * vector registers over the whole K. It is one function, written with vector extensions and
 * compiled for three instruction sets; the size of the block is chosen to fill their registers.
 *
 * An f16 accumulator is rounded once for each product. f32 operands are truncated to tf32. Integers
 * are multiplied by the same code, over as many steps along K at a time as f32 can sum exactly, and
 * added to the accumulator as integers. */
#include "vm.h"

enum { MAX_ROWS = 8, MAX_COLS = 32, CACHE_LINE = 64 };

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

/* the build forbids contraction elsewhere */
#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#endif
#if defined(__x86_64__)
MICRO(micro_avx512, __attribute__((target("avx512f"))), 8, 2, 16)
MICRO(micro_avx2, __attribute__((target("avx2,fma"))), 4, 2, 8)
#endif
MICRO(micro_plain, , 4, 2, 4)
#ifdef __clang__
#pragma clang fp contract(off)
#else
#pragma GCC pop_options
#endif

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
  return (size_t)((rows + cols) * k + m * n + MAX_ROWS * MAX_COLS + line) * sizeof(float) +
         CACHE_LINE;
}

/* ---- packing ------------------------------------------------------------------------------ */

typedef pm_vm_factor operand;

/* the hardware ignores the low 13 bits */
static void cut_to_tf32(float *x, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, &x[i], sizeof bits);
    bits &= 0xffffe000u;
    memcpy(&x[i], &bits, sizeof bits);
  }
}

static void widen(const operand *x, const char *from, float *to, int64_t n) {
  pm_convert_array(x->dtype, PM_F32, from, to, (size_t)n);
  if (x->dtype == PM_F32) cut_to_tf32(to, n);
}

/* Panels of `width` majors, padded with zeros, each [K][width]. `line` holds one row of the source.
 */
static void pack(operand x, int64_t width, float *line, float *dst) {
  uint8_t bytes = pm_dtypes[x.dtype].bytes;
  int64_t padded = pm_round_up(x.major, width);
  if (x.step == 1) {
    for (int64_t p = 0; p < x.k; p++) {
      widen(&x, x.at + p * x.k_step * bytes, line, x.major);
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
      widen(&x, from, line, x.k);
    } else {
      for (int64_t p = 0; p < x.k; p++) {
        widen(&x, from + p * x.k_step * bytes, line + p, 1);
      }
    }
    for (int64_t p = 0; p < x.k; p++) to[p * width] = line[p];
  }
}

static operand operand_of(const located *s, const void *array, int64_t major, int64_t k,
                          int major_dim, pm_dtype dtype) {
  if (!s->mem) return (operand){array, major, k, k, 1, dtype}; /* a, row-major */
  return (operand){s->at, major, k, s->mem->stride[major_dim], s->mem->stride[1 - major_dim],
                   dtype};
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

typedef pm_vm_target target;

static void product(char *buffer, const target *acc, operand a, operand b) {
  const int64_t m = acc->m, n = acc->n, k = a.k;
  float *c = (float *)buffer, *line = c + m * n, *pa = line + pm_max(pm_max(m, n), k);
  block_shape block = choose_block();
  /* no vector of b lies in two cache lines, wherever the buffer begins */
  float *pb = pa + pm_round_up(m, block.rows) * k;
  pb += (CACHE_LINE - (uintptr_t)pb % CACHE_LINE) % CACHE_LINE / sizeof *pb;
  pack(a, block.rows, line, pa);
  pack(b, block.cols, line, pb);
  if (acc->dtype == PM_F32) {
    multiply(block, m, n, k, pa, pb, (float *)acc->at, acc->ldc);
    return;
  }
  for (int64_t i = 0; i < m; i++) {
    if (acc->dtype == PM_I32) memset(c + i * n, 0, (size_t)n * sizeof *c);
    else pm_convert_array(acc->dtype, PM_F32, acc->at + i * acc->ldc * 2, c + i * n, (size_t)n);
  }
  multiply(block, m, n, k, pa, pb, c, n);
  for (int64_t i = 0; i < m; i++) {
    if (acc->dtype == PM_I32) {
      uint32_t *to = (uint32_t *)acc->at + i * acc->ldc;
      for (int64_t j = 0; j < n; j++) to[j] += (uint32_t)(int32_t)c[i * n + j];
    } else {
      pm_convert_array(PM_F32, acc->dtype, c + i * n, acc->at + i * acc->ldc * 2, (size_t)n);
    }
  }
}

/* 256 products of uint8 are below 2^24 */
void pm_vm_product(char *buffer, const target *acc, operand a, operand b) {
  enum { MOST = 256 };
  const int64_t k = a.k, step = acc->dtype == PM_I32 ? MOST : k;
  for (int64_t at = 0; at < k; at += step) {
    a.k = b.k = pm_min(step, k - at);
    product(buffer, acc, a, b);
    a.at += step * a.k_step * pm_dtypes[a.dtype].bytes;
    b.at += step * b.k_step * pm_dtypes[b.dtype].bytes;
  }
}

void pm_vm_matmul(char *buffer, const located *acc, const located *lhs, const void *lhs_array,
                  const located *rhs, pm_dtype a, pm_dtype b) {
  const access *c = acc->mem;
  const int64_t k = rhs->mem->dim[0];
  const target to = {acc->at, c->dim[0], c->dim[1], c->stride[0], (pm_dtype)c->dtype};
  pm_vm_product(buffer, &to, operand_of(lhs, lhs_array, to.m, k, 0, a),
                operand_of(rhs, NULL, to.n, k, 1, b));
}
