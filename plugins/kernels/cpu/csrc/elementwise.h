// Operations that touch every value once: residual and norm, activation, rotation.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "bytes.h"
#include "dot.h"
#include "kernels.h"
#include "parallel.h"

namespace ISA {

template <class T>
void rmsnorm(Team& team, const Rows& x, void* residual, const void* weight, float eps, void* out) {
  const int64_t size = x.size, whole = size / W * W;
  const T* w = static_cast<const T*>(weight);
  split(team, x.outer * x.inner, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* from = static_cast<T*>(x.data) + i / x.inner * x.outer_pitch + i % x.inner * x.inner_pitch;
      T* to = static_cast<T*>(out) + i * size;
      vf squares = {};
      if (residual) {
        T* r = static_cast<T*>(residual) + i * size;
        for (int64_t j = 0; j < whole; j += W) {
          put(r + j, get(from + j) + get(r + j));
          vf s = get(r + j);  // as rounded
          squares += s * s;
        }
        if (whole < size) {
          const int n = size - whole;
          put(r + whole, get(from + whole, n) + get(r + whole, n), n);
          vf s = get(r + whole, n);
          squares += s * s;
        }
        from = r;
      } else {
        for (int64_t j = 0; j < whole; j += W) squares += get(from + j) * get(from + j);
        if (whole < size) squares += get(from + whole, size - whole) * get(from + whole, size - whole);
      }
      const float scale = 1 / std::sqrt(sum(squares) / size + eps);
      for (int64_t j = 0; j < whole; j += W) put(to + j, get(from + j) * scale * get(w + j));
      if (whole < size) {
        const int n = size - whole;
        put(to + whole, get(from + whole, n) * scale * get(w + whole, n), n);
      }
    }
  });
}

template <class T>
void silu_mul(Team& team, const Matrix& x, void* y) {
  const int64_t n = x.columns, whole = n / W * W;
  auto act = [](vf gate, vf up) { return gate / (1.0f + exp(-gate)) * up; };
  split(team, x.rows, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* gate = static_cast<const T*>(x.data) + i * x.pitch;
      const T* up = gate + n;
      T* to = static_cast<T*>(y) + i * n;
      for (int64_t j = 0; j < whole; j += W) put(to + j, act(get(gate + j), get(up + j)));
      if (whole < n) put(to + whole, act(get(gate + whole, n - whole), get(up + whole, n - whole)), n - whole);
    }
  });
}

// The first of each row's largest values; one that is no number is larger than all others.
inline void argmax(Team& team, const Matrix& x, int64_t* places, float* values) {
  split(team, x.rows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
      const float* row = static_cast<const float*>(x.data) + r * x.pitch;
      const int64_t n = x.columns, whole = n / W * W;
      vf top = all(-INFINITY), odd = {};
      vi at = {}, lane = lanes();
      auto look = [&](vf v, int64_t i) {
        at = v > top ? lane + int32_t(i) : at;
        top = v > top ? v : top;
        odd = v == v ? odd : v;
      };
      for (int64_t i = 0; i < whole; i += W) look(get(row + i), i);
      float best = largest(top);
      int64_t place = n;
      for (int i = 0; i < W; i++)
        if (top[i] == best && at[i] < place) place = at[i];
      for (int64_t i = whole; i < n; i++) {
        if (row[i] > best) best = row[i], place = i;
        if (row[i] != row[i]) odd[0] = row[i];
      }
      for (int i = 0; i < W; i++)
        if (odd[i] != odd[i]) best = odd[i];
      if (best != best)
        for (place = 0; row[place] == row[place];) place++;
      places[r] = place;
      values[r] = best;
    }
  });
}

// Of each row, which columns are not less than `least`, nor than the counts-th largest. What may be among them is gathered
// under a bound that rises whenever there is twice as much of it as is needed.
inline void find_largest(Team& team, const Matrix& x, const int64_t* counts, const float* least,
                         std::vector<int32_t>* found) {
  constexpr int64_t STRIDE = 8 * W, ROOM = 1024;
  split(team, x.rows, [&](int64_t begin, int64_t end) {
    std::vector<float> values;
    for (int64_t r = begin; r < end; r++) {
      const float* row = static_cast<const float*>(x.data) + r * x.pitch;
      const int64_t n = x.columns, most = counts[r] > 0 ? std::min(counts[r], n) : n;
      std::vector<int32_t>& some = found[r];
      int64_t size = 0, room = std::min(2 * most + 64, ROOM);
      float bound = least[r];
      some.resize(room + STRIDE);
      auto take = [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {  // no branch: nobody could foresee it
          some[size] = int32_t(i);
          size += row[i] >= bound;
        }
      };
      auto cut = [&] {
        if (size <= most) return;
        values.resize(size);
        for (int64_t i = 0; i < size; i++) values[i] = row[some[i]];
        std::nth_element(values.begin(), values.begin() + (most - 1), values.end(), std::greater<float>());
        bound = values[most - 1];
        const int64_t before = size;
        size = 0;
        for (int64_t i = 0; i < before; i++) {
          const int32_t at = some[i];
          some[size] = at;
          size += row[at] >= bound;
        }
      };
      int64_t i = 0;
      for (; i + STRIDE <= n; i += STRIDE) {
        vf top = get(row + i);
        for (int64_t j = W; j < STRIDE; j += W) top = max(top, get(row + i + j));
        if (largest(top) < bound) continue;
        take(i, i + STRIDE);
        if (size < room) continue;
        cut();
        room = std::max(room, 2 * size + 64);  // of equals there may be more than `most`
        some.resize(room + STRIDE);
      }
      take(i, n);
      cut();
      some.resize(size);
    }
  });
}

// (a, b) -> (a cos - b sin, b cos + a sin) for a = x[0, half), b = x[half, 2 half), in place.
template <class T>
inline void rotate(T* x, const float* cos, const float* sin, int64_t half) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    vf a = get(x + i), b = get(x + half + i), c = get(cos + i), s = get(sin + i);
    put(x + i, a * c - b * s);
    put(x + half + i, b * c + a * s);
  }
  if (i < half) {
    const int n = half - i;
    vf a = get(x + i, n), b = get(x + half + i, n), c = get(cos + i, n), s = get(sin + i, n);
    put(x + i, a * c - b * s, n);
    put(x + half + i, b * c + a * s, n);
  }
}

template <class D>
void rope_store(Team& team, const Rows& q, const Rows& k, const Rows& v, const int64_t* positions, const float* cos,
                const float* sin, int64_t half, const int64_t* slots, const Cache& cache) {
  using T = typename D::T;
  const int64_t tokens = q.outer, size = cache.size, pages = cache.block_size / LANES, page = LANES * cache.padded;
  auto at = [](const Rows& x, int64_t token, int64_t head) {
    return static_cast<T*>(x.data) + token * x.outer_pitch + head * x.inner_pitch;
  };
  // A page is one thread's: a part begins where its tokens' page does.
  auto boundary = [&](int64_t t) {
    while (t > 0 && t < tokens && slots[t] / LANES == slots[t - 1] / LANES) t++;
    return t;
  };
  split(team, tokens, [&](int64_t begin, int64_t end) {
    end = boundary(end);
    for (int64_t t = boundary(begin); t < end; t++) {
      const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
      const int64_t block = slots[t] / cache.block_size, in = slots[t] % cache.block_size, lane = in % LANES;
      for (int64_t h = 0; h < q.inner; h++) rotate(at(q, t, h), c, s, half);
      for (int64_t h = 0; h < k.inner; h++) {
        const int64_t number = (block * cache.kv_heads + h) * pages + in / LANES;
        T *key = at(k, t, h), *value = at(v, t, h);
        rotate(key, c, s, half);
        if (cache.bytes) {
          const int64_t offset = number * page_bytes(cache.padded);
          store_bytes<D::per>(key, value, static_cast<int8_t*>(cache.keys) + offset,
                              static_cast<int8_t*>(cache.values) + offset, lane, size, cache.padded,
                              scratch<int8_t>(size));
          continue;
        }
        T* keys = static_cast<T*>(cache.keys) + number * page;
        T* values = static_cast<T*>(cache.values) + number * page;
        // Attention multiplies whole pages of values, by 0 behind the last token: what an earlier owner left there
        // must not be a NaN.
        if (lane == 0) {
          memset(values, 0, page * sizeof(T));
          if (size % D::per) memset(keys, 0, page * sizeof(T));
        }
        for (int64_t i = 0; i < size; i++) keys[(i / D::per * LANES + lane) * D::per + i % D::per] = key[i];
        T* to = values + lane / D::per * cache.padded * D::per + lane % D::per;
        for (int64_t i = 0; i < size; i++) to[i * D::per] = value[i];
      }
    }
  });
}

}  // namespace ISA
