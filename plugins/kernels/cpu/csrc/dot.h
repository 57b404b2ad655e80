// The one inner loop: C += A B, where B is made of 32-bit words, 16 columns side by side.
//
// A word holds one column's values of `per` neighbouring rows of B: one float32, or two bfloat16. Packed weights, pages
// of keys (columns: tokens) and pages of values (columns: elements of a head) are all of this shape. A holds rows of
// plain values, prepared by `row` in the type that the instruction set multiplies by. int8.h adds bytes, whose sums V are
// integers.
#pragma once
#include <algorithm>

#include "vec.h"

namespace ISA {

constexpr int LANES = 16;       // columns of a group, tokens of a page
constexpr int VG = LANES / W;  // vectors of a group

template <int N>
struct At {
  static constexpr int value = N;
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

struct Floats {
  using V = vf;
  static vf start(const void*, const float* c, bool more) { return more ? load<vf>(c) : vf{}; }
  static void finish(vf sums, const void*, float* c, bool) { store(c, sums); }
};

// GROUPS: groups of columns that one pass of the inner loop takes; rows(groups): rows that go with so many; SUMS: vectors
// of sums that leave registers for the rest.
struct DotF32 : Floats {
  using T = float;
  using A = float;
  static constexpr int per = 1, SUMS = W == 16 ? 24 : 12;
  static constexpr int GROUPS = W == 16 ? 4 : 1;
  static constexpr int rows(int groups) { return W == 16 ? (groups == 4 ? 6 : 12) : W == 8 ? 6 : 2; }

  template <int NV>
  [[gnu::always_inline]] static void step(vf (&even)[NV], vf (&)[NV], const vu (&w)[NV], const A* a) {
    UNROLL for (int v = 0; v < NV; v++) even[v] += (vf)w[v] * a[0];
  }
};

#if defined(__AVX512BF16__) || defined(PAIRS)
struct DotBF16 : Floats {
  using T = bf16;
  using A = bf16;
  static constexpr int per = 2, SUMS = 24;
  static constexpr int GROUPS = 4;
  static constexpr int rows(int groups) { return groups == 4 ? 6 : 12; }

  template <int NV>
  [[gnu::always_inline]] static void step(vf (&sums)[NV], vf (&)[NV], const vu (&w)[NV], const A* a) {
    uint32_t pair;
    memcpy(&pair, a, 4);
    UNROLL for (int v = 0; v < NV; v++) sums[v] = dot_pairs(sums[v], w[v], pair);
  }
};
#else
struct DotBF16 : Floats {
  using T = bf16;
  using A = float;
  static constexpr int per = 2, SUMS = W == 16 ? 20 : 8;
  static constexpr int GROUPS = W == 16 ? 2 : 1;
  static constexpr int rows(int groups) { return W == 16 ? (groups == 1 ? 12 : 10) : W == 8 ? 4 : 2; }

  template <int NV>
  [[gnu::always_inline]] static void step(vf (&even)[NV], vf (&odd)[NV], const vu (&w)[NV], const A* a) {
    UNROLL for (int v = 0; v < NV; v++) even[v] += (vf)(w[v] << 16) * a[0];
    UNROLL for (int v = 0; v < NV; v++) odd[v] += (vf)(w[v] & 0xffff0000u) * a[1];
  }
};
#endif

// One row of A from n values, zero beyond them up to a multiple of `per`.
inline void row(float* a, const float* x, int64_t n, int64_t) { memcpy(a, x, n * 4); }

inline void row(bf16* a, const bf16* x, int64_t n, int64_t padded) {
  memcpy(a, x, n * 2);
  if (padded > n) a[n].bits = 0;
}

inline void row(float* a, const bf16* x, int64_t n, int64_t padded) {
  int64_t i = 0;
  for (; i + W <= n; i += W) put(a + i, get(x + i));
  for (; i < n; i++) a[i] = widen(x[i]);
  if (padded > n) a[n] = 0;
}

// Where B is: `count` blocks of `steps` rows of words, `pitch` words from row to row, the groups of columns side by side.
// While a block is read, what will be needed later is fetched from soon[block] on: `fetch` words for each group of each
// row, and where there are several parts of A, each goes on by `further` words.
struct Words {
  const uint32_t* const* blocks;
  const uint32_t* const* soon;
  int count;
  int64_t steps, pitch, fetch, further;
};

// `ALIKE`: whatever NG is, sums are added up in the order in which they are for so many groups.
template <class D, int M, int NG, int ALIKE>
inline void dot(const typename D::A* a, int64_t lda, const Words& b, int64_t g, int64_t part, float* c, int64_t ldc,
                bool more) {
  using V = typename D::V;
  constexpr int NV = NG * VG;
  // Independent sums hide the latency of one, as far as there are registers.
  constexpr int SUMS = M * ALIKE * VG, U = 4 * SUMS <= D::SUMS ? 4 : 2 * SUMS <= D::SUMS ? 2 : 1;
  V acc[U][M][NV] = {};
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < NV; v++) acc[0][m][v] = D::start(a + m * lda, c + m * ldc + v * W, more);
  for (int i = 0; i < b.count; i++) {
    const uint32_t* w = b.blocks[i] + g * LANES;
    const uint32_t* soon = b.soon[i] + part * b.further + g * b.steps * b.fetch;
    auto step = [&](auto u) __attribute__((always_inline)) {
      constexpr int at = decltype(u)::value, other = U > 1 ? at ^ 1 : at;
      vu words[NV];
      UNROLL for (int v = 0; v < NV; v++) words[v] = load<vu>(w + v * W);
      if constexpr (M <= 2) {  // read once: no more is gained than an early start
        UNROLL for (int v = 0; v < NG; v++) __builtin_prefetch(w + v * LANES);
      } else {
        UNROLL for (int v = 0; v < NG; v++) __builtin_prefetch(soon + v * b.fetch);
      }
      UNROLL for (int m = 0; m < M; m++) D::template step<NV>(acc[at][m], acc[other][m], words, a + m * lda);
      w += b.pitch;
      soon += NG * b.fetch;
      a += D::per;
    };
    int64_t s = 0;
    if constexpr (U == 4)
      for (; s + 4 <= b.steps; s += 4) step(At<0>{}), step(At<1>{}), step(At<2>{}), step(At<3>{});
    if constexpr (U >= 2)
      for (; s + 2 <= b.steps; s += 2) step(At<0>{}), step(At<1>{});
    for (; s < b.steps; s++) step(At<0>{});
  }
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < NV; v++) {
    V total = acc[0][m][v];
    UNROLL for (int u = 1; u < U; u++) total += acc[u][m][v];
    D::finish(total, a + m * lda, c + m * ldc + v * W, more);
  }
}

template <class D, int M, int NG, int ALIKE>
inline void rows(int64_t m, const typename D::A* a, int64_t lda, const Words& b, int64_t g, int64_t part, float* c,
                 int64_t ldc, bool more) {
  if constexpr (M > 0) {
    if (m >= M)
      dot<D, M, NG, ALIKE>(a, lda, b, g, part, c, ldc, more);
    else
      rows<D, M - 1, NG, ALIKE>(m, a, lda, b, g, part, c, ldc, more);
  }
}

// C [m][16 * groups] = (more ? C : 0) + A [m] B. Rows outside, in parts of about the same number, so that a few rows of A
// stay in the nearest cache.
template <class D, int NG, int ALIKE>
inline void part(int64_t m, int64_t from, int64_t to, const typename D::A* a, int64_t lda, const Words& b, float* c,
                 int64_t ldc, bool more) {
  constexpr int M = D::rows(ALIKE);
  const int64_t parts = (m + M - 1) / M;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t r = m * i / parts, count = m * (i + 1) / parts - r;
    for (int64_t g = from; g < to; g += NG)
      rows<D, M, NG, ALIKE>(count, a + r * lda, lda, b, g, i, c + r * ldc + g * LANES, ldc, more);
  }
}

// The result for a column does not depend on which others come with it.
template <class D, int ALIKE = D::GROUPS, int NG = ALIKE>
inline void product(int64_t m, int64_t groups, const typename D::A* a, int64_t lda, const Words& b, float* c,
                    int64_t ldc, bool more, int64_t from = 0) {
  const int64_t whole = from + (groups - from) / NG * NG;
  if (whole > from) part<D, NG, ALIKE>(m, from, whole, a, lda, b, c, ldc, more);
  if constexpr (NG > 1)
    if (whole < groups) product<D, ALIKE, NG / 2>(m, groups, a, lda, b, c, ldc, more, whole);
}

// Packed weights: [n / 16 / GROUPS] tiles of [k / per][GROUPS] groups, the last one narrower if need be, so that the inner
// loop reads them in the order of memory.
template <class D>
struct Tile {
  const uint32_t* words;
  int64_t pitch;
  // Where groups from number g on are, in a weight of so many groups and steps.
  Tile(const uint32_t* weight, int64_t g, int64_t groups, int64_t steps) {
    const int64_t first = g / D::GROUPS * D::GROUPS;
    words = weight + (first * steps + g - first) * LANES;
    pitch = std::min<int64_t>(D::GROUPS, groups - first) * LANES;
  }
};

}  // namespace ISA
