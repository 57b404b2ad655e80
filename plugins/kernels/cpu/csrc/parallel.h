// One way to run tasks on torch's threads, and memory that each of them keeps.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace ISA {

// f(0) ... f(tasks - 1), in this order of starting, on at most `threads` threads. A team always has `threads` members,
// even for fewer tasks: OpenMP rebuilds a team that changes its size.
template <class F>
inline void parallel(int threads, int64_t tasks, const F& f) {
#ifdef _OPENMP
  if (threads > 1 && tasks > 1 && !omp_in_parallel()) {
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(i);
    return;
  }
#endif
  for (int64_t i = 0; i < tasks; i++) f(i);
}

// This thread's scratch memory: undefined contents, kept and only ever grown. One user of each number at a time.
template <class T, int USER = 0>
inline T* scratch(size_t count) {
  struct Memory {
    void* data = nullptr;
    size_t size = 0;
    ~Memory() { free(data); }
  };
  static thread_local Memory memory;
  size_t bytes = (count * sizeof(T) + 4095) & ~size_t(4095);
  if (bytes > memory.size) {
    free(memory.data);
    memory.data = aligned_alloc(64, bytes);
    if (!memory.data) abort();
    memory.size = bytes;
  }
  return static_cast<T*>(memory.data);
}

}  // namespace ISA
