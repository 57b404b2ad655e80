// What the torch side calls: plain pointers, one table of functions per instruction set. Every type is the model's,
// float32 or bfloat16, unless it is named.
#pragma once
#include <cstdint>

// rows x columns values, `pitch` from row to row.
struct Matrix {
  const void* data;
  int64_t rows, columns, pitch;
};

// rows [outer][inner] of `size` values each, at data + o * outer_pitch + i * inner_pitch.
struct Rows {
  void* data;
  int64_t outer, inner, size, outer_pitch, inner_pitch;
};

// A layer's pages: [block][kv head][block_size / 16], each page 16 * padded values. Keys: [size / per][16] words,
// values: [16 / per][padded] words. Of bytes: the same order of values, and 16 floats behind them, the tokens' scales.
struct Cache {
  void *keys, *values;
  int64_t kv_heads, block_size, size, padded;
  bool bytes = false;
};

// Part of attention: rows [row, row + rows) of the request's tokens x query heads of one kv head, over tokens
// [begin, end) of its context; begin is a multiple of 16. Alone, it writes the output; one of `parts`, its sums go to
// slot `first` + n of the partial results, and the last one done of `counter` adds them up.
struct Task {
  int32_t request, head, row, rows, begin, end, parts, first, slot, counter;
};
constexpr int TASK = sizeof(Task) / 4;
constexpr int MOST_ROWS = 48;  // of a task

struct Attention {
  Cache cache;
  Rows q;  // [tokens][heads]
  void* out;
  const Task* tasks;
  int64_t count;
  const int32_t *table, *cu_lens, *seq_lens;
  int64_t table_pitch, window;  // window 0: none
  float scale;
  float* partial;      // slots x MOST_ROWS x (padded + 2)
  int32_t* remaining;  // per counter
};

// How rows of a weight that is to be kept in blocks are given: as GGML has them, under its numbers.
enum class Format { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12 };

struct Kernels {
  const char* name;
  void (*pack)(int threads, const Matrix& weight, uint32_t* words);
  void (*linear)(int threads, const Matrix& x, const uint32_t* words, int64_t n, const void* bias, void* y);
  // out = rmsnorm(x + residual) * weight; the sum goes to residual, which may be null. out: contiguous.
  void (*rmsnorm)(int threads, const Rows& x, void* residual, const void* weight, float eps, void* out);
  // x [rows][2 * columns] -> y [rows][columns].
  void (*silu_mul)(int threads, const Matrix& x, void* y);
  // Rotates q and writes rotated k, and v, to the cache. cos, sin: [positions][half].
  void (*rope_store)(int threads, const Rows& q, const Rows& k, const Rows& v, const int64_t* positions,
                     const float* cos, const float* sin, int64_t half, const int64_t* slots, const Cache& cache);
  void (*attention)(int threads, const Attention& work);
  // Weights of bytes, see int8.h. words: [n / 16][columns / 4][16], scales: [n] up to a multiple of 16.
  void (*pack_int8)(int threads, const Matrix& weight, uint32_t* words, float* scales);
  void (*linear_int8)(int threads, const Matrix& x, const uint32_t* words, const float* scales, int64_t n,
                      const void* bias, void* y);
  // Weights in blocks of 32, see blocks.h. rows: pitch in bytes, columns in values; they become columns `first` and on.
  void (*pack_blocks)(int threads, Format format, const Matrix& rows, int64_t first, bool nibbles, uint32_t* words,
                      uint16_t* numbers);
  void (*linear_blocks)(int threads, const Matrix& x, bool nibbles, const uint32_t* words, const uint16_t* numbers,
                        int64_t n, const void* bias, void* y);
  // y [count][k] = the columns that `tokens` name.
  void (*embed_blocks)(int threads, const int64_t* tokens, int64_t count, int64_t k, bool nibbles,
                       const uint32_t* words, const uint16_t* numbers, void* y);
};
