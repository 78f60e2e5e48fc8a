/* The profiler: events of the kernel's named scopes.
 *
 * A trace belongs to a Pallas thread, or to a warp, and one elected lane writes it: always the same
 * one, also in regions that a single lane runs (lane.c), so that the number of events is a variable
 * of that lane. Events stand in shared memory until the thread ends, and go to an output then
 * (the form is in ir.h). Without the profiler a named scope is no code. */
#include "gen.h"

/* Whose lane writes the trace, as a line that begins a statement. */
static const char *writer(const pm_gen *e) {
  if (e->g->profile_warps) return "if (elect_one()) ";
  return PM_ONE_LANE " ";
}

void pm_print_profile_start(pm_gen *e) {
  const pm_graph *g = e->g;
  const long long words = g->profile_words;
  if (!words) return;
  e->profile = pm_unique(e, "profile");
  pm_line(e, "Profile %s = {smem + %lld + (threadIdx.x >> %d) * %lld, 0, %lld, 0, 0};", e->profile,
          (long long)g->profile_offset, g->profile_warps ? 5 : 7, words * 4,
          (words - PM_PROFILE_HEAD) / 2 * 2);
  pm_line(e, "%sprofile_start(%s);", writer(e), e->profile);
}

void pm_print_profile_ready(pm_gen *e) {
  if (e->profile) pm_line(e, "%sprofile_scope_end(%s, 0);", writer(e), e->profile);
}

void pm_print_profile_end(pm_gen *e) {
  const pm_graph *g = e->g;
  const uint32_t to = g->n_operands + g->profile_output, traces = pm_profile_traces(g);
  if (!e->profile) return;
  e->param_used[to] = true;
  const char *block = "(blockIdx.x * gridDim.y + blockIdx.y) * gridDim.z + blockIdx.z";
  pm_begin(e, "%s{", writer(e));
  pm_line(e, "const u64 trace = (u64)(%s) * %u + (threadIdx.x >> %d);", block, traces,
          g->profile_warps ? 5 : 7);
  pm_line(e, "profile_write<%lld>(%s, %s + trace * %lld);", (long long)g->profile_words, e->profile,
          e->slot[g->blocks.at[1].arg + to].text, (long long)(g->profile_words + PM_PROFILE_TAIL));
  pm_end(e);
}

pm_code pm_cuda_NAMED_SCOPE(pm_gen *e, pm_opid op) {
  if (!e->profile) return PM_OK;
  const char *function = *pm_attr(e->g, op, PM_ATTR_ENDS) ? "profile_scope_end" : "profile_scope";
  const char *who = writer(e);
  if (e->lane) who = e->warps && !e->g->profile_warps ? "if (warp == 0) " : "";
  pm_note(e, op, e->g->strings.at[*pm_attr(e->g, op, PM_ATTR_FORMAT)]);
  pm_line(e, "%s%s(%s, %lld);", who, function, e->profile,
          (long long)*pm_attr(e->g, op, PM_ATTR_N));
  return PM_OK;
}
