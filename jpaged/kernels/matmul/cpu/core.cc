// The product of rows and a block of columns. Compiled once for each kind of processor, under its own JPAGED_CORE.
//
//     sums[r, c] += x[r, k] * block[k, c]      12 rows x 32 columns stay in registers; 6 x 2 vectors if they are narrow
//
// This file calls no function templates of the standard library: an instance compiled here for a processor with wide
// vectors could be linked into code that runs on another.

#include "core.h"

#include "scales.h"
#include "vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace jpaged::product {
namespace {

constexpr int kVectors = 2;                        // vectors of a row's sums at once
constexpr int kStrip = kVectors * kWidth;          // columns
constexpr int kStreamedRows = 8;                   // up to this number, memory is the bottleneck
constexpr int kRows = kWidth == kMaxWidth ? 12 : 6;  // rows that leave registers for the block and a number of x

using TwoHalves = uint32_t;  // numbers k and k + 1 of a column

// --- products ----------------------------------------------------------------------------------------------------

struct Singles {
  using X = float;
  using Stored = float;
  static constexpr int64_t kDeep = 1;  // adjacent numbers of a column

  template <int rows>
  static inline void add(const X* x, int64_t stride, const Stored* block, Floats (*sums)[kVectors]) {
    Floats w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = load(block + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const Floats b = all(x[r * stride]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += b * w[v];
    }
  }
};

// Halves are widened as they are loaded: a product of two has 22 bits and is exact in float32.
struct Halved {
  using X = float;
  using Stored = uint16_t;
  static constexpr int64_t kDeep = 1;

  template <int rows>
  static inline void add(const X* x, int64_t stride, const Stored* block, Floats (*sums)[kVectors]) {
    Floats w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = F16::decode(block + v * kWidth);
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const Floats b = all(x[r * stride]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] += b * w[v];
    }
  }
};

#ifdef __AVX512BF16__
struct Pairs {
  using X = uint16_t;
  using Stored = TwoHalves;
  static constexpr int64_t kDeep = 2;

  template <int rows>
  static inline void add(const X* x, int64_t stride, const Stored* block, Floats (*sums)[kVectors]) {
    __m512bh w[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) w[v] = reinterpret_cast<__m512bh>(load_as<Uints>(block + v * kWidth));
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      TwoHalves two;
      __builtin_memcpy(&two, x + r * stride, sizeof two);
      const __m512bh b = reinterpret_cast<__m512bh>(Uints{} + two);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sums[r][v]), b, w[v]));
      }
    }
  }
};
#else
struct Pairs {
  using X = float;
  using Stored = TwoHalves;
  static constexpr int64_t kDeep = 2;

  template <int rows>
  static inline void add(const X* x, int64_t stride, const Stored* block, Floats (*sums)[kVectors]) {
    Floats first[kVectors], second[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      const Uints two = load_as<Uints>(block + v * kWidth);
      first[v] = floats_of(two << 16);
      second[v] = floats_of(two & 0xffff0000u);
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
      const Floats b = all(x[r * stride]), c = all(x[r * stride + 1]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[r][v] = sums[r][v] + b * first[v] + c * second[v];
    }
  }
};
#endif

// Not inlined: otherwise GCC 12 spills the sums of the largest tile.
template <class N, int rows>
[[gnu::noinline]] void multiply_strip(const typename N::X* x, int64_t stride, int64_t depth,
                                      const typename N::Stored* block, float* to) {
  Floats sums[rows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[r][v] = Floats{};
  }
  for (int64_t k = 0; k < depth; k += N::kDeep, block += kColumns) {
    if constexpr (rows <= kStreamedRows) {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(reinterpret_cast<const char*>(block + v * kWidth) + kAhead);
      }
    }
    N::template add<rows>(x + k, stride, block, sums);
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(to + r * kColumns + v * kWidth, sums[r][v]);
  }
}

template <class N, int rows = kRows>
void multiply(const typename N::X* x, int64_t stride, int64_t num_rows, int64_t depth,
              const typename N::Stored* block, float* to) {
  if constexpr (rows > 0) {
    if (num_rows < rows) return multiply<N, rows - 1>(x, stride, num_rows, depth, block, to);
    for (int strip = 0; strip < kColumns; strip += kStrip) {
      multiply_strip<N, rows>(x, stride, depth, block + strip, to + strip);
    }
  }
}

void multiply_f32(const float* x, int64_t stride, int64_t num_rows, int64_t depth, const float* block, float* sums) {
  multiply<Singles>(x, stride, num_rows, depth, block, sums);
}

void multiply_f16(const float* x, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* block, float* sums) {
  multiply<Halved>(x, stride, num_rows, depth, block, sums);
}

void multiply_bf16(const void* x, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* block,
                   float* sums) {
  multiply<Pairs>(static_cast<const Pairs::X*>(x), stride, num_rows, depth,
                  reinterpret_cast<const TwoHalves*>(block), sums);
}

}  // namespace
}  // namespace jpaged::product

#include "digits.h"
#include "panels.h"
#include "rounded.h"
#include "bytes.h"

namespace jpaged::product {
namespace {

// --- rows --------------------------------------------------------------------------------------------------------

float number_at(const void* from, Number number, int64_t i) {
  if (number == Number::kF32) return static_cast<const float*>(from)[i];
  const uint16_t stored = static_cast<const uint16_t*>(from)[i];
  return number == Number::kBF16 ? decode_bf16(stored) : decode_f16(stored);
}

Floats decode_halves(const uint16_t* from, Number number) {
  return number == Number::kBF16 ? BF16::decode(from) : F16::decode(from);
}

// Load some of a vector's numbers of a row; the others are 0.
Floats load_some(const void* from, Number number, int64_t begin, int64_t count) {
  float lanes[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = number_at(from, number, begin + i);
  return load(lanes);
}

Floats load_numbers(const void* from, Number number, int64_t begin, int64_t count) {
  if (count < kWidth) return load_some(from, number, begin, count);
  if (number == Number::kF32) return load(static_cast<const float*>(from) + begin);
  return decode_halves(static_cast<const uint16_t*>(from) + begin, number);
}

// Convert to floats, padded with zeros to a whole vector; return the padded number.
int64_t decode(const void* from, Number number, int64_t count, float* to) {
  const int64_t padded = (count + kWidth - 1) / kWidth * kWidth;
  if (number == Number::kF32) {
    __builtin_memcpy(to, from, 4 * count);
  } else {
    const uint16_t* halves = static_cast<const uint16_t*>(from);
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) store(to + i, decode_halves(halves + i, number));
    for (; i < count; ++i) to[i] = number_at(from, number, i);
  }
  for (int64_t i = count; i < padded; ++i) to[i] = 0;
  return padded;
}

float sum_of_squares(const float* x, int64_t padded) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= padded; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) sums[j] += load(x + i + j * kWidth) * load(x + i + j * kWidth);
  }
  for (; i < padded; i += kWidth) sums[0] += load(x + i) * load(x + i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

float sum_of(const float* x, int64_t padded) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= padded; i += 4 * kWidth) {
    for (int j = 0; j < 4; ++j) sums[j] += load(x + i + j * kWidth);
  }
  for (; i < padded; i += kWidth) sums[0] += load(x + i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

float inverse_root(float x) { return 1.0f / __builtin_sqrtf(x); }

// x / sqrt(mean(x^2) + eps) * scale
void normalise_rms(float* x, int64_t count, int64_t padded, float eps, const void* scale, Number number) {
  const float factor = inverse_root(sum_of_squares(x, padded) / static_cast<float>(count) + eps);
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(x + i, load(x + i) * factor * load_numbers(scale, number, i, kWidth));
  for (; i < count; ++i) x[i] = x[i] * factor * number_at(scale, number, i);
}

// (x - mean) / sqrt(variance + eps) * scale + bias
void normalise_layer(const Before& before, float* x, int64_t padded) {
  const int64_t count = before.depth, whole = count / kWidth * kWidth;
  const float mean = sum_of(x, padded) / static_cast<float>(count);
  for (int64_t i = 0; i < whole; i += kWidth) store(x + i, load(x + i) - mean);
  for (int64_t i = whole; i < count; ++i) x[i] -= mean;
  const float factor = inverse_root(sum_of_squares(x, padded) / static_cast<float>(count) + before.eps);
  for (int64_t i = 0; i < count; i += kWidth) {
    const int64_t some = count - i < kWidth ? count - i : kWidth;
    Floats scaled = load(x + i) * factor;
    if (before.scale) scaled *= load_numbers(before.scale, before.number, i, some);
    if (before.bias) scaled += load_numbers(before.bias, before.number, i, some);
    store(x + i, scaled);
  }
}

// Return the row in the order of the matrix's depth, stored in `row` or after it.
float* normalise(const Before& before, const void* x, float* row) {
  const int64_t whole = decode(x, before.number, before.depth, row);
  if (before.norm == Norm::kRms) normalise_rms(row, before.depth, whole, before.eps, before.scale, before.number);
  if (before.norm == Norm::kLayer) normalise_layer(before, row, whole);
  if (!before.order) return row;
  float* ordered = row + (before.depth + kMaxWidth - 1) / kMaxWidth * kMaxWidth;
  for (int64_t i = 0; i < before.depth; ++i) ordered[i] = row[before.order[i]];
  return ordered;
}

// The bits of bfloat16 numbers, rounded as `encode_bf16` does; AVX512-BF16 makes zeros of subnormal ones.
Uints encode_bfloats(Floats x) {
#ifdef __AVX512BF16__
  const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(x));
  return reinterpret_cast<Uints>(_mm512_maskz_cvtepu16_epi32(0xffff, reinterpret_cast<__m256i>(halves)));
#else
  const Uints bits = bits_of(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return x != x ? (bits >> 16 | 0x40u) : rounded;
#endif
}

Halves encode_halves(Floats x, Number number) {
  if (number != Number::kBF16) return F16::encode(x);
#ifdef __AVX512BF16__
  return reinterpret_cast<Halves>(_mm512_cvtneps_pbh(reinterpret_cast<__m512>(x)));
#else
  return __builtin_convertvector(encode_bfloats(x), Halves);
#endif
}

// Round a row, which has room for whole vectors, after a norm; without one its numbers have their type.
void round_to_type(const Before& before, float* row) {
  if (before.number == Number::kF32 || before.norm == Norm::kNone) return;
  for (int64_t i = 0; i < before.depth; i += kWidth) {
    const Floats x = load(row + i);
    store(row + i, before.number == Number::kBF16 ? floats_of(encode_bfloats(x) << 16) : F16::round(x));
  }
}

// The step of a row's integers; not finite if a number of the row is not finite.
float step_of(const Before& before, const float* row) {
  const uint32_t largest = largest_bits(row, before.depth);
  if (largest >= kInfinity) return __builtin_nanf("");
  if (before.step) return *before.step;
  return largest ? jpaged::float_of(largest) / 127.0f : 1.0f;
}

constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits

// Round to multiples of the step and convert them back to floats.
void round_to_step(const Before& before, float* row) {
  const float step = step_of(before, row);
  for (int64_t i = 0; i < before.depth; ++i) {
    const float steps = row[i] / step, bounded = steps > 127.0f ? 127.0f : steps < -128.0f ? -128.0f : steps;
    row[i] = (bounded + kRound - kRound) * step;
  }
}

void copy_padded(const float* row, int64_t count, int64_t padded, float* to) {
  __builtin_memcpy(to, row, 4 * count);
  for (int64_t i = count; i < padded; ++i) to[i] = 0;
}

void prepare(const Before& before, const void* x, float* row, void* to, int64_t padded) {
  const int64_t count = before.depth;
  const bool is_copy = before.norm == Norm::kNone && before.rounding == Rounding::kNone && !before.order;
  if (is_copy && before.number == Number::kF32) {
    return copy_padded(static_cast<const float*>(x), count, padded, static_cast<float*>(to));
  }
  row = normalise(before, x, row);
  const bool is_rounded = before.rounding == Rounding::kRow;
  if (is_rounded || before.number == Number::kF16) round_to_type(before, row);
  if (is_rounded) round_to_step(before, row);
  if (before.number != Number::kBF16 || is_rounded) {
    copy_padded(row, count, padded, static_cast<float*>(to));
    return;
  }
  Pairs::X* pairs = static_cast<Pairs::X*>(to);
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t rounded = encode_bf16(row[i]);
    if constexpr (sizeof(Pairs::X) == 2) {
      pairs[i] = rounded;
    } else {
      pairs[i] = decode_bf16(rounded);
    }
  }
  for (int64_t i = count; i < padded; ++i) pairs[i] = 0;
}

void split(const Before& before, const void* x, float* row, [[maybe_unused]] const Quantised& q,
           [[maybe_unused]] const DigitRows& to, [[maybe_unused]] int64_t at) {
  row = normalise(before, x, row);
  round_to_type(before, row);
  for (int64_t i = before.depth; i < q.depth; ++i) row[i] = 0;
#ifdef __AVX512VNNI__
  split(q, row, to.num_digits == 1 ? step_of(before, row) : 0, to, at);
#endif
}

void round(const Before& before, const void* x, float* row, const Quantised& q, const RoundedRows& to, int64_t at) {
  row = normalise(before, x, row);
  round_to_type(before, row);
  for (int64_t i = before.depth; i < q.depth; ++i) row[i] = 0;
  round_row(q, row, to, at);
}

// --- results -----------------------------------------------------------------------------------------------------

void store_numbers(void* to, Number number, int64_t begin, int64_t count, Floats x) {
  if (number == Number::kF32) {
    float* at = static_cast<float*>(to) + begin;
    if (count >= kWidth) return store(at, x);
    float lanes[kWidth];
    store(lanes, x);
    __builtin_memcpy(at, lanes, 4 * count);
    return;
  }
  const Halves halves = encode_halves(x, number);
  uint16_t* at = static_cast<uint16_t*>(to) + begin;
  if (count >= kWidth) {
    __builtin_memcpy(at, &halves, sizeof halves);  // copies of other sizes are loops
  } else {
    __builtin_memcpy(at, &halves, 2 * count);
  }
}

#ifdef __AVX512DQ__
// x / (1 + e^-z) for z >= -87.
Floats times_sigmoid(Floats x, Floats z) { return x * reciprocal(1.0f + power_of_two(z * -1.44269504f)); }
#else
// x / (1 + e^-z), computed with an exponential of at most 1.
Floats times_sigmoid(Floats x, Floats z) {
  const Floats power = exponential(z > 0.0f ? -z : z);
  return x * (z > 0.0f ? all(1.0f) : power) / (1.0f + power);
}
#endif

template <Gate gate>
Floats activate(Floats x) {
  if constexpr (gate == Gate::kSilu) {
    x = x < -87.0f ? all(-87.0f) : x;
    return times_sigmoid(x, x);
  }
  if constexpr (gate == Gate::kErfGelu) {
    const Floats half = 0.5f * x;
    return half + half * error_function(x * 0.707106781f);
  }
  // x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x / (1 + e^-z)
  const Floats z = x * (1.59576912f + 0.0713548163f * (x * x));
  const Floats above = z < -87.0f ? all(-87.0f) : z;
  return times_sigmoid(x, above > 87.0f ? all(87.0f) : above);
}

// Some rows of a vector of columns.
struct Strip {
  Place place;
  int64_t column, count;
  const float *sums, *ups;
};

template <Gate activation>
void finish_strip(const After& after, const Strip& strip) {
  const int64_t count = strip.count, row = strip.place.row;
  const bool is_gated = after.gate != Gate::kNone, is_whole_f32 = after.number == Number::kF32 && count == kWidth;
  const auto bias_at = [&](int64_t at) {
    return after.bias ? load_numbers(after.bias, after.bias_number, at, count) : Floats{};
  };
  const Floats bias = bias_at(strip.column), up_bias = is_gated ? bias_at(after.num_columns + strip.column) : Floats{};
  for (int64_t r = 0; r < strip.place.num_rows; ++r) {
    const int64_t at = (row + r) * after.num_columns + strip.column;
    Floats x = load(strip.sums + r * kColumns) + bias;
    if constexpr (activation != Gate::kNone) x = activate<activation>(x);
    if (is_gated) x *= load(strip.ups + r * kColumns) + up_bias;
    if (is_whole_f32) {
      if (after.residual) x = load(static_cast<const float*>(after.residual) + at) + x;
      store(static_cast<float*>(after.y) + at, x);
      continue;
    }
    if (after.residual) x = load_numbers(after.residual, after.number, at, count) + x;
    store_numbers(after.y, after.number, at, count, x);
  }
}

void finish(const After& after, const Place& place, const float* sums, const float* ups) {
  const int64_t end = after.num_columns - place.column < kColumns ? after.num_columns - place.column : kColumns;
  for (int64_t c = 0; c < end; c += kWidth) {
    const Strip strip{place, place.column + c, end - c < kWidth ? end - c : kWidth, sums + c, ups + c};
    switch (after.gate == Gate::kNone ? after.activation : after.gate) {
      case Gate::kNone: finish_strip<Gate::kNone>(after, strip); break;
      case Gate::kSilu: finish_strip<Gate::kSilu>(after, strip); break;
      case Gate::kGelu: finish_strip<Gate::kGelu>(after, strip); break;
      case Gate::kErfGelu: finish_strip<Gate::kErfGelu>(after, strip); break;
    }
  }
}

// --- heads -------------------------------------------------------------------------------------------------------

constexpr int64_t kMaxHeadDim = 1024;

void store_head(const float* x, int64_t count, Number number, void* to, int64_t begin) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store_numbers(to, number, begin + i, kWidth, load(x + i));
  for (; i < count; ++i) {
    if (number == Number::kF32) {
      static_cast<float*>(to)[begin + i] = x[i];
    } else {
      static_cast<uint16_t*>(to)[begin + i] = number == Number::kBF16 ? encode_bf16(x[i]) : encode_f16(x[i]);
    }
  }
}

// Rotates dimension i with i + D/2.
void turn(const float* x, const float* cos, const float* sin, int64_t half, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Floats a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(to + i, a * c - b * s);
    store(to + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    to[i] = x[i] * cos[i] - x[half + i] * sin[i];
    to[half + i] = x[half + i] * cos[i] + x[i] * sin[i];
  }
}

void rotate(const Heads& heads, int64_t token) {
  const int64_t dim = heads.head_dim, half = dim / 2, rows = heads.group + 2;
  const float *cos = heads.cos + token * half, *sin = heads.sin + token * half;
  float x[kMaxHeadDim], turned[kMaxHeadDim];
  for (int64_t g = 0; g < heads.num_groups; ++g) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t from = ((token * heads.num_groups + g) * rows + row) * dim;
      const int64_t padded = decode(static_cast<const char*>(heads.qkv) + from * bytes_of(heads.number), heads.number,
                                    dim, x);
      if (row == heads.group + 1) {
        store_head(x, dim, heads.number, heads.v, (token * heads.num_groups + g) * dim);
        continue;
      }
      const bool is_query = row < heads.group;
      const void* scale = is_query ? heads.q_scale : heads.k_scale;
      if (scale) normalise_rms(x, dim, padded, heads.eps, scale, heads.number);
      turn(x, cos, sin, half, turned);
      const int64_t head = is_query ? (token * heads.num_groups + g) * heads.group + row : token * heads.num_groups + g;
      store_head(turned, dim, heads.number, is_query ? heads.q : heads.k, head * dim);
    }
  }
}

}  // namespace

extern const Core JPAGED_CORE;
const Core JPAGED_CORE = {JPAGED_NAME,  kWidth,        kRows,      sizeof(Pairs::X) == 2, prepare,         multiply_f32,
                          multiply_f16, multiply_bf16, kHasDigits, split,                 multiply_digits, round,
                          multiply_rounded, multiply_panels, finish, rotate};

}  // namespace jpaged::product
