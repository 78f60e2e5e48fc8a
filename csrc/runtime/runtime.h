/* Driver, NVRTC, compile cache, buffers, launch. No Python. Thread safe: process-wide tables are
 * made once under pthread_once; compilation and launch hold no global lock while they wait. */
#ifndef PM_RUNTIME_H
#define PM_RUNTIME_H

#include "../cuda/cuda.h"

typedef struct pm_device_info {
  int ordinal, capability; /* capability: major * 10 + minor */
  const pm_target *target; /* NULL: none for such GPUs */
  int sm_count;
  int64_t smem_optin; /* bytes of dynamic SMEM a block may have */
  int64_t memory_bytes;
  char name[128];
  int driver_version; /* 13000 for CUDA 13.0 */
} pm_device_info;

/* Number of CUDA devices, 0 when libcuda is missing (why is then told, unless NULL). */
int pm_device_count(char *why, size_t why_size);
pm_code pm_device_get(int ordinal, pm_device_info *out, pm_err *err);
/* What the user asks kernels to be lowered for, whatever the GPU; NULL: nothing. */
pm_code pm_asked_target(const pm_target **out, pm_err *err);
/* What kernels are compiled for there; PM_E_NOT_IMPLEMENTED: for no such GPU. */
pm_code pm_device_target(int ordinal, const pm_target **out, pm_err *err);
/* Where to look for libnvrtc first (a path found by cuda-pathfinder), before the loader's own
 * search. */
void pm_nvrtc_hint(const char *path);
pm_code pm_nvrtc_version(int *major, int *minor, const char **path, pm_err *err);

/* ---- compile ------------------------------------------------------------------------------- */

typedef struct pm_compile_options {
  bool use_disk_cache;
  bool lineinfo;
  const char *dump_dir;  /* NULL: none */
  const char *dump_name; /* files are dump_name.cu, .ptx, ...; NULL: the entry's name */
} pm_compile_options;

typedef struct pm_cubin {
  void *image; /* pm_free it with pm_cubin_free */
  size_t size;
  int registers, spill_bytes, stack_bytes; /* -1 unknown */
  char *log;                               /* NVRTC's and ptxas's */
  bool from_disk;
} pm_cubin;

/* Program text -> cubin for its target, through the disk cache. Works without a GPU. A
 * refusal is PM_E_COMPILE with the log; ptxas remarks that mean serialised wgmma or ignored
 * setmaxnreg stay in the log and are listed by pm_remarks(). */
pm_code pm_compile(const pm_program *p, const pm_compile_options *o, pm_cubin *out, pm_err *err);
void pm_cubin_free(pm_cubin *c);
/* Has the machine code the tensor-core instructions that the PTX asks for? Fewer: PM_E_COMPILE.
 * pm_compile asks after each compilation. */
pm_code pm_check_products(const char *ptx, const void *image, size_t size, const char *entry,
                          pm_err *err);
/* PTX of a program, with .file and .loc if asked; pm_free it. */
/* The program without its #line directives; `out` has room for `size` bytes. */
size_t pm_without_lines(const char *text, size_t size, char *out);
pm_code pm_compile_ptx(const pm_program *p, bool lineinfo, char **ptx, size_t *size, pm_err *err);
/* Write one file of a dump: dir/name.extension, or stdout if dir is "-". Failures are ignored. */
void pm_dump(const char *dir, const char *name, const char *extension, const void *data,
             size_t size);
/* Comma list of the serious ptxas remarks (C7504, C7508-C7512, C7514, C7517, C7520) in a log, ""
 * if there are none.
 */
void pm_remarks(const char *log, char *out, size_t size);

/* ---- memory -------------------------------------------------------------------------------- */

/* Device memory from a pool per device (freed blocks are kept for reuse in stream order). */
pm_code pm_device_alloc(int device, size_t bytes, void *stream, uint64_t *ptr, pm_err *err);
void pm_device_free(int device, uint64_t ptr, void *stream);
/* Memory that streams we do not know may still use: freed by a request for memory, or by
 * pm_memory_sweep, after all work of the device; kept until there is much of it. */
void pm_device_free_unordered(int device, uint64_t ptr, size_t bytes);
void pm_memory_sweep(int device);
pm_code pm_copy_to_device(int device, uint64_t dst, const void *src, size_t bytes, void *stream,
                          pm_err *err);
pm_code pm_copy_to_host(int device, void *dst, uint64_t src, size_t bytes, void *stream,
                        pm_err *err);
pm_code pm_copy_on_device(int device, uint64_t dst, uint64_t src, size_t bytes, void *stream,
                          pm_err *err);
pm_code pm_synchronize(int device, void *stream, pm_err *err);
/* Unload modules that nothing can use any more. The driver may wait for the device. modules.c */
void pm_modules_sweep(void);
/* Work submitted to `after` from now on waits for what is in `before` now. */
pm_code pm_stream_order(int device, void *before, void *after, pm_err *err);
/* A mark after what is in the stream now, and whether the device has passed it (then it is gone).
 */
pm_code pm_mark(int device, void *stream, void **mark, pm_err *err);
bool pm_mark_passed(int device, void *mark);
/* Store one element of 1, 2 or 4 bytes; its value travels with the command. */
pm_code pm_device_store(int device, uint64_t dst, uint32_t value, size_t bytes, void *stream,
                        pm_err *err);
/* The device's own non-blocking stream, used for host arrays. */
pm_code pm_private_stream(int device, void **stream, pm_err *err);
/* Device that an address belongs to. */
pm_code pm_device_of(uint64_t ptr, int *device, pm_err *err);
bool pm_stream_is_capturing(int device, void *stream);

/* ---- launch -------------------------------------------------------------------------------- */

/* A cubin loaded on one device with its launch recipe; immutable once made, shared by threads. */
typedef struct pm_kernel pm_kernel;
pm_code pm_kernel_load(int device, const pm_cubin *c, const pm_program *p, pm_kernel **out,
                       pm_err *err);
/* Calls no driver: its module is unloaded later, see modules.c. */
void pm_kernel_free(pm_kernel *k);
size_t pm_kernel_bytes(const pm_kernel *k); /* on the host, but for the driver's */
/* pointers: device address per operand and output; sizes: those of the call, NULL where the program
 * has none. Encodes tensor maps on the stack, launches,
 * returns. */
pm_code pm_kernel_launch(const pm_kernel *k, const uint64_t *pointers, const int64_t *sizes,
                         void *stream, pm_err *err);

/* What a kernel for a mesh is told of its devices, in this device's address space. */
typedef struct pm_peers {
  uint32_t rank;
  const uint64_t *const *pointers; /* per device, per operand and output; those not accessed: any */
  const uint64_t *counters;        /* per device */
  const uint64_t *all;             /* per operand and output, where a store goes to all; or NULL */
  uint64_t all_counters;
  uint32_t mesh; /* of pm_watch_new */
} pm_peers;
/* The words that a launch on this stream counts in; 0: it needs none. In the device's context. */
pm_code pm_kernel_counters(const pm_kernel *k, void *stream, uint64_t *counters, pm_err *err);
/* record: of what the launch checks, to be given to pm_kernel_end_checks once all devices have been
 * launched. */
pm_code pm_kernel_launch_in_mesh(const pm_kernel *k, const uint64_t *pointers, uint64_t counters,
                                 const pm_peers *peers, void *stream, uint64_t *record,
                                 pm_err *err);
/* Waits for a launch that checks; what it noted is an error. Frees the record. */
pm_code pm_kernel_end_checks(const pm_kernel *k, void *stream, uint64_t record, pm_err *err);
/* The arguments that it accesses on other devices (-1: its counters), and how many. */
uint32_t pm_kernel_peers(const pm_kernel *k, const int32_t **params);

/* ---- several devices in one process (group.c) ----------------------------------------------- */

/* One launch of a mesh. */
typedef struct pm_member {
  int device;
  const pm_kernel *kernel;
  const uint64_t *pointers;
  void *stream;
} pm_member;
/* Let each device reach the memory of all others: PM_E_VALUE names two that cannot. Once for each
 * pair. */
pm_code pm_group_connect(const int *devices, uint32_t n, pm_err *err);
/* Wait for everything that runs on these devices, in all streams. */
pm_code pm_group_drain(const int *devices, uint32_t n, pm_err *err);
/* Launch on all devices of a mesh, a number of pm_watch_new. ordered: no launch begins before what
 * is in the streams of all. Nothing is allocated, loaded or awaited between the launches. */
pm_code pm_group_launch(const pm_member *members, uint32_t n, bool ordered, uint32_t mesh,
                        pm_err *err);

/* ---- waits for other devices that can be ended (watch.c) ------------------------------------ */

/* A mesh, of which this process launches on the device, among others. milliseconds: so long a wait
 * may last, 0: for ever. */
pm_code pm_watch_new(int device, uint32_t n_devices, uint32_t milliseconds, uint32_t *mesh,
                     pm_err *err);
/* A kernel with watched waits; its name and the texts of its sites stay. */
pm_code pm_watch_kernel(const char *name, const pm_program_site *sites, uint32_t n,
                        uint32_t *kernel, pm_err *err);
pm_watch_arg pm_watch_of(uint32_t mesh, uint32_t kernel, uint32_t rank, int device);
/* End all waits of a mesh. Only the first reason counts. */
void pm_watch_end(uint32_t mesh, const char *why);
/* PM_E_DEADLOCK with the waits that were ended, if the waits of the mesh are to end or have ended;
 * mesh 0: there is none. */
pm_code pm_watch_check(uint32_t mesh, pm_err *err);
/* The same for meshes on which a wait was ended: once for each of them. */
pm_code pm_watch_results(pm_err *err);
/* The process exits: kernels of meshes may take so long, then their waits end. */
void pm_watch_leave(uint32_t milliseconds);

/* Path of the cache directory in use (PALLAS_MGPU_CACHE_DIR or the user's cache directory); static.
 */
const char *pm_cache_dir(void);
/* Once after a cubin could not be kept on disk, why; false: nothing new. */
bool pm_cache_complaint(char *text, size_t size);

#endif
