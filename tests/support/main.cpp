// SPDX-License-Identifier: Apache-2.0
// The main function for Catch2 2; Catch2 3 brings its own as a library.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
