/* From a synchronised graph to CUDA C++ text and everything that a launch needs to know. */
#ifndef PM_CUDA_H
#define PM_CUDA_H

#include "../ir/sizes.h"
#include "../passes/passes.h"

/* COUNTERS: pointer to n_counters + 1 words of u32, zero when the launch begins; the kernel leaves
 * them zero, unless it clears_counters. No other launch that runs at the same time may have the
 * same words. SANITIZER: pointer to PM_SANITIZER_WORDS words of u32 for the launch alone, the first
 * one zero when it begins; not zero after it: it stopped, and the next words are a site, a value, a
 * block, x, y and z, and a thread of it. WATCH: a pm_watch_arg, of the waits for other devices.
 * SIZE: i32, the size of the call whose number is `param`.
 * PEERS, in kernels for a mesh of devices: u64 rank; for each of `peers`, the address of that
 * argument (-1: of the counters) on each device, as this one reaches it; then for each the address
 * at which a store goes to all devices, 0: there is none. Then the tensor maps of a TENSOR_MAP that
 * is of PM_MAP_PEERS are as many as devices, in their order. */
typedef enum pm_arg_kind {
  PM_ARG_TENSOR_MAP,
  PM_ARG_POINTER,
  PM_ARG_COUNTERS,
  PM_ARG_SANITIZER,
  PM_ARG_WATCH,
  PM_ARG_PEERS,
  PM_ARG_SIZE
} pm_arg_kind;
enum { PM_SANITIZER_WORDS = 8, PM_SANITIZE_SECONDS = 5 }; /* the latter: sanitize.cuh */

/* As struct Watch of device/watch.cuh. */
typedef struct pm_watch_arg {
  uint64_t words;
  uint32_t mesh, kernel, rank, none;
} pm_watch_arg;

/* What a program checks by itself: that a wait ends, or else that an index is inside. */
typedef struct pm_program_site {
  bool waits, of_view;
  const char *op, *ref, *shape, *file; /* file NULL: unknown */
  uint32_t line, dim;
  int64_t size; /* of the range that begins at the index; 0: it is one element */
  /* the index is one of so many blocks of an axis of the cluster, or devices of the mesh, or 0 */
  uint32_t blocks, devices;
} pm_program_site;
/* Of a failed check: `value` is the index, `place` the record's last word. */
void pm_describe_site(const pm_program_site *s, int64_t value, uint32_t place, char *buf, size_t n);

/* The grid of a launch whose axes may be sizes of the call. */
typedef struct pm_launch_grid {
  uint32_t n, cluster[3];
  int64_t axis[PM_MAX_RANK];  /* in the user's order */
  uint32_t size[PM_MAX_RANK]; /* number of the size that an axis is, 0: static */
  bool open;                  /* some axis is */
  bool folded;                /* one row of clusters, all along x */
  bool shares;                /* of which any number will do */
} pm_launch_grid;
/* Blocks along x, y and z; sizes: their values. */
pm_code pm_launch_blocks(const pm_launch_grid *g, const char *name, const int64_t *sizes,
                         uint32_t *blocks, pm_err *err);

typedef struct pm_program {
  const char *text; /* CUDA C++, self-contained, with #line */
  size_t size;
  const char *entry; /* extern "C" name */
  uint32_t grid[3], cluster[3], block;
  pm_launch_grid launch; /* open: `grid` is the most that it can be */
  bool shares_grid;      /* any number of clusters will do, of which grid says the most; they lie
                          * along x */
  uint32_t smem_bytes;   /* dynamic */
  bool pdl;
  const pm_target *target;
  const pm_target *machine; /* whose instructions it has: that of target, or of its stand-in */
  uint32_t n_counters;
  bool clears_counters; /* the launch sets them to 0: cancelled blocks, which never run, could not
                         * be awaited by the last one */
  bool meets_blocks;    /* blocks of the launch wait for each other */
  uint32_t n_sizes;     /* values that a launch takes, with number 0; 0: none */
  uint32_t n_args;      /* kernel parameters in order: tensor maps, pointers, counters */
  struct pm_program_arg {
    uint8_t kind;  /* pm_arg_kind */
    int32_t param; /* kernel argument (operands, then outputs); of other kinds: -1 */
    uint32_t map;  /* TENSOR_MAP: index in maps */
  } * args;
  uint32_t n_maps;
  pm_tensor_map *maps;
  uint32_t n_devices; /* of the mesh, 1: there is none */
  uint32_t n_peers;   /* entries of `peers` */
  int32_t *peers;     /* kernel arguments that are accessed on other devices; -1: the counters */
  bool multicasts;    /* some of it at the addresses of all devices */
  uint32_t n_params;  /* operands and outputs */
  int64_t *align;     /* per param: bytes its pointer must be aligned to */
  uint32_t n_sites;
  pm_program_site *sites;
  const char **names; /* per param: the user's name, "" if unknown */
} pm_program;

typedef struct pm_cuda_options {
  bool line_directives;            /* #line to the user's Python */
  bool check_indices, check_waits; /* sanitize.c */
  bool entry_only;                 /* without the device functions: for another catalogue */
  bool stand_in;                   /* tests: tcgen05 on Hopper (stand_in.c) */
} pm_cuda_options;

/* Does the environment ask for the stand-in, and is the graph lowered for what it stands in for? */
bool pm_stand_in_is_on(const pm_graph *g);
/* All memory in g->arena. */
pm_code pm_generate_cuda(const pm_graph *g, const pm_cuda_options *o, pm_program *out, pm_err *err);

/* Lines of text, broken where they are long (wrap.c). */
void pm_put_lines(pm_text *out, const char *text);
/* A program without #line directives, which count lines: those of its entry. */
void pm_put_program(pm_text *out, const char *program);

#endif
