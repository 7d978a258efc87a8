// A test of the kernels without Python, to be built with sanitizers: every array has exactly the length that it needs, so that an
// access beyond its end is seen.
//
// Owns: random matrices and tiny random models.  Does not know: whether results are right; tests/test_native.py compares those.
#include "dispatch.h"
#include "plan.h"
#include "pool.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using namespace foredraft;

namespace {

void check(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what.c_str());
  std::exit(1);
}

struct Random {
  uint64_t state;

  uint32_t bits() {  // splitmix64
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return uint32_t((z ^ z >> 31) >> 32);
  }
  float signed_unit() { return float(bits()) / 2147483648.0f - 1.0f; }
  std::vector<float> floats(size_t count, float offset, float spread) {
    std::vector<float> values(count);
    for (float& value : values) value = offset + spread * signed_unit();
    return values;
  }
};

// A matrix and its bytes.  Values are within about 0.25, and so are the quantised ones.
struct Owned {
  std::vector<uint8_t> bytes;
  Matrix matrix;

  Owned(Format format, int rows, int cols, Random& random) {
    matrix.format = format;
    matrix.rows = rows;
    matrix.cols = cols;
    bytes.resize(size_t(matrix.tiles()) * tile_bytes(format, cols));
    matrix.data = bytes.data();
    if (format == F32) {
      for (size_t i = 0; i < bytes.size(); i += 4) {
        const float value = 0.25f * random.signed_unit();
        std::memcpy(&bytes[i], &value, 4);
      }
      return;
    }
    // Half and bfloat values, or the scales behind each block's codes: random mantissas below a fixed exponent.
    const uint16_t top = format == BF16 ? 0x3E00 : format == Q8_0 ? 0x0FFF : is_quantised(format) ? 0x27FF : 0x33FF;
    const size_t codes = !is_quantised(format) ? 0 : format == Q8_0 ? 512 : 256;
    const size_t block = is_quantised(format) ? tile_bytes(format, kBlock) : bytes.size();
    for (size_t start = 0; start < bytes.size(); start += block) {
      for (size_t i = 0; i < codes; ++i) bytes[start + i] = uint8_t(random.bits());
      for (size_t i = codes; i < block; i += 2) {
        const uint16_t half = uint16_t((random.bits() & 0x80FF) | (top & 0x7F00));
        std::memcpy(&bytes[start + i], &half, 2);
      }
    }
  }
};

struct Inputs {
  std::vector<float> values, scales, sums;
  std::vector<int8_t> quants;
  std::vector<int32_t> isums;

  Inputs(size_t rows, size_t cols)
      : values(rows * cols), scales(rows * (cols / kBlock)), sums(scales.size()), quants(rows * cols), isums(scales.size()) {}
  Activations view() { return {values.data(), quants.data(), scales.data(), sums.data(), isums.data()}; }
};

std::vector<float> linear(const Kernels& kernels, const Matrix& matrix, const float* x, int num_rows) {
  Inputs inputs(num_rows, matrix.cols);
  std::memcpy(inputs.values.data(), x, sizeof(float) * num_rows * matrix.cols);
  std::vector<float> y(size_t(num_rows) * matrix.rows, NAN);
  kernels.linear(matrix, inputs.view(), num_rows, y.data());
  return y;
}

void test_linear(const Kernels& kernels, Format format, Random& random) {
  for (int rows : {1, 16, 37})
    for (int cols : {32, 96}) {
      const Owned weights(format, rows, cols, random);
      for (int num_rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 121}) {
        const std::string name = std::string(kernels.name) + " format " + std::to_string(format) + " [" + std::to_string(rows) + ", " +
                                 std::to_string(cols) + "] x " + std::to_string(num_rows);
        const std::vector<float> x = random.floats(size_t(num_rows) * cols, 0.0f, 2.0f);
        const std::vector<float> y = linear(kernels, weights.matrix, x.data(), num_rows);
        const std::vector<float> expected = linear(generic::kernels, weights.matrix, x.data(), num_rows);
        for (size_t i = 0; i < y.size(); ++i) check(std::abs(y[i] - expected[i]) <= 1e-4f, name + " differs from generic");
        for (int row = 0; row < num_rows; ++row) {
          const std::vector<float> alone = linear(kernels, weights.matrix, &x[size_t(row) * cols], 1);
          check(!std::memcmp(alone.data(), &y[size_t(row) * rows], sizeof(float) * rows), name + ": a row depends on its neighbours");
        }
      }
    }
}

constexpr int kHeads = 4, kKvHeads = 2, kHidden = 32, kVocabulary = 37, kNumLayers = 2;

// Layers with and without a window; with all of a family's extras or none.  intermediate may be an odd number of tiles.
struct TinyModel {
  std::vector<std::unique_ptr<Owned>> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<std::vector<uint8_t>> caches;
  std::vector<double> frequencies;
  std::vector<const double*> ropes;
  std::vector<Layer> layers;
  Model model{};

  TinyModel(Format format, bool extras, bool half_cache, int head_dim, int intermediate, int block_size, int num_blocks, Random& random) {
    const int width = kHeads * head_dim, stride = width + 2 * kKvHeads * head_dim;
    const auto matrix = [&](int rows, int cols) {
      matrices.push_back(std::make_unique<Owned>(format, rows, cols, random));
      return matrices.back()->matrix;
    };
    const auto vector = [&](int count, float offset) {
      vectors.push_back(random.floats(count, offset, 0.3f));
      return static_cast<const float*>(vectors.back().data());
    };
    const auto cache = [&] {
      caches.emplace_back(size_t(num_blocks) * kKvHeads * block_size * head_dim * (half_cache ? 2 : 4));
      return caches.back().data();
    };
    for (int i = 0; i < head_dim / 2; ++i) frequencies.push_back(std::pow(100.0, -2.0 * i / head_dim));
    for (int i = 0; i < kNumLayers; ++i) {
      Layer layer{};
      layer.qkv = matrix(stride, kHidden);
      layer.o = matrix(kHidden, width);
      layer.gate_up = matrix(2 * intermediate, kHidden);
      layer.down = matrix(kHidden, intermediate);
      layer.attn_norm = vector(kHidden, 1.0f);
      layer.mlp_norm = vector(kHidden, 1.0f);
      if (extras) {
        layer.qkv_bias = vector(stride, 0.0f);
        layer.q_norm = vector(head_dim, 1.0f);
        layer.k_norm = vector(head_dim, 1.0f);
        layer.post_attn_norm = vector(kHidden, 1.0f);
        layer.post_mlp_norm = vector(kHidden, 1.0f);
      }
      layer.rope = 0;
      layer.window = i == 0 ? 5 : 0;
      layer.keys = cache();
      layer.values = cache();
      layers.push_back(layer);
    }
    ropes.push_back(frequencies.data());
    model = {kHidden, intermediate, kHeads, kKvHeads, head_dim, block_size, kNumLayers, 1e-5f, 0.25f, 2.0f, extras, half_cache,
             matrix(kVocabulary, kHidden), matrix(kVocabulary, kHidden), vector(kHidden, 1.0f), layers.data(), 1, ropes.data()};
  }
};

// Rows [first, first + num_rows) of one sequence, logits of all of them after states of every layer.
std::vector<float> run(const Kernels& kernels, Pool& pool, const Model& model, const std::vector<int32_t>& tokens,
                       const std::vector<int32_t>& table, int first, int num_rows) {
  const size_t head_dim = size_t(model.head_dim), width = kHeads * head_dim, stride = width + 2 * kKvHeads * head_dim, num_taps = kNumLayers + 1;
  std::vector<int32_t> positions(num_rows), table_of(num_rows, 0), taps(num_taps);
  for (int i = 0; i < num_rows; ++i) positions[i] = first + i;
  for (size_t i = 0; i < num_taps; ++i) taps[i] = int32_t(i);
  std::vector<int32_t> logit_rows(num_rows);
  for (int i = 0; i < num_rows; ++i) logit_rows[i] = i;
  std::vector<float> x(num_rows * kHidden), y(x.size()), qkv(num_rows * stride), rotations(num_rows * head_dim);
  std::vector<float> tapped(num_rows * num_taps * kHidden, NAN), logits(size_t(num_rows) * kVocabulary, NAN);
  Inputs in(num_rows, width), mid(num_rows, model.intermediate);
  Pass pass{};
  pass.num_rows = pass.num_logits = num_rows;
  pass.num_taps = int(num_taps);
  pass.tokens = &tokens[first];
  pass.positions = positions.data();
  pass.tables = table.data();
  pass.table_of = table_of.data();
  pass.logit_rows = logit_rows.data();
  pass.taps = taps.data();
  pass.logits = logits.data();
  pass.tapped = tapped.data();
  pass.x = x.data();
  pass.y = y.data();
  pass.qkv = qkv.data();
  pass.rotations = rotations.data();
  pass.in = in.view();
  pass.mid = mid.view();
  pass.score_stride = size_t(first + num_rows + 15) / 16 * 16;
  std::vector<float> scores(size_t(pool.size()) * kMaxAttentionQueries * pass.score_stride);
  pass.scores = scores.data();
  const std::vector<AttentionItem> items = plan_attention(model, pass, kernels.max_queries, pool.size());
  std::vector<int> next_items(kNumLayers, 0);
  pass.items = items.data();
  pass.num_items = int(items.size());
  pass.next_items = next_items.data();
  pool.run([&](int thread, Barrier& barrier) { kernels.run(model, pass, thread, pool.size(), barrier); });
  std::vector<float> all;
  for (int i = 0; i < num_rows; ++i) {
    all.insert(all.end(), &tapped[i * num_taps * kHidden], &tapped[i * num_taps * kHidden] + num_taps * kHidden);
    all.insert(all.end(), &logits[size_t(i) * kVocabulary], &logits[size_t(i) * kVocabulary] + kVocabulary);
  }
  return all;
}

void test_run(const Kernels& kernels, Format format, bool extras, int block_size, Random& random) {
  const std::string name = std::string(kernels.name) + " format " + std::to_string(format) + (extras ? " with extras" : "") +
                           ", blocks of " + std::to_string(block_size);
  const int num_tokens = 133, num_blocks = (num_tokens + block_size - 1) / block_size;
  // A head is one block of a quantised product's input, or less.
  const int head_dim = extras ? 16 : 32;
  TinyModel tiny(format, extras, format != F32, head_dim, is_quantised(format) ? 96 : 48, block_size, num_blocks, random);
  std::vector<int32_t> tokens, table;
  for (int i = 0; i < num_tokens; ++i) tokens.push_back(int32_t(random.bits() % kVocabulary));
  for (int i = 0; i < num_blocks; ++i) table.push_back(num_blocks - 1 - i);
  Pool one(1), three(3);
  // Beyond one chunk of rows; nothing of it may be seen by the passes that follow in the same blocks.
  const std::vector<float> whole = run(kernels, one, tiny.model, tokens, table, 0, int(tokens.size()));
  for (float value : whole) check(std::isfinite(value), name + ": a result is not finite");
  std::vector<float> pieces;
  for (int first = 0, next = 1; first < int(tokens.size()); first += next, next = next % 11 + 2) {
    const int num_rows = std::min(next, int(tokens.size()) - first);
    const std::vector<float> piece = run(kernels, first % 2 ? one : three, tiny.model, tokens, table, first, num_rows);
    pieces.insert(pieces.end(), piece.begin(), piece.end());
  }
  check(whole.size() == pieces.size() && !std::memcmp(whole.data(), pieces.data(), sizeof(float) * whole.size()),
        name + ": results depend on how a sequence is split into passes");
}

// A head of two layers, or of one, whose scratch has exactly the length that it needs.
struct TinyHead {
  TinyModel tiny;
  std::vector<std::unique_ptr<Owned>> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<const float*> o_biases;
  Head head{};

  TinyHead(Format format, bool fuses, bool extras, int head_dim, int block_size, int num_blocks, Random& random)
      : tiny(format, false, format != F32, head_dim, is_quantised(format) ? 96 : 48, block_size, num_blocks, random) {
    const auto vector = [&](int count, float offset) {
      vectors.push_back(random.floats(count, offset, 0.3f));
      return static_cast<const float*>(vectors.back().data());
    };
    const int stride = (kHeads + 2 * kKvHeads) * head_dim;
    matrices.push_back(std::make_unique<Owned>(format, kHidden, fuses ? 96 : 2 * kHidden, random));
    head.fc = matrices.back()->matrix;
    if (fuses) {
      matrices.push_back(std::make_unique<Owned>(format, stride, 2 * kHidden, random));
      tiny.layers[0].qkv = matrices.back()->matrix;
      head.hidden_norm = vector(kHidden, 1.0f);
    }
    tiny.layers[0].window = 0;
    head.fuses_states = fuses;
    head.norm_before_residual = head.norm_output = extras;
    head.num_states = fuses ? 3 : 1;
    head.state_size = 32;
    head.state_eps = 1e-5f;
    if (extras) {
      head.state_norms = vector(head.num_states * 32, 1.0f);
      head.states_norm = vector(head.num_states * 32, 1.0f);
      head.fc_bias = vector(kHidden, 0.0f);
    } else {
      tiny.model.num_layers = 1;
    }
    o_biases = {extras ? vector(kHidden, 0.0f) : nullptr, nullptr};
    head.o_biases = o_biases.data();
  }
};

// Rows [first, first + num_rows) of one sequence on their states, logits of the last; what is fed back and the logits.
std::vector<float> run_head(const Kernels& kernels, Pool& pool, const TinyHead& owner, const std::vector<int32_t>& tokens,
                            const std::vector<float>& states, const std::vector<int32_t>& table, int first, int num_rows) {
  const Model& model = owner.tiny.model;
  const Head& head = owner.head;
  const size_t dim = model.head_dim, width = kHeads * dim, stride = width + 2 * kKvHeads * dim;
  const size_t state = size_t(head.num_states) * head.state_size;
  std::vector<int32_t> positions(num_rows), table_of(num_rows, 0), first_keys(num_rows, 2), row_of(num_rows), logit_rows{num_rows - 1};
  for (int i = 0; i < num_rows; ++i) {
    positions[i] = first + i;
    row_of[i] = i;
  }
  std::vector<float> x(num_rows * kHidden), qkv(num_rows * stride), rotations(num_rows * dim), features(x.size(), NAN);
  std::vector<float> last_x(kHidden), last_qkv(stride), logits(kVocabulary, NAN), outputs(kHidden, NAN), probabilities(1);
  std::vector<int32_t> best(1);
  Inputs in(num_rows, std::max<size_t>(96, width)), mid(num_rows, model.intermediate);
  HeadPass io{};
  io.same = num_rows == 1;
  io.num_state_rows = num_rows;
  io.states = &states[first * state];
  io.row_of = row_of.data();
  io.features = features.data();
  io.outputs = outputs.data();
  io.best = best.data();
  io.probabilities = probabilities.data();
  io.all.num_rows = num_rows;
  io.all.num_logits = 1;
  io.all.tokens = &tokens[first];
  io.all.positions = positions.data();
  io.all.tables = table.data();
  io.all.table_of = table_of.data();
  io.all.first_keys = first_keys.data();
  io.all.logit_rows = logit_rows.data();
  io.all.x = x.data();
  io.all.qkv = qkv.data();
  io.all.rotations = rotations.data();
  io.all.in = in.view();
  io.all.mid = mid.view();
  io.all.score_stride = size_t(first + num_rows + 31) / 16 * 16;
  std::vector<float> scores(size_t(pool.size()) * kMaxAttentionQueries * io.all.score_stride);
  io.all.scores = scores.data();
  std::vector<int> next_items(kNumLayers, 0), last_next_items(kNumLayers, 0);
  const std::vector<AttentionItem> items = plan_attention(model, io.all, kernels.max_queries, pool.size());
  io.all.items = items.data();
  io.all.num_items = int(items.size());
  io.all.next_items = next_items.data();
  io.last = io.all;
  io.last.num_rows = 1;
  io.last.logits = logits.data();
  std::vector<AttentionItem> last_items;
  if (!io.same) {
    io.last.positions = &positions[num_rows - 1];
    io.last.x = last_x.data();
    io.last.qkv = last_qkv.data();
    last_items = plan_attention(model, io.last, kernels.max_queries, pool.size());
    io.last.items = last_items.data();
    io.last.num_items = int(last_items.size());
    io.last.next_items = last_next_items.data();
  }
  pool.run([&](int thread, Barrier& barrier) { kernels.run_head(model, head, io, thread, pool.size(), barrier); });
  check(best[0] >= 0 && best[0] < kVocabulary && probabilities[0] > 0.0f && probabilities[0] <= 1.0f, "a head says no token");
  for (float logit : logits) check(logit <= logits[best[0]], "a head's token is not its likeliest");
  std::vector<float> all = outputs;
  all.insert(all.end(), logits.begin(), logits.end());
  return all;
}

void test_head(const Kernels& kernels, Format format, bool fuses, bool extras, int head_dim, int block_size, Random& random) {
  const std::string name = std::string(kernels.name) + " head in format " + std::to_string(format) + (fuses ? " of states" : "") +
                           (extras ? " with extras" : "") + ", blocks of " + std::to_string(block_size);
  const int num_tokens = 133, num_blocks = (num_tokens + block_size - 1) / block_size;
  const TinyHead owner(format, fuses, extras, head_dim, block_size, num_blocks, random);
  std::vector<int32_t> tokens, table;
  for (int i = 0; i < num_tokens; ++i) tokens.push_back(int32_t(random.bits() % kVocabulary));
  for (int i = 0; i < num_blocks; ++i) table.push_back(num_blocks - 1 - i);
  const std::vector<float> states = random.floats(size_t(num_tokens) * owner.head.num_states * 32, 0.0f, 1.0f);
  Pool one(1), three(3);
  const std::vector<float> whole = run_head(kernels, one, owner, tokens, states, table, 2, num_tokens - 2);
  for (float value : whole) check(std::isfinite(value), name + ": a result is not finite");
  std::vector<float> last;
  for (int first = 2, next = 1; first < num_tokens; first += next, next = next % 11 + 1)
    last = run_head(kernels, first % 2 ? one : three, owner, tokens, states, table, first, std::min(next, num_tokens - first));
  check(!std::memcmp(whole.data(), last.data(), sizeof(float) * whole.size()), name + ": results depend on how a text is split");
}

// Workers that sleep, and pools that end while theirs do.
void test_pool() {
  for (int round = 0; round < 20; ++round) {
    Pool pool(1 + round % 4);
    std::atomic<int> calls{0};
    for (int i = 0; i < 50; ++i) {
      if (i % 25 == 24) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      pool.run([&](int, Barrier& barrier) {
        ++calls;
        barrier.wait();
        check(calls >= (i + 1) * pool.size(), "a thread passed the barrier before the others came");
      });
    }
    check(calls == 50 * pool.size(), "some worker missed a pass");
  }
}

}  // namespace

int main() {
  test_pool();
  for (const Kernels* kernels : supported_kernels()) {
    Random random{1};
    for (Format format : {F32, F16, BF16, Q8_0, Q4_0, Q4_1}) {
      test_linear(*kernels, format, random);
      for (bool extras : {false, true})
        for (int block_size : {3, 16}) {
          test_run(*kernels, format, extras, block_size, random);
          for (bool fuses : {false, true}) test_head(*kernels, format, fuses, extras, extras ? 16 : 32, block_size, random);
        }
    }
    std::printf("kernels %s: fine\n", kernels->name);
  }
  return 0;
}
