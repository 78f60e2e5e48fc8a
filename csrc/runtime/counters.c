/* Counters of a kernel (PM_ARG_COUNTERS): zeroed words. Launches that may run concurrently need
 * separate words.
 *
 * Launches of one stream follow each other, and each leaves the words zero, so a stream keeps the
 * words of its first launch. So do the launches that one capture takes from one stream: they follow
 * each other in its graph, whichever stream that runs on. Words are slots of chunks that are
 * allocated whole; the first chunk is allocated with the kernel, so that a capture allocates no
 * memory. The owners of a chunk are a hash table that only grows: a lookup takes no lock (during a
 * capture it does), and a new owner claims an empty entry by an atomic exchange. */
#include "counters.h"

#include <pthread.h>
#include <stdatomic.h>

enum { SLOTS = 128, FEW_SLOTS = 8, SLOT_BYTES = 128, CHUNK_BYTES = 1 << 22 };
#define NOBODY ((uintptr_t)0)
#define A_GRAPH UINTPTR_MAX

/* What a graph's words belong to; no stream: no capture. */
typedef struct capture {
  uint64_t id;
  cu_stream stream;
} capture;

typedef struct chunk {
  struct chunk *_Atomic next;
  cu_ptr words;
  _Atomic uintptr_t owner[SLOTS];
  capture of[SLOTS]; /* where the owner is A_GRAPH; under the lock */
} chunk;

struct pm_counters {
  const pm_device *device;
  size_t slot_bytes;
  uint32_t n_slots;     /* of a chunk */
  pthread_mutex_t lock; /* to add a chunk, and for captures */
  chunk *_Atomic first;
};

/* Memory of the pool is freed without waiting for the device. */
static cu_result take_words(const pm_device *d, size_t bytes, cu_ptr *out) {
  return d->pool ? pm_cu.cuMemAllocFromPoolAsync(out, bytes, d->pool, d->stream)
                 : pm_cu.cuMemAlloc(out, bytes);
}

static void give_words(const pm_device *d, cu_ptr words) {
  if (d->pool) pm_cu.cuMemFreeAsync(words, d->stream);
  else pm_cu.cuMemFree(words);
}

/* In the device's context. */
static pm_code new_chunk(pm_counters *c, chunk **out, pm_err *err) {
  const size_t bytes = c->n_slots * c->slot_bytes;
  chunk *k = pm_malloc(sizeof *k);
  if (!k) return pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  memset(k, 0, sizeof *k);
  cu_result r = take_words(c->device, bytes, &k->words);
  if (!r) {
    r = pm_cu.cuMemsetD8Async(k->words, 0, bytes, c->device->stream);
    if (!r) r = pm_cu.cuStreamSynchronize(c->device->stream);
    if (r) give_words(c->device, k->words);
  }
  if (r) {
    pm_free(k);
    return pm_cu_fail(err, PM_E_DRIVER, r,
                      "no memory for the counters of a kernel on CUDA device %d",
                      c->device->info.ordinal);
  }
  *out = k;
  return PM_OK;
}

pm_code pm_counters_new(const pm_device *d, uint32_t words, pm_counters **out, pm_err *err) {
  chunk *first;
  pm_counters *c = pm_malloc(sizeof *c);
  *out = NULL;
  if (!c) return pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  memset(c, 0, sizeof *c);
  c->device = d;
  c->slot_bytes = (size_t)pm_round_up((int64_t)words * 4, SLOT_BYTES);
  c->n_slots = (uint32_t)pm_max(FEW_SLOTS, pm_min(SLOTS, CHUNK_BYTES / c->slot_bytes));
  if (new_chunk(c, &first, err)) {
    pm_free(c);
    return err->code;
  }
  atomic_init(&c->first, first);
  pthread_mutex_init(&c->lock, NULL);
  *out = c;
  return PM_OK;
}

void pm_counters_free(pm_counters *c) {
  if (!c) return;
  for (chunk *k = atomic_load(&c->first), *next; k; k = next) {
    next = atomic_load(&k->next);
    give_words(c->device, k->words);
    pm_free(k);
  }
  pthread_mutex_destroy(&c->lock);
  pm_free(c);
}

/* The owner's slot in a chunk, which it takes if it has none; -1: there is none left. */
static int find_slot(const pm_counters *c, chunk *k, uintptr_t owner) {
  const uint32_t from = (uint32_t)(owner / 16 ^ owner) % c->n_slots;
  for (uint32_t n = 0; n < c->n_slots; n++) {
    const uint32_t i = (from + n) % c->n_slots;
    uintptr_t found = atomic_load_explicit(&k->owner[i], memory_order_acquire);
    if (found == NOBODY && atomic_compare_exchange_strong(&k->owner[i], &found, owner))
      return (int)i;
    if (found == owner) return (int)i;
  }
  return -1;
}

/* The same for a capture. */
static int find_captured(pm_counters *c, chunk *k, capture x) {
  int slot = -1;
  pthread_mutex_lock(&c->lock);
  for (uint32_t i = 0; slot < 0 && i < c->n_slots; i++)
    if (atomic_load(&k->owner[i]) == A_GRAPH && k->of[i].id == x.id && k->of[i].stream == x.stream)
      slot = (int)i;
  for (uint32_t i = 0; slot < 0 && i < c->n_slots; i++) {
    uintptr_t found = NOBODY;
    if (!atomic_compare_exchange_strong(&k->owner[i], &found, A_GRAPH)) continue;
    k->of[i] = x;
    slot = (int)i;
  }
  pthread_mutex_unlock(&c->lock);
  return slot;
}

/* The chunk after `last`, made if there is none. */
static pm_code next_chunk(pm_counters *c, chunk *last, bool capturing, chunk **out, pm_err *err) {
  pm_code code = PM_OK;
  pthread_mutex_lock(&c->lock);
  *out = atomic_load(&last->next);
  if (!*out && capturing) {
    code = pm_fail(err, PM_E_RUNTIME,
                   "a kernel with counters was captured too often: %d captures and streams have "
                   "counters of their own, and no memory can be allocated during a capture. "
                   "Launch it on one more stream outside of a capture, and try again",
                   (int)c->n_slots);
  } else if (!*out && !(code = new_chunk(c, out, err))) {
    atomic_store(&last->next, *out);
  }
  pthread_mutex_unlock(&c->lock);
  return code;
}

static uintptr_t owner_of(cu_stream s) {
  static _Thread_local char this_thread;
  if (s == CU_STREAM_PER_THREAD) return (uintptr_t)&this_thread;
  return (uintptr_t)s + 1; /* the default stream is 0 */
}

static capture capture_of(cu_stream s) {
  capture x = {0, NULL};
  int status = 0;
  if (!s || s == CU_STREAM_LEGACY) return x; /* cannot be captured */
  if (!pm_cu.cuStreamGetCaptureInfo(s, &status, &x.id) && status) x.stream = s;
  return x;
}

pm_code pm_counters_of(pm_counters *c, cu_stream stream, cu_ptr *out, pm_err *err) {
  int slot;
  const capture x = capture_of(stream);
  chunk *k = atomic_load_explicit(&c->first, memory_order_acquire);
  while ((slot = x.stream ? find_captured(c, k, x) : find_slot(c, k, owner_of(stream))) < 0) {
    if (next_chunk(c, k, x.stream != NULL, &k, err)) return err->code;
  }
  *out = k->words + (size_t)slot * c->slot_bytes;
  return PM_OK;
}
