// What the two C++ files share: the model as raw pointers, one pass over it, and the barrier between a pass's threads.
//
// Owns: data layout.  Does not know: Python, or which instruction set computes.
//
// A matrix [rows, cols] is stored in tiles of 16 rows.  A tile holds, for the unquantised formats, cols x 16 values; for the quantised
// ones cols / 32 blocks of 32 columns:
//     Q4_0  256 bytes: byte [i][row][c] holds column 8i + c in its low and 8i + 4 + c in its high nibble (i < 4, c < 4); 16 half scales
//     Q4_1  the same, then 16 half minima
//     Q8_0  512 bytes: byte [j][row][c] holds column 4j + c plus 128 (j < 8, c < 4); 16 half scales
// so that one load meets the same columns of 16 output rows, and whoever needs them for many input rows unpacks them once.
#pragma once
#include <sched.h>
#include <stddef.h>
#include <stdint.h>

namespace foredraft {

enum Format : int { F32 = 0, F16 = 1, BF16 = 2, Q8_0 = 3, Q4_0 = 4, Q4_1 = 5 };

constexpr int kTile = 16;
constexpr int kBlock = 32;

inline bool is_quantised(Format format) { return format >= Q8_0; }

// Of 32 columns of a quantised tile.
constexpr int block_bytes(Format format) { return format == Q8_0 ? 512 + 32 : format == Q4_0 ? 256 + 32 : 256 + 64; }

inline size_t tile_bytes(Format format, int cols) {
  if (is_quantised(format)) return size_t(cols / kBlock) * block_bytes(format);
  return size_t(cols) * kTile * (format == F32 ? 4 : 2);
}

struct Matrix {
  Format format = F32;
  int rows = 0, cols = 0;
  const uint8_t* data = nullptr;
  int tiles() const { return (rows + kTile - 1) / kTile; }
  const uint8_t* tile(int i) const { return data + size_t(i) * tile_bytes(format, cols); }
};

struct Layer {
  Matrix qkv, o, gate_up, down;
  const float *attn_norm, *mlp_norm;
  const float *qkv_bias, *q_norm, *k_norm, *post_attn_norm, *post_mlp_norm;  // null where a family has none
  int rope;    // which of the model's inverse frequencies
  int window;  // 0: the whole context
  // Float or half.  values: [blocks][kv_heads][block_size][head_dim]; keys the same, but where block_size is a multiple of 16,
  // every 16 of a block lie as [head_dim][16].
  uint8_t *keys, *values;
};

struct Model {
  int hidden, intermediate, heads, kv_heads, head_dim, block_size, num_layers;
  float eps, attention_scale, embedding_scale;
  bool gelu, half_cache;
  Matrix embed, head;
  const float* norm;
  const Layer* layers;
  int num_ropes;
  const double* const* inverse_frequencies;  // [num_ropes][head_dim / 2]
};

// Input rows of a matrix product: floats, and for quantised matrices also int8 blocks of 32 with their scale and sums.
struct Activations {
  float* values;   // [rows][cols]
  int8_t* quants;  // [rows][cols]
  float* scales;   // [rows][cols / 32]
  float* sums;     // scale * sum of quants
  int32_t* isums;  // sum of quants
};

constexpr int kMaxAttentionQueries = 8;

// Queries first_query .. of one sequence and key-value head; query q is row first_row + q / group, head q % group of the group.
struct AttentionItem {
  int first_row, kv_head, first_query, num_queries;
};

struct Pass {
  int num_rows, num_logits, num_taps, num_items;
  const int32_t *tokens, *positions;  // [num_rows]
  const int32_t* tables;              // block tables of all sequences, one after the other
  const int32_t* table_of;            // [num_rows]: where in tables the row's sequence begins
  const int32_t* first_keys;          // [num_rows]: keys before this position are not there; null: all are
  const int32_t* logit_rows;          // [num_logits]
  const int32_t* taps;                // [num_taps] layer indices, num_layers for the last layer's output
  float* logits;                      // [num_logits][vocabulary]
  float* tapped;                      // [num_rows][num_taps][hidden]
  // scratch
  float *x, *qkv, *y;
  float* rotations;        // [num_ropes][num_rows][head_dim]
  Activations in, mid;  // in: up to max(hidden, heads * head_dim) columns; mid: intermediate columns
  float* scores;        // [threads][kMaxAttentionQueries][score_stride]
  size_t score_stride;
  const AttentionItem* items;
  int* next_items;  // per layer: the next item that nobody has taken
};

// A draft head on the states of a target (EAGLE, 2401.15077; EAGLE-3, 2503.01840).  Its decoder layers are a Model; a row stands for a
// token and the feature of the token before it.  Pointers that a head does without are null.
struct Head {
  // EAGLE-3: feature = fc(states), and the first layer reads [norm(embedding), norm(feature)].  EAGLE: feature = states, and the first
  // layer's input is fc([embedding, feature]).
  bool fuses_states;
  bool norm_before_residual;  // the residual stream begins with the normalised feature
  bool norm_output;           // what is fed back as the next feature is normalised
  int num_states, state_size;
  float state_eps;
  const float* state_norms;    // [num_states][state_size]: each state by itself
  const float* states_norm;    // [num_states * state_size]: all together
  const float* hidden_norm;    // [hidden]
  Matrix fc;
  const float* fc_bias;           // [hidden]
  const float* const* o_biases;   // [num_layers], each [hidden] or null
};

struct HeadPass {
  Pass all;           // every row: what layers before the last compute, and keys and values of the last
  Pass last;          // the rows of logits only: the rest of the last layer; the same buffers where these are all rows
  bool same;          // whether they are
  int num_state_rows;
  const float* states;     // [num_state_rows][num_states * state_size]
  const int32_t* row_of;   // [num_state_rows]: the row whose feature comes from them
  float* features;         // [num_rows][hidden]: given for the other rows, written for these
  float* outputs;          // [num_logits][hidden]: next features
  int32_t* best;           // [num_logits]: the likeliest token of each row of logits
  float* probabilities;    // [num_logits]: its probability
};

// Threads of a pass meet here; the last one to arrive lets the others go.
struct Barrier {
  int count = 1;
  int patience = 2000;  // turns before a waiting thread offers its processor to others
  int arrived = 0;
  unsigned generation = 0;

  void wait() {
    if (count == 1) return;
    const unsigned now = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == count) {
      __atomic_store_n(&arrived, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&generation, now + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&generation, __ATOMIC_ACQUIRE) == now; ++spins) relax(spins, patience);
  }

  // A partner that is not running needs the processor more than we do.
  static void relax(int spins, int patience) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
    if (spins >= patience) sched_yield();
  }
};

struct Kernels {
  const char* name;
  int max_queries;  // of one attention item
  void (*run)(const Model&, Pass&, int thread, int num_threads, Barrier&);
  void (*run_head)(const Model&, const Head&, HeadPass&, int thread, int num_threads, Barrier&);
  // y [m][rows] = x [m][cols] W^T, for tests of one product.
  void (*linear)(const Matrix&, const Activations&, int num_rows, float* y);
  // Sum of e^((row - top) / temperature) over a row of floats or doubles.
  double (*sum_weights)(const void* row, bool is_double, size_t count, double top, double temperature);
  // Indices that may win log_probs + noise, written to found [count]; returns how many.
  size_t (*contenders)(const int64_t* tokens, const double* log_probs, size_t count, const uint32_t* words, const uint32_t* key,
                       int64_t* found);
  // Random words of each token, high and low [count]; see sampling.philox.
  void (*philox)(const int64_t* tokens, size_t count, const uint32_t* words, const uint32_t* key, uint32_t* high, uint32_t* low);
};

}  // namespace foredraft
