// All kernels for one instruction set. Compiled once for each, with -DISA=name and the flags that go with the name; no
// torch headers, and everything in a namespace of its own, so that no two of them are mixed up when linked.
#include <algorithm>

#include "attention.h"
#include "blocks.h"
#include "elementwise.h"
#include "int8.h"
#include "linear.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace ISA {

template <class D>
constexpr Kernels table = {STRING(ISA), pack<D>, linear<D>, rmsnorm<typename D::T>, silu_mul<typename D::T>,
                           rope_store<D>, attention<D>, pack_int8<typename D::T>, linear_int8<typename D::T>,
                           pack_blocks, linear_blocks<typename D::T>, embed_blocks<typename D::T>};

extern const Kernels* const kernels[2];
const Kernels* const kernels[2] = {&table<DotF32>, &table<DotBF16>};

}  // namespace ISA
