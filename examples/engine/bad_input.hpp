// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace engine {

/// What the user gave cannot be used: a file, an option, a request. The text is one sentence that names the value and
/// the limit it broke. At start-up the engine prints it and exits with 2; later it ends one request only.
class bad_input : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace engine
