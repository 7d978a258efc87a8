// How the attention of a pass is cut into items that threads take one by one.
//
// Owns: the cut.  It moves work between threads and changes no result.  Does not know: how an item is computed.
#pragma once
#include "model.h"

#include <algorithm>
#include <vector>

namespace foredraft {

// Rows that share a block table are consecutive and belong to one sequence.
inline std::vector<AttentionItem> plan_attention(const Model& model, const Pass& pass, int max_queries, int num_threads) {
  const int group = model.heads / model.kv_heads;
  // As many queries together as can share their reads, but enough items that no thread waits long for another.
  const int fair = pass.num_rows * model.heads / (2 * num_threads);
  const int most = std::max(1, std::min(max_queries, fair));
  std::vector<AttentionItem> items;
  for (int first = 0, end; first < pass.num_rows; first = end) {
    for (end = first + 1; end < pass.num_rows && pass.table_of[end] == pass.table_of[first];) ++end;
    // Of equal size, and those of one key-value head after each other: what they share stays in the cache.
    const int queries = (end - first) * group, parts = (queries + most - 1) / most, each = (queries + parts - 1) / parts;
    for (int head = 0; head < model.kv_heads; ++head)
      for (int start = 0; start < queries; start += each) items.push_back({first, head, start, std::min(each, queries - start)});
  }
  return items;
}

}  // namespace foredraft
