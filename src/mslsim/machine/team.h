// SPDX-License-Identifier: MIT
// Spreads the threadgroups of a launch over OS threads. Included by machine.cpp, once.
#pragma once

namespace msl {
namespace {

struct Team {
  Launch* launch;
  uint64_t groups;
  uint64_t chunk;  // groups a worker takes at a time: a counter that all share is slow
  uint64_t next;
  uint32_t failed;
};

void work(Team& team, Worker& w) {
  MSL_ENTER_WORKER(&w);
  for (;;) {
    const uint64_t first = __atomic_fetch_add(&team.next, team.chunk, __ATOMIC_RELAXED);
    if (first >= team.groups) break;
    const uint64_t last = first + team.chunk < team.groups ? first + team.chunk : team.groups;
    for (uint64_t i = first; i < last; ++i) {
      if (__atomic_load_n(&team.failed, __ATOMIC_RELAXED)) return;
      const bool down = team.launch->order == kDescending;
      if (!w.run_group(down ? team.groups - 1 - i : i)) {
        __atomic_store_n(&team.failed, 1, __ATOMIC_RELAXED);
      }
    }
  }
}

struct Task {
  Team* team;
  Worker* worker;
};
void* work_on_thread(void* p) {
  Task* task = static_cast<Task*>(p);
  work(*task->team, *task->worker);
  return nullptr;
}

Worker* worker(unsigned index) {
  if (g_workers[index]) return g_workers[index];
  void* memory = mmap(nullptr, sizeof(Worker), PROT_READ | PROT_WRITE, kLazyMemory, -1, 0);
  void* arena = MSL_ARENA(index);
  if (memory == MAP_FAILED || arena == MAP_FAILED) return nullptr;
  Worker* w = static_cast<Worker*>(memory);
  w->arena = static_cast<char*>(arena);
  return g_workers[index] = w;
}

}  // namespace

// Runs the whole grid; false when memory is short.
bool run_grid(Launch& launch) {
  if (!reserve_stacks()) return false;
  Team team{&launch, 1, 1, 0, 0};
  for (int i = 0; i < 3; ++i) {
    team.groups *= (launch.threads[i] + launch.group_size[i] - 1) / launch.group_size[i];
  }
  unsigned count = launch.workers < kMaxWorkers ? launch.workers : kMaxWorkers;
  if (count > team.groups) count = static_cast<unsigned>(team.groups);
  if (count < 1) count = 1;
  if (count > 1) team.chunk = team.groups / (16 * count) < 64 ? team.groups / (16 * count) : 64;
  if (team.chunk < 1) team.chunk = 1;
  pthread_t threads[kMaxWorkers];
  Task tasks[kMaxWorkers];
  unsigned started = 0;
  for (unsigned i = 0; i < count; ++i) {
    Worker* w = worker(i);
    if (!w) return false;
    w->prepare(launch, i);
    tasks[i] = {&team, w};
  }
  for (unsigned i = 1; i < count; ++i) {
    if (pthread_create(&threads[i], nullptr, work_on_thread, &tasks[i])) break;
    ++started;
  }
  work(team, *tasks[0].worker);
  for (unsigned i = 1; i <= started; ++i) pthread_join(threads[i], nullptr);
  for (unsigned i = 0; i < count; ++i) {
    const size_t bytes = tasks[i].worker->most_threadgroup_bytes;
    if (bytes > launch.static_threadgroup_bytes) {
      launch.static_threadgroup_bytes = static_cast<uint32_t>(bytes);
    }
  }
  launch.failed = team.failed;
  return true;
}

}  // namespace msl
