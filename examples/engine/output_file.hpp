// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace engine {

/// Before anything costs time: throws bad_input where nothing can be written to `path`. Makes the file where there is
/// none and leaves what is in it.
void check_writable(const std::string& path);

/// Throws bad_input where the text cannot be written as a whole.
void write_file(const std::string& path, const std::string& text);

/// At the end of a run, where alone it is known whether all that was printed has gone out: throws bad_input where not.
void check_standard_output();

}  // namespace engine
