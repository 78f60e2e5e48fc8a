/* Hashes.
 *
 * pm_hash, for tables whose entries are compared in full: processes sixteen bytes at a time. Both
 * halves are mixed with a key that depends on the position and multiplied to 128 bits, of which
 * both halves are used. The multiplications are independent of each other.
 *
 * pm_digest, for contents that are not compared: the first 128 bits of SHA-256 (FIPS 180-4). Used
 * for the key of an entry on disk, its checksum, and the code of a loaded module. */
#include "base.h"

#include <string.h>

/* ---- tables -------------------------------------------------------------------------------- */

enum { LANE = 8 };

static uint64_t word_at(const uint8_t *p, size_t n) {
  uint64_t w = 0;
  memcpy(&w, p, n < LANE ? n : LANE);
  return w;
}

__extension__ typedef unsigned __int128 wide;

static uint64_t fold(uint64_t a, uint64_t b) {
  const wide x = (wide)a * b;
  return (uint64_t)x ^ (uint64_t)(x >> 64);
}

uint64_t pm_hash(const void *data, size_t n, uint64_t seed) {
  /* odd numbers with about as many ones as zeros, of no meaning */
  const uint64_t a = 0x9e3779b97f4a7c15u, b = 0xd1b54a32d192ed03u;
  const uint8_t *p = data;
  uint64_t h = n, key = seed ^ b;
  for (; n > 2 * LANE; n -= 2 * LANE, p += 2 * LANE, key += a) {
    h += fold(word_at(p, LANE) ^ key, word_at(p + LANE, LANE) ^ ~key ^ a);
  }
  const size_t second = n > LANE ? n - LANE : 0;
  h += fold(word_at(p, n) ^ key, word_at(p + (second ? LANE : 0), second) ^ ~key ^ a);
  return fold(h ^ b, a);
}

/* ---- SHA-256 ------------------------------------------------------------------------------- */

enum { BLOCK = 64 };

/* the fractional parts of the cube roots of the first 64 primes */
static const uint32_t round_words[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static uint32_t read_word(const uint8_t *p) {
  return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

/* The state's words go round: what is e after a round is written to d, what is a to h. */
static void add_round(uint32_t a, uint32_t b, uint32_t c, uint32_t *d, uint32_t e, uint32_t f,
                      uint32_t g, uint32_t *h, uint32_t word) {
  const uint32_t choice = (e & f) ^ (~e & g), majority = (a & b) ^ (a & c) ^ (b & c);
  *h += (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + choice + word;
  *d += *h;
  *h += (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;
}

static void add_block(uint32_t state[8], const uint8_t *block) {
  uint32_t w[64], s[8];
  for (int t = 0; t < 16; t++) w[t] = read_word(block + 4 * t);
  for (int t = 16; t < 64; t++) {
    const uint32_t x = w[t - 15], y = w[t - 2];
    const uint32_t low = rotate(x, 7) ^ rotate(x, 18) ^ x >> 3;
    const uint32_t high = rotate(y, 17) ^ rotate(y, 19) ^ y >> 10;
    w[t] = w[t - 16] + low + w[t - 7] + high;
  }
  for (int t = 0; t < 64; t++) w[t] += round_words[t];
  memcpy(s, state, sizeof s);
  for (int t = 0; t < 64; t += 8) {
    add_round(s[0], s[1], s[2], &s[3], s[4], s[5], s[6], &s[7], w[t]);
    add_round(s[7], s[0], s[1], &s[2], s[3], s[4], s[5], &s[6], w[t + 1]);
    add_round(s[6], s[7], s[0], &s[1], s[2], s[3], s[4], &s[5], w[t + 2]);
    add_round(s[5], s[6], s[7], &s[0], s[1], s[2], s[3], &s[4], w[t + 3]);
    add_round(s[4], s[5], s[6], &s[7], s[0], s[1], s[2], &s[3], w[t + 4]);
    add_round(s[3], s[4], s[5], &s[6], s[7], s[0], s[1], &s[2], w[t + 5]);
    add_round(s[2], s[3], s[4], &s[5], s[6], s[7], s[0], &s[1], w[t + 6]);
    add_round(s[1], s[2], s[3], &s[4], s[5], s[6], s[7], &s[0], w[t + 7]);
  }
  for (int k = 0; k < 8; k++) state[k] += s[k];
}

void pm_digest(const void *data, size_t n, uint64_t out[2]) {
  /* the fractional parts of the square roots of the first 8 primes */
  uint32_t state[8] = {
      0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
  };
  const uint8_t *p = data;
  uint8_t last[2 * BLOCK] = {0};
  const size_t whole = n / BLOCK * BLOCK, rest = n - whole;
  const size_t end = rest + 9 > BLOCK ? 2 * BLOCK : BLOCK;
  for (size_t at = 0; at < whole; at += BLOCK) add_block(state, p + at);
  if (rest) memcpy(last, p + whole, rest);
  last[rest] = 0x80;
  for (int k = 0; k < 8; k++) last[end - 1 - (size_t)k] = (uint8_t)((uint64_t)n * 8 >> 8 * k);
  for (size_t at = 0; at < end; at += BLOCK) add_block(state, last + at);
  out[0] = (uint64_t)state[0] << 32 | state[1];
  out[1] = (uint64_t)state[2] << 32 | state[3];
}
