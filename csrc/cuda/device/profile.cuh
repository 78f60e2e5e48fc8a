// The profiler: events of named scopes, by one lane of each trace.

//! Profile
// of one trace: where its events are in shared memory, their words so far (those that did not fit
// count) and at most; the clock and the global timer at the start
struct Profile { u32 at, used, room, clock, timer; };

//! profile_clock
FN u32 profile_clock() {
  u32 r; asm volatile("mov.u32 %0, %%clock;" : "=r"(r) :: "memory"); return r;
}

//! profile_timer
FN u32 profile_timer() {
  u32 r; asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(r) :: "memory"); return r;
}

//! profile_event
FN void profile_event(Profile& p, u32 tag) {
  const u32 event[2] = {tag, profile_clock()};
  if (p.used < p.room) st_shared<u32, 2>(p.at + p.used * 4, event);
  p.used += 2;
}

//! profile_start
// with the event that opens scope 0
FN void profile_start(Profile& p) {
  p.clock = profile_clock();
  p.timer = profile_timer();
  profile_event(p, 0);
}

//! profile_scope
FN void profile_scope(Profile& p, u32 tag) { profile_event(p, tag); }

//! profile_scope_end
FN void profile_scope_end(Profile& p, u32 tag) { profile_event(p, tag | 1u << 31); }

//! profile_write
// copies a trace to global memory, where it has W + 4 words
template <int W> FN void profile_write(const Profile& p, i32* to) {
  u32 sm;
  asm("mov.u32 %0, %%smid;" : "=r"(sm));
  const u32 blocks = gridDim.x * gridDim.y * gridDim.z;
  to[0] = (i32)p.timer;
  to[1] = (i32)sm;
  to[2] = (i32)p.used;
  for (u32 k = 0; k < p.used && k < p.room; k += 2) {
    u32 event[2];
    ld_shared<u32, 2>(event, p.at + k * 4);
    to[3 + k] = (i32)event[0];
    to[4 + k] = (i32)event[1];
  }
  to[W] = (i32)p.clock;
  to[W + 1] = (i32)profile_timer();
  to[W + 2] = (i32)profile_clock();
  to[W + 3] = (i32)blocks;
}
