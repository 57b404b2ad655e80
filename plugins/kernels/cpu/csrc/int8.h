// Products of bytes, y = x W^T + b with both sides rounded to 8 bits: W once, with a scale for each column of the result;
// x as it comes, with one for each SPAN of neighbours in a row, as a few of its values are often far larger than all
// others. Sums over a span are exact integers.
//
// VNNI multiplies unsigned bytes of W by signed ones of x: 128 is added to W's, and 128 times the sum of a row of x taken
// off again. Others multiply 16-bit numbers, into which two shifts make of a word of W: that holds them in the order
// 0, 2, 1, 3, so that those at even bytes are neighbours.
#pragma once
#include "bytes.h"
#include "dot.h"
#include "kernels.h"
#include "linear.h"
#include "parallel.h"
#if defined(__SSE2__) && !defined(WIDTH)
#include <immintrin.h>
#endif

namespace ISA {

constexpr int SPAN = 64;

// Before a span of A: what its sums begin with. Behind it: its scale.
struct Integers {
  using V = vi;
  static constexpr int per = 4;
  [[gnu::always_inline]] static vi start(const void* a, const float*, bool) {
    int32_t offset;
    memcpy(&offset, static_cast<const char*>(a) - 4, 4);
    return vi{} + offset;
  }
  // Always adds, so that compilers fuse this everywhere or nowhere: results are the same to the bit in any batch.
  [[gnu::always_inline]] static void finish(vi sums, const void* a, float* c, bool) {
    float scale;
    memcpy(&scale, a, 4);
    store(c, load<vf>(c) + __builtin_convertvector(sums, vf) * scale);
  }
};

#if defined(__AVX512VNNI__) || defined(PAIRS)
struct DotInt8 : Integers {
  using A = int8_t;
  static constexpr int BIAS = 128, GROUPS = 4, SUMS = 24;
  static constexpr int place(int i) { return i; }
  static constexpr int rows(int groups) { return groups == 4 ? 6 : 12; }

  template <int NV>
  [[gnu::always_inline]] static void step(vi (&sums)[NV], vi (&)[NV], const vu (&w)[NV], const A* a) {
#if defined(__AVX512VNNI__)
    int32_t quad;
    memcpy(&quad, a, 4);
    UNROLL for (int v = 0; v < NV; v++)
      sums[v] = (vi)_mm512_dpbusd_epi32((__m512i)sums[v], (__m512i)w[v], _mm512_set1_epi32(quad));
#else
    for (int v = 0; v < NV; v++)
      for (int i = 0; i < 4; i++) sums[v] += (vi)(w[v] >> (8 * i) & 255) * a[i];
#endif
  }
};
#else
// sums + products of the two 16-bit numbers in each word with the two in `pair`.
inline vi dot_shorts(vi sums, vu words, int32_t pair) {
#if defined(__AVX512BW__) && !defined(WIDTH)
  return sums + (vi)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi32(pair));
#elif defined(__AVX2__) && !defined(WIDTH)
  return sums + (vi)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi32(pair));
#elif defined(__SSE2__) && !defined(WIDTH)
  return sums + (vi)_mm_madd_epi16((__m128i)words, _mm_set1_epi32(pair));
#else
  return sums + ((vi)(words << 16) >> 16) * int16_t(pair) + ((vi)words >> 16) * (pair >> 16);
#endif
}

struct DotInt8 : Integers {
  using A = int16_t;
  static constexpr int BIAS = 0, GROUPS = W == 16 ? 2 : 1, SUMS = W == 16 ? 20 : 8;
  static constexpr int place(int i) { return i == 1 ? 2 : i == 2 ? 1 : i; }
  static constexpr int rows(int groups) { return W == 16 ? (groups == 1 ? 12 : 10) : W == 8 ? 4 : 2; }

  template <int NV>
  [[gnu::always_inline]] static void step(vi (&even)[NV], vi (&odd)[NV], const vu (&w)[NV], const A* a) {
    typedef int16_t vs __attribute__((vector_size(4 * W)));
    int32_t first, second;
    memcpy(&first, a, 4);
    memcpy(&second, a + 2, 4);
    UNROLL for (int v = 0; v < NV; v++) even[v] = dot_shorts(even[v], (vu)(((vs)w[v] << 8) >> 8), first);
    UNROLL for (int v = 0; v < NV; v++) odd[v] = dot_shorts(odd[v], (vu)((vs)w[v] >> 8), second);
  }
};
#endif

template <class T>
void pack_int8(Team& team, const Matrix& weight, uint32_t* words, float* scales) {
  using D = DotInt8;
  const int64_t n = weight.rows, k = weight.columns, steps = round_up(k, D::per) / D::per;
  const int64_t groups = round_up(n, LANES) / LANES;
  parallel(team, groups, [&](int64_t g) {
    const Tile<D> tile(words, g, groups, steps);
    uint8_t* to = reinterpret_cast<uint8_t*>(const_cast<uint32_t*>(tile.words));
    for (int64_t s = 0; s < steps; s++) memset(to + s * tile.pitch * 4, D::BIAS, LANES * 4);
    int8_t* q = scratch<int8_t>(k);
    for (int64_t lane = 0; lane < LANES; lane++) {
      const int64_t row = g * LANES + lane;
      scales[row] = 0;
      if (row >= n) continue;
      int32_t total;
      scales[row] = quantize(static_cast<const T*>(weight.data) + row * weight.pitch, k, q, total);
      for (int64_t i = 0; i < k; i++)
        to[(i / D::per * tile.pitch + lane) * D::per + D::place(i % D::per)] = uint8_t(q[i] + D::BIAS);
    }
  });
}

// One row of A: spans, each a multiple of `per` values long, between two words of its own.
template <class T>
inline void row_int8(const T* x, int64_t k, DotInt8::A* a) {
  constexpr int64_t WORD = 4 / sizeof *a;
  a += WORD;
  for (int64_t i = 0; i < k; i += SPAN) {
    const int64_t n = std::min<int64_t>(SPAN, k - i), padded = round_up(n, DotInt8::per);
    for (int64_t j = n; j < padded; j++) a[j] = 0;
    int32_t total;
    const float scale = quantize(x + i, n, a, total);
    const int32_t offset = -DotInt8::BIAS * total;
    memcpy(a - WORD, &offset, 4);
    memcpy(a + padded, &scale, 4);
    a += padded + 2 * WORD;
  }
}

// Values from row to row of A.
inline int64_t pitch_int8(int64_t k) {
  constexpr int64_t LINE = 64 / sizeof(DotInt8::A), STRIDE = SPAN + 8 / sizeof(DotInt8::A);
  return round_up((k + SPAN - 1) / SPAN * STRIDE, LINE) + LINE;
}

// Every task needs rows of x whole: they are rounded once, before, to `a`, [rows of x][pitch_int8].
template <class T>
void linear_int8(Team& team, const Product& p, DotInt8::A* a) {
  using D = DotInt8;
  using A = D::A;
  constexpr int64_t STEPS = SPAN / D::per, WORD = 4 / sizeof(A), STRIDE = SPAN + 2 * WORD;
  const Matrix& x = p.x;
  const int64_t n = p.weight.n, m = x.rows, k = x.columns, steps = round_up(k, D::per) / D::per;
  const int64_t groups = round_up(n, LANES) / LANES, lda = pitch_int8(k);
  const T* bias = static_cast<const T*>(p.weight.bias);
  const float* scales = static_cast<const float*>(p.weight.scales);
  split(team, m, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) row_int8(static_cast<const T*>(x.data) + r * x.pitch, k, a + r * lda);
  });
  const int64_t chunk = rows_at_once<D>(m), chunks = (m + chunk - 1) / chunk;
  const int64_t across = round_up(groups, D::GROUPS), ldc = D::GROUPS * LANES;
  float* c = scratch<float>(chunk * ldc);
  shares(team, chunks * across, D::GROUPS, [&](int64_t begin, int64_t end) {
    const int64_t r0 = begin / across * chunk, g = begin % across, n0 = g * LANES;
    const int64_t rows = std::min(chunk, m - r0), some = std::min(end - begin, groups - g);
    if (some <= 0) return;
    const Tile<D> tile(p.weight.words, g, groups, steps);
    memset(c, 0, rows * ldc * sizeof(float));
    for (int64_t s = 0; s < steps; s += STEPS) {
      const Stretch<D> words(rows, tile.words + s * tile.pitch, std::min(STEPS, steps - s), tile.pitch);
      product<D>(rows, some, a + r0 * lda + s / STEPS * STRIDE + WORD, lda, words, c, ldc, true);
    }
    for (int64_t r = 0; r < rows; r++)
      finish(c + r * ldc, scales + n0, bias ? bias + n0 : nullptr, place<T>(p, r0 + r, n0), p.wide,
             std::min(some * LANES, n - n0));
  });
}

}  // namespace ISA
