// Attention over packed pages, in one pass: scores, running maximum and sums, for a few pages at a time.
//
// A task's rows are tokens x query heads of one kv head, so that one inner loop serves decodes, chunks and prompts.
#pragma once
#include <atomic>
#include <cmath>

#include "bytes.h"
#include "dot.h"
#include "kernels.h"
#include "parallel.h"

namespace ISA {

constexpr int PAGES = 8;  // taken at a time
constexpr int TOKENS = PAGES * LANES;
constexpr int AHEAD = 4;  // pages from the one that is read to the one that is fetched

// Softmax of one row of scores, tokens [low, high) of which are seen, against what came before: writes probabilities
// (0 for the unseen), times `scales` if there are any, updates maximum and sum, and gives the factor for the sums so far.
template <class A>
inline float softmax(const float* s, A* p, int count, int low, int high, float scale, const float* scales,
                     float& maximum, float& total) {
  const vf none = all(-INFINITY);
  const vi lane = lanes();
  vf top = none, odd = {};
  for (int i = 0; i < count; i += W) {
    vi at = lane + i;
    vf x = (at >= low) & (at < high) ? load<vf>(s + i) * scale : none;
    top = max(top, x);
    odd = x == x ? odd : x;
  }
  if (sum(odd) != 0) {  // what is no number is not to be lost in a comparison
    total = NAN;
    maximum = 0;
    for (int i = 0; i < count; i += W) put(p + i, vf{});
    return 1;
  }
  const float before = maximum;
  maximum = largest(top) > before ? largest(top) : before;
  if (maximum == -INFINITY) {  // nothing is seen yet, or every score is
    const vf zero = {};
    for (int i = 0; i < count; i += W) put(p + i, zero);
    return 1;
  }
  vf sums = {};
  for (int i = 0; i < count; i += W) {
    vi at = lane + i;
    vf x = (at >= low) & (at < high) ? exp(load<vf>(s + i) * scale - maximum) : vf{};
    put(p + i, scales ? x * load<vf>(scales + i) : x);
    sums += scales ? x : get(p + i);  // as rounded
  }
  const float factor = before == maximum ? 1 : exp(all(before - maximum))[0];
  total = total * factor + sum(sums);
  return factor;
}

inline void scaled(float* x, int64_t n, float factor) {
  for (int64_t i = 0; i < n; i += W) store(x + i, load<vf>(x + i) * factor);
}

template <class T>
inline void write(const float* sums, float total, const Task& task, int r, int64_t group, const Attention& work) {
  const int64_t row = task.row + r, size = work.cache.size;
  const int64_t token = work.cu_lens[task.request] + row / group, head = task.head * group + row % group;
  T* out = static_cast<T*>(work.out) + (token * work.q.inner + head) * size;
  const float factor = 1 / total;
  int64_t i = 0;
  for (; i + W <= size; i += W) put(out + i, load<vf>(sums + i) * factor);
  if (i < size) put(out + i, load<vf>(sums + i) * factor, size - i);
}

// Adds the partial results of a split task up, and writes the output.
template <class T>
inline void merge(const float* partial, int parts, int rows, int64_t padded, const Task& task, const Attention& work) {
  const int64_t stride = MOST_ROWS * (padded + 2), group = work.q.inner / work.cache.kv_heads;
  float* sums = scratch<float>(padded);
  for (int r = 0; r < rows; r++) {
    const float* one = partial + r * (padded + 2);
    float maximum = -INFINITY, total = 0;
    for (int i = 0; i < parts; i++) maximum = std::max(maximum, one[i * stride + padded]);
    memset(sums, 0, padded * 4);
    for (int i = 0; i < parts; i++) {
      const float* own = one + i * stride;
      if (own[padded + 1] == 0) continue;  // saw nothing
      const float factor = exp(all(own[padded] - maximum))[0];
      total += own[padded + 1] * factor;
      for (int64_t j = 0; j < padded; j += W) store(sums + j, load<vf>(sums + j) + load<vf>(own + j) * factor);
    }
    write<T>(sums, total, task, r, group, work);
  }
}

template <class D>
void attend(const Task& task, const Attention& work) {
  using T = typename D::T;
  using A = typename D::A;
  const Cache& cache = work.cache;
  const int64_t size = cache.size, padded = cache.padded, values_of_page = LANES * padded;
  const int64_t page = cache.bytes ? page_bytes(padded) : values_of_page * sizeof(T), pages = cache.block_size / LANES;
  const int64_t depth = round_up(size, D::per), group = work.q.inner / cache.kv_heads;
  const int64_t lda = depth + 64 / sizeof(A), ldp = TOKENS + 64 / sizeof(A);
  const int rows = task.rows;
  const int32_t first = work.cu_lens[task.request], length = work.seq_lens[task.request];
  const int32_t start = length - (work.cu_lens[task.request + 1] - first);
  const int32_t* table = work.table + task.request * work.table_pitch;

  float* scores = scratch<float>(MOST_ROWS * (TOKENS + padded + 2 + lda + ldp));
  float* sums = scores + MOST_ROWS * TOKENS;
  float *maximum = sums + MOST_ROWS * padded, *total = maximum + MOST_ROWS;
  A* q = reinterpret_cast<A*>(total + MOST_ROWS);
  A* p = q + MOST_ROWS * lda;
  for (int r = 0; r < rows; r++) {
    const int64_t at = task.row + r;
    const T* from = static_cast<const T*>(work.q.data) + (first + at / group) * work.q.outer_pitch +
                    (task.head * group + at % group) * work.q.inner_pitch;
    row(q + r * lda, from, size, depth);
    maximum[r] = -INFINITY;
    total[r] = 0;
  }
  T* wide = cache.bytes ? scratch<T, 1>(PAGES * values_of_page) : nullptr;
  float scales[TOKENS];
  bool more = false;
  for (int32_t t = task.begin; t < task.end; t += TOKENS) {
    const int count = (std::min<int32_t>(TOKENS, task.end - t) + LANES - 1) / LANES;
    // Pages in the order in which they are read: keys, values, and what of the next tokens is fetched meanwhile.
    const char* pages_of[2 * PAGES + AHEAD];
    const char **keys = pages_of, **values = keys + count;
    for (int i = 0; i < count + AHEAD; i++) {
      const int32_t token = i < count ? t + i * LANES : std::min(t + TOKENS + (i - count) * LANES, task.end - 1);
      const int64_t in = token % cache.block_size / LANES;
      const int64_t offset = ((table[token / cache.block_size] * cache.kv_heads + task.head) * pages + in) * page;
      keys[i < count ? i : count + i] = static_cast<const char*>(cache.keys) + offset;
      if (i < count) values[i] = static_cast<const char*>(cache.values) + offset;
    }
    if (!more)
      for (int i = 0; i < std::min(AHEAD, 2 * count); i++)
        for (int64_t line = 0; line < page; line += 64) __builtin_prefetch(pages_of[i] + line);
    const uint32_t *words[PAGES], *soon[PAGES];
    auto words_of = [&](int i, int number) {  // those of bytes as copies
      const char *at = pages_of[number], *later = pages_of[number + AHEAD];
      if (cache.bytes) {
        load_bytes(reinterpret_cast<const int8_t*>(at), later, padded, wide + i * values_of_page, scales + i * LANES);
        at = later = reinterpret_cast<const char*>(wide + i * values_of_page);
      }
      words[i] = reinterpret_cast<const uint32_t*>(at);
      soon[i] = reinterpret_cast<const uint32_t*>(later);
    };
    const int64_t fetch = cache.bytes ? 0 : LANES;
    for (int i = 0; i < count; i++) {
      words_of(i, i);
      product<D, 1>(rows, 1, q, lda, {words + i, soon + i, 1, depth / D::per, LANES, fetch, 0}, scores + i * LANES, TOKENS,
                 false);
    }
    for (int r = 0; r < rows && cache.bytes; r++)
      for (int i = 0; i < count * LANES; i += W) {
        float* s = scores + r * TOKENS + i;
        store(s, load<vf>(s) * load<vf>(scales + i));
      }
    for (int i = 0; i < count; i++) words_of(i, count + i);
    for (int r = 0; r < rows; r++) {
      const int64_t query = start + (task.row + r) / group;
      const int low = work.window ? std::max<int64_t>(0, query + 1 - work.window - t) : 0;
      const int high = std::min<int64_t>(count * LANES, query + 1 - t);
      const float factor =
          softmax(scores + r * TOKENS, p + r * ldp, count * LANES, low, high, work.scale,
                  cache.bytes ? scales : nullptr, maximum[r], total[r]);
      if (more && factor != 1) scaled(sums + r * padded, padded, factor);
    }
    product<D>(rows, padded / LANES, p, ldp,
               {words, soon, count, LANES / D::per, padded, fetch, 0}, sums, padded, more);
    more = true;
  }
  if (task.parts == 1) {
    for (int r = 0; r < rows; r++) write<T>(sums + r * padded, total[r], task, r, group, work);
    return;
  }
  const int64_t stride = MOST_ROWS * (padded + 2);
  for (int r = 0; r < rows; r++) {
    float* own = work.partial + task.slot * stride + r * (padded + 2);
    memcpy(own, sums + r * padded, padded * 4);
    own[padded] = maximum[r];
    own[padded + 1] = total[r];
  }
  if (__atomic_sub_fetch(work.remaining + task.counter, 1, __ATOMIC_ACQ_REL) == 0)
    merge<T>(work.partial + task.first * stride, task.parts, rows, padded, task, work);
}

template <class D>
void attention(Team& team, const Attention& work) {
  // Shares, as heads of a request are neighbours among the tasks, and their pages in memory.
  shares(team, work.count, 1, [&](int64_t i, int64_t) { attend<D>(work.tasks[i], work); });
}

}  // namespace ISA
