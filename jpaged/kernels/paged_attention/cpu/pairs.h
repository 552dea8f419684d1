// Attention of bfloat16 queries, keys and values with instructions that add the products of two pairs of numbers.
// Included only by core.cc.
//
//     scores    pairs of a head's numbers      every fourth pair has the same sum; (0 + 2) + (1 + 3) are added
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

// Exchange lane i of vector j with lane j of vector i for indices that differ by `stride`, and by less.
template <int stride, int... lane>
inline void transpose_step(Uints* x, std::integer_sequence<int, lane...> lanes) {
  const Ints low = {(lane & stride ? kWidth + (lane ^ stride) : lane)...};
  const Ints high = {(lane & stride ? kWidth + lane : lane ^ stride)...};
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (i & stride) continue;
    const __m512i a = reinterpret_cast<__m512i>(x[i]), b = reinterpret_cast<__m512i>(x[i | stride]);
    x[i] = reinterpret_cast<Uints>(_mm512_permutex2var_epi32(a, reinterpret_cast<__m512i>(low), b));
    x[i | stride] = reinterpret_cast<Uints>(_mm512_permutex2var_epi32(a, reinterpret_cast<__m512i>(high), b));
  }
  if constexpr (stride > 1) transpose_step<stride / 2>(x, lanes);
}

void load_pairs(const Call& call, const Tile& tile, int64_t kv_head, const PairScratch& scratch) {
  const int64_t group = call.group(), num_lanes = padded(tile.num_rows), num_pairs = call.head_dim / 2;
  const bool is_many = has_many_rows(tile);
  for (int64_t first = 0; first < num_lanes; first += kWidth) {
    const Half* rows[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
      const int64_t pair = tile.first + first + i, head = kv_head * group + pair % group;
      const Half* q = static_cast<const Half*>(call.q);
      // Idle rows must not contain NaN.
      rows[i] = first + i < tile.num_rows
                    ? q + ((tile.token + pair / group) * call.num_heads + head) * call.head_dim
                    : scratch.zeros;
      if (!is_many) __builtin_memcpy(scratch.q + i * call.head_dim, rows[i], 2 * call.head_dim);
    }
    for (int64_t p = 0; is_many && p < num_pairs; p += kPairsOfVector) {
      Uints pairs[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) pairs[i] = load_as<Uints>(rows[i] + 2 * p);
      transpose_step<kWidth / 2>(pairs, std::make_integer_sequence<int, kWidth>{});
      Pair* const to = reinterpret_cast<Pair*>(scratch.q) + p * num_lanes + first;
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) store_pairs(to + i * num_lanes, pairs[i]);
    }
  }
}

// Pointers to `count` keys or values; those that the row does not have are zeros.
inline void point(const char* const* from, int64_t count, int64_t offset, const Half* zeros, const Half** to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] ? reinterpret_cast<const Half*>(from[i]) + offset : zeros;
}

// --- scores of few rows ------------------------------------------------------------------------------------------

constexpr int kParts = 4;                       // of a vector, four pairs each
constexpr int kPairsOfPart = kPairsOfVector / kParts;

// Part i of four keys' vectors at `at`, for each i.
template <int distance>
inline void load_parts(const Half* const* keys, int64_t at, Uints* to) {
  __m512i key[kParts];
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) key[i] = _mm512_loadu_si512(keys[i * distance] + at);
  const __m512i a = _mm512_maskz_shuffle_i32x4(0xffff, key[0], key[1], 0x44);
  const __m512i b = _mm512_maskz_shuffle_i32x4(0xffff, key[2], key[3], 0x44);
  const __m512i c = _mm512_maskz_shuffle_i32x4(0xffff, key[0], key[1], 0xee);
  const __m512i d = _mm512_maskz_shuffle_i32x4(0xffff, key[2], key[3], 0xee);
  to[0] = reinterpret_cast<Uints>(_mm512_maskz_shuffle_i32x4(0xffff, a, b, 0x88));
  to[1] = reinterpret_cast<Uints>(_mm512_maskz_shuffle_i32x4(0xffff, a, b, 0xdd));
  to[2] = reinterpret_cast<Uints>(_mm512_maskz_shuffle_i32x4(0xffff, c, d, 0x88));
  to[3] = reinterpret_cast<Uints>(_mm512_maskz_shuffle_i32x4(0xffff, c, d, 0xdd));
}

// The lane of product `to`, in the order of rows and keys, after `score_pairs` has added the lanes of each part.
constexpr int lane_from(int to, int keys, int groups) {
  return to % keys / groups * kParts + to / keys * groups + to % keys % groups;
}

template <int keys, int groups, int... lane>
inline Floats order_products(Floats x, std::integer_sequence<int, lane...>) {
  const Ints from = {lane_from(lane, keys, groups)...};
  return reinterpret_cast<Floats>(
      _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(from), reinterpret_cast<__m512>(x)));
}

// The dot products of `rows` queries with width / rows keys. A sum has a lane for each pair of a part, and a vector of
// sums has four keys.
template <int rows>
inline void score_pairs(const Half* q, const Half* const* keys, int64_t head_dim, float* scores) {
  constexpr int kKeys = kWidth / rows, kGroups = kKeys / kParts;
  Floats sums[kParts] = {};
  for (int64_t d = 0; d < head_dim; d += kHalvesOfVector) {
#pragma GCC unroll 4
    for (int group = 0; group < kGroups; ++group) {
      Uints parts[kParts];
      load_parts<kGroups>(keys + group, d, parts);
#pragma GCC unroll 4
      for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) {
          const __m128i query = _mm_loadu_si128(
              reinterpret_cast<const __m128i*>(q + i * head_dim + d + 2 * kPairsOfPart * part));
          const __m512i same = _mm512_maskz_broadcast_i32x4(0xffff, query);
          add_pairs(sums[i * kGroups + group], parts[part], reinterpret_cast<Uints>(same));
        }
      }
    }
  }
  const Floats sum = lane_sums<kPairsOfPart / 2>(sums);
  const Floats products = order_products<kKeys, kGroups>(sum, std::make_integer_sequence<int, kWidth>{});
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

// The rounded product: it must not be fused with an addition.
inline Floats scaled(Floats x, float factor) {
  return reinterpret_cast<Floats>(
      _mm512_maskz_mul_ps(0xffff, reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(all(factor))));
}

// From products to scores in units of log 2.
struct ScoreScale {
  float factor, cap;

  explicit ScoreScale(const Call& call)
      : factor(call.soft_cap > 0 ? call.scale : call.scale * kLog2E), cap(call.soft_cap) {}

  Floats apply(Floats products) const {
    const Floats scores = scaled(products, factor);
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

// The dot products of some vectors of queries with some keys, in the order of `score_pairs`: every fourth pair first.
template <int vectors, int keys>
[[gnu::noinline]] void score_many_keys(const Pair* q, int64_t num_lanes, const Half* const* k, int64_t num_keys,
                                       int64_t num_pairs, float* scores) {
  constexpr int kProducts = vectors * keys, kHalf = kPairsOfPart / 2;
  for (int64_t first = 0; first < num_keys; first += keys, k += keys, scores += keys * num_lanes) {
    Floats halves[kHalf][kProducts];
#pragma GCC unroll 2
    for (int half = 0; half < kHalf; ++half) {
      Floats sums[2][kProducts];
#pragma GCC unroll 8
      for (int i = 0; i < kProducts; ++i) sums[0][i] = sums[1][i] = Floats{};
      for (int64_t part = half; part < num_pairs; part += kPairsOfPart) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const int64_t p = part + h * kHalf;
          Uints queries[vectors];
#pragma GCC unroll 2
          for (int v = 0; v < vectors; ++v) queries[v] = load_as<Uints>(q + p * num_lanes + v * kWidth);
#pragma GCC unroll 4
          for (int j = 0; j < keys; ++j) {
            const Uints key = Uints{} + pair_at(k[j] + 2 * p);
#pragma GCC unroll 2
            for (int v = 0; v < vectors; ++v) add_pairs(sums[h][v * keys + j], key, queries[v]);
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kProducts; ++i) halves[half][i] = sums[0][i] + sums[1][i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < kProducts; ++i) {
      store(scores + i % keys * num_lanes + i / keys * kWidth, halves[0][i] + halves[1][i]);
    }
  }
}

void score_many_pairs(const Pair* q, int64_t num_lanes, const Half* const* k, int64_t num_keys, int64_t num_pairs,
                      float* scores) {
  int64_t lane = 0;
  for (; lane + 2 * kWidth <= num_lanes; lane += 2 * kWidth) {
    score_many_keys<2, 4>(q + lane, num_lanes, k, num_keys, num_pairs, scores + lane);
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
  // If every row sees every key, the largest product has the largest score.
  const bool is_whole = sight.is_whole() && scale.cap <= 0 && scale.factor > 0;
  const float factor = is_whole ? scale.factor : 1.0f;
  for (int64_t lane = 0; lane < num_lanes; lane += kWidth) {
    const Ints first = load_as<Ints>(sight.first + lane), last = load_as<Ints>(sight.last + lane);
    Floats most = all(kLowest);
    for (int64_t key = sight.begin; key < sight.end; ++key) {
      float* row = scores + key * num_lanes + lane;
      if (is_whole) {
        most = larger(load(row), most);
        continue;
      }
      const Ints place = Ints{} + static_cast<int32_t>(key);
      const Floats seen = (place >= first) & (place < last) ? scale.apply(load(row)) : all(-kInfinity);
      most = larger(seen, most);
      store(row, seen);
    }
    most = most * factor;
    Floats totals[kWidth] = {};  // in the order of the lanes of `weigh_few_pairs`
    for (int64_t key = sight.begin; key < sight.end; key += kWidth) {
#pragma GCC unroll 8
      for (int i = 0; i < kWidth; i += 2) {
        const float* row = scores + (key + i) * num_lanes + lane;
        const Floats even = power_of_two(scaled(load(row), factor) - most);
        const Floats odd = power_of_two(scaled(load(row + num_lanes), factor) - most);
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
