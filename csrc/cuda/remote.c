/* Memory of other devices, and of all devices at once.
 *
 * A kernel for a mesh of devices has one more parameter, the table of peers: which device this is,
 * and for each argument that it accesses elsewhere the address there, by device. A remote view is
 * the same offset from another base, so that loads, stores, atomics and copies of contiguous bytes
 * need no other instructions. A copy by tensor maps takes the map of the device, of which there is
 * one for each. The counters of the launch, with its semaphores, are an argument like others.
 *
 * What goes to all devices has an address at which the switch multicasts stores and combines loads
 * (multimem). It is an alias of the memory of each of them: a proxy fence stands where a thread has
 * waited for others. */
#include "gen.h"

static uint32_t entry_of(pm_gen *e, int32_t param) {
  uint32_t k = 0;
  e->in_mesh = true;
  while (k < e->peers.n && e->peers.at[k] != param) k++;
  if (k == e->peers.n) pm_vec_push(e->arena, &e->peers, param);
  return k;
}

const char *pm_remote_base(pm_gen *e, const pm_view *v, int32_t param, const char *type,
                           int64_t first) {
  const uint32_t k = entry_of(e, param);
  const char *base = pm_str(e, "address_on_all<%s>(peers, %u)", type, k);
  if (!v->all_devices)
    base = pm_str(e, "peer<%s>(peers, %u, %s)", type, k, pm_scalar_of(e, v->device_val));
  return first ? pm_str(e, "%s + %lld", base, (long long)first) : base;
}

const char *pm_device_index(pm_gen *e, uint32_t axis) {
  const pm_graph *g = e->g;
  int64_t below = 1;
  e->in_mesh = true;
  for (uint32_t k = axis + 1; k < g->n_mesh; k++) below *= g->mesh[k];
  const char *at = "(i32)peers.rank";
  if (below > 1) at = pm_str(e, "%s / %lld", at, (long long)below);
  return axis ? pm_str(e, "%s %% %lld", at, (long long)g->mesh[axis]) : at;
}

const char *pm_remote_map(pm_gen *e, const pm_view *v, const pm_tensor_map *m, const char *name) {
  if (m->of != PM_MAP_OWN) entry_of(e, m->param);
  if (m->of != PM_MAP_PEERS) return pm_str(e, "&%s", name);
  return pm_str(e, "&%s.of[%s]", name, pm_scalar_of(e, v->device_val));
}

void pm_print_peers(pm_gen *e, pm_text *out, const char *sep) {
  pm_program *p = e->program;
  const char *comma = "";
  p->n_peers = e->peers.n;
  p->peers = e->peers.at;
  pm_putf(out, "%sconst __grid_constant__ Peers<%u, %u> peers /* ", sep,
          (unsigned)pm_max(p->n_peers, 1), p->n_devices);
  for (uint32_t k = 0; k < p->n_peers; k++, comma = ", ") {
    const int32_t param = p->peers[k];
    pm_putf(out, "%s%s", comma, param < 0 ? "counters" : p->names[param]);
  }
  pm_put(out, p->n_peers ? " */" : "rank */");
}
