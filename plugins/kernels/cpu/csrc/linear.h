// Packed weights, and y = x W^T + b by them.
//
// A weight [n][k] becomes [n / 16][k / per][16] words (see dot.h), zero where it is padded. Tasks are blocks of rows of x
// by blocks of columns; within one, k goes in blocks so that the words in use stay in the second-level cache.
#pragma once
#include "dot.h"
#include "kernels.h"
#include "parallel.h"

namespace ISA {

template <class D>
void pack(Team& team, const Matrix& weight, uint32_t* words) {
  using T = typename D::T;
  const int64_t n = weight.rows, k = weight.columns, steps = round_up(k, D::per) / D::per;
  parallel(team, round_up(n, LANES) / LANES, [&](int64_t g) {
    T* to = reinterpret_cast<T*>(words + g * steps * LANES);
    memset(to, 0, steps * LANES * 4);
    for (int64_t lane = 0; lane < LANES && g * LANES + lane < n; lane++) {
      const T* from = static_cast<const T*>(weight.data) + (g * LANES + lane) * weight.pitch;
      for (int64_t i = 0; i < k; i++) to[(i / D::per * LANES + lane) * D::per + i % D::per] = from[i];
    }
  });
}

// n values of y, float32 or T, from sums, which are multiplied by `scales` if there are any.
template <class T>
inline void finish(const float* c, const float* scales, const T* bias, void* y, bool wide, int64_t n) {
  auto all = [&](auto* to) {
    auto value = [&](int64_t i) { return scales ? load<vf>(c + i) * load<vf>(scales + i) : load<vf>(c + i); };
    int64_t i = 0;
    for (; i + W <= n; i += W) put(to + i, bias ? value(i) + get(bias + i) : value(i));
    if (i < n) put(to + i, bias ? value(i) + get(bias + i, n - i) : value(i), n - i);
  };
  if (wide)
    all(static_cast<float*>(y));
  else
    all(static_cast<T*>(y));
}

// Where row r and column i of y begin.
template <class T>
inline void* place(const Product& p, int64_t r, int64_t i) {
  return static_cast<char*>(p.y) + (r * p.weight.n + i) * (p.wide ? sizeof(float) : sizeof(T));
}

template <class D>
void linear(Team& team, const Product& p) {
  using T = typename D::T;
  using A = typename D::A;
  constexpr int64_t ROWS = 96, BLOCK = 512, COLUMNS = 8;
  constexpr int AHEAD = 384;  // words from what is read to what is fetched meanwhile
  const Matrix& x = p.x;
  const int64_t n = p.weight.n, m = x.rows, k = x.columns, steps = round_up(k, D::per) / D::per;
  const int64_t groups = round_up(n, LANES) / LANES;
  const T* bias = static_cast<const T*>(p.weight.bias);
  const bool single = m <= D::rows(D::GROUPS);  // every word is used once: take it in the order of memory
  const int64_t block = single ? steps : std::min(steps, BLOCK);
  const int64_t chunks = (m + ROWS - 1) / ROWS, chunk = round_up((m + chunks - 1) / chunks, D::rows(D::GROUPS));
  // Enough tasks that threads end together, of enough columns that preparing A does not count.
  int64_t columns = round_up(std::max<int64_t>(1, groups * chunks / (8 * size(team))), D::GROUPS);
  columns = std::min(columns, COLUMNS);
  const int64_t across = (groups + columns - 1) / columns, lda = block * D::per + 64 / sizeof(A);
  parallel(team, chunks * across, [&](int64_t task) {
    const int64_t r0 = task / across * chunk, g0 = task % across * columns;
    const int64_t rows = std::min(chunk, m - r0), some = std::min(columns, groups - g0), ldc = columns * LANES;
    float* c = scratch<float>(chunk * (ldc + lda));
    A* a = reinterpret_cast<A*>(c + chunk * ldc);
    for (int64_t s = 0; s < steps; s += block) {
      const int64_t count = std::min(block, steps - s), first = s * D::per;
      const T* from = static_cast<const T*>(x.data) + r0 * x.pitch + first;
      for (int64_t r = 0; r < rows; r++)
        row(a + r * lda, from + r * x.pitch, std::min(count * D::per, k - first), count * D::per);
      const uint32_t* b = p.weight.words + (g0 * steps + s) * LANES;
      product<D>(rows, some, a, lda, {&b, 1, b + AHEAD, count, LANES, steps * LANES}, c, ldc, s > 0);
    }
    const int64_t n0 = g0 * LANES;
    for (int64_t r = 0; r < rows; r++)
      finish(c + r * ldc, nullptr, bias ? bias + n0 : nullptr, place<T>(p, r0 + r, n0), p.wide,
             std::min(some * LANES, n - n0));
  });
}

}  // namespace ISA
