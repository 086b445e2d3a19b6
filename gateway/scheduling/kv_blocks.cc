#include "gateway/scheduling/kv_blocks.h"

#include <algorithm>
#include <utility>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/base/check.h"

namespace tandem::gateway {
namespace {

bool CanCachePrefixes(const std::vector<BlockGroup>& groups) {
  return !groups.empty() && std::all_of(groups.begin(), groups.end(), [&](const BlockGroup& group) {
    return group.keeps_all_tokens && group.block_tokens == groups.front().block_tokens;
  });
}

}  // namespace

KvBlocks::KvBlocks(std::vector<BlockGroup> groups, bool prefix_cache)
    : prefix_cache_(prefix_cache && CanCachePrefixes(groups)) {
  for (const BlockGroup& spec : groups) {
    TANDEM_CHECK(spec.block_tokens > 0);
    Group group{.spec = spec, .blocks = {}, .available = spec.block_count};
    group.blocks.resize(size_t{spec.block_count} + 2);
    for (const BlockId head : {FreeHead(group), CachedHead(group)}) {
      group.blocks[head].prev = group.blocks[head].next = head;
    }
    for (BlockId id = 0; id < spec.block_count; ++id) LinkBefore(&group, FreeHead(group), id);
    groups_.push_back(std::move(group));
  }
}

uint32_t KvBlocks::BlocksFor(size_t group, uint64_t tokens) const {
  const uint64_t size = groups_[group].spec.block_tokens;
  return static_cast<uint32_t>((tokens + size - 1) / size);
}

bool KvBlocks::Extend(uint64_t tokens, BlockTables* tables) {
  tables->resize(groups_.size());
  for (size_t g = 0; g < groups_.size(); ++g) {
    const size_t have = (*tables)[g].size();
    const size_t need = BlocksFor(g, tokens);
    if (need > have && need - have > groups_[g].available) return false;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    std::vector<BlockId>& table = (*tables)[g];
    for (size_t need = BlocksFor(g, tokens); table.size() < need;) {
      table.push_back(Take(&groups_[g]));
    }
  }
  return true;
}

void KvBlocks::Release(BlockTables* tables) {
  for (size_t g = 0; g < tables->size(); ++g) {
    std::vector<BlockId>& table = (*tables)[g];
    // The last block first: it becomes the least recently used one of this path.
    while (!table.empty()) {
      DropUser(&groups_[g], table.back());
      table.pop_back();
    }
  }
}

uint32_t KvBlocks::Match(std::span<const uint32_t> tokens, uint32_t max_blocks, PrefixPath* path,
                         BlockTables* tables) {
  tables->resize(groups_.size());
  if (!prefix_cache_ || !path->enabled) return 0;
  const uint32_t size = groups_.front().spec.block_tokens;
  const uint32_t limit =
      std::min<uint32_t>(max_blocks, static_cast<uint32_t>(tokens.size()) / size);
  uint32_t found = 0;
  for (; found < limit; ++found) {
    const Entry* entry = Find(*path, tokens.subspan(size_t{found} * size, size));
    if (entry == nullptr) break;
    for (size_t g = 0; g < groups_.size(); ++g) {
      AddUser(&groups_[g], entry->blocks[g]);
      (*tables)[g].push_back(entry->blocks[g]);
    }
    path->parent = entry->serial;
    ++path->blocks;
  }
  return found * size;
}

void KvBlocks::Publish(std::span<const uint32_t> tokens, const BlockTables& tables,
                       PrefixPath* path) {
  if (!prefix_cache_ || !path->enabled) return;
  const uint32_t size = groups_.front().spec.block_tokens;
  while (size_t{path->blocks + 1} * size <= tokens.size()) {
    const std::span<const uint32_t> block = tokens.subspan(size_t{path->blocks} * size, size);
    // Computed twice at the same time: the path goes on behind the entry that came first, and this
    // copy of the block stays private.
    if (const Entry* known = Find(*path, block)) {
      path->parent = known->serial;
      ++path->blocks;
      continue;
    }
    auto entry = std::make_unique<Entry>();
    entry->serial = next_serial_++;
    entry->parent = path->parent;
    if (path->parent == 0) entry->tenant = path->tenant;
    entry->tokens.assign(block.begin(), block.end());
    for (size_t g = 0; g < groups_.size(); ++g) {
      const BlockId id = tables[g][path->blocks];
      TANDEM_CHECK(groups_[g].blocks[id].entry == nullptr);
      groups_[g].blocks[id].entry = entry.get();
      entry->blocks.push_back(id);
    }
    path->parent = entry->serial;
    ++path->blocks;
    const size_t hash = HashOf(entry->parent, entry->tenant, entry->tokens);
    entries_.emplace(hash, std::move(entry));
  }
}

void KvBlocks::Forget(const BlockTables& tables) {
  for (size_t g = 0; g < tables.size(); ++g) {
    for (const BlockId id : tables[g]) {
      if (Entry* entry = groups_[g].blocks[id].entry) Erase(entry);
    }
  }
}

void KvBlocks::Unlink(Group* group, BlockId id) {
  Block& block = group->blocks[id];
  group->blocks[block.prev].next = block.next;
  group->blocks[block.next].prev = block.prev;
}

void KvBlocks::LinkBefore(Group* group, BlockId position, BlockId id) {
  Block& block = group->blocks[id];
  block.prev = group->blocks[position].prev;
  block.next = position;
  group->blocks[block.prev].next = id;
  group->blocks[position].prev = id;
}

// REQUIRES: one is available.
BlockId KvBlocks::Take(Group* group) {
  TANDEM_CHECK(group->available > 0);
  const BlockId head = FreeHead(*group);
  if (group->blocks[head].next == head) {
    // Nothing free: the cached block that was used longest ago gives way.
    Erase(group->blocks[group->blocks[CachedHead(*group)].next].entry);
  }
  const BlockId id = group->blocks[head].next;
  Unlink(group, id);
  group->blocks[id].users = 1;
  --group->available;
  return id;
}

void KvBlocks::AddUser(Group* group, BlockId id) {
  Block& block = group->blocks[id];
  if (block.users++ == 0) {
    Unlink(group, id);
    --group->available;
  }
}

void KvBlocks::DropUser(Group* group, BlockId id) {
  Block& block = group->blocks[id];
  TANDEM_CHECK(block.users > 0);
  if (--block.users > 0) return;
  ++group->available;
  // Free blocks are reused last in, first out; cached ones first in, first out.
  if (block.entry == nullptr) {
    LinkBefore(group, group->blocks[FreeHead(*group)].next, id);
  } else {
    LinkBefore(group, CachedHead(*group), id);
  }
}

const KvBlocks::Entry* KvBlocks::Find(const PrefixPath& path,
                                      std::span<const uint32_t> tokens) const {
  const std::string_view tenant = path.parent == 0 ? path.tenant : std::string_view();
  const auto [begin, end] = entries_.equal_range(HashOf(path.parent, tenant, tokens));
  for (auto it = begin; it != end; ++it) {
    const Entry& entry = *it->second;
    if (entry.parent == path.parent && entry.tenant == tenant &&
        std::equal(entry.tokens.begin(), entry.tokens.end(), tokens.begin(), tokens.end())) {
      return &entry;
    }
  }
  return nullptr;
}

size_t KvBlocks::HashOf(uint64_t parent, std::string_view tenant,
                        std::span<const uint32_t> tokens) {
  return absl::HashOf(parent, absl::string_view(tenant.data(), tenant.size()),
                      absl::MakeConstSpan(tokens.data(), tokens.size()));
}

void KvBlocks::Erase(Entry* entry) {
  for (size_t g = 0; g < groups_.size(); ++g) {
    Group* group = &groups_[g];
    Block& block = group->blocks[entry->blocks[g]];
    block.entry = nullptr;
    if (block.users > 0) continue;
    Unlink(group, entry->blocks[g]);
    LinkBefore(group, group->blocks[FreeHead(*group)].next, entry->blocks[g]);
  }
  const auto [begin, end] =
      entries_.equal_range(HashOf(entry->parent, entry->tenant, entry->tokens));
  const auto it =
      std::find_if(begin, end, [&](const auto& item) { return item.second.get() == entry; });
  TANDEM_CHECK(it != end);
  entries_.erase(it);
}

std::string KvBlocks::Audit(std::span<const BlockTables* const> users) const {
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    std::vector<uint32_t> counted(group.spec.block_count, 0);
    for (const BlockTables* tables : users) {
      if (tables->size() <= g) continue;
      for (const BlockId id : (*tables)[g]) ++counted[id];
    }
    uint32_t unused = 0;
    for (BlockId id = 0; id < group.spec.block_count; ++id) {
      unused += counted[id] == 0 ? 1 : 0;
      if (counted[id] != group.blocks[id].users) {
        return absl::StrCat("group ", g, " block ", id, ": ", group.blocks[id].users,
                            " users on the books, ", counted[id], " in tables");
      }
      if (counted[id] > 1 && group.blocks[id].entry == nullptr && prefix_cache_ == false) {
        return absl::StrCat("group ", g, " block ", id, ": shared without a prefix cache");
      }
    }
    uint32_t listed = 0;
    for (const BlockId head : {FreeHead(group), CachedHead(group)}) {
      for (BlockId id = group.blocks[head].next; id != head; id = group.blocks[id].next) {
        ++listed;
        const bool cached = group.blocks[id].entry != nullptr;
        if (cached != (head == CachedHead(group))) {
          return absl::StrCat("group ", g, " block ", id, ": in the wrong list");
        }
      }
    }
    if (unused != group.available || listed != group.available) {
      return absl::StrCat("group ", g, ": ", group.available, " available, ", unused, " unused, ",
                          listed, " listed");
    }
  }
  return "";
}

}  // namespace tandem::gateway
