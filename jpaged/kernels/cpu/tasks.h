// One call's work, taken from one counter by the caller and threads of XLA's pool.
//
// The caller never waits for a thread to start, only for tasks that a thread has started: a pool that is busy, or has
// no other thread, makes calls slower but not wrong.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jpaged {
namespace {

// Threads that may work on a call, including the caller's.
inline int64_t count_threads(xla::ffi::ThreadPool& pool, int64_t max_threads) {
  const int64_t num_threads = std::max<int64_t>(pool.num_threads(), 1);
  return max_threads > 0 ? std::min(num_threads, max_threads) : num_threads;
}

constexpr int64_t kNoTask = -1;

// Call run(i) once for every i below num_tasks, on up to num_threads threads. If `run` has two arguments, the second is
// the task that its thread runs after i, or kNoTask: tasks are then taken one ahead.
template <class Run>
void run_tasks(xla::ffi::ThreadPool& pool, int64_t num_tasks, int64_t num_threads, const Run& run) {
  // A thread that starts too late finds no task: it accesses this object, but nothing that is destroyed with the call.
  struct Counters {
    std::atomic<int64_t> next{0}, num_done{0};
  };
  constexpr bool looks_ahead = std::is_invocable_v<Run, int64_t, int64_t>;
  const auto call = [&run](int64_t i, [[maybe_unused]] int64_t next) {
    if constexpr (looks_ahead) {
      run(i, next);
    } else {
      run(i);
    }
  };
  const int64_t num_helpers = std::min(num_threads, num_tasks) - 1;
  if (num_helpers <= 0) {
    for (int64_t i = 0; i < num_tasks; ++i) call(i, i + 1 < num_tasks ? i + 1 : kNoTask);
    return;
  }
  const auto counters = std::make_shared<Counters>();
  const auto work = [counters, num_tasks, &call] {
    const auto take = [&] {
      const int64_t i = counters->next.fetch_add(1, std::memory_order_relaxed);
      return i < num_tasks ? i : kNoTask;
    };
    for (int64_t i = take(), next = kNoTask; i != kNoTask; i = next) {
      if (looks_ahead) next = take();
      call(i, next);
      counters->num_done.fetch_add(1, std::memory_order_release);
      if (!looks_ahead) next = take();
    }
  };
  for (int64_t i = 0; i < num_helpers; ++i) pool.Schedule([work] { work(); });
  work();
  while (counters->num_done.load(std::memory_order_acquire) < num_tasks) std::this_thread::yield();
}

// Floats of this thread, aligned to a cache line. The memory is reused by later calls, which overwrite it: new pages
// would cost as much as a short row.
inline float* scratch_floats(int64_t num_floats) {
  constexpr int64_t kLine = 16;
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < num_floats + kLine) memory.resize(num_floats + kLine);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t{63});
}

}  // namespace
}  // namespace jpaged
