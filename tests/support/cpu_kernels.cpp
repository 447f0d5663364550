// SPDX-License-Identifier: Apache-2.0
#define KVCACHE_KERNELS_EXTERN
#include "cpu_kernels.hpp"
