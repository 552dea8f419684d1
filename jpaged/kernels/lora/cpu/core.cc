// The two low-rank products of an adapter. Compiled once for each kind of processor, under its own JPAGED_CORE.
//
// This file calls no function templates of the standard library: an instance compiled here for a processor with wide
// vectors could be linked into code that runs on another.

#include "core.h"

#include "vector.h"

namespace jpaged::lora {
namespace {

constexpr int64_t kRanks = 4;                      // ranks multiplied with a tile of rows at once
constexpr int64_t kVectors = kWidth == 16 ? 4 : 2;  // vectors of columns summed at once
constexpr int64_t kLine = 64;

// Loads some numbers and pads them with zeros.
template <class Type>
Floats load_some(const typename Type::Stored* from, int64_t count) {
  typename Type::Stored stored[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) stored[i] = from[i];
  return Type::decode(stored);
}

template <class Type, int64_t num_rows, int64_t num_ranks>
void multiply_rows(const Tile& tile, const typename Type::Stored* a, int64_t depth, int64_t first) {
  using Stored = typename Type::Stored;
  Floats sums[num_rows][num_ranks] = {};
  const auto add = [&](const auto& load_at) {
    Floats x[num_rows];
    for (int64_t r = 0; r < num_rows; ++r) x[r] = load_at(static_cast<const Stored*>(tile.rows[r]));
    for (int64_t i = 0; i < num_ranks; ++i) {
      const Floats column = load_at(a + i * depth);
      for (int64_t r = 0; r < num_rows; ++r) sums[r][i] += x[r] * column;
    }
  };
  const int64_t whole = depth / kWidth * kWidth;
  for (int64_t k = 0; k < whole; k += kWidth) add([k](const Stored* from) { return Type::decode(from + k); });
  if (whole < depth) add([=](const Stored* from) { return load_some<Type>(from + whole, depth - whole); });
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = 0; i < num_ranks; ++i) tile.ranks[r][first + i] = sum(sums[r][i]);
  }
}

template <class Type, int64_t num_rows>
void shrink_rows(const Tile& tile, const typename Type::Stored* a, int64_t depth, int64_t count) {
  int64_t i = 0;
  for (; i + kRanks <= count; i += kRanks) multiply_rows<Type, num_rows, kRanks>(tile, a + i * depth, depth, i);
  for (; i < count; ++i) multiply_rows<Type, num_rows, 1>(tile, a + i * depth, depth, i);
}

template <class Type, int64_t num_rows, int64_t num_vectors>
void sum_columns(const Tile& tile, const typename Type::Stored* b, int64_t stride, int64_t rank, int64_t at) {
  Floats sums[num_rows][num_vectors] = {};
  for (int64_t i = 0; i < rank; ++i) {
    const typename Type::Stored* from = b + i * stride + at;
    // These rows are more streams than hardware prefetchers follow.
    for (int64_t v = 0; v < num_vectors; v += kLine / (kWidth * static_cast<int64_t>(sizeof *from)) + 1) {
      __builtin_prefetch(from + (num_vectors + v) * kWidth);
    }
    for (int64_t v = 0; v < num_vectors; ++v) {
      const Floats column = Type::decode(from + v * kWidth);
      for (int64_t r = 0; r < num_rows; ++r) sums[r][v] += tile.ranks[r][i] * column;
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t v = 0; v < num_vectors; ++v) store(tile.deltas[r] + at + v * kWidth, sums[r][v]);
  }
}

template <class Type, int64_t num_rows>
void expand_rows(const Tile& tile, const typename Type::Stored* b, int64_t stride, int64_t rank, int64_t count) {
  int64_t c = 0;
  for (; c + kVectors * kWidth <= count; c += kVectors * kWidth) {
    sum_columns<Type, num_rows, kVectors>(tile, b, stride, rank, c);
  }
  for (; c + kWidth <= count; c += kWidth) sum_columns<Type, num_rows, 1>(tile, b, stride, rank, c);
  if (c == count) return;
  Floats sums[num_rows] = {};
  for (int64_t i = 0; i < rank; ++i) {
    const Floats column = load_some<Type>(b + i * stride + c, count - c);
    for (int64_t r = 0; r < num_rows; ++r) sums[r] += tile.ranks[r][i] * column;
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float lanes[kWidth];
    store(lanes, sums[r]);
    __builtin_memcpy(tile.deltas[r] + c, lanes, 4 * (count - c));
  }
}

template <class Type>
void shrink_as(const Tile& tile, const void* a, int64_t depth, int64_t count) {
  const auto* from = static_cast<const typename Type::Stored*>(a);
  switch (tile.num_rows) {
    case 1: return shrink_rows<Type, 1>(tile, from, depth, count);
    case 2: return shrink_rows<Type, 2>(tile, from, depth, count);
    case 3: return shrink_rows<Type, 3>(tile, from, depth, count);
    default: return shrink_rows<Type, 4>(tile, from, depth, count);
  }
}

template <class Type>
void expand_as(const Tile& tile, const void* b, int64_t stride, int64_t rank, int64_t count) {
  const auto* from = static_cast<const typename Type::Stored*>(b);
  switch (tile.num_rows) {
    case 1: return expand_rows<Type, 1>(tile, from, stride, rank, count);
    case 2: return expand_rows<Type, 2>(tile, from, stride, rank, count);
    case 3: return expand_rows<Type, 3>(tile, from, stride, rank, count);
    default: return expand_rows<Type, 4>(tile, from, stride, rank, count);
  }
}

void shrink(const Tile& tile, const void* a, Number number, int64_t depth, int64_t count) {
  if (number == Number::kF32) return shrink_as<F32>(tile, a, depth, count);
  number == Number::kBF16 ? shrink_as<BF16>(tile, a, depth, count) : shrink_as<F16>(tile, a, depth, count);
}

void expand(const Tile& tile, const void* b, Number number, int64_t stride, int64_t rank, int64_t count) {
  if (number == Number::kF32) return expand_as<F32>(tile, b, stride, rank, count);
  number == Number::kBF16 ? expand_as<BF16>(tile, b, stride, rank, count)
                          : expand_as<F16>(tile, b, stride, rank, count);
}

}  // namespace

extern const Core JPAGED_CORE;
const Core JPAGED_CORE = {JPAGED_NAME, kWidth, shrink, expand};

}  // namespace jpaged::lora
