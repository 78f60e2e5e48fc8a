/* cp.async: copies of single lanes from global to shared memory, without an mbarrier.
 *
 * A lane's copies since its last commit_group are a group, which takes effect at any time after:
 * what it copies is read, later it is written. Until wait_group covers the group its bytes in
 * shared memory belong to it, and no access by anyone is ordered after it. From then on they are
 * writes of the lane, which others see after a barrier like any other. These copies are of the
 * generic proxy: they take no fence, and come after the lane's earlier accesses. */
#include "machine.h"

struct LanePiece {
  Region *from, *to;
  size_t source, target; /* byte offsets */
  u32 bytes;
  bool zeros;
  int line;
  u8 data[16];
};

struct LaneGroup : Operation {
  std::vector<LanePiece> pieces;
  bool has_read = false;
  bool step() override;
};

bool LaneGroup::step() {
  for (LanePiece &p : pieces) {
    if (has_read) memcpy(p.to->bytes + p.target, p.data, p.bytes);
    else if (p.zeros) memset(p.data, 0, sizeof p.data);
    else memcpy(p.data, p.from->bytes + p.source, p.bytes);
  }
  const bool done = has_read;
  has_read = true;
  return done;
}

/* PTX: cp-size is 4, 8 or 16, to which both addresses are aligned. src-size bytes are read, here
 * all of them or none, and the rest is filled with zeros. */
extern "C" void host_cp_async(u32 dst, const void *src, u32 bytes, bool valid, int line) {
  Thread *t = m.self;
  t->line = line;
  if (bytes != 4 && bytes != 8 && bytes != 16) host_fail(line, "cp.async of %u bytes", bytes);
  LanePiece p = {};
  p.bytes = bytes;
  p.zeros = !valid;
  p.line = line;
  p.to = &t->block->shared;
  p.target = shared_offset(*t->block, dst, bytes, bytes, "cp.async", line);
  if (valid) {
    p.from = &global_region(src, bytes, bytes, "cp.async", line, &p.source);
    thread_reads(*p.from, p.source, bytes, line);
  }
  u8 undefined[16];
  for (u32 k = 0; k < bytes; k++) undefined[k] = (u8)~p.to->bytes[p.target + k];
  thread_writes(*p.to, p.target, undefined, bytes, line);
  for (u32 k = 0; k < bytes; k++) p.to->marks[p.target + k].copied = (u16)line;
  if (!t->lane_group) t->lane_group = std::make_shared<LaneGroup>();
  t->lane_group->pieces.push_back(p);
}

extern "C" void host_cp_async_commit(int line) {
  Thread *t = m.self;
  t->line = line;
  if (t->lane_group) host_issue(t->lane_group);
  t->lane_groups.push_back(t->lane_group);
  t->lane_group = nullptr;
  host_yield();
}

extern "C" void host_cp_async_wait(u32 n, int line) {
  Thread *t = m.self;
  t->line = line;
  while (t->lane_groups.size() > n) {
    const std::shared_ptr<LaneGroup> g = t->lane_groups.front();
    t->lane_groups.erase(t->lane_groups.begin());
    if (!g) continue;
    host_finish(g.get());
    for (const LanePiece &p : g->pieces) {
      for (u32 k = 0; k < p.bytes; k++) p.to->marks[p.target + k].copied = 0;
      if (!p.zeros) thread_reads(*p.from, p.source, p.bytes, p.line);
      thread_writes(*p.to, p.target, p.data, p.bytes, p.line);
    }
  }
}

void host_lane_copies_end(const Thread &t) {
  if (t.lane_group)
    host_fail(t.lane_group->pieces[0].line, "the thread ends with a cp.async that no group holds");
  for (const auto &g : t.lane_groups)
    if (g) host_fail(g->pieces[0].line, "the thread ends and nobody waited for this cp.async");
}
