// Drafting from texts, the quick form: foredraft/drafters/{suffix,ngram}.py say what is computed and why, and this equals them to the bit.
//
// Owns: the indexes of one request's tokens, and the loop that makes a draft.  Does not know: the layout of the ring of earlier requests,
// or how a table is made; it is told where a document begins, and reads the arrays.
#include "suffix.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace nb = nanobind;

namespace foredraft {

namespace {

template <typename T>
using View = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int kAnchors[] = {8, 4, 2, 1};
constexpr int kNumAnchors = 4, kLongestAnchor = 8;
constexpr int kMaxOccurrences = 16, kMaxVisited = 48, kMaxLevels = 10, kLongMatch = 16;
constexpr int kShared = 5, kBase = 10, kCellsPerGroup = 32;
constexpr int kMaxOrder = 6, kCheckBits = 16, kKeyBits = 64;
constexpr double kLeastLeft = 0.15, kShareUnit = 255.0, kPriorWeight = 6.0, kMaxPromised = 1024.0;
constexpr uint64_t kMultiplier = 0x9E3779B97F4A7C15ull;

uint64_t extended(uint64_t key, int token) {
  key = (key ^ uint64_t(token + 1)) * kMultiplier;
  return key ^ key >> 29;
}

int bit_length(int value) {
  int length = 0;
  for (; value > 0; value >>= 1) ++length;
  return length;
}

int counts_cell(int group, int total, int kinds) {
  const int kind = kinds == 1 ? 0 : 4 * kinds <= total ? 1 : 5 * kinds <= 3 * total ? 2 : 3;
  return (group * 8 + std::min(bit_length(total - 1), 7)) * 4 + kind;
}

// ------------------------------------------------------------------------------------------------ where a text occurred

struct Ends {
  std::array<int, kMaxOccurrences> at;
  int size = 0;
};

// Occurrences that match ``length`` tokens, most recent first, and what followed each; see suffix._Level.
struct Level {
  bool own;
  int length;
  Ends ends;
  std::array<int, kMaxOccurrences> successors;
};

// One request's tokens; see suffix_statistics.RequestStatistics.
class SuffixText {
 public:
  void extend(nb::list all) {
    for (size_t end = tokens_.size(), size = nb::len(all); end < size; ++end) {
      tokens_.push_back(nb::cast<int>(all[end]));
      uint64_t key = 0;
      for (int n = 1, anchor = kNumAnchors - 1; n <= kLongestAnchor; ++n) {
        const bool fits = n <= int(end) + 1;
        if (fits) key = extended(key, tokens_[end + 1 - n]);
        if (n != kAnchors[anchor]) continue;
        int previous = -1;
        if (fits) {
          auto [found, is_new] = last_[anchor].try_emplace(key, int(end));
          if (!is_new) previous = std::exchange(found->second, int(end));
        }
        previous_[anchor--].push_back(previous);
      }
    }
  }

  Ends ends(int anchor) const { return chain(anchor, previous_[anchor].empty() ? -1 : previous_[anchor].back()); }

  Ends ends_after(int token) const {
    const auto found = last_[kNumAnchors - 1].find(extended(0, token));
    return chain(kNumAnchors - 1, found == last_[kNumAnchors - 1].end() ? -1 : found->second);
  }

  const std::vector<int>& tokens() const { return tokens_; }

  // The last draft, made when there were ``base`` tokens.
  size_t base = 0;
  std::vector<int> drafted, cells;
  std::vector<double> promises;

 private:
  Ends chain(int anchor, int end) const {
    Ends found;
    for (; end >= 0 && found.size < kMaxOccurrences; end = previous_[anchor][end]) found.at[found.size++] = end;
    return found;
  }

  std::vector<int> tokens_;
  std::array<std::unordered_map<uint64_t, int>, kNumAnchors> last_;
  std::array<std::vector<int>, kNumAnchors> previous_;
};

// Other requests' outputs; see suffix_statistics.SharedStatistics, whose arrays these are.
struct SharedView {
  View<int32_t> tokens, owner;
  std::vector<View<int32_t>> back;
  std::vector<View<int64_t>> heads;

  // Chains the tokens of a document of tenant ``number``, the first of which is at position ``first``.
  void index(int64_t number, const std::vector<int>& document, int64_t first, int64_t oldest) {
    const int64_t slot = first % (int64_t(tokens.shape(0)) - 1);
    for (size_t end = 0; end < document.size(); ++end) {
      uint64_t key = uint64_t(number);
      for (int n = 1, anchor = kNumAnchors - 1; n <= kLongestAnchor; ++n) {
        const bool fits = n <= int(end) + 1;
        if (fits) key = extended(key, document[end + 1 - n]);
        if (n != kAnchors[anchor]) continue;
        int32_t& distance = back[anchor](slot + end);
        distance = 0;
        if (fits) {
          int64_t& head = heads[anchor](key % heads[anchor].shape(0));
          if (head >= oldest) distance = int32_t(first + int64_t(end) - head);
          head = first + int64_t(end);
        }
        --anchor;
      }
    }
  }

  Ends ends(int anchor, const int* suffix, int size, int64_t active, int64_t oldest) const {
    Ends found;
    const int n = kAnchors[anchor];
    if (size < n) return found;
    const int* wanted = suffix + size - n;
    uint64_t key = uint64_t(active);
    for (int i = n - 1; i >= 0; --i) key = extended(key, wanted[i]);
    const int64_t num_slots = int64_t(tokens.shape(0)) - 1;
    int64_t position = heads[anchor](key % heads[anchor].shape(0));
    for (int visited = 0; visited < kMaxVisited && position >= oldest; ++visited) {
      const int64_t slot = position % num_slots;
      // Other n-grams and other tenants share the chain when their keys do.
      if (owner(slot) == active && slot + 1 >= n && std::equal(wanted, wanted + n, tokens.data() + slot + 1 - n)) {
        found.at[found.size++] = int(slot);
      }
      const int64_t distance = back[anchor](slot);
      if (!distance || found.size == kMaxOccurrences) break;
      position -= distance;
    }
    return found;
  }
};

struct Match {
  int order, cell;
  size_t start, stop;
};

// The n-grams of one request's tokens, all n up to a most; see ngram._Index.
class NgramIndex {
 public:
  explicit NgramIndex(int most) : nodes_(most + 1, 0), previous_(most + 1) {}

  size_t num_tokens() const { return tokens_.size(); }

  void extend(nb::list all) {
    for (size_t position = tokens_.size(), size = nb::len(all); position < size; ++position) {
      const int token = nb::cast<int>(all[position]);
      tokens_.push_back(token);
      // Longest first: the node for n is a child of the old node for n - 1.
      for (int n = int(nodes_.size()) - 1; n > 0; --n) {
        if (n > int(position) + 1) {
          previous_[n].push_back(-1);
          continue;
        }
        const auto [found, is_new] = children_.try_emplace(uint64_t(nodes_[n - 1]) << 32 | uint32_t(token), int(last_end_.size()));
        if (is_new) last_end_.push_back(-1);
        nodes_[n] = found->second;
        previous_[n].push_back(std::exchange(last_end_[found->second], int(position)));
      }
    }
  }

  // Where the n-gram that ends at position ``end`` (-1: at the last one) ended before; -1 for nowhere.
  int before(int n, int end) const {
    const auto& previous = previous_[n];
    return previous.empty() ? -1 : end < 0 ? previous.back() : previous[end];
  }

  // How many tokens up to ``end`` equal the last ones: ``known`` at least, counted up to ``most``.
  int match_length(int end, int known, int most) const {
    const int limit = std::min(most, end + 1);
    while (known < limit && tokens_[end - known] == tokens_[tokens_.size() - 1 - known]) ++known;
    return known;
  }

 private:
  std::vector<int> tokens_;
  std::unordered_map<uint64_t, int> children_;
  std::vector<int> last_end_{-1}, nodes_;
  std::vector<std::vector<int>> previous_;
};

// Statistics of the target's own texts; see ngram_table.NgramTable.
struct TableView {
  nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> tokens;
  View<const uint8_t> shares, lengths, cells;
  View<const uint16_t> checks;
  View<const uint32_t> first_context, first_successor;
  int bits;

  int token(size_t index) const {
    return tokens.itemsize() == 2 ? static_cast<const uint16_t*>(tokens.data())[index]
                                  : int(static_cast<const uint32_t*>(tokens.data())[index]);
  }

  // The known contexts that end ``recent``, the shortest first.
  int matches(const std::vector<int>& recent, std::array<Match, kMaxOrder>& found) const {
    uint64_t key = 0;
    int order = 0;
    for (; order < kMaxOrder && order < int(recent.size()); ++order) {
      key = extended(key, recent[recent.size() - 1 - order]);
      const size_t bucket = bits ? key >> (kKeyBits - bits) : 0;
      const size_t first = first_context(bucket), stop = first_context(bucket + 1);
      const auto check = uint16_t(key >> (kKeyBits - bits - kCheckBits));
      size_t index = first, start = first_successor(bucket);
      for (; index < stop && checks(index) != check; ++index) start += lengths(index);
      if (index == stop) break;
      found[order] = {order + 1, cells(index), start, start + lengths(index)};
    }
    return order;
  }
};

// Sums by token, in the order in which tokens came first.
class Mixture {
 public:
  void clear() {
    for (const auto& entry : entries) place_[entry.first] = -1;
    entries.clear();
  }

  void add(int token, double share) {
    if (token >= int(place_.size())) place_.resize(token + 1, -1);
    if (place_[token] < 0) {
      place_[token] = int(entries.size());
      entries.emplace_back(token, 0.0);
    }
    entries[place_[token]].second += share;
  }

  std::vector<std::pair<int, double>> entries;

 private:
  std::vector<int> place_;
};

// The longest match that ends at any of ``ends``, and the ends that have it; see suffix._longest.
int longest_match(const int* tokens, const Ends& ends, const int* suffix, int size, int anchor, Ends& furthest) {
  int longest = anchor;
  furthest.size = 0;
  for (int i = 0; i < ends.size; ++i) {
    const int end = ends.at[i], limit = std::min(size, end + 1);
    int length = anchor;
    while (length < limit && tokens[end - length] == suffix[size - 1 - length]) ++length;
    if (length > longest) longest = length, furthest.size = 0;
    if (length == longest) furthest.at[furthest.size++] = end;
  }
  return longest;
}

// ------------------------------------------------------------------------------------------------ drafting

class SuffixCore {
 public:
  SuffixCore(int max_tree_depth, double max_spec_factor, double min_token_prob, std::vector<int> classes, std::vector<double> weights,
             std::vector<int> rest_tokens, std::vector<double> rest_shares, View<double> hits, View<double> promised)
      : max_tree_depth_(max_tree_depth), max_spec_factor_(max_spec_factor), min_token_prob_(min_token_prob), classes_(std::move(classes)),
        weights_(std::move(weights)), rest_tokens_(std::move(rest_tokens)), rest_shares_(std::move(rest_shares)), hits_(hits),
        promised_(promised) {}

  void set_shared(const SharedView& shared) { shared_ = shared; }

  void set_table(nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> tokens, View<const uint8_t> shares,
                 View<const uint16_t> checks, View<const uint8_t> lengths, View<const uint8_t> cells, View<const uint32_t> first_context,
                 View<const uint32_t> first_successor, int bits) {
    table_ = {tokens, shares, lengths, cells, checks, first_context, first_successor, bits};
    has_table_ = true;
  }

  // (tokens, score, probabilities) of a draft of at most ``num_tokens``; ``active`` and ``oldest`` as SharedStatistics has them.
  nb::tuple draft(SuffixText& text, nb::list tokens, int64_t active, int64_t oldest, int num_tokens) {
    text.extend(tokens);
    text_ = &text, active_ = active, oldest_ = oldest;
    text.base = text.tokens().size();
    text.drafted.clear(), text.cells.clear(), text.promises.clear();
    start_levels();
    recent_.assign(text.tokens().end() - std::min<size_t>(kMaxOrder, text.base), text.tokens().end());
    find_matches();
    sees_others_ = std::any_of(levels_.begin(), levels_.end(), [](const Level& level) { return !level.own; });
    const int limit = most_tokens(num_tokens);
    nb::list drafted, probs;
    double score = 0.0, path_prob = 1.0;
    while (int(text.drafted.size()) < limit) {
      if (!text.drafted.empty()) {
        move_on();
        find_matches();
      }
      mix();
      if (mixture_.entries.empty()) break;
      // Of equals the first is the one of the longest match, and there the most recent.
      auto best = mixture_.entries.front();
      for (const auto& entry : mixture_.entries) {
        if (entry.second > best.second) best = entry;
      }
      const auto [token, promise] = best;
      const int cell = 2 * classes_[size_t(double(classes_.size() - 1) * std::clamp(promise, 0.0, 1.0))] + suggests(token);
      const double kept = (hits_(cell) + kPriorWeight) / (promised_(cell) + kPriorWeight), prob = std::min(promise * kept, 1.0);
      path_prob *= prob;
      if (path_prob < min_token_prob_) break;
      score += path_prob;
      text.drafted.push_back(token), text.cells.push_back(cell), text.promises.push_back(promise);
      recent_.push_back(token);
      drafted.append(token);
      probs.append(prob);
    }
    return nb::make_tuple(nb::tuple(drafted), score, nb::tuple(probs));
  }

  // Learn how far the last draft was right; ``tokens`` is the whole sequence.
  void observe(SuffixText& text, nb::list tokens) {
    const size_t num_came = nb::len(tokens) - std::min<size_t>(nb::len(tokens), text.base);
    for (size_t i = 0; i < std::min(text.drafted.size(), num_came); ++i) {
      const bool came = nb::cast<int>(tokens[text.base + i]) == text.drafted[i];
      double &hits = hits_(text.cells[i]), &promised = promised_(text.cells[i]);
      if (promised >= kMaxPromised) promised /= 2, hits /= 2;
      promised += text.promises[i];
      hits += came;
      if (!came) break;
    }
    text.drafted.clear();
  }

 private:
  const int* tokens_of(bool own) const { return own ? text_->tokens().data() : shared_.tokens.data(); }

  Level level(bool own, int length, const Ends& ends) const {
    Level made{own, length, ends, {}};
    const auto& text = text_->tokens();
    for (int i = 0; i < ends.size; ++i) {
      const int next = ends.at[i] + 1;
      // In a loop of text an occurrence runs into the draft itself.
      made.successors[i] = !own ? shared_.tokens(next) : next < int(text.size()) ? text[next] : text_->drafted[next - text.size()];
    }
    return made;
  }

  void start_levels() {
    const auto& tokens = text_->tokens();
    const int size = int(std::min<size_t>(max_tree_depth_, tokens.size()));
    const int* suffix = tokens.data() + tokens.size() - size;
    levels_.clear();
    levels_in(true, suffix, size);
    if (active_ > 0) {
      levels_in(false, suffix, size);
      std::stable_sort(levels_.begin(), levels_.end(), [](const Level& one, const Level& other) { return one.length > other.length; });
    }
  }

  void levels_in(bool own, const int* suffix, int size) {
    bool is_first = true;
    for (int anchor = 0; anchor < kNumAnchors; ++anchor) {
      if (kAnchors[anchor] > size) continue;
      const Ends ends = own ? text_->ends(anchor) : shared_.ends(anchor, suffix, size, active_, oldest_);
      if (!ends.size) continue;
      const Level found = level(own, kAnchors[anchor], ends);
      const auto* next = found.successors.data();
      const bool is_split = std::count(next, next + ends.size, next[0]) < ends.size;
      if (is_first && (is_split || anchor == 0)) {
        Ends furthest;
        const int longest = longest_match(tokens_of(own), ends, suffix, size, kAnchors[anchor], furthest);
        if (is_split ? longest > kAnchors[anchor] : longest >= kLongMatch) levels_.push_back(level(own, longest, furthest));
      }
      levels_.push_back(found);
      is_first = false;
    }
  }

  int most_tokens(int num_tokens) const {
    int length = std::max(levels_.empty() ? 0 : levels_.front().length, num_matches_);
    if (!levels_.empty() && int(max_spec_factor_ * length) < num_tokens) {
      const auto& tokens = text_->tokens();
      const int size = int(std::min<size_t>(max_tree_depth_, tokens.size()));
      for (const bool own : {true, false}) {
        const auto first = std::find_if(levels_.begin(), levels_.end(), [own](const Level& level) { return level.own == own; });
        if (first == levels_.end()) continue;
        Ends furthest;
        const int* suffix = tokens.data() + tokens.size() - size;
        length = std::max(length, longest_match(tokens_of(own), first->ends, suffix, size, first->length, furthest));
      }
    }
    return std::min(num_tokens, int(max_spec_factor_ * length));
  }

  // After the last token of the draft.
  void move_on() {
    const int token = text_->drafted.back();
    moved_.clear();
    for (const Level& before : levels_) {
      Ends ends;
      for (int i = 0; i < before.ends.size; ++i) {
        if (before.successors[i] == token) ends.at[ends.size++] = before.ends.at[i] + 1;
      }
      if (ends.size) moved_.push_back(level(before.own, before.length + 1, ends));
    }
    if (int(moved_.size()) < kMaxLevels) {
      const Ends own = text_->ends_after(token);
      if (own.size) moved_.push_back(level(true, 1, own));
      if (sees_others_) {
        const Ends others = shared_.ends(kNumAnchors - 1, &token, 1, active_, oldest_);
        if (others.size) moved_.push_back(level(false, 1, others));
      }
    }
    std::swap(levels_, moved_);
  }

  void find_matches() { num_matches_ = has_table_ ? table_.matches(recent_, matches_) : 0; }

  bool suggests(int token) const {
    return std::any_of(levels_.begin(), levels_.end(), [token](const Level& level) {
      const auto* next = level.successors.data();
      return level.own && std::find(next, next + level.ends.size, token) != next + level.ends.size;
    });
  }

  // See backoff.mix; a level's counts are skipped once little is undecided.
  void mix() {
    mixture_.clear();
    double left = 1.0;
    int waiting = num_matches_;
    for (const Level& level : levels_) {
      for (; waiting > 0 && matches_[waiting - 1].order > level.length; --waiting) {
        if (!take(matches_[waiting - 1], left)) return;
      }
      if (!take(level, left)) return;
    }
    for (; waiting > 0; --waiting) {
      if (!take(matches_[waiting - 1], left)) return;
    }
    for (size_t i = 0; i < rest_tokens_.size(); ++i) mixture_.add(rest_tokens_[i], left * rest_shares_[i]);
  }

  bool take(const Match& match, double& left) {
    const double taken = left * weights_[(kBase + match.order - 1) * kCellsPerGroup + match.cell];
    for (size_t at = match.start; at < match.stop; ++at) mixture_.add(table_.token(at), taken * (table_.shares(at) / kShareUnit));
    left -= taken;
    return left >= kLeastLeft;
  }

  bool take(const Level& level, double& left) {
    std::array<int, kMaxOccurrences> kinds, counts;
    int num_kinds = 0, total = 0;
    for (int i = 0; i < level.ends.size; ++i) {
      const int token = level.successors[i];
      if (token < 0) continue;
      ++total;
      const int kind = int(std::find(kinds.begin(), kinds.begin() + num_kinds, token) - kinds.begin());
      if (kind == num_kinds) kinds[num_kinds] = token, counts[num_kinds++] = 0;
      ++counts[kind];
    }
    if (!total) return true;
    const int group = (level.own ? 0 : kShared) + std::min(bit_length(level.length), 5) - 1;
    const double taken = left * weights_[counts_cell(group, total, num_kinds)];
    for (int kind = 0; kind < num_kinds; ++kind) mixture_.add(kinds[kind], taken * (double(counts[kind]) / total));
    left -= taken;
    return left >= kLeastLeft;
  }

  int max_tree_depth_;
  double max_spec_factor_, min_token_prob_;
  std::vector<int> classes_;
  std::vector<double> weights_;
  std::vector<int> rest_tokens_;
  std::vector<double> rest_shares_;
  View<double> hits_, promised_;
  SharedView shared_;
  TableView table_;
  bool has_table_ = false;

  // Of the draft that is being made.
  SuffixText* text_ = nullptr;
  int64_t active_ = 0, oldest_ = 0;
  bool sees_others_ = false;
  std::vector<Level> levels_, moved_;
  std::array<Match, kMaxOrder> matches_;
  int num_matches_ = 0;
  std::vector<int> recent_;
  Mixture mixture_;
};

}  // namespace

void bind_suffix(nb::module_& module) {
  nb::class_<NgramIndex>(module, "NgramIndex")
      .def(nb::init<int>())
      .def_prop_ro("num_tokens", &NgramIndex::num_tokens)
      .def("extend", &NgramIndex::extend)
      .def("before", &NgramIndex::before)
      .def("match_length", &NgramIndex::match_length);
  nb::class_<SharedView>(module, "SharedView")
      .def("__init__",
           [](SharedView* self, View<int32_t> tokens, View<int32_t> owner, std::vector<View<int32_t>> back,
              std::vector<View<int64_t>> heads) { new (self) SharedView{tokens, owner, std::move(back), std::move(heads)}; })
      .def("index", &SharedView::index);
  nb::class_<SuffixText>(module, "SuffixText").def(nb::init<>());
  nb::class_<SuffixCore>(module, "SuffixCore")
      .def(nb::init<int, double, double, std::vector<int>, std::vector<double>, std::vector<int>, std::vector<double>, View<double>,
                    View<double>>())
      .def("set_shared", &SuffixCore::set_shared)
      .def("set_table", &SuffixCore::set_table)
      .def("draft", &SuffixCore::draft)
      .def("observe", &SuffixCore::observe);
}

}  // namespace foredraft
