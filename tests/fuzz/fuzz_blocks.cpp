// SPDX-License-Identifier: Apache-2.0
// The random driver of the block manager, decided by a fuzzer: the first bytes say what pool it is, all others what is
// called with what. Every call is held against the driver's model.
#include "../blocks/random_driver.hpp"

#include <kvcache/eviction/priority.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "../eviction/policies.hpp"
#include "byte_choices.hpp"

using namespace kvcache_test;
using kvcache::layer_group;

namespace {

random_load load_from(byte_choices& choices) {
  constexpr std::uint32_t block_sizes[]{1, 2, 3, 4, 8};
  constexpr unsigned hash_bits[]{64, 0, 2, 8};
  const auto block_size = [&] { return block_sizes[choices.below(5)]; };
  random_load load;
  load.blocks = 1 + choices.below(40);
  load.partial_reuse = choices.below(2) == 1;
  load.hash_bits = hash_bits[choices.below(4)];
  load.alphabet = static_cast<std::int32_t>(1 + choices.below(3));
  load.groups.resize(1 + choices.below(3));
  load.groups[0].block_size = block_size();
  std::uint32_t least_window = 2;  // of one group: were it 1 in all, nothing would have to be cached
  for (layer_group& g : load.groups) {
    g.block_size = load.partial_reuse ? load.groups[0].block_size : block_size();
    g.window = choices.below(2) == 0 ? layer_group::full : least_window + choices.below(20);
    least_window = 1;
    if (choices.below(3) != 0) continue;
    g.tail_blocks = 1 + choices.below(12);
    g.wide_tokens = choices.below(2) == 0 ? 0 : choices.below(2 * g.block_size + 1);
  }
  return load;
}

std::string shown(const random_load& load) {
  std::ostringstream text;
  text << ".blocks = " << load.blocks << ", .groups = {";
  for (const layer_group& g : load.groups) {
    text << "{.block_size = " << g.block_size;
    if (g.window != layer_group::full) text << ", .window = " << g.window;
    if (g.tail_blocks != 0) text << ", .tail_blocks = " << g.tail_blocks << ", .wide_tokens = " << g.wide_tokens;
    text << '}';
  }
  text << "}, .hash_bits = " << load.hash_bits << ", .alphabet = " << load.alphabet
       << ", .partial_reuse = " << load.partial_reuse;
  return text.str();
}

template <class Eviction>
void drive(const random_load& load, byte_choices choices) {
  INFO(Eviction::name << ", " << shown(load));
  random_driver<kvcache::block_manager<Eviction>, byte_choices> driver(load, choices);
  driver.run((std::numeric_limits<std::size_t>::max)());
  driver.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  byte_choices choices({data, size});
  const random_load load = load_from(choices);
  switch (choices.below(4)) {
    case 0: drive<kvcache::lru>(load, choices); break;
    case 1: drive<kvcache::priority>(load, choices); break;
    case 2: drive<mru>(load, choices); break;
    default: drive<lowest_id>(load, choices);
  }
  return 0;
}
