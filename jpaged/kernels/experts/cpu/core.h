// Declarations shared by kernel.cc, which divides the work of the experts and calls the products of matmul/cpu, and
// core.cc, which computes everything between the products.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace jpaged::experts {

// Combines the sums of a gate and an up into one number.
struct Gate {
  // silu(gate) up; (up + 1) gate sigmoid(alpha gate), of clamped ones; relu(up) squared; or gelu(gate) up. The order is
  // that of experts.py.
  enum Kind : int64_t { kSilu, kClamped, kSquaredRelu, kGeluTanh } kind;
  float alpha, limit;
};

// A tile of sums [num_rows, 32], and the bias of its columns.
struct Tile {
  const float *gates, *ups;
  const void *gate_bias, *up_bias;  // of an expert's first column, or null
  Number bias_number;
  int64_t num_rows, column, num_columns;  // columns of all tiles
};

// Functions between the products, compiled for one kind of processor.
struct Core {
  const char* name;
  int64_t width;  // floats of a vector
  // Store act(gates, ups) at the tile's columns of rows that are num_columns numbers apart.
  void (*activate)(const Gate&, const Tile&, Number number, void* rows);
  // to[i] += weight * from[i]
  void (*add)(const float* from, float weight, int64_t count, float* to);
};

}  // namespace jpaged::experts
