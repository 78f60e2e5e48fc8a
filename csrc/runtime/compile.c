/* Program text to cubin, through the disk cache.
 *
 * The key of an entry is a 128-bit hash of everything that the cubin depends on: the text without
 * its #line directives (they matter only with -lineinfo), the options including the architecture,
 * and the NVRTC that would compile it. ptxas figures (-v costs nothing) are read once: from the log
 * or, where a hit in NVRTC's own cache leaves none, from the cubin. */
#include "compile.h"

#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "../base/env.h"

/* ---- options ------------------------------------------------------------------------------ */

static void add_option(pm_options *o, const char *text) {
  if (o->n < PM_MAX_OPTIONS) o->at[o->n++] = text;
  else o->full = true;
}

/* `what`: "sm" for a cubin, "compute" for PTX alone */
static pm_code make_options(pm_options *o, const char *what, const pm_target *t, bool lineinfo,
                            pm_err *err) {
  const char *given = pm_env(PM_ENV_NVRTC_OPTIONS);
  o->n = 0;
  o->full = false;
  int n =
      snprintf(o->buffer, sizeof o->buffer, "--gpu-architecture=%s%s", what, strchr(t->text, '_'));
  add_option(o, o->buffer);
  add_option(o, "--std=c++17");
  add_option(o, "--minimal"); /* no textures and no device runtime, which cost 5 to 8 ms */
  add_option(o, "--prec-div=false"); /* float32: div.full, 2 ulp; exact is twice as long */
  if (!strcmp(what, "sm")) add_option(o, "--ptxas-options=-v");
  if (lineinfo) add_option(o, "-lineinfo");
  char *user = o->buffer + n + 1;
  const size_t room = sizeof o->buffer - (size_t)n - 1;
  const bool fits = (size_t)snprintf(user, room, "%s", given) < room;
  for (char *save, *t = strtok_r(user, " \t\n", &save); t; t = strtok_r(NULL, " \t\n", &save))
    add_option(o, t);
  if (fits && !o->full) return PM_OK;
  return pm_fail(
      err, PM_E_VALUE,
      "the environment variable %s has %zu characters; at most %zu, of about %d options, "
      "are supported",
      pm_env_table[PM_ENV_NVRTC_OPTIONS].variable, strlen(given), room - 1, PM_MAX_OPTIONS - 6);
}

/* ---- key ---------------------------------------------------------------------------------- */

size_t pm_without_lines(const char *text, size_t size, char *out) {
  size_t n = 0;
  for (const char *end = text + size; text < end;) {
    const char *eol = memchr(text, '\n', (size_t)(end - text));
    size_t len = eol ? (size_t)(eol - text) + 1 : (size_t)(end - text);
    if (strncmp(text, "#line", pm_min((int64_t)len, 5))) {
      memcpy(out + n, text, len);
      n += len;
    }
    text += len;
  }
  return n;
}

static pm_code make_key(const pm_program *p, const pm_options *o, bool lineinfo, uint64_t key[2],
                        pm_err *err) {
  char who[PATH_MAX + 64];
  if (pm_nvrtc_identity(who, sizeof who, err)) return err->code;
  size_t room = p->size + strlen(who) + 1;
  for (int i = 0; i < o->n; i++) room += strlen(o->at[i]) + 1;
  char *all = pm_malloc(room);
  if (!all) return pm_fail(err, PM_E_MEMORY, "the host is out of memory");
  size_t n = p->size;
  if (lineinfo) memcpy(all, p->text, n);
  else n = pm_without_lines(p->text, n, all);
  for (int i = 0; i <= o->n; i++) {
    const char *s = i < o->n ? o->at[i] : who;
    memcpy(all + n, s, strlen(s) + 1);
    n += strlen(s) + 1;
  }
  pm_digest(all, n, key);
  pm_free(all);
  return PM_OK;
}

/* ---- the log ------------------------------------------------------------------------------ */

/* The number in front of `what`, summed over the log; -1: not there. */
static int sum_before(const char *log, const char *what) {
  int64_t total = -1;
  for (const char *at = log; (at = strstr(at, what)); at += strlen(what)) {
    const char *digit = at;
    while (digit > log && (digit[-1] == ' ' || (digit[-1] >= '0' && digit[-1] <= '9'))) digit--;
    total = pm_max(total, 0) + strtoll(digit, NULL, 10);
  }
  return (int)total;
}

static void read_figures(pm_cubin *c) {
  c->registers = sum_before(c->log, " registers");
  c->stack_bytes = sum_before(c->log, " bytes stack frame");
  int stores = sum_before(c->log, " bytes spill stores");
  int loads = sum_before(c->log, " bytes spill loads");
  c->spill_bytes = stores < 0 ? -1 : stores + (loads > 0 ? loads : 0);
  pm_cubin_figures(c);
}

void pm_remarks(const char *log, char *out, size_t size) {
  static const char *const codes[] = {"C7504", "C7508", "C7509", "C7510", "C7511",
                                      "C7512", "C7514", "C7517", "C7520"};
  size_t n = 0;
  if (size) out[0] = 0;
  for (size_t i = 0; i < PM_COUNT(codes); i++)
    if (strstr(log, codes[i]) && n + 8 < size)
      n += (size_t)snprintf(out + n, size - n, "%s%s", n ? "," : "", codes[i]);
}

/* ---- dumps -------------------------------------------------------------------------------- */

/* The directory with those above it. */
static bool make_dirs(const char *dir) {
  char path[PATH_MAX];
  struct stat st;
  if (snprintf(path, sizeof path, "%s", dir) >= (int)sizeof path) return false;
  for (char *s = path + 1; *s; s++) {
    if (*s != '/') continue;
    *s = 0;
    if (mkdir(path, 0777) && errno != EEXIST) return false;
    *s = '/';
  }
  if (mkdir(path, 0777) && errno != EEXIST) return false;
  return !stat(path, &st) && S_ISDIR(st.st_mode);
}

/* Say once that dumps are lost; the kernel is compiled all the same. */
static void complain(const char *path) {
  static atomic_flag said = ATOMIC_FLAG_INIT;
  if (!atomic_flag_test_and_set(&said))
    fprintf(stderr, "pallas_mgpu: %s: %s cannot be written: %s\n",
            pm_env_table[PM_ENV_DUMP].variable, path, strerror(errno));
}

void pm_dump(const char *dir, const char *name, const char *extension, const void *data,
             size_t size) {
  char path[PATH_MAX];
  if (!strcmp(dir, "-")) {
    if (!strcmp(extension, "cubin")) return;
    printf("==== %s.%s\n%.*s\n", name, extension, (int)size, (const char *)data);
    fflush(stdout);
    return;
  }
  snprintf(path, sizeof path, "%s/%s.%s", dir, name, extension);
  FILE *f = make_dirs(dir) ? fopen(path, "wb") : NULL;
  bool ok = f && fwrite(data, 1, size, f) == size;
  if (f && fclose(f)) ok = false;
  if (!ok) complain(path);
}

static void dump_all(const char *dir, const char *name, const pm_program *p,
                     const pm_nvrtc_result *r) {
  pm_dump(dir, name, "cu", p->text, p->size);
  if (!r) return;
  pm_dump(dir, name, "ptx", r->ptx, strlen(r->ptx)); /* NVRTC counts the NUL */
  pm_dump(dir, name, "cubin", r->image, r->image_size);
  pm_dump(dir, name, "log", r->log, strlen(r->log));
}

/* ---- compile ------------------------------------------------------------------------------ */

pm_code pm_compile(const pm_program *p, const pm_compile_options *o, pm_cubin *out, pm_err *err) {
  pm_options options;
  pm_nvrtc_result r;
  uint64_t key[2];
  const char *dump = o->dump_dir && *o->dump_dir ? o->dump_dir : NULL;
  const char *name = o->dump_name ? o->dump_name : p->entry;
  *out = (pm_cubin){0};
  if (pm_env_check(err) || make_options(&options, "sm", p->machine, o->lineinfo, err))
    return err->code;
  if (o->use_disk_cache) {
    if (make_key(p, &options, o->lineinfo, key, err)) return err->code;
    if (!dump && pm_cache_read(key, out)) return PM_OK; /* a dump needs the PTX */
  }
  if (pm_nvrtc_run(p->text, p->entry, &options, true, true, &r, err)) {
    if (dump) {
      dump_all(dump, name, p, NULL);
      pm_dump(dump, name, "log", err->text, strlen(err->text));
    }
    return err->code;
  }
  if (dump) dump_all(dump, name, p, &r);
  if (pm_check_products(r.ptx, r.image, r.image_size, p->entry, err)) {
    pm_nvrtc_result_free(&r);
    return err->code;
  }
  out->image = r.image;
  out->size = r.image_size;
  out->log = r.log;
  r.image = r.log = NULL;
  pm_nvrtc_result_free(&r);
  read_figures(out);
  if (o->use_disk_cache) pm_cache_write(key, out);
  return PM_OK;
}

pm_code pm_compile_ptx(const pm_program *p, bool lineinfo, char **ptx, size_t *size, pm_err *err) {
  pm_options options;
  pm_nvrtc_result r;
  if (make_options(&options, "compute", p->machine, lineinfo, err)) return err->code;
  if (pm_nvrtc_run(p->text, p->entry, &options, false, true, &r, err)) return err->code;
  *ptx = r.ptx;
  *size = r.ptx_size;
  r.ptx = NULL;
  pm_nvrtc_result_free(&r);
  return PM_OK;
}
