// Declarations shared by kernel.cc, which divides the work into tasks, and core.cc, which computes attention on CPUs.
//
//     rows of a tile                     keys of a row, in chunks of 256 counted from the context's beginning
//     (query, head of the group)         | 0 ........ 255 | 256 ...... 511 | 512 ...
//     q0 g0  q0 g1 .. q1 g0 ..       x   |    partial     |    partial     |  ...      merged in this order
//
// A chunk's partial result depends only on one query and the chunk's keys, and the merged result only on a query and
// its keys: no bit depends on the tile, the other rows of the batch or the threads.

#pragma once

#include <cstdint>

#include "numbers.h"

namespace jpaged {

constexpr int64_t kChunk = 256;    // keys of a partial result
constexpr int64_t kStep = 32;      // keys that are converted to float32 together
constexpr int64_t kTileRows = 64;  // rows that share the loads of the keys
constexpr int64_t kMaxWidth = 16;  // floats of the widest vector

struct Call {
  const void* q;  // [T, H, D]
  Number q_number;
  void* out;   // as q
  float* lse;  // [T, H]

  const char* pool;  // [P, B, 2K, D], or [P, B, K, D] of latents
  Number kv_number;
  int64_t first_place, num_places;  // the layer's blocks in the pool; none if there is no such layer
  const float* scales_k2;           // of the layer, or null

  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size;
  int64_t value_dim;     // numbers of a value, and of an output
  int64_t value_offset;  // from a key to its value, in numbers: 0 if a key begins with its value
  int64_t window;  // 0: all
  float scale, soft_cap;  // soft_cap 0: none

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t head_stride() const { return head_dim + value_offset; }  // between consecutive heads of a token
};

// Consecutive (query, head) pairs of one row.
struct Tile {
  const int32_t* table;      // the row's blocks
  int64_t token, position;   // of the row's first query
  int64_t first, num_rows;   // pair i of the tile is query (first + i) / G with head (first + i) % G of the group
  int64_t begin, end;        // keys of the row that are visible to some pair of the tile

  int64_t first_chunk() const { return begin / kChunk; }
  int64_t num_chunks() const { return begin < end ? (end + kChunk - 1) / kChunk - first_chunk() : 0; }
};

// One head's keys of one chunk for a tile: the unit of `attend`.
struct Piece {
  const Tile* tile;
  int64_t kv_head, chunk;
};

// Pointers to the keys begin to end of a piece's chunk; null if the row has no such key, or the layer no such block.
// The value of a key follows it, or is its beginning.
struct Keys {
  const char* at[kChunk];
  int64_t begin, end;
};

// A whole prompt of float32 whose tokens all see each other, with its keys and values in the call.
struct Prompt {
  int64_t token, num_tokens;  // the first one
  const float *k, *v;         // [T, K, D] of all tokens of the call
};

constexpr int64_t kMaxPrompt = 2048;  // tokens: with more, the scores of a tile exceed the L2 cache

// The running softmax: for each row of a tile the maximum, the sum, and the output times the sum.
struct Partial {
  float *max, *sum, *out;

  static int64_t padded(int64_t n) { return (n + kMaxWidth - 1) / kMaxWidth * kMaxWidth; }
  static int64_t num_floats(int64_t num_rows, int64_t value_dim) { return padded(num_rows) * (2 + padded(value_dim)); }
  static Partial at(float* memory, int64_t num_rows) {
    return {memory, memory + padded(num_rows), memory + 2 * padded(num_rows)};
  }
};

// Attention compiled for one kind of processor.
struct Core {
  const char* name;
  int64_t width;  // floats of a vector
  int64_t (*num_scratch_floats)(int64_t head_dim);
  // Copy the queries of one key/value head into the scratch, for `attend`.
  void (*load)(const Call&, const Tile&, int64_t kv_head, float* scratch);
  // Compute the partial result of one piece, and prefetch the keys of the next one, if any.
  void (*attend)(const Call&, const Piece&, const Keys&, const Keys* next, float* scratch, Partial);
  // Reset to no keys.
  void (*clear)(const Tile&, int64_t value_dim, Partial);
  // Merge the result of a later chunk.
  void (*merge)(const Tile&, int64_t value_dim, Partial into, Partial later);
  // Write the tile's outputs and log-sum-exps.
  void (*store)(const Call&, const Tile&, int64_t kv_head, Partial);
  // Write the outputs and log-sum-exps of a prompt, for the queries of one key/value head.
  int64_t (*num_prompt_floats)(int64_t num_tokens, int64_t head_dim);
  void (*attend_prompt)(const Call&, const Prompt&, int64_t kv_head, float* scratch);
};

}  // namespace jpaged
