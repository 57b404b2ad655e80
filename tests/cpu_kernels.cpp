// The kernels of --kernel cpu without torch: every operation of every instruction set linked in, against plain loops in
// double precision, on buffers that end where they must. tests/test_cpu_build.py runs it under sanitizers.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "plan.h"

#define X(isa)                            \
  namespace isa {                         \
  extern const Kernels* const kernels[2]; \
  }
ISAS
#undef X

static uint64_t state = 1;

static double uniform() {  // in [-1, 1)
  state = state * 6364136223846793005u + 1442695040888963407u;
  return double(state >> 11) / double(1ull << 52) - 1;
}

static int below(int n) { return int((uniform() + 1) / 2 * n); }

struct Half {
  uint16_t bits = 0;
  Half() = default;
  Half(double x) {
    float f = float(x);
    uint32_t u;
    memcpy(&u, &f, 4);
    bits = uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator double() const {
    uint32_t u = uint32_t(bits) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
  }
};

// Exactly `count` values on the heap, so that reading or writing beyond them is seen; random, or `fill`.
template <class T>
struct Buffer {
  std::unique_ptr<T[]> data;
  size_t count;
  explicit Buffer(size_t count) : data(new T[count]), count(count) {
    for (size_t i = 0; i < count; i++) data[i] = T(uniform());
  }
  Buffer(size_t count, double fill) : data(new T[count]), count(count) {
    for (size_t i = 0; i < count; i++) data[i] = T(fill);
  }
  T& operator[](size_t i) { return data[i]; }
};

static int checks = 0;

template <class T>
static void near(double got, double wanted, double scale, const std::string& what, double more = 0) {
  const double tolerance = (more + (sizeof(T) == 4 ? 1e-5 : 8e-3)) * (scale + std::fabs(wanted));
  checks++;
  if (!(std::fabs(got - wanted) <= tolerance)) {
    printf("%s: %g instead of %g\n", what.c_str(), got, wanted);
    exit(1);
  }
}

template <class T>
static void linear(const Kernels& table, int threads, int m, int k, int n, bool with_bias) {
  Buffer<T> x(size_t(m) * k), weight(size_t(n) * k), bias(n), y(size_t(m) * n);
  const int per = 4 / sizeof(T);
  Buffer<uint32_t> words(size_t((n + 15) / 16) * ((k + per - 1) / per) * 16, 0);
  table.pack(threads, {weight.data.get(), n, k, k}, words.data.get());
  Buffer<float> wide(size_t(m) * n);
  const Weight packed{words.data.get(), nullptr, n, with_bias ? bias.data.get() : nullptr, Packing::plain};
  table.linear(threads, {{x.data.get(), m, k, k}, packed, y.data.get(), false});
  table.linear(threads, {{x.data.get(), m, k, k}, packed, wide.data.get(), true});
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = with_bias ? double(bias[j]) : 0;
      for (int l = 0; l < k; l++) sum += double(x[i * k + l]) * double(weight[j * k + l]);
      near<T>(y[i * n + j], sum, std::sqrt(k), std::string(table.name) + " linear " + std::to_string(k));
      near<float>(wide[i * n + j], sum, std::sqrt(k), std::string(table.name) + " wide " + std::to_string(k));
    }
}

template <class T>
static void linear_int8(const Kernels& table, int threads, int m, int k, int n, bool with_bias) {
  Buffer<T> x(size_t(m) * k), weight(size_t(n) * k), bias(n), y(size_t(m) * n);
  for (T* data : {x.data.get(), weight.data.get()})  // integers, and the largest among them: nothing is rounded
    for (int i = 0; i < (data == x.data.get() ? m : n) * k; i++) data[i] = T(i % k % 64 ? below(255) - 127 : 127);
  const size_t groups = (n + 15) / 16;
  Buffer<uint32_t> words(groups * ((k + 3) / 4) * 16, 0);
  Buffer<float> scales(groups * 16, NAN);
  table.pack_int8(threads, {weight.data.get(), n, k, k}, words.data.get(), scales.data.get());
  const Weight packed{words.data.get(), scales.data.get(), n, with_bias ? bias.data.get() : nullptr, Packing::bytes};
  table.linear(threads, {{x.data.get(), m, k, k}, packed, y.data.get(), false});
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = with_bias ? double(bias[j]) : 0;
      for (int l = 0; l < k; l++) sum += double(x[i * k + l]) * double(weight[j * k + l]);
      near<T>(y[i * n + j], sum, 100, std::string(table.name) + " linear_int8 " + std::to_string(k));
    }
}

template <class T>
static void embedding(const Kernels& table, int threads, int m, int k, int n) {
  const int per = 4 / sizeof(T);
  Buffer<T> weight(size_t(n) * k), y(size_t(m) * k);
  Buffer<uint32_t> words(size_t((n + 15) / 16) * (k / per) * 16, 0);
  table.pack(threads, {weight.data.get(), n, k, k}, words.data.get());
  Buffer<int64_t> tokens(m, 0);
  for (int i = 0; i < m; i++) tokens[i] = i ? below(n) : n - 1;
  table.embed(threads, tokens.data.get(), m, k, {words.data.get(), nullptr, n, nullptr, Packing::plain}, y.data.get());
  for (int i = 0; i < m * k; i++)
    near<T>(y[i], double(weight[tokens[i / k] * k + i % k]), 0, std::string(table.name) + " embedding");
}

// Random bytes of a format, in which no scale of float16 is far from 1 or no number.
static Buffer<uint8_t> rows_of(Format format, int rows, int blocks) {
  const bool k = format == Format::Q4_K;
  const int size = format == Format::Q4_0 ? 18 : format == Format::Q4_1 ? 20 : format == Format::Q8_0 ? 34 : 144;
  Buffer<uint8_t> data(size_t(rows) * blocks / (k ? 8 : 1) * size, 0);
  for (size_t i = 0; i < data.count; i++) {
    const size_t at = i % size, scales = k || format == Format::Q4_1 ? 4 : 2;
    data[i] = uint8_t(at >= scales ? below(256) : at % 2 ? 0x30 + below(12) : below(256));
  }
  return data;
}

// What the bytes mean, written down anew from the description of the formats.
static double value(Format format, const uint8_t* row, int i) {
  auto half = [](const uint8_t* p) {
    return (1 + (p[0] | (p[1] & 3) << 8) / 1024.0) * std::ldexp(1, (p[1] >> 2) - 15);
  };
  const int b = i / 32, v = i % 32;
  auto nibble = [&](const uint8_t* q) { return v < 16 ? q[v] & 15 : q[v - 16] >> 4; };
  if (format == Format::Q8_0) return half(row + b * 34) * int8_t(row[b * 34 + 2 + v]);
  if (format == Format::Q4_0) return half(row + b * 18) * (nibble(row + b * 18 + 2) - 8);
  if (format == Format::Q4_1) return half(row + b * 20) * nibble(row + b * 20 + 4) + half(row + b * 20 + 2);
  row += b / 8 * 144;
  const int s = b % 8;
  const uint8_t *six = row + 4, byte = row[16 + s / 2 * 32 + v];
  const int scale = s < 4 ? six[s] % 64 : six[s + 4] % 16 + six[s - 4] / 64 * 16;
  const int least = s < 4 ? six[s + 4] % 64 : six[s + 4] / 16 + six[s] / 64 * 16;
  return half(row) * scale * (s % 2 ? byte / 16 : byte % 16) - half(row + 2) * least;
}

template <class T>
static void blocks(const Kernels& table, int threads, int m, int k, int n, bool with_bias, Format format,
                   bool nibbles) {
  Buffer<T> x(size_t(m) * k), bias(n), y(size_t(m) * n);
  for (int i = 0; i < m * k; i++) x[i] = T(i % k % 32 ? below(255) - 127 : 127);
  const size_t groups = (n + 15) / 16, some = groups * 16 * k / 32;
  Buffer<uint32_t> words(some * (nibbles ? 4 : 8), 0);
  Buffer<uint16_t> numbers(some * (nibbles ? 2 : 1), 0);
  std::vector<double> weight;
  for (int first = 0, rows = (n + 2) / 3; first < n; first += rows, rows = std::min(rows, n - first)) {  // in parts
    Buffer<uint8_t> data = rows_of(format, rows, k / 32);
    const int pitch = int(data.count / rows);
    table.pack_blocks(threads, format, {data.data.get(), rows, k, pitch}, first, nibbles, words.data.get(),
                      numbers.data.get());
    for (int i = 0; i < rows * k; i++) weight.push_back(value(format, data.data.get() + i / k * pitch, i % k));
  }
  const Weight packed{words.data.get(), numbers.data.get(), n, with_bias ? bias.data.get() : nullptr,
                      nibbles ? Packing::nibbles : Packing::blocks};
  table.linear(threads, {{x.data.get(), m, k, k}, packed, y.data.get(), false});
  const std::string name = std::string(table.name) + " blocks of format " + std::to_string(int(format));
  const bool exact = nibbles ? format != Format::Q4_K : format == Format::Q8_0;
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++) {
      double sum = with_bias ? double(bias[j]) : 0, squares = 0;
      for (int l = 0; l < k; l++) {
        sum += double(x[i * k + l]) * weight[j * k + l];
        squares += weight[j * k + l] * weight[j * k + l];
      }
      near<T>(y[i * n + j], sum, 127 * std::sqrt(squares), name, exact ? 0 : 0.02);
    }
  Buffer<int64_t> tokens(m, 0);
  for (int i = 0; i < m; i++) tokens[i] = below(n);
  Buffer<T> rows(size_t(m) * k);
  table.embed(threads, tokens.data.get(), m, k, packed, rows.data.get());
  for (int i = 0; i < m; i++)
    for (int l = 0; l < k; l++)
      near<T>(rows[i * k + l], weight[tokens[i] * k + l], exact ? 100 : 1000, name + " embedded", exact ? 0 : 0.005);
}

template <class T>
static void element_wise(const Kernels& table, int threads, int rows, int size) {
  const std::string name = std::string(table.name) + " of " + std::to_string(size);
  Buffer<T> x(size_t(rows) * size), residual(size_t(rows) * size), weight(size), out(size_t(rows) * size);
  std::vector<double> sums(size_t(rows) * size);
  for (size_t i = 0; i < sums.size(); i++) sums[i] = T(double(x[i]) + double(residual[i]));
  table.rmsnorm(threads, {x.data.get(), rows, 1, size, size, 0}, residual.data.get(), weight.data.get(), 1e-5f,
                out.data.get());
  for (int i = 0; i < rows; i++) {
    double squares = 0;
    for (int j = 0; j < size; j++) squares += sums[i * size + j] * sums[i * size + j];
    for (int j = 0; j < size; j++) {
      near<T>(residual[i * size + j], sums[i * size + j], 0.1, name + " sum");
      near<T>(out[i * size + j], sums[i * size + j] / std::sqrt(squares / size + 1e-5) * double(weight[j]), 0.1,
              name + " norm");
    }
  }
  Buffer<T> wide(size_t(rows) * 2 * size), y(size_t(rows) * size);
  for (size_t i = 0; i < wide.count; i++) wide[i] = T(uniform() * 30);
  table.silu_mul(threads, {wide.data.get(), rows, size, 2 * size}, y.data.get());
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < size; j++) {
      const double gate = wide[i * 2 * size + j], up = wide[i * 2 * size + size + j];
      near<T>(y[i * size + j], gate / (1 + std::exp(-gate)) * up, 0.1, name + " silu");
    }
}

struct Span {
  int start, n;
};

template <class T>
static void attention(const Kernels& table, int threads, const std::vector<Span>& spans, int heads, int kv_heads,
                      int size, int block, int window, int plan_threads, bool bytes = false) {
  const std::string name = std::string(table.name) + (bytes ? " int8" : "") + " attention of " + std::to_string(size);
  const int padded = (size + 15) / 16 * 16, requests = int(spans.size());
  int blocks = 2, columns = 0, tokens = 0, past = 0;
  for (auto [start, n] : spans) {
    blocks += (start + n + block - 1) / block;
    columns = std::max(columns, (start + n + block - 1) / block);
    tokens += n;
    past += start;
  }
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  for (int i = blocks - 1; i > 0; i--) std::swap(order[i], order[below(i + 1)]);
  Buffer<int32_t> tables(size_t(requests) * columns, -1), cu_lens(requests + 1, 0), seq_lens(requests, 0);
  const size_t pages = size_t(blocks) * kv_heads * block * padded, some = size_t(blocks) * kv_heads * block;
  Buffer<T> keys(bytes ? 0 : pages, NAN), values(bytes ? 0 : pages, NAN);
  Buffer<float> byte_keys(bytes ? pages / 4 + some : 0, NAN), byte_values(bytes ? pages / 4 + some : 0, NAN);
  Cache cache{keys.data.get(), values.data.get(), kv_heads, block, size, padded, bytes};
  if (bytes) cache.keys = byte_keys.data.get(), cache.values = byte_values.data.get();
  std::vector<std::vector<double>> k(requests), v(requests);
  Buffer<T> q(size_t(tokens) * heads * size), out(size_t(tokens) * heads * size, NAN);
  int next = 0, longest = 0;
  for (int r = 0; r < requests; r++) {
    const int length = spans[r].start + spans[r].n;
    for (int b = 0; b * block < length; b++) tables[r * columns + b] = order[next++];
    cu_lens[r + 1] = cu_lens[r] + spans[r].n;
    seq_lens[r] = length;
    longest = std::max(longest, length);
  }
  const int half = size / 2;
  Buffer<float> cosine(size_t(longest) * half, 1), sine(size_t(longest) * half, 0);
  for (int r = 0; r < requests; r++) {  // a quarter turn for every other position
    const int length = seq_lens[r];
    for (int from : {0, spans[r].start}) {
      const int n = from ? length - from : spans[r].start ? spans[r].start : length;
      Buffer<T> own_q(size_t(n) * size, 0), own_k(size_t(n) * kv_heads * size), own_v(size_t(n) * kv_heads * size);
      Buffer<int64_t> positions(n, 0), slots(n, 0);
      for (int i = 0; i < n; i++) {
        positions[i] = from + i;
        slots[i] = int64_t(tables[r * columns + (from + i) / block]) * block + (from + i) % block;
        for (int j = 0; j < half && (from + i) % 2; j++) {
          cosine[(from + i) * half + j] = 0;
          sine[(from + i) * half + j] = 1;
        }
      }
      std::vector<double> before(own_k.data.get(), own_k.data.get() + own_k.count);
      table.rope_store(threads, {own_q.data.get(), n, 1, size, size, size},
                       {own_k.data.get(), n, kv_heads, size, kv_heads * size, size},
                       {own_v.data.get(), n, kv_heads, size, kv_heads * size, size}, positions.data.get(),
                       cosine.data.get(), sine.data.get(), half, slots.data.get(), cache);
      for (int i = 0; i < n * kv_heads; i++)
        for (int j = 0; j < size; j++) {
          const double* x = before.data() + i * size;
          double turned = x[j];
          if ((from + i / kv_heads) % 2 && j < 2 * half) turned = j < half ? -x[j + half] : x[j - half];
          k[r].push_back(turned);
          v[r].push_back(own_v[i * size + j]);
        }
      if (!spans[r].start) break;
    }
  }
  const Plan plan = make_plan(cu_lens.data.get(), seq_lens.data.get(), requests, heads, kv_heads, window, plan_threads);
  std::vector<int32_t> remaining = plan.counters;
  const int slots = std::accumulate(remaining.begin(), remaining.end(), 0);
  Buffer<float> partial(size_t(slots) * MOST_ROWS * (padded + 2), NAN);
  std::vector<Task> tasks = plan.tasks;
  table.attention(threads, {cache, {q.data.get(), tokens, heads, size, heads * size, size}, out.data.get(),
                            tasks.data(), int64_t(tasks.size()), tables.data.get(), cu_lens.data.get(),
                            seq_lens.data.get(), columns, window, 0.25f, partial.data.get(), remaining.data()});
  for (int r = 0; r < requests; r++)
    for (int i = 0; i < spans[r].n; i++)
      for (int h = 0; h < heads; h++) {
        const int position = spans[r].start + i, low = window ? std::max(0, position + 1 - window) : 0;
        const size_t at = (size_t(cu_lens[r] + i) * heads + h) * size;
        std::vector<double> weights, wanted(size);
        double total = 0;
        for (int t = low; t <= position; t++) {
          double score = 0;
          for (int j = 0; j < size; j++)
            score += double(q[at + j]) * k[r][(size_t(t) * kv_heads + h / (heads / kv_heads)) * size + j];
          weights.push_back(std::exp(score * 0.25));
          total += weights.back();
        }
        for (int t = low; t <= position; t++)
          for (int j = 0; j < size; j++)
            wanted[j] += weights[t - low] / total * v[r][(size_t(t) * kv_heads + h / (heads / kv_heads)) * size + j];
        for (int j = 0; j < size; j++) near<T>(out[at + j], wanted[j], 0.3, name, bytes ? 0.04 : 0);
      }
}

// All layers at once against one operation after the other.
template <class T>
static void decoder(const Kernels& table, int threads, const std::vector<Span>& spans, bool normed, bool bytes) {
  const int hidden = 40, heads = 6, kv_heads = 2, size = 20, inner = 56, padded = 32, columns = 26, count = 2;
  const int across = (heads + 2 * kv_heads) * size, requests = int(spans.size()), per = bytes ? 4 : 4 / int(sizeof(T));
  int tokens = 0;
  Buffer<int32_t> tables(size_t(requests) * columns, 0), cu_lens(requests + 1, 0), seq_lens(requests, 0);
  std::vector<int64_t> positions, slots;
  for (int r = 0; r < requests; r++) {
    for (int i = 0; i < columns; i++) tables[r * columns + i] = r * columns + i;
    cu_lens[r + 1] = tokens += spans[r].n;
    seq_lens[r] = spans[r].start + spans[r].n;
    for (int i = spans[r].start; i < seq_lens[r]; i++) positions.push_back(i), slots.push_back(r * columns * 16 + i);
  }
  std::vector<Buffer<uint32_t>> words;
  std::vector<Buffer<float>> scales;
  auto weight = [&](int n, int k) {
    Buffer<T> values(size_t(n) * k);
    words.emplace_back(size_t((n + 15) / 16) * ((k + per - 1) / per) * 16, 0);
    scales.emplace_back(size_t((n + 15) / 16) * 16, 0);
    const Matrix matrix{values.data.get(), n, k, k};
    if (bytes) {
      table.pack_int8(threads, matrix, words.back().data.get(), scales.back().data.get());
      return Weight{words.back().data.get(), scales.back().data.get(), n, nullptr, Packing::bytes};
    }
    table.pack(threads, matrix, words.back().data.get());
    return Weight{words.back().data.get(), nullptr, n, nullptr, Packing::plain};
  };
  Buffer<T> norm(hidden), head_norm(size);
  const void* own = normed ? head_norm.data.get() : nullptr;
  const Plan plan = make_plan(cu_lens.data.get(), seq_lens.data.get(), requests, heads, kv_heads, 0, threads);
  const int parts = std::accumulate(plan.counters.begin(), plan.counters.end(), 0);
  Buffer<float> partial(size_t(parts) * MOST_ROWS * (padded + 2), NAN), angle(size_t(columns) * 16 * size / 2, 0.5);
  std::vector<Layer> layers;
  std::vector<Buffer<T>> pages[2];
  std::vector<std::vector<int32_t>> remaining(2 * count, plan.counters);
  for (int i = 0; i < count; i++) {
    Buffer<T> keys(size_t(requests) * columns * kv_heads * 16 * padded);
    for (auto& some : pages)
      for (int both = 0; both < 2; both++) {
        some.emplace_back(keys.count, 0);
        std::copy(keys.data.get(), keys.data.get() + keys.count, some.back().data.get());
      }
    const Cache cache{pages[0][2 * i].data.get(), pages[0][2 * i + 1].data.get(), kv_heads, 16, size, padded};
    layers.push_back({norm.data.get(), own, own, norm.data.get(), weight(across, hidden), weight(hidden, heads * size),
                      weight(2 * inner, hidden), weight(hidden, inner), cache, plan.tasks.data(),
                      int64_t(plan.tasks.size()), 0, remaining[i].data()});
  }
  Buffer<T> x(size_t(tokens) * hidden), sums(x.count), y(x.count), other(x.count);
  std::copy(x.data.get(), x.data.get() + x.count, sums.data.get());
  table.decoder(threads, {layers.data(), count, tokens, hidden, heads, inner, sums.data.get(), y.data.get(),
                          positions.data(), slots.data(), angle.data.get(), angle.data.get(), size / 2, 1e-5f, 0.2f,
                          tables.data.get(), cu_lens.data.get(), seq_lens.data.get(), columns, partial.data.get()});
  Buffer<T> normal(x.count), qkv(size_t(tokens) * across), q_norm(size_t(tokens) * heads * size),
      k_norm(size_t(tokens) * kv_heads * size), out(size_t(tokens) * heads * size), wide(size_t(tokens) * 2 * inner),
      narrow(size_t(tokens) * inner);
  auto rows = [&](Buffer<T>& from, int heads, int pitch, int first = 0) {
    return Rows{from.data.get() + first, tokens, heads, size, pitch, size};
  };
  auto add_norm = [&](Buffer<T>& from, void* residual) {
    table.rmsnorm(threads, {from.data.get(), tokens, 1, hidden, hidden, 0}, residual, norm.data.get(), 1e-5f,
                  normal.data.get());
  };
  auto product = [&](Buffer<T>& from, int k, const Weight& by, Buffer<T>& to) {
    table.linear(threads, {{from.data.get(), tokens, k, k}, by, to.data.get(), false});
  };
  for (int i = 0; i < count; i++) {
    const Layer& layer = layers[i];
    const Cache cache{pages[1][2 * i].data.get(), pages[1][2 * i + 1].data.get(), kv_heads, 16, size, padded};
    add_norm(i ? other : x, i ? x.data.get() : nullptr);
    product(normal, hidden, layer.qkv, qkv);
    Rows q = rows(qkv, heads, across), k = rows(qkv, kv_heads, across, heads * size);
    if (normed) {
      table.rmsnorm(threads, q, nullptr, own, 1e-5f, q_norm.data.get());
      table.rmsnorm(threads, k, nullptr, own, 1e-5f, k_norm.data.get());
      q = rows(q_norm, heads, heads * size), k = rows(k_norm, kv_heads, kv_heads * size);
    }
    table.rope_store(threads, q, k, rows(qkv, kv_heads, across, (heads + kv_heads) * size), positions.data(),
                     angle.data.get(), angle.data.get(), size / 2, slots.data(), cache);
    table.attention(threads, {cache, q, out.data.get(), plan.tasks.data(), int64_t(plan.tasks.size()),
                              tables.data.get(), cu_lens.data.get(), seq_lens.data.get(), columns, 0, 0.2f,
                              partial.data.get(), remaining[count + i].data()});
    product(out, heads * size, layer.o, other);
    add_norm(other, x.data.get());
    product(normal, hidden, layer.gate_up, wide);
    table.silu_mul(threads, {wide.data.get(), tokens, inner, 2 * inner}, narrow.data.get());
    product(narrow, inner, layer.down, other);
  }
  for (size_t i = 0; i < x.count; i++) {
    near<T>(sums[i], x[i], 10, std::string(table.name) + " decoder's sums");
    near<T>(y[i], other[i], 10, std::string(table.name) + " decoder");
  }
}

static void argmax(const Kernels& table, int threads) {
  for (int n : {1, 15, 16, 33, 1000}) {
    Buffer<float> x(size_t(7) * n), values(7, 0);
    Buffer<int64_t> places(7, -1);
    for (size_t i = 0; i < x.count; i++) x[i] = float(below(50));
    for (int i = 0; i < n; i++) x[i] = -INFINITY;
    x[size_t(3) * n + n / 2] = NAN;
    table.argmax(threads, {x.data.get(), 7, n, n}, places.data.get(), values.data.get());
    for (int r = 0; r < 7; r++) {
      int first = 0;
      for (int i = 1; i < n && r != 3; i++)
        if (x[size_t(r) * n + i] > x[size_t(r) * n + first]) first = i;
      if (r == 3) first = n / 2;
      const float found = x[size_t(r) * n + first];
      checks++;
      if (places[r] != first || (values[r] != found && found == found)) {
        printf("%s argmax of %d: %d instead of %d\n", table.name, n, int(places[r]), first);
        exit(1);
      }
    }
  }
}

static void largest(const Kernels& table, int threads) {
  for (int n : {1, 15, 128, 1000, 3001}) {
    Buffer<float> x(size_t(7) * n), least(7, 0);
    Buffer<int64_t> counts(7, 0);
    for (size_t i = 0; i < x.count; i++) x[i] = float(below(50));
    for (int i = 0; i < n; i++) x[i] = float(i), x[n + i] = 1;
    const int64_t sizes[] = {7, 3, 0, n / 2, n, n + 1, 1};
    for (int r = 0; r < 7; r++) counts[r] = sizes[r], least[r] = r == 2 ? 40 : r == 5 ? -INFINITY : float(r);
    std::vector<std::vector<int32_t>> found(7);
    table.largest(threads, {x.data.get(), 7, n, n}, counts.data.get(), least.data.get(), found.data());
    for (int r = 0; r < 7; r++) {
      std::vector<int32_t> expected;
      for (int i = 0; i < n; i++) {
        int64_t above = 0;
        for (int j = 0; j < n; j++) above += x[size_t(r) * n + j] > x[size_t(r) * n + i];
        if (x[size_t(r) * n + i] >= least[r] && (counts[r] == 0 || above < counts[r])) expected.push_back(i);
      }
      checks++;
      if (found[r] != expected) {
        printf("%s largest of %d, row %d: %d instead of %d\n", table.name, n, r, int(found[r].size()),
               int(expected.size()));
        exit(1);
      }
    }
  }
}

template <class T>
static void all(const Kernels& table, int threads) {
  for (auto [m, k, n] : {std::tuple{1, 64, 96}, {5, 20, 7}, {33, 97, 64}, {1, 1, 1}, {13, 1031, 85}, {100, 130, 300}})
    linear<T>(table, threads, m, k, n, m % 2), linear_int8<T>(table, threads, m, k, n, m % 2);
  for (auto [m, k, n] : {std::tuple{1, 2, 1}, {5, 20, 7}, {33, 98, 64}, {13, 64, 85}, {100, 130, 300}})
    embedding<T>(table, threads, m, k, n);
  for (auto [m, k, n] : {std::tuple{1, 256, 96}, {5, 512, 7}, {33, 256, 64}, {13, 768, 85}, {100, 256, 130}})
    for (Format format : {Format::Q8_0, Format::Q4_0, Format::Q4_1, Format::Q4_K})
      for (bool nibbles : {false, true})
        if (!nibbles || format != Format::Q8_0) blocks<T>(table, threads, m, k, n, m % 2, format, nibbles);
  for (int size : {1, 7, 20, 64, 577}) element_wise<T>(table, threads, 23, size);
  const std::vector<Span> mixed = {{20, 1}, {0, 33}, {5, 6}, {16, 20}, {63, 1}, {8, 6}};
  for (auto [heads, kv_heads, size] : {std::tuple{4, 2, 16}, {9, 3, 64}, {6, 1, 21}, {14, 2, 80}, {71, 1, 34}})
    for (int window : {0, 1, 9, 40})
      for (bool bytes : {false, true})
        attention<T>(table, threads, mixed, heads, kv_heads, size, 16, window, threads, bytes);
  for (bool normed : {false, true})
    for (bool bytes : {false, true}) decoder<T>(table, threads, mixed, normed, bytes);
  decoder<T>(table, threads, {{0, 1}}, false, false);
  decoder<T>(table, threads, {{0, 400}, {300, 1}}, false, false);
  argmax(table, threads);
  largest(table, threads);
  attention<T>(table, threads, {{700, 1}, {3, 1}}, 6, 2, 32, 48, 0, 4);
  attention<T>(table, threads, {{1000, 1}}, 3, 1, 16, 32, 500, 4);
  attention<T>(table, threads, {{0, 300}}, 4, 4, 16, 32, 0, 2);
  attention<T>(table, threads, {{700, 1}, {0, 90}}, 6, 2, 32, 48, 0, 4, true);
}

int main() {
#define X(isa) isa::kernels,
  for (const Kernels* const* kernels : std::initializer_list<const Kernels* const*>{ISAS}) {
#undef X
    for (int threads : {1, 2, 3}) {
      all<float>(*kernels[0], threads);
      all<Half>(*kernels[1], threads);
    }
    printf("%s: %d values are right\n", kernels[0]->name, checks);
  }
}
