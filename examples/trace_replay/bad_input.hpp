// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace replay {

/// What the user gave cannot be used; the text is one sentence that names value and limit.
class bad_input : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace replay
