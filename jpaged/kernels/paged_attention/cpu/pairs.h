// Attention of bfloat16 queries, keys and values with instructions that add the products of two pairs of numbers.
// Included only by core.cc.
//
//     scores    pairs of a head's numbers      sums and their order are those of core.cc, for pairs instead of numbers
//     values    pairs of consecutive keys      weights are rounded to bfloat16
//
// Scores become weights in place. The maximum of a row is kept in units of log 2 until its chunk ends.

#pragma once

#include "core.h"
#include "vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace jpaged {
namespace {

using Half = uint16_t;
using Pair = uint32_t;  // two bfloat16 numbers

constexpr int kPairsOfVector = kWidth;
constexpr int kHalvesOfVector = 2 * kWidth;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

inline bool has_pairs(const Call& call) {
  return call.q_number == Number::kBF16 && call.kv_number == Number::kBF16 && !call.scales_k2 &&
         call.head_dim % kHalvesOfVector == 0 && call.value_dim % kHalvesOfVector == 0;
}

// sums += the products of two pairs of each lane. GCC 12 copies the sums before and after the intrinsic.
inline void add_pairs(Floats& sums, Uints a, Uints b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
}

inline Pair pair_at(const Half* from) {
  Pair pair;
  __builtin_memcpy(&pair, from, sizeof pair);
  return pair;
}

inline void store_pairs(void* to, Uints pairs) { __builtin_memcpy(to, &pairs, sizeof pairs); }

// The scratch of `Scratch`, with other contents.
struct PairScratch {
  Half* q;        // [rows, D], or pairs [D / 2, rows]
  float* scores;  // [rows, kChunk] or [kChunk, rows]; weights are pairs of keys, in the first half of a row or all rows
  Half* values;   // [kStep / 2, D, 2]
  const Half* zeros;

  explicit PairScratch(const Scratch& scratch)
      : q(reinterpret_cast<Half*>(scratch.q)),
        scores(scratch.scores),
        values(reinterpret_cast<Half*>(scratch.rows)),
        zeros(reinterpret_cast<const Half*>(scratch.zeros)) {}
};

void load_pairs(const Call& call, const Tile& tile, int64_t kv_head, const PairScratch& scratch) {
  const int64_t group = call.group(), num_lanes = padded(tile.num_rows), num_pairs = call.head_dim / 2;
  const bool is_many = has_many_rows(tile);
  Pair* const pairs = reinterpret_cast<Pair*>(scratch.q);
  for (int64_t i = 0; i < num_lanes; ++i) {
    const int64_t token = tile.token + (tile.first + i) / group, head = kv_head * group + (tile.first + i) % group;
    const Half* q = static_cast<const Half*>(call.q) + (token * call.num_heads + head) * call.head_dim;
    if (i >= tile.num_rows) q = scratch.zeros;  // idle rows must not contain NaN
    if (!is_many) {
      __builtin_memcpy(scratch.q + i * call.head_dim, q, 2 * call.head_dim);
      continue;
    }
    for (int64_t p = 0; p < num_pairs; ++p) pairs[p * num_lanes + i] = pair_at(q + 2 * p);
  }
}

// Pointers to `count` keys or values; those that the row does not have are zeros.
inline void point(const char* const* from, int64_t count, int64_t offset, const Half* zeros, const Half** to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ? reinterpret_cast<const Half*>(from[i]) + offset : zeros;
}

// --- scores of few rows ------------------------------------------------------------------------------------------

// The dot products of `rows` queries with width / rows keys.
template <int rows>
inline void score_pairs(const Half* q, const Half* const* keys, int64_t head_dim, float* scores) {
  constexpr int kKeys = kWidth / rows;
  Floats sums[kWidth] = {};
  for (int64_t d = 0; d < head_dim; d += kHalvesOfVector) {
    Uints queries[rows];
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) queries[i] = load_as<Uints>(q + i * head_dim + d);
#pragma GCC unroll 16
    for (int j = 0; j < kKeys; ++j) {
      const Uints key = load_as<Uints>(keys[j] + d);
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) add_pairs(sums[i * kKeys + j], key, queries[i]);
    }
  }
  const Floats products = lane_sums(sums);
  for (int i = 0; i < rows; ++i) {
    __builtin_memcpy(scores + i * kChunk, reinterpret_cast<const float*>(&products) + i * kKeys, 4 * kKeys);
  }
}

template <int rows>
void score_pair_rows(const Half* q, int64_t num_rows, const Half* const* keys, int64_t head_dim, float* scores) {
  for (int64_t i = 0; i < num_rows; i += rows) {
    for (int64_t j = 0; j < kFetch; j += kWidth / rows) {
      score_pairs<rows>(q + i * head_dim, keys + j, head_dim, scores + i * kChunk + j);
    }
  }
}

void score_few_pairs(const Half* q, int64_t num_rows, const Half* const* keys, int64_t head_dim, float* scores) {
  if (num_rows == 1) return score_pair_rows<1>(q, num_rows, keys, head_dim, scores);
  if (num_rows == 2) return score_pair_rows<2>(q, num_rows, keys, head_dim, scores);
  score_pair_rows<4>(q, num_rows, keys, head_dim, scores);
}

// 2^x for x <= 0: a polynomial of the fraction in [0, 1). Off by 1e-7 of the result.
inline Floats power_of_two(Floats x) {
  const __m512 fraction = _mm512_maskz_reduce_ps(0xffff, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  Floats series = all(0.00187932f);
  for (const float term : {0.00899100f, 0.05581868f, 0.24015927f, 0.69315174f, 1.0f}) {
    series = series * reinterpret_cast<Floats>(fraction) + term;
  }
  return reinterpret_cast<Floats>(
      _mm512_maskz_scalef_ps(0xffff, reinterpret_cast<__m512>(series), reinterpret_cast<__m512>(x)));
}

// From products to scores in units of log 2.
struct ScoreScale {
  float factor, cap;

  explicit ScoreScale(const Call& call)
      : factor(call.soft_cap > 0 ? call.scale : call.scale * kLog2E), cap(call.soft_cap) {}

  Floats apply(Floats products) const {
    const Floats scores = products * factor;
    return cap > 0 ? cap_scores(scores, cap) * kLog2E : scores;
  }
};

void weigh_few_pairs(const Sight& sight, int64_t num_rows, const ScoreScale& scale, float* scores, Partial part) {
  for (int64_t i = 0; i < num_rows; ++i, scores += kChunk) {
    Floats most = all(kLowest), total = {};
    for (int64_t key = sight.begin; key < sight.end; key += kWidth) {
      const Ints places = kLanes + static_cast<int32_t>(key);
      const auto is_seen = (places >= sight.first[i]) & (places < sight.last[i]);
      const Floats seen = is_seen ? scale.apply(load(scores + key)) : all(-kInfinity);
      most = larger(seen, most);
      store(scores + key, seen);
    }
    const float max = largest(most);
    for (int64_t key = sight.begin; key < sight.end; key += kWidth) {
      const Floats weights = power_of_two(load(scores + key) - max);
      total += weights;
      const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(weights));
      __builtin_memcpy(scores + key / 2, &halves, sizeof halves);
    }
    part.max[i] = max * kLn2;
    part.sum[i] = sum(total);
  }
}

// --- scores of many rows -----------------------------------------------------------------------------------------

// The dot products of some vectors of queries with some keys, in the order of `score_pairs`: the pairs of each lane of a
// head first, then lanes half the width apart, and so on.
template <int vectors, int keys>
[[gnu::noinline]] void score_many_keys(const Pair* q, int64_t num_lanes, const Half* const* k, int64_t num_keys,
                                       int64_t num_pairs, float* scores) {
  constexpr int kFold = 4, kGroups = kWidth / kFold;  // lanes g, g + kGroups, g + 2 kGroups and g + 3 kGroups at once
  for (int64_t first = 0; first < num_keys; first += keys, k += keys, scores += keys * num_lanes) {
    Floats groups[kGroups][vectors * keys];
    for (int g = 0; g < kGroups; ++g) {
      Floats sums[kFold][vectors * keys];
#pragma GCC unroll 4
      for (int f = 0; f < kFold; ++f) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors * keys; ++i) sums[f][i] = Floats{};
      }
      for (int64_t pair = g; pair < num_pairs; pair += kWidth) {
#pragma GCC unroll 4
        for (int f = 0; f < kFold; ++f) {
          const int64_t p = pair + f * kGroups;
          Uints queries[vectors];
#pragma GCC unroll 4
          for (int v = 0; v < vectors; ++v) queries[v] = load_as<Uints>(q + p * num_lanes + v * kWidth);
#pragma GCC unroll 4
          for (int j = 0; j < keys; ++j) {
            const Uints key = Uints{} + pair_at(k[j] + 2 * p);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; ++v) add_pairs(sums[f][v * keys + j], key, queries[v]);
          }
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < vectors * keys; ++i) groups[g][i] = (sums[0][i] + sums[2][i]) + (sums[1][i] + sums[3][i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < vectors * keys; ++i) {
      const Floats products = (groups[0][i] + groups[2][i]) + (groups[1][i] + groups[3][i]);
      store(scores + i % keys * num_lanes + i / keys * kWidth, products);
    }
  }
}

void score_many_pairs(const Pair* q, int64_t num_lanes, const Half* const* k, int64_t num_keys, int64_t num_pairs,
                      float* scores) {
  int64_t lane = 0;
  for (; lane + 2 * kWidth <= num_lanes; lane += 2 * kWidth) {
    score_many_keys<2, 2>(q + lane, num_lanes, k, num_keys, num_pairs, scores + lane);
  }
  if (lane < num_lanes) score_many_keys<1, 4>(q + lane, num_lanes, k, num_keys, num_pairs, scores + lane);
}

// Numbers i and i + 16 next to each other.
inline __m512i load_order() {
  alignas(64) static constexpr Half kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_load_si512(kOrder);
}

// The weights of two keys, as pairs.
inline Uints pair_weights(Floats even, Floats odd) {
  const __m512i halves = reinterpret_cast<__m512i>(
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(odd), reinterpret_cast<__m512>(even)));
  return reinterpret_cast<Uints>(_mm512_maskz_permutexvar_epi16(~0u, load_order(), halves));
}

void weigh_many_pairs(const Sight& sight, int64_t num_lanes, const ScoreScale& scale, float* scores, Partial part) {
  const bool is_whole = sight.is_whole();
  for (int64_t lane = 0; lane < num_lanes; lane += kWidth) {
    const Ints first = load_as<Ints>(sight.first + lane), last = load_as<Ints>(sight.last + lane);
    Floats most = all(kLowest);
    for (int64_t key = sight.begin; key < sight.end; ++key) {
      float* row = scores + key * num_lanes + lane;
      Floats seen = scale.apply(load(row));
      if (!is_whole) {
        const Ints place = Ints{} + static_cast<int32_t>(key);
        seen = (place >= first) & (place < last) ? seen : all(-kInfinity);
      }
      most = larger(seen, most);
      store(row, seen);
    }
    Floats totals[kWidth] = {};  // in the order of the lanes of `weigh_few_pairs`
    for (int64_t key = sight.begin; key < sight.end; key += kWidth) {
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; i += 2) {
        const float* row = scores + (key + i) * num_lanes + lane;
        const Floats even = power_of_two(load(row) - most), odd = power_of_two(load(row + num_lanes) - most);
        totals[i] += even;
        totals[i + 1] += odd;
        store_pairs(scores + (key + i) / 2 * num_lanes + lane, pair_weights(even, odd));
      }
    }
    for (int stride = kWidth / 2; stride > 0; stride /= 2) {
      for (int i = 0; i < stride; ++i) totals[i] += totals[i + stride];
    }
    store(part.max + lane, most * kLn2);
    store(part.sum + lane, totals[0]);
  }
}

// --- values ------------------------------------------------------------------------------------------------------

// Pairs of weights as stored: [row, key / 2] or [key / 2, row].
struct PairWeights {
  const Pair* at;
  int64_t row_step, pair_step;
};

// Store the values of keys k and k + 1 next to each other: [keys / 2, D, 2].
void interleave(const Half* const* values, int64_t num_keys, int64_t dim, Half* to) {
  alignas(64) static constexpr Half kFirst[] = {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_load_si512(kFirst), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int64_t i = 0; i < num_keys; i += 2) {
    for (int64_t d = 0; d < dim; d += kHalvesOfVector, to += 2 * kHalvesOfVector) {
      const __m512i a = _mm512_loadu_si512(values[i] + d), b = _mm512_loadu_si512(values[i + 1] + d);
      _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
      _mm512_storeu_si512(to + kHalvesOfVector, _mm512_permutex2var_epi16(a, second, b));
    }
  }
}

// Rows of sums, with `num_pairs` pairs of values at a distance of `dim` pairs.
template <int rows, int vectors>
inline void add_value_pairs(PairWeights weights, const Half* values, int64_t num_pairs, int64_t dim, float* out) {
  Floats sums[rows][vectors];
#pragma GCC unroll 4
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) sums[i][j] = load(out + i * dim + j * kWidth);
  }
  for (int64_t p = 0; p < num_pairs; ++p, values += 2 * dim, weights.at += weights.pair_step) {
    Uints two[vectors];
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) two[j] = load_as<Uints>(values + j * kHalvesOfVector);
#pragma GCC unroll 4
    for (int i = 0; i < rows; ++i) {
      const Uints weight = Uints{} + weights.at[i * weights.row_step];
#pragma GCC unroll 4
      for (int j = 0; j < vectors; ++j) add_pairs(sums[i][j], weight, two[j]);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < vectors; ++j) store(out + i * dim + j * kWidth, sums[i][j]);
  }
}

template <int rows>
[[gnu::noinline]] void add_pair_rows(PairWeights weights, const Half* values, int64_t num_pairs, int64_t dim,
                                     float* out) {
  int64_t d = 0;
  for (; d + 4 * kWidth <= dim; d += 4 * kWidth) {
    add_value_pairs<rows, 4>(weights, values + 2 * d, num_pairs, dim, out + d);
  }
  if (d < dim) add_value_pairs<rows, 2>(weights, values + 2 * d, num_pairs, dim, out + d);
}

void add_pair_tile(PairWeights weights, int64_t num_rows, const Half* values, int64_t num_pairs, int64_t dim,
                   float* out) {
  for (; num_rows >= 4; num_rows -= 4, weights.at += 4 * weights.row_step, out += 4 * dim) {
    add_pair_rows<4>(weights, values, num_pairs, dim, out);
  }
  switch (num_rows) {
    case 3: return add_pair_rows<3>(weights, values, num_pairs, dim, out);
    case 2: return add_pair_rows<2>(weights, values, num_pairs, dim, out);
    case 1: return add_pair_rows<1>(weights, values, num_pairs, dim, out);
  }
}

// --- a chunk -----------------------------------------------------------------------------------------------------

void attend_pairs(const Call& call, const Piece& piece, const Keys& keys, const Keys* next, const PairScratch& scratch,
                  Partial part) {
  const Tile& tile = *piece.tile;
  const int64_t num_lanes = padded(tile.num_rows), dim = call.value_dim;
  const bool is_many = has_many_rows(tile);
  const Sight sight(call, tile, piece.chunk);
  // A latent's value was loaded with it.
  const int64_t value_bytes = call.value_offset ? 2 * dim : 0;

  const Half* rows[kStep];
  for (int64_t i = sight.begin; i < sight.end; i += kStep) {
    const int64_t count = lesser(kStep, sight.end - i);
    point(keys.at + i, count, 0, scratch.zeros, rows);
    if (is_many) {
      fetch(keys, i, i + count, 2 * call.value_offset, value_bytes);
      score_many_pairs(reinterpret_cast<const Pair*>(scratch.q), num_lanes, rows, count, call.head_dim / 2,
                       scratch.scores + i * num_lanes);
      continue;
    }
    for (int64_t j = 0; j < count; j += kFetch) {
      fetch(keys, i + j, i + j + kFetch, 2 * call.value_offset, value_bytes);
      score_few_pairs(scratch.q, tile.num_rows, rows + j, call.head_dim, scratch.scores + i + j);
    }
  }
  const ScoreScale scale(call);
  if (is_many) {
    weigh_many_pairs(sight, num_lanes, scale, scratch.scores, part);
  } else {
    weigh_few_pairs(sight, tile.num_rows, scale, scratch.scores, part);
  }
  for (int64_t i = 0; i < tile.num_rows * dim; i += kWidth) store(part.out + i, Floats{});
  const int64_t num_keys = sight.end - sight.begin;
  const auto next_key = [&](int64_t i) { return next->begin + (next->end - next->begin) * i / num_keys; };
  const Pair* const weights = reinterpret_cast<const Pair*>(scratch.scores);
  for (int64_t i = 0; i < num_keys; i += kStep) {
    const int64_t count = lesser(kStep, num_keys - i), pair = (sight.begin + i) / 2;
    point(keys.at + sight.begin + i, count, call.value_offset, scratch.zeros, rows);
    interleave(rows, count, dim, scratch.values);
    if (next) fetch(*next, next_key(i), next_key(i + count), 0, 2 * call.head_dim);
    const PairWeights from = is_many ? PairWeights{weights + pair * num_lanes, 1, num_lanes}
                                     : PairWeights{weights + pair, kChunk, 1};
    add_pair_tile(from, tile.num_rows, scratch.values, count / 2, dim, part.out);
  }
}

}  // namespace
}  // namespace jpaged
#else
namespace jpaged {
namespace {

struct PairScratch {
  explicit PairScratch(const Scratch&) {}
};

inline bool has_pairs(const Call&) { return false; }
inline void load_pairs(const Call&, const Tile&, int64_t, const PairScratch&) {}
inline void attend_pairs(const Call&, const Piece&, const Keys&, const Keys*, const PairScratch&, Partial) {}

}  // namespace
}  // namespace jpaged
#endif
