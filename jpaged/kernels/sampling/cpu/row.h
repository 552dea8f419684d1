// A row of logits, and the result of one pass over it for later searches. Included only by core.cc.
//
//     a block of 256 columns   | v0 v1 .. | v16 ..   | ..       |     kWidth groups: the columns that share a lane
//     its groups' largest      | g0 g1 .. |
//
// This file calls no function templates of the standard library: an instance compiled here for a processor with wide
// vectors could be linked into code that runs on another.

#pragma once

#include <cstdint>

#include "vector.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jpaged {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr int64_t kBlock = 256;
constexpr int64_t kMaskBits = 32;
constexpr int64_t kStride = 4 * kWidth;  // columns processed at a time: arrays have this padding after their end

inline bool any(Ints mask) {
#if defined(__AVX512DQ__) && JPAGED_WIDTH == 16
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__AVX2__) && JPAGED_WIDTH == 8
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#elif defined(__SSE2__) && JPAGED_WIDTH == 4
  return _mm_movemask_ps(reinterpret_cast<__m128>(mask)) != 0;
#else
  int32_t lanes[kWidth], found = 0;
  __builtin_memcpy(lanes, &mask, sizeof mask);
  for (int i = 0; i < kWidth; ++i) found |= lanes[i];
  return found != 0;
#endif
}

inline int32_t sum_lanes(Ints x) {
  int32_t lanes[kWidth], total = 0;
  __builtin_memcpy(lanes, &x, sizeof x);
  for (int i = 0; i < kWidth; ++i) total += lanes[i];
  return total;
}

// Load columns from `at`, with minus infinity from `end` on.
inline Floats load_until(const float* x, int64_t at, int64_t end) {
  if (at + kWidth <= end) return load(x + at);
  float lanes[kWidth];
  for (int64_t i = 0; i < kWidth; ++i) lanes[i] = at + i < end ? x[at + i] : -kInfinity;
  return load(lanes);
}

// --- the pass over a row -----------------------------------------------------------------------------------------

struct Row {
  const float* x;
  int64_t size;
  float* groups;  // [blocks, kWidth]: maximum of the columns of a block that share a lane
  float largest;
  bool is_below;  // neither NaN nor plus infinity

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
  int64_t num_groups() const { return num_blocks() * kWidth; }
  int64_t end_of(int64_t block) const { return (block + 1) * kBlock < size ? (block + 1) * kBlock : size; }
};

void scan(Row& row) {
  const Floats lowest = all(-kInfinity), infinity = all(kInfinity);
  Floats most = lowest;
  Ints is_below = Ints{} - 1;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    const int64_t begin = block * kBlock, end = row.end_of(block);
    Floats largest[4] = {lowest, lowest, lowest, lowest};
    if (end - begin == kBlock) {
      for (int64_t at = begin; at < end; at += 4 * kWidth) {
        for (int i = 0; i < 4; ++i) {
          const Floats x = load(row.x + at + i * kWidth);
          largest[i] = larger(x, largest[i]);
          is_below &= x < infinity;
        }
      }
    } else {
      for (int64_t at = begin; at < end; at += kWidth) {
        const Floats x = load_until(row.x, at, end);
        largest[0] = larger(x, largest[0]);
        is_below &= x < infinity;
      }
    }
    const Floats groups = larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]));
    store(row.groups + block * kWidth, groups);
    most = larger(groups, most);
  }
  for (int64_t i = 0; i < kStride; i += kWidth) store(row.groups + row.num_groups() + i, lowest);
  row.largest = largest(most);
  row.is_below = !any(~is_below);
}

int64_t first_largest(const Row& row) {
  const Floats wanted = all(row.largest);
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (!any(load(row.groups + block * kWidth) == wanted)) continue;
    for (int64_t column = block * kBlock; column < row.end_of(block); ++column) {
      if (row.x[column] == row.largest) return column;
    }
  }
  return 0;  // all are NaN
}

// Sum a block before adding it to the others: adding a hundred thousand small numbers one by one would round each time
// in the same direction.
float sum_of_exponentials(const Row& row, float temperature, float largest) {
  Floats total{};
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    Floats its{};
    for (int64_t at = block * kBlock, end = row.end_of(block); at < end; at += kWidth) {
      its += exponential(load_until(row.x, at, end) / temperature - largest);
    }
    total += its;
  }
  return sum(total);
}

}  // namespace
}  // namespace jpaged
