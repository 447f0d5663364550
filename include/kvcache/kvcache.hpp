// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Every host header that needs only the standard library. The kernels of attention come with
/// <kvcache/attention/cpu/cpu.hpp>, which brings threads; of the eviction policies only the default one is here, the
/// others come with headers of their own.

#include <kvcache/any_storage.hpp>
#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/reference.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/blocks/event_log.hpp>
#include <kvcache/cache.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/dispatch.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/events.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/key_offset.hpp>
#include <kvcache/layout/hnd.hpp>
#include <kvcache/layout/nhd.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/memory/mapped_file_allocator.hpp>
#include <kvcache/observe/histogram.hpp>
#include <kvcache/observe/hit_window.hpp>
#include <kvcache/observe/observed.hpp>
#include <kvcache/observe/prometheus.hpp>
#include <kvcache/observe/prometheus_text.hpp>
#include <kvcache/observe/reuse_distances.hpp>
#include <kvcache/observe/storm_alarm.hpp>
#include <kvcache/policies.hpp>
#include <kvcache/schedule/scheduler.hpp>
#include <kvcache/storage.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/version.hpp>
#include <kvcache/views.hpp>
