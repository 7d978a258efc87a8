// Python's view of the native ops: packing weights, and running passes on a pool of threads.
//
// Owns: scratch memory and the packed form of weights.  Does not know: how anything is computed.
#include "dispatch.h"
#include "plan.h"
#include "pool.h"
#include "suffix.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace foredraft {

namespace {

// ------------------------------------------------------------------------------------------------ packing

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloats = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

uint16_t half_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000u) return uint16_t(sign | 0x7E00);
  if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00);
  if (magnitude < 0x38800000u) {
    float aligned;
    std::memcpy(&aligned, &magnitude, 4);
    aligned += 0.5f;
    uint32_t shifted;
    std::memcpy(&shifted, &aligned, 4);
    return uint16_t(sign | (shifted - 0x3F000000u));
  }
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

float float_from_half(uint16_t half) {
  const uint32_t magnitude = uint32_t(half & 0x7FFF) << 13, sign = uint32_t(half & 0x8000) << 16;
  uint32_t bits = magnitude;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 5.192296858534828e33f;  // 2^112
  std::memcpy(&bits, &value, 4);
  if ((half & 0x7C00) == 0x7C00) bits = magnitude | 0x7F800000u;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct Place {
  uint8_t* tile;
  int lane;
};

Place place_of(Format format, int cols, uint8_t* packed, int row) {
  return {packed + size_t(row / kTile) * tile_bytes(format, cols), row % kTile};
}

// One row of a file's blocks of 32: half scale, [half minimum,] then 16 bytes of nibbles (low: first half) or 32 int8.
void pack_blocks(Format format, const uint8_t* source, int cols, Place place) {
  for (int b = 0; b < cols / kBlock; ++b) {
    uint16_t scales[2];
    const int num_scales = format == Q4_1 ? 2 : 1, code_bytes = format == Q8_0 ? 512 : 256;
    std::memcpy(scales, source, 2 * num_scales);
    source += 2 * num_scales;
    for (int k = 0; k < kBlock; ++k) {
      if (format == Q8_0) {
        place.tile[64 * (k / 4) + 4 * place.lane + k % 4] = uint8_t(source[k] ^ 0x80);
      } else {
        const int code = source[k % 16] >> (k < 16 ? 0 : 4) & 15, shift = k % 8 < 4 ? 0 : 4;
        uint8_t& byte = place.tile[64 * (k / 8) + 4 * place.lane + k % 4];
        byte = uint8_t((byte & ~(15 << shift)) | code << shift);
      }
    }
    source += format == Q8_0 ? 32 : 16;
    for (int i = 0; i < num_scales; ++i) std::memcpy(place.tile + code_bytes + 32 * i + 2 * place.lane, &scales[i], 2);
    place.tile += code_bytes + 32 * num_scales;
  }
}

void pack_floats(Format format, const float* source, int cols, Place place) {
  for (int k = 0; k < cols; ++k) {
    uint8_t* at = place.tile + (size_t(k) * kTile + place.lane) * (format == F32 ? 4 : 2);
    if (format == F32) {
      std::memcpy(at, source + k, 4);
    } else if (format == F16) {
      const uint16_t half = half_from_float(source[k]);
      std::memcpy(at, &half, 2);
    } else {
      uint32_t bits;
      std::memcpy(&bits, source + k, 4);
      const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000u;
      const uint16_t high = nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
      std::memcpy(at, &high, 2);
    }
  }
}

// Symmetric int8 with a half scale; the codes are made for the scale as it is stored.
void pack_q8(const float* source, int cols, Place place) {
  for (int b = 0; b < cols / kBlock; ++b, source += kBlock, place.tile += 544) {
    float most = 0.0f;
    for (int k = 0; k < kBlock; ++k) most = std::max(most, std::abs(source[k]));
    uint16_t half = half_from_float(most / 127.0f);
    if ((half & 0x7FFF) >= 0x7C00) half = 0x7BFF;
    const float scale = float_from_half(half);
    for (int k = 0; k < kBlock; ++k) {
      float code = scale > 0.0f ? std::nearbyint(source[k] / scale) : 0.0f;
      code = std::min(127.0f, std::max(-127.0f, code));
      place.tile[64 * (k / 4) + 4 * place.lane + k % 4] = uint8_t(int(code) + 128);
    }
    std::memcpy(place.tile + 512 + 2 * place.lane, &half, 2);
  }
}

void check_packed(const Bytes& packed, Format format, int rows, int cols) {
  const size_t needed = size_t((rows + kTile - 1) / kTile) * tile_bytes(format, cols);
  if (packed.shape(0) < needed) throw std::invalid_argument("the packed matrix is too small");
  if (is_quantised(format) && cols % kBlock) throw std::invalid_argument("quantised matrices need columns in blocks of 32");
}

void pack_rows_from_blocks(Bytes packed, int format, int first_row, ConstBytes blocks, int cols) {
  const int rows = int(blocks.shape(0));
  const size_t row_bytes = size_t(cols / kBlock) * (format == Q8_0 ? 34 : format == Q4_1 ? 20 : 18);
  check_packed(packed, Format(format), first_row + rows, cols);
  if (blocks.shape(1) != row_bytes) throw std::invalid_argument("rows of blocks have the wrong length");
  nb::gil_scoped_release unlocked;
  for (int i = 0; i < rows; ++i)
    pack_blocks(Format(format), blocks.data() + i * row_bytes, cols, place_of(Format(format), cols, packed.data(), first_row + i));
}

void pack_rows_from_floats(Bytes packed, int format, int first_row, ConstFloats values) {
  const int rows = int(values.shape(0)), cols = int(values.shape(1));
  check_packed(packed, Format(format), first_row + rows, cols);
  nb::gil_scoped_release unlocked;
  for (int i = 0; i < rows; ++i) {
    const float* row = values.data() + size_t(i) * cols;
    const Place place = place_of(Format(format), cols, packed.data(), first_row + i);
    if (format == Q8_0) pack_q8(row, cols, place);
    else pack_floats(Format(format), row, cols, place);
  }
}

size_t packed_size(int format, int rows, int cols) { return size_t((rows + kTile - 1) / kTile) * tile_bytes(Format(format), cols); }

// ------------------------------------------------------------------------------------------------ scratch

// A 64-byte aligned array that only grows.
template <class T>
class Buffer {
 public:
  T* of(size_t count) {
    if (count > capacity_) {
      data_.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64))));
      capacity_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t capacity_ = 0;
};

struct ActivationBuffers {
  Buffer<float> values, scales, sums;
  Buffer<int8_t> quants;
  Buffer<int32_t> isums;

  Activations of(size_t rows, size_t cols) {
    const size_t blocks = rows * (cols / kBlock + 1);
    return {values.of(rows * cols), quants.of(rows * cols), scales.of(blocks), sums.of(blocks), isums.of(blocks)};
  }
};

// ------------------------------------------------------------------------------------------------ the model

Matrix as_matrix(const Bytes& packed, int format, int rows, int cols) {
  check_packed(packed, Format(format), rows, cols);
  Matrix matrix;
  matrix.format = Format(format);
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.data = packed.data();
  return matrix;
}

// Threads that the models of one engine share, since they run one after the other: threads of its own would only be in the way.
struct Crew {
  explicit Crew(int num_threads) : pool(num_threads) {}
  Pool pool;
  std::mutex running;
};

// The network with its threads and scratch memory.  Arrays handed in must outlive it; the Python side keeps them.
class NativeModel {
 public:
  NativeModel(int hidden, int intermediate, int heads, int kv_heads, int head_dim, int block_size, int num_layers, float eps,
              float attention_scale, float embedding_scale, bool gelu, bool half_cache, int threads, const std::string& isa)
      : kernels_(kernels_by_name(isa)), crew_(std::make_shared<Crew>(threads)), layers_(num_layers) {
    model_.hidden = hidden;
    model_.intermediate = intermediate;
    model_.heads = heads;
    model_.kv_heads = kv_heads;
    model_.head_dim = head_dim;
    model_.block_size = block_size;
    model_.num_layers = num_layers;
    model_.eps = eps;
    model_.attention_scale = attention_scale;
    model_.embedding_scale = embedding_scale;
    model_.gelu = gelu;
    model_.half_cache = half_cache;
    model_.layers = layers_.data();
  }

  const char* isa() const { return kernels_.name; }
  int threads() const { return crew_->pool.size(); }
  const Kernels& kernels() const { return kernels_; }
  std::shared_ptr<Crew> crew() const { return crew_; }

  void set_ends(Matrix embed, Floats norm, Matrix head) {
    model_.embed = embed;
    model_.norm = norm.data();
    model_.head = head;
  }

  void set_layer(int index, Matrix qkv, Matrix o, Matrix gate_up, Matrix down, Floats attn_norm, Floats mlp_norm,
                 std::optional<Floats> qkv_bias, std::optional<Floats> q_norm, std::optional<Floats> k_norm,
                 std::optional<Floats> post_attn_norm, std::optional<Floats> post_mlp_norm,
                 nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu> frequencies, int window, Bytes keys, Bytes values) {
    const auto pointer = [](const std::optional<Floats>& array) -> const float* { return array ? array->data() : nullptr; };
    layers_.at(index) = Layer{qkv,
                              o,
                              gate_up,
                              down,
                              attn_norm.data(),
                              mlp_norm.data(),
                              pointer(qkv_bias),
                              pointer(q_norm),
                              pointer(k_norm),
                              pointer(post_attn_norm),
                              pointer(post_mlp_norm),
                              rope_of(frequencies.data()),
                              window,
                              keys.data(),
                              values.data()};
  }

  // Layers with the same array of frequencies share their rotations.
  int rope_of(const double* frequencies) {
    const auto known = std::find(ropes_.begin(), ropes_.end(), frequencies);
    const int rope = int(known - ropes_.begin());
    if (known == ropes_.end()) ropes_.push_back(frequencies);
    model_.num_ropes = int(ropes_.size());
    model_.inverse_frequencies = ropes_.data();
    return rope;
  }

  // Array lengths are the Python side's responsibility; logits [num_logits * vocabulary] and tapped [T * taps * hidden] are written.
  void run(Ints tokens, Ints positions, Ints tables, Ints table_of, Ints logit_rows, Ints taps, Floats logits, Floats tapped) {
    const size_t rows = tokens.shape(0);
    Pass pass;
    pass.num_rows = int(rows);
    pass.num_logits = int(logit_rows.shape(0));
    pass.num_taps = int(taps.shape(0));
    pass.tokens = tokens.data();
    pass.positions = positions.data();
    pass.tables = tables.data();
    pass.table_of = table_of.data();
    pass.first_keys = nullptr;
    pass.logit_rows = logit_rows.data();
    pass.taps = taps.data();
    pass.logits = logits.data();
    pass.tapped = tapped.data();
    nb::gil_scoped_release unlocked;
    std::lock_guard<std::mutex> lock(crew_->running);
    int last = 0;
    for (size_t i = 0; i < rows; ++i) last = std::max(last, pass.positions[i]);
    const size_t heads_width = size_t(model_.heads) * model_.head_dim, kv_width = size_t(model_.kv_heads) * model_.head_dim;
    pass.x = x_.of(rows * model_.hidden);
    pass.y = y_.of(rows * model_.hidden);
    pass.rotations = rotations_.of(ropes_.size() * rows * model_.head_dim);
    pass.qkv = qkv_.of(rows * (heads_width + 2 * kv_width));
    pass.in = in_.of(std::max(rows, size_t(pass.num_logits)), std::max(heads_width, size_t(model_.hidden)));
    pass.mid = mid_.of(rows, size_t(model_.intermediate));
    pass.score_stride = (size_t(last) + 32) / 16 * 16;
    pass.scores = scores_.of(size_t(crew_->pool.size()) * kMaxAttentionQueries * pass.score_stride);
    const std::vector<AttentionItem> items = plan_attention(model_, pass, kernels_.max_queries, crew_->pool.size());
    std::vector<int> next_items(model_.num_layers, 0);
    pass.items = items.data();
    pass.num_items = int(items.size());
    pass.next_items = next_items.data();
    crew_->pool.run([&](int thread, Barrier& barrier) { kernels_.run(model_, pass, thread, crew_->pool.size(), barrier); });
  }

 private:
  const Kernels& kernels_;
  std::shared_ptr<Crew> crew_;
  std::vector<Layer> layers_;
  std::vector<const double*> ropes_;
  Model model_{};
  Buffer<float> x_, y_, qkv_, rotations_, scores_;
  ActivationBuffers in_, mid_;
};

#include "head_module.inc"

void linear(Matrix matrix, ConstFloats x, Floats y, const std::string& isa) {
  const size_t rows = x.shape(0), cols = x.shape(1);
  if (int(cols) != matrix.cols || y.shape(0) != rows * matrix.rows) throw std::invalid_argument("shapes do not match");
  ActivationBuffers buffers;
  Activations in = buffers.of(rows, cols);
  std::memcpy(in.values, x.data(), sizeof(float) * rows * cols);
  kernels_by_name(isa).linear(matrix, in, int(rows), y.data());
}

using ConstDoubles = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstFloatRow = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstTokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_lengths(size_t count, size_t a, size_t b) {
  if (a != count || b != count) throw std::invalid_argument("arrays must have the same length");
}

double sum_weights_of_floats(ConstFloatRow row, double top, double temperature) {
  return supported_kernels().front()->sum_weights(row.data(), false, row.shape(0), top, temperature);
}

double sum_weights_of_doubles(ConstDoubles row, double top, double temperature) {
  return supported_kernels().front()->sum_weights(row.data(), true, row.shape(0), top, temperature);
}

size_t contenders(ConstTokens tokens, ConstDoubles log_probs, uint32_t word1, uint32_t word2, uint32_t word3, uint32_t key0, uint32_t key1,
                  Tokens found) {
  check_lengths(tokens.shape(0), log_probs.shape(0), found.shape(0));
  const uint32_t words[3] = {word1, word2, word3}, key[2] = {key0, key1};
  return supported_kernels().front()->contenders(tokens.data(), log_probs.data(), tokens.shape(0), words, key, found.data());
}

void philox(ConstTokens tokens, uint32_t word1, uint32_t word2, uint32_t word3, uint32_t key0, uint32_t key1, Words high, Words low) {
  check_lengths(tokens.shape(0), high.shape(0), low.shape(0));
  const uint32_t words[3] = {word1, word2, word3}, key[2] = {key0, key1};
  supported_kernels().front()->philox(tokens.data(), tokens.shape(0), words, key, high.data(), low.data());
}

}  // namespace
}  // namespace foredraft

NB_MODULE(_native, module) {
  using namespace foredraft;
  module.doc() = "Native ops; see foredraft.ops.native for their use.";
  module.def("instruction_sets", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
    return names;
  });
  module.def("packed_size", &packed_size);
  module.def("pack_blocks", &pack_rows_from_blocks);
  module.def("pack_floats", &pack_rows_from_floats);
  module.def("linear", &linear);
  module.def("sum_weights", &sum_weights_of_floats);
  module.def("sum_weights", &sum_weights_of_doubles);
  module.def("contenders", &contenders);
  module.def("philox", &philox);
  nb::class_<Matrix>(module, "Matrix").def("__init__", [](Matrix* self, Bytes packed, int format, int rows, int cols) {
    new (self) Matrix(as_matrix(packed, format, rows, cols));
  });
  nb::class_<NativeModel>(module, "Model")
      .def(nb::init<int, int, int, int, int, int, int, float, float, float, bool, bool, int, const std::string&>())
      .def_prop_ro("isa", &NativeModel::isa)
      .def_prop_ro("threads", &NativeModel::threads)
      .def("set_ends", &NativeModel::set_ends)
      .def("set_layer", &NativeModel::set_layer, nb::arg("index"), nb::arg("qkv"), nb::arg("o"), nb::arg("gate_up"), nb::arg("down"),
           nb::arg("attn_norm"), nb::arg("mlp_norm"), nb::arg("qkv_bias").none(), nb::arg("q_norm").none(), nb::arg("k_norm").none(),
           nb::arg("post_attn_norm").none(), nb::arg("post_mlp_norm").none(), nb::arg("frequencies"), nb::arg("window"), nb::arg("keys"),
           nb::arg("values"))
      .def("run", &NativeModel::run);
  nb::class_<NativeHead>(module, "Head")
      .def(nb::init<const NativeModel&, int, int, int, int, int, int, int, float, float, bool, bool, bool, bool, bool, int, int, float>())
      .def("set_inputs", &NativeHead::set_inputs, nb::arg("embed"), nb::arg("fc"), nb::arg("fc_bias").none(), nb::arg("state_norms").none(),
           nb::arg("states_norm").none(), nb::arg("hidden_norm").none())
      .def("set_layer", &NativeHead::set_layer, nb::arg("index"), nb::arg("qkv"), nb::arg("o"), nb::arg("gate_up"), nb::arg("down"),
           nb::arg("attn_norm").none(), nb::arg("mlp_norm"), nb::arg("qkv_bias").none(), nb::arg("q_norm").none(),
           nb::arg("k_norm").none(), nb::arg("o_bias").none(), nb::arg("frequencies"), nb::arg("keys"), nb::arg("values"))
      .def("set_output", &NativeHead::set_output, nb::arg("norm").none(), nb::arg("head"), nb::arg("target_ids"))
      .def("run", &NativeHead::run)
      .def("draft", &NativeHead::draft);
  bind_suffix(module);
}
