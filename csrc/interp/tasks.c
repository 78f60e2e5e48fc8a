/* Tasks of the asynchronous engines: the pending ones of each kind, and those of bulk groups. */
#include "vm.h"

bool pm_vm_want_buffer(task *k, size_t bytes) {
  if (bytes <= k->buffer_bytes) return true;
  char *p = pm_realloc(k->buffer, bytes);
  if (!p) return false;
  k->buffer = p;
  k->buffer_bytes = bytes;
  return true;
}

task *pm_vm_new_task(pm_machine *m, thread *t, const instr *i, task_kind kind) {
  task *k = m->free_tasks;
  if (k) {
    m->free_tasks = k->next;
  } else {
    k = pm_malloc(sizeof *k);
    if (k) memset(k, 0, sizeof *k);
  }
  uint32_t n = m->tasks[kind].n;
  if (k && n == m->tasks[kind].cap) {
    uint32_t cap = n ? 2 * n : 16;
    task **at = pm_realloc(m->tasks[kind].at, cap * sizeof(task *));
    if (at) {
      m->tasks[kind].at = at;
      m->tasks[kind].cap = cap;
    } else {
      k->next = m->free_tasks;
      m->free_tasks = k;
      k = NULL;
    }
  }
  if (!k) {
    pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for an asynchronous operation");
    return NULL;
  }
  k->kind = kind;
  k->owner = t;
  k->i = i;
  k->next = k->prev = NULL;
  k->read = false;
  k->run = NULL;
  k->index = n;
  t->block->cluster->n_tasks++;
  m->tasks[kind].at[n] = k;
  m->tasks[kind].n = n + 1;
  return k;
}

void pm_vm_finish_task(pm_machine *m, task *k) {
  k->owner->block->cluster->n_tasks--;
  task *last = m->tasks[k->kind].at[--m->tasks[k->kind].n];
  last->index = k->index;
  m->tasks[k->kind].at[k->index] = last;
}

void pm_vm_free_task(pm_machine *m, task *k) {
  k->next = m->free_tasks;
  m->free_tasks = k;
}

/* The caller has taken it out of its thread's list. */
void pm_vm_end_task(pm_machine *m, task *k) {
  pm_vm_finish_task(m, k);
  pm_vm_free_task(m, k);
}

void pm_vm_free_tasks(pm_machine *m) {
  pm_free(m->commits);
  m->commits = NULL;
  m->n_commits = m->cap_commits = 0;
  while (m->free_tasks) {
    task *k = m->free_tasks;
    m->free_tasks = k->next;
    pm_free(k->buffer);
    pm_free(k->issued.at);
    pm_free(k);
  }
  for (int kind = 0; kind < TASK_KINDS; kind++) {
    pm_free(m->tasks[kind].at);
    m->tasks[kind].at = NULL;
    m->tasks[kind].cap = 0;
  }
}

/* Whose copies these are: warp 0 issues those of its thread. */
thread *pm_vm_issuer(thread *t) { return t->of && !t->warp ? t->of : t; }

/* A group that a thread closes is one of each of its warps. */
void pm_vm_close_group(pm_machine *m, thread *t) {
  pm_vm_issuer(t)->groups++;
  for (uint32_t w = 1; m->has_warps && !t->of && w < WARPS; w++) pm_vm_warps(m, t)[w].groups++;
}

/* A copy of the group that its thread has open. */
task *pm_vm_new_in_group(pm_machine *m, thread *t, const instr *i, task_kind kind) {
  task *k = pm_vm_new_task(m, pm_vm_issuer(t), i, kind);
  if (!k) return NULL;
  k->next = k->owner->stores;
  if (k->next) k->next->prev = k;
  k->owner->stores = k;
  k->group = k->owner->groups;
  return k;
}

task *pm_vm_new_store(pm_machine *m, thread *t, const instr *i) {
  return pm_vm_new_in_group(m, t, i, TASK_STORE);
}

void pm_vm_end_store(pm_machine *m, task *k) {
  if (k->next) k->next->prev = k->prev;
  *(k->prev ? &k->prev->next : &k->owner->stores) = k->next;
  pm_vm_end_task(m, k);
}
