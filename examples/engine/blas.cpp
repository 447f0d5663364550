// SPDX-License-Identifier: Apache-2.0
#include "blas.hpp"

#include "bad_input.hpp"
#include "share.hpp"

#include <algorithm>
#include <cstdlib>

#include <cblas.h>
#include <dlfcn.h>

namespace engine {
namespace {

/// OpenBLAS, loaded at run time and not linked: it chooses its kernels while it is loaded, and a release that is older
/// than the processor falls back to those of a Pentium 4, several times slower. So the name of a processor that every
/// release knows is put into its environment first, unless the user has put one there. Its own threads stay off.
class openblas {
 public:
  openblas() {
    set_environment();
    void* library = ::dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) library = ::dlopen("libopenblas.so", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      throw bad_input(std::string("cannot load OpenBLAS (") + ::dlerror() + "); install libopenblas0");
    find(library, "cblas_sgemm", gemm);
    find(library, "cblas_sgemv", gemv);
    find(library, "openblas_get_corename", core_name);
  }

  decltype(&cblas_sgemm) gemm = nullptr;
  decltype(&cblas_sgemv) gemv = nullptr;
  decltype(&openblas_get_corename) core_name = nullptr;

 private:
  static void set_environment() {
    constexpr int keep = 0;
    ::setenv("OPENBLAS_NUM_THREADS", "1", keep);
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd"))
      ::setenv("OPENBLAS_CORETYPE", "SkylakeX", keep);
    else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
      ::setenv("OPENBLAS_CORETYPE", "Haswell", keep);
#endif
  }

  template <class F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(::dlsym(library, name));
    if (function == nullptr) throw bad_input(std::string("OpenBLAS has no function ") + name);
  }
};

const openblas& blas() {
  static const openblas library;
  return library;
}

/// Rows of weights for one call. Below OpenBLAS's limit of a million multiplications it has kernels that do not copy
/// the weights first, and with few rows of x that copy is most of the time; with many it pays.
std::size_t rows_per_call(std::size_t x_rows, std::size_t columns, std::size_t weight_rows) noexcept {
  constexpr std::size_t few = 24;
  constexpr std::size_t small = 1'000'000;
  constexpr std::size_t grain = 16;
  if (x_rows > few) return weight_rows;
  return std::max(grain, small / (x_rows * columns) / grain * grain);
}

}  // namespace

void multiply(kvcache::thread_pool& workers, matrix_view<const float> x, matrix_view<const float> weights,
              matrix_view<float> out) {
  if (x.rows == 0) return;
  const openblas& library = blas();
  const auto as_int = [](std::size_t n) { return static_cast<blasint>(n); };
  workers.run([&](unsigned ith, unsigned nth) {
    const share mine = share_of(weights.rows, 16, ith, nth);
    if (mine.begin == mine.end) return;
    if (x.rows == 1) {
      library.gemv(CblasRowMajor, CblasNoTrans, as_int(mine.end - mine.begin), as_int(weights.columns), 1.0f,
                   weights.data + mine.begin * weights.stride, as_int(weights.stride), x.data, 1, 0.0f,
                   out.data + mine.begin, 1);
      return;
    }
    const std::size_t step = rows_per_call(x.rows, weights.columns, mine.end - mine.begin);
    for (std::size_t row = mine.begin; row < mine.end; row += step) {
      library.gemm(CblasRowMajor, CblasNoTrans, CblasTrans, as_int(x.rows), as_int(std::min(step, mine.end - row)),
                   as_int(weights.columns), 1.0f, x.data, as_int(x.stride), weights.data + row * weights.stride,
                   as_int(weights.stride), 0.0f, out.data + row, as_int(out.stride));
    }
  });
}

std::string blas_core() { return blas().core_name(); }

}  // namespace engine
