// Declarations shared by kernel.cc, which divides the work into tasks, and core.cc, which computes recurrences on CPUs.
//
//     state [D, V]    of a row and head; tasks have strips of its columns, which do not depend on each other
//
// For each token, with u = x for Mamba-2, and for the delta rule u = strength * (x - k (decay * S)):
//
//     S = decay * S + k u;  o = q S
//
// A decay is one number, or one for each row of S (Kimi Delta Attention).

#pragma once

#include <cstdint>

namespace jpaged::recurrence {

constexpr int64_t kVectors = 2;  // of a strip

// The tokens of a row in one head, and a strip of its state.
struct Strip {
  const float* from;  // the state before the tokens; null for zeros
  float* to;          // after them
  int64_t from_stride, to_stride, depth, num_columns;
  const float *q, *k, *x, *decays, *strengths;  // of the first token
  float* o;
  int64_t key_stride, value_stride, decay_stride, strength_stride, num_tokens;  // strides are those of tokens
};

struct Rule {
  bool is_delta;
  bool is_wide;  // each row of the state has its own decay
};

// The recurrence compiled for one kind of processor.
struct Core {
  const char* name;
  int64_t width;  // floats of a vector
  // Scratch has depth * kVectors * width floats.
  void (*run)(const Strip&, float* scratch, Rule);
};

}  // namespace jpaged::recurrence
