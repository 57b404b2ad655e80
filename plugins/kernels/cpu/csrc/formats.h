// How a GGUF file holds quantised values, and float16.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace ISA {

constexpr int BLOCK = 32;

inline float half_to_float(uint16_t h) {
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13, sign = uint32_t(h & 0x8000) << 16;
  float f;
  memcpy(&f, &magnitude, 4);
  f *= 0x1p112f;  // another bias of the exponent; right for subnormals, too
  uint32_t u;
  memcpy(&u, &f, 4);
  u = (magnitude >= 0x0f800000 ? 0x7f800000 | magnitude : u) | sign;  // infinite, or no number
  memcpy(&f, &u, 4);
  return f;
}

inline uint16_t float_to_half(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint16_t sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return sign | 0x7e00;
  if (u >= 0x477ff000) return sign | 0x7c00;  // 65520 and above
  if (u < 0x38800000) {                       // subnormal: let an addition round
    float f;
    memcpy(&f, &u, 4);
    f += 0.5f;
    memcpy(&u, &f, 4);
    return sign | uint16_t(u - 0x3f000000);
  }
  return sign | uint16_t((u - 0x38000000 + 0xfff + (u >> 13 & 1)) >> 13);
}

// Block number b of a row in the file's format: w = scale * q + low.
struct Block {
  int8_t q[BLOCK];
  float scale, low;
};

inline void read_block(Format format, const uint8_t* row, int64_t b, Block& to) {
  auto half = [](const uint8_t* p) { return half_to_float(uint16_t(p[0] | p[1] << 8)); };
  auto nibbles = [&](const uint8_t* p) {
    for (int i = 0; i < 16; i++) to.q[i] = p[i] & 15, to.q[16 + i] = p[i] >> 4;
  };
  to.low = 0;
  switch (format) {
    case Format::Q8_0:
      row += b * 34;
      to.scale = half(row);
      memcpy(to.q, row + 2, BLOCK);
      break;
    case Format::Q4_0:
      row += b * 18;
      to.scale = half(row);
      to.low = -8 * to.scale;
      nibbles(row + 2);
      break;
    case Format::Q4_1:
      row += b * 20;
      to.scale = half(row);
      to.low = half(row + 2);
      nibbles(row + 4);
      break;
    case Format::Q4_K: {  // eight blocks, whose 6-bit scales and lows are in 12 bytes
      row += b / 8 * 144;
      const int i = b % 8, j = i % 4;
      const uint8_t *s = row + 4, *from = row + 16 + i / 2 * 32;
      const int scale = i < 4 ? s[j] & 63 : (s[8 + j] & 15) | s[j] >> 6 << 4;
      const int low = i < 4 ? s[4 + j] & 63 : s[8 + j] >> 4 | s[4 + j] >> 6 << 4;
      to.scale = half(row) * scale;
      to.low = -half(row + 2) * low;
      for (int v = 0; v < BLOCK; v++) to.q[v] = i % 2 ? from[v] >> 4 : from[v] & 15;
      break;
    }
    case Format::F32: {  // to the nearest bytes
      float x[BLOCK], most = 0;
      memcpy(x, row + b * sizeof x, sizeof x);
      for (float v : x) most = std::fabs(v) > most || v != v ? std::fabs(v) : most;
      to.scale = half_to_float(float_to_half(most / 127));
      const float factor = to.scale > 0 && to.scale < INFINITY ? 1 / to.scale : 0;
      for (int i = 0; i < BLOCK; i++) {
        const float r = x[i] * factor;
        to.q[i] = factor ? int8_t(std::lrintf(r > 127 ? 127 : r < -127 ? -127 : r)) : 0;
      }
      break;
    }
  }
}

}  // namespace ISA
