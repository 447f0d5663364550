// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>

namespace kvcache {

/// Any executor, without its type. Refers to it and owns nothing: the executor outlives the reference.
class executor_ref {
 public:
  using task = void (*)(void* context, unsigned ith, unsigned nth);

  executor_ref() noexcept = default;
  template <executor E>
  executor_ref(E& e) noexcept
      : object_(&e),
        threads_([](void* object) -> unsigned { return static_cast<E*>(object)->threads(); }),
        run_([](void* object, task t, void* context) {
          static_cast<E*>(object)->run([t, context](unsigned ith, unsigned nth) { t(context, ith, nth); });
        }) {}

  [[nodiscard]] explicit operator bool() const noexcept { return object_ != nullptr; }
  [[nodiscard]] unsigned threads() const { return threads_(object_); }
  /// f(ith, nth) once for each ith; returns when all have returned.
  template <class F>
  void run(F& f) const {
    run_(
        object_, [](void* context, unsigned ith, unsigned nth) { (*static_cast<F*>(context))(ith, nth); }, &f);
  }

 private:
  void* object_ = nullptr;
  unsigned (*threads_)(void*) = nullptr;
  void (*run_)(void*, task, void*) = nullptr;
};

}  // namespace kvcache
