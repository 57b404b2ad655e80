// A vector of W floats and what the kernels do with it, over the vector types that GCC and Clang share. The same source
// becomes AVX-512, AVX2 or baseline code by the flags of the file that includes it; intrinsics are only where no
// expression says the same. For tests, -DWIDTH=16 and -DPAIRS=1 make the paths of AVX-512 of what any CPU has.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define UNROLL _Pragma("GCC unroll 16")

namespace ISA {

#if defined(WIDTH)
constexpr int W = WIDTH;
#elif defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));

struct bf16 {
  uint16_t bits;
};

template <class V>
inline V load(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

template <class V>
inline void store(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

inline vf all(float x) { return x - vf{}; }

inline vi lanes() {
  vi v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}

inline float widen(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

inline float widen(float x) { return x; }

inline void narrow(float* p, float x) { *p = x; }

inline void narrow(bf16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline vf get(const float* p) { return load<vf>(p); }

inline vf get(const bf16* p) { return (vf)(__builtin_convertvector(load<vh>(p), vu) << 16); }

inline void put(float* p, vf x) { store(p, x); }

inline void put(bf16* p, vf x) {
#if defined(__AVX512BF16__)
  store(p, _mm512_cvtneps_pbh((__m512)x));
#else
  vu u = (vu)x;
  u = (u + 0x7fff + (u >> 16 & 1)) >> 16;  // to nearest, ties to even
  u = x != x ? vu{} + 0x7fc0 : u;          // a NaN with a full mantissa must not overflow into a number
  store(p, __builtin_convertvector(u, vh));
#endif
}

// The first n < W of them.
template <class T>
inline vf get(const T* p, int n) {
  T some[W] = {};
  memcpy(some, p, n * sizeof(T));
  return get(some);
}

template <class T>
inline void put(T* p, vf x, int n) {
  T some[W];
  put(some, x);
#ifdef PLANTED_OVERFLOW  // for the test that sanitizers would see one
  n = W;
#endif
  memcpy(p, some, n * sizeof(T));
}

#if defined(__AVX512BF16__) || defined(PAIRS)
// sums + products of the two bfloat16 in each word with the two in `pair`.
inline vf dot_pairs(vf sums, vu words, uint32_t pair) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)words, (__m512bh)_mm512_set1_epi32(int(pair)));
#else
  vu both = vu{} + pair;
  sums += (vf)(words & 0xffff0000u) * (vf)(both & 0xffff0000u);
  return sums + (vf)(words << 16) * (vf)(both << 16);
#endif
}
#endif

inline vf max(vf a, vf b) { return a > b ? a : b; }

inline float sum(vf x) {
  float s = 0;
  for (int i = 0; i < W; i++) s += x[i];
  return s;
}

inline float largest(vf x) {
  float m = x[0];
  for (int i = 1; i < W; i++) m = x[i] > m ? x[i] : m;
  return m;
}

// e^x to about 1 unit in the last place; what under- or overflows ends near the smallest or largest float.
inline vf exp(vf x) {
  x = x < -87.0f ? all(-87.0f) : x;
  x = x > 88.0f ? all(88.0f) : x;
  const float magic = 12582912.0f;  // adding 1.5 * 2^23 leaves the nearest integer in the low bits
  vf t = x * 1.44269504f + magic;
  vf n = t - magic;
  vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
  vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vf)(((vu)t << 23) + (127u << 23));
}

}  // namespace ISA
