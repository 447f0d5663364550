// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.hpp"

#include "bad_input.hpp"
#include "kv_kinds.hpp"

#include <algorithm>
#include <string>

namespace engine {
namespace {

std::string listed(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

const kv_kind& find_kv_kind(const std::string& dtype) {
  const std::size_t colon = dtype.find(':');
  // What is the same for both has one name.
  const bool same = colon != std::string::npos && dtype.substr(0, colon) == dtype.substr(colon + 1);
  const std::string name = same ? dtype.substr(0, colon) : dtype;
  for (const kv_kind& kind : kv_kinds())
    if (kind.name == name) return kind;
  throw bad_input("KV dtype '" + dtype.substr(0, 80) + "' is not compiled in; give one name for K and V, or K:V, of " +
                  listed(kv_dtype_names()));
}

}  // namespace

void validate_block_size(std::uint32_t block_size) {
  if (std::find(block_sizes.begin(), block_sizes.end(), block_size) != block_sizes.end()) return;
  std::string known;
  for (const std::uint32_t size : block_sizes) known += (known.empty() ? "" : ", ") + std::to_string(size);
  throw bad_input("block size is " + std::to_string(block_size) + ", choose one of " + known);
}

std::vector<std::string> kv_dtype_names() {
  std::vector<std::string> out;
  for (const kv_kind& kind : kv_kinds()) out.push_back(kind.name);
  return out;
}

std::string canonical_kv_dtype(const std::string& dtype) { return find_kv_kind(dtype).name; }

std::unique_ptr<kv_cache> make_kv_cache(const llama_shape& shape, const kv_options& options,
                                        kvcache::thread_pool& workers) {
  validate_block_size(options.block_size);
  return find_kv_kind(options.dtype).make(shape, options, workers);
}

}  // namespace engine
