// Attention of one tile over one chunk of keys. Compiled once for each width of vectors, under its own JPAGED_CORE.
//
//     scores     s[row, key] = q[row] . k[key]
//     softmax    p[row, key] = e^(s - max of the row)   keys not visible to a row are minus infinity before and 0 after
//     values     out[row]   += p[row, key] v[key]       4 rows x some vectors of the output stay in registers
//
// The contents of a vector depend on the number of rows:
//
//     few (decode)     parts of a head: products are summed over lanes at the end, for one key and row per lane at
//                      once, and scores are stored as [row, key]
//     many (prefill)   rows: a number of a key is multiplied with that of all rows, without sums over lanes, and
//                      scores are stored as [key, row]
//
// Both use the same order of sums, so a query has the same bits in a chunk as alone.
//
// This file calls no function templates of the standard library: an instance compiled here for a processor with wide
// vectors could be linked into code that runs on another.

#include "core.h"

#include "vector.h"

namespace jpaged {
namespace {

constexpr float kLowest = -1e30f;  // initial maximum: finite, so a row without visible keys does not become NaN
constexpr float kInfinity = __builtin_inff();
constexpr int64_t kFetch = kMaxWidth;  // keys prefetched together

inline int64_t padded(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }
inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

// Keys of a chunk that are visible to each row: first to last.
struct Sight {
  int32_t first[kTileRows], last[kTileRows];
  int64_t begin, end;          // keys visible to some row, in whole steps of kMaxWidth
  int32_t all_begin, all_end;  // keys visible to all rows

  Sight(const Call& call, const Tile& tile, int64_t chunk) : all_begin(0), all_end(kChunk) {
    const int64_t first_key = chunk * kChunk;
    const int64_t seen_begin = greater(tile.begin - first_key, 0), seen_end = lesser(tile.end - first_key, kChunk);
    begin = seen_begin / kMaxWidth * kMaxWidth;
    end = (seen_end + kMaxWidth - 1) / kMaxWidth * kMaxWidth;
    for (int64_t i = 0; i < kTileRows; ++i) {
      const int64_t position = tile.position + (tile.first + i) / call.group();
      const int64_t oldest = call.window ? greater(tile.begin, position - call.window + 1) : tile.begin;
      const int64_t newest = i < tile.num_rows ? lesser(position + 1, tile.end) : 0;
      first[i] = static_cast<int32_t>(lesser(greater(oldest - first_key, 0), kChunk));
      last[i] = static_cast<int32_t>(greater(lesser(newest - first_key, kChunk), 0));
      if (first[i] > all_begin) all_begin = first[i];
      if (last[i] < all_end && i < tile.num_rows) all_end = last[i];
    }
  }

  bool is_whole() const { return begin >= all_begin && end <= all_end; }
};

struct Scratch {
  float* q;       // [rows, D] or [D, rows]
  float* scores;  // [rows, kChunk] or [kChunk, rows]
  float* rows;    // [kStep, D]: keys or values in float32
  float* zeros;   // [D]

  Scratch(float* memory, int64_t head_dim)
      : q(memory),
        scores(q + kTileRows * Partial::padded(head_dim)),
        rows(scores + kTileRows * kChunk),
        zeros(rows + kStep * Partial::padded(head_dim)) {}

  static int64_t num_floats(int64_t head_dim) {
    return (kTileRows + kStep + 1) * Partial::padded(head_dim) + kTileRows * kChunk;
  }
};

// With fewer rows, idle lanes would cost more than sums over lanes.
bool has_many_rows(const Tile& tile) { return tile.num_rows > kWidth / 2; }

// --- reading -----------------------------------------------------------------------------------------------------

// Convert numbers to float32, padded with zeros to a whole vector.
template <class N>
inline void decode_row(const typename N::Stored* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(to + i, N::decode(from + i));
  if (i == count) return;
  typename N::Stored rest[kWidth] = {};
  for (int64_t j = i; j < count; ++j) rest[j - i] = from[j];
  store(to + i, N::decode(rest));
}

template <class N>
void load_rows(const Call& call, const Tile& tile, int64_t kv_head, const Scratch& scratch) {
  const int64_t group = call.group(), depth = padded(call.head_dim), num_lanes = padded(tile.num_rows);
  const float scale = call.scales_k2 ? call.scale * call.scales_k2[2 * kv_head] : call.scale;
  const bool is_many = has_many_rows(tile);
  for (int64_t i = 0; i < num_lanes; ++i) {
    float* row = is_many ? scratch.rows : scratch.q + i * depth;
    for (int64_t d = 0; d < depth; d += kWidth) store(row + d, Floats{});  // idle rows must not contain NaN
    if (i < tile.num_rows) {
      const int64_t token = tile.token + (tile.first + i) / group, head = kv_head * group + (tile.first + i) % group;
      const auto* q = static_cast<const typename N::Stored*>(call.q) + (token * call.num_heads + head) * call.head_dim;
      decode_row<N>(q, call.head_dim, row);
      for (int64_t d = 0; d < depth; d += kWidth) store(row + d, load(row + d) * scale);
    }
    for (int64_t d = 0; is_many && d < call.head_dim; ++d) scratch.q[d * num_lanes + i] = row[d];
  }
}

// `count` keys or values in float32: in place if stored as float32, else converted into the scratch.
template <class N>
inline void decode_rows(const char* const* from, int64_t count, int64_t width, int64_t offset,
                        const Scratch& scratch, const float** to) {
  using Stored = typename N::Stored;
  constexpr bool is_f32 = sizeof(Stored) == sizeof(float);
  const int64_t depth = padded(width);
  for (int64_t i = 0; i < count; ++i) {
    const auto* at = reinterpret_cast<const Stored*>(from[i]);
    if (!at) {
      to[i] = scratch.zeros;
    } else if (is_f32 && depth == width) {
      to[i] = reinterpret_cast<const float*>(at + offset);
    } else {
      float* row = scratch.rows + i * depth;
      decode_row<N>(at + offset, width, row);
      to[i] = row;
    }
  }
}

// Prefetch memory that is read soon: heads are not adjacent, and hardware prefetchers do not predict the next token's.
// The prefetches of a piece are spread over the arithmetic of another, because processors have few outstanding ones.
inline void fetch(const Keys& keys, int64_t begin, int64_t end, int64_t offset, int64_t num_bytes) {
  for (int64_t i = begin; i < end; ++i) {
    if (!keys.at[i]) continue;
    for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(keys.at[i] + offset + byte, 0, 2);
  }
}

// --- scores of few rows ------------------------------------------------------------------------------------------

// The dot products of `rows` queries with width / rows keys.
template <int rows>
inline void score(const float* q, const float* const* keys, int64_t depth, float* scores) {
  constexpr int kKeys = kWidth / rows;
  Floats sums[kWidth] = {};
  for (int64_t d = 0; d < depth; d += kWidth) {
    for (int i = 0; i < rows; ++i) {
      const Floats numbers = load(q + i * depth + d);
      for (int j = 0; j < kKeys; ++j) sums[i * kKeys + j] += numbers * load(keys[j] + d);
    }
  }
  const Floats products = lane_sums(sums);
  for (int i = 0; i < rows; ++i) {
    __builtin_memcpy(scores + i * kChunk, reinterpret_cast<const float*>(&products) + i * kKeys, 4 * kKeys);
  }
}

template <int rows>
void score_rows(const float* q, int64_t num_rows, const float* const* keys, int64_t num_keys, int64_t depth,
                float* scores) {
  for (int64_t i = 0; i < num_rows; i += rows) {
    for (int64_t j = 0; j < num_keys; j += kWidth / rows) {
      score<rows>(q + i * depth, keys + j, depth, scores + i * kChunk + j);
    }
  }
}

void score_few(const float* q, int64_t num_rows, const float* const* keys, int64_t num_keys, int64_t depth,
               float* scores) {
  constexpr int kMost = kWidth / 4, kSome = kMost > 1 ? 2 : 1;
  if (num_rows == 1) return score_rows<1>(q, num_rows, keys, num_keys, depth, scores);
  if (num_rows == 2) return score_rows<kSome>(q, num_rows, keys, num_keys, depth, scores);
  score_rows<kMost>(q, num_rows, keys, num_keys, depth, scores);
}

inline Floats cap_scores(Floats scores, float cap) {
  return cap > 0 ? cap * hyperbolic_tangent(scores / cap) : scores;
}

// Convert scores to weights.
void weigh_few(const Sight& sight, int64_t num_rows, float cap, float* scores, Partial part) {
  for (int64_t i = 0; i < num_rows; ++i, scores += kChunk) {
    Floats most = all(kLowest), total = {};
    for (int64_t key = sight.begin; key < sight.end; key += kWidth) {
      const Ints places = kLanes + static_cast<int32_t>(key);
      const auto is_seen = (places >= sight.first[i]) & (places < sight.last[i]);
      const Floats seen = is_seen ? cap_scores(load(scores + key), cap) : all(-kInfinity);
      most = larger(seen, most);
      store(scores + key, seen);
    }
    part.max[i] = largest(most);
    for (int64_t key = sight.begin; key < sight.end; key += kWidth) {
      const Floats weights = exponential(load(scores + key) - part.max[i]);
      total += weights;
      store(scores + key, weights);
    }
    part.sum[i] = sum(total);
  }
}

// --- scores of many rows -----------------------------------------------------------------------------------------

// The dot products of a vector of queries with `num_keys` keys, summed in the order of `score`:
// the numbers of each lane of a head first, then lanes half the width apart, and so on.
template <int num_keys>
inline void score_lanes(const float* q, int64_t num_lanes, const float* const* keys, int64_t head_dim, float* scores) {
  constexpr int kFold = 4, kGroups = kWidth / kFold;  // lanes g, g + kGroups, g + 2 kGroups and g + 3 kGroups at once
  Floats groups[kGroups][num_keys];
  for (int g = 0; g < kGroups; ++g) {
    Floats sums[kFold][num_keys] = {};
    for (int64_t first = 0; first < head_dim; first += kWidth) {
#pragma GCC unroll 4
      for (int f = 0; f < kFold; ++f) {
        const int64_t d = first + g + f * kGroups;
        if (d >= head_dim) break;
        const Floats numbers = load(q + d * num_lanes);
#pragma GCC unroll 4
        for (int j = 0; j < num_keys; ++j) sums[f][j] += keys[j][d] * numbers;
      }
    }
    for (int j = 0; j < num_keys; ++j) groups[g][j] = (sums[0][j] + sums[2][j]) + (sums[1][j] + sums[3][j]);
  }
  for (int j = 0; j < num_keys; ++j) {
    for (int stride = kGroups / 2; stride > 0; stride /= 2) {
      for (int g = 0; g < stride; ++g) groups[g][j] += groups[g + stride][j];
    }
    store(scores + j * num_lanes, groups[0][j]);
  }
}

void score_many(const float* q, int64_t num_lanes, const float* const* keys, int64_t num_keys, int64_t head_dim,
                float* scores) {
  constexpr int kKeys = 4;
  for (int64_t lane = 0; lane < num_lanes; lane += kWidth) {
    for (int64_t j = 0; j < num_keys; j += kKeys) {
      score_lanes<kKeys>(q + lane, num_lanes, keys + j, head_dim, scores + j * num_lanes + lane);
    }
  }
}

void weigh_many(const Sight& sight, int64_t num_lanes, float cap, float* scores, Partial part) {
  const bool is_whole = sight.is_whole();
  for (int64_t lane = 0; lane < num_lanes; lane += kWidth) {
    const Ints first = load_as<Ints>(sight.first + lane), last = load_as<Ints>(sight.last + lane);
    Floats most = all(kLowest);
    for (int64_t key = sight.begin; key < sight.end; ++key) {
      float* row = scores + key * num_lanes + lane;
      Floats seen = cap_scores(load(row), cap);
      if (!is_whole) {
        const Ints place = Ints{} + static_cast<int32_t>(key);
        seen = (place >= first) & (place < last) ? seen : all(-kInfinity);
      }
      most = larger(seen, most);
      if (!is_whole || cap > 0) store(row, seen);
    }
    Floats totals[kWidth] = {};  // in the order of the lanes of `weigh_few`
    for (int64_t key = sight.begin; key < sight.end; ++key) {
      float* row = scores + key * num_lanes + lane;
      const Floats weights = exponential(load(row) - most);
      totals[key % kWidth] += weights;
      store(row, weights);
    }
    for (int stride = kWidth / 2; stride > 0; stride /= 2) {
      for (int i = 0; i < stride; ++i) totals[i] += totals[i + stride];
    }
    store(part.max + lane, most);
    store(part.sum + lane, totals[0]);
  }
}

// --- values ------------------------------------------------------------------------------------------------------

// Weights as stored: [row, key] or [key, row].
struct Weights {
  const float* at;
  int64_t row_step, key_step;

  Weights from(int64_t row, int64_t key) const { return {at + row * row_step + key * key_step, row_step, key_step}; }
};

template <int rows, int vectors>
inline void add_values(Weights weights, const float* const* values, int64_t count, int64_t depth, int64_t d,
                       float* out) {
  Floats sums[rows][vectors];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) sums[i][j] = load(out + i * depth + d + j * kWidth);
  }
  for (int64_t key = 0; key < count; ++key) {
    const float* weight = weights.at + key * weights.key_step;
    for (int j = 0; j < vectors; ++j) {
      const Floats numbers = load(values[key] + d + j * kWidth);
      for (int i = 0; i < rows; ++i) sums[i][j] += weight[i * weights.row_step] * numbers;
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) store(out + i * depth + d + j * kWidth, sums[i][j]);
  }
}

template <int rows, int vectors>
inline void add_rows(Weights weights, const float* const* values, int64_t count, int64_t depth, float* out) {
  int64_t d = 0;
  for (; d + vectors * kWidth <= depth; d += vectors * kWidth) {
    add_values<rows, vectors>(weights, values, count, depth, d, out);
  }
  for (; d < depth; d += kWidth) add_values<rows, 1>(weights, values, count, depth, d, out);
}

void add_tile(Weights weights, int64_t num_rows, const float* const* values, int64_t count, int64_t depth, float* out) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;
  int64_t i = 0;
  for (; i + 4 <= num_rows; i += 4) {
    add_rows<4, kVectors>(weights.from(i, 0), values, count, depth, out + i * depth);
  }
  const Weights rest = weights.from(i, 0);
  switch (num_rows - i) {
    case 3: return add_rows<3, kVectors>(rest, values, count, depth, out + i * depth);
    case 2: return add_rows<2, kVectors>(rest, values, count, depth, out + i * depth);
    case 1: return add_rows<1, 4>(rest, values, count, depth, out + i * depth);
  }
}

}  // namespace
}  // namespace jpaged

#include "pairs.h"
#include "prompts.h"

namespace jpaged {
namespace {

// --- a chunk -----------------------------------------------------------------------------------------------------

template <class N>
void attend_to(const Call& call, const Piece& piece, const Keys& keys, const Keys* next,
               const Scratch& scratch, Partial part) {
  const Tile& tile = *piece.tile;
  const int64_t depth = padded(call.head_dim), value_depth = padded(call.value_dim), num_lanes = padded(tile.num_rows);
  const bool is_many = has_many_rows(tile);
  const Weights weights =
      is_many ? Weights{scratch.scores, 1, num_lanes} : Weights{scratch.scores, kChunk, 1};
  const Sight sight(call, tile, piece.chunk);
  constexpr int64_t kBytes = sizeof(typename N::Stored);
  const int64_t num_bytes = call.head_dim * kBytes;
  // A latent's value was loaded with it.
  const int64_t value_offset = call.value_offset * kBytes, value_bytes = value_offset ? call.value_dim * kBytes : 0;

  const float* rows[kStep];
  for (int64_t i = sight.begin; i < sight.end; i += kStep) {
    const int64_t count = lesser(kStep, sight.end - i);
    decode_rows<N>(keys.at + i, count, call.head_dim, 0, scratch, rows);
    if (is_many) {
      fetch(keys, i, i + count, value_offset, value_bytes);
      score_many(scratch.q, num_lanes, rows, count, call.head_dim, scratch.scores + i * num_lanes);
    } else {
      for (int64_t j = 0; j < count; j += kFetch) {
        fetch(keys, i + j, i + j + kFetch, value_offset, value_bytes);
        score_few(scratch.q, tile.num_rows, rows + j, kFetch, depth, scratch.scores + i + j);
      }
    }
  }
  if (is_many) {
    weigh_many(sight, num_lanes, call.soft_cap, scratch.scores, part);
  } else {
    weigh_few(sight, tile.num_rows, call.soft_cap, scratch.scores, part);
  }
  for (int64_t i = 0; i < tile.num_rows * value_depth; i += kWidth) store(part.out + i, Floats{});
  const int64_t num_keys = sight.end - sight.begin;
  const auto next_key = [&](int64_t i) { return next->begin + (next->end - next->begin) * i / num_keys; };
  for (int64_t i = 0; i < num_keys; i += kStep) {
    const int64_t count = lesser(kStep, num_keys - i), key = sight.begin + i;
    decode_rows<N>(keys.at + key, count, call.value_dim, call.value_offset, scratch, rows);
    for (int64_t j = 0; j < count; j += kFetch) {
      if (next) fetch(*next, next_key(i + j), next_key(i + j + kFetch), 0, num_bytes);
      add_tile(weights.from(0, key + j), tile.num_rows, rows + j, kFetch, value_depth, part.out);
    }
  }
}

void load_queries(const Call& call, const Tile& tile, int64_t kv_head, float* memory) {
  const Scratch scratch(memory, call.head_dim);
  for (int64_t d = 0; d < padded(call.head_dim); d += kWidth) store(scratch.zeros + d, Floats{});
  if (has_pairs(call)) return load_pairs(call, tile, kv_head, PairScratch(scratch));
  if (call.q_number == Number::kF32) return load_rows<F32>(call, tile, kv_head, scratch);
  if (call.q_number == Number::kBF16) return load_rows<BF16>(call, tile, kv_head, scratch);
  load_rows<F16>(call, tile, kv_head, scratch);
}

void attend(const Call& call, const Piece& piece, const Keys& keys, const Keys* next, float* memory,
            Partial part) {
  const Scratch scratch(memory, call.head_dim);
  if (has_pairs(call)) return attend_pairs(call, piece, keys, next, PairScratch(scratch), part);
  switch (call.kv_number) {
    case Number::kF32: return attend_to<F32>(call, piece, keys, next, scratch, part);
    case Number::kBF16: return attend_to<BF16>(call, piece, keys, next, scratch, part);
    case Number::kF16: return attend_to<F16>(call, piece, keys, next, scratch, part);
    case Number::kI8: return attend_to<I8>(call, piece, keys, next, scratch, part);
    case Number::kF8: return attend_to<F8>(call, piece, keys, next, scratch, part);
  }
}

// --- partial results ---------------------------------------------------------------------------------------------

void clear(const Tile& tile, int64_t value_dim, Partial part) {
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    part.max[i] = kLowest;
    part.sum[i] = 0;
  }
  for (int64_t i = 0; i < tile.num_rows * padded(value_dim); i += kWidth) store(part.out + i, Floats{});
}

void merge(const Tile& tile, int64_t value_dim, Partial into, Partial later) {
  const int64_t depth = padded(value_dim);
  for (int64_t first = 0; first < tile.num_rows; first += kWidth) {
    const Floats a = load(into.max + first), b = load(later.max + first), max = larger(a, b);
    const Floats fades = exponential(a - max), gains = exponential(b - max);
    store(into.max + first, max);
    store(into.sum + first, load(into.sum + first) * fades + load(later.sum + first) * gains);
    for (int64_t i = first; i < lesser(tile.num_rows, first + kWidth); ++i) {
      const float fade = fades[i - first], gain = gains[i - first];
      float *out = into.out + i * depth, *more = later.out + i * depth;
      for (int64_t d = 0; d < depth; d += kWidth) store(out + d, load(out + d) * fade + load(more + d) * gain);
    }
  }
}

void store_row(const float* row, float factor, int64_t count, Number number, void* out, int64_t at) {
  int64_t d = 0;
#ifdef __AVX512BF16__
  for (; number == Number::kBF16 && d + kWidth <= count; d += kWidth) {
    const __m256bh halves = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(load(row + d) * factor));
    __builtin_memcpy(static_cast<uint16_t*>(out) + at + d, &halves, sizeof halves);
  }
#endif
  for (; d < count; ++d) {
    const float x = row[d] * factor;
    if (number == Number::kF32) {
      static_cast<float*>(out)[at + d] = x;
    } else {
      static_cast<uint16_t*>(out)[at + d] = number == Number::kBF16 ? encode_bf16(x) : encode_f16(x);
    }
  }
}

void store_tile(const Call& call, const Tile& tile, int64_t kv_head, Partial part) {
  const int64_t group = call.group(), depth = padded(call.value_dim);
  const float scale = call.scales_k2 ? call.scales_k2[2 * kv_head + 1] : 1.0f;
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const int64_t token = tile.token + (tile.first + i) / group, head = kv_head * group + (tile.first + i) % group;
    const int64_t at = token * call.num_heads + head;
    const bool has_keys = !(part.sum[i] <= 0);  // true for NaN
    const float factor = has_keys ? scale / part.sum[i] : 0.0f;
    store_row(part.out + i * depth, factor, call.value_dim, call.q_number, call.out, at * call.value_dim);
    call.lse[at] = has_keys ? part.max[i] + __builtin_logf(part.sum[i]) : -kInfinity;
  }
}

}  // namespace

extern const Core JPAGED_CORE;
const Core JPAGED_CORE = {JPAGED_NAME, kWidth, Scratch::num_floats,       load_queries, attend, clear, merge,
                          store_tile,  PromptScratch::num_floats, attend_prompt};

}  // namespace jpaged
