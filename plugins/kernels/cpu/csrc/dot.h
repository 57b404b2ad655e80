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
  static constexpr int rows(int groups) { return W == 16 ? (groups == 1 ? 12 : 6) : W == 8 ? 6 : 2; }

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
  static constexpr int rows(int groups) { return groups == 1 ? 12 : 6; }

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

// Where B is: `count` blocks of `steps` rows of words, `pitch` words from row to row; group g of columns begins
// `g * group` words into each block. While one block is read, the next is fetched, and `next` while the last is.
struct Words {
  const uint32_t* const* blocks;
  int count;
  const uint32_t* next;
  int64_t steps, pitch, group;
};

template <class D, int M, int NG>
inline void dot(const typename D::A* a, int64_t lda, const Words& b, int64_t g, float* c, int64_t ldc, bool more) {
  using V = typename D::V;
  constexpr int NV = NG * VG;
  // Independent sums hide the latency of one, as far as there are registers.
  constexpr int U = 4 * M * NV <= D::SUMS ? 4 : 2 * M * NV <= D::SUMS ? 2 : 1;
  V acc[U][M][NV] = {};
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < NV; v++) acc[0][m][v] = D::start(a + m * lda, c + m * ldc + v * W, more);
  for (int i = 0; i < b.count; i++) {
    const uint32_t* w = b.blocks[i] + g * b.group;
    const uint32_t* soon = (i + 1 < b.count ? b.blocks[i + 1] : b.next) + g * b.group;
    auto step = [&](auto u) __attribute__((always_inline)) {
      constexpr int at = decltype(u)::value, other = U > 1 ? at ^ 1 : at;
      vu words[NV];
      UNROLL for (int v = 0; v < NV; v++) words[v] = load<vu>(w + (v / VG) * b.group + (v % VG) * W);
      UNROLL for (int v = 0; v < NV; v += VG) __builtin_prefetch(soon + (v / VG) * b.group);
      UNROLL for (int m = 0; m < M; m++) D::template step<NV>(acc[at][m], acc[other][m], words, a + m * lda);
      w += b.pitch;
      soon += b.pitch;
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

template <class D, int M, int NG>
inline void rows(int64_t m, const typename D::A* a, int64_t lda, const Words& b, int64_t g, float* c, int64_t ldc,
                 bool more) {
  if constexpr (M > 0) {
    if (m >= M)
      dot<D, M, NG>(a, lda, b, g, c, ldc, more);
    else
      rows<D, M - 1, NG>(m, a, lda, b, g, c, ldc, more);
  }
}

// C [m][16 * groups] = (more ? C : 0) + A [m] B. Rows outside, in parts of about the same number, so that a few rows of A
// stay in the nearest cache.
template <class D, int NG>
inline void part(int64_t m, int64_t from, int64_t to, const typename D::A* a, int64_t lda, const Words& b, float* c,
                 int64_t ldc, bool more) {
  constexpr int M = D::rows(NG);
  const int64_t parts = (m + M - 1) / M;
  for (int64_t i = 0; i < parts; i++) {
    const int64_t r = m * i / parts, count = m * (i + 1) / parts - r;
    for (int64_t g = from; g < to; g += NG)
      rows<D, M, NG>(count, a + r * lda, lda, b, g, c + r * ldc + g * LANES, ldc, more);
  }
}

template <class D>
inline void product(int64_t m, int64_t groups, const typename D::A* a, int64_t lda, const Words& b, float* c,
                    int64_t ldc, bool more) {
  const int64_t whole = groups / D::GROUPS * D::GROUPS;
  if (whole > 0) part<D, D::GROUPS>(m, 0, whole, a, lda, b, c, ldc, more);
  if (whole < groups) part<D, 1>(m, whole, groups, a, lda, b, c, ldc, more);
}

}  // namespace ISA
