// What the two halves of the CPU product share: kernel.cc decides what is computed where, core.cc computes it.
//
//     y[T, N] = after(before(x)[T, K] W[K, N])        W in blocks of 32 columns, one after the other:
//
//     float32    [N / 32, K, 32]
//     bfloat16   [N / 32, K / 2, 32, 2]               two of a column side by side, as the processor multiplies them
//     8, 4 bits                                       see quantised.h
//
// Columns and depth are filled up with zeros. Each number of y has one accumulator, in the order of k: neither the other
// rows, nor the columns, nor the threads show in a single bit of it.

#pragma once

#include <cstdint>

#include "numbers.h"
#include "quantised.h"

namespace jpaged::product {

constexpr int64_t kColumns = 32;   // of a block
constexpr int64_t kMaxRows = 12;   // that a core multiplies at once
constexpr int64_t kMaxWidth = 16;  // floats of the widest vector

enum class Norm : int64_t { kNone, kRms, kLayer };

// What happens to a row before the product.
struct Before {
  Norm norm;
  float eps;
  const void *scale, *bias;  // [K], of the type of x; the layer norm's may be null
  Number number;             // of x
  int64_t depth;             // K
  // Rows of a quantised product that become whole numbers, -128 to 127, of one step each: the largest magnitude is
  // 127 of them, unless `step` is there.
  bool is_int8;
  const float* step;
  const int32_t* order;  // of a row's numbers behind all that, or null: number k is what was number order[k]
};

// What happens to sums before they are stored.
struct After {
  const void* bias;      // [N], twice as many where gated, or null
  const void* residual;  // [T, N] of y's type, or null
  void* y;               // [T, N]
  Number bias_number, number;
  int64_t num_columns;  // N
  bool is_gated;        // y = silu(sums of the first tile) * sums of the second
};

// Where a tile of sums belongs.
struct Place {
  int64_t row, num_rows, column;
};

// A row of queries, keys and values, grouped by key/value head: [K, G + 2, D].
struct Heads {
  Number number;
  int64_t num_groups, group, head_dim;
  float eps;
  const void *q_scale, *k_scale;  // [D] of the norms of queries and keys, or null
  const void* qkv;                // [T, K, G + 2, D]
  const float *cos, *sin;         // [T, D / 2]
  void *q, *k, *v;                // [T, K * G, D], [T, K, D], [T, K, D]
};

// The product compiled for one kind of processor.
struct Core {
  const char* name;
  int64_t width;      // floats of a vector
  int64_t max_rows;   // of `multiply`, at most kMaxRows
  bool takes_bf16;    // rows of bfloat16 as they are; else they are to be float32
  // A row normalised and rounded to its type. `row` has room for twice K floats in whole vectors of kMaxWidth; `to` has
  // the row as `multiply` takes it, with zeros up to `padded` numbers.
  void (*prepare)(const Before&, const void* x, float* row, void* to, int64_t padded);
  // sums[r, 32] of rows that are `stride` numbers apart, times one block.
  void (*multiply_f32)(const float* x, int64_t stride, int64_t num_rows, int64_t depth, const float* block, float* sums);
  void (*multiply_bf16)(const void* x, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* block,
                        float* sums);
  // Whether rows become digits for a matrix of whole numbers, and are not multiplied with panels; the two calls of each
  // way have the other's place.
  bool has_digits;
  // Makes a row digits, after it was normalised and rounded to its type. `row` is as for `prepare`, of the matrix's depth.
  void (*split)(const Before&, const void* x, float* row, const Quantised&, const DigitRows& to, int64_t at);
  // sums[r, 32] of rows [row, row + num_rows), of at most kMaxRows digits, times one block of a quantised matrix.
  void (*multiply_digits)(const Quantised&, int64_t block, const DigitRows&, int64_t row, int64_t num_rows,
                          float* sums);
  // The same of up to kPanelRows rows that `prepare` made, of this type.
  void (*multiply_panels)(const Quantised&, int64_t block, const void* x, int64_t stride, Number, int64_t num_rows,
                          float* sums);
  // Stores a tile of sums [num_rows, 32], and of gates and ups two, one behind the other.
  void (*finish)(const After&, const Place&, const float* sums, const float* ups);
  // Queries, keys and values of one token, normalised and turned by its angles.
  void (*rotate)(const Heads&, int64_t token);
};

}  // namespace jpaged::product
