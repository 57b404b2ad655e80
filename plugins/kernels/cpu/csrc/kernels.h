// What the torch side calls: plain pointers, one table of functions per instruction set. Every type is the model's,
// float32 or bfloat16, unless it is named.
#pragma once
#include <cstdint>
#include <vector>

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
  Rows q;     // [tokens][heads]
  void* out;  // [tokens][heads * size]
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

// Of what a weight is packed. plain: the model's type. bytes: with a scale for each of n, float, padded to a multiple of 16
// (int8.h). blocks, nibbles: 8 or 4 bits in blocks of 32, with numbers of float16 (blocks.h).
enum class Packing { plain, bytes, blocks, nibbles };

// [n][columns of x]. scales: as the packing says. bias: [n] of the model's type, or null.
struct Weight {
  const uint32_t* words;
  const void* scales;
  int64_t n;
  const void* bias;
  Packing packing;
};

// y [rows of x][n], float32 if it is `wide`.
struct Product {
  Matrix x;
  Weight weight;
  void* y;
  bool wide;
};

// One pre-norm layer: x += attention(norm(x)), x += mlp(norm(x)). q_norm, k_norm: null if there are none.
struct Layer {
  const void *input_norm, *q_norm, *k_norm, *post_norm;
  Weight qkv, o, gate_up, down;
  Cache cache;
  const Task* tasks;
  int64_t count, window;
  int32_t* remaining;
};

// All layers over one batch. sums: [tokens][hidden], what came in, and goes out as the sum of all but the last of the
// MLPs, whose result goes to `y`.
struct Decoder {
  const Layer* layers;
  int64_t count, tokens, hidden, heads, inner;
  void *sums, *y;
  const int64_t *positions, *slots;
  const float *cos, *sin;
  int64_t half;
  float eps, scale;
  const int32_t *table, *cu_lens, *seq_lens;
  int64_t table_pitch;
  float* partial;
};

struct Kernels {
  const char* name;
  void (*pack)(int threads, const Matrix& weight, uint32_t* words);
  void (*pack_int8)(int threads, const Matrix& weight, uint32_t* words, float* scales);
  // rows: pitch in bytes, columns in values; they become columns `first` and on.
  void (*pack_blocks)(int threads, Format format, const Matrix& rows, int64_t first, bool nibbles, uint32_t* words,
                      uint16_t* numbers);
  void (*linear)(int threads, const Product& product);
  // y [count][k] = the columns that `tokens` name of a weight in blocks, or of a plain one where k is a multiple of `per`.
  void (*embed)(int threads, const int64_t* tokens, int64_t count, int64_t k, const Weight& weight, void* y);
  // out = rmsnorm(x + residual) * weight; the sum goes to residual, which may be null. out: contiguous.
  void (*rmsnorm)(int threads, const Rows& x, void* residual, const void* weight, float eps, void* out);
  // x [rows][2 * columns] -> y [rows][columns].
  void (*silu_mul)(int threads, const Matrix& x, void* y);
  // Rotates q and writes rotated k, and v, to the cache. cos, sin: [positions][half].
  void (*rope_store)(int threads, const Rows& q, const Rows& k, const Rows& v, const int64_t* positions,
                     const float* cos, const float* sin, int64_t half, const int64_t* slots, const Cache& cache);
  void (*attention)(int threads, const Attention& work);
  void (*decoder)(int threads, const Decoder& work);
  // The first of each row's largest values, and that value: NaN if one is.
  void (*argmax)(int threads, const Matrix& x, int64_t* places, float* values);
  // Of each row, which columns are not less than `least`, nor than the counts-th largest (0: any), ascending.
  void (*largest)(int threads, const Matrix& x, const int64_t* counts, const float* least, std::vector<int32_t>* found);
};
