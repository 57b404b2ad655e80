// All kernels for one instruction set. Compiled once for each, with -DISA=name and the flags that go with the name; no
// torch headers, and everything in a namespace of its own, so that no two of them are mixed up when linked.
#include <algorithm>

#include "decoder.h"

#define STRING_(x) #x
#define STRING(x) STRING_(x)

namespace ISA {

// F on a team of its own.
template <auto F>
struct Alone;
template <class... Args, void (*F)(Team&, Args...)>
struct Alone<F> {
  static void run(int threads, Args... args) {
    together(threads, [&](Team& team) { F(team, args...); });
  }
};

template <class D, class T = typename D::T>
constexpr Kernels table = {
    STRING(ISA),
    Alone<pack<D>>::run,
    Alone<pack_int8<T>>::run,
    Alone<pack_any>::run,
    any_linear_alone<D>,
    Alone<embed_any<D>>::run,
    Alone<rmsnorm<T>>::run,
    Alone<silu_mul<T>>::run,
    Alone<rope_store<D>>::run,
    Alone<attention<D>>::run,
    decoder<D>,
    Alone<argmax>::run,
    Alone<find_largest>::run,
};

extern const Kernels* const kernels[2];
const Kernels* const kernels[2] = {&table<DotF32>, &table<DotBF16>};

}  // namespace ISA
