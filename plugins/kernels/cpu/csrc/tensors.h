// Tensors as the kernels take them, checked: shared by all of the torch side.
#pragma once
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

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
  TORCH_CHECK(!scales || (blocks ? columns % 32 == 0 : scales->scalar_type() == at::kFloat));
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

}  // namespace
