// Rounding to 8 bits, and pages of a cache that hold bytes.
#pragma once
#include <cmath>

#include "vec.h"
#if defined(__AVX2__) && !defined(WIDTH)
#include <immintrin.h>
#endif

namespace ISA {

// q = x / scale, to the nearest integer in [-127, 127]; returns the scale, a NaN if a value is none or infinite.
template <class T, class Q>
inline float quantize(const T* x, int64_t n, Q* q, int32_t& total) {
  typedef Q vq __attribute__((vector_size(sizeof(Q) * W)));
  const int64_t whole = n / W * W;
  const vi sign = vi{} + 0x7fffffff;
  vi top = {};  // magnitudes of floats are in the order of their bits; what is no number comes last
  auto look = [&](vf v) {
    vi bits = (vi)v & sign;
    top = bits > top ? bits : top;
  };
  for (int64_t i = 0; i < whole; i += W) look(get(x + i));
  if (whole < n) look(get(x + whole, n - whole));
  int32_t most = 0x0da24260;  // 1e-30: what is smaller counts as 0
  for (int i = 0; i < W; i++) most = top[i] > most ? top[i] : most;
  if (most >= 0x7f800000) most = 0;
  float largest;
  memcpy(&largest, &most, 4);
  const float factor = most ? 127 / largest : 0, magic = 12582912.0f;  // see exp
  vi sums = {};
  auto round = [&](vf v) {
    vi r = (vi)((v * factor) + magic) - 0x4b400000;
    return most ? r : vi{};
  };
  for (int64_t i = 0; i < whole; i += W) {
    vi r = round(get(x + i));
    sums += r;
    store(q + i, __builtin_convertvector(r, vq));
  }
  if (whole < n) {
    vi r = round(get(x + whole, n - whole));
    sums += r;
    vq some = __builtin_convertvector(r, vq);
    memcpy(q + whole, &some, (n - whole) * sizeof(Q));
  }
  total = 0;
  for (int i = 0; i < W; i++) total += sums[i];
  return most ? largest / 127 : NAN;
}

// A page of bytes: 16 * padded of them in the order of any page (kernels.h), and 16 floats, the scales of its tokens.
inline int64_t page_bytes(int64_t padded) { return 16 * padded + 64; }

// Token number `lane` of a page of keys and of one of values. A page that is begun holds zeros behind it.
template <int PER, class T>
inline void store_bytes(const T* key, const T* value, int8_t* keys, int8_t* values, int64_t lane, int64_t size,
                        int64_t padded, int8_t* q) {
  int32_t total;
  if (lane == 0) memset(values, 0, page_bytes(padded));
  float scale = quantize(key, size, q, total);
  memcpy(keys + 16 * padded + lane * 4, &scale, 4);
  for (int64_t i = 0; i < size; i++) keys[(i / PER * 16 + lane) * PER + i % PER] = q[i];
  scale = quantize(value, size, q, total);
  memcpy(values + 16 * padded + lane * 4, &scale, 4);
  int8_t* to = values + lane / PER * padded * PER + lane % PER;
  for (int64_t i = 0; i < size; i++) to[i * PER] = q[i];
}

inline vi get_bytes(const int8_t* p) {
#if defined(__AVX512F__) && !defined(WIDTH)
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__) && !defined(WIDTH)  // compilers take eight bytes apart one by one
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  typedef int8_t vb __attribute__((vector_size(W)));
  return __builtin_convertvector(load<vb>(p), vi);
#endif
}

inline void put_integers(float* p, vf x) { store(p, x); }

inline void put_integers(bf16* p, vf x) { store(p, __builtin_convertvector((vu)x >> 16, vh)); }  // exact

// The bytes of a page as numbers, and the scales; `next` is fetched meanwhile.
template <class T>
inline void load_bytes(const int8_t* page, const char* next, int64_t padded, T* to, float* scales) {
  for (int64_t line = 0; line < 16 * padded; line += 64) {
    __builtin_prefetch(next + line);
    UNROLL for (int i = 0; i < 64; i += W)
      put_integers(to + line + i, __builtin_convertvector(get_bytes(page + line + i), vf));
  }
  memcpy(scales, page + 16 * padded, 64);
}

}  // namespace ISA
