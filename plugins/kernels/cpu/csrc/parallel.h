// One way to run tasks on torch's threads, and memory that each of them keeps.
//
// All members of a team run the same kernels in the same order; `parallel` and `shares` are where they share work and
// wait for one another. Between two kernels they are already there, spinning: starting OpenMP threads anew for each would take as long
// as many of the kernels of a decode.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ISA {

constexpr int MOST_THREADS = 256;

// What members share, each on a cache line of its own.
struct Team {
  struct alignas(64) Taken {
    std::atomic<uint64_t> ends{0};  // of a member's share: from its beginning, and << 32 from its end
  };
  std::atomic<int> size{1}, spins{0};
  alignas(64) std::atomic<int64_t> next{0};    // task
  alignas(64) std::atomic<int> arrived{0};     // members
  alignas(64) std::atomic<uint32_t> stage{0};  // meetings that are over
  Taken taken[MOST_THREADS];
};

// Who waits longer than others compute was put aside by the system, or waits for one who was: sleep.
constexpr int SPINS = 1 << 12;

inline int size(const Team& team) { return team.size.load(std::memory_order_relaxed); }

// Everybody has come here before anybody goes on.
inline void meet(Team& team) {
  const uint32_t stage = team.stage.load(std::memory_order_relaxed);
  if (team.arrived.fetch_add(1, std::memory_order_acq_rel) == size(team) - 1) {
    team.next.store(0, std::memory_order_relaxed);
    for (int i = 0; i < size(team); i++) team.taken[i].ends.store(0, std::memory_order_relaxed);
    team.arrived.store(0, std::memory_order_relaxed);
    // In order before looking who sleeps: behind a plain store, that could see nobody yet, and nobody would be woken.
    team.stage.exchange(stage + 1, std::memory_order_seq_cst);
    team.stage.notify_all();
    return;
  }
  for (int i = team.spins.load(std::memory_order_relaxed); i > 0; i--) {
    if (team.stage.load(std::memory_order_acquire) != stage) return;
#if defined(__SSE2__)
    _mm_pause();
#endif
  }
  while (team.stage.load(std::memory_order_acquire) == stage) team.stage.wait(stage, std::memory_order_acquire);
}

// f(0) ... f(tasks - 1), started in this order, each by one member; returns once all are done.
template <class F>
inline void parallel(Team& team, int64_t tasks, const F& f) {
  if (size(team) == 1) {
    for (int64_t i = 0; i < tasks; i++) f(i);
    return;
  }
  for (int64_t i; (i = team.next.fetch_add(1, std::memory_order_relaxed)) < tasks;) f(i);
  meet(team);
}

inline int member() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// f(begin, end) over [0, n), in pieces that cross no multiple of `grain`. Every member works through a share of its own,
// as memory is read fastest in its order, and then takes from the ends of others', who may have been held up.
template <class F>
inline void shares(Team& team, int64_t n, int64_t grain, const F& f) {
  const int threads = size(team), self = threads == 1 ? 0 : member();
  for (int i = 0; i < threads; i++) {
    const int whose = (self + i) % threads;
    const int64_t low = n * whose / threads, high = n * (whose + 1) / threads;
    const int64_t first = low / grain, count = low < high ? (high + grain - 1) / grain - first : 0;
    std::atomic<uint64_t>& ends = team.taken[whose].ends;
    uint64_t seen = ends.load(std::memory_order_relaxed);
    for (;;) {
      const int64_t front = seen & 0xffffffff, back = seen >> 32;
      if (front + back >= count) break;
      const uint64_t one = i == 0 ? 1 : 1ull << 32;
      if (threads > 1 && !ends.compare_exchange_weak(seen, seen + one, std::memory_order_relaxed)) continue;
      seen += one;
      const int64_t at = (first + (i == 0 ? front : count - 1 - back)) * grain;
      f(std::max(low, at), std::min(high, at + grain));
      if (threads > 1) seen = ends.load(std::memory_order_relaxed);
    }
  }
  if (threads > 1) meet(team);
}

// f(begin, end) over [0, n), in parts of about equal size.
template <class F>
inline void split(Team& team, int64_t n, const F& f) {
  const int64_t parts = std::min<int64_t>(n, size(team));
  parallel(team, parts, [&](int64_t t) { f(n * t / parts, n * (t + 1) / parts); });
}

// f(team) on `threads` of torch's threads, or as many as there are.
template <class F>
inline void together(int threads, F&& f) {
  Team team;
#ifdef _OPENMP
  if (threads > 1 && !omp_in_parallel()) {
    threads = std::min(threads, MOST_THREADS);
#pragma omp parallel num_threads(threads)
    {
      const int size = omp_get_num_threads();  // the same for all
      team.size.store(size, std::memory_order_relaxed);
      team.spins.store(size <= omp_get_num_procs() ? SPINS : 0, std::memory_order_relaxed);
      f(team);
    }
    return;
  }
#endif
  f(team);
}

constexpr size_t HUGE_PAGE = 2 << 20;  // bytes of a huge page

// This thread's scratch memory: undefined contents, kept and only ever grown. One user of each number at a time.
template <class T, int USER = 0>
inline T* scratch(size_t count) {
  struct Memory {
    void* data = nullptr;
    size_t size = 0;
    ~Memory() { free(data); }
  };
  static thread_local Memory memory;
  size_t bytes = count * sizeof(T);
  if (bytes > memory.size) {
    const size_t page = bytes < HUGE_PAGE ? 4096 : HUGE_PAGE;
    bytes = (bytes + page - 1) / page * page;
    free(memory.data);
    memory.data = aligned_alloc(page, bytes);
    if (!memory.data) {
      fprintf(stderr, "--kernel cpu: out of memory: %zu bytes of scratch memory\n", bytes);
      abort();
    }
    memory.size = bytes;
#ifdef MADV_HUGEPAGE
    if (page == HUGE_PAGE) madvise(memory.data, bytes, MADV_HUGEPAGE);
#endif
  }
  return static_cast<T*>(memory.data);
}

}  // namespace ISA
