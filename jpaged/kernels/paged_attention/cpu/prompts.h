// Attention of whole prompts whose tokens all see each other, as in encoders: keys and values are those of the call.
//
//     scores    s[key, row] = k[key] . q[row]                 lanes are rows: 64 queries of a tile
//     weights   p[key, row] = e^(s - max of the row)
//     values    o[d, row]  += p[key, row] v[key, d]
//
// A number of a key or value multiplies the vectors of all rows, without sums over lanes. Each number has one sum, in the
// order of d or of the keys: no bit of a query depends on its tile, other prompts or the threads. Included only by
// core.cc.

#pragma once

namespace jpaged {
namespace {

// Transpose kWidth vectors.
template <int stride, int... lane>
inline void swap_blocks(Floats& a, Floats& b, std::integer_sequence<int, lane...>) {
  const Floats x = a, y = b;
#if defined(__clang__) || __GNUC__ >= 12
  a = __builtin_shufflevector(x, y, (lane & stride ? kWidth + (lane ^ stride) : lane)...);
  b = __builtin_shufflevector(x, y, (lane & stride ? kWidth + lane : lane ^ stride)...);
#else
  a = __builtin_shuffle(x, y, Ints{(lane & stride ? kWidth + (lane ^ stride) : lane)...});
  b = __builtin_shuffle(x, y, Ints{(lane & stride ? kWidth + lane : lane ^ stride)...});
#endif
}

template <int stride = kWidth / 2>
inline void transpose(Floats* x) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    if (!(i & stride)) swap_blocks<stride>(x[i], x[i + stride], std::make_integer_sequence<int, kWidth>{});
  }
  if constexpr (stride > 1) transpose<stride / 2>(x);
}

constexpr int64_t kMostKeysAtOnce = 8;

struct PromptScratch {
  float *k, *v;   // [keys, D]
  float *q, *o;   // [D, kTileRows]
  float* scores;  // [keys, kTileRows]

  PromptScratch(float* memory, int64_t num_keys, int64_t depth)
      : k(memory),
        v(k + (num_keys + kMostKeysAtOnce) * depth),
        q(v + (num_keys + kMostKeysAtOnce) * depth),
        o(q + kTileRows * depth),
        scores(o + kTileRows * depth) {}

  static int64_t num_floats(int64_t num_keys, int64_t depth) {
    return (num_keys + kMostKeysAtOnce) * (2 * depth + kTileRows) + 2 * kTileRows * depth;
  }
};

// sums[i][j] over `count` numbers: number n of i is x[i * x_step + n * x_stride], vector n of j is y[n * kTileRows].
template <int num, int vectors>
inline void add_products(const float* x, int64_t x_step, int64_t x_stride, const float* y, int64_t count,
                         float* to, int64_t to_stride) {
  Floats sums[num][vectors] = {};
  for (int64_t n = 0; n < count; ++n, x += x_stride, y += kTileRows) {
    Floats rows[vectors];
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) rows[j] = load(y + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < num; ++i) {
      const Floats number = all(x[i * x_step]);
#pragma GCC unroll 16
      for (int j = 0; j < vectors; ++j) sums[i][j] += number * rows[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < num; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < vectors; ++j) store(to + i * to_stride + j * kWidth, sums[i][j]);
  }
}

// Convert the scores of one vector of rows to weights; return the sums of the weights, and the largest scores.
inline Floats weigh_prompt(float* scores, int64_t num_keys, Floats* largest_scores) {
  Floats most = load(scores);
  for (int64_t key = 1; key < num_keys; ++key) most = larger(load(scores + key * kTileRows), most);
  Floats total = {};
  for (int64_t key = 0; key < num_keys; ++key) {
#ifdef __AVX512DQ__
    const Floats weights = power_of_two((load(scores + key * kTileRows) - most) * 1.44269504f);
#else
    const Floats weights = exponential(load(scores + key * kTileRows) - most);
#endif
    total += weights;
    store(scores + key * kTileRows, weights);
  }
  *largest_scores = most;
  return total;
}

// Rows of a head [num_rows, D], `stride` numbers apart, to the columns of q, times the scale.
inline void load_columns(const float* rows, int64_t stride, int64_t num_rows, int64_t depth, float scale, float* to) {
  for (int64_t first = 0; first < num_rows; first += kWidth) {
    for (int64_t d = 0; d < depth; d += kWidth) {
      Floats x[kWidth];
      for (int i = 0; i < kWidth; ++i) {
        x[i] = first + i < num_rows ? load(rows + (first + i) * stride + d) * scale : Floats{};
      }
      transpose(x);
      for (int i = 0; i < kWidth; ++i) store(to + (d + i) * kTileRows + first, x[i]);
    }
  }
}

template <int vectors>
void attend_rows(const PromptScratch& scratch, int64_t num_keys, int64_t depth) {
  constexpr int kKeys = vectors <= 2 ? 8 : 4, kDims = kWidth < 8 ? 4 : kKeys;
  constexpr int kParts = vectors > 4 ? 4 : vectors;  // vectors whose sums stay in registers
  for (int part = 0; part < vectors; part += kParts) {
    const int64_t lane = part * kWidth;
    for (int64_t key = 0; key < num_keys; key += kKeys) {
      add_products<kKeys, kParts>(scratch.k + key * depth, depth, 1, scratch.q + lane, depth,
                                  scratch.scores + key * kTileRows + lane, kTileRows);
    }
  }
  Floats factors[vectors];
  for (int j = 0; j < vectors; ++j) {
    Floats most;
    const Floats total = weigh_prompt(scratch.scores + j * kWidth, num_keys, &most);
    factors[j] = 1.0f / total;
    // The place of q is free now: it takes what the log-sum-exps need.
    store(scratch.q + j * kWidth, most);
    store(scratch.q + kTileRows + j * kWidth, total);
  }
  for (int part = 0; part < vectors; part += kParts) {
    const int64_t lane = part * kWidth;
    for (int64_t d = 0; d < depth; d += kDims) {
      add_products<kDims, kParts>(scratch.v + d, 1, depth, scratch.scores + lane, num_keys,
                                  scratch.o + d * kTileRows + lane, kTileRows);
    }
  }
  for (int64_t d = 0; d < depth; ++d) {
    float* row = scratch.o + d * kTileRows;
    for (int j = 0; j < vectors; ++j) store(row + j * kWidth, load(row + j * kWidth) * factors[j]);
  }
}

template <int vectors = kTileRows / kWidth>
void attend_tile(int64_t num_vectors, const PromptScratch& scratch, int64_t num_keys, int64_t depth) {
  if constexpr (vectors > 0) {
    // Narrow vectors have whole tiles only: one of 4 or 8 floats would need up to 16 instances.
    constexpr int kLess = kWidth < kMaxWidth ? 0 : vectors - 1;
    if (kLess > 0 && num_vectors < vectors) return attend_tile<kLess>(num_vectors, scratch, num_keys, depth);
    attend_rows<vectors>(scratch, num_keys, depth);
  }
}

void attend_prompt(const Call& call, const Prompt& prompt, int64_t kv_head, float* memory) {
  const int64_t depth = call.head_dim, count = prompt.num_tokens, kv_stride = call.num_kv_heads * depth;
  const int64_t stride = call.num_heads * depth;
  const PromptScratch scratch(memory, count, depth);
  for (int64_t key = 0; key < count + kMostKeysAtOnce; ++key) {  // those beyond the last one only fill registers
    const int64_t from = (prompt.token + lesser(key, count - 1)) * kv_stride + kv_head * depth;
    for (int64_t d = 0; d < depth; d += kWidth) {
      store(scratch.k + key * depth + d, load(prompt.k + from + d));
      store(scratch.v + key * depth + d, load(prompt.v + from + d));
    }
  }
  for (int64_t g = 0; g < call.group(); ++g) {
    const int64_t head = kv_head * call.group() + g;
    for (int64_t first = 0; first < count; first += kTileRows) {
      const int64_t num_rows = lesser(kTileRows, count - first), at = (prompt.token + first) * stride + head * depth;
      const int64_t num_lanes = kWidth < kMaxWidth ? kTileRows : padded(num_rows);
      load_columns(static_cast<const float*>(call.q) + at, stride, num_rows, depth, call.scale, scratch.q);
      for (int64_t d = 0; padded(num_rows) < num_lanes && d < depth; ++d) {
        for (int64_t lane = padded(num_rows); lane < num_lanes; ++lane) scratch.q[d * kTileRows + lane] = 0;
      }
      attend_tile(num_lanes / kWidth, scratch, count, depth);
      for (int64_t row = 0; row < num_rows; ++row) {
        call.lse[(prompt.token + first + row) * call.num_heads + head] =
            scratch.q[row] + __builtin_logf(scratch.q[kTileRows + row]);
      }
      for (int64_t row = 0; row < num_rows; row += kWidth) {
        for (int64_t d = 0; d < depth; d += kWidth) {
          Floats x[kWidth];
          for (int i = 0; i < kWidth; ++i) x[i] = load(scratch.o + (d + i) * kTileRows + row);
          transpose(x);
          for (int i = 0; i < kWidth && row + i < num_rows; ++i) {
            store(static_cast<float*>(call.out) + at + (row + i) * stride + d, x[i]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace jpaged
