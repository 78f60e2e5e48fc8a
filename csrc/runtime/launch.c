/* A cubin loaded on one device, and its launch.
 *
 * Everything that does not depend on pointers is made once by pm_kernel_load: launch attributes,
 * the recipes of tensor maps in the driver's terms, the addresses' alignment. A launch has its maps
 * on its own stack, so kernels are immutable and free of locks, but for the table of who has which
 * counters, and for the maps of the launch before: of the same addresses they need not be encoded
 * again. A launch that finds another one at them encodes its own. */
#include "../base/env.h"
#include "modules.h"

#include <pthread.h>
#include <stdio.h>

enum { MAX_ARGS = 128, MAX_MAPS = 64, MAX_PORTABLE_CLUSTER = 8 };
enum { MAX_TABLE = 3000 }; /* words: a kernel has 32,764 bytes of parameters */

typedef struct kept_maps {
  atomic_flag busy;
  int64_t sizes[PM_MAX_SIZES]; /* of the call before, where maps depend on them */
  struct {
    uint64_t ptr;
    unsigned char map[sizeof(cu_tensor_map)];
  } at[];
} kept_maps;

struct pm_kernel {
  const pm_device *device;
  pm_module *module;
  cu_launch_config config;
  cu_launch_attr attrs[2];
  uint32_t n_args, n_maps, n_params;
  struct pm_program_arg args[MAX_ARGS];
  int64_t align[MAX_ARGS];
  const char *param_name[MAX_ARGS]; /* interned, like name */
  pm_tensor_map maps[MAX_MAPS];
  uint32_t first_map[MAX_MAPS + 1]; /* among the encoded ones: one of PM_MAP_PEERS is several */
  uint32_t n_devices, n_peers;
  int32_t peers[MAX_ARGS];
  bool multicasts;
  size_t cleared; /* bytes of counters that a launch sets to 0 */
  const char *name;
  pm_program_site *sites; /* of checks and of watched waits; their text is interned */
  uint32_t n_sites;
  bool checks;      /* some are of checks */
  uint32_t watch;   /* its number for pm_watch_of */
  uint32_t n_sizes; /* values that a launch takes */
  pm_launch_grid grid;
  uint32_t most_blocks; /* that a shared grid needs, 0: any number */
  kept_maps *kept;      /* NULL: it has no maps, or there was no memory */
};

/* Names outlive their kernels, for messages about failures found later. */
typedef struct name_node {
  struct name_node *next;
  char text[];
} name_node;
static name_node *names;
static pthread_mutex_t names_lock = PTHREAD_MUTEX_INITIALIZER;

static const char *intern(const char *s) {
  pthread_mutex_lock(&names_lock);
  name_node *n = names;
  while (n && strcmp(n->text, s)) n = n->next;
  if (!n && (n = pm_malloc(sizeof *n + strlen(s) + 1))) {
    strcpy(n->text, s);
    n->next = names;
    names = n;
  }
  pthread_mutex_unlock(&names_lock);
  return n ? n->text : "(no memory for its name)";
}

static const int map_dtype[PM_DTYPE_COUNT] = {
#define PM_DTYPE(id, text, bits, class, cuda, dlpack, short, numpy, wide, torch, xla, map, group) \
  [PM_##id] = CU_MAP_##map,
#include "../base/dtypes.def"
#undef PM_DTYPE
};

/* ---- load --------------------------------------------------------------------------------- */

static uint32_t n_encoded(const pm_program *p) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < p->n_maps; i++) n += p->maps[i].of == PM_MAP_PEERS ? p->n_devices : 1;
  return n;
}

/* Of PM_ARG_PEERS. */
static uint32_t table_words(uint32_t peers, uint32_t devices) {
  return 1 + (uint32_t)pm_max(peers, 1) * (devices + 1);
}

static pm_code check_program(const pm_program *p, pm_err *err) {
  if (p->n_args > MAX_ARGS || p->n_params > MAX_ARGS || p->n_maps > MAX_MAPS)
    return pm_fail(err, PM_E_NOT_IMPLEMENTED,
                   "the kernel has %u parameters and %u tensor maps; at most %d and %d are "
                   "supported. Use fewer arrays or fewer differently shaped copies",
                   p->n_args, p->n_maps, MAX_ARGS, MAX_MAPS);
  if (p->n_peers > MAX_ARGS || table_words(p->n_peers, p->n_devices) > MAX_TABLE ||
      n_encoded(p) > MAX_MAPS)
    return pm_fail(
        err, PM_E_NOT_IMPLEMENTED,
        "the kernel accesses %u arguments on other devices of a mesh of %u, with %u tensor "
        "maps; the table has room for %d addresses, and %d maps are supported",
        p->n_peers, p->n_devices, n_encoded(p), MAX_TABLE, MAX_MAPS);
  for (uint32_t i = 0; i < p->n_args; i++) {
    const struct pm_program_arg *a = &p->args[i];
    if (a->kind != PM_ARG_POINTER && a->kind != PM_ARG_TENSOR_MAP) continue;
    if (a->param < 0 || (uint32_t)a->param >= p->n_params ||
        (a->kind == PM_ARG_TENSOR_MAP && a->map >= p->n_maps))
      return pm_fail(err, PM_E_INTERNAL, "parameter %u of the program is out of range", i);
  }
  return PM_OK;
}

static kept_maps *keep_none(uint32_t n) {
  kept_maps *kept = n ? pm_malloc(sizeof *kept + n * sizeof kept->at[0]) : NULL;
  if (!kept) return NULL;
  atomic_flag_clear(&kept->busy);
  memset(kept->sizes, 0, sizeof kept->sizes);
  for (uint32_t i = 0; i < n; i++) kept->at[i].ptr = UINT64_MAX; /* no array lies there */
  return kept;
}

static pm_code keep_sites(pm_kernel *k, const pm_program *p, pm_err *err) {
  bool watches = false;
  k->n_sites = p->n_sites;
  if (!p->n_sites) return PM_OK;
  k->sites = pm_malloc(p->n_sites * sizeof *k->sites);
  for (uint32_t i = 0; k->sites && i < p->n_sites; i++) {
    pm_program_site *s = &k->sites[i];
    *s = p->sites[i];
    s->op = intern(s->op);
    s->ref = intern(s->ref);
    s->shape = intern(s->shape ? s->shape : "");
    if (s->file) s->file = intern(s->file);
  }
  if (!k->sites) return pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  for (uint32_t i = 0; i < p->n_args; i++) {
    watches |= p->args[i].kind == PM_ARG_WATCH;
    k->checks |= p->args[i].kind == PM_ARG_SANITIZER;
  }
  return watches ? pm_watch_kernel(k->name, k->sites, k->n_sites, &k->watch, err) : PM_OK;
}

static void prepare(pm_kernel *k, const pm_program *p) {
  uint32_t n = 0, cluster = p->cluster[0] * p->cluster[1] * p->cluster[2];
  k->n_args = p->n_args;
  k->n_maps = p->n_maps;
  k->n_params = p->n_params;
  if (p->n_args) memcpy(k->args, p->args, p->n_args * sizeof *p->args);
  for (uint32_t i = 0; i < p->n_params; i++) {
    k->align[i] = pm_max(p->align[i], 1);
    k->param_name[i] = intern(p->names[i]);
  }
  if (p->n_maps) memcpy(k->maps, p->maps, p->n_maps * sizeof *p->maps);
  for (uint32_t i = 0; i < p->n_maps; i++)
    k->first_map[i + 1] = k->first_map[i] + (p->maps[i].of == PM_MAP_PEERS ? p->n_devices : 1);
  k->n_devices = p->n_devices;
  k->n_peers = p->n_peers;
  k->multicasts = p->multicasts;
  if (p->clears_counters && p->n_counters) k->cleared = 4 * ((size_t)p->n_counters + 1);
  k->n_sizes = p->n_sizes;
  k->grid = p->launch;
  if (p->n_peers) memcpy(k->peers, p->peers, p->n_peers * sizeof *p->peers);
  k->kept = keep_none(k->first_map[p->n_maps]);
  k->name = intern(p->entry);
  if (cluster > 1) {
    k->attrs[n].id = CU_LAUNCH_CLUSTER;
    memcpy(k->attrs[n++].value.cluster, p->cluster, sizeof p->cluster);
  }
  if (p->pdl) {
    k->attrs[n].id = CU_LAUNCH_PDL;
    k->attrs[n++].value.pdl = 1;
  }
  k->config = (cu_launch_config){.grid = {p->grid[0], p->grid[1], p->grid[2]},
                                 .block = {p->block, 1, 1},
                                 .smem = p->smem_bytes,
                                 .attrs = k->attrs,
                                 .n_attrs = n};
}

static pm_code load_failed(const pm_kernel *k, const pm_program *p, cu_result r, pm_err *err) {
  const pm_device_info *d = &k->device->info;
  if (r == CU_NO_BINARY_FOR_GPU || r == CU_INVALID_IMAGE || r == CU_UNSUPPORTED_PTX_VERSION)
    return pm_cu_fail(err, PM_E_DRIVER, r,
                      "%s (compute capability %d.%d, driver for CUDA %d.%d) refused kernel %s, "
                      "compiled for %s. If the GPU fits, the driver is older than the NVRTC that "
                      "compiled it: update the driver, or install the NVRTC of CUDA %d",
                      d->name, d->capability / 10, d->capability % 10, d->driver_version / 1000,
                      d->driver_version % 1000 / 10, k->name, p->target->text,
                      d->driver_version / 1000);
  return pm_cu_fail(err, PM_E_LAUNCH, r, "kernel %s cannot be loaded on CUDA device %d", k->name,
                    d->ordinal);
}

static cu_result set_attributes(pm_kernel *k, const pm_program *p) {
  uint32_t cluster = p->cluster[0] * p->cluster[1] * p->cluster[2];
  cu_function f = k->module->function;
  cu_result r = CU_OK;
  if (p->smem_bytes) r = pm_cu.cuFuncSetAttribute(f, CU_FUNC_DYNAMIC_SMEM, (int)p->smem_bytes);
  if (!r && cluster > MAX_PORTABLE_CLUSTER)
    r = pm_cu.cuFuncSetAttribute(f, CU_FUNC_NON_PORTABLE_CLUSTER, 1);
  return r;
}

/* As many clusters as run at the same time: more would find nothing left to do. */
static cu_result fit_grid(pm_kernel *k, const pm_program *p) {
  const uint32_t cluster = p->cluster[0] * p->cluster[1] * p->cluster[2];
  int n = 0;
  cu_result r;
  if (cluster > 1) {
    r = pm_cu.cuOccupancyMaxActiveClusters(&n, k->module->function, &k->config);
  } else {
    r = pm_cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(&n, k->module->function, (int)p->block,
                                                          p->smem_bytes);
    n *= k->device->info.sm_count;
  }
  if (!r && n > 0) k->most_blocks = (uint32_t)n * p->cluster[0];
  if (!r && n > 0 && !k->grid.open) k->config.grid[0] = pm_min(p->grid[0], k->most_blocks);
  return r;
}

pm_code pm_kernel_load(int device, const pm_cubin *c, const pm_program *p, pm_kernel **out,
                       pm_err *err) {
  const pm_device *d;
  bool pushed;
  *out = NULL;
  if (check_program(p, err) || pm_device_need(device, &d, err)) return err->code;
  pm_kernel *k = pm_malloc(sizeof *k);
  if (!k) return pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  memset(k, 0, sizeof *k);
  k->device = d;
  prepare(k, p);
  if (keep_sites(k, p, err) || pm_enter(d, &pushed, err)) goto failed;
  cu_result r;
  pm_code code = pm_module_new(d, c, p->entry, p->n_counters, &k->module, &r, err);
  if (!code) r = set_attributes(k, p);
  if (!r && !code && p->shares_grid) r = fit_grid(k, p);
  if (r) code = load_failed(k, p, r, err);
  pm_leave(pushed);
  if (code) goto failed;
  *out = k;
  return PM_OK;
failed:
  pm_kernel_free(k);
  return err->code;
}

void pm_kernel_free(pm_kernel *k) {
  if (!k) return;
  pm_module_retire(k->module);
  pm_free(k->sites);
  pm_free(k->kept);
  pm_free(k);
}

size_t pm_kernel_bytes(const pm_kernel *k) {
  return sizeof *k + sizeof *k->module + k->first_map[k->n_maps] * sizeof k->kept->at[0] +
         k->n_sites * sizeof *k->sites;
}

/* ---- launch ------------------------------------------------------------------------------- */

static pm_code misaligned(const pm_kernel *k, uint32_t param, uint64_t ptr, pm_err *err) {
  return pm_fail(
      err, PM_E_VALUE,
      "kernel %s: argument %u (%s; operands, then outputs, from 0) is at address 0x%llx, "
      "but its copies need an address divisible by %lld. Pass an array that begins "
      "there, for example a copy instead of a slice",
      k->name, param, *k->param_name[param] ? k->param_name[param] : "unnamed",
      (unsigned long long)ptr, (long long)k->align[param]);
}

static pm_code encode_failed(const pm_kernel *k, const pm_tensor_map *m, uint64_t ptr, cu_result r,
                             pm_err *err) {
  char dims[PM_TMA_RANK * 64];
  size_t n = 0;
  for (uint32_t i = 0; i < m->rank; i++)
    n += (size_t)snprintf(dims + n, sizeof dims - n, "%s%llu of stride %llu, box %u", i ? "; " : "",
                          (unsigned long long)m->dim[i], (unsigned long long)m->stride[i],
                          m->box[i]);
  return pm_cu_fail(
      err, PM_E_TENSOR_MAP, r,
      "kernel %s: no tensor map can be made for argument %d (operands, then outputs, "
      "from 0): %s at address 0x%llx, swizzle %d bytes, innermost dimension first: %s",
      k->name, m->param, pm_dtypes[m->dtype].text, (unsigned long long)ptr, m->swizzle, dims);
}

static cu_result encode(const pm_tensor_map *m, uint64_t ptr, const int64_t *sizes,
                        cu_tensor_map *out) {
  static const uint32_t ones[PM_TMA_RANK] = {1, 1, 1, 1, 1};
  uint64_t dim[PM_TMA_RANK];
  for (uint32_t d = 0; d < m->rank; d++)
    dim[d] = m->extent[d] ? (uint64_t)sizes[m->extent[d]] : m->dim[d];
  int swizzle = m->swizzle == 128 ? 3 : m->swizzle == 64 ? 2 : m->swizzle == 32 ? 1 : 0;
  return pm_cu.cuTensorMapEncodeTiled(out, map_dtype[m->dtype], m->rank, (void *)(uintptr_t)ptr,
                                      dim, m->stride + 1, m->box, ones, CU_MAP_NO_INTERLEAVE,
                                      swizzle, CU_MAP_L2_128B, CU_MAP_OOB_ZEROS);
}

/* Encoded map number `at`, for memory at `ptr`. */
static cu_result make_map(const pm_kernel *k, const pm_tensor_map *m, uint32_t at, uint64_t ptr,
                          const int64_t *sizes, kept_maps *kept, cu_tensor_map *map, pm_err *err) {
  if (kept && kept->at[at].ptr == ptr) {
    memcpy(map, kept->at[at].map, sizeof *map);
    return CU_OK;
  }
  const cu_result r = encode(m, ptr, sizes, map);
  if (r) {
    encode_failed(k, m, ptr, r, err);
  } else if (kept) {
    memcpy(kept->at[at].map, map, sizeof *map);
    kept->at[at].ptr = ptr;
  }
  return r;
}

/* What was kept is of these sizes, or gone. */
static void keep_for(kept_maps *kept, uint32_t n_maps, const int64_t *sizes, uint32_t n) {
  if (!n || !memcmp(kept->sizes + 1, sizes + 1, (n - 1) * sizeof *sizes)) return;
  memcpy(kept->sizes, sizes, n * sizeof *sizes);
  for (uint32_t i = 0; i < n_maps; i++) kept->at[i].ptr = UINT64_MAX;
}

static cu_result make_maps(const pm_kernel *k, const uint64_t *pointers, const int64_t *sizes,
                           const pm_peers *peers, cu_tensor_map *maps, pm_err *err) {
  cu_result r = CU_OK;
  kept_maps *kept = k->kept;
  if (kept && atomic_flag_test_and_set_explicit(&kept->busy, memory_order_acquire)) kept = NULL;
  if (kept) keep_for(kept, k->first_map[k->n_maps], sizes, k->n_sizes);
  for (uint32_t i = 0; i < k->n_maps && !r; i++) {
    const pm_tensor_map *m = &k->maps[i];
    for (uint32_t at = k->first_map[i]; at < k->first_map[i + 1] && !r; at++) {
      const uint32_t device = at - k->first_map[i];
      const uint64_t ptr = m->of == PM_MAP_PEERS ? peers->pointers[device][m->param]
                           : m->of == PM_MAP_ALL ? peers->all[m->param]
                                                 : pointers[m->param];
      r = make_map(k, m, at, ptr, sizes, kept, &maps[at], err);
    }
  }
  if (kept) atomic_flag_clear_explicit(&kept->busy, memory_order_release);
  return r;
}

/* Of the arguments that the program accesses elsewhere: by argument, then by device. */
static void fill_table(const pm_kernel *k, const pm_peers *p, uint64_t *table) {
  const uint32_t n = (uint32_t)pm_max(k->n_peers, 1);
  memset(table, 0, table_words(k->n_peers, k->n_devices) * sizeof *table);
  table[0] = p->rank;
  for (uint32_t i = 0; i < k->n_peers; i++) {
    const int32_t param = k->peers[i];
    for (uint32_t d = 0; d < k->n_devices; d++)
      table[1 + i * k->n_devices + d] = param < 0 ? p->counters[d] : p->pointers[d][param];
    if (k->multicasts)
      table[1 + n * k->n_devices + i] = param < 0 ? p->all_counters : p->all[param];
  }
}

static pm_code launch_failed(const pm_kernel *k, cu_result r, pm_err *err) {
  const cu_launch_config *c = &k->config;
  const unsigned *cl = k->attrs[0].value.cluster;
  bool clustered = c->n_attrs && k->attrs[0].id == CU_LAUNCH_CLUSTER;
  return pm_cu_fail(err, PM_E_LAUNCH, r,
                    "the launch of kernel %s on CUDA device %d failed (grid %u x %u x %u, cluster "
                    "%u x %u x %u, %u threads, %u bytes of shared memory)",
                    k->name, k->device->info.ordinal, c->grid[0], c->grid[1], c->grid[2],
                    clustered ? cl[0] : 1, clustered ? cl[1] : 1, clustered ? cl[2] : 1,
                    c->block[0], c->smem);
}

/* ---- checks -------------------------------------------------------------------------------- */

static pm_code begin_checks(const pm_kernel *k, void *stream, uint64_t *record, pm_err *err) {
  static const uint32_t none[PM_SANITIZER_WORDS];
  const int device = k->device->info.ordinal;
  *record = 0;
  if (!k->checks) return PM_OK;
  if (pm_stream_is_capturing(device, stream))
    return pm_fail(err, PM_E_RUNTIME,
                   "kernel %s: with %s each launch is awaited, which a stream that is being "
                   "captured cannot be",
                   k->name, pm_env_table[PM_ENV_SANITIZE].variable);
  if (pm_device_alloc(device, sizeof none, stream, record, err)) return err->code;
  return pm_copy_to_device(device, *record, none, sizeof none, stream, err);
}

pm_code pm_kernel_end_checks(const pm_kernel *k, void *stream, uint64_t record, pm_err *err) {
  const int device = k->device->info.ordinal;
  uint32_t found[PM_SANITIZER_WORDS] = {0};
  char what[512];
  if (!record) return PM_OK;
  pm_code code = pm_copy_to_host(device, found, record, sizeof found, stream, err);
  if (!code) code = pm_synchronize(device, stream, err);
  pm_device_free(device, record, stream);
  if (code || !found[0]) return code;
  if (found[1] >= k->n_sites) return pm_fail(err, PM_E_INTERNAL, "a check of site %u", found[1]);
  const pm_program_site *s = &k->sites[found[1]];
  pm_describe_site(s, (int32_t)found[2], found[7], what, sizeof what);
  pm_fail(err, s->waits ? PM_E_DEADLOCK : PM_E_INDEX,
          "kernel %s: %s (block (%u, %u, %u), thread %u, warp %u)", k->name, what, found[3],
          found[4], found[5], found[6] / 128, found[6] / 32 % 4);
  if (s->file) pm_err_at(err, s->file, s->line);
  return err->code;
}

static pm_code check_aligned(const pm_kernel *k, const uint64_t *pointers, pm_err *err) {
  for (uint32_t i = 0; i < k->n_params; i++)
    if (pointers[i] & (uint64_t)(k->align[i] - 1)) return misaligned(k, i, pointers[i], err);
  return PM_OK;
}

static pm_code set_grid(const pm_kernel *k, const int64_t *sizes, cu_launch_config *c,
                        pm_err *err) {
  uint32_t blocks[3];
  if (pm_launch_blocks(&k->grid, k->name, sizes, blocks, err)) return err->code;
  if (k->most_blocks) blocks[0] = pm_min(blocks[0], k->most_blocks);
  for (int d = 0; d < 3; d++) c->grid[d] = blocks[d];
  return PM_OK;
}

/* In the device's context. record: for pm_kernel_end_checks, which frees it. */
static pm_code launch(const pm_kernel *k, const uint64_t *pointers, const int64_t *sizes,
                      cu_ptr counters, const pm_peers *peers, cu_stream stream, uint64_t *record,
                      pm_err *err) {
  cu_tensor_map maps[MAX_MAPS];
  uint64_t table[MAX_TABLE];
  void *params[MAX_ARGS];
  pm_watch_arg watch;
  cu_launch_config config = k->config;
  if (k->grid.open && set_grid(k, sizes, &config, err)) return err->code;
  pm_module_used(k->module, stream);
  cu_result r = make_maps(k, pointers, sizes, peers, maps, err);
  if (r || begin_checks(k, stream, record, err)) return err->code;
  if (peers) {
    fill_table(k, peers, table);
    watch = pm_watch_of(peers->mesh, k->watch, peers->rank, k->device->info.ordinal);
  }
  for (uint32_t i = 0; i < k->n_args; i++) {
    const struct pm_program_arg *a = &k->args[i];
    params[i] = a->kind == PM_ARG_TENSOR_MAP  ? (void *)&maps[k->first_map[a->map]]
                : a->kind == PM_ARG_COUNTERS  ? (void *)&counters
                : a->kind == PM_ARG_SANITIZER ? (void *)record
                : a->kind == PM_ARG_WATCH     ? (void *)&watch
                : a->kind == PM_ARG_PEERS     ? (void *)table
                : a->kind == PM_ARG_SIZE ? (void *)(uintptr_t)&sizes[a->param] /* its low half */
                                         : (void *)(uintptr_t)&pointers[a->param];
  }
  config.stream = stream;
  atomic_store_explicit(&pm_last_kernel, k->name, memory_order_relaxed);
  if (k->cleared) r = pm_cu.cuMemsetD8Async(counters, 0, k->cleared, stream);
  if (!r) r = pm_cu.cuLaunchKernelEx(&config, k->module->function, params, NULL);
  if (!r) return PM_OK;
  if (*record) pm_device_free(k->device->info.ordinal, *record, stream);
  return launch_failed(k, r, err);
}

pm_code pm_kernel_counters(const pm_kernel *k, void *stream, uint64_t *counters, pm_err *err) {
  *counters = 0;
  if (!k->module->counters) return PM_OK;
  return pm_counters_of(k->module->counters, stream, counters, err);
}

pm_code pm_kernel_launch(const pm_kernel *k, const uint64_t *pointers, const int64_t *sizes,
                         void *stream, pm_err *err) {
  bool pushed;
  cu_ptr counters;
  uint64_t record;
  if (check_aligned(k, pointers, err)) return err->code;
  if (pm_driver_need(err) || pm_enter(k->device, &pushed, err)) return err->code;
  pm_code code = pm_kernel_counters(k, stream, &counters, err);
  if (!code) code = launch(k, pointers, sizes, counters, NULL, stream, &record, err);
  pm_leave(pushed);
  return code || !record ? code : pm_kernel_end_checks(k, stream, record, err);
}

pm_code pm_kernel_launch_in_mesh(const pm_kernel *k, const uint64_t *pointers, uint64_t counters,
                                 const pm_peers *peers, void *stream, uint64_t *record,
                                 pm_err *err) {
  bool pushed;
  for (uint32_t i = 0; i < k->n_peers && k->multicasts; i++) {
    const int32_t param = k->peers[i];
    if (param < 0 ? peers->all_counters : peers->all && peers->all[param]) continue;
    return pm_fail(err, PM_E_VALUE,
                   "kernel %s: %s has no address at which a store goes to all devices; make the "
                   "arrays by plgpu.symm_empty(..., multicast=True)",
                   k->name, param < 0 ? "its semaphores" : k->param_name[param]);
  }
  if (check_aligned(k, pointers, err)) return err->code;
  if (pm_driver_need(err) || pm_enter(k->device, &pushed, err)) return err->code;
  const pm_code code = launch(k, pointers, NULL, counters, peers, stream, record, err);
  pm_leave(pushed);
  return code;
}

uint32_t pm_kernel_peers(const pm_kernel *k, const int32_t **params) {
  *params = k->peers;
  return k->n_peers;
}
