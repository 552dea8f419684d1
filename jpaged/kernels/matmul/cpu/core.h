// Declarations shared by kernel.cc, which divides the work of CPU products into tasks, and core.cc, which computes
// them.
//
//     y[T, N] = after(before(x)[T, K] W[K, N])        W in consecutive blocks of 32 columns:
//
//     float32    [N / 32, K, 32]
//     float16    [N / 32, K, 32]                      rows become float32
//     bfloat16   [N / 32, K / 2, 32, 2]               two adjacent numbers of a column, for its dot products
//     8, 4 bits                                       see quantised.h
//
// Columns and depth are padded with zeros. Each number of y has one accumulator, in the order of k: it does not depend,
// in any bit, on the other rows, the columns or the threads.

#pragma once

#include <cstdint>

#include "numbers.h"
#include "quantised.h"

namespace jpaged::product {

constexpr int64_t kColumns = 32;   // columns of a block
constexpr int64_t kMaxRows = 12;   // rows that a core multiplies at once
constexpr int64_t kMaxWidth = 16;  // floats of the widest vector

enum class Norm : int64_t { kNone, kRms, kLayer };

// Rows that become integers, -128 to 127, before a quantized product: with one step per row, or one per span of k (see
// `rounded_span`). The largest magnitude is 127 steps. In the order of ROUNDINGS in packed.py.
enum class Rounding : int64_t { kNone, kRow, kSpans };

// The activation of gates or sums, in the order of GATES in multiply.py. kGelu is the one with a hyperbolic tangent.
enum class Gate : int64_t { kNone, kSilu, kGelu, kErfGelu };

// Operations on a row before the product.
struct Before {
  Norm norm;
  float eps;
  const void *scale, *bias;  // [K], of the type of x; those of the layer norm may be null
  Number number;             // of x
  int64_t depth;             // K
  Rounding rounding;         // kNone if the product is not quantized
  const float* step;         // of all rows rounded with kRow, or null
  const int32_t* order;      // final order of a row's numbers, or null: number k is the former number order[k]
};

// Operations on sums before they are stored.
struct After {
  const void* bias;      // [N], or [2N] with gates, or null
  const void* residual;  // [T, N] of y's type, or null
  void* y;               // [T, N]
  Number bias_number, number;
  int64_t num_columns;  // N
  Gate gate;            // y = activation(sums of the first tile) * sums of the second, unless kNone
  Gate activation;      // y = activation(sums), without gates
};

// Position of a tile of sums.
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
  int64_t max_rows;   // of `multiply`, up to kMaxRows
  bool takes_bf16;    // accepts bfloat16 rows; otherwise rows must be float32
  // Normalize a row and round it to its type. `row` holds twice K floats in whole vectors of kMaxWidth; `to` receives
  // the row for `multiply`, padded with zeros to `padded` numbers.
  void (*prepare)(const Before&, const void* x, float* row, void* to, int64_t padded);
  // sums[r, 32] of rows at a distance of `stride` numbers, times one block.
  void (*multiply_f32)(const float* x, int64_t stride, int64_t num_rows, int64_t depth, const float* block, float* sums);
  void (*multiply_f16)(const float* x, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* block,
                       float* sums);
  void (*multiply_bf16)(const void* x, int64_t stride, int64_t num_rows, int64_t depth, const uint16_t* block,
                        float* sums);
  // True if rows become digits for a matrix of integers (`split`, `multiply_digits`), instead of being multiplied with
  // panels (`prepare`, `multiply_panels`).
  bool has_digits;
  // Normalize a row, round it to its type and convert it to digits. `row` is as for `prepare`, with the matrix's depth.
  void (*split)(const Before&, const void* x, float* row, const Quantised&, const DigitRows& to, int64_t at);
  // sums[r, 32] of rows [row, row + num_rows), of up to kMaxRows digits, times one block of a quantized matrix.
  void (*multiply_digits)(const Quantised&, int64_t block, const DigitRows&, int64_t row, int64_t num_rows,
                          float* sums);
  // The same for rows that are rounded by spans: up to kPanelRows rows. `bytes` has room for the block's numbers, a byte
  // each.
  void (*round)(const Before&, const void* x, float* row, const Quantised&, const RoundedRows& to, int64_t at);
  void (*multiply_rounded)(const Quantised&, int64_t block, const RoundedRows&, int64_t row, int64_t num_rows,
                           uint8_t* bytes, float* sums);
  // The same for up to kPanelRows rows of this type from `prepare`.
  void (*multiply_panels)(const Quantised&, int64_t block, const void* x, int64_t stride, Number, int64_t num_rows,
                          float* sums);
  // Store a tile of sums [num_rows, 32], or two consecutive ones for gates and ups.
  void (*finish)(const After&, const Place&, const float* sums, const float* ups);
  // Normalize and rotate the queries and keys of one token, and store them with its values.
  void (*rotate)(const Heads&, int64_t token);
};

}  // namespace jpaged::product
