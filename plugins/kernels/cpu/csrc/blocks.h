// Products of weights that stay as a GGUF file has them: in blocks of 32 neighbours along k, each with a scale of its own.
//
// Two forms, each of words as in dot.h. Bytes, w = scale * q: eight words to a column's block, as in int8.h. Nibbles,
// w = scale * q + low: four words, whose low halves of bytes are a block's first 16 values and the high ones the others.
// The numbers of a block, one or two rows of 16 columns, are float16: exact but for Q4_K, whose products of two are
// rounded to 11 bits. x is rounded to bytes by blocks of the same 32, so sums over a block are exact integers.
#pragma once
#include "formats.h"
#include "int8.h"
#include "linear.h"

namespace ISA {

struct Bytes : DotInt8 {
  static constexpr int WORDS = 8, NUMBERS = 1;
  static vi whole(vi sums) { return sums; }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(WIDTH)
// Pairs of products with halves of bytes, and eight sums of pairs, fit 16 bits.
struct Nibbles {
  using A = int8_t;
  static constexpr int WORDS = 4, NUMBERS = 2, BIAS = 0;
  static constexpr int place(int i) { return i; }
#if defined(__AVX512BW__)
  static vu pairs(vu w, int32_t quad) { return (vu)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(quad)); }
  static vi whole(vi sums) { return (vi)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)); }
#else
  static vu pairs(vu w, int32_t quad) { return (vu)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(quad)); }
  static vi whole(vi sums) { return (vi)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)); }
#endif
  template <int NV>
  [[gnu::always_inline]] static void step(vi (&sums)[NV], vi (&)[NV], const vu (&w)[NV], const A* a) {
    typedef int16_t vs __attribute__((vector_size(4 * W)));
    int32_t quad;
    memcpy(&quad, a, 4);
    UNROLL for (int v = 0; v < NV; v++) sums[v] = (vi)((vs)sums[v] + (vs)pairs(w[v], quad));
  }
};
#else
struct Nibbles : DotInt8 {
  static constexpr int WORDS = 4, NUMBERS = 2, BIAS = 0;
  static vi whole(vi sums) { return sums; }
};
#endif

inline vf halves(const uint16_t* p) {
#if defined(__AVX512F__) && !defined(WIDTH)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__) && !defined(WIDTH)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vu h = __builtin_convertvector(load<vh>(p), vu), magnitude = (h & 0x7fff) << 13;
  const vu u = (vu)((vf)magnitude * 0x1p112f);
  return (vf)((magnitude >= 0x0f800000 ? 0x7f800000 | magnitude : u) | (h & 0x8000) << 16);
#endif
}

// Rows of a weight become columns `first` and on of words [n / 16][k / 32][F::WORDS][16] and numbers
// [n / 16][k / 32][F::NUMBERS][16].
template <class F>
void pack_blocks(Team& team, Format format, const Matrix& rows, int64_t first, uint32_t* words, uint16_t* numbers) {
  const int64_t blocks = rows.columns / BLOCK, last = first + rows.rows;
  parallel(team, (last + LANES - 1) / LANES - first / LANES, [&](int64_t task) {
    const int64_t g = first / LANES + task;
    for (int64_t n = std::max(first, g * LANES); n < std::min(last, (g + 1) * LANES); n++) {
      const uint8_t* row = static_cast<const uint8_t*>(rows.data) + (n - first) * rows.pitch;
      for (int64_t b = 0; b < blocks; b++) {
        uint32_t* to = words + (g * blocks + b) * F::WORDS * LANES + n % LANES;
        uint16_t* number = numbers + (g * blocks + b) * F::NUMBERS * LANES + n % LANES;
        Block block;
        read_block(format, row, b, block);
        if (F::WORDS == 8 && block.low != 0) {  // beside a wider one
          float x[BLOCK];
          for (int i = 0; i < BLOCK; i++) x[i] = block.scale * block.q[i] + block.low;
          read_block(Format::F32, reinterpret_cast<const uint8_t*>(x), 0, block);
        }
        number[0] = float_to_half(block.scale);
        if (F::NUMBERS == 2) number[LANES] = float_to_half(block.low);
        for (int w = 0; w < F::WORDS; w++) {
          uint32_t word = 0;
          for (int i = 0; i < 4; i++) {
            const int8_t* q = block.q + 4 * w + i;
            const uint32_t byte = F::WORDS == 8 ? uint8_t(q[0] + F::BIAS) : uint8_t(q[0] | q[16] << 4);
            word |= byte << 8 * F::place(i);
          }
          to[w * LANES] = word;
        }
      }
    }
  });
}

inline void pack_any(Team& team, Format format, const Matrix& rows, int64_t first, bool nibbles, uint32_t* words,
                        uint16_t* numbers) {
  (nibbles ? pack_blocks<Nibbles> : pack_blocks<Bytes>)(team, format, rows, first, words, numbers);
}

// Rows of the weight again: y [count][k].
template <class F, class T>
void embed_blocks(Team& team, const int64_t* tokens, int64_t count, int64_t k, const uint32_t* words,
                  const uint16_t* numbers, T* y) {
  const int64_t blocks = k / BLOCK;
  split(team, count, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t at = tokens[i] / LANES * blocks + b, lane = tokens[i] % LANES;
        const uint16_t* number = numbers + at * F::NUMBERS * LANES + lane;
        const float scale = half_to_float(number[0]), low = F::NUMBERS == 2 ? half_to_float(number[LANES]) : 0;
        T* to = y + i * k + b * BLOCK;
        for (int w = 0; w < F::WORDS; w++) {
          const uint32_t word = words[(at * F::WORDS + w) * LANES + lane];
          for (int j = 0; j < 4; j++) {
            const uint8_t byte = word >> 8 * F::place(j);
            if (F::WORDS == 4) {
              narrow(to + 4 * w + j, scale * (byte & 15) + low);
              narrow(to + 16 + 4 * w + j, scale * (byte >> 4) + low);
            } else {
              narrow(to + 4 * w + j, scale * int8_t(byte - F::BIAS));
            }
          }
        }
      }
  });
}

template <class D, class T = typename D::T>
void embed_any(Team& team, const int64_t* tokens, int64_t count, int64_t k, const Weight& weight, void* y) {
  if (weight.packing == Packing::plain) return embed_plain<D>(team, tokens, count, k, weight, static_cast<T*>(y));
  const bool nibbles = weight.packing == Packing::nibbles;
  (nibbles ? embed_blocks<Nibbles, T> : embed_blocks<Bytes, T>)(
      team, tokens, count, k, weight.words, static_cast<const uint16_t*>(weight.scales), static_cast<T*>(y));
}

// Multiplying

// A tile of x: for each block its rows, each: what integer sums begin with, the bytes, their scale, and the sum of what
// they mean.
template <class F>
constexpr int64_t WORD = 4 / sizeof(typename F::A);  // values of A
template <class F>
constexpr int64_t ROW = BLOCK + 3 * WORD<F>;
constexpr int TILE = W == 16 ? 12 : W == 8 ? 4 : 2;  // rows whose sums the registers hold

template <class F, class T>
inline void row_blocks(const T* x, int64_t k, int64_t rows, typename F::A* a) {
  for (int64_t i = 0; i < k; i += BLOCK, a += rows * ROW<F>) {
    int32_t total;
    const float scale = quantize(x + i, BLOCK, a + WORD<F>, total), sum = scale * total;
    const int32_t offset = -F::BIAS * total;
    memcpy(a, &offset, 4);
    memcpy(a + WORD<F> + BLOCK, &scale, 4);
    memcpy(a + 2 * WORD<F> + BLOCK, &sum, 4);
  }
}

// c [M][16] = a tile of M rows of x times one group of columns.
template <class F, int M>
inline void dot_blocks(const typename F::A* a, const uint32_t* w, const uint16_t* numbers, int64_t blocks, float* c) {
  constexpr int AHEAD = 384;  // as in linear.h
  vf totals[M][VG] = {};
  for (int64_t b = 0; b < blocks; b++, a += M * ROW<F>, w += F::WORDS * LANES, numbers += F::NUMBERS * LANES) {
    vi sums[M][VG];
    UNROLL for (int m = 0; m < M; m++) {
      int32_t offset;
      memcpy(&offset, a + m * ROW<F>, 4);
      UNROLL for (int v = 0; v < VG; v++) sums[m][v] = vi{} + offset;
    }
    UNROLL for (int i = 0; i < F::WORDS; i++) {
      vu words[VG], high[VG];
      UNROLL for (int v = 0; v < VG; v++) words[v] = load<vu>(w + i * LANES + v * W);
      __builtin_prefetch(w + i * LANES + AHEAD);
      if constexpr (F::WORDS == 4) {
        UNROLL for (int v = 0; v < VG; v++) high[v] = words[v] >> 4 & 0x0f0f0f0f, words[v] &= 0x0f0f0f0f;
        UNROLL for (int m = 0; m < M; m++)
          F::template step<VG>(sums[m], sums[m], high, a + m * ROW<F> + WORD<F> + 16 + 4 * i);
      }
      UNROLL for (int m = 0; m < M; m++)
        F::template step<VG>(sums[m], sums[m], words, a + m * ROW<F> + WORD<F> + 4 * i);
    }
    vf scale[VG], low[VG];
    UNROLL for (int v = 0; v < VG; v++) {
      scale[v] = halves(numbers + v * W);
      if constexpr (F::NUMBERS == 2) low[v] = halves(numbers + LANES + v * W);
    }
    UNROLL for (int m = 0; m < M; m++) {
      float own[2];  // scale and sum of this row's block
      memcpy(own, a + m * ROW<F> + WORD<F> + BLOCK, 8);
      UNROLL for (int v = 0; v < VG; v++) {
        totals[m][v] += __builtin_convertvector(F::whole(sums[m][v]), vf) * (scale[v] * own[0]);
        if constexpr (F::NUMBERS == 2) totals[m][v] += low[v] * own[1];
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++) UNROLL for (int v = 0; v < VG; v++) store(c + m * LANES + v * W, totals[m][v]);
}

template <class F, int M = TILE>
inline void tile(int64_t m, const typename F::A* a, const uint32_t* w, const uint16_t* numbers, int64_t blocks, float* c) {
  if constexpr (M > 0) {
    if (m == M)
      dot_blocks<F, M>(a, w, numbers, blocks, c);
    else
      tile<F, M - 1>(m, a, w, numbers, blocks, c);
  }
}

// Bytes of x as `linear_blocks` needs it.
template <class F>
int64_t bytes_of_blocks(int64_t rows, int64_t k) {
  return rows * (k / BLOCK) * ROW<F> * sizeof(typename F::A);
}

template <class F, class T>
void linear_blocks(Team& team, const Product& p, typename F::A* a) {
  constexpr int64_t TILES = 96 / TILE, COLUMNS = 4;
  const Matrix& x = p.x;
  const uint16_t* numbers = static_cast<const uint16_t*>(p.weight.scales);
  const T* bias = static_cast<const T*>(p.weight.bias);
  const int64_t n = p.weight.n, m = x.rows, k = x.columns, blocks = k / BLOCK, groups = round_up(n, LANES) / LANES;
  const int64_t tiles = (m + TILE - 1) / TILE, size = blocks * ROW<F>;
  auto begin = [&](int64_t t) { return m * t / tiles; };
  split(team, tiles, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++) {
      const int64_t first = begin(t), rows = begin(t + 1) - first;
      for (int64_t r = 0; r < rows; r++)
        row_blocks<F>(static_cast<const T*>(x.data) + (first + r) * x.pitch, k, rows, a + first * size + r * ROW<F>);
    }
  });
  const int64_t chunks = (tiles + TILES - 1) / TILES, across = round_up(groups, COLUMNS);
  shares(team, chunks * across, COLUMNS, [&](int64_t from, int64_t to) {
    const int64_t chunk = from / across, g0 = from % across, last = std::min(groups, g0 + to - from);
    float c[TILE * LANES];
    for (int64_t t = tiles * chunk / chunks; t < tiles * (chunk + 1) / chunks; t++) {
      const int64_t first = begin(t), rows = begin(t + 1) - first;
      for (int64_t g = g0; g < last; g++) {
        tile<F>(rows, a + first * size, p.weight.words + g * blocks * F::WORDS * LANES,
                numbers + g * blocks * F::NUMBERS * LANES, blocks, c);
        for (int64_t r = 0; r < rows; r++)
          finish(c + r * LANES, nullptr, bias ? bias + g * LANES : nullptr, place<T>(p, first + r, g * LANES), p.wide,
                 std::min<int64_t>(LANES, n - g * LANES));
      }
    }
  });
}

}  // namespace ISA
