// Attention of one tile over one chunk of keys. Compiled once for each width of vectors, under its own JPAGED_CORE.
//
//     scores     s[row, key] = q[row] . k[key]         width x width/rows dot products at once, summed over lanes last
//     softmax    p[row, key] = e^(s - max of the row)   what a row does not see is minus infinity before and 0 after
//     values     out[row]   += p[row, key] v[key]      rows x vectors of the output stay in registers
//
// No function of the standard library is called that is a template: compiled here for a processor with wide vectors, it
// might be linked into code that runs on another.

#include "cpu_core.h"

#include "cpu_vector.h"

namespace jpaged {
namespace {

constexpr float kLowest = -1e30f;  // start of a maximum: finite, so that a row which sees nothing leaves no NaN
constexpr float kInfinity = __builtin_inff();

inline int64_t padded(int64_t n) { return (n + kWidth - 1) / kWidth * kWidth; }
inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

struct Scratch {
  float* q;       // [rows, D]
  float* scores;  // [rows, kChunk]
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

// --- reading -----------------------------------------------------------------------------------------------------

// Numbers as float32, with zeros up to a whole vector.
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
void load_queries(const Call& call, const Tile& tile, int64_t kv_head, float* to) {
  const int64_t group = call.group(), depth = padded(call.head_dim);
  const float scale = call.scales_k2 ? call.scale * call.scales_k2[2 * kv_head] : call.scale;
  for (int64_t i = 0; i < tile.num_rows; ++i, to += depth) {
    const int64_t token = tile.token + (tile.first + i) / group, head = kv_head * group + (tile.first + i) % group;
    const auto* q = static_cast<const typename N::Stored*>(call.q) + (token * call.num_heads + head) * call.head_dim;
    decode_row<N>(q, call.head_dim, to);
    for (int64_t d = 0; d < depth; d += kWidth) store(to + d, load(to + d) * scale);
  }
  const int64_t num_idle = padded(tile.num_rows) - tile.num_rows;  // multiplied for nothing, with what is no NaN
  for (int64_t i = 0; i < num_idle * depth; i += kWidth) store(to + i, Floats{});
}

void load_queries(const Call& call, const Tile& tile, int64_t kv_head, float* to) {
  if (call.q_number == Number::kF32) return load_queries<F32>(call, tile, kv_head, to);
  if (call.q_number == Number::kBF16) return load_queries<BF16>(call, tile, kv_head, to);
  load_queries<F16>(call, tile, kv_head, to);
}

// Where keys begin to end of a chunk lie; null for those that the row has not, or whose block the layer has not.
// The value of a key follows it.
template <class Stored>
void find_keys(const Call& call, const Tile& tile, int64_t kv_head, int64_t chunk, const Stored** keys) {
  const int64_t token_size = 2 * call.num_kv_heads * call.head_dim, first_key = chunk * kChunk;
  const auto* head = reinterpret_cast<const Stored*>(call.pool) + 2 * kv_head * call.head_dim;
  const int64_t begin = greater(tile.begin, first_key), end = lesser(tile.end, first_key + kChunk);
  for (int64_t i = 0; i < kChunk; ++i) keys[i] = nullptr;
  for (int64_t key = begin; key < end;) {
    const int64_t index = key / call.block_size, block_end = lesser((index + 1) * call.block_size, end);
    const int64_t block = tile.table[index];
    if (block < 0 || block >= call.num_places) {
      key = block_end;
      continue;
    }
    const int64_t slot = (call.first_place + block) * call.block_size + key - index * call.block_size;
    const Stored* at = head + slot * token_size;
    for (; key < block_end; ++key, at += token_size) keys[key - first_key] = at;
  }
}

// `count` keys or values in float32: in place where they are stored so, converted into the scratch where not.
template <class N>
inline void decode_rows(const typename N::Stored* const* from, int64_t count, int64_t head_dim, int64_t offset,
                        const Scratch& scratch, const float** to) {
  constexpr bool is_f32 = sizeof(typename N::Stored) == sizeof(float);
  const int64_t depth = padded(head_dim);
  for (int64_t i = 0; i < count; ++i) {
    if (!from[i]) {
      to[i] = scratch.zeros;
    } else if (is_f32 && depth == head_dim) {
      to[i] = reinterpret_cast<const float*>(from[i] + offset);
    } else {
      float* row = scratch.rows + i * depth;
      decode_row<N>(from[i] + offset, head_dim, row);
      to[i] = row;
    }
  }
}

// --- scores ------------------------------------------------------------------------------------------------------

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

// One row of a query alone would leave the others of a wide vector idle.
void score_tile(const float* q, int64_t num_rows, const float* const* keys, int64_t num_keys, int64_t depth,
                float* scores) {
  constexpr int kMost = kWidth / 4, kSome = kMost > 1 ? 2 : 1;
  if (num_rows == 1) return score_rows<1>(q, num_rows, keys, num_keys, depth, scores);
  if (num_rows == 2) return score_rows<kSome>(q, num_rows, keys, num_keys, depth, scores);
  score_rows<kMost>(q, num_rows, keys, num_keys, depth, scores);
}

// --- softmax -----------------------------------------------------------------------------------------------------

inline Floats cap_scores(Floats scores, float cap) {
  return cap > 0 ? cap * hyperbolic_tangent(scores / cap) : scores;
}

// Scores begin to end of a row become weights; those outside of first to last are not seen.
inline void weigh(float* scores, int64_t begin, int64_t end, int64_t first, int64_t last, float cap, float* max,
                  float* total) {
  Floats most = all(kLowest);
  for (int64_t i = begin; i < end; i += kWidth) {
    const Ints places = kLanes + static_cast<int32_t>(i);
    const auto is_seen = (places >= static_cast<int32_t>(first)) & (places < static_cast<int32_t>(last));
    const Floats capped = is_seen ? cap_scores(load(scores + i), cap) : all(-kInfinity);
    most = larger(capped, most);
    store(scores + i, capped);
  }
  *max = largest(most);
  Floats sums = {};
  for (int64_t i = begin; i < end; i += kWidth) {
    const Floats weights = exponential(load(scores + i) - *max);
    sums += weights;
    store(scores + i, weights);
  }
  *total = sum(sums);
}

void weigh_tile(const Call& call, const Tile& tile, int64_t chunk, int64_t begin, int64_t end, float* scores,
                Partial part) {
  const int64_t group = call.group(), first_key = chunk * kChunk;
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const int64_t position = tile.position + (tile.first + i) / group;
    const int64_t oldest = call.window ? greater(tile.begin, position - call.window + 1) : tile.begin;
    const int64_t first = greater(oldest - first_key, 0), last = lesser(lesser(position + 1, tile.end) - first_key, kChunk);
    weigh(scores + i * kChunk, begin, end, lesser(first, kChunk), greater(last, 0), call.soft_cap, part.max + i,
          part.sum + i);
  }
}

// --- values ------------------------------------------------------------------------------------------------------

template <int rows, int vectors>
inline void add_values(const float* weights, const float* const* values, int64_t count, int64_t d, int64_t depth,
                       float* out) {
  Floats sums[rows][vectors];
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) sums[i][j] = load(out + i * depth + d + j * kWidth);
  }
  for (int64_t key = 0; key < count; ++key) {
    for (int j = 0; j < vectors; ++j) {
      const Floats numbers = load(values[key] + d + j * kWidth);
      for (int i = 0; i < rows; ++i) sums[i][j] += weights[i * kChunk + key] * numbers;
    }
  }
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < vectors; ++j) store(out + i * depth + d + j * kWidth, sums[i][j]);
  }
}

template <int rows, int vectors>
inline void add_rows(const float* weights, const float* const* values, int64_t count, int64_t depth, float* out) {
  int64_t d = 0;
  for (; d + vectors * kWidth <= depth; d += vectors * kWidth) {
    add_values<rows, vectors>(weights, values, count, d, depth, out);
  }
  for (; d < depth; d += kWidth) add_values<rows, 1>(weights, values, count, d, depth, out);
}

void add_tile(const float* weights, int64_t num_rows, const float* const* values, int64_t count, int64_t depth,
              float* out) {
  constexpr int kVectors = kWidth == 16 ? 4 : 2;
  int64_t i = 0;
  for (; i + 4 <= num_rows; i += 4) {
    add_rows<4, kVectors>(weights + i * kChunk, values, count, depth, out + i * depth);
  }
  for (; i < num_rows; ++i) add_rows<1, 4>(weights + i * kChunk, values, count, depth, out + i * depth);
}

// --- a chunk -----------------------------------------------------------------------------------------------------

template <class N>
void attend_to(const Call& call, const Tile& tile, int64_t kv_head, int64_t chunk, const Scratch& scratch,
               Partial part) {
  const int64_t depth = padded(call.head_dim), first_key = chunk * kChunk;
  const int64_t seen_begin = greater(tile.begin - first_key, 0), seen_end = lesser(tile.end - first_key, kChunk);
  const int64_t begin = seen_begin / kMaxWidth * kMaxWidth;
  const int64_t end = (seen_end + kMaxWidth - 1) / kMaxWidth * kMaxWidth;
  const typename N::Stored* keys[kChunk];
  find_keys(call, tile, kv_head, chunk, keys);

  const float* rows[kStep];
  for (int64_t i = begin; i < end; i += kStep) {
    const int64_t count = lesser(kStep, end - i);
    decode_rows<N>(keys + i, count, call.head_dim, 0, scratch, rows);
    score_tile(scratch.q, tile.num_rows, rows, count, depth, scratch.scores + i);
  }
  weigh_tile(call, tile, chunk, begin, end, scratch.scores, part);
  for (int64_t i = 0; i < tile.num_rows * depth; i += kWidth) store(part.out + i, Floats{});
  for (int64_t i = begin; i < end; i += kStep) {
    const int64_t count = lesser(kStep, end - i);
    decode_rows<N>(keys + i, count, call.head_dim, call.head_dim, scratch, rows);
    add_tile(scratch.scores + i, tile.num_rows, rows, count, depth, part.out);
  }
}

void attend(const Call& call, const Tile& tile, int64_t kv_head, int64_t chunk, float* memory, Partial part) {
  const Scratch scratch(memory, call.head_dim);
  for (int64_t d = 0; d < padded(call.head_dim); d += kWidth) store(scratch.zeros + d, Floats{});
  load_queries(call, tile, kv_head, scratch.q);
  switch (call.kv_number) {
    case Number::kF32: return attend_to<F32>(call, tile, kv_head, chunk, scratch, part);
    case Number::kBF16: return attend_to<BF16>(call, tile, kv_head, chunk, scratch, part);
    case Number::kF16: return attend_to<F16>(call, tile, kv_head, chunk, scratch, part);
    case Number::kI8: return attend_to<I8>(call, tile, kv_head, chunk, scratch, part);
    case Number::kF8: return attend_to<F8>(call, tile, kv_head, chunk, scratch, part);
  }
}

// --- partial results ---------------------------------------------------------------------------------------------

inline float scalar_exponential(float x) { return exponential(all(x))[0]; }

void clear(const Tile& tile, int64_t head_dim, Partial part) {
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    part.max[i] = kLowest;
    part.sum[i] = 0;
  }
  for (int64_t i = 0; i < tile.num_rows * padded(head_dim); i += kWidth) store(part.out + i, Floats{});
}

void merge(const Tile& tile, int64_t head_dim, Partial into, Partial later) {
  const int64_t depth = padded(head_dim);
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const float max = into.max[i] > later.max[i] ? into.max[i] : later.max[i];
    const float fade = scalar_exponential(into.max[i] - max), gain = scalar_exponential(later.max[i] - max);
    into.max[i] = max;
    into.sum[i] = into.sum[i] * fade + later.sum[i] * gain;
    float *out = into.out + i * depth, *more = later.out + i * depth;
    for (int64_t d = 0; d < depth; d += kWidth) store(out + d, load(out + d) * fade + load(more + d) * gain);
  }
}

void store_row(const float* row, float factor, int64_t count, Number number, void* out, int64_t at) {
  for (int64_t d = 0; d < count; ++d) {
    const float x = row[d] * factor;
    if (number == Number::kF32) {
      static_cast<float*>(out)[at + d] = x;
    } else {
      static_cast<uint16_t*>(out)[at + d] = number == Number::kBF16 ? encode_bf16(x) : encode_f16(x);
    }
  }
}

void store_tile(const Call& call, const Tile& tile, int64_t kv_head, Partial part) {
  const int64_t group = call.group(), depth = padded(call.head_dim);
  const float scale = call.scales_k2 ? call.scales_k2[2 * kv_head + 1] : 1.0f;
  for (int64_t i = 0; i < tile.num_rows; ++i) {
    const int64_t token = tile.token + (tile.first + i) / group, head = kv_head * group + (tile.first + i) % group;
    const int64_t at = token * call.num_heads + head;
    const bool has_keys = !(part.sum[i] <= 0);  // a NaN has
    const float factor = has_keys ? scale / part.sum[i] : 0.0f;
    store_row(part.out + i * depth, factor, call.head_dim, call.q_number, call.out, at * call.head_dim);
    call.lse[at] = has_keys ? part.max[i] + __builtin_logf(part.sum[i]) : -kInfinity;
  }
}

}  // namespace

extern const Core JPAGED_CORE;
const Core JPAGED_CORE = {JPAGED_NAME, kWidth, Scratch::num_floats, attend, clear, merge, store_tile};

}  // namespace jpaged
