// Gates, and weighted sums of rows. Compiled once for each kind of processor, under its own JPAGED_CORE.
//
// This file calls no function templates of the standard library: an instance compiled here for a processor with wide
// vectors could be linked into code that runs on another.

#include "core.h"

#include "vector.h"

namespace jpaged::experts {
namespace {

constexpr int64_t kColumns = 32;  // of a tile

Floats load_bias(const void* from, Number number, int64_t begin, int64_t count) {
  float lanes[kWidth] = {};
  if (from) {
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t* halves = static_cast<const uint16_t*>(from) + begin;
      lanes[i] = number == Number::kF32    ? static_cast<const float*>(from)[begin + i]
                 : number == Number::kBF16 ? decode_bf16(halves[i])
                                           : decode_f16(halves[i]);
    }
  }
  return load(lanes);
}

// x / (1 + e^-z), computed with an exponential of at most 1.
Floats times_sigmoid(Floats x, Floats z) {
  const Floats power = exponential(z > 0.0f ? -z : z);
  return x * (z > 0.0f ? all(1.0f) : power) / (1.0f + power);
}

Floats smaller(Floats a, Floats b) { return a > b ? b : a; }

// The comparisons preserve NaN.
Floats join(const Gate& gate, Floats x, Floats up) {
  if (gate.kind == Gate::kSilu) return times_sigmoid(x, x) * up;
  // x / 2 (1 + tanh(z / 2)) = x / (1 + e^-z), with z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
  if (gate.kind == Gate::kGeluTanh) return times_sigmoid(x, 1.5957691216f * (x + 0.044715f * x * x * x)) * up;
  if (gate.kind == Gate::kSquaredRelu) {
    up = up < 0.0f ? all(0.0f) : up;
    return up * up;
  }
  const Floats limit = all(gate.limit);
  x = smaller(x, limit);
  up = smaller(up, limit);
  up = up < -limit ? -limit : up;
  return (up + 1.0f) * times_sigmoid(x, gate.alpha * x);
}

void activate(const Gate& gate, const Tile& tile, Number number, void* rows) {
  const int64_t left = tile.num_columns - tile.column, end = left < kColumns ? left : kColumns;
  for (int64_t c = 0; c < end; c += kWidth) {
    const int64_t column = tile.column + c, count = end - c < kWidth ? end - c : kWidth;
    const Floats gate_bias = load_bias(tile.gate_bias, tile.bias_number, column, count);
    const Floats up_bias = load_bias(tile.up_bias, tile.bias_number, column, count);
    for (int64_t r = 0; r < tile.num_rows; ++r) {
      const Floats x = load(tile.gates + r * kColumns + c) + gate_bias;
      const Floats up = load(tile.ups + r * kColumns + c) + up_bias;
      float lanes[kWidth];
      store(lanes, join(gate, x, up));
      const int64_t at = r * tile.num_columns + column;
      if (number == Number::kF32) {
        __builtin_memcpy(static_cast<float*>(rows) + at, lanes, 4 * count);
      } else {
        for (int64_t i = 0; i < count; ++i) {
          const uint16_t half = number == Number::kBF16 ? encode_bf16(lanes[i]) : encode_f16(lanes[i]);
          static_cast<uint16_t*>(rows)[at + i] = half;
        }
      }
    }
  }
}

void add(const float* from, float weight, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, load(to + i) + weight * load(from + i));
  for (; i < count; ++i) to[i] += weight * from[i];
}

}  // namespace

extern const Core JPAGED_CORE;
const Core JPAGED_CORE = {JPAGED_NAME, kWidth, activate, add};

}  // namespace jpaged::experts
