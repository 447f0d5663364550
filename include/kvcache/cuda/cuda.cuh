// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Everything that runs on a CUDA device: needs nvcc and the CUDA Toolkit, 12.4 or later.
#include <kvcache/cuda/alignment.hpp>
#include <kvcache/cuda/allocators.cuh>
#include <kvcache/cuda/append_rows.hpp>
#include <kvcache/cuda/attention_merge.hpp>
#include <kvcache/cuda/attention_tile.hpp>
#include <kvcache/cuda/attention_vector.hpp>
#include <kvcache/cuda/check.cuh>
#include <kvcache/cuda/copy_blocks.hpp>
#include <kvcache/cuda/device_context.cuh>
#include <kvcache/cuda/fill_blocks.hpp>
#include <kvcache/cuda/gather_blocks.hpp>
#include <kvcache/cuda/launch.cuh>
#include <kvcache/cuda/packed_plan.hpp>
#include <kvcache/cuda/seal_blocks.hpp>
