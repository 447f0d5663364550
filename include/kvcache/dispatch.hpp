// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>

#include <string>
#include <type_traits>
#include <utility>

namespace kvcache {

/// A run-time value and the values it may turn into a template argument for.
template <auto... Values>
struct one_of {
  std::common_type_t<decltype(Values)...> value;

  template <class F>
  decltype(auto) visit(F&& f) const {
    using first = std::integral_constant<std::common_type_t<decltype(Values)...>, first_value>;
    using R = decltype(std::forward<F>(f)(first{}));
    return visit_from<R, Values...>(f);
  }

 private:
  template <auto V, auto...>
  struct head {
    static constexpr auto value = V;
  };
  static constexpr auto first_value = head<Values...>::value;

  template <class R, auto V, auto... Rest, class F>
  R visit_from(F& f) const {
    if (value == V) return f(std::integral_constant<std::common_type_t<decltype(Values)...>, V>{});
    if constexpr (sizeof...(Rest) > 0) {
      return visit_from<R, Rest...>(f);
    } else {
      std::string offered;
      ((offered += (offered.empty() ? "" : ", ") + std::to_string(Values)), ...);
      detail::raise<invalid_argument>("dispatch: " + std::to_string(value) + " is not compiled in; choose one of " +
                                      offered + " or add it to the dispatch");
    }
  }
};

/// A run-time dtype name and what it may stand for, element types and formats; the visitor receives
/// std::type_identity<T>.
template <stored_type... Types>
struct dtype_of {
  dtype_id id;

  template <class F>
  decltype(auto) visit(F&& f) const {
    using R = decltype(first_result<F, Types...>());
    return visit_from<R, Types...>(f);
  }

 private:
  template <class F, class T, class...>
  static auto first_result() -> decltype(std::declval<F&>()(std::type_identity<T>{}));

  template <class R, class T, class... Rest, class F>
  R visit_from(F& f) const {
    if (id == dtype_traits<T>::id) return f(std::type_identity<T>{});
    if constexpr (sizeof...(Rest) > 0) {
      return visit_from<R, Rest...>(f);
    } else {
      std::string offered;
      ((offered += std::string(offered.empty() ? "" : ", ") + dtype_traits<Types>::name), ...);
      detail::raise<invalid_argument>(std::string("dispatch: dtype ") + name(id) +
                                      " is not compiled in; choose one of " + offered + " or add it to the dispatch");
    }
  }
};

/// Calls `f` with one argument for each choice, of a type that carries the value: run-time sizes become template
/// arguments. Every combination is instantiated, so keep the lists short.
///
///     dispatch([&](auto block_size, auto k) { run<block_size.value, typename decltype(k)::type>(); },
///              one_of<16, 64>{options.block_size}, dtype_of<f16, bf16>{options.dtype});
///
/// Raises invalid_argument, naming the value and what is offered, where a value is in no list. O(sum of list lengths).
template <class F, class Choice, class... Choices>
decltype(auto) dispatch(F&& f, const Choice& choice, const Choices&... choices) {
  if constexpr (sizeof...(Choices) == 0) {
    return choice.visit(f);
  } else {
    return choice.visit([&](auto first) -> decltype(auto) {
      return dispatch([&](auto... rest) -> decltype(auto) { return f(first, rest...); }, choices...);
    });
  }
}

}  // namespace kvcache
