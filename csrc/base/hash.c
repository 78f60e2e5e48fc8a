/* Hashes: XXH3 of vendor/xxhash.h, compiled into this file alone. */
#include "base.h"

#define XXH_INLINE_ALL
#include "../vendor/xxhash.h"

uint64_t pm_hash(const void *p, size_t n, uint64_t seed) {
  return XXH3_64bits_withSeed(p, n, seed);
}

void pm_hash128(const void *p, size_t n, uint64_t out[2]) {
  XXH128_hash_t h = XXH3_128bits(p, n);
  out[0] = h.low64;
  out[1] = h.high64;
}
