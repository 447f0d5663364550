// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Version of the library. CMake reads these three lines, so they are the only place that states it.
#define KVCACHE_VERSION_MAJOR 0
#define KVCACHE_VERSION_MINOR 1
#define KVCACHE_VERSION_PATCH 0
