// The arithmetic of a pass, compiled once per instruction set (FOREDRAFT_ISA names the namespace).
//
// Owns: every floating-point operation of the native ops, and the order in which each result is summed.  Does not know: threads' origin,
// Python, or how weights were packed.
//
// Row-invariance: a result is reduced in an order that depends on its own row's columns or context only, never on how many rows, threads
// or blocks there are.  So nothing here splits a reduction, -ffp-contract is off, and fused multiply-adds are written out.
#include "model.h"

#include <math.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace foredraft {
namespace FOREDRAFT_ISA {
namespace {

// ------------------------------------------------------------------------------------------------ 16 floats

#if defined(__AVX512F__)
struct V { __m512 v; };
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline V splat(float a) { return {_mm512_set1_ps(a)}; }
inline V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V vmax(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V vmin(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
inline V vabs(V a) { return {_mm512_abs_ps(a.v)}; }
inline V exp2i(V n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))}; }
inline V load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store_half(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT)); }
inline V load_bfloat(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))}; }
inline void store_int8(int8_t* p, V a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a.v))); }
#elif defined(__AVX2__)
struct V { __m256 a, b; };
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v.a); _mm256_storeu_ps(p + 8, v.b); }
inline V splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline V vmax(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V vmin(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 abs8(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline V vabs(V x) { return {abs8(x.a), abs8(x.b)}; }
inline __m256 exp2i8(__m256 n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
inline V exp2i(V n) { return {exp2i8(n.a), exp2i8(n.b)}; }
inline V load_half(const uint16_t* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))}; }
inline void store_half(uint16_t* p, V v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
inline __m256 bfloat8(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)); }
inline V load_bfloat(const uint16_t* p) { return {bfloat8(p), bfloat8(p + 8)}; }
inline void store_int8(int8_t* p, V v) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
#else
struct V { float v[16]; };
#define FOREDRAFT_EACH(expression) V r; for (int i = 0; i < 16; ++i) r.v[i] = (expression); return r
inline V load(const float* p) { FOREDRAFT_EACH(p[i]); }
inline void store(float* p, V a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i]; }
inline V splat(float a) { FOREDRAFT_EACH(a); }
inline V operator+(V a, V b) { FOREDRAFT_EACH(a.v[i] + b.v[i]); }
inline V operator-(V a, V b) { FOREDRAFT_EACH(a.v[i] - b.v[i]); }
inline V operator*(V a, V b) { FOREDRAFT_EACH(a.v[i] * b.v[i]); }
inline V operator/(V a, V b) { FOREDRAFT_EACH(a.v[i] / b.v[i]); }
inline V fma(V a, V b, V c) { FOREDRAFT_EACH(a.v[i] * b.v[i] + c.v[i]); }
inline V vmax(V a, V b) { FOREDRAFT_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline V vmin(V a, V b) { FOREDRAFT_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline V vabs(V a) { FOREDRAFT_EACH(fabsf(a.v[i])); }
inline float from_bits(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
inline uint32_t to_bits(float f) { uint32_t bits; memcpy(&bits, &f, 4); return bits; }
inline V exp2i(V n) { FOREDRAFT_EACH(from_bits(uint32_t(int32_t(n.v[i]) + 127) << 23)); }
inline float from_half(uint16_t h) {
  // Shift exponent and mantissa into place and correct the exponent's bias by a multiplication, which also normalises denormals.
  uint32_t magnitude = uint32_t(h & 0x7FFF) << 13;
  float f = from_bits(magnitude) * from_bits(0x77800000u);
  if ((h & 0x7C00) == 0x7C00) f = from_bits(magnitude | 0x7F800000u);
  return from_bits(to_bits(f) | uint32_t(h & 0x8000) << 16);
}
inline uint16_t to_half(float f) {
  uint32_t bits = to_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000u) return uint16_t(sign | 0x7E00);
  if (magnitude >= 0x477FF000u) return uint16_t(sign | 0x7C00);
  if (magnitude < 0x38800000u) {
    // Denormal: the addition aligns the mantissa and rounds to nearest even.
    float shifted = from_bits(magnitude) + 0.5f;
    return uint16_t(sign | (to_bits(shifted) - 0x3F000000u));
  }
  uint32_t odd = magnitude >> 13 & 1;
  return uint16_t(sign | ((magnitude - 0x38000000u + 0xFFF + odd) >> 13));
}
inline V load_half(const uint16_t* p) { FOREDRAFT_EACH(from_half(p[i])); }
inline void store_half(uint16_t* p, V a) { for (int i = 0; i < 16; ++i) p[i] = to_half(a.v[i]); }
inline V load_bfloat(const uint16_t* p) { FOREDRAFT_EACH(from_bits(uint32_t(p[i]) << 16)); }
inline void store_int8(int8_t* p, V a) { for (int i = 0; i < 16; ++i) p[i] = a.v[i] == a.v[i] ? int8_t(a.v[i]) : int8_t(0); }
#endif

// Lanes are added in one fixed tree: i with i + 8, then with i + 4, i + 2, i + 1.
#if defined(__AVX2__)
inline float sum(V v) {
#if defined(__AVX512F__)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v.v), 1)));
#else
  __m256 eight = _mm256_add_ps(v.a, v.b);
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
inline float sum(V a) {
  for (int width = 8; width; width >>= 1)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
#endif

#if defined(__AVX2__)
inline float largest(V v) {
#if defined(__AVX512F__)
  __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(v.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v.v), 1)));
#else
  __m256 eight = _mm256_max_ps(v.a, v.b);
#endif
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}
#else
inline float largest(V a) {
  for (int width = 8; width; width >>= 1)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
#endif

// e^x: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its series up to r^7; relative error below 2e-7.  Arguments are clamped to where
// the result is a normal float; NaN stays NaN.
inline V exponential(V x) {
  V clamped = vmin(splat(88.0f), vmax(splat(-87.0f), x));
  V magic = splat(12582912.0f);
  V n = (fma(clamped, splat(1.44269504f), magic)) - magic;
  V r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  V e = splat(1.98412698e-4f);
  e = fma(e, r, splat(1.38888889e-3f));
  e = fma(e, r, splat(8.33333333e-3f));
  e = fma(e, r, splat(4.16666667e-2f));
  e = fma(e, r, splat(1.66666667e-1f));
  e = fma(e, r, splat(0.5f));
  e = fma(e, r, splat(1.0f));
  e = fma(e, r, splat(1.0f));
  // x - x is 0, or NaN when x is NaN or infinite; of those only NaN and +inf may spoil the result.
  V poison = vmax(splat(-87.0f), x);
  return e * exp2i(n) + (poison - poison);
}

// ------------------------------------------------------------------------------------------------ matrix tiles

// Asks for the bytes that a thread reads `kAhead` later, since not every processor fetches ahead by itself.  A thread reads a share of each
// matrix; beyond the end of one it reads on `jump` bytes further, at its share of the next.
struct Stream {
  static constexpr uintptr_t kAhead = 8192;
  uintptr_t end = UINTPTR_MAX;
  uintptr_t jump = 0;

  // What is read kAhead after `at`.  Never read through: it may lie outside of any matrix.
  const char* ahead(const uint8_t* at) const {
    const uintptr_t place = uintptr_t(at) + kAhead;
    return (const char*)(place < end ? place : place + jump);
  }
  template <int kBytes>
  void fetch(const uint8_t* at) const {
    const char* place = ahead(at);
#pragma GCC unroll 9
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(place + i, 0, 3);
  }
};

// out[t][m][16] for M input rows and T tiles of 16 output rows.  x, quants, ... point at the first of the M rows.  Two tiles at once
// share the broadcast inputs; what an output is summed from, and in which order, does not depend on M or T.
struct Rows {
  const float* x;
  const int8_t* quants;
  const float *scales, *sums;
  const int32_t* isums;
  int cols;
  Stream streams[2];  // of the first and the second tile

  Rows after(int num_rows) const {
    const size_t values = size_t(num_rows) * cols, blocks = values / kBlock;
    return {x + values, quants + values, scales + blocks, sums + blocks, isums + blocks, cols, {streams[0], streams[1]}};
  }
};

inline int32_t four(const int8_t* p) { int32_t v; memcpy(&v, p, 4); return v; }

template <Format F>
inline V load_weights(const uint8_t* tile, int k) {
  if (F == F32) return load((const float*)tile + size_t(k) * kTile);
  if (F == F16) return load_half((const uint16_t*)tile + size_t(k) * kTile);
  return load_bfloat((const uint16_t*)tile + size_t(k) * kTile);
}

template <int M, int T, Format F>
void float_tiles(const uint8_t* first, const uint8_t* second, const Rows& rows, float* out) {
  V acc[M][T];
  for (int m = 0; m < M; ++m)
    for (int t = 0; t < T; ++t) acc[m][t] = splat(0.0f);
  const float* x[M];
  for (int m = 0; m < M; ++m) x[m] = rows.x + size_t(m) * rows.cols;
  constexpr int kStep = 16, kBytes = (F == F32 ? 4 : 2) * kTile;
  for (int start = 0; start < rows.cols; start += kStep) {
    const int stop = start + kStep < rows.cols ? start + kStep : rows.cols;
    const char *ahead = rows.streams[0].ahead(first + size_t(start) * kBytes), *also = rows.streams[1].ahead(second + size_t(start) * kBytes);
    for (int k = start; k < stop; ++k) {
      __builtin_prefetch(ahead + (k - start) * kBytes, 0, 3);
      if (T > 1) __builtin_prefetch(also + (k - start) * kBytes, 0, 3);
      V w[T];
      w[0] = load_weights<F>(first, k);
      if (T > 1) w[T - 1] = load_weights<F>(second, k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const V xm = splat(x[m][k]);
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t) acc[m][t] = fma(w[t], xm, acc[m][t]);
      }
    }
  }
  for (int t = 0; t < T; ++t)
    for (int m = 0; m < M; ++m) store(out + (t * M + m) * kTile, acc[m][t]);
}

// Adds one block's integer dot products: acc += scale_w * scale_x * dot (+ min_w * sum_x).
template <Format F>
inline V add_block(V acc, V dots, V scale, V minimum, const Rows& rows, size_t at) {
  acc = fma(dots, scale * splat(rows.scales[at]), acc);
  return F == Q8_0 ? acc : fma(minimum, splat(rows.sums[at]), acc);
}

#if defined(__AVX512VNNI__)

template <int M, Format F>
void quant_tile(const uint8_t* tile, const Rows& rows, const Stream& stream, float* out) {
  constexpr int kCodes = F == Q8_0 ? 512 : 256;
  const int blocks = rows.cols / kBlock;
  const __m512i low = _mm512_set1_epi8(15);
  V acc[M];
  for (int m = 0; m < M; ++m) acc[m] = splat(0.0f);
  for (int b = 0; b < blocks; ++b) {
    stream.fetch<block_bytes(F)>(tile);
    __m512i dots[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) dots[m] = F == Q8_0 ? _mm512_set1_epi32(-128 * rows.isums[size_t(m) * blocks + b]) : _mm512_setzero_si512();
    const int8_t* x = rows.quants + b * kBlock;
#pragma GCC unroll 8
    for (int i = 0; i < kCodes / 64; ++i) {
      const __m512i codes = _mm512_loadu_si512(tile + 64 * i);
      const __m512i w0 = F == Q8_0 ? codes : _mm512_and_si512(codes, low), w1 = _mm512_and_si512(_mm512_srli_epi16(codes, 4), low);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const int8_t* xm = x + size_t(m) * rows.cols + (F == Q8_0 ? 4 : 8) * i;
        dots[m] = _mm512_dpbusd_epi32(dots[m], w0, _mm512_set1_epi32(four(xm)));
        if (F != Q8_0) dots[m] = _mm512_dpbusd_epi32(dots[m], w1, _mm512_set1_epi32(four(xm + 4)));
      }
    }
    const V scale = load_half((const uint16_t*)(tile + kCodes));
    const V minimum = F == Q4_1 ? load_half((const uint16_t*)(tile + kCodes + 32)) : scale * splat(-8.0f);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) acc[m] = add_block<F>(acc[m], V{_mm512_cvtepi32_ps(dots[m])}, scale, minimum, rows, size_t(m) * blocks + b);
    tile += block_bytes(F);
  }
  for (int m = 0; m < M; ++m) store(out + m * kTile, acc[m]);
}

#elif defined(__AVX2__)

// Keeps the compiler from postponing a sum and spilling what it is made of.
inline void settle(__m256i& sum) { __asm__ volatile("" : "+x"(sum)); }

// Four columns of a row for each of 8 outputs.
inline __m256i spread(const int8_t* p) { return _mm256_castps_si256(_mm256_broadcast_ss((const float*)p)); }

// 8 outputs times 4 columns as bytes, and what an instruction that multiplies without sign has to know of them.
struct Codes {
  __m256i magnitudes, signs;
};

template <Format F>
inline void add_product(__m256i& sum, const Codes& w, __m256i x) {
#if defined(__AVXVNNI__)
  sum = _mm256_dpbusd_avx_epi32(sum, w.magnitudes, x);
#else
  if (F == Q8_0) {
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitudes, _mm256_sign_epi8(x, w.signs));
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  } else {
    // 16 products of at most 15 * 127 fit into 16 bits: a block needs widening only once.
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w.magnitudes, x));
  }
#endif
  settle(sum);
}

// Integer dot products of the 16 outputs of a block with M rows; both halves of 8 share each spread input.
template <int M, Format F>
inline void block_dots(const uint8_t* tile, const int8_t* x, int cols, __m256i (*dots)[M]) {
  constexpr int kParts = F == Q8_0 ? 1 : 2;  // groups of 4 columns whose codes lie together
  const __m256i low = _mm256_set1_epi8(15), flip = _mm256_set1_epi8(-128);
  for (int m = 0; m < M; ++m) dots[0][m] = dots[1][m] = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < 8 / kParts; ++i) {
    Codes w[2][kParts];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256i codes = _mm256_loadu_si256((const __m256i*)(tile + 64 * i + 32 * half));
      if constexpr (F == Q8_0) {
#if defined(__AVXVNNI__)
        w[half][0] = {codes, codes};
#else
        const __m256i values = _mm256_xor_si256(codes, flip);
        w[half][0] = {_mm256_abs_epi8(values), values};
#endif
      } else {
        w[half][0].magnitudes = _mm256_and_si256(codes, low);
        w[half][1].magnitudes = _mm256_and_si256(_mm256_srli_epi16(codes, 4), low);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const __m256i xm = spread(x + size_t(m) * cols + 4 * (kParts * i + part));
        add_product<F>(dots[0][m], w[0][part], xm);
        add_product<F>(dots[1][m], w[1][part], xm);
      }
  }
#if !defined(__AVXVNNI__)
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
    for (int half = 0; half < 2 && F != Q8_0; ++half) dots[half][m] = _mm256_madd_epi16(dots[half][m], _mm256_set1_epi16(1));
#endif
}

template <int M, Format F>
void quant_tile(const uint8_t* tile, const Rows& rows, const Stream& stream, float* out) {
  constexpr int kCodes = F == Q8_0 ? 512 : 256;
  const int blocks = rows.cols / kBlock;
  __m256 acc[2][M];
  for (int m = 0; m < M; ++m) acc[0][m] = acc[1][m] = _mm256_setzero_ps();
  for (int b = 0; b < blocks; ++b) {
    stream.fetch<block_bytes(F)>(tile);
    const uint16_t* scales = (const uint16_t*)(tile + kCodes);
    __m256i dots[2][M];
    block_dots<M, F>(tile, rows.quants + b * kBlock, rows.cols, dots);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(scales + 8 * half)));
      const __m256 minimum = F == Q4_1 ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(scales + kTile + 8 * half)))
                                       : _mm256_mul_ps(scale, _mm256_set1_ps(-8.0f));
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const size_t at = size_t(m) * blocks + b;
        __m256i dot = dots[half][m];
#if defined(__AVXVNNI__)
        if (F == Q8_0) dot = _mm256_sub_epi32(dot, _mm256_set1_epi32(128 * rows.isums[at]));
#endif
        const __m256 sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, _mm256_set1_ps(rows.scales[at])), acc[half][m]);
        acc[half][m] = F == Q8_0 ? sum : _mm256_fmadd_ps(minimum, _mm256_set1_ps(rows.sums[at]), sum);
      }
    }
    tile += block_bytes(F);
  }
  for (int m = 0; m < M; ++m) store(out + m * kTile, V{acc[0][m], acc[1][m]});
}

#else

template <int M, Format F>
void quant_tile(const uint8_t* tile, const Rows& rows, const Stream& stream, float* out) {
  const int blocks = rows.cols / kBlock;
  V acc[M];
  for (int m = 0; m < M; ++m) acc[m] = splat(0.0f);
  for (int b = 0; b < blocks; ++b) {
    stream.fetch<block_bytes(F)>(tile);
    int8_t w[kBlock][kTile];
    for (int k = 0; k < kBlock; ++k)
      for (int lane = 0; lane < kTile; ++lane)
        w[k][lane] = F == Q8_0 ? int8_t(tile[64 * (k / 4) + 4 * lane + k % 4] ^ 0x80)
                               : int8_t(tile[64 * (k / 8) + 4 * lane + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15);
    tile += F == Q8_0 ? 512 : 256;
    V scale = load_half((const uint16_t*)tile), minimum = scale;
    tile += 32;
    if (F == Q4_1) {
      minimum = load_half((const uint16_t*)tile);
      tile += 32;
    } else if (F == Q4_0) {
      minimum = scale * splat(-8.0f);
    }
    for (int m = 0; m < M; ++m) {
      int32_t dots[kTile] = {0};
      const int8_t* x = rows.quants + size_t(m) * rows.cols + b * kBlock;
      for (int k = 0; k < kBlock; ++k)
        for (int lane = 0; lane < kTile; ++lane) dots[lane] += int32_t(w[k][lane]) * x[k];
      V dot;
      for (int lane = 0; lane < kTile; ++lane) dot.v[lane] = float(dots[lane]);
      acc[m] = add_block<F>(acc[m], dot, scale, minimum, rows, size_t(m) * blocks + b);
    }
  }
  for (int m = 0; m < M; ++m) store(out + m * kTile, acc[m]);
}

#endif

#if defined(__AVX512F__)
constexpr int kMaxRows = 8, kMaxPairRows = 8, kMaxDotRows = 8;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kMaxPairRows = 3, kMaxDotRows = 5;
#else
constexpr int kMaxRows = 4, kMaxPairRows = 4, kMaxDotRows = 4;
#endif

// Of more than kMaxDotRows rows the integer sums would not fit into the registers.
template <int M, Format F>
void dot_rows(const uint8_t* tile, const Rows& rows, const Stream& stream, float* out) {
  if constexpr (M <= kMaxDotRows) {
    quant_tile<M, F>(tile, rows, stream, out);
  } else {
    quant_tile<M / 2, F>(tile, rows, stream, out);
    quant_tile<M - M / 2, F>(tile, rows.after(M / 2), stream, out + M / 2 * kTile);
  }
}

template <int M>
void tile_rows(Format format, const uint8_t* tile, const Rows& rows, int stream, float* out) {
  switch (format) {
    case F32: return float_tiles<M, 1, F32>(tile, tile, rows, out);
    case F16: return float_tiles<M, 1, F16>(tile, tile, rows, out);
    case BF16: return float_tiles<M, 1, BF16>(tile, tile, rows, out);
    case Q8_0: return dot_rows<M, Q8_0>(tile, rows, rows.streams[stream], out);
    case Q4_0: return dot_rows<M, Q4_0>(tile, rows, rows.streams[stream], out);
    case Q4_1: return dot_rows<M, Q4_1>(tile, rows, rows.streams[stream], out);
  }
}

// Two tiles at once where the registers suffice for their sums.
template <int M>
void tile_pair(Format format, const uint8_t* first, const uint8_t* second, const Rows& rows, float* out) {
  if constexpr (M <= kMaxPairRows) {
    switch (format) {
      case F32: return float_tiles<M, 2, F32>(first, second, rows, out);
      case F16: return float_tiles<M, 2, F16>(first, second, rows, out);
      case BF16: return float_tiles<M, 2, BF16>(first, second, rows, out);
      default: break;
    }
  }
  tile_rows<M>(format, first, rows, 0, out);
  tile_rows<M>(format, second, rows, 1, out + M * kTile);
}

// One tile, or two when `second` is not null: out[1 or 2][num_rows][16].
void some_rows(int num_rows, Format format, const uint8_t* first, const uint8_t* second, const Rows& rows, float* out) {
#define FOREDRAFT_ROWS(m) \
  case m: return second ? tile_pair<m>(format, first, second, rows, out) : tile_rows<m>(format, first, rows, 0, out);
  switch (num_rows) {
    FOREDRAFT_ROWS(1) FOREDRAFT_ROWS(2) FOREDRAFT_ROWS(3) FOREDRAFT_ROWS(4)
#if defined(__AVX2__)
    FOREDRAFT_ROWS(5) FOREDRAFT_ROWS(6)
#endif
#if defined(__AVX512F__)
    FOREDRAFT_ROWS(7) FOREDRAFT_ROWS(8)
#endif
  }
#undef FOREDRAFT_ROWS
}

inline Rows rows_at(const Activations& in, int row, int cols) {
  const size_t blocks = size_t(cols) / kBlock;
  return {in.values + size_t(row) * cols, in.quants + size_t(row) * cols, in.scales + row * blocks, in.sums + row * blocks,
          in.isums + row * blocks, cols, {}};
}

// Where a thread reads on after tiles [begin, end) of `w`, `offset` bytes into its share of the next matrix.
inline Stream stream_to(const Matrix& w, int end, const uint8_t* next, uintptr_t offset) {
  const uintptr_t stop = uintptr_t(w.tile(end));
  return {stop, next ? uintptr_t(next) + offset - stop : 0};
}

// Input rows are taken in chunks that stay in the second-level cache while the weights stream past.
constexpr int kChunkRows = 120;

// For tiles [begin, end): sink(row, tile, values of 16 outputs).  `next`, unless null, is what this thread multiplies with afterwards.
template <class Sink>
inline void product(const Matrix& w, const Activations& in, int num_rows, int begin, int end, const uint8_t* next, Sink sink) {
  const Stream stream = stream_to(w, end, next, 0);
  float out[2 * kMaxRows * kTile];
  for (int chunk = 0; chunk < num_rows; chunk += kChunkRows) {
    const int stop = chunk + kChunkRows < num_rows ? chunk + kChunkRows : num_rows;
    // Unquantised tiles go in pairs: they share the broadcast inputs.  A quantised one has no registers left for a second.
    const int width = is_quantised(w.format) ? 1 : 2;
    for (int t = begin; t < end; t += width) {
      const int count = end - t < width ? 1 : width;
      for (int row = chunk; row < stop;) {
        const int m = stop - row < kMaxRows ? stop - row : kMaxRows;
        Rows rows = rows_at(in, row, w.cols);
        rows.streams[0] = rows.streams[1] = stream;
        some_rows(m, w.format, w.tile(t), count == 2 ? w.tile(t + 1) : nullptr, rows, out);
        for (int j = 0; j < count; ++j)
          for (int i = 0; i < m; ++i) sink(row + i, t + j, out + (j * m + i) * kTile);
        row += m;
      }
    }
  }
}

// ------------------------------------------------------------------------------------------------ rows

// Symmetric int8 blocks of 32: x = scale * quant.  A block with NaN or infinity gets a NaN scale, one without normal values scale 0.
void quantise_row(const float* x, int cols, int8_t* quants, float* scales, float* sums, int32_t* isums) {
  for (int b = 0; b < cols / kBlock; ++b) {
    V x0 = load(x + b * kBlock), x1 = load(x + b * kBlock + 16);
    float most = largest(vmax(vabs(x0), vabs(x1)));
    float poison = sum(x0 * splat(0.0f) + x1 * splat(0.0f));
    float scale = most / 127.0f;
    const bool zero = !(scale >= 1.17549435e-38f) || poison != poison;
    V inverse = splat(zero ? 0.0f : 1.0f / scale);
    V magic = splat(12582912.0f), low = splat(-127.0f), high = splat(127.0f);
    V q0 = vmax(low, vmin(high, (x0 * inverse + magic) - magic)), q1 = vmax(low, vmin(high, (x1 * inverse + magic) - magic));
    if (poison != poison) q0 = q1 = splat(0.0f);
    store_int8(quants + b * kBlock, q0);
    store_int8(quants + b * kBlock + 16, q1);
    scale = zero ? 0.0f : scale;
    scales[b] = scale + poison;
    float total = sum(q0 + q1);
    isums[b] = int32_t(total);
    sums[b] = scales[b] * total;
  }
}

inline void quantise(const Activations& in, int row, int cols) {
  const size_t blocks = size_t(cols) / kBlock;
  quantise_row(in.values + size_t(row) * cols, cols, in.quants + size_t(row) * cols, in.scales + row * blocks, in.sums + row * blocks,
               in.isums + row * blocks);
}

// y = x / sqrt(mean(x^2) + eps) * weight
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
  V squares = splat(0.0f);
  for (int i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  V inverse = splat(1.0f / sqrtf(sum(squares) / float(n) + eps));
  for (int i = 0; i < n; i += 16) store(y + i, load(x + i) * inverse * load(weight + i));
}

void rotate(float* head, const float* cosine, const float* sine, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cosine[i] - b * sine[i];
    head[i + half] = b * cosine[i] + a * sine[i];
  }
}

V gated(V gate, V up, bool gelu) {
  // Both are 0 there; the bound keeps the cube and the exponential finite, and NaN stays NaN.
  gate = vmax(splat(-100.0f), gate);
  V argument = gate;
  if (gelu) argument = fma(gate * gate * gate, splat(0.044715f), gate) * splat(1.59576912f);
  return gate / (splat(1.0f) + exponential(splat(0.0f) - argument)) * up;
}

// Row of a matrix as floats, times factor.
void embed_row(const Matrix& w, int row, float factor, float* out) {
  const uint8_t* tile = w.tile(row / kTile);
  const int lane = row % kTile;
  if (!is_quantised(w.format)) {
    for (int k = 0; k < w.cols; ++k) {
      float lanes[16];
      if (w.format == F32) lanes[lane] = ((const float*)tile)[size_t(k) * kTile + lane];
      else if (w.format == F16) store(lanes, load_half((const uint16_t*)tile + size_t(k) * kTile));
      else store(lanes, load_bfloat((const uint16_t*)tile + size_t(k) * kTile));
      out[k] = lanes[lane] * factor;
    }
    return;
  }
  const int code_bytes = w.format == Q8_0 ? 512 : 256;
  for (int b = 0; b < w.cols / kBlock; ++b) {
    float scale[16], minimum[16];
    store(scale, load_half((const uint16_t*)(tile + code_bytes)));
    if (w.format == Q4_1) store(minimum, load_half((const uint16_t*)(tile + code_bytes + 32)));
    else minimum[lane] = w.format == Q4_0 ? scale[lane] * -8.0f : 0.0f;
    for (int k = 0; k < kBlock; ++k) {
      const int code = w.format == Q8_0 ? int(tile[64 * (k / 4) + 4 * lane + k % 4]) - 128
                                        : tile[64 * (k / 8) + 4 * lane + k % 4] >> (k % 8 < 4 ? 0 : 4) & 15;
      out[b * kBlock + k] = (scale[lane] * float(code) + minimum[lane]) * factor;
    }
    tile += code_bytes + (w.format == Q4_1 ? 64 : 32);
  }
}

// ------------------------------------------------------------------------------------------------ attention

#if defined(__AVX512F__)
constexpr int kMaxQueries = 8;
// Sums at once for N queries, in vectors of 16: as many as stay in registers.
constexpr int sums_at_once(int n) { return n <= 2 ? 4 : n <= 4 ? 2 : 1; }
#else
constexpr int kMaxQueries = 6;
constexpr int sums_at_once(int n) { return n == 1 ? 4 : n == 2 ? 2 : 1; }
#endif

template <bool kHalf>
inline V load_cached(const uint8_t* base, size_t index) {
  return kHalf ? load_half((const uint16_t*)base + index) : load((const float*)base + index);
}

// Some queries of one sequence on one key-value head, attending together: keys and values are read once for all of them.
struct Attention {
  const Model& model;
  const Layer& layer;
  const Pass& pass;
  const AttentionItem& item;
  float* scores;  // [kMaxQueries][score_stride], from key `origin` on
  int origin, last;
  int positions[8], firsts[8];
  const float* queries[8];
  float* outs[8];
  float inverses[8];

  static constexpr int kAhead = 4;  // groups of 16 keys

  size_t block_base(int key) const {
    const int32_t block = pass.tables[pass.table_of[item.first_row] + key / model.block_size];
    return (size_t(block) * model.kv_heads + item.kv_head) * model.block_size * model.head_dim;
  }

  void open() {
    const int group = model.heads / model.kv_heads, dim = model.head_dim, stride = (model.heads + 2 * model.kv_heads) * dim;
    for (int i = 0; i < item.num_queries; ++i) {
      const int row = item.first_row + (item.first_query + i) / group, head = item.kv_head * group + (item.first_query + i) % group;
      positions[i] = pass.positions[row];
      firsts[i] = layer.window && positions[i] >= layer.window ? positions[i] - layer.window + 1 : 0;
      if (pass.first_keys && firsts[i] < pass.first_keys[row]) firsts[i] = pass.first_keys[row];
      queries[i] = pass.qkv + size_t(row) * stride + head * dim;
      outs[i] = pass.in.values + size_t(row) * model.heads * dim + head * dim;
    }
    origin = firsts[0] / kTile * kTile;
    last = positions[item.num_queries - 1];
  }

  // Asks for the 16 keys, or their values, from `key` on.
  template <bool kHalf>
  void fetch(const uint8_t* cache, int key) const {
    if (key > last || model.block_size % kTile) return;
    const int width = model.head_dim * (kHalf ? 2 : 4);
    const uint8_t* place = cache + block_base(key) * (kHalf ? 2 : 4) + size_t(key % model.block_size) * width;
    for (int i = 0; i < kTile * width; i += 64) __builtin_prefetch(place + i, 0, 3);
  }

  // Scores of G times 16 keys from `key` on.  Keys lie as [dim][16 keys] where blocks are multiples of 16, so that 16 scores are summed at
  // once, over dim in order; G groups give the processor independent sums to work on.
  template <bool kHalf, int N, int G>
  void score_groups(int key, float* gathered) {
    const int dim = model.head_dim, size = model.block_size;
    V acc[G][N];
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < N; ++i) acc[g][i] = splat(0.0f);
    if (size % kTile == 0) {
      size_t base[G];
      for (int g = 0; g < G; ++g) base[g] = block_base(key + g * kTile) + size_t((key + g * kTile) % size) * dim;
      for (int d = 0; d < dim; ++d) {
        V keys[G];
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) keys[g] = load_cached<kHalf>(layer.keys, base[g] + size_t(d) * kTile);
#pragma GCC unroll 8
        for (int i = 0; i < N; ++i) {
          const V query = splat(queries[i][d]);
#pragma GCC unroll 4
          for (int g = 0; g < G; ++g) acc[g][i] = fma(query, keys[g], acc[g][i]);
        }
      }
    } else {
      for (int g = 0; g < G; ++g) {
        gather<kHalf>(key + g * kTile, gathered);
        for (int d = 0; d < dim; ++d)
          for (int i = 0; i < N; ++i) acc[g][i] = fma(splat(queries[i][d]), load(gathered + d * kTile), acc[g][i]);
      }
    }
    for (int g = 0; g < G; ++g)
      for (int i = 0; i < N; ++i)
        store(scores + i * pass.score_stride + key + g * kTile - origin, acc[g][i] * splat(model.attention_scale));
  }

  template <bool kHalf, int N>
  void score() {
    constexpr int kGroups = sums_at_once(N);
    float gathered[256 * kTile];
    int key = origin;
    for (int i = 0; i < kAhead; ++i) fetch<kHalf>(layer.keys, key + i * kTile);
    for (; key + (kGroups - 1) * kTile <= last; key += kGroups * kTile) {
      for (int i = 0; i < kGroups; ++i) fetch<kHalf>(layer.keys, key + (kAhead + i) * kTile);
      score_groups<kHalf, N, kGroups>(key, gathered);
    }
    for (int i = 0; i < kAhead; ++i) fetch<kHalf>(layer.values, origin + i * kTile);
    for (; key <= last; key += kTile) score_groups<kHalf, N, 1>(key, gathered);
  }

  template <bool kHalf>
  void gather(int key, float* gathered) const {
    const int dim = model.head_dim, size = model.block_size;
    float row[16];
    for (int lane = 0; lane < kTile; ++lane) {
      const bool there = key + lane <= last;
      const size_t base = there ? block_base(key + lane) + size_t((key + lane) % size) * dim : 0;
      for (int d = 0; d < dim; d += kTile) {
        store(row, there ? load_cached<kHalf>(layer.keys, base + d) : splat(0.0f));
        for (int j = 0; j < kTile; ++j) gathered[(d + j) * kTile + lane] = row[j];
      }
    }
  }

  // Scores of query i to weights; those outside of [first, position] become 0.  Lanes are summed over groups of 16 absolute positions.
  void weigh(int i) {
    float* score = scores + i * pass.score_stride - origin;
    const int begin = firsts[i] / kTile * kTile, end = positions[i] / kTile * kTile + kTile;
    for (int key = begin; key < firsts[i]; ++key) score[key] = -INFINITY;
    for (int key = positions[i] + 1; key < end; ++key) score[key] = -INFINITY;
    V most = load(score + begin);
    for (int key = begin + kTile; key < end; key += kTile) most = vmax(most, load(score + key));
    const V top = splat(largest(most));
    V total = splat(0.0f);
    for (int key = begin; key < end; key += kTile) {
      store(score + key, exponential(load(score + key) - top));
      for (int k = key; k < firsts[i]; ++k) score[k] = 0.0f;
      for (int k = end - 1; k > positions[i] && k >= key; --k) score[k] = 0.0f;
      total = total + load(score + key);
    }
    inverses[i] = 1.0f / sum(total);
  }

  // acc[n][c] += weight of key * 16 of its values, keys in ascending order; N queries from `i` on, C columns of 16 from `column` on.
  template <bool kHalf, int N, int C>
  void add_values(int i, int begin, int end, int column, V (*acc)[C]) const {
    const int dim = model.head_dim, size = model.block_size;
    for (int key = begin; key < end;) {
      const int run = size - key % size < end - key ? size - key % size : end - key;
      if (N > 1 && column == 0)
        for (int ahead = key / kTile * kTile; ahead < key + run; ahead += kTile) fetch<kHalf>(layer.values, ahead + kAhead * kTile);
      const size_t base = block_base(key) + size_t(key % size) * dim + column;
      const float* weights = scores + i * pass.score_stride + key - origin;
      for (int j = 0; j < run; ++j) {
        V values[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) values[c] = load_cached<kHalf>(layer.values, base + size_t(j) * dim + c * kTile);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
          const V weight = splat(weights[n * pass.score_stride + j]);
#pragma GCC unroll 4
          for (int c = 0; c < C; ++c) acc[n][c] = fma(weight, values[c], acc[n][c]);
        }
      }
      key += run;
    }
  }

  // Keys that all queries see are read once for all; the few before and after, by each query alone, so that none meets another's future.
  template <bool kHalf, int N, int C>
  void collect_columns(int column) {
    const int shared_begin = firsts[N - 1], shared_end = positions[0] + 1;
    const bool shared = shared_begin < shared_end;
    V acc[N][C];
    for (int i = 0; i < N; ++i) {
      for (int c = 0; c < C; ++c) acc[i][c] = splat(0.0f);
      add_values<kHalf, 1, C>(i, firsts[i], shared ? shared_begin : positions[i] + 1, column, acc + i);
    }
    if (shared) {
      add_values<kHalf, N, C>(0, shared_begin, shared_end, column, acc);
      for (int i = 0; i < N; ++i) add_values<kHalf, 1, C>(i, shared_end, positions[i] + 1, column, acc + i);
    }
    for (int i = 0; i < N; ++i)
      for (int c = 0; c < C; ++c) store(outs[i] + column + c * kTile, acc[i][c] * splat(inverses[i]));
  }

  template <bool kHalf, int N>
  void collect() {
    constexpr int kColumns = sums_at_once(N);
    int column = 0;
    for (; column + kColumns * kTile <= model.head_dim; column += kColumns * kTile) collect_columns<kHalf, N, kColumns>(column);
    for (; column < model.head_dim; column += kTile) collect_columns<kHalf, N, 1>(column);
  }

  template <bool kHalf, int N>
  void run() {
    open();
    score<kHalf, N>();
    for (int i = 0; i < N; ++i) weigh(i);
    collect<kHalf, N>();
    if (is_quantised(layer.o.format) && model.head_dim % kBlock == 0)
      for (int i = 0; i < N; ++i) quantise_out(i);
  }

  // What query i collected, as input of the product with layer.o; for heads of whole blocks.
  void quantise_out(int i) const {
    const size_t at = size_t(outs[i] - pass.in.values), block = at / kBlock;
    quantise_row(outs[i], model.head_dim, pass.in.quants + at, pass.in.scales + block, pass.in.sums + block, pass.in.isums + block);
  }

  template <bool kHalf>
  void run_any() {
#define FOREDRAFT_QUERIES(n) \
  case n: return run<kHalf, n>();
    switch (item.num_queries) {
      FOREDRAFT_QUERIES(1) FOREDRAFT_QUERIES(2) FOREDRAFT_QUERIES(3) FOREDRAFT_QUERIES(4) FOREDRAFT_QUERIES(5) FOREDRAFT_QUERIES(6)
#if defined(__AVX512F__)
      FOREDRAFT_QUERIES(7) FOREDRAFT_QUERIES(8)
#endif
    }
#undef FOREDRAFT_QUERIES
  }
};

// ------------------------------------------------------------------------------------------------ a pass

struct Share {
  int begin, end;
};

inline Share share(int total, int thread, int num_threads) {
  return {int(int64_t(total) * thread / num_threads), int(int64_t(total) * (thread + 1) / num_threads)};
}

struct Worker {
  const Model& model;
  Pass& pass;
  int thread, num_threads;
  Barrier& barrier;
  Share mine;  // rows

  float* x(int row) const { return pass.x + size_t(row) * model.hidden; }

  // The first of this thread's tiles.
  const uint8_t* own(const Matrix& w) const { return w.tile(share(w.tiles(), thread, num_threads).begin); }

  // Rows of x, normalised if there is a norm, as input of a product with w.
  void prepare(const float* norm, const Matrix& w) {
    for (int row = mine.begin; row < mine.end; ++row) {
      float* in = pass.in.values + size_t(row) * model.hidden;
      if (norm) rms_norm(x(row), norm, model.hidden, model.eps, in);
      else memcpy(in, x(row), sizeof(float) * model.hidden);
      if (is_quantised(w.format)) quantise(pass.in, row, w.cols);
    }
    barrier.wait();
  }

  // x += in W^T, with a norm in between for families that have one.
  void add_product(const Matrix& w, const Activations& in, const float* norm, const uint8_t* next) {
    const Share tiles = share(w.tiles(), thread, num_threads);
    float* to = norm ? pass.y : pass.x;
    product(w, in, pass.num_rows, tiles.begin, tiles.end, next, [&](int row, int t, const float* out) {
      float* place = to + size_t(row) * w.rows + t * kTile;
      store(place, norm ? load(out) : load(place) + load(out));
    });
    barrier.wait();
    if (!norm) return;
    for (int row = mine.begin; row < mine.end; ++row) {
      float* y = pass.y + size_t(row) * model.hidden;
      rms_norm(y, norm, model.hidden, model.eps, y);
      for (int i = 0; i < model.hidden; i += 16) store(x(row) + i, load(x(row) + i) + load(y + i));
    }
  }

  // Heads of queries, then of keys, then of values.  Placing the latter is more work: of an odd number the first thread has more.
  Share own_heads() const {
    const int num_heads = model.heads + 2 * model.kv_heads;
    const Share from_end = share(num_heads, num_threads - 1 - thread, num_threads);
    return {num_heads - from_end.end, num_heads - from_end.begin};
  }

  const uint8_t* own_qkv(const Layer& layer) const { return layer.qkv.tile(own_heads().begin * (model.head_dim / kTile)); }

  // Norms of this thread's heads, rotation, and writing keys and values to the cache.
  void place_heads(const Layer& layer) {
    const int dim = model.head_dim, half = dim / 2, stride = (model.heads + 2 * model.kv_heads) * dim;
    const Share own = own_heads();
    for (int row = 0; row < pass.num_rows; ++row) {
      float* heads = pass.qkv + size_t(row) * stride;
      const int position = pass.positions[row];
      const float* cosine = pass.rotations + (size_t(layer.rope) * pass.num_rows + row) * dim;
      const float* sine = cosine + half;
      for (int h = own.begin; h < own.end && h < model.heads + model.kv_heads; ++h) {
        const float* norm = h < model.heads ? layer.q_norm : layer.k_norm;
        if (norm) rms_norm(heads + h * dim, norm, dim, model.eps, heads + h * dim);
        rotate(heads + h * dim, cosine, sine, dim);
      }
      const int block = pass.tables[pass.table_of[row] + position / model.block_size];
      for (int h = own.begin > model.heads ? own.begin : model.heads; h < own.end; ++h) {
        const bool is_key = h < model.heads + model.kv_heads;
        const size_t group = size_t(h - model.heads - (is_key ? 0 : model.kv_heads));
        const size_t base = (size_t(block) * model.kv_heads + group) * model.block_size * dim;
        const int offset = position % model.block_size;
        uint8_t* cache = is_key ? layer.keys : layer.values;
        if (!is_key || model.block_size % kTile) write_row(cache, base + size_t(offset) * dim, 1, heads + h * dim);
        else write_row(cache, base + size_t(offset / kTile * kTile) * dim + offset % kTile, kTile, heads + h * dim);
      }
    }
  }

  // One head's values to the cache, `step` places apart.
  void write_row(uint8_t* cache, size_t at, int step, const float* values) const {
    uint16_t halves[16];
    for (int i = 0; i < model.head_dim; i += kTile) {
      if (model.half_cache) store_half(halves, load(values + i));
      for (int j = 0; j < kTile; ++j) {
        const size_t place = at + size_t(i + j) * step;
        if (model.half_cache) ((uint16_t*)cache)[place] = halves[j];
        else ((float*)cache)[place] = values[i + j];
      }
    }
  }

  // Queries, keys and values; the latter two go to the cache.
  void project(const Layer& layer) {
    const int dim = model.head_dim, stride = (model.heads + 2 * model.kv_heads) * dim;
    // Whole heads, so that a thread can place what it has computed without waiting for others.
    const Share own_part = own_heads();
    const int tiles = dim / kTile;
    product(layer.qkv, pass.in, pass.num_rows, own_part.begin * tiles, own_part.end * tiles, own(layer.o), [&](int row, int t, const float* out) {
      V value = load(out);
      if (layer.qkv_bias) value = value + load(layer.qkv_bias + t * kTile);
      store(pass.qkv + size_t(row) * stride + t * kTile, value);
    });
    place_heads(layer);
    barrier.wait();
  }

  void attend(const Layer& layer, int* next_item) {
    float* scores = pass.scores + size_t(thread) * kMaxAttentionQueries * pass.score_stride;
    for (;;) {
      const int i = __atomic_fetch_add(next_item, 1, __ATOMIC_RELAXED);
      if (i >= pass.num_items) break;
      Attention attention{model, layer, pass, pass.items[i], scores, 0, 0, {}, {}, {}, {}, {}};
      if (model.half_cache) attention.run_any<true>();
      else attention.run_any<false>();
    }
    barrier.wait();
    if (!is_quantised(layer.o.format) || model.head_dim % kBlock == 0) return;
    for (int row = mine.begin; row < mine.end; ++row) quantise(pass.in, row, model.heads * model.head_dim);
    barrier.wait();
  }

  // Pairs of gate tiles, with the up tiles of the same columns.
  Share gated_units() const { return share((model.intermediate / kTile + 1) / 2, thread, num_threads); }

  // gate and up tiles of the same columns together, activated, and quantised as soon as a block of 32 columns is complete.
  void gated_product(const Layer& layer) {
    const int columns = model.intermediate, half = columns / kTile;
    const bool quantised = is_quantised(layer.down.format);
    const Share units = gated_units();
    const int last = 2 * units.end < half ? 2 * units.end : half;
    const Stream streams[2] = {stream_to(layer.gate_up, last, own(layer.down), 0),
                               stream_to(layer.gate_up, half + last, own(layer.down), Stream::kAhead)};
    float out[2 * kMaxRows * kTile];
    for (int chunk = 0; chunk < pass.num_rows; chunk += kChunkRows) {
      const int stop = chunk + kChunkRows < pass.num_rows ? chunk + kChunkRows : pass.num_rows;
      for (int unit = units.begin; unit < units.end; ++unit)
        for (int row = chunk; row < stop;) {
          const int m = stop - row < kMaxRows ? stop - row : kMaxRows;
          for (int t = 2 * unit; t < 2 * unit + 2 && t < half; ++t) {
            Rows in = rows_at(pass.in, row, layer.gate_up.cols);
            in.streams[0] = streams[0];
            in.streams[1] = streams[1];
            some_rows(m, layer.gate_up.format, layer.gate_up.tile(t), layer.gate_up.tile(half + t), in, out);
            for (int i = 0; i < m; ++i)
              store(pass.mid.values + size_t(row + i) * columns + t * kTile, gated(load(out + i * kTile), load(out + (m + i) * kTile), model.gelu));
          }
          for (int i = 0; quantised && i < m; ++i) {
            const size_t at = size_t(row + i) * columns + unit * kBlock, block = at / kBlock;
            quantise_row(pass.mid.values + at, kBlock, pass.mid.quants + at, pass.mid.scales + block, pass.mid.sums + block, pass.mid.isums + block);
          }
          row += m;
        }
    }
    barrier.wait();
  }

  void tap(int layer) {
    for (int i = 0; i < pass.num_taps; ++i)
      if (pass.taps[i] == layer)
        for (int row = mine.begin; row < mine.end; ++row)
          memcpy(pass.tapped + (size_t(row) * pass.num_taps + i) * model.hidden, x(row), sizeof(float) * model.hidden);
  }

  void logits() {
    if (!pass.num_logits) return;
    const Share wanted = share(pass.num_logits, thread, num_threads);
    for (int i = wanted.begin; i < wanted.end; ++i) {
      rms_norm(x(pass.logit_rows[i]), model.norm, model.hidden, model.eps, pass.in.values + size_t(i) * model.hidden);
      if (is_quantised(model.head.format)) quantise(pass.in, i, model.hidden);
    }
    barrier.wait();
    const Share tiles = share(model.head.tiles(), thread, num_threads);
    product(model.head, pass.in, pass.num_logits, tiles.begin, tiles.end, nullptr, [&](int row, int t, const float* out) {
      float* place = pass.logits + size_t(row) * model.head.rows + t * kTile;
      const int n = model.head.rows - t * kTile < kTile ? model.head.rows - t * kTile : kTile;
      memcpy(place, out, sizeof(float) * n);
    });
  }

  // Cosines, then sines, of every rope's angles at every row's position.
  void rotate_positions() {
    const int half = model.head_dim / 2;
    for (int rope = 0; rope < model.num_ropes; ++rope)
      for (int row = mine.begin; row < mine.end; ++row) {
        float* rotation = pass.rotations + (size_t(rope) * pass.num_rows + row) * model.head_dim;
        for (int i = 0; i < half; ++i) {
          const double angle = double(pass.positions[row]) * model.inverse_frequencies[rope][i];
          rotation[i] = float(cos(angle));
          rotation[half + i] = float(sin(angle));
        }
      }
  }

  void run() {
    rotate_positions();
    for (int row = mine.begin; row < mine.end; ++row) embed_row(model.embed, pass.tokens[row], model.embedding_scale, x(row));
    for (int i = 0; i < model.num_layers; ++i) {
      const Layer& layer = model.layers[i];
      tap(i);
      prepare(layer.attn_norm, layer.qkv);
      project(layer);
      attend(layer, pass.next_items + i);
      add_product(layer.o, pass.in, layer.post_attn_norm, layer.gate_up.tile(2 * gated_units().begin));
      prepare(layer.mlp_norm, layer.gate_up);
      gated_product(layer);
      add_product(layer.down, pass.mid, layer.post_mlp_norm, i + 1 < model.num_layers ? own_qkv(model.layers[i + 1]) : own(model.head));
    }
    tap(model.num_layers);
    barrier.wait();
    logits();
  }
};

void run(const Model& model, Pass& pass, int thread, int num_threads, Barrier& barrier) {
  Worker{model, pass, thread, num_threads, barrier, share(pass.num_rows, thread, num_threads)}.run();
}

#include "head.inc"

void linear(const Matrix& w, const Activations& in, int num_rows, float* y) {
  for (int row = 0; is_quantised(w.format) && row < num_rows; ++row) quantise(in, row, w.cols);
  product(w, in, num_rows, 0, w.tiles(), nullptr, [&](int row, int t, const float* out) {
    const int n = w.rows - t * kTile < kTile ? w.rows - t * kTile : kTile;
    memcpy(y + size_t(row) * w.rows + t * kTile, out, sizeof(float) * n);
  });
}

// ------------------------------------------------------------------------------------------------ sampling

inline uint64_t bits_of(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }
inline double double_of(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }

// e^x for x <= 0 by its series up to r^12 with |r| <= ln 2 / 2, error below 1e-15; 0 below -708.
inline double exponential(double x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: the sum's last bits are the rounded integer
  const double clamped = x > -708.0 ? x : -708.0;
  const double shifted = clamped * 1.4426950408889634 + magic, n = shifted - magic;
  const double r = (clamped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double e = 1.0 / 479001600.0;
  e = e * r + 1.0 / 39916800.0;
  e = e * r + 1.0 / 3628800.0;
  e = e * r + 1.0 / 362880.0;
  e = e * r + 1.0 / 40320.0;
  e = e * r + 1.0 / 5040.0;
  e = e * r + 1.0 / 720.0;
  e = e * r + 1.0 / 120.0;
  e = e * r + 1.0 / 24.0;
  e = e * r + 1.0 / 6.0;
  e = e * r + 0.5;
  e = e * r + 1.0;
  e = e * r + 1.0;
  const double scaled = e * double_of((bits_of(shifted) + 1023) << 52);
  return x > -708.0 ? scaled : 0.0;
}

template <class T>
double sum_row(const T* row, size_t count, double top, double temperature) {
  constexpr size_t kLanes = 8, kStep = 64;
  double totals[kLanes] = {0}, weights[kStep];
  for (size_t start = 0; start < count; start += kStep) {
    const size_t n = count - start < kStep ? count - start : kStep;
    for (size_t i = 0; i < n; ++i) weights[i] = exponential((double(row[start + i]) - top) / temperature);
    for (size_t i = n; i < kStep; ++i) weights[i] = 0.0;
    for (size_t i = 0; i < kStep; i += kLanes)
      for (size_t j = 0; j < kLanes; ++j) totals[j] += weights[i + j];
  }
  return ((totals[0] + totals[4]) + (totals[2] + totals[6])) + ((totals[1] + totals[5]) + (totals[3] + totals[7]));
}

double sum_weights(const void* row, bool is_double, size_t count, double top, double temperature) {
  if (is_double) return sum_row(static_cast<const double*>(row), count, top, temperature);
  return sum_row(static_cast<const float*>(row), count, top, temperature);
}

constexpr int kNoiseBlock = 64;

// Philox4x32-10 (Salmon et al., SC'11) of at most kNoiseBlock counters (token, words[0], words[1], words[2]): the first two words of each.
void philox_block(const int64_t* tokens, int count, const uint32_t* words, const uint32_t* key, uint32_t* high, uint32_t* low) {
  uint32_t c0[kNoiseBlock], c1[kNoiseBlock], c2[kNoiseBlock], c3[kNoiseBlock];
  for (int i = 0; i < kNoiseBlock; ++i) {
    c0[i] = i < count ? uint32_t(tokens[i]) : 0;
    c1[i] = words[0];
    c2[i] = words[1];
    c3[i] = words[2];
  }
  uint32_t k0 = key[0], k1 = key[1];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kNoiseBlock; ++i) {
      const uint64_t product0 = uint64_t(c0[i]) * 0xD2511F53u, product1 = uint64_t(c2[i]) * 0xCD9E8D57u;
      c0[i] = uint32_t(product1 >> 32) ^ c1[i] ^ k0;
      c1[i] = uint32_t(product1);
      c2[i] = uint32_t(product0 >> 32) ^ c3[i] ^ k1;
      c3[i] = uint32_t(product0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  memcpy(high, c0, sizeof(uint32_t) * count);
  memcpy(low, c1, sizeof(uint32_t) * count);
}

void philox(const int64_t* tokens, size_t count, const uint32_t* words, const uint32_t* key, uint32_t* high, uint32_t* low) {
  for (size_t start = 0; start < count; start += kNoiseBlock) {
    const int n = count - start < kNoiseBlock ? int(count - start) : kNoiseBlock;
    philox_block(tokens + start, n, words, key, high + start, low + start);
  }
}

// Indices whose log-probability plus Gumbel noise may be the largest.  The noise g of a uniform u is at most -log(1 - u), so leading ones
// of u bound it, and only those that could beat the best so far need logarithms.
size_t contenders(const int64_t* tokens, const double* log_probs, size_t count, const uint32_t* words, const uint32_t* key, int64_t* found) {
  double best = -INFINITY;
  size_t num_found = 0;
  uint32_t high[kNoiseBlock], low[kNoiseBlock];
  for (size_t start = 0; start < count; start += kNoiseBlock) {
    const int n = count - start < kNoiseBlock ? int(count - start) : kNoiseBlock;
    philox_block(tokens + start, n, words, key, high, low);
    for (int i = 0; i < n; ++i) {
      const int ones = high[i] == 0xFFFFFFFFu ? 52 : __builtin_clz(~high[i]);
      if (log_probs[start + i] + (ones + 1) * 0.69314718055994531 < best - 1e-9) continue;
      const double u = (double(uint64_t(high[i]) << 20 | low[i] >> 12) + 0.5) * 2.220446049250313e-16;
      const double value = log_probs[start + i] - log(-log(u));
      if (value < best - 1e-9) continue;
      if (value > best) best = value;
      found[num_found++] = int64_t(start + i);
    }
  }
  return num_found;
}

}  // namespace

#define FOREDRAFT_STRING(x) #x
#define FOREDRAFT_NAME(x) FOREDRAFT_STRING(x)
extern const Kernels kernels;
const Kernels kernels = {FOREDRAFT_NAME(FOREDRAFT_ISA), kMaxQueries, run, run_head, linear, sum_weights, contenders, philox};

}  // namespace FOREDRAFT_ISA
}  // namespace foredraft
