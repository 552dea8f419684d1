// Rows as digits of 8 bits, and their products with bytes. Included only by core.cc.

#pragma once

#include "core.h"
#include "scales.h"
#include "vector.h"

#ifdef __AVX512VNNI__
#include <immintrin.h>
#endif

namespace jpaged::product {
namespace {

#ifdef __AVX512VNNI__
constexpr bool kHasDigits = true;
constexpr int kVirtualRows = 12;  // number of row digits whose sums stay in registers


// --- rows ------------------------------------------------------------------------------------------------------------

// The power of two that scales numbers, up to the one with these bits, to integers of `digits` digits.
template <int digits>
float factor_for(uint32_t largest) {
  constexpr int kTop = digits == 2 ? 14 : 22, kMost = digits == 2 ? 32639 : 8355711;
  const int exponent = static_cast<int>(largest >> 23) - 127, bounded = exponent < -100 ? -100 : exponent;
  const float factor = jpaged::float_of(static_cast<uint32_t>(kTop - bounded + 127) << 23);
  return jpaged::float_of(largest) * factor > kMost ? 0.5f * factor : factor;
}

template <int digits>
void split_span(const float* x, int64_t count, float step, float unit, float factor, int64_t span, int64_t row,
                const DigitRows& rows, int64_t at) {
  int8_t* to = rows.digits + row * digits * rows.stride + at;
  int32_t totals[digits] = {}, total = 0;
  for (int64_t k = 0; k < count; ++k) {
    int32_t left = static_cast<int32_t>(__builtin_rintf(digits == 1 ? x[k] / step : x[k] * factor));
    if (digits == 1) left = left > 127 ? 127 : left < -128 ? -128 : left;
    total += left;
#pragma GCC unroll 3
    for (int d = 0; d < digits; ++d) {
      const int8_t digit = static_cast<int8_t>(left);
      to[d * rows.stride + k] = digit;
      totals[d] += digit;
      left = (left - digit) >> 8;
    }
  }
  for (int d = 0; d < digits; ++d) rows.totals[(row * digits + d) * rows.num_spans + span] = totals[d];
  rows.steps[row * rows.num_spans + span] = unit * step;
  rows.sums[row * rows.num_spans + span] = static_cast<float>(total) * step;
}

// A row of whole spans. Rows with one digit have a single step: `whole`.
template <int digits>
void split_row(const Quantised& q, const float* x, float whole, const DigitRows& rows, int64_t row) {
  const float unit = q.code == Code::kE2M1 ? 0.5f : 1;  // E2M1 codes are doubled to be integers
  for (int64_t group = 0, span = 0; group < q.num_groups; ++group) {
    const int64_t begin = group * q.group, end = lesser(q.depth, begin + q.group);
    for (int64_t i = 0; i < rows.spans_of_group; ++i, ++span) {
      const int64_t at = lesser(begin + i * rows.span, end), count = lesser(rows.span, end - at);
      if constexpr (digits == 1) {
        split_span<1>(x + at, count, whole, unit, 0, span, row, rows, at);
      } else {
        const uint32_t largest = largest_bits(x + at, count);
        const float factor = factor_for<digits>(largest);
        split_span<digits>(x + at, largest < kInfinity ? count : 0, 1 / factor, unit, factor, span, row, rows, at);
        if (largest >= kInfinity) rows.steps[row * rows.num_spans + span] = __builtin_nanf("");
      }
    }
  }
}

// --- products --------------------------------------------------------------------------------------------------------

template <Code code>
struct PackedBytes {
  static constexpr Code kCode = code;
  static constexpr int kQuads = chunk_of(code).numbers / 4;  // of a chunk: four numbers of each column
  static constexpr int kChunkBytes = 4 * kColumns * chunk_of(code).lanes;
  static constexpr int kDepthBytes = kChunkBytes / chunk_of(code).numbers;  // of a number of each column
  // Quad i of as many columns as a vector has lanes.
  static inline Uints quad(const uint8_t* chunk, int i) { return quad_of<code>(chunk, i); }
};
using Int8Bytes = PackedBytes<Code::kInt8>;
using Int4Bytes = PackedBytes<Code::kInt4>;
using Int5Bytes = PackedBytes<Code::kInt5>;
using Int6Bytes = PackedBytes<Code::kInt6>;

// 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign: doubled, plus 12.
struct E2M1Bytes : PackedBytes<Code::kE2M1> {
  static inline Uints quad(const uint8_t* chunk, int i) {
    constexpr uint32_t kFirst = 0x0f0e0d0c, kSecond = 0x18141210, kThird = 0x090a0b0c, kFourth = 0x00040608;
    constexpr Uints kTable = {kFirst, kSecond, kThird, kFourth, kFirst, kSecond, kThird, kFourth,
                              kFirst, kSecond, kThird, kFourth, kFirst, kSecond, kThird, kFourth};
    return reinterpret_cast<Uints>(_mm512_maskz_shuffle_epi8(
        ~0ull, reinterpret_cast<__m512i>(kTable), reinterpret_cast<__m512i>(Int4Bytes::quad(chunk, i))));
  }
};

// Integer sums of one span for the digits of rows: [virtual_rows][2] vectors of columns.
template <class C, int virtual_rows>
[[gnu::always_inline]] inline void add_span(const int8_t* x, int64_t stride, const uint8_t* lanes, int64_t count,
                                            const int32_t* totals, int64_t totals_stride, __m512i (*sums)[2]) {
#pragma GCC unroll 12
  for (int r = 0; r < virtual_rows; ++r) {
    sums[r][0] = sums[r][1] = _mm512_set1_epi32(-offset_of(C::kCode) * totals[r * totals_stride]);
  }
  for (int64_t k = 0; k < count; k += 4 * C::kQuads, lanes += C::kChunkBytes) {
    if constexpr (virtual_rows <= kStreamedRows) {
#pragma GCC unroll 10
      for (int at = 0; at < C::kChunkBytes; at += 64) __builtin_prefetch(lanes + kAhead + at);
    }
#pragma GCC unroll 8
    for (int i = 0; i < C::kQuads; ++i) {
      const __m512i a = reinterpret_cast<__m512i>(C::quad(lanes, i));
      const __m512i b = reinterpret_cast<__m512i>(C::quad(lanes + 64, i));
#pragma GCC unroll 12
      for (int r = 0; r < virtual_rows; ++r) {
        int32_t four;
        __builtin_memcpy(&four, x + r * stride + k + 4 * i, 4);
        const __m512i same = _mm512_set1_epi32(four);
        sums[r][0] = _mm512_dpbusd_epi32(sums[r][0], a, same);
        sums[r][1] = _mm512_dpbusd_epi32(sums[r][1], b, same);
      }
    }
  }
}

// Store the same, [virtual_rows, 32]. Not inlined: otherwise GCC 12 spills the sums.
template <class C, int virtual_rows>
[[gnu::noinline]] void multiply_span(const int8_t* x, int64_t stride, const uint8_t* lanes, int64_t count,
                                     const int32_t* totals, int64_t totals_stride, int32_t* to) {
  __m512i sums[virtual_rows][2];
  add_span<C, virtual_rows>(x, stride, lanes, count, totals, totals_stride, sums);
#pragma GCC unroll 12
  for (int r = 0; r < virtual_rows; ++r) {
    _mm512_storeu_si512(to + 32 * r, sums[r][0]);
    _mm512_storeu_si512(to + 32 * r + 16, sums[r][1]);
  }
}

// Combine a row's sums of one span: sum + scale * (step * digits - zero * the row's sum).
template <int digits>
[[gnu::always_inline]] inline Floats add_digits(Floats sum, const Ints* parts, float step, Floats scale, bool has_zeros,
                                                Floats zero, float row_sum) {
  Floats whole = __builtin_convertvector(parts[digits - 1], Floats);
#pragma GCC unroll 2
  for (int d = digits - 2; d >= 0; --d) whole = whole * 256.0f + __builtin_convertvector(parts[d], Floats);
  Floats found = whole * step;
  if (has_zeros) found -= zero * row_sum;
  return sum + found * scale;
}

// Call add(span, its begin, its length, its scales) for each span.
template <class Add>
[[gnu::always_inline]] inline void for_each_step(const Quantised& q, int64_t block, const DigitRows& rows,
                                                 const Add& add) {
  for (int64_t group = 0, span = 0; group < q.num_groups; ++group) {
    const int64_t begin = group * q.group, end = lesser(q.depth, begin + q.group);
    for (int64_t i = 0; i < rows.spans_of_group; ++i, ++span) {
      const int64_t at = begin + i * rows.span, count = lesser(rows.span, end - at);
      if (count > 0) add(span, at, count, (block * q.num_groups + group) * kColumns);
    }
  }
}

template <class C>
inline const uint8_t* lanes_at(const Quantised& q, int64_t block, int64_t k) {
  return q.values + (block * q.depth + k) * C::kDepthBytes;
}

// One row, with sums in registers.
template <class C, int digits>
[[gnu::noinline]] void multiply_row(const Quantised& q, int64_t block, const DigitRows& rows, int64_t row, float* sums) {
  const int8_t* x = rows.digits + row * digits * rows.stride;
  const int32_t* totals = rows.totals + row * digits * rows.num_spans;
  const float *steps = rows.steps + row * rows.num_spans, *row_sums = rows.sums + row * rows.num_spans;
  const bool has_zeros = q.zeros != nullptr;
  Floats first{}, second{};
  for_each_step(q, block, rows, [&](int64_t span, int64_t at, int64_t count, int64_t scale_at) {
    __m512i found[digits][2];
    add_span<C, digits>(x + at, rows.stride, lanes_at<C>(q, block, at), count, totals + span, rows.num_spans, found);
    Ints parts[2][digits];
#pragma GCC unroll 3
    for (int d = 0; d < digits; ++d) {
      parts[0][d] = reinterpret_cast<Ints>(found[d][0]);
      parts[1][d] = reinterpret_cast<Ints>(found[d][1]);
    }
    const Floats zero = has_zeros ? load_zeros(q, scale_at) : Floats{};
    const Floats other_zero = has_zeros ? load_zeros(q, scale_at + 16) : Floats{};
    first = add_digits<digits>(first, parts[0], steps[span], load_scales(q.scales, q.number, scale_at), has_zeros, zero,
                               row_sums[span]);
    second = add_digits<digits>(second, parts[1], steps[span], load_scales(q.scales, q.number, scale_at + 16), has_zeros,
                                other_zero, row_sums[span]);
  });
  store(sums, first);
  store(sums + 16, second);
}

template <class C, int digits, int num_rows>
[[gnu::noinline]] void multiply_rows(const Quantised& q, int64_t block, const DigitRows& rows, int64_t row, float* sums) {
  alignas(64) int32_t parts[32 * digits * num_rows];
  const int8_t* x = rows.digits + row * digits * rows.stride;
  const int32_t* totals = rows.totals + row * digits * rows.num_spans;
  const float *steps = rows.steps + row * rows.num_spans, *row_sums = rows.sums + row * rows.num_spans;
  for (int64_t i = 0; i < 32 * num_rows; ++i) sums[i] = 0;
  for_each_step(q, block, rows, [&](int64_t span, int64_t at, int64_t count, int64_t scale_at) {
    multiply_span<C, digits * num_rows>(x + at, rows.stride, lanes_at<C>(q, block, at), count, totals + span,
                                        rows.num_spans, parts);
#pragma GCC unroll 2
    for (int v = 0; v < 32; v += 16) {
      const Floats scale = load_scales(q.scales, q.number, scale_at + v);
      const Floats zero = q.zeros ? load_zeros(q, scale_at + v) : Floats{};
      for (int64_t r = 0; r < num_rows; ++r) {
        Ints of_row[digits];
#pragma GCC unroll 3
        for (int d = 0; d < digits; ++d) of_row[d] = load_as<Ints>(parts + 32 * (digits * r + d) + v);
        const int64_t step = r * rows.num_spans + span;
        float* to = sums + 32 * r + v;
        store(to, add_digits<digits>(load(to), of_row, steps[step], scale, q.zeros, zero, row_sums[step]));
      }
    }
  });
}

template <class C, int digits, int most_rows = kVirtualRows / digits>
void multiply_digits_of(const Quantised& q, int64_t block, const DigitRows& rows, int64_t row, int64_t num_rows,
                        float* sums) {
  if constexpr (most_rows > 0) {
    if (num_rows < most_rows) return multiply_digits_of<C, digits, most_rows - 1>(q, block, rows, row, num_rows, sums);
    if constexpr (most_rows == 1) return multiply_row<C, digits>(q, block, rows, row, sums);
    multiply_rows<C, digits, most_rows>(q, block, rows, row, sums);
  }
}

template <class C>
void multiply_digits_of(const Quantised& q, int64_t block, const DigitRows& rows, int64_t row, int64_t num_rows,
                        float* sums) {
  switch (rows.num_digits) {
    case 1: return multiply_digits_of<C, 1>(q, block, rows, row, num_rows, sums);
    case 2: return multiply_digits_of<C, 2>(q, block, rows, row, num_rows, sums);
    default: return multiply_digits_of<C, 3>(q, block, rows, row, num_rows, sums);
  }
}

void multiply_digits(const Quantised& q, int64_t block, const DigitRows& rows, int64_t row, int64_t num_rows,
                     float* sums) {
  switch (q.code) {
    case Code::kInt8: return multiply_digits_of<Int8Bytes>(q, block, rows, row, num_rows, sums);
    case Code::kInt4: return multiply_digits_of<Int4Bytes>(q, block, rows, row, num_rows, sums);
    case Code::kInt5: return multiply_digits_of<Int5Bytes>(q, block, rows, row, num_rows, sums);
    case Code::kInt6: return multiply_digits_of<Int6Bytes>(q, block, rows, row, num_rows, sums);
    case Code::kE2M1: return multiply_digits_of<E2M1Bytes>(q, block, rows, row, num_rows, sums);
    case Code::kE4M3: return;
  }
}

void split(const Quantised& q, const float* x, float whole, const DigitRows& rows, int64_t row) {
  switch (rows.num_digits) {
    case 1: return split_row<1>(q, x, whole, rows, row);
    case 2: return split_row<2>(q, x, whole, rows, row);
    default: return split_row<3>(q, x, whole, rows, row);
  }
}
#else
constexpr bool kHasDigits = false;

void multiply_digits(const Quantised&, int64_t, const DigitRows&, int64_t, int64_t, float*) {}
#endif

}  // namespace
}  // namespace jpaged::product
