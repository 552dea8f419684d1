// Paged attention on NVIDIA GPUs since Ampere, in CUDA C++ without another package.
//
//     item    16 (query, head) pairs of one row and key/value head   x   one part of the context, or all parts in order
//     part    a fixed number of keys, counted from the context's beginning
//     warp    one item; warps share nothing
//
//     for each 32 keys of a part     S = Q K^T, softmax, O += P V       on tensor cores, sums in registers
//     after each part                total = total merged with the part
//
// The parts of an item that covers one are merged by a second kernel, in the same order and with the same operations.
// So the bits of a result depend on the query and its context alone: not on the batch, nor on how contexts are divided
// over warps.
//
// Products of the tensor core, and how a lane reads keys and values for them: device.h.
//
// Compiled by nvcc (cuda_library.py). Tests compile it as C++ too, with emulated warps.

#include "device.h"

namespace jpaged {
namespace {

// --- attention -------------------------------------------------------------------------------------------------------

constexpr int kRows = 16;          // (query, head) pairs of an item
constexpr int kMaxStepKeys = 32;   // keys between updates of the softmax, one for each lane to locate
constexpr int kSharedBytes = 49152;
constexpr int kMaxHeadDim = 256, kMaxLatentDim = 576, kMaxValueDim = 512;
constexpr float kLowest = -1e30f;  // initial maximum: finite, so a row without visible keys does not become NaN
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Columns of the items; the order is that of `CudaItemField` in attention.py.
struct Item {
  int32_t row, first_token, first_pair, num_pairs, position, kv_begin, kv_end, first_part, num_parts, slot;
};

// Columns of the tiles to merge; the order is that of `CudaMergeField` in attention.py.
struct Merge {
  int32_t first_slot, num_parts, first_token, first_pair, num_pairs;
};

struct CudaCall {
  const char *q, *pool;
  Number q_number, kv_number, out_number;
  const Item* items;
  const Merge* merges;
  const int32_t *tables_sm, *layer;
  const float* scales_lk2;  // null if unscaled
  char* out;                // as q, or float32
  float* lse;               // [T, H]
  float* part_out;          // [K, slots, kRows, value's D]
  float* part_stats;        // [K, slots, kRows, 2]: maximum in base 2, sum
  int num_items, num_slots, num_tokens, num_heads, num_kv_heads, head_dim, value_dim, value_offset;
  int block_size, table_width;
  int num_places, blocks_per_layer, part_keys;
  int64_t window;  // 0: all
  float scale, soft_cap;  // soft_cap 0: none
};

// --- softmax ---------------------------------------------------------------------------------------------------------

// The scores of some keys so far: their maximum in base 2, and the sum of their weights.
struct Stats {
  float max, sum;
};

// Factors of two outputs whose sum is the output over the keys of both.
struct Factors {
  float before, part;
};

__device__ __forceinline__ Factors merge_stats(Stats& before, Stats part) {
  const float max = fmaxf(before.max, part.max);
  const Factors factors{power_of_two(before.max - max), power_of_two(part.max - max)};
  before = {max, fmaf(before.sum, factors.before, part.sum * factors.part)};
  return factors;
}

__device__ __forceinline__ float merge_output(Factors factors, float before, float part) {
  return fmaf(before, factors.before, part * factors.part);
}

// A scaled score in base 2 after the cap: cap * tanh(score / cap).
__device__ __forceinline__ float cap_score(float score, float soft_cap) {
  return soft_cap * kLog2E * (1 - divide(2, power_of_two(divide(2 * score, soft_cap)) + 1));
}

// The factor of an output; of one without keys, which is 0, any.
__device__ __forceinline__ float output_scale(Stats total, float value_scale) {
  return total.sum > 0 ? value_scale / total.sum : 0;
}

// --- kernels ---------------------------------------------------------------------------------------------------------

// Token, query head and visible keys of one of an item's pairs.
struct Pair {
  int64_t place;  // token * H + head, or -1
  int32_t kv_begin, kv_end;

  __device__ Pair(const CudaCall& call, const Item& item, int kv_head, int index) : place(-1), kv_begin(0), kv_end(0) {
    if (index >= item.num_pairs) return;
    const int group = call.num_heads / call.num_kv_heads, pair = item.first_pair + index, query = pair / group;
    const int64_t position = int64_t{item.position} + query;
    place = int64_t{item.first_token + query} * call.num_heads + kv_head * group + pair % group;
    const int64_t oldest = call.window ? position - call.window + 1 : 0;
    kv_begin = oldest > item.kv_begin ? oldest < item.kv_end ? oldest : item.kv_end : item.kv_begin;
    kv_end = position < item.kv_end ? position + 1 < 0 ? 0 : position + 1 : item.kv_end;
  }
};

__device__ __forceinline__ void write_lse(const CudaCall& call, int64_t place, Stats total) {
  call.lse[place] = total.sum > 0 ? total.max * kLn2 + logf(total.sum) : -INFINITY;
}

// kStored is the pool's type; for F32, any of its size. kKeyDim and kValueDim are the most numbers of a key, and of the
// columns of values, of a warp: with latents, several warps compute the same scores, and each other columns.
template <class C, Number kStored, int kKeyDim, int kValueDim>
struct Sizes {
  static constexpr int kStoredBytes = C::kPerWord == 1 ? 4 : size_of(kStored);
  // Numbers of a key, and of a value, that a lane reads together.
  static constexpr int kKeyCount = 16 / kStoredBytes, kValueCount = kKeyCount < kValueDim / 8 ? kKeyCount : kValueDim / 8;
  static constexpr int kKeyReads = kKeyDim / 4 / kKeyCount, kValueReads = kValueDim / 8 / kValueCount;
  // More reads of wide keys at a time would take registers from the sums.
  static constexpr int kUnrolledReads = kKeyDim > 256 ? 3 : kKeyDim > 128 && C::kPerWord == 1 ? 4 : kKeyReads;
  static constexpr int kDepthSteps = kKeyDim / 8 / C::kPerWord;
  // Tiles of 8 keys between updates of the softmax. Registers hold the scores of 16 keys and the sums of 256 columns.
  static constexpr int kKeyTiles = kValueDim > 128 ? 2 : 4;
  // Registers hold the sums of 128 columns and the queries too.
  static constexpr bool kAreQueriesShared = kKeyDim > 128 || C::kPerWord == 1;
  static constexpr int kQueryBytes = kAreQueriesShared ? kDepthSteps * 32 * 16 : 0;
  static constexpr int kTotalBytes = kRows * kValueDim * 4;
  static constexpr int kMost = kSharedBytes / (kQueryBytes + kTotalBytes);
  static constexpr int kWarps = kMost >= 4 ? 4 : kMost >= 2 ? 2 : 1;
};

template <class C, Number kStored, int kKeyDim, int kValueDim>
__global__ void __launch_bounds__(32 * Sizes<C, kStored, kKeyDim, kValueDim>::kWarps)
    attend_items(const CudaCall call) {
  using Size = Sizes<C, kStored, kKeyDim, kValueDim>;
  constexpr int kOutTiles = kValueDim / 8, kValueCount = Size::kValueCount;
  constexpr int kKeyTiles = Size::kKeyTiles, kStepKeys = 8 * kKeyTiles;
  __shared__ float totals[Size::kWarps][kOutTiles * 4][32];
  __shared__ uint4 shared_queries[Size::kWarps][Size::kAreQueriesShared ? Size::kDepthSteps : 1][32];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, i = lane / 4, j = lane % 4;
  const int index = blockIdx.x * Size::kWarps + warp;
  // Known without latents, because registers are scarce.
  constexpr bool kAreLatents = kKeyDim > kMaxHeadDim;
  const int kv_head = kAreLatents ? blockIdx.y % call.num_kv_heads : blockIdx.y;
  const int first_column = kAreLatents ? blockIdx.y / call.num_kv_heads * kValueDim : 0;
  const int value_dim = kAreLatents ? call.value_dim : call.head_dim, value_offset = kAreLatents ? 0 : call.head_dim;
  if (index >= call.num_items) return;
  const Item item = call.items[index];
  if (item.num_pairs == 0) return;
  const Number kv_number = C::kPerWord == 1 ? call.kv_number : kStored;
  const Pair pairs[2] = {{call, item, kv_head, i}, {call, item, kv_head, i + 8}};

  // The queries, as left matrices.
  uint32_t queries[Size::kAreQueriesShared ? 1 : Size::kDepthSteps][4];
#pragma unroll
  for (int read = 0; read < Size::kKeyReads; ++read) {
    constexpr int kCount = Size::kKeyCount, kWords = kCount / C::kPerWord, kQueryBytes = C::kPerWord == 1 ? 0 : 2;
    const int column = (4 * read + j) * kCount;
    uint32_t words[2][kWords];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Number number = C::kPerWord == 1 ? call.q_number : C::kNumber;
      const int64_t first = pairs[half].place * call.head_dim + column;
      const bool is_read = pairs[half].kv_begin < pairs[half].kv_end && column < call.head_dim;
      read_numbers<C, kCount, kQueryBytes>(is_read ? call.q + first * size_of(number) : nullptr, number, words[half]);
    }
#pragma unroll
    for (int step = 0; step < kWords / 2; ++step) {
      const int at = read * (kWords / 2) + step;
      const uint4 left{words[0][2 * step], words[1][2 * step], words[0][2 * step + 1], words[1][2 * step + 1]};
      if constexpr (Size::kAreQueriesShared) {
        shared_queries[warp][at][lane] = left;
      } else {
        queries[at][0] = left.x, queries[at][1] = left.y, queries[at][2] = left.z, queries[at][3] = left.w;
      }
    }
  }

  const int64_t first_place = int64_t{*call.layer} * call.blocks_per_layer;
  const bool is_layer = first_place >= 0 && first_place + call.blocks_per_layer <= call.num_places;
  const int head_bytes = (call.head_dim + value_offset) * size_of(kStored);
  const int token_bytes = head_bytes * call.num_kv_heads;
  const char* const keys = call.pool + int64_t{head_bytes} * kv_head;
  const char* const values = keys + value_offset * size_of(kStored);
  const float* const scales = call.scales_lk2 + (int64_t{is_layer ? *call.layer : 0} * call.num_kv_heads + kv_head) * 2;
  const float scale = call.scale * kLog2E * (call.scales_lk2 ? scales[0] : 1);

  Stats total[2] = {{kLowest, 0}, {kLowest, 0}};
  float out[kOutTiles][4];
#pragma unroll
  for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
    for (int k = 0; k < 4; ++k) totals[warp][tile * 4 + k][lane] = 0, out[tile][k] = 0;
  }
  for (int part = item.first_part; part < item.first_part + item.num_parts; ++part) {
    Stats stats[2] = {{kLowest, 0}, {kLowest, 0}};
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < 4; ++k) out[tile][k] = 0;
    }
    const int part_begin = part * call.part_keys, part_end = part_begin + call.part_keys;
    const int begin = item.kv_begin > part_begin ? item.kv_begin : part_begin;
    const int end = item.kv_end < part_end ? item.kv_end : part_end;
    for (int key = begin / kStepKeys * kStepKeys; key < end; key += kStepKeys) {
      // Each lane locates a key: its slot in the pool, or -1.
      int slot = -1;
      if (const int mine = key + lane; lane < kStepKeys && mine >= begin && mine < end) {
        const int block = call.tables_sm[int64_t{item.row} * call.table_width + mine / call.block_size];
        if (is_layer && block >= 0 && block < call.blocks_per_layer) {
          slot = (static_cast<int>(first_place) + block) * call.block_size + mine % call.block_size;
        }
      }

      float scores[kKeyTiles][4] = {};
      int key_slots[kKeyTiles];
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) key_slots[tile] = shuffle(slot, 8 * tile + i);
#pragma unroll(Size::kUnrolledReads)
      for (int read = 0; read < Size::kKeyReads; ++read) {
        constexpr int kCount = Size::kKeyCount, kWords = kCount / C::kPerWord;
        const int column = (4 * read + j) * kCount;
        uint32_t words[kKeyTiles][kWords];
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; ++tile) {
          const bool is_read = key_slots[tile] >= 0 && column < call.head_dim;
          const char* const at = keys + int64_t{key_slots[tile]} * token_bytes + column * size_of(kStored);
          read_numbers<C, kCount, size_of(kStored)>(is_read ? at : nullptr, kv_number, words[tile]);
        }
#pragma unroll
        for (int step = 0; step < kWords / 2; ++step) {
          const int at = read * (kWords / 2) + step;
          uint32_t left[4];
          if constexpr (Size::kAreQueriesShared) {
            const uint4 four = shared_queries[warp][at][lane];
            left[0] = four.x, left[1] = four.y, left[2] = four.z, left[3] = four.w;
          } else {
#pragma unroll
            for (int k = 0; k < 4; ++k) left[k] = queries[at][k];
          }
#pragma unroll
          for (int tile = 0; tile < kKeyTiles; ++tile) {
            multiply(C{}, scores[tile], left, {words[tile][2 * step], words[tile][2 * step + 1]});
          }
        }
      }

#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int k = 0; k < 4; ++k) scores[tile][k] *= scale;
      }
      if (call.soft_cap > 0) {
#pragma unroll
        for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
          for (int k = 0; k < 4; ++k) scores[tile][k] = cap_score(scores[tile][k], call.soft_cap);
        }
      }
      float most[2] = {-INFINITY, -INFINITY}, fade[2];
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int place = key + 8 * tile + 2 * j + k % 2;
          const bool is_seen = place >= pairs[k / 2].kv_begin && place < pairs[k / 2].kv_end && place < end;
          scores[tile][k] = is_seen ? scores[tile][k] : -INFINITY;
          most[k / 2] = fmaxf(most[k / 2], scores[tile][k]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        most[half] = fmaxf(most[half], shuffle_xor(most[half], 1));
        most[half] = fmaxf(most[half], shuffle_xor(most[half], 2));
        const float max = fmaxf(stats[half].max, most[half]);
        fade[half] = power_of_two(stats[half].max - max);
        stats[half] = {max, stats[half].sum * fade[half]};
      }
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          scores[tile][k] = power_of_two(scores[tile][k] - stats[k / 2].max);
          stats[k / 2].sum += scores[tile][k];
        }
      }
      if (any(fade[0] != 1 || fade[1] != 1)) {
#pragma unroll
        for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
          for (int k = 0; k < 4; ++k) out[tile][k] *= fade[k / 2];
        }
      }

      int value_slots[kKeyTiles][2];
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; ++tile) {
#pragma unroll
        for (int k = 0; k < 2; ++k) value_slots[tile][k] = shuffle(slot, 8 * tile + 2 * j + k);
      }
#pragma unroll
      for (int tile = 0; tile < kKeyTiles; tile += C::kPerWord) {
#pragma unroll
        for (int read = 0; read < Size::kValueReads; ++read) {
          const int column = first_column + (8 * read + i) * kValueCount;
          uint32_t words[C::kPerWord][2][kValueCount / C::kPerWord];
#pragma unroll
          for (int t = 0; t < C::kPerWord; ++t) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const int value_slot = value_slots[tile + t][k];
              const bool is_read = value_slot >= 0 && column < value_dim;
              const char* const at = values + int64_t{value_slot} * token_bytes + column * size_of(kStored);
              read_numbers<C, kValueCount, size_of(kStored)>(is_read ? at : nullptr, kv_number, words[t][k]);
            }
          }
#pragma unroll
          for (int n = 0; n < kValueCount; ++n) {
            float(&sum)[4] = out[read * kValueCount + n];
            if constexpr (C::kPerWord == 1) {
              const uint32_t left[4] = {as_bits(scores[tile][0]), as_bits(scores[tile][2]), as_bits(scores[tile][1]),
                                        as_bits(scores[tile][3])};
              multiply(C{}, sum, left, {words[0][0][n], words[0][1][n]});
            } else {
              // A column of two keys in a word.
              const auto joined = [&](int t) {
                const uint32_t a = words[t][0][n / 2], b = words[t][1][n / 2];
                return n % 2 ? a >> 16 | (b & 0xffff0000) : (a & 0xffff) | b << 16;
              };
              const float(&s)[4] = scores[tile], (&next)[4] = scores[tile + 1];
              const uint32_t left[4] = {C::pack(s[0], s[1]), C::pack(s[2], s[3]), C::pack(next[0], next[1]),
                                        C::pack(next[2], next[3])};
              multiply(C{}, sum, left, {joined(0), joined(1)});
            }
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      stats[half].sum += shuffle_xor(stats[half].sum, 1);
      stats[half].sum += shuffle_xor(stats[half].sum, 2);
    }
    if (item.slot >= 0) {
      total[0] = stats[0], total[1] = stats[1];
      break;
    }
    const Factors factors[2] = {merge_stats(total[0], stats[0]), merge_stats(total[1], stats[1])};
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float& sum = totals[warp][tile * 4 + k][lane];
        sum = out[tile][k] = merge_output(factors[k / 2], sum, out[tile][k]);
      }
    }
  }

  const float value_scale = call.scales_lk2 ? scales[1] : 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Pair pair{call, call.items[index], kv_head, i + 8 * half};  // read again: registers are scarce in the loop
    if (pair.place < 0) continue;
    const int64_t row = (int64_t{kv_head} * call.num_slots + item.slot) * kRows + i + 8 * half;
    const float out_scale = output_scale(total[half], value_scale);
#pragma unroll
    for (int read = 0; read < Size::kValueReads; ++read) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int column = first_column + (8 * read + 2 * j + k) * kValueCount;
        if (column >= value_dim) continue;
        float numbers[kValueCount];
#pragma unroll
        for (int n = 0; n < kValueCount; ++n) numbers[n] = out[read * kValueCount + n][2 * half + k];
        if (item.slot >= 0) {
          write_numbers<F32>(reinterpret_cast<char*>(call.part_out + row * value_dim + column), numbers);
          continue;
        }
#pragma unroll
        for (int n = 0; n < kValueCount; ++n) numbers[n] *= out_scale;
        char* const to = call.out + (pair.place * value_dim + column) * size_of(call.out_number);
        if (C::kPerWord == 1 || call.out_number == Number::kF32) {
          write_numbers(to, call.out_number, numbers);
        } else {
          write_numbers<C>(to, numbers);
        }
      }
    }
    if (j > 0 || first_column > 0) continue;
    if (item.slot >= 0) {
      call.part_stats[2 * row] = total[half].max, call.part_stats[2 * row + 1] = total[half].sum;
    } else {
      write_lse(call, pair.place, total[half]);
    }
  }
}

// A block merges the parts of a tile of one key/value head; each warp some of its pairs.
constexpr int kMergeWarps = 4;

__global__ void __launch_bounds__(32 * kMergeWarps) merge_parts(const CudaCall call) {
  constexpr int kCount = 4, kReads = kMaxValueDim / 32 / kCount;  // adjacent columns of a lane
  const Merge merge = call.merges[blockIdx.x];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv_head = blockIdx.y;
  if (merge.num_parts == 0) return;
  const int group = call.num_heads / call.num_kv_heads;
  const bool is_layer = *call.layer >= 0 && (int64_t{*call.layer} + 1) * call.blocks_per_layer <= call.num_places;
  const int64_t layer = is_layer ? *call.layer : 0;
  const float value_scale = call.scales_lk2 ? call.scales_lk2[(layer * call.num_kv_heads + kv_head) * 2 + 1] : 1;
  for (int index = warp; index < merge.num_pairs; index += kMergeWarps) {
    Stats total{kLowest, 0};
    float out[kReads][kCount] = {};
    for (int part = 0; part < merge.num_parts; ++part) {
      const int64_t row = (int64_t{kv_head} * call.num_slots + merge.first_slot + part) * kRows + index;
      const Factors factors = merge_stats(total, {call.part_stats[2 * row], call.part_stats[2 * row + 1]});
#pragma unroll
      for (int read = 0; read < kReads; ++read) {
        const int column = (32 * read + lane) * kCount;
        if (column >= call.value_dim) continue;
        uint32_t words[kCount];
        read_words<kCount>(reinterpret_cast<const char*>(call.part_out + row * call.value_dim + column), words);
#pragma unroll
        for (int n = 0; n < kCount; ++n) out[read][n] = merge_output(factors, out[read][n], as_float(words[n]));
      }
    }
    const int pair = merge.first_pair + index;
    const int64_t place = int64_t{merge.first_token + pair / group} * call.num_heads + kv_head * group + pair % group;
    const float out_scale = output_scale(total, value_scale);
#pragma unroll
    for (int read = 0; read < kReads; ++read) {
      const int column = (32 * read + lane) * kCount;
      if (column >= call.value_dim) continue;
#pragma unroll
      for (int n = 0; n < kCount; ++n) out[read][n] *= out_scale;
      write_numbers(call.out + (place * call.value_dim + column) * size_of(call.out_number), call.out_number, out[read]);
    }
    if (lane == 0) write_lse(call, place, total);
  }
}

// --- the call --------------------------------------------------------------------------------------------------------

template <class C, Number kStored, int kKeyDim, int kValueDim>
void launch_items(const CudaCall& call, Stream stream) {
  constexpr int kWarps = Sizes<C, kStored, kKeyDim, kValueDim>::kWarps;
  const int num_warps = (call.value_dim + kValueDim - 1) / kValueDim;
  const dim3 grid((call.num_items + kWarps - 1) / kWarps, call.num_kv_heads * num_warps);
  launch(attend_items<C, kStored, kKeyDim, kValueDim>, grid, 32 * kWarps, stream, call);
}

template <class C, Number kStored>
void launch_dim(const CudaCall& call, Stream stream) {
  if (call.value_offset == 0) return launch_items<C, kStored, kMaxLatentDim, 128>(call, stream);
  if (call.head_dim <= 64) return launch_items<C, kStored, 64, 64>(call, stream);
  if (call.head_dim <= 128) return launch_items<C, kStored, 128, 128>(call, stream);
  launch_items<C, kStored, kMaxHeadDim, kMaxHeadDim>(call, stream);
}

template <class C>
void launch_stored(const CudaCall& call, Stream stream) {
  if (call.kv_number == Number::kI8) return launch_dim<C, Number::kI8>(call, stream);
  if (call.kv_number == Number::kF8) return launch_dim<C, Number::kF8>(call, stream);
  launch_dim<C, C::kNumber>(call, stream);
}

void launch_all(const CudaCall& call, int64_t num_merges, Stream stream) {
  const bool is_scaled = size_of(call.kv_number) == 1;
  if (call.q_number == Number::kBF16 && (is_scaled || call.kv_number == Number::kBF16)) {
    launch_stored<BF16>(call, stream);
  } else if (call.q_number == Number::kF16 && (is_scaled || call.kv_number == Number::kF16)) {
    launch_stored<F16>(call, stream);
  } else if (is_scaled) {
    launch_dim<F32, Number::kI8>(call, stream);
  } else if (call.kv_number == Number::kF32) {
    launch_dim<F32, Number::kF32>(call, stream);
  } else {
    launch_dim<F32, Number::kBF16>(call, stream);
  }
  if (num_merges) launch(merge_parts, dim3(num_merges, call.num_kv_heads), 32 * kMergeWarps, stream, call);
}

struct CudaAttributes {
  float scale, soft_cap;
  int64_t window, blocks_per_layer, kv_number, part_keys, value_dim;
};

using Ints32 = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

ffi::Error attend(Stream stream, ffi::AnyBuffer q, ffi::AnyBuffer pool, Ints32 layer, Floats scales, Ints32 tables,
                  Ints32 items, Ints32 merges, ffi::Result<ffi::AnyBuffer> out, ffi::Result<Floats> lse,
                  ffi::Result<Floats> part_out, ffi::Result<Floats> part_stats, CudaAttributes attributes) {
  constexpr int64_t kItemFields = sizeof(Item) / 4, kMergeFields = sizeof(Merge) / 4;
  const auto q_shape = q.dimensions(), pool_shape = pool.dimensions(), parts_shape = part_out->dimensions();
  if (q_shape.size() != 3 || pool_shape.size() != 4 || tables.dimensions().size() != 2 || parts_shape.size() != 4) {
    return ffi::Error::InvalidArgument("queries, pool, tables or parts have another number of axes");
  }
  const auto type = q.element_type();
  if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) {
    return ffi::Error::InvalidArgument("queries are not float32, bfloat16 or float16");
  }
  if (out->element_type() != type && out->element_type() != ffi::F32) {
    return ffi::Error::InvalidArgument("outputs are neither float32 nor of the queries' type");
  }
  const bool are_latents = attributes.value_dim > 0;
  const int64_t num_kv_heads = pool_shape[2] / (are_latents ? 1 : 2), head_dim = q_shape[2];
  const int64_t value_dim = are_latents ? attributes.value_dim : head_dim, kv_number = attributes.kv_number;
  if (pool_shape[3] != head_dim || num_kv_heads < 1 || q_shape[1] % num_kv_heads || head_dim % 16 ||
      head_dim > (are_latents ? kMaxLatentDim : kMaxHeadDim) || value_dim % 16 || value_dim > kMaxValueDim ||
      value_dim > head_dim || kv_number < 0 || kv_number > 4 || attributes.part_keys < 1 ||
      attributes.part_keys % kMaxStepKeys || parts_shape[0] != num_kv_heads || parts_shape[2] != kRows ||
      parts_shape[3] != value_dim || items.element_count() % kItemFields || merges.element_count() % kMergeFields ||
      static_cast<int64_t>(pool.size_bytes()) !=
          pool_shape[0] * pool_shape[1] * pool_shape[2] * head_dim * size_of(static_cast<Number>(kv_number))) {
    return ffi::Error::InvalidArgument("queries, pool, items and attributes do not fit");
  }
  CudaCall call{};
  call.q = static_cast<const char*>(q.untyped_data());
  call.pool = static_cast<const char*>(pool.untyped_data());
  call.q_number = type == ffi::F32 ? Number::kF32 : type == ffi::BF16 ? Number::kBF16 : Number::kF16;
  call.kv_number = static_cast<Number>(kv_number);
  call.out_number = out->element_type() == ffi::F32 ? Number::kF32 : call.q_number;
  call.items = reinterpret_cast<const Item*>(items.typed_data());
  call.merges = reinterpret_cast<const Merge*>(merges.typed_data());
  call.tables_sm = tables.typed_data();
  call.layer = layer.typed_data();
  call.scales_lk2 = scales.element_count() ? scales.typed_data() : nullptr;
  call.out = static_cast<char*>(out->untyped_data());
  call.lse = lse->typed_data();
  call.part_out = part_out->typed_data();
  call.part_stats = part_stats->typed_data();
  call.num_items = static_cast<int>(items.element_count()) / kItemFields;
  call.num_slots = static_cast<int>(parts_shape[1]);
  call.num_tokens = static_cast<int>(q_shape[0]);
  call.num_heads = static_cast<int>(q_shape[1]);
  call.num_kv_heads = static_cast<int>(num_kv_heads);
  call.head_dim = static_cast<int>(head_dim);
  call.value_dim = static_cast<int>(value_dim);
  call.value_offset = are_latents ? 0 : call.head_dim;
  call.block_size = static_cast<int>(pool_shape[1]);
  call.table_width = static_cast<int>(tables.dimensions()[1]);
  call.num_places = static_cast<int>(pool_shape[0]);
  call.blocks_per_layer = static_cast<int>(attributes.blocks_per_layer);
  call.part_keys = static_cast<int>(attributes.part_keys);
  call.window = attributes.window;
  call.scale = attributes.scale;
  call.soft_cap = attributes.soft_cap;
  launch_all(call, merges.element_count() / kMergeFields, stream);
  if (const char* error = launch_error()) return ffi::Error::Internal(error);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jpaged

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jpaged::CudaAttributes, xla::ffi::StructMember<float>("scale"),
                                      xla::ffi::StructMember<float>("soft_cap"),
                                      xla::ffi::StructMember<int64_t>("window"),
                                      xla::ffi::StructMember<int64_t>("blocks_per_layer"),
                                      xla::ffi::StructMember<int64_t>("kv_number"),
                                      xla::ffi::StructMember<int64_t>("part_keys"),
                                      xla::ffi::StructMember<int64_t>("value_dim"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_cuda_attend, jpaged::attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<jpaged::StreamContext>()
                                  .Arg<xla::ffi::AnyBuffer>()  // queries
                                  .Arg<xla::ffi::AnyBuffer>()  // pool
                                  .Arg<jpaged::Ints32>()       // layer
                                  .Arg<jpaged::Floats>()       // scales
                                  .Arg<jpaged::Ints32>()       // block tables
                                  .Arg<jpaged::Ints32>()       // items
                                  .Arg<jpaged::Ints32>()       // tiles to merge
                                  .Ret<xla::ffi::AnyBuffer>()  // outputs
                                  .Ret<jpaged::Floats>()       // log-sum-exps
                                  .Ret<jpaged::Floats>()       // parts: outputs
                                  .Ret<jpaged::Floats>()       // parts: maxima and sums
                                  .Attrs<jpaged::CudaAttributes>(),
                              {xla::ffi::Traits::kCmdBufferCompatible});
