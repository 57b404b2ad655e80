// All layers of a decoder, one after the other, by one team: its members meet after each operation instead of being
// called together for it, and results stay where the next operation finds them.
#pragma once
#include "attention.h"
#include "blocks.h"
#include "elementwise.h"
#include "int8.h"
#include "linear.h"

namespace ISA {

constexpr int64_t MLP_ROWS = 384;  // taken at a time: what lies between two products stays in the last cache

// Bytes of memory that members share in a product.
inline int64_t shared_bytes(const Weight& weight, int64_t rows, int64_t k) {
  if (weight.packing == Packing::bytes) return rows * pitch_int8(k) * sizeof(DotInt8::A);
  if (weight.packing == Packing::blocks) return bytes_of_blocks<Bytes>(rows, k);
  if (weight.packing == Packing::nibbles) return bytes_of_blocks<Nibbles>(rows, k);
  return 0;
}

template <class D>
void any_linear(Team& team, const Product& p, void* a) {
  using T = typename D::T;
  if (p.weight.packing == Packing::bytes)
    linear_int8<T>(team, p, static_cast<DotInt8::A*>(a));
  else if (p.weight.packing == Packing::blocks)
    linear_blocks<Bytes, T>(team, p, static_cast<Bytes::A*>(a));
  else if (p.weight.packing == Packing::nibbles)
    linear_blocks<Nibbles, T>(team, p, static_cast<Nibbles::A*>(a));
  else
    linear<D>(team, p);
}

template <class D>
void any_linear_alone(int threads, const Product& p) {
  void* a = scratch<char, 2>(shared_bytes(p.weight, p.x.rows, p.x.columns));
  together(threads, [&](Team& team) { any_linear<D>(team, p, a); });
}

template <class D>
void layer(Team& team, const Decoder& work, const Layer& layer, void* y, bool first, typename D::T* normed,
           typename D::T* qkv, typename D::T* attended, typename D::T* wide, typename D::T* inner, void* a) {
  using T = typename D::T;
  const int64_t tokens = work.tokens, hidden = work.hidden, size = layer.cache.size, heads = work.heads;
  const int64_t kv_heads = layer.cache.kv_heads, across = (heads + 2 * kv_heads) * size, n = work.inner;
  auto product = [&](const T* x, int64_t rows, int64_t columns, const Weight& weight, T* to) {
    any_linear<D>(team, {{x, rows, columns, columns}, weight, to, false}, a);
  };
  rmsnorm<T>(team, {first ? work.sums : y, tokens, 1, hidden, hidden, 0}, first ? nullptr : work.sums,
             layer.input_norm, work.eps, normed);
  product(normed, tokens, hidden, layer.qkv, qkv);
  Rows q{qkv, tokens, heads, size, across, size};
  Rows k{qkv + heads * size, tokens, kv_heads, size, across, size}, v = k;
  v.data = qkv + (heads + kv_heads) * size;
  if (layer.q_norm) {
    rmsnorm<T>(team, q, nullptr, layer.q_norm, work.eps, attended);
    q = {attended, tokens, heads, size, heads * size, size};
  }
  if (layer.k_norm) {
    rmsnorm<T>(team, k, nullptr, layer.k_norm, work.eps, wide);
    k = {wide, tokens, kv_heads, size, kv_heads * size, size};
  }
  rope_store<D>(team, q, k, v, work.positions, work.cos, work.sin, work.half, work.slots, layer.cache);
  T* out = layer.q_norm ? qkv : attended;  // not where q is
  attention<D>(team, {layer.cache, q, out, layer.tasks, layer.count, work.table, work.cu_lens, work.seq_lens,
                      work.table_pitch, layer.window, work.scale, work.partial, layer.remaining});
  product(out, tokens, heads * size, layer.o, static_cast<T*>(y));
  rmsnorm<T>(team, {y, tokens, 1, hidden, hidden, 0}, work.sums, layer.post_norm, work.eps, normed);
  for (int64_t r = 0; r < tokens; r += MLP_ROWS) {
    const int64_t rows = std::min(MLP_ROWS, tokens - r);
    product(normed + r * hidden, rows, hidden, layer.gate_up, wide);
    silu_mul<T>(team, {wide, rows, n, 2 * n}, inner);
    product(inner, rows, n, layer.down, static_cast<T*>(y) + r * hidden);
  }
}

template <class D>
void decoder(int threads, const Decoder& work) {
  using T = typename D::T;
  const Cache& cache = work.layers->cache;
  const int64_t attended = work.heads * cache.size, kv = cache.kv_heads * cache.size;
  const int64_t rows = std::min(work.tokens, MLP_ROWS), wide = std::max(rows * 2 * work.inner, work.tokens * kv);
  T* normed = scratch<T, 3>(work.tokens * (work.hidden + 2 * attended + 2 * kv) + wide + rows * work.inner);
  T* qkv = normed + work.tokens * work.hidden;
  T* out = qkv + work.tokens * (attended + 2 * kv);
  int64_t bytes = 0;
  for (const Layer* one = work.layers; one < work.layers + work.count; one++)
    bytes = std::max({bytes, shared_bytes(one->qkv, work.tokens, work.hidden),
                      shared_bytes(one->o, work.tokens, attended), shared_bytes(one->gate_up, rows, work.hidden),
                      shared_bytes(one->down, rows, work.inner)});
  void* a = scratch<char, 2>(bytes);
  T* up = out + work.tokens * attended;
  together(threads, [&](Team& team) {
    for (int64_t i = 0; i < work.count; i++)
      layer<D>(team, work, work.layers[i], work.y, i == 0, normed, qkv, out, up, up + wide, a);
  });
}

}  // namespace ISA
