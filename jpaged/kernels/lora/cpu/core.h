// Declarations shared by kernel.cc, which divides the work into tasks, and core.cc, which computes adapters on CPUs.
//
//     a    [rank, in]     rows are multiplied with its rows: dot products, each with one accumulator of whole vectors
//     b    [rank, out]    sums of its rows, each with one accumulator, in the order of the rank

#pragma once

#include <cstdint>

#include "numbers.h"

namespace jpaged::lora {

constexpr int64_t kRows = 4;  // of a tile

// Up to kRows rows of a call with the same adapter.
struct Tile {
  const void* rows[kRows];
  float* ranks[kRows];    // products of each row with `a`
  float* deltas[kRows];   // products of those with `b`
  int64_t num_rows;
};

// The products compiled for one kind of processor.
struct Core {
  const char* name;
  int64_t width;  // floats of a vector
  // ranks[r][i] = rows[r] . a[i] for i below count.
  void (*shrink)(const Tile&, const void* a, Number, int64_t depth, int64_t count);
  // deltas[r][c] = the sum over i below rank of ranks[r][i] b[i, c], for c below count; rows of b are `stride` apart.
  void (*expand)(const Tile&, const void* b, Number, int64_t stride, int64_t rank, int64_t count);
};

}  // namespace jpaged::lora
