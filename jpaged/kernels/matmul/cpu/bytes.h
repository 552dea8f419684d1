// Products of rows of int8 with bytes on processors without AVX512-VNNI. Included only by core.cc, after rounded.h.
//
//     codes of a span -> a panel in the L1 cache, for all rows of a call -> sums of a few rows in registers
//
//     AVX-VNNI          four products of bytes and their sum in one instruction
//     AVX2, AVX-512     4-bit codes: pairs of products in 16 bits, several of which are added; int8: pairs of 16 bits
//     NEON              i8mm: two rows and two columns in one instruction; dotprod; or pairs of products in 16 bits
//     others            products of 16 bits in the compiler's own vectors
//
// Sums of a span are exact, and spans are added as in rounded.h: all processors have the same results, bit by bit.

#pragma once

#include "core.h"
#include "panels.h"
#include "rounded.h"
#include "scales.h"
#include "vector.h"

#if !defined(__AVX512VNNI__)

namespace jpaged::product {
namespace {

constexpr int kBlockVectors = kColumns / kWidth;
constexpr int kMaxQuads = kMaxRoundedSpan / 4;  // of a span: four numbers of each column

// --- codes -----------------------------------------------------------------------------------------------------------

// Doubled numbers of E2M1, plus 12.
alignas(16) constexpr uint8_t kDoubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// The numbers of a table at codes below 16, each of which is a byte.
inline Uints look_up(const uint8_t* table, Uints codes) {
#if defined(__AVX512BW__)
  const __m512i numbers = _mm512_maskz_broadcast_i32x4(0xffff, load_as<__m128i>(table));
  return reinterpret_cast<Uints>(_mm512_maskz_shuffle_epi8(~0ull, numbers, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
  const __m256i numbers = _mm256_broadcastsi128_si256(load_as<__m128i>(table));
  return reinterpret_cast<Uints>(_mm256_shuffle_epi8(numbers, reinterpret_cast<__m256i>(codes)));
#elif defined(__aarch64__)
  return reinterpret_cast<Uints>(vqtbl1q_u8(vld1q_u8(table), reinterpret_cast<uint8x16_t>(codes)));
#else
  uint8_t bytes[4 * kWidth];
  __builtin_memcpy(bytes, &codes, sizeof bytes);
  for (uint8_t& byte : bytes) byte = table[byte];
  return load_as<Uints>(bytes);
#endif
}

template <Code code>
struct PackedCodes {
  static constexpr int kQuads = chunk_of(code).numbers / 4;  // of a chunk: four numbers of each column
  static constexpr int kChunkBytes = 4 * kColumns * chunk_of(code).lanes;
  static constexpr int kDepthBytes = kChunkBytes / chunk_of(code).numbers;  // of a number of each column
  static constexpr bool kIsWide = code == Code::kInt8;
  static constexpr int kLargest = 2 * offset_of(code) - 1;
  // Quad i of as many columns as a vector has lanes.
  static inline Uints quad(const uint8_t* chunk, int i) { return quad_of<code>(chunk, i); }
};
using WideCodes = PackedCodes<Code::kInt8>;
using NarrowCodes = PackedCodes<Code::kInt4>;
using FiveBitCodes = PackedCodes<Code::kInt5>;
using SixBitCodes = PackedCodes<Code::kInt6>;

struct DoubledCodes : PackedCodes<Code::kE2M1> {
  static constexpr int kLargest = 24;
  static inline Uints quad(const uint8_t* chunk, int i) { return look_up(kDoubled, NarrowCodes::quad(chunk, i)); }
};

// Rows of four numbers whose products with codes up to kLargest have a sum of 16 bits, two of them in each.
template <class C>
constexpr int kQuadsOf16Bits = 32767 / (2 * 127 * C::kLargest);

// Numbers 0 and 2, or 1 and 3, of lanes of bytes, as pairs of 16 bits.
inline Uints even_halves(Uints lane) { return lane & 0x00ff00ffu; }
inline Uints odd_halves(Uints lane) { return lane >> 8 & 0x00ff00ffu; }
inline Words words_of(Uints x) { return reinterpret_cast<Words>(x); }

// --- products --------------------------------------------------------------------------------------------------------

// kTileRows x kTileVectors sums stay in registers. A panel has for each quad a vector of bytes per kWidth columns. If
// `kHasHalves`, it has one of even numbers per kWidth columns instead, then those of odd numbers, in 16 bits each, and
// rows are spread likewise. Codes of int8 count from 0 unless `kIsSigned`.

#if defined(__AVXVNNI__)
constexpr int kTileRows = 6, kTileVectors = 2;
constexpr bool kIsSigned = false;
template <class C>
constexpr bool kHasHalves = false;

template <class C, int num_rows>
[[gnu::always_inline]] inline void add_quads(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t num_quads,
                                             Ints (*sums)[kTileVectors]) {
  for (int64_t quad = 0; quad < num_quads; ++quad, panel += 4 * kColumns) {
    const Uints codes[2] = {load_as<Uints>(panel), load_as<Uints>(panel + 4 * kWidth)};
#pragma GCC unroll 6
    for (int r = 0; r < num_rows; ++r) {
      const __m256i four = _mm256_set1_epi32(value_at<int32_t>(x + r * stride + 4 * quad));
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        sums[r][v] = reinterpret_cast<Ints>(_mm256_dpbusd_avx_epi32(
            reinterpret_cast<__m256i>(sums[r][v]), reinterpret_cast<__m256i>(codes[v]), four));
      }
    }
  }
}

#elif defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kTileRows = 4, kTileVectors = 4;
constexpr bool kIsSigned = true;
template <class C>
constexpr bool kHasHalves = false;

// Two quads of two columns and two rows at once.
template <class C, int num_rows>
[[gnu::always_inline]] inline void add_quads(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t num_quads,
                                             Ints (*sums)[kTileVectors]) {
  constexpr int kPairs = (num_rows + 1) / 2;
  int32x4_t found[kPairs][2 * kTileVectors] = {};  // columns 2c and 2c + 1 of one row, then of the other
  for (int64_t quad = 0; quad < num_quads; quad += 2, panel += 8 * kColumns) {
    const bool is_last = quad + 1 == num_quads;
    int8x16_t rows[kPairs];
#pragma GCC unroll 2
    for (int p = 0; p < kPairs; ++p) {
      const int8_t *a = x + 2 * p * stride + 4 * quad, *b = 2 * p + 1 < num_rows ? a + stride : a;
      rows[p] = vcombine_s8(vld1_s8(a), vld1_s8(b));
    }
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      const uint32x4_t first = reinterpret_cast<uint32x4_t>(load_as<Uints>(panel + 16 * v));
      const uint32x4_t second =
          is_last ? vdupq_n_u32(0) : reinterpret_cast<uint32x4_t>(load_as<Uints>(panel + 4 * kColumns + 16 * v));
      const int8x16_t low = vreinterpretq_s8_u32(vzip1q_u32(first, second));
      const int8x16_t high = vreinterpretq_s8_u32(vzip2q_u32(first, second));
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p) {
        found[p][2 * v] = vmmlaq_s32(found[p][2 * v], rows[p], low);
        found[p][2 * v + 1] = vmmlaq_s32(found[p][2 * v + 1], rows[p], high);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) {
      const int64x2_t low = vreinterpretq_s64_s32(found[r / 2][2 * v]);
      const int64x2_t high = vreinterpretq_s64_s32(found[r / 2][2 * v + 1]);
      sums[r][v] += reinterpret_cast<Ints>(r % 2 ? vzip2q_s64(low, high) : vzip1q_s64(low, high));
    }
  }
}

#elif defined(__aarch64__)
constexpr int kTileRows = 4, kTileVectors = 4;
constexpr bool kIsSigned = true;
template <class C>
constexpr bool kHasHalves = false;

// Four products of each column. Without dotprod, two of them have a sum of 16 bits: 2 * 128 * 127 is below 2^15.
inline int32x4_t add_products(int32x4_t sums, int8x16_t codes, int8x16_t four) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sums, codes, four);
#else
  const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(four)), high = vmull_high_s8(codes, four);
  return vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
}

template <class C, int num_rows>
[[gnu::always_inline]] inline void add_quads(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t num_quads,
                                             Ints (*sums)[kTileVectors]) {
  for (int64_t quad = 0; quad < num_quads; ++quad, panel += 4 * kColumns) {
    int8x16_t codes[kTileVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kTileVectors; ++v) codes[v] = load_as<int8x16_t>(panel + 16 * v);
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; ++r) {
      const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(value_at<int32_t>(x + r * stride + 4 * quad)));
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        sums[r][v] = reinterpret_cast<Ints>(add_products(reinterpret_cast<int32x4_t>(sums[r][v]), codes[v], four));
      }
    }
  }
}

#else
constexpr int kTileRows = 4, kTileVectors = 2;
constexpr bool kIsSigned = false;

#if defined(__AVX2__)
// Sums of pairs of products, in 32 bits.
inline Ints add_pairs(Words a, Words b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#endif
}
inline Ints add_pairs(Words x) { return add_pairs(x, Words{} + int16_t{1}); }

// Sums of pairs of products of codes and numbers of a row, in 16 bits: they must fit.
inline Words multiply_bytes(Uints codes, Uints x) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Words>(_mm512_maddubs_epi16(reinterpret_cast<__m512i>(codes), reinterpret_cast<__m512i>(x)));
#else
  return reinterpret_cast<Words>(_mm256_maddubs_epi16(reinterpret_cast<__m256i>(codes), reinterpret_cast<__m256i>(x)));
#endif
}

template <class C>
constexpr bool kHasHalves = C::kIsWide;
#else
inline Ints add_pairs(Words x) {
  const Ints pairs = reinterpret_cast<Ints>(x);
  return (reinterpret_cast<Ints>(reinterpret_cast<Uints>(x) << 16) >> 16) + (pairs >> 16);
}
// A product of a byte and a number of a row has 16 bits.
inline Ints add_pairs(Words a, Words b) { return add_pairs(a * b); }

template <class C>
constexpr bool kHasHalves = true;
#endif

template <class C, int num_rows>
[[gnu::always_inline]] inline void add_quads(const int8_t* x, int64_t stride, const uint8_t* panel, int64_t num_quads,
                                             Ints (*sums)[kTileVectors]) {
  constexpr int kQuadBytes = kHasHalves<C> ? 8 * kColumns : 4 * kColumns;
  const auto codes_at = [&](int v) { return load_as<Uints>(panel + 4 * kWidth * v); };
  const auto of_row = [&](int r, int64_t quad) { return Uints{} + value_at<uint32_t>(x + r * stride + 4 * quad); };
  if constexpr (C::kIsWide) {
    for (int64_t quad = 0; quad < num_quads; ++quad, panel += kQuadBytes) {
      Words even[kTileVectors], odd[kTileVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kTileVectors; ++v) {
        even[v] = words_of(codes_at(v));
        odd[v] = words_of(codes_at(kBlockVectors + v));
      }
#pragma GCC unroll 4
      for (int r = 0; r < num_rows; ++r) {
        const Words first = words_of(of_row(r, quad)), second = words_of(of_row(r, kMaxQuads + quad));
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) {
          sums[r][v] += add_pairs(even[v], first);
          sums[r][v] += add_pairs(odd[v], second);
        }
      }
    }
  } else {
    for (int64_t begin = 0; begin < num_quads; begin += kQuadsOf16Bits<C>) {
      Words found[num_rows][kTileVectors] = {};
      for (int64_t quad = begin; quad < lesser(num_quads, begin + kQuadsOf16Bits<C>); ++quad, panel += kQuadBytes) {
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 2
          for (int v = 0; v < kTileVectors; ++v) {
            if constexpr (kHasHalves<C>) {
              found[r][v] += words_of(codes_at(v)) * words_of(of_row(r, quad));
              found[r][v] += words_of(codes_at(kBlockVectors + v)) * words_of(of_row(r, kMaxQuads + quad));
            } else {
#if defined(__AVX2__)
              found[r][v] += multiply_bytes(codes_at(v), of_row(r, quad));
#endif
            }
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < num_rows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kTileVectors; ++v) sums[r][v] += add_pairs(found[r][v]);
      }
    }
  }
}
#endif

// --- spans -----------------------------------------------------------------------------------------------------------

// Return the panel of a span: the codes themselves, or their numbers in `room`.
template <class C>
[[gnu::noinline]] const uint8_t* unpack_span(const uint8_t* lanes, int64_t count, uint8_t* room) {
  const uint8_t* begin = lanes;
  uint8_t* to = room;
  for (int64_t k = 0; k < count; k += 4 * C::kQuads, lanes += C::kChunkBytes) {
    for (int at = 0; at < C::kChunkBytes; at += 64) __builtin_prefetch(lanes + kAhead + at);
    if constexpr (C::kIsWide && !kHasHalves<C> && !kIsSigned) continue;
#pragma GCC unroll 8
    for (int i = 0; i < C::kQuads; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kBlockVectors; ++v) {
        const Uints codes = C::quad(lanes + 4 * kWidth * v, i);
        uint8_t* at = to + 4 * kWidth * v;
        if constexpr (kHasHalves<C>) {
          const Uints even = even_halves(codes), odd = odd_halves(codes);
          __builtin_memcpy(at, &even, sizeof even);
          __builtin_memcpy(at + 4 * kColumns, &odd, sizeof odd);
        } else {
          const Uints bytes = C::kIsWide && kIsSigned ? codes ^ 0x80808080u : codes;
          __builtin_memcpy(at, &bytes, sizeof bytes);
        }
      }
      to += kHasHalves<C> ? 8 * kColumns : 4 * kColumns;
    }
  }
  return to == room ? begin : room;
}

// Numbers of a row's span in 16 bits: pairs of even ones, then, from kMaxQuads on, of odd ones.
inline void spread_row(const int8_t* x, int64_t num_quads, int32_t* to) {
  int64_t quad = 0;
  for (; quad + kWidth <= num_quads; quad += kWidth) {
    const Words words = load_as<Words>(x + 4 * quad), even = words << 8 >> 8, odd = words >> 8;
    __builtin_memcpy(to + quad, &even, sizeof even);
    __builtin_memcpy(to + kMaxQuads + quad, &odd, sizeof odd);
  }
  for (; quad < num_quads; ++quad) {
    int8_t four[4];
    __builtin_memcpy(four, x + 4 * quad, sizeof four);
    to[quad] = (four[0] & 0xffff) | four[2] << 16;
    to[kMaxQuads + quad] = (four[1] & 0xffff) | four[3] << 16;
  }
}

// The scales of a group and, if the matrix has zeros, their products with the scales.
struct GroupScales {
  alignas(64) float scales[kColumns], zeros[kColumns];
  bool has_zeros;
};

// sums[num_rows, 32] += a span of rows at a distance of `stride` bytes, times its panel.
template <class C, int num_rows>
[[gnu::noinline]] void add_span(const int8_t* x, int64_t stride, int64_t span, const uint8_t* panel, int64_t count,
                                const GroupScales& group, float* sums) {
  const int8_t *info = x + span, *from = x;
  int64_t from_stride = stride;
  alignas(64) int32_t halves[kHasHalves<C> ? num_rows * 2 * kMaxQuads : 1];
  if constexpr (kHasHalves<C>) {
    for (int r = 0; r < num_rows; ++r) spread_row(x + r * stride, count / 4, halves + r * 2 * kMaxQuads);
    from = reinterpret_cast<const int8_t*>(halves);
    from_stride = 4 * 2 * kMaxQuads;
  }
  for (int strip = 0; strip < kBlockVectors; strip += kTileVectors) {
    Ints found[num_rows][kTileVectors];
#pragma GCC unroll 6
    for (int r = 0; r < num_rows; ++r) {
      const bool counts_from_zero = C::kIsWide && kIsSigned;
      const Ints start =
          Ints{} + (counts_from_zero ? 0 : value_at<int32_t>(info + r * stride + offsetof(Span, start)));
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) found[r][v] = start;
    }
    add_quads<C, num_rows>(from, from_stride, panel + 4 * kWidth * strip, count / 4, found);
#pragma GCC unroll 6
    for (int r = 0; r < num_rows; ++r) {
      const Floats step = all(value_at<float>(info + r * stride + offsetof(Span, step)));
      const Floats sum = all(-value_at<float>(info + r * stride + offsetof(Span, sum)));
#pragma GCC unroll 4
      for (int v = 0; v < kTileVectors; ++v) {
        const int64_t column = (strip + v) * kWidth;
        float* to = sums + r * kColumns + column;
        const Floats whole = __builtin_convertvector(found[r][v], Floats) * step;
        Floats result = fused(whole, load(group.scales + column), load(to));
        if (group.has_zeros) result = fused(sum, load(group.zeros + column), result);
        store(to, result);
      }
    }
  }
}

template <class C, int most_rows = kTileRows>
void add_tile(const int8_t* x, int64_t stride, int64_t span, const uint8_t* panel, int64_t count,
              const GroupScales& group, int64_t num_rows, float* sums) {
  if constexpr (most_rows > 0) {
    if (num_rows < most_rows) return add_tile<C, most_rows - 1>(x, stride, span, panel, count, group, num_rows, sums);
    add_span<C, most_rows>(x, stride, span, panel, count, group, sums);
  }
}

template <class C>
void multiply_rounded_of(const Quantised& q, int64_t block, const RoundedRows& rows, int64_t row, int64_t num_rows,
                         float* sums) {
  alignas(64) uint8_t room[kMaxQuads * 8 * kColumns];
  const uint8_t* lanes = q.values + block * q.depth * C::kDepthBytes;
  const int8_t* x = rows.records + row * rows.row_bytes;
  for (int64_t i = 0; i < num_rows * kColumns; ++i) sums[i] = 0;
  for (int64_t group = 0, scale_at = block * q.num_groups * kColumns; group < q.num_groups; ++group) {
    GroupScales scales;
    scales.has_zeros = q.zeros != nullptr;
    for (int64_t c = 0; c < kColumns; c += kWidth) {
      const Floats scale = load_scales(q.scales, q.number, scale_at + c);
      store(scales.scales + c, scale);
      if (q.zeros) store(scales.zeros + c, load_zeros(q, scale_at + c) * scale);
    }
    scale_at += kColumns;
    const int64_t end = lesser(q.depth, (group + 1) * q.group);
    for (int64_t at = group * q.group; at < end; at += rows.span, x += rows.span + kSpanBytes) {
      const int64_t count = lesser(rows.span, end - at);
      const uint8_t* panel = unpack_span<C>(lanes + at * C::kDepthBytes, count, room);
      for (int64_t r = 0; r < num_rows; r += kTileRows) {
        add_tile<C>(x + r * rows.row_bytes, rows.row_bytes, rows.span, panel, count, scales,
                    lesser(num_rows - r, kTileRows), sums + r * kColumns);
      }
    }
  }
}

void multiply_rounded(const Quantised& q, int64_t block, const RoundedRows& rows, int64_t row, int64_t num_rows,
                      uint8_t*, float* sums) {
  switch (q.code) {
    case Code::kInt8: return multiply_rounded_of<WideCodes>(q, block, rows, row, num_rows, sums);
    case Code::kInt4: return multiply_rounded_of<NarrowCodes>(q, block, rows, row, num_rows, sums);
    case Code::kInt5: return multiply_rounded_of<FiveBitCodes>(q, block, rows, row, num_rows, sums);
    case Code::kInt6: return multiply_rounded_of<SixBitCodes>(q, block, rows, row, num_rows, sums);
    case Code::kE2M1: return multiply_rounded_of<DoubledCodes>(q, block, rows, row, num_rows, sums);
    case Code::kE4M3: return;
  }
}

}  // namespace
}  // namespace jpaged::product

#endif
