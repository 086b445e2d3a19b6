#pragma once

// KV-cache blocks of one worker epoch: who owns each block, and which blocks hold a known prefix.
//
// A cache group is a set of layers that share a block table; a sequence has one table a group. A
// block is free, cached (content known, used by nobody: it can be reused or taken away) or used by
// one or more sequences. The prefix cache is a tree: an entry is one full block of tokens under a
// parent entry, the roots are kept apart by tenant. A match compares the tokens themselves along
// the path, so that a hash collision cannot hand out wrong keys and values.
//
// Entries live from Publish until their blocks are needed for something else, least recently used
// first, tails of a path before its beginning. The cache is on only if all groups keep every token
// (full, indexer) in blocks of one size.
//
// Thread safety: one owner. Counts are blocks unless a name says tokens.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tandem::gateway {

using BlockId = uint32_t;

struct BlockGroup {
  uint32_t block_tokens = 0;
  uint32_t block_count = 0;
  // False for groups that forget tokens (window, recurrent state): they rule out the prefix cache.
  bool keeps_all_tokens = true;
};

// One table a group; entry i holds tokens [i * block_tokens, (i + 1) * block_tokens).
using BlockTables = std::vector<std::vector<BlockId>>;

// How far a sequence's blocks are part of the prefix tree.
struct PrefixPath {
  std::string tenant = {};
  bool enabled = true;
  uint64_t parent = 0;  // serial of the last entry; 0: at the root
  uint32_t blocks = 0;  // entries from the root
};

class KvBlocks {
 public:
  KvBlocks(std::vector<BlockGroup> groups, bool prefix_cache);

  size_t groups() const { return groups_.size(); }
  bool prefix_cache() const { return prefix_cache_; }
  uint32_t BlocksFor(size_t group, uint64_t tokens) const;
  // Blocks that can be handed out now: free and cached ones.
  uint32_t available(size_t group) const { return groups_[group].available; }
  uint32_t total(size_t group) const { return groups_[group].spec.block_count; }
  size_t cached_entries() const { return entries_.size(); }

  // Extends `tables` to hold `tokens` tokens in every group, or changes nothing and returns false.
  bool Extend(uint64_t tokens, BlockTables* tables);
  // Gives the blocks of `tables` back and empties it.
  void Release(BlockTables* tables);

  // Appends the blocks of the longest known prefix of `tokens`, at most `max_blocks`, to empty
  // `tables` and moves `path` behind them. Returns the number of tokens found.
  uint32_t Match(std::span<const uint32_t> tokens, uint32_t max_blocks, PrefixPath* path,
                 BlockTables* tables);
  // Makes the full blocks of `tokens` behind `path` known. REQUIRES: their contents are computed.
  void Publish(std::span<const uint32_t> tokens, const BlockTables& tables, PrefixPath* path);
  // Forgets what is known of the blocks of `tables`: their contents are not to be trusted.
  void Forget(const BlockTables& tables);

  // What is wrong with the books, empty if nothing. `users` are the tables of all sequences.
  std::string Audit(std::span<const BlockTables* const> users) const;

 private:
  struct Entry {
    uint64_t serial = 0;
    uint64_t parent = 0;
    std::string tenant;  // roots only
    std::vector<uint32_t> tokens;
    std::vector<BlockId> blocks;  // one a group
  };
  // Intrusive list node and state of one block.
  struct Block {
    uint32_t users = 0;
    Entry* entry = nullptr;
    BlockId prev = 0;
    BlockId next = 0;
  };
  struct Group {
    BlockGroup spec;
    std::vector<Block> blocks;  // the two nodes behind the last are heads of the lists
    uint32_t available = 0;
  };
  using Index = std::unordered_multimap<size_t, std::unique_ptr<Entry>>;

  BlockId FreeHead(const Group& group) const { return group.spec.block_count; }
  BlockId CachedHead(const Group& group) const { return group.spec.block_count + 1; }
  void Unlink(Group* group, BlockId id);
  void LinkBefore(Group* group, BlockId position, BlockId id);
  BlockId Take(Group* group);
  void AddUser(Group* group, BlockId id);
  void DropUser(Group* group, BlockId id);
  const Entry* Find(const PrefixPath& path, std::span<const uint32_t> tokens) const;
  static size_t HashOf(uint64_t parent, std::string_view tenant, std::span<const uint32_t> tokens);
  void Erase(Entry* entry);

  std::vector<Group> groups_;
  bool prefix_cache_;
  uint64_t next_serial_ = 1;
  Index entries_;
};

}  // namespace tandem::gateway
