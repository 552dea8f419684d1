// Samples columns by the maximum of logit + noise. Included only by core.cc.
//
// Noise uses the same bits as `jpaged.device.sampling`, and most columns need only the bits:
// -log(u) of a uniform u is bounded by the bits of u's float32, whose exponent and mantissa, read as one number,
// approach its logarithm from below. Two logarithms are computed only if the bound does not exclude a column: some
// dozens of times per row. If even the maximum noise is too small for a block, no bits are computed either.

#pragma once

#include <math.h>

#include "floors.h"
#include "row.h"

namespace jpaged {
namespace {

constexpr float kMostNoise = 22.9f;  // above -log(2^-33), the maximum
constexpr float kLn2 = 0.69314718f;

template <class Words>
struct Pair {
  Words x, y;
};

// Threefry-2x32 with 20 rounds, as `noise.threefry_2x32`.
template <class Words>
inline Pair<Words> threefry(uint32_t key_x, uint32_t key_y, Words counter_x, Words counter_y) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t schedule[3] = {key_x, key_y, key_x ^ key_y ^ 0x1BD11BDAu};
  Words x = counter_x + schedule[0], y = counter_y + schedule[1];
#pragma GCC unroll 5
  for (uint32_t group = 0; group < 5; ++group) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int distance = kRotations[group % 2][i];
      x += y;
      y = (y << distance | y >> (32 - distance)) ^ x;
    }
    x += schedule[(group + 1) % 3];
    y += schedule[(group + 2) % 3] + group + 1;
  }
  return {x, y};
}

// The maximum of logit + noise so far; of equal ones, the lowest column.
class Draw {
 public:
  Draw(const float* x, float temperature) : x_(x), temperature_(temperature), inverse_(1 / temperature) {}

  int64_t token_id() const { return id_; }

  // Return true if a column up to this logit, before temperature, may win.
  bool can_win(float x) const { return x / temperature_ + kMostNoise >= best_; }

  // Try columns with their random bits; `logits` are theirs, or minus infinity. id_of(lane) is the column.
  template <class IdOf>
  inline void consider(Uints bits, Floats logits, const IdOf& id_of) {
    // u >= (bits / 2 + 1 / 4) / 2^31, and log2(u) >= its bits as a number / 2^23 - 127.
    const Floats least = numbers(bits >> 1) + 0.25f;
    const Floats log2 = numbers(bits_of(least)) * 0x1p-23f;
    const Floats most = logits * inverse_ - log2 * kLn2;
    const auto is_possible = most >= limit_;
    if (!any(is_possible)) return;
    int32_t possible[kWidth];
    uint32_t words[kWidth];
    __builtin_memcpy(possible, &is_possible, sizeof is_possible);
    __builtin_memcpy(words, &bits, sizeof bits);
    for (int lane = 0; lane < kWidth; ++lane) {
      if (possible[lane]) try_column(id_of(lane), words[lane]);
    }
  }

 private:
  void try_column(int64_t id, uint32_t bits) {
    if (id < 0) return;
    const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-32f, most = 1 - 0x1p-24f;
    const float wait = -log1pf(-(u < most ? u : most));
    const float noisy = x_[id] / temperature_ - logf(wait);
    if (noisy < best_ || (noisy == best_ && id >= id_) || noisy != noisy) return;
    best_ = noisy;
    id_ = id;
    // Rounding of the reciprocal and of the bound; the terms omitted in both are equal for all columns.
    const float slack = 1e-3f + 1e-6f * (fabsf(best_) + kMostNoise), limit = best_ - slack - 158 * kLn2;
    limit_ = limit > -kInfinity ? limit : -kInfinity;
  }

  const float* x_;
  const float temperature_, inverse_;
  float best_ = -kInfinity, limit_ = -kInfinity;
  int64_t id_ = 0;
};

struct Key {
  uint32_t x, y;

  Pair<Uints> words(Ints counters) const { return threefry<Uints>(x, y, reinterpret_cast<Uints>(counters), Uints{}); }
};

int64_t draw_of_kept(const Row& row, float temperature, Key key, const Kept& kept) {
  const int32_t half = static_cast<int32_t>((row.size + 1) / 2);
  Draw draw(row.x, temperature);
  for (int64_t i = 0; i < kept.size; i += kWidth) {
    int32_t lanes[kWidth];
    float logits[kWidth];
    for (int lane = 0; lane < kWidth; ++lane) {
      lanes[lane] = i + lane < kept.size ? kept.ids[i + lane] : -1;
      logits[lane] = lanes[lane] < 0 ? -kInfinity : row.x[lanes[lane]];
    }
    const Ints ids = load_as<Ints>(lanes);
    const auto is_first = ids < half;
    const Pair<Uints> words = key.words(is_first ? ids : ids - half);
    draw.consider(is_first ? words.x : words.y, load(logits), [&](int lane) { return int64_t{lanes[lane]}; });
  }
  return draw.token_id();
}

// Columns c and c + half, two words of one counter, a block of counters at a time.
int64_t draw_of_all(const Row& row, float temperature, Key key, float* blocks) {
  const int64_t half = (row.size + 1) / 2, num_blocks = (half + kBlock - 1) / kBlock;
  int64_t likeliest = 0;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    blocks[block] = largest(load(row.groups + block * kWidth));
    if (blocks[block] > blocks[likeliest]) likeliest = block;
  }
  blocks[row.num_blocks()] = -kInfinity;
  Draw draw(row.x, temperature);
  const auto draw_block = [&](int64_t block) {
    const int64_t end = (block + 1) * kBlock < half ? (block + 1) * kBlock : half;
    for (int64_t at = block * kBlock; at < end; at += kWidth) {
      const Pair<Uints> words = key.words(kLanes + static_cast<int32_t>(at));
      draw.consider(words.x, load_until(row.x, at, half), [&](int lane) { return at + lane < half ? at + lane : -1; });
      draw.consider(words.y, load_until(row.x, at + half, row.size),
                    [&](int lane) { return at + half + lane < row.size ? at + half + lane : -1; });
    }
  };
  // The most likely tokens first: a better best column excludes more others.
  const int64_t first = likeliest * kBlock < half ? likeliest : (likeliest * kBlock - half) / kBlock;
  draw_block(first);
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t second = (half + block * kBlock) / kBlock, after = second + 1;
    const float *upper = blocks + (second < row.num_blocks() ? second : row.num_blocks());
    const float *beyond = blocks + (after < row.num_blocks() ? after : row.num_blocks());
    if (block != first && (draw.can_win(blocks[block]) || draw.can_win(*upper) || draw.can_win(*beyond))) {
      draw_block(block);
    }
  }
  return draw.token_id();
}

}  // namespace
}  // namespace jpaged
