// Spans of a quantized matrix as floats or bfloat16, for rows of these types; rows of float16 have become floats.
// Included only by core.cc, after the products.

#pragma once

#include "core.h"
#include "scales.h"
#include "vector.h"

namespace jpaged::product {
namespace {

// --- numbers ---------------------------------------------------------------------------------------------------------

struct Int8Code {
  static constexpr Code kCode = Code::kInt8;
  static constexpr int kBits = 8;
  static inline Floats decode(Uints code) { return numbers(code) - 128.0f; }
};

struct Int4Code {
  static constexpr Code kCode = Code::kInt4;
  static constexpr int kBits = 4;
  static inline Floats decode(Uints code) { return numbers(code) - 8.0f; }
};

// Codes whose high bits are in the last lane of a chunk.
template <Code code>
struct SplitCode {
  static constexpr Code kCode = code;
  static constexpr int kBits = 4 + num_high_bits(code);
  static inline Floats decode(Uints number) { return numbers(number) - static_cast<float>(offset_of(code)); }
};

// Sign, 2 bits of exponent with bias 1, 1 of mantissa.
struct E2M1Code {
  static constexpr Code kCode = Code::kE2M1;
  static constexpr int kBits = 4;
  static inline Floats decode(Uints code) {
    const Uints magnitude = code & 7u;
    const Floats x = magnitude < 2u ? numbers(magnitude) * 0.5f : floats_of((magnitude << 22) + (126u << 23));
    return floats_of(bits_of(x) | (code & 8u) << 28);
  }
};

struct E4M3Code {
  static constexpr Code kCode = Code::kE4M3;
  static constexpr int kBits = 8;
  static inline Floats decode(Uints code) { return F8::of(code); }
};

// `count` numbers of 32 columns as [count, 32] floats.
template <class C>
void unpack_singles(const uint8_t* lanes, int64_t count, float* panel) {
  constexpr Chunk kChunk = chunk_of(C::kCode);
  constexpr int kOfLane = C::kBits == 8 ? 4 : 8, kLane = 4 * kColumns;
  constexpr uint32_t kHigh = (1u << num_high_bits(C::kCode)) - 1;
  for (int64_t k = 0; k < count; k += kChunk.numbers, lanes += kChunk.lanes * kLane) {
    for (int64_t c = 0; c < kColumns; c += kWidth) {
      for (int first = 0; first < kChunk.numbers; first += kOfLane) {
        const Uints lane = load_as<Uints>(lanes + first / kOfLane * kLane + 4 * c);
        float* to = panel + (k + first) * kColumns + c;
#pragma GCC unroll 8
        for (int i = 0; i < kOfLane; ++i) {
          Uints code = lane >> shift_of(C::kCode, i) & (C::kBits == 8 ? 0xffu : 0xfu);
          if constexpr (kHigh != 0) {
            const Uints high = load_as<Uints>(lanes + (kChunk.lanes - 1) * kLane + 4 * c);
            code |= (high >> high_shift_of(C::kCode, first + i) & kHigh) << 4;
          }
          store(to + i * kColumns, C::decode(code));
        }
      }
    }
  }
}

void unpack_singles(Code code, const uint8_t* lanes, int64_t count, float* panel) {
  switch (code) {
    case Code::kInt8: return unpack_singles<Int8Code>(lanes, count, panel);
    case Code::kInt4: return unpack_singles<Int4Code>(lanes, count, panel);
    case Code::kInt5: return unpack_singles<SplitCode<Code::kInt5>>(lanes, count, panel);
    case Code::kInt6: return unpack_singles<SplitCode<Code::kInt6>>(lanes, count, panel);
    case Code::kE2M1: return unpack_singles<E2M1Code>(lanes, count, panel);
    case Code::kE4M3: return unpack_singles<E4M3Code>(lanes, count, panel);
  }
}

using Words [[gnu::vector_size(4 * kWidth)]] = int16_t;
using Codes [[gnu::vector_size(4 * kWidth)]] = uint16_t;

// Convert E4M3 numbers in the high bytes of 16 bits to bfloat16, if their exponent is not 0: the bias grows by 120.
//
//     s eeee mmm ........   ->   s 0000eeee mmm0000  + 120 << 7
inline Codes widen_normal(Codes high) {
  return (reinterpret_cast<Codes>(reinterpret_cast<Words>(high) >> 4) & 0x87f0u) + 0x3c00u;
}

// The same for every number: m * 2^-9 if the exponent is 0, through the highest bit of m.
inline Codes widen_any(Codes high) {
  const Codes magnitude = high >> 8 & 0x7fu;
  const Codes one = magnitude >= 1u ? Codes{} + 0x3b00u : Codes{};
  const Codes two = magnitude >= 2u ? (magnitude << 6) + 0x3b00u : one;
  const Codes four = magnitude >= 4u ? (magnitude << 5) + 0x3b80u : two;
  return magnitude < 8u ? four | (high & 0x8000u) : widen_normal(high);
}

// Return true if a byte's exponent is 0: about one in thousands in trained matrices.
inline bool has_subnormal(Uints lane) {
#ifdef __AVX512BW__
  return _mm512_testn_epi8_mask(reinterpret_cast<__m512i>(lane), _mm512_set1_epi8(0x78)) != 0;
#else
  const Uints exponents = lane & 0x78787878u, is_zero = (exponents - 0x01010101u) & 0x80808080u;
  return sum(numbers(is_zero >> 7)) != 0;
#endif
}

// Convert E4M3 numbers to bfloat16 [count / 2, 32, 2].
void unpack_pairs(const uint8_t* lanes, int64_t count, TwoHalves* panel) {
  for (int64_t k = 0; k < count; k += 4, lanes += 4 * kColumns, panel += 2 * kColumns) {
    for (int64_t c = 0; c < kColumns; c += kWidth) {
      __builtin_prefetch(lanes + 4 * c + kAhead);
      const Uints lane = load_as<Uints>(lanes + 4 * c);
      const Codes first = reinterpret_cast<Codes>(lane) << 8, second = reinterpret_cast<Codes>(lane);
      const bool is_rare = has_subnormal(lane);
      const Codes pairs[2] = {is_rare ? widen_any(first) : widen_normal(first),
                              is_rare ? widen_any(second) : widen_normal(second)};
      __builtin_memcpy(panel + c, &pairs[0], sizeof pairs[0]);
      __builtin_memcpy(panel + kColumns + c, &pairs[1], sizeof pairs[1]);
    }
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// sums += scale * more for all rows; panels already have their zeros subtracted.
inline void add_scaled(const Quantised& q, int64_t scale_at, const float* more, int64_t num_rows, float* sums) {
  for (int64_t c = 0; c < kColumns; c += kWidth) {
    const Floats scale = load_scales(q.scales, q.number, scale_at + c);
    for (int64_t r = 0; r < num_rows; ++r) {
      float* to = sums + r * kColumns + c;
      store(to, load(to) + load(more + r * kColumns + c) * scale);
    }
  }
}

inline void subtract_zeros(const Quantised& q, int64_t scale_at, int64_t count, float* panel) {
  for (int64_t c = 0; c < kColumns; c += kWidth) {
    const Floats zero = load_zeros(q, scale_at + c);
    for (int64_t k = 0; k < count; ++k) store(panel + k * kColumns + c, load(panel + k * kColumns + c) - zero);
  }
}

// Call add(panel of a span, its begin, its length, its scales) for each span.
template <class Add>
inline void for_each_span(const Quantised& q, int64_t block, const Add& add) {
  const Chunk chunk = chunk_of(q.code);
  const int64_t chunk_bytes = chunk.lanes * 4 * kColumns;
  const uint8_t* lanes = q.values + block * (q.depth / chunk.numbers) * chunk_bytes;
  for (int64_t group = 0; group < q.num_groups; ++group) {
    const int64_t end = lesser(q.depth, (group + 1) * q.group);
    for (int64_t at = group * q.group; at < end; at += kMaxSpan) {
      const int64_t scale_at = (block * q.num_groups + group) * kColumns;
      add(lanes + at / chunk.numbers * chunk_bytes, at, lesser(kMaxSpan, end - at), scale_at);
    }
  }
}

// sums[r, 32] of up to kPanelRows rows from `prepare`, times one block.
void multiply_panels(const Quantised& q, int64_t block, const void* x, int64_t stride, Number number, int64_t num_rows,
                     float* sums) {
  alignas(64) float panel[kMaxSpan * kColumns], more[kRows * kColumns];
  for (int64_t i = 0; i < num_rows * kColumns; ++i) sums[i] = 0;
  const bool is_pairs = sizeof(Pairs::X) == 2 && number == Number::kBF16;  // only kE4M3
  for_each_span(q, block, [&](const uint8_t* lanes, int64_t at, int64_t count, int64_t scale_at) {
    if (is_pairs) {
      unpack_pairs(lanes, count, reinterpret_cast<TwoHalves*>(panel));
    } else {
      unpack_singles(q.code, lanes, count, panel);
      if (q.zeros) subtract_zeros(q, scale_at, count, panel);
    }
    for (int64_t row = 0; row < num_rows; row += kRows) {
      const int64_t rows = lesser(kRows, num_rows - row);
      if (is_pairs) {
        multiply<Pairs>(static_cast<const Pairs::X*>(x) + row * stride + at, stride, rows, count,
                        reinterpret_cast<const TwoHalves*>(panel), more);
      } else {
        multiply<Singles>(static_cast<const float*>(x) + row * stride + at, stride, rows, count, panel, more);
      }
      add_scaled(q, scale_at, more, rows, sums + row * kColumns);
    }
  });
}

}  // namespace
}  // namespace jpaged::product
