// Packed weights, and y = x W^T + b by them.
//
// A weight [n][k] becomes tiles of [k / per][GROUPS * 16] words (see Tile), zero where it is padded. Tasks are chunks of
// rows of x by tiles; within one, k goes in blocks so that the words in use stay in the second-level cache.
#pragma once
#include "dot.h"
#include "kernels.h"
#include "parallel.h"

namespace ISA {

template <class D>
void pack(Team& team, const Matrix& weight, uint32_t* words) {
  using T = typename D::T;
  const int64_t n = weight.rows, k = weight.columns, steps = round_up(k, D::per) / D::per;
  const int64_t groups = round_up(n, LANES) / LANES;
  parallel(team, groups, [&](int64_t g) {
    const Tile<D> tile(words, g, groups, steps);
    T* to = reinterpret_cast<T*>(const_cast<uint32_t*>(tile.words));
    for (int64_t s = 0; s < steps; s++) memset(to + s * tile.pitch * D::per, 0, LANES * 4);
    for (int64_t lane = 0; lane < LANES && g * LANES + lane < n; lane++) {
      const T* from = static_cast<const T*>(weight.data) + (g * LANES + lane) * weight.pitch;
      for (int64_t i = 0; i < k; i++) to[(i / D::per * tile.pitch + lane) * D::per + i % D::per] = from[i];
    }
  });
}

// Rows of the weight again: y [count][k], where k is a multiple of `per`.
template <class D>
void embed_plain(Team& team, const int64_t* tokens, int64_t count, int64_t k, const Weight& weight, typename D::T* y) {
  const int64_t steps = k / D::per, groups = round_up(weight.n, LANES) / LANES;
  split(team, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Tile<D> tile(weight.words, tokens[i] / LANES, groups, steps);
      const uint32_t* from = tile.words + tokens[i] % LANES;
      for (int64_t s = 0; s < steps; s++) memcpy(y + i * k + s * D::per, from + s * tile.pitch, 4);
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

// `steps` rows of a tile, for m rows of A. What is fetched meanwhile: if these are many, the words that follow, of which
// each part of the rows takes its share; if not, those that are read, as the hardware sees best what comes in order.
template <class D>
struct Stretch {
  const uint32_t *b, *soon;
  int64_t steps, pitch, fetch = LANES, further = 0;
  Stretch(int64_t m, const uint32_t* b, int64_t steps, int64_t pitch) : b(b), soon(b), steps(steps), pitch(pitch) {
    const int64_t most = D::rows(D::GROUPS), parts = (m + most - 1) / most;
    if (parts <= 2) return;
    soon = b + steps * pitch;
    fetch = (LANES + parts - 1) / parts;
    further = steps * pitch / LANES * fetch;
  }
  operator Words() const { return {&b, &soon, 1, steps, pitch, fetch, further}; }
};

// Rows of a chunk: of about the same size each, within the second-level cache, and as many as the inner loop likes.
template <class D>
int64_t rows_at_once(int64_t m) {
  const int64_t most = 96, parts = (m + most - 1) / most;
  return round_up((m + parts - 1) / parts, D::rows(D::GROUPS));
}

template <class D>
void linear(Team& team, const Product& p) {
  using T = typename D::T;
  using A = typename D::A;
  constexpr int64_t BLOCK = 512, LDC = D::GROUPS * LANES;
  const Matrix& x = p.x;
  const int64_t n = p.weight.n, m = x.rows, k = x.columns, steps = round_up(k, D::per) / D::per;
  const int64_t groups = round_up(n, LANES) / LANES, across = round_up(groups, D::GROUPS);
  const T* bias = static_cast<const T*>(p.weight.bias);
  const bool single = m <= D::rows(D::GROUPS);  // every word is used once: take it in the order of memory
  const int64_t block = single ? steps : std::min(steps, BLOCK);
  const int64_t chunk = rows_at_once<D>(m), chunks = (m + chunk - 1) / chunk;
  const bool as_is = std::is_same_v<A, T> && k % D::per == 0;
  const int64_t lda = as_is ? x.pitch : steps * D::per + 64 / sizeof(A);
  float* c = scratch<float>(chunk * (LDC + (as_is ? 0 : lda)));
  A* a = reinterpret_cast<A*>(c + chunk * LDC);
  int64_t prepared = -1;  // which chunk is in `a`
  shares(team, chunks * across, D::GROUPS, [&](int64_t begin, int64_t end) {
    const int64_t r0 = begin / across * chunk, g = begin % across, n0 = g * LANES;
    const int64_t rows = std::min(chunk, m - r0), some = std::min(end - begin, groups - g);
    if (some <= 0) return;
    const T* from = static_cast<const T*>(x.data) + r0 * x.pitch;
    if (as_is) {
      a = reinterpret_cast<A*>(const_cast<T*>(from));
    } else if (prepared != r0) {
      for (int64_t r = 0; r < rows; r++) row(a + r * lda, from + r * x.pitch, k, steps * D::per);
      prepared = r0;
    }
    const Tile<D> tile(p.weight.words, g, groups, steps);
    for (int64_t s = 0; s < steps; s += block) {
      const Stretch<D> words(rows, tile.words + s * tile.pitch, std::min(block, steps - s), tile.pitch);
      product<D>(rows, some, a + s * D::per, lda, words, c, LDC, s > 0);
    }
    for (int64_t r = 0; r < rows; r++)
      finish(c + r * LDC, nullptr, bias ? bias + n0 : nullptr, place<T>(p, r0 + r, n0), p.wide,
             std::min(some * LANES, n - n0));
  });
}

}  // namespace ISA
