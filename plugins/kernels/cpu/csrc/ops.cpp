// The torch side: checks tensors, allocates results, and calls the kernels of one instruction set. The only file that
// sees torch's headers.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <map>
#include <tuple>

#include "kernels.h"
#include "plan.h"

#define X(isa)                             \
  namespace isa {                          \
  extern const Kernels* const kernels[2];  \
  }
ISAS
#undef X

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

#define X(isa) isa::kernels,
const Kernels* const* const tables[] = {ISAS};
#undef X

// How many threads are worth having for so many values or multiplications.
int threads(int64_t work, int64_t least) { return work <= least ? 1 : at::get_num_threads(); }

constexpr int64_t VALUES = 1 << 13, PRODUCTS = 1 << 16;  // one thread is done with them before a second has woken up

const Kernels& kernels(int64_t isa, const Tensor& x) {
  TORCH_CHECK(isa >= 0 && isa < int64_t(std::size(tables)), "no such instruction set");
  TORCH_CHECK(x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16, "float32 or bfloat16, not ", x.dtype());
  return *tables[isa][x.scalar_type() == at::kBFloat16];
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto table : tables) names.emplace_back(table[0]->name);
  return names;
}

Matrix matrix(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "expected a matrix whose rows are contiguous");
  return {x.data_ptr(), x.size(0), x.size(1), x.stride(0)};
}

Rows rows(const Tensor& x) {
  TORCH_CHECK(x.stride(-1) == 1 && (x.dim() == 2 || x.dim() == 3), "expected rows that are contiguous");
  const bool flat = x.dim() == 2;
  return {x.data_ptr(), x.size(0), flat ? 1 : x.size(1), x.size(-1), x.stride(0), flat ? 0 : x.stride(1)};
}

Cache cache(const Tensor& keys, const Tensor& values, int64_t size) {
  TORCH_CHECK(keys.dim() == 4 && keys.is_contiguous() && values.is_contiguous() && keys.sizes() == values.sizes());
  TORCH_CHECK(keys.scalar_type() == values.scalar_type());
  const bool bytes = keys.scalar_type() == at::kChar;
  const int64_t padded = (keys.size(3) - (bytes ? 64 : 0)) / 16;  // 16 scales behind a page of bytes
  TORCH_CHECK(keys.size(3) % 16 == 0 && padded >= size, "pages are too small for the head");
  return {keys.data_ptr(), values.data_ptr(), keys.size(1), keys.size(2) * 16, size, padded, bytes};
}

template <class T>
const T* data(const Tensor& x) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == c10::CppTypeToScalarType<T>::value, "expected contiguous ",
              c10::CppTypeToScalarType<T>::value, ", not ", x.dtype());
  return x.const_data_ptr<T>();
}

// [n, k] -> [n / 16, k / per, 16, per], where `per` values make 32 bits.
void pack(const Tensor& weight, const Tensor& words, int64_t isa) {
  const Kernels& table = kernels(isa, weight);
  const int64_t per = 4 / weight.element_size(), n = (weight.size(0) + 15) / 16, k = (weight.size(1) + per - 1) / per;
  TORCH_CHECK(words.is_contiguous() && words.sizes() == at::IntArrayRef({n, k, 16, per}) &&
              words.scalar_type() == weight.scalar_type());
  table.pack(at::get_num_threads(), matrix(weight), static_cast<uint32_t*>(words.data_ptr()));
}

// [n, k] -> [n / 16, k / 4, 16, 4] bytes, and gives as many scales as they have columns.
Tensor pack_int8(const Tensor& weight, const Tensor& words, int64_t isa) {
  const Kernels& table = kernels(isa, weight);
  const int64_t groups = (weight.size(0) + 15) / 16;
  TORCH_CHECK(words.is_contiguous() && words.sizes() == at::IntArrayRef({groups, (weight.size(1) + 3) / 4, 16, 4}) &&
              words.scalar_type() == at::kChar);
  Tensor scales = at::empty({groups * 16}, weight.options().dtype(at::kFloat));
  table.pack_int8(at::get_num_threads(), matrix(weight), static_cast<uint32_t*>(words.data_ptr()),
                  scales.data_ptr<float>());
  return scales;
}

// Rows of a weight in blocks of 32 to columns `first` and on: data is what the file has of them, uint8 [rows, bytes], or
// float32 [rows, k]. words: uint8 [n / 16, k / 8, 16, 4] for halves of bytes or int8 [n / 16, k / 4, 16, 4];
// numbers: float16 [n / 16, k / 32, 2 or 1, 16].
void pack_blocks(const Tensor& data, int64_t format, int64_t first, Tensor words, Tensor numbers, int64_t isa) {
  TORCH_CHECK(isa >= 0 && isa < int64_t(std::size(tables)), "no such instruction set");
  const bool nibbles = words.scalar_type() == at::kByte;
  const int64_t k = words.size(1) * (nibbles ? 8 : 4), groups = words.size(0);
  const std::pair<int64_t, int64_t> sizes[] = {{2, 18}, {3, 20}, {8, 34}, {12, 144}, {0, 128}};  // bytes of a block
  const auto* known = std::find_if(std::begin(sizes), std::end(sizes), [&](auto one) { return one.first == format; });
  TORCH_CHECK(known != std::end(sizes) && (!nibbles || (format && format != 8)), "no format to keep in these words");
  const int64_t values = format == 12 ? 256 : 32, bytes = data.size(1) * data.element_size();
  TORCH_CHECK(data.dim() == 2 && data.is_contiguous() && data.scalar_type() == (format ? at::kByte : at::kFloat) &&
                  k % values == 0 && bytes == k / values * known->second,
              "rows of ", k, " values are not what the data holds");
  TORCH_CHECK(words.is_contiguous() && numbers.is_contiguous() && numbers.scalar_type() == at::kHalf &&
              numbers.numel() == groups * k / 32 * 16 * (nibbles ? 2 : 1) && first >= 0 &&
              first + data.size(0) <= groups * 16);
  tables[isa][0]->pack_blocks(at::get_num_threads(), Format(format), {data.const_data_ptr(), data.size(0), k, bytes},
                              first, nibbles, static_cast<uint32_t*>(words.data_ptr()),
                              static_cast<uint16_t*>(numbers.data_ptr()));
}

using Packed = std::tuple<Tensor, OptionalTensor, int64_t, OptionalTensor>;  // words, scales, n, bias

// For rows of `columns` values of type `dtype`. With scales of float32, words are bytes; with float16, blocks.
Weight weight(const Tensor& words, const OptionalTensor& scales, int64_t n, const OptionalTensor& bias, int64_t columns,
              at::ScalarType dtype) {
  const bool blocks = scales && scales->scalar_type() == at::kHalf, nibbles = blocks && words.scalar_type() == at::kByte;
  const int64_t per = nibbles ? 8 : scales ? 4 : dtype == at::kFloat ? 1 : 2;
  TORCH_CHECK(words.dim() == 4 && words.is_contiguous() && words.size(0) == (n + 15) / 16 &&
                  words.size(1) == (columns + per - 1) / per &&
                  (nibbles || words.scalar_type() == (scales ? at::kChar : dtype)),
              "the weight was packed for another product");
  TORCH_CHECK(!scales || (scales->is_contiguous() &&
                          scales->numel() == words.size(0) * 16 * (blocks ? columns / 32 * (nibbles ? 2 : 1) : 1)));
  TORCH_CHECK(!scales || blocks || scales->scalar_type() == at::kFloat);
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == n && bias->scalar_type() == dtype));
  return {static_cast<const uint32_t*>(words.const_data_ptr()),
          scales ? scales->const_data_ptr() : nullptr,
          n,
          bias ? bias->const_data_ptr() : nullptr,
          nibbles ? Packing::nibbles
          : blocks ? Packing::blocks
          : scales ? Packing::bytes
                   : Packing::plain};
}

// int64 [tokens] -> [tokens, k] from a weight of n rows in blocks.
Tensor embed(const Tensor& tokens, const Tensor& words, const Tensor& numbers, int64_t n, at::ScalarType dtype,
             int64_t isa) {
  const int64_t k = words.size(1) * (words.scalar_type() == at::kByte ? 8 : 4), count = tokens.numel();
  TORCH_CHECK(numbers.scalar_type() == at::kHalf);
  const Weight packed = weight(words, numbers, n, {}, k, dtype);
  const int64_t* ids = data<int64_t>(tokens);
  TORCH_CHECK(std::all_of(ids, ids + count, [&](int64_t id) { return id >= 0 && id < n; }), "a token is out of range");
  Tensor y = at::empty({count, k}, words.options().dtype(dtype));
  kernels(isa, y).embed(threads(y.numel(), VALUES), ids, count, k, packed, y.data_ptr());
  return y;
}

// wide: y is float32.
Tensor linear(const Tensor& x, const Tensor& words, const OptionalTensor& scales, int64_t n,
              const OptionalTensor& bias, bool wide, int64_t isa) {
  const Kernels& table = kernels(isa, x);
  TORCH_CHECK(x.dim() == 2, "the weight was packed for another product: x is no matrix");
  const Weight packed = weight(words, scales, n, bias, x.size(1), x.scalar_type());
  Tensor y = at::empty({x.size(0), n}, wide ? x.options().dtype(at::kFloat) : x.options());
  if (!y.numel()) return y;
  const Tensor flat = x.stride(1) == 1 ? x : x.contiguous();
  table.linear(threads(y.numel() * x.size(1), PRODUCTS), {matrix(flat), packed, y.data_ptr(), wide});
  return y;
}

std::tuple<Tensor, Tensor, Tensor> qkv(const Tensor& x, const Tensor& words, const OptionalTensor& scales, int64_t n,
                                       const OptionalTensor& bias, int64_t q, int64_t k, int64_t isa) {
  Tensor y = linear(x, words, scales, n, bias, false, isa);
  return {y.narrow(1, 0, q), y.narrow(1, q, k), y.narrow(1, q + k, n - q - k)};
}

Tensor rmsnorm(const Tensor& x, const OptionalTensor& residual, const Tensor& weight, double eps, int64_t isa) {
  const Kernels& table = kernels(isa, x);
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == x.scalar_type() && weight.numel() == x.size(-1));
  TORCH_CHECK(!residual || (residual->is_contiguous() && residual->scalar_type() == x.scalar_type() &&
                            residual->sizes() == x.sizes()));
  Tensor out = at::empty(x.sizes(), x.options());
  if (x.numel())
    table.rmsnorm(threads(x.numel(), VALUES), rows(x), residual ? residual->data_ptr() : nullptr, weight.const_data_ptr(),
                  eps, out.data_ptr());
  return out;
}

Tensor silu_mul(const Tensor& x, int64_t isa) {
  const Kernels& table = kernels(isa, x);
  Tensor y = at::empty({x.size(0), x.size(1) / 2}, x.options());
  Matrix gate = matrix(x);
  gate.columns /= 2;
  if (y.numel()) table.silu_mul(threads(y.numel(), VALUES), gate, y.data_ptr());
  return y;
}

void rope_store(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& positions, const Tensor& cos,
                const Tensor& sin, const Tensor& slots, const Tensor& keys, const Tensor& values, int64_t isa) {
  const Kernels& table = kernels(isa, q);
  const Cache pages = cache(keys, values, k.size(-1));
  const int64_t tokens = q.size(0);
  TORCH_CHECK(k.scalar_type() == q.scalar_type() && v.scalar_type() == q.scalar_type() &&
              (pages.bytes || keys.scalar_type() == q.scalar_type()));
  TORCH_CHECK(q.dim() == 3 && k.sizes() == v.sizes() && k.dim() == 3 && k.size(0) == tokens &&
              q.size(2) == k.size(2) && k.size(1) == pages.kv_heads && positions.numel() == tokens &&
              slots.numel() == tokens && cos.sizes() == sin.sizes() && 2 * cos.size(1) <= q.size(2));
  if (tokens)
    table.rope_store(threads(q.numel() + 2 * k.numel(), VALUES), rows(q), rows(k), rows(v), data<int64_t>(positions), data<float>(cos),
                     data<float>(sin), cos.size(1), data<int64_t>(slots), pages);
}

std::tuple<Tensor, Tensor> plan(const Tensor& cu_lens, const Tensor& seq_lens, int64_t heads, int64_t kv_heads,
                                int64_t window) {
  const Plan made = make_plan(data<int32_t>(cu_lens), data<int32_t>(seq_lens), seq_lens.numel(), heads, kv_heads,
                              window, at::get_num_threads());
  Tensor tasks = at::empty({int64_t(made.tasks.size()), TASK}, cu_lens.options());
  Tensor counters = at::empty({int64_t(made.counters.size())}, cu_lens.options());
  std::copy(made.tasks.begin(), made.tasks.end(), reinterpret_cast<Task*>(tasks.data_ptr()));
  std::copy(made.counters.begin(), made.counters.end(), counters.data_ptr<int32_t>());
  return {tasks, counters};
}

Tensor attention(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& blocks,
                 const Tensor& cu_lens, const Tensor& seq_lens, const Tensor& tasks, const Tensor& counters,
                 double scale, int64_t window, int64_t isa) {
  const Kernels& table = kernels(isa, q);
  const Cache pages = cache(keys, values, q.size(2));
  TORCH_CHECK(q.dim() == 3 && (pages.bytes || q.scalar_type() == keys.scalar_type()) && blocks.dim() == 2 &&
              tasks.size(1) == TASK);
  Tensor out = at::empty({q.size(0), q.size(1) * q.size(2)}, q.options());
  const int32_t* parts = data<int32_t>(counters);
  std::vector<int32_t> remaining(parts, parts + counters.numel());
  const int64_t slots = std::accumulate(remaining.begin(), remaining.end(), int64_t(0));
  const Tensor partial = at::empty({slots * MOST_ROWS * (pages.padded + 2)}, q.options().dtype(at::kFloat));
  const Attention work{pages,
                       rows(q),
                       out.data_ptr(),
                       reinterpret_cast<const Task*>(data<int32_t>(tasks)),
                       tasks.size(0),
                       data<int32_t>(blocks),
                       data<int32_t>(cu_lens),
                       data<int32_t>(seq_lens),
                       blocks.size(1),
                       window,
                       float(scale),
                       partial.data_ptr<float>(),
                       remaining.data()};
  int64_t products = 0;
  for (int64_t i = 0; i < work.count && products <= 2 * PRODUCTS; i++)
    products += int64_t(work.tasks[i].rows) * (work.tasks[i].end - work.tasks[i].begin) * 2 * pages.size;
  table.attention(threads(products, 2 * PRODUCTS), work);
  return out;
}

std::tuple<Tensor, Tensor> argmax(const Tensor& x, int64_t isa) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 2 && x.size(1) > 0 && x.size(1) < 1ll << 31);
  const Kernels& table = kernels(isa, x);
  Tensor places = at::empty({x.size(0)}, x.options().dtype(at::kLong)), values = at::empty({x.size(0)}, x.options());
  table.argmax(threads(x.numel(), 2 * PRODUCTS), matrix(x), places.data_ptr<int64_t>(), values.data_ptr<float>());
  return {places, values};
}

// The weights and caches of all layers, checked once. A layer: four norms, of which those of q and k may be missing, the
// packed weights of qkv, o, gate_up and down, the cache's keys and values, and its window.
using Norms = std::tuple<Tensor, OptionalTensor, OptionalTensor, Tensor>;
using LayerTensors = std::tuple<Norms, std::vector<Packed>, Tensor, Tensor, int64_t>;

struct Layers : torch::CustomClassHolder {
  std::vector<Layer> layers;
  std::vector<LayerTensors> keep;
  int64_t isa, hidden, heads, size, inner;
  double eps, scale;
  at::TensorOptions options;

  Layers(std::vector<LayerTensors> given, int64_t heads, int64_t size, double eps, double scale, int64_t isa)
      : keep(std::move(given)), isa(isa), heads(heads), size(size), eps(eps), scale(scale) {
    TORCH_CHECK(!keep.empty(), "no layers");
    const Tensor& some = std::get<0>(std::get<0>(keep[0]));
    kernels(isa, some);
    options = some.options();
    hidden = some.numel();
    const auto dtype = some.scalar_type();
    inner = std::get<2>(std::get<1>(keep[0]).at(2)) / 2;
    for (const auto& [norms, weights, keys, values, window] : keep) {
      const auto& [input, q, k, post] = norms;
      const Cache pages = cache(keys, values, size);
      const int64_t across = heads * size, kv = pages.kv_heads * size;
      auto norm = [&](const OptionalTensor& weight, int64_t n) -> const void* {
        if (!weight) return nullptr;
        TORCH_CHECK(weight->is_contiguous() && weight->scalar_type() == dtype && weight->numel() == n);
        return weight->const_data_ptr();
      };
      auto packed = [&](int i, int64_t n, int64_t columns) {
        const auto& [words, scales, rows, bias] = weights.at(i);
        TORCH_CHECK(rows == n, "the weight was packed for another product");
        return weight(words, scales, n, bias, columns, dtype);
      };
      TORCH_CHECK(heads % pages.kv_heads == 0 && (pages.bytes || keys.scalar_type() == dtype));
      layers.push_back({norm(input, hidden), norm(q, size), norm(k, size), norm(post, hidden),
                        packed(0, across + 2 * kv, hidden), packed(1, hidden, across), packed(2, 2 * inner, hidden),
                        packed(3, hidden, inner), pages, nullptr, 0, window, nullptr});
    }
  }

  // x [tokens, hidden], which is overwritten: (the last MLP's result, the sum of everything before it).
  std::tuple<Tensor, Tensor> run(const Tensor& x, const Tensor& positions, const Tensor& cos, const Tensor& sin,
                                 const Tensor& slots, const Tensor& blocks, const Tensor& cu_lens,
                                 const Tensor& seq_lens) {
    const int64_t tokens = x.size(0);
    TORCH_CHECK(x.dim() == 2 && x.is_contiguous() && x.size(1) == hidden && x.scalar_type() == options.dtype());
    TORCH_CHECK(positions.numel() == tokens && slots.numel() == tokens && blocks.dim() == 2 &&
                cos.sizes() == sin.sizes() && 2 * cos.size(1) <= size);
    Tensor y = at::empty_like(x);
    if (!tokens) return {y, x};
    std::map<std::pair<int64_t, int64_t>, Plan> plans;  // by heads of the cache and window
    size_t counters = 0;
    int64_t most = 0, padded = 0;
    for (Layer& layer : layers) {
      const auto key = std::pair{layer.cache.kv_heads, layer.window};
      if (!plans.count(key))
        plans[key] = make_plan(data<int32_t>(cu_lens), data<int32_t>(seq_lens), seq_lens.numel(), heads, key.first,
                               key.second, at::get_num_threads());
      const Plan& plan = plans[key];
      layer.tasks = plan.tasks.data();
      layer.count = plan.tasks.size();
      counters += plan.counters.size();
      most = std::max<int64_t>(most, std::accumulate(plan.counters.begin(), plan.counters.end(), int64_t(0)));
      padded = std::max(padded, layer.cache.padded);
    }
    std::vector<int32_t> remaining;
    remaining.reserve(counters);
    for (Layer& layer : layers) {
      const Plan& plan = plans[{layer.cache.kv_heads, layer.window}];
      layer.remaining = remaining.data() + remaining.size();
      remaining.insert(remaining.end(), plan.counters.begin(), plan.counters.end());
    }
    const Tensor partial = at::empty({most * MOST_ROWS * (padded + 2)}, options.dtype(at::kFloat));
    kernels(isa, x).decoder(at::get_num_threads(),
                            {layers.data(), int64_t(layers.size()), tokens, hidden, heads, inner, x.data_ptr(),
                             y.data_ptr(), data<int64_t>(positions), data<int64_t>(slots), data<float>(cos),
                             data<float>(sin), cos.size(1), float(eps), float(scale), data<int32_t>(blocks),
                             data<int32_t>(cu_lens), data<int32_t>(seq_lens), blocks.size(1),
                             partial.data_ptr<float>()});
    return {y, x};
  }
};

}  // namespace

TORCH_LIBRARY(framework_cpu, m) {
  m.def("isas() -> str[]", isas);
  m.def("pack(Tensor weight, Tensor(a!) words, int isa) -> ()");
  m.def("pack_int8(Tensor weight, Tensor(a!) words, int isa) -> Tensor");
  m.def("pack_blocks(Tensor data, int format, int first, Tensor(a!) words, Tensor(b!) numbers, int isa) -> ()");
  m.def("embed(Tensor tokens, Tensor words, Tensor numbers, int n, ScalarType dtype, int isa) -> Tensor");
  m.def("linear(Tensor x, Tensor words, Tensor? scales, int n, Tensor? bias, bool wide, int isa) -> Tensor");
  m.def(
      "qkv(Tensor x, Tensor words, Tensor? scales, int n, Tensor? bias, int q, int k, int isa) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("rmsnorm(Tensor x, Tensor(a!)? residual, Tensor weight, float eps, int isa) -> Tensor");
  m.def("silu_mul(Tensor x, int isa) -> Tensor");
  m.def(
      "rope_store(Tensor(a!) q, Tensor(b!) k, Tensor v, Tensor positions, Tensor cos, Tensor sin, Tensor slots, "
      "Tensor(c!) keys, Tensor(d!) values, int isa) -> ()");
  m.def("plan(Tensor cu_lens, Tensor seq_lens, int heads, int kv_heads, int window) -> (Tensor, Tensor)");
  m.def(
      "attention(Tensor q, Tensor keys, Tensor values, Tensor blocks, Tensor cu_lens, Tensor seq_lens, Tensor tasks, "
      "Tensor counters, float scale, int window, int isa) -> Tensor");
  m.def("argmax(Tensor x, int isa) -> (Tensor, Tensor)");
  m.class_<Layers>("Layers")
      .def(torch::init<std::vector<LayerTensors>, int64_t, int64_t, double, double, int64_t>())
      .def("run", &Layers::run);
}

TORCH_LIBRARY_IMPL(framework_cpu, CPU, m) {
  m.impl("pack", pack);
  m.impl("pack_int8", pack_int8);
  m.impl("pack_blocks", pack_blocks);
  m.impl("embed", embed);
  m.impl("linear", linear);
  m.impl("qkv", qkv);
  m.impl("rmsnorm", rmsnorm);
  m.impl("silu_mul", silu_mul);
  m.impl("rope_store", rope_store);
  m.impl("plan", plan);
  m.impl("attention", attention);
  m.impl("argmax", argmax);
}
