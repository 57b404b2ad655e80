// How attention over a batch is cut into tasks: by an estimate of the work, largest first.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels.h"

struct Plan {
  std::vector<Task> tasks;
  std::vector<int32_t> counters;  // parts of each task that is split over its context
};

inline Plan make_plan(const int32_t* cu_lens, const int32_t* seq_lens, int64_t requests, int64_t heads,
                      int64_t kv_heads, int64_t window, int64_t threads) {
  constexpr int64_t PAGE = 16, SHORTEST = 128;  // tokens: of a page; of context that is worth a task of its own
  const int64_t group = heads / kv_heads;
  std::vector<Task> whole;
  auto cost = [](const Task& t) { return int64_t(t.end - t.begin) * (t.rows + 4); };  // reading counts, too
  int64_t total = 0;
  for (int64_t r = 0; r < requests; r++) {
    const int64_t n = cu_lens[r + 1] - cu_lens[r], start = seq_lens[r] - n, rows = n * group;
    const int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t i = 0; i < tiles; i++) {
      const int64_t low = rows * i / tiles, high = rows * (i + 1) / tiles;
      const int64_t seen = window ? std::max<int64_t>(0, start + low / group + 1 - window) : 0;
      Task task{int32_t(r), 0, int32_t(low), int32_t(high - low), int32_t(seen / PAGE * PAGE),
                int32_t(start + (high - 1) / group + 1), 1, 0, 0, 0};
      total += cost(task) * kv_heads;
      whole.push_back(task);
    }
  }
  Plan plan;
  int32_t slots = 0;
  const int64_t most = total / (4 * threads) + 1;
  for (const Task& one : whole) {
    const int64_t tokens = one.end - one.begin;
    int64_t parts = threads == 1 ? 1 : std::min((cost(one) + most - 1) / most, tokens / SHORTEST);
    const int64_t length = (tokens / std::max<int64_t>(parts, 1) + PAGE) / PAGE * PAGE;
    parts = (tokens + length - 1) / length;
    for (int64_t head = 0; head < kv_heads; head++) {
      Task task = one;
      task.head = head;
      if (parts == 1) {
        plan.tasks.push_back(task);
        continue;
      }
      task.parts = parts;
      task.first = slots;
      task.counter = plan.counters.size();
      plan.counters.push_back(parts);
      for (int64_t i = 0; i < parts; i++) {
        task.slot = slots++;
        task.begin = one.begin + i * length;
        task.end = std::min<int64_t>(one.end, task.begin + length);
        plan.tasks.push_back(task);
      }
    }
  }
  std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                   [&](const Task& a, const Task& b) { return cost(a) > cost(b); });
  return plan;
}
