// Rows rounded to int8 with a step per span of k, and their products with bytes. Included only by core.cc. The products
// here are those of AVX512-VNNI; bytes.h has the others.
//
// A row is a sequence of records, one per span, so that a row has a single address:
//
//     int8[span], `Span`        the numbers, and what the sums of their products need
//
// Products of a span are exact integers. A row's sum adds the spans in order, two operations each:
//
//     sum = fma(products * step, scale, sum)
//     sum = fma(-sum of the span's numbers, zero * scale, sum)        if the matrix has zeros

#pragma once

#include <cstddef>

#include "core.h"
#include "scales.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace jpaged::product {
namespace {

// The end of a record.
struct Span {
  int32_t start;    // sums of products with codes begin with this, so that codes count from their offset
  float step, sum;  // of the span's rounded numbers
};
static_assert(sizeof(Span) == kSpanBytes);

// --- rows ------------------------------------------------------------------------------------------------------------

// A product, rounded, and then the nearest integers, the even one of two: a multiplication fused with an addition would
// not be the same.
inline Ints to_integers(Floats x, float factor) {
#if defined(__AVX512F__)
  const __m512 product =
      _mm512_maskz_mul_ps(0xffff, reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(all(factor)));
  return reinterpret_cast<Ints>(_mm512_maskz_cvtps_epi32(0xffff, product));
#elif defined(__AVX2__)
  const __m256 product = _mm256_mul_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(all(factor)));
  return reinterpret_cast<Ints>(_mm256_cvtps_epi32(product));
#elif defined(__aarch64__)
  return reinterpret_cast<Ints>(vcvtnq_s32_f32(vmulq_n_f32(reinterpret_cast<float32x4_t>(x), factor)));
#else
  float lanes[kWidth];
  store(lanes, x);
  int32_t integers[kWidth];
  for (int i = 0; i < kWidth; ++i) integers[i] = static_cast<int32_t>(__builtin_rintf(lanes[i] * factor));
  return load_as<Ints>(integers);
#endif
}

// Round a span of whole vectors, padded with zeros, to integers.
void round_span(const float* x, int64_t count, int32_t offset, float unit, int8_t* to, int8_t* info) {
  Ints largest{}, totals{};
  for (int64_t k = 0; k < count; k += kWidth) {
    const Ints magnitude = load_as<Ints>(x + k) & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  }
  const Scaling scaling = scaling_for(combine_lanes(largest, [](Ints a, Ints b) { return a > b ? a : b; }));
  for (int64_t k = 0; k < count; k += kWidth) {
    const Ints integers = to_integers(load(x + k), scaling.factor);
    const Chars bytes = __builtin_convertvector(integers, Chars);
    __builtin_memcpy(to + k, &bytes, sizeof bytes);
    totals += integers;
  }
  const int32_t total = combine_lanes(totals, [](Ints a, Ints b) { return a + b; });
  const Span span{-offset * total, unit * scaling.step, static_cast<float>(total) * scaling.step};
  __builtin_memcpy(info, &span, sizeof span);
}

#if defined(__AVX512F__)
// combine(lanes of a and of b), each with the lane `stride` apart: of a if lane & stride is 0, else of b.
template <int stride, class Combine, int... lane>
inline Ints fold_with(Ints a, Ints b, const Combine& combine, std::integer_sequence<int, lane...>) {
  constexpr int kSecond = kWidth;
  const Ints same = {(lane & stride ? kSecond + lane : lane)...};
  const Ints other = {(lane & stride ? kSecond + (lane ^ stride) : lane ^ stride)...};
  const __m512i first = reinterpret_cast<__m512i>(a), second = reinterpret_cast<__m512i>(b);
  return combine(
      reinterpret_cast<Ints>(_mm512_permutex2var_epi32(first, reinterpret_cast<__m512i>(same), second)),
      reinterpret_cast<Ints>(_mm512_permutex2var_epi32(first, reinterpret_cast<__m512i>(other), second)));
}

constexpr int kSpansAtOnce = 8;

// Lanes i and i + 8 are all lanes of vector i.
template <int stride = kSpansAtOnce / 2, class Combine>
inline Ints combine_spans(Ints* x, const Combine& combine) {
  constexpr auto kAll = std::make_integer_sequence<int, kWidth>{};
#pragma GCC unroll 4
  for (int i = 0; i < stride; ++i) x[i] = fold_with<stride>(x[i], x[i + stride], combine, kAll);
  if constexpr (stride > 1) {
    return combine_spans<stride / 2>(x, combine);
  } else {
    return combine(x[0], swap<kSpansAtOnce>(x[0], kAll));
  }
}

// `round_span` of up to kSpansAtOnce consecutive spans of whole vectors, with the same results.
template <int vectors>
void round_spans(const float* x, int64_t num_spans, int32_t offset, float unit, int8_t* to) {
  constexpr int64_t kSpan = vectors * kWidth;
  Ints totals[kSpansAtOnce];
#pragma GCC unroll 8
  for (int i = 0; i < kSpansAtOnce; ++i) {
    totals[i] = Ints{};
    if (i >= num_spans) continue;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const Ints magnitude = load_as<Ints>(x + i * kSpan + v * kWidth) & 0x7fffffff;
      totals[i] = magnitude > totals[i] ? magnitude : totals[i];
    }
  }
  const Ints largest = combine_spans(totals, [](Ints a, Ints b) { return a > b ? a : b; });
  const Floats number = reinterpret_cast<Floats>(largest);
  const auto is_infinite = largest >= static_cast<int32_t>(kInfinity);
  const auto is_negligible = largest < static_cast<int32_t>(kNegligible);
  alignas(64) float factors[kWidth];
  const Floats factor = is_infinite | is_negligible ? Floats{} : 127.0f / number;
  const Floats step = is_infinite ? all(__builtin_nanf("")) : is_negligible ? all(1.0f) : number / 127.0f;
  store(factors, factor);
#pragma GCC unroll 8
  for (int i = 0; i < kSpansAtOnce; ++i) {
    totals[i] = Ints{};
    if (i >= num_spans) continue;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; ++v) {
      const Ints integers = to_integers(load(x + i * kSpan + v * kWidth), factors[i]);
      totals[i] += integers;
      const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(integers));
      __builtin_memcpy(to + i * (kSpan + kSpanBytes) + v * kWidth, &bytes, sizeof bytes);
    }
  }
  const Ints total = combine_spans(totals, [](Ints a, Ints b) { return a + b; });
  const Ints start = -offset * total;
  const Floats steps = unit * step, sums = __builtin_convertvector(total, Floats) * step;
  for (int i = 0; i < num_spans; ++i) {
    const Span span{start[i], steps[i], sums[i]};
    __builtin_memcpy(to + i * (kSpan + kSpanBytes) + kSpan, &span, sizeof span);
  }
}

// Round a row of equal spans of whole vectors. Return false if its spans are others.
bool round_equal_spans(const Quantised& q, const float* x, const RoundedRows& rows, int32_t offset, float unit,
                       int8_t* to) {
  const int64_t span = rows.span, num_spans = q.depth / span;
  if (q.depth % span || q.group % span || (span != 16 && span != 32 && span != 64)) return false;
  for (int64_t i = 0; i < num_spans; i += kSpansAtOnce, x += kSpansAtOnce * span) {
    const int64_t count = lesser(kSpansAtOnce, num_spans - i);
    if (span == 16) round_spans<1>(x, count, offset, unit, to);
    if (span == 32) round_spans<2>(x, count, offset, unit, to);
    if (span == 64) round_spans<4>(x, count, offset, unit, to);
    to += kSpansAtOnce * (span + kSpanBytes);
  }
  return true;
}
#else
bool round_equal_spans(const Quantised&, const float*, const RoundedRows&, int32_t, float, int8_t*) { return false; }
#endif

void round_row(const Quantised& q, const float* x, const RoundedRows& rows, int64_t row) {
  const int32_t offset = offset_of(q.code);
  const float unit = q.code == Code::kE2M1 ? 0.5f : 1;  // E2M1 codes are doubled to be integers
  int8_t* to = rows.records + row * rows.row_bytes;
  if (round_equal_spans(q, x, rows, offset, unit, to)) return;
  for (int64_t group = 0; group < q.num_groups; ++group) {
    const int64_t begin = group * q.group, end = lesser(q.depth, begin + q.group);
    for (int64_t i = 0; i < rows.spans_of_group; ++i, to += rows.span + kSpanBytes) {
      const int64_t at = lesser(begin + i * rows.span, end), count = lesser(rows.span, end - at);
      if (count % kWidth == 0) {
        round_span(x + at, count, offset, unit, to, to + rows.span);
        continue;
      }
      alignas(64) float padded[kMaxRoundedSpan] = {};
      int8_t bytes[kMaxRoundedSpan];
      __builtin_memcpy(padded, x + at, 4 * count);
      round_span(padded, (count + kWidth - 1) / kWidth * kWidth, offset, unit, bytes, to + rows.span);
      __builtin_memcpy(to, bytes, count);
    }
  }
}

template <class T>
inline T value_at(const int8_t* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// --- products --------------------------------------------------------------------------------------------------------

#if defined(__AVX512VNNI__)
constexpr int kRoundedRows = 6;  // rows whose sums stay in registers, as integers and as floats

// sums += four products of each column. GCC 12 copies the sums before and after the intrinsic.
inline void add_products(__m512i& sums, __m512i codes, __m512i four) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(four));
}

// Memory that a tile of rows prefetches: none, the bytes that it reads a little later, or its share of the next block.
enum class Prefetch { kNone, kOwn, kNext };

struct Next {
  const uint8_t* at;
  int64_t step;  // bytes for four numbers of each column
};

// Integer sums of one span for rows at a distance of `stride` bytes: [num_rows][2] vectors of columns.
template <class C, int num_rows, Prefetch prefetch>
[[gnu::always_inline]] inline void add_rounded(const int8_t* x, int64_t stride, const uint8_t* lanes, int64_t count,
                                               Next& next, __m512i (*sums)[2]) {
  for (int64_t k = 0; k < count; k += 4 * C::kQuads, lanes += C::kChunkBytes) {
    if constexpr (prefetch == Prefetch::kOwn) {
#pragma GCC unroll 10
      for (int at = 0; at < C::kChunkBytes; at += 64) __builtin_prefetch(lanes + kAhead + at);
    } else if constexpr (prefetch == Prefetch::kNext) {
      __builtin_prefetch(next.at);
      next.at += next.step;
    }
#pragma GCC unroll 8
    for (int i = 0; i < C::kQuads; ++i) {
      const __m512i a = reinterpret_cast<__m512i>(C::quad(lanes, i));
      const __m512i b = reinterpret_cast<__m512i>(C::quad(lanes + 64, i));
#pragma GCC unroll 6
      for (int r = 0; r < num_rows; ++r) {
        const __m512i same = _mm512_set1_epi32(value_at<int32_t>(x + r * stride + k + 4 * i));
        add_products(sums[r][0], a, same);
        add_products(sums[r][1], b, same);
      }
    }
  }
}

// Not inlined: otherwise GCC 12 spills the sums.
template <class C, int num_rows, Prefetch prefetch>
[[gnu::noinline]] void multiply_rounded(const Quantised& q, int64_t block, const uint8_t* lanes,
                                        const RoundedRows& rows, int64_t row, Next next, float* to) {
  const int64_t stride = rows.row_bytes, span = rows.span;
  const int8_t* x = rows.records + row * stride;
  __m512 sums[num_rows][2];
#pragma GCC unroll 6
  for (int r = 0; r < num_rows; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  for (int64_t group = 0, scale_at = block * q.num_groups * kColumns; group < q.num_groups; ++group) {
    const int64_t begin = group * q.group, end = lesser(q.depth, begin + q.group);
    const __m512 scales[2] = {reinterpret_cast<__m512>(load_scales(q.scales, q.number, scale_at)),
                              reinterpret_cast<__m512>(load_scales(q.scales, q.number, scale_at + 16))};
    __m512 zeros[2] = {};
    if (q.zeros) {
      zeros[0] = reinterpret_cast<__m512>(load_zeros(q, scale_at)) * scales[0];
      zeros[1] = reinterpret_cast<__m512>(load_zeros(q, scale_at + 16)) * scales[1];
    }
    for (int64_t at = begin; at < end; at += span, x += span + kSpanBytes) {
      const int8_t* info = x + span;
      __m512i found[num_rows][2];
#pragma GCC unroll 6
      for (int r = 0; r < num_rows; ++r) {
        found[r][0] = found[r][1] = _mm512_set1_epi32(value_at<int32_t>(info + r * stride + offsetof(Span, start)));
      }
      add_rounded<C, num_rows, prefetch>(x, stride, lanes + at * C::kDepthBytes, lesser(span, end - at), next, found);
#pragma GCC unroll 6
      for (int r = 0; r < num_rows; ++r) {
        const __m512 step = _mm512_set1_ps(value_at<float>(info + r * stride + offsetof(Span, step)));
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const Floats whole = __builtin_convertvector(reinterpret_cast<Ints>(found[r][v]), Floats);
          sums[r][v] = _mm512_fmadd_ps(reinterpret_cast<__m512>(whole) * step, scales[v], sums[r][v]);
        }
      }
      if (q.zeros) {
#pragma GCC unroll 6
        for (int r = 0; r < num_rows; ++r) {
          const __m512 sum = _mm512_set1_ps(value_at<float>(info + r * stride + offsetof(Span, sum)));
#pragma GCC unroll 2
          for (int v = 0; v < 2; ++v) sums[r][v] = _mm512_fnmadd_ps(sum, zeros[v], sums[r][v]);
        }
      }
    }
    scale_at += kColumns;
  }
#pragma GCC unroll 6
  for (int r = 0; r < num_rows; ++r) {
    _mm512_storeu_ps(to + 32 * r, sums[r][0]);
    _mm512_storeu_ps(to + 32 * r + 16, sums[r][1]);
  }
}

template <class C, Prefetch prefetch, int most_rows = kRoundedRows>
void multiply_tile(const Quantised& q, int64_t block, const uint8_t* lanes, const RoundedRows& rows, int64_t row,
                   int64_t num_rows, Next next, float* sums) {
  if constexpr (most_rows > 0) {
    if (num_rows < most_rows) {
      return multiply_tile<C, prefetch, most_rows - 1>(q, block, lanes, rows, row, num_rows, next, sums);
    }
    multiply_rounded<C, most_rows, prefetch>(q, block, lanes, rows, row, next, sums);
  }
}

// Store a block's codes as bytes, in the order of Code::kInt8.
template <class C>
void unpack_bytes(const uint8_t* lanes, int64_t depth, uint8_t* to) {
  for (int64_t k = 0; k < depth; k += 4 * C::kQuads, lanes += C::kChunkBytes, to += 128 * C::kQuads) {
#pragma GCC unroll 2
    for (int v = 0; v < 128; v += 64) {
#pragma GCC unroll 8
      for (int i = 0; i < C::kQuads; ++i) {
        const Uints quad = C::quad(lanes + v, i);
        __builtin_memcpy(to + 128 * i + v, &quad, sizeof quad);
      }
    }
  }
}

// Few rows unpack the codes as they multiply. Many rows share the unpacked ones; the first of them prefetch the next
// block: memory is read while they multiply.
template <class C>
void multiply_rounded_of(const Quantised& q, int64_t block, const RoundedRows& rows, int64_t row, int64_t num_rows,
                         uint8_t* bytes, float* sums) {
  constexpr int64_t kSharing = 4;  // tiles that prefetch
  const uint8_t* lanes = lanes_at<C>(q, block, 0);
  if (num_rows <= kRoundedRows) {
    return multiply_tile<C, Prefetch::kOwn>(q, block, lanes, rows, row, num_rows, {}, sums);
  }
  const int64_t num_tiles = (num_rows + kRoundedRows - 1) / kRoundedRows, block_bytes = q.depth * C::kDepthBytes;
  const int64_t num_sharing = row ? 0 : lesser(num_tiles, kSharing);
  const uint8_t* next = lanes + block_bytes;
  if constexpr (C::kCode != Code::kInt8) {
    unpack_bytes<C>(lanes, q.depth, bytes);
    lanes = bytes;
  }
  for (int64_t tile = 0, r = 0, count = 0; tile < num_tiles; ++tile, r += count) {
    count = (num_rows - r + num_tiles - tile - 1) / (num_tiles - tile);  // similar sizes: small tiles are slow
    if (tile < num_sharing) {
      const Next share{next + tile * block_bytes / num_sharing, 4 * C::kDepthBytes / num_sharing};
      multiply_tile<Int8Bytes, Prefetch::kNext>(q, block, lanes, rows, row + r, count, share, sums + 32 * r);
    } else {
      multiply_tile<Int8Bytes, Prefetch::kNone>(q, block, lanes, rows, row + r, count, {}, sums + 32 * r);
    }
  }
}

void multiply_rounded(const Quantised& q, int64_t block, const RoundedRows& rows, int64_t row, int64_t num_rows,
                      uint8_t* bytes, float* sums) {
  switch (q.code) {
    case Code::kInt8: return multiply_rounded_of<Int8Bytes>(q, block, rows, row, num_rows, bytes, sums);
    case Code::kInt4: return multiply_rounded_of<Int4Bytes>(q, block, rows, row, num_rows, bytes, sums);
    case Code::kInt5: return multiply_rounded_of<Int5Bytes>(q, block, rows, row, num_rows, bytes, sums);
    case Code::kInt6: return multiply_rounded_of<Int6Bytes>(q, block, rows, row, num_rows, bytes, sums);
    case Code::kE2M1: return multiply_rounded_of<E2M1Bytes>(q, block, rows, row, num_rows, bytes, sums);
    case Code::kE4M3: return;
  }
}
#else
// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__AVX2__)
  return reinterpret_cast<Floats>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a),
                                            reinterpret_cast<float32x4_t>(b)));
#else
  // In double a product is exact. An inexact sum is made odd: rounded again, it is as if it had been rounded once.
  using Doubles [[gnu::vector_size(8 * kWidth)]] = double;
  using Longs [[gnu::vector_size(8 * kWidth)]] = int64_t;
  const Doubles product = __builtin_convertvector(a, Doubles) * __builtin_convertvector(b, Doubles);
  const Doubles added = __builtin_convertvector(c, Doubles), sum = product + added;
  const Doubles part = sum - product, error = (product - (sum - part)) + (added - part);
  const Longs bits = reinterpret_cast<Longs>(sum), is_inexact = (error < 0.0) | (error > 0.0);
  const Longs is_towards_zero = (error < 0.0) ^ (sum < 0.0), is_even = (bits & 1) == 0;
  const Longs odd = bits + (is_inexact & is_even & (is_towards_zero | 1));
  return __builtin_convertvector(reinterpret_cast<Doubles>(odd), Floats);
#endif
}
#endif

}  // namespace
}  // namespace jpaged::product
