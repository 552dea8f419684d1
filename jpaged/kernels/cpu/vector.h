// Vectors of kWidth floats in the compiler's own notation, which every processor has: 4 (SSE, NEON), 8 (AVX2) or 16
// (AVX-512), as JPAGED_WIDTH says. Included only by core.cc.

#pragma once

#include <cstdint>
#include <utility>

#include "numbers.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace jpaged {
namespace {

constexpr int kWidth = JPAGED_WIDTH;

using Floats [[gnu::vector_size(4 * kWidth)]] = float;
using Ints [[gnu::vector_size(4 * kWidth)]] = int32_t;
using Uints [[gnu::vector_size(4 * kWidth)]] = uint32_t;
using Halves [[gnu::vector_size(2 * kWidth)]] = uint16_t;
using Bytes [[gnu::vector_size(kWidth)]] = uint8_t;
using Chars [[gnu::vector_size(kWidth)]] = int8_t;

template <class Vector, class T>
inline Vector load_as(const T* from) {
  Vector vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Floats load(const float* from) { return load_as<Floats>(from); }
inline void store(float* to, Floats x) { __builtin_memcpy(to, &x, sizeof x); }
// The compiler removes x - 0, which is x for every x; 0 + x would be an addition, because it turns -0 into 0.
inline Floats all(float x) { return x - Floats{}; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats floats_of(Uints bits) { return reinterpret_cast<Floats>(bits); }
inline Uints bits_of(Floats x) { return reinterpret_cast<Uints>(x); }
inline Floats numbers(Uints x) { return __builtin_convertvector(reinterpret_cast<Ints>(x), Floats); }

template <int... lane>
constexpr Ints count(std::integer_sequence<int, lane...>) {
  return Ints{lane...};
}
const Ints kLanes = count(std::make_integer_sequence<int, kWidth>{});

// --- sums over lanes ---------------------------------------------------------------------------------------------

// Lane j is the sum of lanes j and j ^ stride: of a if j & stride is 0, else of b.
template <int stride, int... lane>
inline Floats fold(Floats a, Floats b, std::integer_sequence<int, lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, (lane & stride ? kWidth + lane : lane)...) +
         __builtin_shufflevector(a, b, (lane & stride ? kWidth + (lane ^ stride) : lane ^ stride)...);
#else
  return __builtin_shuffle(a, b, Ints{(lane & stride ? kWidth + lane : lane)...}) +
         __builtin_shuffle(a, b, Ints{(lane & stride ? kWidth + (lane ^ stride) : lane ^ stride)...});
#endif
}

// kWidth vectors -> one, whose lane i is the sum of vector i. All sums have the same order.
template <int stride = kWidth / 2>
inline Floats lane_sums(Floats* x) {
  for (int i = 0; i < stride; ++i) {
    x[i] = fold<stride>(x[i], x[i + stride], std::make_integer_sequence<int, kWidth>{});
  }
  if constexpr (stride > 1) return lane_sums<stride / 2>(x);
  return x[0];
}

// Lane j is lane j ^ stride.
template <int stride, int... lane>
inline Ints swap(Ints x, std::integer_sequence<int, lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, x, (lane ^ stride)...);
#else
  return __builtin_shuffle(x, Ints{(lane ^ stride)...});
#endif
}

// combine(..., of all lanes), for operations whose result does not depend on their order.
template <class Combine, int stride = kWidth / 2>
inline int32_t combine_lanes(Ints x, const Combine& combine) {
  x = combine(x, swap<stride>(x, std::make_integer_sequence<int, kWidth>{}));
  if constexpr (stride > 1) {
    return combine_lanes<Combine, stride / 2>(x, combine);
  } else {
    return x[0];
  }
}

inline float sum(Floats x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int stride = kWidth / 2; stride > 0; stride /= 2) {
    for (int i = 0; i < stride; ++i) lanes[i] += lanes[i + stride];
  }
  return lanes[0];
}

inline float largest(Floats x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int i = 1; i < kWidth; ++i) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

// --- functions ---------------------------------------------------------------------------------------------------

// e^x for x <= 88, and 0 below -87: x = n ln 2 + r, |r| <= ln 2 / 2, e^r by its series. Off by 1e-7 of the result.
inline Floats exponential(Floats x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const auto is_zero = x < -87.0f;
  x = is_zero ? all(0.0f) : x;
  const Floats shifted = x * kLog2E + kRound;
  const Floats n = shifted - kRound;
  const Floats r = x - n * kLn2High - n * kLn2Low;
  Floats series = all(1.0f / 5040);
  for (const float term : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) series = series * r + term;
  const Floats power = floats_of((bits_of(shifted) + 127u) << 23);
  return is_zero ? all(0.0f) : series * power;
}

#ifdef __AVX512DQ__
// 2^x: a polynomial of the fraction in [0, 1). Off by 1e-7 of the result.
inline Floats power_of_two(Floats x) {
  const __m512 exponent = reinterpret_cast<__m512>(x);
  const Floats fraction = reinterpret_cast<Floats>(
      _mm512_maskz_reduce_ps(0xffff, exponent, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  Floats series = all(0.00187932f);
  for (const float term : {0.00899100f, 0.05581868f, 0.24015927f, 0.69315174f, 1.0f}) series = series * fraction + term;
  return reinterpret_cast<Floats>(_mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(series), exponent));
}
#endif

#ifdef __AVX512F__
// 1 / x for normal numbers: an estimate that one step of Newton's method makes exact to the last bits.
inline Floats reciprocal(Floats x) {
  const Floats inverse = reinterpret_cast<Floats>(_mm512_maskz_rcp14_ps(0xffff, reinterpret_cast<__m512>(x)));
  return inverse * (2.0f - x * inverse);
}
#else
inline Floats reciprocal(Floats x) { return 1.0f / x; }
#endif

// The integral of 2 / sqrt(pi) e^-t^2 from 0 to x: x times a quotient of polynomials in x^2, fitted to a relative error
// of 1e-8 where |x| < 3.85, and 1 or -1 beyond. Off by 4e-7 of the result.
inline Floats error_function(Floats x) {
  const Floats square = x * x;
  Floats over = all(2.10825715e-6f), under = all(3.8731745e-5f);
  for (const float term : {2.8567604e-4f, 3.67401377e-3f, 0.0524799637f, 0.187899724f, 1.12837911f}) {
    over = over * square + term;
  }
  for (const float term : {1.1455199e-3f, 0.0147850607f, 0.113129787f, 0.499854684f, 1.0f}) {
    under = under * square + term;
  }
  const Floats near = x * over * reciprocal(under), inner = x > 3.85f ? all(1.0f) : near;
  return x < -3.85f ? all(-1.0f) : inner;
}

// 1 - 2 / (e^2x + 1) away from 0, and the continued fraction x / (1 + x^2 / (3 + x^2 / (5 + ...))) around it.
inline Floats hyperbolic_tangent(Floats x) {
  const Floats magnitude = floats_of(bits_of(x) & 0x7fffffffu), square = x * x;
  const Floats bounded = magnitude < 10.0f ? magnitude : all(10.0f);
  const Floats far = 1.0f - 2.0f / (exponential(2.0f * bounded) + 1.0f);
  const Floats near = magnitude / (1.0f + square / (3.0f + square / (5.0f + square / (7.0f + square / 9.0f))));
  const Floats result = magnitude < 0.5f ? near : far;
  return floats_of(bits_of(result) | (bits_of(x) & 0x80000000u));
}

// --- stored numbers ----------------------------------------------------------------------------------------------

struct F32 {
  using Stored = float;
  static Floats decode(const float* from) { return load(from); }
};

struct BF16 {
  using Stored = uint16_t;
  static Floats decode(const uint16_t* from) {
    return floats_of(__builtin_convertvector(load_as<Halves>(from), Uints) << 16);
  }
};

struct F16 {
  using Stored = uint16_t;
  static Floats decode(const uint16_t* from) {
#ifdef __AVX512F__
    return reinterpret_cast<Floats>(_mm512_maskz_cvtph_ps(0xffff, load_as<__m256i>(from)));
#else
    const Uints stored = __builtin_convertvector(load_as<Halves>(from), Uints), magnitude = stored & 0x7fffu;
    const Uints bias = magnitude < 0x7c00u ? Uints{} + (112u << 23) : Uints{} + (224u << 23);  // infinity, NaN
    const Floats normal = floats_of((magnitude << 13) + bias);
    const Floats x = magnitude < 0x0400u ? numbers(magnitude) * 0x1p-24f : normal;
    return floats_of(bits_of(x) | (stored & 0x8000u) << 16);
#endif
  }
  // Rounds as `encode_f16` does.
  static Halves encode(Floats x) {
    const Uints bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    const Uints normal = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
    const Uints small = bits_of(floats_of(magnitude) + 0.5f) - 0x3f000000u;  // multiples of 2^-24
    const Uints finite = magnitude < 0x38800000u ? small : normal;
    const Uints bounded = magnitude < 0x477ff000u ? finite : Uints{} + 0x7c00u;
    const Uints half = magnitude > 0x7f800000u ? Uints{} + 0x7e00u : bounded;
    return __builtin_convertvector(half | (bits >> 16 & 0x8000u), Halves);
  }
  static Floats round(Floats x) {
    const Halves halves = encode(x);
    uint16_t lanes[kWidth];
    __builtin_memcpy(lanes, &halves, sizeof halves);
    return decode(lanes);
  }
};

struct I8 {
  using Stored = int8_t;
  static Floats decode(const int8_t* from) { return __builtin_convertvector(load_as<Chars>(from), Floats); }
};

// Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, and all bits set is NaN.
struct F8 {
  using Stored = uint8_t;
  static Floats decode(const uint8_t* from) { return of(__builtin_convertvector(load_as<Bytes>(from), Uints)); }
  static Floats of(Uints stored) {
    const Uints magnitude = stored & 0x7fu;
    const Floats normal = floats_of((magnitude << 20) + (120u << 23));
    const Floats number = magnitude < 8u ? numbers(magnitude) * 0x1p-9f : normal;
    const Floats x = magnitude == 0x7fu ? floats_of(Uints{} + 0x7fc00000u) : number;
    return floats_of(bits_of(x) | (stored & 0x80u) << 24);
  }
};

}  // namespace
}  // namespace jpaged
