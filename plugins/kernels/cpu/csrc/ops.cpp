// The torch side: checks tensors, allocates results, and calls the kernels of one instruction set. With the headers
// that it includes the only file that sees torch's.
#include <torch/library.h>

#include "layers.h"

namespace {

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (auto table : tables) names.emplace_back(table[0]->name);
  return names;
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

// int64 [tokens] -> [tokens, k] from a weight of n rows, plain or in blocks.
Tensor embed(const Tensor& tokens, const Tensor& words, const OptionalTensor& numbers, int64_t n, at::ScalarType dtype,
             int64_t isa) {
  const int64_t per = words.scalar_type() == at::kByte ? 8 : 4 / words.element_size();
  const int64_t k = words.size(1) * per, count = tokens.numel();
  TORCH_CHECK(!numbers || numbers->scalar_type() == at::kHalf);
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

std::tuple<Tensor, Tensor, Tensor> largest(const Tensor& x, const Tensor& counts, const Tensor& least, int64_t isa) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() == 2 && x.size(1) > 0 && x.size(1) < 1ll << 31);
  TORCH_CHECK(counts.numel() == x.size(0) && least.numel() == x.size(0), "a count and a bound for each row");
  std::vector<std::vector<int32_t>> found(x.size(0));
  kernels(isa, x).largest(threads(x.numel(), 2 * PRODUCTS), matrix(x), data<int64_t>(counts), data<float>(least),
                          found.data());
  Tensor lengths = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  int64_t total = 0;
  for (size_t r = 0; r < found.size(); r++) total += lengths.data_ptr<int64_t>()[r] = found[r].size();
  Tensor columns = at::empty({total}, lengths.options()), values = at::empty({total}, x.options());
  int64_t* column = columns.data_ptr<int64_t>();
  float* value = values.data_ptr<float>();
  for (size_t r = 0; r < found.size(); r++) {
    const float* row = x.const_data_ptr<float>() + r * x.stride(0);
    for (int32_t i : found[r]) *column++ = i, *value++ = row[i];
  }
  return {columns, values, lengths};
}

}  // namespace

TORCH_LIBRARY(framework_cpu, m) {
  m.def("isas() -> str[]", isas);
  m.def("pack(Tensor weight, Tensor(a!) words, int isa) -> ()");
  m.def("pack_int8(Tensor weight, Tensor(a!) words, int isa) -> Tensor");
  m.def("pack_blocks(Tensor data, int format, int first, Tensor(a!) words, Tensor(b!) numbers, int isa) -> ()");
  m.def("embed(Tensor tokens, Tensor words, Tensor? numbers, int n, ScalarType dtype, int isa) -> Tensor");
  m.def("linear(Tensor x, Tensor words, Tensor? scales, int n, Tensor? bias, bool wide, int isa) -> Tensor");
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
  m.def("largest(Tensor x, Tensor counts, Tensor least, int isa) -> (Tensor, Tensor, Tensor)");
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
  m.impl("rmsnorm", rmsnorm);
  m.impl("silu_mul", silu_mul);
  m.impl("rope_store", rope_store);
  m.impl("plan", plan);
  m.impl("attention", attention);
  m.impl("argmax", argmax);
  m.impl("largest", largest);
}
