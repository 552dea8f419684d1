// Scales and zeros of a quantized matrix, a vector at a time. Included only by core.cc.

#pragma once

#include "core.h"
#include "vector.h"

namespace jpaged::product {
namespace {

constexpr int64_t kAhead = 8192;  // bytes of a block to prefetch

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Bits of the largest magnitude; infinity and NaN compare larger than every number.
inline uint32_t largest_bits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = jpaged::bits_of(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNegligible = (127u - 100u) << 23;  // 2^-100

// Scales numbers to integers: the number times the factor, rounded, is a multiple of the step.
struct Scaling {
  float factor, step;
};

// The scaling of numbers up to the one with these bits, which becomes 127; all become 0 if it is nearly zero. NaN if a
// number is not finite.
inline Scaling scaling_for(uint32_t largest) {
  if (largest >= kInfinity) return {0, __builtin_nanf("")};
  const float number = jpaged::float_of(largest);
  return largest >= kNegligible ? Scaling{127.0f / number, number / 127.0f} : Scaling{0, 1};
}

inline Floats load_scales(const void* from, Number number, int64_t at) {
  if (number == Number::kF32) return load(static_cast<const float*>(from) + at);
  if (number == Number::kF16) return F16::decode(static_cast<const uint16_t*>(from) + at);
  return BF16::decode(static_cast<const uint16_t*>(from) + at);
}

inline Floats load_zeros(const Quantised& q, int64_t at) {
  if (q.zero_number == Number::kF32) return load(static_cast<const float*>(q.zeros) + at);
  return I8::decode(static_cast<const int8_t*>(q.zeros) + at);
}

// Codes of four numbers of each column, quad i of a chunk of lanes, as bytes.
template <Code code>
inline Uints quad_of(const uint8_t* chunk, int i) {
  constexpr int kLane = 4 * kColumns, kHighBits = num_high_bits(code);
  if constexpr (code == Code::kInt8) return load_as<Uints>(chunk);
  const Uints low = load_as<Uints>(chunk + (kHighBits ? i / 2 * kLane : 0)) >> 4 * (i % 2) & 0x0f0f0f0fu;
  if constexpr (kHighBits == 0) return low;
  constexpr uint32_t kHigh = kHighBits == 1 ? 0x10101010u : 0x30303030u;
  const Uints high = load_as<Uints>(chunk + (chunk_of(code).lanes - 1) * kLane);
  const int shift = kHighBits * i - 4;  // to the right
  return low | ((shift < 0 ? high << -shift : high >> shift) & kHigh);
}

}  // namespace
}  // namespace jpaged::product
