/* Blocks of a cluster: ranks, groups, masks.
 *
 * The rank of a block is x + y * dx + z * dx * dy, and the last axis is x. So the axes, in the
 * user's order, are the digits of the rank, most significant first. Values that depend only on the
 * block are variables before the body, one for each set of axes. */
#include "gen.h"

static int64_t stride_of(const pm_graph *g, int64_t axis) {
  int64_t stride = 1;
  for (uint32_t k = (uint32_t)axis + 1; k < g->n_cluster; k++) stride *= g->cluster[k];
  return stride;
}

int64_t pm_cluster_size(const pm_graph *g, const int64_t *axes, uint32_t n) {
  int64_t size = 1;
  for (uint32_t k = 0; k < n; k++) size *= g->cluster[axes[k]];
  return size;
}

uint32_t pm_blocks(const pm_graph *g) {
  uint32_t n = 1;
  for (uint32_t k = 0; k < g->n_cluster; k++) n *= (uint32_t)g->cluster[k];
  return n;
}

static bool is_whole(const pm_graph *g, const int64_t *axes, uint32_t n) {
  return pm_cluster_size(g, axes, n) == pm_blocks(g);
}

static const char *coordinate(pm_gen *e, int64_t axis) {
  return pm_str(e, "cluster_index_%c()", "xyz"[e->g->n_cluster - 1 - axis]);
}

static void plus(pm_text *t, const char *x, int64_t scale) {
  if (t->n) pm_put(t, " + ");
  pm_put(t, x);
  if (scale != 1) pm_putf(t, " * %lld", (long long)scale);
}

/* Sum of this block's coordinates times their strides: in the rank, or in the number in the group.
 */
static const char *own_part(pm_gen *e, const int64_t *axes, uint32_t n, bool in_rank) {
  pm_text t;
  int64_t below = 1;
  pm_text_init(&t, e->arena);
  for (uint32_t k = n; k-- > 0; below *= e->g->cluster[axes[k]]) {
    if (e->g->cluster[axes[k]] == 1) continue;
    plus(&t, coordinate(e, axes[k]), in_rank ? stride_of(e->g, axes[k]) : below);
  }
  return t.n ? t.at : "0";
}

/* The same for block number `k` of the group, a text of an unsigned number below its size. */
static const char *part_of(pm_gen *e, const int64_t *axes, uint32_t n, const char *k) {
  pm_sum s = {.total = pm_cluster_size(e->g, axes, n)};
  int64_t below = 1;
  for (uint32_t i = n; i-- > 0; below *= e->g->cluster[axes[i]]) {
    if (e->g->cluster[axes[i]] == 1) continue;
    s.at[s.n++] = (pm_piece){below, e->g->cluster[axes[i]], stride_of(e->g, axes[i])};
  }
  return pm_sum_text(e, &s, k, 1);
}

/* A variable in front of the body; the same for the same text. */
static const char *once(pm_gen *e, const char *stem, const char *text) {
  for (uint32_t k = 0; k < e->head_vars.n; k++) {
    if (!strcmp(e->head_vars.at[k].text, text)) return e->head_vars.at[k].name;
  }
  const pm_head_var v = {pm_unique(e, stem), text};
  pm_vec_push(e->arena, &e->head_vars, v);
  return v.name;
}

const char *pm_cluster_share(pm_gen *e, const int64_t *axes, uint32_t n) {
  if (pm_cluster_size(e->g, axes, n) == 1) return "0";
  return once(e, "share", own_part(e, axes, n, false));
}

const char *pm_cluster_mask(pm_gen *e, const int64_t *axes, uint32_t n) {
  uint32_t pattern = 0;
  for (int64_t k = 0; k < pm_cluster_size(e->g, axes, n); k++) {
    int64_t rank = 0, rest = k;
    for (uint32_t i = n; i-- > 0; rest /= e->g->cluster[axes[i]]) {
      rank += rest % e->g->cluster[axes[i]] * stride_of(e->g, axes[i]);
    }
    pattern |= 1u << rank;
  }
  if (is_whole(e->g, axes, n)) return pm_str(e, "0x%x", pattern);
  return once(e, "mask",
              pm_str(e, "0x%xu << (cluster_rank() - (%s))", pattern, own_part(e, axes, n, true)));
}

/* ---- arrivals ------------------------------------------------------------------------------ */

static uint32_t group_end(const int64_t *groups, uint32_t k) {
  while (groups[k] >= 0) k++;
  return k;
}

int64_t pm_cluster_targets(const pm_graph *g, const int64_t *groups, uint32_t n) {
  int64_t targets = 1;
  for (uint32_t k = 0; k < n; k = group_end(groups, k) + 1) {
    targets += pm_cluster_size(g, &groups[k], group_end(groups, k) - k) - 1;
  }
  return targets;
}

/* The first group gives all its blocks, this one included, every other one those after this block,
 * cyclically. */
const char *pm_cluster_target(pm_gen *e, const int64_t *groups, uint32_t n, const char *k) {
  pm_text t;
  int64_t before = 0;
  pm_text_init(&t, e->arena);
  for (uint32_t first = 0, end; first < n; first = end + 1) {
    end = group_end(groups, first);
    const int64_t *axes = &groups[first];
    const int64_t size = pm_cluster_size(e->g, axes, end - first);
    const char *number = k;
    if (size == 1 && first) continue;
    if (first) {
      number = pm_str(e, "((%s + %lldu + %s) %% %lldu)", own_part(e, axes, end - first, false),
                      (long long)(size + 1 - before % size), k, (long long)size);
    }
    before += size - (first ? 1 : 0);
    const bool more = before < pm_cluster_targets(e->g, groups, n); /* groups of one block go */
    if (more) pm_putf(&t, "%s < %lldu ? ", k, (long long)before);
    if (is_whole(e->g, axes, end - first)) {
      pm_put(&t, part_of(e, axes, end - first, number));
    } else {
      pm_putf(&t, "cluster_rank() - (%s) + (%s)", own_part(e, axes, end - first, true),
              part_of(e, axes, end - first, number));
    }
    if (more) pm_put(&t, " : ");
  }
  return strcmp(k, "tid") || !strcmp(t.at, "tid") ? t.at : once(e, "target", t.at);
}

const char *pm_cluster_leader(pm_gen *e, int64_t axis) {
  if (is_whole(e->g, &axis, 1)) return "0";
  return once(e, "leader", pm_str(e, "cluster_rank() - (%s)", own_part(e, &axis, 1, true)));
}

const char *pm_cluster_peer(pm_gen *e, int axis, const char *at) {
  const int64_t a = axis;
  if (is_whole(e->g, &a, 1)) return pm_str(e, "(u32)(%s)", at);
  return pm_str(e, "cluster_rank() + (u32)((%s) - %s) * %lldu", at, coordinate(e, axis),
                (long long)stride_of(e->g, axis));
}
