// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

#include "bad_input.hpp"
#include "optimal.hpp"

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/eviction/arc.hpp>
#include <kvcache/eviction/gittins.hpp>
#include <kvcache/eviction/lfu.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/eviction/lru_k.hpp>
#include <kvcache/eviction/s3fifo.hpp>
#include <kvcache/eviction/tiny_lfu.hpp>

#include <algorithm>
#include <deque>
#include <stdexcept>

namespace replay {
namespace {

constexpr std::uint32_t units = 2;

template <class Eviction>
std::size_t replayed(const trace& all, const pool& how, const progress& report) {
  const std::uint32_t blocks = how.blocks;
  // Two units of content make a block of the trace, so that half a block can stand for the end of a request, which is
  // never cached: of a request, something is always left to compute.
  kvcache::block_manager<Eviction> manager(
      {.blocks = blocks, .block_size = units, .unit_tokens = how.block_tokens / units});
  std::size_t hits = 0;
  request content;
  std::deque<kvcache::sequence_id> running;
  const auto end_oldest = [&] {
    if (!manager.close(running.front())) throw std::logic_error("an open sequence could not be closed");
    running.pop_front();
  };
  const auto compute = [&](kvcache::sequence_id sequence, kvcache::content_view computed) {
    const kvcache::want rest{sequence, static_cast<std::uint32_t>(computed.size())};
    auto step = manager.begin({&rest, 1});
    if (!step || !step->accept() || !manager.commit(sequence, computed) || !manager.retire(*step))
      throw std::logic_error("a step of a request that fits failed");
  };
  for (std::size_t r = 0; r < all.requests.size(); ++r) {
    if (report) report(r);
    const request& wanted = all.requests[r];
    const auto size = static_cast<std::uint32_t>(wanted.size() < blocks ? wanted.size() : blocks);
    if (size == 0) continue;
    while (running.size() >= how.at_once) end_oldest();
    content.clear();
    for (std::uint32_t i = 0; i < size; ++i) content.insert(content.end(), units, wanted[i]);
    const std::size_t whole = content.size();
    if (size < blocks) content.push_back(0);  // what fills the pool has no room for an end, and computes its last block
    const kvcache::open_request request{.content = content, .reserve = size * units};
    while (!running.empty() && !manager.predict(request).fits()) end_oldest();
    hits += manager.probe(kvcache::content_view(content).sub(0, whole)).tokens / units;
    const auto opened = manager.open(request);
    if (!opened) throw std::logic_error("a request did not fit an idle pool");
    running.push_back(opened->sequence);
    compute(opened->sequence,
            kvcache::content_view(content).sub(opened->reused_tokens, size * units - opened->reused_tokens));
    if (r < all.outputs.size() && size < blocks && !all.outputs[r].empty()) {
      content.clear();
      for (std::size_t i = 0; i < std::min<std::size_t>(all.outputs[r].size(), blocks - size); ++i)
        content.insert(content.end(), units, all.outputs[r][i]);
      while (running.size() > 1 && content.size() / units > manager.counts().available()) end_oldest();
      compute(opened->sequence, content);
    }
  }
  return hits;
}

struct policy {
  std::string name;
  std::size_t (*hits)(const trace&, const pool&, const progress&);
};

template <class... Evictions>
std::vector<policy> table_of() {
  std::vector<policy> all{{Evictions::name, &replayed<Evictions>}...};
  all.push_back(
      {"optimal", [](const trace& t, const pool& how, const progress&) { return optimal_hits(t, how.blocks); }});
  return all;
}

const std::vector<policy>& policies() {
  static const std::vector<policy> all = table_of<kvcache::gittins, kvcache::lru, kvcache::lfu, kvcache::lru_k,
                                                  kvcache::arc, kvcache::s3fifo, kvcache::tiny_lfu>();
  return all;
}

}  // namespace

const std::vector<std::string>& known_policies() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> n;
    for (const policy& p : policies()) n.push_back(p.name);
    return n;
  }();
  return names;
}

std::size_t hits(const std::string& name, const trace& all, const pool& how, const progress& report) {
  for (const policy& p : policies())
    if (p.name == name) return p.hits(all, how, report);
  std::string known;
  for (const policy& p : policies()) known += (known.empty() ? "" : ", ") + p.name;
  throw bad_input("eviction '" + name + "' is not known; choose of " + known);
}

}  // namespace replay
