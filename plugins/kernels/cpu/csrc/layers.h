// All layers of a decoder as an object that torch knows: what is the same in every step is checked once.
#pragma once
#include <ATen/ops/empty_like.h>
#include <torch/custom_class.h>

#include <map>

#include "plan.h"
#include "tensors.h"

namespace {

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
      TORCH_CHECK(layers.empty() || (layers[0].cache.kv_heads == pages.kv_heads && layers[0].cache.padded == pages.padded),
                  "layers differ in their caches");
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
    if (!tokens) return {at::empty_like(x), x};
    TORCH_CHECK(positions.numel() == tokens && slots.numel() == tokens && blocks.dim() == 2 &&
                cos.sizes() == sin.sizes() && 2 * cos.size(1) <= size);
    TORCH_CHECK(cu_lens.numel() == seq_lens.numel() + 1 && blocks.size(0) == seq_lens.numel() && seq_lens.numel() > 0 &&
                data<int32_t>(cu_lens)[seq_lens.numel()] == tokens, "the batch does not fit its tokens");
    const int64_t *at = data<int64_t>(positions), *to = data<int64_t>(slots);
    TORCH_CHECK(std::all_of(at, at + tokens, [&](int64_t p) { return p >= 0 && p < cos.size(0); }),
                "a position is beyond the rotary table");
    const int64_t most_slots = std::get<2>(keep[0]).size(0) * layers[0].cache.block_size;
    TORCH_CHECK(std::all_of(to, to + tokens, [&](int64_t s) { return s >= 0 && s < most_slots; }), "no such slot");
    Tensor y = at::empty_like(x);
    const int team = threads(tokens * 2 * inner * hidden, 8 * PRODUCTS);
    std::map<int64_t, Plan> plans;  // by window
    size_t counters = 0;
    int64_t most = 0;
    for (Layer& layer : layers) {
      if (!plans.count(layer.window))
        plans[layer.window] = make_plan(data<int32_t>(cu_lens), data<int32_t>(seq_lens), seq_lens.numel(), heads,
                                        layer.cache.kv_heads, layer.window, team);
      const Plan& plan = plans[layer.window];
      layer.tasks = plan.tasks.data();
      layer.count = plan.tasks.size();
      counters += plan.counters.size();
      most = std::max<int64_t>(most, std::accumulate(plan.counters.begin(), plan.counters.end(), int64_t(0)));
    }
    std::vector<int32_t> remaining;
    remaining.reserve(counters);
    for (Layer& layer : layers) {
      const Plan& plan = plans[layer.window];
      layer.remaining = remaining.data() + remaining.size();
      remaining.insert(remaining.end(), plan.counters.begin(), plan.counters.end());
    }
    const Tensor partial = at::empty({most * MOST_ROWS * (layers[0].cache.padded + 2)}, options.dtype(at::kFloat));
    kernels(isa, x).decoder(team,
                            {layers.data(), int64_t(layers.size()), tokens, hidden, heads, inner, x.data_ptr(),
                             y.data_ptr(), data<int64_t>(positions), data<int64_t>(slots), data<float>(cos),
                             data<float>(sin), cos.size(1), float(eps), float(scale), data<int32_t>(blocks),
                             data<int32_t>(cu_lens), data<int32_t>(seq_lens), blocks.size(1),
                             partial.data_ptr<float>()});
    return {y, x};
  }
};

}  // namespace
