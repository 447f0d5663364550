// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace kvcache {

// memory
class aligned_allocator;
class huge_page_allocator;
class mapped_file_allocator;

// layout
struct nhd;
struct hnd;

// eviction
class arc;
class lfu;
class gittins;
class lru;
class lru_k;
class priority;
class s3fifo;
class tiny_lfu;

// attention variants and backends
struct causal;
struct cpu_backend;

// the three parts, and what composes the first two
template <class Eviction = lru>
class block_manager;
template <class Policies>
class storage;
class any_storage;
template <class Policies>
class attention;
template <class Policies, class... Groups>
class cache;

}  // namespace kvcache
