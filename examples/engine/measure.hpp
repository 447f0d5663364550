// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "opened_model.hpp"
#include "options.hpp"

namespace engine {

/// `--perplexity`: measures what the dtypes of KV do to the model over a text, and prints it. Throws bad_input where
/// the text or the options cannot be used.
void measure(const options& o, opened_model& model);

}  // namespace engine
