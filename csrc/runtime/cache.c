/* The compile cache on disk.
 *
 * One file for each cubin, named by its 128-bit key: a header with sizes, ptxas figures and a
 * checksum of everything else, then the cubin, then the log. Entries are written to a temporary
 * file in the same directory, synced and renamed, so that a reader sees a whole entry or none.
 * Anything that cannot be read or fails its check is a miss; anything that cannot be written is not
 * kept. The directory must belong to the user and is created with mode 0700, since it contains
 * code. A hit touches its file; when the sum of the sizes exceeds the limit, the least recently
 * used files are removed. */
#define _GNU_SOURCE /* mkostemp */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../base/env.h"
#include "compile.h"

typedef struct head {
  char magic[8];
  uint64_t check[2]; /* of all that follows this field, with the key */
  uint64_t key[2], image_size, log_size;
  int32_t registers, spill_bytes, stack_bytes, reserved;
} head;

static const char magic[8] = "PMGPUC2";
enum { STALE_SECONDS = 3600, MAX_ENTRY = 1 << 28 };

/* ---- the directory ------------------------------------------------------------------------ */

const char *pm_cache_dir(void) {
  static _Thread_local char path[PATH_MAX];
  const char *given = pm_env(PM_ENV_CACHE_DIR);
  if (*given) return given;
  const char *base = getenv("XDG_CACHE_HOME");
  if (base && *base == '/') { /* the specification ignores relative paths */
    snprintf(path, sizeof path, "%s/pallas_mgpu", base);
    return path;
  }
  const char *home = getenv("HOME");
  if (!home || !*home) {
    const struct passwd *pw = getpwuid(getuid());
    home = pw && pw->pw_dir ? pw->pw_dir : "/";
  }
  snprintf(path, sizeof path, "%s/.cache/pallas_mgpu", home);
  return path;
}

/* What went wrong, until it is told; then nothing more is. */
static pthread_mutex_t complaint_lock = PTHREAD_MUTEX_INITIALIZER;
static char complaint[PATH_MAX + 256];
static bool has_complained;

static bool complain(const char *dir, const char *why) {
  pthread_mutex_lock(&complaint_lock);
  if (!has_complained)
    snprintf(complaint, sizeof complaint,
             "compiled kernels are not kept on disk: the directory %s %s. Name another one in %s, "
             "or set %s=1",
             dir, why, pm_env_table[PM_ENV_CACHE_DIR].variable,
             pm_env_table[PM_ENV_NO_CACHE].variable);
  pthread_mutex_unlock(&complaint_lock);
  return false;
}

bool pm_cache_complaint(char *text, size_t size) {
  pthread_mutex_lock(&complaint_lock);
  const bool some = complaint[0] && !has_complained;
  if (some) snprintf(text, size, "%s", complaint);
  has_complained |= some;
  pthread_mutex_unlock(&complaint_lock);
  return some;
}

static bool complain_errno(const char *dir) {
  char why[256];
  snprintf(why, sizeof why, "cannot be written (%s)", strerror(errno));
  return complain(dir, why);
}

/* Make the directory and those above it. false: it is not there or not ours. */
static bool make_dir(const char *dir) {
  char path[PATH_MAX];
  struct stat st;
  if (snprintf(path, sizeof path, "%s", dir) >= (int)sizeof path)
    return complain("that is wanted", "has too long a name");
  for (char *p = path + 1; *p; p++)
    if (*p == '/') {
      *p = 0;
      if (mkdir(path, 0700) && errno != EEXIST && errno != EROFS && errno != EACCES)
        return complain_errno(dir);
      *p = '/';
    }
  if (mkdir(path, 0700) && errno != EEXIST) return complain_errno(dir);
  if (stat(path, &st)) return complain_errno(dir);
  if (!S_ISDIR(st.st_mode)) return complain(dir, "is no directory");
  return st.st_uid == geteuid() || complain(dir, "belongs to another user");
}

/* The checksum: chained over the parts, so that nothing is copied. */
static void checksum(const head *h, const void *image, const void *log, uint64_t out[2]) {
  struct {
    head h;
    uint64_t image[2], log[2];
  } all;
  memset(&all, 0, sizeof all);
  all.h = *h;
  all.h.check[0] = all.h.check[1] = 0;
  pm_digest(image, h->image_size, all.image);
  pm_digest(log, h->log_size, all.log);
  pm_digest(&all, sizeof all, out);
}

static bool entry_path(const uint64_t key[2], char *path, size_t size) {
  int n = snprintf(path, size, "%s/%016llx%016llx.cubin", pm_cache_dir(),
                   (unsigned long long)key[1], (unsigned long long)key[0]);
  return n > 0 && (size_t)n < size;
}

/* ---- read --------------------------------------------------------------------------------- */

static bool read_all(int fd, void *to, size_t n) {
  for (char *p = to; n;) {
    ssize_t got = read(fd, p, n);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    p += got;
    n -= (size_t)got;
  }
  return true;
}

static bool read_entry(int fd, const uint64_t key[2], pm_cubin *out) {
  head h;
  uint64_t check[2];
  struct stat st;
  if (fstat(fd, &st) || st.st_uid != geteuid() || !read_all(fd, &h, sizeof h)) return false;
  if (memcmp(h.magic, magic, sizeof magic) || memcmp(h.key, key, sizeof h.key)) return false;
  if (h.image_size > MAX_ENTRY || h.log_size > MAX_ENTRY ||
      (uint64_t)st.st_size != sizeof h + h.image_size + h.log_size)
    return false;
  out->image = pm_malloc(h.image_size);
  out->log = pm_malloc(h.log_size + 1);
  if (!out->image || !out->log || !read_all(fd, out->image, h.image_size) ||
      !read_all(fd, out->log, h.log_size))
    return false;
  out->log[h.log_size] = 0;
  checksum(&h, out->image, out->log, check);
  if (memcmp(check, h.check, sizeof check)) return false;
  out->size = h.image_size;
  out->registers = h.registers;
  out->spill_bytes = h.spill_bytes;
  out->stack_bytes = h.stack_bytes;
  out->from_disk = true;
  return true;
}

bool pm_cache_read(const uint64_t key[2], pm_cubin *out) {
  char path[PATH_MAX];
  *out = (pm_cubin){0};
  if (!entry_path(key, path, sizeof path)) return false;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); /* no pipe holds us up */
  if (fd < 0) return false;
  bool ok = read_entry(fd, key, out);
  if (ok) futimens(fd, NULL);
  close(fd);
  if (!ok) pm_cubin_free(out);
  return ok;
}

/* ---- write -------------------------------------------------------------------------------- */

static bool write_all(int fd, const void *from, size_t n) {
  for (const char *p = from; n;) {
    ssize_t put = write(fd, p, n);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    p += put;
    n -= (size_t)put;
  }
  return true;
}

typedef struct entry {
  char name[48];
  int64_t size;
  struct timespec used;
} entry;

static int by_use(const void *a, const void *b) {
  const struct timespec *x = &((const entry *)a)->used, *y = &((const entry *)b)->used;
  if (x->tv_sec != y->tv_sec) return x->tv_sec < y->tv_sec ? -1 : 1;
  return x->tv_nsec < y->tv_nsec ? -1 : x->tv_nsec > y->tv_nsec;
}

/* Entries of the directory, oldest use first; removes temporary files that nobody will rename. */
static entry *list(int dir_fd, DIR *dir, size_t *n, int64_t *total) {
  entry *at = NULL;
  size_t cap = 0;
  struct stat st;
  *n = 0;
  *total = 0;
  for (const struct dirent *e; (e = readdir(dir));) {
    size_t len = strlen(e->d_name);
    if (e->d_name[0] == '.' || len >= sizeof at->name) continue;
    if (fstatat(dir_fd, e->d_name, &st, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode)) continue;
    if (!strncmp(e->d_name, "tmp-", 4) && time(NULL) - st.st_mtim.tv_sec > STALE_SECONDS)
      unlinkat(dir_fd, e->d_name, 0);
    if (len < 6 || strcmp(e->d_name + len - 6, ".cubin")) continue;
    if (*n == cap) {
      entry *more = pm_realloc(at, (cap = cap * 2 + 64) * sizeof *at);
      if (!more) break;
      at = more;
    }
    memcpy(at[*n].name, e->d_name, len + 1);
    at[*n].size = st.st_size;
    at[*n].used = st.st_mtim;
    *total += st.st_size;
    ++*n;
  }
  if (*n) qsort(at, *n, sizeof *at, by_use);
  return at;
}

static void evict(const char *path) {
  int64_t limit = pm_env_number(PM_ENV_CACHE_BYTES), total;
  size_t n;
  DIR *dir = opendir(path);
  if (!dir) return;
  entry *at = list(dirfd(dir), dir, &n, &total);
  for (size_t i = 0; i < n && total > limit; i++)
    if (!unlinkat(dirfd(dir), at[i].name, 0)) total -= at[i].size;
  pm_free(at);
  closedir(dir);
}

void pm_cache_write(const uint64_t key[2], const pm_cubin *c) {
  char path[PATH_MAX], temporary[PATH_MAX];
  const char *dir = pm_cache_dir();
  head h = {.key = {key[0], key[1]},
            .image_size = c->size,
            .log_size = strlen(c->log),
            .registers = c->registers,
            .spill_bytes = c->spill_bytes,
            .stack_bytes = c->stack_bytes};
  memcpy(h.magic, magic, sizeof magic);
  checksum(&h, c->image, c->log, h.check);
  if (!make_dir(dir) || !entry_path(key, path, sizeof path)) return;
  if (snprintf(temporary, sizeof temporary, "%s/tmp-XXXXXX", dir) >= (int)sizeof temporary) return;
  int fd = mkostemp(temporary, O_CLOEXEC);
  if (fd < 0) {
    complain_errno(dir);
    return;
  }
  bool ok = write_all(fd, &h, sizeof h) && write_all(fd, c->image, c->size) &&
            write_all(fd, c->log, h.log_size) && !fsync(fd);
  if (close(fd)) ok = false;
  if (!ok) complain_errno(dir);
  if (!ok || rename(temporary, path)) unlink(temporary);
  else evict(dir);
}
