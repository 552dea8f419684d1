// Numbers as queries, keys and values are stored, one at a time.
//
// Everything here has internal linkage: the files that include it are compiled for different processors, and the linker
// must never give the code of one to another.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace jpaged {

// The order is that of NUMBERS in attention.py.
enum class Number : int64_t { kF32, kBF16, kF16, kI8, kF8 };

static inline int64_t bytes_of(Number number) {
  return number == Number::kF32 ? 4 : number == Number::kBF16 || number == Number::kF16 ? 2 : 1;
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

static inline float decode_bf16(uint16_t stored) { return float_of(uint32_t{stored} << 16); }

static inline uint16_t encode_bf16(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A float of `exponent` and `mantissa` bits, rounded to nearest even: the bits without the sign, or one more than
// the largest if x is larger. Numbers below the smallest normal one have its spacing.
static inline uint32_t round_magnitude(float x, int exponent, int mantissa) {
  const int bias = (1 << (exponent - 1)) - 1;
  const uint32_t bits = bits_of(x) & 0x7fffffff;
  const int shift = 23 - mantissa;
  if (static_cast<int>(bits >> 23) - 127 < 1 - bias) {
    return static_cast<uint32_t>(std::nearbyint(std::ldexp(float_of(bits), bias - 1 + mantissa)));
  }
  const uint32_t rounded = (bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1)) >> shift;
  return rounded - (static_cast<uint32_t>(127 - bias) << mantissa);
}

static inline uint16_t encode_f16(float x) {
  const uint32_t sign = bits_of(x) >> 16 & 0x8000;
  if (x != x) return static_cast<uint16_t>(sign | 0x7e00);
  if (std::fabs(x) >= 65520.0f) return static_cast<uint16_t>(sign | 0x7c00);
  return static_cast<uint16_t>(sign | round_magnitude(x, 5, 10));
}

// Saturates, as KVLayout.encode does.
static inline uint8_t encode_f8(float x) {
  const uint32_t sign = bits_of(x) >> 24 & 0x80;
  if (x != x) return static_cast<uint8_t>(sign | 0x7f);
  if (std::fabs(x) >= 448.0f) return static_cast<uint8_t>(sign | 0x7e);
  return static_cast<uint8_t>(sign | round_magnitude(x, 4, 3));
}

static inline int8_t encode_i8(float x) {
  if (x != x) return 0;
  return static_cast<int8_t>(std::nearbyint(std::fmin(std::fmax(x, -127.0f), 127.0f)));
}

static inline float decode_f16(uint16_t stored) {
  const uint32_t magnitude = stored & 0x7fff, sign = uint32_t{stored & 0x8000u} << 16;
  float x;
  if (magnitude < 0x0400) {
    x = static_cast<float>(magnitude) * 0x1p-24f;
  } else {
    x = float_of((magnitude << 13) + (magnitude < 0x7c00 ? 112u << 23 : 224u << 23));
  }
  return float_of(bits_of(x) | sign);
}

}  // namespace jpaged
