// The gated delta rule and Mamba-2, one token after another. Compiled once for each kind of processor, under its own
// JPAGED_CORE.
//
// This file calls no function templates of the standard library: an instance compiled here for a processor with wide
// vectors could be linked into code that runs on another.

#include "core.h"

#include "vector.h"

namespace jpaged::recurrence {
namespace {

constexpr int64_t kParts = 4;  // sums over the depth at once, which are added in a fixed order
constexpr int64_t kColumns = kVectors * kWidth;

struct Columns {
  Floats vectors[kVectors];
};

// Loads some columns, and zeros for the others.
Columns load_columns(const float* from, int64_t count) {
  float stored[kColumns] = {};
  if (count == kColumns) {
    __builtin_memcpy(stored, from, sizeof stored);
  } else {
    for (int64_t i = 0; i < count; ++i) stored[i] = from[i];
  }
  Columns columns;
  __builtin_memcpy(&columns, stored, sizeof columns);
  return columns;
}

void store_columns(float* to, const Columns& columns, int64_t count) {
  float stored[kColumns];
  __builtin_memcpy(stored, &columns, sizeof stored);
  if (count == kColumns) {
    __builtin_memcpy(to, stored, sizeof stored);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = stored[i];
  }
}

struct Sums {
  Floats parts[kParts][kVectors];

  Columns all() const {
    Columns sums;
    for (int64_t v = 0; v < kVectors; ++v) {
      sums.vectors[v] = (parts[0][v] + parts[1][v]) + (parts[2][v] + parts[3][v]);
    }
    return sums;
  }
};

// k S of one token; k (decay * S) if each row has its own decay.
template <bool is_wide>
Columns multiply_key(const float* k, const float* decays, const float* state, int64_t depth) {
  Sums sums{};
  const auto add = [&](int64_t d, int64_t part) {
    const float factor = is_wide ? k[d] * decays[d] : k[d];
    for (int64_t v = 0; v < kVectors; ++v) sums.parts[part][v] += factor * load(state + d * kColumns + v * kWidth);
  };
  int64_t d = 0;
  for (; d + kParts <= depth; d += kParts) {
    for (int64_t part = 0; part < kParts; ++part) add(d + part, part);
  }
  for (int64_t part = 0; d < depth; ++d, ++part) add(d, part);
  return sums.all();
}

// S = decay * S + k u of one token; returns q S.
template <bool is_wide>
Columns update(const float* q, const float* k, const Columns& u, const float* decays, float* state, int64_t depth) {
  Sums sums{};
  const float shared = *decays;
  const auto add = [&](int64_t d, int64_t part) {
    const float decay = is_wide ? decays[d] : shared;
    for (int64_t v = 0; v < kVectors; ++v) {
      float* at = state + d * kColumns + v * kWidth;
      const Floats next = load(at) * decay + k[d] * u.vectors[v];
      store(at, next);
      sums.parts[part][v] += q[d] * next;
    }
  };
  int64_t d = 0;
  for (; d + kParts <= depth; d += kParts) {
    for (int64_t part = 0; part < kParts; ++part) add(d + part, part);
  }
  for (int64_t part = 0; d < depth; ++d, ++part) add(d, part);
  return sums.all();
}

template <bool is_delta, bool is_wide>
void run_tokens(const Strip& strip, float* state) {
  for (int64_t t = 0; t < strip.num_tokens; ++t) {
    const float *q = strip.q + t * strip.key_stride, *k = strip.k + t * strip.key_stride;
    const float* decays = strip.decays + t * strip.decay_stride;
    Columns u = load_columns(strip.x + t * strip.value_stride, strip.num_columns);
    if constexpr (is_delta) {
      const Columns known = multiply_key<is_wide>(k, decays, state, strip.depth);
      const float decay = is_wide ? 1.0f : *decays;
      const float strength = strip.strengths[t * strip.strength_stride];
      for (int64_t v = 0; v < kVectors; ++v) u.vectors[v] = (u.vectors[v] - known.vectors[v] * decay) * strength;
    }
    const Columns o = update<is_wide>(q, k, u, decays, state, strip.depth);
    store_columns(strip.o + t * strip.value_stride, o, strip.num_columns);
  }
}

void run(const Strip& strip, float* scratch, Rule rule) {
  for (int64_t d = 0; d < strip.depth; ++d) {
    const Columns columns =
        strip.from == nullptr ? Columns{} : load_columns(strip.from + d * strip.from_stride, strip.num_columns);
    store_columns(scratch + d * kColumns, columns, kColumns);
  }
  if (rule.is_wide) {
    rule.is_delta ? run_tokens<true, true>(strip, scratch) : run_tokens<false, true>(strip, scratch);
  } else {
    rule.is_delta ? run_tokens<true, false>(strip, scratch) : run_tokens<false, false>(strip, scratch);
  }
  for (int64_t d = 0; d < strip.depth; ++d) {
    store_columns(strip.to + d * strip.to_stride, load_columns(scratch + d * kColumns, kColumns), strip.num_columns);
  }
}

}  // namespace

extern const Core JPAGED_CORE;
const Core JPAGED_CORE = {JPAGED_NAME, kWidth, run};

}  // namespace jpaged::recurrence
