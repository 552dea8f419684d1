// The columns of a row that temperature, min_p, top_k and top_p leave: those not below a floor. Included only by
// core.cc.
//
// The floor is searched among few columns; blocks whose groups are all below it are not read again. The k largest
// columns are in at most k groups, so columns below the k-th largest group maximum do not count.

#pragma once

#include <math.h>

#include "core.h"
#include "row.h"

namespace jpaged {
namespace {

constexpr float kSmallest = 1e-30f;  // lower bound of temperatures and top_p
constexpr float kReaches[] = {6.0f, 12.0f, 24.0f, kInfinity};  // distances from the maximum that top_p searches

inline int64_t strides(int64_t n) { return (n + kStride - 1) / kStride * kStride; }

inline void pad(float* values, int64_t num, float with) {
  for (int64_t i = num; i < strides(num); ++i) values[i] = with;
}

// The float at an integer position in the order of floats: the bits with the sign flipped, or all flipped if negative.
inline float float_of_key(uint32_t key) { return float_of(key >> 31 ? key ^ 1u << 31 : ~key); }

// The largest float such that `num` values, or values whose weights sum up to `need`, are not below it; minus infinity
// if there is none. Each pass determines one bit; the last ones are omitted. Arrays are padded with minus infinity and
// 0.
float largest_threshold(const float* values, const float* weights, int64_t num, float need, uint32_t last_bit = 1) {
  uint32_t key = 0;
  for (uint32_t bit = 1u << 31; bit >= last_bit && bit; bit >>= 1) {
    const Floats floor = all(float_of_key(key | bit));
    Floats weight[4] = {};
    Ints count[4] = {};
    for (int64_t i = 0; i < num; i += kStride) {
      for (int j = 0; j < 4; ++j) {
        const auto is_kept = load(values + i + j * kWidth) >= floor;
        if (weights) {
          weight[j] += is_kept ? load(weights + i + j * kWidth) : Floats{};
        } else {
          count[j] -= is_kept;
        }
      }
    }
    const float total = weights ? sum((weight[0] + weight[1]) + (weight[2] + weight[3]))
                                : static_cast<float>(sum_lanes((count[0] + count[1]) + (count[2] + count[3])));
    if (total >= need) key |= bit;
  }
  constexpr uint32_t kLowest = 0x007fffff;  // only NaN bits are below minus infinity
  return float_of_key(key < kLowest ? kLowest : key);
}

// Columns that are not below a floor, in order.
struct Kept {
  int32_t* ids;
  float *values, *weights;  // after temperature; e^(value - largest)
  int64_t size = 0;

  // Append the lanes that are set in the mask.
  inline void keep(Ints mask, Ints its_ids, Floats its_values) {
#if defined(__AVX512DQ__) && JPAGED_WIDTH == 16
    const __mmask16 lanes = _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
    _mm512_storeu_si512(ids + size, _mm512_maskz_compress_epi32(lanes, reinterpret_cast<__m512i>(its_ids)));
    _mm512_storeu_ps(values + size, _mm512_maskz_compress_ps(lanes, reinterpret_cast<__m512>(its_values)));
    size += __builtin_popcount(lanes);
#else
    int32_t is_kept[kWidth], id[kWidth];
    float value[kWidth];
    __builtin_memcpy(is_kept, &mask, sizeof mask);
    __builtin_memcpy(id, &its_ids, sizeof its_ids);
    store(value, its_values);
    for (int lane = 0; lane < kWidth; ++lane) {
      ids[size] = id[lane];
      values[size] = value[lane];
      size -= is_kept[lane];
    }
#endif
  }
};

void gather(const Row& row, float temperature, float floor, Kept& kept) {
  kept.size = 0;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (!any(load(row.groups + block * kWidth) / temperature >= floor)) continue;
    for (int64_t at = block * kBlock, end = row.end_of(block); at < end; at += kWidth) {
      const Floats scaled = load_until(row.x, at, end) / temperature;
      const Ints ids = kLanes + static_cast<int32_t>(at);
      const Ints is_kept = (scaled >= floor) & (ids < static_cast<int32_t>(end));
      if (any(is_kept)) kept.keep(is_kept, ids, scaled);
    }
  }
  pad(kept.values, kept.size, -kInfinity);
}

void drop_below(Kept& kept, float floor) {
  const int64_t num = kept.size;
  kept.size = 0;
  for (int64_t i = 0; i < num; i += kWidth) {
    const Floats values = load(kept.values + i);
    const Ints is_left = (values >= floor) & (kLanes + static_cast<int32_t>(i) < static_cast<int32_t>(num));
    if (any(is_left)) kept.keep(is_left, load_as<Ints>(kept.ids + i), values);
  }
  pad(kept.values, kept.size, -kInfinity);
}

// A lower bound of the num largest columns of a row, before temperature: they are in at most num groups. The bound need
// not be tight, so half of the bits are omitted.
float bound_of_largest(const Row& row, int64_t num) {
  if (num > row.num_groups()) return -kInfinity;
  return largest_threshold(row.groups, nullptr, row.num_groups(), static_cast<float>(num), 1 << 16);
}

float weigh(Kept& kept, float largest) {
  Floats total{};
  for (int64_t i = 0; i < strides(kept.size); i += kWidth) {
    const Floats weight = exponential(load(kept.values + i) - largest);
    store(kept.weights + i, weight);
    total += weight;
  }
  return sum(total);
}

// Gather the columns that min_p, top_k and top_p leave; return false, without gathering, if that is the whole row.
bool truncate(const SamplingCall& call, int64_t r, const Row& row, float temperature, Kept& kept) {
  const float largest = row.largest / temperature, top_p = call.top_p_r[r];
  const int64_t top_k = call.top_k_r[r];
  float floor = call.min_p_r[r] > 0 ? largest + logf(call.min_p_r[r]) : -kInfinity;
  const bool has_top_k = top_k < row.size, has_top_p = top_p < 1, has_floor = has_top_k || floor > -kInfinity;
  if (has_floor) {
    const float bound = has_top_k ? bound_of_largest(row, top_k) / temperature : -kInfinity;
    gather(row, temperature, bound > floor ? bound : floor, kept);
  }
  if (has_top_k) {
    drop_below(kept, largest_threshold(kept.values, nullptr, kept.size, static_cast<float>(top_k)));
  }
  if (!has_top_p) return has_floor;
  const float share = top_p > kSmallest ? top_p : kSmallest;
  float need = has_floor ? share * weigh(kept, largest) : share * sum_of_exponentials(row, temperature, largest);
  for (const float reach : kReaches) {
    if (has_floor) break;
    gather(row, temperature, largest - reach, kept);
    if (weigh(kept, largest) >= need) break;
  }
  drop_below(kept, largest_threshold(kept.values, kept.weights, kept.size, need));
  return true;
}

}  // namespace
}  // namespace jpaged
